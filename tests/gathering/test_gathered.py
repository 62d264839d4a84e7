"""`gathered`: what it yields, who holds what, and what becomes of writes."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard.testing import WorldPool

DRAFTS = [{"writeback": True}, {"writeback": True, "offload_to_cpu": True}, {"writeback": True, "rank0_only": True}]
ALL_OPTIONS: list[dict[str, bool]] = [{}, {"offload_to_cpu": True}, {"rank0_only": True}, *DRAFTS]


def make() -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    net.scale = nn.Parameter(torch.tensor(1.5))
    return net


def sharded() -> Any:
    net = make()
    dshard.fully_shard(net[0])
    dshard.fully_shard(net[2])
    return dshard.fully_shard(net)


def batch(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def loss(net: Any, rank: int) -> Tensor:
    out: Tensor = (net(batch(rank)) * net.scale).pow(2).mean()
    return out


def reference(num_ranks: int) -> Any:
    """The plain model with the mean of the ranks' gradients."""
    net = make()
    (sum(loss(net, rank) for rank in range(num_ranks)) / num_ranks).backward()
    return net


def values_and_gradients(options: dict[str, bool]) -> None:
    net, plain = sharded(), reference(dist.get_world_size())
    loss(net, dist.get_rank()).backward()
    with dshard.gathered(net, with_grads=True, **options) as fulls:
        if options.get("rank0_only") and dist.get_rank() > 0:
            assert fulls == {}
        else:
            assert list(fulls) == [name for name, _ in plain.named_parameters()]
        for name, full in fulls.items():
            expected = plain.get_parameter(name)
            assert type(full) is Tensor
            assert torch.equal(full, expected)
            assert full.grad is not None
            torch.testing.assert_close(full.grad, expected.grad)
    with dshard.gathered(net, **options) as fulls:
        assert all(full.grad is None for full in fulls.values())


