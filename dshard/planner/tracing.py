"""What a model's step costs, told from one step on fake tensors: operations, bytes and what stays alive, per unit."""

import bisect
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_map_only

from dshard.errors import ArgumentError, DShardError, StateError
from dshard.layout import SMALL_GRAD_BYTES
from dshard.planner.flops import Op, cost_of, grouped_like
from dshard.planner.steps import Part, following, is_cut, parts_by_module, pieces_of, run_step, swapped, tensors
from dshard.planner.texts import Progress, silent

_ASKS, _CALLS = "torch.distributed.tensor._sharding_prop", "torch.nn.modules.module"


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a step in which one part runs.

    Args:
        part: Its place among the parts.
        is_backward: Which half of the step.
        ops: What it runs, in order.
        early_bytes: The most that was alive of what is no parameter, buffer, input or parameter's gradient, until it
            computes its first gradient of a parameter.
        late_bytes: The same from then on; None if it computes none.
        end_bytes: What of these is alive when it ends.
    """

    part: int
    is_backward: bool
    ops: tuple[Op, ...]
    early_bytes: int
    late_bytes: int | None
    end_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that was alive in it of what is no parameter, buffer, input or parameter's gradient."""
        return max(self.early_bytes, self.late_bytes or 0)

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(op.flops for op in self.ops)


@dataclass(frozen=True, slots=True)
class Trace:
    """A step as it ran.

    Args:
        parts: As they were given.
        order: Their places, in the order in which forward used them first.
        phases: What ran, in order.
        input_bytes: Of the sample input.
        unused_in_backward: Parts whose parameters backward does not use.
        used_outside: Parts whose parameters forward uses once their modules have run.
        used_throughout: These, and those whose parameters it uses before and after those of others, which run within.
    """

    parts: tuple[Part, ...]
    order: tuple[int, ...]
    phases: tuple[Phase, ...]
    input_bytes: int
    unused_in_backward: frozenset[int] = frozenset()
    used_outside: frozenset[int] = frozenset()
    used_throughout: frozenset[int] = frozenset()

    @property
    def flops(self) -> int:
        """Floating-point operations of the step, recomputation included."""
        return sum(phase.flops for phase in self.phases)

    @property
    def peak_bytes(self) -> int:
        """The most that was alive of what is no parameter, buffer, input or parameter's gradient."""
        return max((phase.peak_bytes for phase in self.phases), default=0)

    def between(self, other: "Trace", share: float) -> "Trace | None":
        """The step between this one and one of another batch size, `share` of the way; None if they ran differently.

        Operations and bytes grow linearly with the batch, and a maximum of such is never above the line between two.
        """
        if len(self.phases) != len(other.phases) or self.order != other.order:
            return None
        phases = []
        for one, two in zip(self.phases, other.phases, strict=True):
            names = [[(op.name, op.dtype) for op in phase.ops] for phase in (one, two)]
            if (one.part, one.is_backward) != (two.part, two.is_backward) or names[0] != names[1]:
                return None
            if (one.late_bytes is None) != (two.late_bytes is None):
                return None
            ops = tuple(
                replace(a, flops=_between(a.flops, b.flops, share), num_bytes=_between(a.num_bytes, b.num_bytes, share))
                for a, b in zip(one.ops, two.ops, strict=True)
            )
            early, end = (
                _between(getattr(one, name), getattr(two, name), share) for name in ("early_bytes", "end_bytes")
            )
            late = None if one.late_bytes is None else _between(one.late_bytes, two.late_bytes or 0, share)
            phases.append(Phase(one.part, one.is_backward, ops, early, late, end))
        input_bytes = _between(self.input_bytes, other.input_bytes, share)
        return replace(self, phases=tuple(phases), input_bytes=input_bytes)


def _between(start: int, stop: int, share: float) -> int:
    """Rounded up."""
    return start + math.ceil((stop - start) * share)


