"""docs/limits.md, row by row: what it says is refused raises, with the class and the text that names the way out."""

import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dshard
from dshard.policies import Offload
from dshard.testing import WorldPool, expect_error
from tests.meta.source import ROOT
from tests.tensor.extended import ToFloat8, ToOverrides

LIMITS = (ROOT / "docs" / "limits.md").read_text()

# Words of each row of docs/limits.md that has an error, and what shows it: tests of this file.
SHOWN_BY = {
    "tensor subclasses": ["test_what_tensor_subclasses_cannot_be_is_refused_by_name"],
    "meshes of three and more dims": ["test_an_option_that_is_not_there_is_refused_and_the_module_left_as_it_was"],
    "DTensor parameters": [
        "test_dtensor_parameters_over_some_of_the_same_ranks_are_refused_by_name",
        "test_dtensor_parameters_that_are_cut_over_the_same_ranks_are_refused_by_name",
    ],
    "`torch.compile`": ["test_what_a_compiled_graph_cannot_do_is_refused"],
    "re-seat a tensor object": ["test_operations_that_reseat_a_parameter_are_refused_by_name"],
    "sparse gradients": ["test_sparse_gradients_are_refused_by_name"],
    "writes to what `gathered()` yields without `writeback=True`": [
        "test_a_write_to_what_gathered_yields_raises_at_the_end_of_the_scope_and_names_the_parameter",
        "test_arrays_are_read_only_and_dlpack_is_a_copy",
    ],
    "with `set_requires_all_reduce(False)`": ["test_a_gradient_that_one_replica_alone_has_is_named_when_one_is_used"],
    "`hybrid(k)` for parameters that are DTensors": ["test_a_strategy_that_cannot_be_is_refused_and_changes_nothing"],
    "weights that are gathered in slices": [
        "test_what_cannot_be_gathered_in_slices_is_refused_by_name_and_the_module_left_as_it_was",
        "test_what_a_layer_in_slices_cannot_do_is_refused_by_name",
    ],
    "moving a module to another device": [
        "test_moving_a_module_whose_parameters_others_refer_to_is_refused_by_name",
        "test_a_module_to_which_nobody_refers_moves_also_after_a_step",
    ],
}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))


def sharded() -> Any:
    model = make()
    for layer in (model[0], model[2]):
        dshard.fully_shard(layer)
    return dshard.fully_shard(model)


def still_trains(model: nn.Module) -> bool:
    model.zero_grad()
    model(batch()).sum().backward()
    return all(p.grad is not None for p in model.parameters())


def three_dims() -> DeviceMesh:
    return init_device_mesh("cpu", (1, dist.get_world_size(), 1), mesh_dim_names=("pp", "replicate", "shard"))


OPTIONS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "mesh": (
        lambda: {"mesh": three_dims()},
        r"fully_shard: the mesh must have one dim, to shard over, or two, .* but it has 3 \(shape \(1, 3, 1\)\)\. Pass",
    ),
}


def refused_option(name: str) -> None:
    model = make()
    before = {n: (p, p.detach().clone()) for n, p in model.named_parameters()}
    try:
        dshard.fully_shard(model, **OPTIONS[name][0]())
    finally:
        assert type(model) is nn.Sequential
        for n, p in model.named_parameters():
            assert p is before[n][0]
            assert torch.equal(p, before[n][1])
        assert still_trains(model)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_is_not_there_is_refused_and_the_module_left_as_it_was(worlds: WorldPool, name):
    for kind, text in expect_error(worlds.get_world(3), refused_option, name):
        assert kind == "UnsupportedOpError"
        assert re.match(OPTIONS[name][1], text), text


