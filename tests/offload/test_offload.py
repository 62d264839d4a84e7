"""Parameters that are kept on the CPU and used elsewhere.

Each test runs twice. With "cpu" the CPU stands for the other device, too; with "sim" that is a device of its own, whose
copies are late and whose collectives know no CPU tensors (`tests/accelerator`). What is offloaded has to train as what
is not, bit for bit.
"""

import copy
import io
import warnings
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dshard
from dshard.planner import DEVICES, Training, cluster_of
from dshard.planner.costs import UnitKind
from dshard.planning.plan import Profile
from dshard.policies import Offload, Strategy
from dshard.tensor import OffloadedShardedTensor
from dshard.tensor.operands import AgreedTensor
from dshard.units.copies import CopyStream
from tests.accelerator import device

pytestmark = pytest.mark.slow


@cache
def group_of(kind: str, ranks: tuple[int, ...]) -> Any:
    if kind == "sim":
        device.start()
    groups = {part: dist.new_group(part, backend="simccl" if kind == "sim" else "gloo") for part in _cosets(ranks)}
    return next(group for part, group in groups.items() if dist.get_rank() in part)


def _cosets(ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All groups of a dim of the mesh that `ranks` is the first group of; every rank makes all of them."""
    size, step = dist.get_world_size(), ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) == size:
        return [ranks]
    starts = [s for s in range(size) if s % (len(ranks) * step) < step]
    return [tuple(s + step * i for i in range(len(ranks))) for s in starts]


@cache
def mesh_of(kind: str, *, replicas: int = 1) -> DeviceMesh:
    size = dist.get_world_size()
    if replicas == 1:
        return DeviceMesh.from_group(group_of(kind, tuple(range(size))), kind)
    shards = size // replicas
    groups = [group_of(kind, tuple(range(0, size, shards))), group_of(kind, tuple(range(shards)))]
    mesh = torch.arange(size).view(replicas, shards)
    return DeviceMesh.from_group(groups, kind, mesh=mesh, mesh_dim_names=("replicas", "shards"))


def policy_of(kind: str, *, pins: bool = True) -> Any:
    cpu = torch.device("cpu")
    return Offload(cpu, cpu) if kind == "cpu" else CPUOffloadPolicy(pin_memory=pins)


class Net(nn.Module):
    """Even and uneven dims, a weight that is large enough for messages of its own, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 17), nn.GELU(), nn.Linear(17, 8)) for _ in range(3)
        )
        self.large = nn.Linear(8, 2100)
        self.scale, self.head = nn.Parameter(torch.tensor(1.5)), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids) * self.scale
        for block in self.blocks:
            h = h + block(h)
        return self.head(h + self.large(h).mean(-1, keepdim=True))


def build(kind: str, mesh: DeviceMesh, policies: list[Any], **options: Any) -> Net:
    """A model of which each block has a policy of its own, and the root the last."""
    torch.manual_seed(0)
    model = Net()
    for block, policy in zip(model.blocks, policies, strict=False):
        dshard.fully_shard(block, mesh=mesh, offload_policy=policy, **options)
    dshard.fully_shard(model, mesh=mesh, offload_policy=policies[-1], **options)
    return model


def batch(kind: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(0, 11, (3, 6), generator=generator).to(kind)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def train(kind: str, policies: list[Any], how: str) -> list[Any]:
    """Losses and norms of three steps, and the weights at the end."""
    mesh = mesh_of(kind, replicas=2 if how == "replicas" else 1)
    options: dict[str, Any] = {}
    if how == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    elif how == "half":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16)
    elif how == "few":
        options["reshard_after_forward"] = 2
    model: Any = build(kind, mesh, policies, **options)
    if how == "sync apart":
        model.set_separate_reduce_scatter_group()
    if how == "divided":
        model.set_gradient_divide_factor(3.0)
    if how == "kept":
        model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD if how == "sgd" else torch.optim.AdamW
    optim = optimizer(model.parameters(), lr=1e-2)
    if how == "hooked":  # the step sees sharded tensors rather than their shards
        optim.register_step_post_hook(lambda *_: None)
    if how == "in backward":
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step_alone)
    found: list[Any] = []
    for step in range(3):
        for micro in range(2 if how in ("micro", "twice") else 1):
            model.set_requires_gradient_sync(how != "micro" or micro == 1)
            loss = loss_of(model, batch(kind, 10 * step + micro))
            if how == "penalty":
                grads = torch.autograd.grad(loss, list(model.head.parameters()), create_graph=True)
                loss = loss + sum(g.square().sum() for g in grads)
            loss.backward()
            found.append(loss.item())
        clip = dshard.clip_grad_norm_ if how == "ours" else nn.utils.clip_grad_norm_
        found.append(float(clip(model.parameters(), 0.5)))
        optim.step()
        optim.zero_grad()
    return [*found, *(p.full_tensor().cpu().tolist() for p in model.parameters())]


