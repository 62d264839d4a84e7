"""The model of peak memory, held against bytes that are counted while ranks train: never below, at most 5 % above.

By messages, as between hosts, and through the memory of one host.
"""

import ctypes
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

import dshard
from dshard.collectives import BufferPool, memory
from dshard.optim import AdamW8bit
from dshard.planner import Cluster, Link, Links, ModelCosts, Plan, Training, WholeSteps, moments
from dshard.planner.profiles import UnitTimes, costs_of
from dshard.planner.tracing import trace
from dshard.planning.plan import parts_of
from dshard.policies import Strategy
from dshard.testing import World, WorldPool
from tests.kit.counted import counted_peak
from tests.models import GPT

SINGLE = ("ddp", "zero1", "zero2", "keep", "full", "split(2)", "split(4)")
WITHIN = ("hybrid(2)", "hybrid(2, keep)")
LINK = Link(0.0, 1e-9)
MESSAGES, MEMORY = Links.of(LINK), Links.of(LINK, in_place=LINK)


def linears(widths: tuple[int, ...]) -> nn.Module:
    pairs = pairwise(widths)
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairs))


class Ends(nn.Module):
    """A weight looked up first, and the last product with the same one, or one beside it.

    Args:
        kind: "tied" for one parameter of the root, "beside" for two, "outside" for an embedding's weight, which is the
            last product's, too.
        num_repeats: Copies of what is computed between, of which the mean goes on: with many the middle has the peak.
    """

    def __init__(self, kind: str, num_repeats: int) -> None:
        super().__init__()
        self.embedding, self.kind = nn.Embedding(1500, 128), kind
        if kind != "outside":
            self.weight = self.embedding.weight
            del self.embedding
            self.head = nn.Parameter(torch.randn(1500, 128)) if kind == "beside" else self.weight
        self.blocks = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.num_repeats = num_repeats

    def forward(self, tokens: Tensor) -> Tensor:
        is_outside = self.kind == "outside"
        x = self.embedding(tokens) if is_outside else nn.functional.embedding(tokens, self.weight)
        for block in self.blocks:
            repeated = block(x).repeat(self.num_repeats, 1).tanh()
            x = repeated.view(self.num_repeats, *x.shape).mean(0)
        return nn.functional.linear(x[:4], self.embedding.weight if is_outside else self.head)


@dataclass(frozen=True, slots=True)
class Case:
    make: Any
    batch: Any


CASES = {
    "widths": Case(
        lambda: linears((130, 256, 261, 192, 127, 301)),  # few of which the ranks divide
        lambda: torch.ones(16, 130),
    ),
    "deep": Case(
        lambda: linears((192,) * 11),
        lambda: torch.ones(16, 192),
    ),
    "wide": Case(  # beside which what libraries take is little
        lambda: linears((2048,) * 11),
        lambda: torch.ones(2, 2048),
    ),
    "long": Case(  # which owners step in several rounds; products of square ones take CPUs without bf16 minutes
        lambda: linears((32, 65536) * 5 + (32,)),
        lambda: torch.ones(2, 32),
    ),
    "shorter": Case(  # whose states of 8 bits a CPU steps in a moment
        lambda: linears((16, 65536) * 2 + (16,)),
        lambda: torch.ones(2, 16),
    ),
    "gpt": Case(
        lambda: GPT(layers=5, vocab=256, context=16, width=96),  # wide enough for its weights to count
        lambda: torch.arange(32).view(2, 16),
    ),
    **{
        f"{kind}, {num_repeats}": Case(partial(Ends, kind, num_repeats), lambda: torch.arange(32))
        for kind in ("tied", "beside", "outside")
        for num_repeats in (1, 64)
    },
}


def adamw(params: list[nn.Parameter], foreach: bool) -> list[Optimizer]:
    return [torch.optim.AdamW(params, foreach=foreach)]


def adamw8bit(params: list[nn.Parameter], foreach: bool) -> list[Optimizer]:
    return [AdamW8bit(params)]


def muon_for_matrices(params: list[nn.Parameter], foreach: bool) -> list[Optimizer]:
    matrices, rest = ([p for p in params if (p.ndim == 2) is wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, ns_steps=1), *adamw(rest, foreach)]  # fewer iterations take the same bytes


def loss_of(output: Tensor) -> Tensor:
    return output.square().sum()


