"""The simulated accelerator is what it says: late, merciless to races, and as sparing with memory as CUDA's allocator.

All of it runs in a rank, for a process that knows the device "sim" is no longer as others are.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import record_function

from tests.accelerator.device import MODES
from tests.accelerator.rooms import error_of, settle, simulated

HERE = "accelerator/test_simulator.py"


def stream() -> Any:
    return torch.sim.Stream()  # type: ignore[attr-defined]


def within(side: Any) -> Any:
    return torch.sim.stream(side)  # type: ignore[attr-defined]


def vector(num: int = 8, value: float = 1.0) -> Tensor:
    """A tensor that is there: whoever uses it next is behind its making."""
    out = torch.full((num,), value, device="sim")
    torch.accelerator.synchronize()
    return out


# Operations run late.


def a_chain_is_late(mode: str) -> tuple[int, int, float, float]:
    with simulated(mode) as device:
        out, issued, run = vector(), device.num_issued(), device.num_run()
        for _ in range(100):
            out.add_(1)
        late = device.num_issued() - issued, device.num_run() - run
        before = device.peek(out)[0].item()
        return *late, before, out[0].item()


@pytest.mark.parametrize("mode", ["lazy", "others first"])
def test_a_chain_of_operations_runs_when_it_is_asked_for(simulators, mode):
    assert simulators.run(1, a_chain_is_late, mode) == [(100, 0, 1.0, 101.0)]


def what_stops_the_host(name: str) -> tuple[bool, bool]:
    """Whether the tasks before it are over once it returns, and whether the host may build on that."""
    with simulated() as device:
        side, page = stream(), torch.zeros(8)
        pinned, target = torch.ones(8).pin_memory(), vector()
        mask = vector()
        asked: dict[str, Callable[[], object]] = {
            "item": lambda: mask[0].item(),
            "bool": lambda: bool(mask[0] > 0),
            "nonzero": mask.nonzero,
            "mask": lambda: mask[mask > 0],
            "to pageable": mask.cpu,
            "to pageable, non_blocking": lambda: page.copy_(mask, non_blocking=True),
            "from pageable": lambda: target.copy_(page),
            "to pinned": lambda: pinned.copy_(mask),
            "from pinned": lambda: target.copy_(pinned),
            "synchronize": device.synchronize,
            "stream.synchronize": side.synchronize,
            "event.synchronize": lambda: side.record_event().synchronize(),
            "to pinned, non_blocking": lambda: pinned.copy_(mask, non_blocking=True),
            "from pinned, non_blocking": lambda: target.copy_(pinned, non_blocking=True),
            "add": lambda: mask.add_(1),
            "wait_stream": lambda: side.wait_stream(side),
            "sum": mask.sum,
        }
        run = device.num_run()
        with within(side):
            other = torch.ones(8, device="sim")
            result = asked[name]()
        has_run = device.num_run() > run
        is_known = not error_of(lambda: other.add_(1))
        settle(device)
        del result
        return has_run, is_known


STOPS = (
    *("item", "bool", "nonzero", "mask", "to pageable", "to pageable, non_blocking", "from pageable", "to pinned"),
    *("from pinned", "synchronize", "stream.synchronize", "event.synchronize"),
)
GOES_ON = "to pinned, non_blocking", "from pinned, non_blocking", "add", "wait_stream", "sum"


def test_the_host_stops_where_it_does_with_cuda_and_goes_on_elsewhere(simulators):
    found = {name: simulators.run(1, what_stops_the_host, name)[0] for name in STOPS + GOES_ON}
    assert found == dict.fromkeys(STOPS, (True, True)) | dict.fromkeys(GOES_ON, (False, False))


# Races.


def fills(tensor: Tensor) -> object:
    return tensor.fill_(3)


def sums(tensor: Tensor) -> object:
    return tensor.sum()


def adds(tensor: Tensor) -> object:
    return tensor.add_(1)


def order_by(how: str, first: Any, second: Any) -> None:
    if how == "wait_stream":
        second.wait_stream(first)
    elif how == "event":
        second.wait_event(first.record_event())
    elif how == "over a third":
        third = stream()
        third.wait_stream(first)
        second.wait_stream(third)
    elif how == "event.synchronize":
        first.record_event().synchronize()
    elif how == "stream.synchronize":
        first.synchronize()
    elif how == "synchronize":
        torch.accelerator.synchronize()
    elif how == "the wrong way":
        first.wait_stream(second)


def two_uses(
    before: Callable[[Tensor], object],
    after: Callable[[Tensor], object],
    order: str = "",
    parts: tuple[Any, Any] = (slice(None), slice(None)),
    shape: tuple[int, ...] = (8,),
) -> tuple[str, int, int]:
    """What is said of two uses of a tensor by two streams, and the streams' numbers."""
    with simulated() as device:
        first, second = stream(), stream()
        tensor = torch.zeros(shape, device="sim")
        device.synchronize()
        early = first.record_event()
        kept = []
        with within(first), record_function("what comes first"):
            kept.append(before(tensor[parts[0]]))
        if order == "too early":
            second.wait_event(early)
        order_by(order, first, second)
        with within(second), record_function("what comes second"):
            found = error_of(lambda: kept.append(after(tensor[parts[1]])))
        settle(device)
        return found, first.stream_id, second.stream_id


