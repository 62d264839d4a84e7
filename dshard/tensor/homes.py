"""Lists of tensors of which some are kept elsewhere than others: operations over lists run once for each device."""

from typing import Any

from torch._ops import OpOverload

from dshard.tensor.offloaded import OffloadedShardedTensor
from dshard.tensor.sharded_tensor import ShardedTensor
from dshard.tensor.table import Args, Handler, Kwargs


def _homes(args: Args) -> list[Any]:
    """The devices on which the tensors of the first list are kept, in order; that may follow a number."""
    first = next((arg for arg in args if isinstance(arg, (list, tuple))), ())
    return [t.storage_device if isinstance(t, ShardedTensor) else t.device for t in first]


def once_per_home(handler: Handler) -> Handler:
    """A handler of an operation over lists, all of one length, that runs once for each device."""

    def run(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        if not OffloadedShardedTensor.num_made or len(set(homes := _homes(args))) < 2:
            return handler(func, args, kwargs)
        results: list[Any] = [None] * len(homes)
        for home in dict.fromkeys(homes):
            places = [i for i, other in enumerate(homes) if other == home]

            def part(value: Any, places: list[int] = places) -> Any:
                is_list = isinstance(value, (list, tuple)) and len(value) == len(homes)
                return [value[i] for i in places] if is_list else value

            found = handler(func, tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()})
            for i, result in zip(places, found or (), strict=False):
                results[i] = result
        return results if func._schema.returns else None

    return run


def apart(handler: Handler) -> Handler:
    """The short way of an optimizer's step, which is not for lists of several devices."""

    def run(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        if OffloadedShardedTensor.num_made and len(set(_homes(args))) > 1:
            return NotImplemented
        return handler(func, args, kwargs)

    return run
