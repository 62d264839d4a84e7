"""The op table: which class an operation falls into. The class decides how it runs on sharded tensors."""

import enum
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[OpOverload, Args, Kwargs], Any]  # of an operation, by its class
aten = torch.ops.aten


class OpClass(enum.Enum):
    """How an operation treats sharded tensors.

    VIEW: remembered, not computed. ALIAS: another object over the same shard. CAST: the shard converted; CLONE: the
    shard copied. POINTWISE, FOREACH: on shards where all operands lie alike, else on gathered tensors.
    POINTWISE_INPLACE,
    FOREACH_INPLACE: on this rank's shard, other operands cut to it. REDUCTION, FOREACH_REDUCTION: on shards and one
    small all-reduce. FACTORY: the shard's size; NEW: a plain tensor. RANDOM_INPLACE, RANDOM_FACTORY: the unsharded
    tensor's draw, of which each rank keeps its part. LAYOUT: on memory that lies as the full tensor would, for the
    values do not matter. WRITE: on a gathered copy, of which each rank keeps its part.
    REFUSED: raises. COMPUTE: on gathered tensors.
    """

    VIEW = enum.auto()
    ALIAS = enum.auto()
    CAST = enum.auto()
    CLONE = enum.auto()
    POINTWISE = enum.auto()
    POINTWISE_INPLACE = enum.auto()
    FOREACH = enum.auto()
    FOREACH_INPLACE = enum.auto()
    FOREACH_REDUCTION = enum.auto()
    REDUCTION = enum.auto()
    FACTORY = enum.auto()
    NEW = enum.auto()
    RANDOM_INPLACE = enum.auto()
    RANDOM_FACTORY = enum.auto()
    LAYOUT = enum.auto()
    WRITE = enum.auto()
    UNSCALE = enum.auto()
    EQUAL = enum.auto()
    RENORM = enum.auto()
    REFUSED = enum.auto()
    COMPUTE = enum.auto()


_NAMED: dict[OpOverload, OpClass] = {
    aten.detach.default: OpClass.ALIAS,
    aten.alias.default: OpClass.ALIAS,
    aten.lift_fresh.default: OpClass.ALIAS,
    aten._to_copy.default: OpClass.CAST,
    aten.clone.default: OpClass.CLONE,
    aten.equal.default: OpClass.EQUAL,
    aten.embedding_renorm_.default: OpClass.RENORM,
    aten.pin_memory.default: OpClass.COMPUTE,
    aten._unsafe_view.default: OpClass.VIEW,  # its schema hides that it is one
    aten._reshape_alias.default: OpClass.VIEW,
    aten._amp_foreach_non_finite_check_and_unscale_.default: OpClass.UNSCALE,
    aten._foreach_norm.Scalar: OpClass.FOREACH_REDUCTION,
    aten.empty_like.default: OpClass.FACTORY,
    aten.zeros_like.default: OpClass.FACTORY,
    aten.ones_like.default: OpClass.FACTORY,
    aten.full_like.default: OpClass.FACTORY,
    aten._new_zeros_with_same_feature_meta.default: OpClass.LAYOUT,  # both by forward-mode autograd
    aten._has_same_storage_numel.default: OpClass.LAYOUT,
    aten.new_empty.default: OpClass.NEW,
    aten.new_empty_strided.default: OpClass.NEW,
    aten.new_zeros.default: OpClass.NEW,
    aten.new_ones.default: OpClass.NEW,
    aten.new_full.default: OpClass.NEW,
    aten.copy_.default: OpClass.POINTWISE_INPLACE,
    aten.fill_.Scalar: OpClass.POINTWISE_INPLACE,
    aten.fill_.Tensor: OpClass.POINTWISE_INPLACE,
    aten.zero_.default: OpClass.POINTWISE_INPLACE,
    aten.masked_fill_.Scalar: OpClass.POINTWISE_INPLACE,
    aten.masked_fill_.Tensor: OpClass.POINTWISE_INPLACE,
    aten.set_.source_Tensor: OpClass.REFUSED,
    aten.set_.source_Storage: OpClass.REFUSED,
    aten.set_.source_Storage_storage_offset: OpClass.REFUSED,
    aten.set_.default: OpClass.REFUSED,
    aten.resize_.default: OpClass.REFUSED,
    **dict.fromkeys(
        (
            aten.sum.default,
            aten.mean.default,
            aten.max.default,
            aten.min.default,
            aten.any.default,
            aten.all.default,
            aten.norm.Scalar,
            aten.norm.ScalarOpt_dtype,
            aten.linalg_vector_norm.default,
        ),
        OpClass.REDUCTION,
    ),
}

