"""Plans for models of `transformers`: operations are counted as they run, and what is planned trains as without."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

import dshard
from dshard.errors import StateError
from dshard.planner import DEVICES, Training, cluster_of, measuring
from dshard.planner.tracing import trace
from dshard.planning import measured_steps
from dshard.planning.plan import parts_of
from dshard.testing import World
from tests.interop import models
from tests.interop.test_training import TIMEOUT_S, TOLERANCE

GROUPED = {"experts_implementation": "grouped_mm"}  # of a mixture of experts, whose loop asks for values


def build(name: str, **overrides: Any) -> Any:
    """A model that can be traced and recomputed."""
    model = models.build(name, **(GROUPED if name == "mixtral" else {}), **overrides)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return model


def loss_of(name: str, output: Any) -> Tensor:
    if name != "clip":
        return output.loss
    return (output.text_embeds * output.image_embeds).sum(-1).mean() + output.logits_per_text.sum() * 0


def counted(name: str) -> tuple[int, int]:
    """Operations of a trace, and of a step that runs; of a mixture of experts, one expert after the other."""
    batch = models.batch(name, 0, 0)
    with FlopCounterMode(display=False) as counter:
        models.loss_of(name, models.build(name, attn_implementation="eager"), batch).backward()
    model = build(name, attn_implementation="eager")
    traced = trace(model, batch, parts_of(model), loss_of=functools.partial(loss_of, name))
    return traced.flops, counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(models.MODELS))
def test_a_trace_counts_the_operations_that_a_step_runs(world: World, name):
    for traced, real in world.run(counted, name, timeout_s=TIMEOUT_S):
        assert traced == real > 0 if name != "clip" else traced == pytest.approx(real, rel=0.02)


def follow(name: str, model: Any, kind: str) -> dshard.Plan:
    """Shard a model by a plan of steps that are measured once."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.MonkeyPatch.context() as patch:
        quick = functools.partial(measuring.measure, num_steps=1, min_s=0.0)
        patch.setattr(measured_steps, "measure", quick)
        batch = models.batch(name, 0, dist.get_rank())
        plan = dshard.plan(model, batch, mesh=mesh, loss_of=functools.partial(loss_of, name), checkpointing=kind)
    dshard.fully_shard(model, mesh=mesh, plan=plan)
    return plan


def planned(name: str, kind: str) -> tuple[float, set[str]]:
    """How far training under a plan is from one process, and the kinds of checkpointing."""
    model = build(name)
    plan = follow(name, model, kind)
    trained = models.train(name, model, lambda step: models.batch(name, step, dist.get_rank()))
    return max(models.worst(trained, models.plain_run(name, dist.get_world_size())).values()), set(plan.checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in models.MODELS if name != "mixtral"])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_models_train_under_measured_plans_as_in_one_process(world: World, name, kind):
    for apart, kinds in world.run(planned, name, kind, timeout_s=TIMEOUT_S):
        assert apart <= TOLERANCE
        assert kind in kinds


def mixture(kind: str | None) -> list[float]:
    """Losses of a mixture of experts, in fp32: torch multiplies groups in no fp64."""
    model = build("mixtral").float()
    if kind is None:
        dshard.fully_shard(model)
    else:
        assert kind in follow("mixtral", model, kind).checkpointing
    return models.train("mixtral", model, lambda step: models.batch("mixtral", step, dist.get_rank()))["losses"]


def test_a_mixture_of_experts_trains_under_a_measured_plan_as_without_one(world: World):
    expected = world.run(mixture, None, timeout_s=TIMEOUT_S)
    for kind in ("full", "selective"):
        for found, losses in zip(world.run(mixture, kind, timeout_s=TIMEOUT_S), expected, strict=True):
            assert found == pytest.approx(losses, abs=1e-4)


def refused() -> str:
    model = models.build("mixtral")
    given = {"cluster": cluster_of(DEVICES["a100-80g"], 8), "device": "a100-80g"}
    with pytest.raises(StateError) as caught:
        dshard.plan(model, models.batch("mixtral", 0, 0), training=Training(torch.float32), **given)
    return str(caught.value)


def test_a_mixture_of_experts_that_loops_over_them_is_refused_by_the_way_out(world: World):
    for said in world.run(refused, timeout_s=TIMEOUT_S):
        assert "asks for a value, or for a shape that depends on values (aten.nonzero" in said
        assert "experts_implementation='grouped_mm'" in said