def strategy_that_cannot_be(case: str) -> None:
    """Raise by what `docs/limits.md` says of strategies; the model trains on as before."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = make()
    options: dict[str, Any] = {}
    strategy = "hybrid(1, keep)" if case == "extension" else "hybrid(2)"
    if case == "dtensor":
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh["tp"], [Shard(0)]))
        model[0].bias = nn.Parameter(distribute_tensor(model[0].bias.detach(), mesh["tp"], [Shard(0)]))
        options, strategy = {"mesh": mesh["dp"]}, "hybrid(1, split(2))"
    elif case == "replicas":
        options = {"mesh": mesh}
        strategy = "hybrid(1, split(2))"
    else:
        model[0].weight = nn.Parameter(ToFloat8(torch.randn(6, 4)))
    dshard.fully_shard(model, **options)
    before = [(p, p.to_local(), p._spec) for p in model.parameters()]
    try:
        dshard.set_strategy(model, strategy)
    finally:
        assert all(p.to_local() is local and p._spec is spec for p, local, spec in before)


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("dtensor", "UnsupportedOpError", "0.weight: .* needs a mesh of its own"),
        ("replicas", "PlacementError", "0.weight: .* makes replicas of a mesh of one dim, but this one has 2"),
        ("extension", "UnsupportedOpError", "0.weight: a ToFloat8 says how it is gathered from shards, but under"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused_and_changes_nothing(worlds: WorldPool, case, kind, text):
    for name, message in expect_error(worlds.get_world(4), strategy_that_cannot_be, case):
        assert name == kind
        assert re.match(text, message), message


def offload_on_cpu() -> bool:
    model = dshard.fully_shard(make(), offload_policy=CPUOffloadPolicy())
    return still_trains(model)


def test_cpu_offload_on_a_cpu_mesh_is_accepted_for_everything_is_there(worlds: WorldPool):
    assert worlds.run(2, offload_on_cpu) == [True] * 2


def accepted_number(number: int) -> bool:
    model = make()
    dshard.fully_shard(model, reshard_after_forward=number)
    return still_trains(model)


@pytest.mark.parametrize("number", [1, 3])
def test_one_rank_and_all_ranks_are_numbers_that_are_accepted(worlds: WorldPool, number):
    assert worlds.run(3, accepted_number, number) == [True] * 3


def dtensor_below(shape: tuple[int, ...]) -> None:
    """Over the last dim of a mesh of this shape, below `fully_shard` over all ranks."""
    model = make()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    lies = distribute_tensor(model[2].weight.detach(), mesh["ab"[len(shape) - 1]], [Shard(1)])
    model[2].weight = nn.Parameter(lies)
    assert isinstance(model[2].weight, DTensor)
    dshard.fully_shard(model)


def test_dtensor_parameters_over_some_of_the_same_ranks_are_refused_by_name(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(4), dtensor_below, (2, 2)):
        assert kind == "PlacementError"
        assert re.match(
            r"2\.weight: a DTensor parameter and fully_shard must use different dims of one mesh, but", text
        )
        assert text.endswith("and pass mesh['tp'] there and mesh['dp'] here.")


def test_dtensor_parameters_that_are_cut_over_the_same_ranks_are_refused_by_name(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(2), dtensor_below, (2,)):
        assert kind == "PlacementError"
        assert re.match(r"2\.weight: a DTensor parameter must be replicated over the dims of data parallelism,", text)
        assert text.endswith("Distribute it with Replicate() there.")


def compiled(what: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dynamo's own
        compile_and_run(what)


def compile_and_run(what: str) -> None:
    cpu = torch.device("cpu")
    options = {"mixed precision": {"mp_policy": torch.bfloat16}, "offload": {"offload_policy": Offload(cpu, cpu)}}
    model = sharded() if what not in options else dshard.fully_shard(make(), **options[what])
    weight = model[0].weight
    if what == "mixed precision":
        torch.compile(lambda x: model(x), backend="eager", fullgraph=True)(batch())
    elif what == "offload":
        torch.compile(lambda x: x @ weight.t(), backend="eager", fullgraph=True)(batch())
    elif what == "write":
        with torch.no_grad():
            torch.compile(lambda x: torch.mul(weight, 2.0, out=weight), backend="eager", fullgraph=True)(batch())
    elif what == "view":
        torch.compile(lambda x, view: x @ view, backend="eager", fullgraph=True)(batch(), weight.t())
    else:
        torch.export.export(model, (batch(),))


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("mixed precision", r"weight: under mixed precision .* of a function that calls the model .*"),
        (
            "offload",
            r"0\.weight: torch\.compile takes offloaded parameters .* but none runs\. .* leave offload_policy out\.",
        ),
        (
            "write",
            r"torch\.compile: a compiled graph cannot run aten\.mul\.out .* Call it outside of the compiled function\.",
        ),
        ("view", r"0\.weight: a compiled graph takes in .* Make the view within the compiled function, or use full"),
        ("export", r"torch\.export: a sharded model cannot be exported, .* Export a copy of the model that is not"),
    ],
)
def test_what_a_compiled_graph_cannot_do_is_refused(worlds: WorldPool, what, pattern):
    """Dynamo wraps what is raised while it traces into its own errors. `runtime/test_compile.py` shows the rest."""
    for kind, text in expect_error(worlds.get_world(2), compiled, what):
        assert any(name in (kind, *re.findall(r"\w+Error", text)) for name in ("UnsupportedOpError", "StateError"))
        assert re.search(pattern, text), text


RESEATING: dict[str, Callable[[Tensor], Any]] = {
    "resize_": lambda w: w.resize_(2, 2),
    "set_": lambda w: w.set_(torch.ones(6, 4)),  # type: ignore[call-overload]
    "t_": lambda w: w.t_(),
    "squeeze_": lambda w: w.squeeze_(),
    "unsqueeze_": lambda w: w.unsqueeze_(0),
    "as_strided_": lambda w: w.as_strided_((2,), (1,)),
}


def reseated() -> bool:
    model = sharded()
    before = model[0].weight.full_tensor()
    for name, change in RESEATING.items():
        with pytest.raises(
            dshard.UnsupportedOpError,
            match=r"^0\.weight: aten\..* changes the shape or memory of the tensor object itself, .*copy_\(\)\.$",
        ):
            raise AssertionError(f"{name}: {change(model[0].weight.data)}")
    assert torch.equal(model[0].weight.full_tensor(), before)
    return still_trains(model)


def test_operations_that_reseat_a_parameter_are_refused_by_name(worlds: WorldPool):
    assert worlds.run(2, reseated) == [True, True]


def sparse() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2))
    dshard.fully_shard(model)
    model(torch.tensor([1, 2 + dist.get_rank()])).sum().backward()


def test_sparse_gradients_are_refused_by_name(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(2), sparse):
        assert kind == "UnsupportedOpError"
        assert text.startswith("0.weight: gradients of sharded parameters must be dense, but this one has layout")
        assert text.endswith("Build the embedding with sparse=False.")


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def sliceable(what: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of which a weight is asked for in slices that cannot be, and the options with which it is."""
    options: dict[str, Any] = {"strategy": {"0.weight": "split(2)"}}
    if what == "dim":
        options["shard_placement_fn"] = lambda param: Shard(param.dim() - 1)
    if what == "offload":
        options["offload_policy"] = Offload(torch.device("cpu"), torch.device("cpu"))
    if what == "subclass":
        layer = nn.Linear(4, 4, bias=False)
        layer.weight = nn.Parameter(ToFloat8(layer.weight.detach()))
        return nn.Sequential(layer), options
    if what == "in_proj":
        options["strategy"] = {"0.in_proj_weight": "split(2)"}
        return nn.Sequential(nn.MultiheadAttention(4, 2)), options
    if what == "own forward":
        return nn.Sequential(OwnForward(4, 4)), options
    return nn.Sequential(nn.Conv2d(4, 4, 1) if what == "conv" else nn.Linear(4, 4)), options


