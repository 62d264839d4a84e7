"""`FSDPModule`: the methods of a sharded module."""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import FSDPModule as _TorchFSDPModule
from torch.distributed.fsdp import fully_shard as _torchs_fully_shard

from dshard import arguments
from dshard.collectives import BackendMemory, CommMemory, SymmetricMemory
from dshard.errors import StateError
from dshard.gradients.backward import Backward
from dshard.gradients.reducer import FiniteCheck, Reducer
from dshard.optimizer.replace import allocate, convert, forget_flat_weights
from dshard.policies import read_reshard
from dshard.runtime.module_hooks import FORWARD_METHODS, as_forward
from dshard.runtime.runtime import context_of, own_units, runtime_of, units_of
from dshard.tensor import ShardedTensor
from dshard.units.context import ModelContext
from dshard.units.unit import Unit


class _ManagedModule:
    """True to whoever asks whether a module is managed by FSDP, except to dynamo.

    Of a module that is, dynamo takes FSDP1's flat parameters for granted and refuses to trace it. Code that it traces
    reads the module as any other code does, and gets True.
    """

    def __bool__(self) -> bool:
        return torch.compiler.is_dynamo_compiling() or TracingContext.try_get() is None


_MANAGED = "_is_fsdp_managed_module"


def say_managed(root: nn.Module) -> None:
    """Have a module, and all below it, say that they are sharded, as FSDP2's do.

    Transformers asks modules for this attribute. Then `generate` compares over the ranks, at each token, whether all
    sequences have ended, and encoders run the layers that `layerdrop` drops on some ranks alone, without their results.
    """
    for module in root.modules():
        module.__dict__[_MANAGED] = _ManagedModule()


def say_unmanaged(root: nn.Module) -> None:
    """Take that back."""
    for module in root.modules():
        module.__dict__.pop(_MANAGED, None)


class DataParallelNames:
    """Names that wrappers and trainers written for DDP and FSDP1 look for, and that FSDP2's class has not."""

    @property
    def _ddp_params_and_buffers_to_ignore(self: Any) -> list[str]:
        """DDP reads it: sharded parameters are reduced already, and what is left, if anything, is DDP's."""
        return [name for name, p in self.named_parameters(remove_duplicate=False) if isinstance(p, ShardedTensor)]

    @contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        """Let backwards inside of the scope add gradients up without reducing them; the next backward outside does.

        Communicates:
            Nothing. Reading such a gradient reduces it.
        """
        before = {unit: unit.settings.requires_sync for unit in self._units(recurse=True)}
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit in self._units(recurse=True):
                unit.change(requires_sync=before.get(unit, True))


class AcceptedHints:
    """Methods of FSDP2's that have nothing to do here."""


def _accepted(name: str, why: str) -> Callable[..., None]:
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    method.__name__, method.__doc__ = name, f"Accepted for FSDP2's sake, does nothing: {why}."
    return method


_ACCEPTED = {
    "set_is_last_backward": "each backward ends what it began",
    "set_unshard_in_backward": "a unit is gathered in backward only if it is touched there",
    "set_reduce_scatter_unused_params": "parameters that only some ranks use are always reduced within a unit",
    "set_post_optim_event": "a gather waits for the writes to its shards by itself",
    "_set_unshard_async_op": "a private switch of torch's",
}
for _name, _why in _ACCEPTED.items():
    setattr(AcceptedHints, _name, _accepted(_name, _why))


_KEY: Any = _torchs_fully_shard.__wrapped__  # type: ignore[attr-defined]  # what torch looks the state up by


def answer_as_fsdp2(module: nn.Module) -> None:
    """Have `fully_shard.state(module)` of torch give what a pipeline stage uses of it, and its registry know of it."""
    module.__dict__[STATE_KEY] = _States(module, module.__dict__.get(STATE_KEY) or {})
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()


