"""Compare every byte of a checkpoint with its sum, in one process and without a model; rebuild files from parity."""

import os
import zlib
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dshard import arguments
from dshard.checkpoint import disk
from dshard.checkpoint.folders import checkpoints_in
from dshard.checkpoint.manifest import MANIFEST, Manifest, read_copy, read_manifest
from dshard.checkpoint.parity import Row, group_around
from dshard.checkpoint.reading import Reader
from dshard.errors import CheckpointError


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
    damaged: dict[str, str] = {}
    with Reader(folder, replace(manifest, rows=())) as reader:
        for index, file in enumerate(manifest.files):
            try:
                reader.verify(index)
            except CheckpointError as error:
                damaged[file.name] = str(error)
    for row in manifest.rows:
        if problem := _problem_of_row(folder / row.name, row):
            damaged[row.name] = problem
    for name in (MANIFEST, manifest.copy_name) if manifest.rows else ():
        with suppress(CheckpointError):
            if read_copy(folder / name).to_bytes() == manifest.to_bytes():
                continue
        damaged[name] = f"{folder / name}: must be the manifest that was saved, but it is missing or damaged."
    findings = tuple(Finding(name, text, _is_mendable(name, manifest, damaged)) for name, text in damaged.items())
    sizes = [file.size for file in manifest.files] + [row.size for row in manifest.rows]
    step, ranks = manifest.facts["step"], manifest.world_size
    return Report(folder, step, ranks, sum(sizes), len(manifest.tensors), bool(manifest.rows), findings)


def _problem_of_row(path: Path, row: Row) -> str | None:
    """Compare a row of parity; return what is wrong with it, or None."""
    found = num_read = 0
    try:
        with disk.closing(disk.open_regular(path)) as opened:
            size = os.fstat(opened).st_size
            for offset, part in disk.buffers(size if size == row.size else 0):
                num_read += disk.read_padded(opened, part, offset)
                found = zlib.crc32(part, found)
    except (OSError, CheckpointError) as error:
        return f"{path}: a row of parity must be readable, but {error}."
    is_whole = (num_read, found) == (row.size, row.checksum)
    return None if is_whole else f"{path}: must have the {row.size} bytes that were saved, but it has others."


def _is_mendable(name: str, manifest: Manifest, damaged: Collection[str]) -> bool:
    """Return whether parity can rebuild a file: of its group nothing else is damaged but, for a shard, its own row."""
    if not manifest.rows:
        return False
    if name in (MANIFEST, manifest.copy_name):
        return True
    shards, rows = [file.name for file in manifest.files], [row.name for row in manifest.rows]
    index = shards.index(name) if name in shards else rows.index(name)
    group = group_around(index, len(shards))
    return not any(shards[i] in damaged or rows[i] in damaged for i in group if i != index)


def _write_anew(folder: Path, manifest: Manifest, name: str) -> Path:
    """Rebuild one file, compare it, and put it in its place."""
    path = folder / name
    if name in (MANIFEST, manifest.copy_name):
        disk.write_whole(path, manifest.to_bytes())
        return path
    draft = disk.partial_name(path)
    shards, rows = [file.name for file in manifest.files], [row.name for row in manifest.rows]
    is_shard = name in shards
    index = shards.index(name) if is_shard else rows.index(name)
    size = manifest.files[index].size if is_shard else manifest.rows[index].size
    try:
        with Reader(folder, manifest) as reader, disk.create(draft) as opened:
            for offset, part in disk.buffers(size):
                (reader.rebuild if is_shard else reader.row)(index, part, offset)
                disk.write_all(opened, part)
        if is_shard:
            files = [replace(file, name=draft.name) if i == index else file for i, file in enumerate(manifest.files)]
            with Reader(folder, replace(manifest, files=tuple(files), rows=())) as reader:
                reader.verify(index)
        elif problem := _problem_of_row(draft, manifest.rows[index]):
            raise CheckpointError(problem)
        draft.rename(path)
    finally:
        with suppress(OSError):
            draft.unlink()
    disk.sync_folder(folder)
    return path
