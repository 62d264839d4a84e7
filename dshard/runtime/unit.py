"""A unit: the parameters that are gathered together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dshard import collectives
from dshard.collectives import BufferPool, Gathered, GatherPlan, Handle, ShardGroup
from dshard.errors import StateError
from dshard.layout import BucketLayout
from dshard.runtime.schedule import Schedule
from dshard.tensor import ShardedTensor

__all__ = ["Bucket", "Unit", "UnitObserver"]

_SPEC_OF = attrgetter("_spec")
_SHARD_OF = attrgetter("_cell._tensor")
_VERSION_OF = attrgetter("_version")


class UnitObserver(Protocol):
    """What a unit, and the hooks around it, tell of themselves; `Runtime` listens."""

    pool: BufferPool  # memory for gathered copies and for gradients on their way
    schedule: Schedule["Unit"]
    split: Callable[[], None] | None  # forms units at the first use
    backward_task: int  # autograd's number of the backward that is known to run, else -1

    def before_use(self) -> None:
        """A unit is about to be used."""

    def on_touch(self, unit: "Unit") -> None:
        """A unit is about to be used for the first time in this phase, or since it was gathered."""

    def on_touched(self, unit: "Unit") -> None:
        """Its gathered copies are here."""

    def on_gather(self, unit: "Unit") -> None:
        """A unit starts to gather."""

    def on_free(self, unit: "Unit") -> None:
        """A unit dropped its gathered copies."""

    def on_reduced(self, reduction: Any) -> None:
        """A reduction of a unit's gradients ended."""

    def on_backward_done(self, unit: "Unit") -> None:
        """The backward that is running has no further use for a unit."""

    def on_passed(self, unit: "Unit") -> None:
        """The backward that is running has passed the modules of a unit."""

    def start_backward(self) -> Any:
        """A backward uses a unit; gives the reducer."""

    def enter_forward(self, unit: "Unit") -> None:
        """A module of a unit starts its forward."""

    def watch_inputs(self, unit: "Unit", inputs: Any) -> None:
        """A module of a unit starts its forward with these inputs."""

    def exit_forward(self, unit: "Unit", module: nn.Module) -> None:
        """A module of a unit ended its forward."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of a unit that travel in one buffer.

    Args:
        slots: Their numbers in the unit.
        layout: Where their shards lie in the buffer.
        plan: How they are gathered.
        group: The ranks that hold them.
        is_meta: Whether they have no memory yet.
    """

    slots: tuple[int, ...]
    layout: BucketLayout
    plan: GatherPlan
    group: ShardGroup
    is_meta: bool


