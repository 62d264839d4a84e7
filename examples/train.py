"""Train a byte-level GPT on the sources of Python's standard library, sharded over all ranks. `make train` runs it.

    torchrun --nproc-per-node 2 examples/train.py
    torchrun --nproc-per-node 2 examples/train.py --compare           # beside the same model under DDP
    torchrun --nproc-per-node 2 examples/train.py --stop-after 75     # save and end early,
    torchrun --nproc-per-node 4 examples/train.py --resume            # and go on, on any number of ranks
    torchrun --nproc-per-node 2 examples/train.py --bf16 --strategy zero2
    torchrun --nproc-per-node 2 examples/train.py --memory 150MiB     # the fastest strategies that fit, by a plan

From top to bottom: the text, the model, how it is sharded, a step, the loop. The model and the loop are plain PyTorch.
"""

import argparse
import math
import os
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dshard

MAX_BYTES = 16 * 2**20  # of text
VALIDATION_SHARE = 20  # one byte in so many is held out


# ---- The text: bytes, of which the end is held out, and batches that depend on the step and the rank alone.


def read_text(path: Path | None) -> Tensor:
    """The bytes of a file, or of Python's standard library, shape (bytes,)."""
    if path is not None:
        text = path.read_bytes()[:MAX_BYTES]
    else:
        library = Path(sysconfig.get_paths()["stdlib"])
        skipped = ("site-packages", "dist-packages", "test", "tests")
        files = [file for file in sorted(library.rglob("*.py")) if not set(skipped) & set(file.parts)]
        text = b"".join(file.read_bytes() for file in files)[:MAX_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Stretches of a text, shape (starts, length + 1): inputs, and one byte further on, targets."""
    return text[starts[:, None] + torch.arange(length + 1)].long()


def train_batch(text: Tensor, args: argparse.Namespace, step: int) -> Tensor:
    """This rank's windows of a step. Only the step number is needed to continue the order after a restart."""
    generator = torch.Generator().manual_seed(hash((args.seed, step, dist.get_rank())) % 2**62)
    return windows(text, torch.randint(len(text) - args.block, (args.batch,), generator=generator), args.block)


# ---- The model.


class Block(nn.Module):
    """A pre-norm transformer block; (batch, time, width) in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, then the MLP, to the residual stream."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A decoder-only transformer over bytes; int64 (batch, time) to logits (batch, time, 256)."""

    def __init__(self, layers: int, width: int, heads: int, block: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for name, param in self.named_parameters():
            if param.ndim == 2:  # the two maps into the residual stream begin smaller
                ends_branch = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * layers) if ends_branch else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte at every position."""
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ---- How it is sharded.


def shard(model: GPT, args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Shard a model in place: every parameter becomes a tensor of which this rank holds a part."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh}
    if args.bf16:  # all-gathered and computed with in bf16, reduced and stepped in fp32
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if args.memory is not None:
        sample = torch.zeros(args.batch, args.block, dtype=torch.long, device=device)
        options["plan"] = dshard.plan(model, sample, mesh=mesh, memory=args.memory)
        say(str(options["plan"]))
    elif args.strategy != "full":
        options["strategy"] = args.strategy
    return dshard.fully_shard(model, **options)


# ---- One step, and what is measured around it.


@dataclass
class Run:
    """A model that trains; with --compare there are two."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


def new_run(name: str, args: argparse.Namespace, device: torch.device) -> Run:
    """A model with the same first weights on every rank, sharded or under DDP, and its optimizer."""
    torch.manual_seed(args.seed)
    model: Any = GPT(args.layers, args.width, args.heads, args.block).to(device)
    model = shard(model, args, device) if name == "sharded" else DistributedDataParallel(model)
    return Run(name, model, torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95)))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean loss per byte, in nats."""
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def mean(value: Tensor) -> float:
    """The mean over all ranks of a number of each."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over the first tenth of the steps, then a cosine down to a tenth."""
    warm_up = max(1, args.steps // 10)
    progress = min(1.0, (step - warm_up) / max(1, args.steps - warm_up))
    return args.lr * ((step + 1) / warm_up if step < warm_up else 0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def train_step(run: Run, batch: Tensor, lr: float) -> None:
    """Forward, backward, clip, update."""
    started = time.perf_counter()
    run.optimizer.param_groups[0]["lr"] = lr
    loss = loss_of(run.model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0, error_if_nonfinite=True)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.losses.append(mean(loss))
    run.seconds += time.perf_counter() - started


@torch.no_grad()
def evaluate(run: Run, text: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """The mean loss on windows that lie evenly over the held-out text, a part of them on each rank."""
    starts = torch.linspace(0, len(text) - args.block - 1, 8 * dist.get_world_size(), dtype=torch.float64).long()
    own = starts.tensor_split(dist.get_world_size())[dist.get_rank()]
    return mean(loss_of(run.model, windows(text, own, args.block).to(device)))


def state_bytes(run: Run) -> int:
    """Bytes that this rank holds between steps: parameters and the optimizer's state, of sharded ones its part."""
    states = [value for state in run.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in (*run.model.parameters(), *states)]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


@torch.no_grad()
def sample(run: Run, args: argparse.Namespace, device: torch.device) -> str:
    """Text that the model writes. All ranks write the same, because each forward all-gathers weights from all."""
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.tensor([list(b"\ndef ")], device=device)
    for _ in range(args.sample):
        logits = run.model(tokens[:, -args.block :])[:, -1].float().cpu()
        chosen = torch.multinomial(F.softmax(logits / 0.8, dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, chosen.to(device)], dim=1)
    text = bytes(tokens[0].tolist()).decode("ascii", "replace")
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def say(text: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


# ---- The loop.


def folder_of(args: argparse.Namespace) -> Path:
    """The folder of the last run to resume it, else one for a new run: earlier runs are left alone."""
    known = sorted(int(path.name) for path in args.out.glob("[0-9]*") if path.name.isdecimal())
    return args.out / str(known[-1] if args.resume and known else (known[-1] + 1 if known else 1))


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train to the last step, with a report and a checkpoint now and then."""
    text = read_text(args.data)
    num_held_out = max(len(text) // VALIDATION_SHARE, args.block + 1)
    text, held_out = text[:-num_held_out], text[-num_held_out:]
    runs = [new_run("sharded", args, device)] + ([new_run("DDP", args, device)] if args.compare else [])
    sharded, folder, first = runs[0], folder_of(args), 0
    num_params = sum(param.numel() for param in sharded.model.parameters())
    say(f"{num_params / 1e6:.1f} M parameters on {dist.get_world_size()} x {device.type}, {len(text):,} bytes of text")
    if args.resume and any(folder.glob("step-*")):
        first = dshard.checkpoint.load(folder, sharded.model, sharded.optimizer)["step"]
        say(f"resumed {folder} at step {first}")
    last = args.steps if args.stop_after is None else min(args.steps, args.stop_after)
    for step in range(first, last):
        for run in runs:
            train_step(run, train_batch(text, args, step).to(device), learning_rate(step, args))
        done = step + 1
        if done % 5 == 0 or done in (1, last):
            losses = "  ".join(f"{run.name} {run.losses[-1]:.6f}" for run in runs)
            rate = args.batch * args.block * dist.get_world_size() * (done - first) / sharded.seconds
            say(f"step {done:4}  loss {losses}  {rate:,.0f} bytes/s")
        if done % args.every == 0 or done == last:
            losses = "  ".join(f"{run.name} {evaluate(run, held_out, args, device):.6f}" for run in runs)
            say(f"step {done:4}  held out {losses}")
            path = folder / f"step-{done:06}"
            dshard.checkpoint.save(path, sharded.model, sharded.optimizer, step=done, extra={"step": done}, keep=2)
    for run in runs:
        say(f"{run.name}: {state_bytes(run) / 1e6:.1f} MB of parameters and optimizer state on rank 0")
    if args.compare:
        differences = [abs(a - b) for a, b in zip(*(run.losses for run in runs), strict=True)]
        say(f"largest difference of the losses over all steps: {max(differences):.1e}")
    if args.sample:
        say(f"sample:\n{sample(sharded, args, device)}")
    say(f"checkpoints are in {folder}")


def main() -> None:
    """Parse the command line, join the other ranks, train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, metavar="FILE", help="a text (Python's standard library)")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), metavar="DIR", help="checkpoints (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue the last run in --out, if there is one")
    parser.add_argument("--compare", action="store_true", help="train the same model under DDP in the same loop")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16")
    parser.add_argument("--strategy", default="full", help="full, keep, zero1, zero2, ddp or hybrid(N) (%(default)s)")
    parser.add_argument("--memory", help="limit per rank, such as 150MiB: strategies by a plan, in place of --strategy")
    parser.add_argument("--lr", type=float, default=5e-4, help="largest learning rate (%(default)s)")
    numbers = {"steps": 150, "stop-after": None, "every": 50, "seed": 0, "layers": 4, "width": 448, "heads": 7}
    for name, usual in (numbers | {"block": 64, "batch": 8, "sample": 200}).items():
        parser.add_argument(f"--{name}", type=int, default=usual, metavar="N", help="(%(default)s)")
    args = parser.parse_args()
    if args.compare and args.resume:
        parser.error("--compare begins at the first step, but --resume continues. Leave one of them out.")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
