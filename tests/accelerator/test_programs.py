"""Random programs over streams, and random uses of memory: what the simulated accelerator says of them is held against
models of their own, which share nothing with it.
"""

from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accelerator.device import MODES
from tests.accelerator.rooms import settle, simulated

MiB = 2**20
NUM_STREAMS, NUM_TENSORS, NUM_EVENTS, LENGTH = 3, 3, 2, 8
Step = tuple[Any, ...]

streams, tensors, events = (
    st.integers(0, NUM_STREAMS - 1),
    st.integers(0, NUM_TENSORS - 1),
    st.integers(0, NUM_EVENTS - 1),
)
parts = st.sampled_from([(0, 8, 1), (0, 4, 1), (4, 8, 1), (3, 7, 1), (0, 8, 2), (1, 8, 2)])
halves = st.sampled_from([(0, 4, 1), (4, 8, 1), (3, 7, 1), (0, 8, 2), (1, 8, 2)])
uses = st.one_of(
    st.tuples(st.just("add"), streams, tensors, halves, tensors, halves),
    st.tuples(st.just("fill"), streams, tensors, parts, st.integers(0, 9)),
    st.tuples(st.just("item"), streams, tensors, st.integers(0, LENGTH - 1)),
)
orders = st.one_of(
    st.tuples(st.just("wait"), streams, streams),
    st.tuples(st.just("record"), streams, events),
    st.tuples(st.just("hold"), streams, events),
    st.tuples(st.just("event"), events),
    st.tuples(st.just("stream"), streams),
    st.tuples(st.just("all")),
)
programs = st.lists(st.one_of(uses, orders, orders), min_size=8, max_size=24)


def touched(step: Step) -> list[tuple[int, int, bool]]:
    """(tensor, element, whether it is written to) for each that a step uses."""
    if step[0] == "add":
        _, _, to, part, source, other = step
        if source == to:  # an overlap within one operation is an error of another kind
            other = part
        return [(to, i, True) for i in range(*part)] + [(source, i, False) for i in range(*other)]
    if step[0] == "fill":
        return [(step[2], i, True) for i in range(*step[3])]
    return [(step[2], step[3], False)] if step[0] == "item" else []


def first_race(program: list[Step]) -> int | None:
    """The first step that uses what an earlier one uses, too, where no path of the program leads from that to it."""
    befores: list[list[int]] = []  # edges, backwards
    last: dict[int, int] = {}  # of a stream
    recorded: dict[int, int] = {}  # events
    host: list[int] = []
    for number, step in enumerate(program):
        kind, own = step[0], step[1] if len(step) > 1 else None
        before = list(host)
        if kind in ("event", "all"):  # the host's own
            before += [recorded[own]] if own in recorded else [] if kind == "event" else last.values()
        elif own in last:
            before.append(last[own])
        if kind == "wait" and step[2] in last:
            before.append(last[step[2]])
        if kind == "hold" and step[2] in recorded:
            before.append(recorded[step[2]])
        befores.append(before)
        if kind in ("event", "all", "stream", "item"):
            host = [number]
        if kind not in ("event", "all", "stream"):
            last[own] = number  # type: ignore[index]
        if kind == "record":
            recorded[step[2]] = number
    for number, step in enumerate(program):
        reached, todo = set(), [number]
        while todo:
            for before_it in befores[todo.pop()]:
                if before_it not in reached:
                    reached.add(before_it)
                    todo.append(before_it)
        own_uses = touched(step)
        for earlier in set(range(number)) - reached:
            for tensor, element, writes in touched(program[earlier]):
                if any((t, i) == (tensor, element) and (writes or w) for t, i, w in own_uses):
                    return number
    return None


def in_order(program: list[Step]) -> list[list[float]]:
    """The values at the end, and what each `item` gave."""
    values = [[float(t + 1)] * LENGTH for t in range(NUM_TENSORS)]
    items: list[float] = []
    for step in program:
        if step[0] == "add":
            _, _, to, part, source, other = step
            new = [values[source][i] for i in range(*(part if source == to else other))]
            for i, value in zip(range(*part), new, strict=True):
                values[to][i] += value
        elif step[0] == "fill":
            for i in range(*step[3]):
                values[step[2]][i] = float(step[4])
        elif step[0] == "item":
            items.append(values[step[2]][step[3]])
    return [*values, items]


