"""What the units of one model share: settings, the order of use, which units are freed, and regions of some ranks."""

import copy
import enum
import math
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dshard.autograd import Regions, in_backward
from dshard.collectives import BufferPool, Comms, SideStream
from dshard.errors import StateError
from dshard.policies import Offload, StrategyRules
from dshard.tensor.sharded_tensor import note_forward
from dshard.units.copies import CopyStream

if TYPE_CHECKING:
    from dshard.units.unit import Unit

_LIFETIMES: dict[str, tuple[bool, bool]] = {  # whether gathered copies are freed after forward, and after backward
    "ddp": (True, True),
    "zero1": (False, False),
    "zero2": (False, False),
    "keep": (False, True),
    "full": (True, True),
}


@dataclass(frozen=True, slots=True)
class UnitSettings:
    """What is chosen for a unit.

    Args:
        reshard_after_forward: Whether it is freed after forward; None for the default of a root or child; a number of
            ranks to keep what as many need for the next gather.
        reshard_after_backward: Whether it is freed after backward.
        strategy: The base of its strategy, if one was named.
        requires_sync: Whether backward reduces its gradients; else they are added up unreduced.
        requires_all_reduce: Whether they are reduced over replicas too; else what is reduced within each is added up.
        averages: Whether they are averaged over the ranks; else they are added.
        divisor: Of summed gradients, in the place of the number of ranks.
        reduce_hook: Called with reduced gradients.
        comms: What takes the place of the backend's collectives.
        num_slices: In which its only parameter is gathered and used.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    strategy: str | None = None
    requires_sync: bool = True
    requires_all_reduce: bool = True
    averages: bool = True
    divisor: float | None = None
    reduce_hook: Callable[[Tensor], object] | None = None
    comms: Comms = field(default_factory=Comms)
    num_slices: int = 1

    def under(self, strategy: str) -> "UnitSettings":
        """The same with what a strategy says of when copies are freed and gradients are reduced."""
        after_forward, after_backward = _LIFETIMES[strategy]
        return replace(
            self, strategy=strategy, reshard_after_forward=after_forward, reshard_after_backward=after_backward
        )

    @property
    def changed(self) -> list[str]:
        """Names of what is not as it is by default."""
        return [each.name for each in fields(self) if getattr(self, each.name) != getattr(_DEFAULT, each.name)]

    @property
    def but_lifetime(self) -> "UnitSettings":
        """The same without what strategies say."""
        return replace(self, strategy=None, reshard_after_forward=None, reshard_after_backward=True)


_DEFAULT = UnitSettings()


@dataclass(frozen=True, slots=True)
class BufferSync:
    """Buffers that are broadcast at the start of each training forward.

    Args:
        modules: All buffers in these.
        mesh: The first rank of it has the values.
    """

    modules: tuple[nn.Module, ...]
    mesh: DeviceMesh

    def __deepcopy__(self, memo: dict[int, Any]) -> "BufferSync":
        return BufferSync(copy.deepcopy(self.modules, memo), self.mesh)


def _largest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _first(values: Sequence[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _over_one_another(values: Sequence[StrategyRules]) -> StrategyRules:
    return reduce(StrategyRules.over, values)


def _each_once(values: Sequence[tuple[BufferSync, ...]]) -> tuple[BufferSync, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(values)))


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What is chosen for a model; None and empty where nothing was.

    Each field says how that of a model and those of its parts become one.

    Args:
        prefetch: How many units are gathered ahead.
        max_input_buffers: Reduce-scatters whose send buffers may live at the same time, besides the one that fills.
        memory_budget: Bytes of gathered copies to keep between forward and backward; "auto" until they are known.
        strategies: Set since `fully_shard`, for parameters that come later.
        buffers: That are broadcast.
    """

    prefetch: int | None = field(default=None, metadata={"joined": _largest})
    max_input_buffers: int | None = field(default=None, metadata={"joined": _largest})
    memory_budget: int | Literal["auto"] | None = field(default=None, metadata={"joined": _first})
    strategies: StrategyRules = field(default_factory=StrategyRules, metadata={"joined": _over_one_another})
    buffers: tuple[BufferSync, ...] = field(default=(), metadata={"joined": _each_once})

    def joined(self, others: Sequence["ModelSettings"]) -> "ModelSettings":
        """These with those of models that become parts of this one: what was chosen for the whole stays so.

        Where several parts differ, each field says which holds: the largest number, the first budget.
        """
        every = [self, *others]
        own = {each.name: [getattr(settings, each.name) for settings in every] for each in fields(self)}
        return replace(self, **{each.name: each.metadata["joined"](own[each.name]) for each in fields(self)})


