"""Bugs planted in copies of dshard, one at a time: does the test that should notice fail?

Each `.patch` beside this file is one of them: a sentence that says what is broken, a line `Killed-by:` with the test
that has to fail, and a unified diff against `dshard/`.
"""

import ast
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests import warm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 60.0  # for a test that takes few seconds without the bug
BASELINE_LIMIT_S = 600.0  # for all of them together
_COPIED = ("dshard", "tests", "benchmarks", "docs")  # the last two are what some tests read
_PYTEST = ("-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.mutants.copies")
_NOT_A_NOTICE = ("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError")  # of a patch that has become stale


class PatchError(Exception):
    """A patch that is no mutant of the code as it is."""


@dataclass(frozen=True)
class Hunk:
    """Lines of a file that others take the place of."""

    path: str
    before: str
    after: str


@dataclass(frozen=True)
class Mutant:
    """One bug."""

    path: Path

    @property
    def name(self) -> str:
        """As it is named on the command line."""
        return self.path.stem

    @cached_property
    def _text(self) -> str:
        return self.path.read_text()

    @cached_property
    def _header(self) -> list[str]:
        return re.split(r"^(?:diff|---) ", self._text, maxsplit=1, flags=re.MULTILINE)[0].splitlines()

    @property
    def broken(self) -> str:
        """What is broken, in a sentence."""
        return " ".join(line for line in self._header if line and not line.startswith("Killed-by: "))

    @property
    def test(self) -> str:
        """The test that has to fail."""
        named = [line.removeprefix("Killed-by: ") for line in self._header if line.startswith("Killed-by: ")]
        if len(named) != 1:
            raise PatchError(f"{self.name}: its header must have one line 'Killed-by: ', but it has {len(named)}.")
        return named[0]

    @property
    def hunks(self) -> list[Hunk]:
        """What changes."""
        found = []
        for part in re.split(r"^--- ", self._text, flags=re.MULTILINE)[1:]:
            path = re.search(r"^\+\+\+ b/(dshard/\S+)$", part, flags=re.MULTILINE)
            if path is None:
                raise PatchError(f"{self.name}: it must change files of dshard/, named 'b/dshard/...'.")
            for body in re.split(r"^@@.*\n", part, flags=re.MULTILINE)[1:]:
                lines = body.splitlines(keepends=True)
                before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
                found.append(Hunk(path[1], before, after))
        return found

    def applied(self, root: Path = ROOT) -> dict[str, str]:
        """The changed files' texts, by path.

        Raises:
            PatchError: The lines that it changes are not there, or more than once; or nothing changes.
        """
        texts: dict[str, str] = {}
        for hunk in self.hunks:
            text = texts.get(hunk.path) or (root / hunk.path).read_text()
            if (num := text.count(hunk.before)) != 1:
                raise PatchError(f"{self.name}: its lines must be once in {hunk.path}, but they are {num} times.")
            texts[hunk.path] = text.replace(hunk.before, hunk.after)
        for path, text in texts.items():
            if ast.dump(ast.parse(text)) == ast.dump(ast.parse((root / path).read_text())):
                raise PatchError(f"{self.name}: it must change the code of {path}, but it does not.")
        if not texts:
            raise PatchError(f"{self.name}: it must change something, but it has no hunk.")
        return texts


def mutants(names: Iterable[str] = ()) -> list[Mutant]:
    """All of them, or those that are named, by number or name."""
    known = [Mutant(path) for path in sorted(HERE.glob("*.patch"))]
    wanted = list(names)
    if unknown := [word for word in wanted if not any(_is_named(each, word) for each in known)]:
        raise PatchError(f"mutants: a name must be one of those in {HERE.name}/, but {unknown} are none.")
    return [each for each in known if not wanted or any(_is_named(each, word) for word in wanted)]


def _is_named(mutant: Mutant, word: str) -> bool:
    return word in (mutant.name, mutant.name.partition("_")[0], mutant.path.name)


@dataclass(frozen=True)
class Outcome:
    """What became of tests.

    Args:
        word: "passed", "failed", "hung", or "broken" for what says nothing: no test ran, or the patch is stale.
        seconds: It took.
        failure: First line of the first failure.
        output: All of it.
    """

    word: str
    seconds: float
    failure: str
    output: str

    @property
    def verdict(self) -> str:
        """Of a mutant."""
        return {"failed": "killed", "passed": "SURVIVED"}.get(self.word, self.word)

    @property
    def is_killed(self) -> bool:
        """Whether the test noticed."""
        return self.word in ("failed", "hung")


@contextmanager
def copied(source: Path = ROOT, copy: Callable[[str, str], object] = shutil.copy2) -> Iterator[Path]:
    """A copy of the package and its tests, for as long as the block runs; `copy` makes that of a file."""
    with tempfile.TemporaryDirectory(prefix="dshard-mutant-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        for name in _COPIED:
            shutil.copytree(source / name, root / name, copy_function=copy)  # with times, and so with what is compiled
        copy(str(source / "pyproject.toml"), str(root / "pyproject.toml"))
        (root / "tmp").mkdir()
        yield root


@contextmanager
def unbroken(tests: Iterable[str]) -> Iterator[tuple[Path, Outcome]]:
    """A copy without a bug, to make others of, and what became of tests there; by then most of it is compiled.

    Tests that failed are run once more, alone: on a busy machine one that has no bug may, and no mutant could be tried.
    """
    with copied() as root:
        outcome = tested(root, sorted(set(tests)), BASELINE_LIMIT_S)
        if outcome.word == "failed":
            failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", outcome.output, flags=re.MULTILINE)
            outcome = tested(root, failed, BASELINE_LIMIT_S) if failed else outcome
        yield root, outcome


def killed(mutant: Mutant, source: Path, limit_s: float = LIMIT_S) -> Outcome:
    """Run the test of a mutant in a copy, of a copy without, that has its bug."""
    with copied(source, os.link) as root:
        for path, text in mutant.applied(root).items():
            changed = root / path
            changed.unlink()  # which is that of `source`, too
            changed.write_text(text)
            for compiled in changed.parent.glob(f"__pycache__/{changed.stem}.*.pyc"):
                compiled.unlink()
        return tested(root, [mutant.test], limit_s, "-x")


def tested(root: Path, tests: Sequence[str], limit_s: float, *options: str) -> Outcome:
    """Run tests in a copy."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    env |= {"PYTHONPATH": str(root), "TMPDIR": str(root / "tmp"), "OMP_NUM_THREADS": "1"}
    env |= {"CI": "1"}  # hypothesis draws the same examples each time
    begin = time.monotonic()
    ran = warm.run([*_PYTEST, *options, *tests], env=env, cwd=root, timeout_s=limit_s)
    seconds, output = time.monotonic() - begin, ran.stdout + ran.stderr
    if ran.timed_out:
        return Outcome("hung", seconds, f"nothing came of it within {limit_s:g} s", output)
    failure, word = _failure(output), {0: "passed", 1: "failed"}.get(ran.returncode, "broken")
    if word == "failed" and any(name in failure for name in _NOT_A_NOTICE):
        word = "broken"
    return Outcome(word, seconds, failure, output)


def _failure(output: str) -> str:
    """The first line of the first failure that pytest shows."""
    found = re.search(r"^E +(\S.*)$", output, flags=re.MULTILINE)
    return found[1] if found else ""
