"""Tensor parallelism below data parallelism: DTensor parameters of `parallelize_module` under `fully_shard`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

import dshard
from dshard.testing import WorldPool

pytestmark = pytest.mark.slow
WIDTH, HIDDEN, VOCAB = 8, 20, 11


class Attention(nn.Module):
    """Heads of width 2, as many as its projections give on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, -1, 2).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Its vocabulary is cut unevenly; `scale` is in nobody's plan and stays plain."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.scale)


def plain() -> Transformer:
    torch.manual_seed(0)
    return Transformer().double()


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "dp", "tp")[-len(shape) :])


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["replicate", "dp"] if mesh.ndim == 3 else mesh["dp"]


def parallelize(model: Transformer, tp: DeviceMesh, *, sequence: bool = True) -> Transformer:
    """By sequences between blocks, or with replicated activations and plain norms."""
    between = Shard(1) if sequence else Replicate()
    norm = {"norm": SequenceParallel(use_local_output=False)} if sequence else {}
    parallelize_module(
        model,
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
            **norm,
        },
    )
    for block in model.blocks:
        norms = {"norm1": SequenceParallel(), "norm2": SequenceParallel()} if sequence else {}
        parallelize_module(
            block,
            tp,
            {
                "attn": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
                "attn.q": ColwiseParallel(),
                "attn.k": ColwiseParallel(),
                "attn.v": ColwiseParallel(),
                "attn.o": RowwiseParallel(output_layouts=between),
                "up": ColwiseParallel(input_layouts=between),
                "down": RowwiseParallel(output_layouts=between),
                **norms,
            },
        )
    return model


def build(mesh: DeviceMesh, *, sequence: bool = True, **options: Any) -> Any:
    model: Any = parallelize(plain(), mesh["tp"], sequence=sequence)
    for block in model.blocks:
        dshard.fully_shard(block, mesh=data_mesh(mesh), **options)
    return dshard.fully_shard(model, mesh=data_mesh(mesh), **options)


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    ids = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(100 * step + rank))
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


Trained = dict[str, dict[str, Tensor]]


def plain_run(num_ranks: int, num_steps: int = 5) -> Trained:
    """Weights, first gradients and norms after AdamW steps of one process on the data of all ranks."""
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    grads, norms = {}, {}
    for step in range(num_steps):
        (sum(loss_of(model, step, r) for r in range(num_ranks)) / num_ranks).backward()
        if step == 0:
            grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        norms[str(step)] = nn.utils.clip_grad_norm_(model.parameters(), 0.1).detach()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": {n: p.detach() for n, p in model.named_parameters()}, "grads": grads, "norms": norms}


