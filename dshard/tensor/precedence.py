"""Sharded tensors that are asked ahead of a tensor subclass, whatever the order of an operation's arguments.

Torch asks a subclass ahead of its base, and else the first argument. Where weights are gathered as a class whose
operations give that class again, activations are of it, too; asked first, it would take the sharded weight beside it
for a plain tensor, and wrap the result once more. So such a weight is of a class that is a subclass of both.
"""

from functools import cache
from typing import Any

from torch import Tensor

from dshard.tensor.sharded_tensor import SHARDED, VIEWS, ShardedTensor


def _absent(name: str) -> Any:
    def get(self: ShardedTensor) -> Any:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    return property(get)


def _of_gathered(self: ShardedTensor, name: str) -> Any:
    """An attribute that it has none of: in a forward, that of what it is there."""
    view = self._view
    is_in_forward = self.compute_dtype() is not None if view is None else view.computes
    if not is_in_forward or name.startswith("__"):
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    return getattr(self.materialize(), name)


# What a weight says of its shards: a sharded tensor itself is no such weight.
_HIDDEN = {name: _absent(name) for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather")}


def _said_to_be(other: type[Tensor]) -> Any:
    """A `__class__` that `isinstance` goes by, beside the type."""
    return property(lambda self: other, object.__dict__["__class__"].__set__)


@cache
def asked_before(kind: type[ShardedTensor], other: type[Tensor]) -> type[ShardedTensor]:
    """A class of sharded tensors that torch asks ahead of another class; to all else it is `kind`."""
    namespace = {
        **_HIDDEN,
        "__doc__": kind.__doc__,
        "__getattr__": _of_gathered,
        "__module__": __name__,
        "__slotnames__": kind.__slotnames__,
        "_kind": kind,
        "kin": ShardedTensor,
    }
    name = f"{kind.__name__}Before{other.__name__}"
    try:
        made: type[ShardedTensor] = type(name, (kind, other), namespace)
    except TypeError:  # both have __slots__: it says that it is of the other class, and torch takes its word
        made = type(name, (kind,), {**namespace, "__class__": _said_to_be(other)})
    SHARDED.add(made)
    if kind is not ShardedTensor:
        VIEWS[made] = asked_before(ShardedTensor, other)
    return made


def give_precedence(param: ShardedTensor, gathered: type[Tensor]) -> None:
    """Have a parameter, and views of it, asked ahead of the class that it is gathered as; a plain one never is."""
    kind = type(param)._kind or type(param)
    wanted = kind if gathered is Tensor else asked_before(kind, gathered)
    if type(param) is not wanted:
        param.__class__ = wanted
        param.known_views = None
