"""Collectives over buckets of plain tensors. Nothing here knows a ShardedTensor."""

from dshard.collectives._c10d import ProcessGroup, ReduceOp, default_backend, is_initialized, world_size
from dshard.collectives.gather import Gathered, GatherPlan, all_gather, shard_of
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.memory import BufferPool
from dshard.collectives.reduce import ReduceBucket, Reduced
from dshard.collectives.small import all_reduce, broadcast
from dshard.collectives.trace import CommRecord, CommTrace

__all__ = [
    "BufferPool",
    "CommRecord",
    "CommTrace",
    "GatherPlan",
    "Gathered",
    "Handle",
    "ProcessGroup",
    "ReduceBucket",
    "ReduceOp",
    "Reduced",
    "ShardGroup",
    "all_gather",
    "all_reduce",
    "broadcast",
    "default_backend",
    "is_initialized",
    "shard_of",
    "world_size",
]
