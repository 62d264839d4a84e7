"""Parameter objects from before `fully_shard`: whoever kept them, a use is one of the replacement."""

import copy
import io
import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import dshard
from dshard.testing import WorldPool, expect_error
from tests.models import GPT
from tests.parity.models import CASES, Optim, batch, build, full_weights, shard

OPTIMIZERS = {
    "adamw": Optim("AdamW", {"lr": 1e-2}),
    "amsgrad-foreach": Optim("Adam", {"lr": 1e-2, "amsgrad": True, "foreach": True}),
    "adamw-fused": Optim("AdamW", {"lr": 1e-2, "fused": True}),
    "momentum": Optim("SGD", {"lr": 0.1, "momentum": 0.9}),
    "rmsprop": Optim("RMSprop", {"lr": 1e-3, "momentum": 0.5}),
}


@dataclass(frozen=True, slots=True)
class Run:
    """Losses and full weights."""

    losses: list[float]
    weights: dict[str, Tensor]


def steps(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int, rank: int
) -> list[float]:
    losses = []
    for step in range(first, first + count):
        optimizer.zero_grad()
        inputs, targets = batch(name, 0, step, rank)
        loss = CASES[name].loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def continued(name: str, optim: Optim, plain_steps: int, when: str) -> Run:
    """Steps on the plain model, then sharded ones with an optimizer of before or of after.

    The optimizer that is made after takes the state of the one of before by hand, cut to the shards.
    """
    model = build(name)
    optimizer = optim.make(model.parameters())
    losses = steps(name, model, optimizer, 0, plain_steps, 0)  # the same batches on every rank
    saved = copy.deepcopy(optimizer.state_dict())
    shard(name, model)
    if when == "after":
        optimizer = optim.make(model.parameters())
        for index, param in enumerate(model.parameters()):
            for key, value in saved["state"].get(index, {}).items():
                if value is not None and value.shape == param.shape and value.dim():
                    value = dshard.ShardedTensor.shard(value, param.device_mesh, 0)
                optimizer.state[param][key] = value
    losses += steps(name, model, optimizer, plain_steps, 3, dist.get_rank())
    return Run(losses, full_weights(model))