@dataclass(slots=True)
class RankRegions:
    """What is known of a model's regions (`dshard.run_by_some`), equal on all ranks.

    Args:
        open_label: Of the region whose forward runs, and that some rank runs; else None.
        units: Units that have been part of one: ranks may differ in which of their parameters have gradients.
        in_backward: Units of regions that the running backward has come to.
        unreduced: Units whose gradients some ranks may have, and that have not been reduced since.
        held: Units that stay gathered until the backward ends.
        num_passed: How many forwards have run a region of each unit whose backwards are to come.
        has_gradient: Whether a module outside of regions, behind another one, has taken an input with a gradient.
    """

    open_label: str | None = None
    units: "set[Unit]" = field(default_factory=set)
    in_backward: "set[Unit]" = field(default_factory=set)
    unreduced: "set[Unit]" = field(default_factory=set)
    held: "list[Unit]" = field(default_factory=list)
    num_passed: "Counter[Unit]" = field(default_factory=Counter)
    has_gradient: bool = False

    def begin_forward(self) -> None:
        """The model starts a forward."""
        self.open_label, self.has_gradient = None, False

    def note_gradient(self) -> None:
        """A module takes an input that has a gradient."""
        self.has_gradient |= self.open_label is None

    def note_passed(self, units: "Sequence[Unit]") -> None:
        """A forward has passed a region of some units."""
        self.num_passed.update(units)

    def is_last(self, unit: "Unit") -> bool:
        """A backward has passed a region of a unit; whether it comes to no other one."""
        self.num_passed[unit] -= 1
        return self.num_passed[unit] <= 0

    def check_gather(self, unit: "Unit") -> None:
        """Raise where a rank gathers in a region what the others do not."""
        if self.open_label is not None and not unit.num_pins:
            raise StateError(
                f"{self.open_label}: in the block all ranks gather the parameters of the module that it names, but "
                f"this rank uses those of '{unit.label}', which ranks that do not run it know nothing of. Use them "
                "outside of the block, or pass a module that holds them, too."
            )

    def end_backward(self) -> None:
        """The backward has ended, or raised."""
        held, self.held = self.held, []
        for unit in held:
            unit.num_pins -= 1
        self.in_backward.clear()
        self.num_passed.clear()


U = TypeVar("U")

_MAX_PASSED = 4  # units that nothing has to be done for, between one and the next that is foretold


class Phase(enum.Enum):
    """What a model does; each has a record of its own."""

    FORWARD = enum.auto()
    EVAL = enum.auto()  # a forward without gradients
    BACKWARD = enum.auto()


