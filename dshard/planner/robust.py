"""Between choices that predictions cannot tell apart: the one that loses least where they are off."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dshard.errors import PlanError
from dshard.planner.costs import Cluster, Link, Links, ModelCosts, UnitKind
from dshard.planner.memory import RESERVED, peak_bytes
from dshard.planner.options import options_of
from dshard.planner.rates import IN_TEN, Interval, Spread
from dshard.planner.solver import Certificate, Solution, at_rest
from dshard.planner.tables import Choice, aligned, named
from dshard.planner.texts import seconds_text
from dshard.planner.timeline import step_time
from dshard.policies import Strategy

FASTEST = "fastest"  # the name of the choice that the solver found
_NONE = Interval(0.0, 0.0)
_MAX_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Close:
    """A choice that cannot be told apart from the fastest.

    Args:
        name: Its strategy, or that it is the fastest one.
        step_s: As predicted.
        across_s: What its communication across hosts takes, hidden or not.
        worst: By which part of a step it is longer than another of these at most, if the difference between the two is
            off as that of 8 pairs in 10 was.
    """

    name: str
    step_s: float
    across_s: float
    worst: float


@dataclass(frozen=True, slots=True)
class Doubt:
    """How far a plan's predictions may be off, and which choices that leaves open.

    Args:
        steps: Of a measured step, in parts of the predicted one; None where nothing says so. On a cluster of which the
            profile has seen no run, unless it is of that cluster's; wider on devices of a family without runs.
        pairs: Seconds by which a difference between two choices may be longer, for each second that one communicates
            longer across hosts.
        num_pairs: Runs that say the latter.
        close: What cannot be told apart, the smallest worst case first; empty where there is one choice.
        taken: The one that was taken.
    """

    steps: Interval | None = None
    pairs: Interval = _NONE
    num_pairs: int = 0
    close: tuple[Close, ...] = ()
    taken: str = ""


def within_limit(
    choose: Callable[[int], tuple[Solution, Doubt | None]], cluster: Cluster, limit_bytes: int, memory_of: str
) -> tuple[Solution, Doubt | None]:
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
    least = None
    for _ in range(_MAX_ROUNDS):
        with naming_limit(limit_bytes, room, memory_of):
            solution, doubt = choose(room)
        peak = peak_bytes(solution.model, solution.strategies, cluster)
        if peak <= live_bytes:
            certificate = replace(
                solution.certificate,
                peak_bytes=peak,
                limit_bytes=limit_bytes,
                left_bytes=limit_bytes - room,
                memory_of=memory_of,
            )
            return replace(solution, certificate=certificate), doubt
        least, room = min(least or peak, peak), room - (peak - live_bytes)
        if room <= 0:
            break
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


def across_s(model: ModelCosts, strategies: Sequence[Strategy], cluster: Cluster) -> float:
    """Seconds of a step's collectives across hosts, hidden or not: what is left if links within hosts take no time."""
    instant = replace(cluster, inside=Links.of(Link(0.0, 0.0)))
    total_s, again = 0.0, model.num_backwards - 1
    for each in options_of(model, strategies, instant):
        total_s += each.gather_s + each.reduce_s + again * (each.gather_again_s + each.reduce_early_s)
        always_s = each.gather_backward_s + each.forward_comm_s + each.backward_comm_s
        total_s += model.num_backwards * always_s
    return total_s


def close_of(
    steps_s: Mapping[str, float], across: Mapping[str, float], pairs: Interval, margin: float, most: float | None
) -> tuple[Close, ...]:
    """Which choices cannot be told apart from the fastest, with the worst case of each, the smallest first.

    Args:
        steps_s: Predicted, by name.
        across: Communication across hosts, likewise.
        pairs: Seconds by which a difference may be longer, per second of communication more; holds 0.
        margin: By which part of a step all differences may be off besides.
        most: By which part of the fastest step a choice may be predicted to be longer; None for any.
    """

    def longer_s(one: str, other: str, *, end: float) -> float:
        """By how much one may be longer than another: the most (1), or the least (-1)."""
        more_s = across[one] - across[other]
        off_s = max(end * more_s * pairs.low, end * more_s * pairs.high)
        return steps_s[one] - steps_s[other] + end * off_s

    fastest = min(steps_s, key=lambda name: steps_s[name])
    fastest_s = steps_s[fastest]
    names = [
        name
        for name, step_s in steps_s.items()
        if (most is None or step_s <= fastest_s * (1 + most))
        and (step_s <= fastest_s * (1 + margin) or longer_s(name, fastest, end=-1) <= 0)
    ]
    found = []
    for name in names:
        worst = max(longer_s(name, other, end=1) / steps_s[other] if steps_s[other] else 0.0 for other in names)
        found.append(Close(name, steps_s[name], across[name], max(0.0, worst)))
    return tuple(sorted(found, key=lambda each: (each.worst, each.step_s)))


