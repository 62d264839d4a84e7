"""What `dshard.testing.strategies` draws: what it promises, and that sharded models do with it what plain ones do."""

import numpy as np
import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Shard

import dshard
from dshard.testing import RemoteRankError, WorldPool
from dshard.testing.strategies import LayoutCase, layouts, meshes, sharding_names, shardings, world_sizes
from tests.kit import oracle
from tests.kit.cases import LAYER_KINDS, LayerCase, ModelCase, play
from tests.kit.drawing import commands, model_cases


def names_of(case: ModelCase) -> list[str]:
    return [name for name, _ in case.build().named_parameters()]


def run(worlds: WorldPool, num_ranks: int, case: ModelCase, program, **options) -> None:
    worlds.run(num_ranks, play, case, program, **options)


@settings(max_examples=100)
@given(data=st.data(), num_ranks=world_sizes(), case=model_cases(), program=commands(), dim=st.integers(0, 1))
def test_any_program_does_to_any_small_model_what_it_does_to_a_plain_one(worlds, data, num_ranks, case, program, dim):
    mesh = data.draw(meshes(num_ranks))
    # A strategy says itself how many ranks share a parameter; a mesh of two dims does, too.
    strategy = data.draw(shardings(names_of(case), num_ranks)) if len(mesh.sizes) == 1 else None
    run(worlds, num_ranks, case, program, mesh=mesh, strategy=strategy, dim=dim)


KNOWN = {
    "the value of a tied weight": (
        ModelCase(2, (), num_tokens=5, is_tied=True),
        [("forward", "grad"), ("backward",), ("step",), ("read", "list", "param", 0)],
    ),
    "a view that is written to": (
        ModelCase(3, (LayerCase("mlp", 5),)),
        [("hold", "rows", 2), ("write_held", 0), ("forward", "no_grad"), ("read", "sum", "held", 0)],
    ),
    "a weight that is written to before backward": (
        ModelCase(3, (LayerCase("linear"),)),
        [("forward", "grad"), ("write", "mul", "param", 2), ("backward",), ("forward", "grad"), ("backward",)],
    ),
    "a shared module that is copied": (
        ModelCase(2, (LayerCase("linear"), LayerCase("again"))),
        [("forward", "grad"), ("backward",), ("copy", "pickle"), ("step",), ("train", False), ("forward", "grad")],
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_programs_do_to_a_sharded_model_what_they_do_to_a_plain_one(worlds, name):
    run(worlds, 2, *KNOWN[name])


def play_spoiled(case: ModelCase, what: str) -> None:
    """A model that differs from its plain twin in one small thing."""
    build = ModelCase.sharded

    def spoiled(self: ModelCase, *args) -> nn.Module:
        model = build(self, *args)
        with torch.no_grad():
            if what == "weight":
                model.head.weight.mul_(1 + 1e-6)
            elif what == "error":
                model.forward = torch.add  # raises a TypeError
            else:
                model.head.weight.register_hook(lambda grad: grad * (1 + 1e-6))
        return model

    ModelCase.sharded = spoiled
    try:
        play(case, [("forward", "grad"), ("backward",)])
    finally:
        ModelCase.sharded = build


@pytest.mark.parametrize(
    ("what", "words"),
    [("weight", "what forward('grad',) gives: "), ("gradient", "state at the end: "), ("error", "TypeError")],
)
def test_what_differs_is_named_with_its_command(worlds, what, words):
    with pytest.raises(RemoteRankError, match="rank 0 of 1") as caught:
        worlds.run(1, play_spoiled, ModelCase(3, ()), what)
    assert words in str(caught.value)


def local_shape(case: LayoutCase) -> tuple[int, ...]:
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(case.shape))
    dshard.fully_shard(layer, shard_placement_fn=lambda _: None if case.dim is None else Shard(case.dim))
    return tuple(layer.weight.to_local().shape)


@given(case=st.integers(1, 4).flatmap(lambda num_ranks: layouts(num_ranks=num_ranks)))
def test_a_layout_is_cut_as_the_oracle_cuts_it(worlds, case):
    full = np.zeros(case.shape)
    parts = [oracle.shard(full, case.dim, rank, case.num_ranks) for rank in range(case.num_ranks)]
    assert worlds.run(case.num_ranks, local_shape, case) == [part.shape for part in parts]
    assert case.is_even == (len({part.shape for part in parts}) == 1)


@given(data=st.data(), num_ranks=world_sizes(min_size=2), uneven=st.booleans())
def test_layouts_are_uneven_where_that_is_asked_for(data, num_ranks, uneven):
    assert data.draw(layouts(num_ranks=num_ranks, uneven=uneven)).is_even != uneven


def sizes_of(case) -> tuple[int, ...]:
    return tuple(case.build().shape)


@given(data=st.data(), num_ranks=world_sizes())
def test_a_mesh_has_all_ranks(worlds, data, num_ranks):
    case = data.draw(meshes(num_ranks))
    assert worlds.run(num_ranks, sizes_of, case) == [case.sizes] * num_ranks
    assert np.prod(case.sizes) == num_ranks


def kinds_of(case: ModelCase) -> set[str]:
    inner = {each.kind for layer in case.layers for each in layer.layers}
    return {layer.kind for layer in case.layers} | inner


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_every_kind_of_layer_is_drawn(kind):
    found = find(model_cases(), lambda case: kind in kinds_of(case))
    assert isinstance(found.build(), nn.Module)


def test_strategies_share_within_powers_of_two():
    assert sharding_names(1) == ["ddp", "zero1", "zero2", "keep", "full", "hybrid(1)"]
    assert sharding_names(4)[5:] == ["hybrid(1)", "hybrid(2)", "hybrid(4)", "hybrid(2, keep)", "hybrid(4, keep)"]
    assert sharding_names(6)[5:] == ["hybrid(1)", "hybrid(2)", "hybrid(2, keep)"]
