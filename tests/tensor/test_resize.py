"""A parameter that is given data of another size, as an embedding of more tokens is, is cut anew."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dshard
from dshard.testing import WorldPool


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6)).double()


def step(model: nn.Module, batches: list[torch.Tensor]) -> None:
    """On the mean over batches: in one process over those of all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.stack([model(tokens).square().sum() for tokens in batches]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def batches(num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    return [torch.randint(0, num_tokens, (5,), generator=generator) for _ in range(dist.get_world_size())]


def resize_and_train(size: int, *, root_alone: bool) -> tuple[float, tuple[int, ...], list[int]]:
    plain, sharded, rank = plain_model(), plain_model(), dist.get_rank()
    for layer in [] if root_alone else sharded:
        dshard.fully_shard(layer)
    dshard.fully_shard(sharded)
    for num_tokens in (6, size):
        for model in (plain, sharded):
            new = torch.arange(num_tokens * 4.0, dtype=torch.float64).view(num_tokens, 4).sin()
            new[: min(6, num_tokens)] = model[0].weight.data[: min(6, num_tokens)]
            model[0].weight.data = new
        for _ in range(2):
            step(plain, batches(num_tokens))
            step(sharded, batches(num_tokens)[rank : rank + 1])
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    apart = max((p.full_tensor() - q).abs().max().item() for p, q in pairs)
    weight = sharded[0].weight
    with dshard.gathered(weight) as full:
        assert [value.shape for value in full.values()] == [weight.shape]
    return apart, tuple(weight.shape), [weight.to_local().shape[0], weight.numel()]


@pytest.mark.parametrize("root_alone", [True, False])
@pytest.mark.parametrize("size", [4, 9, 12])
def test_a_resized_parameter_trains_as_the_plain_one(worlds: WorldPool, size, root_alone):
    results = worlds.run(2, resize_and_train, size, root_alone=root_alone)
    for apart, shape, (_, numel) in results:
        assert apart <= 1e-12
        assert shape == (size, 4)
        assert numel == 4 * size
    assert sum(rows for *_, (rows, _) in results) == size


def give_other_dims() -> str:
    model = dshard.fully_shard(plain_model())
    with pytest.raises(dshard.PlacementError) as caught:
        model[0].weight.data = torch.zeros(24)
    return str(caught.value)


def test_data_of_other_dims_is_refused_by_name(worlds: WorldPool):
    for text in worlds.run(2, give_other_dims):
        assert text.startswith("0.weight: .data of a sharded tensor can be set to a tensor of as many dims as its own")
