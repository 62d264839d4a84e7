"""Reads of a parameter give its full value, equal on all ranks; a look at it sends nothing."""

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.testing import WorldPool
from tests.twins import average_grads, close, full, ids, shard_blocks, twins

READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda w: w.sum().item(),
    "mean": lambda w: w.mean().item(),
    "max": lambda w: w.max().item(),
    "norm": lambda w: w.norm().item(),
    "vector_norm": lambda w: torch.linalg.vector_norm(w).item(),
    "inf norm": lambda w: torch.linalg.vector_norm(w, float("inf")).item(),
    "matrix norm": lambda w: torch.linalg.matrix_norm(w, 2).item(),
    "std": lambda w: w.std().item(),
    "count": lambda w: (w > 0).sum().item(),
    "count_nonzero": lambda w: int(torch.count_nonzero(w)),
    "element": lambda w: w[4, 1].item(),
    "row": lambda w: w[2].tolist(),
    "last row": lambda w: w[-1].sum().item(),
    "any": lambda w: bool((w > 0.5).any()),
    "isnan": lambda w: bool(w.isnan().any()),
    "isfinite": lambda w: bool(w.isfinite().all()),
    "argmax": lambda w: w.argmax().item(),
    "median": lambda w: w.median().item(),
    "quantile": lambda w: w.quantile(0.25).item(),
    "tolist": lambda w: w.tolist(),
    "float": lambda w: float(w[0, 0]),
    "int": lambda w: int(w[0, 0] * 100),
    "bool": lambda w: bool(w[0, 0]),
    "format": lambda w: f"{w.norm():.3f} {w.min():>8.2e}",
    "equal": lambda w: torch.equal(w, w.clone()),
    "allclose": lambda w: torch.allclose(w, w + 1),
    "contains": lambda w: 5.0 in w,
    "iteration": lambda w: [row.sum().item() for row in w],
    "len": len,
    "histogram": lambda w: torch.histc(w, 4, -2, 2).tolist(),
    "unique": lambda w: w.round().unique().tolist(),
    "numpy": lambda w: w.numpy().sum().item(),
    "foreach norm": lambda w: [n.item() for n in torch._foreach_norm([w, w * 2])],
}


def read_all() -> dict[str, Any]:
    plain, sharded = twins()
    plain(ids()).square().mean().backward()
    sharded(ids()).square().mean().backward()
    average_grads(plain)
    found = {}
    for name, read in READS.items():
        for kind, p, q in (("weight", plain.head.weight, sharded.head.weight),):
            for part, x, y in ((kind, p.detach(), q.detach()), (f"{kind}.grad", p.grad, q.grad)):
                expected, value = read(x), read(y)
                assert type(value) is type(expected), (name, part)
                if isinstance(expected, (float, list)):
                    close(torch.tensor(value), torch.tensor(expected), f"{name} of {part}")
                else:
                    assert value == expected, (name, part, value, expected)
                found[f"{name} of {part}"] = value
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_read_of_a_weight_and_a_gradient_is_the_full_value_and_equal_on_all_ranks(worlds: WorldPool, num_ranks):
    results = worlds.run(num_ranks, read_all)
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 2 * len(READS)


LOOKS: dict[str, Callable[[Any], Any]] = {
    "repr of the model": repr,
    "print": lambda m: print(m.head.weight, file=io.StringIO()),
    "repr": lambda m: repr(m.head.weight),
    "str": lambda m: str(m.head.weight.detach()),
    "format": lambda m: f"{m.head.weight}",
    "shape": lambda m: (m.head.weight.shape, m.head.weight.size(0), m.head.weight.stride(), m.head.weight.ndim),
    "numel": lambda m: sum(p.numel() for p in m.parameters()),
    "dtype": lambda m: (m.head.weight.dtype, m.head.weight.device, m.head.weight.layout, m.head.weight.is_meta),
    "is": lambda m: (m.head.weight.is_floating_point(), m.head.weight.is_contiguous(), m.head.weight.is_leaf),
    "bytes": lambda m: sum(p.numel() * p.element_size() for p in m.parameters()),
    "names": lambda m: [n for n, _ in m.named_parameters()],
    "state_dict": lambda m: list(m.state_dict()),
    "local": lambda m: m.head.weight.to_local().norm().item(),
    "views": lambda m: m.head.weight[2:5].t().detach().shape,
    "isinstance": lambda m: isinstance(m.head.weight, nn.Parameter),
    "hash": lambda m: set(m.parameters()),
    "deepcopy": copy.deepcopy,
    "save": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "pickle": pickle.dumps,
    "requires_grad": lambda m: m.trunk[0].requires_grad_(False).requires_grad_(True),
    "zero_grad": lambda m: m.zero_grad(),
    "grad": lambda m: (m.head.weight.grad, m.head.weight.grad_fn),
}


def look_on_rank_0(look: str) -> int:
    _, model = twins(shard=shard_blocks)
    model(ids())
    with dshard.CommTrace() as trace:
        if dist.get_rank() == 0:
            LOOKS[look](model)
    model(ids()).sum().backward()
    return trace.calls()


@pytest.mark.parametrize("look", LOOKS)
def test_looking_at_a_parameter_on_rank_0_alone_sends_nothing_and_never_hangs(worlds: WorldPool, look):
    assert worlds.run(2, look_on_rank_0, look) == [0, 0]


def address_of_parameters() -> None:
    _, sharded = twins(shard=shard_blocks)
    weight = sharded.head.weight
    with pytest.raises(
        dshard.UnsupportedOpError, match=r"^head\.weight: a raw pointer needs memory .*dshard\.gathered"
    ):
        weight.data_ptr()
    with dshard.gathered(sharded) as fulls:
        memory = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
        seen = torch.tensor(list(memory)).view(weight.shape)
        assert torch.equal(seen, fulls["head.weight"])
        assert weight.data_ptr() == fulls["head.weight"].data_ptr() != 0
    with pytest.raises(dshard.UnsupportedOpError, match=r"^head\.weight: a raw pointer"):
        weight.data_ptr()
    expected = full(weight)
    assert expected is not None
    detached_weight = weight.detach()
    for array in (detached_weight.numpy(), np.asarray(detached_weight), np.from_dlpack(detached_weight)):
        assert np.array_equal(array, expected.numpy())
    with pytest.raises(ValueError, match="read-only"):
        detached_weight.numpy()[:] = 0
    torch.from_dlpack(detached_weight).zero_()  # a copy
    with pytest.raises(RuntimeError, match="requires grad"):
        weight.numpy()
    assert torch.equal(full(weight), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_raw_pointers_raise_outside_of_gathered_and_are_the_full_memory_inside(worlds: WorldPool, num_ranks):
    worlds.run(num_ranks, address_of_parameters)
