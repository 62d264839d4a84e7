"""Collectives over buckets of plain tensors. Nothing here knows a ShardedTensor."""

from dshard.collectives._c10d import ReduceOp as ReduceOp
from dshard.collectives._c10d import default_backend as default_backend
from dshard.collectives._c10d import group_named as group_named
from dshard.collectives._c10d import is_initialized as is_initialized
from dshard.collectives._c10d import meet_anew
from dshard.collectives._c10d import timeout_of as timeout_of
from dshard.collectives._c10d import world_size as world_size
from dshard.collectives.all_gather import Gathered as Gathered
from dshard.collectives.all_gather import all_gather as all_gather
from dshard.collectives.all_reduce import RowReduction as RowReduction
from dshard.collectives.all_reduce import all_reduce as all_reduce
from dshard.collectives.all_reduce import all_reduce_row as all_reduce_row
from dshard.collectives.all_reduce import broadcast as broadcast
from dshard.collectives.comm_memory import BackendMemory as BackendMemory
from dshard.collectives.comm_memory import CommMemory as CommMemory
from dshard.collectives.comm_memory import SymmetricMemory as SymmetricMemory
from dshard.collectives.divergence import note_failure as note_failure
from dshard.collectives.divergence import num_all_failures as num_all_failures
from dshard.collectives.divergence import num_started as num_started
from dshard.collectives.divergence import tag_of as tag_of
from dshard.collectives.exchange import shares_memory as shares_memory
from dshard.collectives.flight import is_users as is_users
from dshard.collectives.group import Comms as Comms
from dshard.collectives.group import Handle as Handle
from dshard.collectives.group import ShardGroup as ShardGroup
from dshard.collectives.group import with_comms as with_comms
from dshard.collectives.host.full_values import HostCopy as HostCopy
from dshard.collectives.host.full_values import HostValues as HostValues
from dshard.collectives.host.full_values import make_host_copy as make_host_copy
from dshard.collectives.ledger import await_settled as await_settled
from dshard.collectives.ledger import begin_forward as begin_forward
from dshard.collectives.ledger import num_noted as num_noted
from dshard.collectives.ledger import settle as settle
from dshard.collectives.ledger import settle_forward as settle_forward
from dshard.collectives.memory import Buffer as Buffer
from dshard.collectives.memory import BufferPool as BufferPool
from dshard.collectives.memory import is_storage_held as is_storage_held
from dshard.collectives.plan import GatherPlan as GatherPlan
from dshard.collectives.plan import SendRow as SendRow
from dshard.collectives.plan import shard_of as shard_of
from dshard.collectives.reduce_scatter import ReduceBucket as ReduceBucket
from dshard.collectives.reduce_scatter import Reduced as Reduced
from dshard.collectives.reduce_scatter import ReducePlan as ReducePlan
from dshard.collectives.streams import MadeIn as MadeIn
from dshard.collectives.streams import SideStream as SideStream
from dshard.collectives.streams import Steps as Steps
from dshard.collectives.streams import stream_on as stream_on
from dshard.collectives.trace import CommRecord as CommRecord
from dshard.collectives.trace import CommTrace as CommTrace
from dshard.collectives.trace import phases_are as phases_are
from dshard.collectives.watchdog import note_caught as note_caught
from dshard.collectives.watchdog import note_step as note_step

meet_anew()
