"""What `CommTrace.exposed_s` counts: the time that a rank waits for its peers, and nothing while no trace is open."""

import time

import pytest
import torch
import torch.distributed as dist

import dshard
from benchmarks.measure import fsdp2_waits, watched
from benchmarks.models import shard
from dshard.collectives import trace as trace_module
from dshard.collectives.trace import CommTrace, start_wait
from dshard.testing import WorldPool

DELAY_S = 0.3


def exposed_beside_a_slow_peer() -> tuple[float, float]:
    """On each rank: what two nested traces say of a step before which rank 1 sleeps."""
    torch.manual_seed(0)
    model = dshard.fully_shard(torch.nn.Linear(4, 4))
    dist.barrier()
    with CommTrace() as outer, CommTrace() as inner:
        if dist.get_rank() == 1:
            time.sleep(DELAY_S)
        model(torch.ones(1, 4)).sum().backward()
    return outer.exposed_s, inner.exposed_s


class Stack(torch.nn.Module):
    """The least that the benchmarks can shard."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


def watched_beside_a_slow_peer(kind: str) -> float | None:
    """What the benchmarks' own meter says of the third step, ahead of which rank 1 sleeps."""
    torch.manual_seed(0)
    model = shard(kind, Stack(), torch.device("cpu"))

    def step() -> None:
        model(torch.ones(1, 4)).sum().backward()

    for _ in range(2):  # DDP meets its peers in the second forward too, to sort its buckets anew
        watched(kind, model, step)()
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(DELAY_S)
    return watched(kind, model, step)()


def waits_without_a_trace() -> int:
    torch.manual_seed(0)
    model = dshard.fully_shard(torch.nn.Linear(4, 4))
    with CommTrace() as trace:
        pass
    model(torch.ones(1, 4)).sum().backward()
    return len(trace.waits)


def test_a_rank_that_waits_for_a_slow_peer_says_for_how_long(worlds: WorldPool):
    (outer, inner), _ = worlds.run(2, exposed_beside_a_slow_peer)
    assert outer == inner
    assert outer >= 0.2  # a lower bound: the peer slept longer


@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "FSDP2, no reshard", "dshard", "dshard, root alone"])
def test_the_benchmarks_see_the_wait_of_every_library(worlds: WorldPool, kind):
    waited, _ = worlds.run(2, watched_beside_a_slow_peer, kind)
    assert waited is not None
    assert waited >= 0.2


def test_the_benchmarks_cannot_tell_of_an_unsharded_model(worlds: WorldPool):
    assert worlds.run(1, watched_beside_a_slow_peer, "unsharded") == [None]


def test_what_is_timed_of_fsdp2_is_put_back():
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    with fsdp2_waits(torch.device("cpu")) as reader:
        assert _fsdp_collectives.dist is not dist
        assert _fsdp_collectives.dist.Work is dist.Work
    assert _fsdp_collectives.dist is dist
    assert reader() == 0.0


def test_nothing_is_timed_while_no_trace_is_open(worlds: WorldPool):
    assert start_wait() is None
    assert worlds.run(2, waits_without_a_trace) == [0, 0]


class FakeEvent:
    """Stands in for `torch.cuda.Event`: its device's clock is a counter of the test's."""

    device_ms = 0.0

    def __init__(self, *, enable_timing: bool):
        assert enable_timing

    is_complete = False

    def record(self, stream=None):
        self.at_ms = FakeEvent.device_ms

    def synchronize(self):
        self.is_complete = True

    def elapsed_time(self, end):
        assert end.is_complete
        return end.at_ms - self.at_ms


@pytest.fixture
def fake_cuda(monkeypatch):
    monkeypatch.setattr(trace_module.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(trace_module.torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(trace_module.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "device_ms", 0.0)


class FakeStream:
    """Stands in for `torch.cuda.Stream`: an event of a collective comes after some time of the device's."""

    def wait_event(self, stall_ms):
        FakeEvent.device_ms += stall_ms


@pytest.mark.usefixtures("fake_cuda")
def test_of_fsdp2_on_cuda_only_stalls_of_the_computations_stream_count(monkeypatch):
    compute, other = FakeStream(), FakeStream()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: compute)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(FakeEvent, "is_complete", True, raising=False)
    wait_event = FakeStream.wait_event
    with fsdp2_waits(torch.device("cuda")) as reader:
        compute.wait_event(5e6)
        other.wait_event(1e6)
        compute.wait_event(7e6)
    assert FakeStream.wait_event is wait_event
    assert reader() == 12e3


@pytest.mark.usefixtures("fake_cuda")
def test_on_cuda_the_stalls_of_the_stream_are_summed_when_read():
    with CommTrace() as trace:
        for stall_ms in (5e6, 7e6):  # far more than the host takes
            wait = start_wait()
            assert wait is not None
            FakeEvent.device_ms += stall_ms
            wait.end()
            FakeEvent.device_ms += 1e6  # computation between two waits
    assert trace.exposed_s == 12e3
    assert trace.exposed_s == 12e3


@pytest.mark.usefixtures("fake_cuda")
def test_a_captured_stream_gets_no_events(monkeypatch):
    monkeypatch.setattr(trace_module.torch.cuda, "is_current_stream_capturing", lambda: True)
    with CommTrace() as trace:
        wait = start_wait()
        assert wait is not None
        FakeEvent.device_ms += 5e6
        wait.end()
    assert trace.exposed_s < 5e3
