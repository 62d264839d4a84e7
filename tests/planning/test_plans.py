"""`fully_shard(plan=)`: a model is cut and gathered as its plan says, and trains to the same bits as any other way."""

import gc
import logging
import pickle
import time
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import dshard
from dshard.cli.models import GPT
from dshard.optimizer.steps import num_listeners
from dshard.planner import DEVICES, Training, cluster_of
from dshard.planning.plan import Profile
from dshard.policies import Strategy
from dshard.runtime.runtime import runtime_of
from dshard.testing import WorldPool
from tests.planning import small
from tests.planning.small import losses, tokens

TITAN = DEVICES["titan-rtx"]
KINDS = ("ddp", "zero1", "zero2", "keep", "full")


def build(*, tie=False, shares=False):
    model = small.build(tie=tie)
    if shares:  # what two blocks hold is left to the root
        model.blocks[2].mlp.up = model.blocks[1].mlp.up
    return model


def plan_of(model, strategies):
    """The given strategies, unit after unit, from the first again when they are used up."""
    profile = Profile(model, tokens(), device=TITAN, training=Training())
    plan = profile.given(cluster_of(TITAN, dist.get_world_size()), "full")
    given = tuple(Strategy.of(strategies[i % len(strategies)]) for i in range(len(plan.strategies)))
    return replace(plan, strategies=given)


def train(strategies, **kind):
    """Losses of three steps under a plan, whose units and strategies are those that the model gets."""
    model = build(**kind)
    plan = plan_of(model, strategies)
    dshard.fully_shard(model, plan=dshard.Plan.from_json(plan.to_json()))
    assert model._dshard_units[0].model.split is None  # no units are looked for: they are the plan's
    found = losses(model, dist.get_rank())
    units = list(dict.fromkeys(u for m in model.modules() for u in vars(m).get("_dshard_units", ())))
    whole = {name: p.to_local().numel() == p.numel() for name, p in model.named_parameters()}
    assert whole == {name: str(strategy) == "ddp" for name, strategy in plan.by_parameter.items()}
    made = {(u.settings.strategy, frozenset(id(p) for p in u.params)) for u in units if u.params}
    names = dict(model.named_parameters())
    asked = {
        (str(strategy), frozenset(id(names[name]) for name in unit.param_names))
        for unit, strategy in zip(plan.model.units, plan.strategies, strict=True)
    }
    assert made == asked
    return found


@pytest.mark.parametrize("kind", [{}, {"tie": True}, {"shares": True}], ids=["plain", "tied", "shared"])
def test_every_mix_of_strategies_that_a_plan_may_have_trains_to_the_same_bits(worlds: WorldPool, kind):
    expected = worlds.run(2, train, ("full",), **kind)
    for strategies in (KINDS, KINDS[::-1], ("full", "ddp"), ("keep", "full", "zero1")):
        assert worlds.run(2, train, strategies, **kind) == expected


def train_planned():
    """A plan that dshard found, within a limit that all of one kind would exceed."""
    model = build()
    profile = Profile(model, tokens(), device=TITAN, training=Training())
    cluster = cluster_of(TITAN, dist.get_world_size())
    ddp, full = profile.given(cluster, "ddp").peak_bytes, profile.given(cluster, "full").peak_bytes
    plan = profile.plan(cluster, memory=(ddp + full) // 2, strategies=KINDS)
    assert plan.peak_bytes <= (ddp + full) // 2
    dshard.fully_shard(model, plan=plan)
    model(tokens()).sum().backward()
    return [str(strategy) for strategy in plan.strategies]


def test_ranks_that_plan_alike_have_one_plan(worlds: WorldPool):
    first, second = worlds.run(2, train_planned)
    assert first == second


def nested():
    torch.manual_seed(0)
    lists = (nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4))
    return nn.Sequential(nn.Embedding(64, 32), *lists, nn.Linear(32, 64))


def wrapped(model):
    """The same model, whose blocks, and one layer outside of them, compute their forward again in backward."""
    kinds = (type(model.blocks[0]), nn.LayerNorm) if isinstance(model, GPT) else (nn.Sequential,)
    children = list(model.named_modules())
    outermost = [module for name, module in children if isinstance(module, kinds) and name.count(".") < 2 and name]
    apply_activation_checkpointing(model, check_fn=lambda module: module in outermost)
    assert any("_checkpoint_wrapped_module." in name for name, _ in model.named_parameters())
    return model


