"""An asynchronous save is what was there when it was called, or an error: never a mixture."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dshard
from dshard.checkpoint import load, save, saving
from dshard.checkpoint.contents import Contents
from dshard.testing import WorldPool
from dshard.testing.strategies import world_sizes
from tests import warm
from tests.checkpoint.checkpoints import Recipe, everything, made, optimizers_of, train

RECIPE = Recipe(((3, 5), (2,), (8, 3)), tied=True)


def ema(model: Any, other: Any) -> None:
    with torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.lerp_(q.detach().to(p.dtype), 0.5)


def no_grad_copy(model: Any, _: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.ones_like(p))


def data_write(model: Any, _: Any) -> None:
    for p in model.parameters():
        p.data.add_(1.0)


def gathered_write(model: Any, _: Any) -> None:
    with torch.no_grad(), dshard.gathered(model, writeback=True):
        for p in model.parameters():
            p.mul_(2)


def nothing(model: Any, other: Any) -> None:
    del model, other


DEEDS: dict[str, Callable[[Any, Any], None]] = {
    "nothing": nothing,
    "ema": ema,
    "copy_": no_grad_copy,
    "data": data_write,
    "switch": lambda model, _: dshard.set_strategy(model, "ddp"),
    "gathered": gathered_write,
    "clip": lambda model, _: dshard.clip_grad_norm_(model.parameters(), 0.1),
    "state_dict": lambda model, other: model.load_state_dict(other.state_dict()),
    "to": lambda model, _: model.double(),
}


def slow_copies() -> threading.Event:
    """Have copies wait for an event, so that what comes after a save comes before them."""
    event, own = threading.Event(), saving.Snapshot.copy

    def copy(self: Any) -> Any:
        event.wait(10)
        return own(self)

    saving.Snapshot.copy = copy
    event.restore = lambda: setattr(saving.Snapshot, "copy", own)
    return event


def torn(path: Path, deeds: list[str], is_late: bool) -> list[str]:
    """Save, and do things at once: what is in the folder afterwards is what was saved, or nothing is."""
    torch.manual_seed(dist.get_rank())
    model, other = made(RECIPE, "full"), made(Recipe(RECIPE.shapes, tied=True, seed=1), "full")
    optimizer = optimizers_of("adamw", model)
    train(model, optimizer, 1)
    before = everything(model, optimizer)
    event = slow_copies()
    timer = threading.Timer(0.05, event.set)
    if not is_late:
        event.set()
    said = ""
    try:
        pending = save(path, model, optimizer, asynchronous=True)
        timer.start()
        for deed in deeds:
            if deed == "step":
                train(model, optimizer, 1)
            elif deed == "load":
                load(path, model, optimizer)
            elif deed == "other":
                train(other, optimizers_of("sgd", other), 1)
                try:
                    save(path.with_name("other"), other, asynchronous=True)
                except dshard.CheckpointError as error:  # which tells of the one before
                    said = str(error)
                    break
            else:
                DEEDS[deed](model, other)
        event.set()
        try:
            pending.result()
        except dshard.DShardError as error:
            said = str(error)
    finally:
        event.set()
        event.restore()
    fresh = made(RECIPE, "full")
    fresh_optimizer = optimizers_of("adamw", fresh)
    if said:
        assert "asynchronous" in said
        with pytest.raises(dshard.DShardError):
            load(path, fresh, fresh_optimizer)
        return ["told"]
    load(path, fresh, fresh_optimizer)
    assert everything(fresh, fresh_optimizer) == before
    return ["whole"]


@settings(max_examples=25)
@given(
    num_ranks=world_sizes(max_size=2),
    deeds=st.lists(st.sampled_from([*DEEDS, "step", "load", "other"]), min_size=1, max_size=3),
    is_late=st.booleans(),
)
def test_no_asynchronous_checkpoint_is_torn(worlds: WorldPool, tmp_path_factory, num_ranks, deeds, is_late):
    if "load" in deeds:  # which tells what went wrong itself
        deeds = ["load"]
    if "to" in deeds:  # states of an optimizer do not follow
        deeds = deeds[: deeds.index("to") + 1]
    path = tmp_path_factory.mktemp("a") / "saved"
    results = worlds.run(num_ranks, torn, path, deeds, is_late)
    assert all(result == results[0] for result in results)


def failing(path: Path) -> list[str]:
    """A save whose writing fails on rank 1 alone; what each later call says."""
    model = made(RECIPE, "full")
    optimizer = optimizers_of("adamw", model)
    save(path, model, optimizer, step=1)
    before, own = everything(model, optimizer), os.fsync
    train(model, optimizer, 1)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    said = []
    for call in (lambda p: p.result(), lambda _: save(path, model, optimizer), lambda _: load(path, model, optimizer)):
        if dist.get_rank() == 1:
            os.fsync = full
        try:
            pending = save(path, model, optimizer, asynchronous=True)
            assert pending is not None
            pending._thread.join()
            assert pending.done()
        finally:
            os.fsync = own
        with pytest.raises(dshard.DShardError) as caught:
            call(pending)
        said.append(str(caught.value))
    fresh = made(RECIPE, "full")
    fresh_optimizer = optimizers_of("adamw", fresh)
    load(path, fresh, fresh_optimizer)
    assert everything(fresh, fresh_optimizer) == before
    dist.barrier()
    assert [child.name for child in path.parent.iterdir()] == [path.name]
    return said


def test_a_failure_on_one_rank_is_told_on_all_at_the_next_call(worlds: WorldPool, tmp_path):
    for said in worlds.run(2, failing, tmp_path / "saved"):
        assert all("No space left on device" in text or "rank 1 could not write" in text for text in said)


def given_up_first(path: Path) -> str:
    """What a save says that rank 0 gives up, and with it the folder, before rank 1 writes."""
    own = saving.Job.write

    def write(self: saving.Job, pieces: Any) -> None:
        if self.rank == 0:
            pieces()  # as a save does first: steps wait for a copy that has not been made
            raise OSError(28, "No space left on device")
        while self.folder.exists():
            time.sleep(0.01)
        own(self, pieces)

    model = made(RECIPE, "full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving.Job, "write", write)
        pending = save(path, model, asynchronous=True)
        assert pending is not None
        with pytest.raises(dshard.CheckpointError) as caught:
            pending.result()
    return str(caught.value)


def test_a_rank_that_finds_the_folder_gone_tells_why_rank_0_gave_up(worlds: WorldPool, tmp_path):
    for said in worlds.run(2, given_up_first, tmp_path / "saved"):
        assert "No space left on device" in said


def reused(path: Path) -> None:
    saving._MEMORY.clear()  # of the tests before
    model = made(RECIPE, "full")
    addresses = set()
    for step in range(3):
        pending = save(path, model, asynchronous=True, step=step)
        assert pending is not None
        addresses.update(memory.data_ptr() for memory in saving._MEMORY.values())
        train(model, optimizers_of("sgd", model), 1)
    assert pending.result() == path
    assert len(addresses) == 1
    assert load(path, model) is None


def test_the_copy_is_one_and_used_again(worlds: WorldPool, tmp_path):
    worlds.run(2, reused, tmp_path / "saved")


def in_parts(path: Path) -> list[str]:
    """Save where ranks say a few bytes at a time; what is left of that in the store."""
    model, stores, own = made(RECIPE, "full"), [], saving.Job.run_alone
    before = everything(model)

    def run_alone(self: Any, pieces: Any) -> None:
        stores.append(self.store)
        own(self, pieces)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "_PART_BYTES", 10)
        patch.setattr(saving.Job, "run_alone", run_alone)
        pending = save(path, model, asynchronous=True, parity=1)
        assert pending is not None
        pending.result()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load(path, model)
    assert everything(model) == before
    keys = [f"{rank}/{kind}{part}" for rank in range(2) for kind in ("file", "row") for part in ("", "/0", "/1")]
    return [key for key in keys if stores[0].check([key])]


def test_what_ranks_say_of_their_files_goes_in_parts_and_is_taken_back(worlds: WorldPool, tmp_path):
    assert worlds.run(2, in_parts, tmp_path / "saved") == [[], []]
    assert dshard.checkpoint.check(tmp_path / "saved")[0].findings == ()


PROGRAM = """
import os, torch, dshard
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = dshard.fully_shard(torch.nn.Linear(200, 1000))
os.chdir("in")
dshard.checkpoint.save("saved", model, asynchronous=True, extra="x" * 1000)
os.chdir("..")
dist.destroy_process_group()
"""


def exists_whole(path: Path) -> None:
    model = dshard.fully_shard(nn.Linear(200, 1000))
    assert load(path, model) == "x" * 1000
    torch.manual_seed(0)
    assert torch.equal(model.weight.full_tensor(), nn.Linear(200, 1000).weight)


def test_a_program_that_ends_at_once_has_saved(worlds: WorldPool, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = warm.run(["program.py"], ranks=2, env={**os.environ}, cwd=tmp_path, timeout_s=60)
    assert ran.returncode == 0, ran.stderr
    worlds.run(1, exists_whole, tmp_path / "in" / "saved")


def without_pieces(path: Path, what: str) -> list[str]:
    """One rank cannot take its shards, or start a thread: what the save says, after a step that may not wait."""
    model = made(RECIPE, "full")
    optimizer = optimizers_of("adamw", model)
    train(model, optimizer, 1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            where, name = {"pieces": (Contents, "pieces"), "thread": (threading.Thread, "start")}[what]

            def fail(*_: Any) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(where, name, fail)
        pending = save(path, model, optimizer, asynchronous=True)
    train(model, optimizer, 1)
    assert pending is not None
    try:
        return [str(pending.result())]
    except dshard.CheckpointError as error:
        return [str(error)]


def test_a_rank_that_cannot_take_its_shards_is_told_on_all_and_no_step_waits_for_it(worlds: WorldPool, tmp_path):
    for (said,) in worlds.run(2, without_pieces, tmp_path / "saved", "pieces", timeout_s=60):
        assert "can't start new thread" in said
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_has_no_more_threads_writes_all_the_same(worlds: WorldPool, tmp_path):
    path = tmp_path / "saved"
    assert worlds.run(2, without_pieces, path, "thread", timeout_s=60) == [[str(path)]] * 2
    assert dshard.checkpoint.check(path)[0].findings == ()
