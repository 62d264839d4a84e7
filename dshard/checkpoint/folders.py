"""Folders of checkpoints: create, publish, find and remove them.

A folder that is being written has a hidden name of its own, and a file in it that its writer keeps locked: network file
systems lock files between hosts, and folders on one host alone. What has such a name, and no file in it that is locked,
is what a killed save left; the next save beside it removes it.
"""

import errno
import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path

from dshard.checkpoint.disk import children, closing, locked, make_folder, sync_folder, try_lock
from dshard.checkpoint.files import FILE_NAME
from dshard.checkpoint.manifest import COPY_NAME, MANIFEST, Manifest, is_checkpoint, read_manifest
from dshard.checkpoint.parity import group_around
from dshard.errors import CheckpointError

_LOCK = "dshard.lock"
_IN_PLACE = re.compile("|".join((COPY_NAME.pattern, FILE_NAME.pattern, re.escape(_LOCK))))
_OURS = re.compile(_IN_PLACE.pattern + r"|dshard\.json")
_POLL_S = 0.001
_DRAFTS = re.compile(r"\.tmp\w+")  # of a file that safetensors was writing
_NONE = f"must be a checkpoint, which is a folder with a {MANIFEST}, or a folder of checkpoints, but there is none"
_HIDDEN = re.compile(r"\.(.+)\.[0-9a-f]{16}\.(partial|removed)")


def check_target(target: Path) -> None:
    """Raise unless a path is free for a checkpoint, or holds one that may be replaced.

    Raises:
        CheckpointError: Something is there that is no checkpoint.
    """
    if not os.path.lexists(target):
        return
    found = "a link" if target.is_symlink() else "" if target.is_dir() else "a file"
    if not found and any(target.iterdir()) and _manifest_of(target) is None:
        found = f"a folder with {', '.join(sorted(child.name for child in target.iterdir())[:3])}"
    if found:
        raise CheckpointError(
            f"{target}: a checkpoint replaces nothing but a checkpoint, but there is {found}. Move it away, or pass "
            "another path."
        )


def _manifest_of(folder: Path) -> Manifest | None:
    """Read a folder's manifest; None if there is none or it is damaged."""
    try:
        return read_manifest(folder)
    except (CheckpointError, OSError):
        return None


def is_complete(folder: Path, manifest: Manifest) -> bool:
    """Return whether all files of a checkpoint are there and of the right size, or parity can rebuild them.

    Their values are not looked at.
    """
    lost = [index for index, file in enumerate(manifest.files) if _size_of(folder / file.name) != file.size]
    if not manifest.rows:
        return not lost
    groups = [group_around(index, manifest.world_size) for index in lost]
    return len(set(groups)) == len(groups)


