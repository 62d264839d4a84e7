"""Options of `fully_shard` that are more than a flag."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from dshard import arguments
from dshard.errors import PlacementError, StateError

_BASES = ("ddp", "zero1", "zero2", "keep", "full")
STRATEGY_ALLOWED = f"one of {', '.join(_BASES)}, hybrid(k) or split(q)"
_CALL = re.compile(r"(hybrid|split)\(\s*([0-9]{1,9})\s*(?:,\s*(.+?)\s*)?\)", re.DOTALL)
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?\d+)?)\s*(?:([kmgtp])(i?))?b?\s*", re.IGNORECASE)
_PREFIXES = "kmgtp"
_ELSEWHERE = {  # what others call them: ZeRO's stages, FSDP's ShardingStrategy
    "zero3": "'full'",
    "zero-3": "'full'",
    "fsdp": "'full'",
    "full_shard": "'full'",
    "shard_grad_op": "'keep'",
    "no_shard": "'ddp'",
    "hsdp": "'hybrid(8)', for 8 ranks that share a parameter",
    "hybrid_shard": "'hybrid(8)', for 8 ranks that share a parameter",
    "hybrid": "'hybrid(8)', for 8 ranks that share a parameter",
}


class _UnknownStrategyError(Exception):
    """A value is no strategy, nor its text; with what to pass instead."""


def _parsed(value: Any) -> "Strategy":
    """Read a strategy from its text, or take it as it is.

    Raises:
        _UnknownStrategyError: It is neither.
    """
    if isinstance(value, Strategy):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if text in _BASES:
        return Strategy(text)
    call = _CALL.fullmatch(text)
    if call is None:
        near = arguments.nearest(value, _BASES)
        raise _UnknownStrategyError(f"Pass {_ELSEWHERE.get(text.lower()) or repr(near)}.")
    name, number, rest = call.groups()
    base = _parsed(rest or "full")
    is_nested = base.within is not None if name == "hybrid" else base.num_slices > 1
    if is_nested or int(number) < 1:
        raise _UnknownStrategyError("Pass 'full'.")
    return replace(base, within=int(number)) if name == "hybrid" else replace(base, num_slices=int(number))


def read_strategy(
    who: str, name: str, value: Any, allowed: str = STRATEGY_ALLOWED, *, inside: str = "it"
) -> "Strategy":
    """Check an argument, or a value in it, that is a strategy or its text.

    Raises:
        ArgumentError: It is neither.
    """
    try:
        return _parsed(value)
    except _UnknownStrategyError as error:
        raise arguments.wrong(who, name, value, allowed, str(error), inside=inside) from None


def read_strategies(who: str, name: str, value: Any, *, or_none: bool = False) -> Any:
    """Check an argument that is a strategy, its text, or a dict of those by patterns of parameter names.

    Raises:
        ArgumentError: It is none of these.
    """
    allowed = f"{STRATEGY_ALLOWED}, a Strategy, or a dict of those by patterns of parameter names"
    if or_none:
        allowed += ", or None"
    if or_none and value is None:
        return None
    if arguments.is_of(value, "Plan"):
        raise arguments.wrong(who, name, value, allowed, "Pass plan= instead.")
    if not isinstance(value, Mapping) or not value:
        return read_strategy(who, name, value, allowed)
    for key in value:
        arguments.expect(isinstance(key, str), who, name, key, allowed, "Pass 'full'.", inside="a key of it")
    return {key: read_strategy(who, name, each, allowed, inside=f"for {key!r} it") for key, each in value.items()}


def read_per_unit(who: str, name: str, value: Any) -> "tuple[Strategy, ...]":
    """Check an argument that is a list of strategies or their texts, one per unit.

    Raises:
        ArgumentError: It is none.
    """
    allowed = "a list of strategies, one per unit"
    found = arguments.several(who, name, value, lambda each: True, allowed, "Pass one per unit.")
    return _read_each(who, name, found, allowed)


def read_candidates(who: str, name: str, value: Any, *, or_none: bool = False) -> Any:
    """Check an argument that is a strategy or its text, or a list of at least one, to choose from; return a tuple.

    Raises:
        ArgumentError: It is none of these.
    """
    allowed = f"strategies to choose from: {STRATEGY_ALLOWED}, or a list of at least one of them"
    if or_none and value is None:
        return None
    allowed += ", or None" if or_none else ""
    if arguments.items(value) is None:
        return (read_strategy(who, name, value, allowed),)
    found = arguments.several(who, name, value, lambda each: True, allowed, "Pass ('ddp', 'full').", least=1)
    return _read_each(who, name, found, allowed)


def _read_each(who: str, name: str, found: Sequence[Any], allowed: str) -> "tuple[Strategy, ...]":
    return tuple(read_strategy(who, name, each, allowed, inside=f"number {i} of it") for i, each in enumerate(found))


@dataclass(frozen=True, slots=True)
class Strategy:
    """Where parameters, gradients and optimizer states of a unit are whole, and where they are shards.

    ======= =========================== ====================================== ================
    name    parameters                  gradients                              optimizer states
    ======= =========================== ====================================== ================
    `ddp`   whole                       all-reduced, whole                     whole
    `zero1` whole                       whole until reduced, once per step     shards
    `zero2` whole                       shards after each backward             shards
    `keep`  whole from forward to       shards                                 shards
            backward
    `full`  shards but where used       shards                                 shards
    ======= =========================== ====================================== ================

    As text it is one of these; `hybrid(k)`, or `hybrid(k, keep)`, for shards over `k` neighbouring ranks, replicated
    over the others; or `split(q)`, or `split(q, hybrid(k))`, for a weight that is gathered and used in `q` slices.

    Args:
        base: One of the five.
        within: Number of neighbouring ranks that share a parameter; None for all of the mesh.
        num_slices: In how many slices a weight is gathered and used.

    Raises:
        ArgumentError: One of them is none that is allowed.
        StateError: They do not go together.

    Source: Rajbhandari et al., ZeRO, 2020; PyTorch FSDP's `ShardingStrategy`; OSDP's operator splitting.
    """

    base: str
    within: int | None = None
    num_slices: int = 1

    def __post_init__(self) -> None:
        arguments.choice("Strategy", "base", self.base, *_BASES)
        within = arguments.count("Strategy", "within", self.within, or_none=True)
        object.__setattr__(self, "within", within)
        object.__setattr__(self, "num_slices", arguments.count("Strategy", "num_slices", self.num_slices))
        if self.base == "ddp" and self.within not in (None, 1):
            raise StateError(
                f"strategy: ddp keeps everything whole on every rank, but it is to be shared within {self.within} "
                f"ranks. Pass 'ddp', or 'hybrid({self.within})'."
            )
        if self.num_slices > 1 and self.base != "full":
            raise StateError(
                f"strategy: slices are gathered at each use, as under full, but {self.num_slices} are asked for under "
                f"{self.base}. Pass 'split({self.num_slices})'."
            )

    @classmethod
    def of(cls, value: "Strategy | str") -> "Strategy":
        """A strategy from its text, or as it is.

        Raises:
            ArgumentError: It is neither.
        """
        return read_strategy("Strategy.of", "value", value)

    def on(self, num_ranks: int) -> "Strategy":
        """This strategy on a mesh of as many ranks, where two names may mean one thing.

        Raises:
            PlacementError: The ranks that share a parameter do not divide those of the mesh. On every rank alike.
        """
        num_ranks = arguments.count("Strategy.on", "num_ranks", num_ranks)
        within = num_ranks if self.within is None else self.within
        if num_ranks % within:
            raise PlacementError(
                f"strategy: the ranks that share a parameter must divide those of the mesh ({num_ranks}), but they are "
                f"{within}. Pass hybrid({next(k for k in range(within, 0, -1) if num_ranks % k == 0)})."
            )
        if self.base == "ddp" or (within == 1 and self.num_slices == 1):
            return Strategy("ddp")
        return replace(self, within=None if within == num_ranks else within)

    def __str__(self) -> str:
        text = self.base
        if self.within is not None:
            text = f"hybrid({self.within})" if text == "full" else f"hybrid({self.within}, {text})"
        if self.num_slices > 1:
            text = f"split({self.num_slices})" if text == "full" else f"split({self.num_slices}, {text})"
        return text


@dataclass(frozen=True, slots=True)
class StrategyRules:
    """Which strategy holds for which parameters: the first pattern that a name matches decides.

    Args:
        rules: In the order in which they are tried.
        named: Strategies of parameters by their full names, which are tried first.
    """

    rules: tuple[tuple[str, Strategy], ...] = ()
    named: Mapping[str, Strategy] = field(default_factory=dict)

    @classmethod
    def of(cls, strategy: Any) -> "StrategyRules":
        """The rules of `strategy=`: a strategy, or a dict of those by patterns of names; None for no rules.

        Raises:
            ArgumentError: It is none of these. On every rank alike.
        """
        if strategy is None:
            return cls()
        if not isinstance(strategy, Mapping):
            return cls((("*", Strategy.of(strategy)),))
        return cls(tuple((pattern, Strategy.of(value)) for pattern, value in strategy.items()))

    def strategy_of(self, name: str) -> Strategy | None:
        """The strategy of a parameter of this name; None where nothing was said."""
        if name in self.named:
            return self.named[name]
        return next((strategy for pattern, strategy in self.rules if fnmatchcase(name, pattern)), None)

    def over(self, older: "StrategyRules") -> "StrategyRules":
        """These, and where none of them matches, the older ones."""
        known = dict(self.rules)
        return StrategyRules((*self.rules, *(rule for rule in older.rules if rule[0] not in known)))

    def check_names(self, who: str, names: Iterable[str]) -> None:
        """Raise if a name that is no pattern, or all of the patterns, are those of no parameter.

        Where there are no parameters, as in a root whose blocks were sharded before, patterns may match none.

        Raises:
            StateError: As said. On every rank alike.
        """
        _check_patterns(who, "strategy", [pattern for pattern, _ in self.rules], names)


def _check_patterns(who: str, argument: str, patterns: Sequence[str], names: Iterable[str]) -> None:
    """Raise if a name that is no pattern, or all of the patterns, are those of no parameter."""
    known = list(names)
    unmet = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in known)]
    are_all_unmet = bool(known) and len(unmet) == len(patterns)
    wrong = [pattern for pattern in unmet if not set(pattern) & set("*?[")] or (unmet if are_all_unmet else [])
    if wrong:
        some = f"{', '.join(known[:3])}{', ...' if len(known) > 3 else ''}" if known else "none"
        raise StateError(
            f"{who}: a pattern of {argument} must match the name of a parameter, but {wrong[0]!r} matches none of "
            f"{some}. Names are those that named_parameters() of this module gives."
        )


@dataclass(frozen=True, slots=True)
class Offload:
    """Where a parameter is kept, and where it is used; the rest is the same for any two devices.

    Args:
        home: Of its shard, its gradient's and its optimizer state's.
        compute: Of its full value in a forward and backward; collectives run there.
        pins: Whether memory at home is pinned, so that copies run beside what the device computes.
        defers_step: Whether an optimizer may step it beside the next forward, if its home is the CPU.
    """

    home: torch.device
    compute: torch.device
    pins: bool = False
    defers_step: bool = True

    def __post_init__(self) -> None:
        if self.pins and self.home.type != "cpu":
            raise StateError(
                f"fully_shard: only memory of the CPU can be pinned, but pins is set for {self.home}. Leave it out."
            )


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of one parameter on its way, None for its own, and the devices.

    Args:
        compute: Of its full value in a forward and in the backward of one.
        reduce: In which its gradients are added up over the ranks.
        output: Of what modules give whose parameters follow the same rule.
        casts_inputs: Whether such modules convert what they take.
        policy: What a tensor subclass is told that says itself how it is gathered; None for all other parameters.
        offload: Where it is kept and used, if those are two places.
        asked: What a policy asks for: the dtypes of `compute` and of `reduce`, also where they are its own.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    casts_inputs: bool = True
    policy: MixedPrecisionPolicy | None = None
    offload: Offload | None = None
    asked: tuple[torch.dtype | None, torch.dtype | None] = (None, None)

    def for_dtype(self, dtype: torch.dtype) -> "Precision":
        """This precision, for a parameter that is kept in a dtype."""
        compute, reduce = ((asked if asked != dtype else None) for asked in self.asked)
        if self.policy is not None:  # whose compute dtype is always named
            compute = self.asked[0] or dtype
        return replace(self, compute=compute, reduce=reduce)


@dataclass(frozen=True, slots=True)
class PrecisionRules:
    """Which dtypes hold for which parameters: the first pattern that a name matches decides.

    Args:
        rules: In the order in which they are tried.
        offload: Where parameters are kept and used, if those are two places.
        away: Names of the parameters of which that is so; None for all.
    """

    rules: tuple[tuple[str, MixedPrecisionPolicy], ...] = ()
    offload: Offload | None = None
    away: frozenset[str] | None = None

    @classmethod
    def of(cls, mp_policy: Any, offload: Offload | None = None) -> "PrecisionRules":
        """The rules of `mp_policy=`: a policy, a dtype, or one of each for patterns of names."""
        if mp_policy is None:
            return cls(offload=offload)
        policies = mp_policy if isinstance(mp_policy, Mapping) else {"*": mp_policy}
        return cls(tuple((pattern, _as_policy(each)) for pattern, each in policies.items()), offload)

    def precision_of(self, name: str, dtype: torch.dtype) -> Precision | None:
        """The way of a parameter of this name and dtype; None where it is an ordinary one."""
        policy, offload = self._policy_for(name), self.offload if self.away is None or name in self.away else None
        if policy is None or not dtype.is_floating_point:
            return Precision(offload=offload) if offload is not None else None
        return Precision(
            output=policy.output_dtype,
            casts_inputs=policy.cast_forward_inputs,
            offload=offload,
            asked=(policy.param_dtype, policy.reduce_dtype or policy.param_dtype),
        ).for_dtype(dtype)

    def precision_of_subclass(self, name: str, dtype: torch.dtype) -> Precision:
        """The precision of a tensor subclass that says itself how it is gathered; its compute dtype is always named."""
        policy, found = self._policy_for(name), self.precision_of(name, dtype) or Precision()
        return replace(found, policy=policy or MixedPrecisionPolicy()).for_dtype(dtype)

    def names(self, name: str) -> bool:
        """Whether a rule names this parameter by its whole name, rather than by a pattern."""
        return any(pattern == name for pattern, _ in self.rules)

    def check_names(self, who: str, names: Iterable[str]) -> None:
        """Raise if a rule's pattern, other than "*", matches the name of no parameter.

        Where there are no parameters, as in a root whose blocks were sharded before, patterns may match none.

        Raises:
            StateError: Names the pattern and some parameters. On every rank alike.
        """
        _check_patterns(who, "mp_policy", [pattern for pattern, _ in self.rules], names)

    def _policy_for(self, name: str) -> MixedPrecisionPolicy | None:
        return next((policy for pattern, policy in self.rules if fnmatchcase(name, pattern)), None)

    @property
    def of_the_rest(self) -> MixedPrecisionPolicy | None:
        """The policy of what no other pattern names, if there is one."""
        return dict(self.rules).get("*")


def _as_policy(policy: Any) -> MixedPrecisionPolicy:
    """A policy of torch's FSDP2, from any object with its fields, or from a dtype to compute in."""
    if policy is None or isinstance(policy, torch.dtype):
        return MixedPrecisionPolicy(policy)
    casts = getattr(policy, "cast_forward_inputs", True)
    return MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, policy.output_dtype, casts)


