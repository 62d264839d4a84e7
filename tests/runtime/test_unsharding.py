"""Within a module's forward its parameters are full tensors: what programs do there, and what autograd keeps of it."""

import os
import re
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import dshard
from dshard.runtime.unsharded import UnshardedParameter
from dshard.tensor import ShardedTensor
from dshard.testing import World, WorldPool
from dshard.units import copies
from dshard.units.copies import FULL_TENSORS

WIDTH = 8
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Block(nn.Module):
    """A block that does something to itself in its forward, if it is told what."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.action: Callable[[Block], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.action is not None:
            self.action(self)
        return x + self.down(torch.tanh(self.norm(self.up(x))))


def build(num_blocks: int = 3) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_blocks)), nn.Linear(WIDTH, WIDTH))


def sharded(model: Any, **options: Any) -> Any:
    for block in model:
        dshard.fully_shard(block, **options)
    return dshard.fully_shard(model, **options)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(
    model: Any, steps: range, ranks: list[int], forward: Callable[[Any, Tensor], Tensor] | None = None
) -> list[Any]:
    """The weights after some steps of SGD over the mean of the ranks' losses."""
    run = forward or (lambda model, x: model(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        losses = [run(model, batch(step, rank)).square().mean() for rank in ranks]
        (sum(losses[1:], losses[0]) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def values(model: Any) -> list[Tensor]:
    params: list[Any] = list(model.parameters())
    return [(p.full_tensor() if isinstance(p, ShardedTensor) else p).detach().clone() for p in params]


def is_as_plain(forward: Callable[[Any, Tensor], Tensor] | None = None, **options: Any) -> bool:
    """Whether the sharded model trains to the plain one's weights; the order of use is known from the second step."""
    model, plain = sharded(build(), **options), build()
    ranks = list(range(dist.get_world_size()))
    own = train(model, range(4), [dist.get_rank()], forward)
    others = train(plain, range(4), ranks, forward)
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(own, others, strict=True))


# That the forward is one: nothing of it is dispatched in Python.


def dispatched_in_a_step(options: dict[str, Any]) -> list[int]:
    """Operations on sharded tensors in the forward and backward of each of three steps."""
    model = sharded(build(), **options)
    found = []
    run = ShardedTensor._dispatch
    counts = [0]

    def counting(*args: Any) -> Any:
        counts[0] += 1
        return run(*args)

    ShardedTensor._dispatch = staticmethod(counting)
    try:
        for step in range(3):
            counts[0] = 0
            model(batch(step, dist.get_rank())).square().mean().backward()
            found.append(counts[0])
            model.zero_grad()
    finally:
        ShardedTensor._dispatch = run
    return found


@pytest.mark.parametrize("strategy", ["full", "keep", "zero1", "zero2", "ddp"])
@pytest.mark.parametrize("mp_policy", [None, HALF], ids=["fp32", "bf16"])
def test_from_the_second_step_on_no_operation_of_a_step_is_dispatched_in_python(worlds: WorldPool, strategy, mp_policy):
    options: dict[str, Any] = {"strategy": strategy, **({"mp_policy": mp_policy} if mp_policy else {})}
    for first, *others in worlds.run(2, dispatched_in_a_step, options):
        assert first > 0
        assert others == [0, 0]


# What a program sees.


def seen_in_forward() -> list[bool]:
    model = sharded(build())
    model(batch(0, 0)).sum().backward()
    block, found = model[1], list[bool]()
    block.up.weight.note = "of the program"
    before = dict(block.named_parameters())
    grads = {name: param.grad for name, param in before.items()}
    hooked: list[Tensor] = []

    def look(block: Block) -> None:
        weight = block.up.weight
        found.extend(
            [
                type(weight) is UnshardedParameter and isinstance(weight, nn.Parameter),
                tuple(weight.shape) == (2 * WIDTH, WIDTH) and weight.requires_grad,
                weight.grad is grads["up.weight"],
                weight.note == "of the program",
                torch.equal(weight.to_local(), before["up.weight"].to_local()),
                torch.equal(weight.full_tensor(), weight) and dict(block.named_parameters())["up.weight"] is weight,
            ]
        )
        weight.register_hook(hooked.append)

    block.action = look
    model(batch(1, dist.get_rank())).sum().backward()
    after = dict(block.named_parameters())
    found.append(all(after[name] is param for name, param in before.items()))
    found.append(len(hooked) == 1 and isinstance(hooked[0], ShardedTensor))  # reduced, as outside of a forward
    places = [place for place in (ref() for ref in FULL_TENSORS.values()) if place is not None]
    known = [param.gather_source.model for place in places for param in place.params]
    found.append(model._context() not in known)  # else of models of earlier tests
    return found


def test_a_full_tensor_answers_for_the_parameter_and_is_gone_after_the_forward(worlds: WorldPool):
    for found in worlds.run(2, seen_in_forward):
        assert found == [True] * 9


def left_by_an_exception(kind: type[BaseException]) -> list[bool]:
    model = sharded(build())
    train(model, range(2), [dist.get_rank()])

    def fail(block: Block) -> None:
        raise kind("bad batch")

    model[1].action = fail
    with pytest.raises(kind):
        model(batch(2, 0))
    model[1].action = None
    if kind is KeyboardInterrupt:
        with torch.no_grad():
            model[1].up.weight.sharded.mul_(1.0)
        with pytest.raises(dshard.StateError, match="reset_iter_state"):
            model(batch(2, 0))
        model.reset_iter_state()
    all_sharded = all(isinstance(param, ShardedTensor) for param in model.parameters())
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    train(model, range(2, 4), [dist.get_rank()])
    return [all_sharded, hooks is None]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_no_full_tensor_and_no_hook_behind(kind):
    with World(2) as world:
        assert world.run(left_by_an_exception, kind) == [[True, True]] * 2


# What a program does.


def in_functional_call(model: Any, x: Tensor) -> Tensor:
    """Around all, and in the middle of a forward, with weights that are computed."""
    scaled = {name: 2.0 * param for name, param in model[1].named_parameters()}
    return functional_call(model, {f"1.{name}": value for name, value in scaled.items()}, (x,))


class Generated(nn.Module):
    """Calls a part of itself with weights that it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        made = {name: param * self.scale for name, param in self.part.named_parameters()}
        return self.part(x) + functional_call(self.part, made, (x,))


def generates_as_plain() -> bool:
    torch.manual_seed(0)
    model, plain = (nn.Sequential(Generated(), Generated()) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    ranks = list(range(dist.get_world_size()))
    own = train(sharded(model), range(4), [dist.get_rank()])
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(own, train(plain, range(4), ranks), strict=True))


def test_functional_call_within_a_forward_uses_what_it_is_given(worlds: WorldPool):
    assert worlds.run(2, generates_as_plain) == [True] * 2


class Transforming(nn.Module):
    """Differentiates a part of itself, and maps it over the batch, by transforms of `torch.func`."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda y: torch.tanh(self.part(y)).sum())(x)
        return self.part(x) + slope + torch.func.vmap(self.part)(x)


def transforms_as_plain() -> bool:
    torch.manual_seed(0)
    model, plain = (nn.Sequential(Transforming(), Transforming()) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    disable = torch.autograd.graph.disable_saved_tensors_hooks
    own = train(sharded(model), range(4), [dist.get_rank()])
    assert torch.autograd.graph.disable_saved_tensors_hooks is disable
    others = train(plain, range(4), list(range(dist.get_world_size())))
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(own, others, strict=True))


def test_transforms_run_within_a_forward(worlds: WorldPool):
    assert worlds.run(2, transforms_as_plain) == [True] * 2


def test_an_activation_that_is_written_to_is_told_as_autograd_tells_it(worlds: WorldPool):
    for text in worlds.run(2, written_activation):
        assert "one of the variables needed for gradient computation has been modified by an inplace operation" in text
        assert "[torch.FloatTensor [3, 8]] is at version 1; expected version 0 instead" in text


def written_activation() -> str:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.part(x).sigmoid()
            out = y * 1.0
            y.mul_(2.0)  # which the sigmoid's backward needs
            return out

    model = sharded(nn.Sequential(Writes(), nn.Linear(WIDTH, WIDTH)))
    try:
        model(batch(0, 0)).sum().backward()
    except RuntimeError as error:
        model.reset_iter_state()
        return str(error)
    return "nothing"


def twice_through(model: Any, x: Tensor) -> Tensor:
    return model(model(x))


def beside_its_forward(model: Any, x: Tensor) -> Tensor:
    weight = model[1].up.weight
    return model(x) + nn.functional.linear(x, weight[:WIDTH]) * weight.square().mean()


def saved_on_cpu(model: Any, x: Tensor) -> Tensor:
    with save_on_cpu():
        return model(x)


def all_recomputed(model: Any, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)


def parts_recomputed(model: Any, x: Tensor) -> Tensor:
    for i, block in enumerate(model):
        x = checkpoint(block, x.requires_grad_() if x.is_leaf else x, use_reentrant=i == 1)
    return x


def with_a_penalty(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out + slope.square().mean()


def without_the_first(model: Any, x: Tensor) -> Tensor:
    for param in model[0].parameters():
        param.requires_grad_(False)
    return model(x)


def over_a_graph(model: Any, x: Tensor) -> Tensor:
    """A block mixes the rows by a sparse matrix, which autograd saves: it has no storage."""
    links = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]]).to_sparse()
    hook = model[1].register_forward_hook(lambda module, args, out: torch.sparse.mm(links, out))
    try:
        return model(x)
    finally:
        hook.remove()


