"""ShardedTensors out of DTensors: data parallelism around tensor parallelism."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dshard.collectives import shard_of
from dshard.errors import PlacementError, UnsupportedOpError
from dshard.layout import ShardLayout
from dshard.tensor.meshes import TPLayout, TPShardLayout, group_of, lie_of, part_of, shared_dims, tp_layout_of
from dshard.tensor.sharded_tensor import ShardedTensor
from dshard.tensor.storage import ShardStorage
from dshard.tensor.subclass_shards import cut_subclass, subclass_gathers
from dshard.tensor.views import dense_stride, empty_of


def shard_over(
    full: Tensor,
    mesh: DeviceMesh,
    dim: int | None,
    *,
    name: str = "",
    device: torch.device | None = None,
    kind: type[ShardedTensor] = ShardedTensor,
) -> ShardedTensor:
    """Keep this rank's shard of a parameter; of a DTensor, a shard of its local tensor.

    Args:
        full: Plain, or of a subclass that says how it is gathered, equal on all ranks of `mesh`; or a DTensor whose
            local tensors are.
        mesh: As of `ShardedTensor.shard`.
        dim: Dim to cut, or None.
        name: For messages.
        device: Device of the shard; by default `full`'s.
        kind: Class of the result.

    Raises:
        PlacementError, UnsupportedOpError: As `check_dtensor`, and `cut_subclass`.

    Communicates:
        Nothing.
    """
    if not subclass_gathers(full) and not isinstance(full, DTensor):
        return kind.shard(full, mesh, dim, name=name, device=device)
    group, both = group_of(mesh), mesh
    as_full = torch.empty(full.shape, device="meta")
    layout: ShardLayout
    if isinstance(full, DTensor):
        both, local = check_dtensor(name, full, mesh), local_of(full)
        as_full = torch.empty_strided(full.shape, full.stride(), device="meta")
        tp = TPLayout(full.device_mesh, tuple(full.placements), tuple(full.shape), mesh)
        layout = TPShardLayout(tuple(local.shape), dim if full.dim() else None, group.num_ranks, tp)
        device = local.device if device is None or local.is_meta else device
        shard = torch.empty(layout.local_shape(group.rank), dtype=full.dtype, device=device)
        shard.copy_(shard_of(local, layout, group.rank))
    else:
        layout = ShardLayout(tuple(full.shape), 0, group.num_ranks)
        shard = cut_subclass(name, full, layout, group.rank, device or full.device)
    meta = TensorMeta(full.shape, dense_stride(as_full), full.dtype)
    spec = DTensorSpec(both, lie_of(layout, mesh), tensor_meta=meta)
    storage, prototype = ShardStorage(shard, layout, is_shared=True), empty_of(full.dtype, shard.device)
    return kind.wrap(storage, spec, group, name=name, prototype=prototype)


def check_dtensor(name: str, param: DTensor, mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of data parallelism and that of a DTensor as one.

    Raises:
        UnsupportedOpError: It has a placement other than `Shard` and `Replicate`.
        PlacementError: The two are no different dims of one mesh, and that of data parallelism is no part of the other
            one over which the DTensor is replicated.
    """
    wrong = [p for p in param.placements if type(p) is not Shard and not isinstance(p, Replicate)]
    if wrong:
        raise UnsupportedOpError(
            f"{name}: a DTensor parameter below fully_shard must have the placements Shard(dim) and Replicate(), but "
            f"it has {tuple(param.placements)}. Redistribute it first, or leave it out with ignored_params."
        )
    other = param.device_mesh
    shared = shared_dims(other, mesh) or ()
    if not all(isinstance(param.placements[dim], Replicate) for dim in shared):
        raise PlacementError(
            f"{name}: a DTensor parameter must be replicated over the dims of data parallelism, which cuts it itself, "
            f"but it has {tuple(param.placements)} over {other}, and dims {shared} are those of fully_shard's mesh. "
            "Distribute it with Replicate() there."
        )
    try:
        if shared:
            rest = tuple(n for dim, n in enumerate(other.mesh_dim_names or ()) if dim not in shared)
            if len(rest) + len(shared) == other.ndim:
                return DeviceMesh._concatenate([mesh, other[rest]]) if rest else mesh
        both = DeviceMesh._concatenate([mesh, other])
        is_one = len(set(both.mesh.flatten().tolist())) == both.size()
    except (RuntimeError, ValueError, TypeError, NotImplementedError):  # the last but one for dims without names
        is_one = False
    if not is_one:
        raise PlacementError(
            f"{name}: a DTensor parameter and fully_shard must use different dims of one mesh, but its mesh is "
            f"{param.device_mesh} and that of fully_shard is {mesh}. Make one mesh, as in mesh = "
            "init_device_mesh(device, (2, 2), mesh_dim_names=('dp', 'tp')), and pass mesh['tp'] there and mesh['dp'] "
            "here."
        )
    return both


def local_of(tensor: Tensor) -> Tensor:
    """What data parallelism cuts: the local tensor of a DTensor, a plain tensor itself."""
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def shard_like(full: Tensor, target: ShardedTensor) -> ShardedTensor:
    """A ShardedTensor that lies as `target` does, of a plain tensor of the full shape that all ranks hold alike."""
    part = part_of(full.detach(), target.shard_layout, target.shard_group.rank)
    return target.like(ShardStorage(part.clone(), target.shard_layout, is_shared=True), dtype=full.dtype)


def local_gradient(param: ShardedTensor, grad: Tensor) -> Tensor:
    """The gradient of what data parallelism cuts, from that of the full parameter.

    Args:
        param: The parameter.
        grad: A DTensor in any placements, or a plain tensor, which counts as equal on all ranks of the other mesh.

    Raises:
        UnsupportedOpError: It is a DTensor over another mesh than the parameter.

    Communicates:
        What DTensor does to give a DTensor gradient the parameter's placements: an all-reduce where it was partial
        over other dims than those of data parallelism, which reduces over its own.
    """
    tp = tp_layout_of(param.shard_layout)
    if isinstance(grad, ShardedTensor):
        grad = grad.materialize()
    if not isinstance(grad, DTensor):
        return grad if tp is None else tp.cut(grad)
    mesh = grad.device_mesh
    if tp is not None and mesh != tp.mesh:
        raise UnsupportedOpError(
            f"{param.name}: the gradient must lie over the mesh of the parameter, {tp.mesh}, but it lies over "
            f"{mesh}. Redistribute the activations, or use full_tensor() of the parameter."
        )
    placements: list[Placement] = [Replicate()] * mesh.ndim if tp is None else list(tp.placements)
    for dim in (shared_dims(mesh, param._spec.mesh) or ()) if tp is None else tp.data_dims:
        if grad.placements[dim] == Partial():
            placements[dim] = grad.placements[dim]
    return local_of(grad.redistribute(mesh, placements))
