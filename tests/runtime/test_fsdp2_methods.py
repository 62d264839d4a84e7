"""The methods of FSDP2's `FSDPModule`, and of DTensor, that a migrated program calls."""

import copy
import inspect
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import dshard
from dshard.testing import WorldPool


def model_without_shards() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def model() -> Any:
    net = model_without_shards()
    for layer in net:
        dshard.fully_shard(layer)
    return dshard.fully_shard(net)


def gathered_units(net: nn.Module) -> int:
    return sum(unit.is_gathered for unit in net._dshard_units[0].model.units)


def test_every_public_method_of_torchs_class_is_defined_by_ours():
    names = {n for n, f in inspect.getmembers(TorchFSDPModule, inspect.isfunction) if n.startswith("set_")}
    names |= {"unshard", "reshard", "reset_iter_state"} & set(dir(TorchFSDPModule))
    assert len(names) > 15
    assert not [n for n in names if getattr(dshard.FSDPModule, n) is getattr(TorchFSDPModule, n)]


def unshard_and_reshard() -> list[int]:
    net = model()
    counts = [gathered_units(net)]
    handle = net[0].unshard(async_op=True)
    handle.wait()
    net[1].unshard()
    counts.append(gathered_units(net))
    with dshard.CommTrace() as trace:
        net(torch.ones(1, 4))
    counts.append(trace.calls("all_gather"))
    net[0].unshard()
    net[0].reshard()
    counts.append(gathered_units(net))
    return counts


def test_unshard_gathers_ahead_and_reshard_frees(worlds: WorldPool):
    assert worlds.run(2, unshard_and_reshard) == [[0, 2, 0, 0]] * 2


def kept_after_backward() -> list[int]:
    net = model()
    net.set_reshard_after_forward(False)
    net.set_reshard_after_backward(False)
    net(torch.ones(1, 4, requires_grad=True)).sum().backward()
    kept = gathered_units(net)
    net.set_reshard_after_backward(True)
    net(torch.ones(1, 4, requires_grad=True)).sum().backward()
    return [kept, gathered_units(net)]


def test_set_reshard_after_backward_keeps_units_gathered(worlds: WorldPool):
    assert worlds.run(2, kept_after_backward) == [[2, 0]] * 2


def kept_alone() -> list[Any]:
    net = model()
    net[0].set_reshard_after_backward(False)
    net.set_reshard_after_backward(False, recurse=False)  # whose own unit is empty
    net(torch.ones(1, 4, requires_grad=True)).sum().backward()
    kept = [layer._dshard_units[0].is_gathered for layer in net]
    with dshard.CommTrace() as trace:
        net(torch.ones(1, 4, requires_grad=True)).sum().backward()
    return [kept, trace.calls("all_gather", "0"), trace.calls("all_gather", "1")]


def test_set_reshard_after_backward_is_a_modules_own_and_saves_the_next_gather(worlds: WorldPool):
    assert worlds.run(2, kept_alone) == [[[True, False], 1, 2]] * 2  # the forward's is saved, the backward's is not


