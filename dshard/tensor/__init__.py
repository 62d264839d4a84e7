"""ShardedTensor and the table of what operations do with it."""

import torch
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils

from dshard.layout import ShardLayout
from dshard.policies import Offload, Precision
from dshard.tensor.dispatch import dispatch, dispatch_in_graphs, run_beside_dtensors
from dshard.tensor.older_torch import ask_the_class, asks_subclasses
from dshard.tensor.sharded_tensor import MixedShardedTensor, OffloadedShardedTensor, ShardedTensor
from dshard.tensor.storage import rebuild
from dshard.tensor.table import OpClass, classify
from dshard.tensor.traced import TracedSource, unflatten

__all__ = ["MixedShardedTensor", "OffloadedShardedTensor", "OpClass", "ShardedTensor", "classify"]

ShardedTensor._dispatch = staticmethod(dispatch)
ShardedTensor._dispatch_beside = staticmethod(run_beside_dtensors)
TracedSource.dispatch = staticmethod(dispatch_in_graphs)
ShardedTensor.__tensor_unflatten__ = classmethod(unflatten)  # type: ignore[assignment, method-assign]
if not asks_subclasses():
    ask_the_class(ShardedTensor)

# torch picks foreach optimizers by exact type, and loads pickles of known types alone.
for _types in (_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    _types += [kind for kind in (ShardedTensor, MixedShardedTensor, OffloadedShardedTensor) if kind not in _types]
torch.serialization.add_safe_globals([ShardedTensor, MixedShardedTensor, OffloadedShardedTensor, ShardLayout])
torch.serialization.add_safe_globals([Offload, Precision, rebuild])
