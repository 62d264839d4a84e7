"""Mixed precision: against FSDP2, against one process that casts by hand, and what a parameter is where."""

import contextlib
import copy
import io
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call

import dshard
from dshard.collectives import ReduceBucket
from dshard.testing import WorldPool, fake_world
from tests.collectives.test_native_backends import native
from tests.models import LanguageModel, ResidualMlp

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
IN_FP32 = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
IN_BF16 = MixedPrecisionPolicy(param_dtype=BF16)
WIDTH = 16


class Block(nn.Module):
    """Weights that backward sees through a view (linear), directly (norm, conv, gain) and not at all (biases)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.01))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.gain * self.down(nn.functional.silu(self.up(self.norm(x))))
        return x + hidden + self.conv(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(21, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 21)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


def make(name: str = "net") -> Any:
    torch.manual_seed(0)
    return {
        "net": lambda: LanguageModel(Block, WIDTH),
        "tied": lambda: LanguageModel(Block, WIDTH, tied=True),
        "lstm": Recurrent,
    }[name]()


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(21, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(net: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())


def shard(net: Any, policy: Any, *, how: str = "root", call: Any = dshard.fully_shard, **options: Any) -> Any:
    if how == "blocks":
        for layer in net.layers:
            call(layer, mp_policy=policy, **options)
    return call(net, mp_policy=policy, **options)


def train(net: Any, num_steps: int = 5) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(num_steps):
        loss = loss_of(net, batch(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full_values(net: nn.Module) -> list[Tensor]:
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in net.parameters()]


def differences(net: nn.Module, other: nn.Module) -> list[str]:
    pairs = zip(net.named_parameters(), full_values(net), full_values(other), strict=True)
    return [name for (name, _), a, b in pairs if a.dtype != b.dtype or not torch.equal(a, b)]


def beside_fsdp2(name: str, how: str, policy: Any, checkpoints: str) -> list[str]:
    net, other = make(name), make(name)
    if checkpoints == "wrapped":
        for each in (net, other):
            each.layers = nn.ModuleList(map(checkpoint_wrapper, each.layers))
    else:
        net.checkpoints = other.checkpoints = checkpoints
    shard(net, policy, how=how)
    shard(other, policy, how="blocks" if name == "net" else "root", call=torch_fully_shard)
    losses = train(net), train(other)
    wrong = [] if losses[0] == losses[1] else [f"losses {losses}"]
    return wrong + differences(net, other)


@pytest.mark.parametrize("policy", [IN_FP32, IN_BF16, MixedPrecisionPolicy(reduce_dtype=BF16)], ids=str)
@pytest.mark.parametrize(("name", "how"), [("net", "blocks"), ("net", "root"), ("tied", "root"), ("lstm", "root")])
def test_training_is_that_of_fsdp2_bit_for_bit(worlds: WorldPool, name, how, policy):
    assert worlds.run(2, beside_fsdp2, name, how, policy, "") == [[], []]


@pytest.mark.parametrize("checkpoints", ["reentrant", "not reentrant", "wrapped"])
@pytest.mark.parametrize("how", ["blocks", "root"])
def test_checkpointed_blocks_train_as_those_of_fsdp2(worlds: WorldPool, checkpoints, how):
    assert worlds.run(2, beside_fsdp2, "net", how, IN_FP32, checkpoints) == [[], []]


def wrapped_blocks_in_other_dtypes() -> list[str]:
    """Differences after training with and without torch's wrapper, where norms compute in fp32; and of a copy."""
    policy = {"*norm*": None, "*": IN_FP32}
    net, other = make(), make()
    net.layers = nn.ModuleList(map(checkpoint_wrapper, net.layers))
    shard(net, policy, how="blocks")
    shard(other, policy, how="blocks")
    net = copy.deepcopy(net)
    losses = train(net), train(other)
    return [*([] if losses[0] == losses[1] else [f"losses {losses}"]), *differences(net, other)]


