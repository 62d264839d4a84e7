"""A deferred step cannot be told from one that is taken at once, whatever a program does between it and the next use.

The thread that steps is made late on purpose: who does not wait for it reads values of the step before.
"""

import copy
import functools
import os
import random
import threading
import time
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dshard
from dshard.compat import CPUOffloadPolicy
from dshard.errors import StateError
from dshard.optimizer import deferred
from dshard.policies import Offload
from dshard.tensor.storage import DeferredStep
from dshard.units.copies import CopyStream
from tests.offload.test_offload import Net, batch, loss_of, mesh_of

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda params: optim.AdamW(params, lr=1e-2),
    "AdamW fused": lambda params: optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW of a tensor lr": lambda params: optim.AdamW(params, lr=torch.tensor(1e-2), amsgrad=True),
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "SGD momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop": lambda params: optim.RMSprop(params, lr=1e-2, momentum=0.5, centered=True),
    **{
        name: lambda params, name=name: getattr(optim, name)(params, lr=1e-2)  # type: ignore[misc]
        for name in ("ASGD", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop")
    },
}


@contextmanager
def late_steps(seed: int, least_s: float = 0.0) -> Iterator[list[str]]:
    """Steps that begin and end late; gives the labels of the units that were stepped later than asked for."""
    run, stepped, draw = deferred._UnitStep._run, list[str](), random.Random(seed)

    def late(self: Any, *args: Any) -> None:
        time.sleep(least_s + draw.choice((0.0, 0.001, 0.004)))
        run(self, *args)
        stepped.append(self._label)

    deferred._UnitStep._run = late  # type: ignore[method-assign]
    try:
        yield stepped
    finally:
        deferred._UnitStep._run = run  # type: ignore[method-assign]


Run = Callable[..., list[Any]]


