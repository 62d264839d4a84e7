"""List the tensors of a model and its optimizers, the box of each that this rank holds, and the part that it writes."""

import json
import math
import random
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
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
from dshard.checkpoint.manifest import OWN, own_name
from dshard.checkpoint.values import encode
from dshard.collectives import ShardGroup
from dshard.errors import CheckpointError
from dshard.gathering import refuse_meta
from dshard.layout import ShardLayout
from dshard.optimizer.replace import repoint_optimizer
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import full_shape, tp_layout_of
from dshard.tensor.subclass_shards import exact_values
from dshard.tensor.views import bytes_of

_SPLIT_BYTES = 1 << 20  # of a copy that several ranks hold: less than that is written by one of them


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
        dim = 0 if box.sizes[0] >= self.num_copies else longest
        extent = ShardLayout(box.sizes, dim, self.num_copies).extent(self.copy)
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + extent.start, extent.size
        return Box(box.shape, tuple(offsets), tuple(sizes)) if extent.size else None


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
    offsets, sizes = [0] * tensor.dim(), list(full_shape(layout))
    num_copies, copy = 1, 0
    tp = tp_layout_of(layout)
    cuts = [(p.dim if isinstance(p, Shard) else None, g.num_ranks, g.rank) for p, g in tp.axes] if tp else []
    cuts.append((layout.dim, group.num_ranks, group.rank))
    for dim, num_ranks, rank in cuts:
        if dim is None:
            num_copies, copy = num_copies * num_ranks, copy * num_ranks + rank
            continue
        extent = ShardLayout(tuple(sizes), dim, num_ranks).extent(rank)
        offsets[dim], sizes[dim] = offsets[dim] + extent.start, extent.size
    replicas = group.replicas
    if replicas is not None:
        num_copies, copy = num_copies * replicas.world_size, copy * replicas.world_size + replicas.world_rank
    return Part(Box(tuple(full_shape(layout)), tuple(offsets), tuple(sizes)), num_copies, copy)


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

    Raises:
        CheckpointError, StateError: There is something that no checkpoint holds.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Optimizer], extra: Any) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.extra_state: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        state = model.state_dict(keep_vars=True)
        check_kept("checkpoint.save", model, state)
        tied = left_out_of(model, state)
        for name, value in sorted(state.items(), key=lambda item: item[0] in tied):
            if isinstance(value, Tensor) and not is_extra(name):
                self._keep(value, f"model.{name}")
            else:
                self.extra_state[name] = encode(value, f"extra.{name}", self._keep)
        names = name_of_params(model, optimizers)
        self.optimizers = [self._optimizer(prefix, each, names) for prefix, each in optimizers.items()]
        refuse_meta("checkpoint.save", list(self.tensors.items()))
        self.extra = encode(extra, "extra")
        texts = [repr(value).encode(errors="surrogatepass") for value in (self.extra, self.own_facts)]
        plain = [self.tensors[name] for name in self.plain_names()]
        self.sums = [*map(zlib.crc32, texts), *_sums_of(plain)]  # of what may differ between ranks

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
        groups = [
            {
                "params": [names[id(p)] for p in group["params"]],
                "options": {
                    key: encode(value, f"checkpoint: param_groups[{i}]['{key}']")
                    for key, value in group.items()
                    if key != "params"
                },
            }
            for i, group in enumerate(optimizer.param_groups)
        ]
        state: dict[str, Any] = {}
        common: dict[Any, Any] = {}
        for param, values in optimizer.state.items():
            if not isinstance(param, Tensor):
                common[param] = values
            elif not isinstance(values, Mapping):
                raise CheckpointError(
                    f"{prefix}.{names[id(param)]}: an optimizer's state of a parameter must be a dict, but it is a "
                    f"{type(values).__name__}. Put it into a dict."
                )
            elif values:
                name = names[id(param)]
                where = f"{prefix}.{name}"
                if wrong := [key for key in values if not isinstance(key, str)]:
                    raise CheckpointError(f"{where}: keys of a state must be texts, but one is {wrong[0]!r:.60}.")
                state[name] = {key: encode(value, f"{where}.{key}", self._keep) for key, value in values.items()}
        whole = [name for name, t in self.tensors.items() if name.startswith(f"{prefix}.") and not _is_cut(t)]
        return {
            "prefix": prefix,
            "kind": type(optimizer).__name__,
            "groups": groups,
            "state": state,
            "whole": [name for name in whole if self.tensors[name].dim()],
            "common": encode(common, f"{prefix}.state", self._keep),
        }

    @property
    def own_facts(self) -> dict[str, Any]:
        """Values that may differ between ranks: numbers of optimizers, such as a loss, and extra states of modules."""
        return {"optimizers": self.optimizers, "extra_state": self.extra_state}

    def listed(self) -> dict[str, list[str]]:
        """Describe what all ranks must have alike: all but values, and the numbers in states of optimizers."""
        optimizers = []
        for facts in self.optimizers:
            options = [group["options"] for group in facts["groups"]]
            params = [group["params"] for group in facts["groups"]]
            states = {name: list(state) for name, state in facts["state"].items()}
            whole = facts["whole"]
            optimizers.append(f"{facts['kind']} with {options} of {params}, and states {states}, whole {whole}")
        tensors = [f"{name}, {tuple(t.shape)}, {t.dtype}" for name, t in self.tensors.items()]
        return {"optimizer": optimizers, "tensors": tensors, "extra state": list(self.extra_state)}

    def plain_names(self) -> list[str]:
        """Names of tensors that every rank holds whole, with values that may differ: buffers, step counts."""
        return [name for name, tensor in self.tensors.items() if not _is_cut(tensor)]

    def pieces(self, rank: int, num_ranks: int, are_alike: Sequence[bool]) -> list[Piece]:
        """Return the pieces that this rank writes.

        Args:
            rank: This one.
            num_ranks: That write.
            are_alike: Of each of `plain_names`, whether all ranks hold the same values.

        Communicates:
            An all-gather for each view or foreign DTensor.
        """
        found, alike = [], dict(zip(self.plain_names(), are_alike, strict=True))
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


def random_states(group: ShardGroup) -> dict[str, Any]:
    """Return the states of the default random generators of torch, Python, NumPy and the device."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the global one is what is to be kept
    own = {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in numpy_state["state"].items()}
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": own},
    }
    if group.device_type != "cpu":
        states["device"] = torch.get_device_module(group.device_type).get_rng_state()
    return states


def own_piece(group: ShardGroup, extra: Any, facts: Any = None) -> Piece:
    """Return this rank's random states, its `extra`, and facts that differ between ranks, as JSON in a tensor."""
    own = {"random": encode(random_states(group), "the random states"), "extra": extra, "facts": facts}
    text = json.dumps(own).encode()
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Piece(own_name(group.world_rank, OWN), Box.whole(values.shape), values)


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
