"""Measured runs from a table: what each row's step is made of, told from its model's dimensions."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard.cli.gpt import GPT, GPTConfig
from dshard.cli.llama import Llama, LlamaConfig
from dshard.cli.notations import SkippedError, canonical, seconds_of
from dshard.cli.presets import checkpoint_blocks
from dshard.cli.usage import UsageError

if TYPE_CHECKING:
    from dshard.planner import Device
    from dshard.planner.calibration import Floats, Run, Terms
    from dshard.planner.traces import Trace

NEEDED = ("gpu", "n_gpus", "layers", "d_model", "heads", "vocab", "seq", "micro_batch")
RATES = ("tokens_s_gpu", "step_s")
PAIRED = ("source", "model", "gpu", "n_gpus", "micro_batch", "grad_accum", "seq", "precision", "act_ckpt", "compile")
_LAYERS = 5  # that are traced: the one in the middle stands for all that are no first or last one


@dataclass(frozen=True, slots=True)
class Table:
    """What a file held.

    Attributes:
        runs: that can be used.
        skipped: why others cannot, and how many.
    """

    runs: tuple[Run, ...]
    skipped: dict[str, int]


def read_runs(path: Path) -> Table:
    """Reads a table of tab-separated values with a header; columns that are missing have the usual values.

    Raises:
        UsageError: it cannot be read, lacks a column that is needed, or a row holds what is no number.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(
            f"RUNS must be a table of tab-separated values, but {path} cannot be read: {error}."
        ) from error
    missing = [name for name in NEEDED if rows and name not in rows[0]]
    if rows and not missing and not any(name in rows[0] for name in RATES):
        missing = [RATES[0]]
    if not rows or missing:
        what, wanted = f"has no column {missing[0]!r}" if rows else "has no rows", ", ".join(NEEDED)
        raise UsageError(
            f"RUNS must have the columns {wanted}, and {' or '.join(RATES)}, but {path} {what}. Pass another."
        )
    traced: dict[tuple[str, ...], _Traced] = {}
    runs, skipped = [], dict[str, int]()
    for number, row in enumerate(rows, 2):
        try:
            empty = [name for name in NEEDED if not row[name]]
            if empty or not any(row.get(name) for name in RATES):
                raise SkippedError(f"no {(*empty, RATES[0])[0]}")
            runs.append(_run(canonical(row), number, traced))
        except SkippedError as why:
            skipped[str(why)] = skipped.get(str(why), 0) + 1
        except (ValueError, ZeroDivisionError) as error:
            raise UsageError(f"RUNS must hold numbers, but line {number} of {path} does not: {error}.") from error
    if not runs:
        raise UsageError(f"RUNS must have rows that can be used, but {path} has none: {', '.join(skipped)}.")
    return Table(tuple(runs), skipped)


@dataclass(frozen=True, slots=True)
class _Traced:
    """A model's step at one and at two samples; of each unit: in how many layers it stands, and its parameters."""

    one: Trace
    two: Trace
    repeats: tuple[int, ...]
    numels: tuple[int, ...]


def _run(row: dict[str, str], number: int, traced: dict[tuple[str, ...], _Traced]) -> Run:
    from dshard.planner import DEVICES
    from dshard.planner.calibration import Run

    device = DEVICES[row["gpu"]]
    is_whole = row["act_ckpt"] == "full"
    names = ("d_model", "heads", "kv_heads", "ffn", "mlp", "vocab", "tied", "seq", "layers")
    key = (*(row.get(name, "") for name in names), str(is_whole))
    if key not in traced:
        traced[key] = _trace(row, is_checkpointed=is_whole)
    found, batch, num_ranks = traced[key], int(row["micro_batch"]), int(row["n_gpus"])
    stored = 2 if "pure" in row["precision"] and num_ranks == 1 else 4
    reduced = 4 if "fp32 reduce" in row["precision"] else 2
    numels = _expanded([float(each) for each in found.numels], found.repeats)
    forward, backward = (_terms(found, batch, device, is_backward=half) for half in (False, True))
    backward = _recomputed(forward, backward, row["act_ckpt"])
    memory = device.memory_bytes_per_s
    sharding, per_host, num_backwards = row["sharding"], int(row["gpus_per_node"]), int(row.get("grad_accum", 1))
    gbit = row.get("internode_gbps_per_node")
    within = per_host if sharding == "hybrid" else num_ranks
    unused = found.one.unused_in_backward
    return Run(
        name=row.get("id", f"line {number}"),
        source=row.get("source", "given"),
        pair=tuple(row.get(name, "") for name in PAIRED),
        sharding=sharding,
        seconds=seconds_of(row),
        device=device,
        num_ranks=num_ranks,
        ranks_per_host=per_host,
        network=float(gbit) * 1e9 / 8 if gbit else device.between_hosts.bytes_per_s,
        num_backwards=num_backwards,
        is_compiled=row["compile"] == "1",
        forward=_with_copies(forward, 2 * numels / memory),
        backward=_with_copies(backward, reduced * numels / memory),
        gather_bytes=2 * numels,
        grad_bytes=reduced * numels,
        uses_backward=_expanded([float(part not in unused) for part in found.one.order], found.repeats),
        optimizer_s=float(numels.sum()) / within * 7 * stored / memory,
    )


