"""Names that programs written for FSDP2 import, so that a change of the import is all they need."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from dshard import arguments
from dshard.runtime.module import FSDPModule
from dshard.runtime.module_hooks import as_forward

__all__ = [
    "CPUOffloadPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "no_sync",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


@dataclass
class CPUOffloadPolicy(fsdp.CPUOffloadPolicy):
    """Keeps parameters, gradients and optimizer states in the CPU's memory. torch's own may be passed as well.

    Args:
        pin_memory: Whether that memory is pinned, so that copies run beside what the device computes.
        defer_step: Whether an optimizer of `torch.optim` that treats each element by itself steps beside the next
            forward, each unit ahead of its use. Whatever else looks at parameters, gradients or states waits first, so
            that no program can tell but by the time that it takes; False is for measuring that.
    """

    defer_step: bool = True


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method be a forward of its module: under mixed precision, parameters have their compute dtype in it.

    For anything else a method needs no registration. Its arguments and result are cast as those of `forward` are, and
    the module's own unit is freed when it ends.

    Args:
        module: Any module; one that is not sharded is not looked at, so that a program can run with and without.
        method_name: Name of one of its methods.

    Raises:
        ValueError: `module` is sharded, and has no such method. On every rank alike.

    Communicates:
        Nothing.
    """
    arguments.module("register_fsdp_forward_method", "module", module)
    arguments.text("register_fsdp_forward_method", "method_name", method_name)
    if isinstance(module, FSDPModule) and not hasattr(module, method_name):
        raise ValueError(
            f"register_fsdp_forward_method: the module must have the method, but {type(module).__name__} has no "
            f"{method_name}. Look at its spelling."
        )
    if isinstance(module, FSDPModule):
        as_forward(module, method_name)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Accepted for FSDP2's sake, does nothing: the units of a model share one runtime. Communicates nothing.

    Args:
        modules: Sharded modules.

    Raises:
        ArgumentError: One of them is not.
    """
    arguments.sharded_modules("share_comm_ctx", "modules", modules)


def no_sync(module: Any) -> AbstractContextManager[None]:
    """Let backwards inside of the scope add gradients up without reducing them; the next backward outside does.

    Args:
        module: A sharded module. Each of its units holds the full gradients of this rank meanwhile.

    Raises:
        ArgumentError: `module` is not sharded.

    Communicates:
        Nothing. Reading such a gradient reduces it.
    """
    return arguments.sharded_module("no_sync", "module", module).no_sync()
