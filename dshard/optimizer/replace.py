"""What becomes of the parameters that `fully_shard` replaces, and of optimizers that hold them."""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from dshard.collectives import ReduceBucket, ReducePlan
from dshard.layout import BucketLayout
from dshard.optimizer.relocate import Move, place_of, relocate
from dshard.tensor import ShardedTensor
from dshard.tensor.shard_storage import ShardStorage
from dshard.tensor.subclass_shards import subclass_gathers
from dshard.tensor.tp_layout import tp_layout_of
from dshard.tensor.tp_params import local_gradient, shard_like

_ACCESSORS = frozenset(["__get__", "__set__", "__delete__"])  # of properties such as `grad`


class Replaced:
    """A parameter that `fully_shard` replaced: every use is a use of the ShardedTensor that took its place.

    Modules, optimizers and users may have kept the object; only `is` tells it from its replacement.
    """

    __slots__ = ()
    _replacement: ShardedTensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _followed((args, kwargs or {}))
        if func.__name__ in _ACCESSORS:
            return _access(func, *args)
        method = getattr(ShardedTensor, func.__name__, None)
        if method is not func and getattr(torch.Tensor, func.__name__, None) is func:
            func = method  # one that ShardedTensor has of its own
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(replacement_of(self), name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}(now {replacement_of(self)!r})"

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(replacement_of(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (replacement_of(self),)


class ReplacedParameter(Replaced, nn.Parameter):  # type: ignore[misc]
    """What a plain parameter becomes."""


class ReplacedDTensor(Replaced, DTensor):  # type: ignore[misc]
    """What a DTensor parameter becomes."""


def _itself(param: ShardedTensor) -> ShardedTensor:
    """Unpickle: the replacement, the same object as elsewhere in the pickle."""
    return param


def _access(func: Any, target: Any, *rest: Any) -> Any:
    """Get, set or delete a property of a tensor, by the class's own where it has one."""
    name = func.__self__.__name__
    if func.__name__ == "__get__":
        return getattr(target, name)
    if func.__name__ == "__set__":
        return setattr(target, name, *rest)
    return delattr(target, name)


def replacement_of(old: Any) -> ShardedTensor:
    """What took the place of a `Replaced` parameter."""
    new: ShardedTensor = old._replacement
    return new if new.plain is None else new.plain


def _followed(value: Any) -> Any:
    """Arguments with what took the place of the replaced parameters in them."""
    if isinstance(value, Replaced):
        return replacement_of(value)
    if isinstance(value, dict):
        return {key: _followed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_followed(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def retire(old: Any, new: ShardedTensor) -> None:
    """Free the memory of `old` and turn it into a `Replaced` one, for whoever kept it."""
    old.grad = None
    old.requires_grad = False
    empty = torch.empty(0, dtype=old.dtype, device=old.device)
    if isinstance(old, DTensor):
        old._local_tensor = empty
        old.__class__ = ReplacedDTensor
    elif subclass_gathers(old):
        old.__dict__.clear()  # the tensors that it is made of
        old.__class__ = ReplacedParameter
    else:
        old.data = empty
        old.__class__ = ReplacedParameter
    old.__dict__["_replacement"] = new


@dataclass(frozen=True, slots=True)
class ParameterHooks:
    """What a user registered on a parameter: hooks by their ids, in dicts from which their handles remove them.

    Args:
        on_gradient: By `register_hook`.
        after_accumulation: By `register_post_accumulate_grad_hook`.
        node: The node by which autograd accumulates its gradient; None for a frozen parameter.
        before_node: By `register_prehook` on that node.
        after_node: By `register_hook` on it.
    """

    on_gradient: Mapping[int, Callable[..., Any]]
    after_accumulation: Mapping[int, Callable[..., Any]]
    node: Any
    before_node: Mapping[int, Callable[..., Any]]
    after_node: Mapping[int, Callable[..., Any]]


class _Inherited:
    """A hook of a replaced parameter, for as long as its handle has not removed it.

    Args:
        hooks: The dict that torch registered it in.
        key: Its key there.
    """

    __slots__ = ("hooks", "key")

    def __init__(self, hooks: Mapping[int, Callable[..., Any]], key: int) -> None:
        self.hooks, self.key = hooks, key

    def __call__(self, *args: Any) -> Any:
        hook = self.hooks.get(self.key)
        return hook(*args) if hook is not None else None


def hooks_of(old: nn.Parameter) -> ParameterHooks:
    """The hooks of a parameter that is about to be replaced."""
    on_gradient = getattr(old, "_backward_hooks", None) or {}
    after_accumulation = getattr(old, "_post_accumulate_grad_hooks", None) or {}
    if not (old.requires_grad and old.is_leaf):
        return ParameterHooks(on_gradient, after_accumulation, None, {}, {})
    try:
        node = torch.autograd.graph.get_gradient_edge(old).node  # a new one without hooks where nobody keeps the old
    except NotImplementedError:  # it takes a view, and this is of a class that has none: nobody has got its node
        return ParameterHooks(on_gradient, after_accumulation, None, {}, {})
    before, after = (_registered(register) for register in (node.register_prehook, node.register_hook))
    return ParameterHooks(on_gradient, after_accumulation, node, before, after)


def _registered(register: Callable[[Callable[..., Any]], Any]) -> Mapping[int, Callable[..., Any]]:
    """All hooks that were registered by a method of a node: torch shows them by the handle of one more alone."""
    handle = register(lambda *_: None)
    hooks: Mapping[int, Callable[..., Any]] = handle.hooks_dict_ref()
    handle.remove()
    return hooks


def inherit(new: ShardedTensor, hooks: ParameterHooks, grad: Tensor | None, *, mean: bool) -> None:
    """Give a sharded parameter the hooks and the gradient of the one that it replaces; the gradient is reduced.

    Communicates:
        A reduce-scatter where there is a gradient.
    """
    for key, hook in list(hooks.on_gradient.items()):
        _count_by(new, hook, hooks.node)
        new.register_hook(_Inherited(hooks.on_gradient, key))
    for key in list(hooks.after_accumulation):
        new.register_post_accumulate_grad_hook(_Inherited(hooks.after_accumulation, key))
    if hooks.before_node or hooks.after_node:
        node = torch.autograd.graph.get_gradient_edge(new).node
        hooks.node.metadata["dshard"] = node  # it lives as long as somebody keeps the node that it stands for
        for key in list(hooks.before_node):
            node.register_prehook(_Inherited(hooks.before_node, key))
        for key in list(hooks.after_node):
            node.register_hook(_Inherited(hooks.after_node, key))
    if grad is None:
        return
    plan = ReducePlan.of(BucketLayout.of([new.shard_layout]), new.shard_group)
    device = new.offload.compute if new.offload is not None else new.device
    bucket = ReduceBucket(plan, dtype=grad.dtype, device=device, label=new.name)
    bucket.add(0, local_gradient(new, grad).to(device))
    shard = bucket.launch(mean=mean).wait().shards[0].to(new.device)
    new.grad = new.like(ShardStorage(shard, new.shard_layout, is_shared=True))


def _count_by(new: ShardedTensor, hook: Callable[..., Any], node: Any) -> None:
    """Have a hook of `register_multi_grad_hook` wait for the gradient of the parameter that there is now.

    It counts the nodes that a backward is going to run, of which the old parameter's is none any more.
    """
    if getattr(hook, "__module__", "") != torch.autograd.graph.__name__:
        return
    code = getattr(hook, "__code__", None)
    cells = dict(zip(getattr(code, "co_freevars", ()), hook.__closure__ or (), strict=True))
    if "nb_calls" not in cells:  # of mode "any", which counts nothing
        return
    nodes: Any = cells["grad_fns"].cell_contents if "grad_fns" in cells else ()
    places = [i for i, known in enumerate(nodes) if known is node]
    if not places:
        warnings.warn(
            f"{new.name}: a hook that register_multi_grad_hook put on this parameter before fully_shard waits for the "
            "parameter that was replaced, and is not going to be called. Register it after fully_shard.",
            stacklevel=2,
        )
    for i in places:
        nodes[i] = torch.autograd.graph.get_gradient_edge(new).node


def repoint_optimizer(optimizer: Optimizer) -> None:
    """Let an optimizer that was made before `fully_shard` hold the sharded parameters, with its state cut to them.

    Runs ahead of every step of every optimizer (`optimizer.step_hooks` calls it); does nothing where no replaced
    parameter is held.

    Communicates:
        Nothing, unless states lie otherwise than parameters: `set_strategy` has moved these alone, or what was loaded
        is of a model under another strategy.
    """
    state: Any = optimizer.state
    seen = (id(state), len(state), _NUM_MOVES[0])
    if optimizer.__dict__.get("_dshard_seen") != seen:
        for param, values in state.items():
            if isinstance(param, ShardedTensor):  # the full state of an unsharded run may have been loaded
                state[param] = _shard_state(values, param)
        move_states(optimizer)
        optimizer.__dict__["_dshard_seen"] = seen
    for group in optimizer.param_groups:
        params = group["params"]
        for i, old in enumerate(params):
            if isinstance(old, ShardedTensor) and old.plain is not None:
                params[i] = old.plain
            elif isinstance(old, Replaced):
                new = params[i] = replacement_of(old)
                if old in state:
                    values = state.pop(old)
                    state[new] = _shard_state(values, new) if isinstance(new, ShardedTensor) else values


_NUM_MOVES = [0]  # of parameters to other places, in this process


def note_moves() -> None:
    """Parameters went to other places: the states of optimizers follow ahead of their next steps."""
    _NUM_MOVES[0] += 1


def move_states(optimizer: Optimizer) -> None:
    """Have an optimizer's states lie as the parameters that they belong to do.

    Communicates:
        As `relocate`, for those that lie otherwise.
    """
    moves = []
    for param, values in optimizer.state.items():
        if isinstance(param, ShardedTensor) and isinstance(values, dict):
            found = [v for v in values.values() if isinstance(v, ShardedTensor) and v.shape == param.shape]
            moves += [Move(value, place_of(param)) for value in found if not value.is_view]
    relocate(moves)


def _shard_state(state: Any, param: ShardedTensor) -> Any:
    """State tensors of the parameter's shape become sharded like it; all else stays."""
    if not isinstance(state, dict):
        return state
    mesh, dim = param.device_mesh, param.shard_layout.dim

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, ShardedTensor) or value.shape != param.shape:
            return value
        if isinstance(value, DTensor) and value.device_mesh == mesh and value.placements == param.placements:
            storage = ShardStorage(value.to_local(), param.shard_layout, is_shared=True)  # cut alike: by torch.chunk
            return param.like(storage)
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if tp_layout_of(param.shard_layout) is not None and full.dim():
            return shard_like(full, param)
        return ShardedTensor.shard(full, mesh, dim, name=param.name) if full.dim() else full

    return {key: cut(value) for key, value in state.items()}
