"""What of a unit is on a rank, after any sequence of calls: as a model of a few lines says, and the docs draw."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import dshard
from dshard.collectives import HostValues
from dshard.testing import WorldPool
from dshard.units.copies import TRANSITIONS, Copies, Residency

SHARDED, IN_FLIGHT, GATHERED, IN_PARTS = Residency
NUM_UNITS = 3


@dataclass
class Expected:
    """One unit, as `docs/architecture.md` tells its states."""

    state: Residency = SHARDED
    is_stale: bool = False
    is_pinned: bool = False
    reshards: bool | int = True  # after forward
    leaves: bool = True  # after backward
    is_once: bool = False  # the host has its full values once, from a gather on that was not for parts

    def gather(self) -> None:
        if self.state is SHARDED or self.is_stale:
            self.is_once |= type(self.reshards) is bool
        if self.state is SHARDED or self.state is IN_PARTS or self.is_stale:
            self.state, self.is_stale = IN_FLIGHT, False

    def touch(self) -> None:
        self.gather()
        self.state = GATHERED

    def free(self) -> None:
        if not self.is_pinned:
            self.state = SHARDED

    def write(self) -> None:
        self.is_stale = self.state is not SHARDED

    def release(self) -> None:
        if self.leaves or self.reshards:
            self.free()

    def end_forward(self, *, is_recorded: bool) -> None:
        if not is_recorded:
            if self.reshards is not False and not (self.is_once and self.reshards is True):
                self.free()
        elif self.reshards is True:
            self.free()
        elif self.reshards is not False and not self.is_pinned and self.state is GATHERED:
            self.state = IN_PARTS

    def end_backward(self) -> None:
        if self.leaves:
            self.free()


def _late_in(action: Callable[[], object]) -> set[int]:
    """Run an action; gives the ids of host values of which a peer still read the last ones when they were gathered."""
    late: set[int] = set()
    are_late = HostValues.are_late

    def watched(self: HostValues) -> bool:
        is_late = bool(are_late.fget(self))  # type: ignore[attr-defined]
        late.update([id(self)] if is_late else [])
        return is_late

    HostValues.are_late = property(watched)  # type: ignore[assignment,method-assign]
    try:
        action()
    finally:
        HostValues.are_late = are_late  # type: ignore[method-assign]
    return late


class Both:
    """A model of three units, and what is expected of each; every action is done to both."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(NUM_UNITS)))
        for layer in self.net:
            dshard.fully_shard(layer)
        dshard.fully_shard(self.net)
        self.net.set_prefetch(0)
        self.expected = [Expected() for _ in self.net]
        self.handles: list[Any] = [None] * NUM_UNITS
        self.scopes: list[Any] = [None] * NUM_UNITS
        self.loss: Any = None

    def do(self, action: tuple[Any, ...]) -> None:
        name, *args = action
        late = _late_in(lambda: getattr(self, name)(*args))
        copies = [layer._dshard_units[0].copies for layer in self.net]
        for each, own in zip(self.expected, copies, strict=True):
            if each.state is IN_FLIGHT and id(own.host_values) in late:  # peers wait for its part: it waits at once
                each.state = GATHERED
        found = [own.residency for own in copies]
        assert found == [each.state for each in self.expected], f"after {action}"

    def unshard(self, i: int) -> None:
        self.handles[i] = self.net[i].unshard(async_op=True)
        self.expected[i].gather()

    def wait(self, i: int) -> None:
        if self.handles[i] is not None:
            self.handles[i].wait()
            if self.expected[i].state is IN_FLIGHT:
                self.expected[i].state = GATHERED

    def reshard(self, i: int) -> None:
        self.net[i].reshard()
        self.expected[i].free()

    def write(self, i: int) -> None:
        with torch.no_grad():
            self.net[i].weight.mul_(0.5)
        self.expected[i].write()
        self.loss = None  # autograd would complain of the write

    def pin(self, i: int) -> None:
        if self.scopes[i] is None:
            self.scopes[i] = dshard.gathered(self.net[i])
            self.scopes[i].__enter__()
            self.expected[i].touch()
            self.expected[i].is_pinned = True
        else:
            self.scopes[i].__exit__(None, None, None)
            self.scopes[i], self.expected[i].is_pinned = None, False
            self.expected[i].release()

    def after_forward(self, i: int, choice: bool | int) -> None:
        self.net[i].set_reshard_after_forward(choice)
        self.expected[i].reshards = choice

    def after_backward(self, i: int, choice: bool) -> None:
        self.net[i].set_reshard_after_backward(choice)
        self.expected[i].leaves = choice

    def forward(self, is_recorded: bool) -> None:
        with torch.set_grad_enabled(is_recorded):
            out = self.net(torch.ones(2, 4, requires_grad=is_recorded))
        self.loss = out.sum() if is_recorded else None
        for each in self.expected:
            each.touch()
            each.end_forward(is_recorded=is_recorded)

    def backward(self) -> None:
        if self.loss is None:
            return
        self.loss.backward()
        self.loss = None
        for each in self.expected:
            each.touch()
            each.end_backward()


