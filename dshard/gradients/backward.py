"""One backward: noticed at its first gradient, units freed and reduced as it passes them, and ended by autograd."""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dshard import collectives
from dshard.autograd import GRAD, in_backward, keep_own_dtype, outside_autograd
from dshard.collectives import ReduceOp, num_noted, settle
from dshard.compiling import skipped
from dshard.errors import DivergenceError, UnsupportedOpError
from dshard.gradients.iteration import Iteration
from dshard.gradients.reducer import Needs, Reducer
from dshard.gradients.reduction import accumulates, which_accumulate
from dshard.interpreter import alone_in_backward, is_alone_in_hook
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import TPShardLayout
from dshard.tensor.sharded_tensor import REQUIRES_GRAD
from dshard.tensor.tp_params import local_gradient
from dshard.units.context import ModelContext, Phase
from dshard.units.unit import Unit, groups_of

_REQUIRES_GRAD = REQUIRES_GRAD.__get__
_GRAD_OF, _SET_GRAD = GRAD.__get__, GRAD.__set__
_STRIDED = torch.strided
_HOOKS_OF, _HOOKS_AFTER = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_IS_NODE_KNOWN, _WIRE_PRECISION = attrgetter("is_node_known"), attrgetter("wire_precision")


class InputWatches:
    """Hooks on inputs of the modules of units.

    Args:
        on_passed: Called with a unit when a backward has passed all forwards of its modules, and whether one of them
            had no input to tell of it: some gradients of it may be still to come then.
        on_repeated: Called with a unit when one forward of its modules was passed, and another is to come.
    """

    def __init__(self, on_passed: Callable[[Unit, bool], object], on_repeated: Callable[[Unit], object]) -> None:
        self._on_passed, self._on_repeated = on_passed, on_repeated
        self._on_leaves: list[Any] = []
        self._num_watched: dict[Unit, int] = {}  # inputs that will tell
        self._unwatched: set[Unit] = set()  # a module of them ran without such an input

    def is_watched(self, unit: Unit) -> bool:
        """Whether an input of a unit's modules is to tell still that the backward has passed it."""
        return self._num_watched.get(unit, 0) > 0

    def watch(self, unit: Unit, module: nn.Module, inputs: Any) -> bool:
        """Notice when the backward has passed the module of a unit: when an input of it has its gradient.

        Gives whether there is such an input.
        """
        if not torch.is_grad_enabled() or (in_backward() and self._num_watched.get(unit)):
            return False  # the latter: a checkpoint runs a forward again that is watched already
        value = _first_with_gradient(inputs)
        if value is None:
            self._unwatched.add(unit)
            return False
        handle = value.register_hook(partial(self._passed, unit, module is unit.modules[0]))
        self._num_watched[unit] = self._num_watched.get(unit, 0) + 1
        if value.is_leaf:  # else the hook goes with the graph
            self._on_leaves.append(handle)
            self._unwatched.add(unit)  # autograd finishes leaves first, ahead of the weights' gradients
        return True

    def forget(self) -> None:
        """The backward is over for all units."""
        for handle in self._on_leaves:
            handle.remove()
        self._on_leaves.clear()
        self._num_watched.clear()
        self._unwatched.clear()

    @skipped
    def _passed(self, unit: Unit, is_first: bool, grad: Tensor) -> None:
        """The backward has passed a forward of one of a unit's modules; `is_first` for the first of them."""
        left = self._num_watched[unit] = self._num_watched.get(unit, 0) - 1
        if left <= 0:
            self._on_passed(unit, unit in self._unwatched)
        elif is_first:  # another forward of the same modules is to come: gathered anew, as the forward did
            self._on_repeated(unit)


def _first_with_gradient(value: Any) -> Tensor | None:
    """The first tensor in some arguments, however nested, that takes a gradient."""
    if isinstance(value, Tensor):
        return value if value.requires_grad else None
    if isinstance(value, (list, tuple)):
        items: Iterable[Any] = value
    elif isinstance(value, Mapping):
        items = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        items = vars(value).values() if hasattr(value, "__dict__") else ()
    else:
        return None
    for item in items:
        found = _first_with_gradient(item)
        if found is not None:
            return found
    return None


