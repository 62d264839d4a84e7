"""What the meta tests read from the package's source: modules, their imports, and sizes without docstrings."""

import ast
import os
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dshard"


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def modules(package: Path = PACKAGE) -> dict[str, Module]:
    """Every module of the package, by dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path)
    return found


@cache
def imported_names(module: Module) -> list[tuple[str, int]]:
    """Dotted names that a module imports, anywhere in it, with their lines; `from a import b` gives `a.b`."""
    names = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.name.split(".")
                package = package[: len(package) - node.level + module.is_package]
                base = ".".join([*package, *filter(None, [base])])
            names += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}:
            names += [(arg.value, node.lineno) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return names


def resolve(name: str, known: dict[str, Module]) -> str | None:
    """The module of the package that an imported dotted name is, or is in; None for names from elsewhere."""
    while name:
        if name in known:
            return name
        name = name.rpartition(".")[0]
    return None


def imported_for_types(module: Module) -> set[int]:
    """Lines of the imports that only type checkers read: what a class is that holds this one."""
    blocks = [n for n in ast.walk(module.tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {inner.lineno for block in blocks for inner in ast.walk(block) if isinstance(inner, ast.ImportFrom)}


def import_graph(known: dict[str, Module]) -> dict[str, dict[str, int]]:
    """For each module, the modules of the package that it imports and the line where it does."""
    graph: dict[str, dict[str, int]] = {}
    for name, module in known.items():
        targets = [(resolve(target, known), line) for target, line in imported_names(module)]
        graph[name] = {target: line for target, line in targets if target is not None}
    return graph


def num_code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Lines of a definition without the docstrings in it: long explanations are no reason to split code."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            docstring = inner.body[0]
            total -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return total


def where(module: Module, line: int) -> str:
    """`path:line`, for messages."""
    return f"{os.path.relpath(module.path, ROOT)}:{line}"
