"""`set_strategy`: other strategies for a model that is sharded, between two steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from dshard import arguments
from dshard.agreement import check_same, refused_together
from dshard.autograd import in_backward
from dshard.errors import StateError, UnsupportedOpError
from dshard.gradients.backward import Backward
from dshard.gradients.reducer import Reducer
from dshard.optimizer.replace import Move, move_states, note_moves, place_of, relocate
from dshard.policies import StrategyRules, read_strategies
from dshard.runtime.late import LateParameters
from dshard.runtime.runtime import context_of
from dshard.slices import check_sliced, is_sliced, set_slices
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import tp_layout_of
from dshard.tensor.subclass_shards import subclass_gathers
from dshard.units.context import ModelContext, UnitSettings
from dshard.units.placing import Place, placed_by
from dshard.units.unit import Unit

_LISTS = ("_dshard_units", "_dshard_formed")


def regroup(tops: Sequence[nn.Module], context: ModelContext, bases: Mapping[int, str]) -> None:
    """Sort the parameters of units that have the same modules by their strategies; one unit for each.

    Args:
        tops: The outermost modules of the units.
        context: Theirs.
        bases: By the identity of a parameter, the base of its new strategy; others keep what they have.
    """
    families: dict[Any, list[Unit]] = {}
    for unit in context.units:
        key = tuple(map(id, unit.modules)), unit.settings.but_lifetime
        families.setdefault(key, []).append(unit)
    changed = {}
    for family in families.values():
        parts = _parts(family, bases)
        old = [unit.params for unit in family if unit.params]
        if [list(map(id, params)) for params in old] == [list(map(id, params)) for params in parts.values()]:
            for settings, unit in zip(parts, [u for u in family if u.params], strict=True):
                unit.settings = settings  # and what it implies, as it restarts
        elif parts:
            first = family[0]
            changed[first] = [
                Unit(params, first.modules, label=first.label, model=first.model, settings=settings)
                for settings, params in parts.items()
            ]
            changed.update({unit: [] for unit in family[1:]})
    if changed:
        for module in dict.fromkeys(module for top in tops for module in top.modules()):
            for name in _LISTS:
                if name in module.__dict__:
                    module.__dict__[name] = _replaced(module.__dict__[name], changed)
    context.reorder(_replaced(context.units, changed))
    for unit in context.units:
        unit.restart()
    context.get(Backward).on_regrouped()


def _parts(family: Sequence[Unit], bases: Mapping[int, str]) -> dict[UnitSettings, list[ShardedTensor]]:
    """Parameters by what their new strategy says, or else by what their unit does."""
    parts: dict[UnitSettings, list[ShardedTensor]] = {}
    for unit in family:
        for param in unit.params:
            base = bases.get(id(param))
            parts.setdefault(unit.settings.under(base) if base is not None else unit.settings, []).append(param)
    return parts


def _replaced(units: Sequence[Unit], changed: Mapping[Unit, Sequence[Unit]]) -> list[Unit]:
    return [new for unit in units for new in changed.get(unit, [unit])]


def set_strategy(module: nn.Module, strategy: Any, *, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
    """Change what is whole on every rank and what is sharded, between two steps; training goes on bit for bit.

    Parameters, gradients and optimizer states move to where the strategy wants them and stay the objects that they are;
    full tensors on the way take no more bytes than the largest one. Gradients that were added up unreduced are reduced.
    What `to_local()` gave before is a copy from then on; a view or alias that was made before raises at its use.

    Args:
        module: A module that `fully_shard` was called on; its units and those below follow.
        strategy: As of `fully_shard`. Parameters that no pattern of a dict matches stay as they are.
        optimizer: Those whose states move now. Those of others move ahead of their next step.

    Raises:
        ArgumentError: It is no sharded module, or no strategy. On every rank alike.
        StateError: A forward, backward or `gathered` scope runs; or a pattern matches nothing. On every rank alike.
        PlacementError, UnsupportedOpError: A parameter cannot go where it should. On every rank alike, ahead of any
            change.
        DivergenceError: The ranks ask for different strategies, or pass different optimizers. On every rank alike.

    Communicates:
        An all-reduce of 48 bytes, and one of a byte per unit; an all-gather of each parameter, gradient and state that
        is cut otherwise than before, and nothing for what was whole. With `hybrid(k)`, the making of process groups,
        the first time.
    """
    context = context_at_rest("set_strategy", arguments.sharded_module("set_strategy", "module", module))
    groups = list({p.shard_group.full_name: p.shard_group for unit in context.units for p in unit.params[:1]}.values())
    with refused_together("set_strategy", ["strategy", "optimizer"], next(iter(groups), None)):
        rules = StrategyRules.of(read_strategies("set_strategy", "strategy", strategy))
        given = arguments.optimizers("set_strategy", "optimizer", optimizer)
    names = [name for name, _ in _sharded(module)]
    optimizers = [f"{type(each).__name__} of {len(each.param_groups)} groups" for each in given or ()]
    asked = [f"{pattern}: {wanted}" for pattern, wanted in rules.rules]
    for group in groups:
        strategies = [*asked, *(f"{name}: {rules.strategy_of(name)}" for name in names)]
        check_same("set_strategy", {"strategy": strategies, "optimizer": optimizers}, group)
    rules.check_names("set_strategy", names)
    tops = context.get(LateParameters).tops
    places: dict[ShardedTensor, Place] = {}
    bases: dict[int, str] = {}
    slices: dict[ShardedTensor, int] = {}
    for name, param in _sharded(module):
        chosen = rules.strategy_of(name)
        if chosen is None:
            continue
        own = Place(*param.base_place) if param.base_place is not None else place_of(param)
        places[param] = _new_place(name, param, own, rules)
        bases[id(param)] = chosen.on(own.num_ranks).base
        slices[param] = chosen.num_slices
        if is_sliced(param, chosen.num_slices):
            check_sliced(tops, name, param, dim=places[param].dim)
    context.get(Reducer).reduce_all()
    for param in places:
        if isinstance(param.grad, ShardedTensor):
            param.grad.shard_storage.resolve()
    for unit in context.units:
        unit.reshard()
    context.pool.clear()  # for copies of other sizes
    for param in places:
        now = place_of(param)
        param.base_place = param.base_place or (now.mesh, now.dim)
    relocate([Move(param, place) for param, place in places.items()])
    relocate([Move(p.grad, place) for p, place in places.items() if isinstance(p.grad, ShardedTensor)])
    note_moves()
    for each in given or ():
        move_states(each)
    regroup(tops, context, bases)
    set_slices(tops, slices)
    if module is context.root:
        context.change(strategies=rules.over(context.settings.strategies))


def _sharded(module: nn.Module) -> list[tuple[str, ShardedTensor]]:
    found: list[tuple[str, Any]] = list(module.named_parameters())
    return [(name, param) for name, param in found if isinstance(param, ShardedTensor)]


def context_at_rest(who: str, module: Any) -> ModelContext:
    """The context of a sharded module at rest.

    Raises:
        StateError: A forward, backward or `gathered` scope runs. On every rank alike.
    """
    context = context_of(module)
    pinned = next((unit for unit in context.units if unit.num_pins), None)
    running = "a backward" if in_backward() else "a forward" if context.forwards.num_running else None
    if running is not None or pinned is not None:
        raise StateError(
            f"{who}: a model changes between two steps, but {running or 'a gathered() scope'} is open. Call "
            "it after optimizer.step()."
        )
    return context


def _new_place(name: str, param: ShardedTensor, own: Place, rules: StrategyRules) -> Place:
    """The place that a parameter goes to."""
    strategy = rules.strategy_of(name)
    place = placed_by(name, param, own, strategy)
    is_moved = Move(param, place).is_needed
    if is_moved and subclass_gathers(param.shard_storage.resolve()):
        raise UnsupportedOpError(
            f"{name}: shards of a {type(param.shard_storage.resolve()).__name__} stay on the ranks that they were made "
            f"for, but {strategy} is to move them. Choose among 'full', 'keep', 'zero1' and 'zero2'."
        )
    if tp_layout_of(param.shard_layout) is not None and place.mesh is not own.mesh:
        raise UnsupportedOpError(
            f"{name}: {strategy} needs a mesh of its own, which that of a {DTensor.__name__} is not part of. Choose "
            "among 'ddp', 'full', 'keep', 'zero1' and 'zero2'."
        )
    return place
