"""The manifest of a checkpoint: a JSON file that is written last, and checked when it is read."""

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

from dshard.checkpoint.disk import children, open_regular
from dshard.checkpoint.files import Box, StoredFile, StoredPiece, counts, require
from dshard.checkpoint.parity import Stripes, group_around
from dshard.errors import CheckpointError

MANIFEST = "dshard.json"
COPY_NAME = re.compile(r"dshard-[0-9a-f]{8}\.json")
_FORMAT = 5
_OWN = re.compile(r"rank-\d+/")  # what `own_name` puts ahead of a name


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Args:
        dtype: Of its values.
        shape: Of the full tensor.
        pieces: Boxes that cover it once, each with the number of its file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, StoredPiece], ...]


def tensors_of(files: Sequence[StoredFile]) -> dict[str, StoredTensor]:
    """Return the tensors that files hold together; of a box that several ranks wrote, the first piece.

    Raises:
        ValueError: The pieces of a tensor contradict each other, or do not cover it once.
    """
    boxes: dict[str, dict[Box, tuple[int, StoredPiece]]] = {}
    for index, file in enumerate(files):
        for name, piece in file.pieces.items():
            first, known = boxes.setdefault(name, {}).setdefault(piece.box, (index, piece))
            require(
                known.sums == piece.sums,
                f"{name}: ranks that hold the same part must hold the same values, but ranks {first} and {index} do "
                "not. Compare the weights between the ranks",
            )
    found = {}
    for name, of_box in boxes.items():
        kinds = {(piece.dtype, piece.box.shape) for _, piece in of_box.values()}
        require(len(kinds) == 1, f"{name}: all ranks must hold it alike, but it is {' and '.join(map(str, kinds))}")
        ((dtype, shape),) = kinds
        _check_cover(name, shape, list(of_box))
        found[name] = StoredTensor(dtype, shape, tuple(of_box.values()))
    return found


