"""Programs that skip bad batches: random ones, with models that share ranks, and exceptions of all ranks everywhere."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dshard
from dshard.testing import WorldPool
from tests.runtime.caught import STRATEGIES, BatchError, Net, batch

NUM_STEPS, DEPTH = 6, 3


@dataclass(frozen=True)
class Fault:
    """Where all ranks raise.

    Args:
        phase: Of a step: the number of the model that is trained, or one more for the evaluation.
        place: "forward", "backward", "loss" or "clip".
        layer: Of the model.
        micro: Which of the backwards.
        resets: Whether they call `reset_iter_state` in their handler.
    """

    phase: int
    place: str
    layer: int
    micro: int
    resets: bool


@dataclass(frozen=True)
class Program:
    """What is trained how.

    Args:
        strategies: Of each layer of each model.
        replicas: Groups of ranks that hold the same shards.
        micro: Backwards in a step, all but the last without synchronization.
        evaluates: Whether each step ends with an evaluation, of rank 0 alone as well where nothing is gathered.
        recomputes: Whether layers are checkpointed.
        prefetch: How many units are gathered ahead.
        faults: By step.
    """

    strategies: tuple[tuple[str, ...], ...]
    replicas: int
    micro: int
    evaluates: bool
    recomputes: bool
    prefetch: int
    faults: dict[int, Fault]


def sharded(program: Program) -> list[Any]:
    torch.manual_seed(0)
    num_ranks, models = dist.get_world_size(), []
    mesh: Any = None
    if program.replicas > 1:
        mesh = init_device_mesh("cpu", (program.replicas, num_ranks // program.replicas), mesh_dim_names=("r", "s"))
    for strategies in program.strategies:
        model: Any = Net(DEPTH, program.recomputes)
        for layer, strategy in zip(model.layers, strategies, strict=True):
            dshard.fully_shard(layer, strategy=strategy, mesh=mesh)
        models.append(dshard.fully_shard(model, mesh=mesh))
        models[-1].set_prefetch(program.prefetch)
    return models


class Training:
    """Of the models of a program, each in a phase of its own: the second one's output goes through the first."""

    def __init__(self, program: Program) -> None:
        self.program, self.models = program, sharded(program)
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in self.models]
        self.done: list[tuple[int, int]] = []  # steps and phases whose optimizers have stepped

    def fault(self, step: int, phase: int) -> Fault | None:
        fault = self.program.faults.get(step)
        return fault if fault is not None and fault.phase == phase else None

    def run_phase(self, step: int, phase: int, fault: Fault | None) -> None:
        model, place = self.models[phase], fault.place if fault is not None else ""
        for micro in range(self.program.micro):
            is_bad = fault is not None and micro == fault.micro
            for each in self.models:
                each.set_requires_gradient_sync(micro == self.program.micro - 1)
            model.fault = (place, fault.layer) if fault is not None and is_bad else None
            out = model(batch(step, micro, dist.get_rank()))
            loss = (self.models[0](out) if phase else out).square().sum()
            if is_bad and place == "loss":
                raise BatchError("bad loss")
            loss.backward()
        if place == "clip":
            raise BatchError("ahead of clipping")
        dshard.clip_grad_norm_(model.parameters(), 1.0)
        self.optimizers[phase].step()
        self.done.append((step, phase))

    def evaluate(self, step: int, fault: Fault | None) -> None:
        model = self.models[0]
        model.fault = ("forward", fault.layer) if fault is not None else None
        model.eval()
        with torch.no_grad():
            model(batch(step, 0, dist.get_rank()))
            alone = all(strategy == "ddp" for strategy in self.program.strategies[0])
            if alone and dist.get_rank() == 0:
                model(batch(step, 1, 0))

    def run(self) -> list[str]:
        """All steps, of which those with an exception are skipped; gives what was caught."""
        texts = []
        for step in range(NUM_STEPS):
            phase = 0
            try:
                for phase in range(len(self.models)):
                    for model in self.models:
                        model.train()
                        model.fault = None
                    self.run_phase(step, phase, self.fault(step, phase))
                    self.zero_grad()
                phase += 1
                if self.program.evaluates:
                    self.evaluate(step, self.fault(step, phase))
            except Exception as error:
                texts.append(f"{step}: {type(error).__name__}: {error}")
                fault = self.fault(step, phase)
                if isinstance(error, BatchError) and fault is not None and fault.resets:
                    for model in self.models:
                        model.reset_iter_state()
            self.zero_grad()
        return texts

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        return [p.full_tensor().detach() for model in self.models for p in model.parameters()]


def compare(program: Program) -> tuple[list[tuple[int, int]], list[str]]:
    """Trains with the exceptions, and again by what was done then alone."""
    training = Training(program)
    texts = training.run()
    values = training.values()
    clean = Training(program)
    for step, phase in training.done:
        for model in clean.models:
            model.train()
        clean.run_phase(step, phase, None)
        clean.zero_grad()
    for value, other in zip(values, clean.values(), strict=True):
        assert torch.equal(value, other), (dist.get_rank(), training.done, texts)
    return training.done, texts


def check(worlds: WorldPool, num_ranks: int, program: Program) -> None:
    """All ranks have done the same; but for what comes behind an exception, everything."""
    found = worlds.run(num_ranks, compare, program)
    done = found[0][0]
    assert all(other == done for other, _ in found), found
    phases = range(len(program.strategies))
    bad = {step: fault.phase for step, fault in program.faults.items()}
    expected = [(step, phase) for step in range(NUM_STEPS) for phase in phases if phase < bad.get(step, len(phases))]
    assert done == expected, found


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, Program]:
    num_ranks = draw(st.sampled_from([2, 3, 4]))
    replicas = draw(st.sampled_from([1, 2])) if num_ranks == 4 else 1
    layers = st.one_of(
        st.lists(st.sampled_from(STRATEGIES), min_size=DEPTH, max_size=DEPTH).map(tuple),
        st.sampled_from(STRATEGIES).map(lambda strategy: (strategy,) * DEPTH),
    )
    strategies = tuple(draw(st.lists(layers, min_size=1, max_size=2)))
    micro, evaluates = draw(st.sampled_from([1, 2])), draw(st.booleans())
    faults = {}
    last = len(strategies) - 1 + evaluates
    for step in draw(st.sets(st.integers(0, NUM_STEPS - 2), min_size=1, max_size=3)):
        phase = draw(st.integers(0, last))
        places = ["forward"] if phase == len(strategies) else ["forward", "backward", "loss", "clip"]
        place, layer, at = (
            draw(st.sampled_from(places)),
            draw(st.integers(0, DEPTH - 1)),
            draw(st.integers(0, micro - 1)),
        )
        faults[step] = Fault(phase, place, layer, at, draw(st.booleans()))
    return num_ranks, Program(
        strategies, replicas, micro, evaluates, draw(st.booleans()), draw(st.sampled_from([0, 1, 2])), faults
    )


@settings(max_examples=25, deadline=None)
@given(drawn=programs())
def test_programs_that_skip_bad_batches_lose_those_and_no_other(worlds: WorldPool, drawn):
    check(worlds, *drawn)