def run_program(program: list[Step], modes: list[tuple[str, int]]) -> list[Any]:
    """In each mode: the step at which a race was reported, or the values at the end."""
    out: list[Any] = []
    for mode, seed in modes:
        with simulated(mode, seed=seed, idle_s=0.003) as device:
            sides = [torch.accelerator.current_stream(), *(torch.sim.Stream() for _ in range(NUM_STREAMS - 1))]  # type: ignore[attr-defined]
            marks = [torch.sim.Event() for _ in range(NUM_EVENTS)]  # type: ignore[attr-defined]
            values = [torch.full((LENGTH,), t + 1.0, device="sim", dtype=torch.float64) for t in range(NUM_TENSORS)]
            device.synchronize()
            items: list[float] = []
            raced = None
            for number, step in enumerate(program):
                try:
                    take(step, sides, marks, values, items)
                except RuntimeError as error:
                    if not str(error).startswith("race: nothing orders"):
                        raise
                    raced = number
                    break
            settle(device)
            out.append(raced if raced is not None else [*(v.tolist() for v in values), items])
    return out


def take(step: Step, sides: list[Any], marks: list[Any], values: list[torch.Tensor], items: list[float]) -> None:
    kind, *rest = step
    if kind == "wait":
        sides[rest[0]].wait_stream(sides[rest[1]])
    elif kind == "record":
        marks[rest[1]].record(sides[rest[0]])
    elif kind == "hold":
        sides[rest[0]].wait_event(marks[rest[1]])
    elif kind == "event":
        marks[rest[0]].synchronize()
    elif kind == "stream":
        sides[rest[0]].synchronize()
    elif kind == "all":
        torch.accelerator.synchronize()
    else:
        with sides[rest[0]]:
            if kind == "add":
                _, to, part, source, other = rest
                values[to][slice(*part)].add_(values[source][slice(*(part if source == to else other))])
            elif kind == "fill":
                values[rest[1]][slice(*rest[2])].fill_(rest[3])
            else:
                items.append(values[rest[1]][rest[2]].item())


@given(program=programs, seed=st.integers(0, 2**32))
@settings(max_examples=120)
def test_races_of_random_programs_are_those_that_no_path_orders(simulators, program, seed):
    modes = [(mode, seed + more) for mode in MODES for more in (range(2) if mode != "eager" else range(1))]
    race = first_race(program)
    expected = in_order(program) if race is None else race
    [found] = simulators.run(1, run_program, program, modes)
    assert found == [expected] * len(modes)


