"""What a model and its optimizers are made of, and which part of it this rank holds."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer

from dshard.checkpoint.file_format import dtype_name
from dshard.checkpoint.shard_file import Piece
from dshard.checkpoint.stored import StoredTensor, own_name
from dshard.checkpoint.trees import encode
from dshard.errors import CheckpointError
from dshard.layout import ShardLayout
from dshard.optimizer.replace import repoint_optimizer
from dshard.tensor import ShardedTensor
from dshard.tensor.subclass_shards import exact_values
from dshard.tensor.tp_layout import full_shape, tp_layout_of

_SPLIT_BYTES = 1 << 20  # of a copy that several ranks hold: less than that is written by one of them


@dataclass(frozen=True, slots=True)
class Part:
    """The box of a full tensor that this rank holds.

    Args:
        shape: Of the full tensor.
        offsets: First index along each dim.
        sizes: Number of indices along each dim.
        num_copies: How many ranks hold this very box.
        copy: This rank's number among them.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    num_copies: int = 1
    copy: int = 0

    @classmethod
    def whole(cls, shape: Sequence[int], num_copies: int = 1, copy: int = 0) -> "Part":
        """All of a tensor, which as many ranks hold."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape), num_copies, copy)

    def written_here(self, name: str, itemsize: int) -> tuple[slice, ...] | None:
        """What of the box this rank writes, for every copy to be written once; None if nothing."""
        everything = tuple(slice(0, size) for size in self.sizes)
        if not math.prod(self.sizes):
            return None
        longest = max(range(len(self.sizes)), key=lambda dim: self.sizes[dim], default=None)
        is_large = math.prod(self.sizes) * itemsize >= _SPLIT_BYTES
        if longest is None or not is_large or self.sizes[longest] < self.num_copies:
            return everything if zlib.crc32(name.encode()) % self.num_copies == self.copy else None
        dim = 0 if self.sizes[0] >= self.num_copies else longest
        extent = ShardLayout(self.sizes, dim, self.num_copies).extent(self.copy)
        if not extent.size:
            return None
        return (*everything[:dim], slice(extent.start, extent.stop), *everything[dim + 1 :])


def part_of_tensor(tensor: Tensor) -> Part:
    """The box that this rank holds of a tensor; of a plain one all of it."""
    if isinstance(tensor, ShardedTensor):
        return Part.whole(tensor.shape) if tensor.is_view else _part_of_sharded(tensor)
    if isinstance(tensor, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return Part(tuple(tensor.shape), tuple(offsets), tuple(sizes))
    return Part.whole(tensor.shape)


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
    return Part(tuple(full_shape(layout)), tuple(offsets), tuple(sizes), num_copies, copy)


def optimizers_by_prefix(given: Any) -> dict[str, Optimizer]:
    """The optimizers that were passed, by the prefix that their tensors are stored under.

    Args:
        given: An optimizer, several, or None.

    Raises:
        CheckpointError: It is something else.
    """
    if isinstance(given, (list, tuple)):
        found = {f"optimizer{i}": each for i, each in enumerate(given)}
    else:
        found = {} if given is None else {"optimizer": given}
    for each in found.values():
        if not isinstance(each, Optimizer):
            raise CheckpointError(
                f"checkpoint: optimizer must be an optimizer of torch.optim, or a list of those, but it is "
                f"{each!r:.80}. Leave it out to save or load the model alone."
            )
    for each in found.values():
        repoint_optimizer(each)
    return found


def described_optimizers(given: Any) -> list[str]:
    """What all ranks must have alike of the optimizers that they pass: how many of which class and number of groups."""
    return [
        f"{type(each).__name__} of {len(each.param_groups)} groups" for each in optimizers_by_prefix(given).values()
    ]


def name_of_params(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> dict[int, str]:
    """The names of a model's parameters, by identity.

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
    """Everything that a checkpoint is to hold, with the tensors by name.

    Args:
        model: A sharded module.
        optimizers: Those that train it, by the prefix of their tensors.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.extra_state: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        state = model.state_dict(keep_vars=True)
        check_kept("checkpoint.save", model, state)
        for name, value in state.items():
            if isinstance(value, Tensor) and not is_extra(name):
                self._keep(value, f"model.{name}")
            else:
                self.extra_state[name] = encode(value, f"extra.{name}", self._keep)
        names = name_of_params(model, optimizers)
        self.optimizers = [self._optimizer(prefix, each, names) for prefix, each in optimizers.items()]

    def _keep(self, value: Tensor, name: str) -> str:
        """Store a tensor under a name, once."""
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
                state[name] = encode_state(values, f"{prefix}.{name}", self._keep)
        whole = [name for name, t in self.tensors.items() if name.startswith(f"{prefix}.") and not _is_cut(t)]
        return {
            "prefix": prefix,
            "kind": type(optimizer).__name__,
            "groups": groups,
            "state": state,
            "whole": [name for name in whole if self.tensors[name].dim()],
            "common": encode(common, f"{prefix}.state", self._keep),
        }

    def __repr__(self) -> str:
        return ", ".join(f"{f['kind']} with {[g['options'] for g in f['groups']]}" for f in self.optimizers)

    @property
    def kinds(self) -> list[Any]:
        """What all ranks must have alike of their optimizers: all but the numbers of their states."""
        return [
            [
                *(facts[key] for key in ("kind", "groups", "prefix", "whole")),
                {n: list(s) for n, s in facts["state"].items()},
            ]
            for facts in self.optimizers
        ]

    @property
    def own_facts(self) -> dict[str, Any]:
        """What ranks may hold others of: numbers of optimizers, such as a loss, and the extra states of modules."""
        return {"optimizers": self.optimizers, "extra_state": self.extra_state}

    def plain_names(self) -> list[str]:
        """Tensors that every rank holds whole, and may hold others of: buffers, step counts."""
        return [name for name, tensor in self.tensors.items() if not _is_cut(tensor)]

    def without_values(self, *, here: bool = False) -> dict[str, StoredTensor]:
        """Tensors without elements, or with none on this rank: no file has anything of them but their shapes."""
        return {
            name: StoredTensor(dtype_of(tensor), tuple(tensor.shape), ())
            for name, tensor in self.tensors.items()
            if not (math.prod(part_of_tensor(tensor).sizes) if here else tensor.numel())
        }

    def held(self) -> list[Piece]:
        """Everything that this rank holds, whoever else holds it too.

        Communicates:
            As `pieces`.
        """
        found = [
            _piece(name, _local(name, tensor), replace(part_of_tensor(tensor), num_copies=1, copy=0), _is_cut(tensor))
            for name, tensor in self.tensors.items()
        ]
        return sorted((p for p in found if p is not None), key=lambda p: -p.values.dtype.itemsize)

    def pieces(self, rank: int, num_ranks: int, differing: Sequence[str]) -> list[Piece]:
        """What this rank writes.

        Args:
            rank: This one.
            num_ranks: That write.
            differing: Of `plain_names`, those of which ranks hold different values.

        Communicates:
            An all-gather for each view or foreign DTensor.
        """
        found, own = [], set(differing)
        for name, tensor in self.tensors.items():
            if name in own:
                found.append(_piece(own_name(rank, name), _local(name, tensor), Part.whole(tensor.shape)))
                continue
            part = part_of_tensor(tensor) if _is_cut(tensor) else Part.whole(tensor.shape, num_ranks, rank)
            found.append(_piece(name, _local(name, tensor), part, _is_cut(tensor)))
        return sorted((p for p in found if p is not None), key=lambda p: -p.values.dtype.itemsize)


def is_extra(name: str) -> bool:
    """Whether `get_extra_state` gave what a state dict has under a name."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def check_kept(who: str, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise unless what is written into the tensors of a state dict stays in the model.

    Raises:
        CheckpointError: A hook of `state_dict` makes one anew each time.
    """
    kept = {id(tensor) for tensors in (model.parameters(), model.buffers()) for tensor in tensors}
    others = {
        name: v for name, v in state.items() if isinstance(v, Tensor) and not is_extra(name) and id(v) not in kept
    }
    if not others:
        return
    again = model.state_dict(keep_vars=True)
    for name, value in others.items():
        if _memory(value) != _memory(again.get(name)):
            raise CheckpointError(
                f"{who}: tensors of a state_dict must be parameters, buffers, or what modules keep elsewhere, but "
                f"'{name}' is made anew by each call, so that values cannot be put back into it. Register it as a "
                "buffer, or give it by get_extra_state."
            )


def _memory(value: Any) -> int:
    """What tells whether two tensors are one."""
    if isinstance(value, ShardedTensor):
        return id(value.shard_storage)
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.layout == torch.strided:
        return value.data_ptr()
    return id(value)


def encode_state(values: Mapping[Any, Any], where: str, keep: Any) -> dict[str, Any]:
    """An optimizer's state of one parameter, with the names of its tensors."""
    wrong = next((key for key in values if not isinstance(key, str)), None)
    if wrong is not None:
        raise CheckpointError(f"{where}: the keys of its state must be texts, but one is {wrong!r:.80}. Name it.")
    return {key: encode(value, f"{where}.{key}", keep) for key, value in values.items()}


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise unless a file can hold a tensor.

    Raises:
        CheckpointError: It is sparse or quantized, or its dtype has no name there.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{name}: a checkpoint holds dense tensors, but this one is {tensor.layout}, {tensor.dtype}. Convert it, "
            "or keep it out of the state_dict."
        )
    dtype_name(name, dtype_of(tensor))


def dtype_of(tensor: Tensor) -> torch.dtype:
    """The dtype that a tensor's values are kept in."""
    return tensor.storage_dtype if isinstance(tensor, ShardedTensor) else tensor.dtype


def _is_cut(tensor: Tensor) -> bool:
    return isinstance(tensor, ShardedTensor) and not tensor.is_view


def _local(name: str, tensor: Tensor) -> Tensor:
    """This rank's values as a plain tensor, without a copy where there are such."""
    if _is_cut(tensor):
        return exact_values(tensor.shard_storage.resolve(), name)  # type: ignore[attr-defined]
    with torch.no_grad():
        plain = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return plain.detach()


def _piece(name: str, local: Tensor, part: Part, is_shard: bool = False) -> Piece | None:
    box = part.written_here(name, local.dtype.itemsize)
    if box is None:
        return None
    offsets = tuple(o + s.start for o, s in zip(part.offsets, box, strict=True))
    return Piece(name, part.shape, offsets, local.detach()[box] if box else local.detach(), is_shard)
