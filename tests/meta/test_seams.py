"""What rooms know of one another: public names alone."""

import ast
from collections import defaultdict

import pytest

from tests.meta.source import Module, modules, where

TORCHS = {"_spec", "_local_tensor", "_is_view"}  # of DTensor and Tensor: a subclass has to set the first two


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def room_of(module: Module) -> str:
    return [*module.name.split("."), ""][1]


def made_here(module: Module) -> set[str]:
    """Private attributes that the classes and functions of a module make."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            targets = [t for item in node.body if isinstance(item, ast.Assign) for t in item.targets]
            targets += [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if is_private(name)}


def foreign_accesses(known: dict[str, Module]) -> list[str]:
    """Accesses to private attributes that another room makes, and the own one does not."""
    makers: dict[str, set[str]] = defaultdict(set)
    for module in known.values():
        for name in made_here(module):
            makers[name].add(room_of(module))
    problems = []
    for module in known.values():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Attribute) or ast.unparse(node.value) in ("self", "cls", "os", "torch._C"):
                continue
            rooms = makers.get(node.attr, set()) - {room_of(module)} if is_private(node.attr) else set()
            if rooms and room_of(module) not in makers[node.attr] and node.attr not in TORCHS:
                problems.append(f"{where(module, node.lineno)}: {ast.unparse(node)} is private to {sorted(rooms)}")
    return problems


def test_no_room_touches_what_is_private_to_another():
    problems = foreign_accesses(modules())
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("use", ["x._held", "x.y._held = 1", "x._give()", "X._count"])
def test_a_foreign_access_is_found(tmp_path, use):
    package = tmp_path / "dshard"
    (package / "units").mkdir(parents=True)
    (package / "units" / "a.py").write_text(
        "class X:\n    _count: int = 0\n"
        "    def __init__(self):\n        self._held = 1\n"
        "    def _give(self):\n        pass\n"
    )
    (package / "clip.py").write_text(f"def f(x, X):\n    {use}\n")
    (problem,) = foreign_accesses(modules(package))
    assert "clip.py:2" in problem
    assert "private to ['units']" in problem