class Program:
    """A training, of which each step does some of `ACTIONS`.

    Args:
        kind: Of the device that computes.
        defers: Whether steps are deferred.
        optimizer: One of `OPTIMIZERS`.
        is_mixed: Whether it computes in bf16.
    """

    def __init__(self, kind: str, defers: bool, optimizer: str, *, is_mixed: bool = False) -> None:
        torch.manual_seed(0)
        cpu = torch.device("cpu")
        self.kind, self.model = kind, Net()
        own: dict[str, Any] = {"mesh": mesh_of(kind)}
        if is_mixed:
            own["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        policy = Offload(cpu, cpu, defers_step=defers) if kind == "cpu" else CPUOffloadPolicy(defer_step=defers)
        away = own | {"offload_policy": policy}
        for block in self.model.blocks[:2]:
            dshard.fully_shard(block, **away)
        dshard.fully_shard(self.model.blocks[2], **own)
        dshard.fully_shard(self.model, **away)
        decayed = [param for param in self.model.parameters() if param.dim() > 1]
        rest = [param for param in self.model.parameters() if param.dim() <= 1]
        self.optim = OPTIMIZERS[optimizer]([{"params": decayed}, {"params": rest, "weight_decay": 0.0}])
        self.schedule = optim.lr_scheduler.StepLR(self.optim, 1, gamma=0.7)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.scaler = torch.amp.GradScaler(kind, init_scale=256.0)
        self.seen: list[Any] = []
        self.sums: dict[nn.Parameter, Any] = {}
        self.states: list[Any] = []  # that the program goes on to look at
        self.kept: list[Any] = []  # plain tensors that the program goes on to look at
        self.num_steps = 0

    def see(self, *values: Any) -> None:
        """Note values as they are now."""
        for value in values:
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            self.seen.append(full.detach().clone() if isinstance(full, Tensor) else full)

    def step(self, actions: tuple[str, ...]) -> None:
        """One step."""
        self.num_steps += 1
        is_scaled = "scaler" in actions or "inf" in actions
        for micro in range(2 if "accumulate" in actions else 1):
            loss = loss_of(self.model, batch(self.kind, 10 * self.num_steps + micro))
            (self.scaler.scale(loss) if is_scaled else loss).backward()
        if "inf" in actions:
            with torch.no_grad():
                self.model.head.weight.grad.mul_(torch.inf)
        if "clip" in actions:
            self.see(nn.utils.clip_grad_norm_(self.model.parameters(), 0.3))
        if "dshard's clip" in actions:
            self.see(dshard.clip_grad_norm_(self.model.parameters(), 0.3))
        if "replace a gradient" in actions:
            weight = self.model.blocks[0][1].weight
            self.kept.append(weight.grad.to_local())
            weight.grad = weight.grad * 1.0
        if is_scaled:
            self.scaler.step(self.optim)
            self.scaler.update()
        else:
            self.optim.step()
        for action in actions:
            if action in ACTIONS:
                ACTIONS[action](self)
        if "keep gradients" not in actions:
            self.optim.zero_grad(set_to_none="fill" not in actions)

    def end(self) -> list[Any]:
        """All that was seen, and all there is."""
        self.see(*self.model.parameters(), *self.average.parameters(), *self.sums.values(), *self.kept)
        for group in self.optim.param_groups:
            for param in group["params"]:
                self.see(*self.optim.state.get(param, {}).values())
        return self.seen


def _set_lr(program: Program) -> None:
    for group in program.optim.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(0.5)
        else:
            group["lr"] *= 0.5


def _set_momentum(program: Program) -> None:
    for group in program.optim.param_groups:
        if "momentum" in group and "centered" not in group:
            group["momentum"] = 0.5


@torch.no_grad()
def _write(program: Program) -> None:
    program.model.blocks[0][1].weight.mul_(0.9)
    program.model.blocks[1][1].bias[0] = 0.25


@torch.no_grad()
def _write_data(program: Program) -> None:
    program.model.head.bias.data.add_(0.1)
    program.model.blocks[0][3].weight.to_local().mul_(1.1)


@torch.no_grad()
def _write_gradients(program: Program) -> None:
    for param in program.model.parameters():
        if param.grad is not None:
            param.grad.zero_()


def _raise(program: Program) -> None:
    handle = program.model.large.register_forward_pre_hook(_refuse)
    with pytest.raises(ZeroDivisionError):
        loss_of(program.model, batch(program.kind, 3))
    handle.remove()
    program.model.reset_iter_state()


def _refuse(*_: object) -> None:
    raise ZeroDivisionError


def _evaluate(program: Program) -> None:
    with torch.no_grad():
        program.see(loss_of(program.model, batch(program.kind, 7)))


def _reload(program: Program) -> None:
    program.optim.load_state_dict(copy.deepcopy(program.optim.state_dict()))
    program.model.load_state_dict({name: value * 1.01 for name, value in program.model.state_dict().items()})


def _step_in_pieces(program: Program) -> None:
    other = optim.SGD(program.model.blocks[1].parameters(), lr=0.01)
    other.step()


def _use_some(program: Program) -> None:
    program.model.blocks[1](torch.ones(2, 8, device=program.kind)).sum().backward()


def _see_states(program: Program) -> None:
    states = program.optim.state_dict()["state"]
    for number in sorted(states):  # a dict's order tells in which one states were made
        program.see(*states[number].values())


def _see_counts(program: Program) -> None:
    counts = [values["step"] for values in program.optim.state.values() if "step" in values]
    program.see(len(counts), sum(map(float, counts)))


@torch.no_grad()
def _sum_up(program: Program) -> None:
    for param in program.model.parameters():
        if param.grad is not None:
            program.sums.setdefault(param, torch.zeros_like(param.grad)).add_(param.grad)
            param.grad.zero_()


def _keep_states(program: Program) -> None:
    for states in program.states:
        program.see(sum(float(values["step"]) for values in states.values() if "step" in values))
    program.states = [dict(enumerate(program.optim.state.values()))]


@torch.no_grad()
def _keep_counts(program: Program) -> None:
    program.see(*program.kept)
    program.states.append(program.optim.state_dict()["state"])
    program.kept += [values["step"] for values in program.optim.state.values() if "step" in values]


def _fork(program: Program) -> None:
    pid = os.fork()
    if not pid:
        os._exit(not program.model.head.bias.to_local().isfinite().all())
    assert os.waitpid(pid, 0)[1] == 0


def _schedule(program: Program) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a scaler that has skipped the first step
        program.schedule.step()


ACTIONS: dict[str, Callable[[Program], object]] = {
    "schedule": _schedule,
    "set lr": _set_lr,
    "set momentum": _set_momentum,
    "average": lambda program: program.average.update_parameters(program.model),
    "read gradients": lambda program: program.see(*(p.grad for p in program.model.parameters() if p.grad is not None)),
    "read": lambda program: program.see(*program.model.parameters()),
    "norm": lambda program: program.see(program.model.blocks[0][1].weight.norm()),
    "write": _write,
    "write data": _write_data,
    "write gradients": _write_gradients,
    "raise": _raise,
    "evaluate": _evaluate,
    "reload": _reload,
    "step again": lambda program: program.optim.step(),
    "another optimizer": _step_in_pieces,
    "use some": _use_some,
    "states": _see_states,
    "counts": _see_counts,
    "sum up": _sum_up,
    "keep states": _keep_states,
    "keep counts": _keep_counts,
    "copy states": lambda program: program.see(len(copy.copy(program.optim.state)), len(program.optim.state.copy())),
    "copy": lambda program: program.see(*copy.deepcopy(program.model).parameters()),
    "freeze": lambda program: program.model.blocks[0].requires_grad_(requires_grad=program.num_steps % 2 == 0),
    "switch": lambda program: dshard.set_strategy(program.model, ("zero2", "full")[program.num_steps % 2]),
    "fork": _fork,
}
OTHERS = (
    "accumulate",
    "sum up early",
    "replace a gradient",
    "clip",
    "dshard's clip",
    "scaler",
    "inf",
    "keep gradients",
    "fill",
)
PROGRAMS = st.lists(
    st.lists(st.sampled_from((*ACTIONS, *OTHERS)), max_size=3, unique=True).map(tuple), min_size=2, max_size=5
)


def train(
    kind: str, defers: bool, optimizer: str, steps: list[tuple[str, ...]], seed: int, is_mixed: bool
) -> tuple[list[Any], int]:
    """What a program sees, and how many steps of units were deferred."""
    program = Program(kind, defers, optimizer, is_mixed=is_mixed)
    with late_steps(seed) as stepped:
        for actions in steps:
            program.step(actions)
        seen = program.end()
    return seen, len(stepped)


def differing(
    kind: str, optimizer: str, steps: list[tuple[str, ...]], seed: int, is_mixed: bool = False
) -> tuple[list[int], int]:
    """Where what is seen differs, and how many steps were deferred."""
    expected, none = train(kind, False, optimizer, steps, seed, is_mixed)
    found, num_deferred = train(kind, True, optimizer, steps, seed, is_mixed)
    assert not none
    assert len(found) == len(expected)
    differs = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not _equal(a, b)]
    return differs, num_deferred


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) if isinstance(a, Tensor) else bool(a == b)


