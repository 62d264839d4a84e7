"""Units that `fully_shard` finds on the root alone: which they are, and what they cost beside units made by hand."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dshard
from dshard.testing import WorldPool, fake_world
from dshard.units.context import Eviction
from dshard.units.unit import Unit
from tests.models import ResidualMlp

WIDTH, VOCAB = 32, 96
ENOUGH_BYTES = 4 << 20


def make_block() -> nn.Module:
    """Its parameters: 8 * width ** 2, and a norm."""
    return ResidualMlp(WIDTH, 4 * WIDTH)


class GPT(nn.Module):
    def __init__(self, *, vocab: int = VOCAB, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(vocab, WIDTH), nn.ModuleList(make_block() for _ in range(6))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Aliased(nn.Module):
    """As in Hugging Face's models, the blocks have a second name; so has the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = GPT()
        self.layers, self.last = self.backbone.blocks, self.backbone.blocks[-1]


class ViT(nn.Module):
    """As torchvision's: the encoder holds a parameter itself, beside a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.encoder, self.head = nn.Linear(12, WIDTH), nn.Module(), nn.Linear(WIDTH, 10)
        self.encoder.place = nn.Parameter(torch.zeros(4, WIDTH))
        self.encoder.layers = nn.Sequential(*[make_block() for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder.layers(self.patches(x) + self.encoder.place))


class NanoGPT(nn.Module):
    """Everything in a `ModuleDict`, which has no forward."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(VOCAB, WIDTH), "wpe": nn.Embedding(4, WIDTH), "drop": nn.Dropout(0.0)}
        self.transformer = nn.ModuleDict({**parts, "h": nn.ModuleList(make_block() for _ in range(6))})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(4))
        for block in self.transformer["h"]:
            x = block(x)
        return x


class Residual(nn.Module):
    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, wider, 3, 1, 1, bias=False), nn.BatchNorm2d(wider)
        self.conv2, self.norm2 = nn.Conv2d(wider, wider, 3, 1, 1, bias=False), nn.BatchNorm2d(wider)
        self.around = nn.Sequential() if channels == wider else nn.Sequential(nn.Conv2d(channels, wider, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.around(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.layer2 = nn.Sequential(Residual(8, 16), Residual(16, 16))
        self.layer3 = nn.Sequential(Residual(16, 32), Residual(32, 32))
        self.layer4 = nn.Sequential(Residual(32, 64), Residual(64, 64))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))))
        return self.fc(x.mean((2, 3)))


