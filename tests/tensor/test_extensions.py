"""Tensor subclasses that say how they are gathered: against FSDP2, one process by hand, and exact values."""

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import dshard
from dshard.checkpoint import load, save
from dshard.testing import WorldPool, expect_error, fake_world
from tests.tensor.extended import (
    BF16,
    F8,
    Float8,
    Gathered,
    Int8,
    Marked,
    Padded,
    Rounded,
    Strict,
    ToFloat8,
    ToMarked,
    ToOverrides,
    Wrapping,
    extend,
)

IN_BF16 = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
KINDS = [Rounded, ToFloat8, Int8, Gathered, ToMarked]
WIDTH = 12


def make(kind: Any, width: int = WIDTH, *, bias: bool = True) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, 2 * width, bias), nn.GELU(), nn.Linear(2 * width, width, bias))
    return extend(net, kind)


def shard(net: Any, policy: Any = None, *, call: Any = dshard.fully_shard, reshard: Any = None, **options: Any) -> Any:
    if policy is not None:
        options["mp_policy"] = policy
    for layer in (net[0], net[2]):
        call(layer, reshard_after_forward=reshard, **options)
    return call(net, **options)


def batch(step: int, rank: int, width: int = WIDTH) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(net: Any, x: Tensor) -> Tensor:
    return net(x).float().square().mean()


def train(net: Any, num_steps: int = 4, num_micro: int = 1, **options: Any) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, **options)
    losses = []
    width = net[0].in_features
    for step in range(num_steps):
        for micro in range(num_micro):
            if num_micro > 1:
                net.set_requires_gradient_sync(micro == num_micro - 1)
            loss = loss_of(net, batch(step + 100 * micro, dist.get_rank(), width))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def stored(local: Any) -> tuple[Tensor, ...]:
    """What a shard is made of."""
    if isinstance(local, Int8):
        return local.ints, local.scale
    return (getattr(local, "stored", local),)


def differences(net: nn.Module, other: nn.Module) -> list[str]:
    pairs = zip(net.named_parameters(), other.parameters(), strict=True)
    return [
        name
        for (name, p), q in pairs
        if type(p.to_local()) is not type(q.to_local())
        or not all(map(torch.equal, stored(p.to_local()), stored(q.to_local())))
    ]


def beside_fsdp2(kind: Any, policy: Any, reshard: bool, num_micro: int, width: int) -> list[Any]:
    net, other = make(kind, width), make(kind, width)
    shard(net, policy, reshard=reshard)
    shard(other, policy, call=torch_fully_shard, reshard=reshard)
    losses = train(net, num_micro=num_micro), train(other, num_micro=num_micro)
    wrong: list[Any] = [] if losses[0] == losses[1] else [losses]
    assert isinstance(net[0].weight.to_local(), kind)
    return wrong + differences(net, other)


