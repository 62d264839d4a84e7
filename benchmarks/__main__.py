"""Run a benchmark: ``python -m benchmarks step``.

Each starts its own ranks, prints a table, and writes JSON and a plot. The options of a benchmark are the keyword
arguments of its function.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import checkpoint, eight_bit, gpu, host, host_parts, matrices, memory, offload, parts, plan, step
from benchmarks.output import Output

BENCHMARKS: dict[str, Callable[..., None]] = {
    "step": step.run,
    "compile": step.run_compiled,
    "host": host.run,
    "host-parts": host_parts.run,
    "scale": host.run_scale,
    "memory": memory.run,
    "collectives": parts.run_collectives,
    "optimizer": parts.run_optimizer,
    "muon": matrices.run,
    "eight-bit": eight_bit.run,
    "checkpoint": checkpoint.run,
    "plan": plan.run,
    "gpu": gpu.run,
    "offload": offload.run,
}


def add_option(parser: argparse.ArgumentParser, option: inspect.Parameter) -> None:
    """Add a keyword argument of a benchmark to its parser: a flag, a number, or several numbers."""
    name = "--" + option.name.replace("_", "-")
    if isinstance(option.default, bool):
        parser.add_argument(name, action="store_true")
    elif isinstance(option.default, tuple):
        usual = " ".join(map(str, option.default))
        parser.add_argument(name, type=int, nargs="+", default=option.default, metavar="N", help=f"({usual})")
    else:
        parser.add_argument(name, type=int, default=option.default, metavar="N", help="(%(default)s)")


def parser_of() -> argparse.ArgumentParser:
    """A parser with one subcommand per benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, function in BENCHMARKS.items():
        text = (inspect.getdoc(function) or "").splitlines()[0]
        command = commands.add_parser(name, help=text, description=text)
        for option in list(inspect.signature(function).parameters.values())[1:]:
            add_option(command, option)
        command.add_argument(
            "--out", type=Path, default=Path("benchmarks/results"), metavar="DIR", help="(%(default)s)"
        )
        command.add_argument("--no-write", action="store_true", help="print only")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run the benchmark."""
    words = sys.argv[1:] if argv is None else argv
    options: dict[str, Any] = vars(parser_of().parse_args(words))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.exit("the benchmarks start their own ranks, but WORLD_SIZE is set. Start without torchrun.")
    folder, no_write, name = options.pop("out"), options.pop("no_write"), options.pop("benchmark")
    if not no_write:
        folder.mkdir(parents=True, exist_ok=True)
    output = Output(" ".join(["python -m benchmarks", *words]), None if no_write else folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        BENCHMARKS[name](output, **options)


if __name__ == "__main__":
    main()
