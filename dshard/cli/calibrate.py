"""``dshard calibrate``: fits the constants of predicted times to measured runs, and writes them as a profile."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard.arguments import nearest
from dshard.cli.models import GPT, GPTConfig, Llama, LlamaConfig
from dshard.cli.usage import UsageError, add_command, check_output, named
from dshard.errors import DShardError
from dshard.planner import DEVICES, Device, Misses, Rates
from dshard.planner.calibration import Run, calibrated, errors_of, misses_of, recomputed, terms_of
from dshard.planner.devices import find_device
from dshard.planner.rates import IN_TEN, find_rates, published
from dshard.planner.tracing import Trace, trace
from dshard.planning.plan import parts_of
from dshard.testing.training import checkpoint_blocks

_NEEDED = ("gpu", "n_gpus", "layers", "d_model", "heads", "vocab", "seq", "micro_batch")
_COUNTS = (*_NEEDED[1:], "grad_accum", "gpus_per_node", "kv_heads", "ffn")
_WORDS = {  # columns that hold one of some words, of which the first is usual
    "sharding": ("full", "keep", "hybrid"),
    "mlp": ("gelu", "swiglu"),
    "tied": ("0", "1"),
    "precision": ("bf16", "bf16 pure", "bf16 fp32 reduce"),
    "compile": ("0", "1"),
    "act_ckpt": ("none", "full", "op", *(f"every {number}" for number in range(2, 10))),
}
_USUAL = {"grad_accum": "1", "source": "given", **{name: words[0] for name, words in _WORDS.items()}}
_READ = (*_NEEDED, *_COUNTS, *_USUAL, "tokens_s_gpu", "step_s", "internode_gbps_per_node", "id")
_NOTES = (  # what a table of published runs says beside what is predicted
    *("ref", "framework", "model", "tflops_gpu_published", "mfu_pct_published", "hfu_pct_published", "peak_mem_gib"),
    *("mem_kind", "notes"),
)
_LAYERS = 5  # that are traced: the one in the middle stands for all that are no first or last one


def add_parsers(commands: Any) -> None:
    """Adds this subcommand to the parser of ``dshard``."""
    parser = add_command(commands, run_calibrate)
    parser.add_argument("runs", metavar="RUNS", type=Path, help="a table of measured runs")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="to start from (the shipped one)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the profile as JSON")


def run_calibrate(args: argparse.Namespace) -> int:
    """Fit predicted times to measured runs.

    Fits the constants of predicted times, and writes a profile for dshard plan and simulate --profile.
      dshard calibrate runs.tsv --out profile.json
    RUNS is a table of tab-separated values with a header, one run of FSDP a row. Columns that each run needs: gpu (a
    name that --device takes), n_gpus, layers, d_model, heads, vocab, seq, micro_batch, and tokens_s_gpu or step_s.
    Others, with what they are where they are empty: sharding (full; keep, hybrid), grad_accum (1), gpus_per_node and
    internode_gbps_per_node (what is usual for the gpu), mlp (gelu; swiglu, which takes kv_heads and ffn), tied (0; 1),
    precision (bf16; bf16 pure, bf16 fp32 reduce), compile (0; 1), act_ckpt (none; full, op, every 2), id, source.
    Columns for the reader alone: ref, framework, model, tflops_gpu_published, mfu_pct_published, hfu_pct_published,
    peak_mem_gib, mem_kind, notes.
    What few rows say nothing about stays as it is in the shipped profile.
    """
    check_output("--out", args.out)
    with named("--profile"):
        known = find_rates("calibrate", args.profile) or published()
    runs = read_runs(args.runs)
    found = calibrated(runs, known, f"{len(runs)} runs of {args.runs.name}")
    print(f"{len(runs)} runs")
    print("\n".join(constants_table(found)))
    print("\n".join(misses_table([misses_of(errors_of(runs, found.constants), "fitted to all"), *found.misses])))
    steps = None if found.spread is None else found.spread.steps
    if steps is not None:
        print(f"steps on this cluster take {steps.low:.2f} to {steps.high:.2f} of the predicted time in {IN_TEN} of 10")
    if args.out is not None:
        found.save(args.out)
        print(f"wrote {args.out}")
    return 0


def constants_table(rates: Rates) -> list[str]:
    """As Markdown: one line per constant."""
    lines = ["| constant | value | known to | before | unit |", "|---|---|---|---|---|"]
    for name, each in rates.constants.items():
        lines.append(f"| {name} | {each.value:.3g} | {each.uncertainty:.0%} | {each.prior:.3g} | {each.unit} |")
    return lines


def misses_table(misses: Sequence[Misses]) -> list[str]:
    """As Markdown: how far predictions are off, by the runs that they are of."""
    lines = ["| runs | number | mean error | 9 in 10 below |", "|---|---|---|---|"]
    return lines + [f"| {each.source} | {each.num_runs} | {each.mean:.1%} | {each.p90:.1%} |" for each in misses]


def read_runs(path: Path) -> tuple[Run, ...]:
    """Reads a table of runs, and traces the model of each.

    Raises:
        UsageError: it cannot be read, lacks a column that is needed, or a row says what cannot be predicted.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            table = csv.DictReader(file, delimiter="\t")
            rows, header = list(table), table.fieldnames or ()
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(
            f"RUNS must be a table of tab-separated values, but {path} cannot be read: {error}. Pass another."
        ) from error
    if not rows:
        raise UsageError(f"RUNS must have a header and rows, but {path} has no rows. Pass another.")
    known = dict.fromkeys((*_READ, *_NOTES))
    nameless = {""} if not any(row.get("") for row in rows) else set()  # a tab at the end of lines
    if unknown := [name for name in header if name not in known.keys() | nameless]:
        raise UsageError(
            f"RUNS must have columns of these names: {', '.join(known)}, but {path} has {unknown[0]!r}. Did you mean "
            f"{nearest(unknown[0], known)}? Correct the name, or leave the column out."
        )
    traced: dict[tuple[str, ...], _Traced] = {}
    runs = []
    for line, row in enumerate(rows, 2):
        try:
            runs.append(_run(_checked(row), f"line {line}", traced))
        except (ValueError, DShardError) as error:
            raise UsageError(
                f"RUNS must hold what dshard calibrate --help lists, but in line {line} of {path} {error}. Correct the "
                "row, or leave it out."
            ) from error
    return tuple(runs)


