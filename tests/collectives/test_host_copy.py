"""Full values that a host has once: nobody reads what somebody writes, and what somebody keeps stays as it was."""

import gc
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dshard
from dshard.collectives import watchdog
from dshard.collectives.host import full_values
from dshard.collectives.host.full_values import HostCopy
from dshard.collectives.host.rings import why_not
from dshard.tensor import operands, storage, writes
from dshard.testing import World, WorldPool
from tests.tensor.test_freshness import ACTIONS, SETTINGS, check_interleaving

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
STEPS = ("begin", "_put", "read", "end", "is_quiet", "make_quiet", "memory_for")


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
    patch.setattr(full_values, "PATIENCE_S", patience_s)


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


@contextmanager
def slow_on(rank: int, seconds: float, module: Any, name: str) -> Iterator[None]:
    """Have one rank take its time in a function."""
    call = getattr(module, name)

    def late(*args: Any) -> Any:
        if dist.get_rank() == rank:
            time.sleep(seconds)
        return call(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, late)
        yield


def written_with_itself(kind: str) -> bool:
    """A write whose operand has the target's own unit gathered, where one rank is slow to take its part of it."""
    torch.manual_seed(0)
    model: Any = nn.Linear(64, 64, bias=False)
    before = model.weight.detach().clone()
    dshard.fully_shard(model)
    weight = model.weight
    with torch.no_grad():
        model(torch.ones(1, 64))
        model.reshard()
        dist.barrier()
        with slow_on(1, 0.3, operands, "part_of"), slow_on(1, 0.3, writes, "part_of"):
            if kind == "pointwise":
                weight.add_(weight.t())
            elif kind == "view":
                weight[:].add_(weight.t())
            else:
                torch._foreach_add_([weight], [weight.t()])
    return torch.equal(weight.full_tensor(), before + before.t())


@pytest.mark.parametrize("kind", ["pointwise", "view", "foreach"])
def test_a_write_that_reads_its_own_target_is_right_where_a_rank_is_slow(worlds: WorldPool, kind):
    # Found: whether peers read was asked ahead of the operands, which have them read.
    assert worlds.run(2, written_with_itself, kind) == [True, True]


def two_layers() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(2)])
    dshard.fully_shard(model[0])
    dshard.fully_shard(model[1], reshard_after_forward=False)
    return dshard.fully_shard(model)


def failed_while_late() -> list[bool]:
    """An exception of all ranks ends a step, for whose gather one is late; what follows has the new values."""
    model = two_layers()
    x, bad = torch.eye(8), [False]
    first, second = (layer.weight.full_tensor().detach().clone() for layer in model)

    def fail(*_: Any) -> None:
        if bad[0]:
            bad[0] = False
            time.sleep(float(dist.get_rank()))
            raise RuntimeError("a bad batch")

    model[1].register_forward_pre_hook(fail)
    found = []
    with torch.no_grad():
        model(x)
        model(x)
        model[0].weight.mul_(1)
        model[1].weight.mul_(2)
        bad[0] = True
        for _ in range(3):
            try:
                found.append(torch.allclose(model(x), x @ first.t() @ (2 * second).t()))
            except RuntimeError:
                found.append(True)
    return found


def test_what_was_late_in_a_step_that_failed_is_put_in_place_later(worlds: WorldPool):
    # Found: it was noted as being there, and old values were read from then on.
    assert worlds.run(2, failed_while_late) == [[True] * 3] * 2


def unshard_and_meet() -> bool:
    """All ranks have a unit gathered ahead, one uses it, and then they meet: nobody must wait for what comes later."""
    model = two_layers()
    x = torch.eye(8)
    second = model[1].weight.full_tensor().detach().clone()
    with torch.no_grad():
        model(x)
        dist.barrier()
        model[1].weight.mul_(2)
        if dist.get_rank() == 1:
            time.sleep(1.0)
        model[1].unshard(async_op=True)
        if dist.get_rank() == 1:
            model[1](x)
        dist.barrier()
        return torch.allclose(model[1](x), x @ (2 * second).t())


