"""A model built on the meta device, sharded, and initialised after is the one that was initialised eagerly."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.testing import WorldPool
from tests.models import Block
from tests.parity.models import CASES, batch, build, full_weights, shard

SEED = 7


def custom_init(model: nn.Module) -> None:
    """`torch.nn.init` functions over all parameters, in order; each function of its own kind of parameter."""
    for name, p in model.named_parameters():
        if name.endswith("norm1.weight") or name == "scale":
            nn.init.constant_(p, 1.25)
        elif p.dim() > 3:
            nn.init.kaiming_normal_(p, mode="fan_out", nonlinearity="relu")
        elif name.endswith("qkv.weight"):
            nn.init.xavier_uniform_(p, gain=0.5)
        elif name.endswith("up.weight"):
            nn.init.trunc_normal_(p, std=0.1, a=-0.15, b=0.15)
        elif name.endswith("out.weight"):
            nn.init.orthogonal_(p)
        elif p.dim() > 1:
            nn.init.normal_(p, mean=0.01, std=0.2)
        else:
            nn.init.uniform_(p, -0.1, 0.1)


def reset_all(model: nn.Module) -> None:
    """`reset_parameters` of every submodule that has it, in the order of construction."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]


def on_meta(name: str, manual: bool, init: str, seed_ranks_apart: bool, **options: Any) -> nn.Module:
    """Build on meta, shard, allocate, and initialise."""
    with torch.device("meta"):
        model = CASES[name].build()
    shard(name, model, manual=manual, **options)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(SEED + (dist.get_rank() if seed_ranks_apart else 0))
    with torch.no_grad():
        if init == "reset":
            reset_all(model)
            if name == "uneven":
                model.scale.fill_(1.5)  # type: ignore[union-attr,operator]
        else:
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.reset_running_stats()
            custom_init(model)
    return model


def eager(name: str, init: str) -> nn.Module:
    model = build(name, SEED)
    if init == "custom":
        torch.manual_seed(SEED)
        with torch.no_grad():
            custom_init(model)
    return model


def initial(name: str, manual: bool, init: str, apart: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    model = on_meta(name, manual, init, apart)
    types = {type(p) for p in model.parameters()}
    assert types == {dshard.ShardedTensor}
    num_local = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[operator]
    return full_weights(model), {n: b.clone() for n, b in model.named_buffers()}, num_local


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


# `reset_parameters` of a head tied to an embedding would draw into the embedding: ties take the custom one.
INITS = [(name, "reset") for name in CASES if name != "tied"] + [(name, "custom") for name in CASES]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "init"), INITS)
def test_init_after_sharding_on_meta_equals_eager_init_bit_for_bit(worlds: WorldPool, num_ranks, name, init):
    model = eager(name, init)
    results = worlds.run(num_ranks, initial, name, num_ranks % 2 == 0, init, False)
    for weights, buffers, _ in results:
        assert_equal(weights, full_weights(model))
        assert_equal(buffers, dict(model.named_buffers()))
    if name != "uneven":  # which has a parameter that every rank holds whole
        assert sum(n for _, _, n in results) == sum(p.numel() for p in model.parameters())


# Finds: `orthogonal_` in the GPTs' custom init draws on each rank for itself.
@pytest.mark.parametrize(
    ("name", "init"), [("gpt", "reset"), ("uneven", "reset"), ("tied", "custom"), ("lstm", "custom")]
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_with_seeds_of_their_own_get_the_weights_of_rank_0(worlds: WorldPool, num_ranks, name, init):
    for weights, _, _ in worlds.run(num_ranks, initial, name, True, init, True):
        assert_equal(weights, full_weights(eager(name, init)))


def draw_after_init(apart: bool) -> float:
    on_meta("gpt", True, "reset", apart)
    return torch.rand(()).item()


def test_random_states_after_the_init_are_those_of_the_eager_program_or_each_ranks_own(worlds: WorldPool):
    build("gpt", SEED)
    expected = torch.rand(()).item()
    assert worlds.run(2, draw_after_init, False) == [expected, expected]
    torch.manual_seed(SEED + 1)
    own = torch.rand(()).item()
    assert worlds.run(2, draw_after_init, True) == [expected, own]


def test_a_tie_survives_meta_sharding_and_to_empty(worlds: WorldPool):
    assert worlds.run(2, is_tied) == [True, True]


def is_tied() -> bool:
    model: Any = on_meta("tied", True, "custom", False)
    return model.head.weight is model.tokens.weight and len(list(model.parameters())) == len(full_weights(model))


def train_three(name: str, init: str, meta: bool, optimizer_first: bool) -> tuple[list[float], dict[str, Tensor]]:
    if meta and optimizer_first:
        with torch.device("meta"):
            model: Any = CASES[name].build()
        shard(name, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model.to_empty(device="cpu")
        torch.manual_seed(SEED)
        with torch.no_grad():
            custom_init(model)
    else:
        model = on_meta(name, True, init, False) if meta else eager(name, init)
        if not meta:
            shard(name, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = batch(name, 0, step, dist.get_rank())
        loss = CASES[name].loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, full_weights(model)


@pytest.mark.parametrize(
    ("name", "init"), [("gpt", "reset"), ("tied", "custom"), ("conv", "custom"), ("lstm", "reset")]
)
def test_three_steps_after_a_meta_init_are_those_after_an_eager_init(worlds: WorldPool, name, init):
    found = worlds.run(2, train_three, name, init, True, False)
    expected = worlds.run(2, train_three, name, init, False, False)
    for (losses, weights), (other_losses, other_weights) in zip(found, expected, strict=True):
        assert losses == other_losses
        assert_equal(weights, other_weights)


@pytest.mark.parametrize("name", ["gpt", "tied"])
def test_an_optimizer_made_on_meta_trains_after_to_empty(worlds: WorldPool, name):
    found = worlds.run(2, train_three, name, "custom", True, True)
    expected = worlds.run(2, train_three, name, "custom", False, False)
    for (losses, weights), (other_losses, other_weights) in zip(found, expected, strict=True):
        assert losses == other_losses
        assert_equal(weights, other_weights)


def peak_local_bytes() -> tuple[int, int]:
    """Storage bytes that `to_empty` gives, and those of the full model."""
    with torch.device("meta"):
        model = nn.Sequential(*[Block() for _ in range(4)])
    for block in model:
        dshard.fully_shard(block)
    dshard.fully_shard(model)
    total = sum(p.nbytes for p in model.parameters())
    model.to_empty(device="cpu")
    return sum(p.to_local().untyped_storage().nbytes() for p in model.parameters()), total  # type: ignore[operator]


def test_to_empty_allocates_a_shard_of_each_parameter(worlds: WorldPool):
    for local, total in worlds.run(4, peak_local_bytes):
        assert local == total // 4


def hooks_from_meta() -> list[int]:
    """Hooks that were registered on the meta device: one of each kind, on each parameter."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    dshard.fully_shard(model)
    seen = [0, 0]

    def count(kind: int) -> None:
        seen[kind] += 1

    for p in model.parameters():
        p.register_hook(lambda grad: count(0))
        p.register_post_accumulate_grad_hook(lambda p: count(1))
    model.to_empty(device="cpu")
    model(torch.ones(1, 4)).sum().backward()
    return seen


def test_hooks_from_before_to_empty_fire_once(worlds: WorldPool):
    assert worlds.run(2, hooks_from_meta) == [[4, 4]] * 2
