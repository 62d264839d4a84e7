"""Which strategy each unit should have: the shortest step whose peak memory fits, with a proof."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dshard import arguments
from dshard.errors import PlanError
from dshard.planner.costs import Cluster, ModelCosts, UnitCosts, UnitKind
from dshard.planner.memory import RESERVED, peak_bytes
from dshard.planner.options import CLUSTER_WAY, check_costs
from dshard.planner.search import Chain, fastest, smallest_peak
from dshard.planner.tables import does_not_fit
from dshard.planner.texts import Progress, bytes_text, seconds_text, silent
from dshard.planner.timeline import step_time
from dshard.policies import Strategy, read_candidates

_MAX_LABELS = 600_000
_AS_LONG = 1e-9
_MAX_ROUNDS = 20  # of a choice that takes more as it runs than its units alone have told
_ROOMS = 1000  # rooms that are closer than this part of the limit are taken as one
# Of a step: two plans that are predicted to be closer than that cannot be told apart.
MEASURED = 0.02
# A datasheet's times are off alike for all strategies in what computes, not in what waits for communication. That is
# off by up to 7.6 points of a step among runs of papers, under full, which sends three parts where the others send two:
# a third of it, 2.5 points, does not cancel out between two strategies (benchmarks/calibration/README.md).
DATASHEET = 0.03


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


def _read_search(
    who: str, strategies: Any, limit_bytes: Any, max_labels: Any, tolerance: Any, progress: Any
) -> tuple[tuple[Strategy, ...], int | None, int, float]:
    """Check what `solve` and `solve_batch` are told about the search, and return it as they use it."""
    candidates = read_candidates(who, "strategies", strategies)
    limit_bytes = arguments.count(who, "limit_bytes", limit_bytes, way="Pass 16 << 30.", or_none=True)
    allowed, way = "a part of a step, 0 or more", "Pass 0 for the fastest plan."
    tolerance = arguments.from_0(who, "tolerance", tolerance, allowed, way)
    arguments.function(who, "progress", progress, "a line", "Pass print.")
    return candidates, limit_bytes, arguments.count(who, "max_labels", max_labels), tolerance


def solve(
    model: ModelCosts,
    cluster: Cluster,
    strategies: Sequence[Strategy | str],
    limit_bytes: int | None = None,
    *,
    max_labels: int = _MAX_LABELS,
    tolerance: float = 0.0,
    progress: Progress = silent,
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
        progress: Is called with a line about what it is at, now and then.

    Raises:
        ArgumentError: An argument is none of what it may be.
        PlanError: Nothing fits: by how many bytes, and which units cause it.

    Communicates:
        Nothing: all ranks that give the same arguments get the same.
    """
    check_costs("solve", model, cluster)
    candidates, limit_bytes, max_labels, tolerance = _read_search(
        "solve", strategies, limit_bytes, max_labels, tolerance, progress
    )
    limit_bytes = cluster.memory_bytes if limit_bytes is None else limit_bytes
    if limit_bytes <= 0:
        raise PlanError(f"plan: the memory limit must be above 0 bytes, but it is {limit_bytes}. Pass memory='16GiB'.")
    known = list(dict.fromkeys(strategy.on(cluster.num_ranks) for strategy in candidates))
    chain = Chain.of(model, known, cluster)
    smallest = smallest_peak(chain, enough_bytes=limit_bytes)
    if smallest.least_bytes <= limit_bytes < smallest.peak_bytes:
        smallest = smallest_peak(chain, is_exact=True)
    if smallest.peak_bytes > limit_bytes:
        raise does_not_fit(model, chain, known, limit_bytes, cluster.num_ranks)
    best = fastest(chain, limit_bytes, smallest.chosen, max_labels, progress)
    kinds, numbers = np.divmod(chain.numbers[best.chosen], len(known))
    own = model.under([model.kinds[kind] for kind in kinds])
    found = tuple(known[number] for number in numbers)
    quickest = at_rest(own, cluster, known, found, limit_bytes, best.cost)
    solved, chosen = own, quickest
    if tolerance:
        models = [*(model.under(kind) for kind in model.kinds), own]
        simple = simplest(models, cluster, known, limit_bytes, best.cost * (1 + tolerance))
        if simple is not None and simple not in ((own, found), (own, quickest)):
            solved, chosen = simple
            given = solved, cluster, known, chosen, limit_bytes
            chosen = at_rest(*given, step_time(solved, chosen, cluster), is_simple=True)
    is_quickest = (solved, chosen) == (own, quickest)
    certificate = Certificate(
        step_s=best.cost if is_quickest else max(step_time(solved, chosen, cluster), best.cost),
        lower_bound_s=best.proven,
        relaxed_bound_s=best.relaxed,
        peak_bytes=peak_bytes(solved, chosen, cluster),
        limit_bytes=limit_bytes,
        num_labels=best.num_labels,
        fastest=quickest,
        fastest_kinds=tuple(unit.kind for unit in own.units),
        fastest_s=best.cost,
        fastest_peak_bytes=peak_bytes(own, quickest, cluster),
        margin=tolerance,
    )
    return Solution(solved, chosen, certificate)


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
        if step_time(model, changed, cluster) <= step_s * (1 + _AS_LONG):
            return changed
    return tuple(chosen)


def _staying(unit: UnitCosts, strategy: Strategy, known: Sequence[Strategy], *, reaches_full: bool) -> Strategy:
    """What stays, in the place of `keep`; and of `full`, for a unit that its backward does not use."""
    is_once = strategy.base == "full" and not unit.is_used_in_backward and strategy.num_slices == 1
    if strategy.base != "keep" and not (is_once and reaches_full):
        return strategy
    others = (replace(strategy, base=base) for base in ("zero1", "zero2"))
    return next((other for other in others if other in known), strategy)