FORWARDS = [
    *(in_functional_call, twice_through, beside_its_forward, saved_on_cpu, all_recomputed, parts_recomputed),
    *(with_a_penalty, without_the_first, over_a_graph),
]


@pytest.mark.parametrize("strategy", ["full", "zero2"])
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_training_equals_that_of_the_plain_model(worlds: WorldPool, forward, strategy):
    assert worlds.run(2, is_as_plain, forward, strategy=strategy) == [True] * 2


def ran_in_steps(model: Any, ran: list[str]) -> list[list[str]]:
    """What hooks have noted in each of three steps, of which the last one leaves a layer of a unit out."""
    found = []
    for step in range(3):
        ran.clear()
        if step == 2:
            model[1].forward = lambda x: model[1].up(x)[:, :WIDTH]
        model(batch(step, dist.get_rank())).sum().backward()
        found.append(sorted(ran))
        model.zero_grad()
    return found


def hooked_where_unused() -> list[list[str]]:
    """Which hooks of parameters ran, and whether they were given a gradient."""
    model = sharded(build())
    ran: list[str] = []
    for name, param in model[1].named_parameters():
        param.register_hook(lambda grad, name=name: ran.append(f"{name} {grad is not None}"))
        param.register_post_accumulate_grad_hook(lambda _, name=name: ran.append(f"{name} after"))
    return ran_in_steps(model, ran)


