"""A module's forward with full tensors in the places of its parameters: one autograd node per unit, no dispatch.

A parameter that is used means its full value anywhere: `ShardedTensor` gathers at each use. Within the forward of its
own module, whose start and end are known, that is done once for all uses: the unit's full tensors stand in
`module._parameters` until the forward ends. Gradients come back through the one node to the sharded parameters, where
those of uses elsewhere come, too.

Autograd saves views of full tensors. It is given their place in the unit instead, by hooks that the root's forward
puts below all others, and gets them again, gathered, in backward: so nothing but the unit itself holds its memory.
Where all units stay gathered until their backward it keeps them as they are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from operator import add, attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import _disable_current_modes

from dshard.autograd import in_backward
from dshard.compiling import skipped
from dshard.errors import StateError
from dshard.gradients.backward import Backward, which_may_be_hooked
from dshard.layout import SMALL_GRAD_BYTES
from dshard.runtime.late import num_registrations
from dshard.runtime.unsharded import UnshardedDTensor, unsharded
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import TPShardLayout
from dshard.tensor.sharded_tensor import MixedShardedTensor, OffloadedShardedTensor
from dshard.units.context import ModelContext
from dshard.units.copies import FULL_TENSORS, FullTensors, SavedView, storage_address
from dshard.units.unit import Unit

_hooks = torch._C._autograd
_VERSION_OF = attrgetter("_version")
_STORAGE_OF = attrgetter("shard_storage")
_PARAMS_OF = attrgetter("params")
_NUM_WRITES = attrgetter("shard_storage.num_writes")
_USES_OF = Tensor._use_count  # type: ignore[attr-defined]
_KINDS = (ShardedTensor, MixedShardedTensor, OffloadedShardedTensor)
_DTENSORS = (DTensor, UnshardedDTensor)  # of tensor parallelism
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_CHECKPOINT = "torch.utils.checkpoint"
_FIRST = 2**64 - 2  # behind the accumulation of gradients alone
_NOTHING: AbstractContextManager[Any] = nullcontext()


class _Unshard(torch.autograd.Function):
    """From the sharded parameters of a unit to their full tensors."""

    @staticmethod
    def forward(
        ctx: Any, unit: Unit, slots: Sequence[int] | None, kind: "_Kind", uses: "_Uses | None", fulls: Any, *params: Any
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.unit, ctx.slots, ctx.uses = unit, slots, uses
        if uses is not None:
            ctx.params = slots if slots is not None else [param.gather_slot for param in params]
        return kind(fulls, params)

    @classmethod
    def of(
        cls,
        unit: Unit,
        slots: Sequence[int] | None,
        kind: "_Kind",
        fulls: Any,
        params: Sequence[Any],
        uses: "_Uses | None" = None,
    ) -> Any:
        """`apply` outside of the transforms of `torch.func`, for which torch's own looks at each argument."""
        return super(torch.autograd.Function, cls).apply(unit, slots, kind, uses, fulls, *params)  # type: ignore[misc]

    @staticmethod
    @skipped
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Has the full gradients of this rank reduced; where some may come from other uses, each parameter's hook."""
        unit: Unit = ctx.unit
        backward: Backward = unit.model.get(Backward)
        if ctx.uses is not None:
            ctx.uses.check(ctx.params)
            if ctx.uses.is_used:
                backward.note_use(unit)
        is_ordinary = not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        is_all = unit.num_unshards <= 1 and not unit.is_used_beside and ctx.slots is not None
        if not (is_ordinary and is_all) or unit.settings.num_slices > 1:
            return *_NO_GRADS, *grads
        with torch._C.DisableTorchFunctionSubclass():  # parameters are asked for much, and nothing is computed
            return *_NO_GRADS, *backward.receive_together(unit, ctx.slots, grads, ctx.next_functions)


_NO_GRADS = (None,) * 5  # of what `_Unshard.forward` takes ahead of parameters


