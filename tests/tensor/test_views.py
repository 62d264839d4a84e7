"""Invariant 5: a write or a read through any chain of views equals the same on a plain tensor, bit for bit."""

import functools
import traceback
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard.collectives import CommTrace
from dshard.errors import UnsupportedOpError
from dshard.tensor import ShardedTensor
from dshard.testing import WorldPool
from dshard.testing.strategies import TensorCase, tensor_cases, world_sizes

# Steps: how to draw the arguments for a tensor, and how to apply them. A step gives one tensor.
STEPS = {
    "t": lambda x: x.t(),
    "transpose": lambda x, a, b: x.transpose(a, b),
    "permute": lambda x, dims: x.permute(dims),
    "movedim": lambda x, a, b: x.movedim(a, b),
    "unsqueeze": lambda x, d: x.unsqueeze(d),
    "squeeze": lambda x: x.squeeze(),
    "squeeze of a dim": lambda x, d: x.squeeze(d),
    "expand": lambda x, shape: x.expand(shape),
    "slice": lambda x, d, start, stop, step: x[(slice(None),) * d + (slice(start, stop, step),)],
    "narrow": lambda x, d, start, length: x.narrow(d, start, length),
    "select": lambda x, d, i: x.select(d, i),
    "split": lambda x, size, d, i: x.split(size, d)[i],
    "chunk": lambda x, n, d, i: x.chunk(n, d)[i],
    "unbind": lambda x, d, i: x.unbind(d)[i],
    "diagonal": lambda x, offset: x.diagonal(offset),
    "flatten": lambda x: x.flatten(),
    "view": lambda x, shape: x.view(shape),
    "unfold": lambda x, d, size: x.unfold(d, size, size),
    "detach": lambda x: x.detach(),
    "real": torch.view_as_real,
    "as_strided": lambda x, shape, stride: x.as_strided(shape, stride),
}


def flip_mask(x):
    return torch.arange(x.numel()).reshape(x.shape) % 3 == 0


def like(x, seed):
    return TensorCase(tuple(x.shape), x.dtype, None, 1, seed).full()


WRITES = {
    "fill_": lambda x: x.fill_(3),
    "zero_": lambda x: x.zero_(),
    "mul_": lambda x: x.mul_(True if x.dtype == torch.bool else 3),
    "copy_": lambda x: x.copy_(like(x, 11)),
    "copy_ of a broadcast": lambda x: x.copy_(like(x, 12).reshape(-1)[:1].reshape((1,) * x.dim()) if x.numel() else x),
    "add_": lambda x: x.logical_xor_(like(x, 13)) if x.dtype == torch.bool else x.add_(like(x, 13)),
    "add_ of itself": lambda x: x.logical_xor_(x) if x.dtype == torch.bool else x.add_(x),
    "masked_fill_": lambda x: x.masked_fill_(flip_mask(x), 1),
    "index_put_": lambda x: x.index_put_((torch.tensor([0, -1]),), like(x[:1], 14)[0]) if x.dim() and len(x) else x,
    "setitem": lambda x: x.__setitem__((..., slice(None, None, 2)), 1) if x.dim() else x.__setitem__((), 1),
    "normal_": lambda x: x.normal_() if x.dtype.is_floating_point else x,
    "random_": lambda x: x.random_(0, 2) if x.dtype.is_floating_point else x,
    "foreach": lambda x: torch._foreach_zero_(list(x.split(1))) if x.dim() and len(x) else x,
    "cumsum_": lambda x: x.cumsum_(0) if x.dim() and x.dtype != torch.bool else x,
    "clamp_": lambda x: x.clamp_(min=0) if x.dtype.is_floating_point or x.dtype == torch.int64 else x,
}

READS = {
    "full_tensor": lambda x: x.full_tensor() if isinstance(x, ShardedTensor) else x,
    "double": lambda x: x + x,
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "reshape": lambda x: x.reshape(-1),
    "stack": lambda x: torch.stack([x, x]),
    "list": lambda x: torch.tensor(x.tolist()),
    "to": lambda x: x.to(torch.complex128),
    "isfinite": torch.isfinite,
    "empty_like": torch.zeros_like,
    "equal": lambda x: torch.tensor(torch.equal(x, x)),
}


@dataclass(frozen=True)
class Chain:
    """Views of a tensor, and what is done through the last."""

    steps: tuple
    action: str

    def view(self, tensor):
        for name, args in self.steps:
            tensor = STEPS[name](tensor, *args)
        return tensor