def test_hooks_run_for_the_parameters_that_were_used_and_no_others(worlds: WorldPool):
    names = ["down.weight", "norm.bias", "norm.weight", "up.bias", "up.weight"]
    every = sorted(f"{name} {what}" for name in names for what in ("True", "after"))
    used = [text for text in every if text.startswith("up.")]
    for found in worlds.run(2, hooked_where_unused):
        assert found == [every, every, used]


def hooked_nodes() -> list[list[str]]:
    """Which hooks ran on the nodes at which gradients arrive, and whether they were given one."""
    model = sharded(build())
    ran: list[str] = []
    nodes = []  # autograd lets go of what nobody holds
    for name, param in model[1].named_parameters():
        node = param.expand_as(param).grad_fn.next_functions[0][0]
        node.register_prehook(lambda grads, name=name: ran.append(f"{name} {grads[0] is not None}"))
        node.register_hook(lambda *_, name=name, param=param: ran.append(f"{name} then {param.grad is not None}"))
        nodes.append(node)
    return ran_in_steps(model, ran)


def test_hooks_on_the_nodes_of_parameters_run_for_those_that_were_used(worlds: WorldPool):
    names = ["down.weight", "norm.bias", "norm.weight", "up.bias", "up.weight"]
    every = sorted(f"{name} {what}" for name in names for what in ("True", "then True"))
    used = [text for text in every if text.startswith("up.")]
    for found in worlds.run(2, hooked_nodes):
        assert found == [every, every, used]


