"""Autograd as the engine needs it: modes, dtypes of gradients, activation checkpointing and what runs again for it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import profiler
from torch.autograd.function import BackwardCFunction
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from dshard.compiling import skipped
from dshard.errors import StateError
from dshard.interpreter import first_argument_of_forward
from dshard.tensor import ShardedTensor
from dshard.tensor.storage import ShardStorage

GRAD: Any = Tensor.grad  # descriptor
_NOTHING: AbstractContextManager[Any] = nullcontext()
_is_inference, _is_grad_enabled = torch.is_inference_mode_enabled, torch.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


class Watcher(Protocol):
    """Who looks at what is gathered and reduced while it is, as a profiler does."""

    def watch(self, what: str, label: str, model: object) -> AbstractContextManager[Any]:
        """A context for something that is done for a unit; `model` stands for the model that it is of."""


class Watchers:
    """Those of this process."""

    present: ClassVar[list[Watcher]] = []


def profiled(what: str, label: str, model: object) -> AbstractContextManager[Any]:
    """A range `dshard::<what> <label>` where a profiler is on, or somebody watches; else no more than a look."""
    if Watchers.present:
        if len(Watchers.present) == 1 and not profiler._is_profiler_enabled:
            return Watchers.present[0].watch(what, label, model)
        stack = ExitStack()
        for watcher in Watchers.present:
            stack.enter_context(watcher.watch(what, label, model))
        if profiler._is_profiler_enabled:
            stack.enter_context(profiler.record_function(f"dshard::{what} {label}"))
        return stack
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"dshard::{what} {label}")
    return _NOTHING


class outside_autograd:  # noqa: N801 - a context manager, named as torch names its own
    """No gradients, no inference tensors, and none of a transform of `torch.func`, which hide their memory.

    `inference_mode(False)` and `no_grad()` in a quarter of their time.
    """

    __slots__ = ("_others", "_was_enabled")

    def __enter__(self) -> None:
        self._others: ExitStack | None = None
        if peek_interpreter_stack() is not None or _is_inference():
            self._others = ExitStack()
            if peek_interpreter_stack() is not None:
                self._others.enter_context(torch._C._DisableFuncTorch())
            if _is_inference():
                self._others.enter_context(torch.inference_mode(mode=False))
        self._was_enabled = _is_grad_enabled()
        if self._was_enabled:
            _set_grad_enabled(False)  # noqa: FBT003 - it takes no name

    def __exit__(self, *raised: Any) -> None:
        if self._was_enabled:
            _set_grad_enabled(True)  # noqa: FBT003
        if self._others is not None:
            self._others.__exit__(*raised)


def standing_for(grad: ShardedTensor, dtype: torch.dtype, *, is_seen: bool) -> ShardedTensor:
    """A reduced gradient as autograd is to get it.

    Args:
        grad: In the dtype of its parameter; it may be in flight.
        dtype: That autograd asks for.
        is_seen: Whether programs get to see it: as the result of `autograd.grad`, in a hook of theirs. Its values are
            rounded to `dtype` then; else it shares the memory of `grad`.
    """
    storage = grad.shard_storage
    if is_seen:
        storage = ShardStorage(
            None, storage.layout, lambda own: own.deliver(grad.shard_storage.resolve().to(dtype)), is_shared=True
        )
    out = grad.like(storage, dtype=dtype)
    out.is_added_up = grad.is_added_up
    if not is_seen:
        out.stands_for = grad
    return out


@skipped
def keep_own_dtype(param: Any) -> None:
    """A parameter's `.grad` in the parameter's dtype, after autograd has put one there."""
    if not param.is_routed:  # the unit's node has put it there, in the parameter's dtype
        return
    param.is_routed = False
    with torch._C.DisableTorchFunctionSubclass():
        grad: Any = GRAD.__get__(param)
        if not isinstance(grad, ShardedTensor) or grad.storage_dtype == param.storage_dtype:
            return
        known = grad.stands_for
        if known is not None and known.shard_storage is grad.shard_storage:
            param.grad = known
            return
    with torch.no_grad():
        param.grad = grad.like(grad.shard_storage.resolve().to(param.storage_dtype))
        param.grad.shard_storage.is_shared = True


_hooks = torch._C._autograd
_OF_CHECKPOINT = "torch.utils.checkpoint"
_RAN_IN_FORWARD = "_dshard_ran_in_forward"  # of an autograd function's context


class _Forwards(Protocol):
    """What is told of forwards."""

    def note_running(self, change: int) -> None:
        """A forward starts, or ends: `change` is 1 or -1."""


class _AsForward:
    """A function that is a forward when it is called again.

    Args:
        forwards: What is told.
        function: The function.
    """

    __slots__ = ("forwards", "function")

    def __init__(self, forwards: _Forwards, function: Callable[..., Any]) -> None:
        self.forwards, self.function = forwards, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards.note_running(1)
        try:
            return self.function(*args, **kwargs)
        finally:
            self.forwards.note_running(-1)


class Regions:
    """The checkpointed regions of a forward.

    Both kinds of `torch.utils.checkpoint` are found where a parameter is used in them: those that are not reentrant by
    the hooks that they have autograd save tensors with, reentrant ones by the context of their autograd function, as
    are functions of other libraries that keep what they recompute as `ctx.run_function`.
    """

    __slots__ = ("_around", "_is_recorded", "_seen")

    def __init__(self) -> None:
        self._around: list[Any] = []
        self._seen: object = None  # the innermost hook, as long as no other one comes
        self._is_recorded = False

    def begin(self) -> None:
        """A forward starts; regions around it are no part of it."""
        self._is_recorded = torch.is_grad_enabled()
        self._around = _frames() if _hooks._top_saved_tensors_default_hooks(True) is not None else []  # noqa: FBT003

    def end(self) -> None:
        """The forward ended."""
        self._around, self._seen, self._is_recorded = [], None, False

    def note_use(self, forwards: _Forwards) -> None:
        """A parameter is used in the forward that is running."""
        top = _hooks._top_saved_tensors_default_hooks(True)  # noqa: FBT003 - it takes no name
        if top is not None and top[0] is not self._seen:
            self._seen = top[0]
            for frame in _frames():
                if not any(frame is other for other in self._around):
                    frame.recompute_fn = _as_forward(frame.recompute_fn, forwards)
        if self._is_recorded and not torch.is_grad_enabled():
            ctx = first_argument_of_forward(BackwardCFunction)
            if ctx is not None and note_function(ctx, forwards, ran_in_forward=True):
                function = getattr(ctx, "run_function", None)
                if callable(function):
                    ctx.run_function = _as_forward(function, forwards)


def _as_forward(function: Callable[..., Any], forwards: _Forwards) -> Callable[..., Any]:
    """The function that tells of a forward, of several models maybe."""
    known = function
    while isinstance(known, _AsForward):
        if known.forwards is forwards:
            return function
        known = known.function
    return _AsForward(forwards, function)


def _frames() -> list[Any]:
    """Torch's records of the checkpointed regions that are open, innermost first."""
    found, popped = [], []
    while (top := _hooks._top_saved_tensors_default_hooks(True)) is not None:  # noqa: FBT003
        popped.append(top)
        pack = top[0]
        names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
        if getattr(pack, "__module__", "") == _OF_CHECKPOINT and "frame" in names:
            found.append((pack.__closure__ or ())[names.index("frame")].cell_contents)
        _hooks._pop_saved_tensors_default_hooks()
    for pair in reversed(popped):
        _hooks._push_saved_tensors_default_hooks(*pair)
    return [frame for frame in found if hasattr(frame, "recompute_fn")]


