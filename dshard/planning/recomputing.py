"""Activation checkpointing as a choice: which units may have it, and what each kind of it costs them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from torch import nn

from dshard.autograd import checkpointed
from dshard.errors import PlanError
from dshard.planner.costs import CHECKPOINTING, ModelCosts, UnitCosts
from dshard.planner.steps import Part
from dshard.planner.tracing import Trace

ANY = "auto"
Kinds = tuple[str, ...]  # one for each part of a model


def kinds_of(given: Sequence[str] | str) -> tuple[str, ...]:
    """Kinds of activation checkpointing that a unit may have, as `plan` takes them."""
    names = CHECKPOINTING if given == ANY else (given,) if isinstance(given, str) else given
    return tuple(kind for kind in CHECKPOINTING if kind in names)


def may_recompute(model: nn.Module, part: Part) -> bool:
    """Whether a part's modules may compute their forward twice: not the model itself, nor what counts its forwards."""
    counts = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    inside = [each for module in part.modules for each in module.modules()]
    return model not in part.modules and not any(isinstance(m, counts) and m.track_running_stats for m in inside)


@contextmanager
def under(parts: Sequence[Part], kinds: Kinds) -> Iterator[None]:
    """Have the modules of each part run under its kind of activation checkpointing within the block."""
    with ExitStack() as stack:
        for kind in CHECKPOINTING[1:]:
            modules = [m for part, own in zip(parts, kinds, strict=True) if own == kind for m in part.modules]
            stack.enter_context(checkpointed(modules, kind))
        yield


def with_alternatives(plain: ModelCosts, others: Sequence[ModelCosts], kinds: Sequence[str]) -> ModelCosts:
    """One model of which each unit has the kinds that it may have, the first in front.

    A kind that does not keep fewer bytes than none is left out: it takes longer, too.

    Args:
        plain: Without activation checkpointing.
        others: With one kind each, where it may be; the units of which it is say so.
        kinds: That are wanted. A unit that may have none of them is plain.

    Raises:
        PlanError: No unit may have any of them.
    """
    found = []
    for units in zip(plain.units, *(other.units for other in others), strict=True):
        own, *again = units
        kept = [unit for unit in again if unit.checkpointing != "none" and unit.activation_bytes < own.activation_bytes]
        wanted = [unit for unit in (own, *kept) if unit.checkpointing in kinds] or [own]
        found.append(replace(wanted[0], alternatives=tuple(wanted[1:])))
    if "none" not in kinds and all(unit.checkpointing == "none" for unit in found):
        raise PlanError(
            f"plan: checkpointing must have a unit to save memory in, but of {len(found)} units none may compute its "
            'forward again and keeps less then. Pass checkpointing="none".'
        )
    return replace(plain, units=tuple(found))


def least_share(plain: Trace, other: Trace, kinds: Kinds) -> float:
    """What computing again takes at least, as a part of the forward of what does: half of its arithmetic's share.

    Args:
        plain: A step without activation checkpointing.
        other: The same under it.
        kinds: Of each part, in the latter.
    """
    own = sum(phase.flops for phase in plain.phases if kinds[phase.part] != "none" and not phase.is_backward)
    return max(0.0, (other.flops - plain.flops) / own / 2) if own else 0.0


def shared_times(plain: ModelCosts, other: ModelCosts, least: float) -> ModelCosts:
    """Measured costs with the times of the plain ones, and the same share of each forward again in its backward.

    So that units do not differ by what the two measurements happen to differ by.

    Args:
        plain: Without activation checkpointing.
        other: With it.
        least: Of that share. On a busy machine a step that computes more may take less.
    """
    pairs = [pair for pair in zip(plain.units, other.units, strict=True) if pair[1].checkpointing != "none"]
    more_s = sum(its.forward_s + its.backward_s - own.forward_s - own.backward_s for own, its in pairs)
    share = max(least, more_s / max(sum(own.forward_s for own, _ in pairs), 1e-12))

    def timed(own: UnitCosts, its: UnitCosts) -> UnitCosts:
        again_s = share * own.forward_s if its.checkpointing != "none" else 0.0
        return replace(its, forward_s=own.forward_s, backward_s=own.backward_s + again_s)

    return replace(other, units=tuple(map(timed, plain.units, other.units)))


def with_memory_of(chosen: ModelCosts, exact: ModelCosts) -> ModelCosts:
    """The chosen units, with the bytes of a step that was traced with just these kinds."""
    names = ("activation_bytes", "forward_transient_bytes", "backward_transient_bytes", "gradients_transient_bytes")
    pairs = zip(chosen.units, exact.units, strict=True)
    units = (replace(own, **{name: getattr(its, name) for name in names}) for own, its in pairs)
    return replace(chosen, units=tuple(units))
