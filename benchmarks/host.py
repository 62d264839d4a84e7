"""What the library itself costs a step: tiny layers in torch's fake process group, where nothing travels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch

from benchmarks.measure import Summary, timed
from benchmarks.memory import footprint
from benchmarks.models import (
    BF16,
    COMPILED,
    HOW_ON_THE_HOST,
    KINDS,
    ON_THE_HOST,
    STEPS,
    Size,
    Workload,
    compiling_here,
    overheads,
)
from benchmarks.output import Output, bars_of, table, timing_table
from dshard.testing import fake_world

_SCALED = ("FSDP2", "dshard")
_TOKENS = 16
_ONE_BATCH = STEPS[f"batch 1 x {_TOKENS} tokens"]
_RANKS_BY_UNITS = 8
_UNITS_PER_CASE = 3000  # rounds are so few that about so many units' steps are timed
_COLUMNS = {"median_ms": ("ms", 1.0), "shard_bytes": ("shards MB", 1e-6)} | {
    "peak_bytes": ("step's peak MB", 1e-6),
    "gathered_bytes": ("gathered MB", 1e-6),
}

Results = dict[str, dict[str, Summary]]


def _size(layers: int, width: int) -> Size:
    """A narrow model, so that the host's time is what is measured."""
    return Size(layers=layers, width=width, vocab=256, heads=4)


def _timed(
    kinds: Sequence[str],
    size: Size,
    num_ranks: int,
    num_rounds: int,
    workload: Workload,
    device: torch.device | None = None,
) -> dict[str, Summary]:
    """Steps of some kinds, interleaved, on rank 0 of a fake world."""
    with fake_world(0, num_ranks):
        # Nothing travels, so there is nothing to wait for.
        variants = {kind: workload.step_of(kind, size, device, is_watched=False) for kind in kinds}
        return timed(variants, num_rounds=num_rounds, num_warmups=2 if size.layers <= 500 else 1)


def run(output: Output, *, ranks: int = 8, rounds: int = 20, layers: int = 24, width: int = 64) -> None:
    """What a step costs the host: tiny layers, nothing on the wire; on a CUDA device where there is one."""
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cases: Results = {}
    size = _size(layers, width)
    gpt, half = ON_THE_HOST["GPT"], size.layers // 2  # of the other models, whose layers hold more
    rows_of: list[tuple[str, Size, Workload, str]] = [
        ("GPT, fp32", size, gpt, ""),
        ("GPT, bf16", size, replace(gpt, policy=BF16), ""),
        ("GPT, bf16, checkpointing", replace(size, checkpointing=True), replace(gpt, policy=BF16), ""),
        ("GPT, bf16, blocks compiled", size, replace(gpt, policy=BF16), COMPILED),
    ]
    rows_of += [(f"GPT, bf16, {how}", size, replace(each, policy=BF16), "") for how, each in HOW_ON_THE_HOST.items()]
    for name, workload in ON_THE_HOST.items():
        if name != "GPT" and not (name == "HF Llama" and find_spec("transformers") is None):
            smaller = replace(size, layers=max(1, half))
            rows_of += [(f"{name}, fp32", smaller, workload, "")]
            if name != "conv net":  # whose batch norms take no mixed dtypes
                rows_of += [(f"{name}, bf16", smaller, replace(workload, policy=BF16), "")]
    for name, sized, workload, how in rows_of:
        kinds = [kind + how for kind in KINDS if kind != "DDP"]
        with compiling_here():
            found = _timed(kinds, sized, ranks, rounds, workload, device)
        rows = {kind.removesuffix(how): row for kind, row in found.items()}
        case = f"{name}, {sized.layers} layers, {ranks} ranks"
        cases[case] = rows
        print(f"{case}, fake group\n{timing_table(rows)}")
        for suffix, share in overheads(rows).items():
            print(f"overhead over unsharded{suffix}: {share:.2f} of FSDP2's", flush=True)
    panel = bars_of("a step with nothing on the wire", cases, "median_ms")
    name = "host_fake" if device.type == "cpu" else f"host_fake_{device.type}"
    header = output.header(backend="fake", device=str(device))
    output.write(name, {"header": header, "rows": cases}, [panel])


def _by_ranks(world_sizes: Sequence[int], num_rounds: int, size: Size) -> Results:
    results: Results = {}
    for num_ranks in world_sizes:
        rows = results[str(num_ranks)] = _timed(_SCALED, size, num_ranks, num_rounds, _ONE_BATCH)
        with fake_world(0, num_ranks):
            for kind, row in rows.items():
                row.update(footprint(kind, size, _TOKENS))
        print(f"{num_ranks:>6} ranks" + _line(rows), flush=True)
    return results


def _by_units(unit_counts: Sequence[int], num_rounds: int, size: Size) -> Results:
    results: Results = {}
    for num_units in unit_counts:
        sized = replace(size, layers=num_units)
        rounds = max(2, min(num_rounds, _UNITS_PER_CASE // num_units))
        rows = results[str(num_units)] = _timed(_SCALED, sized, _RANKS_BY_UNITS, rounds, _ONE_BATCH)
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
        is linear.

    Example:
        >>> fit({1: 2.0, 10: 20.0, 100: 200.0})["ms_per_unit"]
        2.0
    """
    logs = [math.log(x) for x in points], [math.log(y) for y in points.values()]
    return {"ms_per_unit": _slope(list(points), list(points.values())), "exponent": _slope(*logs)}


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    x_mean, y_mean = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    covariance = math.fsum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return covariance / math.fsum((x - x_mean) ** 2 for x in xs)


def _memory_table(by_ranks: Results) -> str:
    rows = {}
    for num_ranks, kinds in by_ranks.items():
        for kind, row in kinds.items():
            values = [(row[key], by) for key, (_, by) in _COLUMNS.items()]
            rows[f"{num_ranks} ranks, {kind}"] = ["-" if v is None else f"{v * by:.3f}" for v, by in values]
    return table([title for title, _ in _COLUMNS.values()], rows)


def run_scale(
    output: Output,
    *,
    world_sizes: Sequence[int] = (8, 64, 512, 4096),
    units: Sequence[int] = (10, 50, 200, 1000, 2000),
    rounds: int = 8,
    layers: int = 8,
    width: int = 64,
) -> None:
    """Host time and memory against ranks and units, nothing on the wire.

    Args:
        output: Gets `scale_fake`.
        world_sizes: Ranks of the fake groups.
        units: Numbers of blocks, at least two; each block is a unit.
        rounds: Samples of each; large numbers of units get fewer.
        layers: Of the model by ranks.
        width: Of both models.
    """
    torch.set_num_threads(1)
    by_ranks = _by_ranks(world_sizes, rounds, _size(layers, width))
    by_units = _by_units(units, rounds, _size(layers, width))
    print(f"\nmemory per rank, {layers} blocks of width {width}\n{_memory_table(by_ranks)}\n")
    fits = {kind: fit({int(num): rows[kind]["median_ms"] or 0.0 for num, rows in by_units.items()}) for kind in _SCALED}
    for kind, found in fits.items():
        print(f"{kind}: {found['ms_per_unit']:.3f} ms per unit (exponent {found['exponent']:.3f}; 1 is linear)")
    panels = [
        bars_of("host time of a step, by ranks", by_ranks, "median_ms"),
        bars_of("a step's peak on top of shards, by ranks", by_ranks, "peak_bytes", "bytes"),
        bars_of("host time of a step, by units", by_units, "median_ms"),
    ]
    content = {"header": output.header(backend="fake"), "by_ranks": by_ranks, "by_units": by_units, "fit": fits}
    output.write("scale_fake", content, panels)
