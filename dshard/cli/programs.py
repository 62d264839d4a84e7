"""Commands that train a user's model on ranks of this machine: ``dshard verify`` and ``dshard trace``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dshard.cli.usage import UsageError, check_output, count, found_by, named

_VERIFY = """\
Trains a model for some steps under every strategy, on 1, 2 and 4 ranks of this machine, and compares losses, gradients,
weights, buffers and outputs with those of the plain model in one process. No launcher is needed.
  dshard verify mymodule:factory
  dshard verify mymodule:factory --ranks 2 --strategies full,ddp --steps 5

factory() returns (model, sample input), or a dict of "model", "sample" and any of the options of
dshard.testing.verify_sharding that are functions: step, oracle_step, loss, optimizer, shard.
"""
_TRACE = """\
Trains a model for some steps on ranks of this machine, and prints its units and what the last step gathers and reduces:
how often, how many bytes, and how long it waits. No launcher is needed.
  dshard trace mymodule:factory
  dshard trace mymodule:factory --ranks 4 --out step.html

factory() is as for dshard verify. The file has all gathers and reductions of all ranks, each with the operation and the
line that asked for it, and memory by category: a page (.html), or a timeline for ui.perfetto.dev (.json).
"""
_DTYPES = ("float32", "float64", "bfloat16")
_FUNCTIONS = ("step", "oracle_step", "loss", "optimizer", "shard")


def add_parsers(commands: Any) -> None:
    """Add both commands to the parser of ``dshard``."""
    raw = argparse.RawDescriptionHelpFormatter
    verify = commands.add_parser(
        "verify",
        help="compare a model's training under every strategy with the plain model's",
        description=_VERIFY,
        formatter_class=raw,
    )
    verify.add_argument("factory", metavar="MODULE:FACTORY", help="that returns a model and a sample input")
    verify.add_argument("--ranks", default="1,2,4", help="numbers of ranks, each a process (%(default)s)")
    verify.add_argument("--strategies", help="settings, as full,ddp,accumulation (all but bf16)")
    verify.add_argument("--steps", type=count, default=3, help="training steps of each (%(default)s)")
    verify.add_argument("--dtype", choices=_DTYPES, help="convert the model to it (its own)")
    verify.set_defaults(run=run_verify)
    trace = commands.add_parser(
        "trace",
        help="what a training step of a model gathers and reduces, and for which line",
        description=_TRACE,
        formatter_class=raw,
    )
    trace.add_argument("factory", metavar="MODULE:FACTORY", help="that returns a model and a sample input")
    trace.add_argument("--ranks", type=count, default=2, help="(%(default)s)")
    trace.add_argument("--steps", type=count, default=3, help="of which the last one is printed (%(default)s)")
    trace.add_argument("--strategy", default="full", help="of all parameters (%(default)s)")
    trace.add_argument("--out", type=Path, metavar="FILE", help="write all of it to a file ending in .html or .json")
    trace.set_defaults(run=run_trace)


def run_verify(args: argparse.Namespace) -> int:
    """Train, print a table, and what differs first in each row that is not ok.

    Returns:
        0 where all is the same, 1 where something differs.
    """
    import torch

    from dshard.testing import RemoteRankError, verify_sharding
    from dshard.testing.verifying.invariants import DEFAULT_SETTINGS

    settings = DEFAULT_SETTINGS if args.strategies is None else _settings(args.strategies)
    ranks = _ranks(args.ranks)
    made = make(args.factory)
    options = {name: made[name] for name in _FUNCTIONS if name in made}
    options |= {"worlds": ranks, "settings": settings, "steps": args.steps}
    dtype = getattr(torch, args.dtype) if args.dtype else None
    try:
        report = verify_sharding(partial(model_of, args.factory), made["sample"], dtype=dtype, **options)
    except RemoteRankError as error:
        raise UsageError(f"MODULE:FACTORY must train without sharding, but {error}") from error
    print(report)
    for difference in report.differences:
        print(f"\n{difference}")
    return 1 if report.differences else 0


def _settings(names: str) -> tuple[str, ...]:
    from dshard.testing.verifying.programs import SETTINGS

    chosen = tuple(names.split(","))
    if unknown := [name for name in chosen if name not in SETTINGS]:
        raise UsageError(f"--strategies must be of {', '.join(SETTINGS)}, but {unknown[0]!r} is none. Name others.")
    return chosen


def _ranks(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and 0 < int(word) <= 64 for word in words):
        raise UsageError(f"--ranks must be numbers from 1 to 64 with commas between, but it is {text!r}. Pass 1,2.")
    return tuple(int(word) for word in words)


def make(name: str) -> Mapping[str, Any]:
    """The result of a factory as a dict.

    Raises:
        UsageError: There is no such function, it raises, or it returns something else.
    """
    import torch
    from torch import nn

    torch.manual_seed(0)  # for what the module draws when it is imported: every rank imports it by itself
    build = found_by("MODULE:FACTORY", name)
    torch.manual_seed(0)  # again, since a module that was imported before draws nothing
    made = build()
    if isinstance(made, tuple) and len(made) == 2:
        made = {"model": made[0], "sample": made[1]}
    if not (isinstance(made, Mapping) and isinstance(made.get("model"), nn.Module) and "sample" in made):
        raise UsageError(
            f"MODULE:FACTORY must return a model and a sample input, but {name} returns {type(made).__name__}. Return "
            "(model, sample), or a dict of them."
        )
    if unknown := [key for key in made if key not in ("model", "sample", *_FUNCTIONS)]:
        raise UsageError(
            f"MODULE:FACTORY must return a dict of model, sample, {', '.join(_FUNCTIONS)}, but {name} returns "
            f"{unknown[0]!r}. Leave it out."
        )
    return made


def model_of(name: str) -> Any:
    """The model of a factory, on a rank."""
    return make(name)["model"]


def run_trace(args: argparse.Namespace) -> int:
    """Train, print tables of rank 0, and write a file if asked."""
    from dshard.inspection.tracing import export
    from dshard.policies import Strategy
    from dshard.testing import RemoteRankError, World

    with named("--strategy"):
        Strategy.of(args.strategy).on(args.ranks)
    check_output("--out", args.out, (".html", ".json"))
    make(args.factory)
    try:
        with World(args.ranks) as world:
            found = world.run(traced, args.factory, args.strategy, args.steps, timeout_s=600.0)
    except RemoteRankError as error:
        raise UsageError(f"MODULE:FACTORY must train, but {error}") from error
    print(found[0][0])
    if args.out is not None:
        export(args.out, [trace for _, trace in found])
        print(f"wrote {args.out}")
    return 0


def traced(factory: str, strategy: str, num_steps: int) -> tuple[str, dict[str, Any]]:
    """A report of the last step on this rank, and its trace as a dict."""
    import torch.distributed as dist

    import dshard
    from dshard.testing.verifying.programs import Program, Setting, adamw, call

    made, rank = make(factory), dist.get_rank()
    functions: dict[str, Any] = {name: made.get(name) for name in _FUNCTIONS}
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
