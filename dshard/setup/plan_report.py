"""What a plan predicted against what a step under it took: said once, without being asked."""

import logging
import time
import weakref

import torch
from torch import nn
from torch.optim import Optimizer

from dshard.arguments import checked
from dshard.optimizer.step_hooks import after_steps
from dshard.planner import Comparison, Measured, Plan
from dshard.runtime import Runtime
from dshard.runtime.module import FSDPModule
from dshard.runtime.runtime import runtime_of

_MAX_STEPS = 8  # of the optimizer; a model that a compiled function calls never says when it starts: there is no report

log = logging.getLogger("dshard")


class PlanReport:
    """Watches the second step of a model that follows a plan, since the first one learns the order of use.

    A step lasts from the start of a training forward to the end of the `step` of the first optimizer that has a
    parameter of the model. On CUDA its peak is the allocator's, whose statistics are reset for that; on CPU there is
    none without torch's profiler, which is the program's own matter (`measure_step` uses it). The comparison goes to
    the logger "dshard", as information, or as a warning where the peak is above the prediction; on every rank, for its
    own figures.

    Args:
        model: The root, sharded.
        runtime: Of the model.
        plan: That it follows.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, plan: Plan) -> None:
        self._model, self._runtime = weakref.ref(model), weakref.ref(runtime)
        self.plan = plan
        self._num_steps = self._num_ended = 0
        self._start_s: float | None = None
        self.comparison: Comparison | None = None
        runtime.on_training_forward = self._begin
        self._leave = after_steps(self._end)

    def _begin(self) -> None:
        """A training forward of the model starts, of a step's first micro-batch or of a later one."""
        model = self._model()
        if self._start_s is not None or model is None:
            return
        device = _device_of(model)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        self._start_s = time.perf_counter()

    def _end(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        model = self._model()
        own = {id(param) for param in model.parameters()} if model is not None else set()
        if own and not any(id(param) in own for group in optimizer.param_groups for param in group["params"]):
            return
        self._num_ended += 1
        if model is None or self._num_ended > _MAX_STEPS:
            self._stop()
        elif self._start_s is not None:
            self._num_steps += 1
            if self._num_steps == 2:
                self.comparison = self.plan.compared(_measured(self._start_s, _device_of(model)))
                self._tell()
                self._stop()
            self._start_s = None

    def _tell(self) -> None:
        assert self.comparison is not None
        error = self.comparison.peak_error
        level = logging.WARNING if error is not None and error < 0 else logging.INFO
        log.log(level, "the plan against the second step:\n%s", self.comparison)

    def _stop(self) -> None:
        self._leave()
        runtime = self._runtime()
        if runtime is not None and runtime.on_training_forward == self._begin:
            runtime.on_training_forward = None


def _device_of(model: nn.Module) -> torch.device:
    """The device of the model now; a plan may have been given to it on meta."""
    return next(model.parameters()).device


def _measured(start_s: float, device: torch.device) -> Measured:
    """What has passed since then, on a device."""
    if device.type != "cuda":
        return Measured(time.perf_counter() - start_s)
    torch.cuda.synchronize(device)
    return Measured(time.perf_counter() - start_s, torch.cuda.max_memory_allocated(device))


@checked
def plan_report(model: nn.Module) -> Comparison | None:
    """What `fully_shard(model, plan=plan)` predicted against what the second step took; None until that has ended.

    Communicates nothing: the figures are this rank's. On CPU there is a time alone.
    """
    report = runtime_of(model).plan_report if isinstance(model, FSDPModule) else None
    return report.comparison if isinstance(report, PlanReport) else None
