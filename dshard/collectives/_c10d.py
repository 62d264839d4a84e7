"""The one file that names torch's collectives, whose names differ between releases.

The flat ones are called on the process group itself: torch's functions around them log and check each call anew, which
costs the host more than the call.
"""

import enum
import hashlib
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions as _AllGatherOptions
from torch._C._distributed_c10d import ReduceScatterOptions as _ReduceScatterOptions

ProcessGroup = dist.ProcessGroup
T = TypeVar("T")
Work = Any  # torch's Work; None where the backend finished at once


class ReduceOp(enum.Enum):
    """How values of several ranks become one: the value is torch's own."""

    SUM = dist.ReduceOp.SUM
    MEAN = dist.ReduceOp.AVG  # the backend's own, which not every backend has
    MAX = dist.ReduceOp.MAX
    MIN = dist.ReduceOp.MIN


WITH_MEANS = {"nccl"}  # backends that know `ReduceOp.MEAN`; on others sums are divided

HEADERS = 0x44530000  # tags that keep our point-to-point messages apart from the user's; payloads lie below

# By the identity of a group: each collective looks here, and a WeakKeyDictionary makes a weak reference at each look.
_KEPT: "dict[int, tuple[weakref.ref[ProcessGroup], dict[Any, Any]]]" = {}


def _forget(kept: dict[int, Any], number: int, gone: "weakref.ref[ProcessGroup]") -> None:
    """Let go of what was made for a group that is no more; names of this module may be gone by then."""
    known = kept.get(number)
    if known is not None and known[0] is gone:
        del kept[number]


def kept_for(group: ProcessGroup, key: Hashable, make: Callable[[], T]) -> T:
    """What `key` names among the things that are made once for a process group, and go with it."""
    known = _KEPT.get(id(group))
    if known is None or known[0]() is not group:
        known = _KEPT[id(group)] = weakref.ref(group, partial(_forget, _KEPT, id(group))), {}
    kept = known[1]
    if key not in kept:
        kept[key] = make()
    return kept[key]


def kept_for_all(key: Hashable) -> list[Any]:
    """What `key` names among the things of each process group that there is, where it was made."""
    return [kept[key] for _, kept in list(_KEPT.values()) if key in kept]


def is_initialized() -> bool:
    """Whether a default process group exists."""
    return bool(dist.is_available() and dist.is_initialized())


def default_backend() -> str:
    """Name of the default process group's backend."""
    return str(dist.get_backend()).lower()


def world_size() -> int:
    """Number of ranks of the default process group."""
    return int(dist.get_world_size())


def backend_of(group: ProcessGroup, device: torch.device) -> str:
    """Name of the backend that `group` uses for tensors on `device`, for example 'gloo' or 'nccl'."""
    name = str(dist.get_backend(group)).lower()
    if "," not in name and ":" not in name:
        return name
    by_device = dict(part.split(":") for part in name.split(","))
    return by_device.get(device.type, name)


def shared_store() -> Any:
    """The store of the default process group; None where no other process sees it."""
    store: Any = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    return store if isinstance(inner, (dist.TCPStore, dist.FileStore)) else None


def ranks_of(group: ProcessGroup) -> list[int]:
    """The ranks of a group, by their numbers in the world."""
    return dist.get_process_group_ranks(group)


def part_of_group(group: ProcessGroup, num_ranks: int) -> ProcessGroup:
    """The group of those `num_ranks` neighbours in `group` that this rank is one of; all of them must call this."""
    ranks = dist.get_process_group_ranks(group)
    start = group.rank() // num_ranks * num_ranks
    return _new_group(group, ranks[start : start + num_ranks], "neighbours")


def replicas_in_group(group: ProcessGroup, num_ranks: int) -> ProcessGroup:
    """The group of those ranks of `group` that stand where this one does among `num_ranks` neighbours."""
    ranks = dist.get_process_group_ranks(group)
    return _new_group(group, ranks[group.rank() % num_ranks :: num_ranks], "replicas")


def twin_of_group(group: ProcessGroup) -> ProcessGroup:
    """Another group of the ranks of `group`, made once; all of them must call this."""
    return kept_for(group, "twin", lambda: _new_group(group, dist.get_process_group_ranks(group), "twin"))


_MADE: Counter[tuple[str, str, str]] = Counter()  # groups of a parent, by the parent's name, the ranks, and what for


