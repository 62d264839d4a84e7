"""Checkpoints: sharded ones, of which every rank writes and reads its shards, and safetensors files."""

from dshard.checkpoint.safetensors_load import load_safetensors
from dshard.checkpoint.safetensors_save import save_safetensors
from dshard.checkpoint.sharded import load, save
from dshard.checkpoint.staging import stage_shards

__all__ = ["load", "load_safetensors", "save", "save_safetensors"]

stage_shards()
