"""Parameters that are replaced or moved: optimizers, hooks and gradients follow them."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim.optimizer import Optimizer

from dshard import collectives
from dshard.autograd import outside_autograd
from dshard.collectives import GatherPlan, ReduceBucket, ReducePlan, shard_of
from dshard.errors import StateError
from dshard.gradients.backward import hook_gradient
from dshard.gradients.reducer import Reducer
from dshard.layout import MIN_DIRECT_BYTES, BucketLayout, ShardLayout, by_kind, packs
from dshard.optimizer.rows import Rows
from dshard.tensor import MixedShardedTensor, OffloadedShardedTensor, ShardedTensor
from dshard.tensor.meshes import gathered_stride, group_of, placements_of, tp_layout_of
from dshard.tensor.sharded_tensor import SHARDED
from dshard.tensor.storage import ShardStorage
from dshard.tensor.subclass_shards import holds_packed_bits, subclass_gathers
from dshard.tensor.tp_params import local_gradient, shard_like
from dshard.tensor.views import dense_stride
from dshard.units.placing import Place
from dshard.units.unit import Unit


def forget_flat_weights(module: nn.Module) -> list[nn.RNNBase]:
    """Empty the lists of parameters that recurrent modules keep: weak references in them prevent a swap."""
    recurrent = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    for rnn in recurrent:
        rnn.__dict__.update(_flat_weights=[], _flat_weight_refs=[])
    return recurrent


def allocate(module: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Give memory to those of some sharded parameters and buffers that are on the meta device.

    Args:
        module: A sharded module, or one that holds some.
        devices: By name, the device for a buffer; a parameter goes to the device of its mesh.
    """
    recurrent = forget_flat_weights(module)
    for name, param in module.named_parameters(remove_duplicate=False):
        if isinstance(param, ShardedTensor) and param.is_meta and name in devices:
            home = param.offload.home if param.offload is not None else param.shard_group.device_type
            convert(param, partial(torch.empty_like, device=home))
    buffers = list(module.named_buffers(remove_duplicate=False))
    made = {id(b): torch.empty_like(b, device=devices[name]) for name, b in buffers if b.is_meta and name in devices}
    for name, buffer in buffers:
        if id(buffer) in made:  # under all of its names
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner)._buffers[attribute] = made[id(buffer)]
    for rnn in recurrent:
        rnn._init_flat_weights()


