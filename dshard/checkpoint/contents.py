"""List what a checkpoint holds, the box of each tensor that this rank has, and the part that it writes.

All is tensors: the values of Python that belong to a checkpoint (facts of optimizers, extra states of modules, random
states, the caller's `extra`) are JSON in tensors of bytes.
"""

import base64
import json
import math
import random
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer

from dshard.checkpoint.files import Box, Piece, check_dtype, memory_of
from dshard.checkpoint.manifest import own_name
from dshard.errors import CheckpointError
from dshard.gathering import refuse_meta
from dshard.optimizer.replace import repoint_optimizer
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import full_shape, tp_layout_of
from dshard.tensor.subclass_shards import exact_values
from dshard.tensor.views import bytes_of

FACTS, EXTRA, RANDOM = "facts", "extra", "random"  # names of tensors whose bytes are JSON
_SPLIT_BYTES = 1 << 20  # of a copy that several ranks hold: less than that is written by one of them
_MAX_DEPTH = 100
_MAX_INT_BITS = 1 << 13  # what Python reads back
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True, slots=True)
class Part:
    """The box of a full tensor that this rank holds.

    Args:
        box: Which one.
        num_copies: How many ranks hold this very box.
        copy: This rank's number among them.
    """

    box: Box
    num_copies: int = 1
    copy: int = 0

    def written_here(self, name: str, itemsize: int) -> Box | None:
        """Return the part of the box that this rank writes, so that copies are written once; None for nothing."""
        box = self.box
        if not box.numel:
            return None if math.prod(box.shape) else box
        longest = max(range(len(box.sizes)), key=lambda dim: box.sizes[dim], default=None)
        is_large = box.numel * itemsize >= _SPLIT_BYTES
        if longest is None or not is_large or box.sizes[longest] < self.num_copies:
            return box if zlib.crc32(name.encode()) % self.num_copies == self.copy else None
        found = box.cut(0 if box.sizes[0] >= self.num_copies else longest, self.num_copies, self.copy)
        return found if found.numel else None


def box_of(tensor: Tensor) -> Box:
    """Return the box of a tensor that this rank holds; a plain tensor is held whole."""
    return _part_of(tensor).box


