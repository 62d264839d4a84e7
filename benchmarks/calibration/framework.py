"""A Llama as a framework runs it, which memory shows: norms in Python, halves of blocks that are compiled, chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_CHUNKS = 8  # of the sequence, where logits are computed in chunks: torchtune's CEWithChunkedOutputLoss
_POSITIONS = 131_072  # that a Llama 3.2 has angles for


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a framework does, as far as memory shows it.

    Attributes:
        is_compiled: Each block is compiled, in two halves around attention, and so is the loss.
        is_chunked: Logits and their loss are computed in chunks of the sequence.
        checkpointing: What is computed again in backward: "none", "full" (each block), "second" (every second block),
            or "op" (of each block all but attention and every second product: torchtitan's selective checkpointing).
        steps_early: The optimizer steps each parameter in backward, and its gradient is gone.
    """

    is_compiled: bool = False
    is_chunked: bool = False
    checkpointing: str = "none"
    steps_early: bool = False

    @property
    def fuses(self) -> bool:
        """Whether the partitioner says what blocks keep: where single operations are, they alone."""
        return self.is_compiled and self.checkpointing != "op"

    def __str__(self) -> str:
        words = {
            "compiled": self.is_compiled,
            "loss in chunks": self.is_chunked,
            f"checkpointed: {self.checkpointing}": self.checkpointing != "none",
            "steps in backward": self.steps_early,
        }
        return ", ".join(word for word, is_so in words.items() if is_so) or "eager"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a Llama: its layers, features, features per head, of keys and values, heads of queries per key, and so on."""

    layers: int
    width: int
    head_width: int
    kv_width: int
    times: int
    inner: int
    vocab: int
    is_tied: bool

    @classmethod
    def of(cls, row: dict[str, str]) -> Sizes:
        """What a row of a table says."""
        width, heads = int(row["d_model"]), int(row["heads"])
        kv_heads = int(row["kv_heads"] or heads)
        return cls(
            layers=int(row["layers"]),
            width=width,
            head_width=width // heads,
            kv_width=width // heads * kv_heads,
            times=heads // kv_heads,
            inner=int(row["ffn"]),
            vocab=int(row["vocab"].strip("~")),
            is_tied=row["tied"] == "1",
        )


class Kept(torch.autograd.Function):
    """Compiled code: what the partitioner of torch.compile keeps, and what is there while its backward runs.

    It keeps what products and attention read or write (`ban_recompute_materialized_backward` of torch's functorch
    config); what lies between is computed again within a kernel.
    """

    @staticmethod
    def forward(ctx: Any, kept: Sequence[int], made: Sequence[int], num_unread: int, *tensors: Tensor) -> Any:
        """Empty results of the features `made`; keeps as many features as `kept`, and all but the first tensors."""
        first = tensors[0]
        inside = [first.new_empty(*first.shape[:-1], width) for width in kept]
        ctx.save_for_backward(*tensors[num_unread:], *inside)
        ctx.num_read, ctx.num_unread = len(tensors) - num_unread, num_unread
        results = tuple(first.new_empty(*first.shape[:-1], width) for width in made)
        return results if len(made) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Empty gradients."""
        saved = ctx.saved_tensors
        inside = [
            torch.empty_like(each) for each in saved[ctx.num_read :]
        ]  # each has a gradient, at one time or another
        found = [torch.empty_like(each) for each in (*grads[: ctx.num_unread], *saved[: ctx.num_read])]
        del inside
        return None, None, None, *found


