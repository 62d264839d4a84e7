"""Compare every byte of a checkpoint with its sum, in one process and without a model; rebuild files from parity."""

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dshard import arguments
from dshard.checkpoint import disk
from dshard.checkpoint.folders import checkpoints_in
from dshard.checkpoint.manifest import MANIFEST, Manifest, read_copy, read_manifest
from dshard.checkpoint.parity import group_around
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
    findings = tuple(Finding(name, text, _is_mendable(name, manifest, damaged)) for name, text in damaged.items())
    num_bytes, num_tensors = sum(file.size for file in files), len(manifest.tensors)
    return Report(
        folder, manifest.facts["step"], manifest.world_size, num_bytes, num_tensors, bool(manifest.rows), findings
    )


def _is_mendable(name: str, manifest: Manifest, damaged: Collection[str]) -> bool:
    """Return whether parity can rebuild a file: of its group nothing else is damaged but, for a shard, its own row."""
    if not manifest.rows:
        return False
    if name in (MANIFEST, manifest.copy_name):
        return True
    index, num_files = _index_of(name, manifest) % manifest.world_size, manifest.world_size
    others = [i for i in group_around(index, num_files) if i != index]
    return not any(manifest.files[i].name in damaged or manifest.rows[i].name in damaged for i in others)


def _index_of(name: str, manifest: Manifest) -> int:
    """Return the number of a file among those of the ranks and then their rows."""
    return [file.name for file in (*manifest.files, *manifest.rows)].index(name)


def _write_anew(folder: Path, manifest: Manifest, name: str) -> Path:
    """Rebuild one file, compare it, and put it in its place."""
    path = folder / name
    if name in (MANIFEST, manifest.copy_name):
        disk.write_whole(path, manifest.to_bytes())
        return path
    draft = disk.partial_name(path)
    row, index = divmod(_index_of(name, manifest), manifest.world_size)
    file = (manifest.rows if row else manifest.files)[index]
    try:
        with Reader(folder, manifest) as reader, disk.create(draft) as opened:
            for offset, part in disk.buffers(file.size):
                (reader.row if row else reader.rebuild)(index, part, offset)
                disk.write_all(opened, part)
        with Reader(folder, replace(manifest, rows=())) as reader:
            reader.verify(replace(file, name=draft.name))
        draft.rename(path)
    finally:
        with suppress(OSError):
            draft.unlink()
    disk.sync_folder(folder)
    return path
