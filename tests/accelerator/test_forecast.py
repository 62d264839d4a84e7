"""What the planner says that lives, beside what the simulated accelerator's allocator was asked for.

Models here have no attention: the simulated one writes its result in
another layout than CUDA's, which costs a copy.
"""

import gc
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import dshard
from benchmarks.models import shard, training_step
from dshard.planner import Training, WholeSteps, cluster_of
from tests.models import ResidualMlp

RANKS, TOKENS = 8, 512


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens known, features, blocks, samples."""

    vocab: int
    width: int
    layers: int
    batch: int


SIZES = {
    "narrow": Size(vocab=4096, width=512, layers=8, batch=4),
    "wide": Size(vocab=8192, width=2048, layers=6, batch=2),
    "long": Size(vocab=1000, width=768, layers=16, batch=6),
}


class Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(ResidualMlp(size.width, 4 * size.width) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def matrices_of(model: nn.Module) -> list[str]:
    """Names of what Muon steps as a rule: matrices, but no embeddings and no head."""
    return [name for name, param in model.named_parameters() if param.ndim == 2 and name.startswith("blocks.")]


def optimizers_of(model: nn.Module, *, by_owners: bool) -> list[torch.optim.Optimizer]:
    params = dict(model.named_parameters())
    owned = [params.pop(name) for name in (matrices_of(model) if by_owners else ())]
    muon = [torch.optim.Muon(owned, ns_steps=1)] if owned else []  # fewer iterations take the same bytes
    return [*muon, torch.optim.AdamW(params.values(), lr=1e-4, fused=True)]


def counted(size: Size, strategy: str, plan: str | None = None, *, by_owners: bool = False) -> dict[str, int]:
    """What the simulated allocator counts in a step of one of eight ranks; for a process of its own.

    Args:
        size: Of the model.
        strategy: Of all its units, if there is no plan.
        plan: As JSON, with units that are kept in the CPU's memory.
        by_owners: Whether Muon steps the matrices of its blocks.
    """
    from tests.accelerator import device

    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Rows on their way to the CPU's memory count: such copies take longer than a wide unit's backward.
    with device.dry_world(RANKS, mode="eager" if plan is None else "lazy") as accelerator:
        sim = torch.device("sim")
        with sim:
            model: nn.Module = Model(size)
        if strategy == "FSDP2":
            model = shard(strategy, model, sim, policy=policy)
        else:
            mesh = init_device_mesh("sim", (RANKS,))
            given = {"strategy": strategy} if plan is None else {"plan": dshard.Plan.from_json(plan)}
            # The first steps of every program copy rows as they are kept; deferred ones cast them, and take less.
            offload = None if plan is None else dshard.CPUOffloadPolicy(defer_step=False)
            dshard.fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, **given)
        ids = torch.randint(0, size.vocab, (size.batch, TOKENS + 1), device=sim)
        first, *others = optimizers_of(model, by_owners=by_owners)
        train = training_step(model, first, ids)

        def step() -> None:
            train()
            for each in others:
                each.step()
                each.zero_grad()

        step()
        gc.collect()
        accelerator.empty_cache()  # the whole model was there while it was cut
        step()
        step()
        accelerator.reset_peaks()
        step()
        found: dict[str, int] = accelerator.stats()
        return found


def planned(
    size: Size, strategy: str, offload: str = "none", memory: int | None = None, *, by_owners: bool = False
) -> dshard.Plan:
    with torch.device("meta"):
        model, ids = Model(size), torch.empty(size.batch, TOKENS, dtype=torch.int64)
    whole = WholeSteps(matrices_of(model)) if by_owners else None
    training = Training(torch.bfloat16, torch.float32, step_bytes_per_element=0, whole=whole)  # AdamW fused

    def loss(logits: Tensor) -> Tensor:
        rows = logits.flatten(0, 1)
        return F.cross_entropy(rows, torch.zeros(rows.shape[0], dtype=torch.int64))

    cluster = cluster_of("h100-80g", RANKS)
    given = {"cluster": cluster, "device": "h100-80g", "strategies": strategy, "training": training, "loss_of": loss}
    return dshard.plan(model, ids, offload=offload, memory=memory, **given)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", ["ddp", "keep", "full", "hybrid(4)", "FSDP2"])
def test_forecast_is_what_the_simulated_allocator_counts(accelerator, size, strategy):
    check(size, planned(SIZES[size], "full" if strategy == "FSDP2" else strategy), strategy, most=1.15)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", ["ddp", "full", "hybrid(4)"])
def test_where_owners_step_matrices_the_forecast_is_what_is_counted(accelerator, size, strategy):
    check(size, planned(SIZES[size], strategy, by_owners=True), strategy, most=1.06, by_owners=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", ["ddp", "full"])
def test_of_what_is_kept_in_the_memory_of_the_cpu_copies_count_on_the_device(accelerator, size, strategy):
    # Its parts are small beside one wide unit's, of which the planner counts a copy too many: see planner.md.
    check(size, planned(SIZES[size], strategy, "all"), strategy, most=1.3)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_of_units_some_of_which_are_kept_in_the_memory_of_the_cpu_the_others_count_on_the_device(accelerator, size):
    most, least = (planned(SIZES[size], "full", offload).peak_bytes for offload in ("none", "all"))
    plan = planned(SIZES[size], "full", "auto", (most + least) // 2)
    assert set(plan.is_offloaded) == {False, True}
    check(size, plan, "full", most=1.3)


def check(size: str, plan: dshard.Plan, strategy: str, *, most: float, by_owners: bool = False) -> None:
    offloads = any(plan.is_offloaded)
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        given = (plan.to_json(),) if offloads else ()
        stats = pool.submit(counted, SIZES[size], strategy, *given, by_owners=by_owners).result(timeout=300)
    found = plan.peak_bytes / stats["peak_active_bytes" if offloads else "peak_requested_bytes"]
    print(size, strategy, f"{found:.3f}", f"{stats['peak_reserved_bytes'] / plan.peak_bytes:.3f}")
    assert 0.99 <= found <= most, found  # of what it counts too much see planner.md