def trace(
    model: nn.Module,
    sample_input: Any,
    parts: Sequence[Part],
    *,
    dtype: torch.dtype | None = None,
    loss_of: Callable[[Any], Tensor] | None = None,
    progress: Progress = silent,
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
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    fake = partial(_fake, dtype=dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), swapped(model, fake) as fakes:
        recorder.watch({name: fakes[id(value)] for name, value in state.items()})
        sample = tree_map_only(Tensor, fake, sample_input)
        with following(recorder.part_of, recorder.enter, recorder.leave), recorder:
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


@dataclass(frozen=True, slots=True)
class _Event:
    """An operation.

    Args:
        part: That it belongs to; None ahead of the first part.
        is_backward: Which half of the step.
        op: What it costs; None where it runs no kernel.
    """

    part: int | None
    is_backward: bool
    op: Op | None


@dataclass(slots=True)
class _Life:
    """The life of a storage.

    Args:
        num_bytes: Of it.
        born: Number of the event that made it.
        died: Number of the first event after it was gone; None while it is there.
        gradient_of: The part of whose parameter it holds the gradient; None of none.
        packed: Number of the event ahead of which that gradient is complete.
    """

    num_bytes: int
    born: int
    died: int | None = None
    gradient_of: int | None = None
    packed: int = 0


def _phases_of(
    events: Sequence[_Event], lives: Sequence[_Life], gradients: Sequence[int], first_part: int
) -> tuple[Phase, ...]:
    """Events of one part in a row as one phase, with the bytes that were alive in it.

    Args:
        events: In order.
        lives: Of what counts.
        gradients: Numbers of the events that computed gradients of parameters, in order.
        first_part: That of events ahead of the first one with a part.
    """
    num = len(events)
    made, gone = [0] * (num + 1), [0] * (num + 1)
    for life in lives:
        made[life.born] += life.num_bytes
        gone[num if life.died is None else life.died] += life.num_bytes
    alive = list(accumulate(more - less for more, less in zip(made, gone, strict=True)))

    def place_of(event: _Event) -> tuple[int, bool]:
        return first_part if event.part is None else event.part, event.is_backward

    found, start = [], 0
    for (part, is_backward), run in groupby(events, key=place_of):
        own = list(run)
        stop = start + len(own)
        place = bisect.bisect_left(gradients, start)
        turn = min(gradients[place], stop) if place < len(gradients) else stop
        found.append(
            Phase(
                part,
                is_backward,
                tuple(event.op for event in own if event.op is not None),
                max(alive[start:turn], default=0),
                max(alive[turn:stop]) if turn < stop else None,
                alive[stop - 1] - (gone[stop] if stop < num else 0),
            )
        )
        start = stop
    return tuple(found)


class _Recorder(TorchDispatchMode):
    """Notes each operation, the part that it belongs to, and how long what it made stays alive."""

    def __init__(self, model: nn.Module, parts: Sequence[Part], progress: Progress) -> None:
        super().__init__()
        self._progress, self._seen = progress, set[tuple[int | None, bool]]()
        self._parts = tuple(parts)
        self._events: list[_Event] = []
        self._lives: dict[int, _Life] = {}  # by id of the storage, as long as it is alive
        self._ended: list[_Life] = []
        self._refs: list[Any] = []
        self._known: dict[int, int | None] = {}  # storages of parameters and buffers, and the part of each
        self._used_in_backward: set[int] = set()  # parts of whose parameters backward used some
        self.part_of = parts_by_module(model, parts)
        of_root = [i for i, part in enumerate(parts) if model in part.modules and len(parts) > 1]
        self._part_of_root = of_root[-1] if of_root else None
        self._part_of_param = {name: i for i, part in enumerate(parts) for name in part.params}
        self._part_of_variable: dict[int, int] = {}
        self._num_bytes = [0] * len(parts)  # of the trained parameters of each
        self._in_use: set[int] = set()  # parts of which a parameter was used in the forward of their modules
        self._interrupted: set[int] = set()  # of these, those within which others were used since
        self._left: set[int] = set()  # parts whose modules have run
        self._outside: set[int] = set()
        self._throughout: set[int] = set()
        # Of each part, numbers of the events ahead of which large gradients are complete.
        self._packing: list[list[int]] = [[] for _ in parts]
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
            if part is not None and value.requires_grad:
                self._part_of_variable[id(value)] = part
                self._num_bytes[part] += sum(piece.nbytes for piece in pieces_of(value))
                value.register_hook(partial(self._note_gradient, part))

    def _note_gradient(self, part: int, grad: Tensor) -> None:
        for piece in pieces_of(grad):
            life = self._lives.get(id(piece.untyped_storage()))
            if life is not None:
                life.gradient_of, life.packed = part, len(self._events)
                if life.num_bytes > SMALL_GRAD_BYTES:
                    self._packing[part].append(life.packed)

    def enter(self, part: int) -> None:
        """The forward of a part's module begins."""
        self._stack.append(part)
        self._note_change(part)

    def leave(self, *_: Any) -> None:
        """The forward of such a module ends."""
        self._last = self._stack.pop()
        self._in_use.discard(self._last)
        self._interrupted.discard(self._last)
        self._left.add(self._last)
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
        for each in tensors(args):
            used = self._known.get(id(each.untyped_storage()))
            if used is not None:
                self._note_use(used)
        part = self._current_part()
        if (part, self._is_backward) not in self._seen:
            self._tell(part)
        self._events.append(_Event(part, self._is_backward, cost_of(func, args, kwargs or {}, out)))
        for each in tensors(out):
            self._follow(each.untyped_storage())
        return out

    def _note_use(self, part: int) -> None:
        """An operation takes a parameter of a part."""
        if part == self._part_of_root:
            self._touched.setdefault(part)
        if self._is_backward:
            self._used_in_backward.add(part)
            return
        if part in self._left and part not in self._stack:
            self._outside.add(part)
        elif part in self._interrupted:
            self._throughout.add(part)
            self._interrupted.remove(part)
        self._in_use.add(part)
        depth = self._depth_of(part)
        self._interrupted.update(other for other in self._in_use if self._depth_of(other) < depth)

    def _depth_of(self, part: int) -> int:
        """How many modules of parts hold the one that runs; -1 for the root's part."""
        if part == self._part_of_root:
            return -1
        return self._stack.index(part) if part in self._stack else 0

    def _tell(self, part: int | None) -> None:
        """A part runs for the first time, forward or backward; of all parts, that is twice as many times."""
        self._seen.add((part, self._is_backward))
        num = sum(1 for seen, _ in self._seen if seen is not None)
        half = "backward" if self._is_backward else "forward"
        self._progress(f"tracing a {half}, {num} of {2 * len(self._parts)}")

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._lives or key in self._known:
            return
        life = _Life(storage.nbytes(), len(self._events) - 1)
        self._lives[key] = life

        def end(_: Any) -> None:
            life.died = len(self._events)
            self._ended.append(self._lives.pop(key))

        self._refs.append(weakref.ref(storage, end))

    def trace(self, input_bytes: int) -> Trace:
        """The step that was noted."""
        first_part = self._changes[0][1] if self._changes else 0
        unused = frozenset(range(len(self._parts))) - self._used_in_backward
        order = tuple(dict.fromkeys((*self._touched, *self._part_of_param.values())))  # last what nobody used
        self._throughout |= self._outside
        lives = (*self._ended, *self._lives.values())
        counted = [life for life in lives if life.gradient_of is None] + self._waiting_gradients(lives)
        gradients = sorted(life.born for life in lives if life.gradient_of is not None)
        phases = _phases_of(self._events, counted, gradients, first_part)
        outside, throughout = frozenset(self._outside), frozenset(self._throughout)
        return Trace(self._parts, order, phases, input_bytes, unused, outside, throughout)

    def _waiting_gradients(self, lives: Iterable[_Life]) -> list[_Life]:
        """What gradients take while other parts run: each until it is complete, and what they are packed into."""
        found = [replace(life, died=life.packed) for life in lives if life.gradient_of in self._throughout]
        for part in self._throughout:
            packing = self._packing[part]
            if packing and packing[0] < packing[-1]:
                found.append(_Life(self._num_bytes[part], packing[0] - 1, packing[-1]))  # beside the first of them
        return found