def _checked(row: Mapping[str, str | None]) -> dict[str, str]:
    """The row's columns, and what is usual where it says nothing.

    Raises:
        ValueError: it says what is not known here.
    """
    if None in row:  # where csv puts what is beyond the header
        raise ValueError("the row has more cells than the header")
    found = _USUAL | {name: value.strip() for name, value in row.items() if value and value.strip()}
    missing = [name for name in _NEEDED if name not in found]
    if missing or not {"tokens_s_gpu", "step_s"} & found.keys():
        raise ValueError(f"{[*missing, 'tokens_s_gpu'][0]} is missing")
    for name in _COUNTS:
        if name in found and (not found[name].isdecimal() or int(found[name]) < 1):
            raise ValueError(f"{name} is no whole number above 0: {found[name]}")
    for name, words in _WORDS.items():
        if found[name] not in words:
            raise ValueError(f"{name} is none of {', '.join(words)}: {found[name]}")
    device: Device = find_device("calibrate", "gpu", found["gpu"])
    device.check(torch.bfloat16)
    ranks, heads = int(found["n_gpus"]), int(found["heads"])
    per_host = min(ranks, int(found.get("gpus_per_node", device.per_host)))
    kv_heads, ffn = int(found.get("kv_heads", heads)), int(found.get("ffn", 4 * int(found["d_model"])))
    if ranks % per_host or int(found["d_model"]) % heads or heads % kv_heads:
        raise ValueError("n_gpus is no multiple of gpus_per_node, or d_model of heads, or heads of kv_heads")
    if found["mlp"] == "gelu" and (kv_heads != heads or ffn != 4 * int(found["d_model"])):
        raise ValueError("kv_heads or ffn is given beside mlp gelu, which has as many heads, and 4 times d_model")
    return found | {"gpus_per_node": str(per_host), "kv_heads": str(kv_heads), "ffn": str(ffn)}


@dataclass(frozen=True, slots=True)
class _Traced:
    """A step of a model; of each unit in the order of the trace: in how many layers it stands, and its parameters."""

    trace: Trace
    repeats: tuple[int, ...]
    numels: tuple[int, ...]


