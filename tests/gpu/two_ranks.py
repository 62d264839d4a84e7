"""What two NCCL ranks train, on one device or two: the programs of `tests/real`, each beside its own expectation.

    torchrun --nproc-per-node 2 tests/gpu/two_ranks.py

prints one line of JSON per case and rank. `--device cpu` runs the same over gloo.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.real import test_compiled, test_hooks, test_results, test_run_by_some, test_to_plain

NUM_PROGRAMS = 20  # of modules that some ranks run


def run_by_some() -> None:
    """Programs are drawn alike on both ranks."""

    @settings(
        max_examples=NUM_PROGRAMS,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(program=test_run_by_some.programs(worlds=(2,)))
    def train(program: test_run_by_some.Program) -> None:
        test_run_by_some.train(program)

    train()


def alike(run: Callable[..., list[torch.Tensor]], expected: tuple[Any, ...], found: tuple[Any, ...]) -> None:
    """Both give the same bits."""
    for i, (own, other) in enumerate(zip(run(*found), run(*expected), strict=True)):
        assert torch.equal(own, other), f"tensor {i}: {(own - other).abs().max().item()} apart"


def close(run: Callable[..., list[torch.Tensor]], expected: tuple[Any, ...], found: tuple[Any, ...]) -> None:
    """Both agree as compiled and eager code does."""
    for own, other in zip(run(*found), run(*expected), strict=True):
        torch.testing.assert_close(own, other)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    yield "run_by_some", run_by_some
    for name in test_compiled.OPTIMIZERS:
        expected = ("dshard", name, False) if name == "Muon" else ("FSDP2", name, True)
        yield f"compiled step, {name}", partial(alike, test_compiled.stepped, expected, ("dshard", name, True))
    for library in ("torch", "dshard"):
        yield f"compiled clipping, {library}", partial(alike, test_compiled.clipped, (library, False), (library, True))
    for place in list(test_compiled.PLACES)[1:]:
        yield f"compiled {place}, gradients there", partial(close, test_compiled.accumulated, ("eager",), (place,))
    for hook in test_hooks.ON_RANK_0:
        yield f"a hook on rank 0, {hook}", partial(alike, test_hooks.trained, (None, "AdamW"), (hook, "AdamW"))
    for name in (*test_results.IN_PLACE, *test_results.OTHERS):
        yield f"a DTensor beside, {name}", partial(test_results.beside_dtensors, name, 7, False)
    for name in test_to_plain.STRATEGIES:
        if name != "hybrid(2)":  # of four ranks
            yield f"to_plain, {name}", partial(test_to_plain.there_and_back, name, True)


def made_on_cpu(function: Callable[..., torch.Tensor], device: str) -> Callable[..., torch.Tensor]:
    """Draw by the CPU's generators, for the same numbers on every device."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.device("cpu"):
            return function(*args, **kwargs).to(device)

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="a folder for one file per rank")
    options = parser.parse_args()
    rank = os.environ["RANK"]
    if options.device == "cuda":
        if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
            os.environ["NCCL_HOSTID"] = rank  # NCCL refuses two ranks of one host on one device
        torch.cuda.set_device(int(rank) % torch.cuda.device_count())
    torch.set_default_device(options.device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    for module in (test_compiled, test_hooks, test_results, test_run_by_some, test_to_plain):
        for name in {"data", "batch", "tokens"} & vars(module).keys():
            setattr(module, name, made_on_cpu(getattr(module, name), options.device))
    test_compiled.init_device_mesh = lambda _, shape: init_device_mesh(options.device, shape)
    lines = []
    for name, run in cases():
        began = time.perf_counter()
        try:
            run()
            outcome = "ok"
        except Exception as error:  # the next case may be all right
            outcome = f"{type(error).__name__}: {error}"[:600]
            traceback.print_exc()
        lines.append(json.dumps({"case": name, "outcome": outcome, "seconds": round(time.perf_counter() - began, 1)}))
        print(rank, lines[-1], flush=True)
        if options.out is not None:
            (options.out / f"two_ranks_{rank}.jsonl").write_text("\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
