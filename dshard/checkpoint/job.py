"""The files of a save: one of each rank, and the manifest that makes a checkpoint of them. Nothing is communicated."""

import json
import os
import secrets
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from dshard import collectives
from dshard.checkpoint.disk import closing, open_regular, read_padded, write_whole
from dshard.checkpoint.file_format import dtype_name, read_text
from dshard.checkpoint.folders import Draft, prune
from dshard.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from dshard.checkpoint.parity import Row, group_around, write_row
from dshard.checkpoint.shard_file import Piece, write_shard_file
from dshard.checkpoint.stored import Chunk, StoredFile, StoredTensor
from dshard.collectives.lost import found_dead
from dshard.errors import CheckpointError

_POLL_S = 0.02
_LOOK_S = 1.0  # how often to look whether the ranks that are waited for live


@dataclass(slots=True)
class Lineage:
    """The run that a model's checkpoints belong to: those that `keep` counts.

    Args:
        run: Its name.
        sequence: Of its last checkpoint; grows from each to the next.
    """

    run: str
    sequence: int = 0

    def advance(self) -> int:
        """The number of the next checkpoint, which also orders those of several runs by time."""
        self.sequence = max(self.sequence + 1, time.time_ns() // 1_000_000)
        return self.sequence


_LINEAGES: "weakref.WeakKeyDictionary[nn.Module, Lineage]" = weakref.WeakKeyDictionary()


def lineage_of(model: nn.Module) -> Lineage:
    """The run that a model's checkpoints belong to; a new one if it was neither saved nor loaded before."""
    return _LINEAGES.setdefault(model, Lineage(secrets.token_hex(8)))


@dataclass(frozen=True, slots=True)
class Job:
    """What is left to do when it is known what is written where: files alone, no communication.

    Args:
        rank: This one.
        num_ranks: That write.
        folder: The draft's.
        facts: Of the manifest.
        aliases: Of the manifest.
        empty: Tensors without elements.
        lineage: The run.
        keep: As of `save`.
        has_parity: As of `save`.
        draft: On the first rank, the folder that it puts in its place.
    """

    rank: int
    num_ranks: int
    folder: Path
    facts: dict[str, Any]
    aliases: dict[str, str]
    empty: dict[str, StoredTensor]
    lineage: Lineage
    keep: int | None
    has_parity: bool
    draft: Draft | None

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write this rank's file, and beside it what it holds.

        Raises:
            OSError: It cannot be written.
        """
        file, chunks = write_shard_file(self.folder / self._name("shard", "safetensors"), pieces, self.rank)
        described = [
            [piece.name, dtype_name(piece.name, piece.values.dtype), list(piece.shape), chunk.to_json()]
            for piece, chunk in zip(pieces, chunks, strict=True)
        ]
        write_whole(self._part(self.rank), json.dumps({"file": file.to_json(), "pieces": described}).encode())

    def write_error(self, error: Exception) -> None:
        """Tell rank 0 that nothing more is to come."""
        try:
            write_whole(self._part(self.rank), json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        except OSError:
            os.close(os.open(self._part(self.rank), os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # fits on a full disk

    def write_row(self, timeout_s: float) -> None:
        """With parity, write this rank's row, out of the files that the others have written.

        Raises:
            CheckpointError, OSError: A part is missing, or the row cannot be written.
        """
        if not self.has_parity:
            return
        members = group_around(self.rank, self.num_ranks)
        files = [StoredFile.from_json(self._part_of(rank, timeout_s)["file"]) for rank in members]
        with ExitStack() as stack:
            opened = [stack.enter_context(closing(open_regular(self.folder / file.name))) for file in files]
            path = self.folder / self._name("parity", "bin")
            sizes = [file.size for file in files]
            row = write_row(
                path, self.rank - members.start, sizes, lambda i, into, at: read_padded(opened[i], into, at)
            )
        write_whole(self._part(self.rank, "row"), json.dumps({"row": row.to_json()}).encode())

    @property
    def _token(self) -> str:
        """What the names of all files of one save have in common, and of no two saves."""
        return self.folder.name.split(".")[-2][:8]

    def _name(self, kind: str, suffix: str) -> str:
        return f"{kind}-{self.rank:05d}-of-{self.num_ranks:05d}.{self._token}.{suffix}"

    def publish(self, timeout_s: float) -> None:
        """On the first rank, put together the manifest, and the folder in its place; remove older ones.

        Args:
            timeout_s: How long to wait for what the others have written.

        Raises:
            CheckpointError, OSError: A part is missing or failed, or the folder cannot be put there.
        """
        if self.draft is None:
            return
        parts = [self._part_of(rank, timeout_s) for rank in range(self.num_ranks)]
        files = tuple(StoredFile.from_json(part["file"]) for part in parts)
        facts = {**self.facts, "token": self._token, "run": self.lineage.run, "sequence": self.lineage.advance()}
        kinds = ("part", "row") if self.has_parity else ("part",)
        rows = [self._part_of(rank, timeout_s, "row")["row"] for rank in range(self.num_ranks) if self.has_parity]
        manifest = Manifest(
            facts, files, {**self.empty, **_merged(parts)}, self.aliases, tuple(map(Row.from_json, rows))
        )
        if self.has_parity:  # a lost manifest is a lost file, too
            write_whole(self.folder / manifest.copy_name, manifest.to_bytes())
        write_whole(self.folder / MANIFEST, manifest.to_bytes())
        for rank in range(self.num_ranks):
            for kind in kinds:
                self._part(rank, kind).unlink()
        self.draft.publish()
        if self.keep is not None:
            prune(self.draft.target, self.lineage.run, self.keep)

    def _part(self, rank: int, kind: str = "part") -> Path:
        """The file in which a rank says what it has written, while the checkpoint is being made."""
        return self.folder / f"{kind}-{rank:05d}.json"

    def _part_of(self, rank: int, timeout_s: float, kind: str = "part") -> dict[str, Any]:
        """What a rank says that it has written; on network file systems that may become visible late."""
        deadline, look = time.monotonic() + timeout_s, time.monotonic() + _LOOK_S
        while not self._part(rank, kind).exists():
            if time.monotonic() > look:
                look = time.monotonic() + _LOOK_S
                dead = found_dead(range(collectives.world_size())) if collectives.is_initialized() else None
                if dead is not None and not self._part(rank, kind).exists():
                    raise CheckpointError(f"{self.folder}: all ranks must write their shards, but {dead.text}.")
            if self._part(rank).exists():
                self._check(rank, self._part(rank))  # of a rank that failed no row will come
            if not self.folder.exists():
                raise CheckpointError(
                    f"{self.folder}: the first rank gave the save up and removed the folder. Ask it why."
                )
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self.folder}: all ranks must write their shards, but rank {rank} has not within "
                    f"{timeout_s:.0f} s. Pass a folder on a file system that all ranks see."
                )
            time.sleep(_POLL_S)
        return self._check(rank, self._part(rank, kind))

    def _check(self, rank: int, path: Path) -> dict[str, Any]:
        _, content = read_text(path, MAX_MANIFEST_BYTES, follow=False)
        part: dict[str, Any] = (
            json.loads(content) if content else {"error": "it could not say why, perhaps for lack of space"}
        )
        if "error" in part:
            raise CheckpointError(f"{self.folder}: rank {rank} could not write its shards: {part['error']}.")
        return part


def _merged(parts: Sequence[dict[str, Any]]) -> dict[str, StoredTensor]:
    """The tensors of all files."""
    kinds: dict[str, tuple[str, list[int]]] = {}
    chunks: dict[str, dict[Any, Chunk]] = {}
    copies: dict[str, StoredTensor] = {}
    for part in parts:
        for name, dtype, shape, value in part["pieces"]:
            chunk = Chunk.from_json(value)
            if kinds.setdefault(name, (dtype, shape)) != (dtype, shape):
                raise CheckpointError(f"{name}: all ranks must hold it alike, but it is {shape} and {kinds[name][1]}.")
            known = chunks.setdefault(name, {}).setdefault((chunk.offsets, chunk.sizes), chunk)
            if known is chunk:
                continue
            if known.checksum != chunk.checksum:
                raise CheckpointError(
                    f"{name}: ranks that hold the same part must hold the same values, but ranks {known.file} and "
                    f"{chunk.file} do not. Compare the weights between the ranks."
                )
            at_start = replace(chunk, offsets=(0,) * len(chunk.sizes))
            copies[f"copy-{chunk.file}/{name}"] = StoredTensor.from_json(
                [dtype, list(chunk.sizes), [at_start.to_json()]]
            )
    tensors = {
        name: StoredTensor.from_json([*kinds[name], [chunk.to_json() for chunk in found.values()]])
        for name, found in chunks.items()
    }
    return {**tensors, **copies}
