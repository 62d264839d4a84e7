"""Units, and when they gather, free and reduce."""

from dshard.runtime.auto_units import UnitPlan, find_units
from dshard.runtime.replace import ParameterHooks, ReplacedParameter, hooks_of, inherit, retire
from dshard.runtime.runtime import Runtime, adopt_leaf, hook_forward, hook_gradient
from dshard.runtime.sync import broadcast_weights, check_same_structure, check_same_weights
from dshard.runtime.unit import Unit
from dshard.tensor import ShardedTensor

__all__ = [
    "ParameterHooks",
    "ReplacedParameter",
    "Runtime",
    "Unit",
    "UnitPlan",
    "broadcast_weights",
    "check_same_structure",
    "check_same_weights",
    "find_units",
    "hook_forward",
    "hook_gradient",
    "hooks_of",
    "inherit",
    "retire",
]

ShardedTensor._adopt = staticmethod(adopt_leaf)