def run(programs: list[list[tuple[Any, ...]]]) -> list[set[tuple[str, str]]]:
    """Run programs, each on a new model; gives the transitions that were seen."""
    seen: set[tuple[str, str]] = set()
    become = Copies._become

    def watched(self: Copies, residency: Residency) -> None:
        seen.add((self.residency.value, residency.value))
        become(self, residency)

    Copies._become = watched  # type: ignore[method-assign]
    try:
        for program in programs:
            both = Both()
            for action in program:
                both.do(action)
            for i, scope in enumerate(both.scopes):
                if scope is not None:
                    both.do(("pin", i))
    finally:
        Copies._become = become  # type: ignore[method-assign]
    return [seen]


def actions(choices: list[bool | int]) -> st.SearchStrategy[Any]:
    units = st.integers(0, NUM_UNITS - 1)
    return st.one_of(
        st.tuples(st.sampled_from(["unshard", "wait", "reshard", "write", "pin"]), units),
        st.tuples(st.just("after_forward"), units, st.sampled_from(choices)),
        st.tuples(st.just("after_backward"), units, st.booleans()),
        st.tuples(st.just("forward"), st.booleans()),
        st.just(("backward",)),
    )


@settings(max_examples=40)
@given(program=st.lists(actions([True, False]), max_size=15))
@example(program=[("unshard", 0), ("wait", 0), ("write", 0), ("unshard", 0), ("forward", True), ("backward",)])
@example(program=[("after_forward", 1, False), ("forward", True), ("forward", False), ("pin", 1), ("reshard", 1)])
def test_a_unit_is_in_the_state_that_its_calls_say(worlds: WorldPool, program):
    worlds.run(2, run, [program])


EVERY = [
    [("after_forward", 0, 2), ("forward", True), ("backward",)],  # in parts, in flight, gathered, sharded
    [("after_forward", 0, 2), ("forward", True), ("write", 0), ("forward", True), ("reshard", 0)],
    [("unshard", 1), ("reshard", 1), ("unshard", 1), ("wait", 1)],
]


@settings(max_examples=10)
@given(program=st.lists(actions([True, False, 2]), max_size=15))
def test_with_parts_kept_for_few_neighbours_too(worlds: WorldPool, program):
    worlds.run(4, run, [program])


def test_every_transition_that_is_drawn_is_taken(worlds: WorldPool):
    drawn = {(before.value, after.value) for before, known in TRANSITIONS.items() for after in known}
    assert worlds.run(4, run, EVERY) == [[drawn]] * 4


def test_any_other_transition_raises():
    copies: Any = object.__new__(Copies)
    copies.unit = type("Unit", (), {"label": "a unit"})
    for before in Residency:
        for after in set(Residency) - TRANSITIONS[before]:
            copies.residency = before
            with pytest.raises(AssertionError, match="a unit: copies that are"):
                copies._become(after)


def test_the_docs_draw_these_transitions():
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    rows = re.findall(
        r"^\| (\w[\w ]*) \| .* \| ((?:[\w ]+(?:, )?)+) \|$", text.partition("## States of a unit")[2], re.M
    )
    assert {before: set(after.split(", ")) for before, after in rows if before != "state"} == {
        before.value: {after.value for after in known} for before, known in TRANSITIONS.items()
    }
