"""Test sharded programs: persistent worlds of ranks, a fake world, and comparison with the plain model.

`dshard.testing.strategies` needs hypothesis and is imported on its own; `dshard.testing.fixtures` is a pytest plugin.
`assert_sharding_invariants` trains a user's model under every strategy and compares it with the plain model.
"""

from dshard.testing.fake import fake_world as fake_world
from dshard.testing.verifying import assert_sharding_invariants as assert_sharding_invariants
from dshard.testing.verifying import verify_sharding as verify_sharding
from dshard.testing.worlds import RemoteRankError as RemoteRankError
from dshard.testing.worlds import World as World
from dshard.testing.worlds import WorldPool as WorldPool
from dshard.testing.worlds import expect_error as expect_error

__all__ = [
    "RemoteRankError",
    "World",
    "WorldPool",
    "assert_sharding_invariants",
    "expect_error",
    "fake_world",
    "verify_sharding",
]
