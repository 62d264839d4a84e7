"""Gathered copies of the parameters of a unit: when they are there, fresh, awaited, copied to and from a host."""

import enum
import weakref
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dshard import collectives
from dshard.autograd import in_backward, outside_autograd, profiled
from dshard.collectives import (
    Buffer,
    Gathered,
    GatherPlan,
    Handle,
    HostCopy,
    HostValues,
    MadeIn,
    SendRow,
    SideStream,
    shard_of,
)
from dshard.errors import StateError
from dshard.policies import Offload
from dshard.tensor.meshes import TPShardLayout, tp_operand, viewed
from dshard.tensor.storage import ShardStorage, Use, shards_of, signatures_of
from dshard.tensor.tp_params import local_of
from dshard.tensor.views import View
from dshard.units.buckets import Bucket, SendRows, is_whole, part_layout
from dshard.units.extensions import Extensions

if TYPE_CHECKING:
    from dshard.units.unit import Unit


@dataclass(frozen=True, slots=True)
class _Staged:
    """Shards on the compute device.

    Args:
        shards: The shards.
        row: The memory that they lie in, one behind the other.
        arrival: Whose `synchronize` waits until home may be written to again.
    """

    shards: list[Tensor]
    row: Tensor
    arrival: Any


class CopyStream:
    """One direction between two devices.

    Args:
        offload: The two.
    """

    def __init__(self, offload: Offload) -> None:
        self.offload = offload
        has_streams = offload.compute.type not in ("cpu", "meta")
        device: Any = torch.get_device_module(offload.compute) if has_streams else None
        self._device, self._stream = device, device.Stream(offload.compute) if has_streams else None

    @contextmanager
    def open(self) -> Iterator[None]:
        """What is started inside runs after what was started before, and beside what is started later.

        Memory that is taken inside may be used outside: the next scope starts after that.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._device.current_stream(self.offload.compute))
        with self._device.stream(self._stream):
            yield

    def copy_in(self, shards: Sequence[Tensor], row: Tensor | None, plan: GatherPlan) -> _Staged:
        """Start to copy shards from home, within `open`.

        Args:
            shards: At home; they must not change before the arrival.
            row: The memory of a `SendRow` that they lie in, if they do: then it is one copy.
            plan: Of their bucket.
        """
        device = self.offload.compute
        if row is not None:
            moved = torch.empty(row.shape, dtype=row.dtype, device=device)
            moved.copy_(row, non_blocking=True)
        else:
            moved = torch.empty(plan.send_numel, dtype=shards[0].dtype, device=device)
            torch._foreach_copy_(plan.slots(moved), [shard.reshape(-1) for shard in shards], non_blocking=True)
        parts = [part.view(shard.shape) for part, shard in zip(plan.slots(moved), shards, strict=True)]
        return _Staged(parts, moved, self._mark())

    def copy_out(self, row: Tensor) -> tuple[Tensor, Any]:
        """Start to copy a row home; gives what it becomes there, and whose `synchronize` waits for it."""
        home = torch.empty(row.shape, dtype=row.dtype, device=self.offload.home, pin_memory=self.offload.pins)
        with self.open():
            home.copy_(row, non_blocking=True)
            if self._stream is not None:
                row.record_stream(self._stream)  # nobody waits here, as a gather's use does, before it is let go
            return home, self._mark()

    def _mark(self) -> Any:
        return self._stream.record_event() if self._stream is not None else _There()


class _There:
    """The arrival of what was copied at once."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Residency(enum.Enum):
    """What of a unit's full values is on this rank, besides the shards."""

    SHARDED = "sharded"  # nothing
    IN_FLIGHT = "in flight"  # messages are under way
    GATHERED = "gathered"  # all, fresh or stale
    IN_PARTS = "in parts"  # what as few neighbours as `reshard_after_forward` says need from each other

    __hash__ = object.__hash__  # Enum's own is a function of Python


TRANSITIONS: dict[Residency, frozenset[Residency]] = {
    Residency.SHARDED: frozenset({Residency.IN_FLIGHT}),
    Residency.IN_FLIGHT: frozenset({Residency.GATHERED, Residency.SHARDED}),
    Residency.GATHERED: frozenset({Residency.SHARDED, Residency.IN_PARTS}),
    Residency.IN_PARTS: frozenset({Residency.IN_FLIGHT, Residency.SHARDED}),
}


