"""Save a model and its optimizers: every rank its shards, into one folder that is there whole or not at all."""

import json
import logging
import os
import random
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dshard.checkpoint.agreement import agree, group_of, share, together
from dshard.checkpoint.contents import Contents, Optimizers
from dshard.checkpoint.folders import Draft
from dshard.checkpoint.job import Job, lineage_of
from dshard.checkpoint.shard_file import Piece
from dshard.checkpoint.snapshot import Snapshot
from dshard.checkpoint.stored import own_name
from dshard.checkpoint.trees import encode
from dshard.collectives import ShardGroup, timeout_of
from dshard.errors import CheckpointError, DivergenceError
from dshard.runtime.full_values import refuse_meta
from dshard.runtime.sync import agree as equal_on_ranks
from dshard.runtime.sync import checksum

__all__ = ["OWN", "PendingSave", "finish_pending", "save"]

OWN = "own"  # what each rank alone knows, its random state above all
_LOG = logging.getLogger("dshard")
_VISIBLE_S = 30.0  # for a file of another rank, on network file systems
_TIMEOUT_S = 1800.0  # where a backend does not say its own
_PENDING: "dict[str, PendingSave]" = {}  # by the name of the ranks' group: one at a time


class PendingSave:
    """An asynchronous save, of which this rank's part is being written.

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
        self._thread.start()

    def _run(self) -> None:
        try:
            self._action()
        except Exception as error:
            self._error = error
            _LOG.error("%s: the asynchronous save failed: %s", self.path, error)

    def done(self) -> bool:
        """Whether this rank's part is written, and on rank 0 the checkpoint in its place, or failed."""
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
        self._thread.join()
        if _PENDING.get(self._group.full_name) is self:
            del _PENDING[self._group.full_name]
        if not self._is_agreed:
            self._is_agreed = True
            try:
                agree(self._group, self._error, _failed(self.path))
            except CheckpointError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self.path


def finish_pending(group: ShardGroup) -> None:
    """Wait for the asynchronous save of some ranks, if there is one, and raise what went wrong with it."""
    earlier = _PENDING.get(group.full_name)
    if earlier is not None:
        earlier.result()


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
    group = group_of(model)
    finish_pending(group)
    found: list[tuple[Path, Contents, Any]] = []

    def collect() -> None:
        _check_arguments(directory, step, keep, asynchronous)
        _check_parity(parity, group)
        found.append((Path(directory).absolute(), Contents(model, Optimizers(optimizer)), encode(extra, "extra")))

    together(group, collect, f"{directory}: collecting what to save failed")
    target, contents, own_extra = found[0]
    refuse_meta("checkpoint.save", list(contents.tensors.items()))
    are_alike = _agree_on_arguments(group, (str(target), step, keep, asynchronous, parity), contents, own_extra)
    own = {"random": random_states(group), "extra": own_extra}
    pieces: list[Piece] = []
    places = group.world_rank, group.world_size

    def cut() -> None:
        pieces.extend([*contents.pieces(*places, _differing(group, contents)), own_piece(group, own)])

    together(group, cut, f"{target}: taking the shards failed")
    draft: list[Draft] = []
    together(group, lambda: _begin(draft, group, target), f"{target}: a checkpoint needs a folder that can be made")
    folder = target.with_name(share(group, draft[0].folder.name if draft else ""))
    facts = {**facts_of(contents, step), "extra": own_extra if are_alike else None, "are_alike": are_alike}
    job = Job(
        *places, folder, facts, contents.aliases, contents.without_values(), lineage_of(model), keep, bool(parity)
    )
    if asynchronous:
        return _begin_asynchronous(job, group, target, pieces, draft)
    try:
        together(group, lambda: job.write(pieces), _failed(target))
        together(group, lambda: job.write_row(_VISIBLE_S), _failed(target))
        together(group, lambda: _publish(job, draft), f"{target}: putting it in its place failed")
    finally:
        for each in draft:
            each.close()
    return None


def _publish(job: Job, draft: Sequence[Draft]) -> None:
    for each in draft:
        job.publish(each, timeout_s=_VISIBLE_S)


def _failed(target: Path) -> str:
    return f"{target}: writing the checkpoint failed"


def _check_arguments(directory: Any, step: Any, keep: Any, asynchronous: Any) -> None:
    if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
        raise CheckpointError(f"checkpoint.save: directory must be a path, but it is {directory!r:.80}. Name a folder.")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 62:
        raise CheckpointError(
            f"checkpoint.save: step must be the number of finished steps, but it is {step!r:.80}. Pass an int, 0 or "
            "more."
        )
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise CheckpointError(
            f"checkpoint.save: keep must be how many checkpoints to keep, from 1 on, but it is {keep!r:.80}. Leave it "
            "out to keep all."
        )
    if not isinstance(asynchronous, bool):
        raise CheckpointError(
            f"checkpoint.save: asynchronous must be True or False, but it is {asynchronous!r:.80}. Leave it out."
        )


