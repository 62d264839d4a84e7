"""Check all of a checkpoint, in one process and without a model; and write anew what parity can make."""

import os
import zlib
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dshard.arguments import TABLE
from dshard.checkpoint.disk import (
    buffers,
    closing,
    create,
    open_regular,
    partial_name,
    read_exactly,
    sync_folder,
    write_all,
    write_whole,
)
from dshard.checkpoint.folders import checkpoints_in
from dshard.checkpoint.manifest import MANIFEST, Manifest, read_copy, read_manifest
from dshard.checkpoint.parity import group_around
from dshard.checkpoint.shard_file import ShardReader
from dshard.errors import CheckpointError
from dshard.kinds import checked_by


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


@checked_by(TABLE["checkpoint.check"], "checkpoint.check")
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
    return [_check(folder) for folder in checkpoints_in(Path(directory))]


@checked_by(TABLE["checkpoint.repair"], "checkpoint.repair")
def repair(directory: str | os.PathLike[str]) -> list[Path]:
    """Write anew, out of the others and parity, what `check` finds missing or damaged.

    Returns:
        The files that were written. Each was put in its place at once, after all of it was compared.

    Raises:
        CheckpointError: There is something that parity cannot make; other files may have been written by then.
    """
    written = []
    for report in check(directory):
        lost = next((finding for finding in report.findings if not finding.is_mendable), None)
        if lost is not None:
            raise CheckpointError(
                f"{report.folder}: parity must stand in for what is lost, but not here: {lost.problem}"
            )
        manifest = read_manifest(report.folder)
        written += [_write_anew(report.folder, manifest, finding.file) for finding in report.findings]
    return written


def _check(folder: Path) -> Report:
    """Everything that is wrong with one checkpoint."""
    manifest = read_manifest(folder)
    damaged: dict[str, str] = {}
    with ShardReader(folder, replace(manifest, rows=())) as reader:
        for index, file in enumerate(manifest.files):
            try:
                reader.header(index)
            except CheckpointError as error:
                damaged[file.name] = str(error)
        for name, stored in manifest.tensors.items():
            for chunk in stored.chunks:
                file = manifest.files[chunk.file]
                if file.name not in damaged:
                    try:
                        reader.verify(name, stored, chunk)
                    except CheckpointError as error:
                        damaged[file.name] = str(error)
    for row in manifest.rows:
        problem = _problem_of_row(folder / row.name, row.size, row.checksum)
        if problem:
            damaged[row.name] = problem
    for name in (MANIFEST, manifest.copy_name) if manifest.rows else ():
        if not read_copy(folder, name, manifest):
            damaged[name] = f"{folder / name}: must be the manifest that was saved, but it is missing or damaged."
    findings = tuple(Finding(name, text, _is_mendable(name, manifest, damaged)) for name, text in damaged.items())
    sizes = [file.size for file in manifest.files] + [row.size for row in manifest.rows]
    step, ranks = manifest.step, manifest.world_size
    return Report(folder, step, ranks, sum(sizes), len(manifest.tensors), bool(manifest.rows), findings)


def _problem_of_row(path: Path, size: int, checksum: int) -> str | None:
    """What is wrong with a row of parity; None if nothing is."""
    try:
        with closing(open_regular(path)) as opened:
            found = 0
            if os.fstat(opened).st_size != size:
                return f"{path}: must have the {size} bytes that were saved, but has {os.fstat(opened).st_size}."
            for offset, part in buffers(size):
                read_exactly(opened, part, offset)
                found = zlib.crc32(part, found)
    except (OSError, EOFError, CheckpointError) as error:
        return f"{path}: a row of parity must be readable, but {error}."
    return None if found == checksum else f"{path}: must have the bytes that were saved, but it has others."


def _is_mendable(name: str, manifest: Manifest, damaged: Collection[str]) -> bool:
    """Whether parity makes a file anew: no other file of its group is damaged but, for a shard, its own row."""
    if not manifest.rows:
        return False
    if name in (MANIFEST, manifest.copy_name):
        return True
    shards, rows = [file.name for file in manifest.files], [row.name for row in manifest.rows]
    index = shards.index(name) if name in shards else rows.index(name)
    group = group_around(index, len(shards))
    return not any(shards[i] in damaged or rows[i] in damaged for i in group if i != index)


def _write_anew(folder: Path, manifest: Manifest, name: str) -> Path:
    """Put a file that is missing or damaged in its place again."""
    path = folder / name
    if name in (MANIFEST, manifest.copy_name):
        write_whole(path, manifest.to_bytes())
        return path
    draft = partial_name(path)
    shards, rows = [file.name for file in manifest.files], [row.name for row in manifest.rows]
    is_shard = name in shards
    index = shards.index(name) if is_shard else rows.index(name)
    size = manifest.files[index].size if is_shard else manifest.rows[index].size
    try:
        with ShardReader(folder, manifest) as reader, create(draft) as opened:
            for offset, part in buffers(size):
                (reader.rebuild if is_shard else reader.row)(index, part, offset)
                write_all(opened, part)
        if is_shard:
            _verify_as(folder, manifest, index, draft.name)
        elif problem := _problem_of_row(draft, size, manifest.rows[index].checksum):
            raise CheckpointError(problem)
        draft.rename(path)
    finally:
        with suppress(OSError):
            draft.unlink()
    sync_folder(folder)
    return path


def _verify_as(folder: Path, manifest: Manifest, index: int, name: str) -> None:
    """Compare a file of another name with what the manifest says of one.

    Raises:
        CheckpointError: It is another.
    """
    files = list(manifest.files)
    files[index] = replace(files[index], name=name)
    with ShardReader(folder, replace(manifest, files=tuple(files), rows=())) as reader:
        reader.header(index)
        for key, stored in manifest.tensors.items():
            for chunk in stored.chunks:
                if chunk.file == index:
                    reader.verify(key, stored, chunk)
