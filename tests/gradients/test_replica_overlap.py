"""All-reduces between replicas run while backward goes on: started in one order on all ranks, bounded in memory."""

import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.collectives import Handle
from dshard.testing import WorldPool
from tests.collectives.test_native_backends import native
from tests.gradients.test_requires_all_reduce import mesh_of
from tests.kit import oracle

pytestmark = pytest.mark.slow
WIDTH = 12


def build(num_units: int, shape: tuple[int, int], **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(num_units)])
    for layer in net:
        dshard.fully_shard(layer, mesh=mesh_of(shape), **options)
    return dshard.fully_shard(net, mesh=mesh_of(shape), **options)


def inputs(rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank)).requires_grad_()


# --- when they start -------------------------------------------------------------------------------------------------


def events(num_units: int, max_in_flight: int, delays: bool = False) -> list[str]:
    """Starts of reductions, and waits for all-reduces, of a backward, in order."""
    net, found = build(num_units, (2, 2)), []
    net.set_reduce_scatter_max_input_buffers(max_in_flight)
    await_works = Handle._await

    def told(self: Handle[Any]) -> None:
        if self.label.startswith("all-reduce of"):
            found.append(f"wait {self.label[-2]}")
        await_works(self)

    class Told(list[Any]):
        def append(self, record: Any) -> None:
            if record.kind in ("reduce_scatter", "all_reduce"):
                found.append(f"{record.kind[:3]} {record.label}")

    if delays:  # of each rank its own
        for layer in net:
            layer.register_full_backward_hook(lambda *args: time.sleep(0.02 * ((dist.get_rank() * 7) % 4)))
    trace = dshard.CommTrace()
    trace.records = Told()
    loss = net(inputs(dist.get_rank())).square().sum()
    Handle._await = told  # type: ignore[method-assign]
    try:
        with trace:
            loss.backward()
    finally:
        Handle._await = await_works  # type: ignore[method-assign]
    return found


def test_an_all_reduce_starts_when_the_next_unit_leaves_and_is_not_waited_for_then(worlds: WorldPool):
    want = ["red 3", "all 3", "red 2", "wait 3", "all 2", "red 1", "wait 3", "wait 2", "all 1", "red 0"]
    for found in worlds.run(4, events, 4, 1):
        assert found[: len(want)] == want
        assert found[len(want) :] == ["wait 2", "wait 1", "all 0", "wait 1", "wait 0", "wait 0"]


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_the_order_of_starts_is_one_on_all_ranks_however_slow_each_is(worlds: WorldPool, max_in_flight):
    found = worlds.run(4, events, 7, max_in_flight, True)
    starts = [[event for event in events if not event.startswith("wait")] for events in found]
    assert starts == [starts[0]] * 4
    late = [f"all {unit}" for unit in range(max_in_flight, 7)]
    assert set(late) <= set(starts[0][: starts[0].index("red 0")])  # ahead of the last unit's reduce-scatter
    assert starts[0] == [event for event in found[0] if not event.startswith("wait")]


# --- what comes of it ------------------------------------------------------------------------------------------------


def read_gradient(param: Any) -> None:
    param.grad.to_local()


def gradients(shape: tuple[int, int], max_in_flight: int, reads: bool, is_native: bool) -> list[Tensor]:
    if is_native:
        with native():
            return gradients(shape, max_in_flight, reads, is_native=False)
    net = build(6, shape)
    net.set_reduce_scatter_max_input_buffers(max_in_flight)
    if reads:  # each gradient as it is accumulated, so that nothing is in flight
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(read_gradient)
    net(inputs(dist.get_rank())).square().sum().backward()
    return [p.grad.full_tensor() for p in net.parameters()]


def in_pairs(shape: tuple[int, int]) -> list[Tensor]:
    """The mean over each replica, added in pairs; then that of the replicas."""
    of_rank = []
    for rank in range(math.prod(shape)):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        net(inputs(rank)).square().sum().backward()
        of_rank.append([p.grad for p in net.parameters()])

    def mean(parts: list[Any]) -> Any:
        return oracle.sum_in_pairs(parts) / len(parts)

    replicas = [of_rank[r * shape[1] : (r + 1) * shape[1]] for r in range(shape[0])]
    return [mean([mean([grads[i] for grads in ranks]) for ranks in replicas]) for i in range(12)]


@pytest.mark.parametrize("max_in_flight", [1, 3])
@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (4, 1)])
def test_overlap_changes_no_bit(worlds: WorldPool, shape, max_in_flight):
    want = in_pairs(shape)
    for reads in (False, True):
        for found in worlds.run(math.prod(shape), gradients, shape, max_in_flight, reads, False):
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_a_backends_own_all_reduce_is_overlapped_as_well(worlds: WorldPool):
    want = in_pairs((2, 2))
    for found in worlds.run(4, gradients, (2, 2), 1, False, True):
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# --- memory ----------------------------------------------------------------------------------------------------------


def peak_of_buffers(num_units: int, max_in_flight: int) -> list[int]:
    """Most bytes of buffers for reductions at one time in a backward, and what is out behind it, but for its last."""
    net = build(num_units, (2, 2), reshard_after_forward=False)
    net.set_reshard_after_backward(False)
    net.set_reduce_scatter_max_input_buffers(max_in_flight)
    for _ in range(2):  # the second one gathers nothing
        loss = net(inputs(dist.get_rank())).square().sum()
        pool = net._context().pool
        before = pool._peak_bytes = pool.out_bytes
        loss.backward()
    return [pool._peak_bytes - before, pool.out_bytes - before]


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_buffers_in_flight_are_bounded_whatever_the_number_of_units(messaging: WorldPool, max_in_flight):
    row = 4 * (16 + (WIDTH * WIDTH + WIDTH) // 2)  # flags and shards of a unit
    filling, scattered = 2 * row, (2 + 1) * row  # of two ranks: to send; and to receive
    between = row // 2  # what one of two replicas adds up, from the other
    for num_units in (6, 12):
        for peak, left in messaging.run(4, peak_of_buffers, num_units, max_in_flight):
            assert peak == filling + max_in_flight * (scattered + between)
            assert left == 0
