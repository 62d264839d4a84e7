"""What a `fully_shard` call makes of a model, resolved ahead of any change and of any communication."""

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dshard.collectives import ShardGroup
from dshard.errors import StateError, UnsupportedOpError
from dshard.policies import Precision, PrecisionRules, Strategy, StrategyRules
from dshard.tensor.meshes import group_of
from dshard.tensor.subclass_shards import holds_packed_bits, subclass_gathers
from dshard.units.placing import Place, PlacementFn, placed_by, places_of
from dshard.units.settings import UnitSettings

_PLAIN_PARAMETERS = (nn.Parameter, Tensor)  # whose values are numbers


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What becomes of one parameter.

    Args:
        name: That `named_parameters()` of the module gives.
        param: As it was before.
        base: Where it goes without a strategy.
        strategy: That a rule names for it, if one does.
        precision: The dtypes on its way; None where it is an ordinary one.
    """

    name: str
    param: nn.Parameter
    base: Place
    strategy: Strategy | None
    precision: Precision | None

    @property
    def num_slices(self) -> int:
        """Number of slices in which it is gathered."""
        return self.strategy.num_slices if self.strategy is not None else 1

    def check(self) -> None:
        """Raise if it is to be offloaded and says itself how it is gathered."""
        if subclass_gathers(self.param) and self.precision is not None and self.precision.offload is not None:
            raise UnsupportedOpError(
                f"{self.name}: a tensor subclass with fsdp_pre_all_gather is gathered from where its shards are kept, "
                "but offload_policy keeps them elsewhere. Leave out offload_policy for the module that holds it."
            )

    def __repr__(self) -> str:
        cut = "whole" if self.base.dim is None else f"Shard({self.base.dim})"
        parts = [f"{tuple(self.param.shape)}", cut, f"over {self.base.num_ranks}"]
        parts += [str(each) for each in (self.strategy, self.precision) if each is not None]
        return f"{self.name}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """A unit to be.

    Args:
        label: Its name, for messages.
        modules: In whose forward it is in use.
        params: Its parameters, plain ones or sharded already.
        settings: What is chosen for it.
    """

    label: str
    modules: tuple[nn.Module, ...]
    params: tuple[Tensor, ...]
    settings: UnitSettings

    def __repr__(self) -> str:
        numel = sum(param.numel() for param in self.params)
        chosen = {name: getattr(self.settings, name) for name in self.settings.changed}
        return f"UnitSpec({self.label!r}, {len(self.params)} parameters of {numel:,} elements, {chosen})"


@dataclass(frozen=True, slots=True)
class Resolver:
    """How a `fully_shard` call resolves its parameters, and those that are added to the model later.

    Args:
        mesh: Of one dim, or of two of which the first replicates.
        shard_placement_fn: As of `fully_shard`.
        averages: Whether gradients are averaged over the ranks.
        precision: In which dtypes parameters and gradients travel.
        strategies: Which strategy holds for which parameters.
    """

    mesh: DeviceMesh
    shard_placement_fn: PlacementFn | None
    averages: bool
    precision: PrecisionRules
    strategies: StrategyRules

    @property
    def group(self) -> ShardGroup:
        """The ranks of the mesh."""
        return group_of(self.mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Resolver":
        return self  # a mesh is a resource, all else are choices

    def __reduce__(self) -> Any:
        fn = self.shard_placement_fn
        fn = fn if fn is None or _is_importable(fn) else _LostPlacement(repr(fn))
        return Resolver, (self.mesh, fn, self.averages, self.precision, self.strategies)

    def params(self, found: Sequence[tuple[str, nn.Parameter]]) -> list[ParamSpec]:
        """What becomes of some parameters. Communicates nothing.

        Raises:
            PlacementError, UnsupportedOpError: As `places_of`, or of what is both a subclass and offloaded. On every
                rank alike, where all were given the same.
        """
        specs = []
        for (name, param), base in zip(found, places_of(found, self.mesh, self.shard_placement_fn), strict=True):
            precision = _precision_of(self.precision, name, param)
            spec = ParamSpec(name, param, base, self.strategies.strategy_of(name), precision)
            spec.check()
            specs.append(spec)
        return specs

    def units(
        self,
        specs: Iterable[ParamSpec],
        modules: Sequence[nn.Module],
        *,
        label: str,
        reshard: bool | int | None = None,
    ) -> list[UnitSpec]:
        """The units of some parameters that are used by the same modules: one for each lifetime that strategies name.

        Args:
            specs: What becomes of the parameters; where there are none, the unit is an empty one.
            modules: In whose forward they are used.
            label: Of the units.
            reshard: When they are freed after forward, where no strategy says that.
        """
        parts: dict[UnitSettings, list[nn.Parameter]] = {}
        for spec in specs:
            settings = UnitSettings(averages=self.averages, reshard_after_forward=reshard)
            if spec.strategy is not None:
                settings = settings.under(spec.strategy.on(spec.base.num_ranks).base)
            parts.setdefault(settings, []).append(spec.param)
        parts = parts or {UnitSettings(averages=self.averages, reshard_after_forward=reshard): []}
        return [UnitSpec(label, tuple(modules), tuple(own), settings) for settings, own in parts.items()]

    def under(self, strategies: StrategyRules) -> "Resolver":
        """The same, where strategies were set since."""
        return replace(self, strategies=strategies.over(self.strategies))


def _precision_of(rules: PrecisionRules, name: str, param: nn.Parameter) -> Precision | None:
    """The dtypes of a parameter on its way: never a cast of bits that are no numbers.

    Raises:
        UnsupportedOpError: A policy would cast a parameter of a class of its own, and does not name it. On every rank
            alike, where all were given the same.
    """
    if subclass_gathers(param):
        return rules.precision_of_subclass(name, param.dtype)
    found = rules.precision_of(name, param.dtype)
    if found is None or found.compute is None:
        return found
    if holds_packed_bits(param):
        return Precision(offload=found.offload) if found.offload is not None else None
    kind = type(param)
    if kind not in _PLAIN_PARAMETERS and not isinstance(param, DTensor) and not rules.names(name):
        raise UnsupportedOpError(
            f"{name}: mp_policy casts values, but this parameter is a {kind.__name__}, whose bits may be no numbers "
            f"(dtype {param.dtype}, to {found.compute}). Name it in mp_policy, as in "
            f'{{"{name}": None, "*": ...}} to leave it as it is, or with a dtype to cast it all the same.'
        )
    return found


def _is_importable(function: Any) -> bool:
    """Whether pickle, which writes down a function's name, would find it again."""
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class _LostPlacement:
    """Stands for a `shard_placement_fn` that pickle could not take along."""

    was: str

    def __call__(self, param: nn.Parameter) -> Any:
        raise StateError(
            f"a parameter of shape {tuple(param.shape)}: what is added to a sharded model is placed by its "
            f"shard_placement_fn, but this model was unpickled, and {self.was} is no function that can be imported. "
            "Define it in a module, not in a function, or add the parameter ahead of pickling."
        )


def settle(specs: Sequence[ParamSpec]) -> list[Place]:
    """The place that each parameter goes to, as its strategy says.

    Raises:
        PlacementError, UnsupportedOpError: As `placed_by`. On every rank alike.

    Communicates:
        For `hybrid(k)`, the making of process groups, the first time.
    """
    return [placed_by(spec.name, spec.param, spec.base, spec.strategy) for spec in specs]


def described(specs: Sequence[ParamSpec]) -> list[str]:
    """What all ranks must have alike of the parameters themselves."""
    return [
        f"{s.name}, shape {tuple(s.param.shape)}, {s.param.dtype}{'' if s.param.requires_grad else ', frozen'}"
        for s in specs
    ]
