"""Parameters at home in the CPU's memory: a step and its parts, dshard beside FSDP2 and beside no offload.

On a CUDA device it is one NCCL rank, and a GPT of 0.94 billion parameters. Elsewhere the CPU stands for the device too:
one core computes, and what a deferred step hides is seen, but no copy and no FSDP2, which offloads from a device alone.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dshard
from benchmarks.gpu import world
from benchmarks.measure import Summary, summary_of
from benchmarks.models import BF16, GPT, Size, mesh_of
from benchmarks.output import Output, bars_of, table
from dshard.policies import Offload

NONE, THEIRS, AT_ONCE, DEFERRED = "no offload", "FSDP2", "dshard, at once", "dshard"
PARTS = ("forward and backward", "clip", "optimizer")
_NUM_TOGETHER = 4  # steps of one sample
_NUM_WARMUPS = 3  # the first step makes states, and the second is the first that can be deferred


@dataclass(frozen=True, slots=True)
class Case:
    """A model that is trained by steps of so many tokens, in sequences of `length` at most."""

    size: Size
    tokens: int
    length: int
    device: torch.device

    @property
    def is_cuda(self) -> bool:
        """Whether there is a device to copy to, to wait for, and to count the memory of."""
        return self.device.type == "cuda"

    @property
    def kinds(self) -> tuple[str, ...]:
        """What can be measured there."""
        return (NONE, THEIRS, AT_ONCE, DEFERRED) if self.is_cuda else (NONE, AT_ONCE, DEFERRED)

    def model_of(self, kind: str) -> torch.nn.Module:
        """A freshly built model."""
        torch.manual_seed(0)
        cpu = torch.device("cpu")
        with self.device:  # which draws a billion numbers in no time
            model: Any = GPT(self.size)
        model = model.to(cpu if kind != NONE else self.device)
        options: dict[str, Any] = {"mesh": mesh_of(self.device)}
        if self.is_cuda:
            options["mp_policy"] = BF16
        if kind != NONE and self.is_cuda:
            options["offload_policy"] = dshard.CPUOffloadPolicy(defer_step=kind == DEFERRED)
        elif kind != NONE:
            options["offload_policy"] = Offload(cpu, cpu, defers_step=kind == DEFERRED)
        fully_shard: Callable[..., Any] = torch_fully_shard if kind == THEIRS else dshard.fully_shard
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    def wait(self) -> None:
        """For the device, not for a thread that steps."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


class Training:
    """Steps of one kind.

    Args:
        case: The case.
        kind: The kind.
    """

    def __init__(self, case: Case, kind: str) -> None:
        self._case, self.model = case, case.model_of(kind)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        length = min(case.length, case.tokens)
        shape = (case.tokens // length, length + 1)
        self._ids = torch.randint(0, case.size.vocab, shape, device=case.device)

    def step(self, *, is_apart: bool) -> list[float]:
        """Train one step.

        Args:
            is_apart: Whether to wait for the device after each part, to tell how long it takes.

        Returns:
            Seconds of each of `PARTS`; of all together where they are not apart.
        """
        marks = [time.perf_counter()]

        def mark() -> None:
            if is_apart:
                self._case.wait()
            marks.append(time.perf_counter())

        logits = self.model(self._ids[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), self._ids[:, 1:].flatten()).backward()
        mark()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        mark()
        self._optimizer.step()
        self._optimizer.zero_grad()
        mark()
        return [end - start for start, end in pairwise(marks)]

    def settle(self) -> None:
        """Wait for the device, and for the thread that steps: as whoever looks at the optimizer's states does."""
        len(self._optimizer.state)
        self._case.wait()


def measure(case: Case, kinds: Sequence[str], num_rounds: int) -> dict[str, Summary]:
    """Some kinds, interleaved.

    Steps are timed several at a time, until what the last one has left to a thread has ended, too.
    """
    gc.collect()
    trainings = {kind: Training(case, kind) for kind in kinds}
    if case.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(case.device)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    parts: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for training in trainings.values():
        for _ in range(_NUM_WARMUPS):
            training.step(is_apart=False)
        training.settle()
    for _ in range(num_rounds):
        for kind, training in trainings.items():
            start = time.perf_counter()
            for _ in range(_NUM_TOGETHER):
                training.step(is_apart=False)
            training.settle()
            times[kind].append((time.perf_counter() - start) / _NUM_TOGETHER)
            training.step(is_apart=True)  # which leaves a step to the next one, as in a training
            parts[kind].append(training.step(is_apart=True))
            training.settle()
    rows: dict[str, Summary] = {}
    for kind in kinds:
        medians = [statistics.median(each) * 1e3 for each in zip(*parts[kind], strict=True)]
        rows[kind] = {**summary_of(times[kind]), "peak_gb": None}
        rows[kind] |= {f"{name}, ms": each for name, each in zip(PARTS, medians, strict=True)}
        if case.is_cuda:
            rows[kind]["peak_gb"] = torch.cuda.max_memory_allocated(case.device) / 1e9
    return rows


def _text(rows: dict[str, Summary]) -> str:
    columns = {"step ms": "median_ms", **{f"{name} ms": f"{name}, ms" for name in PARTS}, "peak GB": "peak_gb"}
    cells = {
        kind: ["-" if row[key] is None else f"{row[key]:.1f}" for key in columns.values()] for kind, row in rows.items()
    }
    return table(list(columns), cells)


def run(
    output: Output,
    *,
    tokens: Sequence[int] = (4096, 16384, 65536),
    rounds: int = 6,
    layers: int = 16,
    width: int = 2048,
    vocab: int = 32000,
    cpu: bool = False,
) -> None:
    """Offload to the CPU's memory, with clipping: steps of so many tokens.

    Args:
        output: Gets `offload_cuda`, or `offload_cpu`.
        tokens: Of a step.
        rounds: Samples of four steps each.
        layers: Blocks.
        width: Features.
        vocab: Tokens that the model knows.
        cpu: Whether the CPU is the device too: for a small model, and where there is no other.
    """
    device = torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())
    if cpu:
        torch.set_num_threads(1)
    size = Size(vocab=vocab, width=width, layers=layers, heads=max(1, width // 128), checkpointing=not cpu)
    results: dict[str, dict[str, Summary]] = {}
    for number in tokens:
        case = Case(size, number, 2048, device)
        rows = results[f"{number} tokens"] = {}
        # On a device one at a time, for the memory of two would not show how much one takes.
        for kinds in [[kind] for kind in case.kinds] if case.is_cuda else [case.kinds]:
            with world(1, device):
                rows |= measure(case, kinds, rounds)
        print(f"\n{number} tokens on {device}\n{_text(rows)}", flush=True)
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in GPT(size).parameters())
    facts = output.header(num_parameters=num_parameters, dtype="float32" if cpu else "bfloat16")
    panels = [bars_of("a training step", results, "median_ms")]
    output.write("offload_cpu" if cpu else "offload_cuda", {"header": facts, "rows": results}, panels)