def trained_peak(
    name: str,
    plan: str,
    foreach: bool,
    reduce_dtype: torch.dtype | None,
    shape: tuple[int, ...] = (),
    make_optimizers: Callable[[list[nn.Parameter], bool], list[Optimizer]] = adamw,
) -> int:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    mixed = dshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    policy = {} if reduce_dtype is None else {"mp_policy": mixed}
    mesh: Any = init_device_mesh("cpu", shape) if shape else None
    dshard.fully_shard(model, mesh=mesh, plan=Plan.from_json(plan), **policy)
    optimizers = make_optimizers(list(model.parameters()), foreach)

    def step() -> None:
        loss_of(model(case.batch())).backward()
        for each in optimizers:
            each.step()
        model.zero_grad()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "PATIENCE_S", 30.0)  # with peers that count, and so come late
        patch.setattr(memory, "_UNREAD_BYTES", 0)  # which the model leaves out, and is much of these small ones
        for _ in range(2):  # what comes next is known from the second one on
            step()
        with counted_peak(model, *optimizers) as counted:
            step()
            step()
    return counted.num_bytes


def costs(name: str, foreach: bool, reduce_dtype: torch.dtype | None) -> ModelCosts:
    case = CASES[name]
    model = case.make()
    parts = parts_of(model)
    dtype = None if reduce_dtype is None else torch.bfloat16
    traced = trace(model, case.batch(), parts, loss_of=loss_of, dtype=dtype)
    step_bytes = 4 if foreach else 12  # those of the one before are there still
    training = Training(dtype, reduce_dtype, step_bytes_per_element=step_bytes, steps_together=foreach)
    return costs_of(traced, model, training=training, times=[UnitTimes(1.0, 1.0)] * len(parts))


def plans(name: str, num_ranks: int, foreach: bool, reduce_dtype: torch.dtype | None, links: Links) -> dict[str, Plan]:
    """Two mixes of all strategies, and some for all units: each of them where units differ most, elsewhere two."""
    model = costs(name, foreach, reduce_dtype)
    cluster = Cluster(num_ranks, num_ranks, links)
    names = [*SINGLE, *(WITHIN if num_ranks > 2 else ())]
    is_each_alone = name == "widths" and reduce_dtype is None
    given = {text: [text] * len(model.units) for text in (names if is_each_alone else ("zero2", "full"))}
    for step in (1, 3):
        given[f"mix of {step}"] = [names[(1 + step * i) % len(names)] for i in range(len(model.units))]
    return {key: Plan(model, cluster, tuple(map(Strategy.of, choice))) for key, choice in given.items()}


@pytest.mark.parametrize(
    ("name", "num_ranks", "foreach", "reduce_dtype"),
    [
        *((name, num_ranks, True, None) for name in ("widths", "deep", "gpt") for num_ranks in (2, 4)),
        *(("deep", 2, False, None), ("gpt", 2, False, None)),
        *(("widths", 2, True, dtype) for dtype in (torch.float32, torch.bfloat16)),
        *(("gpt", num_ranks, True, torch.float32) for num_ranks in (2, 4)),
    ],
)
def test_the_predicted_peak_is_never_below_what_is_counted_and_hardly_above(
    messaging: WorldPool, name, num_ranks, foreach, reduce_dtype
):
    check(messaging, plans(name, num_ranks, foreach, reduce_dtype, MESSAGES), name, foreach, reduce_dtype)


@pytest.mark.parametrize(
    ("name", "num_ranks", "foreach", "reduce_dtype"),
    [
        *(("widths", num_ranks, True, None) for num_ranks in (2, 4)),
        *(("deep", 4, True, None), ("deep", 2, False, None)),
        *(("widths", 2, True, torch.bfloat16), ("gpt", 2, True, torch.float32)),
    ],
)
def test_through_memory_full_values_count_once_per_host_and_what_is_put_out_until_it_is_read(
    worlds: WorldPool, name, num_ranks, foreach, reduce_dtype
):
    check(worlds, plans(name, num_ranks, foreach, reduce_dtype, MEMORY), name, foreach, reduce_dtype)


