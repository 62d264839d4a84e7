"""Copies of sharded tensors that torch's asynchronous saves write while training goes on.

`dcp.async_save` copies a state dict attribute by attribute: it looks for a tensor's memory and for what its object has,
and of a sharded parameter the one is a shard and the other the whole model. Torch has no place to say otherwise.
"""

from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dshard.tensor import ShardedTensor


def stage_shards() -> None:
    """Have torch's stager copy this rank's shard of a sharded tensor, and make a DTensor of it, for files alone."""
    from torch.distributed.checkpoint import _state_dict_stager as torchs  # 0.1 s, which `import dshard` need not take

    stager: Any = torchs.StateDictStager
    torchs_own = stager._offload_tensor
    if getattr(torchs_own, "_dshard", False):
        return

    def offload(self: Any, x: Any, memo: dict[int, Any], non_blocking: bool = False) -> Any:
        if not isinstance(x, ShardedTensor):
            return torchs_own(self, x, memo, non_blocking=non_blocking)
        if x.is_view:
            return torchs_own(self, x.full_tensor().detach(), memo, non_blocking=non_blocking)
        shard = x.shard_storage.resolve()
        copied = memo[id(x)] = DTensor(
            torchs_own(self, shard, memo, non_blocking=non_blocking),
            DTensorSpec(x.device_mesh, x.placements, tensor_meta=TensorMeta(x.shape, x.stride(), shard.dtype)),
            requires_grad=False,
        )
        memo.setdefault(id(memo), []).append(shard)  # whose id stands in it
        return copied

    offload._dshard = True  # type: ignore[attr-defined]
    stager._offload_tensor = offload
