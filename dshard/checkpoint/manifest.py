"""What a checkpoint says of itself: a JSON file that is written last, and believed only as far as it can be checked."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dshard.checkpoint.file_format import read_text
from dshard.checkpoint.parity import Row, Stripes, group_around
from dshard.checkpoint.stored import DamageError, StoredFile, StoredTensor, are_counts, as_list, num_blocks, own_name
from dshard.errors import CheckpointError

MANIFEST = "dshard.json"
_FORMAT = 2
MAX_MANIFEST_BYTES = 1 << 30
COPY_NAME = re.compile(r"dshard-[0-9a-f]{8}\.json")
_SUM_BYTES = 4


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
            **{name: self.facts[name] for name in _FACTS if name in self.facts},
            "files": [file.to_json() for file in self.files],
            "tensors": {name: tensor.to_json() for name, tensor in self.tensors.items()},
            "aliases": self.aliases,
            "parity": [row.to_json() for row in self.rows] or None,
        }
        return json.dumps({**body, "sha256": _sum_of(body)}).encode() + b"\n"


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
        return sorted(child for child in folder.iterdir() if COPY_NAME.fullmatch(child.name))
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


def read_copy(folder: Path, name: str, manifest: Manifest) -> bool:
    """Whether a file holds this very manifest."""
    try:
        return _read(folder / name, folder).to_bytes() == manifest.to_bytes()
    except CheckpointError:
        return False


def _read(file: Path, folder: Path) -> Manifest:
    """The manifest in a file."""
    try:
        _, content = read_text(file, MAX_MANIFEST_BYTES, follow=False)
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
    if not are_counts(body["step"], body["sequence"]):
        raise DamageError(f"'step' and 'sequence' must be counts, but are {body['step']} and {body['sequence']}")
    if not re.fullmatch(r"[0-9a-f]{8}", body["token"]):
        raise DamageError(f"'token' must be 8 hex digits, but is {body['token']!r:.40}")
    if not isinstance(body["tensors"], dict) or not isinstance(body["aliases"], dict):
        raise DamageError("'tensors' and 'aliases' must be objects, but one is not")
    files = tuple(StoredFile.from_json(file) for file in as_list(body["files"]))
    tensors = {}
    for name, stored in body["tensors"].items():
        try:
            tensors[name] = StoredTensor.from_json(stored)
        except DamageError as damage:
            raise DamageError(f"of '{name}' {damage}") from damage
    for name, target in body["aliases"].items():
        if name in tensors or (target not in tensors and own_name(0, target) not in tensors):
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
