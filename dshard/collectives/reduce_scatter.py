"""Reducing buckets: full gradients of every rank become shards of their sum or mean."""

import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dshard.collectives import ledger
from dshard.collectives._c10d import ReduceOp, Work
from dshard.collectives.all_reduce import sum_in_pairs
from dshard.collectives.divergence import Kind
from dshard.collectives.exchange import Exchange, shared_memory_of
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.memory import Buffer, BufferPool
from dshard.collectives.plan import real_numel, shard_of
from dshard.collectives.streams import follow, stream_on
from dshard.collectives.trace import is_recording, record
from dshard.errors import StateError
from dshard.layout import HEADER_BYTES, SMALL_GRAD_BYTES, BucketLayout, flags_numel


class ReducePlan:
    """Where the gradients of a bucket lie on the wire.

    Attributes:
        bucket: Layout of the gradients.
        group: Ranks to reduce over.
        num_flags: Elements ahead of the gradients, one per tensor and padding.
        sizes: Elements of the flags and of each slot in a row.
        row_numel: Elements of a row.
        local_shapes: Of this rank's shards.
        local_numels: Elements of this rank's shards.
        are_filled: Of each of this rank's shards, whether it takes its slot up.
        numels: Elements of the full gradients.
        may_wait: Of each gradient, whether it can be packed by `_chunk_cat`: it is cut along dim 0, and has elements.
        real_numel: Elements that this rank sends to all peers together, without padding and flags.
    """

    def __init__(self, bucket: BucketLayout, group: ShardGroup) -> None:
        self.bucket, self.group = bucket, group
        self.num_flags = flags_numel(len(bucket.layouts))
        self.sizes = (self.num_flags, *bucket.slot_sizes)
        self.row_numel = self.num_flags + bucket.segment_numel
        self.local_shapes = tuple(layout.local_shape(group.rank) for layout in bucket.layouts)
        self.local_numels = tuple(map(math.prod, self.local_shapes))
        self.are_filled = tuple(map(operator.eq, bucket.slot_sizes, self.local_numels))
        self.numels = tuple(layout.numel for layout in bucket.layouts)
        self.may_wait = tuple(each.dim == 0 and each.numel > 0 for each in bucket.layouts)
        self.real_numel = sum(self.numels) - real_numel(bucket.layouts, group.rank)