def runs_again_for_saved() -> bool:
    """Whether a region runs again, in backward, of a checkpoint that is not reentrant: for what it had saved."""
    pack = _hooks._top_saved_tensors_default_hooks(True)  # noqa: FBT003 - it takes no name
    return pack is not None and getattr(pack[0], "__module__", "") == _OF_CHECKPOINT


def runs_again() -> bool:
    """Whether a checkpointed region runs again, as far as is known of code in backward that autograd records."""
    return runs_again_for_saved() or isinstance(torch._C._current_autograd_node(), BackwardCFunction)


def note_function(ctx: Any, forwards: _Forwards, *, ran_in_forward: bool) -> bool:
    """Note of an autograd function whether it runs in a forward; gives whether that is new."""
    known = ctx.__dict__.setdefault(_RAN_IN_FORWARD, {})
    is_new = forwards not in known
    known.setdefault(forwards, ran_in_forward)
    return is_new


def note_exact_use(forwards: _Forwards) -> None:
    """A parameter is used outside of any forward, and not recorded: maybe in an autograd function."""
    ctx = first_argument_of_forward(BackwardCFunction)
    if ctx is not None:
        note_function(ctx, forwards, ran_in_forward=False)


def ran_in_forward(forwards: _Forwards) -> bool | None:
    """Whether the autograd function whose backward runs had run in a forward; None where that is not known."""
    known: dict[_Forwards, bool] = getattr(torch._C._current_autograd_node(), _RAN_IN_FORWARD, {})
    return known.get(forwards)


