"""Collectives over buckets of plain tensors. Nothing here knows a ShardedTensor."""

from dshard.collectives._c10d import (
    ReduceOp,
    default_backend,
    group_named,
    is_initialized,
    meet_anew,
    timeout_of,
    world_size,
)
from dshard.collectives.all_gather import Gathered, all_gather
from dshard.collectives.all_reduce import RowReduction, all_reduce, all_reduce_row, broadcast
from dshard.collectives.divergence import note_failure, num_all_failures, num_noted, num_started, settle, tag_of
from dshard.collectives.exchange import shares_memory
from dshard.collectives.flight import is_users
from dshard.collectives.group import Comms, Handle, ShardGroup, with_comms
from dshard.collectives.host.full_values import HostCopy, HostValues, make_host_copy
from dshard.collectives.memory import Buffer, BufferPool, is_storage_held
from dshard.collectives.plan import GatherPlan, SendRow, shard_of
from dshard.collectives.reduce_scatter import ReduceBucket, Reduced, ReducePlan
from dshard.collectives.streams import MadeIn, SideStream, Steps, stream_on
from dshard.collectives.trace import CommRecord, CommTrace, phases_are
from dshard.collectives.watchdog import note_caught, note_step

__all__ = [
    "Buffer",
    "BufferPool",
    "CommRecord",
    "CommTrace",
    "Comms",
    "GatherPlan",
    "Gathered",
    "Handle",
    "HostCopy",
    "HostValues",
    "MadeIn",
    "ReduceBucket",
    "ReduceOp",
    "ReducePlan",
    "Reduced",
    "RowReduction",
    "SendRow",
    "ShardGroup",
    "SideStream",
    "Steps",
    "all_gather",
    "all_reduce",
    "all_reduce_row",
    "broadcast",
    "default_backend",
    "group_named",
    "is_initialized",
    "is_storage_held",
    "is_users",
    "make_host_copy",
    "note_caught",
    "note_failure",
    "note_step",
    "num_all_failures",
    "num_noted",
    "num_started",
    "phases_are",
    "settle",
    "shard_of",
    "shares_memory",
    "stream_on",
    "tag_of",
    "timeout_of",
    "with_comms",
    "world_size",
]

meet_anew()
