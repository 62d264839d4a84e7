"""Every stock module of torch.nn that has parameters, and what else holds parameters, is its plain self when sharded.

The reference is the same module, unsharded, in the same process: it runs the inputs of all ranks, and its gradients are
averaged by hand. Each check compares one module in one world and is one case; their number is printed at the end.
"""

import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils import parametrizations, parametrize

import dshard
from dshard.testing import WorldPool, expect_error
from tests.kit import oracle

SEED = 11
TOLERANCE = 1e-6  # relative to the largest magnitude, where the order of additions may differ: 3 ranks and more

# --- the table of modules --------------------------------------------------------------------------------------------

G = torch.Generator


@dataclass(frozen=True, slots=True)
class Stock:
    """A stock module and what it is called with.

    Args:
        make: Builds it.
        inputs: (generator) to the arguments of its forward; None if it has no forward of its own.
        trains: Whether it runs in training mode.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[G], tuple[Any, ...]] | None
    trains: bool = True


def floats(*shape: int) -> Callable[[G], tuple[Any, ...]]:
    return lambda g: (torch.randn(shape, generator=g),)


def several(*shapes: tuple[int, ...]) -> Callable[[G], tuple[Any, ...]]:
    return lambda g: tuple(torch.randn(shape, generator=g) for shape in shapes)


def ids(high: int, *shape: int) -> Callable[[G], tuple[Any, ...]]:
    return lambda g: (torch.randint(0, high, shape, generator=g),)


def floats_and_classes(features: int, num_classes: int) -> Callable[[G], tuple[Any, ...]]:
    return lambda g: (torch.randn(6, features, generator=g), torch.randint(0, num_classes, (6,), generator=g))


def floats_and_one_cluster(g: G) -> tuple[Any, ...]:
    low, high = [(0, 3), (3, 7), (7, 11)][int(torch.randint(0, 3, (), generator=g))]
    return torch.randn(3, 6, generator=g), torch.randint(low, high, (3,), generator=g)


def floats_and_each_cluster(g: G) -> tuple[Any, ...]:
    return torch.randn(3, 6, generator=g), torch.tensor([1, 5, 9])


def bag(g: G) -> tuple[Any, ...]:
    return torch.randint(0, 7, (9,), generator=g), torch.tensor([0, 2, 5])


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)


def _decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True)


# Sizes are odd where the module allows, so that shards are uneven. A name up to the first blank is the class's.
MODULES: dict[str, Stock] = {
    "AdaptiveLogSoftmaxWithLoss": Stock(
        lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 11, [3, 7], div_value=2.0, head_bias=True), floats_and_each_cluster
    ),
    "AdaptiveLogSoftmaxWithLoss clusters-differ-by-rank": Stock(
        lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 11, [3, 7], div_value=2.0, head_bias=True), floats_and_one_cluster
    ),
    "BatchNorm1d": Stock(lambda: nn.BatchNorm1d(5), floats(4, 5)),
    "BatchNorm1d without-affine": Stock(lambda: nn.BatchNorm1d(5, affine=False), floats(4, 5)),
    "BatchNorm2d": Stock(lambda: nn.BatchNorm2d(5), floats(2, 5, 3, 3)),
    "BatchNorm3d": Stock(lambda: nn.BatchNorm3d(3), floats(2, 3, 2, 2, 2)),
    "Bilinear": Stock(lambda: nn.Bilinear(3, 4, 5), several((6, 3), (6, 4))),
    "Conv1d": Stock(lambda: nn.Conv1d(3, 5, 3), floats(2, 3, 8)),
    "Conv2d": Stock(lambda: nn.Conv2d(3, 5, 3, padding=1), floats(2, 3, 6, 6)),
    "Conv2d groups-circular": Stock(
        lambda: nn.Conv2d(6, 6, 3, padding=1, groups=3, padding_mode="circular"), floats(2, 6, 5, 5)
    ),
    "Conv3d": Stock(lambda: nn.Conv3d(2, 3, 2), floats(2, 2, 4, 4, 4)),
    "ConvTranspose1d": Stock(lambda: nn.ConvTranspose1d(3, 5, 3), floats(2, 3, 6)),
    "ConvTranspose2d": Stock(lambda: nn.ConvTranspose2d(3, 5, 3, stride=2), floats(2, 3, 4, 4)),
    "ConvTranspose3d": Stock(lambda: nn.ConvTranspose3d(2, 3, 2), floats(2, 2, 3, 3, 3)),
    "Embedding": Stock(lambda: nn.Embedding(7, 3), ids(7, 4, 2)),
    "Embedding padding-frequency": Stock(
        lambda: nn.Embedding(7, 3, padding_idx=2, scale_grad_by_freq=True), ids(7, 4, 2)
    ),
    "EmbeddingBag": Stock(lambda: nn.EmbeddingBag(7, 3), bag),
    "EmbeddingBag sum": Stock(lambda: nn.EmbeddingBag(7, 3, mode="sum", padding_idx=1), bag),
    "EmbeddingBag max": Stock(lambda: nn.EmbeddingBag(7, 3, mode="max"), bag),
    "GRU": Stock(lambda: nn.GRU(3, 5, num_layers=2, bidirectional=True), floats(4, 2, 3)),
    "GRUCell": Stock(lambda: nn.GRUCell(3, 5), several((2, 3), (2, 5))),
    "GroupNorm": Stock(lambda: nn.GroupNorm(3, 9), floats(2, 9, 4)),
    "InstanceNorm1d": Stock(lambda: nn.InstanceNorm1d(5, affine=True), floats(2, 5, 4)),
    "InstanceNorm2d": Stock(lambda: nn.InstanceNorm2d(5, affine=True, track_running_stats=True), floats(2, 5, 3, 3)),
    "InstanceNorm3d": Stock(lambda: nn.InstanceNorm3d(3, affine=True), floats(2, 3, 2, 2, 2)),
    "LSTM": Stock(lambda: nn.LSTM(3, 5, num_layers=2, bidirectional=True, batch_first=True), floats(2, 4, 3)),
    "LSTM projected": Stock(lambda: nn.LSTM(3, 5, proj_size=2), floats(4, 2, 3)),
    "LSTMCell": Stock(lambda: nn.LSTMCell(3, 5), floats(2, 3)),
    "LayerNorm": Stock(lambda: nn.LayerNorm(5), floats(4, 5)),
    "LayerNorm 2d": Stock(lambda: nn.LayerNorm((3, 5)), floats(4, 3, 5)),
    "Linear": Stock(lambda: nn.Linear(3, 5), floats(4, 3)),
    "Linear without-bias": Stock(lambda: nn.Linear(3, 4, bias=False), floats(4, 3)),
    "LinearCrossEntropyLoss": Stock(lambda: nn.LinearCrossEntropyLoss(3, 5, bias=True), floats_and_classes(3, 5)),
    "MultiheadAttention": Stock(
        lambda: nn.MultiheadAttention(6, 2, batch_first=True), several((2, 3, 6), (2, 4, 6), (2, 4, 6))
    ),
    "MultiheadAttention kdim-bias-kv": Stock(
        lambda: nn.MultiheadAttention(6, 2, kdim=5, vdim=3, add_bias_kv=True), several((3, 2, 6), (4, 2, 5), (4, 2, 3))
    ),
    "PReLU": Stock(nn.PReLU, floats(4, 3)),
    "PReLU 3": Stock(lambda: nn.PReLU(3), floats(4, 3)),
    "RMSNorm": Stock(lambda: nn.RMSNorm(5), floats(4, 5)),
    "RNN": Stock(lambda: nn.RNN(3, 5, nonlinearity="relu"), floats(4, 2, 3)),
    "RNNBase": Stock(lambda: nn.RNNBase("GRU", 3, 5), None),
    "RNNCell": Stock(lambda: nn.RNNCell(3, 5), floats(2, 3)),
    "RNNCellBase": Stock(lambda: nn.RNNCellBase(3, 5, bias=True, num_chunks=4), None),
    "SyncBatchNorm": Stock(lambda: nn.SyncBatchNorm(5), floats(4, 5), trains=False),  # training it takes a GPU
    "Transformer": Stock(
        lambda: nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True), several((2, 3, 4), (2, 5, 4))
    ),
    "TransformerDecoder": Stock(lambda: nn.TransformerDecoder(_decoder_layer(), 2), several((2, 3, 4), (2, 5, 4))),
    "TransformerDecoderLayer": Stock(_decoder_layer, several((2, 3, 4), (2, 5, 4))),
    "TransformerEncoder": Stock(
        lambda: nn.TransformerEncoder(_encoder_layer(), 2, norm=nn.LayerNorm(4)), floats(2, 3, 4)
    ),
    "TransformerEncoderLayer": Stock(_encoder_layer, floats(2, 3, 4)),
}

# Their parameters have no shape before the first forward, which makes them a module of the table above.
LAZY: dict[str, Stock] = {
    "LazyBatchNorm1d": Stock(nn.LazyBatchNorm1d, floats(4, 5)),
    "LazyBatchNorm2d": Stock(nn.LazyBatchNorm2d, floats(2, 5, 3, 3)),
    "LazyBatchNorm3d": Stock(nn.LazyBatchNorm3d, floats(2, 3, 2, 2, 2)),
    "LazyConv1d": Stock(lambda: nn.LazyConv1d(5, 3), floats(2, 3, 8)),
    "LazyConv2d": Stock(lambda: nn.LazyConv2d(5, 3), floats(2, 3, 6, 6)),
    "LazyConv3d": Stock(lambda: nn.LazyConv3d(3, 2), floats(2, 2, 4, 4, 4)),
    "LazyConvTranspose1d": Stock(lambda: nn.LazyConvTranspose1d(5, 3), floats(2, 3, 6)),
    "LazyConvTranspose2d": Stock(lambda: nn.LazyConvTranspose2d(5, 3), floats(2, 3, 4, 4)),
    "LazyConvTranspose3d": Stock(lambda: nn.LazyConvTranspose3d(3, 2), floats(2, 2, 3, 3, 3)),
    "LazyInstanceNorm1d": Stock(lambda: nn.LazyInstanceNorm1d(affine=True), floats(2, 5, 4)),
    "LazyInstanceNorm2d": Stock(lambda: nn.LazyInstanceNorm2d(affine=True), floats(2, 5, 3, 3)),
    "LazyInstanceNorm3d": Stock(lambda: nn.LazyInstanceNorm3d(affine=True), floats(2, 3, 2, 2, 2)),
    "LazyLinear": Stock(lambda: nn.LazyLinear(5), floats(4, 3)),
}

# Classes without parameters that cannot be built from nothing or from ones.
BARE: dict[str, Callable[[], nn.Module]] = {
    "DataParallel": lambda: nn.DataParallel(nn.ReLU()),
    "FractionalMaxPool2d": lambda: nn.FractionalMaxPool2d(2, output_size=2),
    "FractionalMaxPool3d": lambda: nn.FractionalMaxPool3d(2, output_size=2),
    "Unflatten": lambda: nn.Unflatten(0, (1, 1)),
}

pytestmark = [pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")]

SAMPLE = ("Linear", "Conv2d", "LSTM", "MultiheadAttention", "TransformerEncoderLayer", "AdaptiveLogSoftmaxWithLoss")
EVERYWHERE = [(2, name) for name in MODULES] + [(n, name) for n in (1, 3, 4) for name in SAMPLE]


def class_of(name: str) -> str:
    return name.partition(" ")[0]


def build(name: str, seed: int = SEED) -> nn.Module:
    """The module, with the same weights wherever the seed is the same; biases that start at zero are drawn too."""
    torch.manual_seed(seed)
    module = MODULES[name].make().train(MODULES[name].trains)
    with torch.no_grad():
        for p in module.parameters():
            if not p.is_meta and p.numel() and bool((p == p.reshape(-1)[0]).all()):
                p.add_(torch.randn(p.shape) * 0.1)
    return module


def inputs_of(stock: Stock, rank: int, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """The arguments of rank `rank`."""
    assert stock.inputs is not None
    values = stock.inputs(torch.Generator().manual_seed(1_000 + rank))
    return tuple(v.to(dtype) if dtype and v.is_floating_point() else v for v in values)


# --- the kit ---------------------------------------------------------------------------------------------------------


class Counted:
    """Cases that the tests of this file ran."""

    cases: ClassVar[Counter[str]] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _print_the_count() -> Iterator[None]:
    Counted.cases.clear()
    yield
    total = sum(Counted.cases.values())
    print(f"\n{total} cases of modules: " + ", ".join(f"{n} {name}" for name, n in sorted(Counted.cases.items())))


def count(kind: str, number: int = 1) -> None:
    Counted.cases[kind] += number


def tensors_in(value: Any) -> list[Tensor]:
    """Floating tensors in the result of a forward."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() or value.is_complex() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [t for item in items for t in tensors_in(item)]