class Backward:
    """Begins and ends the backwards of a model, and tells what has passed in them.

    Args:
        context: Of the model.
    """

    def __init__(self, context: ModelContext) -> None:
        self._context = context
        self.reducer = context.get(Reducer)
        self.iteration = context.get(Iteration)
        self.needs = Needs(context.eviction)
        self.watches = InputWatches(self._on_passed, self._on_repeated)
        self._end: Callable[[], _End | None] = lambda: None  # of the backward that runs
        self._nested: set[Unit] = set()  # whose first gradient came in a backward within the one that runs
        # By group, how many of its collectives were not compared yet when the backward began.
        self._noted: dict[str, int] = {}
        self._thread = 0  # in which forwards begin
        context.on_backward, context.on_outside = self.notice, self.check_failed

    def notice(self) -> None:
        """Have `end` called when the backward that is running ends, or the one that it is nested in."""
        context, task = self._context, torch._C._current_graph_task_id()
        if task in (-1, context.backward_task):
            return
        outer = self._end()
        if context.backward_task == -1 or outer is None:
            end = _End(self, task)
            self.forget_failed()
            self._end = weakref.ref(end, partial(_on_gone, weakref.ref(self)))
            if context.announce is not None:
                context.announce(Phase.BACKWARD)
            context.begin(Phase.BACKWARD)
            context.eviction.begin_backward()
            self.reducer.begin_backward()
            self.needs.begin_backward()
            self._noted = {group.name: num_noted(group) for group in groups_of(context.units)}
            torch.autograd.Variable._execution_engine.queue_callback(end)
        elif task != outer.task:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_nested)
        context.backward_task = task

    def receive(self, unit: Unit, slot: int, grad: Tensor, *, may_wait: bool = False) -> ShardedTensor:
        """Take the full gradient of a parameter; gives the reduced one, which may still be in flight.

        Args:
            unit: The parameter's.
            slot: Its number there.
            grad: The gradient.
            may_wait: Whether nobody else can write to `grad`, so that it may be packed later.
        """
        return self._receive(unit, [slot], [grad], [may_wait], is_given=False)[0]

    def _receive(
        self, unit: Unit, slots: Sequence[int], grads: Sequence[Tensor], may_wait: Sequence[bool], *, is_given: bool
    ) -> list[ShardedTensor]:
        """Take full gradients of a unit.

        Args:
            unit: The unit.
            slots: Numbers of its parameters.
            grads: Of each, the gradient.
            may_wait: Of each, as `receive` takes it.
            is_given: Whether the reduced ones are for `.grad`, in the parameters' dtypes, whatever those of `grads`.
        """
        own = self.reducer.of(unit)
        if not own.is_begun:
            own.begin()
            self._on_first(unit)
        if self.reducer.check is not None:
            for slot, grad in zip(slots, grads, strict=True):
                self.reducer.check.note(unit.params[slot].name, grad)
        return own.receive(slots, grads, may_wait, is_given=is_given)

    def receive_together(
        self, unit: Unit, slots: Sequence[int], grads: tuple[Tensor | None, ...], edges: Sequence[tuple[Any, int]]
    ) -> list[Any]:
        """Take the full gradients of a unit; gives what autograd is to hand on to each parameter.

        That is nothing where `.grad` has it by now; and the gradient as it is where somebody is to see it on its way.

        Args:
            unit: The unit.
            slots: Numbers of its parameters.
            grads: Of each, the gradient that a function's backward was given.
            edges: Of each, the place in the graph where it is accumulated.
        """
        self.notice()
        are_alone = alone_in_backward(grads)  # ahead of other references
        params, left = [unit.params[slot] for slot in slots], list[Any](grads)
        accumulate = which_accumulate([node for node, _ in edges])
        each = zip(left, accumulate, map(_HOOKS_OF, params), map(_REQUIRES_GRAD, params), strict=True)
        taken = [
            index
            for index, (grad, does, hooks, requires) in enumerate(each)
            # Nobody but `.grad` is to have it.
            if grad is not None and does and requires and hooks is not None and len(hooks) == 1
            if grad.layout is _STRIDED
        ]
        if not taken:
            return left
        own_slots, own_grads = slots, list(left)
        if len(taken) < len(params):
            own_slots, own_grads = [slots[index] for index in taken], [left[index] for index in taken]
            are_alone = [are_alone[index] for index in taken]
        if TPShardLayout.num_made:
            given_grads = own_grads
            with outside_autograd():
                own_grads = [local_gradient(params[index], left[index]) for index in taken]
            are_alone = [
                alone and own is given for alone, own, given in zip(are_alone, own_grads, given_grads, strict=True)
            ]
        given = self._receive(unit, own_slots, own_grads, are_alone, is_given=True)
        added_up = []
        for index, reduced in zip(taken, given, strict=True):
            param, left[index] = params[index], None
            known = _GRAD_OF(param)
            if known is None:
                _SET_GRAD(param, reduced)
            elif known is reduced:
                added_up.append(known)  # to the buffer that `.grad` awaits
            else:  # not by autograd, which would add a full gradient of another use to it first
                known.add_(reduced)
        if added_up:
            torch.autograd.graph.increment_version(added_up)
        return left

    def note_use(self, unit: Unit) -> None:
        """The backward uses full tensors of a unit that autograd has kept since the forward."""
        self.notice()
        self._context.eviction.touched.add(unit)

    def _on_first(self, unit: Unit) -> None:
        """Gather a unit of which the first gradient has arrived, if other ranks may need it; or note that they did."""
        if unit in self._context.regions.in_backward:
            return  # all ranks have gathered it
        outer = self._end()
        if outer is not None and outer.task != self._context.backward_task:
            self._nested.add(unit)
        if self.needs.meet(unit):
            self._context.eviction.make_way(unit)
            unit.copies.join(gathers=not self.needs.was_gathered(unit))

    def _on_repeated(self, unit: Unit) -> None:
        """Free a unit that will be gathered anew for another forward of its modules, unless ranks differ in them."""
        self.notice()
        if unit not in self._context.regions.units:
            self._context.eviction.after_backward(unit)

    def _on_passed(self, unit: Unit, is_unwatched: bool) -> None:
        """Free a unit whose modules' inputs have their gradients, and let its own leave, unless some may come still."""
        self.notice()
        if unit in self._context.regions.units:
            return  # the end of its region does so on all ranks, or that of the backward
        self._context.eviction.after_backward(unit)
        if not is_unwatched:
            self.reducer.reduce(unit)

    @skipped
    def _end_nested(self) -> None:
        """A backward within another one ends: that of a region that is checkpointed reentrantly, most likely."""
        nested, self._nested = sorted(self._nested, key=attrgetter("number")), set()
        for unit in nested:
            if not self.watches.is_watched(unit) and unit not in self._context.regions.units:
                self._context.eviction.after_backward(unit)
                self.reducer.reduce(unit)

    def _leave(self) -> None:
        """No backward runs any more."""
        self._context.backward_task = -1
        self._context.forwards.await_backward(is_awaited=False)
        self._context.eviction.forget_backward()
        self.watches.forget()

    def end(self) -> None:
        """Reduce what is incomplete and free everything."""
        context, units = self._context, self._context.units
        self._leave()
        context.schedule.end()
        complete = self.reducer.complete
        try:
            for unit in sorted(context.regions.unreduced, key=attrgetter("number")):
                self.reducer.join(unit)
            context.regions.end_backward()
            self.reducer.end_backward()
            spared = self.needs.learn(complete, self.reducer.reduces_now)
            if spared:
                context.schedule.leave_out(Phase.BACKWARD, spared)
            # Only what this backward did: ranks may differ in how many backwards without communication they run.
            settle([group for group in groups_of(units) if num_noted(group) > self._noted.get(group.name, 0)])
            if self.reducer.check is not None:
                own = {p.shard_group.full_name: p.shard_group for unit in units for p in unit.params}
                self.reducer.check.settle(list(own.values()))
            self.iteration.end_backward()
        except BaseException as error:
            self.iteration.fail(error)
            self.reducer.forget_backward()
            raise
        finally:
            context.eviction.end_backward()
            for unit in units:
                unit.num_unshards, unit.is_used_beside = 0, False

    def forget_failed(self) -> None:
        """Forget a backward that has not come to its end."""
        self._nested.clear()
        if self._context.backward_task != -1:
            self._leave()
            self._context.regions.end_backward()
            self.reducer.forget_backward()

    def begin_forward(self) -> None:
        """A forward begins, in the thread in which the program trains."""
        self._thread = threading.get_ident()
        self.check_failed()

    def check_failed(self) -> None:
        """Note that a backward has raised, if one has that nobody has noticed.

        On an accelerator autograd runs it on a thread of its own, and may let go of it after the program has gone on.
        """
        is_outside = torch._C._current_graph_task_id() == -1
        if self._context.backward_task != -1 and is_outside and self._thread == threading.get_ident():
            self.on_failed()

    def on_gone(self) -> None:
        """Autograd has let go of what it was to call at the end: at once, or on its own thread at any time later."""
        if self._thread in (0, threading.get_ident()):
            self.on_failed()

    def on_failed(self) -> None:
        """A backward has ended with an exception."""
        if self._context.backward_task != -1:
            self.iteration.fail("raised an exception in its backward")
            self.forget_failed()

    def forget(self) -> None:
        """Begin as the first step did: how far the last one came may differ between ranks."""
        self.needs.forget()
        self.watches.forget()
        self.reducer.forget_step()

    def on_regrouped(self) -> None:
        """Units are others now: what was learned of them says nothing."""
        self._context.schedule.forget()
        self.needs.forget()
        self.reducer.forget_deferrals()

    def reset(self) -> None:
        """Drop the gradients that are under way, after an exception."""
        self._leave()
        self._context.schedule.end()
        self.reducer.reset()


