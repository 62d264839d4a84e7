"""The way back: a sharded model becomes the plain one that it was."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from dshard import arguments
from dshard.agreement import check_same, refused_together
from dshard.autograd import outside_autograd
from dshard.errors import ArgumentError, StateError, UnsupportedOpError
from dshard.gathering import refuse_meta
from dshard.gradients.backward import users_hooks
from dshard.gradients.reducer import Reducer
from dshard.optimizer.steps import known_optimizers
from dshard.runtime.module import FSDPModule, original_class, say_unmanaged
from dshard.runtime.module_hooks import FORWARD_METHODS, forget_casts, unwatch
from dshard.setup.set_strategy import context_at_rest
from dshard.slices import SlicedForward
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import joined_group
from dshard.tensor.sharded_tensor import ShardedBase
from dshard.tensor.subclass_shards import subclass_gathers
from dshard.units.unit import Unit

_OWN_ATTRIBUTES = frozenset(ShardedBase.__annotations__) | {"_is_param", "_spec", "_home_device", "_draws_like"}


def to_plain(
    model: nn.Module, *, rank: int | None = None, optimizer: Optimizer | Sequence[Optimizer] | None = None
) -> nn.Module:
    """Make a sharded model plain again, in place: what `fully_shard` did to it is undone.

    Its parameters become `nn.Parameter`s that hold their full values, its modules are of their old classes, and nothing
    communicates any more; `fully_shard` may be called on it again. Names, ties, hooks, `requires_grad`, attributes of
    parameters and reduced gradients stay. Optimizers that have stepped before hold the plain parameters from then on,
    with their full states; those that have not follow at their first step. One value at a time is gathered beside what
    is plain already.

    Args:
        model: The module that the outermost call of `fully_shard` was given.
        rank: The rank of the model's mesh that gets the values; on the others parameters and their optimizers' states
            are on the meta device. None for all of them.
        optimizer: More optimizers, that have not stepped in this process.

    Returns:
        `model` itself.

    Raises:
        ArgumentError: It is no sharded module, or not the outermost one; or there is no such rank. On every rank alike.
        StateError: A forward, a backward or a `gathered` scope runs; or a parameter is on the meta device. On every
            rank alike.
        UnsupportedOpError: A parameter is a tensor subclass that says itself how it is gathered. On every rank alike;
            nothing was changed.
        DivergenceError: The ranks pass different arguments. On every rank alike; nothing was changed.

    Communicates:
        An all-reduce of 64 bytes; an all-gather of each parameter, gradient and state that is cut.
    """
    context = context_at_rest("to_plain", arguments.sharded_module("to_plain", "model", model))
    params: dict[str, ShardedTensor] = {n: p for n, p in model.named_parameters() if isinstance(p, ShardedTensor)}
    widest = max(map(joined_group, params.values()), key=lambda group: group.world_size)
    with refused_together("to_plain", ["rank", "optimizer"], widest):
        rank = arguments.count("to_plain", "rank", rank, least=0, or_none=True)
        given = arguments.optimizers("to_plain", "optimizer", optimizer)
        _check(model, context.root, params, rank, widest.world_size)
        held = list(dict.fromkeys([*(given or ()), *known_optimizers()]))
        optimizers = [each for each in held if _holds(each, params)]
    described = [f"{type(each).__name__} of {len(each.param_groups)} groups" for each in optimizers]
    check_same("to_plain", {"rank": repr(rank), "optimizer": described}, widest)

    context.get(Reducer).reduce_all()
    for unit in context.units:
        unit.reshard()
    is_here = rank is None or widest.world_rank == rank
    plain = {id(param): _plain_parameter(param, is_here=is_here) for param in params.values()}
    for each in optimizers:
        _repoint(each, plain, is_here=is_here)
    for module in model.modules():
        for name, old in module._parameters.items():
            if isinstance(old, ShardedTensor):
                module._parameters[name] = plain[id(old)]
        _undo(module)
    say_unmanaged(model)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.__dict__.pop("flatten_parameters", None)
            module._init_flat_weights()
    for param in params.values():
        _retire(param, plain[id(param)])
    context.pool.clear()
    return model


def _check(
    model: nn.Module, root: nn.Module | None, params: dict[str, ShardedTensor], rank: int | None, num_ranks: int
) -> None:
    """Refuse what cannot be made plain, ahead of any change."""
    if root is not None and root is not model:
        raise ArgumentError(
            f"to_plain: model must be the outermost sharded module, but this {type(model).__name__} lies in a sharded "
            f"{type(root).__name__}. Pass that one."
        )
    if rank is not None and rank >= num_ranks:
        raise ArgumentError(
            f"to_plain: rank must be one of the {num_ranks} ranks of the model's mesh, but it is {rank}. Pass 0."
        )
    refuse_meta("to_plain", list(params.items()))
    for name, param in params.items():
        shard = param.shard_storage.resolve()
        if subclass_gathers(shard):
            raise UnsupportedOpError(
                f"{name}: to_plain makes plain parameters, but this one's shards are of {type(shard).__name__}, which "
                "says how they are gathered and not how they become one again. Copy full_tensor() into a model of "
                "your own."
            )


def _plain_parameter(param: ShardedTensor, *, is_here: bool) -> nn.Parameter:
    """The parameter that takes the place of a sharded one, with what a program has put on it."""
    with outside_autograd():
        new = _made_plain(param, is_here=is_here)
        kind = param.plain_class or nn.Parameter
        made: nn.Parameter
        if isinstance(new, DTensor) or not issubclass(kind, nn.Parameter) or kind is nn.Parameter:
            made = nn.Parameter(new, requires_grad=param.requires_grad)
        else:
            made = torch.Tensor._make_subclass(kind, new, param.requires_grad)
    for name, value in param.__dict__.items():
        if name not in _OWN_ATTRIBUTES:
            made.__dict__[name] = value
    grad: Any = param.grad
    if grad is not None and is_here:
        with outside_autograd():
            made.grad = _made_plain(grad, is_here=True) if isinstance(grad, ShardedTensor) else grad
    on_gradient, after_accumulation = users_hooks(param)
    for hook in on_gradient:
        made.register_hook(hook)
    for hook in after_accumulation:
        made.register_post_accumulate_grad_hook(hook)
    return made


def _made_plain(value: ShardedTensor, *, is_here: bool) -> Tensor:
    """The full value in memory of its own; of a parameter of tensor parallelism, a DTensor over its other mesh."""
    full = value.gathered_alone()
    full = full.to(value.storage_device) if type(full) is Tensor else full
    if is_here:
        return full.clone(memory_format=torch.preserve_format)
    return torch.empty_like(full, device="meta")


def _holds(optimizer: Optimizer, params: dict[str, ShardedTensor]) -> bool:
    own = set(map(id, params.values()))
    return any(id(param) in own for group in optimizer.param_groups for param in group["params"])


def _repoint(optimizer: Optimizer, plain: dict[int, nn.Parameter], *, is_here: bool) -> None:
    """Have an optimizer hold plain parameters and full states."""
    state: Any = optimizer.state
    for group in optimizer.param_groups:
        for i, param in enumerate(group["params"]):
            new = plain.get(id(param))
            if new is None:
                continue
            group["params"][i] = new
            if param in state:
                values = state.pop(param)
                state[new] = (
                    {name: _plain_state(value, is_here=is_here) for name, value in values.items()}
                    if isinstance(values, dict)
                    else values
                )


def _plain_state(value: Any, *, is_here: bool) -> Any:
    if isinstance(value, ShardedTensor):
        with outside_autograd():
            return _made_plain(value, is_here=is_here)
    if isinstance(value, DTensor):
        full = value.full_tensor()
        return full if is_here else torch.empty_like(full, device="meta")
    return value


def _undo(module: nn.Module) -> None:
    """Take off a module what makes it a sharded one, or one that tells of its forwards."""
    if isinstance(module, FSDPModule):
        for name in module.__dict__.pop(FORWARD_METHODS, ()):
            module.__dict__.pop(name, None)
        for key in (STATE_KEY, REGISTRY_KEY):
            module.__dict__.pop(key, None)
        module.__class__ = original_class(type(module))  # type: ignore[assignment]
    if isinstance(vars(module).get("forward"), SlicedForward):
        del vars(module)["forward"]
    forget_casts(module)
    unwatch(module)


def _retire(param: ShardedTensor, new: nn.Parameter) -> None:
    """Let go of the shards; who kept the parameter is told where it is."""
    unit = param.gather_source
    if isinstance(unit, Unit) and unit in unit.model.units:
        unit.model.units.remove(unit)
    if param.grad_hook_handle is not None:
        param.grad_hook_handle.remove()
    param.grad = None
    param.plain = new
    param.shard_storage.retire(
        StateError(
            f"{param.name}: to_plain has made this parameter a plain one, but the sharded one is used. Take it from "
            "the module again."
        )
    )
