"""What lies on a CUDA device beside a model's tensors: workspaces, the context, buffers of communicators."""

from collections.abc import Sequence
from dataclasses import dataclass

from dshard.planner.costs import Cluster
from dshard.policies import Strategy

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory that is no tensor of the model.

    Args:
        name: Of it.
        num_bytes: As a rule.
        most_bytes: What it may be.
        is_reserved: Whether the allocator counts it, rather than the driver alone.
        source: Where the figures come from.
    """

    name: str
    num_bytes: int
    most_bytes: int
    is_reserved: bool
    source: str


def workspaces_of(strategies: Sequence[Strategy], cluster: Cluster) -> tuple[Workspace, ...]:
    """What cuBLAS, CUDA and NCCL take beside tensors."""
    is_hopper = any(name in cluster.source.lower() for name in ("h100", "h200"))
    products = 32 * _MIB if is_hopper else 8 * _MIB + 128 * _KIB
    num = _num_communicators(strategies, cluster)
    return (
        Workspace(
            "cuBLAS",
            products,
            2 * products,
            is_reserved=True,
            source="torch's default CUBLAS_WORKSPACE_CONFIG, per handle and stream",
        ),
        Workspace(
            "CUDA context",
            500 * _MIB,
            700 * _MIB,
            is_reserved=False,
            source="from memory: what nvidia-smi shows of a process without tensors",
        ),
        Workspace(
            f"NCCL ({num} communicator{'s' * (num != 1)})",
            num * 200 * _MIB,
            num * 600 * _MIB,
            is_reserved=False,
            source="from memory: channels x buffers of 4 MiB, per communicator",
        ),
    )


def _num_communicators(strategies: Sequence[Strategy], cluster: Cluster) -> int:
    """Groups in which a rank communicates: all ranks, and under `hybrid` those with its shards, and its replicas.

    One more is that of the ranks over which layers are cut.
    """
    num_cut = int(cluster.tensor_parallel > 1)
    if cluster.num_ranks == 1:
        return num_cut
    within = {own.on(cluster.num_ranks).within or cluster.num_ranks for own in strategies if own.base != "ddp"}
    return 1 + 2 * len(within - {cluster.num_ranks}) + num_cut
