"""A training step: dshard beside FSDP2, DDP and the unsharded step, interleaved in one run."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from benchmarks.measure import Summary, on_ranks, timed
from benchmarks.models import COMPILED, FAMILY, KINDS, MESSAGES, ROOT_ALONE, STEPS, Size, compiling_here, overheads
from benchmarks.output import Output, bars_of, timing_table

_COMPILED_ROWS = ("batch 4 x 128 tokens", "batch 4 x 128 tokens, bf16")


def _measure(row: str, size: Size, num_rounds: int) -> dict[str, Summary]:
    """Time one kind of work on this rank, sharded in all ways."""
    work = (STEPS | FAMILY)[row]
    kinds = [kind for kind in KINDS if kind != "DDP" or work.policy is None]  # DDP computes in one dtype
    if row in STEPS:
        kinds.append(ROOT_ALONE)
    if dist.get_world_size() > 1:
        kinds += ["dshard" + MESSAGES, "dshard, no reshard" + MESSAGES]
    return timed({kind: work.step_of(kind, size) for kind in kinds}, num_rounds=num_rounds)


def _measure_compiled(row: str, size: Size, num_rounds: int) -> dict[str, Summary]:
    """Time one kind of work on this rank, with compiled blocks and without."""
    with compiling_here():
        variants = {
            kind: STEPS[row].step_of(kind, size)
            for library in ("unsharded", "FSDP2", "dshard")
            for kind in (library, library + COMPILED)
        }
        return timed(variants, num_rounds=num_rounds, num_warmups=4)


def _write(output: Output, name: str, ranks: int, results: Mapping[str, Mapping[str, Summary]]) -> None:
    panels = [bars_of("a training step", results, "median_ms"), bars_of("waiting for peers", results, "exposed_ms")]
    output.write(f"{name}_gloo_{ranks}", {"header": output.header(num_ranks=ranks), "rows": results}, panels)


def run(
    output: Output, *, ranks: int = 2, rounds: int = 12, layers: int = 8, width: int = 512, family: bool = False
) -> None:
    """A training step and its exposed communication, over gloo.

    Args:
        output: Gets `step_gloo_N`, or `step_family_gloo_N`; the times are rank 0's.
        ranks: Processes.
        rounds: Samples per variant.
        layers: Of the model.
        width: Of the model.
        family: Whether to measure six other kinds of work instead of the GPT's step.
    """
    results: dict[str, dict[str, Summary]] = {}
    for row in FAMILY if family else STEPS:
        rows = results[row] = on_ranks(ranks, _measure, row, Size(width=width, layers=layers), rounds)[0]
        print(f"\n{row}, {ranks} gloo ranks\n{timing_table(rows, with_exposed=True)}", flush=True)
        if ranks > 1:
            for suffix, share in overheads(rows).items():
                print(f"overhead over unsharded{suffix}: {share:.2f} of FSDP2's", flush=True)
    _write(output, "step_family" if family else "step", ranks, results)


def run_compiled(output: Output, *, ranks: int = 2, rounds: int = 12, layers: int = 6, width: int = 384) -> None:
    """A training step of a GPT whose blocks torch.compile compiled, over gloo.

    Each block is compiled on its own, by inductor, before `fully_shard`. Under bf16 the sharded models keep their
    weights in fp32, by a mixed precision policy; the unsharded one keeps them in bf16.
    """
    results: dict[str, dict[str, Summary]] = {}
    for row in _COMPILED_ROWS:
        rows = results[row] = on_ranks(ranks, _measure_compiled, row, Size(width=width, layers=layers), rounds)[0]
        print(f"\n{row}, {ranks} gloo ranks\n{timing_table(rows, with_exposed=True)}", flush=True)
    _write(output, "compile", ranks, results)
