"""ShardedTensor: a tensor whose storage is sharded over the ranks, and which always means its full value."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dshard import collectives
from dshard.collectives import GatherPlan, ShardGroup, shard_of
from dshard.errors import PlacementError, StateError
from dshard.layout import BucketLayout, ShardLayout
from dshard.tensor.cell import ShardCell
from dshard.tensor.exports import Exports, FullTensor
from dshard.tensor.stepping import is_stepping
from dshard.tensor.strides import dense_stride, restrided
from dshard.tensor.views import View, ViewMeta, ViewStep, apply_steps, empty_of

_DATA: Any = torch.Tensor.data  # descriptors
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad

__all__ = ["GatherSource", "Origin", "ShardedTensor", "View"]


class GatherSource(Protocol):
    """What keeps gathered copies: a unit."""

    params: list["ShardedTensor"]

    def full(self, slot: int) -> Tensor:
        """The full value of the unit's parameter number `slot`, gathered if need be."""

    def pinned(self, slot: int) -> Tensor | None:
        """The same, if an open `gathered` scope holds it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The tensor of which another is a cast or copy, for as long as neither was written to since."""

    tensor: "ShardedTensor"
    cell: ShardCell
    version: int
    own_version: int


class ShardedTensor(Exports, DTensor):
    """A tensor of which every rank holds a shard, and which means its full value wherever it is used.

    An operation that can be computed on the shards runs on the shards; views are lazy; every other operation gathers,
    uses and forgets. `shape`, `dtype`, `device`, `numel()` and `repr` are those of the full tensor and never
    communicate. Parameters become ShardedTensors through `fully_shard`; gradients, optimizer states and copies of them
    are ShardedTensors of the same layout.

    Source: the class is a subclass of torch's DTensor, so that distributed checkpoints and the rest of the ecosystem
    know it; its dispatch is its own.
    """

    _cell: ShardCell
    _group: ShardGroup
    _name: str
    _source: GatherSource | None = None
    _slot: int = -1
    _view: View | None = None
    _origin: Origin | None = None
    _views: dict[Any, Any] | None = None
    _home: tuple[GatherSource, int] | None = None  # where it belongs if a swap puts it in its origin's place
    _is_added: bool = False  # as a gradient: already part of the buffer that `.grad` awaits
    _grad_hook: Any = None

    # `swap_tensors` swaps slots after dicts; `_local_tensor` lives in the dict's cell and must not be swapped back.
    __slotnames__: ClassVar[list[str]] = ["_spec"]

    _dispatch: ClassVar[Callable[..., Any]]  # bound by dshard.tensor, which knows both the class and the op table
    _adopt: ClassVar[Callable[["ShardedTensor"], None] | None] = None  # bound by dshard.runtime

    @classmethod
    def wrap(
        cls,
        cell: ShardCell,
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
        new: Any = cls.__new__  # without __init__, which has nothing to do
        self: ShardedTensor = new(cls, local, spec, requires_grad=requires_grad)
        self._cell, self._group, self._name = cell, group, name
        return self

    @classmethod
    def shard(
        cls, full: Tensor, mesh: DeviceMesh, dim: int | None, *, name: str = "", device: torch.device | None = None
    ) -> "ShardedTensor":
        """Keep this rank's shard of a plain tensor that every rank holds alike.

        Args:
            full: The full tensor, equal on all ranks; not referenced afterwards. May be on the meta device.
            mesh: One-dimensional mesh.
            dim: Dim to cut, or None for a whole copy on every rank. 0-d tensors are always whole.
            name: For messages.
            device: Device of the shard; by default `full`'s.

        Communicates:
            Nothing.
        """
        device = full.device if device is None or full.is_meta else device
        dim = None if full.dim() == 0 else dim
        layout = ShardLayout(tuple(full.shape), dim, mesh.size())
        group = ShardGroup(mesh.get_group(), torch.device(mesh.device_type))
        stride = dense_stride(full)
        placements: tuple[Placement, ...] = (Replicate() if dim is None else Shard(dim),)
        spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(full.shape, stride, full.dtype))
        local = torch.empty(layout.local_shape(group.rank), dtype=full.dtype, device=device)
        local.copy_(shard_of(full.detach(), layout, group.rank))
        return cls.wrap(ShardCell(local, layout, is_shared=True), spec, group, name=name)

    def like(
        self, shard: Tensor | ShardCell, *, dtype: torch.dtype | None = None, stride: tuple[int, ...] | None = None
    ) -> "ShardedTensor":
        """A ShardedTensor of this one's layout around another shard; `dtype`, `stride` where they differ from its."""
        cell = shard if isinstance(shard, ShardCell) else ShardCell(shard, self._layout, is_shared=is_stepping())
        spec = self._spec
        if dtype is None and not cell.is_pending:
            dtype = cell.resolve().dtype
        meta = spec.tensor_meta
        assert meta is not None
        if dtype not in (None, meta.dtype) or stride not in (None, meta.stride):
            new_meta = TensorMeta(meta.shape, stride or meta.stride, dtype or meta.dtype)
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=new_meta)
        prototype = self._cell.resolve() if cell.is_pending else None
        return type(self).wrap(cell, spec, self._group, name=self._name, prototype=prototype)

    def derived(self, shard: Tensor) -> "ShardedTensor":
        """A cast or copy of this tensor: its gathers go through this one's unit while neither is written to."""
        out = self.like(shard)
        if self._source is not None:
            out._home = (self._source, self._slot)
        out._origin = Origin(self, self._cell, self._cell.version, out._cell.version)
        return out

    def alias(self) -> "ShardedTensor":
        """Another tensor object over the same shard, as `detach()` gives."""
        out = type(self).wrap(self._cell, self._spec, self._group, name=self._name, prototype=self._prototype())
        out._source, out._slot, out._view, out._origin = self._source, self._slot, self._view, self._origin
        out._home = self._home
        out._is_added = self._is_added
        return out

    def lazy_view(self, step: ViewStep, spec: DTensorSpec, key: tuple[Any, ...]) -> "ShardedTensor":
        """The view that `step` gives of this tensor; `spec` describes it, `key` tells its chain apart."""
        base, steps = (self, ()) if self._view is None else (self._view.base, self._view.steps)
        prototype = self._prototype()
        meta = spec.tensor_meta
        if meta is not None and prototype.dtype != meta.dtype:
            prototype = empty_of(meta.dtype, prototype.device)
        out = type(self).wrap(base._cell, spec, base._group, name=self._name, prototype=prototype)
        out._view = View(base, (*steps, step), key)
        return out

    def view_spec(self, meta: ViewMeta) -> DTensorSpec:
        """DTensor's description of a view."""
        tensor_meta = TensorMeta(meta.shape, meta.stride, meta.dtype)
        return DTensorSpec(self._spec.mesh, (Replicate(),) * self._spec.mesh.ndim, tensor_meta=tensor_meta)

    def _prototype(self) -> Tensor:
        """A plain tensor of this one's dtype and device, without waiting for a shard in flight."""
        tensor = self._cell._tensor
        if tensor is not None and tensor.dtype == self.dtype:
            return tensor
        return empty_of(self.dtype, self.device)

    @property
    def name(self) -> str:
        """Name for messages: the parameter's, or that of the one it descends from."""
        return self._name or "a ShardedTensor"

    @property
    def _layout(self) -> ShardLayout:
        """How the tensor, or for a view its base, is cut."""
        return self._cell.layout

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement: how the tensor, or for a view its base, lies over the mesh."""
        dim = self._cell.layout.dim
        return (Replicate() if dim is None else Shard(dim),)

    @property
    def is_view(self) -> bool:
        """Whether this is a lazy view of another ShardedTensor."""
        return self._view is not None

    # DTensor's slot; reading it waits for a shard in flight, so that nobody reads memory that has not arrived.
    @property
    def _local_tensor(self) -> Tensor:
        return self._cell.resolve()

    @_local_tensor.setter
    def _local_tensor(self, value: Tensor) -> None:
        cell = self.__dict__.get("_cell")
        if cell is not None:  # else torch's constructor, ahead of `wrap`
            cell.deliver(value)

    @property
    def data(self) -> "ShardedTensor":
        """This tensor outside of autograd; assigning takes over another's memory, or cuts a full tensor.

        Raises:
            PlacementError: On assigning a tensor of another shape.
        """
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        is_sharded = isinstance(value, ShardedTensor) and value._view is None
        takes_any_shape = self._layout.dim is None and not self._cell.is_shared and is_sharded
        if self._view is not None or (value.shape != self.shape and not takes_any_shape):
            raise PlacementError(
                f"{self.name}: .data of a sharded tensor can be set to a tensor of its own shape "
                f"{tuple(self.shape)}, but "
                f"got {tuple(value.shape)}{' for a view' if self._view is not None else ''}. Use copy_() on what it "
                "views."
            )
        new: Any = value
        if not takes_any_shape and (not is_sharded or new._layout != self._layout):
            full = new.materialize() if isinstance(value, ShardedTensor) else value
            with torch.inference_mode(mode=False):  # whose tensors have no version
                new = self.like(shard_of(full.detach(), self._layout, self._group.rank).clone())
        elif new._cell.resolve().is_inference():
            with torch.inference_mode(mode=False):
                new = self.like(new._cell.resolve().clone())
        new._cell.is_shared |= self._cell.is_shared
        _DATA.__set__(self, new)
        self._cell, self._spec, self._origin, self._views = new._cell, new._spec, None, None

    def requires_grad_(self, requires_grad: bool = True) -> "ShardedTensor":
        """As of any tensor; from then on the gradients of a leaf are reduced."""
        torch.Tensor.requires_grad_(self, requires_grad)
        self._adopt_if_leaf()
        return self

    @property
    def requires_grad(self) -> bool:
        """Whether autograd computes gradients for it."""
        return bool(_REQUIRES_GRAD.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        _REQUIRES_GRAD.__set__(self, value)
        self._adopt_if_leaf()

    def _adopt_if_leaf(self) -> None:
        """Have the gradients of a leaf reduced, if nobody does yet."""
        if self._grad_hook is None and self._view is None and self.requires_grad and self.is_leaf:
            assert ShardedTensor._adopt is not None
            ShardedTensor._adopt(self)

    def materialize(self) -> Tensor:
        """The full value as a plain tensor that the caller must neither write to nor keep.

        Communicates:
            An all-gather of the unit, or of this tensor where it belongs to none, unless a fresh copy is at hand.
        """
        if self._view is not None:
            return apply_steps(self._view.base.materialize(), self._view.steps)
        self._adopt_if_leaf()
        if self._source is not None and self._source.params[self._slot]._cell is self._cell:
            return self._source.full(self._slot)
        origin = self._origin
        if (
            origin is not None
            and origin.tensor is not self  # a swap of tensors can make it so
            and origin.tensor._cell is origin.cell
            and origin.cell.version == origin.version
            and self._cell.version == origin.own_version
        ):
            return origin.tensor.materialize().to(self.dtype)
        shard = self._cell.resolve()
        if self._layout.dim is None:
            return shard if shard.stride() == self.stride() else restrided(shard, self.stride())
        device = shard.device
        if device.type != self._group.device_type and not shard.is_meta:
            shard = shard.to(self._group.device_type)
        plan = GatherPlan.of(BucketLayout.of([self._layout]), [self.stride()], shard.dtype, self._group)
        handle = collectives.all_gather([shard], plan, self._group, label=self._name, tag=hash(self._cell.signature))
        return handle.wait().tensors[0].to(device)

    def become_whole(self) -> None:
        """Hold the full value on every rank from now on, for each rank to write data of its own to."""
        full = restrided(self.materialize(), self.stride())
        cell = self._cell
        cell.layout = ShardLayout(cell.layout.shape, None, cell.layout.num_ranks)
        cell.deliver(full)
        cell.tag, self._origin = 0, None

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The full value as a plain tensor of the caller's own, equal on all ranks; differentiable.

        Args:
            grad_placements: Accepted for DTensor's sake; has no meaning here.

        Communicates:
            As `materialize`.
        """
        full: Tensor = FullTensor.apply(self)
        return full

    def _pinned(self) -> Tensor | None:
        return self._source.pinned(self._slot) if self._source is not None and self._view is None else None

    def __repr__(self) -> str:  # type: ignore[override]
        kind = "view, " if self._view is not None else ""
        where = "whole on" if self._layout.dim is None else f"dim {self._layout.dim} over"
        return (
            f"ShardedTensor({self._name!r}, {kind}shape={tuple(self.shape)}, dtype={self.dtype}, {where} "
            f"{self._layout.num_ranks} ranks, device='{self.device}', requires_grad={self.requires_grad})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedTensor":
        if id(self) in memo:
            return memo[id(self)]
        if self._view is not None or not self.is_leaf:
            raise StateError(
                f"{self.name}: only leaves that are no views can be deep-copied, as in PyTorch. Use clone()."
            )
        with torch.no_grad():
            out = self.like(self._cell.resolve().clone())
            out._cell.is_shared, out._cell.tag, out._cell.num_writes = (
                self._cell.is_shared,
                *self._cell.signature,
            )
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
        shard = self._cell.resolve()
        shard = shard if shard.untyped_storage().nbytes() == shard.nbytes else shard.clone()
        return _rebuild, (shard, self._spec, self._layout, self._name, self.requires_grad, is_param)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return ShardedTensor._dispatch(func, args, kwargs or {})


def _rebuild(
    shard: Tensor, spec: DTensorSpec, layout: ShardLayout, name: str, requires_grad: bool, is_param: bool
) -> ShardedTensor:
    """Unpickle."""
    group = ShardGroup(spec.mesh.get_group(), torch.device(spec.mesh.device_type))
    out = ShardedTensor.wrap(ShardCell(shard, layout, is_shared=True), spec, group, name=name)
    out.requires_grad_(requires_grad)
    if is_param:
        out._is_param = True
    return out
