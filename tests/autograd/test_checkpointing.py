"""Modules that keep less for backward: the same bits, fewer bytes, products computed once or twice."""

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import register_flop_formula

import dshard
from dshard.autograd import MODES, _is_kept, apply_checkpointing, checkpointed
from dshard.cli.models import GPT, GPTConfig
from dshard.errors import StateError
from dshard.planner.tracing import trace
from dshard.policies import Offload
from dshard.testing import WorldPool
from dshard.testing.training import checkpoint_blocks
from tests.kit.counted import counted_peak
from tests.planner.models import parts_of
from tests.twins import close, full, mean

WIDTH, HEADS, VOCAB, NUM_BLOCKS = 16, 2, 32, 6
BF16 = dshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
MIX = ("full", "none", "selective", "full", "selective", "none")


class Block(nn.Module):
    """Attention, dropout, products that are written in place; called with keywords, gives a dict with a tuple in it."""

    def __init__(self) -> None:
        super().__init__()
        # No bias: the gradient of a key's is zero but for rounding, and Adam would divide rounding by rounding.
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.2)

    def forward(self, x: Tensor, *, scale: Tensor, debug: bool = False) -> dict[str, Any]:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y = self.drop(self.out(y)) * scale + x
        inner = self.up(y)
        inner += 0.01
        return {"out": (y + self.drop(self.down(self.act(inner))), debug)}


