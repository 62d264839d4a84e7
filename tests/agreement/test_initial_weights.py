"""Do the ranks start from the same model? And what is said when they, or the arguments, do not fit."""

import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy
from torch.distributed.tensor import Partial, Replicate, Shard

import dshard
from dshard.testing import WorldPool, expect_error


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))


def make(**spoil: Any) -> Net:
    """A net that is equal on all ranks but for what `spoil` names: parameter to (rank, index, value)."""
    torch.manual_seed(0)
    net = Net()
    for name, (rank, index, value) in spoil.items():
        if dist.get_rank() == rank:
            with torch.no_grad():
                net.get_parameter(name.replace("__", ".")).view(-1)[index] = value
    return net


def shard_spoiled(sync: Any, spoil: dict[str, Any]) -> dict[str, Tensor]:
    net = make(**spoil)
    dshard.fully_shard(net, sync=sync)
    with torch.no_grad():
        return {n: p.full_tensor() for n, p in net.named_parameters()}


ONE = {"last__weight": (1, 5, 3.25)}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_single_differing_element_is_found_and_its_parameter_named_on_every_rank(worlds: WorldPool, num_ranks):
    errors = expect_error(worlds.get_world(num_ranks), shard_spoiled, "check", ONE)
    assert [kind for kind, _ in errors] == ["DivergenceError"] * num_ranks
    for _, text in errors:
        assert text == (
            "fully_shard: all ranks must start from the same weights, but these differ between ranks: last.weight. "
            'Seed every rank alike before building the model, or pass sync="broadcast" to take those of rank 0.'
        )


@pytest.mark.parametrize("name", ["first.weight", "first.bias", "norm.weight", "scale"])
@pytest.mark.parametrize("rank", [0, 2])
def test_every_parameter_and_every_rank_is_looked_at(worlds: WorldPool, name, rank):
    spoil = {name.replace(".", "__"): (rank, 0, 0.125)}
    errors = expect_error(worlds.get_world(3), shard_spoiled, "check", spoil)
    assert all(f"differ between ranks: {name}. " in text for _, text in errors)


def test_all_differing_parameters_are_named_up_to_five(worlds: WorldPool):
    names = ["first__weight", "first__bias", "norm__weight", "norm__bias", "last__weight", "last__bias"]
    errors = expect_error(worlds.get_world(2), shard_spoiled, "check", dict.fromkeys(names, (1, 0, 9.0)))
    for _, text in errors:
        assert ": first.weight, first.bias, norm.weight, norm.bias, last.weight and 1 more. " in text


def shard_seeded_apart(sync: Any) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    net = Net()
    dshard.fully_shard(net, sync=sync)
    with torch.no_grad():
        return {n: p.full_tensor() for n, p in net.named_parameters()}


def test_the_check_is_the_default(worlds: WorldPool):
    errors = expect_error(worlds.get_world(2), shard_by_default)
    assert all("first.weight, first.bias, last.weight, last.bias. " in text for _, text in errors)


def shard_by_default() -> None:
    torch.manual_seed(dist.get_rank())
    dshard.fully_shard(Net())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_broadcast_takes_the_weights_of_rank_0(worlds: WorldPool, num_ranks):
    torch.manual_seed(0)
    expected = dict(Net().named_parameters())
    for weights in worlds.run(num_ranks, shard_seeded_apart, "broadcast"):
        assert [n for n in expected if not torch.equal(weights[n], expected[n])] == []


def test_sync_none_trusts_and_keeps_each_ranks_own_part(worlds: WorldPool):
    first, second = worlds.run(2, shard_seeded_apart, None)
    parts = []
    for rank in range(2):
        torch.manual_seed(rank)
        parts.append(Net().last.weight.detach()[rank : rank + 1])
    assert torch.equal(first["last.weight"], torch.cat(parts))
    assert torch.equal(first["last.weight"], second["last.weight"])


@pytest.mark.parametrize("sync", ["check", "broadcast", None])
def test_equal_weights_pass_whatever_the_sync(worlds: WorldPool, sync):
    torch.manual_seed(0)
    expected = dict(Net().named_parameters())
    for weights in worlds.run(2, shard_spoiled, sync, {}):
        assert all(torch.equal(weights[n], expected[n]) for n in expected)


def swap_rows(pattern: str) -> None:
    """Weights whose sums agree although their elements do not."""
    weight = {
        "rows": torch.arange(12.0).view(4, 3),
        "corners": torch.eye(4),
        "pair": torch.eye(2),
        "signs": torch.tensor([1.0, -1.0, -1.0, 1.0]),
    }[pattern]
    net = nn.Module()
    net.weight = nn.Parameter(weight.flip(0) if dist.get_rank() else weight)
    if pattern == "signs":
        net.weight = nn.Parameter(-weight if dist.get_rank() else weight)
    dshard.fully_shard(net)


