"""Tiny models of `transformers`, randomly initialised, and batches for them; nothing is downloaded.

Functions here run on the ranks; `transformers` is imported there, once per world.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCAB, LENGTH, BATCH = 64, 8, 4  # a batch of one rank
LEARNING_RATE = 1e-2
_NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_GPT = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, **_NO_TOKENS}
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **_NO_TOKENS,
}
_ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGE = {**_ENCODER, "image_size": 8, "patch_size": 4}
_WHISPER = {
    "vocab_size": VOCAB,
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}

# Name: class of the model, class of its config, arguments of the config, kind of batch.
MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_DECODER, "tie_word_embeddings": False}, "text"),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {**_DECODER, "tie_word_embeddings": True}, "text"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**_GPT, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, "text"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 8}, "text"),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_DECODER, "num_local_experts": 16, "num_experts_per_tok": 1, "experts_implementation": "eager"},
        "text",
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**_T5, "decoder_start_token_id": 0}, "text"),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {**_ENCODER, "vocab_size": VOCAB, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "text",
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {**_IMAGE, "num_labels": 4}, "image"),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {
                **_ENCODER,
                **_NO_TOKENS,
                "vocab_size": VOCAB,
                "max_position_embeddings": 16,
                "eos_token_id": 2,
            },
            "vision_config": _IMAGE,
            "projection_dim": 16,
        },
        "clip",
    ),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, "speech"),
}


def build(name: str, *, seed: int = 0, **overrides: Any) -> nn.Module:
    """A model in fp64, so that a weight without a gradient gets none but rounding far below Adam's epsilon."""
    transformers = importlib.import_module("transformers")
    model_class, config_class, options, _ = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**{**options, **overrides})
    return getattr(transformers, model_class)(config).double()


def batch(name: str, step: int, rank: int) -> dict[str, Tensor]:
    """What one rank trains on in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    kind = MODELS[name][3]
    if kind == "text":
        return {"input_ids": tokens, "labels": tokens.clone()}
    if kind == "speech":
        sound = torch.randn(BATCH, 8, 32, generator=generator, dtype=torch.float64)
        return {"input_features": sound, "labels": tokens}
    image = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)
    if kind == "image":
        return {"pixel_values": image, "labels": tokens[:, 0] % 4}
    return {"pixel_values": image, "input_ids": tokens}


def together(name: str, step: int, num_ranks: int) -> dict[str, Tensor]:
    """The batches of all ranks in one."""
    parts = [batch(name, step, rank) for rank in range(num_ranks)]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def loss_of(name: str, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The model's own loss; for CLIP, whose contrastive loss couples the examples of a batch, one that does not."""
    output = model(**inputs)
    if name != "clip":
        return output.loss
    return (output.text_embeds * output.image_embeds).sum(-1).mean() + model.logit_scale


def logits_of(name: str, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    model.eval()
    with torch.no_grad():
        output = model(**inputs)
    model.train()
    return output.logits_per_text if name == "clip" else output.logits


@functools.cache
def plain_run(name: str, num_ranks: int, num_steps: int = 5) -> dict[str, Any]:
    """One process on the batches of all ranks together; once per rank and model."""
    return train(name, build(name), lambda step: together(name, step, num_ranks), num_steps)


def train(
    name: str,
    model: nn.Module,
    inputs: Callable[[int], dict[str, Tensor]],
    num_steps: int = 5,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> dict[str, Any]:
    """Losses, weights and evaluation logits after some steps of an optimizer."""
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    losses = []
    model.train()
    for step in range(num_steps):
        loss = loss_of(name, model, inputs(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        weights = {key: full(p).clone() for key, p in model.named_parameters()}
    return {"losses": losses, "weights": weights, "logits": logits_of(name, model, batch(name, 99, 0))}


def full(tensor: Tensor) -> Tensor:
    """A sharded or plain tensor as a plain one."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def difference(found: Tensor, expected: Tensor, *, smallest: float = 1e-12) -> float:
    """Largest difference, relative to the largest magnitude, or to `smallest` where that is larger."""
    if found.shape != expected.shape:
        return float("inf")
    scale = max(expected.abs().max().item(), smallest) if expected.numel() else 1.0
    return (found - expected).abs().max().item() / scale if expected.numel() else 0.0


def worst(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """How far two runs lie apart: the mean of the losses over ranks, evaluation logits, and weights.

    Weights relative to a step of AdamW at least: the bias of a key has no gradient, and is what rounding makes of it.
    """
    losses = torch.tensor(found["losses"], dtype=torch.float64)
    dist.all_reduce(losses)
    weights = expected["weights"]
    apart = [difference(found["weights"][name], weights[name], smallest=LEARNING_RATE) for name in weights]
    return {
        "losses": difference(losses / dist.get_world_size(), torch.tensor(expected["losses"], dtype=torch.float64)),
        "logits": difference(found["logits"], expected["logits"]),
        "weights": max(apart),
    }