class _Uses:
    """A forward's full tensors, where autograd keeps them as they are: whether parameters were written to since.

    Args:
        params: Of a unit.
    """

    __slots__ = ("_is_over", "_num_refs", "_num_writes", "_params", "_task")

    def __init__(self, params: Sequence[Any]) -> None:
        self._params, self._num_writes = params, list(map(_NUM_WRITES, params))
        self._num_refs = [2] * len(params)  # to each full tensor, as the forward ended: autograd's among them
        self._task = -1  # autograd's number of the backward that runs
        self._is_over: set[int] = set()  # numbers of parameters that it uses no more

    def end_forward(self, fulls: Sequence[Tensor]) -> None:
        """The forward has ended, and autograd keeps what it keeps."""
        self._num_refs = list(map(_USES_OF, fulls))

    def forgive(self, slots: Iterable[int]) -> None:
        """Some parameters were given what the forward itself has written to their full tensors, as autograd knows."""
        for slot in slots:
            self._num_writes[slot] = _NUM_WRITES(self._params[slot])

    @property
    def is_used(self) -> bool:
        """Whether the backward takes any of them."""
        return max(self._num_refs, default=0) > 1

    def check(self, slots: Sequence[int]) -> None:
        """Raise where autograd may have used a full tensor that is not the parameter's value any more.

        Args:
            slots: Of the parameters whose gradients are there: from now on an optimizer in backward may step them.
        """
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._is_over = task, set()
        now = list(map(_NUM_WRITES, self._params))
        if now != self._num_writes:
            for slot, (param, count, before) in enumerate(zip(self._params, now, self._num_writes, strict=True)):
                if count != before and self._num_refs[slot] > 1 and slot not in self._is_over:
                    raise RuntimeError(_WRITTEN.format(param.name))
        self._is_over.update(slots)


# Makes what stands in the places of parameters, of their full tensors and themselves.
_Kind = Callable[[Sequence[Tensor], Sequence[Any]], tuple[Any, ...]]


def _for_graphs(fulls: Sequence[Tensor], params: Sequence[Any]) -> tuple[Tensor, ...]:
    """What stands there where dynamo makes graphs: plain tensors, to `isinstance` parameters."""
    made: tuple[Any, ...] = tuple([full.detach() for full in fulls])
    for out in made:
        out._is_param = True
    return made


class _Place(NamedTuple):
    """Where a module holds a parameter of the unit.

    Args:
        parameters: `module._parameters`.
        name: There.
        slot: Of the parameter in the unit.
    """

    parameters: dict[str, Any]
    name: str
    slot: int


