"""Clusters of described devices: hosts, and links as fast as a datasheet or measured runs have them."""

from dataclasses import replace
from pathlib import Path

from dshard.arguments import checked
from dshard.errors import PlanError
from dshard.planner.costs import Cluster, Link, Links
from dshard.planner.devices import Device, find_device
from dshard.planner.rates import Rates, find_rates

_START_S = 6.6e-6  # of a collective: torch/distributed/tensor/_collective_utils.py


def check_profile(device: Device | None, cluster: Cluster | None) -> None:
    """Check that a profile has a device to speak of, and that links are not a datasheet's beside it.

    Raises:
        PlanError: It has not, or they are.
    """
    if device is None:
        raise PlanError(
            "plan: profile= says which parts of a device's figures are reached, but device is None: times are measured "
            "here. Pass device='a100-80g', or leave profile= out."
        )
    if cluster is not None and cluster.num_ranks > 1 and cluster.source == device.source:
        raise PlanError(
            "plan: profile= has rates of links, too, but those of cluster are the datasheet's alone. Pass "
            f"cluster=cluster_of({device.name!r}, {cluster.num_ranks}, profile=...) with the same profile."
        )


@checked
def cluster_of(
    device: Device | str,
    num_ranks: int,
    *,
    ranks_per_host: int | None = None,
    between_hosts: float | None = None,
    profile: Rates | str | Path | None = None,
    tensor_parallel: int = 1,
) -> Cluster:
    """Hosts of a device, as its datasheet has them, or with links as fast as runs found them.

    Args:
        device: All ranks are alike; one of your own, or a name of `DEVICES`.
        num_ranks: All of them.
        ranks_per_host: Of a host; None for the usual host, or for fewer where there are not as many.
        between_hosts: Bytes per second of a whole host's network; None for the usual host's.
        profile: Which parts of the datasheet's figures links reach: what `dshard calibrate` wrote, as a path or read by
            `Rates.load`, or "published" for the one that is shipped; None for the same part of all.
        tensor_parallel: Neighbouring ranks over which each layer is cut. The cluster is then that of the others, one of
            each such group: those that share parameters, while as many groups as that send through a host's link.

    Raises:
        ArgumentError: There is no device of this name, or a number is none that is allowed.
        PlanError: There is no such profile; or layers would be cut over a part of a host's ranks that is none.
    """
    device = find_device(device, "cluster_of: device")
    if profile is None:
        found = _of_datasheet(device, num_ranks, ranks_per_host, between_hosts)
    else:
        rates = find_rates(profile)
        found = rates.cluster(device, num_ranks, ranks_per_host=ranks_per_host, between_hosts=between_hosts)
    return _beside(found, tensor_parallel)


def _of_datasheet(device: Device, num_ranks: int, ranks_per_host: int | None, between_hosts: float | None) -> Cluster:
    per_host = min(num_ranks, device.per_host) if ranks_per_host is None else ranks_per_host
    near, far = device.within_host, device.between_hosts
    across = None
    if num_ranks > per_host:
        rate = min(between_hosts or far.bytes_per_s, near.bytes_per_s)
        hop_s = (far.latency_s + (per_host - 1) * near.latency_s) / per_host  # a ring leaves a host once in a turn
        across = _links(rate, hop_s, device)
    return Cluster(
        num_ranks=num_ranks,
        ranks_per_host=per_host,
        inside=_links(near.bytes_per_s, near.latency_s, device),
        across=across,
        memory_bytes=device.limit_bytes,
        keeps_received_rows=False,
        source=device.source,
    )


def _links(bytes_per_s: float, latency_s: float, device: Device) -> Links:
    seconds_per_byte = 1 / (bytes_per_s * device.efficiency.network)
    return Links.of(Link(_START_S + latency_s, seconds_per_byte, latency_s, source=device.source))


def _beside(cluster: Cluster, num_cut: int) -> Cluster:
    """The ranks of a cluster that hold the same part of layers that are cut over `num_cut` neighbours."""
    if num_cut == 1:
        return cluster
    per_host = cluster.ranks_per_host
    if per_host % num_cut or cluster.num_ranks % num_cut:
        raise PlanError(
            f"cluster_of: tensor_parallel must divide the ranks of a host, over whose links layers are cut, but it is "
            f"{num_cut}, and {min(per_host, cluster.num_ranks)} of {cluster.num_ranks} ranks are on a host. Pass "
            f"tensor_parallel={max(num for num in range(1, per_host + 1) if per_host % num == 0 and num <= num_cut)}."
        )
    left, across = per_host // num_cut, cluster.across
    if across is not None:
        near_s = cluster.inside.all_gather.alpha_per_rank_s
        across = Links(
            *(
                _shared(link, num_cut, per_host, left, near_s)
                for link in (across.all_gather, across.reduce_scatter, across.all_reduce)
            )
        )
    num_ranks = cluster.num_ranks // num_cut
    return replace(cluster, num_ranks=num_ranks, ranks_per_host=left, across=across, tensor_parallel=num_cut)


def _shared(link: Link, num_sharing: int, per_host: int, left: int, near_s: float) -> Link:
    """A link between hosts that several groups use at a time; a ring of fewer ranks per host leaves it more often."""
    hop_s = link.alpha_per_rank_s
    if hop_s:
        far_s = hop_s * per_host - (per_host - 1) * near_s
        hop_s = (far_s + (left - 1) * near_s) / left
    alpha_s = link.alpha_s + (hop_s - link.alpha_per_rank_s)
    return replace(link, alpha_s=alpha_s, alpha_per_rank_s=hop_s, seconds_per_byte=link.seconds_per_byte * num_sharing)