def left_of_a_forward() -> list[bool]:
    """Whether what a forward computed is alive, once its result was dropped without a backward."""
    model = sharded(build())
    kept: list[StorageWeakRef] = []
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda _, __, out: kept.append(StorageWeakRef(out.untyped_storage())))
    found = []
    for step in range(3):
        kept.clear()
        out = torch.sigmoid(model(batch(step, dist.get_rank()))).exp()  # which save their results
        del out
        found.append(any(not storage.expired() for storage in kept))
    return found


def test_a_forward_whose_result_is_dropped_leaves_nothing(worlds: WorldPool):
    assert worlds.run(2, left_of_a_forward) == [[False] * 3] * 2


def accumulate(model: Any, ranks: list[int], *, syncs_each: bool) -> list[Tensor]:
    """The weights after steps of two micro-batches, the second one with a penalty on the weights themselves."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        for micro in range(2):
            if isinstance(model, dshard.FSDPModule):
                model.set_requires_gradient_sync(syncs_each or micro == 1)
            losses = [model(batch(10 * step + micro, rank)).square().mean() for rank in ranks]
            penalty = sum(param.square().sum() for param in model.parameters()) if micro else 0.0
            (sum(losses[1:], losses[0]) / len(losses) + 0.01 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def accumulates_as_plain(syncs_each: bool) -> bool:
    own = accumulate(sharded(build()), [dist.get_rank()], syncs_each=syncs_each)
    others = accumulate(build(), list(range(dist.get_world_size())), syncs_each=syncs_each)
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(own, others, strict=True))


@pytest.mark.parametrize("syncs_each", [False, True])
def test_gradients_of_a_forward_and_of_other_uses_add_up_over_micro_batches(worlds: WorldPool, syncs_each):
    assert worlds.run(2, accumulates_as_plain, syncs_each) == [True] * 2


class Noted(nn.Linear):
    """Notes what its weight is in each run of its forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kinds: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kinds.append(type(self.weight).__name__)
        return super().forward(x).tanh()


