"""Copies of full values that are yielded to a user, and what is written to them taken over."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dshard import collectives
from dshard.agreement.weights import checksum
from dshard.autograd.modes import outside_autograd
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import DivergenceError, DShardError, StateError
from dshard.tensor import ShardedTensor
from dshard.tensor.shard_storage import ShardStorage
from dshard.tensor.tp_layout import groups_of, joined_group, tp_layout_of
from dshard.units.unit import Unit

_UNTOUCHED, _WRITTEN, _WRITTEN_TWICE, _REPLACED = range(4)


@dataclass(frozen=True, slots=True)
class _Draft:
    """One value that is yielded, as it was when it was taken.

    Args:
        param: The parameter.
        name: For messages.
        storage: The memory of what would take over a write; None for a gradient that is not there.
        version: Of that.
        copy: What the user writes to; None where this rank yields none.
        owner: The value whose `.grad` the copy is, for a gradient.
        content: Checksum of the copy.
        is_grad: Whether the value is the parameter's gradient, rather than its own.
    """

    param: ShardedTensor
    name: str
    storage: ShardStorage | None
    version: int
    copy: Tensor | None
    owner: Tensor | None
    content: int
    is_grad: bool

    @classmethod
    def of_value(cls, param: ShardedTensor, name: str, copy: Tensor | None) -> "_Draft":
        """The draft of a parameter's value."""
        storage = param.shard_storage
        return cls(param, name, storage, storage.version, copy, None, _content(copy), is_grad=False)

    @classmethod
    def of_gradient(cls, param: ShardedTensor, name: str, owner: Tensor | None) -> "_Draft":
        """The draft of a parameter's gradient."""
        copy, storage = None if owner is None else owner.grad, None
        if isinstance(param.grad, ShardedTensor):
            storage = param.grad.shard_storage
        version = 0 if storage is None else storage.version
        return cls(param, f"{name}.grad", storage, version, copy, owner, _content(copy), is_grad=True)

    @property
    def param_name(self) -> str:
        """Name of the parameter, also for a gradient."""
        return self.name.removesuffix(".grad") if self.is_grad else self.name

    @property
    def target(self) -> ShardedTensor | None:
        """What takes over a write; a gradient may have become another tensor since."""
        target: Any = self.param.grad if self.is_grad else self.param
        return target if isinstance(target, ShardedTensor) else None

    def state(self) -> tuple[int, int]:
        """What happened to it, and the checksum of the copy as it is now."""
        if self.owner is not None and self.owner.grad is not self.copy:
            return _REPLACED, 0
        content = _content(self.copy)
        if content == self.content:
            return _UNTOUCHED, content
        target = self.target
        has_moved = (
            target is None or target.shard_storage is not self.storage or target.shard_storage.version != self.version
        )
        return _WRITTEN_TWICE if has_moved else _WRITTEN, content


def _content(copy: Tensor | None) -> int:
    return 0 if copy is None else int(checksum(copy))


