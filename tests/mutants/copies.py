"""A plugin of pytest for copies of the repository: what is tested is the copy, and its ranks start at once."""

import multiprocessing
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, settings

import dshard


def pytest_configure() -> None:
    fork = multiprocessing.get_context("fork")  # this process, too, has been forked from one that has imported torch
    multiprocessing.get_context = lambda method=None: fork
    tempfile.tempdir = None  # else that which the process knew that this one was forked from
    found, wanted = Path(dshard.__file__).parents[1], Path.cwd()
    if found != wanted:
        raise pytest.UsageError(f"mutants: pytest must test the dshard of {wanted}, but it imports that of {found}.")


def pytest_sessionstart() -> None:
    """Behind tests/conftest.py, whose settings stay but for this: the first failing example says enough."""
    settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")