def runs_again_within(use_reentrant: bool, options: dict[str, Any]) -> tuple[bool, list[str], bool]:
    """A model whose units hold checkpointed modules, beside one whose checkpoints are around them."""
    impl = CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT
    losses, regions = [], []
    for is_within in (True, False):
        torch.manual_seed(0)
        model: Any = nn.Sequential(Noted(), Noted())
        for i in range(2):
            if is_within:
                model[i] = dshard.fully_shard(checkpoint_wrapper(model[i], impl), **options)
            else:
                model[i] = checkpoint_wrapper(dshard.fully_shard(model[i], **options), impl)
            regions.append(model[i]._checkpoint_wrapped_module)
        dshard.fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for step in range(4):
            loss = model(batch(step, dist.get_rank()).requires_grad_()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    del model
    plain = dshard.to_plain(dshard.fully_shard(checkpoint_wrapper(Noted(), impl)))
    hooks = [each._forward_pre_hooks or each._forward_hooks for each in plain.modules()]
    return losses[0] == losses[1], regions[0].kinds, not any(hooks)


@pytest.mark.parametrize("options", [{}, {"mp_policy": HALF}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_within_a_unit_runs_again_finds_full_tensors(worlds: WorldPool, use_reentrant, options):
    for same, kinds, is_left_plain in worlds.run(2, runs_again_within, use_reentrant, options):
        assert same
        assert kinds[2:] == ["UnshardedParameter"] * 6  # in the first step, uses gather
        assert is_left_plain


def gathered_in_forward() -> list[str]:
    model = sharded(build())
    found = []
    for target in (lambda block: block, lambda block: block.up.weight, lambda block: [block.up.weight]):

        def gather(block: Block, target: Callable[[Block], Any] = target) -> None:
            with dshard.gathered(target(block)):
                pass

        model[1].action = lambda block: None
        train(model, range(2), [dist.get_rank()])  # after an exception the first step gathers at uses again
        model[1].action = gather
        try:
            model(batch(2, 0))
        except dshard.StateError as error:
            found.append(str(error))
    return found


def test_to_gather_within_a_forward_says_that_the_full_tensor_is_there(worlds: WorldPool):
    for found in worlds.run(2, gathered_in_forward):
        assert len(found) == 3
        assert all(re.search(r"1\.\w+\.weight is, where it is its full tensor already", text) for text in found), found


class Asking(nn.Linear):
    """Asks for a gradient of its weight within its forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.are_own: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        (grad,) = torch.autograd.grad(y.square().sum(), self.weight, retain_graph=True)
        expected = 2 * y.detach().t() @ x.detach()
        self.are_own.append(not isinstance(grad, ShardedTensor) and torch.allclose(grad, expected, atol=1e-5))
        return y


def asked_within_forwards() -> list[bool]:
    model = nn.Sequential(Asking(), nn.Tanh())
    dshard.fully_shard(model[0])
    train(dshard.fully_shard(model), range(3), [dist.get_rank()])
    return model[0].are_own


def test_a_gradient_that_a_forward_asks_for_is_this_ranks_own_in_all_steps(worlds: WorldPool):
    assert worlds.run(2, asked_within_forwards) == [[True] * 3] * 2


# Writes.


def clamped(how: str) -> Callable[[Block], None]:
    def write(block: Block) -> None:
        if how == "data":
            block.up.weight.data.mul_(0.5)
        elif how == "no_grad":
            with torch.no_grad():
                block.up.weight.mul_(0.5)
        elif how == "masked":
            block.up.weight.data *= 0.5
        else:
            block.up.weight.data = block.up.weight.detach() * 0.5

    return write


def written_in_forward(how: str, options: dict[str, Any], transport: str) -> Any:
    os.environ["DSHARD_TRANSPORT"] = transport
    model = sharded(build(), **options)
    train(model, range(2), [dist.get_rank()])
    before = model[1].up.weight.full_tensor().detach().clone()
    model[1].action = clamped(how)
    try:
        model(batch(2, 0))
    except dshard.StateError as error:
        return str(error)
    return torch.allclose(model[1].up.weight.full_tensor(), before * 0.5)


@pytest.mark.parametrize("how", ["data", "masked", "replaced", "no_grad"])
def test_a_write_in_forward_reaches_the_shards(how):
    with World(2) as world:
        assert world.run(written_in_forward, how, {}, "messages") == [True] * 2


@pytest.mark.parametrize(
    ("how", "options", "transport", "why"),
    [
        ("data", {"mp_policy": HALF}, "messages", "1.up.weight: .* it is a rounded copy"),
        ("no_grad", {}, "memory", "1.up.weight: .* other ranks read the same memory"),
        ("masked", {}, "memory", "1.up.weight: .* other ranks read the same memory"),
    ],
)
def test_a_write_in_forward_that_cannot_reach_them_raises(how, options, transport, why):
    with World(2) as world:
        for text in world.run(written_in_forward, how, options, transport):
            assert isinstance(text, str), text
            assert re.search(why, text), text


def written_late(options: dict[str, Any], transport: str) -> list[str]:
    """What comes of three forwards that write, after two that have not."""
    os.environ["DSHARD_TRANSPORT"] = transport
    model = sharded(build(), **options)
    train(model, range(2), [dist.get_rank()])
    model[1].action, found = clamped("no_grad"), []
    for step in range(2, 5):
        before = model[1].up.weight.full_tensor().detach().clone()
        try:
            model(batch(step, 0))
        except dshard.StateError:
            found.append("raised")
            model.reset_iter_state()
            continue
        found.append("written" if torch.equal(model[1].up.weight.full_tensor(), before * 0.5) else "lost")
    return found


@pytest.mark.parametrize(("options", "transport"), [({"mp_policy": HALF}, "messages"), ({}, "memory")])
def test_a_module_that_begins_to_write_raises_once_and_writes_to_shards_from_then_on(options, transport):
    with World(2) as world:
        assert world.run(written_late, options, transport) == [["raised", "written", "written"]] * 2


class Masked(nn.Linear):
    """Zeroes a part of its weight in each forward, as an autoregressive convolution does."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


class Renormed(nn.Linear):
    """Bounds the rows of its weight in each forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


class Spectral(nn.Linear):
    """Divides its weight by its largest singular value, of which it keeps the vectors in parameters."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.u, self.v = (nn.Parameter(torch.randn(WIDTH), requires_grad=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, u, v = self.weight, self.u, self.v
        v.data = nn.functional.normalize(weight.data.t().mv(u.data), dim=0)
        u.data = nn.functional.normalize(weight.data.mv(v.data), dim=0)
        return nn.functional.linear(x, weight / u.dot(weight.mv(v)), self.bias)


def same_batch(model: Any) -> list[Tensor]:
    """The weights after steps on a batch that all ranks have: a forward more would write once more."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        model(batch(step, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def writes_as_plain(kind: type[nn.Module], options: dict[str, Any], transport: str, tolerance: float) -> bool:
    os.environ["DSHARD_TRANSPORT"] = transport
    torch.manual_seed(0)
    model, plain = (nn.Sequential(kind(), nn.Tanh(), kind()) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    for part in (model[0], model[2]):
        dshard.fully_shard(part, **options)
    own, others = same_batch(dshard.fully_shard(model, **options)), same_batch(plain)
    return all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in zip(own, others, strict=True))


@pytest.mark.parametrize("transport", ["memory", "messages"])
@pytest.mark.parametrize(("options", "tolerance"), [({}, 1e-7), ({"mp_policy": HALF}, 5e-3)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", [Masked, Renormed, Spectral])
def test_a_module_that_writes_to_its_parameters_in_each_forward_trains_as_the_plain_one(
    kind, options, tolerance, transport
):
    with World(2) as world:
        assert world.run(writes_as_plain, kind, options, transport, tolerance) == [True] * 2


class Tying(nn.Module):
    """Ties its weights in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.head.weight = self.embed.weight
        return self.head(self.embed(x.abs().long().clamp(max=WIDTH - 1)))


def ties_as_plain() -> list[bool]:
    torch.manual_seed(0)
    model, plain = Tying(), Tying()
    plain.load_state_dict(model.state_dict())
    own, others = same_batch(dshard.fully_shard(model)), same_batch(plain)
    same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(own, others, strict=True))
    return [same, model.head.weight is model.embed.weight, isinstance(model.head.weight, ShardedTensor)]


def test_a_full_tensor_that_a_forward_registers_is_the_parameter(worlds: WorldPool):
    assert worlds.run(2, ties_as_plain) == [[True] * 3] * 2


def frozen_in_forward() -> list[bool]:
    model = sharded(build())
    train(model, range(2), [dist.get_rank()])

    def freeze(block: Block) -> None:
        block.up.weight.requires_grad = False

    model[1].action = freeze
    model(batch(2, 0)).sum().backward()
    model.zero_grad()
    model(batch(3, 0)).sum().backward()
    return [model[1].up.weight.requires_grad, model[1].up.weight.grad is None, model[1].up.bias.grad is None]


def test_requires_grad_that_is_set_in_a_forward_is_the_parameters(worlds: WorldPool):
    assert worlds.run(2, frozen_in_forward) == [[False, True, False]] * 2


HOW = {"resharded": {}, "kept": {"reshard_after_forward": False}, "ddp": {"strategy": "ddp"}}
WEIGHT, BIAS = "1.down.weight", "1.up.bias"


def written_before_backward(how: str, name: str, num_forwards: int, is_frozen: bool = False) -> str:
    """What a backward says whose parameter was written to behind its forward, and maybe used by another one since."""
    model = sharded(build(), **HOW[how])
    model[1].requires_grad_(not is_frozen)
    train(model, range(2), [dist.get_rank()])
    loss = model(batch(2, 0)).sum()
    with torch.no_grad():
        model.get_parameter(name).mul_(2.0)
    for _ in range(num_forwards - 1):
        model(batch(2, 0)).sum().backward()
    try:
        loss.backward()
    except RuntimeError as error:
        model.reset_iter_state()
        return str(error)
    return "nothing"


@pytest.mark.parametrize("num_forwards", [1, 2])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_weight_that_is_written_between_forward_and_backward_is_named(
    worlds: WorldPool, num_ranks, how, num_forwards
):
    for text in worlds.run(num_ranks, written_before_backward, how, WEIGHT, num_forwards):
        assert text.startswith(f"{WEIGHT}: ") or num_ranks == 1 or how == "ddp"  # else autograd notices it by itself
        assert "has been modified by an inplace operation" in text


@pytest.mark.parametrize("how", HOW)
def test_a_bias_may_be_written_between_forward_and_backward_as_in_plain_pytorch(worlds: WorldPool, how):
    assert worlds.run(2, written_before_backward, how, BIAS, 1) == ["nothing"] * 2


def gradients_beside_writes(how: str) -> bool:
    """Whether gradients are of the forward's values, where a step was taken on what its backward does not use."""
    model, plain = sharded(build(), **HOW[how]), build()
    train(model, range(2), [dist.get_rank()])
    plain.load_state_dict({name: value.full_tensor().clone() for name, value in model.state_dict().items()})
    losses = [each(batch(2, rank)).sum() for each, rank in ((model, dist.get_rank()), (plain, 0), (plain, 1))]
    with torch.no_grad():
        for each in (model, plain):
            each.get_parameter(BIAS).mul_(2.0)
    losses[0].backward()
    (sum(losses[1:]) / 2).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return all(torch.allclose(a.grad.full_tensor(), b.grad, atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("how", HOW)
def test_gradients_are_of_the_values_of_the_forward(worlds: WorldPool, how):
    assert worlds.run(2, gradients_beside_writes, how) == [True] * 2


def clamping(num_before: int, num: int) -> Callable[[Block], None]:
    """What clamps a weight in `num` forwards after others."""
    forwards = count()

    def clamp(block: Block) -> None:
        if num_before <= next(forwards) < num_before + num:
            block.up.weight.data.clamp_(-0.1, 0.1)

    return clamp


def clamped_in_some_forwards(how: str) -> bool:
    """Whether a module that writes to its weight ahead of its use, in its third step, trains as the plain one."""
    host_values, copies.HostValues = copies.HostValues, lambda: None  # memory that hosts share must not be written to
    try:
        results = []
        for model, ranks in ((sharded(build(), **HOW[how]), [dist.get_rank()]), (build(), [0, 1])):
            model[1].action = clamping(2 * len(ranks), len(ranks))
            results.append(train(model, range(4), ranks))
    finally:
        copies.HostValues = host_values
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("how", ["resharded", "kept"])
def test_a_module_may_write_to_its_weight_in_a_later_forward(worlds: WorldPool, how):
    assert worlds.run(2, clamped_in_some_forwards, how) == [True] * 2


def hooks_left_on_an_input(how: str, is_frozen: bool) -> list[int]:
    """How many hooks an input has after each of some backwards in which no parameter gets a gradient."""
    model = sharded(build().requires_grad_(not is_frozen), **HOW[how])
    x, found = batch(0, 0).requires_grad_(), []
    for _ in range(4):
        torch.autograd.grad(model(x).square().sum(), x)
        found.append(len(x._backward_hooks or ()))
    return found


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_a_backward_to_an_input_alone_ends_as_others_do(worlds: WorldPool, how, is_frozen):
    assert worlds.run(2, hooks_left_on_an_input, how, is_frozen) == [[0] * 4] * 2


@pytest.mark.parametrize("how", HOW)
def test_a_frozen_weight_that_is_written_between_forward_and_backward_is_told_of(worlds: WorldPool, how):
    for text in worlds.run(2, written_before_backward, how, WEIGHT, 1, True):
        assert "has been modified by an inplace operation" in text


def num_packed(how: str) -> int:
    """How many tensors autograd gives to hooks in a forward."""
    model = sharded(build(), **HOW[how])
    train(model, range(2), [dist.get_rank()])
    push, counts = torch._C._autograd._push_saved_tensors_default_hooks, [0]

    def counting(pack, unpack):
        def counted(tensor):
            counts[0] += 1
            return pack(tensor)

        push(counted, unpack)

    torch._C._autograd._push_saved_tensors_default_hooks = counting
    try:
        model(batch(2, 0)).sum().backward()
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks = push
    return counts[0]


def test_no_hooks_are_where_nothing_is_resharded(worlds: WorldPool):
    assert [worlds.run(2, num_packed, how)[0] > 0 for how in HOW] == [True, False, False]


def kept_past_the_forward() -> bool:
    """A full tensor that a program keeps stays what it is, whatever comes after."""
    model = sharded(build())
    train(model, range(2), [dist.get_rank()])
    kept: list[Tensor] = []
    model[1].action = lambda block: kept.append(block.up.weight.detach())
    model(batch(2, 0)).sum().backward()
    model[1].action = None
    before = kept[0].clone()
    train(model, range(2, 5), [dist.get_rank()])
    return torch.equal(kept[0], before)


def test_a_full_tensor_that_is_kept_stays_what_it_is(worlds: WorldPool):
    assert worlds.run(2, kept_past_the_forward) == [True] * 2


class Noisy(nn.Module):
    """Draws noise like its weight."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.draw, self.noise = nn.Parameter(torch.ones(8, 8)), draw, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        noise: Any = self.draw(self.weight)
        self.noise = (noise.full_tensor() if isinstance(noise, dshard.ShardedTensor) else noise).detach().clone()
        return x @ (self.weight + 0.1 * noise)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": torch.randn_like,
    "normal_": lambda weight: torch.empty_like(weight).normal_(),
    "uniform_": lambda weight: torch.zeros_like(weight).uniform_(),
    "dropout": lambda weight: nn.functional.dropout(weight, 0.5),
}


def noises(how: str, checkpoints: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Noisy(DRAWS[how]), nn.Tanh(), Noisy(DRAWS[how]))
    dshard.fully_shard(model[0])
    dshard.fully_shard(model)
    torch.manual_seed(10 + dist.get_rank())
    found = []
    for _ in range(3):
        x = torch.ones(1, 8, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=False) if checkpoints else model(x)
        in_forward = [model[0].noise, model[2].noise]
        y.sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(in_forward, [model[0].noise, model[2].noise], strict=True))
        found += in_forward
    return found


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("how", DRAWS)
def test_noise_of_a_forward_is_each_ranks_own_from_the_first_step_on(worlds: WorldPool, how, checkpoints):
    first, second = worlds.run(2, noises, how, checkpoints)
    assert [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if torch.equal(a, b)] == []
