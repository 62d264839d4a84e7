"""What a model's step costs, told from one step on fake tensors: operations, bytes and what stays alive, per unit."""

import bisect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_map_only

from dshard.errors import ArgumentError, DShardError, StateError
from dshard.planner.flops import Op, cost_of, grouped_like
from dshard.planner.progress import SILENT, Progress
from dshard.planner.steps import is_cut, pieces_of, run_step, swapped, tensors
from dshard.planner.traces import Event, Life, Part, Trace, phases_of

_ASKS, _CALLS = "torch.distributed.tensor._sharding_prop", "torch.nn.modules.module"


def trace(
    model: nn.Module,
    sample_input: Any,
    parts: Sequence[Part],
    *,
    dtype: torch.dtype | None = None,
    loss_of: Callable[[Any], Tensor] | None = None,
    progress: Progress = SILENT,
) -> Trace:
    """Run a forward and backward on tensors without data, and note what every part of a model did.

    Args:
        model: On any device, meta too; it is left as it was.
        sample_input: A tensor, a tuple of arguments or a dict of keyword arguments; shapes and dtypes count alone.
        parts: Hold each parameter once; the last one also runs what no module of the others does.
        dtype: Floating-point parameters and inputs are taken in it, as mixed precision does; None leaves them.
        loss_of: Loss of an output. Without it: its `loss`, or the sum of all floating-point tensors in it.
        progress: Hears how far it is.

    Raises:
        StateError: The model has no parameter that needs gradients, its output none, or its forward asks for values.

    Communicates:
        Nothing.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise StateError("plan: the model must have parameters to train, but it has none. Pass a model that has.")
    recorder = _Recorder(model, parts, progress)
    state = dict(_state_of(model))
    fake = partial(_fake, dtype=dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), swapped(model, fake) as fakes:
        recorder.watch({name: fakes[id(value)] for name, value in state.items()})
        sample = tree_map_only(Tensor, fake, sample_input)
        with recorder.hooks(), recorder:
            try:
                run_step(model, sample, loss_of, recorder.begin_backward)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise StateError(
                    "plan: a step is traced on tensors without data, but the model's forward asks for a value, or for "
                    f"a shape that depends on values ({error.func}). Pass a model whose forward does not (for "
                    "transformers' mixtures of experts: experts_implementation='grouped_mm'), or costs of your own to "
                    "dshard.planner.solve."
                ) from error
            except (DShardError, torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                raise ArgumentError(
                    "plan: sample_input must be what a forward and backward of the model run on, but they raised "
                    f"{type(error).__name__}: {error}. Pass arguments as the training loop passes them: a tensor, a "
                    "tuple, or a dict by name; and loss_of= where the output's own loss is not meant."
                ) from error
        pieces = (piece for each in tensors(sample) for piece in pieces_of(each))
        inputs = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in pieces}
    return recorder.trace(sum(inputs.values()))


def _state_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _fake(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor like another one, on CPU and without data, inside of a fake mode."""
    wanted = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
    if is_cut(value):
        cut: Any = value
        names, context = cut.__tensor_flatten__()
        held = {name: getattr(cut, name) for name in names}
        parts = {name: _fake(each, None) if isinstance(each, Tensor) else each for name, each in held.items()}
        made = type(cut).__tensor_unflatten__(parts, context, cut.shape, cut.stride()).detach()
        return _like(value, made.to(wanted))
    made = torch.empty_strided(tuple(value.shape), value.stride(), dtype=wanted, device="cpu")
    return _like(value, made)