def stepped_beside_a_forward(kind: str) -> list[Any]:
    """The order in which units are stepped, of which the last one may only begin when a forward computes."""
    program = Program(kind, True, "AdamW fused")
    program.step(())
    gate, order, run = threading.Event(), list[str](), deferred._UnitStep._run

    def gated(self: Any, *args: Any) -> None:
        order.append(self._label)
        if len(order) == 3:
            order.append("late" if gate.wait(20.0) else "never")
        run(self, *args)

    deferred._UnitStep._run = gated  # type: ignore[method-assign]
    try:
        program.step(())
        program.model.emb.register_forward_hook(lambda *_: gate.set())
        program.step(("states",))
    finally:
        deferred._UnitStep._run = run  # type: ignore[method-assign]
    return order[:4]


def test_units_are_stepped_in_the_order_of_their_use_beside_what_computes(run: Run):
    for order in run(2, stepped_beside_a_forward):
        assert order == ["Net", "blocks.0", "blocks.1", "late"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_elementwise_optimizer_steps_later_and_to_the_same_bits(run: Run, optimizer: str):
    steps = [(), ("clip",), ("schedule", "counts"), ("average",)]
    for differs, num_deferred in run(2, differing, optimizer, steps, 0):
        assert not differs
        assert num_deferred == 3 * (len(steps) - 1 + (optimizer == "Adagrad"))  # which makes its states early


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("NUM_PROGRAMS", "9")), deadline=None)
@given(st.sampled_from(sorted(OPTIMIZERS)), PROGRAMS, st.integers(0, 99), st.booleans())
def test_no_program_can_tell(run: Run, optimizer: str, steps: list[tuple[str, ...]], seed: int, is_mixed: bool):
    for differs, _ in run(2, differing, optimizer, steps, seed, is_mixed):
        assert not differs


