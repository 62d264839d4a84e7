"""Peaks of memory that were published, beside what is predicted for the same runs.

`python -m dshard.cli.published_memory` prints the table, of the runs that are shipped or of another file.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard.cli.presets import checkpoint_blocks

if TYPE_CHECKING:
    from dshard.planner import Plan

RUNS = Path(__file__).parents[1] / "planner" / "published_runs.tsv"
_KINDS = {"max active": "active_bytes", "max reserved": "reserved_bytes", "max allocated": "live_bytes"}
_CHUNKS = 8  # of the sequence, where logits are computed in chunks: torchtune's CEWithChunkedOutputLoss
_POSITIONS = 131_072  # that a Llama 3.2 has angles for


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A run whose peak was published.

    Attributes:
        name: Of the run.
        kind: Which of a `MemoryForecast`'s figures was published.
        published_bytes: The most memory that it took.
        predicted_bytes: The same, predicted.
        what: What the run did, as far as it costs memory.
    """

    name: str
    kind: str
    published_bytes: int
    predicted_bytes: int
    what: str

    @property
    def error(self) -> float:
        """By which part of what was published the prediction is too high; negative if it is too low."""
        return self.predicted_bytes / self.published_bytes - 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a framework does, as far as memory shows it.

    Attributes:
        is_compiled: Each block is compiled, in two halves around attention, and so is the loss.
        is_chunked: Logits and their loss are computed in chunks of the sequence.
        is_checkpointed: Blocks are computed again in backward.
    """

    is_compiled: bool
    is_chunked: bool
    is_checkpointed: bool


class _Kept(torch.autograd.Function):
    """Compiled code: what the partitioner of torch.compile keeps, and what is there while its backward runs.

    It keeps what products and attention read or write (`ban_recompute_materialized_backward` of torch's functorch
    config); what lies between is computed again within a kernel.
    """

    @staticmethod
    def forward(ctx: Any, kept: Sequence[int], made: Sequence[int], num_inputs: int, *tensors: Tensor) -> Any:
        first = tensors[0]
        inside = [first.new_empty(*first.shape[:-1], width) for width in kept]
        ctx.save_for_backward(*tensors, *inside)
        ctx.num = len(tensors)
        results = tuple(first.new_empty(*first.shape[:-1], width) for width in made)
        return results if len(made) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensors = ctx.saved_tensors
        inside = [torch.empty_like(each) for each in tensors[ctx.num :]]  # each has a gradient, at one time or another
        found = [torch.empty_like(each) for each in tensors[: ctx.num]]
        del inside
        return None, None, None, *found


class _KeptLoss(torch.autograd.Function):
    """A compiled cross entropy: logits are kept as they come; backward scatters into zeros of fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        scattered = torch.empty_like(logits, dtype=torch.float32)
        found = torch.empty_like(logits)
        del scattered
        return found


def _kept(inputs: Sequence[Tensor], module: nn.Module, kept: Sequence[int], made: Sequence[int]) -> Any:
    return _Kept.apply(kept, made, len(inputs), *inputs, *module.parameters())


