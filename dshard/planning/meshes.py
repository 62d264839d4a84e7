"""The ranks at hand, as a plan sees them: links and strategies of a mesh of one dim, or of replicas by shards."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dshard import collectives
from dshard.collectives import ShardGroup
from dshard.errors import PlanError
from dshard.planner import Cluster, Link, Plan
from dshard.planner.files import of_record, to_record
from dshard.planning.links import measure_links
from dshard.policies import Strategy
from dshard.tensor import ShardedTensor

_NAME = "dshard_all"
_REFUSED = "!"  # ahead of what a rank raised


@dataclass(frozen=True, slots=True)
class PlannedMesh:
    """What of a mesh decides a plan.

    Args:
        whole: All of its ranks, as one dim.
        within: Of a mesh of two dims, the size of the second: as many ranks share a parameter, and no others can.
        cut_over: That of the ranks over which layers are cut, beside this one; None for no such.
    """

    whole: DeviceMesh
    within: int | None = None
    cut_over: DeviceMesh | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh, cut_over: DeviceMesh | None = None) -> "PlannedMesh":
        """A mesh that `fully_shard` takes.

        Args:
            mesh: Of one dim or two.
            cut_over: That of the ranks over which layers are cut, beside it.

        Raises:
            PlanError: It has more dims than two.

        Communicates:
            Of two dims that are not the whole world, the making of a process group, the first time.
        """
        if mesh.ndim == 1:
            return cls(mesh, cut_over=cut_over)
        if mesh.ndim != 2:
            raise PlanError(
                "plan: mesh must have one dim, to shard over, or two, to replicate over and to shard over, but it has "
                f"{mesh.ndim} (shape {tuple(mesh.shape)}). Pass some of its dims, as in mesh['dp']."
            )
        num_replicas, within = mesh.shape
        if num_replicas == 1:
            alone = mesh[mesh.mesh_dim_names[1]] if mesh.mesh_dim_names else _flattened(mesh)
            return cls(alone, cut_over=cut_over)
        return cls(_flattened(mesh), within, cut_over)

    def links(self) -> Cluster:
        """Its links, measured; of ranks over which layers are cut those of the first one's mesh.

        Communicates:
            As `measure_links`; of such ranks, for each dim of their mesh, two broadcasts besides.
        """
        if self.within is None or self.within == 1:
            found = measure_links(self.whole)
        else:
            found = in_stages(measure_links(self.whole, within=(self.within,)), self.within)
        if self.cut_over is None:
            return found
        record: Any = json.loads(self._first(json.dumps(to_record(found))))
        return replace(of_record(Cluster, record, "links"), tensor_parallel=num_cut_over(self.cut_over))

    def shared(self, make: Callable[[], Plan]) -> Plan:
        """A plan; of ranks over which layers are cut the first one's, for what they measured differs.

        Where they recomputed other layers, they would wait for one another in backward.

        Raises:
            PlanError: What that rank's `make` raises.

        Communicates:
            For each dim of their mesh two broadcasts, of 8 bytes and of the plan.
        """
        if self.cut_over is None:
            return make()
        try:
            text = make().to_json()
        except PlanError as error:
            text = f"{_REFUSED}{error}"
        text = self._first(text)
        if text.startswith(_REFUSED):
            raise PlanError(text.removeprefix(_REFUSED))
        return Plan.from_json(text)

    def _first(self, text: str) -> str:
        """What the first of the ranks over which layers are cut has to say."""
        assert self.cut_over is not None
        device = torch.device(self.cut_over.device_type)
        for dim in range(self.cut_over.ndim):
            text = _first_text(text, ShardGroup.of_mesh(self.cut_over.get_group(dim), device))
        return text

    def strategies(self, asked: Sequence[Strategy | str] | None, cluster: Cluster) -> tuple[Strategy, ...]:
        """Strategies, resolved for all of its ranks; None for all that there are.

        Raises:
            PlacementError, PlanError: One is none that the mesh can have.
        """
        if asked is None:
            asked = strategies_for(cluster, self.within)
            if self.cut_over is not None:  # whose parameters know their own mesh beside this one, and no other
                asked = [each for each in asked if each.num_slices == 1 and each.within in (None, self.within)]
        return tuple(dict.fromkeys(self._resolved(Strategy.of(each), cluster.num_ranks) for each in asked))

    def _resolved(self, strategy: Strategy, num_ranks: int) -> Strategy:
        if self.within is None or strategy.base == "ddp":
            return strategy.on(num_ranks)
        if strategy.within not in (None, self.within):
            raise PlanError(
                f"plan: on a mesh of two dims the second says how many ranks share a parameter ({self.within}), but "
                f"strategies has {strategy}. Pass 'full', 'keep', 'zero1', 'zero2' or 'ddp', or a mesh of one dim."
            )
        return replace(strategy, within=self.within).on(num_ranks)


def mesh_cut_over(model: nn.Module) -> DeviceMesh | None:
    """The ranks over which layers of a model are cut: the mesh of its DTensor parameters, if it has any.

    Raises:
        PlanError: There are several, of other sizes; or the model is sharded already.
    """
    sharded = next((name for name, param in model.named_parameters() if isinstance(param, ShardedTensor)), None)
    if sharded is not None:
        raise PlanError(
            f"plan: the model must not be sharded yet, but {sharded} is a ShardedTensor. Plan ahead of fully_shard, or "
            "for the same model built anew; set_strategy takes the plan, too."
        )
    meshes = {name: param.device_mesh for name, param in model.named_parameters() if isinstance(param, DTensor)}
    sizes = {mesh.size(): name for name, mesh in meshes.items()}
    if len(sizes) > 1:
        (one, first), (other, second), *_ = sizes.items()
        raise PlanError(
            f"plan: all layers must be cut over as many ranks, but {first} is over {one} and {second} over {other}. "
            "Leave expert parallelism out, or pass costs of your own to dshard.planner.solve."
        )
    return next(iter(meshes.values()), None)


def num_cut_over(mesh: DeviceMesh | None) -> int:
    """How many ranks that are; 1 where there is no such mesh."""
    return 1 if mesh is None else mesh.size()


def _first_text(text: str, group: ShardGroup) -> str:
    """What the first rank of a group has to say."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8)
    (length,) = collectives.broadcast([torch.tensor([len(own)])], group, label="plan").wait()
    sent = own if group.rank == 0 else torch.zeros(int(length), dtype=torch.uint8)
    (found,) = collectives.broadcast([sent], group, label="plan").wait()
    return bytes(found.tolist()).decode()