def train_wrapped(make, of_plan, of_model):
    """Losses under a plan for what `of_plan` makes of the model, of what `of_model` makes of it; and what is whole."""
    plan = plan_of(of_plan(make()), ("full", "ddp", "keep"))
    model = of_model(make())
    names = [name for name, _ in model.named_parameters()]
    dshard.fully_shard(model, plan=plan)
    assert [name for name, _ in model.named_parameters()] == names
    found = losses(model, dist.get_rank(), num_steps=2)
    whole = [p.to_local().numel() == p.numel() for p in model.parameters()]
    assert whole == [str(strategy) == "ddp" for strategy in plan.by_parameter.values()]
    return found, whole


@pytest.mark.parametrize("make", [build, nested])
def test_a_plan_fits_the_same_model_with_and_without_checkpoint_wrappers(worlds: WorldPool, make):
    expected = worlds.run(2, train_wrapped, make, as_it_is, as_it_is)
    assert {True, False} == set(expected[0][1])
    for of_plan, of_model in ((as_it_is, wrapped), (wrapped, as_it_is), (wrapped, wrapped), (as_it_is, wrapped_whole)):
        assert worlds.run(2, train_wrapped, make, of_plan, of_model) == expected


def as_it_is(model):
    return model


def wrapped_whole(model):
    return checkpoint_wrapper(wrapped(model))


def compiled_blocks():
    """Whether a plan of the plain model fits the one whose blocks are compiled."""
    plan, model = plan_of(build(), ("full", "ddp")), build()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="eager")
    dshard.fully_shard(model, plan=plan)
    whole = {name.replace("_orig_mod.", ""): p.to_local().numel() == p.numel() for name, p in model.named_parameters()}
    return whole == {name: str(strategy) == "ddp" for name, strategy in plan.by_parameter.items()}


def test_a_plan_fits_the_same_model_with_compiled_blocks(worlds: WorldPool):
    assert worlds.run(2, compiled_blocks) == [True] * 2


def train_from_file(path):
    """Losses of two steps under a plan, given as it is, as the path of its file, and as text."""
    found = []
    plan = plan_of(build(), ("keep", "ddp", "full"))
    if dist.get_rank() == 0:
        plan.save(path)
    dist.barrier()
    for given in (plan, path, str(path)):
        model = build()
        dshard.fully_shard(model, plan=given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(2):
            loss = model(tokens(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        units = [unit for m in model.modules() for unit in vars(m).get("_dshard_units", ()) if unit.params]
        kinds = {str(unit.settings.strategy) for unit in units}
        found.append((losses, kinds, runtime_of(model).plan_report is not None))
    return found


def test_a_plan_may_be_the_path_of_its_file(worlds: WorldPool, tmp_path):
    for of_object, of_path, of_text in worlds.run(2, train_from_file, tmp_path / "plan.json"):
        assert of_object == of_path == of_text
        assert of_object[1] == {"keep", "ddp", "full"}


def refused_file(plan, of_rank=None, writes=None):
    """What fully_shard says to `plan`, of one rank alone if `of_rank` is given; and whether it left the model."""
    model = build()
    given = plan if of_rank in (None, dist.get_rank()) else plan_of(model, ("full",))
    if writes is not None:
        given = plan_of(model, writes[dist.get_rank()])
    try:
        dshard.fully_shard(model, plan=given)
    except dshard.DShardError as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "no error"
    return said, all(type(p) is nn.Parameter for p in model.parameters()) and type(model) is GPT


NO_FILE = (
    "PlanError: fully_shard: plan must be a Plan or the path of a file that Plan.save or dshard plan --out wrote, but "
    "there is no file {path!r}. "
)
NO_PLAN = "ArgumentError: fully_shard: plan must be a Plan, or the path of a file that holds one, or None, but it is "
NO_JSON = "PlanError: fully_shard: {path}: must be a plan as JSON, but "


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("full", NO_FILE + 'Did you mean strategy="full"?'),
        ("hybrid(2)", NO_FILE + 'Did you mean strategy="hybrid(2)"?'),
        ("no/such.json", NO_FILE + "Pass a path that exists."),
        ("here", NO_JSON + "it cannot be read: Is a directory. Pass "),
        ("damaged.json", NO_JSON + "reading it says: Expecting "),
        (
            "config.json",
            NO_JSON + "it is none: a plan has the field 'schema'. Pass what Plan.save or dshard plan --out ",
        ),
        ("binary.pt", NO_JSON + "it is no text"),
        (5, NO_PLAN + "5. Pass what dshard.plan gave."),
        ([], NO_PLAN + "[]. "),
        (b"plan.json", NO_PLAN + "b'plan.json'. "),
        (dshard.Strategy("full"), NO_PLAN + "Strategy(base='full', within=None, num_slices=1). "),
    ],
    ids=str,
)
def test_what_is_no_plan_is_refused_before_anything_is_changed(worlds: WorldPool, tmp_path, plan, message):
    (tmp_path / "here").mkdir()
    (tmp_path / "damaged.json").write_text("{")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "binary.pt").write_bytes(b"\x80\x02\xff")
    path = tmp_path / plan if isinstance(plan, str) and (tmp_path / plan).exists() else plan
    for said, is_untouched in worlds.run(2, refused_file, path):
        assert said.startswith(message.format(path=str(path)))
        assert is_untouched


