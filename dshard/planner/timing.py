"""What operations take on a device, by what takes their time."""

from collections.abc import Iterable
from dataclasses import replace

from dshard.planner.devices import Device
from dshard.planner.flops import Op
from dshard.planner.rates import Rates, kind_of
from dshard.planner.work import Work


def work_of(ops: Iterable[Op], device: Device, rates: Rates | None, *, is_compiled: bool = False) -> Work:
    """What some operations take on a device.

    Args:
        ops: Of a trace, not compiled.
        device: That runs them.
        rates: Which parts of its figures are reached; None for those of its efficiency, by which an operation is bound
            by its arithmetic or by its traffic.
        is_compiled: Whether traffic of what is neither product nor attention is that of fused kernels; needs rates.
    """
    known = list(ops)
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
