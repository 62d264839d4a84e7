"""The models of ``dshard plan`` and ``dshard simulate``: a preset, a configuration of Hugging Face, or a function."""

from __future__ import annotations

import importlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dshard.cli.presets import PRESETS, checkpoint_blocks, meta_model
from dshard.cli.usage import UsageError
from dshard.cli.writable import read_whole

_SEQUENCE = 512


@dataclass(frozen=True, slots=True)
class Sampled:
    """A model on meta, and a sample of its input for one rank.

    Attributes:
        name: as it was asked for.
        model: without memory.
        sample: of its input.
        num_params: elements of all parameters.
        num_tokens: per sample; 0 where nobody knows.
    """

    name: str
    model: nn.Module
    sample: Any
    num_params: int
    num_tokens: int


def build_model(name: str, *, batch: int | None, sequence: int | None, is_checkpointed: bool) -> Sampled:
    """Builds a model without memory.

    Args:
        name: a preset, the path of a ``config.json`` or of its folder, or ``module:function``; the function returns a
            model and a sample input.
        batch: samples per rank; None for 1. The sample of a function has its own.
        sequence: tokens per sample; None for what is usual for the model.
        is_checkpointed: whether blocks compute their forward again in backward.

    Raises:
        UsageError: there is no such model, it cannot be built, or it has no parameters.
    """
    num_tokens = 0
    if name in PRESETS:
        preset = PRESETS[name]
        num_tokens = sequence or preset.sequence
        model, sample = meta_model(preset, num_tokens), _tokens(batch or 1, num_tokens)
    elif Path(name).is_dir() or name.endswith(".json"):
        model, sample = _hugging_face(Path(name), batch or 1, sequence)
        num_tokens = sample["input_ids"].shape[1]
    elif ":" in name and sequence is not None:
        raise UsageError(
            f"--sequence is for presets and configurations, but {name} makes its own sample. Leave it out."
        )
    elif ":" in name:
        model, sample = _function(name)
    else:
        raise UsageError(
            f"MODEL must be one of {', '.join(PRESETS)}, a config.json of Hugging Face or its folder, or "
            f"module:function, but it is {name!r}. Pass one of these."
        )
    num_params = sum(param.numel() for param in model.parameters())
    if not num_params:
        raise UsageError(f"MODEL must have parameters, but {name} has none. Pass a model that has.")
    if is_checkpointed and not checkpoint_blocks(model):
        raise UsageError(f"--checkpoint needs blocks in a ModuleList, but {name} has none. Leave it out.")
    return Sampled(name, model, sample, num_params, num_tokens)


def _tokens(batch: int, length: int) -> Tensor:
    return torch.empty(batch, length, dtype=torch.int64, device="meta")


def _hugging_face(path: Path, batch: int, sequence: int | None) -> tuple[nn.Module, Any]:
    """A model of a configuration, without its weights."""
    path = path / "config.json" if path.is_dir() else path
    try:
        record = json.loads(read_whole(path, follow=True))  # with the Infinity that some have
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"MODEL must be a configuration as JSON, but {path} cannot be read: {error}.") from error
    if not isinstance(record, dict) or "model_type" not in record:
        raise UsageError(
            f"MODEL must be a configuration of Hugging Face, but {path} has no model_type. Pass one that has."
        )
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(
            "a configuration of Hugging Face needs transformers, but it is not installed. Run: pip install "
            "'dshard[interop]'."
        )
    import transformers

    kind = record.pop("model_type")
    try:
        config = transformers.AutoConfig.for_model(kind, **record)
        is_pair = getattr(config, "is_encoder_decoder", False)
        auto = transformers.AutoModelForSeq2SeqLM if is_pair else transformers.AutoModelForCausalLM
        config.use_cache = False
        with torch.device("meta"):
            model = auto.from_config(config)
        tokens = _tokens(batch, sequence or min(_SEQUENCE, getattr(config, "max_position_embeddings", _SEQUENCE)))
    except Exception as error:  # whatever a file's values lead to in another library
        raise UsageError(f"MODEL must be a language model, but {path} ({kind}) cannot be built: {error}.") from error
    return model, {"input_ids": tokens, "labels": tokens, **({"decoder_input_ids": tokens} if is_pair else {})}


def _function(name: str) -> tuple[nn.Module, Any]:
    """What a function returns: a model and a sample input; it is called under meta."""
    module, _, function = name.partition(":")
    try:
        build = getattr(importlib.import_module(module), function)
        with torch.device("meta"):
            made = build()
    except Exception as error:
        raise UsageError(
            f"MODEL must be module:function, but {name} raises {type(error).__name__}: {error}."
        ) from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(
            f"MODEL must be a function that returns a model and a sample input, but {name} returns "
            f"{type(made).__name__}. Return (model, sample)."
        )
    return made
