"""Worlds in which parameters are kept on the CPU and used on another device, or on what stands for one."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dshard.testing import WorldPool
from tests.accelerator.device import CAN_BUILD


@pytest.fixture(scope="session")
def second_device() -> Iterator[WorldPool]:
    """Worlds of their own for the device "sim", for a process that knows it is no longer as others are."""
    if not CAN_BUILD:
        pytest.skip("no C++ compiler and ninja to build the device with")
    code = "from tests.accelerator.device import build; build()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400, cwd=Path(__file__).parents[2])
    with WorldPool() as pool:
        yield pool


@pytest.fixture(params=["cpu", "sim"])
def run(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Call a function, with the kind of compute device first, on each of some ranks."""
    pool: WorldPool = request.getfixturevalue("second_device" if request.param == "sim" else "worlds")

    def call(num_ranks: int, function: Callable[..., Any], *args: object) -> list[Any]:
        return pool.run(num_ranks, function, request.param, *args)

    return call