@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("policy", [None, IN_BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_fsdp2_bit_for_bit(worlds: WorldPool, kind, policy, reshard, num_micro):
    assert worlds.run(2, beside_fsdp2, kind, policy, reshard, num_micro, WIDTH) == [[], []]


def test_uneven_shards_that_are_padded_train_as_under_fsdp2(worlds: WorldPool):
    assert worlds.run(2, beside_fsdp2, Padded, None, False, 1, 9) == [[], []]


def in_forward(weight: Any, dtype: torch.dtype) -> Tensor:
    """By hand, what forwards compute with."""
    if isinstance(weight, Int8):
        return weight.value().to(dtype)
    if isinstance(weight, Rounded):
        return weight.stored.to(BF16).to(dtype)
    if isinstance(weight, ToFloat8):
        scale = weight.stored.abs().max() / torch.finfo(F8).max
        return (weight.stored / scale).to(F8).to(dtype) * scale.to(dtype)
    return weight.detach().to(dtype)


def by_hand(kind: Any, num_ranks: int, dtype: torch.dtype, num_steps: int = 4) -> Any:
    """One process: weights as each rank's forward has them, gradients added over the ranks."""
    net = make(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(num_steps):
        total: dict[str, Any] = {}
        for rank in range(num_ranks):
            used = {n: in_forward(p.detach(), dtype).requires_grad_() for n, p in net.named_parameters()}
            x = batch(step, rank).to(dtype)
            loss_of(lambda x, used=used: functional_call(net, used, (x,)), x).backward()
            for n, p in used.items():
                total[n] = total.get(n, 0) + p.grad.float()
        for n, p in net.named_parameters():
            p.grad = total[n] / num_ranks
        optimizer.step()
    return net


def in_plain(weight: Tensor) -> Tensor:
    """Its exact value."""
    return torch.empty(weight.shape).copy_(weight.detach())


def beside_one_process(kind: Any, policy: Any, options: Any) -> list[str]:
    net = shard(make(kind), policy)
    train(net, **options)
    plain = by_hand(kind, dist.get_world_size(), policy.param_dtype if policy is not None else torch.float32)
    values = {n: p.full_tensor() for n, p in net.named_parameters()}
    expected = {n: in_plain(p) for n, p in plain.named_parameters()}
    assert all(type(v) is Tensor for v in values.values())
    return [n for n, v in values.items() if not torch.allclose(v, expected[n], rtol=1e-6, atol=1e-7)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("policy", [None, IN_BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_one_process_by_hand(worlds: WorldPool, kind, policy, num_ranks):
    assert worlds.run(num_ranks, beside_one_process, kind, policy, {}) == [[]] * num_ranks


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [Rounded, ToFloat8])
def test_optimizers_over_lists_step_the_class(worlds: WorldPool, kind, options):
    assert worlds.run(2, beside_one_process, kind, None, options) == [[], []]


def padded_on_three() -> None:
    net, plain = shard(make(Padded, 10)), make(Tensor.detach, 10)
    x = batch(0, 0, 10)
    used = {n: p.to(BF16).float() if p.dim() > 1 else p for n, p in plain.named_parameters()}
    assert torch.equal(net(x), functional_call(plain, used, (x,)))
    assert torch.equal(net[0].weight.full_tensor(), plain[0].weight)


def test_shards_of_any_size_are_padded_by_the_class_and_cut_again(worlds: WorldPool):
    worlds.run(3, padded_on_three)  # 10 rows are 4, 4 and 2


# ------------------------------------------------------------------------------------------------------ what is sent


def bytes_of_a_forward(kind: Any) -> int:
    net = shard(make(kind, bias=False), reshard=True)
    net(batch(0, 0))
    with dshard.CommTrace() as trace, torch.no_grad():
        net(batch(0, 0))
    return sum(r.payload_bytes + r.padding_bytes for r in trace.records if r.kind == "all_gather")


def test_a_gather_sends_the_bytes_that_the_class_gives(worlds: WorldPool):
    numel = 2 * (WIDTH * 2 * WIDTH) // 2  # of the shards of two weights
    rows = 3 * WIDTH // 2
    assert worlds.run(2, bytes_of_a_forward, ToFloat8) == [numel] * 2
    assert worlds.run(2, bytes_of_a_forward, Rounded) == [2 * numel] * 2
    assert worlds.run(2, bytes_of_a_forward, Int8) == [numel + 4 * rows] * 2
    assert worlds.run(2, bytes_of_a_forward, Tensor.detach) == [4 * numel] * 2


class Looks(nn.Linear):
    """Tells what its weight is in a forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.dtype, self.weight.t() @ torch.eye(self.out_features, dtype=self.weight.dtype)
        return super().forward(x)


def values_inside_and_outside(kind: Any, policy: Any) -> None:
    torch.manual_seed(0)
    net: Any = extend(nn.Sequential(Looks(WIDTH, WIDTH, bias=False)), kind)
    exact = net[0].weight.detach().stored.clone()
    dtype = policy.param_dtype if policy is not None else torch.float32
    rounded = in_forward(ToFloat8(exact), dtype)
    dshard.fully_shard(net, **({} if policy is None else {"mp_policy": policy}))
    weight = net[0].weight
    net(batch(0, 0))
    assert weight.dtype == torch.float32
    assert net[0].seen[0] == dtype
    assert torch.equal(net[0].seen[1].t(), rounded)
    assert not torch.equal(rounded.float(), exact)
    with torch.no_grad():
        for value in (
            weight.full_tensor(),
            weight * 1,
            weight.clone(),
            weight.t().t(),
            weight.view(-1).view(weight.shape),
        ):
            assert torch.equal(getattr(value, "full_tensor", lambda value=value: value)(), exact)
        assert torch.equal(net.state_dict()["0.weight"].full_tensor(), exact)
        assert torch.equal(weight.to(torch.float64).full_tensor(), exact.double())
        assert not isinstance(weight.sum(), dshard.ShardedTensor)
        for norm in (weight.norm(), torch._foreach_norm([weight])[0]):
            assert type(norm.full_tensor()) is Tensor  # as a DTensor's, though it is whole already
        assert weight.sum().item() == pytest.approx(exact.sum().item())
        assert weight.norm().item() == pytest.approx(exact.norm().item())
        assert weight.abs().max() == exact.abs().max()
        assert torch.equal(weight, exact)
        assert torch.equal(weight, net.state_dict()["0.weight"])
        assert torch._foreach_norm([weight])[0].item() == pytest.approx(exact.norm().item())
        assert torch.equal(weight[3], exact[3])
    with dshard.gathered(net) as values:
        assert torch.equal(values["0.weight"], exact)
    penalty = nn.functional.mse_loss(weight, torch.zeros(weight.shape), reduction="sum")
    (penalty + net(batch(0, dist.get_rank())).float().sum()).backward()
    grad = weight.grad.full_tensor()
    used = rounded.clone().requires_grad_()
    for rank in range(2):
        (batch(0, rank).to(dtype) @ used.t()).float().sum().backward()
    assert torch.allclose(grad, 2 * exact + used.grad.float() / 2, rtol=0, atol=1e-2 if dtype == BF16 else 1e-6)


@pytest.mark.parametrize("policy", [None, IN_BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", [ToFloat8, Wrapping])
def test_forwards_see_what_was_gathered_and_all_else_the_exact_value(worlds: WorldPool, kind, policy):
    worlds.run(2, values_inside_and_outside, kind, policy)


def large(kind: Any) -> None:
    """Shards that travel each in a message of its own."""
    net, plain = shard(make(kind, 160, bias=False)), make(kind, 160, bias=False)
    assert torch.equal(net[0].weight.full_tensor(), in_plain(plain[0].weight))
    used = {n: in_forward(p.detach(), torch.float32) for n, p in plain.named_parameters()}
    assert torch.equal(net(batch(0, 0, 160)), functional_call(plain, used, (batch(0, 0, 160),)))


@pytest.mark.parametrize("kind", [*KINDS, Wrapping])
def test_large_ones_travel_as_small_ones(worlds: WorldPool, kind):
    worlds.run(2, large, kind)


def strict() -> None:
    net, exact = shard(make(Strict)), in_plain(make(Strict)[0].weight)
    weight = net[0].weight
    loss_of(net, batch(0, 0)).backward()
    with torch.no_grad():
        assert torch.equal(weight, exact)
        assert weight.sum().item() == pytest.approx(exact.sum().item())
        assert torch.equal(weight.full_tensor() * 2, exact * 2)
    assert weight.grad.full_tensor().shape == weight.shape


def test_a_class_needs_no_more_operations_than_those_that_cut_it(worlds: WorldPool):
    worlds.run(2, strict)


def writes(kind: Any) -> None:
    net, plain = shard(make(kind)), make(Tensor.detach)
    target, expected = net[0].weight, plain[0].weight
    x = batch(0, 0)
    shard_before = target.to_local()
    for write in (
        lambda w: nn.init.normal_(w, std=0.1),
        lambda w: w.copy_(torch.linspace(-1, 1, w.numel()).view(w.shape)),
        lambda w: w.mul_(0.5),
        lambda w: w[3].fill_(0.25),
        lambda w: w.view(-1)[:7].zero_(),
    ):
        torch.manual_seed(5)
        net(x)
        with torch.no_grad():
            write(target)
            torch.manual_seed(5)
            write(expected)
            if kind is Int8:
                expected.copy_(Int8.of(expected.detach()).value())
        assert torch.allclose(target.full_tensor(), expected, rtol=0, atol=1e-6)
        assert target.to_local() is shard_before
        used = in_forward(kind.of(expected.detach()) if kind is Int8 else kind(expected.detach()), torch.float32)
        hidden = nn.functional.linear(x, used, plain[0].bias)
        assert torch.allclose(net[0](x), hidden, rtol=1e-4, atol=1e-5), "a stale copy"


@pytest.mark.parametrize("kind", KINDS)
def test_writes_are_those_of_the_class_and_the_next_forward_sees_them(worlds: WorldPool, kind):
    worlds.run(2, writes, kind)


def gathered_objects() -> tuple[int, bool]:
    net = shard(make(ToFloat8), reshard=True)
    out = net[0](batch(0, 0)).sum()
    gc.collect()
    alive = sum(type(o) is Float8 for o in gc.get_objects())
    out.backward()
    return alive, net[0].weight.grad is not None


def test_between_forward_and_backward_nothing_that_was_gathered_is_alive(worlds: WorldPool):
    assert worlds.run(2, gathered_objects) == [(0, True)] * 2


def memory_of_what_travelled(kind: Any, policy: Any) -> tuple[int, bool]:
    net = shard(make(kind, bias=False), policy)
    net[0].unshard()
    unit: Any = net[0].weight.gather_source
    return len(unit.copies.memories), unit.model.pool.kept_bytes > 0


def test_memory_of_what_travelled_is_free_where_the_full_values_are_copies_of_it(messaging: WorldPool):
    assert messaging.run(2, memory_of_what_travelled, ToFloat8, None) == [(1, False)] * 2
    assert messaging.run(2, memory_of_what_travelled, Rounded, IN_BF16) == [(1, False)] * 2
    assert messaging.run(2, memory_of_what_travelled, Rounded, None) == [(0, True)] * 2  # else peers may still read it


class Checkpointed(nn.Sequential):
    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.use_reentrant)


def checkpointed(kind: Any, use_reentrant: bool) -> list[str]:
    nets = []
    for is_checkpointed in (True, False):
        net = make(kind)
        if is_checkpointed:
            net.__class__ = Checkpointed
            net.use_reentrant = use_reentrant
        dshard.fully_shard(net)
        train(net)
        nets.append(net)
    return differences(*nets)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_forwards_train_as_others(worlds: WorldPool, kind, use_reentrant):
    assert worlds.run(2, checkpointed, kind, use_reentrant) == [[], []]


# --------------------------------------------------------------------------------------------------- what is kept


def copies_and_files(kind: Any, path: str) -> None:
    net = shard(make(kind))
    train(net, 2)
    twin = copy.deepcopy(net)
    assert isinstance(twin[0].weight.to_local(), kind)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    fresh = shard(make(kind))
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    fresh.load_state_dict(net.state_dict())
    full = shard(make(kind))
    full.load_state_dict({k: v.full_tensor() for k, v in net.state_dict().items()})
    losses = train(net)
    for other in (twin, loaded, fresh):
        assert train(other) == losses
        assert differences(net, other) == []
    if kind is not Int8:
        assert train(full) == losses
    dshard.save_safetensors(net, path)
    plain = shard(make(Tensor.detach))
    dshard.load_safetensors(plain, path)
    assert torch.equal(plain[0].weight.full_tensor(), net[0].weight.full_tensor())
    dshard.load_safetensors(full, path)
    assert torch.allclose(full[0].weight.full_tensor(), net[0].weight.full_tensor(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_pickles_state_dicts_and_files_hold_the_exact_value(worlds: WorldPool, kind, tmp_path):
    worlds.run(2, copies_and_files, kind, str(tmp_path / "model"))


def checkpoints(kind: Any, path: str) -> None:
    net = shard(make(kind))
    optimizer = torch.optim.AdamW(net.parameters())
    loss_of(net, batch(0, dist.get_rank())).backward()
    optimizer.step()
    save(path, net, optimizer)
    other = shard(make(kind))
    with torch.no_grad():
        other[0].weight.fill_(3.0)
    again = torch.optim.AdamW(other.parameters())
    load(path, other, again)
    assert isinstance(other[0].weight.to_local(), kind)
    assert torch.allclose(other[0].weight.full_tensor(), net[0].weight.full_tensor(), rtol=0, atol=1e-7)
    ours, theirs = optimizer.state[net[0].weight], again.state[other[0].weight]
    assert torch.equal(ours["exp_avg"].full_tensor(), theirs["exp_avg"].full_tensor())


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_brings_the_exact_values_back(worlds: WorldPool, kind, tmp_path):
    worlds.run(2, checkpoints, kind, str(tmp_path / "checkpoint"))


def from_meta() -> None:
    with torch.device("meta"):
        net = make(ToFloat8)
    shard(net, IN_BF16)
    with pytest.raises(dshard.StateError, match=r"0\.bias: .* and 1 more are on the meta device"):
        net(batch(0, 0))
    net.to_empty(device="cpu")
    plain = make(Tensor.detach)
    for model in (net, plain):
        torch.manual_seed(1)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
    assert isinstance(net[0].weight.to_local(), ToFloat8)
    assert torch.equal(net[0].weight.full_tensor(), plain[0].weight)
    first, *_, last = train(net)
    assert last < first


def test_weights_made_on_meta_get_memory_and_values_after_sharding(worlds: WorldPool):
    worlds.run(2, from_meta)


def told() -> tuple[Any, Any]:
    net = shard(make(Int8), IN_BF16)
    net(batch(0, 0))
    return Int8.told[0] is net[2], Int8.told[1]


def test_the_class_is_told_the_module_and_the_policy(worlds: WorldPool):
    assert worlds.run(2, told) == [(True, IN_BF16)] * 2


def in_another_dtype(kind: Any, dtype: torch.dtype) -> None:
    net = shard(make(kind))
    net(batch(0, 0))
    net.to(dtype)
    assert isinstance(net[0].weight.to_local(), kind)
    plain = make(kind)
    used = {n: in_forward(p.detach().to(dtype), dtype) for n, p in plain.named_parameters()}
    x = batch(0, 0).to(dtype)
    assert torch.equal(net(x), functional_call(plain, used, (x,)))
    loss_of(net, x).backward()
    assert net[0].weight.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, BF16])
@pytest.mark.parametrize("kind", [Rounded, ToFloat8])
def test_after_a_conversion_forwards_compute_in_the_new_dtype(worlds: WorldPool, kind, dtype):
    worlds.run(2, in_another_dtype, kind, dtype)


def frozen(call: Any) -> list[float]:
    """As adapters train beside a quantized model."""
    net = make(Int8)
    for layer in (net[0], net[2]):
        layer.weight.requires_grad_(requires_grad=False)
    shard(net, call=call)
    with dshard.CommTrace() as trace:
        losses = train(net)
    sent = [r for r in trace.records if r.kind == "reduce_scatter"]
    assert sum(r.payload_bytes for r in sent) == (4 * 4 * 3 * WIDTH // 2 if call is dshard.fully_shard else 0)
    return losses


def test_frozen_ones_send_no_gradients(worlds: WorldPool):
    assert worlds.run(2, frozen, dshard.fully_shard) == worlds.run(2, frozen, torch_fully_shard)


def drafts(kind: Any) -> None:
    net = shard(make(kind))
    with dshard.gathered(net, writeback=True) as values:
        values["0.weight"][1].fill_(0.5)
    assert torch.allclose(net[0].weight.full_tensor()[1], torch.full((WIDTH,), 0.5))
    assert isinstance(net[0].weight.to_local(), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_written_back_by_the_class(worlds: WorldPool, kind):
    worlds.run(2, drafts, kind)


def over_flat_gathers(kind: Any) -> list[str]:
    """As on backends without messages from rank to rank."""
    nets = [shard(make(kind)), shard(make(kind))]
    nets[0].set_separate_reduce_scatter_group(enable=True)
    for net in nets:
        train(net)
    return differences(*nets)


@pytest.mark.parametrize("kind", KINDS)
def test_gathers_by_the_backends_own_all_gather_give_the_same(worlds: WorldPool, kind):
    assert worlds.run(2, over_flat_gathers, kind) == [[], []]


def over_replicas(kind: Any) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = shard(make(kind), mesh=mesh)
    train(net)
    values = {n: p.full_tensor() for n, p in net.named_parameters()}
    expected = {n: in_plain(p) for n, p in by_hand(kind, 4, torch.float32).named_parameters()}
    return [n for n, v in values.items() if not torch.allclose(v, expected[n], rtol=1e-5, atol=1e-6)]


@pytest.mark.parametrize("kind", [Rounded, ToFloat8])
def test_the_mesh_that_the_class_is_told_is_that_of_the_shards(worlds: WorldPool, kind):
    assert worlds.run(4, over_replicas, kind) == [[]] * 4


def whole_model(kind: Any) -> list[str]:
    net, other = make(kind), make(kind)
    torch.manual_seed(0)
    shard(net)
    old = torch.optim.AdamW(other.parameters(), lr=1e-2)  # made before
    full = [weakref.ref(t) for t in stored(other[0].weight)]
    dshard.fully_shard(other)
    assert [ref() for ref in full] == [None] * len(full), "the full weight is kept"
    train(net)
    for step in range(4):
        loss_of(other, batch(step, dist.get_rank())).backward()
        old.step()
        old.zero_grad()
    return differences(net, other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_root_alone_and_an_optimizer_made_before_train_alike(worlds: WorldPool, kind):
    assert worlds.run(2, whole_model, kind) == [[], []]


def broadcast(kind: Any) -> list[str]:
    net, other = make(kind), make(kind)
    with torch.no_grad():
        net[0].weight.add_(0.1 * dist.get_rank())
    dshard.fully_shard(net, sync="broadcast")
    dshard.fully_shard(other)
    return [
        n
        for (n, p), q in zip(net.named_parameters(), other.parameters(), strict=True)
        if not torch.allclose(p.full_tensor(), q.full_tensor(), rtol=0, atol=1e-7)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_differ_get_the_weights_of_rank_0(worlds: WorldPool, kind):
    assert worlds.run(2, broadcast, kind) == [[], []]


# ---------------------------------------------------------------------------------------------------- what is refused


class Half(Rounded):
    """Without the other method."""

    fsdp_post_all_gather: Any = property()  # hasattr is False


class Slotted(Rounded):
    __slots__ = ("more",)


class Loses(Rounded):
    """new_zeros gives a plain tensor."""

    kept = Rounded.kept - {torch.ops.aten.new_zeros.default}


class Hides(Rounded):
    """Cannot be copied to a plain tensor."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and type(args[0]) is Tensor:
            raise NotImplementedError("copy_ is not there")
        return super().__torch_dispatch__(func, types, args, kwargs)


class TakesThree(Rounded):
    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, module: Any) -> Any:
        raise AssertionError


class GivesATensor(Rounded):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return self.stored, None


class GivesItself(Rounded):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self,), None


class FailsOnRank1(Rounded):
    fails = True

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        if self.fails and mesh.get_local_rank() == 1:
            raise ValueError("no luck")
        return super().fsdp_pre_all_gather(mesh)


class Fails(Rounded):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise ValueError("no luck")


class OfAnotherDtype(Rounded):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return outputs[0], outputs


class OfAnotherShape(Rounded):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return outputs[0].to(param_dtype).t(), outputs


class GivesNone(Rounded):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None


def depth_of(value: Any) -> int:
    return 1 + depth_of(value.stored) if isinstance(value, Marked) else 0


def marked(kind: Any, how: str) -> list[Any]:
    """Losses under FSDP2 and here, and how deep results and gradients of inputs are wrapped."""
    found = []
    for call in (torch_fully_shard, dshard.fully_shard):
        torch.manual_seed(0)
        net = extend(nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(5)]), kind)
        for layer in net if how == "blocks" else ():
            call(layer)
        call(net)
        optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
        Marked.num_inside = 0
        for step in range(3):
            x = batch(step, dist.get_rank(), 8).requires_grad_()
            out = net(x)
            loss = out.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss.stored.item(), depth_of(out), depth_of(x.grad), Marked.num_inside))
        found.append(losses)
    return found