def test_a_part_that_is_late_is_put_in_place_whatever_its_rank_does_meanwhile(worlds: WorldPool):
    # Found: it was when that rank came to use it; the other stood until the timeout.
    assert worlds.run(2, unshard_and_meet) == [True, True]


def read_beside_a_late_part() -> bool:
    """Rank 1 puts its part in place half a second after rank 0 could read it; whether that one has the new value."""
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model: Any = nn.Linear(8, 8, bias=False)
    after = 2 * model.weight.detach()
    dshard.fully_shard(model)
    read, is_late = HostCopy.read, dist.get_rank() == 1

    def beside(self: HostCopy, told: Any) -> Any:
        if is_late:
            store.wait(["rank 0 reads"])
            store.delete_key("rank 0 reads")
            time.sleep(0.5)
        else:
            store.set("rank 0 reads", "")
        return read(self, told)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        model(torch.eye(8))
        model.weight.to_local().mul_(2)
        patch.setattr(HostCopy, "read", beside)
        if is_late:
            patch.setattr(HostCopy, "make_quiet", lambda _: False)
        return torch.equal(model(torch.eye(8)), after.t())


def test_who_reads_first_waits_for_a_part_that_is_late(worlds: WorldPool):
    assert worlds.run(2, read_beside_a_late_part) == [True, True]


def stuck_while_late(limit_s: float, closes: bool) -> str:
    """Rank 1 tells that its part is late, and then does nothing until rank 0 has given it up; what that one says.

    Or it `closes` first, as a rank does that has lost a peer in another process group.
    """
    group = dist.new_group(timeout=timedelta(seconds=limit_s))
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    given_up = f"{group.group_name} was given up"
    torch.manual_seed(0)
    model: Any = dshard.fully_shard(nn.Linear(8, 8, bias=False), mesh=DeviceMesh.from_group(group, "cpu"))
    said, read = "", HostCopy.read

    def stuck(self: HostCopy, told: Any) -> Any:
        for channel in list(watchdog._State.channels) if closes else ():
            channel.close()
        with suppress(dist.DistError):  # of a rank 0 that does not give it up
            store.wait([given_up], timedelta(seconds=3 * limit_s))
        return read(self, told)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        model(torch.eye(8))
        model.weight.to_local().mul_(2)  # whoever has a shard may write to it, so it is copied to its place
        if dist.get_rank() == 1:
            patch.setattr(HostCopy, "make_quiet", lambda _: False)
            patch.setattr(HostCopy, "read", stuck)
        try:
            model(torch.eye(8))
        except RuntimeError as error:
            said = str(error)
        if dist.get_rank() == 0:
            store.set(given_up, "")
    return said


def test_a_part_that_never_comes_is_waited_for_as_long_as_the_group_says():
    with World(2) as world:  # of its own, for its ranks have lost each other
        assert "Timed out waiting 2000ms for its part of a gather" in world.run(stuck_while_late, 2.0, False)[0]


def test_a_part_that_never_comes_is_not_waited_for_where_its_rank_has_lost_another_one():
    with World(2) as world:
        assert "has closed the process group, or has lost another rank" in world.run(stuck_while_late, 30.0, True)[0]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.p, x @ self.q


def changed_places() -> list[bool]:
    """Parameters whose `.data` change places, or become one, and what was kept of one of them."""
    torch.manual_seed(0)
    x, found = torch.eye(8), []
    with torch.no_grad():
        for how in ("swap", "share"):
            model: Any = Two()
            a = model.p.clone()
            dshard.fully_shard(model)
            model(x)
            model.q.data = model.p.data.clone()  # from now on of one spec
            model.q.mul_(2)
            model(x)
            model.reshard()
            dist.barrier()
            kept = model.q.data
            if how == "swap":
                model.p.data, model.q.data = model.q.data, model.p.data
                wanted = 2 * a, a
            else:
                model.q.data = model.p.data
                wanted = a, a
            found += list(map(torch.equal, model(x), wanted))
            found.append(torch.equal(kept.full_tensor(), 2 * a))
    return found


