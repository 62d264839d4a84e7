"""Tests in which parameters are kept on the CPU and used on another device, or on what stands for one."""

from collections.abc import Callable
from typing import Any

import pytest

from dshard.testing import WorldPool


@pytest.fixture(params=["cpu", "sim"])
def run(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Call a function, with the kind of compute device first, on each of some ranks."""
    pool: WorldPool = request.getfixturevalue("simulators" if request.param == "sim" else "worlds")

    def call(num_ranks: int, function: Callable[..., Any], *args: object) -> list[Any]:
        return pool.run(num_ranks, function, request.param, *args)

    return call