class Schedule(Generic[U]):
    """Records first touches, phase by phase, and foretells the next ones from the last phase of the same kind.

    What it foretells is a guess: a touch that comes in another order moves the guess to where that unit stands in the
    record, or ends it, and the record that is being written is right the next time. All ranks that touch units in one
    order guess alike.

    Args:
        depth: How many touches to foretell.
        is_free: Whether nothing has to be done for a unit ahead of its use. Such units are passed over as long as they
            are smaller, together, than the one that is foretold: what is further off would be gathered too early.
        size_of: Bytes of a unit.
    """

    def __init__(
        self,
        depth: int = 1,
        is_free: Callable[[U], bool] = lambda _: False,
        size_of: Callable[[U], int] = lambda _: 0,
    ) -> None:
        self.depth = depth
        self._is_free, self._size_of = is_free, size_of
        self.serial = 0  # changes with every phase, for units to know a first touch
        self.begun_s = 0.0  # when the last phase began, by `time.perf_counter()`
        self._phase: Phase | None = None
        self._record: list[U] = []
        self._known: dict[Phase, list[U]] = {}
        self._position: int | None = 0  # in the known record, of the touch that comes next
        self._distances: dict[U, int] | None = None

    @property
    def phase(self) -> Phase | None:
        """What runs, as far as is known."""
        return self._phase

    def knows(self, phase: Phase) -> bool:
        """Whether a phase of this kind has ended."""
        return phase in self._known

    def order(self, phase: Phase) -> Sequence[U]:
        """In which the last phase of a kind touched units."""
        return self._known.get(phase, ())

    def begin(self, phase: Phase) -> None:
        """A phase starts, and with it ends what ran before."""
        self.end()
        self._phase, self._position, self.begun_s = phase, 0, time.perf_counter()

    def end(self) -> None:
        """The phase ends; its record is what the next one like it is held to be."""
        if self._phase is not None and self._record:
            self._known[self._phase] = self._record
            if self._phase is Phase.BACKWARD:
                self._distances = None
        self._phase, self._record = None, []
        self.serial += 1

    def forget(self) -> None:
        """Units are others now: what is known of their order says nothing."""
        self.end()
        self._known.clear()
        self._distances = None

    def leave_out(self, phase: Phase, units: Container[U]) -> None:
        """Forget that some units were touched in the last phase of a kind."""
        self._known[phase] = [unit for unit in self._known.get(phase, ()) if unit not in units]
        if phase is Phase.BACKWARD:
            self._distances = None

    def touch(self, unit: U) -> Sequence[U]:
        """Note the first touch of a unit in this phase, or since it was gathered; gives what is held to come next."""
        if self._phase is None:
            return ()
        self._record.append(unit)
        known = self._known.get(self._phase, ())
        position = self._position
        if position is None or position >= len(known) or known[position] is not unit:
            position = self._find(known, unit, position or 0)
        self._position = None if position is None else position + 1
        return () if position is None else self._coming(known, position + 1)

    def expects(self, unit: U) -> bool:
        """Whether the last phase of this kind says that `unit` is touched next."""
        known = self._known.get(self._phase, ()) if self._phase is not None else ()
        return self._position is not None and self._position < len(known) and known[self._position] is unit

    def _coming(self, known: Sequence[U], start: int) -> Sequence[U]:
        """The next ones of a record that need anything."""
        found: list[U] = []
        passed = 0
        for unit in known[start : start + self.depth + _MAX_PASSED]:
            if len(found) == self.depth:
                break
            if self._is_free(unit):
                passed += self._size_of(unit)
            elif passed and passed > self._size_of(unit):
                break
            else:
                found.append(unit)
        return found

    @staticmethod
    def _find(known: Sequence[U], unit: U, start: int) -> int | None:
        """Where `unit` stands in the record, ahead of `start` or else anywhere."""
        for positions in (range(start, len(known)), range(min(start, len(known)))):
            for position in positions:
                if known[position] is unit:
                    return position
        return None

    def distance(self, unit: U) -> float:
        """How far ahead the next backward touches a unit; before any was seen, it is held to run the forward back."""
        known = self._known.get(Phase.BACKWARD)
        if known is None:
            for back, touched in enumerate(reversed(self._record)):
                if touched is unit:
                    return back
            return math.inf
        if self._distances is None:
            self._distances = {}
            for position, touched in enumerate(known):
                self._distances.setdefault(touched, position)
        return self._distances.get(unit, math.inf)

    def in_forwards(self) -> dict[U, int]:
        """How far ahead forwards touch each unit: in this one, as the last one did, or in the next one."""
        touched = set(self._record)
        order = self._known.get(self._phase, self._record) if self._phase is not None else self._record
        found: dict[U, int] = {}
        for position, unit in enumerate(order):
            found.setdefault(unit, position + (len(order) if unit in touched else 0))
        return found


