"""``dshard plan``: the best strategy for each unit of a model, on devices that need not be here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dshard.cli.progress import open_progress
from dshard.cli.target import add_options, check_folder, check_picture, check_strategies, target_of, writing
from dshard.cli.usage import UsageError

_DESCRIPTION = """\
Chooses a strategy for each unit of a model, so that a step is shortest and fits into memory, and prints the proof.
  dshard plan gpt2-xl --world 8 --device a100-40g --memory 38GiB --batch auto
  dshard plan path/to/config.json --world 64 --device h100-80g --out plan.json
MODEL is a preset (an unknown name lists them), a config.json of Hugging Face, or module:function, which returns a
model and a sample input. No weights, no devices and no network are needed.
"""


def add_parser(commands: Any) -> None:
    """Adds this subcommand to the parser of ``dshard``."""
    parser = commands.add_parser(
        "plan",
        help="choose a strategy for each unit of a model",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--world", type=int, required=True, metavar="RANKS", help="number of ranks")
    parser.add_argument("--strategy", nargs="+", help="that a unit may have, such as full 'hybrid(8)' (all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the plan as JSON, for fully_shard(plan=)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the simulated step (.png, .svg, .pdf)")
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plans, and prints the table.

    Raises:
        UsageError: on bad input, or where nothing fits.

    Communicates: nothing.
    """
    from dshard.cli.cut_layers import cut_layers
    from dshard.errors import DShardError
    from dshard.planning.profile import Profile

    if args.world < 1:
        raise UsageError(f"--world must be at least 1, but it is {args.world}.")
    check_strategies(args.strategy)
    check_picture("--plot", args.plot)
    if args.out is not None:
        check_folder("--out", args.out)
    target = target_of(args)
    sampled, batch, margin = target.sampled, target.batch, target.margin
    try:
        cluster = target.cluster(args.world)
        with open_progress("dshard plan") as progress, cut_layers(sampled.model, target.tensor_parallel):
            profile = Profile(
                sampled.model,
                sampled.sample,
                device=target.device,
                training=target.training,
                progress=progress,
                rates=target.rates,
                checkpointing=target.checkpointing,
                offload=target.offload,
            )
            planned = profile.plan(
                cluster,
                memory=target.limit_bytes,
                memory_of=target.memory_of,
                strategies=args.strategy,
                batch=batch,
                margin=margin,
            )
    except DShardError as error:
        raise UsageError.of(error) from error
    print(f"{target.sampled.name}: {target.sampled.num_params:,} parameters, {target.device.name}")
    print(planned.explain())
    if args.out is not None:
        with writing("--out", args.out):
            planned.save(args.out)
    if args.plot is not None:
        with writing("--plot", args.plot):
            planned.plot(args.plot)
    return 0
