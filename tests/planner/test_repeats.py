"""Of alike blocks four run and the trace is that of all; where they may differ, all run."""

from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from benchmarks.calibration.t5 import T5, T5Config
from dshard.cli.models import GPT, GPTConfig, Llama, LlamaConfig, checkpoint_blocks
from dshard.errors import ArgumentError
from dshard.planner.traces import Part
from dshard.planner.tracing import trace
from tests.planner.models import parts_of

WIDTH = 8
CALLS = Counter()


class Block(nn.Module):
    """Counts who is called."""

    def __init__(self, number, *, p=0.0, is_gated=False, inner=16):
        super().__init__()
        self.number = number
        self.is_gated = is_gated
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        CALLS["block"] += 1
        inner = self.up(self.norm(x))
        inner = inner.sigmoid() * inner if self.is_gated else inner.relu()
        return x + self.drop(self.down(inner))


class Numbered(Block):
    def forward(self, x):
        return super().forward(x) * (1 + self.number)


class Keeping(Block):
    """Returns a tuple, as many do."""

    def forward(self, x):
        return (super().forward(x),)


class Chain(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, blocks):
        super().__init__()
        self.tokens = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens):
        return self.head(self.through(self.tokens(tokens)))

    def through(self, x):
        for block in self.blocks:
            out = block(x)
            x = out[0] if isinstance(out, tuple) else out
        return x


def class_of(through):
    """A chain whose blocks run in another way."""
    return type("Other", (Chain,), {"through": through})


def found(model, x=None):
    """Both traces, and how many calls of blocks the short one took."""
    x = torch.zeros(2, 5, dtype=torch.int64) if x is None else x
    parts = parts_of(model)
    whole = trace(model, x, parts, is_whole=True)
    CALLS.clear()
    return trace(model, x, parts), whole, CALLS["block"]


def blocks(num=7, kind=Block, **changes):
    return [kind(i, **changes) for i in range(num)]


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_language_models_have_the_trace_in_which_each_block_runs(is_checkpointed, dtype):
    shape = LlamaConfig(7, 32, 4, 2, 48, 64)
    models = [GPT(GPTConfig(8, 6, 32, 4, 64)), Llama(shape), T5(T5Config(6, 32, 4, 8, 64, 64))]
    for model in models:
        if is_checkpointed:
            checkpoint_blocks(model)
        parts, x = parts_of(model), torch.zeros(2, 8, dtype=torch.int64)
        assert trace(model, x, parts, dtype=dtype) == trace(model, x, parts, dtype=dtype, is_whole=True)


