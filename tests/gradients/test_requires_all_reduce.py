"""Gradient accumulation over replicas that are all-reduced with the last micro-batch: `set_requires_all_reduce`."""

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dshard
from dshard.gradients.reducer import Reducer
from dshard.testing import WorldPool
from tests.collectives.test_native_backends import native

pytestmark = pytest.mark.slow
NUM_RANKS = 4


class Spared(nn.Linear):
    """A layer with a weight that some ranks alone use."""

    def __init__(self) -> None:
        super().__init__(7, 6)
        self.spare = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        x = torch.tanh(super().forward(x))
        return x * self.spare if uses else x


class Net(nn.Module):
    """Units of uneven sizes; some ranks alone use a spare weight, and a scale in a bucket of its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 7), Spared(), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64))
        self.shift = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, uses: bool, skips: bool = False) -> Tensor:
        x = torch.tanh(self.first(x))
        x = self.third(x[:, :6] if skips else self.second(x, uses))
        return (x * self.scale.sum().float() if uses else x) + self.shift


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def build(shape: tuple[int, int] | None = (2, 2), fully_shard: Any = dshard.fully_shard, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    if shape is not None:
        for layer in (model.first, model.second, model.third):
            fully_shard(layer, mesh=mesh_of(shape), **options)
        fully_shard(model, mesh=mesh_of(shape), **options)
    return model


def batch(micro: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * micro + rank))


def backward(model: Any, plain: Any, micro: int, uses: tuple[bool, ...] = (True,) * 4, skips: bool = False) -> None:
    """One micro-batch, of this rank's data and of all."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model(batch(micro, rank), uses[rank], skips).square().sum().backward()
    for r in range(num_ranks):
        (plain(batch(micro, r), uses[r], skips).square().sum() / num_ranks).backward()