@pytest.mark.parametrize("how", ["blocks", "root"])
@pytest.mark.parametrize("kind", [Gathered, ToMarked])
def test_activations_of_a_class_that_keeps_itself_are_wrapped_once(worlds: WorldPool, kind, how):
    for expected, found in worlds.run(2, marked, kind, how):
        assert found == expected
        assert [depths for _, *depths in found] == [[1, 1, 0]] * 3


class Asking(nn.Linear):
    """Asks for the class of its weight, and looks into it."""

    seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        self.seen = [
            isinstance(w, Marked) and (w.stored.sum().item(), hasattr(w, "other")) for w in (weight, weight.t())
        ]
        return super().forward(x)


def asks_for_the_class(kind: Any) -> list[Any]:
    found: list[Any] = []
    for call in (torch_fully_shard, dshard.fully_shard):
        torch.manual_seed(0)
        net: Any = call(extend(Asking(8, 8, bias=False), kind))
        found.append((net(batch(0, 0, 8)).stored.tolist(), net.seen))
    outside = [hasattr(net.weight, name) for name in ("stored", "fsdp_pre_all_gather")]
    return [found[0] == found[1] or found, outside]


@pytest.mark.parametrize("kind", [Gathered, ToMarked])
def test_in_a_forward_a_weight_is_of_the_class_that_it_is_gathered_as(worlds: WorldPool, kind):
    assert worlds.run(2, asks_for_the_class, kind) == [[True, [False] * 2]] * 2


