"""The safetensors files of a model: the one that is named, or those that a folder or an index says."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dshard.checkpoint.file_format import Entry, FileVersion, parse_json, read_entries, read_text, shown
from dshard.errors import CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
WRITER = {"writer": "dshard"}  # in an index of ours, whose total_size is exact; others count in other ways
MAX_INDEX_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Found:
    """What there is to read.

    Args:
        sources: The files, an index among them, as they were.
        entries: Their tensors.
    """

    sources: tuple[FileVersion, ...]
    entries: tuple[Entry, ...]


def find(path: Path) -> Found:
    """The tensors of a safetensors file, of an index, or of a folder by the names that Hugging Face gives its files.

    Links are followed, as Hugging Face's cache needs it; but an index can only name files that lie beside it.

    Raises:
        CheckpointError: There are none, or what there is contradicts itself.
        OSError: It cannot be read.
    """
    if path.is_dir():
        file = path / SINGLE_NAME
        if not file.exists() and not file.is_symlink():
            file = path / INDEX_NAME
    else:
        file = path
    if not file.exists() and not file.is_symlink():
        raise CheckpointError(
            f"{path}: must be a safetensors file, or a directory with {SINGLE_NAME} or {INDEX_NAME}, but there is "
            "none. Check the path."
        )
    if file.suffix == ".json":
        return _find_by_index(file)
    source, entries = read_entries(file)
    return Found((source,), tuple(entries))


def names_in(index: Any) -> dict[str, str]:
    """Which file holds each tensor, by what an index says.

    Raises:
        ValueError: It says no such thing.
    """
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError("it has none")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_plain(file):
            raise ValueError(f"{shown(name)} lies in {shown(file)}, which is no name of a file beside it")
    return weight_map


def is_plain(name: str) -> bool:
    """Whether a name leads nowhere else than to a file of this name."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _find_by_index(index: Path) -> Found:
    source, text = read_text(index, MAX_INDEX_BYTES)
    try:
        said = parse_json(text)
        weight_map = names_in(said)
        total_size = _size_in(said)
    except ValueError as error:
        raise CheckpointError(
            f"{index}: must be JSON with a weight_map of tensor names to files, but {error}. The index is damaged; use "
            "another."
        ) from error
    sources, entries = [source], dict[str, Entry]()
    for name in dict.fromkeys(weight_map.values()):
        one, of_one = read_entries(index.parent / name)
        sources.append(one)
        for entry in of_one:
            if entry.name in entries:
                raise CheckpointError(
                    f"{index}: every tensor must be in one file, but {shown(entry.name)} is in "
                    f"{entries[entry.name].file.name} and in {name}. The files are of two models; use others."
                )
            entries[entry.name] = entry
    for name, file in weight_map.items():
        if name not in entries or entries[name].file.name != file:
            where = f"is in {entries[name].file.name}" if name in entries else "is in none of the files"
            raise CheckpointError(
                f"{index}: must say where tensors are, but {shown(name)} is not in {file}: it {where}. The index is of "
                "another model; use its own."
            )
    num_bytes = sum(entry.num_bytes for entry in entries.values())
    if total_size not in (None, num_bytes):
        raise CheckpointError(
            f"{index}: total_size must be what the files hold, but it is {total_size} and they hold {num_bytes}. The "
            "index is damaged or of another model; use its own."
        )
    return Found(tuple(sources), tuple(entries.values()))


def _size_in(index: dict[str, Any]) -> int | None:
    """The size that an index is held to; None in one of another writer."""
    metadata = index.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"its metadata is {shown(metadata)}")
    size = metadata.get("total_size", 0)
    if isinstance(size, bool) or not isinstance(size, int | float) or not (size >= 0 and math.isfinite(size)):
        raise ValueError(f"its total_size is {shown(size)}")
    return int(size) if metadata.items() >= WRITER.items() else None
