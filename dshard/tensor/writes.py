"""Operations that write to sharded tensors: in place, into `out=`, and the foreach operations of optimizer steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import return_and_correct_aliasing

from dshard import collectives
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import UnsupportedOpError
from dshard.tensor.meshes import groups_of, joined_group, part_of, tp_layout_of, whole
from dshard.tensor.operands import (
    AgreedTensor,
    beside,
    cut_to,
    is_recorded,
    lies_like,
    map_tensors,
    materialize,
    note_write,
    note_writes,
    numbers_in,
    writable,
)
from dshard.tensor.sharded_tensor import OffloadedShardedTensor, ShardedTensor
from dshard.tensor.storage import is_stepping, tensors_in
from dshard.tensor.table import Args, Kwargs, mutated_arguments
from dshard.tensor.traced import is_traced
from dshard.tensor.views import apply_steps, empty_as

aten = torch.ops.aten
_TRANSPOSING = {aten.t_.default: aten.t.default, aten.transpose_.default: aten.transpose.int}
_OVERWRITES = frozenset({aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor})


def pointwise_inplace(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """An elementwise operation in place: on this rank's shard, with the other operands cut to it."""
    target = args[0]
    if not isinstance(target, ShardedTensor):
        return func(target, *materialize(args[1:]), **materialize(kwargs))
    if target._view is not None and is_traced(target):
        return write(func, args, kwargs)  # which a compiler sees as one change of a copy
    if func is aten.add_.Tensor and _accumulate(target, args[1], kwargs):
        return target
    if not is_stepping():
        _prepare(func, target, (*args[1:], *kwargs.values()))
    if target._view is not None:
        _write_through(target, lambda view: func(view, *materialize(args[1:]), **materialize(kwargs)))
        return target
    others, named = [cut_to(a, target) for a in args[1:]], {k: cut_to(v, target) for k, v in kwargs.items()}
    func(writable(target), *others, **named)
    note_write(target)
    return target


def _prepare(
    func: OpOverload, target: ShardedTensor, operands: Sequence[Any], numbers: tuple[Any, ...] | None = None
) -> None:
    """Ahead of a write that is no optimizer's: a temporary that takes data of this rank alone becomes whole.

    The next gather compares the numbers and indices that the write was given on each rank.

    Args:
        func: The operation.
        target: What it writes to.
        operands: The others.
        numbers: In them; looked up if not given.
    """
    base = target.base
    if not base.shard_storage.is_shared and base.shard_layout.dim is not None:
        has_plain = any(not isinstance(t, (ShardedTensor, AgreedTensor)) for t in tensors_in(operands))
        if has_plain or is_recorded(target, *operands):
            base.become_whole()
    if is_traced(target):
        return
    if func in _OVERWRITES and target._view is None:
        target.shard_storage.tag = 0
    facts = numbers_in(operands) if numbers is None else numbers
    steps = [repr(s.args) for s in target.view_steps] if target._view is not None else []
    if facts or steps:
        target.shard_storage.sign(*facts, *steps)


def _accumulate(target: ShardedTensor, other: Any, kwargs: Kwargs) -> bool:
    """Whether an addition of gradients is taken care of without waiting for one that is in flight."""
    if kwargs or not isinstance(other, ShardedTensor) or not other.shard_storage.is_in_flight:
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
    writable(base).copy_(own)
    note_write(base)