def test_wrapped_blocks_compute_again_in_the_dtypes_of_their_patterns(worlds: WorldPool):
    assert worlds.run(2, wrapped_blocks_in_other_dtypes) == [[], []]


def by_hand(name: str, num_ranks: int, compute: torch.dtype) -> nn.Module:
    """One process: weights cast, each rank's gradients added in fp32."""
    net = make(name)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(5):
        total: dict[str, Tensor] = {}
        for rank in range(num_ranks):
            cast = {n: p.detach().to(compute).requires_grad_() for n, p in net.named_parameters()}
            loss_of(lambda tokens, cast=cast: functional_call(net, cast, (tokens,)), batch(step, rank)).backward()
            for n, p in cast.items():
                total[n] = total.get(n, 0) + p.grad.float()
        for n, p in net.named_parameters():
            p.grad = total[n] / num_ranks
        optimizer.step()
    return net


def as_by_hand(name: str, options: dict[str, Any]) -> list[str]:
    net = shard(make(name), IN_FP32, **options)
    train(net)
    return differences(net, by_hand(name, dist.get_world_size(), BF16))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"memory_budget": 4000}], ids=str)
def test_training_is_that_of_one_process_that_casts_by_hand(worlds: WorldPool, num_ranks, options):
    assert worlds.run(num_ranks, as_by_hand, "net", options) == [[] for _ in range(num_ranks)]


def as_by_hand_on_a_native_backend() -> list[str]:
    with native():
        net = shard(make(), IN_FP32, how="blocks")
    train(net)
    return differences(net, by_hand("net", dist.get_world_size(), BF16))


def test_backends_with_collectives_of_their_own_give_the_same(worlds: WorldPool):
    assert worlds.run(2, as_by_hand_on_a_native_backend) == [[], []]