def step_alone(param: Tensor) -> None:
    param.detach().add_(param.grad, alpha=-0.1)


WAYS = [
    "",
    "ours",
    "mixed",
    "half",
    "micro",
    "hooked",
    "sgd",
    "few",
    "divided",
    "kept",
    "twice",
    "in backward",
    "penalty",
]


def compare(kind: str, how: str, which: str) -> bool:
    all_away = [policy_of(kind)] * 4
    some = [None, policy_of(kind), None, policy_of(kind, pins=False)]
    return train(kind, all_away if which == "all" else some, how) == train(kind, [None] * 4, how)


@pytest.mark.parametrize("how", WAYS)
def test_what_is_offloaded_trains_as_what_is_not_bit_for_bit(run, how):
    assert run(2, compare, how, "all") == [True] * 2


@pytest.mark.parametrize("how", ["", "mixed", "micro", "hooked"])
def test_offloaded_units_stand_beside_others_under_one_optimizer_and_norm(run, how):
    assert run(2, compare, how, "some") == [True] * 2


def test_the_backends_own_collectives_on_the_cpu_too(worlds):
    assert worlds.run(2, compare, "cpu", "sync apart", "all") == [True] * 2


def test_replicas_of_offloaded_parameters_train_alike(run):
    assert run(4, compare, "replicas", "all") == [True] * 4


def test_a_world_of_one_rank_offloads_too(run):
    assert run(1, compare, "", "all") == [True]


def norms_at_home(kind: str, clip: str) -> tuple[list[int], list[bool]]:
    """How many shards were read at home for each norm, and whether that is right: as reduced, written to, added up."""
    model: Any = build(kind, mesh_of(kind), [policy_of(kind)] * 4)
    params = list(model.parameters())
    num_read = 0
    original = torch.linalg.vector_norm

    def noted(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal num_read
        num_read += x.device.type == "cpu" and not isinstance(x, (dshard.ShardedTensor, AgreedTensor))
        return original(x, *args, **kwargs)

    def norm() -> float:
        if clip == "dshard":
            return float(dshard.clip_grad_norm_(params, torch.inf))
        if clip == "each":
            return float(original(torch.stack([original(p.grad) for p in params])))
        return float(nn.utils.get_total_norm([p.grad for p in params], foreach=clip == "foreach" or None))

    reads, are_right = list[int](), list[bool]()
    torch.linalg.vector_norm = noted
    try:
        for change in ("reduced", "written to", "swapped", "added up"):
            if change == "written to":
                params[0].grad.mul_(3.0)
                params[1].grad.to_local().mul_(2.0)
                params[3].grad.to_local().data.mul_(2.0)  # which no version counts
            elif change == "swapped":
                params[0].grad, params[2].grad = params[0].grad.clone(), params[2].grad * 2.0
            else:
                loss_of(model, batch(kind, 0)).backward()
            before = num_read
            found = norm()
            reads.append(num_read - before)
            full = torch.cat([p.grad.full_tensor().flatten().double() for p in params])
            are_right.append(found == pytest.approx(float(original(full)), rel=1e-5))
    finally:
        torch.linalg.vector_norm = original
    return reads, are_right


@pytest.mark.parametrize("clip", ["dshard", "torch", "foreach", "each"])
def test_a_norm_of_gradients_that_a_device_has_reduced_does_not_read_them_at_home(run, request, clip):
    for reads, are_right in run(2, norms_at_home, clip):
        assert all(are_right)
        if "sim" in request.node.callspec.id:
            assert reads[0] <= 1  # of a parameter's that is no part of a unit's row
            assert reads[0] < reads[1] <= reads[3]


def planned(kind: str, policy: Any) -> tuple[list[Any], list[str]]:
    """What a model learns under a plan that keeps every other unit on the CPU, and the names of what is there."""
    mesh = mesh_of(kind)
    torch.manual_seed(0)
    model: Any = Net()
    titan, sample = DEVICES["titan-rtx"], torch.zeros(3, 5, dtype=torch.int64)
    profile = Profile(model, sample, device=titan, training=Training(), offload="auto")
    plan = profile.given(cluster_of(titan, dist.get_world_size()), "full")
    num = len(plan.strategies)
    units = plan.model.under([UnitKind(is_offloaded=policy is not None and i % 2 == 0) for i in range(num)])
    strategies = tuple(Strategy.of(("full", "zero1", "ddp", "keep")[i % 4]) for i in range(num))
    plan = replace(plan, model=units, strategies=strategies)
    dshard.fully_shard(model, mesh=mesh, plan=plan, offload_policy=policy)
    names = [name for name, param in model.named_parameters() if isinstance(param, OffloadedShardedTensor)]
    assert names == [name for unit in units.units if unit.is_offloaded for name in unit.param_names]
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), list[Any]()
    for step in range(3):
        loss = loss_of(model, batch(kind, step))
        loss.backward()
        found += [loss.item(), float(dshard.clip_grad_norm_(model.parameters(), 0.5))]
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        assert param.device.type == ("cpu" if name in names else kind)
    return [*found, *(p.full_tensor().cpu().tolist() for p in model.parameters())], names


