"""A plan as text: its units, itself beside every single strategy, and why nothing fits."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from dshard.errors import PlanError
from dshard.planner.costs import Cluster, ModelCosts, ParamCosts, UnitCosts, UnitKind
from dshard.planner.memory import PeakParts
from dshard.planner.options import sharing
from dshard.planner.search import Chain, smallest_peak
from dshard.planner.texts import aligned, bytes_text, number_text, seconds_text, wrapped
from dshard.planner.timeline import simulate
from dshard.policies import Strategy

Choice = tuple[ModelCosts, Sequence[Strategy]]
_MAX_RUNS = 40  # of units that are told one by one
_MAX_NAME = 48
_MUCH = 0.05  # of a peak, or of the elements of some units


def unit_table(units: Sequence[UnitCosts], strategies: Sequence[Strategy]) -> list[str]:
    """Each unit, or run of units that are alike, its strategy, bytes and seconds; the middle of many is left out."""
    head = ("unit", "parameters", "strategy", "activations", "forward", "backward")
    runs = list(_runs(units, strategies))
    rows = [_row_of_run(own, choice) for (_, choice), own in runs]
    if len(rows) > _MAX_RUNS:
        half = _MAX_RUNS // 2
        left = runs[half:-half]
        num = sum(len(own) for _, own in left)
        mix = Counter(choice for (_, choice), own in left for _ in own)
        rows[half:-half] = [(f"... {num} more units", "", _mix(mix), "", "", "")]
    return aligned([head, *rows], to_left=(0, 2))


def _row_of_run(units: list[UnitCosts], choice: str) -> tuple[str, ...]:
    unit = units[0]
    name = _short(unit.name)
    if len(units) > 1:
        name = f"{name} .. {_short(_beyond(unit.name, units[-1].name))} ({len(units)} alike)"
    times = (seconds_text(unit.forward_s), seconds_text(unit.backward_s))
    return name, bytes_text(unit.param_bytes), choice, bytes_text(unit.activation_bytes), *times


def _beyond(first: str, name: str) -> str:
    """A name without the words that both start with."""
    own, other = name.split("."), first.split(".")
    num = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), 0)
    return ".".join(own[num:])


def _runs(
    units: Sequence[UnitCosts], strategies: Sequence[Strategy]
) -> Iterator[tuple[tuple[Any, str], list[UnitCosts]]]:
    """Units in a row that differ in names and in a hundredth of their figures at most."""

    def alike(pair: tuple[UnitCosts, Strategy]) -> tuple[Any, str]:
        unit, strategy = pair
        figures = (unit.numel, unit.param_bytes, unit.activation_bytes, f"{unit.forward_s:.2g} {unit.backward_s:.2g}")
        return figures, named(strategy, unit.kind)

    for key, run in groupby(zip(units, strategies, strict=True), key=alike):
        yield key, [unit for unit, _ in run]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a choice is predicted to take."""

    step_s: float
    waits_s: float
    peak_bytes: int

    @classmethod
    def of(cls, choice: Choice, cluster: Cluster) -> "_Outcome":
        """The row of one choice."""
        found = simulate(*choice, cluster)
        return cls(found.step_s, max(0.0, found.exposed_s), found.peak_bytes)


