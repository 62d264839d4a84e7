"""Where each parameter of a `fully_shard` call goes: over which mesh, and cut along which dim."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dshard.arguments import call_given
from dshard.errors import PlacementError, UnsupportedOpError
from dshard.policies import Strategy
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import mesh_within
from dshard.tensor.subclass_shards import subclass_gathers
from dshard.tensor.tp_params import check_dtensor

# Gives a Placement, None, or torch's ShardPlacementResult, which has a mesh, too.
PlacementFn = Callable[[nn.Parameter], Any]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one parameter.

    Args:
        mesh: Of one dim, to shard over, or two, to replicate over and to shard over.
        dim: Dim that is cut; None for a whole copy on every rank.
    """

    mesh: DeviceMesh
    dim: int | None

    @property
    def num_ranks(self) -> int:
        """Ranks that share it."""
        return int(self.mesh.size(self.mesh.ndim - 1))


def places_of(
    found: Sequence[tuple[str, nn.Parameter]], mesh: DeviceMesh, shard_placement_fn: PlacementFn | None
) -> list[Place]:
    """The place that each of some parameters goes to.

    Args:
        found: Parameters by name, plain ones and DTensors.
        mesh: Of those for which the function names no other.
        shard_placement_fn: The function.

    Raises:
        PlacementError: A parameter cannot have the placement, or mesh, that it is given. On every rank alike.
        UnsupportedOpError: A DTensor whose placements are no Shard or Replicate, or a mesh that is not supported. On
            every rank alike.

    Communicates:
        Nothing.
    """
    places = []
    for name, param in found:
        asked = None
        if shard_placement_fn is not None:
            asked = call_given("fully_shard", "shard_placement_fn", shard_placement_fn, param, about=f"for {name}")
        info = getattr(asked, "mesh_info", None)
        if info is None:
            place = Place(mesh, dim_of(name, param, asked))
        else:
            place = _place_of(name, param, asked, info)
        if isinstance(param, DTensor):
            check_dtensor(name, param, place.mesh)
        if subclass_gathers(param) and place.dim != 0:
            raise PlacementError(
                f"{name}: a tensor subclass with fsdp_pre_all_gather must be cut along dim 0, but this "
                f"{type(param).__name__} of shape {tuple(param.shape)} is to be "
                f"{'whole on every rank' if place.dim is None else f'cut along dim {place.dim}'}. Return Shard(0) or "
                "None from shard_placement_fn."
            )
        places.append(place)
    return places


def _place_of(name: str, param: nn.Parameter, asked: Any, info: Any) -> Place:
    """What torch's ShardPlacementResult asks for."""
    mesh, shard, replicate = info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim
    if shard is None and mesh.ndim == 1:
        return Place(mesh, None)
    if (shard, replicate, mesh.ndim) not in ((0, None, 1), (1, 0, 2)):
        raise UnsupportedOpError(
            f"{name}: shard_placement_fn may return a mesh of one dim, to shard over, or of two, to replicate over and "
            f"to shard over, but it returned a mesh of shape {tuple(mesh.shape)} with shard_mesh_dim={shard} and "
            f"replicate_mesh_dim={replicate}. Pass some of its dims, as in FSDPMeshInfo(mesh['dp'], shard_mesh_dim=0)."
        )
    return Place(mesh, dim_of(name, param, asked.placement))


def dim_of(name: str, param: nn.Parameter, placement: Any) -> int | None:
    """The dim along which a placement cuts a parameter; None for a whole copy on every rank.

    Raises:
        PlacementError: It is no Shard of one of its dims, no Replicate, and not None, which stands for `Shard(0)`.
    """
    if placement is None:
        placement = Shard(0)
    if isinstance(placement, Replicate) or param.dim() == 0:
        return None
    dim = placement.dim if type(placement) is Shard else None
    if dim is None or not -param.dim() <= dim < param.dim():
        raise PlacementError(
            f"{name}: shard_placement_fn must return Shard of one of its {param.dim()} dims, Replicate() or None, but "
            f"it returned {placement} (shape {tuple(param.shape)}). Return Shard(0)."
        )
    return dim % param.dim()


def placed_by(name: str, param: Tensor, place: Place, strategy: Strategy | None) -> Place:
    """The place of a parameter that follows a strategy, if it would go to `place` without one.

    Raises:
        PlacementError: The ranks that are to share it do not divide those of the mesh, or are replicated already. On
            every rank alike.
        UnsupportedOpError: It is a DTensor that is to be shared by some of the ranks alone, or says itself how it is
            gathered and is to be whole. On every rank alike.

    Communicates:
        For `hybrid(k)`, the making of process groups, the first time.
    """
    if strategy is None:
        return place
    mesh = place.mesh
    strategy = strategy.on(place.num_ranks)
    if strategy.base == "ddp":
        return place if _is_gathered_itself(name, param, place) else Place(mesh, None)
    if strategy.within is None:
        return place
    if mesh.ndim > 1:
        raise PlacementError(
            f"{name}: {strategy} makes replicas of a mesh of one dim, but this one has {mesh.ndim} (shape "
            f"{tuple(mesh.shape)}), of which the first is that of replicas. Pass a mesh of one dim, or 'full'."
        )
    if isinstance(param, DTensor) and not isinstance(param, ShardedTensor):
        raise UnsupportedOpError(
            f"{name}: {strategy} needs a mesh of its own, which a DTensor's mesh is not part of. Make one mesh of all "
            "dims, and pass those to replicate and to shard over to fully_shard, as in mesh['replicate', 'shard']."
        )
    return Place(mesh_within(mesh, strategy.within), place.dim)


def _is_gathered_itself(name: str, param: Tensor, place: Place) -> bool:
    """Whether a parameter on one rank is one that says how it is gathered; on several such a one cannot be whole."""
    value = param.shard_storage.resolve() if isinstance(param, ShardedTensor) else param
    if subclass_gathers(value) and place.num_ranks > 1:
        raise UnsupportedOpError(
            f"{name}: a {type(value).__name__} says how it is gathered from shards, but under ddp every rank is to "
            "hold it whole. Choose among 'full', 'keep', 'zero1' and 'zero2'."
        )
    return subclass_gathers(value)


def replicated(param: nn.Parameter) -> Replicate:
    """A `shard_placement_fn` that cuts nothing."""
    return Replicate()


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise unless a mesh has as many dims as `fully_shard` takes."""
    if mesh.ndim not in (1, 2):
        raise UnsupportedOpError(
            "fully_shard: the mesh must have one dim, to shard over, or two, to replicate over and to shard over, but "
            f"it has {mesh.ndim} (shape {tuple(mesh.shape)}). Pass some of its dims, as in mesh['dp']."
        )
