"""ShardedTensors out of pickles."""

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from dshard.layout import ShardLayout
from dshard.policies import Precision
from dshard.tensor.meshes import group_of, note_groups
from dshard.tensor.shard_storage import ShardStorage
from dshard.tensor.tp_layout import tp_layout_of


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
    """Make a ShardedTensor of what a pickle holds of one."""
    tp = tp_layout_of(layout)
    mesh = spec.mesh if tp is None else tp.data_mesh
    note_groups(mesh)
    group = group_of(mesh)
    out = cls.wrap(ShardStorage(shard, layout, is_shared=True), spec, group, name=name)
    out.wire_precision, out.base_place = precision, own_place
    out.requires_grad_(requires_grad)
    if is_param:
        out._is_param = True
    return out