def ranks_text(cluster: Cluster) -> str:
    """How many ranks on how many hosts, and over how many more layers are cut."""
    num_hosts, num_cut = -(-cluster.num_ranks // cluster.ranks_per_host), cluster.tensor_parallel
    cut = f" by {num_cut} over which layers are cut" if num_cut > 1 else ""
    return f"{cluster.num_ranks}{cut} on {num_hosts} host{'s' * (num_hosts > 1)}"


def choice_table(chosen: Choice, cluster: Cluster, others: Mapping[str, Choice], limit_bytes: int) -> list[str]:
    """A choice beside others, the fastest first: time, waiting, rate and peak, and whether it fits.

    Choices that take the same time and bytes share a row.

    Args:
        chosen: Costs of the units, and a strategy for each.
        cluster: Devices and links.
        others: The same for each other choice, by its name; one that is what was chosen gives it its name.
        limit_bytes: Of the peak; 0 where there is none.
    """
    own, model = _Outcome.of(chosen, cluster), chosen[0]
    found: dict[_Outcome, list[str]] = {own: []}
    for name, choice in others.items():
        is_own = choice == chosen
        names = found.setdefault(own if is_own else _Outcome.of(choice, cluster), [])
        names.insert(0 if is_own else len(names), f"{name} (this plan)" if is_own else name)
    if not any(name.endswith(" (this plan)") for name in found[own]):
        found[own].insert(0, "this plan")
    samples, of_sample = model.batch_size * cluster.num_ranks, model.tokens_per_sample
    rows = [("choice", "step", "vs plan", "waits", "tokens/s" if of_sample else "samples/s", "peak", "vs plan", "fits")]
    for outcome, names in sorted(found.items(), key=lambda item: item[0].step_s):
        slower = more = ""
        if outcome is not own:
            slower = f"{outcome.step_s / own.step_s - 1:+.1%}"
            difference = outcome.peak_bytes - own.peak_bytes
            more = f"{'+' if difference > 0 else ''}{bytes_text(difference)}"
        rows.append(
            (
                ", ".join(names),
                seconds_text(outcome.step_s),
                slower,
                f"{outcome.waits_s / outcome.step_s:.1%}",
                number_text(samples * (of_sample or 1) / outcome.step_s),
                bytes_text(outcome.peak_bytes),
                more,
                ("yes" if outcome.peak_bytes <= limit_bytes else "no") if limit_bytes else "-",
            )
        )
    return aligned(rows, to_left=(0,))


def peak_text(parts: PeakParts, units: Sequence[UnitCosts]) -> list[str]:
    """The moment of the peak, and what it holds."""
    entries = (f"{name} {bytes_text(num)}" for name, num in parts.by_category.items() if num)
    return wrapped(f"  in the {parts.phase} of {_short(units[parts.unit].name)}:", entries)


def home_text(units: Sequence[UnitCosts], num_bytes: int, cluster: Cluster) -> list[str]:
    """What is kept in the CPU's memory, and by which policy; nothing where nothing is."""
    num = sum(unit.is_offloaded for unit in units)
    if not num:
        return []
    on_host = min(cluster.num_ranks, cluster.ranks_per_host) * cluster.tensor_parallel
    return [
        f"  {num} of {len(units)} units in the CPU's memory: {bytes_text(num_bytes)} per rank, "
        f"{bytes_text(num_bytes * on_host)} per host, with offload_policy=CPUOffloadPolicy()"
    ]


def named(strategy: Strategy, kind: UnitKind | str) -> str:
    """A unit's strategy, its activation checkpointing if it has any, and that it is kept in the CPU's memory if it is.

    Args:
        strategy: Of the unit, or of all.
        kind: Of the unit, or what it is where units differ.
    """
    if isinstance(kind, str):
        return f"{strategy} + {kind}"
    checkpointing = "" if kind.checkpointing == "none" else f" + {kind.checkpointing} checkpointing"
    return f"{strategy}{checkpointing}{' + offload' if kind.is_offloaded else ''}"


def mix_text(model: ModelCosts, strategies: Sequence[Strategy]) -> str:
    """How many units have which strategy, and are of which kind."""
    pairs = zip(model.units, strategies, strict=True)
    return _mix(Counter(named(strategy, unit.kind) for unit, strategy in pairs))


def _mix(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{num} {name}" for name, num in sorted(counts.items(), key=lambda item: -item[1]))


def _short(name: str) -> str:
    """A name with its middle left out where it is long."""
    half = (_MAX_NAME - 3) // 2
    return name if len(name) <= _MAX_NAME else f"{name[:half]}...{name[-half:]}"


def does_not_fit(
    model: ModelCosts, chain: Chain, known: Sequence[Strategy], limit_bytes: int, num_ranks: int
) -> PlanError:
    """Say by how many bytes nothing fits, at which moment, and which units hold most then."""
    smallest = smallest_peak(chain, is_exact=True)
    row = int(chain.rows.values(smallest.chosen).argmax())
    phase, unit = chain.rows.name(row)
    terms = chain.rows.terms(row)[np.arange(chain.num_units), smallest.chosen]
    largest = np.argsort(-terms, kind="stable")[:3]
    kinds, places = np.divmod(chain.numbers[smallest.chosen], len(known))
    choices = [named(known[place], model.kinds[kind]) for kind, place in zip(kinds, places, strict=True)]
    held = ", ".join(f"{model.units[i].name} ({terms[i]} bytes, {choices[i]})" for i in largest)
    when = f"{phase} of {model.units[unit].name}"
    found = "there is" if smallest.is_exact else "that was found"
    others = [*_longer_dim([model.units[i] for i in largest], known, num_ranks), "a smaller batch", "more ranks"]
    others += [] if any(kind.checkpointing != "none" for kind in model.kinds) else ["activation checkpointing"]
    others += ["split(q)"] if all(each.num_slices == 1 for each in known) else []
    others += [] if any(kind.is_offloaded for kind in model.kinds) else ["offload"]
    return PlanError(
        f"plan: the peak must fit into {limit_bytes} bytes, but the smallest {found} takes "
        f"{smallest.peak_bytes} bytes, {smallest.peak_bytes - limit_bytes} too many, in the {when}; most of it is of "
        f"{held}. Use {', '.join(others)}, or units of fewer parameters."
    )


def _longer_dim(units: Sequence[UnitCosts], strategies: Sequence[Strategy], num_ranks: int) -> list[str]:
    """Advise to shard along a longer dim, where much of some units is cut along one of fewer elements than ranks."""
    within = max(sharing(strategy, num_ranks) for strategy in strategies)
    found = [param for unit in units for param in _of_few_rows(unit, within)]
    if sum(param.numel for param in found) <= _MUCH * sum(unit.numel for unit in units):
        return []
    param = max(found, key=lambda each: each.numel)
    return [
        f"a shard_placement_fn that returns Shard of a longer dim ({param.name} is cut along one of {param.length})"
    ]


def few_rows_text(units: Sequence[UnitCosts], strategies: Sequence[Strategy], num_ranks: int, peak: int) -> list[str]:
    """Say what parameters cost that are cut along a dim of fewer elements than ranks, and the way out.

    Some ranks then hold nothing of them, and others more than their part; nothing where that is little of the peak.
    """
    found, more = list[ParamCosts](), 0.0
    for unit, strategy in zip(units, strategies, strict=True):
        within = sharing(strategy, num_ranks)
        for param in () if unit.is_offloaded else _of_few_rows(unit, within):
            grad = param.stored_itemsize if param.grad_itemsize else 0
            each = param.stored_itemsize + grad + param.state_bytes_per_element
            more += (param.shard_numel(within) - param.numel / within) * each
            found.append(param)
    if not found or more < _MUCH * peak:
        return []
    param = max(found, key=lambda each: each.numel)
    others = f" (and {len(found) - 1} more along one of fewer elements than ranks)" if len(found) > 1 else ""
    return [
        f"  {param.name} is cut along a dim of {param.length}{others}: the largest shards are about",
        f"  {bytes_text(round(more))} larger than even ones; pass plan and fully_shard a shard_placement_fn that "
        "returns Shard of a longer one",
    ]


def _of_few_rows(unit: UnitCosts, within: int) -> list[ParamCosts]:
    return [param for param in unit.params if 1 < param.length < within]
