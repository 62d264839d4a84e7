"""Results of operations answer as DTensors do; plain DTensors beside sharded tensors are taken as such."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import dshard
from dshard.tensor.operands import AgreedTensor
from dshard.testing import WorldPool

RESULTS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda g: g.norm(),
    "sum of squares": lambda g: (g * g).sum(),
    "max": lambda g: g.abs().max(),
    "norm of rows": lambda g: g.norm(dim=1),
    "max of rows": lambda g: g.max(dim=1).values,
    "times a 0-d tensor": lambda g: g * torch.tensor(2.0),
    "product": lambda g: g @ g.t(),
    "view": lambda g: g.view(8, -1).to(torch.float64),
    "of norms": lambda g: torch.stack([g.norm(), g.norm()]).norm() ** 2,
    "foreach": lambda g: torch._foreach_norm([g, g])[1],
    "mean": lambda g: g.mean(),
    "any": lambda g: (g > 0).any(),
}


def gradient(rows: int = 8) -> tuple[Any, Tensor]:
    """A sharded gradient, and its full value."""
    torch.manual_seed(0)
    layer = dshard.fully_shard(nn.Linear(6, rows))
    layer(torch.randn(4, 6)).square().sum().backward()
    return layer.weight.grad, layer.weight.grad.full_tensor()


def answers() -> dict[str, bool]:
    grad, full = gradient()
    found = {}
    for name, make in RESULTS.items():
        result, expected = make(grad), make(full)
        local = result.to_local() if result.ndim == 0 else result.full_tensor()
        asked = [result.full_tensor(), local, result.redistribute(placements=[Replicate()]).to_local()]
        found[name] = all(torch.allclose(each, expected) and type(each) is Tensor for each in asked)
    return found


def test_results_answer_as_their_values(worlds: WorldPool):
    assert worlds.run(2, answers) == [dict.fromkeys(RESULTS, True)] * 2


def as_any_tensor() -> None:
    grad, full = gradient()
    norm = grad.norm()
    assert isinstance(norm, AgreedTensor)
    assert norm.device_mesh == grad.device_mesh
    assert norm.placements == (Replicate(),)
    assert f"{norm:.3f}" == f"{full.norm():.3f}"
    assert float(norm) == norm.item()
    assert type(norm + torch.ones(3)) is Tensor
    assert copy.deepcopy(norm).item() == norm.item()
    file = io.BytesIO()
    torch.save(norm, file)
    file.seek(0)
    assert torch.equal(torch.load(file), norm.full_tensor())
    rows = (grad * grad).sum(dim=1).redistribute(placements=[Shard(0)])
    assert rows.to_local().shape == (4,)
    assert torch.equal(rows.full_tensor(), (full * full).sum(dim=1))
    # What holds data of this rank is a plain tensor.
    assert type(grad.detach() @ torch.full((6,), float(dist.get_rank()))) is Tensor


def test_results_are_tensors_as_any_other(worlds: WorldPool):
    worlds.run(2, as_any_tensor)


def a_penalty() -> tuple[Tensor, Tensor, Tensor]:
    """The norm that torch's clipping gives, and the gradient of a penalty that is asked for its full value."""
    torch.manual_seed(0)
    layer: Any = dshard.fully_shard(nn.Linear(6, 8))
    total = layer.weight.square().sum().full_tensor()
    (layer(torch.ones(2, 6)).sum() + total).backward()
    norm: Any = nn.utils.clip_grad_norm_(layer.parameters(), 1e9)
    grad = layer.weight.grad.full_tensor() - 2 * layer.weight.full_tensor().detach()
    return norm.full_tensor(), torch.tensor(norm.placements == (Replicate(),)), grad


def test_a_loss_may_ask_for_full_values(worlds: WorldPool):
    for norm, is_replicated, grad in worlds.run(2, a_penalty):
        assert norm > 0
        assert is_replicated
        torch.testing.assert_close(grad, torch.full((8, 6), 2.0))


IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    "lerp_": lambda s, g: s.lerp_(g, 0.1),
    "add_": lambda s, g: s.add_(g, alpha=2),
    "copy_": lambda s, g: s.copy_(g),
    "mul_": lambda s, g: s.mul_(g),
    "addcmul_": lambda s, g: s.addcmul_(g, g, value=0.5),
    "addcdiv_": lambda s, g: s.addcdiv_(g, g.abs() + 1),
    "foreach lerp_": lambda s, g: (torch._foreach_lerp_([s], [g], 0.1), s)[1],
    "foreach addcmul_": lambda s, g: (torch._foreach_addcmul_([s], [g], [g]), s)[1],
}
OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda s, g: s + g,
    "mul": lambda s, g: g * s,
    "where": lambda s, g: torch.where(g > 0, s, g),
    "foreach mul": lambda s, g: torch._foreach_mul([s], [g])[0],
    "into a gradient": lambda s, g: g.detach().clone().addcdiv_(s, s + 1),
    "fused": lambda s, g: fused(s, g),
}


def fused(state: Any, grad: Any) -> Any:
    """AdamW's kernel over a parameter, with states of another class."""
    param, second = grad.detach().clone(), grad.detach().clone().abs()
    torch._fused_adamw_(
        [param], [grad.detach()], [state], [second], [], [torch.tensor(1.0)], lr=0.1, beta1=0.9, beta2=0.99,
        weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
    )  # fmt: skip
    return param


def beside_dtensors(name: str, rows: int, is_replicated: bool) -> None:
    grad, full = gradient(rows)
    grad = grad.detach()
    placements = (Replicate(),) if is_replicated else grad.placements
    local = torch.ones_like(full if is_replicated else grad.to_local())
    state = DTensor.from_local(
        local, grad.device_mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    plain = torch.ones_like(full)
    run = {**IN_PLACE, **OTHERS}[name]
    found, expected = run(state, grad), run(plain, full)
    if name in IN_PLACE:
        assert found is state
        assert type(found) is DTensor
        assert found.placements == placements
    torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.parametrize("rows", [8, 7], ids=["even", "uneven"])
@pytest.mark.parametrize("name", [*IN_PLACE, *OTHERS])
def test_dtensors_beside_sharded_tensors(worlds: WorldPool, name, rows):
    worlds.run(2, beside_dtensors, name, rows, False)


@pytest.mark.parametrize("name", [name for name in (*IN_PLACE, *OTHERS) if name != "fused"])
def test_replicated_dtensors_beside_sharded_tensors(worlds: WorldPool, name):
    worlds.run(2, beside_dtensors, name, 8, True)
