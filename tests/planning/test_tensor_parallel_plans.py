"""Plans for models whose layers are cut over some ranks: what they cost, and that they are followed."""

from collections import Counter
from dataclasses import dataclass
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dshard
from dshard.cli import main
from dshard.cli.models import Llama, LlamaConfig
from dshard.cli.planning import cut_layers
from dshard.cli.usage import UsageError
from dshard.planner import Cluster, Link, Links, Plan, Training, Work, cluster_of
from dshard.planner.flops import Op
from dshard.planner.profiles import work_of
from dshard.planner.tracing import trace
from dshard.planning import meshes
from dshard.planning.links import measure_links
from dshard.planning.measured_steps import MeasuredSteps
from dshard.planning.meshes import mesh_cut_over, num_cut_over
from dshard.planning.plan import Profile, parts_of
from dshard.testing import WorldPool, fake_world
from tests.kit.counted import counted_peak
from tests.models import ResidualMlp

WIDTH, NUM_BLOCKS = 128, 4


def build(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(ResidualMlp(width, 4 * width) for _ in range(NUM_BLOCKS)))


def cut(model: nn.Module, mesh: Any, *, sequence: bool = False) -> nn.Module:
    """Cut the layers of all blocks; the rest is whole on all ranks of the mesh, or cut along the sequence."""
    for block in model.children():
        how: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            how = {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            }
        parallelize_module(block, mesh, how)
    if sequence:
        whole, part = Replicate(), Shard(0)
        given = PrepareModuleInput(input_layouts=whole, desired_input_layouts=part, use_local_output=False)
        parallelize_module(model, mesh, given)
        parallelize_module(model, mesh, PrepareModuleOutput(output_layouts=part, desired_output_layouts=whole))
    return model


def loss_of(output: Tensor) -> Tensor:
    return output.square().sum()


