"""The shard of a tensor: in memory or in flight, written to, gathered by its source, and copied with others."""

import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import FrameType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from dshard.collectives import is_storage_held
from dshard.errors import StateError
from dshard.interpreter import is_on_stack, is_referred_to
from dshard.layout import ShardLayout
from dshard.policies import Precision
from dshard.tensor.meshes import group_of, note_groups, place_among_ranks, tp_layout_of
from dshard.tensor.views import View


class _Step:
    """The frame in which the step of an optimizer runs, if one does.

    A step that raised leaves its frame here; so the frame counts only while it is on the stack of the caller.
    """

    frame: ClassVar[FrameType | None] = None
    graph_task: ClassVar[int] = -1


def begin_step(frame: FrameType) -> None:
    """An optimizer steps, in a frame."""
    _Step.frame = frame
    _Step.graph_task = torch._C._current_graph_task_id()


def end_step() -> None:
    """The optimizer has stepped."""
    _Step.frame = None


def is_in_step() -> bool:
    """Whether the caller runs inside of a step that has begun, be it in its closure."""
    return _Step.frame is not None and is_on_stack(_Step.frame)


def is_stepping() -> bool:
    """Whether the caller runs inside of `Optimizer.step`, and not in the forward or backward of its closure."""
    if _Step.frame is None or torch.is_grad_enabled() or torch._C._current_graph_task_id() != _Step.graph_task:
        return False
    if is_on_stack(_Step.frame):
        return True
    _Step.frame = None
    return False


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
        for tensor in tensors_in(args[:1]):  # where results go, in all of them; their schemas do not say so
            for storage in set(_Exposed.storages.values()):
                if storage.tensor is not None and _overlap(tensor, storage.tensor):
                    storage.note_collective()
        return result

    return run


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """The items of some values, of lists and tuples in them too."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flat(value)
        else:
            yield value


def tensors_in(values: Iterable[Any]) -> Iterator[Any]:
    """The tensors among the items of some values."""
    return (value for value in flat(values) if isinstance(value, Tensor))


def kinds_of_tensors(values: Iterable[Any]) -> set[type[Tensor]]:
    """The classes of these tensors, of long lists without a look at each item in Python."""
    kinds = set(map(type, values))
    found = {kind for kind in kinds if issubclass(kind, Tensor)}
    if any(issubclass(kind, (list, tuple)) for kind in kinds):
        found.update(*(kinds_of_tensors(value) for value in values if isinstance(value, (list, tuple))))
    return found


def _overlap(tensor: Tensor, shard: Tensor) -> bool:
    """Whether two tensors have some memory in common."""
    if tensor.untyped_storage()._cdata != shard.untyped_storage()._cdata:
        return False
    start, other = tensor.data_ptr(), shard.data_ptr()
    return start < other + shard.nbytes and other < start + tensor.nbytes


_MOVES = threading.RLock()  # of shards from one memory to another, while a thread may come for one


def _renew_lock() -> None:
    """In a forked process the thread that held it is gone."""
    global _MOVES  # noqa: PLW0603
    _MOVES = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class Home(Protocol):
    """Memory in which shards lie that others may read.

    Args:
        thread: That which gathered last, and may be writing.
    """

    thread: int

    def is_quiet(self) -> bool:
        """Whether nobody reads now, nor before this rank lets them."""

    def make_quiet(self) -> bool:
        """Wait for a while until nobody reads; gives whether it came to that."""


class Norms(NamedTuple):
    """What was computed of a shard where it was reduced, before it was copied to where it is.

    Args:
        version: Writes to the shard, when it was delivered.
        float32: Its 2-norm in fp32, as a 0-d tensor of fp64.
        float64: The same, in fp64.
    """

    version: int
    float32: Tensor
    float64: Tensor


class DeferredStep:
    """The step of an optimizer that runs in another thread; shards that it reads or writes await it."""

    def wait(self) -> None:
        """Wait until it has ended; may be called by any thread."""
        raise NotImplementedError

    def __call__(self, storage: "ShardStorage") -> None:
        """As what a shard awaits that another one is then added to."""
        self.wait()


@dataclass(frozen=True, slots=True)
class Scaling:
    """A multiplication that the first use of a shard does, or the deferred step that takes it: at most one of these.

    Args:
        factor: 0-d, where the shard is.
    """

    factor: Tensor

    def __call__(self, storage: "ShardStorage") -> None:
        """Do it."""
        with torch.no_grad():
            torch._foreach_mul_([storage.writable()], self.factor)


class HomeRow:
    """Memory in which reduced gradients came home, and who has one of them.

    Args:
        memory: All of it.

    Attributes:
        users: Deferred steps that have not ended, and read some.
        is_exposed: A program was given one as a plain tensor, and may have it still.
    """

    __slots__ = ("__weakref__", "_members", "is_exposed", "memory", "users")

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self.memory, self.is_exposed = memory, False
        self.users: list[object] = []
        self._members: list[weakref.ref[ShardStorage]] = []

    def add(self, storage: "ShardStorage") -> None:
        """A shard lies in it."""
        storage.home_row = self
        self._members.append(weakref.ref(storage))

    def is_free_for(self, user: object) -> bool:
        """Whether nobody but one user has any of the gradients, or ever gets one."""
        is_alone = all(each is user for each in self.users)
        return is_alone and not self.is_exposed and all(member() is None for member in self._members)


@dataclass(eq=False, repr=False)  # without slots, for most of what it may know is never set: one is made per gradient
class ShardStorage:
    """Holds one shard; shared by a ShardedTensor and its detached aliases.

    Args:
        tensor: The shard, or None while it is in flight.
        layout: How the full tensor is cut. A temporary that is written with this rank's own data becomes whole.
        _pending: Called with this storage at the first use; must leave a tensor in it.
        is_shared: Whether it belongs to a parameter, a gradient or an optimizer's state, to which all ranks write the
            same values; else to a temporary, which a rank may fill with data of its own.
    """

    tensor: Tensor | None
    layout: ShardLayout
    _pending: "Callable[[ShardStorage], None] | None" = None
    is_shared: bool = field(default=False, kw_only=True)
    standin: Tensor | None = field(default=None, init=False)  # the shard as an optimizer sees it, while it is held here
    is_retired: bool = field(default=False, init=False)  # the shard is elsewhere now
    is_reduced: bool = field(default=False, init=False)  # it is a gradient that all ranks have added up, on its way
    tag: int = field(default=0, init=False)
    num_writes: int = field(default=0, init=False)
    home: Home | None = field(default=None, init=False)  # where the shard lies, if others may read it there
    is_exposed: bool = field(default=False, init=False)  # somebody was given it who may write without being counted
    before_write: Callable[[], None] | None = field(default=None, init=False)  # waits for a gather that reads the shard
    is_stepped_later: bool = field(default=False, init=False)  # a gradient that most often awaits a deferred step
    home_row: HomeRow | None = field(default=None, init=False)  # in which it came home, if it is a gradient
    norms: "Norms | None" = field(default=None, init=False)  # of the shard, as it was delivered
    _awaited: "tuple[ShardStorage, ...]" = field(default=(), init=False)

    @property
    def is_pending(self) -> bool:
        """Whether the shard still awaits a collective or an addition."""
        return self._pending is not None

    def does_await(self, pending: "Callable[[ShardStorage], None]") -> bool:
        """Whether the shard was handed over to `pending`, and nobody has used it since."""
        return self._pending is pending

    @property
    def is_in_flight(self) -> bool:
        """Whether it awaits a collective or an addition; not what a program could write to meanwhile."""
        return self._pending is not None and not isinstance(self._pending, (DeferredStep, Scaling))

    def note_write(self) -> None:
        """The shard was written to, by all ranks: gathered copies are stale, and the next gather compares the count.

        A step of an optimizer counts once for all of its writes, when it ends: how many there are depends on its path.
        """
        if not is_stepping():
            self.num_writes += 1
        torch.autograd.graph.increment_version(self.resolve())

    def note_collective(self) -> None:
        """A collective of the program's own has written to the shard: gathered copies are stale.

        How it was written before does not count any more: the ranks may be equal again that were not.
        """
        self.tag = self.num_writes = 0
        torch.autograd.graph.increment_version(self.resolve())

    @property
    def signature(self) -> tuple[int, int]:
        """What ranks compare at a gather: what was written, and how often."""
        return self.tag, self.num_writes

    def sign(self, *facts: object) -> None:
        """Take part in the tag what the shard was written with, for ranks to compare at the next gather.

        Args:
            facts: Numbers and indices, and tags of other storages; nothing is signed where all are empty or zero.
        """
        if any(facts):
            self.tag = zlib.crc32(repr((self.tag, facts)).encode())

    @property
    def version(self) -> int:
        """Counts the writes to the shard, ours and those to `to_local()` by others; some of ours twice."""
        return int(self.resolve()._version) + self.num_writes

    def resolve(self) -> Tensor:
        """The shard, after waiting for what it awaits."""
        if self._pending is not None:
            pending, awaited = self._pending, self._awaited
            if isinstance(pending, DeferredStep):
                pending.wait()  # while other threads see that they have to
                if self._pending is pending:
                    self._pending = None
                return self.resolve()
            self._pending, self._awaited = None, ()
            try:
                pending(self)
            except BaseException:
                self._pending, self._awaited = pending, awaited
                raise
        assert self.tensor is not None, "a pending shard was not delivered"
        return self.tensor

    def begin_await(self, pending: DeferredStep | Scaling) -> None:
        """Have whoever uses the shard, which is in memory, wait for a step first, or do what was put off."""
        self._pending = pending

    def scale_later(self, factor: Tensor) -> None:
        """Count a multiplication, which is done when somebody uses the shard."""
        self.writable()
        self.note_write()
        self._pending = Scaling(factor)

    def take_scaling(self) -> Scaling | None:
        """What `scale_later` has left to be done, to be done by the caller."""
        scaling = self._pending
        if not isinstance(scaling, Scaling):
            return None
        self._pending = None
        return scaling

    def known_norm(self, dtype: torch.dtype, order: float) -> Tensor | None:
        """A norm of the shard that need not be computed again: nobody can have written to it since it was reduced.

        Args:
            dtype: In which it is computed, fp32 or fp64.
            order: Of the norm; that of order 2 may be known.
        """
        shard, norms = self.resolve(), self.norms
        if order != 2.0 or norms is None or self.is_exposed or norms.version != shard._version:
            return None
        return norms.float64 if dtype == torch.float64 else norms.float32.float()

    def writable(self) -> Tensor:
        """The shard, to be written to now: elsewhere from here on, if somebody may read it where it lies."""
        shard = self.resolve()
        self._await_reader()
        if self.home is not None and not self.home.is_quiet() and not self.home.make_quiet():
            self.leave_home()
        return shard

    def exposed(self) -> Tensor:
        """The shard, for somebody who may write to it at any time, and will not ask.

        In another thread than that which may be writing, and moves it: a tensor of its own there, to be read.
        """
        shard = self.resolve()
        self._await_reader()
        watch_shard(self)
        with _MOVES:
            if self.home is not None and self.home.thread != threading.get_ident():
                return shard.detach()
            self.is_exposed = True
            if self.home_row is not None:
                self.home_row.is_exposed = True
            if self.home is not None:
                self.leave_home()
        return shard

    def _await_reader(self) -> None:
        """Come behind what reads the shard on a device, where that is told."""
        wait, self.before_write = self.before_write, None
        if wait is not None:
            wait()

    def readable(self) -> Tensor:
        """The shard, to be read at once, in any thread."""
        shard = self.resolve()
        with _MOVES:  # who has it by now keeps it from being moved
            if self.home is None or self.home.thread == threading.get_ident():
                return shard
            return shard.detach()

    def come_home(self, memory: Callable[[Tensor], Tensor], home: Home) -> bool:
        """Lie in memory that others may read, unless somebody holds the shard; gives whether it does.

        Args:
            memory: Puts values there, and gives it.
            home: Of that memory.
        """
        with _MOVES:
            if self.is_exposed or self.is_held(own_refs=0, storage_refs=1):
                return False
            self.resolve().data, self.home, self.standin = memory(self.resolve()), home, None
        return True

    def leave_home(self) -> None:
        """Lie in memory of this rank's own again."""
        shard = self.resolve()
        with _MOVES, torch.inference_mode(mode=False):  # whose tensors have no version
            shard.data = shard.detach().clone()
            self.home = self.standin = None

    def is_held(self, *, own_refs: int, storage_refs: int) -> bool:
        """Whether somebody else refers to the shard or its memory, who would not follow it to another place.

        Args:
            own_refs: References to the tensor that the caller knows of, besides the storage's.
            storage_refs: References to its memory that the caller knows of.
        """
        tensor, self.standin = self.resolve(), None
        return (
            is_referred_to(tensor, own_refs + 1)  # by the storage
            or is_storage_held(tensor, num_tensors=storage_refs)
        )

    def deliver(self, tensor: Tensor) -> None:
        """Put the shard that was awaited, or another one, in place."""
        self.tensor, self.standin, self.home, self.norms, self.home_row = tensor, None, None, None, None
        if not self._awaited:
            self._pending = None

    def hand_over(self, pending: "Callable[[ShardStorage], None]") -> None:
        """Let go of the shard: whoever uses it awaits it from somewhere else."""
        self.tensor = self.standin = self.home = self.norms = self.home_row = None
        self._pending, self._awaited, self.is_exposed = pending, (), False

    def retire(self, why: Exception) -> None:
        """Let go of the shard, which is elsewhere now; every later use raises."""

        def refuse(storage: "ShardStorage") -> None:
            raise why

        self.tensor = self.standin = self.home = None
        self._pending, self._awaited = refuse, ()
        self.is_retired = True

    def awaits(self, other: "ShardStorage") -> bool:
        """Whether the shard of `other` is this one, or will be added to it."""
        return other is self or any(other is storage for storage in self._awaited)

    def add_later(self, other: "ShardStorage") -> None:
        """Add a shard that is in flight, once one of the two is used."""
        before = self._pending

        def add(storage: ShardStorage) -> None:
            added = other.resolve()  # ahead of all else: if it raises, nothing has happened
            if before is not None:
                before(storage)
            assert storage.tensor is not None
            storage.writable().add_(added)
            torch.autograd.graph.increment_version(storage.tensor)

        self._pending = add
        self._awaited = (*self._awaited, other)
        own, before_write = weakref.ref(self), other.before_write

        def settle() -> None:
            if before_write is not None:
                before_write()
            if (storage := own()) is not None:
                storage.resolve()

        other.before_write = settle  # what is added is what it is now


