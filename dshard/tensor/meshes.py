"""What a device mesh says: who shares a tensor, and how DTensor writes that down."""

import math
import os
import weakref
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from dshard import collectives
from dshard.collectives import ShardGroup
from dshard.errors import StateError


def default_mesh() -> DeviceMesh:
    """The mesh of all ranks.

    Raises:
        StateError: No process group, nor what it takes to start one. On every rank alike.
    """
    if not collectives.is_initialized() and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise StateError(
            "fully_shard: needs a process group, but torch.distributed is not initialized. Start with torchrun, or "
            "call torch.distributed.init_process_group first."
        )
    is_gloo = collectives.is_initialized() and collectives.default_backend() == "gloo"
    device_type = "cuda" if torch.cuda.is_available() and not is_gloo else "cpu"
    num_ranks = collectives.world_size() if collectives.is_initialized() else int(os.environ["WORLD_SIZE"])
    return init_device_mesh(device_type, (num_ranks,))


_Dims = tuple[int, ...] | None
_SHARED_DIMS: "weakref.WeakKeyDictionary[DeviceMesh, weakref.WeakKeyDictionary[DeviceMesh, _Dims]]" = (
    weakref.WeakKeyDictionary()
)


def data_parallel_mesh(mesh: DeviceMesh, dims: Any) -> DeviceMesh:
    """The part of a mesh that torch's `DataParallelMeshDims` names: dims to shard over, and dims to replicate over.

    Several of either count as one, in the order of their names.

    Raises:
        StateError: The mesh has no dim of that name.

    Communicates:
        Where several count as one, the making of a process group, the first time.
    """
    named = [n for n in (getattr(dims, "replicate", None), getattr(dims, "shard", None)) if n is not None]
    names = [(n,) if isinstance(n, str) else tuple(n) for n in named]
    known = mesh.mesh_dim_names or ()
    if not {n for part in names for n in part} <= set(known):
        raise StateError(
            f"fully_shard: dp_mesh_dims must name dims of the mesh, which has {known}, but it is {dims}. Name the dims "
            "in init_device_mesh(mesh_dim_names=...)."
        )
    if all(len(part) == 1 for part in names):
        return mesh[tuple(n for part in names for n in part)]
    parts = [mesh[part[0]] if len(part) == 1 else mesh[part]._flatten("_".join(part)) for part in names]
    return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)


# By the name of a process group, and not by a mesh: meshes come and go, on each rank at times of its own.
_WITHIN: "dict[tuple[str, int, str], tuple[weakref.ref[Any], DeviceMesh]]" = {}


def mesh_within(mesh: DeviceMesh, num_ranks: int) -> DeviceMesh:
    """The ranks of a mesh of one dim, as replicas of `num_ranks` neighbours each; made once.

    Communicates:
        The first time, the making of process groups; all ranks must call this alike.
    """
    group = group_of(mesh)
    key = group.name, num_ranks, mesh.device_type
    pages = _WITHIN.get(key)
    if pages is None or pages[0]() is not group.process_group:
        ranks = mesh.mesh.view(-1, num_ranks)
        names = "replicate", "shard"
        made = DeviceMesh.from_group(list(group.apart(num_ranks)), mesh.device_type, ranks, mesh_dim_names=names)
        pages = _WITHIN[key] = weakref.ref(group.process_group), made
    return pages[1]


def is_mesh_within(mesh: DeviceMesh) -> bool:
    """Whether a mesh was made of one of one dim, whose ranks would share a tensor without it."""
    return any(made is mesh for _, made in _WITHIN.values())


def shared_dims(mesh: DeviceMesh, data_mesh: DeviceMesh) -> tuple[int, ...] | None:
    """The dims of `mesh` over which this rank's part of `data_mesh` lies; None if it is no such part.

    Gradients ask for it, so that it is remembered, but keeps no mesh alive.
    """
    known = _SHARED_DIMS.setdefault(mesh, weakref.WeakKeyDictionary())
    if data_mesh not in known:
        known[data_mesh] = _shared_dims(mesh, data_mesh)
    return known[data_mesh]


def _shared_dims(mesh: DeviceMesh, data_mesh: DeviceMesh) -> tuple[int, ...] | None:
    shape, ranks = tuple(mesh.mesh.shape), set(data_mesh.mesh.flatten().tolist())
    places = [place for place, rank in enumerate(mesh.mesh.flatten().tolist()) if rank in ranks]
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    names, data_names = mesh.mesh_dim_names or (), data_mesh.mesh_dim_names or ()
    found = tuple(
        dim
        for dim, (size, step) in enumerate(zip(shape, steps, strict=True))
        if len({place // step % size for place in places}) > 1 or (size == 1 and names and names[dim] in data_names)
    )
    is_part = len(places) in (1, len(ranks)) and len(places) == math.prod(shape[dim] for dim in found)
    return found if is_part else None


def group_of(mesh: DeviceMesh) -> ShardGroup:
    """The ranks that share tensors on a mesh: of its only dim, or of its second one, replicated over the first."""
    device = torch.device(mesh.device_type)
    if mesh.ndim == 1:
        return ShardGroup.of_mesh(mesh.get_group(), device)
    replicas = ShardGroup.of_mesh(mesh.get_group(0), device)
    return ShardGroup.of_mesh(mesh.get_group(1), device, replicas if replicas.num_ranks > 1 else None)


def note_groups(mesh: DeviceMesh) -> None:
    """Have `torch.compile` find the process groups of a mesh that was unpickled.

    Torch fills the registry of the root mesh anew with the groups of its own dims, and not with those of dims that were
    made one.
    """
    registry: dict[str, Any] = getattr(mesh._get_root_mesh(), "_pg_registry", {})
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        registry.setdefault(group.group_name, group)


def placements_of(dim: int | None, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """DTensor's placements of a tensor that is cut along `dim`, or whole on every rank."""
    last: Placement = Replicate() if dim is None else Shard(dim)
    return (*[Replicate()] * (mesh.ndim - 1), last)
