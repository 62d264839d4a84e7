"""Which strategy each unit should have: the shortest step whose peak memory fits, with a proof."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dshard.argument_tables import checked
from dshard.errors import PlanError
from dshard.planner.bounds import Relaxation
from dshard.planner.chain import Chain
from dshard.planner.costs import Cluster, ModelCosts, UnitKind
from dshard.planner.incumbent import Incumbent
from dshard.planner.labels import TOLERANCE, promising, search
from dshard.planner.memory import Ints, peak_bytes
from dshard.planner.progress import SILENT, Progress, Stretch
from dshard.planner.smallest import does_not_fit, smallest_peak
from dshard.planner.texts import bytes_text, seconds_text
from dshard.planner.ties import at_rest, simplest
from dshard.planner.timeline import step_time
from dshard.policies import Strategy

_MAX_LABELS = 600_000
_NARROW = 100
_NUM_VIOLATED = 2
_CLOSE, _MANY = 5e-4, 10  # a gap that a search of not even ten times the narrow one's labels would rarely close
_MOST_IN_ROWS, _CLOSE_IN_ROWS = 3000, 1e-3  # where several rows tell labels apart, each is compared with each


@dataclass(frozen=True, slots=True)
class Certificate:
    """How good a choice is, for the model of costs that was given.

    Args:
        step_s: Its step.
        lower_bound_s: No choice that fits has a shorter one: the search has excluded it.
        relaxed_bound_s: The same from the relaxation alone (prices on bytes), which does not rest on the search.
        peak_bytes: Its peak.
        limit_bytes: What it had to fit into.
        num_labels: Size of the search.
        fastest: The strategies of the fastest choice that was found; another one where a simpler one was preferred.
        fastest_kinds: The kinds of its units: activation checkpointing, and where they are kept.
        fastest_s: Its step.
        fastest_peak_bytes: Its peak.
        margin: By which part of a step the simpler one may be slower.
        left_bytes: Of the limit, what was left free: what is proved holds for live bytes within the rest.
        memory_of: What had to fit: "live" bytes, or "reserved" or "expandable" ones of CUDA's allocator.
    """

    step_s: float
    lower_bound_s: float
    relaxed_bound_s: float
    peak_bytes: int
    limit_bytes: int
    num_labels: int
    fastest: tuple[Strategy, ...]
    fastest_kinds: tuple[UnitKind, ...]
    fastest_s: float
    fastest_peak_bytes: int
    margin: float
    left_bytes: int = 0
    memory_of: str = "live"

    @property
    def gap(self) -> float:
        """The part of its step by which the choice may be improved at most; 0 if it is the best."""
        return 1 - self.lower_bound_s / self.step_s if self.step_s > 0 else 0.0

    @property
    def relaxed_gap(self) -> float:
        """The same by the relaxation alone."""
        return 1 - self.relaxed_bound_s / self.step_s if self.step_s > 0 else 0.0

    @property
    def slower_by(self) -> float:
        """The part of the fastest step that was found by which this one is longer; 0 unless a simpler was preferred."""
        return self.step_s / self.fastest_s - 1 if self.fastest_s > 0 else 0.0

    @property
    def memory_slack_bytes(self) -> int:
        """What the peak leaves free."""
        return self.limit_bytes - self.peak_bytes

    def __str__(self) -> str:
        bound, relaxed = seconds_text(self.lower_bound_s), seconds_text(self.relaxed_bound_s)
        text = (
            f"step {seconds_text(self.step_s)}, at least {bound} by proof (gap {self.gap:.2g}; "
            f"relaxation {relaxed}); peak {bytes_text(self.peak_bytes)} of {bytes_text(self.limit_bytes)}"
        )
        if self.left_bytes:
            room, left = bytes_text(self.limit_bytes - self.left_bytes), bytes_text(self.left_bytes)
            what = "a mix as it runs" if self.memory_of == "live" else f"the allocator ({self.memory_of} bytes)"
            text = f"{text};\n  all of it is proved for live bytes within {room}: {left} are left for {what}"
        if not self.slower_by:
            return text
        return (
            f"{text};\n  one strategy for all units was preferred to the fastest choice "
            f"({seconds_text(self.fastest_s)}, {bytes_text(self.fastest_peak_bytes)}):\n  it is {self.slower_by:.2%} "
            f"slower, and these costs do not tell differences below {self.margin:.0%}"
        )


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice and its certificate.

    Args:
        model: Costs of the units, of the kind that each of them is.
        strategies: One per unit.
        certificate: How good it is.
    """

    model: ModelCosts
    strategies: tuple[Strategy, ...]
    certificate: Certificate

    @property
    def kinds(self) -> tuple[UnitKind, ...]:
        """Activation checkpointing of each unit, and where it is kept."""
        return tuple(unit.kind for unit in self.model.units)