def gradients_with_factors(kind: str, factors: list[tuple[str, float]]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    shard = torch_fully_shard if kind == "fsdp2" else dshard.fully_shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("1.0", "1", "2", ""):
        shard(net.get_submodule(name), mesh=mesh)
        net.get_submodule(name).set_force_sum_reduction_for_comms(True)  # without it FSDP2 fails on gloo
    for name, factor in factors:
        net.get_submodule(name).set_gradient_divide_factor(factor)
    net(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
    return [p.grad.full_tensor() for p in net.parameters()]


@pytest.mark.parametrize("factors", [[], [("", 4.0)], [("1", 8.0)], [("", 1.0), ("1.0", 4.0), ("2", 0.5)]])
def test_set_gradient_divide_factor_divides_what_fsdp2_divides(worlds: WorldPool, factors):
    expected = worlds.run(2, gradients_with_factors, "fsdp2", factors)
    torch.testing.assert_close(worlds.run(2, gradients_with_factors, "dshard", factors), expected)


def gradient_of_root_alone(factor: float | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net: Any = dshard.fully_shard(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]))
    if factor is not None:
        net.set_gradient_divide_factor(factor)
    net(torch.full((1, 8), dist.get_rank() + 1.0)).sum().backward()
    net = copy.deepcopy(net)  # takes the factor along
    net(torch.full((1, 8), dist.get_rank() + 1.0)).sum().backward()
    return [p.grad.full_tensor() for p in net.parameters()]


def test_a_divide_factor_reaches_all_units_of_the_root_alone_and_its_copies(worlds: WorldPool):
    mean, divided = worlds.run(2, gradient_of_root_alone, None)[0], worlds.run(2, gradient_of_root_alone, 4.0)[0]
    torch.testing.assert_close([2 * g for g in mean], [4 * g for g in divided])


def synced_alone() -> list[int]:
    net = model()
    net[1].set_requires_gradient_sync(False)
    net.set_requires_gradient_sync(False, recurse=False)
    counts = []
    for _ in range(2):
        with dshard.CommTrace() as trace:
            net(torch.ones(1, 4)).sum().backward()
        counts += [trace.calls("reduce_scatter", "0"), trace.calls("reduce_scatter", "1")]
        net.set_requires_gradient_sync(True)
    return counts


def test_set_requires_gradient_sync_is_a_modules_own_or_that_of_all_below(worlds: WorldPool):
    assert worlds.run(2, synced_alone) == [[1, 0, 1, 1]] * 2


def kept_after_forward(recurse: bool) -> list[bool]:
    net: Any = dshard.fully_shard(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), sync="broadcast")
    net.set_reshard_after_forward(False, recurse=recurse)
    net(torch.ones(1, 8))
    return [unit.is_gathered for unit in net._context().units if unit.params]


@pytest.mark.parametrize("recurse", [True, False])
def test_set_reshard_after_forward_reaches_the_units_that_the_first_use_forms(worlds: WorldPool, recurse):
    assert worlds.run(2, kept_after_forward, recurse) == [[True] * 3] * 2


HINTS: dict[str, tuple[Any, ...]] = {
    "set_is_last_backward": (False,),
    "set_requires_all_reduce": (False,),
    "set_unshard_in_backward": (False,),
    "set_force_sum_reduction_for_comms": (True,),
    "set_reduce_scatter_unused_params": (True,),
    "set_reduce_scatter_max_input_buffers": (3,),
    "set_allocate_memory_from_process_group_for_comm": (False,),
    "set_post_optim_event": (None,),
    "_set_unshard_async_op": (True,),
}


def gradients_with_hints() -> None:
    net, plain = model(), model_without_shards()
    for layer in net:
        for name, arguments in HINTS.items():
            getattr(layer, name)(*arguments)
        layer.set_modules_to_forward_prefetch(list(net))
        layer.set_modules_to_backward_prefetch([net[0]])
    num_ranks = dist.get_world_size()
    for step in range(3):
        net(torch.full((1, 4), dist.get_rank() + 1.0 + step)).pow(2).sum().backward()
        for rank in range(num_ranks):
            (plain(torch.full((1, 4), rank + 1.0 + step)).pow(2).sum() / num_ranks).backward()
    for ours, expected in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), expected.grad)


def test_hints_of_fsdp2_change_no_gradient(worlds: WorldPool):
    worlds.run(2, gradients_with_hints)


