"""Read a checkpoint's files and compare every byte with its sum: for a load, a merge, a check and a repair.

What is read lies in memory of the reader's own, and is compared there. Parity stands in for what is missing or damaged.
"""

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dshard import arguments
from dshard.checkpoint import disk
from dshard.checkpoint.files import BLOCK_BYTES, NAMES, Box, StoredFile, memory_of, sum_of
from dshard.checkpoint.folders import checkpoints_in
from dshard.checkpoint.manifest import MANIFEST, Manifest, read_copy, read_manifest
from dshard.checkpoint.parity import Read, group_around
from dshard.errors import CheckpointError

_VERIFY_BYTES = 1 << 25  # at a time; a multiple of a block


class Reader(AbstractContextManager["Reader"]):
    """Reads boxes of tensors from the files of a checkpoint, and compares every byte with its sum.

    With parity, what is missing or damaged in one file is made from the others, and compared in the same way.

    Args:
        folder: Of the checkpoint.
        manifest: What it says of itself.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest, self._stack = folder, manifest, ExitStack()
        self._opened: dict[str, int | CheckpointError] = {}  # by file name: its descriptor, or why it cannot be read
        self.rebuilt: set[str] = set()  # names of files that parity stood in for

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def read(self, name: str, box: Box) -> Tensor:
        """Return the values of a box, on the host, in memory of their own.

        Raises:
            CheckpointError: A file is missing, cut short or damaged; names it and the tensor.
        """
        stored = self._manifest.tensors[name]
        pieces = [(self._manifest.files[index], piece.box) for index, piece in stored.pieces]
        for file, held in pieces:
            if held == box:
                return self._part(file, name, box)
        out = torch.empty(box.sizes, dtype=stored.dtype, device="cpu")
        for file, held in pieces:
            common = box.overlap(held)
            if common is not None:
                out[common.within(box)] = self._part(file, name, common)
        return out

    def verify(self, file: StoredFile) -> None:
        """Read and compare a whole file of the checkpoint, or a row; raises as `read`."""
        self._open(file)
        for name, piece in file.pieces.items():
            for begin in range(0, piece.num_bytes, _VERIFY_BYTES):
                self._range(file, name, begin, min(begin + _VERIFY_BYTES, piece.num_bytes))

    def remake(self, file: StoredFile, target: memoryview, offset: int) -> None:
        """Compute the bytes of a file, or of a row of parity, from an offset on, out of the other files of its group.

        Raises:
            CheckpointError: One of those is missing or damaged, too.
        """
        files, rows = self._manifest.files, self._manifest.rows
        index = (rows if file in rows else files).index(file)
        group, stripes = self._manifest.stripes_around(index)
        if file in rows:
            target[:] = bytes(len(target))
            stripes.row_bytes(index - group.start, self._members(files, group), target, offset)
        else:
            members, member_rows = self._members(files, group), self._members(rows, group)
            stripes.rebuild(index - group.start, members, member_rows, target, offset)

    def _members(self, files: Sequence[StoredFile], group: range) -> Read:
        """Return a function that reads a file of a group, with zeros beyond its end."""

        def read(member: int, into: memoryview, at: int) -> None:
            file = files[group.start + member]
            inside = max(0, min(len(into), file.size - at))
            self._fill(file, into[:inside], at)
            into[inside:] = bytes(len(into) - inside)

        return read

    def _part(self, file: StoredFile, name: str, box: Box) -> Tensor:
        """Read a box of a piece: a view of the values from its first to its last element."""
        piece = file.pieces[name]
        if not box.numel:
            return torch.empty(box.sizes, dtype=piece.dtype, device="cpu")
        inner, itemsize = box.within(piece.box), piece.dtype.itemsize
        strides = [math.prod(piece.box.sizes[dim + 1 :]) for dim in range(len(inner))]
        first = sum(each.start * stride for each, stride in zip(inner, strides, strict=True))
        last = sum((each.stop - 1) * stride for each, stride in zip(inner, strides, strict=True))
        raw = self._range(file, name, first * itemsize, (last + 1) * itemsize)
        return raw.view(piece.dtype).as_strided(box.sizes, strides)

    def _range(self, file: StoredFile, name: str, begin: int, end: int) -> Tensor:
        """Read a piece's bytes into new memory and compare them; shape (end - begin,), uint8."""
        piece = file.pieces[name]
        low, high = begin // BLOCK_BYTES * BLOCK_BYTES, min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, piece.num_bytes)
        found = torch.empty(high - low, dtype=torch.uint8, device="cpu")
        content = memory_of(found)
        error = None
        try:
            self._fill(file, content, piece.start + low)
        except CheckpointError as caught:
            error = caught
        for at in range(low, high, BLOCK_BYTES):
            block, start = content[at - low : at - low + BLOCK_BYTES], piece.start + at
            if error is None and piece.is_whole(block, at // BLOCK_BYTES):
                continue
            where = f"between {start} and {start + len(block)}"
            failed = error or self._damage(
                file.name, f"values must be those that were saved, but '{name}' has other bytes {where}"
            )
            self._remake_or(failed, file, block, start)
            if not piece.is_whole(block, at // BLOCK_BYTES):
                raise failed
        return found[begin - low : end - low]

    def _remake_or(self, failed: CheckpointError, file: StoredFile, target: memoryview, start: int) -> None:
        """Compute bytes of a file that could not be read, or raise why it could not be."""
        if not self._manifest.rows:
            raise failed
        try:
            self.remake(file, target, start)
        except CheckpointError as other:
            raise CheckpointError(f"{failed} Parity cannot stand in: {other}") from failed
        self.rebuilt.add(file.name)

    def _open(self, file: StoredFile) -> int:
        """Open a file, compare its size and header with the manifest, and return its descriptor; once for each file.

        `safetensors` says what the file holds. Values are read with preadv at the offsets in the manifest, and not
        through the package's mapping of the file: there a disk error or a truncated file ends the process by SIGBUS.
        """
        if file.name not in self._opened:
            try:
                self._opened[file.name] = self._compared(file)
            except CheckpointError as error:
                self._opened[file.name] = error
            except SafetensorError as error:
                self._opened[file.name] = self._damage(file.name, f"it must be readable, but {error}")
            except OSError as error:
                what = f"all files of a checkpoint must be there and readable, but: {error.strerror}"
                self._opened[file.name] = self._damage(file.name, what)
        found = self._opened[file.name]
        if isinstance(found, CheckpointError):
            raise found
        return found

    def _compared(self, file: StoredFile) -> int:
        path = self._folder / file.name
        if (size := disk.check_regular(path).st_size) != file.size:
            raise self._damage(file.name, f"it must have the {file.size} bytes that were saved, but has {size}")
        descriptor = self._stack.enter_context(disk.closing(disk.open_regular(path)))
        header = memoryview(bytearray(file.header_bytes))
        disk.read_padded(descriptor, header, 0)
        if sum_of(header) != file.header_sum:
            raise self._damage(file.name, "its header must be the one that was saved, but it is another")
        if not file.header_bytes:
            return descriptor  # of a row of parity
        with safe_open(path, "np") as opened:  # which opens the file once more
            for name, piece in file.pieces.items():
                found = opened.get_slice(name).get_dtype(), tuple(opened.get_slice(name).get_shape())
                if found != (NAMES[piece.dtype], piece.box.sizes):
                    raise self._damage(file.name, f"'{name}' must be as the manifest says, but it is {found}")
        return descriptor

    def _fill(self, file: StoredFile, target: memoryview, offset: int) -> None:
        """Fill a buffer with a file's bytes, after its size and header were compared."""
        descriptor = self._open(file)
        try:
            num_read = disk.read_padded(descriptor, target, offset)
        except OSError as error:
            raise self._damage(file.name, f"it must be readable, but {error.strerror}") from error
        if num_read != len(target):
            raise self._damage(file.name, f"it must be readable to its end, but ends before {offset + len(target)}")

    def _damage(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._folder / name}: {what}. The file is damaged; use another checkpoint.")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with a checkpoint.

    Args:
        file: Name of the file that is missing or damaged.
        problem: What is wrong, with the first tensor that is concerned.
        is_mendable: Whether parity can make the file anew.
    """

    file: str
    problem: str
    is_mendable: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` found.

    Args:
        folder: Of the checkpoint.
        step: That it was saved at.
        num_ranks: That wrote it.
        num_bytes: Of all of its files.
        num_tensors: That it holds.
        has_parity: Whether it has rows of parity.
        findings: What is wrong; empty if nothing is.
    """

    folder: Path
    step: int
    num_ranks: int
    num_bytes: int
    num_tensors: int
    has_parity: bool
    findings: tuple[Finding, ...]


def check(directory: str | os.PathLike[str]) -> list[Report]:
    """Read every byte of a checkpoint, or of all in a folder, and compare it with what was saved.

    Needs no process group, and changes nothing.

    Args:
        directory: Folder that `dshard.checkpoint.save` made, or a folder of such.

    Returns:
        A report for each checkpoint, by name.

    Raises:
        CheckpointError: There is no checkpoint, or the manifest of one is damaged and has no copy.
    """
    arguments.path("checkpoint.check", "directory", directory)
    return [_check(folder) for folder in checkpoints_in(Path(directory))]


def repair(directory: str | os.PathLike[str]) -> list[Path]:
    """Rebuild the files that `check` finds missing or damaged from the other files and parity.

    Returns:
        The files that were written. Each was put in its place at once, after all of it was compared.

    Raises:
        CheckpointError: There is something that parity cannot make; other files may have been written by then.
    """
    arguments.path("checkpoint.repair", "directory", directory)
    written = []
    for report in check(directory):
        lost = next((finding for finding in report.findings if not finding.is_mendable), None)
        if lost is not None:
            raise CheckpointError(
                f"{report.folder}: parity must be able to rebuild every damaged file, but it cannot: {lost.problem}"
            )
        manifest = read_manifest(report.folder)
        written += [_write_anew(report.folder, manifest, finding.file) for finding in report.findings]
    return written


def _check(folder: Path) -> Report:
    """Compare all files of one checkpoint."""
    manifest = read_manifest(folder)
    files = (*manifest.files, *manifest.rows)
    damaged: dict[str, str] = {}
    with Reader(folder, replace(manifest, rows=())) as reader:  # without rows, which would stand in for files
        for file in files:
            try:
                reader.verify(file)
            except CheckpointError as error:
                damaged[file.name] = str(error)
    for name in (MANIFEST, manifest.copy_name) if manifest.rows else ():
        with suppress(CheckpointError):
            if read_copy(folder / name).to_bytes() == manifest.to_bytes():
                continue
        damaged[name] = f"{folder / name}: must be the manifest that was saved, but it is missing or damaged."
    rank_of = {file.name: i % manifest.world_size for i, file in enumerate(files)}
    ranks = {rank_of[name] for name in damaged if name in rank_of}

    def is_mendable(name: str) -> bool:
        """Return whether no other rank of the group lost something; a manifest has its copy."""
        if name not in rank_of or not manifest.rows:
            return bool(manifest.rows)
        return ranks.intersection(group_around(rank_of[name], manifest.world_size)) == {rank_of[name]}

    findings = tuple(Finding(name, text, is_mendable(name)) for name, text in damaged.items())
    num_bytes, num_tensors = sum(file.size for file in files), len(manifest.tensors)
    return Report(
        folder, manifest.facts["step"], manifest.world_size, num_bytes, num_tensors, bool(manifest.rows), findings
    )


def _write_anew(folder: Path, manifest: Manifest, name: str) -> Path:
    """Rebuild one file, compare it, and put it in its place."""
    path = folder / name
    if name in (MANIFEST, manifest.copy_name):
        disk.write_whole(path, manifest.to_bytes())
        return path
    draft = disk.partial_name(path)
    file = next(each for each in (*manifest.files, *manifest.rows) if each.name == name)
    try:
        with Reader(folder, manifest) as reader, disk.create(draft) as opened:
            for offset, part in disk.buffers(file.size):
                reader.remake(file, part, offset)
                disk.write_all(opened, part)
        with Reader(folder, replace(manifest, rows=())) as reader:
            reader.verify(replace(file, name=draft.name))
        draft.rename(path)
    finally:
        with suppress(OSError):
            draft.unlink()
    disk.sync_folder(folder)
    return path
