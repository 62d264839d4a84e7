"""How other programs see a ShardedTensor: raw pointers, NumPy, DLPack, DTensor's redistribution."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dshard.errors import UnsupportedOpError

__all__ = ["Exports", "FullTensor"]


class Exports:
    """The part of ShardedTensor that hands out values to others; its `self` is one."""

    def to_local(self: Any, *, grad_placements: Any = None) -> Tensor:
        """This rank's shard: the memory itself, outside of autograd.

        Raises:
            UnsupportedOpError: On a lazy view, whose elements on this rank are not a tensor of their own.

        Communicates:
            Nothing; waits for a gradient that is in flight.
        """
        if self.is_view:
            raise UnsupportedOpError(
                f"{self.name}: to_local needs a tensor that is itself sharded, but this is a view of one (shape "
                f"{tuple(self.shape)}). Use full_tensor(), or to_local() of the tensor that was viewed."
            )
        shard: Tensor = self._local_tensor
        return shard

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
        full = self._pinned()
        if full is None:
            raise UnsupportedOpError(
                f"{self.name}: a raw pointer needs memory that holds the full value, but this tensor is sharded over "
                f"{self.device_mesh.size()} ranks. Take it inside `with dshard.gathered(module):`, or use "
                "full_tensor()."
            )
        return int(full.data_ptr())

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

    @staticmethod
    def __tensor_unflatten__(inner: Any, flat_spec: Any, outer_size: Any, outer_stride: Any) -> DTensor:
        raise UnsupportedOpError(
            "torch.compile: a ShardedTensor cannot be rebuilt inside a traced graph yet. Compile functions that take "
            "plain tensors, or call the model eagerly."
        )


class FullTensor(torch.autograd.Function):
    """`full_tensor` for autograd: the gradient of the full value is that of the sharded one."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        """Gather."""
        return tensor.materialize().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The parameter's own hook reduces."""
        return grad
