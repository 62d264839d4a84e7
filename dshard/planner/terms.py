"""What the time of a step is: arithmetic, traffic, copies, the optimizer, and waiting for communication."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dshard.planner.costs import Cluster, Link, Links, ModelCosts, UnitCosts
from dshard.planner.options import Option, options_of
from dshard.planner.timeline import Timeline
from dshard.policies import Strategy

_OF_WORK = {
    "products_s": "products",
    "attention_s": "attention",
    "traffic_s": "memory traffic",
    "copies_s": "copies for collectives",
    "starts_s": "starts of kernels",
    "cut_s": "tensor parallelism",
}
_COMPUTED, _SLICES, _OPTIMIZER = "computation", "slices", "optimizer"
SLOWEST, BESIDE = "the slowest of the devices", "computing beside collectives"
_WAITS = {"gather": "gathers", "reduce": "reductions", "slices": "slices"}
_MAX_WIDTH, _ROUNDING, _NO_TIME = 110, 1e-12, 1e-30


def terms_of(
    model: ModelCosts, strategies: Sequence[Strategy], cluster: Cluster, timeline: Timeline
) -> dict[str, float]:
    """Seconds of a simulated step by what takes them; terms that take none are left out.

    They add up to the step. Communication counts as far as what computes waits for it; the part of a collective that
    goes between hosts is taken to be waited for like the rest of it.
    """
    options = options_of(model, strategies, cluster)
    found: dict[str, float] = defaultdict(float)
    alone = options_of(model, strategies, replace(cluster, interference=0.0))
    for unit, option, undisturbed in zip(model.units, options, alone, strict=True):
        for term, seconds in _computed(unit, undisturbed, cluster.stragglers):
            found[term] += model.num_backwards * seconds
        lost_s = option.forward_s + option.backward_s - undisturbed.forward_s - undisturbed.backward_s
        found[BESIDE] += model.num_backwards * lost_s
        found[_OPTIMIZER] += option.optimizer_s
    between = _saved(model, options, options_of(model, strategies, _near(cluster)))
    copied = _saved(model, options, options_of(_at_once(model), strategies, cluster))
    for name, kind, seconds in _waits(timeline):
        far, copies = between[name, kind], copied[name, kind]
        found[f"waiting for {_WAITS[kind]} between hosts"] += far * seconds
        found[f"waiting for {_WAITS[kind]} within hosts"] += (1 - far - copies) * seconds
        found["waiting for copies of what is kept in the CPU's memory"] += copies * seconds
    least_s = _ROUNDING * sum(found.values())  # of a difference that is none
    return {term: seconds for term, seconds in sorted(found.items(), key=lambda item: -item[1]) if seconds > least_s}


def bound_text(terms: Mapping[str, float]) -> list[str]:
    """One sentence: what takes most of a step, and what takes the rest."""
    step_s = sum(terms.values())
    if not step_s:
        return []
    (largest, most), *rest = sorted(terms.items(), key=lambda item: -item[1])
    lines = [f"the step is bound by {largest}: {most / step_s:.1%} of it"]
    for i, (term, seconds) in enumerate(rest):
        entry = f"{term} {seconds / step_s:.1%}"
        lines[-1] += "," if i else ";"
        if len(lines[-1]) + len(entry) > _MAX_WIDTH:
            lines.append(f"  {entry}")
        else:
            lines[-1] += f" {entry}"
    return lines


def _computed(unit: UnitCosts, option: Option, stragglers: float) -> Iterator[tuple[str, float]]:
    """What one forward and backward of a unit compute, where no collective disturbs it.

    What an option takes beyond what its unit takes on the slowest device is for slices.
    """
    halves = ((unit.forward_s, option.forward_s), (unit.backward_s, option.backward_s))
    for place, (own_s, took_s) in enumerate(halves):
        yield SLOWEST, own_s * stragglers
        yield _SLICES, took_s - own_s * (1 + stragglers)
        work = unit.work[place] if place < len(unit.work) else None
        if work is None or not work.total_s:
            yield _COMPUTED, own_s
            continue
        for name, term in _OF_WORK.items():  # times may have been scaled since, to what was measured
            yield term, own_s * getattr(work, name) / work.total_s


def _waits(timeline: Timeline) -> Iterator[tuple[str, str, float]]:
    """Unit, kind and seconds of each stretch of a collective for which what computes waits."""
    sent = [segment for segment in timeline.segments if segment.stream == "comm"]
    place, free_s = 0, 0.0
    for segment in timeline.segments:
        if segment.stream != "compute":
            continue
        while place < len(sent) and sent[place].start_s < segment.start_s:
            seconds = min(sent[place].stop_s, segment.start_s) - max(sent[place].start_s, free_s)
            if seconds > 0:
                yield sent[place].name, sent[place].kind, seconds
            if sent[place].stop_s > segment.start_s:
                break
            place += 1
        free_s = segment.stop_s


def _near(cluster: Cluster) -> Cluster:
    """The same ranks, whose links between hosts take no time."""
    free = Links.of(Link(0.0, 0.0))
    is_one_host = cluster.num_ranks <= cluster.ranks_per_host
    return replace(
        cluster,
        across=None if cluster.across is None else free,
        shards={num: links if cluster.is_inside(num) else free for num, links in cluster.shards.items()},
        replicas={num: links if is_one_host else free for num, links in cluster.replicas.items()},
    )


def _at_once(model: ModelCosts) -> ModelCosts:
    """The same units, of which copies from the CPU's memory take next to no time."""
    units = (replace(unit, home_s_per_byte=min(unit.home_s_per_byte, _NO_TIME)) for unit in model.units)
    return replace(model, units=tuple(units))


def _saved(model: ModelCosts, options: Sequence[Option], others: Sequence[Option]) -> dict[tuple[str, str], float]:
    """Of each unit's communication the part of its time that it does not take under other circumstances."""
    found = {}
    for unit, option, other in zip(model.units, options, others, strict=True):
        for kind, name in (("gather", "gather_s"), ("reduce", "reduce_s"), ("slices", "forward_comm_s")):
            whole_s = getattr(option, name)
            found[unit.name, kind] = 1 - getattr(other, name) / whole_s if whole_s else 0.0
    return found
