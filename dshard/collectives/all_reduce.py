"""All-reduces: of rows of gradients over replicas, and of a few small tensors; and other collectives of small ones."""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dshard.collectives import _c10d, ledger
from dshard.collectives._c10d import ReduceOp
from dshard.collectives.divergence import Kind
from dshard.collectives.exchange import Exchange, gather_few, shared_memory_of
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.memory import BufferPool
from dshard.collectives.trace import record
from dshard.layout import HEADER_BYTES

_Steps = Generator[Handle[None], None, None]


@dataclass(frozen=True, slots=True)
class RowReduction:
    """How rows are reduced over the ranks that hold the same shards.

    Args:
        mean: Divide by their number.
        label: Of what unit.
        tag: A number that must be equal on all of them; it stands for what the shards were written with.
        pool: Where buffers come from and go to.
        num_flags: Elements at the beginning of the row that are no values of the program; counted with headers.
        on_other_writes: Called on all of them where ranks wrote otherwise to the shards, with those ranks; may raise.
            Without it, and on a backend that is not direct, that is an error.
    """

    mean: bool
    label: str
    tag: int
    pool: BufferPool
    num_flags: int = 0
    on_other_writes: Callable[[ShardGroup], None] | None = None


def all_reduce_row(row: Tensor, replicas: ShardGroup, how: RowReduction) -> _Steps:
    """Reduce a row over the ranks that hold the same shards, step by step, as `Steps` takes them.

    On a direct backend each rank adds a part of the row, in a fixed order, and then sends it to the others: two steps.

    Args:
        row: One-dimensional, of one size on all ranks; overwritten. At the end it is equal on all of them.
        replicas: Those ranks; if the row is replicated across several such groups, it is then reduced over these, too.
        how: Says how.

    Yields:
        The handle of each step; waiting for it raises a DivergenceError if they are at different units, or `how.tag`
        differs.

    Communicates:
        All-reduce of the row: `2 (R - 1) / R` of its bytes over `R` replicas.
    """
    yield from (_all_reduce_direct if replicas.is_direct else _all_reduce_flat)(row, replicas, how)
    if replicas.replicas is not None:
        yield from all_reduce_row(row, replicas.replicas, how)


def _all_reduce_flat(row: Tensor, replicas: ShardGroup, how: RowReduction) -> _Steps:
    """Reduce by the backend's own all-reduce."""
    num_bytes, num_ranks = row.numel() * row.element_size(), replicas.num_ranks
    sent, flags = 2 * num_bytes * (num_ranks - 1) // num_ranks, _bytes_of_flags(how.num_flags, row, replicas)
    record("all_reduce", how.label, replicas, sent - flags, 0, flags)
    ledger.note(replicas, Kind.REDUCE, how.label, how.tag)
    native_mean = how.mean and replicas.has_means
    op = ReduceOp.MEAN if native_mean else ReduceOp.SUM
    works = [_c10d.all_reduce_flat(row, op, replicas.process_group)]
    yield Handle(f"all-reduce of '{how.label}'", works, lambda: None, group=replicas)
    if how.mean and not native_mean:
        row.div_(num_ranks)


