"""Activation checkpointing under mixed precision: what is recomputed in backward is a forward, wherever it lies."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dshard
from dshard.testing import WorldPool

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH = 16


class Block(nn.Module):
    """Weights that backward sees through a view (linear) and directly (norm, gain)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.01))
        self.run: Callable[..., Any] = lambda function, x: function(x)

    def body(self, x: Tensor) -> Tensor:
        return self.gain * self.down(nn.functional.silu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.run(self.body, x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(21, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 21, bias=False)
        self.run: Callable[..., Any] = lambda function, x: function(x)

    def stack(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.run(self.stack, self.embed(tokens))))


def save_products() -> Any:
    """Selective checkpointing: products are saved, the rest is computed again."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def saving_on_cpu(function: Callable[..., Any], x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return checkpoint(function, x, use_reentrant=False)


def checkpointed_saving_on_cpu(function: Callable[..., Any], x: Tensor) -> Any:
    def run(y: Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return function(y)

    return checkpoint(run, x, use_reentrant=False)


class Again(torch.autograd.Function):
    """A checkpoint of another library's: its function is kept under a name of its own."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], x: Tensor) -> Any:
        ctx.kept_function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.kept_function(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


RUNS: dict[str, Callable[..., Any]] = {
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "to the end": partial(checkpoint, use_reentrant=False, early_stop=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=save_products),
    "saving on CPU around": saving_on_cpu,
    "saving on CPU inside": checkpointed_saving_on_cpu,
    "of another library": Again.apply,
}
WRAPPERS = {
    "not reentrant": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    "reentrant": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
}


def wrapped(net: Net, kind: str) -> None:
    for i, layer in enumerate(net.layers):
        net.layers[i] = WRAPPERS[kind](layer)


def wrap_then_shard(shard: Any, net: Net, kind: str) -> None:
    wrapped(net, kind)
    for layer in net.layers:
        shard(layer)
    shard(net)


def shard_inside_of_the_wrapper(shard: Any, net: Net, kind: str) -> None:
    wrapped(net, kind)
    for layer in net.layers:
        shard(layer._checkpoint_wrapped_module)
    shard(net)


def shard_then_wrap(shard: Any, net: Net, kind: str) -> None:
    for layer in net.layers:
        shard(layer)
    wrapped(net, kind)
    shard(net)


def root_alone_wrapped_before(shard: Any, net: Net, kind: str) -> None:
    wrapped(net, kind)
    shard(net)


def root_alone_wrapped_after(shard: Any, net: Net, kind: str) -> None:
    shard(net)
    wrapped(net, kind)


def inside_of_blocks(shard: Any, net: Net, kind: str) -> None:
    for layer in net.layers:
        layer.run = RUNS[kind]
        shard(layer)
    shard(net)


def inside_of_blocks_root_alone(shard: Any, net: Net, kind: str) -> None:
    for layer in net.layers:
        layer.run = RUNS[kind]
    shard(net)


def nested(shard: Any, net: Net, kind: str) -> None:
    """Regions in a region, none of them a module that was sharded; torch warns of reentrant ones inside."""
    net.run = RUNS[kind]
    wrapped(net, "not reentrant")
    for layer in net.layers:
        layer._checkpoint_wrapped_module.run = RUNS["not reentrant" if kind == "reentrant" else kind]
    shard(net)


def train(net: Any, *, num_batches: int = 1, penalty: bool = False, context: Any = None) -> list[float]:
    params = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    losses = []
    for step in range(3):
        for batch in range(num_batches):
            net.set_requires_gradient_sync(batch == num_batches - 1)
            seed = 100 * step + 10 * batch + dist.get_rank()
            tokens = torch.randint(21, (2, 6), generator=torch.Generator().manual_seed(seed))
            with context() if context is not None else torch.enable_grad():
                loss = nn.functional.cross_entropy(net(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())
            if penalty:
                loss = loss + 1e-3 * sum(p.square().sum().cpu() for p in params if isinstance(p, dshard.ShardedTensor))
            (loss / num_batches).backward()
            losses.append(loss.item())
        dshard.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def beside_fsdp2(how: Any, kind: str, num_batches: int = 1, context: Any = None, freezes: str = "") -> Any:
    """Losses, and names of parameters that differ in the end."""
    losses, values = [], []
    for call in (torch_fully_shard, dshard.fully_shard):
        net = make()
        for name, param in net.named_parameters():
            param.requires_grad_(not freezes or freezes not in name)
        how(partial(call, mp_policy=POLICY), net, kind)
        losses.append(train(net, num_batches=num_batches, context=context))
        values.append([(name, p.full_tensor()) for name, p in net.named_parameters()])
    differing = [name for (name, a), (_, b) in zip(*values, strict=True) if not torch.equal(a, b)]
    return (losses[0] == losses[1] or losses), differing


WRAPPED = [
    wrap_then_shard,
    shard_inside_of_the_wrapper,
    shard_then_wrap,
    root_alone_wrapped_before,
    root_alone_wrapped_after,
]
INSIDE = [inside_of_blocks, inside_of_blocks_root_alone, nested]


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("how", WRAPPED, ids=lambda how: how.__name__)
def test_any_order_of_wrapping_and_sharding_trains_as_under_fsdp2(worlds: WorldPool, how, kind):
    assert worlds.run(2, beside_fsdp2, how, kind) == [(True, [])] * 2


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("how", INSIDE, ids=lambda how: how.__name__)
def test_regions_within_a_forward_train_as_under_fsdp2(worlds: WorldPool, how, kind):
    assert worlds.run(2, beside_fsdp2, how, kind) == [(True, [])] * 2


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("how", [wrap_then_shard, inside_of_blocks_root_alone], ids=lambda how: how.__name__)
@pytest.mark.parametrize(
    "options",
    [{"num_batches": 2}, {"context": autocast}, {"freezes": "up"}, {"freezes": "layers.0"}],
    ids=["num_batches", "context", "freezes up", "freezes layers.0"],
)
def test_regions_beside_accumulation_autocast_and_frozen_parts(worlds: WorldPool, how, kind, options):
    assert worlds.run(2, partial(beside_fsdp2, how, kind, **options)) == [(True, [])] * 2


def strategies_differ(strategy: Any, num_ranks: int) -> Any:
    """A strategy changes no bit of what checkpointed regions compute, beside a penalty on the exact weights."""
    results = []
    for checkpoints in (True, False):
        net = make()
        for layer in net.layers if checkpoints else ():
            layer.run = RUNS["not reentrant"]
        dshard.fully_shard(net, mp_policy=POLICY, strategy=strategy)
        results.append(train(net, num_batches=2, penalty=True))
    return results[0] == results[1] or results


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "keep", "full", "hybrid(2)", "split(2)"])
def test_regions_change_no_loss_under_any_strategy(worlds: WorldPool, strategy):
    num_ranks = 4 if strategy == "hybrid(2)" else 2
    slices = {"*.weight": strategy, "*": "full"} if strategy == "split(2)" else strategy
    slices = {"layers.*.up.weight": "split(2)", "*": "full"} if strategy == "split(2)" else slices
    assert worlds.run(num_ranks, strategies_differ, slices, num_ranks) == [True] * num_ranks


def hsdp(how: Any, kind: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    losses = []
    for call in (torch_fully_shard, dshard.fully_shard):
        net = make()
        how(partial(call, mp_policy=POLICY, mesh=mesh), net, kind)
        losses.append(train(net))
    return losses[0] == losses[1] or losses


def test_regions_over_replicas_train_as_under_fsdp2(worlds: WorldPool):
    assert worlds.run(4, hsdp, wrap_then_shard, "not reentrant") == [True] * 4


class Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.run: Callable[..., Any] = lambda function, x: function(x)

    def scale(self, x: Tensor) -> Tensor:
        return x * self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.scale, x)


def regions_around_and_within(kind: str) -> list[str]:
    """One region in the forward, one around the model, one beside it: each is recomputed as what it was."""
    run, wrong = RUNS[kind], []
    exact = torch.linspace(0.5, 1.5, WIDTH)
    rounded = exact.bfloat16()
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()), requires_grad=True)

    def expected(within: bool, outside: bool) -> Tensor:
        total = torch.zeros_like(x)
        if within:
            total += (2 * rounded.float() * (x.bfloat16() * rounded).float()).bfloat16().float()
        if outside:
            total += 2 * x * exact * exact
        return total

    for within, outside in ((True, False), (False, True), (True, True)):
        net = Scaled(WIDTH)
        net.run = run
        dshard.fully_shard(net, mp_policy=POLICY)

        def penalty(value: Tensor, net: nn.Module = net) -> Tensor:
            return (value * net.weight).float().square().sum()

        def around(value: Tensor, net: nn.Module = net, within: bool = within, outside: bool = outside) -> Tensor:
            loss = net(value).float().square().sum() if within else torch.zeros(())
            return loss + penalty(value) if outside else loss

        for label, step in (("beside", around), ("around", lambda value, around=around: run(around, value))):
            x.grad = None
            if label == "around" and kind == "reentrant":  # torch warns of one inside of another
                net.run = lambda function, value: function(value)
            step(x).backward()
            if not torch.allclose(x.grad, expected(within, outside), rtol=2e-2, atol=1e-6):
                wrong.append(f"{label} {within} {outside}: {x.grad - expected(within, outside)}")
            if not within and not torch.equal(x.grad, expected(within, outside)):
                wrong.append(f"{label}: exact use is not exact")
    return wrong


