"""Write files that survive a crash: under unguessable names, synced, and renamed into place.

A name that is in use is never opened for writing, so that a link in its place leads nowhere; modes are those of the
process's umask; after a rename the directory is synced too, without which the new name itself may be lost.
"""

import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dshard.errors import CheckpointError

PARTIAL = ".partial"
_STEP_BYTES = 1 << 24  # of a file that are in memory at a time
_LOCK_TIMEOUT_S = 60.0  # for another save to put its files in their places, which are a few renames
_POLL_S = 0.02


def partial_name(path: Path) -> Path:
    """Return a hidden name beside `path` with a random token of 16 hex digits."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and sync each into its parent.

    Raises:
        OSError: It cannot be made, or is something else.
    """
    missing = []
    here = folder
    while not here.is_dir():
        missing.append(here)
        here = here.parent
    for each in reversed(missing):
        with suppress(FileExistsError):  # another process was faster; if it is no folder, the next line says so
            each.mkdir()
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names in it survive a crash, on file systems that can."""
    with closing(_open_folder(folder)) as opened, suppress(OSError):  # some network file systems sync by themselves
        os.fsync(opened)


def children(folder: Path) -> list[Path]:
    """Return what is in a folder, by name; nothing where it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextmanager
def closing(opened: int) -> Iterator[int]:
    """Close a file descriptor at the end."""
    try:
        yield opened
    finally:
        os.close(opened)


def try_lock(opened: int) -> bool:
    """Lock a file or folder for as long as it is open; False if another process has locked it.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except (BlockingIOError, PermissionError):  # both are said of a lock that another process holds
        return False


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Wait for the folder's lock and hold it; yields False on file systems without locks.

    Raises:
        CheckpointError: Another one does for too long.
    """
    deadline, is_locked = time.monotonic() + _LOCK_TIMEOUT_S, True
    with closing(_open_folder(folder)) as opened:
        try:
            while not try_lock(opened):
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{folder}: one save at a time may put its files there, but another has been at it for "
                        f"{_LOCK_TIMEOUT_S:.0f} s. Wait for it, or pass another path."
                    )
                time.sleep(_POLL_S)
        except OSError:
            is_locked = False
        yield is_locked


@contextmanager
def create(path: Path) -> Iterator[int]:
    """Open a new file to write to; sync it at the end, or remove it after an error.

    Raises:
        FileExistsError: Something, if only a link, has that name.
        OSError: It cannot be made or synced.
    """
    made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with closing(made) as opened:
            yield opened
            os.fsync(opened)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file at once: whenever the process dies, the old or the new one is there, whole.

    A link at `path` is replaced, and not what it points to.

    Raises:
        OSError: It cannot be written; what was there is as it was.
    """
    draft = partial_name(path)
    with create(draft) as opened:
        write_all(opened, content)
    try:
        draft.rename(path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def write_all(opened: int, content: bytes | memoryview) -> None:
    """Write all bytes, in as many calls as it takes."""
    rest = memoryview(content).cast("B")
    while rest:
        rest = rest[os.write(opened, rest) :]


def check_regular(path: Path, *, follow: bool = False) -> os.stat_result:
    """Raise unless a path is a regular file: opening a pipe would wait.

    Args:
        path: Of the file.
        follow: Whether a link in its place is followed.

    Raises:
        CheckpointError: It is a link, a folder, a pipe or a device.
        OSError: There is none.
    """
    found = path.stat() if follow else path.lstat()
    if stat.S_ISREG(found.st_mode):
        return found
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFLNK: "a link"}
    kind = kinds.get(stat.S_IFMT(found.st_mode), "no regular file")
    raise CheckpointError(f"{path}: must be a file, but it is {kind}. Put the file back, or use another path.")


def open_regular(path: Path, *, follow: bool = False) -> int:
    """Open a regular file to read from; raises as `check_regular`."""
    check_regular(path, follow=follow)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))


def buffers(size: int) -> Iterator[tuple[int, memoryview]]:
    """Cut a number of bytes into bounded parts; yields the start of each and memory for it."""
    for offset in range(0, size, _STEP_BYTES):
        yield offset, memoryview(bytearray(min(_STEP_BYTES, size - offset)))


def read_padded(opened: int, into: memoryview, offset: int) -> int:
    """Fill a buffer with a file's bytes from `offset` on, and zeros beyond its end; return how many bytes were read."""
    rest = into.cast("B")
    while rest:
        num_read = os.preadv(opened, [rest], offset)
        if not num_read:
            break
        rest, offset = rest[num_read:], offset + num_read
    rest[:] = bytes(len(rest))
    return len(into) - len(rest)
