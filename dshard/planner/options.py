"""What one unit costs under one strategy: the terms of which memory and time of a step are made."""

from collections.abc import Sequence
from dataclasses import dataclass

from dshard.layout import ALIGN_NUMEL, HEADER_BYTES, MIN_DIRECT_BYTES, SMALL_GRAD_BYTES, flags_numel
from dshard.planner.costs import COUNTER_BYTES, Cluster, ModelCosts, ParamCosts, UnitCosts, ceil_div
from dshard.policies import Strategy


@dataclass(frozen=True, slots=True)
class Option:
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


def options_of(model: ModelCosts, strategies: Sequence[Strategy | str], cluster: Cluster) -> list[Option]:
    """The option of each unit under its strategy."""
    given = zip(model.units, strategies, strict=True)
    return [options_of_unit(unit, (Strategy.of(own),), cluster, model.num_backwards)[0] for unit, own in given]


def options_of_unit(
    unit: UnitCosts, strategies: Sequence[Strategy], cluster: Cluster, num_backwards: int = 1
) -> list[Option]:
    """What `unit` costs under each of some strategies.

    Raises:
        PlacementError: The ranks that share a parameter do not divide those of the cluster.
    """
    parts: dict[tuple[int, int], _Parts] = {}
    options = []
    for strategy in (each.on(cluster.num_ranks) for each in strategies):
        within = 1 if strategy.base == "ddp" else strategy.within or cluster.num_ranks
        cut = within, strategy.num_slices
        if cut not in parts:
            given = (unit, *cut, cluster)
            parts[cut] = _Sizes.of(*given), _Reduction.of(*given), _Times.of(*given)
        options.append(_option(unit, strategy, parts[cut], num_backwards, cluster))
    return options


