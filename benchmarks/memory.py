"""Memory that training a GPT grows a rank's process by: dshard beside FSDP2, DDP and the unsharded model.

python benchmarks/memory.py [--no-write]

Each variant trains five steps in fresh processes, for a heap that others have used tells nothing; the peak of the
resident memory over the steps, less what was resident before the model was built.
"""

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from _common import header, run_ranks, write
from _models import KINDS, Size, step_of

ROWS = {"batch 4 x 128 tokens": (4, 128), "batch 1 x 16 tokens": (1, 16)}
NUM_STEPS = 5


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def measure(kind: str, batch: int, tokens: int, out: str) -> None:
    """Train on this rank; rank 0 writes the bytes to `out`."""
    warnings.simplefilter("ignore")
    dist.barrier()
    before = _resident("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    step = step_of(kind, Size(), batch, tokens)
    for _ in range(NUM_STEPS):
        step()
    grown = _resident("VmHWM:") - before
    dist.barrier()
    if dist.get_rank() == 0:
        Path(out).write_text(str(grown))


def bench(keep: bool) -> None:
    """Measure, print and write."""
    results: dict[str, dict[str, float]] = {}
    for row, (batch, tokens) in ROWS.items():
        results[row] = {}
        print(f"\n{row}: MB grown at the peak")
        for kind in [*KINDS, "dshard, root alone"]:
            with tempfile.TemporaryDirectory() as folder:
                run_ranks(measure, 2, kind, batch, tokens, f"{folder}/grown")
                results[row][kind] = int(Path(f"{folder}/grown").read_text()) / 1e6
            print(f"{kind:<20}{results[row][kind]:>8.0f}", flush=True)
    if keep:
        print(f"wrote {write('memory_gloo_2', {'header': header(num_ranks=2), 'grown_mb': results}).name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    bench(not options.no_write)
