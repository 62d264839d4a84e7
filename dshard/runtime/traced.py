"""What compiled graphs do when they run: their gathers go through the units, as those of eager operations do."""

import weakref
from typing import ClassVar

import torch
from torch import Tensor

from dshard import collectives
from dshard.collectives import GatherPlan, ShardGroup
from dshard.errors import UnsupportedOpError
from dshard.layout import BucketLayout, ShardLayout
from dshard.runtime.runtime import Runtime
from dshard.units.unit import Unit


class _Places:
    """Which parameter a shard is that a graph was given."""

    by_shard: ClassVar[dict[int, tuple[weakref.ref[Unit], int]]] = {}

    @classmethod
    def find(cls, shard: Tensor) -> tuple[Unit, int] | None:
        """The unit, and the parameter's number in it; None for what belongs to no unit."""
        found = cls._look_up(shard)
        if found is None:
            cls.by_shard = {
                id(param.shard_storage.tensor): (weakref.ref(unit), slot)
                for unit in list(Unit.alive)
                for slot, param in enumerate(unit.params)
                if param.gather_source is unit  # else of one that the first use split
            }
            found = cls._look_up(shard)
        return found

    @classmethod
    def _look_up(cls, shard: Tensor) -> tuple[Unit, int] | None:
        entry = cls.by_shard.get(id(shard))
        if entry is None:
            return None
        reference, slot = entry
        unit = reference()
        if unit is None or slot >= len(unit.params):
            return None
        param = unit.params[slot]
        is_it = param.shard_storage.tensor is shard and param.gather_source is unit
        return (unit, slot) if is_it else None


def gather(
    shard: Tensor, shape: list[int], stride: list[int], dim: int, group: str, dtype: torch.dtype, is_own: bool
) -> Tensor:
    """The full value of a shard that a compiled graph was given, in memory of the graph's own if it `is_own`.

    Communicates:
        As a touch of the parameter: at most one all-gather per bucket of its unit.
    """
    found = _Places.find(shard)
    if found is not None and found[0].model.split is not None:
        found[0].model.before_use()
        found = _Places.find(shard)
    if found is None:
        return _gathered_alone(shard, shape, stride, dim, group, dtype)
    unit, slot = found
    layout, model = unit.params[slot].shard_layout, unit.model
    if layout.shape != tuple(shape) or layout.dim != (dim if dim >= 0 else None):
        raise UnsupportedOpError(
            f"{unit.params[slot].name}: a compiled graph was given a view of a sharded tensor (shape {tuple(shape)}). "
            "Make the view within the compiled function, or use full_tensor()."
        )
    task = torch._C._current_graph_task_id()
    if task != -1:
        model.eviction.use_in_graph(unit, task)
    else:
        _check_dtype(unit, slot, dtype)
        if not unit.is_running:
            _check_start(unit)
        else:
            model.eviction.keep_for_backward(unit)
    full = unit.full_of_dtype(slot, dtype)
    is_the_shard = full.untyped_storage()._cdata == shard.untyped_storage()._cdata  # of one rank; ops return no inputs
    return full.clone() if is_own or is_the_shard else full


def _check_dtype(unit: Unit, slot: int, dtype: torch.dtype) -> None:
    """Raise where a parameter has another dtype than when the graph was traced: in a forward, or outside."""
    param = unit.params[slot]
    if param.dtype != dtype:
        raise UnsupportedOpError(
            f"{param.name}: under mixed precision a graph runs where it was traced, in a forward or outside, but it "
            f"was traced with {dtype}, and the parameter is {param.dtype} here. Compile a function of its own for "
            "each place."
        )


def _check_start(unit: Unit) -> None:
    """Raise for what is due at the start of an eager forward, in a forward that is one graph."""
    if not unit.model.get(Runtime).is_start_due():
        return
    raise UnsupportedOpError(
        f"{unit.label}: torch.compile of a function that calls the model runs the model's start within the graph, but "
        "this model has to broadcast its buffers, to take in parameters that it was given after fully_shard, or to "
        "tell ranks that have no more batches (dshard.join). Compile it in place, by model.compile(), which runs that "
        "ahead of the graph."
    )


def _gathered_alone(
    shard: Tensor, shape: list[int], stride: list[int], dim: int, group: str, dtype: torch.dtype
) -> Tensor:
    """The full value of what belongs to no unit."""
    if dim < 0:
        return shard.to(dtype, copy=True)
    shard_group = ShardGroup(collectives.group_named(group), shard.device)
    layout = ShardLayout(tuple(shape), dim, shard_group.num_ranks)
    plan = GatherPlan.of(BucketLayout.of([layout]), [stride], dtype, shard_group)
    return collectives.all_gather([shard], plan, shard_group, label="a tensor of a compiled graph").wait().tensors[0]
