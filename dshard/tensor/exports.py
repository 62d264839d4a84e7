"""How other programs see a ShardedTensor: raw pointers, NumPy, DLPack, DTensor's redistribution."""

from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import _disable_current_modes

from dshard.errors import StateError, UnsupportedOpError
from dshard.tensor.extended import is_extended
from dshard.tensor.inner import inner_of
from dshard.tensor.local_views import LocalTensor, is_in_forward
from dshard.tensor.traced_meta import note_exact_use, telling

__all__ = ["Exports", "FullTensor"]


class Exports:
    """The part of ShardedTensor that hands out values to others; its `self` is one."""

    def to_local(self: Any, *, grad_placements: Any = None) -> Tensor:
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

    def full_tensor(self: Any, *, grad_placements: Any = None) -> Tensor:
        """The full value as a plain tensor of the caller's own, equal on all ranks; differentiable.

        Args:
            grad_placements: Accepted for DTensor's sake; has no meaning here.

        Communicates:
            As `materialize`.
        """
        full: Tensor = FullTensor.apply(self)
        return full

    def redistribute(self: Any, device_mesh: DeviceMesh | None = None, placements: Any = None, **_: Any) -> DTensor:
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

    def data_ptr(self: Any) -> int:
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

    def storage(self: Any) -> Any:
        """Raises: no memory holds the full value. `untyped_storage()`, which torch itself asks for, has no pointer."""
        raise StateError(  # safetensors takes a NotImplementedError for a tensor without values
            f"{self.name}: storage() needs memory that holds the full value, but this tensor is sharded over "
            f"{self.device_mesh.size()} ranks. Use full_tensor(), or to_local().untyped_storage(); to write a model to "
            "a file, call dshard.save_safetensors(model, dir) on every rank, or pass save_pretrained a state_dict of "
            "dshard.interop.full_state_dict(model)."
        )

    def __format__(self: Any, format_spec: str) -> str:
        """As of any tensor: a single number by its value, anything else without a format by its repr."""
        return format(self.item(), format_spec) if not self.dim() else object.__format__(self, format_spec)

    def numpy(self: Any, *, force: bool = False) -> Any:
        """A NumPy copy of the full value, read-only, for writes to it would be lost; `force` detaches first."""
        array = self.full_tensor().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self: Any) -> Any:
        """The full value as nested lists."""
        return self.full_tensor().tolist()

    def __dlpack__(self: Any, **kwargs: Any) -> Any:
        return self.full_tensor().__dlpack__(**kwargs)

    def __array__(self: Any, dtype: Any = None) -> Any:
        array = self.full_tensor().__array__(dtype)
        array.flags.writeable = False
        return array

    def share_memory_(self: Any) -> Any:
        """Raises: a sharded tensor has no memory of its own to share; `to_local()` has."""
        raise UnsupportedOpError(
            f"{self.name}: share_memory_ needs memory that holds the full value, but this tensor is sharded over "
            f"{self.device_mesh.size()} ranks. Share to_local(), or full_tensor()."
        )

    @property
    def __cuda_array_interface__(self: Any) -> Any:
        return self.full_tensor().__cuda_array_interface__

    def __tensor_flatten__(self: Any) -> tuple[list[str], tuple[Any, ...]]:
        """What torch.compile takes apart: the shard, and DTensor's own description, on which it insists.

        Raises:
            StateError: While a graph is traced, for what it cannot take in: a lazy view, a DTensor parameter, a
                parameter under mixed precision both in a forward and outside.
        """
        flattened: tuple[list[str], tuple[Any, ...]] = DTensor.__tensor_flatten__(self)
        if TracingContext.try_get() is None:
            return flattened
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

    @classmethod
    def __tensor_unflatten__(
        cls: Any, inner_tensors: dict[str, Any], flat_spec: Any, outer_size: Any, outer_stride: Any
    ) -> Any:
        """The way back: around the shard that torch.compile traces with."""
        return cls._unflatten(cls, inner_tensors, flat_spec, outer_size, outer_stride)

    def _stable_hash_for_caching(self: Any) -> str:
        """Tells apart, for torch's cache of graphs, what is traced differently: a rank's shard has its own size."""
        shard = self._local_tensor
        facts = _TRACING, type(self).__name__, self.storage_dtype, tuple(shard.shape), shard.stride(), shard.dtype
        return f"{DTensor._stable_hash_for_caching(self)} {facts}"


_TRACING = 3  # changes with the rules by which graphs are traced, which torch keeps on disk


def check_traceable(tensor: Any) -> None:
    """Raise StateError for a tensor that a graph cannot take in; dynamo would keep a NotImplementedError quiet."""
    if is_extended(tensor.shard_storage.tensor):
        raise StateError(
            f"{tensor.name}: torch.compile does not take parameters of tensor subclasses yet, but this one's shard is "
            f"a {type(tensor.shard_storage.tensor).__name__}. Call the model without torch.compile."
        )
    if tensor.offload is not None:
        raise StateError(
            f"{tensor.name}: torch.compile does not take offloaded parameters (offload_policy) yet. Call the model "
            "without torch.compile, or leave offload_policy out."
        )
    if tensor.is_view and not getattr(tensor._view.base.gather_source, "is_traced", False):
        raise StateError(
            f"{tensor.name}: a compiled graph takes in and gives out sharded tensors, not views of them, but this is "
            f"a view (shape {tuple(tensor.shape)}). Make the view within the compiled function, or use full_tensor()."
        )
    if inner_of(tensor.shard_storage.layout) is not None:
        raise StateError(
            f"{tensor.name}: torch.compile does not take parameters that are cut over another mesh too (tensor "
            f"parallelism) yet, but this one lies as {tensor.placements}. Call the model without torch.compile."
        )


class FullTensor(torch.autograd.Function):
    """`full_tensor` for autograd: the gradient of the full value is that of the sharded one."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        """Gather."""
        ctx.device = tensor._spec.mesh.device_type
        return tensor.materialize().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The parameter's own hook reduces, on the device of the mesh."""
        return grad if grad.device.type == ctx.device else grad.to(ctx.device)
