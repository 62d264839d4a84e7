"""A model's runtime: when units gather, free and reduce, and what its modules tell of their forwards."""

from dshard.collectives import phases_are
from dshard.runtime.module_hooks import adopt_leaf
from dshard.runtime.runtime import Runtime, current_phase, gather, runs_forward
from dshard.tensor import ShardedTensor
from dshard.tensor.traced import TracedGather

__all__ = ["Runtime"]

ShardedTensor.adopt = staticmethod(adopt_leaf)
ShardedTensor.runs_forward = staticmethod(runs_forward)
TracedGather.run = staticmethod(gather)
phases_are(current_phase)
