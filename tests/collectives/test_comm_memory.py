"""Memory of the backend's own, or symmetric memory, for the buffers of collectives, where there is none; and sums."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.testing import WorldPool
from tests.collectives.test_native_backends import native

METHODS = {"set_allocate_memory_from_process_group_for_comm": (True,), "set_symm_mem_for_comm": ()}


def gradient(method: str, arguments: tuple[Any, ...], is_native: bool) -> tuple[list[float], list[str]]:
    """Of a weight, with a method called before; and what warned."""
    model: Any = nn.Linear(4, 2, bias=False)
    nn.init.ones_(model.weight)
    dshard.fully_shard(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if method:
            getattr(model, method)(*arguments)
    loss = model(torch.full((1, 4), dist.get_rank() + 1.0)).sum()
    loss.backward()
    return model.weight.grad.full_tensor()[0].tolist(), [str(each.message) for each in caught]


@pytest.mark.parametrize("method", METHODS)
def test_a_backend_that_has_no_such_memory_says_so_and_goes_on(worlds: WorldPool, method):
    for grad, said in worlds.run(2, gradient, method, METHODS[method], False):
        assert grad == [1.5] * 4
        assert len(said) == 1
        assert f"{method}: has no effect, for " in said[0]
        assert "gloo" in said[0] or "CUDA" in said[0]


def errors() -> list[str]:
    model: Any = dshard.fully_shard(nn.Linear(4, 2))
    found = []
    for call in (
        lambda: model.set_symm_mem_for_comm("NVSHMEM"),
        lambda: model.set_allocate_memory_from_process_group_for_comm(1),
        lambda: model.set_force_sum_reduction_for_comms("yes"),
        lambda: (model.set_custom_all_gather(Allocating()), model.set_symm_mem_for_comm()),
    ):
        with pytest.raises((dshard.ArgumentError, dshard.StateError)) as raised:
            call()
        found.append(str(raised.value))
    return found


class Allocating:
    """As torch's `AllGather` objects are."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *_: Any, **__: Any) -> None: ...


def test_what_cannot_be_is_refused(worlds: WorldPool):
    backend, enable, sums, custom = worlds.run(1, errors)[0]
    assert "'NVSHMEM'" in backend
    assert "enable" in enable
    assert "enable" in sums
    assert "must have no custom all-gather" in custom


def reductions(forces: bool) -> tuple[list[str], list[float]]:
    """The operations by which replicas and ranks reduce on a backend that knows means, and the gradient."""
    from dshard.collectives import _c10d

    with native(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_c10d, "WITH_MEANS", {"gloo"})
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model: Any = nn.Linear(4, 2, bias=False)
        nn.init.ones_(model.weight)
        dshard.fully_shard(model, mesh=mesh)
        model.set_force_sum_reduction_for_comms(forces)
        found: list[str] = []
        for name in ("reduce_scatter_flat", "all_reduce_flat"):
            original = getattr(_c10d, name)

            def noted(*args: Any, original: Any = original) -> Any:
                op = next(each for each in args if isinstance(each, _c10d.ReduceOp))
                found.append(op.name)
                return original(*[_c10d.ReduceOp.SUM if each is op else each for each in args])  # gloo has no means

            patch.setattr(_c10d, name, noted)
        model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
        return found, model.weight.grad.full_tensor()[0].tolist()


@pytest.mark.parametrize("forces", [False, True])
def test_a_mean_may_be_forced_to_be_a_sum(worlds: WorldPool, forces):
    for found, grad in worlds.run(4, reductions, forces):
        assert found == ["SUM" if forces else "MEAN"] * 2
        assert grad == [2.5 if forces else 10.0] * 4
