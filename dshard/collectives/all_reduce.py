"""Collectives over a few small tensors: the results of reductions, checks, random states."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dshard.collectives import _c10d, divergence
from dshard.collectives._c10d import ReduceOp
from dshard.collectives.divergence import Kind
from dshard.collectives.exchange import Exchange
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.reduce import sum_in_pairs
from dshard.collectives.trace import record
from dshard.layout import HEADER_BYTES


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
        rows, exchange = _exchange_small(flat, group, label + arguments)
        _record(label, group, num_bytes * len(group.peers), HEADER_BYTES * len(group.peers), is_check=is_check)
        return Handle(label, exchange, lambda: _split(_combine(rows, op), sizes, shapes, device), group=group)
    if arguments:
        divergence.note(group, Kind.COMBINE, label + arguments, 0)
    works = group.all_reduce(flat, op)
    _record(label, group, 2 * num_bytes * (group.num_ranks - 1) // group.num_ranks, 0, is_check=is_check)
    return Handle(label, works, lambda: _split(flat, sizes, shapes, device), group=group)


def _record(label: str, group: ShardGroup, num_bytes: int, header_bytes: int, *, is_check: bool) -> None:
    kind, payload, header = ("check", 0, num_bytes) if is_check else ("all_reduce", num_bytes, 0)
    record(kind, label, group, payload, 0, header + header_bytes)


def _exchange_small(flat: Tensor, group: ShardGroup, label: str) -> tuple[Tensor, Exchange]:
    """Send the values to every peer, behind a header that names what is reduced; gives one row per rank to come."""
    num_bytes = flat.numel() * flat.element_size()
    rows = flat.new_empty((group.num_ranks, flat.numel()))
    rows[group.rank] = flat
    exchange = Exchange(group, Kind.COMBINE, label, 0, num_bytes)
    for peer in group.peers:
        exchange.swap(rows[peer], flat, peer)
    exchange.start()
    return rows, exchange


def _combine(rows: Tensor, op: ReduceOp) -> Tensor:
    if op == ReduceOp.SUM:
        return sum_in_pairs(list(rows.unbind()), mean=False)
    return rows.amax(0) if op == ReduceOp.MAX else rows.amin(0)


def _on_wire(flat: Tensor, group: ShardGroup) -> Tensor:
    """Values on the device of a group: of tensors on another one its backend may know nothing, as NCCL of the CPU's."""
    return flat if flat.device.type == group.device_type else flat.to(group.device_type)


def _split(flat: Tensor, sizes: list[int], shapes: Sequence[torch.Size], device: torch.device) -> list[Tensor]:
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
    works = group.broadcast(flat.view(torch.uint8), src)
    if group.num_ranks > 1:
        num_bytes = flat.numel() * flat.element_size()
        sent = num_bytes * (group.num_ranks - 1) if group.rank == src else 0
        record("broadcast", label, group, sent)
    return Handle(label, works, lambda: _split(flat, sizes, shapes, device), group=group)


def all_to_all(parts: Sequence[Tensor], sizes: Sequence[int], group: ShardGroup, *, label: str) -> Handle[list[Tensor]]:
    """Send a part to each rank of a group, and receive one of each, by the backend's own all-to-all.

    Args:
        parts: For each rank, shape (bytes,), uint8; may be empty. On any device.
        sizes: Bytes that each rank sends to this one.
        group: The ranks.
        label: What it is for.

    Returns:
        A handle whose result is what each rank has sent, shape (bytes,), on the host.

    Communicates:
        An all-to-all of the parts' bytes.
    """
    if group.num_ranks == 1:
        return Handle(label, [], lambda: [part.cpu() for part in parts])
    sent = torch.cat([part.to(group.device_type) for part in parts])
    out = torch.empty(sum(sizes), dtype=torch.uint8, device=group.device_type)
    sent_sizes = [part.numel() for part in parts]
    work = _c10d.all_to_all_flat(out, sent, list(sizes), sent_sizes, group.process_group)
    record("all_to_all", label, group, sent.numel() - sent_sizes[group.rank], 0, 0)
    return Handle(label, [work], lambda: list(out.cpu().split(list(sizes))), group=group)
