"""A save of safetensors that dies, fails or meets another one: readers find the old model or the new one, whole."""

import errno
import json
import os
import random
import resource
import shutil
import stat
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.checkpoint import disk, pretrained
from dshard.checkpoint.disk import partial_name
from dshard.testing import WorldPool, expect_error

safetensors_torch = pytest.importorskip("safetensors.torch")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMES = ("a", "b", "c")
STEPS = ("rename", "unlink", "fsync", "open", "write")  # of the system's calls, each of which may be the last
USERS = {"notes.txt": b"mine", "model-00007-of-00009.safetensors": b"mine", "other.safetensors": b"mine"}

# ------------------------------------------------------------------------------------------- saves without any process


@pytest.fixture(autouse=True)
def _no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies takes nothing with it that was written: what is synced is counted, and not waited for."""
    monkeypatch.setattr(os, "fsync", lambda opened: None)


def draft(path: Path, names: tuple[str, ...], number: int) -> Path:
    """A whole file under a name that nobody reads; its values say of which model it is."""
    made = partial_name(path)
    safetensors_torch.save_file({name: torch.full((2,), float(number)) for name in names}, made, {"format": "pt"})
    return made


def drafts(folder: Path, number: int, num_files: int) -> dict[str, Path]:
    if num_files == 1:
        return {SINGLE: draft(folder / SINGLE, NAMES, number)}
    wanted = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    return {name: draft(folder / name, NAMES[i::num_files], number) for i, name in enumerate(wanted)}


def publish(folder: Path, made: dict[str, Path]) -> None:
    weight_map = {name: file for i, file in enumerate(made) for name in NAMES[i :: len(made)]}
    pretrained.replace_model(folder, made, weight_map, 2 * 4 * len(NAMES))


def put(folder: Path, number: int, num_files: int) -> None:
    publish(folder, drafts(folder, number, num_files))


def put_old(folder: Path, kind: str) -> None:
    """Number 1, as a save that came to its end has left it, or one that did not."""
    for name, content in USERS.items():
        (folder / name).write_bytes(content)
    if kind == "a file beside an older index":
        put(folder, 9, 2)
        index, parts = (folder / INDEX).read_bytes(), list(folder.glob("model-0000[12]*"))
        kept = {part: part.read_bytes() for part in parts}
        put(folder, 1, 1)
        for path, content in {**kept, folder / INDEX: index}.items():
            path.write_bytes(content)
    elif kind != "nothing":
        put(folder, 1, {"a file": 1, "two files": 2, "three files": 3}[kind])


OLD = ["nothing", "a file", "two files", "three files", "a file beside an older index"]


def by_transformers_order(folder: Path) -> dict[str, Tensor]:
    if (folder / SINGLE).is_file():
        return safetensors_torch.load_file(folder / SINGLE)
    found: dict[str, Tensor] = {}
    for name in set(json.loads((folder / INDEX).read_text())["weight_map"].values()):
        found.update(safetensors_torch.load_file(folder / name))
    return found


def number_in(folder: Path) -> int | None:
    """Which model is there, whole; None for none."""
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        return None
    tensors = by_transformers_order(folder)
    assert set(tensors) == set(NAMES)
    assert set(pretrained._found_at(folder)[1]) == set(NAMES)
    (number,) = {float(value) for tensor in tensors.values() for value in tensor}
    return int(number)


def stepping(monkeypatch: pytest.MonkeyPatch, at: int, then: Callable[[], None]) -> list[int]:
    """Have something happen in the place of one system call; counts them."""
    done = [0]

    def patched(original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            done[0] += 1
            if done[0] == at:
                then()
            return original(*args, **options)

        return call

    for name in STEPS:
        monkeypatch.setattr(os, name, patched(getattr(os, name)))
    return done


def in_child(action: Callable[[], None]) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("num_files", [1, 2, 3])
@pytest.mark.parametrize("old", OLD)
def test_whenever_a_save_is_killed_the_old_model_is_there_or_the_new_one(tmp_path, monkeypatch, old, num_files):
    numbers, at, code = [], 0, 9
    while code == 9:
        at += 1
        folder = tmp_path / str(at)
        folder.mkdir()
        put_old(folder, old)
        before = number_in(folder)
        made = drafts(folder, 2, num_files)

        def killed(folder: Path = folder, made: dict[str, Path] = made, at: int = at) -> None:
            stepping(monkeypatch, at, lambda: os._exit(9))
            publish(folder, made)

        code = in_child(killed)
        numbers.append(number_in(folder))
        assert numbers[-1] in (before, 2), at
        put(folder, 3, random.Random(at).choice((1, 2, 3)))  # the next save comes to its end
        assert number_in(folder) == 3
        assert all((folder / name).read_bytes() == content for name, content in USERS.items())
    assert code == 0
    assert at > 5
    assert numbers == sorted(numbers, key=lambda number: number == 2), "there is one step from the old to the new"
    assert numbers[-1] == 2


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("old", OLD)
def test_whenever_a_save_fails_the_old_model_is_as_it_was_or_the_new_one_whole(tmp_path, monkeypatch, old, num_files):
    at, failed = 0, True
    while failed:
        at += 1
        folder = tmp_path / str(at)
        folder.mkdir()
        put_old(folder, old)
        before, number = {path.name: path.read_bytes() for path in folder.iterdir()}, number_in(folder)
        made = drafts(folder, 2, num_files)

        def full() -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        failed = False
        with monkeypatch.context() as patch:
            done = stepping(patch, at, full)
            try:
                publish(folder, made)
            except OSError:
                failed = True
        failed = failed or done[0] >= at  # what could not be removed is no error
        for path in made.values():
            path.unlink(missing_ok=True)
        found = number_in(folder)
        assert found in (number, 2), at
        if found != 2 and "older" not in old:
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, at
        assert not [name for name in names_in(folder) if "partial" in name]
    assert at > 5


def test_what_is_replaced_goes_and_nothing_else(tmp_path):
    put_old(tmp_path, "nothing")
    for turn, num_files in enumerate([3, 3, 1, 2, 2, 1, 3]):
        put(tmp_path, turn, num_files)
        assert number_in(tmp_path) == turn
        parts = names_in(tmp_path) - USERS.keys()
        assert len(parts) == num_files + (num_files > 1)
        assert (INDEX in parts) == (num_files > 1)
    assert all((tmp_path / name).read_bytes() == content for name, content in USERS.items())


def test_an_older_index_has_only_parts_of_a_model_beside_it_removed(tmp_path):
    folder, outside = tmp_path / "in", tmp_path / "model-00001-of-00001.safetensors"
    folder.mkdir()
    outside.write_bytes(b"mine")
    (folder / "precious.safetensors").write_bytes(b"mine")
    (folder / "model-00002-of-00002.safetensors").symlink_to(outside)
    for named in ("../model-00001-of-00001.safetensors", str(outside), "precious.safetensors", "notes"):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": named}}))
        put(folder, 1, 1)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}}))
    put(folder, 2, 2)
    assert outside.read_bytes() == b"mine"
    assert (folder / "precious.safetensors").read_bytes() == b"mine"
    assert number_in(folder) == 2


@pytest.mark.parametrize("then", [lambda: os._exit(9), lambda: (_ for _ in ()).throw(OSError(errno.EIO, "broken"))])
def test_a_part_never_takes_a_name_that_the_older_index_still_names(tmp_path, monkeypatch, then):
    for at in range(1, 30):
        folder = tmp_path / str(at)
        folder.mkdir()
        put(folder, 1, 2)
        (folder / "model-00001-of-00002.safetensors").unlink()  # somebody's mistake: the older model is lost
        made = drafts(folder, 2, 2)

        def broken(folder: Path = folder, made: dict[str, Path] = made, at: int = at) -> None:
            stepping(monkeypatch, at, then)
            publish(folder, made)

        code = in_child(broken)
        try:
            assert number_in(folder) == 2  # and not half of each
        except FileNotFoundError:
            assert code != 0


def test_links_in_the_place_of_what_is_written_are_replaced_and_not_followed(tmp_path):
    folder, victim = tmp_path / "in", tmp_path / "victim"
    folder.mkdir()
    victim.write_bytes(b"mine")
    for name in (SINGLE, INDEX, "model-00001-of-00002.safetensors", f".{INDEX}.partial"):
        (folder / name).symlink_to(victim)
    for number, num_files in enumerate((2, 1)):
        put(folder, number, num_files)
        assert number_in(folder) == number
    assert victim.read_bytes() == b"mine"


def test_of_two_saves_at_once_one_is_there_whole(tmp_path):
    draw = random.Random(5)
    for turn in range(20):
        folder = tmp_path / str(turn)
        folder.mkdir()
        put_old(folder, draw.choice(OLD))
        ready = time.monotonic() + 0.01
        children = []
        for number in (2, 3, 4):
            made, late = drafts(folder, number, draw.choice((1, 2, 3))), draw.random() * 0.002
            child = os.fork()
            if not child:
                code = 1
                try:
                    while time.monotonic() < ready + late:
                        pass
                    publish(folder, made)
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
        assert number_in(folder) in (2, 3, 4)
        parts = names_in(folder) - USERS.keys() - {INDEX}
        assert parts >= {path.name for path in pretrained._found_at(folder)[0]} - {INDEX}


def test_a_save_that_hangs_while_it_puts_files_in_place_is_not_waited_for_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_LOCK_TIMEOUT_S", 0.1)
    with disk.locked(tmp_path), pytest.raises(dshard.CheckpointError, match="one save at a time"):
        put(tmp_path, 1, 1)


# -------------------------------------------------------------------------------------------------------- whole saves


class Three(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        for name in NAMES:
            self.register_parameter(name, nn.Parameter(torch.full((4, 2), value)))


def save_limited(folder: str, value: float, max_shard_bytes: int, limit_bytes: int | None) -> None:
    model = dshard.fully_shard(Three(value))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes is not None and dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        dshard.save_safetensors(model, folder, max_shard_bytes=max_shard_bytes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit_bytes", [0, 100, 200])  # at once, in a header, and in the index
@pytest.mark.parametrize("num_bytes", [(1, 1), (10**9, 1), (1, 10**9)])
def test_a_full_disk_is_an_error_on_all_ranks_and_nothing_is_left_of_the_save(
    worlds: WorldPool, tmp_path, num_bytes, limit_bytes
):
    worlds.run(2, save_limited, str(tmp_path), 1.0, num_bytes[0], None)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for kind, text in expect_error(worlds.get_world(2), save_limited, str(tmp_path), 2.0, num_bytes[1], limit_bytes):
        assert kind == "CheckpointError"
        assert "File too large" in text
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    worlds.run(2, save_limited, str(tmp_path), 3.0, num_bytes[1], None)
    assert all((tensor == 3).all() for tensor in by_transformers_order(tmp_path).values())


def save_in_the_way(folder: str) -> None:
    os.umask(0o027)
    dshard.save_safetensors(dshard.fully_shard(Three(1.0)), folder, max_shard_bytes=1)


@pytest.mark.parametrize("name", [SINGLE, INDEX])
def test_a_folder_in_the_way_is_told_before_anything_is_written(worlds: WorldPool, tmp_path, name):
    (tmp_path / name).mkdir()
    for kind, text in expect_error(worlds.get_world(2), save_in_the_way, str(tmp_path)):
        assert kind == "CheckpointError"
        assert f"{name}: must be free for a file, but it is a folder" in text
    assert names_in(tmp_path) == {name}
    shutil.rmtree(tmp_path / name)
    worlds.run(2, save_in_the_way, str(tmp_path))
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}, "as the umask says"


# --------------------------------------------------------------------------------------- what changes while it is read


def load_while(folder: str, what: str) -> tuple[str, str]:
    file, rank = Path(folder, SINGLE), dist.get_rank()
    model = dshard.fully_shard(Three(7.0))
    found_at, opened_as, calls = pretrained._found_at, pretrained._opened, [0]

    def found_then(path: Path) -> Any:
        found = found_at(path)
        if what == "between the ranks' looks" and rank == 0:
            Path(folder, "new").rename(file)
        return found

    def opened_then(path: Path) -> Any:
        calls[0] += 1
        if calls[0] == 2 and what == "replaced" and rank == 1:
            Path(folder, "new").rename(file)
        if calls[0] == 2 and rank == 0:
            if what == "cut short":
                os.truncate(file, 250)
            elif what == "written to":
                with file.open("r+b") as opened:
                    opened.seek(-1, 2)
                    opened.write(b"x")
        return opened_as(path)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pretrained, "_found_at", found_then)
            patch.setattr(pretrained, "_opened", opened_then)
            dshard.load_safetensors(model, folder)
    except dshard.CheckpointError as error:
        assert all((param.to_local() == 7).all() for param in model.parameters()), "half a load"
        return "refused", str(error)
    return "loaded", str({float(value) for param in model.parameters() for value in param.full_tensor().flatten()})


def load_onto_held_meta(folder: str) -> str:
    with torch.device("meta"):
        plain = Three(1.0)
    model = dshard.fully_shard(plain)
    held = weakref.ref(model.c)
    try:
        dshard.load_safetensors(model, folder)
    except dshard.StateError as error:
        assert all(param.is_meta for param in model.parameters()), "half a load"
        assert held() is model.c
        return str(error)
    return "loaded"


def test_a_model_on_meta_that_cannot_get_memory_stays_on_meta(worlds: WorldPool, tmp_path):
    tensors = {each: torch.full((4, 2), 1.0) for each in NAMES}
    safetensors_torch.save_file(tensors, tmp_path / SINGLE)
    for text in worlds.run(2, load_onto_held_meta, str(tmp_path)):
        assert "c: a parameter can move to another device only while nothing else refers to it" in text


@pytest.mark.parametrize("what", ["between the ranks' looks", "replaced", "cut short", "written to"])
def test_a_file_that_changes_while_it_is_read_is_refused_on_every_rank_and_the_model_is_as_it_was(
    worlds: WorldPool, tmp_path, what
):
    for name, value in (("new", 2.0), (SINGLE, 1.0)):
        tensors = {each: torch.full((4, 2), value) for each in NAMES}
        safetensors_torch.save_file(tensors, tmp_path / name, metadata={"format": "pt"})
    for outcome, text in worlds.run(2, load_while, str(tmp_path), what):
        assert (outcome, text) == ("loaded", "{2.0}") or outcome == "refused", text
        assert outcome == "refused" or what == "between the ranks' looks"
        assert outcome == "loaded" or f"{tmp_path}" in text
