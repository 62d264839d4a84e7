"""Bytes of a unit that is cut in one way: of its parameters and gradients, on the rank that has most."""

from collections.abc import Sequence
from dataclasses import dataclass

from dshard.layout import ALIGN_NUMEL, HEADER_BYTES, MIN_DIRECT_BYTES, SMALL_GRAD_BYTES, flags_numel
from dshard.planner.costs import COUNTER_BYTES, Cluster, ParamCosts, UnitCosts, ceil_div
from dshard.policies import Strategy


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a unit's parameters, all rounded up to the rank that has most.

    Args:
        stored: Shards of parameters and optimizer states; of full values that a host has once, this rank's part of
            those of which the shards are none: what is cast or cut along another dim than 0, and numbers, which every
            rank holds.
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
    def of(cls, unit: UnitCosts, within: int, num_slices: int, cluster: Cluster) -> "Sizes":
        """Sizes on the rank that has most."""
        split, rest = split_of(unit, num_slices)
        numels = {param: param.shard_numel(within) for param in unit.params}
        casts = [p for p in unit.params if p.gather_itemsize != p.stored_itemsize]
        once = rest if cluster.shares_memory(within) else []  # the host has the full values of these, and no rank
        beside = [p for p in once if p.is_beside or p.numel == 1]
        slices = [p.slice_numel(within, num_slices) * p.gather_itemsize for p in split if _copies(p, within)]
        if unit.is_offloaded:
            return cls._offloaded(rest, within, cluster)
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

    @classmethod
    def _offloaded(cls, params: Sequence[ParamCosts], within: int, cluster: Cluster) -> "Sizes":
        """Of a unit that is kept in the CPU's memory: on the device are copies, and what they are gathered from."""
        numels = [(p, p.shard_numel(within)) for p in params]
        row = sum(n * p.stored_itemsize for p, n in numels)
        cast = sum(n * p.gather_itemsize for p, n in numels if p.gather_itemsize != p.stored_itemsize)
        is_row = within == 1 and not cast  # what arrives is what is used
        return cls(
            stored=0,
            gathered=sum(_gathered_bytes(p, within, cluster) for p in params),
            moving=(0 if is_row else row) + (cast if within > 1 else 0) + _header_bytes(within, cluster),
            gather_slice=0,
            steps=[],
            share=sum(n for _, n in numels) / max(sum(p.numel for p in params), 1),
        )


def _gathered_bytes(param: ParamCosts, within: int, cluster: Cluster) -> int:
    """A gathered copy; and where rows are received one by one, those that it is copied out of.

    What is cut along dim 0, and not small, is received in its place.
    """
    if within == 1:
        return param.numel * param.gather_itemsize
    is_large = param.numel * param.gather_itemsize >= MIN_DIRECT_BYTES
    is_direct = cluster.keeps_received_rows and is_large and param.dim == 0
    in_rows = within * param.shard_numel(within)
    region = ceil_div(param.numel if is_direct or param.dim else in_rows, ALIGN_NUMEL) * ALIGN_NUMEL
    rows = in_rows if cluster.keeps_received_rows and not is_direct else 0
    return (region + rows) * param.gather_itemsize


def _header_bytes(num_ranks: int, cluster: Cluster) -> int:
    """This rank's, and one of each."""
    return HEADER_BYTES * (num_ranks + 1) if cluster.keeps_received_rows and num_ranks > 1 else 0


@dataclass(frozen=True, slots=True)
class Reduction:
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
        homing: Of what is kept in the CPU's memory, reduced gradients on their way there.
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
    homing: int

    @property
    def flying(self) -> int:
        """What there is of its reduction while that is under way, without slices."""
        return self.in_flight + self.split_grads

    @property
    def ending(self) -> int:
        """What there is more when a reduction ends: rows that are added up, or the reduced one on its way home."""
        return max(self.sums, self.slice_sums, self.homing)

    def filling(self, gathered_slices: int) -> int:
        """What there is of gradients in its backward, and of slices of parameters, until one of gradients leaves."""
        return self.sent + self.small + max(self.large, gathered_slices, self.slice_raw) + self.split_grads

    def slicing(self, gathered_slices: int) -> int:
        """The same from then on. Of one weight, slices of the gradient of its input come first."""
        beside = self.large if self.num_split < 2 else max(self.large, gathered_slices)
        most = max(beside, self.slice_raw + self.slice_sums) + self.slice_in_flight
        return self.sent + self.small + most + self.split_grads

    @classmethod
    def of(cls, unit: UnitCosts, within: int, num_slices: int, cluster: Cluster) -> "Reduction":
        """Sizes on the rank that has most."""
        split, rest = split_of(unit, num_slices)
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
            grads=0 if unit.is_offloaded else _grad_bytes(trained, within, row) + split_grads,
            homing=_homing_bytes(trained, within, row) if unit.is_offloaded else 0,
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


def _homing_bytes(trained: Sequence[ParamCosts], within: int, row: int) -> int:
    """The reduced row, and beside it what it is converted to."""
    converted = sum(p.shard_numel(within) * p.stored_itemsize for p in trained)
    return row + (converted if any(p.grad_itemsize != p.stored_itemsize for p in trained) else 0)


def _sum_bytes(row: int, itemsize: int, num_rows: int) -> int:
    """New rows while as many are added in pairs, and pairs of pairs; of 16-bit floats in fp32, and one converted."""
    num_new = num_rows.bit_length() - 1
    return row * num_new if itemsize >= 4 else ceil_div(row, itemsize) * 4 * (num_new + 1)


def sharing(strategy: Strategy, num_ranks: int) -> int:
    """How many of some ranks share a parameter under a strategy; 1 where each has all of it."""
    return 1 if strategy.base == "ddp" else strategy.within or num_ranks


def split_of(unit: UnitCosts, num_slices: int) -> tuple[list[ParamCosts], list[ParamCosts]]:
    """The parameters that are used in slices, and the others."""
    split = [param for param in unit.params if param.can_split and num_slices > 1]
    return split, [param for param in unit.params if not (param.can_split and num_slices > 1)]


def _copies(param: ParamCosts, within: int) -> bool:
    """Whether what is used is another tensor than what is stored."""
    return within > 1 or param.gather_itemsize != param.stored_itemsize
