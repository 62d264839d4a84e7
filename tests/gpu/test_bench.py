"""`python -m benchmarks gpu` on a CUDA device, with a tiny model. Skipped where there is none; not run on one yet."""

import pytest
import torch

import dshard
from benchmarks import gpu
from benchmarks.measure import fsdp2_waits
from benchmarks.models import mesh_of
from dshard.testing import fake_world

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_every_kind_counts_launches_and_bytes(device, num_ranks):
    case = gpu.Case(gpu.TINY, 2, 16, device)
    with gpu.world(num_ranks, device):
        rows = gpu.measure(case, 2)
    assert set(rows) == {"plain", "FSDP2", "dshard"}
    for row in rows.values():
        assert row["num_launches"] > 0
        assert row["peak_reserved_gb"] >= row["peak_allocated_gb"] > row["allocated_before_gb"]


def test_waits_of_a_sharded_step_are_timed_by_events(device):
    with fake_world(0, 8):
        model = dshard.fully_shard(torch.nn.Linear(8, 8, device=device), mesh=mesh_of(device))
        with dshard.CommTrace() as trace:
            model(torch.ones(2, 8, device=device)).sum().backward()
        assert trace.waits
        assert 0 <= trace.exposed_s < 60


def test_a_stall_of_the_stream_is_what_is_counted_of_fsdp2(device):
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    with fsdp2_waits(device) as reader:
        with torch.cuda.stream(other):
            torch.cuda._sleep(100_000_000)  # some 50 ms of the device's clock
        torch.cuda.current_stream().wait_event(other.record_event())
    assert reader() > 0.01  # a lower bound: the kernel runs for as long as it says
