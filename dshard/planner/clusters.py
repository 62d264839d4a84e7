"""Clusters of described devices: hosts, and links as fast as a datasheet or measured runs have them."""

from dataclasses import replace
from pathlib import Path

from dshard.arguments import checked
from dshard.errors import PlanError
from dshard.planner.costs import Cluster, Link, Links
from dshard.planner.devices import Device, find_device
from dshard.planner.rates import START_S, Rates, find_rates


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
    per_host = min(num_ranks, device.per_host) if ranks_per_host is None else ranks_per_host
    rates = None if profile is None else find_rates(profile)
    if tensor_parallel == 1:
        return _described(device, rates, num_ranks, per_host, between_hosts)
    if per_host % tensor_parallel or num_ranks % tensor_parallel:
        fitting = [num for num in range(1, tensor_parallel) if per_host % num == 0 and num_ranks % num == 0]
        raise PlanError(
            f"cluster_of: tensor_parallel must divide the ranks of a host, over whose links layers are cut, but it is "
            f"{tensor_parallel}, and {min(per_host, num_ranks)} of {num_ranks} ranks are on a host. Pass "
            f"tensor_parallel={fitting[-1]}."
        )
    each = (between_hosts or device.between_hosts.bytes_per_s) / tensor_parallel  # as many groups send at a time
    found = _described(device, rates, num_ranks // tensor_parallel, per_host // tensor_parallel, each)
    slowest = 0.0 if rates is None else rates.stragglers(num_ranks)  # of all ranks
    return replace(found, tensor_parallel=tensor_parallel, stragglers=slowest)


def _described(
    device: Device, rates: Rates | None, num_ranks: int, per_host: int, between_hosts: float | None
) -> Cluster:
    if rates is not None:
        return rates.cluster(device, num_ranks, ranks_per_host=per_host, between_hosts=between_hosts)
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
    return Links.of(Link(START_S + latency_s, seconds_per_byte, latency_s, source=device.source))
