"""Bytes to train on: the sources of Python's own standard library, or any text; a split; and a reproducible order."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dshard.checkpoint.disk import open_regular
from dshard.cli.usage import UsageError
from dshard.errors import CheckpointError

MAX_BYTES = 16 * 2**20
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_VALIDATION_SHARE = 20  # one byte in so many is held out
_NUM_STRETCHES = 64


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as bytes, split.

    Attributes:
        train: uint8 (train bytes,).
        validation: uint8 (validation bytes,), none of which is in ``train``.
        source: where it came from, for people.
        digest: equal for equal texts.
    """

    train: Tensor
    validation: Tensor
    source: str
    digest: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs and, one byte further on, targets; both int64 (batch, block)."""

    inputs: Tensor
    targets: Tensor


def _walk(folder: Path, suffix: str) -> Iterator[Path]:
    """Files below a folder whose name ends so, in sorted order, without hidden ones, tests and installed packages."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(names):
            if name.endswith(suffix) and not name.startswith("."):
                yield Path(parent, name)


def _read_some(paths: Iterator[Path], max_bytes: int) -> bytes:
    """The files' bytes one after another, without files that hold a NUL byte (not text), up to a limit."""
    pieces: list[bytes] = []
    num_bytes = 0
    for path in paths:
        try:
            opened = open_regular(path, follow=True)
        except CheckpointError as error:  # a pipe, which would be waited for
            raise UsageError(f"--data must be a text file or a folder of them, but {error}") from error
        with open(opened, "rb") as file:
            piece = file.read(max_bytes - num_bytes)
        if b"\0" in piece[:8192]:
            continue
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes >= max_bytes:
            break
    return b"".join(pieces)


def read_text(path: Path | None, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Reads the text to train on.

    Args:
        path: a file, a folder (all its text files, sorted), or None for the standard library's ``*.py`` files.
        max_bytes: where to stop.

    Raises:
        UsageError: there is no such path, or it cannot be read. On every rank that sees the same files.

    Communicates: nothing.
    """
    try:
        if path is None:
            return _read_some(_walk(Path(sysconfig.get_paths()["stdlib"]), ".py"), max_bytes)
        if path.is_dir():
            return _read_some(_walk(path, ""), max_bytes)
        return _read_some(iter((path,)), max_bytes)
    except OSError as error:
        raise UsageError(
            f"--data must be a text file or a folder of them, but reading {error.filename} failed: {error.strerror}. "
            "Pass a path that exists, or leave --data out to train on Python's standard library."
        ) from error


def split(text: bytes, *, block_size: int, source: str) -> Corpus:
    """Cuts a text into stretches and holds out the end of each, so that both parts hold something of everything.

    Args:
        text: at least ``2 * (block_size + 1)`` bytes.
        block_size: the context, so that each part has one window at least.
        source: where the text came from, for people.

    Raises:
        UsageError: the text is too short.
    """
    window = block_size + 1
    if len(text) < 2 * window:
        raise UsageError(
            f"the data must hold at least 2 x (--block-size + 1) = {2 * window} bytes, but {source} has {len(text)}. "
            "Pass more text, or a smaller --block-size."
        )
    num_stretches = max(1, min(_NUM_STRETCHES, len(text) // (_VALIDATION_SHARE * window)))
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    train, validation = [], []
    for stretch in whole.tensor_split(num_stretches):
        held_out = max(window, len(stretch) // _VALIDATION_SHARE)
        train.append(stretch[:-held_out])
        validation.append(stretch[-held_out:])
    digest = hashlib.blake2b(text, digest_size=8).hexdigest()
    return Corpus(train=torch.cat(train), validation=torch.cat(validation), source=source, digest=digest)


def load_corpus(path: Path | None, *, block_size: int) -> Corpus:
    """`read_text`, then `split`."""
    source = "Python's standard library" if path is None else str(path)
    return split(read_text(path), block_size=block_size, source=source)


def _windows(text: Tensor, starts: Tensor, block_size: int) -> Batch:
    windows = text[starts[:, None] + torch.arange(block_size + 1)].long()
    return Batch(inputs=windows[:, :-1], targets=windows[:, 1:])


def train_batch(corpus: Corpus, *, seed: int, step: int, rank: int, batch_size: int, block_size: int) -> Batch:
    """The windows that one rank trains on in one step: a pure function of (seed, step, rank).

    Nothing but the step number is needed to continue the order after a restart.
    """
    key = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
    starts = torch.randint(0, len(corpus.train) - block_size, (batch_size,), generator=generator)
    return _windows(corpus.train, starts, block_size)


def validation_batches(
    corpus: Corpus, *, num_windows: int, rank: int, world_size: int, batch_size: int, block_size: int
) -> list[Batch]:
    """One rank's share of about ``num_windows`` windows that lie evenly over the validation text.

    Every rank gets equally many, so that the mean over ranks is the mean over windows.
    """
    per_rank = -(-num_windows // world_size)
    last = len(corpus.validation) - block_size - 1
    starts = torch.linspace(0, last, per_rank * world_size, dtype=torch.float64).long()[rank::world_size]
    return [_windows(corpus.validation, some, block_size) for some in starts.split(batch_size)]
