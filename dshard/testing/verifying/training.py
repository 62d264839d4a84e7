"""Training runs that are compared: of the plain model in one process, and of the sharded one on each rank."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from dshard.clip import clip_grad_norm_
from dshard.compat import no_sync
from dshard.testing.verifying.programs import Program, Setting, call, checkpoint_blocks
from dshard.testing.verifying.recording import Record, Recorder

_Buffers = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        program: what is trained.
        setting: how.
        num_ranks: whose batches there are.
        clip: largest norm of the gradients; None for no clipping.
        nudge: 0, or the seed of a run whose initial weights are moved by one rounding.
        micro_batches: of a user's step.
    """

    program: Program
    setting: Setting
    num_ranks: int
    clip: float | None = None
    nudge: int = 0
    micro_batches: int = 1


def train_sharded(run: Run) -> Record:
    """The run of this rank. Communicates: what training does."""
    program, rank = run.program, dist.get_rank()
    model = program.build()
    num_blocks = checkpoint_blocks(model) if run.setting.is_checkpointed else 0
    model = program.sharded(model, run.setting)
    recorder = Recorder(model, rank)
    recorder.record.num_blocks = num_blocks
    with _trained(run, model, recorder) as optimizer:
        for step in range(program.num_steps):
            recorder.step = step
            if program.step is not None:
                _seed(0, step, 0)
                batch = program.batch(rank, step)
                if step == 0:
                    recorder.expect_rows(batch)
                recorder.see_returned(program.step(model, optimizer, batch), rank=rank)
            else:
                optimizer.zero_grad()
                _backward(run, model, recorder, 1.0)
                _clip_and_step(run, model, optimizer, recorder)
            recorder.see_parameters(model, "parameter")
    with recorder.evaluating(model, rank):
        _evaluate(program, model, program.batch(rank, program.num_steps))
    for name, buffer in model.named_buffers():
        recorder.see("buffer", name, buffer, rank=rank)
    return recorder.record


def try_checkpoint(run: Run) -> str:
    """What the plain model raises when its blocks compute their forward again in backward; "" for nothing."""
    model = run.program.build()
    checkpoint_blocks(model)
    batch = run.program.batch(0, 0)
    try:
        if run.program.step is not None:
            run.program.step(model, run.program.optimizer(model), batch)
        else:
            run.program.loss_of(call(model, batch)).backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


def train_alone(run: Run, num_nudges: int) -> list[Record]:
    """The runs of the plain model on the batches of all ranks: as it is, and with nudged weights."""
    return [_train_alone(copy.deepcopy(replace(run, nudge=nudge))) for nudge in range(num_nudges + 1)]


def _train_alone(run: Run) -> Record:
    program = run.program
    model = program.build()
    if run.nudge:
        _nudge(model, run)
    recorder = Recorder(model, -1)
    if program.step is None:
        _train_by_rank(run, model, recorder)
    else:
        _train_whole(run, model, recorder)
    return recorder.record


def _train_by_rank(run: Run, model: nn.Module, recorder: Recorder) -> None:
    """Rank after rank, each with buffers of its own, and gradients averaged."""
    program, ranks = run.program, range(run.num_ranks)
    buffers = [{name: b.clone() for name, b in model.named_buffers()} for _ in ranks]
    recorder.scale = float(run.num_ranks)
    with _trained(run, model, recorder) as optimizer:
        for step in range(program.num_steps):
            recorder.step = step
            optimizer.zero_grad()
            for rank in reversed(ranks) if run.nudge % 2 else ranks:
                recorder.rank = rank
                with _with_buffers(model, buffers[rank]):
                    _backward(run, model, recorder, 1.0 / run.num_ranks)
            _clip_and_step(run, model, optimizer, recorder)
            recorder.see_parameters(model, "parameter")
    for rank in ranks:
        with _with_buffers(model, buffers[rank]):
            with recorder.evaluating(model, rank):
                _evaluate(program, model, program.batch(rank, program.num_steps))
            for name, buffer in model.named_buffers():
                recorder.see("buffer", name, buffer, rank=rank)


