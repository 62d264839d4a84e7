"""What one unit costs under one strategy: the terms of which memory and time of a step are made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dshard import arguments
from dshard.planner.costs import Cluster, ModelCosts, UnitCosts, ceil_div
from dshard.planner.sizes import Reduction, Sizes, sharing, split_of
from dshard.policies import Strategy, read_per_unit

CLUSTER_WAY = "Pass dshard.planner.cluster_of(device, 512), or what measure_links gave."


class Option(NamedTuple):
    """One unit under one strategy.

    Args:
        held_bytes: Parameters and optimizer states, all the time; and whole copies that stay.
        kept_bytes: A gathered copy from its forward to its backward.
        forward_use_bytes: Gathered copies while its forward runs.
        forward_ahead_bytes: The same while the forward before it runs.
        backward_use_bytes: Gathered copies, its own kept one included, in its backward, until there is a gradient.
        backward_ahead_bytes: Gathered copies, besides a kept one, while the backward before it in time runs.
        filling_bytes: The same from then on, and its gradients: those just computed, and the send buffer.
        slicing_bytes: The same once a slice of a gradient is in flight.
        sent_bytes: The send buffer alone, and reduced slices, when its backward has ended.
        in_flight_bytes: Of its reduction, with reduced slices, while the next backward runs.
        whole_in_flight_bytes: The same without the last slice, once that has arrived.
        ending_bytes: The same when the reduction ends and its rows are added up.
        replicas_bytes: Of its all-reduce over replicas, beside reduced gradients, in the backward after that.
        late_replicas_bytes: The same in the backward after that one, and before that when a reduction ends.
        grad_bytes: Its gradients, once they are reduced.
        waiting_bytes: Whole gradients that wait for the last micro-batch.
        step_bytes: Temporaries of the optimizer's step, of all its parameters.
        largest_step_bytes: The same of the parameter that has most.
        gather_s: Exposed unless hidden behind the forward before it; of the first forward of a step.
        gather_again_s: The same in later forwards of the step.
        gather_backward_s: The same in backward.
        forward_s: Its forward, with slices that are waited for.
        forward_comm_s: What its own slices take of the channel in that time.
        backward_s: Its backward, likewise.
        backward_comm_s: Likewise.
        reduce_s: Its reduction, in the last backward of a step.
        reduce_early_s: The same in earlier ones.
        optimizer_s: The optimizer's step on what this rank holds.
        activation_bytes: What its forward keeps until its backward.
        forward_transient_bytes: More that is live only while its forward runs.
        backward_transient_bytes: More that is live only while its backward runs, until there is a gradient.
        gradients_transient_bytes: The same from then on; below 0 where some of its activations are gone by then.
    """

    held_bytes: int
    kept_bytes: int
    forward_use_bytes: int
    forward_ahead_bytes: int
    backward_use_bytes: int
    backward_ahead_bytes: int
    filling_bytes: int
    slicing_bytes: int
    sent_bytes: int
    in_flight_bytes: int
    whole_in_flight_bytes: int
    ending_bytes: int
    replicas_bytes: int
    late_replicas_bytes: int
    grad_bytes: int
    waiting_bytes: int
    step_bytes: int
    largest_step_bytes: int
    gather_s: float
    gather_again_s: float
    gather_backward_s: float
    forward_s: float
    forward_comm_s: float
    backward_s: float
    backward_comm_s: float
    reduce_s: float
    reduce_early_s: float
    optimizer_s: float
    activation_bytes: int
    forward_transient_bytes: int
    backward_transient_bytes: int
    gradients_transient_bytes: int


def only(**given: int) -> Option:
    """An option of which some fields are given, and the others 0."""
    return Option(**(dict.fromkeys(Option._fields, 0) | given))


def table_of(options: Sequence[Sequence[Option]]) -> npt.NDArray[np.float64]:
    """All fields of the options of some units, each of as many; shape (units, options, fields)."""
    return np.array(options, dtype=np.float64)


def check_costs(who: str, model: ModelCosts, cluster: Cluster) -> None:
    """Check the arguments `model` and `cluster` of a function.

    Raises:
        ArgumentError: One is none.
    """
    arguments.instance(who, "model", model, ModelCosts, "Pass dshard.planner.ModelCosts(...).")
    arguments.instance(who, "cluster", cluster, Cluster, CLUSTER_WAY)


def read_step(
    who: str, model: ModelCosts, strategies: Sequence[Strategy | str], cluster: Cluster
) -> tuple[Strategy, ...]:
    """Check the arguments of a function of one step, and return a strategy for each unit.

    Raises:
        ArgumentError: One of them is none that is allowed, or there are more or fewer strategies than units.
    """
    check_costs(who, model, cluster)
    found, allowed = read_per_unit(who, "strategies", strategies), f"a list of {len(model.units)}, one per unit"
    arguments.expect(len(found) == len(model.units), who, "strategies", strategies, allowed, "Pass one per unit.")
    return found


def options_of(model: ModelCosts, strategies: Sequence[Strategy | str], cluster: Cluster) -> list[Option]:
    """The option of each unit under its strategy.

    Raises:
        PlacementError: The ranks that share a parameter do not divide those of the cluster.
    """
    given = zip(model.units, strategies, strict=True)
    num_ranks = cluster.num_ranks
    return [
        options_of_unit((unit,), (Strategy.of(own).on(num_ranks),), cluster, model.num_backwards)[0]
        for unit, own in given
    ]


def options_of_unit(
    kinds: Sequence[UnitCosts], strategies: Sequence[Strategy], cluster: Cluster, num_backwards: int = 1
) -> list[Option]:
    """What a unit costs under each of some strategies.

    Args:
        kinds: The unit under each kind of activation checkpointing, and in each place where it may be kept.
        strategies: Resolved: `Strategy.on`.
        cluster: Devices and links.
        num_backwards: Micro-batches per step.

    Returns:
        All strategies for the first kind, then for the second, and so on.
    """
    known: dict[tuple[int, int, bool], tuple[Sizes, Reduction, _Comm]] = {}  # whatever the activation checkpointing
    cuts = [(sharing(strategy, cluster.num_ranks), strategy.num_slices) for strategy in strategies]
    found = []
    for unit in kinds:
        for strategy, cut in zip(strategies, cuts, strict=True):
            if (*cut, unit.is_offloaded) not in known:
                given = unit, *cut, cluster
                known[*cut, unit.is_offloaded] = Sizes.of(*given), Reduction.of(*given), _Comm.of(*given)
            found.append(_option(unit, strategy, known[*cut, unit.is_offloaded], num_backwards, cluster))
    return found


def _option(unit: UnitCosts, strategy: Strategy, parts: "_Parts", num_backwards: int, cluster: Cluster) -> Option:
    """What `unit` costs under a strategy that cuts it so."""
    (sizes, reduction, comm), whole = parts, strategy.base == "ddp"
    stays, moves = strategy.base in ("zero1", "zero2"), strategy.base == "full" or (whole and unit.is_offloaded)
    again = moves and unit.is_used_in_backward  # moved to where it is used, each time
    waits = strategy.base == "zero1" and num_backwards > 1
    use, lost = sizes.gathered + 2 * sizes.gather_slice, cluster.interference
    is_gathered = again or strategy.base == "keep" or (whole and unit.is_used_in_backward)
    ahead = sizes.gathered + sizes.gather_slice + sizes.moving
    again_use, slices = (sizes.gathered, 2 * sizes.gather_slice) if is_gathered else (0, 0)
    gather_again_s, reduce_early_s = 0.0 if stays else comm.gather_again_s, 0.0 if waits else comm.reduce_s
    gather_backward_s, later = comm.gather_again_s if again else 0.0, num_backwards - 1
    # Per micro-batch: the first gathers, and the last reduces, otherwise than the others.
    gathers_s, reductions_s = comm.gather_s + later * gather_again_s, comm.reduce_s + later * reduce_early_s
    lost_s = lost * (comm.backward_comm_s + gather_backward_s + reductions_s / num_backwards)
    return Option(
        held_bytes=sizes.stored + (sizes.gathered if stays else 0),
        kept_bytes=sizes.gathered if strategy.base == "keep" else 0,
        forward_use_bytes=0 if stays else use,
        forward_ahead_bytes=sizes.moving if stays else 0 if whole and not moves else ahead,
        backward_use_bytes=use if is_gathered else 0,
        backward_ahead_bytes=ahead if again else 0,
        filling_bytes=again_use + reduction.filling(slices),
        slicing_bytes=again_use + reduction.slicing(slices),
        sent_bytes=reduction.sent + reduction.split_grads,
        in_flight_bytes=reduction.flying + reduction.slice_in_flight,
        whole_in_flight_bytes=reduction.flying,
        ending_bytes=reduction.flying + reduction.slice_in_flight + reduction.ending,
        replicas_bytes=reduction.among_replicas + reduction.homing,
        late_replicas_bytes=reduction.late_among_replicas,
        grad_bytes=reduction.homing if comm.homing_s > unit.backward_s else reduction.grads,  # or they queue
        waiting_bytes=reduction.sent if waits else 0,
        step_bytes=sum(sizes.steps),
        largest_step_bytes=max(sizes.steps, default=0),
        gather_s=comm.gather_s,
        gather_again_s=gather_again_s,
        gather_backward_s=gather_backward_s,
        forward_s=comm.forward_s(unit, cluster) + lost * (comm.forward_comm_s + gathers_s / num_backwards),
        forward_comm_s=comm.forward_comm_s,
        backward_s=comm.backward_s(unit, cluster) + lost_s,
        backward_comm_s=comm.backward_comm_s,
        reduce_s=comm.reduce_s,
        reduce_early_s=reduce_early_s,
        optimizer_s=unit.optimizer_s * sizes.share + unit.optimizer_start_s,
        activation_bytes=unit.activation_bytes,
        forward_transient_bytes=unit.forward_transient_bytes,
        backward_transient_bytes=unit.backward_transient_bytes,
        gradients_transient_bytes=unit.late_transient_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Comm:
    """Seconds of a unit's collectives, whatever its activation checkpointing, and in how many steps it computes."""

    gather_s: float
    gather_again_s: float
    forward_comm_s: float
    backward_comm_s: float
    reduce_s: float
    homing_s: float  # of gradients on their way to the CPU's memory
    num_steps: int
    num_split: int

    @classmethod
    def of(cls, unit: UnitCosts, within: int, num_slices: int, cluster: Cluster) -> "_Comm":
        """Times of one forward and backward."""
        split, rest = split_of(unit, num_slices)
        gather_bytes = sum(p.numel * p.gather_itemsize for p in rest)
        gather_s = again_s = cluster.all_gather_s(gather_bytes, within)
        if cluster.shares_memory(within):
            again_s = cluster.in_place_s(gather_bytes, within)
            copied = sum(p.numel * p.gather_itemsize for p in rest if p.is_beside)
            gather_s = max(again_s, cluster.all_gather_s(copied, within))  # of what has changed
        if unit.is_offloaded:  # the copy comes first; both beside the unit before
            copied_s = unit.home_s_per_byte * sum(p.shard_numel(within) * p.stored_itemsize for p in unit.params)
            gather_s, again_s = gather_s + copied_s, again_s + copied_s
        gather_slices, reduce_slices, num_steps = [], [], 0
        for param in split:
            num = min(num_slices, ceil_div(param.length, within))
            numel = param.slice_numel(within, num_slices)
            gather_slices += [cluster.all_gather_s(numel * param.gather_itemsize, within)] * num
            reduce_slices += [cluster.reduce_scatter_s(numel * param.grad_itemsize, within)] * num
            num_steps += num
        ahead_s, last_s = (gather_slices[0], reduce_slices[-1]) if num_steps else (0.0, 0.0)
        forward_comm_s = sum(gather_slices) - ahead_s
        backward_comm_s = forward_comm_s + sum(reduce_slices) - last_s
        grad_bytes = sum(p.numel * p.grad_itemsize for p in rest)
        out_bytes = sum(p.shard_numel(within) * p.stored_itemsize for p in rest if p.grad_itemsize)
        reduce_s = cluster.reduce_scatter_s(grad_bytes, within) + last_s + _replicas_s(unit, within, cluster)
        return cls(
            gather_s=gather_s + ahead_s,
            gather_again_s=again_s + ahead_s,
            forward_comm_s=forward_comm_s,
            backward_comm_s=backward_comm_s,
            reduce_s=max(reduce_s, unit.home_s_per_byte * out_bytes),  # a copy home runs beside the next reduction
            homing_s=unit.home_s_per_byte * out_bytes,
            num_steps=num_steps,
            num_split=len(split),
        )

    def forward_s(self, unit: UnitCosts, cluster: Cluster) -> float:
        """Its forward, with slices that are waited for."""
        return self._computing_s(unit.forward_s, self.forward_comm_s, unit, cluster)

    def backward_s(self, unit: UnitCosts, cluster: Cluster) -> float:
        """Its backward, likewise."""
        return self._computing_s(unit.backward_s, self.backward_comm_s, unit, cluster)

    def _computing_s(self, own_s: float, comm_s: float, unit: UnitCosts, cluster: Cluster) -> float:
        overhead_s = unit.slice_overhead_s * max(self.num_steps - self.num_split, 0)
        return _with_slices((own_s + overhead_s) * (1 + cluster.stragglers), comm_s, self.num_steps)


def _with_slices(compute_s: float, comm_s: float, num_steps: int) -> float:
    """A computation in steps, each of which waits for its slice: all but one of them hide what comes later."""
    first_s = compute_s / max(num_steps, 1)
    return first_s + max(compute_s - first_s, comm_s)


def _replicas_s(unit: UnitCosts, within: int, cluster: Cluster) -> float:
    """All-reduce of reduced shards over the replicas."""
    shard_bytes = sum(p.shard_numel(within) * p.grad_itemsize for p in unit.params)
    return cluster.all_reduce_s(shard_bytes, within) if within < cluster.num_ranks else 0.0


_Parts = tuple[Sizes, Reduction, _Comm]
