"""Parameters that are not kept where they are used, and what descends from them."""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from dshard.collectives import ShardGroup
from dshard.interpreter import module_that_called
from dshard.tensor.mixed import MixedShardedTensor
from dshard.tensor.shard_storage import ShardStorage
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.views import empty_of

_DEVICE: Any = torch.Tensor.device  # descriptor; autograd and torch's own code go by it


class OffloadedShardedTensor(MixedShardedTensor):
    """A sharded tensor of which the shard is in one place, its home, and the full value in another: that of its mesh.

    Gradients, optimizer states, views and copies of an offloaded parameter are of this class too. To autograd all of
    them are on the compute device: it checks gradients against what they are of, and chooses streams by it. To programs
    they are at home, as under FSDP2; but a parameter is on the compute device in the forward of a sharded module.
    """

    __slotnames__: ClassVar[list[str]] = ShardedTensor.__slotnames__  # which `swap_tensors` reads of the very class
    num_made: ClassVar[int] = 0  # in this process: programs without offload need not look for it
    _home_device: torch.device  # while the shard is in flight

    @classmethod
    def wrap(
        cls,
        storage: ShardStorage,
        spec: DTensorSpec,
        group: ShardGroup,
        *,
        prototype: Tensor | None = None,
        **options: Any,
    ) -> Self:
        """Make one around a shard; `prototype` is a plain tensor at home."""
        local = prototype if prototype is not None else storage.resolve()
        away = local if local.is_meta else empty_of(local.dtype, group.device)
        out = super().wrap(storage, spec, group, prototype=away, **options)
        out.__dict__["_home_device"] = local.device
        OffloadedShardedTensor.num_made += 1
        return out

    @property
    def storage_device(self) -> torch.device:
        """The device of its shard: its home."""
        shard = self.shard_storage.tensor
        return self._home_device if shard is None else shard.device

    def _device_here(self) -> torch.device:
        """The device of its value where it is used now.

        Activation checkpointing asks in the forward, and again once a recomputation is over: it is told the same.
        """
        source: Any = self.gather_source
        is_away = source is not None and (source.is_running or module_that_called() == "torch.utils.checkpoint")
        found: torch.device = _DEVICE.__get__(self) if is_away else self.storage_device
        return found

    device: Any = property(_device_here)
    is_cuda: Any = property(lambda self: self.device.type == "cuda")
    is_cpu: Any = property(lambda self: self.device.type == "cpu")


OffloadedShardedTensor.kin = OffloadedShardedTensor
SHARDED.add(OffloadedShardedTensor)