def can_fit(model: ModelCosts, cluster: Cluster, strategies: Sequence[Strategy], limit_bytes: int) -> bool:
    """Whether some choice may fit into a limit; False if by proof none does. Times count not."""
    return smallest_peak(Chain.of(model, strategies, cluster), enough_bytes=limit_bytes).least_bytes <= limit_bytes


def solve_batch(
    costs_at: Callable[[int], ModelCosts],
    batch_sizes: Iterable[int],
    cluster: Cluster,
    strategies: Sequence[Strategy | str],
    limit_bytes: int | None = None,
    *,
    max_labels: int = _MAX_LABELS,
    tolerance: float = 0.0,
    progress: Progress = silent,
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
        progress: Is called with a line about what it is at, now and then.

    Raises:
        ArgumentError: An argument is none of what it may be.
        PlanError: At no size anything fits.
    """
    who = "solve_batch"
    arguments.function(who, "costs_at", costs_at, "a batch size", "Pass one that gives ModelCosts.")
    arguments.instance(who, "cluster", cluster, Cluster, CLUSTER_WAY)
    read = _read_search(who, strategies, limit_bytes, max_labels, tolerance, progress)
    strategies, limit_bytes, max_labels, tolerance = read
    allowed, way = "batch sizes to choose from, integers of at least 1", "Pass range(1, 65)."
    given_sizes = arguments.several(who, "batch_sizes", batch_sizes, arguments.is_count, allowed, way, least=1)
    sizes = sorted(set(map(int, given_sizes)))
    models, unlimited = list[ModelCosts](), list[float]()
    for i, size in enumerate(sizes):
        progress(f"costs of batch {size} ({i + 1} of {len(sizes)})")
        models.append(costs_at(size))
        unlimited.append(_samples_per_s(models[-1], cluster, fastest_step_s(models[-1], cluster, strategies)))
    best: BatchSolution | None = None
    tried: dict[int, float | None] = {}
    bound, error = 0.0, None
    for i in sorted(range(len(sizes)), key=lambda i: -unlimited[i]):
        if best is not None and unlimited[i] <= best.samples_per_s:
            break
        progress(f"solving for batch {sizes[i]} ({len(tried) + 1} of {len(sizes)})")
        given = (models[i], cluster, strategies, limit_bytes)
        try:
            solution = solve(*given, max_labels=max_labels, tolerance=tolerance, progress=progress)
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
    return chain.cheapest(np.zeros((chain.num_units, chain.num_options)))[0]


def _samples_per_s(model: ModelCosts, cluster: Cluster, step_s: float) -> float:
    return model.batch_size * cluster.num_ranks / step_s if step_s > 0 else np.inf


def within_limit(choose: Callable[[int], Solution], cluster: Cluster, limit_bytes: int, memory_of: str) -> Solution:
    """A choice whose live bytes fit as it runs: with less room, if it takes more than its units alone have told.

    Args:
        choose: The best choice of units whose bytes fit into so much.
        cluster: Devices and links.
        limit_bytes: Of what `memory_of` says.
        memory_of: "live", or "reserved" or "expandable" segments, of which live bytes take a measured part.

    Raises:
        PlanError: Nothing was found that fits; or CUDA's allocator is asked for where there is none.
    """
    room = live_bytes = live_room(cluster, limit_bytes, memory_of)
    too_small, too_large = 0, room  # in which nothing fits, and in which what was chosen takes more than the limit
    least = None
    for _ in range(_MAX_ROUNDS):
        try:
            with naming_limit(limit_bytes, room, memory_of):
                solution = choose(room)
        except PlanError:
            if least is None:
                raise
            too_small, room = room, (room + too_large) // 2
            if too_large - too_small <= live_bytes // _ROOMS:
                break
            continue
        peak = peak_bytes(solution.model, solution.strategies, cluster)
        if peak <= live_bytes:
            certificate = replace(
                solution.certificate,
                peak_bytes=peak,
                limit_bytes=limit_bytes,
                left_bytes=limit_bytes - room,
                memory_of=memory_of,
            )
            return replace(solution, certificate=certificate)
        least, too_large = min(least or peak, peak), room
        room -= peak - live_bytes
        if room <= too_small:
            room = (too_small + too_large) // 2
    assert least is not None
    of_limit = "" if memory_of == "live" else f", their part of {limit_bytes} {memory_of} bytes"
    raise PlanError(
        f"plan: live bytes must fit into {live_bytes}{of_limit}, but the least that was found is {least}, "
        f"{least - live_bytes} too many. Use a smaller batch or more ranks."
    )


@contextmanager
def naming_limit(limit_bytes: int, room: int, memory_of: str) -> Iterator[None]:
    """Name the limit that was given in errors of the block, which searches within what that leaves live bytes."""
    try:
        yield
    except PlanError as error:
        if room == limit_bytes:
            raise
        raise PlanError(f"{error} The limit of {limit_bytes} {memory_of} bytes leaves {room} to plan with.") from error


def live_room(cluster: Cluster, limit_bytes: int, memory_of: str) -> int:
    """Bytes of tensors that may live where so many live, reserved or expandable bytes are the limit.

    Raises:
        PlanError: CUDA's allocator is asked for where there is none.
    """
    if memory_of != "live" and cluster.keeps_received_rows:
        raise PlanError(
            f"plan: memory_of must be 'live' for ranks that communicate over gloo, whose memory is not that of CUDA's "
            f"allocator, but it is {memory_of!r}. Leave it out, or pass cluster=dshard.planner.cluster_of(...)."
        )
    return int(limit_bytes / RESERVED.get(memory_of, 1.0))