def check_tensor_parallel(num_cut: int, cluster: Cluster) -> None:
    """Check that a cluster is one of ranks behind each of which stand as many as a model is cut over.

    Raises:
        PlanError: It is not.
    """
    if num_cut != cluster.tensor_parallel:
        raise PlanError(
            f"plan: cluster must say over how many ranks the model's layers are cut ({num_cut}, by its DTensor "
            f"parameters), but it says {cluster.tensor_parallel}. Pass cluster=cluster_of(device, num_ranks, "
            f"tensor_parallel={num_cut})."
        )


def _flattened(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.size() == collectives.world_size():
        return DeviceMesh(mesh.device_type, mesh.mesh.flatten())
    return mesh._flatten(_NAME)  # part of another one, whose dims have names


def in_stages(cluster: Cluster, within: int) -> Cluster:
    """A cluster where what is whole on all ranks is reduced as on a mesh of two dims: over one, then over the other."""
    num_ranks, links = cluster.num_ranks, cluster.replicas[1]
    stages = ((within, cluster.shards[within].all_reduce), (num_ranks // within, cluster.replicas[within].all_reduce))
    per_byte = sum(2 * (num - 1) / num * link.seconds_per_byte for num, link in stages)
    alpha_s = sum(link.alpha_s + link.alpha_per_rank_s * (num - 2) for num, link in stages)
    both = Link(alpha_s, per_byte * num_ranks / (2 * (num_ranks - 1)), source=links.all_reduce.source)
    return replace(cluster, replicas={**cluster.replicas, 1: replace(links, all_reduce=both)})


def strategies_for(cluster: Cluster, shared_by: int | None = None) -> tuple[Strategy, ...]:
    """All that a unit may have on a cluster: shards over all ranks, or within a host and replicated across.

    Args:
        cluster: Ranks and links.
        shared_by: Of a mesh of two dims, how many ranks share a parameter, and no others can.
    """
    known = [
        Strategy.of(name) for name in ("ddp", "zero1", "zero2", "keep", "full", "split(2)", "split(4)", "split(8)")
    ]
    within = cluster.ranks_per_host
    if shared_by is not None:
        known = [each if each.base == "ddp" else replace(each, within=shared_by) for each in known]
    elif 1 < within < cluster.num_ranks:
        known += [Strategy.of(f"hybrid({within})"), Strategy.of(f"hybrid({within}, keep)")]
    return tuple(dict.fromkeys(known))