def not_sliced(what: str) -> None:
    torch.manual_seed(0)
    model, options = sliceable(what)
    try:
        dshard.fully_shard(model, **options)
    finally:
        assert type(model) is nn.Sequential
        assert not any(isinstance(p, dshard.ShardedTensor) for p in model.parameters())


NO_LAYER = r"must be the weight of an nn\.Linear or nn\.Embedding with torch's own forward, but it is '\w+' of a "
NO_PLAIN = r"must be a plain tensor that is cut along dim 0 and kept where it is used, but it is "


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("conv", rf"{NO_LAYER}Conv2d"),
        ("own forward", rf"{NO_LAYER}OwnForward"),
        ("in_proj", rf"{NO_LAYER}MultiheadAttention"),
        ("dim", rf"{NO_PLAIN}cut along dim 1 \(shape \(4, 4\)\)"),
        ("offload", rf"{NO_PLAIN}offloaded"),
        ("subclass", rf"{NO_PLAIN}a ToFloat8"),
    ],
)
def test_what_cannot_be_gathered_in_slices_is_refused_by_name_and_the_module_left_as_it_was(
    worlds: WorldPool, what, why
):
    for kind, text in expect_error(worlds.get_world(2), not_sliced, what):
        assert kind == "UnsupportedOpError"
        assert re.match(rf"0\.(in_proj_)?weight: what is gathered in slices {why}.*strategy 'full'\.$", text), text


