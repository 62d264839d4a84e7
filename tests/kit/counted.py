"""Bytes of all tensors that are alive on a rank while it trains, counted storage by storage."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_iter

from dshard.collectives import Buffer, BufferPool, HostValues
from dshard.collectives.host import arena as host_arena
from dshard.collectives.host.arena import Arena
from dshard.optimizer.owners import Owners
from dshard.planner.steps import pieces_of
from dshard.tensor import ShardedTensor


def _is_others(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory that another process shares."""
    at = tensor.untyped_storage().data_ptr()
    mapped = list(host_arena._Known.others.values())
    return any(each.address <= at < each.address + each.num_bytes for each in mapped)


def _size_of(ref: StorageWeakRef) -> int | None:
    """Bytes of a storage, which may have been resized since; None where nobody holds it."""
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return None if storage is None else storage.nbytes()


class CountedPeak(TorchDispatchMode):
    """The bytes that are alive, and the most that were at one time.

    What counts: the storage of each tensor that an operation made, of each buffer of a collective, and of what was
    given at the start; of full values that a host has once, this rank's part. What does not: memory that a pool keeps
    for another use, what a kernel takes and frees inside, and what peers have put out, which counts as theirs.

    Args:
        host_copies: What the host has once.
    """

    def __init__(self, host_copies: Sequence[HostValues] = ()) -> None:
        super().__init__()
        self._host_copies = host_copies
        self.pools = weakref.WeakSet[BufferPool]()  # that have given out memory since
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._most_bytes = 0  # that may be alive: what was counted last, and all that came since
        self.num_bytes = 0  # at the peak

    def note(self, value: Any, *, is_new: bool = False) -> None:
        """Count the memory of a tensor, as long as anybody holds it; `is_new` if it was known, but idle until now."""
        if isinstance(value, ShardedTensor):
            value = value.shard_storage.resolve()
        if not isinstance(value, Tensor) or value.is_meta:
            return
        if is_traceable_wrapper_subclass(value):  # a DTensor: its part on this rank
            for piece in pieces_of(value):
                self.note(piece, is_new=is_new)
            return
        storage = value.untyped_storage()
        num_bytes, known = storage.nbytes(), self._alive.get(storage._cdata)
        is_known = known is not None and known[1] == num_bytes and not known[0].expired()
        if num_bytes and (is_new or not is_known) and not _is_others(value):
            self._alive[storage._cdata] = StorageWeakRef(storage), num_bytes
            self._most_bytes += num_bytes

    def alive_bytes(self) -> int:
        """Bytes that are alive now."""
        self._alive = {key: (ref, size) for key, (ref, _) in self._alive.items() if (size := _size_of(ref)) is not None}
        idle = sum(self._alive.get(key, (None, 0))[1] for key in self._idle() | self._maps())
        self._most_bytes = sum(num_bytes for _, num_bytes in self._alive.values()) - idle
        self._most_bytes += sum(copies.bytes_beside for copies in self._host_copies)
        return self._most_bytes

    def _idle(self) -> set[int]:
        """The storages that pools keep, or may take back."""
        return {memory.untyped_storage()._cdata for pool in self.pools for memory in pool.idle()}

    def _maps(self) -> set[int]:
        """The storages that map full values which a host has once."""
        made = [each for copies in self._host_copies for each in copies._made]
        tensors = [part for each in made for part in each._parts if part is not None]
        tensors += [each._window.places.fulls[0] for each in made if each._window is not None]
        return {tensor.untyped_storage()._cdata for tensor in tensors}

    def sample(self) -> None:
        """Look whether there are more bytes than ever."""
        if self._most_bytes > self.num_bytes:
            self.num_bytes = max(self.num_bytes, self.alive_bytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, ShardedTensor) or is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # it is taken apart first, and what its shards do comes here
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            self.note(value)
        self.sample()
        return out


def _states_of(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """What an optimizer keeps on this rank: of what owners step whole tensors, where this rank is the owner."""
    owners: Owners | None = vars(optimizer).get("_dshard_owners")
    for param, states in optimizer.state.items():
        holding = owners.holdings.get(id(param)) if owners is not None else None
        if holding is not None and holding.is_held:
            yield from holding.tensors.values()
        else:
            yield from tree_iter(states)


@contextmanager
def counted_peak(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Iterator[CountedPeak]:
    """Count the most bytes that are alive on this rank at one time within the block: `num_bytes` of what it gives.

    Best after a step or two, when what is gathered ahead is known. An operation takes several times as long meanwhile.

    Args:
        model: Sharded or not. Its parameters, gradients, buffers and gathered copies count from the start.
        optimizers: Their states count from the start.

    Communicates:
        Nothing; gradients that are on their way are waited for.
    """
    units = {u for m in model.modules() for u in vars(m).get("_dshard_units", ())}
    host_copies = [unit.copies.host_values for unit in units if unit.copies.host_values is not None]
    counted, take = CountedPeak(host_copies), BufferPool.take

    def take_counted(
        self: BufferPool, num_bytes: int, device: torch.device, arena: Arena | None = None, **how: Any
    ) -> Buffer:
        buffer = take(self, num_bytes, device, arena, **how)
        counted.pools.add(self)
        counted.note(buffer.memory, is_new=True)
        counted.sample()
        return buffer

    for value in (*model.parameters(), *model.buffers(), *(param.grad for param in model.parameters())):
        counted.note(value)
    for value in chain.from_iterable(map(_states_of, optimizers)):
        counted.note(value)
    for unit in units:
        for copies in (unit.copies, unit.exact):
            for buffer in copies.memories:
                counted.note(buffer.memory)
    BufferPool.take = take_counted  # type: ignore[method-assign]
    try:
        with counted:
            yield counted
    finally:
        BufferPool.take = take  # type: ignore[method-assign]
