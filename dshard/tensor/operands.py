"""Operands and results of operations: sharded tensors in, plain tensors out that answer as DTensors do."""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from dshard.compiling import is_between_graphs
from dshard.tensor.meshes import full_shape, part_of
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.storage import flat, is_stepping, kinds_of_tensors, tensors_in
from dshard.tensor.traced import TracedSource, is_traced
from dshard.tensor.views import bytes_of

_TO = Tensor.to


class FullResult(Tensor):
    """A plain tensor that an operation on sharded tensors gave: its full value, which every rank holds.

    Programs written for FSDP2 ask such a value for its `full_tensor()`. What is computed of nothing else is one, too;
    beside a tensor of this rank it is any tensor.
    """

    device_mesh: DeviceMesh  # of the sharded tensors that it comes of

    @classmethod
    def of(cls, value: Tensor, mesh: DeviceMesh) -> Tensor:
        """A plain tensor, or one that answers otherwise, as one that answers so; anything else as it is."""
        if type(value) is not Tensor:
            if type(value) is cls or not isinstance(value, FullResult):
                return value
            value = _plain(value)
        result = value.as_subclass(cls)
        result.device_mesh = mesh
        return result

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Replicated over each dim of the mesh."""
        return (Replicate(),) * self.device_mesh.ndim

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The value, as a plain tensor. Communicates nothing.

        Args:
            grad_placements: Accepted for DTensor's sake; has no meaning here.
        """
        return self.as_subclass(Tensor)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """The value, all of which every rank holds. Communicates nothing.

        Args:
            grad_placements: Accepted for DTensor's sake; has no meaning here.
        """
        return self.as_subclass(Tensor)

    def redistribute(self, device_mesh: DeviceMesh | None = None, placements: Any = None, **_: Any) -> DTensor:
        """The value as a DTensor in some placements, by default replicated. Communicates nothing.

        Args:
            device_mesh: By default that of the sharded tensors that it comes of.
            placements: One per dim of the mesh.
        """
        mesh = device_mesh if device_mesh is not None else self.device_mesh
        wanted = placements if placements is not None else (Replicate(),) * mesh.ndim
        return distribute_tensor(self.as_subclass(Tensor), mesh, wanted, src_data_rank=None)

    def __format__(self, format_spec: str) -> str:
        return format(self.as_subclass(Tensor), format_spec)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        plain = self.as_subclass(Tensor)
        memo.setdefault(id(memo), []).append(plain)  # as `copy` does: known by its id, it must live as long
        return plain.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if (func is _TO and result is args[0]) or torch.compiler.is_compiling():  # so torch's clipping asks each norm
            return result
        operands = (*args, *kwargs.values()) if kwargs else args
        kinds = kinds_of_tensors(operands)
        if not all(issubclass(kind, FullResult) for kind in kinds):
            return mapped(result, _plain)
        kind = AgreedTensor if all(issubclass(kind, AgreedTensor) for kind in kinds) else FullResult
        if type(result) is kind or not kinds:
            return result  # it is one of the operands
        return answering(result, kind, next(tensors_in(operands)).device_mesh)


class AgreedTensor(FullResult):
    """One that is equal on all ranks: of sharded tensors alone, by operations without a number of this rank's own."""


def mapped(result: Any, change: Callable[[Tensor], Any]) -> Any:
    """A result of an operation with every tensor in it replaced by `change` of it."""
    if isinstance(result, Tensor):
        return change(result)
    if type(result) in (list, tuple):
        return type(result)([change(each) if isinstance(each, Tensor) else mapped(each, change) for each in result])
    return result


def answering(result: Any, kind: type[FullResult], mesh: DeviceMesh) -> Any:
    """The tensors in a result as tensors of a kind."""
    if is_between_graphs():
        return mapped(result, _plain)
    return mapped(result, partial(kind.of, mesh=mesh))


def _plain(value: Tensor) -> Tensor:
    return value.as_subclass(Tensor) if isinstance(value, FullResult) else value


_SMALL = 1024  # elements of an operand of a write that ranks compare


def map_tensors(value: Any, change: Callable[[ShardedTensor], Any]) -> Any:
    """`value` with every ShardedTensor in it, also in lists, tuples and dicts, replaced by `change` of it.

    Other DTensors, as torch's distributed state dicts bring them, give their full values.
    """
    if isinstance(value, ShardedTensor):
        return change(value)
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(v, change) for v in value])
    if isinstance(value, dict):
        return {name: map_tensors(v, change) for name, v in value.items()}
    return value


def materialize(value: Any) -> Any:
    """`value` with every ShardedTensor in it replaced by its full value."""
    return map_tensors(value, ShardedTensor.materialize)


def is_recorded(*tensors: Any) -> bool:
    """Whether autograd records an operation on these tensors, or runs it for a recorded one.

    Such operations take full tensors: what other ranks' slices would be combined with is this rank's own data.
    """
    if not torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
        return False
    return any(isinstance(t, ShardedTensor) and t.requires_grad for t in tensors)


