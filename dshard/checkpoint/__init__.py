"""Sharded checkpoints: every rank writes and reads its own shards."""

from dshard.checkpoint.sharded import load, save

__all__ = ["load", "save"]
