"""`fully_shard(model, auto_wrap_policy=...)`: the modules that torch's FSDP1 chooses become units."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

import dshard
from dshard.testing import WorldPool


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: torch.Tensor = x + self.mlp(y)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(3)])
        self.heads = nn.ModuleDict({"first": nn.Linear(8, 4), "second": nn.Linear(8, 11)})
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.heads["second"](x).square().mean() + self.heads["first"](x).square().mean()
        return out


def is_wide(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features > 8


POLICIES: dict[str, Any] = {
    "module classes": ModuleWrapPolicy({Block, nn.Embedding}),
    "nested classes": ModuleWrapPolicy({Block, nn.Linear}),
    "transformer": partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "size 100": partial(size_based_auto_wrap_policy, min_num_params=100),
    "size 140": partial(size_based_auto_wrap_policy, min_num_params=140),  # an mlp keeps 136 beside a unit in it
    "size 300": partial(size_based_auto_wrap_policy, min_num_params=300),
    "size 2000": partial(size_based_auto_wrap_policy, min_num_params=2000),
    "size with classes": partial(
        size_based_auto_wrap_policy, min_num_params=100, force_leaf_modules={Block}, exclude_wrap_modules={nn.Embedding}
    ),
    "lambda": partial(lambda_auto_wrap_policy, lambda_fn=is_wide),
    "either": partial(
        _or_policy,
        policies=[
            partial(lambda_auto_wrap_policy, lambda_fn=is_wide),
            partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        ],
    ),
    "custom": CustomPolicy(lambda m: isinstance(m, Block)),
    "custom with strategy": CustomPolicy(
        lambda m: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if isinstance(m, Block) else False
    ),
}
OURS: dict[str, tuple[Any, str]] = {
    "a set of classes": ({Block, nn.Embedding}, "module classes"),
    "a list of classes": ([Block, nn.Linear], "nested classes"),
    "a class": (Block, "transformer"),
    "a function": (is_wide, "lambda"),
}


def chosen_by_fsdp1(name: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and not made for the CPU
        model = FullyShardedDataParallel(
            Model(), auto_wrap_policy=POLICIES[name], device_id=torch.device("cpu"), cpu_offload=CPUOffload(False)
        )
    names = [
        n.removeprefix("_fsdp_wrapped_module.").replace("._fsdp_wrapped_module", "")
        for n, m in model.named_modules()
        if isinstance(m, FullyShardedDataParallel) and m is not model
    ]
    return sorted(names)


def chosen_by_dshard(policy: Any) -> list[str]:
    model = dshard.fully_shard(Model(), auto_wrap_policy=policy)
    return sorted(n for n, m in model.named_modules() if isinstance(m, dshard.FSDPModule) and m is not model)


def chosen_by_ours(name: str) -> list[str]:
    return chosen_by_dshard(OURS[name][0])


def chosen_by_torchs(name: str) -> list[str]:
    return chosen_by_dshard(POLICIES[name])


@pytest.mark.parametrize("name", POLICIES)
def test_torchs_policies_choose_the_modules_that_fsdp1_wraps(worlds: WorldPool, name):
    expected = worlds.run(2, chosen_by_fsdp1, name)
    assert worlds.run(2, chosen_by_torchs, name) == expected
    assert expected[0] or name == "size 2000"


@pytest.mark.parametrize("name", OURS)
def test_the_short_forms_choose_as_torchs_policies_do(worlds: WorldPool, name):
    assert worlds.run(2, chosen_by_ours, name) == worlds.run(2, chosen_by_fsdp1, OURS[name][1])


def everything() -> list[str]:
    return chosen_by_dshard(always_wrap_policy)


def test_modules_of_which_no_parameter_is_left_are_passed_over(worlds: WorldPool):
    leaves = sorted(n for n, m in Model().named_modules() if n and any(True for _ in m.parameters(recurse=False)))
    assert worlds.run(2, everything) == [leaves] * 2


def trained(name: str | None) -> list[Any]:
    """Units, losses, and gathers of the last step."""
    model: Any = Model()
    if name is None:
        for block in model.blocks:
            dshard.fully_shard(block)
        dshard.fully_shard(model)
    else:
        dshard.fully_shard(model, auto_wrap_policy=POLICIES[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        with dshard.CommTrace() as trace:
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            loss = model(torch.randint(0, 11, (2, 5), generator=generator))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [[unit.label for unit in model._context().units], losses, trace.calls("all_gather")]


def test_a_policy_trains_as_the_same_units_made_by_hand(worlds: WorldPool):
    assert worlds.run(2, trained, "transformer") == worlds.run(2, trained, None)
    by_strategy = worlds.run(2, trained, "custom with strategy")  # SHARD_GRAD_OP: no second gather of a block
    for (labels, losses, gathers), (kept_labels, kept_losses, kept_gathers) in zip(
        worlds.run(2, trained, None), by_strategy, strict=True
    ):
        assert (labels, losses) == (kept_labels, kept_losses)
        assert kept_gathers == gathers - 3


def ignored_and_sharded() -> None:
    model: Any = Model()
    ignored = set(model.blocks[0].parameters())
    by_hand = dshard.fully_shard(model.blocks[1])
    dshard.fully_shard(model, auto_wrap_policy={Block}, ignored_params=ignored)
    assert not isinstance(model.blocks[0], dshard.FSDPModule)
    assert all(type(p) is nn.Parameter for p in model.blocks[0].parameters())
    assert model.blocks[1] is by_hand
    assert isinstance(model.blocks[2], dshard.FSDPModule)
    # counted without what is ignored: blocks[0] has nothing left, so no size is enough
    again: Any = Model()
    dshard.fully_shard(
        again,
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=1),
        ignored_params=set(again.blocks[0].parameters()),
    )
    assert not [m for m in again.blocks[0].modules() if isinstance(m, dshard.FSDPModule)]
    tied: Any = Model()
    tied.heads["second"].weight = tied.embedding.weight
    dshard.fully_shard(tied, auto_wrap_policy={nn.Embedding, nn.Linear})
    assert tied.heads["second"].weight is tied.embedding.weight
    tied(torch.zeros(1, 2, dtype=torch.long)).backward()
    several: Any = [Model(), Model()]
    dshard.fully_shard(several, auto_wrap_policy={Block, Model})
    assert sum(isinstance(m, dshard.FSDPModule) for model in several for m in model.modules()) == 8


def test_what_is_ignored_or_sharded_is_passed_over_and_ties_hold(worlds: WorldPool):
    worlds.run(2, ignored_and_sharded)


REFUSED: dict[str, tuple[Any, str]] = {
    "mixed precision": (
        CustomPolicy(lambda m: {"mixed_precision": 1} if isinstance(m, Block) else False),
        "for a Block",
    ),
    "no shard": (
        CustomPolicy(lambda m: {"sharding_strategy": ShardingStrategy.NO_SHARD} if isinstance(m, Block) else False),
        "sharding_strategy=ShardingStrategy.NO_SHARD",
    ),
    "a name": ("Block", "but it is 'Block'"),
    "names": (["Block"], "but it is ['Block']"),
    "no bool": (lambda module: 1, "it returned 1"),
}


def refused(name: str) -> str:
    model = Model()
    error = dshard.ArgumentError if name in ("a name", "names") else (dshard.StateError, dshard.UnsupportedOpError)
    with pytest.raises(error) as raised:
        dshard.fully_shard(model, auto_wrap_policy=REFUSED[name][0])
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return str(raised.value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_policy_that_cannot_be_honoured_is_refused_and_the_model_left_as_it_was(worlds: WorldPool, name):
    for text in worlds.run(2, refused, name):
        assert text.startswith("fully_shard: ")
        assert REFUSED[name][1] in text


def placed_badly() -> None:
    model = Model()
    from torch.distributed.tensor import Shard

    with pytest.raises(dshard.PlacementError, match=r"^scale: "):
        dshard.fully_shard(model, auto_wrap_policy={Block}, shard_placement_fn=lambda p: Shard(int(p is model.scale)))
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_a_placement_that_the_last_parameter_cannot_have_leaves_the_model_as_it_was(worlds: WorldPool):
    worlds.run(2, placed_badly)
