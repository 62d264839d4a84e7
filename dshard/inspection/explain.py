"""How a model is sharded: its units, where their parameters lie, and what is chosen for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dshard.arguments import checked
from dshard.errors import StateError
from dshard.inspection.tables import html_table, text_table
from dshard.planner.texts import bytes_text
from dshard.runtime.module import FSDPModule
from dshard.runtime.runtime import context_of, runtime_of
from dshard.setup.planned import PlanReport
from dshard.tensor import ShardedTensor
from dshard.units.context import ModelContext
from dshard.units.unit import Unit

_COLUMNS = ("unit", "parameters", "strategy", "placement", "dtype", "elements", "full", "here", "now")
_TO_LEFT = (0, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class UnitRow:
    """A unit: parameters that are gathered, and whose gradients are reduced, together.

    Attributes:
        label: Its name, as in traces and errors.
        params: Names of its parameters.
        strategy: Of `Strategy`, as text; "keep 4" for what keeps as much as 4 ranks need for the next gather.
        placement: Dims that are cut, and over how many ranks; "whole" for what every rank has.
        dtype: In which shards are kept; behind an arrow what is gathered, and what gradients are reduced in.
        numel: Elements of the full parameters.
        full_bytes: Bytes of the full parameters, as they are kept.
        here_bytes: Bytes of this rank's shards; of tensor subclasses without `__tensor_flatten__`, as their dtype says.
        is_gathered: Whether full values are on this rank now.
        home: Device that keeps the shards, if that is not the one that computes; else "".
        changed: Names of settings that are not as they are by default.
    """

    label: str
    params: tuple[str, ...]
    strategy: str
    placement: str
    dtype: str
    numel: int
    full_bytes: int
    here_bytes: int
    is_gathered: bool
    home: str
    changed: tuple[str, ...]

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row in a table."""
        numbers = f"{self.numel:,}", bytes_text(self.full_bytes), bytes_text(self.here_bytes)
        now = "gathered" if self.is_gathered else "sharded"
        dtype = f"{self.dtype}, on {self.home}" if self.home else self.dtype
        return self.label, str(len(self.params)), self.strategy, self.placement, dtype, *numbers, now


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` gives: `str()` of it is a table, and so is what a notebook shows.

    Attributes:
        units: In the order of the model.
        plain: Names of parameters that are not sharded: ignored ones.
        plan: What the plan that the model follows says of its step, if it follows one; else "".
    """

    units: tuple[UnitRow, ...]
    plain: tuple[str, ...]
    plan: str

    def __str__(self) -> str:
        parts = [text_table(_COLUMNS, self._rows(), to_left=_TO_LEFT), *self._notes()]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{note}</p>" for note in self._notes())
        return html_table(_COLUMNS, self._rows(), to_left=_TO_LEFT) + notes

    def _rows(self) -> list[tuple[str, ...]]:
        full, here = sum(u.full_bytes for u in self.units), sum(u.here_bytes for u in self.units)
        numel, num_params = sum(u.numel for u in self.units), sum(len(u.params) for u in self.units)
        total = "total", str(num_params), "", "", "", f"{numel:,}", bytes_text(full), bytes_text(here), ""
        return [*(unit.cells for unit in self.units), total]

    def _notes(self) -> list[str]:
        notes = [f"{unit.label}: {', '.join(unit.changed)} set" for unit in self.units if unit.changed]
        if self.plain:
            more = f" and {len(self.plain) - 3} more" if len(self.plain) > 3 else ""
            notes.append(f"not sharded: {', '.join(self.plain[:3])}{more}")
        return [*notes, self.plan] if self.plan else notes


@checked
def explain(model: nn.Module) -> Explanation:
    """Say how a model is sharded: units, placements, strategies, dtypes, bytes, and the plan that it follows.

    Units that are formed at the first use are formed now.

    Args:
        model: That `fully_shard` was called on, or one that holds such models.

    Returns:
        An object with a row for each unit; `print` it, or let a notebook show it.

    Raises:
        StateError: Nothing of the model is sharded.

    Communicates:
        Nothing: bytes are this rank's.
    """
    contexts = contexts_of("explain", model)
    units = [unit for context in contexts for unit in context.units if unit.params]
    names = {id(p): name for name, p in model.named_parameters()}
    plain = [name for name, p in model.named_parameters() if not isinstance(p, ShardedTensor)]
    return Explanation(tuple(_row(unit, names) for unit in units), tuple(plain), _plan_of(model))


def contexts_of(who: str, model: nn.Module) -> list[ModelContext]:
    """What the sharded models below a module share each.

    Raises:
        StateError: There is none.
    """
    contexts = dict.fromkeys(context_of(m) for m in model.modules() if isinstance(m, FSDPModule))
    if not contexts:
        raise StateError(
            f"{who}: the model must be sharded, but no module of this {type(model).__name__} is. Call "
            "dshard.fully_shard on it first."
        )
    return list(contexts)


def _row(unit: Unit, names: dict[int, str]) -> UnitRow:
    params = unit.params
    return UnitRow(
        label=unit.label,
        params=tuple(names.get(id(p), p.name) for p in params),
        strategy=strategy_of(unit),
        placement=_placement(params),
        dtype=_dtypes(unit),
        numel=sum(p.shard_layout.numel for p in params),
        full_bytes=unit.param_bytes,
        here_bytes=sum(shard_bytes(p) for p in params),
        is_gathered=unit.is_gathered,
        home=next((str(p.storage_device) for p in params if p.offload is not None), ""),
        changed=tuple(name for name in unit.settings.but_lifetime.changed if name != "num_slices"),
    )


def strategy_of(unit: Unit) -> str:
    """The strategy of a unit, in the words of `Strategy`."""
    settings, group = unit.settings, unit.params[0].shard_group
    if settings.num_slices > 1:
        base = f"split({settings.num_slices})"
    elif settings.strategy is not None:
        base = settings.strategy
    elif unit.is_whole:
        base = "ddp"
    elif type(settings.reshard_after_forward) is int:
        base = f"keep {settings.reshard_after_forward}"
    else:
        base = "full" if unit.model.eviction.reshards(unit) else "keep"
    is_hybrid = group.replicas is not None and group.num_ranks > 1
    if not is_hybrid:
        return base
    return f"hybrid({group.num_ranks})" if base == "full" else f"hybrid({group.num_ranks}, {base})"


def _placement(params: Sequence[ShardedTensor]) -> str:
    """How most of the parameters lie."""
    dims = {p.shard_layout.dim for p in params}
    group = params[0].shard_group
    replicas = f" x {group.replicas.num_ranks} replicas" if group.replicas is not None else ""
    if dims == {None}:
        return f"whole{replicas}"
    texts = sorted("whole" if dim is None else str(Shard(dim)) for dim in dims)
    return f"{' and '.join(texts)} over {group.num_ranks}{replicas}"


def _dtypes(unit: Unit) -> str:
    kept = {p.storage_dtype for p in unit.params}
    gathered = {dtype for dtype in unit.copies.dtypes if dtype is not None} - kept
    reduced = {dtype for dtype in unit.reduce_dtypes if dtype is not None} - kept
    text = _names(kept)
    text += f" -> {_names(gathered)}" if gathered else ""
    return text + (f", reduced in {_names(reduced)}" if reduced else "")


def _names(dtypes: set[torch.dtype]) -> str:
    return "/".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def shard_bytes(param: ShardedTensor) -> int:
    """Bytes of this rank's shard, in flight or not; of a subclass with `__tensor_flatten__`, of what is in it."""
    shard = param.shard_storage.tensor
    if is_traceable_wrapper_subclass(shard):
        return sum(inner.nbytes for inner in inner_tensors(shard))
    return param.shard_layout.local_numel(param.shard_group.rank) * param.storage_dtype.itemsize


def inner_tensors(tensor: Any) -> list[Tensor]:
    """The plain tensors that one of a subclass is made of, or itself; a DTensor names its mesh among them."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor] if isinstance(tensor, Tensor) else []
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]


def _plan_of(model: nn.Module) -> str:
    """What a plan says of the step, if the model follows one."""
    for module in model.modules():
        report = runtime_of(module).plan_report if isinstance(module, FSDPModule) else None
        if isinstance(report, PlanReport):
            return f"planned: {report.plan}"
    return ""
