"""Bugs that were planted by hand: each is noticed by the test that its patch names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import mutants as module
from tests.mutants.mutants import ROOT, Mutant, Outcome, PatchError, killed, mutants, unbroken

MUTANTS = mutants()
EACH = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
LAYOUTS = "tests/unit/test_layout.py"


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A copy of the repository in which the tests pass that are to fail."""
    chosen = [
        item.callspec.params["mutant"] for item in request.session.items if getattr(item, "originalname", "") == KILLS
    ]
    with unbroken([LAYOUTS, *(mutant.test for mutant in chosen)]) as (source, without):
        assert without.word == "passed", without.output
        yield source


@pytest.mark.slow
@EACH
def test_a_mutant_is_killed(mutant: Mutant, source: Path):
    outcome = killed(mutant, source)
    assert outcome.is_killed, f"{mutant.name} {outcome.verdict}: {mutant.broken}\n{outcome.output}"


KILLS = test_a_mutant_is_killed.__name__


@EACH
def test_a_patch_is_a_mutant_of_the_code_as_it_is(mutant: Mutant):
    assert all(path.startswith("dshard/") for path in mutant.applied())
    assert mutant.broken.endswith(".")
    path, _, rest = mutant.test.partition("::")
    names = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)}
    assert rest.partition("[")[0] in names


def planted(folder: Path, before: str, after: str, test: str) -> Mutant:
    """A mutant of `dshard/layout.py` by one line."""
    header = f"It is broken.\n\nKilled-by: {LAYOUTS}::{test}\n\ndiff --git a/dshard/layout.py b/dshard/layout.py\n"
    path = folder / "00_planted.patch"
    path.write_text(f"{header}--- a/dshard/layout.py\n+++ b/dshard/layout.py\n@@ -1 +1 @@\n-{before}\n+{after}\n")
    return Mutant(path)


NUMEL = "        return math.prod(self.shape)"
LOCAL_NUMEL = "        return math.prod(self.local_shape(rank))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "test", "verdict"),
    [
        (NUMEL, f"{NUMEL} + 1", "test_a_0d_tensor_is_whole_on_every_rank", "killed"),
        (NUMEL, f"{NUMEL} + 1", "test_ranks_past_the_end_hold_empty_shards", "SURVIVED"),
        (LOCAL_NUMEL, "        while True:\n+            pass", "test_ranks_past_the_end_hold_empty_shards", "hung"),
        (LOCAL_NUMEL, "        return of_no_such_name", "test_ranks_past_the_end_hold_empty_shards", "broken"),
        (NUMEL, f"{NUMEL} + 1", "test_of_no_such_name", "broken"),
    ],
    ids=["noticed", "unnoticed", "hangs", "stale code", "stale test"],
)
def test_what_becomes_of_a_mutant_is_told(source: Path, tmp_path, before, after, test, verdict):
    outcome = killed(planted(tmp_path, before, after, test), source, limit_s=60.0 if verdict != "hung" else 8.0)
    assert outcome.verdict == verdict, outcome.output
    assert outcome.is_killed == (verdict in ("killed", "hung"))


@pytest.mark.parametrize("word", ["passed", "failed"])
def test_what_fails_without_a_bug_is_tested_once_more_alone(monkeypatch, word):
    failed = "FAILED tests/a.py::test_b[c d] - assert 1 == 2\nERROR tests/a.py::test_e\n1 passed, 1 failed, 1 error"
    outcomes = [Outcome("failed", 1.0, "", failed), Outcome(word, 1.0, "", "")]
    asked: list[list[str]] = []

    def tested(root: Path, tests: list[str], limit_s: float) -> Outcome:
        asked.append(tests)
        return outcomes[len(asked) - 1]

    monkeypatch.setattr(module, "tested", tested)
    with unbroken(["tests/a.py::test_e", "tests/a.py"]) as (_, outcome):
        assert outcome.word == word
    assert asked == [["tests/a.py", "tests/a.py::test_e"], ["tests/a.py::test_b[c d]", "tests/a.py::test_e"]]


def test_a_failure_that_names_no_test_is_not_run_again(monkeypatch):
    outcomes = iter([Outcome("failed", 1.0, "", "no summary")])  # a second run would be of all tests that there are
    monkeypatch.setattr(module, "tested", lambda *_: next(outcomes))
    with unbroken(["tests/a.py"]) as (_, outcome):
        assert outcome.word == "failed"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("        return of_no_such_name", NUMEL, "must be once in dshard/layout.py, but they are 0 times"),
        ("@dataclass(frozen=True, slots=True)", "@dataclass(frozen=True)", "but they are 3 times"),
        (NUMEL, f"{NUMEL}  # all of them", "must change the code of dshard/layout.py, but it does not"),
    ],
    ids=["not there", "several times", "a comment"],
)
def test_a_patch_that_is_no_mutant_is_refused(tmp_path, before, after, message):
    with pytest.raises(PatchError, match=message):
        planted(tmp_path, before, after, "test_layouts_are_values").applied()