def follow(kind: str) -> set[bool]:
    """Which of the places some of the parameters were in."""
    (found, names), (expected, none) = planned(kind, policy_of(kind)), planned(kind, None)
    assert found == expected
    assert not none
    return {name in names for name, _ in Net().named_parameters()}


def test_a_plan_says_which_units_are_offloaded(run):
    assert run(2, follow) == [{False, True}] * 2


def where_everything_is(kind: str) -> list[str]:
    """Devices at home and in use."""
    model = build(kind, mesh_of(kind), [policy_of(kind)] * 4)
    weight: Any = model.head.weight
    seen: list[str] = []
    model.head.register_forward_pre_hook(lambda *_: seen.append(weight.device.type))
    optim = torch.optim.AdamW(model.parameters())
    loss_of(model, batch(kind, 0)).backward()
    assert weight.grad.device.type == weight.grad.to_local().device.type == "cpu"
    optim.step()
    assert optim.state[weight]["exp_avg"].to_local().device.type == "cpu"
    assert weight.device.type == weight.to_local().device.type == weight.full_tensor().device.type == "cpu"
    assert all(v.device.type == "cpu" for v in model.state_dict().values())
    assert weight.device_mesh.device_type == kind
    with dshard.gathered(model) as fulls:
        seen.append(fulls["head.weight"].device.type)
    seen.append(str(weight.to_local().is_pinned()))
    return seen


def test_shards_gradients_and_states_are_at_home_and_values_in_use_away(run):
    first = run(2, where_everything_is)[0]
    assert first in (["cpu", "cpu", "False"], ["sim", "sim", "True"])