def _is_asked_for_shapes() -> bool:
    """Whether DTensor asks what an operation of full tensors would give: none that this rank runs."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in (_ASKS, _CALLS):
            return name == _ASKS
        frame = frame.f_back
    return False


def _like(value: Tensor, made: Tensor) -> Tensor:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(made, requires_grad=value.requires_grad)
    return made.requires_grad_(value.requires_grad)


@dataclass(slots=True)
class _Noted:
    """An operation; its part is None ahead of the first part."""

    part: int | None
    is_backward: bool
    op: Op | None


class _Recorder(TorchDispatchMode):
    """Notes each operation, the part that it belongs to, and how long what it made stays alive."""

    def __init__(self, model: nn.Module, parts: Sequence[Part], progress: Progress) -> None:
        super().__init__()
        self._progress, self._seen = progress, set[tuple[int | None, bool]]()
        self._parts = tuple(parts)
        self._events: list[_Noted] = []
        self._lives: dict[int, Life] = {}  # by id of the storage, as long as it is alive
        self._ended: list[Life] = []
        self._refs: list[Any] = []
        self._known: dict[int, int | None] = {}  # storages of parameters and buffers, and the part of each
        self._used_in_backward: set[int] = set()  # parts of whose parameters backward used some
        self._part_of = {module: i for i, part in enumerate(parts) for module in part.modules}
        self._first_part_of_root = self._part_of.pop(model, None) if len(parts) > 1 else None
        self._part_of_param = {name: i for i, part in enumerate(parts) for name in part.params}
        self._part_of_variable: dict[int, int] = {}
        self._part_of_storage: dict[int, int] = {}  # of parameters that the root itself holds
        self._touched: dict[int, None] = {}  # parts in the order in which they run, or are used
        self._stack: list[int] = []
        self._last: int | None = None
        self._changes: list[tuple[int, int]] = []  # number of the first node of autograd, and its part
        self._is_backward = self._has_dtensors = False

    def watch(self, values: Mapping[str, Tensor]) -> None:
        """Tell parameters, and their gradients when they come, from activations."""
        for name, value in values.items():
            part = self._part_of_param.get(name)
            for piece in pieces_of(value):
                self._known[id(piece.untyped_storage())] = part
                if part is not None and part == self._first_part_of_root:
                    self._part_of_storage[id(piece.untyped_storage())] = part
            if part is not None and value.requires_grad:
                self._part_of_variable[id(value)] = part
                value.register_hook(self._note_gradient)

    def _note_gradient(self, grad: Tensor) -> None:
        for piece in pieces_of(grad):
            life = self._lives.get(id(piece.untyped_storage()))
            if life is not None:
                life.is_gradient = True

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Follow which module runs."""
        handles = []
        for module in self._part_of:
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if torch._C._current_autograd_node() is None:  # blocks that run again in backward belong to their node
            self._stack.append(self._part_of[module])
            self._note_change(self._stack[-1])

    def _leave(self, *_: Any) -> None:
        if torch._C._current_autograd_node() is None:
            self._last = self._stack.pop()
            if self._stack:
                self._note_change(self._stack[-1])

    def _note_change(self, part: int) -> None:
        self._touched.setdefault(part)
        self._changes.append((torch.autograd._get_sequence_nr(), part))

    def begin_backward(self) -> None:
        """What comes now is backward."""
        self._is_backward = True

    def _current_part(self) -> int | None:
        """The part whose module runs, or ran last: what a model does between its parts belongs to the one before."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._stack[-1] if self._stack else self._last
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._part_of_variable.get(id(variable))
        i = bisect.bisect_right(self._changes, node._sequence_nr(), key=lambda change: change[0])
        return self._changes[i - 1][1] if i else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            self._has_dtensors = True
            return NotImplemented  # what it does with this rank's parts comes here again
        run = grouped_like if func is torch.ops.aten._grouped_mm.default else func
        out = run(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default or (self._has_dtensors and _is_asked_for_shapes()):
            return out
        if self._is_backward:
            parts = (self._known.get(id(each.untyped_storage())) for each in tensors(args))
            self._used_in_backward.update(part for part in parts if part is not None)
        if self._part_of_storage:
            for each in tensors(args):
                part = self._part_of_storage.get(id(each.untyped_storage()))
                if part is not None:
                    self._touched.setdefault(part)
        part = self._current_part()
        if (part, self._is_backward) not in self._seen:
            self._tell(part)
        self._events.append(_Noted(part, self._is_backward, cost_of(func, args, kwargs or {}, out)))
        for each in tensors(out):
            self._follow(each.untyped_storage())
        return out

    def _tell(self, part: int | None) -> None:
        """A part runs for the first time, forward or backward; of all parts, that is twice as many times."""
        self._seen.add((part, self._is_backward))
        num = sum(1 for seen, _ in self._seen if seen is not None)
        self._progress.at("backward" if self._is_backward else "forward", num / (2 * len(self._parts)))

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._lives or key in self._known:
            return
        life = Life(storage.nbytes(), len(self._events) - 1)
        self._lives[key] = life

        def end(_: Any) -> None:
            life.died = len(self._events)
            self._ended.append(self._lives.pop(key))

        self._refs.append(weakref.ref(storage, end))

    def trace(self, input_bytes: int) -> Trace:
        """The step that was noted."""
        first_part = self._changes[0][1] if self._changes else 0
        events = [
            Event((first_part if each.part is None else each.part) or 0, each.is_backward, each.op)
            for each in self._events
        ]
        unused = frozenset(range(len(self._parts))) - self._used_in_backward
        order = tuple(dict.fromkeys((*self._touched, *self._part_of_param.values())))  # last what nobody used
        phases = phases_of(events, (*self._ended, *self._lives.values()))
        return Trace(self._parts, order, phases, input_bytes, unused)
