"""docs/pains.md answers for each of the 26 pains, and every test that it names exists."""

import re
from dataclasses import dataclass

import pytest

from tests.meta.source import ROOT
from tests.meta.tables import missing_tests, named_tests, table_rows

PAGE = ROOT / "docs" / "pains.md"
NUM_PAINS = 26
STATUSES = ("fixed", "raises", "open")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    number: int
    pain: str
    status: str
    answer: str
    shown_by: str


def rows(text: str) -> list[Row]:
    found = []
    for cells in table_rows(text):
        assert len(cells) == 5, f"docs/pains.md: a row has 5 cells, but this one has {len(cells)}: {cells}"
        found.append(Row(int(cells[0]), *cells[1:]))
    return found


def problems(text: str) -> list[str]:
    """What is wrong with the page."""
    found = []
    table = rows(text)
    numbers = [row.number for row in table]
    found += [f"pain {n} is missing" for n in range(1, NUM_PAINS + 1) if n not in numbers]
    found += [f"pain {n} is there twice" for n in sorted(set(numbers)) if numbers.count(n) > 1]
    found += [f"there is no pain {n}" for n in numbers if not 1 <= n <= NUM_PAINS]
    for row in table:
        if row.status not in STATUSES:
            found.append(f"pain {row.number}: status {row.status!r} is none of {STATUSES}")
        if not row.pain or not row.answer:
            found.append(f"pain {row.number}: an empty cell")
        if not named_tests(row.shown_by, f"pain {row.number}"):
            found.append(f"pain {row.number}: names no test")
        found += missing_tests(row.shown_by, f"pain {row.number}")
    return found


def test_every_pain_has_a_status_and_names_tests_that_exist():
    assert problems(PAGE.read_text()) == []


def line(number: int) -> str:
    return next(text for text in PAGE.read_text().splitlines() if re.match(rf"\| *{number} *\|", text))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (line(3) + "\n", "", "pain 3 is missing"),
        (line(3), line(4), "pain 4 is there twice"),
        ("| 26 |", "| 27 |", "there is no pain 27"),
        ("| fixed |", "| |", "pain 1: status '' is none of"),
        ("| raises |", "| solved |", "pain 2: status 'solved' is none of"),
        (
            "test_uses.py::test_a_parameter_used",
            "test_uses.py::test_no_parameter_used",
            "pain 1: tests/tensor/test_uses",
        ),
        (
            "tests/tensor/test_uses.py::test_a_parameter_used",
            "tests/gone.py::test_a_parameter_used",
            "pain 1: tests/gone",
        ),
    ],
)
def test_a_missing_row_status_or_test_is_seen(old, new, problem):
    text = PAGE.read_text()
    assert old in text
    assert any(found.startswith(problem) for found in problems(text.replace(old, new, 1)))


def test_a_row_without_a_test_is_seen():
    cells = line(6).split("|")
    text = PAGE.read_text().replace(line(6), "|".join([*cells[:5], " none ", ""]))
    assert "pain 6: names no test" in problems(text)
