"""How well predicted times extrapolate: constants fitted to some published runs, held against others.

```console
$ python -m benchmarks.calibration.transfer
```

Each line fits from the priors to one part of the shipped table and predicts the other. Then come steps of more GPUs
than any run of the table has; terms that the model has not: that attention reaches more, or less, of a peak the longer
the sequence is, and products by their width and rows; which part of each source the intervals hold that the others
alone give; and what a few runs of a source give for the rest of it.
Takes some minutes on one core: the models are traced first.
"""

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.calibration.fitting import RUNS, constants_aside, holding, kept_aside, spread_aside
from dshard.cli.calibrate import read_runs
from dshard.planner import DEVICES
from dshard.planner.calibration import Run, Terms, calibrated, errors_of, fitted, misses_of, predicted_s
from dshard.planner.rates import PRIORS, Constant, Interval, Rates, family_of, published

PARTS: dict[str, Callable[[Run], bool]] = {
    "at most 64 GPUs": lambda run: run.num_ranks <= 64,
    "at most 128 GPUs": lambda run: run.num_ranks <= 128,
    "at most 7.5B parameters": lambda run: run.gather_bytes.sum() <= 15e9,
    "at least 3.1B parameters": lambda run: run.gather_bytes.sum() >= 6.2e9,
    "no hybrid": lambda run: run.sharding != "hybrid",
    "A100 alone": lambda run: family_of(run.device) == "a100",
    "H100 alone": lambda run: family_of(run.device) == "h100",
    "all but llm-foundry": lambda run: "llm-foundry" not in run.source,
}
SIZES = (64, 128, 512, 1024, 2048)
BASES = ("mod-031", "mpt-010", "titan24a-2", "titan24a-6", "mpt-001")
NUM_OWN, NUM_DRAWS = (10, 25), 3


def moved(run: Run, name: str, num_ranks: int, sharding: str) -> Run:
    """The same model and micro-batch on other devices, 8 to a host."""
    device = DEVICES[name]
    product = run.device.flops_per_s["bfloat16"] / device.flops_per_s["bfloat16"]
    memory = run.device.memory_bytes_per_s / device.memory_bytes_per_s

    def terms(old: Terms) -> Terms:
        arithmetic = old.product_s * product, old.attention_s * product
        traffic = (old.operands_s, old.attention_bytes_s, old.other_s, old.copied_s)
        return Terms(*arithmetic, *(each * memory for each in traffic))

    found = replace(
        run,
        sharding=sharding,
        device=device,
        num_ranks=num_ranks,
        ranks_per_host=device.per_host,
        network=device.between_hosts.bytes_per_s,
        forward=terms(run.forward),
        backward=terms(run.backward),
    )
    return replace(found, optimizer_s=run.optimizer_s * memory * run.within / found.within)


def longer(run: Run, *, products: float = 1.0, attention: float = 1.0) -> Run:
    """The same, of which arithmetic takes so many times as long."""
    forward, backward = (
        replace(each, product_s=each.product_s * products, attention_s=each.attention_s * attention)
        for each in (run.forward, run.backward)
    )
    return replace(run, forward=forward, backward=backward)


def tokens_of(run: Run) -> int:
    """Of one sample."""
    return int(run.row["seq"])


def rows_of(run: Run) -> float:
    """That products of a micro-batch have."""
    return tokens_of(run) * float(run.row["micro_batch"])


def width_of(run: Run) -> float:
    """About that of a block, which has some 12 times its square of parameters, of 2 bytes each."""
    return float((np.median(run.gather_bytes) / 24) ** 0.5)


TERMS: dict[str, Callable[[Run], Run]] = {
    "none of these": lambda run: run,
    "attention reaches (tokens / 2,048) ^ -0.1": lambda run: longer(run, attention=(tokens_of(run) / 2048) ** 0.1),
    "attention reaches (tokens / 2,048) ^ 0.1": lambda run: longer(run, attention=(tokens_of(run) / 2048) ** -0.1),
    "products reach 1 / (1 + 64 / width)": lambda run: longer(run, products=1 + 64 / width_of(run)),
    "products reach 1 / (1 + 256 / width)": lambda run: longer(run, products=1 + 256 / width_of(run)),
    "products reach (width / 2,048) ^ -0.05": lambda run: longer(run, products=(width_of(run) / 2048) ** 0.05),
    "products reach 1 / (1 + 1,024 / rows)": lambda run: longer(run, products=1 + 1024 / rows_of(run)),
    "products reach (rows / 16,384) ^ 0.05": lambda run: longer(run, products=(rows_of(run) / 16384) ** -0.05),
    "products reach (rows / 16,384) ^ -0.05": lambda run: longer(run, products=(rows_of(run) / 16384) ** 0.05),
}