@pytest.mark.parametrize("num_repeats", [1, 64])
@pytest.mark.parametrize("kind", ["tied", "beside", "outside"])
def test_weights_used_at_both_ends_of_a_model_have_copies_and_gradients_in_between(
    messaging: WorldPool, kind, num_repeats
):
    name = f"{kind}, {num_repeats}"
    model = costs(name, True, None)
    cluster, num_units = Cluster(2, 2, MESSAGES), len(model.units)
    assert [unit.is_used_throughout for unit in model.units] == [True] + [False] * (num_units - 1)
    given = {text: [text] * num_units for text in ("full", "keep", "zero2", "ddp")}
    given["mix"] = ["full", *["keep", "ddp"] * 2][:num_units]
    check(messaging, {key: Plan(model, cluster, tuple(map(Strategy.of, own))) for key, own in given.items()}, name)


def test_states_of_8_bits_count_as_such(messaging: WorldPool):
    model = CASES["shorter"].make()
    parts = parts_of(model)
    training = Training(state_bytes_per_element=2.05, step_bytes_per_element=0)
    traced = trace(model, CASES["shorter"].batch(), parts, loss_of=loss_of)
    of_model = costs_of(traced, model, training=training, times=[UnitTimes(1.0, 1.0)] * len(parts))
    for text in ("full", "zero2", "ddp"):
        plan = Plan(of_model, Cluster(2, 2, MESSAGES), (Strategy.of(text),) * len(of_model.units))
        counted = max(messaging.run(2, trained_peak, "shorter", plan.to_json(), True, None, (), adamw8bit))
        assert 1 <= plan.peak_bytes / counted <= 1.05, text


MIX = ("full", "ddp", "keep")


@pytest.mark.parametrize(
    ("name", "num_ranks", "links"),
    [
        *((*case, links) for case in (("widths", 2), ("gpt", 2), ("gpt", 4)) for links in (MESSAGES, MEMORY)),
        ("long", 2, MESSAGES),
    ],
)
def test_steps_of_owners_count_with_what_they_keep_and_exchange(
    messaging: WorldPool, worlds: WorldPool, name, num_ranks, links
):
    model = CASES[name].make()
    parts = parts_of(model)
    traced = trace(model, CASES[name].batch(), parts, loss_of=loss_of)
    of_model = costs_of(traced, model, training=Training(whole=WholeSteps()), times=[UnitTimes(1.0, 1.0)] * len(parts))
    pool, cluster, found = messaging if links is MESSAGES else worlds, Cluster(num_ranks, num_ranks, links), {}
    for names in (("full",), ("zero2",), ("ddp",), MIX, *([("hybrid(2)",)] if num_ranks > 2 else [])):
        strategies = tuple(Strategy.of(names[i % len(names)]) for i in range(len(of_model.units)))
        plan = Plan(of_model, cluster, strategies)
        arguments = name, plan.to_json(), True, None, (), muon_for_matrices
        counted = max(pool.run(num_ranks, trained_peak, *arguments, timeout_s=300))  # bf16 takes old CPUs long
        found[names] = plan.peak_bytes / counted
    mixed, by_messages = found.pop(MIX), links is MESSAGES
    # Through memory peers may have read what is put out sooner than they must; on a busy machine, or of a mix, later.
    least, most = (1, 1.05) if by_messages else (0.93, 1.2)
    assert all(least <= ratio <= most for ratio in found.values()), str(found)
    # A mix takes as much as if each of its cuts were the whole model's: too much where that is one round.
    has_several_rounds = name == "long"
    assert least <= mixed <= (most if has_several_rounds else 1.35), mixed


@pytest.mark.parametrize("links", [MESSAGES, MEMORY], ids=["messages", "memory"])
@pytest.mark.parametrize("name", ["widths", "deep", "gpt"])
def test_on_a_mesh_of_two_dims_it_is_so_too(messaging: WorldPool, worlds: WorldPool, name, links):
    model, within = costs(name, True, None), ("hybrid(2)", "hybrid(2, keep)", "hybrid(2, zero1)", "ddp")
    mix = tuple(within[i % len(within)] for i in range(len(model.units)))
    choices = {"mix": mix} | {text: (text,) * len(model.units) for text in within}
    cluster = Cluster(4, 4, links)
    given = {text: Plan(model, cluster, tuple(map(Strategy.of, choice))) for text, choice in choices.items()}
    check(messaging if links is MESSAGES else worlds, given, name, True, None, shape=(2, 2))


