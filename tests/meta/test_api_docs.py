"""The reference of the API names every public name, and Sphinx builds it with all pages, warnings being errors."""

import importlib.util
import re
import subprocess
import sys
from importlib import import_module
from inspect import ismodule
from types import ModuleType

import pytest

import dshard
from tests.meta.source import ROOT

DOCS = ROOT / "docs"


def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_table", DOCS / "api_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLE = table()
PUBLIC = sorted({f"{module}.{name}" for module in TABLE.MODULES for name in import_module(module).__all__})


def public_submodules() -> set[str]:
    """Modules that are public names of the package."""
    return {f"dshard.{name}" for name in dshard.__all__ if ismodule(getattr(dshard, name))}


def test_the_modules_of_the_reference_are_the_public_ones():
    assert public_submodules() <= set(TABLE.MODULES)


def test_the_page_of_public_names_is_what_the_docstrings_say():
    wanted = TABLE.page()
    assert (DOCS / "api.md").read_text() == wanted, "run `python docs/api_table.py`, and commit docs/api.md"


@pytest.mark.parametrize("name", PUBLIC)
def test_no_public_name_is_missing_from_the_page(name):
    last = name.rpartition(".")[2]
    if name not in public_submodules():
        assert f"`{last}`" in (DOCS / "api.md").read_text(), f"give {name} a group in docs/api_table.py"


@pytest.mark.slow
def test_sphinx_builds_all_pages_without_a_warning_and_every_public_name_has_its_place(tmp_path):
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    makefile = (ROOT / "Makefile").read_text()
    (options,) = re.findall(r"^SPHINX := (.*) docs build/docs$", makefile, re.MULTILINE)
    built = tmp_path / "docs"
    command = [sys.executable, *options.split(), "--doctree-dir", str(tmp_path / "trees"), str(DOCS), str(built)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (built / "index.html").is_file()
    pages = "".join(page.read_text() for page in built.glob("api/*.html"))
    places = {name.removeprefix("module-") for name in re.findall(r'id="((?:module-)?dshard[\w.]*)"', pages)}
    at_two_names = {"dshard.checkpoint.load_safetensors", "dshard.checkpoint.save_safetensors", "dshard.planner.Plan"}
    assert set(PUBLIC) - places - at_two_names == set()
