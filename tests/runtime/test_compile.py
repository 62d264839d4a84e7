"""torch.compile of sharded models: the same numbers, gathers in the graph, full weights never saved, clear refusals."""

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import dshard
from dshard.runtime.runtime import gather
from dshard.tensor.traced import TracedGather
from dshard.testing import WorldPool
from tests.models import LanguageModel, ResidualMlp

WIDTH = 16
COMPILED = {"backend": "aot_eager", "fullgraph": True}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BF16_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
TIMEOUT_S = 240.0  # a compiler on a busy machine


class Doubled(nn.Linear):
    """With a method that is compiled, of which the forward is one use."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.double = torch.compile(lambda x: 2 * (x.to(torch.bfloat16) @ self.weight.bfloat16().t()), **COMPILED)

    def forward(self, x: Tensor) -> Tensor:
        return self.double(x)


class Net(LanguageModel):
    def __init__(self, width: int = WIDTH, *, checkpoints: str = "") -> None:
        super().__init__(lambda: ResidualMlp(width, 3 * width), width, checkpoints=checkpoints)

    def generate(self) -> None:
        """That there is one has the module marked for transformers; dynamo must not take the mark for FSDP1's."""


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    return Net(**options)


def shard(net: Any, **options: Any) -> Any:
    for layer in net.layers:
        dshard.fully_shard(layer, **options)
    return dshard.fully_shard(net, **options)


def batch(step: int, num_rows: int = 2) -> Tensor:
    return torch.randint(21, (num_rows, 6), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def inputs(num_rows: int = 4) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def loss_of(net: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())


def train(call: Callable[[Tensor], Tensor], net: nn.Module, num_steps: int = 5) -> tuple[list[float], dshard.CommTrace]:
    """The losses of some steps, and what the last one communicated."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(num_steps):
        with dshard.CommTrace() as trace:
            loss = loss_of(call, batch(step))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, trace


def fresh() -> None:
    """Nothing is compiled yet, and dynamo's own warnings are no errors."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def num_graphs() -> int:
    assert not torch._dynamo.utils.counters["graph_break"]
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def differences(net: nn.Module, other: nn.Module) -> list[str]:
    pairs = zip(net.named_parameters(), other.parameters(), strict=True)
    return [name for (name, a), b in pairs if not torch.equal(a.full_tensor(), b.full_tensor())]


def compiled_net(order: str, **options: Any) -> tuple[Callable[[Tensor], Tensor], Any]:
    """A net that is sharded and compiled: what to call, and the net."""
    net = make()
    if order == "blocks, then shard":
        for layer in net.layers:
            layer.compile(**COMPILED)
    elif order == "wrapped blocks, then shard":
        net.layers = nn.ModuleList(torch.compile(layer, **COMPILED) for layer in net.layers)
    elif order == "model, then shard":
        net.compile(**COMPILED)
    shard(net, **options)
    if order == "shard, then blocks":
        for layer in net.layers:
            layer.compile(**COMPILED)
    elif order == "shard, then model":
        net.compile(**COMPILED)
    return (torch.compile(net, **COMPILED) if order == "shard, then torch.compile" else net), net


PRECISIONS: dict[str, tuple[dict[str, Any], int]] = {  # and how many buckets a unit has
    "as kept": ({}, 1),
    "bf16": ({"mp_policy": BF16}, 1),
    "bf16, reduced in fp32, norms in fp32": ({"mp_policy": {"*norm*": torch.float32, "*": BF16_FP32}}, 2),
}


def on_the_wire(trace: dshard.CommTrace) -> list[tuple[str, int]]:
    return [(record.kind, record.payload_bytes) for record in trace.records]


def beside_eager(order: str, options: dict[str, Any]) -> tuple[list[str], int, list[Any], list[Any]]:
    fresh()
    expected_net = shard(make(), **options)
    expected, eager_trace = train(expected_net, expected_net)
    call, net = compiled_net(order, **options)
    losses, trace = train(call, net)
    wrong = differences(expected_net, net) + ([] if losses == expected else [f"losses {losses}, not {expected}"])
    return wrong, num_graphs(), on_the_wire(trace), on_the_wire(eager_trace)


@pytest.mark.parametrize(
    "order",
    [
        "blocks, then shard",
        "shard, then blocks",
        "wrapped blocks, then shard",
        "model, then shard",
        "shard, then model",
        "shard, then torch.compile",
    ],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_is_that_of_eager_bit_for_bit_in_one_graph(worlds: WorldPool, order, precision):
    options, num_buckets = PRECISIONS[precision]
    for wrong, graphs, trace, eager_trace in worlds.run(2, beside_eager, order, options, timeout_s=TIMEOUT_S):
        assert wrong == []
        assert graphs == 1  # for all blocks the same one
        assert trace == eager_trace  # so much for gathers in the compute dtype, and gradients in that of the reduction
        assert [kind for kind, _ in trace].count("all_gather") == num_buckets * 5


@pytest.mark.parametrize("order", ["blocks, then shard", "shard, then model"])
def test_what_is_kept_between_forward_and_backward_is_gathered_once(worlds: WorldPool, order):
    options = {"reshard_after_forward": False}
    for wrong, _, trace, eager_trace in worlds.run(2, beside_eager, order, options, timeout_s=TIMEOUT_S):
        assert (wrong, trace) == ([], eager_trace)
        assert [kind for kind, _ in trace].count("all_gather") == 3


def through_inductor() -> bool:
    fresh()
    import torch._inductor.config as settings

    net, other = (dshard.fully_shard(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())) for _ in range(2))
    other.load_state_dict(net.state_dict())
    with settings.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):  # to compile less C++
        other.compile(fullgraph=True)
        losses: list[list[float]] = []
        for model in (net, other):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses.append([])
            for _ in range(5):
                loss = model(inputs()).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(loss.item())
    assert num_graphs() == 1
    return bool(torch.allclose(*map(torch.tensor, losses), rtol=1e-5, atol=1e-6))


