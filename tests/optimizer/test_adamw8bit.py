"""AdamW8bit has torchao's bits on one device, and the same ones at any number of ranks, strategy and wrapping.

The oracle of a sharded step is the same optimizer over plain parameters, whose bits are compared with torchao's own.
"""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dshard
from dshard.optim import AdamW8bit
from dshard.optimizer.eight_bit import _table, dequantize, quantize
from dshard.tensor.tp_params import shard_like
from dshard.testing import WorldPool, expect_error
from tests.optimizer.random_programs import ACTIONS, Model, check_states, gradients, run

# Of codes, of rows that blocks of 64 cut and that they do not; and of numbers: too small, or no whole blocks.
SHAPES = ((64, 64), (128, 37), (5, 1024), (17, 4, 96), (8192,), (2, 4096), (6, 4), (3,), (70, 61))


def make(kind: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.05, "weight_decay": 0.1}]
    return AdamW8bit([group for group in groups if group["params"]], lr=0.02, block_size=int(kind))


def along_last(param: nn.Parameter) -> Shard:
    return Shard(param.dim() - 1)


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"shard_placement_fn": along_last},
    {"offload_policy": dshard.CPUOffloadPolicy()},
    {"mp_policy": dshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
)


@settings(max_examples=10)
@given(data=st.data())
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_random_programs_have_the_bits_of_plain_parameters(worlds: WorldPool, num_ranks, data):
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=2, max_size=4))
    choices: tuple[Any, ...] = ("full", "ddp", "zero2", "keep", {"own.0": "ddp", "own.1": "zero1"})
    strategy = data.draw(st.sampled_from((*choices, "hybrid(2)") if num_ranks == 4 else choices))
    missing = st.sets(st.integers(0, len(shapes) - 1), max_size=1)
    program = data.draw(st.lists(st.tuples(st.sampled_from(ACTIONS), missing), min_size=2, max_size=6))
    options = data.draw(st.sampled_from(OPTIONS))
    size = data.draw(st.sampled_from(["64", "256"]))
    worlds.run(num_ranks, partial(run, **options), make, size, shapes, strategy, program)


def beside_torchao() -> None:
    from torchao import optim

    plain = [torch.randn(64, 256), torch.randn(100, 37), torch.randn(8192).bfloat16(), torch.randn(33).bfloat16()]
    params = [nn.Parameter(each) for each in plain]
    others = [nn.Parameter(param.detach().clone()) for param in params]
    settings = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer, other = AdamW8bit(params, **settings), optim.AdamW8bit(others, **settings)
    for step in range(12):
        for param, twin in zip(params, others, strict=True):
            param.grad = (torch.randn(param.shape) * (0.1 + step) ** 2).to(param.dtype)
            twin.grad = param.grad.clone()
        optimizer.step()
        other.step()
    for param, twin in zip(params, others, strict=True):
        assert torch.equal(param, twin)
        own, theirs = optimizer.state[param], other.state[twin]
        for name in ("exp_avg", "exp_avg_sq"):
            if param.numel() % 256:
                assert torch.equal(own[name], theirs[name])
            else:
                assert torch.equal(own[name], theirs[name].codes)
                assert torch.equal(own[f"{name}_scale"], theirs[name].scale)