@skipped
def _on_gone(backward: "weakref.ref[Backward]", _: object) -> None:
    """Autograd has let go of what it was to call at the end of a backward."""
    known = backward()
    if known is not None:
        known.on_gone()


class _End:
    """What autograd calls at the end of a backward; it drops this as soon as the backward has ended, or raised."""

    def __init__(self, backward: Backward, task: int) -> None:
        self._backward, self.task = backward, task

    @skipped
    def __call__(self) -> None:
        self._backward.end()


class _ReduceGrad(torch.autograd.Function):
    """A reduction that autograd records, for `create_graph`."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, unit: Unit, slot: int, backward: Backward) -> ShardedTensor:
        ctx.unit = unit
        ctx.group = unit.params[slot].shard_group
        settings = unit.settings
        ctx.divisor = settings.divisor or (ctx.group.world_size if settings.averages else 1)
        return backward.receive(unit, slot, _plain(grad))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Every rank's loss may depend on the reduced gradient; each contribution was averaged in with weight 1/N."""
        total = collectives.all_reduce(
            [_plain(grad)],
            ctx.group,
            ReduceOp.SUM,
            label=f"double backward of '{ctx.unit.label}'",
            everywhere=True,
        ).wait()[0]
        return total / ctx.divisor, None, None, None


