"""Faults at random places: what becomes of the ranks, and whether a second start ends with the bits of no fault."""

import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests import warm

REPO = Path(__file__).resolve().parents[2]
TRAIN = Path(__file__).with_name("train.py")
NUM_STEPS, EVERY, TIMEOUT_S = 4, 2, 3.0
# In which all ranks must have ended after the first has: its timeout, and looking for the cause. Of a group that is
# being made torch's own barrier in the store looks at the timeout every ten seconds only.
BOUND_S = max(TIMEOUT_S, 10.0) + 7.0
WORLDS = ((2, "full"), (2, "ddp"), (3, "full"), (3, "zero2"), (4, "hybrid(2)"))

_CAUSES = {  # what the others must say of a rank
    "kill": "was killed, or ended without a word",
    "_exit": "was killed, or ended without a word",
    "stop": "is stopped",
    "sleep": r"is at \S*train\.py:\d+",
    "raise": "Injected: an injected fault",
    "oom": "allocate memory",
    "exit": "has left",
    "nan": "must be finite",
    "other model": "must pass the same parameters",
    "other torch": "2.9.1",
}
_PLACES = {  # and how often a fault is put there
    "forward": 16,
    "backward": 16,
    "collective": 24,
    "step": 10,
    "save": 40,
    "load": 14,
    "time": 20,
    "nan": 4,
    "join": 6,
}
_KINDS = {"kill": 40, "raise": 14, "exit": 10, "_exit": 10, "oom": 10, "stop": 8, "sleep": 3}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, to which rank, and where.

    Args:
        kind: What.
        rank: To whom.
        place: In which part of the program.
        step: In which of its steps.
        after: How many events, or milliseconds, to let pass there.
    """

    kind: str
    rank: int
    place: str
    step: int
    after: int


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault in a world.

    Args:
        fault: What happens.
        num_ranks: How many there are.
        strategy: Of the model.
        rank_0_has_store: Whether rank 0 holds the store, as without torchrun.
        asynchronous: Whether checkpoints are written while training goes on.
    """

    fault: Fault
    num_ranks: int
    strategy: str
    rank_0_has_store: bool
    asynchronous: bool

    @classmethod
    def drawn(cls, seed: int) -> "Injection":
        """At random."""
        draw = random.Random(seed)
        num_ranks, strategy = draw.choice(WORLDS)
        place = draw.choices(list(_PLACES), list(_PLACES.values()))[0]
        kind = draw.choices(list(_KINDS), list(_KINDS.values()))[0]
        step, after = draw.randrange(NUM_STEPS), draw.randrange(40)
        if place == "join":
            kind, step = draw.choice(["other model", "other torch"]), 0
        elif place == "nan":
            kind = "nan"
        elif place in ("load", "time"):
            step = 0
        elif place == "save":
            step = draw.randrange(EVERY - 1, NUM_STEPS, EVERY)
        if place == "time":
            kind, after = draw.choice(["kill", "kill", "stop"]), draw.randrange(350)
        if place == "load":
            after = draw.randrange(12)
        fault = Fault(kind, draw.randrange(num_ranks), place, step, after)
        asynchronous = draw.random() < 0.4 and not (
            place == "save" and kind == "exit"
        )  # which would end a thread alone
        return cls(fault, num_ranks, strategy, draw.random() < 0.2, asynchronous)


@dataclass(frozen=True, slots=True)
class Reference:
    """An unbroken run: what all bits were after each step, and its folder of checkpoints."""

    digests: dict[int, str]
    out: Path


@dataclass
class Tally:
    """What became of injections."""

    num: int = 0
    lost: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    places: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        places = ", ".join(f"{place} {num}" for place, num in sorted(self.places.items()))
        found = f"injected {self.num}, lost {len(self.lost)}, hung {len(self.hung)}, unnamed {len(self.unnamed)}"
        return "\n".join([f"{found} ({places})", *self.lost, *self.hung, *self.unnamed])