_PENDING_OF, _TENSOR_OF = attrgetter("_pending"), attrgetter("tensor")
_SIGNATURE_OF = attrgetter("tag", "num_writes")


def shards_of(storages: Sequence[ShardStorage]) -> list[Tensor]:
    """The shards of some storages, after waiting for what they await."""
    if any(map(_PENDING_OF, storages)):
        return [storage.resolve() for storage in storages]
    return list(map(_TENSOR_OF, storages))


def signatures_of(storages: Iterable[ShardStorage]) -> tuple[tuple[int, int], ...]:
    """The signatures of some storages."""
    return tuple(map(_SIGNATURE_OF, storages))


@dataclass(slots=True, eq=False)
class Use:
    """The use of full values by one operation. Nobody writes to a shard while its operands are gathered.

    Args:
        operands: What the operation was given.
        fresh: The gathered copies that were last found fresh for it.
    """

    operands: tuple[Any, ...]
    fresh: object = None


class GatherSource(Protocol):
    """What keeps gathered copies: a unit."""

    params: list[Any]  # ShardedTensors
    num_active: int  # forwards of its modules that are running

    @property
    def is_running(self) -> bool:
        """Whether any forward of its model runs."""

    @property
    def is_recomputed(self) -> bool:
        """Whether a part of a forward in which it was unsharded runs again by itself, in backward."""

    def full(self, slot: int, view: View | None = None, use: Use | None = None) -> Tensor:
        """The full value of the unit's parameter number `slot`, or a view of it, gathered if need be, for a use."""

    def full_in(self, slot: int, dtype: torch.dtype, use: Use | None = None) -> Tensor:
        """The full value in a given dtype, converted from the one that the parameter is kept in."""

    def compute_dtype(self, slot: int) -> torch.dtype | None:
        """The dtype of a parameter in the forward that is running, if that is not the one it is kept in."""

    def computes(self, slot: int, use: Use | None = None) -> bool:
        """Whether a use of a parameter here means its value in the compute dtype."""

    def unsharded_again(self, slot: int) -> Tensor | None:
        """What a parameter is in a part of a forward, in which it was a full tensor, that runs again; else None."""

    def pinned(self, slot: int) -> Tensor | None:
        """The full value of a parameter, if an open `gathered` scope holds it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The tensor of which another is a cast or copy, for as long as neither was written to since."""

    tensor: Any  # a ShardedTensor
    storage: ShardStorage
    version: int
    own_version: int

    def holds_for(self, copy: Any) -> bool:
        """Whether neither was written to, nor swapped for another tensor."""
        return (
            self.tensor is not copy  # a swap of tensors can make it so
            and self.tensor.shard_storage is self.storage
            and not self.storage.is_retired
            and self.storage.version == self.version
            and copy.shard_storage.version == self.own_version
        )


