"""Meshes and their process groups, layouts over further mesh dims, and local tensors of DTensor parameters."""

import math
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from dshard import arguments, collectives
from dshard.collectives import ReduceOp, ShardGroup, shard_of
from dshard.errors import ArgumentError, StateError, UnsupportedOpError
from dshard.layout import ShardLayout
from dshard.tensor.views import View, ViewMeta, ViewStep, apply_steps


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
    return stride_like(layout.shape, stride)


def stride_like(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose dims follow each other as in one of these strides."""
    found, step = [0] * len(stride), 1
    for dim in sorted(range(len(stride)), key=lambda d: (stride[d], -d)):
        found[dim] = step
        step *= max(shape[dim], 1)
    return tuple(found)


def groups_of(tensor: Any) -> list[ShardGroup]:
    """The ranks that a ShardedTensor lies on: of data parallelism, then along each dim of the other mesh."""
    tp = tp_layout_of(tensor.shard_storage.layout)
    return [tensor.shard_group, *(group for _, group in (tp.axes if tp is not None else ()))]


def joined_group(tensor: Any) -> ShardGroup:
    """All of `groups_of` as one, for collectives that are to reach them everywhere."""
    group, *others = groups_of(tensor)
    return joined(group, others)


def joined(group: ShardGroup, others: Iterable[ShardGroup]) -> ShardGroup:
    """The ranks of a group and of those along other dims, as one."""
    for each in others:
        group = ShardGroup(each.process_group, torch.device(each.device_type), group)
    return group


def distinct_groups(tensor: Any) -> list[ShardGroup]:
    """Those of `groups_of` whose ranks hold different parts; what parts give adds up over one after the other."""
    layout = tensor.shard_storage.layout
    groups = [tensor.shard_group] if layout.dim is not None else []
    tp = tp_layout_of(layout)
    if tp is not None:
        groups += [group for placement, group in tp.axes if isinstance(placement, Shard)]
    return groups


def place_among_ranks(tensor: Any) -> tuple[tuple[int, int], ...]:
    """Of all groups of ranks that hold different parts of a tensor, this rank's number and how many they are."""
    return tuple((group.rank, group.num_ranks) for group in distinct_groups(tensor))


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
        return value.full_tensor()


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


def _take_local(operand: Tensor) -> Tensor:
    """The first step of such a view: from a DTensor, to its local tensor."""
    if type(operand) is not DTensor:
        raise UnsupportedOpError(
            "to_local: what it gives within a forward can be read and takes gradients, but it was written to. Write to "
            "the parameter itself."
        )
    return operand._local_tensor


_STEP: Any = ViewStep(_take_local, (), {})  # type: ignore[arg-type]


def is_local(view: View | None) -> bool:
    """Whether a chain of views starts from the local tensor, and so gives plain tensors."""
    return view is not None and view.steps[0] is _STEP


def is_in_forward(tensor: Any) -> bool:
    """Whether a forward runs of a module whose unit holds this DTensor parameter."""
    source = tensor.gather_source
    return tp_layout_of(tensor.shard_storage.layout) is not None and source is not None and source.num_active > 0


class LocalTensor(torch.autograd.Function):
    """`to_local` for autograd: what data parallelism gathers of a DTensor parameter, lazily; a view, so to say."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, grad_placements: Any) -> Tensor:
        """Remember it; nothing is gathered before its use."""
        layout = tensor.shard_storage.layout
        tp = tp_layout_of(layout)
        assert tp is not None
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        placements = tuple(grad_placements) if grad_placements is not None else tp.placements
        ctx.spec = DTensorSpec(tp.mesh, placements, tensor_meta=meta)
        local = ViewMeta(torch.Size(layout.shape), gathered_stride(layout, tensor.stride()), tensor.dtype)
        computes = tensor.computes()
        key = computes, "to_local"
        return tensor.lazy_view((_STEP,), tensor.view_spec(local), key, computes=computes)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """The gradient of the local tensor is the local tensor of the gradient."""
        local = grad.materialize() if hasattr(grad, "materialize") else grad
        return DTensor(local, ctx.spec, requires_grad=False), None


def init_hybrid_mesh(ranks_per_node: int | None = None) -> DeviceMesh:
    """A mesh for `fully_shard` that shards within nodes and replicates across them (HSDP), as FSDP1 makes by itself.

    Args:
        ranks_per_node: Neighbouring ranks that share parameters; by default those of a node, as torchrun says in
            `LOCAL_WORLD_SIZE`.

    Returns:
        A mesh of shape (nodes, ranks per node), whose dims are named "replicate" and "shard".

    Raises:
        ArgumentError: `ranks_per_node` is no number of ranks.
        StateError: No process group; or the nodes have different numbers of ranks, or the ranks of a node are no
            neighbours; or that number does not divide the number of ranks. On every rank alike.

    Communicates:
        An all-reduce of 32 bytes, and the making of process groups.
    """
    ranks = default_mesh()
    size = ranks.size()
    wrong: ArgumentError | None = None
    try:
        ranks_per_node = arguments.count("init_hybrid_mesh", "ranks_per_node", ranks_per_node, or_none=True)
    except ArgumentError as error:  # the other ranks wait to hear from this one
        wrong, ranks_per_node = error, 0
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) if ranks_per_node is None else ranks_per_node
    local_rank = int(os.environ.get("LOCAL_RANK", "-1")) if ranks_per_node is None else -1
    is_apart = local_size > 0 and local_rank >= 0 and ranks.get_rank() % local_size != local_rank
    group = group_of(ranks)
    facts = torch.tensor([local_size, -local_size, int(is_apart)], dtype=torch.int64, device="cpu")
    most, least, has_apart = collectives.all_reduce([facts], group, ReduceOp.MAX, label="nodes").wait()[0].tolist()
    if wrong is not None:
        raise wrong
    actual = f"{most}" if most == -least else f"between {-least} and {most}"
    if most != -least or most < 1 or size % most or has_apart:
        raise StateError(
            "init_hybrid_mesh: every node must have the same number of ranks, numbered one after the other, which "
            f"divides that of all ranks ({size}), but it is {actual}{' and they are not neighbours' * has_apart}. "
            "Start with torchrun, pass ranks_per_node=, or make the mesh by init_device_mesh."
        )
    mesh = init_device_mesh(ranks.device_type, (size // most, most), mesh_dim_names=("replicate", "shard"))
    group_of(mesh)  # which gives its groups the timeout of the default one
    return mesh