@pytest.mark.slow
@pytest.mark.parametrize("action", [*ACTIONS, *OTHERS])
def test_what_looks_or_writes_comes_behind_the_step(run: Run, action: str):
    steps = [(), (action,), (action, "clip"), (action,), ()]
    for differs, num_deferred in run(2, differing, "AdamW", steps, 1, len(action) % 2 > 0):
        assert not differs
        assert num_deferred > 0


def travelling(kind: str) -> list[list[torch.dtype]]:
    """In which dtypes rows are copied in: of a forward behind a deferred step, one behind a write, and one after that.

    The last one comes behind another step, of which a program was given a shard that it may write to without a trace.
    """
    program = Program(kind, True, "AdamW fused", is_mixed=True)
    dtypes: list[torch.dtype] = []
    copy_in = CopyStream.copy_in

    def noted(self: CopyStream, shards: Any, row: Tensor, plan: Any) -> Any:
        dtypes.append(row.dtype)
        return copy_in(self, shards, row, plan)

    program.step(())
    CopyStream.copy_in = noted  # type: ignore[method-assign]
    try:
        with late_steps(0, least_s=0.05):  # until gradients have gone
            found = []
            for change in (lambda _: None, _write, lambda _: None, _write_data):
                program.step(())
                change(program)
                dtypes.clear()
                _evaluate(program)
                found.append(list(dtypes))
    finally:
        CopyStream.copy_in = copy_in  # type: ignore[method-assign]
    return found


def test_what_travels_was_cast_by_the_step_unless_somebody_wrote_to_it_since(run: Run):
    cast, own = torch.bfloat16, torch.float32
    for found in run(2, travelling):
        assert found == [[cast, cast, cast], [cast, own, own], [cast, cast, cast], [own, own, cast]]


def scaled_later(kind: str) -> list[bool]:
    """Whether a clip leaves gradients as they are until they are read, and then gives them as it scales them."""
    program = Program(kind, True, "AdamW")
    program.step(())
    loss_of(program.model, batch(kind, 3)).backward()
    grads = [param.grad for block in program.model.blocks[:2] for param in block.parameters()]
    shards = [grad.shard_storage.resolve().clone() for grad in grads]
    factor = 0.5 / (float(nn.utils.clip_grad_norm_(program.model.parameters(), 0.5)) + 1e-6)
    assert factor < 0.9
    found = [torch.equal(grad.shard_storage.tensor, shard) for grad, shard in zip(grads, shards, strict=True)]
    read = [grad.to_local() for grad in grads]
    found += [torch.allclose(own, shard * factor) for own, shard in zip(read, shards, strict=True)]
    return [*found, all(map(torch.equal, read, [grad.to_local() for grad in grads]))]


def test_a_clip_scales_gradients_at_home_when_they_are_used(run: Run):
    for found in run(2, scaled_later):
        assert all(found)


def by_two_optimizers(kind: str) -> list[list[Tensor]]:
    """A unit whose parameters two optimizers step, gathered in two buckets and reduced in one."""
    found = []
    for defers in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4)))
        cpu = torch.device("cpu")
        policy = Offload(cpu, cpu, defers_step=defers) if kind == "cpu" else CPUOffloadPolicy(defer_step=defers)
        for module in (model[1], model):
            dshard.fully_shard(module, mesh=mesh_of(kind), offload_policy=policy)
        norm = list(model[1][0].parameters())
        optimizers = [optim.AdamW(part, lr=0.05, fused=True) for part in (model[1][1:].parameters(), norm)]
        with late_steps(0, least_s=0.01):
            for step in range(-3, 4):
                with torch.autocast(kind, torch.bfloat16):
                    loss = model(torch.ones(2, 4, device=kind)).square().sum()
                loss.backward()
                for each in optimizers if step >= 0 else ():  # behind the steps in which casts are learned
                    each.step()
                for each in optimizers:
                    each.zero_grad()
            found.append([param.full_tensor() for param in model.parameters()])
    return found


