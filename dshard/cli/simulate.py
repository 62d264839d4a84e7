"""``dshard simulate``: what a step would take on devices that are not here, for any number of ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dshard.cli.progress import open_progress
from dshard.cli.target import Target, add_options, check_picture, check_strategies, target_of, writing
from dshard.cli.usage import UsageError

if TYPE_CHECKING:
    from dshard.planner import Plan
    from dshard.planner.progress import Progress

_PLANNED = "plan"
_DESCRIPTION = """\
Predicts step time, TFLOP/s and peak memory per rank, and the communication that nothing hides.
  dshard simulate gpt3-175b --checkpoint --world 128 512 4096 --device a100-80g
  dshard simulate gpt2 --world 8 64 --device h100-80g --strategy ddp full plan --curve scaling.png
MODEL is as for dshard plan. No weights, no devices and no network are needed.
"""


def add_parser(commands: Any) -> None:
    """Adds this subcommand to the parser of ``dshard``."""
    parser = commands.add_parser(
        "simulate",
        help="predict a step on devices that are not here",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--world", type=int, nargs="+", required=True, metavar="RANKS", help="numbers of ranks")
    parser.add_argument(
        "--strategy", nargs="+", default=["full"], help="of all units; plan for the best mix (%(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the step of the first row (.png, .svg, .pdf)")
    parser.add_argument("--curve", type=Path, metavar="FILE", help="draw each strategy over the numbers of ranks")
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulates, and prints a row for each number of ranks and strategy.

    Raises:
        UsageError: on bad input.

    Communicates: nothing.
    """
    from dshard.cli.cut_layers import cut_layers
    from dshard.errors import DShardError
    from dshard.planner import drawing

    for world in args.world:
        if world < 1:
            raise UsageError(f"--world must be at least 1, but it is {world}.")
    if args.batch == "auto" and args.strategy != [_PLANNED]:
        raise UsageError("--batch auto needs a plan, but --strategy names others. Pass --strategy plan.")
    if args.offload == "auto" and args.strategy != [_PLANNED]:
        raise UsageError(
            "--offload auto needs a plan, but --strategy names others. Pass --strategy plan, or --offload all."
        )
    check_strategies([name for name in args.strategy if name != _PLANNED])
    check_picture("--plot", args.plot)
    check_picture("--curve", args.curve)
    target = target_of(args)
    try:
        with open_progress("dshard simulate") as progress, cut_layers(target.sampled.model, target.tensor_parallel):
            found = simulated(target, args.world, args.strategy, progress)
    except DShardError as error:
        raise UsageError.of(error) from error
    print(f"{target.sampled.name}: {target.sampled.num_params:,} parameters, {target.device.name}")
    print(table(found, target.limit_bytes))
    if args.plot is not None:
        with writing("--plot", args.plot):
            next(iter(found.values())).plot(args.plot)
    if args.curve is not None:
        points: dict[str, dict[int, drawing.Scaled]] = {name: {} for _, name in found}
        for (world, name), plan in found.items():
            points[name][world] = drawing.Scaled(plan.tflops, plan.peak_bytes)
        title = f"{target.sampled.name} on {target.device.name}"
        with writing("--curve", args.curve):
            drawing.draw_scaling(args.curve, points, title=title, limit_bytes=target.limit_bytes)
    return 0


def simulated(
    target: Target, worlds: list[int], strategies: list[str], progress: Progress
) -> dict[tuple[int, str], Plan]:
    """A plan for each number of ranks and strategy; one that does not fit is simulated all the same.

    Raises:
        UsageError: the ranks do not fill their hosts.
        PlanError: nothing fits under "plan".
        StateError: a strategy is none, or the model cannot be traced.
    """
    from dshard.planner.progress import Stretch
    from dshard.planning.profile import Profile
    from dshard.policies import Strategy

    kinds = {name: None if name == _PLANNED else Strategy.of(name) for name in strategies}
    clusters = {world: target.cluster(world) for world in worlds}
    sampled, device = target.sampled, target.device
    profile = Profile(
        sampled.model,
        sampled.sample,
        device=device,
        training=target.training,
        rates=target.rates,
        checkpointing=target.checkpointing,
        offload=target.offload,
    )
    given = target.batch if isinstance(target.batch, int) else None
    limit, num = target.limit_bytes, len(clusters) * len(kinds)
    found: dict[tuple[int, str], Plan] = {}
    for world, cluster in clusters.items():
        for name, strategy in kinds.items():
            shares = (len(found) / num, (len(found) + 1) / num)
            profile.progress = Stretch(progress, f"{world} ranks, {name}: ", *shares)
            if strategy is None:
                plan = profile.plan(
                    cluster, memory=limit, memory_of=target.memory_of, batch=target.batch, margin=target.margin
                )
            else:
                plan = profile.given(cluster, strategy, given)
            found[world, name] = plan
    return found


def table(found: dict[tuple[int, str], Plan], limit_bytes: int) -> str:
    """One row per simulated step."""
    from dshard.planner.rates import IN_TEN
    from dshard.planner.texts import bytes_text

    known = any(plan.step_interval_s for plan in found.values())
    head = ("exposed", "TFLOP/s per rank", "samples/s", "peak", "fits")
    rows = [("ranks", "strategy", "batch", "step", *[f"{IN_TEN} in 10"] * known, *head)]
    for (world, name), plan in found.items():
        rows.append(
            (
                str(world),
                name,
                str(plan.model.batch_size),
                f"{plan.step_s:.4g} s",
                *[f"{each.low:.3g} to {each.high:.3g} s" for each in (plan.step_interval_s,) if each],
                f"{plan.exposed_s / plan.step_s:.1%}",
                f"{plan.tflops:.4g}",
                f"{plan.samples_per_s:.4g}",
                bytes_text(plan.peak_bytes),
                "yes" if plan.peak_bytes <= limit_bytes else "no",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
