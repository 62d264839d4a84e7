"""`torch.compile` around what people compile beside models: steps, clipping, averages, losses with gradients there."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dshard
from dshard.testing import WorldPool, expect_error

BACKEND = "aot_eager"


class Lion(torch.optim.Optimizer):
    """Elementwise, and no optimizer of torch's own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                update = state["momentum"].lerp(param.grad, 0.1).sign()
                param.mul_(1 - group["lr"] * 0.1).add_(update, alpha=-group["lr"])
                state["momentum"].lerp_(param.grad, 0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, 0.01),
    "AdamW for-loop": lambda params: torch.optim.AdamW(params, 0.01, foreach=False),
    "AdamW fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
    "Adam amsgrad": lambda params: torch.optim.Adam(params, 0.01, amsgrad=True),
    "Muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], 0.01),
    "Lion": lambda params: Lion(params, 0.01),
}


def net(kind: str = "dshard") -> Any:
    torch._dynamo.reset()
    warnings.simplefilter("ignore")  # of dynamo's own
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 7))
    if kind == "FSDP2":
        torch_fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif kind == "dshard":
        dshard.fully_shard(model)
    return model


def data(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def weights(model: nn.Module) -> list[Tensor]:
    return [param.full_tensor().detach() for param in model.parameters()]


def compiled(function: Any) -> Any:
    return torch.compile(function, backend=BACKEND)


def stepped(kind: str, optimizer: str, is_compiled: bool) -> list[Tensor]:
    model = net(kind)
    stepping = OPTIMIZERS[optimizer](list(model.parameters()))
    step = compiled(stepping.step) if is_compiled else stepping.step
    for number in range(3):
        model(data(number)).square().mean().backward()
        step()
        stepping.zero_grad()
    return weights(model)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_compiled_step_has_the_bits_of_fsdp2s(worlds: WorldPool, optimizer):
    is_eager = optimizer == "Muon"  # whose step DTensors do not run compiled; under dshard it is not
    expected = worlds.run(2, stepped, "dshard" if is_eager else "FSDP2", optimizer, not is_eager)[0]
    for found in worlds.run(2, stepped, "dshard", optimizer, True):
        assert all(map(torch.equal, found, expected))


def clipped(library: str, is_compiled: bool) -> list[Tensor]:
    model = net()
    clip = {"torch": nn.utils.clip_grad_norm_, "dshard": dshard.clip_grad_norm_}[library]
    clip, norms = compiled(clip) if is_compiled else clip, []
    for number in range(2):
        model(data(number)).square().mean().backward()
        norms.append(clip(model.parameters(), 0.01))
    return [*map(torch.Tensor.detach, norms), *(param.grad.full_tensor() for param in model.parameters())]


@pytest.mark.parametrize("library", ["torch", "dshard"])
def test_compiled_clipping_has_the_bits_of_eager(worlds: WorldPool, library):
    expected = worlds.run(2, clipped, library, False)[0]
    for found in worlds.run(2, clipped, library, True):
        assert all(map(torch.equal, found, expected))


def averaged(is_compiled: bool, foreach: bool, options: dict[str, Any]) -> list[Tensor]:
    """An average that is computed with after each update: gathered copies of it must not be stale."""
    model = net()
    average = copy.deepcopy(model)
    dshard.set_strategy(average, "zero2")  # whose gathered copies stay
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @torch.no_grad()
    def update() -> None:
        if foreach:
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)
            return
        for own, other in zip(average.parameters(), model.parameters(), strict=True):
            own.lerp_(other, 0.1)

    run, outputs = torch.compile(update, backend=BACKEND, **options) if is_compiled else update, []
    for number in range(3):
        model(data(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        before = average[0].weight.detach().clone()
        kept = before.full_tensor()
        run()
        assert torch.equal(before.full_tensor(), kept)
        with torch.no_grad():
            outputs.append(average(torch.ones(1, 8)))
    return [*outputs, *weights(average)]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("options", [{}, {"fullgraph": True}], ids=["", "fullgraph"])
def test_a_compiled_average_has_the_bits_of_eager(worlds: WorldPool, foreach, options):
    expected = worlds.run(2, averaged, False, foreach, {})[0]
    for found in worlds.run(2, averaged, True, foreach, options):
        assert all(map(torch.equal, found, expected))


PLACES: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: lambda x: model(x).square().mean(),
    "in place": lambda model: (model.compile(backend=BACKEND), lambda x: model(x).square().mean())[1],
    "blocks": lambda model: (
        [each.compile(backend=BACKEND) for each in (model[0], model[2])],
        lambda x: model(x).square().mean(),
    )[1],
    "loss": lambda model: (lambda loss: lambda x: loss(model(x)))(compiled(lambda out: out.square().mean())),
    "whole": lambda model: compiled(lambda x: model(x).square().mean()),
}


def written(is_compiled: bool) -> list[Tensor]:
    """Weights that are written to part by part, between forwards."""
    model = net()
    first, last = model[0], model[2]

    @torch.no_grad()
    def write() -> None:
        first.weight[2].zero_()
        first.weight[:, 1:3].mul_(2)
        first.weight.view(-1)[3:9].fill_(7)
        last.weight.t()[0].add_(1)
        last.weight.tril_()
        changed = last.weight.clone()
        changed[1] = 3.0
        last.weight.copy_(changed)
        nn.init.ones_(last.bias)

    write = compiled(write) if is_compiled else write
    for number in range(2):
        model(data(number)).sum().backward()
        write()
    return weights(model)


def test_compiled_writes_to_parts_of_weights_have_the_values_of_eager(worlds: WorldPool):
    expected = worlds.run(2, written, False)[0]
    for found in worlds.run(2, written, True):
        assert all(map(torch.equal, found, expected))


def accumulated(place: str) -> list[Tensor]:
    """What is compiled is called first when gradients are there, and goes on with and without them."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(data(99)).square().mean().backward()
    loss = PLACES[place](model)
    for number in range(3):
        for micro in range(2):
            loss(data(10 * number + micro)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=number == 0)
    return weights(model)


@pytest.mark.parametrize("place", list(PLACES)[1:])
def test_models_and_losses_compile_while_gradients_are_there(worlds: WorldPool, place):
    expected = worlds.run(2, accumulated, "eager")[0]
    for found in worlds.run(2, accumulated, place):
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other)


def unsupported(how: str) -> None:
    model = net()
    if how == "compiled autograd":
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=BACKEND)):
            model(data(0)).sum().backward()
    else:
        loss = model(data(0)).sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=BACKEND)):
            loss.backward()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("compiled autograd", "Leave it off, and compile the model: model.compile(), or its blocks"),
        ("in its backward", "Leave it off, and compile the model: model.compile(), or its blocks"),
    ],
)
def test_what_does_not_compile_says_the_way_out(worlds: WorldPool, how, text):
    for _, found in expect_error(worlds.get_world(2), unsupported, how):
        assert text in found
