"""What was saved is what is loaded, bit for bit, at any number of ranks and under any strategy."""

import json
import math
import os
import re
import warnings
import weakref
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dshard
from dshard.checkpoint import contents, load, save
from dshard.checkpoint.files import BLOCK_BYTES
from dshard.tensor.views import bytes_of
from dshard.testing import WorldPool, expect_error
from dshard.testing.strategies import world_sizes
from tests.checkpoint.checkpoints import (
    FROZEN,
    OPTIMIZERS,
    STRATEGIES,
    Recipe,
    everything,
    made,
    optimizers_of,
    random_states,
    train,
)

SIZES = st.sampled_from([0, 1, 2, 3, 5, 8])


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    shapes = draw(st.lists(st.lists(SIZES, max_size=3).map(tuple), min_size=1, max_size=4))
    return Recipe(
        tuple(shapes),
        dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
        frozen=tuple(draw(st.lists(st.sampled_from(FROZEN), max_size=3))),
        tied=draw(st.booleans()),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def saved(path: Path, recipe: Recipe, strategy: Any, kind: str, **options: Any) -> Any:
    torch.manual_seed(dist.get_rank())
    model = made(recipe, strategy)
    optimizer = optimizers_of(kind, model)
    train(model, optimizer, 2)
    save(path, model, optimizer, extra={"rank": dist.get_rank()}, step=2, **options)
    before = everything(model, optimizer), random_states()
    return *before, train(model, optimizer, 2), everything(model, optimizer)


def loaded(path: Path, recipe: Recipe, strategy: Any, kind: str, is_used: bool, device: str | None = None) -> Any:
    torch.manual_seed(100)
    model = made(Recipe(recipe.shapes, recipe.dtype, recipe.frozen, recipe.tied, recipe.strided), strategy, device)
    optimizer = optimizers_of(kind, model)
    if is_used:
        train(model, optimizer, 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "checkpoint.load: .* ranks saved different extras")
        extra = load(path, model, optimizer)
    before = everything(model, optimizer), random_states()
    return *before, train(model, optimizer, 2), everything(model, optimizer), extra


@settings(max_examples=20)
@given(
    recipe=recipes(),
    kind=st.sampled_from(["none", "several", *OPTIMIZERS]),
    num_ranks=world_sizes(),
    others=world_sizes(),
    strategies=st.tuples(st.sampled_from(STRATEGIES), st.sampled_from(STRATEGIES)),
    is_used=st.booleans(),
)
def test_what_is_loaded_is_what_was_saved(
    worlds: WorldPool, tmp_path_factory, recipe, kind, num_ranks, others, strategies, is_used
):
    path = tmp_path_factory.mktemp("a") / "saved"
    if kind in ("adafactor", "lbfgs", "muon"):  # which divide by the number of elements, view gradients, take matrices
        shapes = tuple(shape for shape in recipe.shapes if math.prod(shape))
        recipe = replace(recipe, shapes=((3, 2), *shapes), strided=False)
    before = worlds.run(num_ranks, saved, path, recipe, strategies[0], kind)
    after = worlds.run(others, loaded, path, recipe, strategies[1], kind, is_used)
    for rank, (state, rng, losses, later, extra) in enumerate(after):
        source = before[rank if num_ranks == others else 0]
        assert state == source[0]
        assert extra == {"rank": rank if num_ranks == others else 0}
        if num_ranks == others:
            assert rng == source[1]
            if strategies[0] == strategies[1]:
                assert (losses, later) == source[2:]


def loaded_on_meta(path: Path, recipe: Recipe) -> Any:
    model = made(recipe, "full", "meta")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "checkpoint.load: .* ranks saved different extras")
        load(path, model)
    return everything(model)


@pytest.mark.parametrize("others", [2, 3])
def test_a_model_on_meta_gets_memory_and_values(worlds: WorldPool, tmp_path, others):
    recipe = Recipe(((3, 5), (), (0, 2), (7,)), torch.bfloat16, FROZEN, tied=True)
    before = worlds.run(2, saved, tmp_path / "s", recipe, "full", "none")
    for state in worlds.run(others, loaded_on_meta, tmp_path / "s", recipe):
        assert {k: v for k, v in state.items() if "count" not in k and "history" not in k} == {
            k: v for k, v in before[0][0].items() if "count" not in k and "history" not in k
        }


