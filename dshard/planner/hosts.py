"""What stands beside devices: the CPU's memory, where parameters may be kept, and the way there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dshard.errors import PlanError
from dshard.planner.costs import Cluster, ModelCosts, UnitCosts
from dshard.planner.devices import Device
from dshard.planner.rates import family_of
from dshard.planner.sizes import sharing
from dshard.policies import Strategy


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


def check_offload(device: Device | None, offload: str, *, is_compiled: bool) -> None:
    """Refuse what cannot be planned for.

    Raises:
        PlanError: There is no device; or what is kept elsewhere would be compiled.
    """
    if offload == "none":
        return
    if is_compiled:
        raise PlanError(
            f"plan: is_compiled and offload={offload!r} do not go together, for torch.compile takes no parameters of a "
            "sharded model that are kept elsewhere. Leave one of them out."
        )
    if device is None:
        raise PlanError(
            f"plan: offload={offload!r} needs a device, which says how long copies from the CPU's memory take, but "
            "times are measured here. Pass device='h100-80g'."
        )


def with_offload(model: ModelCosts, device: Device | None, offload: str) -> ModelCosts:
    """A model of which units are kept in the CPU's memory, where the optimizer steps them.

    Args:
        model: Of which all are kept on the device.
        device: That says how long copies take; None with "none" alone: see `check_offload`.
        offload: "none", "all", or "auto" for an alternative of each.
    """
    if offload == "none":
        return model
    assert device is not None
    home, found = home_of(device), []
    for unit in model.units:
        alone = replace(unit, alternatives=())
        away = tuple(_offloaded(each, home) for each in (alone, *unit.alternatives))
        if offload == "all":
            found.append(replace(away[0], alternatives=away[1:]))
        else:
            found.append(replace(unit, alternatives=(*unit.alternatives, *away)) if unit.params else unit)
    source = f"{model.source}; offload: {home.source} (which part is reached is not measured)"
    return replace(model, units=tuple(found), source=source)


def _offloaded(unit: UnitCosts, home: Home) -> UnitCosts:
    return replace(
        unit,
        params=tuple(replace(param, can_split=False) for param in unit.params),
        optimizer_s=unit.touched_bytes * home.step_seconds_per_byte,
        home_s_per_byte=home.seconds_per_byte,
    )


def home_bytes(model: ModelCosts, strategies: Sequence[Strategy], cluster: Cluster) -> int:
    """What a rank has in the CPU's memory: shards of what is kept there, their gradients and optimizer states."""
    total = 0
    for unit, strategy in zip(model.units, strategies, strict=True):
        within = sharing(strategy, cluster.num_ranks)
        for param in unit.params if unit.is_offloaded else ():
            of_element = param.stored_itemsize * (2 if param.grad_itemsize else 1) + param.state_bytes_per_element
            total += param.shard_numel(within) * of_element
    return total