def write(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Any other operation that writes: on gathered copies, of which each rank keeps its part."""
    mutated = mutated_arguments(func)
    targets: dict[int, tuple[ShardedTensor, Tensor]] = {}  # one buffer per base, however many views of it are written

    operands = (*args, *kwargs.values())

    def private(tensor: ShardedTensor) -> Tensor:
        increment_version(tensor)  # autograd does not count writes to lists
        base = tensor.base
        if not is_stepping():
            _prepare(func, tensor, operands)
        if id(base.shard_storage) not in targets:
            targets[id(base.shard_storage)] = (base, _buffer_of(base).copy_(whole(base.full_in())))
        _, buffer = targets[id(base.shard_storage)]
        return apply_steps(buffer, tensor.view_steps)

    new_args = [map_tensors(a, private) if i in mutated else materialize(a) for i, a in enumerate(args)]
    new_kwargs = {k: map_tensors(v, private) if k in mutated else materialize(v) for k, v in kwargs.items()}
    result = func(*new_args, **new_kwargs)
    for base, buffer in targets.values():
        writable(base).copy_(cut_to(buffer, base))
        note_write(base)
    return return_and_correct_aliasing(func, args, kwargs, result)  # the written arguments themselves


def foreach_inplace(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """An elementwise operation over lists in place, and the fused optimizer steps: on shards, index by index."""
    targets = args[0]
    if any(isinstance(t, ShardedTensor) and t._view is not None for t in targets):
        return write(func, args, kwargs)
    if not is_stepping():
        operands = (*args[1:], *kwargs.values())
        are_lists = [isinstance(each, (list, tuple)) and len(each) == len(targets) for each in operands]
        numbers = None if any(are_lists) else numbers_in(operands)
        for index, target in enumerate(targets):
            if isinstance(target, ShardedTensor):
                own = operands
                if any(are_lists):
                    own = tuple(a[index] if is_list else a for a, is_list in zip(operands, are_lists, strict=True))
                _prepare(func, target, own, numbers)
        is_factor = func is aten._foreach_mul_.Tensor and not args[1].dim() and args[1].dtype.is_floating_point
        if is_factor and (later := list(filter(_may_scale_later, targets))):
            _scale_later(later, beside(materialize(args[1]), later[0]))
            targets = [target for target in targets if not _may_scale_later(target)]
            args = (targets, *args[1:])
            if not targets:
                return None

    mutated = mutated_arguments(func)
    is_fused = func._schema.name.startswith("aten::_fused_")
    copies: list[tuple[Tensor, Tensor]] = []  # of what is written to

    def local(place: int | str, arg: Any) -> Any:
        if not isinstance(arg, (list, tuple)) or not any(isinstance(x, Tensor) for x in arg):
            return beside(materialize(arg), targets[0])
        pairs = list(zip(arg, targets, strict=True))
        found = [cut_to(x, t) if isinstance(t, ShardedTensor) else materialize(x) for x, t in pairs]
        if not is_fused:
            return found
        like = [_lying_like(x, t) for x, (_, t) in zip(found, pairs, strict=True)]
        if place in mutated:
            copies.extend((x, copy) for x, copy in zip(found, like, strict=True) if x is not copy)
        return like

    places, names = [local(i, a) for i, a in enumerate(args)], {k: local(k, v) for k, v in kwargs.items()}
    lists = [kwargs.get(place) or () if isinstance(place, str) else args[place] for place in mutated]
    written = [x for items in lists for x in items if isinstance(x, ShardedTensor)]
    for tensor in written:
        writable(tensor)
    func(*places, **names)
    for part, copy in copies:
        part.copy_(copy)
    note_writes(written)
    return None


def _may_scale_later(grad: Any) -> bool:
    """Whether a tensor is a gradient at home whose step may be deferred: a factor is applied by that, or by its reader.

    Clipping and scalers scale all gradients, and often nothing but the step reads them.
    """
    if type(grad) is not OffloadedShardedTensor or grad._view is not None:
        return False
    storage = grad.shard_storage
    return storage.is_stepped_later and not storage.is_exposed and grad.storage_dtype.is_floating_point


def _scale_later(grads: Sequence[ShardedTensor], factor: Tensor) -> None:
    """Multiply gradients when they are used."""
    factor = factor.detach().clone()  # of which a program may make another number
    for grad in grads:
        grad.shard_storage.scale_later(factor)
    increment_version(grads)


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
    sharded = [g for g in grads if isinstance(g, ShardedTensor)]
    # A scaler copies its scale from the device to gradients at home, into pinned memory, and does not wait for that.
    for kind in {g.shard_group.device_type for g in sharded} - {"cpu"} if inv_scale.device.type == "cpu" else ():
        torch.get_device_module(kind).synchronize()
    norms = [g.shard_storage.known_norm(torch.float64, 2.0) if _may_scale_later(g) else None for g in grads]
    known = [(grad, norm) for grad, norm in zip(grads, norms, strict=True) if norm is not None]
    if known and not inv_scale.dim():  # one that is not finite in fp64 is of values that are not
        found_inf.masked_fill_(~torch.stack([norm.to(found_inf.device) for _, norm in known]).isfinite().all(), 1.0)
        _scale_later([grad for grad, _ in known], inv_scale)
        grads = [grad for grad, norm in zip(grads, norms, strict=True) if norm is None]
    local = [
        g.shard_storage.resolve() if isinstance(g, ShardedTensor) and g._view is None else materialize(g) for g in grads
    ]
    func(local, found_inf, inv_scale, **kwargs)
    groups = {id(group.process_group): group for g in sharded for group in groups_of(g)}
    for group in groups.values():
        found_inf.copy_(
            collectives.all_reduce([found_inf], group, ReduceOp.MAX, label="unscale", everywhere=True).wait()[0]
        )
    note_writes([grad for grad in grads if isinstance(grad, ShardedTensor)])


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
    """`normal_` and its kind: every rank draws what the unsharded tensor would get, and keeps its part.

    In a forward, a temporary becomes whole on each rank, with what that rank draws.
    """
    target = args[0]
    if not isinstance(target, ShardedTensor):
        return func(target, *materialize(args[1:]), **materialize(kwargs))
    base = target.base
    if not base.shard_storage.is_shared and _is_of_forward(target):
        if base.shard_layout.dim is not None:
            base.become_whole()
        _write_through(target, lambda view: func(view, *materialize(args[1:]), **materialize(kwargs)))
        return target
    with _agreed_generator(_drawers(target), target.device, kwargs.get("generator")):
        _write_through(target, lambda view: func(view, *materialize(args[1:]), **materialize(kwargs)))
    return target


def random_factory(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """`rand_like` and its kind: a tensor of the same layout that holds what the unsharded tensor would get.

    In a forward it is a plain tensor, with what this rank draws: so it is from the second step on, of full tensors.
    """
    source = args[0]
    if _is_of_forward(source):
        return func(empty_as(source), *materialize(args[1:]), **kwargs)
    with _agreed_generator(_drawers(source), source.device, kwargs.get("generator")):
        full = func(empty_as(source), *materialize(args[1:]), **kwargs)
    if source._view is not None:
        return full
    return source.like(part_of(full, source.shard_layout, source.shard_group.rank).clone())


def _is_of_forward(tensor: ShardedTensor) -> bool:
    """Whether what is drawn is noise of a forward, each rank's own; what `torch.nn.init` draws there is not."""
    if tp_layout_of(tensor.shard_storage.layout) is not None or is_traced(tensor) or "_draws_like" in tensor.__dict__:
        return False
    return ShardedTensor.runs_forward is not None and ShardedTensor.runs_forward()


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


def refuse(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Operations that would re-shape or re-seat the tensor itself; a whole temporary may be transposed."""
    target = args[0]
    is_temporary = isinstance(target, ShardedTensor) and not target.is_view and not target.shard_storage.is_shared
    if is_temporary and target.shard_layout.dim is None and func in _TRANSPOSING:
        transposed = _TRANSPOSING[func](target.shard_storage.resolve(), *args[1:])
        target.data = ShardedTensor.shard(transposed, target.device_mesh, None, name=target.name)
        target.shard_storage.is_shared = False
        return target
    names = [a.name for a in args if isinstance(a, ShardedTensor)]
    raise UnsupportedOpError(
        f"{names[0] if names else 'a ShardedTensor'}: {func} changes the shape or memory of the tensor object itself, "
        "but a sharded tensor keeps both. Use the operation without the trailing underscore, or copy_()."
    )
