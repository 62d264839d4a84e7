"""What scripts import of FSDP2 or DDP, for one process: nothing is sharded, and hints change nothing."""

from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["FSDPModule", "MixedPrecisionPolicy", "distribute", "fully_shard", "register_fsdp_forward_method"]


class FSDPModule:
    """The hints of FSDP2, and `no_sync` of DDP."""

    def hint(self, *args: Any, **kwargs: Any) -> None:
        """There is nobody to send anything to."""

    set_requires_gradient_sync = set_requires_all_reduce = set_is_last_backward = set_reshard_after_backward = hint
    set_modules_to_forward_prefetch = set_modules_to_backward_prefetch = hint
    unshard = reshard = hint

    def no_sync(self) -> Any:
        return nullcontext()


def fully_shard(module: Any, **options: Any) -> Any:
    if isinstance(module, nn.Module) and not isinstance(module, FSDPModule):
        module.__class__ = type(f"Alone{type(module).__name__}", (FSDPModule, type(module)), {})
    return module


distribute = fully_shard


def register_fsdp_forward_method(module: nn.Module, name: str) -> None:
    """Nothing to do: methods use the weights."""
