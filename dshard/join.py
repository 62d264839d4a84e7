"""Uneven numbers of batches: ranks that have no more of them follow the others to the end."""

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from dshard import arguments, collectives
from dshard.autograd import in_backward
from dshard.clip import clip_grad_norm_, on_clip
from dshard.collectives import ReduceOp, ShardGroup
from dshard.compat import no_sync
from dshard.compiling import outside_of_graphs
from dshard.errors import DivergenceError, StateError
from dshard.optimizer.steps import before_steps
from dshard.runtime.runtime import context_of
from dshard.units.context import Phase

_NOTHING = -math.inf  # what a rank without batches has to say


class _Event(enum.IntEnum):
    """What ranks with batches are about to do, all of them alike."""

    END = 0  # no rank has any
    FORWARD = 1
    EVAL = 2
    BACKWARD = 3
    STEP = 4
    CLIP = 5
    NORM = 6
    SCALE = 7
    CLIP_FINITE = 8  # with error_if_nonfinite


_OF_PHASE = {Phase.FORWARD: _Event.FORWARD, Phase.EVAL: _Event.EVAL, Phase.BACKWARD: _Event.BACKWARD}


def join(
    module: nn.Module, *, enable: bool = True, throw_on_early_termination: bool = False
) -> AbstractContextManager[object]:
    """Let ranks have different numbers of batches: those that have no more of them follow the others to the end.

    ::

        with dshard.join(model):
            for batch in loader:  # of any length on each rank
                loss = model(batch).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    A rank that leaves the block early runs each forward and backward that the others run, with its last batch and
    gradients of zero, and their optimizer steps on its shards. So gradients are those of the batches that there are,
    over the number of *all* ranks, as under `DistributedDataParallel.join`. Numbers of the optimizer, such as a
    learning rate that a scheduler changed, are taken from the others; buffers stay as they were.

    The block may hold forwards, backwards, `no_sync`, clipping (dshard's and torch's, of all parameters) and steps of
    optimizers. A collective of the program's own must be left out, or kept to ranks that have a batch.

    Args:
        module: The model that `fully_shard` was called on, whose own forward is run.
        enable: False for a block that does nothing.
        throw_on_early_termination: Raise on all ranks as soon as one has no more batches.

    Raises:
        ArgumentError: It is no sharded model.
        StateError: Another block is open; a rank has had no batch or no step at all; or a
            rank ended early and that was to be told. On every rank alike.
        DivergenceError: Ranks that have batches do different things, or have optimizers with different numbers.

    Communicates:
        An all-reduce of 64 bytes ahead of each forward, backward, step and clipping, and of 16 bytes per number of the
        optimizer ahead of its step.

    Source: PyTorch's `torch.distributed.algorithms.Join`, for its names and what it promises.
    """
    sharded: Any = arguments.sharded_module("join", "module", module)
    enable = arguments.boolean("join", "enable", enable)
    throws = arguments.boolean("join", "throw_on_early_termination", throw_on_early_termination)
    groups = [group for unit in context_of(sharded).units for group in unit.groups]
    group = max(groups, key=lambda group: group.world_size, default=None)
    if not enable or group is None or group.world_size == 1:
        return nullcontext()
    return _Join(sharded, group, throws=throws)


_OPEN: list[object] = []  # blocks of this process


