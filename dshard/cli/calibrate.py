"""``dshard calibrate``: fits the constants of predicted times to measured runs, and writes them as a profile."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from dshard.cli.target import check_folder, writing
from dshard.cli.usage import UsageError

_DESCRIPTION = """\
Fits the constants of predicted times to measured runs, and writes a profile for dshard plan and simulate --profile.
  dshard calibrate runs.tsv --out profile.json
RUNS is a table of tab-separated values, one run a row: gpu, n_gpus, layers, d_model, heads, vocab, seq, micro_batch and
tokens_s_gpu or step_s; and, where they are not the usual, kv_heads, ffn, n_params, mlp, tied, gpus_per_node,
internode_gbps_per_node, sharding, parallelism, grad_accum, precision, compile, act_ckpt, source, id. They may be
written as is usual elsewhere (H100-SXM, zero3, hsdp, selective (op)); rows that are not understood, or of what is not
predicted (tensor parallelism, fp8), are counted and not used. What few rows say nothing about stays as it is shipped.
  torchrun --nproc-per-node 2 -m dshard calibrate --measure --out here.json
measures the devices at hand instead; dshard plan --device here --profile here.json plans for them.
"""


def add_parser(commands: Any) -> None:
    """Adds this subcommand to the parser of ``dshard``."""
    parser = commands.add_parser(
        "calibrate",
        help="fit predicted times to measured runs",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", metavar="RUNS", type=Path, nargs="?", help="a table, or published for the one that is shipped"
    )
    parser.add_argument("--measure", action="store_true", help="no RUNS: the devices at hand, alone or under torchrun")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the profile as JSON")
    parser.add_argument("--from-priors", action="store_true", help="start from what was known before any run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fits, and prints the constants and how far predictions are off; or measures.

    Raises:
        UsageError: on bad input.

    Communicates: nothing, or with --measure what measuring does.
    """
    from dshard.cli.measured import read_runs
    from dshard.errors import DShardError
    from dshard.planner.calibration import calibrated, misses_of, pairs_of
    from dshard.planner.rates import PRIORS, Rates, published, runs_file

    if args.out is not None:
        check_folder("--out", args.out)
    if (args.runs is None) != args.measure:
        given = "both are" if args.measure else "neither is"
        raise UsageError(
            f"RUNS is a table of runs, and --measure measures instead, but {given} given. Pass one of them."
        )
    if args.measure:
        return _measure(args)
    is_shipped = args.runs == Path("published")
    table = read_runs(runs_file() if is_shipped else args.runs)
    try:
        known = Rates(dict(PRIORS)) if args.from_priors else published()
        name = "published runs" if is_shipped else args.runs.name
        found = calibrated(table.runs, known, f"{len(table.runs)} {name if is_shipped else 'runs of ' + name}")
    except DShardError as error:
        raise UsageError.of(error) from error
    print(f"{len(table.runs)} runs" + "".join(f"; {num} not used: {why}" for why, num in table.skipped.items()))
    print("\n".join(constants_table(found)))
    print("\n".join(misses_table([misses_of(table.runs, found.constants, "fitted to all"), *found.misses])))
    pairs = pairs_of(table.runs, found.constants)
    print(f"pairs that differ in sharding alone: the faster one told in {pairs.num_right} of {pairs.num_pairs}")
    print("\n".join(spread_lines(found.spread)))
    if args.out is not None:
        with writing("--out", args.out):
            found.save(args.out)
    return 0


def _measure(args: argparse.Namespace) -> int:
    """Measures on all ranks; the first prints and writes."""
    import torch

    from dshard.cli.world import process_group, read_world
    from dshard.errors import DShardError
    from dshard.planner.rates import PRIORS, Rates, published
    from dshard.planning.calibrating import measure_here

    world = read_world(os.environ, "auto")
    known = Rates(dict(PRIORS)) if args.from_priors else published()
    try:
        if world.size == 1:
            found = measure_here(world.device, known)
        else:
            if world.device.type == "cpu":
                torch.set_num_threads(1)  # as torchrun's ranks train
            with process_group(world):
                mesh = torch.distributed.init_device_mesh(world.device.type, (world.size,))
                found = measure_here(world.device, known, mesh)
    except DShardError as error:
        raise UsageError.of(error) from error
    if not world.is_first:
        return 0
    print("| measured | per second | spread over shapes |\n|---|---|---|")
    for name, each in found.reached.items():
        unit = "GB" if name == "memory" else "GFLOP"
        print(f"| {name} | {each.per_s / 1e9:.4g} {unit} | {each.uncertainty:.0%} |")
    print("\n".join([*links_lines(found.rates.here), *shares_lines(found.shares)]))
    if args.out is not None:
        with writing("--out", args.out):
            found.rates.save(args.out)
    return 0


def links_lines(here: Any) -> list[str]:
    """Of ranks that measured: how long a gather and a reduction take."""
    if here is None or here.cluster is None:
        return []
    cluster = here.cluster
    lines = []
    for name in ("all_gather", "reduce_scatter", "all_reduce", "in_place"):
        link = getattr(cluster.shards[cluster.num_ranks], name)
        if link is not None:
            rate = f"{1e-9 / link.seconds_per_byte:.3g} GB/s" if link.seconds_per_byte else "no time per byte"
            lines.append(f"{name} among {cluster.num_ranks} ranks: {link.alpha_s * 1e6:.0f} us, {rate}")
    return lines


def shares_lines(shares: Any) -> list[str]:
    """Constants of what ranks share, as far as they were measured."""
    return [f"{name}: {each.value:.3g} {each.unit}, known to {each.uncertainty:.0%}" for name, each in shares.items()]


def constants_table(rates: Any) -> list[str]:
    """As Markdown: one line per constant."""
    lines = ["| constant | value | known to | before | unit |", "|---|---|---|---|---|"]
    for name, each in rates.constants.items():
        lines.append(f"| {name} | {each.value:.3g} | {each.uncertainty:.0%} | {each.prior:.3g} | {each.unit} |")
    return lines


def spread_lines(spread: Any) -> list[str]:
    """In which interval measured steps and differences lie, and which part of each source in that of the others."""
    from dshard.planner.spreads import IN_TEN

    lines = []
    is_one = spread.num_sources == 1
    if spread.steps is not None:
        steps = f"{spread.steps.low:.2f} to {spread.steps.high:.2f} of the predicted time in {IN_TEN} of 10"
        whose = "of the source" if is_one else "of a source that is none of these"
        lines.append(f"steps {whose} take {steps} ({spread.num_runs} runs kept aside)")
    known = "known before" if is_one else "of the others"
    lines += [f"  in the interval {known}: {part:.0%} of {source}" for source, part in spread.covered.items()]
    if spread.pairs is not None:
        pairs = f"{spread.pairs.low:.2f} to {spread.pairs.high:.2f} s"
        lines.append(f"differences between shardings, per second more across hosts: {pairs} ({spread.num_pairs} pairs)")
    return lines


def misses_table(misses: Any) -> list[str]:
    """As Markdown: how far predictions are off, by source that was kept aside."""
    lines = ["| runs of | number | mean error | 9 in 10 below |", "|---|---|---|---|"]
    return lines + [f"| {each.source} | {each.num_runs} | {each.mean:.1%} | {each.p90:.1%} |" for each in misses]
