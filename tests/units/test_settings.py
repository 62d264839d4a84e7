"""What is chosen for a unit or a model stays chosen: joined, formed late, copied, pickled, switched, converted."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import dshard
import dshard.setup.specs
import dshard.units.context
from dshard.collectives import Comms
from dshard.gradients.reducer import Reducer
from dshard.policies import StrategyRules
from dshard.runtime.runtime import units_of
from dshard.testing import WorldPool
from dshard.units.context import BufferSync, ModelSettings, UnitSettings

BF16 = torch.bfloat16


def hook(grad: Tensor) -> None:
    """A hook that pickle can take along."""


# Another value than the default for every field: a new field must be put in here.
UNIT: dict[str, Any] = {
    "reshard_after_forward": False,
    "reshard_after_backward": False,
    "strategy": "keep",
    "requires_sync": False,
    "requires_all_reduce": False,
    "averages": False,
    "divisor": 3.0,
    "reduce_hook": hook,
    "comms": Comms(separates=True),
    "num_slices": 1,  # `split` alone changes it: tests/slices/test_split.py
}
MODEL: dict[str, Any] = {
    "prefetch": 3,
    "max_input_buffers": 4,
    "memory_budget": 12345,
    "strategies": StrategyRules.of({"late.*": "ddp"}),
    "buffers": (),  # set below, for it names modules
}


def test_every_field_is_tried():
    assert UNIT.keys() == {field.name for field in fields(UnitSettings)}
    assert MODEL.keys() == {field.name for field in fields(ModelSettings)}


def saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def used(model: nn.Module) -> nn.Module:
    """As the first use leaves it."""
    with torch.no_grad():
        model(torch.ones(2, 4))
    return model


def joined(model: nn.Module) -> nn.Module:
    return dshard.fully_shard(nn.Sequential(model, nn.Linear(4, 4)))[0]


def switched(model: nn.Module) -> nn.Module:
    dshard.set_strategy(model, {"1.bias": "zero2"})
    return model


def all_switched(model: nn.Module) -> nn.Module:
    dshard.set_strategy(model, "keep")
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "used": used,
    "joined": joined,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "switched": switched,
    "all switched": all_switched,
    "to": lambda model: model.to(torch.float64).to(torch.float32),
    "copy of a copy, joined": lambda model: joined(copy.deepcopy(pickle.loads(pickle.dumps(model)))),
}
_OF_STRATEGIES = {"strategy", "reshard_after_forward", "reshard_after_backward"}


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))


def walked(way: str) -> list[str]:
    torch.manual_seed(0)
    model: Any = dshard.fully_shard(Net())
    context = model._dshard_units[0].model
    for unit in units_of(model):  # the one that the first use splits
        unit.settings = replace(unit.settings, **UNIT)
    sync = BufferSync((model[2],), init_device_mesh("cpu", (dist.get_world_size(),)))
    context.change(**{**MODEL, "buffers": (sync,)})
    model = WAYS[way](model)
    context = model._dshard_units[0].model
    context.before_use()
    wrong = []
    for unit in units_of(model):
        if unit.params and all(p.shape[0] == 4 and unit in model._own_units() for p in unit.params):
            for name, expected in UNIT.items():
                is_switched = name in _OF_STRATEGIES and "switched" in way
                if getattr(unit.settings, name) != expected and not is_switched:
                    wrong.append(f"{unit.label}: {name} is {getattr(unit.settings, name)}")
    for name, expected in MODEL.items():
        found = getattr(context.settings, name)
        if name == "buffers":
            if [b.modules for b in found] != [(model[2],)]:
                wrong.append(f"buffers are {found}")
        elif name == "strategies":
            if way != "all switched" and found.strategy_of("late.weight") != expected.strategy_of("late.weight"):
                wrong.append(f"strategies are {found}")
        elif found != expected:
            wrong.append(f"{name} is {found}")
    if context.schedule.depth != 3 or context.get(Reducer).max_in_flight != 4:
        wrong.append(f"in force are {context.schedule.depth} and {context.get(Reducer).max_in_flight}")
    return wrong


@dataclass(frozen=True, slots=True)
class MoreOfUnit(UnitSettings):
    """With a field that no line of dshard knows."""

    added: int = 0


@dataclass(frozen=True, slots=True)
class MoreOfModel(ModelSettings):
    """The same; it has to say how it is joined, as every field."""

    added: int = field(default=0, metadata={"joined": max})


def added_later(way: str) -> tuple[set[int], int]:
    """What is left of a setting that is added to dshard, and set on a model."""
    with (
        mock.patch.object(dshard.setup.specs, "UnitSettings", MoreOfUnit),
        mock.patch.object(dshard.units.context, "ModelSettings", MoreOfModel),
    ):
        torch.manual_seed(0)
        model: Any = dshard.fully_shard(Net())
        for unit in units_of(model):
            unit.change(added=7)
        units_of(model)[0].model.change(added=8)
        model = WAYS[way](model)
        context = model._dshard_units[0].model
        context.before_use()
        own = [unit for unit in units_of(model) if unit.params]
        return {unit.settings.added for unit in own}, context.settings.added


@pytest.mark.parametrize("way", WAYS)
def test_a_setting_that_is_added_is_not_forgotten(worlds: WorldPool, way):
    assert worlds.run(2, added_later, way) == [({7}, 8)] * 2


def test_a_setting_of_models_must_say_how_it_is_joined():
    unsaid: Any = make_dataclass("Unsaid", [("added", int, 0)], bases=(ModelSettings,), frozen=True)
    with pytest.raises(KeyError, match="joined"):
        unsaid().joined([unsaid()])


@pytest.mark.parametrize("way", WAYS)
def test_settings_stay(worlds: WorldPool, way):
    assert worlds.run(2, walked, way) == [[], []]


def set_on_a_block() -> tuple[int, int]:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    for i, block in enumerate(model):
        dshard.fully_shard(block)
        block.set_prefetch(i + 1)
    model[1].set_reduce_scatter_max_input_buffers(4)
    dshard.fully_shard(model)
    context = model._dshard_units[0].model
    return context.schedule.depth, context.get(Reducer).max_in_flight


def test_what_is_set_on_blocks_holds_for_the_model_and_the_largest_of_several(worlds: WorldPool):
    assert worlds.run(2, set_on_a_block) == [(3, 4)] * 2


COPIES = {way: WAYS[way] for way in ("deepcopy", "pickle", "torch.save")}


def buffers_of_a_copy(way: str) -> bool:
    model = dshard.fully_shard(Net(), buffers="broadcast")
    model = COPIES[way](model)
    with torch.no_grad():
        model[2].running_mean.fill_(dist.get_rank() + 1)
    model(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    means = [torch.empty(4) for _ in range(dist.get_world_size())]
    dist.all_gather(means, model[2].running_mean)
    return all(torch.equal(mean, means[0]) for mean in means)


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_broadcasts_its_buffers(worlds: WorldPool, way):
    assert worlds.run(2, buffers_of_a_copy, way) == [True, True]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x)


def dtype_of_a_method(way: str) -> list[torch.dtype]:
    model: Any = dshard.fully_shard(Encoder(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    dshard.register_fsdp_forward_method(model, "encode")
    other = COPIES[way](model)
    again = COPIES[way](other)
    return [each.encode(torch.ones(2, 4)).dtype for each in (model, other, again)]


@pytest.mark.parametrize("way", COPIES)
def test_a_copys_registered_method_is_a_forward(worlds: WorldPool, way):
    assert worlds.run(2, dtype_of_a_method, way) == [[BF16] * 3] * 2


def placed(param: nn.Parameter) -> Shard:
    return Shard(param.dim() - 1)


def head_on_a_copy(way: str, fn: Any, options: dict[str, Any]) -> tuple[str, list[float], list[float]]:
    """A new head on a copy: its kind, and the gradients of all ranks."""
    if fn == "local":
        fn = lambda param: Shard(0)  # noqa: E731
    torch.manual_seed(0)
    model: Any = dshard.fully_shard(Net(), shard_placement_fn=fn, **options)
    model = COPIES[way](model)
    torch.manual_seed(1)
    model.append(nn.Linear(4, 3, bias=False))
    model(torch.full((2, 4), float(dist.get_rank() + 1)) * torch.tensor([[1.0], [-1.0]])).square().sum().backward()
    weight = model[3].weight
    grads: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(grads, weight.grad.full_tensor().tolist() if hasattr(weight, "full_tensor") else "plain")
    return type(weight).__name__, weight.placements, all(grad == grads[0] for grad in grads)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize(("fn", "dim"), [(None, 0), (placed, 1)])
def test_a_new_head_on_a_copy_becomes_sharded(worlds: WorldPool, way, fn, dim):
    assert worlds.run(2, head_on_a_copy, way, fn, {}) == [("ShardedTensor", (Shard(dim),), True)] * 2


def head_refused(way: str) -> str:
    with pytest.raises(dshard.StateError) as caught:
        head_on_a_copy(way, "local", {})
    return str(caught.value)


def test_a_placement_that_pickle_could_not_take_along_is_said_when_it_is_asked_for(worlds: WorldPool):
    assert worlds.run(2, head_on_a_copy, "deepcopy", "local", {}) == [("ShardedTensor", (Shard(0),), True)] * 2
    for text in worlds.run(2, head_refused, "pickle"):
        assert "shard_placement_fn" in text
        assert "Define it in a module" in text