def to_drop(kept: Sequence[tuple[U, int, float]], budget_bytes: int) -> list[U]:
    """Which copies to drop so that the others fit into a budget: those whose next use is furthest ahead.

    For copies of one size that is the choice with the fewest gathers.

    Args:
        kept: Copies, their bytes, and how far ahead their next use is.
        budget_bytes: What may stay.

    Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
    """
    dropped: list[U] = []
    total = sum(num_bytes for _, num_bytes, _ in kept)
    for unit, num_bytes, distance in sorted(kept, key=lambda item: item[2], reverse=True):
        if total <= budget_bytes and not math.isinf(distance):
            break
        dropped.append(unit)
        total -= num_bytes
    return dropped


class Eviction:
    """Frees the units of a model: nothing else does, but programs that ask for it.

    A unit whose module runs is in use from the start of that module's forward to its end; then it goes, unless its
    settings, the budget, or the order of the last backward say that it stays; without gradients, unless its settings or
    the budget do: decoding token by token would gather it each time. A unit that is touched outside of any forward of
    its own (another method, a loss) stays until another such unit is touched. In backward a unit goes when all its
    gradients have arrived or the backward has passed its modules, a frozen one when another is touched, and everything
    at the end. What was gathered ahead and is not what comes next goes at once.

    Args:
        context: Of the model.
    """

    def __init__(self, context: "ModelContext") -> None:
        self._context = context
        self.gathered: dict[Unit, None] = {}  # fresh or not
        self._ahead: dict[Unit, None] = {}  # of those, gathered ahead, and not touched since
        self._loose: Unit | None = None  # gathered outside of a forward
        self._frozen: Unit | None = None  # gathered in backward, takes no gradient
        self._in_graph: tuple[int, Unit | None] = -1, None  # the last one that the backward of a graph used, and which
        self.touched: set[Unit] = set()  # by operations of this rank in the backward that runs
        self.seen: set[Unit] = set()  # gathered at some time in it, ahead of its use maybe, or left from the forward

    @property
    def num_bytes(self) -> int:
        """Bytes of gathered copies that are alive, without padding."""
        return sum(unit.full_bytes for unit in self.gathered)

    def before_touch(self, unit: "Unit") -> None:
        """Make room where a rule says so: `unit` is used for the first time in this phase, or since it was gathered."""
        if unit.num_pins and self.is_in_region(unit):
            return  # other ranks do not use it
        if in_backward():
            self._context.on_backward()
            self.touched.add(unit)
            self.make_way(unit)
            if self._frozen is not None and self._frozen is not unit:
                self.after_backward(self._frozen)
            self._frozen = unit if unit.is_frozen else None
            return
        self.make_way(unit)
        if not unit.num_active and not unit.is_requested:
            if self._loose is not None and self._loose is not unit and not self._loose.num_active:
                self._loose.reshard_unless_kept()
            self._loose = unit

    def make_way(self, unit: "Unit") -> None:
        """Drop what was gathered ahead if another unit is used today: it would be one too many."""
        if self._ahead and unit not in self._ahead and not unit.is_gathered:
            for other in list(self._ahead):
                other.reshard_unless_kept()

    def after_touch(self, unit: "Unit") -> None:
        """Note the use of `unit`, and start to gather what the last step used next."""
        self._ahead.pop(unit, None)
        if unit.is_whole and in_backward():
            self._context.on_backward()
        if unit.num_pins:
            return  # a scope that holds everything says nothing of an order
        expected = self._context.schedule.touch(unit)
        for other in [u for u in self._ahead if u not in expected]:
            other.reshard_unless_kept()  # the order is another one today
        for other in expected:
            if other.prefetch():
                self._ahead[other] = None

    def forget_touch(self, unit: "Unit") -> None:
        """A region has ended, in which some ranks have touched `unit`: to all of them its next use is the first one."""
        self._ahead.pop(unit, None)
        unit.copies.forget_touch()

    def note_gather(self, unit: "Unit") -> None:
        """`unit` starts to gather; a backward that has raised unnoticed is left first: this is of its step no more."""
        if self._context.backward_task != -1:
            self._context.on_outside()
        self.gathered[unit] = None
        if in_backward():
            self.seen.add(unit)

    def note_free(self, unit: "Unit") -> None:
        """`unit` has dropped its copies."""
        if in_backward():
            self.seen.add(unit)
        self.gathered.pop(unit, None)
        self._ahead.pop(unit, None)
        if self._loose is unit:
            self._loose = None

    def begin(self) -> None:
        """A phase starts: what was gathered ahead in the last one was not used in it."""
        for unit in list(self._ahead):
            unit.reshard_unless_kept()

    def begin_backward(self) -> None:
        """A backward starts."""
        self.touched.clear()
        self.seen.clear()

    def after_forward(self, unit: "Unit", module: nn.Module) -> None:
        """A module of `unit` ended its forward, by a result or an exception; the root's ends all others' too."""
        context = self._context
        for candidate in list(self.gathered) if module is context.root else [unit]:
            if candidate.num_active or (candidate is unit and module is not unit.modules[-1]):
                continue
            if not torch.is_grad_enabled():
                if not self._outlives_evaluation(candidate):
                    candidate.reshard_unless_kept()
            elif self.reshards(candidate) and not self._is_next(candidate):
                candidate.reshard_for_backward()
        if isinstance(context.settings.memory_budget, int):
            self._fit_into(context.settings.memory_budget)

    def is_in_region(self, unit: "Unit") -> bool:
        """Whether what happens to `unit` now is a matter of its region, in which ranks may differ."""
        regions = self._context.regions
        return regions.open_label is not None or (in_backward() and unit in regions.in_backward)

    def after_region(self, units: "Sequence[Unit]") -> None:
        """The forward has passed a region of some units, on all ranks."""
        for unit in units:
            if not torch.is_grad_enabled():
                if not self._outlives_evaluation(unit):
                    unit.reshard_unless_kept()
            elif self.reshards(unit):
                unit.reshard_for_backward()

    def _outlives_evaluation(self, unit: "Unit") -> bool:
        """Whether `unit` is kept by a forward without gradients, for the next one: until it is written, or trained.

        So is what takes no memory of this rank's. What stays with the root is, if all else is: no backward follows that
        would use it at once.
        """
        told = unit.settings.reshard_after_forward
        if told is False or type(told) is int:
            return told is False
        has_budget = isinstance(self._context.settings.memory_budget, int)
        if unit.is_once_per_host and not has_budget:
            return True
        if told is not None:
            return False
        if has_budget:
            return True
        if self.reshards(unit):
            return False
        others = [other.settings.reshard_after_forward for other in self._context.units if other is not unit]
        return bool(others) and all(other is False for other in others)

    def reshards(self, unit: "Unit") -> bool:
        """Whether `unit` is freed when its forward ends; by default all but the root's own unit are.

        With a memory budget, that decides instead for units that were not told.
        """
        if unit.settings.reshard_after_forward is not None:
            return bool(unit.settings.reshard_after_forward)
        if self._context.settings.memory_budget not in (None, "auto"):
            return False
        return self._context.root not in unit.modules

    def _is_next(self, unit: "Unit") -> bool:
        """Whether a unit that was formed for the root alone is the one that the last backward began with.

        It would be gathered again at once: the most bytes that are there at one time are the same.
        """
        schedule, root = self._context.schedule, self._context.root
        if unit.settings.reshard_after_forward is not None or not schedule.knows(Phase.BACKWARD):
            return False
        formed = root.__dict__.get("_dshard_formed", ()) if root is not None else ()
        return schedule.distance(unit) == 0 and unit in formed

    def _fit_into(self, budget_bytes: int) -> None:
        """Drop the copies that are used last, of units that were not told, until the others fit.

        The use that counts is that of the backward; in evaluation that of this forward, or of the next one.
        """
        schedule = self._context.schedule
        known = schedule.in_forwards() if schedule.phase is Phase.EVAL else None
        kept = [
            (unit, unit.full_bytes, schedule.distance(unit) if known is None else known.get(unit, 2 * len(known)))
            for unit in self.gathered
            if unit.settings.reshard_after_forward is None and not unit.is_requested
            if not unit.num_active and unit not in self._ahead
        ]
        for unit in to_drop(kept, budget_bytes):
            unit.reshard()

    def keep_for_backward(self, unit: "Unit") -> None:
        """A graph uses `unit`: it is kept, if it is to stay until backward; else the next one's use frees it."""
        if not unit.num_active and self._context.settings.memory_budget is None and not self.reshards(unit):
            unit.is_requested = True

    def use_in_graph(self, unit: "Unit", task: int) -> None:
        """The backward of a compiled graph, autograd's number `task`, uses `unit`: the one before it may go.

        Within a graph no gradient tells that backward has passed a unit: all of them come when the graph ends.
        """
        last_task, last = self._in_graph
        if last is not None and last is not unit and last_task == task and not last.num_active:
            self.after_backward(last)
        self._in_graph = task, unit

    def after_backward(self, unit: "Unit") -> None:
        """The backward that is running has no further use for `unit`."""
        if unit.settings.reshard_after_backward:
            unit.reshard()

    def forget_backward(self) -> None:
        """The backward is over, by its end or an exception."""
        self._frozen = None

    def end_backward(self) -> None:
        """The backward has ended: nothing stays but what is to."""
        for unit in list(self.gathered):
            self.after_backward(unit)


