"""The property-test kit: persistent worlds of ranks, a fake world, a NumPy oracle, and hypothesis strategies.

`dshard.testing.strategies` needs hypothesis and is imported on its own, `dshard.testing.fixtures` is a pytest plugin,
`dshard.testing.oracle` needs NumPy alone. `dshard.testing.cases` has the small models and programs that are drawn.
`counted_peak` counts the bytes that are alive on a rank. `assert_sharding_invariants` trains a user's model under every
strategy and compares it with the plain model.
"""

from dshard.testing.counted import counted_peak as counted_peak
from dshard.testing.fake import fake_world as fake_world
from dshard.testing.verifying.invariants import assert_sharding_invariants as assert_sharding_invariants
from dshard.testing.verifying.invariants import verify_sharding as verify_sharding
from dshard.testing.worlds import RemoteRankError as RemoteRankError
from dshard.testing.worlds import World as World
from dshard.testing.worlds import WorldPool as WorldPool
from dshard.testing.worlds import expect_error as expect_error

__all__ = [
    "RemoteRankError",
    "World",
    "WorldPool",
    "assert_sharding_invariants",
    "counted_peak",
    "expect_error",
    "fake_world",
    "verify_sharding",
]
