"""Reducing buckets: full gradients of every rank become shards of their sum or mean."""

import math

import torch
from torch import Tensor

from dshard.collectives._c10d import ReduceOp, Work
from dshard.collectives.exchange import Exchange
from dshard.collectives.gather import real_numel, shard_of
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.header import HEADER_BYTES, Kind
from dshard.collectives.memory import BufferPool
from dshard.collectives.trace import CommRecord, record
from dshard.layout import BucketLayout

__all__ = ["ReduceBucket", "Reduced"]


class ReduceBucket:
    """Full gradients of a bucket on their way to a reduce-scatter.

    Each gradient is copied into the send buffer as it arrives, so that its own memory can go. A tensor that got no
    gradient on this rank counts as zero; whether *any* rank had one travels along.

    Args:
        bucket: Layout of the gradients.
        group: Ranks to reduce over.
        dtype: Dtype of the gradients and of the reduction.
        device: Where the gradients live.
        label: Name of what is reduced; on a direct backend, ranks that pair different labels raise.
        pool: Where the buffers come from and go to; by default they are new.
    """

    def __init__(
        self,
        bucket: BucketLayout,
        group: ShardGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
        label: str,
        pool: BufferPool | None = None,
    ) -> None:
        self._bucket, self._group, self._label = bucket, group, label
        self._pool = pool if pool is not None and group.num_ranks > 1 else BufferPool()
        self._flags = math.ceil(len(bucket.layouts) / 16) * 16  # elements ahead of the gradients
        row = self._flags + bucket.segment_numel
        self._memory: Tensor | None = self._pool.take(group.num_ranks * row * dtype.itemsize, device)
        self._rows: Tensor | None = self._memory.view(dtype).view(group.num_ranks, row)
        _, *self._slots = self._rows.split([self._flags, *bucket.slot_sizes], dim=1)
        self._present = [False] * len(bucket.layouts)

    @property
    def is_complete(self) -> bool:
        """Whether every tensor of the bucket has a gradient."""
        return all(self._present)

    def has(self, index: int) -> bool:
        """Whether tensor `index` has a gradient on this rank."""
        return self._present[index]

    def discard(self, index: int) -> None:
        """Forget the gradient of tensor `index`."""
        self._present[index] = False

    def add(self, index: int, grad: Tensor) -> None:
        """Pack the full gradient of tensor `index`, on top of one that is there."""
        assert self._rows is not None, "a gradient arrived after its bucket had left"
        layout = self._bucket.layouts[index]
        slots = self._slots[index]
        accumulate = self._present[index]
        self._present[index] = True
        if layout.dim == 0 and grad.is_contiguous():
            # Slots of whole shards at once, then the one that is smaller; whatever the number of ranks.
            num_whole = grad.numel() // max(layout.slot_numel, 1)
            size = num_whole * layout.slot_numel
            flat = grad.view(-1)
            _put(slots[:num_whole], flat[:size].view(num_whole, layout.slot_numel), accumulate)
            if size < flat.numel():
                _put(slots[num_whole, : flat.numel() - size], flat[size:], accumulate)
            return
        for rank in range(layout.num_ranks):
            shard = shard_of(grad, layout, rank)
            _put(slots[rank, : shard.numel()].view(shard.shape), shard, accumulate)

    def launch(self, *, mean: bool) -> Handle["Reduced"]:
        """Start the reduce-scatter. The bucket takes no more gradients.

        Returns:
            A handle whose result is this rank's shards of the reduced gradients.

        Communicates:
            Reduce-scatter of `bucket.segment_numel` elements and one flag per tensor, per rank; on a direct backend
            behind a header of 64 bytes.
        """
        assert self._rows is not None, "a bucket leaves once"
        rows, self._rows = self._rows, None
        for slots, present in zip(self._slots, self._present, strict=True):
            if not present:
                slots.zero_()
        self._slots.clear()
        flags = [float(x) for x in self._present]
        rows[:, : len(flags)] = torch.tensor(flags, dtype=rows.dtype, device=rows.device)
        self._record(rows)
        if self._group.num_ranks == 1:
            return Handle(self._label, [], lambda: self._cut(rows[0]))
        launch = self._launch_direct if self._group.is_direct else self._launch_flat
        return launch(rows, mean)

    def _launch_direct(self, rows: Tensor, mean: bool) -> Handle["Reduced"]:
        """Every rank gets its row of all peers, and adds them in rank order."""
        group = self._group
        size = rows.shape[1]
        memory = self._pool.take(len(group.peers) * size * rows.element_size(), rows.device)
        received = dict(zip(group.peers, memory.view(rows.dtype).view(-1, size), strict=True))
        exchange = Exchange(group, Kind.REDUCE, self._label, 0, size * rows.element_size())
        for peer in group.peers:
            exchange.receive(received[peer], peer)
            exchange.send(rows[peer], peer)

        parts = [rows[r] if r == group.rank else received[r] for r in range(group.num_ranks)]
        del rows, received

        def finish() -> Reduced:
            row = _sum_in_rank_order(parts, mean=mean)
            parts.clear()  # the pool takes back what nobody refers to
            self._pool.give(memory)
            self._give_back()
            return self._cut(row)

        what = f"reduce-scatter of '{self._label}'"
        return Handle(what, exchange.works, finish, header_works=exchange.header_works, check=exchange.check)

    def _launch_flat(self, rows: Tensor, mean: bool) -> Handle["Reduced"]:
        """By the backend's own reduce-scatter."""
        native_mean = mean and self._group.backend == "nccl"
        out = rows.new_empty(rows.shape[1])
        works: list[Work] = self._group.reduce_scatter(rows, out, ReduceOp.MEAN if native_mean else ReduceOp.SUM)
        divisor = self._group.num_ranks if mean and not native_mean else 1
        return Handle(
            f"reduce-scatter of '{self._label}'",
            works,
            lambda: self._cut(out if divisor == 1 else out.div_(divisor)),
        )

    def _record(self, rows: Tensor) -> None:
        group, item = self._group, rows.element_size()
        peers = group.num_ranks - 1
        if not peers:
            return
        sent = peers * rows.shape[1] * item
        real = (sum(x.numel for x in self._bucket.layouts) - real_numel(self._bucket.layouts, group.rank)) * item
        flags = peers * self._flags * item
        header = flags + (peers * HEADER_BYTES if group.is_direct else 0)
        record(CommRecord("reduce_scatter", self._label, group.num_ranks, real, sent - real - flags, header))

    def _give_back(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self._pool.give(memory)

    def _cut(self, row: Tensor) -> "Reduced":
        """This rank's shards in its reduced row."""
        flags, *slots = row.split([self._flags, *self._bucket.slot_sizes])
        shards = []
        for slot, layout in zip(slots, self._bucket.layouts, strict=True):
            shape = layout.local_shape(self._group.rank)
            numel = math.prod(shape)
            shards.append((slot if slot.numel() == numel else slot[:numel]).view(shape))
        return Reduced(shards, flags)


def _put(slot: Tensor, values: Tensor, accumulate: bool) -> None:
    if values.numel():
        slot.add_(values) if accumulate else slot.copy_(values)


class Reduced:
    """This rank's shards of the reduced gradients of a bucket.

    Args:
        shards: One per tensor.
        flags: One per tensor, above zero where some rank had a gradient.
    """

    __slots__ = ("_flags", "shards")

    def __init__(self, shards: list[Tensor], flags: Tensor) -> None:
        self.shards = shards
        self._flags = flags

    def anywhere(self, index: int) -> bool:
        """Whether any rank had a gradient of tensor `index`; waits for the device."""
        return bool(self._flags[index].real.item() > 0)


def _sum_in_rank_order(parts: list[Tensor], *, mean: bool) -> Tensor:
    """Add one row of each rank, rank 0 first; 16-bit floats are added in fp32."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = torch.add(parts[0].to(wide), parts[1])
    for part in parts[2:]:
        total.add_(part)
    if mean:
        total.div_(len(parts))
    return total.to(dtype)