def is_used_away(compute: torch.device, use: Use | None) -> bool:
    """Whether an operation's other operands are on a compute device, or autograd records it, or runs it."""
    if use is None:
        return False
    operands = [x for arg in use.operands for x in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    tensors = [x for x in operands if isinstance(x, Tensor)]
    if any(x.device == compute for x in tensors if x.dim()):
        return True
    is_recorded = torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
    return is_recorded and any(x.requires_grad for x in tensors)


def rejoin_source(tensor: Any) -> None:
    """Have a cast or copy that `module.to(...)` swapped into a parameter's place belong to that one's unit."""
    unit, slot = tensor.swapped_source
    if unit.params[slot] is tensor:
        tensor.gather_source, tensor.gather_slot = unit, slot
        # The hook is that of another object, and the origin is the tensor itself, with memory that it has no more.
        tensor.swapped_source = tensor.grad_hook_handle = tensor.origin = None


def rebuild(
    cls: Any,
    shard: Tensor,
    spec: DTensorSpec,
    layout: ShardLayout,
    name: str,
    requires_grad: bool,
    is_param: bool,
    precision: Precision | None,
    own_place: tuple[DeviceMesh, int | None] | None = None,
    held_by: tuple[tuple[int, int], ...] | None = None,
) -> Any:
    """Make a ShardedTensor of what a pickle holds of one.

    Raises:
        StateError: Another rank has written it, with another shard.
    """
    tp = tp_layout_of(layout)
    mesh = spec.mesh if tp is None else tp.data_mesh
    note_groups(mesh)
    group = group_of(mesh)
    out = cls.wrap(ShardStorage(shard, layout, is_shared=True), spec, group, name=name)
    if held_by is not None and held_by != (here := place_among_ranks(out)):
        written, read = (", ".join(f"rank {rank} of {size}" for rank, size in each) for each in (held_by, here))
        raise StateError(
            f"{name}: a pickled shard must be read by the rank that wrote it, but {written} did, and this is {read}. "
            "Write full_tensor() of it on all ranks, or use dshard.checkpoint.save or dshard.save_safetensors."
        )
    out.wire_precision, out.base_place = precision, own_place
    out.requires_grad_(requires_grad)
    if is_param:
        out._is_param = True
    return out