def refuse_meta(names: Sequence[str]) -> None:
    """Raise, for there are parameters that have no memory yet."""
    raise StateError(
        f"{names[0]}: a parameter needs memory before it is used, but this one and {len(names) - 1} more "
        "are on the meta device. Call to_empty(device=...) on the model and initialize it, or load a "
        "state_dict with assign=True."
    )


class Beside:
    """What the gathers of one unit have to do with other work of its device, which has streams.

    A gather is started behind all that the current stream was given, for it may have written the shards. In the
    backward of the forward that gathered them last, they are what they were: then it starts in a stream of its own.

    Args:
        unit: Whose parameters.
    """

    __slots__ = ("_known", "_unit")

    def __init__(self, unit: "Unit") -> None:
        self._unit = unit
        self._known: tuple[int, Any] = -1, None  # the phase of the last gather behind all else, and what it gathered

    def begin(
        self, storages: Sequence[ShardStorage], shards: Sequence[Tensor], versions: list[int], wait: Callable[[], None]
    ) -> SideStream | None:
        """A gather is to start; gives the stream for it, if not the current one.

        Args:
            storages: Of all shards of the unit.
            shards: That are gathered, one in each of them.
            versions: How often each of these was written to.
            wait: Ends the gather; called ahead of writes to the shards.
        """
        for storage in storages:
            storage.before_write = wait
        found = list(map(id, shards)), versions, signatures_of(storages)
        serial = self._unit.model.schedule.serial
        if in_backward() and self._known == (serial - 1, found):
            return self._side()
        self._known = serial, found
        return None

    def end(self) -> None:
        """It has ended, and its memory is used no more but for the full values."""
        self._side().mark()
        for param in self._unit.params:
            param.shard_storage.before_write = None

    def _side(self) -> SideStream:
        assert self._unit.device is not None
        return self._unit.model.side_stream(self._unit.device)


@contextmanager
def opened(side: SideStream, bucket: Bucket) -> Iterator[bool]:
    """Have a gather of a bucket start in a stream, if no full values stay in its memory; gives whether it does."""
    if bucket.plan.is_in_rows or bucket.group.num_ranks == 1:
        yield False
        return
    with side.open():
        yield True


@dataclass(frozen=True, slots=True)
class SavedView:
    """A part of one of some full tensors that lie in one memory, as autograd saves it.

    Args:
        index: Of the full tensor.
        dtype: Of both.
        size: As of any view.
        stride: As of any view.
        start: Elements from the start of the full tensor.
        is_whole: Whether it is the full tensor as it lies.
    """

    index: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    start: int
    is_whole: bool

    def of(self, full: Tensor) -> Tensor:
        """It, of the full tensor; of a DTensor, of its local tensor."""
        full = full._local_tensor if isinstance(full, DTensor) else full
        return full if self.is_whole else full.as_strided(self.size, self.stride, full.storage_offset() + self.start)


