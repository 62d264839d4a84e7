"""Collectives of a program's own that write to shards, as `torch.distributed.broadcast(param.to_local())` does.

Torch's collectives write to their tensors without counting it in the version counters, by which gathered copies are
found stale. So from the first `to_local()` on they are counted here, as any other write in place. What ranks send one
another may make equal again what they had written otherwise: of such shards it is not compared any more how they were
written.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

_OPERATIONS = (  # of the namespace c10d, that write to tensors of their callers; some are of one release of torch alone
    *("broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "scatter_", "recv_", "recv_any_source_"),
    *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "gather_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_"),
)


class _Exposed:
    """Storages of shards that programs were given, in this process; by the identity of the shard."""

    storages: ClassVar["weakref.WeakValueDictionary[int, Any]"] = weakref.WeakValueDictionary()
    library: ClassVar[torch.library.Library | None] = None


def watch_shard(storage: Any) -> None:
    """Notice collectives that write to the shard of a storage, which a program was given by `to_local()`."""
    _Exposed.storages[id(storage.tensor)] = storage
    if _Exposed.library is None:
        _Exposed.library = torch.library.Library("c10d", "IMPL")
        for name in _OPERATIONS:
            packet = getattr(torch.ops.c10d, name, None)
            if packet is not None:
                _Exposed.library.impl(name, _counting(packet.default), "ADInplaceOrView")


def note_write_to(shard: Tensor) -> None:
    """A compiled graph, which was given a shard, writes to it."""
    storage = _Exposed.storages.get(id(shard))
    if storage is not None and storage.tensor is shard:
        storage.note_write()


def _counting(operation: Any) -> Callable[..., Any]:
    """An operation that counts its writes to shards: in the place where torch counts those of others."""

    def run(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = operation(*args)
        for tensor in _tensors(args[:1]):  # where results go, in all of them; their schemas do not say so
            for storage in set(_Exposed.storages.values()):
                if storage.tensor is not None and _overlap(tensor, storage.tensor):
                    storage.note_collective()
        return result

    return run


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _overlap(tensor: Tensor, shard: Tensor) -> bool:
    """Whether two tensors have some memory in common."""
    if tensor.untyped_storage()._cdata != shard.untyped_storage()._cdata:
        return False
    start, other = tensor.data_ptr(), shard.data_ptr()
    return start < other + shard.nbytes and other < start + tensor.nbytes
