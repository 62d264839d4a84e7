"""Long runs with everything that programs do around a training step: nothing grows, and no bit is changed."""

import json
import os
import tempfile
import threading
from array import array
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dshard.optimizer.steps import before_steps
from dshard.tensor import meshes
from dshard.testing import WorldPool
from tests.faults.census import census, tensor_bytes
from tests.faults.long_plan import BEGINNING, plan, survivors
from tests.faults.long_program import CLIP, INF, Net, Run, loss_of

NUM_RANKS = 2

# A leak grows from each look to the next one. What is made at its first use does not, nor does what goes up and down;
# but sums of many things may do so by chance, by less than this. On the heap, torch's flight recorder keeps the last
# 2,000 of torch's own collectives, at some 500 bytes each: those of looks, saves and loads.
CHANCE = {"heap bytes": 1 << 14, "resident bytes": 1 << 20, "python blocks": 16, "objects": 4, "entries": 4}

# By how much more there may be at the end than at the first look, and why. Everything else may not grow at all.
SLACK = {
    "heap bytes": 2 << 20,  # of which the flight recorder takes up to 1.4 MB
    "resident bytes": 32 << 20,  # pages that malloc keeps
    "python blocks": 2000,  # with strings and numbers, which nothing else counts
    "objects": 1000,  # what is made at its first use: an operation, a warning, an import
    "entries": 1000,
}
SLACK_OF_CACHES = 20  # of dshard, one entry for each operation that was ever met
SLACK_OF_OTHERS = 200  # types of Python's and torch's own, of which many are made for the first use of an operation


@dataclass(frozen=True, slots=True)
class Ended:
    """What a run gives.

    Args:
        bits: Of parameters, buffers and states at its end.
        losses: Of each step of training, 0 where there was none.
        norms: Of the gradients of each step that clipped.
        counts: What was alive, at each look.
        done: How often what was done between and in the steps.
    """

    bits: dict[str, torch.Tensor]
    losses: array
    norms: array
    counts: list[dict[str, int]] = field(default_factory=list)
    done: Counter = field(default_factory=Counter)


def run_program(folder, seed, num_steps, busy, looks):
    """Everything, with what is alive after the steps `looks`, or after the first that does not raise from there on."""
    run, counts = Run(Path(folder), num_steps=num_steps), Path(folder, f"counts of rank {dist.get_rank()}")
    before, tempfile.tempdir = tempfile.tempdir, folder
    remaining = list(looks)
    counts.touch()
    try:
        run.save_under_every_strategy()
        for step in plan(seed, num_steps, busy=busy):
            run.do(step)
            if remaining and step.index + 1 >= remaining[0] and step.failure is None:
                remaining.pop(0)
                with run.at_rest(), counts.open("a") as file:  # in a file, which takes no memory
                    print(json.dumps(census(run.model, Path(folder))), file=file)
    finally:
        run.rest()
        tempfile.tempdir = before
    found = [json.loads(line) for line in counts.read_text().splitlines()]
    return Ended(run.bits(), run.losses, run.norms, found, run.done)


def run_plain(seed, num_steps, busy):
    """The training steps alone, under "full", or in slices where the program gathers in slices."""
    run = Run(num_steps=num_steps)
    for step in survivors(plan(seed, num_steps, busy=busy)):
        run.switch("split(2)" if step.is_split else "full")
        run.train(step)
    return Ended(run.bits(), run.losses, run.norms)


