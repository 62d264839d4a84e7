"""Torch 2.11 runs DTensor's own dispatch for subclasses of DTensor too, and never calls their `__torch_dispatch__`.

Ahead of that it asks the registry that `torch.library.register_torch_dispatch` fills. Rules there are per operation and
class; `ask_the_class` makes the registry answer for every operation that meets a class.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._library import simple_registry
from torch.distributed.tensor import DTensor


def asks_subclasses() -> bool:
    """Whether this torch calls the `__torch_dispatch__` of a subclass of DTensor."""
    return torch.torch_version.TorchVersion(torch.__version__) >= "2.12"


def ask_the_class(tensor_class: type[DTensor]) -> None:
    """Have every operation on `tensor_class` call its `__torch_dispatch__`, as newer releases do."""
    holder: Any = simple_registry.GenericTorchDispatchRuleHolder
    find = holder.find

    def rule(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tensor_class.__torch_dispatch__(func, types, args, kwargs)

    def find_or_ask(rules: Any, torch_dispatch_class: type) -> Callable[..., Any] | None:
        return rule if issubclass(torch_dispatch_class, tensor_class) else find(rules, torch_dispatch_class)

    holder.find = find_or_ask