MODES = ("none", "selective", "full")

_KEEP_THEIR_INPUT = (nn.Linear.forward, nn.Embedding.forward)  # and nothing else, however they are run
_MORE_PRODUCTS = ("addbmm", "_grouped_mm", "_scaled_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu")


def apply_checkpointing(
    modules: Sequence[nn.Module], mode: str, *, root: nn.Module | None = None
) -> Callable[[], None]:
    """Have the forwards of some modules keep less for backward.

    "full" keeps a module's inputs and computes everything again in backward; "selective" also keeps the outputs of
    matrix products, convolutions and attention: all of which torch's table counts floating-point operations, so what
    `torch.utils.flop_counter.register_flop_formula` was called for, too. "none" changes nothing.

    In the place of a container without a forward, the modules in it run so. Linear layers and embeddings, which keep
    their input alone as they are, are left as they are. Names of modules and parameters stay. Without gradients a
    forward is the module's own.

    Args:
        modules: Not in one another.
        mode: One of `MODES`.
        root: Of the model, whose names errors tell, and within which nothing around the modules may be checkpointed.

    Returns:
        Takes it off again.

    Raises:
        StateError: `mode` is none, or a module, one in it or one around it is checkpointed already.

    Communicates:
        Nothing.
    """
    if mode not in MODES:
        raise StateError(f"checkpointing: a mode must be one of {', '.join(MODES)}, but it is {mode!r}. Choose one.")
    if mode == "none":
        return lambda: None
    check_plain(modules, mode, root=root)
    changed = []
    for module in dict.fromkeys(map(_compiled, modules_that_run(modules))):
        own = vars(module).get("forward")
        if own is None and type(module).forward in _KEEP_THEIR_INPUT:
            continue
        forward = partial(_run, module.forward, mode)
        changed.append((module, own, forward))
        vars(module)["forward"] = forward

    def take_off() -> None:
        for module, own, forward in changed:
            if vars(module).get("forward") is not forward:
                continue  # somebody else has put another one there
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own

    return take_off


@contextmanager
def checkpointed(modules: Sequence[nn.Module], mode: str) -> Iterator[None]:
    """Some modules run as `apply_checkpointing` has them, within the block."""
    take_off = apply_checkpointing(modules, mode)
    try:
        yield
    finally:
        take_off()


def check_plain(modules: Sequence[nn.Module], mode: str, *, root: nn.Module | None = None) -> None:
    """Refuse modules that are checkpointed already, hold one that is, lie in one, or lie in one another.

    Raises:
        StateError: Names the module.
    """
    inside = {each for module in modules for each in module.modules()}
    for top in modules if root is None else (root,):
        for name, each in top.named_modules():
            how = _checkpoints(each)
            if how is not None and (each in inside or not inside.isdisjoint(each.modules())):
                raise StateError(
                    f"{name or type(each).__name__}: a module is checkpointed once, but this one is already, by {how}, "
                    f"and {mode!r} is asked for it, for one in it or for one around it. Take one of them off."
                )
    for module in modules:
        below = next((each for each in modules if each is not module and each in set(module.modules())), None)
        if below is not None:
            raise StateError(
                f"{type(module).__name__}: modules that are checkpointed must not lie in one another, but this one "
                f"holds a {type(below).__name__} that is to be, too. Leave one of them out."
            )