def robust(
    model: ModelCosts,
    cluster: Cluster,
    solution: Solution,
    known: Sequence[Strategy],
    spread: Spread,
    *,
    margin: float,
    most: float | None = None,
) -> tuple[Solution, Doubt]:
    """The choice whose worst case is smallest, of those that cannot be told apart; and what is known of them.

    Worst cases that differ by no more than `margin` count as one, and among them the rule is that of `solve`: one
    strategy for all units, of few slices and little memory. So where nothing is in doubt the choice is that of `solve`.

    Args:
        model: Costs of its units.
        cluster: Devices and links.
        solution: Of `solve`, with the same margin as its tolerance.
        known: The strategies that a unit may have.
        spread: Of the profile that the costs are from.
        margin: By which part of a step differences may be off that nothing explains.
        most: By which part the choice may be predicted to be slower than the fastest; None for any.
    """
    told = solution.certificate
    given = _choices(model, cluster, told, known)
    steps_s = {name: step_time(*each.choice, cluster) for name, each in given.items()}
    if FASTEST in given:
        steps_s[FASTEST] = told.fastest_s
    across = {name: across_s(*each.choice, cluster) for name, each in given.items()}

    def best(close: Sequence[Close]) -> str:
        enough = [each.name for each in close if each.worst <= close[0].worst + margin]
        return min(enough, key=lambda name: (name == FASTEST, *given[name].order, steps_s[name]))

    pairs = spread.pairs or _NONE
    close = close_of(steps_s, across, pairs, margin, most)
    taken = best(close)
    if taken != best(close_of(steps_s, across, _NONE, margin, most)):
        own, chosen = given[taken].choice
        if taken != FASTEST:
            chosen = at_rest(own, cluster, known, chosen, told.limit_bytes, steps_s[taken], is_simple=True)
        fastest_across = across_s(model.under(told.fastest_kinds), told.fastest, cluster)
        less_s = fastest_across - across[taken]
        doubt_s = max(pairs.low * less_s, pairs.high * less_s)
        certificate = replace(
            told,
            step_s=told.fastest_s if taken == FASTEST else max(step_time(own, chosen, cluster), told.fastest_s),
            peak_bytes=peak_bytes(own, chosen, cluster),
            margin=max(margin, doubt_s / told.fastest_s if told.fastest_s else 0.0),
        )
        solution = Solution(own, tuple(chosen), certificate)
    return solution, Doubt(spread.steps, pairs, spread.num_pairs, close, taken)


@dataclass(frozen=True, slots=True)
class _Given:
    """A choice that fits, and what decides between such as are as good: as in `simplest`."""

    choice: Choice
    order: tuple[int, int, int]


def _choices(model: ModelCosts, cluster: Cluster, told: Certificate, known: Sequence[Strategy]) -> dict[str, _Given]:
    """Each strategy for all units, of each kind, or of those of the fastest choice; and the latter."""
    fastest = model.under(told.fastest_kinds)
    kinds: dict[UnitKind | str, ModelCosts] = {kind: model.under(kind) for kind in model.kinds}
    if fastest not in kinds.values():
        kinds[_mixed(told.fastest_kinds)] = fastest
    found = {}
    for place, (kind, own) in enumerate(kinds.items()):
        for strategy in known:
            same = (strategy,) * len(model.units)
            peak = peak_bytes(own, same, cluster)
            if peak <= told.limit_bytes:
                found[named(strategy, kind)] = _Given((own, same), (strategy.num_slices, place, peak))
    if (fastest, told.fastest) not in [each.choice for each in found.values()]:
        slices = max(each.num_slices for each in told.fastest)
        found[FASTEST] = _Given((fastest, told.fastest), (slices, len(kinds), told.fastest_peak_bytes))
    return found


def _mixed(kinds: Sequence[UnitKind]) -> str:
    """Names the kinds of units that differ."""
    differs = {"checkpointing": len({kind.checkpointing for kind in kinds}) > 1}
    differs["offload"] = len({kind.is_offloaded for kind in kinds}) > 1
    return f"mixed {' and '.join(name for name, does in differs.items() if does)}"


def doubt_lines(doubt: Doubt) -> list[str]:
    """A table of the choices that cannot be told apart, and why one was taken; nothing where there is one choice."""
    if len(doubt.close) < 2:
        return []
    rows = [("cannot be told apart", "step", "across hosts", "at worst longer by")]
    for each in doubt.close:
        name = f"{each.name} (taken)" if each.name == doubt.taken else each.name
        rows.append((name, seconds_text(each.step_s), seconds_text(each.across_s), f"{each.worst:.1%}"))
    why = "no run says how far off differences are"
    if not any(each.across_s for each in doubt.close):
        why += " within a host"
    elif doubt.num_pairs:
        why = (
            f"for each second that one communicates longer across hosts, their difference is {-doubt.pairs.low:.2g} s "
            f"shorter to {doubt.pairs.high:.2g} s longer than predicted in {IN_TEN} of 10 ({doubt.num_pairs} pairs)"
        )
    return [*aligned(rows, to_left=(0,)), why, ""]
