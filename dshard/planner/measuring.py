"""Real steps on this machine: how long each part of a model takes, and a whole step beside what was predicted of it."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dshard import arguments
from dshard.errors import PlanError
from dshard.planner.profiles import UnitTimes
from dshard.planner.steps import Part, following, parts_by_module, run_step, swapped, tensors
from dshard.planner.texts import bytes_text, seconds_text

_MIN_S, _MAX_STEPS = 1.5, 100
_NUM_TOGETHER = 12  # steps that all ranks take
_NUM_PARAMS, _NUMEL = 16, 1 << 17
_WIDTH = 512
_ADAMW_BYTES = 28  # per element: reads a parameter, its gradient and two states, and writes all but the gradient


@dataclass(frozen=True, slots=True)
class Measured:
    """What a real step took.

    Args:
        step_s: Its time.
        peak_bytes: The most bytes that lived at one moment on the rank that has most; None where nobody counted.
    """

    step_s: float
    peak_bytes: int | None = None

    def __post_init__(self) -> None:
        arguments.fields(self, arguments.above_0, "step_s")
        arguments.fields(self, arguments.from_0, "peak_bytes", or_none=True)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Prediction against measurement; its text is the report."""

    predicted: Measured
    measured: Measured

    @property
    def step_error(self) -> float:
        """The part of the measured time by which the prediction is too long; negative if it is too short."""
        return self.predicted.step_s / self.measured.step_s - 1

    @property
    def peak_error(self) -> float | None:
        """The same of the peak; None where nobody counted."""
        if self.measured.peak_bytes is None or self.predicted.peak_bytes is None:
            return None
        return self.predicted.peak_bytes / self.measured.peak_bytes - 1

    def __str__(self) -> str:
        lines = [
            f"step: predicted {seconds_text(self.predicted.step_s)}, measured {seconds_text(self.measured.step_s)}, "
            f"error {self.step_error:+.1%}"
        ]
        if self.peak_error is not None:
            lines.append(
                f"peak: predicted {bytes_text(self.predicted.peak_bytes or 0)}, measured "
                f"{bytes_text(self.measured.peak_bytes or 0)}, error {self.peak_error:+.1%}"
            )
        return "\n".join(lines)


def measure(
    model: nn.Module,
    sample_input: Any,
    parts: Sequence[Part],
    *,
    dtype: torch.dtype | None = None,
    loss_of: Callable[[Any], Tensor] | None = None,
    num_steps: int = 5,
    min_s: float = _MIN_S,
    is_alone: bool = True,
) -> list[UnitTimes]:
    """Run real steps of a model that is not sharded, and take the median times of its parts.

    A part's forward lasts from when its module starts until the next one does, its backward from when the gradient of
    its output is there until that of the part before it is.

    Args:
        model: On a device with memory; parameters, gradients and buffers are left as they were.
        sample_input: As for `trace`, on the model's device.
        parts: As for `trace`.
        dtype: As for `trace`.
        loss_of: As for `trace`.
        num_steps: At least as many, after one that does not count.
        min_s: Seconds that they take together at least, for another program may use the cores for a while.
        is_alone: Whether no other rank takes part in these steps. Else there are as many on each: `min_s` counts not.

    Raises:
        PlanError: The model is on meta.
    """
    if any(value.is_meta for value in model.parameters()):
        raise PlanError(
            "plan: only a model with values can be measured, but this one is on meta. Pass device='a100-80g'."
        )
    if not is_alone:
        num_steps, min_s = max(num_steps, _NUM_TOGETHER), 0.0
    clock = _Clock(model, parts)
    samples: list[dict[bool, list[float]]] = []
    with following(parts_by_module(model, parts), clock.enter, clock.leave):
        for _ in _spread(num_steps, min_s):
            with swapped(model, partial(_copy, dtype=dtype)):
                clock.start()
                run_step(model, sample_input, loss_of, clock.begin_backward)
                clock.stop()
            samples.append(clock.seconds)
    return [
        UnitTimes(*(statistics.median(sample[half][i] for sample in samples[1:]) for half in (False, True)))
        for i in range(len(parts))
    ]


def optimizer_seconds_per_byte(device: torch.device) -> float:
    """Seconds per byte that AdamW reads and writes, measured by stepping parameters of half a megabyte each.

    They hold random values: of zeros a step takes twice as long on CPU.
    """
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(_NUMEL, generator=generator) for _ in range(_NUM_PARAMS)]
    parameters = [nn.Parameter(value.to(device)) for value in values]
    for parameter in parameters:
        parameter.grad = parameter.detach().flip(0)
    optimizer = torch.optim.AdamW(parameters)
    times = [timed_s(optimizer.step, device) for _ in _spread(5, _MIN_S / 3)]
    return statistics.median(times[1:]) / (_ADAMW_BYTES * _NUMEL * _NUM_PARAMS)


def product_seconds_per_flop(device: torch.device) -> float:
    """Seconds per operation of a product of matrices in bf16, measured by multiplying two of half a megabyte each."""
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(_WIDTH, _WIDTH, generator=generator).to(device, torch.bfloat16)
    times = [timed_s(lambda: one @ one, device) for _ in _spread(5, _MIN_S / 3)]
    return statistics.median(times[1:]) / (2 * _WIDTH**3)


