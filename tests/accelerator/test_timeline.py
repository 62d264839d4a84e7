"""Timelines of a few records, computed by hand, and what dry runs issue."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.accelerator import device
from tests.accelerator.timeline import Durations, Record, collective_s, flops_of, timeline

US = 1e-6
# One byte takes a microsecond; nothing else takes any time.
SLOW = Durations("by hand", 1e6, 1e6, 1e6, 1e6, 0.0, 0.0, 1e6, 0.0, 0.0, 1e6, 0.0, 0.0, 0.0, 0.0)
COMPUTE, LINK = 0, 1


def op(num_us: int, *, stream: int = COMPUTE) -> Record:
    return Record("op", "relu", "", stream, num_us, 0, 0)


def gather(num_us: int) -> Record:
    """Of two ranks: half of what is gathered comes over the link."""
    return Record("collective", "all_gather", "", LINK, num_us, 2 * num_us, 2)


def mark(number: int, stream: int) -> Record:
    return Record("mark", "", "", stream, 0, 0, number)


def wait(number: int, stream: int) -> Record:
    return Record("wait", "", "", stream, 0, 0, number)


def test_a_gather_beside_enough_computation_is_not_exposed():
    line = timeline([gather(30), mark(1, LINK), op(50), wait(1, COMPUTE), op(10)], SLOW)
    assert line.step_s == pytest.approx(60 * US)
    assert line.busy_s == pytest.approx(60 * US)
    assert line.exposed_s == 0
    assert (line.num_kernels, line.num_collectives, line.num_copies) == (2, 1, 0)


def test_what_the_computation_waits_for_a_gather_is_exposed():
    line = timeline([gather(30), mark(1, LINK), op(20), wait(1, COMPUTE), op(10)], SLOW)
    assert line.step_s == pytest.approx(40 * US)
    assert line.exposed_s == pytest.approx(10 * US)
    assert [round(stall.at_s / US) for stall in line.stalls] == [20]


def test_a_gather_that_waits_for_the_computation_begins_after_it():
    records = [op(20), mark(1, COMPUTE), wait(1, LINK), gather(30), mark(2, LINK), op(5), wait(2, COMPUTE), op(1)]
    line = timeline(records, SLOW)
    assert line.step_s == pytest.approx(51 * US)
    assert line.exposed_s == pytest.approx(25 * US)


def test_a_wait_for_another_stream_is_exposed_if_that_one_waits_for_a_collective():
    behind = [gather(30), mark(1, LINK), wait(1, 2), mark(2, 2), op(10), wait(2, COMPUTE), op(1)]
    assert timeline(behind, SLOW).exposed_s == pytest.approx(20 * US)
    beside = timeline([op(30, stream=2), mark(1, 2), op(10), wait(1, COMPUTE), op(1), gather(1)], SLOW)
    assert beside.exposed_s == 0
    assert beside.held_s == pytest.approx(20 * US)


def test_what_communication_takes_after_the_computation_is_exposed():
    assert timeline([gather(30), op(20)], SLOW).exposed_s == pytest.approx(10 * US)


def test_collectives_of_two_streams_run_one_after_another():
    records = [gather(30), gather(30)._replace(stream=2), mark(1, 2), wait(1, COMPUTE), op(1)]
    assert timeline(records, SLOW).step_s == pytest.approx(61 * US)


def test_a_host_that_is_slower_than_kernels_sets_the_pace():
    line = timeline([op(2)] * 10, replace(SLOW, op_host_s=5 * US, launch_s=3 * US))
    assert line.step_s == pytest.approx((50 + 3 + 2) * US)
    assert line.starved_s == pytest.approx(line.step_s - 20 * US)
    assert line.exposed_s == 0


def test_a_host_that_waits_issues_later():
    records = [op(20), mark(1, COMPUTE), Record("host", "", "", COMPUTE, 0, 0, 1), op(10)]
    line = timeline(records, replace(SLOW, launch_s=5 * US, host_wait_s=1 * US))
    assert line.host_waits_s == pytest.approx(25 * US)  # the launch of the first is waited for, too
    assert line.step_s == pytest.approx((5 + 20 + 1 + 5 + 10) * US)
    last = Record("host", "", "", COMPUTE, 0, 0, -1)
    assert timeline([op(20), last, op(10)], SLOW).host_waits_s == pytest.approx(20 * US)
    assert timeline([op(20), last._replace(number=0), op(10)], SLOW).host_waits_s == 0


def test_work_is_counted_by_shapes_and_by_bytes():
    product = Record("op", "mm", "", 0, 0, 0, 0, [[3, 4], [4, 5]], 2)
    assert flops_of(product) == 2 * 3 * 4 * 5
    assert flops_of(product._replace(name="addmm", shapes=[[5], [3, 4], [4, 5]])) == 2 * 3 * 4 * 5
    assert flops_of(product._replace(name="bmm", shapes=[[2, 3, 4], [2, 4, 5]])) == 2 * 2 * 3 * 4 * 5
    query = [2, 4, 8, 16]
    attention = product._replace(name="_scaled_dot_product_flash_attention", shapes=[query, query, query])
    assert flops_of(attention) == 4 * (2 * 4 * 8 * 16) * 8 / 2
    assert flops_of(op(3)) == 0
    ring = replace(SLOW, collective_s=7 * US, step_s=1 * US)
    of_four = gather(8)._replace(number=4, written_bytes=32)
    assert collective_s(of_four, ring) == pytest.approx((7 + 3 + 24) * US)
    sums = Record("collective", "all_reduce", "", LINK, 0, 32, 4)
    assert collective_s(sums, ring) == pytest.approx((7 + 6 + 48) * US)


def _issue(is_dry: bool) -> list[tuple[Any, ...]]:
    """What two steps of a small model issue, without the numbers of marks."""
    accelerator = device.start()
    accelerator.configure(0, "eager", True, is_dry)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 600)).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    accelerator.keep_records(on=True)
    for _ in range(2):
        model(torch.randn(4, 8, device="sim")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator.synchronize()
    accelerator.keep_records(on=False)
    records = [tuple(record) for record in accelerator.take_records()]
    return [(*record[:6], *record[7:9]) for record in records if record[0] in ("op", "copy", "collective")]


def _issue_sharded() -> list[tuple[Any, ...]]:
    """What a step of a model issues that dshard shards over 8 ranks, of which this is one."""
    import dshard

    with device.dry_world(8) as accelerator:
        model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 600)).to("sim")
        mesh = dist.device_mesh.init_device_mesh("sim", (8,))
        for module in (model[0], model[2], model):
            dshard.fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for i in range(2):
            accelerator.keep_records(on=i == 1)
            model(torch.randn(4, 8, device="sim")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        accelerator.keep_records(on=False)
        return [tuple(record) for record in accelerator.take_records()]


@pytest.fixture
def apart():
    """A process that may rename a device and make a world."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield lambda call, *args: pool.submit(call, *args).result()


needs_compiler = pytest.mark.skipif(not device.CAN_BUILD, reason="needs a C++ compiler and ninja")


@needs_compiler
def test_dry_runs_issue_what_others_do_and_the_same_each_time(apart):
    first, second, real = (apart(_issue, is_dry) for is_dry in (True, True, False))
    assert first
    assert first == second
    assert first == real


@needs_compiler
def test_one_process_issues_what_a_rank_of_eight_does(apart):
    records = [Record(*record) for record in apart(_issue_sharded)]
    found = [record for record in records if record.kind == "collective" and record.read_bytes > 16]
    assert [record.name for record in found] == ["all_gather"] * 3 + ["reduce_scatter"] * 2
    assert {record.number for record in found} == {8}
    numel = 64 * 8 + 64, 600 * 64 + 600
    assert sum(record.read_bytes for record in found[:2]) >= 4 * sum(numel) / 8
    assert timeline(records, SLOW).exposed_s > 0
