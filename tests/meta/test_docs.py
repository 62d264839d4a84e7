"""Every fenced command and example in README, CONTRIBUTING and docs is run; see `fences.py` for how one is written."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import warm
from tests.meta.fences import (
    NOT_RUN,
    SHELL,
    Block,
    FenceError,
    blocks,
    check,
    commands,
    documents,
    expected_output,
    missing_output,
    python_script,
    shell_script,
)
from tests.meta.source import ROOT

TIMEOUT_S = 300

_TINY = "--steps 4 --layers 1 --width 32 --heads 2 --block 32 --batch 2 --sample 8"

# What is run in place of a command that cannot run as typed: the same command made small, or its closest check.
RUN_AS = {
    "git clone https://github.com/dshard/dshard": "true",  # the block runs in a copy already
    "cd dshard": "true",
    "make train": f'make train ARGS="{_TINY}"',
    'make train ARGS="--compare"': f'make train ARGS="--compare {_TINY}"',
    'make train ARGS="--stop-after 75"': f'make train ARGS="--stop-after 2 {_TINY}"',
    'make train ARGS="--resume"': f'make train ARGS="--resume {_TINY}"',
    "DSHARD_FLIGHT_RECORD=flight torchrun --nproc-per-node 4 train.py": (
        f"DSHARD_FLIGHT_RECORD=flight torchrun --nproc-per-node 2 examples/train.py {_TINY}"
    ),
    "make test": 'make test ARGS="-q tests/unit/test_oracle.py"',
    "make test-all": "make --dry-run test-all",
    "make test-deep": "make --dry-run test-deep",
    "make test ARGS=tests/unit": "make --dry-run test ARGS=tests/unit && test -d tests/unit",
    "make check": "make --dry-run check",  # .ci/run runs it in full
    "make bench": "make --dry-run bench && python -m benchmarks --help",
    "python -m benchmarks collectives": "python -m benchmarks collectives --width 16 --rounds 2",
    "time dshard plan llama3-405b --world 512 --device h100-80g --batch 1 --checkpoint": (
        "dshard plan llama3-8b --world 512 --device h100-80g --batch 1 --checkpoint"
    ),
    "make venv": "make venv",
    "make docs": "make --dry-run docs",  # tests/meta/test_api_docs.py builds them
    "make clean": "make --dry-run clean",
    ".ci/run": "bash -n .ci/run && test -x .ci/run",
    "pip install -e .": "python -c 'import dshard'",
    "pip install -e '.[dev]'": "python -c 'import dshard'",
}

# Would install, fetch, recurse into this test, or train or measure for minutes.
NEEDS_ROW = re.compile(
    r"\b(git (clone|push|commit)|pip3?|make|pytest|conda|uv|sudo|apt(-get)?)\b"
    r"|\.ci/run|-m benchmarks\b|examples/train\.py|\bcd dshard\b"
)

DOCUMENTS = documents(ROOT)
BLOCKS = [block for path in DOCUMENTS for block in blocks(path.read_text(), str(path.relative_to(ROOT)))]
RUNNABLE_BLOCKS = [block for block in BLOCKS if block.language not in NOT_RUN]


def sources() -> list[str]:
    """What git would commit, changes included; in a tree without git, every file that is no build product."""
    listing = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"]
    ran = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode == 0:
        return [name for name in ran.stdout.split("\0") if (ROOT / name).is_file()]
    built = re.compile(r"(^|/)(\.venv|\.git|__pycache__|build|[^/]*\.egg-info|\.[a-z]+_cache|\.hypothesis)(/|$)")
    names = (path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file())
    return [name for name in names if not built.search(name)]


def copy_repository(target: Path) -> None:
    """Copy the sources and give the copy this test's environment as its `.venv`."""
    for name in sources():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    venv = target / ".venv"
    venv.mkdir()
    for name in ("bin", "lib", "lib64", "pyvenv.cfg"):
        if (Path(sys.prefix) / name).exists():
            (venv / name).symlink_to(Path(sys.prefix) / name)
    (venv / ".stamp").touch()  # so that make does not install


def environment(copy: Path) -> dict[str, str]:
    """The environment of a block: the copy's package first, the interpreter of this test, nothing of pytest.

    A block leaves bytecode for those after it: to compile the package takes each process longer than to import it.
    """
    dropped = ("PYTEST", "MAKE", "MFLAGS", "ARGS", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    path = os.pathsep.join([str(copy / ".venv" / "bin"), kept.get("PATH", os.defpath)])
    return {**kept, "PATH": path, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}


def run(command: list[str], copy: Path, block: Block) -> None:
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment(copy),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that a block that hangs is killed with all it started
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        pytest.fail(f"{block.where}: took more than {TIMEOUT_S} s; give RUN_AS a shorter form.\n{output[-4000:]}")
    assert process.returncode == 0, f"{block.where}: exit code {process.returncode}\n{block.code}\n{output[-4000:]}"


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """One copy of the repository per document, made when its first block runs."""
    made: dict[str, Path] = {}

    def copy_for(document: str) -> Path:
        if document not in made:
            copy = tmp_path_factory.mktemp("docs")
            copy_repository(copy)
            made[document] = copy
        return made[document]

    return copy_for


def test_there_is_a_readme():
    assert ROOT / "README.md" in DOCUMENTS, "README.md is missing: every fenced command in it would be run here"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where)
