"""What a checkpoint says of itself: a JSON file that is written last, and believed only as far as it can be checked."""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dshard.checkpoint.disk import open_regular, read_exactly
from dshard.checkpoint.file_format import dtype_name, dtype_of
from dshard.checkpoint.parity import Row, Stripes, group_around
from dshard.errors import CheckpointError

__all__ = [
    "BLOCK_BYTES",
    "MANIFEST",
    "Chunk",
    "Manifest",
    "StoredFile",
    "StoredTensor",
    "is_checkpoint",
    "read_bytes",
    "read_manifest",
]

MANIFEST = "dshard.json"
BLOCK_BYTES = 1 << 18  # what one sum is of: a reader of a part of a chunk reads at most two of them too many
_FORMAT = 2
_MAX_BYTES = 1 << 30  # of a manifest
_COPY_NAME = re.compile(r"dshard-[0-9a-f]{8}\.json")
_FILE_NAME = re.compile(r"shard-\d{5,}-of-\d{5,}\.[0-9a-f]{8}\.safetensors")
_SUM_BYTES = 4


class DamageError(ValueError):
    """What is wrong with a manifest, for `read_manifest` to say of which file."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One rank's file.

    Args:
        name: In the checkpoint's folder.
        size: In bytes.
        data_start: Bytes ahead of the first value.
        header_sum: SHA-256 of these, in hex.
        sums_start: First byte of the sums of all blocks of all chunks, 4 bytes each.
    """

    name: str
    size: int
    data_start: int
    header_sum: str
    sums_start: int

    def to_json(self) -> list[Any]:
        """As the manifest has it."""
        return [self.name, self.size, self.data_start, self.header_sum, self.sums_start]

    @classmethod
    def from_json(cls, value: Any) -> "StoredFile":
        """The inverse of `to_json`.

        Raises:
            DamageError: It is no such thing, or points elsewhere.
        """
        name, size, data_start, header_sum, sums_start = _list(value, 5)
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise DamageError(f"a file must be named as a shard is, in this folder, but one is {name!r}")
        if not _are_counts(size, data_start, sums_start) or not data_start <= sums_start <= size:
            raise DamageError(f"'{name}' must begin with its header and end with its sums, but has {value[1:]}")
        if not isinstance(header_sum, str) or not re.fullmatch(r"[0-9a-f]{64}", header_sum):
            raise DamageError(f"'{name}' must have the SHA-256 of its header, but has {header_sum!r}")
        return cls(name, size, data_start, header_sum, sums_start)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and where it is.

    Args:
        file: Number of its file.
        offsets: First index along each dim.
        sizes: Number of indices along each dim.
        start: First byte, from the file's own start.
        first_sum: Number of the sum of its first block.
        checksum: CRC-32 of the sums of its blocks.
    """

    file: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    first_sum: int
    checksum: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def to_json(self) -> list[Any]:
        """As the manifest has it."""
        return [self.file, list(self.offsets), list(self.sizes), self.start, self.first_sum, self.checksum]

    @classmethod
    def from_json(cls, value: Any) -> "Chunk":
        """The inverse of `to_json`.

        Raises:
            DamageError: It is no such thing.
        """
        file, offsets, sizes, start, first_sum, checksum = _list(value, 6)
        if not _are_counts(file, start, first_sum, checksum, *_list(offsets), *_list(sizes)):
            raise DamageError(f"a chunk must be counts and lists of counts, but is {value}")
        return cls(file, tuple(offsets), tuple(sizes), start, first_sum, checksum)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Args:
        dtype: Of its values.
        shape: Of the full tensor.
        chunks: Boxes that cover it once.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def num_bytes(self, chunk: Chunk) -> int:
        """Of one of its chunks."""
        return chunk.numel * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        """As the manifest has it."""
        return [dtype_name("checkpoint", self.dtype), list(self.shape), [chunk.to_json() for chunk in self.chunks]]

    @classmethod
    def from_json(cls, value: Any) -> "StoredTensor":
        """The inverse of `to_json`.

        Raises:
            DamageError: It is no such thing, or its chunks do not cover it once.
        """
        name, shape, chunks = _list(value, 3)
        if not isinstance(name, str) or (dtype := dtype_of(name)) is None:
            raise DamageError(f"a dtype must be one that safetensors has, but is {name!r}")
        if not _are_counts(*_list(shape)):
            raise DamageError(f"a shape must be a list of counts, but is {shape}")
        found = cls(dtype, tuple(shape), tuple(Chunk.from_json(chunk) for chunk in _list(chunks)))
        check_cover(found)
        return found


def check_cover(tensor: StoredTensor) -> None:
    """Raise `DamageError` unless a tensor's chunks cover it once."""
    shape, chunks = tensor.shape, tensor.chunks
    for chunk in chunks:
        is_box = len(chunk.offsets) == len(chunk.sizes) == len(shape) and chunk.numel
        if not is_box or any(o + s > d for o, s, d in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise DamageError(f"chunks must lie in the shape {shape}, but one has {chunk.sizes} at {chunk.offsets}")
    covered, needed = sum(chunk.numel for chunk in chunks), math.prod(shape)
    if covered != needed:
        raise DamageError(f"chunks must cover the {needed} elements of shape {shape}, but have {covered}")
    if len(chunks) > 1:
        low = np.array([chunk.offsets for chunk in chunks], dtype=np.int64)
        high = low + np.array([chunk.sizes for chunk in chunks], dtype=np.int64)
        for i in range(len(chunks) - 1):
            if np.any(np.all((low[i] < high[i + 1 :]) & (low[i + 1 :] < high[i]), axis=1)):
                raise DamageError(f"chunks must not overlap, but another lies on the one at {chunks[i].offsets}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint.

    Args:
        facts: Number of ranks, step, run, and the caller's own; optimizers without their tensors.
        files: One of each rank.
        tensors: By name.
        aliases: Other names of tensors, each with the one it is stored under.
        rows: Of parity, one of each rank; none without.
    """

    facts: dict[str, Any]
    files: tuple[StoredFile, ...]
    tensors: dict[str, StoredTensor]
    aliases: dict[str, str]
    rows: tuple[Row, ...] = ()

    @property
    def names(self) -> set[str]:
        """Names of all files but the manifest."""
        rows = {self.copy_name, *(row.name for row in self.rows)} if self.rows else set()
        return {file.name for file in self.files} | rows

    @property
    def copy_name(self) -> str:
        """Name of the manifest's copy, with parity."""
        return f"dshard-{self.facts['token']}.json"

    @property
    def world_size(self) -> int:
        """How many ranks wrote it."""
        return len(self.files)

    @property
    def step(self) -> int:
        """What was passed to `save`."""
        return int(self.facts["step"])

    def stored(self, name: str) -> StoredTensor | None:
        """A tensor by any of its names."""
        return self.tensors.get(self.aliases.get(name, name))

    def to_bytes(self) -> bytes:
        """The file's content."""
        body = {
            "format": _FORMAT,
            **self.facts,
            "files": [file.to_json() for file in self.files],
            "tensors": {name: tensor.to_json() for name, tensor in self.tensors.items()},
            "aliases": self.aliases,
            "parity": [row.to_json() for row in self.rows] or None,
        }
        return json.dumps({**body, "sha256": _sum_of(body)}, ensure_ascii=True, indent=None).encode() + b"\n"


_FACTS: Mapping[str, type | tuple[type, ...]] = {
    "token": str,
    "run": str,
    "sequence": int,
    "step": int,
    "created": str,
    "dshard": str,
    "torch": str,
    "parity": (list, type(None)),
    "optimizers": list,
    "extra_state": dict,
    "are_alike": bool,
    "extra": (dict, list, str, int, float, bool, type(None)),
    "own": list,
}


def _sum_of(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder says that it is one, whatever comes of reading it."""
    return os.path.lexists(folder / MANIFEST) or bool(_copies(folder))


def _copies(folder: Path) -> list[Path]:
    """Copies of the manifest, which parity has; two, for a moment, when one checkpoint replaces another."""
    try:
        return sorted(child for child in folder.iterdir() if _COPY_NAME.fullmatch(child.name))
    except OSError:
        return []


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint says of itself, after all of it was checked that can be without reading values.

    Where it is missing or damaged, its copy stands in, if there is parity.

    Raises:
        CheckpointError: There is none in `folder`, or it is damaged, of another format, or lies about its files.
    """
    try:
        return _read(folder / MANIFEST, folder)
    except CheckpointError as error:
        for copy in _copies(folder):
            with suppress(CheckpointError):
                manifest = _read(copy, folder)
                if manifest.copy_name == copy.name and all((folder / row.name).exists() for row in manifest.rows[:1]):
                    return manifest
        raise error


def _read(file: Path, folder: Path) -> Manifest:
    """The manifest in a file."""
    try:
        content = read_bytes(file)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: a checkpoint is a folder with a {MANIFEST}, but there is none. Check the path."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file}: must be readable, but {error.strerror}. Check its permissions.") from error
    try:
        value = json.loads(content)
        if isinstance(value, dict) and value.get("format") != _FORMAT:
            raise CheckpointError(
                f"{file}: the format must be {_FORMAT}, but it is {str(value.get('format'))[:40]}. "
                + (
                    "It was written by torch's DCP, whose pickles are not read here: load it with the version that "
                    "wrote it, or with torch.distributed.checkpoint."
                    if value.get("format") == 1
                    else "Load it with the version that wrote it."
                )
            )
        return _checked(value)
    except DamageError as damage:
        raise CheckpointError(f"{file}: {damage}. The checkpoint is damaged; use another.") from damage
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{file}: must be JSON as save wrote it, but {type(error).__name__}: {str(error)[:200]}. The checkpoint is "
            "damaged; use another."
        ) from error


def read_bytes(file: Path) -> bytes:
    """A small file's content.

    Raises:
        CheckpointError: It is no file, or not small.
        OSError: There is none, or it cannot be read.
    """
    opened = open_regular(file)
    try:
        size = os.fstat(opened).st_size
        if size > _MAX_BYTES:
            raise CheckpointError(f"{file}: may have {_MAX_BYTES} bytes, but it has {size}. It is damaged.")
        content = bytearray(size)
        read_exactly(opened, memoryview(content), 0)
        return bytes(content)
    except EOFError as error:
        raise CheckpointError(f"{file}: must stay as it is while it is read, but {error}. Read it again.") from error
    finally:
        os.close(opened)


def _checked(value: Any) -> Manifest:
    """The manifest in a file's JSON."""
    if not isinstance(value, dict):
        raise DamageError(f"it must be an object, but is a {type(value).__name__}")
    body = {key: item for key, item in value.items() if key != "sha256"}
    if value.get("sha256") != _sum_of(body):
        raise DamageError("its checksum must be that of its content, but it is of another")
    for name, kind in _FACTS.items():
        if name not in body or not isinstance(body[name], kind):
            raise DamageError(f"'{name}' must be there, of its kind, but it is {str(body.get(name, 'missing'))[:40]!r}")
    if not re.fullmatch(r"[0-9a-f]{8}", body["token"]):
        raise DamageError(f"'token' must be 8 hex digits, but is {body['token']!r:.40}")
    if not isinstance(body["tensors"], dict) or not isinstance(body["aliases"], dict):
        raise DamageError("'tensors' and 'aliases' must be objects, but one is not")
    files = tuple(StoredFile.from_json(file) for file in _list(body["files"]))
    tensors = {}
    for name, stored in body["tensors"].items():
        try:
            tensors[name] = StoredTensor.from_json(stored)
        except DamageError as damage:
            raise DamageError(f"of '{name}' {damage}") from damage
    for name, target in body["aliases"].items():
        if target not in tensors or name in tensors:
            raise DamageError(f"'{name}' must be another name of a tensor, but '{str(target)[:80]}' is none")
    facts = {name: body[name] for name in _FACTS if name != "parity"}
    rows = tuple(Row.from_json(row) for row in body["parity"] or ())
    manifest = Manifest(facts, files, tensors, dict(body["aliases"]), rows)
    if not files or len({file.name for file in files}) != len(files):
        raise DamageError(f"each rank must have a file of its own, but there are {[file.name for file in files][:4]}")
    _check_ranges(manifest)
    _check_rows(manifest)
    return manifest


def _check_rows(manifest: Manifest) -> None:
    """Raise `DamageError` unless there are no rows of parity, or one of each rank that fits its group's files."""
    if not manifest.rows:
        return
    if len(manifest.rows) != len(manifest.files):
        raise DamageError(f"each rank must have a row of parity, but {len(manifest.rows)} have")
    for index, row in enumerate(manifest.rows):
        sizes = tuple(manifest.files[i].size for i in group_around(index, len(manifest.files)))
        if len(sizes) < 2 or row.size != Stripes(sizes).length:
            raise DamageError(f"'{row.name}' must be as long as a stripe of its group, but has {row.size} bytes")


def _check_ranges(manifest: Manifest) -> None:
    """Raise `DamageError` unless the chunks fill the files, one after the other, and their sums too."""
    by_file: list[list[tuple[int, int, int, int, str]]] = [[] for _ in manifest.files]
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            if chunk.file >= len(by_file):
                raise DamageError(f"a chunk of '{name}' must be in one of {len(by_file)} files, but is in {chunk.file}")
            size = tensor.num_bytes(chunk)
            by_file[chunk.file].append((chunk.start, size, chunk.first_sum, num_blocks(size), name))
    for file, ranges in zip(manifest.files, by_file, strict=True):
        byte, block = file.data_start, 0
        for start, size, first, blocks, name in sorted(ranges):
            if start != byte or first != block:
                raise DamageError(f"'{name}' must be at byte {byte} of '{file.name}', but lies at {start}")
            byte, block = start + size, first + blocks
        if byte != file.sums_start or byte + _SUM_BYTES * block != file.size:
            raise DamageError(
                f"'{file.name}' must be filled by its chunks, but has {file.size} bytes and {byte} of chunks"
            )


def num_blocks(num_bytes: int) -> int:
    """Of a chunk."""
    return -(-num_bytes // BLOCK_BYTES)


def _list(value: Any, length: int | None = None) -> Sequence[Any]:
    if not isinstance(value, list) or length not in (None, len(value)):
        raise DamageError(
            f"a list{'' if length is None else f' of {length}'} is expected, but there is {str(value)[:80]}"
        )
    return value


def _are_counts(*values: Any) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 62 for value in values)
