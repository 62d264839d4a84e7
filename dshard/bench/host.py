"""What a step costs the host: tiny layers in torch's fake process group, where nothing travels."""

from __future__ import annotations

import torch

from dshard.bench.common import Summary, interleave, summary
from dshard.bench.models import KINDS, Size, overheads, step_of
from dshard.bench.output import Output, timing_table
from dshard.bench.plots import Bars
from dshard.testing import fake_world

_NUM_WARMUPS = 3
_TOKENS = 16


def run(output: Output, *, num_ranks: int, num_rounds: int, size: Size) -> None:
    """Measure, print and write `host_fake`: kinds side by side on rank 0 of a fake world."""
    torch.set_num_threads(1)
    with fake_world(0, num_ranks):
        variants = {kind: step_of(kind, size, 1, _TOKENS) for kind in KINDS if kind != "DDP"}
        samples = interleave(variants, num_rounds=num_rounds, num_warmups=_NUM_WARMUPS)
    rows: dict[str, Summary] = {kind: summary(some) for kind, some in samples.items()}
    for row in rows.values():
        row.pop("exposed_ms", None)  # nothing travels, so there is nothing to wait for
    case = f"{size.layers} layers, {num_ranks} ranks"
    print(f"{case}, fake group\n{timing_table(rows)}")
    for suffix, share in overheads(rows).items():
        print(f"overhead over unsharded{suffix}: {share:.2f} of FSDP2's")
    panel = Bars("a step with nothing on the wire", "ms, median", {case: {k: r["median_ms"] for k, r in rows.items()}})
    output.write("host_fake", {"header": output.header(backend="fake"), "rows": {case: rows}}, [panel])