def along_the_last(param: nn.Parameter) -> Shard:
    return Shard(param.dim() - 1)


def replicated(param: nn.Parameter) -> Replicate:
    return Replicate()


def refused_by_fully_shard(kind: Any, options: Any) -> None:
    dshard.fully_shard(make(kind), sync=None, **options)


@pytest.mark.parametrize(
    ("kind", "options", "error", "text"),
    [
        (Half, {}, "UnsupportedOpError", "without fsdp_post_all_gather"),
        (Slotted, {}, "UnsupportedOpError", "__slots__"),
        (Loses, {}, "UnsupportedOpError", "gave a Tensor of shape (12, 12)"),
        (Rounded, {"shard_placement_fn": along_the_last}, "PlacementError", "cut along dim 1"),
        (Rounded, {"shard_placement_fn": replicated}, "PlacementError", "whole on every rank"),
    ],
    ids=["half", "slots", "loses", "dim 1", "replicate"],
)
def test_what_cannot_be_cut_is_refused_by_name(worlds: WorldPool, kind, options, error, text):
    for found, message in expect_error(worlds.get_world(2), refused_by_fully_shard, kind, options):
        assert (found, message.startswith("0.weight: "), text in message) == (error, True, True), message


def number_of_ranks(later: bool) -> None:
    mesh = init_device_mesh("cpu", (4,))
    net = shard(make(Rounded), mesh=mesh, reshard=None if later else 2)
    net.set_reshard_after_forward(2)


