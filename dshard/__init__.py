"""Sharded data-parallel training for PyTorch: a parameter always means its full value."""

from dshard import checkpoint
from dshard.api import fully_shard
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
    CheckpointError,
    DivergenceError,
    DShardError,
    PlacementError,
    StateError,
    UnsupportedOpError,
)
from dshard.runtime.module import FSDPModule, UnshardHandle
from dshard.scope import gathered
from dshard.tensor import ShardedTensor

__version__ = "0.1.0"

__all__ = [
    "CPUOffloadPolicy",
    "CheckpointError",
    "CommTrace",
    "DShardError",
    "DivergenceError",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PlacementError",
    "ShardedTensor",
    "StateError",
    "UnshardHandle",
    "UnsupportedOpError",
    "checkpoint",
    "clip_grad_norm_",
    "fully_shard",
    "gathered",
    "no_sync",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