class _States(dict[Callable[..., Any], Any]):
    """The states of torch's composable functions on a module; that of `fully_shard` is made when it is asked for.

    Args:
        module: A sharded module.
        others: States of other functions.
    """

    def __init__(self, module: nn.Module | None = None, others: Any = ()) -> None:
        super().__init__(others)
        self.module = module

    def __contains__(self, key: object) -> bool:
        return key is _KEY or super().__contains__(key)

    def __reduce__(self) -> Any:
        return _restored, (self.module,)

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of one function."""
        return _State(self.module) if key is _KEY and self.module is not None else super().get(key, default)


def _restored(module: nn.Module) -> Any:
    """Copy or unpickle; torch's name for the states is another one in every process."""
    answer_as_fsdp2(module)
    return module.__dict__[STATE_KEY]


class _State:
    """As much of FSDP2's state of a module as `PipelineStage.perform_reduce_grad` uses.

    A schedule runs the backwards of its micro-batches without sync, and then reduces by hand what they added up.
    """

    def __init__(self, module: nn.Module) -> None:
        self._units = units_of(module)
        self._fsdp_param_groups = [_Group(unit) for unit in self._units]
        self._state_ctx = self

    @property
    def all_states(self) -> list["_State"]:
        """A state that stands for all below."""
        return [self]

    def _root_post_backward_final_callback(self) -> None:
        """All gradients have left: wait for what has to be, and free what is gathered. As after a backward."""
        for model in dict.fromkeys(unit.model for unit in self._units):
            model.get(Backward).end()


