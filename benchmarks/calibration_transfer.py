"""How well predicted times extrapolate: constants fitted to some published runs, held against others.

```console
$ python benchmarks/calibration_transfer.py
```

Each line fits from the priors to one part of the shipped table and predicts the other; then come steps of more GPUs
than any run of the table has. Takes a few minutes on one core: the models are traced first.
"""

from collections.abc import Callable
from dataclasses import replace

from dshard.cli.measured import read_runs
from dshard.planner import DEVICES
from dshard.planner.calibration import Run, Terms, fitted, misses_of, predicted_s
from dshard.planner.rates import PRIORS, family_of, published, runs_file

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


def main() -> None:
    """Prints both tables."""
    runs = read_runs(runs_file()).runs
    print("| fitted to | predicts | mean error | 9 in 10 below |\n|---|---|---|---|")
    for name, is_seen in PARTS.items():
        constants = fitted([run for run in runs if is_seen(run)], PRIORS)
        misses = misses_of([run for run in runs if not is_seen(run)], constants, name)
        print(f"| {name} | {misses.num_runs} others | {misses.mean:.1%} | {misses.p90:.1%} |")
    by_name, values = {run.name: run for run in runs}, published().values
    head = " | ".join(map(str, SIZES))
    print(f"\nLonger than on 8 GPUs:\n| run | on | sharding | {head} |\n|---|---|---|{'---|' * len(SIZES)}")
    for name in BASES:
        for device in ("h100-80g", "a100-80g"):
            for sharding in ("full", "hybrid"):
                eight, *more = (predicted_s(moved(by_name[name], device, n, sharding), values) for n in (8, *SIZES))
                print(f"| {name} | {device} | {sharding} | {' | '.join(f'{each / eight - 1:+.0%}' for each in more)} |")


if __name__ == "__main__":
    main()
