"""Operations that each rank runs on its shard, with at most one small all-reduce."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter, tree_map_only

from dshard import collectives
from dshard.collectives import ReduceOp, ShardGroup, shard_of
from dshard.errors import UnsupportedOpError
from dshard.interpreter import file_that_called, runs_in_file
from dshard.layout import ShardLayout
from dshard.tensor.meshes import (
    TPLayout,
    TPShardLayout,
    distinct_groups,
    groups_of,
    is_local,
    is_mesh_within,
    replicated,
    tp_layout_of,
    whole,
)
from dshard.tensor.operands import (
    AgreedTensor,
    FullResult,
    answering,
    common_layout,
    cut_to,
    in_graph,
    is_recorded,
    map_tensors,
    mapped,
    materialize,
    numbers_in,
)
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.storage import Use, flat, is_stepping
from dshard.tensor.subclass_shards import exact_values
from dshard.tensor.table import Args, Kwargs
from dshard.tensor.traced import is_traced
from dshard.tensor.views import empty_as

PLAIN = (Tensor, int, float, bool, type(None))  # arguments with no ShardedTensor in them


def meets_tp(args: Sequence[Any]) -> bool:
    """Whether an operand is a DTensor of torch's own, or lies over another mesh than that of data parallelism."""
    for value in args:
        kind = type(value)
        if kind in SHARDED:
            if type(value.shard_storage.layout) is TPShardLayout and not is_local(value._view):
                return True
        elif kind is DTensor or (kind not in PLAIN and isinstance(value, (list, tuple)) and meets_tp(value)):
            return True
    return False


