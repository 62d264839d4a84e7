"""``dshard verify``: trains a model under every strategy, and says what differs from the plain model."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dshard.cli.usage import UsageError

_DESCRIPTION = """\
Trains a model for some steps under every strategy, on 1, 2 and 4 ranks of this machine, and compares losses, gradients,
weights, buffers and outputs with those of the plain model in one process. No launcher is needed.
  dshard verify mymodule:factory
  dshard verify mymodule:factory --ranks 2 --strategies full,ddp --steps 5

factory() returns (model, sample input), or a dict of "model", "sample" and any of the options of
dshard.testing.verify_sharding that are functions: step, oracle_step, loss, optimizer, shard, evaluate.
"""
_DTYPES = ("float32", "float64", "bfloat16")
_FUNCTIONS = ("step", "oracle_step", "loss", "optimizer", "shard", "evaluate")


def add_parser(commands: Any) -> None:
    """Adds this subcommand to the parser of ``dshard``."""
    parser = commands.add_parser(
        "verify",
        help="compare a model's training under every strategy with the plain model's",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="that returns a model and a sample input")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks, each a process (default: 1,2,4)")
    parser.add_argument("--strategies", help="settings, as full,ddp,accumulation (default: all but bf16)")
    parser.add_argument("--steps", type=int, default=3, help="training steps of each (default: 3)")
    parser.add_argument("--dtype", choices=_DTYPES, help="convert the model to it (default: its own)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Trains, prints a table, and what differs first in each row that is not ok.

    Returns:
        0 where all is the same, 1 where something differs.

    Raises:
        UsageError: there is no such factory, or its model cannot be trained without sharding.

    Communicates: nothing; its ranks are processes of their own.
    """
    import torch

    from dshard.testing import RemoteRankError, verify_sharding
    from dshard.testing.verifying.invariants import DEFAULT_SETTINGS

    settings = DEFAULT_SETTINGS if args.strategies is None else _settings(args.strategies)
    ranks = _ranks(args.ranks)
    if args.steps < 1:
        raise UsageError(f"--steps must be at least 1, but it is {args.steps}. Pass 3.")
    made = make(args.factory)
    options = {name: made[name] for name in _FUNCTIONS if name in made}
    dtype = getattr(torch, args.dtype) if args.dtype else None
    try:
        report = verify_sharding(
            *(partial(model_of, args.factory), made["sample"]),
            **{
                "worlds": ranks,
                "settings": settings,
                "steps": args.steps,
                "dtype": dtype,
                **options,
            },
        )
    except RemoteRankError as error:
        raise UsageError(f"MODULE:FACTORY must train without sharding, but {error}") from error
    print(report)
    for difference in report.differences:
        print(f"\n{difference}")
    return 1 if report.differences else 0


def make(name: str) -> Mapping[str, Any]:
    """What a factory returns, as a dict.

    Raises:
        UsageError: there is none, or it returns something else.
    """
    import torch
    from torch import nn

    module, _, function = name.partition(":")
    if not (module and function):
        raise UsageError(
            f"MODULE:FACTORY must be a module and a name in it, but it is {name!r}. Pass mymodule:factory."
        )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it
    try:
        factory: Callable[[], Any] = getattr(importlib.import_module(module), function)
        torch.manual_seed(0)
        made = factory()
    except Exception as error:
        raise UsageError(f"MODULE:FACTORY {name} raises {type(error).__name__}: {error}.") from error
    if isinstance(made, tuple) and len(made) == 2:
        made = {"model": made[0], "sample": made[1]}
    if not (isinstance(made, Mapping) and isinstance(made.get("model"), nn.Module) and "sample" in made):
        raise UsageError(
            f"MODULE:FACTORY must return a model and a sample input, but {name} returns {type(made).__name__}. Return "
            "(model, sample), or a dict of them."
        )
    return made


def model_of(name: str) -> Any:
    """The model of a factory, on a rank."""
    return make(name)["model"]


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
