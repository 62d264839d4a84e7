"""Save a model and its optimizers: every rank writes its shards, and the folder is published as a whole.

The ranks agree first on what is saved and where. Then every rank writes its shards into a hidden folder, and beside
them what it has written; of that the first rank puts the manifest together, and the folder in its place. After each of
these parts the ranks agree on how it went. Not so in an asynchronous save, whose parts run in a thread while training
goes on: there the first rank waits for the files of the others, and nothing is communicated.
"""

import json
import os
import secrets
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dshard import arguments, collectives
from dshard.agreement import agree as equal_on_ranks
from dshard.agreement import check_same, versions
from dshard.checkpoint.agreement import FollowingError, group_of, share, together
from dshard.checkpoint.asynchronous import PendingSave, Snapshot, pending_save
from dshard.checkpoint.contents import Contents, optimizers_by_prefix, own_piece
from dshard.checkpoint.disk import closing, open_regular, read_padded, write_whole
from dshard.checkpoint.files import Piece, StoredFile, write_file
from dshard.checkpoint.folders import Draft, prune
from dshard.checkpoint.manifest import MANIFEST, Manifest, tensors_of
from dshard.checkpoint.parity import group_around, write_row
from dshard.collectives import ShardGroup, timeout_of
from dshard.collectives.watchdog import found_dead
from dshard.errors import CheckpointError

_TIMEOUT = timedelta(minutes=30)  # for another rank's file, where a backend does not say its own
_VISIBLE = timedelta(seconds=30)  # for a file that another rank has written, on network file systems
_POLL_S = 0.02
_LOOK_S = 1.0  # how often to look whether the ranks that are waited for live


def save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int = 0,
    extra: Any = None,
    keep: int | None = None,
    asynchronous: bool = False,
    parity: int = 0,
) -> PendingSave | None:
    """Write a checkpoint: parameters, buffers, optimizer state, random states; to be called on every rank.

    Every rank writes its own shards as a safetensors file, with sums of all its bytes, into a hidden folder beside
    `directory`, which is synced and then put in its place: whenever the job is killed, the old checkpoint or the new
    one is there, whole. A checkpoint that was there is replaced; anything else is left alone, and is an error. No full
    tensor is put together, and nothing is pickled. `dshard merge` makes a model for `from_pretrained` of it.

    Args:
        directory: Folder to make, on a file system that all ranks see.
        model: A sharded module.
        optimizer: Its optimizer, or a list of several.
        step: Number of finished steps.
        extra: What else is to be known, such as the position in the data or a scheduler's state: None, truth values,
            numbers, texts, bytes and tensors, and lists, tuples and dicts of these. Ranks may pass different ones.
        keep: Of the checkpoints of this run beside this one, how many to keep, this one included; by default all. To
            the run belong those that this model, or the one that it was loaded from, was saved as.
        asynchronous: Whether to return when training may go on. The shards are copied once, to the host, while the
            next forward and backward run, and written from the copy; an optimizer's step waits for the copy. A save
            waits for the one before.
        parity: 1 to write an XOR row beside each rank's file, of 1/(N - 1) of the bytes of N: of each group of up to
            16 neighbouring ranks one file may then be lost or damaged, and `load` makes it from the others.

    Returns:
        None, or for an asynchronous save one to wait for: its `result()` raises what went wrong.

    Raises:
        CheckpointError: It cannot be written, or something else is in its place. On every rank alike; the checkpoint
            that was there is as it was.
        DivergenceError: The ranks pass different arguments. On every rank alike.
        StateError: A tensor is on the meta device. On every rank alike.

    Communicates:
        Some all-reduces of a few bytes, one of 16 bytes for each buffer and number of an optimizer, and one of 2 KiB;
        no values but those of views, and of DTensors that fully_shard did not take, which are gathered.
    """
    group = group_of(arguments.module("checkpoint.save", "model", model))
    what = f"{directory}: saving needs a place that can be written"
    given: dict[str, Any] = {"step": step, "keep": keep, "asynchronous": asynchronous, "parity": parity}

    def prepare() -> tuple[Path, Contents]:
        if (earlier := pending_save(group)) is not None:
            earlier.settle()
        who, rows = "checkpoint.save", "0, or 1 for one XOR row per group of files"
        arguments.path(who, "directory", directory)
        arguments.optimizers(who, "optimizer", optimizer)
        given["step"] = arguments.count(who, "step", step, least=0)
        given["keep"] = arguments.count(who, "keep", keep, way="Leave it out to keep all.", or_none=True)
        given["asynchronous"] = arguments.boolean(who, "asynchronous", asynchronous)
        given["parity"] = arguments.number(who, "parity", parity, lambda x: x in (0, 1), rows, "Pass 0 or 1.")
        if given["parity"] and group.world_size < 2:
            raise CheckpointError("checkpoint.save: parity needs files of other ranks, but there is one. Leave it out.")
        return Path(directory).absolute(), Contents(model, optimizers_by_prefix(optimizer), extra)

    target, contents = together(group, prepare, what)
    facts = {"directory": str(target), **{name: repr(value) for name, value in given.items()}}
    check_same("checkpoint.save", {**facts, **contents.listed()}, group)
    draft = together(group, lambda: Draft(target) if group.world_rank == 0 else None, what)
    try:
        name = share(group, draft.folder.name if draft is not None else "")
        sums = torch.tensor(contents.sums, dtype=torch.int64, device=group.device_type)
        are_alike, *alike = equal_on_ranks(sums, group, "checkpoint").tolist()
    except BaseException:
        if draft is not None:
            draft.close()
        raise
    job = Job(
        group.world_rank,
        group.world_size,
        target.with_name(name),
        _facts_of(contents, given["step"], are_alike=are_alike),
        contents.aliases,
        lineage_of(model),
        given["keep"],
        bool(given["parity"]),
        draft,
        (timeout_of(group.process_group) or _TIMEOUT) if given["asynchronous"] else _VISIBLE,
    )
    pieces = _pieces_of(contents, group, alike, is_copied=given["asynchronous"])
    if given["asynchronous"]:
        return PendingSave(target, group, lambda: job.run_alone(pieces))
    job.run_together(pieces, group, f"{target}: every rank must write its part of the checkpoint")
    return None


