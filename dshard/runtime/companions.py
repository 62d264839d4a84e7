"""What other libraries ask of a sharded module."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext

from dshard.tensor import ShardedTensor


class _ManagedModule:
    """True to whoever asks whether a module is managed by FSDP, except to dynamo.

    Of a module that is, dynamo takes FSDP1's flat parameters for granted and refuses to trace it. Code that it traces
    reads the module as any other code does, and gets True.
    """

    def __bool__(self) -> bool:
        return torch.compiler.is_dynamo_compiling() or TracingContext.try_get() is None


_MANAGED = "_is_fsdp_managed_module"


def say_managed(root: nn.Module) -> None:
    """Have a module, and all below it, say that they are sharded, as FSDP2's do.

    Transformers asks modules for this attribute. Then `generate` compares over the ranks, at each token, whether all
    sequences have ended, and encoders run the layers that `layerdrop` drops on some ranks alone, without their results.
    """
    for module in root.modules():
        module.__dict__[_MANAGED] = _ManagedModule()


def say_unmanaged(root: nn.Module) -> None:
    """Take that back."""
    for module in root.modules():
        module.__dict__.pop(_MANAGED, None)


class DataParallelNames:
    """Names that wrappers and trainers written for DDP and FSDP1 look for, and that FSDP2's class has not."""

    @property
    def _ddp_params_and_buffers_to_ignore(self: Any) -> list[str]:
        """DDP reads it: sharded parameters are reduced already, and what is left, if anything, is DDP's."""
        return [name for name, p in self.named_parameters(remove_duplicate=False) if isinstance(p, ShardedTensor)]

    @contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        """Let backwards inside of the scope add gradients up without reducing them; the next backward outside does.

        Communicates:
            Nothing. Reading such a gradient reduces it.
        """
        before = {unit: unit.settings.requires_sync for unit in self._units(recurse=True)}
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit in self._units(recurse=True):
                unit.change(requires_sync=before.get(unit, True))


class AcceptedHints:
    """Methods of FSDP2's that have nothing to do here."""


def _accepted(name: str, why: str) -> Callable[..., None]:
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    method.__name__, method.__doc__ = name, f"Accepted for FSDP2's sake, does nothing: {why}."
    return method


_ACCEPTED = {
    "set_is_last_backward": "each backward ends what it began",
    "set_unshard_in_backward": "a unit is gathered in backward only if it is touched there",
    "set_force_sum_reduction_for_comms": "how a mean is computed is the backend's matter",
    "set_reduce_scatter_unused_params": "parameters that only some ranks use are always reduced within a unit",
    "set_allocate_memory_from_process_group_for_comm": "a hint for NCCL, which is not taken yet",
    "set_symm_mem_for_comm": "a hint for NCCL, which is not taken yet",
    "set_post_optim_event": "a gather waits for the writes to its shards by itself",
    "_set_unshard_async_op": "a private switch of torch's",
}
for _name, _why in _ACCEPTED.items():
    setattr(AcceptedHints, _name, _accepted(_name, _why))
