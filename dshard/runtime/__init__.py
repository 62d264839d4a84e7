"""Units, and when they gather, free and reduce."""

from dshard.runtime.hooks import adopt_leaf
from dshard.runtime.runtime import Runtime
from dshard.runtime.traced import gather
from dshard.runtime.unit import Unit
from dshard.tensor import ShardedTensor
from dshard.tensor.traced import TracedGather

__all__ = ["Runtime", "Unit"]

ShardedTensor._adopt = staticmethod(adopt_leaf)
TracedGather.run = staticmethod(gather)