def check(
    pool: WorldPool,
    given: dict[str, Plan],
    name: str,
    foreach: bool = True,
    reduce_dtype: torch.dtype | None = None,
    shape: tuple[int, ...] = (),
) -> None:
    """Hold the peaks of some plans against what is counted."""
    found = {}
    for text, plan in given.items():
        arguments = name, plan.to_json(), foreach, reduce_dtype, shape
        counted = max(pool.run(plan.cluster.num_ranks, trained_peak, *arguments))
        found[text] = plan.peak_bytes / counted
    most = {"split(2)": 1.07}  # of what is reckoned with, a backward gathers less since it leaves out unneeded units
    assert all(1 <= ratio <= most.get(text, 1.05) for text, ratio in found.items()), str(found)


def proportional_bytes() -> int:
    """This process's share of all memory that it maps, of which what several map counts once for all of them."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    (line,) = (x for x in Path("/proc/self/smaps_rollup").read_text().splitlines() if x.startswith("Pss:"))
    dist.barrier()
    return 1024 * int(line.split()[1])


def train(model: nn.Module, batch: Tensor, num_steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), foreach=True)
    for _ in range(num_steps):
        loss_of(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


def exchange_messages() -> None:
    """Have groups that are used later do so on one host, too."""
    os.environ["DSHARD_TRANSPORT"] = "messages"


def proportional_after_forward(plan: str) -> int:
    """What a model adds to that by the end of a forward, without what its pool keeps for other uses."""
    case = CASES["wide"]
    train(dshard.fully_shard(linears((8, 8, 8))), torch.ones(2, 8), num_steps=2)  # libraries take memory at first use,
    train(linears((2048, 2048, 2048)), case.batch(), num_steps=1)  # those of products as much as is multiplied
    before = proportional_bytes()
    model = case.make()
    dshard.fully_shard(model, plan=Plan.from_json(plan))
    train(model, case.batch(), num_steps=2)
    loss = loss_of(model(case.batch()))
    model._context().pool.clear()  # type: ignore[operator]
    found = proportional_bytes() - before
    loss.backward()
    return found


@pytest.mark.parametrize("links", [MEMORY, MESSAGES], ids=["memory", "messages"])
def test_what_the_kernel_counts_proportionally_is_what_is_predicted(links):
    model = costs("wide", True, None)
    units = (replace(u, params=tuple(replace(p, state_bytes_per_element=0) for p in u.params)) for u in model.units)
    model = replace(model, units=tuple(units))
    strategies = (Strategy.of("keep"),) * len(model.units)
    plan = Plan(model, Cluster(2, 2, links), strategies)
    *_, last = (each for each in moments(model, strategies, plan.cluster) if each.phase == "forward")
    with World(2) as world:  # of its own: what other calls left would go in between
        if links is MESSAGES:
            world.run(exchange_messages)
        counted = world.run(proportional_after_forward, plan.to_json())
    assert 0.95 <= 2 * last.num_bytes / sum(counted) <= 1.05, str((last.num_bytes, counted))


def plain_peak() -> tuple[int, int, int]:
    model = nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    with counted_peak(model, optimizer) as counted:
        held = counted.alive_bytes()
        x = torch.ones(50, 100)
        del x
        torch.ones(30, 100)
        y = torch.ones(20, 100)
        after = counted.alive_bytes()
        del y
    return held, after, counted.num_bytes


def test_what_is_gone_counts_no_more_and_the_peak_stays():
    assert plain_peak() == (4000, 4000 + 8000, 4000 + 20000)


def pooled() -> list[int]:
    """Bytes that are counted while a buffer is out, once it is back, and with two of them out."""
    model = nn.Linear(8, 8, bias=False)
    dshard.fully_shard(model)
    pool: BufferPool = model._context().pool  # type: ignore[operator]
    with counted_peak(model) as counted:
        start = counted.alive_bytes()
        first, cpu = pool.take(1000, torch.device("cpu")), torch.device("cpu")
        out = counted.alive_bytes() - start
        pool.give(first)
        back = counted.alive_bytes() - start
        again, other = pool.take(1000, cpu), pool.take(1 << 20, cpu)
        both = counted.alive_bytes() - start
        assert counted.num_bytes - start == both
        del again, other
    return [out, back, both]


def test_buffers_count_while_they_are_out_and_not_while_a_pool_keeps_them(worlds: WorldPool):
    assert worlds.run(2, pooled) == [[1000, 0, 1000 + (1 << 20)]] * 2
