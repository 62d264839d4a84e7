"""Bugs that were planted by hand: each is noticed by the test that its patch names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.mutants import ROOT, Mutant, killed, mutants, unbroken

MUTANTS = mutants()


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A copy of the repository in which the tests pass that are to fail."""
    chosen = [item.callspec.params["mutant"] for item in request.session.items if item.path == request.path]
    with unbroken(mutant.test for mutant in chosen) as (source, without):
        assert without.word == "passed", without.output
        yield source


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed(mutant: Mutant, source: Path):
    outcome = killed(mutant, source)
    assert outcome.is_killed, f"{mutant.name} {outcome.verdict}: {mutant.broken}\n{outcome.output}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_patch_is_a_mutant_of_the_code_as_it_is(mutant: Mutant):
    assert all(path.startswith("dshard/") for path in mutant.applied())
    assert mutant.broken.endswith(".")
    path, _, rest = mutant.test.partition("::")
    names = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)}
    assert rest.partition("[")[0] in names