def line_in(function: Callable[..., object]) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + 1} in {function.__name__}"


@pytest.mark.parametrize(
    ("before", "after", "names", "did", "does"),
    [
        (fills, sums, ("fill_", "sum"), "wrote", "reads"),
        (sums, fills, ("sum", "fill_"), "read", "writes"),
        (fills, fills, ("fill_", "fill_"), "wrote", "writes"),
        (fills, adds, ("fill_", "add"), "wrote", "reads"),
    ],
)
def test_a_race_names_both_sides(simulators, before, after, names, did, does):
    [(text, first, second)] = simulators.run(1, two_uses, before, after)
    assert text.startswith("race: nothing orders two uses of the same memory (32 bytes)"), text
    now, _, then = text.partition(f"\n  '{names[0]}' on stream {first} {did} it before [what comes first]")
    assert f"\n  '{names[1]}' on stream {second} {does} it [what comes second]" in now, text
    assert line_in(after) in now, text
    assert line_in(before) in then, text


@pytest.mark.parametrize(
    "order", ["wait_stream", "event", "over a third", "event.synchronize", "stream.synchronize", "synchronize"]
)
def test_what_orders_two_uses_makes_them_no_race(simulators, order):
    for before, after in ((fills, sums), (sums, fills), (fills, fills)):
        assert simulators.run(1, two_uses, before, after, order)[0][0] == ""


@pytest.mark.parametrize("order", ["the wrong way", "too early"])
def test_a_wait_that_comes_too_early_or_for_the_wrong_stream_orders_nothing(simulators, order):
    for before, after in ((fills, sums), (sums, fills), (fills, fills)):
        assert simulators.run(1, two_uses, before, after, order)[0][0].startswith("race")


def test_two_reads_are_no_race(simulators):
    assert simulators.run(1, two_uses, sums, sums)[0][0] == ""


COLUMNS = slice(None), slice(0, 3)


@pytest.mark.parametrize(
    ("shape", "parts", "is_race"),
    [
        ((8,), (slice(0, 4), slice(4, 8)), False),
        ((8,), (slice(0, 5), slice(4, 8)), True),
        ((8,), (slice(4, 8), slice(0, 5)), True),
        ((8,), (slice(0, 8, 2), slice(1, 8, 2)), False),
        ((8,), (slice(0, 8, 2), slice(0, 8, 3)), True),
        ((5, 6), (COLUMNS, (slice(None), slice(3, 6))), False),
        ((5, 6), (COLUMNS, (slice(None), slice(2, 6))), True),
        ((5, 6), (COLUMNS, (slice(2, 3), slice(2, 6))), True),
        ((5, 6), (COLUMNS, (slice(2, 3), slice(3, 6))), False),
        ((4, 3, 5), ((slice(None), 1), (slice(None), 2)), False),
        ((4, 3, 5), ((slice(None), 1), (slice(3, 4), slice(None), 4)), True),
    ],
)
def test_parts_of_a_tensor_race_where_they_overlap(simulators, shape, parts, is_race):
    [(text, *_)] = simulators.run(1, two_uses, fills, fills, "", parts, shape)
    assert text.startswith("race") == is_race, text


# Memory.


def a_tensor_let_go(how: str) -> tuple[str, bool | None]:
    """What the next allocation raises, and whether it was given the same memory."""
    with simulated() as device:
        side, tensor = stream(), vector(1000)
        at = tensor.data_ptr()
        with within(side), record_function("the side"):
            tensor.add_(1)
        if how == "recorded":
            tensor.record_stream(side)
        if how == "waited":
            torch.accelerator.current_stream().wait_stream(side)
        if how == "waited before":
            event = side.record_event()
            with within(side), record_function("the side"):
                tensor.add_(1)
            torch.accelerator.current_stream().wait_event(event)
        if how == "synchronized":
            side.synchronize()
        del tensor
        new: list[Tensor] = []
        with within(side) if how == "other stream" else nullcontext():
            text = error_of(lambda: new.append(torch.empty(1000, device="sim")))
        settle(device)
        return text, new[0].data_ptr() == at if new else None


@pytest.mark.parametrize("how", ["", "waited before"])
def test_memory_that_another_stream_still_uses_is_found_when_it_is_handed_out(simulators, how):
    [(text, _)] = simulators.run(1, a_tensor_let_go, how)
    assert text.startswith("race"), text
    for part in ("let go while another stream used it, with no record_stream", "'add'", "[the side]", "'a new tensor'"):
        assert part in text
    assert f"{HERE}:" in text.partition("its memory was let go by")[2].partition("'add'")[0], text


@pytest.mark.parametrize(
    ("how", "is_same"), [("recorded", False), ("waited", True), ("synchronized", True), ("other stream", False)]
)
def test_memory_is_handed_out_again_where_nobody_uses_it(simulators, how, is_same):
    assert simulators.run(1, a_tensor_let_go, how) == [("", is_same)]


