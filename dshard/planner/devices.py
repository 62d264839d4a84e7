"""What devices can do, from public datasheets, and the one set of constants that says how much of it is reached."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from dshard.arguments import checked
from dshard.errors import ArgumentError, StateError
from dshard.kinds import nearest
from dshard.planner.flops import Op

_GIB = 2**30


@checked
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


@checked
@dataclass(frozen=True, slots=True)
class Wire:
    """One way between devices.

    Args:
        bytes_per_s: In one direction.
        latency_s: Of one hop.
    """

    bytes_per_s: float
    latency_s: float


@checked
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

    @checked
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

    @property
    def limit_bytes(self) -> int:
        """What of its memory a program can have."""
        return int(self.memory_bytes * self.efficiency.memory_free)

    def seconds(self, ops: Iterable[Op]) -> float:
        """Time of some operations one after another: each is bound by its arithmetic or by its memory traffic."""
        return sum(map(self._seconds_of, ops))

    def _seconds_of(self, op: Op) -> float:
        reached = self.efficiency
        moving = op.num_bytes / (self.memory_bytes_per_s * reached.memory)
        peak = self.flops_per_s.get(_name(op.dtype), self.flops_per_s["float32"])
        return max(moving, op.flops / (peak * reached.compute)) + reached.kernel_s


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gbit(number: float) -> float:
    return number * 1e9 / 8


_NVLINK_S, _PCIE_S, _NETWORK_S = 0.6e-6, 1e-6, 2.7e-6  # of a hop: torch/distributed/tensor/_collective_utils.py
_XGMI_S = _NVLINK_S  # assumed


def _table(devices: Iterable[Device]) -> Mapping[str, Device]:
    return MappingProxyType({device.name: device for device in devices})


DEVICES = _table(
    (
        Device(
            "a100-40g",
            {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
            1.555e12,
            40 * _GIB,
            8,
            Wire(300e9, _NVLINK_S),
            Wire(_gbit(400), _NETWORK_S),
            "NVIDIA A100 datasheet (SXM, 40 GB; NVLink 600 GB/s both ways); AWS p4d.24xlarge: EFA 400 Gbit/s per "
            "host; checked: two published copies of the datasheet, torchtitan's peak",
        ),
        Device(
            "a100-64g",
            {"bfloat16": 358e12, "float16": 358e12, "float32": 22.4e12},
            1.64e12,
            64 * _GIB,
            4,
            Wire(300e9, _NVLINK_S),
            Wire(_gbit(400), _NETWORK_S),
            "CINECA's description of Leonardo (A100 SXM made for it: 64 GB, 1,640 GB/s, 124 SMs in place of 108; 4 to"
            " a host, 4 x 100 Gbit/s); arithmetic is that of the NVIDIA A100 datasheet by that ratio; checked: "
            "CINECA's page (64 GB, 4 to a host, 400 Gbit/s); not found again: SMs and memory's rate",
        ),
        Device(
            "a100-80g",
            {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
            2.039e12,
            80 * _GIB,
            8,
            Wire(300e9, _NVLINK_S),
            Wire(_gbit(1600), _NETWORK_S),
            "NVIDIA A100 datasheet (SXM, 80 GB; NVLink 600 GB/s both ways); DGX A100: 8 x 200 Gbit/s per host; "
            "checked: a published copy of the datasheet, torchtitan's peak, stas00/ml-engineering (NVLink)",
        ),
        Device(
            "h100-64g",
            {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12},
            2.0e12,
            64 * _GIB,
            4,
            Wire(450e9, _NVLINK_S),
            Wire(_gbit(800), _NETWORK_S),
            "BSC's description of MareNostrum 5 (H100 SXM made for it, 64 GB, 2 TB/s; 4 x 200 Gbit/s per host); "
            "arithmetic and NVLink as in the NVIDIA H100 datasheet; checked: a copy of BSC's node description (64 GB "
            "HBM2, 4 to a host, 800 Gbit/s); not found again: memory's rate, which is a PCIe H100's",
        ),
        Device(
            "h100-80g",
            {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12},
            3.35e12,
            80 * _GIB,
            8,
            Wire(450e9, _NVLINK_S),
            Wire(_gbit(3200), _NETWORK_S),
            "NVIDIA H100 datasheet (SXM; NVLink 900 GB/s both ways); DGX H100: 8 x 400 Gbit/s per host; checked: "
            "torchtitan's peak (SXM; dense, half of what is printed), stas00/ml-engineering (fp32, memory, NVLink)",
        ),
        Device(
            "h100-96g",
            {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12},
            4.0e12,
            96 * _GIB,
            4,
            Wire(450e9, _NVLINK_S),
            Wire(_gbit(800), _NETWORK_S),
            "NVIDIA GH200 datasheet (96 GB HBM3, 4 TB/s; NVLink 900 GB/s both ways); Alps: 4 to a host, 4 x 200 "
            "Gbit/s; checked: stas00/ml-engineering (989 TFLOPS, 4 TB/s), CSCS's docs (4 modules and 4 cards), "
            "nvidia-smi (97,871 MiB)",
        ),
        Device(
            "h200",
            {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12},
            4.8e12,
            141 * _GIB,
            8,
            Wire(450e9, _NVLINK_S),
            Wire(_gbit(3200), _NETWORK_S),
            "NVIDIA H200 datasheet (SXM, 141 GB; NVLink 900 GB/s both ways); DGX H200: 8 x 400 Gbit/s per host; "
            "checked: torchtitan's peak, stas00/ml-engineering (4.8 TB/s), nvidia-smi (143,771 MiB: its GB are GiB)",
        ),
        Device(
            "b200",
            {"bfloat16": 2.25e15, "float16": 2.25e15, "float32": 75e12},
            7.67e12,
            180 * _GIB,
            8,
            Wire(900e9, _NVLINK_S),
            Wire(_gbit(3200), _NETWORK_S),
            "NVIDIA HGX B200 datasheet (180 GB; NVLink 1.8 TB/s both ways); DGX B200: 8 x 400 Gbit/s per host; "
            "checked: torchtitan's peak, pytorch/ao pull 4002 (7,680 bits at 3,996 MHz: 7.67 TB/s, where others print"
            " 8), nvidia-smi (183,359 MiB); fp32: 600 TFLOPS of 8 as printed, 80 each elsewhere",
        ),
        Device(
            "mi250x",
            {"bfloat16": 191.5e12, "float16": 191.5e12, "float32": 47.9e12},
            1.6384e12,
            64 * _GIB,
            8,
            Wire(50e9, _XGMI_S),
            Wire(_gbit(800), _NETWORK_S),
            "AMD Instinct MI250X datasheet, by half: each of its two dies is a device; Frontier's user guide: 8 dies "
            "to a host, the slowest xGMI link between two of them 50 GB/s one way, 4 x 200 Gbit/s per host; checked: "
            "torchtitan's peak per die, that guide (64 GB, 1.6 TB/s, cards), ROCm's docs (50 GB/s a link); fp32 by "
            "matrix cores (95.7 TFLOPS of both dies), as products run",
        ),
        Device(
            "mi300x",
            {"bfloat16": 1307.4e12, "float16": 1307.4e12, "float32": 163.4e12},
            5.3e12,
            192 * _GIB,
            8,
            Wire(448e9, _XGMI_S),
            Wire(_gbit(3200), _NETWORK_S),
            "AMD Instinct MI300X datasheet (192 GB; 7 xGMI links of 128 GB/s both ways); 8 x 400 Gbit/s per host; "
            "checked: stas00/ml-engineering (1,307 TFLOPS by clock and cores, fp32, 5.3 TB/s, 448 GB/s one way), "
            "torchtitan's peak",
        ),
        Device(
            "l40s",
            {"bfloat16": 362.05e12, "float16": 362.05e12, "float32": 91.6e12},
            0.864e12,
            48 * 10**9,
            8,
            Wire(31.5e9, _PCIE_S),
            Wire(_gbit(400), _NETWORK_S),
            "NVIDIA L40S datasheet (48 GB; PCIe 4.0 x16); the host's network is assumed; checked: two copies of the "
            "datasheet (362.05 TFLOPS dense, 91.6, 864 GB/s), torchtitan's peak, nvidia-smi (46,068 MiB, for ECC "
            "takes some)",
        ),
        Device(
            "rtx-4090",
            {"bfloat16": 165.2e12, "float16": 165.2e12, "float32": 82.6e12},
            1.008e12,
            24 * _GIB,
            8,
            Wire(31.5e9, _PCIE_S),
            Wire(_gbit(100), _NETWORK_S),
            "NVIDIA GeForce RTX 4090 product page and Ada whitepaper (24 GB; sums in fp32); PCIe 4.0 x16; the host's "
            "network is assumed; checked: waredb.com (165.15 TFLOPS dense, 82.58, 1,008 GB/s), nvidia-smi (24,564 "
            "MiB)",
        ),
        Device(
            "a6000",
            {"bfloat16": 154.8e12, "float16": 154.8e12, "float32": 38.7e12},
            0.768e12,
            48 * _GIB,
            8,
            Wire(31.5e9, _PCIE_S),
            Wire(_gbit(100), _NETWORK_S),
            "NVIDIA RTX A6000 datasheet (48 GB; NVLink joins pairs alone, so PCIe 4.0 x16); Ampere GA102 whitepaper; "
            "the host's network is assumed; checked: llmperf.net after Microway (154.8 TFLOPS dense), "
            "servethehome.com (768 GB/s, NVLink of two), nvidia-smi (49,140 MiB, without ECC as shipped)",
        ),
        Device(
            "v100-32g",
            {"float16": 125e12, "float32": 15.7e12},
            0.9e12,
            32 * _GIB,
            8,
            Wire(150e9, _NVLINK_S),
            Wire(_gbit(400), _NETWORK_S),
            "NVIDIA V100 datasheet (SXM2, 32 GB; NVLink 300 GB/s both ways); DGX-1: 4 x 100 Gbit/s per host",
        ),
        Device(
            "titan-rtx",
            {"float16": 130.5e12, "float32": 16.3e12},
            0.672e12,
            24 * _GIB,
            8,
            Wire(15.75e9, _PCIE_S),
            Wire(_gbit(100), _NETWORK_S),
            "NVIDIA TITAN RTX product page and Turing whitepaper (24 GB); PCIe 3.0 x16; the host's network is assumed",
        ),
    )
)


@checked
def device_named(name: Device | str) -> Device:
    """A device of the table; one that is given itself is taken as it is.

    Raises:
        ArgumentError: There is none of this name.
    """
    return find_device(name, "device_named: name")


def find_device(name: Device | str, what: str) -> Device:
    """The same, for an argument that a message shall name."""
    if isinstance(name, Device):
        return name
    if name not in DEVICES:
        raise ArgumentError(
            f"{what} must be one of {', '.join(DEVICES)}, but it is {name!r}. Pass {nearest(name, DEVICES)!r}."
        )
    return DEVICES[name]