def _part_of(tensor: Tensor) -> Part:
    if isinstance(tensor, ShardedTensor):
        return Part(Box.whole(tensor.shape)) if tensor.is_view else _part_of_sharded(tensor)
    if isinstance(tensor, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return Part(Box(tuple(tensor.shape), tuple(offsets), tuple(sizes)))
    return Part(Box.whole(tensor.shape))


def _part_of_sharded(tensor: ShardedTensor) -> Part:
    layout, group = tensor.shard_layout, tensor.shard_group
    box, num_copies, copy = Box.whole(full_shape(layout)), 1, 0
    tp = tp_layout_of(layout)
    cuts = [(p.dim if isinstance(p, Shard) else None, g.num_ranks, g.rank) for p, g in tp.axes] if tp else []
    cuts.append((layout.dim, group.num_ranks, group.rank))
    if group.replicas is not None:
        cuts.append((None, group.replicas.world_size, group.replicas.world_rank))
    for dim, num_ranks, rank in cuts:
        if dim is None:
            num_copies, copy = num_copies * num_ranks, copy * num_ranks + rank
        else:
            box = box.cut(dim, num_ranks, rank)
    return Part(box, num_copies, copy)


def optimizers_by_prefix(given: Any) -> dict[str, Optimizer]:
    """Return the optimizers that were passed, by the prefix of their tensors' names in a checkpoint.

    Args:
        given: An optimizer, several, or None.
    """
    if isinstance(given, (list, tuple)):
        found = {f"optimizer{i}": each for i, each in enumerate(given)}
    else:
        found = {} if given is None else {"optimizer": given}
    for each in found.values():
        repoint_optimizer(each)
    return found


def described_optimizers(given: Any) -> list[str]:
    """Describe optimizers by class and number of groups, for a comparison between ranks."""
    return [
        f"{type(each).__name__} of {len(each.param_groups)} groups" for each in optimizers_by_prefix(given).values()
    ]


def name_of_params(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> dict[int, str]:
    """Return the names of a model's parameters, by `id`.

    Raises:
        CheckpointError: An optimizer holds others.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    for optimizer in optimizers.values():
        held = [p for group in optimizer.param_groups for p in group["params"]] + list(optimizer.state)
        foreign = next((p for p in held if isinstance(p, Tensor) and id(p) not in names), None)
        if foreign is not None:
            raise CheckpointError(
                "checkpoint: the optimizer may hold parameters of the model alone, but one of shape "
                f"{tuple(foreign.shape)} is not among them. Pass the model whose parameters the optimizer was made "
                "with."
            )
    return names


class Contents:
    """Everything that a checkpoint will hold, as one rank knows it before the ranks compare it; tensors by name.

    Args:
        model: A sharded module.
        optimizers: Those that train it, by the prefix of their tensors.
        extra: As of `save`.
        device_type: Of the ranks' devices.

    Raises:
        CheckpointError, StateError: There is something that no checkpoint holds.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Optimizer], extra: Any, device_type: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._names: dict[int, str] = {}
        self._extra_state: dict[str, Any] = {}
        state = model.state_dict(keep_vars=True)
        check_kept("checkpoint.save", model, state)
        tied = left_out_of(model, state)
        for name, value in sorted(state.items(), key=lambda item: item[0] in tied):
            if isinstance(value, Tensor) and not is_extra(name):
                self._keep(value, f"model.{name}")
            else:
                self._extra_state[name] = encode(value, f"extra.{name}", self._keep)
        names = name_of_params(model, optimizers)
        self._optimizers = [self._optimizer(prefix, each, names) for prefix, each in optimizers.items()]
        refuse_meta("checkpoint.save", list(self.tensors.items()))
        self._described = [f"{name}, {tuple(t.shape)}, {t.dtype}" for name, t in self.tensors.items()]
        self.tensors[FACTS] = _as_bytes({"optimizers": self._optimizers, "extra_state": self._extra_state})
        self.tensors[EXTRA] = _as_bytes(encode(extra, "extra"))
        self.tensors[RANDOM] = _as_bytes(encode(random_states(device_type), "the random states"))
        self.sums = _sums_of([self.tensors[name] for name in self._plain_names()])  # of what may differ between ranks

    def _keep(self, value: Tensor, name: str) -> str:
        """Add a tensor under a name; a second name of the same tensor becomes an alias."""
        if name in self.tensors or name in self.aliases:
            raise CheckpointError(f"{name}: a checkpoint's names must differ, but two tensors have this. Rename one.")
        check_dense(name, value)
        known = self._names.setdefault(id(value), name)
        if known != name:
            self.aliases[name] = known
        else:
            self.tensors[name] = value
        return name

    def _optimizer(self, prefix: str, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
        groups = []
        for i, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            options["params"] = [names[id(p)] for p in group["params"]]
            groups.append(encode(options, f"checkpoint: param_groups[{i}]"))
        state: dict[str, Any] = {}
        common: dict[Any, Any] = {}
        for param, values in optimizer.state.items():
            if not isinstance(param, Tensor):
                common[param] = values
                continue
            where = f"{prefix}.{names[id(param)]}"
            if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
                found = f"has the keys {list(values)!r:.60}" if isinstance(values, Mapping) else f"is a {type(values)}"
                raise CheckpointError(
                    f"{where}: an optimizer's state of a parameter must be a dict with texts as keys, but it {found}. "
                    "Put it into such a dict."
                )
            if values:
                state[names[id(param)]] = {key: encode(v, f"{where}.{key}", self._keep) for key, v in values.items()}
        whole = [name for name, t in self.tensors.items() if name.startswith(f"{prefix}.") and not _is_cut(t)]
        return {
            "kind": type(optimizer).__name__,
            "groups": groups,
            "state": state,
            "whole": [name for name in whole if self.tensors[name].dim()],
            "common": encode(common, f"{prefix}.state", self._keep),
        }

    def listed(self) -> dict[str, list[str]]:
        """Describe what all ranks must have alike: all but values, and the numbers in states of optimizers."""
        optimizers = []
        for facts in self._optimizers:
            states = {name: list(state) for name, state in facts["state"].items()}
            groups, whole = facts["groups"], facts["whole"]
            optimizers.append(f"{facts['kind']} with {groups}, and states {states}, whole {whole}")
        return {"optimizer": optimizers, "tensors": self._described, "extra state": list(self._extra_state)}

    def _plain_names(self) -> list[str]:
        """Names of tensors that every rank holds whole, with values that may differ: buffers, step counts, JSON."""
        return [name for name, tensor in self.tensors.items() if not _is_cut(tensor)]

    def pieces(self, rank: int, num_ranks: int, are_alike: Sequence[bool]) -> list[Piece]:
        """Return the pieces that this rank writes.

        Args:
            rank: This one.
            num_ranks: That write.
            are_alike: Of each of `sums`, whether it is equal on all ranks.

        Communicates:
            An all-gather for each view or foreign DTensor.
        """
        found, alike = [], dict(zip(self._plain_names(), are_alike, strict=True))
        for name, tensor in self.tensors.items():
            local, whole = _local(name, tensor), Box.whole(tensor.shape)
            if not alike.get(name, True):
                found.append(Piece(own_name(rank, name), whole, local))
                continue
            part = _part_of(tensor) if _is_cut(tensor) else Part(whole, num_ranks, rank)
            box = part.written_here(name, local.dtype.itemsize)
            if box is not None:
                values = local[box.within(part.box)] if box.sizes else local
                found.append(Piece(name, box, values, _is_cut(tensor)))
        return found


def _sums_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return a checksum of each of some small tensors; those of a device go to the host in one copy."""
    with torch.no_grad():
        plain = [bytes_of(t.full_tensor() if isinstance(t, DTensor) else t.detach()) for t in tensors]
        for device in {raw.device for raw in plain if raw.device.type != "cpu"}:
            away = [i for i, raw in enumerate(plain) if raw.device == device]
            copied = torch.cat([plain[i] for i in away]).cpu().split([len(plain[i]) for i in away])
            for i, raw in zip(away, copied, strict=True):
                plain[i] = raw
        return [zlib.crc32(memory_of(raw)) for raw in plain]


def _as_bytes(value: Any) -> Tensor:
    """Return the JSON of a value as a tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def random_states(device_type: str) -> dict[str, Any]:
    """Return the states of the default random generators of torch, Python, NumPy and the device."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the global one is what is to be kept
    own = {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in numpy_state["state"].items()}
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": own},
    }
    if device_type != "cpu":
        states["device"] = torch.get_device_module(device_type).get_rng_state()
    return states


def left_out_of(module: nn.Module, names: Collection[str]) -> set[str]:
    """Return names of tied weights that Hugging Face's class leaves out of files and ties again after loading."""
    found: set[str] = set()
    for pattern in getattr(module, "_tied_weights_keys", None) or ():
        with suppress(re.error):
            found.update(name for name in names if name == pattern or re.search(pattern, name))
    return found


def is_extra(name: str) -> bool:
    """Return whether an entry of a state dict came from `get_extra_state`."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def check_kept(who: str, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise unless the tensors of a state dict are the model's own, so that values written into them stay.

    Raises:
        CheckpointError: A hook of `state_dict` makes one anew each time.
    """
    again = model.state_dict(keep_vars=True)
    for name, value in state.items():
        is_made = value is not again.get(name) and isinstance(value, Tensor) and not is_extra(name)
        if is_made and _memory(value) != _memory(again.get(name)):
            raise CheckpointError(
                f"{who}: tensors of a state_dict must be parameters, buffers, or what modules keep elsewhere, but "
                f"'{name}' is made anew by each call, so that values cannot be put back into it. Register it as a "
                "buffer, or give it by get_extra_state."
            )


def refuse_plain_meta(name: str, tensor: Tensor) -> None:
    """Raise for a parameter to which a load gives no memory.

    Raises:
        CheckpointError: It is plain and on the meta device, where values that are written are lost.
    """
    if tensor.is_meta and isinstance(tensor, nn.Parameter) and not isinstance(tensor, ShardedTensor):
        raise CheckpointError(
            f"{name}: loading gives memory to sharded parameters, but this one is plain and on the meta device. Move "
            "it with to_empty first."
        )


def _memory(value: Any) -> int:
    """Return a key that two views of one memory share."""
    if isinstance(value, ShardedTensor):
        return id(value.shard_storage)
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.layout == torch.strided:
        return value.data_ptr()
    return id(value)


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise unless a safetensors file can hold a tensor.

    Raises:
        CheckpointError: It is sparse or quantized, or its dtype has no name there.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{name}: a checkpoint holds dense tensors, but this one is {tensor.layout}, {tensor.dtype}. Convert it, "
            "or keep it out of the state_dict."
        )
    check_dtype(name, dtype_of(tensor))


def dtype_of(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor's stored values."""
    return tensor.storage_dtype if isinstance(tensor, ShardedTensor) else tensor.dtype


def _is_cut(tensor: Tensor) -> bool:
    return isinstance(tensor, ShardedTensor) and not tensor.is_view


def _local(name: str, tensor: Tensor) -> Tensor:
    """Return this rank's values as a plain tensor; a copy only where they must be gathered or decoded."""
    if _is_cut(tensor):
        return exact_values(tensor.shard_storage.resolve(), name)  # type: ignore[attr-defined]
    with torch.no_grad():
        plain = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return plain.detach()


# ------------------------------------------------------------------------------- values of Python as JSON, and back
# JSON knows no tuples, no bytes and no keys but texts. These become objects of a single key that begins with `$`.


def encode(value: Any, where: str, keep: Callable[[Tensor, str], str] | None = None, depth: int = _MAX_DEPTH) -> Any:
    """Encode a value for JSON.

    Args:
        value: None, truth values, numbers, texts, bytes and tensors, and lists, tuples and dicts of these.
        where: What it is, for an error.
        keep: Takes a tensor, and what it is, and gives the name under which it is stored elsewhere; by default the
            JSON holds its values.
        depth: How deep it may be nested.

    Raises:
        CheckpointError: There is something else in it; names it.
    """
    if not depth:
        raise CheckpointError(f"{where}: may be nested {_MAX_DEPTH} deep, but is nested deeper. Does it hold itself?")
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value) is int:
        if abs(value) >> _MAX_INT_BITS:
            raise CheckpointError(f"{where}: an int may have {_MAX_INT_BITS} bits, but has {value.bit_length()}.")
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Tensor):
        return {"$named": keep(value, where)} if keep is not None else {"$tensor": _values_of(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}[{i}]", keep, depth - 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        items = [(key, encode(item, f"{where}[{key!r}]", keep, depth - 1)) for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in items) and not (len(items) == 1 and items[0][0].startswith("$")):
            return dict(items)
        return {"$items": [[encode(key, f"{where}'s key", None, depth - 1), item] for key, item in items]}
    raise CheckpointError(
        f"{where}: a checkpoint holds None, truth values, numbers, texts, bytes, tensors, and lists, tuples and dicts "
        f"of these, but this is a {type(value).__name__}. Convert it, or leave it out."
    )


def _values_of(tensor: Tensor) -> dict[str, Any]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    host = full.detach().cpu().contiguous().resolve_conj().resolve_neg()
    raw = bytes_of(host).numpy().tobytes()
    return {
        "dtype": str(host.dtype).removeprefix("torch."),
        "shape": list(host.shape),
        "bytes": base64.b64encode(raw).decode(),
    }


def decode(value: Any, named: Callable[[str], Any]) -> Any:
    """Decode a value that `encode` made.

    Args:
        value: What a checkpoint's JSON holds.
        named: Gives the tensor that is stored under a name.

    Raises:
        ValueError, KeyError, TypeError, RuntimeError: It is nothing that `encode` makes.
    """
    if isinstance(value, list):
        return [decode(item, named) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value)) if len(value) == 1 else ""
    if kind == "$tuple":
        return tuple(decode(item, named) for item in value[kind])
    if kind == "$items":
        return {decode(key, named): decode(item, named) for key, item in value[kind]}
    if kind == "$bytes":
        return base64.b64decode(value[kind], validate=True)
    if kind == "$named":
        return named(value[kind])
    if kind == "$tensor":
        return _tensor_of(value[kind])
    return {key: decode(item, named) for key, item in value.items()}


def _tensor_of(content: dict[str, Any]) -> Tensor:
    dtype, raw = _DTYPES[content["dtype"]], base64.b64decode(content["bytes"], validate=True)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
    return flat.view(content["shape"])


def same_kind(saved: Any, own: Any) -> bool:
    """Return whether a saved option may replace the optimizer's own one."""
    if saved is None or own is None:
        other = own if saved is None else saved
        return other is None or isinstance(other, (bool, int, float, str))
    numbers = (int, float, Tensor)
    if isinstance(own, numbers) and not isinstance(own, bool):
        return isinstance(saved, numbers) and not isinstance(saved, bool) and not math.isnan(float(saved))
    if isinstance(own, (list, tuple)):
        is_like = isinstance(saved, (list, tuple)) and len(saved) == len(own)
        return is_like and all(same_kind(a, b) for a, b in zip(saved, own, strict=True))
    return isinstance(saved, type(own))