def tp_compute(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation by DTensor's rules, on what data parallelism gathers; gives DTensors.

    A parameter that lies over no other mesh counts as replicated over that of the other operands. Full values on every
    rank are taken instead in an optimizer's step, and, where autograd does not record the operation, beside plain
    tensors.

    Raises:
        UnsupportedOpError: Autograd records it, and a plain tensor is among the operands, or their meshes differ.
            On every rank alike.
    """
    tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
    sharded = [t for t in tensors if isinstance(t, ShardedTensor)]
    others = [t for t in tensors if type(t) is DTensor]
    has_plain = any(map(_is_plain, tensors))
    recorded = is_recorded(*sharded)
    meshes = [o.device_mesh for o in others]
    meshes += [i.mesh for s in sharded if (i := _tp_layout_of(s)) is not None]
    same_mesh = any(o.device_mesh == s.device_mesh for o in others for s in sharded)
    if not recorded and (has_plain or same_mesh or is_stepping()):
        return func(*materialize(args), **materialize(kwargs))
    mesh = meshes[0]
    named = next((s for s in sharded if _tp_layout_of(s) is not None), sharded[0])
    if has_plain:
        raise UnsupportedOpError(_mixed(func, named, mesh, tensors))
    different = next((m for m in meshes if m != mesh), None)
    if different is not None:
        raise UnsupportedOpError(
            f"{named.name}: {func} takes operands over one mesh, but some lie over {mesh} and others over {different}. "
            "Redistribute the activations, or use full_tensor() of the parameter."
        )
    args, kwargs = tree_map_only(ShardedTensor, lambda t: _as_dtensor(t, mesh), (args, kwargs))
    return func(*args, **kwargs)


def _tp_layout_of(tensor: ShardedTensor) -> TPLayout | None:
    """How a tensor lies over another mesh; None for a local tensor that `to_local` gave."""
    return None if is_local(tensor._view) else tp_layout_of(tensor.shard_storage.layout)


def _is_plain(tensor: Tensor) -> bool:
    if isinstance(tensor, ShardedTensor):
        return is_local(tensor._view)
    return tensor.dim() > 0 and not isinstance(tensor, DTensor)


def _as_dtensor(tensor: ShardedTensor, mesh: DeviceMesh) -> Tensor:
    """What takes part for a sharded tensor: over `mesh`, unless each rank holds data of its own."""
    value = tensor.operand()
    layout = tensor.shard_storage.layout
    has_own_data = layout.dim is None and not tensor.shard_storage.is_shared
    return value if type(value) is DTensor or has_own_data or not value.dim() else replicated(value, mesh)


def _mixed(func: OpOverload, named: ShardedTensor, mesh: DeviceMesh, tensors: Sequence[Tensor]) -> str:
    plain = next(filter(_is_plain, tensors))
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return (
        f"{named.name}: {func} mixes a parameter that lies over the mesh {names} with a plain tensor (shape "
        f"{tuple(plain.shape)}), but whether that is equal or different on the ranks of that mesh decides its "
        "gradient. Make it a DTensor with DTensor.from_local(x, mesh, placements), or by PrepareModuleInput; or use "
        "full_tensor() of the parameter."
    )


aten = torch.ops.aten
_OWN_FOLDER = str(Path(__file__).parents[1])
_HALF = (torch.float16, torch.bfloat16)
_NORMS = (aten.linalg_vector_norm.default, aten.norm.Scalar)


def compute(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation on full values; its results are plain tensors of this rank, and outside of models answer."""
    return _answer(compute_plain(func, args, kwargs), (*args, *kwargs.values()))


def _answer(result: Any, operands: Sequence[Any]) -> Any:
    """A result of some operands as one that answers as a DTensor does, if they are sharded tensors and numbers alone.

    Results within a forward or backward do not: programs look at those outside.
    """
    if torch._C._current_graph_task_id() != -1 or type(result) not in (Tensor, list, tuple):
        return result
    mesh, is_agreed = None, True
    for value in flat(operands):
        if type(value) in SHARDED:
            source = value.base.gather_source
            if source is not None and source.is_running:
                return result  # in a forward it is one of many values of this rank
            mesh = mesh if mesh is not None else value._spec.mesh
        elif isinstance(value, Tensor) and not isinstance(value, (AgreedTensor, DTensor)):
            if value.dim():
                return result  # data of this rank's own
            is_agreed = False
    return answering(result, AgreedTensor if is_agreed else FullResult, mesh) if mesh is not None else result


def compute_plain(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation on full values."""
    if meets_tp((*args, *kwargs.values())):
        return tp_compute(func, args, kwargs)
    use = Use(args)
    values = [a.operand(use) if type(a) in SHARDED else a if type(a) in PLAIN else _operand(a, use) for a in args]
    return func(*values, **{name: _operand(value, use) for name, value in kwargs.items()})


def _operand(value: Any, use: Use) -> Any:
    """Any operand's full value."""
    if type(value) is list and value and type(value[0]) is int:  # a shape
        return value
    return map_tensors(value, lambda tensor: tensor.materialize(use))


def pointwise(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """An elementwise operation: on shards where all operands lie alike and autograd does not record it."""
    values = (*args, *kwargs.values())
    ref = common_layout(values)
    if ref is None:
        return compute(func, args, kwargs)
    local_kwargs = {k: cut_to(v, ref) for k, v in kwargs.items()}
    facts = numbers_in(values)
    result = mapped(func(*[cut_to(a, ref) for a in args], **local_kwargs), lambda out: _signed(ref, out, facts))
    if func is aten.add.Tensor and all(type(a) in SHARDED and a.shard_storage.is_reduced for a in args):
        result.shard_storage.is_shared = result.shard_storage.is_reduced = True  # autograd adds up two uses of a weight
        stream = collectives.stream_on(ref.storage_device)
        for a in args if stream is not None else ():  # in a stream that it tells of itself, but not of its shard
            a.shard_storage.resolve().record_stream(stream)
    return result


def _signed(ref: ShardedTensor, shard: Tensor, facts: tuple[Any, ...]) -> ShardedTensor:
    """A result on shards, with the numbers that it was computed with in its tag."""
    out = in_graph(ref.like(shard), ref)
    if facts:
        out.shard_storage.sign(*facts)
    return out


def foreach(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """An elementwise operation over lists: each index on shards or on full values, as `pointwise` would decide."""
    lists = [a for a in args if isinstance(a, (list, tuple)) and any(isinstance(x, Tensor) for x in a)]
    others = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    refs = [common_layout((*items, *others)) for items in zip(*lists, strict=True)]

    def local(arg: Any) -> Any:
        if not any(arg is items for items in lists):
            return materialize(arg)
        return [materialize(x) if r is None else cut_to(x, r) for x, r in zip(arg, refs, strict=True)]

    results = func(*[local(a) for a in args], **materialize(kwargs))
    facts = numbers_in((*args, *kwargs.values()))
    return [
        _answer(out, (*items, *others)) if ref is None else _signed(ref, out, facts)
        for out, ref, items in zip(results, refs, zip(*lists, strict=True), strict=True)
    ]


def factory(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """`empty_like` and its kind: a new tensor of the same layout; of a view, a plain one."""
    source: ShardedTensor = args[0]
    if source._view is not None:
        return func(empty_as(source), *args[1:], **kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}  # the full tensor's strides stay its own
    if kwargs.get("dtype") is None:
        kwargs["dtype"] = source.dtype
    out = in_graph(source.like(func(source.shard_storage.resolve(), *args[1:], **kwargs)), source)
    if source.gather_source is not None:
        out.swapped_source = (source.gather_source, source.gather_slot)
    return out


def _called_by_autograd() -> bool:
    """Whether autograd itself calls, and not a backward function in Python."""
    if torch._C._current_graph_task_id() == -1:
        return False
    return file_that_called(_OWN_FOLDER) in (None, torch.autograd.graph.__file__)


def new_tensor(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """`new_empty` and its kind: a plain tensor of the asked size; in an init, one whose random fills agree.

    Of a gradient that somebody else keeps autograd makes a copy so, which is sharded.
    """
    source: ShardedTensor = args[0]
    layout = source.shard_layout
    if func is aten.new_empty_strided.default and tuple(args[1]) == source.shape and tuple(args[2]) == source.stride():
        is_whole = type(layout) is ShardLayout and source._view is None and kwargs.get("dtype") == source.dtype
        if is_whole and _called_by_autograd():
            shape = layout.local_shape(source.shard_group.rank)
            return source.like(torch.empty(shape, dtype=source.dtype, device=source.storage_device))
    plain = func(torch.empty(0, dtype=source.dtype, device=source.device), *args[1:], **kwargs)
    if (
        func is not aten.new_empty.default
        or not source.shard_storage.is_shared
        or not runs_in_file(torch.nn.init.__file__)
    ):
        return plain
    tp = tp_layout_of(source.shard_layout)
    mesh = source.device_mesh if tp is None else tp.data_mesh
    buffer = ShardedTensor.shard(plain, mesh, None, name=source.name)  # `orthogonal_` fills it at random
    buffer.shard_storage.is_shared = False
    if tp is not None:
        buffer.__dict__["_draws_like"] = source
    return buffer


def layout_only(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """An operation that looks at shapes and strides alone."""
    return func(*map_tensors(args, empty_as), **kwargs)


def copied(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """`to(...)` and `clone()`: of this rank's shard at once; gathers go through the source while it is unchanged."""
    source: ShardedTensor = args[0]
    keeps_strides = kwargs.get("memory_format") in (None, torch.preserve_format)
    is_rounded = source.compute_dtype() not in (None, kwargs.get("dtype"))
    if source._view is not None or not keeps_strides or is_rounded:
        return compute(func, args, kwargs)
    shard = func(source.shard_storage.readable(), **kwargs)
    is_derived = shard.device == source.storage_device and not is_traced(source)
    out = source.derived(shard) if is_derived else in_graph(source.like(shard), source)
    out.shard_storage.tag = source.shard_storage.tag
    return out


def equal(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    """`torch.equal`: each rank compares its shards, and all agree."""
    left, right = args
    target = left if isinstance(left, ShardedTensor) else right
    other = right if target is left else left
    if target.shape != other.shape:
        return False
    if target._view is not None:
        return bool(compute(func, args, kwargs))
    same = torch.equal(
        *(exact_values(part, target.name) for part in (target.shard_storage.resolve(), cut_to(other, target)))
    )
    flag = torch.tensor([same], dtype=torch.uint8, device=target.shard_group.device_type)
    return bool(_over_groups([flag], groups_of(target), ReduceOp.MIN, f"equal of {target.name}")[0].item())


def _over_groups(parts: Sequence[Tensor], groups: Sequence[ShardGroup], op: ReduceOp, label: str) -> Sequence[Tensor]:
    """Reduce small tensors over several groups, one after the other."""
    for group in groups:
        parts = collectives.all_reduce(parts, group, op, label=label).wait()
    return parts


def reduction(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """A reduction to one value: each rank's shard, then one small all-reduce; a plain tensor, equal on all ranks."""
    source: ShardedTensor = args[0]
    rule = _rule_of(func, args, kwargs)
    gathers = source._view is not None or is_recorded(source) or source.shard_storage.tag  # a gather compares the tags
    if rule is None or gathers or not source.numel() or source.is_meta:
        result = compute(func, args, kwargs)
        return result if is_recorded(source) else _answering(mapped(result, whole), source)
    is_norm = func in _NORMS
    shard, groups = _own_part(source) if is_norm else (source.shard_storage.resolve(), distinct_groups(source))
    if not groups:
        result = func(source.shard_storage.resolve(), *args[1:], **kwargs)
        return _answering(result, source)
    local, combine, op = rule
    shard = exact_values(shard, source.name)
    order = float(args[1]) if is_norm and len(args) > 1 else 2.0
    part = _local_norm(source, shard, order, local) if is_norm else local(_widened(shard))
    (total,) = _over_groups([part], groups, op, f"{func._schema.name} of {source.name}")
    dtype = func(torch.empty(1, dtype=source.dtype, device="meta"), *args[1:], **kwargs).dtype
    return _answering(combine(total).to(dtype), source)


def _answering(result: Any, source: ShardedTensor) -> Any:
    """What a reduction of a tensor gives: equal on all ranks."""
    return answering(result, AgreedTensor, source._spec.mesh)


_Rule = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], ReduceOp]


def _rule_of(func: OpOverload, args: Args, kwargs: Kwargs) -> _Rule | None:
    """What each rank computes, how the combined value becomes the result, and how values combine; None to gather."""
    source: ShardedTensor = args[0]
    dtype = kwargs.get("dtype")
    if func in (aten.sum.default, aten.mean.default):
        if func is aten.mean.default and not (source.is_floating_point() or source.is_complex()) and dtype is None:
            return None  # PyTorch's own error
        count = source.numel() if func is aten.mean.default else 1
        wide = dtype if dtype not in _HALF else torch.float32
        return (lambda x: x.sum(dtype=wide)), (lambda t: t if count == 1 else t / count), ReduceOp.SUM
    if func in (aten.any.default, aten.all.default):
        op = ReduceOp.MAX if func is aten.any.default else ReduceOp.MIN
        return (lambda x: func(x).to(torch.uint8)), (lambda t: t != 0), op
    if func in (aten.max.default, aten.min.default):
        if source.is_complex():
            return None
        op = ReduceOp.MAX if func is aten.max.default else ReduceOp.MIN
        return (lambda x: func(x) if x.numel() else _worst(x, op)), (lambda t: t), op
    if func is aten.linalg_vector_norm.default:
        order = args[1] if len(args) > 1 else 2
        dims = args[2] if len(args) > 2 else None
        keepdim = args[3] if len(args) > 3 else False
        return None if dims is not None or keepdim or dtype is not None else _norm_rule(float(order))
    return _norm_rule(float(args[1] if len(args) > 1 else 2)) if func is aten.norm.Scalar else None


def _worst(shard: Tensor, op: ReduceOp) -> Tensor:
    """What an empty shard adds to a maximum or minimum: nothing."""
    if shard.dtype == torch.bool:
        return shard.new_tensor(op != ReduceOp.MAX)
    if shard.is_floating_point():
        return shard.new_tensor(-math.inf if op == ReduceOp.MAX else math.inf)
    info = torch.iinfo(shard.dtype)
    return shard.new_tensor(info.min if op == ReduceOp.MAX else info.max)


def _norm_rule(order: float) -> _Rule | None:
    """Vector norms by parts: powers add, extremes compare."""
    if order == math.inf:
        return (lambda x: x.abs().amax() if x.numel() else x.abs().new_zeros(())), (lambda t: t), ReduceOp.MAX
    if order == 0:
        return (lambda x: (x != 0).sum().to(x.abs().dtype)), (lambda t: t), ReduceOp.SUM
    if order < 0:
        return None
    return (
        (lambda x: torch.linalg.vector_norm(x, order).pow(order)),
        (lambda t: t.pow(1.0 / order)),
        ReduceOp.SUM,
    )


def foreach_norm(func: OpOverload, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """`_foreach_norm`: norms of many tensors, with one small all-reduce for all that share a group and dtype.

    What every rank holds whole is taken in the parts that it would be cut into, so that no bit depends on that.
    """
    tensors: Sequence[Any] = args[0]
    order = float(args[1] if len(args) > 1 else 2)
    rule = _norm_rule(order)
    results: list[Any] = [None] * len(tensors)
    alike: dict[Any, tuple[list[ShardGroup], list[int], list[Tensor]]] = {}  # groups, and whose parts: which
    are_recorded = is_recorded(*tensors)
    is_on_shards = rule is not None and not kwargs and not are_recorded
    for i, tensor in enumerate(tensors):
        is_own = is_on_shards and isinstance(tensor, ShardedTensor) and tensor._view is None
        if not is_own or tensor.shard_storage.tag:
            results[i] = func([materialize(tensor)], *args[1:], **kwargs)[0]
            continue
        part, groups = _own_part(tensor)
        key = tuple([id(group.process_group) for group in groups]), tensor.dtype, part.dtype
        _, indices, parts = alike.setdefault(key, (groups, [], []))
        indices.append(i)
        parts.append(part)
    for (_, dtype, _), (groups, indices, parts) in alike.items():
        assert rule is not None
        local, combine, op = rule
        are_powers = op == ReduceOp.SUM and order > 0
        added: Sequence[Tensor]
        if are_powers and all(tensors[i].shard_storage.norms is None for i in indices):
            added = torch._foreach_pow(torch._foreach_norm(list(map(_widened, parts)), order), order)
        else:
            added = [_local_norm(tensors[i], part, order, local) for i, part in zip(indices, parts, strict=True)]
        totals = _over_groups(added, groups, op, "foreach_norm")
        found = torch._foreach_pow(list(totals), 1.0 / order) if are_powers else map(combine, totals)
        for i, total in zip(indices, found, strict=True):
            results[i] = total if dtype.is_complex or total.dtype == dtype else total.to(dtype)
    are_agreed = not are_recorded and all(isinstance(tensor, ShardedTensor) for tensor in tensors)
    return answering(results, AgreedTensor, tensors[0]._spec.mesh) if are_agreed else results


def _local_norm(tensor: ShardedTensor, part: Tensor, order: float, local: Callable[[Tensor], Tensor]) -> Tensor:
    """What a part of this rank's shard, or all of it, adds to a norm, by a rule's function unless it is known."""
    is_all = part is tensor.shard_storage.tensor and part.dtype == torch.float32
    known = tensor.shard_storage.known_norm(torch.float32, order) if is_all else None
    return known.square() if known is not None else local(_widened(part))


def _own_part(tensor: ShardedTensor) -> tuple[Tensor, list[ShardGroup]]:
    """This rank's part of a tensor, and the groups over which the parts make up the whole."""
    storage, group = tensor.shard_storage, tensor.shard_group
    shard, layout = exact_values(storage.resolve(), tensor.name), storage.layout
    if type(layout) is ShardLayout and layout.dim is not None and group.replicas is None:
        return shard, [group]
    groups = distinct_groups(tensor)
    if tp_layout_of(layout) is not None or not shard.dim():
        return shard, groups
    if layout.dim is None and group.num_ranks > 1:
        return shard_of(shard, ShardLayout(tuple(shard.shape), 0, group.num_ranks), group.rank), [group]
    if layout.dim is not None and group.replicas is not None and is_mesh_within(tensor._spec.mesh):
        more = group.replicas
        cut = ShardLayout(tuple(shard.shape), layout.dim, more.num_ranks)
        return shard_of(shard, cut, more.rank), [more, group]  # neighbouring parts first
    return shard, groups


def _widened(shard: Tensor) -> Tensor:
    return shard.float() if shard.dtype in _HALF else shard
