"""Between choices that are predicted to take about as long: the one that is simplest, and moves least."""

from collections.abc import Sequence
from dataclasses import replace

from dshard.planner.costs import Cluster, ModelCosts, UnitCosts
from dshard.planner.memory import peak_bytes
from dshard.planner.timeline import step_time
from dshard.policies import Strategy

_TOLERANCE = 1e-9
# Of a step: two plans that are predicted to be closer than that cannot be told apart.
MEASURED = 0.02
# What computation takes is missed alike whatever the strategy; what differs between strategies is waiting. The largest
# miss of that among runs of papers (docs/simulate.md) is 7.6 points of a step, at 512 GPUs under full, which sends
# three parts where the others send two: a third of it does not cancel out between them.
DATASHEET = 0.03


def simplest(
    models: Sequence[ModelCosts], cluster: Cluster, known: Sequence[Strategy], limit_bytes: int, most_s: float
) -> tuple[ModelCosts, tuple[Strategy, ...]] | None:
    """The single strategy of least memory whose step takes no longer than `most_s`; None if none fits.

    One with slices, as few as can be, is taken if no other is left: their times rest on the model of costs more than
    the rest.

    Args:
        models: The same one with units of several kinds: an earlier one is preferred.
        cluster: Devices and links.
        known: The strategies that a unit may have.
        limit_bytes: Of the peak.
        most_s: Of a step.
    """
    found = []
    for place, model in enumerate(models):
        for same in ((strategy,) * len(model.units) for strategy in known):
            peak, step_s = peak_bytes(model, same, cluster), step_time(model, same, cluster)
            if peak <= limit_bytes and step_s <= most_s:
                found.append(((same[0].num_slices, place, peak, step_s), model, same))
    return min(found, key=lambda each: each[0])[1:] if found else None


def at_rest(
    model: ModelCosts,
    cluster: Cluster,
    known: Sequence[Strategy],
    chosen: Sequence[Strategy],
    limit_bytes: int,
    step_s: float,
    *,
    is_simple: bool = False,
) -> tuple[Strategy, ...]:
    """The same, or copies that are gathered once per step stay for good, if all of them fit and no time is lost.

    A copy that is freed after its backward takes memory anew in the next step, which no model of collectives counts.

    Args:
        model: Costs of its units.
        cluster: Devices and links.
        known: The strategies that a unit may have.
        chosen: One per unit.
        limit_bytes: Of the peak.
        step_s: That the chosen take.
        is_simple: Whether it is one strategy that is to stay one.
    """
    for reaches_full in (False,) if is_simple else (True, False):
        pairs = zip(model.units, chosen, strict=True)
        changed = tuple(_staying(unit, strategy, known, reaches_full=reaches_full) for unit, strategy in pairs)
        if changed == tuple(chosen) or peak_bytes(model, changed, cluster) > limit_bytes:
            continue
        if step_time(model, changed, cluster) <= step_s * (1 + _TOLERANCE):
            return changed
    return tuple(chosen)


def _staying(unit: UnitCosts, strategy: Strategy, known: Sequence[Strategy], *, reaches_full: bool) -> Strategy:
    """What stays, in the place of `keep`; and of `full`, for a unit that its backward does not use."""
    is_once = strategy.base == "full" and not unit.is_used_in_backward and strategy.num_slices == 1
    if strategy.base != "keep" and not (is_once and reaches_full):
        return strategy
    others = (replace(strategy, base=base) for base in ("zero1", "zero2"))
    return next((other for other in others if other in known), strategy)
