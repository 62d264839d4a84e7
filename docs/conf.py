"""Sphinx builds docs/ and the reference of the API from docstrings: `make docs`."""

import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

project = "dshard"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "contents"  # index.md, a plain page of links, is what index.html is made of
html_theme = "alabaster"
default_role = "code"  # docstrings mark code as Markdown does
myst_heading_anchors = 4
autodoc_member_order = "bysource"
napoleon_custom_sections = ["Communicates", "Source"]
napoleon_use_rtype = False
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"torch\..*|set_requires_gradient_sync"),  # torch's own docstrings
    ("py:class", r"(collections\.abc|contextlib|os|pathlib)\..*|dict\[int"),
    ("py:class", r"dshard(\.\w+){3,}"),  # in a signature, but not public
]


def link_files_outside(app: Any, docname: str, source: list[str]) -> None:
    """Have links to Markdown files that are no pages of these docs, such as README.md, lead to the files."""

    def link(found: re.Match[str]) -> str:
        outside = not (DOCS / docname).parent.joinpath(found[1]).resolve().is_relative_to(DOCS)
        return f"](path:{found[1]})" if outside else found[0]

    source[0] = re.sub(r"\]\(((?:\.\./)+[^()#\s]+\.md)(?:#[^()\s]*)?\)", link, source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", link_files_outside)
