"""What a module can do after `fully_shard`: the methods of FSDP2's `FSDPModule`."""

import copy
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as _TorchFSDPModule

from dshard.errors import StateError, UnsupportedOpError
from dshard.runtime.reduction import hook_gradient
from dshard.runtime.runtime import Runtime
from dshard.runtime.unit import Unit
from dshard.tensor import ShardedTensor

__all__ = ["FSDPModule", "UnshardHandle", "sharded_class", "units_of"]


class UnshardHandle:
    """A gather under way, from `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Wait for the gather."""
        for unit in self._units:
            unit.wait()


def units_of(module: nn.Module) -> list[Unit]:
    """Units whose modules are `module` or lie inside of it, in order of registration."""
    found: dict[Unit, None] = {}
    for child in module.modules():
        found.update(dict.fromkeys(child.__dict__.get("_dshard_units", ())))
    return list(found)


class FSDPModule(_TorchFSDPModule, nn.Module):
    """Mixed into the class of every module that `fully_shard` was called on. Not to be constructed.

    It is a subclass of torch's `FSDPModule`, so that programs that ask for one find one. Every method of that class is
    here: it works, or has nothing to do here and says so, or raises `UnsupportedOpError`.
    """

    _dshard_units: list[Unit]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the original class: what slicing a sharded `nn.Sequential` makes is not sharded itself."""
        original = cls.__mro__[cls.__mro__.index(nn.Module) - 1] if cls is FSDPModule else cls.__bases__[1]
        module = original.__new__(original, *args, **kwargs)
        module.__init__(*args, **kwargs)
        return module

    def _runtime(self) -> Runtime:
        runtime = cast(Runtime, self._dshard_units[0].observer)
        runtime.before_use()
        return runtime

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather this module's own units ahead of their use.

        Args:
            async_op: Return a handle at once, rather than wait.

        Communicates:
            One all-gather per bucket of each unit that is not gathered.
        """
        units = self._own_units()
        for unit in units:
            unit.is_requested = True
            unit.gather()
        handle = UnshardHandle(units)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered copies of this module's own units. Communicates nothing."""
        for unit in self._own_units():
            unit.free()

    def _own_units(self) -> list[Unit]:
        """What the call on this module took: one unit, or those that the first use formed of it."""
        self._runtime()
        return list(dict.fromkeys([*self._dshard_units, *self.__dict__.get("_dshard_formed", ())]))

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether units are freed between forward and backward. Communicates nothing.

        Args:
            reshard_after_forward: True saves memory, False a gather per unit and backward.
            recurse: Also for the units of all submodules.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward: the argument must be a bool, but it is {reshard_after_forward!r}. Pass "
                "True or False."
            )
        self._runtime()
        for unit in units_of(self) if recurse else self._dshard_units:
            unit.reshard_after_forward = reshard_after_forward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients, or adds them up unreduced until a later backward does.

        Without sync the full gradients of this rank stay in memory. Reading such a gradient reduces it.

        Args:
            requires_gradient_sync: False for all micro-batches but the last.
            recurse: Also for the units of all submodules.

        Communicates:
            Nothing.
        """
        self._runtime()
        for unit in units_of(self) if recurse else self._dshard_units:
            unit.requires_sync = requires_gradient_sync

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether gathered copies are freed in backward; the switch is the whole model's. Communicates nothing."""
        self._runtime().reshard_after_backward = reshard_after_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by `factor`, rather than by the number of ranks; for the whole model."""
        self._runtime().reducer.divisor = factor

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reduce-scatters may hold their send buffers while another fills; for the whole model."""
        if max_input_buffers < 1:
            raise ValueError(
                f"set_reduce_scatter_max_input_buffers: needs at least 1 buffer, but got {max_input_buffers}."
            )
        self._runtime().reducer.max_in_flight = max_input_buffers

    def set_prefetch(self, depth: int) -> None:
        """How many units are gathered ahead of their use, in the order of the last step; for the whole model.

        Args:
            depth: 1 by default; 0 to gather at the first touch alone. Each one ahead holds its gathered copies.

        Communicates:
            Nothing.
        """
        if not isinstance(depth, int) or depth < 0:
            raise ValueError(f"set_prefetch: depth must be an integer of at least 0, but it is {depth!r}. Pass 1.")
        self._runtime().schedule.depth = depth

    def reset_iter_state(self) -> None:
        """Forget a forward or backward that an exception ended. Gradients that had not left yet are lost."""
        self._runtime().reset()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module; full and sharded tensors are both taken, and each rank keeps its part.

        Args:
            state_dict: Full values, which must be equal on all ranks, or ShardedTensors.
            strict: Whether the keys must be those of the module.
            assign: Also for parameters on the meta device, which get memory; sharded parameters stay the objects that
                they are.

        Communicates:
            Nothing, unless a ShardedTensor of another layout is loaded.
        """
        if assign:
            self._allocate_for(state_dict)
        return super().load_state_dict(state_dict, strict=strict)

    def _allocate_for(self, state_dict: Mapping[str, Any]) -> None:
        """Give memory to what is on the meta device and about to be loaded."""
        for name, param in self.named_parameters():
            if isinstance(param, ShardedTensor) and param.is_meta and isinstance(state_dict.get(name), Tensor):
                _convert(param, partial(torch.empty_like, device=param._group.device_type))
        for name, buffer in list(self.named_buffers()):
            value = state_dict.get(name)
            if buffer.is_meta and isinstance(value, Tensor):
                owner, _, attribute = name.rpartition(".")
                self.get_submodule(owner)._buffers[attribute] = torch.empty_like(buffer, device=value.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FSDPModule":
        """`to`, `half`, `to_empty` and their kind: convert the shards, in place of whole parameters."""
        self._runtime()
        for unit in units_of(self):
            unit.free()
        recurrent = [module for module in self.modules() if isinstance(module, nn.RNNBase)]
        for rnn in recurrent:
            rnn.__dict__.update(_flat_weights=[], _flat_weight_refs=[])  # weak references prevent a swap
        taken: list[tuple[nn.Module, str, ShardedTensor]] = []
        converted: set[int] = set()
        for module in self.modules() if recurse else [self]:
            for name, param in module._parameters.items():
                if isinstance(param, ShardedTensor):
                    taken.append((module, name, param))
                    if id(param) not in converted:
                        converted.add(id(param))
                        _convert(param, fn)
        try:  # all else goes the modules' own way, which would swap the objects of sharded parameters
            for module, name, _ in taken:
                module._parameters[name] = None
            super(_TorchFSDPModule, self)._apply(fn, recurse)
        finally:
            for module, name, sharded in taken:
                module._parameters[name] = sharded  # type: ignore[assignment]
        for rnn in recurrent:
            rnn._init_flat_weights()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Each rank pickles its own shards; to be loaded in a world of the same size."""
        self._runtime()
        return _new_sharded, (type(self).__bases__[1],), self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> "FSDPModule":
        new = object.__new__(type(self))
        memo[id(self)] = new
        self._runtime()
        for key, value in self.__dict__.items():
            new.__dict__[key] = copy.deepcopy(value, memo)
        return new


