"""What operations on sharded tensors give: plain tensors, that also answer as the DTensors that FSDP2's users get."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from dshard.compiling import is_between_graphs


class FullResult(Tensor):
    """A plain tensor that an operation on sharded tensors gave: its full value, which every rank holds.

    Programs written for FSDP2 ask such a value for its `full_tensor()`. What is computed of nothing else is one, too;
    beside a tensor of this rank it is any tensor.
    """

    device_mesh: DeviceMesh  # of the sharded tensors that it comes of

    @classmethod
    def of(cls, value: Tensor, mesh: DeviceMesh) -> Tensor:
        """A plain tensor that answers so; anything else as it is."""
        if type(value) is not Tensor:
            return value
        result = value.as_subclass(cls)
        result.device_mesh = mesh
        return result

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Replicated over each dim of the mesh."""
        return (Replicate(),) * self.device_mesh.ndim

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The value, as a plain tensor. Communicates nothing.

        Args:
            grad_placements: Accepted for DTensor's sake; has no meaning here.
        """
        return self.as_subclass(Tensor)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """The value, all of which every rank holds. Communicates nothing.

        Args:
            grad_placements: Accepted for DTensor's sake; has no meaning here.
        """
        return self.as_subclass(Tensor)

    def redistribute(self, device_mesh: DeviceMesh | None = None, placements: Any = None, **_: Any) -> DTensor:
        """The value as a DTensor in some placements, by default replicated. Communicates nothing.

        Args:
            device_mesh: By default that of the sharded tensors that it comes of.
            placements: One per dim of the mesh.
        """
        mesh = device_mesh if device_mesh is not None else self.device_mesh
        wanted = placements if placements is not None else (Replicate(),) * mesh.ndim
        return distribute_tensor(self.as_subclass(Tensor), mesh, wanted, src_data_rank=None)

    def __format__(self, format_spec: str) -> str:
        return format(self.as_subclass(Tensor), format_spec)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        plain = self.as_subclass(Tensor)
        memo.setdefault(id(memo), []).append(plain)  # as `copy` does: known by its id, it must live as long
        copied: Tensor = plain.__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():
            return result
        tensors = list(_tensors((args, (kwargs or {}).values())))
        if not all(isinstance(each, FullResult) for each in tensors):
            return _plain(result)
        kind = AgreedTensor if all(isinstance(each, AgreedTensor) for each in tensors) else FullResult
        return answering(result, kind, tensors[0].device_mesh) if tensors else result


class AgreedTensor(FullResult):
    """One that is equal on all ranks: of sharded tensors alone, by operations without a number of this rank's own."""


def answering(result: Any, kind: type[FullResult], mesh: DeviceMesh) -> Any:
    """The tensors in a result as tensors of a kind."""
    if is_between_graphs():
        return _plain(result)
    if isinstance(result, Tensor):
        return kind.of(result.as_subclass(Tensor) if isinstance(result, FullResult) else result, mesh)
    if type(result) in (list, tuple):
        return type(result)(answering(each, kind, mesh) for each in result)
    return result


def _tensors(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, type({}.values()))):
            yield from _tensors(value)


def _plain(value: Any) -> Any:
    if isinstance(value, FullResult):
        return value.as_subclass(Tensor)
    if type(value) in (list, tuple):
        return type(value)(_plain(each) for each in value)
    return value
