"""What devices can do, from public datasheets, and the one set of constants that says how much of it is reached."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import torch

from dshard import arguments
from dshard.errors import StateError
from dshard.planner.flops import Op


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Which parts of a device's peak rates are reached; the same for every device and model.

    Args:
        compute: Of the peak FLOP/s, by a large matrix product, convolution or attention.
        memory: Of the memory bandwidth, by an operation that is bound by it.
        network: Of the bandwidth of a link, by a large collective.
        memory_free: Of the memory, what is left to a program beside the context of the device and of its network.
        kernel_s: What an operation takes at least, in seconds: small ones reach little of any rate.
        source: Where these come from.
    """

    compute: float
    memory: float
    network: float
    memory_free: float
    kernel_s: float
    source: str

    def __post_init__(self) -> None:
        arguments.fields(self, arguments.above_0, "compute", "memory", "network", "memory_free")
        arguments.fields(self, arguments.from_0, "kernel_s")


EFFICIENCY = Efficiency(
    compute=0.607,
    memory=0.8,
    network=0.8,
    memory_free=0.95,
    kernel_s=4e-6,
    source=(
        "compute is fitted to one published row (minGPT-175B, 512 A100-80GB, batch 2: 186 TFLOPS per GPU); memory is "
        "what a copy reaches on HBM, network what nccl-tests reach on NVLink and InfiniBand; the rest is rounded"
    ),
)


@dataclass(frozen=True, slots=True)
class Wire:
    """One way between devices.

    Args:
        bytes_per_s: In one direction.
        latency_s: Of one hop.
    """

    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        arguments.fields(self, arguments.above_0, "bytes_per_s")
        arguments.fields(self, arguments.from_0, "latency_s")


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device and the usual host around it.

    Args:
        name: As on the command line.
        flops_per_s: Peak of dense matrix products, by name of the dtype.
        memory_bytes_per_s: Peak bandwidth of its memory.
        memory_bytes: Size of it.
        per_host: Number of them in the usual host.
        within_host: From one device to the others of its host.
        between_hosts: Of a whole host, all its network cards together.
        source: Where these figures are from.
    """

    name: str
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    memory_bytes: int
    per_host: int
    within_host: Wire
    between_hosts: Wire
    source: str
    efficiency: Efficiency = field(default=EFFICIENCY)

    def __post_init__(self) -> None:
        allowed = "a dict of finite numbers above 0 by names of dtypes"
        arguments.by_name("Device", "flops_per_s", self.flops_per_s, _is_rate, allowed, "Pass {'bfloat16': 312e12}.")
        arguments.fields(self, arguments.above_0, "memory_bytes_per_s", "memory_bytes")
        arguments.fields(self, arguments.count, "per_host")
        way = "Pass dshard.planner.Wire(bytes_per_s, latency_s)."
        arguments.fields(self, arguments.instance, "within_host", "between_hosts", kind=Wire, way=way)
        arguments.instance("Device", "efficiency", self.efficiency, Efficiency, "Leave it out.")

    def check(self, dtype: torch.dtype) -> None:
        """Raise unless the device computes in a dtype.

        Raises:
            StateError: It does not.
        """
        if _name(dtype) not in self.flops_per_s:
            raise StateError(
                f"{self.name}: must be asked for one of its dtypes ({', '.join(self.flops_per_s)}), but it is "
                f"{_name(dtype)}. Pass one of these."
            )

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP per second of matrix products in a dtype; in one of which the datasheet says nothing, as in fp32."""
        return self.flops_per_s.get(_name(dtype), self.flops_per_s["float32"])

    @property
    def limit_bytes(self) -> int:
        """What of its memory a program can have."""
        return int(self.memory_bytes * self.efficiency.memory_free)

    def seconds(self, ops: Iterable[Op]) -> float:
        """Time of some operations one after another: each is bound by its arithmetic or by its memory traffic."""
        return sum(max(bounds_s(self, op)) + self.efficiency.kernel_s for op in ops)


def bounds_s(device: Device, op: Op) -> tuple[float, float]:
    """Times of the arithmetic of an operation on a device, and of its memory traffic."""
    reached = device.efficiency
    traffic_s = op.num_bytes / (device.memory_bytes_per_s * reached.memory)
    return op.flops / (device.peak(op.dtype) * reached.compute), traffic_s


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _table() -> Mapping[str, Device]:
    """The devices of `devices.json`, which is shipped."""
    records = json.loads((files("dshard.planner") / "devices.json").read_text())
    found = {}
    for record in records:
        wires = {name: Wire(**record[name]) for name in ("within_host", "between_hosts")}
        found[record["name"]] = Device(**(record | wires))
    return MappingProxyType(found)


DEVICES = _table()


def device_named(name: Device | str) -> Device:
    """A device of the table; one that is given itself is taken as it is.

    Raises:
        ArgumentError: There is none of this name.
    """
    return find_device("device_named", "name", name)


def find_device(who: str, name: str, value: Device | str | None, *, or_none: bool = False) -> Any:
    """Find a device that is an argument of a function, by its name; return a `Device`, or an allowed None, as it is.

    Raises:
        ArgumentError: There is none of this name.
    """
    if isinstance(value, Device):
        return value
    allowed = "a name of dshard.planner.DEVICES, or a Device of your own"
    arguments.expect(isinstance(value, str), who, name, value, allowed, "Pass 'a100-80g'.", or_none=or_none)
    if value is None:
        return None
    way = f"Pass {arguments.nearest(value, DEVICES)!r}."
    arguments.expect(value in DEVICES, who, name, value, f"one of {', '.join(DEVICES)}", way)
    return DEVICES[value]
