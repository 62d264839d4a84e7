"""torch's own state dict helpers and distributed checkpoints, over sharded models and their optimizers."""

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dshard
from dshard.testing import WorldPool

OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1),
    "adamw-foreach": functools.partial(torch.optim.AdamW, lr=0.1, foreach=True, amsgrad=True),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.1),
}
OTHERS = [kind for kind in OPTIMIZERS if kind != "adamw"]
WORLDS_AND_KINDS = [
    (2, "adamw"),
    *(pytest.param(n, "adamw", marks=pytest.mark.slow) for n in (1, 3)),
    *(pytest.param(2, kind, marks=pytest.mark.slow) for kind in OTHERS),
]
KINDS_AND_FLAT = [
    ("adamw", True),
    *(pytest.param(kind, False, marks=pytest.mark.slow) for kind in OPTIMIZERS),
]
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def net() -> Any:
    """Uneven dims, buffers, a frozen parameter, and a tie."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.Linear(3, 5), nn.Linear(5, 3)
    )
    model[5].weight = model[3].weight
    model[4].bias.requires_grad_(False)
    return model


def place(param: nn.Parameter) -> Any:
    return Shard(1) if tuple(param.shape) == (5, 3) else None


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step on the same data on every rank."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=next(model.parameters()).dtype)
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def plain_run(kind: str, num_steps: int) -> tuple[Any, Any]:
    model = net().double()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(num_steps):
        train(model, optimizer, step)
    return model, optimizer


def sharded_run(kind: str, num_steps: int, *, on_meta: bool = False) -> tuple[Any, Any]:
    model = net().double()
    if on_meta:
        model = model.to("meta")
        model[5].weight = model[3].weight
    for module in (model[0], model[3]):
        dshard.fully_shard(module, shard_placement_fn=place)
    dshard.fully_shard(model, shard_placement_fn=place)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(num_steps):
        train(model, optimizer, step)
    return model, optimizer


def whole(value: Any) -> Any:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def assert_close(found: Any, expected: Any, where: str = "") -> None:
    """Nested dicts of tensors and numbers agree, and what is found is plain."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_close(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, Tensor):
        assert type(found) is Tensor or isinstance(found, nn.Parameter), (where, type(found))
        torch.testing.assert_close(found.detach(), expected.detach(), msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{where}[{i}]")
    else:
        assert found == expected, where


def goes_on(model: Any, optimizer: Any, plain: Any, plain_optimizer: Any) -> None:
    """Further steps give what one process gives."""
    for step in (7, 8):
        train(model, optimizer, step)
        train(plain, plain_optimizer, step)
    assert_close({n: whole(t) for n, t in model.state_dict().items()}, plain.state_dict())
    for param in model.parameters():
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and value.shape == param.shape and value.dim():
                assert isinstance(value, dshard.ShardedTensor), key


def get_full(kind: str) -> None:
    plain, plain_optimizer = plain_run(kind, 2)
    model, optimizer = sharded_run(kind, 2)
    state = get_model_state_dict(model, options=FULL)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=FULL)
    if dist.get_rank() == 0:
        assert_close(state, plain.state_dict())
        expected = get_optimizer_state_dict(plain, plain_optimizer)
        assert_close(optimizer_state, expected)
    else:
        assert not state
        assert not optimizer_state


@pytest.mark.parametrize(("num_ranks", "kind"), WORLDS_AND_KINDS)
def test_full_state_dicts_are_those_of_one_process_on_rank_0(worlds: WorldPool, num_ranks, kind):
    worlds.run(num_ranks, get_full, kind)