S = TypeVar("S")


class Forwards:
    """The forwards of a model's modules that run, and whom that concerns: mixed precision, and regions of recompute.

    Args:
        context: Of the model.
    """

    def __init__(self, context: "ModelContext") -> None:
        self._context = context
        self.num_running = 0  # nested ones too
        self.regions = Regions()
        self.is_autocasting = False  # the one that started or ended last
        self._is_told = False  # parameters with another dtype or device there know that some run, or may again
        self._awaits_backward = False  # in which parts of a forward may run again
        self._is_mixed = False
        self._is_plain: bool | None = None  # whether no value depends on where it is used; as soon as it is asked for
        self._device_type = "cpu"

    def on_dtypes(self) -> None:
        """Forwards compute with some parameters in other dtypes from now on: ask anew whether any does."""
        self._is_plain = None

    def note_running(self, change: int) -> None:
        """A forward of a module starts, or ends: `change` is 1 or -1."""
        num_running = max(0, self.num_running + change)
        if num_running and self.num_running and self._is_plain is not None:  # one within another, of which all know
            self.num_running = num_running
            self.is_autocasting = torch.is_autocast_enabled(self._device_type)
        else:
            self.set_running(num_running)

    def set_running(self, num_running: int) -> None:
        """So many forwards run."""
        units = self._context.units
        if self._is_plain is None:
            self._is_mixed = any(unit.is_mixed for unit in units)
            self._is_plain = all(unit.is_plain for unit in units)
            self._device_type = next((p.shard_group.device_type for unit in units for p in unit.params), "cpu")
        is_told = (self._is_mixed and num_running > 0) or self._awaits_backward
        if num_running and not self.num_running and not self._is_plain:
            self.regions.begin()
        elif not num_running:
            self.regions.end()
        if is_told != self._is_told:
            note_forward(1 if is_told else -1)
            self._is_told = is_told
        self.num_running = num_running
        # Asked here, for within the operations that it casts for, autocast says that it is off.
        self.is_autocasting = self.num_running > 0 and torch.is_autocast_enabled(self._device_type)

    def await_backward(self, *, is_awaited: bool) -> None:
        """A backward is to come, in which parts of a forward may run again with its dtypes and devices; or it ended."""
        if is_awaited != self._awaits_backward:
            self._awaits_backward = is_awaited
            self.set_running(self.num_running)