class Scaled(torch.autograd.Function):
    """Of the kind that is given a parameter itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


def use_in_many_ways(kind: str, policy: Any) -> list[Any]:
    """Gradients of uses in a forward, outside of one, by `autograd.grad` and with hooks."""
    model: Any = build(kind, mesh_of(kind), [policy] * 4)
    ids = batch(kind, 0)
    h = model.emb(ids)
    weight = model.head.weight
    hooked: list[Any] = []
    weight.register_hook(lambda g: hooked.append(g.full_tensor().cpu().tolist()))
    loss = Scaled.apply(h, weight).square().mean() + sum(F.linear(part, weight).sum() for part in h.unbind(0))
    loss = loss + weight.norm() + (weight - weight.detach().clone() * 2).square().mean() + weight.t()[0].sum()
    loss.backward()
    found = [loss.item(), hooked, weight.grad.full_tensor().cpu().tolist()]
    grads = torch.autograd.grad(loss_of(model, ids), [weight, model.scale])
    found += [g.full_tensor().cpu().tolist() for g in grads]
    loss = (model.head.weight.full_tensor().to(kind) * 2).sum()
    loss.backward()
    found += [weight.grad.full_tensor().cpu().tolist()]
    with torch.no_grad():
        beside = torch.ones(11, 8, device=weight.device)  # at home; in the other model, away
        found += [(weight + beside).sum().item(), (weight.to_local().sum() * 0).item(), float(weight.max())]
        found += [(h @ weight.t()).sum().item(), torch.cat([weight, weight]).sum().item()]
    return found


def uses_agree(kind: str) -> list[bool]:
    away = use_in_many_ways(kind, None)
    return [a == b for a, b in zip(use_in_many_ways(kind, policy_of(kind)), away, strict=True)]


def test_uses_outside_of_a_forward_and_in_functions_of_their_own_give_the_same(run):
    assert run(2, uses_agree) == [[True] * 11] * 2


def write_and_read(kind: str) -> list[bool]:
    """Whether each kind of write is what the next forward reads."""
    model = build(kind, mesh_of(kind), [policy_of(kind)] * 4)
    ids, weight = batch(kind, 0), model.head.weight
    found = []

    def reads(value: float) -> bool:
        out = model.head(torch.ones(1, 8, device=kind))
        return bool(torch.allclose(out.cpu(), 8 * value + model.head.bias.full_tensor()))

    with torch.no_grad():
        model(ids)
        weight.fill_(2.0)
        found.append(reads(2.0))
        weight.to_local().fill_(3.0)
        found.append(reads(3.0))
        weight.copy_(torch.full((11, 8), 4.0, device=kind))
        found.append(reads(4.0))
        weight.data = torch.full((11, 8), 5.0)
        found.append(reads(5.0))
        weight.mul_(torch.tensor(2.0, device=kind))
        found.append(reads(10.0))
        model.load_state_dict({k: torch.full(v.shape, 1.0) for k, v in model.state_dict().items()})
        found.append(reads(1.0))
        nn.init.constant_(weight, 7.0)
        found.append(reads(7.0))
        with dshard.gathered(model, writeback=True) as fulls:
            fulls["head.weight"].fill_(8.0)
        found.append(reads(8.0))
    return found


def test_what_is_written_at_home_is_what_the_next_use_reads(run):
    assert run(2, write_and_read) == [[True] * 8] * 2


def copies_of(kind: str) -> list[bool]:
    """Whether a deep copy, a pickle and a state dict continue the training as the model does."""
    model = build(kind, mesh_of(kind), [policy_of(kind)] * 4)
    loss_of(model, batch(kind, 0)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    twin = copy.deepcopy(model)
    loaded = build(kind, mesh_of(kind), [policy_of(kind)] * 4)
    file = io.BytesIO()
    torch.save({k: v.to_local() for k, v in model.state_dict().items()}, file)
    file.seek(0)
    with torch.no_grad():
        for name, shard in torch.load(file).items():
            loaded.get_parameter(name).to_local().copy_(shard)
    found = []
    for other in (model, twin, loaded):
        loss = loss_of(other, batch(kind, 1))
        loss.backward()
        assert other.head.weight.device.type == "cpu"
        assert other.head.weight.grad is not None
        found.append([loss.item(), other.head.weight.grad.full_tensor().tolist()])
    return [found[0] == one for one in found[1:]]


def test_copies_are_offloaded_too(run):
    assert run(2, copies_of) == [[True] * 2] * 2


def early_optimizer(kind: str) -> bool:
    """An optimizer, a gradient and a closure of before `fully_shard`; parameters on the meta device."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).to(kind)
    optim = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.ones(2, 8, device=kind)
    model(x).sum().backward()
    want = model[0].weight.grad.cpu()
    dshard.fully_shard(model, mesh=mesh_of(kind), offload_policy=policy_of(kind))
    same = torch.equal(model[0].weight.grad.full_tensor(), want)

    def closure() -> Tensor:
        optim.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    first, last = closure().item(), [optim.step(closure) for _ in range(3)]
    return same and last[-1].item() < first


def test_optimizers_of_before_and_with_closures_step_at_home(run):
    assert run(2, early_optimizer) == [True] * 2


def on_meta(kind: str) -> list[str]:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    dshard.fully_shard(model, mesh=mesh_of(kind), offload_policy=policy_of(kind))
    model.to_empty(device=kind)
    for layer in model:
        layer.reset_parameters()
    model.eval()
    model(torch.ones(2, 8, device=kind)).sum().backward()
    return [model[0].weight.device.type, model[1].running_mean.device.type, model[0].weight.grad.device.type]