def modules_that_run(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Some modules; in the place of a container without a forward, those in it that are called."""
    found: list[nn.Module] = []
    for module in modules:
        if type(module).forward is not nn.Module.forward:
            found.append(module)
        else:
            found += modules_that_run(module.children())
    return found


def _checkpoints(module: nn.Module) -> str | None:
    """What checkpoints a module, if something does that can be seen."""
    own = vars(module).get("forward")
    if isinstance(module, CheckpointWrapper):
        return "torch's checkpoint_wrapper"
    if isinstance(own, partial) and own.func is _run:
        return f"{own.args[1]!r} checkpointing of its unit"
    if isinstance(own, partial) and own.func is checkpoint:
        return "torch's checkpoint"
    return "gradient_checkpointing=True" if getattr(module, "gradient_checkpointing", False) is True else None


def _compiled(module: nn.Module) -> nn.Module:
    """The module in torch.compile's wrapper: what is computed again is told within the graph."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def _run(forward: Callable[..., Any], mode: str, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that is checkpointed."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    for each in (*args, *kwargs.values()):
        if hasattr(each, "get_seq_length"):  # of transformers
            raise StateError(
                "checkpointing: what runs again in backward must write to nothing twice, but this module was given a "
                f"{type(each).__name__}, to which it adds keys and values. Pass use_cache=False to the model, or set "
                "it in the config of each module that has one."
            )
    function = partial(forward, **kwargs) if kwargs else forward
    if mode == "full":
        return checkpoint(function, *args, use_reentrant=False)
    if torch.compiler.is_compiling():
        return checkpoint(function, *args, use_reentrant=False, context_fn=_contexts_in_graph)
    return checkpoint(function, *args, use_reentrant=False, context_fn=_contexts)


def _contexts_in_graph() -> Any:
    """Those of torch, which mark the operations of a graph; nothing in one is written in place."""

    def policy(_: Any, func: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if _is_kept(func, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _contexts() -> "tuple[_Keeping, _Giving]":
    """What a selective forward and its recomputation run in.

    Torch's own refuse products that are written to later (`nn.ReLU(inplace=True)` after a layer, T5's scores), and a
    second backward; they would also keep attention with dropout, of which to skip it moves the random numbers that
    come after it.
    """
    kept: list[_Output] = []
    return _Keeping(kept), _Giving(kept)


def _is_kept(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the output of an operation is worth its memory."""
    packet = getattr(func, "overloadpacket", func)  # operations of higher order have none
    if packet not in flop_registry and getattr(packet, "__name__", "") not in _MORE_PRODUCTS:
        return False
    schema = getattr(func, "_schema", None)
    return schema is None or not (schema.is_mutable or _draws(schema.arguments, args, kwargs))


def _draws(arguments: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation uses random numbers: attention with dropout does."""
    for i, argument in enumerate(arguments):
        if argument.name == "dropout_p":
            return bool(kwargs.get("dropout_p", args[i] if i < len(args) else argument.default_value))
    return False


class _Output:
    """What an operation gave, as long as nobody needs it."""

    __slots__ = ("_value", "_versions", "func")

    def __init__(self, func: Any, value: Any) -> None:
        self.func, self._value = func, tree_map_only(Tensor, _alias, value)
        self._versions = _versions(self._value)

    def take(self, func: Any) -> Any:
        """The output, once; None if it is another operation's, or was written to since."""
        value, self._value = self._value, None
        return value if func == self.func and _versions(value) == self._versions else None


def _alias(value: Tensor) -> Tensor:
    """The tensor, without the history that autograd is about to give it, but with its counter of writes."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: FBT003
        return value.detach()


def _versions(value: Any) -> list[int]:
    return [each._version for each in tree_iter(value) if isinstance(each, Tensor)]


class _Selecting(TorchDispatchMode):
    """Sees the operations of a module's forward.

    Args:
        kept: Outputs, in order.
    """

    supports_higher_order_operators = True

    def __init__(self, kept: list[_Output]) -> None:
        super().__init__()
        self.kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Torch asks whether graphs that are compiled already may run under it."""
        return True


class _Keeping(_Selecting):
    """The forward: keeps outputs of products."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs or {}):
            self.kept.append(_Output(func, out))
        return out


class _Giving(_Selecting):
    """Its recomputation: gives what was kept; what is not there any more is computed."""

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_kept(func, args, kwargs or {}) and self._next < len(self.kept):
            self._next += 1
            value = self.kept[self._next - 1].take(func)
            if value is not None:
                return value
        return func(*args, **(kwargs or {}))