class Odd(nn.Module):
    """Extra state that is a tensor, and a tied buffer."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.weight, self.value = nn.Parameter(torch.ones(3, 2)), value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        if state is None:
            raise ValueError("refused")
        self.value = state


class Two(nn.Module):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = Odd(first), Odd(second)


def with_extra_state(path: Path) -> None:
    value = torch.arange(3.0) + dist.get_rank()
    save(path, dshard.fully_shard(Two(value, [torch.tensor(2), b"x", dist.get_rank()])))
    other = dshard.fully_shard(Two(None, None))
    load(path, other)
    assert torch.equal(other.first.value, value)
    assert other.second.value == [torch.tensor(2), b"x", dist.get_rank()]


def test_extra_state_may_be_a_tensor_and_a_number_of_each_rank(worlds: WorldPool, tmp_path):
    worlds.run(2, with_extra_state, tmp_path / "s")


def with_own_losses(path: Path) -> list[float]:
    """The loss that LBFGS keeps of this rank's own batch, as it was saved and as it was loaded."""
    torch.manual_seed(0)
    model = dshard.fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    save(path, model, optimizer)
    state = optimizer.state[model.weight]
    before = state["prev_loss"]
    optimizer.step(closure)
    load(path, model, optimizer)
    return [before, optimizer.state[model.weight]["prev_loss"]]


def test_a_number_of_an_optimizer_that_differs_comes_back_to_each_rank(worlds: WorldPool, tmp_path):
    (first, own), (second, other) = worlds.run(2, with_own_losses, tmp_path / "s")
    assert first != second
    assert (own, other) == (first, second)