def _spread(num_steps: int, min_s: float) -> Iterator[int]:
    """Numbers of steps: the first, so many more, and still more until they have taken `min_s`."""
    yield 0
    start = time.perf_counter()
    for number in range(1, _MAX_STEPS + 1):
        yield number
        if number >= num_steps and time.perf_counter() - start >= min_s:
            return


def measure_step(step: Callable[[], object], device: torch.device | str = "cpu", *, num_steps: int = 5) -> Measured:
    """Run real training steps of a model, sharded or not: the median of their times, and the peak of one more.

    On CUDA the peak is the allocator's. On CPU it is counted: all tensors that are alive in this process before that
    step, and the most that the step allocates beside them, as torch's profiler tells. Among the former are buffers of
    messages that dshard keeps for later steps, which a plan's peak leaves out: of small models they are some percent.

    Args:
        step: Forward, backward, the optimizer's step, and `zero_grad`. It is run `num_steps + 2` times.
        device: That it runs on.
        num_steps: That are timed, after one that is not.

    Communicates:
        What the steps do.
    """
    who = "measure_step"
    arguments.function(who, "step", step, "nothing", "Pass one, as in lambda: train(model).")
    is_device = arguments.is_device(device)
    arguments.expect(is_device, who, "device", device, "a torch.device or its text", "Pass 'cpu'.")
    num_steps = arguments.count(who, "num_steps", num_steps)
    device = torch.device(device)
    times = [timed_s(step, device) for _ in range(num_steps + 1)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return Measured(statistics.median(times[1:]), torch.cuda.max_memory_allocated(device))
    held = _living_bytes()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiled:
        step()
    results = profiled.profiler.kineto_results if profiled.profiler is not None else None
    changes = [event for event in results.events() if event.name() == "[memory]"] if results is not None else []
    peak = alive = 0
    for event in sorted(changes, key=lambda each: each.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return Measured(statistics.median(times[1:]), held + peak)


def _living_bytes() -> int:
    """Bytes of all plain tensors of this process, each storage once; of what a host has once, this rank's part."""
    storages, files = {}, _host_copies()
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu":
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a tensor of some mode, which has no memory
                at, num_bytes = each.untyped_storage().data_ptr(), each.untyped_storage().nbytes()
                file = next((file for file in files if file.start <= at < file.stop), None)
                if file is None:
                    storages[at] = num_bytes
                elif file.is_shared:  # shards, and where they belong
                    storages[each.data_ptr()] = each.nbytes
    return sum(storages.values())


class _Mapping(NamedTuple):
    """Where a file of full values that ranks of a host have once is mapped: to write shards there, or to read."""

    start: int
    stop: int
    is_shared: bool


def _host_copies() -> list[_Mapping]:
    maps, found = Path("/proc/self/maps"), []
    for line in maps.read_text().splitlines() if maps.exists() else []:  # without it, ranks exchange messages
        if "memfd:dshard full" in line:
            bounds, access, *_ = line.split()
            start, _, stop = bounds.partition("-")
            found.append(_Mapping(int(start, 16), int(stop, 16), access.endswith("s")))
    return found


def _copy(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A parameter with a gradient of its own, or a buffer of its own."""
    if not isinstance(value, nn.Parameter):
        return value.clone()
    cast = value.detach().to(dtype) if dtype is not None and value.is_floating_point() else value.detach()
    return cast.requires_grad_(value.requires_grad)


def synchronize(device: torch.device) -> None:
    """Wait for what a device has still to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _now_s(device: torch.device) -> float:
    """The time at which a device has nothing left to do."""
    synchronize(device)
    return time.perf_counter()


def timed_s(step: Callable[[], object], device: torch.device) -> float:
    """Seconds that a step takes on a device."""
    start = _now_s(device)
    step()
    return _now_s(device) - start


class _Clock:
    """Seconds of each part, forward and backward."""

    def __init__(self, model: nn.Module, parts: Sequence[Part]) -> None:
        self._device = next(model.parameters()).device
        self._num_parts, self._first = len(parts), next(iter(parts_by_module(model, parts).values()), 0)
        self.start()

    def start(self) -> None:
        """Count from zero."""
        self.seconds = {half: [0.0] * self._num_parts for half in (False, True)}
        self._is_backward = False
        self._current, self._since = self._first, _now_s(self._device)

    def stop(self) -> None:
        """What ran until now belongs to the current part."""
        self.enter(self._current)

    def begin_backward(self) -> None:
        """What comes now is backward; the loss belongs to the part that ran last."""
        self.enter(self._current)
        self._is_backward = True

    def enter(self, part: int) -> None:
        """What runs now belongs to a part."""
        now = _now_s(self._device)
        self.seconds[self._is_backward][self._current] += now - self._since
        self._current, self._since = part, now

    def leave(self, part: int, output: Any) -> None:
        """A part's forward has ended: its backward lasts from when there is a gradient of its output."""

        def enter_backward(_: Tensor) -> None:
            self.enter(part)

        for each in tensors(output):
            if each.requires_grad:
                each.register_hook(enter_backward)
