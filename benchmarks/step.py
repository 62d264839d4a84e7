"""A training step of a GPT: dshard beside FSDP2, DDP and the unsharded step, interleaved in one run.

python benchmarks/step.py [--rounds 12] [--no-write]
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from _common import header, interleave, run_ranks, summary, table, write

import dshard

VOCAB, WIDTH, LAYERS, HEADS = 2048, 512, 8, 8  # 27 million parameters
ROWS = {"batch 4 x 128 tokens": (4, 128), "batch 1 x 16 tokens": (1, 16)}


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, tokens, width) to the same."""
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Shape (batch, tokens) to (batch, tokens, vocab)."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(kind: str) -> nn.Module:
    """The model, sharded or not."""
    torch.manual_seed(0)
    model = GPT()
    if kind == "DDP":
        return DistributedDataParallel(model)
    shard = {"dshard": dshard.fully_shard, "FSDP2": torch_fully_shard}.get(kind.split(",")[0])
    if shard is not None:
        reshard = "no reshard" not in kind
        for block in model.blocks:
            shard(block, reshard_after_forward=reshard)
        shard(model, reshard_after_forward=reshard)
    return model


def step_of(kind: str, batch: int, tokens: int) -> Callable[[], Any]:
    """One forward, backward and AdamW step."""
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, VOCAB, (batch, tokens + 1))

    def step() -> None:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


KINDS = ["unsharded", "DDP", "FSDP2", "dshard", "FSDP2, no reshard", "dshard, no reshard"]


def bench(num_rounds: int, keep: bool) -> None:
    """Time all variants on this rank; rank 0 prints and writes."""
    warnings.simplefilter("ignore")
    results = {}
    for row, (batch, tokens) in ROWS.items():
        variants = {kind: step_of(kind, batch, tokens) for kind in KINDS}
        times = interleave(variants, num_rounds=num_rounds, num_warmups=2)
        results[row] = {kind: summary(t) for kind, t in times.items()}
    if dist.get_rank():
        return
    for row, rows in results.items():
        base = rows["unsharded"]["median_ms"]
        print(f"\n{row}\n{table(rows)}")
        for suffix in ("", ", no reshard"):
            ours, theirs = (rows[kind + suffix]["median_ms"] - base for kind in ("dshard", "FSDP2"))
            print(f"overhead over unsharded{suffix}: {ours / theirs:.2f} of FSDP2's")
    if keep:
        print(f"wrote {write('step_gloo_2', {'header': header(num_ranks=2), 'rows': results}).name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    run_ranks(bench, 2, options.rounds, not options.no_write)