# Found: sums over rows and columns alone cancel on [[a, b], [b, a]].
@pytest.mark.parametrize("pattern", ["rows", "corners", "pair", "signs"])
def test_weights_that_are_permuted_between_ranks_are_found(worlds: WorldPool, pattern):
    errors = expect_error(worlds.get_world(2), swap_rows, pattern)
    assert all(kind == "DivergenceError" and "differ between ranks: weight. " in text for kind, text in errors)


def dtypes_differ(dtype: torch.dtype, spoil: bool) -> None:
    net = nn.Module()
    values = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype)
    if spoil and dist.get_rank() == 1:
        values[1, 0] = 1
    net.weight = nn.Parameter(values, requires_grad=dtype.is_floating_point or dtype.is_complex)
    dshard.fully_shard(net)
    with torch.no_grad():
        assert torch.equal(net.weight.full_tensor(), values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.int8])
def test_weights_of_every_dtype_are_compared(worlds: WorldPool, dtype):
    worlds.run(2, dtypes_differ, dtype, False)
    errors = expect_error(worlds.get_world(2), dtypes_differ, dtype, True)
    assert all("differ between ranks: weight. " in text for _, text in errors)


def shard_uneven_structure(what: str, sync: Any) -> None:
    torch.manual_seed(0)
    net = Net()
    if dist.get_rank() == 1:
        if what == "fewer":
            del net.scale
        elif what == "shape":
            net.first = nn.Linear(4, 4)
        elif what == "name":
            net.other, net.scale = net.scale, None
        elif what == "dtype":
            net.scale = nn.Parameter(net.scale.double())
        elif what == "frozen":
            net.scale.requires_grad_(False)
        elif what == "deeper":
            net.more = nn.Linear(2, 2)
    dshard.fully_shard(net, sync=sync)


_SCALE = "scale, shape (), torch.float32"
_FIRST = "first.weight, shape (4, 3), torch.float32"
DIFFERENCES = {
    "fewer": f"number 0 is {_SCALE!r} on ranks 0, 2 and {_FIRST!r} on rank 1",
    "shape": f"number 1 is {_FIRST!r} on ranks 0, 2 and 'first.weight, shape (4, 4), torch.float32' on rank 1",
    "name": f"number 0 is {_SCALE!r} on ranks 0, 2 and 'other, shape (), torch.float32' on rank 1",
    "dtype": f"number 0 is {_SCALE!r} on ranks 0, 2 and 'scale, shape (), torch.float64' on rank 1",
    "frozen": f"number 0 is {_SCALE!r} on ranks 0, 2 and 'scale, shape (), torch.float32, frozen' on rank 1",
    "deeper": "number 7 is nothing on ranks 0, 2 and 'more.weight, shape (2, 2), torch.float32' on rank 1",
}


@pytest.mark.parametrize("what", DIFFERENCES)
@pytest.mark.parametrize("sync", ["check", None])
def test_ranks_with_different_structures_raise_on_all_ranks(worlds: WorldPool, what, sync):
    errors = expect_error(worlds.get_world(3), shard_uneven_structure, what, sync)
    assert [kind for kind, _ in errors] == ["DivergenceError"] * 3
    assert {text for _, text in errors} == {
        f"fully_shard: all ranks must pass the same parameters, but {DIFFERENCES[what]}. Pass what does not depend on "
        "the rank."
    }


def nothing_changed_after_an_error() -> bool:
    net = make(**ONE)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    with pytest.raises(dshard.DivergenceError, match="all ranks must start from the same weights"):
        dshard.fully_shard(net)
    return type(net) is Net and all(
        type(p) is nn.Parameter and torch.equal(p, before[n]) for n, p in net.named_parameters()
    )


def test_a_failed_check_leaves_the_module_as_it_was(worlds: WorldPool):
    assert worlds.run(2, nothing_changed_after_an_error) == [True, True]


