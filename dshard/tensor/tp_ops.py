"""Operations in which DTensors meet sharded tensors, or sharded tensors lie over another mesh, too."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter, tree_map_only

from dshard.errors import UnsupportedOpError
from dshard.tensor.local_views import is_local
from dshard.tensor.operands import is_recorded, materialize
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.stepping import is_stepping
from dshard.tensor.table import Args, Kwargs
from dshard.tensor.tp_layout import TPLayout, TPShardLayout, replicated, tp_layout_of

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
    args, kwargs = tree_map_only(ShardedTensor, lambda t: _operand(t, mesh), (args, kwargs))
    return func(*args, **kwargs)


def _tp_layout_of(tensor: ShardedTensor) -> TPLayout | None:
    """How a tensor lies over another mesh; None for a local tensor that `to_local` gave."""
    return None if is_local(tensor._view) else tp_layout_of(tensor.shard_storage.layout)


def _is_plain(tensor: Tensor) -> bool:
    if isinstance(tensor, ShardedTensor):
        return is_local(tensor._view)
    return tensor.dim() > 0 and not isinstance(tensor, DTensor)


def _operand(tensor: ShardedTensor, mesh: DeviceMesh) -> Tensor:
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
