"""A training step of a GPT with compiled blocks: dshard beside FSDP2 and the unsharded step, interleaved in one run.

Each block is compiled on its own, by inductor, ahead of `fully_shard`. Under bf16 the sharded models keep their
weights in fp32, by a mixed precision policy; the unsharded one keeps them in bf16.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from dshard.bench.common import WORLD_TIMEOUT_S, Summary, gloo_world, interleave, summary
from dshard.bench.models import COMPILED, Size, step_of
from dshard.bench.output import Output, timing_table
from dshard.bench.plots import Bars

_POLICIES = {
    "fp32": None,
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
_BATCH, _TOKENS = 4, 128
_NUM_WARMUPS = 4


def _measure(size: Size, precision: str, num_rounds: int) -> dict[str, Summary]:
    """Time all variants on this rank."""
    import torch._inductor.config as settings

    with settings.patch({"compile_threads": 1}):  # in this process: the ranks are many already
        variants = {
            kind: step_of(kind, size, _BATCH, _TOKENS, policy=_POLICIES[precision])
            for library in ("unsharded", "FSDP2", "dshard")
            for kind in (library, library + COMPILED)
        }
        samples = interleave(variants, num_rounds=num_rounds, num_warmups=_NUM_WARMUPS)
    return {kind: summary(some) for kind, some in samples.items()}


def run(output: Output, *, num_ranks: int, num_rounds: int, size: Size) -> None:
    """Measure, print and write `compile_gloo_N`; the times are rank 0's."""
    results: dict[str, dict[str, Summary]] = {}
    for precision in _POLICIES:
        with gloo_world(num_ranks) as world:
            rows = world.run(_measure, size, precision, num_rounds, timeout_s=WORLD_TIMEOUT_S)[0]
        name = f"{precision}, batch {_BATCH} x {_TOKENS} tokens"
        results[name] = rows
        print(f"\n{name}, {num_ranks} gloo ranks\n{timing_table(rows, with_exposed=True)}", flush=True)
    panels = [
        Bars(title, "ms, median", {row: {k: r.get(key) for k, r in rows.items()} for row, rows in results.items()})
        for title, key in (("a training step", "median_ms"), ("of it, waiting for peers", "exposed_ms"))
    ]
    output.write(f"compile_gloo_{num_ranks}", {"header": output.header(num_ranks=num_ranks), "rows": results}, panels)
