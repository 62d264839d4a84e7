"""Whatever becomes of a rank, the others end in time and say who it was; a second start ends with the same bits."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults import plan
from tests.faults.plan import Fault, Injection, Reference, Tally

NUM_INJECTIONS, NUM_LANES = int(os.environ.get("NUM_FAULTS", "36")), 3  # 216 were run when this was written
SAMPLE = [
    Injection(Fault("kill", 1, "collective", 1, 5), 2, "full", rank_0_has_store=False, asynchronous=False),
    Injection(Fault("raise", 0, "backward", 2, 1), 2, "full", rank_0_has_store=False, asynchronous=True),
    Injection(Fault("kill", 0, "save", 3, 9), 2, "full", rank_0_has_store=True, asynchronous=False),
    Injection(Fault("exit", 1, "forward", 1, 2), 2, "full", rank_0_has_store=False, asynchronous=False),
    Injection(Fault("stop", 1, "step", 1, 2), 2, "full", rank_0_has_store=False, asynchronous=False),
    Injection(Fault("stop", 1, "end", 0, 0), 2, "full", rank_0_has_store=False, asynchronous=False),
    Injection(Fault("nan", 0, "nan", 1, 0), 2, "full", rank_0_has_store=False, asynchronous=False),
    Injection(Fault("other torch", 1, "join", 0, 0), 2, "full", rank_0_has_store=False, asynchronous=False),
]


def check(tally: Tally) -> None:
    print(tally)
    assert (tally.lost, tally.hung, tally.unnamed) == ([], [], []), str(tally)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What two ranks end with where nothing happens."""
    return plan.reference(tmp_path_factory.mktemp("reference"), 2, "full")


def test_a_sample_of_faults_is_named_and_loses_nothing(tmp_path, known):
    tally = Tally()
    for number, injection in enumerate(SAMPLE):
        plan.inject(tmp_path / str(number), injection, known, tally)
    assert tally.num == len(SAMPLE)
    check(tally)


@pytest.mark.slow
def test_of_many_faults_at_random_places_none_loses_or_hangs_and_each_is_named(tmp_path):
    of_world: dict[tuple[int, str], Reference] = {}
    for world in plan.WORLDS:
        of_world[world] = plan.reference(tmp_path / f"{world[0]} {world[1]}", *world)
    tally = Tally()

    def run_lane(lane: int) -> None:
        for seed in range(lane, NUM_INJECTIONS, NUM_LANES):
            injection = Injection.drawn(seed)
            known = of_world[injection.num_ranks, injection.strategy]
            plan.inject(tmp_path / str(seed), injection, known, tally, lane=lane)

    with ThreadPoolExecutor(NUM_LANES) as pool:
        list(pool.map(run_lane, range(NUM_LANES)))
    assert tally.num == NUM_INJECTIONS >= 36
    check(tally)


def below_torchrun(program: list[object], *, ranks: int, restarts: int) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, f"--max-restarts={restarts}", *map(str, program)]
    env = {**os.environ, "PYTHONPATH": str(plan.REPO), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)


RESTARTED = [
    Injection(Fault("kill", 1, "save", 3, 12), 2, "full", rank_0_has_store=False, asynchronous=False),
    Injection(Fault("kill", 0, "collective", 2, 3), 2, "full", rank_0_has_store=False, asynchronous=True),
    Injection(Fault("raise", 1, "backward", 3, 1), 2, "full", rank_0_has_store=False, asynchronous=False),
]


@pytest.mark.slow
@pytest.mark.parametrize("injection", RESTARTED, ids=lambda each: f"{each.fault.kind} in {each.fault.place}")
def test_torchrun_restarts_from_the_last_checkpoint_and_ends_with_the_bits_of_no_fault(tmp_path, known, injection):
    config = plan.write_config(tmp_path / "run", injection, injection.fault, errors="", timeout_s=30.0)
    done = below_torchrun([plan.TRAIN, config], ranks=2, restarts=2)
    assert done.returncode == 0, done.stderr
    report = plan.read_report(tmp_path / "run")
    assert report["end"] == known.digests[plan.NUM_STEPS]
    if not injection.asynchronous:  # then the last one may not have been complete
        assert report["first"] >= injection.fault.step // plan.EVERY * plan.EVERY