@pytest.mark.slow
def test_on_one_device_the_bits_are_those_of_torchao(tmp_path, monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        beside_torchao()


def test_each_number_gets_the_code_that_is_nearest():
    for is_signed in (True, False):
        values = dequantize(torch.arange(256, dtype=torch.uint8), is_signed=is_signed)
        assert (values[1:] > values[:-1]).all()
        least = -1.0 if is_signed else 0.0
        numbers = torch.cat([torch.rand(20000) * (1 - least) + least, torch.rand(20000) * 1e-5, values])
        codes = quantize(numbers, is_signed=is_signed).long()
        distances = (numbers[:, None] - values).abs()
        chosen = distances.gather(1, codes[:, None])[:, 0]
        torch.testing.assert_close(chosen, distances.amin(1), rtol=0, atol=1e-7)
        assert torch.equal(codes[-256:], torch.arange(256))


class Units(nn.Module):
    """Two parts, which are sharded together or each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Model([(128, 37), (64, 64)]), Model([(17, 4, 96), (5,)])])

    def forward(self, step: int) -> Tensor:
        given = [gradients([(128, 37), (64, 64)], set(), step), gradients([(17, 4, 96), (5,)], set(), step)]
        return torch.stack([part(grads) for part, grads in zip(self.parts, given, strict=True)]).sum()


def trained(model: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_after(steps: int) -> tuple[Any, torch.optim.Optimizer]:
    model = Units()
    optimizer = AdamW8bit(model.parameters(), lr=0.02)
    trained(model, optimizer, 0, steps)
    return model, optimizer


def sharded(units: bool, strategy: Any) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = Units()
    if units:
        for part in model.parts:
            dshard.fully_shard(part, strategy=strategy)
    dshard.fully_shard(model, strategy=strategy)
    return model, AdamW8bit(model.parameters(), lr=0.02)


def compare(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    plain, other = plain_after(steps)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)
    check_states(optimizer, other)


def wrapped(units: bool, split: bool) -> None:
    model, optimizer = sharded(units, "full")
    if split:  # an optimizer of its own for each parameter
        optimizers = [AdamW8bit([param], lr=0.02) for param in model.parameters()]
        for step in range(3):
            model(step).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        optimizer.state.update({param: each.state[param] for each in optimizers for param in each.state})
    else:
        trained(model, optimizer, 0, 3)
    compare(model, optimizer, 3)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("units", [False, True])
def test_bits_are_the_same_however_the_model_is_wrapped(worlds: WorldPool, units, split):
    worlds.run(3, wrapped, units, split)


def in_slices(strategy: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(128, 130), nn.ReLU(), nn.Linear(130, 96))
    plain = copy.deepcopy(model)
    dshard.fully_shard(model, strategy=strategy)
    optimizer, other = AdamW8bit(model.parameters()), AdamW8bit(plain.parameters())
    for _ in range(3):
        model(torch.ones(4, 128)).square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            q.grad = p.grad.full_tensor()
        optimizer.step()
        other.step()
        optimizer.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)
    check_states(optimizer, other)


@pytest.mark.parametrize("strategy", ["split(2)", "keep"])
def test_bits_are_the_same_where_weights_are_gathered_in_slices_or_kept(worlds: WorldPool, strategy):
    worlds.run(3, in_slices, strategy)


def saved(folder: Path, how: str) -> None:
    model, optimizer = sharded(True, "full")
    trained(model, optimizer, 0, 2)
    if how == "dshard":
        dshard.checkpoint.save(folder, model, optimizer)
    elif how == "DCP":
        states = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(states, checkpoint_id=folder)
    else:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found = get_state_dict(model, optimizer, options=options)
        if dist.get_rank() == 0:
            torch.save(found, folder / "all.pt")
    dist.barrier()
    trained(model, optimizer, 2, 4)
    compare(model, optimizer, 4)


def resumed(folder: Path, how: str, strategy: str) -> None:
    model, optimizer = sharded(False, strategy)
    if how == "dshard":
        dshard.checkpoint.load(folder, model, optimizer)
    elif how == "DCP":
        own = get_state_dict(model, optimizer)
        dcp.load({"model": own[0], "optim": own[1]}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=own[0], optim_state_dict=own[1])
    else:
        found = torch.load(folder / "all.pt", weights_only=False)
        options = StateDictOptions(full_state_dict=True)
        set_state_dict(model, optimizer, model_state_dict=found[0], optim_state_dict=found[1], options=options)
        optimizer.param_groups[0]["betas"] = tuple(optimizer.param_groups[0]["betas"])  # of which torch has made a list
    trained(model, optimizer, 2, 4)
    compare(model, optimizer, 4)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dshard", "DCP", "torch"])
def test_training_goes_on_from_a_checkpoint_at_other_numbers_of_ranks_and_strategies(worlds: WorldPool, tmp_path, how):
    worlds.run(2, saved, tmp_path, how)
    for num_ranks, strategy in ((1, "full"), (3, "zero2"), (4, "hybrid(2)"), (2, "ddp")):
        worlds.run(num_ranks, resumed, tmp_path, how, strategy)


def over_two_meshes(size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    plain: Any = nn.Sequential(nn.Linear(96, 132), nn.Linear(132, 96), nn.LayerNorm(96))  # both cut blocks
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    dshard.fully_shard(model, mesh=mesh["dp"])
    optimizer, other = AdamW8bit(model.parameters(), block_size=size), AdamW8bit(plain.parameters(), block_size=size)
    for _ in range(3):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            q.grad = torch.randn(q.shape)
            p.grad = shard_like(q.grad, p)  # type: ignore[arg-type]
        optimizer.step()
        other.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)
    check_states(optimizer, other)


@pytest.mark.parametrize("size", [6, 128])  # along features 66 elements are whole blocks of 6
def test_blocks_are_those_of_the_full_parameter_where_tensor_parallelism_cuts_it_too(worlds: WorldPool, size):
    worlds.run(4, over_two_meshes, size)


def counted(shape: tuple[int, ...]) -> tuple[float, int, list[tuple[str, int]]]:
    """Bytes of states per element of the shard, cut blocks, and what a step sends."""
    model = dshard.fully_shard(Model([shape]))
    optimizer = AdamW8bit(model.parameters())
    for step in range(2):
        model(gradients([shape], set(), step)).backward()
        with dshard.CommTrace() as trace:
            optimizer.step()
    param = model.own[0]
    states = optimizer.state[param]
    codes = sum(states[name].to_local().nbytes for name in ("exp_avg", "exp_avg_sq"))
    scales = optimizer.__dict__["_dshard_scales"]
    sent = [(record.kind, record.payload_bytes) for record in trace.records]
    return (codes + scales.num_bytes) / param.to_local().numel(), scales._params[0].blocks.num_cut, sent


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_states_take_two_bytes_and_only_cut_blocks_are_spoken_of(worlds: WorldPool, num_ranks):
    for per_element, _, sent in worlds.run(num_ranks, counted, (64, 512)):
        assert 2 < per_element <= 2.1
        assert sent == []
    for per_element, num_cut, sent in worlds.run(num_ranks, counted, (4 * 256, 37)):
        assert 2 < per_element <= 2.1
        assert num_cut == 0  # 256 rows fill 37 blocks
        assert sent == []
    for per_element, num_cut, sent in worlds.run(num_ranks, counted, (256 + num_ranks, 128 * 3)):
        assert 2 < per_element <= 2.1
        assert num_cut == num_ranks // 2  # shards have an odd number of rows, of one and a half blocks each
        assert sent == [("all_reduce", 8 * num_cut * (num_ranks - 1))]


def in_graphs() -> None:
    torch._dynamo.reset()
    model, optimizer = sharded(True, "full")

    @torch.compile(backend="aot_eager")
    def train() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for step in range(3):
        model(step).backward()
        train()
    compare(model, optimizer, 3)


@pytest.mark.slow
def test_a_compiled_step_has_the_same_bits(worlds: WorldPool):
    worlds.run(2, in_graphs)


def scaled() -> None:
    model, optimizer = sharded(True, "full")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        scaler.scale(model(step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    compare(model, optimizer, 3)


def test_a_scaler_of_gradients_steps_it(worlds: WorldPool):
    worlds.run(2, scaled)


def beside_plain(shapes: list[tuple[int, ...]], size: int, between: Callable[[Any, Any, int], tuple[Any, Any]]) -> None:
    """Train a sharded model and a plain one; `between` gives those to go on with, and their optimizers."""
    models: list[Any] = [Model(shapes), dshard.fully_shard(Model(shapes))]
    pairs = [(model, AdamW8bit(model.parameters(), lr=0.02, block_size=size)) for model in models]
    for step in range(4):
        for at, (model, optimizer) in enumerate(pairs):
            model(gradients(shapes, set(), step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            pairs[at] = between(model, optimizer, step)
        for p, q in zip(pairs[1][0].parameters(), pairs[0][0].parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q)
    check_states(pairs[1][1], pairs[0][1])


def to_and_fro(model: Any, optimizer: Any, step: int) -> tuple[Any, Any]:
    """Go on with another optimizer, which shares the states."""
    other = optimizer.__dict__.setdefault("of_tests", AdamW8bit(model.parameters(), lr=0.02, block_size=64))
    other.__dict__["of_tests"] = optimizer
    other.load_state_dict(optimizer.state_dict())
    return model, other


def written_by_some(model: Any, optimizer: Any, step: int) -> tuple[Any, Any]:
    """Write to scales as DCP does: through `to_local()`, where there is something."""
    for states in optimizer.state.values():
        scales = states.get("exp_avg_scale", torch.zeros(0))
        local = scales.to_local() if isinstance(scales, dshard.ShardedTensor) else scales
        if local.numel():
            local.mul_(2.0)
    return model, optimizer


def of_another_model(model: Any, optimizer: Any, step: int) -> tuple[Any, Any]:
    """Have the optimizer hold parameters of another model, while rank 1 alone keeps the old one."""
    if step == 1:
        torch.manual_seed(7)
        new: Any = Model([tuple(param.shape) for param in model.parameters()])
        new = dshard.fully_shard(new) if isinstance(model.own[0], dshard.ShardedTensor) else new
        model.kept = model if dist.get_rank() == 1 else None
        optimizer.state.clear()
        optimizer.param_groups[0]["params"] = list(new.parameters())
        return new, optimizer
    return model, optimizer


def with_plain_states(model: Any, optimizer: Any, step: int) -> tuple[Any, Any]:
    """Put full values in the place of states, and a Python number in that of the count."""
    for states in optimizer.state.values():
        states.update({name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in states.items()})
        states["step"] = int(states["step"])
    return model, optimizer


@pytest.mark.parametrize("between", [to_and_fro, written_by_some, of_another_model, with_plain_states])
def test_states_that_others_write_replace_or_share(worlds: WorldPool, between):
    # Of 2 blocks, which are fewer than ranks: one shard of scales is empty. Then of 74, some of which are cut.
    worlds.run(3, beside_plain, [(64, 64)], 2048, written_by_some)
    worlds.run(3, beside_plain, [(128, 37), (5,)], 64, between)


def under_another_default() -> None:
    def between(model: Any, optimizer: Any, step: int) -> tuple[Any, Any]:
        return model, optimizer

    _table.cache_clear()  # which is made under it, too
    torch.set_default_dtype(torch.float64)
    try:
        beside_plain([(128, 37), (5,)], 64, between)
    finally:
        torch.set_default_dtype(torch.float32)
    table = _table(torch.device("cpu"), is_signed=True)
    _table.cache_clear()
    assert torch.equal(table.values, _table(torch.device("cpu"), is_signed=True).values)


def test_the_default_dtype_changes_nothing(worlds: WorldPool):
    worlds.run(3, under_another_default)  # which cut blocks


def raising() -> None:
    model = dshard.fully_shard(Model([(64, 64), (70, 61)]))
    optimizer = AdamW8bit(model.parameters())
    for step in range(3):
        model(gradients([(64, 64), (70, 61)], set(), step)).backward()
        if step == 1:
            kept, optimizer.state[model.own[1]]["exp_avg"] = optimizer.state[model.own[1]]["exp_avg"], torch.zeros(3)
            with pytest.raises(dshard.StateError, match=r"own.1: 'exp_avg' must be of torch.float32 and shape"):
                optimizer.step()
            optimizer.state[model.own[1]]["exp_avg"] = kept
        else:
            optimizer.step()
        optimizer.zero_grad()
    assert [float(states["step"]) for states in optimizer.state.values()] == [2.0, 2.0]


def test_a_step_that_is_refused_counts_nowhere(worlds: WorldPool):
    worlds.run(2, raising)


def test_hooks_of_load_state_dict_see_all_states():
    param = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = AdamW8bit([param])
    optimizer.step()

    def changed(optimizer: Any, state_dict: Any) -> Any:
        states = {**state_dict["state"][0], "exp_avg_scale": torch.full((16,), 7.001)}
        return {**state_dict, "state": {0: states}}

    seen: list[Any] = []
    optimizer.register_load_state_dict_pre_hook(changed)
    optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.extend(optimizer.state[param].items()))
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(dict(seen)["exp_avg_scale"], torch.full((16,), 7.001))
    assert dict(seen)["exp_avg"].dtype == torch.uint8


def test_settings_of_a_group_are_looked_at():
    param = nn.Parameter(torch.zeros(64, 64))
    optimizer = AdamW8bit([nn.Parameter(torch.zeros(3))])
    with pytest.raises(dshard.ArgumentError, match="block_size must be an integer of at least 1, but it is 0"):
        optimizer.add_param_group({"params": [param], "block_size": 0})


def freed() -> bool:
    model, optimizer = sharded(True, "full")
    trained(model, optimizer, 0, 1)
    kept = [weakref.ref(each) for of in optimizer.__dict__["_dshard_scales"]._params for each in of.scales.values()]
    assert kept
    gc.collect()
    gc.disable()
    try:
        del optimizer
        return all(each() is None for each in kept)
    finally:
        gc.enable()


def test_states_go_with_their_optimizer(worlds: WorldPool):
    assert worlds.run(2, freed) == [True, True]


def refused(what: str) -> None:
    model: Any = dshard.fully_shard(Model([(64, 64)]))
    optimizer = AdamW8bit(model.parameters())
    model(gradients([(64, 64)], set(), 0)).backward()
    optimizer.step()
    if what == "size":
        optimizer.param_groups[0]["block_size"] = 128
    elif what == "AdamW":
        other = torch.optim.AdamW(model.parameters())
        other.step()
        optimizer.load_state_dict({**optimizer.state_dict(), "state": other.state_dict()["state"]})
    optimizer.step()


def test_states_of_another_kind_are_refused_by_name(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(2), refused, "size"):
        assert kind == "StateError"
        assert "own.0" in text
        assert "32 in all, but 'exp_avg_scale' in the optimizer's state has shape (16,)" in text
    for kind, text in expect_error(worlds.get_world(2), refused, "AdamW"):
        assert kind == "StateError"
        assert "own.0: 'exp_avg' must be of torch.uint8" in text


def test_what_has_no_plain_shards_is_refused():
    table = nn.Embedding(64, 64, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(dshard.UnsupportedOpError, match=r"shape \(64, 64\): .* one with a sparse gradient"):
        AdamW8bit(table.parameters()).step()
    number = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    number.grad = torch.zeros_like(number)
    with pytest.raises(dshard.UnsupportedOpError, match=r"of torch.complex64"):
        AdamW8bit([number]).step()
