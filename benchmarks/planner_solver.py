"""How long the planner's solver takes, and what it proves: `python benchmarks/planner_solver.py [OPTIONS] [UNITS ...]`.

Layers of a transformer on 64 ranks in hosts of 8, six strategies each, or all that `dshard.plan` tries, at limits
between all-full and all-ddp, of which `--limits` gives others; with `--checkpointing` each may compute its forward
again, in part or whole, and limits lie between all-full, all checkpointed, and all-ddp without. Families: `alike` (one
width), `widths` (five, at random), `random` (width, tokens and times at random). CPU seconds.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from dshard.planner import (
    DEVICES,
    Cluster,
    Link,
    Links,
    ModelCosts,
    ParamCosts,
    UnitCosts,
    peak_bytes,
    solve,
    step_time,
)
from dshard.planner.costs import UnitKind
from dshard.planner.profiles import with_offload
from dshard.planner.tables import mix_text
from dshard.planning.meshes import strategies_for

STRATEGIES = ("ddp", "zero2", "keep", "full", "hybrid(8)", "split(4)")
PARTS = (0.02, 0.1, 0.3)


def layer(number: int, width: int, tokens: int, factor: float, *, is_choice: bool) -> UnitCosts:
    """A transformer layer at 200 TFLOPS; of what it keeps, products are a third, and its input a seventeenth."""
    sizes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    params = tuple(ParamCosts(f"{number}.{i}", *size, can_split=True) for i, size in enumerate(sizes))
    forward_s = 2 * 12 * width * width * tokens / 200e12 * factor
    unit = UnitCosts(
        f"layers.{number}",
        params,
        forward_s,
        2 * forward_s,
        activation_bytes=int(34 * tokens * width * factor),
        forward_transient_bytes=8 * tokens * width,
        backward_transient_bytes=8 * tokens * width,
        optimizer_s=12 * width * width * 20 / 1.5e12,
        slice_overhead_s=1e-5,
    )
    kinds = {"selective": (unit.activation_bytes // 3, forward_s / 8), "full": (2 * tokens * width, forward_s)}
    others = tuple(_again(unit, kind, *each) for kind, each in kinds.items() if is_choice)
    return replace(unit, alternatives=others)


def _again(unit: UnitCosts, kind: str, kept_bytes: int, again_s: float) -> UnitCosts:
    """The layer, when it computes in its backward what it has not kept."""
    return replace(
        unit,
        checkpointing=kind,
        activation_bytes=kept_bytes,
        backward_s=unit.backward_s + again_s,
        backward_transient_bytes=unit.backward_transient_bytes + unit.activation_bytes - kept_bytes,
    )


def family(name: str, num_units: int, *, is_choice: bool = False) -> ModelCosts:
    """A model of that many layers."""
    rng = random.Random(1)
    widths = {"alike": (1024,), "widths": (512, 768, 1024, 1536, 2048), "random": range(256, 2048)}[name]
    layers = []
    for number in range(num_units):
        tokens = rng.randrange(256, 4096) if name == "random" else 2048
        factor = 1.0 if name == "alike" else rng.uniform(0.8, 1.2)
        layers.append(layer(number, rng.choice(widths), tokens, factor, is_choice=is_choice))
    return ModelCosts(tuple(layers))


def main(sizes: Sequence[int], parts: Sequence[float], *, tries_all: bool, is_choice: bool, offload: str) -> None:
    """Print a table."""
    inside, across = Links.of(Link(2e-5, 1 / 200e9, 1e-6)), Links.of(Link(3e-5, 1 / 40e9, 2e-6))
    cluster = Cluster(64, 8, inside, across, keeps_received_rows=False)
    strategies = strategies_for(cluster) if tries_all else STRATEGIES
    out = sys.stdout
    out.write("| family | units | memory | CPU s | gap | by the relaxation alone | all full / plan | plan |\n")
    out.write("|---|---|---|---|---|---|---|---|\n")
    for num_units in sizes:
        for name in ("alike", "widths", "random"):
            model = family(name, num_units, is_choice=is_choice)
            model, least = with_offload(model, DEVICES["h100-80g"], offload), UnitKind("full", offload == "auto")
            low = peak_bytes(model.under(least), ["full"] * num_units, cluster)
            high = peak_bytes(model, ["ddp"] * num_units, cluster)
            for part in parts:
                started = time.process_time()
                solution = solve(model, cluster, strategies, low + int((high - low) * part))
                took, proof = time.process_time() - started, solution.certificate
                plan = mix_text(solution.model, solution.strategies)
                ratio = step_time(model.under(UnitKind("full")), ["full"] * num_units, cluster) / proof.step_s
                out.write(
                    f"| {name} | {num_units} | {100 * part:g}% | {took:.1f} | {proof.gap:.1g} | "
                    f"{proof.relaxed_gap:.1g} | {ratio:.3f} | {plan} |\n"
                )
                out.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=[100, 2000], metavar="UNITS", help="(100 2000)")
    parser.add_argument("--all", action="store_true", help="all strategies that dshard.plan tries, rather than six")
    parser.add_argument("--offload", action="store_true", help="each layer may be kept in the CPU's memory")
    parser.add_argument("--checkpointing", action="store_true", help="each layer may be checkpointed, in two ways")
    parser.add_argument(
        "--limits", nargs="+", type=float, default=PARTS, metavar="PART", help="0 is all full, 1 all ddp"
    )
    given = parser.parse_args()
    main(
        given.sizes,
        given.limits,
        tries_all=given.all,
        is_choice=given.checkpointing,
        offload="auto" if given.offload else "none",
    )