class Unsharding:
    """The forwards of one module over the parameters of one unit.

    The first one, in which uses gather, shows whether the module writes to its parameters in each forward, as masked
    convolutions and spectral norms do. Then it goes on so: such writes are of shards.

    Args:
        unit: The unit.
        module: One of its modules.
    """

    def __init__(self, unit: Unit, module: nn.Module) -> None:
        self._unit, self._module = unit, module
        self._params: list[Any] = []  # for which the places were looked up
        self._num_registrations = -1
        self._places: list[_Place] = []
        self._is_wrapper = "_orig_mod" in module._modules  # it is what torch.compile gives
        self._is_leaf = False  # no module within has a unit of its own
        # While a forward runs, for each parameter:
        self._fulls: list[Tensor] = []
        self._made: list[Any] = []  # what stands in its places
        self._versions: list[int] = []  # writes to that, before
        self._uses: _Uses | None = None  # of these, by what autograd keeps of them
        self._before: list[tuple[Any, int]] = []  # storages, and writes to them, when a forward over shards began
        self._writes = False  # in forwards, to parameters
        self._is_compiled = False  # graphs compute the forward that runs, or the last one that was open
        self._sums: list[Tensor] = []  # of full tensors, ahead of the first such forward
        self._depth = 0
        self._was_open = False  # in the last forward that was no recomputation

    def open(self, *, is_eager: bool) -> None:
        """The forward starts: put full tensors in place, if they are what comes next.

        Where dynamo makes graphs of it, these take full tensors from the first forward on, so that there is one graph
        for all steps; but where parts of it have units of their own, whose hooks run in no graph: then they take
        shards, and gather.
        """
        self._depth += 1
        if self._depth > 1:
            copies = self._unit.copies
            if self._made and not (copies.are_touched and copies.are_fresh()):
                raise StateError(
                    f"{self._unit.label}: a forward was interrupted, and has left full tensors of an earlier step in "
                    "the place of parameters. Call reset_iter_state() on the model, on all ranks."
                )
            return
        self._find_places()
        is_compiled = self._is_leaf and (self._is_wrapper or not is_eager)
        is_open = (is_eager or is_compiled) and self._is_due(is_compiled=is_compiled)
        if is_open:
            with _beside_modes():
                self._put(_for_graphs if is_compiled else unsharded)
                if is_compiled and not self._is_compiled:
                    self._sums = list(map(_sum_of_bits, self._fulls))
            self._is_compiled = is_compiled
        elif not self._writes:
            self._before = [(storage, storage.num_writes) for storage in map(_STORAGE_OF, self._unit.params)]
        if not in_backward():
            self._was_open = is_open

    def open_again(self, around: "Unsharding", *, is_eager: bool) -> None:
        """A checkpointed region runs again in backward: put full tensors in place if the forward around it had them.

        Args:
            around: Of the module within which the region lies, whose own hooks do not run again.
            is_eager: As for `open`.
        """
        if not around._depth:
            self._was_open = around._was_open
            self.open(is_eager=is_eager)

    def _is_due(self, *, is_compiled: bool) -> bool:
        """Whether the forward uses the unit now, as far as is known, and in the ordinary way."""
        unit, model = self._unit, self._unit.model
        if (
            self._writes
            or not self._places
            or unit.num_pins
            or unit.extensions is not None
            or unit.settings.num_slices > 1
            or unit.casts_are_learned
        ):
            return False
        if model.forwards.is_autocasting or unit in model.regions.units or model.regions.open_label is not None:
            return False
        if peek_interpreter_stack() is not None or torch._C._get_dispatch_mode(_FAKE) is not None:
            return False
        if in_backward():
            return self._was_open
        if torch.is_grad_enabled() and not model.get(Unshardings).is_open:
            return False
        return is_compiled or unit.copies.are_touched or model.schedule.expects(unit)

    def _find_places(self) -> None:
        """Look up where the module and those in it hold the unit's parameters, once for each change of these."""
        unit = self._unit
        if self._num_registrations == num_registrations() and self._params is unit.params:
            return
        self._num_registrations, self._params = num_registrations(), unit.params
        self._places = []
        if not all(type(param) in _KINDS for param in unit.params):
            return
        slots = {id(param): slot for slot, param in enumerate(unit.params)}
        if TPShardLayout.num_made and any(
            map(_is_tensor_parallel, chain.from_iterable(map(_PARAMS_OF, unit.model.units)))
        ):
            # Beside DTensors of any mesh other parameters mean ones that are replicated over it: they stay as they are.
            slots = {id(param): slot for slot, param in enumerate(unit.params) if _is_beside_data(param)}
        modules = list(self._module.modules())
        tops = (each for each in modules if each._compiled_call_impl or "_orig_mod" in each._modules)
        compiled = {inner for top in tops for inner in top.modules()}
        self._is_leaf = not any("_dshard_units" in each.__dict__ for each in modules if each is not self._module)
        # Within others, a checkpoint may run what was compiled again, without hooks: it takes shards then and now.
        is_own = self._is_leaf and self._module in compiled and not any(map(_is_tensor_parallel, unit.params))
        for module in modules:
            if module in compiled and not is_own:
                continue
            # An embedding that writes to its weight, on the rows that any rank looks up; a module that keeps a list.
            if getattr(module, "max_norm", None) is not None or isinstance(module, nn.RNNBase):
                continue
            for name, param in module._parameters.items():
                if id(param) in slots:
                    self._places.append(_Place(module._parameters, name, slots[id(param)]))

    def _put(self, kind: _Kind) -> None:
        """Gather, and put full tensors in the place of the sharded parameters."""
        unit = self._unit
        if not unit.is_plain:
            unit.was_unsharded = True
            unit.model.forwards.regions.note_use(unit.model.forwards)
        fulls, params = unit.copies.fulls(), unit.params
        made: list[Any] = [None] * len(params)
        if not torch.is_inference_mode_enabled():
            self._record(kind, fulls, made)
        if missing := [slot for slot, full in enumerate(made) if full is None]:
            given = kind([fulls[slot] for slot in missing], [params[slot] for slot in missing])
            for slot, full in zip(missing, given, strict=True):
                made[slot] = full
        self._fulls, self._made, self._versions = fulls, made, _versions_of(made)
        for parameters, name, slot in self._places:
            if parameters.get(name) is params[slot]:  # else torch.func.functional_call has put another one there
                parameters[name] = made[slot]

    def _record(self, kind: _Kind, fulls: Sequence[Tensor], made: list[Any]) -> None:
        """Make the full tensors of trainable parameters, most of them through one autograd node.

        By themselves are those with hooks of the program, for a node runs where any of its results was used; and, where
        large gradients are packed as they come rather than kept until all are there, those that have large ones.
        """
        unit, params, trainable = self._unit, self._unit.params, self._unit.trainable
        watched = which_may_be_hooked(unit, trainable)
        together = [slot for slot in trainable if slot not in watched] if watched else trainable
        apart: list[int] = []
        if not unit.has_streams:
            apart = [slot for slot in together if fulls[slot].nbytes > SMALL_GRAD_BYTES]
            together = [slot for slot in together if slot not in apart] if apart else together
        unit.num_unshards += torch.is_grad_enabled() and not in_backward()
        self._uses = _Uses(params) if unit.model.get(Unshardings).keeps_values else None
        with torch.enable_grad():
            # First, so that its gradient comes last: a hook that reads it has those of the unit leave.
            for slot in sorted(watched):
                (made[slot],) = _Unshard.of(unit, None, kind, [fulls[slot]], [params[slot]], self._uses)
            for slots in (together, *([slot] for slot in apart)):
                if slots:
                    own = [params[slot] for slot in slots]
                    given = _Unshard.of(unit, slots, kind, [fulls[slot] for slot in slots], own, self._uses)
                    for slot, full in zip(slots, given, strict=True):
                        made[slot] = full
            for slot in apart:
                _run_early(made[slot].grad_fn)

    def close(self) -> None:
        """The forward ended, by a result or an exception: put the sharded parameters back."""
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        params = self._unit.params
        if self._before:
            before, self._before = self._before, []
            now = [(storage, storage.num_writes) for storage in map(_STORAGE_OF, params)]
            self._writes = any(a is not b or i != j for (a, i), (b, j) in zip(before, now, strict=False))
        made, self._made = self._made, []
        uses, self._uses = self._uses, None
        if uses is not None:
            uses.end_forward(made)
        for parameters, name, slot in self._places if made else ():
            if parameters.get(name) is made[slot]:
                parameters[name] = params[slot]
        written: dict[int, Any] = {}
        versions, self._versions = self._versions, []
        if (found := _versions_of(made)) != versions:
            written = {slot: full for slot, full in enumerate(made) if found[slot] != versions[slot]}
        slots = [*written, *self._slots_of_other_bits()] if self._is_compiled else ()
        self._fulls = []
        if slots:
            raise StateError(
                f"{params[slots[0]].name}: a module that is compiled must not write to its parameters in its forward, "
                "for graphs take full tensors, but this one does. Leave it uncompiled."
            )
        if written:
            self._writes = True
            self._write_back(written)
            if uses is not None:
                uses.forgive(written)

    def _slots_of_other_bits(self) -> list[int]:
        """The full tensors that the first forward of graphs has written to, for they may hide that from counters."""
        before, self._sums = self._sums, []
        if not before:
            return []
        differs = torch.stack([a != _sum_of_bits(full) for a, full in zip(before, self._fulls, strict=True)])
        return [slot for slot, is_other in enumerate(differs.tolist()) if is_other]

    def reset(self) -> None:
        """No forward runs any more: one that was interrupted has left its full tensors in place."""
        self._depth = 1
        self.close()

    def _write_back(self, written: Mapping[int, Any]) -> None:
        """Have writes to full tensors reach the shards."""
        unit = self._unit
        for slot, full in written.items():
            param = unit.params[slot]
            is_exact = full.dtype == param.storage_dtype
            if not is_exact or unit.copies.are_once_per_host:
                why = "other ranks read the same memory" if is_exact else "it is a rounded copy"
                raise StateError(
                    f"{param.name}: a write to a parameter within its module's forward must reach the shards, but this "
                    f"one, the first there, was to the full tensor, and {why}. Write ahead of the forward or after it; "
                    "or in each forward from the first one on."
                )
            with torch.no_grad():
                param.copy_(full.detach())