@pytest.mark.slow
def test_a_unit_of_two_optimizers_steps_to_the_same_bits(run: Run, request: pytest.FixtureRequest):
    if "sim" in request.node.name:
        pytest.skip("torch.autocast knows no such device")
    for at_once, deferred_ones in run(2, by_two_optimizers):
        assert all(map(torch.equal, at_once, deferred_ones))


def summed_by_hand(kind: str) -> list[bool]:
    """Whether a sum has what a gradient was when it was added, though that is zero afterwards."""
    program = Program(kind, True, "AdamW")
    params = list(program.model.parameters())
    sums = [torch.zeros_like(param) for param in params]
    loss_of(program.model, batch(kind, 3)).backward()
    with torch.no_grad():
        for total, param in zip(sums, params, strict=True):
            total.add_(param.grad)
            param.grad.zero_()
    found = [bool(total.full_tensor().count_nonzero()) for total in sums]
    loss_of(program.model, batch(kind, 3)).backward()
    return [*found, *(torch.allclose(a.full_tensor(), b.grad.full_tensor()) for a, b in zip(sums, params, strict=True))]


@pytest.mark.slow
def test_what_is_added_is_what_a_gradient_was_and_not_what_it_becomes(run: Run):
    for found in run(2, summed_by_hand):
        assert all(found)


def exposed(kind: str) -> list[int]:
    """How many parameters are stepped later while a program holds shards of two, and once it does not any more."""
    program = Program(kind, True, "AdamW")
    program.step(())
    found, params = [], list(program.model.parameters())

    def count(*_: Any) -> None:
        found.append(sum(isinstance(param.shard_storage._pending, DeferredStep) for param in params))

    program.optim.register_step_post_hook(count)
    param, other = program.model.blocks[0][1].weight, program.model.blocks[1][1].bias
    held = [param.to_local(), program.optim.state[other]["exp_avg"].to_local()[1:]]
    for _ in range(2):
        program.step(("read",))
        held.clear()
    return found


def test_a_shard_that_a_program_holds_is_stepped_at_once_and_deferred_when_it_has_gone(run: Run):
    for found in run(2, exposed):
        assert found == [16, 18]


