"""Long runs with everything that programs do around a training step: nothing grows, and no bit is changed."""

import json
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from dshard.collectives import ledger
from dshard.runtime.standins import before_step
from dshard.testing import WorldPool
from tests.faults.census import census
from tests.faults.long_plan import plan, survivors
from tests.faults.long_program import CLIP, Net, Run, batch, loss_of

NUM_RANKS = 2

# By how much more there may be at the end, and why. Everything else may not grow at all.
SLACK = {
    "tensor bytes": 1024,  # what an asynchronous save copies holds random states as text, of varying length
    "heap bytes": 1 << 20,  # with what other code of the process keeps
    "resident bytes": 32 << 20,  # pages that malloc keeps
    "python blocks": 500,  # strings and numbers, which nothing counts
    "objects": 500,
    "entries": 500,
    "type torch.storage.UntypedStorage": 100,  # one for each tensor that was ever asked for its storage
}
# What the first view of each parameter and state leaves, of which a base keeps a bounded number.
SLACK |= dict.fromkeys([f"type {torch.Size.__module__}.Size", "type dshard.tensor.views.ViewStep"], 100)
SLACK |= {f"type torch.distributed.tensor.placement_types.{each}": 100 for each in ("Replicate", "Shard")}
SLACK |= {f"type torch.distributed.tensor._dtensor_spec.{each}": 100 for each in ("DTensorSpec", "TensorMeta")}
SLACK |= {"type dshard.runtime.reducer._Key": 20, "type torch.Tensor": 20}  # of the last backward
SLACK_OF_TYPES = 10  # of Python's and torch's own objects, some of which are made when first needed


def run_program(folder, seed, num_steps, busy, looks):
    """Everything, with what is alive after the steps `looks`."""
    run, counts = Run(Path(folder)), []
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        for step in plan(seed, num_steps, busy=busy):
            run.do(step)
            if step.index + 1 in looks:
                with run.at_rest():
                    if not counts:
                        run.save_under_every_strategy()
                    counts.append(json.dumps(census(run.model, Path(folder))))  # a text: few objects
    finally:
        run.rest()
        tempfile.tempdir = before
    return run.bits(), [json.loads(each) for each in counts], run.done


def run_plain(seed, num_steps, busy):
    """The training steps alone, under "full", or in slices where the program gathers in slices."""
    run = Run()
    for step in survivors(plan(seed, num_steps, busy=busy)):
        run.switch("split(2)" if step.is_split else "full")
        run.train(step)
    return run.bits()


def run_on_one_process(seed, num_steps, busy):
    """The same in plain torch, with the batches of all ranks."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    for step in survivors(plan(seed, num_steps, busy=busy)):
        for part in range(step.num_batches):
            for rank in range(NUM_RANKS):
                loss = loss_of(model, batch(step.index, part, rank))
                (loss / step.num_batches / NUM_RANKS).backward()
        if step.clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def differing(ours, theirs):
    assert set(ours) == set(theirs)
    return [name for name, value in ours.items() if not torch.equal(value, theirs[name])]


def slack(key):
    is_foreign = key.startswith("type ") and not key.startswith(("type dshard", "type torch.Tensor", "type threading"))
    if key.startswith("in dshard.tensor") or key == "in dshard.collectives.plan._PLANS":
        return 20  # one for each operation that was ever met; plans of units that were formed anew
    return SLACK.get(key, SLACK_OF_TYPES if is_foreign and key != "type builtins.function" else 0)


def grown(first, last):
    """What there is more of than before."""
    found = {key: (first.get(key, 0), count) for key, count in last.items()}
    return {key: pair for key, pair in found.items() if pair[1] - pair[0] > slack(key)}


def show(looks, counts):
    """A table of what was counted, and of all types of which there were not always as many."""
    keys = [k for k in counts[-1] if not k.startswith(("type ", "in ")) or len({c.get(k, 0) for c in counts}) > 1]
    print(f"\n{'after the step':44}" + "".join(f"{look:>14,}" for look in looks))
    for key in keys:
        print(f"{key:44}" + "".join(f"{c.get(key, 0):>14,}" for c in counts))


def check(worlds, folder, program, looks, timeout_s):
    """Run a program, which is a seed, a number of steps and how busy it is between them."""
    (folder / "checkpoints").mkdir()
    found = worlds.run(NUM_RANKS, run_program, str(folder), *program, looks, timeout_s=timeout_s)
    print("\n", dict(sorted(found[0][2].items())))
    show(looks, found[0][1])
    plain = worlds.run(NUM_RANKS, run_plain, *program, timeout_s=timeout_s)
    single = run_on_one_process(*program)
    for (bits, counts, _), expected in zip(found, plain, strict=True):
        assert not grown(counts[-2], counts[-1])
        assert not differing(bits, expected)
        for name, value in single.items():
            torch.testing.assert_close(bits[name], value, rtol=1e-6, atol=1e-8, msg=lambda text, n=name: f"{n}: {text}")


def test_nothing_grows_and_no_bit_changes_in_a_run_of_everything(worlds: WorldPool, tmp_path):
    check(worlds, tmp_path, (0, 150, 0.5), (50, 100, 150), 120)


@pytest.mark.slow
def test_nothing_grows_and_no_bit_changes_in_5_000_steps(worlds: WorldPool, tmp_path):
    check(worlds, tmp_path, (1, 5000, 0.2), (500, 1000, 2500, 5000), 1200)


def leak_everything(folder):
    """What there is more of after one of each kind of leak."""
    run, path = Run(), Path(folder)
    first = census(run.model, path)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, daemon=True)
    thread.start()
    kept = [torch.zeros(1 << 10), (path / "left").open("w"), run.model._runtime().pool.take(64, torch.device("cpu"))]
    handle = run.model.head.register_forward_hook(lambda *_: None)
    before_step.append(lambda _: None)
    ledger._PAGES["leaked"] = None
    try:
        return grown(first, census(run.model, path))
    finally:
        stop.set()
        thread.join()
        kept[1].close()
        handle.remove()
        before_step.pop()
        del ledger._PAGES["leaked"]


def test_each_kind_of_leak_would_be_seen(worlds: WorldPool, tmp_path):
    (found,) = worlds.run(1, leak_everything, str(tmp_path))
    kinds = {"tensor bytes", "threads", "file handles", "files", "hooks of modules", "hooks ahead of steps"}
    kinds |= {
        "pool bytes out",
        "in dshard.collectives.ledger._PAGES",
        "type threading.Thread",
        "type builtins.function",
    }
    assert kinds <= set(found)