@pytest.mark.parametrize("later", [False, True])
def test_a_number_of_ranks_to_reshard_to_is_refused_by_name(worlds: WorldPool, later):
    for kind, message in expect_error(worlds.get_world(4), number_of_ranks, later):
        assert (kind, "weight: " in message, "Rounded" in message) == ("UnsupportedOpError", True, True), message


def refused_by_a_forward(kind: Any, width: int) -> None:
    shard(make(kind, width), sync=None)(batch(0, 0, width))


@pytest.mark.parametrize(
    ("kind", "num_ranks", "text"),
    [
        (Rounded, 3, "pad them to 7 rows"),  # 20 rows are 7, 7 and 6
        (TakesThree, 2, "it takes 3 arguments"),
        (GivesATensor, 2, "must give (tensors, metadata), but gave (tensor("),
        (GivesItself, 2, "must give plain tensors, but gave a GivesItself"),
        (OfAnotherDtype, 2, "but gave (20, 10) and torch.bfloat16"),
        (OfAnotherShape, 2, "but gave (10, 20) and torch.float32"),
        (GivesNone, 2, "but gave None"),
        (ToOverrides, 2, "Overrides has a __torch_function__"),
    ],
)
def test_what_cannot_be_gathered_raises_on_every_rank_and_names_the_parameter(worlds: WorldPool, kind, num_ranks, text):
    for found, message in expect_error(worlds.get_world(num_ranks), refused_by_a_forward, kind, 10):
        assert found == "UnsupportedOpError", message
        assert message.startswith(("0.weight: fsdp_", "2.weight: fsdp_")), message
        assert text in message, message


