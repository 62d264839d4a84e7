"""The oracle is itself held against torch, once, so that the tests that trust it may."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dshard.testing.strategies import dims, shapes
from tests.kit import oracle

SIZES = st.integers(0, 40)
RANKS = st.integers(1, 9)


@given(size=SIZES, num_chunks=RANKS)
def test_extents_are_those_of_torch_chunk(size, num_chunks):
    expected = torch.arange(size).chunk(num_chunks) if size else ()
    extents = oracle.chunk_extents(size, num_chunks)
    assert len(extents) == num_chunks
    assert [list(range(start, stop)) for start, stop in extents if stop > start] == [
        chunk.tolist() for chunk in expected
    ]
    assert all(start == stop == size for start, stop in extents[len(expected) :])


@given(size=SIZES, num_chunks=RANKS)
def test_extents_are_disjoint_ordered_and_cover(size, num_chunks):
    assert [i for start, stop in oracle.chunk_extents(size, num_chunks) for i in range(start, stop)] == list(
        range(size)
    )


@given(data=st.data(), shape=shapes(), num_ranks=RANKS)
def test_unshard_undoes_shard(data, shape, num_ranks):
    dim = data.draw(dims(shape))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    shards = [oracle.shard(array, dim, rank, num_ranks) for rank in range(num_ranks)]
    np.testing.assert_array_equal(oracle.unshard(shards, dim, shape), array)
    assert not any(np.shares_memory(part, array) for part in shards)


def test_unshard_refuses_shards_of_another_shape():
    with pytest.raises(ValueError, match=r"must make up shape \(3, 2\), but they make up \(4, 2\)"):
        oracle.unshard([np.zeros((2, 2)), np.zeros((2, 2))], 0, (3, 2))


def test_wire_bytes_are_n_minus_one_padded_shards():
    assert oracle.wire_bytes_all_gather([(8, 6)], [0], 4, 4) == 3 * 12 * 4
    assert oracle.wire_bytes_all_gather([(5, 3), (7,)], [0, 0], 2, 8) == (9 + 4) * 8
    assert oracle.wire_bytes_all_gather([(5, 3), ()], [1, None], 2, 2) == 10 * 2
    assert oracle.wire_bytes_reduce_scatter([(8, 6)], [1], 3, 4) == 2 * 16 * 4
    assert oracle.wire_bytes_all_reduce(48, 4, 4) == 2 * 3 * 12 * 4
    assert oracle.wire_bytes_all_gather([(8, 6)], [0], 1, 4) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_mean_sums_in_pairs(dtype):
    arrays = [np.array([value], dtype) for value in (1e8, 1.0, -1e8, 1.0)]
    expected = ((arrays[0] + arrays[1]) + (arrays[2] + arrays[3])) / dtype(4)
    mean = oracle.mean_in_pairs(arrays)
    assert mean.dtype == dtype
    np.testing.assert_array_equal(mean, expected)
    assert arrays[0][0] == dtype(1e8)


def test_adamw_is_torchs():
    rng = np.random.default_rng(0)
    param, state = rng.normal(size=(5, 3)), None
    theirs = torch.nn.Parameter(torch.from_numpy(param.copy()))
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    state = oracle.AdamWState.zeros_like(param)
    for _ in range(6):
        grad = rng.normal(size=param.shape)
        theirs.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        step = oracle.adamw_step(param, grad, state, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
        param, state = step.param, step.state
    np.testing.assert_allclose(param, theirs.detach().numpy(), rtol=1e-12)
    assert state.num_steps == 6


def test_the_oracle_imports_neither_torch_nor_dshard():
    tree = ast.parse(Path(oracle.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= {"math", "numpy", "collections", "dataclasses", "typing"}
