"""Gradients of virtual ranks: reduced as if each were a rank, whatever the number of processes that play them."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dshard.collectives import ledger
from dshard.collectives.exchange import Exchange
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.header import Kind
from dshard.collectives.memory import Buffer, BufferPool
from dshard.collectives.reduce import ReduceBucket, Reduced, ReducePlan
from dshard.collectives.trace import record
from dshard.collectives.tree import Node, TreeSum, nodes_between
from dshard.layout import HEADER_BYTES

_Sum = TreeSum[Tensor]


class Played(Protocol):
    """The virtual ranks that a process plays, one after the other."""

    total: int  # of all processes

    @property
    def ranks(self) -> range:
        """The virtual ranks of this process."""

    @property
    def at(self) -> int:
        """The one that is played; behind the last of them, none is."""


@dataclass(slots=True, eq=False)
class _Rows:
    """Unreduced gradients, shape (num_ranks, row), and the pool's memory that they are in."""

    values: Tensor
    memory: Buffer


class VirtualBucket(ReduceBucket):
    """The gradients of several virtual ranks on their way to a reduction in the order of `TreeSum`.

    Those of the rank that is played fill a buffer of their own; when the next one brings gradients, they are added to
    those before as far as the tree allows. What has no gradient counts as zero, in each node alike.

    Args:
        plan: Of the bucket.
        dtype: Dtype of the gradients, and of every sum.
        device: Where the gradients live.
        label: As of `ReduceBucket`.
        pool: Where the buffers come from and go to.
        played: The virtual ranks of this process.
    """

    _MAY_BE_LATE = False

    def __init__(
        self,
        plan: ReducePlan,
        *,
        dtype: torch.dtype,
        device: torch.device,
        label: str,
        pool: BufferPool,
        played: Played,
    ) -> None:
        super().__init__(plan, dtype=dtype, device=device, label=label, pool=pool)
        self._played, self._dtype, self._device = played, dtype, device
        self._rank = played.ranks.start  # whose gradients fill the buffer
        self._sum: TreeSum[_Rows] = TreeSum(self._add_rows)

    def add(self, index: int, grad: Tensor, *, may_wait: bool = False) -> None:
        """Pack a gradient of the virtual rank that is played; as of `ReduceBucket`."""
        self._turn_to(self._played.at)
        if self._rows is None:
            self._take_rows(self._dtype, self._device)
        super().add(index, grad, may_wait=may_wait)

    def _turn_to(self, rank: int) -> None:
        """Have the buffer be that of a later virtual rank: what is in it joins the sum."""
        while self._rank < rank:
            rows: _Rows | None = None
            if any(self._present):
                assert self._rows is not None
                assert self._memory is not None
                self._fill_rows(self._rows)
                rows = _Rows(self._rows, self._memory)
                self._rows = self._memory = None
                self._present = [False] * len(self._present)
            self._sum.push(self._rank, 1, rows)
            self._rank += 1

    def _add_rows(self, left: _Rows | None, right: _Rows | None) -> _Rows | None:
        if left is None or right is None:
            only = left or right
            if only is not None:
                only.values.add_(0)  # as zeros that another process sends: -0.0 becomes 0.0
            return only
        left.values.add_(right.values)
        self._give(right)
        return left

    def _give(self, rows: _Rows) -> None:
        memory = rows.memory
        del rows.values
        self._pool.give(memory)

    def steps(self, *, mean: bool, tag: int) -> Generator[Handle[Any], None, Reduced]:
        """Reduce over all virtual ranks, step by step, as `Steps` takes them. The bucket takes no more gradients.

        Args:
            mean: Divide by the number of virtual ranks.
            tag: A number that must be equal on all ranks; it stands for what the shards were written with.

        Communicates:
            What `ReduceBucket.launch` and `all_reduce_row` do, once per node of this process.
        """
        self._turn_to(self._played.ranks.stop)
        if self._rows is not None:  # of a virtual rank without any
            self._rows = None
            self._give_back()
        group, width = self.group, len(self._played.ranks)
        held = [Node(n.start, n.size, n.value) for n in self._sum.nodes]
        self._sum.nodes.clear()
        if group.num_ranks == 1:
            sums = [Node(n.start, n.size, self._row_of(n.value)) for n in held]
        else:
            sums = yield from self._scatter(held, width)
        width *= group.num_ranks
        others = group.replicas
        while others is not None:
            sums = yield from _all_reduce(sums, others, width, self._label, tag, is_last=others.replicas is None)
            width *= others.num_ranks
            others = others.replicas
        row = _joined(sums).total()
        assert row is not None
        if mean:
            row.div_(self._played.total)
        return Reduced(row, self._plan)

    def _row_of(self, rows: _Rows | None) -> Tensor:
        """The only row, which becomes the gradients."""
        if rows is None:
            return torch.zeros(self._plan.row_numel, dtype=self._dtype, device=self._device)
        self._pool.lend(rows.memory)
        return rows.values[0]

    def _scatter(self, held: Sequence[Node[_Rows]], width: int) -> Generator[Handle[Any], None, list[Node[Tensor]]]:
        """Send each rank its row of every node; gives the nodes of this rank's row."""
        group, shape = self.group, (self.group.num_ranks, self._plan.row_numel)
        rows = [
            n.value.values if n.value is not None else torch.zeros(shape, dtype=self._dtype, device=self._device)
            for n in held
        ]
        self._record(self._dtype.itemsize * len(rows))
        swap = _Swap(rows, group, width, self._label, 0)
        yield swap.handle(f"reduce-scatter of '{self._label}'")
        sums = swap.sums()
        rows.clear()
        del swap
        for node in held:
            if node.value is not None:
                self._give(node.value)
        return sums


