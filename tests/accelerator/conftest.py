"""Worlds whose ranks have the simulated accelerator. Tests of the accelerator itself run in ranks of `simulators`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dshard.testing import WorldPool
from tests.pools import RestedPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def accelerators(accelerator: None) -> Iterator[WorldPool]:
    with RestedPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def accelerators_and_cpus(accelerator: None) -> Iterator[WorldPool]:
    """Those whose process groups know tensors of the CPU, too."""
    with RestedPool() as pool:
        yield pool
