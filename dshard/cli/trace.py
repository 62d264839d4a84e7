"""``dshard trace``: trains a model for some steps on ranks of this machine, and says what the last one sends."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from dshard.cli.usage import RunError, UsageError
from dshard.cli.verify import make, model_of
from dshard.cli.writable import check_writable

_DESCRIPTION = """\
Trains a model for some steps on ranks of this machine, and prints its units and what the last step gathers and reduces:
how often, how many bytes, and how long it waits. No launcher is needed.
  dshard trace mymodule:factory
  dshard trace mymodule:factory --ranks 4 --out step.html

factory() is as for dshard verify. The file has all gathers and reductions of all ranks, each with the operation and the
line that asked for it, and memory by category: a page (.html), or a timeline for ui.perfetto.dev (.json).
"""


def add_parser(commands: Any) -> None:
    """Adds this subcommand to the parser of ``dshard``."""
    parser = commands.add_parser(
        "trace",
        help="what a training step of a model gathers and reduces, and for which line",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="that returns a model and a sample input")
    parser.add_argument("--ranks", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="of which the last one is told (%(default)s)")
    parser.add_argument("--strategy", default="full", help="of all parameters (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it all to a file ending in .html or .json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Trains, prints tables of rank 0, writes a file if asked.

    Raises:
        UsageError: there is no such factory, its model cannot be trained, or a number is below 1.
        RunError: the file cannot be written.

    Communicates: nothing; its ranks are processes of their own.
    """
    from dshard.errors import DShardError
    from dshard.policies import Strategy
    from dshard.testing import RemoteRankError, World

    if not 1 <= args.ranks <= 64:
        raise UsageError(f"--ranks must be from 1 to 64, but it is {args.ranks}. Leave it out.")
    if args.steps < 1:
        raise UsageError(f"--steps must be 1 or more, but it is {args.steps}. Leave it out.")
    try:
        Strategy.of(args.strategy).on(args.ranks)
    except DShardError as error:
        raise UsageError(f"--strategy {args.strategy!r} is none for {args.ranks} ranks: {error}") from error
    if args.out is not None:
        _check_out(args.out)
    make(args.factory)
    try:
        with World(args.ranks) as world:
            told = world.run(traced, args.factory, args.strategy, args.steps, timeout_s=600.0)
    except RemoteRankError as error:
        raise UsageError(f"MODULE:FACTORY must train, but {error}") from error
    print(told[0][0])
    if args.out is not None:
        from dshard.inspection.tracing import export

        try:
            export(args.out, [trace for _, trace in told])
        except OSError as error:
            raise RunError(f"--out must be a file that can be written, but {error}.") from error
        print(f"wrote {args.out}")
    return 0


def _check_out(path: Path) -> None:
    """See that the file can be written, before anything starts."""
    if path.suffix.lower() not in (".html", ".json"):
        raise UsageError(f"--out must end in .html or .json, but it is {path}.")
    check_writable(path.parent, "--out")


def traced(factory: str, strategy: str, num_steps: int) -> tuple[str, dict[str, Any]]:
    """What a rank says of the last step, and its trace as a dict."""
    import torch.distributed as dist

    import dshard
    from dshard.testing.verifying.programs import Program, Setting, adamw, call

    made, rank = make(factory), dist.get_rank()
    functions = {name: made.get(name) for name in ("loss", "step", "oracle_step", "shard", "evaluate")}
    optimizer_of, build = made.get("optimizer", adamw), partial(model_of, factory)
    program = Program(build, made["sample"], optimizer=optimizer_of, num_steps=num_steps, dtype=None, **functions)
    model = program.sharded(program.build(), Setting(strategy))
    optimizer = program.optimizer(model)

    def step(number: int) -> None:
        batch = program.batch(rank, number)
        if program.step is not None:
            program.step(model, optimizer, batch)
            return
        optimizer.zero_grad()
        program.loss_of(call(model, batch)).backward()
        optimizer.step()

    for number in range(num_steps - 1):
        step(number)
    with dshard.trace(model, optimizer, memory=True) as trace:
        step(num_steps - 1)
    return f"{dshard.report(model, optimizer, trace)}\n\n{trace}", trace.as_dict(rank=rank)
