"""Save a model and its optimizers: every rank its shards, into one folder that is there whole or not at all."""

import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dshard import collectives
from dshard.agreement.weights import agree as equal_on_ranks
from dshard.arguments import read
from dshard.checkpoint.agreement import agree, group_of, together
from dshard.checkpoint.contents import Contents, optimizers_by_prefix
from dshard.checkpoint.disk import partial_name
from dshard.checkpoint.folders import Draft
from dshard.checkpoint.job import Job, lineage_of
from dshard.checkpoint.own import own_piece, random_states
from dshard.checkpoint.pending import PendingSave, pending_save
from dshard.checkpoint.shard_file import Piece
from dshard.checkpoint.snapshot import Snapshot
from dshard.checkpoint.trees import encode
from dshard.collectives import ReduceOp, ShardGroup, timeout_of
from dshard.errors import CheckpointError, DivergenceError
from dshard.gathering.full_values import refuse_meta
from dshard.tensor.strides import bytes_of

_VISIBLE_S = 30.0  # for a file of another rank, on network file systems
_TIMEOUT_S = 1800.0  # where a backend does not say its own


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

    Every rank writes its own shards, with sums of all their bytes, into a hidden folder beside `directory`, which is
    synced and then put in its place: whenever the job is killed, the old checkpoint or the new one is there, whole. A
    checkpoint that was there is replaced; anything else is left alone, and is an error. No full tensor is put together,
    and nothing is pickled.

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
        Some all-reduces of a few bytes, and one of 16 bytes for each buffer and number of an optimizer; no values.
    """
    read("checkpoint.save", {"model": model, "optimizer": optimizer})
    group = group_of(model)
    prepared, error = _Prepared((directory, step, keep, asynchronous, parity)), None
    try:
        if (earlier := pending_save(group)) is not None:
            earlier.settle()
        prepared.prepare(group, model, optimizer, extra)
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    try:
        are_alike, token = prepared.agree(group, error)
    except Exception:
        prepared.close()
        raise
    pieces: Sequence[Piece] | Exception
    try:
        pieces = prepared.pieces(group)
    except Exception as caught:  # told with what comes of writing
        pieces = caught
    target, contents = prepared.target, prepared.contents
    _, step, keep, asynchronous, parity = prepared.arguments
    facts = {**facts_of(contents, step), "extra": prepared.extra if are_alike else None, "are_alike": are_alike}
    places = group.world_rank, group.world_size
    named = contents.aliases, contents.without_values()
    folder = partial_name(target, token)
    job = Job(*places, folder, facts, *named, lineage_of(model), keep, bool(parity), prepared.draft)
    if asynchronous:
        return _begin_asynchronous(job, group, target, pieces)
    try:
        together(group, lambda: _write(job, pieces), f"{target}: writing the checkpoint failed")
        together(group, lambda: job.write_row(_VISIBLE_S), f"{target}: writing the checkpoint failed")
        together(group, lambda: job.publish(_VISIBLE_S), f"{target}: putting it in its place failed")
    finally:
        prepared.close()
    return None


def _write(job: Job, pieces: Sequence[Piece] | Exception) -> None:
    """Write what this rank writes, or raise why that is unknown."""
    if isinstance(pieces, Exception):
        raise pieces
    job.write(pieces)


_LABELS = ("directory", "step", "keep", "asynchronous", "parity", "optimizer", "tensors")


class _Prepared:
    """What a save is to write: found by each rank alone, and then compared by all in one message.

    Args:
        arguments: Those that must be equal on all ranks.
    """

    target: Path
    contents: Contents
    extra: Any

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments
        self._sums: list[int] = []
        self.draft: Draft | None = None

    def prepare(self, group: ShardGroup, model: nn.Module, optimizer: Any, extra: Any) -> None:
        """Check the arguments, list the tensors, and on the first rank make the folder.

        Raises:
            CheckpointError, StateError, OSError: One of these cannot be done.
        """
        given = read("checkpoint.save", dict(zip(_LABELS[:5], self.arguments, strict=True)))
        self.arguments = tuple(given.values())
        if given["parity"] and group.world_size < 2:
            raise CheckpointError(
                "checkpoint.save: parity makes a lost file from those of other ranks, but there is one rank. Leave it "
                "out."
            )
        self.target = Path(self.arguments[0]).absolute()
        self.contents = Contents(model, optimizers_by_prefix(optimizer))
        refuse_meta("checkpoint.save", list(self.contents.tensors.items()))
        self.extra = encode(extra, "extra")
        self._sums = _sums_of([self.contents.tensors[name] for name in self.contents.plain_names()])
        if group.world_rank == 0:
            self.draft = Draft(self.target)

    def agree(self, group: ShardGroup, error: Exception | None) -> tuple[bool, str]:
        """Compare what the ranks are to do.

        Returns:
            Whether all pass the same `extra`; and the token of the folder's name.

        Raises:
            CheckpointError, StateError: Something went wrong on some rank.
            DivergenceError: They are to do different things.

        Communicates:
            An all-reduce of 208 bytes; one of 16 bytes for each tensor that every rank holds whole, if ranks hold
            different ones; where there is an error, one of its text.
        """
        names, facts = [], (0,) * (len(_LABELS) + 3)
        if error is None:
            names = [(name, tuple(t.shape), str(t.dtype)) for name, t in self.contents.tensors.items()]
            held = names, list(self.contents.extra_state)
            known = str(self.target), *self.arguments[1:], self.contents.kinds, held
            facts = (*map(_crc, (*known, self.extra, self.contents.own_facts, self._sums)),)
        token = 0 if self.draft is None else int(self.draft.token, 16)
        sent = torch.tensor(
            [error is not None, token >> 32, token & 0xFFFFFFFF, *facts], dtype=torch.int64, device="cpu"
        )
        both = torch.stack([sent, ~sent]).to(group.device_type)
        high = collectives.all_reduce([both], group, ReduceOp.MAX, label="checkpoint", everywhere=True).wait()[0].cpu()
        is_wrong, upper, lower = high[0][:3].tolist()
        if is_wrong:
            agree(group, error, f"{self.arguments[0]}: preparing to save failed")
        *same, are_alike, self._is_own_alike, self._is_plain_alike = (high[0] == ~high[1]).tolist()[3:]
        for label, is_same, fact in zip(_LABELS, same, (*self.arguments, self.contents, len(names)), strict=True):
            if not is_same:
                raise DivergenceError(
                    f"checkpoint.save: all ranks must pass the same {label}, but on this one it is {fact!r:.200}. Pass "
                    "what does not depend on the rank."
                )
        return are_alike, f"{upper << 32 | lower:016x}"

    def pieces(self, group: ShardGroup) -> list[Piece]:
        """What this rank writes.

        Communicates:
            As `Contents.pieces`; and as `agree` says.
        """
        differing: list[str] = []
        if not self._is_plain_alike:
            sums = torch.tensor(self._sums, dtype=torch.int64, device=group.device_type)
            same = equal_on_ranks(sums, group, "checkpoint").tolist()
            differing = [n for n, is_same in zip(self.contents.plain_names(), same, strict=True) if not is_same]
        facts = None if self._is_own_alike else self.contents.own_facts
        own = {"random": random_states(group), "extra": self.extra, "facts": facts}
        return [*self.contents.pieces(group.world_rank, group.world_size, differing), own_piece(group, own)]

    def close(self) -> None:
        """Remove the folder, unless it is in its place."""
        if self.draft is not None:
            self.draft.close()


def _sums_of(tensors: Sequence[Tensor]) -> list[int]:
    """A checksum of each of some small tensors; those on a device come to the host in one copy."""
    with torch.no_grad():
        plain = [t.full_tensor() if isinstance(t, DTensor) else t.detach() for t in tensors]
        raw = [bytes_of(t) for t in plain]
        away = [t for t in raw if t.device.type != "cpu"]
        copies = iter(torch.cat(away).cpu().split([t.numel() for t in away]) if away else ())
        host: list[Any] = [(t if t.device.type == "cpu" else next(copies)).numpy() for t in raw]
    return [zlib.crc32(array) for array in host]


def _crc(value: Any) -> int:
    return zlib.crc32(repr(value).encode(errors="surrogatepass"))


def _own_version() -> str:
    try:
        return version("dshard")
    except PackageNotFoundError:
        return "unknown"


def facts_of(contents: Contents, step: int) -> dict[str, Any]:
    """What a manifest says of a model, but for its tensors."""
    return {
        "step": step,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "dshard": _own_version(),
        "torch": torch.__version__,
        "optimizers": contents.optimizers,
        "extra_state": contents.extra_state,
    }


_MEMORY: dict[str, Tensor] = {}  # of snapshots, by the name of the ranks' group


def _begin_asynchronous(job: Job, group: ShardGroup, target: Path, pieces: Sequence[Piece] | Exception) -> PendingSave:
    found = timeout_of(group.process_group)
    timeout_s = found.total_seconds() if found is not None else _TIMEOUT_S

    def run() -> None:
        try:
            try:
                _write(job, taken.copy() if isinstance(taken, Snapshot) else taken)
                job.write_row(timeout_s)
            except Exception as error:
                with suppress(OSError):
                    job.write_error(error)
                if isinstance(error, FileNotFoundError) and not job.folder.exists():
                    raise CheckpointError(
                        f"{target}: the asynchronous save failed: its folder must stay until all ranks have written, "
                        "but it is gone. Look at what rank 0 says, which may have given up, or for what removed it."
                    ) from error
                raise
            job.publish(timeout_s)
        finally:
            if job.draft is not None:
                job.draft.close()

    taken: Snapshot | Exception
    try:
        if isinstance(pieces, Exception):
            raise pieces
        taken = Snapshot(pieces, _MEMORY.pop(group.full_name, None))
        _MEMORY[group.full_name] = taken.memory
    except Exception as error:  # no memory for it, for one; told with the result
        taken = error
    return PendingSave(target, group, run)
