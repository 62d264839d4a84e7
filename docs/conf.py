"""Sphinx builds docs/ and the reference of the API from docstrings: `make docs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

project = "dshard"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "contents"  # index.md, a plain page of links, is what index.html is made of
html_theme = "alabaster"
default_role = "code"  # docstrings mark code as Markdown does
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures have them
napoleon_custom_sections = ["Communicates", "Source"]
napoleon_use_rtype = False
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"torch\..*|set_requires_gradient_sync")]  # torch's own docstrings
