"""What was saved is what is loaded, bit for bit, at any number of ranks and under any strategy."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dshard.checkpoint import load, save
from dshard.testing import WorldPool
from dshard.testing.strategies import world_sizes
from tests.dist.checkpoints import (
    FROZEN,
    OPTIMIZERS,
    STRATEGIES,
    Recipe,
    everything,
    made,
    optimizers_of,
    random_states,
    train,
)

SIZES = st.sampled_from([0, 1, 2, 3, 5, 8])


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    shapes = draw(st.lists(st.lists(SIZES, max_size=3).map(tuple), min_size=1, max_size=4))
    return Recipe(
        tuple(shapes),
        dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
        frozen=tuple(draw(st.lists(st.sampled_from(FROZEN), max_size=3))),
        tied=draw(st.booleans()),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def saved(path: Path, recipe: Recipe, strategy: Any, kind: str, **options: Any) -> Any:
    torch.manual_seed(dist.get_rank())
    model = made(recipe, strategy)
    optimizer = optimizers_of(kind, model)
    train(model, optimizer, 2)
    save(path, model, optimizer, extra={"rank": dist.get_rank()}, step=2, **options)
    before = everything(model, optimizer), random_states()
    return *before, train(model, optimizer, 2), everything(model, optimizer)


def loaded(path: Path, recipe: Recipe, strategy: Any, kind: str, is_used: bool, device: str | None = None) -> Any:
    torch.manual_seed(100)
    model = made(Recipe(recipe.shapes, recipe.dtype, recipe.frozen, recipe.tied, recipe.strided), strategy, device)
    optimizer = optimizers_of(kind, model)
    if is_used:
        train(model, optimizer, 3)
    extra = load(path, model, optimizer)
    before = everything(model, optimizer), random_states()
    return *before, train(model, optimizer, 2), everything(model, optimizer), extra


@settings(max_examples=40)
@given(
    recipe=recipes(),
    kind=st.sampled_from(["none", "several", *OPTIMIZERS]),
    num_ranks=world_sizes(),
    others=world_sizes(),
    strategies=st.tuples(st.sampled_from(STRATEGIES), st.sampled_from(STRATEGIES)),
    is_used=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:checkpoint.load")
def test_what_is_loaded_is_what_was_saved(
    worlds: WorldPool, tmp_path_factory, recipe, kind, num_ranks, others, strategies, is_used
):
    path = tmp_path_factory.mktemp("a") / "saved"
    if kind == "muon" and not any(len(shape) == 2 for shape in recipe.shapes):
        kind = "adamw"
    before = worlds.run(num_ranks, saved, path, recipe, strategies[0], kind)
    after = worlds.run(others, loaded, path, recipe, strategies[1], kind, is_used)
    for rank, (state, rng, losses, later, extra) in enumerate(after):
        source = before[rank if num_ranks == others else 0]
        assert state == source[0]
        assert extra == {"rank": rank if num_ranks == others else 0}
        if num_ranks == others:
            assert rng == source[1]
            if strategies[0] == strategies[1]:
                assert (losses, later) == source[2:]
