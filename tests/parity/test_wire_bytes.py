"""What goes over the wire in a step is what the formulas say, to the byte.

`P` is the bytes of the parameters and `N` the number of ranks. A gather or a reduce-scatter sends `(N - 1) / N * P`
per rank, so `(N - 1) * P` over all ranks: a step sends three times that with resharding, twice without.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dshard
from benchmarks.memory import gathered_peak
from dshard.testing import WorldPool
from dshard.testing.strategies import world_sizes
from tests.models import CONTEXT, GPT, VOCAB
from tests.parity.models import CASES, batch, build, shard

MIN_DIRECT_BYTES = 1 << 16  # of a tensor whose shards travel alone
MAX_HEADER_BYTES = 64  # ahead of every rank's part of a gather, to check that all ranks mean the same unit

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Wire:
    """What one rank sent: bytes and calls by collective, and (kind, label) of every call in order."""

    payload: dict[str, int]
    padding: dict[str, int]
    header: dict[str, int]
    calls: list[tuple[str, str]]

    @classmethod
    def of(cls, trace: dshard.CommTrace) -> "Wire":
        def by_kind(field: str) -> dict[str, int]:
            out: dict[str, int] = {}
            for r in trace.records:
                out[r.kind] = out.get(r.kind, 0) + getattr(r, field)
            return out

        calls = [(r.kind, r.label) for r in trace.records]
        return cls(by_kind("payload_bytes"), by_kind("padding_bytes"), by_kind("header_bytes"), calls)


def payload(wires: list[Wire], kind: str | None = None) -> int:
    """Payload bytes that all ranks sent."""
    return sum(sum(w.payload.values()) if kind is None else w.payload.get(kind, 0) for w in wires)


def num_calls(wires: list[Wire], kind: str | None = None, label: str | None = None) -> int:
    """Collectives, which must be the same on all ranks."""
    assert all(w.calls == wires[0].calls for w in wires)
    return sum(kind in (None, k) and label in (None, name) for k, name in wires[0].calls)


def numel(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def segment(shapes: Shapes, num_ranks: int) -> int:
    """Elements of one rank's part of a bucket, cut along dim 0: the largest shard of each tensor, 0-d ones whole."""
    return sum(math.prod((-(-s[0] // num_ranks), *s[1:])) if s else 1 for s in shapes)


def gather_padding(shapes: Shapes, num_ranks: int, item: int = 4) -> int:
    """Bytes beyond the real ones that all ranks send in a gather: large shards travel alone and have none."""
    packed = [shape for shape in shapes if not shape or math.prod(shape) * item < MIN_DIRECT_BYTES]
    return (num_ranks - 1) * item * (num_ranks * segment(packed, num_ranks) - numel(packed))


def reduce_padding(shapes: Shapes, num_ranks: int, item: int = 4) -> int:
    """Bytes beyond the real ones that all ranks send in a reduce-scatter."""
    return (num_ranks - 1) * item * (num_ranks * segment(shapes, num_ranks) - numel(shapes))


def reduce_header(shapes: Shapes, num_ranks: int, item: int = 4) -> int:
    """Bytes of the header and the flags ahead of the gradients, which all ranks send."""
    return num_ranks * (num_ranks - 1) * (MAX_HEADER_BYTES + math.ceil(len(shapes) / 16) * 16 * item)


class Layered(nn.Module):
    """Linear layers of any widths, and a 0-d scale that stays with the root."""

    def __init__(self, widths: Sequence[int], *, double: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(widths)])
        self.scale = nn.Parameter(torch.tensor(2.0))
        if double:
            self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x * self.scale


def shard_layers(model: Layered, *, reshard: bool | None, sizes: Sequence[int] | None = None) -> None:
    """Units of `sizes` layers each, by default of one, and the root."""
    layers = iter(model.layers)
    for size in sizes if sizes is not None else [1] * len(model.layers):
        dshard.fully_shard([next(layers) for _ in range(size)], reshard_after_forward=reshard)
    dshard.fully_shard(model, reshard_after_forward=reshard)


@dataclass(frozen=True, slots=True)
class Stack:
    """A `Layered` model and its units.

    Args:
        widths: Of its layers.
        sizes: Layers per unit; they add up to all layers.
        leaf_input: Whether the input takes a gradient.
        double: float64 rather than float32.
    """

    widths: list[int]
    sizes: list[int]
    leaf_input: bool
    double: bool


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    widths = draw(st.lists(st.integers(1, 9), min_size=2, max_size=6))
    sizes = [draw(st.integers(1, len(widths) - 1))]
    while sum(sizes) < len(widths) - 1:
        sizes.append(draw(st.integers(1, len(widths) - 1 - sum(sizes))))
    return Stack(widths, sizes, draw(st.booleans()), draw(st.booleans()))


def step_layered(stack: Stack, reshard: bool) -> Wire:
    """One AdamW step, after one that is not counted."""
    torch.manual_seed(0)
    model = Layered(stack.widths, double=stack.double)
    shard_layers(model, reshard=reshard, sizes=stack.sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    dtype = torch.float64 if stack.double else torch.float32
    for _ in range(2):
        x = torch.ones(3, stack.widths[0], dtype=dtype, requires_grad=stack.leaf_input)
        with dshard.CommTrace() as trace:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    return Wire.of(trace)


# Found: a unit of two modules was gathered twice in backward.
@settings(max_examples=25)
@given(num_ranks=world_sizes(), stack=stacks(), reshard=st.booleans())
def test_a_step_sends_3_p_with_resharding_and_2_p_without_and_padding_apart(
    worlds: WorldPool, num_ranks, stack, reshard
):
    wires = worlds.run(num_ranks, step_layered, stack, reshard)
    if num_ranks == 1:
        assert wires[0].payload == {}
        return
    item, n = 8 if stack.double else 4, num_ranks - 1
    layers = iter([(b, a), (b,)] for a, b in pairwise(stack.widths))
    units = [[shape for _ in range(size) for shape in next(layers)] for size in stack.sizes] + [[()]]
    # Backward touches no weight of a first layer whose input takes no gradient: alone in a unit, it is gathered once.
    again = units if stack.leaf_input or stack.sizes[0] > 1 else units[1:]
    gathered = units + (again if reshard else [])
    total = item * sum(numel(u) for u in units)
    assert payload(wires, "all_gather") == n * item * sum(numel(u) for u in gathered)
    assert payload(wires, "reduce_scatter") == n * total
    if again is units:
        assert payload(wires) == (3 if reshard else 2) * n * total
    assert sum(w.padding["all_gather"] for w in wires) == sum(gather_padding(u, num_ranks, item) for u in gathered)
    assert sum(w.padding["reduce_scatter"] for w in wires) == sum(reduce_padding(u, num_ranks, item) for u in units)
    per_message = sum(w.header["all_gather"] for w in wires) / (num_ranks * n * len(gathered))
    assert 0 < per_message <= MAX_HEADER_BYTES  # whatever the sizes
    assert sum(w.header["reduce_scatter"] for w in wires) == sum(reduce_header(u, num_ranks, item) for u in units)
    assert num_calls(wires, "all_gather") == len(gathered)
    assert num_calls(wires, "reduce_scatter") == len(units)
    assert num_calls(wires) == len(gathered) + len(units)


def step_case(name: str, manual: bool, reshard: bool | None) -> tuple[Wire, dict[str, Any]]:
    """One step of a model, and what its units hold: shapes of the parameters by label."""
    model = build(name)
    shard(name, model, manual=manual, reshard=reshard)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        inputs, targets = batch(name, 0, step, dist.get_rank())
        with dshard.CommTrace() as trace:
            CASES[name].loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    units = {
        u.label: [tuple(p.shape) for p in u.params] for m in model.modules() for u in vars(m).get("_dshard_units", ())
    }
    return Wire.of(trace), units


# Found: a unit of two modules was gathered twice in backward.
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_gpt_sends_the_formula_but_for_embeddings_whose_backward_touches_no_weight(
    worlds: WorldPool, num_ranks, reshard
):
    results = worlds.run(num_ranks, step_case, "gpt", True, reshard)
    wires, units = [w for w, _ in results], results[0][1]
    everything = 4 * sum(numel(shapes) for shapes in units.values())
    # The unit 'tokens', and the root's, which keeps the positions: a lookup's backward needs no weight.
    lookups = 4 * (VOCAB + CONTEXT) * 16
    assert everything == 4 * sum(p.numel() for p in build("gpt").parameters())
    assert payload(wires) == (num_ranks - 1) * ((3 * everything - lookups) if reshard else 2 * everything)
    for label in units:
        times = 2 if reshard and label not in ("tokens", "GPT") else 1
        assert num_calls(wires, "all_gather", label) == times, label
        assert num_calls(wires, "reduce_scatter", label) == 1, label
    assert num_calls(wires, "all_reduce") == 0
    padding = sum(
        gather_padding(shapes, num_ranks) * (2 if reshard and label not in ("tokens", "GPT") else 1)
        + reduce_padding(shapes, num_ranks)
        for label, shapes in units.items()
    )
    assert sum(sum(w.padding.values()) for w in wires) == padding


@pytest.mark.parametrize("name", ["conv", "lstm", "tied", "uneven"])
@pytest.mark.parametrize("manual", [True, False])
def test_each_unit_is_gathered_once_per_phase_and_reduced_once(worlds: WorldPool, name, manual):
    results = worlds.run(2, step_case, name, manual, True)
    wires, units = [w for w, _ in results], {k: v for k, v in results[0][1].items() if v}
    for label in units:
        assert num_calls(wires, "all_gather", label) in (1, 2), label
        assert num_calls(wires, "reduce_scatter", label) == 1, label
    assert {label for _, label in wires[0].calls} == set(units)
    kinds = [kind for kind, _ in wires[0].calls]
    assert kinds[: len(units)] == ["all_gather"] * len(units)  # all of the forward, ahead of all of the backward


def chunked_loss(num_chunks: int, checkpointed: bool) -> tuple[Wire, Wire]:
    torch.manual_seed(0)
    model = GPT()
    for block in model.blocks:
        dshard.fully_shard(block)
    dshard.fully_shard(model.head)
    dshard.fully_shard(model)
    ids = torch.arange(4 * CONTEXT).view(4, CONTEXT) % VOCAB

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(hidden @ model.head.weight.t(), targets, reduction="sum")

    with dshard.CommTrace() as forward:
        hidden = model.hidden(ids).flatten(0, 1)
        loss = hidden.new_zeros(())
        for h, t in zip(hidden.chunk(num_chunks), ids.flatten().chunk(num_chunks), strict=True):
            loss = loss + (
                torch.utils.checkpoint.checkpoint(part, h, t, use_reentrant=False) if checkpointed else part(h, t)
            )
    with dshard.CommTrace() as backward:
        loss.backward()
    return Wire.of(forward), Wire.of(backward)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_loss_that_uses_the_head_16_times_costs_one_gather(worlds: WorldPool, checkpointed):
    results = worlds.run(2, chunked_loss, 16, checkpointed)
    forward, backward = [f for f, _ in results], [b for _, b in results]
    assert num_calls(forward, "all_gather", "head") == 1
    # Backward begins with what the loss touched last, which is still gathered.
    assert num_calls(backward, "all_gather", "head") == 0
    assert num_calls(backward, "reduce_scatter", "head") == 1


def accumulate(num_micro: int, sync_all: bool, keep_grad: bool) -> list[Wire]:
    torch.manual_seed(0)
    model = Layered([6, 5, 4])
    shard_layers(model, reshard=True)
    wires = []
    x = torch.ones(3, 6, requires_grad=True)
    if keep_grad:
        model(x).sum().backward()
    for micro in range(num_micro):
        model.set_requires_gradient_sync(sync_all or micro == num_micro - 1)
        with dshard.CommTrace() as trace:
            model(x).sum().backward()
        wires.append(Wire.of(trace))
    return wires


P_LAYERED = 4 * (6 * 5 + 5 + 5 * 4 + 4 + 1)


# Found: the last backward, with sync on again, reduced every unit twice.
@pytest.mark.parametrize("keep_grad", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_micro_batches_without_gradient_sync_send_no_gradients_and_the_last_sends_them_once(
    worlds: WorldPool, num_ranks, keep_grad
):
    results = worlds.run(num_ranks, accumulate, 4, False, keep_grad)
    for micro in range(4):
        wires = [r[micro] for r in results]
        assert payload(wires, "all_gather") == 2 * (num_ranks - 1) * P_LAYERED
        assert num_calls(wires, "reduce_scatter") == (3 if micro == 3 else 0)
        assert payload(wires, "reduce_scatter") == ((num_ranks - 1) * P_LAYERED if micro == 3 else 0)


def test_micro_batches_with_gradient_sync_send_gradients_each_time(worlds: WorldPool):
    results = worlds.run(2, accumulate, 3, True, False)
    for micro in range(3):
        wires = [r[micro] for r in results]
        assert payload(wires) == 3 * P_LAYERED
        assert num_calls(wires, "reduce_scatter") == 3


def inference(how: str, num_calls_made: int, reshard: bool | None) -> Wire:
    model = Layered([6, 5, 4])
    shard_layers(model, reshard=reshard)
    x = torch.ones(3, 6)
    with torch.no_grad(), dshard.CommTrace() as trace:
        if how == "pinned":
            with dshard.gathered(model):
                for _ in range(num_calls_made):
                    model(x)
        else:
            model.eval()
            for _ in range(num_calls_made):
                model(x)
    kept = [unit.is_gathered for m in model.modules() for unit in vars(m).get("_dshard_units", ())]
    assert (all if reshard is False else any)(kept) == (reshard is False)
    return Wire.of(trace)


@pytest.mark.parametrize("reshard", [True, False, None])
def test_an_eval_forward_sends_each_weight_once_and_keeps_nothing_that_is_resharded(messaging: WorldPool, reshard):
    wires = messaging.run(3, inference, "eval", 1, reshard)
    assert payload(wires) == 2 * P_LAYERED
    assert num_calls(wires) == num_calls(wires, "all_gather") == 3


def test_a_loop_of_forwards_sends_each_weight_once_per_forward(messaging: WorldPool):
    wires = messaging.run(2, inference, "eval", 5, True)
    assert payload(wires) == 5 * P_LAYERED
    assert num_calls(wires) == 15


def test_a_loop_of_forwards_inside_gathered_sends_each_weight_once(worlds: WorldPool):
    wires = worlds.run(2, inference, "pinned", 5, True)
    assert payload(wires, "all_gather") == P_LAYERED
    assert num_calls(wires) == 3 + 1  # the check of the arguments of gathered


class Sampler(GPT):
    def generate(self, ids: Tensor, num_new: int) -> Tensor:
        """Not `forward`, and not through `self(...)`: blocks and weights are used directly."""
        for _ in range(num_new):
            hidden = self.hidden(ids[:, -CONTEXT:])
            scores = hidden[:, -1] @ self.head.weight.t()
            ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], dim=1)
        return ids


def generate(num_new: int) -> tuple[Tensor, Wire]:
    torch.manual_seed(0)
    model = Sampler()
    for block in model.blocks:
        dshard.fully_shard(block)
    dshard.fully_shard(model.head)
    dshard.fully_shard(model)
    with torch.no_grad(), dshard.CommTrace() as trace:
        out = model.generate(torch.zeros(1, 1, dtype=torch.int64), num_new)
    return out, Wire.of(trace)


def test_a_generate_method_gathers_each_block_once_per_token_and_gives_the_plain_models_text(messaging: WorldPool):
    results = messaging.run(2, generate, 6)
    torch.manual_seed(0)
    expected = Sampler().generate(torch.zeros(1, 1, dtype=torch.int64), 6)
    assert all(torch.equal(out, expected) for out, _ in results)
    wires = [w for _, w in results]
    for label in ("blocks.0", "blocks.1", "head"):
        assert num_calls(wires, "all_gather", label) == 6
    assert num_calls(wires) == num_calls(wires, "all_gather")


def frozen(which: str, leaf_input: bool) -> Wire:
    torch.manual_seed(0)
    model = Layered([6, 5, 4])
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(which))
    shard_layers(model, reshard=True)
    x = torch.ones(3, 6, requires_grad=leaf_input)
    for _ in range(2):  # the first backward learns of which units no rank needs a weight
        with dshard.CommTrace() as trace:
            model(x).sum().backward()
    assert all((p.grad is None) == name.startswith(which) for name, p in model.named_parameters())
    return Wire.of(trace)


@pytest.mark.parametrize(
    ("which", "leaf_input", "gathers"),
    [
        ("layers.0", False, {"layers.0": 1, "layers.1": 1}),  # no gradient is passed on below the second layer
        ("layers.0", True, {"layers.0": 2, "layers.1": 2}),
        ("layers.1", False, {"layers.0": 1, "layers.1": 2}),  # a gradient passes through it
        ("layers.0.bias", True, {"layers.0": 2, "layers.1": 2}),
    ],
)
def test_frozen_parameters_send_no_gradients(worlds: WorldPool, which, leaf_input, gathers):
    wires = worlds.run(2, frozen, which, leaf_input)
    sizes = {"layers.0.weight": 30, "layers.0.bias": 5, "layers.1.weight": 20, "layers.1.bias": 4, "scale": 1}
    trained = sum(size for name, size in sizes.items() if not name.startswith(which))
    assert payload(wires, "reduce_scatter") == 4 * trained
    assert num_calls(wires, "reduce_scatter", which) == 0
    for label, count in gathers.items():
        assert num_calls(wires, "all_gather", label) == count, label


def optimizer_step(make: Callable[[Any], torch.optim.Optimizer], clip: str) -> Wire:
    model = Layered([6, 5, 4])
    torch.manual_seed(0)
    shard_layers(model, reshard=True)
    optimizer = make(model.parameters())
    model(torch.ones(3, 6)).sum().backward()
    _ = [p.grad.to_local() for p in model.parameters()]
    with dshard.CommTrace() as trace:
        if clip == "dshard":
            dshard.clip_grad_norm_(model.parameters(), 0.1)
        elif clip == "torch":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return Wire.of(trace)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_an_optimizer_step_sends_nothing(worlds: WorldPool, make):
    assert num_calls(worlds.run(2, optimizer_step, make, "")) == 0


# dshard's own adds up on each rank first; torch's asks for the norm of each gradient, of which the 0-d scale is whole.
@pytest.mark.parametrize(("clip", "num_bytes"), [("dshard", 8), ("torch", 4 * 4)])
def test_clipping_is_one_small_call_whatever_the_number_of_gradients(worlds: WorldPool, clip, num_bytes):
    wires = worlds.run(2, optimizer_step, torch.optim.AdamW, clip)
    assert num_calls(wires) == num_calls(wires, "all_reduce") == 1
    assert all(w.payload["all_reduce"] == num_bytes for w in wires)


def root_alone(reshard: bool | None) -> tuple[list[str], int]:
    """What a step gathers, and the most bytes that are gathered at one time."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    dshard.fully_shard(model, reshard_after_forward=reshard)
    for _ in range(3):
        with gathered_peak() as peak, dshard.CommTrace() as trace:
            model(torch.ones(2, 64)).sum().backward()
    return [r.label for r in trace.select("all_gather")], peak.num_bytes


def test_on_the_root_alone_what_the_backward_begins_with_stays_and_the_peak_is_the_same(worlds: WorldPool):
    forward, backward = ["0", "1", "2", "3"], ["3", "2", "1"]  # the first one's weight takes part in no gradient
    kept, freed = (worlds.run(2, root_alone, reshard)[0] for reshard in (None, True))
    assert freed[0] == forward + backward
    assert kept[0] == forward + backward[1:]
    assert kept[1] == freed[1]
