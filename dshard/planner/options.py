"""What one unit costs under one strategy: the terms of which memory and time of a step are made."""

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dshard import arguments
from dshard.layout import ALIGN_BYTES, HEADER_BYTES, MIN_DIRECT_BYTES, ROW_NUMEL, SMALL_GRAD_BYTES, flags_numel
from dshard.planner.costs import COUNTER_BYTES, Cluster, ModelCosts, ParamCosts, UnitCosts, ceil_div
from dshard.planner.owners import Owners
from dshard.policies import Strategy, read_per_unit

CLUSTER_WAY = "Pass dshard.planner.cluster_of(device, 512), or what measure_links gave."


class Option(NamedTuple):
    """One unit under one strategy.

    Args:
        held_bytes: Parameters and optimizer states, all the time; and whole copies that stay.
        kept_bytes: A gathered copy from its forward to its backward.
        forward_use_bytes: Gathered copies while its forward runs, and what else is live only then.
        forward_ahead_bytes: The same while the forward before it runs.
        backward_use_bytes: Gathered copies, its own kept one included, in its backward, until there is a gradient; and
            what else is live only then.
        backward_ahead_bytes: Gathered copies, besides a kept one, while the backward before it in time runs.
        filling_bytes: The same from then on, and its gradients: those just computed, and the send buffer. Less where
            some of its activations are gone by then.
        slicing_bytes: The same once a slice of a gradient is in flight.
        sent_bytes: The send buffer alone, and reduced slices, when its backward has ended.
        in_flight_bytes: Of its reduction, with reduced slices, while the next backward runs.
        whole_in_flight_bytes: The same without the last slice, once that has arrived.
        ending_bytes: The same when the reduction ends and its rows are added up.
        replicas_bytes: Of its all-reduce over replicas, beside reduced gradients, in the backward after that.
        late_replicas_bytes: The same in the backward after that one, and before that when a reduction ends.
        grad_bytes: Its gradients, once they are reduced; and whole ones that wait for the last micro-batch.
        step_bytes: Temporaries of the optimizer's step, of all its parameters.
        largest_step_bytes: The same of the parameter that has most.
        row_bytes: Of rows in which the step computes small parameters: they, and their gradients, beside the others.
        long_row_bytes: The same with temporaries of all of them, where the others are stepped one by one.
        owners_bytes: While owners step the parameters that are cut as its own ones that they step; 0 if it has none.
        gather_s: Exposed unless hidden behind the forward before it; of the first forward of a step.
        gather_again_s: The same in later forwards of the step.
        gather_backward_s: The same in backward.
        forward_s: Its forward, with slices that are waited for.
        forward_comm_s: What its own slices take of the channel in that time.
        backward_s: Its backward, likewise.
        backward_comm_s: Likewise.
        reduce_s: Its reduction, in the last backward of a step.
        reduce_early_s: The same in earlier ones.
        optimizer_s: The optimizer's step on what this rank holds, and what owners step, with its way there and back.
        activation_bytes: What its forward keeps until its backward.
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
    step_bytes: int
    largest_step_bytes: int
    row_bytes: int
    long_row_bytes: int
    owners_bytes: int
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


def only(**given: int) -> Option:
    """An option of which some fields are given, and the others 0."""
    return Option(**(dict.fromkeys(Option._fields, 0) | given))


def without_rows(option: Option) -> Option:
    """An option of which no parameter is stepped in a row."""
    fields: dict[str, Any] = dict(zip(Option._fields, option, strict=True))
    return Option(**(fields | {"row_bytes": 0, "long_row_bytes": 0}))


def table_of(options: Sequence[Sequence[Option]]) -> npt.NDArray[np.void]:
    """The options of some units, each of as many, as an array with fields of their names; shape (units, options)."""
    return np.array(options, dtype=[(name, np.float64) for name in Option._fields])


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
    num_ranks, owners = cluster.num_ranks, Owners(model, cluster)
    return [
        options_of_unit((unit,), (Strategy.of(own).on(num_ranks),), cluster, owners, model.num_backwards)[0]
        for unit, own in given
    ]


def options_of_unit(
    kinds: Sequence[UnitCosts],
    strategies: Sequence[Strategy],
    cluster: Cluster,
    owners: Owners,
    num_backwards: int = 1,
) -> list[Option]:
    """What a unit costs under each of some strategies.

    Args:
        kinds: The unit under each kind of activation checkpointing, and in each place where it may be kept.
        strategies: Resolved: `Strategy.on`.
        cluster: Devices and links.
        owners: Of the model that the unit belongs to.
        num_backwards: Micro-batches per step.

    Returns:
        All strategies for the first kind, then for the second, and so on.
    """
    known: dict[tuple[int, int, bool], _Cut] = {}  # whatever the activation checkpointing
    found = []
    for unit in kinds:
        for strategy in strategies:
            key = sharing(strategy, cluster.num_ranks), strategy.num_slices, unit.is_offloaded
            if key not in known:
                known[key] = _Cut(unit, *key[:2], cluster, owners)
            found.append(_option(unit, strategy, known[key], num_backwards, cluster))
    return found


def sharing(strategy: Strategy, num_ranks: int) -> int:
    """How many of some ranks share a parameter under a strategy; 1 where each has all of it."""
    return 1 if strategy.base == "ddp" else strategy.within or num_ranks


def _option(unit: UnitCosts, strategy: Strategy, cut: "_Cut", num_backwards: int, cluster: Cluster) -> Option:
    """What `unit` costs under a strategy that cuts it so."""
    whole, stays = strategy.base == "ddp", strategy.base in ("zero1", "zero2")
    moves = strategy.base == "full" or (whole and unit.is_offloaded)
    again = moves and unit.is_used_in_backward  # moved to where it is used, each time
    waits = strategy.base == "zero1" and num_backwards > 1
    is_gathered = again or strategy.base == "keep" or (whole and unit.is_used_in_backward)
    use, ahead = cut.gathered + 2 * cut.slice, cut.gathered + cut.slice + cut.moving
    kept = cut.gathered if strategy.base == "keep" or (moves and unit.is_used_throughout) else 0
    gather_again_s, reduce_early_s = 0.0 if stays else cut.gather_again_s, 0.0 if waits else cut.reduce_s
    gather_backward_s, later = cut.gather_again_s if again else 0.0, num_backwards - 1
    # Per micro-batch: the first gathers, and the last reduces, otherwise than the others.
    gathers_s, reductions_s = cut.gather_s + later * gather_again_s, cut.reduce_s + later * reduce_early_s
    sent_forward_s = cut.forward_comm_s + gathers_s / num_backwards
    sent_backward_s = cut.backward_comm_s + gather_backward_s + reductions_s / num_backwards
    late = unit.late_transient_bytes + (cut.gathered if is_gathered else 0) + cut.sent + cut.small + cut.split_grads
    slices = 2 * cut.slice if is_gathered else 0
    arriving = cut.homing if cut.homing_s > unit.backward_s else cut.grads  # those that go home slowly queue
    return Option(
        held_bytes=cut.stored + (cut.gathered if stays else 0),
        kept_bytes=kept,
        forward_use_bytes=unit.forward_transient_bytes + (0 if stays else use),
        forward_ahead_bytes=cut.moving if stays else 0 if whole and not moves else ahead,
        backward_use_bytes=unit.backward_transient_bytes + (use if is_gathered else 0),
        backward_ahead_bytes=ahead - kept if again else 0,
        filling_bytes=late + max(cut.large, slices, cut.slice_raw),
        slicing_bytes=late + cut.slicing(slices),
        sent_bytes=cut.sent + cut.split_grads,
        in_flight_bytes=cut.flying + cut.slice_in_flight,
        whole_in_flight_bytes=cut.flying,
        ending_bytes=cut.flying + cut.slice_in_flight + cut.ending,
        replicas_bytes=cut.among_replicas + cut.homing,
        late_replicas_bytes=cut.late_among_replicas,
        grad_bytes=arriving + (cut.sent if waits else 0),
        step_bytes=sum(cut.steps),
        largest_step_bytes=max(cut.steps, default=0),
        row_bytes=cut.rows,
        long_row_bytes=cut.long_rows,
        owners_bytes=cut.owners_bytes,
        gather_s=cut.gather_s,
        gather_again_s=gather_again_s,
        gather_backward_s=gather_backward_s,
        forward_s=cut.computing_s(unit, unit.forward_s, cut.forward_comm_s) + cluster.interference * sent_forward_s,
        forward_comm_s=cut.forward_comm_s,
        backward_s=cut.computing_s(unit, unit.backward_s, cut.backward_comm_s) + cluster.interference * sent_backward_s,
        backward_comm_s=cut.backward_comm_s,
        reduce_s=cut.reduce_s,
        reduce_early_s=reduce_early_s,
        optimizer_s=unit.optimizer_s * cut.share + unit.optimizer_start_s + cut.owners_s(unit),
        activation_bytes=unit.activation_bytes,
    )


class _Cut:
    """A unit whose parameters are cut in one way: bytes on the rank that has most, and seconds of collectives.

    Args:
        unit: Of whatever activation checkpointing.
        within: Ranks that share each parameter.
        num_slices: In which those are used that can be split.
        cluster: Devices and links.
        owners: Of the whole model.
    """

    def __init__(self, unit: UnitCosts, within: int, num_slices: int, cluster: Cluster, owners: Owners) -> None:
        self._unit, self._within, self._num_slices, self._cluster = unit, within, num_slices, cluster
        self._owners, self._owned = owners, [param for param in unit.params if param.owner_work]
        self.owners_bytes = owners.step_bytes(within, unit.is_offloaded) if self._owned else 0
        self._split = [param for param in unit.params if param.can_split and num_slices > 1]
        self._rest = [param for param in unit.params if not (param.can_split and num_slices > 1)]
        self._size_parameters()
        self._size_gradients()
        self._size_replicas()
        self._time_collectives()

    def _size_parameters(self) -> None:
        """Shards and states, gathered copies, and what is on its way.

        Of full values that a host has once, a rank stores its part of those of which the shards are none: what is cast
        or cut along another dim than 0, and numbers, which every rank holds.
        """
        unit, within, rest = self._unit, self._within, self._rest
        is_once = self._cluster.shares_memory(within) and not unit.is_offloaded
        shards = [(param, param.shard_numel(within)) for param in unit.params]
        is_in_place = within > 1 and not self._cluster.keeps_received_rows  # where a rank packs, and casts, its row
        casting = [] if is_in_place else [(p, n) for p, n in shards if _casts(p) and not (is_once and p in rest)]
        cast = sum(n * p.gather_itemsize for p, n in casting)
        copied = rest if unit.is_offloaded else [p for p in rest if not is_once and (within > 1 or _casts(p))]
        self.gathered = sum(_gathered_bytes(param, within, self._cluster) for param in copied)
        slices = [self._slice_bytes(param) for param in self._split if within > 1 or _casts(param)]
        self.slice = max(slices, default=0)  # the largest one
        self.share = sum(n for _, n in shards) / max(unit.numel, 1)
        self.moving = (cast if within > 1 or not unit.is_offloaded else 0) + _header_bytes(within, self._cluster)
        row = sum(n * p.stored_itemsize for p, n in shards)
        if unit.is_offloaded:  # on the device are copies, and the row that they are gathered from
            self.stored, self.steps, self.rows, self.long_rows = 0, list[int](), 0, 0
            self.moving += row if within > 1 or cast else 0  # else what arrives is what is used
            return
        stepped = [(p, n) for p, n in shards if not p.owner_work]
        states = sum(p.state_bytes_of(n) + COUNTER_BYTES * (p.state_bytes_per_element > 0) for p, n in stepped)
        states += ceil(sum(p.state_bytes_of(p.numel) for p in self._owned) * self._owners.state_share)
        beside = sum(p.shard_numel(within) * p.gather_itemsize for p in rest if p.is_beside or p.numel == 1)
        self.stored = row + states + (beside if is_once else 0)
        self.steps = [n * p.step_bytes_per_element for p, n in stepped]
        in_rows = [(n, p) for p, n in stepped if p.grad_itemsize and p.numel > 1 and n <= ROW_NUMEL]
        self.rows = sum(n * 2 * p.stored_itemsize for n, p in in_rows)
        self.long_rows = self.rows + sum(n * p.step_bytes_per_element for n, p in in_rows)

    def _size_gradients(self) -> None:
        """Gradients as autograd gives them, the send buffer, what is received and added up, and what comes of them.

        The send buffer is a row of flags and padded shards per rank; under ddp one of all, that becomes the gradients.
        """
        within, trained = self._within, [param for param in self._rest if param.grad_itemsize]
        split = [param for param in self._split if param.grad_itemsize]
        sizes = [param.numel * param.gather_itemsize for param in trained]
        self.small = sum(size for size in sizes if size <= SMALL_GRAD_BYTES)  # these wait until the reduction leaves
        self.large = max((size for size in sizes if size > SMALL_GRAD_BYTES), default=0)
        self._widest = max((param.grad_itemsize for param in trained), default=4)
        self._row = flags_numel(len(trained)) * self._widest if trained else 0
        self._row += sum(param.shard_numel(within) * param.grad_itemsize for param in trained)
        self.sent = within * self._row
        converted = sum(param.shard_numel(within) * param.stored_itemsize for param in trained)
        converts = any(param.grad_itemsize != param.stored_itemsize for param in trained)
        self.split_grads = sum(param.shard_numel(within) * param.stored_itemsize for param in split)
        if self._unit.is_offloaded:  # the reduced row on its way to the CPU's memory, and what it is converted to
            self.grads, self.homing = 0, self._row + (converted if converts else 0)
        else:
            self.grads, self.homing = (converted if converts else self._row) + self.split_grads, 0
        self._num_split, self.slice_raw = len(split), max(map(self._slice_bytes, split), default=0)
        rows = [(flags_numel(1) + param.slice_numel(within, self._num_slices) // within, param) for param in split]
        row, itemsize = max(((n * p.grad_itemsize, p.grad_itemsize) for n, p in rows), default=(0, 4))
        received, self._slice_sums = self._received(row, itemsize)
        self.slice_in_flight = within * row + received

    def _size_replicas(self) -> None:
        """What the reduction adds to its send buffer, and its all-reduce among ranks that hold the same shards."""
        within, cluster, num_replicas = self._within, self._cluster, self._cluster.num_ranks // self._within
        received, sums = self._received(self._row, self._widest)
        self.among_replicas = self.late_among_replicas = 0
        if cluster.keeps_received_rows and num_replicas > 1:
            part, headers = ceil_div(self._row, num_replicas), _header_bytes(num_replicas, cluster)
            self.among_replicas = (num_replicas - 1) * part + headers
            self.late_among_replicas = part + headers if cluster.replicas_share_memory(within) else 0
            sums = max(sums, _sum_bytes(self._row if within > 1 else part, self._widest, max(within, num_replicas)))
        if within == 1:  # there is nothing to reduce but among replicas
            received, self.among_replicas, self.late_among_replicas = self.among_replicas, self.late_among_replicas, 0
        self.flying = self.sent + received + self.split_grads
        self.ending = max(sums, self._slice_sums, self.homing)  # more, when rows are added up or gradients go home

    def slicing(self, gathered_slices: int) -> int:
        """The most of gradients and slices in its backward, once a slice of a gradient is in flight.

        Of one weight, slices of the gradient of its input come first.
        """
        beside = self.large if self._num_split < 2 else max(self.large, gathered_slices)
        return max(beside, self.slice_raw + self._slice_sums) + self.slice_in_flight

    def _slice_bytes(self, param: ParamCosts) -> int:
        """The largest slice of a parameter, and of its gradient as autograd gives it."""
        return param.slice_numel(self._within, self._num_slices) * param.gather_itemsize

    def _received(self, row: int, itemsize: int) -> tuple[int, int]:
        """Bytes that a reduce-scatter receives, and of the rows that are added up then."""
        within, cluster = self._within, self._cluster
        if within == 1 or not row:
            return 0, 0
        if not cluster.keeps_received_rows:  # one row, which the reduced one becomes
            return row, 0
        rows = 0 if cluster.shares_memory(within) else within - 1  # which are read where the peers have put them
        return rows * row + _header_bytes(within, cluster), _sum_bytes(row, itemsize, within)

    def _time_collectives(self) -> None:
        """Times of one forward and backward."""
        unit, within, cluster, rest = self._unit, self._within, self._cluster, self._rest
        gather_bytes = sum(p.numel * p.gather_itemsize for p in rest)
        gather_s = again_s = cluster.all_gather_s(gather_bytes, within)
        if cluster.shares_memory(within):
            again_s = cluster.in_place_s(gather_bytes, within)
            copied = sum(p.numel * p.gather_itemsize for p in rest if p.is_beside)
            gather_s = max(again_s, cluster.all_gather_s(copied, within))  # of what has changed
        copied_s = unit.home_s_per_byte * sum(p.shard_numel(within) * p.stored_itemsize for p in unit.params)
        gather_slices, reduce_slices = list[float](), list[float]()
        for param in self._split:
            num = min(self._num_slices, ceil_div(param.length, within))
            numel = param.slice_numel(within, self._num_slices)
            gather_slices += [cluster.all_gather_s(numel * param.gather_itemsize, within)] * num
            reduce_slices += [cluster.reduce_scatter_s(numel * param.grad_itemsize, within)] * num
        ahead_s, last_s = (gather_slices[0], reduce_slices[-1]) if gather_slices else (0.0, 0.0)
        self._num_steps = len(gather_slices)
        self.gather_s = gather_s + copied_s + ahead_s  # the copy comes first; both beside the unit before
        self.gather_again_s = again_s + copied_s + ahead_s
        self.forward_comm_s = sum(gather_slices) - ahead_s
        self.backward_comm_s = self.forward_comm_s + sum(reduce_slices) - last_s
        reduce_s = cluster.reduce_scatter_s(sum(p.numel * p.grad_itemsize for p in rest), within) + last_s
        if within < cluster.num_ranks:
            reduce_s += cluster.all_reduce_s(sum(p.shard_numel(within) * p.grad_itemsize for p in unit.params), within)
        out_bytes = sum(p.shard_numel(within) * p.stored_itemsize for p in rest if p.grad_itemsize)
        self.homing_s = unit.home_s_per_byte * out_bytes
        self.reduce_s = max(reduce_s, self.homing_s)  # a copy home runs beside the next reduction

    def owners_s(self, unit: UnitCosts) -> float:
        """Owners' steps, as far as the unit goes: what the rank that has most computes, and the way there and back."""
        return unit.owners_s * self._owners.work_share + self._owners.exchange_s(self._owned, self._within)

    def computing_s(self, unit: UnitCosts, own_s: float, comm_s: float) -> float:
        """A computation in steps, each of which waits for its slice: all but one of them hide what comes later."""
        overhead_s = unit.slice_overhead_s * max(self._num_steps - len(self._split), 0)
        compute_s = (own_s + overhead_s) * (1 + self._cluster.stragglers)
        first_s = compute_s / max(self._num_steps, 1)
        return first_s + max(compute_s - first_s, comm_s)


