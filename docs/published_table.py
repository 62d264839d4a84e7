"""Writes what `dshard simulate --published` prints into docs/simulate.md: `python docs/published_table.py`."""

from pathlib import Path

from dshard.cli.published import SHIPPED, report_of, text_of
from dshard.planner import published

PAGE = Path(__file__).resolve().parent / "simulate.md"
COMMAND = "$ dshard simulate --published\n```\n\n"
NEXT = "\n\n### "  # heading


def page(text: str, printed: str) -> str:
    """The page with what is printed behind the command, up to the next heading."""
    start = text.index(COMMAND) + len(COMMAND)
    return text[:start] + printed + text[text.index(NEXT, start) :]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), text_of(report_of(SHIPPED, published()))))
