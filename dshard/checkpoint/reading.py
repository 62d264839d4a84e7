"""Read a checkpoint: every byte is compared with its sum, and nothing is changed before all is read.

A rank reads the blocks in which the boxes lie that it wants, into memory of its own, and compares them there.
"""

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dshard.checkpoint import disk
from dshard.checkpoint.agreement import together
from dshard.checkpoint.files import BLOCK_BYTES, NAMES, Box, StoredFile, memory_of, sum_of
from dshard.checkpoint.manifest import OWN, Manifest, StoredTensor, own_name
from dshard.checkpoint.parity import Read
from dshard.checkpoint.values import decode
from dshard.collectives import ShardGroup
from dshard.errors import CheckpointError
from dshard.optimizer.replace import allocate, convert, forget_flat_weights
from dshard.tensor import ShardedTensor
from dshard.tensor.subclass_shards import subclass_gathers

_VERIFY_BYTES = 1 << 25  # at a time; a multiple of a block


class Reader:
    """Reads boxes of tensors from the files of a checkpoint, and compares every byte with its sum.

    With parity, what is missing or damaged in one file is made from the others, and compared in the same way.

    Args:
        folder: Of the checkpoint.
        manifest: What it says of itself.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest, self._stack = folder, manifest, ExitStack()
        self._opened: dict[str, CheckpointError | None] = {}  # by file name: why it cannot be read
        self._raw: dict[str, int] = {}  # open file descriptors, by file name
        self.rebuilt: set[str] = set()  # names of files that parity stood in for

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def read(self, name: str, box: Box) -> Tensor:
        """Return the values of a box, on the host, in memory of their own.

        Raises:
            CheckpointError: A file is missing, cut short or damaged; names it and the tensor.
        """
        stored = self._manifest.tensors[name]
        pieces = [(self._manifest.files[index], piece.box) for index, piece in stored.pieces]
        for file, held in pieces:
            if held == box:
                return self._part(file, name, box)
        out = torch.empty(box.sizes, dtype=stored.dtype, device="cpu")
        for file, held in pieces:
            common = box.overlap(held)
            if common is not None:
                out[common.within(box)] = self._part(file, name, common)
        return out

    def verify(self, file: StoredFile) -> None:
        """Read and compare a whole file of the checkpoint, or a row; raises as `read`."""
        self._open(file)
        for name, piece in file.pieces.items():
            for begin in range(0, piece.num_bytes, _VERIFY_BYTES):
                self._range(file, name, begin, min(begin + _VERIFY_BYTES, piece.num_bytes))

    def rebuild(self, index: int, target: memoryview, offset: int) -> None:
        """Rebuild a file's bytes from an offset on, from the other files of its group and the rows.

        Raises:
            CheckpointError: One of those is missing, too.
        """
        group, stripes = self._manifest.stripes_around(index)
        files, rows = self._members(self._manifest.files, group), self._members(self._manifest.rows, group)
        stripes.rebuild(index - group.start, files, rows, target, offset)

    def row(self, index: int, target: memoryview, offset: int) -> None:
        """Compute a row of parity from an offset on, from the files of its group.

        Raises:
            CheckpointError: One of those is missing.
        """
        group, stripes = self._manifest.stripes_around(index)
        target[:] = bytes(len(target))
        stripes.row_bytes(index - group.start, self._members(self._manifest.files, group), target, offset)

    def _members(self, files: Sequence[StoredFile], group: range) -> Read:
        """Return a function that reads a file of a group, with zeros beyond its end."""

        def read(member: int, into: memoryview, at: int) -> None:
            file = files[group.start + member]
            inside = max(0, min(len(into), file.size - at))
            self._fill(file, into[:inside], at)
            into[inside:] = bytes(len(into) - inside)

        return read

    def _part(self, file: StoredFile, name: str, box: Box) -> Tensor:
        """Read a box of a piece: a view of the values from its first to its last element."""
        piece = file.pieces[name]
        if not box.numel:
            return torch.empty(box.sizes, dtype=piece.dtype, device="cpu")
        inner, itemsize = box.within(piece.box), piece.dtype.itemsize
        strides = [math.prod(piece.box.sizes[dim + 1 :]) for dim in range(len(inner))]
        first = sum(each.start * stride for each, stride in zip(inner, strides, strict=True))
        last = sum((each.stop - 1) * stride for each, stride in zip(inner, strides, strict=True))
        raw = self._range(file, name, first * itemsize, (last + 1) * itemsize)
        return raw.view(piece.dtype).as_strided(box.sizes, strides)

    def _range(self, file: StoredFile, name: str, begin: int, end: int) -> Tensor:
        """Read a piece's bytes into new memory and compare them; shape (end - begin,), uint8."""
        piece = file.pieces[name]
        low, high = begin // BLOCK_BYTES * BLOCK_BYTES, min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, piece.num_bytes)
        found = torch.empty(high - low, dtype=torch.uint8, device="cpu")
        error = None
        try:
            self._open(file)
            self._fill(file, memory_of(found), piece.start + low)
        except CheckpointError as caught:
            error = caught
        content = memory_of(found)
        for at in range(low, high, BLOCK_BYTES):
            block, start = content[at - low : at - low + BLOCK_BYTES], piece.start + at
            if error is None and piece.is_whole(block, at // BLOCK_BYTES):
                continue
            where = f"between {start} and {start + len(block)}"
            failed = error or self._damage(
                file.name, f"values must be those that were saved, but '{name}' has other bytes {where}"
            )
            self._rebuild_or(failed, file, block, start)
            if not piece.is_whole(block, at // BLOCK_BYTES):
                raise failed
        return found[begin - low : end - low]

    def _rebuild_or(self, failed: CheckpointError, file: StoredFile, target: memoryview, start: int) -> None:
        """Rebuild bytes of a file that could not be read, or raise why it could not be."""
        if not self._manifest.rows:
            raise failed
        try:
            self.rebuild(self._manifest.files.index(file), target, start)
        except CheckpointError as other:
            raise CheckpointError(f"{failed} Parity cannot stand in: {other}") from failed
        self.rebuilt.add(file.name)

    def _open(self, file: StoredFile) -> None:
        """Compare a file's size and header with the manifest, once.

        `safetensors` says what the file holds. Values are read with preadv at the offsets in the manifest, and not
        through the package's mapping of the file: there a disk error or a truncated file ends the process by SIGBUS.
        """
        if file.name not in self._opened:
            self._opened[file.name] = None
            try:
                self._compare_header(file)
            except CheckpointError as error:
                self._opened[file.name] = error
            except (SafetensorError, OSError) as error:
                self._opened[file.name] = self._damage(file.name, f"it must be readable, but {error}")
        if (failed := self._opened[file.name]) is not None:
            raise failed

    def _compare_header(self, file: StoredFile) -> None:
        header = memoryview(bytearray(file.header_bytes))
        self._fill(file, header, 0)
        if sum_of(header) != file.header_sum:
            raise self._damage(file.name, "its header must be the one that was saved, but it is another")
        if not file.header_bytes:
            return  # a row of parity
        with safe_open(self._folder / file.name, "np") as opened:  # which opens the file once
            for name, piece in file.pieces.items():
                found = opened.get_slice(name).get_dtype(), tuple(opened.get_slice(name).get_shape())
                if found != (NAMES[piece.dtype], piece.box.sizes):
                    raise self._damage(file.name, f"'{name}' must be as the manifest says, but it is {found}")

    def _fill(self, file: StoredFile, target: memoryview, offset: int) -> None:
        """Fill a buffer with a file's bytes, after its size was compared."""
        path, name = self._folder / file.name, file.name
        try:
            if name not in self._raw:
                if (found := disk.check_regular(path).st_size) != file.size:
                    raise self._damage(name, f"it must have the {file.size} bytes that were saved, but has {found}")
                self._raw[name] = self._stack.enter_context(disk.closing(disk.open_regular(path)))
            if disk.read_padded(self._raw[name], target, offset) != len(target):
                raise self._damage(name, f"it must be readable to its end, but ends before {offset + len(target)}")
        except OSError as error:
            what = f"all files of a checkpoint must be there and readable, but: {error.strerror}"
            raise self._damage(name, what) from error

    def _damage(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._folder / name}: {what}. The file is damaged; use another checkpoint.")


class Source:
    """A checkpoint as one rank reads it.

    Args:
        folder: Of the checkpoint.
        manifest: What it says of itself.
        reader: Of its files.
        group: The ranks that read it.

    Raises:
        CheckpointError: A file is damaged.
    """

    def __init__(self, folder: Path, manifest: Manifest, reader: Reader, group: ShardGroup) -> None:
        self.folder, self.manifest, self.group, self._reader = folder, manifest, group, reader
        self.is_same_size = manifest.world_size == group.world_size  # whether as many ranks read as wrote
        self.rank = group.world_rank if self.is_same_size else 0  # whose own values this rank reads
        name = own_name(self.rank, OWN)
        saved = reader.read(name, Box.whole(manifest.tensors[name].shape))
        self.own: dict[str, Any] = json.loads(saved.numpy().tobytes())  # what that rank saved for itself
        self.facts = {**manifest.facts, **(self.own["facts"] or {})}  # where they differed between ranks, its own

    def refusal(
        self, what: str, remedy: str = "Build the model and the optimizer as they were when it was saved"
    ) -> CheckpointError:
        """Return an error that names the checkpoint."""
        return CheckpointError(f"{self.folder}: {what}. {remedy}.")

    def stored(self, name: str) -> tuple[str, StoredTensor] | None:
        """Find a tensor, and the name under which this rank's values are stored."""
        return self.manifest.stored(name, self.rank)

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Read this rank's box of a tensor.

        Raises:
            CheckpointError: It is not there, of another shape or dtype, or damaged.
        """
        found = self.stored(name)
        if found is None:
            raise self.refusal(
                f"the checkpoint must hold every tensor of the model, but '{name}' (shape {box.shape}) is not in it"
            )
        kept, stored = found
        if stored.shape != box.shape or stored.dtype != dtype:
            raise self.refusal(
                f"tensors must have the shapes and dtypes that were saved, but '{name}' is {stored.shape}, "
                f"{stored.dtype} in the checkpoint and {box.shape}, {dtype} in the model"
            )
        return self._reader.read(kept, box)

    def decoded(self, value: Any, made: Callable[[str, StoredTensor], Tensor] | None = None) -> Any:
        """Decode a value of the manifest, with the tensors that it names; by default whole ones on the host.

        Raises:
            CheckpointError: A tensor that it names is damaged.
            ValueError, KeyError, TypeError: It is nothing that `encode` makes.
        """

        def named(name: str) -> Tensor:
            found = self.stored(name)
            if found is None:
                raise ValueError(f"'{name}' is not stored")
            kept, stored = found
            return self._reader.read(kept, Box.whole(stored.shape)) if made is None else made(name, stored)

        return decode(value, named)


def write_values(tensor: Tensor, values: Tensor) -> None:
    """Write this rank's part of a tensor."""
    if isinstance(tensor, ShardedTensor) and not tensor.is_view:
        if subclass_gathers(tensor.shard_storage.resolve()):
            tensor.copy_(tensor.like(values.to(tensor.storage_device)))
        else:
            tensor.overwrite_shard(values)
    elif isinstance(tensor, DTensor) and not isinstance(tensor, ShardedTensor):
        tensor.to_local().copy_(values)
    else:
        tensor.copy_(values)


def put(model: nn.Module, read: dict[str, Tensor], group: ShardGroup, prepare: Callable[[], None], what: str) -> None:
    """Write values that were read into a model's tensors, and let go of each.

    Args:
        model: A sharded module; what is on the meta device gets memory first.
        read: This rank's part of each tensor, by its name in the state dict.
        group: The ranks that share the model.
        prepare: Called before any value is written; raises on every rank alike, having changed nothing.
        what: Begins the message of an error.

    Raises:
        CheckpointError: A tensor on the meta device cannot get memory on some rank. On every rank alike; nothing was
            changed.
        StateError: The same, on a rank where something refers to a parameter there.

    Communicates:
        An all-reduce of 8 bytes, and what `prepare` does.
    """
    params = [param for param in model.parameters() if isinstance(param, ShardedTensor) and param.is_meta]
    buffers = {name: b for name, b in model.named_buffers(remove_duplicate=False) if b.is_meta}
    devices = dict.fromkeys(read, torch.device(group.device_type))
    try:
        together(group, lambda: allocate(model, devices), f"{what}: a model on the meta device needs memory")
        prepare()
    except BaseException:
        _take_memory_back(model, params, buffers)
        raise
    state = model.state_dict(keep_vars=True)
    for name in list(read):
        write_values(state[name], read.pop(name))


def _take_memory_back(model: nn.Module, params: Sequence[ShardedTensor], buffers: Mapping[str, Tensor]) -> None:
    """Move parameters to the meta device again, and put the buffers that were there back in their places."""
    recurrent = forget_flat_weights(model)
    for param in params:
        if not param.is_meta:
            convert(param, partial(torch.empty_like, device="meta"))
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = buffer
    for rnn in recurrent:
        rnn._init_flat_weights()


def set_extra_states(group: ShardGroup, pairs: Sequence[tuple[nn.Module, Any]], what: str) -> None:
    """Set the extra states of modules; if one of them raises on any rank, set all old ones again.

    Args:
        group: The ranks that share the modules, each with as many.
        pairs: Modules, with what their `set_extra_state` is to get.
        what: Begins the message of an error.

    Raises:
        CheckpointError: A module raised. On every rank alike.

    Communicates:
        An all-reduce of 8 bytes, if there are any.
    """
    before: list[tuple[nn.Module, Any]] = []

    def change() -> None:
        for module, value in pairs:
            before.append((module, copy.deepcopy(module.get_extra_state())))
            module.set_extra_state(value)

    if not pairs:
        return
    try:
        together(group, change, f"{what}: set_extra_state must take what was saved")
    except BaseException:
        for module, value in reversed(before):
            with suppress(Exception):  # one that refuses whatever it is given has kept what it had
                module.set_extra_state(value)
        raise
