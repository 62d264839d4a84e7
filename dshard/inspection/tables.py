"""Tables, as text for a terminal and as HTML for a notebook."""

import html
from collections.abc import Collection, Sequence

from dshard.planner.tables import aligned
from dshard.planner.texts import bytes_text

Row = Sequence[str]


def text_table(columns: Row, rows: Sequence[Row], *, to_left: Collection[int]) -> str:
    """Columns with their titles; some of them to the left, numbers to the right."""
    return "\n".join(aligned([columns, *rows], to_left=tuple(to_left)))


def html_table(columns: Row, rows: Sequence[Row], *, to_left: Collection[int]) -> str:
    """The same for a notebook."""

    def line(row: Row, tag: str) -> str:
        sides = ["left" if i in to_left else "right" for i in range(len(row))]
        cells = zip(map(html.escape, row), sides, strict=True)
        return "<tr>" + "".join(f'<{tag} style="text-align:{side}">{c}</{tag}>' for c, side in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(columns, 'th')}</thead><tbody>{body}</tbody></table>"


def known_bytes(num_bytes: int | None) -> str:
    """Bytes as text, "-" where nobody knows."""
    return "-" if num_bytes is None else bytes_text(num_bytes)