class ModelContext:
    """What the units of one model share, and nothing that a single one of them knows.

    Rooms above `units` keep what they know of the model here too, by the class of it: `context.get(Reducer)`.
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.root: nn.Module | None = None
        self.settings = ModelSettings()
        self.pool = BufferPool()  # memory for gathered copies and for gradients on their way
        self.schedule: Schedule[Unit] = Schedule(is_free=attrgetter("is_whole"), size_of=attrgetter("param_bytes"))
        self.forwards = Forwards(self)
        self.eviction = Eviction(self)
        self.regions = RankRegions()
        self.token = object()  # stands for the model where it must not be kept alive
        self.backward_task = -1  # autograd's number of the backward that is known to run
        self.split: Callable[[], None] | None = None  # forms units at the first use, of what the root's call took
        self.announce: Callable[[Phase], None] | None = None  # called ahead of each phase
        self.on_backward: Callable[[], object] = lambda: None  # called where a backward is found to use a unit
        self.unshard_again: Callable[[Unit, int], Tensor | None] = lambda unit, slot: None  # for a recomputation
        self.on_outside: Callable[[], object] = lambda: None  # called where a gradient is read, or a unit gathered
        self.services: dict[type, Any] = {}  # by their class, as `get` makes them
        self._copy_streams: dict[tuple[Offload, bool], CopyStream] = {}
        self._side_streams: dict[torch.device, SideStream] = {}

    def get(self, kind: type[S]) -> S:
        """The object of a class that is made once for each model, with this as its argument."""
        known: S | None = self.services.get(kind)
        if known is None:
            make: Any = kind
            known = self.services[kind] = make(self)
        return known

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered copies that are alive, without padding."""
        return self.eviction.num_bytes

    def adopt(self, unit: "Unit") -> None:
        """Take a unit in, from a context of its own or another's."""
        unit.model = self
        unit.number = 1 + max((u.number for u in self.units), default=0)
        self.units.append(unit)
        if unit.is_gathered:
            self.eviction.gathered[unit] = None
        self.forwards.on_dtypes()

    def reorder(self, units: "Sequence[Unit]") -> None:
        """Have the units in this order: that in which what is left at the end of a backward leaves."""
        self.units = list(units)
        for number, unit in enumerate(self.units):
            unit.number = number

    def change(self, **changes: Any) -> None:
        """Choose otherwise, by the names of `ModelSettings`."""
        settings = self.settings = replace(self.settings, **changes)
        self.schedule.depth = 1 if settings.prefetch is None else settings.prefetch

    def copy_stream(self, offload: Offload, *, inward: bool) -> CopyStream:
        """The stream of copies from a parameter's home to where it computes, or back; made at the first use."""
        known = self._copy_streams.get((offload, inward))
        if known is None:
            known = self._copy_streams[offload, inward] = CopyStream(offload)
        return known

    def side_stream(self, device: torch.device) -> SideStream:
        """The stream of gathers beside what a device computes; made at the first use."""
        known = self._side_streams.get(device)
        if known is None:
            known = self._side_streams[device] = SideStream(device)
        return known

    def before_use(self) -> None:
        """Form units, if that was left to the first use."""
        if self.split is not None:
            split, self.split = self.split, None
            split()

    def begin(self, phase: Phase) -> None:
        """A phase starts."""
        self.eviction.begin()
        self.schedule.begin(phase)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: units and switches, nothing that is under way."""
        self.before_use()
        kept = {kind: known if "__getstate__" in vars(kind) else None for kind, known in self.services.items()}
        return {"units": self.units, "root": self.root, "settings": self.settings, "services": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        kept = state.pop("services")
        self.__dict__.update(state)
        self.change()
        self.services.update((kind, known) for kind, known in kept.items() if known is not None)
        for kind in kept:
            self.get(kind)