class Net(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x, _ = block(x, scale=self.scale, debug=True)["out"]
        return self.head(self.norm(x))


def make(*, tied: bool = False, frozen: str = "") -> Net:
    torch.manual_seed(0)
    net = Net(tied=tied)
    for name, param in net.named_parameters():
        param.requires_grad_(not frozen or frozen not in name)
    return net


def checkpoint_each(net: Any, mode: str) -> None:
    modes = MIX if mode == "mix" else (mode,) * NUM_BLOCKS
    for each in MODES:
        apply_checkpointing([net.blocks[i] for i, own in enumerate(modes) if own == each], each, root=net)


def tokens(step: int, rank: int, rows: int = 2) -> Tensor:
    return torch.randint(VOCAB, (rows, 8), generator=torch.Generator().manual_seed(100 * step + rank))


def train(net: Any, *, num_batches: int = 1, clips: bool = False, is_plain: bool = False) -> tuple[Any, Any, Any]:
    """Losses, gradients of the last step, and parameters."""
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    losses, grads = [], []
    for step in range(3):
        for i in range(num_batches):
            if not is_plain:
                net.set_requires_gradient_sync(i == num_batches - 1)
            torch.manual_seed(1000 + 10 * step + dist.get_rank())
            x = tokens(10 * step + i, dist.get_rank())
            loss = F.cross_entropy(net(x).float().flatten(0, 1), x.flatten())
            loss.backward()
            losses.append(loss.item())
        if is_plain:
            for param in net.parameters():
                param.grad = mean(param.grad)
        if clips:
            (nn.utils if is_plain else dshard).clip_grad_norm_(net.parameters(), 0.5)
        grads = [full(param.grad) for param in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, [full(param) for param in net.parameters()]


def is_same(one: Any, other: Any) -> bool:
    pairs = zip([*one[1], *one[2]], [*other[1], *other[2]], strict=True)
    return one[0] == other[0] and all(a is b or torch.equal(a, b) for a, b in pairs)


def beside_plain(modes: Any, *, by_hand: bool = False, kind: Any = None, steps: Any = None, **options: Any) -> Any:
    """Modes whose bits differ from those without checkpointing; these are close to those of the unsharded model."""
    kind, steps, results = kind or {}, steps or {}, {}
    for mode in ("none", *modes):
        net = make(**kind)
        checkpoint_each(net, mode)
        for block in net.blocks if by_hand else ():
            dshard.fully_shard(block, **options)
        dshard.fully_shard(net, **options)
        results[mode] = train(net, **steps)
    if "mp_policy" not in options:
        plain = train(make(**kind), is_plain=True, **steps)
        for i, (found, expected) in enumerate(zip(results["none"], plain, strict=True)):
            close(found, expected, f"losses, gradients, parameters: {i}")
    return [mode for mode in modes if not is_same(results[mode], results["none"])]


STRATEGIES = {name: {"strategy": name} for name in ("ddp", "zero1", "zero2", "keep", "full")}
STRATEGIES["split(2)"] = {"strategy": {"blocks.*.up.weight": "split(2)", "head.weight": "split(2)", "*": "full"}}
CASES: dict[str, dict[str, Any]] = {
    **STRATEGIES,
    "units by hand": {"by_hand": True},
    "bf16": {"mp_policy": BF16},
    "bf16, by hand, keep": {"mp_policy": BF16, "by_hand": True, "strategy": "keep"},
    "bf16 and fp32": {"mp_policy": {"*norm*": torch.float32, "*": BF16}},
    "accumulation": {"steps": {"num_batches": 3}},
    "clipped": {"steps": {"clips": True}},
    "tied": {"kind": {"tied": True}},
    "frozen layers": {"kind": {"frozen": "qkv"}},
    "a frozen embedding": {"kind": {"frozen": "embed"}},
    "offload": {"offload_policy": Offload(torch.device("cpu"), torch.device("cpu"))},
    "a budget": {"memory_budget": 20_000},
}


@pytest.mark.parametrize("case", CASES)
def test_no_mode_changes_a_bit_of_training(worlds: WorldPool, case):
    assert worlds.run(2, partial(beside_plain, ("selective", "full", "mix"), **CASES[case])) == [[], []]


class Count(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.num: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.num[name] = self.num.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def numbers_of(mode: str, is_sharded: bool) -> tuple[int, int, int]:
    """Of a step: attentions and norms computed forward, and the most bytes alive."""
    net = make()
    checkpoint_each(net, mode)
    if is_sharded:
        dshard.fully_shard(net)
    x = tokens(0, 0, rows=16)
    for _ in range(2):
        net(x).sum().backward()
        net.zero_grad()
    with Count() as count:
        net(x).sum().backward()
    net.zero_grad()
    with counted_peak(net) as counted:
        net(x).sum().backward()
    return count.num["_scaled_dot_product_flash_attention_for_cpu"], count.num["native_layer_norm"], counted.num_bytes


@pytest.mark.parametrize("is_sharded", [False, True])
def test_full_computes_all_again_and_selective_all_but_products_and_each_keeps_less(worlds: WorldPool, is_sharded):
    (none, selective, whole), _ = zip(
        *(worlds.run(2, numbers_of, mode, is_sharded) for mode in ("none", "selective", "full")), strict=True
    )
    assert none[:2] == (NUM_BLOCKS, NUM_BLOCKS + 1)
    assert selective[:2] == (NUM_BLOCKS, 2 * NUM_BLOCKS + 1)
    assert whole[:2] == (2 * NUM_BLOCKS, 2 * NUM_BLOCKS + 1)
    assert none[2] > selective[2] > whole[2]


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(16, 7, 32, 4, 64))


def test_a_trace_of_blocks_that_are_checkpointed_is_that_of_the_presets():
    model, x = gpt(), torch.zeros(2, 16, dtype=torch.int64)
    traces = {}
    for mode in MODES:
        with checkpointed(model.blocks, mode):
            traces[mode] = trace(model, x, parts_of(model))
    assert not any("forward" in vars(block) for block in model.blocks)
    none, selective, whole = (
        next(phase.end_bytes for phase in reversed(traces[mode].phases) if not phase.is_backward) for mode in MODES
    )
    assert none > selective > whole
    assert traces["none"].flops == traces["selective"].flops < traces["full"].flops
    checkpoint_blocks(model)
    assert trace(model, x, parts_of(model)) == traces["full"]


def plain_step(net: Any, *, backwards: int = 1, x: Tensor | None = None) -> list[Tensor]:
    torch.manual_seed(1)
    loss = net(tokens(0, 0) if x is None else x).sum()
    for i in range(backwards):
        loss.backward(retain_graph=i < backwards - 1)
    return [loss.detach(), *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_graph_is_gone_through_twice(mode):
    expected = plain_step(make(), backwards=2)
    net = make()
    checkpoint_each(net, mode)
    assert all(map(torch.equal, plain_step(net, backwards=2), expected))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_names_stay_and_copies_are_checkpointed_themselves(mode):
    net, names = make(), list(make().state_dict())
    modules = [name for name, _ in net.named_modules()]
    checkpoint_each(net, mode)
    assert list(net.state_dict()) == names
    assert [name for name, _ in net.named_modules()] == modules
    expected = plain_step(net)
    net.zero_grad()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other.blocks[0].forward.args[0].__self__ is other.blocks[0]
        assert all(map(torch.equal, plain_step(other), expected))
    assert all(param.grad is None for param in net.parameters())


def test_what_was_taken_off_is_as_it_was():
    net = make()
    before = [dict(vars(module)) for module in net.modules()]
    net.blocks[0].forward = own = net.blocks[0].forward
    take_off = apply_checkpointing(net.blocks, "full")
    assert all("forward" in vars(block) for block in net.blocks)
    take_off()
    assert net.blocks[0].__dict__.pop("forward") is own
    assert [vars(module) for module in net.modules()] == before


def test_without_gradients_a_forward_is_the_modules_own():
    net = make().eval()
    apply_checkpointing(net.blocks, "selective")
    state = torch.get_rng_state()
    torch.set_rng_state = pytest.fail  # type: ignore[assignment]
    try:
        with torch.no_grad():
            net(tokens(0, 0))
    finally:
        torch.set_rng_state = torch.random.set_rng_state
    assert torch.equal(torch.get_rng_state(), state)


def test_lists_run_their_elements_so_and_layers_stay():
    model = nn.ModuleDict({"list": nn.ModuleList([Block(), Block()]), "head": nn.Linear(4, 4), "x": nn.Embedding(4, 4)})
    apply_checkpointing([model], "full")
    assert [name for name, each in model.named_modules() if "forward" in vars(each)] == ["list.0", "list.1"]


def wrap_outside(net: Any) -> list[nn.Module]:
    net.blocks[1] = checkpoint_wrapper(net.blocks[1])
    return [net.blocks[1]]


def wrap_inside(net: Any) -> list[nn.Module]:
    net.blocks[1].up = checkpoint_wrapper(net.blocks[1].up)
    return [net.blocks[1]]


def wrap_around(net: Any) -> list[nn.Module]:
    net.blocks[1] = checkpoint_wrapper(net.blocks[1])
    return [net.blocks[1]._checkpoint_wrapped_module]


def by_presets(net: Any) -> list[nn.Module]:
    checkpoint_blocks(net)
    return [net.blocks[1]]


def by_transformers(net: Any) -> list[nn.Module]:
    net.blocks[1].gradient_checkpointing = True
    return [net.blocks[1]]


def twice(net: Any) -> list[nn.Module]:
    apply_checkpointing([net.blocks[1]], "selective")
    return [net.blocks[1]]


@pytest.mark.parametrize("how", [wrap_outside, wrap_inside, wrap_around, by_presets, by_transformers, twice])
def test_what_is_checkpointed_already_is_refused_by_name(how):
    net = make()
    modules = how(net)
    forwards = [vars(module).get("forward") for module in modules]
    with pytest.raises(StateError, match=r"(blocks\.[01]|blocks\.1\.up): a module is checkpointed once, but"):
        apply_checkpointing(modules, "full", root=net)
    assert [vars(module).get("forward") for module in modules] == forwards
    apply_checkpointing(modules, "none", root=net)


def test_modules_in_one_another_and_unknown_modes_are_refused():
    net = make()
    with pytest.raises(StateError, match="Block: modules that are checkpointed must not lie in one another, but"):
        apply_checkpointing([net.blocks[0].up, net.blocks[0]], "full")
    with pytest.raises(StateError, match="a mode must be one of none, selective, full, but it is 'some'"):
        apply_checkpointing(net.blocks, "some")


class Caching(nn.Module):
    def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
        return x.sin()


def test_a_cache_of_keys_is_refused_as_it_would_be_written_twice():
    class DynamicCache:
        def get_seq_length(self) -> int:
            return 0

    module = Caching()
    apply_checkpointing([module], "full")
    with pytest.raises(
        StateError, match=r"given a DynamicCache, to which it adds keys and values\. Pass use_cache=False"
    ):
        module(torch.ones(2, requires_grad=True), past_key_values=DynamicCache())
    with torch.no_grad():
        module(torch.ones(2), past_key_values=DynamicCache())


def test_products_are_kept_and_attention_that_draws_random_numbers_is_not():
    aten, x = torch.ops.aten, torch.ones(1, 1, 2, 8)
    assert _is_kept(aten.mm.default, (x, x), {})
    assert _is_kept(aten.convolution.default, (x,), {})
    assert not _is_kept(aten.mm.out, (x, x), {"out": x})
    assert not _is_kept(aten.add.Tensor, (x, x), {})
    for attention in (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_for_cpu):
        assert _is_kept(attention.default, (x, x, x), {})
        assert not _is_kept(attention.default, (x, x, x, 0.1), {})
        assert not _is_kept(attention.default, (x, x, x), {"dropout_p": 0.1})


def test_an_operation_of_which_somebody_told_the_flops_is_kept():
    library = torch.library.Library("dshard_test", "FRAGMENT")
    library.define("heavy(Tensor x) -> Tensor")
    heavy = torch.ops.dshard_test.heavy
    assert not _is_kept(heavy.default, (), {})
    register_flop_formula(heavy)(lambda *_, **__: 1)
    try:
        assert _is_kept(heavy.default, (), {})
    finally:
        del torch.utils.flop_counter.flop_registry[heavy]


def saved_in_graph(mode: str) -> int:
    """Bytes that a compiled block saves."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    block, saved = gpt().blocks[0], dict[int, int]()
    apply_checkpointing([block], mode)
    block.compile(backend="aot_eager", fullgraph=True)

    def pack(value: Tensor) -> Tensor:
        saved[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        block(torch.randn(8, 16, 32, requires_grad=True)).sum().backward()
    return sum(saved.values())


def test_a_graph_saves_less(worlds: WorldPool):
    none, selective, whole = (worlds.run(1, saved_in_graph, mode, timeout_s=240.0)[0] for mode in MODES)
    assert none > selective > whole