@st.composite
def one_step(draw, x, *, writable):
    """A step that is valid on `x`."""
    dims = st.integers(0, x.dim() - 1) if x.dim() else st.nothing()
    some = [d for d in range(x.dim()) if x.shape[d]]
    names = ["unsqueeze", "squeeze", "flatten", "detach"]
    names += ["t"] * (x.dim() <= 2) + ["permute"] + ["expand"] * (not writable)
    names += ["transpose", "movedim", "slice", "narrow", "squeeze of a dim"] * (x.dim() > 0)
    names += ["select", "split", "chunk", "unbind", "unfold"] * bool(some)
    names += ["diagonal"] * (x.dim() >= 2) + ["real"] * x.is_complex()
    names += ["view"] * x.is_contiguous() + ["as_strided"] * (x.numel() > 1 and x.is_contiguous())
    name = draw(st.sampled_from(names))
    if name == "unsqueeze":
        return name, (draw(st.integers(0, x.dim())),)
    if name in ("transpose", "movedim"):
        return name, (draw(dims), draw(dims))
    if name == "permute":
        return name, (tuple(draw(st.permutations(range(x.dim())))),)
    if name == "squeeze of a dim":
        return name, (draw(dims),)
    if name == "expand":
        return name, ((draw(st.integers(1, 2)), *x.shape),)
    if name == "slice":
        d = draw(dims)
        ends = st.integers(-x.shape[d] - 1, x.shape[d] + 1) | st.none()
        return name, (d, draw(ends), draw(ends), draw(st.integers(1, 3)))
    if name == "narrow":
        d = draw(dims)
        start = draw(st.integers(0, x.shape[d]))
        return name, (d, start, draw(st.integers(0, x.shape[d] - start)))
    if name in ("select", "unbind"):
        d = draw(st.sampled_from(some))
        return name, (d, draw(st.integers(0, x.shape[d] - 1)))
    if name in ("split", "chunk"):
        d = draw(st.sampled_from(some))
        size = draw(st.integers(1, x.shape[d]))
        count = len(x.split(size, d) if name == "split" else x.chunk(size, d))
        return name, (size, d, draw(st.integers(0, count - 1)))
    if name == "unfold":
        d = draw(st.sampled_from(some))
        return name, (d, draw(st.integers(1, x.shape[d])))
    if name == "diagonal":
        return name, (draw(st.integers(-1, 1)),)
    if name == "view":
        return name, (
            draw(
                st.sampled_from([(-1,), (x.numel(),), (1, x.numel()), (x.numel(), 1)])
                if x.numel()
                else st.just(tuple(x.shape))
            ),
        )
    if name == "as_strided":
        return name, ((2,), (draw(st.integers(1, x.numel() - 1)),))
    return name, ()


@st.composite
def chains(draw, case, *, writes):
    x, steps = case.full(), []
    for _ in range(draw(st.integers(0, 5))):
        step = draw(one_step(x, writable=writes))
        steps.append(step)
        x = STEPS[step[0]](x, *step[1])
    return Chain(tuple(steps), draw(st.sampled_from(sorted(WRITES if writes else READS))))


@st.composite
def examples(draw, *, writes):
    """A few tensors of one world, each with two chains of views."""
    num_ranks = draw(world_sizes())
    found = []
    for _ in range(draw(st.integers(1, 4))):
        case = replace(draw(tensor_cases()), num_ranks=num_ranks)
        case = replace(case, dim=draw(st.sampled_from([case.dim, case.dim, None])))
        found.append((case, draw(chains(case, writes=writes)), draw(chains(case, writes=False))))
    return num_ranks, found


@functools.cache
def world_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def same_bits(left, right):
    left, right = (t.detach().resolve_conj() for t in (left, right))
    assert left.shape == right.shape
    assert left.dtype == right.dtype
    left, right = (t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for t in (left, right))
    assert torch.equal(left, right)


def outcome(check, found):
    """What went wrong, as text: all ranks see the same, so the world can live on while hypothesis shrinks."""
    try:
        check(found)
    except Exception:
        return traceback.format_exc(limit=-5)
    return ""


def run(worlds, num_ranks, check, found):
    problems = worlds.run(num_ranks, outcome, check, found)
    assert not any(problems), max(problems)


def full_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor


def check_writes(found):
    with torch.no_grad():
        for case, chain, other in found:
            plain = case.full()
            w = ShardedTensor.shard(plain.clone(memory_format=torch.preserve_format), world_mesh(), case.dim, name="w")
            view, plain_view = chain.view(w), chain.view(plain)
            seen, plain_seen = other.view(w), other.view(plain)
            assert view.shape == plain_view.shape
            assert view.stride() == plain_view.stride()
            assert view.dtype == plain_view.dtype
            pointer = w.to_local().data_ptr()
            torch.manual_seed(4)
            WRITES[chain.action](plain_view)
            torch.manual_seed(4)
            WRITES[chain.action](view)
            same_bits(w.full_tensor(), plain)
            same_bits(full_of(view), plain_view)
            same_bits(full_of(seen), plain_seen)
            assert w.to_local().data_ptr() == pointer, "the shard moved"


