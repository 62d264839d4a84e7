"""``dshard train``: trains a small GPT on real text, sharded over the ranks that torchrun started."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import time
from typing import Any

import torch

from dshard.cli import plot, report
from dshard.cli.data import Corpus, load_corpus
from dshard.cli.history import Outcome
from dshard.cli.loop import SHARDED, UNSHARDED, Trainer
from dshard.cli.options import TrainOptions, add_options, check_options
from dshard.cli.saved import Saved, find_saved
from dshard.cli.world import World, check_agreement, process_group, read_world
from dshard.cli.writable import check_writable

_DESCRIPTION = """\
Trains a byte-level GPT, sharded over all ranks. Start it with torchrun, or alone:
  torchrun --nproc-per-node 2 -m dshard train
  torchrun --nproc-per-node 2 -m dshard train --compare --plot losses.png
  torchrun --nproc-per-node 2 -m dshard train --resume
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
    saved = find_saved(options) if options.resume else None
    corpus = load_corpus(options.data, block_size=options.block_size)
    check_writable(options.out, "--out")
    if options.plot is not None:
        plot.check_plot(options.plot)
        check_writable(options.plot.parent, "the folder of --plot")
    if world.device.type == "cpu" and world.size > 1:
        torch.set_num_threads(1)
    with process_group(world):
        check_agreement({**dataclasses.asdict(options), "data digest": corpus.digest, "checkpoint": saved})
        _train(options, world, corpus, saved)
    return 0


def _train(options: TrainOptions, world: World, corpus: Corpus, saved: Saved | None) -> None:
    """Trains, compares, samples and draws."""
    started = time.perf_counter()
    num_train, num_validation = len(corpus.train), len(corpus.validation)
    _say(world, f"data: {corpus.source}, {report.mega(num_train)} to train on, {report.mega(num_validation)} held out")
    with report.open_progress("sharded", total=options.end, is_first=world.is_first) as progress:
        trainer = Trainer(SHARDED, options, world, corpus, progress=progress, save_to=options.out)
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


def _train_unsharded(options: TrainOptions, world: World, corpus: Corpus) -> Outcome:
    """Trains the same model with the same seed and data, whole on every rank, from its first step."""
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    with report.open_progress("unsharded", total=options.end, is_first=world.is_first) as progress:
        outcome = Trainer(UNSHARDED, options, world, corpus, progress=progress).run()
    if world.is_first:
        outcome.history.write(options.out / "history-unsharded.jsonl")
    return outcome


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
    """Prints the tables and the sample, and draws the plot."""
    if options.compare:
        print(f"\n{report.loss_table(*outcomes)}")
        print(f"largest difference over all steps: {report.largest_difference(*outcomes):.1e}")
    print(f"\n{report.memory_table(outcomes)}")
    if sample:
        print(f"\nsample:\n{sample}")
    if options.plot is not None:
        plot.draw(options.plot, outcomes)
        print(f"\nplot: {options.plot}")