def loss_of(output: Any) -> Tensor:
    """A scalar that weighs every element differently."""
    total: Any = 0.0
    for t in tensors_in(output):
        places = torch.arange(t.numel(), dtype=torch.float64).mul(0.7).cos().reshape(t.shape).to(t.dtype)
        total = total + (t * places).sum()
    return total.real if total.is_complex() else total


def full(tensor: Tensor) -> Tensor:
    """A plain copy."""
    with torch.no_grad():
        return (tensor.full_tensor() if isinstance(tensor, dshard.ShardedTensor) else tensor).detach().clone()


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {n: full(p) for n, p in module.named_parameters()}


def all_state(module: nn.Module) -> dict[str, Tensor]:
    return {n: full(t) for n, t in (*module.named_parameters(), *module.named_buffers())}


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else full(p.grad) for n, p in module.named_parameters()}


def mean_grads(plain: nn.Module, step: Callable[[nn.Module, int], Tensor], ranks: Iterable[int]) -> None:
    """Leave in `.grad` of a plain module the mean over ranks, added in pairs, and the buffers of this rank."""
    found: dict[str, list[Tensor]] = {}
    ranks = list(ranks)
    named = dict(plain.named_parameters())
    before = {n: b.clone() for n, b in plain.named_buffers()}
    after = before
    for rank in ranks:
        plain.zero_grad()
        step(plain, rank).backward()
        if rank == dist.get_rank():
            after = {n: b.clone() for n, b in plain.named_buffers()}
        for n, b in plain.named_buffers():
            b.copy_(before[n])
        for n, p in named.items():
            if p.grad is not None:
                found.setdefault(n, []).append(p.grad)
    for n, b in plain.named_buffers():
        b.copy_(after[n])
    for n, p in named.items():
        if n in found:  # what has 16 bits is added in fp32
            wide = [g.float() if g.itemsize == 2 else g for g in found[n]]
            p.grad = (oracle.sum_in_pairs(wide) / len(ranks)).to(p.dtype)
        else:
            p.grad = None