def _run(row: dict[str, str], name: str, traced: dict[tuple[str, ...], _Traced]) -> Run:
    """A row's run. Models are traced once for each batch."""
    device, num_ranks, per_host = DEVICES[row["gpu"]], int(row["n_gpus"]), int(row["gpus_per_node"])
    names = ("d_model", "heads", "kv_heads", "ffn", "mlp", "vocab", "tied", "seq", "layers", "micro_batch")
    key = (*(row[each] for each in names), str(row["act_ckpt"] == "full"))
    if key not in traced:
        traced[key] = _trace(row)
    found = traced[key]
    stored = 2 if row["precision"] == "bf16 pure" and num_ranks == 1 else 4
    num_sharing = per_host if row["sharding"] == "hybrid" else num_ranks
    reduced = 4 if row["precision"] == "bf16 fp32 reduce" else 2
    numels, memory = np.repeat(np.array(found.numels, dtype=float), found.repeats), device.memory_bytes_per_s
    uses = [float(part not in found.trace.unused_in_backward) for part in found.trace.order]
    forward = terms_of(found.trace, device, 2 * numels / memory, found.repeats, is_backward=False)
    backward = terms_of(found.trace, device, reduced * numels / memory, found.repeats, is_backward=True)
    tokens = int(row["micro_batch"]) * int(row["grad_accum"]) * int(row["seq"])
    network = float(row.get("internode_gbps_per_node", 0)) * 1e9 / 8
    seconds = float(row["step_s"]) if "step_s" in row else tokens / float(row["tokens_s_gpu"])
    if not 0 < seconds < float("inf") or not 0 <= network < float("inf"):
        raise ValueError("a time or rate is no finite number above 0")
    return Run(
        name=row.get("id", name),
        source=row["source"],
        row=row,
        sharding=row["sharding"],
        seconds=seconds,
        device=device,
        num_ranks=num_ranks,
        ranks_per_host=per_host,
        network=network or device.between_hosts.bytes_per_s,
        num_backwards=int(row["grad_accum"]),
        is_compiled=row["compile"] == "1",
        forward=forward,
        backward=recomputed(forward, backward, row["act_ckpt"]),
        gather_bytes=2 * numels,
        grad_bytes=reduced * numels,
        uses_backward=np.repeat(np.array(uses), found.repeats),
        optimizer_s=float(numels.sum()) / num_sharing * 7 * stored / memory,
    )


def _trace(row: Mapping[str, str]) -> _Traced:
    """Traces a model of a few layers, each unit of which stands for itself, and one block for the rest."""
    layers = int(row["layers"])
    model = model_of(row, min(layers, _LAYERS))
    if row["act_ckpt"] == "full":
        checkpoint_blocks(model)
    parts = parts_of(model)
    sample = torch.empty(int(row["micro_batch"]), int(row["seq"]), dtype=torch.int64, device="meta")
    found = trace(model, sample, parts, dtype=torch.bfloat16, loss_of=loss_of)
    middle = [i for i, part in enumerate(parts) if part.label == f"blocks.{_LAYERS // 2}"]
    if layers > _LAYERS and len(middle) != 1:
        raise ValueError(f"{layers} layers of {row['d_model']} features are too small to be units of their own")
    params = dict(model.named_parameters())
    numels = tuple(sum(params[name].numel() for name in parts[i].params) for i in found.order)
    return _Traced(found, tuple(1 + max(0, layers - _LAYERS) * (i in middle) for i in found.order), numels)


def model_of(row: Mapping[str, str], layers: int) -> nn.Module:
    """A row's model of so many layers, without memory."""
    width, heads, vocab = int(row["d_model"]), int(row["heads"]), int(row["vocab"])
    with torch.device("meta"):
        if row["mlp"] == "swiglu":
            return Llama(LlamaConfig(layers, width, heads, int(row["kv_heads"]), int(row["ffn"]), vocab))
        return GPT(GPTConfig(int(row["seq"]), layers, width, heads, vocab, row["tied"] == "1"))


def loss_of(logits: Tensor) -> Tensor:
    """The loss of a language model, as it costs time."""
    rows = logits.flatten(0, 1)
    return F.cross_entropy(rows.float(), torch.zeros(rows.shape[0], dtype=torch.int64))