class Curious(nn.Module):
    """Notes what its weight looks like in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        self.seen = {
            "dtype": weight.dtype,
            "view": weight.t().dtype,
            "to": weight.to(weight.dtype).dtype,
            "x": x.dtype,
            "float": weight.float().dtype,
            "rounded": torch.equal(weight.float(), weight.full_tensor().float()),
            "like": torch.zeros_like(weight).dtype,
            "twice": (weight.detach() * 2).dtype,
            "copy": weight.clone().dtype,
            "object": weight is self.inner.weight and isinstance(weight, nn.Parameter),
        }
        return self.inner(x)


def what_a_weight_is() -> tuple[dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    net = Curious()
    exact = net.inner.weight.detach().clone()
    shard(net, IN_FP32)
    out = net(torch.randn(3, 4))
    inside = {**net.seen, "out": out.dtype}
    out.sum().backward()
    with torch.no_grad():
        net(torch.randn(3, 4))
    assert net.seen == {k: v for k, v in inside.items() if k != "out"}
    weight = net.inner.weight
    outside = {
        "dtype": weight.dtype,
        "grad": weight.grad.dtype,
        "value": torch.equal(weight.full_tensor(), exact),
        "op": torch.equal(weight.detach() @ torch.eye(4), exact),
        "state": net.state_dict()["inner.weight"].dtype,
        "iter_full": dict(dshard.iter_full(net))["inner.weight"].dtype,
    }
    net.reshard()
    with dshard.CommTrace() as trace, dshard.gathered(net) as fulls:
        outside["gathered"] = torch.equal(fulls["inner.weight"], exact)
        outside["gathered's calls"] = trace.calls("all_gather"), len({id(p.gather_source) for p in net.parameters()})
        net(torch.randn(3, 4))
        outside["inside of gathered"] = net.seen["dtype"]
    return inside, outside


def test_a_weight_has_the_compute_dtype_in_forward_and_its_own_elsewhere(worlds: WorldPool):
    for inside, outside in worlds.run(2, what_a_weight_is):
        assert inside == {
            "dtype": BF16,
            "view": BF16,
            "to": BF16,
            "x": BF16,
            "float": F32,
            "rounded": True,
            "like": BF16,
            "twice": BF16,
            "copy": BF16,
            "object": True,
            "out": BF16,
        }
        assert outside == {
            "dtype": F32,
            "grad": F32,
            "value": True,
            "op": True,
            "state": F32,
            "iter_full": F32,
            "gathered": True,
            "gathered's calls": (1, 1),
            "inside of gathered": BF16,
        }


def bytes_of_a_step(policy: Any) -> tuple[int, int]:
    net = shard(make(), policy, how="blocks")
    with dshard.CommTrace() as trace:
        loss_of(net, batch(0, dist.get_rank())).backward()
    return tuple(sum(r.payload_bytes for r in trace.select(kind)) for kind in ("all_gather", "reduce_scatter"))


def test_gathers_send_half_the_bytes_and_reductions_those_of_their_dtype(worlds: WorldPool):
    gathers, reductions = worlds.run(2, bytes_of_a_step, None)[0]
    assert worlds.run(2, bytes_of_a_step, IN_FP32)[0] == (gathers // 2, reductions)
    assert worlds.run(2, bytes_of_a_step, IN_BF16)[0] == (gathers // 2, reductions // 2)
    assert worlds.run(2, bytes_of_a_step, MixedPrecisionPolicy(reduce_dtype=BF16))[0] == (gathers, reductions // 2)


def dtypes_of_arrival() -> set[torch.dtype]:
    seen: set[torch.dtype] = set()
    add = ReduceBucket.add

    def watched(self: Any, indices: list[int], grads: list[Tensor], **kwargs: Any) -> None:
        seen.update(grad.dtype for grad in grads)
        add(self, indices, grads, **kwargs)

    net = shard(make("tied"), IN_FP32)
    ReduceBucket.add = watched  # type: ignore[method-assign]
    try:
        loss_of(net, batch(0, 0)).backward()
    finally:
        ReduceBucket.add = add  # type: ignore[method-assign]
    return seen


def test_gradients_reach_the_reduction_as_they_were_computed_with_no_copy_in_fp32(worlds: WorldPool):
    assert worlds.run(2, dtypes_of_arrival) == [{BF16}, {BF16}]


def used_in_both_ways(name: str) -> list[str]:
    """A penalty on the exact weights, beside a loss through rounded ones."""
    net, plain = shard(make(), IN_FP32, how="blocks"), make()
    params = dict(plain.named_parameters())
    cast = {n: p.detach().to(BF16).requires_grad_() for n, p in params.items()}
    tokens = batch(0, 0)

    def penalty(weights: dict[str, Tensor]) -> Tensor:
        return sum((p**2).sum() if name == "square" else p.norm() for p in weights.values())

    (loss_of(net, tokens) + penalty(dict(net.named_parameters()))).backward()
    loss_of(lambda t: functional_call(plain, cast, (t,)), tokens).backward()
    penalty(params).backward()
    wrong = []
    for n, p in net.named_parameters():
        expected = cast[n].grad.float() + params[n].grad
        # Autograd adds a leaf's gradients before they are reduced: bf16 and fp32 give fp32.
        if not torch.allclose(p.grad.full_tensor(), expected, rtol=1e-6, atol=1e-6):
            wrong.append(f"{n}: {(p.grad.full_tensor() - expected).abs().max()}")
    return wrong


@pytest.mark.parametrize("name", ["square", "norm"])
def test_a_penalty_outside_of_forward_is_on_the_exact_weights(worlds: WorldPool, name):
    assert worlds.run(2, used_in_both_ways, name) == [[], []]


def casts_and_copies() -> list[str]:
    """A cast or copy means the value of when it was made, also where the weight itself has another dtype."""
    torch.manual_seed(0)
    net = Curious()
    exact = net.inner.weight.detach().clone()
    shard(net, IN_FP32)
    weight, wrong = net.inner.weight, []
    copy_, double = weight.detach().clone(), weight.detach().double()

    class Reader(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.equal(copy_ @ torch.eye(4), exact):
                wrong.append("a copy that was made outside is rounded in forward")
            if not torch.equal(double @ torch.eye(4, dtype=torch.double), exact.double()):
                wrong.append("a cast that was made outside is rounded in forward")
            with torch.no_grad():
                net.inner.bias.copy_(torch.full((4,), 1 / 3))
                weight[0, 0] = 1 / 3
            return x

    net.inner.register_forward_pre_hook(lambda module, args: (Reader()(args[0]),))
    net(torch.randn(2, 4))
    if net.inner.bias.full_tensor()[0] != torch.tensor(1 / 3) or weight.full_tensor()[0, 0] != torch.tensor(1 / 3):
        wrong.append("a write in forward is rounded")
    expected = exact.clone()
    expected[0, 0] = 1 / 3
    if not torch.equal(weight.full_tensor(), expected):
        wrong.append("a write in forward rounds the elements beside it")
    return wrong


def test_nothing_but_uses_in_forward_is_rounded(worlds: WorldPool):
    assert worlds.run(2, casts_and_copies) == [[], []]


def outputs_and_inputs(policy: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    net = Curious()
    shard(net, policy)
    try:
        return net(torch.randn(2, 4)).dtype, net.seen["x"]
    except RuntimeError as error:
        return str(error).splitlines()[0], net.seen["x"]


def test_output_dtype_and_cast_forward_inputs(worlds: WorldPool):
    assert worlds.run(2, outputs_and_inputs, MixedPrecisionPolicy(BF16, output_dtype=F32))[0] == (F32, BF16)
    as_they_come = worlds.run(2, outputs_and_inputs, MixedPrecisionPolicy(BF16, cast_forward_inputs=False))[0]
    assert as_they_come[1] == F32
    assert "dtype" in as_they_come[0]  # torch's own error: fp32 inputs, bf16 weights


def with_patterns() -> dict[str, Any]:
    net = make()
    seen: dict[str, Any] = {}
    shard(net, {"*norm*": F32, "head.*": MixedPrecisionPolicy(F32, output_dtype=F32), "*": IN_FP32})
    for name in ("layers.0.norm", "layers.0.up", "norm", "head"):

        def note(module: Any, args: Any, out: Tensor, name: str = name) -> None:
            seen[name] = (args[0].dtype, module.weight.dtype, out.dtype)

        net.get_submodule(name).register_forward_hook(note, prepend=True)
    seen["out"] = net(batch(0, 0)).dtype
    seen["after the norm"] = net.layers[0].norm(torch.randn(1, 2, WIDTH, dtype=BF16)).dtype
    train(net, 2)
    seen["grads"] = all(torch.isfinite(p.full_tensor()).all().item() for p in net.parameters())
    return seen


def test_patterns_give_parameters_dtypes_of_their_own(worlds: WorldPool):
    for seen in worlds.run(2, with_patterns):
        assert seen["layers.0.up"] == (BF16, BF16, BF16)
        assert seen["layers.0.norm"] == seen["norm"] == (F32, F32, F32)  # before it is given back in bf16
        assert seen["head"] == (F32, F32, F32)
        assert (seen["out"], seen["after the norm"], seen["grads"]) == (F32, BF16, True)


def micro_batches() -> list[str]:
    """Without sync gradients are added up in the dtype of the reduction."""
    net, expected = shard(make(), IN_FP32, how="blocks"), {}
    plain = make()
    for i in range(3):
        with dshard.no_sync(net) if i < 2 else contextlib.nullcontext():
            loss_of(net, batch(i, dist.get_rank())).backward()
        for rank in range(dist.get_world_size()):
            cast = {n: p.detach().to(BF16).requires_grad_() for n, p in plain.named_parameters()}
            loss_of(lambda t, cast=cast: functional_call(plain, cast, (t,)), batch(i, rank)).backward()
            for n, p in cast.items():
                expected[n] = expected.get(n, 0) + p.grad.float() / dist.get_world_size()
    return [
        n
        for n, p in net.named_parameters()
        if not torch.allclose(p.grad.full_tensor(), expected[n], rtol=1e-6, atol=1e-7)
    ]


def test_micro_batches_are_added_up_in_the_dtype_of_the_reduction(worlds: WorldPool):
    assert worlds.run(2, micro_batches) == [[], []]


def seen_by_hooks() -> tuple[Any, ...]:
    net, other = shard(make(), IN_FP32), shard(make(), IN_FP32)
    seen = []
    for p in net.parameters():
        p.register_hook(lambda g: (seen.append((g.dtype, g.to_local().dtype)), g * 2)[1])
        p.register_post_accumulate_grad_hook(lambda p: seen.append((p.grad.dtype, p.grad.to_local().dtype)))
    loss_of(net, batch(0, 0)).backward()
    loss_of(other, batch(0, 0)).backward()
    close = [
        torch.allclose(p.grad.full_tensor(), 2 * q.grad.full_tensor(), rtol=1e-2)
        for p, q in zip(net.parameters(), other.parameters(), strict=True)
    ]
    (grad,) = torch.autograd.grad(loss_of(other, batch(0, 0)), [other.head.weight])
    exact = torch.equal(grad.full_tensor(), other.head.weight.grad.full_tensor().to(BF16))
    return set(seen), all(close), (grad.dtype, grad.to_local().dtype, exact)


def test_hooks_and_autograd_grad_see_the_compute_dtype_and_grad_has_the_parameters(worlds: WorldPool):
    for seen, close, grad in worlds.run(2, seen_by_hooks):
        assert seen == {(BF16, BF16), (F32, F32)}
        assert close
        assert grad == (BF16, BF16, True)


def copies_and_pickles() -> list[str]:
    net = shard(make(), IN_FP32, how="blocks")
    train(net, 1)
    twin = copy.deepcopy(net)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    losses = [train(each, 2) for each in (net, twin, loaded)]
    wrong = [] if losses[0] == losses[1] == losses[2] else [f"losses {losses}"]
    return wrong + differences(net, twin) + differences(net, loaded)


def test_copies_and_pickles_keep_the_policy(worlds: WorldPool):
    assert worlds.run(2, copies_and_pickles) == [[], []]


def from_meta() -> list[str]:
    eager = make()
    for module in eager.modules():
        if hasattr(module, "reset_parameters"):
            torch.manual_seed(1)
            module.reset_parameters()
    shard(eager, IN_FP32)
    with torch.device("meta"):
        net = make()
    shard(net, IN_FP32)
    net.to_empty(device="cpu")
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            torch.manual_seed(1)
            module.reset_parameters()
    with torch.no_grad():
        for layer in net.layers:
            layer.gain.fill_(1.01)
    losses = train(net), train(eager)
    wrong = [] if losses[0] == losses[1] else [f"losses {losses}"]
    net.double()
    loss_of(net, batch(0, 0)).backward()
    wrong += [n for n, p in net.named_parameters() if p.dtype != torch.double or p.grad.dtype != torch.double]
    return wrong


def test_a_model_from_the_meta_device_trains_as_one_that_was_made_at_once(worlds: WorldPool):
    assert worlds.run(2, from_meta) == [[], []]


def gradient_penalty() -> list[str]:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    shard(nets[0], IN_FP32)
    shard(nets[1], None)
    grads = []
    for net in nets:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
        (slope,) = torch.autograd.grad(net(x).sum(), [x], create_graph=True)
        slope.pow(2).sum().backward()
        grads.append([p.grad.full_tensor() if p.grad is not None else None for p in net.parameters()])
    return [
        f"{i}: {a} {b}"
        for i, (a, b) in enumerate(zip(*grads, strict=True))
        if (a is None) != (b is None) or (a is not None and not torch.allclose(a, b, rtol=0.1, atol=0.02))
    ]


def test_a_gradient_penalty_is_near_that_in_fp32(worlds: WorldPool):
    assert worlds.run(2, gradient_penalty) == [[], []]


def with_a_scaler() -> list[bool]:
    net = shard(make(), MixedPrecisionPolicy(F16, reduce_dtype=F32))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    before = net.head.weight.full_tensor().clone()
    results = []
    for poison in (False, True):
        loss = loss_of(net, batch(0, dist.get_rank()))
        scaler.scale(loss * (float("inf") if poison and dist.get_rank() == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = net.head.weight.full_tensor().clone()
        results.append(torch.equal(before, after))
        before = after
    return results


def test_a_grad_scaler_steps_in_fp16_and_skips_on_all_ranks(worlds: WorldPool):
    assert worlds.run(2, with_a_scaler) == [[False, True], [False, True]]


def optimizer_in_backward() -> list[str]:
    net, other = shard(make(), IN_FP32), shard(make(), IN_FP32)
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in net.parameters()}

    def step(p: Any) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    for i in range(5):
        loss_of(net, batch(i, dist.get_rank())).backward()
    train(other)
    return differences(net, other)


def test_an_optimizer_in_backward_steps_on_gradients_in_the_parameters_dtype(worlds: WorldPool):
    assert worlds.run(2, optimizer_in_backward) == [[], []]


def autocast_run() -> tuple[list[str], list[tuple[int, int]]]:
    net, plain = shard(make(), None, how="blocks"), make()
    ddp = nn.parallel.DistributedDataParallel(plain)
    gathers = []
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (net, ddp)]
    for step in range(4):
        for model, optimizer in zip((net, ddp), optimizers, strict=True):
            with dshard.CommTrace() as trace:
                with torch.autocast("cpu", dtype=BF16):
                    loss = loss_of(model, batch(step, dist.get_rank()))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if model is net:
                gathers.append(sum(r.payload_bytes for r in trace.select("all_gather")))
        with torch.no_grad():  # without autocast in between: in full precision
            assert torch.equal(net(batch(0, 0)), plain(batch(0, 0)))
    return differences(net, plain), gathers


def test_autocast_gathers_what_it_casts_in_its_dtype_from_the_second_step_on(messaging: WorldPool):
    def numel(module: nn.Module, *, kept: bool) -> int:
        return sum(p.numel() for n, p in module.named_parameters() if kept == ("norm" in n or "gain" in n))

    block = make().layers[0]
    per_block = (4 * numel(block, kept=True) + 2 * numel(block, kept=False)) // 2
    for rank, (wrong, gathers) in enumerate(messaging.run(2, autocast_run)):
        assert wrong == []
        rows = (11, 10)[rank] * WIDTH  # of the embedding, which is looked up as it is, and of the head
        # Blocks are gathered twice, what stays with the root once.
        assert gathers[1:] == [2 * 2 * per_block + 4 * (rows + WIDTH) + 2 * rows] * 3
        assert gathers[1] < 0.6 * gathers[0]


class Codec(nn.Module):
    """Used by methods."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def encode(self, x: Tensor, *, fails: bool = False) -> Tensor:
        if fails:
            raise ArithmeticError
        return torch.tanh(x @ self.inner.weight.t())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def registered_method() -> list[Any]:
    torch.manual_seed(0)
    net = Codec()
    weight = net.inner.weight.detach().clone().to(BF16).requires_grad_()
    shard(net, MixedPrecisionPolicy(BF16, F32, output_dtype=F32))
    x = torch.randn(3, 4)
    exact = net.encode(x).dtype
    dshard.register_fsdp_forward_method(net, "encode")
    with contextlib.suppress(ArithmeticError):
        net.encode(x, fails=True)
    after_a_failure = net.inner.weight.dtype
    out = net.encode(x)
    out.sum().backward()
    torch.tanh(x.to(BF16) @ weight.t()).float().sum().backward()
    same = torch.equal(net.inner.weight.grad.full_tensor(), weight.grad.float())
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.inner.weight.zero_()
    assert not twin.encode(x).any()
    assert net.encode(x).any()
    return [exact, after_a_failure, out.dtype, same, net.inner.weight.dtype]