def differences(found: Any, expected: Any, tolerance: float = 0.0) -> list[str]:
    """Names whose tensors differ by more than `tolerance` relative to the largest magnitude; 0 for bit for bit."""
    if found.keys() != expected.keys():
        return [f"keys {sorted(found.keys() ^ expected.keys())}"]
    wrong = []
    for name, b in expected.items():
        a = found[name]
        if a is None or b is None:
            if a is not b:
                wrong.append(f"{name}: {a} is not {b}")
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            wrong.append(f"{name}: {tuple(a.shape)} {a.dtype} is not {tuple(b.shape)} {b.dtype}")
        elif not torch.equal(a, b):
            off = (a - b).abs().max().item() / max(b.abs().max().item(), 1e-30)
            if not off <= tolerance:
                wrong.append(f"{name}: off by {off:.2g}")
    return wrong


def exact_at_two() -> float:
    """Two addends have one order; from three on, a reduction may add in another than ours."""
    return 0.0 if dist.get_world_size() <= 2 else TOLERANCE


def numbered(values: list[Tensor]) -> dict[str, Tensor]:
    return {str(i): v.detach() for i, v in enumerate(values)}


def reinitialise(module: nn.Module) -> None:
    """As code that initialises a meta-device model does: every module's own method, in order."""
    for m in module.modules():
        for method in ("_reset_parameters", "reset_parameters"):
            if hasattr(m, method):
                getattr(m, method)()
                break


def check(
    worlds: WorldPool, num_ranks: int, kind: str, fn: Callable[..., list[str]], *args: Any, cases: int = 1
) -> None:
    """Run a function that returns what is wrong, on every rank."""
    count(kind, cases)
    assert worlds.run(num_ranks, fn, *args) == [[] for _ in range(num_ranks)]


# --- the enumeration -------------------------------------------------------------------------------------------------


def stock_classes() -> dict[str, type[nn.Module]]:
    found = {n: getattr(nn, n) for n in dir(nn)}
    return {n: c for n, c in found.items() if inspect.isclass(c) and issubclass(c, nn.Module)}


def without_parameters(name: str, cls: type[nn.Module]) -> bool:
    """Whether instances have none; fails for a class that cannot be built without knowing it."""
    if name in BARE:
        return not list(BARE[name]().parameters())
    for args in ((), (1,), (1, 1)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return not list(cls(*args).parameters())
        except TypeError:
            continue
    return False


def test_every_module_of_torch_nn_with_parameters_is_in_the_tables():
    listed = {class_of(name) for name in (*MODULES, *LAZY)}
    unlisted = {n for n, c in stock_classes().items() if n not in listed and not without_parameters(n, c)}
    assert unlisted == set(), "add these to MODULES, or to BARE if they have no parameters"
    assert listed <= stock_classes().keys()
    assert all(type(s.make()).__name__ == class_of(n) for n, s in (*MODULES.items(), *LAZY.items()))
    assert len(listed) >= 48


# --- stock modules ---------------------------------------------------------------------------------------------------


def forward_and_backward(name: str) -> list[str]:
    plain, sharded = build(name), build(name)
    stock, rank, num_ranks = MODULES[name], dist.get_rank(), dist.get_world_size()
    dshard.fully_shard(sharded)
    if stock.inputs is None:
        return differences(weights(sharded), weights(plain))
    reference, wrong = copy.deepcopy(plain), list[str]()
    for _ in range(3):  # from the second time on dshard knows in which order units are used
        torch.manual_seed(SEED)
        output = sharded(*inputs_of(stock, rank))
        torch.manual_seed(SEED)
        expected = reference(*inputs_of(stock, rank))
        wrong += differences(numbered(tensors_in(output)), numbered(tensors_in(expected)))
        wrong += [f"output {i} is sharded" for i, t in enumerate(tensors_in(output)) if type(t) is not Tensor]
        assert tensors_in(output), "a case that compares nothing"
        sharded.zero_grad()
        if loss_of(output).requires_grad:
            loss_of(output).backward()
        buffers = {n: b.clone() for n, b in sharded.named_buffers()}
        wrong += differences(buffers, dict(reference.named_buffers()))
    if list(plain.parameters()):
        mean_grads(plain, lambda m, r: loss_of(m(*inputs_of(stock, r))), range(num_ranks))
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in plain.parameters())
    return wrong + differences(grads(sharded), grads(plain), exact_at_two())


@pytest.mark.parametrize(("num_ranks", "name"), EVERYWHERE)
def test_forward_is_the_plain_modules_bit_for_bit_and_gradients_are_its_mean_over_the_ranks(
    worlds: WorldPool, num_ranks, name
):
    check(worlds, num_ranks, "forward and backward", forward_and_backward, name)


def reset(name: str) -> list[str]:
    plain, sharded = build(name), build(name)
    dshard.fully_shard(sharded)
    before = all_state(sharded)
    for module, seed in ((plain, SEED + 1), (sharded, SEED + 1 + dist.get_rank())):  # seeds that differ, but on rank 0
        torch.manual_seed(seed)
        reinitialise(module)
        reinitialise(module)  # goes on where the first left the generator
    wrong = differences(all_state(sharded), all_state(plain))
    if list(plain.parameters()) and not differences(all_state(sharded), before):
        wrong.append("nothing was initialised")
    for module in (plain, sharded):
        torch.manual_seed(SEED)
        reinitialise(module)
        if module is plain:
            expected = torch.get_rng_state()
    return wrong + ([] if torch.equal(torch.get_rng_state(), expected) else ["the generator's state differs"])