def wrong_arguments() -> list[str]:
    net = model()
    calls: list[tuple[type[Exception], Any]] = [
        (ValueError, lambda: net.set_modules_to_forward_prefetch([net[0], nn.Linear(1, 1)])),
        (ValueError, lambda: net.set_modules_to_backward_prefetch([nn.Linear(1, 1)])),
        (ValueError, lambda: dshard.share_comm_ctx([nn.Linear(1, 1)])),
        (ValueError, lambda: dshard.register_fsdp_forward_method(net, "encode")),
        (ValueError, lambda: net.set_reshard_after_forward(3)),
        (ValueError, lambda: net.set_gradient_divide_factor(0)),
        (ValueError, lambda: net.set_gradient_divide_factor(None)),
        (ValueError, lambda: net.set_gradient_divide_factor(math.nan)),
        (ValueError, lambda: net.set_gradient_divide_factor(math.inf)),
        (TypeError, lambda: net.set_all_reduce_hook("mean")),
        (TypeError, lambda: net.set_custom_all_gather(print)),
        (TypeError, lambda: net.set_custom_reduce_scatter(None)),
        (ValueError, lambda: net.set_prefetch(-1)),
        (ValueError, lambda: net.set_prefetch(True)),
        (ValueError, lambda: net.set_reduce_scatter_max_input_buffers(0)),
        (TypeError, lambda: net.set_reduce_scatter_max_input_buffers(True)),
    ]
    texts = []
    for kind, call in calls:
        with pytest.raises(kind) as raised:
            call()
        texts.append(str(raised.value))
    dshard.register_fsdp_forward_method(nn.Linear(1, 1), "encode")  # as FSDP2: for programs that run with and without
    return texts


def test_wrong_arguments_of_methods_raise_as_in_fsdp2_and_say_what_to_do(worlds: WorldPool):
    for texts in worlds.run(2, wrong_arguments):
        assert all(re.match(r"\w+: .*, but .*\. [A-Z].*\.$", text) for text in texts), texts


def micro_batches_over_replicas() -> None:
    num_ranks = dist.get_world_size()
    plain = model_without_shards()
    net = dshard.fully_shard(model_without_shards(), mesh=init_device_mesh("cpu", (num_ranks, 1)))
    for step, is_last in enumerate([False, False, True]):
        net.set_requires_all_reduce(is_last)
        net.set_is_last_backward(is_last)
        net(torch.full((1, 4), dist.get_rank() + 1.0 + step)).pow(2).sum().backward()
        for rank in range(num_ranks):
            (plain(torch.full((1, 4), rank + 1.0 + step)).pow(2).sum() / num_ranks).backward()
    for ours, expected in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), expected.grad)


def test_micro_batches_without_all_reduce_over_replicas_add_up_to_the_plain_gradients(worlds: WorldPool):
    worlds.run(2, micro_batches_over_replicas)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x).tanh()
        return out


def encoded() -> None:
    ours, plain = Encoder(), Encoder()
    dshard.fully_shard(ours)
    dshard.register_fsdp_forward_method(ours, "encode")
    x = torch.ones(2, 4)
    out = ours.encode(x)
    torch.testing.assert_close(out, plain.encode(x))
    out.sum().backward()
    plain.encode(x).sum().backward()
    torch.testing.assert_close(ours.layer.weight.grad.full_tensor(), plain.layer.weight.grad)


def test_a_registered_method_trains_as_in_the_plain_module(worlds: WorldPool):
    worlds.run(2, encoded)


def ignored() -> None:
    net, plain = model_without_shards(), model_without_shards()
    dshard.fully_shard(net, ignored_params={net[0].weight})
    assert type(net[0].weight) is nn.Parameter
    assert isinstance(net[0].bias, DTensor)
    num_ranks = dist.get_world_size()
    net(torch.full((1, 4), dist.get_rank() + 1.0)).pow(2).sum().backward()
    own = model_without_shards()
    own(torch.full((1, 4), dist.get_rank() + 1.0)).pow(2).sum().backward()
    for rank in range(num_ranks):
        (plain(torch.full((1, 4), rank + 1.0)).pow(2).sum() / num_ranks).backward()
    torch.testing.assert_close(net[0].weight.grad, own[0].weight.grad)
    torch.testing.assert_close(net[1].weight.grad.full_tensor(), plain[1].weight.grad)
    assert not torch.allclose(own[0].weight.grad, plain[0].weight.grad)