def convert(param: ShardedTensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply a conversion to a sharded parameter and its gradient, keeping the parameter object."""
    with torch.no_grad():
        shard = fn(param.shard_storage.resolve())
        if shard is param.shard_storage.resolve():
            return
        if shard.dtype != param.storage_dtype and holds_packed_bits(param):
            shard = param.shard_storage.resolve().to(shard.device)  # a cast would take its bits for numbers
            if shard is param.shard_storage.resolve():
                return
        shard = _at_home(param, shard)
        grad, param.grad = param.grad, None
        grad_shard = grad.shard_storage.resolve() if isinstance(grad, ShardedTensor) else None
        stride = _stride_of_format(param, shard)
        new = param.like(shard.contiguous(), stride=stride)
        new.shard_storage.is_shared = True
        if new.device == param.device:
            param.data = new
        else:
            _swap(param, type(param).wrap(new.shard_storage, new._spec, new.shard_group, name=new.given_name))
        _follow_dtype(param)
        unit = param.gather_source
        if isinstance(unit, Unit):
            unit.model.get(Reducer).forget(unit)
        if isinstance(grad, ShardedTensor) and grad_shard is not None:
            param.grad = grad.like(fn(grad_shard).contiguous(), stride=stride)
            param.grad.shard_storage.is_shared = True


def _follow_dtype(param: ShardedTensor) -> None:
    """What a policy asks for is another dtype than the parameter's own now, or no longer is."""
    precision = param.wire_precision
    if precision is None or not param.storage_dtype.is_floating_point:
        return
    changed = precision.for_dtype(param.storage_dtype)
    if changed == precision:
        return
    param.wire_precision, param.known_views = changed, None
    if type(param) is not OffloadedShardedTensor:
        param.__class__ = ShardedTensor if changed.compute is None else MixedShardedTensor
    if isinstance(param.gather_source, Unit):
        param.gather_source.restart()
        param.gather_source.model.forwards.on_dtypes()


def _at_home(param: ShardedTensor, shard: Tensor) -> Tensor:
    """The converted shard of an offloaded parameter, which stays where it is kept; memory it gets there alone.

    Raises:
        StateError: It was to be moved to another device. On every rank alike.
    """
    offload = param.offload
    if offload is None or shard.device.type in (offload.home.type, "meta"):
        return shard
    if param.is_meta:
        return torch.empty_like(shard, device=offload.home)
    raise StateError(
        f"{param.name}: an offloaded parameter stays on {offload.home} and is copied to {offload.compute} for its use, "
        f"but it was moved to {shard.device}. Leave the move out, for fully_shard has moved the buffers; to keep "
        f"parameters on {shard.device}, leave out offload_policy."
    )


def _stride_of_format(param: ShardedTensor, shard: Tensor) -> tuple[int, ...] | None:
    """Strides of the full tensor if its shard was converted to another memory format, else None."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if shard.dim() not in formats or shard.is_contiguous():
        return None
    return torch.empty(param.shape, device="meta").to(memory_format=formats[shard.dim()]).stride()


def _swap(param: ShardedTensor, new: ShardedTensor) -> None:
    """Give a parameter object the metadata of a tensor on another device."""
    if param.grad_hook_handle is not None:
        param.grad_hook_handle.remove()
        param.grad_hook_handle = None
    attributes = {**param.__dict__, "shard_storage": new.shard_storage, "known_views": None}
    requires_grad = param.requires_grad
    try:
        torch.utils.swap_tensors(param, new)
    except RuntimeError as error:
        reason = str(error).rstrip(".")
        raise StateError(
            f"{param.name}: a parameter can move to another device only while nothing else refers to it, but torch "
            f"says: {reason}. Move the module while no views of its parameters and no weak references to them are kept."
        ) from error
    param.__dict__.clear()
    param.__dict__.update(attributes)
    torch.Tensor.requires_grad_(param, requires_grad)
    hook_gradient(param)


_MAX_BYTES = 16 << 20  # of full tensors that are there at the same time, as long as one is as large as they


@dataclass(frozen=True, slots=True)
class Move:
    """A tensor and the place that it is to have.

    Args:
        tensor: A parameter, gradient or optimizer state that is no view.
        place: Over which mesh, cut along which dim.
    """

    tensor: ShardedTensor
    place: Place

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor, or for a DTensor of the local one."""
        return int(self.tensor.shard_layout.numel * self.tensor.storage_dtype.itemsize)

    @property
    def is_needed(self) -> bool:
        """Whether it is elsewhere."""
        here = place_of(self.tensor)
        return here.dim != self.place.dim or here.mesh != self.place.mesh  # a copy or pickle has a mesh of its own


def place_of(tensor: ShardedTensor) -> Place:
    """The place of a sharded tensor."""
    inner = tp_layout_of(tensor.shard_layout)
    return Place(tensor._spec.mesh if inner is None else inner.data_mesh, tensor.shard_layout.dim)


def place_beside(place: Place, value: Tensor) -> Place:
    """Where a state of another shape than its parameter's lies, for the place of that."""
    return Place(place.mesh, None if place.dim is None or not value.dim() else 0)


def sharded_beside(param: ShardedTensor, shape: Sequence[int], dtype: torch.dtype) -> ShardedTensor:
    """A state of a parameter, of a shape of its own, cut along its first dim; its shard is yet to be delivered."""
    group, place = param.shard_group, place_of(param)
    dim = None if place.dim is None else 0
    storage = ShardStorage(None, ShardLayout(tuple(shape), dim, group.num_ranks), awaits_nothing, is_shared=True)
    stride = dense_stride(torch.empty(tuple(shape), device="meta"))
    meta = TensorMeta(torch.Size(shape), stride, dtype)
    spec = DTensorSpec(place.mesh, placements_of(dim, place.mesh), tensor_meta=meta)
    prototype = torch.empty(0, dtype=dtype, device=param.storage_device)
    return param.kin.wrap(storage, spec, group, name=param.given_name, prototype=prototype)


def awaits_nothing(storage: ShardStorage) -> None:
    """What a shard that is yet to be delivered awaits."""


def relocate(moves: Sequence[Move]) -> None:
    """Cut tensors anew, some at a time; whoever held the old shards, as by `to_local()`, holds a copy from now on.

    Communicates:
        An all-gather of each tensor that is cut now and of 64 bytes beside, in chunks; nothing for whole ones.
    """
    with outside_autograd():
        for chunk in _chunks([move for move in moves if move.is_needed]):
            _relocate(chunk)


def full_values(tensors: Sequence[ShardedTensor]) -> Iterator[tuple[ShardedTensor, Tensor]]:
    """The full values of tensors that may lie differently, some at a time; not to be kept.

    Communicates:
        An all-gather of each, in chunks.
    """
    with outside_autograd():
        for chunk in _chunks([Move(each, place_of(each)) for each in tensors]):
            found = [move.tensor for move in chunk]
            yield from zip(found, _fulls(found), strict=True)


def _relocate(moves: Sequence[Move]) -> None:
    """Cut tensors anew, all at once; what was gathered for it goes at the end."""
    for move, full in zip(moves, _fulls([move.tensor for move in moves]), strict=True):
        _put(move, full)


def _chunks(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Moves that can be gathered together, in an order that is the same on all ranks."""

    def kind(move: Move) -> tuple[Any, ...]:
        tensor = move.tensor
        is_whole = tensor.shard_layout.dim is None
        return tensor.shard_group.full_name, tensor.storage_dtype, tensor.storage_device, is_whole

    num_bytes = attrgetter("num_bytes")
    for same in by_kind(moves, kind):
        largest_first = sorted(same, key=num_bytes, reverse=True)  # small ones fill up
        yield from packs(largest_first, num_bytes, min(_MAX_BYTES, largest_first[0].num_bytes))


def _fulls(tensors: Sequence[ShardedTensor]) -> list[Tensor]:
    """The full values of tensors that lie alike; not to be kept."""
    first, group = tensors[0], tensors[0].shard_group
    shards = [t.shard_storage.resolve() for t in tensors]
    if first.shard_layout.dim is None or first.is_meta or group.num_ranks == 1:
        return shards if not first.is_meta else [torch.empty(t.shard_layout.shape, device="meta") for t in tensors]
    strides = [gathered_stride(t.shard_layout, t.stride()) for t in tensors]
    bucket = BucketLayout.of([t.shard_layout for t in tensors])
    least = 0 if len(tensors) == 1 else MIN_DIRECT_BYTES  # one alone needs no rows to be cut out of, of its size again
    plan = GatherPlan.of(bucket, strides, first.storage_dtype, group, min_direct_bytes=least)
    here = [shard.to(group.device_type) for shard in shards]
    tag = collectives.tag_of(tuple(t.shard_storage.signature for t in tensors))
    return collectives.all_gather(here, plan, group, label=f"move of '{first.name}'", tag=tag).wait().tensors


def _put(move: Move, full: Tensor) -> None:
    """Give a tensor its part of the full value."""
    tensor, place, old = move.tensor, move.place, move.tensor.shard_storage
    group, inner = group_of(place.mesh), tp_layout_of(tensor.shard_layout)
    layout = replace(old.layout, dim=place.dim, num_ranks=group.num_ranks)
    part = shard_of(full, layout, group.rank)
    shard = torch.empty(part.shape, dtype=tensor.storage_dtype, device=tensor.storage_device).copy_(part)
    storage = ShardStorage(shard, layout, is_shared=True)
    storage.tag, storage.num_writes = old.signature
    placements = placements_of(place.dim, place.mesh) if inner is None else inner.over_both(place.dim)
    mesh = place.mesh if inner is None else tensor._spec.mesh
    tensor._spec = DTensorSpec(mesh, placements, tensor_meta=tensor._spec.tensor_meta)
    tensor.shard_storage, tensor.shard_group, tensor.origin, tensor.known_views = storage, group, None, None
    old.retire(
        StateError(
            f"{tensor.name}: set_strategy has moved its shards to other ranks, but an alias or a view from before is "
            "used. Take it from the parameter again."
        )
    )


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
    plan = ReducePlan(BucketLayout.of([new.shard_layout]), new.shard_group)
    device = new.offload.compute if new.offload is not None else new.device
    bucket = ReduceBucket(plan, dtype=grad.dtype, device=device, label=new.name)
    bucket.add([0], [local_gradient(new, grad).to(device)])
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

    Runs ahead of every step of every optimizer (`optimizer.steps` calls it); does nothing where no replaced
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
        if SHARDED.issuperset(map(type, params)) and all(map(is_, map(_PLAIN, params), repeat(None))):
            continue
        for i, old in enumerate(params):
            if isinstance(old, ShardedTensor) and old.plain is not None:
                params[i] = old.plain
            elif isinstance(old, Replaced):
                new = params[i] = replacement_of(old)
                if old in state:
                    values = state.pop(old)
                    state[new] = _shard_state(values, new) if isinstance(new, ShardedTensor) else values


_PLAIN = attrgetter("plain")
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
    if any(move.is_needed for move in moves):
        Rows.leave(optimizer)
    relocate(moves)


def _shard_state(state: Any, param: ShardedTensor) -> Any:
    """State tensors of the parameter's shape become sharded like it; all else stays, and so does a dict without any."""
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

    found = {key: cut(value) for key, value in state.items()}
    return state if all(found[key] is value for key, value in state.items()) else found