def run_on_one_process(seed, num_steps, busy):
    """The same in plain torch, with the batches of all ranks."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    for step in survivors(plan(seed, num_steps, busy=busy)):
        for part in range(step.num_batches):
            average = model.average.clone()
            for rank in range(NUM_RANKS):  # each of which has a buffer of its own
                model.average.copy_(average)
                (loss_of(model, step.index, part, rank) / step.num_batches / NUM_RANKS).backward()
        if step.clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, norm_type=INF)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}


def differing(ours, theirs):
    assert set(ours) == set(theirs)
    return [name for name, value in ours.items() if not torch.equal(value, theirs[name])]


def slack(key):
    is_foreign = key.startswith("type ") and not key.startswith(("type dshard", "type torch.Tensor", "type threading"))
    return SLACK.get(key, SLACK_OF_CACHES if key.startswith("in dshard.tensor") else SLACK_OF_OTHERS * is_foreign)


def grown(counts):
    """What has become more from look to look, or by more than it may."""
    values = {key: [count.get(key, 0) for count in counts] for key in counts[-1]}
    return {
        key: own
        for key, own in values.items()
        if risen(key, own) > slack(key) or min(b - a for a, b in pairwise(own)) > CHANCE.get(key, 0)
    }


def risen(key, own):
    """By how much more there is; of objects the least in the second half, for what was done last may hold some."""
    half = len(own) // 2
    return min(own[half:]) - max(own[:half]) if key.startswith("type ") else own[-1] - own[0]


def show(looks, counts):
    """A table of what was counted, and of all types of which there were not always as many."""
    keys = [k for k in counts[-1] if not k.startswith(("type ", "in ")) or len({c.get(k, 0) for c in counts}) > 1]
    print(f"\n{'after the step':44}" + "".join(f"{look:>14,}" for look in looks))
    for key in keys:
        print(f"{key:44}" + "".join(f"{c.get(key, 0):>14,}" for c in counts))


def check(worlds, folder, program, num_looks, timeout_s):
    """Run a program, which is a seed, a number of steps and how busy it is between them."""
    (folder / "checkpoints").mkdir()
    num_steps = program[1]
    looks = [BEGINNING + (num_steps - BEGINNING) * look // num_looks for look in range(1, num_looks + 1)]
    found = worlds.run(NUM_RANKS, run_program, str(folder), *program, looks, timeout_s=timeout_s)
    print("\n", dict(sorted(found[0].done.items())))
    show(looks, found[0].counts)
    plain = worlds.run(NUM_RANKS, run_plain, *program, timeout_s=timeout_s)
    single = run_on_one_process(*program)
    steps = [step.index for step in survivors(plan(*program[:2], busy=program[2]))]
    for ours, theirs in zip(found, plain, strict=True):
        assert [i for i in steps if ours.losses[i] != theirs.losses[i]] == []
        assert differing(ours.bits, theirs.bits) == []
        assert [ours.norms[i] for i in steps] == pytest.approx([theirs.norms[i] for i in steps], rel=1e-12)
        for name, value in single.items():
            close = {"rtol": 1e-6, "atol": 1e-8}
            torch.testing.assert_close(ours.bits[name], value, **close, msg=lambda text, n=name: f"{n}: {text}")
        assert grown(ours.counts) == {}


def test_nothing_grows_and_no_bit_changes_in_a_run_of_everything(worlds: WorldPool, tmp_path):
    check(worlds, tmp_path, (0, 150, 0.5), 5, 120)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_grows_and_no_bit_changes_in_long_runs(worlds: WorldPool, tmp_path, seed):
    """`LONG_STEPS=5000` makes each as long as that."""
    check(worlds, tmp_path, (seed, int(os.environ.get("LONG_STEPS", "500")), 0.3), 6, 3600)


def leak_slowly(folder):
    """What is found of a hook and a file with each step, and a small tensor with each tenth, every 15 steps."""
    run, counts, kept = Run(num_steps=75), [], []
    with ExitStack() as at_end:
        for step in plan(0, 75, busy=0.0):
            run.train(step)
            at_end.callback(run.model.head.register_forward_hook(lambda *_: None).remove)
            at_end.enter_context(Path(folder, "left").open("w"))
            if step.index % 10 == 0:
                kept.append(torch.zeros(1))
            if step.index % 15 == 14:
                counts.append(census(run.model, Path(folder)))
        return grown(counts)


def test_what_leaks_with_a_step_or_with_ten_would_be_seen(worlds: WorldPool, tmp_path):
    (found,) = worlds.run(1, leak_slowly, str(tmp_path))
    assert found.keys() >= {"file handles", "hooks of modules", "tensor bytes", "type torch.Tensor"}


def leak_everything(folder):
    """What there is more of after one of each kind of leak."""
    run, path = Run(), Path(folder)
    first = census(run.model, path)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, daemon=True)
    thread.start()
    pool = run.model._context().pool
    lent = pool.take(64, torch.device("cpu"))
    pool.lend(lent)
    kept = [torch.zeros(1 << 10), (path / "left").open("w"), lent.memory[:1], pool.take(64, torch.device("cpu"))]
    handle = run.model.head.register_forward_hook(lambda *_: None)
    leave = before_steps(lambda _: None)
    meshes._WITHIN["leaked"] = None
    try:
        return grown([first, census(run.model, path)])
    finally:
        stop.set()
        thread.join()
        kept[1].close()
        handle.remove()
        leave()
        del meshes._WITHIN["leaked"]


def test_each_kind_of_leak_would_be_seen(worlds: WorldPool, tmp_path):
    (found,) = worlds.run(1, leak_everything, str(tmp_path))
    kinds = {"tensor bytes", "threads", "file handles", "files", "hooks of modules", "hooks ahead of steps"}
    kinds |= {
        "pool bytes out",
        "pool lent",
        "in dshard.tensor.meshes._WITHIN",
        "type threading.Thread",
        "type builtins.function",
    }
    assert kinds <= set(found)


def test_what_a_compiler_keeps_of_sizes_unknown_takes_no_bytes():
    """Such a storage's size is a symbol, which no census could write down."""
    value = torch.ones(5, 3)
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(value, symbolic_context=sizes)
    assert isinstance(fake.untyped_storage().nbytes(), torch.SymInt)
    assert tensor_bytes([fake, value]) == 60
