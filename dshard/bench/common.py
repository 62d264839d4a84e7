"""What every benchmark shares: interleaved timing, its summary, and a world of ranks to run on."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from dshard.testing import World

WORLD_TIMEOUT_S = 6 * 3600.0  # of one call on the ranks
_GROUP_TIMEOUT_S = 600.0

Summary = dict[str, float | None]  # of one variant, as JSON holds it
Reader = Callable[[], float | None]  # seconds that a step waited for peers; None where nobody can tell
Step = Callable[[], Reader | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One step of one variant, in seconds."""

    step_s: float
    cpu_s: float  # of all threads of this rank's process
    exposed_s: float | None = None


def interleave(variants: Mapping[str, Step], *, num_rounds: int, num_warmups: int) -> dict[str, list[Sample]]:
    """Samples of every variant in every round; all ranks start each together, in an order that each round draws anew.

    Args:
        variants: By name; each may return a reader of its exposed time, which is called outside of the timing.
        num_rounds: Samples per variant.
        num_warmups: Rounds ahead of them that do not count.

    Communicates:
        A barrier before each step, besides what the steps do.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    order = random.Random(0)  # the same on all ranks; no variant always runs after the same other one
    for i in range(num_warmups + num_rounds):
        for name in order.sample(list(variants), len(variants)):
            dist.barrier()
            cpu_start, start = time.process_time(), time.perf_counter()
            reader = variants[name]()
            step_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
            exposed_s = reader() if reader is not None else None
            if i >= num_warmups:
                samples[name].append(Sample(step_s, cpu_s, exposed_s))
    return samples


def summary_of(times: Sequence[float]) -> Summary:
    """Median and quartiles of at least two times in seconds, in milliseconds."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median_ms": middle * 1e3, "q1_ms": low * 1e3, "q3_ms": high * 1e3, "rounds": len(times)}


def summary(samples: Sequence[Sample]) -> Summary:
    """Sum up one variant: `summary_of` its steps, and the median of its exposed time where that is known."""
    row = summary_of([sample.step_s for sample in samples])
    exposed = [sample.exposed_s for sample in samples if sample.exposed_s is not None]
    if exposed:
        row["exposed_ms"] = statistics.median(exposed) * 1e3
    return row


@contextmanager
def gloo_world(num_ranks: int) -> Iterator[World]:
    """Fresh gloo ranks, one thread each; they take as long as they need."""
    with World(num_ranks, group_timeout_s=_GROUP_TIMEOUT_S) as world:
        yield world