class ReduceBucket:
    """Full gradients of a bucket, until they are reduce-scattered.

    Each large gradient is copied into the send buffer as it arrives, so that its own memory can go; small ones
    together, when the bucket leaves. On an accelerator all of them wait, where they may, and the buffer is taken when
    the bucket leaves: one kernel packs them and changes their dtype. A tensor that got no gradient on this rank counts
    as zero; whether *any* rank had one travels along.

    Args:
        plan: Of the bucket.
        dtype: Dtype of the gradients and of the reduction.
        device: Where the gradients live.
        label: Name of what is reduced; on a direct backend, ranks that pair different labels raise.
        pool: Where the buffers come from and go to; by default they are new.
    """

    def __init__(
        self, plan: ReducePlan, *, dtype: torch.dtype, device: torch.device, label: str, pool: BufferPool | None = None
    ) -> None:
        self._plan, self.group, self._label = plan, plan.group, label
        self._dtype, self._device, self._pool = dtype, device, pool or BufferPool()
        self._memory: Buffer | None = None
        self._rows: Tensor | None = None  # the send buffer, which lies there
        self._has_left = False
        self._is_late = device.type != "cpu" and not self.group.is_direct and not dtype.is_complex
        self._slots: Sequence[Tensor] = ()  # of each tensor, shape (num_ranks, slot); made when first needed
        self._present = [False] * len(plan.numels)
        self._waiting: dict[int, tuple[Tensor, int]] = {}  # gradients not packed yet, and how often each was written to
        self._stream = stream_on(device)  # in which something was done with it last
        if not self._is_late:
            self._take_rows()

    def _take_rows(self) -> Tensor:
        """The send buffer, shape (num_ranks, row), which is taken if it was not."""
        if self._rows is None:
            group = self.group
            self._rows, self._memory = group.rows_for_reduce(
                self._plan.row_numel, self._dtype, self._device, self._pool, shared_memory_of(group)
            )
        return self._rows

    def _come_along(self) -> None:
        """What follows is done in the stream that is current: behind what was done in others."""
        stream, before = stream_on(self._device), self._stream
        if stream != before:
            memory = [self._memory.memory] if self._memory is not None else []
            follow(stream, before, [*memory, *(grad for grad, _ in self._waiting.values())])
            self._stream = stream

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
        self._waiting.pop(index, None)

    def add(self, indices: Sequence[int], grads: Sequence[Tensor], *, may_wait: Sequence[bool] | None = None) -> None:
        """Pack full gradients, each on top of one that is there.

        Args:
            indices: Of the tensors, each once.
            grads: Their gradients.
            may_wait: Of each, whether nobody else writes to it, so that it may be packed later; by default not.
        """
        assert not self._has_left, "a gradient arrived after its bucket was reduced"
        if self._stream is not None:
            self._come_along()
        plan, present, waiting, is_late = self._plan, self._present, self._waiting, self._is_late
        more: list[tuple[Tensor, Tensor]] = []
        now: list[tuple[Tensor, Tensor]] = []
        for index, grad, may in zip(indices, grads, may_wait or (False,) * len(grads), strict=True):
            if present[index]:
                if index in waiting:
                    self._pack_waiting()
                more += self._pieces(index, grad)
                continue
            present[index] = True
            is_packed_later = may and plan.may_wait[index] and grad.is_contiguous()
            if is_packed_later and (is_late or grad.nbytes <= SMALL_GRAD_BYTES):
                # It is kept: as long as somebody refers to it, autograd gives its memory to nobody else.
                waiting[index] = grad, grad._version
            else:
                now += self._pieces(index, grad)
        _copy(now)
        if more:
            slots, values = zip(*more, strict=True)
            torch._foreach_add_(slots, values)

    def _pieces(self, index: int, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The parts of a gradient, each behind its place in the rows."""
        layout, slots = self._plan.bucket.layouts[index], self._all_slots()[index]
        if layout.dim == 0 and grad.is_contiguous():
            if grad.numel() == slots.numel():
                return [(slots, grad.view_as(slots))] if grad.numel() else []
            # Slots of whole shards at once, then the one that is smaller; whatever the number of ranks.
            num_whole = grad.numel() // layout.slot_numel
            size = num_whole * layout.slot_numel
            flat = grad.view(-1)
            pieces = [(slots[:num_whole], flat[:size].view(num_whole, layout.slot_numel))] if size else []
            if size < flat.numel():
                pieces.append((slots[num_whole, : flat.numel() - size], flat[size:]))
            return pieces
        shards = [shard_of(grad, layout, rank) for rank in range(layout.num_ranks)]
        return [
            (slots[rank, : shard.numel()].view(shard.shape), shard)
            for rank, shard in enumerate(shards)
            if shard.numel()
        ]

    def _pack_waiting(self) -> bool:
        """Copy the gradients that wait to their slots; gives whether these were all, and with them the flags."""
        self._check_waiting()
        waiting = self._waiting
        if len(waiting) == len(self._present) and len({grad.dtype for grad, _ in waiting.values()}) == 1:
            rows, grads = self._take_rows(), [waiting[index][0] for index in range(len(waiting))]
            num_ranks = rows.shape[0]
            parts = [grads[0].new_ones((num_ranks, self._plan.num_flags)), *grads]
            if self._is_late or grads[0].dtype == rows.dtype:
                torch._chunk_cat(parts, 0, num_ranks, out=rows)
            else:
                rows.copy_(torch._chunk_cat(parts, 0, num_ranks))  # on CPU quicker than to convert each
            waiting.clear()
            return True
        _copy([piece for index, (grad, _) in waiting.items() for piece in self._pieces(index, grad)])
        waiting.clear()
        return False

    def _check_waiting(self) -> None:
        """Raise where a gradient that waited is not what arrived."""
        for index, (grad, version) in self._waiting.items():
            if grad._version != version:
                raise StateError(
                    f"'{self._label}': a gradient must stay as it is once a backward function has returned it, but "
                    f"that of parameter {index} (shape {tuple(grad.shape)}) was written to afterwards. Return a copy."
                )

    def _all_slots(self) -> Sequence[Tensor]:
        if not self._slots:
            self._slots = torch.split_with_sizes(self._take_rows(), self._plan.sizes, dim=1)[1:]
        return self._slots

    def _fill_rows(self, rows: Tensor) -> None:
        """Pack what waits, zeros for what is missing, and the flags."""
        if not self._pack_waiting():
            rows[:, : self._plan.num_flags].fill_(1)
            for index, (slots, present) in enumerate(zip(self._all_slots(), self._present, strict=True)):
                if not present:
                    slots.zero_()
                    rows[:, index].zero_()
        self._slots = ()

    def launch(self, *, mean: bool) -> Handle["Reduced"]:
        """Start the reduce-scatter. The bucket takes no more gradients.

        Args:
            mean: Divide by the number of ranks.

        Returns:
            A handle whose result is this rank's shards of the reduced gradients.

        Communicates:
            Reduce-scatter of `bucket.segment_numel` elements and one flag per tensor, per rank; on a direct backend
            behind a header of 64 bytes.
        """
        if self._stream is not None:
            self._come_along()
        assert not self._has_left, "a bucket leaves once"
        self._has_left = True
        rows = self._take_rows()
        self._fill_rows(rows)
        self._rows = None
        self._record(rows.element_size())
        if self.group.num_ranks == 1:  # the row becomes the gradients
            row = rows[0]
            if self._memory is not None:
                self._pool.lend(self._memory)
            return Handle(self._label, [], lambda: Reduced(row, self._plan))
        launch = self._launch_direct if self.group.is_direct else self._launch_flat
        return launch(rows, mean)

    def _launch_direct(self, rows: Tensor, mean: bool) -> Handle["Reduced"]:
        """Every rank gets its row of all peers, and adds them in a fixed order."""
        group = self.group
        size = rows.shape[1]
        exchange = Exchange(group, Kind.REDUCE, self._label, 0, size * rows.element_size(), self._memory)
        exchange.swap_rows(rows.unbind(), [rows[group.rank]] * group.num_ranks, self._pool)
        exchange.start()
        own = [rows[group.rank]]
        del rows

        def finish() -> Reduced:
            parts = [own[0] if rank == group.rank else exchange.received(rank) for rank in range(group.num_ranks)]
            row = sum_in_pairs(parts, mean=mean)
            own.clear()  # the pool takes back what nobody refers to
            del parts
            exchange.end_reading()
            self._give_back()
            return Reduced(row, self._plan)

        name = f"reduce-scatter of '{self._label}'"
        return Handle(name, [exchange], finish, group=group, leave=exchange.leave)

    def _launch_flat(self, rows: Tensor, mean: bool) -> Handle["Reduced"]:
        """Reduce by the backend's own reduce-scatter."""
        ledger.note(self.group, Kind.REDUCE, self._label, 0)
        is_half = rows.dtype == torch.float16
        native_mean = mean and self.group.has_means and not is_half
        divisor: float = self.group.num_ranks if mean and not native_mean else 1
        if is_half and mean:  # a sum of large gradients would be infinite, a mean of small ones zero: half ahead of it
            ahead = 2 ** (int(math.log2(divisor)) // 2)
            rows.div_(ahead)
            divisor /= ahead
        out = self.group.out_for_reduce(rows)
        works: list[Work] = self.group.reduce_scatter(rows, out, ReduceOp.MEAN if native_mean else ReduceOp.SUM)
        del rows
        begun_in = self._stream

        def finish() -> Reduced:
            if begun_in is not None:
                follow(stream_on(self._device), begun_in, (out,))
                self._come_along()
            self._give_back()
            return Reduced(out if divisor == 1 else out.div_(divisor), self._plan)

        return Handle(f"reduce-scatter of '{self._label}'", works, finish, group=self.group)

    def _record(self, item: int) -> None:
        """Tell open traces of it; `item` is the bytes that each element of the bucket takes on the wire."""
        peers = self.group.num_ranks - 1
        if not peers or not is_recording():
            return
        plan = self._plan
        flags, real = peers * plan.num_flags * item, plan.real_numel * item
        header = flags + (peers * HEADER_BYTES if self.group.is_direct else 0)
        padding = peers * plan.row_numel * item - real - flags
        record("reduce_scatter", self._label, self.group, real, padding, header)

    def _give_back(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self._pool.give(memory)


def _copy(pieces: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy values to their places, all at once."""
    if pieces:
        places, values = zip(*pieces, strict=True)
        torch._foreach_copy_(places, values)


class Reduced:
    """This rank's shards of the reduced gradients of a bucket.

    Args:
        row: A flag per tensor, above zero where some rank had a gradient; then the slots of the shards.
        plan: Of the bucket.
    """

    __slots__ = ("_plan", "_shards", "row")

    def __init__(self, row: Tensor, plan: ReducePlan) -> None:
        self.row, self._plan = row, plan
        self._shards: list[Tensor] | None = None  # cut when they are asked for: the row may change its dtype first

    @property
    def shards(self) -> list[Tensor]:
        """One per tensor: views of the row."""
        if self._shards is None:
            plan = self._plan
            slots = torch.unsafe_split_with_sizes(self.row, plan.sizes)[1:]
            filled = zip(slots, plan.local_numels, plan.are_filled, strict=True)
            parts = [slot if is_filled else slot[:numel] for slot, numel, is_filled in filled]
            shapes = plan.local_shapes
            self._shards = [p if len(shape) == 1 else p.view(shape) for p, shape in zip(parts, shapes, strict=True)]
        return self._shards

    def add(self, other: "Reduced") -> None:
        """Add the shards and flags of another backward."""
        self.row.add_(other.row)

    def forget(self, index: int) -> None:
        """Have tensor `index` count as one that no rank had a gradient of."""
        self.row[index] = 0
        self.shards[index].zero_()

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Reduced":
        """The same, with all of its memory changed at once: to another dtype or device."""
        return Reduced(change(self.row), self._plan)

    def in_dtype(self, dtype: torch.dtype) -> "Reduced":
        """The same in another dtype than they were reduced in: one kernel for all of them."""
        return self if self.row.dtype == dtype else self.mapped(lambda row: row.to(dtype))

    def anywhere(self, index: int) -> bool:
        """Whether any rank had a gradient of tensor `index`; waits for the device."""
        return bool(self.row[index].real.item() > 0)