@pytest.mark.parametrize(("num_ranks", "name"), EVERYWHERE)
def test_reset_parameters_gives_the_bits_of_the_plain_module_with_rank_0s_seed(worlds: WorldPool, num_ranks, name):
    check(worlds, num_ranks, "reset_parameters", reset, name)


def init_after_meta(name: str) -> list[str]:
    results = []
    for is_sharded in (False, True):
        with torch.device("meta"):
            module = MODULES[name].make()
        if is_sharded:
            dshard.fully_shard(module)
        module.to_empty(device="cpu")
        with torch.no_grad():
            for t in (*module.parameters(), *module.buffers()):
                t.zero_()  # what no initialiser touches would be whatever the memory held
        torch.manual_seed(SEED + (dist.get_rank() if is_sharded else 0))
        reinitialise(module)
        results.append(module)
    plain, sharded = results
    wrong = [f"{n} is {type(p).__name__}" for n, p in sharded.named_parameters() if type(p) is not dshard.ShardedTensor]
    stock = MODULES[name]
    if stock.inputs is not None:
        for module in results:
            module.train(stock.trains)
        args = inputs_of(stock, dist.get_rank())
        wrong += differences(numbered(tensors_in(sharded(*args))), numbered(tensors_in(plain(*args))))
    return wrong + differences(all_state(sharded), all_state(plain))


@pytest.mark.parametrize(("num_ranks", "name"), EVERYWHERE)
def test_meta_then_to_empty_then_an_init_gives_the_bits_of_the_plain_module(worlds: WorldPool, num_ranks, name):
    check(worlds, num_ranks, "meta init", init_after_meta, name)


def state_dicts(name: str) -> list[str]:
    plain, sharded = build(name), build(name)
    dshard.fully_shard(sharded)
    wrong = [] if list(sharded.state_dict()) == list(plain.state_dict()) else ["keys or their order"]
    wrong += differences({n: full(t) for n, t in sharded.state_dict().items()}, plain.state_dict())
    other = build(name, SEED + 5).state_dict()
    result = sharded.load_state_dict(other)
    wrong += [f"reported {result}"] if result.missing_keys or result.unexpected_keys else []
    wrong += differences({n: full(t) for n, t in sharded.state_dict().items()}, other)
    if list(plain.parameters()) and not differences(other, plain.state_dict()):
        wrong.append("nothing was loaded")
    if MODULES[name].inputs is not None:
        plain.load_state_dict(other)
        args = inputs_of(MODULES[name], dist.get_rank())
        wrong += differences(numbered(tensors_in(sharded(*args))), numbered(tensors_in(plain(*args))))
    return wrong


@pytest.mark.parametrize(("num_ranks", "name"), EVERYWHERE)
def test_state_dict_has_the_plain_keys_and_values_and_a_full_one_loads(worlds: WorldPool, num_ranks, name):
    check(worlds, num_ranks, "state dict", state_dicts, name)


def copies(name: str) -> list[str]:
    plain, sharded = build(name), build(name)
    stock, rank = MODULES[name], dist.get_rank()
    dshard.fully_shard(sharded)
    copied = copy.deepcopy(sharded)
    wrong = differences(all_state(copied), all_state(plain))
    with torch.no_grad():
        for p in sharded.parameters():
            p.add_(1.0)
    wrong += differences(weights(copied), weights(plain))  # the copy has memory of its own
    if stock.inputs is None or not list(plain.parameters()):
        return wrong
    reference = copy.deepcopy(plain)
    output = copied(*inputs_of(stock, rank))
    wrong += differences(numbered(tensors_in(output)), numbered(tensors_in(reference(*inputs_of(stock, rank)))))
    loss_of(output).backward()
    mean_grads(plain, lambda m, r: loss_of(m(*inputs_of(stock, r))), range(dist.get_world_size()))
    wrong += differences(grads(copied), grads(plain), exact_at_two())
    return wrong + [f"{n} of the original has a gradient" for n, g in grads(sharded).items() if g is not None]


@pytest.mark.parametrize(("num_ranks", "name"), EVERYWHERE)
def test_a_deep_copy_trains_as_the_plain_module_and_shares_nothing(worlds: WorldPool, num_ranks, name):
    check(worlds, num_ranks, "deep copy", copies, name)


# Plain attention takes a fused path in eval that torch closes to tensor subclasses; it adds in another order.
FUSED_IN_EVAL = ("MultiheadAttention", "Transformer")


def evaluate(name: str) -> list[str]:
    plain, sharded = build(name).eval(), build(name)
    stock, rank = MODULES[name], dist.get_rank()
    dshard.fully_shard(sharded)
    sharded.eval()
    wrong = []
    tolerance = TOLERANCE if name.startswith(FUSED_IN_EVAL) else 0.0
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad) * 2:
        with mode():
            args = inputs_of(stock, rank)
            wrong += differences(numbered(tensors_in(sharded(*args))), numbered(tensors_in(plain(*args))), tolerance)
    sharded.train(stock.trains)
    plain.train(stock.trains)
    wrong += differences(numbered(tensors_in(sharded(*args))), numbered(tensors_in(plain(*args))))
    return wrong


CALLED = [(n, name) for n, name in EVERYWHERE if MODULES[name].inputs is not None]


@pytest.mark.parametrize(("num_ranks", "name"), CALLED)
def test_eval_forward_under_no_grad_and_inference_mode_is_the_plain_modules(worlds: WorldPool, num_ranks, name):
    check(worlds, num_ranks, "eval forward", evaluate, name)


def in_double(name: str) -> list[str]:
    plain, sharded = build(name).double(), build(name)
    stock = MODULES[name]
    dshard.fully_shard(sharded)
    sharded.double()
    wrong = differences(all_state(sharded), all_state(plain))

    def step(module: nn.Module, rank: int) -> Tensor:
        return loss_of(module(*inputs_of(stock, rank, torch.float64)))

    if stock.inputs is None or not list(plain.parameters()):
        return wrong
    step(sharded, dist.get_rank()).backward()
    mean_grads(plain, step, range(dist.get_world_size()))
    return wrong + differences(grads(sharded), grads(plain), 0.0 if dist.get_world_size() <= 2 else 1e-14)


@pytest.mark.parametrize(("num_ranks", "name"), EVERYWHERE)
def test_after_double_a_module_has_the_values_and_gradients_of_the_plain_one(worlds: WorldPool, num_ranks, name):
    check(worlds, num_ranks, "double", in_double, name)


