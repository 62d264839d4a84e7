"""The training loop: one for sharded and unsharded training, which differ in an `Engine` of three functions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import dshard
from dshard.cli import saved as saving
from dshard.cli.data import Batch, Corpus, train_batch, validation_batches
from dshard.cli.gpt import GPT
from dshard.cli.history import History, Outcome
from dshard.cli.memory import StateBytes, count_state_bytes, gather_state_bytes
from dshard.cli.options import TrainOptions
from dshard.cli.report import Progress
from dshard.cli.usage import UsageError
from dshard.cli.world import World, mean_over_ranks

_VALIDATION_WINDOWS = 64


@dataclass(frozen=True, slots=True)
class Engine:
    """What makes training sharded or not.

    Attributes:
        name: for people.
        prepare: called once with the new model.
        sync_gradients: called after each backward.
        clip: clips gradients to a norm and returns the norm before it, equal on every rank.
    """

    name: str
    prepare: Callable[[GPT, TrainOptions], object]
    sync_gradients: Callable[[GPT], None]
    clip: Callable[[Iterable[Tensor], float], Tensor]


def _average_gradients(model: GPT) -> None:
    """All-reduces every gradient to its mean over ranks, as DDP does."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@torch.no_grad()
def _clip_plain(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Torch's rule for clipping by norm, with the squares summed in float64.

    Sharded and unsharded training sum the squares in different orders. In float32 the scale then differs in its last
    bit, and the losses soon in more; in float64 it is equal once rounded.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([gradient.double().norm() for gradient in gradients]))
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0).float())
    return norm.float()


def _shard(model: GPT, options: TrainOptions) -> None:
    dshard.fully_shard(model)


SHARDED = Engine("sharded", _shard, lambda model: None, dshard.clip_grad_norm_)
UNSHARDED = Engine("unsharded", lambda model, options: None, _average_gradients, _clip_plain)


def _loss(model: GPT, batch: Batch, device: torch.device) -> Tensor:
    logits = model(batch.inputs.to(device))
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.to(device).flatten())


class Trainer:
    """A model, its optimizer and its losses on their way through the steps.

    Args:
        engine: sharded or not.
        options: what to do.
        world: this process among all.
        corpus: what to train on, equal on every rank.
        progress: where to report to.
        save_to: the folder for checkpoints; None saves none.

    Communicates: what `Engine.prepare` does.
    """

    def __init__(
        self,
        engine: Engine,
        options: TrainOptions,
        world: World,
        corpus: Corpus,
        *,
        progress: Progress,
        save_to: Path | None = None,
    ) -> None:
        self.engine, self.options, self.world, self.corpus = engine, options, world, corpus
        self.progress, self.save_to = progress, save_to
        torch.manual_seed(options.seed)
        self.model = GPT(options.model).to(world.device)
        engine.prepare(self.model, options)
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in self.model.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
        self.history = History()
        self.num_done = 0
        self._description = saving.describe(options, world_size=world.size, digest=corpus.digest)
        self._step_s = 0.0
        self._num_tokens = 0
        self._memory: StateBytes | None = None

    def restore(self, saved: saving.Saved) -> None:
        """Continues from a checkpoint.

        Raises:
            UsageError: alike on every rank, where the checkpoint does not fit.

        Communicates: what `dshard.checkpoint.load` does.
        """
        extra = saving.load(saved, self.model, self.optimizer)
        try:
            self.num_done, self.history = int(extra["step"]), History.from_json(extra["history"])
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"--resume needs a checkpoint of dshard train, but the losses in {saved.path} cannot be read: {error}. "
                "Pass --overwrite to start anew."
            ) from error
        for difference in saving.differences(saved, self._description):
            self.progress.note(f"the loss curve will not continue bit for bit: {difference}")

    def run(self) -> Outcome:
        """Trains to the end of this run.

        Communicates: per step what the engine does and a one-number all-reduce of the loss.
        """
        if self.num_done == 0:
            self._validate()
        while self.num_done < self.options.end:
            self._step()
            if self.num_done % self.options.eval_every == 0 or self.num_done == self.options.steps:
                self._validate()
            if self.num_done % self.options.save_every == 0 or self.num_done == self.options.end:
                self._save()
        memory = self._memory or count_state_bytes(self.model, self.optimizer, self.world.device)
        return Outcome(self.engine.name, self.history, gather_state_bytes(memory), self._step_s, self._num_tokens)

    def _step(self) -> None:
        """One forward, backward and update, with its report."""
        options = self.options
        started = time.perf_counter()
        loss = self._backward()
        self.engine.sync_gradients(self.model)
        norm = self.engine.clip(self.model.parameters(), options.max_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = options.learning_rate(self.num_done)
        self.optimizer.step()
        mean_loss = mean_over_ranks(loss)
        elapsed_s = time.perf_counter() - started
        if self.num_done == options.end - 1 or self._memory is None:
            self._memory = count_state_bytes(self.model, self.optimizer, self.world.device)
        self.optimizer.zero_grad()
        if not math.isfinite(mean_loss):
            raise UsageError(
                f"the loss must stay finite, but step {self.num_done + 1} gave {mean_loss}. Pass a smaller --lr than "
                f"{options.lr}."
            )
        num_tokens = options.batch_size * options.block_size * self.world.size
        self._step_s += elapsed_s
        self._num_tokens += num_tokens
        self.num_done += 1
        self.history.losses.append(mean_loss)
        self.history.norms.append(float(norm))
        self.progress.step(self.num_done, mean_loss, tokens_per_s=num_tokens / elapsed_s, memory=self._memory)

    def _backward(self) -> Tensor:
        """The forward and backward of this rank's batch; gives its loss."""
        options = self.options
        batch = train_batch(
            self.corpus,
            seed=options.seed,
            step=self.num_done,
            rank=self.world.rank,
            batch_size=options.batch_size,
            block_size=options.block_size,
        )
        loss = _loss(self.model, batch, self.world.device)
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def _validate(self) -> None:
        """Measures the validation loss, on the same windows every time."""
        batches = validation_batches(
            self.corpus,
            num_windows=_VALIDATION_WINDOWS,
            rank=self.world.rank,
            world_size=self.world.size,
            batch_size=self.options.batch_size,
            block_size=self.options.block_size,
        )
        total = torch.zeros((), device=self.world.device)
        for batch in batches:
            total += _loss(self.model, batch, self.world.device) * len(batch.inputs)
        loss = mean_over_ranks(total / sum(len(batch.inputs) for batch in batches))
        self.history.validation[self.num_done] = loss
        self.progress.validation(self.num_done, loss)

    def _save(self) -> None:
        """Saves a checkpoint and the losses so far."""
        if self.save_to is None:
            return
        run = saving.Progressed(self.num_done, self._description, self.history)
        saving.save(self.save_to, self.model, self.optimizer, run)
