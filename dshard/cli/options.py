"""The options of ``dshard train``: the argument parser's side and the checked, frozen side."""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from dshard.cli.gpt import GPTConfig
from dshard.cli.runs import RUNS
from dshard.cli.usage import UsageError


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What one run of ``dshard train`` was asked to do. Field names are the option names."""

    data: Path | None
    out: Path | None
    resume: bool
    overwrite: bool
    steps: int
    stop_after: int | None
    batch_size: int
    block_size: int
    layers: int
    width: int
    heads: int
    tie_head: bool
    lr: float
    weight_decay: float
    max_norm: float
    seed: int
    eval_every: int
    save_every: int
    compare: bool
    plot: Path | None
    device: str
    prompt: str
    sample_tokens: int
    temperature: float

    @property
    def model(self) -> GPTConfig:
        """The shape of the model."""
        return GPTConfig(
            block_size=self.block_size,
            num_layers=self.layers,
            width=self.width,
            num_heads=self.heads,
            tie_head=self.tie_head,
        )

    @property
    def end(self) -> int:
        """The step at which this run ends."""
        return self.steps if self.stop_after is None else min(self.steps, self.stop_after)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up over the first tenth of the steps, then a cosine down to a tenth of ``lr``."""
        warm_up = max(1, self.steps // 10)
        if step < warm_up:
            return self.lr * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds every option of ``dshard train`` to a parser."""
    run = parser.add_argument_group("run")
    run.add_argument("--data", type=Path, metavar="PATH", help="text file or folder (Python's standard library)")
    run.add_argument("--out", type=Path, metavar="DIR", help=f"for checkpoints (a new one in {RUNS})")
    run.add_argument(
        "--resume",
        action="store_true",
        help="continue from the checkpoint in --out (of the last run), bit for bit; under --max-restarts, or begin",
    )
    run.add_argument("--overwrite", action="store_true", help="delete the checkpoints of an earlier run in --out")
    run.add_argument("--steps", type=int, default=150, help="length of the schedule (%(default)s)")
    run.add_argument("--stop-after", type=int, metavar="STEP", help="save and end early, to be continued with --resume")
    run.add_argument("--seed", type=int, default=0, help="of weights, data order and sample (%(default)s)")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    run.add_argument("--eval-every", type=int, default=25, metavar="STEPS", help="validate this often (%(default)s)")
    run.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="checkpoint this often (%(default)s)")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=4, help="transformer blocks (%(default)s)")
    model.add_argument("--width", type=int, default=448, help="features (%(default)s)")
    model.add_argument("--heads", type=int, default=7, help="attention heads, a divisor of --width (%(default)s)")
    model.add_argument("--block-size", type=int, default=64, metavar="BYTES", help="context (%(default)s)")
    model.add_argument("--tie-head", action="store_true", help="use the token embedding as the output head")
    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument("--batch-size", type=int, default=8, help="sequences per rank and step (%(default)s)")
    optimizer.add_argument("--lr", type=float, default=5e-4, help="peak learning rate (%(default)s)")
    optimizer.add_argument("--weight-decay", type=float, default=0.1, help="of matrices (%(default)s)")
    optimizer.add_argument("--max-norm", type=float, default=1.0, help="gradients are clipped to it (%(default)s)")
    report = parser.add_argument_group("report")
    report.add_argument("--compare", action="store_true", help="also train unsharded; print losses and memory of both")
    report.add_argument("--plot", type=Path, metavar="FILE", help="draw loss and memory (.png, .svg, .pdf)")
    report.add_argument("--prompt", default="\ndef ", help="what the sample at the end continues")
    report.add_argument("--sample-tokens", type=int, default=200, metavar="BYTES", help="its length (%(default)s)")
    report.add_argument("--temperature", type=float, default=0.8, help="its temperature; 0 is greedy (%(default)s)")


def _check_numbers(args: argparse.Namespace) -> None:
    at_least_1 = ("steps", "batch_size", "block_size", "layers", "width", "heads", "eval_every", "save_every")
    for names, minimum in ((at_least_1, 1), (("seed", "sample_tokens"), 0)):
        for name in names:
            value = getattr(args, name)
            if value < minimum:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {minimum}, but it is {value}.")
    if args.stop_after is not None and args.stop_after < 1:
        raise UsageError(f"--stop-after must be at least 1, but it is {args.stop_after}.")
    if args.seed >= 2**63:
        raise UsageError(f"--seed must be below 2**63, but it is {args.seed}.")
    for name, above in (("lr", True), ("max_norm", True), ("weight_decay", False), ("temperature", False)):
        value = getattr(args, name)
        if not math.isfinite(value) or value < 0 or (above and value == 0):
            rule = "a finite number above 0" if above else "a finite number, 0 or above"
            raise UsageError(f"--{name.replace('_', '-')} must be {rule}, but it is {value}.")
    if args.width % args.heads:
        nearest = max(1, round(args.width / args.heads)) * args.heads
        raise UsageError(
            f"--width must be divisible by --heads, but they are {args.width} and {args.heads}. Use --width {nearest}."
        )


def check_options(args: argparse.Namespace) -> TrainOptions:
    """Turns parsed arguments into options, or says which is wrong.

    Raises:
        UsageError: alike on every rank, for it looks at the arguments alone.

    Communicates: nothing.
    """
    _check_numbers(args)
    if args.sample_tokens and not args.prompt:
        raise UsageError("--prompt must hold at least one byte, but it is empty. Pass some text, or --sample-tokens 0.")
    if args.overwrite and args.resume:
        raise UsageError(
            "--overwrite and --resume say opposite things of an earlier run, but both are given. Pass one of them."
        )
    if args.overwrite and args.out is None:
        raise UsageError(
            "--overwrite deletes an earlier run in --out, but --out is missing: each run has a folder of its own. "
            "Leave it out, or pass --out."
        )
    return TrainOptions(**{field.name: getattr(args, field.name) for field in dataclasses.fields(TrainOptions)})
