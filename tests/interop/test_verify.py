"""`verify_sharding` blames no model of `transformers`."""

import pytest

from dshard.testing import WorldPool
from tests.interop import models, verifying


@pytest.mark.slow
@pytest.mark.parametrize("name", list(models.MODELS))
def test_a_model_that_trains_the_same_is_not_blamed_under_any_setting(pool: WorldPool, name):
    report = verifying.verify(pool, name)
    print(verifying.line(name, report))
    assert "\n".join(map(str, report.differences)) == ""
    assert [row.setting for row in report.rows if row.num_compared > 400] == list(verifying.SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(models.MODELS))
def test_a_step_in_micro_batches_is_not_blamed_beside_one_on_the_whole_batch(pool: WorldPool, name):
    report = verifying.verify_parts(pool, name)
    assert "\n".join(map(str, report.differences)) == ""
    num_steps, num_parameters = verifying.num_steps(name), len(list(verifying.build(name).parameters()))
    # On two ranks the first weights, the first gradients, and the weights after each step; with a step of the user's,
    # no outputs of modules.
    assert report.rows[0].num_compared >= 2 * num_parameters * (2 + num_steps)


@pytest.mark.slow
def test_a_model_whose_blocks_cannot_be_recomputed_is_not_blamed_but_left_out(pool: WorldPool):
    (row,) = verifying.verify(pool, "t5", ("checkpointing",), has_cache=True).rows
    assert row.difference is None
    assert "the plain model cannot recompute its blocks (CheckpointError" in row.skipped
