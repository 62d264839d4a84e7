"""What stands beside devices: the CPU's memory, where parameters may be kept, and the way there."""

from dataclasses import dataclass

from dshard.planner.devices import Device
from dshard.planner.rates import family_of


@dataclass(frozen=True, slots=True)
class Home:
    """The CPU's memory, as one of a host's devices has it.

    Args:
        seconds_per_byte: Of copies from pinned memory to the device, or back; both run at a time.
        step_seconds_per_byte: Of what an optimizer's step on the CPU reads and writes.
        source: Where the figures come from.
    """

    seconds_per_byte: float
    step_seconds_per_byte: float
    source: str


_REACHED_BY_COPIES, _REACHED_BY_STEPS = 0.8, 0.5  # of the datasheets' rates: from memory, held against no run
# Of a device: bytes per second one way of its link to the host; its share of the host's memory rate, in bytes per
# second; and what that is.
_HOSTS = {
    "a100": (31.5e9, 51e9, "PCIe 4.0 x16; 2 x 8 channels of DDR4-3200 among 8 devices"),
    "h100": (63e9, 77e9, "PCIe 5.0 x16; 2 x 8 channels of DDR5-4800 among 8 devices"),
    "b200": (63e9, 90e9, "PCIe 5.0 x16; 2 x 8 channels of DDR5-5600 among 8 devices"),
    "mi250x": (36e9, 26e9, "Infinity Fabric, 36 GB/s per die; 8 channels of DDR4-3200 among 8 dies"),
    "mi300x": (63e9, 115e9, "PCIe 5.0 x16; 2 x 12 channels of DDR5-4800 among 8 devices"),
    "titan": (15.75e9, 26e9, "PCIe 3.0 x16; 2 x 6 channels of DDR4-2666 among 8 devices, rounded"),
}
_USUAL = (31.5e9, 51e9, "PCIe 4.0 x16, and the memory of an A100's host, for want of better")


def home_of(device: Device) -> Home:
    """The memory beside a device of the table; beside one of your own, what is usual."""
    link, memory, source = _HOSTS.get(family_of(device), _USUAL)
    return Home(1 / (link * _REACHED_BY_COPIES), 1 / (memory * _REACHED_BY_STEPS), source)
