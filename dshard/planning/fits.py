"""Lines through measured collectives, and the cluster that they make."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from dshard.errors import PlanError
from dshard.planner import Cluster, Link, Links

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "in_place")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured collective.

    Args:
        wire_bytes: That each rank sent.
        seconds: Median on the slowest rank.
    """

    wire_bytes: float
    seconds: float


def fit(samples: Sequence[Sample], source: str = "measured") -> Link:
    """The line `alpha + bytes * seconds per byte`, neither below 0, whose relative errors are smallest in squares.

    Args:
        samples: Of one collective on one group.
        source: Of the link.

    Raises:
        PlanError: There are fewer than two sizes.
    """
    if len({sample.wire_bytes for sample in samples}) < 2:
        raise PlanError("links: a line needs two sizes or more, but there are fewer. Pass more sizes=.")
    wire = np.array([sample.wire_bytes for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    rows = np.stack([1 / seconds, wire / seconds], axis=1)
    (alpha, slope), *_ = np.linalg.lstsq(rows, np.ones(len(samples)), rcond=None)
    if slope < 0:  # without the other, each has a closed form
        alpha, slope = float((1 / seconds).sum() / (1 / seconds**2).sum()), 0.0
    elif alpha < 0:
        alpha, slope = 0.0, float((wire / seconds).sum() / ((wire / seconds) ** 2).sum())
    return Link(float(alpha), float(slope), source=source)


class InPlace(NamedTuple):
    """Whether full values can be once in memory that all ranks of a group read.

    Args:
        shards: Among the ranks that share a parameter.
        replicas: Among those that hold the same shard; as among all, where none do.
    """

    shards: bool
    replicas: bool


class Measurement(NamedTuple):
    """What was measured.

    Args:
        figures: Seconds, shape (parts, collectives, sizes).
        parts: Numbers of neighbouring ranks.
        sizes: Bytes.
        in_place: For each part, where the last collective was measured.
        num_ranks: All of them.
    """

    figures: Tensor
    parts: tuple[int, ...]
    sizes: tuple[int, ...]
    in_place: list[InPlace]
    num_ranks: int


def cluster_through(measured: Measurement, per_host: int, memory_bytes: int, backend: str) -> Cluster:
    """Lines through all figures."""
    parts, num_ranks = measured.parts, measured.num_ranks
    source = f"measured over {backend}, {num_ranks} ranks"

    def line(part: int, name: str, among: int) -> Link:
        i, collective = parts.index(part), COLLECTIVES.index(name)
        rounds = 2 if name == "all_reduce" else 1
        wire = [rounds * size * (among - 1) / among for size in measured.sizes]
        seconds = measured.figures[i, collective].tolist()
        return fit([Sample(w, s) for w, s in zip(wire, seconds, strict=True)], source)

    shards, replicas = {}, {}
    whole = line(num_ranks, "all_reduce", num_ranks)
    for part, is_in_place in zip(parts, measured.in_place, strict=True):
        across = whole if part == num_ranks else line(part, "all_reduce", num_ranks // part)
        in_place = line(part, "in_place", part) if is_in_place.shards else None
        links = Links(line(part, "all_gather", part), line(part, "reduce_scatter", part), whole, in_place)
        shards[part] = links
        if part < num_ranks:
            in_place = in_place if is_in_place.replicas else None
            replicas[part] = Links(links.all_gather, links.reduce_scatter, across, in_place)
    replicas[1] = shards[num_ranks]
    return Cluster(
        num_ranks=num_ranks,
        ranks_per_host=per_host,
        inside=shards[per_host if per_host > 1 else num_ranks],  # of one rank, nothing is sent
        across=shards[num_ranks] if per_host < num_ranks else None,
        memory_bytes=memory_bytes,
        overlaps=backend != "gloo",
        keeps_received_rows=backend == "gloo",
        shards=shards,
        replicas=replicas,
        source=source,
    )