def recorded_memory_comes_back() -> tuple[bool, bool]:
    with simulated() as device:
        side, tensor, other = stream(), vector(1000), vector(1000)
        at = tensor.data_ptr()
        with within(side):
            tensor.add_(1)
            other.add_(1)
        tensor.record_stream(side)
        del tensor
        device.set_times(0.001, 60.0)
        run = device.num_run()
        while device.num_run() < run + 2:  # without a word to the device
            time.sleep(0.001)
        time.sleep(0.02)
        new = torch.empty(1000, device="sim")
        new.fill_(1)
        return new.data_ptr() == at, error_of(lambda: other.add_(1)).startswith("race")


def test_recorded_memory_comes_back_and_teaches_the_host_nothing_else(simulators):
    assert simulators.run(1, recorded_memory_comes_back) == [(True, True)]


def memory_is_poisoned() -> tuple[list[bool], float, list[float]]:
    with simulated() as device:
        tensor = vector(1000, 5.0)
        seen, total = device.peek(tensor), tensor.sum()  # late, and yet before the end of its memory
        at = tensor.data_ptr()
        del tensor
        same = torch.empty(1000, device="sim")
        assert same.data_ptr() == at
        found = [seen.isnan().any().item()]
        device.synchronize()
        found.append(seen.isnan().all().item())
        return found, total.item(), same[:2].nan_to_num(7.0).tolist()


def test_memory_is_poisoned_once_its_stream_has_come_so_far(simulators):
    assert simulators.run(1, memory_is_poisoned) == [([False, True], 5000.0, [7.0, 7.0])]


def pinned_memory() -> dict[str, Any]:
    with simulated() as device:
        pinned, target = torch.ones(8).pin_memory(), vector(8, 2.0)
        found: dict[str, Any] = {}
        target.copy_(pinned, non_blocking=True)
        pinned.fill_(9)
        found["written"] = error_of(device.synchronize)
        pinned.fill_(4)
        device.synchronize()
        target.fill_(3)
        pinned.copy_(target, non_blocking=True)
        found["early"] = pinned.isnan().all().item()
        device.synchronize()
        found["late"] = pinned.tolist()
        # There and back: both in one stream, and in order.
        back = vector(8, 6.0)
        target.copy_(pinned, non_blocking=True)
        pinned.copy_(back, non_blocking=True)
        target.add_(10)
        again = torch.empty(8, device="sim").copy_(pinned, non_blocking=True)
        found["there and back"] = error_of(device.synchronize), target.tolist(), pinned.tolist(), again.tolist()
        side = stream()
        with within(side):
            found["two streams"] = (
                error_of(lambda: target.add_(1)),
                error_of(lambda: pinned.copy_(back, non_blocking=True)),
            )
        device.synchronize()
        target.copy_(pinned, non_blocking=True)
        with within(side):
            found["unordered"] = error_of(lambda: pinned.copy_(back, non_blocking=True))
        settle(device)
        # Let go while a copy still reads it.
        gone = torch.full((8,), 5.0).pin_memory()
        target.copy_(gone, non_blocking=True)
        del gone
        kept = [torch.full((8,), -1.0).pin_memory() for _ in range(50)]
        found["let go"] = target.tolist(), len(kept)
        return found


def test_copies_from_and_to_pinned_memory_are_late_and_the_hosts_haste_is_found(simulators):
    [found] = simulators.run(1, pinned_memory)
    assert "race: the host wrote to pinned memory that a copy had still to read" in found["written"]
    assert f"{HERE}:" in found["written"]
    assert (found["early"], found["late"]) == (True, [3.0] * 8)
    assert found["there and back"] == ("", [13.0] * 8, [6.0] * 8, [6.0] * 8)
    assert found["two streams"] == ("", "")  # the host stood still in between
    assert found["unordered"].startswith("race")
    assert found["let go"] == ([5.0] * 8, 50)


def modes_agree(mode: str, seed: int) -> list[float]:
    with simulated(mode, seed=seed, idle_s=0.003):
        sides, tensors = [stream() for _ in range(3)], [vector(4, float(i)) for i in range(3)]
        for step in range(30):
            own, other = step % 3, (step * step + 1) % 3
            sides[own].wait_stream(sides[other])
            sides[own].wait_stream(sides[(own + 1) % 3])
            sides[own].wait_stream(sides[(own + 2) % 3])
            with within(sides[own]):
                tensors[own].mul_(0.5).add_(tensors[other])
        torch.accelerator.synchronize()
        return [value for tensor in tensors for value in tensor.tolist()]


def test_every_mode_and_seed_gives_what_the_order_of_the_program_gives(simulators):
    values = [float(i) for i in range(3)]
    for step in range(30):
        values[step % 3] *= 0.5
        values[step % 3] += values[(step * step + 1) % 3]
    expected = [value for value in values for _ in range(4)]
    for mode in MODES:
        for seed in range(3):
            assert simulators.run(1, modes_agree, mode, seed) == [expected], (mode, seed)
