"""Sharded models in other libraries' programs; see docs/interop.md. Nothing here imports those libraries."""

from dshard.interop.hf import ShardedTrainerMixin, full_state_dict

__all__ = ["ShardedTrainerMixin", "full_state_dict"]
