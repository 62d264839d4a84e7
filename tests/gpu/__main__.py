"""Everything that shows dshard on a CUDA device, with a result file: `make gpu`.

    python -m tests.gpu [--out benchmarks/results] [--minutes 8]

runs `tests/gpu` and `python -m benchmarks` with `gpu`, `host` and `offload`, and writes what came of them beside the
card, the driver, and the versions. Without a device it says so and claims nothing.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PARTS = {  # what is run, and the share of the minutes that it may take
    "tests": (["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "-m", "gpu"], 0.45),
    "gpu": (["-m", "benchmarks", "gpu"], 0.2),
    "host": (["-m", "benchmarks", "host", "--rounds", "8"], 0.15),
    "offload": (["-m", "benchmarks", "offload", "--tokens", "16384", "--rounds", "2"], 0.2),
}


def why_not() -> str:
    """Why nothing can be run here, in words; "" where it can."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch"
    import torch

    if torch.cuda.is_available():
        return ""
    return "there is no CUDA device" + (", or this torch is not built for it" if shutil.which("nvidia-smi") else "")


def facts() -> dict[str, Any]:
    """The card, what drives it, and versions."""
    import torch

    import dshard

    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    cards = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    revision = ["git", "rev-parse", "--short", "HEAD"]
    return {
        "cards": cards or [torch.cuda.get_device_name()],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "dshard": dshard.__version__,
        "revision": subprocess.run(revision, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip(),
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a part.

    Args:
        code: Exit code; None where it took too long.
        seconds: That it took.
        counts: Of tests, by how they ended.
        failed: Names of those that did not pass.
    """

    code: int | None
    seconds: float
    counts: dict[str, int]
    failed: list[str]


def run(name: str, out: Path, limit_s: float) -> Outcome:
    """Run a part, and write what it says to a file beside its results."""
    arguments, _ = PARTS[name]
    report = out / "gpu_tests.xml"
    own = [f"--junitxml={report}"] if name == "tests" else ["--out", str(out)]
    began, around = time.monotonic(), dict(os.environ)
    if name == "offload":  # whose optimizer steps on all cores of the host
        around.pop("OMP_NUM_THREADS", None)
    with (out / f"gpu_{name}.log").open("w") as log:
        try:
            command = [sys.executable, *arguments, *own]
            done = subprocess.run(command, cwd=ROOT, env=around, stdout=log, stderr=log, timeout=limit_s, check=False)
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = None
    counts, failed = counted(report) if name == "tests" and report.exists() else ({}, [])
    return Outcome(code, round(time.monotonic() - began, 1), counts, failed)


def counted(report: Path) -> tuple[dict[str, int], list[str]]:
    """How the tests of a report ended, and which of them did not pass."""
    counts = {"passed": 0, "failed": 0, "error": 0, "skipped": 0}
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        ends = {"failure": "failed", "error": "error", "skipped": "skipped"}
        how = next((end for tag, end in ends.items() if case.find(tag) is not None), "passed")
        counts[how] += 1
        if how in ("failed", "error"):
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return counts, failed


def table(known: dict[str, Any], outcomes: dict[str, Outcome]) -> str:
    """What came of it, in markdown."""
    lines = [f"# {known['cards'][0]}", "", *(f"- {key}: {value}" for key, value in known.items()), ""]
    lines += ["| part | exit code | seconds | tests |", "|---|---|---|---|"]
    for name, outcome in outcomes.items():
        counts = ", ".join(f"{number} {how}" for how, number in outcome.counts.items() if number)
        lines.append(f"| {name} | {outcome.code} | {outcome.seconds} | {counts} |")
    lines += ["", *(f"- {name}" for outcome in outcomes.values() for name in outcome.failed)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Run all parts, one after the other; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    parser.add_argument("--minutes", type=float, default=8.0, help="that all of it may take (%(default)s)")
    options = parser.parse_args()
    if why := why_not():
        print(f"make gpu: {why}: nothing was run, and nothing is claimed")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    known, outcomes = facts(), dict[str, Outcome]()
    for name, (_, share) in PARTS.items():
        outcomes[name] = run(name, options.out, share * options.minutes * 60)
        print(f"make gpu: {name}: {outcomes[name]}", flush=True)
    rows = {name: {key: getattr(each, key) for key in Outcome.__slots__} for name, each in outcomes.items()}
    (options.out / "gpu_run.json").write_text(json.dumps({"header": known, "parts": rows}, indent=1) + "\n")
    (options.out / "gpu_run.md").write_text(table(known, outcomes))
    return int(any(outcome.code != 0 for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
