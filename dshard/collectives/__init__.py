"""Collectives over buckets of plain tensors. Nothing here knows a ShardedTensor."""

from dshard.collectives._c10d import (
    ReduceOp,
    default_backend,
    group_named,
    is_initialized,
    timeout_of,
    world_size,
)
from dshard.collectives.callers import is_users
from dshard.collectives.custom import Comms, with_comms
from dshard.collectives.exchange import shares_memory
from dshard.collectives.gather import Gathered, all_gather, gather_in_place
from dshard.collectives.group import Handle, ShardGroup
from dshard.collectives.host_copy import HostCopy, make_host_copy
from dshard.collectives.ledger import num_noted, settle
from dshard.collectives.lines import TimesLeft, announce, begin, end, give_up, is_torn, times_left, withdraw
from dshard.collectives.memory import Buffer, BufferPool, is_storage_held
from dshard.collectives.parts import all_to_all
from dshard.collectives.plan import GatherPlan, SendRow, shard_of
from dshard.collectives.reduce import ReduceBucket, Reduced, ReducePlan
from dshard.collectives.replicas import all_reduce_row
from dshard.collectives.restarts import meet_anew
from dshard.collectives.small import all_reduce, broadcast
from dshard.collectives.steps import Steps
from dshard.collectives.streams import MadeIn, SideStream, stream_on
from dshard.collectives.trace import CommRecord, CommTrace, phases_are

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
    "MadeIn",
    "ReduceBucket",
    "ReduceOp",
    "ReducePlan",
    "Reduced",
    "SendRow",
    "ShardGroup",
    "SideStream",
    "Steps",
    "TimesLeft",
    "all_gather",
    "all_reduce",
    "all_reduce_row",
    "all_to_all",
    "announce",
    "begin",
    "broadcast",
    "default_backend",
    "end",
    "gather_in_place",
    "give_up",
    "group_named",
    "is_initialized",
    "is_storage_held",
    "is_torn",
    "is_users",
    "make_host_copy",
    "num_noted",
    "phases_are",
    "settle",
    "shard_of",
    "shares_memory",
    "stream_on",
    "timeout_of",
    "times_left",
    "with_comms",
    "withdraw",
    "world_size",
]

meet_anew()
