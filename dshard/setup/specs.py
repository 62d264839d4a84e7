"""What a `fully_shard` call makes of each parameter, resolved ahead of any change and of any communication."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from dshard.policies import Precision, Strategy
from dshard.units.placing import Place, placed_by
from dshard.units.settings import UnitSettings

__all__ = ["ParamSpec", "described", "settle"]


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
        """In how many slices it is gathered."""
        return self.strategy.num_slices if self.strategy is not None else 1

    def settings(self, *, averages: bool) -> UnitSettings:
        """What its unit is told."""
        settings = UnitSettings(averages=averages)
        return settings if self.strategy is None else settings.under(self.strategy.on(self.base.num_ranks).base)


def settle(specs: Sequence[ParamSpec]) -> list[Place]:
    """Where each parameter goes, as its strategy says.

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