def test_losses_through_inductor_are_those_of_eager(worlds: WorldPool):
    assert worlds.run(2, through_inductor, timeout_s=2 * TIMEOUT_S) == [True, True]


def copies_in_inductor() -> tuple[list[bool], list[bool]]:
    fresh()
    import torch._inductor.config as settings

    layer = dshard.fully_shard(nn.Linear(WIDTH, 8), reshard_after_forward=False)
    x = inputs()
    layer(x)  # gathered from here on, until backward
    before = [(p + 0).detach() for p in layer.parameters()]
    owned: list[bool] = []

    def note(*args: Any) -> Tensor:
        owned.append(args[-1])
        return gather(*args)

    def reads(x: Tensor, like: Tensor) -> tuple[Tensor, ...]:
        return torch.relu(layer.weight * like) + 1, x @ layer.weight.t() + layer.bias  # could be computed in place

    def writes(x: Tensor) -> tuple[Tensor, ...]:
        changed = layer.weight.clone()
        changed[1] = x[0]
        return changed, layer.bias.clone(), layer.bias.view(2, 4) + 0

    TracedGather.run = staticmethod(note)
    changes = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False, "force_disable_caches": True}
    with settings.patch(changes), torch.no_grad():
        outs = [
            *torch.compile(reads, fullgraph=True)(x, torch.ones(8, WIDTH)),
            *torch.compile(writes, fullgraph=True)(x),
        ]
    TracedGather.run = staticmethod(gather)
    expected = [*reads(x, torch.ones(8, WIDTH)), *writes(x)]
    same = [torch.allclose(*pair) for pair in zip(outs, expected, strict=True)]
    for out in outs:
        out.zero_()  # is the caller's own
    return same + [torch.equal(p + 0, b) for p, b in zip(layer.parameters(), before, strict=True)], owned


def test_inductor_copies_what_a_graph_writes_to_or_gives_out_and_nothing_else(worlds: WorldPool):
    for same, owned in worlds.run(2, copies_in_inductor, timeout_s=2 * TIMEOUT_S):
        assert all(same)
        assert owned == [False, False, False, True]  # what a graph writes to a part of it has copied itself


