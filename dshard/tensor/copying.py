"""Copies and pickles of a ShardedTensor: each rank copies its own shard."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from dshard.errors import StateError
from dshard.layout import ShardLayout
from dshard.policies import Precision
from dshard.tensor.inner import inner_of
from dshard.tensor.meshes import group_of, note_groups
from dshard.tensor.shard_storage import ShardStorage

__all__ = ["Copying", "rebuild"]


class Copying:
    """The part of ShardedTensor that `copy.deepcopy` and `pickle` call; its `self` is one."""

    _kind: Any = None  # of a class made for precedence, the one that it stands for
    base_place: tuple[DeviceMesh, int | None] | None = None  # mesh and dim that a strategy starts from

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if self._view is not None or not self.is_leaf:
            raise StateError(
                f"{self.name}: only leaves that are no views can be deep-copied, as in PyTorch. Use clone()."
            )
        tag, num_writes = self.shard_storage.signature
        with torch.no_grad():
            cell = ShardStorage(self.shard_storage.resolve().clone(), self.shard_layout)
            out = type(self).wrap(cell, self._spec, self.shard_group, name=self.given_name)
            cell.is_shared, cell.tag, cell.num_writes = self.shard_storage.is_shared, tag, num_writes
            out.wire_precision, out.base_place = self.wire_precision, self.base_place
            out.requires_grad_(self.requires_grad)
        memo[id(self)] = out
        if getattr(self, "_is_param", False):
            out._is_param = True  # and no gradient, as of any nn.Parameter
        elif self.grad is not None:
            out.grad = copy.deepcopy(self.grad, memo)
        return out

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
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


def rebuild(
    cls: Any,
    shard: Tensor,
    spec: DTensorSpec,
    layout: ShardLayout,
    name: str,
    requires_grad: bool,
    is_param: bool,
    precision: Precision | None,
    own_place: tuple[DeviceMesh, int | None] | None = None,
) -> Any:
    """Unpickle."""
    inner = inner_of(layout)
    mesh = spec.mesh if inner is None else inner.data_mesh
    note_groups(mesh)
    group = group_of(mesh)
    out = cls.wrap(ShardStorage(shard, layout, is_shared=True), spec, group, name=name)
    out.wire_precision, out.base_place = precision, own_place
    out.requires_grad_(requires_grad)
    if is_param:
        out._is_param = True
    return out
