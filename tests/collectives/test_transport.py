"""Through shared memory ranks of one host exchange what they do by messages: the same bits, errors and ends."""

import gc
import json
import os
import random
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard import collectives
from dshard.collectives import ReduceOp, ShardGroup, exchange, watchdog
from dshard.collectives.exchange import ByMessages, ThroughMemory, transport_of
from dshard.collectives.host import rings
from dshard.collectives.host.arena import Arena
from dshard.collectives.host.rings import why_not
from dshard.testing import World, WorldPool, expect_error
from tests.tensor.test_uses import USES, used_as_plain

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
CPU = torch.device("cpu")


def fresh_group(way: str) -> ShardGroup:
    """A new process group of all ranks, that goes this way."""
    os.environ["DSHARD_TRANSPORT"] = way
    try:
        group = ShardGroup(dist.new_group(), CPU)
        found = transport_of(group)
    finally:
        del os.environ["DSHARD_TRANSPORT"]
    assert type(found) is (ThroughMemory if way == "memory" else ByMessages)
    return group


# --- the same bits ---------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Large and small weights, odd dims, a tied head, and a layer that is not used in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 33)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(33, 190), nn.GELU(), nn.Linear(190, 33)) for _ in range(3)]
        )
        self.side = nn.Linear(33, 33)
        self.head = nn.Linear(33, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, *, with_side: bool) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.side(x) if with_side else x)


def trained(way: str, shape: tuple[int, ...], strategy: Any, dtype: torch.dtype | None) -> list[Any]:
    """Losses, norms and weights of a few steps, with a switch of strategies and an evaluation between them."""
    mesh: Any = init_device_mesh("cpu", shape)
    torch.manual_seed(0)
    model: Any = Net()
    precision = dshard.MixedPrecisionPolicy(param_dtype=dtype) if dtype is not None else None
    options = {"mesh": mesh, "strategy": strategy, **({"mp_policy": precision} if precision else {})}
    for block in model.blocks:
        dshard.fully_shard(block, **options)
    dshard.fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for step in range(5):
        torch.manual_seed(100 * step + dist.get_rank())
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            ids = torch.randint(50, (3, 7))
            loss = model(ids, with_side=step % 2 == 0).float().square().mean()
            loss.backward()
        found += [loss.item(), float(dshard.clip_grad_norm_(model.parameters(), 0.5))]
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            dshard.set_strategy(model, "zero2" if len(shape) == 1 else "full", optimizer=optimizer)
            with torch.no_grad():
                found.append(model(torch.arange(7)[None], with_side=True).float().sum().item())
    assert type(transport_of(model.side.weight.shard_group)) is (ThroughMemory if way == "memory" else ByMessages)
    return [found, [param.full_tensor().detach() for param in model.parameters()]]


@pytest.mark.parametrize(
    ("shape", "strategy", "dtype"),
    [
        ((2,), "full", None),
        ((2,), "full", torch.bfloat16),
        ((2,), {"blocks.0.*": "ddp", "embed.*": "zero1", "*": "full"}, None),
        ((2,), "split(3)", None),
        ((4,), "full", None),
        ((4,), "hybrid(2)", None),
        ((3,), "full", None),
        ((2, 2), "full", torch.bfloat16),
    ],
)
def test_a_training_has_the_same_bits_through_memory_as_by_messages(worlds, messaging, shape, strategy, dtype):
    num_ranks = torch.Size(shape).numel()
    by_messages = messaging.run(num_ranks, trained, "messages", shape, strategy, dtype)
    through_memory = worlds.run(num_ranks, trained, "memory", shape, strategy, dtype)
    for (numbers, values), (other_numbers, other_values) in zip(by_messages, through_memory, strict=True):
        assert numbers == other_numbers
        assert all(map(torch.equal, values, other_values))


def used_through_memory() -> bool:
    for use in USES:
        used_as_plain(use, "blocks")
    return isinstance(transport_of(ShardGroup(dist.group.WORLD, CPU)), ThroughMemory)  # type: ignore[arg-type]


def test_every_use_of_a_parameter_is_right_through_memory_too(worlds: WorldPool):
    # Found: under transforms of torch.func a header was lost, and ranks waited for each other until the timeout.
    assert worlds.run(3, used_through_memory) == [True] * 3


# --- nobody reads what somebody writes -------------------------------------------------------------------------------


