"""Shards of tensor subclasses that say how they are gathered, by `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

The methods are FSDP2's. The class's own operations cut such a tensor, and write to its shards. Its exact value is what
a plain tensor gets that it is copied into: the value outside of forwards, where nothing counts that was rounded to
travel.
"""

import torch
from torch import Tensor

from dshard.errors import UnsupportedOpError
from dshard.layout import ShardLayout


def subclass_gathers(tensor: object) -> bool:
    """Whether a tensor says itself how it is gathered."""
    return type(tensor) is not Tensor and hasattr(tensor, "fsdp_post_all_gather")


def holds_packed_bits(param: Tensor) -> bool:
    """Whether the bits of a parameter are no numbers of its dtype: packed weights in a dtype that is storage alone.

    bitsandbytes keeps what unpacks them as `quant_state`. A view of memory of another dtype is seen as long as torch
    remembers what it is a view of.
    """
    if getattr(param, "quant_state", None) is not None:
        return True
    return param._is_view() and param._base is not None and param._base.dtype != param.dtype


def exact_values(shard: Tensor, name: str) -> Tensor:
    """The values of a shard as a plain tensor of its dtype; itself, if it is none of a subclass.

    Raises:
        UnsupportedOpError: The subclass cannot be copied into a plain tensor.

    Communicates:
        Nothing.
    """
    if not subclass_gathers(shard):
        return shard
    plain = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        try:
            plain.copy_(shard)
        except Exception as error:
            raise UnsupportedOpError(
                f"{name}: the exact value of a {type(shard).__name__} is what copy_ gives a plain tensor, but that "
                f"raised {type(error).__name__}: {error}. Let its __torch_dispatch__ take aten.copy_ to a plain tensor."
            ) from error
    return plain


def cut_subclass(name: str, full: Tensor, layout: ShardLayout, rank: int, device: torch.device) -> Tensor:
    """This rank's shard, of the same class, by the operations that FSDP2 asks of a subclass.

    These are `split` along dim 0, `new_zeros`, `copy_`, where the dim is uneven `slice`, and `_to_copy` to go to
    another device.

    Raises:
        UnsupportedOpError: One of them raises, or gives another class or shape.
    """
    kind, shape = type(full), layout.local_shape(rank)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        try:
            parts = full.detach().chunk(layout.num_ranks)
            part = parts[min(rank, len(parts) - 1)]
            if part.device != device and not part.is_meta:
                part = part.to(device)
            shard = part.new_zeros(layout.local_shape(0))
            if shard.shape != shape:
                shard = shard.narrow(0, 0, shape[0])
            if shape[0]:
                shard.copy_(part)
        except Exception as error:
            raise UnsupportedOpError(
                f"{name}: fully_shard cuts a {kind.__name__} by its own split, new_zeros, slice and copy_, but "
                f"{type(error).__name__}: {error}. Let its __torch_dispatch__ take aten.split.Tensor, "
                "aten.new_zeros, aten.slice.Tensor and aten.copy_."
            ) from error
    if not subclass_gathers(shard) or tuple(shard.shape) != shape:
        raise UnsupportedOpError(
            f"{name}: split, new_zeros and slice of a {kind.__name__} must give one of shape {shape}, but gave a "
            f"{type(shard).__name__} of shape {tuple(shard.shape)}. Let its __torch_dispatch__ wrap their results."
        )
    return shard
