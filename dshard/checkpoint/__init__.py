"""Checkpoints: sharded ones, of which every rank writes and reads its shards, and files for `from_pretrained`."""

from dshard.checkpoint.loading import load
from dshard.checkpoint.pretrained import load_safetensors, merge, save_safetensors
from dshard.checkpoint.reading import Finding, Report, check, repair
from dshard.checkpoint.saving import PendingSave, save

__all__ = [
    "Finding",
    "PendingSave",
    "Report",
    "check",
    "load",
    "load_safetensors",
    "merge",
    "repair",
    "save",
    "save_safetensors",
]
