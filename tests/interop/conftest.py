"""Worlds of their own for models of `transformers`, which each rank imports once."""

import importlib.util
from collections.abc import Iterator

import pytest

from dshard.testing import World, WorldPool

_NEEDED = ("transformers", "peft", "accelerate", "safetensors")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]  # not imported: that takes seconds


@pytest.fixture(scope="package")
def pool() -> Iterator[WorldPool]:
    """Ranks whose first call imports `transformers`, which takes a busy machine half a minute."""
    if _MISSING:
        pytest.skip(f"the extra `interop` is not installed: {', '.join(_MISSING)} missing")
    with WorldPool(group_timeout_s=60.0) as worlds:
        yield worlds


@pytest.fixture(scope="package")
def world(pool: WorldPool) -> World:
    """Two of them."""
    return pool.get_world(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What other libraries deprecate is not ours to fail on."""
    for item in items:
        if "tests/interop" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