def saved_shapes(options: dict[str, Any]) -> tuple[set[tuple[int, ...]], int, list[tuple[str, int]]]:
    fresh()
    block = dshard.fully_shard(ResidualMlp(WIDTH, 3 * WIDTH), **options)
    block.compile(**COMPILED)
    saved: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        dshard.CommTrace() as trace,
    ):
        block(inputs().requires_grad_()).sum().backward()
    shards = {p.to_local().untyped_storage().data_ptr() for p in block.parameters()}
    activations = sum(t.numel() * t.itemsize for t in saved if t.untyped_storage().data_ptr() not in shards)
    return {tuple(t.shape) for t in saved}, activations, on_the_wire(trace)


@pytest.mark.parametrize(("options", "itemsize"), [({}, 4), ({"mp_policy": BF16_FP32}, 2)], ids=["as kept", "bf16"])
def test_backward_gathers_again_and_no_full_weight_is_saved(worlds: WorldPool, options, itemsize):
    num_weights = sum(p.numel() for p in ResidualMlp(WIDTH, 3 * WIDTH).parameters())
    for shapes, activation_bytes, on_wire in worlds.run(2, saved_shapes, options, timeout_s=TIMEOUT_S):
        assert not shapes & {(WIDTH, 3 * WIDTH), (3 * WIDTH, WIDTH)}  # nor a transpose of one
        # The inputs of norm and of both layers; and the norm's two statistics, in fp32.
        assert activation_bytes <= 4 * (itemsize * (2 * WIDTH + 2 * 3 * WIDTH) + 4 * 2)
        gathers = [num_bytes for kind, num_bytes in on_wire if kind == "all_gather"]
        assert len(gathers) == 4  # of two units
        assert sum(gathers) == 2 * num_weights // 2 * itemsize
        assert sum(num_bytes for kind, num_bytes in on_wire if kind == "reduce_scatter") == num_weights // 2 * 4


def evaluated(scope: Callable[[], AbstractContextManager[Any]]) -> list[bool]:
    fresh()
    net, other = shard(make()), shard(make())
    other.compile(**COMPILED)
    same = []
    for step in range(2):
        with scope():
            same.append(torch.equal(net(batch(step)), other(batch(step))))
        with torch.no_grad():
            for p, q in zip(net.parameters(), other.parameters(), strict=True):
                p.mul_(1.5)
                q.mul_(1.5)
    return [*same, num_graphs() == 1]


@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
def test_evaluation_sees_the_last_write(worlds: WorldPool, scope):
    assert worlds.run(2, evaluated, scope, timeout_s=TIMEOUT_S) == [[True] * 3] * 2


def with_other_batches() -> tuple[list[bool], int]:
    fresh()
    block = dshard.fully_shard(ResidualMlp(WIDTH, 3 * WIDTH))
    other = copy.deepcopy(block)
    block.compile(**COMPILED)
    assert copy.deepcopy(block)._compiled_call_impl is None  # it would call this block's
    same = []
    for num_rows in (2, 3, 4, 5, 6):
        outs = [b(inputs(num_rows)) for b in (block, other)]
        for out in outs:
            out.sum().backward()
        same.append(torch.equal(*outs))
    same += [
        torch.allclose(p.grad.full_tensor(), q.grad.full_tensor())
        for p, q in zip(block.parameters(), other.parameters(), strict=True)
    ]
    return same, num_graphs()


def test_other_batch_sizes_take_one_more_graph(worlds: WorldPool):
    for same, graphs in worlds.run(2, with_other_batches, timeout_s=TIMEOUT_S):
        assert all(same)
        assert graphs == 2  # one for the first size, one for every size


def tied(net: Any, **options: Any) -> Any:
    net.head.weight = net.embed.weight
    return shard(net, **options)


def output_in(dtype: torch.dtype, net: Any) -> Any:
    for layer in net.layers:
        dshard.fully_shard(layer, mp_policy=BF16)
    return dshard.fully_shard(net, mp_policy=replace(BF16_FP32, output_dtype=dtype))


def frozen(net: Any) -> Any:
    net.layers[1].requires_grad_(requires_grad=False)
    return shard(net)


def uneven(net: Any) -> Any:
    return dshard.fully_shard(net, shard_placement_fn=lambda p: Shard(p.dim() - 1))


def over(shape: tuple[int, int]) -> Callable[[Any], Any]:
    return lambda net, **options: shard(
        net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")), **options
    )