def lazy_after_a_dry_run(name: str) -> list[str]:
    modules = []
    for _ in range(2):
        torch.manual_seed(SEED)
        module = LAZY[name].make()
        module(*inputs_of(LAZY[name], 0))
        modules.append(module)
    plain, sharded = modules
    dshard.fully_shard(sharded)
    loss_of(sharded(*inputs_of(LAZY[name], dist.get_rank()))).backward()
    mean_grads(plain, lambda m, r: loss_of(m(*inputs_of(LAZY[name], r))), range(dist.get_world_size()))
    return differences(weights(sharded), weights(plain)) + differences(grads(sharded), grads(plain), exact_at_two())


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_module_after_its_dry_run_is_the_plain_one(worlds: WorldPool, name):
    check(worlds, 2, "lazy", lazy_after_a_dry_run, name)


def shard_unmaterialised(name: str) -> None:
    dshard.fully_shard(nn.Sequential(nn.ReLU(), LAZY[name].make()))


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_module_before_its_dry_run_raises_and_names_the_parameter(worlds: WorldPool, name):
    count("lazy raises")
    for kind, message in expect_error(worlds.get_world(2), shard_unmaterialised, name):
        assert kind in ("StateError", "UnsupportedOpError"), (kind, message)
        assert "1.weight" in message
        assert "forward" in message  # the way out


# --- modules that hold parameters in other ways ----------------------------------------------------------------------


class Lists(nn.Module):
    """ParameterList and ParameterDict, one inside another; one parameter is in both."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.randn(3, 5), torch.randn(5, 2)])
        self.named = nn.ParameterDict({"scale": torch.randn(2), "shift": nn.Parameter(torch.randn(2))})
        self.nested = nn.ParameterDict({"inner": nn.ParameterList([torch.randn(2, 2)])})
        self.rows.append(self.named["shift"])

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows[:2]:
            x = torch.tanh(x @ row)
        for scale in self.named.values():
            x = x * scale
        return x @ self.nested["inner"][0] + self.rows[-1]


class Containers(nn.Module):
    """Containers without a forward: a ModuleList, a ModuleDict, and a module of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 3)])
        self.named = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Sequential(nn.Linear(3, 7), nn.ReLU())})
        self.bag = nn.Module()
        self.bag.head = nn.Linear(7, 2)
        self.bag.gain = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.listed:
            x = layer(x)
        for layer in self.named.values():
            x = layer(x)
        return self.bag.head(x) * self.bag.gain


class Shared(nn.Module):
    """One module at two places, and used twice more."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.middle = nn.Sequential(nn.Linear(5, 5), self.first)
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.again(torch.tanh(self.middle(self.first(x)))))


class Tied(nn.Module):
    """Uneven weights tied within a block, across blocks, and to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].weight = self.blocks[0].weight
        self.alias = self.blocks[0].bias

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x + self.alias)


class Dtypes(nn.Module):
    """Parameters of six dtypes, all in one unit; the integers are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.randn(5, 3))
        self.brain = nn.Parameter(torch.randn(3, 3).bfloat16())
        self.float16 = nn.Parameter(torch.randn(3).half())
        self.float64 = nn.Parameter(torch.randn(3, 4).double())
        self.phase = nn.Parameter(torch.randn(4, 2, dtype=torch.complex64))
        self.index = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True, False]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ (self.single * self.mask[:, None])
        x = (x.bfloat16() @ self.brain).float() + self.float16.float()
        return ((x[:, self.index].double() @ self.float64).to(torch.complex64) @ self.phase).abs()


class Strided(nn.Module):
    """Parameters whose memory is transposed, channels-last, or has gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.gaps = nn.Parameter(torch.randn(6, 4)[::2, 1:3])

    def forward(self, x: Tensor) -> Tensor:
        return self.conv((x @ self.turned[:, :2]).reshape(-1, 2, 4, 4)).flatten(2).sum(-1) @ self.gaps


class LoRA(nn.Module):
    """A frozen base and trained factors."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 7).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 5))
        self.up = nn.Parameter(torch.randn(7, 2))
        self.norm = nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.base(x) + x @ self.down.t() @ self.up.t())


def _old(name: str) -> Callable[..., nn.Module]:
    """`torch.nn.utils.weight_norm` and `spectral_norm`; the former says that it is deprecated."""

    def apply(module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return getattr(nn.utils, name)(module)

    return apply


class Symmetric(nn.Module):
    """A parametrization of the user's own, with a right inverse and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x.triu() + x.triu(1).t())

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu() / self.gain


def _symmetric(module: nn.Linear) -> nn.Linear:
    module.weight.data.copy_(module.weight.data.triu() + module.weight.data.triu(1).t())
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module


def _with(change: Callable[[Any], nn.Module], make: Callable[[], nn.Module] = lambda: nn.Linear(5, 5)) -> Any:
    return lambda: nn.Sequential(change(make()), nn.Tanh(), nn.Linear(5, 3))