def _all_reduce_direct(row: Tensor, replicas: ShardGroup, how: RowReduction) -> _Steps:
    """Each rank adds its part straight from what the peers sent, or from their memory; then the parts are swapped."""
    num_ranks, rank, peers = replicas.num_ranks, replicas.rank, replicas.peers
    size = math.ceil(row.numel() / num_ranks)
    parts = outs = [row[each * size : (each + 1) * size] for each in range(num_ranks)]  # the last ones may be shorter
    own = parts[rank]
    places = [own] * num_ranks
    arena, memory = shared_memory_of(replicas), None
    if arena is not None:  # peers read from copies, each of which stays until they have: first of their parts
        memory = how.pool.take((num_ranks - 1) * size * row.itemsize, torch.device("cpu"), arena)
        slots = memory.memory.view(row.dtype).view(num_ranks - 1, size)  # of all ranks but the one whose memory it is
        outs = [slots[each - (each > rank)][: part.numel()] if each != rank else own for each, part in enumerate(parts)]
        places = [slots[rank - (rank > each)][: own.numel()] if each != rank else own for each in range(num_ranks)]
        torch._foreach_copy_([outs[peer] for peer in peers], [parts[peer] for peer in peers])
    sent = sum(parts[peer].numel() + own.numel() for peer in replicas.peers) * row.element_size()
    flags = _bytes_of_flags(how.num_flags, row, replicas)
    record("all_reduce", how.label, replicas, sent - flags, 0, flags + 2 * HEADER_BYTES * len(replicas.peers))

    def exchange(kind: Kind) -> Exchange:
        is_lenient = how.on_other_writes is not None
        return Exchange(replicas, kind, how.label, how.tag, row.nbytes, memory, takes_any_writes=is_lenient)

    scatter = exchange(Kind.REDUCE)
    scatter.swap_rows(outs, places, how.pool)
    scatter.start()
    del outs, places
    yield _handle(scatter, how.label, replicas)
    if own.numel():
        received = [own if each == rank else scatter.received(each) for each in range(num_ranks)]
        own.copy_(sum_in_pairs(received, mean=how.mean))
        del received
    scatter.end_reading()
    writes_differ = scatter.writes_differ
    del scatter
    if writes_differ and how.on_other_writes is not None:
        how.on_other_writes(replicas)
    place = mine = own
    if memory is not None:
        del slots
        how.pool.give(memory)
        memory = how.pool.take(size * row.itemsize, torch.device("cpu"), arena)  # then of this rank's
        place = memory.memory.view(row.dtype)
        mine = place[: own.numel()].copy_(own)
    gather = exchange(Kind.GATHER)
    for peer in peers:
        gather.swap(parts[peer], mine, peer, place[: parts[peer].numel()])
    gather.start()
    del place, mine
    yield _handle(gather, how.label, replicas)
    if memory is not None:
        how.pool.give(memory)


def _bytes_of_flags(num_flags: int, row: Tensor, replicas: ShardGroup) -> int:
    """What a rank sends of them, taken as even."""
    return 2 * num_flags * row.element_size() * (replicas.num_ranks - 1) // replicas.num_ranks


def _handle(exchange: Exchange, label: str, group: ShardGroup) -> Handle[None]:
    return Handle(f"all-reduce of '{label}'", [exchange], lambda: None, group=group, leave=exchange.leave)


def sum_in_pairs(parts: list[Tensor], *, mean: bool) -> Tensor:
    """Add one row of each rank, neighbours in pairs, then pairs of pairs; 16-bit floats are added in fp32.

    In that order the sums of `k` neighbours each, added up, give the same bits as all ranks at once, where `k` is a
    power of two: whatever is sharded over how many ranks, and replicated across.
    """
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = _sum_of_pairs(parts, wide)
    if mean:
        total.div_(len(parts))
    return total.to(dtype)


def _sum_of_pairs(parts: list[Tensor], wide: torch.dtype) -> Tensor:
    """The sum of at least two rows, in new memory."""
    if len(parts) == 2:
        return torch.add(parts[0].to(wide), parts[1])
    num_left = 1 << (len(parts) - 1).bit_length() - 1  # the largest power of two below
    left, right = parts[:num_left], parts[num_left:]
    return _sum_of_pairs(left, wide).add_(right[0] if len(right) == 1 else _sum_of_pairs(right, wide))


