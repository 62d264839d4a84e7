"""Do the ranks start from the same parameters? Over every mesh that says that they hold the same ones."""

from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from dshard.agreement.weights import broadcast_weights, check_same_structure, check_same_weights
from dshard.collectives import ShardGroup
from dshard.setup.specs import ParamSpec
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import group_of
from dshard.tensor.tp_layout import TPLayout, tp_layout_of
from dshard.tensor.tp_params import local_of
from dshard.units.placing import Place

_Named = list[tuple[str, Tensor]]
_Found = tuple[str, nn.Parameter]


def compare_parameters(
    modules: Sequence[nn.Module],
    specs: Sequence[ParamSpec],
    places: Sequence[Place],
    group: ShardGroup,
    sync: Literal["check", "broadcast"] | None,
) -> None:
    """Compare what ranks hold before it is cut, or give them what the first of them holds.

    The ranks of a parameter's mesh must hold the same, of a DTensor the same local tensor. What is replicated over the
    mesh of DTensors in the same model must be equal over that, too: their replicated ones, and plain parameters.

    Args:
        modules: What is sharded.
        specs: The parameters that are taken, which all ranks of `group` have alike.
        places: Where each goes.
        group: The ranks of the mesh that the call was given.
        sync: As of `fully_shard`.

    Raises:
        DivergenceError: They differ. On every rank alike.

    Communicates:
        For each other mesh and each dim of a DTensor's an all-reduce of 16 bytes; for each mesh one of 16 bytes per
        parameter, or a broadcast of the weights.
    """
    found = [(spec.name, spec.param) for spec in specs]
    parts: dict[str, tuple[ShardGroup, _Named]] = {group.full_name: (group, [])}
    for (name, param), place in zip(found, places, strict=True):
        own = group_of(place.mesh)
        parts.setdefault(own.full_name, (own, []))[1].append((name, _compared(param)))
    for inner, axis, own in _inner_axes(modules, found, places):
        alike = [(name, _compared(p)) for name, p in found if _is_replicated(p, inner, axis)]
        parts[f"replicated over {own.full_name}"] = own, alike
    for own, tensors in parts.values():
        if own is not group:
            check_same_structure(tensors, own)
        if sync == "check":
            check_same_weights(tensors, own)
        elif sync == "broadcast":
            broadcast_weights(tensors, own)


def groups_cut_over(
    modules: Sequence[nn.Module], specs: Sequence[ParamSpec], places: Sequence[Place]
) -> list[ShardGroup]:
    """The ranks over which layers of some modules are cut, along each dim of their meshes."""
    axes = _inner_axes(modules, [(spec.name, spec.param) for spec in specs], places)
    return list({own.full_name: own for _, _, own in axes}.values())


def _compared(param: Tensor) -> Tensor:
    """What is compared of a parameter: its local tensor, and whether it takes a gradient."""
    return local_of(param).requires_grad_(param.requires_grad)


def _inner_axes(
    modules: Sequence[nn.Module], found: Sequence[_Found], places: Sequence[Place]
) -> Iterator[tuple[TPLayout, int, ShardGroup]]:
    """Each dim of such meshes that is no dim of data parallelism, and the ranks along it."""
    for inner in _inner_meshes(modules, found, places):
        axes = [dim for dim in range(inner.mesh.ndim) if dim not in inner.data_dims]
        for axis, (_, own) in zip(axes, inner.axes, strict=True):
            yield inner, axis, own


def _inner_meshes(modules: Sequence[nn.Module], found: Sequence[_Found], places: Sequence[Place]) -> list[TPLayout]:
    """One description for each mesh over which DTensors of some modules lie, sharded by now or not."""
    inners: dict[object, TPLayout] = {}
    meshes = {id(p): place.mesh for (_, p), place in zip(found, places, strict=True)}
    for param in [p for module in modules for p in module.parameters()]:
        inner = None
        if isinstance(param, ShardedTensor):
            inner = tp_layout_of(param.shard_layout)
        elif isinstance(param, DTensor) and id(param) in meshes:
            inner = TPLayout(param.device_mesh, tuple(param.placements), tuple(param.shape), meshes[id(param)])
        if inner is not None:
            inners.setdefault(inner.mesh, inner)
    return list(inners.values())


def _is_replicated(param: Tensor, inner: TPLayout, axis: int) -> bool:
    """Whether ranks along a dim of a DTensors' mesh hold the same of a parameter."""
    if not isinstance(param, DTensor):
        return True
    return param.device_mesh == inner.mesh and isinstance(param.placements[axis], Replicate)