def _convert(param: ShardedTensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply a conversion to a sharded parameter and its gradient, keeping the parameter object."""
    with torch.no_grad():
        shard = fn(param._cell.resolve())
        if shard is param._cell.resolve():
            return
        grad, param.grad = param.grad, None
        stride = _stride_of_format(param, shard)
        new = param.like(shard.contiguous(), stride=stride)
        new._cell.is_shared = True
        if new.device == param.device:
            param.data = new
        else:
            _swap(param, new)
        if isinstance(grad, ShardedTensor):
            param.grad = grad.like(fn(grad._cell.resolve()).contiguous(), stride=stride)
            param.grad._cell.is_shared = True


def _stride_of_format(param: ShardedTensor, shard: Tensor) -> tuple[int, ...] | None:
    """Strides of the full tensor if its shard was converted to another memory format, else None."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if shard.dim() not in formats or shard.is_contiguous():
        return None
    return torch.empty(param.shape, device="meta").to(memory_format=formats[shard.dim()]).stride()


def _swap(param: ShardedTensor, new: ShardedTensor) -> None:
    """Give a parameter object the metadata of a tensor on another device."""
    if param._grad_hook is not None:
        param._grad_hook.remove()
        param._grad_hook = None
    attributes = {**param.__dict__, "_cell": new._cell, "_views": None}
    requires_grad = param.requires_grad
    try:
        torch.utils.swap_tensors(param, new)
    except RuntimeError as error:
        reason = str(error).rstrip(".")
        raise StateError(
            f"{param.name}: a parameter can move to another device only while nothing else refers to it, but torch "
            f"says: {reason}. Move the module while no views of its parameters and no weak references to them are kept."
        ) from error
    param.__dict__.clear()
    param.__dict__.update(attributes)
    torch.Tensor.requires_grad_(param, requires_grad)
    hook_gradient(param)


def _accepted(name: str, why: str) -> Callable[..., None]:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        return None

    method.__name__, method.__doc__ = name, f"Accepted for FSDP2's sake, does nothing: {why}."
    return method


def _refused(name: str, why: str) -> Callable[..., None]:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedOpError(f"{type(self).__name__}.{name}: not supported, for {why}. Leave the call out.")

    method.__name__, method.__doc__ = name, f"Raises UnsupportedOpError, for {why}."
    return method


_ACCEPTED = {
    "set_is_last_backward": "each backward ends what it began",
    "set_requires_all_reduce": "there is no second mesh dim to reduce over",
    "set_unshard_in_backward": "a unit is gathered in backward only if it is touched there",
    "set_modules_to_forward_prefetch": "the order of the last step tells what to gather ahead; see set_prefetch",
    "set_modules_to_backward_prefetch": "the order of the last step tells what to gather ahead; see set_prefetch",
    "set_force_sum_reduction_for_comms": "how a mean is computed is the backend's matter",
    "set_reduce_scatter_unused_params": "parameters that only some ranks use are always reduced within a unit",
    "set_separate_reduce_scatter_group": "a hint for NCCL",
    "set_allocate_memory_from_process_group_for_comm": "a hint for NCCL",
    "set_symm_mem_for_comm": "a hint for NCCL",
    "set_post_optim_event": "a gather waits for the writes to its shards by itself",
    "_set_unshard_async_op": "a private switch of torch's",
}
_REFUSED = {
    "set_all_reduce_hook": "there is no all-reduce without a second mesh dim",
    "set_custom_all_gather": "collectives are chosen by backend",
    "set_custom_reduce_scatter": "collectives are chosen by backend",
}
for _name, _why in _ACCEPTED.items():
    setattr(FSDPModule, _name, _accepted(_name, _why))
for _name, _why in _REFUSED.items():
    setattr(FSDPModule, _name, _refused(_name, _why))
FSDPModule.set_reduce_scatter_divide_factor = FSDPModule.set_gradient_divide_factor  # type: ignore[assignment, method-assign]


def _new_sharded(cls: type[nn.Module]) -> nn.Module:
    """Unpickle: an empty module of the sharded class of `cls`."""
    module: nn.Module = object.__new__(sharded_class(cls))  # type: ignore[arg-type]
    return module


@cache
def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of `cls`'s modules after `fully_shard`: `FSDP<Name>`, a subclass of both."""
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
