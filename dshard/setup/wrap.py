"""Which modules of a model become units of their own, as an auto-wrap policy says."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from dshard.arguments import call_given
from dshard.errors import StateError, UnsupportedOpError
from dshard.runtime.module import FSDPModule
from dshard.tensor import ShardedTensor

AutoWrapPolicy = Callable[..., Any] | Collection[type[nn.Module]]

_RESHARDS = {ShardingStrategy.FULL_SHARD: True, ShardingStrategy.SHARD_GRAD_OP: False}


def chosen_modules(
    roots: Sequence[nn.Module], policy: AutoWrapPolicy | None, ignored: Collection[nn.Parameter]
) -> dict[nn.Module, bool | None]:
    """Modules below some roots that a policy chooses, children before parents.

    Args:
        roots: Models; they are no candidates themselves.
        policy: Classes of modules; a function of a module that gives a bool; or one of those that torch's FSDP1 takes:
            an object (`ModuleWrapPolicy`, `CustomPolicy`), or a function of `module`, `recurse` and
            `nonwrapped_numel`; None chooses nothing.
        ignored: Parameters that are not counted. A module of which no parameter is left to take is no candidate: they
            are ignored, sharded already, or taken by modules in it.

    Returns:
        For each module, whether the policy wants it resharded after its forward; None where it says nothing.

    Raises:
        StateError: What the policy returns is none of these.
        UnsupportedOpError: It gives a module keyword arguments that cannot be honoured.
    """
    found: dict[nn.Module, bool | None] = {}
    if policy is None:
        return found
    takes = {id(p) for root in roots for p in root.parameters() if not isinstance(p, ShardedTensor)}
    takes -= {id(p) for p in ignored}
    for root in roots:
        chosen = (
            _of_torchs_object(root, policy) if hasattr(policy, "_run_policy") else _of_function(root, policy, takes)
        )
        for module in _children_first(root):
            mine = {id(p) for p in module.parameters()} & takes
            if module in chosen and module not in roots and not isinstance(module, FSDPModule) and mine:
                found[module] = chosen[module]
                takes -= mine
    return found


def _children_first(root: nn.Module) -> list[nn.Module]:
    """All modules, each once, after all that lie in it."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child not in found:
                visit(child)
        found[module] = None

    visit(root)
    return list(found)


def _of_torchs_object(root: nn.Module, policy: Any) -> dict[nn.Module, bool | None]:
    """What one of torch's policy objects chooses, with the arguments that it gives each module beyond the root's."""
    chosen: Mapping[nn.Module, Any] = _asked(policy._run_policy, root, ignored_modules=set(), root_kwargs={})
    return {module: _reshards(module, kwargs) for module, kwargs in chosen.items()}


def _asked(policy: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a policy says of a module."""
    module = args[0] if args else kwargs["module"]
    about = f"for a {type(module).__name__}"
    return call_given("fully_shard", "auto_wrap_policy", policy, *args, about=about, **kwargs)


def _reshards(module: nn.Module, kwargs: Mapping[str, Any]) -> bool | None:
    """The arguments that a policy gives a module, of which those that say when it is freed can be honoured."""
    reshard: Any = None
    unknown = []
    for key, value in kwargs.items():
        if key == "sharding_strategy" and isinstance(value, ShardingStrategy) and value in _RESHARDS:
            reshard = _RESHARDS[value]
        elif key == "reshard_after_forward" and (value is None or isinstance(value, bool)):
            reshard = value
        else:
            unknown.append(f"{key}={value}")
    if unknown:
        raise UnsupportedOpError(
            "fully_shard: an auto_wrap_policy may give a module reshard_after_forward as a bool, or sharding_strategy "
            f"FULL_SHARD or SHARD_GRAD_OP, but for a {type(module).__name__} it gives {', '.join(unknown)}. Leave them "
            "out, or call fully_shard on that module yourself."
        )
    return reshard


def _of_function(root: nn.Module, policy: Any, takes: set[int]) -> dict[nn.Module, bool | None]:
    """What classes or a function choose."""
    if isinstance(policy, type) and issubclass(policy, nn.Module):
        policy = (policy,)
    if isinstance(policy, Collection):
        classes = tuple(policy)
        return {m: None for m in root.modules() if isinstance(m, classes)}
    if _takes_numel(policy):
        chosen: dict[nn.Module, bool | None] = {}
        _descend(root, policy, takes, chosen)
        return chosen
    answers = {m: _asked(policy, m) for m in root.modules() if m is not root}
    for module, answer in answers.items():
        if not isinstance(answer, bool):
            raise StateError(
                "fully_shard: auto_wrap_policy must return a bool for each module, but for a "
                f"{type(module).__name__} it returned {answer!r}. Return True for modules that are to be units."
            )
    return {m: None for m, answer in answers.items() if answer}


def _takes_numel(policy: Callable[..., Any]) -> bool:
    """Whether a function is to be called as FSDP1 does it: by `module`, `recurse` and `nonwrapped_numel`."""
    parameters = inspect.signature(policy).parameters
    has_rest = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return has_rest or {"recurse", "nonwrapped_numel"} <= parameters.keys()


def _descend(module: nn.Module, policy: Callable[..., Any], takes: set[int], chosen: dict[nn.Module, Any]) -> int:
    """Ask FSDP1's kind of function, children first; gives how many elements of `module` are in chosen modules.

    Source: the protocol of torch's `_recursive_wrap`: a module is looked into if the policy says so for all its
    elements, and chosen if it says so for those that are left.
    """
    numel = sum(p.numel() for p in module.parameters() if id(p) in takes)
    if not _asked(policy, module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    inside = sum(_descend(child, policy, takes, chosen) for child in module.children())
    if _asked(policy, module=module, recurse=False, nonwrapped_numel=numel - inside):
        chosen[module] = None
        return numel
    return inside
