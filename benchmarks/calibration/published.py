"""Measured runs beside what a profile predicts of them: how far off it is by source, and where most, and why.

```console
$ python -m benchmarks.calibration.published
$ python -m benchmarks.calibration.published --runs mine.tsv --profile profile.json --out mine.json
```
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calibration.fitting import RUNS, Pairs, pairs_of
from benchmarks.calibration.published_memory import MemoryRow, memory_rows, memory_table
from benchmarks.calibration.spent import spent
from dshard.cli.calibrate import read_runs
from dshard.planner import Misses, Rates, published
from dshard.planner.calibration import Run, errors_of, misses_of, predicted_s
from dshard.planner.files import to_record, write_text
from dshard.planner.texts import seconds_text

_NUM_WORST = 10
_RARE = 0.1  # of all runs: what no more of them have is told
_MAX_TOLD = 3
_WAITS = ((0.01, "less than 1%"), (0.1, "1 to 10%"), (1.01, "10% or more"))
_STATES = (
    (0.1, "less than 10% of the memory"),
    (0.3, "10 to 30% of the memory"),
    (float("inf"), "30% of the memory or more"),
)


@dataclass(frozen=True, slots=True)
class Held:
    """A run beside its prediction.

    Attributes:
        name: of the run.
        source: who measured.
        model: its name, where the table has one.
        device: on which it ran.
        num_ranks: on how many.
        sharding: full, keep or hybrid.
        micro_batch: samples of a rank, per backward.
        sequence: tokens of a sample.
        tokens_s_gpu: tokens per second and GPU, as measured.
        measured_s: time of a step.
        predicted_s: likewise.
        error: the part of the measured time by which the predicted one is too long; below 0 if it is too short.
        others_error: mean of that of the other runs of this model by this source; None if there are none.
        terms: what the predicted step is, as parts of it, the most first.
        waits: the part of it that waits for communication.
        states: the part of a device's memory that 16 bytes per parameter would fill: fp32 under Adam.
        rare: what it has, as few other runs.
    """

    name: str
    source: str
    model: str
    device: str
    num_ranks: int
    sharding: str
    micro_batch: int
    sequence: int
    tokens_s_gpu: float
    measured_s: float
    predicted_s: float
    error: float
    others_error: float | None
    terms: dict[str, float]
    waits: float
    states: float
    rare: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All runs of a table.

    Attributes:
        profile: whose predictions they are.
        rows: one per run.
        by_source: how far off predictions are, and last of all runs.
        aside: the same, by source, of constants that had not seen its runs, where the profile knows that.
        pairs: of runs that differ in sharding alone.
        memory: runs whose peak of memory was published; none of a table other than the shipped one.
    """

    profile: str
    rows: tuple[Held, ...]
    by_source: tuple[Misses, ...]
    aside: dict[str, Misses]
    pairs: Pairs
    memory: tuple[MemoryRow, ...]


def report_of(path: Path, rates: Rates) -> Report:
    """Reads a table, and predicts each run of it.

    Raises:
        UsageError: it is none.

    Communicates: nothing.
    """
    runs, constants = read_runs(path), rates.constants
    sources = sorted({run.source for run in runs})
    off = errors_of(runs, constants)
    by_source = [misses_of(off[[run.source == each for run in runs]], each) for each in sources]
    if len(sources) > 1:
        by_source.append(misses_of(off, "all"))
    counted = {each.source: each.num_runs for each in by_source}
    aside = {each.source: each for each in rates.misses if counted.get(each.source) == each.num_runs}
    rows = [_held(run, rates, rare) for run, rare in zip(runs, _rare(runs), strict=True)]
    rows = [replace(row, others_error=_others_error(row, rows)) for row in rows]
    memory = tuple(memory_rows()) if path == RUNS else ()
    return Report(rates.source, tuple(rows), tuple(by_source), aside, pairs_of(runs, constants), memory)


def _held(run: Run, rates: Rates, rare: tuple[str, ...]) -> Held:
    seconds, row = predicted_s(run, rates.values), run.row
    terms = {term: took_s / seconds for term, took_s in spent(run, rates.values).items()}
    tokens = int(row["micro_batch"]) * run.num_backwards * int(row["seq"])
    return Held(
        name=run.name,
        source=run.source,
        model=row.get("model", ""),
        device=run.device.name,
        num_ranks=run.num_ranks,
        sharding=run.sharding,
        micro_batch=int(row["micro_batch"]),
        sequence=int(row["seq"]),
        tokens_s_gpu=tokens / run.seconds,
        measured_s=run.seconds,
        predicted_s=seconds,
        error=seconds / run.seconds - 1,
        others_error=None,
        terms=terms,
        waits=sum(part for term, part in terms.items() if term.startswith("waiting")),
        states=_states(run),
        rare=rare,
    )


def _others_error(row: Held, rows: Sequence[Held]) -> float | None:
    """Mean error of other runs of a model."""
    alike = [each for each in rows if (each.source, each.model, each.device) == (row.source, row.model, row.device)]
    errors = [each.error for each in alike if each is not row]
    return sum(errors) / len(errors) if errors else None


def _states(run: Run) -> float:
    return 16 * _num_params(run) / run.within / run.device.memory_bytes


def _num_params(run: Run) -> float:
    return float(run.gather_bytes.sum()) / 2  # in bf16


