"""The scope in which full values stay at hand."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dshard.errors import StateError
from dshard.runtime import Unit
from dshard.tensor import ShardedTensor

__all__ = ["gathered"]


@contextmanager
def gathered(target: nn.Module | ShardedTensor | Sequence[ShardedTensor]) -> Iterator[dict[str, Tensor]]:
    """Hold the full values of parameters for the length of a scope.

    Inside, no use of them gathers again, and `data_ptr()` of a parameter is the address of its full value.

        with dshard.gathered(model) as full:
            torch.save(full, "weights.pt")

    Args:
        target: A sharded module (all parameters of it), a parameter, or several.

    Yields:
        Name to full value, plain tensors that must not be written to; write to the parameters themselves.

    Raises:
        StateError: `target` holds nothing that is sharded; or, at the end, a full value was written to.

    Communicates:
        One all-gather per bucket of each unit that is not gathered yet, at the start.
    """
    params = _sharded_params(target)
    if not params:
        raise StateError("gathered: needs sharded parameters, but got none. Call fully_shard first.")
    for param in params:
        if isinstance(param._source, Unit):
            param._source.observer.before_use()
    units = list(dict.fromkeys(p._source for p in params if isinstance(p._source, Unit)))
    try:
        for unit in units:
            unit.num_pins += 1
            unit.gather()
        with torch.no_grad():
            fulls = {p.name: p.materialize() for p in params}
        alone = {p.name for p in params if p._group.num_ranks == 1}  # there, the full value is the shard itself
        versions = {name: full._version for name, full in fulls.items() if name not in alone}
        yield fulls
        written = [name for name, version in versions.items() if fulls[name]._version != version]
        if written:
            raise StateError(
                f"{written[0]}: what gathered() yields must not be written to, but it was; that write is lost. Write "
                "to the parameter itself, as in module.weight.zero_()."
            )
    finally:
        for unit in units:
            unit.num_pins -= 1
            unit.free()


def _sharded_params(target: Any) -> list[ShardedTensor]:
    if isinstance(target, nn.Module):
        return [p for p in target.parameters() if isinstance(p, ShardedTensor)]
    items = [target] if isinstance(target, Tensor) else list(target)
    found = [p for p in items if isinstance(p, ShardedTensor)]
    wrong = [type(p).__name__ for p in items if not isinstance(p, ShardedTensor)]
    if wrong:
        raise StateError(f"gathered: needs sharded parameters, but got {', '.join(wrong)}. Call fully_shard first.")
    return found
