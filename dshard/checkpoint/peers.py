"""Snapshots in memory that survive the loss of one rank: each rank keeps its own, and an XOR row of the others'."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dshard import collectives
from dshard.agreement.same import check_same
from dshard.arguments import checked
from dshard.checkpoint.agreement import agree, group_of, together
from dshard.checkpoint.contents import Contents, described_optimizers, optimizers_by_prefix
from dshard.checkpoint.file_format import DTYPES, dtype_name
from dshard.checkpoint.job import lineage_of
from dshard.checkpoint.loading import finish, prepared
from dshard.checkpoint.manifest import Manifest
from dshard.checkpoint.own import own_piece, random_states
from dshard.checkpoint.parity import Stripes
from dshard.checkpoint.saving import facts_of
from dshard.checkpoint.shard_file import Piece, host_bytes
from dshard.checkpoint.source import Source
from dshard.checkpoint.stored import Chunk, StoredFile, StoredTensor
from dshard.checkpoint.trees import encode
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import CheckpointError

_LABEL = "peer snapshot"
_STEP_BYTES = 1 << 24  # of each stripe that travel at a time
_LENGTH_BYTES = 8
_WHERE = Path("the snapshot in memory")


@checked
class PeerSnapshots:
    """Keeps, in the memory of every rank, a snapshot of its shards and one XOR row of those of the others.

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
        """Bytes on this rank of its snapshot and of its row."""
        return sum(held.numel() for held in (self._image, self._row) if held is not None)

    @checked
    def step(self, *, step: int = 0, extra: Any = None) -> bool:
        """Count a step, to be called on every rank after the optimizer's; take a snapshot at each `every`-th.

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
        """Drop this rank's snapshot and row, as if it had just joined."""
        self._image = self._row = None
        self._sizes = ()

    def restore(self) -> Any:
        """Go back to the last snapshot, on every rank; one that has none gets its own from the others.

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
        """This rank's part of a snapshot: a description, and the bytes of everything that it holds."""
        contents = Contents(self._model, optimizers_by_prefix(self._optimizer))
        whole = group_of(self._model)
        own = {"random": random_states(whole), "extra": encode(extra, "extra")}
        pieces = [*contents.held(), own_piece(whole, own)]
        lineage = lineage_of(self._model)
        facts = {**facts_of(contents, step), "extra": None, "are_alike": False}
        facts.update(run=lineage.run, sequence=lineage.sequence)
        empty = {name: stored.to_json() for name, stored in contents.without_values(here=True).items()}
        return _image_of(pieces, {"facts": facts, "aliases": contents.aliases, "empty": empty})

    def _all_sizes(self, own: int) -> tuple[int, ...]:
        sizes = torch.zeros(self._group.num_ranks, dtype=torch.int64, device=self._group.device_type)
        sizes[self._group.rank] = own
        found = collectives.all_reduce([sizes], self._group, ReduceOp.MAX, label=_LABEL).wait()[0]
        return tuple(found.tolist())

    def _exchanged(self, image: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """This rank's row: the XOR of one stripe of every other."""
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
        """The lost rank's part, on that rank; the others send what they have of each of its stripes."""
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
        """What this rank has of a row: the row itself, or its own stripe in it."""
        assert self._row is not None
        assert self._image is not None
        if row == self._group.rank:
            return self._row[start : start + size]
        return _padded(self._image, stripes.stripe_in(row, self._group.rank) * stripes.length + start, size)


def _padded(image: Tensor, start: int, size: int) -> Tensor:
    """Bytes of an image from a place on, with zeros beyond its end."""
    part = image[start : start + size]
    return part if part.numel() == size else torch.cat([part, part.new_zeros(size - part.numel())])


def _image_of(pieces: Sequence[Piece], described: dict[str, Any]) -> Tensor:
    """A description and values as bytes, which start where their elements may."""
    places, start = [], 0
    for piece in pieces:
        start = -(-start // _LENGTH_BYTES) * _LENGTH_BYTES
        places.append(start)
        start += piece.num_bytes
    tensors = {
        piece.name: [
            dtype_name(piece.name, piece.values.dtype), list(piece.shape), list(piece.offsets),
            list(piece.values.shape), place,
        ]
        for piece, place in zip(pieces, places, strict=True)
    }  # fmt: skip
    text = json.dumps({**described, "tensors": tensors}).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    values = _LENGTH_BYTES + len(text)
    image = torch.zeros(values + start, dtype=torch.uint8, device="cpu")
    image[:values] = torch.frombuffer(bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text), dtype=torch.uint8)
    for piece, place in zip(pieces, places, strict=True):
        at = values + place
        for part in host_bytes(piece.values):
            image[at : at + part.numel()] = part
            at += part.numel()
    return image


class _ImageReader:
    """Reads boxes out of an image: those that the rank held which took it."""

    def __init__(self, image: Tensor, values: int) -> None:
        self._image, self._values = image, values

    def read(self, name: str, stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The values of a box.

        Raises:
            CheckpointError: It is another box than the one that is there.
        """
        chunk = next(iter(stored.chunks), None)
        if chunk is None or (tuple(offsets), tuple(sizes)) != (chunk.offsets, chunk.sizes):
            if 0 in sizes:
                return torch.empty(tuple(sizes), dtype=stored.dtype, device="cpu")
            raise CheckpointError(
                f"PeerSnapshots: shards must lie as when the snapshot was taken, but '{name}' lies otherwise now. Take "
                "a snapshot after set_strategy, or load a checkpoint."
            )
        start = self._values + chunk.start
        raw = self._image[start : start + stored.num_bytes(chunk)].clone()
        return raw.view(stored.dtype).view(chunk.sizes)


def _source_of(image: Tensor, group: ShardGroup) -> Source:
    """What `load` reads of a checkpoint, out of an image."""
    length = int.from_bytes(image[:_LENGTH_BYTES].numpy().tobytes(), "little")
    described = json.loads(image[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy().tobytes())
    tensors = {
        name: StoredTensor(DTYPES[dtype], tuple(shape), ()) for name, (dtype, shape, _) in described["empty"].items()
    }
    for name, (dtype, shape, offsets, sizes, start) in described["tensors"].items():
        chunk = Chunk(0, tuple(offsets), tuple(sizes), start, 0, 0)
        tensors[name] = StoredTensor(DTYPES[dtype], tuple(shape), (chunk,))
    files = tuple(StoredFile("", 0, 0, "", 0) for _ in range(group.world_size))
    manifest = Manifest(described["facts"], files, tensors, described["aliases"])
    return Source(_WHERE, manifest, _ImageReader(image, _LENGTH_BYTES + length), group)