def _casts(param: ParamCosts) -> bool:
    return param.gather_itemsize != param.stored_itemsize


def _gathered_bytes(param: ParamCosts, within: int, cluster: Cluster) -> int:
    """A gathered copy; and where rows are received one by one, those that it is copied out of.

    What is cut along dim 0, and not small, is received in its place.
    """
    if within == 1:
        return param.numel * param.gather_itemsize
    is_large = param.numel * param.gather_itemsize >= MIN_DIRECT_BYTES
    is_direct = cluster.keeps_received_rows and is_large and param.dim == 0
    in_rows = within * param.shard_numel(within)
    numel = param.numel if is_direct or param.dim else in_rows
    rows = in_rows if cluster.keeps_received_rows and not is_direct else 0
    return ceil_div(numel * param.gather_itemsize, ALIGN_BYTES) * ALIGN_BYTES + rows * param.gather_itemsize


def _header_bytes(num_ranks: int, cluster: Cluster) -> int:
    """This rank's, and one of each."""
    return HEADER_BYTES * (num_ranks + 1) if cluster.keeps_received_rows and num_ranks > 1 else 0


def _sum_bytes(row: int, itemsize: int, num_rows: int) -> int:
    """New rows while as many are added in pairs, and pairs of pairs; of 16-bit floats in fp32, and one converted."""
    num_new = num_rows.bit_length() - 1
    return row * num_new if itemsize >= 4 else ceil_div(row, itemsize) * 4 * (num_new + 1)
