"""Values of sharded DTensor parameters: reads, writes, views, inits, copies, checkpoints, and what is refused."""

import copy
import io
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as recompute

import dshard
from dshard import checkpoint
from dshard.tensor import ShardedTensor
from dshard.testing import WorldPool, expect_error
from tests.collectives.test_native_backends import native
from tests.tensor.test_tensor_parallel import full, mesh_of

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """Dims that neither two nor four ranks divide; `spare` is in no plan."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7, device=device), nn.Linear(7, 6, device=device)
        self.norm, self.spare = nn.LayerNorm(6, device=device), nn.Linear(6, 5, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.spare(self.norm(x + self.down(torch.tanh(self.up(x)))))


PLAN = {
    "up": lambda: ColwiseParallel(use_local_output=False),
    "down": lambda: RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate()),
    "norm": lambda: SequenceParallel(sequence_dim=0),
}


def net(device: str | None = None, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Net(device).double()


def parallel(model: Any, tp: DeviceMesh, *names: str) -> Any:
    return parallelize_module(model, tp, {name: PLAN[name]() for name in names or ("up", "down")})


def sharded(shape: tuple[int, ...] = (2, 2), seed: int = 0, device: str | None = None, **options: Any) -> Any:
    mesh = mesh_of(shape)
    dp = mesh["replicate", "dp"] if mesh.ndim == 3 else mesh["dp"]
    return dshard.fully_shard(parallel(net(device, seed), mesh["tp"]), mesh=dp, **options)


def rows(rank: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def close(got: Any, want: Tensor) -> bool:
    torch.testing.assert_close(full(got), want.detach(), rtol=1e-9, atol=1e-11)
    return True


# --- what they look like, and what is read ---------------------------------------------------------------------------


def looks() -> list[Any]:
    model, reference = sharded(), net()
    both = mesh_of((2, 2))
    lie = {n: tuple(map(str, p.placements)) for n, p in model.named_parameters()}
    return [
        lie["up.weight"],
        lie["down.weight"],
        lie["down.bias"],
        lie["spare.weight"],
        model.up.weight.device_mesh == both,
        tuple(model.up.weight.to_local().shape),
        all(isinstance(p, DTensor) and type(p) is ShardedTensor for p in model.parameters()),
        all(torch.equal(full(p), q) for p, q in zip(model.parameters(), reference.parameters(), strict=True)),
        all(p.shape == q.shape for p, q in zip(model.parameters(), reference.parameters(), strict=True)),
    ]


def test_parameters_say_how_they_lie_over_both_meshes(worlds: WorldPool):
    for rank, found in enumerate(worlds.run(4, looks)):
        assert found[:4] == [
            ("_S(0, 2)", "S(0)"),
            ("S(0)", "S(1)"),
            ("S(0)", "R"),
            ("S(0)",),
        ]
        assert found[5] == ((2, 6) if rank % 2 == 0 else ((2, 6) if rank == 1 else (1, 6)))
        assert found[4]
        assert all(found[6:])


READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.max,
    "any": lambda w: (w > 1e9).any(),
    "norm": torch.linalg.vector_norm,
    "norm 1": lambda w: torch.linalg.vector_norm(w, 1),
    "foreach norm": lambda w: torch._foreach_norm([w])[0],
    "item": lambda w: torch.tensor(w.sum().item(), dtype=w.dtype),
    "rows": lambda w: w.sum(-1),
    "list": lambda w: torch.tensor(w.tolist(), dtype=w.dtype),
    "numpy": lambda w: torch.from_numpy(w.detach().numpy().copy()),
    "times plain": lambda w: w.detach() * torch.ones(w.shape, dtype=w.dtype),
    "doubled": lambda w: w.detach() * 2,
    "clone": lambda w: w.detach().clone(),
    "half": lambda w: w.detach().float().double(),
    "flat": lambda w: w.view(-1),
    "first": operator.itemgetter(0),
    "part": lambda w: w[1:4],
    "transposed": lambda w: w.t(),
    "transposed part": lambda w: w.t()[1:3],
    "cut": lambda w: w.split(2)[1],
    "chunks": lambda w: torch.cat(w.chunk(2, dim=-1)[::-1], dim=-1),
    "stack": lambda w: torch.stack([w, w]),
    "where": lambda w: torch.where(w > 0, w, 0.0),
}


def read(name: str) -> bool:
    model, reference = sharded(), net()
    for (key, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if q.dim() == 2 or name not in ("transposed", "transposed part"):
            with torch.no_grad():
                got, want = READS[name](p), READS[name](q)
            torch.testing.assert_close(full(got), want.detach(), rtol=1e-6, atol=1e-9, msg=lambda m, key=key: key + m)
    return True


@pytest.mark.parametrize("name", READS)
def test_a_read_gives_the_value_of_the_plain_parameter(worlds: WorldPool, name):
    assert worlds.run(4, read, name) == [True] * 4


def fused_steps() -> bool:
    """A view per projection of one cut weight, recorded by autograd."""
    mesh = mesh_of((2, 2))
    torch.manual_seed(0)
    layer: Any = nn.Linear(6, 8, bias=False).double()
    reference = copy.deepcopy(layer)
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    dshard.fully_shard(layer, mesh=mesh["dp"])
    for module, ranks in ((layer, [dist.get_rank() // 2]), (reference, [0, 1])):
        for rank in ranks:
            x = rows(rank)
            if module is layer:
                x = distribute_tensor(x, mesh["tp"], [Replicate()])
            parts = module.weight.view(2, 4, 6).unbind(0)
            loss = sum((x @ part.t()).pow(2).sum() for part in parts) / len(ranks)
            (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
    return close(layer.weight.grad, reference.weight.grad)


def test_views_that_dtensor_has_no_rule_for_have_the_plain_gradients(worlds: WorldPool):
    assert worlds.run(4, fused_steps) == [True] * 4


# --- what is written -------------------------------------------------------------------------------------------------


def _put(w: Tensor) -> None:
    w.index_put_((torch.tensor([1, 3]),), torch.tensor(5.0, dtype=w.dtype))


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "zero a row": lambda w: w[3].zero_(),
    "fill a part": lambda w: w.view(-1)[:3].fill_(7.0),
    "copy": lambda w: w.copy_(torch.arange(w.numel(), dtype=w.dtype).view(w.shape)),
    "add": lambda w: w.add_(torch.arange(w.numel(), dtype=w.dtype).view(w.shape), alpha=0.5),
    "multiply": lambda w: w.mul_(3),
    "put": _put,
    "foreach": lambda w: torch._foreach_add_([w], [torch.ones(w.shape, dtype=w.dtype)]),
    "normal": lambda w: w.normal_(),
    "uniform": nn.init.uniform_,
    "normal of a part": lambda w: w[1:3].normal_(),
    "kaiming": lambda w: nn.init.kaiming_uniform_(w) if w.dim() == 2 else None,
    "orthogonal": lambda w: nn.init.orthogonal_(w) if w.dim() == 2 else None,
    "truncated": nn.init.trunc_normal_,
    "data": lambda w: setattr(w, "data", torch.ones(w.shape, dtype=w.dtype)),
}


def write(name: str, shape: tuple[int, ...], seed_per_rank: bool) -> bool:
    model, reference = sharded(shape), net()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        for w, seed in ((p, 5 + dist.get_rank() * seed_per_rank), (q, 5)):
            torch.manual_seed(seed)
            with torch.no_grad():
                WRITES[name](w)
        if seed_per_rank and "tp" not in p.device_mesh.mesh_dim_names:
            continue  # plain parameters draw alike over data parallelism alone
        close(p, q)
    return True


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_that_to_the_plain_parameter(worlds: WorldPool, name):
    assert worlds.run(4, write, name, (2, 2), False) == [True] * 4


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)])
@pytest.mark.parametrize("name", ["normal", "orthogonal", "normal of a part"])
def test_random_fills_agree_where_every_rank_has_a_seed_of_its_own(worlds: WorldPool, name, shape):
    assert worlds.run(4, write, name, shape, True) == [True] * 4


def meta_init() -> bool:
    model = sharded(device="meta")
    model.to_empty(device="cpu")
    reference = net()
    for module in (model, reference):
        torch.manual_seed(3)
        for layer in (module.up, module.down, module.spare, module.norm):
            layer.reset_parameters()
    return all(close(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_a_model_on_meta_is_initialised_to_the_values_of_the_plain_one(worlds: WorldPool):
    assert worlds.run(4, meta_init) == [True] * 4


# --- training in other ways ------------------------------------------------------------------------------------------


def _adafactor(params: Any) -> Any:
    return torch.optim.Adafactor(params, lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "no foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adafactor": _adafactor,
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}


def train(model: Any, optimizer: Any, ranks: list[int], num_steps: int = 3, *, how: str = "") -> None:
    for step in range(num_steps):
        for micro in range(2):
            if isinstance(model, dshard.FSDPModule):
                model.set_requires_gradient_sync(micro == 1)
            for rank in ranks:
                x = rows(10 * step + 5 * micro + rank)
                out = recompute(model, x, use_reentrant=False) if how == "recomputed" else model(x)
                (out.pow(2).mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(name: str, how: str) -> bool:
    reference = net()
    train(reference, OPTIMIZERS[name](reference.parameters()), [0, 1])
    if how == "made before":
        mesh = mesh_of((2, 2))
        model = parallel(net(), mesh["tp"])
        optimizer = OPTIMIZERS[name](model.parameters())
        dshard.fully_shard(model, mesh=mesh["dp"])
    elif how == "norm in the same unit":
        mesh = mesh_of((2, 2))
        model = dshard.fully_shard(parallel(net(), mesh["tp"], "up", "down", "norm"), mesh=mesh["dp"])
        model.norm.register_forward_hook(lambda m, a, out: out)
        optimizer = OPTIMIZERS[name](model.parameters())
    else:
        model = sharded()
        optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, [dist.get_rank() // 2], how=how)
    for (key, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(p), q.detach(), rtol=1e-7, atol=1e-9, msg=lambda m, key=key: key + m)
    return True


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_on_the_plain_model(worlds: WorldPool, name):
    assert worlds.run(4, compare, name, "") == [True] * 4


@pytest.mark.parametrize("how", ["made before", "recomputed"])
def test_training_in_other_ways_gives_the_plain_weights(worlds: WorldPool, how):
    assert worlds.run(4, compare, "sgd", how) == [True] * 4


def evaluated() -> bool:
    model, reference, x = sharded(), net(), rows(0)
    want = reference(x)
    with torch.no_grad():
        close(model(x), want)
    with torch.inference_mode():
        close(model(x), want)
    return close(model.eval()(x), want)


def test_evaluation_gives_the_plain_output(worlds: WorldPool):
    assert worlds.run(4, evaluated) == [True] * 4


def tied_to_full_values() -> bool:
    """A penalty on the full value of a parameter, and one that DTensor computes."""
    model, reference = sharded(), net()
    for w, ranks in ((model.up.weight, 1), (reference.up.weight, 1)):
        value = w.full_tensor() if isinstance(w, DTensor) else w
        (value.pow(3).sum() * ranks).backward()
    close(model.up.weight.grad, reference.up.weight.grad)
    model.down.weight.pow(2).sum().backward()
    reference.down.weight.pow(2).sum().backward()
    return close(model.down.weight.grad, reference.down.weight.grad)


def test_a_penalty_on_a_parameter_has_the_plain_gradient(worlds: WorldPool):
    assert worlds.run(4, tied_to_full_values) == [True] * 4


class Tied(nn.Module):
    """A head of one output, of which one rank of two holds nothing, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.value = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False), nn.Linear(6, 1)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x).sum(-1, keepdim=True) + self.value(x)