MODELS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "tied": ({}, tied),
    "frozen": ({}, frozen),
    "uneven": ({"width": 7}, uneven),
    "checkpointed": ({"checkpoints": "not reentrant"}, shard),
    "units of the first use": ({"width": 32}, dshard.fully_shard),
    "replicas": ({}, over((2, 1))),
    "bf16 gradients": ({}, lambda net: shard(net, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))),
    "bf16, units of the first use": ({"width": 32}, lambda net: dshard.fully_shard(net, mp_policy=BF16)),
    "bf16, tied": ({}, lambda net: tied(net, mp_policy=BF16)),
    "bf16, checkpointed": ({"checkpoints": "not reentrant"}, lambda net: shard(net, mp_policy=BF16)),
    "bf16, replicas": ({}, lambda net: over((2, 1))(net, mp_policy=BF16)),
    "output in fp32": ({}, lambda net: output_in(torch.float32, net)),
    "inputs as they come": ({}, lambda net: shard(net, mp_policy=replace(BF16, cast_forward_inputs=False))),
}


def model_beside_eager(name: str) -> list[str]:
    fresh()
    options, change = MODELS[name]
    nets = [change(make(**options)) for _ in range(4)]
    nets[1].compile(**COMPILED)
    for layer in nets[3].layers:
        layer.compile(**COMPILED)
    calls = [nets[0], nets[1], torch.compile(nets[2], **COMPILED), nets[3]]
    losses = [train(call, net, 2)[0] for call, net in zip(calls, nets, strict=True)]
    assert losses[0] == losses[1] == losses[2] == losses[3], losses
    return [name for net in nets[1:] for name in differences(nets[0], net)]


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_trains_as_in_eager(worlds: WorldPool, name):
    assert worlds.run(2, model_beside_eager, name, timeout_s=TIMEOUT_S) == [[], []]


def taken_by_graphs(order: str) -> list[list[str]]:
    """The kinds of what the graph of a block takes in, for each time that it is made, in training and evaluation."""
    fresh()
    found: list[list[str]] = []

    def backend(graph: Any, given: list[Any]) -> Any:
        found.append([type(x).__name__ for x in given if getattr(x, "dim", int)() and x.shape[-1] != 6])
        return torch._dynamo.backends.debugging.aot_eager(graph, given)

    net = make()
    for i, layer in enumerate(net.layers):
        if order == "wrapped":
            net.layers[i] = dshard.fully_shard(torch.compile(layer, backend=backend, fullgraph=True), mp_policy=BF16)
        else:
            dshard.fully_shard(layer, mp_policy=BF16).compile(backend=backend, fullgraph=True)
    dshard.fully_shard(net, mp_policy=BF16)
    train(net, net, 3)
    with torch.no_grad():
        net(batch(0))
        net(batch(1))
    return found


@pytest.mark.parametrize("order", ["wrapped", "in place"])
def test_graphs_of_a_block_take_full_tensors_from_the_first_step_on(worlds: WorldPool, order):
    for found in worlds.run(2, taken_by_graphs, order, timeout_s=TIMEOUT_S):
        assert len(found) == 2  # with gradients and without
        assert all("ShardedTensor" not in kind for kinds in found for kind in kinds), found
        assert all(len(kinds) > 4 for kinds in found)


