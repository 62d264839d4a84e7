"""Ranks that have imported `transformers`, and what other libraries warn of."""

import pytest

from tests.interop.conftest import pool as pool
from tests.interop.conftest import world as world

HUGGING_FACE = "test_hugging_face.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What other libraries deprecate is not ours to fail on."""
    for item in items:
        if item.path.name == HUGGING_FACE:
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