@given(program=programs, seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_random_programs_whose_steps_are_all_ordered_give_what_their_order_gives(simulators, program, seed):
    def own(step: Step) -> int:
        return step[1] if len(step) > 2 and step[0] in ("add", "fill", "item") else 0

    ordered: list[Step] = program[:1]  # each stream waits for the one before
    for before, step in pairwise(program):
        ordered += [("wait", s, own(before)) for s in range(NUM_STREAMS)] + [step]
    assert first_race(ordered) is None
    [found] = simulators.run(1, run_program, ordered, [(mode, seed) for mode in MODES])
    assert found == [in_order(ordered)] * len(MODES)


# Memory: CUDA's caching allocator in terms of segments and the intervals that they are cut into.


class Cache:
    """What is asked of the driver, and what is handed out of it; addresses of segments are the simulator's."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.segments: list[dict[str, Any]] = []  # base, size, key and blocks: offset -> (size, is free)
        self.peaks = [0, 0]

    def allocated(self) -> int:
        return sum(size for s in self.segments for size, is_free in s["blocks"].values() if not is_free)

    def reserved(self) -> int:
        return sum(s["size"] for s in self.segments)

    def empty(self) -> None:
        self.segments = [s for s in self.segments if list(s["blocks"].values()) != [(s["size"], True)]]

    def allocate(self, num_bytes: int, stream: int, given: int | None) -> int | None:
        """The address, which for a new segment is what the simulator gave; None if there is no memory."""
        size = max(1, -(-num_bytes // 512)) * 512
        is_small = size <= MiB
        free = [
            (block, s["base"] + offset, s, offset)
            for s in self.segments
            if s["key"] == (stream, is_small)
            for offset, (block, is_free) in s["blocks"].items()
            if is_free and block >= size
        ]
        if free:
            _, _, segment, offset = min(free, key=lambda f: f[:2])
        else:
            whole = 2 * MiB if is_small else 20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB
            if self.limit is not None and self.reserved() + whole > self.limit:
                self.empty()
                if self.reserved() + whole > self.limit:
                    return None
            segment, offset = {"base": given, "size": whole, "key": (stream, is_small), "blocks": {0: (whole, True)}}, 0
            self.segments.append(segment)
        block = segment["blocks"][offset][0]
        if block - size >= 512 if is_small else block - size > MiB:
            segment["blocks"][offset + size] = block - size, True
            block = size
        segment["blocks"][offset] = block, False
        self.peaks = [max(self.peaks[0], self.allocated()), max(self.peaks[1], self.reserved())]
        return segment["base"] + offset

    def free(self, address: int) -> None:
        [segment] = [s for s in self.segments if s["base"] <= address < s["base"] + s["size"]]
        segment["blocks"][address - segment["base"]] = segment["blocks"][address - segment["base"]][0], True
        merged: dict[int, tuple[int, bool]] = {}
        for offset, (size, is_free) in sorted(segment["blocks"].items()):
            before = max(merged, default=None)
            if is_free and before is not None and merged[before][1]:
                merged[before] = merged[before][0] + size, True
            else:
                merged[offset] = size, is_free
        segment["blocks"] = merged


sizes = st.one_of(
    st.sampled_from(
        [1, 512, 513, MiB - 1, MiB, MiB + 1, 2 * MiB, 10 * MiB - 512, 10 * MiB - 511, 10 * MiB, 12 * MiB + 1]
    ),
    st.integers(1, 2000),
    st.integers(MiB - 2000, MiB + 2000),
    st.integers(1, 21 * MiB),
    st.sampled_from([19 * MiB - 512, 19 * MiB, 19 * MiB + 512, 20 * MiB, 21 * MiB + 5]),
)
requests = st.one_of(
    st.tuples(st.just("allocate"), sizes, st.integers(0, 1)),
    st.tuples(st.just("allocate"), sizes, st.just(0)),
    st.tuples(st.just("free"), st.integers(0, 20)),
    st.tuples(st.just("free"), st.integers(0, 20)),
    st.tuples(st.just("empty")),
)


def use_memory(steps: list[Step], limit: int | None) -> list[tuple[int | None, list[int]]]:
    """Of each step the address it gave, and allocated, reserved and their peaks."""
    with simulated() as device:
        device.empty_cache()
        device.reset_peaks()
        device.set_limit(-1 if limit is None else limit)
        side = torch.sim.Stream()  # type: ignore[attr-defined]
        kept: list[torch.Tensor] = []
        out = []
        try:
            for step in steps:
                at = None
                if step[0] == "allocate":
                    with torch.sim.stream(side if step[2] else None):  # type: ignore[attr-defined]
                        try:
                            kept.append(torch.empty(step[1], dtype=torch.uint8, device="sim"))
                            at = kept[-1].data_ptr()
                        except torch.OutOfMemoryError:
                            pass
                elif step[0] == "free" and kept:
                    kept.pop(step[1] % len(kept))
                elif step[0] == "empty":
                    device.empty_cache()
                stats = device.stats()
                out.append((at, [stats[k] for k in ("allocated_bytes", "reserved_bytes", *PEAKS)]))
        finally:
            device.set_limit(-1)
            kept.clear()
            settle(device)
            device.empty_cache()
        return out


PEAKS = "peak_allocated_bytes", "peak_reserved_bytes"


@given(
    steps=st.lists(requests, min_size=1, max_size=30),
    limit=st.one_of(st.none(), st.sampled_from([4 * MiB, 24 * MiB, 44 * MiB])),
)
@settings(max_examples=150)
def test_memory_is_counted_and_handed_out_as_by_cudas_caching_allocator(simulators, steps, limit):
    [found] = simulators.run(1, use_memory, steps, limit)
    cache, kept = Cache(limit), []
    for step, (at, numbers) in zip(steps, found, strict=True):
        if step[0] == "allocate":
            expected = cache.allocate(step[1], step[2], at)
            assert at == expected, step
            if at is not None:
                kept.append(at)
        elif step[0] == "free" and kept:
            cache.free(kept.pop(step[1] % len(kept)))
        elif step[0] == "empty":
            cache.empty()
        assert numbers == [cache.allocated(), cache.reserved(), *cache.peaks], step