def untied_into_tied(path: Path) -> str:
    torch.manual_seed(0)
    apart = dshard.fully_shard(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
    save(path, apart)
    tied: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    dshard.fully_shard(tied)
    before = everything(tied)
    with pytest.raises(dshard.CheckpointError) as caught:
        load(path, tied)
    assert everything(tied) == before
    return str(caught.value)


def test_two_values_do_not_go_into_one_tied_weight(worlds: WorldPool, tmp_path):
    for text in worlds.run(2, untied_into_tied, tmp_path / "s"):
        assert "are one tensor of the model and must have one value, but the checkpoint has two" in text


def with_another_lr(path: Path) -> str:
    torch.manual_seed(0)
    model = dshard.fully_shard(nn.Linear(4, 4))
    with pytest.raises(dshard.DivergenceError) as caught:
        save(path, model, torch.optim.SGD(model.parameters(), lr=1.0 + dist.get_rank()))
    return str(caught.value)


def test_optimizers_of_other_options_are_refused_with_what_they_are(worlds: WorldPool, tmp_path):
    for text in worlds.run(2, with_another_lr, tmp_path / "s"):
        assert 'must pass the same optimizer, but number 0 is "SGD with ' in text
        assert all(f"'lr': {lr}" in text for lr in (1.0, 2.0))


def with_refusing_module(path: Path) -> str:
    save(path, dshard.fully_shard(Two(1, None)))
    other = dshard.fully_shard(Two(5, 6))
    with torch.no_grad():
        other.first.weight.zero_()
    before = everything(other), random_states()
    with pytest.raises(dshard.CheckpointError) as caught:
        load(path, other)
    assert (everything(other), random_states()) == before
    return str(caught.value)


def test_a_module_that_refuses_its_extra_state_leaves_everything_as_it_was(worlds: WorldPool, tmp_path):
    for text in worlds.run(2, with_refusing_module, tmp_path / "s"):
        assert "ValueError: refused" in text


class Parts(nn.Module):
    """A recurrent module, buffers, and a tensor as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.norm = nn.LSTM(3, 4), nn.BatchNorm1d(4)
        self.average, self.refuses = torch.full((2,), 5.0, device="cpu"), False

    def get_extra_state(self) -> Tensor:
        return self.average.clone()

    def set_extra_state(self, state: Tensor) -> None:
        if self.refuses:
            raise ValueError("refused")
        self.average = state


READS: dict[str, tuple[Any, Any]] = {
    "load": (save, load),
    "load_safetensors": (
        lambda path, model: dshard.save_safetensors(model, path),
        lambda path, model: dshard.load_safetensors(model, path),
    ),
}


def with_one_rank_failing(path: Path, how: str, what: str, device: str) -> str:
    write, read = READS[how]
    torch.manual_seed(0)
    saved = dshard.fully_shard(Parts())
    write(path, saved)
    with torch.device(device):
        model = dshard.fully_shard(Parts())
    model.average.zero_()

    def now() -> Any:
        if device == "cpu":
            return everything(model)
        return [t.is_meta for t in (*model.parameters(), *model.buffers())], model.average.tolist()

    before, held = now(), None
    if dist.get_rank() == 1:
        model.refuses = what == "set_extra_state"
        held = weakref.ref(model.norm.weight) if what == "memory" else None
    with pytest.raises(dshard.DShardError) as caught:
        read(path, model)
    assert now() == before
    model.refuses = False
    del held
    read(path, model)
    assert everything(model) == everything(saved)
    x = torch.ones(2, 1, 3)
    assert torch.equal(model.rnn(x)[0], saved.rnn(x)[0])
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize(
    ("what", "device"), [("set_extra_state", "cpu"), ("set_extra_state", "meta"), ("memory", "meta")]
)
def test_what_fails_on_one_rank_alone_is_told_on_all_and_leaves_everything_as_it_was(
    worlds: WorldPool, tmp_path, how, what, device
):
    texts = worlds.run(2, with_one_rank_failing, tmp_path / "s", how, what, device)
    told = "ValueError: refused" if what == "set_extra_state" else "norm.weight: a parameter can move to another device"
    assert all(told in text for text in texts)
    assert texts[0].startswith("CheckpointError: ")
    assert texts[0].endswith("(Rank 1.)")


def with_a_plain_parameter_on_meta(path: Path) -> str:
    plain = nn.Linear(4, 4)
    save(path, dshard.fully_shard(plain, ignored_params={plain.weight}))
    empty = nn.Linear(4, 4, device="meta")
    dshard.fully_shard(empty, ignored_params={empty.weight})
    with pytest.raises(dshard.CheckpointError) as caught:
        load(path, empty)
    assert empty.bias.is_meta
    return str(caught.value)


def test_a_plain_parameter_on_meta_is_refused_by_name(worlds: WorldPool, tmp_path):
    for text in worlds.run(2, with_a_plain_parameter_on_meta, tmp_path / "s"):
        assert text.startswith("weight: loading gives memory to sharded parameters, but this one is plain")


def without_a_working_directory(folder: Path) -> str:
    model, kept = dshard.fully_shard(nn.Linear(4, 4)), Path.cwd()
    here = folder / f"{dist.get_rank()}"
    here.mkdir()
    os.chdir(here)
    try:
        if dist.get_rank() == 1:
            here.rmdir()
        with pytest.raises(dshard.CheckpointError) as caught:
            save("s", model)
    finally:
        os.chdir(kept)
    return str(caught.value)


def test_a_rank_whose_working_directory_is_gone_is_told_on_all(worlds: WorldPool, tmp_path):
    for text in worlds.run(2, without_a_working_directory, tmp_path):
        assert text.startswith("s: saving needs a place that can be written, but FileNotFoundError: ")


def folder_of_damaged_ones(folder: Path) -> str:
    model = dshard.fully_shard(nn.Linear(4, 4))
    save(folder / "a", model)
    (folder / "a" / "dshard.json").write_text("{}")
    with pytest.raises(dshard.CheckpointError) as caught:
        load(folder, model)
    return str(caught.value)


def test_where_no_checkpoint_can_be_used_the_error_says_why(worlds: WorldPool, tmp_path):
    (text,) = worlds.run(1, folder_of_damaged_ones, tmp_path)
    assert text.endswith("The checkpoint is damaged; use another. Check the path.")


def with_the_format_of_an_older_version(path: Path) -> str:
    model = dshard.fully_shard(nn.Linear(4, 4))
    save(path, model)
    body = json.loads((path / "dshard.json").read_text())
    del body["versions"]
    (path / "dshard.json").write_text(json.dumps({**body, "format": 3, "torch": "2.9", "dshard": "0.1"}))
    with pytest.raises(dshard.CheckpointError) as caught:
        load(path, model)
    return str(caught.value)


def test_the_format_of_an_older_version_is_refused_with_its_name(worlds: WorldPool, tmp_path):
    (text,) = worlds.run(1, with_the_format_of_an_older_version, tmp_path / "s")
    assert "the format must be 5, but it is 3, written by torch 2.9, dshard 0.1. Load it with that version" in text


def calls_of_a_save(folder: Path, parity: int) -> int:
    model = dshard.fully_shard(nn.Linear(4, 4))
    with dshard.CommTrace() as trace:
        save(folder / "s", model, parity=parity)
    return trace.calls()


def test_ranks_agree_on_rows_of_parity_where_there_are_some(worlds: WorldPool, tmp_path):
    without, with_rows = (worlds.run(2, calls_of_a_save, tmp_path, parity) for parity in (0, 1))
    assert with_rows == [calls + 1 for calls in without]


class Elsewhere(Tensor):
    """Says that it is on some device, and as torch does refuses to be joined with one that is on another."""

    device: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cat and len({t.device for t in args[0]}) > 1:
            raise RuntimeError("Expected all tensors to be on the same device")
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            return found.as_subclass(Tensor) if isinstance(found, Tensor) else found


def test_buffers_of_several_devices_are_summed(monkeypatch):
    def moved(values: Tensor) -> Tensor:
        raw = bytes_of(values)
        if values[0] == 2:
            return raw
        raw = raw.as_subclass(Elsewhere)
        raw.device = torch.device("cuda", int(values[0]))
        return raw

    given = [torch.full((size,), float(number)) for number, size in [(0, 3), (1, 5), (0, 2), (2, 4), (1, 1)]]
    monkeypatch.setattr(contents, "bytes_of", moved)
    assert contents._sums_of(given) == [zlib.crc32(each.numpy().tobytes()) for each in given]


class Packing(nn.Linear):
    """Has a tensor of its own in its state dict: one that it keeps, or one that it makes for each call."""

    def __init__(self, makes: bool) -> None:
        super().__init__(4, 4)
        self.kept, self.makes = torch.zeros(3), makes

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}packed"] = self.kept + 1 if self.makes else self.kept.detach()


def with_packed(path: Path) -> tuple[list[float], list[str]]:
    kept, makes = (dshard.fully_shard(Packing(makes)) for makes in (False, True))
    kept.kept.fill_(3.0)
    save(path / "a", kept)
    dshard.save_safetensors(kept, path / "b")
    texts = []
    for action in (
        lambda: save(path / "c", makes),
        lambda: load(path / "a", makes),
        lambda: dshard.load_safetensors(makes, path / "b"),
    ):
        with pytest.raises(dshard.CheckpointError) as caught:
            action()
        texts.append(str(caught.value))
    kept.kept.fill_(1.0)
    load(path / "a", kept)
    return kept.kept.tolist(), texts


def test_a_tensor_that_a_hook_makes_for_each_state_dict_is_refused_and_one_that_is_kept_comes_back(
    worlds: WorldPool, tmp_path
):
    for values, texts in worlds.run(2, with_packed, tmp_path):
        assert values == [3.0] * 3
        for who, text in zip(("checkpoint.save", "checkpoint.load", "load_safetensors"), texts, strict=True):
            assert f"{who}: tensors of a state_dict must be parameters, buffers" in text
            assert "'packed' is made anew by each call" in text


def with_a_default_device(path: Path) -> list[bool]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[dshard.fully_shard(nn.Linear(4, 4)) for _ in range(3)])
    dshard.fully_shard(model)
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=0.1), torch.randn(2, 4)
    torch.set_default_device("meta")  # as "cuda" is set by many programs; whatever is made on it by mistake is noticed
    try:
        with dshard.join(model):
            for _ in range(2 + dist.get_rank() % 2):
                model(x).sum().backward()
                dshard.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        wanted = [p.full_tensor() for p in model.parameters()]
        save(path / "a", model, optimizer, extra={"x": x}, parity=1)
        later = save(path / "b", model, optimizer, asynchronous=True)
        assert later is not None
        later.result()
        dshard.save_safetensors(model, path / "c")
        dshard.set_strategy(model, "zero2")
        found = []
        for read in (
            lambda: load(path / "a", model, optimizer),
            lambda: load(path / "b", model, torch.optim.AdamW(model.parameters(), lr=0.1)),
            lambda: dshard.load_safetensors(model, path / "c"),
        ):
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            read()
            found.append(all(map(torch.equal, (p.full_tensor() for p in model.parameters()), wanted)))
        return found
    finally:
        torch.set_default_device(None)


def test_a_default_device_changes_nothing(worlds: WorldPool, tmp_path):
    assert worlds.run(2, with_a_default_device, tmp_path) == [[True] * 3] * 2


def saved_for_inference(path: Path) -> list[Tensor]:
    torch.manual_seed(0)
    model = dshard.fully_shard(nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    save(path, model, optimizer)
    return [p.full_tensor() for p in model.parameters()]


def loaded_in_inference(path: Path) -> list[Tensor]:
    model = dshard.fully_shard(nn.Linear(5, 3), sync="broadcast")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torch.inference_mode():
        load(path, model, optimizer)
    found = [p.full_tensor().detach().clone() for p in model.parameters()]
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()  # of states that are no inference tensors
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_load_in_inference_mode_leaves_a_model_that_trains(worlds: WorldPool, tmp_path, num_ranks):
    wanted = worlds.run(2, saved_for_inference, tmp_path / "s")[0]
    for found in worlds.run(num_ranks, loaded_in_inference, tmp_path / "s"):
        assert all(map(torch.equal, found, wanted))


def refused(path: Path, what: str) -> str:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4)
    optimizer, options = None, {}
    if what == "complex128":
        model.register_buffer("odd", torch.zeros(3, dtype=torch.complex128))
    elif what == "sparse":
        model.register_buffer("odd", torch.eye(3).to_sparse())
    dshard.fully_shard(model)
    if what == "object":
        options["extra"] = {"odd": object()}
    elif what == "huge int":
        options["extra"] = {"odd": 10**5000}
    elif what == "state":
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state[model.weight] = {"odd": lambda: 1}
    elif what == "list state":
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state[model.weight] = ["odd"]
    with pytest.raises(dshard.CheckpointError) as caught:
        save(path / "odd", model, optimizer, **options)
    dist.barrier()
    assert not list(path.iterdir())
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("complex128", "model.odd: "),
        ("sparse", "model.odd: "),
        ("object", "extra['odd']: "),
        ("huge int", "extra['odd']: "),
        ("state", "optimizer.weight.odd: "),
        ("list state", "optimizer.weight: "),
    ],
)
def test_what_cannot_be_saved_is_named_and_leaves_nothing(worlds: WorldPool, tmp_path, what, name):
    for text in worlds.run(2, refused, tmp_path, what):
        assert text.startswith(name)


class Counting(torch.optim.SGD):
    """Has a state of no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = {"count": self.state.get("steps", {"count": 0})["count"] + 1, "sum": torch.ones(2)}
        return super().step(closure)


def with_common_state(path: Path) -> None:
    torch.manual_seed(0)
    model = dshard.fully_shard(nn.Linear(4, 4))
    optimizer, fresh = Counting(model.parameters(), lr=0.1), Counting(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.step()
    save(path, model, optimizer)
    load(path, model, fresh)
    assert fresh.state["steps"]["count"] == 3
    assert torch.equal(fresh.state["steps"]["sum"], torch.ones(2))


def test_a_state_of_no_parameter_is_kept(worlds: WorldPool, tmp_path):
    worlds.run(2, with_common_state, tmp_path / "s")


def compiled(path: Path) -> None:
    torch.manual_seed(0)
    model: Any = torch.compile(dshard.fully_shard(nn.Linear(4, 4)), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    before = everything(model, optimizer)
    save(path, model, optimizer)
    optimizer.step()
    load(path, model, optimizer)
    assert everything(model, optimizer) == before


def test_a_compiled_model_is_saved_and_loaded(worlds: WorldPool, tmp_path):
    worlds.run(2, compiled, tmp_path / "s")


def big(seed: int) -> Any:
    torch.manual_seed(seed)
    return dshard.fully_shard(nn.Sequential(nn.Linear(512, 5001), nn.Linear(512, 1500, bias=False)))


def save_big(path: Path) -> list[Tensor]:
    model = big(0)
    save(path, model)
    return [p.full_tensor() for p in model.parameters()]


def load_big(path: Path) -> tuple[int, int, list[Tensor]]:
    """Bytes that this rank read of shard files, those that it holds, and what it loaded."""
    model, own, read = big(1), os.preadv, Counter[str]()

    def counted(opened: int, buffers: Any, offset: int) -> int:
        num_read = own(opened, buffers, offset)
        read[os.readlink(f"/proc/self/fd/{opened}")] += num_read
        return num_read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        load(path, model)
    shards = {name: count for name, count in read.items() if name.endswith(".safetensors")}
    held = sum(p.to_local().nbytes for p in model.parameters())
    return sum(shards.values()), held, [p.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 2), (2, 2)])
def test_each_rank_reads_the_bytes_of_its_shards_alone(worlds: WorldPool, tmp_path, before, after):
    want = worlds.run(before, save_big, tmp_path / "s")[0]
    for num_read, held, got in worlds.run(after, load_big, tmp_path / "s"):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        # At most two blocks of each tensor too many; and headers, which `safetensors` maps, and random states.
        assert held <= num_read <= held + (len(want) + 1) * 2 * BLOCK_BYTES


def load_damaged(path: Path) -> str:
    model = big(1)
    before = [p.full_tensor() for p in model.parameters()]
    with pytest.raises(dshard.CheckpointError) as caught:
        load(path, model)
    assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters(), strict=True))
    return str(caught.value)