def check_reads(found):
    with torch.no_grad():
        for case, chain, other in found:
            plain = case.full()
            w = ShardedTensor.shard(plain, world_mesh(), case.dim, name="w")
            view, plain_view = chain.view(w), chain.view(plain)
            same_bits(full_of(READS[chain.action](view)), READS[chain.action](plain_view))
            if case.dtype != torch.bool:
                w.mul_(3)
                plain.mul_(3)
                same_bits(full_of(READS[chain.action](view)), READS[chain.action](plain_view))
            same_bits(full_of(READS[other.action](other.view(w))), READS[other.action](other.view(plain)))


@settings(max_examples=100)
@given(example=examples(writes=True))
def test_a_write_through_views_equals_the_write_on_a_plain_tensor(worlds: WorldPool, example):
    num_ranks, found = example
    run(worlds, num_ranks, check_writes, found)


@settings(max_examples=60)
@given(example=examples(writes=False))
def test_a_read_through_views_equals_the_read_of_a_plain_tensor(worlds: WorldPool, example):
    num_ranks, found = example
    run(worlds, num_ranks, check_reads, found)


def check_recorded_views(found):
    """Views of a leaf that requires grad: values, and the gradient that flows back through the chain."""
    for case, chain, _ in found:
        plain = case.full().requires_grad_()
        w = ShardedTensor.shard(case.full(), world_mesh(), case.dim, name="w").requires_grad_()
        view, plain_view = chain.view(w), chain.view(plain)
        if not plain_view.requires_grad:
            continue
        weight = like(plain_view.detach(), 3)
        (plain_view * weight).sum().abs().backward()
        (view * weight).sum().abs().backward()
        same_shape = w.grad.full_tensor()
        torch.testing.assert_close(same_shape, plain.grad, rtol=1e-2, atol=1e-2)


@st.composite
def recorded_examples(draw):
    num_ranks = draw(world_sizes())
    cases = [replace(draw(tensor_cases(floating=True)), num_ranks=num_ranks) for _ in range(2)]
    cases = [replace(c, dtype=torch.float64) for c in cases]
    return num_ranks, [(c, draw(chains(c, writes=False)), None) for c in cases]


@settings(max_examples=40)
@given(example=recorded_examples())
def test_gradients_flow_back_through_views(worlds: WorldPool, example):
    num_ranks, found = example
    run(worlds, num_ranks, check_recorded_views, found)


def check_kinds():
    w = ShardedTensor.shard(torch.arange(24.0).reshape(4, 6), world_mesh(), 0, name="w")
    for chain in (lambda x: x.t(), lambda x: x[1], lambda x: x.view(-1)[3:7], lambda x: x.split(2)[1].unsqueeze(0)):
        with CommTrace() as trace:
            view = chain(w)
            _ = view.shape, view.stride(), view.dtype, repr(view), view.numel(), view.device
        assert type(view) is ShardedTensor
        assert view.is_view
        assert trace.calls() == 0
        with pytest.raises(UnsupportedOpError, match="w: to_local needs a tensor that is itself sharded"):
            view.to_local()


def test_views_are_lazy_and_communicate_nothing(worlds: WorldPool):
    worlds.run(2, check_kinds)


def check_one_lost_write(skip):
    w = ShardedTensor.shard(torch.zeros(4, 2), world_mesh(), 0, name="w")
    with torch.no_grad():
        for i in range(4):
            if i != skip:
                w[i].fill_(1)
    return w.full_tensor().sum().item()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_each_row_write_counts(worlds: WorldPool, num_ranks):
    assert worlds.run(num_ranks, check_one_lost_write, None) == [8.0] * num_ranks
    assert worlds.run(num_ranks, check_one_lost_write, 2) == [6.0] * num_ranks


def formatted() -> None:
    plain = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    layer = nn.Linear(4, 3, bias=False)
    layer.weight.data.copy_(plain)
    layer.scale = nn.Parameter(torch.tensor(2.5))
    dshard.fully_shard(layer)
    w = layer.weight
    assert f"{w[0, 0]:.3f}" == f"{plain[0, 0]:.3f}"
    assert f"{w.detach()[1, 2]:>10.4g}" == f"{plain[1, 2]:>10.4g}"
    assert f"{w[0, 0]}" == f"{plain[0, 0]}"
    assert f"{layer.scale:.1f}" == "2.5"
    assert f"{layer.scale.detach():05.1f}" == "002.5"
    assert f"{w}" == repr(w)  # never communicates
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{w:.3f}"
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{plain:.3f}"


def test_numbers_are_formatted_as_those_of_plain_tensors(worlds: WorldPool):
    worlds.run(2, formatted)
