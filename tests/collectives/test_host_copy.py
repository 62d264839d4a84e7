"""Full values that a host has once: nobody reads what somebody writes, and what somebody keeps stays as it was."""

import gc
import os
import random
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dshard
from dshard.collectives import host_copy
from dshard.collectives.futex import why_not
from dshard.collectives.host_copy import HostCopy
from dshard.testing import WorldPool
from tests.tensor.test_freshness import ACTIONS, SETTINGS, check_interleaving

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
STEPS = ("begin", "_put", "read", "end", "is_quiet", "make_quiet", "home_of")


def slowed(patch: pytest.MonkeyPatch, seed: int, patience_s: float) -> None:
    """Stop this rank now and then, between agreeing, reading, writing and leaving."""
    rng = random.Random(100 * seed + dist.get_rank())

    def stopping(call: Any) -> Any:
        def stopped(self: HostCopy, *args: Any) -> Any:
            time.sleep(rng.choice((0, 0, 0, 0.001, 0.01)))
            found = call(self, *args)
            time.sleep(rng.choice((0, 0, 0, 0.001, 0.01)))
            return found

        return stopped

    for name in STEPS:
        patch.setattr(HostCopy, name, stopping(getattr(HostCopy, name)))
    patch.setattr(host_copy, "_PATIENCE_S", patience_s)


def check_slowed(options: Any, actions: Any, seed: int, patience_s: float) -> str:
    with pytest.MonkeyPatch.context() as patch:
        slowed(patch, seed, patience_s)
        return check_interleaving(options, actions)


@settings(max_examples=60)
@given(
    num_ranks=st.integers(2, 4),
    options=SETTINGS,
    actions=st.lists(ACTIONS, min_size=2, max_size=10),
    seed=st.integers(0, 1000),
    patience_s=st.sampled_from([0.0, 0.02]),
)
def test_every_read_sees_the_last_write_wherever_ranks_stop(
    worlds: WorldPool, num_ranks, options, actions, seed, patience_s
):
    problems = worlds.run(num_ranks, check_slowed, options, actions, seed, patience_s)
    assert not any(problems), max(problems)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(40, 90), nn.Linear(90, 40)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def model_of(num_blocks: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[Block() for _ in range(num_blocks)])
    for block in model:
        dshard.fully_shard(block, **options)
    dshard.fully_shard(model, **options)
    return model


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 40)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def homes(model: nn.Module) -> list[bool]:
    return [param.shard_storage.home is not None for param in model.parameters()]  # type: ignore[attr-defined]


def kept() -> list[bool]:
    """Whether what somebody keeps of a gathered value stays as it was, while all go on."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step(model, optimizer)
    assert all(homes(model))
    weight = model[0].up.weight
    before = weight.full_tensor().detach().clone()
    with dshard.gathered(model) as full:
        values = {name: value for name, value in full.items() if name.endswith("weight")}
    copies = {name: value.clone() for name, value in values.items()}
    view = weight.materialize()[3:]  # as an operation has that gives a view of its operand
    time.sleep(0.05 * dist.get_rank())
    for _ in range(3):
        step(model, optimizer)
    found = [torch.equal(values[name], copies[name]) for name in values]
    return [*found, torch.equal(view, before[3:]), not torch.equal(weight.full_tensor(), before)]


def test_what_somebody_keeps_of_a_gathered_value_is_the_value_of_its_moment(worlds: WorldPool):
    for found in worlds.run(3, kept):
        assert all(found)


def written_to_while_read() -> list[Any]:
    """Rank 0 writes while rank 1 has not let go; then all gather."""
    model = model_of(1, reshard_after_forward=False)
    weight = model[0].up.weight
    with torch.no_grad():
        model(torch.ones(1, 40))  # whose copies stay
    was_home, before = weight.shard_storage.home is not None, weight.full_tensor().clone()
    if dist.get_rank() == 0:
        with torch.no_grad():
            weight.mul_(2)
    else:
        time.sleep(0.5)
        assert torch.equal(weight.full_tensor(), before)  # its copies are fresh: no gather
        with torch.no_grad():
            weight.mul_(2)
    is_home = weight.shard_storage.home is not None
    after = weight.full_tensor()
    return [was_home, is_home, torch.equal(after, before * 2)]


def test_a_write_goes_elsewhere_while_a_peer_reads(worlds: WorldPool):
    first, second = worlds.run(2, written_to_while_read)
    assert first == [True, False, True]
    assert second[0]
    assert second[2]


def written_through_numpy() -> list[Any]:
    model = model_of(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step(model, optimizer)
    weight = model[0].up.weight
    array = weight.to_local().numpy()
    seen = []
    for value in (3.0, 4.0):
        array[:] = value
        model(torch.ones(1, 40))
        seen.append(weight.full_tensor().unique().tolist())
    del array
    for _ in range(2):
        model(torch.ones(1, 40))
    return [seen, all(homes(model))]


def test_a_write_through_numpy_is_seen_by_the_next_gather_on_all_ranks(worlds: WorldPool):
    for found in worlds.run(2, written_through_numpy):
        assert found == [[[3.0], [4.0]], True]


def shared_bytes() -> tuple[int, int]:
    """Proportional bytes of the files of full values that this rank maps, and of one unit's parameters."""
    torch.manual_seed(0)
    model: Any = nn.Linear(1024, 4096, bias=False)
    dshard.fully_shard(model, reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(1, 1024))
    dist.barrier()
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            counts = "memfd:dshard full" in line
        elif line.startswith("Pss:") and counts:
            total += 1024 * int(line.split()[1])
    dist.barrier()
    return total, 4 * 1024 * 4096


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_have_the_full_values_once_together(worlds: WorldPool, num_ranks):
    found = worlds.run(num_ranks, shared_bytes)
    for total, expected in found:
        assert expected / num_ranks <= total <= 1.1 * expected / num_ranks + 100_000


def few_files() -> list[Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, hard))
    try:
        model = model_of(1)
        before = [p.full_tensor().detach().clone() for p in model.parameters()]
        loss = model(torch.ones(2, 40)).sum()
        loss.backward()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return [homes(model), loss.item(), sum(x.sum().item() for x in before)]


def test_where_a_rank_has_no_files_left_all_copy(worlds: WorldPool):
    first, second = worlds.run(2, few_files)
    assert not any(first[0] + second[0])
    assert first[1:] == second[1:]


def files() -> tuple[int, int]:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    model = model_of(3)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    during = len(os.listdir("/proc/self/fd"))
    del model
    gc.collect()
    return during - before, len(os.listdir("/proc/self/fd")) - before


def test_a_model_that_is_gone_leaves_no_file(worlds: WorldPool):
    worlds.run(2, files)  # which opens what a process keeps for good
    for during, after in worlds.run(2, files):
        assert during >= 3
        assert after == 0


def read_in_a_fork() -> int:
    """What a forked process, as a worker of a DataLoader, reads of a parameter; and that its end says nothing here."""
    model = model_of(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step(model, optimizer)
    shard = model[0].up.weight.shard_storage.resolve()
    expected = float(shard.flatten()[0])
    child = os.fork()
    if not child:
        os._exit(0 if float(shard.flatten()[0]) == expected else 1)
    _, status = os.waitpid(child, 0)
    step(model, optimizer)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_process_reads_its_parents_shards(worlds: WorldPool):
    assert worlds.run(2, read_in_a_fork) == [0, 0]