def _rare(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Of each run what it has as few others: the numbers that are that large or small, and the words."""
    numbers: dict[str, Callable[[Run], float]] = {
        "GPUs": lambda run: run.num_ranks,
        "parameters": _num_params,
        "samples at once": lambda run: int(run.row["micro_batch"]),
        "tokens per sample": lambda run: int(run.row["seq"]),
        "micro-batches": lambda run: run.num_backwards,
        "% of the memory for states": lambda run: round(100 * _states(run)),
    }
    words: dict[str, Callable[[Run], str]] = {
        "on": lambda run: run.device.name,
        "sharding": lambda run: run.sharding,
        "precision": lambda run: run.row["precision"],
        "checkpointing": lambda run: run.row["act_ckpt"],
        "compiled:": lambda run: "yes" if run.is_compiled else "no",
    }
    found: list[list[tuple[float, str]]] = [[] for _ in runs]
    for what, number in numbers.items():
        values = [number(run) for run in runs]
        for told, value in zip(found, values, strict=True):
            few, many = (sum(map(is_as, values)) for is_as in (value.__ge__, value.__le__))
            told.append((min(few, many) / len(runs), f"{_number(value)}{'' if what[0] == '%' else ' '}{what}"))
    for what, word in words.items():
        texts = [word(run) for run in runs]
        for told, text in zip(found, texts, strict=True):
            told.append((texts.count(text) / len(runs), f"{what} {text}"))
    return [tuple(text for part, text in sorted(told)[:_MAX_TOLD] if part <= _RARE) for told in found]


def _number(value: float) -> str:
    """A count as people write it: 512, 65,536, 6.7B."""
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:,.0f}"


def text_of(report: Report) -> str:
    """The report as Markdown."""
    lines = [f"{len(report.rows)} runs; profile: {report.profile}", "", *_source_table(report), ""]
    if report.pairs.num_pairs:
        told = f"{report.pairs.num_right} of {report.pairs.num_pairs}"
        lines += [f"pairs that differ in sharding alone: the faster one told in {told}", ""]
    lines += [*_group_table(report.rows), ""]
    worst = sorted(report.rows, key=lambda row: -abs(row.error))[:_NUM_WORST]
    lines += [f"the {len(worst)} runs that are missed most:", "", *_row_table(worst)]
    if report.memory:
        lines += ["", "peaks of memory that were published:", "", *memory_table(report.memory)]
    return "\n".join(lines)


def _source_table(report: Report) -> list[str]:
    """One line per source: with the profile's constants, and with constants of the other sources alone."""
    head: tuple[str, ...] = ("runs of", "number", "mean error", "9 in 10 below")
    if report.aside:
        head = (*head, "kept aside: mean error", "9 in 10 below")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for each in report.by_source:
        told: tuple[str, ...] = (_short(each.source), str(each.num_runs), f"{each.mean:.1%}", f"{each.p90:.1%}")
        if report.aside:
            aside = report.aside.get(each.source)
            told = (*told, *(("-", "-") if aside is None else (f"{aside.mean:.1%}", f"{aside.p90:.1%}")))
        lines.append(f"| {' | '.join(told)} |")
    return lines


def _groups(row: Held) -> tuple[str, ...]:
    """What a run has that errors may come from; of each kind one."""
    states = next(text for most, text in _STATES if row.states < most)
    waits = next(text for most, text in _WAITS if row.waits < most)
    largest = next(iter(row.terms))
    return f"most of the predicted step: {largest}", f"waiting: {waits} of it", f"16 bytes per parameter fill {states}"


def _group_table(rows: Sequence[Held]) -> list[str]:
    """One line per group of runs that have something."""
    found: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        for kind, text in enumerate(_groups(row)):
            found.setdefault((kind, text), []).append(row.error)
    lines = ["| runs where | number | mean error | with its sign | 9 in 10 below |", "|---|---|---|---|---|"]
    for (_, text), errors in sorted(found.items(), key=lambda item: (item[0][0], -len(item[1]))):
        off = np.abs(errors)
        figures = f"{off.mean():.1%} | {np.mean(errors):+.1%} | {np.quantile(off, 0.9):.1%}"
        lines.append(f"| {text} | {len(errors)} | {figures} |")
    return lines


def _row_table(rows: Sequence[Held]) -> list[str]:
    """One line per run."""
    head: tuple[str, ...] = ("run", "model", "GPUs", "sharding", "samples x tokens", "measured", "predicted", "error")
    head = (*head, "others of its model", "most of its step", "rare among the runs")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        shares = ", ".join(f"{term} {part:.0%}" for term, part in list(row.terms.items())[:2])
        cells = (
            row.name,
            row.model or "-",
            f"{row.num_ranks} x {row.device}",
            row.sharding,
            f"{row.micro_batch} x {row.sequence:,}",
            seconds_text(row.measured_s),
            seconds_text(row.predicted_s),
            f"{row.error:+.0%}",
            "-" if row.others_error is None else f"{row.others_error:+.0%}",
            shares,
            ", ".join(row.rare) or "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _short(source: str) -> str:
    """A repository of GitHub by its name."""
    found = re.search(r"github\.com/([^/]+/[^/]+)", source)
    return found[1] if found else source


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the report of a table, and writes it as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=RUNS, help="a table as for dshard calibrate (the published runs)")
    parser.add_argument("--profile", type=Path, help="what dshard calibrate wrote (the shipped one)")
    parser.add_argument("--out", type=Path, help="write all rows as JSON")
    args = parser.parse_args(argv)
    report = report_of(args.runs, published() if args.profile is None else Rates.load(args.profile))
    print(text_of(report))
    if args.out is not None:
        record: dict[str, Any] = {"runs": args.runs.name, **to_record(report)}
        write_text(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