@dataclass(frozen=True, slots=True)
class BatchSolution:
    """The batch size with the most samples per second.

    Args:
        model: Costs at that size.
        solution: The choice for it.
        samples_per_s: Of all ranks together.
        upper_bound: Of any size that was given, by the certificates.
        tried: The sizes that were solved, with samples per second; None where nothing fits.
    """

    model: ModelCosts
    solution: Solution
    samples_per_s: float
    upper_bound: float
    tried: dict[int, float | None]


@checked
def solve(
    model: ModelCosts,
    cluster: Cluster,
    strategies: Sequence[Strategy | str],
    limit_bytes: int | None = None,
    *,
    max_labels: int = _MAX_LABELS,
    tolerance: float = 0.0,
    progress: Progress = SILENT,
) -> Solution:
    """The strategies, and the kinds of units, with the shortest step whose peak fits.

    Args:
        model: Costs of its units; one that has alternatives may be taken as any of them.
        cluster: Devices and links.
        strategies: Those that each unit may have.
        limit_bytes: Of the peak; that of the devices by default.
        max_labels: Size of a search, beyond which it drops the least promising, and the gap may stay above 0.
        tolerance: One strategy for all units is preferred to what takes less time by no more than this part, and among
            several such the one that needs least memory. The bounds stay those of all choices.
        progress: Hears how far it is.

    Raises:
        PlanError: Nothing fits: by how many bytes, and which units cause it. Or there is nothing to choose.

    Communicates:
        Nothing: all ranks that give the same arguments get the same.
    """
    limit_bytes = cluster.memory_bytes if limit_bytes is None else limit_bytes
    if limit_bytes <= 0:
        raise PlanError(f"plan: the memory limit must be above 0 bytes, but it is {limit_bytes}. Pass memory='16GiB'.")
    known = list(dict.fromkeys(Strategy.of(strategy).on(cluster.num_ranks) for strategy in strategies))
    if not known:
        raise PlanError("plan: units need strategies to choose from, but there are none. Pass ('ddp', 'full').")
    chain = Chain.of(model, known, cluster)
    incumbent = Incumbent(chain, limit_bytes)
    bounds = _solve_chain(chain.copy(), limit_bytes, incumbent, max_labels, progress)
    if incumbent.chosen is None:
        raise does_not_fit(model, chain, known, limit_bytes, cluster.num_ranks)
    kinds, numbers = np.divmod(chain.numbers[incumbent.chosen], len(known))
    own = model.under([model.kinds[kind] for kind in kinds])
    found = tuple(known[number] for number in numbers)
    fastest = at_rest(own, cluster, known, found, limit_bytes, incumbent.cost)
    solved, chosen = own, fastest
    if tolerance:
        models = [*(model.under(kind) for kind in model.kinds), own]
        simple = simplest(models, cluster, known, limit_bytes, incumbent.cost * (1 + tolerance))
        if simple is not None and simple not in ((own, found), (own, fastest)):
            solved, chosen = simple
            given = solved, cluster, known, chosen, limit_bytes
            chosen = at_rest(*given, step_time(solved, chosen, cluster), is_simple=True)
    is_fastest, fastest_peak = (solved, chosen) == (own, fastest), peak_bytes(own, fastest, cluster)
    certificate = Certificate(
        incumbent.cost if is_fastest else max(step_time(solved, chosen, cluster), incumbent.cost),
        min(bounds.proven, incumbent.cost),
        min(bounds.relaxed, incumbent.cost),
        fastest_peak if is_fastest else peak_bytes(solved, chosen, cluster),
        limit_bytes,
        bounds.num_labels,
        fastest,
        tuple(unit.kind for unit in own.units),
        incumbent.cost,
        fastest_peak,
        tolerance,
    )
    return Solution(solved, chosen, certificate)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Bounds from the search and from the relaxation alone, and the size of the search."""

    proven: float
    relaxed: float
    num_labels: int


def _solve_chain(chain: Chain, limit_bytes: int, incumbent: Incumbent, max_labels: int, progress: Progress) -> _Bounds:
    """Solve with the rows that were violated so far, until what is best under them violates none.

    Each row is the memory at one moment; few of them decide, and leaving others out only allows more choices.
    """
    smallest = smallest_peak(chain, enough_bytes=limit_bytes)
    if smallest.least_bytes > limit_bytes:
        return _Bounds(np.inf, np.inf, 0)
    incumbent.offer(smallest.chosen)
    relaxation = Relaxation(chain, limit_bytes, incumbent)
    found, violated = _Bounds(-np.inf, -np.inf, 0), list[int]()
    while found.num_labels <= max_labels:
        for row in violated:
            relaxation.add(row)
        relaxation.ascend()
        progress.at(f"bounding at {len(relaxation.rows)} moments")
        if not relaxation.rows:
            return _Bounds(incumbent.cost, relaxation.bound, 0)
        relaxation.round()
        if incumbent.chosen is None:
            incumbent.offer(smallest_peak(chain, is_exact=True).chosen)
        if incumbent.chosen is None:
            return _Bounds(np.inf, np.inf, 0)
        relaxation.isolate()
        found, violated = _search(chain, relaxation, incumbent, max_labels, found, progress)
        if not violated:
            break
    return found


def _search(
    chain: Chain, relaxation: Relaxation, incumbent: Incumbent, max_labels: int, known: _Bounds, progress: Progress
) -> tuple[_Bounds, list[int]]:
    """A narrow search for a better incumbent, then, with what that excludes left out, the full one.

    Returns:
        The best bounds so far, and rows that count from now on: a choice that violates them would be better.
    """
    for head in promising(chain, relaxation, incumbent.cost):
        relaxation.dive(head)
    proven, num_labels, violated = known.proven, known.num_labels, list[int]()
    for width in (_NARROW, max(_NARROW, max_labels // chain.num_units)):
        relaxation.tighten()
        width = min(width, _MOST_IN_ROWS) if len(relaxation.rows) > 1 else width
        if relaxation.bound >= incumbent.cost * (1 - TOLERANCE):
            return _Bounds(incumbent.cost, relaxation.bound, num_labels), []
        found = search(chain, relaxation, incumbent.cost, width, progress)
        num_labels += found.num_labels
        best_s = incumbent.cost if found.chosen is None else chain.cost(found.chosen)
        proven = max(proven, min(best_s, found.dropped_bound))
        if found.chosen is not None:
            incumbent.repair(found.chosen)
        incumbent.improve(relaxation.priced)
        close = _CLOSE if len(relaxation.rows) == 1 else _CLOSE_IN_ROWS
        is_long = max_labels < _MANY * _NARROW * chain.num_units
        if is_long and max(proven, relaxation.bound) >= incumbent.cost * (1 - close):
            break
        if found.chosen is not None:
            violated = relaxation.new_of(_violated(chain, found.chosen, incumbent.limit_bytes))
        if violated or not np.isfinite(found.dropped_bound):
            break
    relaxed = relaxation.bound - 1e-9 * abs(relaxation.bound)
    return _Bounds(max(proven, relaxed), relaxed, num_labels), violated


def _violated(chain: Chain, chosen: Ints, limit_bytes: int) -> list[int]:
    """The memory row that exceeds the limit most, and the one that does of those that lie further away; if any do."""
    values, found = chain.rows.values(chosen), list[int]()
    for row in np.argsort(-values, kind="stable"):
        if values[row] <= limit_bytes or len(found) == _NUM_VIOLATED:
            break
        if all(abs(int(row) % chain.num_units - other % chain.num_units) > 1 for other in found):
            found.append(int(row))
    return found


def can_fit(model: ModelCosts, cluster: Cluster, strategies: Sequence[Strategy], limit_bytes: int) -> bool:
    """Whether some choice may fit into a limit; False if by proof none does. Times count not."""
    return smallest_peak(Chain.of(model, strategies, cluster), enough_bytes=limit_bytes).least_bytes <= limit_bytes


@checked
def solve_batch(
    costs_at: Callable[[int], ModelCosts],
    batch_sizes: Iterable[int],
    cluster: Cluster,
    strategies: Sequence[Strategy | str],
    limit_bytes: int | None = None,
    *,
    max_labels: int = _MAX_LABELS,
    tolerance: float = 0.0,
    progress: Progress = SILENT,
) -> BatchSolution:
    """The batch size with the most samples per second, and the choice for it.

    Sizes whose bound (the step without any limit) is below the best so far are not searched.

    Args:
        costs_at: Costs of the model at a batch size; its `batch_size` is what counts as samples.
        batch_sizes: Those that may be taken.
        cluster: Devices and links.
        strategies: Those that each unit may have.
        limit_bytes: As in `solve`.
        max_labels: As in `solve`.
        tolerance: As in `solve`.
        progress: Hears how far it is.

    Raises:
        PlanError: At no size anything fits; or there is no size.
    """
    sizes = sorted(set(batch_sizes))
    if not sizes:
        raise PlanError("plan: there must be batch sizes to choose from, but there are none. Pass range(1, 65).")
    models, fastest = list[ModelCosts](), list[float]()
    for i, size in enumerate(sizes):
        progress.at(f"costs of batch {size}", i / (2 * len(sizes)))
        models.append(costs_at(size))
        fastest.append(_samples_per_s(models[-1], cluster, fastest_step_s(models[-1], cluster, strategies)))
    best: BatchSolution | None = None
    tried: dict[int, float | None] = {}
    bound, error = 0.0, None
    for i in sorted(range(len(sizes)), key=lambda i: -fastest[i]):
        if best is not None and fastest[i] <= best.samples_per_s:
            break
        place = len(tried) + 1
        shares = (0.5 + (place + k) / (2 * len(sizes)) for k in (-1, 0))
        own = Stretch(progress, f"batch {sizes[i]} ({place} of {len(sizes)}): ", *shares)
        own.at("solving")
        given = (models[i], cluster, strategies, limit_bytes)
        try:
            solution = solve(*given, max_labels=max_labels, tolerance=tolerance, progress=own)
        except PlanError as raised:
            tried[sizes[i]] = None
            error = raised if error is None or sizes[i] == min(tried) else error
            continue
        rate = _samples_per_s(models[i], cluster, solution.certificate.step_s)
        tried[sizes[i]] = rate
        bound = max(bound, _samples_per_s(models[i], cluster, solution.certificate.lower_bound_s))
        if best is None or rate > best.samples_per_s:
            best = BatchSolution(solution.model, solution, rate, rate, tried)
    if best is None:
        assert error is not None
        raise error
    return replace(best, upper_bound=bound)


def fastest_step_s(model: ModelCosts, cluster: Cluster, strategies: Sequence[Strategy | str]) -> float:
    """The shortest step without any limit on memory."""
    known = list(dict.fromkeys(Strategy.of(strategy).on(cluster.num_ranks) for strategy in strategies))
    chain = Chain.of(model, known, cluster)
    return Relaxation(chain, np.iinfo(np.int64).max, Incumbent(chain, 0)).bound


def _samples_per_s(model: ModelCosts, cluster: Cluster, step_s: float) -> float:
    return model.batch_size * cluster.num_ranks / step_s if step_s > 0 else np.inf
