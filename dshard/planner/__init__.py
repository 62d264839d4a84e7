"""Pure: what a step costs in time and memory under each strategy, and which strategies are best."""

from dshard.planner.costs import Cluster, Link, Links, ModelCosts, ParamCosts, UnitCosts, Work
from dshard.planner.devices import DEVICES, EFFICIENCY, Device, Efficiency, Wire, device_named
from dshard.planner.measuring import Comparison, Measured, measure_step
from dshard.planner.memory import MemoryForecast, Moment, Workspace, moments, peak_bytes
from dshard.planner.plan import Plan
from dshard.planner.profiles import Training, WholeSteps
from dshard.planner.rates import Constant, Misses, Rates, cluster_of, published
from dshard.planner.solver import BatchSolution, Certificate, Solution, solve, solve_batch
from dshard.planner.timeline import MemoryEvent, Segment, Timeline, deferred_step_time, simulate, step_time

__all__ = [
    "DEVICES",
    "EFFICIENCY",
    "BatchSolution",
    "Certificate",
    "Cluster",
    "Comparison",
    "Constant",
    "Device",
    "Efficiency",
    "Link",
    "Links",
    "Measured",
    "MemoryEvent",
    "MemoryForecast",
    "Misses",
    "ModelCosts",
    "Moment",
    "ParamCosts",
    "Plan",
    "Rates",
    "Segment",
    "Solution",
    "Timeline",
    "Training",
    "UnitCosts",
    "WholeSteps",
    "Wire",
    "Work",
    "Workspace",
    "cluster_of",
    "deferred_step_time",
    "device_named",
    "measure_step",
    "moments",
    "peak_bytes",
    "published",
    "simulate",
    "solve",
    "solve_batch",
    "step_time",
]