def _orthogonal(map_name: str, **options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda m: parametrizations.orthogonal(m, orthogonal_map=map_name, **options)


def _both(module: nn.Module) -> nn.Module:
    return parametrizations.spectral_norm(parametrizations.orthogonal(module))


def conv_images(g: G) -> tuple[Any, ...]:
    return (torch.randn(2, 2, 4, 5, generator=g),)


def _conv(change: Callable[[Any], nn.Module]) -> Any:
    return lambda: nn.Sequential(change(nn.Conv2d(2, 5, 3)), nn.Flatten(), nn.Linear(30, 2))


BUILT: dict[str, Stock] = {
    "parameter lists and dicts": Stock(Lists, floats(4, 3)),
    "containers without forward": Stock(Containers, floats(4, 3)),
    "shared modules": Stock(Shared, floats(4, 5)),
    "tied weights": Stock(Tied, ids(7, 4, 2)),
    "dtypes": Stock(Dtypes, floats(4, 5)),
    "strides": Stock(Strided, floats(8, 2, 2, 5)),
    "lora": Stock(LoRA, floats(4, 5)),
    "old weight_norm": Stock(_with(_old("weight_norm")), floats(4, 5)),
    "old weight_norm of a conv": Stock(_conv(_old("weight_norm")), conv_images),
    "old spectral_norm": Stock(_with(_old("spectral_norm")), floats(4, 5)),
    "weight_norm": Stock(_with(parametrizations.weight_norm), floats(4, 5)),
    "weight_norm of a conv": Stock(_conv(parametrizations.weight_norm), conv_images),
    "weight_norm of an LSTM": Stock(
        lambda: parametrizations.weight_norm(nn.LSTM(3, 5), "weight_hh_l0"), floats(4, 2, 3)
    ),
    "spectral_norm": Stock(_with(parametrizations.spectral_norm), floats(4, 5)),
    "spectral_norm of a conv": Stock(_conv(parametrizations.spectral_norm), conv_images),
    "orthogonal by matrix_exp": Stock(_with(_orthogonal("matrix_exp")), floats(4, 5)),
    "orthogonal by cayley": Stock(_with(_orthogonal("cayley")), floats(4, 5)),
    "orthogonal by householder": Stock(_with(_orthogonal("householder")), floats(4, 5)),
    "orthogonal, not trivialised": Stock(_with(_orthogonal("matrix_exp", use_trivialization=False)), floats(4, 5)),
    "orthogonal, wide": Stock(_with(parametrizations.orthogonal, lambda: nn.Linear(7, 5)), floats(4, 7)),
    "a parametrization with a parameter": Stock(_with(_symmetric), floats(4, 5)),
    "two parametrizations": Stock(_with(_both), floats(4, 5)),
}


def units_in(module: nn.Module) -> list[nn.Module]:
    """Children that may be units of their own: bottom-up, as with FSDP2."""
    return [m for m in module.children() if any(True for _ in m.parameters())]


def tolerance_of(module: nn.Module) -> float:
    """As `exact_at_two`; bfloat16 rounds to 2^-8 of a sum, in whatever order it is added."""
    is_coarse = any(p.dtype == torch.bfloat16 for p in module.parameters())
    return 5e3 * exact_at_two() if is_coarse else exact_at_two()


def train_both(plain: nn.Module, sharded: nn.Module, stock: Stock, num_steps: int, rate: float = 0.1) -> list[str]:
    """SGD steps of both; gradients, weights and buffers are compared after each."""
    tolerance = tolerance_of(plain)
    pairs = [(m, torch.optim.SGD([p for p in m.parameters() if p.requires_grad], rate)) for m in (plain, sharded)]
    wrong: list[str] = []
    start = {n: w.clone() for n, w in all_state(plain).items()}

    def step_loss(module: nn.Module, rank: int) -> Tensor:
        return loss_of(module(*inputs_of(stock, rank + 10 * step)))

    for step in range(num_steps):
        wide = tolerance * (step + 1)
        sharded.zero_grad()
        step_loss(sharded, dist.get_rank()).backward()
        mean_grads(plain, step_loss, range(dist.get_world_size()))
        wrong += differences(grads(sharded), grads(plain), wide)
        for _, optimizer in pairs:
            optimizer.step()
        wrong += [f"step {step}: {w}" for w in differences(all_state(sharded), all_state(plain), wide)]
    if not differences(all_state(plain), start):
        wrong.append("nothing was trained")
    return wrong


def make_built(name: str) -> nn.Module:
    torch.manual_seed(SEED)
    return BUILT[name].make()


def train_built(name: str, bottom_up: bool) -> list[str]:
    plain, sharded = make_built(name), make_built(name)
    before = [(n, tuple(p.shape), p.stride(), p.dtype, p.requires_grad) for n, p in sharded.named_parameters()]
    ties = [n for n, _ in sharded.named_parameters(remove_duplicate=False)]
    for unit in units_in(sharded) if bottom_up else ():
        dshard.fully_shard(unit)
    dshard.fully_shard(sharded)
    wrong = [] if [n for n, _ in sharded.named_parameters(remove_duplicate=False)] == ties else ["names"]
    after = [(n, tuple(p.shape), p.stride(), p.dtype, p.requires_grad) for n, p in sharded.named_parameters()]
    dense = [(n, s, torch.empty_strided(s, st).clone().stride(), d, r) for n, s, st, d, r in before]
    if after not in (before, dense):
        wrong.append(f"{after} is not {before}")
    wrong += differences(all_state(sharded), all_state(plain)) + train_both(plain, sharded, BUILT[name], 3)
    if list(sharded.state_dict()) != list(plain.state_dict()):
        wrong.append("keys of the state dict")
    clone = make_built(name)
    clone.load_state_dict({n: full(t) for n, t in sharded.state_dict().items()})
    return wrong + differences(all_state(clone), all_state(plain), 4 * tolerance_of(plain))


@pytest.mark.parametrize("name", BUILT)
def test_what_holds_parameters_in_other_ways_trains_as_the_plain_module(worlds: WorldPool, name):
    for num_ranks, bottom_up in ((2, False), (2, True), (3, False), (1, True), (4, True)):
        if num_ranks < 3 or name in ("dtypes", "strides", "tied weights", "parameter lists and dicts"):
            check(worlds, num_ranks, "built", train_built, name, bottom_up, cases=3)


def container_units(kind: str) -> list[str]:
    """`fully_shard` on the container itself."""
    torch.manual_seed(SEED)
    parts = {
        "ModuleList": lambda: nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 3)]),
        "ModuleDict": lambda: nn.ModuleDict({"a": nn.Linear(5, 5), "b": nn.Linear(5, 3)}),
        "ParameterList": lambda: nn.ParameterList([torch.randn(5, 5), torch.randn(5, 3)]),
        "ParameterDict": lambda: nn.ParameterDict({"a": torch.randn(5, 5), "b": torch.randn(5, 3)}),
    }
    plain = parts[kind]()
    sharded = copy.deepcopy(plain)
    dshard.fully_shard(sharded)

    def run(container: Any, rank: int) -> Tensor:
        (x,) = inputs_of(Stock(nn.Identity, floats(4, 5)), rank)
        for part in container.values() if hasattr(container, "values") else container:
            x = part(x) if isinstance(part, nn.Module) else x @ part
        return loss_of(x)

    loss = run(sharded, dist.get_rank())
    wrong = [] if torch.equal(loss, run(plain, dist.get_rank())) else ["loss"]
    loss.backward()
    mean_grads(plain, run, range(dist.get_world_size()))
    if {type(p) for p in sharded.parameters()} != {dshard.ShardedTensor}:
        wrong.append("not sharded")
    return wrong + differences(grads(sharded), grads(plain), exact_at_two())


@pytest.mark.parametrize("kind", ["ModuleList", "ModuleDict", "ParameterList", "ParameterDict"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_container_that_is_sharded_itself_is_used_like_the_plain_one(worlds: WorldPool, num_ranks, kind):
    check(worlds, num_ranks, "containers", container_units, kind)


# --- parametrizations that come after sharding -----------------------------------------------------------------------

AFTER = {
    "spectral_norm": lambda m: parametrizations.spectral_norm(m[0]),
    "old spectral_norm": lambda m: _old("spectral_norm")(m[0]),
    "weight_norm": lambda m: parametrizations.weight_norm(m[0]),
    "old weight_norm": lambda m: _old("weight_norm")(m[0]),
    "orthogonal": lambda m: parametrizations.orthogonal(m[0]),
    "orthogonal by householder": lambda m: parametrizations.orthogonal(m[0], orthogonal_map="householder"),
    "orthogonal by cayley": lambda m: parametrizations.orthogonal(m[0], orthogonal_map="cayley"),
}


def parametrized_after(kind: str, used_before: bool) -> list[str]:
    stock = Stock(lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)), floats(4, 5))
    modules = []
    for is_sharded in (False, True):
        torch.manual_seed(SEED)
        module = stock.make()
        if is_sharded:
            dshard.fully_shard(module)
        if used_before:
            with torch.no_grad():
                module(*inputs_of(stock, 0))
        torch.manual_seed(SEED + 1)
        AFTER[kind](module)
        modules.append(module)
    plain, sharded = modules
    return differences(all_state(sharded), all_state(plain)) + train_both(plain, sharded, stock, 2)