def sliced_use(what: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4))
    if what in ("max_norm", "sparse"):
        model = nn.Sequential(nn.Embedding(4, 4, **{what: True if what == "sparse" else 1.0}))
    dshard.fully_shard(model, strategy={"0.weight": "split(2)"})
    if what in ("max_norm", "sparse"):
        model(torch.tensor([1]))
    elif what == "fullgraph":
        torch.compile(model, backend="eager", fullgraph=True)(batch())
    else:
        x = batch().requires_grad_()
        torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("max_norm", r"^0\.weight: an embedding .* but this one has max_norm.* strategy 'full'\.$"),
        ("sparse", r"^0\.weight: an embedding .* but this one has sparse gradients\. .* strategy 'full'\.$"),
        ("create_graph", r"^0\.weight: .* first derivatives alone, but .* create_graph=True\. .* strategy 'full'\.$"),
        ("fullgraph", r"a weight that is gathered in slices is used between graphs.* Leave out fullgraph=True"),
    ],
)
def test_what_a_layer_in_slices_cannot_do_is_refused_by_name(worlds: WorldPool, what, pattern):
    for kind, text in expect_error(worlds.get_world(2), sliced_use, what):
        assert kind == ("Unsupported" if what == "fullgraph" else "UnsupportedOpError")
        assert re.search(pattern, text), text


def gathered_write() -> bool:
    model = sharded()
    before = model[2].weight.full_tensor()
    with (
        pytest.raises(
            dshard.StateError,
            match=r"^2\.weight: what gathered\(\) yields must not be written to, but it was; that write is lost\. ",
        ),
        dshard.gathered(model) as fulls,
    ):
        fulls["2.weight"][0].zero_()
    assert torch.equal(model[2].weight.full_tensor(), before)
    with dshard.gathered(model) as fulls, torch.no_grad():  # a write to the parameter itself is no such write
        model[2].weight.mul_(2)
    assert torch.equal(model[2].weight.full_tensor(), before * 2)
    return still_trains(model)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_write_to_what_gathered_yields_raises_at_the_end_of_the_scope_and_names_the_parameter(
    worlds: WorldPool, num_ranks
):
    assert worlds.run(num_ranks, gathered_write) == [True] * num_ranks


def array_write() -> bool:
    model = sharded()
    weight = model[0].weight
    before = weight.full_tensor().detach()
    for array in (weight.detach().numpy(), weight.numpy(force=True), np.asarray(weight.detach())):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    torch.from_dlpack(weight.detach()).zero_()
    assert torch.equal(weight.full_tensor(), before)
    return still_trains(model)


def test_arrays_are_read_only_and_dlpack_is_a_copy(worlds: WorldPool):
    assert worlds.run(2, array_write) == [True, True]


