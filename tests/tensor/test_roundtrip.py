"""Invariants 2 and 3: the full value of a shard is what was sharded, bit for bit, and padding is never read."""

import copy
import functools
import io
import itertools
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard.tensor import ShardedTensor
from dshard.testing import RemoteRankError, WorldPool
from dshard.testing.strategies import DTYPES, TensorCase, shapes, tensor_cases, world_sizes
from tests.kit import oracle

MORE_DTYPES = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.uint16,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@functools.cache
def world_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def same_bits(left, right):
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left, right = (
        t.detach().resolve_conj().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        for t in (left, right)
    )
    return torch.equal(left, right)


def random_bits(case):
    """Any bit pattern of a dtype: NaN payloads, infinities, denormals, minus zero."""
    if case.dtype == torch.bool:
        return case.full()
    shape = case.shape if case.contiguous else case.shape[::-1]
    numel = 1
    for size in shape:
        numel *= size
    generator = torch.Generator().manual_seed(case.seed)
    raw = torch.randint(0, 256, (numel * case.dtype.itemsize,), dtype=torch.uint8, generator=generator)
    full = raw.view(case.dtype).reshape(shape)
    return full if case.contiguous else full.permute(*reversed(range(len(shape))))


def saved_and_loaded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def own_part(full, dim):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if dim is None:
        return full
    start, stop = oracle.chunk_extents(full.shape[dim], num_ranks)[rank]
    return full.narrow(dim, start, stop - start)


