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
from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dshard
from dshard.testing import WorldPool, expect_error
from tests.meta.source import ROOT

LIMITS = (ROOT / "docs" / "limits.md").read_text()

# Words of each row of docs/limits.md that has an error, and what shows it: tests of this file.
SHOWN_BY = {
    "mixed precision policies": ["test_an_option_that_is_not_there_is_refused_and_the_module_left_as_it_was"],
    "CPU offload": ["test_an_option_that_is_not_there_is_refused_and_the_module_left_as_it_was"],
    "meshes of two and more dims": ["test_an_option_that_is_not_there_is_refused_and_the_module_left_as_it_was"],
    "`reshard_after_forward` as a number": [
        "test_an_option_that_is_not_there_is_refused_and_the_module_left_as_it_was",
        "test_one_rank_and_all_ranks_are_numbers_that_are_accepted",
    ],
    "DTensor parameters": ["test_dtensor_parameters_are_refused_by_name"],
    "`torch.compile`": ["test_compiling_a_sharded_model_is_refused"],
    "re-seat a tensor object": ["test_operations_that_reseat_a_parameter_are_refused_by_name"],
    "sparse gradients": ["test_sparse_gradients_are_refused_by_name"],
    "writes to what `gathered()` yields": [
        "test_a_write_to_what_gathered_yields_raises_at_the_end_of_the_scope_and_names_the_parameter",
        "test_arrays_are_read_only_and_dlpack_is_a_copy",
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


def two_dims() -> DeviceMesh:
    return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))


OPTIONS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "param_dtype": (
        lambda: {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        r"fully_shard: mixed precision is not supported yet, but mp_policy is .*bfloat16.* Convert the model with "
        r"\.to\(dtype\), or use torch\.autocast\.",
    ),
    "reduce_dtype": (
        lambda: {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
        r"fully_shard: mixed precision is not supported yet",
    ),
    "output_dtype": (
        lambda: {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float32)},
        r"fully_shard: mixed precision is not supported yet",
    ),
    "offload": (
        lambda: {"offload_policy": CPUOffloadPolicy()},
        r"fully_shard: offload is not supported yet, but offload_policy is CPUOffloadPolicy.* Leave it out\.",
    ),
    "mesh": (
        lambda: {"mesh": two_dims()},
        r"fully_shard: the mesh must have one dim, but it has 2 \(shape \(1, 3\)\)\. Pass one of its dims, as in",
    ),
    "dp_mesh_dims": (
        lambda: {"dp_mesh_dims": DataParallelMeshDims(shard="shard")},
        r"fully_shard: dp_mesh_dims is not supported yet\. Pass a one-dimensional mesh\.",
    ),
    "reshard": (
        lambda: {"reshard_after_forward": 2},
        r"fully_shard: reshard_after_forward as a number of ranks other than 1 and the mesh's size \(3\) is not "
        r"supported yet, but it is 2\. Pass True or False\.",
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


def accepted_number(number: int) -> bool:
    model = make()
    dshard.fully_shard(model, reshard_after_forward=number)
    return still_trains(model)


@pytest.mark.parametrize("number", [1, 3])
def test_one_rank_and_all_ranks_are_numbers_that_are_accepted(worlds: WorldPool, number):
    assert worlds.run(3, accepted_number, number) == [True] * 3


def dtensor_below() -> None:
    model = make()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.detach(), mesh, [Shard(1)]))
    assert isinstance(model[2].weight, DTensor)
    dshard.fully_shard(model)


def test_dtensor_parameters_are_refused_by_name(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(2), dtensor_below):
        assert kind == "UnsupportedOpError"
        assert re.match(r"2\.weight: fully_shard takes plain parameters for now, but this is a DTensor with", text)
        assert text.endswith("Shard it before parallelize_module, or leave it out with ignored_params.")


def compiled(what: str) -> None:
    with warnings.catch_warnings():
        compile_and_run(what)


def compile_and_run(what: str) -> None:
    model = sharded()
    warnings.simplefilter("ignore")  # of dynamo's own
    if what == "model":
        torch.compile(model, backend="eager")(batch())
    elif what == "method":
        model.compile(backend="eager")
        model(batch())
    elif what == "child":
        torch.compile(model[0], backend="eager")(batch())
    elif what == "function":
        torch.compile(lambda x: x @ model[0].weight.t(), backend="eager")(batch())
    else:
        torch.export.export(model, (batch(),))


@pytest.mark.parametrize("what", ["model", "method", "child", "function", "export"])
def test_compiling_a_sharded_model_is_refused(worlds: WorldPool, what):
    """Dynamo wraps what is raised while it traces into an error of its own."""
    for kind, text in expect_error(worlds.get_world(2), compiled, what):
        if kind != "UnsupportedOpError":
            assert kind == "InternalTorchDynamoError"
            text = text.removeprefix("UnsupportedOpError: ")
        assert text.startswith("torch.compile: a ShardedTensor cannot be rebuilt inside a traced graph yet. Compile"), (
            text
        )


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
    assert len(with_error) >= 10
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
