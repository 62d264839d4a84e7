"""The picture of docs/concepts.md is what its script draws, and shows what happens in the order that the page tells."""

import re
import xml.etree.ElementTree
from runpy import run_path

from tests.meta.fences import blocks
from tests.meta.source import ROOT

FOLDER = ROOT / "docs" / "images"
SCRIPT = run_path(str(FOLDER / "step.py"))


def events() -> list[str]:
    """Gathers and reductions of the page's output, which the tests of its program compare with what that prints."""
    page = (ROOT / "docs" / "concepts.md").read_text()
    (output,) = (block for block in blocks(page, "concepts.md") if block.is_output)
    return re.findall(r"(gather|reduce) (\d)", output.code)


def test_the_picture_is_what_its_script_draws():
    drawn = (FOLDER / "step.svg").read_text()
    assert drawn == SCRIPT["drawing"](), "run `python docs/images/step.py`, and commit the picture"
    assert xml.etree.ElementTree.fromstring(drawn).tag.endswith("svg")


def test_gathers_and_reductions_are_in_the_order_that_a_program_sees():
    shown = [segment for segment in SCRIPT["SEGMENTS"] if segment[0] in ("gathers", "reduces")]
    shown.sort(key=lambda segment: segment[2])
    assert [(row.removesuffix("s"), unit) for row, unit, *_ in shown] == events()


def test_full_values_are_there_from_a_gather_to_the_end_of_their_use():
    def spans(row: str, unit: str) -> list[tuple[float, float]]:
        return [segment[2:4] for segment in SCRIPT["SEGMENTS"] if segment[:2] == (row, unit)]

    for unit in "012":
        held, gathers, uses = spans(f"full values of {unit}", unit), spans("gathers", unit), spans("computes", unit)
        assert [start for start, _ in held] == [start for start, _ in gathers]
        assert [stop for _, stop in held] == [stop for _, stop in uses]