def _check_parity(parity: Any, group: ShardGroup) -> None:
    if type(parity) is not int or parity not in (0, 1):
        raise CheckpointError(
            f"checkpoint.save: parity must be 0, or 1 for one XOR row, but it is {parity!r:.80}. Pass one of them."
        )
    if parity and group.world_size < 2:
        raise CheckpointError(
            f"checkpoint.save: parity={parity} makes a lost file from those of other ranks, but there is one rank. "
            "Leave it out."
        )


def _agree_on_arguments(group: ShardGroup, arguments: tuple[Any, ...], contents: Contents, extra: Any) -> bool:
    """Raise unless all ranks are saving the same thing; whether they pass the same `extra`."""
    names = [(name, tuple(t.shape), str(t.dtype)) for name, t in contents.tensors.items()]
    facts = (*arguments, names, (contents.optimizers, contents.extra_state), extra)
    crcs = torch.tensor([_crc(fact) for fact in facts], dtype=torch.int64, device=group.device_type)
    same = equal_on_ranks(crcs, group, "checkpoint").tolist()
    labels = ("directory", "step", "keep", "asynchronous", "parity", "tensors", "optimizer")
    for label, fact, is_same in zip(labels, facts, same, strict=False):
        if not is_same:
            shown = f"{len(names)} of them" if label == "tensors" else f"{fact!r:.80}"
            raise DivergenceError(
                f"checkpoint.save: all ranks must pass the same {label}, but on this one it is {shown}. Pass what does "
                "not depend on the rank."
            )
    return bool(same[-1])


def _crc(value: Any) -> int:
    return zlib.crc32(repr(value).encode(errors="surrogatepass"))


def _differing(group: ShardGroup, contents: Contents) -> list[str]:
    """Tensors that every rank holds whole, but that differ between ranks."""
    names = contents.plain_names()
    if not names or group.world_size == 1:
        return []
    sums = [checksum(contents.tensors[name]).to(group.device_type) for name in names]
    same = equal_on_ranks(torch.stack(sums), group, "checkpoint").tolist()
    return [name for name, is_same in zip(names, same, strict=True) if not is_same]


def _begin(draft: list[Draft], group: ShardGroup, target: Path) -> None:
    if group.world_rank == 0:
        draft.append(Draft(target))


def random_states(group: ShardGroup) -> dict[str, Any]:
    """The states of all generators that a program uses without naming one."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the global one is what is to be kept
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {k: _plain(v) for k, v in numpy_state["state"].items()}},
    }
    if group.device_type != "cpu":
        states["device"] = torch.get_device_module(group.device_type).get_rng_state()
    return states


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def own_piece(group: ShardGroup, own: dict[str, Any]) -> Piece:
    """What this rank alone knows, as a tensor."""
    text = json.dumps({"random": encode(own["random"], "the random states"), "extra": own["extra"]}).encode()
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Piece(own_name(group.world_rank, OWN), (len(text),), (0,), values)


def facts_of(contents: Contents, step: int) -> dict[str, Any]:
    """What a manifest says of a model, but for its tensors."""
    try:
        own_version = version("dshard")
    except PackageNotFoundError:
        own_version = "unknown"
    return {
        "step": step,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "dshard": own_version,
        "torch": torch.__version__,
        "optimizers": contents.optimizers,
        "extra_state": contents.extra_state,
    }


_MEMORY: dict[str, Tensor] = {}  # of snapshots, by the name of the ranks' group


def _begin_asynchronous(
    job: Job, group: ShardGroup, target: Path, pieces: Sequence[Piece], draft: Sequence[Draft]
) -> PendingSave:
    taken: list[Snapshot] = []

    def take() -> None:
        taken.append(Snapshot(pieces, _MEMORY.get(group.full_name)))

    started: list[PendingSave] = []
    found = timeout_of(group.process_group)
    timeout_s = found.total_seconds() if found is not None else _TIMEOUT_S

    def run() -> None:
        try:
            try:
                job.write(taken[0].copy())
                job.write_row(timeout_s)
            except Exception as error:
                with suppress(OSError):
                    job.write_error(error)
                raise
            for each in draft:
                job.publish(each, timeout_s=timeout_s)
        finally:
            for each in draft:
                each.close()

    try:
        together(group, take, f"{target}: copying what to save failed")
        _MEMORY[group.full_name] = taken[0].memory
        together(group, lambda: started.append(PendingSave(target, group, run)), f"{target}: starting to write failed")
    except CheckpointError:
        for snapshot in taken if not started else ():
            snapshot.give_up()
        for each in draft if not started else ():
            each.close()
        raise
    pending = _PENDING[group.full_name] = started[0]
    return pending
