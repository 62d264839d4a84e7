"""What a plan predicted against what the first steps under it took: said once, without being asked."""

import logging
import time
import weakref

from torch import nn
from torch.optim import Optimizer

from dshard.planner import Comparison, Measured, Plan
from dshard.planner.measuring import StepPeak
from dshard.runtime import Runtime
from dshard.runtime.module import FSDPModule
from dshard.runtime.standins import after_step

__all__ = ["PlanReport", "plan_report"]

# The second step is timed, since the first one learns the order of use; the third one is counted, for that is slow.
_TIMED, _COUNTED = 1, 2
_MAX_STEPS = 8  # of the optimizer; of a model that never says when it starts, a compiled one, there is no report

log = logging.getLogger("dshard")


class PlanReport:
    """Watches the first steps of a model that follows a plan: from the start of a training forward to the optimizer.

    The second step is timed, the third one's peak is taken: on CUDA the allocator's, whose peak is reset for that; on
    CPU as `measure_step` counts, unless a profiler runs already. The end of a step is that of the first optimizer's
    `step` that has a parameter of the model. Then the comparison goes to the logger "dshard", as information, or as a
    warning where the peak is above the prediction; on every rank, for its own figures.

    Args:
        model: The root, sharded.
        runtime: Of the model.
        plan: That it follows.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, plan: Plan) -> None:
        self._model, self._runtime = weakref.ref(model), weakref.ref(runtime)
        self._plan = plan
        self._peak = StepPeak(next(model.parameters()).device)
        self._num_steps = self._num_ended = 0
        self._start_s: float | None = None
        self._step_s = 0.0
        self.comparison: Comparison | None = None
        runtime.on_training_forward = self._begin
        after_step.append(self._end)

    def _begin(self) -> None:
        """A training forward of the model starts, of a step's first micro-batch or of a later one."""
        if self._start_s is not None:
            return
        if self._num_steps == _COUNTED:
            self._peak.start()
        self._peak.synchronize()
        self._start_s = time.perf_counter()

    def _end(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        model = self._model()
        own = {id(param) for param in model.parameters()} if model is not None else set()
        if own and not any(id(param) in own for group in optimizer.param_groups for param in group["params"]):
            return
        self._num_ended += 1
        if not own or self._num_ended > _MAX_STEPS:
            self._stop()
            return
        if self._start_s is None:
            return
        self._peak.synchronize()
        seconds, self._start_s = time.perf_counter() - self._start_s, None
        if self._num_steps == _TIMED:
            self._step_s = seconds
        elif self._num_steps == _COUNTED:
            self.comparison = self._plan.compared(Measured(self._step_s, self._peak.stop()))
            self._tell()
            self._stop()
        self._num_steps += 1

    def _tell(self) -> None:
        assert self.comparison is not None
        error = self.comparison.peak_error
        level = logging.WARNING if error is not None and error < 0 else logging.INFO
        log.log(level, "the plan against the first steps:\n%s", self.comparison)

    def _stop(self) -> None:
        after_step.remove(self._end)
        self._peak.cancel()
        runtime = self._runtime()
        if runtime is not None and runtime.on_training_forward == self._begin:
            runtime.on_training_forward = None


def plan_report(model: nn.Module) -> Comparison | None:
    """What `fully_shard(model, plan=plan)` predicted against what the first steps took; None until the third has ended.

    Communicates nothing: the figures are this rank's.
    """
    report = model._runtime().plan_report if isinstance(model, FSDPModule) else None
    return report.comparison if isinstance(report, PlanReport) else None
