"""Errors that raise nothing are found by `verify_sharding`, and named; correct programs are not blamed."""

from functools import partial

import pytest

from dshard.testing import verify_sharding
from tests.testing import silent, silent_steps
from tests.testing.silent_models import MODELS, build, sample


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", silent.PLANTED)
def test_a_silent_error_is_found_and_named_in_models_of_every_kind(worlds, name, kind):
    said = silent.verify(worlds, name, kind)
    expected = "harmless" if name in silent.HARMLESS else "named"
    assert silent.judged(name, said) == expected, said or "nothing is said"


def test_at_least_twenty_classes_are_planted_besides_the_harmless_ones():
    assert silent.HARMLESS.keys() <= silent.PLANTED.keys()
    assert len(silent.PLANTED) - len(silent.HARMLESS) >= 20


STEPS = [None, silent_steps.right, silent_steps.right_clipped, silent_steps.right_parts, silent_steps.right_measured]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("step", STEPS)
def test_correct_programs_are_not_blamed(worlds, kind, step):
    report = verify_sharding(
        *silent.Planted(()).arguments(kind) if step is None else (partial(build, kind), sample(kind)),
        worlds=(2,),
        settings=["full", "mix"],
        steps=2,
        step=step,
        pool=worlds,
    )
    assert "\n".join(map(str, report.differences)) == ""
    assert [bool(row.num_compared) for row in report.rows] == [True, True]
