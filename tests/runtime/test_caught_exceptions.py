"""An exception that a program catches on one rank alone: all ranks raise in time, and name that rank and the step."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard.collectives.exchange import transport_of
from dshard.testing import World, WorldPool
from tests.runtime.caught import STRATEGIES, WIDTH, BatchError, Net, batch

NUM_STEPS, DEPTH = 6, 4
TIMEOUT_S = 4.0  # of process groups


@dataclass(frozen=True)
class Case:
    """What is trained how.

    Args:
        strategies: Of each layer.
        replicas: Groups of ranks that hold the same shards.
    """

    strategies: tuple[str, ...]
    replicas: int = 1


def sharded(case: Case) -> Any:
    torch.manual_seed(0)
    model: Any = Net(DEPTH, recomputes=False)
    mesh: Any = None
    if case.replicas > 1:
        sizes = (case.replicas, dist.get_world_size() // case.replicas)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("r", "s"))
    for layer, strategy in zip(model.layers, case.strategies, strict=True):
        dshard.fully_shard(layer, strategy=strategy, mesh=mesh)
    return dshard.fully_shard(model, mesh=mesh)


def fails_alone(case: Case, place: str) -> list[str]:
    """In the third step rank 1 raises, and goes on with the next batch; the others catch what they are told."""
    model = sharded(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    texts: list[str] = []
    for step in range(NUM_STEPS):
        hits = step == 2 and dist.get_rank() == 1
        model.fault = (place, 1) if hits else None
        try:
            loss = model(batch(step, 0, dist.get_rank())).square().sum()
            if hits and place == "loss":
                raise BatchError("bad loss")
            loss.backward()
            optimizer.step()
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error} {getattr(error, 'ranks', '')}".strip())
            if isinstance(error, dshard.DivergenceError):
                return texts
        optimizer.zero_grad()
    return texts


@pytest.mark.parametrize("transport", ["memory", "messages"])
@pytest.mark.parametrize(
    "strategy", [pytest.param(each, marks=[pytest.mark.slow] * (each not in ("full", "ddp"))) for each in STRATEGIES]
)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_all_ranks_raise_and_name_the_rank_that_caught_an_exception_alone_and_the_step(
    place, strategy, transport, monkeypatch
):
    with World(3, group_timeout_s=TIMEOUT_S) as world:
        world.run(use_transport, transport)
        found = world.run(fails_alone, Case((strategy,) * DEPTH), place)
    cause = {"forward": "BatchError: bad batch", "backward": "an exception in its backward"}[place]
    if place == "forward":
        assert found[1][0] == cause
    named = rf"in step 3 rank 1 raised {cause}, which its program has caught"
    for rank, texts in enumerate(found):
        assert len(texts) == 1 + (rank == 1), found
        assert texts[-1].startswith("DivergenceError: '"), found
        assert re.search(named, texts[-1]), found
        assert "start again from the last checkpoint" in texts[-1]
        assert texts[-1].endswith("(1,)")


def use_transport(transport: str) -> None:
    os.environ["DSHARD_TRANSPORT"] = transport


def fails_alone_in_one_of_two() -> list[list[float] | str]:
    """Two models of equal names are trained in turn; rank 1 alone raises in the first, and goes on to the second."""
    models = [sharded(Case(("full",) * DEPTH)), sharded(Case(("full",) * DEPTH))]
    found: list[list[float] | str] = []
    for step in range(NUM_STEPS):
        for model in models:
            hits = step == 2 and dist.get_rank() == 1 and model is models[0]
            model.fault = ("forward", 0) if hits else None
            try:
                out = model(torch.ones(1, WIDTH))
                out.sum().backward()
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
                if isinstance(error, dshard.DivergenceError):
                    return found
            else:
                found.append(out.flatten().tolist())
    return found


@pytest.mark.parametrize("transport", ["memory", "messages"])
def test_a_rank_that_goes_on_to_a_second_model_of_the_same_names_never_meets_the_first_of_its_peers(transport):
    with World(2, group_timeout_s=TIMEOUT_S) as world:
        world.run(use_transport, transport)
        peer, failed = world.run(fails_alone_in_one_of_two)
    outputs = peer[:2]
    assert outputs[0] == outputs[1]  # made from the same seed
    assert peer[:-1] == outputs * 2
    assert failed[:-2] == outputs * 2
    assert failed[-2] == "BatchError: bad batch"
    for text in (peer[-1], failed[-1]):
        assert "in step 3 rank 1 raised BatchError: bad batch, which its program has caught" in text


@pytest.mark.parametrize("strategy", ["full", "split(2)"])
def test_an_exception_in_the_loss_of_one_rank_is_a_collective_of_another_name(strategy):
    with World(2, group_timeout_s=TIMEOUT_S) as world:
        found = world.run(fails_alone, Case((strategy,) * DEPTH), "loss")
    assert found[1][0] == "BatchError: bad loss"
    for texts in found:
        assert "DivergenceError: " in texts[-1]
        assert "all ranks must communicate about the same thing at the same time" in texts[-1]
        assert "or an exception that one rank alone has caught" in texts[-1]


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_replicas_of_such_a_rank_raise_in_time_and_name_it(place):
    with World(4, group_timeout_s=TIMEOUT_S, grace_s=3 * TIMEOUT_S) as world:
        found = world.run(fails_alone, Case(("full",) * DEPTH, replicas=2), place)
    # The replicas time out together. Whoever looks first raises a DivergenceError and writes down which ranks are at
    # something else; to whoever looks later they are lost, "as rank 2 found". Both name the rank that is to blame.
    for texts in found:
        assert re.search(
            r"(Divergence|RankLost)Error: .*[Ii]n step 3 rank 1 raised .*, which its program has caught", texts[-1]
        ), found


def stepped_apart(path: str) -> list[str]:
    """The first rank leaves a step when the others have ended it by their optimizers' steps."""
    case = Case(("full",) * DEPTH)
    model = sharded(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    dshard.checkpoint.save(path, model, optimizer)
    texts = []
    for step in range(3):
        try:
            model(batch(step, 0, dist.get_rank())).square().sum().backward()
            dshard.clip_grad_norm_(model.parameters(), 1.0)
            if step == 0 and dist.get_rank() == 0:
                raise BatchError("too late")
            optimizer.step()
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
        optimizer.zero_grad()
    return texts


def test_shards_of_which_some_have_stepped_are_never_gathered(worlds: WorldPool, tmp_path):
    first, second = worlds.run(2, stepped_apart, str(tmp_path / "saved"))
    assert first[0] == "BatchError: too late"
    for texts in (first[1:], second):
        assert len(texts) == 2
        assert all("all ranks must write the same to a sharded tensor, and equally often" in text for text in texts)


def headers_sent() -> tuple[int, int]:
    """Headers of three good steps, and collectives that go behind one."""
    model = sharded(Case(("full",) * DEPTH))
    transport: Any = transport_of(next(model.parameters()).shard_group)
    sent: list[int] = []
    plain_send = transport.send

    def send(header: bytes, peer: int, values: Any = None) -> Any:
        sent.append(peer)
        return plain_send(header, peer, values)

    transport.send = send
    try:
        with dshard.CommTrace() as trace:
            for step in range(3):
                model(batch(step, 0, dist.get_rank())).square().sum().backward()
                dshard.clip_grad_norm_(model.parameters(), 1.0)
                model.zero_grad()
    finally:
        transport.send = plain_send
    return len(sent), trace.calls()


def test_a_good_step_sends_a_header_for_each_collective_and_nothing_else(messaging: WorldPool):
    for num_headers, num_collectives in messaging.run(2, headers_sent):
        assert num_headers == num_collectives


def evaluates_alone(path: str) -> list[int]:
    """Rank 0 evaluates by itself where nothing is gathered, ahead of a save of all."""
    case = Case(("ddp",) * DEPTH)
    model = sharded(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        model(batch(step, 0, dist.get_rank())).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            with torch.no_grad():
                model.eval()(batch(step, 0, 0))
        model.train()
        dshard.checkpoint.save(Path(path, f"alone-{step}"), model, optimizer)
    return [step for step in range(3) if Path(path, f"alone-{step}").exists()]


def test_a_rank_that_evaluates_alone_stays_in_step_with_the_others(worlds: WorldPool, tmp_path):
    assert worlds.run(2, evaluates_alone, str(tmp_path)) == [[0, 1, 2]] * 2


def stages_apart(path: str) -> bool:
    """Ranks train models of their own, of other numbers of forwards ahead of a backward, and then one that all have."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    stage: Any = nn.Sequential(*[dshard.fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh["dp"]) for _ in range(2)])
    dshard.fully_shard(stage, mesh=mesh["dp"])
    whole: Any = dshard.fully_shard(nn.Linear(WIDTH, WIDTH))
    for step in range(3):
        x = batch(step, 0, dist.get_rank())
        outs = [stage(x) for _ in range(1 + 2 * mesh.get_local_rank("pp"))]
        for out in outs:
            out.sum().backward()
        whole(x).sum().backward()
        dshard.clip_grad_norm_(whole.parameters(), 1.0)
    dshard.checkpoint.save(path, whole)
    return Path(path).exists()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_stages_that_run_other_numbers_of_forwards_leave_no_step(worlds: WorldPool, tmp_path, num_ranks):
    assert worlds.run(num_ranks, stages_apart, str(tmp_path / "saved")) == [True] * num_ranks


def branches_off() -> list[str]:
    """In one step rank 1 skips a layer."""
    model = sharded(Case(("full",) * DEPTH))
    for step in range(4):
        model.fault = ("skip", 1) if step == 1 and dist.get_rank() == 1 else None
        try:
            model(batch(step, 0, dist.get_rank())).square().sum().backward()
            dshard.clip_grad_norm_(model.parameters(), 1.0)
        except dshard.DivergenceError as error:
            return [f"{step}: {error}"]
        model.zero_grad()
    return []


def test_ranks_that_take_different_branches_are_told_what_differs(worlds: WorldPool):
    first, second = worlds.run(2, branches_off)
    for (text,), rank in ((first, 1), (second, 0)):
        assert f"all ranks must communicate about the same thing at the same time, but rank {rank} is at" in text
    assert re.findall(r"'layers\.\d'", first[0]) == re.findall(r"'layers\.\d'", second[0])[::-1]