def moved(keep: str) -> None:
    model = sharded()
    model(batch()).sum().backward()
    kept: Any = model[0].weight.t() if keep == "view" else weakref.ref(model[0].weight)
    model.to("meta")
    raise AssertionError(f"moved, though {kept} is kept")


@pytest.mark.parametrize("keep", ["view", "weak reference"])
def test_moving_a_module_whose_parameters_others_refer_to_is_refused_by_name(worlds: WorldPool, keep):
    """The only other device that a machine without a GPU has is meta."""
    for kind, text in expect_error(worlds.get_world(2), moved, keep):
        assert kind == "StateError"
        assert text.startswith("0.weight: a parameter can move to another device only while nothing else refers to it")


def moved_and_back() -> bool:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    model.to("meta")
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    assert all(torch.equal(p.full_tensor(), state[name]) for name, p in model.named_parameters())
    return still_trains(model)


def test_a_module_to_which_nobody_refers_moves_also_after_a_step(worlds: WorldPool):
    assert worlds.run(2, moved_and_back) == [True, True]


def used_ahead_of_the_all_reduce() -> bool:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = dshard.fully_shard(make(), mesh=mesh)
    model.set_requires_all_reduce(False)
    out = model[2].weight.sum() + (model[0](batch()).sum() if dist.get_rank() == 0 else 0.0 * model[0].bias.sum())
    out.backward()
    with pytest.raises(dshard.StateError, match=r"^0\.weight: a gradient can be used ahead of its all-reduce"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.set_requires_all_reduce(True)
    model(batch()).sum().backward()
    return model[0].weight.grad is not None


def test_a_gradient_that_one_replica_alone_has_is_named_when_one_is_used(worlds: WorldPool):
    assert worlds.run(2, used_ahead_of_the_all_reduce) == [True] * 2


# What is compared between ranks: a write that differs raises at the next use, and the other limits' bullet points.


def differing_write(what: str) -> None:
    model = sharded()
    weight, rank = model[0].weight, dist.get_rank()
    with torch.no_grad():
        if what == "number":
            weight.mul_(1.0 + rank)
        elif what == "count" and rank == 0:
            weight.mul_(1.0)
        elif what == "index":
            weight[rank].zero_()
        elif what == "indices":
            weight.index_fill_(0, torch.tensor([rank]), 0.0)
        elif what == "operand":
            weight.add_(torch.full((4,), float(rank)))
        elif what == "full operand":
            weight.copy_(torch.full((6, 4), float(rank)))
        elif what == "temporary":
            (weight.detach() * (1.0 + rank)).full_tensor()
        elif what == "step" and rank == 0:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    model(batch())


@pytest.mark.parametrize(
    "what", ["number", "count", "index", "indices", "operand", "full operand", "temporary", "step"]
)
def test_a_write_that_differs_between_ranks_raises_at_the_next_gather_on_all_ranks(worlds: WorldPool, what):
    for kind, text in expect_error(worlds.get_world(2), differing_write, what):
        assert kind == "DivergenceError"
        assert re.match(
            r"'0(\.weight)?'.*: all ranks must write the same to a sharded tensor, and equally often", text
        ), text


def data_is_copied() -> bool:
    model = sharded()
    new = torch.ones(6, 4)
    model[0].weight.data = new
    new.zero_()
    return bool((model[0].weight.full_tensor() == 1).all())


def test_setting_data_to_a_plain_tensor_copies_it(worlds: WorldPool):
    assert worlds.run(2, data_is_copied) == [True, True]


def renormed() -> bool:
    torch.manual_seed(0)
    table = dshard.fully_shard(nn.Embedding(5, 4, max_norm=0.5))
    mine = table(torch.tensor([dist.get_rank()])).detach()
    norms = table.weight.full_tensor().norm(dim=1)
    everywhere = torch.arange(5) < dist.get_world_size()
    return bool((norms[everywhere] < 0.501).all() and (norms[~everywhere] > 0.501).all() and mine.norm() < 0.501)


def test_max_norm_renorms_the_rows_of_all_ranks_on_all_ranks(worlds: WorldPool):
    assert worlds.run(3, renormed) == [True] * 3


class Marked(Tensor):
    """A tensor subclass that does not say how it is gathered."""


def subclass(what: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model: Any = make()
    value: Any = ToFloat8(torch.ones(6, 4))
    if what == "without":
        value = torch.ones(6, 4).as_subclass(Marked)
    elif what == "dtensor":
        value = DTensor.from_local(ToFloat8(torch.ones(3, 4)), mesh["tp"], [Shard(0)])
    elif what == "function":
        value = ToOverrides(torch.ones(6, 4))
    model[0].weight = nn.Parameter(value)
    placement = (lambda p: Shard(p.dim() - 1)) if what == "dim" else None
    offload = Offload(torch.device("cpu"), torch.device("cpu")) if what == "offload" else None
    dshard.fully_shard(model, sync=None, mesh=mesh["dp"], shard_placement_fn=placement, offload_policy=offload)
    if what == "compile":
        model.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dynamo's own
        model(batch())


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("without", r"^0\.weight: fully_shard takes .* a Marked without .* or leave it out with ignored_params\.$"),
        ("dtensor", r"^0\.weight: a DTensor parameter must have plain local tensors, but this one's is a ToFloat8\."),
        (
            "dim",
            r"^0\.weight: a tensor subclass with fsdp_pre_all_gather must be cut along dim 0, but .* along dim 1\.",
        ),
        (
            "function",
            r"^0\.weight: .* Overrides has a __torch_function__, which would not be asked\. Move what it does",
        ),
        (
            "offload",
            r"^0\.weight: .* but offload_policy keeps them elsewhere\. Leave out offload_policy for the module",
        ),
        (
            "compile",
            r"0\.weight: torch\.compile does not take parameters of tensor subclasses yet, but .* a ToFloat8\.",
        ),
    ],
)
def test_what_tensor_subclasses_cannot_be_is_refused_by_name(worlds: WorldPool, what, pattern):
    for kind, text in expect_error(worlds.get_world(2), subclass, what):
        expected = {"dim": "PlacementError", "compile": "StateError"}.get(what, "UnsupportedOpError")
        assert expected in (kind, *re.findall(r"\w+Error", text))
        assert re.search(pattern, text), text


