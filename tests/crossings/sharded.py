"""The training of a row on one rank of many: what `fully_shard` is given, and what the program does around it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dshard
from dshard.planner import DEVICES, Training, cluster_of
from dshard.planner.costs import UnitKind
from dshard.planning.plan import Profile
from dshard.policies import Offload, Strategy
from tests.crossings.model import BATCH, LENGTH, Block, Net, build, checkpoint_inside
from tests.crossings.oracle import DIVISOR, dtypes_of, num_data_ranks

MIX = {"*embed*": "ddp", "*up*": "zero1", "*norm*": "keep", "*down.weight": "zero2"}
OTHER_MIX = {"*down*": "ddp", "*norm*": "zero2", "*embed*": "full", "*up.weight": "keep"}
SWITCHES: dict[str, Any] = {"to zero2": "zero2", "to a mix": OTHER_MIX, "to hybrid(2)": "hybrid(2)"}


def data_rank(row: Mapping[str, str]) -> int:
    """Which of the batches this rank sees: the ranks of one tensor parallel group see the same."""
    return dist.get_rank() // 2 if row["mesh"] == "TP" else dist.get_rank()


def device_of(row: Mapping[str, str]) -> str:
    """The kind of device that a row trains on."""
    return row.get("device", "cpu")


def on_device(row: Mapping[str, str], net: Net) -> Net:
    """The model on the device of a row. `Module.to` would part tied weights on a device that torch does not know."""
    if device_of(row) != "cpu":
        moved: dict[nn.Parameter, nn.Parameter] = {}
        for module in net.modules():
            for name, param in module.named_parameters(recurse=False):
                if param not in moved:
                    moved[param] = nn.Parameter(param.detach().to(device_of(row)), param.requires_grad)
                setattr(module, name, moved[param])
        net.shift = net.shift.to(device_of(row))
    return net


def meshes_of(row: Mapping[str, str]) -> tuple[dict[str, Any], DeviceMesh | None]:
    """Options of `fully_shard`, and the mesh of tensor parallelism."""
    kind = row["mesh"]
    device = device_of(row)
    if kind == "1-D":
        return {} if device == "cpu" else {"mesh": init_device_mesh(device, (dist.get_world_size(),))}, None
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp") if kind == "TP" else ("outer", "inner"))
    if kind == "TP":
        return {"mesh": mesh["dp"]}, mesh["tp"]
    dims = {"dp_mesh_dims": DataParallelMeshDims(shard=("outer", "inner"))} if kind == "named dims" else {}
    return {"mesh": mesh, **dims}, None


def last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def plan_of(row: Mapping[str, str]) -> dshard.Plan:
    """A plan of four strategies, one unit after the other, for all ranks that hold the same part."""
    titan = DEVICES["titan-rtx"]
    device = replace(titan, flops_per_s={**titan.flops_per_s, "float64": 1e12, "bfloat16": 1e12})
    training = Training(*dtypes_of(row))
    sample = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    placed = last_dim if row["placement"] == "last dim" else None
    is_away = row["offload"] != "none"  # every other unit
    given = {"shard_placement_fn": placed, "offload": "auto" if is_away else "none"}
    profile = Profile(build(row), sample, device=device, training=training, **given)
    plan = profile.given(cluster_of(device, num_data_ranks(row)), "full")
    places = [UnitKind(is_offloaded=is_away and i % 2 > 0) for i in range(len(plan.strategies))]
    plan = replace(plan, model=plan.model.under(places))
    kinds = ("ddp", "zero1", "full", "zero2")
    if row["mesh"] == "HSDP":
        kinds = ("ddp", "hybrid(2, zero1)", "hybrid(2)", "hybrid(2, zero2)")
    return replace(plan, strategies=tuple(Strategy.of(kinds[i % 4]) for i in range(len(plan.strategies))))


def strategy_options(row: Mapping[str, str], net: nn.Module) -> dict[str, Any]:
    kind = row["strategy"]
    if kind.startswith("reshard="):
        return {"reshard_after_forward": {"False": False, "2": 2}[kind.removeprefix("reshard=")]}
    if kind == "budget":
        return {"memory_budget": sum(p.nbytes for p in net.parameters()) // 2}
    if kind == "plan":
        return {"plan": plan_of(row)}
    return {"strategy": MIX if kind == "mixed" else kind} if kind != "full" else {}


def options_of(row: Mapping[str, str], net: Net) -> dict[str, Any]:
    """What each call of `fully_shard` is given."""
    away = Offload(torch.device("cpu"), torch.device(device_of(row)))
    options = meshes_of(row)[0] | strategy_options(row, net)
    compute, reduce = dtypes_of(row)
    if compute is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    if row["offload"] != "none":
        options["offload_policy"] = CPUOffloadPolicy() if row["offload"] == "CPUOffloadPolicy" else away
    if row["sync"] != "check":
        options["sync"] = row["sync"] if row["sync"] != "none" else None
    if row["ignored"] == "gain":
        options["ignored_params"] = {net.gain}
    if row["placement"] == "last dim":
        options["shard_placement_fn"] = last_dim
    for name in ("grad_reduce", "buffers"):
        if row[name] != {"grad_reduce": "mean", "buffers": "leave"}[name]:
            options[name] = row[name]
    return options


@torch.no_grad()
def unequal(row: Mapping[str, str], net: Net) -> None:
    """Have the first data rank alone hold what all are to take from it."""
    if data_rank(row) > 0 and row["sync"] == "broadcast":
        for name, param in net.named_parameters():
            if row["ignored"] == "none" or name != "gain":
                param.mul_(2)
    if data_rank(row) > 0 and row["buffers"] == "broadcast":
        net.shift.add_(1)


def parallelize(row: Mapping[str, str], net: Net) -> None:
    tp = meshes_of(row)[1]
    for block in net.blocks if tp is not None else ():
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def wrap_blocks(net: Net) -> None:
    for i, block in enumerate(net.blocks):
        net.blocks[i] = checkpoint_wrapper(block)


def shard(row: Mapping[str, str], net: Net) -> Any:
    """The model with its checkpoints, compiled blocks and shards, in the order of the row."""
    checkpoint_inside(net, row)
    unequal(row, net)
    options = options_of(row, net)
    compile_blocks(row, net)
    model: nn.Module = net
    if row["checkpoint"] == "wrapped before":
        wrap_blocks(net)
    if row["units"] == "blocks":
        for block in net.blocks:
            dshard.fully_shard(block, **options)
    elif row["units"] == "policy":
        options["auto_wrap_policy"] = {Block}
    if row["checkpoint"] == "wrapped after" and row["units"] == "blocks":
        wrap_blocks(net)
    if row["checkpoint"] == "root":
        model = checkpoint_wrapper(net)
    dshard.fully_shard(model, **options)
    if row["checkpoint"] == "wrapped after" and row["units"] != "blocks":
        wrap_blocks(net)
    set_up(row, model)
    return model


def inner(model: Any) -> Net:
    """The model in its wrapper, or itself."""
    return model._checkpoint_wrapped_module if isinstance(model, CheckpointWrapper) else model


def compile_blocks(row: Mapping[str, str], model: nn.Module) -> None:
    if row["compile"] == "blocks":
        for module in model.modules():
            if isinstance(module, Block):
                module.compile(backend="aot_eager")


def double(grads: Tensor) -> None:
    grads.mul_(2)


def set_up(row: Mapping[str, str], model: Any) -> None:
    """Call the setters of the row on each sharded module, and say of the tower that some ranks run it."""
    inner(model).beside_tower = dshard.run_by_some
    calls: dict[str, Any] = {
        "prefetch 0": lambda m: m.set_prefetch(0),
        "prefetch 2": lambda m: m.set_prefetch(2),
        "kept after backward": lambda m: m.set_reshard_after_backward(False),
        "divide factor": lambda m: m.set_gradient_divide_factor(DIVISOR),
        "own group": lambda m: m.set_separate_reduce_scatter_group(),
        "reduce hook": lambda m: m.set_all_reduce_hook(double),
        "2 buffers": lambda m: m.set_reduce_scatter_max_input_buffers(2),
        "set reshard": lambda m: m.set_reshard_after_forward(False),
    }
    for module in model.modules():
        for kind in (row["setting"], row["reduction"]):
            if isinstance(module, dshard.FSDPModule) and kind in calls:
                calls[kind](module)


@contextmanager
def micro_batch(row: Mapping[str, str], model: Any, *, is_last: bool) -> Iterator[None]:
    """One of several micro-batches, of which the last reduces, or every one does."""
    kind = row["accumulation"]
    if kind == "set sync":
        model.set_requires_gradient_sync(is_last)
    if kind == "set all_reduce":
        model.set_requires_all_reduce(is_last)
    with dshard.no_sync(model) if kind == "no_sync" and not is_last else nullcontext():
        yield


def remake(row: Mapping[str, str]) -> Any:
    """A sharded model of the row with other weights, to load into."""
    net = on_device(row, build(row, seed=1))
    parallelize(row, net)
    return shard(row, net)


clip_of = {
    "dshard": partial(dshard.clip_grad_norm_),
    "torch": partial(nn.utils.clip_grad_norm_),
}
