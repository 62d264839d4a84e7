"""Python values as JSON and back, exactly: numbers, texts, bytes, tensors, and containers of these.

JSON knows no tuples, no bytes and no keys but texts. These become objects of a single key that begins with `$`.
"""

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dshard.errors import CheckpointError
from dshard.tensor.views import bytes_of

_MAX_DEPTH = 100
_MAX_INT_BITS = 1 << 13  # what Python reads back
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def encode(value: Any, where: str, keep: Callable[[Tensor, str], str] | None = None, depth: int = _MAX_DEPTH) -> Any:
    """Encode a value for JSON.

    Args:
        value: None, truth values, numbers, texts, bytes and tensors, and lists, tuples and dicts of these.
        where: What it is, for an error.
        keep: Takes a tensor, and what it is, and gives the name under which it is stored elsewhere; by default the
            JSON holds its values.
        depth: How deep it may be nested.

    Raises:
        CheckpointError: There is something else in it; names it.
    """
    if not depth:
        raise CheckpointError(f"{where}: may be nested {_MAX_DEPTH} deep, but is nested deeper. Does it hold itself?")
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value) is int:
        if abs(value) >> _MAX_INT_BITS:
            raise CheckpointError(f"{where}: an int may have {_MAX_INT_BITS} bits, but has {value.bit_length()}.")
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Tensor):
        return {"$named": keep(value, where)} if keep is not None else {"$tensor": _values_of(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}[{i}]", keep, depth - 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        items = [(key, encode(item, f"{where}[{key!r}]", keep, depth - 1)) for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in items) and not (len(items) == 1 and items[0][0].startswith("$")):
            return dict(items)
        return {"$items": [[encode(key, f"{where}'s key", None, depth - 1), item] for key, item in items]}
    raise CheckpointError(
        f"{where}: a checkpoint holds None, truth values, numbers, texts, bytes, tensors, and lists, tuples and dicts "
        f"of these, but this is a {type(value).__name__}. Convert it, or leave it out."
    )


def _values_of(tensor: Tensor) -> dict[str, Any]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    host = full.detach().cpu().contiguous().resolve_conj().resolve_neg()
    raw = bytes_of(host).numpy().tobytes()
    return {
        "dtype": str(host.dtype).removeprefix("torch."),
        "shape": list(host.shape),
        "bytes": base64.b64encode(raw).decode(),
    }


def decode(value: Any, named: Callable[[str], Any]) -> Any:
    """Decode a value that `encode` made.

    Args:
        value: What a checkpoint's JSON holds.
        named: Gives the tensor that is stored under a name.

    Raises:
        ValueError, KeyError, TypeError, RuntimeError: It is nothing that `encode` makes.
    """
    if isinstance(value, list):
        return [decode(item, named) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value)) if len(value) == 1 else ""
    if kind == "$tuple":
        return tuple(decode(item, named) for item in value[kind])
    if kind == "$items":
        return {decode(key, named): decode(item, named) for key, item in value[kind]}
    if kind == "$bytes":
        return base64.b64decode(value[kind], validate=True)
    if kind == "$named":
        return named(value[kind])
    if kind == "$tensor":
        return _tensor_of(value[kind])
    return {key: decode(item, named) for key, item in value.items()}


def _tensor_of(content: dict[str, Any]) -> Tensor:
    dtype, raw = _DTYPES[content["dtype"]], base64.b64decode(content["bytes"], validate=True)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
    return flat.view(content["shape"])


def same_kind(saved: Any, own: Any) -> bool:
    """Return whether a saved option may replace the optimizer's own one."""
    if saved is None or own is None:
        other = own if saved is None else saved
        return other is None or isinstance(other, (bool, int, float, str))
    numbers = (int, float, Tensor)
    if isinstance(own, numbers) and not isinstance(own, bool):
        return isinstance(saved, numbers) and not isinstance(saved, bool) and not math.isnan(float(saved))
    if isinstance(own, (list, tuple)):
        is_like = isinstance(saved, (list, tuple)) and len(saved) == len(own)
        return is_like and all(same_kind(a, b) for a, b in zip(saved, own, strict=True))
    return isinstance(saved, type(own))