class ByAttribute(nn.Module):
    """Blocks that are in no list; one of them is attention, which uses a child's weight without its forward."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(9):
            setattr(self, f"block{i}", make_block())
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.head = nn.Linear(WIDTH, VOCAB)


def small_layers() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(500)])


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=88, num_hidden_layers=6, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=16, d_ff=64, num_layers=3, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def units_of(build: Callable[[], nn.Module]) -> list[Unit]:
    with fake_world(0, 2):
        model: Any = dshard.fully_shard(build())
        names = {id(p): name for name, p in model.named_parameters()}
        units = [unit for unit in model._context().units if unit.params]
        assert sorted(names[id(p)] for unit in units for p in unit.params) == sorted(names.values())
        return units


def labels_of(build: Callable[[], nn.Module]) -> list[str]:
    return [unit.label for unit in units_of(build)]


def numbered(pattern: str, count: int) -> list[str]:
    return [pattern.format(i) for i in range(count)]


def adaptive() -> nn.Module:
    return nn.ModuleDict(
        {
            "blocks": nn.ModuleList(make_block() for _ in range(3)),
            "out": nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 5000, [50, 1000]),
        }
    )


LABELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a final norm goes with the head": (GPT, ["embed", *numbered("blocks.{}", 6), "norm..head"]),
    "a shared weight stays with the root": (
        lambda: GPT(tied=True),
        [*numbered("blocks.{}", 5), "blocks.5..norm", "GPT"],
    ),
    "a large vocabulary makes no larger neighbours": (
        lambda: GPT(vocab=5000),
        ["embed", "blocks.0", "blocks.1..blocks.4", "blocks.5..norm", "head"],
    ),
    "a module with a parameter of its own is cut all the same": (
        ViT,
        ["patches..encoder.layers.0", *numbered("encoder.layers.{}", 6)[1:-1], "encoder.layers.5..head", "ViT"],
    ),
    "a dict of modules is no module that runs": (
        NanoGPT,
        ["transformer.wte..transformer.wpe", *numbered("transformer.h.{}", 6)],
    ),
    "stages are cut into their blocks, small ones together": (
        ResNet,
        ["conv1..layer3.0", "layer3.1", "layer4.0", "layer4.1..fc"],
    ),
    "blocks need no list": (
        ByAttribute,
        [*numbered("block{}", 9), "attention..head"],
    ),
    "a second name makes no second part": (
        Aliased,
        ["backbone.embed", *numbered("backbone.blocks.{}", 6), "backbone.norm..backbone.head"],
    ),
    "an adaptive softmax is not cut": (adaptive, [*numbered("blocks.{}", 3), "out"]),
    "an adaptive softmax that is the root is not cut": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 11, [3, 7], div_value=2.0),
        ["AdaptiveLogSoftmaxWithLoss"],
    ),
}


@pytest.mark.parametrize("claim", LABELS)
def test_units_are_the_blocks_with_what_is_small_beside_them(claim):
    build, labels = LABELS[claim]
    assert labels_of(build) == labels


def test_five_hundred_small_layers_become_ten_units_of_about_one_size():
    sizes = [unit.full_bytes for unit in units_of(small_layers)]
    assert len(sizes) == 10
    assert max(sizes) <= 1.05 * min(sizes)


def test_llama_is_cut_into_layers_embedding_and_head():
    labels = ["model.embed_tokens", *numbered("model.layers.{}", 6), "model.norm..lm_head"]
    assert labels_of(llama) == labels


def test_t5_is_cut_into_the_blocks_of_both_stacks_and_its_one_embedding_stays_with_the_root():
    assert labels_of(t5) == [
        *numbered("encoder.block.{}", 3),
        "encoder.final_layer_norm..decoder.block.0",
        "decoder.block.1",
        "decoder.block.2..decoder.final_layer_norm",
        "T5ForConditionalGeneration",
    ]


def by_blocks(model: nn.Module, policy: bool = False) -> list[str]:
    """Labels of the units of a model of which the blocks were sharded, by calls or a policy, and then the root."""
    with fake_world(0, 2):
        for block in model.blocks if not policy else ():
            dshard.fully_shard(block)
        sharded: Any = dshard.fully_shard(model, auto_wrap_policy={ResidualMlp} if policy else None)
        return [unit.label for unit in sharded._context().units if unit.params]


@pytest.mark.parametrize("policy", [False, True])
def test_what_calls_on_blocks_have_left_is_cut_where_it_is_large(policy):
    blocks = numbered("blocks.{}", 6)
    enough = ENOUGH_BYTES // (4 * WIDTH)
    assert by_blocks(GPT(vocab=enough), policy) == [*blocks, "embed", "norm..head"]
    assert by_blocks(GPT(vocab=enough - 1), policy) == [*blocks, "GPT"]  # too small for a collective each
    assert by_blocks(GPT(vocab=enough, tied=True), policy) == [*blocks, "GPT"]


def row_of(sizes: Sequence[int]) -> nn.Module:
    return nn.Sequential(*[nn.Linear(1, size, bias=False, device="meta") for size in sizes])


sizes_of_layers = st.lists(
    st.one_of(st.integers(1, 50), st.integers(1, 5000), st.integers(1, 10 << 20)), min_size=2, max_size=40
)


@given(sizes=sizes_of_layers)
def test_units_are_runs_of_neighbours_and_no_two_of_them_are_larger_than_the_largest_two_layers_were(sizes):
    found = [[p.numel() for p in unit.params] for unit in units_of(lambda: row_of(sizes))]
    assert [size for unit in found for size in unit] == sizes
    enough = min(ENOUGH_BYTES, 4 * sum(sizes) // 10)
    neighbours = [4 * size for size in sizes if 4 * size >= enough // 64]
    largest = max([2 * enough, *neighbours, *(a + b for a, b in pairwise(neighbours))])
    assert all(4 * (sum(a) + sum(b)) <= largest * 33 / 32 for a, b in pairwise(found))


@given(size=st.integers(1, 20_000), num_layers=st.integers(20, 400))
def test_many_layers_of_one_size_become_ten_to_twenty_units(size, num_layers):
    assert 10 <= len(units_of(lambda: row_of([size] * num_layers))) <= 20


# --------------------------------------------------------------------------------------- beside units made by hand


def _ids(low: int = 0) -> Tensor:
    return torch.randint(low, VOCAB, (2, 4))


def _hugging_face(model: Any) -> Tensor:
    ids = _ids(1)
    return model(input_ids=ids, labels=ids).loss


def _every(modules: Sequence[nn.Module], size: int) -> list[list[nn.Module]]:
    return [list(modules[i : i + size]) for i in range(0, len(modules), size)]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], Callable[[Any], Tensor]]] = {
    "gpt": (GPT, lambda m: [m.embed, *m.blocks, [m.norm, m.head]], lambda m: m(_ids()).square().mean()),
    "tied": (lambda: GPT(tied=True), lambda m: [*m.blocks], lambda m: m(_ids()).square().mean()),
    "vit": (ViT, lambda m: [*m.encoder.layers], lambda m: m(torch.randn(2, 4, 12)).square().mean()),
    "nano": (NanoGPT, lambda m: [*m.transformer["h"], m.transformer["wte"]], lambda m: m(_ids()).square().mean()),
    "resnet": (
        ResNet,
        lambda m: [[m.conv1, m.bn1, m.layer1], *m.layer2, *m.layer3, *m.layer4],
        lambda m: m(torch.randn(2, 3, 4, 4)).square().mean(),
    ),
    "small": (small_layers, lambda m: _every(list(m), 50), lambda m: m(torch.randn(2, 8)).square().mean()),
    "llama": (llama, lambda m: [m.model.embed_tokens, *m.model.layers, [m.model.norm, m.lm_head]], _hugging_face),
    "t5": (t5, lambda m: [*m.encoder.block, *m.decoder.block], _hugging_face),
}


def cost_of(name: str, by_hand: bool) -> tuple[int, int, int, float]:
    """Of a third step: the peak of gathered bytes, gathers, reduce-scatters; and its loss."""
    build, units, loss_of = CASES[name]
    torch.manual_seed(0)
    model: Any = build()
    for part in units(model) if by_hand else ():
        dshard.fully_shard(part)
    dshard.fully_shard(model)
    peak, on_gather = 0, Eviction.note_gather

    def watched(self: Eviction, unit: Unit) -> None:
        nonlocal peak
        on_gather(self, unit)
        peak = max(peak, self.num_bytes)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    Eviction.note_gather = watched  # type: ignore[method-assign]
    try:
        for _ in range(3):
            peak = 0
            torch.manual_seed(1)
            with dshard.CommTrace() as trace:
                loss = loss_of(model)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        Eviction.note_gather = on_gather  # type: ignore[method-assign]
    return peak, trace.calls("all_gather"), trace.calls("reduce_scatter"), loss.item()


@pytest.mark.parametrize("name", CASES)
def test_the_root_alone_gathers_as_often_and_as_much_at_a_time_as_units_made_by_hand(worlds: WorldPool, name):
    if name in ("llama", "t5"):
        pytest.importorskip("transformers")
    for found, expected in zip(worlds.run(2, cost_of, name, False), worlds.run(2, cost_of, name, True), strict=True):
        assert found[0] <= 1.05 * expected[0]
        assert found[1] <= 1.05 * expected[1]
        assert found[2] <= 1.05 * expected[2]
        assert found[3] == expected[3]
