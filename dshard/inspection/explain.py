"""How a model is sharded, unit by unit, and the bytes of it that are in this rank's memory."""

import html
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import Shard
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from dshard import arguments
from dshard.errors import StateError
from dshard.planner.steps import pieces_of
from dshard.planner.texts import aligned, bytes_text
from dshard.runtime.module import FSDPModule
from dshard.runtime.runtime import context_of, runtime_of
from dshard.setup.planned import PlanReport
from dshard.tensor import ShardedTensor
from dshard.units.context import ModelContext
from dshard.units.unit import Unit

_COLUMNS = ("unit", "parameters", "strategy", "placement", "dtype", "elements", "full", "here", "now")
_TO_LEFT = (0, 2, 3, 4)
CATEGORIES = {
    "parameters": "shards of parameters, and parameters that are not sharded",
    "gradients": "that have arrived, in `.grad`",
    "states": "of the optimizers that were given",
    "buffers": "of the model",
    "gathered": "full values of parameters",
    "activations": "that autograd keeps for backward, seen by traces with `memory=True`",
    "on their way": "buffers that gathers and reductions have taken from the pool, without the above",
    "pool": "that the pool keeps for the next gathers and reductions",
    "other": "what else the device's allocator has given out: activations, most of all",
}


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, to_left: Collection[int]) -> str:
    """Lay out rows below their titles: columns of text to the left, numbers to the right."""
    return "\n".join(aligned([columns, *rows], to_left=tuple(to_left)))


class ShownInNotebooks:
    """An object whose text a notebook shows as it is printed."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@dataclass(frozen=True, slots=True)
class UnitRow:
    """A unit: parameters that are all-gathered together, and whose gradients are reduced together.

    Attributes:
        label: Its name, as in traces and errors.
        params: Names of its parameters.
        strategy: The text of its `Strategy`; "keep 4" if after forward 4 ranks share the parameters.
        placement: Dims that are sharded, and over how many ranks; "whole" if every rank has all of it.
        dtype: Of the shards; behind an arrow of the unsharded parameters, and of the reduction of gradients.
        numel: Elements of the full parameters.
        full_bytes: Bytes of the full parameters, as they are kept.
        here_bytes: Bytes of this rank's shards; of tensor subclasses without `__tensor_flatten__`, as their dtype says.
        is_gathered: Whether the unsharded parameters are on this rank now.
        home: Device that keeps the shards, if another one computes; else "".
        changed: Names of settings that differ from their defaults.
        stepped_at_once: Offloaded parameters whose last step was not deferred, each with why.
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
    stepped_at_once: tuple[tuple[str, str], ...] = ()

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row in a table."""
        numbers = f"{self.numel:,}", bytes_text(self.full_bytes), bytes_text(self.here_bytes)
        now = "gathered" if self.is_gathered else "sharded"
        dtype = f"{self.dtype}, on {self.home}" if self.home else self.dtype
        return self.label, str(len(self.params)), self.strategy, self.placement, dtype, *numbers, now


@dataclass(frozen=True, slots=True)
class Explanation(ShownInNotebooks):
    """The result of `explain`: `str()` of it is a table, and a notebook shows that.

    Attributes:
        units: The units in the order of the model.
        plain: Names of parameters that are not sharded: ignored ones.
        plan: Text of the plan that the model follows; "" for none.
    """

    units: tuple[UnitRow, ...]
    plain: tuple[str, ...]
    plan: str

    def __str__(self) -> str:
        return "\n".join([text_table(_COLUMNS, self._rows(), to_left=_TO_LEFT), *self._notes()])

    def _rows(self) -> list[tuple[str, ...]]:
        full, here = sum(u.full_bytes for u in self.units), sum(u.here_bytes for u in self.units)
        numel, num_params = sum(u.numel for u in self.units), sum(len(u.params) for u in self.units)
        total = "total", str(num_params), "", "", "", f"{numel:,}", bytes_text(full), bytes_text(here), ""
        return [*(unit.cells for unit in self.units), total]

    def _notes(self) -> list[str]:
        notes = [f"{unit.label}: {', '.join(unit.changed)} set" for unit in self.units if unit.changed]
        by_reason: dict[str, list[str]] = {}
        for name, why in (each for unit in self.units for each in unit.stepped_at_once):
            by_reason.setdefault(why, []).append(name)
        notes += [f"step not deferred: {_some_of(each)}: {why}" for why, each in by_reason.items()]
        if self.plain:
            notes.append(f"not sharded: {_some_of(self.plain)}")
        return [*notes, self.plan] if self.plan else notes


def explain(model: nn.Module) -> Explanation:
    """Say how a model is sharded: units, placements, strategies, dtypes, bytes, and the plan that it follows.

    Units that are formed at the first use are formed now.

    Args:
        model: A model that `fully_shard` was called on, or one that holds such models.

    Returns:
        An object with a row for each unit; `print` it, or let a notebook show it.

    Raises:
        StateError: Nothing of the model is sharded.

    Communicates:
        Nothing: bytes are this rank's.
    """
    contexts = contexts_of("explain", arguments.module("explain", "model", model))
    units = [unit for context in contexts for unit in context.units if unit.params]
    names = {id(p): name for name, p in model.named_parameters()}
    plain = [name for name, p in model.named_parameters() if not isinstance(p, ShardedTensor)]
    return Explanation(tuple(_row(unit, names) for unit in units), tuple(plain), _plan_of(model))


def contexts_of(who: str, model: nn.Module) -> list[ModelContext]:
    """Find the contexts of the sharded models in a module.

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
        stepped_at_once=tuple(
            (names.get(id(p), p.name), unit.stepped_at_once[p.name])
            for p in params
            if p.offload is not None and p.name in unit.stepped_at_once
        ),
    )


