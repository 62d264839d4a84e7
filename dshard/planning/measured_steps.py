"""Times of real steps on the ranks at hand, at some batch sizes, and what dshard itself adds to them."""

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dshard.collectives import ReduceOp, ShardGroup, all_reduce
from dshard.errors import PlanError
from dshard.planner.measuring import measure, optimizer_seconds_per_byte, product_seconds_per_flop, timed_s
from dshard.planner.profiles import Overhead, UnitTimes
from dshard.planner.steps import Part, resized
from dshard.planner.texts import Progress
from dshard.planning import recomputing
from dshard.planning.recomputing import Kinds
from dshard.runtime.module import FSDPModule
from dshard.setup.fully_shard import fully_shard
from dshard.tensor.meshes import group_of

_NUM_LAYERS, _WIDTH = 32, 8  # small enough for nothing but the host to count
_NUM_STEPS = 9


class MeasuredSteps:
    """Times of a model's parts in real steps, before it is sharded.

    Where memory runs out on one rank, all go on, but for those over which layers are cut: in the middle of a step these
    wait for one another, until their group's timeout.

    Args:
        model: On a device with memory.
        sample_input: As for `plan`.
        batch: Samples that it holds.
        parts: Of the model.
        dtype: Of parameters where they are used; None for that of each.
        loss_of: As for `plan`.
        mesh: Of ranks that measure together: each takes the times of the slowest, and on CPU adds what dshard itself
            takes for each parameter. None for one rank.
        cut_over: That of the ranks over which layers are cut, of which the slowest counts, too.
        progress: Hears what is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any,
        batch: int,
        parts: Sequence[Part],
        *,
        dtype: torch.dtype | None,
        loss_of: Callable[[Any], Tensor] | None,
        mesh: DeviceMesh | None,
        cut_over: DeviceMesh | None,
        progress: Progress,
    ) -> None:
        self._model, self._sample, self._batch, self._parts = model, sample_input, batch, parts
        self._dtype, self._loss_of, self._mesh, self._progress = dtype, loss_of, mesh, progress
        self._is_alone = cut_over is None
        self._groups = [] if mesh is None else [group_of(mesh)]
        if cut_over is not None:
            device = torch.device(cut_over.device_type)
            self._groups += [ShardGroup.of_mesh(cut_over.get_group(dim), device) for dim in range(cut_over.ndim)]
        self._known: dict[Kinds, dict[int, list[UnitTimes]]] = {}
        self._tells = False  # of sizes that were not measured, from those that were

    def measure_up_to(self, most: int, kinds: Kinds) -> None:
        """Measure one sample, two, four and so on, and the largest; all others are told from these.

        Where memory runs out, larger sizes are told from the two below.

        Args:
            most: The largest size; the least that any rank asks for counts.
            kinds: Activation checkpointing of each part.

        Raises:
            PlanError: A step of one sample takes more memory than there is.
        """
        self._tells, most = True, int(self._agreed([float(most)], ReduceOp.MIN)[0])
        for size in (*(1 << power for power in range(most.bit_length() - 1)), most):
            if not self._is_measured(size, kinds):
                break
        if not self._known[kinds]:
            raise self._too_large(1)

    def times(self, batch: int, kinds: Kinds) -> list[UnitTimes]:
        """Of each part.

        Args:
            batch: Samples of the step.
            kinds: Activation checkpointing of each part.

        Raises:
            PlanError: The step takes more memory than there is, and others were not measured.
        """
        known = self._known.setdefault(kinds, {})
        if batch in known:
            return known[batch]
        if self._tells and known:
            return _told(known, batch)
        if not self._is_measured(batch, kinds):
            raise self._too_large(batch)
        return known[batch]

    def source(self, batch: int, kinds: Kinds) -> str:
        """Says that times were measured, and up to which size."""
        most = max(self._known[kinds])
        return "measured" if batch <= most else f"measured up to {most} sample{'s' * (most > 1)}"

    @cached_property
    def optimizer_s_per_byte(self) -> float:
        """Of what the optimizer reads and writes."""
        return self._agreed([optimizer_seconds_per_byte(self._device)], ReduceOp.MAX)[0]

    @cached_property
    def product_s_per_flop(self) -> float:
        """Of products of matrices in bf16, as owners of whole parameters run them."""
        return self._agreed([product_seconds_per_flop(self._device)], ReduceOp.MAX)[0]

    @cached_property
    def overhead(self) -> Overhead:
        """What dshard itself takes per parameter; nothing where a device works behind the host."""
        if self._mesh is None or self._mesh.device_type != "cpu":
            return Overhead()
        self._progress("measuring what dshard itself takes for a parameter")
        found = measure_overhead(self._mesh)
        return Overhead(*self._agreed([found.forward_s, found.backward_s, found.optimizer_s], ReduceOp.MAX))

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _is_measured(self, batch: int, kinds: Kinds) -> bool:
        """Measure a step, once; False if on some rank it takes more memory than there is."""
        known = self._known.setdefault(kinds, {})
        if batch not in known:
            self._progress(f"measuring a step of {batch} sample{'s' * (batch > 1)} on this machine")
            found = self._agreed(self._seconds(batch, kinds), ReduceOp.MAX)
            if found[0] == float("inf"):
                return False
            num = len(self._parts)
            known[batch] = [UnitTimes(*each) for each in zip(found[:num], found[num:], strict=True)]
        return True

    def _seconds(self, batch: int, kinds: Kinds) -> list[float]:
        """All forwards, then all backwards, on this rank; infinite if memory runs out."""
        try:
            with recomputing.under(self._parts, kinds):
                times = measure(
                    self._model,
                    resized(self._sample, self._batch, batch, is_real=True),
                    self._parts,
                    dtype=self._dtype,
                    loss_of=self._loss_of,
                    is_alone=self._is_alone,
                )
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _is_of_memory(error):
                raise
            times = [UnitTimes(float("inf"), float("inf"))] * len(self._parts)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return [*(each.forward_s for each in times), *(each.backward_s for each in times)]

    def _agreed(self, values: list[float], op: ReduceOp) -> list[float]:
        """The largest, or least, of all ranks that measure together."""
        for group in self._groups:
            (found,) = all_reduce([torch.tensor(values, dtype=torch.float64)], group, op, label="plan").wait()
            values = found.tolist()
        return values

    def _too_large(self, batch: int) -> PlanError:
        return PlanError(
            f"plan: a step must fit into the memory of {self._device} before the model is sharded, for its times to be "
            f"measured, but one of {batch} sample{'s' * (batch > 1)} ran out of it. Pass device=, of whose description "
            "times are told, or a smaller batch."
        )


def _is_of_memory(error: Exception) -> bool:
    """Whether memory ran out: on CPU, torch says so by a RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _told(known: dict[int, list[UnitTimes]], batch: int) -> list[UnitTimes]:
    """On the line between the sizes on either side; of a larger one, on that through the last two."""
    sizes = sorted(known)
    at = min(max(bisect_left(sizes, batch), 1), len(sizes) - 1)
    low, high = sizes[max(at - 1, 0)], sizes[at]
    start, more = np.array(known[low]), np.array(known[high]) - np.array(known[low])
    if len(sizes) == 1:
        found = start * (batch / low)
    else:
        found = start + (batch - low) / (high - low) * (np.maximum(more, 0.0) if batch > high else more)
    return [UnitTimes(*times) for times in found.tolist()]


