"""While an elementwise optimizer steps, shards stand in for the parameters, and nobody else can tell."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dshard
from dshard.testing import WorldPool


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def with_gradients(net: nn.Module) -> nn.Module:
    net(torch.ones(2, 5)).square().sum().backward()
    return net


class Breaks(float):
    """A learning rate that raises at its second use."""

    uses = 0

    def __rmul__(self, other):
        Breaks.uses += 1
        if Breaks.uses > 1:
            raise KeyboardInterrupt
        return float(self) * other

    def __neg__(self):
        Breaks.uses += 1
        if Breaks.uses > 1:
            raise KeyboardInterrupt
        return -float(self)


def interrupted_step(num_layers: int) -> dict[str, object]:
    Breaks.uses = 0
    net = with_gradients(dshard.fully_shard(nn.Sequential(*(nn.Linear(5, 5) for _ in range(num_layers)))))
    params = list(net.parameters())
    groups = [{"params": params[::2], "lr": Breaks(0.1)}, {"params": params[1::2], "lr": Breaks(0.1)}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    with pytest.raises(dshard.StateError, match="SGD: a step must run to its end") as raised:
        net(torch.ones(2, 5))
    seen = [param for group in optimizer.param_groups for param in group["params"]]
    held = all(p is q for p, q in zip(seen, params[::2] + params[1::2], strict=True))
    optimizer.zero_grad()
    with_gradients(net)
    optimizer.step()
    return {
        "held": held,
        "text": str(raised.value),
        "sharded": all(isinstance(p, dshard.ShardedTensor) for p in params),
    }


@pytest.mark.parametrize("num_layers", [2, 5])  # of five, weights and biases are stepped in a row each
def test_an_interrupted_step_is_repaired_and_told_once(worlds: WorldPool, num_layers):
    for told in worlds.run(2, interrupted_step, num_layers):
        assert told["held"]
        assert told["sharded"]
        assert "zero_grad() again" in told["text"]


def interrupted_fused_step() -> bool:
    """Whether a forward after a fused step that raised in its second group computes with what the first one wrote."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    dshard.fully_shard(net, strategy="zero2", mp_policy=torch.bfloat16)  # whose gathered copies stay
    groups = [{"params": list(layer.parameters())} for layer in net]
    optimizer = torch.optim.SGD(groups, lr=0.5, fused=True)
    for _ in range(2):
        net(torch.ones(2, 8)).sum().backward()
    fused, num_calls = torch._fused_sgd_, 0

    def raises_in_the_second_group(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise KeyboardInterrupt
        return fused(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_fused_sgd_", raises_in_the_second_group)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    with torch.no_grad():
        found = net(torch.ones(2, 8))
        for layer in net:
            layer.weight.add_(0)  # what is gathered is stale, whatever was counted
            layer.bias.add_(0)
        return torch.equal(found, net(torch.ones(2, 8)))


def test_what_an_interrupted_fused_step_wrote_is_gathered(worlds: WorldPool):
    assert worlds.run(2, interrupted_fused_step) == [True, True]


def what_a_hook_sees() -> list[str]:
    net = with_gradients(dshard.fully_shard(model()))
    optimizer = torch.optim.AdamW(net.parameters())
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda o, a, k: seen.extend(type(p).__name__ for p in o.param_groups[0]["params"]))
    optimizer.step()
    optimizer.step(lambda: seen.extend(type(p).__name__ for p in optimizer.param_groups[0]["params"]))
    return seen


def test_hooks_and_closures_of_the_user_see_sharded_parameters(worlds: WorldPool):
    for seen in worlds.run(2, what_a_hook_sees):
        assert set(seen) == {"ShardedTensor"}
        assert len(seen) == 12


def replaced_state() -> bool:
    """A user who puts another tensor into the state between two steps is heard."""
    net = with_gradients(dshard.fully_shard(model()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    weight = net[0].weight
    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    weight.grad.zero_()
    before = weight.full_tensor()
    optimizer.step()
    return torch.equal(before, weight.full_tensor())


def test_a_state_that_was_replaced_between_steps_is_used(worlds: WorldPool):
    assert all(worlds.run(2, replaced_state))


def step_without_gradients(kind: str) -> bool:
    """A forward whose backward comes after a step that moved nothing; whether all is as with the plain model."""
    plain = model()
    net = dshard.fully_shard(copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(net.parameters(), **{kind: True})
    loss = net(torch.ones(2, 5)).sum()
    optimizer.step()
    loss.backward()
    plain(torch.ones(2, 5)).sum().backward()
    return all(
        torch.equal(own.full_tensor(), kept) and torch.equal(own.grad.full_tensor(), kept.grad)
        for own, kept in zip(net.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_a_step_leaves_alone_what_has_no_gradient(worlds: WorldPool, kind):
    assert all(worlds.run(2, step_without_gradients, kind))


def reads_around_a_step(kind: str, how: str) -> list[bool]:
    """Whether copies of before keep their value, and reads after the step see the new one."""
    net = dshard.fully_shard(model(), reshard_after_forward=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **{kind: True})
    with_gradients(net)
    optimizer.step()
    with_gradients(net)
    weight = net[0].weight
    before = weight.full_tensor().clone()
    copies = [weight.detach().clone(), weight.detach().to(torch.float64)]
    states = copy.deepcopy(optimizer.state_dict()["state"][0])
    state_before = optimizer.state[weight]["exp_avg"].full_tensor().clone()
    if how == "unshard":
        net.unshard()
        optimizer.step()
    else:
        with dshard.gathered(net):
            optimizer.step()
    return [
        not torch.equal(weight.full_tensor(), before),
        torch.equal(weight.full_tensor().chunk(dist.get_world_size())[dist.get_rank()], weight.to_local()),
        *(torch.equal(c.full_tensor().float(), before) for c in copies),
        torch.equal(states["exp_avg"].full_tensor(), state_before),
        not torch.equal(optimizer.state[weight]["exp_avg"].full_tensor(), state_before),
    ]


# Found: fused kernels count no writes, so gathered copies stayed and clones of before read the new weight.
@pytest.mark.parametrize("how", ["unshard", "gathered"])
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_after_a_step_no_gathered_copy_is_stale_and_copies_of_before_keep_their_value(worlds: WorldPool, kind, how):
    assert worlds.run(2, reads_around_a_step, kind, how) == [[True] * 6] * 2


# Between ranks of one host copies are freed ahead of the step, whatever its kernels count.
@pytest.mark.parametrize("how", ["unshard", "gathered"])
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_so_it_is_where_ranks_exchange_messages(messaging: WorldPool, kind, how):
    assert messaging.run(2, reads_around_a_step, kind, how) == [[True] * 6] * 2
