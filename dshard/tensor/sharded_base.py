"""What a ShardedTensor holds, and what it tells: its fields and dtypes, and how other programs see its value."""

from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import _disable_current_modes

from dshard.collectives import ShardGroup
from dshard.errors import StateError, UnsupportedOpError
from dshard.layout import ShardLayout
from dshard.policies import Offload, Precision
from dshard.tensor.exports import FullTensor, check_traceable
from dshard.tensor.local_views import LocalTensor, is_in_forward
from dshard.tensor.shard_storage import ShardStorage
from dshard.tensor.sources import GatherSource, Origin
from dshard.tensor.tp_layout import lie_of
from dshard.tensor.traced_meta import GRAD, note_exact_use, telling
from dshard.tensor.views import View, ViewMeta, ViewStep, empty_of

if TYPE_CHECKING:
    from dshard.tensor.sharded_tensor import ShardedTensor

_NEW: Any = torch.Tensor._dtensor__new__
_DTYPE: Any = torch.Tensor.dtype  # descriptor; autograd and torch's own code go by it
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
    stands_for: Any = None  # of a gradient that names another dtype, the one with the right name
    wire_precision: Precision | None = None  # of a parameter, in which dtypes it travels
    _kind: Any = None  # of a class made for precedence, the one that it stands for
    base_place: tuple[DeviceMesh, int | None] | None = None  # mesh and dim that a strategy starts from
    plain_class: type[Tensor] | None = None  # of the parameter that it has replaced
    plain: Any = None  # the plain parameter that has replaced it
    has_compute_dtype: bool = False
    is_used_in_functions: bool = False  # in a forward, without autograd: in that of a custom function, maybe
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
        meta = self._spec.tensor_meta
        assert meta is not None
        prototype = empty_of(meta.dtype, self.storage_device)
        return self.kin.wrap(storage, self._spec, self.shard_group, name=self.given_name, prototype=prototype)

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
        found: torch.dtype = _DTYPE.__get__(self)
        return found

    def compute_dtype(self) -> torch.dtype | None:
        """The dtype that it has in the forward that is running, where that is not the one it is kept in; of no view."""
        source = self.own_source if self.has_compute_dtype and self._view is None else None
        return source.compute_dtype(self.gather_slot) if source is not None else None

    @property
    def storage_device(self) -> torch.device:
        """The device of its shard."""
        found: torch.device = self.device
        return found

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
            local: Tensor = LocalTensor.apply(self, grad_placements)
            return local
        if self.is_view:
            raise UnsupportedOpError(
                f"{self.name}: to_local needs a tensor that is itself sharded, but this is a view of one (shape "
                f"{tuple(self.shape)}). Use full_tensor(), or to_local() of the tensor that was viewed."
            )
        shard: Tensor = self._local_tensor
        return shard

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The full value as a plain tensor of the caller's own, equal on all ranks; differentiable.

        Args:
            grad_placements: Accepted for DTensor's sake; has no meaning here.

        Communicates:
            As `materialize`.
        """
        full: Tensor = FullTensor.apply(self)
        return full

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
