"""Save a model and its optimizers: every rank writes its shards, and the folder is published as a whole.

The ranks agree first on what is saved and where. Then every rank writes its shards into a hidden folder, and posts in
the store of the process group what it has written; of that the first rank puts the manifest together, and the folder in
its place. After each of these parts the ranks agree on how it went. Not so in an asynchronous save, whose parts run in
a thread while training goes on: there the first rank waits for what the others post, and there is no collective.

[Note: what an asynchronous save copies] Shards change in an optimizer's step and nowhere else in a training, so there
is a forward and a backward's time to copy them; a step that comes sooner waits. Who writes to a shard otherwise before
it was copied makes the save fail, for the shard's version tells of it. Each group of ranks has one asynchronous save at
a time.
"""

import json
import logging
import os
import secrets
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dshard import arguments, collectives
from dshard.agreement import agree as equal_on_ranks
from dshard.agreement import check_same, versions
from dshard.checkpoint.agreement import FollowingError, check_written_alike, group_of, share, together
from dshard.checkpoint.contents import Contents, optimizers_by_prefix
from dshard.checkpoint.disk import closing, open_regular, partial_name, read_padded, write_whole
from dshard.checkpoint.files import Piece, StoredFile, write_file
from dshard.checkpoint.folders import Draft, prune
from dshard.checkpoint.manifest import MANIFEST, Manifest, tensors_of
from dshard.checkpoint.parity import group_around, write_row
from dshard.collectives import ShardGroup, timeout_of
from dshard.collectives.watchdog import found_dead
from dshard.errors import CheckpointError
from dshard.optimizer.steps import before_steps

_LOG = logging.getLogger("dshard")
_TIMEOUT = timedelta(minutes=30)  # for what another rank posts, where the backend has no timeout
_POLL_S = 0.02
_LOOK_S = 1.0  # how often to look whether the ranks that are waited for live
_PART_BYTES = 1 << 22  # of what a rank posts: a store of torch that is set to more than 8 MiB at once breaks
_SLACK_BYTES = 1 << 16  # random states do not always take as many bytes
_NICENESS = 10  # of the thread when it writes: training goes first
_PENDING: "dict[str, PendingSave]" = {}  # by the name of the ranks' group
_MEMORY: dict[str, Tensor] = {}  # of snapshots, by the name of the ranks' group
_OPEN: "weakref.WeakSet[Snapshot]" = weakref.WeakSet()  # that are still being copied
_WATCHED: list[Callable[[], None]] = []  # removes the hook ahead of steps


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
) -> "PendingSave | None":
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
        DivergenceError: The ranks pass different arguments, or some have written to a parameter and others have not.
            On every rank alike.
        StateError: A tensor is on the meta device. On every rank alike.

    Communicates:
        Some all-reduces of a few bytes, one of 16 bytes for each parameter, buffer and number of an optimizer, and one
        of 2 KiB;
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
        return Path(directory).absolute(), Contents(model, optimizers_by_prefix(optimizer), extra, group.device_type)

    target, contents = together(group, prepare, what)
    facts = {"directory": str(target), **{name: repr(value) for name, value in given.items()}}
    check_same("checkpoint.save", {**facts, **contents.listed()}, group)
    check_written_alike(model, group)
    sums = torch.tensor(contents.sums, dtype=torch.int64, device=group.device_type)
    are_alike = equal_on_ranks(sums, group, "checkpoint").tolist()
    folder = target.with_name(share(group, partial_name(target).name if group.world_rank == 0 else ""))
    draft = together(group, lambda: Draft(target, folder) if group.world_rank == 0 else None, what)
    job = Job(group, draft, folder, contents.aliases, given, lineage_of(model))
    pieces = partial(contents.pieces, group.world_rank, group.world_size, are_alike)
    if given["asynchronous"]:
        return PendingSave(target, group, partial(job.run_alone, _snapshot_of(pieces, group)))
    job.run(pieces, partial(together, group, what=f"{target}: every rank must write its part of the checkpoint"))
    return None


Pieces = Callable[[], Sequence[Piece]]  # returns what a rank writes


