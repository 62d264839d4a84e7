"""Real programs that are looked at while they train: tables of what they cross, and results as of unwatched ones."""

import json
import tempfile
import warnings
from pathlib import Path

import pytest

import dshard
from dshard.testing import WorldPool
from tests.crossings import oracle
from tests.crossings.comparing import differences
from tests.crossings.covering import Row
from tests.crossings.factors import name_of, num_ranks_of, rows
from tests.crossings.model import NUM_STEPS
from tests.crossings.program import Program, full, values

ROWS = rows()[::24]


def looked_at(row: Row) -> tuple[oracle.Result, list[tuple[int, int]]]:
    """Train as a row says, each step within a trace; and bytes of gathers, by the trace and as counted."""
    sent = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = Program(row)
        for step in range(NUM_STEPS):
            with dshard.CommTrace() as comm, dshard.trace(program.model, program.optimizers, memory=True) as trace:
                program.step(step)
            told = sum(event.num_bytes for event in trace.events) + sum(r.total_bytes for r in trace.others)
            sent.append((told, comm.total_bytes))
            report = dshard.report(program.model, program.optimizers, trace)
            assert all(num is None or num >= 0 for num in report.num_bytes.values()), str(report)
            assert sum(len(unit.params) for unit in report.units.units) == sum(
                isinstance(p, dshard.ShardedTensor) for p in program.model.parameters()
            )
            assert str(trace).startswith("unit ")
            with tempfile.TemporaryDirectory() as folder:
                trace.save(f"{folder}/trace.json")
                json.loads(Path(f"{folder}/trace.json").read_text())
            assert min(min(num for num in s.num_bytes.values() if num is not None) for s in trace.memory) >= 0
    grads = {n: full(p.grad).cpu().clone() for n, p in program.trained().items() if p.grad is not None}
    return oracle.Result(program.losses, program.norms, program.start, values(program.model), grads), sent


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_program_that_is_looked_at_trains_as_one_process(worlds: WorldPool, row):
    expected = oracle.train(row)
    for rank, (result, sent) in enumerate(worlds.run(num_ranks_of(row), looked_at, row)):
        assert differences(row, rank, result, expected) == []
        assert all(told == counted for told, counted in sent)