def test_parameters_may_change_places(worlds: WorldPool):
    # Found: a shard that lay at another's place in the same memory was taken for one at its own.
    for found in worlds.run(2, changed_places):
        assert all(found)


def many_kept(num: int) -> int:
    model = model_of(1)
    before, kept = len(os.listdir("/proc/self/fd")), []
    for _ in range(num):
        with dshard.gathered(model) as full:
            kept.append(full["0.up.weight"])
        with torch.no_grad():
            model[0].up.weight.add_(1)
    assert all(torch.equal(b, a + 1) for a, b in pairwise(kept))
    return len(os.listdir("/proc/self/fd")) - before


def test_values_that_are_kept_hold_no_files(worlds: WorldPool):
    # Found: Python's own mmap keeps a handle of the file for each.
    assert all(found <= 2 for found in worlds.run(2, many_kept, 40))


def read_by_a_thread(reads: bool) -> float:
    model = model_of(2)
    optimizer = torch.optim.AdamW(model.parameters())
    end = threading.Event()

    def look() -> None:
        while not end.is_set():
            for param in list(model.parameters()):
                param.to_local().sum().item()
                param.detach().clone()

    thread = threading.Thread(target=look)
    if reads:
        thread.start()
    try:
        for _ in range(40):
            step(model, optimizer)
    finally:
        end.set()
        if reads:
            thread.join()
    return sum(param.full_tensor().double().sum().item() for param in model.parameters())


def test_a_thread_may_read_shards_while_another_trains(worlds: WorldPool):
    # Found: it had them lie elsewhere while a step wrote to where they lay; a step moved what it was reading.
    assert worlds.run(2, read_by_a_thread, True) == worlds.run(2, read_by_a_thread, False)


def shared_bytes() -> tuple[int, int]:
    """Proportional bytes of the files of full values that this rank maps, and of one unit's parameters."""
    gc.collect()
    dist.barrier()
    before = proportional_bytes()  # of models that other tests have left
    dist.barrier()
    torch.manual_seed(0)
    model: Any = nn.Linear(1024, 4096, bias=False)
    dshard.fully_shard(model, reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(1, 1024))
    dist.barrier()
    total = proportional_bytes() - before
    dist.barrier()
    return total, 4 * 1024 * 4096


def proportional_bytes() -> int:
    """This process's share of the files of full values."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            counts = "memfd:dshard full" in line
        elif line.startswith("Pss:") and counts:
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_have_the_full_values_once_together(worlds: WorldPool, num_ranks):
    found = worlds.run(num_ranks, shared_bytes)
    for total, expected in found:
        assert 0.99 * expected / num_ranks <= total <= 1.1 * expected / num_ranks + 100_000


def few_files() -> list[Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    step(model := model_of(1), torch.optim.SGD(model.parameters()))  # which reads files itself, the first time
    del model
    if dist.get_rank() == 1:
        lowest = os.dup(0)  # the limit bounds numbers, and those of closed files are free
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
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
        is_right = float(shard.flatten()[0]) == expected
        with torch.no_grad():
            model[0].up.weight.mul_(2)
        os._exit(0 if is_right and float(shard.flatten()[0]) == 2 * expected else 1)
    _, status = os.waitpid(child, 0)
    assert float(shard.flatten()[0]) == expected
    step(model, optimizer)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_process_reads_its_parents_shards_and_writes_to_its_own(worlds: WorldPool):
    assert worlds.run(2, read_in_a_fork) == [0, 0]


def fork_while_a_thread_reads() -> int:
    """What becomes of a forked process whose parent had a thread within the lock."""
    model = model_of(1)
    is_held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with storage._MOVES:
            is_held.set()
            may_go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    child = os.fork()
    if not child:
        signal.alarm(5)
        os._exit(0 if torch.isfinite(model[0].up.weight.to_local()).all() else 1)
    _, status = os.waitpid(child, 0)
    may_go.set()
    thread.join()
    return os.waitstatus_to_exitcode(status)


def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent(worlds: WorldPool):
    assert worlds.run(2, fork_while_a_thread_reads) == [0, 0]