def _some_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def strategy_of(unit: Unit) -> str:
    """Name the strategy of a unit in the words of `Strategy`."""
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
    """Describe the placements of the parameters."""
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
    """Count the bytes of this rank's shard, also in flight; of a subclass with `__tensor_flatten__`, its parts."""
    shard = param.shard_storage.tensor
    if is_traceable_wrapper_subclass(shard):
        return sum(inner.nbytes for inner in pieces_of(shard))
    return param.shard_layout.local_numel(param.shard_group.rank) * param.storage_dtype.itemsize


def _plan_of(model: nn.Module) -> str:
    """Describe the plan that the model follows, if any."""
    for module in model.modules():
        report = runtime_of(module).plan_report if isinstance(module, FSDPModule) else None
        if isinstance(report, PlanReport):
            return f"planned: {report.plan}"
    return ""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The memory of this rank at one time.

    Attributes:
        at_s: Seconds since the trace began.
        num_bytes: Bytes by category, as in `report`; None where nobody knows.
    """

    at_s: float
    num_bytes: dict[str, int | None]

    @property
    def total_bytes(self) -> int:
        """Sum of all known categories."""
        return sum(num or 0 for num in self.num_bytes.values())


class _Saved:
    """A tensor that autograd keeps, counted as long as it does."""

    __slots__ = ("_activations", "_key", "tensor")

    def __init__(self, tensor: Tensor, activations: "Activations", key: int) -> None:
        self.tensor, self._activations, self._key = tensor, activations, key

    def __del__(self) -> None:
        self._activations.drop(self._key)


class Activations:
    """Counts the bytes that autograd keeps for backward, each memory once, with hooks around saved tensors.

    Hooks that a program opens inside (a checkpoint's, `save_on_cpu`) get their tensors first: what they keep in the
    place of a tensor counts as they keep it.

    Args:
        params: Parameters, whose memory does not count.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = {p.untyped_storage()._cdata for p in params if not isinstance(p, ShardedTensor)}
        self._alive: dict[int, list[int]] = {}  # by storage: how many refer to it, and its bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept now."""
        return sum(size for _, size in list(self._alive.values()))

    def hooks(self) -> AbstractContextManager[Any]:
        """Open a context that counts what autograd keeps."""
        return saved_tensors_hooks(self._pack, lambda kept: kept.tensor if isinstance(kept, _Saved) else kept)

    def _pack(self, tensor: Tensor) -> Any:
        if isinstance(tensor, ShardedTensor) or tensor.is_meta:
            return tensor
        try:
            storages = [each.untyped_storage() for each in pieces_of(tensor)]
        except (RuntimeError, NotImplementedError):  # sparse ones, and those of transforms, have none to be seen
            return tensor
        if not storages or storages[0]._cdata in self._params:
            return tensor
        key = storages[0]._cdata
        self._alive.setdefault(key, [0, sum(storage.nbytes() for storage in storages)])[0] += 1
        return _Saved(tensor, self, key)

    def drop(self, key: int) -> None:
        """Count one tensor of this memory less."""
        known = self._alive[key]
        known[0] -= 1
        if not known[0]:
            del self._alive[key]


def memory_now(
    model: nn.Module,
    contexts: Sequence[ModelContext],
    optimizers: Sequence[Optimizer] | None,
    activations: Activations | None,
) -> dict[str, int | None]:
    """Count the bytes of a model on this rank by category.

    Args:
        model: A sharded model.
        contexts: Its contexts.
        optimizers: Their states count; None if nobody named them.
        activations: What counts the activations, if anything does.

    Returns:
        Bytes by `CATEGORIES`; None for what nobody knows.

    Communicates:
        Nothing.
    """
    copies = [c for context in contexts for unit in context.units for c in {unit.copies, unit.exact}]
    buffers = {id(buffer): buffer for each in copies for buffer in each.memories}
    once = [c.host_values for c in copies if c.host_values is not None]
    pools = {id(context.pool): context.pool for context in contexts}.values()
    in_use = sum(buffer.memory.numel() for buffer in buffers.values() if buffer.is_in_use)
    states = [v for each in optimizers or () for state in each.state.values() for v in tree_iter(state)]
    num_bytes: dict[str, int | None] = {
        "parameters": bytes_of(model.parameters()),
        "gradients": bytes_of((p.grad for p in model.parameters()), in_flight=False),
        "states": None if optimizers is None else bytes_of(states),
        "buffers": bytes_of(model.buffers()),
        "gathered": sum(b.memory.numel() for b in buffers.values()) + sum(host.bytes_beside for host in once),
        "activations": None if activations is None else activations.num_bytes,
        "on their way": sum(pool.out_bytes for pool in pools) - in_use,
        "pool": sum(pool.kept_bytes for pool in pools),
        "other": None,
    }
    devices = (unit.device for context in contexts for unit in context.units if unit.device is not None)
    if (device := next(devices, None)) is not None and device.type == "cuda":
        num_bytes["other"] = torch.cuda.memory_allocated(device) - sum(num or 0 for num in num_bytes.values())
    return num_bytes


def bytes_of(values: Iterable[Any], *, in_flight: bool = True) -> int:
    """Count the bytes of tensors on this rank, each memory once; shards in flight by their layouts, or not at all."""
    seen: dict[int, int] = {}
    coming = 0
    for value in values:
        tensor = value.shard_storage.tensor if isinstance(value, ShardedTensor) else value
        if tensor is None and isinstance(value, ShardedTensor):
            coming += shard_bytes(value) if in_flight else 0
        elif isinstance(tensor, Tensor) and not tensor.is_meta:
            seen |= {each.data_ptr(): each.nbytes for each in pieces_of(tensor) if each.numel()}
    return coming + sum(seen.values())