def values_of(seed: int, step: int, rank: int, numel: int) -> Tensor:
    return torch.full((numel,), seed * 1000 + step * 10 + rank + 1, dtype=torch.float32)


def exchanged(seed: int, num_steps: int, sizes: list[int]) -> int:
    """Sums over the ranks while each of them stops at points of its own; gives how many were wrong."""
    group, rank = fresh_group("memory"), dist.get_rank()
    draw, num_wrong = random.Random(f"{seed} {rank}"), 0
    in_flight: list[Any] = []
    for step in range(num_steps):
        numel = sizes[step % len(sizes)]
        own = values_of(seed, step, rank, numel)
        time.sleep(draw.choice((0, 0, 0, 0.002)))
        in_flight.append((step, collectives.all_reduce([own], group, ReduceOp.SUM, label=f"step {step}")))
        own.fill_(-1)  # what was given may be written to at once
        time.sleep(draw.choice((0, 0, 0, 0.001)))
        while len(in_flight) > draw.randint(0, 3):
            number, handle = in_flight.pop(draw.randrange(len(in_flight)))
            total = sum(values_of(seed, number, r, sizes[number % len(sizes)]) for r in range(group.num_ranks))
            num_wrong += not torch.equal(handle.wait()[0], total)
    for number, handle in in_flight:
        total = sum(values_of(seed, number, r, sizes[number % len(sizes)]) for r in range(group.num_ranks))
        num_wrong += not torch.equal(handle.wait()[0], total)
    return num_wrong


@settings(max_examples=8)
@given(
    seed=st.integers(0, 1000),
    num_ranks=st.integers(2, 3),
    sizes=st.lists(st.sampled_from([0, 1, 7, 1000, 300_000]), min_size=1, max_size=4),
)
def test_values_are_those_of_their_moment_wherever_ranks_stop(worlds: WorldPool, seed, num_ranks, sizes):
    assert worlds.run(num_ranks, exchanged, seed, 40, sizes) == [0] * num_ranks


def runs_ahead(num_steps: int) -> int:
    """Rank 0 starts all collectives ahead of the first wait, rank 1 waits for each; gives how many were wrong."""
    group, rank = fresh_group("memory"), dist.get_rank()

    def start(step: int) -> Any:
        return collectives.all_reduce([values_of(0, step, rank, 5)], group, ReduceOp.SUM, label=f"step {step}")

    handles = (start(step) for step in range(num_steps))
    totals = [sum(values_of(0, step, r, 5) for r in range(2)) for step in range(num_steps)]
    waited = [handle.wait()[0] for handle in (list(handles) if rank == 0 else handles)]
    return sum(not torch.equal(a, b) for a, b in zip(waited, totals, strict=True))


def test_rings_go_round_and_hold_back_a_rank_that_is_ahead(worlds: WorldPool):
    assert worlds.run(2, runs_ahead, 700) == [0, 0]  # of 256 records


def nobody_waits(num_steps: int) -> list[bool]:
    """A sum that nobody waits for, ahead of many others: what it holds, and whether it has its values in the end."""
    group, rank = fresh_group("memory"), dist.get_rank()
    late = collectives.all_reduce([values_of(0, 0, rank, 5)], group, ReduceOp.SUM, label="late")
    for step in range(num_steps):
        collectives.all_reduce([values_of(0, step, rank, 5)], group, ReduceOp.SUM, label="a sum").wait()
    out = transport_of(group)._rings[1 - rank][0]  # type: ignore[attr-defined]
    out.collect()
    return [len(out._unread) < 5, torch.equal(late.wait()[0], sum(values_of(0, 0, r, 5) for r in range(2)))]


def test_a_collective_that_nobody_waits_for_holds_up_no_other(worlds: WorldPool):
    # Found: one that lay in a cycle of garbage, until nothing went on.
    assert worlds.run(2, nobody_waits, 2000) == [[True, True]] * 2


def forks() -> list[bool]:
    """Whether memory is as it was after a forked process, as a worker of a DataLoader, has dropped all that it got."""
    group, rank = fresh_group("memory"), dist.get_rank()
    arena = transport_of(group).arena
    assert arena is not None
    held = [arena.take(5 << 20)[0].fill_(7)]
    handles = [collectives.all_reduce([values_of(0, 0, rank, 400_000)], group, ReduceOp.SUM, label="a sum")]
    child = os.fork()
    if child == 0:
        held.clear()
        handles.clear()
        gc.collect()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    total = sum(values_of(0, 0, r, 400_000) for r in range(2))
    return [code == 0, bool((held[0] == 7).all()), torch.equal(handles[0].wait()[0], total)]


