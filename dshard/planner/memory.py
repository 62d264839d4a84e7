"""Peak memory of a step: the most that lives at one moment, what it is, and what users of CUDA see of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from dshard.planner.costs import Cluster, ModelCosts, UnitCosts
from dshard.planner.options import Option, only, options_of, read_step, sharing, table_of, without_rows
from dshard.planner.texts import bytes_text
from dshard.policies import Strategy

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a step, and the bytes that live then on the rank that has most.

    Args:
        phase: "forward", "backward", "gradients" (a backward once it has computed one of a parameter), "slices" (once
            one of a gradient is in flight), "reduce" (a reduction ends, at the end of the next backward), "owners"
            (they step whole parameters), or "step" (the optimizer steps shards).
        unit: Number of the unit.
        num_bytes: In all.
    """

    phase: str
    unit: int
    num_bytes: int


def peak_bytes(model: ModelCosts, strategies: Sequence[Strategy | str], cluster: Cluster) -> int:
    """The most bytes that live at one moment of a step, rounded up."""
    strategies = read_step("peak_bytes", model, strategies, cluster)
    return max(moment.num_bytes for moment in moments(model, strategies, cluster))


def moments(model: ModelCosts, strategies: Sequence[Strategy | str], cluster: Cluster) -> list[Moment]:
    """All moments of a step, in order of time."""
    strategies = read_step("moments", model, strategies, cluster)
    rows = MemoryRows.of(model, table_of([[option] for option in options_of(model, strategies, cluster)]))
    values = rows.values(np.zeros(len(model.units), dtype=np.int64))
    return [Moment(*rows.name(row), int(values[row])) for row in rows.in_time()]


_PHASES = ("forward", "backward", "gradients", "slices", "reduce", "step", "owners")
_FAR = 3  # units further away than this are alike