# Fused optimizer steps read and write each element by itself.
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
# Foreach operations whose name without the prefix is no pointwise operation of its own.
_FOREACH_ELEMENTWISE = ("zero", "copy")
_FOREACH_REDUCING = ("max",)  # `aten.max` of two tensors is pointwise, `_foreach_max` of one is not
# Tagged pointwise by torch, but their result depends on more than the element.
_NOT_POINTWISE = ("clone", "_to_copy")


@cache
def mutated_arguments(func: OpOverload) -> tuple[int | str, ...]:
    """Positions, or names of keyword-only arguments, that `func` writes to."""
    schema = func._schema
    return tuple(
        arg.name if arg.kwarg_only else i
        for i, arg in enumerate(schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    )


@cache
def classify(func: OpOverload) -> OpClass:
    """The class of `func`: from the table, else from its schema and tags; what is unsure gathers."""
    named = _NAMED.get(func)
    if named is not None:
        return named
    name = func._schema.name.removeprefix("aten::")
    if torch.Tag.inplace_view in func.tags:
        return OpClass.REFUSED
    mutates = mutated_arguments(func)
    if name.startswith("_foreach_"):
        return _classify_foreach(name, mutates)
    if name in _FUSED and mutates and mutates[0] == 0:
        return OpClass.FOREACH_INPLACE
    if mutates:
        return _classify_inplace(func, name, mutates)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return OpClass.RANDOM_FACTORY if name.endswith("_like") else OpClass.COMPUTE
    if any(ret.alias_info is not None for ret in func._schema.returns):
        return OpClass.VIEW
    if torch.Tag.pointwise in func.tags and name not in _NOT_POINTWISE:
        return OpClass.POINTWISE
    return OpClass.COMPUTE


def _classify_foreach(name: str, mutates: tuple[int | str, ...]) -> OpClass:
    single = name.removeprefix("_foreach_").removesuffix("_")
    if single in _FOREACH_REDUCING or (single not in _FOREACH_ELEMENTWISE and not _is_pointwise(single)):
        return OpClass.WRITE if mutates else OpClass.COMPUTE
    if mutates:
        return OpClass.FOREACH_INPLACE if mutates == (0,) else OpClass.WRITE
    return OpClass.FOREACH


def _is_pointwise(name: str) -> bool:
    """Whether some overload of `aten.<name>` works on each element by itself."""
    packet = getattr(aten, name, None)
    overloads = [getattr(packet, o) for o in packet.overloads()] if packet is not None else []
    return any(torch.Tag.pointwise in o.tags for o in overloads)


def _classify_inplace(func: OpOverload, name: str, mutates: tuple[int | str, ...]) -> OpClass:
    if mutates != (0,):
        return OpClass.WRITE
    if torch.Tag.nondeterministic_seeded in func.tags and name.endswith("_"):
        return OpClass.RANDOM_INPLACE
    functional = getattr(aten, name.removesuffix("_"), None)
    twin = getattr(functional, func._overloadname, None) if functional is not None else None
    if torch.Tag.pointwise in func.tags or (twin is not None and torch.Tag.pointwise in twin.tags):
        return OpClass.POINTWISE_INPLACE
    return OpClass.WRITE