def test_ignored_parameters_stay_each_ranks_own(worlds: WorldPool):
    worlds.run(2, ignored)


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.kaiming_uniform_(module.weight)
        with torch.no_grad():
            module.bias.copy_(torch.arange(4.0))


def applied() -> int:
    net, plain = model(), model_without_shards()
    with dshard.CommTrace() as trace:
        torch.manual_seed(5)
        net.apply(initialise)
    torch.manual_seed(5)
    plain.apply(initialise)
    for ours, expected in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), expected)
    return trace.calls("all_gather")


def test_apply_initialises_as_in_the_plain_model_without_a_gather(worlds: WorldPool):
    assert worlds.run(2, applied) == [0, 0]


def indexed() -> None:
    layers: Any = dshard.fully_shard(nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), sync="broadcast")
    assert isinstance(layers, nn.ModuleList)
    assert layers[1] is list(layers)[1]
    part = layers[:2]
    assert type(part) is nn.ModuleList
    assert part[0] is layers[0]
    net = model()
    assert net[0] is next(iter(net))
    head = net[:1]
    assert type(head) is nn.Sequential
    torch.testing.assert_close(head(torch.ones(1, 4)), model_without_shards()[0](torch.ones(1, 4)))


def test_slices_of_sharded_lists_are_plain_lists_of_the_same_modules(worlds: WorldPool):
    worlds.run(2, indexed)


def accepted() -> None:
    net = model()
    net.set_modules_to_forward_prefetch([net[0]])
    net.set_is_last_backward(True)
    net.set_requires_all_reduce(True)
    dshard.register_fsdp_forward_method(net, "forward")
    dshard.share_comm_ctx([net])
    assert isinstance(net, TorchFSDPModule)
    assert isinstance(net, nn.Sequential)
    assert type(net[:1]) is nn.Sequential


def test_methods_without_a_meaning_are_accepted(worlds: WorldPool):
    worlds.run(2, accepted)


def redistributed() -> str:
    weight = model()[0].weight
    assert weight.redistribute(placements=[Shard(0)]) is weight
    whole = weight.redistribute(placements=[Replicate()])
    assert type(whole) is DTensor
    assert torch.equal(whole.to_local(), weight.full_tensor())
    with pytest.raises(dshard.UnsupportedOpError) as raised:
        weight.redistribute(placements=[Shard(1)])
    return str(raised.value)


def test_redistribute_knows_its_own_placement_and_replicate(worlds: WorldPool):
    for text in worlds.run(2, redistributed):
        assert text.startswith("0.weight: ")
        assert "full_tensor()" in text


def recovered() -> bool:
    net = model()
    handle = net[1].register_forward_pre_hook(lambda m, a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net(torch.ones(1, 4))
    handle.remove()
    net.reset_iter_state()
    assert gathered_units(net) == 0
    net(torch.ones(1, 4)).sum().backward()
    return net[0].weight.grad is not None


def test_reset_iter_state_recovers_from_an_exception_in_forward(worlds: WorldPool):
    assert all(worlds.run(2, recovered))


def unshard_of_root_alone() -> tuple[int, int, int]:
    model: Any = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    dshard.fully_shard(model, sync="broadcast")
    runtime = model._context()
    model.unshard()
    everything = runtime.gathered_bytes
    model.reshard()
    after = runtime.gathered_bytes
    model[0].weight.full_tensor()
    read = runtime.gathered_bytes
    model.reshard()
    assert read > 0
    return everything, after, runtime.gathered_bytes


def test_the_root_alone_unshards_and_reshards_the_units_that_its_first_use_formed(worlds: WorldPool):
    assert worlds.run(2, unshard_of_root_alone) == [(3 * 72 * 4, 0, 0)] * 2
