"""Ranks that go different ways: an error that names both where they gather different units, none within one unit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dshard
from dshard.testing import RemoteRankError, World, WorldPool, expect_error
from tests.models import Experts
from tests.twins import close, data, full, mean, same_grads, twins


def shard_experts(model: Experts) -> None:
    for expert in model.experts:
        dshard.fully_shard(expert)
    dshard.fully_shard(model)


def experts_in_forward() -> None:
    _, model = twins(Experts, shard_experts)
    model(data(2, 4))
    raise AssertionError("computed with a mixture of two experts")


def experts_in_eval() -> None:
    _, model = twins(Experts, shard_experts)
    with torch.no_grad():
        model(data(2, 4))
    raise AssertionError("computed with a mixture of two experts")


def experts_in_a_read() -> None:
    _, model = twins(Experts, shard_experts)
    model.experts[dist.get_rank()].weight.full_tensor()
    raise AssertionError("read a mixture of two experts")


def experts_after_steps() -> None:
    """The first steps go the same way on both ranks."""
    _, model = twins(Experts, shard_experts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(data(2, 4), choice=0 if step < 3 else None).sum().backward()
        optimizer.step()
    raise AssertionError("trained on a mixture of two experts")


EXPERTS = {f.__name__: f for f in (experts_in_forward, experts_in_eval, experts_in_a_read, experts_after_steps)}


@pytest.mark.parametrize("where", EXPERTS)
def test_two_experts_with_rank_dependent_routing_raise_and_name_both_on_both_ranks(worlds: WorldPool, where):
    errors = expect_error(worlds.get_world(2), EXPERTS[where])
    for rank, (kind, text) in enumerate(errors):
        assert kind == "DivergenceError", text
        assert text.startswith(f"'experts.{rank}': all ranks must communicate about the same thing"), text
        assert f"rank {1 - rank} is at 'experts.{1 - rank}'" in text


def experts_of_three() -> None:
    _, model = twins(Experts, shard_experts)
    model(data(2, 4), choice=min(dist.get_rank(), 1))  # rank 0 goes elsewhere than ranks 1 and 2


def test_of_three_ranks_each_that_sees_another_unit_raises(worlds: WorldPool):
    errors = expect_error(worlds.get_world(3), experts_of_three)
    assert [kind for kind, _ in errors] == ["DivergenceError"] * 3
    assert [text[: len("'experts.0'")] for _, text in errors] == ["'experts.0'", "'experts.1'", "'experts.1'"]


def label_of_a_read() -> None:
    _, model = twins(Experts, shard_experts)
    model.experts[dist.get_rank()].weight.detach().norm().item()


def test_reads_of_different_parameters_on_different_ranks_raise_and_name_both(worlds: WorldPool):
    for rank, (kind, text) in enumerate(expect_error(worlds.get_world(2), label_of_a_read)):
        assert kind == "DivergenceError"
        assert f"experts.{rank}.weight" in text
        assert f"experts.{1 - rank}.weight" in text


def experts_in_one_unit() -> None:
    plain, sharded = twins(Experts, lambda m: (dshard.fully_shard(list(m.experts)), dshard.fully_shard(m)))
    for m in (plain, sharded):
        m(data(2, 4)).square().sum().backward()
    for p in plain.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        expected, found = mean(p.grad), full(q.grad)
        assert expected is not None
        if expected.any():
            close(found, expected, "gradient")
        else:
            assert found is None  # no rank used the third expert


def test_experts_in_one_unit_train_with_rank_dependent_routing_and_all_ranks_get_each_gradient(worlds: WorldPool):
    worlds.run(2, experts_in_one_unit)


def branch_on_one_rank() -> None:
    plain, sharded = twins(Experts, lambda m: (dshard.fully_shard([m.first, *m.experts]), dshard.fully_shard(m)))
    for m in (plain, sharded):
        out = m(data(2, 4), choice=0)
        if dist.get_rank() == 1:  # inside of one unit, as for an image that only some batches have
            out = out + m.experts[1](data(2, 4))
        out.sum().backward()
    for p in plain.experts[1].parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    same_grads(plain, sharded)


def test_a_branch_on_one_rank_inside_of_a_unit_is_fine(worlds: WorldPool):
    worlds.run(2, branch_on_one_rank)


def train_other_parameters() -> None:
    model = dshard.fully_shard(torch.nn.Linear(8, 8))
    if dist.get_rank() == 0:
        model.weight.requires_grad_(False)
    model(data(2, 8)).sum().backward()
    model.bias.grad.full_tensor()


def test_ranks_that_train_other_parameters_are_told_to_train_the_same():
    with World(2) as world, pytest.raises(RemoteRankError, match="train the same parameters of it"):
        world.run(train_other_parameters)


def write_of_other_numbers(slot: int) -> None:
    """To one parameter of a unit whose parameters all travel in one message."""
    _, model = twins(lambda: torch.nn.Linear(4, 4), dshard.fully_shard)
    with torch.no_grad():
        list(model.parameters())[slot].mul_(1.0 + dist.get_rank())
    model(data(2, 4))


@pytest.mark.parametrize("slot", [0, 1])
def test_a_write_of_other_numbers_to_any_parameter_of_a_unit_is_told_on_all_ranks(worlds: WorldPool, slot):
    for rank, (kind, text) in enumerate(expect_error(worlds.get_world(2), write_of_other_numbers, slot)):
        assert kind == "DivergenceError"
        assert "all ranks must write the same" in text
        assert f"rank {1 - rank} wrote other numbers" in text


def forward_on_rank_0() -> None:
    _, model = twins(Experts, shard_experts)
    if dist.get_rank() == 0:
        model.experts[1](data(2, 4))  # on rank 0 alone


def read_on_rank_0() -> None:
    _, model = twins(Experts, shard_experts)
    if dist.get_rank() == 0:
        model.experts[1].weight.detach().norm().item()  # on rank 0 alone


def export_on_rank_0() -> None:
    _, model = twins(Experts, shard_experts)
    if dist.get_rank() == 0:
        model.experts[1].weight.full_tensor()  # on rank 0 alone


def grad_on_rank_0() -> None:
    _, model = twins(Experts, shard_experts)
    out = model(data(2, 4), choice=1).sum()
    if dist.get_rank() == 0:
        out.backward()  # on rank 0 alone


ALONE = {
    "forward": (forward_on_rank_0, "all-gather of 'experts.1', used in "),
    "export": (export_on_rank_0, "all-gather of 'experts.1', used in "),
    "backward": (grad_on_rank_0, "all-gather of 'experts.1', used in "),
    "read": (read_on_rank_0, "aten::linalg_vector_norm of experts.1.weight, used in "),
}


@pytest.mark.parametrize(
    "what", [pytest.param(each, marks=[pytest.mark.slow] * (each in ("export", "read"))) for each in ALONE]
)
def test_a_unit_touched_on_one_rank_alone_ends_in_bounded_time_and_names_unit_and_line(what):
    """With a process group whose timeout is short; the message comes from the rank that waits."""
    fn, label = ALONE[what]
    world = World(2, group_timeout_s=2.0, grace_s=1.0)
    try:
        with pytest.raises(RemoteRankError) as caught:
            world.run(fn, timeout_s=30.0)
    finally:
        world.close()
    assert caught.value.type_name == "DivergenceError"
    assert caught.value.rank == 0
    error = str(caught.value).splitlines()[0]
    assert "waiting for the peers failed: " in error, error
    assert "Timed out" in error
    _, found, where = error.partition(label)
    assert found, error
    path, line = where.split(": ")[0].rsplit(":", 1)
    assert Path(path).samefile(__file__)
    assert Path(path).read_text().splitlines()[int(line) - 1].endswith("# on rank 0 alone")