def _train_whole(run: Run, model: nn.Module, recorder: Recorder) -> None:
    """By the user's step, all batches in one; batch norms still see each rank's part for itself."""
    program = run.program
    kept = {name: _norm_by_rank(m, run.num_ranks) for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    step_of = program.oracle_step or program.step
    assert step_of is not None
    recorder.scale = float(run.num_ranks)
    with _trained(run, model, recorder) as optimizer:
        for step in range(program.num_steps):
            recorder.step = step
            _seed(0, step, 0)
            batch = program.whole_batch(run.num_ranks, step, run.micro_batches)
            recorder.see_returned(step_of(model, optimizer, batch))
            recorder.see_parameters(model, "parameter")
    with recorder.evaluating(model, -1):
        _evaluate(program, model, program.whole_batch(run.num_ranks, program.num_steps, 1))
    for rank in range(run.num_ranks):
        for name, buffer in model.named_buffers():
            owner, _, own = name.rpartition(".")
            recorder.see("buffer", name, kept[owner][rank][own] if owner in kept else buffer, rank=rank)


@contextmanager
def _trained(run: Run, model: nn.Module, recorder: Recorder) -> Iterator[Optimizer]:
    """The optimizer, whose first step has gradients recorded; before and after it what all runs record."""
    recorder.see_parameters(model, "initial value")
    for name in model.state_dict():
        recorder.see("key of state_dict", name, torch.zeros(()))
    optimizer = run.program.optimizer(model)
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in held:
            recorder.record.problems.append(("parameter", name, "it is trainable, but in no group of the optimizer."))
    make_step = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if recorder.step == 0 and not any(key.kind == "gradient" for key in recorder.record.seen):
            recorder.see_gradients(model)
        return make_step(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]
    yield optimizer
    recorder.step = run.program.num_steps
    for name, value in model.state_dict().items():
        if name not in dict(model.named_buffers(remove_duplicate=False)) and isinstance(value, Tensor):
            recorder.see("value in state_dict", name, value)


def _backward(run: Run, model: nn.Module, recorder: Recorder, share: float) -> None:
    """The forwards and backwards of one rank in one step."""
    num, rank = run.setting.micro_batches, recorder.rank
    for i in range(num):
        _seed(rank, recorder.step, i)
        is_kept = i < num - 1 and hasattr(model, "no_sync")
        with no_sync(model) if is_kept else nullcontext():
            loss = run.program.loss_of(call(model, run.program.batch(rank, recorder.step * num + i)))
            recorder.see("loss", "", loss, rank=rank)
            (loss * (share / num)).backward()


def _clip_and_step(run: Run, model: nn.Module, optimizer: Optimizer, recorder: Recorder) -> None:
    if run.clip is not None:
        recorder.see("norm that clipping found", "", clip_grad_norm_(model.parameters(), run.clip))
    optimizer.step()


@torch.no_grad()
def _evaluate(program: Program, model: nn.Module, batch: Any) -> None:
    if program.evaluate is not None:
        with torch.enable_grad():
            program.evaluate(model, batch)
        return
    model.eval()
    call(model, batch)
    model.train()


def _seed(rank: int, step: int, micro: int) -> None:
    """Equal random numbers, of dropout say, for a rank's forward wherever it runs."""
    torch.manual_seed(1 + micro + 16 * step + 4096 * rank)


@torch.no_grad()
def _nudge(model: nn.Module, run: Run) -> None:
    """Move every weight to the next number on one side, or leave it; of bf16, by as much as that rounds."""
    generator = torch.Generator().manual_seed(run.nudge)
    for param in dict.fromkeys(p for p in model.parameters() if p.is_floating_point()):
        way = torch.randint(-1, 2, param.shape, generator=generator).to(param)
        eps = torch.finfo(torch.bfloat16 if run.setting.precision else param.dtype).eps
        param.add_(param * way * eps)


@contextmanager
def _with_buffers(model: nn.Module, buffers: _Buffers) -> Iterator[None]:
    """The model with buffers of a rank, which keep what is done to them."""
    present = dict(model.named_buffers())
    with torch.no_grad():
        for name, buffer in present.items():
            buffer.copy_(buffers[name])
    yield
    for name, buffer in model.named_buffers():
        buffers[name] = buffer.detach().clone()


def _norm_by_rank(module: nn.Module, num_ranks: int) -> list[_Buffers]:
    """Have a batch norm take each rank's part of a batch for itself; returns the buffers of each rank."""
    shared: Any = module
    kept = [{name: b.clone() for name, b in module.named_buffers()} for _ in range(num_ranks)]
    plain = partial(type(module).forward, shared)

    def forward(batch: Tensor) -> Tensor:
        if batch.shape[0] % num_ranks:
            return plain(batch)
        parts, before = [], dict(module._buffers)
        for rank, part in enumerate(batch.chunk(num_ranks)):
            module._buffers.update(kept[rank])
            parts.append(plain(part))
            kept[rank] = {name: b for name, b in module._buffers.items() if b is not None}
        module._buffers.update(before)
        return torch.cat(parts)

    module.forward = forward
    return kept
