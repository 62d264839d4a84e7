"""Parameters that are cut along a dim of fewer elements than ranks share them: some of these hold nothing of them."""

from collections.abc import Sequence

from dshard.planner.costs import ParamCosts, UnitCosts
from dshard.planner.sizes import sharing
from dshard.planner.texts import bytes_text
from dshard.policies import Strategy

_MUCH = 0.05  # of a peak, or of the elements of some units


def few_rows_text(units: Sequence[UnitCosts], strategies: Sequence[Strategy], num_ranks: int, peak: int) -> list[str]:
    """What it costs under some strategies, of parameters, gradients and states, and the way out; of little, nothing."""
    found, more = list[ParamCosts](), 0.0
    for unit, strategy in zip(units, strategies, strict=True):
        within = sharing(strategy, num_ranks)
        for param in () if unit.is_offloaded else _of_few_rows(unit, within):
            grad = param.stored_itemsize if param.grad_itemsize else 0
            each = param.stored_itemsize + grad + param.state_bytes_per_element
            more += (param.shard_numel(within) - param.numel / within) * each
            found.append(param)
    if not found or more < _MUCH * peak:
        return []
    param = max(found, key=lambda each: each.numel)
    others = f" (and {len(found) - 1} more along one of fewer elements than ranks)" if len(found) > 1 else ""
    return [
        f"  {param.name} is cut along a dim of {param.length}{others}: the largest shards are about",
        f"  {bytes_text(round(more))} larger than even ones; pass plan and fully_shard a shard_placement_fn that "
        "returns Shard of a longer one",
    ]


def few_rows_advice(units: Sequence[UnitCosts], strategies: Sequence[Strategy], num_ranks: int) -> str:
    """How some units would take less under one of these strategies, ahead of other ways; empty where it is little."""
    within = max(sharing(strategy, num_ranks) for strategy in strategies)
    found = [param for unit in units for param in _of_few_rows(unit, within)]
    if sum(param.numel for param in found) <= _MUCH * sum(unit.numel for unit in units):
        return ""
    param = max(found, key=lambda each: each.numel)
    return (
        f"a shard_placement_fn that returns Shard of a longer dim ({param.name} is cut along one of {param.length}), "
    )


def _of_few_rows(unit: UnitCosts, within: int) -> list[ParamCosts]:
    return [param for param in unit.params if 1 < param.length < within]