def lies_like(tensor: ShardedTensor, other: ShardedTensor) -> bool:
    """Whether two tensors are cut the same way over the same ranks, and neither is a view."""
    if tensor._view is not None or other._view is not None:
        return False
    layout, wanted = tensor.shard_storage.layout, other.shard_storage.layout
    if layout is not wanted and layout != wanted:
        return False
    group, among = tensor.shard_group, other.shard_group
    return group is among or group.process_group is among.process_group


def common_layout(values: Sequence[Any]) -> ShardedTensor | None:
    """A tensor whose layout all of `values` share, if an elementwise operation on the shards is right; else None.

    It is not where autograd records the operation, or where a parameter means its value in another dtype. Plain tensors
    hold this rank's own data, so their presence means no; but the 0-d ones of an optimizer's step, and of a graph, are
    scalars that all ranks share: a step count or learning rate, most often.
    """
    if is_recorded(*values):
        return None
    found: ShardedTensor | None = None
    has_numbers = False
    for value in values:
        if isinstance(value, ShardedTensor):
            if value._view is not None or (found is not None and not lies_like(value, found)):
                return None
            found = found if found is not None else value
        elif isinstance(value, Tensor):
            if value.dim():
                return None
            has_numbers = True
    if found is None or (has_numbers and not is_traced(found) and not is_stepping()):
        return None
    return None if found.has_compute_dtype and found.compute_dtype() is not None else found


def in_graph(made: ShardedTensor, source: ShardedTensor, *, is_given: bool = False) -> ShardedTensor:
    """A tensor made of another one, which is gathered in the graph if that is.

    Args:
        made: The same layout as `source`.
        source: The other one.
        is_given: Whether the graph takes its memory, rather than makes it.
    """
    if is_traced(source):
        made.gather_source, made.gather_slot = TracedSource(made, is_given=is_given), 0
    return made


def writable(target: ShardedTensor) -> Tensor:
    """This rank's shard, to be written to now; ask last, for operands may have to be gathered."""
    source = target.gather_source
    return source.writable() if isinstance(source, TracedSource) else target.shard_storage.writable()


def note_write(target: ShardedTensor) -> None:
    """Count a write to a shard; a graph was told of it by `writable`."""
    if not is_traced(target):
        target.shard_storage.note_write()


def note_writes(targets: Sequence[ShardedTensor]) -> None:
    """Count writes to the shards of a list, and to the tensors: autograd does not count writes to lists."""
    storages = [target.shard_storage for target in targets]
    if not is_stepping():
        storages = [storage for storage, target in zip(storages, targets, strict=True) if not is_traced(target)]
        for storage in storages:
            storage.num_writes += 1
    increment_version([*(storage.resolve() for storage in storages), *targets])


def fingerprint(value: Any) -> int:
    """A checksum of a plain operand on CPU, for small ones one that knows the order; 0 for all else."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.device.type != "cpu":
        return 0
    if value.layout != torch.strided or value.is_conj() or value.is_neg() or value.is_complex():
        return 0
    if value.numel() > _SMALL:
        return int(hash_bits(value.detach()).item()) if (hash_bits := getattr(torch, "hash_tensor", None)) else 0
    return zlib.crc32(bytes(bytes_of(value).tolist()))


def numbers_in(values: Sequence[Any]) -> tuple[Any, ...]:
    """Numbers that an operation was given outside of an optimizer's step, and the tags of its sharded operands.

    They may differ between ranks without anybody noticing, so what is computed with them is signed.
    """
    if is_stepping():
        return ()
    items = list(flat(values))
    if any(type(v) in SHARDED and is_traced(v) for v in items):
        return ()
    numbers = tuple(v for v in items if type(v) in (int, float, complex)) + tuple(filter(None, map(fingerprint, items)))
    tags = tuple(v.shard_storage.tag for v in items if isinstance(v, ShardedTensor) and v.shard_storage.tag)
    return (*numbers, *tags)


def cut_to(value: Any, target: ShardedTensor) -> Any:
    """The part of an operand that meets this rank's shard of `target`, broadcast to it where it has dims.

    Args:
        value: A scalar, a plain tensor that all ranks hold alike, or a ShardedTensor; not a list.
        target: No view.
    """
    if value is target:
        return target.shard_storage.resolve()
    if isinstance(value, ShardedTensor):
        if lies_like(value, target):
            return value.shard_storage.resolve()
        value = value.materialize()
    elif isinstance(value, DTensor):
        if value.device_mesh == target.device_mesh and value.placements == target.placements:
            return value.to_local()
        value = value.full_tensor()
    if not isinstance(value, Tensor) or value.dim() == 0:
        return beside(value, target)
    layout = target.shard_layout
    return part_of(value.expand(full_shape(layout)), layout, target.shard_group.rank)


def beside(value: Any, target: Any) -> Any:
    """A scalar that meets the shard of `target`, which torch takes from another device only if that is the CPU."""
    is_scalar = isinstance(value, Tensor) and not value.dim() and value.device.type != "cpu"
    return value.to(target.storage_device) if is_scalar and isinstance(target, ShardedTensor) else value