@pytest.mark.parametrize("kind", AFTER)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_parametrization_of_a_sharded_module_trains_as_on_the_plain_module(worlds: WorldPool, num_ranks, kind):
    for used_before in (False, True):
        check(worlds, num_ranks, "parametrized after", parametrized_after, kind, used_before, cases=2)


# --- torch.nn.init ---------------------------------------------------------------------------------------------------

INITS: dict[str, list[tuple[tuple[int, ...], dict[str, Any]]]] = {
    "constant_": [((5, 3), {"val": 0.3}), ((), {"val": 2.0}), ((0, 3), {"val": 1.0})],
    "dirac_": [((5, 3, 3), {}), ((6, 2, 3, 3), {"groups": 3}), ((3, 5, 1, 2, 3), {})],
    "eye_": [((5, 3), {}), ((3, 7), {}), ((1, 1), {})],
    "kaiming_normal_": [((5, 3), {}), ((3, 2, 3, 3), {"mode": "fan_out", "nonlinearity": "relu"})],
    "kaiming_uniform_": [((5, 3), {"a": 0.5}), ((3, 2, 3), {"mode": "fan_out", "nonlinearity": "tanh"})],
    "normal_": [((5, 3), {"mean": 0.5, "std": 2.0}), ((17,), {}), ((), {}), ((1, 40), {})],
    "ones_": [((5, 3), {}), ((), {})],
    "orthogonal_": [((5, 3), {}), ((3, 5), {"gain": 0.5}), ((7, 2, 2), {}), ((4, 4), {})],
    "sparse_": [((5, 3), {"sparsity": 0.4}), ((3, 7), {"sparsity": 0.9, "std": 1.0})],
    "trunc_normal_": [((5, 3), {}), ((33,), {"std": 0.1, "a": -0.15, "b": 0.15})],
    "uniform_": [((5, 3), {"a": -2.0, "b": 0.5}), ((), {}), ((0, 3), {}), ((40, 1), {})],
    "xavier_normal_": [((5, 3), {"gain": 1.5}), ((3, 2, 3, 3), {})],
    "xavier_uniform_": [((5, 3), {}), ((4, 2, 3), {"gain": 0.7})],
    "zeros_": [((5, 3), {}), ((0,), {})],
}
RANDOM_INITS = {n for n in INITS if n not in ("constant_", "dirac_", "eye_", "ones_", "zeros_")}
DEPRECATED_INITS = {
    "constant", "dirac", "eye", "kaiming_normal", "kaiming_uniform", "normal", "orthogonal", "sparse", "uniform",
    "xavier_normal", "xavier_uniform",
}  # fmt: skip


def test_every_function_of_torch_nn_init_is_in_the_table():
    found = {n for n, f in vars(nn.init).items() if inspect.isfunction(f) and not n.startswith("_")}
    assert found - {"calculate_gain"} == INITS.keys() | DEPRECATED_INITS


class Holder(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)


# How a parameter lies: cut along a dim or whole, and its memory contiguous or transposed.
LIES = ((0, False), (-1, False), (None, False), (0, True))


def init_pairs(name: str, lies: tuple[tuple[int | None, bool], ...]) -> Iterator[tuple[str, Any, Any, dict[str, Any]]]:
    for shape, options in INITS[name.removesuffix("_") + "_"]:
        for dim, is_turned in lies if shape else ((None, False),):
            if is_turned and name.startswith("orthogonal") and len(shape) > 2:
                continue  # torch itself cannot
            full_value = torch.full(shape[::-1] if is_turned else shape, 7.0)
            full_value = full_value.permute(*reversed(range(len(shape)))) if is_turned else full_value
            plain, sharded = Holder(full_value.clone()), Holder(full_value.clone())
            placement = Replicate() if dim is None else Shard(dim)
            dshard.fully_shard(sharded, shard_placement_fn=lambda p, placement=placement: placement)
            yield f"{shape} {options} dim={dim} turned={is_turned}", plain.value, sharded.value, options


def initialise_all(name: str) -> tuple[list[str], int]:
    wrong, number = [], 0
    function = getattr(nn.init, name)
    for label, plain, sharded, options in init_pairs(name, LIES):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, or without elements
            kinds = ["same seed", "seed per rank", "generator"] if name in RANDOM_INITS else ["same seed"]
            if name == "sparse_":  # draws plain tensors; see the next test
                kinds.remove("seed per rank")
            for kind in kinds:
                generators: list[dict[str, Any]] = [{}, {}]
                if kind == "generator":
                    generators = [{"generator": torch.Generator().manual_seed(3)} for _ in range(2)]
                torch.manual_seed(SEED)
                function(plain, **options, **generators[0])
                state = torch.get_rng_state()
                torch.manual_seed(SEED + (dist.get_rank() if kind == "seed per rank" else 0))
                result = function(sharded, **options, **generators[1])
                number += 1
                if result is not sharded:
                    wrong.append(f"{label} {kind}: returned {type(result).__name__}")
                if differences({"": full(sharded)}, {"": plain.detach()}):
                    wrong.append(f"{label} {kind}: other bits")
                if kind != "seed per rank" and not torch.equal(torch.get_rng_state(), state):
                    wrong.append(f"{label} {kind}: the generator's state differs")
                if kind == "generator" and not torch.equal(*(g["generator"].get_state() for g in generators)):
                    wrong.append(f"{label} {kind}: the given generator's state differs")
    return wrong, number


@pytest.mark.parametrize("name", sorted(INITS.keys() | DEPRECATED_INITS))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_torch_nn_init_gives_the_bits_of_the_unsharded_parameter(worlds: WorldPool, num_ranks, name):
    results = worlds.run(num_ranks, initialise_all, name)
    assert [wrong for wrong, _ in results] == [[] for _ in range(num_ranks)]
    assert results[0][1] >= 2
    count("init", results[0][1])


def sparse_with_seeds_of_their_own() -> None:
    _, _, sharded, options = next(init_pairs("sparse_", LIES))
    torch.manual_seed(SEED + dist.get_rank())
    full(nn.init.sparse_(sharded, **options))


