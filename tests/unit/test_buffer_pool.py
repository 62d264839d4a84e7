"""Memory is used again only when nobody can see it, and no more of it is kept than was in use at one time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dshard.collectives import Buffer, BufferPool, memory
from dshard.collectives.memory import Readers

CPU = torch.device("cpu")


def address(buffer: Buffer) -> int:
    return buffer.memory.untyped_storage().data_ptr()


def test_a_buffer_that_nobody_refers_to_is_handed_out_again():
    pool = BufferPool()
    buffer = pool.take(4096, CPU)
    where = address(buffer)
    pool.give(buffer)
    del buffer
    assert pool.kept_bytes == 4096
    assert address(pool.take(4096, CPU)) == where
    assert pool.kept_bytes == 0


def test_a_lent_buffer_is_handed_out_again_once_its_tensors_are_gone():
    pool = BufferPool()
    buffer = pool.take(4096, CPU)
    where, grad = address(buffer), buffer.memory[:16]
    pool.lend(buffer)
    del buffer
    other = pool.take(4096, CPU)
    assert address(other) != where
    del grad
    assert address(pool.take(4096, CPU)) == where


class Saving(torch.autograd.Function):
    """Autograd keeps a tensor that Python no longer knows."""

    @staticmethod
    def forward(ctx, x, buffer):
        ctx.save_for_backward(buffer)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].sum(), None


ALIASES = {
    "the buffer": lambda b: b,
    "a view": lambda b: b[8:16],
    "a view of another dtype": lambda b: b.view(torch.float32)[:2],
    "as_strided": lambda b: torch.as_strided(b, (2, 2), (1, 4)),
    "detached": lambda b: b.detach(),
    "data": lambda b: b.data,
    "a storage": lambda b: b.untyped_storage(),
    "numpy": lambda b: b.numpy(),
    "saved by autograd": lambda b: Saving.apply(torch.ones(1, requires_grad=True), b.view(torch.float32)),
    "a list": lambda b: [list(b.split(1024))],
}


@pytest.mark.parametrize("how", [a for a in ALIASES if a != "the buffer"])
def test_memory_that_somebody_sees_is_left_to_them(how):
    pool = BufferPool()
    buffer = pool.take(4096, CPU)
    where = address(buffer)
    alias = ALIASES[how](buffer.memory.zero_())
    pool.give(buffer)
    del buffer
    assert pool.kept_bytes == 0
    assert address(pool.take(4096, CPU)) != where
    assert alias is not None


class Halves:
    """Two tensors, each with a version counter of its own."""

    num_parts = 2

    def __init__(self, memory: torch.Tensor) -> None:
        self.tensors = torch.unsafe_split_with_sizes(memory, [memory.numel() // self.num_parts] * self.num_parts)


class Quarters(Halves):
    """Four tensors."""

    num_parts = 4


def test_who_cuts_a_buffer_alike_gets_the_same_tensors():
    pool = BufferPool()
    buffer = pool.take(4096, CPU)
    tensors = buffer.cut(Halves).tensors
    pool.give(buffer)
    assert pool.kept_bytes == 4096
    assert pool.take(4096, CPU).cut(Halves).tensors is tensors
    assert buffer.cut(Quarters).tensors is not tensors


def test_of_several_buffers_the_one_that_is_cut_alike_is_taken():
    pool = BufferPool()
    halves, quarters = pool.take(4096, CPU), pool.take(4096, CPU)
    halves.cut(Halves)
    quarters.cut(Quarters)
    pool.give(halves)
    pool.give(quarters)
    assert pool.take(4096, CPU, make=Halves) is halves
    pool.give(halves)
    assert pool.take(4096, CPU, make=Quarters) is quarters
    pool.give(quarters)
    assert pool.take(4096, CPU) is quarters, "the one that was used last"


def test_the_longest_unused_goes_first():
    """Of whatever size: a step that needs other sizes leaves none of the old ones behind."""
    pool = BufferPool()
    small, large = pool.take(4096, CPU), pool.take(8192, CPU)
    where = address(large)
    pool.give(small)
    pool.give(large)
    other = pool.take(4000, CPU)  # beside which no more may be kept than the large one
    assert pool.kept_bytes == 8192
    assert address(pool.take(8192, CPU)) == where
    assert other is not small


CUT_ALIASES = {**{how: alias for how, alias in ALIASES.items() if "dtype" not in how}, "itself": lambda t: t}


@pytest.mark.parametrize("how", CUT_ALIASES)
def test_memory_of_which_somebody_sees_a_part_is_left_to_them(how):
    pool = BufferPool()
    buffer = pool.take(1 << 14, CPU)
    alias = CUT_ALIASES[how](buffer.cut(Halves).tensors[1].zero_())
    pool.give(buffer)
    assert pool.kept_bytes == 0
    del alias
    pool.give(buffer)
    assert pool.kept_bytes == 1 << 14


def test_a_buffer_that_an_exception_drops_is_in_use_no_longer():
    pool = BufferPool()
    kept, dropped = pool.take(4096, CPU), pool.take(128, CPU)
    assert pool.out_bytes == 4096 + 128
    del dropped
    assert pool.out_bytes == 4096
    pool.give(kept)
    pool.give(kept)  # twice counts once
    assert pool.out_bytes == 0


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([64, 128, 4096])), max_size=40))
def test_what_is_kept_and_in_use_is_at_most_what_was_in_use_at_one_time(steps):
    pool = BufferPool()
    out: list[Buffer] = []
    peaks = [0, 0]
    for i, (takes, size) in enumerate(steps):
        if takes or not out:
            out.append(pool.take(size, CPU))
        else:
            pool.give(out.pop(0))
        in_use = sum(b.memory.numel() for b in out)
        peaks[-1] = max(peaks[-1], in_use)
        assert pool.kept_bytes + in_use <= max(peaks[-2:])
        if i % 10 == 9:
            pool.mark()
            peaks.append(in_use)


def test_after_two_steps_without_use_nothing_is_kept():
    pool = BufferPool()
    pool.give(pool.take(4096, CPU))
    pool.mark()
    assert pool.kept_bytes == 4096
    pool.mark()
    assert pool.kept_bytes == 0


def test_memory_that_is_used_again_is_not_a_number_when_uninitialized_memory_is():
    pool = BufferPool()
    buffer = pool.take(64, CPU)
    buffer.memory.zero_()
    pool.give(buffer)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert pool.take(64, CPU).memory.view(torch.float32).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


# --- memory that peers still read ------------------------------------------------------------------------------------


def given_back(pool: BufferPool, looks: int | None, *, is_awaited: bool = False) -> Buffer:
    """A buffer that its owner is through with, and a peer reads after so many looks; None for never."""
    buffer, num_looks = pool.take(4096, CPU), 0

    def look() -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == looks:
            readers.leave()

    readers = Readers(look, lambda: is_awaited)
    readers.num_left = 1
    readers.held.append(buffer)
    buffer.readers = readers
    pool.give(buffer)
    return buffer


def test_rather_than_take_more_memory_a_pool_waits_until_peers_have_read():
    pool = BufferPool()
    buffer = given_back(pool, 5)
    assert pool.out_bytes == 4096  # peers read it
    assert pool.take(4096, CPU) is buffer
    assert pool.out_bytes == 4096


def test_where_there_was_room_before_a_pool_does_not_wait_for_readers():
    pool = BufferPool()
    for each in [pool.take(4096, CPU) for _ in range(2)]:
        pool.give(each)
    pool._kept.clear()  # to other devices, say
    buffer = given_back(pool, None)
    assert pool._patience.now_s == memory.PATIENCE_S
    assert pool.take(4096, CPU) is not buffer
    assert pool._patience.now_s == memory.PATIENCE_S


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_peer_that_does_not_read_is_not_waited_for_without_end(is_awaited):
    pool = BufferPool()
    buffer = given_back(pool, None, is_awaited=is_awaited)
    other = pool.take(4096, CPU)
    assert other is not buffer
    assert pool.out_bytes == 2 * 4096
    assert pool._patience.now_s == memory.PATIENCE_S / (1 if is_awaited else 2)
