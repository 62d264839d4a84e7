"""Parameters that are cut along a dim of fewer elements than ranks share them: some of these hold nothing of them."""

from collections.abc import Iterable, Sequence

from dshard.planner.costs import ParamCosts, UnitCosts
from dshard.planner.texts import bytes_text
from dshard.policies import Strategy

_MUCH = 0.05  # of a peak, or of the elements of some units


def few_rows_text(units: Sequence[UnitCosts], strategies: Sequence[Strategy], num_ranks: int, peak: int) -> list[str]:
    """What it costs under some strategies, of parameters, gradients and states, and the way out; of little, nothing."""
    found, more = list[ParamCosts](), 0.0
    for unit, strategy in zip(units, strategies, strict=True):
        within = num_ranks if strategy.within is None else strategy.within
        for param in () if strategy.base == "ddp" else _of_few_rows(unit, within):
            each = 2 * param.stored_itemsize + param.state_bytes_per_element
            more += (param.shard_numel(within) - param.numel / within) * each
            found.append(param)
    if not found or more < _MUCH * peak:
        return []
    param = max(found, key=lambda each: each.numel)
    others = f" (and {len(found) - 1} more along one of fewer elements than ranks)" if len(found) > 1 else ""
    return [
        f"  {param.name} is cut along a dim of {param.length}{others}: the largest shards are about",
        f"  {bytes_text(round(more))} larger than even ones; pass shard_placement_fn= to plan and fully_shard, as in "
        "lambda param: Shard(1)",
    ]


def few_rows_advice(units: Iterable[UnitCosts], num_ranks: int) -> str:
    """How some units would take less, ahead of other ways; empty where that is little."""
    units = list(units)
    found = [param for unit in units for param in _of_few_rows(unit, num_ranks)]
    if sum(param.numel for param in found) <= _MUCH * sum(unit.numel for unit in units):
        return ""
    param = max(found, key=lambda each: each.numel)
    return f"shard_placement_fn=, for {param.name} is cut along a dim of {param.length} over {num_ranks} ranks, "


def _of_few_rows(unit: UnitCosts, within: int) -> list[ParamCosts]:
    return [param for param in unit.params if 1 < param.length < within]
