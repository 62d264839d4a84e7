"""The files of a save: one of each rank, and the manifest that makes a checkpoint of them. Nothing is communicated."""

import json
import secrets
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from dshard.checkpoint.disk import write_whole
from dshard.checkpoint.file_format import dtype_name
from dshard.checkpoint.folders import Draft, part_name, prune
from dshard.checkpoint.manifest import MANIFEST, Chunk, Manifest, StoredFile, StoredTensor, read_bytes
from dshard.checkpoint.shard_file import Piece, write_shard_file
from dshard.errors import CheckpointError

__all__ = ["Job", "Lineage", "lineage_of"]

_POLL_S = 0.02


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
        lineage: The run.
        keep: As of `save`.
    """

    rank: int
    num_ranks: int
    folder: Path
    facts: dict[str, Any]
    aliases: dict[str, str]
    lineage: Lineage
    keep: int | None

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write this rank's file, and beside it what it holds.

        Raises:
            OSError: It cannot be written.
        """
        token = self.folder.name.split(".")[-2][:8]
        name = f"shard-{self.rank:05d}-of-{self.num_ranks:05d}.{token}.safetensors"
        file, chunks = write_shard_file(self.folder / name, pieces, self.rank)
        described = [
            [piece.name, dtype_name(piece.name, piece.values.dtype), list(piece.shape), chunk.to_json()]
            for piece, chunk in zip(pieces, chunks, strict=True)
        ]
        write_whole(self._part(self.rank), json.dumps({"file": file.to_json(), "pieces": described}).encode())

    def write_error(self, error: Exception) -> None:
        """Tell rank 0 that nothing more is to come."""
        write_whole(self._part(self.rank), json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())

    def publish(self, draft: Draft, *, timeout_s: float = 30.0) -> None:
        """Put together the manifest, and the folder in its place; remove older ones.

        Args:
            draft: The folder.
            timeout_s: How long to wait for what the others have written.

        Raises:
            CheckpointError, OSError: A part is missing or failed, or the folder cannot be put there.
        """
        parts = self._parts(timeout_s)
        files = tuple(StoredFile.from_json(part["file"]) for part in parts)
        facts = {**self.facts, "token": self.folder.name, "run": self.lineage.run, "sequence": self.lineage.advance()}
        manifest = Manifest(facts, files, _merged(parts), self.aliases)
        write_whole(self.folder / MANIFEST, manifest.to_bytes())
        for rank in range(self.num_ranks):
            self._part(rank).unlink()
        draft.publish()
        if self.keep is not None:
            prune(draft.target, self.lineage.run, self.keep)

    def _part(self, rank: int) -> Path:
        return self.folder / part_name(rank)

    def _parts(self, timeout_s: float) -> list[dict[str, Any]]:
        """What all ranks have written; on network file systems some may become visible late."""
        deadline = time.monotonic() + timeout_s
        parts = []
        for rank in range(self.num_ranks):
            while not self._part(rank).exists():
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{self.folder}: all ranks must write their shards, but rank {rank} has not within "
                        f"{timeout_s:.0f} s. Pass a folder on a file system that all ranks see."
                    )
                time.sleep(_POLL_S)
            parts.append(json.loads(read_bytes(self._part(rank))))
            if "error" in parts[-1]:
                raise CheckpointError(f"{self.folder}: rank {rank} could not write its shards: {parts[-1]['error']}.")
        return parts


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