def read_reshard(who: str, value: Any, *, or_none: bool = False) -> Any:
    """Check the argument `reshard_after_forward`: a bool, or a number of ranks.

    Raises:
        ArgumentError: It is neither.
    """
    allowed = "a bool, or a number that divides that of the ranks that share a parameter"
    found = arguments.plain_scalar(value)
    is_count = isinstance(found, Integral) and 1 <= int(found) < 2**63
    arguments.expect(
        isinstance(found, bool) or is_count,
        *(who, "reshard_after_forward", value, allowed, "Pass True or False."),
        or_none=or_none,
    )
    return int(found) if is_count and not isinstance(found, bool) else found


def reshard_choice(who: str, value: bool | int | None, num_ranks: int) -> bool | int | None:
    """`reshard_after_forward` as None, a bool, or a number of ranks between 1 and that of the shards.

    Raises:
        PlacementError: It does not divide the number of ranks. On every rank alike.
    """
    if value is None or isinstance(value, bool):
        return value
    if num_ranks % value:
        raise PlacementError(
            f"{who}: reshard_after_forward must be a bool, None, or a number that divides that of the ranks that "
            f"share a parameter ({num_ranks}), but it is {value!r}. Pass True."
        )
    return value if 1 < value < num_ranks else value != 1


def read_bytes(value: Any) -> int | None:
    """A number of bytes, as it is or as text with a unit: "38GiB", "40e9", "1.5 GB"; None for what is none."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value) if 0 <= int(value) < 2**63 else None
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    scale = 2**10 if found[3] else 10**3
    number = float(found[1]) * scale ** (_PREFIXES.index(found[2].lower()) + 1 if found[2] else 0)
    return int(number) if number < 2**63 else None
