"""Ranks that wait for a peer say which, where and since when, long before the timeout of the process group."""

import logging
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dshard
from dshard.collectives import watchdog
from dshard.testing import WorldPool


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def stall(how: str) -> list[str]:
    """What a rank says while rank 1 does something else for some seconds."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        dshard.fully_shard(layer)
    dshard.fully_shard(model)
    step(model)
    time.sleep(2.5 if how == "holds all" else 0)  # what was written in another test is taken back
    heard = Heard()
    known, watchdog._State.after_s = watchdog._State.after_s, 0.5
    watchdog.log.addHandler(heard)
    try:
        if dist.get_rank() == 1 and how == "sleeps":
            time.sleep(6)
        if dist.get_rank() == 1 and how == "holds all":
            watchdog._State.stop.set()  # as a process that is stopped
            time.sleep(6)
        step(model)
        if how == "goes on":
            time.sleep(2)
            step(model)
    finally:
        watchdog.log.removeHandler(heard)
        watchdog._State.after_s = known
        if watchdog._State.stop.is_set():
            watchdog._State.stop.clear()
            watchdog._State.thread = None
    return heard.texts


def test_a_rank_that_waits_names_the_one_that_is_elsewhere_and_its_line(worlds: WorldPool):
    waiting, slow = worlds.run(2, stall, "sleeps")
    assert slow == []
    text = waiting[0]
    assert text.startswith("rank 0 has waited for ")
    assert " at the all-gather of '0', for rank 1. Rank 1 is at " in text
    assert "test_stalls.py:" in text
    assert "the last that it took part in was the " in text
    assert "dshard.join(model)" in text


def test_a_rank_without_a_sign_is_named_too(worlds: WorldPool):
    texts = worlds.run(2, stall, "holds all")[0]
    assert " for rank 1. Rank 1 has given no sign: it computes, was stopped, or has ended. All ranks" in texts[0]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_work_alike_say_nothing_however_long_they_compute(worlds: WorldPool, num_ranks):
    assert worlds.run(num_ranks, stall, "goes on") == [[]] * num_ranks


class NeverOver:
    """The event of a device that never comes to it."""

    def query(self) -> bool:
        return False


def outlives_a_group() -> tuple[bool, bool, list[str]]:
    """Whether the thread that watches lives on, and forgets a wait, once the group that was waited for is destroyed."""
    group: Any = dist.new_group(timeout=timedelta(seconds=1))
    step(dshard.fully_shard(nn.Linear(4, 4)))  # starts it
    heard = Heard()
    known, watchdog._State.after_s = watchdog._State.after_s, 0.2
    watchdog.log.addHandler(heard)
    name = group.group_name
    try:
        watchdog.watch_event("the reduction of 'lost'", group, NeverOver())
        dist.destroy_process_group(group)
        time.sleep(3.0)
        thread = watchdog._State.thread
        return thread is not None and thread.is_alive(), name in watchdog._State.waits, heard.texts
    finally:
        watchdog.log.removeHandler(heard)
        watchdog._State.after_s = known
        watchdog._State.waits.pop(name, None)


def test_who_watches_lives_on_after_a_group_was_destroyed(worlds: WorldPool):
    assert worlds.run(2, outlives_a_group) == [(True, False, [])] * 2


def forks() -> tuple[int, bool, list[float]]:
    """How a fork ends, whether the thread that watches lives on in this process, and a gradient behind it."""
    model: Any = dshard.fully_shard(nn.Linear(4, 4))
    step(model)
    with watchdog._State.stop._cond:  # type: ignore[attr-defined]  # as the thread may hold it at any fork
        pid = os.fork()
        if pid == 0:
            watchdog._stop_watching()
            watchdog._on_exit()
            os._exit(0)
    ends = time.monotonic() + 10.0
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < ends:
        time.sleep(0.05)
    if found[0] == 0:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    thread = watchdog._State.thread
    model(torch.ones(1, 4)).sum().backward()
    return (
        found[1] if found[0] == pid else -1,
        thread is not None and thread.is_alive(),
        model.weight.grad.full_tensor()[0].tolist(),
    )


def test_a_fork_of_a_process_that_is_watched_ends_well_and_who_watches_lives_on(worlds: WorldPool):
    assert worlds.run(2, forks) == [(0, True, [3.0] * 4)] * 2