def test_every_fence_says_how_it_runs(block):
    check(block)
    expected_output(block, BLOCKS)
    if block.language in SHELL:
        shell_script(block, RUN_AS, NEEDS_ROW)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block.where, marks=[pytest.mark.slow] if block.is_slow else [])
        for block in RUNNABLE_BLOCKS
    ],
)
def test_the_block_runs(block, copies):
    check(block)
    if block.language in SHELL:
        script = shell_script(block, RUN_AS, NEEDS_ROW)
        run(["bash", "-eu", "-o", "pipefail", "-c", script], copies(block.path), block)
        return
    before = [each for each in BLOCKS if each.path == block.path and each.line < block.line]
    code = python_script(block, before)
    copy = copies(block.path)
    script_file = copy / f"block_line_{block.line}.py"
    script_file.write_text(code)
    ran = warm.run([script_file], ranks=block.ranks, env=environment(copy), cwd=copy, timeout_s=TIMEOUT_S)
    output = (ran.stdout + ran.stderr)[-4000:]
    assert not ran.timed_out, f"{block.where}: took more than {TIMEOUT_S} s.\n{output}"
    assert ran.returncode == 0, f"{block.where}: exit codes {ran.codes}\n{block.code}\n{output}"
    if expected := expected_output(block, BLOCKS):
        missing = missing_output(expected.code, ran.stdout)
        assert missing is None, f"{expected.where}: {block.where} does not print {missing!r}, but\n{ran.stdout}"


def one(text: str) -> Block:
    (block,) = blocks(text, "doc.md")
    return block


def test_blocks_are_found_with_their_options_and_lines():
    text = "a\n```python ranks=2 run=slow\nx = 1\n\ny = 2\n```\n- item\n  ~~~bash\n  ls \\\n    -l  # long\n  ~~~\n"
    first, second = blocks(text, "doc.md")
    assert (first.where, first.ranks, first.is_slow, first.code) == ("doc.md:2", 2, True, "x = 1\n\ny = 2\n")
    assert (second.where, commands(second)) == ("doc.md:8", ["ls -l"])


def test_a_console_block_runs_its_prompts_only():
    assert commands(one("```console\n$ echo a\na\n$ echo b\n```\n")) == ["echo a", "echo b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```\nls\n```\n", "must name its language"),
        ("```zsh\nls\n```\n", "must name its language"),
        ("```bash run=never\nls\n```\n", "no fence knows the option 'run=never'"),
        ("```python no-run\nls\n```\n", "no fence knows the option 'no-run'"),
        ("```bash ranks=2\nls\n```\n", "are for python"),
        ("```text\n$ make train\n```\n", "make it `console`"),
        ("```text run=slow\nls\n```\n", "no fence knows the option"),
        ("```bash\nls\n", "never closed"),
    ],
)
def test_a_fence_that_nobody_would_run_is_an_error(text, message):
    with pytest.raises(FenceError, match=message):
        check(one(text))


@pytest.mark.parametrize(
    "command",
    [
        'make train ARGS="--new"',
        "make",
        "make test ARGS=x",
        "pip install dshard",
        "OMP_NUM_THREADS=1 python examples/train.py",
        "pytest",
    ],
)
def test_a_new_command_without_a_row_is_an_error(command):
    with pytest.raises(FenceError, match="no row says how it is tested"):
        shell_script(one(f"```bash\n{command}\n```\n"), RUN_AS, NEEDS_ROW)


def test_a_command_with_a_row_runs_as_the_row_says_and_others_as_typed():
    script = shell_script(one("```bash\nls\nmake test  # all\n```\n"), RUN_AS, NEEDS_ROW)
    assert script == f"ls\n{RUN_AS['make test']}\n"


def test_a_python_block_can_continue_those_before_it():
    first, second, third = blocks("```python\na\n```\n```python continues\nb\n```\n```python\nc\n```\n", "doc.md")
    assert python_script(second, [first]) == "a\n\nb\n"
    assert python_script(third, [first, second]) == "c\n"
    with pytest.raises(FenceError, match="no python block before it"):
        python_script(second, [])


def test_the_output_of_a_python_block_is_compared_line_by_line():
    first, second = blocks("```python\na\n```\n```text output\nx ... z\ny\n```\n", "doc.md")
    assert expected_output(first, [first, second]) == second
    assert expected_output(second, [first, second]) is None
    assert missing_output(second.code, "x 1 z\nother\ny\n") is None
    assert missing_output(second.code, "y\nx 1 z\n") == "y"
    assert missing_output(second.code, "x 1\ny\n") == "x ... z"


def test_an_output_of_what_is_no_python_block_is_an_error():
    every = blocks("```bash\nls\n```\n```text output\nx\n```\n", "doc.md")
    with pytest.raises(FenceError, match="is not compared"):
        expected_output(every[0], every)


def test_every_replaced_make_target_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {command.split()[1] for command in RUN_AS if command.startswith("make ")} <= targets