def tied() -> bool:
    mesh = mesh_of((2, 2))
    torch.manual_seed(0)
    reference = Tied().double()
    model: Any = copy.deepcopy(reference)
    embed = RowwiseParallel(input_layouts=Replicate())
    colwise = [ColwiseParallel(output_layouts=Replicate()) for _ in range(2)]
    parallelize_module(model, mesh["tp"], {"embed": embed, "head": colwise[0], "value": colwise[1]})
    model.head.weight = model.embed.weight
    dshard.fully_shard(model, mesh=mesh["dp"])
    for module, ranks in ((model, [dist.get_rank() // 2]), (reference, [0, 1])):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        for step in range(3):
            for rank in ranks:
                (module(torch.tensor([step, rank, 4])).pow(2).mean() / len(ranks)).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert model.head.weight is model.embed.weight
    return all(close(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_ties_and_empty_shards_train_as_in_the_plain_model(worlds: WorldPool):
    assert worlds.run(4, tied) == [True] * 4


def over_two_dims(placements: list[Any]) -> bool:
    """Over one rank of data parallelism, and four of its own mesh."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    torch.manual_seed(0)
    reference: Any = nn.Linear(6, 7, bias=False).double()
    model = copy.deepcopy(reference)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["ep", "tp"], placements))
    dshard.fully_shard(model, mesh=mesh["dp"])
    for module in (model, reference):
        x = rows(0)
        if module is model:
            x = distribute_tensor(x, mesh["ep", "tp"], [Replicate(), Replicate()])
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        out = module(x).pow(2).mean()
        (out.full_tensor() if isinstance(out, DTensor) else out).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
    close(model.weight.grad, reference.weight.grad)
    with torch.no_grad():
        for w in (model.weight, reference.weight):
            torch.manual_seed(3)
            w[1:4].normal_()
    return close(model.weight, reference.weight) and close(model.weight.sum(), reference.weight.sum())


@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]])
def test_a_parameter_over_two_dims_of_its_own_mesh_trains_as_the_plain_one(worlds: WorldPool, placements):
    assert worlds.run(4, over_two_dims, placements) == [True] * 4


def converted() -> bool:
    model, reference = sharded().float(), net().float()
    x = rows(0).float()
    model(x).sum().backward()
    reference(x).sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.dtype == p.grad.dtype == torch.float32
        torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-5, atol=1e-6)
    with dshard.gathered(model, with_grads=True) as fulls:
        for name, q in reference.named_parameters():
            assert torch.equal(fulls[name], q)
            torch.testing.assert_close(fulls[name].grad, q.grad, rtol=1e-5, atol=1e-6)
    return True


def test_a_model_in_another_dtype_has_the_plain_gradients(worlds: WorldPool):
    assert worlds.run(4, converted) == [True] * 4


def scaled() -> list[bool]:
    """One rank of the other mesh alone sees an infinity: none steps."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(rows(0)).sum()).backward()
    if dist.get_rank() == 3:
        model.up.weight.grad.to_local()[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    skipped = all(torch.equal(full(p), q) for p, q in zip(model.parameters(), net().parameters(), strict=True))
    return [skipped, scaler.get_scale() == 4.0]


def test_a_grad_scaler_skips_a_step_on_all_ranks_for_one_ranks_infinity(worlds: WorldPool):
    assert worlds.run(4, scaled) == [[True, True]] * 4


def frozen() -> bool:
    """Frozen weights, and a trainable one that is added later."""
    model, reference = sharded(), net()
    for module, ranks in ((model, [dist.get_rank() // 2]), (reference, [0, 1])):
        module.requires_grad_(False)
        module.norm.requires_grad_(True)
        module.spare.bias = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        for rank in ranks:
            (module(rows(rank)).pow(2).mean() / len(ranks)).backward()
    assert model.up.weight.grad is None
    trained = [(model.norm.weight, reference.norm.weight), (model.spare.bias, reference.spare.bias)]
    return all(close(p.grad, q.grad) for p, q in trained)


def test_frozen_weights_and_added_ones_beside_each_other(worlds: WorldPool):
    assert worlds.run(4, frozen) == [True] * 4


def natively() -> bool:
    with native():
        return compare("adam", "")


def test_on_another_backend_weights_are_the_plain_ones_too(worlds: WorldPool):
    assert worlds.run(4, natively) == [True] * 4


# --- what travels ----------------------------------------------------------------------------------------------------


def sent(shape: tuple[int, int]) -> dict[str, int]:
    mesh = mesh_of(shape)
    layer = parallelize_module(nn.Linear(32, 32, bias=False), mesh["tp"], ColwiseParallel())
    dshard.fully_shard(layer, mesh=mesh["dp"])
    with dshard.CommTrace() as trace:
        layer(torch.ones(2, 32, requires_grad=True)).sum().backward()
    return {k: sum(r.payload_bytes for r in trace.select(k)) for k in ("all_gather", "reduce_scatter")}


@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (4, 1)])
def test_data_parallelism_sends_the_formula_of_the_local_tensors(worlds: WorldPool, shape):
    dp, tp = shape
    want = 32 * 32 * 4 // tp * (dp - 1) // dp
    assert worlds.run(dp * tp, sent, shape) == [{"all_gather": want, "reduce_scatter": want}] * (dp * tp)


# --- copies and checkpoints ------------------------------------------------------------------------------------------


def copied(how: str) -> bool:
    model, reference = sharded(), net()
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:  # of the state, for the hooks of `parallelize_module` cannot be pickled
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        twin = sharded(seed=1)
        twin.load_state_dict(torch.load(buffer, weights_only=False))
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), [dist.get_rank() // 2])
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        close(p, q)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), [0, 1])
    return all(close(p, q) for p, q in zip(twin.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_trains_apart(worlds: WorldPool, how):
    assert worlds.run(4, copied, how) == [True] * 4


def trained_with_moments(shape: tuple[int, ...] | None, seed: int, num_steps: int) -> tuple[Any, Any]:
    model = sharded(shape, seed) if shape is not None else net(seed=seed)
    if shape is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        dshard.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(num_steps):
        model(rows(step)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def values(model: Any, optimizer: Any) -> list[Tensor]:
    moments = [s["exp_avg"] for s in optimizer.state.values()]
    return [full(t) for t in [*model.parameters(), *moments]]


def saved(path: str, shape: tuple[int, ...] | None) -> list[Tensor]:
    model, optimizer = trained_with_moments(shape, 0, 2)
    checkpoint.save(path, model, optimizer, extra={"step": 2})
    return values(model, optimizer)


def loaded(path: str, shape: tuple[int, ...] | None) -> list[Tensor]:
    model, optimizer = trained_with_moments(shape, 1, 0)
    assert checkpoint.load(path, model, optimizer) == {"step": 2}
    return values(model, optimizer)


@pytest.mark.parametrize(
    ("before", "after"), [((2, 2), (2, 2)), ((2, 2), None), ((2, 2), (1, 2)), ((1, 2, 2), (2, 1)), (None, (2, 2))]
)
def test_a_checkpoint_loads_at_any_other_mesh(worlds: WorldPool, tmp_path, before, after):
    size = [4 if shape is None else torch.tensor(shape).prod().item() for shape in (before, after)]
    want = worlds.run(size[0], saved, str(tmp_path / "c"), before)
    for got in worlds.run(size[1], loaded, str(tmp_path / "c"), after):
        assert all(torch.equal(a, b) for a, b in zip(got, want[0], strict=True))


def torch_checkpoint(path: str) -> bool:
    model, _ = trained_with_moments((2, 2), 0, 1)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
    other = sharded(seed=1)
    state = get_model_state_dict(other)
    dcp.load({"model": state}, checkpoint_id=path)
    set_model_state_dict(other, state)
    same = all(torch.equal(full(a), full(b)) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        assert all(whole[n].shape == p.shape for n, p in model.named_parameters())
    third = sharded(seed=2)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(third, whole if dist.get_rank() == 0 else {}, options=options)
    return same and all(
        torch.equal(full(a), full(b)) for a, b in zip(model.parameters(), third.parameters(), strict=True)
    )


def test_torchs_own_checkpoint_and_state_dicts_keep_the_values(worlds: WorldPool, tmp_path):
    assert worlds.run(4, torch_checkpoint, str(tmp_path / "c")) == [True] * 4


def safetensors(path: str) -> bool:
    model, reference, other = sharded(), net(), sharded(seed=1)
    dshard.save_safetensors(model, path)
    dshard.load_safetensors(other, path)
    state = dict(dshard.iter_full(model))
    return all(
        torch.equal(full(p), q) and torch.equal(state[n], q)
        for (n, p), q in zip(other.named_parameters(), reference.parameters(), strict=True)
    )


def test_safetensors_hold_the_full_values(worlds: WorldPool, tmp_path):
    assert worlds.run(4, safetensors, str(tmp_path / "c")) == [True] * 4


def drafted(rank0_only: bool) -> list[str]:
    model, reference = sharded(), net()
    with dshard.gathered(model) as fulls:
        assert all(torch.equal(fulls[n], p) for n, p in reference.named_parameters())
    with dshard.gathered(model, writeback=True, rank0_only=rank0_only) as fulls:
        names = sorted(fulls)
        for value in fulls.values():
            value.mul_(2.0 if not rank0_only or dist.get_rank() == 0 else 9.0)
    assert all(torch.equal(full(p), 2 * q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    return names


@pytest.mark.parametrize("rank0_only", [False, True])
def test_drafts_of_full_values_are_taken_over_on_all_ranks(worlds: WorldPool, rank0_only):
    found = worlds.run(4, drafted, rank0_only)
    everything = sorted(n for n, _ in net().named_parameters())
    assert found == [everything, *([[]] * 3 if rank0_only else [everything] * 3)]


def differing_drafts() -> None:
    with dshard.gathered(sharded(), writeback=True) as fulls:
        fulls["up.weight"].fill_(float(dist.get_rank() % 2))  # equal over data parallelism


def test_drafts_that_differ_over_the_mesh_of_dtensors_raise(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(4), differing_drafts):
        assert kind == "DivergenceError"
        assert "up.weight" in text


# --- what is refused, and what differs -------------------------------------------------------------------------------


def mixed() -> None:
    model = sharded()
    (rows(0) @ model.up.weight.t()).sum().backward()


def partial_placement() -> None:
    mesh = mesh_of((2, 2))
    model = net()
    local = DTensor.from_local(torch.ones(7, 6, dtype=torch.float64), mesh["tp"], [Partial()])
    model.up.weight = nn.Parameter(local)
    dshard.fully_shard(model, mesh=mesh["dp"])


def second_derivative() -> None:
    model = sharded()
    torch.autograd.grad(model(rows(0)).pow(3).sum(), [model.up.weight], create_graph=True)


def pointer() -> None:
    model = sharded()
    with dshard.gathered(model):
        model.up.weight.data_ptr()


def other_mesh() -> None:
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    dshard.fully_shard(parallel(net(), mesh_of((2, 2))["tp"]), mesh=flat)


REFUSED = {
    "mixed": (
        mixed,
        "UnsupportedOpError",
        "up.weight: aten.mm.default mixes a parameter that lies over the mesh ('tp',)",
    ),
    "partial": (partial_placement, "UnsupportedOpError", "up.weight: a DTensor parameter below fully_shard must have"),
    "second": (second_derivative, "UnsupportedOpError", "create_graph=True needs plain gradients"),
    "pointer": (pointer, "UnsupportedOpError", "up.weight: a raw pointer needs memory that holds the full value"),
    "mesh": (other_mesh, "PlacementError", "up.weight: a DTensor parameter and fully_shard must use different dims"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name_on_every_rank(worlds: WorldPool, name):
    fn, error, text = REFUSED[name]
    for kind, said in expect_error(worlds.get_world(4), fn):
        assert (kind, text in said) == (error, True), said


def differing(sync: Any) -> Any:
    mesh = mesh_of((2, 2))
    model = parallel(net(), mesh["tp"])
    with torch.no_grad():
        model.spare.weight.add_(dist.get_rank() % 2)  # equal over data parallelism
    try:
        dshard.fully_shard(model, mesh=mesh["dp"], sync=sync)
    except dshard.DivergenceError as error:
        return str(error)
    return full(model.spare.weight)


def test_plain_weights_that_differ_over_the_mesh_of_dtensors_are_named_or_replaced(worlds: WorldPool):
    assert all("differ between ranks: spare.weight" in e for e in worlds.run(4, differing, "check"))
    want = net().spare.weight
    assert all(torch.equal(w, want) for w in worlds.run(4, differing, "broadcast"))
