"""A save that is killed at any of its file operations leaves the old checkpoint or the new, and nothing for long."""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dshard
from dshard.checkpoint import files, folders, load, save
from dshard.checkpoint.disk import partial_name
from dshard.testing import WorldPool
from tests.checkpoint.checkpoints import everything

OPERATIONS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")


@contextmanager
def at_operation(number: int, act: Callable[[str], None], names: tuple[str, ...] = OPERATIONS) -> Iterator[list[int]]:
    """Call `act` ahead of the n-th file operation that changes something, with its name; counts them."""
    count, kept = [0], {name: getattr(os, name) for name in names}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                count[0] += 1
                if count[0] == number:
                    act(name)
            return kept[name](*args, **kwargs)

        return call

    own = files.serialize_file

    def serialize(specs: Any, path: Path, **options: Any) -> None:
        """Two operations, of what safetensors does by itself: ahead of it, and when half a file is written."""
        count[0] += 2
        if number in (count[0] - 1, count[0]):
            if number == count[0]:
                own(specs, path, **options)
                content = path.read_bytes()
                path.with_name(".tmpAbC123").write_bytes(content[: len(content) // 2])
            try:
                act("serialize")
            finally:
                path.with_name(".tmpAbC123").unlink(missing_ok=True)
        own(specs, path, **options)

    for name in names:
        setattr(os, name, counted(name))
    files.serialize_file = serialize
    try:
        yield count
    finally:
        files.serialize_file = own
        for name, own in kept.items():
            setattr(os, name, own)


def model_of(seed: int) -> Any:
    torch.manual_seed(seed)
    model = dshard.fully_shard(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def in_fork(fn: Callable[[], None]) -> int:
    """How a forked process that calls a function ends; negative if it was killed."""
    pid = os.fork()
    if pid == 0:
        try:
            fn()
        except BaseException:
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError("the fork hangs")
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(ended[1])


def tree(folder: Path) -> dict[str, Any]:
    """All that is below a folder: contents of files, targets of links."""
    found = {}
    for path in sorted(folder.rglob("*")):
        where = str(path.relative_to(folder))
        found[where] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


def users_things(folder: Path) -> dict[str, Any]:
    """What is not ours, beside a checkpoint and within."""
    folder.mkdir(exist_ok=True)
    for name in ("a.old", "a.partial", ".a.partial", "notes.txt"):
        (folder / name).write_text(name)
    (folder / ".a.0123456789abcdef.partial").symlink_to(folder / "notes.txt")
    (folder / ".b.0123456789abcdef.partial").mkdir()
    (folder / ".b.0123456789abcdef.partial" / "mine").write_text("mine")
    if (folder / "a").is_dir():
        (folder / "a" / "readme").write_text("of the user")
        (folder / "a" / "writer.json").write_text("of the user")
    ours = ("a", "0")
    return {k: v for k, v in tree(folder).items() if k.split("/")[0] not in ours or k in ("a/readme", "a/writer.json")}


def killed(root: Path, kind: str) -> tuple[int, int, int]:
    """Kill a save at each of its operations: onto nothing, onto a checkpoint, beside others with `keep`."""
    old, new = model_of(1), model_of(2)
    states = [everything(*old), everything(*new)]
    num_old = num_new = 0
    for number in range(1, 1000):
        folder = root / f"{kind} {number} \N{SNOWMAN}"
        folder.mkdir()
        target = folder / "a"
        options: dict[str, Any] = {}
        if kind != "fresh":
            save(target if kind == "replaced" else folder / "0", *old, step=1)
        if kind == "kept":
            options["keep"] = 1
            load(folder / "0", *new), load_state(new, 2)
        mine = users_things(folder)

        def act(name: str) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def attempt(number: int = number, target: Path = target, options: Any = options) -> None:
            with at_operation(number, act):
                save(target, *new, step=2, **options)

        code = in_fork(attempt)
        assert code in (0, -signal.SIGKILL), code
        twin = model_of(3)
        state = None
        for path in (folder, target):
            before = everything(*twin)
            try:
                load(path, *twin)
                state = everything(*twin)
                assert state in states
            except dshard.DShardError:
                assert kind == "fresh" or (path == target and kind == "kept"), (number, path)
                assert code != 0
                assert everything(*twin) == before
        num_old, num_new = num_old + (state == states[0]), num_new + (state == states[1])
        save(target, *new, step=3, **options)
        load(target, *twin)
        assert everything(*twin) == states[1]
        now = tree(folder)
        assert {k: now.get(k) for k in mine} == mine
        ours = {"a", "0"} | {k for k in now if k.startswith(("a/", "0/"))} | set(mine)
        assert set(now) <= ours, set(now) - ours
        left = [k for k in now if k.startswith("a/") and k not in mine]
        assert len(left) == 2, left  # the manifest and one shard
        assert kind != "kept" or "0" not in now
        if code == 0:
            return number - 1, num_old, num_new
    raise AssertionError("a save has fewer operations")


def load_state(made: Any, seed: int) -> None:
    """Put back the values of a model after a load, of which the run is kept."""
    other = model_of(seed)
    with torch.no_grad():
        made[0].load_state_dict(other[0].state_dict())
    made[1].load_state_dict(other[1].state_dict())


@pytest.mark.parametrize("kind", ["fresh", "replaced", "kept"])
def test_a_save_that_is_killed_leaves_the_old_or_the_new_one(worlds: WorldPool, tmp_path, kind):
    ((num_operations, *_),) = worlds.run(1, killed, tmp_path, kind, timeout_s=100)
    assert num_operations > 15


def failing(root: Path, bad_rank: int) -> int:
    """Have each operation of a save fail on one rank, as on a full disk: all ranks are told, nothing is left."""
    old, new = model_of(1), model_of(2)
    before = everything(*old)
    target = root / "saved"
    save(target, *old, step=1)

    def act(name: str) -> None:
        raise OSError(errno.ENOSPC, f"No space left on device ({name})")

    for number in range(1, 1000):
        dist.barrier()
        has_failed, told = True, ""
        with at_operation(number if dist.get_rank() == bad_rank else 0, act, OPERATIONS[:5]) as count:
            try:
                save(target, *new, step=2)
                has_failed = False
            except dshard.CheckpointError as error:
                told = str(error)
        dist.barrier()
        assert not has_failed or "No space left on device" in told, told
        assert [child.name for child in root.iterdir()] == ["saved"]
        twin = model_of(3)
        load(target, *twin)
        reached = [count[0] >= number]
        dist.broadcast_object_list(reached, src=bad_rank)
        state = everything(*twin)
        if not reached[0]:
            return number - 1
        assert state in (before, everything(*new))
        assert state == before or not has_failed or bad_rank == 0  # cleaning up may fail when the new one is in place
        dist.barrier()
        save(target, *old, step=1)
        assert len(list(target.iterdir())) == 3
    raise AssertionError("a save has fewer operations")


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_told_on_all_and_leaves_nothing(worlds: WorldPool, tmp_path, bad_rank):
    assert min(worlds.run(2, failing, tmp_path, bad_rank, timeout_s=100)) >= 5


def written_to_while_removed(root: Path, name: str) -> tuple[list[str], list[str]]:
    """What is left where another rank writes to a draft that is given up, and what of it after the next save."""
    draft = folders.Draft(root / "a", partial_name(root / "a"))
    (draft.folder / "shard-00000-of-00002.01234567.safetensors").write_text("{}")
    own = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == "shard-00000-of-00002.01234567.safetensors":  # of files that were listed
            (path.parent / name).write_text("x")
        own(path, missing_ok=missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        draft.close()
    left = [child.name for child in draft.folder.iterdir()]
    save(root / "a", *model_of(1))
    return left, [child.name for child in root.iterdir() if child.name != "a"]


def test_a_draft_that_a_rank_writes_to_while_it_is_removed_goes_with_the_next_save(worlds: WorldPool, tmp_path):
    shard = "shard-00001-of-00002.01234567.safetensors"
    assert worlds.run(1, written_to_while_removed, tmp_path, shard) == [([shard], [])]


def test_a_draft_with_a_file_of_the_users_stays_with_that_file(worlds: WorldPool, tmp_path):
    ((left, stayed),) = worlds.run(1, written_to_while_removed, tmp_path, "notes.txt")
    assert left == ["notes.txt"]
    assert [child.name for child in (tmp_path / stayed[0]).iterdir()] == ["notes.txt"]


def with_failing_removals(root: Path) -> None:
    """Nothing of what stands in the folder can be removed once the new checkpoint is in it."""
    target = root / "a"
    old, new = model_of(1), model_of(2)
    own = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.parent == target:
            raise PermissionError(errno.EACCES, "Permission denied")
        own(path, missing_ok=missing_ok)

    for made in (old, new):  # onto nothing, and onto a checkpoint
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "unlink", unlink)
            save(target, *made)
        twin = model_of(3)
        load(target, *twin)
        assert everything(*twin) == everything(*made)
    assert len(list(target.iterdir())) == 4  # a lock, and a shard of the old one
    save(target, *new)
    assert len(list(target.iterdir())) == 2


def test_what_cannot_be_removed_behind_a_published_checkpoint_is_no_error(worlds: WorldPool, tmp_path):
    worlds.run(1, with_failing_removals, tmp_path)


def racing(root: Path) -> None:
    """Two processes save to one path at once."""
    made = [model_of(1), model_of(2)]
    states = [everything(*each) for each in made]
    target = root / "saved"
    for _ in range(8):
        pids = []
        for each in made:
            pids.append(os.fork())
            if pids[-1] == 0:
                try:
                    save(target, *each)
                finally:
                    os._exit(0)
        for pid in pids:
            os.waitpid(pid, 0)
        twin = model_of(3)
        load(target, *twin)
        assert everything(*twin) in states
        assert [child.name for child in root.iterdir()] == ["saved"]
        assert len(list(target.iterdir())) == 2


def test_two_saves_at_once_leave_one_of_them_whole(worlds: WorldPool, tmp_path):
    worlds.run(1, racing, tmp_path)


def placed(root: Path) -> None:
    made = model_of(1)
    os.umask(0o027)
    save(root / "deep" / "er" / "a b \N{SNOWMAN}", *made)
    assert {path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_file()} == {0o640}
    assert {path.stat().st_mode & 0o777 for path in (root / "deep").rglob("*") if path.is_dir()} == {0o750}
    (root / "link").symlink_to(root / "deep")
    (root / "file").write_text("mine")
    (root / "mine").mkdir()
    (root / "mine" / "notes").write_text("mine")
    before = tree(root)
    for name in ("link", "file", "mine", "file/below"):
        with pytest.raises(dshard.CheckpointError):
            save(root / name, *made)
    assert tree(root) == before
    os.umask(0o022)


def test_what_is_no_checkpoint_stays_and_modes_are_the_umasks(worlds: WorldPool, tmp_path):
    worlds.run(1, placed, tmp_path)
