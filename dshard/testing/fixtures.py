"""A pytest plugin: with `pytest_plugins = ["dshard.testing.fixtures"]` tests get worlds that live for the session.

It stands in the conftest.py of the folder that pytest is started for.
"""

from collections.abc import Callable, Iterator

import pytest

from dshard.testing.worlds import WorldPool


@pytest.fixture(scope="session")
def make_worlds() -> Callable[[], WorldPool]:
    """What makes the pool; a fixture of this name in a conftest.py takes its place, for other time limits say."""
    return WorldPool


@pytest.fixture(scope="session")
def worlds(make_worlds: Callable[[], WorldPool]) -> Iterator[WorldPool]:
    """Persistent worlds by size, `worlds.run(2, fn, ...)`: started at a first call, closed at the session's end."""
    with make_worlds() as pool:
        yield pool