def options_of(name: str, rank: int) -> dict[str, Any]:
    """What a rank passes for one option, another value than its neighbour does; all options are in here."""
    is_odd = bool(rank % 2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("odd" if is_odd else "even",))
    of_bf16, of_fp32 = MixedPrecisionPolicy(torch.bfloat16), MixedPrecisionPolicy(reduce_dtype=torch.float32)
    values: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": is_odd,
        "shard_placement_fn": place if is_odd else None,
        "mp_policy": of_bf16 if is_odd else of_fp32,
        "offload_policy": CPUOffloadPolicy() if is_odd else None,
        "ignored_params": ("scale",) if is_odd else (),
        "dp_mesh_dims": DataParallelMeshDims(shard="dp") if is_odd else None,
        "sync": "broadcast" if is_odd else "check",
        "grad_reduce": "sum" if is_odd else "mean",
        "buffers": "check" if is_odd else "leave",
        "memory_budget": 2 if is_odd else 1,
        "auto_wrap_policy": {nn.Linear} if is_odd else {nn.LayerNorm},
        "strategy": {"first.*": "ddp"} if is_odd else {"first.*": "keep"},
        "plan": None,  # tests/planning/test_plans.py
    }
    assert values.keys() == inspect.signature(dshard.fully_shard).parameters.keys() - {"module"}
    named = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return {"mesh": named, name: values[name]} if name == "dp_mesh_dims" else {name: values[name]}


def use() -> None:
    """The ranks are where they were: another model works."""
    net = dshard.fully_shard(make())
    sum(p.square().sum() for p in net.parameters()).backward()  # type: ignore[union-attr]


def options_that_differ(name: str) -> tuple[str, bool]:
    net = make()
    options = options_of(name, dist.get_rank())
    if name == "ignored_params":
        options = {name: {net.get_parameter(each) for each in options[name]}}
    with pytest.raises(dshard.DivergenceError) as caught:
        dshard.fully_shard(net, **options)
    is_plain = type(net) is Net and all(type(p) is nn.Parameter for p in net.parameters())
    use()
    return str(caught.value), is_plain


OPTIONS = [each for each in inspect.signature(dshard.fully_shard).parameters if each not in ("module", "plan")]


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_differs_between_ranks_is_named_at_once_and_nothing_is_changed(worlds: WorldPool, name):
    for text, is_plain in worlds.run(3, options_that_differ, name):
        assert text.startswith(f"fully_shard: all ranks must pass the same {name}, but "), text
        assert " on ranks 0, 2 and " in text
        assert is_plain


def wrong_on_one_rank(what: str) -> tuple[str, str, bool]:
    net = make()
    options: dict[str, Any] = {"sync": {"sync": "maybe"}, "placement": {"shard_placement_fn": lambda p: Shard(1)}}[what]
    with pytest.raises(dshard.DShardError) as caught:
        dshard.fully_shard(net, **options if dist.get_rank() == 1 else {})
    use()
    return type(caught.value).__name__, str(caught.value), type(net) is Net


@pytest.mark.parametrize("what", ["sync", "placement"])
def test_an_error_of_one_rank_alone_ends_all_at_once(worlds: WorldPool, what):
    errors = worlds.run(3, wrong_on_one_rank, what)
    assert [kind for kind, _, _ in errors].count("DivergenceError") == 2
    for _, text, is_plain in (errors[0], errors[2]):
        assert text.startswith("fully_shard: all ranks must make the same call, but rank 1 raised there: ")
        assert errors[1][1][:50] in text
        assert is_plain


def option(what: str) -> None:
    """One call with something wrong, the same on all ranks."""
    net: Any = make()
    if what in WRONG:
        with pytest.raises(dshard.DShardError) as caught:
            dshard.fully_shard(net, **WRONG[what])
        assert type(net) is Net
        assert all(type(p) is nn.Parameter for p in net.parameters())
        raise caught.value
    if what == "sync":
        dshard.fully_shard(net, sync="maybe")  # type: ignore[arg-type]
    elif what == "grad_reduce":
        dshard.fully_shard(net, grad_reduce="max")  # type: ignore[arg-type]
    elif what == "twice":
        dshard.fully_shard(net)
        dshard.fully_shard(net)
    elif what == "not a module":
        dshard.fully_shard(net.scale)
    elif what == "mixed precision":
        dshard.fully_shard(net, mp_policy="bfloat16")
    elif what == "mesh":
        dshard.fully_shard(net, mesh=init_device_mesh("cpu", (1, 1, 2)))
    elif what == "reshard":
        dshard.fully_shard(net, reshard_after_forward=3)
    elif what == "dim":
        dshard.fully_shard(net, shard_placement_fn=lambda p: Shard(1))
    elif what == "partial":
        dshard.fully_shard(net, shard_placement_fn=lambda p: Partial())