@pytest.mark.parametrize("kind", ["not reentrant", "reentrant", "to the end"])
def test_what_is_recomputed_has_the_dtypes_that_it_had(worlds: WorldPool, kind):
    assert worlds.run(2, regions_around_and_within, kind) == [[], []]


def reductions_of_nested_backwards(reentrant: bool) -> tuple[int, list[Tensor]]:
    """Reductions of two micro-batches, of which the first is added up, and the gradients."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)], nn.Linear(8, 4))
    policy = dshard.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for layer in model:
        dshard.fully_shard(layer, mp_policy=policy)
    dshard.fully_shard(model, mp_policy=policy)
    with dshard.CommTrace() as trace:
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(micro + 2 * dist.get_rank())).requires_grad_()
            for layer in model[:-1]:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            model[-1](x).float().square().mean().backward()
    return trace.calls("reduce_scatter"), [p.grad.full_tensor() for p in model.parameters()]


def test_a_backward_within_a_backward_reduces_nothing_early(worlds: WorldPool):
    for (calls, grads), (_, same) in zip(
        worlds.run(2, reductions_of_nested_backwards, True),
        worlds.run(2, reductions_of_nested_backwards, False),
        strict=True,
    ):
        assert calls == 4
        assert all(map(torch.equal, grads, same))
