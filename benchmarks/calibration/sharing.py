"""What ranks share: a device, where collectives run beside products, and the network, where there are many hosts."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dshard.collectives import ReduceOp, ShardGroup, all_reduce
from dshard.planner import Cluster, Constant, Link
from dshard.planning.links import Sample, alone_s, fit, gathering, start_together, synchronize
from dshard.tensor.meshes import group_of

_ROUNDS = 9
_SIZES = (1 << 20, 1 << 22, 1 << 24)  # bytes that are gathered among hosts
_LARGE = {"cpu": 1 << 22, "cuda": 1 << 28}  # and beside products
_WIDTH = {"cpu": 256, "cuda": 4096}  # of these
_NOISE = 0.1  # of a measured rate: a standard deviation of its logarithm
_LEAST_DEVIATION = 0.02  # of a measured interference: no clock tells it better
_LEAST = 1e-3  # that a constant may be: it must be above 0
_LONGER = 2  # times as long as the collective are the products beside it


class Beside(Protocol):
    """Products and a collective on the device of each rank, timed; all ranks call each of these alike."""

    def products_s(self, num: int) -> float:
        """Seconds of so many products."""

    def collective_s(self) -> float:
        """Seconds of a collective."""

    def beside_s(self, num: int) -> float:
        """Seconds of so many products while a collective is under way that began with them."""

    def slowest(self, number: float) -> float:
        """The largest of all ranks' numbers."""


def measured_shares(mesh: DeviceMesh, cluster: Cluster, known: dict[str, Constant]) -> dict[str, Constant]:
    """The constants that ranks at hand can measure of what they share, drawn to what was known of them.

    Args:
        mesh: Of one dim.
        cluster: Its links, measured.
        known: Constants of a profile.

    Communicates:
        Where collectives run beside computation, some beside products; where there are three hosts or more, gathers
        among two of them and among all. All ranks must call this alike.
    """
    found, group = {}, group_of(mesh)
    if cluster.overlaps:
        found["interference"] = interference(Gathers(group), known["interference"])
    num_hosts = cluster.num_ranks // cluster.ranks_per_host
    if num_hosts >= 3:
        two, every = gathers_across(group, cluster.ranks_per_host)
        found["contention"] = contention(two, every, num_hosts, known["contention"])
    return found


def interference(probe: Beside, known: Constant, num_rounds: int = _ROUNDS) -> Constant:
    """The part of a collective's time that products lose beside it, on the rank that loses most.

    So many products are timed that they outlast the collective: what they take longer, they lost in its time.

    Args:
        probe: What is timed.
        known: What it is drawn to.
        num_rounds: Two or more, of products alone and beside a collective in turn.
    """
    collective_s = probe.slowest(statistics.median(probe.collective_s() for _ in range(num_rounds)))
    one_s = probe.slowest(statistics.median(probe.products_s(1) for _ in range(num_rounds)))
    num = max(1, math.ceil(_LONGER * collective_s / one_s))
    pairs = [(probe.products_s(num), probe.beside_s(num)) for _ in range(num_rounds)]
    lost = [(together_s - apart_s) / collective_s for apart_s, together_s in pairs]
    measured, deviation = statistics.median(lost), statistics.stdev(lost) / math.sqrt(len(lost))
    return drawn(known, probe.slowest(measured), max(probe.slowest(deviation), _LEAST_DEVIATION))


def contention(two: Link, every: Link, num_hosts: int, known: Constant) -> Constant:
    """The exponent by which a gather's rate falls from two hosts to many; the fewer hosts, the less it is told by.

    Args:
        two: Of a gather among two hosts, while the others wait.
        every: Of one among all.
        num_hosts: Three or more.
        known: What it is drawn to.
    """
    if not (two.seconds_per_byte and every.seconds_per_byte):
        return known  # these took no time per byte
    doublings = math.log(num_hosts / 2)
    measured = math.log(every.seconds_per_byte / two.seconds_per_byte) / doublings
    return drawn(known, measured, math.sqrt(2) * _NOISE / doublings)


