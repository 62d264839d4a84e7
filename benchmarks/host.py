"""What a step costs the host: tiny layers in torch's fake process group, where nothing travels.

python benchmarks/host.py [--rounds 20] [--no-write]

First dshard beside FSDP2 and the unsharded step at 8 ranks; then dshard and FSDP2 against the number of ranks, and
against the number of units.
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from _common import header, interleave, summary, table, write
from _models import KINDS, Size, overheads, step_of

from dshard.testing import fake_world

NARROW = {"vocab": 256, "width": 64, "heads": 4}
NUM_RANKS = (8, 64, 512, 4096)
NUM_UNITS = (10, 50, 200)


def rows_of(kinds: list[str], layers: int, num_ranks: int, num_rounds: int) -> dict[str, dict[str, float]]:
    """Steps of some kinds, interleaved, on rank 0 of a fake world."""
    with fake_world(0, num_ranks):
        variants = {kind: step_of(kind, Size(layers=layers, **NARROW), 1, 16) for kind in kinds}
        times = interleave(variants, num_rounds=num_rounds, num_warmups=3)
    return {kind: summary(t) for kind, t in times.items()}


def bench(num_rounds: int, keep: bool) -> None:
    """Time, print and write."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = {"24 layers, 8 ranks": rows_of([k for k in KINDS if k != "DDP"], 24, 8, num_rounds)}
    for num_ranks in NUM_RANKS:
        cases[f"8 layers, {num_ranks} ranks"] = rows_of(["FSDP2", "dshard"], 8, num_ranks, max(3, num_rounds // 2))
    for layers in NUM_UNITS:
        cases[f"{layers} layers, 8 ranks, by size"] = rows_of(["FSDP2", "dshard"], layers, 8, max(3, num_rounds // 4))
    for case, rows in cases.items():
        print(f"\n{case}\n{table(rows)}")
        for suffix, share in overheads(rows).items() if "unsharded" in rows else ():
            print(f"overhead over unsharded{suffix}: {share:.2f} of FSDP2's")
    if keep:
        print(f"wrote {write('host_fake', {'header': header(backend='fake'), 'rows': cases}).name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    bench(options.rounds, not options.no_write)
