"""Sharded tensors that are cut over another mesh, too: DTensor parameters (tensor parallelism) below data parallelism.

The mesh of tensor parallelism (`tp_*`) is the DTensor's own. Data parallelism cuts and gathers the DTensor's local
tensor; what it gathers is put back into a DTensor over that mesh, and DTensor's own rules take over from there.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from dshard.collectives import ShardGroup, shard_of
from dshard.layout import ShardLayout
from dshard.tensor.meshes import placements_of, shared_dims
from dshard.tensor.views import ViewStep, apply_steps


@dataclass(frozen=True, slots=True)
class TPLayout:
    """How tensors lie over another mesh than the one that data parallelism cuts and gathers them over.

    Args:
        mesh: The other mesh. It may contain that of data parallelism, whose dims then count for the operands alone.
        placements: `Shard` or `Replicate` for each dim of it.
        shape: Of the full tensor.
        data_mesh: The mesh of data parallelism.
        data_dims: Dims of `mesh` that are those of `data_mesh`.
        axes: The placement, and the ranks, along each dim of `mesh` that is no dim of data parallelism.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    data_mesh: DeviceMesh
    data_dims: tuple[int, ...] = field(init=False, compare=False, repr=False)
    axes: tuple[tuple[Placement, ShardGroup], ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        device = torch.device(self.mesh.device_type)
        data_dims = shared_dims(self.mesh, self.data_mesh) or ()
        axes = tuple(
            (placement, ShardGroup.of_mesh(self.mesh.get_group(i), device))
            for i, placement in enumerate(self.placements)
            if i not in data_dims
        )
        object.__setattr__(self, "data_dims", data_dims)
        object.__setattr__(self, "axes", axes)

    def __reduce__(self) -> Any:
        return TPLayout, (self.mesh, self.placements, self.shape, self.data_mesh)

    def cut(self, full: Tensor) -> Tensor:
        """The view of a full tensor that is this rank's local one, before data parallelism cuts it."""
        for placement, group in self.axes:
            if isinstance(placement, Shard):
                layout = ShardLayout(tuple(full.shape), placement.dim, group.num_ranks)
                full = shard_of(full, layout, group.rank)
        return full

    def over_both(self, dim: int | None) -> tuple[Placement, ...]:
        """Placements over the dims of both meshes, where data parallelism cuts local tensors along `dim`."""
        outer = list(placements_of(dim, self.data_mesh))
        cuts = [
            group.num_ranks for placement, group in self.axes if isinstance(placement, Shard) and placement.dim == dim
        ]
        if dim is not None and math.prod(cuts) > 1:  # the DTensor's own cut comes first, though its mesh comes last
            outer[-1] = _StridedShard(dim, split_factor=math.prod(cuts))
        return (*outer, *(placement for placement, _ in self.axes))


@dataclass(frozen=True, slots=True)
class TPShardLayout(ShardLayout):
    """How data parallelism cuts local tensors of a DTensor; `shape` is that of the local tensor.

    Args:
        tp: How the DTensor lies.
    """

    num_made: ClassVar[int] = 0  # in this process: programs without tensor parallelism need not look for it
    tp: TPLayout

    def __post_init__(self) -> None:
        ShardLayout.__post_init__(self)
        TPShardLayout.num_made += 1

    def __reduce__(self) -> Any:
        return TPShardLayout, (self.shape, self.dim, self.num_ranks, self.tp)


def tp_layout_of(layout: ShardLayout) -> TPLayout | None:
    """How the tensors that are cut lie over another mesh; None if over no other."""
    return layout.tp if type(layout) is TPShardLayout else None


def full_shape(layout: ShardLayout) -> tuple[int, ...]:
    """Shape of the full tensor, over all meshes."""
    return layout.tp.shape if type(layout) is TPShardLayout else layout.shape


def lie_of(layout: ShardLayout, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """DTensor's placements of a sharded tensor over the dims of its mesh, or of both of its meshes."""
    return layout.tp.over_both(layout.dim) if type(layout) is TPShardLayout else placements_of(layout.dim, mesh)


def part_of(full: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    """The view of a full tensor, over all meshes, that this rank holds; `rank` is its number in data parallelism."""
    return shard_of(layout.tp.cut(full) if type(layout) is TPShardLayout else full, layout, rank)


def gathered_stride(layout: ShardLayout, stride: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of what data parallelism gathers, for a full tensor of strides `stride`."""
    if type(layout) is not TPShardLayout or layout.shape == layout.tp.shape:
        return stride
    strides = [0] * len(stride)
    step = 1
    for dim in sorted(range(len(stride)), key=lambda d: (stride[d], -d)):
        strides[dim] = step
        step *= max(layout.shape[dim], 1)
    return tuple(strides)


def groups_of(tensor: Any) -> list[ShardGroup]:
    """The ranks that a ShardedTensor lies on: of data parallelism, then along each dim of the other mesh."""
    tp = tp_layout_of(tensor.shard_storage.layout)
    return [tensor.shard_group, *(group for _, group in (tp.axes if tp is not None else ()))]


def joined_group(tensor: Any) -> ShardGroup:
    """All of `groups_of` as one, for collectives that are to reach them everywhere."""
    joined, *others = groups_of(tensor)
    for group in others:
        joined = ShardGroup(group.process_group, torch.device(group.device_type), joined)
    return joined


def distinct_groups(tensor: Any) -> list[ShardGroup]:
    """Those of `groups_of` whose ranks hold different parts; what parts give adds up over one after the other."""
    layout = tensor.shard_storage.layout
    groups = [tensor.shard_group] if layout.dim is not None else []
    tp = tp_layout_of(layout)
    if tp is not None:
        groups += [group for placement, group in tp.axes if isinstance(placement, Shard)]
    return groups


def tp_operand(local: Tensor, tensor: Any) -> Tensor:
    """What data parallelism has gathered of a ShardedTensor, as an operand: a DTensor, if it lies over another mesh."""
    layout = tensor.shard_storage.layout
    if type(layout) is not TPShardLayout:
        return local
    tp = layout.tp
    meta = TensorMeta(torch.Size(tp.shape), tensor.stride(), local.dtype)
    return DTensor(local, DTensorSpec(tp.mesh, tp.placements, tensor_meta=meta), requires_grad=False)


def replicated(full: Tensor, mesh: DeviceMesh) -> Tensor:
    """A full tensor that all ranks of a mesh hold alike, as a DTensor."""
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    return DTensor(full, DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta), requires_grad=False)


def whole(value: Tensor) -> Tensor:
    """An operand as a plain tensor: the full value, over all meshes.

    Communicates:
        DTensor's own all-gather over the mesh of tensor parallelism, for a DTensor.
    """
    if type(value) is not DTensor:
        return value
    with torch.no_grad():
        full: Tensor = value.full_tensor()
        return full


def viewed(value: Tensor, steps: tuple[ViewStep, ...]) -> Tensor:
    """A chain of views of an operand; where DTensor has no rule for one, of its full value.

    Communicates:
        Nothing; in the latter case an all-gather over the mesh of tensor parallelism.
    """
    if type(value) is not DTensor or not isinstance(steps[0].func, OpOverload):  # the latter: a local tensor's
        return apply_steps(value, steps)
    try:
        return apply_steps(value, steps)
    except RuntimeError:  # by what DTensor knows of placements, so on every rank alike
        return apply_steps(replicated(whole(value), value.device_mesh), steps)
