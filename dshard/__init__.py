"""Sharded data-parallel training for PyTorch: a parameter always means its full value."""

import importlib
from typing import TYPE_CHECKING, Any

from dshard.clip import clip_grad_norm_
from dshard.collectives import CommTrace
from dshard.compat import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    no_sync,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from dshard.errors import (
    ArgumentError,
    CheckpointError,
    DivergenceError,
    DShardError,
    PlacementError,
    PlanError,
    RankLostError,
    StateError,
    UnsupportedOpError,
)
from dshard.gathering import gathered, iter_full
from dshard.join import join
from dshard.policies import Strategy
from dshard.run_by_some import run_by_some
from dshard.runtime.module import FSDPModule, UnshardHandle
from dshard.setup.fully_shard import fully_shard
from dshard.setup.set_strategy import set_strategy
from dshard.setup.to_plain import to_plain
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import init_hybrid_mesh

if TYPE_CHECKING:
    from dshard import checkpoint, interop
    from dshard.checkpoint import load_safetensors, save_safetensors
    from dshard.inspection.explain import explain
    from dshard.inspection.tracing import report, trace
    from dshard.planner import Plan
    from dshard.planning.plan import plan
    from dshard.setup.planned import plan_report

__version__ = "0.1.0"

# What training needs is loaded with the package, these at their first use; by name, the module that has each.
_LATER = {
    "Plan": "dshard.planner",
    "checkpoint": "dshard.checkpoint",
    "explain": "dshard.inspection",
    "inspection": "dshard.inspection",
    "interop": "dshard.interop",
    "load_safetensors": "dshard.checkpoint",
    "optim": "dshard.optim",
    "plan": "dshard.planning.plan",
    "plan_report": "dshard.setup.planned",
    "planner": "dshard.planner",
    "report": "dshard.inspection",
    "save_safetensors": "dshard.checkpoint",
    "testing": "dshard.testing",
    "trace": "dshard.inspection",
}

__all__ = [
    "ArgumentError",
    "CPUOffloadPolicy",
    "CheckpointError",
    "CommTrace",
    "DShardError",
    "DivergenceError",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PlacementError",
    "Plan",
    "PlanError",
    "RankLostError",
    "ShardedTensor",
    "StateError",
    "Strategy",
    "UnshardHandle",
    "UnsupportedOpError",
    "checkpoint",
    "clip_grad_norm_",
    "explain",
    "fully_shard",
    "gathered",
    "init_hybrid_mesh",
    "interop",
    "iter_full",
    "join",
    "load_safetensors",
    "no_sync",
    "optim",
    "plan",
    "plan_report",
    "register_fsdp_forward_method",
    "report",
    "run_by_some",
    "save_safetensors",
    "set_strategy",
    "share_comm_ctx",
    "to_plain",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    value = globals()[name] = module if _LATER[name] == f"dshard.{name}" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