class Unit:
    """Parameters that are gathered at the first touch of any of them, and freed together.

    Gathered copies are plain tensors that nobody writes to. They are fresh as long as no shard was written since: at
    every touch the version counters of the shards are compared with those of the gather.

    Args:
        params: The parameters; each gets this unit as its source.
        modules: Modules in whose forward the unit is in use.
        label: Name for messages, counts, and for the check that all ranks gather the same unit.
        reshard_after_forward: Whether to free after the forward; None for the default of a root or child.
        observer: The runtime.
    """

    def __init__(
        self,
        params: Sequence[ShardedTensor],
        modules: Sequence[nn.Module],
        *,
        label: str,
        reshard_after_forward: bool | None,
        observer: UnitObserver,
    ) -> None:
        self.params = list(params)
        self.modules = list(modules)
        self.label = label
        self.reshard_after_forward = reshard_after_forward
        self.observer = observer
        self.place = 0  # among the units of a model
        self.num_active = 0  # forwards of its modules that are running
        self.num_pins = 0  # open `gathered` scopes
        self.is_requested = False  # by `unshard`, to stay until it was used
        self.num_watched = 0  # inputs of its modules whose gradients will tell that backward has passed
        self.is_unwatched = False  # whether a module of it ran without such an input
        self.requires_sync = True  # else gradients are added up unreduced
        self.averages = True  # gradients over the ranks, else they are added
        self._fulls: list[Tensor] | None = None
        self._memories: list[Tensor] = []  # what the gathered copies lie in
        self._in_flight: list[tuple[Bucket, Handle[Gathered]]] | None = None
        self._shards: list[Tensor] = []  # what was gathered, and how often it had been written to
        self._versions: list[int] = []
        self._touched_in = -1  # the phase in which it was touched, if it was since it was gathered
        self._buckets: dict[tuple[int, ...], tuple[list[Any], list[Bucket]]] = {}
        for slot, param in enumerate(self.params):
            param._source, param._slot = self, slot

    @property
    def is_gathered(self) -> bool:
        """Whether it holds gathered copies, fresh or not."""
        return self._fulls is not None or self._in_flight is not None

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered copies, without padding."""
        return sum(p.numel() * p.element_size() for p in self.params)

    @property
    def trainable(self) -> list[int]:
        """Numbers of the parameters that take a gradient."""
        return [slot for slot, p in enumerate(self.params) if p.requires_grad]

    def full(self, slot: int) -> Tensor:
        """The full value of parameter `slot`; gathers the unit if it holds no fresh copy.

        Communicates:
            At most one all-gather per bucket; or those of units that are expected next.
        """
        observer = self.observer
        if observer.split is not None:
            observer.before_use()
            owner, own_slot = self.params[slot]._source, self.params[slot]._slot
            if owner is not self and owner is not None:  # the first use split this unit
                return owner.full(own_slot)
        is_known = (
            self._touched_in == observer.schedule.serial
            and torch._C._current_graph_task_id() == observer.backward_task
            and self._fulls is not None
        )
        if not is_known or not self._is_fresh():
            self._touch()
        assert self._fulls is not None
        return self._fulls[slot]

    def _touch(self) -> None:
        """The first use of the unit in a phase, or since it was gathered."""
        self.observer.on_touch(self)
        self.gather()
        self.wait()
        self._touched_in = self.observer.schedule.serial
        self.observer.on_touched(self)

    def pinned(self, slot: int) -> Tensor | None:
        """The gathered copy of parameter `slot` if an open scope holds it."""
        return self.full(slot) if self.num_pins else None

    def gather(self) -> None:
        """Start to gather; a no-op while a fresh copy is there or under way."""
        if self.is_gathered and self._is_fresh():
            return
        self.wait()  # a stale gather under way: its messages must not pair with those of the next
        self._drop()
        buckets = self.buckets(self._all_slots)
        self._refuse_meta(buckets)
        self.observer.on_gather(self)
        self._touched_in = -1
        self._shards = [p._cell.resolve() for p in self.params]
        self._versions = list(map(_VERSION_OF, self._shards))
        in_flight = []
        with torch.inference_mode(mode=False), torch.no_grad():
            for bucket in buckets:
                handle = collectives.all_gather(
                    [self._shards[slot] for slot in bucket.slots],
                    bucket.plan,
                    bucket.group,
                    label=self.label,
                    tag=hash(tuple(self.params[slot]._cell.signature for slot in bucket.slots)),
                    take=self.observer.pool.take,
                )
                in_flight.append((bucket, handle))
        self._in_flight = in_flight

    def prefetch(self) -> bool:
        """Start to gather ahead of the use, unless copies are there; gives whether it did."""
        if self.is_gathered or any(bucket.is_meta for bucket in self.buckets(self._all_slots)):
            return False
        self.gather()
        return True

    def _refuse_meta(self, buckets: Sequence[Bucket]) -> None:
        on_meta = [self.params[slot].name for bucket in buckets if bucket.is_meta for slot in bucket.slots]
        if on_meta:
            raise StateError(
                f"{on_meta[0]}: a parameter needs memory before it is used, but this one and {len(on_meta) - 1} more "
                "are on the meta device. Call to_empty(device=...) on the model and initialize it, or load a "
                "state_dict with assign=True."
            )

    def _finish(self) -> None:
        """Wait for the gather that is under way."""
        assert self._in_flight is not None
        in_flight, self._in_flight = self._in_flight, None
        fulls: dict[int, Tensor] = {}
        with torch.inference_mode(mode=False), torch.no_grad():
            for bucket, handle in in_flight:
                gathered = handle.wait()
                fulls.update(zip(bucket.slots, gathered.tensors, strict=True))
                if gathered.memory is not None:
                    self._memories.append(gathered.memory)
        self._fulls = [fulls[slot] for slot in range(len(self.params))]

    def wait(self) -> None:
        """Wait for the gather that is under way, if one is."""
        if self._in_flight is not None:
            self._finish()

    def _is_fresh(self) -> bool:
        """Whether no shard was written to since the gather.

        All shards are looked at, whichever parameter is used: what a rank uses may be its own matter, but when the unit
        is gathered must not be.
        """
        return all(map(is_, map(_SHARD_OF, self.params), self._shards)) and (
            list(map(_VERSION_OF, self._shards)) == self._versions
        )

    def free(self) -> None:
        """Drop the gathered copies, unless a `gathered` scope holds them."""
        if self.num_pins or not self.is_gathered:
            return
        self.wait()
        self._drop()
        self.is_requested = False
        self.observer.on_free(self)

    def _drop(self) -> None:
        """Let go of the gathered copies and hand back their memory."""
        self._fulls = None
        self._shards, self._versions = [], []
        memories, self._memories = self._memories, []
        while memories:
            self.observer.pool.give(memories.pop())

    def buckets(self, slots: Sequence[int]) -> list[Bucket]:
        """The buckets of some of the parameters: one per dtype, device and group, in order of first appearance."""
        key = tuple(slots)
        known = self._buckets.get(key)
        specs = list(map(_SPEC_OF, self.params))  # another one after a change of dtype, strides or device
        if known is None or not all(map(is_, known[0], specs)):
            known = self._buckets[key] = (specs, self._make_buckets(key))
        return known[1]

    @property
    def _all_slots(self) -> tuple[int, ...]:
        return tuple(range(len(self.params)))

    def _make_buckets(self, slots: Sequence[int]) -> list[Bucket]:
        by_kind: dict[Any, list[int]] = {}
        for slot in slots:
            param = self.params[slot]
            by_kind.setdefault((param.dtype, param.device, param._group.name), []).append(slot)
        return [self._make_bucket(tuple(part)) for part in by_kind.values()]

    def _make_bucket(self, slots: tuple[int, ...]) -> Bucket:
        params = [self.params[slot] for slot in slots]
        layout, group = BucketLayout.of([p._layout for p in params]), params[0]._group
        plan = GatherPlan.of(layout, [p.stride() for p in params], params[0].dtype, group)
        return Bucket(slots, layout, plan, group, params[0].is_meta)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: no gathered copies."""
        names = (
            "params",
            "modules",
            "label",
            "reshard_after_forward",
            "observer",
            "requires_sync",
            "averages",
            "place",
        )
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.num_active = self.num_pins = self.num_watched = 0
        self.is_requested = self.is_unwatched = False
        self._fulls = self._in_flight = None
        self._memories, self._shards, self._versions, self._buckets = [], [], [], {}
        self._touched_in = -1
        for slot, param in enumerate(self.params):
            param._source, param._slot = self, slot

    def __repr__(self) -> str:
        state = "gathered" if self.is_gathered else "sharded"
        return f"Unit({self.label!r}, {len(self.params)} parameters, {self.full_bytes:,} bytes, {state})"
