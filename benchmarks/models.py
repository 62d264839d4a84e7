"""One GPT and one Llama, the ways to shard them, and the kinds of work that a training step can be."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dshard
from benchmarks.measure import Reader, Step, Summary, watched

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a `GPT`.

    Attributes:
        vocab: Tokens it knows.
        width: Features, a multiple of the heads.
        layers: Blocks.
        heads: Attention heads.
        checkpointing: Whether a block's activations are computed again in backward.
    """

    vocab: int = 2048
    width: int = 512
    layers: int = 8
    heads: int = 8
    checkpointing: bool = False


class Block(nn.Module):
    """A pre-norm transformer block; (batch, tokens, width) in and out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, then the MLP, to the residual stream."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token ids (batch, tokens) to logits (batch, tokens, vocab)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.checkpointing = size.checkpointing
        self.embed = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x))


class ConvBlock(nn.Module):
    """Two convolutions with batch norms around a residual; (batch, width, height, width) in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the convolutions find."""
        return x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))


class ConvNet(nn.Module):
    """Images (batch, 3, height, width) to logits (batch, vocab)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, size.width // 4, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(size.width // 4) for _ in range(size.layers))
        self.head = nn.Linear(size.width // 4, size.vocab)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the class of each image."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class ExpertsBlock(nn.Module):
    """Experts behind a norm, each of which sees all tokens; (batch, tokens, width) in and out."""

    def __init__(self, width: int, num_experts: int = 4) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add what the experts say, weighted by the gate."""
        y = self.norm(x)
        weights = self.gate(y).softmax(-1).unbind(-1)
        said = [expert(y) * weight[..., None] for expert, weight in zip(self.experts, weights, strict=True)]
        return x + torch.stack(said).sum(0)


class Experts(nn.Module):
    """Token ids (batch, tokens) to logits (batch, tokens, vocab), by layers of experts."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.width)
        self.layers = nn.ModuleList(ExpertsBlock(size.width) for _ in range(size.layers))
        self.head = nn.Linear(size.width, size.vocab, bias=False)

    @property
    def blocks(self) -> list[nn.Module]:
        """The units, innermost first: each expert, and what is left of each layer."""
        experts = [expert for layer in self.layers for expert in layer.get_submodule("experts").children()]
        return [*experts, *self.layers]

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class HFLlama(nn.Module):
    """transformers' Llama; token ids (batch, tokens) to logits (batch, tokens, vocab)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        from transformers import LlamaConfig as Config
        from transformers import LlamaForCausalLM

        self.inner = LlamaForCausalLM(
            Config(
                vocab_size=size.vocab,
                hidden_size=size.width,
                intermediate_size=2 * size.width,
                num_hidden_layers=size.layers,
                num_attention_heads=size.heads,
                num_key_value_heads=size.heads // 2,
                use_cache=False,
            )
        )

    @property
    def blocks(self) -> list[nn.Module]:
        """The units."""
        return list(self.inner.model.layers)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        logits: Tensor = self.inner(input_ids=ids).logits
        return logits


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Size of a `Llama`; the defaults make 1.1 billion parameters.

    Attributes:
        vocab: Tokens it knows.
        width: Features.
        layers: Blocks.
        heads: Query heads, a divisor of the width.
        kv_heads: Key and value heads, a divisor of the query heads.
        hidden: Features within an MLP.
        theta: Base of the rotary frequencies.
        checkpointing: Whether a block's activations are computed again in backward.
    """

    vocab: int = 32000
    width: int = 2048
    layers: int = 22
    heads: int = 32
    kv_heads: int = 4
    hidden: int = 5632
    theta: float = 10000.0
    checkpointing: bool = False


def _rotations(head_width: int, num_tokens: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines, shape (2, tokens, head width / 2), fp32."""
    frequencies = theta ** -(torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(num_tokens, device=device, dtype=torch.float32), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def _rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Turn pairs of features by their positions' angles; (batch, heads, tokens, head width) in and out."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotations
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


class LlamaAttention(nn.Module):
    """Causal attention whose keys and values serve several query heads; (batch, tokens, width) in and out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        kv_width = config.width // config.heads * config.kv_heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        """Mix each position with those before it."""
        batch, tokens, width = x.shape
        q = _rotate(self.query(x).view(batch, tokens, self.heads, -1).transpose(1, 2), rotations)
        k = _rotate(self.key(x).view(batch, tokens, self.kv_heads, -1).transpose(1, 2), rotations)
        v = self.value(x).view(batch, tokens, self.kv_heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class LlamaBlock(nn.Module):
    """Attention, then a gated MLP, each behind a norm; (batch, tokens, width) in and out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(config.width), LlamaAttention(config)
        self.norm2 = nn.RMSNorm(config.width)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        """Add both to the residual stream."""
        x = x + self.attention(self.norm1(x), rotations)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Token ids (batch, tokens) to logits (batch, tokens, vocab)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        config = self.config
        rotations = _rotations(config.width // config.heads, ids.shape[1], config.theta, ids.device)
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, rotations, use_reentrant=False) if config.checkpointing else block(x, rotations)
        return self.head(self.norm(x))


KINDS = ("unsharded", "DDP", "FSDP2", "dshard", "FSDP2, no reshard", "dshard, no reshard")
ROOT_ALONE = "dshard, root alone"
MESSAGES = ", by messages"  # at the end of a kind: ranks exchange messages, as between hosts
COMPILED = ", compiled"  # at the end of a kind: each block by inductor
_SHARD: dict[str, Any] = {"dshard": dshard.fully_shard, "FSDP2": torch_fully_shard}


def mesh_of(device: torch.device) -> DeviceMesh:
    """All ranks, on `device`'s type: without it both libraries would take a GPU if there is one."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


def messaging_mesh() -> DeviceMesh:
    """All ranks on CPU, in a new process group whose ranks exchange messages instead of sharing memory."""
    before = os.environ.get("DSHARD_TRANSPORT")
    os.environ["DSHARD_TRANSPORT"] = "messages"
    try:
        group: Any = dist.new_group()
        dshard.fully_shard(nn.Linear(1, 1), mesh=DeviceMesh.from_group(group, "cpu"))  # reads the variable
        return DeviceMesh.from_group(group, "cpu")
    finally:
        os.environ.pop("DSHARD_TRANSPORT")
        os.environ.update({"DSHARD_TRANSPORT": before} if before is not None else {})


def shard(
    kind: str, model: nn.Module, device: torch.device, *, policy: MixedPrecisionPolicy | None = None
) -> nn.Module:
    """Shard a model whose blocks, innermost first, are in ``model.blocks``; kinds without a library are left alone.

    Args:
        kind: One of `KINDS`, or `ROOT_ALONE`, with `MESSAGES` or `COMPILED` at the end if wanted.
        model: Changed in place; DDP wraps it.
        device: Of the mesh.
        policy: Dtypes to compute and to reduce in.
    """
    if kind == "DDP":
        return DistributedDataParallel(model)
    library = _SHARD.get(kind.split(",")[0])
    if library is None:
        return model
    options: dict[str, Any] = {"mesh": messaging_mesh() if kind.endswith(MESSAGES) else mesh_of(device)}
    if policy is not None:
        options["mp_policy"] = policy
    if kind == ROOT_ALONE:
        return library(model, **options)
    options["reshard_after_forward"] = "no reshard" not in kind
    blocks: Any = model.blocks
    for block in blocks:
        library(block, **options)
    return library(model, **options)


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, max_norm: float | None = None
) -> Callable[[], None]:
    """One forward, backward and optimizer step on ids of shape (batch, tokens + 1), clipped if a norm is given."""

    def step() -> None:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _optimizer(model: nn.Module, *, fused: bool | None = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4, fused=fused)


def _train(
    model: nn.Module,
    size: Size,
    *,
    batch: int = 4,
    tokens: int = 128,
    fused: bool | None = None,
    max_norm: float | None = None,
) -> Callable[[], None]:
    ids = torch.randint(0, size.vocab, (batch, tokens + 1))
    return training_step(model, _optimizer(model, fused=fused), ids, max_norm)


def _classify(model: nn.Module, size: Size) -> Callable[[], None]:
    """A step on two images of 8 x 8."""
    optimizer = _optimizer(model, fused=True)
    dtype = next(model.parameters()).dtype
    images, classes = torch.randn(2, 3, 8, 8, dtype=dtype), torch.randint(0, size.vocab, (2,))

    def step() -> None:
        F.cross_entropy(model(images), classes).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _accumulate(model: Any, size: Size, *, tokens: int = 128, fused: bool | None = None) -> Callable[[], None]:
    """A step of 4 micro-batches; gradients are reduced in the last one."""
    optimizer, ids = _optimizer(model, fused=fused), torch.randint(0, size.vocab, (4, tokens + 1))

    def step() -> None:
        for number, part in enumerate(ids.chunk(4)):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(number == 3)
            elif hasattr(model, "require_backward_grad_sync"):  # DDP
                model.require_backward_grad_sync = number == 3
            F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _decode(model: nn.Module, size: Size) -> Callable[[], None]:
    """Eight forwards without gradients, of one token each."""
    ids = torch.randint(0, size.vocab, (4, 8))

    def step() -> None:
        with torch.no_grad():
            for token in ids.unbind(1):
                model(token[:, None])

    return step


def _llama(size: Size) -> Llama:
    hidden = 8 * size.width // 3
    return Llama(LlamaConfig(size.vocab, size.width, size.layers, size.heads, size.heads // 2, hidden))


def _frozen(size: Size) -> GPT:
    """A GPT that trains its norms alone."""
    model = GPT(size).requires_grad_(requires_grad=False)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(requires_grad=True)
    return model


def _tiny_units(size: Size) -> nn.Module:
    """A GPT of many narrow blocks: 150 of width 32 for a size of 8 layers and width 512."""
    return GPT(replace(size, layers=150 * size.layers // 8, width=max(8, size.width // 16)))


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, and a step of it.

    Attributes:
        build: Makes the model.
        step: Makes a step of the model, however it was sharded.
        policy: Dtypes to compute and to reduce in.
    """

    build: Callable[[Size], nn.Module] = GPT
    step: Callable[[Any, Size], Callable[[], None]] = _train
    policy: MixedPrecisionPolicy | None = None

    def step_of(self, kind: str, size: Size, device: torch.device | None = None, *, is_watched: bool = True) -> Step:
        """A step of a freshly built model, by default on CPU, which returns a reader of its exposed time.

        To watch a step for that takes time of the host's: where that is what counts, it is not `is_watched`.
        """
        device = device or torch.device("cpu")
        torch.manual_seed(0)
        with device:
            plain: Any = self.build(size)
        if kind.endswith(COMPILED):
            for block in plain.blocks:
                block.compile()
        if self.policy is not None and kind.startswith("unsharded"):
            plain.to(self.policy.param_dtype)
        model = shard(kind, plain, device, policy=self.policy)
        with device:
            bare = self.step(model, size)

        def step() -> Reader | None:
            reader = None
            if is_watched:
                reader = watched(kind, model, bare)
            else:
                bare()
            if device.type == "cuda":
                torch.cuda.synchronize()
            return reader

        return step


STEPS: dict[str, Workload] = {
    "batch 4 x 128 tokens": Workload(),
    "batch 4 x 128 tokens, bf16": Workload(policy=BF16),
    "batch 1 x 16 tokens": Workload(step=partial(_train, batch=1, tokens=16)),
}
FAMILY: dict[str, Workload] = {
    "Llama": Workload(_llama),
    "4 micro-batches": Workload(step=_accumulate),
    "checkpointing": Workload(lambda size: GPT(replace(size, checkpointing=True))),
    "frozen but for norms": Workload(_frozen),
    "150 tiny blocks": Workload(_tiny_units, partial(_train, batch=1, tokens=4)),
    "decoding": Workload(step=_decode),
}


_TINY_STEP = partial(_train, batch=1, tokens=16, fused=True)
ON_THE_HOST: dict[str, Workload] = {  # by a fused optimizer: by AdamW's loop much of FSDP2's time is in the step
    "GPT": Workload(step=_TINY_STEP),
    "conv net": Workload(ConvNet, _classify),
    "experts": Workload(Experts, _TINY_STEP),
    "HF Llama": Workload(HFLlama, _TINY_STEP),
}
HOW_ON_THE_HOST: dict[str, Workload] = {  # other steps of the GPT
    "clipped": Workload(step=partial(_TINY_STEP, max_norm=1.0)),
    "4 micro-batches": Workload(step=partial(_accumulate, tokens=16, fused=True)),
    "frozen but for norms": Workload(_frozen, _TINY_STEP),
}


def step_of(kind: str, size: Size, batch: int, tokens: int, policy: MixedPrecisionPolicy | None = None) -> Step:
    """An AdamW step of a freshly built GPT on CPU."""
    return Workload(step=partial(_train, batch=batch, tokens=tokens), policy=policy).step_of(kind, size)


def compiling_here() -> AbstractContextManager[object]:
    """Inductor compiles in this process: ranks are many already, and idle workers would be timed, too."""
    import torch._inductor.config as settings

    patched: AbstractContextManager[object] = settings.patch({"compile_threads": 1})
    return patched


def overheads(rows: dict[str, Summary]) -> dict[str, float]:
    """What dshard adds to the unsharded step, over what FSDP2 adds; by the suffix of dshard's kind."""

    def added(kind: str) -> float:
        return (rows[kind]["median_ms"] or 0.0) - (rows["unsharded"]["median_ms"] or 0.0)

    pairs = [(way + own, way) for way in ("", ", no reshard") for own in ("", MESSAGES) if f"dshard{way}{own}" in rows]
    return {suffix: added(f"dshard{suffix}") / added(f"FSDP2{way}") for suffix, way in pairs}
