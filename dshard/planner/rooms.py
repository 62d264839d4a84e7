"""A limit on what an allocator reserves: how much of it live bytes may take."""

from collections.abc import Callable
from dataclasses import replace

from dshard.errors import PlanError
from dshard.planner.costs import Cluster
from dshard.planner.forecast import forecast
from dshard.planner.memory import peak_bytes
from dshard.planner.robust import Doubt
from dshard.planner.solver import Solution

_MAX_ROUNDS = 20
_NEAR = 0.005  # of the limit: less room than that is not looked for
Choice = tuple[Solution, Doubt | None]


def fitted(choose: Callable[[int], Choice], cluster: Cluster, limit_bytes: int, memory_of: str) -> Choice:
    """A choice whose bytes, as they are seen, fit: with less room for those that live, as little less as is needed.

    Args:
        choose: The best choice whose live bytes fit into so much.
        cluster: Devices and links.
        limit_bytes: Of what is seen.
        memory_of: What that is: "live", "reserved" or "expandable"; as of `dshard.plan`.

    Raises:
        PlanError: Nothing was found that fits; or CUDA's allocator is asked for where there is none.
    """
    if memory_of != "live" and cluster.keeps_received_rows:
        raise PlanError(
            f"plan: memory_of must be 'live' for ranks that communicate over gloo, whose memory is not that of CUDA's "
            f"allocator, but it is {memory_of!r}. Leave it out, or pass cluster=dshard.planner.cluster_of(...)."
        )
    low, room, high = 0, limit_bytes, limit_bytes + 1  # more room than `low` may do, and `high` is too much
    best: Choice | None = None
    seen = list[int]()
    for _ in range(_MAX_ROUNDS):
        try:
            solution, doubt = choose(room)
        except PlanError:
            if not seen or memory_of == "live":
                raise
            low = room
        else:
            seen.append(_seen_bytes(solution, cluster, memory_of))
            if seen[-1] > limit_bytes:
                high = min(room, peak_bytes(solution.model, solution.strategies, cluster))  # it has used no more
            else:
                low, found = room, _certified(solution, cluster, limit_bytes, limit_bytes - room, memory_of)
                best = (found, doubt) if best is None or _step_s(found) < _step_s(best[0]) else best
        if best is not None and (memory_of == "live" or high - low <= _NEAR * limit_bytes):
            return best
        less = high - (seen[-1] - limit_bytes)
        room = less if best is None and low < less < high else (low + high) // 2
        if not low < room < high:
            break
    if best is not None:
        return best
    hint = ", or memory_of='live'" * (memory_of != "live")
    raise PlanError(
        f"plan: {memory_of} bytes must fit into {limit_bytes}, but the least that was found is {min(seen)}, "
        f"{min(seen) - limit_bytes} too many. Use a smaller batch or more ranks{hint}."
    )


def _step_s(solution: Solution) -> float:
    return solution.certificate.step_s


def _seen_bytes(solution: Solution, cluster: Cluster, memory_of: str) -> int:
    if memory_of == "live":
        return peak_bytes(solution.model, solution.strategies, cluster)
    seen = forecast(solution.model, solution.strategies, cluster)
    return seen.reserved_bytes if memory_of == "reserved" else seen.expandable_bytes


def _certified(solution: Solution, cluster: Cluster, limit_bytes: int, left_bytes: int, memory_of: str) -> Solution:
    peak = peak_bytes(solution.model, solution.strategies, cluster)
    certificate = replace(
        solution.certificate, peak_bytes=peak, limit_bytes=limit_bytes, left_bytes=left_bytes, memory_of=memory_of
    )
    return replace(solution, certificate=certificate)