class _Group:
    """One unit."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def post_backward(self) -> None:
        """Reduce the gradients that were added up. Communicates a reduce-scatter, unless none have."""
        self._unit.model.get(Reducer).reduce(self._unit)


class UnshardHandle:
    """A gather under way, from `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Wait for the gather."""
        for unit in self._units:
            unit.wait()


def _check_comm(who: str, comm: Any, interface: str) -> None:
    """Refuse an object that cannot take the place of a collective."""
    is_right = callable(comm) and callable(getattr(comm, "allocate", None)) and not isinstance(comm, type)
    allowed = f"an object that can be called and has allocate(), as torch's {interface}"
    way = f"Pass an instance of a subclass of torch.distributed.fsdp._fully_shard._fsdp_api.{interface}."
    arguments.expect(is_right, who, "comm", comm, allowed, way)


class FSDPModule(DataParallelNames, AcceptedHints, _TorchFSDPModule, nn.Module):
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

    def _context(self) -> ModelContext:
        return context_of(self)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather this module's own units ahead of their use.

        Args:
            async_op: Return a handle at once, rather than wait.

        Communicates:
            One all-gather per bucket of each unit that is not gathered.
        """
        async_op = arguments.boolean("unshard", "async_op", async_op)
        units = self._own_units()
        for unit in units:
            unit.is_requested = True
            unit.unshard()
        handle = UnshardHandle(units)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered copies of this module's own units. Communicates nothing."""
        for unit in self._own_units():
            unit.reshard()

    def _own_units(self) -> list[Unit]:
        return own_units(self)

    def _units(self, *, recurse: bool) -> list[Unit]:
        """Units of this module and all below, or its own alone."""
        return list(dict.fromkeys([*self._own_units(), *units_of(self)])) if recurse else self._own_units()

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """Whether units are freed between forward and backward. Communicates nothing, but to make process groups.

        Args:
            reshard_after_forward: True saves memory, False a gather per unit and backward; or a number of ranks.
            recurse: Also for the units of all submodules.

        Raises:
            ArgumentError: It is neither.
            PlacementError: It does not divide the number of ranks. On every rank alike.
        """
        recurse = arguments.boolean("set_reshard_after_forward", "recurse", recurse)
        choice = read_reshard("set_reshard_after_forward", reshard_after_forward)
        for unit in self._units(recurse=recurse):
            unit.set_reshard_after_forward(choice)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients, or adds them up unreduced until a later backward does.

        Without sync the full gradients of this rank stay in memory. Reading such a gradient reduces it.

        Args:
            requires_gradient_sync: False for all micro-batches but the last.
            recurse: Also for the units of all submodules.

        Communicates:
            Nothing.
        """
        on = arguments.boolean("set_requires_gradient_sync", "requires_gradient_sync", requires_gradient_sync)
        recurse = arguments.boolean("set_requires_gradient_sync", "recurse", recurse)
        for unit in self._units(recurse=recurse):
            unit.change(requires_sync=on)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over replicas, too, or adds them up within each until a later one does.

        Without it each rank keeps the sum of its own shards. Reading such a gradient all-reduces it, so that it is the
        full one. Where nothing is replicated this changes nothing.

        Args:
            requires_all_reduce: False for all micro-batches but the last.
            recurse: Also for the units of all submodules.

        Communicates:
            Nothing.
        """
        on = arguments.boolean("set_requires_all_reduce", "requires_all_reduce", requires_all_reduce)
        recurse = arguments.boolean("set_requires_all_reduce", "recurse", recurse)
        for unit in self._units(recurse=recurse):
            unit.change(requires_all_reduce=on)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether gathered copies are freed in backward, or serve the next forward too. Communicates nothing.

        Args:
            reshard_after_backward: False saves a gather per unit and micro-batch.
            recurse: Also for the units of all submodules.
        """
        on = arguments.boolean("set_reshard_after_backward", "reshard_after_backward", reshard_after_backward)
        recurse = arguments.boolean("set_reshard_after_backward", "recurse", recurse)
        for unit in self._units(recurse=recurse):
            unit.change(reshard_after_backward=on)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by `factor`, rather than by the number of ranks. Communicates nothing.

        As with FSDP2, that is for what the call on this very module took, not for units of submodules: those of experts
        may be divided by another number than the rest. Gradients that have begun to arrive keep the old number.

        Args:
            factor: Finite, and not 0; 1 gives the sum.

        Raises:
            ArgumentError: It is none of these.
        """
        who, allowed = "set_gradient_divide_factor", "a finite number other than 0"
        factor = arguments.number(who, "factor", factor, lambda x: isfinite(x) and x != 0, allowed, "Pass 1.0.")
        for unit in self._own_units():
            unit.change(divisor=factor)

    def set_check_gradients(self, enable: bool = True) -> None:
        """Look for NaN and infinity in each rank's own gradients, ahead of their reduction; for the whole model.

        A backward then raises, on every rank alike, and names the rank and the parameter where they came up first.
        Weights that are used in slices (`split(q)`) are not looked at.

        Args:
            enable: Whether to look. Off by default: it reads every gradient once, and waits for the device when a
                backward ends.

        Communicates:
            Nothing now; at the end of each backward an all-reduce of 8 bytes.
        """
        enable = arguments.boolean("set_check_gradients", "enable", enable)
        self._context().get(Reducer).check = FiniteCheck() if enable else None

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reduce-scatters may hold their send buffers while another fills; for the whole model.

        Args:
            max_input_buffers: 1 by default.
            recurse: Accepted for FSDP2's sake, has no meaning here.

        Raises:
            ArgumentError: It is no integer, or less than 1.
        """
        who = "set_reduce_scatter_max_input_buffers"
        arguments.boolean(who, "recurse", recurse)
        max_input_buffers = arguments.count(who, "max_input_buffers", max_input_buffers)
        self._context().change(max_input_buffers=max_input_buffers)

    def set_prefetch(self, depth: int) -> None:
        """How many units are gathered ahead of their use, in the order of the last step; for the whole model.

        Args:
            depth: 1 by default; 0 to gather at the first touch alone. Each one ahead holds its gathered copies.

        Communicates:
            Nothing.

        Raises:
            ArgumentError: It is no integer, or below 0.
        """
        depth = arguments.count("set_prefetch", "depth", depth, least=0)
        self._context().change(prefetch=depth)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:  # type: ignore[override]
        """Accepted for FSDP2's sake: the order of the last step tells what to gather ahead; see `set_prefetch`.

        Args:
            modules: Sharded modules.

        Raises:
            ArgumentError: One of them is not.
        """
        arguments.sharded_modules("set_modules_to_forward_prefetch", "modules", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:  # type: ignore[override]
        """As `set_modules_to_forward_prefetch`."""
        arguments.sharded_modules("set_modules_to_backward_prefetch", "modules", modules)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this module's own units by an object of torch's `AllGather` interface. Communicates nothing.

        Args:
            comm: Called with `(output_tensor, input_tensor, group, async_op=True)`, flat tensors, the output from its
                `allocate`; gives a handle, or None when it is done.

        Raises:
            ArgumentError: It cannot be called, or has no `allocate`.
        """
        _check_comm("set_custom_all_gather", comm, "AllGather")
        for unit in self._own_units():
            unit.change(comms=replace(unit.settings.comms, all_gather=comm))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce the gradients of this module's own units by an object of torch's `ReduceScatter` interface.

        Args:
            comm: Called with `(output_tensor, input_tensor, group, op, async_op=True)`, flat tensors, the input from
                its `allocate`; gives a handle, or None when it is done. In a row, a flag per parameter goes ahead.

        Raises:
            ArgumentError: It cannot be called, or has no `allocate`.

        Communicates:
            Nothing.
        """
        _check_comm("set_custom_reduce_scatter", comm, "ReduceScatter")
        for unit in self._own_units():
            unit.change(comms=replace(unit.settings.comms, reduce_scatter=comm))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether buffers of this module's own units come from the allocator of the process group's backend.

        NCCL's lets collectives go without a copy where the network can (SHARP over NVLink and InfiniBand). A backend
        without one, as gloo, warns, and all stays as it is.

        Args:
            enable: False for ordinary memory.

        Raises:
            ArgumentError: `enable` is no bool.
            StateError: A custom all-gather or reduce-scatter is set, which allocates for itself.

        Communicates:
            Nothing.
        """
        who = "set_allocate_memory_from_process_group_for_comm"
        self._set_memory(who, BackendMemory() if arguments.boolean(who, "enable", enable) else None)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Have buffers of this module's own units lie in symmetric memory, for which NCCL has faster collectives.

        Within a host these are copies that take no kernel, where the process group was made with
        `ProcessGroupNCCL.Options().config.cta_policy = NCCL_CTA_POLICY_ZERO`. NCCL has such reductions for sums alone:
        call `set_force_sum_reduction_for_comms(True)`, too. Where there is no such memory, this warns, without effect.

        Args:
            backend: Of torch's symmetric memory; 'NCCL'.

        Raises:
            ArgumentError: Another `backend`.
            StateError: A custom all-gather or reduce-scatter is set, which allocates for itself.

        Communicates:
            The first time for a process group a barrier, and 4 bytes.
        """
        who = "set_symm_mem_for_comm"
        arguments.expect(
            isinstance(backend, str) and backend == "NCCL", who, "backend", backend, "'NCCL'", "Pass 'NCCL'."
        )
        self._set_memory(who, SymmetricMemory(backend))

    def _set_memory(self, who: str, memory: CommMemory | None) -> None:
        """Have buffers lie in some memory."""
        units = self._own_units()
        for unit in units if memory is not None else ():
            if unit.settings.comms.all_gather is not None or unit.settings.comms.reduce_scatter is not None:
                raise StateError(
                    f"{who}: '{unit.label}' must have no custom all-gather or reduce-scatter, which allocates its "
                    "buffers itself, but it has. Allocate in its allocate(), or leave it out."
                )
        for unit in units:
            for group in unit.groups if memory is not None else ():
                assert memory is not None
                if why := memory.why_missing(group.process_group, group.device):
                    warnings.warn(f"{who}: has no effect, for {why}", stacklevel=3)  # alike for each module: said once
            unit.change(comms=replace(unit.settings.comms, memory=memory))

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether a mean of this module's own units' gradients is a sum that is divided, whatever the backend has.

        Args:
            enable: False for the backend's own mean, if it has one.

        Raises:
            ArgumentError: `enable` is no bool.

        Communicates:
            Nothing.
        """
        enable = arguments.boolean("set_force_sum_reduction_for_comms", "enable", enable)
        for unit in self._own_units():
            unit.change(comms=replace(unit.settings.comms, sums=enable))

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether gradients are reduced in a process group of their own, beside gathers.

        On gloo that also means gloo's own collectives in the place of the direct exchange.

        Args:
            enable: False for the group of the gathers.
            recurse: Also for the units of all submodules.

        Communicates:
            The making of a process group, the first time.
        """
        enable = arguments.boolean("set_separate_reduce_scatter_group", "enable", enable)
        recurse = arguments.boolean("set_separate_reduce_scatter_group", "recurse", recurse)
        for unit in self._units(recurse=recurse):
            unit.change(comms=replace(unit.settings.comms, separates=enable))
            _ = unit.buckets(unit.trainable, unit.reduce_dtypes)  # makes the group now, on all ranks

    def set_all_reduce_hook(self, hook: Callable[[Tensor], object] | None, *, stream: Any = None) -> None:
        """Call a function with this rank's reduced gradients of each bucket of this module's own units.

        It is called once per bucket and backward, in one order on all ranks, after the reduction over the ranks that
        share the parameters (and over replicas); it may communicate, and change the tensor in place.

        Args:
            hook: Given a flat tensor in the dtype of the reduction: a flag per parameter, then this rank's shards. The
                flags are above zero where a rank had a gradient; sum or average all alike. None for no hook any more.
            stream: Accepted for FSDP2's sake: the hook runs in the current stream.

        Raises:
            ArgumentError: It cannot be called.

        Communicates:
            Nothing.
        """
        way = "Pass one, as in lambda grads: None."
        arguments.function("set_all_reduce_hook", "hook", hook, "a flat tensor", way, or_none=True)
        for unit in self._own_units():
            unit.change(reduce_hook=hook)

    def reset_iter_state(self) -> None:
        """Forget a forward or backward that an exception ended. Gradients that had not left yet are lost."""
        runtime_of(self).reset()

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
        allowed, way = "a mapping of names to tensors", "Pass what state_dict() gave."
        arguments.expect(isinstance(state_dict, Mapping), "load_state_dict", "state_dict", state_dict, allowed, way)
        strict = arguments.boolean("load_state_dict", "strict", strict)
        assign = arguments.boolean("load_state_dict", "assign", assign)
        if assign:
            allocate(self, {name: value.device for name, value in state_dict.items() if isinstance(value, Tensor)})
        return super().load_state_dict(state_dict, strict=strict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FSDPModule":
        """`to`, `half`, `to_empty` and their kind: convert the shards, in place of whole parameters."""
        self._context()
        for unit in units_of(self):
            unit.reshard()
        recurrent = forget_flat_weights(self)
        taken: list[tuple[nn.Module, str, ShardedTensor]] = []
        converted: set[int] = set()
        for module in self.modules() if recurse else [self]:
            for name, param in module._parameters.items():
                if isinstance(param, ShardedTensor):
                    taken.append((module, name, param))
                    if id(param) not in converted:
                        converted.add(id(param))
                        convert(param, fn)
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
        self._context()
        own_methods = self.__dict__.get(FORWARD_METHODS, ())  # which pickle takes for the class's
        left = {"_compiled_call_impl", *own_methods}
        state = {key: value for key, value in self.__dict__.items() if key not in left}
        return _new_sharded, (type(self).__bases__[1],), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in self.__dict__.pop(FORWARD_METHODS, ()):
            as_forward(self, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FSDPModule":
        new = object.__new__(type(self))
        memo[id(self)] = new
        self._context()
        for key, value in self.__dict__.items():
            if key != "_compiled_call_impl":  # it calls this module; torch leaves it behind too
                new.__dict__[key] = copy.deepcopy(value, memo)
        return new


FSDPModule.set_reduce_scatter_divide_factor = FSDPModule.set_gradient_divide_factor  # type: ignore[assignment, method-assign]


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a class of sharded modules was made of."""
    return cls.__bases__[1]


def _new_sharded(cls: type[nn.Module]) -> nn.Module:
    """Unpickle: an empty module of the sharded class of `cls`."""
    return object.__new__(sharded_class(cls))  # type: ignore[arg-type]


@cache
def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of `cls`'s modules after `fully_shard`: `FSDP<Name>`, a subclass of both."""
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