def check(model: Any, plain: Any, rtol: float = 1e-4) -> None:
    """All gradients are those of one process. The first one read of a unit reduces all of it."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.to_local()
    for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (expected.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), expected.grad, rtol=rtol, atol=rtol / 10, msg=name)


# --- what travels ----------------------------------------------------------------------------------------------------


def sent(num_micro: int, puts_off: bool) -> dict[str, tuple[int, int]]:
    model, plain = build(), build(None)
    with dshard.CommTrace() as trace:
        for micro in range(num_micro):
            model.set_requires_all_reduce(not puts_off or micro == num_micro - 1)
            backward(model, plain, micro)
    kinds = ("reduce_scatter", "all_reduce")
    found = {kind: (trace.calls(kind), sum(r.total_bytes for r in trace.select(kind))) for kind in kinds}
    check(model, plain)
    return found


def test_n_micro_batches_send_between_replicas_what_one_does(worlds: WorldPool):
    once, late, always = (worlds.run(NUM_RANKS, sent, *case) for case in ((1, False), (3, True), (3, False)))
    for one, some, every in zip(once, late, always, strict=True):
        assert some["all_reduce"] == one["all_reduce"]
        assert one["all_reduce"][0] == 5  # buckets: one of each layer, two of the root
        assert some["reduce_scatter"] == every["reduce_scatter"] == tuple(3 * n for n in one["reduce_scatter"])
        assert every["all_reduce"] == tuple(3 * n for n in one["all_reduce"])


# --- against FSDP2 ---------------------------------------------------------------------------------------------------

PRECISIONS = {
    "fp32": (None, None),
    "reduce bf16": (None, torch.bfloat16),
    "compute bf16": (torch.bfloat16, torch.float32),
    "both bf16": (torch.bfloat16, torch.bfloat16),
}


class Even(nn.Module):
    """What FSDP2 takes, too: one dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def accumulate(fully_shard: Any, precision: str, puts_off: bool) -> list[Tensor]:
    """Gradients after each of two rounds of three micro-batches, with a step between them."""
    param, reduce = PRECISIONS[precision]
    model: Any = Even()
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh_of((2, 2)), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(2):
        for micro in range(3):
            model.set_requires_all_reduce(not puts_off or micro == 2)
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
            model(torch.randn(4, 8, generator=generator)).float().square().sum().backward()
        found += [p.grad.full_tensor() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_gradients_are_those_of_fsdp2_and_of_an_all_reduce_each_time(worlds: WorldPool, precision):
    ours = worlds.run(NUM_RANKS, accumulate, dshard.fully_shard, precision, True)
    fsdp2 = worlds.run(NUM_RANKS, accumulate, torch_fully_shard, precision, True)
    each = worlds.run(NUM_RANKS, accumulate, dshard.fully_shard, precision, False)
    rtol = 1e-5 if torch.bfloat16 not in PRECISIONS[precision] else 3e-2
    for others in (fsdp2, each):
        for got, want in zip(ours, others, strict=True):
            for a, b in zip(got, want, strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


# --- any program -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Op:
    """A micro-batch, or what a program does between two.

    Args:
        kind: 'backward', or something between.
        all_reduces: As `set_requires_all_reduce` is called ahead of a micro-batch.
        syncs: As `set_requires_gradient_sync` is.
        uses: Which ranks use the spare weight and the scale.
        skips: Whether no rank uses the second unit.
    """

    kind: str
    all_reduces: bool = True
    syncs: bool = True
    uses: tuple[bool, ...] = (True,) * NUM_RANKS
    skips: bool = False


BETWEEN = ["zero_grad", "zero", "read", "clip", "step", "captured", "freeze", "eval"]


@st.composite
def ops(draw: st.DrawFn) -> Op:
    if draw(st.integers(0, 2)) == 0:
        return Op(draw(st.sampled_from(BETWEEN)))
    uses = tuple(draw(st.lists(st.booleans(), min_size=NUM_RANKS, max_size=NUM_RANKS)))
    flags = [draw(st.booleans()) for _ in range(2)]
    return Op("backward", flags[0], flags[1] or draw(st.booleans()), uses, draw(st.integers(0, 3)) == 0)


def looks_at_gradients(kind: str, model: Any, optimizers: list[torch.optim.Optimizer], plain: Any) -> None:
    if kind == "zero":
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
    elif kind == "read":
        check(model, plain)
    elif kind == "clip":
        for m in (model, plain):
            dshard.clip_grad_norm_(m.parameters(), 0.5)
    else:
        for optimizer in optimizers:
            optimizer.step()


def run_between(kind: str, model: Any, plain: Any, optimizers: list[torch.optim.Optimizer], place: int) -> None:
    if kind == "zero_grad":
        for optimizer in optimizers:
            optimizer.zero_grad()
    elif kind == "freeze":
        for m in (model, plain):
            m.first.bias.requires_grad_(not m.first.bias.requires_grad)
    elif kind == "eval":
        with torch.no_grad():
            model(batch(place, 0), True)
    elif kind == "captured":  # gradients that nobody accumulates
        weight = [model.first.weight, plain.first.weight]
        got = torch.autograd.grad(model(batch(place, dist.get_rank()), True).square().sum(), weight[0])[0]
        want = sum(
            torch.autograd.grad(plain(batch(place, r), True).square().sum(), weight[1])[0] / NUM_RANKS
            for r in range(NUM_RANKS)
        )
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-4, atol=1e-5)
    elif knows_all(model):
        looks_at_gradients(kind, model, optimizers, plain)
    elif owed_on_some(model):
        with pytest.raises(
            dshard.StateError, match=r"^(scale|second.spare|second.weight|\w+.\w+): a gradient can be used ahead"
        ):
            looks_at_gradients(kind, model, optimizers[:1], model)
    # else without sync: what one rank alone has a gradient of is not reduced yet


def owed_on_some(model: Any) -> bool:
    """Whether some ranks alone have gradients whose all-reduce was put off."""
    mine = sorted(one for r in model._context().get(Reducer).open if r.owes for one in r.presence())
    every: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(every, mine)
    return any(other != mine for other in every)


def knows_all(model: Any) -> bool:
    """Whether all ranks have gradients of the same parameters."""
    mine = [p.grad is not None for p in model.parameters()]
    every: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(every, mine)
    return all(other == mine for other in every)


def run_program(program: list[Op], is_native: bool = False) -> None:
    with native() if is_native else contextlib.nullcontext():
        model, plain = build(), build(None)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
        for place, op in enumerate([*program, Op("backward")]):
            if op.kind == "backward":
                model.set_requires_all_reduce(op.all_reduces)
                model.set_requires_gradient_sync(op.syncs)
                backward(model, plain, place, op.uses, op.skips)
            else:
                run_between(op.kind, model, plain, optimizers, place)
        check(model, plain)


NO_ONE, LAST = (False,) * NUM_RANKS, (False, False, False, True)


# Found: a gradient that nobody accumulates waited for what others owe; what one rank alone had added up unreduced
# came behind a write of the others.
@example([Op("backward", False, True, NO_ONE, True), Op("backward", False, False, LAST, True), Op("captured")], False)
@example([Op("backward", True, True, LAST, True), Op("backward", False, False, LAST, True), Op("zero")], False)
@settings(max_examples=30)
@given(program=st.lists(ops(), min_size=2, max_size=7), is_native=st.booleans())
def test_any_program_has_the_gradients_of_one_process(worlds: WorldPool, program, is_native):
    worlds.run(NUM_RANKS, run_program, program, is_native)


# --- by themselves ---------------------------------------------------------------------------------------------------

ONE_REPLICA = (True, True, False, False)


def used_by_one_replica() -> list[str]:
    """What a read says while another replica knows of no gradient; then the last micro-batch, and all are there."""
    model, plain = build(), build(None)
    model.set_requires_all_reduce(False)
    backward(model, plain, 0, ONE_REPLICA)
    texts = []
    for read in (lambda: model.shift.grad.to_local(), lambda: dshard.clip_grad_norm_(model.parameters(), 1.0)):
        with pytest.raises(dshard.StateError) as raised:
            read()
        texts.append(str(raised.value))
    model.set_requires_all_reduce(True)
    backward(model, plain, 1, (False,) * 4)
    assert model.second.spare.grad is not None
    check(model, plain)
    return texts


def test_a_gradient_that_one_replica_alone_knows_of_can_be_read_after_the_all_reduce_only(worlds: WorldPool):
    for texts in worlds.run(NUM_RANKS, used_by_one_replica):
        for text in texts:
            assert text == (
                "second.spare: a gradient can be used ahead of its all-reduce over replicas if all ranks have one, but "
                "some have none yet, nor of 1 other parameters. Call set_requires_all_reduce(True) ahead of the last "
                "backward of a step."
            )


def dropped_between() -> None:
    """What `zero_grad` dropped comes back neither by ranks that had it nor by those that had not."""
    model, plain = build(), build(None)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    model.set_requires_all_reduce(False)
    backward(model, plain, 0, ONE_REPLICA)
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(model, plain, 1, (False,) * 4)
    model.set_requires_all_reduce(True)
    backward(model, plain, 2, (False,) * 4)
    assert model.second.spare.grad is None
    check(model, plain)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    backward(model, plain, 3)
    check(model, plain)


def test_gradients_dropped_between_micro_batches_are_not_all_reduced(worlds: WorldPool):
    worlds.run(NUM_RANKS, dropped_between)


def raise_once(model: Any) -> None:
    """A backward that ends in the middle, once the last layer has its gradients."""

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    hook = model.second.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    with pytest.raises(ZeroDivisionError):
        model(batch(7, dist.get_rank()), True).square().sum().backward()
    hook.remove()


def interrupted(place: int, drops: bool) -> None:
    """An exception in one of three micro-batches; what it had added is dropped, or stays as in the plain model."""
    model, plain = build(), build(None)
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        if micro == place:
            raise_once(model)
            if drops:
                model.zero_grad()
                plain.zero_grad()
            else:
                late = [plain.third.weight, plain.third.bias, plain.scale, plain.shift]
                losses = [plain(batch(7, r), True).square().sum() / NUM_RANKS for r in range(NUM_RANKS)]
                torch.autograd.backward(losses, inputs=late)
        backward(model, plain, micro)
    with dshard.CommTrace() as trace:
        check(model, plain)
    if place:  # the last micro-batch all-reduced what had left ahead of the exception, too
        assert not trace.calls("all_reduce", "third")


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("drops", [True, False])
def test_an_exception_in_a_micro_batch_leaves_what_it_leaves_in_a_plain_model(worlds: WorldPool, place, drops):
    worlds.run(NUM_RANKS, interrupted, place, drops)


def hooked() -> tuple[int, int]:
    """How often a hook on the all-reduce runs, and whether one of a parameter gets the full gradient of a backward."""
    model, plain = build(), build(None)
    calls: list[int] = []
    seen: list[list[Tensor]] = [[], []]
    model.third.set_all_reduce_hook(lambda row: calls.append(row.numel()))
    for m, kept in ((model, seen[0]), (plain, seen[1])):
        m.first.weight.register_hook(lambda grad, kept=kept: kept.append(getattr(grad, "full_tensor", grad.clone)()))
    with dshard.CommTrace() as trace:
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            backward(model, plain, micro)
    check(model, plain)
    for micro, got in enumerate(seen[0]):
        torch.testing.assert_close(got, sum(seen[1][micro * NUM_RANKS : (micro + 1) * NUM_RANKS]), rtol=1e-4, atol=1e-5)
    return len(calls), trace.calls("all_reduce", "first")


def test_hooks_see_what_is_all_reduced(worlds: WorldPool):
    assert worlds.run(NUM_RANKS, hooked) == [(1, 3)] * NUM_RANKS


def put_off_in_one_unit() -> list[int]:
    model, plain = build(), build(None)
    model.second.set_requires_all_reduce(False)
    model.set_requires_all_reduce(False, recurse=False)
    with dshard.CommTrace() as trace:
        backward(model, plain, 0)
    counts = [trace.calls("all_reduce", label) for label in ("first", "second", "third", "Net")]
    with dshard.CommTrace() as trace:
        check(model, plain)
    return counts + [trace.calls("all_reduce", label) for label in ("first", "second", "third", "Net")]


def test_it_is_a_modules_own_and_a_read_all_reduces_what_is_owed(worlds: WorldPool):
    assert worlds.run(NUM_RANKS, put_off_in_one_unit) == [[1, 0, 1, 0, 0, 1, 0, 2]] * NUM_RANKS


def hooked_on_one_replica() -> None:
    model, plain = build(), build(None)
    model.second.spare.register_hook(lambda grad: None)
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        backward(model, plain, micro, ONE_REPLICA)
    check(model, plain)


def test_a_hook_of_a_parameter_that_one_replica_uses_starts_nothing_there_alone(worlds: WorldPool):
    worlds.run(NUM_RANKS, hooked_on_one_replica)


def over_one_dim() -> tuple[int, int]:
    """A mesh without replicas: nothing can be put off."""
    model, plain = build((1, 4)), build(None)
    model.set_requires_all_reduce(False)
    with dshard.CommTrace() as trace:
        backward(model, plain, 0)
    num_owed = len(model._context().get(Reducer).open)
    check(model, plain)
    return trace.calls("reduce_scatter"), num_owed


def test_without_replicas_it_changes_nothing(worlds: WorldPool):
    assert worlds.run(NUM_RANKS, over_one_dim) == [(5, 0)] * NUM_RANKS


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_replicas_of_whole_models_add_up_before_they_are_all_reduced(worlds: WorldPool, num_ranks):
    """Data parallelism over a mesh of shape (N, 1)."""
    found = worlds.run(num_ranks, sent_by_whole_models)
    assert found == [found[0]] * num_ranks
    assert found[0] == 5


def sent_by_whole_models() -> int:
    model, plain = build((dist.get_world_size(), 1)), build(None)
    with dshard.CommTrace() as trace:
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            backward(model, plain, micro)
    check(model, plain)
    return trace.calls("all_reduce")