def test_a_forked_process_takes_nothing_back(worlds: WorldPool):
    assert worlds.run(2, forks) == [[True, True, True]] * 2


def forks_and_collects() -> tuple[str, bool, bool]:
    """What a fork raises that looks at what peers have read, and whether this rank knows it before and after that."""
    group = fresh_group("memory")
    transport: Any = transport_of(group)
    (out, _), *_ = transport._rings.values()
    handle = collectives.all_reduce([torch.ones(1)], group, ReduceOp.SUM, label="a sum")
    if dist.get_rank() == 0:  # it is through before rank 1 has read
        handle.wait()
    dist.barrier()
    handle.wait()
    dist.barrier()
    is_known = not out.is_unread()
    told = told_by_a_fork(transport.collect)
    transport.collect()
    return told, is_known, not out.is_unread()


def test_a_forked_process_takes_no_note_that_a_peer_has_read(worlds: WorldPool):
    assert worlds.run(2, forks_and_collects)[0] == ("nothing", False, True)


def told_by_a_fork(act: Callable[[], object]) -> str:
    """What a forked process raises."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = "nothing"
        try:
            act()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    try:
        has_ended = bool(select.select([read], [], [], 10.0)[0])  # of a timeout of 20
        return os.read(read, 10_000).decode() if has_ended else "nothing: it hangs"
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def forks_and_communicates(way: str) -> tuple[str, list[float]]:
    """What a fork of rank 0 is told at a sum, and the next sums of the ranks."""
    group, rank = fresh_group(way), dist.get_rank()

    def start(value: float) -> Any:
        return collectives.all_reduce([torch.full((1,), value)], group, ReduceOp.SUM, label="a sum")

    start(1.0).wait()
    dist.barrier()
    told = told_by_a_fork(lambda: start(100.0)) if rank == 0 else ""
    dist.barrier()
    return told, [start(float(number)).wait()[0].item() for number in range(3)]


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_a_forked_process_that_starts_a_collective_raises_and_changes_none_of_its_parent(worlds: WorldPool, way):
    (told, sums), (_, other_sums) = worlds.run(2, forks_and_communicates, way)
    assert sums == other_sums == [0.0, 2.0, 4.0]
    assert "StateError: process group " in told
    assert "must run in the process that joined it" in told
    assert "param.full_tensor(), made ahead of the fork" in told


def forks_and_uses(way: str, use: str) -> tuple[str, bool]:
    """What a fork of rank 0 is told that uses a sharded model, and whether the ranks train on."""
    model: Any = nn.Sequential(*(dshard.fully_shard(nn.Linear(64, 64)) for _ in range(2)))
    dshard.fully_shard(model)

    def loss() -> Tensor:
        total: Tensor = model(torch.ones(2, 64)).sum()
        total.backward()
        return total

    first = loss()
    assert type(transport_of(model[0].weight.shard_group)) is (ThroughMemory if way == "memory" else ByMessages)
    dist.barrier()
    uses = {"reads": lambda: model[0].weight.sum(), "runs": lambda: model(torch.ones(2, 64))}
    told = told_by_a_fork(uses[use]) if dist.get_rank() == 0 else ""
    dist.barrier()
    blamed = watchdog.caught_by_some(model[0].weight.shard_group.process_group)
    return told, blamed is None and torch.equal(loss(), first)


@pytest.mark.parametrize("use", ["reads", "runs"])
@pytest.mark.parametrize("way", ["memory", "messages"])
def test_a_forked_process_that_uses_a_sharded_model_raises_and_does_not_wait(worlds, messaging, way, use):
    (told, trains_on), (_, peer_trains_on) = (worlds if way == "memory" else messaging).run(2, forks_and_uses, way, use)
    assert trains_on
    assert peer_trains_on
    assert "StateError: process group " in told


def num_pidfds() -> int:
    """How many processes this one watches."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found += "pidfd" in str(fd.readlink())
        except OSError:  # that of the look itself
            continue
    return found