def _check_cover(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise ValueError unless boxes cover a shape once."""
    is_full = sum(box.numel for box in boxes) == math.prod(shape)
    require(is_full, f"{name}: pieces must cover its shape {tuple(shape)} once, but they do not")
    low = np.array([box.offsets for box in boxes], dtype=np.int64)
    high = low + np.array([box.sizes for box in boxes], dtype=np.int64)
    for i in range(len(boxes) - 1 if math.prod(shape) else 0):
        is_alone = not np.any(np.all((low[i] < high[i + 1 :]) & (low[i + 1 :] < high[i]), axis=1))
        require(is_alone, f"{name}: pieces must not overlap, but another lies on the one at {boxes[i].offsets}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint.

    Args:
        facts: Step, run, versions.
        files: One of each rank.
        tensors: By name, as `tensors_of` finds them in the files.
        aliases: Other names of tensors, each with the one it is stored under.
        rows: Of parity, one of each rank; none without.
    """

    facts: dict[str, Any]
    files: tuple[StoredFile, ...]
    tensors: dict[str, StoredTensor]
    aliases: dict[str, str]
    rows: tuple[StoredFile, ...] = ()

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
    def order(self) -> tuple[int, int]:
        """A key that orders checkpoints by age."""
        return self.facts["sequence"], self.facts["step"]

    def stored(self, name: str, rank: int) -> tuple[str, StoredTensor] | None:
        """Find a tensor by any of its names, and return the name under which its values of a rank are stored.

        Args:
            name: Of the tensor.
            rank: Of those that wrote the checkpoint, the one whose values are meant.
        """
        plain = self.aliases.get(name, name)
        found = (kept for kept in (plain, own_name(rank, plain)) if kept in self.tensors)
        return next(((kept, self.tensors[kept]) for kept in found), None)

    def names_below(self, prefix: str) -> list[str]:
        """Return the names of tensors with a prefix, each once, without the ranks whose values they have."""
        names = [
            name[found.end() :] if (found := _OWN.match(name)) else name for name in (*self.tensors, *self.aliases)
        ]
        return [name for name in dict.fromkeys(names) if name.startswith(prefix)]

    def stripes_around(self, index: int) -> tuple[range, Stripes]:
        """Return the files that share rows of parity with one file, and their stripes."""
        group = group_around(index, len(self.files))
        return group, Stripes(tuple(self.files[i].size for i in group))

    def to_bytes(self) -> bytes:
        """The file's content."""
        body = {
            "format": _FORMAT,
            **{name: self.facts[name] for name in _FACTS},
            "files": [file.to_json() for file in self.files],
            "aliases": self.aliases,
            "parity": [row.to_json() for row in self.rows] or None,
        }
        return json.dumps({**body, "sha256": _sum_of(body)}).encode() + b"\n"


_FACTS = ("token", "run", "sequence", "step", "created", "versions")


def own_name(rank: int, name: str) -> str:
    """Return the name of a rank's own values of a tensor."""
    return f"rank-{rank}/{name}"


def _sum_of(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a manifest or a copy of one, readable or not."""
    return os.path.lexists(folder / MANIFEST) or bool(_copies(folder))


def _copies(folder: Path) -> list[Path]:
    """Return the copies of the manifest, which parity writes; two while one checkpoint replaces another."""
    return [child for child in children(folder) if COPY_NAME.fullmatch(child.name)]


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest.

    Where it is missing or damaged, its copy stands in, if there is parity.

    Raises:
        CheckpointError: There is none in `folder`, or it is damaged, of another format, or lies about its files.
    """
    try:
        return read_copy(folder / MANIFEST)
    except CheckpointError as error:
        for copy in _copies(folder):
            with suppress(CheckpointError):
                manifest = read_copy(copy)
                if manifest.copy_name == copy.name and all((folder / row.name).exists() for row in manifest.rows[:1]):
                    return manifest
        raise error


def read_copy(file: Path) -> Manifest:
    """Read the manifest in one file; raises as `read_manifest`."""
    try:
        with open(open_regular(file), "rb") as opened:
            content = opened.read()
    except FileNotFoundError:
        raise CheckpointError(
            f"{file.parent}: a checkpoint is a folder with a {MANIFEST}, but there is none. Check the path."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file}: must be readable, but {error.strerror}. Check its permissions.") from error
    try:
        value = json.loads(content)
        known = value["format"]
        if known == _FORMAT:
            return _checked(value)
        writer = value.get("versions") or f"torch {value.get('torch')}, dshard {value.get('dshard')}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{file}: must be as save wrote it, but {type(error).__name__}: {str(error)[:300]}. The checkpoint is "
            "damaged; use another."
        ) from error
    raise CheckpointError(
        f"{file}: the format must be {_FORMAT}, but it is {str(known)[:40]}, written by {writer!s:.80}. Load it with "
        "that version, and write the model with its save_safetensors, which this version's load_safetensors reads."
    )


def _checked(value: dict[str, Any]) -> Manifest:
    """Check the JSON of a manifest; raises ValueError, KeyError or TypeError for a damaged one."""
    body = {key: item for key, item in value.items() if key != "sha256"}
    require(value.get("sha256") == _sum_of(body), "its checksum must be that of its content, but it is of another")
    counts([body["step"], body["sequence"]])
    require(re.fullmatch(r"[0-9a-f]{8}", body["token"]), f"'token' must be 8 hex digits, but is {body['token']!r:.40}")
    files = tuple(StoredFile.from_json(file) for file in body["files"])
    names = [file.name for file in files]
    require(0 < len(files) == len(set(names)), f"each rank must have a file of its own, but there are {names[:4]}")
    tensors, aliases = tensors_of(files), dict(body["aliases"])
    for name, target in aliases.items():
        is_known = name not in tensors and (target in tensors or own_name(0, target) in tensors)
        require(is_known, f"'{name}' must be another name of a tensor, but '{str(target)[:80]}' is none")
    rows = tuple(StoredFile.from_json(row) for row in body["parity"] or ())
    manifest = Manifest({name: body[name] for name in _FACTS}, files, tensors, aliases, rows)
    require(not rows or 1 < len(rows) == len(files), f"{len(rows)} of {len(files)} ranks have a row of parity")
    for index, row in enumerate(rows):
        is_long = row.size == manifest.stripes_around(index)[1].length
        require(is_long, f"'{row.name}' must be as long as a stripe of its group, but has {row.size} bytes")
    return manifest
