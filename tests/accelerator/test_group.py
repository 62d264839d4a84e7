"""Collectives of the simulated accelerator: gloo's values, NCCL's manners."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dshard.testing import World
from tests.accelerator.rooms import error_of, settle, simulated
from tests.offload.test_offload import group_of

AVG, SUM, MAX = dist.ReduceOp.AVG, dist.ReduceOp.SUM, dist.ReduceOp.MAX
# Torch 2.13 renamed them.
GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
NUM = 4  # elements of a rank


def everyone(kind: str) -> Any:
    return group_of(kind, tuple(range(dist.get_world_size())))


def own(dtype: torch.dtype, num: int = NUM) -> Tensor:
    """What a rank begins with: sums of these are exact in every dtype."""
    return (torch.arange(num) % 5 + 3 * dist.get_rank() + 1).to(dtype)


def collectives(kind: str, dtype: torch.dtype, is_async: bool) -> dict[str, list[float]]:
    """What each gives: an average is gloo's sum, divided."""
    group, size, rank = everyone(kind), dist.get_world_size(), dist.get_rank()
    options: dict[str, Any] = {"group": group, "async_op": is_async}
    out: dict[str, list[float]] = {}

    def note(name: str, work: Any, *results: Tensor, by: int = 1) -> None:
        if work is not None:
            work.wait()
        out[name] = [v for result in results for v in (result.cpu().float() / by).flatten().tolist()]

    def new(num: int = NUM) -> Tensor:
        return own(dtype, num).to(kind)

    def blank(num: int = NUM) -> Tensor:
        return torch.zeros(num, dtype=dtype, device=kind)

    parts = [blank() for _ in range(size)]
    note("all_gather", dist.all_gather(parts, new(), **options), *parts)
    to = blank(size * NUM)
    note("all_gather_into_tensor", GATHER(to, new(), **options), to)
    for name, op in (("sum", SUM), ("avg", AVG), ("max", MAX)):
        by = size if op == AVG and kind == "cpu" else 1
        known = SUM if by > 1 else op
        to = new()
        note(f"all_reduce {name}", dist.all_reduce(to, known, **options), to, by=by)
        if op != MAX:
            to = blank()
            note(name, REDUCE_SCATTER(to, new(size * NUM), known, **options), to, by=by)
    to = new()
    note("broadcast", dist.broadcast(to, 1, **options), to)
    to = blank(size * NUM)
    note("all_to_all", dist.all_to_all_single(to, new(size * NUM), **options), to)
    to = blank()
    all_parts = [new() + i for i in range(size)] if rank == 0 else None
    note("scatter", dist.scatter(to, all_parts, 0, **options), to)
    to = blank()
    if rank < 2:
        note("message", dist.isend(new(), 1, group) if rank == 0 else dist.irecv(to, 0, group), to)
    ring = blank()
    ops = [
        dist.P2POp(dist.isend, new(), (rank + 1) % size, group),
        dist.P2POp(dist.irecv, ring, (rank - 1) % size, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    note("ring", None, ring)
    dist.barrier(group, device_ids=[0] if kind == "sim" else None)
    return out


def simulated_collectives(dtype: torch.dtype, is_async: bool, mode: str) -> dict[str, list[float]]:
    group_of("sim", tuple(range(dist.get_world_size())))
    with simulated(mode, idle_s=0.003, bound_s=10.0):
        return collectives("sim", dtype, is_async)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_collectives_give_what_gloos_give(simulators, num_ranks, dtype):
    if dtype == torch.int64:
        expected = simulators.run(num_ranks, gathered_integers, "cpu")
        assert simulators.run(num_ranks, gathered_integers, "sim") == expected
        return
    expected = simulators.run(num_ranks, collectives, "cpu", dtype, False)
    for is_async, mode in ((False, "random"), (True, "lazy"), (True, "others first")):
        assert simulators.run(num_ranks, simulated_collectives, dtype, is_async, mode) == expected, (is_async, mode)


def gathered_integers(kind: str) -> list[int]:
    group, to = everyone(kind), torch.zeros(dist.get_world_size() * NUM, dtype=torch.int64, device=kind)
    GATHER(to, own(torch.int64).to(kind), group)
    dist.all_reduce(to, SUM, group)
    return to.tolist()


def haste(what: str) -> str:
    """What is said of who does not wait for a collective, or waits for it."""
    group = everyone("sim")
    with simulated(idle_s=0.003, bound_s=10.0) as device:
        tensor, to = torch.ones(NUM, device="sim"), torch.zeros(2 * NUM, device="sim")
        device.synchronize()
        if what == "together":
            with dist._coalescing_manager(group, torch.device("sim"), async_ops=True) as manager:
                GATHER(to, tensor, group, async_op=True)
                GATHER(torch.empty_like(to), tensor, group, async_op=True)
            work: Any = manager
        else:
            work = GATHER(to, tensor, group, async_op=what != "sync")
        uses: dict[str, Callable[[], object]] = {
            "reads": lambda: to.sum(),
            "writes its input": lambda: tensor.add_(1),
            "lets its input go": lambda: None,
        }
        if what in ("waits", "together"):
            work.wait()
        if what == "waits in another stream":
            with torch.sim.Stream():  # type: ignore[attr-defined]
                work.wait()
        if what == "lets its input go":
            del tensor
            text = error_of(lambda: [torch.empty(NUM, device="sim").fill_(7) for _ in range(3)])
            work.wait()
            return text or str(to.tolist())
        found = error_of(uses.get(what, lambda: to.sum()))
        settle(device)
        return found


@pytest.mark.parametrize("what", ["reads", "writes its input", "waits in another stream"])
def test_who_does_not_wait_for_a_collective_races_with_it(simulators, what):
    for text in simulators.run(2, haste, what):
        assert text.startswith("race"), text
        assert "'all_gather' on stream" in text
        assert text.count("accelerator/test_group.py:") >= 2, text


@pytest.mark.parametrize("what", ["waits", "sync", "together"])
def test_who_waits_does_not(simulators, what):
    assert simulators.run(2, haste, what) == ["", ""]


def test_the_input_of_a_collective_may_be_let_go_before_it_is_over(simulators):
    assert simulators.run(2, haste, "lets its input go") == [str([1.0] * 2 * NUM)] * 2


def at_odds(what: str) -> str:
    group, rank = everyone("sim"), dist.get_rank()
    with simulated(idle_s=0.003, bound_s=10.0) as device:
        tensor = torch.ones(NUM + (rank if what == "sizes" else 0), device="sim")
        if what == "kinds" and rank:
            dist.broadcast(tensor, 0, group)
        elif what == "ops" and rank:
            dist.all_reduce(tensor, MAX, group)
        else:
            dist.all_reduce(tensor, SUM, group)
        text = error_of(device.synchronize)
        settle(device)
        after = torch.ones(1, device="sim")
        dist.all_reduce(after, SUM, group)  # they are in step again
        assert after.item() == 2
        return text


@pytest.mark.parametrize("what", ["sizes", "kinds", "ops"])
def test_ranks_at_odds_are_told_in_place_of_a_hang(simulators, what):
    for rank, text in enumerate(simulators.run(2, at_odds, what)):
        assert f"hangs: rank {rank} has (kind, elements, dtype, op or root)" in text, text
        assert f"rank {1 - rank} has (" in text
        assert "accelerator/test_group.py:" in text


def alone() -> str:
    group = everyone("sim")
    with simulated(idle_s=0.003, bound_s=1.0) as device:
        if dist.get_rank():
            return ""
        dist.all_reduce(torch.ones(NUM, device="sim"), SUM, group)
        return error_of(device.synchronize)


def test_a_collective_that_a_peer_does_not_take_part_in_is_told_within_a_bound(simulators):
    with World(2) as world:  # which nobody else is to use afterwards
        texts = world.run(alone)
    assert "the collective 'all_reduce' hangs: a peer does not take part" in texts[0]
    assert texts[1] == ""


def over_streams() -> list[float]:
    group = everyone("sim")
    out = []
    for seed in range(5):
        with simulated("others first", seed=seed, idle_s=0.003, bound_s=5.0):
            sides = [torch.sim.Stream() for _ in range(4)]  # type: ignore[attr-defined]
            tensors = [torch.full((NUM,), float(i), device="sim") for i in range(4)]
            torch.accelerator.synchronize()
            for i in range(12):
                with sides[i % 4]:  # nothing orders these but the group
                    dist.all_reduce(tensors[i % 4], AVG if i % 3 else SUM, group)
            torch.accelerator.synchronize()
            out += [t[0].item() for t in tensors]
    return out


def test_collectives_of_a_group_run_in_the_order_in_which_they_were_asked_for(simulators):
    expected = [float(i * 2 ** sum(j % 3 == 0 for j in range(i, 12, 4))) for i in range(4)] * 5
    assert simulators.run(2, over_streams) == [expected] * 2
