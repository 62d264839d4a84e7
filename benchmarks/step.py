"""A training step of a GPT: dshard beside FSDP2, DDP and the unsharded step, interleaved in one run.

python benchmarks/step.py [--rounds 12] [--no-write]
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from _common import header, interleave, run_ranks, summary, table, write
from _models import KINDS, Size, overheads, step_of

SIZE = Size()  # 27 million parameters
ROWS = {"batch 4 x 128 tokens": (4, 128), "batch 1 x 16 tokens": (1, 16)}


def bench(num_rounds: int, keep: bool) -> None:
    """Time all variants on this rank; rank 0 prints and writes."""
    warnings.simplefilter("ignore")
    results = {}
    for row, (batch, tokens) in ROWS.items():
        variants = {kind: step_of(kind, SIZE, batch, tokens) for kind in [*KINDS, "dshard, root alone"]}
        times = interleave(variants, num_rounds=num_rounds, num_warmups=3)
        results[row] = {kind: summary(t) for kind, t in times.items()}
    if dist.get_rank():
        return
    for row, rows in results.items():
        print(f"\n{row}\n{table(rows)}")
        for suffix, share in overheads(rows).items():
            print(f"overhead over unsharded{suffix}: {share:.2f} of FSDP2's")
    if keep:
        print(f"wrote {write('step_gloo_2', {'header': header(num_ranks=2), 'rows': results}).name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    run_ranks(bench, 2, options.rounds, not options.no_write)
