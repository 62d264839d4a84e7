"""What of a model is in this rank's memory now, by what it is for."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from dshard.arguments import checked
from dshard.inspection.explain import Explanation, contexts_of, explain, inner_tensors, shard_bytes
from dshard.inspection.tables import html_table, known_bytes, text_table
from dshard.tensor import ShardedTensor

_WORDS = {
    "parameters": "shards of parameters, and parameters that are not sharded",
    "gradients": "that have arrived, in `.grad`",
    "states": "of the optimizers that were given",
    "buffers": "of the model",
    "gathered": "full values of parameters",
    "on their way": "buffers that gathers and reductions have taken from the pool, without the above",
    "pool": "that the pool keeps for the next gathers and reductions",
    "other": "what else the device's allocator has given out: activations, most of all",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What `report` gives: `str()` of it is a table, and so is what a notebook shows.

    Attributes:
        units: As of `explain`.
        num_bytes: On this rank now, by category; None where nobody knows: "states" without an optimizer, and
            "other" on a CPU, whose allocator does not count.
    """

    units: Explanation
    num_bytes: dict[str, int | None]

    def as_dict(self) -> dict[str, Any]:
        """All of it as numbers and texts, for a log."""
        units = [asdict(unit) for unit in self.units.units]
        return {"units": units, "bytes": dict(self.num_bytes)}

    def _rows(self) -> list[tuple[str, str, str]]:
        return [(name, known_bytes(num), _WORDS[name]) for name, num in self.num_bytes.items()]

    def __str__(self) -> str:
        return f"{self.units}\n\n{text_table(('on this rank now', 'bytes', ''), self._rows(), to_left=(0, 2))}"

    def _repr_html_(self) -> str:
        return self.units._repr_html_() + html_table(("on this rank now", "bytes", ""), self._rows(), to_left=(0, 2))


@checked
def report(model: nn.Module, optimizer: Any = None) -> Report:
    """Say what of a model is in this rank's memory now: units, and bytes by what they are for.

    Args:
        model: That `fully_shard` was called on, or one that holds such models. Units that are formed at the first use
            are formed now.
        optimizer: Of whose states to tell, or several.

    Raises:
        StateError: Nothing of the model is sharded.

    Communicates:
        Nothing. Gradients that are on their way are not waited for, and count with their bytes.
    """
    contexts = contexts_of("report", model)
    copies = [c for context in contexts for unit in context.units for c in {unit.copies, unit.exact}]
    buffers = {id(buffer): buffer for each in copies for buffer in each.memories}
    once = [c.host_copies for c in copies if c.host_copies is not None]
    gathered = sum(buffer.memory.numel() for buffer in buffers.values()) + sum(h.bytes_beside() for h in once)
    pools = {id(context.pool): context.pool for context in contexts}.values()
    in_pools = {id(buffer) for buffer in buffers.values() if buffer.is_in_use}
    on_way = sum(pool.out_bytes for pool in pools) - sum(buffers[key].memory.numel() for key in in_pools)
    optimizers: Iterable[Optimizer] = () if optimizer is None else _listed(optimizer)
    states = [value for each in optimizers for state in each.state.values() for value in tree_iter(state)]
    num_bytes: dict[str, int | None] = {
        "parameters": _bytes_of(model.parameters()),
        "gradients": _bytes_of(p.grad for p in model.parameters()),
        "states": None if optimizer is None else _bytes_of(states),
        "buffers": _bytes_of(model.buffers()),
        "gathered": gathered,
        "on their way": on_way,
        "pool": sum(pool.kept_bytes for pool in pools),
    }
    devices = (unit.device for context in contexts for unit in context.units if unit.device is not None)
    num_bytes["other"] = _others(next(devices, None), num_bytes)
    return Report(explain(model), num_bytes)


def _listed(optimizer: Any) -> list[Optimizer]:
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def _bytes_of(values: Iterable[Any]) -> int:
    """Bytes of tensors on this rank, each memory once; shards in flight by their layouts."""
    seen: dict[int, int] = {}
    in_flight = 0
    for value in values:
        tensor = value.shard_storage.tensor if isinstance(value, ShardedTensor) else value
        if tensor is None and isinstance(value, ShardedTensor):
            in_flight += shard_bytes(value)
        elif isinstance(tensor, Tensor) and not tensor.is_meta:
            seen |= {each.data_ptr(): each.nbytes for each in inner_tensors(tensor) if each.numel()}
    return in_flight + sum(seen.values())


def _others(device: torch.device | None, known: dict[str, int | None]) -> int | None:
    """What else an accelerator's allocator has given out."""
    if device is None or device.type != "cuda":
        return None
    return torch.cuda.memory_allocated(device) - sum(num or 0 for num in known.values())