@dataclass(frozen=True, slots=True)
class MemoryRows:
    """Bytes at each moment, as sums over units of what each adds under its strategy.

    Of `U` units: row `e` is the forward of unit `e`, row `U + e` its backward until there is a gradient, `2U + e` from
    then on, `3U + e` once a slice of a gradient is in flight, `4U + e` the end of its reduction, `5U + e` the
    optimizer's step on it, `6U + e` the steps of owners on what is cut as its parameters are. For unit `j` and each of
    its options, what it adds depends on `j - e` alone, and not on how far away it is beyond three.

    Args:
        constant: What is there whatever the options, per row.
        phases: What an option of a unit adds, shape (phases, 9, units, options): the unit comes before a row, three
            before, two before, one before, is its own, one after, two after, three after, after.
    """

    constant: Ints
    phases: Ints

    @classmethod
    def of(cls, model: ModelCosts, table: npt.NDArray[np.void]) -> "MemoryRows":
        """Rows for units of which each has some options: see `table_of`."""

        def field(name: str) -> Ints:
            return table[name].astype(np.int64)

        held, late = field("held_bytes"), field("grad_bytes")
        if model.num_backwards > 1:  # those of earlier micro-batches are there from the start
            held, late = held + late, np.zeros_like(late)
        alive, done = held + field("activation_bytes"), held + late
        kept = alive + field("kept_bytes")
        ahead = kept + field("backward_ahead_bytes")
        forward = *(kept,) * 4, alive + field("forward_use_bytes"), held + field("forward_ahead_bytes"), *(held,) * 3
        swapped = done + field("late_replicas_bytes")
        flying = held + field("in_flight_bytes"), done + field("replicas_bytes"), swapped
        backward = *(kept,) * 3, ahead, alive + field("backward_use_bytes"), *flying, done
        gradients = *backward[:4], alive + field("filling_bytes"), *backward[5:]
        slicing = alive + field("slicing_bytes"), held + field("whole_in_flight_bytes")
        slices = *backward[:4], *slicing, *backward[6:]
        ending = alive + field("sent_bytes"), held + field("ending_bytes")
        reduce = *(kept,) * 2, ahead, *ending, swapped, *(done,) * 3
        if model.steps_together:
            step = (done + field("step_bytes") + field("row_bytes"),) * 9
        else:
            rows = done + field("long_row_bytes")
            step = (*(rows,) * 4, rows + field("largest_step_bytes"), *(rows,) * 4)
        owners = (*(done,) * 4, done + field("owners_bytes"), *(done,) * 4)
        constant = np.full(len(_PHASES) * len(table), model.buffer_bytes, dtype=np.int64)
        return cls(constant, np.array((forward, backward, gradients, slices, reduce, step, owners)))

    def of_units(self, which: Sequence[int], options: Ints) -> "MemoryRows":
        """Rows for other units, which are alike to some of these, with some of the options."""
        phases = self.phases[:, :, np.asarray(which)[:, None], options]
        return MemoryRows(np.full(len(_PHASES) * len(which), self.constant[0]), phases)

    @property
    def num_units(self) -> int:
        """Number of units of the model."""
        return self.phases.shape[2]

    def name(self, row: int) -> tuple[str, int]:
        """Phase and unit of a row."""
        return _PHASES[row // self.num_units], row % self.num_units

    def in_time(self) -> list[int]:
        """All rows in order of time."""
        num = self.num_units
        found = list(range(num))
        for unit in range(num - 1, -1, -1):
            found += [num + unit, 2 * num + unit, 3 * num + unit]
            found += [4 * num + unit + 1] if unit + 1 < num else []
        owners = self.phases[_PHASES.index("owners")]
        owned = np.flatnonzero((owners[_FAR + 1] != owners[0]).any(axis=1))
        return [*found, 4 * num, *(6 * num + int(unit) for unit in owned), *range(5 * num, 6 * num)]

    def terms(self, row: int) -> Ints:
        """What each option of each unit adds to a row; shape (units, options)."""
        phase, unit = self.phases[row // self.num_units], row % self.num_units
        terms = np.concatenate([phase[0][:unit], phase[-1][unit:]])
        for away in range(-_FAR, _FAR + 1):
            if 0 <= unit + away < self.num_units:
                terms[unit + away] = phase[away + _FAR + 1][unit + away]
        return terms

    def values(self, chosen: Ints) -> Ints:
        """Bytes of every row, for the number of the option of each unit."""
        return self._sums(self.phases[:, :, np.arange(self.num_units), chosen])

    def least(self, is_open: npt.NDArray[np.bool_]) -> Ints:
        """The least bytes of every row, taken alone, with any options that are open."""
        return self._sums(np.where(is_open, self.phases, np.iinfo(np.int64).max).min(axis=3))

    def _sums(self, parts: Ints) -> Ints:
        """Bytes of every row from what each unit adds, as `phases`."""
        num = self.num_units
        ahead, after = np.cumsum(parts[:, 0], axis=1), np.cumsum(parts[:, -1, ::-1], axis=1)[:, ::-1]
        sums = np.zeros((len(parts), num), dtype=np.int64)
        sums[:, _FAR + 1 :] += ahead[:, : -_FAR - 1]
        sums[:, : -_FAR - 1] += after[:, _FAR + 1 :]
        for away in range(-_FAR, _FAR + 1):
            if abs(away) < num:
                rows = slice(max(0, -away), num - max(0, away))
                sums[:, rows] += parts[:, away + _FAR + 1, max(0, away) : num - max(0, -away)]
        return sums.reshape(-1) + self.constant


@dataclass(frozen=True, slots=True)
class PeakParts:
    """The moment of a step at which most bytes live, and what they are.

    Args:
        phase: Of the moment, as `Moment` has it.
        unit: Number of its unit.
        by_category: Bytes of parameters as they are stored, gradients, optimizer (states, and temporaries of its step),
            copies and communication (gathered copies, send buffers, what is received and added up), activations, and
            buffers and inputs.
    """

    phase: str
    unit: int
    by_category: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return sum(self.by_category.values())


def parts_of_peak(model: ModelCosts, strategies: Sequence[Strategy], cluster: Cluster) -> PeakParts:
    """The peak of a step, by what its bytes are; of several moments with as many the first phase's."""
    options, zeros = options_of(model, strategies, cluster), np.zeros(len(model.units), dtype=np.int64)
    rows = MemoryRows.of(model, table_of([[option] for option in options]))
    row = int(rows.values(zeros).argmax())

    def at_peak(parts: Sequence[Option]) -> int:
        return int(MemoryRows.of(model, table_of([[part] for part in parts])).values(zeros)[row])

    bare = options_of(_changed(model, _no_activations), strategies, cluster)
    stateless = options_of(_changed(model, _no_activations, _no_states), strategies, cluster)
    stateless = list(map(without_rows, stateless))
    total, without = at_peak(options), at_peak(bare)
    shards = [_shards(unit, own, cluster) for unit, own in zip(model.units, strategies, strict=True)]
    gradients = [_gradients(option, split) for option, (_, split) in zip(bare, shards, strict=True)]
    found = {
        "parameters": sum(held for held, _ in shards),
        "gradients": at_peak(gradients) - model.buffer_bytes,
        "optimizer": without - at_peak(stateless),
    }
    found["copies and communication"] = without - model.buffer_bytes - sum(found.values())
    found |= {"activations": total - without, "buffers and inputs": model.buffer_bytes}
    return PeakParts(*rows.name(row), found)


def _changed(model: ModelCosts, *changes: Callable[[UnitCosts], UnitCosts]) -> ModelCosts:
    units = model.units
    for change in changes:
        units = tuple(map(change, units))
    return replace(model, units=units)


def _no_activations(unit: UnitCosts) -> UnitCosts:
    return replace(
        unit, activation_bytes=0, forward_transient_bytes=0, backward_transient_bytes=0, gradients_transient_bytes=0
    )


def _no_states(unit: UnitCosts) -> UnitCosts:
    params = (replace(param, state_bytes_per_element=0, step_bytes_per_element=0) for param in unit.params)
    return replace(unit, params=tuple(params))


def _shards(unit: UnitCosts, strategy: Strategy, cluster: Cluster) -> tuple[int, int]:
    """Bytes of parameters that a rank holds all the time, and of reduced gradients of those that are split."""
    if unit.is_offloaded:
        return 0, 0
    within = sharing(strategy, cluster.num_ranks)
    held = [(param, param.shard_numel(within) * param.stored_itemsize) for param in unit.params]
    split = sum(n for p, n in held if strategy.num_slices > 1 and p.can_split and p.grad_itemsize)
    return sum(n for _, n in held), split


def _gradients(option: Option, split: int) -> Option:
    """The part of an option's bytes that gradients take: computed, waiting for their reduction, and reduced."""
    beside = option.backward_use_bytes + option.sent_bytes  # copies in use, and the send buffer with what is split
    return only(
        grad_bytes=option.grad_bytes,
        filling_bytes=max(0, option.filling_bytes - beside) + split,
        slicing_bytes=max(0, option.slicing_bytes - beside) + split,
        sent_bytes=split,
        in_flight_bytes=split,
        whole_in_flight_bytes=split,
        ending_bytes=split,
    )


# What CUDA's allocator reserves, over the predicted peak of live bytes: means of 15 and 14 steps of GPTs of 0.1 to 2.7
# billion parameters on an H200 (1.06 to 1.36, and 1.01 to 1.19), under ddp, keep, full and FSDP2: see
# benchmarks/results/reserved.json. The workspaces of cuBLAS are part of it.
RESERVED: Mapping[str, float] = MappingProxyType({"reserved": 1.13, "expandable": 1.06})
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of a CUDA device that torch's allocator does not count.

    Args:
        name: Of it.
        num_bytes: As a rule.
        most_bytes: What it may be.
        source: Where the figures come from.
    """

    name: str
    num_bytes: int
    most_bytes: int
    source: str


def workspaces_of(strategies: Sequence[Strategy], cluster: Cluster) -> tuple[Workspace, ...]:
    """What CUDA and NCCL take beside what the allocator reserves."""
    num = _num_communicators(strategies, cluster)
    return (
        Workspace(
            "CUDA context",
            500 * _MIB,
            700 * _MIB,
            source="from memory: what nvidia-smi shows of a process without tensors",
        ),
        Workspace(
            f"NCCL ({num} communicator{'s' * (num != 1)})",
            num * 200 * _MIB,
            num * 600 * _MIB,
            source="from memory: channels x buffers of 4 MiB, per communicator",
        ),
    )


def _num_communicators(strategies: Sequence[Strategy], cluster: Cluster) -> int:
    """Groups in which a rank communicates: all ranks, and under `hybrid` those with its shards, and its replicas.

    One more is that of the ranks over which layers are cut.
    """
    num_cut = int(cluster.tensor_parallel > 1)
    if cluster.num_ranks == 1:
        return num_cut
    within = {own.on(cluster.num_ranks).within or cluster.num_ranks for own in strategies if own.base != "ddp"}
    return 1 + 2 * len(within - {cluster.num_ranks}) + num_cut


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Bytes of the rank that has most, each under the name by which users see it.

    Args:
        live_bytes: The most bytes of tensors at one moment: `Plan.peak_bytes`, and about `max_memory_allocated()`.
        reserved_bytes: `max_memory_reserved()`: the allocator's segments, by a measured factor.
        expandable_bytes: The same with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
        workspaces: What else there is.
    """

    live_bytes: int
    reserved_bytes: int
    expandable_bytes: int
    workspaces: tuple[Workspace, ...] = ()

    @property
    def device_bytes(self) -> int:
        """What `nvidia-smi` shows: segments, and what lies outside of the allocator."""
        return self.reserved_bytes + sum(each.num_bytes for each in self.workspaces)

    @property
    def most_device_bytes(self) -> int:
        """The same with the most that workspaces may take."""
        return self.reserved_bytes + sum(each.most_bytes for each in self.workspaces)

    def lines(self, limit_bytes: int = 0, memory_of: str = "live") -> list[str]:
        """As text, with what to do where segments exceed a limit of the bytes that live, or others; 0 for none."""
        outside = [f"{each.name} {bytes_text(each.num_bytes)}" for each in self.workspaces]
        lines = [
            f"  on CUDA: reserved about {bytes_text(self.reserved_bytes)} (expandable segments: "
            f"{bytes_text(self.expandable_bytes)})",
            f"  nvidia-smi: {bytes_text(self.device_bytes)} to {bytes_text(self.most_device_bytes)}, with "
            f"{', '.join(outside)}",
        ]
        if memory_of != "reserved" and self.live_bytes <= limit_bytes < self.reserved_bytes:
            lines.append(
                "  the limit holds with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and not without"
                if memory_of == "expandable"
                else "  segments take more than the limit, which is of live bytes: set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or plan with memory_of='reserved'"
            )
        return lines


def forecast(model: ModelCosts, strategies: Sequence[Strategy], cluster: Cluster) -> MemoryForecast:
    """What a step takes on CUDA: its live bytes, times what the allocator was measured to reserve for such."""
    live = peak_bytes(model, strategies, cluster)
    reserved = {name: int(live * factor) for name, factor in RESERVED.items()}
    return MemoryForecast(live, reserved["reserved"], reserved["expandable"], workspaces_of(strategies, cluster))
