"""The methods of FSDP2's `FSDPModule`, and of DTensor, that a migrated program calls."""

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

import dshard
from dshard.testing import WorldPool


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in net:
        dshard.fully_shard(layer)
    return dshard.fully_shard(net)


def gathered_units(net: nn.Module) -> int:
    return sum(unit.is_gathered for unit in net._dshard_units[0].observer.units)


def test_every_public_method_of_torchs_class_is_defined_by_ours():
    names = {n for n, f in inspect.getmembers(TorchFSDPModule, inspect.isfunction) if n.startswith("set_")}
    names |= {"unshard", "reshard", "reset_iter_state"} & set(dir(TorchFSDPModule))
    assert len(names) > 15
    assert not [n for n in names if n not in vars(dshard.FSDPModule)]


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


def gradient_with(setting: str) -> torch.Tensor:
    net = model()
    if setting == "divide by 4":
        net.set_gradient_divide_factor(4.0)
    net(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
    return net[0].weight.grad.full_tensor()


def test_set_gradient_divide_factor_takes_the_place_of_the_number_of_ranks(worlds: WorldPool):
    mean, divided = (worlds.run(2, gradient_with, s)[0] for s in ("mean", "divide by 4"))
    assert torch.allclose(mean * 2, divided * 4)


def refusals() -> list[str]:
    net = model()
    texts = []
    for name in ("set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"):
        with pytest.raises(dshard.UnsupportedOpError) as raised:
            getattr(net, name)(None)
        texts.append(str(raised.value))
    net.set_modules_to_forward_prefetch([net[0]])
    net.set_is_last_backward(True)
    net.set_requires_all_reduce(True)
    dshard.register_fsdp_forward_method(net, "forward")
    dshard.share_comm_ctx([net])
    assert isinstance(net, TorchFSDPModule)
    assert isinstance(net, nn.Sequential)
    assert type(net[:1]) is nn.Sequential
    return texts


def test_methods_without_a_meaning_are_accepted_and_others_refused_by_name(worlds: WorldPool):
    for texts in worlds.run(2, refusals):
        assert all(text.startswith("FSDPSequential.set_") and "not supported" in text for text in texts)


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
    with pytest.raises(ZeroDivisionError):
        handle = net[1].register_forward_pre_hook(lambda m, a: 1 / 0)
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
    runtime = model._runtime()
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
