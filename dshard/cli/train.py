"""``dshard train``: trains a small GPT on real text, sharded over the ranks that torchrun started."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dshard.cli import plot, report
from dshard.cli.data import Corpus, load_corpus
from dshard.cli.history import Outcome
from dshard.cli.loop import SHARDED, UNSHARDED, Trainer
from dshard.cli.options import TrainOptions, add_options, check_options
from dshard.cli.runs import HISTORIES, POINTER, RUNS, check_empty, delete_earlier, find_newest, make_fresh, newest_of
from dshard.cli.saved import Saved, find_saved
from dshard.cli.usage import RunError, UsageError
from dshard.cli.world import World, check_agreement, first_of, process_group, read_world
from dshard.cli.writable import check_writable

_DESCRIPTION = """\
Trains a byte-level GPT, sharded over all ranks. Start it with torchrun, or alone:
  torchrun --nproc-per-node 2 -m dshard train
  torchrun --nproc-per-node 2 -m dshard train --compare --plot losses.png
  torchrun --nproc-per-node 2 -m dshard train --resume
  torchrun --nproc-per-node 2 --max-restarts 3 -m dshard train --out runs/mine --resume
  python -m dshard train --steps 20
"""


def add_parser(commands: Any) -> None:
    """Adds this subcommand to the parser of ``dshard``."""
    parser = commands.add_parser(
        "train",
        help="train a small GPT on real text",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.set_defaults(run=run)


def _say(world: World, text: str = "") -> None:
    """Prints on rank 0."""
    if world.is_first:
        print(text, flush=True)


def run(args: argparse.Namespace) -> int:
    """Checks everything that can be checked alone, then joins the other ranks and trains.

    Raises:
        UsageError: on bad input; alike on every rank of a machine.

    Communicates: everything that training does.
    """
    options = check_options(args)
    world = read_world(os.environ, options.device)
    saved = None
    if options.resume:
        options, saved = _continued(options)
    corpus = load_corpus(options.data, block_size=options.block_size)
    check_writable(options.out or RUNS, "--out")
    if options.plot is not None:
        plot.check_plot(options.plot)
        check_writable(options.plot.parent, "the folder of --plot")
    if world.device.type == "cpu" and world.size > 1:
        torch.set_num_threads(1)  # as many on one process as on several: sums of several threads round otherwise
    with process_group(world):
        check_agreement({**dataclasses.asdict(options), "data digest": corpus.digest, "checkpoint": saved})
        if options.resume and saved is None:
            _say(world, f"--resume: no checkpoint in {options.out or RUNS} yet, so training begins at its first step")
        options = replace(options, out=_folder_of(options, world))
        _train(options, world, corpus, saved)
    return 0


def _continued(options: TrainOptions) -> tuple[TrainOptions, Saved | None]:
    """The options with the folder to continue, and its checkpoint.

    A launcher that restarts ranks starts them with the same options each time: there may be no checkpoint yet, or
    nothing left to do.

    Raises:
        UsageError: there is no checkpoint, or none that these options can continue.
    """
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        options = replace(options, out=options.out or find_newest(RUNS))
        return options, find_saved(_out_of(options), options)
    out = options.out or newest_of(RUNS)
    if out is None or not (out / POINTER).exists():
        return options, None
    return replace(options, out=out), find_saved(out, options, may_be_over=True)


def _out_of(options: TrainOptions) -> Path:
    assert options.out is not None
    return options.out


def _folder_of(options: TrainOptions, world: World) -> Path:
    """Where this run writes: a folder of its own, or one that no earlier run has, unless that is to go on or to go.

    Raises:
        UsageError: an earlier run is there; on every rank, if any sees it.

    Communicates: a few short texts.
    """
    if options.out is not None and options.resume:
        options.out.mkdir(parents=True, exist_ok=True)
        return options.out
    if options.out is None:
        return Path(_by_first(world, lambda: str(make_fresh(RUNS))))
    out = options.out
    if not options.overwrite:
        said = first_of(check_empty(out))
        if said is not None:
            raise UsageError(said)
        return out
    deleted = _by_first(world, lambda: delete_earlier(out) or "")
    if deleted:
        _say(world, f"deleted the earlier run in {out}: {deleted}")
    return out


def _by_first(world: World, action: Callable[[], str]) -> str:
    """What the first rank's action gives, on every rank.

    Raises:
        UsageError: a file or folder cannot be made or deleted, or is not ours to delete; on every rank.
    """
    found = error = None
    if world.is_first:
        try:
            found = action()
        except OSError as raised:
            error = (
                f"--out must be a folder that can be written, but {raised.filename}: {raised.strerror}. Pass another."
            )
        except UsageError as raised:
            error = str(raised)
    error = first_of(error)
    if error is not None:
        raise UsageError(error)
    return first_of(found) or ""


def _train(options: TrainOptions, world: World, corpus: Corpus, saved: Saved | None) -> None:
    """Trains, compares, samples and draws."""
    started = time.perf_counter()
    num_train, num_validation = len(corpus.train), len(corpus.validation)
    _say(world, f"data: {corpus.source}, {report.mega(num_train)} to train on, {report.mega(num_validation)} held out")
    with report.open_progress("sharded", total=options.end, is_first=world.is_first) as progress:
        trainer = Trainer(SHARDED, options, world, corpus, progress=progress, save_to=_out_of(options))
        num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        progress.note(f"{num_parameters / 1e6:.1f} M parameters on {world.size} x {world.device.type}")
        if saved is not None:
            trainer.restore(saved)
            progress.note(f"resumed from {saved.path} at step {trainer.num_done}")
        outcomes = [trainer.run()]
    sample = _sample(trainer, options, world)
    if options.compare:
        del trainer
        gc.collect()
        outcomes.append(_train_unsharded(options, world, corpus))
    if world.is_first:
        _print_results(options, outcomes, sample)
        print(f"\n{time.perf_counter() - started:.1f} s, losses and checkpoint in {options.out}", flush=True)
    if options.plot is not None:
        picture = options.plot
        _on_first(world, "--plot", picture, lambda: plot.draw(picture, outcomes))
        _say(world, f"\nplot: {picture}")


def _train_unsharded(options: TrainOptions, world: World, corpus: Corpus) -> Outcome:
    """Trains the same model with the same seed and data, whole on every rank, from its first step."""
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    with report.open_progress("unsharded", total=options.end, is_first=world.is_first) as progress:
        outcome = Trainer(UNSHARDED, options, world, corpus, progress=progress).run()
    path = _out_of(options) / HISTORIES[1]
    _on_first(world, "--out", path, lambda: outcome.history.write(path))
    return outcome


def _on_first(world: World, option: str, path: Path, action: Callable[[], object]) -> None:
    """Has the first rank write a file.

    Raises:
        RunError: it cannot; on every rank.

    Communicates: a short text.
    """
    said = None
    try:
        if world.is_first:
            action()
    except OSError as error:
        said = (
            f"{option} must be a file that can be written, but writing {path} says: {error.strerror}. Pass another "
            "path, or make room."
        )
    said = first_of(said)
    if said is not None:
        raise RunError(said)


def _sample(trainer: Trainer, options: TrainOptions, world: World) -> str:
    """Text that the model continues; every rank samples the same, for the weights are gathered from all of them."""
    if options.sample_tokens == 0:
        return ""
    prompt = torch.tensor([list(options.prompt.encode())], device=world.device)
    generator = torch.Generator().manual_seed(options.seed)
    trainer.model.eval()
    tokens = trainer.model.generate(prompt, options.sample_tokens, temperature=options.temperature, generator=generator)
    return report.printable(bytes(tokens[0].tolist()))


def _print_results(options: TrainOptions, outcomes: list[Outcome], sample: str) -> None:
    """Prints the tables and the sample."""
    if options.compare:
        print(f"\n{report.loss_table(*outcomes)}")
        print(f"largest difference over all steps: {report.largest_difference(*outcomes):.1e}")
    print(f"\n{report.memory_table(outcomes)}")
    if sample:
        print(f"\nsample:\n{sample}")
