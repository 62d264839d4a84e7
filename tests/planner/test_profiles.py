"""Costs told from a trace: bytes never below it, times of a device, clusters of its hosts."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dshard.errors import ArgumentError, PlanError, StateError
from dshard.planner.costs import Cluster
from dshard.planner.devices import DEVICES, device_named
from dshard.planner.profiles import Training, UnitTimes, WholeSteps, costs_of
from dshard.planner.rates import cluster_of, published
from dshard.planner.tracing import trace
from dshard.testing import fake_world
from tests.planner.models import CASES, parts_of

A100 = DEVICES["a100-80g"]


def traced(name="gpt", batch=4):
    make, sample = CASES[name]
    model = make()
    return trace(model, sample(batch), parts_of(model)), model


@pytest.mark.parametrize("name", CASES)
def test_bytes_at_each_unit_are_never_below_what_the_trace_saw(name):
    found, model = traced(name)
    costs = costs_of(found, model, training=Training(), device=A100)
    place_of = {part: place for place, part in enumerate(found.order)}
    kept = [sum(unit.activation_bytes for unit in costs.units[: i + 1]) for i in range(len(costs.units))]
    for phase in found.phases:
        place = place_of[phase.part]
        unit = costs.units[place]
        backward = max(unit.backward_transient_bytes, unit.gradients_transient_bytes)
        assert phase.peak_bytes <= kept[place] + (backward if phase.is_backward else unit.forward_transient_bytes)
        assert phase.late_bytes is None or phase.late_bytes <= kept[place] + unit.gradients_transient_bytes
    most = max(
        here + max(unit.forward_transient_bytes, unit.backward_transient_bytes, unit.gradients_transient_bytes)
        for here, unit in zip(kept, costs.units, strict=True)
    )
    assert most == found.peak_bytes  # and not above it


def test_what_is_gone_when_the_first_gradient_is_there_counts_no_more_beside_it():
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    found = trace(model, torch.ones(16, 64), parts_of(model), loss_of=lambda out: out.square().sum())
    (unit,) = costs_of(found, model, training=Training(), device=A100).units
    out, loss = 16 * 32 * 4, 4
    assert unit.activation_bytes == out + loss
    assert unit.backward_transient_bytes >= 2 * out - 2 * loss  # the gradient of the output, and a product on its way
    assert unit.gradients_transient_bytes == loss  # the output has gone, its gradient is there, and that of the loss


def test_a_module_that_runs_twice_counts_where_it_runs():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.first(self.second(self.first(x).relu()).relu()).relu()

    model = Twice()
    found = trace(model, torch.ones(16, 8), parts_of(model))
    costs = costs_of(found, model, training=Training(), device=A100)
    first, second = costs.units
    assert (first.name, second.name) == ("first", "second")
    values = 16 * 8 * 4  # what each relu gives is kept, and at last the loss
    assert (first.activation_bytes, second.activation_bytes) == (values, 2 * values + 4)
    kept = first.activation_bytes + second.activation_bytes
    assert kept + second.backward_transient_bytes == found.peak_bytes
    assert second.backward_transient_bytes > 0


def test_times_are_those_of_the_device_or_those_measured():
    found, model = traced()
    costs = costs_of(found, model, training=Training(), device=A100)
    assert sum(unit.forward_s + unit.backward_s for unit in costs.units) == pytest.approx(
        sum(A100.seconds(phase.ops) for phase in found.phases)
    )
    times = [UnitTimes(0.5 * i, i) for i in range(len(found.parts))]
    measured = costs_of(found, model, training=Training(), times=times)
    assert [(unit.forward_s, unit.backward_s) for unit in measured.units] == [
        (t.forward_s, t.backward_s) for t in times
    ]
    assert {unit.source for unit in measured.units} == {"measured"}
    with pytest.raises(PlanError, match="must know a device, or measured times"):
        costs_of(found, model, training=Training())


def test_parameters_have_the_bytes_of_how_they_are_trained():
    found, model = traced()
    model.tokens.weight.requires_grad_(False)
    training = Training(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32, state_bytes_per_element=4)
    params = {
        param.name: param
        for unit in costs_of(found, model, training=training, device=A100).units
        for param in unit.params
    }
    assert set(params) == {name for name, _ in model.named_parameters()}
    up = params["blocks.0.mlp.up.weight"]
    assert (up.length, up.index_numel, up.can_split) == (256, 64, True)
    assert (up.stored_itemsize, up.gather_itemsize, up.grad_itemsize, up.state_bytes_per_element) == (4, 2, 4, 4)
    frozen = params["tokens.weight"]
    assert (frozen.grad_itemsize, frozen.state_bytes_per_element, frozen.can_split) == (0, 0, True)
    assert not params["norm.weight"].can_split


def test_owners_step_what_is_named_and_their_products_take_time():
    found, model = traced()
    names = [name for name, param in model.named_parameters() if param.ndim == 2 and name.startswith("blocks.")]
    units = costs_of(found, model, training=Training(whole=WholeSteps(names)), device=A100).units
    params = {param.name: param for unit in units for param in unit.params}
    assert [name for name, param in params.items() if param.owner_work] == names
    up, norm = params["blocks.0.mlp.up.weight"], params["norm.weight"]
    assert up.owner_work == 30 * 256 * 64 * 64  # a matrix times itself, 30 times
    assert (up.state_bytes_per_element, up.step_bytes_per_element) == (4, 12)
    assert (norm.state_bytes_per_element, norm.step_bytes_per_element) == (8, 4)
    for unit in units:
        owned = [param for param in unit.params if param.owner_work]
        products_s = sum(param.owner_work for param in owned) / (312e12 * A100.efficiency.compute)
        num_bytes = sum(param.numel * (3 * 4 + 2 * 4) for param in owned)  # all but products: as other optimizers
        traffic_s = num_bytes / (A100.memory_bytes_per_s * A100.efficiency.memory)
        assert unit.owners_s == pytest.approx(products_s + traffic_s)
        shards = [param for param in unit.params if not param.owner_work]
        assert unit.touched_bytes == sum(param.numel * (3 * 4 + 2 * 8) for param in shards)
    every = costs_of(found, model, training=Training(whole=WholeSteps()), device=A100).units
    assert {p.name for unit in every for p in unit.params if p.owner_work} == {
        name for name, param in model.named_parameters() if param.ndim == 2
    }
    rated = costs_of(found, model, training=Training(whole=WholeSteps()), device=A100, rates=published()).units
    assert all(unit.owners_s > 0 for unit in rated if any(param.owner_work for param in unit.params))
    with pytest.raises(PlanError, match=r"has no 'blocks\.9\.weight'"):
        costs_of(found, model, training=Training(whole=WholeSteps(["blocks.9.weight"])), device=A100)


def test_owners_of_what_tensor_parallelism_cuts_are_refused_by_name():
    found, model = traced()
    with fake_world(0, 2):
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"blocks.0.mlp.up": ColwiseParallel()})
        for whole in (WholeSteps(), WholeSteps(["blocks.0.mlp.up.weight"])):
            with pytest.raises(PlanError, match=r"no tensor parallelism cuts, but blocks\.0\.mlp\.up\.weight is"):
                costs_of(found, model, training=Training(whole=whole), device=A100)
        costs_of(found, model, training=Training(whole=WholeSteps(["blocks.1.mlp.up.weight"])), device=A100)


def test_a_group_across_hosts_shares_the_network_of_a_host():
    cluster = cluster_of(A100, 512)
    assert isinstance(cluster, Cluster)
    large = 1e9
    inside, across = cluster.all_gather_s(large, 8), cluster.all_gather_s(large, 512)
    assert inside == pytest.approx(large * 7 / 8 / (300e9 * 0.8), rel=0.01)
    assert across == pytest.approx(large * 511 / 512 / (200e9 * 0.8), rel=0.1)
    assert cluster.all_reduce_s(large / 8, 8) == pytest.approx(2 * large * 63 / 64 / (200e9 * 0.8), rel=0.01)
    slow = cluster_of(A100, 16, ranks_per_host=4, between_hosts=1e9)
    assert slow.all_gather_s(large, 16) == pytest.approx(large * 15 / 16 / 0.8e9, rel=0.01)
    assert cluster_of(A100, 4).across is None
    assert cluster_of(A100.name, 512) == cluster


def test_every_device_says_where_its_figures_are_from():
    for name, device in DEVICES.items():
        assert device.name == name
        assert "datasheet" in device.source or "product page" in device.source
        assert device.flops_per_s.get("bfloat16", device.flops_per_s["float16"]) == device.flops_per_s["float16"]
        assert device.flops_per_s["float16"] > device.flops_per_s["float32"]
        assert 0 < device.limit_bytes < device.memory_bytes
        assert device.between_hosts.bytes_per_s < device.per_host * device.within_host.bytes_per_s


def test_a_size_in_a_device_s_name_is_that_of_its_memory():
    sized = {name: int(name.rsplit("-", 1)[1][:-1]) for name in DEVICES if name.endswith("g")}
    assert {"a100-40g", "a100-64g", "a100-80g", "h100-64g", "h100-80g", "h100-96g"} <= sized.keys()
    for name, size in sized.items():
        assert size * 10**9 <= DEVICES[name].memory_bytes <= size * 2**30
    makers = {DEVICES[name].source.split()[0] for name in ("b200", "l40s", "rtx-4090", "a6000", "mi250x", "mi300x")}
    assert makers == {"NVIDIA", "AMD"}


def test_memory_is_what_drivers_show_and_every_figure_was_checked():
    shown = {"h100-96g": 97_871, "h200": 143_771, "b200": 183_359, "rtx-4090": 24_564, "a6000": 49_140, "l40s": 46_068}
    for name, mib in shown.items():
        assert 0.99 * mib * 2**20 <= DEVICES[name].memory_bytes <= 1.01 * mib * 2**20, name
    for name, device in DEVICES.items():
        assert "checked: " in device.source or name in ("v100-32g", "titan-rtx")


def test_devices_of_one_family_differ_in_memory():
    for family in ("a100", "h100"):
        kinds = [device for name, device in DEVICES.items() if name.startswith(family)]
        assert len({device.memory_bytes_per_s for device in kinds}) == len(kinds) == 3
    assert DEVICES["a100-64g"].flops_per_s["float16"] == pytest.approx(312e12 * 124 / 108, rel=0.001)


def test_an_unknown_device_or_dtype_is_refused_with_those_that_are_known():
    with pytest.raises(ArgumentError, match=r"must be one of a100-40g, .* but it is 'abacus'"):
        device_named("abacus")
    with pytest.raises(ArgumentError, match=r"it is 'abacus'"):
        cluster_of("abacus", 8)
    with pytest.raises(StateError, match=r"v100-32g: .*\(float16, float32\), but it is bfloat16"):
        DEVICES["v100-32g"].check(torch.bfloat16)
    DEVICES["v100-32g"].check(torch.float16)
