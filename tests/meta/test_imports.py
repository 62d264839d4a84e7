"""The shape of the code: imports point one way, nothing is cyclic, private to torch's tests, or too long."""

import ast
import graphlib
from collections import Counter
from pathlib import Path

import pytest

from tests.meta.source import (
    ROOT,
    Module,
    import_graph,
    imported_for_types,
    imported_names,
    modules,
    num_code_lines,
    where,
)

_PURE = ("errors", "layout", "policies", "arguments")
_LOW = ("errors", "interpreter", "compiling", "arguments", "layout", "policies", "collectives", "tensor")
_UNITS = (*_LOW, "agreement", "autograd", "units", "gradients", "optimizer")
_CORE = (
    *_PURE,
    *_UNITS,
    "runtime",
    "slices",
    "gathering",
    "clip",
    "compat",
    "join",
    "run_by_some",
    "planner",
    "setup",
    "planning",
)

# What each room may import, besides itself: those below it. "" is `dshard/__init__.py`: the public names.
ALLOWED: dict[str, tuple[str, ...]] = {
    "errors": (),
    "compiling": (),
    "interpreter": (),
    "layout": ("errors",),
    "policies": ("errors", "arguments"),
    "arguments": ("errors",),
    "planner": _PURE,
    "collectives": ("errors", "arguments", "layout", "policies"),
    "tensor": ("errors", "interpreter", "compiling", "arguments", "layout", "policies", "collectives"),
    "agreement": ("errors", "collectives", "tensor"),
    "autograd": ("errors", "interpreter", "compiling", "tensor"),
    "units": (*_LOW, "autograd"),
    "gradients": (*_LOW, "agreement", "autograd", "units"),
    "optimizer": (*_LOW, "autograd", "units", "gradients"),
    "runtime": _UNITS,
    "slices": (*_UNITS, "runtime"),
    "gathering": (*_UNITS, "runtime"),
    "clip": (*_PURE, "compiling", "collectives", "tensor"),
    "compat": ("arguments", "runtime"),
    "optim": ("arguments", "layout", "optimizer"),
    "join": (*_UNITS, "runtime", "clip", "compat"),
    "run_by_some": (*_UNITS, "runtime"),
    "setup": (*_UNITS, "runtime", "slices", "gathering", "planner"),
    "planning": (*_LOW, "autograd", "units", "runtime", "planner", "setup"),
    "inspection": (*_LOW, "autograd", "units", "runtime", "planner", "setup"),
    "checkpoint": _CORE,
    "interop": (*_CORE, "checkpoint"),
    "testing": (*_CORE, "checkpoint", ""),
    "": (*_CORE, "checkpoint", "inspection", "interop", "optim"),
    "cli": (*_CORE, "checkpoint", "inspection", "testing", ""),
    "__main__": ("cli",),
}
PURE = ("errors", "layout", "planner")  # no process group

MAX_ROOM_FILES = 13
LARGE_ROOMS = ("collectives", "planner")  # not cut into rooms (yet)
MAX_FILE_LINES = 1000
MAX_FUNCTION_LINES = 60  # as much as a screen shows

MODULES = modules()


def part(name: str) -> str:
    """The part of the package that a module belongs to: the second word of its name."""
    return [*name.split("."), ""][1]


def wrong_imports(known: dict[str, Module]) -> list[str]:
    problems = []
    for name, targets in import_graph(known).items():
        allowed = ALLOWED.get(part(name), ())
        for target, line in targets.items():
            if part(target) != part(name) and part(target) not in allowed:
                problems.append(f"{where(known[name], line)}: {name} must not import {target}")
    return problems


