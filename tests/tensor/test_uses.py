"""A parameter is its full value wherever a program uses it: in a loss, another method, a hook, `torch.func`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

import dshard
from dshard.testing import WorldPool
from tests.models import COLUMNS, ROWS
from tests.twins import SHARD, close, data, full, ids, quietly, same_grads, shard_blocks, twins


class OwnLinear(torch.autograd.Function):
    """A layer whose backward is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return upstream @ weight, upstream.flatten(0, -2).t() @ x.flatten(0, -2)


class RoundThrough(torch.autograd.Function):
    """Quantization with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        scale = weight.abs().max() / 7
        return torch.round(weight / scale) * scale

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream


def in_a_loss(m: Any) -> list[Tensor]:
    logits = F.linear(m.encode(ids()), m.head.weight)
    return [F.cross_entropy(logits.flatten(0, 1), ids().flatten())]


def submodule_then_root(m: Any) -> list[Tensor]:
    return [m.trunk[1](data(2, COLUMNS)), m(ids())]


def through_a_cached_reference(m: Any) -> list[Tensor]:
    m.cache = [m.head.weight, m.trunk[0].bias]
    out = m(ids())
    return [out, out @ m.cache[0] + m.cache[1]]


def through_a_reference_cached_before(m: Any) -> list[Tensor]:
    out = m(ids())
    return [out, out @ m.cached_weights[0] + m.cached_weights[1]]


def as_a_regulariser(m: Any) -> list[Tensor]:
    penalty = sum(p.square().sum() for p in m.parameters())
    spread = torch.stack([p.norm() for p in m.parameters()]).max() + torch.cat([m.norm.bias, m.trunk[0].bias]).std()
    product = (m.trunk[1].weight @ m.trunk[0].weight).abs().sum() + m.head.weight[1:4, ::2].logsumexp(1).sum()
    return [m(ids()), penalty, spread, product]


def before_the_first_forward(m: Any) -> list[Tensor]:
    first = F.linear(data(2, COLUMNS), m.trunk[2].weight, m.trunk[2].bias)
    return [first, m.tokens.weight[ids()], m(ids())]


def between_forward_and_backward(m: Any) -> list[Tensor]:
    out = m(ids())
    with torch.no_grad():
        scale = m.head.weight.abs().mean() + m.trunk[0].weight.max()
    return [out * scale, m.trunk[1].weight.sum()]


def after_eval(m: Any) -> list[Tensor]:
    m.eval()
    with torch.no_grad():
        quiet = m(ids())
    m.train()
    return [quiet, F.linear(m.encode(ids()), m.head.weight), m(ids())]


def without_gradients(m: Any) -> list[Tensor]:
    with torch.no_grad():
        first = F.linear(m.encode(ids()), m.head.weight * 2)
    with torch.inference_mode():
        second = F.linear(m.encode(ids()), m.head.weight).clone() + m.norm.weight.sum()
    return [first, second.clone(), m(ids())]


def token_by_token(m: Any) -> list[Tensor]:
    return [m.generate(ids(), 4), m(ids())]


def in_functional_call(m: Any) -> list[Tensor]:
    doubled = {name: p * 2 for name, p in m.named_parameters()}
    return [functional_call(m, dict(m.named_parameters()), (ids(),)), functional_call(m, doubled, (ids(),))]


def in_functional_call_with_full_tensors(m: Any) -> list[Tensor]:
    return [functional_call(m, {n: full(p).detach() for n, p in m.named_parameters()}, (ids(),)), m(ids())]  # type: ignore[union-attr]


def detached(m: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in m.named_parameters()}


def in_func_grad(m: Any) -> list[Tensor]:
    found = grad(lambda p: functional_call(m, p, (ids(),)).square().mean())(detached(m))
    return [full(g) for g in found.values()] + [m(ids())]  # type: ignore[misc]


def in_vmap(m: Any) -> list[Tensor]:
    params = detached(m)
    rows = vmap(lambda row: functional_call(m, params, (row[None],)))(ids())
    each = vmap(grad(lambda p, row: functional_call(m, p, (row[None],)).square().mean()), (None, 0))(params, ids())
    return [rows, *[full(g) for g in each.values()], m(ids())]  # type: ignore[list-item]


def in_jacrev_and_jvp(m: Any) -> list[Tensor]:
    weight = {"head.weight": m.head.weight.detach()}

    def norm(p: Any) -> Tensor:
        return functional_call(m, p, (ids(),)).square().mean((0, 1))

    tangent = {"head.weight": torch.ones(ROWS, COLUMNS)}
    columns = full(jacrev(norm)(weight)["head.weight"])
    curvature = full(quietly(hessian(lambda w: norm({"head.weight": w}).sum()), m.head.weight.detach()))
    return [columns, curvature, quietly(jvp, norm, (weight,), (tangent,))[1], m(ids())]  # type: ignore[list-item]


def in_an_autograd_function(m: Any) -> list[Tensor]:
    x = m.encode(ids())
    return [OwnLinear.apply(x, m.head.weight), F.linear(x, RoundThrough.apply(m.head.weight))]


def in_a_hook(m: Any) -> list[Tensor]:
    hook = m.trunk[0].register_forward_hook(lambda module, args, out: out + m.norm.weight * module.bias)
    out = m(ids())
    hook.remove()
    return [out]


def in_another_models_forward(m: Any) -> list[Tensor]:
    outside = nn.Bilinear(COLUMNS, COLUMNS, 2, bias=False).requires_grad_(False)
    nn.init.ones_(outside.weight)
    return [outside(m.trunk[0].weight, m.trunk[1].weight), m(ids())]


def under_autocast(m: Any) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        out = F.linear(m.encode(ids()), m.head.weight)
    return [out.float()]


def through_a_tie_made_later(m: Any) -> list[Tensor]:
    m.head.weight = m.tokens.weight
    return [m(ids())]


def in_place_in_the_middle(m: Any) -> list[Tensor]:
    first = m(ids()).detach()
    with torch.no_grad():
        m.trunk[1].weight[2].zero_()
        m.head.weight.add_(torch.ones(COLUMNS))
    return [first, m(ids())]


USES: dict[str, Callable[[Any], list[Tensor]]] = {
    "another method": lambda m: [m.encode(ids())],
    "loss": in_a_loss,
    "submodule": lambda m: [m.trunk[1](data(2, COLUMNS))],
    "submodule then root": submodule_then_root,
    "cached reference": through_a_cached_reference,
    "reference cached before": through_a_reference_cached_before,
    "regulariser": as_a_regulariser,
    "regulariser alone": lambda m: [sum(p.abs().sum() for p in m.parameters())],  # type: ignore[list-item]
    "before the first forward": before_the_first_forward,
    "between forward and backward": between_forward_and_backward,
    "after eval": after_eval,
    "no_grad and inference_mode": without_gradients,
    "token by token": token_by_token,
    "functional_call": in_functional_call,
    "functional_call with full tensors": in_functional_call_with_full_tensors,
    "func.grad": in_func_grad,
    "vmap": in_vmap,
    "jacrev, hessian, jvp": in_jacrev_and_jvp,
    "autograd.Function": in_an_autograd_function,
    "forward hook": in_a_hook,
    "another module's input": in_another_models_forward,
    "autocast": under_autocast,
    "tied later": through_a_tie_made_later,
    "after a write": in_place_in_the_middle,
}


def used_as_plain(use: str, units: str) -> None:
    plain, sharded = twins(shard=SHARD[units])
    for _ in range(3):  # from the second time on dshard knows in which order units are used
        results = [USES[use](m) for m in (plain, sharded)]
        for expected, found in zip(*results, strict=True):
            assert not isinstance(found, dshard.ShardedTensor), type(found)
            close(found.detach(), expected.detach(), use)
        for result in results:
            sum(r.square().sum() for r in result if r.requires_grad).backward()  # type: ignore[union-attr]
        same_grads(plain, sharded)
        plain.zero_grad()
        sharded.zero_grad()


@pytest.mark.parametrize("units", SHARD)
@pytest.mark.parametrize("use", USES)
def test_a_parameter_used_outside_of_forward_gives_the_plain_values_and_gradients(worlds: WorldPool, use, units):
    worlds.run(2, used_as_plain, use, units)


def uses_of_three_ranks() -> None:
    for use in USES:
        used_as_plain(use, "blocks")


def test_every_use_is_right_on_three_ranks_with_uneven_shards_too(worlds: WorldPool):
    worlds.run(3, uses_of_three_ranks)


def history_of_a_line() -> list[int]:
    """Calls of the same line ahead of a forward, after it, after a backward and after an eval."""
    plain, sharded = twins(shard=shard_blocks)
    x, calls = data(2, COLUMNS), []
    for step in range(4):
        with dshard.CommTrace() as trace:
            found = F.linear(x, sharded.head.weight)
        calls.append(trace.calls("all_gather", "head"))
        assert torch.equal(found, F.linear(x, plain.head.weight)), step
        out = sharded(ids())
        if step == 1:
            out.sum().backward()
        elif step == 2:
            sharded.eval()(ids())
    return calls


def test_a_line_outside_of_forward_does_the_same_whatever_ran_before(worlds: WorldPool):
    assert worlds.run(2, history_of_a_line) == [[1, 1, 1, 1]] * 2
