"""`dshard.plan`: from a model, a sample of its input and the devices to the best strategy for each of its units."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dshard.arguments import checked
from dshard.errors import PlanError
from dshard.planner.costs import Cluster
from dshard.planner.devices import Device, find_device
from dshard.planner.plan import Plan
from dshard.planner.profiles import Training
from dshard.planner.progress import SILENT, Throttled
from dshard.planner.rates import Rates, check_profile, find_rates
from dshard.planning.meshes import PlannedMesh, mesh_cut_over
from dshard.planning.profile import Profile
from dshard.policies import Strategy
from dshard.units.placing import PlacementFn

log = logging.getLogger("dshard")

_EVERY_S = 5.0  # from one line of the logger to the next


@checked
def plan(
    model: nn.Module,
    sample_input: Any,
    *,
    cluster: Cluster | None = None,
    mesh: DeviceMesh | None = None,
    device: Device | str | None = None,
    memory: int | str | None = None,
    memory_of: str = "live",
    strategies: Sequence[Strategy | str] | Strategy | str | None = None,
    checkpointing: Sequence[str] | str = "none",
    offload: str = "none",
    batch: int | str | None = None,
    training: Training | None = None,
    loss_of: Callable[[Any], Tensor] | None = None,
    margin: float | None = None,
    profile: Rates | str | Path | None = None,
    shard_placement_fn: PlacementFn | None = None,
) -> Plan:
    """Choose a strategy for each unit of a model, so that a step is shortest and fits into memory.

    Units are those that `fully_shard` finds on the root of the model. Bytes and operations come from a step on tensors
    without data, times from a description of the device, or from real steps on this machine. Of what cannot be told
    apart by such times, one strategy for all units is preferred, and of several the one that takes least memory; the
    plan's certificate says what is the fastest, and by how much the plan is slower.

    Args:
        model: Not sharded yet; may be on meta if a device is named.
        sample_input: Of one rank: a tensor, a tuple of arguments or a dict of keyword arguments; dim 0 is the batch.
        cluster: Ranks and links: `dshard.planner.cluster_of(device, 512)`, or what `measure_links` gave.
        mesh: In its place: the ranks at hand, whose links are measured, or read from where they were kept. Of two dims,
            to replicate over and to shard over, a parameter is shared by the ranks of the second, or whole.
        device: A name of `dshard.planner.DEVICES`, or one of your own; None to measure here.
        memory: Limit per rank, in bytes or as text: "38GiB"; None for that of the cluster's devices.
        memory_of: What it limits: "live" bytes of tensors, or what CUDA's allocator makes of them by a simulation:
            "reserved" segments, or "expandable" ones. Those are held by leaving room.
        strategies: That a unit may have, several or one; None for all.
        checkpointing: Activation checkpointing that a unit may have, one kind or several: "none", "selective" (outputs
            of matrix products, convolutions and attention are kept, the rest is computed again), "full" (inputs of a
            unit are kept alone); "auto" for any. `fully_shard(model, plan=plan)` applies what was chosen.
        offload: Units whose parameters, gradients and optimizer states are kept in the CPU's memory, where the
            optimizer steps: "none", "all", or "auto" for those that the plan chooses. Needs `device`.
            `fully_shard(model, plan=plan, offload_policy=CPUOffloadPolicy())` keeps those there, and no others.
        batch: Samples per rank; None for those of the sample, "auto" for as many as give the most samples per second.
        training: Dtypes and optimizer; None for AdamW in the model's dtypes, as torch runs it by default there.
        loss_of: Loss of an output. Without it: its `loss`, or the sum of what is floating-point in it.
        margin: By which part of a step the preferred may be slower than the fastest; 0 for the fastest. None for what
            the times are known to: 0.02 where they were measured, 0.03 by a description of a device.
        profile: Of what `device` says, which parts runs reach: what `dshard calibrate` wrote, as a path or read by
            `Rates.load`, or "published" for the one that is shipped. Links are those of `cluster`: see `cluster_of`.
        shard_placement_fn: That `fully_shard` will be given, too: the dim along which a parameter is cut, as
            `Shard(dim)`, or None for dim 0.

    Raises:
        ArgumentError: An argument is none of what it may be.
        PlacementError: `shard_placement_fn` gives no placement of a parameter.
        PlanError: Nothing fits, and by how much; or `sample_input` holds no batch; or `profile` is given without
            `device`, or with links that it does not know of; or `shard_placement_fn` gives `Replicate()` or a mesh.
        StateError: The model cannot be traced, or the device does not compute in its dtype.

    Communicates:
        With `mesh=` what `measure_links` and `measure_overhead` do, and all-reduces of measured times, so that all
        ranks get one plan; of a model whose layers are cut over others, broadcasts of links and plan among these.
        With `cluster=` nothing: ranks that measure their own times, without a device, may get different ones. But steps
        of layers that are cut, and their times, are of all ranks over which they are: these must call this alike.
    """
    ranks = _ranks_of(model, cluster, mesh)
    named = None if device is None else find_device(device, "plan: device")
    if training is None:  # on CPU, torch's AdamW steps one parameter after the other
        is_here = named is None and all(p.device.type == "cpu" for p in model.parameters())
        training = Training(step_bytes_per_element=8, steps_together=False) if is_here else Training()
    rates = None if profile is None else find_rates(profile)
    if rates is not None:
        check_profile(named, cluster)
    progress = Throttled(lambda line: log.info("plan: %s", line), every_s=_EVERY_S)
    is_first = mesh is None or mesh.get_rank() == 0
    costs = Profile(
        model,
        sample_input,
        device=named,
        training=training,
        loss_of=loss_of,
        mesh=ranks.whole if isinstance(ranks, PlannedMesh) else None,
        progress=progress if is_first else SILENT,
        checkpointing=checkpointing,
        offload=offload,
        rates=rates,
        shard_placement_fn=shard_placement_fn,
    )
    made = partial(costs.plan, memory=memory, memory_of=memory_of, batch=batch, margin=margin)
    if isinstance(ranks, Cluster):
        return made(ranks, strategies=strategies)
    costs.progress.at("measuring links")
    measured = ranks.links()
    return ranks.shared(lambda: made(measured, strategies=ranks.strategies(strategies, measured)))


def _ranks_of(model: nn.Module, cluster: Cluster | None, mesh: DeviceMesh | None) -> Cluster | PlannedMesh:
    """Which ranks there are: the cluster, or those of the mesh.

    Raises:
        PlanError: Both are given, or neither.
    """
    if cluster is not None and mesh is None:
        return cluster
    if mesh is None or cluster is not None:
        raise PlanError(
            f"plan: either cluster or mesh says which ranks there are, but {'neither' if mesh is None else 'both'} is "
            "given. Pass mesh=, or cluster=dshard.planner.cluster_of(device, 512)."
        )
    return PlannedMesh.of(mesh, mesh_cut_over(model))