def _trace(row: dict[str, str], *, is_checkpointed: bool) -> _Traced:
    """Traces a model of a few layers, each unit of which stands for itself, and one block for the rest."""
    from dshard.planner.tracing import trace
    from dshard.planning.profile import parts_of

    layers = int(row["layers"])
    model = _model(row, min(layers, _LAYERS))
    if is_checkpointed:
        checkpoint_blocks(model)
    parts = parts_of(model)
    traces = []
    for batch in (1, 2):
        sample = torch.empty(batch, int(row["seq"]), dtype=torch.int64, device="meta")
        traces.append(trace(model, sample, parts, dtype=torch.bfloat16, loss_of=_loss))
    middle = [i for i, part in enumerate(parts) if part.label == f"blocks.{_LAYERS // 2}"]
    params = dict(model.named_parameters())
    order = traces[0].order
    numels = tuple(sum(params[name].numel() for name in parts[i].params) for i in order)
    if layers > _LAYERS and len(middle) != 1:
        raise ValueError(f"{layers} layers of {row['d_model']} features are not units of their own")
    return _Traced(traces[0], traces[1], tuple(1 + max(0, layers - _LAYERS) * (i in middle) for i in order), numels)


def _model(row: dict[str, str], layers: int) -> nn.Module:
    width, heads, vocab = int(row["d_model"]), int(row["heads"]), int(row["vocab"])
    with torch.device("meta"):
        if row["mlp"] == "swiglu":
            inner = int(row.get("ffn") or 4 * width)
            return Llama(LlamaConfig(layers, width, heads, int(row.get("kv_heads") or heads), inner, vocab))
        return GPT(GPTConfig(int(row["seq"]), layers, width, heads, vocab, row["tied"] == "1"))


def _loss(logits: Tensor) -> Tensor:
    rows = logits.flatten(0, 1)
    return F.cross_entropy(rows.float(), torch.zeros(rows.shape[0], dtype=torch.int64))


def _expanded(values: Sequence[float], repeats: Sequence[int]) -> Floats:
    import numpy as np

    return np.repeat(np.array(values), repeats)


def _terms(found: _Traced, batch: int, device: Device, *, is_backward: bool) -> Terms:
    """Each unit's, at a batch size; all of it grows linearly."""
    import numpy as np

    from dshard.planner.calibration import Terms

    one, two = (_counts(each, device, is_backward=is_backward) for each in (found.one, found.two))
    columns = [[a + (b - a) * (batch - 1) for a, b in zip(*both, strict=True)] for both in zip(one, two, strict=True)]
    arrays = [_expanded(column, found.repeats) for column in columns]
    product, attention, operands, attention_bytes, other = arrays
    return Terms(product, attention, operands, attention_bytes, other, np.zeros_like(product))


def _counts(trace: Trace, device: Device, *, is_backward: bool) -> list[list[float]]:
    """Seconds at the rates of a datasheet, by kind and unit."""
    from dshard.planner.rates import kind_of

    found = [[0.0] * len(trace.parts) for _ in range(5)]
    for phase in trace.phases:
        if phase.is_backward != is_backward:
            continue
        for op in phase.ops:
            kind, traffic_s = kind_of(op), op.num_bytes / device.memory_bytes_per_s
            if kind == "other":
                found[4][phase.part] += traffic_s
                continue
            peak = device.flops_per_s.get(str(op.dtype).removeprefix("torch."), device.flops_per_s["float32"])
            place = 0 if kind == "product" else 1
            found[place][phase.part] += op.flops / peak
            found[place + 2][phase.part] += traffic_s
    return [[column[part] for part in trace.order] for column in found]


def _with_copies(terms: Terms, copied_s: Floats) -> Terms:
    from dataclasses import replace

    return replace(terms, copied_s=copied_s)


def _recomputed(forward: Terms, backward: Terms, checkpointing: str) -> Terms:
    """Backward with what selective checkpointing computes again: all of every so many blocks, or all but products."""
    from dataclasses import fields, replace

    if checkpointing == "op":
        return replace(backward, other_s=backward.other_s + forward.other_s)
    if checkpointing.startswith("every"):
        names, number = [each.name for each in fields(forward)], int(checkpointing.split()[1])
        return replace(backward, **{n: getattr(backward, n) + getattr(forward, n) / number for n in names})
    return backward
