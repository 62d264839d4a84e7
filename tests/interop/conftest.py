"""A world of its own for models of `transformers`, which each rank imports once."""

import importlib.util
from collections.abc import Iterator

import pytest

from dshard.testing import World

_NEEDED = ("transformers", "peft", "accelerate", "safetensors")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]  # not imported: that takes seconds


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    """Two ranks; their first call imports `transformers`, which takes a busy machine half a minute."""
    if _MISSING:
        pytest.skip(f"the extra `interop` is not installed: {', '.join(_MISSING)} missing")
    with World(2, group_timeout_s=60.0) as ranks:
        yield ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What other libraries deprecate is not ours to fail on."""
    for item in items:
        if "tests/interop" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