def _is_tensor_parallel(param: Any) -> bool:
    return type(param.shard_storage.layout) is TPShardLayout


def _is_beside_data(param: Any) -> bool:
    """Whether a parameter lies over a mesh of tensor parallelism that has no dim of data parallelism."""
    return _is_tensor_parallel(param) and not param.shard_storage.layout.tp.data_dims


def _versions_of(made: Sequence[Any]) -> list[int]:
    """How often each full tensor was written to; of a DTensor through itself or its local tensor."""
    versions = list(map(_VERSION_OF, made))
    if TPShardLayout.num_made:
        local = [full._local_tensor._version if isinstance(full, DTensor) else 0 for full in made]
        versions = list(map(add, versions, local))
    return versions


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """One number that nearly any write to a tensor changes."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize)
    values = tensor.detach() if bits is None else tensor.detach().view(bits)
    return values.sum()


class Unshardings:
    """Those of a model; while its root's forward runs, autograd saves places in units rather than their memory.

    Where no unit is resharded before its backward, it saves full tensors as they are: then they are in memory anyway,
    and hooks at each tensor that is saved would cost the host time for nothing. A frozen unit has no gradient that
    would tell of its backward, so that hooks must.

    Args:
        context: Of the model.

    Attributes:
        is_open: Whether full tensors may stand in the places of parameters while autograd records.
        keeps_values: Whether it saves them as they are.
    """

    def __init__(self, context: ModelContext) -> None:
        self.is_open = self.keeps_values = False
        self._context = context
        self._num_roots = 0  # forwards of the root that run
        context.unshard_again = _unshard_again

    def of(self, unit: Unit, module: nn.Module) -> Unsharding:
        """That of a module and a unit."""
        known: Unsharding | None = unit.unshardings.get(module)
        if known is None:
            known = unit.unshardings[module] = Unsharding(unit, module)
        return known

    def begin(self, module: nn.Module) -> None:
        """A module's forward starts."""
        if module is not self._context.root:
            return
        self._num_roots += 1
        if self._num_roots > 1 or not torch.is_grad_enabled() or in_backward() or peek_interpreter_stack() is not None:
            return
        below = _hooks._top_saved_tensors_default_hooks(True)  # noqa: FBT003 - it takes no name
        if below is not None and getattr(below[0], "__module__", "") == _CHECKPOINT:
            return  # which counts what is saved, then and when it computes it again
        self.is_open, self.keeps_values = True, below is None and self._all_stay()
        if self.keeps_values:
            return
        _hooks._push_saved_tensors_default_hooks(*(_hooks_over(*below) if below is not None else _HOOKS))
        _Transforms.begin()

    def _all_stay(self) -> bool:
        """Whether all units stay gathered from forward to backward, and each has gradients that tell of the latter."""
        eviction = self._context.eviction
        if isinstance(self._context.settings.memory_budget, int):
            return False
        for unit in filter(_PARAMS_OF, self._context.units):
            if unit.is_frozen or (not (unit.is_plain and unit.is_whole) and eviction.reshards(unit)):
                return False
        return True

    def end(self, module: nn.Module) -> None:
        """It ended."""
        if module is not self._context.root:
            return
        self._num_roots = max(0, self._num_roots - 1)
        if not self._num_roots:
            self._take_off()

    def _take_off(self) -> None:
        if not self.is_open:
            return
        self.is_open, has_hooks = False, not self.keeps_values
        self.keeps_values = False
        if has_hooks:
            _Transforms.end()
            _hooks._pop_saved_tensors_default_hooks()
        self._context.forwards.await_backward(is_awaited=any(unit.was_unsharded for unit in self._context.units))

    def reset(self) -> None:
        """No forward runs any more, whatever the last one has left behind."""
        self._num_roots = 0
        self._take_off()
        for known in [known for unit in self._context.units for known in unit.unshardings.values()]:
            known.reset()