def fails_on_one(in_step: int) -> None:
    net = shard(make(FailsOnRank1))
    FailsOnRank1.fails = False
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        FailsOnRank1.fails = step == in_step
        loss_of(net, batch(step, dist.get_rank())).backward()
        optimizer.step()


def test_an_error_of_one_rank_in_the_first_gather_is_one_of_all(worlds: WorldPool):
    (_, other), (_, own) = expect_error(worlds.get_world(2), fails_on_one, 0)
    assert own.startswith("0.weight: ")
    assert "ValueError: no luck" in own
    assert other.startswith("0.weight: ")
    assert "or an error, on another rank" in other


def test_an_error_of_one_rank_in_a_later_gather_reaches_the_other_at_once(worlds: WorldPool):
    (kind, other), (_, own) = expect_error(worlds.get_world(2), fails_on_one, 1)
    assert "ValueError: no luck" in own
    assert (kind, "shapes of" in other) == ("DivergenceError", True), other


def test_a_gather_that_fails_halfway_leaves_no_memory_behind():
    with fake_world(0, 2):
        net = shard(make(Fails))
        (unit,) = vars(net[0])["_dshard_units"]
        with pytest.raises(dshard.UnsupportedOpError, match="no luck"):
            net(batch(0, 0))
        gc.collect()
        assert unit.model.pool.out_bytes == 0, "the bias was on its way"