class Gated(nn.Linear):
    """An eager module that gives its parameters to a function that is compiled."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(x, self.weight, self.bias)


def gated(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x @ weight.t() + bias).tanh() * bias


def given_to_functions(options: dict[str, Any]) -> tuple[bool, int]:
    fresh()
    losses = []
    for function in (gated, torch.compile(gated, **COMPILED)):
        torch.manual_seed(0)
        net = nn.Sequential(Gated(function), Gated(function))
        for part in net:
            dshard.fully_shard(part, **options)
        dshard.fully_shard(net, **options)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(5):
            loss = net(inputs()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    return losses[0] == losses[1], num_graphs()


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16_FP32}], ids=["as kept", "bf16"])
def test_an_eager_forward_may_give_its_parameters_to_a_compiled_function(worlds: WorldPool, options):
    for is_same, graphs in worlds.run(2, given_to_functions, options, timeout_s=TIMEOUT_S):
        assert is_same
        assert (
            graphs == 4
        )  # of shards in the first step and of full tensors, of each with an input that is trained or not


def step_with_its_backward() -> tuple[list[float], list[float]]:
    """The losses of steps whose forward and backward are in one function, in eager and compiled."""
    fresh()
    losses: list[list[float]] = []
    for is_compiled in (False, True):
        net = shard(make())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(tokens: Tensor, net: Any = net) -> Tensor:
            loss = loss_of(net, tokens)
            loss.backward()
            return loss

        run = torch.compile(step, backend="aot_eager") if is_compiled else step
        losses.append([])
        for number in range(3):
            losses[-1].append(run(batch(number)).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses[0], losses[1]


def test_a_backward_within_a_compiled_function_is_not_looked_at_by_dynamo(worlds: WorldPool):
    for eager, compiled in worlds.run(2, step_with_its_backward, timeout_s=TIMEOUT_S):
        assert eager == compiled


class Writing(nn.Linear):
    """Writes to a parameter in its forward, in one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                self.bias.mul_(0.5)
        elif self.how == "data":
            self.bias.data.mul_(0.5)
        else:
            self.bias.data = self.bias.data * 0.5
        return super().forward(x)


def written_in_a_graph(how: str) -> str:
    fresh()
    net = nn.Sequential(Writing(how), nn.Tanh())
    net[0].compile(backend="aot_eager")
    dshard.fully_shard(net[0])
    dshard.fully_shard(net)
    try:
        net(inputs()).sum().backward()
    except dshard.StateError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("how", ["no_grad", "data", "set data"])
def test_a_compiled_module_that_writes_to_its_parameters_is_told(worlds: WorldPool, how):
    for text in worlds.run(2, written_in_a_graph, how, timeout_s=TIMEOUT_S):
        assert text.startswith("0.bias: a module that is compiled must not write to its parameters"), text


def accumulated(options: dict[str, Any], *, is_compiled: bool, syncs: bool) -> list[Tensor]:
    net = shard(make(), **options)
    if is_compiled:
        net.compile(**COMPILED)
    for step in range(3):
        net.set_requires_gradient_sync(syncs or step == 2)
        loss_of(net, batch(step, num_rows=2 + step)).backward()  # another size: traced again, with gradients there
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())
    return [p.grad.full_tensor() for p in net.parameters()]


def accumulates_as_eager(options: dict[str, Any], *, syncs: bool) -> bool:
    fresh()
    pairs = zip(*(accumulated(options, is_compiled=c, syncs=syncs) for c in (False, True)), strict=True)
    return all(torch.equal(a, b) for a, b in pairs) and num_graphs() == 2


@pytest.mark.parametrize("syncs", [False, True])
@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16_FP32}], ids=["as kept", "bf16"])
def test_micro_batches_add_up_as_in_eager(worlds: WorldPool, options, syncs):
    assert worlds.run(2, accumulates_as_eager, options, syncs=syncs, timeout_s=TIMEOUT_S) == [True, True]


def in_a_function() -> list[bool]:
    """Views, casts, reductions, copies: autograd and values as without the compiler."""
    fresh()
    layer = dshard.fully_shard(nn.Linear(4, 4))

    def loss(x: Tensor) -> Tensor:
        w = layer.weight
        parts = [(x @ w.t()).sum(), w.norm(), (w * w).sum(), w[1:3].sum(), w.view(-1)[:5].mean(), w.double().sum()]
        return torch.stack([*parts, w.clone().sum(), torch.zeros_like(w).sum(), w.split(2)[0].sum()]).float().sum()

    found = []
    for call in (loss, torch.compile(loss, **COMPILED)):
        value = call(torch.ones(2, 4))
        found.append((value, torch.autograd.grad(value, layer.weight)[0].full_tensor()))
    assert torch.compile(lambda x: layer.weight, **COMPILED)(torch.ones(1)) is layer.weight
    alias = torch.compile(lambda x: layer.weight.detach(), **COMPILED)(torch.ones(1))
    return [torch.allclose(*pair) for pair in zip(*found, strict=True)] + [
        torch.equal(alias.full_tensor(), layer.weight.full_tensor())
    ]


def test_a_compiled_function_uses_parameters_as_an_eager_one_does(worlds: WorldPool):
    assert worlds.run(2, in_a_function, timeout_s=TIMEOUT_S) == [[True] * 3] * 2