WRONG: dict[str, Any] = {
    "a mesh's name": {"mesh": "x"},
    "names of parameters": {"ignored_params": ["scale"]},
    "one parameter": {"ignored_params": nn.Parameter(torch.ones(2))},
    "a placement": {"shard_placement_fn": Shard(0)},
    "a dim's name": {"dp_mesh_dims": "dp"},
    "a policy's name": {"offload_policy": "cpu"},
    "a negative budget": {"memory_budget": -1},
    "a function that chooses no bool": {"auto_wrap_policy": lambda module: "yes"},
    "a fraction of ranks": {"reshard_after_forward": 0.5},
    "no strategy": {"strategy": "zero4"},
}
BAD = {
    "a mesh's name": ("ArgumentError", "fully_shard: mesh must be a DeviceMesh or None, but it is 'x'. Pass "),
    "names of parameters": (
        "ArgumentError",
        "fully_shard: ignored_params must be a set or list of parameters, or None, but number 0 of it is 'scale'. ",
    ),
    "one parameter": ("ArgumentError", "fully_shard: ignored_params must be a set or list of parameters, or None, but"),
    "a placement": (
        "ArgumentError",
        "fully_shard: shard_placement_fn must be a function of a parameter or None, but it is",
    ),
    "a dim's name": (
        "ArgumentError",
        "fully_shard: dp_mesh_dims must be a DataParallelMeshDims or None, but it is 'dp'.",
    ),
    "a policy's name": (
        "ArgumentError",
        "fully_shard: offload_policy must be an OffloadPolicy, a CPUOffloadPolicy, or",
    ),
    "a negative budget": (
        "ArgumentError",
        "fully_shard: memory_budget must be a number of bytes, text such as '2GiB', 'auto' or None, but ",
    ),
    "a function that chooses no bool": ("StateError", "fully_shard: auto_wrap_policy must return a bool for each"),
    "a fraction of ranks": ("ArgumentError", "fully_shard: reshard_after_forward must be a bool, or a number"),
    "no strategy": (
        "ArgumentError",
        "fully_shard: strategy must be one of ddp, zero1, zero2, keep, full, hybrid(k) or split(q), a",
    ),
    "sync": ("ArgumentError", "fully_shard: sync must be one of ('check', 'broadcast', None), but it is 'maybe'."),
    "grad_reduce": ("ArgumentError", "fully_shard: grad_reduce must be one of ('mean', 'sum'), but it is 'max'."),
    "twice": ("StateError", "fully_shard: a module can be sharded once, but this FSDPNet already is. Call fully_shard"),
    "not a module": (
        "ArgumentError",
        "fully_shard: module must be an nn.Module, or a list or tuple of at least one, but it is",
    ),
    "mixed precision": (
        "ArgumentError",
        "fully_shard: mp_policy must be a MixedPrecisionPolicy, a dtype, or a dict of",
    ),
    "mesh": (
        "UnsupportedOpError",
        "fully_shard: the mesh must have one dim, to shard over, or two, to replicate over and to shard over, but it "
        "has 3 (shape (1, 1, 2)). Pass some of its dims, as in mesh['dp'].",
    ),
    "reshard": ("PlacementError", "fully_shard: reshard_after_forward must be a bool, None, or a number that divides"),
    "dim": (
        "PlacementError",
        "first.bias: shard_placement_fn must return Shard of one of its 1 dims, Replicate() or None, but it returned",
    ),
    "partial": ("PlacementError", "first.weight: shard_placement_fn must return Shard of one of its 2 dims, Replicate"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_option_raises_its_text_on_all_ranks(worlds: WorldPool, what):
    errors = expect_error(worlds.get_world(2), option, what)
    kind, text = BAD[what]
    assert [k for k, _ in errors] == [kind] * 2
    for _, message in errors:
        assert re.match(re.escape(text), message), message


def good_options() -> list[str]:
    net = make()
    torch_default = MixedPrecisionPolicy()
    dshard.fully_shard(net, mp_policy=torch_default, reshard_after_forward=2, shard_placement_fn=place)
    return [str(p.placements[0]) for p in net.parameters()]


def place(param: nn.Parameter) -> Any:
    return Shard(-1) if param.dim() == 2 else Replicate()


def test_torchs_default_policies_the_meshs_size_and_negative_dims_are_accepted(worlds: WorldPool):
    expected = [
        "R" if name.endswith(("bias", "scale", "norm.weight")) else "S(1)" for name in dict(Net().named_parameters())
    ]
    assert worlds.run(2, good_options) == [expected] * 2


def plain_call() -> None:
    dshard.fully_shard(Net())


def test_without_a_process_group_fully_shard_says_how_to_start_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        dshard.StateError, match=r"fully_shard: needs a process group, but torch.distributed is not init"
    ):
        plain_call()