def set_full(kind: str, broadcast: bool, on_meta: bool) -> None:
    warnings.simplefilter("ignore")  # the helpers warn of torch's own deprecated calls
    plain, plain_optimizer = plain_run(kind, 2)
    state, optimizer_state = plain.state_dict(), copy.deepcopy(get_optimizer_state_dict(plain, plain_optimizer))
    if broadcast and dist.get_rank():
        state, optimizer_state = {}, {}
    model, optimizer = sharded_run(kind, 0, on_meta=on_meta)
    params = list(model.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    keys = set_model_state_dict(model, state, options=options)
    assert not keys.missing_keys
    assert not keys.unexpected_keys
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert model[5].weight is model[3].weight
    goes_on(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize(("broadcast", "on_meta"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("num_ranks", "kind"), WORLDS_AND_KINDS)
def test_full_state_dicts_load_also_from_rank_0_alone_and_onto_meta(
    worlds: WorldPool, num_ranks, kind, broadcast, on_meta
):
    worlds.run(num_ranks, set_full, kind, broadcast, on_meta)


def step_after_set(kind: str) -> int:
    plain, plain_optimizer = plain_run(kind, 2)
    state = copy.deepcopy(get_optimizer_state_dict(plain, plain_optimizer))
    model, optimizer = sharded_run(kind, 0)
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))
    assert any(type(v) is DTensor for values in optimizer.state.values() for v in values.values())
    model(torch.ones(4, 6, dtype=torch.float64)).sum().backward()
    for param in model.parameters():
        _ = None if param.grad is None else param.grad.to_local()  # type: ignore[attr-defined]
    gathered: list[DTensor] = []
    original = DTensor.full_tensor
    DTensor.full_tensor = lambda self, **_: gathered.append(self) or original(self)  # type: ignore[method-assign]
    try:
        with dshard.CommTrace() as trace:
            optimizer.step()
    finally:
        DTensor.full_tensor = original  # type: ignore[method-assign]
    return trace.calls() + len(gathered)


def test_states_that_the_helpers_cut_themselves_are_taken_without_communication(worlds: WorldPool):
    assert worlds.run(2, step_after_set, "adamw") == [0, 0]


def sharded_states(kind: str, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    plain, plain_optimizer = plain_run(kind, 2)
    state, optimizer_state = get_state_dict(*sharded_run(kind, 2), options=options)
    assert all(isinstance(state[name], dshard.ShardedTensor) for name in ("0.weight", "5.weight"))
    model, optimizer = sharded_run(kind, 1)
    set_state_dict(
        model, optimizer, model_state_dict=state, optim_state_dict=copy.deepcopy(optimizer_state), options=options
    )
    goes_on(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize(("kind", "flat"), KINDS_AND_FLAT)
def test_sharded_state_dicts_go_round(worlds: WorldPool, kind, flat):
    worlds.run(2, sharded_states, kind, flat)


# ------------------------------------------------------------------------------------- distributed checkpoints (DCP)


def save_dcp(kind: str, folder: str, flat: bool) -> None:
    warnings.simplefilter("ignore")
    model, optimizer = sharded_run(kind, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state, optimizer_state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load_dcp(kind: str, folder: str, flat: bool) -> None:
    warnings.simplefilter("ignore")
    plain, plain_optimizer = plain_run(kind, 2)
    model, optimizer = sharded_run(kind, 0)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state, optimizer_state = get_state_dict(model, optimizer, options=options)
    both = {"model": state, "optimizer": optimizer_state}
    dcp.load(both, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"], options=options
    )
    goes_on(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize(("kind", "flat"), KINDS_AND_FLAT)
def test_what_dcp_saves_at_2_ranks_loads_at_3_and_what_it_saves_there_at_1(worlds: WorldPool, tmp_path, kind, flat):
    worlds.run(2, save_dcp, kind, str(tmp_path / "2"), flat)
    worlds.run(3, load_dcp, kind, str(tmp_path / "2"), flat)
    worlds.run(3, save_dcp, kind, str(tmp_path / "3"), flat)
    worlds.run(1, load_dcp, kind, str(tmp_path / "3"), flat)
    worlds.run(2, load_dcp, kind, str(tmp_path / "3"), flat)


def saved_while_training(options: dict[str, Any], num_staged: int, path: str) -> list[bool]:
    """Whether asynchronous saves hold the values of when they were called, though training went on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if "mesh" in options else None
    model: Any = dshard.fully_shard(net(), **{**options, "mesh": mesh})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    group: Any = dist.new_group(backend="gloo")
    stager = [None, BlockingAsyncStager(), DefaultStager(StagingOptions(False, False, True, False))][num_staged]
    wanted, futures = [], []
    for step in range(2):
        train(model, optimizer, step)
        # The very parameters, as a state dict has them, and gradients, which nobody has looked at.
        state: Any = {"gradients": {name: p.grad for name, p in model.named_parameters() if p.grad is not None}}
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
        future: Any = dcp.async_save(
            state, checkpoint_id=f"{path}/{step}", process_group=group, **{"async_stager": stager} if stager else {}
        )
        if hasattr(future, "staging_completion"):
            future.staging_completion.result()
        futures.append(getattr(future, "upload_completion", future))
        wanted.append(full(state))
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        train(model, optimizer, 10 + step)
        futures[-1].result()  # torch allows for one at a time
    found = []
    for step in range(2):
        state = {
            "gradients": {name: torch.zeros_like(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        }
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=f"{path}/{step}")
        found.append(full(state))
    same = [
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(wanted, found, strict=True)
    ]
    return [*same, not all(torch.equal(a, b) for a, b in zip(wanted[0].values(), wanted[1].values(), strict=True))]


def full(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a nested dict, whole and by their paths."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= full(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            found[f"{prefix}{key}"] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return found


@pytest.mark.parametrize(
    ("options", "num_ranks"),
    [
        ({}, 2),
        ({"strategy": "ddp"}, 2),
        ({"shard_placement_fn": place}, 3),
        ({"mesh": True}, 4),
        ({"strategy": "zero1"}, 2),
    ],
    ids=["full-2", "ddp-2", "placed-3", "mesh-4", "zero1-2"],
)
@pytest.mark.parametrize("num_staged", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2))])
def test_torchs_asynchronous_saves_hold_the_values_of_their_moment(
    worlds: WorldPool, tmp_path, options, num_ranks, num_staged
):
    assert worlds.run(num_ranks, saved_while_training, options, num_staged, str(tmp_path)) == [[True] * 3] * num_ranks
