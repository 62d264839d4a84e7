"""``dshard bench``: the benchmarks, one subcommand each. This module knows their options; `dshard.bench` runs them."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dshard.cli.usage import UsageError
from dshard.cli.writable import check_writable

if TYPE_CHECKING:
    from dshard.bench.families import Family

_DESCRIPTION = """\
Runs dshard interleaved with FSDP2, DDP and the unsharded model on this machine, prints a table, writes JSON and a plot.
  dshard bench step
  dshard bench collectives --ranks 4 --no-write
It starts its own ranks: no torchrun.
"""

# Of each benchmark: what it measures.
_HELP = {
    "step": "a training step of a GPT, and its exposed communication, over gloo",
    "compile": "a training step of a GPT whose blocks torch.compile compiled, over gloo",
    "host": "what a step costs the host: tiny layers, nothing on the wire",
    "memory": "what training grows a rank's process by, over gloo",
    "collectives": "gather and reduce-scatter of one unit, over gloo",
    "scale": "host time and memory against ranks (8 to 4096) and units (10 to 2000), nothing on the wire",
    "units": "units found on the root alone beside units made by hand, on five models, over gloo",
    "optimizer": "an AdamW step on shards, plain tensors and DTensors",
    "plan": "plans at five memory limits beside every single strategy, and beside their predictions, over gloo",
    "checkpoint": "saving and loading beside dd and DCP, and what an asynchronous save takes from training, over gloo",
    "gpu": "a Llama-like model of 1.1 billion parameters on one CUDA device (not run on a GPU yet)",
}
_ROUNDS = {
    "step": 12,
    "compile": 12,
    "host": 20,
    "collectives": 30,
    "scale": 8,
    "units": 30,
    "optimizer": 20,
    "plan": 12,
    "checkpoint": 8,
    "gpu": 10,
}
_NUM_RANKS = {
    **dict.fromkeys(("step", "compile", "memory", "collectives", "units", "optimizer", "plan", "checkpoint"), 2),
    "host": 8,
}
_GPT = {
    "step": (8, 512),
    "compile": (6, 384),
    "memory": (8, 512),
    "host": (24, 64),
    "scale": (8, 64),
    "plan": (6, 256),
    "checkpoint": (8, 512),
}  # layers and width
_WORLD_SIZES = {"scale": (8, 64, 512, 4096), "gpu": (1, 8, 64)}
_UNITS = (10, 50, 200, 1000, 2000)


def add_parser(commands: Any) -> None:
    """Adds this subcommand and one of its own per benchmark to the parser of ``dshard``."""
    bench = commands.add_parser(
        "bench",
        help="measure dshard beside FSDP2 and DDP",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmarks = bench.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, text in _HELP.items():
        parser = benchmarks.add_parser(name, help=text, description=f"Measures {text}.")
        _add_options(parser, name)
        parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """The options that a benchmark has, each only where it means something."""
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), metavar="DIR", help="for the files (%(default)s)"
    )
    parser.add_argument("--no-write", action="store_true", help="print only")
    if name in _ROUNDS:
        parser.add_argument("--rounds", type=int, default=_ROUNDS[name], help="samples per variant (%(default)s)")
    if name in _NUM_RANKS:
        parser.add_argument("--ranks", type=int, default=_NUM_RANKS[name], help="(%(default)s)")
    if name in _GPT:
        layers, width = _GPT[name]
        parser.add_argument("--layers", type=int, default=layers, help="transformer blocks (%(default)s)")
        parser.add_argument("--width", type=int, default=width, help="features, a multiple of 8 (%(default)s)")
    if name in _WORLD_SIZES:
        sizes = _WORLD_SIZES[name]
        parser.add_argument("--world-sizes", type=int, nargs="+", default=sizes, metavar="RANKS", help=_spaced(sizes))
    if name == "step":
        parser.add_argument("--family", action="store_true", help="nine other kinds of work in the place of the GPT's")
    if name == "plan":
        parser.add_argument(
            "--checkpointing", action="store_true", help="longer sequences, and each unit may be computed again"
        )
    if name == "scale":
        parser.add_argument("--units", type=int, nargs="+", default=_UNITS, help=f"two or more ({_spaced(_UNITS)})")
    if name == "collectives":
        parser.add_argument("--width", type=int, default=512, help="of the block that is the unit (%(default)s)")
    if name == "units":
        parser.add_argument("--repeats", type=int, default=3, help="memory measurements per variant (%(default)s)")
        parser.add_argument("--families", nargs="+", metavar="NAME", help="such as: GPT '500 layers' (all)")
    if name == "optimizer":
        parser.add_argument("--layers", type=int, help="of one stack, in the place of 8 and 50; with --width")
        parser.add_argument("--width", type=int, help="of that stack, in the place of 256 and 16")
    if name == "gpu":
        parser.add_argument("--tiny", action="store_true", help="a tiny model on CPU, to try the path")
        parser.add_argument("--batch", type=int, default=4, help="sequences per step (%(default)s)")
        parser.add_argument("--tokens", type=int, default=2048, help="per sequence (%(default)s)")


def _spaced(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))


def _check(args: argparse.Namespace) -> None:
    """Everything that can be wrong with the arguments.

    Raises:
        UsageError: something is.
    """
    given = vars(args)
    least = dict.fromkeys(("ranks", "layers", "width", "batch", "tokens", "world_sizes", "units", "repeats"), 1)
    least["rounds"] = 2
    for name, minimum in least.items():
        values = given.get(name)
        for value in values if isinstance(values, (list, tuple)) else [values]:
            if value is not None and value < minimum:
                why = " Quartiles need two samples." if name == "rounds" else ""
                raise UsageError(f"--{name.replace('_', '-')} must be at least {minimum}, but it is {value}.{why}")
    if args.benchmark in _GPT and args.width % 8:
        raise UsageError(
            f"--width must be divisible by 8, but it is {args.width}. Use --width {-(-args.width // 8) * 8}."
        )
    if args.benchmark == "scale" and len(set(args.units)) < 2:
        raise UsageError(f"--units must be two numbers or more, for a fit, but it is {_spaced(tuple(args.units))}.")
    if args.benchmark == "optimizer" and (args.layers is None) != (args.width is None):
        raise UsageError("--layers and --width go together, but one of them is missing. Pass both, or neither.")


def _families(given: list[str] | None) -> dict[str, Family]:
    """The models that are asked for, whether they can be built here or not.

    Raises:
        UsageError: a name is unknown, or none can be built here.
    """
    from dshard.bench.families import FAMILIES

    names = list(FAMILIES) if given is None else given
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        known = ", ".join(map(repr, FAMILIES))
        raise UsageError(f"--families must be names of {known}, but {unknown[0]!r} is none. Pass one of these.")
    packages = {FAMILIES[name].missing for name in names}
    if None not in packages:
        missing = ", ".join(sorted(filter(None, packages)))
        raise UsageError(
            f"--families must hold a model that can be built here, but all of them ({', '.join(names)}) need "
            f"{missing}, which is not installed. Run: pip install {missing}"
        )
    return {name: FAMILIES[name] for name in names}


def _check_environment(environ: Mapping[str, str]) -> None:
    if environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            f"the benchmarks start their own ranks, but WORLD_SIZE is {environ['WORLD_SIZE']}. Start without torchrun."
        )


def run(args: argparse.Namespace) -> int:
    """Checks the arguments, then measures.

    Raises:
        UsageError: on bad input.

    Communicates: on ranks of its own.
    """
    _check(args)
    _check_environment(os.environ)
    if args.benchmark == "gpu":
        _check_cuda(tiny=args.tiny)
    if args.benchmark == "units":
        args.families = _families(args.families)
    if not args.no_write:
        check_writable(args.out, "--out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _measure(args)
    return 0


def _check_cuda(*, tiny: bool) -> None:
    import torch

    if not tiny and not torch.cuda.is_available():
        raise UsageError(
            "this benchmark needs a CUDA device, but torch finds none. Pass --tiny to try the path on CPU."
        )


def _measure(args: argparse.Namespace) -> None:
    """Imports the benchmark, and runs it."""
    from dshard.bench.output import Output

    output = Output(args.command_line, None if args.no_write else args.out)
    name = args.benchmark
    if name == "collectives":
        from dshard.bench import collectives

        collectives.run(output, num_ranks=args.ranks, num_rounds=args.rounds, width=args.width)
    elif name == "optimizer":
        from dshard.bench import optimizer

        stacks = optimizer.STACKS if args.layers is None else (optimizer.Stack(args.layers, args.width),)
        optimizer.run(output, num_ranks=args.ranks, num_rounds=args.rounds, stacks=stacks)
    elif name == "units":
        from dshard.bench import units

        for family_name, family in args.families.items():
            if family.missing is not None:
                print(f"{family_name}: left out, for {family.missing} is not installed")
        families = {family_name: family for family_name, family in args.families.items() if family.missing is None}
        repeats = args.repeats
        units.run(output, num_ranks=args.ranks, num_rounds=args.rounds, num_repeats=repeats, families=families)
    elif name == "gpu":
        from dshard.bench import gpu

        batch = gpu.Batch(args.batch, args.tokens)
        gpu.run(output, world_sizes=args.world_sizes, num_rounds=args.rounds, batch=batch, is_tiny=args.tiny)
    else:
        _measure_gpt(args, output)


def _measure_gpt(args: argparse.Namespace, output: Any) -> None:
    """The benchmarks that train a GPT of a size that the options give."""
    from dshard.bench import checkpoint, host, memory, planned, scale, step
    from dshard.bench import compile as compiled
    from dshard.bench.models import Size

    size = Size(layers=args.layers, width=args.width)
    narrow = Size(layers=args.layers, width=args.width, vocab=256, heads=4)  # where the host is what is measured
    if args.benchmark == "step":
        measure = step.run_family if args.family else step.run
        measure(output, num_ranks=args.ranks, num_rounds=args.rounds, size=size)
    elif args.benchmark == "compile":
        compiled.run(output, num_ranks=args.ranks, num_rounds=args.rounds, size=size)
    elif args.benchmark == "memory":
        memory.run(output, num_ranks=args.ranks, size=size)
    elif args.benchmark == "plan":
        choice = args.checkpointing
        planned.run(output, num_ranks=args.ranks, num_rounds=args.rounds, size=size, with_checkpointing=choice)
    elif args.benchmark == "checkpoint":
        checkpoint.run(output, num_ranks=args.ranks, num_rounds=args.rounds, size=size)
    elif args.benchmark == "host":
        host.run(output, num_ranks=args.ranks, num_rounds=args.rounds, size=narrow)
    else:
        scale.run(output, world_sizes=args.world_sizes, unit_counts=args.units, num_rounds=args.rounds, size=narrow)