def test_sparse_with_a_seed_per_rank_raises_for_it_draws_its_places_as_plain_tensors(worlds: WorldPool):
    for type_name, message in expect_error(worlds.get_world(2), sparse_with_seeds_of_their_own):
        assert type_name == "DivergenceError"
        assert "write the same" in message
    count("init")


def different_seeds_differ() -> bool:
    values = []
    for seed in (1, 2):
        _, _, sharded, _ = next(init_pairs("normal_", LIES))
        torch.manual_seed(seed)
        values.append(full(nn.init.normal_(sharded)))
    return torch.equal(*values)


def test_another_seed_initialises_otherwise(worlds: WorldPool):
    assert worlds.run(2, different_seeds_differ) == [False, False]


# --- memory formats --------------------------------------------------------------------------------------------------


def channels_last(when: str) -> list[str]:
    stock = Stock(lambda: nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 3, 3)), floats(2, 2, 7, 7))
    modules = []
    for is_sharded in (False, True):
        torch.manual_seed(SEED)
        module = stock.make()
        if when == "before" or not is_sharded:
            module = module.to(memory_format=torch.channels_last)
        if is_sharded:
            dshard.fully_shard(module)
        if when == "after" and is_sharded:
            module = module.to(memory_format=torch.channels_last)
        modules.append(module)
    plain, sharded = modules
    strides = [[p.stride() for p in m.parameters()] for m in modules]
    wrong = [] if strides[0] == strides[1] else [f"{strides[1]} is not {strides[0]}"]
    if not any(p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last) for p in sharded.parameters()):
        wrong.append("not channels-last")
    x = inputs_of(stock, 0)[0].to(memory_format=torch.channels_last)
    wrong += differences({"": sharded(x).detach()}, {"": plain(x).detach()})
    for module in modules:
        module.eval()  # so that buffers stay
    return wrong or train_both(plain, sharded, stock, 2)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_channels_last_of_before_and_after_sharding_keeps_strides_and_trains(worlds: WorldPool, num_ranks, when):
    check(worlds, num_ranks, "channels last", channels_last, when)


# --- frozen and toggled ----------------------------------------------------------------------------------------------


def toggled(bottom_up: bool) -> list[str]:
    """Freeze and thaw between steps; the reference does the same."""
    stock = Stock(
        lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3).requires_grad_(False)),
        floats(4, 5),
    )
    torch.manual_seed(SEED)
    plain = stock.make()
    sharded = copy.deepcopy(plain)
    for unit in units_in(sharded) if bottom_up else ():
        dshard.fully_shard(unit)
    dshard.fully_shard(sharded)
    schedule = [
        ("as built", lambda m: None),
        ("thaw the head", lambda m: m[3].requires_grad_(True)),
        ("freeze the first", lambda m: m[0].requires_grad_(False)),
        ("freeze a bias alone", lambda m: setattr(m[3].bias, "requires_grad", False)),
        ("thaw all", lambda m: m.requires_grad_(True)),
    ]
    wrong = []
    for label, change in schedule:
        for module in (plain, sharded):
            change(module)
            module.zero_grad()
        now = {n: p.requires_grad for n, p in sharded.named_parameters()}
        if now != {n: p.requires_grad for n, p in plain.named_parameters()}:
            wrong.append(f"{label}: {now}")
        wrong += [f"{label}: {w}" for w in train_both(plain, sharded, stock, 2)]
    return wrong


@pytest.mark.parametrize("bottom_up", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_requires_grad_that_is_toggled_between_steps_trains_as_on_the_plain_module(
    worlds: WorldPool, num_ranks, bottom_up
):
    check(worlds, num_ranks, "toggled", toggled, bottom_up, cases=5)


# --- tied weights on meta --------------------------------------------------------------------------------------------


def tied_on_meta(bottom_up: bool) -> list[str]:
    with torch.device("meta"):
        sharded = Tied()
    for unit in units_in(sharded) if bottom_up else ():
        dshard.fully_shard(unit)
    dshard.fully_shard(sharded)
    sharded.to_empty(device="cpu")
    wrong = []
    if sharded.head.weight is not sharded.embed.weight or sharded.blocks[1].weight is not sharded.blocks[0].weight:
        wrong.append("a tie within the model was cut")
    if sharded.alias is not sharded.blocks[0].bias:
        wrong.append("a tie to the root was cut")
    torch.manual_seed(SEED)
    plain = Tied()
    for module in (plain, sharded):
        torch.manual_seed(SEED + 3)
        reinitialise(module)
    if [n for n, _ in sharded.named_parameters()] != [n for n, _ in plain.named_parameters()]:
        wrong.append("names")
    return (
        wrong + differences(all_state(sharded), all_state(plain)) + train_both(plain, sharded, BUILT["tied weights"], 3)
    )


@pytest.mark.parametrize("bottom_up", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_uneven_tied_weights_stay_tied_through_meta_and_to_empty_and_train(worlds: WorldPool, num_ranks, bottom_up):
    check(worlds, num_ranks, "tied on meta", tied_on_meta, bottom_up)


# --- the comparison itself -------------------------------------------------------------------------------------------


def test_the_comparison_sees_one_flipped_bit_a_missing_key_and_another_dtype():
    value = torch.randn(4, 3)
    flipped = value.clone()
    flipped.view(-1).view(torch.int32)[5] ^= 1
    assert differences({"w": flipped}, {"w": value})
    assert not differences({"w": flipped}, {"w": value}, TOLERANCE)
    assert differences({"w": value + 4e-6 * value.abs().max()}, {"w": value}, TOLERANCE)
    assert differences({"v": value}, {"w": value})
    assert differences({"w": value.double()}, {"w": value}, TOLERANCE)
    assert differences({"w": None}, {"w": value})
    assert differences({"w": value * float("nan")}, {"w": value}, TOLERANCE)


def recurrent_where_cudnn_is() -> tuple[Tensor, Tensor]:
    """What a sharded LSTM and the plain one give, where the plain one's weights would be joined in one memory."""
    torch.manual_seed(0)
    plain, x = nn.LSTM(4, 4, num_layers=2), torch.randn(3, 2, 4)
    sharded = copy.deepcopy(plain)
    is_acceptable = torch.backends.cudnn.is_acceptable
    torch.backends.cudnn.is_acceptable = lambda tensor: True
    try:
        dshard.fully_shard(sharded)
        sharded.flatten_parameters()  # as programs call it in their forwards
        again = copy.deepcopy(sharded)
    finally:
        torch.backends.cudnn.is_acceptable = is_acceptable
    found = again(x)[0]
    dshard.to_plain(sharded)
    assert "flatten_parameters" not in vars(sharded)
    return found, plain(x)[0]


def test_recurrent_modules_are_sharded_where_cudnn_joins_their_weights(worlds: WorldPool):
    for found, expected in worlds.run(2, recurrent_where_cudnn_is):
        assert torch.equal(found, expected)
