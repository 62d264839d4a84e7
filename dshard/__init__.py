"""Sharded data-parallel training for PyTorch: a parameter always means its full value."""

from dshard import checkpoint
from dshard.api import fully_shard, gathered
from dshard.clip import clip_grad_norm_
from dshard.collectives import CommTrace
from dshard.errors import (
    CheckpointError,
    DivergenceError,
    DShardError,
    PlacementError,
    StateError,
    UnsupportedOpError,
)
from dshard.runtime.module import FSDPModule
from dshard.tensor import ShardedTensor

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CommTrace",
    "DShardError",
    "DivergenceError",
    "FSDPModule",
    "PlacementError",
    "ShardedTensor",
    "StateError",
    "UnsupportedOpError",
    "checkpoint",
    "clip_grad_norm_",
    "fully_shard",
    "gathered",
]
