"""Tables in docs whose last column names the tests that show what a row says."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.meta.source import ROOT


def table_rows(text: str) -> Iterator[list[str]]:
    """Cells of each row of each table, without the lines that head it."""
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        is_table = line.startswith("|")
        is_head = re.fullmatch(r"\|[-|: ]+\|", line) or re.fullmatch(r"\|[-|: ]+\|", following)
        if is_table and not is_head:
            yield [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def named_tests(cell: str, where: str) -> list[tuple[str, str]]:
    """The tests that a cell names, as (file, function)."""
    tests = []
    for name in re.findall(r"`([^`]+)`", cell):
        file, separator, function = name.partition("::")
        assert separator, f"a test is named file::function, but {where} names {name}"
        tests.append((file, function))
    return tests


def missing_tests(cell: str, where: str) -> list[str]:
    """What is wrong with the tests that a cell names."""
    return [
        f"{where}: {file} has no test {function}"
        for file, function in named_tests(cell, where)
        if function not in names_of_tests(file)
    ]


@cache
def names_of_tests(file: str) -> set[str]:
    path = ROOT / file
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