def _unshard_again(unit: Unit, slot: int) -> Tensor:
    """The full tensor of one parameter, for one use of it in a part of a forward that runs again."""
    with _beside_modes():
        fulls = unit.copies.fulls()
        full: Tensor = _Unshard.of(unit, None, unsharded, [fulls[slot]], [unit.params[slot]])[0]
    return full


class _Saved(NamedTuple):
    """A view of a full tensor, as autograd keeps it.

    Args:
        param: The sharded parameter.
        num_writes: To its shard, so far.
        view: Which part of the full tensor it is.
    """

    param: Any
    num_writes: int
    view: SavedView


class _SavedDTensor(NamedTuple):
    """A view of a full tensor that is a DTensor over the mesh of tensor parallelism.

    Args:
        local: Its local tensor.
        spec: How it lies over that mesh.
    """

    local: _Saved
    spec: DTensorSpec


class _Kept(NamedTuple):
    """Any other tensor that was written to before it was saved.

    Args:
        tensor: The tensor.
        version: Counts the writes to it, so far.
    """

    tensor: Tensor
    version: int


_new: Any = tuple.__new__  # of what is made at each tensor that autograd saves: a NamedTuple's own takes twice as long
_Hook = Callable[[Any], Any]


@skipped
def _pack(tensor: Tensor) -> Any:
    """What autograd keeps in the place of a tensor: its place in a unit, or the tensor.

    It is what `_hooks_over` makes, written out, for it runs at each tensor that autograd saves. Others are kept without
    their history, for a result that an operation saves would keep the operation alive. Most were never written to, and
    are kept as they are: each object of Python's that lives until backward is work for the garbage collector.
    """
    try:
        known = FULL_TENSORS.get(storage_address(tensor))
    except NotImplementedError:  # a sparse tensor has no storage
        known = None
    if known is not None and (saved := _saved(tensor, known())) is not None:
        return saved
    kind = type(tensor)
    if kind is not Tensor and kind in _DTENSORS and (saved_dtensor := _saved_dtensor(tensor)) is not None:
        return saved_dtensor
    if tensor.requires_grad and (kind is Tensor or not isinstance(tensor, ShardedTensor)):
        tensor = tensor.detach()  # but for views of sharded ones, which are no results
    version = tensor._version
    return _new(_Kept, (tensor, version)) if version else tensor