def a_function_that_calls_a_mixed_model() -> None:
    net = shard(make(), mp_policy=BF16)
    torch.compile(lambda tokens: net(tokens), **COMPILED)(batch(0))


def a_graph_of_another_place() -> None:
    layer = dshard.fully_shard(Doubled(), mp_policy=BF16)
    layer(torch.ones(2, WIDTH))
    layer.double(torch.ones(2, WIDTH, dtype=torch.bfloat16))


def a_detached_mixed_parameter_out() -> None:
    layer = dshard.fully_shard(Doubled(), mp_policy=BF16)
    layer.double = torch.compile(lambda x: layer.weight.detach(), **COMPILED)
    layer(torch.ones(2, WIDTH))


def a_write() -> None:
    layer = dshard.fully_shard(nn.Linear(4, 4))

    def double(x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.mul(x, 2, out=layer.weight)
        return x

    before = layer.weight.full_tensor()
    try:
        torch.compile(double, **COMPILED)(torch.ones(4, 4))
    finally:
        assert torch.equal(before, layer.weight.full_tensor())


def a_view_in() -> None:
    view = dshard.fully_shard(nn.Linear(4, 4)).weight.t()
    torch.compile(lambda x, v: x @ v, **COMPILED)(torch.ones(2, 4), view)


def a_view_out() -> None:
    layer = dshard.fully_shard(nn.Linear(4, 4))
    torch.compile(lambda x: layer.weight.t(), **COMPILED)(torch.ones(2))


def new_parameters() -> None:
    net = shard(make())
    call = torch.compile(lambda tokens: net(tokens), **COMPILED)
    call(batch(0)).sum().backward()
    net.extra = nn.Linear(3, 3)
    call(batch(0))


def broadcast_buffers() -> None:
    net = make()
    net.register_buffer("scale", torch.zeros(2))
    dshard.fully_shard(net, buffers="broadcast")
    torch.compile(lambda tokens: net(tokens), **COMPILED)(batch(0))


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    layer = parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
    dshard.fully_shard(layer, mesh=mesh["dp"]).compile(**COMPILED)
    layer(torch.ones(2, 4))


def an_export() -> None:
    torch.export.export(shard(make()), (batch(0),))


REFUSED: list[tuple[Callable[[], None], str]] = [
    (a_function_that_calls_a_mixed_model, r"weight: under mixed precision .* of a function that calls the model .*"),
    (
        a_graph_of_another_place,
        r"weight: .* traced with torch.bfloat16, and the parameter is torch.float32 here\. Compile",
    ),
    (
        a_detached_mixed_parameter_out,
        r"gives out sharded tensors in the dtype that they are kept in, .* full_tensor\(\)",
    ),
    (a_write, r"torch\.compile: a compiled graph cannot run aten\.mul\.out on a sharded tensor .* outside of the"),
    (
        a_view_in,
        r"weight: a compiled graph takes in and gives out sharded tensors, .* Make the view within the compiled",
    ),
    (a_view_out, r"a compiled graph takes in and gives out sharded tensors, .* or give out full_tensor\(\)\."),
    (new_parameters, r"runs the model's start within the graph, .* Compile it in place, by model\.compile\(\),"),
    (broadcast_buffers, r"runs the model's start within the graph, .* Compile it in place, by model\.compile\(\),"),
    (tensor_parallel, r"weight: torch\.compile does not take parameters that are cut over another mesh too"),
    (
        an_export,
        r"torch\.export: a sharded model cannot be exported, .* Export a copy of the model that is not sharded",
    ),
]


def refusal_of(number: int) -> str:
    fresh()
    try:
        REFUSED[number][0]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[f.__name__ for f, _ in REFUSED])
def test_what_a_graph_cannot_do_is_refused_and_the_way_out_named(worlds: WorldPool, number):
    for text in worlds.run(2, refusal_of, number, timeout_s=TIMEOUT_S):
        assert "UnsupportedOpError" in text or "StateError" in text
        assert re.search(REFUSED[number][1], text), text