@pytest.mark.parametrize("options", ALL_OPTIONS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gathered_yields_the_plain_values_and_mean_gradients(worlds: WorldPool, num_ranks, options):
    worlds.run(num_ranks, values_and_gradients, options)


def change(fulls: Any) -> None:
    """Writes of every kind to what a scope yields, or to a plain model's parameters."""
    with torch.no_grad():
        fulls["0.weight"][1].mul_(2)
        fulls["2.bias"].copy_(torch.tensor([7.0, -7.0]))
        fulls["scale"].fill_(0.5)
        fulls["0.bias"].data.zero_()  # neither of these two moves the version counter
        fulls["2.weight"].numpy()[0] = np.float32(3)


def written_back(options: dict[str, bool]) -> None:
    net = sharded()
    plain = make()
    names = dict(plain.named_parameters())
    change({name: p.detach() for name, p in names.items()})
    weight = net[0].weight
    with dshard.gathered(net, **options) as fulls:
        if fulls:
            change(fulls)
        torch.testing.assert_close(weight.full_tensor(), make()[0].weight.detach())  # a draft until the end
    for name, expected in names.items():
        assert torch.equal(net.get_parameter(name).full_tensor(), expected), name
    assert net[0].weight is weight
    loss(net, dist.get_rank()).backward()
    (sum(loss(plain, rank) for rank in range(dist.get_world_size())) / dist.get_world_size()).backward()
    torch.testing.assert_close(net[0].weight.grad.full_tensor(), plain[0].weight.grad)


@pytest.mark.parametrize("options", DRAFTS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_is_written_to_drafts_is_kept_when_the_scope_ends(worlds: WorldPool, num_ranks, options):
    worlds.run(num_ranks, written_back, options)


def gradients_written_back(options: dict[str, bool]) -> None:
    net = sharded()
    loss(net, dist.get_rank()).backward()
    before = net[0].weight.grad.full_tensor()
    values = net[0].weight.full_tensor()
    with dshard.gathered(net, with_grads=True, **options) as fulls:
        if fulls:
            fulls["0.weight"].grad[0].mul_(4)
    before[0] *= 4
    assert torch.equal(net[0].weight.grad.full_tensor(), before)
    assert torch.equal(net[0].weight.full_tensor(), values)
    with (  # noqa: PT012 - what raises is the end of the scope
        pytest.raises(dshard.StateError, match=r"^0\.bias\.grad: the gradient that gathered\(\) yields must stay"),
        dshard.gathered(net, with_grads=True, **options) as fulls,
    ):
        if fulls:
            fulls["0.bias"].grad = torch.ones(5)


@pytest.mark.parametrize("options", DRAFTS)
def test_writes_to_gradients_are_kept_and_replacing_one_raises_on_every_rank(worlds: WorldPool, options):
    worlds.run(2, gradients_written_back, options)


def rank_0s_value() -> list[float]:
    net = sharded()
    with dshard.gathered(net, writeback=True, rank0_only=True) as fulls:
        if fulls:
            fulls["2.bias"].fill_(float(dist.get_rank() + 11))
    with torch.no_grad():
        return net[2].bias.full_tensor().tolist()


def replicated(options: dict[str, bool]) -> None:
    """As `written_back`, where each shard exists twice."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    net, plain = dshard.fully_shard(make(), mesh=mesh), make()
    change({name: p.detach() for name, p in plain.named_parameters()})
    with dshard.gathered(net, **options) as fulls:
        assert bool(fulls) == (dist.get_rank() == 0 or not options.get("rank0_only"))
        if fulls:
            change(fulls)
    for name, expected in plain.named_parameters():
        assert torch.equal(net.get_parameter(name).full_tensor(), expected), name
    with (  # noqa: PT012
        pytest.raises(dshard.DShardError) as raised,
        dshard.gathered(net, writeback=True) as fulls,
    ):
        if dist.get_rank() >= dist.get_world_size() // 2:  # alike within a row, but not in both
            fulls["0.weight"].zero_()
    assert "0.weight" in str(raised.value)


@pytest.mark.parametrize("options", DRAFTS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_replicas_take_what_was_written_and_are_compared(worlds: WorldPool, num_ranks, options):
    worlds.run(num_ranks, replicated, options)


def test_with_rank0_only_the_values_of_rank_0_are_taken(worlds: WorldPool):
    assert worlds.run(2, rank_0s_value) == [[11.0, 11.0]] * 2


def differing(where: str) -> str:
    net = sharded()
    before = net[0].weight.full_tensor()
    with (  # noqa: PT012 - the scope's end raises
        pytest.raises(dshard.DivergenceError) as raised,
        dshard.gathered(net, writeback=True) as fulls,
    ):
        if where == "everywhere" or dist.get_rank() == 1:
            fulls["0.weight"].fill_(float(dist.get_rank()))
        fulls["0.bias"].zero_()
    assert torch.equal(net[0].weight.full_tensor(), before)
    assert net[0].bias.full_tensor().abs().sum() > 0
    return str(raised.value)


@pytest.mark.parametrize("where", ["everywhere", "on rank 1 alone"])
def test_different_writes_raise_on_every_rank_name_the_parameter_and_change_nothing(worlds: WorldPool, where):
    for text in worlds.run(2, differing, where):
        assert "differ between ranks: 0.weight. Nothing was written back" in text


def written_twice(options: dict[str, bool]) -> None:
    net = sharded()
    with (  # noqa: PT012
        pytest.raises(dshard.StateError, match=r"^2\.weight: within one scope either the tensor or what"),
        dshard.gathered(net, **options) as fulls,
    ):
        if fulls:
            fulls["2.weight"].zero_()
            fulls["0.weight"].zero_()
        with torch.no_grad():
            net[2].weight.mul_(3)
    expected = make()
    torch.testing.assert_close(net[2].weight.full_tensor(), 3 * expected[2].weight.detach())
    assert torch.equal(net[0].weight.full_tensor(), expected[0].weight)
    with dshard.gathered(net, **options) as fulls, torch.no_grad():  # one of the two alone is kept, each
        net[2].weight.mul_(2)
        if fulls:
            fulls["0.weight"].zero_()
    torch.testing.assert_close(net[2].weight.full_tensor(), 6 * expected[2].weight.detach())
    assert not net[0].weight.full_tensor().any()


@pytest.mark.parametrize("options", DRAFTS)
def test_a_write_to_a_draft_and_its_parameter_raises_on_every_rank_and_either_alone_is_kept(worlds: WorldPool, options):
    worlds.run(2, written_twice, options)


def without_writeback(options: dict[str, bool]) -> None:
    net = sharded()
    before = net[0].bias.full_tensor()
    with dshard.gathered(net, **options) as fulls:
        has_copies = bool(fulls)
    if has_copies:
        with (
            pytest.raises(dshard.StateError, match=r"^0\.bias: what gathered\(\) yields must not .*writeback=True"),
            dshard.gathered(net, **options) as fulls,
        ):
            fulls["0.bias"].zero_()
    else:
        with dshard.gathered(net, **options):
            pass
    assert torch.equal(net[0].bias.full_tensor(), before)


@pytest.mark.parametrize("options", [{}, {"offload_to_cpu": True}, {"rank0_only": True}])
def test_without_writeback_a_write_raises_where_it_happened_and_is_lost(worlds: WorldPool, options):
    worlds.run(2, without_writeback, options)


def failing(rank: int | None, options: dict[str, bool]) -> str:
    net = sharded()
    before = net[0].weight.full_tensor()
    with (  # noqa: PT012
        pytest.raises((dshard.StateError, ZeroDivisionError)) as raised,
        dshard.gathered(net, **options) as fulls,
    ):
        if fulls:
            fulls["0.weight"].zero_()
        if rank in (None, dist.get_rank()):
            raise ZeroDivisionError("on demand")
    assert torch.equal(net[0].weight.full_tensor(), before)
    return str(raised.value)


@pytest.mark.parametrize("options", DRAFTS)
def test_an_exception_in_the_scope_discards_writes_and_reaches_every_rank(worlds: WorldPool, options):
    assert worlds.run(2, failing, None, options) == ["on demand"] * 2
    own, other = worlds.run(2, failing, 0, options)
    assert own == "on demand"
    assert "one of them raised in it" in other


def held(options: dict[str, bool]) -> list[int]:
    """Units that hold copies inside of the scope, gathers at its start, and gathers of a forward in it."""
    net = sharded()
    with dshard.CommTrace() as trace, dshard.gathered(net, **options):
        at_start = trace.calls("all_gather")
        units = sum(unit.is_gathered for unit in net._context().units)
        with torch.no_grad():
            net(batch(0))
        return [units, at_start, trace.calls("all_gather") - at_start]


def test_without_options_units_stay_gathered_and_with_copies_they_do_not(worlds: WorldPool):
    assert worlds.run(2, held, {}) == [[3, 3, 0]] * 2
    for options in ALL_OPTIONS[1:]:
        assert worlds.run(2, held, options) == [[0, 3, 2]] * 2


def sent(options: dict[str, bool]) -> list[int]:
    net = sharded()
    with dshard.CommTrace() as trace:
        with dshard.gathered(net, **options) as fulls:
            if fulls:
                fulls["0.weight"].zero_()
        return [trace.calls(kind) for kind in ("all_gather", "all_reduce", "broadcast")]


def test_writing_back_sends_a_check_and_with_rank0_only_what_was_written(worlds: WorldPool):
    assert worlds.run(2, sent, {"writeback": True}) == [[3, 2, 0]] * 2  # with the check of its arguments
    assert worlds.run(2, sent, {"writeback": True, "rank0_only": True}) == [[3, 2, 1]] * 2


def chosen() -> None:
    net = sharded()
    with dshard.gathered(net, recurse=False) as fulls:
        assert list(fulls) == ["scale"]
    with dshard.gathered(net[0], recurse=False) as fulls:
        assert list(fulls) == ["weight", "bias"]
    with dshard.gathered([net[0].weight, net[0].weight]) as fulls:
        assert list(fulls) == ["0.weight"]
    with (
        pytest.raises(dshard.StateError, match=r"recurse=False means .* Sequential"),
        dshard.gathered(net[1:], recurse=False),
    ):
        pass
    alone = dshard.fully_shard(make())  # whose first use forms more units
    with dshard.gathered(alone, recurse=False) as fulls:
        assert len(fulls) == 5
    other = dshard.fully_shard(nn.Linear(3, 3), sync="broadcast")
    third = dshard.fully_shard(nn.Linear(3, 3), sync="broadcast")
    with dshard.gathered(nn.ModuleList([other, third])) as fulls:
        assert list(fulls) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    with (
        pytest.raises(dshard.StateError, match=r"^weight: .* two of the parameters have this one"),
        dshard.gathered([other.weight, third.weight]),
    ):
        pass


def test_recurse_and_names(worlds: WorldPool):
    worlds.run(2, chosen)


STRATEGIES = ["ddp", "zero1", "zero2", "keep", "full"]


def writes_to_parameters(strategy: str) -> list[str]:
    """A step and a write within the scope, as outside of it; and what is lost is not computed with."""
    wrong = []
    net, plain = make(), reference(dist.get_world_size())
    dshard.fully_shard(net, strategy=strategy)
    loss(net, dist.get_rank()).backward()
    with dshard.gathered(net) as fulls:
        before = {name: full.clone() for name, full in fulls.items()}
        for each in (net, plain):
            torch.optim.SGD(each.parameters(), lr=0.5).step()
            with torch.no_grad():
                each[0].weight[1:2].mul_(3.0)
        if not all(torch.equal(fulls[name], before[name]) for name in before):
            wrong.append("what was yielded has changed")
        if not torch.equal(loss(net, 0), loss(plain, 0)):
            wrong.append("the step does not count within the scope")
    if not torch.equal(loss(net, 0), loss(plain, 0)):
        wrong.append("the step does not count after the scope")
    for ends in ("at the end", "by an exception"):
        with torch.no_grad(), pytest.raises((dshard.StateError, ValueError)), dshard.gathered(net) as fulls:  # noqa: PT012
            if dist.get_rank() == 0:
                fulls["0.weight"].add_(1.0)
            if ends == "by an exception" or dist.get_rank() != 0:
                raise ValueError(ends)
        with torch.no_grad():
            if not torch.equal(loss(net, 0), loss(plain, 0)):
                wrong.append(f"what was lost {ends} is computed with")
    return wrong


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_writes_to_parameters_count_within_a_scope_and_those_to_what_it_yields_do_not(worlds: WorldPool, strategy):
    assert worlds.run(2, writes_to_parameters, strategy) == [[], []]
