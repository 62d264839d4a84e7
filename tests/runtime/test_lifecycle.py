"""Invariant 10: any sequence of public calls ends with all units sharded and a plain twin's gradients."""

import copy
import functools
import traceback
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import dshard
from dshard.testing import WorldPool
from dshard.testing.strategies import world_sizes


class Block(nn.Module):
    """A layer that fails on demand, before or after it used its weight."""

    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size, dtype=torch.float64)
        self.fails = ""

    def forward(self, x):
        if self.fails == "before":
            raise ValueError("on demand")
        x = torch.tanh(self.linear(x))
        if self.fails == "after":
            raise ValueError("on demand")
        return x


class Net(nn.Module):
    """Three blocks, a tied use of the first, a frozen layer, a parameter that takes no part."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(3) for _ in range(3))
        self.frozen = nn.Linear(3, 3, dtype=torch.float64).requires_grad_(False)
        self.head = nn.Linear(3, 2, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x, skip=-1):
        for i, block in enumerate(self.blocks):
            if i != skip:
                x = block(x)
        x = self.blocks[0].linear(self.frozen(x))
        return self.head(x).pow(2).sum()


@functools.cache
def world_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


class Pair:
    """A sharded model on this rank's inputs, and a plain twin on the inputs of all ranks."""

    def __init__(self, units, reshard):
        torch.manual_seed(0)
        self.twin = Net()
        self.model = copy.deepcopy(self.twin)
        if units == "blocks":
            for block in self.model.blocks:
                dshard.fully_shard(block, mesh=world_mesh(), reshard_after_forward=reshard)
        elif units == "list":
            dshard.fully_shard(list(self.model.blocks), mesh=world_mesh(), reshard_after_forward=reshard)
        dshard.fully_shard(self.model, mesh=world_mesh(), reshard_after_forward=reshard)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (self.model, self.twin)]
        self.pending = []
        self.step = 0

    def inputs(self):
        self.step += 1
        generator = torch.Generator().manual_seed(self.step)
        return [torch.randn(2, 3, dtype=torch.float64, generator=generator) for _ in range(dist.get_world_size())]

    def do(self, action):
        name, *args = action
        getattr(self, f"do_{name}")(*args)

    def do_forward(self, skip=-1):
        inputs = self.inputs()
        ours = self.model(inputs[dist.get_rank()], skip)
        theirs = [self.twin(x, skip) for x in inputs]
        torch.testing.assert_close(ours.detach(), theirs[dist.get_rank()].detach(), rtol=1e-9, atol=1e-11)
        self.pending.append((ours, sum(theirs) / len(theirs)))

    def do_eval(self):
        with torch.no_grad():
            self.do_forward()
        self.pending.pop()

    def do_inference(self):
        with torch.inference_mode():
            self.do_forward()
        self.pending.pop()

    def do_failing_forward(self, block, where):
        for module in (self.model, self.twin):
            module.blocks[block].fails = where
            with pytest.raises(ValueError, match="on demand"):
                module(self.inputs()[0])
            module.blocks[block].fails = ""

    def do_block(self, i):
        """A block by itself, outside of the root's forward."""
        x = self.inputs()
        ours = self.model.blocks[i](x[dist.get_rank()]).sum()
        theirs = [self.twin.blocks[i](v).sum() for v in x]
        self.pending.append((ours, sum(theirs) / len(theirs)))

    def do_direct(self):
        """A parameter in a loss, with no module's forward at all."""
        ours, theirs = (m.head.weight.pow(2).sum() for m in (self.model, self.twin))
        self.pending.append((ours, theirs))

    def do_backward(self):
        for side in zip(*self.pending, strict=True):
            sum(side).backward()
        self.pending = []

    def do_backward_of_each(self):
        for ours, theirs in reversed(self.pending):
            ours.backward()
            theirs.backward()
        self.pending = []

    def do_backward_twice(self):
        for side in zip(*self.pending, strict=True):
            loss = sum(side)
            loss.backward(retain_graph=True)
            loss.backward()
        self.pending = []

    def do_failing_backward(self):
        """A hook raises in the middle of backward: gradients are then anything, so they are dropped."""
        self.do_forward()

        def fail(grad):
            raise ValueError("on demand")

        (ours, _) = self.pending.pop()
        handle = self.model.blocks[1].linear.weight.register_hook(fail)
        with suppress(ValueError):
            ours.backward()
        handle.remove()
        self.do_zero(True)

    def do_drop(self):
        self.pending = []

    def do_step(self):
        self.pending = []  # plain torch, too, refuses a backward through weights that were written
        for optimizer in self.optimizers:
            optimizer.step()

    def do_clip(self):
        ours = dshard.clip_grad_norm_(self.model.parameters(), 0.5)
        theirs = nn.utils.clip_grad_norm_(self.twin.parameters(), 0.5)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)

    def do_zero(self, set_to_none):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def do_sync(self, on):
        self.model.set_requires_gradient_sync(on)

    def do_read_grads(self):
        self.compare()

    def do_unshard(self):
        self.model.unshard()

    def do_unshard_async(self):
        self.model.unshard(async_op=True)

    def do_reshard(self):
        self.model.reshard()

    def do_set_reshard(self, on):
        self.model.set_reshard_after_forward(on)

    def do_gathered(self, inside):
        with dshard.gathered(self.model):
            for action in inside:
                self.do(action)

    def compare(self):
        for (name, p), (_, q) in zip(self.model.named_parameters(), self.twin.named_parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"{name}: one of the gradients is None"
            if q.grad is not None:
                torch.testing.assert_close(
                    p.grad.full_tensor(), q.grad, rtol=1e-8, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
                )

    def finish(self):
        self.do_sync(True)
        self.do_forward()
        self.do_backward()
        self.compare()
        self.all_sharded()
        for (name, p), (_, q) in zip(self.model.named_parameters(), self.twin.named_parameters(), strict=True):
            torch.testing.assert_close(
                p.full_tensor().detach(), q.detach(), rtol=1e-8, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
            )
        with torch.no_grad():
            self.do_forward()
        self.all_sharded()

    def all_sharded(self):
        runtime = self.model._dshard_units[0].model
        assert [u.label for u in runtime.units if u.is_gathered] == []
        assert [u.label for u in runtime.units if u.num_active or u.num_pins] == []
        assert runtime.gathered_bytes == 0


BLOCK = st.integers(0, 2)
MOVES = st.sampled_from([("unshard",), ("unshard_async",), ("reshard",), ("set_reshard", True), ("set_reshard", False)])
FORWARDS = st.one_of(
    st.just(("forward",)),
    st.tuples(st.just("forward"), BLOCK),
    st.sampled_from([("eval",), ("inference",), ("direct",)]),
    st.tuples(st.just("block"), BLOCK),
    st.tuples(st.just("failing_forward"), BLOCK, st.sampled_from(["before", "after"])),
)
BACKWARDS = st.sampled_from([("backward",), ("backward_of_each",), ("backward_twice",), ("failing_backward",)])
UPDATES = st.sampled_from(
    [("step",), ("clip",), ("zero", True), ("zero", False), ("sync", True), ("sync", False), ("read_grads",), ("drop",)]
)
SIMPLE = st.one_of(FORWARDS, FORWARDS, BACKWARDS, UPDATES, MOVES)
ACTIONS = SIMPLE | st.tuples(st.just("gathered"), st.lists(st.one_of(FORWARDS, BACKWARDS, MOVES), max_size=3))


def check_sequence(units, reshard, actions):
    """Empty text if all is well, or if the sequence was refused by a DShardError; else what went wrong."""
    done = []
    try:
        pair = Pair(units, reshard)
        for action in actions:
            done.append(action)
            pair.do(action)
        done.append("end")
        pair.finish()
    except dshard.DShardError as error:
        return f"refused after {done}: {error}"
    except Exception:
        return f"wrong after {done}: {traceback.format_exc(limit=-6)}"
    return ""


def run(worlds, num_ranks, *args):
    problems = worlds.run(num_ranks, check_sequence, *args)
    assert not any(problems), max(problems)


UNITS = st.sampled_from(["blocks", "root", "list"])


@settings(max_examples=50)
@given(
    num_ranks=world_sizes(),
    units=UNITS,
    reshard=st.sampled_from([None, True, False]),
    actions=st.lists(ACTIONS, min_size=1, max_size=10),
)
def test_any_sequence_of_calls_ends_sharded_with_the_gradients_of_a_plain_twin(
    worlds: WorldPool, num_ranks, units, reshard, actions
):
    run(worlds, num_ranks, units, reshard, actions)


SEQUENCES = {
    "a plain step": [("forward",), ("backward",), ("step",)],
    "several forwards before one backward": [("forward",), ("forward", 1), ("forward",), ("backward",)],
    "several forwards, a backward of each": [("forward",), ("forward",), ("backward_of_each",)],
    "a graph that is kept and used twice": [("forward",), ("backward_twice",)],
    "a backward that never comes": [("forward",), ("drop",), ("forward",), ("drop",)],
    "an exception in forward": [("failing_forward", 1, "after"), ("failing_forward", 0, "before")],
    "an exception in backward": [("failing_backward",), ("forward",), ("backward",)],
    "an exception inside of gathered": [("gathered", [("failing_forward", 2, "after"), ("failing_backward",)])],
    "accumulation without sync": [("sync", False), ("forward",), ("backward",), ("forward",), ("backward",)],
    "accumulation, then zeros": [("sync", False), ("forward",), ("backward",), ("zero", False)],
    "accumulation, then None": [("sync", False), ("forward",), ("backward",), ("zero", True)],
    "a gradient read without sync": [
        ("sync", False),
        ("forward",),
        ("backward",),
        ("read_grads",),
        ("forward",),
        ("backward",),
        ("read_grads",),
    ],
    "a step without sync": [("sync", False), ("forward",), ("backward",), ("step",), ("forward",), ("backward",)],
    "clipping before sync": [("sync", False), ("forward",), ("backward",), ("clip",), ("sync", True)],
    "accumulation onto zeros": [("forward",), ("backward",), ("zero", False), ("forward",), ("backward",)],
    "a skipped block": [("forward", 1), ("backward",), ("read_grads",), ("forward", 2), ("backward",)],
    "frees while a graph waits": [("forward",), ("reshard",), ("set_reshard", True), ("backward",)],
    "gathers while a graph waits": [("forward",), ("unshard",), ("set_reshard", False), ("backward",)],
    "a gather that nobody waits for": [("unshard_async",), ("reshard",), ("unshard_async",), ("forward",)],
    "gathered around everything": [("gathered", [("forward",), ("backward",), ("unshard",), ("reshard",), ("eval",)])],
    "blocks by themselves": [("block", 1), ("block", 0), ("backward",)],
    "parameters by themselves": [("direct",), ("direct",), ("backward",)],
    "eval between forward and backward": [("forward",), ("eval",), ("inference",), ("backward",)],
}


@pytest.mark.parametrize("units", ["blocks", "root", "list"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_known_sequences_end_sharded_with_the_gradients_of_a_plain_twin(worlds: WorldPool, name, units):
    for num_ranks, reshard in ((2, None), (3, False)):
        run(worlds, num_ranks, units, reshard, SEQUENCES[name])


def check_seen():
    """The end check itself sees a unit that stayed gathered, and a gradient that is not the twin's."""
    pair = Pair("blocks", None)
    pair.model.unshard()
    with pytest.raises(AssertionError):
        pair.all_sharded()
    pair.do_forward()
    pair.do_backward()
    pair.compare()
    pair.model.head.weight.grad.mul_(1 + 1e-5)
    with pytest.raises(AssertionError):
        pair.compare()


def test_a_unit_left_gathered_and_a_wrong_gradient_would_be_seen(worlds: WorldPool):
    worlds.run(2, check_seen)


def data_in_inference_mode() -> list[Tensor]:
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.fill_(2.0)
        layer.bias.zero_()
    dshard.fully_shard(layer)
    with torch.inference_mode():
        layer.weight.data = layer.weight.data * 0.5
        layer.bias.data = torch.ones(3)
    out = layer(torch.ones(1, 3))
    out.sum().backward()
    return [out.detach(), layer.weight.grad.full_tensor()]  # type: ignore[union-attr]


def test_data_that_is_set_in_inference_mode_can_be_read_and_trained(worlds: WorldPool):
    for out, grad in worlds.run(2, data_in_inference_mode):
        assert torch.equal(out, torch.full((1, 3), 4.0))
        assert torch.equal(grad, torch.ones(3, 3))


def frozen_in_between() -> list[bool]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    dshard.fully_shard(model, sync="broadcast")
    loss = model(torch.ones(1, 3)).sum()
    model[0].weight.requires_grad_(False)
    loss.backward()
    return [p.grad is None for p in model.parameters()]


def test_a_parameter_that_is_frozen_between_forward_and_backward_gets_no_gradient(worlds: WorldPool):
    assert worlds.run(2, frozen_in_between) == [[True, False, False, False]] * 2


def backward_that_raises(then: str) -> list[Any]:
    """A hook raises in the middle of a backward; then the model changes, and trains on."""
    model: Any = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]).double()
    for layer in model:
        dshard.fully_shard(layer, sync="broadcast")
    dshard.fully_shard(model)
    model[0].weight.requires_grad_(False)

    def boom(grad: Tensor) -> None:
        raise KeyError("mine")

    handle = model[1].bias.register_hook(boom)
    with pytest.raises(KeyError, match="mine"):
        model(torch.ones(1, 3).double()).sum().backward()
    handle.remove()
    model.zero_grad()
    if then == "cast":
        model.float()
    elif then == "thaw":
        model[0].weight.requires_grad_(True)
    x = torch.ones(1, 3, dtype=model[0].weight.dtype)
    model(x).sum().backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    return [all(g.dtype == x.dtype for g in grads), len(grads), model._context().gathered_bytes]


@pytest.mark.parametrize(("then", "num_grads"), [("cast", 5), ("thaw", 6), ("nothing", 5)])
def test_a_backward_that_raised_leaves_nothing_to_the_next_one(worlds: WorldPool, then, num_grads):
    assert worlds.run(2, backward_that_raises, then) == [[True, num_grads, 0]] * 2


class Held(torch.autograd.Function):
    """Saves an object beside the activations; its backward raises if it is told to."""

    @staticmethod
    def forward(ctx, x, held, raises):
        ctx.held, ctx.raises = held, raises
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.raises:
            raise MemoryError
        return grad, None, None


class Activation:
    pass


def graphs_left_by_a_failed_backward(strategy: str, *, checkpoints: bool, nested: bool) -> int:
    """How many of three nodes of a graph are alive after a backward that raised in the middle."""
    model: Any = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    for layer in model:
        dshard.fully_shard(layer, strategy=strategy)
    dshard.fully_shard(model, strategy=strategy)
    alive = []

    def run(layer: nn.Module, x: Tensor, place: int) -> Tensor:
        held = Activation()
        alive.append(weakref.ref(held))
        return Held.apply(layer(x), held, place == 1)

    def fail() -> None:
        x = torch.ones(2, 4)
        for place, layer in enumerate(model):
            x = checkpoint(run, layer, x, place, use_reentrant=False) if checkpoints else run(layer, x, place)
        if nested:
            (grad,) = torch.autograd.grad(model[0](torch.ones(2, 4)).sum(), model[0].weight, create_graph=True)
            x = x.sum() + grad.sum()
        x.sum().backward()

    with pytest.raises(MemoryError):
        fail()
    return sum(held() is not None for held in alive)


@pytest.mark.parametrize(("strategy", "nested"), [("full", False), ("full", True), ("ddp", True), ("split(2)", False)])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_backward_that_raised_frees_its_graph_at_once(worlds: WorldPool, strategy, checkpoints, nested):
    left = worlds.run(2, graphs_left_by_a_failed_backward, strategy, checkpoints=checkpoints, nested=nested)
    assert left == [0, 0]