class _Norm(nn.Module):
    """RMS norm as frameworks write it in Python: in fp32, operation by operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class _BeforeAttention(nn.Module):
    """Norm, queries, keys and values, turned by their positions; keys and values once for each head of queries."""

    def __init__(self, sizes: _Sizes, recipe: Recipe) -> None:
        super().__init__()
        self.sizes, self.recipe = sizes, recipe
        self.norm = _Norm(sizes.width)
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k, self.v = (nn.Linear(sizes.width, sizes.kv_width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        """(batch, time, width) in, three times that out."""
        sizes = self.sizes
        if self.recipe.is_compiled:
            return _kept((x,), self, (sizes.width,), (sizes.width,) * 3)
        normed = self.norm(x)
        q, k, v = (each(normed).unflatten(-1, (-1, sizes.head_width)) for each in (self.q, self.k, self.v))
        q, k = _turned(q, angles[places]), _turned(k, angles[places])
        k, v = (each.repeat_interleave(sizes.times, dim=2) for each in (k, v))
        return tuple(each.flatten(2) for each in (q, k, v))


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.unsqueeze(2).unbind(-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).type_as(x)


class _AfterAttention(nn.Module):
    """The product after attention, and the MLP, each added to the residual."""

    def __init__(self, sizes: _Sizes, recipe: Recipe) -> None:
        super().__init__()
        self.sizes, self.recipe = sizes, recipe
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.norm = _Norm(sizes.width)
        self.gate, self.up = (nn.Linear(sizes.width, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        """(batch, time, width) in and out."""
        width, inner = self.sizes.width, self.sizes.inner
        if self.recipe.is_compiled:  # the sum, the normed one, and of the MLP both products and what the third reads
            result: Tensor = _kept((x, mixed), self, (width, width, inner, inner, inner), (width,))
            return result
        x = x + self.out(mixed)
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class _Block(nn.Module):
    def __init__(self, sizes: _Sizes, recipe: Recipe) -> None:
        super().__init__()
        self.heads = sizes.width // sizes.head_width
        self.before, self.after = _BeforeAttention(sizes, recipe), _AfterAttention(sizes, recipe)

    def forward(self, x: Tensor, angles: Tensor, places: Tensor) -> Tensor:
        """(batch, time, width) in and out."""
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.before(x, angles, places))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # flex attention, which packed samples take, writes heads before time: what follows reads a copy
        return self.after(x, mixed.transpose(1, 2).flatten(2).clone())


class Decoder(nn.Module):
    """A Llama as torchtune runs it, up to its loss.

    Args:
        sizes: Of it.
        recipe: How it runs.
    """

    def __init__(self, sizes: _Sizes, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.tokens = nn.Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList(_Block(sizes, recipe) for _ in range(sizes.layers))
        self.norm = _Norm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        if sizes.is_tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("angles", torch.empty(_POSITIONS, sizes.head_width // 2, 2, dtype=torch.float32))

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
            return _KeptLoss.apply(logits if self.recipe.is_chunked else logits.float())
        rows = logits.flatten(0, 1)
        return F.cross_entropy(rows.float(), torch.zeros(rows.shape[0], dtype=torch.int64), reduction="sum")


@dataclass(frozen=True, slots=True)
class _Sizes:
    layers: int
    width: int
    head_width: int
    kv_width: int
    times: int
    inner: int
    vocab: int
    is_tied: bool

    @classmethod
    def of(cls, row: dict[str, str]) -> _Sizes:
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


def memory_rows(path: Path = RUNS) -> list[MemoryRow]:
    """Every run of a file whose peak was published, with the prediction for it."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    found, chunked = [], set[str]()
    for row in rows:
        if "chunked cross entropy" in row["notes"].lower():
            chunked.add(row["source"])  # what is added stays for the rows that follow
        if not row["peak_mem_gib"] or row["mem_kind"] not in _KINDS or row["mlp"] != "swiglu":
            continue
        recipe = Recipe(
            is_compiled=row["compile"] == "1",
            is_chunked=row["source"] in chunked and row["notes"].startswith("cumulative"),
            is_checkpointed=row["act_ckpt"].startswith("full"),
        )
        plan = plan_of(row, recipe)
        predicted = int(getattr(plan.memory_seen, _KINDS[row["mem_kind"]]))
        published = int(float(row["peak_mem_gib"]) * 2**30)
        found.append(MemoryRow(row["id"], row["mem_kind"], published, predicted, _text(recipe)))
    return found


def plan_of(row: dict[str, str], recipe: Recipe) -> Plan:
    """The plan that a run is: its model, traced, under its sharding."""
    import dshard
    from dshard.planner import Training, cluster_of

    ranks, is_pure = int(row["n_gpus"]), "pure" in row["precision"].lower() and int(row["n_gpus"]) == 1
    with torch.device("meta"):
        model = Decoder(_Sizes.of(row), recipe)
    if is_pure:
        model.to(torch.bfloat16).angles = model.angles.float()
    if recipe.is_checkpointed:
        checkpoint_blocks(model)
    training = Training(
        compute_dtype=torch.bfloat16,
        reduce_dtype=torch.float32 if "fp32" in row["precision"] or "DEFAULT" in row["precision"] else None,
        state_bytes_per_element=4 if is_pure else 8,
        step_bytes_per_element=0,  # torchtune's and torchtitan's AdamW is fused
        tokens_per_sample=int(row["seq"]),
    )
    name = row["gpu"].lower().replace("_", "-").removesuffix("b")
    sample = torch.empty(int(row["micro_batch"]), int(row["seq"]), dtype=torch.int64, device="meta")
    within = min(ranks, int(row["gpus_per_node"] or 8))
    sharding = {"HYBRID_SHARD": f"hybrid({within})", "SHARD_GRAD_OP": "keep", "FULL_SHARD": "full"}
    strategy = "ddp" if ranks == 1 else sharding[row["sharding"]]
    cluster = cluster_of(name, ranks)
    return dshard.plan(
        model, sample, cluster=cluster, device=name, memory="10TiB", strategies=strategy, training=training
    )


def _text(recipe: Recipe) -> str:
    words = [
        "compiled" * recipe.is_compiled,
        "loss in chunks" * recipe.is_chunked,
        "checkpointed" * recipe.is_checkpointed,
    ]
    return ", ".join(filter(None, words)) or "eager"


def main(paths: Sequence[str]) -> None:
    """Print the table."""
    for path in map(Path, paths or [str(RUNS)]):
        for row in memory_rows(path):
            print(
                f"{row.name:12} {row.what:40} {row.kind}: published {row.published_bytes / 2**30:.1f} GiB, "
                f"predicted {row.predicted_bytes / 2**30:.2f} GiB, {row.error:+.1%}"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
