"""What programs for FSDP1 call beside FSDP1 itself, and what torchtitan takes from FSDP2's insides."""

import copy
import os
import pickle
import warnings
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init
from torch.distributed.fsdp.wrap import enable_wrap, wrap
from torch.distributed.tensor import Shard

import dshard
from dshard.testing import WorldPool

pytestmark = pytest.mark.slow


class Annotated(nn.Module):
    """Wraps its layers as it makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = wrap(nn.Linear(4, 8))
        self.second = wrap(nn.Linear(8, 8), reshard_after_forward=False)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))


def units_of_an_annotated_model() -> list[Any]:
    torch.manual_seed(0)
    with enable_wrap(wrapper_cls=dshard.fully_shard, reshard_after_forward=True):
        model: Any = wrap(Annotated())
    torch.manual_seed(0)
    plain = Annotated()
    sharded = [isinstance(m, dshard.FSDPModule) for m in (model, model.first, model.second, model.last)]
    choices = [m._dshard_units[0].settings.reshard_after_forward for m in (model, model.first, model.second)]
    x = torch.ones(3, 4)
    losses = [m(x).square().sum() for m in (model, plain)]
    for loss in losses:
        loss.backward()
    same = torch.allclose(model.first.weight.grad.full_tensor(), plain.first.weight.grad)
    return [sharded, choices, same, isinstance(plain, dshard.FSDPModule)]


def test_torchs_wrap_takes_fully_shard_as_the_wrapper(worlds: WorldPool):
    for sharded, choices, same, plain in worlds.run(2, units_of_an_annotated_model):
        assert sharded == [True, True, True, False]
        assert choices == [True, True, False]
        assert same
        assert not plain


def optimizer_states() -> tuple[Any, Any]:
    """The full optimizer state by FSDP1's function, and by torch's helper of a model that dshard sharded."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = []
    for shard in (None, dshard.fully_shard):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 on a CPU
            if shard is None:
                model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
            else:
                shard(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if shard is None:
                found.append(FullyShardedDataParallel.full_optim_state_dict(model, optimizer))
            else:
                found.append(get_optimizer_state_dict(model, optimizer, options=options))
    return tuple(form_of(state) for state in found)


def form_of(state: Any) -> Any:
    """Names, groups, shapes and devices; FSDP1's values on a CPU are not to be relied upon."""
    shapes = {
        name: {key: (tuple(v.shape), str(v.device)) for key, v in values.items()}
        for name, values in state.get("state", {}).items()
    }
    groups = [{key: group[key] for key in ("lr", "betas", "params")} for group in state.get("param_groups", [])]
    return shapes, groups


def test_a_full_optimizer_state_has_the_form_that_fsdp1_gives_it_on_rank_0(worlds: WorldPool):
    (theirs, ours), (_, others) = worlds.run(2, optimizer_states)
    assert ours == theirs
    assert set(ours[0]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert others[0] == {}


def mesh_of_nodes(local_sizes: list[int], local_ranks: list[int], ranks_per_node: int | None = None) -> Any:
    """Shape and groups of the mesh, or the error."""
    rank = dist.get_rank()
    before = dict(os.environ)
    os.environ.update(LOCAL_WORLD_SIZE=str(local_sizes[rank]), LOCAL_RANK=str(local_ranks[rank]))
    try:
        mesh = dshard.init_hybrid_mesh(ranks_per_node)
    except dshard.StateError as error:
        return str(error)
    finally:
        os.environ.clear()
        os.environ.update(before)
    model: Any = dshard.fully_shard(nn.Linear(4, 4), mesh=mesh)
    model(torch.full((1, 4), float(rank))).sum().backward()
    return mesh.mesh.tolist(), mesh.mesh_dim_names, model.weight.grad.full_tensor()[0, 0].item()


def test_a_hybrid_mesh_shards_within_nodes_and_replicates_across_them(worlds: WorldPool):
    want = ([[0, 1], [2, 3]], ("replicate", "shard"), 1.5)
    assert worlds.run(4, mesh_of_nodes, [2] * 4, [0, 1, 0, 1]) == [want] * 4
    assert worlds.run(4, mesh_of_nodes, [4] * 4, [0, 1, 2, 3], 2) == [want] * 4


@pytest.mark.parametrize(
    ("sizes", "ranks", "says"),
    [
        ([2, 2, 1, 1], [0, 1, 0, 0], "it is between 1 and 2"),
        ([2] * 4, [0, 0, 1, 1], "it is 2 and they are not neighbours"),
        ([3] * 4, [0, 1, 2, 0], "it is 3"),
        ([0] * 4, [0] * 4, "it is 0"),
    ],
)
def test_nodes_that_are_not_alike_raise_on_every_rank(worlds: WorldPool, sizes, ranks, says):
    for error in worlds.run(4, mesh_of_nodes, sizes, ranks):
        assert error.startswith("init_hybrid_mesh: every node must have the same number of ranks")
        assert says in error


class Counted(nn.Linear):
    """Counts how often one is made by its constructor."""

    num_made: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__(4, 4)
        Counted.num_made += 1


def make_copies() -> tuple[int, list[bool]]:
    model: Any = dshard.fully_shard(Counted())
    Counted.num_made = 0
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    original = type(model).__mro__[type(model).__mro__.index(dshard.FSDPModule) + 1 :]
    return Counted.num_made, [*(type(c) is type(model) for c in copies), Counted in original]


def test_copies_of_sharded_modules_run_no_constructor_and_know_their_class(worlds: WorldPool):
    assert worlds.run(2, make_copies) == [(0, [True] * 3)] * 2


def places_by_mesh_info() -> list[Any]:
    info = _fsdp_init._get_mesh_info(init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
    model: Any = nn.Linear(4, 4)
    dshard.fully_shard(model, shard_placement_fn=lambda _: _fsdp_common.ShardPlacementResult(Shard(0), info))
    return [model.weight.device_mesh.ndim, str(model.weight.placements)]


@pytest.mark.skipif(not hasattr(_fsdp_common, "ShardPlacementResult"), reason="torch 2.11 has no meshes per parameter")
def test_torchs_mesh_info_says_where_a_parameter_lies(worlds: WorldPool):
    assert worlds.run(2, places_by_mesh_info) == [[2, "(Replicate(), Shard(dim=0))"]] * 2
