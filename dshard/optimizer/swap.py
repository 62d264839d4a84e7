"""The shards of parameters, which stand in for them while an elementwise optimizer steps."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import attrgetter, is_, not_
from typing import Any, ClassVar

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dshard.errors import StateError
from dshard.optimizer.rows import FEWEST_IN_ROW, Row, Rows, params_of
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.storage import ShardStorage, shards_of
from dshard.tensor.subclass_shards import subclass_gathers

_NAMES = ("ASGD", "SGD", "Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop", "Rprop")
_ELEMENTWISE = frozenset(getattr(optim, name) for name in _NAMES)
_STORAGE, _GRAD, _VIEW, _ORIGIN = map(attrgetter, ("shard_storage", "grad", "_view", "origin"))
_LAYOUT, _PENDING, _STANDIN = map(attrgetter, ("shard_storage.layout", "_pending", "standin"))


@dataclass(frozen=True, slots=True)
class _Swap:
    """An optimizer whose parameters are replaced by shards while its step runs."""

    optimizer: Optimizer
    params: list[list[Tensor]]  # of each of its groups
    state: Any
    swapped: list[ShardedTensor]  # the sharded parameters
    shards: list[Tensor]  # what stands in for each of them
    versions: list[int]  # version counters of those shards at the start
    state_values: list[Any]  # all values of the states that the optimizer sees of these, in order
    rows: Sequence[Row]  # of other parameters
    undo: Callable[[], None]  # what else was changed for the step


class _Current:
    """The swap of the step that runs, or of one that raised; and one that raised and has not been told of."""

    swap: ClassVar[_Swap | None] = None
    untold: ClassVar[_Swap | None] = None


def closure_of(args: Any, kwargs: Any) -> Any:
    """What `step` was given to compute the loss anew; None if nothing."""
    return args[1] if len(args) > 1 else kwargs.get("closure") if kwargs else None


def may_swap(optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
    """Whether nobody but the optimizer itself will look at its groups during the step."""
    return (
        type(optimizer) in _ELEMENTWISE
        and closure_of(args, kwargs) is None
        and not optimizer.defaults.get("differentiable")
    )


def standin_of(param: ShardedTensor) -> Tensor | None:
    """The shard of a parameter, with that of its gradient; None if the two do not lie alike, or it is no plain one."""
    storage, grad = param.shard_storage, param.grad
    shard = storage.standin
    if storage.is_pending or shard is None:
        if subclass_gathers(storage.resolve()):
            return None  # it may write by putting other tensors in itself, of which an alias would not know
        shard = storage.standin = storage.resolve().detach()  # an object of its own, for the key and the gradient
    if grad is None:
        shard.grad = None
        return shard
    if not isinstance(grad, ShardedTensor) or grad.is_view or param.is_view:
        return None
    grad_storage = grad.shard_storage
    if grad_storage.layout is not storage.layout and grad_storage.layout != storage.layout:
        return None
    shard.grad = grad_storage.tensor if not grad_storage.is_pending else grad_storage.resolve()
    return shard


def _standins_of(params: Sequence[ShardedTensor]) -> list[Tensor] | None:
    """`standin_of` each of them; None if one has none. Most often all are alike, and few lines ask that of all."""
    storages, grads = list(map(_STORAGE, params)), list(map(_GRAD, params))
    standins: list[Any] = list(map(_STANDIN, storages))
    are_ready = _are_none(map(_PENDING, storages)) and not any(map(is_, standins, repeat(None)))
    are_alike = are_ready and SHARDED.issuperset(map(type, grads)) and _are_none(map(_VIEW, chain(params, grads)))
    if are_alike and all(map(is_, map(_LAYOUT, grads), map(_LAYOUT, params))):
        for standin, grad in zip(standins, shards_of(list(map(_STORAGE, grads))), strict=True):
            standin.grad = grad
        return standins
    found: list[Tensor] = []
    for param in params:
        standin = standin_of(param)
        if standin is None:
            forget_gradients(found)
            return None
        found.append(standin)
    return found


def _are_none(values: Iterable[Any]) -> bool:
    return all(map(is_, values, repeat(None)))


def _nothing() -> None:
    pass


def begin_swap(
    optimizer: Optimizer,
    args: Any,
    kwargs: Any,
    left_out: Collection[int] = (),
    undo: Callable[[], None] = _nothing,
) -> bool:
    """Let shards stand in for the parameters of an optimizer that is about to step; gives whether they do.

    Nothing is done if somebody else may look at them, or one has no shard that can stand in for it.

    Args:
        optimizer: The optimizer.
        args: Of its step.
        kwargs: Of its step.
        left_out: Ids of parameters that it is not to step.
        undo: Called when the optimizer has its parameters back.
    """
    if not may_swap(optimizer, args, kwargs):
        return False
    swapped: list[ShardedTensor] = []
    shards: list[Tensor] = []
    groups: list[list[Tensor]] = []
    num_params = len(params_of(optimizer))
    rows = Rows.of(optimizer) if not left_out and num_params >= FEWEST_IN_ROW else None
    apart = left_out if rows is None else rows.of_param
    for number, group in enumerate(optimizer.param_groups):
        params: list[Tensor] = [row.tensor for row in rows.rows if row.group == number] if rows is not None else []
        given = group["params"] if len(apart) < num_params else ()  # else all are apart
        own = [param for param in given if id(param) not in apart] if apart else given
        are_sharded = list(map(SHARDED.__contains__, map(type, own)))
        sharded, plain = list(compress(own, are_sharded)), list(compress(own, map(not_, are_sharded)))
        takes_all = all(type(param.grad) not in SHARDED for param in plain)
        standins = _standins_of(sharded) if takes_all else None
        if standins is None:
            forget_gradients(shards)
            if rows is not None:
                rows.let_go()
            return False
        swapped += sharded
        shards += standins
        if plain:
            rest = iter(standins)
            params += [next(rest) if is_one else param for param, is_one in zip(own, are_sharded, strict=True)]
        else:
            params += standins
        groups.append(params)
    if shards or apart:
        _swap(optimizer, groups, swapped, shards, apart, rows, undo)
    return True


def _swap(
    optimizer: Optimizer,
    groups: list[list[Tensor]],
    swapped: list[ShardedTensor],
    shards: list[Tensor],
    apart: Collection[int],
    rows: Rows | None,
    undo: Callable[[], None],
) -> None:
    """Give an optimizer groups and states of shards; the hash of a tensor is its id, so ids serve as keys here."""
    of_param = dict(zip(map(id, swapped), shards, strict=True))
    has_own = rows is None or not rows.has_all_states
    keys, all_named = (list(optimizer.state), list(optimizer.state.values())) if has_own else ([], [])
    if apart:
        are_own = list(map(not_, map(apart.__contains__, map(id, keys))))
        keys, all_named = list(compress(keys, are_own)), list(compress(all_named, are_own))
    values = list(chain.from_iterable(map(dict.values, all_named)))
    are_sharded = list(map(SHARDED.__contains__, map(type, values)))
    sharded = list(compress(values, are_sharded))
    if not _are_none(map(_ORIGIN, sharded)):
        for value in sharded:  # of states that were cast as they were loaded: the step writes to them uncounted
            value.origin = None
    resolved = iter(shards_of(list(map(_STORAGE, sharded))))
    seen = [next(resolved) if is_one else value for value, is_one in zip(values, are_sharded, strict=True)]
    rest = iter(seen)
    state: Any = defaultdict(dict)
    for param, named in zip(map(of_param.get, map(id, keys), keys), all_named, strict=True):
        state[param] = dict(zip(named, rest, strict=False))  # takes as many as there are names
    params = [group["params"] for group in optimizer.param_groups]
    all_rows = rows.rows if rows is not None else []
    for row in all_rows:
        state[row.tensor] = row.begin()
    versions = [shard._version for shard in shards]
    _Current.swap = _Swap(optimizer, params, optimizer.state, swapped, shards, versions, seen, all_rows, undo)
    for group, standins in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = standins
    optimizer.state = state


def forget_gradients(shards: Iterable[Tensor]) -> None:
    """Have shards that do not stand in for parameters after all hold no gradients."""
    for shard in shards:
        shard.grad = None


def end_swap(optimizer: Optimizer) -> None:
    """Give an optimizer that has stepped its parameters back, if shards stood in for them."""
    swap = _Current.swap
    if swap is not None and swap.optimizer is optimizer:
        _restore(swap)


def _restore(swap: _Swap) -> None:
    """Give an optimizer its parameters back, and its state as sharded as they are."""
    _Current.swap = None
    swap.undo()
    for group, params in zip(swap.optimizer.param_groups, swap.params, strict=True):
        group["params"] = params
    state: Any = swap.optimizer.state
    made = _end_rows(swap, state)
    seen = list(chain.from_iterable(map(dict.values, state.values())))
    are_new = len(seen) != len(swap.state_values) or not all(map(is_, seen, swap.state_values))
    if made or are_new:
        _order_states(swap, state, made)
    if are_new:
        _wrap_states(swap)
    swap.optimizer.state = swap.state
    if made or are_new:
        Rows.note_states(swap.optimizer)
    moved: list[Tensor] = []
    for param, shard in zip(swap.swapped, swap.shards, strict=True):
        if shard.grad is not None:
            shard.grad = None
            moved.append(param)
        elif param.grad is not None:
            param.grad = None  # by zero_grad(), after a step that raised
    torch.autograd.graph.increment_version(moved)


def _end_rows(swap: _Swap, state: dict[Any, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Give the parameters of rows what became of these; gives the states of those that have others than before."""
    writes_grads = "grad_scale" in swap.optimizer.__dict__  # fused kernels take a scaler's scale out of gradients
    made: dict[int, dict[str, Any]] = {}
    for row in swap.rows:
        if row.end(state.pop(row.tensor), writes_grads=writes_grads):
            made |= zip(map(id, row.params), row.named, strict=True)
    return made