def cycle(known: dict[str, Module]) -> list[str]:
    graph = {
        name: {
            target
            for target, line in targets.items()
            if target != name
            and not (part(target) == part(name) and line in imported_for_types(known[name]))  # of the same room alone
        }
        for name, targets in import_graph(known).items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def too_long(known: dict[str, Module]) -> list[str]:
    problems = []
    for module in known.values():
        num_lines = len(module.text.splitlines())
        if num_lines >= MAX_FILE_LINES:
            problems.append(f"{where(module, 1)}: {num_lines} lines, must be under {MAX_FILE_LINES}")
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (num_lines := num_code_lines(node)) >= MAX_FUNCTION_LINES:
                problems.append(
                    f"{where(module, node.lineno)}: {node.name} has {num_lines} lines without docstrings, "
                    f"must be under {MAX_FUNCTION_LINES}"
                )
    return problems


def test_every_part_of_the_package_has_a_place():
    unplaced = {name for name in MODULES if part(name) not in ALLOWED}
    assert not unplaced, f"add to ALLOWED in {Path(__file__).name} what these may import: {sorted(unplaced)}"


def test_imports_point_one_way():
    problems = wrong_imports(MODULES)
    assert not problems, "\n".join(problems)


def test_no_two_modules_import_each_other():
    found = cycle(MODULES)
    assert not found, (
        f"a cycle of imports, also inside functions and, across rooms, under TYPE_CHECKING: {' <- '.join(found)}"
    )


def test_rooms_are_below_one_another():
    order = {room: set(allowed) for room, allowed in ALLOWED.items()}
    graphlib.TopologicalSorter(order).prepare()  # raises where two may import each other


def test_rooms_are_small():
    folders = (module.name.rpartition(".")[0] for module in MODULES.values() if module.name.count(".") > 1)
    rooms = Counter(folder.removeprefix("dshard.") for folder in folders)  # a folder in a room is one of its own
    assert {room: num for room, num in rooms.items() if num > MAX_ROOM_FILES and room not in LARGE_ROOMS} == {}
    assert {room for room in LARGE_ROOMS if rooms[room] <= MAX_ROOM_FILES} == set()


def test_pure_parts_know_no_process_group():
    problems = [
        f"{where(module, line)}: {module.name} is pure and must not import {target}"
        for module in MODULES.values()
        if part(module.name) in PURE
        for target, line in imported_names(module)
        if target.startswith("torch.distributed") or target.endswith("_distributed_c10d")
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("private", ["torch.testing._internal"])
def test_the_package_does_not_use_what_is_private_to_torchs_tests(private):
    problems = []
    for module in MODULES.values():
        problems += [
            where(module, line) for name, line in imported_names(module) if f"{name}.".startswith(f"{private}.")
        ]
        problems += [
            where(module, node.lineno)
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node) == private
        ]
    assert not problems, f"{private} is used at {problems}"


def test_files_and_functions_are_short():
    problems = too_long(MODULES)
    assert not problems, "\n".join(problems)


@pytest.fixture
def package(tmp_path):
    """A package that breaks the rules, to see that they bite."""

    def write(files: dict[str, str]) -> dict[str, Module]:
        for name, text in files.items():
            path = tmp_path / "dshard" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return modules(tmp_path / "dshard")

    return write


@pytest.mark.parametrize(
    "text",
    [
        "import dshard.tensor",
        "from dshard import tensor",
        "from dshard.tensor import x",
        "from . import tensor",
        "def f():\n    from dshard.tensor import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dshard.tensor",
        "import importlib\nimportlib.import_module('dshard.tensor')",
    ],
)
def test_an_upward_import_is_found_in_every_spelling(package, text):
    known = package({"__init__.py": "", "layout.py": text, "tensor/__init__.py": "x = 1"})
    (problem,) = wrong_imports(known)
    assert "dshard.layout must not import dshard.tensor" in problem


def test_a_cycle_inside_one_part_is_found(package):
    known = package(
        {
            "tensor/__init__.py": "",
            "tensor/a.py": "from dshard.tensor.b import x",
            "tensor/b.py": "def f():\n    import dshard.tensor.a",
        }
    )
    assert wrong_imports(known) == []
    assert set(cycle(known)) == {"dshard.tensor.a", "dshard.tensor.b"}


def test_long_code_is_found_and_docstrings_are_free(package):
    body = "    x = 1\n" * (MAX_FUNCTION_LINES - 1)
    docstring = '    """' + "word\n" * 90 + '    """\n'
    known = package({"layout.py": f"def long():\n{body}", "errors.py": f"def fine():\n{docstring}    x = 1\n"})
    (problem,) = too_long(known)
    assert "long has 60 lines" in problem


def test_the_package_was_found():
    assert (ROOT / "pyproject.toml").exists()
    assert "dshard" in MODULES
