"""Weights that are gathered, used and reduced in slices: what they compute, what they hold, and what they send."""

import copy
import pickle
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dshard
from benchmarks.memory import gathered_peak
from dshard.collectives import Buffer, BufferPool, memory
from dshard.collectives.host.arena import Arena
from dshard.slices import set_slices
from dshard.testing import WorldPool, expect_error
from tests.collectives.test_native_backends import native
from tests.parity.test_memory import Allocations

# --- one layer, against the plain one --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A layer and what it is given; a layer with an input of integers is an embedding."""

    kind: str
    sizes: tuple[int, int]
    lead: tuple[int, ...]
    num_slices: int
    options: dict[str, Any] = field(default_factory=dict)
    is_frozen: bool = False
    takes_grad: bool = True
    is_native: bool = False

    def layer(self) -> Any:
        torch.manual_seed(sum(self.sizes))
        make = nn.Linear if self.kind == "linear" else nn.Embedding
        layer = make(*self.sizes, **self.options, dtype=torch.float64)
        layer.weight.requires_grad_(not self.is_frozen)
        return layer

    def given_to(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        if self.kind == "embedding":
            return torch.randint(0, self.sizes[0], self.lead, generator=generator)
        x = torch.randn(*self.lead, self.sizes[0], dtype=torch.float64, generator=generator)
        return x.requires_grad_(self.takes_grad)


def loss_of(out: Tensor, rank: int) -> Tensor:
    return (out * (1 + rank + torch.arange(out.numel(), dtype=out.dtype).view(out.shape))).sum()


def run_layer(case: Case) -> list[Tensor | None]:
    """Result, and gradients of the input and parameters, of a layer whose weight is sliced."""
    with native() if case.is_native else nullcontext():
        layer = dshard.fully_shard(case.layer())
    set_slices([layer], {layer.weight: case.num_slices})
    assert layer.weight.gather_source.settings.num_slices == case.num_slices
    x = case.given_to(dist.get_rank())
    out = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), out)
    if out.requires_grad:
        loss_of(out, dist.get_rank()).backward()
    return [out.detach(), x.grad, *[None if p.grad is None else p.grad.full_tensor() for p in layer.parameters()]]


def plain_layer(case: Case, num_ranks: int) -> list[list[Tensor | None]]:
    """The same of the plain layer, for each rank, on the data of all ranks."""
    layer, found = case.layer(), []
    for rank in range(num_ranks):
        x = case.given_to(rank)
        out = layer(x)
        if out.requires_grad:
            loss_of(out, rank).backward()
        found.append([out.detach(), x.grad])
    means = [None if p.grad is None else p.grad / num_ranks for p in layer.parameters()]
    return [[*own, *means] for own in found]


