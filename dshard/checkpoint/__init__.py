"""Checkpoints: sharded ones, of which every rank writes and reads its shards, and safetensors files."""

from dshard.checkpoint.checking import Finding, Report, check, repair
from dshard.checkpoint.loading import load
from dshard.checkpoint.peers import PeerSnapshots
from dshard.checkpoint.pending import PendingSave
from dshard.checkpoint.safetensors_load import load_safetensors
from dshard.checkpoint.safetensors_save import save_safetensors
from dshard.checkpoint.saving import save
from dshard.checkpoint.staging import stage_shards

__all__ = [
    "Finding",
    "PeerSnapshots",
    "PendingSave",
    "Report",
    "check",
    "load",
    "load_safetensors",
    "repair",
    "save",
    "save_safetensors",
]

stage_shards()