def _new_group(parent: ProcessGroup, ranks: list[int], purpose: str) -> ProcessGroup:
    """A group of some ranks of another one, with its backend and its timeout; those ranks alone must call this.

    Torch would derive the name from how many groups this process is in, but ranks may be in different numbers of them,
    and then wait for one another under different names.
    """
    key = parent.group_name, purpose, ",".join(map(str, ranks))
    _MADE[key] += 1
    text = "/".join(["dshard", *key, str(_MADE[key])])
    name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    c10d: Any = dist.distributed_c10d
    torchs_own, c10d._hash_ranks_to_str = c10d._hash_ranks_to_str, lambda _: name
    try:
        found: ProcessGroup = dist.new_group(
            ranks, timeout=timeout_of(parent), backend=dist.get_backend(parent), use_local_synchronization=True
        )
    finally:
        c10d._hash_ranks_to_str = torchs_own
    return found


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """How long a collective of a group waits for its peers; None where its backend does not say."""
    for device in group._device_types:
        found = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return None


def limit_of(group: ProcessGroup) -> tuple[timedelta, ...]:
    """What to pass to the wait for a message: gloo's waits as long as was set when the group was made, and no other."""
    timeout = timeout_of(group)
    return (timeout,) if timeout is not None else ()


def world_of(group: ProcessGroup) -> ProcessGroup:
    """The default process group, or this one where there is none."""
    return dist.distributed_c10d._get_default_group() if dist.is_initialized() else group


def take_timeout(group: ProcessGroup) -> None:
    """Give a group that waits as long as torch lets any, for nobody could say, the default process group's timeout.

    Torch's device meshes make such groups: whoever makes a mesh has no way to pass a timeout.
    """
    c10d: Any = dist.distributed_c10d
    own, default = timeout_of(group), timeout_of(c10d._get_default_group())
    of_torch = (c10d.default_pg_timeout, getattr(c10d, "default_pg_nccl_timeout", None))
    if own in of_torch and default not in (None, own):
        with warnings.catch_warnings():  # that other backends than gloo and NCCL take none
            warnings.simplefilter("ignore")
            c10d._set_pg_timeout(default, group)


def is_known(group: ProcessGroup) -> bool:
    """Whether a process group has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_group_ranks


def group_named(name: str) -> ProcessGroup:
    """The group of this process that has a name."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return resolve(name)


def send(tensor: Tensor, peer: int, tag: int, group: ProcessGroup) -> Work:
    """Start to send `tensor` to rank `peer` of `group`."""
    return group.send([tensor], peer, tag)


def receive(tensor: Tensor, peer: int, tag: int, group: ProcessGroup) -> Work:
    """Start to receive into `tensor` from rank `peer` of `group`."""
    return group.recv([tensor], peer, tag)


def all_gather_flat(out: Tensor, segment: Tensor, group: ProcessGroup) -> Work:
    """Start the backend's own all-gather of equal segments into `out`."""
    return getattr(group, _GATHER)(out, segment, _GATHER_OPTIONS)


def all_to_all_flat(out: Tensor, values: Tensor, into: list[int], parts: list[int], group: ProcessGroup) -> Work:
    """Start the backend's own exchange of `parts` of `values`, one for each rank, for parts `into` of `out`."""
    return dist.all_to_all_single(out, values, into, parts, group=group, async_op=True)


def reduce_scatter_flat(out: Tensor, buffer: Tensor, op: ReduceOp, group: ProcessGroup) -> Work:
    """Start the backend's own reduce-scatter of `buffer` into `out`."""
    return getattr(group, _SCATTER)(out, buffer, _SCATTER_OPTIONS[op])


def _options_of(kind: Any, op: ReduceOp | None = None) -> Any:
    """Options of a collective that nobody waits for at its start."""
    options = kind()
    options.asyncOp = True
    if op is not None:
        options.reduceOp = op.value
    return options


_GATHER_OPTIONS = _options_of(_AllGatherOptions)
_SCATTER_OPTIONS = {op: _options_of(_ReduceScatterOptions, op) for op in ReduceOp}
# Their names in 2.13, or in 2.11.
_GATHER = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"
_SCATTER = "reduce_scatter_single" if hasattr(ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"


def all_reduce_flat(tensor: Tensor, op: ReduceOp, group: ProcessGroup) -> Work:
    """Start the backend's own all-reduce of `tensor`, in place."""
    return dist.all_reduce(tensor, op=op.value, group=group, async_op=True)


def broadcast_flat(tensor: Tensor, src: int, group: ProcessGroup) -> Work:
    """Start a broadcast of `tensor` from rank `src` of `group`, in place."""
    return dist.broadcast(tensor, group=group, group_src=src, async_op=True)


def meet_anew() -> None:
    """Where this process is a restart on one host, have process groups use keys of this start alone."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restart == "0" or not has_agent_store or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return
    module: Any = sys.modules["torch.distributed.rendezvous"]  # its name in the package is that of its function
    handlers: Any = getattr(module, "_rendezvous_handlers", {})
    if "env" not in handlers:  # another torch, which may need none of this
        return
    torchs_own = handlers["env"]

    def env(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, size in torchs_own(*args, **kwargs):
            yield dist.PrefixStore(f"restart-{restart}", store), rank, size

    handlers["env"] = env
