"""Training with AdamW8bit beside AdamW: losses of a byte-level GPT, bytes of states, and times of a step."""

from __future__ import annotations

import importlib
import statistics
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dshard
from benchmarks.measure import interleave, on_ranks
from benchmarks.models import GPT, Size, mesh_of
from benchmarks.output import Output, bars_of
from dshard.optim import AdamW8bit

_VOCAB, _LENGTH, _BATCH = 256, 64, 8
_LAST = 50  # steps whose losses are averaged
_LR = 1e-3


def _text(num_bytes: int = 1 << 20) -> Tensor:
    """Python's own library, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:num_bytes]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _loss(model: Any, text: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(text) - _LENGTH - 1, (_BATCH,), generator=generator)
    tokens = text[starts[:, None] + torch.arange(_LENGTH + 1)].long()
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _trained(kind: str, size: Size, num_steps: int) -> dict[str, Any]:
    """Mean loss of the last steps, over ranks, and bytes of states per parameter of a shard."""
    torch.manual_seed(0)
    model, text, losses = dshard.fully_shard(GPT(size)), _text(), []
    optimizer: Any = AdamW8bit(model.parameters(), lr=_LR) if kind == "AdamW8bit" else None
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=_LR)
    for step in range(num_steps):
        loss = _loss(model, text, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses[-_LAST:]).mean()
    dist.all_reduce(mean)
    scales = optimizer.__dict__.get("_dshard_scales")  # of which a rank keeps others than it has shards of
    named = [(name, each) for states in optimizer.state.values() for name, each in states.items() if each.dim()]
    num_bytes = sum(each.to_local().nbytes for name, each in named if not name.endswith("_scale"))
    num_bytes += scales.num_bytes if scales is not None else 0
    params: list[Any] = list(model.parameters())
    numel = sum(param.to_local().numel() for param in params)
    return {"loss": mean.item() / dist.get_world_size(), "state_bytes_per_parameter": num_bytes / numel}


def _times(size: Size, num_rounds: int) -> dict[str, float]:
    """Milliseconds of a step, at the median."""
    warnings.simplefilter("ignore")
    steps = {}
    for name in ("AdamW, foreach", "AdamW8bit", "FSDP2, torchao's AdamW8bit"):
        torch.manual_seed(0)
        model: Any = GPT(size)
        if name.startswith("FSDP2"):
            torch_fully_shard(model, mesh=mesh_of(torch.device("cpu")))
            optimizer: Any = importlib.import_module("torchao.optim").AdamW8bit(model.parameters())
        else:
            dshard.fully_shard(model)
            is_plain = name.startswith("AdamW,")
            optimizer = (
                torch.optim.AdamW(model.parameters(), foreach=True) if is_plain else AdamW8bit(model.parameters())
            )
        _loss(model, _text(), 0).backward()
        steps[name] = optimizer.step
    samples = interleave(steps, num_rounds=num_rounds, num_warmups=2)
    return {name: statistics.median(sample.step_s for sample in some) * 1e3 for name, some in samples.items()}


def run(
    output: Output, *, num_ranks: int = 2, steps: int = 500, layers: int = 2, width: int = 128, rounds: int = 9
) -> None:
    """AdamW8bit beside AdamW, on gloo ranks with a thread each: losses, bytes of states, times of a step."""
    size = Size(_VOCAB, width, layers, 4)
    rows: dict[str, Any] = {
        kind: on_ranks(num_ranks, _trained, kind, size, steps)[0] for kind in ("AdamW", "AdamW8bit")
    }
    plain = rows["AdamW"]["loss"]
    print(
        f"\n{num_ranks} ranks, {layers} blocks {width} wide, mean loss of the last {min(_LAST, steps)} of {steps} steps"
    )
    for kind, row in rows.items():
        more, num_bytes = row["loss"] / plain - 1, row["state_bytes_per_parameter"]
        print(f"{kind:<12}{row['loss']:>10.4f}{more:>+9.2%}{num_bytes:>9.3f} bytes of states a parameter")
    times = on_ranks(num_ranks, _times, size, rounds)[0]
    for kind, time_ms in times.items():
        print(f"{kind:<30}{time_ms:>10.1f} ms a step", flush=True)
    named = {kind: {"median_ms": time_ms} for kind, time_ms in times.items()}
    header = output.header(layers=layers, width=width, steps=steps)
    output.write(
        f"eight_bit_gloo_{num_ranks}",
        {"header": header, "rows": rows, "times": named},
        [bars_of("a step", {"step": named}, "median_ms")],
    )
