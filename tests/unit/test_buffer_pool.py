"""Memory is used again only when nobody can see it, and no more of it is kept than was in use at one time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dshard.collectives import BufferPool

CPU = torch.device("cpu")


def address(buffer: torch.Tensor) -> int:
    return buffer.untyped_storage().data_ptr()


def test_a_buffer_that_nobody_refers_to_is_handed_out_again():
    pool = BufferPool()
    buffer = pool.take(4096, CPU)
    where = address(buffer)
    pool.give(buffer)
    del buffer
    assert pool.kept_bytes == 4096
    assert address(pool.take(4096, CPU)) == where
    assert pool.kept_bytes == 0


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
    "numpy": lambda b: b.numpy(),
    "saved by autograd": lambda b: Saving.apply(torch.ones(1, requires_grad=True), b.view(torch.float32)),
    "a list": lambda b: [list(b.split(1024))],
}


@pytest.mark.parametrize("how", [a for a in ALIASES if a != "the buffer"])
def test_memory_that_somebody_sees_is_left_to_them(how):
    pool = BufferPool()
    buffer = pool.take(4096, CPU).zero_()
    where = address(buffer)
    alias = ALIASES[how](buffer)
    pool.give(buffer)
    del buffer
    assert pool.kept_bytes == 0
    other = pool.take(4096, CPU).fill_(1)
    assert address(other) != where
    assert alias is not None


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([64, 128, 4096])), max_size=40))
def test_what_is_kept_and_in_use_is_at_most_what_was_in_use_at_one_time(steps):
    pool = BufferPool()
    out: list[torch.Tensor] = []
    peaks = [0, 0]
    for i, (takes, size) in enumerate(steps):
        if takes or not out:
            out.append(pool.take(size, CPU))
        else:
            pool.give(out.pop(0))
        in_use = sum(b.numel() for b in out)
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
    pool.give(pool.take(64, CPU).zero_())
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert pool.take(64, CPU).view(torch.float32).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before