def drawn(known: Constant, measured: float, deviation: float) -> Constant:
    """A constant that was measured, drawn to what was known before any run as far as the measurement may be off.

    Args:
        known: Its value, and by which part it differs from cluster to cluster (`Constant.spread`).
        measured: May be below 0, by noise.
        deviation: Of the measurement, in its unit.
    """
    before, after = (known.value * known.spread) ** -2, deviation**-2
    value = max((before * known.value + after * measured) / (before + after), _LEAST)
    return replace(known, value=value, uncertainty=min((before + after) ** -0.5 / value, known.spread))


def gathers_across(everyone: ShardGroup, per_host: int) -> tuple[Link, Link]:
    """Gathers among the first two hosts, while the others wait, and among all.

    Communicates:
        These; the making of groups of two hosts; all-reduces of the figures.
    """
    pair = everyone.neighbours(2 * per_host)
    is_first = everyone.rank < 2 * per_host
    links = []
    for own, has_part in ((pair, is_first), (everyone, True)):
        figures = torch.zeros(len(_SIZES), dtype=torch.float64)
        for i, size in enumerate(_SIZES):
            figures[i] = alone_s(gathering(own, size) if has_part else _wait, everyone, _ROUNDS)
        seconds = all_reduce([figures], everyone, ReduceOp.MAX, label="links").wait()[0].tolist()
        among = 2 * per_host if own is pair else everyone.num_ranks
        wire = [size * (among - 1) / among for size in _SIZES]
        links.append(fit([Sample(w, s) for w, s in zip(wire, seconds, strict=True)]))
    return links[0], links[1]


def _wait(meanwhile: Callable[[], None]) -> None:
    """Have no part in a gather."""


@dataclass(frozen=True, slots=True)
class Gathers:
    """Products of large matrices, and gathers as dshard makes them.

    Args:
        group: Of the ranks that gather.
    """

    group: ShardGroup

    def products_s(self, num: int) -> float:
        """Seconds of so many products."""
        start_together(self.group)
        marks = self._products(num)
        synchronize(self.group)
        return _between_s(*marks)

    def collective_s(self) -> float:
        """Seconds of a gather, on the slowest rank."""
        return alone_s(self._gathering(), self.group, 1)

    def beside_s(self, num: int) -> float:
        """Seconds of so many products while a gather is under way."""
        marks: list[Any] = []
        run = self._gathering()
        start_together(self.group)
        run(lambda: marks.extend(self._products(num)))
        synchronize(self.group)
        return _between_s(*marks)

    def slowest(self, number: float) -> float:
        """The largest of all ranks' numbers."""
        mine = torch.tensor([number], dtype=torch.float64, device=self.group.device)
        return float(all_reduce([mine], self.group, ReduceOp.MAX, label="links").wait()[0])

    def _gathering(self) -> Callable[[Callable[[], None]], None]:
        return gathering(self.group, _LARGE[self.group.device_type])

    def _products(self, num: int) -> Sequence[Any]:
        """Start them; marks of when the device begins with them, and has ended."""
        a, out = self._matrices()
        start = self._mark()
        for _ in range(num):
            torch.mm(a, a, out=out)
        return start, self._mark()

    def _matrices(self) -> tuple[Tensor, Tensor]:
        width, device = _WIDTH[self.group.device_type], self.group.device
        dtype = torch.bfloat16 if self.group.device_type == "cuda" else torch.float32
        return torch.ones(width, width, dtype=dtype, device=device), torch.empty(
            width, width, dtype=dtype, device=device
        )

    def _mark(self) -> Any:
        if self.group.device_type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between_s(start: Any, end: Any) -> float:
    """Between two marks, of a clock or of events that have come to pass."""
    return end - start if isinstance(start, float) else float(start.elapsed_time(end)) / 1e3