def _plain(grad: Tensor) -> Tensor:
    """A gradient as a plain tensor."""
    return grad.materialize() if isinstance(grad, ShardedTensor) else grad


@skipped
def route_gradient(param: ShardedTensor, grad: Tensor | None) -> Tensor | None:
    """The hook of every sharded parameter: full gradient of this rank in, reduced gradient out."""
    if grad is None:
        return None
    param.is_routed = True
    if isinstance(grad, ShardedTensor) and grad.shard_storage.is_shared:
        grad.shard_storage.is_reduced = False  # it has arrived
        return grad  # a nested autograd.grad has reduced it already, or uses in slices have
    assert isinstance(param.gather_source, Unit), "a gradient hook outlived its unit"
    unit = param.gather_source
    if not REQUIRES_GRAD.__get__(param):
        return grad  # frozen since the forward: autograd drops it
    if unit.is_running and not accumulates(param):
        return _plain(grad)  # to a forward that asks by `autograd.grad`: of this rank, as of a full tensor
    if grad.layout != torch.strided:
        raise UnsupportedOpError(
            f"{param.name}: gradients of sharded parameters must be dense, but this one has layout {grad.layout}. "
            "Build the embedding with sparse=False."
        )
    if unit.settings.num_slices > 1:
        _check_one_way(param, unit)
    is_alone = is_alone_in_hook(grad)
    backward: Backward = unit.model.services[Backward]
    backward.notice()
    meta: Any = param._spec.tensor_meta  # reading a subclass's own attributes takes several times as long
    if grad.shape != meta.shape:
        raise DivergenceError(
            f"{param.name}: a gradient must have the parameter's shape {tuple(param.shape)}, but it is "
            f"{tuple(grad.shape)}. Look at the backward of custom autograd functions."
        )
    if type(grad) is DTensor or type(param.shard_storage.layout) is TPShardLayout:
        if torch.is_grad_enabled() and grad.requires_grad:
            raise UnsupportedOpError(
                f"{param.name}: create_graph=True needs plain gradients, but this parameter or its gradient is a "
                "DTensor. Take the second derivative of a model without tensor parallelism."
            )
        with outside_autograd():
            return backward.receive(unit, param.gather_slot, local_gradient(param, grad))
    if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():  # as in every ordinary backward
        return backward.receive(unit, param.gather_slot, _plain(grad), may_wait=is_alone)
    if torch.is_grad_enabled() and grad.requires_grad:
        return _ReduceGrad.apply(grad, unit, param.gather_slot, backward)
    with outside_autograd():
        return backward.receive(unit, param.gather_slot, _plain(grad), may_wait=is_alone)


