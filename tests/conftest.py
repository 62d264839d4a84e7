"""Fixtures and settings for every test."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from dshard.testing import WorldPool
from tests.pools import MessagingWorld, RestedPool
from tests.slow import marks

pytest_plugins = ["dshard.testing.fixtures"]

settings.register_profile(
    "dshard",
    deadline=None,  # nothing in tests/ asserts on time
    max_examples=25,
    derandomize="CI" in os.environ,
    # `worlds` lives for the session: that examples share it is the point.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("dshard")


# Files that take longest, longest first: side by side the suite ends sooner where these do not begin last.
LONGEST = (
    *(
        "faults/test_faults",
        "crossings/test_crossings",
        "accelerator/test_crossings",
        "optimizer/test_optimizers",
        "meta/test_docs",
        "planner/test_counted_peak",
    ),
    *(
        "faults/test_fuzz_checkpoint",
        "mutants/test_mutants",
        "faults/test_long_runs",
        "benchmarks/test_benchmarks",
    ),
    *("parity/test_training", "tensor/test_op_table", "runtime/test_compile"),
)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # as on the ranks: a parallel sum may round differently


@pytest.fixture(scope="module", autouse=True)
def _few_groups() -> Iterator[None]:
    """A file of tests leaves few process groups behind."""
    yield
    for pool in RestedPool.open:
        pool.rest()


@pytest.fixture(scope="session")
def make_worlds() -> Callable[[], WorldPool]:
    """Of the fixture `worlds`."""
    return RestedPool


@pytest.fixture(scope="session")
def messaging() -> Iterator[WorldPool]:
    """Worlds as `worlds` gives, whose ranks exchange messages and not through memory."""
    with RestedPool(MessagingWorld) as pool:
        yield pool


@pytest.fixture(scope="session")
def accelerator() -> None:
    """The device "sim" of `tests/accelerator`, built; or a skip where it cannot be."""
    from tests.accelerator import device  # takes as long to import as torch's compiler tools

    if not device.CAN_BUILD:
        pytest.skip("no C++ compiler and ninja to build the device with")
    device.build_apart()


@pytest.fixture(scope="session")
def simulators(accelerator: None) -> Iterator[WorldPool]:
    """Worlds for that device, for a process that knows it is no longer as others are."""
    with RestedPool() as pool:
        yield pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what tests/slow.py lists, skip `gpu` tests without a device, refuse names that differ between processes."""
    order = {f"tests/{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))
    if unlike := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"side by side with others, a test needs an id without an address in it: {unlike}")
    for item, marked in zip(items, marks([item.nodeid for item in items]), strict=True):
        for mark in marked:
            item.add_marker(mark)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
