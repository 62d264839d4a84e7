"""Full values: the scope in which they stay at hand, and a walk over all of them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dshard.agreement.same import check_same
from dshard.arguments import checked
from dshard.autograd.modes import outside_autograd
from dshard.errors import StateError
from dshard.gathering.full_values import full_values, refuse_meta
from dshard.gathering.writeback import Drafts, full_gradient, refuse_writes
from dshard.runtime.module import FSDPModule
from dshard.runtime.runtime import own_units
from dshard.tensor import ShardedTensor
from dshard.tensor.tp_layout import joined_group
from dshard.units.unit import Unit


@checked
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
    params = _sharded_params(target, recurse=recurse)
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
        alone = {
            name for name, p in params.items() if joined_group(p).world_size == 1 and p.offload is None
        }  # the shard
        watched = {name: full for name, full in fulls.items() if name not in alone}
        watched |= {f"{name}.grad": full.grad for name, full in fulls.items() if full.grad is not None}
        versions = {name: full._version for name, full in watched.items()}
        yield fulls
        refuse_writes({name: (full, versions[name]) for name, full in watched.items()})
    finally:
        for unit in units:
            unit.num_pins -= 1
            unit.release()


def _apart(param: ShardedTensor, full: Tensor) -> Tensor:
    """A full value in memory that is let go of at the end; a write to a shard, or to what stays, would not be lost."""
    unit = param.gather_source
    stays = isinstance(unit, Unit) and unit.stays
    is_shard = full.untyped_storage()._cdata == param.shard_storage.resolve().untyped_storage()._cdata
    return full.clone() if stays or (is_shard and joined_group(param).world_size > 1) else full


def _sharded_params(target: Any, *, recurse: bool) -> dict[str, ShardedTensor]:
    """Name to parameter; each parameter once."""
    if isinstance(target, nn.Module):
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


@checked
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
