"""Modules that some ranks run and others do not: those that do not take part in what the others communicate."""

from collections.abc import Callable, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dshard import arguments, collectives
from dshard.autograd import in_backward, outside_autograd, runs_again_for_saved
from dshard.collectives import ReduceOp, ShardGroup
from dshard.compiling import outside_of_graphs
from dshard.errors import ArgumentError
from dshard.gradients.reducer import Reducer
from dshard.runtime.module_hooks import await_user, note_open
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import groups_of
from dshard.units.context import ModelContext
from dshard.units.unit import Unit

F = TypeVar("F", bound=Callable[..., Any])


class run_by_some:  # noqa: N801 - a context manager, used as a function is
    """Let some ranks run a module that others do not run in this forward.

    ::

        with dshard.run_by_some(self.vision, runs=pixels is not None):
            if pixels is not None:
                x = x + self.vision(pixels)

    Every rank comes to the block, and says whether it runs the module. Where some rank does, all gather its parameters,
    in forward and in backward, and all take part in the reduction of its gradients: those that did not run it with
    zeros. Where none does, nothing is gathered or reduced. So the gradient is that of one process on the data of all
    ranks, and a parameter that no rank has used has none.

    As a decorator of a module's `forward`, `runs` is a function of its arguments; on ranks where it is false the
    forward is not run, and gives None::

        class Vision(nn.Module):
            @dshard.run_by_some(runs=lambda self, pixels: pixels is not None)
            def forward(self, pixels): ...

    The module is gathered whole for the length of the block, and again in backward: give each of several large modules
    a block of its own. A block within another one, of a module that is part of the outer one's, is part of that, and
    ranks that do not run the outer one may leave it out. Blocks may be repeated, and may lie within checkpointed
    functions. The forward of a sharded module must be around the block, or follow it ahead of the backward.

    Args:
        module: A module whose parameters are sharded, or part of one; a module without is not looked at, so that a
            program can run with and without. As a decorator of a method of a module, leave it out for that module.
        runs: Whether this rank runs it.

    Raises:
        ArgumentError: An argument is none of what it may be.
        StateError: Within the block a rank that runs the module used parameters outside of it. On that rank.
        DivergenceError: The ranks are at different blocks. On every rank alike.

    Communicates:
        An all-reduce of 1 byte at the start, whose result the host waits for; then, where some rank runs the module,
        one all-gather per bucket of its units, again in backward, and a reduce-scatter.
    """

    def __init__(self, module: nn.Module | None = None, *, runs: Any) -> None:
        self._module: nn.Module | None = arguments.module("run_by_some", "module", module, or_none=True)
        self._runs = runs
        self._open: list[_Region | None] = []

    def __enter__(self) -> "run_by_some":
        if self._module is None or callable(self._runs):
            raise ArgumentError(
                "run_by_some: a block needs a module, and runs as a bool, but "
                f"{'module was left out' if self._module is None else 'runs is a function'}. Pass both, as in "
                "run_by_some(model.vision, runs=pixels is not None)."
            )
        self._open.append(_begin(self._module, runs=bool(self._runs)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        region = self._open.pop()
        if region is not None:
            _end(region, has_failed=error is not None)

    def __call__(self, function: F) -> F:
        """Decorate a forward, or a function that runs the module."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            module = self._module if self._module is not None else args[0]
            runs = self._runs
            if callable(runs):
                runs = arguments.call_given("run_by_some", "runs", runs, *args, **kwargs)
            with run_by_some(module, runs=bool(runs)):
                return function(*args, **kwargs) if runs else None

        return run  # type: ignore[return-value]


class _Region:
    """One block, that some rank runs.

    Args:
        context: Of the model.
        units: That hold parameters of the module, in one order on all ranks.
        own: Those of them that hold no other parameters.
        label: For messages.
    """

    def __init__(self, context: ModelContext, units: list[Unit], own: set[Unit], label: str) -> None:
        self.context, self.units, self.own, self.label = context, units, own, label
        self.entry: Tensor | None = None  # what the node of its start gives
        self.is_recomputed = False  # by a checkpoint whose own backward follows within the one that runs

    def gather(self) -> None:
        """Start to gather all units, and have them stay."""
        for unit in self.units:
            unit.num_pins += 1
            unit.unshard()

    def let_go(self) -> None:
        """Have the units go where others go, too."""
        for unit in self.units:
            unit.num_pins -= 1
            self.context.eviction.forget_touch(unit)

    def begin_backward(self) -> None:
        """The backward has come to the block."""
        regions = self.context.regions
        self.context.on_backward()
        regions.in_backward.update(self.units)
        with outside_autograd():
            self.gather()
        regions.held += self.units

    def end_backward(self) -> None:
        """The backward has passed the block."""
        regions, reducer = self.context.regions, self.context.get(Reducer)
        for unit in self.units:
            regions.held.remove(unit)
        self.let_go()
        for unit in reversed(self.units):
            self.context.eviction.after_backward(unit)
            if unit in self.own and regions.is_last(unit):
                reducer.join(unit)


@outside_of_graphs
def _begin(module: nn.Module, *, runs: bool) -> _Region | None:
    """A block starts; gives it if some rank runs the module, and it is not part of another one."""
    params = [param for param in module.parameters() if isinstance(param, ShardedTensor)]
    source = params[0].gather_source if params else None
    if not isinstance(source, Unit):
        return None
    context = source.model
    context.before_use()
    units = {id(param.gather_source): param.gather_source for param in params}
    ordered = sorted((unit for unit in units.values() if isinstance(unit, Unit)), key=lambda unit: unit.number)
    if context.regions.open_label is not None and all(unit.num_pins for unit in ordered):
        return None
    local, first = next((name, param) for name, param in module.named_parameters() if isinstance(param, ShardedTensor))
    name = first.name.removesuffix(local).removesuffix(".")
    label = f"run_by_some({name or type(module).__name__})"
    if not _any_runs(params, label, runs=runs):
        return None
    held = set(map(id, params))
    own = {unit for unit in ordered if all(id(unit.params[slot]) in held for slot in unit.trainable)}
    region = _Region(context, ordered, own, label)
    for unit in ordered:
        if unit not in context.regions.units:
            context.regions.units.add(unit)
            unit.forget_casts()
    region.is_recomputed = in_backward() and not runs_again_for_saved()
    region.gather()
    context.regions.open_label = label
    note_open(1)
    if torch.is_grad_enabled():
        region.entry = _Entry.apply(torch.zeros((), device=first.shard_group.device, requires_grad=True), region)
        context.regions.unreduced.update(unit for unit in ordered if unit.trainable)
    return region


def _any_runs(params: Sequence[ShardedTensor], label: str, *, runs: bool) -> bool:
    """Whether any rank runs a module, of those that share its parameters."""
    groups: dict[str, ShardGroup] = {group.full_name: group for param in params for group in groups_of(param)}
    found = torch.tensor([runs], dtype=torch.uint8, device="cpu")
    with outside_autograd():
        for group in groups.values():
            handle = collectives.all_reduce([found], group, ReduceOp.MAX, label=label, everywhere=True, is_check=True)
            found = handle.wait()[0]
    return bool(found.item())


@outside_of_graphs
def _end(region: _Region, *, has_failed: bool) -> None:
    """A block has ended."""
    context = region.context
    context.regions.open_label = None
    note_open(-1)
    if region.is_recomputed and not has_failed:
        context.regions.in_backward.update(region.units)
        context.regions.held += region.units  # until all of the backward ends
        return
    region.let_go()
    if has_failed:
        return
    if not in_backward():
        context.eviction.after_region(region.units)
    if region.entry is not None:
        token = _Exit.apply(region.entry, region)
        if not in_backward():
            context.regions.note_passed(region.units)
            await_user(token, any_module=not context.regions.has_gradient)


class _Entry(torch.autograd.Function):
    """The node at the start of a block: autograd comes to it behind all nodes within.

    The engine runs, of the nodes that are ready, the one that was made last. This one was made ahead of those of the
    block, and that at its end behind them; so on all ranks the backward is at the block at the same place, also where
    there are none.
    """

    @staticmethod
    def forward(ctx: Any, start: Tensor, region: _Region) -> Tensor:
        ctx.region = region
        return start.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.region.end_backward()
        return torch.zeros_like(grad), None


class _Exit(torch.autograd.Function):
    """The node at the end of a block: autograd comes to it ahead of all nodes within."""

    @staticmethod
    def forward(ctx: Any, entry: Tensor, region: _Region) -> Tensor:
        ctx.region = region
        ctx.save_for_backward(entry)  # to read it has a checkpoint around the block run again, on all ranks here
        return entry.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        ctx.region.begin_backward()
        return torch.zeros_like(grad), None
