"""Operations on sharded tensors and plain DTensors that lie alike: the latter are taken as the former.

Optimizers make states so: `DTensor.from_local(zeros, param.device_mesh, param.placements)`.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Replicate

from dshard.tensor.shard_storage import ShardStorage
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.table import Args, Kwargs, mutated_arguments

_Run = Callable[[OpOverload, Args, Kwargs], Any]


def run_beside_dtensors(run: _Run, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation that has a plain DTensor among its operands, at any place.

    One of the mesh and placements of a sharded operand is taken as sharded. Where another one is written to, the
    sharded operands are taken as DTensors, which torch lays out as it does.

    Args:
        run: Runs operations on sharded tensors.
        func: The operation.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    taken: dict[int, ShardedTensor] = {}
    originals: dict[int, DTensor] = {}
    sharded: list[Any] = [value for value in _tensors((args, list(kwargs.values()))) if type(value) in SHARDED]
    for group in _together((*args, *kwargs.values())):
        beside: list[Any] = [value for value in group if type(value) in SHARDED] or sharded
        for value in group:
            if type(value) is DTensor and id(value) not in taken:
                alike = _taken_as(value, beside)
                if alike is not None:
                    taken[id(value)], originals[id(alike)] = alike, value
    if not taken and not any(value.device_mesh == other.device_mesh for value in _dtensors(args) for other in sharded):
        return run(func, args, kwargs)  # of tensor parallelism
    new_args = tuple(_replaced(value, taken) for value in args)
    new_kwargs = {name: _replaced(value, taken) for name, value in kwargs.items()}
    written = [new_args[i] if isinstance(i, int) else new_kwargs.get(i) for i in mutated_arguments(func)]
    if any(True for _ in _dtensors(written)):
        as_dtensors = {id(value): _as_dtensor(value) for value in sharded}
        result = func(*_replaced(args, as_dtensors), **_replaced(kwargs, as_dtensors))
        for value in _tensors(written):
            if isinstance(value, ShardedTensor):
                value.shard_storage.note_write()
        return result
    result = run(func, new_args, new_kwargs)
    return originals.get(id(result), result)


def _together(values: Args) -> Iterator[tuple[Any, ...]]:
    """The operands that meet: all that are no lists, and the items of lists at each place."""
    yield tuple(value for value in values if isinstance(value, Tensor))
    lists = [value for value in values if isinstance(value, (list, tuple)) and any(map(_is_tensor, value))]
    yield from zip(*lists, strict=True) if len(set(map(len, lists))) == 1 else ()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _taken_as(value: DTensor, sharded: list[ShardedTensor]) -> ShardedTensor | None:
    """A DTensor as a sharded tensor over the same memory, if it lies as one of some does."""
    local = value._local_tensor
    for other in sharded:
        spec = other._spec
        if other._view is not None or value.device_mesh != spec.mesh or value.placements != spec.placements:
            continue
        if local.shape == other.shard_storage.resolve().shape:
            storage = ShardStorage(local, other.shard_layout, is_shared=True)
            return other.like(storage, dtype=value.dtype)
    return None


def _as_dtensor(value: ShardedTensor) -> DTensor:
    """A sharded tensor as a plain DTensor over the same memory; of a view, one of its full value."""
    if value._view is not None:
        whole: DTensor = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
        return whole
    meta = value._spec.tensor_meta
    assert meta is not None
    local = value.shard_storage.resolve()
    return DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=meta.shape, stride=meta.stride
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _dtensors(value: Any) -> Iterator[DTensor]:
    return (each for each in _tensors(value) if type(each) is DTensor)


def _replaced(value: Any, others: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(each, others) for each in value)
    if isinstance(value, dict):
        return {name: _replaced(each, others) for name, each in value.items()}
    return value
