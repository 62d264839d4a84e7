"""Backends that run their own collectives: gloo's own stand in for them here, and torch's fake group."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.collectives import ReduceBucket, ReducePlan, ShardGroup
from dshard.collectives.ledger import _Ledger
from dshard.layout import BucketLayout, ShardLayout
from dshard.testing import WorldPool, fake_world
from dshard.units.unit import Unit

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def native() -> Iterator[None]:
    """Groups that are made inside use the backend's own collectives."""
    init = ShardGroup.__init__

    def without_direct(self: ShardGroup, *args: Any) -> None:
        init(self, *args)
        self.is_direct = False

    ShardGroup.__init__ = without_direct
    try:
        yield
    finally:
        ShardGroup.__init__ = init


class Net(nn.Module):
    """Even and uneven dims, a conv with its own strides, a large weight, a parameter that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 256), nn.LayerNorm(256))
        self.conv = nn.Conv2d(1, 3, 3).to(memory_format=torch.channels_last)
        self.head, self.spare = nn.Linear(256, 200), nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        h = self.conv(self.inner(x).view(-1, 1, 16, 16)).mean((2, 3))
        return self.head(self.inner(x)).square().mean() * self.scale + h.sum() + (self.spare.sum() if spare else 0.0)


def train(sharded: bool, all_ranks: bool, uses: list[list[bool]], steps: int = 3) -> list[float]:
    """Losses of three steps, over both ranks' data."""
    torch.manual_seed(0)
    model: Any = Net()
    if sharded:
        dshard.fully_shard(model.inner)
        dshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        data = [torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
        if sharded:
            loss = model(data[dist.get_rank()], uses[dist.get_rank()][step])
        else:
            loss = sum(model(data[r], uses[r][step]) for r in range(2)) / 2
        loss.backward()
        dshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(float(sum(model(d, True) for d in data)))
    return losses


def train_natively(*args: Any) -> list[float]:
    with native():
        return train(True, *args)


@pytest.mark.parametrize("uses", [[[True] * 3] * 2, [[True, False, True], [False, False, True]]])
def test_training_over_native_collectives_equals_one_process(worlds: WorldPool, uses):
    want = train(False, True, uses)
    for got in worlds.run(2, train_natively, True, uses):
        assert got == pytest.approx(want, rel=1e-5)


def mean_of_halves() -> list[float]:
    """Of numbers that are alike on all ranks: large ones, whose sum has no place in fp16, and the smallest but one."""
    with native():
        group = ShardGroup(dist.group.WORLD, torch.device("cpu"))
    plan = ReducePlan(BucketLayout.of([ShardLayout((2 * group.num_ranks,), 0, group.num_ranks)]), group)
    bucket = ReduceBucket(plan, dtype=torch.float16, device=torch.device("cpu"), label="halves")
    bucket.add([0], [torch.tensor([30000.0, 2**-23] * group.num_ranks, dtype=torch.float16)])
    return bucket.launch(mean=True).wait().shards[0].tolist()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_mean_in_fp16_neither_overflows_nor_vanishes(worlds: WorldPool, num_ranks):
    assert worlds.run(num_ranks, mean_of_halves) == [[30000.0, 2**-23]] * num_ranks


def bytes_after_steps(is_native: bool) -> list[int]:
    """Bytes of buffers that are out after steps whose gradients were awaited, and whether some wait to be re-used."""
    with native() if is_native else contextlib.nullcontext():
        torch.manual_seed(0)
        model: Any = dshard.fully_shard(nn.Linear(8, 8))
        pool, found = model._context().pool, []
        for _ in range(3):
            model(torch.ones(1, 8)).sum().backward()
            model.weight.grad.full_tensor()
            model.reshard()
            found.append(pool.out_bytes)
        return [*found, int(pool.kept_bytes > 0)]


@pytest.mark.parametrize("is_native", [False, True])
def test_every_buffer_of_a_step_goes_back_to_the_pool(messaging: WorldPool, is_native):
    assert messaging.run(2, bytes_after_steps, is_native) == [[0, 0, 0, 1]] * 2


# --- rows: shards moved to where they travel from ---------------------------------------------------------------------


def unit_of(param: Any) -> Unit:
    return param.gather_source


def rows_in_a_fake_world(hold: bool) -> tuple[int, int]:
    """How many storages the shards lie in after a gather, and how many parameters there are."""
    with fake_world(1, 4):
        model: Any = dshard.fully_shard(nn.Linear(8, 8))
        held = model.weight.to_local() if hold else None
        model(torch.ones(1, 8))
        storages = {p.shard_storage.resolve().untyped_storage().data_ptr() for p in model.parameters()}
        if held is not None:
            held.fill_(3.0)  # a write that must not be lost
            assert bool((model.weight.to_local() == 3).all())
        return len(storages), len(list(model.parameters()))


def test_shards_are_moved_together_unless_somebody_holds_one():
    assert rows_in_a_fake_world(hold=False) == (1, 2)
    assert rows_in_a_fake_world(hold=True) == (2, 2)


def writes_after_the_move() -> list[bool]:
    """Whether what is written to a moved shard, in each way, is what is read."""
    with native():
        torch.manual_seed(0)
        model: Any = dshard.fully_shard(nn.Linear(8, 8))
        x, found = torch.ones(1, 8), []

        def reads(value: float) -> bool:
            return bool((model.weight.full_tensor() == value).all()) and bool((model.bias.full_tensor() == 1).all())

        model(x)
        with torch.no_grad():
            model.bias.fill_(1.0)
            model.weight.fill_(2.0)
            found.append(reads(2.0))
            model.weight.to_local().fill_(3.0)
            found.append(reads(3.0))
            model.weight.data = torch.full((8, 8), 4.0)
            found.append(reads(4.0))
            model(x)
            found.append(
                reads(4.0) and len({p.to_local().untyped_storage().data_ptr() for p in (model.weight, model.bias)}) == 1
            )
            alias = model.weight.detach()
            alias.fill_(5.0)
            found.append(reads(5.0))
            model.double()
            found.append(reads(5.0) and model.weight.dtype == torch.float64)
            state = {k: torch.full_like(v.full_tensor(), 1.0) for k, v in model.state_dict().items()}
            model.load_state_dict(state)
            found.append(reads(1.0))
        return found


def test_writes_to_moved_shards_are_seen(worlds: WorldPool):
    assert worlds.run(2, writes_after_the_move) == [[True] * 7] * 2


# --- ranks that differ ------------------------------------------------------------------------------------------------


def diverge(how: str) -> str:
    """What a forward says where ranks run two equal layers in other orders, or one is written on one rank."""
    with native():
        torch.manual_seed(0)
        model: Any = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        dshard.fully_shard(model["a"])
        dshard.fully_shard(model["b"])
        dshard.fully_shard(model)
        names = ["a", "b"] if how != "order" or dist.get_rank() == 0 else ["b", "a"]
        if how == "write" and dist.get_rank() == 1:
            with torch.no_grad():
                model["b"].weight.mul_(2.0)
        x = torch.ones(2, 4)
        try:
            for name in names:
                x = model[name](x)
        except dshard.DivergenceError as error:
            return str(error)
        return "what was computed"


def test_ranks_that_did_the_same_settle_in_silence(worlds: WorldPool):
    assert worlds.run(2, diverge, "not") == ["what was computed"] * 2


def test_a_forward_tells_of_ranks_that_ran_units_in_different_orders_and_names_both(worlds: WorldPool):
    errors = worlds.get_world(2).run(diverge, "order")
    assert errors[0].startswith("'a': all ranks must communicate about the same thing at the same time")
    assert "rank 1 is at 'b'" in errors[0]
    assert errors[1].startswith("'b'")
    assert "rank 0 is at 'a'" in errors[1]


def test_a_forward_tells_of_a_write_on_one_rank_alone(worlds: WorldPool):
    errors = worlds.get_world(2).run(diverge, "write")
    assert all(e.startswith("'b': all ranks must write the same to a sharded tensor") for e in errors)


def postings_of_forwards(num_forwards: int, is_evaluated: bool) -> int:
    with native():
        model: Any = dshard.fully_shard(nn.Linear(4, 4), reshard_after_forward=True)
        patch = mock.patch.object(_Ledger, "post", autospec=True, side_effect=_Ledger.post)
        with torch.set_grad_enabled(not is_evaluated), patch as post:
            for _ in range(num_forwards):
                model(torch.ones(1, 4))
        return post.call_count


def test_forwards_alone_settle_the_first_time_and_once_in_a_thousand_collectives(worlds: WorldPool):
    assert worlds.run(2, postings_of_forwards, 1100, False) == [2, 2]


def test_each_evaluation_settles(worlds: WorldPool):
    assert worlds.run(2, postings_of_forwards, 9, True) == [9, 9]


def evaluation_of_rank_0() -> float:
    """Rank 0 alone evaluates what all have gathered, and all train on."""
    with native():
        torch.manual_seed(0)
        model: Any = dshard.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            with dshard.gathered(model):
                if dist.get_rank() == 0:
                    with torch.no_grad():
                        model(torch.ones(1, 4))
            optimizer.step()
        return model(torch.ones(1, 4)).item()


def test_a_rank_may_evaluate_alone_what_all_have_gathered(worlds: WorldPool):
    first, second = worlds.run(2, evaluation_of_rank_0)
    assert first == second
