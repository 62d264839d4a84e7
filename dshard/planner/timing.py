"""What operations take on a device, by what takes their time."""

from collections.abc import Iterable
from dataclasses import replace

from dshard.planner.costs import Cluster
from dshard.planner.devices import Device
from dshard.planner.flops import Op
from dshard.planner.rates import Rates, kind_of
from dshard.planner.work import Work


def work_of(
    ops: Iterable[Op], device: Device, rates: Rates | None, *, is_compiled: bool = False, cut: Cluster | None = None
) -> Work:
    """What some operations take on a device.

    Args:
        ops: Of a trace, not compiled.
        device: That runs them.
        rates: Which parts of its figures are reached; None for those of its efficiency, by which an operation is bound
            by its arithmetic or by its traffic.
        is_compiled: Whether traffic of what is neither product nor attention is that of fused kernels; needs rates.
        cut: The ranks over which layers are cut; None for no such.
    """
    known: list[Op] = []
    sent: list[Op] = []
    for op in ops:
        (known if op.collective is None else sent).append(op)
    found = _computed(known, device, rates, is_compiled=is_compiled)
    return found if cut is None else replace(found, cut_s=sum((_sent_s(op, cut) for op in sent), 0.0))


def _sent_s(op: Op, cut: Cluster) -> float:
    """A collective among all ranks of a cluster; all to all sends as much of a tensor as a gather."""
    if op.collective == "all_reduce":
        return cut.all_reduce_s(op.num_bytes)
    if op.collective == "reduce_scatter":
        return cut.reduce_scatter_s(op.num_bytes, cut.num_ranks)
    return cut.all_gather_s(op.num_bytes, cut.num_ranks)


def _computed(known: list[Op], device: Device, rates: Rates | None, *, is_compiled: bool) -> Work:
    if rates is None:
        return _of_device(known, device)
    by_kind: dict[str, list[Op]] = {"product": [], "attention": [], "other": []}
    for op in known:
        by_kind[kind_of(op)].append(op)
    heavy = (by_kind["product"], by_kind["attention"])
    products_s, attention_s = (rates.seconds(device, [replace(op, num_bytes=0) for op in each]) for each in heavy)
    fused = rates.values["fused"] if is_compiled else 1.0
    traffic_s = sum(rates.seconds(device, each) for each in heavy) - products_s - attention_s
    return Work(products_s, attention_s, traffic_s + fused * rates.seconds(device, by_kind["other"]))


def _of_device(ops: list[Op], device: Device) -> Work:
    """The same by a device's own efficiency."""
    found = {"product": 0.0, "attention": 0.0, "other": 0.0}
    start_s = device.efficiency.kernel_s
    for op in ops:
        took_s = device.seconds((op,)) - start_s
        is_arithmetic = op.flops and took_s > device.seconds((replace(op, flops=0),)) - start_s
        found[kind_of(op) if is_arithmetic else "other"] += took_s
    return Work(found["product"], found["attention"], found["other"], starts_s=start_s * len(ops))