class KeptLoss(torch.autograd.Function):
    """A compiled cross entropy: logits are kept as they come; backward scatters into zeros of fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        """No value."""
        ctx.save_for_backward(logits)
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """An empty gradient."""
        (logits,) = ctx.saved_tensors
        scattered = torch.empty_like(logits, dtype=torch.float32)
        found = torch.empty_like(logits)
        del scattered
        return found


_NUMBER = 2  # features of bf16 that a number in fp32 takes, for each token


class _Norm(nn.Module):
    """RMS norm as frameworks write it in Python: in fp32, operation by operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class BeforeAttention(nn.Module):
    """Norm, queries, keys and values, turned by their positions; keys and values once for each head of queries."""

    def __init__(self, sizes: Sizes, recipe: Recipe) -> None:
        super().__init__()
        self.sizes, self.recipe = sizes, recipe
        self.norm = _Norm(sizes.width)
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k, self.v = (nn.Linear(sizes.width, sizes.kv_width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        """(batch, time, width) in, three times that out."""
        sizes = self.sizes
        if self.recipe.fuses:
            kept = (
                sizes.width,
                _NUMBER,
                _NUMBER * sizes.head_width,
            )  # the normed one, its scale, angles
            results: tuple[Tensor, ...] = Kept.apply(kept, (sizes.width,) * 3, 0, x, *self.parameters())
            return results
        normed = self.norm(x)
        q, k, v = (each(normed).unflatten(-1, (-1, sizes.head_width)) for each in (self.q, self.k, self.v))
        q, k = _turned(q, angles[places]), _turned(k, angles[places])
        k, v = (each.repeat_interleave(sizes.times, dim=2) for each in (k, v))
        return tuple(each.flatten(2) for each in (q, k, v))


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.unsqueeze(2).unbind(-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).type_as(x)


class AfterAttention(nn.Module):
    """The product after attention, and the MLP, each added to the residual."""

    def __init__(self, sizes: Sizes, recipe: Recipe) -> None:
        super().__init__()
        self.sizes, self.recipe = sizes, recipe
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.norm = _Norm(sizes.width)
        self.gate, self.up = (nn.Linear(sizes.width, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        """(batch, time, width) in and out."""
        width, inner = self.sizes.width, self.sizes.inner
        if (
            self.recipe.is_compiled
        ):  # the sum, the normed one, its scale; both products of the MLP, what the third reads
            kept = width, width, _NUMBER, inner, inner, inner
            result: Tensor = Kept.apply(kept, (width,), 1, x, mixed, *self.parameters())
            return result
        x = x + self.out(mixed)
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class _Block(nn.Module):
    def __init__(self, sizes: Sizes, recipe: Recipe) -> None:
        super().__init__()
        self.heads = sizes.width // sizes.head_width
        self.before, self.after = BeforeAttention(sizes, recipe), AfterAttention(sizes, recipe)

    def forward(self, x: Tensor, angles: Tensor, places: Tensor) -> Tensor:
        """(batch, time, width) in and out."""
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.before(x, angles, places))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # flex attention, which packed samples take, writes heads before time: what follows reads a copy
        return self.after(x, mixed.transpose(1, 2).flatten(2).clone())


def _contexts() -> Any:
    """What keeps single operations of a block."""
    num_products = {False: 0, True: 0}

    def policy(context: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_kept = "scaled_dot_product" in str(op)
        if op is torch.ops.aten.mm.default:
            num_products[context.is_recompute] += 1
            is_kept = num_products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Decoder(nn.Module):
    """A Llama as torchtune runs it, up to its loss.

    Args:
        sizes: Of it.
        recipe: How it runs.
    """

    def __init__(self, sizes: Sizes, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.tokens = nn.Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList(_Block(sizes, recipe) for _ in range(sizes.layers))
        self._checkpoint(recipe.checkpointing)
        self.norm = _Norm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        if sizes.is_tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("angles", torch.empty(_POSITIONS, sizes.head_width // 2, 2, dtype=torch.float32))

    def _checkpoint(self, how: str) -> None:
        again: Any = partial(checkpoint, use_reentrant=False)
        if how == "op":
            again = partial(again, context_fn=_contexts)
        for i, block in enumerate(self.blocks):
            if how in ("full", "op") or (how == "second" and i % 2 == 0):
                block.forward = partial(again, block.forward)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of tokens of shape (batch, time)."""
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.angles, places)
        x = self.norm(x)
        chunks = [self.head(each) for each in x.chunk(_CHUNKS, dim=1)] if self.recipe.is_chunked else [self.head(x)]
        losses = [self._loss(each) for each in chunks]
        del chunks
        return torch.stack(losses).sum()

    def _loss(self, logits: Tensor) -> Tensor:
        if self.recipe.is_compiled:  # in chunks all of it is compiled, else the model gives logits in fp32
            return KeptLoss.apply(logits if self.recipe.is_chunked else logits.float())
        rows = logits.flatten(0, 1)
        return F.cross_entropy(rows.float(), torch.zeros(rows.shape[0], dtype=torch.int64), reduction="sum")