def check_layer(worlds: WorldPool, num_ranks: int, case: Case) -> None:
    for found, wanted in zip(worlds.run(num_ranks, run_layer, case), plain_layer(case, num_ranks), strict=True):
        for got, want in zip(found, wanted, strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


LEADS = st.lists(st.integers(1, 3), max_size=3).map(tuple)
RANKS = st.integers(1, 3)


@pytest.mark.parametrize("bias", [False, True])
@given(
    RANKS,
    st.builds(
        Case,
        st.just("linear"),
        st.tuples(st.integers(1, 5), st.integers(1, 13)),
        LEADS,
        st.integers(2, 6),
        is_frozen=st.booleans(),
        takes_grad=st.booleans(),
        is_native=st.booleans(),
    ),
)
def test_a_linear_layer_in_slices_is_the_plain_layer(worlds: WorldPool, bias, num_ranks, case):
    check_layer(worlds, num_ranks, replace(case, options={"bias": bias}))


@pytest.mark.parametrize("padding_idx", [None, 0, -1])
@given(
    RANKS,
    st.builds(
        Case,
        st.just("embedding"),
        st.tuples(st.integers(1, 13), st.integers(1, 5)),
        LEADS,
        st.integers(2, 6),
        st.fixed_dictionaries({"scale_grad_by_freq": st.booleans()}),
        is_frozen=st.sampled_from([False, False, True]),
        is_native=st.booleans(),
    ),
)
@settings(max_examples=15)
def test_an_embedding_in_slices_is_the_plain_one(worlds: WorldPool, padding_idx, num_ranks, case):
    check_layer(worlds, num_ranks, replace(case, options={**case.options, "padding_idx": padding_idx}))


@pytest.mark.parametrize("lead", [(0,), (2, 0)])
@pytest.mark.parametrize(("kind", "sizes"), [("linear", (3, 5)), ("embedding", (5, 3))])
def test_nothing_may_be_given_to_a_layer_in_slices(worlds: WorldPool, kind, sizes, lead):
    check_layer(worlds, 2, Case(kind, sizes, lead, 2))


@pytest.mark.parametrize("is_native", [False, True])
def test_large_slices_that_travel_without_packing_are_right(worlds: WorldPool, is_native):
    check_layer(worlds, 3, Case("linear", (64, 1025), (2,), 3, is_native=is_native))
    check_layer(worlds, 3, Case("embedding", (1025, 64), (7,), 3, is_native=is_native))


# --- a model that trains ---------------------------------------------------------------------------------------------


class LM(nn.Module):
    """An embedding, a layer, and a head that may be tied."""

    def __init__(self, *, vocab: int = 11, width: int = 6, tied: bool = False, remats: bool | None = None) -> None:
        super().__init__()
        self.embed, self.mid = nn.Embedding(vocab, width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)
        self.remats = remats
        if tied:
            self.head.weight = self.embed.weight

    def inner(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.mid(x)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.inner(x) if self.remats is None else checkpoint(self.inner, x, use_reentrant=self.remats)
        return self.head(x)


def build(num_slices: int = 1, *, dtype: torch.dtype = torch.float32, shards: bool = True, **options: Any) -> Any:
    """A model whose large weights are sliced; plain, or with one slice, for comparison."""
    torch.manual_seed(0)
    own = {key: options.pop(key) for key in ("tied", "remats", "vocab", "width") if key in options}
    model = LM(**own).to(dtype)
    if num_slices > 1:
        within = f"{num_slices}, hybrid({options.pop('within')})" if "within" in options else num_slices
        options["strategy"] = {"*.weight": f"split({within})"}  # that of the norm has one dim, and stays whole
    elif "within" in options:
        options["strategy"] = {"*.weight": f"hybrid({options.pop('within')})"}
    return dshard.fully_shard(model, **options) if shards else model


def ids_of(step: int, rank: int) -> Tensor:
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def model_loss(model: Any, step: int, rank: int) -> Tensor:
    ids = ids_of(step, rank)
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train(num_slices: int, *, shape: tuple[int, int] | None = None, accumulates: bool = False, **options: Any) -> Any:
    """Weights after five AdamW steps with clipped gradients, two micro-batches each."""
    if shape is not None:
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model: Any = build(num_slices, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        for micro in range(2):
            if accumulates:
                model.set_requires_gradient_sync(micro == 1)
            model_loss(model, 2 * step + micro, dist.get_rank()).backward()
        dshard.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def plain_weights(num_ranks: int, *, adds: bool = False, **options: Any) -> dict[str, Tensor]:
    """The same in one process on the data of all ranks."""
    model = build(shards=False, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        for micro in range(2):
            total = sum(model_loss(model, 2 * step + micro, rank) for rank in range(num_ranks))
            (total if adds else total / num_ranks).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def train_natively(*args: Any, **options: Any) -> Any:
    with native():
        return train(*args, **options)


def run_with(fn: Any, options: dict[str, Any], num_slices: int) -> Any:
    return fn(num_slices, **options)


TRAININGS: list[tuple[Any, int, dict[str, Any]]] = [
    (train, 1, {}),
    (train, 2, {"tied": True}),
    (train, 3, {"accumulates": True}),
    (train, 2, {"remats": False}),
    (train, 2, {"remats": True}),
    (train, 2, {"grad_reduce": "sum"}),
    (train, 2, {"grad_reduce": "sum", "tied": True}),
    (train, 4, {"shape": (2, 2), "tied": True}),
    (train, 4, {"within": 2}),
    (train, 2, {"shape": (2, 1)}),
    (train_natively, 2, {"tied": True}),
    (train_natively, 4, {"shape": (2, 2)}),
]


@pytest.mark.parametrize(("fn", "num_ranks", "options"), TRAININGS)
def test_five_steps_are_those_of_one_process_and_of_whole_weights(worlds: WorldPool, fn, num_ranks, options):
    kept = {key: options[key] for key in ("tied",) if key in options}
    want = plain_weights(num_ranks, adds=options.get("grad_reduce") == "sum", **kept)
    whole = worlds.run(num_ranks, run_with, fn, options, 1)[0]
    for num_slices in (2, 5):
        for found in worlds.run(num_ranks, run_with, fn, options, num_slices):
            for name, value in want.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
                torch.testing.assert_close(found[name], whole[name], rtol=0, atol=1e-5)


# --- precision -------------------------------------------------------------------------------------------------------


def gradients(num_slices: int, how: str) -> tuple[list[Tensor], int]:
    """Result and gradients under mixed precision or autocast; bytes that were sent in gathers of the forward."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = build(num_slices, **({"mp_policy": policy} if how == "policy" else {}))
    casts: AbstractContextManager[Any] = torch.autocast("cpu", torch.bfloat16) if how == "autocast" else nullcontext()
    with dshard.CommTrace() as trace, casts:
        out = model(ids_of(0, dist.get_rank()))
    out.float().pow(2).sum().backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    return [out.detach(), *grads], sum(r.payload_bytes for r in trace.select("all_gather"))


@pytest.mark.parametrize("how", ["policy", "autocast"])
def test_slices_travel_and_compute_in_the_compute_dtype(worlds: WorldPool, how):
    pairs = zip(worlds.run(2, gradients, 1, how), worlds.run(2, gradients, 3, how), strict=True)
    for (whole, whole_bytes), (found, num_bytes) in pairs:
        assert found[0].dtype == whole[0].dtype == torch.bfloat16
        torch.testing.assert_close(found[0], whole[0], rtol=2e-2, atol=2e-2)
        for got, want in zip(found[1:], whole[1:], strict=True):
            assert got.dtype == want.dtype == torch.float32
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())
        if how == "policy":
            assert num_bytes == whole_bytes


def frozen_gradients(num_slices: int, remats: bool | None) -> list[Tensor]:
    """Gradients beside a layer whose weight takes none, under mixed precision."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model: Any = LM(remats=remats)
    model.mid.weight.requires_grad_(False)
    dshard.fully_shard(model, strategy={"mid.weight": f"split({num_slices})"}, mp_policy=policy)
    model(ids_of(0, dist.get_rank())).float().pow(2).sum().backward()
    return [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("remats", [False, True])
def test_a_frozen_weight_in_slices_is_recomputed_in_the_dtype_that_it_had(worlds: WorldPool, remats):
    """A checkpoint kept the weight itself, and asked it for its dtype when the recomputation was over."""
    for found, want in zip(*(worlds.run(2, frozen_gradients, 3, r) for r in (remats, None)), strict=True):
        assert len(found) == 6
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


# --- memory ----------------------------------------------------------------------------------------------------------

WIDTH, VOCAB, TOKENS = 64, 4096, 2
WEIGHT_BYTES = 4 * WIDTH * VOCAB
SLACK = 4 * 4 * TOKENS * VOCAB  # results and their gradients


class Fresh(Allocations):
    """Storages that were made under it, without those that are there already."""

    def __init__(self, known: Tensor) -> None:
        super().__init__([])
        self.known = known.untyped_storage()._cdata

    def note(self, tensor: Any) -> None:
        super().note(tensor)
        self.alive.pop(self.known, None)


@contextmanager
def counting(known: Tensor) -> Iterator[Allocations]:
    """Every byte that is made: by torch, also below operations on sharded tensors, and by pools, which keep none."""
    fresh, trim, mode = memory._fresh, BufferPool._trim, Fresh(known)

    def noted(num_bytes: int, device: torch.device, arena: Arena | None = None) -> Buffer:
        buffer = fresh(num_bytes, device, arena)
        mode.note(buffer.memory)
        mode.alive = {key: entry for key, entry in mode.alive.items() if not entry[0].expired()}
        mode.peak_bytes = max(mode.peak_bytes, sum(size for _, size in mode.alive.values()))
        return buffer

    memory._fresh = noted
    BufferPool._trim = lambda self, *_: self.clear()  # type: ignore[method-assign]
    try:
        with mode:
            yield mode
    finally:
        memory._fresh = fresh
        BufferPool._trim = trim  # type: ignore[method-assign]


def peaks(kind: str, num_slices: int) -> tuple[int, int, int]:
    """The most bytes that were alive in a forward and a backward of one layer; and what `gathered_peak` says."""
    layer: Any
    layer, x = nn.Linear(WIDTH, VOCAB, bias=False), torch.ones(TOKENS, WIDTH, requires_grad=True)
    if kind == "embedding":
        layer, x = nn.Embedding(VOCAB, WIDTH), torch.arange(TOKENS)
    dshard.fully_shard(layer)
    if num_slices > 1:
        set_slices([layer], {layer.weight: num_slices})
    with gathered_peak() as counted:
        with counting(layer.weight.to_local()) as forward:
            out = layer(x)
        layer.reshard()
        with counting(layer.weight.to_local()) as backward:
            out.backward(torch.ones(1).expand_as(out))
    assert layer._context().gathered_bytes == 0
    return forward.peak_bytes, backward.peak_bytes, counted.num_bytes


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_a_layer_holds_two_slices_of_its_weight_and_three_of_its_gradient(messaging: WorldPool, kind):
    shard = WEIGHT_BYTES // 2
    for forward, backward, counted in messaging.run(2, peaks, kind, 1):  # so that the bounds below say something
        assert forward >= WEIGHT_BYTES
        assert backward >= 2 * WEIGHT_BYTES
        assert counted == WEIGHT_BYTES
    for num_slices in (4, 16):
        part = WEIGHT_BYTES // num_slices
        for forward, backward, counted in messaging.run(2, peaks, kind, num_slices):
            assert 2 * part <= forward <= 2 * part + SLACK
            assert backward <= 3 * part + shard + SLACK
            assert counted == 2 * part


# --- what is sent, and when ------------------------------------------------------------------------------------------


def sent(num_slices: int, vocab: int) -> tuple[dict[str, int], list[int], set[int]]:
    """Bytes of slices, their number, and the sizes of those of the head that this rank gathered."""
    model: Any = build(num_slices, vocab=vocab)
    with dshard.CommTrace() as trace:
        F.cross_entropy(model(torch.arange(5)), torch.arange(5)).backward()
    found = {kind: [r for r in trace.select(kind) if " slice " in r.label] for kind in ("all_gather", "reduce_scatter")}
    of_head = {r.payload_bytes for r in found["all_gather"] if r.label.startswith("head")}
    return {k: sum(r.payload_bytes for r in rs) for k, rs in found.items()}, list(map(len, found.values())), of_head


@pytest.mark.parametrize(("vocab", "num_ranks"), [(12, 2), (13, 3)])
def test_all_slices_together_send_the_bytes_of_the_whole_weight(worlds: WorldPool, vocab, num_ranks):
    embed, mid, head = 4 * 6 * vocab, 4 * 6 * 6, 4 * 6 * vocab
    total = {"all_gather": 0, "reduce_scatter": 0}
    for num_bytes, calls, of_head in worlds.run(num_ranks, sent, 2, vocab):
        total = {kind: total[kind] + num_bytes[kind] for kind in total}
        assert calls == [2 * (3 + 2), 2 * 3]  # the backward of an embedding gathers nothing
        assert vocab == 13 or len(of_head) == 1  # a rank sends as much in every slice
    assert total["reduce_scatter"] == (num_ranks - 1) * (embed + mid + head)
    assert total["all_gather"] == (num_ranks - 1) * (embed + 2 * mid + 2 * head)


class Under(TorchDispatchMode):
    """How many collectives had started, per kind, whenever a product was computed."""

    def __init__(self, trace: dshard.CommTrace) -> None:
        super().__init__()
        self.trace, self.seen = trace, []  # type: ignore[var-annotated]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            self.seen.append((self.trace.calls("all_gather"), self.trace.calls("reduce_scatter")))
        return func(*args, **(kwargs or {}))


def started() -> list[tuple[int, int]]:
    layer: Any = dshard.fully_shard(nn.Linear(4, 12, bias=False))
    set_slices([layer], {layer.weight: 3})
    x = torch.ones(2, 4, requires_grad=True)
    with dshard.CommTrace() as trace, Under(trace) as under:
        layer(x).sum().backward()
    return under.seen


def test_the_next_slice_is_in_flight_while_one_computes_and_the_last_gradient_is_not_waited_for(worlds: WorldPool):
    forward, values, weights = [(2, 0), (3, 0), (3, 0)], [(5, 0), (6, 0), (6, 0)], [(6, 0), (6, 1), (6, 2)]
    assert worlds.run(2, started) == [[*forward, *values, *weights]] * 2


def started_when_the_order_is_known(change: str) -> list[Any]:
    """Of the forward of two layers, the second time: slices that had started at each product, and in all."""
    torch.manual_seed(0)
    model: Any = dshard.fully_shard(
        nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(2))), strategy="split(3)"
    )
    x = torch.ones(2, 6, requires_grad=True)
    model(x).sum().backward()
    weights = [layer.weight.full_tensor().detach() for layer in model]
    model.reshard()

    def enter(layer: nn.Module, _: Any) -> None:
        if change == "a write" and layer is model[1]:
            with torch.no_grad():
                layer.weight.mul_(2.0)
                weights[1] *= 2

    handles = [layer.register_forward_pre_hook(enter) for layer in model]
    with dshard.CommTrace() as trace, Under(trace) as under:
        out = model(x)
        calls = trace.calls("all_gather")
    for handle in handles:
        handle.remove()
    assert torch.allclose(out, x @ weights[0].T @ weights[1].T)
    out.sum().backward()
    return [[num for num, _ in under.seen[:6]], calls, model[1].weight.gather_source.slice_bytes]


@pytest.mark.parametrize("change", ["", "a write"])
def test_the_first_slice_of_the_next_layer_is_gathered_ahead_and_again_after_a_write(worlds: WorldPool, change):
    again = int(change != "")
    starts = [2, 3, 4, 5 + again, 6 + again, 6 + again]  # with the last slice of a layer the first one of the next
    assert worlds.run(2, started_when_the_order_is_known, change) == [[starts, 6 + again, 0]] * 2


def last_gradient_is_pending() -> list[bool]:
    layer: Any = dshard.fully_shard(nn.Linear(4, 12, bias=False))
    set_slices([layer], {layer.weight: 3})
    layer(torch.ones(2, 4)).sum().backward()
    pending = layer.weight.grad.shard_storage.is_pending
    return [pending, bool(layer.weight.grad.full_tensor().eq(2).all()), layer.weight.grad.shard_storage.is_pending]


def test_the_last_slice_of_a_gradient_is_awaited_by_its_first_use(worlds: WorldPool):
    assert worlds.run(2, last_gradient_is_pending) == [[True, True, False]] * 2


# --- the parameter stays what it is ----------------------------------------------------------------------------------


def same_parameter() -> dict[str, Any]:
    whole, sliced = build(1), build(3)
    names = [list(m.state_dict()) for m in (whole, sliced)]
    with torch.no_grad():
        for model in (whole, sliced):
            model.head.weight.mul_(2.0)
            model.head.weight[3].fill_(0.5)
    ids = ids_of(0, dist.get_rank())
    outs = [m(ids).detach() for m in (whole, sliced)]
    with dshard.gathered(sliced.head.weight) as _, dshard.CommTrace() as trace:
        outs.append(sliced.head(torch.ones(6)).detach())
    labels = {r.label for r in trace.records}
    outs.append(whole.head(torch.ones(6)).detach())
    total = sliced.head.weight.sum().item(), whole.head.weight.sum().item()
    return {
        "names": names,
        "outs": outs,
        "labels": labels,
        "total": total,
        "type": type(sliced.head) is nn.Linear and type(sliced.head.weight) is dshard.ShardedTensor,
    }


def test_a_sliced_weight_keeps_its_values_its_name_and_its_layers_class(worlds: WorldPool):
    for found in worlds.run(2, same_parameter):
        assert found["names"][0] == found["names"][1]
        torch.testing.assert_close(found["outs"][0], found["outs"][1], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found["outs"][2], found["outs"][3], rtol=1e-6, atol=1e-6)
        assert not any("slice" in label for label in found["labels"])  # whoever gathered it whole has it
        assert found["total"][0] == pytest.approx(found["total"][1])
        assert found["type"]


def double(grads: Tensor) -> None:
    grads.mul_(2)


def both_ways(grad_reduce: str, num_slices: int, *, hook: Any = None) -> Tensor:
    """The gradient of a weight that its layer and another operation use."""
    model = build(num_slices, grad_reduce=grad_reduce)
    model.set_all_reduce_hook(hook)
    rank = dist.get_rank()
    out = model(ids_of(0, rank)).sum() + (torch.ones(2, 6) @ model.head.weight.t()).pow(2).sum() * (rank + 1)
    out.backward()
    return model.head.weight.grad.full_tensor()


def test_a_weight_that_its_layer_and_another_operation_use_has_the_gradient_of_both(worlds: WorldPool):
    for found, want in zip(worlds.run(2, both_ways, "mean", 3), worlds.run(2, both_ways, "mean", 1), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_where_gradients_are_added_that_is_refused_by_name(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(2), both_ways, "sum", 3):
        assert kind == "UnsupportedOpError"
        assert text.startswith("head.weight: where gradients are not averaged over the ranks")


def test_where_a_hook_would_see_the_same_gradient_twice_that_is_refused_by_name(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(2), partial(both_ways, hook=double), "mean", 3):
        assert kind == "UnsupportedOpError"
        assert text.startswith("head.weight: where gradients are not averaged over the ranks, or a hook changes them")
        assert "Remove the hook of set_all_reduce_hook" in text


def tied_and_hooked(num_slices: int) -> tuple[Tensor, int]:
    """The gradient of a weight that two layers use, and how often what is sent in the backward is the whole of it."""
    model = build(num_slices, tied=True)
    model.set_all_reduce_hook(double)
    loss = model_loss(model, 0, dist.get_rank())
    with dshard.CommTrace() as trace:
        loss.backward()
    whole = [r for r in trace.records if "slice" not in r.label and r.payload_bytes >= model.head.weight.nbytes // 2]
    return model.head.weight.grad.full_tensor(), len(whole)


def test_two_layers_add_up_what_is_reduced_already(worlds: WorldPool):
    for (found, num_whole), (want, _) in zip(
        worlds.run(2, tied_and_hooked, 3), worlds.run(2, tied_and_hooked, 1), strict=True
    ):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
        assert num_whole == 0


SWITCHES: list[Any] = [None, None, {"head.weight": "split(2)"}, {"head.weight": "split(3)", "embed.weight": "ddp"}]
LAST: list[Any] = [{"*": "full"}, {"head.*": "ddp", "embed.weight": "split(2)"}]


def switched(start: Any, last: Any) -> list[dict[str, Tensor]]:
    """Five steps each of a model whose strategies change ahead of each of them, and of one that stays whole."""
    found = []
    for switches in (False, True):
        torch.manual_seed(0)
        model: Any = dshard.fully_shard(LM(), strategy=start if switches else None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(5):
            wanted = [*SWITCHES, last][step]
            if switches and wanted:
                dshard.set_strategy(model, wanted, optimizer=optimizer)
            with dshard.CommTrace() as trace:
                model_loss(model, step, dist.get_rank()).backward()
            counts = {r.label.rpartition(" of ")[2] for r in trace.records if r.label.startswith("head, slice")}
            first = {"3"} if start else set()
            assert counts == ([first, first, {"2"}, {"3"}, set()][step] if switches else set()), (step, counts)
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: p.full_tensor() for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("start", [None, {"head.weight": "split(3)", "mid.*": "split(2)", "*": "zero2"}])
@pytest.mark.parametrize("last", LAST)
def test_a_weight_can_be_sliced_and_whole_again_between_steps(worlds: WorldPool, start, last):
    for whole, found in worlds.run(2, switched, start, last):
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


def others_change() -> list[int]:
    """Slices of two weights, after the strategy of a third parameter changed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        dshard.fully_shard(layer, strategy={"weight": "split(2)", "bias": "zero2"})
    dshard.fully_shard(model)
    dshard.set_strategy(model, {"*.bias": "full"})
    return [layer.weight.gather_source.settings.num_slices for layer in model]  # type: ignore[union-attr]


def test_a_change_of_other_parameters_leaves_a_weight_sliced(worlds: WorldPool):
    assert worlds.run(2, others_change) == [[2, 2]] * 2


def copies() -> list[Tensor]:
    model = build(3)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        model.head.weight.zero_()
    found = []
    for other in others:
        assert other.head.forward.module is other.head
        with dshard.CommTrace() as trace:
            model_loss(other, 0, dist.get_rank()).backward()
        assert any(r.label.startswith("head, slice 1 of 3") for r in trace.records)
        found.append(other.head.weight.grad.full_tensor())
    plain = build(1)
    model_loss(plain, 0, dist.get_rank()).backward()
    return [*found, plain.head.weight.grad.full_tensor()]


def test_copies_and_pickles_are_sliced_alike(worlds: WorldPool):
    for copied, pickled, want in worlds.run(2, copies):
        torch.testing.assert_close(copied, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(pickled, want, rtol=1e-5, atol=1e-6)


def other_passes() -> dict[str, bool]:
    whole, sliced = build(1), build(3)
    ids = ids_of(0, dist.get_rank())
    with torch.inference_mode():
        inferred = torch.allclose(whole(ids), sliced(ids), atol=1e-6)
    grads = [torch.autograd.grad(m(ids).sum(), list(m.parameters())) for m in (whole, sliced)]
    params, buffers = dict(sliced.named_parameters()), dict(sliced.named_buffers())
    full = {name: p.full_tensor().detach() for name, p in params.items()}

    def functional(values: Any) -> Tensor:
        return torch.func.functional_call(sliced, (values, buffers), (ids,)).sum()

    by_func = torch.func.grad(functional)(full)
    plain = build(shards=False)
    plain(ids).sum().backward()
    weight, slope = sliced.head.weight.full_tensor().detach(), torch.arange(6.0)
    jacobian = torch.func.jacrev(sliced.head)(torch.ones(6))
    warnings.simplefilter("ignore")  # of torch's own first use of forward mode
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(sliced.head(forward_ad.make_dual(torch.ones(6), slope))).tangent
    seen: list[Any] = []
    sliced.head.weight.register_hook(lambda grad: seen.append(grad.full_tensor()))
    sliced(ids).sum().backward()
    return {
        "inference": inferred,
        "autograd.grad": all(
            torch.allclose(a.full_tensor(), b.full_tensor(), atol=1e-5) for a, b in zip(grads[0], grads[1], strict=True)
        ),
        "torch.func": all(torch.allclose(by_func[n], p.grad, atol=1e-5) for n, p in plain.named_parameters()),
        "jacobians": torch.allclose(jacobian, weight),
        "forward mode": torch.allclose(tangent, weight @ slope, atol=1e-5),
        "hooks": len(seen) == 1 and torch.allclose(seen[0], sliced.head.weight.grad.full_tensor()),
        "nothing is left": sliced._context().gathered_bytes == 0,
    }


def test_inference_autograd_grad_torch_func_and_hooks_work_in_slices(worlds: WorldPool):
    for found in worlds.run(2, other_passes):
        assert all(found.values()), found


def by_the_roots_methods(num_slices: int) -> Tensor:
    """A gradient under what the methods of the root set."""
    model = build(num_slices)
    model.set_gradient_divide_factor(4.0)
    model.set_all_reduce_hook(lambda row: row[16:].mul_(3.0))
    model_loss(model, 0, dist.get_rank()).backward()
    with model.no_sync():
        model_loss(model, 1, dist.get_rank()).backward()
    model_loss(model, 2, dist.get_rank()).backward()
    return model.head.weight.grad.full_tensor()


def test_what_methods_of_the_root_set_holds_for_sliced_weights_too(worlds: WorldPool):
    whole, sliced = worlds.run(2, by_the_roots_methods, 1), worlds.run(2, by_the_roots_methods, 3)
    for found, want in zip(sliced, whole, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def sliced_with_gradients_on_their_way(drops: bool) -> list[Tensor]:
    """The gradients of a model that is sliced between two micro-batches, and of one that is not."""
    found = []
    for is_sliced in (False, True):
        model = build(1)
        with model.no_sync():
            model_loss(model, 0, dist.get_rank()).backward()
            if drops:
                model.zero_grad()
            if is_sliced:
                set_slices([model], {model.head.weight: 3})
        model_loss(model, 1, dist.get_rank()).backward()
        found.append(torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]))
    return found


@pytest.mark.parametrize("drops", [False, True])
def test_gradients_that_were_on_their_way_stay_when_a_weight_is_sliced(worlds: WorldPool, drops):
    for want, found in worlds.run(2, sliced_with_gradients_on_their_way, drops):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def compiled() -> tuple[list[Tensor], list[Tensor]]:
    graphs: list[int] = []
    warnings.simplefilter("ignore")
    torch._dynamo.reset()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    found = []
    for is_compiled in (False, True):
        model = build(3)
        run = torch.compile(model, backend=backend) if is_compiled else model
        model_loss(run, 0, dist.get_rank()).backward()
        found.append([p.grad.full_tensor() for p in model.parameters()])
    assert graphs
    return found[0], found[1]


@pytest.mark.slow
def test_a_compiled_model_computes_its_slices_between_graphs(worlds: WorldPool):
    for eager, found in worlds.run(2, compiled):
        for got, want in zip(found, eager, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def on_one_rank() -> None:
    layer: Any = dshard.fully_shard(nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(2)]))
    for part in layer:
        set_slices([layer], {part.weight: 2})
    layer[dist.get_rank()](torch.ones(2, 4))


def test_ranks_that_run_different_layers_raise_and_name_the_slice(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(2), on_one_rank):
        assert kind == "DivergenceError"
        assert "slice 1 of 2" in text


def steps_after_an_error() -> bool:
    model, plain = build(3), build(1)
    for bad in (torch.full((1, 2), 11), torch.full((1, 2), -1)):
        with pytest.raises(IndexError, match=r"embed.weight: indices of an embedding must be in \[0, 11\)"):
            model(bad)
    for m in (model, plain):
        model_loss(m, 0, dist.get_rank()).backward()
    grads = [m.head.weight.grad.full_tensor() for m in (model, plain)]
    return torch.allclose(grads[0], grads[1], atol=1e-6)


def test_indices_outside_of_the_vocabulary_raise_and_the_next_step_is_a_normal_one(worlds: WorldPool):
    assert worlds.run(2, steps_after_an_error) == [True, True]