class _Swap:
    """Every rank gets its part of every other rank's nodes.

    Args:
        nodes: Of this rank; each of shape (num_ranks, part).
        group: The ranks.
        width: Virtual ranks of each of them.
        label: Of what unit.
        tag: A number that must be equal on all ranks.
    """

    def __init__(self, nodes: list[Tensor], group: ShardGroup, width: int, label: str, tag: int) -> None:
        first = (group.replicas.world_rank if group.replicas is not None else 0) * group.num_ranks
        starts = [(first + rank) * width for rank in range(group.num_ranks)]
        self._places = [nodes_between(start, start + width) for start in starts]
        counts = [len(places) for places in self._places]
        assert counts[group.rank] == len(nodes)
        num_parts, size = sum(counts), nodes[0].shape[1]
        self._received = nodes[0].new_empty((num_parts, size))
        self._parts = list(self._received.split(counts))
        self._group = group
        self._sent: list[Tensor] = []
        self._works: Exchange | list[Any]
        if group.is_direct:
            self._works = self._start_direct(nodes, label, tag)
        else:
            ledger.note(group, Kind.REDUCE, label, tag)
            self._sent = [torch.stack(nodes, dim=1)]
            out, sent = (t.reshape(-1).view(torch.uint8) for t in (self._received, self._sent[0]))
            part_bytes = size * nodes[0].element_size()
            own_sizes = [len(nodes) * part_bytes] * group.num_ranks
            self._works = group.all_to_all(out, sent, [count * part_bytes for count in counts], own_sizes)

    def _start_direct(self, nodes: list[Tensor], label: str, tag: int) -> Exchange:
        group, rank = self._group, self._group.rank
        exchange = Exchange(group, Kind.REDUCE, label, tag, self._received.nbytes)
        self._sent = nodes
        for peer in group.peers:
            for part in self._parts[peer]:
                exchange.receive(part, peer)
            for node in nodes:
                exchange.send(node[peer], peer)
        exchange.start()
        for part, node in zip(self._parts[rank], nodes, strict=True):
            part.copy_(node[rank])
        return exchange

    def handle(self, what: str) -> Handle[None]:
        """A handle to wait for the parts by."""
        return Handle(what, self._works, lambda: None, group=self._group)

    def sums(self) -> list[Node[Tensor]]:
        """The nodes of all ranks, added as far as the tree allows."""
        self._sent.clear()
        found = _Sum(_add)
        for places, parts in zip(self._places, self._parts, strict=True):
            for (start, size), part in zip(places, parts, strict=True):
                found.push(start, size, part)
        return found.nodes


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    assert left is not None
    assert right is not None
    return left.add_(right)


def _joined(nodes: Sequence[Node[Tensor]]) -> _Sum:
    found = _Sum(_add)
    for node in nodes:
        found.push(node.start, node.size, node.value)
    return found


def _all_reduce(
    nodes: list[Node[Tensor]], group: ShardGroup, width: int, label: str, tag: int, *, is_last: bool
) -> Generator[Handle[Any], None, list[Node[Tensor]]]:
    """Add the nodes of all ranks of a group that hold the same shards: each adds a part, and sends it to the others."""
    if group.num_ranks == 1:
        return nodes
    rows = [node.value for node in nodes if node.value is not None]
    numel = rows[0].numel()
    size = -(-numel // group.num_ranks)
    padded = [row.new_zeros(group.num_ranks * size) for row in rows]
    for into, row in zip(padded, rows, strict=True):
        into[:numel].copy_(row)
    num_bytes = size * rows[0].element_size() * (group.num_ranks - 1)
    headers = 2 * HEADER_BYTES * (group.num_ranks - 1) if group.is_direct else 0
    swap = _Swap([row.view(group.num_ranks, size) for row in padded], group, width, label, tag)
    yield swap.handle(f"all-reduce of '{label}'")
    sums = swap.sums()
    if is_last:
        total = _joined(sums).total()
        sums = [Node(0, group.num_ranks * width, total)]
    record("all_reduce", label, group, num_bytes * (len(nodes) + len(sums)), 0, headers)
    own = torch.stack([node.value for node in sums if node.value is not None])
    everyone = own.new_empty((group.num_ranks, *own.shape))
    works: Exchange | list[Any]
    if group.is_direct:
        works = exchange = Exchange(group, Kind.GATHER, label, tag, everyone.nbytes)
        for peer in group.peers:
            exchange.swap(everyone[peer], own, peer)
        exchange.start()
        everyone[group.rank].copy_(own)
    else:
        ledger.note(group, Kind.GATHER, label, tag)
        works = group.all_gather(everyone.view(group.num_ranks, -1), own.view(-1))
    yield Handle(f"all-reduce of '{label}'", works, lambda: None, group=group)
    found = everyone.transpose(0, 1).reshape(len(sums), -1)[:, :numel]
    return [Node(node.start, node.size, row.clone()) for node, row in zip(sums, found, strict=True)]
