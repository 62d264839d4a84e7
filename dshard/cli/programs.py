"""Commands that train a user's model on ranks of this machine: ``dshard verify`` and ``dshard trace``."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dshard
from dshard.cli.usage import FUNCTIONS, UsageError, add_command, check_output, count, make, named
from dshard.inspection.tracing import export
from dshard.policies import Strategy
from dshard.testing import RemoteRankError, World, verify_sharding
from dshard.testing.training import SETTINGS, Program, Setting, adamw, call
from dshard.testing.verifying import DEFAULT_SETTINGS

_FACTORY = "MODULE:FACTORY"
_MOST_RANKS = 64  # each a process of this machine


def add_parsers(commands: Any) -> None:
    """Add both commands to the parser of ``dshard``."""
    verify = add_command(commands, run_verify)
    verify.add_argument("factory", metavar=_FACTORY, help="that returns a model and a sample input")
    verify.add_argument("--ranks", type=_counts, default="1,2,4", help="numbers of ranks, each a process (%(default)s)")
    verify.add_argument(
        "--strategies",
        type=_settings,
        default=DEFAULT_SETTINGS,
        help="settings, as full,ddp,accumulation (all but bf16)",
    )
    verify.add_argument("--steps", type=count, default=3, help="training steps of each (%(default)s)")
    verify.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), help="convert the model to it (its own)")
    trace = add_command(commands, run_trace)
    trace.add_argument("factory", metavar=_FACTORY, help="that returns a model and a sample input")
    trace.add_argument("--ranks", type=count, default=2, help="(%(default)s)")
    trace.add_argument("--steps", type=count, default=3, help="of which the last one is printed (%(default)s)")
    trace.add_argument("--strategy", default="full", help="of all parameters (%(default)s)")
    trace.add_argument("--out", type=Path, metavar="FILE", help="write all of it to a file ending in .html or .json")


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(map(count, text.split(",")))
    if max(counts) > _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"must be from 1 to {_MOST_RANKS} each, but one is {max(counts)}")
    return counts


def _settings(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in SETTINGS]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(SETTINGS)}, but {unknown[0]!r} is none")
    return names


def run_verify(args: argparse.Namespace) -> int:
    """Compare a model's training under every strategy with the plain model's.

    Trains a model for some steps under every strategy, on 1, 2 and 4 ranks of this machine, and compares losses,
    gradients, weights, buffers and outputs with those of the plain model in one process. Exits with code 1 where
    something differs. No launcher is needed.
      dshard verify mymodule:factory
      dshard verify mymodule:factory --ranks 2 --strategies full,ddp --steps 5

    factory() returns (model, sample input), or a dict of "model", "sample" and any of the options of
    dshard.testing.verify_sharding that are functions: step, oracle_step, loss, optimizer, shard.
    """
    made = make(_FACTORY, args.factory)
    options = {name: made[name] for name in FUNCTIONS if name in made}
    options |= {"worlds": args.ranks, "settings": args.strategies, "steps": args.steps}
    dtype = getattr(torch, args.dtype) if args.dtype else None
    try:
        report = verify_sharding(partial(model_of, args.factory), made["sample"], dtype=dtype, **options)
    except RemoteRankError as error:
        raise UsageError(f"{_FACTORY} must train without sharding, but {error}") from error
    print(report)
    for difference in report.differences:
        print(f"\n{difference}")
    return 1 if report.differences else 0


def model_of(name: str) -> Any:
    """The model of a factory, on a rank."""
    return make(_FACTORY, name)["model"]


def run_trace(args: argparse.Namespace) -> int:
    """Print what a training step of a model gathers and reduces, and for which line.

    Trains a model for some steps on ranks of this machine, and prints its units and what the last step gathers and
    reduces: how often, how many bytes, and how long it waits. No launcher is needed.
      dshard trace mymodule:factory
      dshard trace mymodule:factory --ranks 4 --out step.html

    factory() is as for dshard verify. The file has all gathers and reductions of all ranks, each with the operation and
    the line that asked for it, and memory by category: a page (.html), or a timeline for ui.perfetto.dev (.json).
    """
    with named("--strategy"):
        Strategy.of(args.strategy).on(args.ranks)
    check_output("--out", args.out, (".html", ".json"))
    make(_FACTORY, args.factory)
    try:
        with World(args.ranks) as world:
            found = world.run(traced, args.factory, args.strategy, args.steps, timeout_s=600.0)
    except RemoteRankError as error:
        raise UsageError(f"{_FACTORY} must train, but {error}") from error
    print(found[0][0])
    if args.out is not None:
        export(args.out, [trace for _, trace in found])
        print(f"wrote {args.out}")
    return 0


def traced(factory: str, strategy: str, num_steps: int) -> tuple[str, dict[str, Any]]:
    """A report of the last step on this rank, and its trace as a dict."""
    made, rank = make(_FACTORY, factory), dist.get_rank()
    functions: dict[str, Any] = {name: made.get(name) for name in FUNCTIONS}
    functions["optimizer"] = made.get("optimizer", adamw)
    program = Program(partial(model_of, factory), made["sample"], num_steps=num_steps, dtype=None, **functions)
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