def without_threads(kind: str) -> list[int]:
    """What differs where no thread can be started."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    start, deferred._Thread.executor = threading.Thread.start, None
    steps: list[tuple[str, ...]] = [(), ("clip",), ("counts",)]
    expected, _ = train(kind, False, "AdamW", steps, 0, False)
    threading.Thread.start = refuse  # type: ignore[method-assign]
    try:
        found, _ = train(kind, True, "AdamW", steps, 0, False)
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        deferred._Thread.executor = None
    return [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not _equal(a, b)]


@pytest.mark.slow
def test_where_there_are_no_more_threads_steps_are_taken_at_once(run: Run):
    for differs in run(2, without_threads):
        assert not differs


def cores_of_threads(kind: str) -> list[int]:
    """On how many cores a deferred step computes under torchrun's own setting, the program, and a later thread."""
    own, cores = os.environ | {}, os.sched_getaffinity
    os.environ |= {"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}
    os.sched_getaffinity = lambda _: set(range(6))  # type: ignore[assignment]
    found: list[int] = []
    try:
        deferred._Thread.executor = None
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        deferred._Thread.submit(lambda: found.append(torch.get_num_threads()))
        deferred._Thread.rest()
        found.append(torch.get_num_threads())
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
    finally:
        os.sched_getaffinity = cores  # type: ignore[assignment]
        os.environ.clear()
        os.environ.update(own)
        deferred._Thread.executor = None
        torch.set_num_threads(num_threads)
    return found


@pytest.mark.slow
def test_a_deferred_step_takes_this_ranks_share_of_the_cores_that_torchrun_leaves_idle(run: Run):
    assert run(1, cores_of_threads) == [[3, 1, 1]]


def raising(kind: str, is_again: bool) -> list[str]:
    """What is told where the step of a unit raises in its thread: by the log at once, then at the next use."""
    program = Program(kind, True, "AdamW")
    program.model.blocks[2].requires_grad_(requires_grad=False)  # or the step itself raises for it
    program.step(())
    program.optim.param_groups[0]["betas"] = ("none", 0.9)
    with unittest.TestCase().assertLogs("dshard") as log:
        program.step(())
        deferred._Thread.rest()
    told = [record.getMessage() for record in log.records]
    for _ in range(3):
        try:
            program.see(*program.model.blocks[0].parameters())
        except StateError as error:
            told.append(str(error))
    if is_again:
        program.optim.param_groups[0]["betas"] = (0.9, 0.9)
        program.optim.state.clear()
        program.step(())
        program.step(("read", "states"))
    return told


@pytest.mark.slow
@pytest.mark.parametrize("is_again", [False, True])
def test_what_a_step_raises_is_told_once_with_the_unit_and_the_way_out(run: Run, is_again: bool):
    for told in run(2, raising, is_again):
        (first, logged), (unit, raised) = (text.split(": ", 1) for text in told)
        assert (first, unit) == ("Net", "blocks.0")  # that was stepped first, and that is used
        assert logged == raised
        assert raised.startswith("the step of its optimizer (AdamW), which was deferred, raised TypeError: ")
        assert "Load a checkpoint; CPUOffloadPolicy(defer_step=False)" in raised


def explained(kind: str) -> list[dict[str, str]]:
    """What `explain` says after each of some steps: which parameters were stepped at once, and why."""
    found: list[dict[str, str]] = []
    program = Program(kind, True, "AdamW")

    def step() -> None:
        program.step(())
        said = dshard.explain(program.model)
        found.append({name: why for unit in said.units for name, why in unit.stepped_at_once})
        reasons = [
            line.rpartition(": ")[2] for line in str(said).splitlines() if line.startswith("step not deferred: ")
        ]
        assert set(reasons) == set(found[-1].values())

    step()
    step()
    weight = program.model.blocks[0][1].weight
    kept: list[Any] = [program.optim.state[weight]]
    step()
    kept = [kept[0]["step"]]
    step()
    kept = [weight.to_local()]
    step()
    kept.clear()
    step()
    program.optim.step = functools.partial(program.optim.step, lambda: None)  # type: ignore[method-assign]
    step()
    return found


@pytest.mark.slow
def test_explain_says_what_was_stepped_at_once_and_why(run: Run):
    for first, second, with_states, with_count, with_shard, without, with_closure in run(2, explained):
        assert len(first) > 8
        assert set(first.values()) == {"the first step makes their optimizer states"}
        assert second == without == {}
        name = "blocks.0.1.weight"
        assert [set(each) for each in (with_states, with_count, with_shard)] == [{name}] * 3
        assert "optimizer.state[param]" in with_states[name]
        assert with_count[name] == "the program holds a reference to their step counts"
        assert "from to_local()" in with_shard[name]
        assert with_closure.keys() == first.keys()
        assert all("a closure" in why for why in with_closure.values())


def explained_beside_owners(kind: str) -> dict[str, str]:
    """What `explain` says after a step of AdamW that is deferred, and then one of Muon over one of its parameters."""
    program = Program(kind, True, "AdamW")
    for _ in range(2):
        program.step(())
    muon = optim.Muon([program.model.blocks[0][1].weight])
    loss_of(program.model, batch(kind, 7)).backward()
    muon.step()
    return {name: why for unit in dshard.explain(program.model).units for name, why in unit.stepped_at_once}


@pytest.mark.slow
def test_explain_says_that_owners_step_at_once(run: Run):
    for found in run(2, explained_beside_owners):
        assert found == {"blocks.0.1.weight": "Muon steps whole parameters, each on its owner"}
