"""`gathered` and `iter_full`: full values for a while, and what was written to them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dshard import arguments, collectives
from dshard.agreement import check_same, checksum
from dshard.autograd import outside_autograd
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import DivergenceError, DShardError, StateError
from dshard.runtime.module import FSDPModule
from dshard.runtime.runtime import own_units
from dshard.runtime.unsharded import Unsharded
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import groups_of, joined_group, tp_layout_of, whole
from dshard.tensor.storage import ShardStorage
from dshard.units.unit import Unit

_SLACK_BYTES = 1 << 12  # of memory beyond a full value that is not worth a copy


def full_values(tensors: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The full value of each tensor, plain and the caller's own.

    Tensors are gathered by themselves, not their units: no unit changes its state, and nothing is alive but the value
    that is given and, while that is made, what the caller still holds of the one before.

    Args:
        tensors: By name, the same on every rank.

    Raises:
        DivergenceError: The ranks are at different tensors. On every rank alike.

    Communicates:
        An all-gather for each tensor that is cut.
    """
    for name, tensor in tensors:
        with outside_autograd():
            full = _own_full_value(tensor)
        yield name, full
        del full


def _own_full_value(tensor: Tensor) -> Tensor:
    """The full value in memory of its own, no larger than it needs."""
    if not isinstance(tensor, ShardedTensor):
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    if tensor.is_view or tensor.pinned_copy() is not None:
        return tensor.materialize().clone()
    full = whole(tensor.gathered_alone()).detach()
    is_own = tensor.shard_layout.dim is not None and tensor.shard_group.num_ranks > 1 and tensor.origin is None
    is_tight = full.untyped_storage().nbytes() <= full.nbytes + _SLACK_BYTES
    return full if is_own and is_tight else full.clone()