@pytest.mark.parametrize("of_rank", [0, 1])
def test_a_file_that_one_rank_lacks_is_an_error_of_all(worlds: WorldPool, of_rank):
    found = worlds.run(2, refused_file, "elsewhere.json", of_rank)
    own, other = found[of_rank][0], found[1 - of_rank][0]
    assert own.startswith("PlanError: fully_shard: plan must be a Plan or the path of a file")
    raised = f"rank {of_rank} raised there: PlanError: fully_shard: plan must be a Plan or the path of a file"
    assert other.startswith(f"DivergenceError: fully_shard: all ranks must make the same call, but {raised}")
    assert all(is_untouched for _, is_untouched in found)


def test_ranks_with_different_plans_are_told(worlds: WorldPool):
    for said, is_untouched in worlds.run(2, refused_file, None, None, (("full",), ("full", "ddp"))):
        assert said.startswith("DivergenceError: fully_shard: all ranks must pass the same plan, but number ")
        assert is_untouched


UNITS_OF_NO_MODEL = {
    "all of the root": lambda units: tuple(replace(unit, modules=("",)) for unit in units),
    "modules of another unit": lambda units: tuple(
        replace(unit, modules=other.modules) for unit, other in zip(units, (*units[1:], units[0]), strict=True)
    ),
    "a parameter twice": lambda units: (replace(units[0], params=units[0].params * 2), *units[1:]),
}


def refused(kind):
    """What fully_shard says to a plan that does not fit."""
    model = build()
    plan = plan_of(model, ("full",))
    options = {}
    if kind == "model":
        model = build(tie=True)
    elif kind == "ranks":
        plan = replace(plan, cluster=cluster_of(TITAN, 8))
    elif kind == "strategy":
        options["strategy"] = "ddp"
    elif kind == "no such module":
        first, *rest = plan.model.units
        plan = replace(plan, model=replace(plan.model, units=(replace(first, modules=("lost",)), *rest)))
    elif kind in UNITS_OF_NO_MODEL:
        plan = replace(plan, model=replace(plan.model, units=UNITS_OF_NO_MODEL[kind](plan.model.units)))
    elif kind == "as a strategy":
        options["strategy"], plan = plan, None
    elif kind == "budget":
        options["memory_budget"] = "1GiB"
    elif kind == "reshard":
        options["reshard_after_forward"] = True
    elif kind == "dtype":
        options["mp_policy"] = {"*norm*": None, "*": torch.bfloat16}
    elif kind == "stored":
        model.to(torch.bfloat16)
    elif kind == "frozen":
        model.blocks[0].mlp.requires_grad_(False)
    try:
        dshard.fully_shard([model] if kind == "list" else model, plan=plan, **options)
    except dshard.DShardError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("model", "PlanError: fully_shard: a plan is for the model that it was made for, but the unit of "),
        ("ranks", "PlanError: fully_shard: a plan is for one model on the ranks that it was made for (8), but these"),
        (
            "strategy",
            "StateError: fully_shard: a plan says how each unit is cut and gathered, but strategy is given, too.",
        ),
        (
            "reshard",
            "StateError: fully_shard: a plan says how each unit is cut and gathered, but reshard_after_forward is",
        ),
        (
            "budget",
            "StateError: fully_shard: a plan says how each unit is cut and gathered, but memory_budget is given,",
        ),
        (
            "as a strategy",
            "ArgumentError: fully_shard: strategy must be one of ",
        ),
        *(
            (kind, "PlanError: fully_shard: each unit of a plan has parameters of its own")
            for kind in UNITS_OF_NO_MODEL
        ),
        (
            "no such module",
            "PlanError: fully_shard: a plan is for the model that it was made for, but the unit of lost",
        ),
        ("dtype", "PlanError: fully_shard: a plan is for the dtypes that it was made for, but all parameters gathered"),
        ("stored", "PlanError: fully_shard: a plan is for the dtypes that it was made for, but all parameters stored"),
        ("frozen", "PlanError: fully_shard: a plan is for the dtypes that it was made for, but all parameters reduced"),
    ],
)
def test_a_plan_for_something_else_is_refused(worlds: WorldPool, kind, message):
    for said in worlds.run(2, refused, kind):
        assert said.startswith(message)
        if kind == "frozen":
            assert "(blocks.0.mlp.up.weight for one 0 per element, and 4 in the plan)" in said