@pytest.mark.parametrize("after", [2, 3])
def test_a_flipped_bit_is_found_wherever_it_lies_in_what_one_read_gives(worlds: WorldPool, tmp_path, after):
    worlds.run(2, save_big, tmp_path / "s")
    file = sorted((tmp_path / "s").glob("shard-*"))[0]
    right = file.read_bytes()
    for at in (100_000, 1_000_000, 4_000_000, 4_300_000, 5_100_000):
        content = bytearray(right)
        content[at] ^= 16
        file.write_bytes(content)
        for text in worlds.run(after, load_damaged, tmp_path / "s"):
            assert f"{file}: values must be those that were saved, but 'model.0.weight' has other bytes between" in text
            low, high = map(int, re.search(r"between (\d+) and (\d+)", text).groups())
            assert low <= at < high <= low + (1 << 18)


class KeepsIts(torch.optim.SGD):
    """An optimizer whose states are the parameter itself, and one tensor under two names."""

    def keep(self) -> None:
        for param in self.param_groups[0]["params"]:
            mean = torch.zeros_like(param)
            self.state[param] = {"itself": param.detach(), "mean": mean, "also": mean, "own": torch.ones_like(param)}


def with_shared_states(path: Path) -> list[bool]:
    model = dshard.fully_shard(nn.Linear(5, 7))
    optimizer = KeepsIts(model.parameters(), lr=0.1)
    optimizer.keep()
    save(path, model, optimizer)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load(path, model, optimizer)
    found = []
    for param in model.parameters():
        state = optimizer.state[param]
        with torch.no_grad():
            param.fill_(3.0)
            state["mean"].fill_(2.0)
        found += [bool((state["itself"].full_tensor() == 3.0).all()), bool((state["also"].full_tensor() == 2.0).all())]
        found.append(bool((state["own"].full_tensor() == 1.0).all()))
    return found


