"""ShardedTensor: a tensor whose storage is sharded over the ranks, and which always means its full value."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dshard import collectives
from dshard.collectives import GatherPlan, ShardGroup, shard_of
from dshard.errors import PlacementError
from dshard.layout import BucketLayout, ShardLayout
from dshard.policies import Precision
from dshard.tensor.compute_dtype import ComputeDtype
from dshard.tensor.copying import Copying
from dshard.tensor.exports import Exports
from dshard.tensor.extended import exact_values
from dshard.tensor.inner import gathered_stride, inner_of, lie_of, on_mesh, part_of, viewed, whole
from dshard.tensor.meshes import group_of, placements_of
from dshard.tensor.shard_storage import ShardStorage
from dshard.tensor.sources import GatherSource, Origin, is_used_away, return_home
from dshard.tensor.stepping import is_stepping
from dshard.tensor.strides import dense_stride, restrided
from dshard.tensor.views import View, ViewMeta, ViewStep, empty_of

_NEW: Any = torch.Tensor._dtensor__new__
_DATA: Any = torch.Tensor.data  # descriptors
REQUIRES_GRAD: Any = torch.Tensor.requires_grad

__all__ = ["KIN", "REQUIRES_GRAD", "SHARDED", "VIEWS", "ShardedTensor", "View"]


class ShardedTensor(Exports, Copying, ComputeDtype, DTensor):
    """A tensor of which every rank holds a shard, and which means its full value wherever it is used.

    An operation that can be computed on the shards runs on the shards; views are lazy; every other operation gathers,
    uses and forgets. `shape`, `dtype`, `device`, `numel()` and `repr` are those of the full tensor and never
    communicate. Parameters become ShardedTensors through `fully_shard`; gradients, optimizer states and copies of them
    are ShardedTensors of the same layout.

    Source: the class is a subclass of torch's DTensor, so that distributed checkpoints and the rest of the ecosystem
    know it; its dispatch is its own.
    """

    shard_storage: ShardStorage
    shard_group: ShardGroup
    given_name: str
    gather_source: GatherSource | None = None
    gather_slot: int = -1
    _view: View | None = None
    origin: Origin | None = None
    known_views: dict[Any, Any] | None = None
    swapped_home: tuple[GatherSource, int] | None = None  # where it belongs if a swap puts it in its origin's place
    is_added_up: bool = False  # as a gradient: already part of the buffer that `.grad` awaits
    grad_hook_handle: Any = None
    stands_for: "ShardedTensor | None" = None  # of a gradient that names another dtype, the one with the right name
    wire_precision: Precision | None = None  # of a parameter, in which dtypes it travels

    # `swap_tensors` swaps slots after dicts; `_local_tensor` lives in the dict's cell and must not be swapped back.
    __slotnames__: ClassVar[list[str]] = ["_spec"]

    _dispatch: ClassVar[Callable[..., Any]]  # bound by dshard.tensor, which knows both the class and the op table
    _unflatten: ClassVar[Callable[..., Any]]  # the same
    adopt: ClassVar[Callable[["ShardedTensor"], None] | None] = None  # bound by dshard.runtime

    @classmethod
    def wrap(
        cls,
        cell: ShardStorage,
        spec: DTensorSpec,
        group: ShardGroup,
        *,
        name: str = "",
        prototype: Tensor | None = None,
        requires_grad: bool = False,
    ) -> "ShardedTensor":
        """Make a ShardedTensor around a shard.

        Args:
            cell: The shard and how it is cut.
            spec: DTensor's description: mesh, placements, and the shape, strides and dtype of the full tensor.
            group: The ranks that hold it.
            name: For messages.
            prototype: Plain tensor of the dtype and device; needed while the shard is in flight.
            requires_grad: As of any tensor.

        Communicates:
            Nothing.
        """
        local = prototype if prototype is not None else cell.resolve()
        if local.storage_offset():  # which would become this one's: torch.compile takes apart only what starts at 0
            local = empty_of(local.dtype, local.device)
        self: ShardedTensor = _NEW(cls, local, spec, requires_grad=requires_grad)  # what DTensor's own __new__ calls
        self._spec = spec
        self.shard_storage, self.shard_group, self.given_name = cell, group, name
        return self

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
        """A ShardedTensor of this one's layout around another shard; `dtype`, `stride` where they differ from its."""
        layout, is_shared = self.shard_layout, is_stepping()
        cell = shard if isinstance(shard, ShardStorage) else ShardStorage(shard, layout, is_shared=is_shared)
        spec = self._spec
        if dtype is None and not cell.is_pending:
            dtype = cell.resolve().dtype
        meta = spec.tensor_meta
        assert meta is not None
        if dtype not in (None, meta.dtype) or stride not in (None, meta.stride):
            new_meta = TensorMeta(meta.shape, stride or meta.stride, dtype or meta.dtype)
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=new_meta)
        prototype = self.shard_storage.resolve() if cell.is_pending else None
        return KIN[type(self)].wrap(cell, spec, self.shard_group, name=self.given_name, prototype=prototype)

    def derived(self, shard: Tensor) -> "ShardedTensor":
        """A cast or copy of this tensor: its gathers go through this one's unit while neither is written to."""
        out = self.like(shard)
        if self.gather_source is not None:
            out.swapped_home = (self.gather_source, self.gather_slot)
        out.origin = Origin(self, self.shard_storage, self.shard_storage.version, out.shard_storage.version)
        return out

    def alias(self) -> "ShardedTensor":
        """Another tensor object over the same shard, as `detach()` gives."""
        cell, prototype = self.shard_storage, self._prototype()
        out = type(self).wrap(cell, self._spec, self.shard_group, name=self.given_name, prototype=prototype)
        if self.gather_source is not None:
            out.gather_source, out.gather_slot = self.gather_source, self.gather_slot
            if self.has_compute_dtype:
                out.has_compute_dtype, out.wire_precision = True, self.wire_precision
        if self._view is not None:
            out._view = self._view
        if self.origin is not None:
            out.origin = self.origin
        if self.swapped_home is not None:
            out.swapped_home = self.swapped_home
        if self.is_added_up:
            out.is_added_up = True
        if self.stands_for is not None:
            out.stands_for = self.stands_for
        return out

    def of_dtype(self, dtype: torch.dtype, cell: ShardStorage) -> "ShardedTensor":
        """A ShardedTensor of this one's layout, in another dtype, around a shard that may be in flight."""
        meta = self._spec.tensor_meta
        assert meta is not None
        new_meta = TensorMeta(meta.shape, meta.stride, dtype)
        spec = DTensorSpec(self._spec.mesh, self._spec.placements, tensor_meta=new_meta)
        prototype = empty_of(dtype, self.storage_device)
        return KIN[type(self)].wrap(cell, spec, self.shard_group, name=self.given_name, prototype=prototype)

    def lazy_view(
        self, steps: tuple[ViewStep, ...], spec: DTensorSpec, key: tuple[Any, ...], *, computes: bool = False
    ) -> "ShardedTensor":
        """The view of this tensor's base that `steps` give; `spec` describes it, `key` tells its chain apart."""
        base = self if self._view is None else self._view.base
        prototype, meta = self._prototype(), spec.tensor_meta
        if meta is not None and prototype.dtype != meta.dtype:
            prototype = empty_of(meta.dtype, prototype.device)
        kind = VIEWS.get(type(base)) or KIN[type(base)]
        out = kind.wrap(base.shard_storage, spec, base.shard_group, name=self.given_name, prototype=prototype)
        out._view = View(base, steps, key, computes)
        return out

    def view_spec(self, meta: ViewMeta) -> DTensorSpec:
        """DTensor's description of a view."""
        mesh, tensor_meta = self._spec.mesh, TensorMeta(meta.shape, meta.stride, meta.dtype)
        return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=tensor_meta)

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
        return self.shard_storage.resolve()

    @_local_tensor.setter
    def _local_tensor(self, value: Tensor) -> None:
        cell = self.__dict__.get("shard_storage")
        if cell is not None:  # else torch's constructor, ahead of `wrap`
            cell.deliver(value)

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
        takes_no_size = value.dim() != self.dim() or inner_of(self.shard_layout) is not None
        if self._view is not None or (is_resized and takes_no_size):
            raise PlacementError(
                f"{self.name}: .data of a sharded tensor can be set to a tensor of as many dims as its own shape "
                f"{tuple(self.shape)} has, but "
                f"got {tuple(value.shape)}{' for a view' if self._view is not None else ''}. Use copy_() on what it "
                "views."
            )
        new: Any = value
        if not takes_any_shape and (not is_sharded or new.shard_layout != self.shard_layout):
            full = (new.materialize() if isinstance(value, ShardedTensor) else value).detach()
            layout = replace(self.shard_layout, shape=tuple(full.shape)) if is_resized else self.shard_layout
            with torch.inference_mode(mode=False):  # whose tensors have no version
                own = part_of(full, layout, self.shard_group.rank).clone()
                cell = ShardStorage(own, layout, is_shared=is_stepping())
                new = self.like(cell)
                if is_resized:  # an embedding of more tokens, say
                    meta = TensorMeta(full.shape, dense_stride(full), full.dtype)
                    spec = DTensorSpec(self._spec.mesh, self._spec.placements, tensor_meta=meta)
                    new = self.wrap(cell, spec, self.shard_group, name=self.given_name)
        elif new.shard_storage.resolve().is_inference():
            with torch.inference_mode(mode=False):
                new = self.like(new.shard_storage.resolve().clone())
        new.shard_storage.is_shared |= self.shard_storage.is_shared
        _DATA.__set__(self, new)
        self.shard_storage, self._spec, self.origin, self.known_views = new.shard_storage, new._spec, None, None

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

    def materialize(self) -> Tensor:
        """The full value as a plain tensor that the caller must neither write to nor keep.

        Communicates:
            As `operand`; for a DTensor parameter also an all-gather over its own mesh.
        """
        return whole(self.operand())

    def operand(self) -> Tensor:
        """The full value as it takes part in an operation: a plain tensor, or for a DTensor parameter a DTensor.

        Communicates:
            An all-gather of the unit, or of this tensor where it belongs to none, unless a fresh copy is at hand.
        """
        view = self._view
        base = self if view is None else view.base
        if base.swapped_home is not None:
            return_home(base)
        # A use in backward that autograd does not record gives no gradient: of what a checkpoint saved again, for one.
        if base.grad_hook_handle is None and (torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1):
            base.adopt_if_leaf()
        source = base.gather_source
        if source is not None and source.params[base.gather_slot].shard_storage is base.shard_storage:
            return source.full(base.gather_slot, view)
        full = base.gathered_alone()
        return full if view is None else viewed(full, view.steps)

    def full_in(self, dtype: torch.dtype | None = None) -> Tensor:
        """As `operand`, in a given dtype, converted from the one it is kept in; by default that. Of no view."""
        if self.gather_source is not None and self.belongs_to_source():
            return self.gather_source.full_in(self.gather_slot, dtype or self.storage_dtype)
        full = self.gathered_alone()
        return full if dtype is None else full.to(dtype)

    def gathered_alone(self) -> Tensor:
        """The full value of a tensor that no unit gathers, as an operand."""
        origin = self.origin
        if origin is not None and origin.holds_for(self):
            full = origin.tensor.full_in(self.storage_dtype)
            return full if type(self) is ShardedTensor else self._placed(full)
        shard, layout = exact_values(self.shard_storage.resolve(), self.name), self.shard_layout
        stride = gathered_stride(layout, self.stride())
        if layout.dim is None:
            return on_mesh(shard if shard.stride() == stride else restrided(shard, stride), self)
        device = shard.device
        if device.type != self.shard_group.device_type and not shard.is_meta:
            shard = shard.to(self.shard_group.device_type)
        plan = GatherPlan.of(BucketLayout.of([layout]), [stride], shard.dtype, self.shard_group)
        tag = hash(self.shard_storage.signature)
        handle = collectives.all_gather([shard], plan, self.shard_group, label=self.given_name, tag=tag)
        full = handle.wait().tensors[0]
        return on_mesh(full if full.device == device else self._placed(full), self)

    def _placed(self, full: Tensor) -> Tensor:
        """A full value where it is to be used, as far as that may be elsewhere than its shards."""
        if type(full) is not Tensor or is_used_away(full.device):
            return full
        return full.to(self.storage_device)

    def overwrite_shard(self, values: Tensor) -> None:
        """Copy `values`, of the shape of this rank's shard, into it; all ranks must write their parts of one value."""
        assert self._view is None
        self.shard_storage.resolve().copy_(values)
        self.shard_storage.tag, self.origin = 0, None
        self.shard_storage.note_write()
        torch.autograd.graph.increment_version(self)

    def become_whole(self) -> None:
        """Hold the full value on every rank from now on, for each rank to write data of its own to."""
        full = restrided(whole(self.full_in()).to(self.storage_device), self.stride())
        cell = self.shard_storage
        cell.layout = ShardLayout(tuple(self.shape), None, cell.layout.num_ranks)
        cell.deliver(full)
        cell.tag, self.origin = 0, None

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

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return ShardedTensor._dispatch(func, args, kwargs or {})


SHARDED: set[type] = {ShardedTensor}  # for a quick look at exact types
VIEWS: dict[type, type[ShardedTensor]] = {}  # of a class made for precedence, what its views are
KIN: defaultdict[type, type[ShardedTensor]] = defaultdict(lambda: ShardedTensor)  # what descends from one of a type