def all_reduce(
    tensors: Sequence[Tensor],
    group: ShardGroup,
    op: ReduceOp,
    *,
    label: str,
    everywhere: bool = False,
    is_check: bool = False,
    arguments: str = "",
) -> Handle[list[Tensor]]:
    """Reduce small tensors of one dtype over the ranks of a group, in one collective.

    On a direct backend the ranks exchange their values and each combines them in rank order.

    Args:
        tensors: One dtype, the same shapes on every rank. Not changed.
        group: Ranks to reduce over.
        op: `ReduceOp.SUM`, `MAX` or `MIN`.
        label: What it is for.
        everywhere: Reduce over the ranks of all replicas, too; waits for the first of two collectives.
        is_check: Whether ranks agree on what to do, and no value of the program travels; it is counted as that.
        arguments: What the ranks were given, as "(name=value, ...)": compared by headers, or by `settle`.

    Returns:
        A handle whose result is the reduced tensors, equal on all ranks.

    Raises:
        DivergenceError: Waiting for it: the ranks were given other arguments. On every rank alike; of a backend that
            runs its own collectives, by `settle`.

    Communicates:
        All-reduce of the tensors' bytes; `everywhere` one more, between replicas.
    """
    if everywhere and group.replicas is not None:
        tensors = all_reduce(tensors, group.replicas, op, label=label, everywhere=True, arguments=arguments).wait()
    shapes, sizes = [t.shape for t in tensors], [t.numel() for t in tensors]
    if group.num_ranks == 1:
        return Handle(label, [], lambda: [t.clone() for t in tensors])
    device = tensors[0].device
    flat = _on_wire(torch.cat([t.reshape(-1) for t in tensors]), group)
    num_bytes = flat.numel() * flat.element_size()
    if group.is_direct:
        _record(label, group, num_bytes * len(group.peers), HEADER_BYTES * len(group.peers), is_check=is_check)
        return gather_few(
            flat,
            group,
            lambda rows: _parts(_combine(rows, op), sizes, shapes, device),
            kind=Kind.COMBINE,
            label=label + arguments,
            name=label,
        )
    if arguments:
        ledger.note(group, Kind.COMBINE, label + arguments, 0)
    works = [_c10d.all_reduce_flat(flat, op, group.process_group)]
    _record(label, group, 2 * num_bytes * (group.num_ranks - 1) // group.num_ranks, 0, is_check=is_check)
    return Handle(label, works, lambda: _parts(flat, sizes, shapes, device), group=group)


def _record(label: str, group: ShardGroup, num_bytes: int, header_bytes: int, *, is_check: bool) -> None:
    kind, payload, header = ("check", 0, num_bytes) if is_check else ("all_reduce", num_bytes, 0)
    record(kind, label, group, payload, 0, header + header_bytes)


def _combine(rows: Tensor, op: ReduceOp) -> Tensor:
    if op == ReduceOp.SUM:
        return sum_in_pairs(list(rows.unbind()), mean=False)
    return rows.amax(0) if op == ReduceOp.MAX else rows.amin(0)


def _on_wire(flat: Tensor, group: ShardGroup) -> Tensor:
    """Values on the device of a group: of tensors on another one its backend may know nothing, as NCCL of the CPU's."""
    return flat if flat.device.type == group.device_type else flat.to(group.device_type)


def _parts(flat: Tensor, sizes: list[int], shapes: Sequence[torch.Size], device: torch.device) -> list[Tensor]:
    flat = flat if flat.device == device else flat.to(device)
    return [part.reshape(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def broadcast(
    tensors: Sequence[Tensor], group: ShardGroup, *, label: str, src: int = 0, everywhere: bool = False
) -> Handle[list[Tensor]]:
    """Give every rank the values that rank `src` of the group holds, in one collective.

    Args:
        tensors: One dtype, the same shapes on every rank. Not changed.
        group: Ranks that take part.
        label: What it is for.
        src: Rank within the group.
        everywhere: Give them to all replicas, too, from the first; waits for the first of two collectives.

    Returns:
        A handle whose result is the values of rank `src`.

    Communicates:
        Broadcast of the tensors' bytes; `everywhere` one more, between replicas.
    """
    if everywhere and group.replicas is not None:
        tensors = broadcast(tensors, group.replicas, label=label, everywhere=True).wait()
    shapes, sizes = [t.shape for t in tensors], [t.numel() for t in tensors]
    device = tensors[0].device
    flat = _on_wire(torch.cat([t.detach().reshape(-1) for t in tensors]), group)
    works = []
    if group.num_ranks > 1:
        works = [_c10d.broadcast_flat(flat.view(torch.uint8), src, group.process_group)]
        num_bytes = flat.numel() * flat.element_size()
        sent = num_bytes * (group.num_ranks - 1) if group.rank == src else 0
        record("broadcast", label, group, sent)
    return Handle(label, works, lambda: _parts(flat, sizes, shapes, device), group=group)
