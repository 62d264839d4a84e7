"""What a step on fake tensors tells is what a real one does: operations by closed formula, bytes by counting."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import profile

from dshard.errors import ArgumentError, StateError
from dshard.planner.devices import DEVICES
from dshard.planner.measuring import measure
from dshard.planner.steps import Part
from dshard.planner.tracing import trace
from tests.planner.models import CASES, CONFIG, gpt, parts_of

LOSS_BYTES = 4


def tokens(batch):
    return torch.zeros(batch, CONFIG.block_size, dtype=torch.int64)


def block_flops(batch):
    """Forward of the blocks: two per weight and token, and two products of attention."""
    positions = batch * CONFIG.block_size
    return CONFIG.num_layers * (24 * positions * CONFIG.width**2 + 4 * positions * CONFIG.block_size * CONFIG.width)


def step_flops(batch):
    """Forward and backward; that of attention has five products for the two of its forward."""
    positions = batch * CONFIG.block_size
    head = 2 * positions * CONFIG.width * CONFIG.vocab_size
    return 3 * (block_flops(batch) + head) + CONFIG.num_layers * 2 * positions * CONFIG.block_size * CONFIG.width


@pytest.mark.parametrize("batch", [1, 4])
def test_flops_of_a_gpt_are_the_closed_formula(batch):
    model = gpt()
    assert trace(model, tokens(batch), parts_of(model)).flops == step_flops(batch)


def test_checkpointing_adds_the_forward_of_the_blocks_but_for_their_last_product():
    model = gpt(checkpointed=True)
    unneeded = (
        CONFIG.num_layers * 8 * 2 * CONFIG.block_size * CONFIG.width**2
    )  # torch stops where all is computed again
    assert trace(model, tokens(2), parts_of(model)).flops == step_flops(2) + block_flops(2) - unneeded


def test_each_block_has_the_operations_of_its_own_forward_and_backward():
    model = gpt()
    found = trace(model, tokens(2), parts_of(model))
    labels = [part.label for part in found.parts]
    for is_backward, share in ((False, 1), (True, 2)):
        flops = dict.fromkeys(labels, 0)
        for phase in found.phases:
            if phase.is_backward == is_backward:
                flops[labels[phase.part]] += phase.flops
        attention = 2 * 2 * CONFIG.block_size**2 * CONFIG.width if is_backward else 0
        assert {flops[f"blocks.{i}"] for i in range(3)} == {share * block_flops(2) // 3 + attention}
        assert flops["head"] == share * 2 * 2 * CONFIG.block_size * CONFIG.width * CONFIG.vocab_size
        assert flops["tokens"] == flops["norm"] == 0
    assert [labels[i] for i in found.order] == labels


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch", [2, 8])
def test_what_forward_keeps_is_what_autograd_saves_in_a_real_one(name, batch):
    make, sample = CASES[name]
    model, x = make(), sample(batch)
    held = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers(), x)}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).sum()
    found = trace(model, x, parts_of(model))
    last = [phase for phase in found.phases if not phase.is_backward][-1]
    assert last.end_bytes == sum(saved.values()) + LOSS_BYTES
    assert loss.requires_grad


@pytest.mark.parametrize("name", ["gpt", "checkpointed"])
def test_the_peak_is_that_of_a_real_step_without_gradients_of_parameters(name):
    make, sample = CASES[name]
    model, x = make(), sample(16)
    model(x).sum().backward()  # what is made once is made
    model.zero_grad()
    with profile(profile_memory=True, acc_events=True) as profiled:
        model(x).sum().backward()
    changes = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(changes, key=lambda each: each.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    assert alive == gradients
    found = trace(model, x, parts_of(model)).peak_bytes
    assert found <= peak <= found + gradients


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_model_is_left_as_it_was_also_where_modules_are_shared(is_measured):
    model = gpt()
    model.blocks[2].mlp = model.blocks[1].mlp
    model.head.weight = model.tokens.weight
    model.register_buffer("scale", torch.ones(3))
    before = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    parts = (Part("all", (model,), tuple(name for name, _ in model.named_parameters())),)
    if is_measured:
        measure(model, tokens(1), parts, num_steps=1)
    else:
        trace(model, tokens(1), parts)
    after = model.state_dict(keep_vars=True)
    assert set(after) == set(before)
    for name, (identity, value) in before.items():
        assert id(after[name]) == identity
        assert torch.equal(after[name], value)
    model(tokens(1)).sum().backward()


def test_gradients_of_parameters_are_not_counted_for_strategies_say_where_they_are():
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    found = trace(model, torch.ones(1, 512), parts_of(model))
    assert found.peak_bytes < 512 * 512 * 4
    twice = nn.Sequential(model[0], model[0])  # two gradients, whose sum is the parameter's
    found = trace(twice, torch.ones(1, 512), (Part("all", (twice,), ("0.weight", "0.bias")),))
    assert 2 * 512 * 512 * 4 < found.peak_bytes < 3 * 512 * 512 * 4


def test_a_meta_model_and_a_real_one_give_one_trace():
    with torch.device("meta"):
        on_meta = gpt()
    real = gpt()
    found = [trace(model, tokens(2), parts_of(model)) for model in (on_meta, real)]
    assert found[0].phases == found[1].phases
    assert all(p.grad is None for p in real.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in real.modules())


def test_activations_and_gathers_are_in_the_compute_dtype():
    model = gpt()
    full, half = (trace(model, tokens(8), parts_of(model), dtype=dtype) for dtype in (None, torch.bfloat16))
    assert half.flops == full.flops
    assert 0.5 <= half.peak_bytes / full.peak_bytes < 0.55  # statistics of norms and attention stay in fp32


def test_tied_weights_and_parameters_of_the_root_are_used_where_they_are():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.emb = nn.Embedding(16, 8)
            self.body = nn.Linear(8, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, x):
            return self.head(self.body(self.emb(x)) * self.scale)

    model = Tied()
    parts = (Part("body", (model.body,), ("body.weight", "body.bias")), Part("root", (model,), ("scale", "emb.weight")))
    found = trace(model, torch.zeros(4, 3, dtype=torch.int64), parts)
    assert [found.parts[i].label for i in found.order] == ["root", "body"]  # the embedding comes first
    assert {found.parts[i].label for i in found.used_throughout} == {"root"}
    assert found.flops == 3 * 2 * 12 * (8 * 8 + 8 * 16)


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) if x.sum().item() > 0 else x


class Calls(nn.Module):
    """A module of another signature, called as it wants."""

    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x):
        return self.call(self.inner, x)


@pytest.mark.parametrize(
    ("inner", "call", "forward", "backward"),
    [
        (nn.LSTM(8, 16), lambda m, x: m(x)[0], 2 * 4 * 5 * (8 + 16) * 64, 2),
        (nn.LSTM(8, 16, num_layers=2, bidirectional=True), lambda m, x: m(x)[0], 2 * 4 * 5 * 64 * 2 * (24 + 48), 2),
        (nn.Bilinear(8, 8, 6), lambda m, x: m(x, x), 2 * 4 * 5 * 8 * 8 * 6, 1),
        (nn.Conv1d(5, 6, 3), lambda m, x: m(x), 2 * 4 * 6 * 6 * 5 * 3, 1),
        (nn.Linear(8, 6), lambda m, x: m(x), 2 * 4 * 5 * 8 * 6, 1),
    ],
    ids=["lstm", "lstm of two layers, both ways", "bilinear", "conv", "linear"],
)
def test_operations_of_other_layers_are_counted(inner, call, forward, backward):
    model = Calls(inner, call)
    found = trace(model, torch.ones(4, 5, 8), parts_of(model))
    sums = [sum(phase.flops for phase in found.phases if phase.is_backward is half) for half in (False, True)]
    assert sums == [forward, backward * forward]


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).detach()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.ReLU(), "must have parameters to train, but it has none"),
        (nn.Linear(4, 4).requires_grad_(False), "must have parameters to train, but it has none"),
        (Asks(), "the model's forward asks for a value"),
        (Detached(), "output must need gradients, but it does not"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused(model, message):
    names = tuple(name for name, _ in model.named_parameters())
    with pytest.raises(StateError, match=message):
        trace(model, torch.ones(2, 4), (Part("all", (model,), names),))


def test_a_small_operation_takes_no_less_than_a_kernel_and_a_large_one_what_it_computes():
    model = gpt()
    (device,) = (DEVICES["a100-80g"],)
    found = trace(model, tokens(2), parts_of(model))
    for phase in found.phases:
        num_kernels = len(phase.ops)
        seconds = device.seconds(phase.ops)
        assert num_kernels * device.efficiency.kernel_s <= seconds
        assert seconds >= phase.flops / device.flops_per_s["float32"]


def test_a_backward_that_needs_no_parameters_is_told_from_others():
    model = gpt()
    parts = parts_of(model)
    found = trace(model, tokens(2), parts)
    embeddings = {0, 1}
    assert found.unused_in_backward == embeddings
    assert found.between(trace(model, tokens(4), parts), 0.5).unused_in_backward == embeddings
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parts = parts_of(layers)
    assert trace(layers, torch.ones(2, 4), parts).unused_in_backward == {0}  # whose input takes no gradient
    assert trace(layers, torch.ones(2, 4, requires_grad=True), parts).unused_in_backward == set()


class Failing(nn.Linear):
    def forward(self, x):
        raise KeyError("this layer is broken")


def test_an_error_of_a_model_is_told_with_the_argument_and_is_the_cause():
    model = Failing(2, 2)
    parts = (Part("all", (model,), ("weight", "bias")),)
    with pytest.raises(ArgumentError, match=r"sample_input .* KeyError: 'this layer is broken'") as found:
        trace(model, torch.zeros(2, 2), parts)
    assert isinstance(found.value.__cause__, KeyError)