def makes_and_destroys(num_groups: int) -> tuple[int, int]:
    """Transports of destroyed process groups that are kept, and handles of peers' processes."""
    kept, num_before = [], num_pidfds()
    for _ in range(num_groups):
        group = fresh_group("memory")
        collectives.all_reduce([torch.ones(1)], group, ReduceOp.SUM, label="a sum").wait()
        kept.append(weakref.ref(transport_of(group)))
        dist.barrier()
        dist.destroy_process_group(group.process_group)
        del group
        gc.collect()
    until = time.monotonic() + 20  # the watchdog may just be looking at the last one
    while any(ref() is not None for ref in kept) and time.monotonic() < until:
        time.sleep(0.05)
        gc.collect()
    return sum(ref() is not None for ref in kept), num_pidfds() - num_before


def test_a_destroyed_process_group_keeps_neither_memory_nor_handles():
    with World(2) as world:
        for num_transports, num_handles in world.run(makes_and_destroys, 5):
            assert num_transports == 0
            assert num_handles <= 1  # of the last one, whose peer may still read


@given(ops=st.lists(st.tuples(st.booleans(), st.integers(0, 3_000_000)), max_size=40))
def test_blocks_of_an_arena_never_overlap_and_all_of_it_comes_back(ops):
    arena = Arena()
    whole, held = arena._free[0], []
    for gives, num_bytes in ops:
        if gives and held:
            held.pop(num_bytes % len(held))
        else:
            memory, offset = arena.take(num_bytes)
            assert memory.numel() == num_bytes
            assert arena.offset_of(memory) == offset or not num_bytes
            held.append((memory, offset))
        places = sorted((offset, offset + memory.numel()) for memory, offset in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
        memory = None
    held.clear()
    arena._take_back()
    assert arena._free == [whole]
    assert arena.used_bytes == 0


# --- errors ----------------------------------------------------------------------------------------------------------


def apart(what: str) -> None:
    group, rank = fresh_group("memory"), dist.get_rank()
    numel = 3 + (rank if what == "sizes" else 0)
    label = f"rank {rank}" if what == "labels" else "a sum"
    collectives.all_reduce([torch.ones(numel)], group, ReduceOp.SUM, label=label).wait()


@pytest.mark.parametrize(
    ("what", "text"), [("labels", "must communicate about the same"), ("sizes", "the same shapes")]
)
def test_ranks_that_mean_different_things_are_told(worlds: WorldPool, what, text):
    for kind, found in expect_error(worlds.get_world(2), apart, what):
        assert kind == "DivergenceError"
        assert text in found


def unreadable(on_rank: int) -> list[str]:
    """Which way it goes where one rank cannot map the others' memory, and that it works."""

    def refuse(*_: object) -> Any:
        raise OSError("no /proc of others")

    known = rings.map_others
    if dist.get_rank() == on_rank:
        rings.map_others = refuse
    os.environ["DSHARD_TRANSPORT"] = "memory"
    try:
        group = ShardGroup(dist.new_group(), CPU)
        (total,) = collectives.all_reduce([torch.ones(3)], group, ReduceOp.SUM, label="a sum").wait()
        return [type(transport_of(group)).__name__, str(total.tolist())]
    finally:
        rings.map_others = known
        del os.environ["DSHARD_TRANSPORT"]


def test_all_ranks_exchange_messages_where_one_cannot_read_the_others_memory(worlds: WorldPool):
    assert worlds.run(3, unreadable, 1) == [["ByMessages", "[3.0, 3.0, 3.0]"]] * 3


def killed(folder: Path, when_s: float, victim: int) -> None:
    """Train, with an evaluation now and then, until a rank is killed, somewhere; write what the others are told."""
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    for layer in model:
        dshard.fully_shard(layer)
    dshard.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(2, 64))

    step()
    assert isinstance(transport_of(model[0].weight.shard_group), ThroughMemory)
    dist.barrier()
    if dist.get_rank() == victim:

        def kill() -> None:
            time.sleep(when_s)
            Path(folder, "when").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill).start()
    try:
        while True:
            step()
    except dshard.DShardError as error:
        after_s = time.time() - float(Path(folder, "when").read_text())
        told = {"kind": type(error).__name__, "text": str(error), "after_s": after_s}
        Path(folder, f"told {dist.get_rank()}").write_text(json.dumps(told))
        raise  # the process lives on: its peers must be told by more than its end


