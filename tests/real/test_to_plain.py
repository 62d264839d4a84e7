"""`to_plain` undoes `fully_shard`: the model, its optimizer and its hooks are plain again."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.testing import WorldPool, expect_error

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "keep": {"strategy": "keep"},
    "full": {},
    "mix": {"strategy": {"*bias*": "ddp", "*": "full"}},
    "slices": {"strategy": {"mid.weight": "split(2)", "*": "full"}},
    "bf16": {"mp_policy": {"norm.*": None, "*": torch.bfloat16}},
    "hybrid(2)": {"strategy": "hybrid(2)"},
}


class Net(nn.Module):
    """Tied weights, a list of weights of its own (LSTM), buffers, and a method that is registered as a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.mid = nn.Embedding(16, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def features(self, tokens: Tensor) -> Tensor:
        return self.mid(self.rnn(self.embed(tokens))[0])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.features(tokens)
        return self.head(self.norm(hidden.flatten(0, 1)).view_as(hidden))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def tokens(step: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def step_with(model: Any, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    model(batch).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def full(value: Any) -> Any:
    return value.full_tensor().detach().clone() if hasattr(value, "full_tensor") else copy.deepcopy(value)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    named = {name: optimizer.state[param] for name, param in model.named_parameters() if param in optimizer.state}
    return {f"{name}.{key}": full(value) for name, state in named.items() for key, value in state.items()}


def there_and_back(name: str, is_early: bool) -> None:
    model = net()
    kinds, keys = [type(module) for module in model.modules()], list(model.state_dict())
    calls: list[int] = []
    model.mid.weight.register_hook(lambda _: calls.append(1))
    model.mid.weight.note = "kept"
    early = torch.optim.AdamW(model.parameters(), 0.01)
    dshard.fully_shard(model, **STRATEGIES[name])
    dshard.register_fsdp_forward_method(model, "features")
    optimizer = early if is_early else torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(2):
        step_with(model, optimizer, tokens(step))
    model(tokens(5)).float().square().mean().backward()
    expected = {key: full(value) for key, value in model.state_dict().items()}
    grads = {key: full(param.grad) for key, param in model.named_parameters()}
    expected_states, sharded = states(model, optimizer), model.mid.weight

    assert dshard.to_plain(model) is model

    assert [type(module) for module in model.modules()] == kinds
    assert list(model.state_dict()) == keys
    assert model.head.weight is model.embed.weight
    assert model.mid.weight.note == "kept"
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    for key, param in model.named_parameters():
        assert type(param) is nn.Parameter
        assert torch.equal(param.grad, grads[key])
        assert any(param is held for group in optimizer.param_groups for held in group["params"])
    found = states(model, optimizer)
    assert found.keys() == expected_states.keys()
    assert all(
        torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)) for key, value in expected_states.items()
    )
    left = [key for module in model.modules() for key in vars(module) if "dshard" in key or "fsdp" in key]
    left += [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    assert left == []
    assert "features" not in vars(model)
    with pytest.raises(dshard.StateError, match="to_plain has made this parameter a plain one"):
        sharded.sum()
    pickle.loads(pickle.dumps(model))
    num_calls = len(calls)
    with dshard.CommTrace() as trace:
        optimizer.step()
        optimizer.zero_grad()
        step_with(copy.deepcopy(model), torch.optim.SGD(model.parameters(), 0.1), tokens(9, rank=0))
        step_with(model, optimizer, tokens(9, rank=0))
    assert trace.records == []
    assert len(calls) > num_calls
    dshard.fully_shard(model)  # which compares the ranks' weights
    step_with(model, optimizer, tokens(7))
    assert isinstance(model.mid.weight, dshard.ShardedTensor)
    assert "exp_avg" in optimizer.state[model.mid.weight]


@pytest.mark.parametrize("is_early", [False, True], ids=["made after", "made before"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_all_is_as_it_was_with_the_values_of_the_training(worlds: WorldPool, name, is_early):
    worlds.run(4 if name == "hybrid(2)" else 2, there_and_back, name, is_early)


def on_one_rank(rank: int) -> tuple[bool, bool, list[Tensor], list[Tensor]]:
    """Whether parameters and states are on the meta device, values there, and those that were to be."""
    model = dshard.fully_shard(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step_with(model, optimizer, tokens(0))
    expected = [full(param) for param in model.parameters()]
    dshard.to_plain(model, rank=rank)
    held = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
    params = list(model.parameters())
    values = [] if params[0].is_meta else [param.detach() for param in params]
    return all(p.is_meta for p in params), all(v.is_meta for v in held), values, expected


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_may_have_all_values_and_the_others_none(worlds: WorldPool, rank):
    for own, (is_meta, are_meta, values, expected) in enumerate(worlds.run(2, on_one_rank, rank)):
        assert is_meta == are_meta == (own != rank)
        assert own != rank or all(map(torch.equal, values, expected))


def refused(how: str) -> None:
    model = net()
    dshard.fully_shard(model.mid)
    dshard.fully_shard(model)
    if how == "part":
        dshard.to_plain(model.mid)
    elif how == "rank":
        dshard.to_plain(model, rank=2)
    elif how == "running":
        model.mid.register_forward_hook(lambda *_: dshard.to_plain(model))
        model(tokens(0))
    elif how == "plain":
        dshard.to_plain(nn.Linear(2, 2))


REFUSED = {
    "part": "model must be the outermost sharded module, but this FSDPLinear lies in a sharded FSDPNet",
    "rank": "rank must be one of the 2 ranks of the model's mesh, but it is 2",
    "running": "a model changes between two steps, but a forward is open",
    "plain": "model must be",
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_be_made_plain_is_refused(worlds: WorldPool, how):
    for _, text in expect_error(worlds.get_world(2), refused, how):
        assert REFUSED[how] in text