def test_states_that_share_memory_share_it_after_a_load(worlds: WorldPool, tmp_path):
    assert worlds.run(2, with_shared_states, tmp_path / "s") == [[True] * 6] * 2


def skip_a_step(path: Path, strategy: str) -> None:
    model = made(Recipe(((4, 6), (3,))), strategy)
    optimizer = optimizers_of("sgd", model)
    train(model, optimizer, 1)
    save(path, model, optimizer)
    if dist.get_rank() == 0:
        with torch.no_grad():
            next(iter(model.parameters())).mul_(2)  # as a step that the other rank has skipped
    save(path, model, optimizer)


@pytest.mark.parametrize("strategy", ["full", "ddp"])
def test_no_checkpoint_holds_shards_of_two_steps(worlds: WorldPool, tmp_path, strategy):
    for kind, text in expect_error(worlds.get_world(2), skip_a_step, tmp_path / "saved", strategy):
        assert kind == "DivergenceError"
        assert re.search(
            r": all ranks must have written alike to a parameter that is saved, but by rank .* \d, \d times", text
        )


def equal_again(path: Path) -> None:
    model = made(Recipe(((4, 6), (3,))), "ddp")
    param = next(iter(model.parameters()))
    if dist.get_rank() == 0:
        with torch.no_grad():
            param.mul_(2)
    dist.broadcast(param.to_local(), 0)
    save(path, model)


def test_replicas_that_were_made_equal_again_are_saved(worlds: WorldPool, tmp_path):
    worlds.run(2, equal_again, tmp_path / "saved")


def load_others(path: Path) -> None:
    model = made(Recipe(((4, 6),)), "full")
    load(path / str(dist.get_rank()), model)


def test_ranks_that_load_from_other_folders_are_told_of_both(worlds: WorldPool, tmp_path):
    for kind, text in expect_error(worlds.get_world(2), load_others, tmp_path):
        assert kind == "DivergenceError"
        assert re.search(r"must pass the same directory, but it is '.*/0' on rank 0 and '.*/1' on rank 1", text)
