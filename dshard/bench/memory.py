"""Memory that training a GPT grows a rank's process by: dshard beside FSDP2, DDP and the unsharded model.

Each variant trains five steps in fresh processes, for a heap that others have used tells nothing; counted is the peak
of the resident memory over the steps, less what was resident before the model was built.
"""

from __future__ import annotations

from dshard.bench.common import WORLD_TIMEOUT_S, gloo_world
from dshard.bench.models import KINDS, ROOT_ALONE, Size, step_of
from dshard.bench.output import Output, table
from dshard.bench.peaks import grown_bytes
from dshard.bench.plots import Bars

_ROWS = {"batch 4 x 128 tokens": (4, 128), "batch 1 x 16 tokens": (1, 16)}


def _measure(kind: str, size: Size, batch: int, tokens: int) -> int:
    """Train on this rank; bytes grown."""
    return grown_bytes(lambda: step_of(kind, size, batch, tokens))


def run(output: Output, *, num_ranks: int, size: Size) -> None:
    """Measure, print and write `memory_gloo_N`; the bytes are rank 0's."""
    results: dict[str, dict[str, float]] = {row: {} for row in _ROWS}
    for row, (batch, tokens) in _ROWS.items():
        for kind in (*KINDS, ROOT_ALONE):
            with gloo_world(num_ranks) as world:
                grown = world.run(_measure, kind, size, batch, tokens, timeout_s=WORLD_TIMEOUT_S)[0]
            results[row][kind] = grown / 1e6
    names = list(results[next(iter(_ROWS))])
    rows = {kind: [f"{results[row][kind]:.0f}" for row in _ROWS] for kind in names}
    print(f"MB grown at the peak, {num_ranks} gloo ranks\n{table(list(_ROWS), rows)}")
    content = {"header": output.header(num_ranks=num_ranks), "grown_mb": results}
    output.write(f"memory_gloo_{num_ranks}", content, [Bars("memory grown at the peak", "MB per rank", results)])