def train(shape: tuple[int, ...], sequence: bool, options: dict[str, Any]) -> Trained:
    """The same on a mesh; torch clips in even steps, dshard in odd ones."""
    mesh = mesh_of(shape)
    model = build(mesh, sequence=sequence, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    grads, norms = {}, {}
    for step in range(5):
        with loss_parallel():
            loss_of(model, step, dist.get_rank() // shape[-1]).backward()
        if step == 0:
            grads = {name: full(p.grad) for name, p in model.named_parameters()}
        clip = dshard.clip_grad_norm_ if step % 2 else nn.utils.clip_grad_norm_
        norms[str(step)] = full(clip(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": {n: full(p) for n, p in model.named_parameters()}, "grads": grads, "norms": norms}


def assert_same(got: Trained, want: Trained) -> None:
    for kind, values in want.items():
        for name, value in values.items():
            torch.testing.assert_close(
                got[kind][name], value, rtol=1e-7, atol=1e-9, check_dtype=False, msg=f"{kind} {name}"
            )


def last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.dim() - 1)


def replicated(param: nn.Parameter) -> Replicate:
    return Replicate()


CASES = [
    ((2, 2), True, {}),
    ((2, 2), False, {}),
    ((2, 2), True, {"reshard_after_forward": False}),
    ((2, 2), True, {"shard_placement_fn": last_dim}),
    ((2, 2), True, {"shard_placement_fn": replicated}),
    ((1, 2), True, {}),
    ((2, 1), True, {}),
    ((2, 1, 2), True, {}),
    ((1, 2, 2), True, {}),
]


@pytest.mark.parametrize(("shape", "sequence", "options"), CASES)
def test_a_transformer_trains_as_in_one_process(worlds: WorldPool, shape, sequence, options):
    num_ranks = 1
    for size in shape:
        num_ranks *= size
    want = plain_run(num_ranks // shape[-1])
    for got in worlds.run(num_ranks, train, shape, sequence, options):
        assert_same(got, want)


def penalized(shape: tuple[int, ...], when: str, rows: int) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a loss with a penalty on a full value, and those of one process."""
    found = []
    mesh = mesh_of(shape)
    for is_plain in (True, False):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, rows), nn.Linear(rows, 8)).double()
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        if not is_plain:
            by_rows = ColwiseParallel(output_layouts=Replicate())  # torch takes no uneven inputs of the other one
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()} if rows % 2 == 0 else {"0": by_rows, "1": by_rows}
            dshard.fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=data_mesh(mesh))
            x = x.chunk(data_mesh(mesh).size())[data_mesh(mesh).get_local_rank()]

        def penalty(model: Any = model) -> Tensor:
            first, second = (
                p.full_tensor() if isinstance(p, DTensor) else p for p in (model[0].weight, model[1].weight)
            )
            return first.square().sum() + (second * 3).sum()

        ahead = penalty() if when == "ahead" else torch.zeros(())
        loss = model(x).square().mean() if when != "alone" else torch.zeros(())
        (loss + (ahead if when == "ahead" else penalty())).backward()
        found.append([full(p.grad) for p in model.parameters() if p.grad is not None])
    return found[1], found[0]


@pytest.mark.parametrize("rows", [32, 7])
@pytest.mark.parametrize("when", ["ahead", "behind", "alone"])
def test_a_penalty_on_a_full_value_adds_to_the_gradients_of_a_forward(worlds: WorldPool, when, rows):
    for found, expected in worlds.run(4, penalized, (2, 2), when, rows):
        for own, right in zip(found, expected, strict=True):
            torch.testing.assert_close(own, right, rtol=1e-12, atol=1e-12)


class Beside(nn.Module):
    """A plain parameter between DTensors, each in a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(WIDTH, HIDDEN), Scale(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.scale(self.up(x)))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def in_forwards() -> list[list[str]]:
    tp = mesh_of((2, 2))["tp"]
    kinds: list[list[str]] = []
    results = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = Beside().double()
        if is_sharded:
            plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
            parallelize_module(model, tp, plan)
            for module in model.children():
                dshard.fully_shard(module, mesh=mesh_of((2, 2))["dp"])
            dshard.fully_shard(model, mesh=mesh_of((2, 2))["dp"])
            for module in model.children():
                module.register_forward_pre_hook(
                    lambda module, _: kinds.append(
                        [type(module.weight).__name__, isinstance(module.weight, nn.Parameter)]
                    )
                )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            loss = model(torch.full((4, WIDTH), 0.1 * (step + 1), dtype=torch.float64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    assert results[1] == pytest.approx(results[0], abs=1e-12)
    return kinds


def test_dtensors_stand_in_forwards_and_plain_parameters_beside_them_stay_sharded(worlds: WorldPool):
    """A plain tensor beside a DTensor is an error of torch's; a sharded one means its value on all ranks."""
    for kinds in worlds.run(4, in_forwards):
        assert kinds[:3] == [["ShardedTensor", True]] * 3
        assert kinds[3:] == [["UnshardedDTensor", True], ["ShardedTensor", True], ["UnshardedDTensor", True]] * 2


class LateWriter(nn.Linear):
    """Writes to its weight from its second forward on, by what it is told."""

    num_calls = 0
    way = ""

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls > 1:
            with torch.no_grad():
                target: Any = self.weight.to_local() if self.way == "local" else getattr(self.weight, self.way)
                (target() if callable(target) else target).mul_(0.5)
        return super().forward(x)


def late_writes(way: str, *, shares_memory: bool) -> None:
    mesh = mesh_of((2, 2))
    torch.manual_seed(0)
    layer = LateWriter(WIDTH, HIDDEN).double()
    layer.way, before = way, layer.weight.detach().clone()
    model = nn.Sequential(layer)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    dshard.fully_shard(model, mesh=mesh["dp"])
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        model(x)
        if shares_memory:  # which the other ranks of the host read
            with pytest.raises(
                dshard.StateError, match=r"0\.weight: a write to a parameter within its module's forward"
            ):
                model(x)
            return
        model(x)
    assert torch.equal(layer.weight.full_tensor(), before * 0.5)


@pytest.mark.parametrize("way", ["detach", "data", "local"])
def test_a_forward_that_begins_to_write_to_a_dtensor_reaches_the_shards(messaging: WorldPool, way):
    messaging.run(4, late_writes, way, shares_memory=False)


@pytest.mark.parametrize("way", ["detach", "data", "local"])
def test_it_raises_where_ranks_share_the_memory(worlds: WorldPool, way):
    worlds.run(4, late_writes, way, shares_memory=True)


def written_before_backward(is_frozen: bool) -> None:
    mesh = mesh_of((2, 2))
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)).double()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for layer in model:
        dshard.fully_shard(layer, mesh=mesh["dp"])
    dshard.fully_shard(model, mesh=mesh["dp"])
    model[1].requires_grad_(not is_frozen)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    for _ in range(2):
        model(x).sum().backward()
    loss = model(x).sum()
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"1\.weight: .* was written to between its use in forward and the backward"):
        loss.backward()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_autograd_keeps_no_memory_of_a_dtensor_and_hears_of_writes_to_it(worlds: WorldPool, is_frozen):
    worlds.run(4, written_before_backward, is_frozen)
