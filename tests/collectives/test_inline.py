"""Few values travel in the message of their header, many in messages of their own: the same values, fewer messages."""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dshard.collectives import ReduceOp, ShardGroup, _c10d, all_reduce
from dshard.collectives.divergence import Kind
from dshard.collectives.exchange import Exchange
from dshard.errors import DivergenceError
from dshard.layout import INLINE_BYTES
from dshard.testing import WorldPool
from tests.pools import MessagingWorld

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


def world() -> ShardGroup:
    assert dist.group.WORLD is not None
    return ShardGroup(dist.group.WORLD, torch.device("cpu"))


def values_of(rank: int, peer: int, number: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What one rank sends another one in a collective."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * peer + number)
    return torch.randint(0, 200, (numel,), generator=generator).to(dtype)


def numel_from(rank: int, numel: int) -> int:
    """Ranks send different amounts, on both sides of the limit."""
    return max(0, numel - rank)


def swap_all(sent: Sequence[tuple[int, torch.dtype]], abandoned: int) -> list[str]:
    """Start collectives, one per entry, and wait for all but one in order; gives what differs from what was sent."""
    group, wrong = world(), []
    started: list[Any] = []
    for number, (numel, dtype) in enumerate(sent):
        exchange = Exchange(group, Kind.COMBINE, f"swap {number}", 0, numel)
        rows = {}
        for peer in group.peers:
            rows[peer] = torch.zeros(numel_from(peer, numel), dtype=dtype)
            exchange.swap(rows[peer], values_of(group.rank, peer, number, numel_from(group.rank, numel), dtype), peer)
        exchange.start()
        started.append((number, exchange, rows, numel, dtype))
        del exchange, rows
    for entry in started:
        number, exchange, rows, numel, dtype = entry
        if number == abandoned:
            continue
        exchange.wait()
        for peer, row in rows.items():
            if not torch.equal(row, values_of(peer, group.rank, number, row.numel(), dtype)):
                wrong.append(f"{number} from {peer}")
    del started, entry, exchange, rows
    gc.collect()
    return wrong


SIZES = st.sampled_from([0, 1, 2, 3, 5, 17, 1000, INLINE_BYTES // 4, INLINE_BYTES // 4 + 2, INLINE_BYTES, 30_000])


@settings(max_examples=25)
@given(
    num_ranks=st.sampled_from([2, 3]),
    sent=st.lists(st.tuples(SIZES, st.sampled_from(DTYPES)), min_size=1, max_size=6),
    abandoned=st.integers(-1, 4),
)
def test_all_values_arrive_whatever_their_sizes_and_whoever_does_not_wait(
    messaging: WorldPool, num_ranks, sent, abandoned
):
    assert messaging.run(num_ranks, swap_all, sent, abandoned) == [[]] * num_ranks


def messages_for(num_bytes: int) -> int:
    """Messages that a rank sends in an all-reduce."""
    group, count, send = world(), 0, _c10d.send

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return send(*args)

    all_reduce([torch.ones(1)], group, ReduceOp.SUM, label="first").wait()  # which may find the way
    _c10d.send = counted
    try:
        total = all_reduce([torch.ones(num_bytes // 4)], group, ReduceOp.SUM, label="sum").wait()[0]
    finally:
        _c10d.send = send
    assert total.sum().item() == num_bytes // 4 * group.num_ranks
    return count


@pytest.mark.parametrize(("num_bytes", "expected"), [(4, 1), (INLINE_BYTES, 1), (INLINE_BYTES + 16, 2)])
def test_few_values_take_one_message_for_each_peer_and_many_two(messaging: WorldPool, num_bytes, expected):
    assert messaging.run(3, messages_for, num_bytes) == [2 * expected] * 3


def sums_of_other_sizes(sizes: Sequence[int]) -> str:
    group = world()
    exchange = Exchange(group, Kind.COMBINE, "sum", 0, 7)  # which tells messages apart, but not these
    peer = group.peers[0]
    exchange.swap(torch.zeros(sizes[group.rank]), torch.ones(sizes[group.rank]), peer)
    exchange.start()
    try:
        exchange.wait()
    except DivergenceError as error:
        return str(error)
    return ""


# A message of more bytes than were asked for would end the process; these cannot.
@pytest.mark.parametrize("sizes", [(3, 50), (50, 3), (3, 30_000)])
def test_ranks_that_send_other_amounts_than_are_awaited_say_so(sizes):
    with MessagingWorld(2) as world_of_two:
        texts = world_of_two.run(sums_of_other_sizes, sizes)
    for rank, text in enumerate(texts):
        assert "must exchange values of the same shapes and dtypes" in text
        assert f"rank {1 - rank} sends" in text
