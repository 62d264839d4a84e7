"""ShardedTensor and the table of what operations do with it."""

import torch
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils

from dshard.layout import ShardLayout
from dshard.tensor.dispatch import dispatch
from dshard.tensor.sharded_tensor import GatherSource, ShardedTensor, _rebuild
from dshard.tensor.table import OpClass, classify

__all__ = ["GatherSource", "OpClass", "ShardedTensor", "classify"]

ShardedTensor._dispatch = staticmethod(dispatch)

# torch picks foreach optimizers by exact type, and loads pickles of known types alone.
for _types in (_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    if ShardedTensor not in _types:
        _types.append(ShardedTensor)
torch.serialization.add_safe_globals([ShardedTensor, ShardLayout, _rebuild])
