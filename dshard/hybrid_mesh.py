"""Meshes that follow the machines: shards within a node, replicas across nodes."""

import os

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dshard import arguments, collectives
from dshard.collectives import ReduceOp
from dshard.errors import ArgumentError, StateError
from dshard.tensor.meshes import default_mesh, group_of


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
        ranks_per_node = arguments.read("init_hybrid_mesh", {"ranks_per_node": ranks_per_node})["ranks_per_node"]
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
