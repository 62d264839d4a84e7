"""Fixtures and settings for every test."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from dshard.testing import WorldPool

settings.register_profile(
    "dshard",
    deadline=None,  # nothing in tests/ asserts on time
    max_examples=25,
    derandomize="CI" in os.environ,
    # `worlds` lives for the session: that examples share it is the point.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("dshard")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # as on the ranks: a parallel sum may round differently


@pytest.fixture(scope="session")
def worlds() -> Iterator[WorldPool]:
    """Persistent worlds by size: `worlds.run(2, fn, ...)`."""
    with WorldPool() as pool:
        yield pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