@skipped
def _unpack(saved: Any) -> Tensor:
    """The tensor that was kept. Where there are hooks, autograd leaves it to them to notice a write to it."""
    kind = type(saved)
    if kind is _Saved:
        return _restored(saved)
    if kind is not _Kept:
        if kind is _SavedDTensor:
            return DTensor(_restored(saved.local), saved.spec, requires_grad=False)
        if not saved._version:
            return saved
        saved = saved, 0
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(_CHANGED.format(tensor.type(), list(tensor.shape), tensor._version, version))
    return tensor


def _hooks_over(pack_below: _Hook, unpack_below: _Hook) -> tuple[_Hook, _Hook]:
    """Hooks that save places in units, and all else as the hooks below them do."""

    @skipped
    def pack(tensor: Tensor) -> Any:
        try:
            known = FULL_TENSORS.get(storage_address(tensor))
        except NotImplementedError:
            known = None
        saved: Any = _saved(tensor, known()) if known is not None else None
        if type(tensor) in _DTENSORS:
            saved = _saved_dtensor(tensor)
        return pack_below(tensor) if saved is None else saved

    pack.is_own = True  # type: ignore[attr-defined]

    @skipped
    def unpack(saved: Any) -> Any:
        if type(saved) is _SavedDTensor:
            return DTensor(_restored(saved.local), saved.spec, requires_grad=False)
        return _restored(saved) if type(saved) is _Saved else unpack_below(saved)

    return pack, unpack