def _snapshot_of(pieces: Pieces, group: ShardGroup) -> Pieces:
    """Have pieces copied; what fails is raised where they are written, since the other ranks must learn of it."""
    try:
        return Snapshot(pieces(), group.full_name).copy
    except Exception as caught:
        error = caught

    def fail() -> Sequence[Piece]:
        raise error

    return fail


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


class Snapshot:
    """Copies of pieces on the host, made by another thread after the snapshot was taken.

    Args:
        pieces: What to copy. Those that are no shards are copied at once.
        key: Of whose last snapshot the memory is used again.
    """

    def __init__(self, pieces: Sequence[Piece], key: str) -> None:
        self._device = next((p.values.device for p in pieces if p.values.device.type != "cpu"), None)
        self._pieces = list(pieces)
        self._versions = [piece.values._version for piece in pieces]
        self._is_copied = threading.Event()
        sizes = [-(-piece.values.nbytes // 64) * 64 for piece in pieces]  # so that each begins where its dtype may
        memory = _MEMORY.pop(key, None)
        if memory is None or memory.numel() < sum(sizes):
            memory = None  # ahead of what takes its place
            num_bytes, is_pinned = sum(sizes) + _SLACK_BYTES, self._device is not None
            memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        _MEMORY[key] = memory
        self._copies = [
            raw[: piece.values.nbytes].view(piece.values.dtype).view(piece.values.shape)
            for piece, raw in zip(pieces, memory[: sum(sizes)].split(sizes), strict=True)
        ]
        self._stream: Any = None
        if self._device is not None:
            module = torch.get_device_module(self._device.type)
            self._stream = module.Stream(self._device)
            self._stream.wait_stream(module.current_stream(self._device))
        with torch.no_grad():
            for i, piece in enumerate(pieces):
                if not piece.is_shard:
                    self._copies[i].copy_(piece.values)
        _OPEN.add(self)
        if not _WATCHED:
            _WATCHED.append(before_steps(_wait_for_copies))

    def copy(self) -> list[Piece]:
        """Copy the shards; called in the thread that writes them.

        Returns:
            The pieces, on the host.

        Raises:
            CheckpointError: A shard was written to meanwhile.
        """
        try:
            stream = self._stream
            module: Any = torch.get_device_module(self._device.type) if self._device is not None else None
            with torch.no_grad(), module.stream(stream) if module is not None else nullcontext():
                for piece, copy in zip(self._pieces, self._copies, strict=True):
                    if piece.is_shard:
                        copy.copy_(piece.values, non_blocking=True)
            if stream is not None:
                stream.synchronize()
            for piece, version in zip(self._pieces, self._versions, strict=True):
                if piece.is_shard and piece.values._version != version:
                    raise CheckpointError(
                        f"{piece.name}: only an optimizer's step, which waits, may write to a tensor while an "
                        "asynchronous save copies it, but something else wrote to this one. Do that after the next "
                        "step, or save with asynchronous=False."
                    )
        finally:
            self._is_copied.set()
            _OPEN.discard(self)
        copied = [replace(p, values=c) for p, c in zip(self._pieces, self._copies, strict=True)]
        self._pieces.clear()
        with suppress(OSError, AttributeError):
            if threading.current_thread() is not threading.main_thread():
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        return copied

    def wait(self) -> None:
        """Wait until the copies are made."""
        self._is_copied.wait()


def _wait_for_copies(_: Any) -> None:
    """Wait before an optimizer's step for all copies that are being made."""
    for snapshot in list(_OPEN):
        snapshot.wait()


class Job:
    """The part of a save that writes files.

    Args:
        group: The ranks that write.
        draft: On the first rank, the folder that it puts in its place.
        folder: The draft's.
        aliases: Of the manifest.
        given: What was passed to `save`.
        lineage: The run.
    """

    def __init__(
        self,
        group: ShardGroup,
        draft: Draft | None,
        folder: Path,
        aliases: dict[str, str],
        given: Mapping[str, Any],
        lineage: Lineage,
    ) -> None:
        self.rank, self.num_ranks, self.draft, self.folder = group.world_rank, group.world_size, draft, folder
        self._aliases, self._given, self._lineage = aliases, given, lineage
        self._timeout = timeout_of(group.process_group) or _TIMEOUT
        self._token = folder.name.split(".")[-2][:8]  # the part of all file names that differs between saves
        # In which the ranks post what they have written; a save whose process group is gone holds on to it.
        root = dist.distributed_c10d._get_default_store() if self.num_ranks > 1 else dist.HashStore()
        self.store = dist.PrefixStore(f"dshard save {folder.name}", root)

    def run(self, pieces: Pieces, do: Callable[[Callable[[], None]], None]) -> None:
        """Run all parts. Files that other ranks write after a failure are removed by the next save.

        Args:
            pieces: Gives what to write.
            do: Runs a part: on all ranks, which agree then on how it ended, or on this one alone.

        Raises:
            CheckpointError, OSError: This rank cannot do its part, or another did not do its own.

        Communicates:
            Through the store of the process group, and what `do` does.
        """
        rows = (self.write_row,) if self._given["parity"] else ()
        try:
            for part in (partial(self.write, pieces), *rows, self.publish):
                do(part)
        finally:
            if self.draft is not None:
                self.draft.close()

    def run_alone(self, pieces: Pieces) -> None:
        """Run all parts without a collective; the others find an error where they wait for this rank's files."""

        def do(part: Callable[[], None]) -> None:
            try:
                part()
            except Exception as error:
                of_rank_0 = None
                with suppress(RuntimeError):  # the store is gone
                    self._post("error", f"{type(error).__name__}: {error}")
                    if self.draft is None and isinstance(error, OSError):  # rank 0 may have removed the folder
                        of_rank_0 = self._error_of(0)
                if of_rank_0 is not None:
                    raise of_rank_0 from error
                raise

        self.run(pieces, do)

    def write(self, pieces: Pieces) -> None:
        """Write this rank's file, and post what is in it.

        Raises:
            OSError: It cannot be written.
        """
        file = write_file(self.folder / self._name("shard", "safetensors"), pieces())
        self._post("file", json.dumps(file.to_json()))

    def write_row(self) -> None:
        """Write this rank's row of parity from the files of the other ranks, and post what it is.

        Raises:
            CheckpointError, OSError: A file is missing, or the row cannot be written.
        """
        members = group_around(self.rank, self.num_ranks)
        files = [self._wait_for(rank, "file") for rank in members]
        with ExitStack() as stack:
            opened = [stack.enter_context(closing(open_regular(self.folder / file.name))) for file in files]

            def read_member(member: int, into: memoryview, at: int) -> None:
                read_padded(opened[member], into, at)

            path = self.folder / self._name("parity", "bin")
            row = write_row(path, self.rank - members.start, [file.size for file in files], read_member)
        self._post("row", json.dumps(row.to_json()))

    def publish(self) -> None:
        """On rank 0, write the manifest, publish the folder and remove older checkpoints.

        Raises:
            CheckpointError, OSError: A rank failed, or the folder cannot be put there.
        """
        if self.draft is None:
            return
        files = tuple(self._wait_for(rank, "file") for rank in range(self.num_ranks))
        rows = tuple(self._wait_for(rank, "row") for rank in range(self.num_ranks) if self._given["parity"])
        facts = {
            "token": self._token,
            "run": self._lineage.run,
            "sequence": self._lineage.advance(),
            "step": self._given["step"],
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
        }
        try:
            manifest = Manifest(facts, files, tensors_of(files), self._aliases, rows)
        except ValueError as error:
            raise CheckpointError(f"{error}.") from error
        for name in (manifest.copy_name, MANIFEST) if rows else (MANIFEST,):  # a lost manifest is a lost file, too
            write_whole(self.folder / name, manifest.to_bytes())
        for rank in range(self.num_ranks):
            for kind in ("file", "row"):
                for key in (*self._keys(rank, kind), f"{rank}/{kind}"):
                    self.store.delete_key(key)
        self.draft.publish(manifest)
        if self._given["keep"] is not None:
            prune(self.draft.target, self._lineage.run, self._given["keep"])

    def _name(self, kind: str, suffix: str) -> str:
        return f"{kind}-{self.rank:05d}-of-{self.num_ranks:05d}.{self._token}.{suffix}"

    def _post(self, kind: str, text: str) -> None:
        """Post a text for the other ranks, in parts; their number is there when all of them are."""
        content, key = zlib.compress(text.encode()), f"{self.rank}/{kind}"
        parts = [content[at : at + _PART_BYTES] for at in range(0, len(content), _PART_BYTES)]
        for i, part in enumerate(parts):
            self.store.set(f"{key}/{i}", part)  # type: ignore[arg-type]
        self.store.set(key, str(len(parts)))

    def _keys(self, rank: int, kind: str) -> list[str]:
        """Return the keys of what a rank has posted; none if it has not yet."""
        key = f"{rank}/{kind}"
        return [f"{key}/{i}" for i in range(int(self.store.get(key)) if self.store.check([key]) else 0)]

    def _posted(self, rank: int, kind: str) -> str | None:
        """Return what a rank has posted; None if it has not yet."""
        keys = self._keys(rank, kind)
        return zlib.decompress(b"".join(map(self.store.get, keys))).decode() if keys else None

    def _error_of(self, rank: int) -> FollowingError | None:
        """Return the error that a rank has posted; None if it has posted none."""
        error = self._posted(rank, "error")
        text = f"{self.folder}: rank {rank} could not write its shards: {(error or '').rstrip('.')}."
        return None if error is None else FollowingError(text)

    def _wait_for(self, rank: int, kind: str) -> StoredFile:
        """Wait until a rank has posted what it has written."""
        start = look = time.monotonic()
        while (text := self._posted(rank, kind)) is None:
            if (error := self._error_of(rank)) is not None:
                raise error
            now = time.monotonic()
            if now > look + _LOOK_S:
                look = now
                dead = found_dead(range(collectives.world_size())) if collectives.is_initialized() else None
                if dead is not None and self._posted(rank, kind) is None:
                    raise CheckpointError(f"{self.folder}: all ranks must write their shards, but {dead.text}.")
            if now > start + self._timeout.total_seconds():
                raise CheckpointError(
                    f"{self.folder}: all ranks must write their shards, but rank {rank} has not within "
                    f"{now - start:.0f} s. Look at what that rank does."
                )
            time.sleep(_POLL_S)
        return StoredFile.from_json(json.loads(text))


class PendingSave:
    """A save whose files this rank is writing in a thread.

    Args:
        target: Where the checkpoint will be.
        group: The ranks that write it.
        action: Writes this rank's part.
    """

    def __init__(self, target: Path, group: ShardGroup, action: Callable[[], None]) -> None:
        self.path = target
        self._group, self._action = group, action
        self._error: Exception | None = None
        self._is_agreed = False
        self._thread = threading.Thread(target=self._run, name="dshard-save")  # a process that ends waits for it
        _PENDING[group.full_name] = self
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: the caller writes, for others wait for this part
            self._run()

    def _run(self) -> None:
        try:
            self._action()
        except Exception as error:
            self._error = error
            _LOG.error("%s: the asynchronous save failed: %s", self.path, error)

    def done(self) -> bool:
        """Return whether this rank has finished or failed; on rank 0, whether the checkpoint is published too."""
        return not self._thread.is_alive()

    def result(self) -> Path:
        """Wait until the checkpoint is in its place; to be called on all ranks. The next save calls it.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: It could not be written. On every rank alike.

        Communicates:
            An all-reduce of 8 bytes, the first time.
        """
        if self._is_agreed:
            self.settle()
            return self.path
        self._is_agreed = True
        try:
            together(self._group, self.settle, f"{self.path}: every rank must write its part of the checkpoint")
        except CheckpointError as error:
            self._error = error
            raise
        return self.path

    def settle(self) -> None:
        """Wait as `result` does, but raise on this rank alone: the caller raises it on the others."""
        if self._thread.ident is not None:
            self._thread.join()
        if _PENDING.get(self._group.full_name) is self:
            del _PENDING[self._group.full_name]
        if self._error is not None:
            raise self._error


def pending_save(group: ShardGroup) -> PendingSave | None:
    """Return the group's asynchronous save that nobody has waited for yet, if there is one."""
    return _PENDING.get(group.full_name)