def _order_states(swap: _Swap, state: Mapping[Any, Any], made: Mapping[int, dict[str, Any]]) -> None:
    """Put new states where the optimizer would have: in the order of its parameters, alike on all ranks."""
    of_param = dict(zip(map(id, swap.swapped), swap.shards, strict=True))
    for param in chain.from_iterable(swap.params):
        if id(param) in made:
            swap.state[param] = made[id(param)]
        elif of_param.get(id(param), param) in state:
            swap.state[param]  # makes it


def _wrap_states(swap: _Swap) -> None:
    """Shard the values of a state that the step made or replaced."""
    of_shard = dict(zip(map(id, swap.shards), swap.swapped, strict=True))
    for key, values in swap.optimizer.state.items():
        param = of_shard.get(id(key))
        if param is None:
            swap.state[key] = values
            continue
        old = swap.state[param]
        for name, value in values.items():
            old[name] = wrapped_state(old.get(name), value, param, key.shape)


def wrapped_state(old: Any, value: Any, param: ShardedTensor, shape: torch.Size) -> Any:
    """A state's value as it is kept between steps."""
    if type(old) in SHARDED:
        storage = old.shard_storage
        if storage.tensor is not value:
            storage.deliver(value)
        return old
    if isinstance(value, Tensor) and value.dim() and value.shape == shape:
        return param.like(ShardStorage(value, param.shard_layout, is_shared=True), dtype=value.dtype)
    return value


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups as they are now, without their parameters."""
    return [{name: copied(value) for name, value in g.items() if name != "params"} for g in optimizer.param_groups]


def alike(
    optimizer: Optimizer, settings: Sequence[dict[str, Any]], groups: dict[int, dict[int, Tensor]], state: Any
) -> Optimizer:
    """An optimizer like another one, over other tensors; what its step writes to itself is not seen by the other one.

    Args:
        optimizer: The other one.
        settings: Of its groups, when it stepped.
        groups: Tensors, by the numbers of the groups that they are in, and their places there.
        state: Of them.
    """
    made: Any = object.__new__(type(optimizer))
    for name, value in optimizer.__dict__.items():
        if name not in _APART and not name.startswith("_dshard"):
            made.__dict__[name] = copied(value)
    made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    made.__dict__[_IS_PART] = True
    made.param_groups = [part_of_group(settings[number], tensors) for number, tensors in sorted(groups.items())]
    made.state = state
    return made


_APART = ("param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_IS_PART = "_dshard_is_part"


def is_part(optimizer: Optimizer) -> bool:
    """Whether an optimizer was made by `alike`, to step for another one."""
    return _IS_PART in optimizer.__dict__


def part_of_group(settings: Mapping[str, Any], tensors: Mapping[int, Tensor]) -> dict[str, Any]:
    """A group of an optimizer with some of its parameters, by their places in it, in order."""
    places = sorted(tensors)
    group = {name: copied(value) for name, value in settings.items()}
    if "param_names" in group:
        group["param_names"] = [settings["param_names"][place] for place in places]
    return {**group, "params": [tensors[place] for place in places]}


def copied(value: Any) -> Any:
    """A setting that nobody else writes to; parameters in it are the same ones."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named one
        return type(value)(*map(copied, value))
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    if type(value) is dict:
        return {key: copied(each) for key, each in value.items()}
    return value.clone() if isinstance(value, Tensor) and not isinstance(value, (nn.Parameter, DTensor)) else value


