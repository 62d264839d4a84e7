"""What is crossed: the options of the API and what programs do around them, and what does not go together."""

import os
from collections.abc import Mapping
from functools import cache

from tests.crossings.covering import Constraint, Row, covering_array

# The first level of each is what a program gets that asks for nothing. All pairs are covered; of the first six, which
# are the main ones, the variable CROSSINGS=triples adds all triples: 426 rows in the place of 98.
NUM_MAIN = 6
NUM_IN_TRIPLES = NUM_MAIN if os.environ.get("CROSSINGS") == "triples" else 0
FACTORS: dict[str, tuple[str, ...]] = {
    "strategy": (
        *("full", "ddp", "zero1", "zero2", "keep", "hybrid(2)", "split(2)", "mixed"),
        *("reshard=False", "reshard=2", "budget", "plan"),
    ),
    "precision": ("float64", "bf16", "all bf16", "autocast", "bf16 model"),
    "checkpoint": ("none", "inside", "reentrant", "wrapped before", "wrapped after", "root"),
    "accumulation": ("one", "no_sync", "set sync", "each reduced", "set all_reduce"),
    "clip": ("none", "dshard", "torch", "value"),
    "params": ("all", "frozen", "adapters", "tied"),
    "units": ("root", "blocks", "policy"),
    "optimizer": ("sgd", "foreach", "fused", "adafactor", "muon and sgd", "DTensor states", "made before"),
    "offload": ("none", "CPUOffloadPolicy", "Offload"),
    "mesh": ("1-D", "HSDP", "TP", "named dims"),
    "compile": ("no", "blocks", "step"),
    "exception": ("none", "in forward", "in backward"),
    "copy": ("none", "deepcopy", "pickle", "torch.save", "checkpoint", "state_dict"),
    "switch": ("none", "to zero2", "to a mix", "to hybrid(2)"),
    "sync": ("check", "broadcast", "none"),
    "grad_reduce": ("mean", "sum"),
    "buffers": ("leave", "check", "broadcast"),
    "ignored": ("none", "gain"),
    "placement": ("dim 0", "last dim"),
    "setting": ("none", "prefetch 0", "prefetch 2", "kept after backward", "2 buffers", "unshard", "set reshard"),
    "reduction": ("none", "divide factor", "own group", "reduce hook"),
    "use": ("none", "penalty", "gathered", "gradients", "joined", "some ranks"),
}


ONE_WAY = "one backward must use a weight either in slices or whole"


def _cannot(why: str, **levels: str) -> Constraint:
    return Constraint(levels, why)


# Documented limits (docs/limits.md): each has the words of the error, which `test_crossings.py` asks for.
REFUSED: dict[str, Constraint] = {
    "slices of DTensors": _cannot("it is a DTensor of its own", strategy="split(2)", mesh="TP"),
    "slices of offloaded": _cannot("it is offloaded", strategy="split(2)", offload="Offload"),
    "slices of columns": _cannot("it is cut along dim 1", strategy="split(2)", placement="last dim"),
    "compiled DTensors": _cannot(
        "does not take parameters that are cut over another mesh", compile="blocks", mesh="TP"
    ),
    "plan and units": _cannot("a plan is for the model that it was made for", strategy="plan", units="blocks"),
    "plan and policy": _cannot("a plan says how each unit is cut and gathered", strategy="plan", units="policy"),
    "plan and ignored": _cannot("a plan is for the model that it was made for", strategy="plan", ignored="gain"),
    "slices, penalty and sum": _cannot(ONE_WAY, strategy="split(2)", use="penalty", grad_reduce="sum"),
    "slices, penalty and factor": _cannot(ONE_WAY, strategy="split(2)", use="penalty", reduction="divide factor"),
    "slices, penalty and hook": _cannot(ONE_WAY, strategy="split(2)", use="penalty", reduction="reduce hook"),
}
# What torch itself refuses, with the words of its error: the hooks of parallelize_module are local functions.
IMPOSSIBLE: dict[str, Constraint] = {
    "pickled hooks": _cannot("pickle local object", mesh="TP", copy="pickle"),
    "saved hooks": _cannot("pickle local object", mesh="TP", copy="torch.save"),
}
CONSTRAINTS = {**REFUSED, **IMPOSSIBLE}
NEEDS_FOUR_RANKS = {
    "strategy": ("hybrid(2)", "reshard=2"),
    "switch": ("to hybrid(2)",),
    "mesh": ("HSDP", "TP", "named dims"),  # of two dims
}
# Four ranks that share a few cores compile a step for a minute: these pairs have one row each, and are in no other.
APART = [
    _cannot("four ranks compile a step for a minute", compile="step", **{factor: level})
    for factor, levels in NEEDS_FOUR_RANKS.items()
    for level in levels
]


@cache
def rows() -> list[Row]:
    """The covering array, and a row for each pair that is apart from it."""
    crossed = covering_array(FACTORS, NUM_IN_TRIPLES, [*CONSTRAINTS.values(), *APART])
    return crossed + [default_row() | dict(each.levels) for each in APART]


def default_row() -> Row:
    """What a program gets that asks for nothing."""
    return {factor: levels[0] for factor, levels in FACTORS.items()}


def name_of(row: Mapping[str, str]) -> str:
    """What of a row is not the default."""
    return ", ".join(f"{f}: {level}" for f, level in row.items() if level != FACTORS[f][0]) or "defaults"


def num_ranks_of(row: Mapping[str, str]) -> int:
    """Two, or four where some ranks hold a shard together and others replicate it, or the mesh has two dims."""
    return 4 if any(row[factor] in levels for factor, levels in NEEDS_FOUR_RANKS.items()) else 2