@contextmanager
def uninitialized_is_nan():
    """Make `torch.empty` give NaN (floats) or the largest value (integers), so that what is read unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


# --- invariant 2 -----------------------------------------------------------------------------------------------------


def check_roundtrip(case):
    full = random_bits(case)
    expected = full.clone()
    w = ShardedTensor.shard(full, world_mesh(), case.dim, name="w")
    assert (tuple(w.shape), w.dtype, w.device, w.numel()) == (case.shape, case.dtype, full.device, full.numel())
    assert same_bits(w.to_local(), own_part(full, case.dim if case.shape else None))
    assert w.stride() == torch.empty_like(full).stride()
    full.untyped_storage().fill_(7)
    got = w.full_tensor()
    assert type(got) is torch.Tensor
    assert same_bits(got, expected)
    got.untyped_storage().fill_(3)
    assert same_bits(w.full_tensor(), expected), "the caller's copy shares memory with the shards"
    copies = {
        "detach": w.detach(),
        "clone": w.clone(),
        "deepcopy": copy.deepcopy(w),
        "torch.save": saved_and_loaded(w),
    }
    for name, other in copies.items():
        assert type(other) is ShardedTensor, name
        assert same_bits(other.full_tensor(), expected), name
        assert other.to_local().shape == w.to_local().shape, name
    if len(case.shape):
        assert same_bits(w.transpose(0, -1).full_tensor(), expected.transpose(0, -1))
        assert same_bits(w[:1].full_tensor(), expected[:1])


@settings(max_examples=60)
@given(case=tensor_cases())
def test_full_of_shard_is_the_tensor_bit_for_bit(worlds: WorldPool, case: TensorCase):
    worlds.run(case.num_ranks, check_roundtrip, case)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_dtype_goes_round(worlds: WorldPool, num_ranks):
    worlds.run(num_ranks, check_every_dtype)


def check_every_dtype():
    for dtype in (*DTYPES, *MORE_DTYPES):
        for shape, dim in (((5, 3), 0), ((3, 5), 1), ((0, 2), 0), ((), None)):
            check_roundtrip(TensorCase(shape, dtype, dim, dist.get_world_size(), seed=3))


def check_bucket(cases):
    """Several tensors at once, as the parameters of one module: shapes, dims and strides of one bucket mixed."""
    fulls = [replace(c, dtype=cases[0].dtype).full(i) for i, c in enumerate(cases)]
    module = nn.Module()
    for i, full in enumerate(fulls):
        module.register_parameter(f"p{i}", nn.Parameter(full.clone(memory_format=torch.preserve_format)))
    dims = [c.dim for c in cases]
    by_id = {id(p): dim for p, dim in zip(module.parameters(), dims, strict=True)}

    def place(param):
        dim = by_id[id(param)]
        return dshard_placement(dim)

    dshard.fully_shard(module, mesh=world_mesh(), shard_placement_fn=place)
    with dshard.CommTrace() as trace, dshard.gathered(module) as got:
        for i, full in enumerate(fulls):
            assert same_bits(got[f"p{i}"], full), i
    is_whole = all(dim is None for dim in dims) and any(full.dim() for full in fulls)  # then it is there already
    assert trace.calls("all_gather") == (1 if dist.get_world_size() > 1 and not is_whole else 0)
    for i, full in enumerate(fulls):
        assert same_bits(getattr(module, f"p{i}").full_tensor(), full), i


def dshard_placement(dim):
    from torch.distributed.tensor import Replicate, Shard

    return Replicate() if dim is None else Shard(dim)


@settings(max_examples=40)
@given(
    num_ranks=world_sizes(),
    cases=st.lists(
        tensor_cases(floating=True) | st.builds(lambda c: replace(c, dim=None), tensor_cases(floating=True)),
        min_size=1,
        max_size=5,
    ),
)
def test_a_bucket_of_mixed_tensors_goes_round_in_one_gather(worlds: WorldPool, num_ranks, cases):
    worlds.run(num_ranks, check_bucket, cases)


# --- invariant 3 -----------------------------------------------------------------------------------------------------


def check_empty_is_nan():
    before = torch.utils.deterministic.fill_uninitialized_memory
    with uninitialized_is_nan():
        assert torch.empty(3).isnan().all()
        assert torch.empty_strided((2, 2), (1, 2)).isnan().all()
        assert torch.empty(2, dtype=torch.int64).eq(torch.iinfo(torch.int64).max).all()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == before


def test_uninitialized_memory_is_nan_inside_the_guard_alone(worlds: WorldPool):
    worlds.run(1, check_empty_is_nan)


def check_padding(case):
    full = case.full()
    with uninitialized_is_nan():
        w = ShardedTensor.shard(full, world_mesh(), case.dim, name="w")
        assert same_bits(w.full_tensor(), full)
        assert same_bits(w.clone().full_tensor(), full)
        assert same_bits((w + w).full_tensor(), full + full)
        assert same_bits(torch.zeros_like(w).full_tensor(), torch.zeros_like(full))
        assert same_bits(torch.ones_like(w).full_tensor(), torch.ones_like(full))
        w[..., :1].mul_(2) if case.shape else w.mul_(2)
        full[..., :1].mul_(2) if case.shape else full.mul_(2)
        assert same_bits(w.full_tensor(), full)
        w.masked_fill_(full > 0, 1.5)
        full.masked_fill_(full > 0, 1.5)
        assert same_bits(w.full_tensor(), full)
        for name in ("sum", "mean", "norm", "max", "min"):
            if name in ("max", "min", "mean") and not full.numel():
                continue
            got, want = getattr(w.double(), name)(), getattr(full.double(), name)()
            torch.testing.assert_close(got, want, msg=lambda m, name=name: f"{name}: {m}")
        rand = torch.rand_like(w).full_tensor()
        assert ((rand >= 0) & (rand <= 1)).all()
        torch.manual_seed(1)
        w.normal_()
        torch.manual_seed(1)
        full.normal_()
        assert same_bits(w.full_tensor(), full)
        norms = torch._foreach_norm([w, w.detach()])
        assert all(torch.isfinite(n) for n in norms)


@settings(max_examples=60)
@given(case=tensor_cases(floating=True))
def test_padding_of_a_tensor_never_leaks(worlds: WorldPool, case: TensorCase):
    worlds.run(case.num_ranks, check_padding, case)


class Uneven(nn.Module):
    """Dims that no world divides, one 0-d parameter, one empty one, one that takes no part."""

    def __init__(self, sizes, dtype):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o, dtype=dtype) for i, o in itertools.pairwise(sizes))
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=dtype))
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=dtype))
        self.unused = nn.Parameter(torch.ones(5, dtype=dtype))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x.sum() + self.nothing.sum()


def check_module_padding(sizes, dim, seed):
    torch.manual_seed(seed)
    twin = Uneven(sizes, torch.float64)
    model = copy.deepcopy(twin)
    num_ranks = dist.get_world_size()
    inputs = [torch.randn(2, sizes[0], dtype=torch.float64) for _ in range(num_ranks)]
    with uninitialized_is_nan():
        dshard.fully_shard(
            model, mesh=world_mesh(), shard_placement_fn=lambda p: dshard_placement(min(dim, p.dim() - 1))
        )
        ours = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=bool(seed % 2))
        theirs = torch.optim.AdamW(twin.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(inputs[dist.get_rank()])
            loss.backward()
            (sum(twin(x) for x in inputs) / num_ranks).backward()
            assert torch.isfinite(loss)
            for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
                if name == "unused":
                    assert p.grad is None
                    continue
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda m, name=name: f"{name}: {m}")
            dshard.clip_grad_norm_(model.parameters(), 0.3)
            nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
            ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
    for (name, p), q in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q[1].data, msg=lambda m, name=name: f"{name}: {m}")


@settings(max_examples=20)
@given(
    num_ranks=world_sizes(),
    sizes=st.lists(st.sampled_from([1, 3, 5, 7]), min_size=2, max_size=4),
    dim=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_padding_of_a_model_never_leaks_into_weights_gradients_or_norms(worlds: WorldPool, num_ranks, sizes, dim, seed):
    worlds.run(num_ranks, check_module_padding, sizes, dim, seed)


def read_padding():
    """A wrong reader: the whole segment of a gathered uneven tensor, padding and all."""
    from dshard.collectives import GatherPlan, ShardGroup, all_gather
    from dshard.layout import BucketLayout, ShardLayout

    group = ShardGroup(world_mesh().get_group(), torch.device("cpu"))
    layout = ShardLayout((3,), 0, 2)
    with uninitialized_is_nan():
        shard = torch.ones(layout.local_shape(group.rank))
        plan = GatherPlan.of(BucketLayout.of([layout]), [(1,)], shard.dtype, group)
        full = all_gather([shard], plan, group, label="x").wait().tensors[0]
        padded = torch.as_strided(full, (4,), (1,))
    assert not padded.isnan().any()


def test_a_reader_of_padding_would_be_seen(worlds: WorldPool):
    with pytest.raises(RemoteRankError, match="isnan"):
        worlds.run(2, read_padding)


@given(shape=shapes(max_dims=2))
def test_random_bits_are_the_drawn_shape(shape):
    assert random_bits(TensorCase(shape, torch.float32, None, 1)).shape == shape
