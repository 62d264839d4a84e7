"""The property-test kit: persistent worlds of ranks, a fake world, a NumPy oracle, and hypothesis strategies.

`dshard.testing.strategies` needs hypothesis and is imported on its own; `dshard.testing.oracle` needs NumPy alone.
`dshard.testing.counted` counts the bytes that are alive on a rank.
"""

from dshard.testing.fake import fake_world as fake_world
from dshard.testing.worlds import RemoteRankError as RemoteRankError
from dshard.testing.worlds import World as World
from dshard.testing.worlds import WorldPool as WorldPool
from dshard.testing.worlds import expect_error as expect_error

__all__ = ["RemoteRankError", "World", "WorldPool", "expect_error", "fake_world"]