def _size_of(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except OSError:
        return None


def find(path: Path) -> tuple[Path, Manifest, list[str]]:
    """Find the checkpoint at a path: that folder, or the newest complete one in it.

    Returns:
        The checkpoint's folder, what it says of itself, and why newer ones were passed over.

    Raises:
        CheckpointError: There is none.
    """
    if is_checkpoint(path):
        return path, read_manifest(path), []
    found, skipped = [], []
    for child in checkpoints_in(path):
        try:
            manifest = read_manifest(child)
            if not is_complete(child, manifest):
                raise CheckpointError(f"{child}: files are missing or of another size")
            found.append((manifest.order, child, manifest))
        except CheckpointError as error:
            skipped.append((_changed(child), str(error)))
    if not found:
        raise CheckpointError(f"{path}: {_NONE} that can be used: {skipped[0][1].rstrip('.')}. Check the path.")
    _, newest, manifest = max(found, key=lambda each: each[:2])
    return newest, manifest, [why for changed, why in skipped if changed >= _changed(newest)]


def checkpoints_in(path: Path) -> list[Path]:
    """Return the checkpoint at a path, or all in a folder.

    Raises:
        CheckpointError: There is none.
    """
    found = [path] if is_checkpoint(path) else [child for child in _folders_in(path) if is_checkpoint(child)]
    if not found:
        raise CheckpointError(f"{path}: {_NONE}. Check the path.")
    return found


def _folders_in(path: Path) -> list[Path]:
    """Return the folders in a folder, without links and hidden ones."""
    return [c for c in children(path) if not c.name.startswith(".") and not c.is_symlink() and c.is_dir()]


def _changed(folder: Path) -> float:
    with suppress(OSError):
        return (folder / MANIFEST).lstat().st_mtime
    return 0.0


def prune(newest: Path, run: str, keep: int) -> None:
    """Remove the older checkpoints of a run in a folder, and keep the last `keep`, the newest one included."""
    found = [(child, _manifest_of(child)) for child in _folders_in(newest.parent) if child != newest]
    older = [(manifest.order, child) for child, manifest in found if manifest and manifest.facts["run"] == run]
    for _, folder in sorted(older, reverse=True)[keep - 1 :]:
        with suppress(OSError):
            if all(_OURS.fullmatch(child.name) for child in folder.iterdir()):
                hidden = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.removed")
                folder = folder.rename(hidden)  # at once: what is half removed is no checkpoint
        _remove_own(folder)


class Draft:
    """The hidden folder of a checkpoint that is being written; rank 0 makes and publishes it.

    Args:
        target: Where it is to go.
        folder: The hidden one, beside it.

    Raises:
        CheckpointError: Something else is there.
        OSError: It cannot be made.
    """

    def __init__(self, target: Path, folder: Path) -> None:
        check_target(target)
        make_folder(target.parent)
        _remove_leftovers(target.parent)
        self.target, self.folder, self._lock = target, folder, -1
        while not self._begin():
            pass  # another save took the new folder for what a killed one left, and removed it

    def _begin(self) -> bool:
        self.folder.mkdir()
        path = self.folder / _LOCK
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(path, flags, 0o666)
            with suppress(OSError):  # file systems without locks: what a kill leaves stays there
                while not try_lock(self._lock):
                    time.sleep(_POLL_S)
            if os.fstat(self._lock).st_nlink and path.exists():
                return True
        except FileNotFoundError:
            return False
        except BaseException:
            self.close()
            raise
        self.close()
        return False

    def publish(self, manifest: Manifest) -> None:
        """Publish the folder: whenever the process dies, the old checkpoint or the new one is there, whole.

        Args:
            manifest: Its manifest.

        Raises:
            CheckpointError, OSError: It cannot be put there.
        """
        sync_folder(self.folder)
        check_target(self.target)
        if _manifest_of(self.target) is not None or not self._rename():  # perhaps another save was faster
            with locked(self.target) as is_locked:
                self._replace(read_manifest(self.target), manifest, is_alone=is_locked)
        self.close()

    def _rename(self) -> bool:
        """Rename the folder to its target; False if there is a folder with something in it."""
        try:
            self.folder.rename(self.target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        sync_folder(self.target.parent)
        with suppress(OSError):  # the checkpoint is there, and the next save or `remove` takes the file along
            (self.target / _LOCK).unlink()
        return True

    def _replace(self, before: Manifest, manifest: Manifest, *, is_alone: bool) -> None:
        """Move the files into the folder of an older checkpoint, switch its manifest, and remove the older files.

        Args:
            before: The older checkpoint's manifest.
            manifest: The new one's.
            is_alone: Whether no other save does so now; then what killed ones left there goes, too.
        """
        try:
            for name in manifest.names:
                (self.folder / name).rename(self.target / name)  # a name that no other save has
            sync_folder(self.target)
            (self.folder / MANIFEST).rename(self.target / MANIFEST)  # from here on it is the new one
        except BaseException:
            for name in manifest.names:
                (self.target / name).unlink(missing_ok=True)
            raise
        sync_folder(self.target)
        outdated = {child.name for child in self.target.iterdir() if _IN_PLACE.fullmatch(child.name)}
        for name in {*before.names, *(outdated if is_alone else ())} - manifest.names:
            with suppress(OSError):  # the new checkpoint is there, and the next save removes what stays
                (self.target / name).unlink()

    def close(self) -> None:
        """Remove the folder unless it was published."""
        _remove_own(self.folder)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_own(folder: Path) -> None:
    """Remove a folder and the files that a save writes; other files in it stay, and so does the folder then."""
    with suppress(OSError):  # manifests first, without which it is no checkpoint; a kill leaves the lock to find
        for child in sorted(folder.iterdir(), key=lambda each: (each.name == _LOCK, each.name)):
            draft = _HIDDEN.fullmatch(child.name)
            is_half = folder.name.startswith(".") and _DRAFTS.fullmatch(child.name)
            if is_half or _OURS.fullmatch(child.name if draft is None else draft[1]):
                child.unlink(missing_ok=True)
        folder.rmdir()


def _remove_leftovers(parent: Path) -> None:
    """Remove the hidden folders that killed saves left in a folder: those that nobody has locked."""
    for folder in children(parent):
        found = _HIDDEN.fullmatch(folder.name)
        with suppress(OSError):
            if found is not None and folder.is_dir() and not folder.is_symlink():
                (_remove_own if found[2] == "removed" else _remove_leftover)(folder)


def _remove_leftover(folder: Path) -> None:
    """Remove the hidden folder of a save unless its writer lives.

    Raises:
        OSError: What is called as the lock is no file, or cannot be locked.
    """
    try:
        opened = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        with suppress(OSError):
            folder.rmdir()  # a save that was killed between its first two operations left it empty
        if not os.path.lexists(folder / _LOCK):  # else a save has begun there; this one gave up while a rank wrote
            _remove_own(folder)
        return
    with closing(opened):
        if try_lock(opened):  # its writer does not live any more
            _remove_own(folder)
