"""Operations that write to sharded tensors: in place, into `out=`, and the foreach operations of optimizer steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import increment_version

from dshard import collectives
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import UnsupportedOpError
from dshard.tensor.meshes import groups_of, joined_group, part_of, tp_layout_of, whole
from dshard.tensor.operands import (
    beside,
    cut_to,
    lies_like,
    map_tensors,
    materialize,
    numbers_in,
    prepare_writes,
    takes_own_data,
)
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.storage import is_stepping
from dshard.tensor.table import Args, Kwargs, mutated_arguments
from dshard.tensor.views import apply_steps, empty_as

aten = torch.ops.aten
_TRANSPOSING = {aten.t_.default: aten.t.default, aten.transpose_.default: aten.transpose.int}
_OVERWRITES = frozenset({aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor})


def pointwise_inplace(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """An elementwise operation in place: on this rank's shard, with the other operands cut to it."""
    target = args[0]
    if not isinstance(target, ShardedTensor):
        return func(target, *materialize(args[1:]), **materialize(kwargs))
    if func is aten.add_.Tensor and _accumulate(target, args[1], kwargs):
        return target
    operands = (*args[1:], *kwargs.values())
    if takes_own_data(target, operands):
        target.base.become_whole()
    _sign(func, target, operands)
    if target._view is not None:
        _write_through(target, lambda view: func(view, *materialize(args[1:]), **materialize(kwargs)))
        return target
    others, named = [cut_to(a, target) for a in args[1:]], {k: cut_to(v, target) for k, v in kwargs.items()}
    func(target.shard_storage.writable(), *others, **named)  # asked last: an operand may have been gathered
    target.shard_storage.note_write()
    return target


def _sign(func: OpOverload, target: ShardedTensor, operands: Sequence[Any]) -> None:
    """Have the next gather compare the numbers and indices that a write was given on each rank."""
    if func in _OVERWRITES and target._view is None:
        target.shard_storage.tag = 0
    facts = numbers_in(operands)
    steps = () if target._view is None or is_stepping() else tuple(repr(s.args) for s in target.view_steps)
    if facts or steps:
        target.shard_storage.sign(*facts, *steps)


def _accumulate(target: ShardedTensor, other: Any, kwargs: Kwargs) -> bool:
    """Whether an addition of gradients is taken care of without waiting for one that is in flight."""
    if kwargs or not isinstance(other, ShardedTensor) or not other.shard_storage.is_pending:
        return False
    if other.is_added_up and target.shard_storage.awaits(other.shard_storage):
        return True  # it was added to the buffer that is still open
    if not lies_like(target, other) or other.shard_storage is target.shard_storage:
        return False
    target.shard_storage.add_later(other.shard_storage)
    return True


def _buffer_of(base: ShardedTensor) -> Tensor:
    """Memory for a full value, as it is kept."""
    return torch.empty_strided(base.shape, base.stride(), dtype=base.storage_dtype, device=base.storage_device)


def _write_through(target: ShardedTensor, change: Callable[[Tensor], Any]) -> None:
    """Write through a chain of views, or to a base, by way of a buffer of the base's full shape.

    Args:
        target: What is written to.
        change: Writes to the plain counterpart of `target`, each element from itself and its operands alone: the buffer
            holds no elements of other ranks.
    """
    base = target.base
    shard = base.shard_storage.resolve()
    buffer = _buffer_of(base).zero_()
    own = part_of(buffer, base.shard_layout, base.shard_group.rank)
    own.copy_(shard)
    change(apply_steps(buffer, target.view_steps))
    base.shard_storage.writable().copy_(own)
    base.shard_storage.note_write()


