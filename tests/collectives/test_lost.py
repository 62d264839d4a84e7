"""What ranks say of one another: other versions at the start, who was lost, and how long anybody waits."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard.collectives import _c10d, watchdog
from dshard.collectives.watchdog import Board, End, RankProcess, ends_within, state_of
from dshard.testing import World, WorldPool, expect_error


@pytest.fixture(autouse=True)
def unwatched() -> Iterator[None]:
    """No thread that watches, as other tests of this process start one: it would read what tests here put in place."""
    watchdog._stop_watching()
    watchdog._State.thread = None
    yield
    watchdog._State.stop.clear()


def shard_under_another_torch(what: str) -> None:
    known = torch.__version__, dshard.__version__
    if dist.get_rank() == 1:
        torch.__version__ = "2.9.1+cpu" if what == "torch" else torch.__version__  # type: ignore[misc]
        dshard.__version__ = "0.0.7" if what == "dshard" else dshard.__version__
    try:
        dshard.fully_shard(nn.Linear(4, 4))
    finally:
        torch.__version__, dshard.__version__ = known  # type: ignore[misc]


@pytest.mark.parametrize(("what", "found"), [("torch", "torch 2.9.1,"), ("dshard", "dshard 0.0.7")])
def test_ranks_of_other_versions_are_refused_with_both_on_every_rank(worlds: WorldPool, what, found):
    for kind, text in expect_error(worlds.get_world(2), shard_under_another_torch, what):
        assert kind == "DivergenceError"
        assert "must run the same versions of torch and dshard" in text
        assert found in text
        assert f"torch {torch.__version__.partition('+')[0]}" in text
        assert "on rank 1" in text
        assert "Install the same on every host" in text


def other_builds_of_one_torch() -> None:
    known = torch.__version__
    torch.__version__ = f"{known.partition('+')[0]}+rank{dist.get_rank()}"  # type: ignore[misc]
    try:
        dshard.fully_shard(nn.Linear(4, 4))
    finally:
        torch.__version__ = known  # type: ignore[misc]


def test_other_builds_of_one_torch_are_none_of_another_version(worlds: WorldPool):
    worlds.run(2, other_builds_of_one_torch)


def timeouts_of_meshes() -> list[Any]:
    known = _c10d.timeout_of(dist.group.WORLD)
    made: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    dshard.fully_shard(nn.Linear(8, 8), mesh=made)
    hybrid = dshard.init_hybrid_mesh(ranks_per_node=2)
    groups = [mesh.get_group(dim) for mesh in (made, hybrid) for dim in range(2)]
    return [known, {_c10d.timeout_of(group) for group in groups}]


def test_groups_of_meshes_wait_as_long_as_the_default_one_of_the_user():
    with World(4, group_timeout_s=33.0) as world:
        assert world.run(timeouts_of_meshes) == [[timedelta(seconds=33), {timedelta(seconds=33)}]] * 4


def step_without_rank_3() -> None:
    mesh: Any = init_device_mesh("cpu", (2, 2))
    model = dshard.fully_shard(nn.Linear(8, 8), mesh=mesh)
    if dist.get_rank() == 3:
        time.sleep(30)
    model(torch.ones(2, 8)).sum().backward()


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_user_said_on_a_mesh_of_its_own_too():
    with (
        World(4, group_timeout_s=2.0, grace_s=15.0) as world,
        pytest.raises(AssertionError, match="Rank 3 is at") as told,
    ):
        world.run(step_without_rank_3, timeout_s=20.0)
    assert "Timed out waiting 2000ms" in str(told.value)


def die(how: str) -> None:
    model = dshard.fully_shard(nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    if dist.get_rank() == 1:
        os._exit(7)
    model(torch.ones(2, 8)).sum().backward()


def test_a_rank_that_died_is_named_with_its_process_and_what_it_did_last():
    with World(3, grace_s=8.0) as world, pytest.raises(AssertionError) as told:
        world.run(die, "")
    text = str(told.value)
    assert "RankLostError" in text
    assert "rank 1 (pid " in text
    assert "was killed, or ended without a word; the last that all took part in was the " in text


def group_without_rank_2() -> None:
    model = dshard.fully_shard(nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()  # by then all know where all run
    if dist.get_rank() == 2:
        _c10d.replicas_in_group = lambda group, num_ranks: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment]
    dshard.set_strategy(model, "hybrid(2)")


def test_a_rank_that_is_stopped_while_groups_are_made_is_named_though_it_has_answered_ahead():
    # Found: its peers were named, who could not answer for holding the GIL in torch's new_group.
    with World(4, group_timeout_s=2.0, grace_s=14.0) as world, pytest.raises(AssertionError) as told:
        world.run(group_without_rank_2, timeout_s=16.0)
    assert len(re.findall(r"RankLostError.*rank 2 \(pid .* is stopped, by a signal", str(told.value))) >= 3


def clip_without_rank_1() -> None:
    mesh: Any = init_device_mesh("cpu", (2, 2))
    model = dshard.fully_shard(nn.Linear(8, 8), mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()
    if dist.get_rank() == 1:
        os._exit(7)
    dshard.clip_grad_norm_(model.parameters(), 1.0)


def test_a_rank_that_died_in_a_clipping_is_not_told_to_its_replicas_as_another_max_norm():
    with World(4, grace_s=5.0) as world, pytest.raises(AssertionError) as told:
        world.run(clip_without_rank_1)
    text = str(told.value)
    assert "RankLostError: clip_grad_norm_" in text
    assert "must pass the same" not in text


def test_the_first_that_raised_is_to_blame_and_not_those_that_failed_for_want_of_it():
    ends = [
        End(2, "failed", "RuntimeError: Connection closed by peer", 1.0),
        End(0, "raised", "RankLostError: rank 1 ...", 1.0, (1,)),
        End(1, "raised", "ValueError: a bad batch", 2.0),
        End(3, "left", "its program has come to an end", 0.5),
    ]
    found = watchdog._by_word(ends)
    assert found is not None
    assert found.ranks == (1,)
    assert "raised ValueError: a bad batch" in found.text


def test_a_channel_whose_peers_are_gone_keeps_none_from_finishing(monkeypatch):
    finished: list[int] = []

    def finish(number: int) -> None:
        if number == 0:
            raise RuntimeError("Connection closed by peer")
        finished.append(number)

    monkeypatch.setattr(watchdog._State, "channels", [SimpleNamespace(finish=partial(finish, n)) for n in range(3)])
    watchdog._finish_channels()
    assert finished == [1, 2]


def test_questions_of_another_store_are_answered_from_the_first_one_on(monkeypatch):
    board = SimpleNamespace(open=lambda: True, post=lambda *_: None)
    for name, value in {"board": board, "answered": 7, "num_caught": 7}.items():
        monkeypatch.setattr(watchdog._State, name, value)
    for name in ("own", "processes", "done", "knows_all"):
        monkeypatch.setattr(watchdog._State, name, getattr(watchdog._State, name))
    watchdog._arrive()
    assert watchdog._State.answered == watchdog._State.num_caught == 0


def test_what_takes_longer_than_a_store_may_is_given_up():
    assert ends_within(0.05, lambda: time.sleep(1.0)) is None
    assert ends_within(5.0, lambda: 7) == 7


def test_a_process_is_known_by_its_number_and_its_beginning():
    own = RankProcess.own()
    assert own.pid == os.getpid()
    assert state_of(own.pid)[1] == own.started
    assert state_of(2**22 + 1) == ("", "")
    assert Board().ends() == []


def test_a_rank_that_writes_its_word_while_it_is_looked_at_has_not_ended_without_one(monkeypatch):
    end = End(1, "raised", "ValueError: of its own", time.time(), ())
    written: list[End] = []
    gone = RankProcess("here", 1, "a host", "never")  # process 1 began at another time
    is_dead = watchdog._Case._is_dead

    def looked_at(case: Any, rank: int) -> bool:
        known = is_dead(case, rank)
        written[:] = [end]  # it comes when the process has just been looked at
        return known

    monkeypatch.setattr(watchdog._Case, "_is_dead", looked_at)
    monkeypatch.setattr(watchdog._State, "own", RankProcess("here", os.getpid(), "a host", "now"))
    monkeypatch.setattr(watchdog._State, "board", SimpleNamespace(ends=lambda: list(written), rank=0))
    verdict = watchdog._Case([1], {1: gone})._of_ends()
    assert verdict is not None
    assert "rank 1 raised ValueError: of its own" in verdict.text


@pytest.mark.parametrize("sign", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_is_stopped_or_dead_is_named_ahead_of_one_that_had_all_it_needed_and_left(monkeypatch, sign):
    # Found: rank 2 stopped within the last barrier; rank 0 was through it, and rank 1 blamed rank 0 alone.
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        of_rank_2 = RankProcess("here", process.pid, "a host", state_of(process.pid)[1])
        process.send_signal(sign)
        until = time.monotonic() + 20
        while state_of(process.pid)[0] not in ("T", "Z") and time.monotonic() < until:
            time.sleep(0.01)
        ends = [End(0, "left", "its program has come to an end", time.time())]
        monkeypatch.setattr(watchdog._State, "own", RankProcess("here", os.getpid(), "a host", "now"))
        monkeypatch.setattr(watchdog._State, "board", SimpleNamespace(ends=lambda: list(ends), rank=1))
        verdict = watchdog._Case([0, 2], {2: of_rank_2})._of_ends()
        ends.append(End(0, "raised", "ValueError: of its own", time.time()))
        of_raised = watchdog._Case([0, 2], {2: of_rank_2})._of_ends()
    finally:
        process.kill()
        process.wait()
    assert verdict is not None
    assert verdict.ranks == (2, 0)
    what = "is stopped, by a signal" if sign == signal.SIGSTOP else "was killed, or ended without a word"
    assert re.search(rf"^rank 2 \(pid \d+ on here\) {what}.*, and rank 0 has left: its program", verdict.text)
    assert of_raised is not None
    assert of_raised.text.startswith("rank 0 raised ValueError")


@pytest.mark.parametrize(("rank", "agent", "waits"), [(0, "False", True), (1, "False", False), (0, "True", False)])
def test_a_failing_rank_stays_for_the_others_to_read_it_where_the_store_goes_with_it(monkeypatch, rank, agent, waits):
    slept: list[float] = []
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(watchdog, "ends_within", lambda *_: None)
    world = {"is_initialized": lambda: True, "get_world_size": lambda: 2, "get_rank": lambda: rank}
    monkeypatch.setattr(watchdog, "dist", SimpleNamespace(**world))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    for how, expected in (("left", []), ("raised", [watchdog._READ_S] * waits)):
        monkeypatch.setattr(watchdog._State, "pid", os.getpid())
        monkeypatch.setattr(watchdog._State, "has_said", False)
        watchdog._say(how, "text")
        assert slept == expected