def write_config(
    folder: Path,
    injection: Injection,
    fault: Fault | None,
    *,
    errors: str,
    digests: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Path:
    """What train.py is to do; `errors` is a folder in which each rank writes its stderr, or empty."""
    folder.mkdir(exist_ok=True, parents=True)
    values = {
        "out": str(folder / "out"),
        "errors": errors,
        "report": str(folder / "report.json"),
        "steps": NUM_STEPS,
        "every": EVERY,
        "strategy": injection.strategy,
        "timeout_s": timeout_s,
        "fault": asdict(fault) if fault is not None else None,
        "digests": digests,
        "asynchronous": injection.asynchronous,
    }
    config = folder / "config.json"
    config.write_text(json.dumps(values))
    return config


def start(folder: Path, injection: Injection, fault: Fault | None, *, lane: int = 0, digests: bool = False) -> warm.Ran:
    """Train in a folder, from its newest checkpoint if it has one."""
    errors = folder / ("errors" if fault else "second")
    errors.mkdir(exist_ok=True, parents=True)
    env = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    doomed = fault.rank if fault is not None and fault.kind in ("stop", "sleep") else None
    return warm.run(
        [TRAIN, write_config(folder, injection, fault, errors=str(errors), digests=digests)],
        ranks=injection.num_ranks,
        env=env,
        timeout_s=60,
        grace_s=BOUND_S,
        doomed=doomed,
        server=("dshard", f"json#{lane}"),
        agent_store=not injection.rank_0_has_store,
        linger_s=0.3,  # of a rank that is gone at once after its last word, others may say that it had none
    )


def reference(folder: Path, num_ranks: int, strategy: str) -> Reference:
    """Train without a fault."""
    injection = Injection(Fault("", 0, "", 0, 0), num_ranks, strategy, rank_0_has_store=False, asynchronous=False)
    done = start(folder, injection, None, digests=True)
    assert done.codes == [0] * num_ranks, (done, _texts(folder / "second"))
    report = read_report(folder)
    return Reference({int(step): value for step, value in report["steps"].items()}, folder / "out")


def inject(folder: Path, injection: Injection, known: Reference, tally: Tally, *, lane: int = 0) -> None:
    """Start with a fault, look at how the ranks ended, and start again without it."""
    fault, who = injection.fault, f"{injection}, in {folder}"
    if fault.place == "load":
        shutil.copytree(known.out, folder / "out")
        newest = sorted((folder / "out").glob("step-*"))[-1]
        shutil.rmtree(newest)
    broken = start(folder, injection, fault, lane=lane)
    tally.num += 1
    tally.places[fault.place] += 1
    others = [rank for rank in range(injection.num_ranks) if rank != fault.rank]
    if broken.timed_out or any(broken.codes[rank] == -9 for rank in others):
        tally.hung.append(f"hung: {broken.codes} {who}")
    told = _texts(folder / "errors")
    tally.unnamed += [
        f"unnamed: by rank {rank}, {broken.codes[rank]}: {_last_lines(told.get(rank, ''))} {who}"
        for rank in others  # the fault may have come when some had all that they needed
        if not (broken.codes[rank] == 0 and "came to its end" in told.get(rank, ""))
        and not _names(told.get(rank, ""), injection)
    ]
    (folder / "report.json").unlink(missing_ok=True)
    again = start(folder, injection, None, lane=lane)
    if any(again.codes):
        tally.lost.append(f"lost: {_texts(folder / 'second')} {who}")
        return
    report = read_report(folder)
    is_same_start = report["first"] == 0 or report["start"] == known.digests[report["first"]]
    if not is_same_start or report["end"] != known.digests[NUM_STEPS]:
        tally.lost.append(f"lost: other bits from step {report['first']} {who}")


def _names(text: str, injection: Injection) -> bool:
    fault = injection.fault
    if re.search(rf"rank {fault.rank}\b", text, re.IGNORECASE) is None:
        return False
    # The store may be gone with rank 0, and what others wrote with it; or the rank, ahead of saying where it runs.
    if injection.rank_0_has_store or fault.place == "time":
        return re.search(rf"{_CAUSES[fault.kind]}|out of reach|without a word", text) is not None
    return re.search(_CAUSES[fault.kind], text) is not None


def _texts(folder: Path) -> dict[int, str]:
    return {int(path.stem): path.read_text() for path in folder.glob("*.txt")}


def _last_lines(text: str) -> Sequence[str]:
    return text.splitlines()[-2:]


def read_report(folder: Path) -> dict[str, Any]:
    """What rank 0 wrote at its end."""
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found
