"""What a trace tells of a step: held against the collectives that were counted, and the lines of this file."""

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import dshard
from dshard.autograd import Watchers
from dshard.testing import WorldPool
from tests.inspection import models
from tests.inspection.models import ids, sharded


def line_of(text: str, file: str = __file__) -> str:
    """Where a text stands in a file, as file:line."""
    lines = Path(file).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if text in line and "line_of" not in line)
    return f"{file}:{number}"


def step(model: Any) -> None:
    (model(ids()) @ model.head.weight.t()).square().mean().backward()  # the loss
    model.zero_grad()


def traced(options: dict[str, Any]) -> tuple[list[Any], list[Any], str]:
    model = sharded(options)
    for _ in range(2):
        step(model)
    with dshard.CommTrace() as comm, dshard.trace(model) as trace:
        step(model)
    return trace.events, comm.records, str(trace)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"strategy": "ddp"}, {"strategy": "zero2"}])
def test_gathers_reductions_and_bytes_are_those_that_were_counted(worlds: WorldPool, options):
    for events, records, text in worlds.run(2, traced, options):
        for what, kinds in {"gather": ("all_gather",), "reduce": ("reduce_scatter", "all_reduce")}.items():
            own = [e for e in events if e.what == what and e.num_bytes]
            units = {e.unit for e in events}
            counted = [r for r in records if r.kind in kinds and r.label in units]
            assert sorted((e.unit, e.num_bytes) for e in own) == sorted((r.label, r.total_bytes) for r in counted)
            assert {(e.unit, e.phase) for e in own} >= {(r.label, r.phase) for r in counted if what == "gather"}
            assert all(unit in text for unit in units)
        assert {e.phase for e in events} <= {"forward", "backward"}
        assert [e.at_s for e in events] == sorted(e.at_s for e in events)
        assert all(e.took_s >= 0 and 0 <= e.waited_s <= e.took_s for e in events)


def test_an_event_says_for_which_operation_and_line_and_what_is_gathered_ahead(worlds: WorldPool):
    for events, _, _ in worlds.run(2, traced, {}):
        forward = {e.unit: e for e in events if e.what == "gather" and e.phase == "forward"}
        assert forward["embed"].op == ""  # of none: gathered as the module's forward begins
        assert forward["embed"].line == line_of("x = self.embed(ids)", models.__file__)
        assert not forward["embed"].is_ahead
        assert all(forward[f"blocks.{i}"].is_ahead for i in range(1, 3))
        waits = {e.unit: e.line for e in events if e.what == "gather_wait" and e.phase == "forward"}
        assert waits["head"] == line_of("# the loss")
        ops = {e.unit: e.op for e in events if e.what == "gather_wait" and e.phase == "forward"}
        assert ops["head"].startswith("aten.")
        assert {e.line for e in events if e.phase == "backward"} == {line_of("# the loss")}


def wasteful() -> tuple[list[str], list[str], str]:
    """A loss that goes back and forth between two units; and one that holds them."""
    model, told = sharded({}), []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dshard").addHandler(handler)

    def loss() -> None:
        with torch.no_grad():
            for part in model(ids()):
                part @ model.head.weight.t()  # in chunks
                part @ model.embed.weight.t()

    found = []
    for holds in (False, True):
        with dshard.gathered([model.head.weight]) if holds else nullcontext(), dshard.trace(model) as trace:
            loss()
        found.append(trace.warnings())
    logging.getLogger("dshard").removeHandler(handler)
    return found[0], found[1], "\n".join(told)


def test_what_is_gathered_again_and_again_is_told_with_its_line(messaging: WorldPool):
    for wasted, held, logged in messaging.run(2, wasteful):
        (head,) = (text for text in wasted if "'head'" in text)
        assert head.startswith("gathered 'head' 3 times in one eval, at " + line_of("# in chunks"))
        assert "with dshard.gathered(module)" in head
        assert head in logged
        assert not any("'head'" in text for text in held)


def changed_order() -> list[str]:
    model = sharded({})
    for skips in (False, False, True):
        with dshard.trace(model) as trace:
            model.skipped = model.blocks[1] if skips else None
            model(ids()).sum().backward()
        model.zero_grad()
    return trace.warnings()


def test_what_is_gathered_ahead_in_vain_is_told(messaging: WorldPool):
    for warnings in messaging.run(2, changed_order):
        assert any("'blocks.1' ahead in one forward that did not use it" in text for text in warnings)


def of_two_models() -> tuple[list[str], list[str], int, int]:
    """Two models of the same units in one step, of which one is used more often."""
    model, other = sharded({}), sharded({})
    for _ in range(2):
        with dshard.trace(model) as trace, dshard.trace(other) as beside:
            hidden = model(ids())
            other(ids()).sum().backward()
            other(ids()).sum().backward()
            hidden.sum().backward()
    gathers = [sum(e.what == "gather" for e in each.events) for each in (trace, beside)]
    return trace.warnings(), beside.warnings(), *gathers


def test_a_trace_is_of_its_model_alone(worlds: WorldPool):
    for own, others, num_own, num_others in worlds.run(2, of_two_models):
        assert (own, others) == ([], [])
        assert num_others == 2 * num_own > 0


def saved(path: str) -> tuple[str, int]:
    model = sharded({})
    with dshard.trace(model) as trace:
        step(model)
    trace.save(path)
    with pytest.raises(ZeroDivisionError), dshard.trace(model):
        raise ZeroDivisionError
    assert Watchers.present == []
    before = len(trace.events)
    step(model)  # of which nothing is noted
    assert len(trace.events) == before
    return Path(path).read_text(), before


def test_a_saved_trace_is_one_of_chrome_and_nothing_is_noted_outside(worlds: WorldPool, tmp_path):
    text, num_events = worlds.run(1, saved, str(tmp_path / "trace.json"))[0]
    told = json.loads(text)["traceEvents"]
    assert sum(each["ph"] == "X" for each in told) == num_events
    assert {"ts", "dur", "name", "pid", "tid"} <= told[0].keys()
    assert sum(each["ph"] == "C" for each in told) == num_events


def phases() -> list[tuple[str, str]]:
    left = sharded({})  # another model, whose forward has raised
    left.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        left(ids())
    model = sharded({})
    with dshard.CommTrace() as comm:
        with torch.no_grad():
            model(ids())
        step(model)
        dshard.clip_grad_norm_(model.parameters(), 1.0)
    assert repr(comm).startswith(f"<CommTrace: {len(comm.records)} collectives, {comm.total_bytes:,} bytes sent, ")
    assert [r.at_s for r in comm.records] == sorted(r.at_s for r in comm.records)
    return [(record.kind, record.phase) for record in comm.records]


def test_records_of_collectives_have_a_phase_and_a_time(worlds: WorldPool):
    for told in worlds.run(2, phases):
        gathers = [phase for kind, phase in told if kind == "all_gather"]
        assert gathers[:4] == ["eval"] * 4
        assert set(gathers[4:]) == {"forward", "backward"}
        assert {phase for kind, phase in told if kind == "reduce_scatter"} == {"backward"}