Pieces = Sequence[Piece] | Snapshot | Exception  # what a rank writes, or why that is unknown: `Job.write` raises it


def _pieces_of(contents: Contents, group: ShardGroup, alike: Sequence[bool], *, is_copied: bool) -> Pieces:
    try:
        own_facts_alike, *plain_alike = alike
        own = own_piece(group, contents.extra, None if own_facts_alike else contents.own_facts)
        pieces = [*contents.pieces(group.world_rank, group.world_size, plain_alike), own]
        return Snapshot(pieces, group.full_name) if is_copied else pieces
    except Exception as caught:  # the other ranks must learn of it
        return caught


def _facts_of(contents: Contents, step: int, *, are_alike: bool) -> dict[str, Any]:
    """Return the manifest's facts about a model and its optimizers."""
    return {
        "step": step,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        **contents.own_facts,
        "are_alike": are_alike,
        "extra": contents.extra if are_alike else None,
    }


@dataclass(slots=True)
class Lineage:
    """The run that a model's checkpoints belong to; `keep` counts those of a run.

    Args:
        run: Its name.
        sequence: Of its last checkpoint; grows from each to the next.
    """

    run: str
    sequence: int = 0

    def advance(self) -> int:
        """Return the number of the next checkpoint, which also orders those of several runs by time."""
        self.sequence = max(self.sequence + 1, time.time_ns() // 1_000_000)
        return self.sequence


_LINEAGES: "weakref.WeakKeyDictionary[nn.Module, Lineage]" = weakref.WeakKeyDictionary()


def lineage_of(model: nn.Module) -> Lineage:
    """Return the run of a model's checkpoints; a new one if it was neither saved nor loaded before."""
    return _LINEAGES.setdefault(model, Lineage(secrets.token_hex(8)))


@dataclass(frozen=True, slots=True)
class Job:
    """The part of a save that writes files: without communication, but for `run_together`, so that a thread can run it.

    Args:
        rank: This one.
        num_ranks: That write.
        folder: The draft's.
        facts: Of the manifest.
        aliases: Of the manifest.
        lineage: The run.
        keep: As of `save`.
        has_parity: As of `save`.
        draft: On the first rank, the folder that it puts in its place.
        timeout: How long to wait for what another rank writes.
    """

    rank: int
    num_ranks: int
    folder: Path
    facts: dict[str, Any]
    aliases: dict[str, str]
    lineage: Lineage
    keep: int | None
    has_parity: bool
    draft: Draft | None
    timeout: timedelta

    def run_together(self, pieces: Pieces, group: ShardGroup, what: str) -> None:
        """Run and close on all ranks, which agree after each part on how it ended.

        A rank that fails may be unable to write that; rank 0 would wait for its files in vain.

        Args:
            pieces: What to write, or why that is unknown.
            group: Of the ranks that save.
            what: Begins the message of an error.

        Raises:
            CheckpointError: A rank cannot do its part. On every rank alike.

        Communicates:
            An all-reduce of 8 bytes for each part.
        """
        rows = (self.write_row,) if self.has_parity else ()
        try:
            for part in (partial(self.write, pieces), *rows, self.publish):
                together(group, part, what)
        finally:
            self.close()

    def run_alone(self, pieces: Pieces) -> None:
        """Run and close; files that other ranks write after a failure are removed by the next save.

        Args:
            pieces: What to write, or why that is unknown.

        Raises:
            CheckpointError, OSError: This rank cannot do its part, or another did not do its own.
        """
        try:
            try:
                self.write(pieces)
                if self.has_parity:
                    self.write_row()
            except Exception as error:
                with suppress(OSError):
                    self._write_error(error)
                raise
            self.publish()
        except OSError as error:
            if self.folder.exists() or self.draft is not None:
                raise
            raise self._gone() from error
        finally:
            self.close()

    def _gone(self) -> CheckpointError:
        return FollowingError(
            f"{self.folder}: this folder of the save must stay until all ranks have written, but it is gone. Look at "
            "what rank 0 says, which may have given up, or for what removed it."
        )

    def close(self) -> None:
        """On rank 0, remove the folder unless it was published."""
        if self.draft is not None:
            self.draft.close()

    def write(self, pieces: Pieces) -> None:
        """Write this rank's file and its description.

        Args:
            pieces: What to write, or why that is unknown.

        Raises:
            OSError: It cannot be written.
        """
        if isinstance(pieces, Exception):
            raise pieces
        pieces = pieces.copy() if isinstance(pieces, Snapshot) else pieces
        file = write_file(self.folder / self._name("shard", "safetensors"), pieces)
        write_whole(self._part(self.rank), json.dumps(file.to_json()).encode())

    def _write_error(self, error: Exception) -> None:
        """Write an error in place of this rank's description, for rank 0 to raise."""
        try:
            write_whole(self._part(self.rank), json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        except OSError:
            os.close(os.open(self._part(self.rank), os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # fits on a full disk

    def write_row(self) -> None:
        """Write this rank's row of parity from the files of the other ranks.

        Raises:
            CheckpointError, OSError: A part is missing, or the row cannot be written.
        """
        members = group_around(self.rank, self.num_ranks)
        files = [StoredFile.from_json(self._part_of(rank)) for rank in members]
        with ExitStack() as stack:
            opened = [stack.enter_context(closing(open_regular(self.folder / file.name))) for file in files]

            def read_member(member: int, into: memoryview, at: int) -> None:
                read_padded(opened[member], into, at)

            path = self.folder / self._name("parity", "bin")
            row = write_row(path, self.rank - members.start, [file.size for file in files], read_member)
        write_whole(self._part(self.rank, "row"), json.dumps(row.to_json()).encode())

    @property
    def _token(self) -> str:
        """The part of all file names that differs between saves, from the folder's."""
        return self.folder.name.split(".")[-2][:8]

    def _name(self, kind: str, suffix: str) -> str:
        return f"{kind}-{self.rank:05d}-of-{self.num_ranks:05d}.{self._token}.{suffix}"

    def publish(self) -> None:
        """On rank 0, write the manifest, publish the folder and remove older checkpoints.

        Raises:
            CheckpointError, OSError: A part is missing or failed, or the folder cannot be put there.
        """
        if self.draft is None:
            return
        files = tuple(StoredFile.from_json(self._part_of(rank)) for rank in range(self.num_ranks))
        facts = {**self.facts, "token": self._token, "run": self.lineage.run, "sequence": self.lineage.advance()}
        kinds = ("part", "row") if self.has_parity else ("part",)
        rows = [StoredFile.from_json(self._part_of(rank, "row")) for rank in range(self.num_ranks) if self.has_parity]
        try:
            manifest = Manifest(facts, files, tensors_of(files), self.aliases, tuple(rows))
        except ValueError as error:
            raise CheckpointError(f"{error}.") from error
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
        """Return the path of a rank's description, which exists while the checkpoint is written."""
        return self.folder / f"{kind}-{rank:05d}.json"

    def _part_of(self, rank: int, kind: str = "part") -> dict[str, Any]:
        """Wait for a rank's description and read it; on network file systems it may become visible late."""
        start = look = time.monotonic()
        while not self._part(rank, kind).exists():
            now = time.monotonic()
            if now > look + _LOOK_S:
                look = now
                dead = found_dead(range(collectives.world_size())) if collectives.is_initialized() else None
                if dead is not None and not self._part(rank, kind).exists():
                    raise CheckpointError(f"{self.folder}: all ranks must write their shards, but {dead.text}.")
            if self._part(rank).exists():
                self._check(rank, self._part(rank))  # of a rank that failed no row will come
            if not self.folder.exists():
                raise self._gone()
            if now > start + self.timeout.total_seconds():
                raise CheckpointError(
                    f"{self.folder}: all ranks must write their shards, but rank {rank} has not within "
                    f"{now - start:.0f} s. Pass a folder on a file system that all ranks see, and look at what the "
                    "first rank says."
                )
            time.sleep(_POLL_S)
        return self._check(rank, self._part(rank, kind))

    def _check(self, rank: int, path: Path) -> dict[str, Any]:
        with open(open_regular(path), "rb") as opened:
            content = opened.read()
        part: dict[str, Any] = (
            json.loads(content) if content else {"error": "it could not say why, perhaps for lack of space"}
        )
        if "error" in part:
            raise CheckpointError(
                f"{self.folder}: rank {rank} could not write its shards: {part['error'].rstrip('.')}."
            )
        return part
