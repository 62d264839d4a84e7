"""Fenced code blocks of Markdown files, and the scripts that run them.

A block's info string is its language and options: ```` ```python ranks=2 ````.

| language | runs as |
|---|---|
| `bash`, `sh` | `bash -eu -o pipefail` in a copy of the repository |
| `console` | the lines that start with `$ `, as `bash`; the others are output, which is not compared |
| `python` | a script in the copy; `ranks=N`: on ranks, as under torchrun; `continues`: after those before it |

A block `text output` right behind a python block is what that prints: its lines are compared, in order, where `...`
is anything. `run=slow` gives the test the marker `slow`. The blocks of one file share one copy, in order, so a later
block finds what an earlier one wrote. A fence in no known language, or with an option that nobody knows, is an error.
"""

import re
from dataclasses import dataclass
from pathlib import Path

SHELL = ("bash", "sh", "console")
RUNNABLE = (*SHELL, "python")
NOT_RUN = ("text", "toml", "json", "yaml", "diff", "mermaid", "markdown", "make", "bibtex")

_FENCE = re.compile(r"^(?P<indent>[ >]*)(?P<ticks>`{3,}|~{3,})(?P<info>[^`]*)$")
_OPTION = re.compile(r"ranks=[1-9]\d*|continues|run=slow")
_OUTPUT = "output"


class FenceError(ValueError):
    """A fenced block that the tests would not know how to run."""


@dataclass(frozen=True)
class Block:
    """One fenced block: its file, the line of its fence, its info string and its lines."""

    path: str
    line: int
    language: str
    options: tuple[str, ...]
    code: str

    @property
    def ranks(self) -> int:
        """Ranks asked for with `ranks=N`; 0 for a single process."""
        return next((int(option[6:]) for option in self.options if option.startswith("ranks=")), 0)

    @property
    def is_slow(self) -> bool:
        return "run=slow" in self.options

    @property
    def is_output(self) -> bool:
        return self.language == "text" and self.options == (_OUTPUT,)

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"


def blocks(text: str, path: str) -> list[Block]:
    """Every fenced block of a Markdown text, in order."""
    found, lines, start = [], text.splitlines(), None
    body: list[str] = []
    for number, line in enumerate(lines, start=1):
        fence = _FENCE.match(line)
        if start is None and fence:
            start, opening, body = number, fence, []
        elif start is not None and fence and fence["ticks"].startswith(opening["ticks"]) and not fence["info"].strip():
            language, *options = opening["info"].split() or [""]
            found.append(Block(path, start, language, tuple(options), "".join(f"{each}\n" for each in body)))
            start = None
        elif start is not None:
            indent = len(opening["indent"])
            body.append(line[indent:] if not line[:indent].strip(" >") else line)
    if start is not None:
        raise FenceError(f"{path}:{start}: the fence is never closed.")
    return found


def check(block: Block) -> None:
    """Raise `FenceError` unless the block can be run, or is plainly nothing to run."""
    if block.language not in RUNNABLE + NOT_RUN:
        raise FenceError(
            f"{block.where}: a fence must name its language, one of {', '.join(RUNNABLE)} (these are run) or "
            f"{', '.join(NOT_RUN)} (these are not), but it says {block.language!r}."
        )
    for option in () if block.is_output else block.options:
        if not _OPTION.fullmatch(option) or block.language in NOT_RUN:
            raise FenceError(f"{block.where}: no fence knows the option {option!r} for {block.language}.")
    if block.language in SHELL and (block.ranks or "continues" in block.options):
        raise FenceError(f"{block.where}: ranks= and continues are for python, not for {block.language}.")
    if block.language in NOT_RUN and re.search(r"^\s*\$ ", block.code, re.MULTILINE):
        raise FenceError(f"{block.where}: a {block.language} block shows a `$ ` command; make it `console`.")


def commands(block: Block) -> list[str]:
    """The logical lines of a shell block: continuations joined, comments and blank lines dropped."""
    text = block.code
    if block.language == "console":
        text = "".join(f"{line[2:]}\n" for line in text.splitlines() if line.startswith("$ "))
    joined = re.sub(r"\\\n\s*", "", text)
    stripped = (re.sub(r"(^|\s)#.*$", "", line).rstrip() for line in joined.splitlines())
    return [line for line in stripped if line]


def shell_script(block: Block, table: dict[str, str], needs_row: re.Pattern[str]) -> str:
    """What is run for a shell block: each line as it stands, or as the table says.

    Args:
        block: A shell block.
        table: For a command that cannot run as typed, what is run in its place.
        needs_row: Commands that must have a row, since they would install, recurse or take minutes.

    Raises:
        FenceError: A command needs a row and has none.
    """
    script = []
    for command in commands(block):
        if command not in table and needs_row.search(command):
            raise FenceError(
                f"{block.where}: `{command}` cannot run as typed inside a test, and no row says how it is tested. "
                f"Add it to RUN_AS in tests/meta/test_docs.py."
            )
        script.append(table.get(command, command))
    if not script:
        raise FenceError(f"{block.where}: a {block.language} block without a command; use `text`.")
    return "\n".join(script) + "\n"


def python_script(block: Block, before: list[Block]) -> str:
    """What is run for a python block: itself, after the chain of blocks that it continues."""
    chain = [block]
    for earlier in reversed([each for each in before if each.language == "python"]):
        if "continues" not in chain[0].options:
            break
        chain.insert(0, earlier)
    if "continues" in chain[0].options:
        raise FenceError(f"{block.where}: there is no python block before it to continue.")
    return "\n".join(each.code for each in chain)


def expected_output(block: Block, every: list[Block]) -> Block | None:
    """The block that says what a block prints, if the next one of its file does.

    Raises:
        FenceError: The block before an output is none that runs.
    """
    following = next((each for each in every if each.path == block.path and each.line > block.line), None)
    if following is None or not following.is_output:
        return None
    if block.language != "python":
        raise FenceError(f"{following.where}: the output of a {block.language} block is not compared; use `text`.")
    return following


def missing_output(expected: str, printed: str) -> str | None:
    """The first line of an expected output that is not in what was printed behind those before it; None if all are."""
    lines = iter(line.rstrip() for line in printed.splitlines())
    for wanted in (line.rstrip() for line in expected.splitlines()):
        pattern = ".*".join(map(re.escape, wanted.split("...")))
        if not any(re.fullmatch(pattern, line) for line in lines):
            return wanted
    return None


def documents(root: Path) -> list[Path]:
    """The files whose blocks must run."""
    return [
        path
        for path in (root / "README.md", root / "CONTRIBUTING.md", *sorted(root.glob("docs/**/*.md")))
        if path.exists()
    ]