def refuse_meta(who: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Raise if some tensors have no values."""
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    if on_meta:
        raise StateError(
            f"{who}: needs values, but {on_meta[0]} and {len(on_meta) - 1} more are on the meta device. Initialize or "
            "load them first."
        )


_UNTOUCHED, _WRITTEN, _WRITTEN_TWICE, _REPLACED = range(4)


class _Draft:
    """One value that is yielded, as it was when it was taken.

    Args:
        param: The parameter.
        name: Of the parameter.
        full: Its full value that this rank yields; None where it yields none.
        is_grad: Whether this is the draft of the gradient, which is the full value's `.grad`.
    """

    def __init__(self, param: ShardedTensor, name: str, full: Tensor | None, *, is_grad: bool = False) -> None:
        self.param_name, self.name = name, f"{name}.grad" if is_grad else name
        self._param, self._full, self._is_grad = param, full, is_grad
        self.copy = self._yielded()
        self._checksum, self._place = _content(self.copy), self._place_now()

    @property
    def target(self) -> ShardedTensor | None:
        """What takes over a write; a gradient may have become another tensor since."""
        target: Any = self._param.grad if self._is_grad else self._param
        return target if isinstance(target, ShardedTensor) else None

    def state(self) -> tuple[int, int]:
        """What happened to it, and the checksum of the copy as it is now."""
        if self._yielded() is not self.copy:
            return _REPLACED, 0
        content = _content(self.copy)
        if content == self._checksum:
            return _UNTOUCHED, content
        place = self._place_now()
        has_moved = place is None or place != self._place
        return _WRITTEN_TWICE if has_moved else _WRITTEN, content

    def _yielded(self) -> Tensor | None:
        return self._full.grad if self._is_grad and self._full is not None else self._full

    def _place_now(self) -> tuple[ShardStorage, int] | None:
        """The memory that takes over a write, and its version."""
        target = self.target
        return None if target is None else (target.shard_storage, target.shard_storage.version)


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
        if not self._keeps:
            with _refusing_writes(_with_gradients(fulls)):
                yield fulls
            return
        try:
            yield fulls
        except Exception as error:
            if not isinstance(error, DivergenceError):
                with suppress(DShardError), outside_autograd():  # the error that is on its way says more
                    self._agree(drafts, has_failed=True)
            raise
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
                    unit.reshard()
        for name, param in self._params.items() if self._with_grads else ():
            grad = full_gradient(param)
            if grad is not None and name in fulls:
                fulls[name].grad = grad.to(fulls[name].device)
        return {name: fulls[name] for name in self._params if name in fulls}

    def _copied(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of those values that this rank yields."""
        mine = {n: full for n, full in values.items() if not self._rank0_only or self._groups[n].world_rank == 0}
        return {name: full.to("cpu", copy=True) if self._on_cpu else full.clone() for name, full in mine.items()}

    def _drafts(self, fulls: Mapping[str, Tensor]) -> list[_Draft]:
        """What was taken: of each parameter its value, then its gradient; as many on every rank."""
        drafts = []
        for name, param in self._params.items():
            drafts.append(_Draft(param, name, fulls.get(name)))
            if self._with_grads:
                drafts.append(_Draft(param, name, fulls.get(name), is_grad=True))
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
    return grad.full_tensor() if isinstance(grad, ShardedTensor) else grad.clone()


@contextmanager
def _refusing_writes(yielded: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise at the end if one of some values was written to in the block: that write is lost."""
    versions = {name: value._version for name, value in yielded.items()}
    yield
    for name, value in yielded.items():
        if value._version != versions[name]:
            raise StateError(
                f"{name}: what gathered() yields must not be written to, but it was; that write is lost. Write to the "
                "parameter itself, as in module.weight.zero_(), or pass writeback=True."
            )


@contextmanager
def gathered(
    target: nn.Module | ShardedTensor | Sequence[ShardedTensor],
    *,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    recurse: bool = True,
) -> Iterator[dict[str, Tensor]]:
    """Hold the full values of parameters for the length of a scope.

    Without options, no use of the parameters gathers again inside, and `data_ptr()` of a parameter is the address of
    its full value. Under mixed precision these are the exact values; the first forward inside gathers once in the
    compute dtype too.

    ::

        with dshard.gathered(model) as full:
            torch.save(full, "weights.pt")

    With `writeback`, `rank0_only` or `offload_to_cpu` what is yielded are copies, taken unit by unit, and the
    parameters themselves are as sharded as outside. With `writeback` the copies are drafts: the parameters keep their
    values until the scope ends and takes over what was written.

    ::

        with dshard.gathered(model, writeback=True, rank0_only=True) as full:
            if full:  # on rank 0
                full["head.weight"].copy_(surgery(full["head.weight"]))

    Parameters can be read and written to themselves anywhere, inside or outside of a scope, with any options.

    Args:
        target: A sharded module (all parameters of it), a parameter, or several.
        writeback: Keep what was written to the values that are yielded, once the scope ends. Every rank must have
            written the same; with `rank0_only`, what rank 0 wrote is taken. An exception discards it.
        rank0_only: Yield values on the first rank of the mesh alone, and an empty dict on the others, which hold no
            more than one gathered unit at a time.
        offload_to_cpu: Yield copies in the CPU's memory.
        with_grads: Give each value the full, reduced gradient of its parameter as `.grad`, or None.
        recurse: False for the parameters alone that `fully_shard` took when it was called on this very module.

    Yields:
        Name to full value, plain tensors; names are those of `target.named_parameters()`, or for parameters without a
        module their own. Without `writeback` they must not be written to.

    Raises:
        ArgumentError: `target` is none of these.
        StateError: `target` holds nothing that is sharded. At the end: a value was written to without `writeback` (on
            the ranks that wrote); with it, a parameter and its draft were both written to, or a draft's `.grad` was
            replaced, or another rank raised in the scope (on every rank alike). Nothing is taken over then.
        DivergenceError: The ranks pass different arguments; or at the end, ranks wrote different values to their
            drafts. On every rank alike.

    Communicates:
        An all-reduce of 96 bytes.
        One all-gather per bucket of each unit that is not gathered yet, at the start, and one per gradient. With
        `writeback`, an all-reduce of 24 bytes per value at the end; with `rank0_only`, then a broadcast of each value
        that was written to.
    """
    writeback = arguments.boolean("gathered", "writeback", writeback)
    rank0_only = arguments.boolean("gathered", "rank0_only", rank0_only)
    offload_to_cpu = arguments.boolean("gathered", "offload_to_cpu", offload_to_cpu)
    with_grads = arguments.boolean("gathered", "with_grads", with_grads)
    recurse = arguments.boolean("gathered", "recurse", recurse)
    params = _sharded_params(_target(target), recurse=recurse)
    if not params:
        raise StateError("gathered: needs sharded parameters, but got none. Call fully_shard first.")
    facts = {"writeback": writeback, "rank0_only": rank0_only, "with_grads": with_grads, "recurse": recurse}
    widest = max(map(joined_group, params.values()), key=lambda group: group.world_size)
    check_same("gathered", {"target": list(params), **{name: repr(fact) for name, fact in facts.items()}}, widest)
    for param in params.values():
        if isinstance(param.gather_source, Unit):
            param.gather_source.model.before_use()
    scope: AbstractContextManager[dict[str, Tensor]]
    if writeback or rank0_only or offload_to_cpu:
        drafts = Drafts(params, keeps=writeback, rank0_only=rank0_only, on_cpu=offload_to_cpu, with_grads=with_grads)
        scope = drafts.open()
    else:
        scope = _held(params, with_grads=with_grads)
    with scope as fulls:
        yield fulls


@contextmanager
def _held(params: dict[str, ShardedTensor], *, with_grads: bool) -> Iterator[dict[str, Tensor]]:
    """Gathered copies themselves, which the units keep until the end."""
    units = list(dict.fromkeys(p.gather_source for p in params.values() if isinstance(p.gather_source, Unit)))
    try:
        for unit in units:
            unit.num_pins += 1
            (unit.copies if unit.is_running else unit.exact).gather()
        with outside_autograd():
            fulls = {name: _apart(p, p.materialize().detach()) for name, p in params.items()}
            for name, full in fulls.items() if with_grads else ():
                grad = full_gradient(params[name])
                full.grad = grad if grad is None else grad.to(full.device)
        # The full value of a parameter that one rank has alone is the shard: a write to it is kept.
        alone = {name for name, p in params.items() if joined_group(p).world_size == 1 and p.offload is None}
        watched = {name: full for name, full in _with_gradients(fulls).items() if name not in alone}
        with _refusing_writes(watched):
            yield fulls
    finally:
        for unit in units:
            unit.num_pins -= 1
            unit.reshard_unless_kept()


def _apart(param: ShardedTensor, full: Tensor) -> Tensor:
    """A full value in memory that is let go of at the end; a write to a shard, or to what stays, would not be lost."""
    unit = param.gather_source
    stays = isinstance(unit, Unit) and unit.stays
    is_shard = full.untyped_storage()._cdata == param.shard_storage.resolve().untyped_storage()._cdata
    return full.clone() if stays or (is_shard and joined_group(param).world_size > 1) else full


def _target(target: Any) -> nn.Module | ShardedTensor | tuple[ShardedTensor, ...]:
    """The argument `target`; several parameters as a tuple."""
    if isinstance(target, (nn.Module, ShardedTensor)):
        return target
    if isinstance(target, (Tensor, list, tuple)):
        _refuse_within_forward(target)
    allowed = "a module that fully_shard was called on, one of its parameters, or a list of them"
    return arguments.several(
        "gathered", "target", target, lambda each: isinstance(each, ShardedTensor), allowed, "Pass the model.", least=1
    )


def _refuse_within_forward(target: Any) -> None:
    """Raise where one of some parameters is in its module's forward, and so is no sharded one."""
    values = target.parameters() if isinstance(target, nn.Module) else target
    for each in values if not isinstance(values, Tensor) else [values]:
        if isinstance(each, Unsharded):
            raise StateError(
                f"gathered: parameters must not be within their module's forward, but {each.sharded.name} is, where it "
                "is its full tensor already. Use it as it is; write to it ahead of the forward, or after it."
            )


def _sharded_params(target: Any, *, recurse: bool) -> dict[str, ShardedTensor]:
    """Name to parameter; each parameter once."""
    if isinstance(target, nn.Module):
        _refuse_within_forward(target)
        params: dict[str, ShardedTensor] = {
            name: p for name, p in target.named_parameters() if isinstance(p, ShardedTensor)
        }
        if recurse:
            return params
        if not isinstance(target, FSDPModule):
            raise StateError(
                "gathered: recurse=False means the parameters that fully_shard took when it was called on this module, "
                f"but it was not called on this {type(target).__name__}. Pass a module that it was called on."
            )
        units = own_units(target)
        return {name: p for name, p in params.items() if p.gather_source in units}
    items = list(dict.fromkeys([target] if isinstance(target, Tensor) else target))
    found: dict[str, ShardedTensor] = {}
    for param in items:
        if param.name in found:
            raise StateError(
                f"{param.name}: gathered yields values by name, but two of the parameters have this one. Pass the "
                "module that holds them, or gather one at a time."
            )
        found[param.name] = param
    return found


def iter_full(
    module: nn.Module, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Walk over the full values of all parameters and persistent buffers, for example into an inference engine.

    ::

        engine.load_weights(dshard.iter_full(model, dtype=torch.bfloat16))

    Every rank must walk to the end; a rank may let the values go unused. Nothing is alive but the value that is given
    and, while that is made, the one that you still hold. Units are neither gathered nor freed, whatever their size.

    Args:
        module: A sharded module; a plain one works too.
        device: Where the values shall be; by default where the shards are.
        dtype: For floating-point values; by default their own.

    Returns:
        An iterator over names and plain tensors, in the order and under the names of `state_dict()`: a tied weight
        comes once for each of its names. The tensors are the caller's own. Buffers are this rank's own.

    Raises:
        ArgumentError: `dtype` is no floating-point one.
        StateError: A tensor is on the meta device. On every rank alike.
        DivergenceError: While walking, if the ranks are at different tensors. On every rank alike.

    Communicates:
        An all-gather per tensor that is cut, when its turn comes.
    """
    arguments.module("iter_full", "module", module)
    arguments.dtype("iter_full", "dtype", dtype, or_none=True)
    allowed = "a torch.device or its text"
    arguments.expect(arguments.is_device(device), "iter_full", "device", device, allowed, "Pass 'cpu'.", or_none=True)
    state = module.state_dict(keep_vars=True)
    tensors = [(name, value) for name, value in state.items() if isinstance(value, Tensor)]
    refuse_meta("iter_full", tensors)
    return _converted(full_values(tensors), device, dtype)


def _converted(
    values: Iterator[tuple[str, Tensor]], device: torch.device | str | None, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    for name, full in values:
        yield name, full.to(device=device, dtype=dtype if full.is_floating_point() else None)
        del full