class _Join:
    """The context of `join`, for a model and the ranks that share it."""

    def __init__(self, module: Any, group: ShardGroup, *, throws: bool) -> None:
        self._module = module
        self._context = context_of(self._module)
        self._group, self._throws = group, throws
        self._inputs: _Inputs | None = None
        self._optimizers: list[Optimizer] = []
        self._outputs: list[Any] = []  # of forwards on a rank without batches
        self._norm: Any = None  # found there last
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if _OPEN:  # a rank that has left the inner block would follow the one model, and others run the other, too
            raise StateError(
                "join: one model is followed at a time, but a block of another call is open. Give all ranks as many "
                "batches where a loop trains several models."
            )
        _OPEN.append(self)
        self._stack.callback(_OPEN.remove, self)
        self._context.announce = self._on_phase
        self._stack.callback(setattr, self._context, "announce", None)
        hook = self._module.register_forward_pre_hook(self._on_inputs, with_kwargs=True, prepend=True)
        self._stack.callback(hook.remove)
        self._stack.callback(before_steps(self._on_step))
        self._stack.enter_context(self._torchs_clipping())
        self._stack.enter_context(on_clip(self._on_clip))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None:
            buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
            self._follow()
            with torch.no_grad():
                for buffer, before in buffers:  # what a batch that was there before did to them counts once
                    buffer.copy_(before)
        self._inputs = None

    # --- ranks with batches ---

    def _on_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() or self._inputs is None:
            self._inputs = _Inputs(args, kwargs, self._group.device_type)

    def _on_phase(self, phase: Phase) -> None:
        settings = next(unit.settings for unit in self._context.units if unit.params)
        self._announce(_OF_PHASE[phase], float(settings.requires_sync), float(settings.requires_all_reduce))

    def _on_step(self, optimizer: Optimizer) -> None:
        if in_backward() or not self._holds(p for group in optimizer.param_groups for p in group["params"]):
            return  # the former: a hook steps, on all ranks
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        number = self._optimizers.index(optimizer)
        self._announce(_Event.STEP, float(number), float(len(_numbers(optimizer))))
        own = torch.tensor([*_numbers(optimizer), 0.0], dtype=torch.float64, device="cpu")
        most, least = self._largest(torch.stack([own, -own])).unbind()
        _check_known(most)
        if not torch.equal(most, -least):
            raise DivergenceError(
                "join: all ranks must have optimizers with the same numbers, but a learning rate or the like differs "
                "between them. Step schedulers on all ranks alike: once per epoch, outside of the block."
            )

    def _on_clip(self, params: Sequence[Tensor], max_norm: float, order: float, is_finite: bool) -> None:
        if self._holds(params):
            self._check_all(len([p for p in params if p.grad is not None]))
            self._announce(_Event.CLIP_FINITE if is_finite else _Event.CLIP, max_norm, order)

    @contextmanager
    def _torchs_clipping(self) -> Iterator[None]:
        """Hear of `torch.nn.utils.clip_grad_norm_`, however it was imported: of its two parts."""
        module: Any = clip_grad
        norm, scale = module._get_total_norm, module._clip_grads_with_norm_

        @outside_of_graphs
        def found(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            grads = {id(p.grad) for p in self._module.parameters() if p.grad is not None}
            if any(id(tensor) in grads for tensor in tensors):
                self._check_all(len(tensors))
                self._announce(_Event.NORM, float(norm_type))
            return norm(tensors, norm_type, *args, **kwargs)

        @outside_of_graphs
        def scaled(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> None:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if self._holds(parameters):
                self._announce(_Event.SCALE, float(max_norm))
            scale(parameters, max_norm, *args, **kwargs)

        module._get_total_norm, module._clip_grads_with_norm_ = found, scaled
        try:
            yield
        finally:
            module._get_total_norm, module._clip_grads_with_norm_ = norm, scale

    def _check_all(self, num_clipped: int) -> None:
        num_grads = len([p for p in self._module.parameters() if p.grad is not None])
        if num_clipped != num_grads:
            raise StateError(
                f"join: gradients are clipped all together, but {num_clipped} of {num_grads} were passed. Pass "
                "model.parameters()."
            )

    def _announce(self, event: _Event, *facts: float) -> None:
        """Tell ranks without batches what comes, and check that all others are about to do the same."""
        said = [float(event), *facts, *[0.0] * (2 - len(facts))]
        own = [*said, *(-value for value in said), _NOTHING, _NOTHING]
        found = self._largest(torch.tensor(own, dtype=torch.float64, device="cpu")).tolist()
        self._check_joined(found)
        if any(most != -least for most, least in zip(found[:3], found[3:6], strict=True)):
            raise DivergenceError(
                "join: all ranks that have a batch must do the same, but one is about to run "
                f"{_Event(int(found[0])).name} and another {_Event(int(-found[3])).name}, or by other options. Look "
                "for a branch that one rank takes alone."
            )

    # --- ranks without ---

    def _follow(self) -> None:
        """Do what the others do, until no rank has a batch."""
        does: dict[_Event, Callable[[float, float], None]] = {
            _Event.FORWARD: self._run_forward,
            _Event.EVAL: self._run_eval,
            _Event.BACKWARD: self._run_backward,
            _Event.STEP: self._run_step,
            _Event.CLIP: self._clip,
            _Event.NORM: self._find_norm,
            _Event.SCALE: self._scale,
            _Event.CLIP_FINITE: partial(self._clip, error_if_nonfinite=True),
        }
        while True:
            own = [_NOTHING] * 6 + [1.0 if self._inputs is None else 0.0, 1.0 if self._throws else 0.0]
            found = self._largest(torch.tensor(own, dtype=torch.float64, device="cpu")).tolist()
            if found[0] == _NOTHING:
                return
            self._check_joined(found)
            does[_Event(int(found[0]))](found[1], found[2])

    def _check_joined(self, found: Sequence[float]) -> None:
        """Raise, on every rank alike, for what ranks without batches cannot do, or are not to do."""
        if found[7] == 1:
            raise StateError(
                "join: all ranks were to have as many batches (throw_on_early_termination), but one has no more of "
                "them. Give all ranks as many, or leave that option out."
            )
        if found[6] == 1:
            raise StateError(
                "join: a rank follows the others with its last batch, but one has had none at all. Give each rank one "
                "at least."
            )

    def _run_forward(self, requires_sync: float, _: float) -> None:
        self._outputs.append(self._output())

    def _run_eval(self, requires_sync: float, _: float) -> None:
        with torch.no_grad():
            self._output()

    def _output(self) -> Any:
        inputs = self._inputs
        assert inputs is not None
        with inputs.context():
            return self._module(*inputs.args, **inputs.kwargs)

    def _run_backward(self, requires_sync: float, requires_all_reduce: float) -> None:
        outputs, self._outputs = self._outputs, []
        losses = [tensor for output in outputs for tensor in _losses(output)]
        self._module.set_requires_all_reduce(bool(requires_all_reduce))
        with nullcontext() if requires_sync else no_sync(self._module):
            torch.autograd.backward(losses, [torch.zeros_like(loss) for loss in losses])
        self._module.set_requires_all_reduce(True)

    def _run_step(self, number: float, num_numbers: float) -> None:
        optimizer = self._optimizers[int(number)] if int(number) < len(self._optimizers) else None
        own = torch.full((2, int(num_numbers) + 1), _NOTHING, dtype=torch.float64, device="cpu")
        own[0, -1] = 1.0 if optimizer is None else _NOTHING
        most = self._largest(own)[0]
        _check_known(most)
        assert optimizer is not None
        _set_numbers(optimizer, most.tolist())
        optimizer.step()
        optimizer.zero_grad()

    def _clip(self, max_norm: float, order: float, *, error_if_nonfinite: bool = False) -> None:
        clip_grad_norm_(self._module.parameters(), max_norm, order, error_if_nonfinite)

    def _scale(self, max_norm: float, _: float) -> None:
        clip_grad._clip_grads_with_norm_(list(self._module.parameters()), max_norm, self._norm)

    def _find_norm(self, order: float, _: float) -> None:
        grads = [p.grad for p in self._module.parameters() if p.grad is not None]
        self._norm = clip_grad._get_total_norm(grads, order)

    # --- both ---

    def _holds(self, params: Any) -> bool:
        own = set(map(id, self._module.parameters()))
        return any(id(param) in own for param in params)

    def _largest(self, own: Tensor) -> Tensor:
        sent, group = [own.to(self._group.device_type)], self._group
        found = collectives.all_reduce(sent, group, ReduceOp.MAX, label="join", everywhere=True, is_check=True)
        return found.wait()[0].cpu()


def _check_known(most: Tensor) -> None:
    if most[-1] == 1:
        raise StateError(
            "join: a rank follows the others with its own optimizer, but one has had no step of it before its batches "
            "ended. Give each rank batches for a step at least."
        )


class _Inputs:
    """The last batch of a rank, and how it was used."""

    def __init__(self, args: Any, kwargs: Any, device_type: str) -> None:
        self.args, self.kwargs = tree_map(_detached, (args, kwargs))
        self._device_type = device_type
        self._is_cast = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)

    def context(self) -> Any:
        """A context in which autocast is as it was."""
        return torch.autocast(self._device_type, dtype=self._dtype, enabled=self._is_cast)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _losses(output: Any) -> list[Tensor]:
    """What the others' loss is made of: a loss among the outputs, or else all of them that take gradients."""
    loss = output.get("loss") if hasattr(output, "get") else None
    leaves = [loss] if isinstance(loss, Tensor) else tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _numbers(optimizer: Optimizer) -> list[float]:
    """Learning rates and the like, of all groups in order."""
    return [float(x) for group in optimizer.param_groups for _, value in _numeric(group) for x in _items(value)]


def _set_numbers(optimizer: Optimizer, numbers: Sequence[float]) -> None:
    left = iter(numbers)
    for group in optimizer.param_groups:
        for key, value in _numeric(group):
            if isinstance(value, Tensor):
                value.fill_(next(left))
            elif isinstance(value, tuple):
                group[key] = tuple(type(x)(next(left)) for x in value)
            else:
                group[key] = type(value)(next(left))


def _numeric(group: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key, group[key]) for key in sorted(group) if key != "params" and all(map(_is_number, _items(group[key])))]


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple) else (value,)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)