def test_parameters_of_the_meta_device_get_memory_at_home_and_buffers_away(run):
    for home, buffers, grads in run(2, on_meta):
        assert (home, grads) == ("cpu", "cpu")
        assert buffers in ("cpu", "sim")


def move(kind: str) -> str:
    model = build(kind, mesh_of(kind), [policy_of(kind)] * 4)
    model.to("cpu")
    try:
        model.to("sim")
    except dshard.StateError as error:
        return str(error)
    return ""


def test_a_move_of_what_is_offloaded_raises_and_says_what_to_do(simulators):
    for error in simulators.run(2, move, "sim"):
        assert error.startswith("scale: an offloaded parameter stays on cpu and is copied to sim:0 for its use, but")
        assert error.endswith("to keep parameters on sim:0, leave out offload_policy.")


def refuse(policy: Any) -> str:
    try:
        dshard.fully_shard(nn.Linear(2, 2), offload_policy=policy)
    except dshard.ArgumentError as error:
        return str(error)
    return ""


def test_other_policies_are_refused(worlds):
    for error in worlds.run(1, refuse, "cpu"):
        assert error.startswith("fully_shard: offload_policy must be an OffloadPolicy, a CPUOffloadPolicy, or None")


def on_the_devices_own_device(kind: str) -> list[str]:
    layer: Any = nn.BatchNorm1d(4)
    dshard.fully_shard(layer, mesh=mesh_of(kind))
    return [str(layer.weight.device), str(layer.weight.to_local().device), str(layer.running_mean.device)]


def test_without_offload_parameters_go_to_the_current_device_of_the_meshs_kind(simulators):
    assert simulators.run(2, on_the_devices_own_device, "sim") == [["sim:0"] * 3] * 2


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def through_torchs_helpers(kind: str) -> list[bool]:
    """Full states of a model and its optimizer, and what a model does that took them."""
    models = [build(kind, mesh_of(kind), [policy] * 4) for policy in (policy_of(kind), None, policy_of(kind))]
    optims = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for model, optim in list(zip(models, optims, strict=True))[:2]:
        loss_of(model, batch(kind, 0)).backward()
        optim.step()
        optim.zero_grad()
    states = [get_state_dict(model, optim, options=FULL) for model, optim in zip(models, optims, strict=True)]
    same = all(torch.equal(states[0][0][k], v) for k, v in states[1][0].items())  # on rank 0; elsewhere there is none
    same &= len(states[0][1].get("state", {})) == (0 if dist.get_rank() else 24)
    for name, values in states[1][1].get("state", {}).items():
        same &= all(torch.equal(states[0][1]["state"][name][key], value) for key, value in values.items())
    options = StateDictOptions(full_state_dict=True)
    mine, state = get_state_dict(models[0], optims[0], options=options)
    for values in state["state"].values():  # else both optimizers count in one tensor
        values.update({key: value.clone() for key, value in values.items()})
    set_state_dict(models[2], optims[2], model_state_dict=mine, optim_state_dict=state, options=options)
    losses = []
    for model, optim in ((models[0], optims[0]), (models[2], optims[2])):
        loss_of(model, batch(kind, 1)).backward()
        optim.step()
        losses.append(loss_of(model, batch(kind, 2)).item())
    return [same, losses[0] == losses[1]]


def test_torchs_state_dict_helpers_see_what_they_see_without_offload(run):
    assert run(2, through_torchs_helpers) == [[True] * 2] * 2


def count_copies(kind: str) -> list[int]:
    """Copies into the device by a forward and backward, those back, and the waits of the host for any of them."""
    calls = {"in": 0, "out": 0, "waits": 0}
    copy_in, copy_out, mark = CopyStream.copy_in, CopyStream.copy_out, CopyStream._mark

    def counted_in(self: CopyStream, *args: Any) -> Any:
        calls["in"] += args[1] is not None  # from the row of the unit, in one copy
        return copy_in(self, *args)

    def counted_out(self: CopyStream, row: Tensor) -> Any:
        calls["out"] += row.dim() == 1  # not the norms of them, which come beside
        return copy_out(self, row)

    def counted_mark(self: CopyStream) -> Any:
        event = mark(self)

        def wait() -> None:
            calls["waits"] += 1
            event.synchronize()

        return SimpleNamespace(synchronize=wait)

    model = build(kind, mesh_of(kind), [policy_of(kind)] * 4)
    CopyStream.copy_in, CopyStream.copy_out, CopyStream._mark = counted_in, counted_out, counted_mark  # type: ignore[method-assign]
    try:
        loss_of(model, batch(kind, 0)).backward()
        model.head.weight.grad.to_local()
        [p.grad.to_local() for p in model.parameters()]
    finally:
        CopyStream.copy_in, CopyStream.copy_out, CopyStream._mark = copy_in, copy_out, mark  # type: ignore[method-assign]
    return list(calls.values())


