"""`fully_shard(plan=)` has each unit keep for backward what the plan says, with the same bits."""

import warnings
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import dshard
from dshard.cli.models import GPT
from dshard.planner import DEVICES, Training, cluster_of
from dshard.planning.plan import Profile
from dshard.policies import Strategy
from dshard.setup.planned import checkpoint_as_planned
from dshard.testing import WorldPool
from tests.planning import small
from tests.planning.small import losses, tokens

TITAN = DEVICES["titan-rtx"]
MODES = ("none", "selective", "full")
STRATEGIES = ("full", "ddp", "keep", "zero1", "zero2", "split(2)")


@dataclass(frozen=True, slots=True)
class Planned(dshard.Plan):
    """A plan with a mode per unit."""

    checkpointing: tuple[str, ...] = ()


def build(*, tie: bool = False) -> GPT:
    return small.build(tie=tie, num_layers=6)


def plan_of(model: nn.Module, modes: tuple[str, ...], strategies: tuple[str, ...] = ("full",)) -> Any:
    """Modes and strategies unit after unit, from the first again when they are used up; "none" for the root."""
    plan = Profile(model, tokens(), device=TITAN, training=Training()).given(
        cluster_of(TITAN, dist.get_world_size()), "full"
    )
    given = {field.name: getattr(plan, field.name) for field in fields(plan) if field.init}
    units = plan.model.units
    given["strategies"] = tuple(Strategy.of(strategies[i % len(strategies)]) for i in range(len(units)))
    given["checkpointing"] = tuple(
        "none" if "" in unit.modules else modes[i % len(modes)] for i, unit in enumerate(units)
    )
    return Planned(**given)


def train(modes: tuple[str, ...], strategies: tuple[str, ...], compiles: str = "", **kind: Any) -> Any:
    """Losses of three steps, and which blocks' forwards are their own."""
    warnings.simplefilter("ignore")
    model = build(**kind)
    names = list(model.state_dict())
    plan = plan_of(model, modes, strategies)
    for block in model.blocks if compiles == "before" else ():
        block.compile(backend="aot_eager", fullgraph=True)
    dshard.fully_shard(model, plan=plan)
    for block in model.blocks if compiles == "after" else ():
        block.compile(backend="aot_eager", fullgraph=True)
    assert list(model.state_dict()) == names
    found = losses(model, dist.get_rank())
    return found, ["forward" in vars(block) for block in model.blocks]


@pytest.mark.parametrize("kind", [{}, {"tie": True}], ids=["plain", "tied"])
def test_every_mix_of_modes_and_strategies_trains_to_the_same_bits(worlds: WorldPool, kind):
    for strategies in (("full",), STRATEGIES, STRATEGIES[::-1]):
        (expected, own), _ = worlds.run(2, train, ("none",), strategies, **kind)
        assert own == [False] * 6
        for modes in (("full",), ("selective",), MODES):
            (losses, own), _ = worlds.run(2, train, modes, strategies, **kind)
            assert losses == expected
            assert any(own)
            assert all(own) is (len(modes) == 1)


@pytest.mark.parametrize("compiles", ["before", "after"])
def test_blocks_that_are_compiled_train_to_the_same_bits(worlds: WorldPool, compiles):
    (expected, _), _ = worlds.run(2, train, ("none",), ("full", "keep"), "", timeout_s=240.0)
    for modes in (("full",), ("selective",), MODES):
        (losses, own), _ = worlds.run(2, train, modes, ("full", "keep"), compiles, timeout_s=240.0)
        assert losses == expected
        assert any(own)


def refusals() -> list[str]:
    """What plans are told whose modes cannot be followed, each of them ahead of any change."""
    told = []
    model = build(tie=True)
    plan = plan_of(model, ("full",))
    given = {field.name: getattr(plan, field.name) for field in fields(plan) if field.init}
    root = next(i for i, unit in enumerate(plan.model.units) if "" in unit.modules)
    modes = plan.checkpointing
    wrapped = build(tie=True)
    wrapped.blocks[2] = checkpoint_wrapper(wrapped.blocks[2])
    for net, changed in (
        (model, modes[1:]),
        (model, ("some", *modes[1:])),
        (model, (*modes[:root], "full", *modes[root + 1 :])),
        (wrapped, modes),
    ):
        with pytest.raises(dshard.DShardError) as caught:
            dshard.fully_shard(net, plan=Planned(**{**given, "checkpointing": changed}))
        told.append(str(caught.value))
        assert not isinstance(net, dshard.FSDPModule)
        assert not any("forward" in vars(block) for block in net.blocks)
    dshard.fully_shard(wrapped, plan=Planned(**{**given, "checkpointing": ("none",) * len(modes)}))
    return told


def test_modes_that_cannot_be_followed_are_refused_ahead_of_any_change(worlds: WorldPool):
    (told, _) = worlds.run(2, refusals)
    starts = (
        r"fully_shard: a plan's checkpointing must be one of none, selective, full for each of its \d+ units, but it",
        r".* modes, and one is 'some'\. Plan again\.",
        r"fully_shard: the whole model must not be checkpointed, .*'full'",
        r"blocks\.2: a module is checkpointed once, but this one is already, by torch's checkpoint_wrapper",
    )
    for text, start in zip(told, starts, strict=True):
        with pytest.raises(ValueError, match=start):
            raise ValueError(text)


def diverging() -> str:
    model = build()
    plan = plan_of(model, ("full",) if dist.get_rank() else ("selective",))
    with pytest.raises(dshard.DivergenceError) as caught:
        dshard.fully_shard(model, plan=plan)
    return str(caught.value)


def test_ranks_whose_plans_have_other_modes_are_told(worlds: WorldPool):
    for text in worlds.run(2, diverging):
        assert "plan" in text
        assert "'full' checkpointing" in text or "'selective' checkpointing" in text


def saved_and_loaded(path: str) -> list[str]:
    """Parameters that differ when what one plan's model saved another plan's model has loaded."""
    models = []
    for modes in (("full", "selective"), ("none",), ("selective",)):
        model = build()
        dshard.fully_shard(model, plan=plan_of(model, modes))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if models:
            dshard.checkpoint.load(path, model, optimizer)
        for step in range(1 if models else 2):
            x = tokens(10 * (step + bool(models)) + dist.get_rank())
            if step:
                dshard.checkpoint.save(path, model, optimizer)
            nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    first, *others = [dict(model.named_parameters()) for model in models]
    pairs = [(name, p, first[name]) for other in others for name, p in other.items()]
    return [name for name, p, q in pairs if not torch.equal(p.full_tensor(), q.full_tensor())]


def test_a_checkpoint_of_one_plan_is_loaded_under_another(worlds: WorldPool, tmp_path):
    assert worlds.run(2, saved_and_loaded, str(tmp_path / "saved")) == [[], []]


def test_a_plan_without_modes_changes_nothing():
    class Units:
        units = ()

    class Old:
        model = Units()

    model = build()
    checkpoint_as_planned(model, Old())
    assert not any("forward" in vars(module) for module in model.modules())