def two_dims() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def counted(strategy: str, checkpointing: str, sequence: bool, dtype: torch.dtype | None) -> tuple[int, int]:
    """Predicted and counted peak of a model that is cut over two ranks, on two."""
    mesh = two_dims()
    model = cut(build(), mesh["tp"], sequence=sequence)
    x = torch.ones(64, WIDTH)
    training = Training(dtype, step_bytes_per_element=4)
    own = Profile(
        model,
        x,
        device=dshard.planner.DEVICES["a100-80g"],
        training=training,
        loss_of=loss_of,
        checkpointing=checkpointing,
    )
    cluster = Cluster(2, 2, Links.of(Link(0.0, 1e-9)), tensor_parallel=2)
    plan = own.given(cluster, strategy)
    policy = {} if dtype is None else {"mp_policy": dshard.MixedPrecisionPolicy(param_dtype=dtype)}
    dshard.fully_shard(model, mesh=mesh["dp"], plan=Plan.from_json(plan.to_json()), **policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with counted_peak(model, optimizer) as found:
        step()
        step()
    return plan.peak_bytes, found.num_bytes


@pytest.mark.parametrize(
    ("sequence", "checkpointing", "strategy", "dtype"),
    [
        *(
            (sequence, "none", strategy, None)
            for sequence in (False, True)
            for strategy in ("ddp", "zero1", "keep", "full")
        ),
        *((sequence, "full", strategy, None) for sequence in (False, True) for strategy in ("zero1", "full")),
        *((sequence, "none", "full", torch.bfloat16) for sequence in (False, True)),
        (False, "selective", "keep", torch.bfloat16),
    ],
)
def test_peaks_are_those_of_one_rank_s_parts(messaging: WorldPool, sequence, checkpointing, strategy, dtype):
    for predicted, found in messaging.run(4, counted, strategy, checkpointing, sequence, dtype):
        assert 1 <= predicted / found <= (1.05 if dtype is None else 1.06)


@dataclass(frozen=True, slots=True)
class Told:
    plan: Plan
    losses: list[float]


def planned_and_trained(home: str, plans: bool, asked: Any = None) -> Told:
    mesh = two_dims()
    model = cut(build(), mesh["tp"])
    plan: Any = None
    if plans:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "home", lambda: Path(home))
            patch.setattr(meshes, "measure_links", partial(measure_links, sizes=(1 << 14, 1 << 18), num_rounds=2))
            plan = dshard.plan(model, torch.ones(8, WIDTH), mesh=mesh["dp"], memory="1GiB", strategies=asked, margin=0)
    dshard.fully_shard(model, mesh=mesh["dp"], plan=plan)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("dp"))
        loss = loss_of(model(torch.randn(8, WIDTH, generator=generator)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Told(plan, losses)


@pytest.mark.slow
def test_a_plan_of_ranks_at_hand_measures_together_and_trains_as_without_one(worlds: WorldPool, tmp_path):
    expected = [told.losses for told in worlds.run(4, planned_and_trained, str(tmp_path), False)]
    for asked in (None, ["ddp", "full"], ["keep"]):
        found = worlds.run(4, planned_and_trained, str(tmp_path), True, asked)
        assert [told.losses for told in found] == expected
        assert found[0].plan.model.tensor_parallel == found[0].plan.cluster.tensor_parallel == 2
        assert len({told.plan.to_json() for told in found[::2]}) == 1  # of ranks that share parameters
        assert not any(s.within or s.num_slices > 1 for s in found[0].plan.strategies)
        assert "ranks: 2 by 2 over which layers are cut on 1 host" in found[0].plan.explain()


def recomputing_differently(home: str) -> Any:
    """A measured plan that recomputes some blocks, where ranks that are cut over one another measured other times."""
    mesh = two_dims()
    model, x = cut(build(), mesh["tp"]), torch.ones(2048, WIDTH)
    given: dict[str, Any] = {"mesh": mesh["dp"], "margin": 0, "strategies": "ddp"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "home", lambda: Path(home))
        patch.setattr(meshes, "measure_links", partial(measure_links, sizes=(1 << 14, 1 << 18), num_rounds=2))
        whole = dshard.plan(model, x, **given, memory="1GiB")
        slowest = 0 if mesh.get_local_rank("tp") else NUM_BLOCKS - 1
        patch.setattr(MeasuredSteps, "_seconds", partialmethod(seconds, MeasuredSteps._seconds, slowest))
        plan = dshard.plan(model, x, **given, memory=whole.peak_bytes * 3 // 4, checkpointing="auto")
    dshard.fully_shard(model, mesh=mesh["dp"], plan=plan)
    loss_of(model(x)).backward()
    return plan.to_json()


def seconds(self: MeasuredSteps, real: Any, slowest: int, batch: int, kinds: tuple[str, ...]) -> list[float]:
    """Run the steps, and tell times that no load of this machine changes: one block takes longest."""
    num = len(real(self, batch, kinds)) // 2
    forwards = [3.0 if at == slowest else 1.0 for at in range(num)]
    return [*forwards, *(2.0 + one * (kind != "none") for one, kind in zip(forwards, kinds, strict=True))]


def test_ranks_over_which_layers_are_cut_recompute_alike_whatever_they_measured(worlds: WorldPool, tmp_path):
    found = worlds.run(4, recomputing_differently, str(tmp_path))
    assert len(set(found)) == 1
    assert {"none"} < set(Plan.from_json(found[0]).checkpointing)


def too_little(home: str) -> str:
    mesh = two_dims()
    memory = 1000 if mesh.get_local_rank("tp") == 0 else "1GiB"
    model = cut(build(), mesh["tp"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "home", lambda: Path(home))
        patch.setattr(meshes, "measure_links", partial(measure_links, sizes=(1 << 14, 1 << 18), num_rounds=2))
        with pytest.raises(dshard.PlanError) as told:
            dshard.plan(model, torch.ones(8, WIDTH), mesh=mesh["dp"], memory=memory)
    return str(told.value)


def test_what_fits_on_some_of_them_alone_is_refused_on_all(worlds: WorldPool, tmp_path):
    for text in worlds.run(4, too_little, str(tmp_path)):
        assert "the peak must fit into 1000 bytes" in text


def uneven() -> list[tuple[int, int]]:
    """Plans of a described cluster, each rank's own, for a vocabulary that the ranks do not divide."""
    mesh = two_dims()
    torch.manual_seed(0)
    model = Llama(LlamaConfig(2, 64, 4, 2, 128, vocab_size=1025))
    tokens = torch.randint(1025, (2, 16), generator=torch.Generator().manual_seed(0))
    ends = {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], ends)
    cluster = cluster_of("titan-rtx", 4, tensor_parallel=2)
    plan = dshard.plan(model, tokens, cluster=cluster, device="titan-rtx", strategies=["full"])
    dshard.fully_shard(model, mesh=mesh["dp"], plan=plan)
    model(tokens).square().mean().backward()
    return [(p.length, p.numel) for unit in plan.model.units for p in unit.params]


def test_of_uneven_parts_the_largest_is_planned_for_on_every_rank(worlds: WorldPool):
    first, *others = worlds.run(4, uneven)
    assert all(each == first for each in others)
    assert (513, 513 * 64) in first


def other_plans() -> str:
    mesh = two_dims()
    model, cluster = cut(build(), mesh["tp"]), cluster_of("titan-rtx", 4, tensor_parallel=2)
    kind = ("none", "full")[mesh.get_local_rank("tp")]
    given: dict[str, Any] = {"cluster": cluster, "device": "titan-rtx", "checkpointing": kind}
    plan = dshard.plan(model, torch.ones(8, WIDTH), **given, strategies="full")
    with pytest.raises(dshard.DivergenceError) as told:
        dshard.fully_shard(model, mesh=mesh["dp"], plan=plan)
    return str(told.value)


def test_plans_that_differ_among_ranks_over_which_layers_are_cut_are_refused(worlds: WorldPool):
    for text in worlds.run(4, other_plans):
        assert "fully_shard: all ranks must pass the same plan, but" in text
        assert "'full' checkpointing" in text


def llama(num_blocks: int = 3, width: int = 256) -> Llama:
    with torch.device("meta"):
        return Llama(LlamaConfig(num_blocks, width, 8, 4, 2 * width, 1024))


def traced(num_cut: int, **given: Any) -> Any:
    model = llama(**given)
    with cut_layers(model, num_cut):
        assert num_cut_over(mesh_cut_over(model)) == num_cut
        return trace(model, torch.zeros(2, 64, dtype=torch.int64), parts_of(model))


@pytest.mark.parametrize("num_cut", [2, 4])
def test_a_rank_does_its_part_of_products_and_sends_what_the_formula_says(num_cut):
    whole, part = traced(1), traced(num_cut)
    assert num_cut * part.flops == whole.flops
    sent = [op for phase in part.phases for op in phase.ops if op.collective]
    kinds = Counter(op.collective for op in sent)
    # Of a block: outputs of two row-wise layers, and gradients of the inputs of two kinds of column-wise ones; q, k and
    # v, and gate and up, each give theirs. Then the embedding, and the gradient of what the head is given.
    assert kinds == {"all_reduce": 3 * (2 + 5) + 2, "all_gather": 1}
    activation = 4 * 2 * 64 * 256
    assert {op.num_bytes for op in sent if op.collective == "all_reduce"} == {activation}
    assert [op.num_bytes for op in sent if op.collective == "all_gather"] == [4 * 2 * 64 * 1024]


def test_along_a_sequence_parts_are_gathered_ahead_of_layers_and_scattered_behind():
    model, rows = build(), 64
    with fake_world(0, 8):
        cut(model, init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))["tp"], sequence=True)
        traced_step = trace(model, torch.ones(rows, WIDTH), parts_of(model), loss_of=loss_of)
    sent = [op for phase in traced_step.phases for op in phase.ops if op.collective]
    # Of a block, forward and backward: ahead of its first layer, and behind its last. Then what the model gives back.
    assert Counter(op.collective for op in sent) == {"all_gather": 2 * NUM_BLOCKS + 1, "reduce_scatter": 2 * NUM_BLOCKS}
    assert {op.num_bytes for op in sent} == {4 * rows * WIDTH}
    near = cluster_of("h100-80g", 2)
    known = work_of(sent, dshard.planner.DEVICES["h100-80g"], None, cut=near)
    gathers, scatters = 2 * NUM_BLOCKS + 1, 2 * NUM_BLOCKS
    expected = gathers * near.all_gather_s(4 * rows * WIDTH, 2) + scatters * near.reduce_scatter_s(4 * rows * WIDTH, 2)
    assert known == Work(cut_s=pytest.approx(expected))


def test_all_to_all_is_a_collective_by_either_name():
    for name in ("_c10d_functional.all_to_all_single", "_dtensor.shard_dim_alltoall"):
        op = Op(name, 0, 1 << 20, torch.float32)
        assert op.collective == "all_to_all"
        near = cluster_of("h100-80g", 4)
        assert work_of([op], dshard.planner.DEVICES["h100-80g"], None, cut=near).cut_s == near.all_gather_s(1 << 20, 4)


def test_what_is_sent_takes_the_time_of_links_within_a_host():
    for rates in (None, "published"):
        model, cluster = llama(), cluster_of("h100-80g", 64, profile=rates, tensor_parallel=4)
        with cut_layers(model, 4):
            given = {"cluster": cluster, "device": "h100-80g", "profile": rates, "strategies": "full"}
            plan = dshard.plan(model, torch.zeros(2, 64, dtype=torch.int64), **given)
        near = cluster_of("h100-80g", 4, profile=rates)
        expected = 23 * near.all_reduce_s(4 * 2 * 64 * 256) + near.all_gather_s(4 * 2 * 64 * 1024, 4)
        assert sum(work.cut_s for unit in plan.model.units for work in unit.work) == pytest.approx(expected)
        assert plan.time_by_term["tensor parallelism"] == pytest.approx(expected)
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("profile", [None, "published"])
def test_ranks_that_hold_the_same_part_share_a_host_s_link_with_the_others(profile):
    whole, part = (cluster_of("h100-80g", 64, profile=profile, tensor_parallel=num) for num in (1, 4))
    assert (part.num_ranks, part.ranks_per_host, part.tensor_parallel) == (16, 2, 4)
    assert part.inside == whole.inside
    assert whole.across is not None
    assert part.across is not None
    ratio = part.across.all_gather.seconds_per_byte / whole.across.all_gather.seconds_per_byte
    assert ratio == pytest.approx(4)
    given = cluster_of("h100-80g", 16, ranks_per_host=2, profile=profile)  # as many hosts, and all for themselves
    assert given.across is not None
    assert part.across.all_gather.alpha_per_rank_s == pytest.approx(given.across.all_gather.alpha_per_rank_s)
    assert cluster_of("h100-80g", 8, tensor_parallel=8).num_ranks == 1
    with pytest.raises(dshard.PlanError, match=r"must divide the ranks of a host.*but it is 16.*tensor_parallel=8"):
        cluster_of("h100-80g", 64, tensor_parallel=16)


def test_what_torch_compile_cannot_take_is_not_planned_for():
    model, cluster = llama(), cluster_of("h100-80g", 8, profile="published", tensor_parallel=4)
    given = {"device": "h100-80g", "profile": "published", "training": Training(is_compiled=True)}
    with cut_layers(model, 4), pytest.raises(dshard.PlanError, match="is_compiled and a model whose layers are cut"):
        dshard.plan(model, torch.zeros(2, 64, dtype=torch.int64), cluster=cluster, **given)


def test_a_cluster_that_says_otherwise_than_the_model_is_refused():
    model = llama()
    with (
        cut_layers(model, 4),
        pytest.raises(dshard.PlanError, match=r"\(4, by its DTensor.*it says 1.*tensor_parallel=4"),
    ):
        dshard.plan(model, torch.zeros(2, 64, dtype=torch.int64), cluster=cluster_of("h100-80g", 8), device="h100-80g")
    with fake_world(0, 8):
        both = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for i, layer in enumerate(both):
            mesh = init_device_mesh("cpu", (8 >> i, 1 << i), mesh_dim_names=("dp", "tp"))
            parallelize_module(layer, mesh["dp"], ColwiseParallel())
        with pytest.raises(dshard.PlanError, match=r"0\.bias is over 8 and 1\.bias over 4"):
            mesh_cut_over(both)


def test_the_command_cuts_layers_of_models_that_say_how(capsys, tmp_path):
    given = ["--world", "16", "--device", "h100-80g", "--batch", "1", "--sequence", "128"]
    assert main(["plan", "llama3-8b", *given, "--tensor-parallel", "8", "--out", str(tmp_path / "plan.json")]) == 0
    assert "ranks: 2 by 8 over which layers are cut on 2 hosts" in capsys.readouterr().out
    assert Plan.load(tmp_path / "plan.json").cluster.tensor_parallel == 8
    assert main(["plan", "gpt2", *given, "--tensor-parallel", "8"]) == 2
    assert "says how its layers are cut" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["*.up", "0.*.up", "*up"])
def test_a_pattern_that_cuts_nothing_is_refused(pattern):
    model = nn.Sequential(nn.Sequential(build()))
    model.tp_plan = {pattern: "colwise"}
    with pytest.raises(UsageError, match="but it names no module of the model"), cut_layers(model, 2):
        raise AssertionError(pattern)


def test_a_pattern_matches_names_part_by_part():
    """As `parallelize_module` takes it, so that each `*` is one part of a name."""
    model = build()
    model.tp_plan = {"*.up": "colwise", "0.[d]own": "rowwise", "*up": "no way that is known"}
    with cut_layers(model, 2):
        kept = {
            name: p.to_local().numel() / p.numel() for name, p in model.named_parameters() if isinstance(p, DTensor)
        }
    assert {name for name in kept if ".up." in name} == {
        f"{i}.up.{p}" for i in range(NUM_BLOCKS) for p in ("weight", "bias")
    }
    assert kept["0.down.weight"] == kept["3.up.weight"] == 1 / 2
    assert "1.down.weight" not in kept
