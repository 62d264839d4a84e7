"""What of a model is in this rank's memory, by what it is for: now, and over the time of a trace."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from dshard.inspection.explain import inner_tensors, shard_bytes
from dshard.tensor import ShardedTensor
from dshard.units.context import ModelContext

CATEGORIES = {
    "parameters": "shards of parameters, and parameters that are not sharded",
    "gradients": "that have arrived, in `.grad`",
    "states": "of the optimizers that were given",
    "buffers": "of the model",
    "gathered": "full values of parameters",
    "activations": "that autograd keeps for backward, seen by traces with `memory=True`",
    "on their way": "buffers that gathers and reductions have taken from the pool, without the above",
    "pool": "that the pool keeps for the next gathers and reductions",
    "other": "what else the device's allocator has given out: activations, most of all",
}


@dataclass(frozen=True, slots=True)
class MemorySample:
    """What is in this rank's memory at one time.

    Attributes:
        at_s: Seconds since the trace began.
        num_bytes: By category, as of `report`; None where nobody knows.
    """

    at_s: float
    num_bytes: dict[str, int | None]

    @property
    def total_bytes(self) -> int:
        """Of all categories that are known."""
        return sum(num or 0 for num in self.num_bytes.values())


class _Saved:
    """A tensor that autograd keeps, counted as long as it does."""

    __slots__ = ("_activations", "_key", "tensor")

    def __init__(self, tensor: Tensor, activations: "Activations", key: int) -> None:
        self.tensor, self._activations, self._key = tensor, activations, key

    def __del__(self) -> None:
        self._activations.drop(self._key)


class Activations:
    """Bytes that autograd keeps for backward, each memory once: what the hooks around saved tensors are shown.

    Hooks that a program opens within are shown their tensors instead (a checkpoint's, `save_on_cpu`): those count as
    they are kept, if they are.

    Args:
        params: Their memory is no activation's.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = {p.untyped_storage()._cdata for p in params if not isinstance(p, ShardedTensor)}
        self._alive: dict[int, list[int]] = {}  # by storage: how many refer to it, and its bytes

    @property
    def num_bytes(self) -> int:
        """That are kept now."""
        return sum(size for _, size in list(self._alive.values()))

    def hooks(self) -> AbstractContextManager[Any]:
        """A context in which what autograd keeps is counted."""
        return saved_tensors_hooks(self._pack, lambda kept: kept.tensor if isinstance(kept, _Saved) else kept)

    def _pack(self, tensor: Tensor) -> Any:
        if isinstance(tensor, ShardedTensor) or tensor.is_meta:
            return tensor
        try:
            storages = [each.untyped_storage() for each in inner_tensors(tensor)]
        except (RuntimeError, NotImplementedError):  # sparse ones, and those of transforms, have none to be seen
            return tensor
        if not storages or storages[0]._cdata in self._params:
            return tensor
        key = storages[0]._cdata
        self._alive.setdefault(key, [0, sum(storage.nbytes() for storage in storages)])[0] += 1
        return _Saved(tensor, self, key)

    def drop(self, key: int) -> None:
        """A tensor of this memory is kept no longer."""
        known = self._alive[key]
        known[0] -= 1
        if not known[0]:
            del self._alive[key]


class Memory:
    """The bytes of a model on this rank, by category.

    Args:
        model: Sharded.
        contexts: Of the model.
        optimizer: Of whose states to tell, or several, or None.
        activations: That are counted, if they are.
    """

    def __init__(
        self,
        model: nn.Module,
        contexts: Sequence[ModelContext],
        optimizer: Any = None,
        activations: Activations | None = None,
    ) -> None:
        self._model, self._contexts, self._activations = model, contexts, activations
        self.optimizers: list[Optimizer] | None = None
        if optimizer is not None:
            self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)

    def now(self) -> dict[str, int | None]:
        """Bytes by category; None where nobody knows. Communicates nothing."""
        copies = [c for context in self._contexts for unit in context.units for c in {unit.copies, unit.exact}]
        buffers = {id(buffer): buffer for each in copies for buffer in each.memories}
        once = [c.host_copies for c in copies if c.host_copies is not None]
        gathered = sum(buffer.memory.numel() for buffer in buffers.values()) + sum(h.bytes_beside() for h in once)
        pools = {id(context.pool): context.pool for context in self._contexts}.values()
        in_pools = {id(buffer) for buffer in buffers.values() if buffer.is_in_use}
        on_way = sum(pool.out_bytes for pool in pools) - sum(buffers[key].memory.numel() for key in in_pools)
        states = [v for each in self.optimizers or () for state in each.state.values() for v in tree_iter(state)]
        params = list(self._model.parameters())
        num_bytes: dict[str, int | None] = {
            "parameters": bytes_of(params),
            "gradients": bytes_of((p.grad for p in params), in_flight=False),
            "states": None if self.optimizers is None else bytes_of(states),
            "buffers": bytes_of(self._model.buffers()),
            "gathered": gathered,
            "activations": None if self._activations is None else self._activations.num_bytes,
            "on their way": on_way,
            "pool": sum(pool.kept_bytes for pool in pools),
        }
        devices = (unit.device for context in self._contexts for unit in context.units if unit.device is not None)
        num_bytes["other"] = _others(next(devices, None), num_bytes)
        return num_bytes


def bytes_of(values: Iterable[Any], *, in_flight: bool = True) -> int:
    """Bytes of tensors on this rank, each memory once; shards in flight by their layouts, or not at all."""
    seen: dict[int, int] = {}
    coming = 0
    for value in values:
        tensor = value.shard_storage.tensor if isinstance(value, ShardedTensor) else value
        if tensor is None and isinstance(value, ShardedTensor):
            coming += shard_bytes(value) if in_flight else 0
        elif isinstance(tensor, Tensor) and not tensor.is_meta:
            seen |= {each.data_ptr(): each.nbytes for each in inner_tensors(tensor) if each.numel()}
    return coming + sum(seen.values())


def _others(device: torch.device | None, known: dict[str, int | None]) -> int | None:
    """What else an accelerator's allocator has given out."""
    if device is None or device.type != "cuda":
        return None
    return torch.cuda.memory_allocated(device) - sum(num or 0 for num in known.values())