def test_a_unit_is_copied_at_once_for_each_gather_and_its_gradients_once_and_each_copy_is_awaited(run):
    assert run(2, count_copies) == [[3 + 3 + 1, 4, 7 + 4]] * 2


def in_forwards(kind: str, is_compiled: bool, precision: Any) -> Any:
    """Losses and weights of three steps, and what stood in the place of parameters."""
    warnings.simplefilter("ignore")  # of dynamo's own
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, mesh, options = Net(), mesh_of(kind), {"mp_policy": precision}
    for block in model.blocks:
        if is_compiled:
            block.compile(backend="aot_eager", fullgraph=True)
        dshard.fully_shard(block, mesh=mesh, offload_policy=policy_of(kind), **options)
    dshard.fully_shard(model, mesh=mesh, offload_policy=policy_of(kind), **options)
    kinds: list[str] = []
    model.large.register_forward_pre_hook(lambda module, _: kinds.append(type(module.weight).__name__))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(3):
        loss = loss_of(model, batch(kind, step))
        loss.backward()
        dshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: param.full_tensor().cpu() for name, param in model.named_parameters()}, kinds


@pytest.mark.parametrize("precision", [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
def test_full_tensors_stand_in_forwards_and_compiled_blocks_take_them(run, request, precision):
    """On the simulated device nothing is compiled: torch has rules for each kind of device, and none for this one."""
    eager = run(2, in_forwards, False, precision)
    assert eager[0][2] == ["OffloadedShardedTensor", "UnshardedParameter", "UnshardedParameter"]
    if "sim" in request.node.name:
        return
    for (losses, weights, _), (others, compiled, _) in zip(eager, run(2, in_forwards, True, precision), strict=True):
        assert losses == others
        assert [name for name, value in weights.items() if not torch.equal(value, compiled[name])] == []


class Again(nn.Module):
    """A part that runs again in backward, within the unit that holds it, and asks where and what its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 17), nn.Linear(17, 8))
        self.use_reentrant = False

    def run(self, h: Tensor) -> Tensor:
        weight: Tensor = self.part[1].weight
        ones = torch.ones(8, dtype=weight.dtype, device=weight.device)
        return h + self.part(h) * ones + weight.t()[:, 0]

    def forward(self, h: Tensor) -> Tensor:
        return checkpoint(self.run, h, use_reentrant=self.use_reentrant)


def run_again(kind: str, strategy: str, precision: Any, use_reentrant: bool, policy: Any) -> list[Any]:
    torch.manual_seed(0)
    blocks = [Again() for _ in range(3)]
    model = nn.Sequential(nn.Embedding(11, 8), *blocks, nn.Linear(8, 11))
    options: dict[str, Any] = {"strategy": strategy, "offload_policy": policy}
    for block in blocks:
        block.use_reentrant = use_reentrant
        dshard.fully_shard(block, mesh=mesh_of(kind), mp_policy=precision, **options)
    dshard.fully_shard(model, mesh=mesh_of(kind), mp_policy=precision, **options)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(3):
        loss = loss_of(model, batch(kind, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, *(param.full_tensor().cpu().tolist() for param in model.parameters())]


def runs_again_alike(kind: str, *how: Any) -> bool:
    return run_again(kind, *how, policy_of(kind)) == run_again(kind, *how, None)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("precision", [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["full", "zero2"])
def test_checkpoints_within_an_offloaded_unit_find_the_devices_and_dtypes_of_its_forward(
    run, strategy, precision, use_reentrant
):
    assert run(2, runs_again_alike, strategy, precision, use_reentrant) == [True] * 2
