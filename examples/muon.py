"""Train a small language model by Muon and AdamW: torchrun --nproc-per-node 2 examples/muon.py (docs/guides/muon.md).

Muon takes the matrices of the blocks, AdamW embeddings, norms and biases. Each matrix is stepped whole by one rank: the
steps of all ranks together cost what those of one process cost. The text is Python's own library, byte by byte.
"""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dshard

VOCAB = 256  # bytes


class Model(nn.Module):
    """Bytes (batch, time) to logits (batch, time, 256)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        heads, options = max(1, width // 32), {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next byte at every position."""
        x, mask = self.embed(ids), nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def batches(steps: int, batch: int, length: int) -> Tensor:
    """Random pieces of the text, another one on each rank: (steps, batch, length + 1)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(dist.get_rank())
    starts = torch.randint(len(text) - length - 1, (steps * batch,), generator=generator).tolist()
    return torch.stack([text[start : start + length + 1] for start in starts]).view(steps, batch, -1).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("--width", 128), ("--layers", 2), ("--steps", 60), ("--batch", 8), ("--length", 128)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)

    torch.manual_seed(0)  # the same weights on all ranks
    model = Model(args.width, args.layers).to(device)
    for block in model.blocks:
        dshard.fully_shard(block)
    dshard.fully_shard(model)

    matrices = [param for param in model.blocks.parameters() if param.ndim == 2]
    known = set(map(id, matrices))
    others = [param for param in model.parameters() if id(param) not in known]
    muon = torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw", weight_decay=0.0)
    adamw = torch.optim.AdamW(others, lr=2e-3)

    for step, ids in enumerate(batches(args.steps, args.batch, args.length)):
        ids = ids.to(device)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        dshard.clip_grad_norm_(model.parameters(), 1.0)
        start = time.perf_counter()
        with dshard.CommTrace() as trace:
            muon.step()
        step_ms = (time.perf_counter() - start) * 1e3
        adamw.step()
        muon.zero_grad()
        adamw.zero_grad()
        if dist.get_rank() == 0 and (step % 10 == 0 or step == args.steps - 1):
            sent = trace.payload_bytes
            print(
                f"step {step} loss {loss.item():.3f}, Muon: {step_ms:.1f} ms, {sent:,} bytes sent by rank 0", flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