def _run_early(node: Any) -> None:
    """Have autograd run a node as soon as its gradients are there, ahead of all that was recorded later.

    torch calls that its sequence number, of which the highest goes first. Without it nothing but memory is lost.
    """
    if hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(_FIRST)


_HOOKS: tuple[_Hook, _Hook] = _pack, _unpack
_pack.is_own = True  # type: ignore[attr-defined]


class _Transforms:
    """Lets transforms of `torch.func` run within a forward: they refuse to begin where autograd has hooks.

    They ask by `torch.autograd.graph.disable_saved_tensors_hooks`. While a root's forward runs, another function is in
    its place, which takes the hooks above off for as long as the transform runs. What it saves is kept as it is.
    """

    num_open: ClassVar[int] = 0
    torchs: ClassVar[Any] = torch.autograd.graph.disable_saved_tensors_hooks

    @classmethod
    def begin(cls) -> None:
        """Hooks were put on."""
        cls.num_open += 1
        if cls.num_open == 1:
            cls.torchs = torch.autograd.graph.disable_saved_tensors_hooks
            torch.autograd.graph.disable_saved_tensors_hooks = _without_own_hooks

    @classmethod
    def end(cls) -> None:
        """They were taken off."""
        cls.num_open -= 1
        if not cls.num_open:
            torch.autograd.graph.disable_saved_tensors_hooks = cls.torchs


@contextmanager
def _without_own_hooks(error_message: str) -> Iterator[None]:
    taken = []
    while (top := _hooks._top_saved_tensors_default_hooks(True)) is not None and hasattr(top[0], "is_own"):  # noqa: FBT003
        taken.append(top)
        _hooks._pop_saved_tensors_default_hooks()
    try:
        with _Transforms.torchs(error_message):
            yield
    finally:
        for pair in reversed(taken):
            _hooks._push_saved_tensors_default_hooks(*pair)


_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{} {}] is at "
    "version {}; expected version {} instead. Hint: enable anomaly detection to find the operation that failed to "
    "compute its gradient, with torch.autograd.set_detect_anomaly(True)."
)  # as autograd says it


_WRITTEN = (
    "{}: one of the variables needed for gradient computation has been modified by an inplace operation: this "
    "parameter was written to between its use in forward and the backward. Write to it after the backward."
)


def _saved(tensor: Tensor, place: FullTensors | None) -> _Saved | None:
    """What stands for a tensor in the memory of a unit's full tensors; None for what is no view of one of them.

    Args:
        tensor: That is to be saved.
        place: These full tensors; None where they are no more.
    """
    view = place.view_of(tensor) if place is not None else None
    if place is None or view is None:
        return None
    index = view.index
    if place.fulls[index]._version != place.versions[index]:
        return None  # a forward has written to it: the shards may get other values yet
    param = place.params[index]
    return _new(_Saved, (param, param.shard_storage.num_writes, view))


def _restored(saved: _Saved) -> Tensor:
    """The tensor that was saved, of what is gathered in backward."""
    param, num_writes, view = saved
    if param.shard_storage.num_writes != num_writes:
        raise RuntimeError(_WRITTEN.format(param.name))
    if torch._C._len_torch_dispatch_stack():
        with _disable_current_modes():  # a checkpoint's counts operations, to find them again
            return view.of(param.gather_source.full_in_backward(param.gather_slot, view.dtype))
    return view.of(param.gather_source.full_in_backward(param.gather_slot, view.dtype))


def _saved_dtensor(tensor: Any) -> _SavedDTensor | None:
    """As `_saved`, of a DTensor; its local tensor lies in the memory of the unit, if anything does."""
    local = tensor._local_tensor
    known = FULL_TENSORS.get(storage_address(local))
    saved = _saved(local, known()) if known is not None else None
    return _SavedDTensor(saved, tensor._spec) if saved is not None else None


def _beside_modes() -> AbstractContextManager[Any]:
    """No dispatch mode of the program sees what is done: a checkpoint's counts operations, to find them again."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else _NOTHING
