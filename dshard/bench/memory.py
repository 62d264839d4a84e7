"""Memory that training a GPT grows a rank's process by: dshard beside FSDP2, DDP and the unsharded model.

Each variant trains five steps in fresh processes, for a heap that others have used tells nothing; counted is the peak
over the steps, less what was there before the model was built: of the process's share of memory, which is what ranks
of one host take together, and of resident memory, which counts what they share as often as they map it.
"""

from __future__ import annotations

from dshard.bench.common import WORLD_TIMEOUT_S, gloo_world
from dshard.bench.models import KINDS, MESSAGES, ROOT_ALONE, Size, step_of
from dshard.bench.output import Output, table
from dshard.bench.peaks import Grown, grown
from dshard.bench.plots import Bars

_RESIDENT = ", resident"
_ROWS = {"batch 4 x 128 tokens": (4, 128), "batch 1 x 16 tokens": (1, 16)}


def _measure(kind: str, size: Size, batch: int, tokens: int) -> Grown:
    """Train on this rank; bytes grown."""
    return grown(lambda: step_of(kind, size, batch, tokens))


def run(output: Output, *, num_ranks: int, size: Size) -> None:
    """Measure, print and write `memory_gloo_N`; the bytes are rank 0's."""
    results: dict[str, dict[str, float]] = {f"{row}{how}": {} for how in ("", _RESIDENT) for row in _ROWS}
    messages = ("dshard" + MESSAGES, "dshard, no reshard" + MESSAGES) if num_ranks > 1 else ()
    for row, (batch, tokens) in _ROWS.items():
        for kind in (*KINDS, ROOT_ALONE, *messages):
            with gloo_world(num_ranks) as world:
                found = world.run(_measure, kind, size, batch, tokens, timeout_s=WORLD_TIMEOUT_S)[0]
            results[row][kind], results[row + _RESIDENT][kind] = found.proportional / 1e6, found.resident / 1e6
    names = list(results[next(iter(_ROWS))])
    rows = {kind: [f"{results[row][kind]:.0f}" for row in results] for kind in names}
    print(f"MB grown at the peak, {num_ranks} gloo ranks\n{table(list(results), rows)}")
    content = {"header": output.header(num_ranks=num_ranks), "grown_mb": results}
    output.write(f"memory_gloo_{num_ranks}", content, [Bars("memory grown at the peak", "MB per rank", results)])
