"""Names that programs written for FSDP2 import, so that a change of the import is all they need."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from dshard.errors import StateError
from dshard.runtime.module import FSDPModule, units_of

__all__ = [
    "CPUOffloadPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "no_sync",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Accepted for FSDP2's sake, does nothing: a parameter can be used in any method.

    Args:
        module: Any module.
        method_name: Name of one of its methods.

    Raises:
        AttributeError: `module` has no such method.

    Communicates:
        Nothing.
    """
    getattr(module, method_name)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Accepted for FSDP2's sake, does nothing: the units of a model share one runtime. Communicates nothing.

    Args:
        modules: Sharded modules.
    """


@contextmanager
def no_sync(module: Any) -> Iterator[None]:
    """Let backwards inside of the scope add gradients up without reducing them; the next backward outside does.

    Args:
        module: A sharded module. Each of its units holds the full gradients of this rank meanwhile.

    Raises:
        StateError: `module` is not sharded.

    Communicates:
        Nothing. Reading such a gradient reduces it.
    """
    if not isinstance(module, FSDPModule):
        raise StateError(f"no_sync: needs a sharded module, but got {type(module).__name__}. Call fully_shard first.")
    before = {unit: unit.requires_sync for unit in units_of(module)}
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        for unit in units_of(module):
            unit.requires_sync = before.get(unit, True)
