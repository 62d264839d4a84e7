"""How a step's host time and a rank's memory grow with the number of ranks and of units, in torch's fake process group.

Nothing travels there, so what is left is what the library itself does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from dshard.bench.common import Summary, interleave, summary
from dshard.bench.footprint import bookkeeping_bytes, footprint
from dshard.bench.models import Size, step_of
from dshard.bench.output import Output, table
from dshard.bench.plots import Lines, Panel
from dshard.testing import fake_world

_KINDS = ("FSDP2", "dshard")
_TOKENS = 16
_RANKS_BY_UNITS = 8
_UNITS_PER_CASE = 3000  # rounds are so few that about so many units' steps are timed
_FEW_UNITS = 500  # up to here a second warm-up costs little
_MAX_BOOKKEEPING_UNITS = 200  # tracemalloc is slow, and an average needs no more
_COLUMNS = {
    "median_ms": "ms",
    "shard_bytes": "shards MB",
    "peak_bytes": "step's peak MB",
    "gathered_bytes": "gathered MB",
}


def _timed(size: Size, num_ranks: int, num_rounds: int) -> dict[str, Summary]:
    """Steps of both, interleaved, on rank 0 of a fake world."""
    with fake_world(0, num_ranks):
        variants = {kind: step_of(kind, size, 1, _TOKENS) for kind in _KINDS}
        num_warmups = 2 if size.layers <= _FEW_UNITS else 1
        samples = interleave(variants, num_rounds=num_rounds, num_warmups=num_warmups)
    rows = {kind: summary(some) for kind, some in samples.items()}
    for row in rows.values():
        row.pop("exposed_ms", None)  # nothing travels
    return rows


def _by_ranks(world_sizes: Sequence[int], num_rounds: int, size: Size) -> dict[str, dict[str, Summary]]:
    results: dict[str, dict[str, Summary]] = {}
    for num_ranks in world_sizes:
        rows = _timed(size, num_ranks, num_rounds)
        with fake_world(0, num_ranks):
            for kind, row in rows.items():
                row.update(footprint(kind, size, _TOKENS))
        results[str(num_ranks)] = rows
        print(f"{num_ranks:>6} ranks" + _line(rows), flush=True)
    return results


def _by_units(unit_counts: Sequence[int], num_rounds: int, size: Size) -> dict[str, dict[str, Summary]]:
    results: dict[str, dict[str, Summary]] = {}
    for num_units in unit_counts:
        sized = Size(vocab=size.vocab, width=size.width, layers=num_units, heads=size.heads)
        rounds = max(2, min(num_rounds, _UNITS_PER_CASE // num_units))
        rows = _timed(sized, _RANKS_BY_UNITS, rounds)
        if num_units <= _MAX_BOOKKEEPING_UNITS:
            with fake_world(0, _RANKS_BY_UNITS):
                plain = bookkeeping_bytes("unsharded", sized, _TOKENS)
                for kind, row in rows.items():
                    row["bookkeeping_bytes_per_unit"] = bookkeeping_bytes(kind, sized, _TOKENS) - plain
        results[str(num_units)] = rows
        print(f"{num_units:>6} units" + _line(rows), flush=True)
    return results


def _line(rows: Mapping[str, Summary]) -> str:
    return "".join(f"   {kind} {row['median_ms']:.1f} ms" for kind, row in rows.items())


def fit(points: Mapping[int, float]) -> dict[str, float]:
    """How milliseconds grow with units.

    Args:
        points: Milliseconds by number of units, at least two.

    Returns:
        `ms_per_unit`: slope of the least-squares line. `exponent`: of the least-squares power law, 1 where the growth
        is linear. `ratio`: ms per unit at the most units, over that at about a tenth of them, which are
        `ratio_of_units` and `ratio_to_units`.

    Example:
        >>> fit({1: 2.0, 10: 20.0, 100: 200.0})["ms_per_unit"]
        2.0
    """
    most = max(points)
    tenth = min((x for x in points if x != most), key=lambda x: abs(math.log(10 * x / most)))
    return {
        "ms_per_unit": _slope(list(points), list(points.values())),
        "exponent": _slope([math.log(x) for x in points], [math.log(y) for y in points.values()]),
        "ratio": points[most] / most / (points[tenth] / tenth),
        "ratio_of_units": most,
        "ratio_to_units": tenth,
    }


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    x_mean, y_mean = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    covariance = math.fsum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return covariance / math.fsum((x - x_mean) ** 2 for x in xs)


def _series(results: Mapping[str, Mapping[str, Summary]], key: str) -> dict[str, dict[int, float]]:
    """Series of each kind: what a key says over the numbers that the results are named by."""
    found: dict[str, dict[int, float]] = {kind: {} for kind in _KINDS}
    for x, rows in results.items():
        for kind in _KINDS:
            value = rows[kind].get(key)
            if value is not None:
                found[kind][int(x)] = value
    return found


def _memory_table(by_ranks: Mapping[str, Mapping[str, Summary]]) -> str:
    rows = {}
    for num_ranks, kinds in by_ranks.items():
        for kind, row in kinds.items():
            values = [(row[key], 1.0 if key == "median_ms" else 1e-6) for key in _COLUMNS]
            rows[f"{num_ranks} ranks, {kind}"] = ["-" if v is None else f"{v * by:.3f}" for v, by in values]
    return table(list(_COLUMNS.values()), rows)


def run(output: Output, *, world_sizes: Sequence[int], unit_counts: Sequence[int], num_rounds: int, size: Size) -> None:
    """Measure, print and write `scale_fake`.

    Args:
        output: Where to.
        world_sizes: Ranks of the fake groups.
        unit_counts: Numbers of blocks, at least two; each block is a unit.
        num_rounds: Of each; large numbers of units get fewer.
        size: Of the model by ranks; its layers are replaced by units.
    """
    torch.set_num_threads(1)
    by_ranks = _by_ranks(world_sizes, num_rounds, size)
    by_units = _by_units(unit_counts, num_rounds, size)
    print(f"\nmemory per rank, {size.layers} blocks of width {size.width}\n{_memory_table(by_ranks)}")
    times = _series(by_units, "median_ms")
    fits = {kind: fit(points) for kind, points in times.items()}
    print()
    for kind, f in fits.items():
        print(
            f"{kind}: {f['ms_per_unit']:.3f} ms per unit; a unit costs {f['ratio']:.2f} times as much among "
            f"{f['ratio_of_units']:.0f} as among {f['ratio_to_units']:.0f} (1 is linear; exponent {f['exponent']:.3f})"
        )
    for kind, points in _series(by_units, "bookkeeping_bytes_per_unit").items():
        if points:
            print(f"{kind}: {points[max(points)] / 1e3:.1f} kB of Python objects per unit over the unsharded model's")
    panels: list[Panel] = [
        Lines("host time of a step", "ms, median", "ranks", _series(by_ranks, "median_ms")),
        Lines("shards, and a step's peak on top of them", "MB", "ranks", _memory_series(by_ranks)),
        Lines("host time of a step, 8 ranks", "ms, median", "units", times),
    ]
    content = {"header": output.header(backend="fake"), "by_ranks": by_ranks, "by_units": by_units, "fit": fits}
    output.write("scale_fake", content, panels)


def _memory_series(by_ranks: Mapping[str, Mapping[str, Summary]]) -> dict[str, dict[int, float]]:
    """Series of bytes, in MB."""
    peaks, shards = _series(by_ranks, "peak_bytes"), _series(by_ranks, "shard_bytes")
    found = {**{f"{kind}, shards": points for kind, points in shards.items()}, **peaks}
    return {name: {x: value / 1e6 for x, value in points.items()} for name, points in found.items()}