# ---------------------------------------------------------------------------------------------------- the table itself


def rows() -> list[tuple[str, str]]:
    """First and last cell of each row of the first table of docs/limits.md."""
    table = re.search(r"^\| what \| today \| error \|\n\|[-|]+\|\n((?:\|.*\n)+)", LIMITS, re.MULTILINE)
    assert table is not None, "docs/limits.md has no table | what | today | error |"
    cells = [line.strip().strip("|").split(" | ") for line in table.group(1).splitlines()]
    assert all(len(row) == 3 for row in cells), cells
    return [(row[0].strip(), row[2].strip()) for row in cells]


def test_each_row_of_the_limits_with_an_error_is_shown_by_a_test_and_each_test_has_its_row():
    with_error = [what for what, error in rows() if error != "none"]
    assert len(with_error) >= 6
    unshown = [what for what in with_error if sum(words in what for words in SHOWN_BY) != 1]
    assert unshown == [], f"rows of docs/limits.md that SHOWN_BY does not have, once: {unshown}"
    gone = [words for words in SHOWN_BY if sum(words in what for what in with_error) != 1]
    assert gone == [], f"SHOWN_BY has what is no row with an error of docs/limits.md any more: {gone}"
    unknown = [name for names in SHOWN_BY.values() for name in names if not callable(globals().get(name))]
    assert unknown == []


def test_each_error_class_of_the_limits_is_one_of_ours():
    for what, error in rows():
        named = re.findall(r"`(\w+Error)`", error)
        assert bool(named) != (error == "none"), (what, error)
        assert all(issubclass(getattr(dshard, name), dshard.DShardError) for name in named), (what, error)