def parts_of(runs: Sequence[Run], constants: Mapping[str, Constant]) -> list[float]:
    """The measured step of each in parts of the predicted one."""
    return [1 / (1 + off) for off in errors_of(runs, constants)]


def interval_text(interval: Interval, parts: Sequence[float]) -> str:
    """Which part of some runs it holds."""
    held = sum(interval.low <= part <= interval.high for part in parts) / len(parts)
    return f"{held:.0%} of {interval.low:.2f} to {interval.high:.2f}"


def print_intervals(runs: Sequence[Run]) -> None:
    """Of each source: what others give, when each of their runs counts alike, and when each source does."""
    print("\n| runs of | each run counted alike | each source alike |\n|---|---|---|")
    for source, constants in constants_aside(runs, PRIORS).items():
        others, own = ([run for run in runs if (run.source == source) is is_own] for is_own in (False, True))
        aside = constants_aside(others, PRIORS)
        apart = [part for of, each in aside.items() for part in parts_of([r for r in others if r.source == of], each)]
        alike, by_source = holding(apart), spread_aside(others, aside).steps
        assert alike is not None
        assert by_source is not None
        parts = parts_of(own, constants)
        print(f"| {source} | {interval_text(alike, parts)} | {interval_text(by_source, parts)} |")


def print_own(runs: Sequence[Run]) -> None:
    """Of the large sources: profiles of a few runs, drawn at random, held against the rest of the source."""
    print("\n| runs of | the profile of | others of the source in its intervals |\n|---|---|---|")
    for source in ("Modalities/modalities", "mosaicml/llm-foundry"):
        others, own = ([run for run in runs if (source in run.source) is is_own] for is_own in (False, True))
        aside = constants_aside(others, PRIORS)
        known = Rates(fitted(others, PRIORS), spread=spread_aside(others, aside))
        for number in NUM_OWN:
            texts = []
            for seed in range(NUM_DRAWS):
                drawn = random.Random(seed).sample(own, number)
                found = calibrated(drawn, known, "drawn")
                assert found.spread is not None
                assert found.spread.steps is not None
                rest = [run for run in own if not any(run is each for each in drawn)]
                texts.append(interval_text(found.spread.steps, parts_of(rest, found.constants)))
            print(f"| {source} | {number} of {len(own)} | {'; '.join(texts)} |")


def main() -> None:
    """Prints all tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    runs = read_runs(RUNS)
    print("| fitted to | predicts | mean error | 9 in 10 below |\n|---|---|---|---|")
    rows = [(name, is_seen, PRIORS) for name, is_seen in PARTS.items()]
    few = "at most 128 GPUs"
    rows += [
        (f"{few}, the length of a hop free", PARTS[few], {**PRIORS, "hops": replace(PRIORS["hops"], uncertainty=3.0)})
    ]
    for name, is_seen, known in rows:
        constants = fitted([run for run in runs if is_seen(run)], known)
        misses = misses_of(errors_of([run for run in runs if not is_seen(run)], constants), name)
        print(f"| {name} | {misses.num_runs} others | {misses.mean:.1%} | {misses.p90:.1%} |")
    by_name, values = {run.name: run for run in runs}, published().values
    head = " | ".join(map(str, SIZES))
    print(f"\nLonger than on 8 GPUs:\n| run | on | sharding | {head} |\n|---|---|---|{'---|' * len(SIZES)}")
    for name in BASES:
        for device in ("h100-80g", "a100-80g"):
            for sharding in ("full", "hybrid"):
                eight, *more = (predicted_s(moved(by_name[name], device, n, sharding), values) for n in (8, *SIZES))
                print(f"| {name} | {device} | {sharding} | {' | '.join(f'{each / eight - 1:+.0%}' for each in more)} |")
    print("\n| one more term | each source kept aside: mean error | 9 in 10 below |\n|---|---|---|")
    for name, with_term in TERMS.items():
        changed = [with_term(run) for run in runs]
        every = kept_aside(changed, constants_aside(changed, PRIORS))[-1]
        print(f"| {name} | {every.mean:.1%} | {every.p90:.1%} |")
    print_intervals(runs)
    print_own(runs)


if __name__ == "__main__":
    main()