def _check_one_way(param: ShardedTensor, unit: Unit) -> None:
    """Raise where a gradient holds this rank's part and, from a use in slices, what is reduced already.

    Their sum is right for a mean alone: the mean of what is equal on all ranks is itself. A hook would see what it has
    seen in slices once more.
    """
    settings = unit.settings
    is_mean = settings.averages and settings.divisor is None and settings.reduce_hook is None
    if unit.sliced_in == torch._C._current_graph_task_id() and not is_mean:
        way = "Leave gradients averaged" if settings.reduce_hook is None else "Remove the hook of set_all_reduce_hook"
        raise UnsupportedOpError(
            f"{param.name}: where gradients are not averaged over the ranks, or a hook changes them, one backward must "
            "use a weight either in slices or whole, but this one used it both ways: by its layer, and by another "
            f"operation. {way}, or give the weight the strategy 'full'."
        )


def users_hooks(param: ShardedTensor) -> tuple[list[Any], list[Any]]:
    """The program's own hooks on gradients of a parameter, and those after their accumulation."""
    known, known_after = param._backward_hooks or {}, param._post_accumulate_grad_hooks or {}
    others = [hook for hook in known.values() if getattr(hook, "func", None) is not route_gradient]
    return others, [hook for hook in known_after.values() if hook is not keep_own_dtype]


def which_may_be_hooked(unit: Unit, slots: Sequence[int]) -> set[int]:
    """Of which parameters a program may have hooks of its own on the gradient, its accumulation, or its node."""
    params = [unit.params[slot] for slot in slots]
    hooks, hooks_after = list(filter(None, map(_HOOKS_OF, params))), list(filter(None, map(_HOOKS_AFTER, params)))
    if len(hooks) == len(params) == sum(map(len, hooks)) and not any(map(_IS_NODE_KNOWN, params)):
        num_own = len(params) - list(map(_WIRE_PRECISION, params)).count(None)
        if num_own == len(hooks_after) == sum(map(len, hooks_after)):
            return set()  # each has those of `hook_gradient` alone
    return {slot for slot, param in zip(slots, params, strict=True) if _may_be_hooked(param)}


def _may_be_hooked(param: ShardedTensor) -> bool:
    hooks, hooks_after = param._backward_hooks, param._post_accumulate_grad_hooks
    if param.is_node_known or (hooks is not None and len(hooks) > 1):
        return True
    return hooks_after is not None and len(hooks_after) > (param.wire_precision is not None)


def hook_gradient(param: ShardedTensor) -> None:
    """Have the gradients of a parameter reduced, from the first time that it takes any."""
    if param.requires_grad and param.is_leaf and param.grad_hook_handle is None:
        # `swap_tensors` leaves dicts of hooks behind that autograd no longer knows; start from new ones.
        others, others_after = users_hooks(param)
        param._backward_hooks = param._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        param.grad_hook_handle = param.register_hook(partial(route_gradient, param))
        if param.wire_precision is not None:
            param.grad_dtype = None  # gradients arrive as they were computed, and are converted as they are packed
            param.register_post_accumulate_grad_hook(keep_own_dtype)
        for hook in others:
            param.register_hook(hook)
        for hook in others_after:
            param.register_post_accumulate_grad_hook(hook)