def under_a_policy() -> tuple[float, torch.dtype]:
    """A step under a plan for bf16 with reductions in fp32, where norms compute in fp32: their bytes are few."""
    model = build()
    a100 = DEVICES["a100-40g"]
    profile = Profile(model, tokens(), device=a100, training=Training(torch.bfloat16, torch.float32))
    plan = profile.given(cluster_of(a100, dist.get_world_size()), "full")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    dshard.fully_shard(model, plan=plan, mp_policy={"*norm*": None, "*": policy})
    logits = model(tokens())
    loss = logits.float().square().mean()
    loss.backward()
    return loss.item(), logits.dtype


def test_a_plan_for_a_dtype_is_followed_under_a_policy_that_says_the_same(worlds: WorldPool):
    for loss, dtype in worlds.run(2, under_a_policy):
        assert (loss > 0, dtype) == (True, torch.bfloat16)


def reported(num_backwards: int, pickles: bool, compiles: bool = False) -> dict[str, object]:
    """What is said after each step under a plan, and what else there is to know of a report."""
    num_before = num_listeners()[1]
    model = build()
    plan = plan_of(model, ["keep"])
    dshard.fully_shard(build(), plan=plan)  # a model that is gone: its report ends in the first step
    gc.collect()
    dshard.fully_shard(model, plan=plan)
    model = pickle.loads(pickle.dumps(model)) if pickles else model
    if compiles:
        warnings.simplefilter("ignore")  # dynamo's own
        model.compile(backend="aot_eager", fullgraph=True)
    optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.SGD([nn.Parameter(torch.ones(1))])
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logger = logging.getLogger("dshard")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    found = []
    try:
        for _ in range(4):
            for _ in range(num_backwards):
                model(tokens()).sum().backward()
                other.step()  # that of another model ends no step
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()
            found.append(dshard.plan_report(model))
    finally:
        logger.removeHandler(handler)
    return {
        "after": [report is not None for report in found],
        "said": [str(found[-1]) in record.getMessage() for record in said],
        "predicted": found[-1] is not None and found[-1].predicted.step_s == plan.step_s,
        "measured": (found[-1].measured.step_s, found[-1].measured.peak_bytes) if found[-1] is not None else None,
        "stays": len({str(report) for report in found if report is not None}) == 1,
        "watched": pickles or num_listeners()[1] > num_before,
    }


@pytest.mark.parametrize(("num_backwards", "compiles"), [(1, False), (2, False), (1, True)])
def test_the_second_step_is_compared_with_the_plan_once(worlds: WorldPool, num_backwards, compiles):
    for found in worlds.run(2, reported, num_backwards, False, compiles):
        assert found["after"] == [False, True, True, True]
        assert (found["said"], found["predicted"], found["stays"], found["watched"]) == ([True], True, True, False)
        step_s, peak_bytes = found["measured"]
        assert 0.02 < step_s < 60
        assert peak_bytes is None  # on CPU


def test_copies_do_not_report(worlds: WorldPool):
    for found in worlds.run(2, reported, 1, True):
        assert (found["after"], found["said"]) == ([False] * 4, [])


def fast_steps() -> list[bool]:
    """Whether shards stand in for parameters in an optimizer: ahead of a plan, under it, and after its report."""

    def stands_in(model: nn.Module) -> bool:
        model(tokens()).sum().backward()
        optimizer = torch.optim.AdamW(model.parameters())
        seen = []

        class Seen(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(any(issubclass(kind, dshard.ShardedTensor) for kind in types))
                return func(*args, **(kwargs or {})) if not seen[-1] else NotImplemented

        with Seen():
            optimizer.step()
        optimizer.zero_grad()
        return not any(seen)

    plain = build()
    dshard.fully_shard(plain)
    planned = build()
    before = stands_in(plain)
    dshard.fully_shard(planned, plan=plan_of(build(), ["keep"]))
    return [before, *(stands_in(planned) for _ in range(3)), stands_in(plain)]


def test_a_report_leaves_the_fast_path_of_optimizers(worlds: WorldPool):
    assert worlds.run(2, fast_steps) == [[True] * 5] * 2


def test_a_model_that_is_sharded_already_is_not_planned_for(worlds: WorldPool):
    assert worlds.run(1, plan_of_sharded) == [True]


def plan_of_sharded() -> bool:
    model = dshard.fully_shard(nn.Linear(4, 4))
    with pytest.raises(dshard.PlanError, match="plan: the model must not be sharded yet, but weight is"):
        dshard.plan(model, torch.ones(2, 4), cluster=cluster_of("a100-40g", 2), device="a100-40g")
    return True