def _option(unit: UnitCosts, strategy: Strategy, parts: "_Parts", num_backwards: int, cluster: Cluster) -> Option:
    """What `unit` costs under a strategy that cuts it so."""
    sizes, reduction, times = parts
    whole = strategy.base == "ddp"
    stays, freed = strategy.base in ("zero1", "zero2"), strategy.base in ("full", "ddp")
    again = strategy.base == "full" and unit.is_used_in_backward
    waits = strategy.base == "zero1" and num_backwards > 1
    use = sizes.gathered + 2 * sizes.gather_slice
    is_gathered = again or strategy.base == "keep" or (whole and unit.is_used_in_backward)
    ahead = sizes.gathered + sizes.gather_slice + sizes.moving
    again_use, again_slices = (sizes.gathered, 2 * sizes.gather_slice) if is_gathered else (0, 0)
    in_flight = reduction.in_flight + reduction.split_grads
    gather_again_s, reduce_early_s = 0.0 if stays else times.gather_again_s, 0.0 if waits else times.reduce_s
    gather_backward_s = times.gather_again_s if again else 0.0
    # Per micro-batch: the first gathers, and the last reduces, otherwise than the others.
    gathers_s = times.gather_s + (num_backwards - 1) * gather_again_s
    reductions_s, lost = times.reduce_s + (num_backwards - 1) * reduce_early_s, cluster.interference
    return Option(
        held_bytes=sizes.stored + (sizes.gathered if stays else 0),
        kept_bytes=0 if stays or freed else sizes.gathered,
        forward_use_bytes=0 if stays else use,
        forward_ahead_bytes=sizes.moving if stays else 0 if whole else ahead,
        backward_use_bytes=use if is_gathered else 0,
        backward_ahead_bytes=ahead if again else 0,
        filling_bytes=again_use + reduction.filling(again_slices),
        slicing_bytes=again_use + reduction.slicing(again_slices),
        sent_bytes=reduction.sent + reduction.split_grads,
        in_flight_bytes=in_flight + reduction.slice_in_flight,
        whole_in_flight_bytes=in_flight,
        ending_bytes=in_flight + reduction.slice_in_flight + max(reduction.sums, reduction.slice_sums),
        replicas_bytes=reduction.among_replicas,
        late_replicas_bytes=reduction.late_among_replicas,
        grad_bytes=reduction.grads,
        waiting_bytes=reduction.sent if waits else 0,
        step_bytes=sum(sizes.steps),
        largest_step_bytes=max(sizes.steps, default=0),
        gather_s=times.gather_s,
        gather_again_s=gather_again_s,
        gather_backward_s=gather_backward_s,
        forward_s=times.forward_s + lost * (times.forward_comm_s + gathers_s / num_backwards),
        forward_comm_s=times.forward_comm_s,
        backward_s=times.backward_s + lost * (times.backward_comm_s + gather_backward_s + reductions_s / num_backwards),
        backward_comm_s=times.backward_comm_s,
        reduce_s=times.reduce_s,
        reduce_early_s=reduce_early_s,
        optimizer_s=unit.optimizer_s * sizes.share + unit.optimizer_start_s,
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of a unit's parameters, all rounded up to the rank that has most.

    Args:
        stored: Shards of parameters and optimizer states; of full values that a host has once, this rank's part of
            those of which the shards are none: what is cast, and numbers, which every rank holds.
        gathered: Gathered copies of what is not split; 0 where what is stored is used itself.
        moving: What more there is while they are on their way: shards in the compute dtype, headers.
        gather_slice: The largest slice of a parameter that is split.
        steps: Temporaries of the optimizer's step, per parameter.
        share: Part of the unit's elements that this rank holds.
    """

    stored: int
    gathered: int
    moving: int
    gather_slice: int
    steps: list[int]
    share: float

    @classmethod
    def of(cls, unit: UnitCosts, within: int, num_slices: int, cluster: Cluster) -> "_Sizes":
        """Sizes on the rank that has most."""
        split, rest = _split(unit, num_slices)
        numels = {param: param.shard_numel(within) for param in unit.params}
        casts = [p for p in unit.params if p.gather_itemsize != p.stored_itemsize]
        once = rest if cluster.shares_memory(within) else []  # the host has the full values of these, and no rank
        beside = [p for p in once if p in casts or p.numel == 1]
        slices = [p.slice_numel(within, num_slices) * p.gather_itemsize for p in split if _copies(p, within)]
        return cls(
            stored=sum(
                n * (p.stored_itemsize + p.state_bytes_per_element) + COUNTER_BYTES * (p.state_bytes_per_element > 0)
                for p, n in numels.items()
            )
            + sum(numels[p] * p.gather_itemsize for p in beside),
            gathered=0 if once else sum(_gathered_bytes(p, within, cluster) for p in rest if _copies(p, within)),
            moving=sum(numels[p] * p.gather_itemsize for p in casts if p not in once) + _header_bytes(within, cluster),
            gather_slice=max(slices, default=0),
            steps=[n * p.step_bytes_per_element for p, n in numels.items()],
            share=sum(numels.values()) / max(unit.numel, 1),
        )


def _gathered_bytes(param: ParamCosts, within: int, cluster: Cluster) -> int:
    """A gathered copy; and where rows are received one by one, those that a small one is copied out of."""
    if within == 1:
        return param.numel * param.gather_itemsize
    is_direct = cluster.keeps_received_rows and param.numel * param.gather_itemsize >= MIN_DIRECT_BYTES
    in_rows = within * param.shard_numel(within)
    region = ceil_div(param.numel if is_direct else in_rows, ALIGN_NUMEL) * ALIGN_NUMEL
    rows = in_rows if cluster.keeps_received_rows and not is_direct else 0
    return (region + rows) * param.gather_itemsize


def _header_bytes(num_ranks: int, cluster: Cluster) -> int:
    """This rank's, and one of each."""
    return HEADER_BYTES * (num_ranks + 1) if cluster.keeps_received_rows and num_ranks > 1 else 0


@dataclass(frozen=True, slots=True)
class _Reduction:
    """Bytes of a unit's gradients on their way, all rounded up to the rank that has most.

    Args:
        sent: Send buffer: a row of flags and padded shards per rank; under ddp one of all, that becomes the gradients.
        small: Gradients as autograd gives them that wait until the reduction leaves.
        large: The largest other one.
        in_flight: Send buffer, and what is received.
        sums: Rows that are added up when all is received.
        num_split: Parameters that are split, and take a gradient.
        slice_raw: Of parameters that are split, the largest slice's gradient as autograd gives it.
        slice_in_flight: Its send buffer, and what is received.
        slice_sums: As `sums`.
        among_replicas: What is received from ranks that hold the same shards; through memory, what is put out for them.
        late_among_replicas: Through memory, the sums that are put out for them then.
        split_grads: Reduced gradients of parameters that are split; there from their first slice on.
        grads: Reduced gradients, with flags and padding.
    """

    sent: int
    small: int
    large: int
    in_flight: int
    sums: int
    num_split: int
    slice_raw: int
    slice_in_flight: int
    slice_sums: int
    among_replicas: int
    late_among_replicas: int
    split_grads: int
    grads: int

    def filling(self, gathered_slices: int) -> int:
        """What there is of gradients in its backward, and of slices of parameters, until one of gradients leaves."""
        return self.sent + self.small + max(self.large, gathered_slices, self.slice_raw) + self.split_grads

    def slicing(self, gathered_slices: int) -> int:
        """The same from then on. Of one weight, slices of the gradient of its input come first."""
        beside = self.large if self.num_split < 2 else max(self.large, gathered_slices)
        most = max(beside, self.slice_raw + self.slice_sums) + self.slice_in_flight
        return self.sent + self.small + most + self.split_grads

    @classmethod
    def of(cls, unit: UnitCosts, within: int, num_slices: int, cluster: Cluster) -> "_Reduction":
        """Sizes on the rank that has most."""
        split, rest = _split(unit, num_slices)
        trained, split = [p for p in rest if p.grad_itemsize], [p for p in split if p.grad_itemsize]
        sizes = [param.numel * param.gather_itemsize for param in trained]
        widest = max((p.grad_itemsize for p in trained), default=4)
        row, num_replicas = _row_bytes(trained, within), cluster.num_ranks // within
        received, sums = _received(row, widest, within, cluster)
        among = late = 0
        if cluster.keeps_received_rows and num_replicas > 1:
            part = ceil_div(row, num_replicas)
            among = (num_replicas - 1) * part + _header_bytes(num_replicas, cluster)
            late = part + _header_bytes(num_replicas, cluster) if cluster.replicas_share_memory(within) else 0
            sums = max(sums, _sum_bytes(row if within > 1 else part, widest, max(within, num_replicas)))
        if within == 1:  # there is nothing to reduce but among replicas
            received, among, late = among, late, 0
        slices = [_slice_row(p, within, num_slices) for p in split]
        slice_row, slice_widest = max(slices, default=(0, 4))
        slice_received, slice_sums = _received(slice_row, slice_widest, within, cluster)
        return cls(
            sent=within * row,
            small=sum(size for size in sizes if size <= SMALL_GRAD_BYTES),
            large=max((size for size in sizes if size > SMALL_GRAD_BYTES), default=0),
            in_flight=within * row + received,
            sums=sums,
            num_split=len(split),
            slice_raw=max((p.slice_numel(within, num_slices) * p.gather_itemsize for p in split), default=0),
            slice_in_flight=within * slice_row + slice_received,
            slice_sums=slice_sums,
            among_replicas=among,
            late_among_replicas=late,
            split_grads=(split_grads := sum(p.shard_numel(within) * p.stored_itemsize for p in split)),
            grads=_grad_bytes(trained, within, row) + split_grads,
        )


def _received(row: int, itemsize: int, within: int, cluster: Cluster) -> tuple[int, int]:
    """Bytes that a reduce-scatter receives, and of the rows that are added up then."""
    if within == 1 or not row:
        return 0, 0
    if not cluster.keeps_received_rows:  # one row, which the reduced one becomes
        return row, 0
    rows = 0 if cluster.shares_memory(within) else within - 1  # which are read where the peers have put them
    return rows * row + _header_bytes(within, cluster), _sum_bytes(row, itemsize, within)


def _slice_row(param: ParamCosts, within: int, num_slices: int) -> tuple[int, int]:
    """Bytes of one rank's row of the largest slice, flags included, and of an element."""
    numel = param.slice_numel(within, num_slices) // within
    return (flags_numel(1) + numel) * param.grad_itemsize, param.grad_itemsize


def _row_bytes(trained: Sequence[ParamCosts], within: int) -> int:
    """Flags and padded shards."""
    if not trained:
        return 0
    flags = flags_numel(len(trained)) * max(p.grad_itemsize for p in trained)
    return flags + sum(p.shard_numel(within) * p.grad_itemsize for p in trained)


def _grad_bytes(trained: Sequence[ParamCosts], within: int, row: int) -> int:
    """The reduced row, or shards that were converted."""
    converts = any(p.grad_itemsize != p.stored_itemsize for p in trained)
    converted = sum(p.shard_numel(within) * p.stored_itemsize for p in trained)
    return converted if converts else row


def _sum_bytes(row: int, itemsize: int, num_rows: int) -> int:
    """New rows while as many are added in pairs, and pairs of pairs; of 16-bit floats in fp32, and one converted."""
    num_new = num_rows.bit_length() - 1
    return row * num_new if itemsize >= 4 else ceil_div(row, itemsize) * 4 * (num_new + 1)


def _split(unit: UnitCosts, num_slices: int) -> tuple[list[ParamCosts], list[ParamCosts]]:
    """The parameters that are used in slices, and the others."""
    split = [param for param in unit.params if param.can_split and num_slices > 1]
    return split, [param for param in unit.params if not (param.can_split and num_slices > 1)]


def _copies(param: ParamCosts, within: int) -> bool:
    """Whether what is used is another tensor than what is stored."""
    return within > 1 or param.gather_itemsize != param.stored_itemsize


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of a unit's computations and collectives."""

    gather_s: float
    gather_again_s: float
    forward_s: float
    forward_comm_s: float
    backward_s: float
    backward_comm_s: float
    reduce_s: float

    @classmethod
    def of(cls, unit: UnitCosts, within: int, num_slices: int, cluster: Cluster) -> "_Times":
        """Times of one forward and backward."""
        split, rest = _split(unit, num_slices)
        gather_bytes = sum(p.numel * p.gather_itemsize for p in rest)
        gather_s = again_s = cluster.all_gather_s(gather_bytes, within)
        if cluster.shares_memory(within):
            again_s = cluster.in_place_s(gather_bytes, within)
            cast_bytes = sum(p.numel * p.gather_itemsize for p in rest if p.gather_itemsize != p.stored_itemsize)
            gather_s = max(again_s, cluster.all_gather_s(cast_bytes, within))  # what has changed is copied, if cast
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
        overhead_s = unit.slice_overhead_s * max(num_steps - len(split), 0)
        grad_bytes, slowest = sum(p.numel * p.grad_itemsize for p in rest), 1 + cluster.stragglers
        return cls(
            gather_s=gather_s + ahead_s,
            gather_again_s=again_s + ahead_s,
            forward_s=_with_slices((unit.forward_s + overhead_s) * slowest, forward_comm_s, num_steps),
            forward_comm_s=forward_comm_s,
            backward_s=_with_slices((unit.backward_s + overhead_s) * slowest, backward_comm_s, num_steps),
            backward_comm_s=backward_comm_s,
            reduce_s=cluster.reduce_scatter_s(grad_bytes, within) + last_s + _replicas_s(unit, within, cluster),
        )


def _with_slices(compute_s: float, comm_s: float, num_steps: int) -> float:
    """A computation in steps, each of which waits for its slice: all but one of them hide what comes later."""
    first_s = compute_s / max(num_steps, 1)
    return first_s + max(compute_s - first_s, comm_s)


def _replicas_s(unit: UnitCosts, within: int, cluster: Cluster) -> float:
    """All-reduce of reduced shards over the replicas."""
    shard_bytes = sum(p.shard_numel(within) * p.grad_itemsize for p in unit.params)
    return cluster.all_reduce_s(shard_bytes, within) if within < cluster.num_ranks else 0.0


_Parts = tuple[_Sizes, _Reduction, _Times]
