"""Worlds whose ranks have the simulated accelerator."""

from collections.abc import Iterator

import pytest

from dshard.testing import WorldPool


@pytest.fixture(scope="session")
def accelerators() -> Iterator[WorldPool]:
    with WorldPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def accelerators_and_cpus() -> Iterator[WorldPool]:
    """Those whose process groups know tensors of the CPU, too."""
    with WorldPool() as pool:
        yield pool
