"""Where the host's time of a step goes in dshard: a clock around each part of the way of a unit."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch

from benchmarks.measure import Summary
from benchmarks.models import BF16, ON_THE_HOST, Size
from benchmarks.output import Output, bars_of, table
from dshard.gradients.backward import Backward, InputWatches
from dshard.gradients.reducer import Reducer
from dshard.optimizer import steps
from dshard.runtime import module_hooks, unsharding
from dshard.testing import fake_world
from dshard.units.copies import Copies
from dshard.units.unit import Unit

_WARMUPS = 5
# By what is printed: who has the function, and its name. A part is timed without those within it.
_PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "hooks around modules": ((module_hooks, "_enter"), (module_hooks, "_exit")),
    "gathers start": ((Copies, "gather"),),
    "gathers end": ((Copies, "wait"),),
    "memory is given back": ((Unit, "reshard"),),
    "full tensors, and their node": ((unsharding.Unsharding, "_record"),),
    "places in units, to save": ((unsharding, "_saved"),),
    "places in units, saved": ((unsharding, "_restored"),),
    "inputs are watched": ((InputWatches, "watch"),),
    "gradients, from the node to .grad": ((Backward, "receive_together"),),
    "gradients are packed and reduced": ((Reducer, "launch"),),
    "around the optimizer's step": ((steps, "_enter"), (steps, "_leave")),
}


class _Clock:
    """Times functions that call one another, each without what it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._within: list[float] = []  # of each that runs, the seconds of those that it called

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is timed as a part of the step."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._within.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.perf_counter() - start
                self.seconds[part] += taken - self._within.pop()
                self.calls[part] += 1
                if self._within:
                    self._within[-1] += taken

        return timed


@contextmanager
def _clocked() -> Iterator[_Clock]:
    """A clock around each part, within the block."""
    clock, before = _Clock(), []
    for part, functions in _PARTS.items():
        for owner, name in functions:
            function = getattr(owner, name)
            before.append((owner, name, function))
            setattr(owner, name, clock.around(part, function))
    try:
        yield clock
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


@dataclass(frozen=True, slots=True)
class _Found:
    """Medians of some steps: milliseconds of all, and of each part microseconds and calls per layer."""

    step_ms: float
    parts: dict[str, tuple[float, float]]


def _measure(size: Size, num_ranks: int, num_rounds: int) -> _Found:
    workload = replace(ON_THE_HOST["GPT"], policy=BF16)
    samples: dict[str, list[float]] = defaultdict(list)
    with fake_world(0, num_ranks), _clocked() as clock:
        step = workload.step_of("dshard", size, is_watched=False)
        for number in range(_WARMUPS + num_rounds):
            clock.seconds.clear()
            clock.calls.clear()
            start = time.perf_counter()
            step()
            taken = time.perf_counter() - start
            if number >= _WARMUPS:
                samples[""].append(taken)
                for part, seconds in clock.seconds.items():
                    samples[part].append(seconds)
        calls = dict(clock.calls)
    medians = {part: statistics.median(each) for part, each in samples.items()}
    found = {part: (medians[part] / size.layers * 1e6, calls[part] / size.layers) for part in _PARTS if part in medians}
    return _Found(medians[""] * 1e3, found)


def run(output: Output, *, ranks: int = 8, rounds: int = 30, layers: int = 100, width: int = 64) -> None:
    """What of a step takes dshard's host how long, under bf16, with nothing on the wire; clocks take time, too."""
    torch.set_num_threads(1)
    found = _measure(Size(layers=layers, width=width, vocab=256, heads=4), ranks, rounds)
    rows = {part: [f"{us:.1f}", f"{calls:.2f}"] for part, (us, calls) in found.parts.items()}
    rows["all of these"] = [f"{sum(us for us, _ in found.parts.values()):.1f}", ""]
    print(f"GPT, bf16, {layers} layers, {ranks} ranks, fake group: a step of {found.step_ms:.1f} ms")
    print(table(["us per layer", "calls"], rows))
    parts: dict[str, Summary] = {
        part: {"us_per_layer": us, "calls_per_layer": calls} for part, (us, calls) in found.parts.items()
    }
    content = {"header": output.header(backend="fake"), "step_ms": found.step_ms, "parts": parts}
    panel = bars_of("host time by part", {"GPT, bf16": parts}, "us_per_layer", "us per layer")
    output.write("host_parts_fake", content, [panel])