def test_a_registered_method_is_a_forward(worlds: WorldPool):
    assert worlds.run(2, registered_method)[0] == [F32, F32, F32, True, F32]


def over_two_meshes() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    losses, nets = [], []
    for call in (dshard.fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        net = ResidualMlp(WIDTH, 2 * WIDTH)
        # By columns and rows, beside a norm that is not cut over the inner mesh.
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        call(net, mesh=mesh["dp"], mp_policy=IN_FP32)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("dp"))
            loss = net(torch.randn(4, WIDTH, generator=generator)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        nets.append(net)
    wrong = [] if losses[:3] == losses[3:] else [f"losses {losses}"]
    return wrong + differences(*nets)


def test_tensor_parallelism_computes_in_the_compute_dtype_as_under_fsdp2(worlds: WorldPool):
    assert worlds.run(4, over_two_meshes) == [[] for _ in range(4)]


BAD = {
    "policy": ("mp_policy must be a MixedPrecisionPolicy", "bfloat16"),
    "dtype": ("of floating-point dtypes, but it is torch.int32. Pass torch.bfloat16", torch.int32),
    "pattern": ("mp_policy must be a MixedPrecisionPolicy", {"*norm*": "fp32"}),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_policy_is_refused_and_the_module_left_as_it_was(worlds: WorldPool, what):
    assert worlds.run(2, refused, what) == [True, True]


def refused(what: str) -> bool:
    text, policy = BAD[what]
    net = make()
    with pytest.raises(dshard.ArgumentError, match=text):
        dshard.fully_shard(net, mp_policy=policy)
    return type(net) is LanguageModel and all(type(p) is nn.Parameter for p in net.parameters())


def converted(dtypes: list[torch.dtype], policy: Any, how: str) -> list[bool]:
    """Whether a model that is converted trains as one that was sharded in that dtype, after each conversion."""

    def build(dtype: torch.dtype) -> Any:
        return shard(make().to(dtype), policy, how=how)

    net, same = build(dtypes[0]), []
    train(net, 2)
    for dtype in dtypes[1:]:
        net = net.to(dtype)
        other = build(dtype)
        other.load_state_dict({name: value.full_tensor().clone() for name, value in net.state_dict().items()})
        same.append(train(net, 2) == train(other, 2) and not differences(net, other))
    return same


@pytest.mark.parametrize("how", ["root", "blocks"])
@pytest.mark.parametrize(
    "policy", [IN_FP32, IN_BF16, MixedPrecisionPolicy(reduce_dtype=BF16), {"*norm*": F32, "*": BF16}]
)
@pytest.mark.parametrize("dtypes", [[BF16, F32, BF16], [F32, BF16, F32], [BF16, torch.float64, F32]], ids=str)
def test_a_policy_holds_in_whatever_dtype_the_parameters_are_kept(worlds: WorldPool, dtypes, policy, how):
    assert worlds.run(2, converted, dtypes, policy, how) == [[True] * (len(dtypes) - 1)] * 2


class Unasked(UserDict[str, Tensor]):
    """A mapping that is neither true nor false, as tensordict's."""

    def __bool__(self) -> bool:
        raise RuntimeError("a mapping was asked whether it is true")


class Picks(nn.Linear):
    """A layer that takes a mapping and gives one."""

    def forward(self, values: Unasked) -> Unasked:  # type: ignore[override]
        return Unasked(out=super().forward(values["x"]))


def test_a_mapping_that_is_neither_true_nor_false_is_cast():
    with fake_world(0, 2):
        model = dshard.fully_shard(
            Picks(4, 4), mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
        )
        out = model(Unasked(x=torch.ones(2, 4)))
        assert (type(out), out["out"].dtype) == (Unasked, torch.float64)
