"""A step of a GPT, or of other work: dshard beside FSDP2, DDP and the unsharded step, interleaved in one run."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from dshard.bench.common import WORLD_TIMEOUT_S, Step, Summary, gloo_world, interleave, summary
from dshard.bench.models import KINDS, MESSAGES, ROOT_ALONE, Size, overheads, step_of
from dshard.bench.output import Output, timing_table
from dshard.bench.plots import Bars
from dshard.bench.workloads import WORKLOADS

_ROWS = {"batch 4 x 128 tokens": (4, 128), "batch 1 x 16 tokens": (1, 16)}
_NUM_WARMUPS = 3


def _measure(size: Size, batch: int, tokens: int, num_rounds: int) -> dict[str, Summary]:
    """Time all variants on this rank."""
    messages = ("dshard" + MESSAGES, "dshard, no reshard" + MESSAGES) if dist.get_world_size() > 1 else ()
    variants = {kind: step_of(kind, size, batch, tokens) for kind in (*KINDS, ROOT_ALONE, *messages)}
    return _timed(variants, num_rounds)


def _timed(variants: Mapping[str, Step], num_rounds: int) -> dict[str, Summary]:
    samples = interleave(variants, num_rounds=num_rounds, num_warmups=_NUM_WARMUPS)
    return {kind: summary(some) for kind, some in samples.items()}


def _print(title: str, rows: dict[str, Summary], num_ranks: int) -> None:
    print(f"\n{title}, {num_ranks} gloo ranks\n{timing_table(rows, with_exposed=True)}", flush=True)
    if num_ranks > 1:
        for suffix, share in overheads(rows).items():
            print(f"overhead over unsharded{suffix}: {share:.2f} of FSDP2's", flush=True)


def _measure_work(name: str, size: Size, num_rounds: int) -> dict[str, Summary]:
    """Time a workload on this rank, in all ways that it can be sharded."""
    work = WORKLOADS[name]
    kinds = [kind for kind in KINDS if kind != "DDP" or work.policy is None]  # which knows no dtypes of this kind
    kinds += [kind + MESSAGES for kind in kinds if kind.startswith("dshard") and dist.get_world_size() > 1]
    return _timed({kind: work.step_of(kind, size) for kind in kinds}, num_rounds)


def run_family(output: Output, *, num_ranks: int, num_rounds: int, size: Size) -> None:
    """Measure all of `WORKLOADS`, print and write `step_family_gloo_N`; the times are rank 0's."""
    results: dict[str, dict[str, Summary]] = {}
    for name in WORKLOADS:
        with gloo_world(num_ranks) as world:
            results[name] = world.run(_measure_work, name, size, num_rounds, timeout_s=WORLD_TIMEOUT_S)[0]
        _print(name, results[name], num_ranks)
    bars = {name: {kind: row["median_ms"] for kind, row in rows.items()} for name, rows in results.items()}
    header = output.header(num_ranks=num_ranks)
    output.write(f"step_family_gloo_{num_ranks}", {"header": header, "rows": results}, [Bars("a step", "ms", bars)])


def run(output: Output, *, num_ranks: int, num_rounds: int, size: Size) -> None:
    """Measure, print and write `step_gloo_N`; the times are rank 0's."""
    results: dict[str, dict[str, Summary]] = {}
    with gloo_world(num_ranks) as world:
        for row, (batch, tokens) in _ROWS.items():
            rows = world.run(_measure, size, batch, tokens, num_rounds, timeout_s=WORLD_TIMEOUT_S)[0]
            results[row] = rows
            _print(row, rows, num_ranks)
    panels = [
        Bars(title, "ms, median", {row: {k: r.get(key) for k, r in rows.items()} for row, rows in results.items()})
        for title, key in (("a training step", "median_ms"), ("of it, waiting for peers", "exposed_ms"))
    ]
    output.write(f"step_gloo_{num_ranks}", {"header": output.header(num_ranks=num_ranks), "rows": results}, panels)
