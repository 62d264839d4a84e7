"""Snapshots in memory that survive the loss of one rank: each rank keeps its own and an XOR row of the others'."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dshard import arguments, collectives
from dshard.agreement import check_same
from dshard.checkpoint.agreement import agree, group_of, together
from dshard.checkpoint.contents import (
    Contents,
    described_optimizers,
    optimizers_by_prefix,
    own_piece,
)
from dshard.checkpoint.files import DTYPES, Box, Piece, StoredFile, StoredPiece, as_bytes
from dshard.checkpoint.loading import finish, prepared
from dshard.checkpoint.manifest import Manifest, StoredTensor
from dshard.checkpoint.parity import Stripes
from dshard.checkpoint.reading import Source
from dshard.checkpoint.saving import facts_of, lineage_of
from dshard.checkpoint.values import encode
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import CheckpointError

_LABEL = "peer snapshot"
_STEP_BYTES = 1 << 24  # of each stripe that travel at a time
_TEXT = "description"
_WHERE = Path("the snapshot in memory")


class PeerSnapshots:
    """Keeps in every rank's memory a snapshot of its shards and an XOR row of the other ranks' snapshots.

    Of N ranks that share parameters, rows have 1/(N - 1) of the bytes of the shards. A rank that lost its part gets it
    back from the others, bit for bit, without a file.

    Args:
        model: A sharded module.
        optimizer: Its optimizer, or a list of several.
        every: How many calls of `step` from one snapshot to the next.

    Raises:
        CheckpointError: No two ranks share the model. On every rank alike.
        DivergenceError: The ranks pass different arguments. On every rank alike.

    Communicates:
        An all-reduce of 48 bytes.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None, *, every: int = 1
    ) -> None:
        arguments.module("PeerSnapshots", "model", model)
        arguments.optimizers("PeerSnapshots", "optimizer", optimizer)
        every = arguments.count("PeerSnapshots", "every", every)
        self._model, self._optimizer, self._every = model, optimizer, every
        whole = group_of(model)
        self._group: ShardGroup = whole if whole.num_ranks > 1 or whole.replicas is None else whole.replicas
        if self._group.num_ranks < 2:
            raise CheckpointError(
                "PeerSnapshots: ranks keep what others lose, but one rank alone has the model. Start two or more."
            )
        facts = {"every": repr(every), "optimizer": described_optimizers(optimizer)}
        check_same("PeerSnapshots", facts, whole)
        self._image: Tensor | None = None
        self._row: Tensor | None = None
        self._sizes: tuple[int, ...] = ()
        self._num_calls = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's snapshot and row."""
        return sum(held.numel() for held in (self._image, self._row) if held is not None)

    def step(self, *, step: int = 0, extra: Any = None) -> bool:
        """Count a step, and take a snapshot at every `every`-th; to be called on every rank after the optimizer's step.

        Args:
            step: Number of finished steps, kept with the snapshot.
            extra: As of `dshard.checkpoint.save`.

        Returns:
            Whether a snapshot was taken.

        Raises:
            CheckpointError: There is something that no checkpoint holds. On every rank alike; the last snapshot stays.

        Communicates:
            For a snapshot, an all-to-all of the bytes of the shards, and a few small all-reduces.
        """
        step = arguments.count("PeerSnapshots.step", "step", step, least=0)
        self._num_calls += 1
        if self._num_calls % self._every:
            return False
        image = together(self._group, lambda: self._taken(step, extra), "PeerSnapshots: taking it failed")
        sizes = self._all_sizes(image.numel())
        row = self._exchanged(image, sizes)
        agree(self._group, None, "PeerSnapshots: exchanging it failed")
        self._image, self._row, self._sizes = image, row, sizes
        return True

    def forget(self) -> None:
        """Drop this rank's snapshot and row, as in a process that has just joined."""
        self._image = self._row = None
        self._sizes = ()

    def restore(self) -> Any:
        """Go back to the last snapshot on every rank; the others rebuild that of one rank that lost it.

        Returns:
            What was passed to `step` as `extra`, of this rank.

        Raises:
            CheckpointError: More than one rank has none, or they fit another model. On every rank alike; nothing was
                changed.

        Communicates:
            A few small all-reduces; where a rank has none, an all-to-all of the bytes of its snapshot from each other
            rank, and of the rows again.
        """
        group = self._group
        held = self._all_sizes(0 if self._image is None else self._image.numel())
        lost = [rank for rank, size in enumerate(held) if not size]
        sizes = torch.tensor(self._sizes or (0,) * group.num_ranks, dtype=torch.int64, device=group.device_type)
        sizes = collectives.all_reduce([sizes], group, ReduceOp.MAX, label=_LABEL).wait()[0]
        self._sizes = tuple(sizes.tolist())
        if len(lost) > 1:
            raise CheckpointError(
                f"PeerSnapshots: of the ranks that share the model one may have lost its snapshot, but ranks {lost} of "
                f"{group.num_ranks} have none. Load a checkpoint from disk."
            )
        rebuilt = self._rebuilt(lost[0]) if lost else None
        image = self._image if rebuilt is None else rebuilt
        assert image is not None
        whole = group_of(self._model)
        job = together(
            group,
            lambda: prepared(_source_of(image, whole), self._model, self._optimizer),
            "PeerSnapshots: restoring failed",
        )
        if lost:
            self._image, self._row = image, self._exchanged(image, self._sizes)
        finish(job, self._model, self._optimizer, whole)
        return job.extra

    def _taken(self, step: int, extra: Any) -> Tensor:
        """Take this rank's snapshot, as bytes."""
        contents = Contents(self._model, optimizers_by_prefix(self._optimizer))
        pieces = [*contents.held(), own_piece(group_of(self._model), encode(extra, "extra"))]
        lineage = lineage_of(self._model)
        facts = {**facts_of(contents, step), "extra": None, "are_alike": False}
        facts.update(run=lineage.run, sequence=lineage.sequence)
        return _image_of(pieces, {"facts": facts, "aliases": contents.aliases})

    def _all_sizes(self, own: int) -> tuple[int, ...]:
        sizes = torch.zeros(self._group.num_ranks, dtype=torch.int64, device=self._group.device_type)
        sizes[self._group.rank] = own
        found = collectives.all_reduce([sizes], self._group, ReduceOp.MAX, label=_LABEL).wait()[0]
        return tuple(found.tolist())

    def _exchanged(self, image: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Exchange stripes and return this rank's row: the XOR of one stripe of every other rank."""
        group, stripes = self._group, Stripes(sizes)
        row = torch.zeros(stripes.length, dtype=torch.uint8, device="cpu")
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        for start in range(0, stripes.length, _STEP_BYTES):
            size = min(_STEP_BYTES, stripes.length - start)
            sent = [
                _padded(image, stripes.stripe_in(other, group.rank) * stripes.length + start, size)
                if other != group.rank
                else nothing
                for other in range(group.num_ranks)
            ]
            counts = [size if other != group.rank else 0 for other in range(group.num_ranks)]
            got = collectives.all_to_all(sent, counts, group, label=_LABEL).wait()
            for part in got:
                if part.numel():
                    row[start : start + size] ^= part
        return row

    def _rebuilt(self, lost: int) -> Tensor | None:
        """Return the lost rank's snapshot on that rank; the others send their part of each of its stripes."""
        group, stripes, is_lost = self._group, Stripes(self._sizes), self._group.rank == lost
        num_bytes = stripes.length * (group.num_ranks - 1) if is_lost else 0
        out = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        for stripe in range(group.num_ranks - 1):
            row = stripe if stripe < lost else stripe + 1
            for start in range(0, stripes.length, _STEP_BYTES):
                size = min(_STEP_BYTES, stripes.length - start)
                sent = [torch.empty(0, dtype=torch.uint8, device="cpu")] * group.num_ranks
                if not is_lost:
                    sent[lost] = self._part_of_row(stripes, row, start, size)
                counts = [size if is_lost and other != lost else 0 for other in range(group.num_ranks)]
                got = collectives.all_to_all(sent, counts, group, label=_LABEL).wait()
                for part in got:
                    if part.numel():
                        out[stripe * stripes.length + start :][:size] ^= part
        return out[: self._sizes[lost]].clone() if is_lost else None

    def _part_of_row(self, stripes: Stripes, row: int, start: int, size: int) -> Tensor:
        """Return this rank's part of a row: the row itself, or its own stripe in it."""
        assert self._row is not None
        assert self._image is not None
        if row == self._group.rank:
            return self._row[start : start + size]
        return _padded(self._image, stripes.stripe_in(row, self._group.rank) * stripes.length + start, size)


def _padded(image: Tensor, start: int, size: int) -> Tensor:
    """Return bytes of an image from an offset on, with zeros beyond its end."""
    part = image[start : start + size]
    return part if part.numel() == size else torch.cat([part, part.new_zeros(size - part.numel())])


def _image_of(pieces: Sequence[Piece], described: dict[str, Any]) -> Tensor:
    """Return a description and pieces as the bytes of a safetensors file."""
    boxes = {piece.name: [piece.box.shape, piece.box.offsets, piece.box.sizes] for piece in pieces}
    text = bytearray(json.dumps({**described, "boxes": boxes}).encode())
    values = torch.frombuffer(text, dtype=torch.uint8)
    content = bytearray(as_bytes([*pieces, Piece(_TEXT, Box.whole(values.shape), values)]))
    return torch.frombuffer(content, dtype=torch.uint8)


class _ImageReader:
    """Reads the boxes that this rank held when its image was taken."""

    def __init__(self, values: Mapping[str, Tensor], tensors: Mapping[str, StoredTensor]) -> None:
        self._values, self._tensors = values, tensors

    def read(self, name: str, box: Box) -> Tensor:
        """Return the values of a box.

        Raises:
            CheckpointError: It is another box than the one that is there.
        """
        ((_, piece),) = self._tensors[name].pieces
        if box != piece.box:
            raise CheckpointError(
                f"PeerSnapshots: shards must lie as when the snapshot was taken, but '{name}' lies otherwise now. Take "
                "a snapshot after set_strategy, or load a checkpoint."
            )
        return self._values[name]


def _tensor_of(view: Mapping[str, Any]) -> Tensor:
    """Return a tensor as the package gives it: the name of its dtype, its shape and its bytes."""
    dtype, shape, content = DTYPES[view["dtype"]], view["shape"], view["data"]
    return torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)


def _source_of(image: Tensor, group: ShardGroup) -> Source:
    """Return an image as the source of a load."""
    values = {name: _tensor_of(view) for name, view in safetensors.deserialize(image.numpy().tobytes())}
    described = json.loads(values[_TEXT].numpy().tobytes())
    tensors = {}
    for name, box in described["boxes"].items():
        piece = StoredPiece(values[name].dtype, Box(*map(tuple, box)), "", 0)
        tensors[name] = StoredTensor(piece.dtype, piece.box.shape, ((0, piece),))
    files = (StoredFile("", 0, "", {}),) * group.world_size
    manifest = Manifest(described["facts"], files, tensors, described["aliases"])
    return Source(_WHERE, manifest, _ImageReader(values, tensors), group)