def shard_of_another_class() -> None:
    net = shard(make(Rounded))
    net(batch(0, 0))
    net[0].weight.data = torch.zeros(net[0].weight.shape)
    net(batch(0, 0))


def test_a_shard_that_is_no_longer_of_the_class_is_refused_by_name(worlds: WorldPool):
    for kind, message in expect_error(worlds.get_world(2), shard_of_another_class):
        assert (kind, message.startswith("0.weight: ")) == ("StateError", True), message


def without_an_exact_value() -> None:
    net = shard(make(Hides), sync=None)
    net(batch(0, 0))
    net[0].weight.full_tensor()


def test_a_class_without_an_exact_value_trains_and_is_refused_elsewhere(worlds: WorldPool):
    for kind, message in expect_error(worlds.get_world(2), without_an_exact_value):
        assert (kind, message.startswith("0.weight: the exact value")) == ("UnsupportedOpError", True), message


def different_weights() -> None:
    net = make(ToFloat8)
    net[2].weight.detach().stored.add_(dist.get_rank())
    dshard.fully_shard(net)


def test_weights_that_differ_between_ranks_are_named(worlds: WorldPool):
    for kind, message in expect_error(worlds.get_world(2), different_weights):
        assert (kind, "2.weight" in message, "0.weight" in message) == ("DivergenceError", True, False), message