def measure_overhead(mesh: DeviceMesh) -> Overhead:
    """Train a chain of tiny layers with and without dshard, on CPU, where nothing hides what the host does.

    Under `ddp` and without reductions, so that nothing is sent: what is left are the operations on sharded parameters
    and the way of their gradients, which cost the same under all strategies. Of the optimizer's step, AdamW's, all
    counts: that of parameters of a few elements, which the time per byte leaves out.

    Args:
        mesh: Of the ranks that measure.

    Returns:
        Seconds per parameter, on this rank.

    Communicates:
        What `fully_shard` and one step of such a chain do.
    """
    with torch.random.fork_rng(devices=[]):  # a program's random numbers stay what they are
        plain, sharded = _chain(), fully_shard(_chain(), mesh=mesh, strategy="ddp", sync=None)
    assert isinstance(sharded, FSDPModule)
    sharded.set_requires_gradient_sync(False)
    num_params = sum(1 for _ in sharded.parameters())
    (forward_s, backward_s), (plain_forward_s, plain_backward_s) = _medians(sharded), _medians(plain)
    more = forward_s - plain_forward_s, backward_s - plain_backward_s, _step_s(mesh)
    return Overhead(*(max(0.0, seconds) / num_params for seconds in more))


def _chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH)) for _ in range(_NUM_LAYERS)))


def _medians(model: nn.Module) -> list[float]:
    """Seconds of its forward and of its backward, after two steps that do not count."""
    x = torch.ones(2, _WIDTH)
    samples = []
    for _ in range(_NUM_STEPS + 2):
        start = time.perf_counter()
        loss = model(x).sum()
        turn = time.perf_counter()
        loss.backward()
        samples.append((turn - start, time.perf_counter() - turn))
        model.zero_grad()
    return [statistics.median(half) for half in zip(*samples[2:], strict=True)]


def _step_s(mesh: DeviceMesh) -> float:
    """Seconds of an optimizer's step on such a chain, cut over the ranks."""
    with torch.random.fork_rng(devices=[]):
        model = fully_shard(_chain(), mesh=mesh, sync=None)
    model(torch.ones(2, _WIDTH)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    samples = [timed_s(optimizer.step, torch.device("cpu")) for _ in range(_NUM_STEPS + 2)]
    return statistics.median(samples[2:])
