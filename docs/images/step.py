"""Draws docs/images/step.svg, one training step of three units on one rank: `python docs/images/step.py`.

The order is that which the program in docs/concepts.md sees; lengths are for the eye.
"""

from pathlib import Path

WIDTH, LEFT, RIGHT = 960, 150, 940
TIME = 20.0  # length of the step
ROW, TOP = 34, 44
COLORS = {"0": "#2f6fb0", "1": "#b0572f", "2": "#4f8a3c", "": "#6b6b6b"}

# Row, unit, start, stop, text.
SEGMENTS = [
    ("the program", "", 0, 7, "forward"),
    ("the program", "", 7.1, 18.8, "backward"),
    ("the program", "", 18.9, 20, "step"),
    ("computes", "0", 1, 3, "unit 0"),
    ("computes", "1", 3, 5, "unit 1"),
    ("computes", "2", 5, 7, "unit 2"),
    ("computes", "2", 8.6, 11.6, "unit 2"),
    ("computes", "1", 11.6, 14.6, "unit 1"),
    ("computes", "0", 14.6, 17.6, "unit 0"),
    ("computes", "", 18.9, 20, "shards"),
    ("gathers", "0", 0, 1, "0"),
    ("gathers", "1", 1, 2, "1"),
    ("gathers", "2", 3, 4, "2"),
    ("gathers", "2", 7.6, 8.6, "2"),
    ("gathers", "1", 8.6, 9.6, "1"),
    ("gathers", "0", 11.7, 12.7, "0"),
    ("reduces", "2", 11.6, 12.8, "2"),
    ("reduces", "1", 14.6, 15.8, "1"),
    ("reduces", "0", 17.6, 18.8, "0"),
    ("full values of 0", "0", 0, 3, "gathered"),
    ("full values of 0", "0", 11.7, 17.6, "gathered"),
    ("full values of 1", "1", 1, 5, "gathered"),
    ("full values of 1", "1", 8.6, 14.6, "gathered"),
    ("full values of 2", "2", 3, 7, "gathered"),
    ("full values of 2", "2", 7.6, 11.6, "gathered"),
    ("shards", "", 0, 20, "of parameters and optimizer states: always; of gradients: from their reduction on"),
]


def at(time: float) -> float:
    """Where a time is, in pixels."""
    return round(LEFT + time / TIME * (RIGHT - LEFT), 1)


def text(x: float, y: float, words: str, more: str = 'fill="#222"') -> str:
    """Words on the picture."""
    return f'<text x="{x}" y="{y}" {more}>{words}</text>'


def box(segment: tuple[str, str, float, float, str], y: float) -> str:
    """What happens for a while, as a box with words in it."""
    row, unit, start, stop, words = segment
    x, length = at(start), round(at(stop) - at(start), 1)
    opacity = 0.85 if row.startswith("full") else 1
    size = 10 if length < 60 and len(words) > 4 else 13
    place = f'x="{x}" y="{y}" width="{length}" height="{ROW - 8}"'
    within = text(round(x + length / 2, 1), y + 18, words, f'fill="#fff" text-anchor="middle" font-size="{size}"')
    return f'<rect {place} rx="3" fill="{COLORS[unit]}" opacity="{opacity}"/>\n{within}'


def drawing() -> str:
    """The text of the picture, on a background of its own, in the fonts of the system."""
    rows = list(dict.fromkeys(row for row, *_ in SEGMENTS))
    height = TOP + ROW * len(rows) + 34
    end = height - 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"',
        '  font-family="system-ui, sans-serif" font-size="13" role="img">',
        "<title>One training step of three units, as one rank sees it</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#fbfaf7" stroke="#c9c6bf"/>',
        text(16, 26, "One step of three units on one rank", 'font-weight="600" fill="#222"'),
        *(text(16, TOP + ROW * number + 21, row) for number, row in enumerate(rows)),
        *(box(segment, TOP + ROW * rows.index(segment[0]) + 4) for segment in SEGMENTS),
        text(LEFT, end, "time"),
        f'<path d="M {LEFT + 36} {end - 4} H {RIGHT}" stroke="#222"/>',
        f'<path d="M {RIGHT - 7} {end - 8} L {RIGHT} {end - 4} L {RIGHT - 7} {end}" fill="none" stroke="#222"/>',
    ]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(drawing())