def write(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Any other operation that writes: on gathered copies, of which each rank keeps its part."""
    mutated = mutated_arguments(func)
    targets: dict[int, tuple[ShardedTensor, Tensor]] = {}  # one buffer per base, however many views of it are written

    operands = (*args, *kwargs.values())

    def private(tensor: ShardedTensor) -> Tensor:
        increment_version(tensor)  # autograd does not count writes to lists
        base = tensor.base
        if takes_own_data(tensor, operands):
            base.become_whole()
        _sign(func, tensor, operands)
        if id(base.shard_storage) not in targets:
            targets[id(base.shard_storage)] = (base, _buffer_of(base).copy_(whole(base.full_in())))
        _, buffer = targets[id(base.shard_storage)]
        return apply_steps(buffer, tensor.view_steps)

    new_args = [map_tensors(a, private) if i in mutated else materialize(a) for i, a in enumerate(args)]
    new_kwargs = {k: map_tensors(v, private) if k in mutated else materialize(v) for k, v in kwargs.items()}
    result = func(*new_args, **new_kwargs)
    for base, buffer in targets.values():
        shard = base.shard_storage.writable()
        shard.copy_(part_of(buffer, base.shard_layout, base.shard_group.rank))
        base.shard_storage.note_write()
    return _returned(func, args, kwargs, result)


def _returned(func: OpOverload, args: Args, kwargs: Kwargs, result: Any) -> Any:
    """The operation's results, with those that are its own arguments given back as the caller passed them."""
    returns = func._schema.returns
    if not returns:
        return None
    results = [result] if len(returns) == 1 else list(result)
    for k, ret in enumerate(returns):
        if ret.alias_info is None:
            continue
        for i, arg in enumerate(func._schema.arguments):
            if arg.alias_info is not None and arg.alias_info.before_set == ret.alias_info.before_set:
                results[k] = kwargs[arg.name] if arg.name in kwargs else args[i]
    return results[0] if len(returns) == 1 else tuple(results)


def foreach_inplace(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """An elementwise operation over lists in place, and the fused optimizer steps: on shards, index by index."""
    targets = args[0]
    if any(isinstance(t, ShardedTensor) and t._view is not None for t in targets):
        return write(func, args, kwargs)

    mutated = mutated_arguments(func)
    copies: list[tuple[Tensor, Tensor]] = []  # of what is written to

    def local(place: int | str, arg: Any) -> Any:
        if not isinstance(arg, (list, tuple)) or not any(isinstance(x, Tensor) for x in arg):
            return beside(materialize(arg), targets[0])
        pairs = list(zip(arg, targets, strict=True))
        found = [cut_to(x, t) if isinstance(t, ShardedTensor) else materialize(x) for x, t in pairs]
        like = [_lying_like(x, t) for x, (_, t) in zip(found, pairs, strict=True)]
        if place in mutated:
            copies.extend((x, copy) for x, copy in zip(found, like, strict=True) if x is not copy)
        return like

    for index, target in enumerate(targets):
        if isinstance(target, ShardedTensor):
            operands = [a[index] if isinstance(a, (list, tuple)) and len(a) == len(targets) else a for a in args[1:]]
            operands += kwargs.values()
            if takes_own_data(target, operands):
                target.become_whole()
            _sign(func, target, operands)
    places, names = [local(i, a) for i, a in enumerate(args)], {k: local(k, v) for k, v in kwargs.items()}
    prepare_writes(func, args, kwargs)  # asked last: an operand may have been gathered
    func(*places, **names)
    for part, copy in copies:
        part.copy_(copy)
    written = [args[i] if isinstance(i, int) else kwargs[i] for i in mutated]
    tensors = [x for items in written for x in items if isinstance(x, ShardedTensor)]
    if tensors:
        for tensor in tensors:
            tensor.shard_storage.note_write()
        increment_version(tensors)  # autograd does not count writes to lists
    return None


def _lying_like(part: Any, target: Any) -> Any:
    """An operand with the strides of a target's shard: fused steps take them for granted, and do not look."""
    if not isinstance(target, ShardedTensor):
        return part
    shard = target.shard_storage.resolve()
    if not isinstance(part, Tensor) or part.shape != shard.shape or part.stride() == shard.stride():
        return part
    return torch.empty_like(shard, dtype=part.dtype).copy_(part)


def unscale(func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """GradScaler's unscale: on shards; all ranks agree on whether a gradient was infinite or NaN."""
    grads, found_inf, inv_scale = args
    local = [
        g.shard_storage.resolve() if isinstance(g, ShardedTensor) and g._view is None else materialize(g) for g in grads
    ]
    func(local, found_inf, inv_scale, **kwargs)
    sharded = [g for g in grads if isinstance(g, ShardedTensor)]
    groups = {id(group.process_group): group for g in sharded for group in groups_of(g)}
    for group in groups.values():
        found_inf.copy_(
            collectives.all_reduce([found_inf], group, ReduceOp.MAX, label="unscale", everywhere=True).wait()[0]
        )
    if sharded:
        for grad in sharded:
            grad.shard_storage.note_write()
        increment_version(sharded)


def renorm(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """`Embedding(max_norm=...)`: ranks look up different rows, so all rows that any rank looks up are renormed."""
    target, indices, *options = args
    if not isinstance(target, ShardedTensor):
        return func(target, materialize(indices), *options)
    if tp_layout_of(target.shard_layout) is not None:
        raise UnsupportedOpError(
            f"{target.name}: Embedding(max_norm=...) renormalizes whole rows, but this weight is a DTensor with "
            f"placements {target.placements}. Leave max_norm out, or leave the embedding out of parallelize_module."
        )
    used = torch.zeros(target.shape[0], dtype=torch.uint8, device=target.shard_group.device_type)
    used[indices.reshape(-1)] = 1
    label = f"rows of {target.name}"
    anywhere = collectives.all_reduce([used], target.shard_group, ReduceOp.MAX, label=label, everywhere=True).wait()[0]
    rows = anywhere.nonzero().reshape(-1).to(target.storage_device, indices.dtype)
    write(func, (target, rows, *options), kwargs)
    return target


def random_inplace(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """`normal_` and its kind: every rank draws what the unsharded tensor would get, and keeps its part."""
    target = args[0]
    if not isinstance(target, ShardedTensor):
        return func(target, *materialize(args[1:]), **materialize(kwargs))
    with _agreed_generator(_drawers(target), target.device, kwargs.get("generator")):
        _write_through(target, lambda view: func(view, *materialize(args[1:]), **materialize(kwargs)))
    return target


def random_factory(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """`rand_like` and its kind: a tensor of the same layout that holds what the unsharded tensor would get."""
    source = args[0]
    with _agreed_generator(_drawers(source), source.device, kwargs.get("generator")):
        full = func(empty_as(source), *materialize(args[1:]), **kwargs)
    if source._view is not None:
        return full
    return source.like(part_of(full, source.shard_layout, source.shard_group.rank).clone())


def _drawers(tensor: ShardedTensor) -> ShardGroup:
    """The ranks that must draw the same for a tensor; those of another one where `new_tensor` said so."""
    return joined_group(tensor.__dict__.get("_draws_like", tensor))


@contextmanager
def _agreed_generator(group: ShardGroup, device: torch.device, generator: torch.Generator | None) -> Iterator[None]:
    """Let every rank draw from the random state of the group's rank 0.

    A rank whose own state differed (a seed per rank, for dropout) gets it back afterwards; one whose state was the same
    goes on from where the draw ended, as the unsharded program does.

    Communicates:
        A broadcast of the generator's state, about 5 KB on CPU and 16 bytes on CUDA.
    """
    generator = generator if generator is not None else _default_generator(device)
    if generator is None or group.world_size == 1:
        yield
        return
    own = generator.get_state()
    wire = own.to(group.device_type)
    agreed = collectives.broadcast([wire], group, label="random state", everywhere=True).wait()[0].cpu()
    is_own = torch.equal(agreed, own)
    if not is_own:
        generator.set_state(agreed)
    try:
        yield
    finally:
        if not is_own:
            generator.set_state(own)


def _default_generator(device: torch.device) -> torch.Generator | None:
    """The generator that random operations on `device` use; None on meta, where nothing is drawn."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return None


def _is_whole_temporary(tensor: ShardedTensor) -> bool:
    """Whether it is no parameter, gradient or optimizer state, and each rank holds all of it."""
    return not tensor.is_view and tensor.shard_layout.dim is None and not tensor.shard_storage.is_shared


def refuse(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Operations that would re-shape or re-seat the tensor itself; a whole temporary may be transposed."""
    target = args[0]
    if isinstance(target, ShardedTensor) and func in _TRANSPOSING and _is_whole_temporary(target):
        transposed = _TRANSPOSING[func](target.shard_storage.resolve(), *args[1:])
        target.data = ShardedTensor.shard(transposed, target.device_mesh, None, name=target.name)
        target.shard_storage.is_shared = False
        return target
    names = [a.name for a in args if isinstance(a, ShardedTensor)]
    raise UnsupportedOpError(
        f"{names[0] if names else 'a ShardedTensor'}: {func} changes the shape or memory of the tensor object itself, "
        "but a sharded tensor keeps both. Use the operation without the trailing underscore, or copy_()."
    )


def _shard_like(value: ShardedTensor, target: ShardedTensor) -> Tensor | None:
    """The shard of `value` if it lies as `target` does and is at hand, else None."""
    storage, own = value.shard_storage, target.shard_storage
    if value._view is not None or storage.is_pending:
        return None
    if storage.layout is not own.layout and storage.layout != own.layout:
        return None
    if (
        value.shard_group is not target.shard_group
        and value.shard_group.process_group is not target.shard_group.process_group
    ):
        return None
    return storage.tensor


def _local_arguments(args: Args, target: ShardedTensor) -> list[Any] | None:
    """`args` with shards in the place of sharded tensors; None if one lies otherwise."""
    local = []
    for value in args:
        if type(value) in SHARDED:
            value = _shard_like(value, target)
            if value is None:
                return None
        elif isinstance(value, Tensor) and value.dim() > 0:
            return None
        local.append(value)
    return local


def step_pointwise_inplace(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """`add_`, `lerp_`, `addcdiv_` and their kind; NotImplemented for the general way."""
    target = args[0]
    if type(target) not in SHARDED:
        return NotImplemented
    local = _local_arguments(args, target)
    if local is None:
        return NotImplemented
    for value in kwargs.values():
        if isinstance(value, Tensor):
            return NotImplemented
    local[0] = target.shard_storage.writable()
    func(*local, **kwargs)
    increment_version(local[0])
    return target


def step_pointwise(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """`sqrt`, `div` and their kind; NotImplemented for the general way."""
    target = next((a for a in args if type(a) in SHARDED), None)
    if target is None or any(isinstance(v, Tensor) for v in kwargs.values()):
        return NotImplemented
    local = _local_arguments(args, target)
    if local is None:
        return NotImplemented
    result = func(*local, **kwargs)
    return target.like(result) if isinstance(result, Tensor) else NotImplemented


def step_foreach_inplace(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """`_foreach_mul_`, `_fused_adamw_` and their kind; NotImplemented for the general way."""
    targets = args[0]
    new_args: list[Any] = []
    for arg in args:
        if not isinstance(arg, (list, tuple)) or not arg or not isinstance(arg[0], Tensor):
            if isinstance(arg, ShardedTensor):
                return NotImplemented
            new_args.append(arg)
            continue
        local = []
        for value, target in zip(arg, targets, strict=True):
            if type(value) in SHARDED:
                shard = _shard_like(value, target) if type(target) in SHARDED else None
                if shard is None:
                    return NotImplemented
                local.append(shard)
            elif type(target) in SHARDED and value.dim() > 0:
                return NotImplemented
            else:
                local.append(value)
        new_args.append(local)
    for value in kwargs.values():
        if isinstance(value, (list, tuple, ShardedTensor)):
            return NotImplemented
    prepare_writes(func, args, kwargs)
    func(*new_args, **kwargs)
    _note_writes(func, args, new_args)
    return None


def _note_writes(func: OpOverload, args: Args, new_args: list[Any]) -> None:
    """Count the writes to every list that `func` changes."""
    for k, argument in enumerate(func._schema.arguments[: len(args)]):
        if argument.alias_info is None or not argument.alias_info.is_write or not args[k]:
            continue
        written = [t for t in args[k] if type(t) in SHARDED]
        increment_version(new_args[k])
        if written:
            increment_version(written)