def assert_same(found: list[Run], expected: list[Run]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.losses == b.losses
        assert [n for n in b.weights if not torch.equal(a.weights[n], b.weights[n])] == []


@pytest.mark.parametrize("plain_steps", [0, 3])
@pytest.mark.parametrize("optim", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_of_before_trains_as_one_of_after_also_when_it_has_state(worlds: WorldPool, optim, plain_steps):
    before = worlds.run(2, continued, "uneven", optim, plain_steps, "before")
    after = worlds.run(2, continued, "uneven", optim, plain_steps, "after")
    assert_same(before, after)
    fresh = worlds.run(2, continued, "uneven", Optim(optim.name, {**optim.options, "lr": 0.0}), plain_steps, "before")
    assert before[0].losses != fresh[0].losses  # it trains


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_state_of_steps_on_the_plain_model_goes_on_as_on_one_device(worlds: WorldPool, num_ranks):
    """All ranks get rank 0's batches: the sharded steps are those of one device, but for rounding of the mean."""
    found = worlds.run(num_ranks, same_batches, "gpt", True)
    expected = worlds.run(1, same_batches, "gpt", False)[0]
    for run in found:
        torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(expected.losses), rtol=1e-5, atol=0)
        if num_ranks < 3:
            assert_same([run], [expected])


def same_batches(name: str, sharded: bool) -> Run:
    model = build(name)
    optimizer = Optim().make(model.parameters())
    losses = steps(name, model, optimizer, 0, 3, 0)
    if sharded:
        shard(name, model)
    losses += steps(name, model, optimizer, 3, 3, 0)
    return Run(losses, full_weights(model))


def state_after(optim: Optim, plain_steps: int) -> tuple[bool, bool]:
    """Are all states sharded like their parameters, and do they hold no more than shards?"""
    model = build("gpt")
    optimizer = optim.make(model.parameters())
    steps("gpt", model, optimizer, 0, plain_steps, 0)
    shard("gpt", model)
    steps("gpt", model, optimizer, plain_steps, 1, dist.get_rank())
    assert len(optimizer.state) == len(list(model.parameters()))
    are_sharded, num_bytes, memory = True, 0, {}
    for param in model.parameters():
        state = [s for s in optimizer.state[param].values() if isinstance(s, Tensor) and s.dim()]
        assert state
        are_sharded &= all(isinstance(s, dshard.ShardedTensor) and s.placements == param.placements for s in state)
        num_bytes += len(state) * param.to_local().nbytes
        storages = [s.to_local().untyped_storage() for s in state]
        memory |= {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
    return are_sharded, sum(memory.values()) == num_bytes


@pytest.mark.parametrize("plain_steps", [0, 2])
@pytest.mark.parametrize("optim", [OPTIMIZERS["adamw"], OPTIMIZERS["momentum"]], ids=["adamw", "momentum"])
def test_momentum_of_before_is_cut_to_the_shards_at_the_first_step(worlds: WorldPool, optim, plain_steps):
    assert worlds.run(2, state_after, optim, plain_steps) == [(True, True)] * 2


def zero_before_first_step(set_to_none: bool) -> list[float]:
    model = build("uneven")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    shard("uneven", model)
    before = full_weights(model)
    inputs, targets = batch("uneven", 0, 0, dist.get_rank())
    CASES["uneven"].loss(model(inputs), targets).backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.zero_grad(set_to_none=set_to_none)
    for p in model.parameters():
        assert p.grad is None if set_to_none else not p.grad.full_tensor().any()  # type: ignore[union-attr]
    optimizer.step()
    after = full_weights(model)
    return [(after[n] - before[n]).abs().sum().item() for n in before]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_before_the_first_step_clears_the_new_gradients(worlds: WorldPool, set_to_none):
    for moved in worlds.run(2, zero_before_first_step, set_to_none):
        assert set(moved) == {0.0}


def groups_and_scheduler(first: bool) -> Run:
    """Parameter groups, options, and a scheduler made with the optimizer."""
    model: Any = build("gpt")
    made: Any = None

    def make() -> Any:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 3e-2}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    if first:
        made = make()
    shard("gpt", model)
    optimizer, scheduler = made or make()
    losses = []
    for step in range(3):
        losses += steps("gpt", model, optimizer, step, 1, dist.get_rank())
        scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [1e-2 / 8, 3e-2 / 8]
    assert all(isinstance(p, dshard.ShardedTensor) for g in optimizer.param_groups for p in g["params"])
    return Run(losses, full_weights(model))


def test_groups_and_a_scheduler_of_before_go_on(worlds: WorldPool):
    assert_same(worlds.run(2, groups_and_scheduler, True), worlds.run(2, groups_and_scheduler, False))


USES: dict[str, Callable[[Any], Any]] = {
    "multiply": lambda p: p * 2,
    "matmul": lambda p: torch.ones(1, 64) @ p,
    "linear": lambda p: nn.functional.linear(torch.ones(1, 16), p),
    "sum": lambda p: p.sum(),
    "item": lambda p: p[3, 2].item(),
    "tolist": lambda p: p.tolist(),
    "shape": lambda p: (p.shape, p.dtype, p.device, p.numel(), p.dim(), len(p), p.is_leaf, p.requires_grad),
    "copy": lambda p: p.copy_(torch.zeros(1)),
    "data": lambda p: p.data,
    "set data": lambda p: setattr(p, "data", torch.ones(64, 16)),
    "write through data": lambda p: p.data[5].fill_(2.0),
    "zero": lambda p: p.zero_(),
    "add in place": lambda p: operator.iadd(p, 1.0),
    "index": lambda p: p[0],
    "setitem": lambda p: p.__setitem__(0, 1.0),
    "init": nn.init.zeros_,
    "normal": lambda p: nn.init.normal_(p, generator=torch.Generator().manual_seed(1)),
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "equal": lambda p: torch.equal(p, p),
    "stack": lambda p: torch.stack([torch.zeros(()), p[0, 0]]),
    "in a keyword": lambda p: torch.add(input=p, other=p),
    "foreach": lambda p: torch._foreach_add([p], 1.0),
    "foreach in place": lambda p: torch._foreach_mul_([p], 3.0),
    "to": lambda p: p.to(torch.float64),
    "deepcopy": copy.deepcopy,
    "norm": torch.linalg.vector_norm,
    "freeze": lambda p: p.requires_grad_(False),
    "set requires_grad": lambda p: setattr(p, "requires_grad", False),
    "functional": lambda p: torch.func.functional_call(nn.Linear(16, 64, bias=False), {"weight": p}, torch.ones(2, 16)),
    "drop the gradient": lambda p: setattr(p, "grad", None),
    "delete the gradient": lambda p: delattr(p, "grad"),
    "zero the gradient": lambda p: p.grad.zero_(),
}


def plain_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        full = value.full_tensor() if isinstance(value, dshard.ShardedTensor) else value
        return full.detach().clone()
    return [plain_value(v) for v in value] if isinstance(value, (list, tuple)) else value


def use_old(use: str, is_old: bool) -> Any:
    """What a use gives, and the weights, gradients and flags after it; through an old object or the module's own."""
    model: Any = build("gpt")
    param = model.blocks[1].up.weight
    shard("gpt", model)
    own = model.blocks[1].up.weight
    inputs, targets = batch("gpt", 0, 0, dist.get_rank())
    CASES["gpt"].loss(model(inputs), targets).backward()
    with torch.set_grad_enabled(use in ("freeze", "set requires_grad", "functional")):
        result = plain_value(USES[use](param if is_old else own))
    return result, plain_value(own), None if own.grad is None else plain_value(own.grad), own.requires_grad


@pytest.mark.parametrize("use", USES)
def test_a_use_of_an_old_parameter_is_one_of_its_replacement(worlds: WorldPool, use):
    for old, own in zip(worlds.run(2, use_old, use, True), worlds.run(2, use_old, use, False), strict=True):
        assert differences(old, own, 0.0) == []


def differences(found: Any, expected: Any, tolerance: float) -> list[str]:
    """Where two nested results differ."""
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        return [w for pair in zip(found, expected, strict=True) for w in differences(*pair, tolerance)]
    same = torch.equal(found, expected) if isinstance(expected, Tensor) else found == expected
    return [] if same else [f"{found} is not {expected}"]


class Caching(nn.Module):
    """A module that keeps its parameters in a list and a closure of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(6, 5)
        self.weights = [self.first.weight, self.second.weight]
        bias = self.second.bias
        self.shift = lambda x: x + bias

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x @ w.t() for w in self.weights]
        return self.shift(outputs[0] * outputs[1]) + self.first(x)


def cached(how: str) -> tuple[list[str], int]:
    torch.manual_seed(0)
    plain: Any = Caching()
    model = Caching()
    model.load_state_dict(plain.state_dict())
    hooked: list[type] = []
    old = list(model.weights)
    dshard.fully_shard(model)
    old[0].register_hook(lambda grad: hooked.append(type(grad)))
    if how == "copied":
        model.shift = plain.shift = torch.tanh  # a function is not copied
        model = copy.deepcopy(model)
        assert model.weights[0] is model.first.weight
    elif how == "pickled":
        model.shift = plain.shift = torch.tanh
        model = pickle.loads(pickle.dumps(model))
        assert model.weights[1] is model.second.weight
    elif how == "registered again":
        model.again = nn.Linear(6, 5)
        model.again.weight = old[0]  # type: ignore[assignment]
        assert model.again.weight is model.first.weight
        del model.again
    wrong = []
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        losses = [m(x).square().mean() for m in (plain, model)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        wrong += differences(losses[1].item(), losses[0].item(), 0.0)
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        if not torch.allclose(param.full_tensor(), expected, rtol=1e-6, atol=1e-7):
            wrong.append(name)
    (grad,) = torch.autograd.grad(model(torch.ones(1, 6)).sum(), [model.weights[0]])
    if not isinstance(grad, dshard.ShardedTensor):
        wrong.append(f"autograd.grad gives {type(grad)}")
    return wrong, len(hooked)


@pytest.mark.parametrize("how", ["as it is", "copied", "pickled", "registered again"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_module_that_cached_its_parameters_before_trains_as_the_plain_one(worlds: WorldPool, num_ranks, how):
    num_hooks = 0 if how in ("copied", "pickled") else 4
    assert worlds.run(num_ranks, cached, how) == [([], num_hooks)] * num_ranks


def save_old() -> bool:
    model: Any = build("gpt")
    old = model.head.weight
    shard("gpt", model)
    buffer = io.BytesIO()
    torch.save([old, model.head.weight], buffer)
    buffer.seek(0)
    first, second = torch.load(buffer, weights_only=False)
    return first is second and torch.equal(first.full_tensor(), model.head.weight.full_tensor())


def test_an_old_parameter_is_saved_as_its_replacement(worlds: WorldPool):
    assert worlds.run(2, save_old) == [True, True]


def point_at_old() -> None:
    model: Any = build("gpt")
    old = model.head.weight
    shard("gpt", model)
    old.data_ptr()


def test_what_is_refused_is_refused_through_an_old_parameter_too(worlds: WorldPool):
    errors = expect_error(worlds.get_world(2), point_at_old)
    assert all(kind == "UnsupportedOpError" and text.startswith("head.weight: ") for kind, text in errors), errors


def describe_old() -> tuple[str, bool, int]:
    model: Any = build("gpt")
    old = model.head.weight
    shard("gpt", model)
    return repr(old), isinstance(old, nn.Parameter), len({old, old})


def test_an_old_parameter_can_be_printed_and_hashed(worlds: WorldPool):
    for text, is_parameter, count in worlds.run(2, describe_old):
        assert text.startswith("ReplacedParameter(now ShardedTensor('head.weight'")
        assert is_parameter
        assert count == 1


def memory_of_old() -> bool:
    model: Any = build("gpt")
    old = model.head.weight
    ref = StorageWeakRef(old.untyped_storage())
    shard("gpt", model)
    assert old is not None
    return ref.expired()


def test_the_memory_of_an_old_parameter_is_freed_even_while_it_is_held(worlds: WorldPool):
    assert worlds.run(2, memory_of_old) == [True, True]


def tied_across_units(kind: str, first: bool) -> Run:
    model: Any = build("tied")
    assert model.head.weight is model.tokens.weight
    optimizer = Optim().make(model.parameters()) if first else None
    if kind == "dshard":
        for unit in (model.tokens, *model.blocks, [model.norm, model.head]):
            dshard.fully_shard(unit)
        dshard.fully_shard(model)
        assert model.head.weight is model.tokens.weight
        assert isinstance(model.head.weight, dshard.ShardedTensor)
        assert len(list(model.parameters())) == len(list(GPT(tied=True).parameters()))
        wrapped = model
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = optimizer or Optim().make(model.parameters())
    losses = steps("tied", wrapped, optimizer, 0, 5, dist.get_rank())
    return Run(losses, full_weights(model))


@pytest.mark.parametrize("first", [True, False])
def test_a_parameter_tied_across_units_stays_one_and_trains_as_under_ddp(worlds: WorldPool, first):
    assert_same(worlds.run(2, tied_across_units, "dshard", first), worlds.run(2, tied_across_units, "ddp", first))


def clip_old_list(clip: str, use_old_list: bool) -> tuple[float, dict[str, Tensor]]:
    model = build("gpt")
    old = list(model.parameters())
    shard("gpt", model)
    inputs, targets = batch("gpt", 0, 0, dist.get_rank())
    CASES["gpt"].loss(model(inputs), targets).backward()
    call = dshard.clip_grad_norm_ if clip == "dshard" else nn.utils.clip_grad_norm_
    norm = call(old if use_old_list else model.parameters(), 0.1)
    return norm.item(), {n: p.grad.full_tensor() for n, p in model.named_parameters()}


@pytest.mark.parametrize("clip", ["dshard", "torch"])
def test_clipping_over_the_old_list_clips_the_new_gradients(worlds: WorldPool, clip):
    found, expected = (worlds.run(2, clip_old_list, clip, old) for old in (True, False))
    for (norm, grads), (other_norm, other_grads) in zip(found, expected, strict=True):
        assert norm == other_norm > 0.1
        assert all(torch.equal(grads[n], other_grads[n]) for n in grads)
        total = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads.values()]))
        torch.testing.assert_close(total.item(), 0.1, rtol=1e-4, atol=0)


def grads_of_before() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A backward on the plain model, then `fully_shard`, then what `.grad` is; and the mean of the ranks' gradients."""
    model = build("uneven")
    inputs, targets = batch("uneven", 0, 0, dist.get_rank())
    CASES["uneven"].loss(model(inputs), targets).backward()
    own = {n: p.grad.clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]
    shard("uneven", model)
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}, own  # type: ignore[union-attr]


def test_gradients_of_before_are_reduced_and_kept(worlds: WorldPool):
    (first, own0), (second, own1) = worlds.run(2, grads_of_before)
    for name, grad in first.items():
        assert torch.equal(grad, second[name])
        assert torch.equal(grad, (own0[name] + own1[name]) / 2)


def attributes_of_before() -> tuple[Any, bool]:
    model: Any = build("uneven")
    model.first.weight.tag = "mine"
    model.first.bias.requires_grad_(False)
    shard("uneven", model)
    return model.first.weight.tag, model.first.bias.requires_grad


def test_attributes_and_requires_grad_move_to_the_new_parameter(worlds: WorldPool):
    assert worlds.run(2, attributes_of_before) == [("mine", False)] * 2
