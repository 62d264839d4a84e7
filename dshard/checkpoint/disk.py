"""Files that survive: made under names that nobody can guess, synced, and put in their place at once.

A name that is in use is never opened for writing, so that a link in its place leads nowhere; modes are those of the
process's umask; after a rename the directory is synced too, without which the new name itself may be lost.
"""

import ctypes
import fcntl
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dshard.errors import CheckpointError

PARTIAL = ".partial"
_LARGE_BYTES = 1 << 20
_STEP_BYTES = 1 << 24  # of a file that are in memory at a time
_LOCK_TIMEOUT_S = 60.0  # for another save to put its files in their places, which are a few renames
_POLL_S = 0.02
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE, of sync_file_range(2)
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None


def partial_name(path: Path, token: str | None = None) -> Path:
    """A hidden name beside `path` that cannot be guessed, or the one that has a token of 16 hex digits."""
    return path.with_name(f".{path.name}.{token or secrets.token_hex(8)}{PARTIAL}")


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each of which is synced into the one that holds it.

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
    """Have the names in a folder survive a crash, on file systems that can say so."""
    with closing(_open_folder(folder)) as opened:
        _sync(opened)


def _sync(folder: int) -> None:
    with suppress(OSError):  # some network file systems sync by themselves
        os.fsync(folder)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextmanager
def closing(opened: int) -> Iterator[int]:
    """A file descriptor that is closed at the end."""
    try:
        yield opened
    finally:
        os.close(opened)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Wait until no other save puts its files into a folder; gives False where there are no locks.

    Raises:
        CheckpointError: Another one does for too long.
    """
    with closing(_open_folder(folder)) as opened:
        yield _lock(opened, folder)


def _lock(opened: int, folder: Path) -> bool:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError) as error:  # both are said of a lock that another process holds
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{folder}: one save at a time may put its files there, but another has been at it for "
                    f"{_LOCK_TIMEOUT_S:.0f} s. Wait for it, or pass another path."
                ) from error
            time.sleep(_POLL_S)
        except OSError:
            return False


@contextmanager
def create(path: Path) -> Iterator[int]:
    """A file descriptor of a new file, to write to; on leaving it is synced, and after an error removed.

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
        with closing(_open_folder(path.parent)) as folder:  # who sees the file may give the folder another name at once
            draft.rename(path)
            _sync(folder)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def write_all(opened: int, content: bytes | memoryview) -> None:
    """Write every byte, however many calls it takes; of many the disk gets them while the next ones are made."""
    rest = memoryview(content).cast("B")
    is_large = len(rest) >= _LARGE_BYTES
    while rest:
        rest = rest[os.write(opened, rest) :]
    if is_large and _SYNC_FILE_RANGE is not None:  # advice: where it is not taken, the sync at the end does all
        _SYNC_FILE_RANGE(opened, ctypes.c_int64(0), ctypes.c_int64(0), _BEGIN_WRITING)


def open_regular(path: Path, *, follow: bool = False) -> int:
    """A file descriptor to read a file from; what is no regular file is refused, not waited for.

    Args:
        path: Of the file.
        follow: Whether a link in its place is followed.

    Raises:
        CheckpointError: It is a link, a folder, a pipe or a device.
        OSError: There is none, or it cannot be read.
    """
    if not follow and path.is_symlink():
        raise CheckpointError(f"{path}: must be a file, but it is a link. Copy what it points to into its place.")
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    mode = os.fstat(opened).st_mode
    if not stat.S_ISREG(mode):
        os.close(opened)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "no regular file"
        raise CheckpointError(f"{path}: must be a file, but it is {kind}. Put the file back, or use another path.")
    return opened


def buffers(size: int) -> Iterator[tuple[int, memoryview]]:
    """Where each bounded part of some bytes starts, with memory for it."""
    for offset in range(0, size, _STEP_BYTES):
        yield offset, memoryview(bytearray(min(_STEP_BYTES, size - offset)))


def read_padded(opened: int, into: memoryview, offset: int) -> None:
    """Fill a buffer with a file's bytes from `offset` on, and with zeros beyond its end."""
    rest = _unread(opened, into, offset)
    rest[:] = bytes(len(rest))


def read_exactly(opened: int, into: memoryview, offset: int) -> None:
    """Fill a buffer with a file's bytes from `offset` on.

    Raises:
        EOFError: The file ends before.
        OSError: It cannot be read.
    """
    rest = _unread(opened, into, offset)
    if rest:
        raise EOFError(f"it ends {len(rest)} bytes early")


def _unread(opened: int, into: memoryview, offset: int) -> memoryview:
    """Fill a buffer with a file's bytes from `offset` on; gives what lies beyond the file's end."""
    rest = into.cast("B")
    while rest:
        num_read = os.preadv(opened, [rest], offset)
        if not num_read:
            break
        rest, offset = rest[num_read:], offset + num_read
    return rest
