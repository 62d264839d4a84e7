"""One optimizer over parameters of several meshes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard.testing import WorldPool, expect_error
from tests.models import mlp
from tests.optimizer.kit import (
    KINDS,
    NUM_STEPS,
    TOLERANCE,
    Counted,
    Report,
    average_gradients,
    build,
    check,
    differences,
    full,
    loss_of,
    make,
    run_step,
    shard,
    weights,
)
from tests.twins import close, data, same_weights, twins


def two_meshes(name: str, mode: dict[str, Any], clips: str | None) -> Report:
    """Two models on two slices of a 2 x 2 mesh, in one optimizer: each averages over its own two ranks.

    With `clips`, data depend on the place within a slice alone: a norm over both models is then the same on all ranks.
    """
    report = Report(num_cases=1)
    kind = KINDS[name]
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    members = {axis: dist.get_process_group_ranks(mesh[axis].get_group()) for axis in ("a", "b")}
    if rank in (0, 3) and members["a"] == members["b"]:
        report.wrong.append(f"the slices are the same ranks: {members}")
    plains = {axis: build(kind.model) for axis in members}
    sharded = {axis: shard(build(kind.model), mesh=mesh[axis]) for axis in members}

    def both(models: dict[str, nn.Module]) -> list[nn.Parameter]:
        return [p for model in models.values() for p in model.parameters()]

    reference, optimizer = make(name, mode, both(plains)), make(name, mode, both(sharded))
    for step in range(NUM_STEPS):
        reference.zero_grad()
        optimizer.zero_grad()
        for axis, ranks in members.items():
            seeds = ranks if clips is None else list(range(len(ranks)))
            average_gradients(plains[axis], step, seeds)
            loss_of(sharded[axis], step, seeds[ranks.index(rank)]).backward()
        if clips is not None:
            expected = nn.utils.clip_grad_norm_(both(plains), 0.3)
            clip = nn.utils.clip_grad_norm_ if clips == "torch" else dshard.clip_grad_norm_
            found = clip(both(sharded), 0.3)
            report.wrong += [f"norm: {w}" for w in differences(full(found), expected, TOLERANCE)]
        reference.step()
        sent = run_step(optimizer, None)
        if kind.is_elementwise and sent:
            report.wrong.append(f"communicates: {sent}")
    for axis in members:
        wrong = differences(weights(sharded[axis]), weights(plains[axis]), 2 * kind.tolerance)
        report.wrong += [f"{axis}: {w}" for w in wrong]
    return report


@pytest.mark.parametrize("name", [n for n in KINDS if n != "LBFGS"])
def test_two_models_on_two_slices_of_a_mesh_train_in_one_optimizer(worlds: WorldPool, name):
    for mode in [{}, {"foreach": True}, {"fused": True}] if name in ("AdamW", "SGD") else [{}]:
        check(worlds, 4, "meshes", two_meshes, name, mode, None)


@pytest.mark.parametrize("clips", ["torch", "dshard"])
def test_gradients_of_two_meshes_are_clipped_together(worlds: WorldPool, clips):
    check(worlds, 4, "meshes", two_meshes, "SGD", {}, clips)
    check(worlds, 4, "meshes", two_meshes, "AdamW", {"foreach": True}, clips)


def clip_models_that_differ() -> None:
    """On crossing slices each rank shares a gradient with two others, whose second model is another one."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    models = [shard(build(), mesh=mesh[axis]) for axis in ("a", "b")]
    for model in models:
        loss_of(model, 0, rank).backward()
    dshard.clip_grad_norm_([p for model in models for p in model.parameters()], 0.3)


def test_norms_that_differ_between_ranks_that_share_a_gradient_are_refused(worlds: WorldPool):
    errors = expect_error(worlds.get_world(4), clip_models_that_differ)
    assert all(kind == "DivergenceError" and "Clip the parameters of each mesh" in text for kind, text in errors)
    Counted.cases["meshes"] += 1


def one_model_over_two_meshes(kind: str) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    _, model = twins(mlp, lambda m: None)
    dshard.fully_shard(model[0], mesh=mesh["a"])
    dshard.fully_shard(model[2], mesh=mesh["b"])
    dshard.fully_shard(model[4], mesh=mesh["b"])
    params = list(model.parameters())
    model(data(3, 6, rank=0)).square().sum().backward()  # the same batch on every rank
    norm = (nn.utils.clip_grad_norm_ if kind == "torch" else dshard.clip_grad_norm_)(params, 0.25)
    optimizer = torch.optim.AdamW(params, lr=0.1)
    optimizer.step()
    plain, _ = twins(mlp, lambda m: None)
    plain(data(3, 6, rank=0)).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.25)
    torch.optim.AdamW(plain.parameters(), lr=0.1).step()
    close(norm.float(), expected, "norm")
    same_weights(plain, model)
    return norm.item()


@pytest.mark.parametrize("kind", ["torch", "dshard"])
def test_parameters_over_two_meshes_are_clipped_and_stepped_together(worlds: WorldPool, kind):
    norms = worlds.run(4, one_model_over_two_meshes, kind)
    assert len(set(norms)) == 1