def killed_somewhere(folder: Path, seed: int) -> list[float]:
    """Seconds after which each survivor has ended, for a rank and a moment that the seed gives."""
    rng = random.Random(seed)
    num_ranks, when_s = rng.choice((2, 3, 4)), rng.uniform(0.0, 0.3)
    victim = rng.randrange(num_ranks)
    folder.mkdir()
    with World(num_ranks, group_timeout_s=300.0, grace_s=60.0) as world, pytest.raises(AssertionError):
        world.run(killed, folder, when_s, victim, timeout_s=120)
    found = []
    for rank in range(num_ranks):
        if rank != victim:
            told = json.loads(Path(folder, f"told {rank}").read_text())
            assert told["kind"] == "RankLostError", told
            assert f"rank {victim} (pid" in told["text"], told
            found.append(told["after_s"])
    return found


def test_survivors_are_told_which_rank_was_killed_long_before_the_timeout(tmp_path):
    """`KILLS=200` kills as many."""
    names = sorted(os.listdir("/dev/shm"))
    after_s = [
        s for seed in range(int(os.environ.get("KILLS", "4"))) for s in killed_somewhere(tmp_path / str(seed), seed)
    ]
    print(f"{len(after_s)} survivors ended {min(after_s):.2f} to {max(after_s):.2f} s after the kill")
    assert max(after_s) < 100  # of a timeout of 300: no measure of speed
    assert sorted(os.listdir("/dev/shm")) == names


def lost_next_door(way: str, folder: Path) -> None:
    """Rank 0 is killed; rank 1, which shares a group with it, catches that, and does not end before rank 2 knows it."""
    os.environ["DSHARD_TRANSPORT"] = way
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    mine = [(pair, ShardGroup(g, CPU)) for pair, g in enumerate(pairs) if rank in (pair, pair + 1)]

    def reduce_in_all() -> None:
        for pair, group in mine:
            collectives.all_reduce([torch.ones(1)], group, ReduceOp.SUM, label=f"pair {pair}").wait()

    reduce_in_all()
    dist.barrier()
    if rank == 0:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            reduce_in_all()
    except dshard.RankLostError as error:
        written = Path(folder, f"written {rank}")
        written.write_text(str(error))
        written.rename(Path(folder, str(rank)))
    if rank == 1:
        try:  # at once, though rank 2 may be there: without a wait
            collectives.all_reduce([torch.ones(1)], mine[-1][1], ReduceOp.SUM, label="pair 1")
        except dshard.RankLostError as error:
            Path(folder, "1 again").write_text(str(error))
        until = time.monotonic() + 40
        while not Path(folder, "2").exists() and time.monotonic() < until:
            time.sleep(0.05)
        Path(folder, "2 while 1 lived").write_text(str(Path(folder, "2").exists()))


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_a_rank_that_catches_the_loss_of_a_peer_keeps_nobody_waiting(way, tmp_path):
    with World(3, group_timeout_s=60.0, grace_s=50.0) as world, pytest.raises(AssertionError):
        world.run(lost_next_door, way, tmp_path)
    assert Path(tmp_path, "2 while 1 lived").read_text() == "True"
    for told in ("1", "1 again", "2"):
        assert "rank 0 (pid" in Path(tmp_path, told).read_text()


def closes(way: str) -> list[str]:
    """What rank 1 is told of a group that rank 0 has destroyed."""
    group = fresh_group(way)
    collectives.all_reduce([torch.ones(1)], group, ReduceOp.SUM, label="first").wait()
    if dist.get_rank() == 0:
        dist.destroy_process_group(group.process_group)
        del group
        time.sleep(2)
        return []
    try:
        collectives.all_reduce([torch.ones(1)], group, ReduceOp.SUM, label="second").wait()
    except dshard.DivergenceError as error:
        return [str(error)]
    return ["nothing"]


def test_a_group_that_a_peer_has_destroyed_raises_and_does_not_wait_for_the_timeout():
    began = time.monotonic()
    with World(2, group_timeout_s=60.0, grace_s=15.0) as world:
        first, second = world.run(closes, "memory")
    assert first == []
    assert "has closed the process group" in second[0]
    assert time.monotonic() - began < 40  # of a timeout of 60: no measure of speed


def test_another_way_is_refused(monkeypatch):
    monkeypatch.setenv("DSHARD_TRANSPORT", "pigeons")
    with pytest.raises(dshard.ArgumentError, match="must be 'messages' or 'memory', but it is 'pigeons'"):
        exchange._find(SimpleNamespace(process_group=None))  # type: ignore[arg-type]