@given(
    num=st.integers(1, 9),
    odd=st.none() | st.integers(0, 8),
    change=st.sampled_from(["p", "gate", "inner", "frozen", "eval", "hook", "half", "checkpoint", "tied", "same"]),
    kind=st.sampled_from([Block, Numbered, Keeping]),
    batch=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_one_block_that_differs_is_seen(num, odd, change, kind, batch):
    model = Chain(blocks(num, kind))
    if odd is not None and odd < num:
        block = model.blocks[odd]
        if change in ("p", "gate", "inner"):
            changes = {"p": {"p": 0.5}, "gate": {"is_gated": True}, "inner": {"inner": 24}}[change]
            model.blocks[odd] = kind(odd, **changes)
        elif change == "frozen":
            block.requires_grad_(False)
        elif change == "eval":
            block.eval()
        elif change == "hook":
            block.up.register_forward_hook(lambda module, args, out: out * 2)
        elif change == "half":
            block.norm.double()
            block.up.double()
            block.down.double()
            block.forward = partial(lambda block, x: Block.forward(block, x.double()).float(), block)
        elif change == "checkpoint":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        elif change == "tied":
            block.up.weight = model.blocks[0].up.weight
        else:
            model.blocks[odd] = model.blocks[0]
    parts = parts_of(model)
    if change in ("tied", "same"):
        parts = (Part("all", (model,), tuple(name for name, _ in model.named_parameters())),)
    x = torch.zeros(batch, 3, dtype=torch.int64)
    if kind is Keeping and change == "half":
        return
    assert trace(model, x, parts) == trace(model, x, parts, is_whole=True)


def test_four_blocks_run_of_those_that_are_alike():
    for kind in (Block, Keeping):
        short, whole, calls = found(Chain(blocks(kind=kind)))
        assert short == whole
        assert calls == 4
    model = Chain([*blocks(6), *blocks(1, is_gated=True), *blocks(8)])
    short, whole, calls = found(model)
    assert short == whole
    assert calls == 1 + 4 + 1 + 4  # the first told that it reads what differs
    checkpoint_blocks(model)
    short, whole, calls = found(model)
    assert short == whole
    assert calls == 1 + 2 * (4 + 1 + 4)


def test_hooks_of_all_modules_count_if_they_are_of_forwards():
    """fully_shard, called earlier in a process, has hooks for parameters that are registered."""
    for register, num_calls in (
        (torch_module.register_module_parameter_registration_hook, 4),
        (torch_module.register_module_forward_hook, 7),
    ):
        handle = register(lambda *_: None)
        try:
            short, whole, calls = found(Chain(blocks()))
        finally:
            handle.remove()
        assert short == whole
        assert calls == num_calls


def _pooled(self, x):
    for i, block in enumerate(self.blocks):
        x = block(x if i != 3 else x[:, :1].contiguous())
    return x


def _stacked(self, x):
    outs = []
    for block in self.blocks:
        x = block(x)
        outs.append(x)
    return torch.stack(outs).sum(0)


def _scaled(self, x):
    for i, block in enumerate(self.blocks):
        x = block(x)
        x = x * 2 if i == 3 else x
    return x


def _skipping(self, x):
    before = x
    for block in self.blocks:
        x, before = block(x + before), x
    return x


def _repeated(self, x):
    for block in (*self.blocks, *self.blocks):
        x = block(x)
    return x


def _reversed(self, x):
    for block in reversed(self.blocks):
        x = block(x)
    return x


def _from_one(self, x):
    return sum(block(x) for block in self.blocks)


def _partly(self, x):
    for i, block in enumerate(self.blocks):
        with torch.set_grad_enabled(i >= 3):
            x = block(x)
    return x


def _catching(self, x):
    for block in self.blocks:
        try:
            x = block(x)
        except Exception:
            x = x + 1
    return x


def _lagging(self, x):
    held = [None, None, None]
    for block in self.blocks:
        held = [*held[1:], x]
        x = block(x)
    return x


def _aside(self, x):
    for i, block in enumerate(self.blocks):
        x = block(x)
        if i == 3:
            self.head.weight.sum()
    return x


def _distinct(self, x):
    outs = []
    for block in self.blocks:
        x = block(x)
        outs.append(x)
    with torch.no_grad():
        torch.stack(list(dict.fromkeys(outs))).sum()
    return x


def _widened(self, x):
    x = self.blocks[0](x.expand(1, *x.shape)[0].transpose(0, 1).contiguous().transpose(0, 1))
    for block in self.blocks[1:]:
        x = block(x)
    return x


@pytest.mark.parametrize(
    ("through", "calls"),
    [
        (_pooled, 7), (_stacked, 7), (_scaled, 7), (_skipping, 7), (_repeated, 14), (_reversed, 7), (_from_one, 7),
        (_partly, 7), (_catching, 4), (_lagging, 4), (_aside, 7), (_distinct, 7), (_widened, 4),
    ],
)  # fmt: skip
def test_all_blocks_run_where_they_run_in_another_way_than_one_after_another(through, calls):
    short, whole, found_calls = found(class_of(through)(blocks()))
    assert short == whole
    assert found_calls >= calls


class Input(nn.Module):
    """Adds to its input in place of using it: nothing of it is saved."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        CALLS["block"] += 1
        return x + self.scale


@pytest.mark.parametrize("through", [Chain.through, _stacked, _lagging])
def test_what_a_model_holds_between_blocks_is_alive_as_long_as_it_was(through):
    short, whole, _ = found(class_of(through)(blocks(9, Input)))
    assert short == whole


def test_who_reads_its_own_number_is_not_told_from_others():
    short, whole, calls = found(Chain(blocks(kind=Numbered)))
    assert short == whole
    assert calls >= 7
    assert not any("number" in vars(kind) for kind in (Block, Numbered))


def test_a_model_is_left_as_it_was():
    model = Chain(blocks())
    checkpoint_blocks(model)
    before = [dict(vars(module)) for module in model.modules()]
    found(model)
    for module, values in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == values.keys()
        assert all(vars(module)[name] is value for name, value in values.items() if name != "_parameters")


class Failing(Block):
    def forward(self, x):
        if self.number == 3:
            raise KeyError("block 3 is broken")
        return super().forward(x)


def test_an_error_of_a_model_is_told_with_the_argument_and_is_the_cause():
    model = Chain(blocks(kind=Failing))
    with pytest.raises(ArgumentError, match=r"sample_input .* KeyError: 'block 3 is broken'") as found:
        trace(model, torch.zeros(2, 5, dtype=torch.int64), parts_of(model))
    assert isinstance(found.value.__cause__, KeyError)
