"""Prints how many cases of optimizers a file compared."""

from collections.abc import Iterator

import pytest

from tests.optimizer.kit import Counted


@pytest.fixture(scope="module", autouse=True)
def _print_the_count() -> Iterator[None]:
    Counted.cases.clear()
    yield
    if total := sum(Counted.cases.values()):
        print(f"\n{total} cases of optimizers: " + ", ".join(f"{n} {k}" for k, n in sorted(Counted.cases.items())))
