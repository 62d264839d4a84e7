"""Operands and results of operations: sharded tensors in, plain tensors out that answer as DTensors do."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from dshard.compiling import is_between_graphs
from dshard.tensor.meshes import full_shape, part_of
from dshard.tensor.sharded_tensor import ShardedTensor
from dshard.tensor.storage import is_stepping, tensors_in
from dshard.tensor.table import Args, Kwargs, mutated_arguments
from dshard.tensor.views import bytes_of


class FullResult(Tensor):
    """A plain tensor that an operation on sharded tensors gave: its full value, which every rank holds.

    Programs written for FSDP2 ask such a value for its `full_tensor()`. What is computed of nothing else is one, too;
    beside a tensor of this rank it is any tensor.
    """

    device_mesh: DeviceMesh  # of the sharded tensors that it comes of

    @classmethod
    def of(cls, value: Tensor, mesh: DeviceMesh) -> Tensor:
        """A plain tensor that answers so; anything else as it is."""
        if type(value) is not Tensor:
            return value
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
        copied: Tensor = plain.__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():
            return result
        tensors = list(tensors_in((args, list((kwargs or {}).values()))))
        if not all(isinstance(each, FullResult) for each in tensors):
            return _plain(result)
        kind = AgreedTensor if all(isinstance(each, AgreedTensor) for each in tensors) else FullResult
        return answering(result, kind, tensors[0].device_mesh) if tensors else result


class AgreedTensor(FullResult):
    """One that is equal on all ranks: of sharded tensors alone, by operations without a number of this rank's own."""


def answering(result: Any, kind: type[FullResult], mesh: DeviceMesh) -> Any:
    """The tensors in a result as tensors of a kind."""
    if is_between_graphs():
        return _plain(result)
    if isinstance(result, Tensor):
        return kind.of(result.as_subclass(Tensor) if isinstance(result, FullResult) else result, mesh)
    if type(result) in (list, tuple):
        return type(result)(answering(each, kind, mesh) for each in result)
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, FullResult):
        return value.as_subclass(Tensor)
    if type(value) in (list, tuple):
        return type(value)(_plain(each) for each in value)
    return value


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
    return (
        tensor._view is None
        and other._view is None
        and tensor.shard_layout == other.shard_layout
        and tensor.shard_group.process_group is other.shard_group.process_group
    )


def common_layout(values: Sequence[Any], *, has_numbers: bool = False) -> ShardedTensor | None:
    """A tensor whose layout all of `values` share, if an elementwise operation on the shards is right; else None.

    Plain tensors hold this rank's own data, so their presence means no; but the 0-d ones of an optimizer's step, and of
    a graph (`has_numbers`), are scalars that all ranks share: a step count or learning rate, most often.
    """
    found: ShardedTensor | None = None
    for value in values:
        if isinstance(value, ShardedTensor):
            if value._view is not None or (found is not None and not lies_like(value, found)):
                return None
            found = found if found is not None else value
        elif isinstance(value, Tensor) and (value.dim() > 0 or not (has_numbers or is_stepping())):
            return None
    return found


def takes_own_data(target: ShardedTensor, operands: Sequence[Any]) -> bool:
    """Whether a write puts data of this rank alone into a temporary, which then has to be whole."""
    base = target.base
    if base.shard_storage.is_shared or base.shard_layout.dim is None or is_stepping():
        return False
    return is_recorded(target, *operands) or any(_has_plain(v) for v in operands)


def fingerprint(value: Any) -> int:
    """A checksum of a plain operand on CPU, for small ones one that knows the order; 0 for all else."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.device.type != "cpu":
        return 0
    if value.layout != torch.strided or value.is_conj() or value.is_neg() or value.is_complex():
        return 0
    if value.numel() > _SMALL:
        return int(hash_bits(value.detach()).item()) if (hash_bits := getattr(torch, "hash_tensor", None)) else 0
    return zlib.crc32(bytes(bytes_of(value).tolist()))


def _has_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_plain(v) for v in value)
    return isinstance(value, Tensor) and not isinstance(value, (ShardedTensor, AgreedTensor))


def numbers_in(values: Sequence[Any]) -> tuple[Any, ...]:
    """Numbers that an operation was given outside of an optimizer's step, and the tags of its sharded operands.

    They may differ between ranks without anybody noticing, so what is computed with them is signed.
    """
    if is_stepping():
        return ()
    flat = [x for v in values for x in (v if isinstance(v, (list, tuple)) else (v,))]
    numbers = tuple(v for v in flat if type(v) in (int, float, complex)) + tuple(filter(None, map(fingerprint, flat)))
    tags = tuple(v.shard_storage.tag for v in flat if isinstance(v, ShardedTensor) and v.shard_storage.tag)
    return (*numbers, *tags)


def cut_to(value: Any, target: ShardedTensor) -> Any:
    """The part of an operand that meets this rank's shard of `target`, broadcast to it where it has dims.

    Args:
        value: A scalar, a plain tensor that all ranks hold alike, or a ShardedTensor; not a list.
        target: No view.
    """
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


def prepare_writes(func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Have nobody read where an operation over lists is about to write."""
    for place in mutated_arguments(func):
        written = kwargs.get(place, ()) if isinstance(place, str) else args[place] if place < len(args) else ()
        for target in written:
            if isinstance(target, ShardedTensor):
                target.shard_storage.writable()


def beside(value: Any, target: Any) -> Any:
    """A scalar that meets the shard of `target`, which torch takes from another device only if that is the CPU."""
    if (
        isinstance(value, Tensor)
        and value.dim() == 0
        and value.device.type != "cpu"
        and isinstance(target, ShardedTensor)
    ):
        return value.to(target.storage_device)
    return value


def unwrap_result(result: Any, wrap: Callable[[Tensor], Any]) -> Any:
    """`result` with every tensor in it replaced by `wrap` of it."""
    if isinstance(result, Tensor):
        return wrap(result)
    if isinstance(result, (list, tuple)):
        return type(result)(unwrap_result(r, wrap) for r in result)
    return result