@dataclass(slots=True, weakref_slot=True, eq=False)
class FullTensors:
    """Full tensors that lie in one memory.

    Args:
        starts: Their offsets, in order.
        fulls: They.
        versions: Writes to each, when it was noted.
        params: Of which parameters.
        views: Known ones, of any gather that lies alike: a step saves the same ones as that before it.
    """

    starts: list[int]
    fulls: list[Tensor]
    versions: list[int]
    params: list[Any]
    views: dict[Any, SavedView | None]

    def view_of(self, tensor: Tensor) -> SavedView | None:
        """How a tensor in this memory lies in one of them; None for what is no view of one."""
        key: Any = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        known = self.views.get(key, key)
        if known is key:
            if len(self.views) >= _MAX_VIEWS:
                self.views.clear()
            known = self.views[key] = self._find(*key)
        return known

    def _find(self, offset: int, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> SavedView | None:
        index = bisect_right(self.starts, offset) - 1
        if index < 0:
            return None
        full, start = self.fulls[index], offset - self.starts[index]
        if dtype != full.dtype or start >= full.numel():
            return None
        return SavedView(index, dtype, size, stride, start, not start and (size, stride) == (full.shape, full.stride()))


# By the address of the storage; of units that are gathered, in this process. No WeakValueDictionary, for most of what
# autograd saves is not in it, and that is slow to say so.
FULL_TENSORS: "dict[int, weakref.ref[FullTensors]]" = {}

# By this, and not by `untyped_storage()`, which makes an object of Python's that lives as long as the memory.
storage_address: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
_STORAGE_OF = attrgetter("shard_storage")
_SHARD_OF = attrgetter("shard_storage.tensor")
_VERSION_OF = attrgetter("_version")
_IS_META = attrgetter("is_meta")


def _forget(storage: int, gone: "weakref.ref[FullTensors]", known: dict[int, Any] = FULL_TENSORS) -> None:
    """Forget full tensors that are no more; names of this module may be gone by then."""
    if known.get(storage) is gone:
        del known[storage]


_NOWHERE = MadeIn(None)
_MAX_VIEWS = 64  # of gathered copies that are remembered


class Copies:
    """The full values of a unit's parameters in given dtypes: plain tensors that nobody writes to.

    They are fresh as long as no shard was written since: at every touch the version counters of the shards are compared
    with those of the gather.

    Args:
        unit: Whose parameters.
        dtypes: For each parameter the dtype; None for its own.
        is_primary: Whether forward and backward use these, so that uses of them are the schedule's.
    """

    __slots__ = (
        "_are_in_one",
        "_arrivals",
        "_beside",
        "_extensions",
        "_found",
        "_full_views",
        "_fulls",
        "_gathered_by",
        "_in_flight",
        "_joined_in",
        "_lie",
        "_made_in",
        "_parts",
        "_rows",
        "_shards",
        "_slots",
        "_touched_in",
        "_versions",
        "dtypes",
        "host_values",
        "is_primary",
        "memories",
        "residency",
        "unit",
    )

    def __init__(self, unit: "Unit", dtypes: Sequence[torch.dtype | None], *, is_primary: bool) -> None:
        self.unit = unit
        self.dtypes = tuple(dtypes)
        self.is_primary = is_primary
        self.residency = Residency.SHARDED
        self._extensions: Extensions | None = unit.extensions if is_primary else None
        apart = self._extensions.slots if self._extensions is not None else ()
        self._slots = tuple(slot for slot in range(len(self.dtypes)) if slot not in apart)
        self._fulls: list[Tensor] | None = None
        self._full_views: dict[Any, Tensor] = {}  # of the gathered copies
        self.memories: list[Buffer] = []  # what the gathered copies lie in
        self._are_in_one = False  # they lie in one memory, in their order
        self._found: dict[int, FullTensors] = {}  # they, by the addresses of their storages
        self._gathered_by: object = None  # the buckets
        self._lie: tuple[object, list[int], dict[Any, SavedView | None]] = None, [], {}  # of those, and known views
        self._in_flight: list[tuple[tuple[int, ...], Handle[Gathered]]] = []
        self._arrivals: list[Any] = []  # of shards that are copied from their home to where they are gathered
        self._parts: tuple[list[Tensor], list[Bucket]] | None = None  # in their place, until they are gathered again
        self._shards: list[Tensor] = []  # what was gathered, and how often it had been written to
        self._versions: list[int] = []
        self._joined_in = -1  # the phase in which they were gathered because other ranks may use them
        self._touched_in = -1  # the phase in which they were touched, if they were since they were gathered
        self._made_in = _NOWHERE  # they, or the parts in their place
        self._rows = SendRows(unit.params)
        self._beside = Beside(unit) if is_primary and unit.has_streams else None
        self.host_values = HostValues() if is_primary else None

    def _become(self, residency: Residency) -> None:
        """Take a state, by one of `TRANSITIONS`."""
        if residency not in TRANSITIONS[self.residency]:
            raise AssertionError(f"{self.unit.label}: copies that are {self.residency} cannot become {residency}")
        self.residency = residency

    @property
    def are_there(self) -> bool:
        """Whether they are gathered or under way, fresh or not."""
        return self.residency is Residency.GATHERED or self.residency is Residency.IN_FLIGHT

    @property
    def is_current(self) -> bool:
        """Whether they are gathered or under way, and there is no need to do so again, unless somebody writes."""
        return self.are_there and (not self.unit.stays or self.are_fresh())

    @property
    def are_once_per_host(self) -> bool:
        """Whether all ranks of a host read them in one place."""
        return self.host_values is not None and self.host_values.are_all(self.buckets)

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them, without padding, and without those that are whole on every rank."""
        dtypes = [dtype or p.storage_dtype for p, dtype in zip(self.unit.params, self.dtypes, strict=True)]
        pairs = zip(self.unit.params, dtypes, strict=True)
        return sum(p.shard_layout.numel * d.itemsize for p, d in pairs if not (is_whole(p) and d == p.storage_dtype))

    @property
    def buckets(self) -> list[Bucket]:
        """How they are gathered."""
        return self.unit.buckets(self._slots, self.dtypes)

    def full(self, slot: int, view: View | None = None, use: Use | None = None) -> Tensor:
        """Parameter `slot`, or a view of it, as an operand; gathers the unit if there is no fresh copy.

        Communicates:
            At most one all-gather per bucket; or those of units that are expected next.
        """
        if self._fulls is None or use is None or use.fresh is not self:
            model = self.unit.model
            if model.split is not None:
                model.before_use()
                owner, own_slot = self.unit.params[slot].gather_source, self.unit.params[slot].gather_slot
                if owner is not self.unit and owner is not None:  # the first use split this unit
                    return owner.full(own_slot, view, use)
            is_known = (
                self._touched_in == model.schedule.serial
                and torch._C._current_graph_task_id() == model.backward_task
                and self._fulls is not None
            )
            if not is_known or not self.are_fresh():
                self._touch()
            if self._made_in.stream is not None:
                self._made_in.follow(partial(_memory_of, self))
            if use is not None:
                use.fresh = self
        assert self._fulls is not None
        return self._fulls[slot] if view is None else self._full_view(slot, view)

    def _full_view(self, slot: int, view: View) -> Tensor:
        """A view of a gathered copy; a linear layer takes the same one in forward and backward."""
        key = slot, view.key
        known = self._full_views.get(key)
        if known is None:
            if len(self._full_views) >= _MAX_VIEWS:
                self._full_views.clear()
            assert self._fulls is not None
            known = self._full_views[key] = viewed(self._fulls[slot], view.steps)
        return known

    @property
    def are_touched(self) -> bool:
        """Whether they are there and were used in this phase, so that another use changes nothing."""
        return self._fulls is not None and self._touched_in == self.unit.model.schedule.serial

    def fulls(self) -> list[Tensor]:
        """All parameters as operands, to be found by their memory; gathers the unit if there is no fresh copy.

        Communicates:
            As `full`.
        """
        self.full(0)
        assert self._fulls is not None
        if not self._found:
            self._note_memory(self._fulls)
        return self._fulls

    def _note_memory(self, fulls: list[Tensor]) -> None:
        """Have full tensors found by their memory; DTensors by that of their local tensors."""
        if TPShardLayout.num_made:
            fulls = [full._local_tensor if isinstance(full, DTensor) else full for full in fulls]
        starts: list[Any] = [full.storage_offset() for full in fulls]
        if self._are_in_one:
            if self._lie[0] is not self._gathered_by or self._lie[1] != starts:
                self._lie = self._gathered_by, starts, {}
            params = self.unit.params
            self._note(fulls[0], FullTensors(starts, fulls, list(map(_VERSION_OF, fulls)), params, self._lie[2]))
            return
        by_storage: dict[int, list[int]] = {}
        for slot in sorted(range(len(fulls)), key=starts.__getitem__):
            by_storage.setdefault(storage_address(fulls[slot]), []).append(slot)
        for slots in by_storage.values():
            own, params = [fulls[slot] for slot in slots], [self.unit.params[slot] for slot in slots]
            found = FullTensors([starts[slot] for slot in slots], own, list(map(_VERSION_OF, own)), params, {})
            self._note(own[0], found)

    def _note(self, full: Tensor, found: FullTensors) -> None:
        """Have full tensors found by the memory of one of them."""
        storage = storage_address(full)
        self._found[storage] = found
        FULL_TENSORS[storage] = weakref.ref(found, partial(_forget, storage))

    def at_hand_in_backward(self, slot: int) -> Tensor | None:
        """Parameter `slot`, if the backward that runs has gathered and used them before."""
        model = self.unit.model
        is_known = self._fulls is not None and self._touched_in == model.schedule.serial
        if not is_known or torch._C._current_graph_task_id() != model.backward_task:
            return None
        if self._made_in.stream is not None:
            self._made_in.follow(partial(_memory_of, self))
        assert self._fulls is not None
        return self._fulls[slot]

    def at_hand(self, slot: int) -> Tensor | None:
        """Parameter `slot`, if a fresh copy is there or under way; no use that the schedule notes."""
        if not self.are_there or not self.are_fresh():
            return None
        self.wait()
        self._made_in.follow(partial(_memory_of, self))
        assert self._fulls is not None
        return self._fulls[slot]

    def _touch(self) -> None:
        """The first use in a phase, or since they were gathered."""
        model = self.unit.model
        if not self.unit.is_whole:
            model.eviction.before_touch(self.unit)
        self.gather()
        is_noted = self.is_primary and self._joined_in != model.schedule.serial
        is_ahead = is_noted and self._beside is not None and not in_backward()  # where it takes less memory
        if is_ahead:
            model.eviction.after_touch(self.unit)
        self.wait()
        self._touched_in = model.schedule.serial
        if is_noted and not is_ahead:
            model.eviction.after_touch(self.unit)

    def forget_touch(self) -> None:
        """Have the next use be the first one in this phase."""
        self._touched_in = -1

    def join(self, *, gathers: bool) -> None:
        """Use them because other ranks may: for the schedule that is a use, though nothing here waits for it.

        Args:
            gathers: Whether to start to gather.
        """
        if gathers:
            self.gather()
        self._joined_in = self.unit.model.schedule.serial
        self.unit.model.eviction.after_touch(self.unit)

    def gather(self, *, is_ahead: bool = False) -> bool:
        """Start to gather; a no-op while fresh copies are there or under way.

        Gives whether they are there or under way afterwards. Ahead of a use they need not be: that parameters have no
        memory yet is no error.
        """
        if self.residency is not Residency.SHARDED and self.are_fresh():
            if self.residency is Residency.IN_PARTS:
                self._gather_parts()
            return True
        unit, model = self.unit, self.unit.model
        if model.regions.open_label is not None:
            model.regions.check_gather(unit)
        if self.residency is not Residency.SHARDED:
            self.discard()
        if self.is_primary:
            self.dtypes = unit.dtypes_to_gather()
        buckets = self.buckets
        if names := self._on_meta(buckets):
            if is_ahead:
                return False
            refuse_meta(names)
        model.eviction.note_gather(unit)
        self._touched_in = -1
        self._gathered_by = buckets
        with outside_autograd(), profiled("gather", unit.label, model.token):
            storages = list(map(_STORAGE_OF, unit.params))
            rows = self._rows.of(buckets, storages) if self.is_primary else [None] * len(buckets)
            once = self._once_per_host(buckets)
            self._shards = shards_of(storages)
            self._versions = list(map(_VERSION_OF, self._shards))
            extensions = unit.extensions if self._extensions is None else None
            shards = extensions.exact(self._shards) if extensions is not None else self._shards
            side = None
            if self._beside is not None:
                side = self._beside.begin(storages, self._shards, self._versions, self.wait)
            in_flight = [
                (bucket.slots, self._start(bucket, shards, storages, row, on_host, side))
                for bucket, row, on_host in zip(buckets, rows, once, strict=True)
            ]
            if self._extensions is not None:
                in_flight += self._extensions.start(model.pool)
        self._in_flight = in_flight
        self._become(Residency.IN_FLIGHT)
        if self.host_values and self.host_values.are_late:
            self.wait()  # peers that use them wait for this rank's part, whatever it does meanwhile
        return True

    def is_held(self, storage: ShardStorage) -> bool:
        """As `SendRows.is_held`."""
        return self._rows.is_held(storage)

    def drop_casts(self) -> None:
        """As `SendRows.drop_casts`, unless some are being copied from."""
        if not self._arrivals:
            self._rows.drop_casts()

    def rows_to_cast(self, written: Container[int]) -> list[tuple[SendRow, torch.dtype]]:
        """As `SendRows.to_cast`."""
        return self._rows.to_cast(written)

    def _once_per_host(self, buckets: Sequence[Bucket]) -> list[HostCopy | None]:
        """The memory of each bucket whose full values all ranks of this host read in one place."""
        is_possible = self.host_values or any(bucket.group.is_direct for bucket in buckets)
        if self.host_values is None or not is_possible:
            return [None] * len(buckets)
        self.host_values.keep(buckets)
        unit, found = self.unit, list[HostCopy | None]()
        is_one = not unit.casts_are_learned and unit.settings.num_slices == 1
        is_one = is_one and type(unit.settings.reshard_after_forward) is not int
        for bucket in buckets:
            storages = [unit.params[slot].shard_storage for slot in bucket.slots]
            made = self.host_values.of(
                bucket,
                bucket.plan,
                bucket.group,
                storages,
                label=unit.label,
                is_cast=bucket.is_cast,
                may_share=is_one and bucket.offload is None and not bucket.is_meta,
            )
            found.append(made)
        return found

    def _start(
        self,
        bucket: Bucket,
        shards: Sequence[Tensor],
        storages: Sequence[ShardStorage],
        row: Tensor | None,
        on_host: HostCopy | None,
        side: SideStream | None,
    ) -> Handle[Gathered]:
        """Start to gather a bucket.

        Args:
            bucket: Which of the unit's parameters.
            shards: Of all of them.
            storages: Of all of them.
            row: That those of the bucket lie in, if they do.
            on_host: Where the ranks of a host read the full values in one place, if they do.
            side: The stream to start it in, if not the current one.
        """
        unit, model = self.unit, self.unit.model
        if len(bucket.slots) < len(shards):
            shards, storages = [shards[slot] for slot in bucket.slots], [storages[slot] for slot in bucket.slots]
        tag = collectives.tag_of(signatures_of(storages))
        if on_host is not None:
            return on_host.gather(shards, label=unit.label, tag=tag)
        plan, group = bucket.plan, bucket.group
        label = unit.label if self.is_primary else f"{unit.label}, in its own dtype"
        how: dict[str, Any] = {"label": label, "tag": tag, "pool": model.pool}
        if bucket.offload is not None:
            stream = model.copy_stream(bucket.offload, inward=True)
            with stream.open():
                staged = stream.copy_in(shards, row, plan)
                self._arrivals.append(staged.arrival)
                is_ready = group.sends_rows and staged.row.dtype == bucket.dtype
                return collectives.all_gather(staged.shards, plan, group, row=staged.row if is_ready else None, **how)
        if side is None:
            return collectives.all_gather(shards, plan, group, row=row, **how)
        with opened(side, bucket) as is_beside:
            return collectives.all_gather(shards, plan, group, row=row, is_beside=is_beside, **how)

    def keep_parts(self, num_ranks: int) -> None:
        """Let go of them but for a part, of which as many neighbouring ranks hold all: enough for the next gather."""
        if not self.are_there or not self.are_fresh():
            return
        self.wait()
        assert self._fulls is not None
        params = self.unit.params
        buckets = self.unit.part_buckets(self.dtypes, num_ranks)
        ranks = {slot: bucket.group.rank for bucket in buckets for slot in bucket.slots}
        with outside_autograd():
            parts = [
                shard_of(local_of(full), part_layout(p, num_ranks), ranks[slot]).contiguous().clone()
                for slot, (p, full) in enumerate(zip(params, self._fulls, strict=True))
            ]
        self._let_go()
        self._parts = parts, buckets
        self._made_in = MadeIn(self.unit.device)
        self._become(Residency.IN_PARTS)

    def _gather_parts(self) -> None:
        """Start to gather what `keep_parts` has left."""
        assert self._parts is not None
        parts, buckets = self._parts
        self._gathered_by = buckets
        self._made_in.follow(lambda: parts)
        self.unit.model.eviction.note_gather(self.unit)
        self._touched_in = -1
        with outside_autograd(), profiled("gather", self.unit.label, self.unit.model.token):
            self._in_flight = [
                (
                    bucket.slots,
                    collectives.all_gather(
                        [parts[slot] for slot in bucket.slots],
                        bucket.plan,
                        bucket.group,
                        label=f"{self.unit.label}, among {bucket.group.num_ranks}",
                        pool=self.unit.model.pool,
                    ),
                )
                for bucket in buckets
            ]
        self._become(Residency.IN_FLIGHT)

    def on_meta(self) -> list[str]:
        """Names of parameters that have no memory yet."""
        return self._on_meta(self.buckets)

    def _on_meta(self, buckets: Sequence[Bucket]) -> list[str]:
        if self._extensions is None and not any(map(_IS_META, buckets)):
            return []
        slots = [slot for bucket in buckets if bucket.is_meta for slot in bucket.slots]
        apart = self._extensions.slots if self._extensions is not None else ()
        slots += [slot for slot in apart if self.unit.params[slot].is_meta]
        return [self.unit.params[slot].name for slot in slots]

    def wait(self) -> None:
        """Wait for the gather that is under way, if one is."""
        if self.residency is not Residency.IN_FLIGHT:
            return
        in_flight, self._in_flight = self._in_flight, []
        fulls: list[Any] = [None] * len(self.unit.params)
        try:
            with outside_autograd(), profiled("gather_wait", self.unit.label, self.unit.model.token):
                while self._arrivals:
                    self._arrivals.pop().synchronize()  # from now on shards at home may be written to
                for slots, handle in in_flight:
                    gathered = handle.wait()
                    if len(slots) == len(fulls):
                        fulls = gathered.tensors
                    else:
                        for slot, full in zip(slots, gathered.tensors, strict=True):
                            fulls[slot] = full
                    if gathered.memory is not None:
                        self.memories.append(gathered.memory)
            self._are_in_one = len(in_flight) == len(self.memories) == 1
        except BaseException:
            self._parts = None
            self._become(Residency.SHARDED)
            self._let_go()
            raise
        finally:
            if self._beside is not None:
                self._beside.end()
        self._fulls = list(map(tp_operand, fulls, self.unit.params)) if TPShardLayout.num_made else fulls
        self._parts = None
        self._made_in = MadeIn(self.unit.device) if self.unit.has_streams else _NOWHERE
        self._become(Residency.GATHERED)

    def are_fresh(self) -> bool:
        """Whether no shard was written to since the gather.

        All shards are looked at, whichever parameter is used: what a rank uses may be its own matter, but when the unit
        is gathered must not be.
        """
        return all(map(is_, map(_SHARD_OF, self.unit.params), self._shards)) and (
            list(map(_VERSION_OF, self._shards)) == self._versions
        )

    def discard(self) -> None:
        """`drop`, also of a gather that is under way: the peers may want its messages, or be elsewhere by now."""
        if self.residency is Residency.IN_FLIGHT:
            in_flight, self._in_flight = self._in_flight, []
            while self._arrivals:
                self._arrivals.pop().synchronize()
            with outside_autograd():
                for _, handle in in_flight:
                    gathered = handle.discard()
                    if gathered is not None and gathered.memory is not None:
                        self.memories.append(gathered.memory)
                    del gathered
            if self._beside is not None:
                self._beside.end()
            del in_flight
        self.drop()

    def drop(self) -> None:
        """Let go of them, and of parts, and hand back their memory."""
        self._parts = None
        self._shards, self._versions = [], []
        self._let_go()
        if self.residency is not Residency.SHARDED:
            self._become(Residency.SHARDED)

    def _let_go(self) -> None:
        """Hand back the memory of the full values."""
        while self._found:
            FULL_TENSORS.pop(self._found.popitem()[0], None)
        self._fulls = None
        self._full_views.clear()
        memories, self.memories = self.memories, []
        while memories:
            self.unit.model.pool.give(memories.pop())
        if self.host_values:
            self.host_values.end()


def _memory_of(copies: Copies) -> list[Tensor]:
    """What other streams may use of copies; other classes than plain tensors are in memory that lives on."""
    assert copies._fulls is not None
    plain = [local for local in map(local_of, copies._fulls) if type(local) is Tensor]
    return [*plain, *(buffer.memory for buffer in copies.memories)]