def takes_in_late(order: str) -> list[bool]:
    fresh()
    call, net = compiled_net(order)
    call(batch(0)).sum().backward()
    net.extra = nn.Linear(3, 3)
    call(batch(0)).sum().backward()
    return [isinstance(net.extra.weight, dshard.ShardedTensor)]


@pytest.mark.parametrize("order", ["shard, then model", "shard, then torch.compile"])
def test_a_compiled_model_takes_in_parameters_that_come_late(worlds: WorldPool, order):
    assert worlds.run(2, takes_in_late, order, timeout_s=TIMEOUT_S) == [[True]] * 2


def dtypes_in_a_graph() -> list[torch.dtype]:
    fresh()
    layer = dshard.fully_shard(Doubled(), mp_policy=BF16)
    found = []

    def note(x: Tensor) -> Tensor:
        found.append(layer.weight.dtype)
        return (x.to(layer.weight.dtype) @ layer.weight.t()).sum() + layer.weight.float().sum()

    layer.double = torch.compile(note, **COMPILED)
    layer(torch.ones(2, WIDTH, dtype=torch.float64)).backward()
    outside = torch.compile(lambda: (layer.weight * 2).sum(), **COMPILED)()
    assert outside.equal((layer.weight * 2).sum())
    return [*found, outside.dtype, layer.weight.grad.dtype]


def test_a_parameter_has_its_compute_dtype_in_the_graph_of_a_forward_alone(worlds: WorldPool):
    expected = [torch.bfloat16, torch.float32, torch.float32]
    assert worlds.run(2, dtypes_in_a_graph, timeout_s=TIMEOUT_S) == [expected] * 2


def a_copy_by_pickle() -> list[bool]:
    fresh()
    block = dshard.fully_shard(ResidualMlp(WIDTH, 3 * WIDTH), mp_policy=BF16)
    block.compile(**COMPILED)
    out = block(inputs())
    copied = pickle.loads(pickle.dumps(block))
    return [copied._compiled_call_impl is None, torch.equal(copied(inputs()), out)]


def test_copies_of_a_compiled_block_are_not_compiled(worlds: WorldPool):
    assert worlds.run(2, a_copy_by_pickle, timeout_s=TIMEOUT_S) == [[True, True]] * 2


def a_pickled_copy_over_named_dims() -> bool:
    """Its mesh is one of dims that count as one, of whose group torch's registry of an unpickled mesh has forgotten."""
    fresh()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dims = DataParallelMeshDims(shard=("a", "b"))
    block = dshard.fully_shard(ResidualMlp(WIDTH, 3 * WIDTH), mesh=mesh, dp_mesh_dims=dims)
    copied = pickle.loads(pickle.dumps(block))
    copied.compile(**COMPILED)
    return torch.equal(copied(inputs()), block(inputs()))


def test_a_copy_by_pickle_over_several_dims_can_be_compiled(worlds: WorldPool):
    assert worlds.run(4, a_pickled_copy_over_named_dims, timeout_s=TIMEOUT_S) == [True] * 4


def writes_in_a_graph() -> list[bool]:
    """The result of a function and the parameters that it wrote to, against the same function of a plain layer."""
    fresh()
    torch.manual_seed(0)
    plain = nn.Linear(6, 6)
    layer = dshard.fully_shard(copy.deepcopy(plain))

    def change(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.no_grad():
            weight.mul_(2).add_(bias.sum())
            weight[1:3].sub_(x[1:3])
            weight.t().cumsum_(0)
            torch._foreach_add_([weight, bias], 3.0)
            torch._foreach_mul_([weight[0], bias], 2.0)
        doubled = weight.detach() * 2
        return doubled.add_(x).sum() + doubled.to(torch.float64).sum()

    x = torch.arange(36.0).view(6, 6)
    compiled = torch.compile(lambda x: change(x, layer.weight, layer.bias), **COMPILED)
    same = [torch.allclose(compiled(x), change(x, plain.weight, plain.bias))]
    return same + [torch.allclose(layer.get_parameter(n).full_tensor(), p) for n, p in plain.named_parameters()]


def test_a_graph_writes_to_parameters_their_views_and_lists_of_them_as_eager_does(worlds: WorldPool):
    assert worlds.run(2, writes_in_a_graph, timeout_s=TIMEOUT_S) == [[True] * 3] * 2