class Drafts:
    """Copies of full values of some parameters, on all ranks or on the first.

    Args:
        params: By name; the same on every rank.
        keeps: Whether to take over what is written to the copies.
        rank0_only: Whether only the first rank of each parameter's mesh holds copies.
        on_cpu: Whether copies lie in the CPU's memory.
        with_grads: Whether copies have gradients.
    """

    def __init__(
        self, params: Mapping[str, ShardedTensor], *, keeps: bool, rank0_only: bool, on_cpu: bool, with_grads: bool
    ) -> None:
        self._params = params
        self._keeps, self._rank0_only = keeps, rank0_only
        self._on_cpu, self._with_grads = on_cpu, with_grads
        self._groups = {name: joined_group(p) for name, p in params.items()}
        inner = {g.full_name: g for p in params.values() for g in groups_of(p)[1:]}
        for name, param in params.items():  # which are equal over the meshes of DTensors, too
            for group in inner.values() if tp_layout_of(param.shard_layout) is None else ():
                device = torch.device(group.device_type)
                self._groups[name] = ShardGroup(group.process_group, device, self._groups[name])

    @contextmanager
    def open(self) -> Iterator[dict[str, Tensor]]:
        """Take the copies, and at the end take over what was written."""
        with outside_autograd():
            fulls = self._copies()
            drafts = self._drafts(fulls) if self._keeps else []
        versions = {name: (t, t._version) for name, t in _with_gradients(fulls).items()}
        try:
            yield fulls
        except Exception as error:
            if self._keeps and not isinstance(error, DivergenceError):
                with suppress(DShardError), outside_autograd():  # the error that is on its way says more
                    self._agree(drafts, has_failed=True)
            raise
        if not self._keeps:
            refuse_writes(versions)
            return
        with outside_autograd():
            self._take_over(self._agree(drafts, has_failed=False))

    def _copies(self) -> dict[str, Tensor]:
        """Full values that this rank yields, and their gradients; one unit is gathered at a time."""
        fulls: dict[str, Tensor] = {}
        by_unit: dict[Any, list[str]] = {}
        for name, param in self._params.items():
            by_unit.setdefault(param.gather_source, []).append(name)
        for unit, names in by_unit.items():
            if not isinstance(unit, Unit):
                fulls.update(self._copied({name: self._params[name].materialize() for name in names}))
                continue
            was_gathered = unit.is_gathered
            unit.num_pins += 1
            try:
                fulls.update(self._copied({name: self._params[name].materialize() for name in names}))
            finally:
                unit.num_pins -= 1
                if not was_gathered:
                    unit.free()
        for name, param in self._params.items() if self._with_grads else ():
            grad = full_gradient(param)
            if grad is not None and name in fulls:
                fulls[name].grad = grad.to(fulls[name].device)
        return {name: fulls[name] for name in self._params if name in fulls}

    def _copied(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of those values that this rank yields."""
        mine = {name: full for name, full in values.items() if self._yields(self._groups[name])}
        return {name: full.to("cpu", copy=True) if self._on_cpu else full.clone() for name, full in mine.items()}

    def _yields(self, group: ShardGroup) -> bool:
        return group.world_rank == 0 or not self._rank0_only

    def _drafts(self, fulls: Mapping[str, Tensor]) -> list[_Draft]:
        """What was taken: of each parameter its value, then its gradient; as many on every rank."""
        drafts = []
        for name, param in self._params.items():
            drafts.append(_Draft.of_value(param, name, fulls.get(name)))
            if self._with_grads:
                drafts.append(_Draft.of_gradient(param, name, fulls.get(name)))
        return drafts

    def _agree(self, drafts: list[_Draft], *, has_failed: bool) -> list[_Draft]:
        """Which drafts were written to, the same on all ranks.

        Raises:
            StateError: Another rank failed, or a write would be lost. On every rank alike.
            DivergenceError: The ranks wrote different values. On every rank alike.

        Communicates:
            An all-reduce of 24 bytes per draft.
        """
        written = []
        for full_name, group in {group.full_name: group for group in self._groups.values()}.items():
            mine = [d for d in drafts if self._groups[d.param_name].full_name == full_name]
            states = [(_UNTOUCHED, 0) if has_failed else d.state() for d in mine]
            table = [(int(has_failed), 0, 0), *((kind, content, ~content) for kind, content in states)]
            sent = torch.tensor(table, dtype=torch.int64, device=group.device_type)
            handle = collectives.all_reduce([sent], group, ReduceOp.MAX, label="end of gathered()", everywhere=True)
            agreed = handle.wait()[0]
            (failed, _, _), *rows = agreed.tolist()
            if failed:
                raise StateError(
                    "gathered: all ranks must leave a scope with writeback=True alike, but one of them raised in it. "
                    "Nothing was written back; look for the exception of that rank."
                )
            _refuse_lost([(d.name, kind) for d, (kind, _, _) in zip(mine, rows, strict=True)])
            if not self._rank0_only:
                _refuse_differing([d.name for d, (_, high, low) in zip(mine, rows, strict=True) if high != ~low])
            written += [d for d, (kind, _, _) in zip(mine, rows, strict=True) if kind == _WRITTEN]
        return written

    def _take_over(self, written: list[_Draft]) -> None:
        """Write to the sharded tensors what was written to their drafts.

        Communicates:
            Nothing; with `rank0_only` a broadcast of each value.
        """
        for draft in written:
            full, target = draft.copy, draft.target
            assert target is not None
            if self._rank0_only and target.numel():
                group = self._groups[draft.param_name]
                device = group.device_type
                wire = torch.empty(target.shape, dtype=target.dtype, device=device) if full is None else full
                handle = collectives.broadcast([wire.to(device)], group, label=draft.name, everywhere=True)
                full = handle.wait()[0]
            assert full is not None
            target.copy_(full)


def _refuse_lost(kinds: list[tuple[str, int]]) -> None:
    for name, kind in kinds:
        if kind == _WRITTEN_TWICE:
            raise StateError(
                f"{name}: within one scope either the tensor or what gathered() yields may be written to, but both "
                "were; one of the two would be lost. Nothing was written back; write to one of them."
            )
        if kind == _REPLACED:
            raise StateError(
                f"{name}: the gradient that gathered() yields must stay the same tensor, but another one was put in "
                "its place, and would be lost. Nothing was written back; write to it with copy_(), or set the "
                "parameter's own .grad."
            )


def _refuse_differing(names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise DivergenceError(
            "gathered: all ranks must write the same values with writeback=True, but these differ between ranks: "
            f"{', '.join(names[:5])}{more}. Nothing was written back; pass rank0_only=True to take those of rank 0."
        )


def _with_gradients(fulls: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values and their gradients, by name."""
    return {**fulls, **{f"{name}.grad": full.grad for name, full in fulls.items() if full.grad is not None}}


def full_gradient(param: ShardedTensor) -> Tensor | None:
    """The full, reduced gradient of a parameter, for the caller to keep.

    Communicates:
        An all-gather of the gradient, if there is one; and its reduction, if that has not begun.
    """
    grad: Any = param.grad
    if grad is None:
        return None
    full: Tensor = grad.full_tensor() if isinstance(grad, ShardedTensor) else grad.clone()
    return full


def refuse_writes(yielded: Mapping[str, tuple[Tensor, int]]) -> None:
    """Raise if one of some values has another version than the one that is given: a write to it is lost."""
    for name, (value, version) in yielded.items():
        if value._version != version:
            raise StateError(
                f"{name}: what gathered() yields must not be written to, but it was; that write is lost. Write to the "
                "parameter itself, as in module.weight.zero_(), or pass writeback=True."
            )
