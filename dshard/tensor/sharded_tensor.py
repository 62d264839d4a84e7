"""ShardedTensor: a tensor whose storage is sharded over the ranks, and which always means its full value."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dshard import collectives
from dshard.collectives import GatherPlan, shard_of
from dshard.errors import PlacementError, StateError
from dshard.layout import BucketLayout, ShardLayout
from dshard.tensor.copying import rebuild
from dshard.tensor.meshes import group_of, placements_of
from dshard.tensor.shard_storage import ShardStorage
from dshard.tensor.sharded_base import ShardedBase
from dshard.tensor.sources import Origin, Use, is_used_away, rejoin_source
from dshard.tensor.stepping import is_stepping
from dshard.tensor.strides import dense_stride, restrided
from dshard.tensor.subclass_shards import exact_values
from dshard.tensor.tp_layout import gathered_stride, part_of, tp_layout_of, tp_operand, viewed, whole
from dshard.tensor.views import View, ViewStep, empty_of

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
        if dtype not in (None, meta.dtype) or stride not in (None, meta.stride):
            new_meta = TensorMeta(meta.shape, stride or meta.stride, dtype or meta.dtype)
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=new_meta)
        return self.kin.wrap(storage, spec, self.shard_group, name=self.given_name, prototype=prototype)

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
        new: Any = value
        if not takes_any_shape and (not is_sharded or new.shard_layout != self.shard_layout):
            full = (new.materialize() if isinstance(value, ShardedTensor) else value).detach()
            layout = replace(self.shard_layout, shape=tuple(full.shape)) if is_resized else self.shard_layout
            with torch.inference_mode(mode=False):  # whose tensors have no version
                own = part_of(full, layout, self.shard_group.rank).clone()
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
        tag = hash(self.shard_storage.signature)
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
