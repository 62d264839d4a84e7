"""`ShardedTensor`: a tensor that is cut over ranks and always means its full value, also mixed and offloaded."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import _disable_current_modes

from dshard import collectives
from dshard.collectives import GatherPlan, ShardGroup, shard_of
from dshard.errors import PlacementError, StateError, UnsupportedOpError
from dshard.interpreter import module_that_called
from dshard.layout import BucketLayout, ShardLayout
from dshard.policies import Offload, Precision
from dshard.tensor.meshes import (
    LocalTensor,
    gathered_stride,
    group_of,
    is_in_forward,
    lie_of,
    part_of,
    place_among_ranks,
    placements_of,
    tp_layout_of,
    tp_operand,
    viewed,
    whole,
)
from dshard.tensor.storage import (
    GatherSource,
    Origin,
    ShardStorage,
    Use,
    is_stepping,
    is_used_away,
    rebuild,
    rejoin_source,
)
from dshard.tensor.subclass_shards import FullTensor, check_traceable, exact_values
from dshard.tensor.views import View, ViewMeta, ViewStep, dense_stride, empty_of, restrided

_EXACT, _FORWARD = "_dshard_exact_use", "_dshard_forward"  # of a context of tracing: a parameter's name; whether


def _grad(tensor: Any) -> Tensor | None:
    if TracingContext.try_get() is not None:
        source = tensor.gather_source
        if source is not None and source.is_running and not getattr(source, "is_traced", False):
            return None
    return _GRAD.__get__(tensor)


_GRAD: Any = Tensor.grad  # descriptor
# To a graph that is traced in a forward, parameters have no gradients: it needs none, to look at them is to wait for
# their reduction, and dynamo takes none of another dtype than the parameter has there.
GRAD: Any = property(_grad, _GRAD.__set__, _GRAD.__delete__)


class _Meta(TensorMeta):
    """A TensorMeta, equal to that of the parameter, with the dtype that it has in the graph."""

    compute: torch.dtype


def telling(flattened: tuple[list[str], tuple[Any, ...]], compute: torch.dtype) -> tuple[list[str], tuple[Any, ...]]:
    """What `DTensor.__tensor_flatten__` gives, with the compute dtype in it."""
    attributes, (first, *rest) = flattened
    if isinstance(first, DTensorSpec):  # older releases of torch
        spec = DTensorSpec(first.mesh, first.placements, tensor_meta=_meta(first.tensor_meta, compute))
        return attributes, (spec, *rest)
    meta, *rest = rest
    return attributes, (first, _meta(meta, compute), *rest)


def _meta(meta: TensorMeta | None, compute: torch.dtype) -> TensorMeta:
    assert meta is not None
    told = _Meta(*meta)
    told.compute = compute
    return told


def dtype_in_graph(meta: TensorMeta) -> torch.dtype:
    """The dtype that a tensor has in the graph."""
    return meta.compute if isinstance(meta, _Meta) else meta.dtype


def note_exact_use(name: str) -> None:
    """The graph that is being traced takes a parameter under mixed precision as it is kept: outside of any forward."""
    context = TracingContext.get()
    setattr(context, _EXACT, name)
    _check(context)


def note_forward_in_graph() -> None:
    """The graph that is being traced runs a whole forward, of which the runtime is not told."""
    context = TracingContext.try_get()
    if context is not None:
        setattr(context, _FORWARD, True)
        _check(context)


def _check(context: TracingContext) -> None:
    name = getattr(context, _EXACT, None)
    if name is not None and getattr(context, _FORWARD, False):
        raise StateError(
            f"{name}: under mixed precision (mp_policy) a parameter has its compute dtype in a forward, but "
            "torch.compile of a function that calls the model starts ahead of that. Compile the model, by "
            "model.compile(), or its blocks, by block.compile()."
        )


_NEW: Any = torch.Tensor._dtensor__new__
_DTYPE: Any = torch.Tensor.dtype  # descriptors; autograd and torch's own code go by them
_DEVICE: Any = torch.Tensor.device
_TRACING = 3  # changes with the rules by which graphs are traced, which torch keeps on disk


class ShardedBase(DTensor):
    """What every ShardedTensor holds and tells; how it is made of others, gathered and written to is in that class."""

    kin: ClassVar["type[ShardedTensor]"]  # what descends from one of this class: gradients, states, copies
    shard_storage: ShardStorage
    shard_group: ShardGroup
    given_name: str
    gather_source: GatherSource | None = None
    gather_slot: int = -1
    _view: View | None = None
    origin: Origin | None = None
    known_views: dict[Any, Any] | None = None
    swapped_source: tuple[GatherSource, int] | None = None  # where it belongs if a swap puts it in its origin's place
    is_added_up: bool = False  # as a gradient: already part of the buffer that `.grad` awaits
    grad_hook_handle: Any = None
    spec_in_dtype: Any = None  # its description, and that with the dtype that was asked for last
    stands_for: Any = None  # of a gradient that names another dtype, the one with the right name
    wire_precision: Precision | None = None  # of a parameter, in which dtypes it travels
    _kind: Any = None  # of a class made for precedence, the one that it stands for
    base_place: tuple[DeviceMesh, int | None] | None = None  # mesh and dim that a strategy starts from
    plain_class: type[Tensor] | None = None  # of the parameter that it has replaced
    plain: Any = None  # the plain parameter that has replaced it
    has_compute_dtype: bool = False
    is_used_in_functions: bool = False  # in a forward, without autograd: in that of a custom function, maybe
    is_routed: bool = False  # a gradient of it came by its hook, to be accumulated
    is_node_known: bool = False  # autograd's, at which its gradient arrives: to a program, maybe
    is_used_exactly: bool = False  # outside of any forward, with autograd

    @classmethod
    def wrap(
        cls,
        storage: ShardStorage,
        spec: DTensorSpec,
        group: ShardGroup,
        *,
        name: str = "",
        prototype: Tensor | None = None,
        requires_grad: bool = False,
    ) -> Self:
        """Make a ShardedTensor around a shard.

        Args:
            storage: The shard and how it is cut.
            spec: DTensor's description: mesh, placements, and the shape, strides and dtype of the full tensor.
            group: The ranks that hold it.
            name: For messages.
            prototype: Plain tensor of the dtype and device; needed while the shard is in flight.
            requires_grad: As of any tensor.

        Communicates:
            Nothing.
        """
        local = prototype if prototype is not None else storage.resolve()
        if local.storage_offset():  # which would become this one's: torch.compile takes apart only what starts at 0
            local = empty_of(local.dtype, local.device)
        self: Self = _NEW(cls, local, spec, requires_grad=requires_grad)  # what DTensor's own __new__ calls
        self._spec = spec
        self.shard_storage, self.shard_group, self.given_name = storage, group, name
        return self

    def alias(self) -> Self:
        """Another tensor object over the same shard, as `detach()` gives."""
        storage, prototype = self.shard_storage, self._prototype()
        out = type(self).wrap(storage, self._spec, self.shard_group, name=self.given_name, prototype=prototype)
        if self.gather_source is not None:
            out.gather_source, out.gather_slot = self.gather_source, self.gather_slot
            if self.has_compute_dtype:
                out.has_compute_dtype, out.wire_precision = True, self.wire_precision
        if self._view is not None:
            out._view = self._view
        if self.origin is not None:
            out.origin = self.origin
        if self.swapped_source is not None:
            out.swapped_source = self.swapped_source
        if self.is_added_up:
            out.is_added_up = True
        if self.stands_for is not None:
            out.stands_for = self.stands_for
        return out

    def awaiting(self, storage: ShardStorage) -> "ShardedTensor":
        """A tensor of this one's layout around a shard that is in flight, as a gradient is."""
        spec, meta = self._spec, self._spec.tensor_meta
        assert meta is not None
        # What `wrap` does, without what it asks: one is made for each gradient.
        out: ShardedTensor = _NEW(self.kin, empty_of(meta.dtype, _DEVICE.__get__(self)), spec, requires_grad=False)
        out._spec = spec
        out.shard_storage, out.shard_group, out.given_name = storage, self.shard_group, self.given_name
        return out

    def view_spec(self, meta: ViewMeta, lie: Placement | None = None) -> DTensorSpec:
        """DTensor's description of a view, which lies so along each dim of the mesh; by default it is replicated."""
        mesh, tensor_meta = self._spec.mesh, TensorMeta(meta.shape, meta.stride, meta.dtype)
        return DTensorSpec(mesh, (lie or Replicate(),) * mesh.ndim, tensor_meta=tensor_meta)

    def _prototype(self) -> Tensor:
        """A plain tensor of this one's dtype and device, without waiting for a shard in flight."""
        tensor, meta = self.shard_storage.tensor, self._spec.tensor_meta
        assert meta is not None
        if tensor is not None and tensor.dtype == meta.dtype:
            return tensor
        return empty_of(meta.dtype, self.storage_device)

    @property
    def name(self) -> str:
        """Name for messages: the parameter's, or that of the one it descends from."""
        return self.given_name or "a ShardedTensor"

    @property
    def shard_layout(self) -> ShardLayout:
        """How the tensor, or for a view its base, is cut."""
        return self.shard_storage.layout

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How the tensor, or for a view its base, lies over each dim of the mesh."""
        return lie_of(self.shard_storage.layout, self._spec.mesh)

    is_view: Any = property(lambda self: self._view is not None, doc="Whether it is a lazy view of another one.")

    # DTensor's slot; reading it waits for a shard in flight, so that nobody reads memory that has not arrived.
    @property
    def _local_tensor(self) -> Tensor:
        return self.shard_storage.exposed()

    @_local_tensor.setter
    def _local_tensor(self, value: Tensor) -> None:
        storage = self.__dict__.get("shard_storage")
        if storage is not None:  # else torch's constructor, ahead of `wrap`
            storage.deliver(value)

    @property
    def base(self) -> Self:
        """What a view views, or the tensor itself."""
        return self if self._view is None else self._view.base

    @property
    def view_steps(self) -> tuple[ViewStep, ...]:
        """The steps from the base to a view."""
        return () if self._view is None else self._view.steps

    def pinned_copy(self) -> Tensor | None:
        """The gathered copy that an open scope holds, if one does."""
        source = self.gather_source
        return source.pinned(self.gather_slot) if source is not None and self._view is None else None

    def __repr__(self) -> str:  # type: ignore[override]
        kind = "view, " if self._view is not None else ""
        where = "whole on" if self.shard_layout.dim is None else f"dim {self.shard_layout.dim} over"
        return (
            f"ShardedTensor({self.given_name!r}, {kind}shape={tuple(self.shape)}, dtype={self.dtype}, {where} "
            f"{self.shard_layout.num_ranks} ranks, device='{self.device}', requires_grad={self.requires_grad})"
        )

    def _dtype_here(self) -> torch.dtype:
        """The dtype of its value where it is used now."""
        return (self.compute_dtype() if self.has_compute_dtype else None) or self.storage_dtype

    dtype: Any = property(_dtype_here)

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype of its shards; of a view, that of its elements."""
        return _DTYPE.__get__(self)

    def compute_dtype(self) -> torch.dtype | None:
        """The dtype that it has in the forward that is running, where that is not the one it is kept in; of no view."""
        source = self.own_source if self.has_compute_dtype and self._view is None else None
        return source.compute_dtype(self.gather_slot) if source is not None else None

    @property
    def storage_device(self) -> torch.device:
        """The device of its shard."""
        return self.device

    @property
    def offload(self) -> Offload | None:
        """Where a parameter is kept and used, if those are two places."""
        return self.wire_precision.offload if self.wire_precision is not None else None

    def computes(self) -> bool:
        """Whether a use of it here means its value in the compute dtype."""
        if self._view is not None:
            return self._view.computes
        source = self.own_source if self.has_compute_dtype else None
        return source is not None and source.computes(self.gather_slot)

    @property
    def own_source(self) -> GatherSource | None:
        """The unit that gathers it; none does a detached alias of a parameter whose `.data` was replaced."""
        source = self.gather_source
        is_own = source is not None and source.params[self.gather_slot].shard_storage is self.shard_storage
        return source if is_own else None

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """This rank's shard: the memory itself, outside of autograd.

        But of a DTensor parameter, within a forward of its unit: its local tensor over its own mesh, with gradients, as
        expert parallelism computes with it under FSDP2. That is lazy and is gathered at its use.

        Args:
            grad_placements: Of the gradient in that case; by default the parameter's own over that mesh.

        Raises:
            UnsupportedOpError: On a lazy view, whose elements on this rank are not a tensor of their own.

        Communicates:
            Nothing; waits for a gradient that is in flight.
        """
        if is_in_forward(self) and not self.is_view:
            return LocalTensor.apply(self, grad_placements)
        if self.is_view:
            raise UnsupportedOpError(
                f"{self.name}: to_local needs a tensor that is itself sharded, but this is a view of one (shape "
                f"{tuple(self.shape)}). Use full_tensor(), or to_local() of the tensor that was viewed."
            )
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The full value as a plain tensor of the caller's own, equal on all ranks; differentiable.

        Args:
            grad_placements: Accepted for DTensor's sake; has no meaning here.

        Communicates:
            As `materialize`.
        """
        return FullTensor.apply(self)

    def redistribute(self, device_mesh: DeviceMesh | None = None, placements: Any = None, **_: Any) -> DTensor:
        """This tensor in other placements: its own, or replicated.

        Raises:
            UnsupportedOpError: For any other placement or mesh.
        """
        placements = tuple(placements) if placements is not None else self.placements
        same_mesh = device_mesh is None or device_mesh == self.device_mesh
        if same_mesh and placements == self.placements and not self.is_view:
            return self
        if same_mesh and all(isinstance(p, Replicate) for p in placements):
            return DTensor.from_local(self.full_tensor(), self.device_mesh, placements, run_check=False)
        raise UnsupportedOpError(
            f"{self.name}: a ShardedTensor can be redistributed to Replicate() on its own mesh, but {placements} was "
            "asked. Use full_tensor() and distribute_tensor()."
        )

    def data_ptr(self) -> int:
        """Address of the gathered memory while `dshard.gathered` holds it.

        Raises:
            UnsupportedOpError: Outside of that scope, where no memory holds the full value.
        """
        full = self.pinned_copy()
        if full is None or isinstance(full, DTensor):
            raise UnsupportedOpError(
                f"{self.name}: a raw pointer needs memory that holds the full value, but this tensor is sharded over "
                f"{self.device_mesh.size()} ranks. Take it inside `with dshard.gathered(module):`, or use "
                "full_tensor(); to write a model to a file (save_pretrained, safetensors), call "
                "dshard.save_safetensors(model, dir) on every rank."
            )
        return int(full.data_ptr())

    def storage(self) -> Any:
        """Raises: no memory holds the full value. `untyped_storage()`, which torch itself asks for, has no pointer."""
        raise StateError(  # safetensors takes a NotImplementedError for a tensor without values
            f"{self.name}: storage() needs memory that holds the full value, but this tensor is sharded over "
            f"{self.device_mesh.size()} ranks. Use full_tensor(), or to_local().untyped_storage(); to write a model to "
            "a file, call dshard.save_safetensors(model, dir) on every rank, or pass save_pretrained a state_dict of "
            "dshard.interop.full_state_dict(model)."
        )

    def __format__(self, format_spec: str) -> str:
        """As of any tensor: a single number by its value, anything else without a format by its repr."""
        return format(self.item(), format_spec) if not self.dim() else object.__format__(self, format_spec)

    def numpy(self, *, force: bool = False) -> Any:
        """A NumPy copy of the full value, read-only, for writes to it would be lost; `force` detaches first."""
        array = self.full_tensor().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """The full value as nested lists."""
        return self.full_tensor().tolist()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.full_tensor().__dlpack__(**kwargs)

    def __array__(self, dtype: Any = None) -> Any:
        array = self.full_tensor().__array__(dtype)
        array.flags.writeable = False
        return array

    def share_memory_(self) -> Any:
        """Raises: a sharded tensor has no memory of its own to share; `to_local()` has."""
        raise UnsupportedOpError(
            f"{self.name}: share_memory_ needs memory that holds the full value, but this tensor is sharded over "
            f"{self.device_mesh.size()} ranks. Share to_local(), or full_tensor()."
        )

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.full_tensor().__cuda_array_interface__

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """What torch.compile takes apart: the shard, and DTensor's own description, on which it insists.

        Raises:
            StateError: While a graph is traced, for what it cannot take in: a lazy view, a DTensor parameter, a
                parameter under mixed precision both in a forward and outside.
        """
        flattened: tuple[list[str], tuple[Any, ...]] = DTensor.__tensor_flatten__(self)
        if TracingContext.try_get() is None:
            return flattened
        ShardedBase.grad = GRAD
        check_traceable(self)
        with _disable_current_modes():
            self.shard_storage.resolve()  # a gradient that is in flight
        if not self.has_compute_dtype:
            return flattened
        compute = self.compute_dtype()
        if compute is None:
            note_exact_use(self.name)
            return flattened
        return telling(flattened, compute)

    def _stable_hash_for_caching(self) -> str:
        """Tells apart, for torch's cache of graphs, what is traced differently: a rank's shard has its own size."""
        shard = self.shard_storage.resolve()
        facts = _TRACING, type(self).__name__, self.storage_dtype, tuple(shard.shape), shard.stride(), shard.dtype
        return f"{DTensor._stable_hash_for_caching(self)} {facts}"


_ALIASES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
_DATA: Any = torch.Tensor.data  # descriptors
REQUIRES_GRAD: Any = torch.Tensor.requires_grad


class ShardedTensor(ShardedBase):
    """A tensor of which every rank holds a shard, and which means its full value wherever it is used.

    An operation that can be computed on the shards runs on the shards; views are lazy; every other operation gathers,
    uses and forgets. `shape`, `dtype`, `device`, `numel()` and `repr` are those of the full tensor and never
    communicate. Parameters become ShardedTensors through `fully_shard`; gradients, optimizer states and copies of them
    are ShardedTensors of the same layout.

    Source: the class is a subclass of torch's DTensor, so that distributed checkpoints and the rest of the ecosystem
    know it; its dispatch is its own.
    """

    # `swap_tensors` swaps slots after dicts; what `_local_tensor` reads lies in the dict, and must not be swapped back.
    __slotnames__: ClassVar[list[str]] = ["_spec"]

    _dispatch: ClassVar[Callable[..., Any]]  # bound by dshard.tensor, which knows both the class and the op table
    _dispatch_beside: ClassVar[Callable[..., Any]]  # the same, where a plain DTensor is among the operands
    adopt: ClassVar[Callable[["ShardedTensor"], None] | None] = None  # bound by dshard.runtime
    runs_forward: ClassVar[Callable[[], bool] | None] = None  # whether a sharded model's runs; bound there

    @classmethod
    def shard(
        cls, full: Tensor, mesh: DeviceMesh, dim: int | None, *, name: str = "", device: torch.device | None = None
    ) -> "ShardedTensor":
        """Keep this rank's shard of a plain tensor that every rank holds alike.

        Args:
            full: The full tensor, equal on all ranks; not referenced afterwards. May be on the meta device.
            mesh: One-dimensional mesh, or a two-dimensional one over whose first dim the shards are replicated.
            dim: Dim to cut, or None for a whole copy on every rank. 0-d tensors are always whole.
            name: For messages.
            device: Device of the shard; by default `full`'s.

        Communicates:
            Nothing.
        """
        device = full.device if device is None or full.is_meta else device
        dim = None if full.dim() == 0 else dim
        group = group_of(mesh)
        layout = ShardLayout(tuple(full.shape), dim, group.num_ranks)
        stride = dense_stride(full)
        spec = DTensorSpec(mesh, placements_of(dim, mesh), tensor_meta=TensorMeta(full.shape, stride, full.dtype))
        local = torch.empty(layout.local_shape(group.rank), dtype=full.dtype, device=device)
        local.copy_(shard_of(full.detach(), layout, group.rank))
        return cls.wrap(ShardStorage(local, layout, is_shared=True), spec, group, name=name)

    def like(
        self, shard: Tensor | ShardStorage, *, dtype: torch.dtype | None = None, stride: tuple[int, ...] | None = None
    ) -> "ShardedTensor":
        """A ShardedTensor of this one's layout around another shard, which may be in flight.

        Args:
            shard: The other shard.
            dtype: Of the tensor; by default the shard's, or where that is in flight this one's.
            stride: Of the full tensor; by default this one's.
        """
        if isinstance(shard, ShardStorage):
            storage = shard
        else:
            storage = ShardStorage(shard, self.shard_layout, is_shared=is_stepping())
        spec, prototype = self._spec, None
        meta = spec.tensor_meta
        assert meta is not None
        if dtype is not None or storage.is_pending:
            device = self.storage_device if storage.tensor is None else storage.tensor.device
            prototype = empty_of(dtype or meta.dtype, device)
        else:
            dtype = storage.resolve().dtype
        if stride not in (None, meta.stride):
            new_meta = TensorMeta(meta.shape, stride or meta.stride, dtype or meta.dtype)
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=new_meta)
        elif dtype not in (None, meta.dtype):
            assert dtype is not None
            spec = self._spec_of(dtype)
        return self.kin.wrap(storage, spec, self.shard_group, name=self.given_name, prototype=prototype)

    def _spec_of(self, dtype: torch.dtype) -> DTensorSpec:
        """Its description with another dtype, which is made once: gradients under mixed precision take it each step."""
        known_for, spec = self.spec_in_dtype or (None, None)
        if spec is None or known_for is not self._spec or spec.tensor_meta.dtype != dtype:
            meta = self._spec.tensor_meta
            assert meta is not None
            other = TensorMeta(meta.shape, meta.stride, dtype)
            spec = DTensorSpec(self._spec.mesh, self._spec.placements, tensor_meta=other)
            self.spec_in_dtype = self._spec, spec
        return spec

    def derived(self, shard: Tensor) -> "ShardedTensor":
        """A cast or copy of this tensor: its gathers go through this one's unit while neither is written to."""
        out = self.like(shard)
        if self.gather_source is not None:
            out.swapped_source = (self.gather_source, self.gather_slot)
        out.origin = Origin(self, self.shard_storage, self.shard_storage.version, out.shard_storage.version)
        return out

    def lazy_view(
        self, steps: tuple[ViewStep, ...], spec: DTensorSpec, key: tuple[Any, ...], *, computes: bool = False
    ) -> "ShardedTensor":
        """The view of this tensor's base that `steps` give; `spec` describes it, `key` tells its chain apart."""
        base = self.base
        prototype, meta = self._prototype(), spec.tensor_meta
        if meta is not None and prototype.dtype != meta.dtype:
            prototype = empty_of(meta.dtype, prototype.device)
        kind = VIEWS.get(type(base)) or base.kin
        out = kind.wrap(base.shard_storage, spec, base.shard_group, name=self.given_name, prototype=prototype)
        out._view = View(base, steps, key, computes)
        return out

    @property
    def data(self) -> "ShardedTensor":
        """This tensor outside of autograd; assigning takes over another's memory, or cuts a full tensor.

        Raises:
            PlacementError: On assigning a tensor of another number of dims, or to a view.
        """
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        is_sharded = isinstance(value, ShardedTensor) and value._view is None
        takes_any_shape = self.shard_layout.dim is None and not self.shard_storage.is_shared and is_sharded
        is_resized = value.shape != self.shape and not takes_any_shape
        takes_no_size = value.dim() != self.dim() or tp_layout_of(self.shard_layout) is not None
        if self._view is not None or (is_resized and takes_no_size):
            raise PlacementError(
                f"{self.name}: .data of a sharded tensor can be set to a tensor of as many dims as its own shape "
                f"{tuple(self.shape)} has, but "
                f"got {tuple(value.shape)}{' for a view' if self._view is not None else ''}. Use copy_() on what it "
                "views."
            )
        if self._is_own_data(value):
            return  # of `parameter.data *= mask`, which has written to the shards by now
        new: Any = value
        if not takes_any_shape and (not is_sharded or new.shard_layout != self.shard_layout):
            full = (new.materialize() if isinstance(value, ShardedTensor) else value).detach()
            layout = replace(self.shard_layout, shape=tuple(full.shape)) if is_resized else self.shard_layout
            with torch.inference_mode(mode=False):  # whose tensors have no version
                own = part_of(full, layout, self.shard_group.rank).clone()
                if full.dtype == self.compute_dtype():  # in a forward; elsewhere, and for optimizers, it stays as it is
                    own = own.to(self.storage_dtype)
                storage = ShardStorage(own, layout, is_shared=is_stepping())
                new = self.like(storage)
                if is_resized:  # an embedding of more tokens, say
                    meta = TensorMeta(full.shape, dense_stride(full), full.dtype)
                    spec = DTensorSpec(self._spec.mesh, self._spec.placements, tensor_meta=meta)
                    new = self.wrap(storage, spec, self.shard_group, name=self.given_name)
        elif new.shard_storage.resolve().is_inference():
            with torch.inference_mode(mode=False):
                new = self.like(new.shard_storage.resolve().clone())
        new.shard_storage.is_shared |= self.shard_storage.is_shared
        _DATA.__set__(self, new)
        self.shard_storage, self._spec, self.origin, self.known_views = new.shard_storage, new._spec, None, None

    def _is_own_data(self, value: Tensor) -> bool:
        """Whether a tensor is what `data` gives: an alias over the same shard, in a forward in the compute dtype."""
        if not isinstance(value, ShardedTensor) or value.base.shard_storage is not self.shard_storage:
            return False
        return all(step.func in _ALIASES for step in value.view_steps)

    def requires_grad_(self, requires_grad: bool = True) -> "ShardedTensor":
        """As of any tensor; from then on the gradients of a leaf are reduced."""
        torch.Tensor.requires_grad_(self, requires_grad)
        self.adopt_if_leaf()
        return self

    @property
    def requires_grad(self) -> bool:
        """Whether autograd computes gradients for it."""
        return bool(REQUIRES_GRAD.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        REQUIRES_GRAD.__set__(self, value)
        self.adopt_if_leaf()

    def adopt_if_leaf(self) -> None:
        """Have the gradients of a leaf reduced, if nobody does yet."""
        if self.grad_hook_handle is None and self._view is None and self.requires_grad and self.is_leaf:
            assert ShardedTensor.adopt is not None
            ShardedTensor.adopt(self)

    def materialize(self, use: Use | None = None) -> Tensor:
        """The full value as a plain tensor that the caller must neither write to nor keep.

        Communicates:
            As `operand`; for a DTensor parameter also an all-gather over its own mesh.
        """
        return whole(self.operand(use))

    def operand(self, use: Use | None = None) -> Tensor:
        """The full value as it takes part in an operation: a plain tensor, or for a DTensor parameter a DTensor.

        Args:
            use: The operation, where it is one.

        Communicates:
            An all-gather of the unit, or of this tensor where it belongs to none, unless a fresh copy is at hand.
        """
        view = self._view
        base = self if view is None else view.base
        if base.swapped_source is not None:
            rejoin_source(base)
        # A use in backward that autograd does not record gives no gradient: of what a checkpoint saved again, for one.
        if base.grad_hook_handle is None and (torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1):
            base.adopt_if_leaf()
        source = base.gather_source
        if source is not None and source.params[base.gather_slot].shard_storage is base.shard_storage:
            return source.full(base.gather_slot, view, use)
        full = base.gathered_alone(use)
        return full if view is None else viewed(full, view.steps)

    def full_in(self, dtype: torch.dtype | None = None, use: Use | None = None) -> Tensor:
        """As `operand`, in a given dtype, converted from the one it is kept in; by default that. Of no view."""
        source = self.own_source
        if source is not None:
            return source.full_in(self.gather_slot, dtype or self.storage_dtype, use)
        full = self.gathered_alone(use)
        return full if dtype is None else full.to(dtype)

    def gathered_alone(self, use: Use | None = None) -> Tensor:
        """The full value of a tensor that no unit gathers, as an operand."""
        origin = self.origin
        if origin is not None and origin.holds_for(self):
            full = origin.tensor.full_in(self.storage_dtype, use)
            return full if type(self) is ShardedTensor else self._placed(full, use)
        shard, layout = exact_values(self.shard_storage.resolve(), self.name), self.shard_layout
        stride = gathered_stride(layout, self.stride())
        if layout.dim is None:
            return tp_operand(shard if shard.stride() == stride else restrided(shard, stride), self)
        device = shard.device
        if device.type != self.shard_group.device_type and not shard.is_meta:
            shard = shard.to(self.shard_group.device_type)
        plan = GatherPlan.of(BucketLayout.of([layout]), [stride], shard.dtype, self.shard_group)
        tag = collectives.tag_of(self.shard_storage.signature)
        handle = collectives.all_gather([shard], plan, self.shard_group, label=self.given_name, tag=tag)
        full = handle.wait().tensors[0]
        return tp_operand(full if full.device == device else self._placed(full, use), self)

    def _placed(self, full: Tensor, use: Use | None) -> Tensor:
        """A full value where it is to be used, as far as that may be elsewhere than its shards."""
        if type(full) is not Tensor or is_used_away(full.device, use):
            return full
        return full.to(self.storage_device)

    def overwrite_shard(self, values: Tensor) -> None:
        """Copy `values`, of the shape of this rank's shard, into it; all ranks must write their parts of one value."""
        assert self._view is None
        self.shard_storage.writable().copy_(values)
        self.shard_storage.tag, self.origin = 0, None
        self.shard_storage.note_write()
        torch.autograd.graph.increment_version(self)

    def become_whole(self) -> None:
        """Hold the full value on every rank from now on, for each rank to write data of its own to."""
        full = restrided(whole(self.full_in()).to(self.storage_device), self.stride())
        storage = self.shard_storage
        storage.layout = ShardLayout(tuple(self.shape), None, storage.layout.num_ranks)
        storage.deliver(full)
        storage.tag, self.origin = 0, None
        self._spec = DTensorSpec(self._spec.mesh, self.placements, tensor_meta=self._spec.tensor_meta)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if self._view is not None or not self.is_leaf:
            raise StateError(
                f"{self.name}: only leaves that are no views can be deep-copied, as in PyTorch. Use clone()."
            )
        tag, num_writes = self.shard_storage.signature
        with torch.no_grad():
            storage = ShardStorage(self.shard_storage.resolve().clone(), self.shard_layout)
            out = type(self).wrap(storage, self._spec, self.shard_group, name=self.given_name)
            storage.is_shared, storage.tag, storage.num_writes = self.shard_storage.is_shared, tag, num_writes
            out.wire_precision, out.base_place = self.wire_precision, self.base_place
            out.requires_grad_(self.requires_grad)
        memo[id(self)] = out
        if getattr(self, "_is_param", False):
            out._is_param = True  # and no gradient, as of any nn.Parameter
        elif self.grad is not None:
            out.grad = copy.deepcopy(self.grad, memo)
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_param = getattr(self, "_is_param", False)
        if self._view is not None:
            raise StateError(f"{self.name}: a lazy view cannot be pickled. Pickle full_tensor(), or the base.")
        shard = self.shard_storage.resolve()
        shard = shard if shard.untyped_storage().nbytes() == shard.nbytes else shard.clone()
        return rebuild, (
            type(self)._kind or type(self),
            shard,
            self._spec,
            self.shard_layout,
            self.given_name,
            self.requires_grad,
            is_param,
            self.wire_precision,
            self.base_place,
            place_among_ranks(self),
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return ShardedTensor._dispatch_beside(ShardedTensor._dispatch, func, args, kwargs or {})
        return ShardedTensor._dispatch(func, args, kwargs or {})


SHARDED: set[type] = {ShardedTensor}  # for a quick look at exact types
VIEWS: dict[type, type[ShardedTensor]] = {}  # of a class made for precedence, what its views are
ShardedTensor.kin = ShardedTensor


_OFF: Any = torch._C._disabled_torch_function_impl
_ABOUT_THE_OBJECT = frozenset(
    {
        "__get__",
        "__set__",
        "__delete__",
        "__hash__",
        "__deepcopy__",
        "__reduce_ex__",
        "_is_view",
        "backward",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "requires_grad_",
    }
)


@cache
def _num_kept(func: Callable[..., Any]) -> int | None:
    """How many of its first arguments a function takes as objects, to read or write them; None for all."""
    name = getattr(func, "__name__", "")
    if name in _ABOUT_THE_OBJECT:
        return None
    writes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    return 1 if writes or (name.startswith("__i") and name.endswith("__") and name != "__invert__") else 0


def _in_compute_dtype(value: Any) -> Any:
    """An argument with what parameters are in the forward that is running in their place."""
    if isinstance(value, MixedShardedTensor):
        source = value.own_source if value._view is None else None
        again = source.unsharded_again(value.gather_slot) if source is not None else None
        if again is not None:
            return again
        return torch.ops.aten.alias.default(value) if value.compute_dtype() is not None else value
    if isinstance(value, (list, tuple)) and any(isinstance(v, MixedShardedTensor) for v in value):
        return type(value)([_in_compute_dtype(v) for v in value])
    return value


class MixedShardedTensor(ShardedTensor):
    """A sharded parameter with a compute dtype of its own.

    Torch checks dtypes by what the object was made with, which is the dtype that the parameter is kept in, ahead of any
    dispatch; and autograd saves the object. So in a forward torch's functions get a view of it in the compute dtype. At
    all other times they are as fast as with any other tensor: the class asks for their calls only while a forward runs.
    """

    __slotnames__: ClassVar[list[str]] = ShardedTensor.__slotnames__  # which `swap_tensors` reads of the very class
    _num_models: ClassVar[int] = 0  # whose forward runs, or may run again in part
    __torch_function__ = _OFF

    @classmethod
    def _in_forward(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            num_kept = _num_kept(func)
            if num_kept is not None:
                args = (*args[:num_kept], *map(_in_compute_dtype, args[num_kept:]))
                kwargs = {k: _in_compute_dtype(v) for k, v in (kwargs or {}).items()}
            return func(*args, **(kwargs or {}))


def note_forward(change: int) -> None:
    """A model under mixed precision begins its forward, or needs no more to be told of parts of it that run again.

    Args:
        change: In the number of such models, in this process: 1 or -1.
    """
    before = MixedShardedTensor._num_models
    now = MixedShardedTensor._num_models = max(0, before + change)
    if (before > 0) != (now > 0):
        MixedShardedTensor.__torch_function__ = MixedShardedTensor._in_forward if now else _OFF
        if now:
            MixedShardedTensor.grad = GRAD
        else:
            del MixedShardedTensor.grad


def is_in_mixed_forward() -> bool:
    """Whether a forward of a module under mixed precision runs in this process."""
    return MixedShardedTensor._num_models > 0


SHARDED.add(MixedShardedTensor)


class OffloadedShardedTensor(MixedShardedTensor):
    """A sharded tensor of which the shard is in one place, its home, and the full value in another: that of its mesh.

    Gradients, optimizer states, views and copies of an offloaded parameter are of this class too. To autograd all of
    them are on the compute device: it checks gradients against what they are of, and chooses streams by it. To programs
    they are at home, as under FSDP2; but a parameter is on the compute device in the forward of a sharded module.
    """

    __slotnames__: ClassVar[list[str]] = ShardedTensor.__slotnames__  # which `swap_tensors` reads of the very class
    num_made: ClassVar[int] = 0  # in this process: programs without offload need not look for it
    _home_device: torch.device  # while the shard is in flight

    @classmethod
    def wrap(
        cls,
        storage: ShardStorage,
        spec: DTensorSpec,
        group: ShardGroup,
        *,
        prototype: Tensor | None = None,
        **options: Any,
    ) -> Self:
        """Make one around a shard; `prototype` is a plain tensor at home."""
        local = prototype if prototype is not None else storage.resolve()
        away = local if local.is_meta else empty_of(local.dtype, group.device)
        out = super().wrap(storage, spec, group, prototype=away, **options)
        out.__dict__["_home_device"] = local.device
        OffloadedShardedTensor.num_made += 1
        return out

    def awaiting(self, storage: ShardStorage) -> ShardedTensor:
        """A tensor of this one's layout around a shard that is in flight, and at home once it has arrived."""
        out = super().awaiting(storage)
        out.__dict__["_home_device"] = self.storage_device
        OffloadedShardedTensor.num_made += 1
        return out

    @property
    def storage_device(self) -> torch.device:
        """The device of its shard: its home."""
        shard = self.shard_storage.tensor
        return self._home_device if shard is None else shard.device

    def _device_here(self) -> torch.device:
        """The device of its value where it is used now.

        Activation checkpointing asks in the forward, and again once a recomputation is over: it is told the same, also
        of views, for which full tensors may stand in one of the two.
        """
        source: Any = (self if self._view is None else self._view.base).gather_source
        is_away = source is not None and (
            source.is_running or source.is_recomputed or module_that_called() == "torch.utils.checkpoint"
        )
        return _DEVICE.__get__(self) if is_away else self.storage_device

    device: Any = property(_device_here)
    is_cuda: Any = property(lambda self: self.device.type == "cuda")
    is_cpu: Any = property(lambda self: self.device.type == "cpu")


OffloadedShardedTensor.kin = OffloadedShardedTensor
SHARDED.add(OffloadedShardedTensor)