def check_interrupted(optimizer: Optimizer | None, params: Sequence[Tensor]) -> None:
    """Repair an optimizer whose step raised; if parameters had moved by then, say so once.

    Args:
        optimizer: Whose step begins, or None.
        params: What is about to be used.

    Raises:
        StateError: A step of `optimizer`, or of one that holds some of `params`, was interrupted after it had begun to
            write. Only the ranks on which it was raise.
    """
    swap = _Current.swap
    if swap is not None:
        has_moved = any(s._version != v for s, v in zip(swap.shards, swap.versions, strict=True))
        has_moved |= any(row.has_moved for row in swap.rows)
        _restore(swap)
        # A fused kernel may have written to them, and counts nothing.
        torch.autograd.graph.increment_version(swap.shards)
        _Current.untold = swap if has_moved else None
    untold = _Current.untold
    if untold is None:
        return
    held = {*map(id, untold.swapped), *(id(param) for row in untold.rows for param in row.params)}
    if optimizer is not untold.optimizer and not any(id(p) in held for p in params):
        return
    _Current.untold = None
    raise StateError(
        f"{type(untold.optimizer).__name__}: a step must run to its end, but the last one was interrupted by an "
        "exception, and some parameters have moved while others have not. Load a checkpoint; or, to go on all the "
        "same, call zero_grad() again and continue."
    )
