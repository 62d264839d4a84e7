"""Safetensors files that lie, change or are something else: an error of ours, or the values that `safetensors` reads.

Every case is drawn from a seed, so that a failure can be run again: `run_case(seed, folder)`.
"""

import copy
import json
import os
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import dshard
from dshard.testing import WorldPool

safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")

INDEX = "model.safetensors.index.json"
INNER_SHAPE = (5, 3)


class Bag(nn.Module):
    """Cut along rows, along columns, whole, empty and a buffer; of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.arange(15.0).view(INNER_SHAPE))
        self.columns = nn.Parameter(torch.arange(24.0).view(2, 3, 4).bfloat16())
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("ids", torch.arange(4))


def bag() -> Any:
    model = Bag()
    placed = {id(model.columns): Shard(2), id(model.scalar): Replicate()}
    return dshard.fully_shard(model, shard_placement_fn=lambda p: placed.get(id(p)))


# ---------------------------------------------------------------------------------------------------------- the files

Value = dict[str, Tensor]


def values(seed: int) -> Value:
    made = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(t.shape, generator=made) if t.is_floating_point() else torch.randint(9, (4,), generator=made)
        ).to(t.dtype)
        for name, t in Bag().state_dict().items()
    }


def write_model(folder: Path, seed: int, num_files: int) -> None:
    """As another writer does it."""
    tensors = values(seed)
    if num_files == 1:
        safetensors_torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for i in range(num_files):
        file = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::num_files]}
        safetensors_torch.save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.nbytes for t in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


ODD: list[Any] = [
    None, True, False, -1, 0, 1, 1.0, 4, 2**31, 2**63, 2**64, 10**30, -(2**63), "", "x", "F32", "U8", [], [0], [0, 4],
    [4, 0], [0, 2**63], {}, {"a": 1}, "../x", "/etc/hostname", "\ud800", "a\0b", 1e300, float("nan"), float("inf"),
]  # fmt: skip
ODD_TEXTS = [
    "NaN", "Infinity", "-Infinity", "1" * 10_000, "[" * 100_000, '{"a":' * 100_000, "-0", "1e999", '"\\ud800"', "1.",
    "{}{}", "\ufeff{}", "nul", "'a'", "[1,]", '{"a":1,"a":2}',
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def mutated_json(text: str, draw: random.Random) -> str:
    """Another value, name or text in one or two places of a JSON text."""
    value = json.loads(text)
    for _ in range(draw.choice((1, 1, 2))):
        *outer, last = draw.choice([path for path in places(value) if path])
        holder = value
        for key in outer:
            if not isinstance(holder, dict | list) or (isinstance(holder, dict) and key not in holder):
                return json.dumps(value)
            holder = holder[key]
        what = draw.randrange(6)
        if what == 0:
            del holder[last]
        elif what == 1:
            holder[last] = draw.choice(ODD)
        elif what == 2 and isinstance(holder[last], int):
            holder[last] += draw.choice((-4, -1, 1, 2, 4, 8, 2**40))
        elif what == 3 and isinstance(holder, dict):
            holder[draw.choice(("more", "rows", "ids", "__metadata__", "\ud800", ""))] = holder.pop(last)
        elif what == 4 and isinstance(holder, dict):
            holder[draw.choice(("more", "dtype", "rows", "metadata"))] = copy.deepcopy(holder[last])
        else:
            holder[last] = "HERE"
            return json.dumps(value).replace('"HERE"', draw.choice(ODD_TEXTS))
    return json.dumps(value)


def doubled(text: str, draw: random.Random) -> str:
    """A name that is there twice."""
    value = json.loads(text)
    name = draw.choice(list(value))
    return text[:-1] + f",{json.dumps(name)}:{json.dumps(value[draw.choice(list(value))])}" + "}"


def with_header(content: bytes, header: str, draw: random.Random) -> bytes:
    old = int.from_bytes(content[:8], "little")
    text = header.encode("utf-8", "surrogatepass")
    length = (
        len(text) if draw.random() < 0.95 else draw.choice((0, len(text) - 1, len(text) + 1, 10**8, 2**63, 2**64 - 1))
    )
    return struct.pack("<Q", max(0, length)) + text + content[8 + old :]


def header_of(content: bytes) -> str:
    return content[8 : 8 + int.from_bytes(content[:8], "little")].decode().rstrip()


def corrupt_bytes(content: bytes, draw: random.Random) -> bytes:
    what, size = draw.randrange(8), len(content)
    if what == 0:
        at = draw.randrange(min(size, 8 + len(header_of(content))))
        return content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
    if what == 1:
        return content[: draw.randrange(size)]
    if what == 2:
        return content + bytes(draw.randrange(1, 9))
    if what == 3:
        return draw.randbytes(draw.choice((0, 3, 8, 100)))
    if what == 4:
        return with_header(content, doubled(header_of(content), draw), draw)
    if what == 5:
        at = draw.randrange(8, size)
        return content[:at] + draw.randbytes(draw.randrange(4)) + content[at + draw.randrange(4) :]
    return with_header(content, mutated_json(header_of(content), draw), draw)


def corrupt_file(file: Path, folder: Path, draw: random.Random) -> None:
    """Put something else in the place of a file."""
    outside, what = folder.parent / "outside", draw.randrange(7)
    content = file.read_bytes()
    file.unlink()
    if what == 0:
        os.mkfifo(file)
    elif what == 1:
        file.mkdir()
    elif what == 2:
        file.symlink_to(outside / "gone")
    elif what == 3:
        file.symlink_to(draw.choice((file, folder, "/dev/zero", "/dev/null")))
    elif what == 4:
        os.mkfifo(folder / "pipe")
        file.symlink_to("pipe")
    elif what == 5:
        file.write_bytes(b"")
    else:  # as Hugging Face's cache has it
        (folder / "blob").write_bytes(content)
        file.symlink_to("blob")


def corrupt(folder: Path, draw: random.Random) -> None:
    files = sorted(file for file in folder.iterdir() if file.is_file())  # no pipe, at which this process would wait
    file = draw.choice(files)
    what = draw.random()
    if what < 0.12:
        corrupt_file(file, folder, draw)
    elif what < 0.2 and len(files) > 1:
        other = draw.choice([each for each in files if each != file])
        (folder / "swap").write_bytes(file.read_bytes())
        file.write_bytes(other.read_bytes())
        if draw.random() < 0.5:
            other.write_bytes((folder / "swap").read_bytes())
    elif file.name == INDEX:
        text = file.read_text()
        changed = doubled(text, draw) if what > 0.9 else mutated_json(text, draw)
        file.write_bytes(changed.encode("utf-8", "surrogatepass"))
    else:
        file.write_bytes(corrupt_bytes(file.read_bytes(), draw))


# --------------------------------------------------------------------------------------------------------- the oracle


def reference(folder: Path) -> Value:
    """What the format's own reader reads, in the order in which transformers looks; raises as it does."""
    if (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        if not (folder / INDEX).is_file():
            raise FileNotFoundError(INDEX)
        index = json.loads((folder / INDEX).read_text())
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    found: Value = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(file)
        with safetensors.safe_open(file, "pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 - no dict
    return found


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8))


def local_bytes(model: Any) -> Value:
    return {
        name: (t.to_local() if isinstance(t, dshard.ShardedTensor) else t).detach().clone()
        for name, t in model.state_dict().items()
    }


def full_values(model: Any) -> Value:
    return {
        name: (t.full_tensor() if isinstance(t, dshard.ShardedTensor) else t).detach().clone()
        for name, t in model.state_dict().items()
    }


# ------------------------------------------------------------------------------------------------------- what is opened

_opened: list[str] | None = None


def _hook(event: str, args: Any) -> None:
    if _opened is not None and event == "open" and isinstance(args[0], str | bytes):
        _opened.append(os.fsdecode(args[0]))


@contextmanager
def audited() -> Iterator[list[str]]:
    """The paths that are opened meanwhile."""
    global _opened
    if not getattr(sys, "_dshard_fuzz_hook", False):  # a hook stays for the life of the process
        sys._dshard_fuzz_hook = True  # type: ignore[attr-defined]
        sys.addaudithook(_hook)
    _opened = seen = []
    try:
        yield seen
    finally:
        _opened = None


def check_loaded(model: Any, folder: Path) -> str:
    """Load once: the values of the reference, or an error of ours and a model that is as it was. Says which."""
    before = local_bytes(model)
    error = None
    with audited() as paths:
        try:
            dshard.load_safetensors(model, folder)
        except dshard.CheckpointError as caught:
            error = caught
    foreign = [
        path
        for path in paths
        if path.endswith((".safetensors", ".json", "hostname")) and not path.startswith(f"{folder}/")
    ]
    assert not foreign, foreign
    try:
        expected, refusal = reference(folder), None
    except Exception as caught:
        expected, refusal = {}, caught
    if error is not None:
        after = local_bytes(model)
        assert all(same(before[name], after[name]) for name in before), "half a load"
        assert len(str(error)) < 4000, "an error that nobody can read"
        assert "RecursionError" not in str(error)
        return "refused"
    assert refusal is None, f"loaded what the reference refuses: {refusal}"
    for name, value in full_values(model).items():
        assert same(value, expected[name]), name
    return "loaded"


def run_case(seed: int, folder: Path) -> None:
    """Make the files of one case."""
    draw = random.Random(seed)
    folder.mkdir()
    write_model(folder, seed, draw.choice((1, 1, 2, 3)))
    for _ in range(draw.choice((1, 1, 1, 2))):
        try:
            corrupt(folder, draw)
        except (ValueError, IndexError, OSError, KeyError, RecursionError):
            return  # what was corrupted cannot be corrupted again in this way


def fuzz(root: str, first: int, number: int) -> dict[str, int]:
    """Runs on every rank; rank 0 makes the files."""
    model, counts = bag(), {"refused": 0, "loaded": 0}
    for seed in range(first, first + number):
        folder = Path(root) / str(seed)
        if dist.get_rank() == 0:
            run_case(seed, folder)
        dist.barrier()
        try:
            counts[check_loaded(model, folder)] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        dist.barrier()
    return counts


@pytest.mark.parametrize(("num_ranks", "number"), [(1, 250), (2, 60)])
def test_a_corrupted_model_is_refused_or_gives_what_the_reference_reads(worlds: WorldPool, tmp_path, num_ranks, number):
    for counts in worlds.run(num_ranks, fuzz, str(tmp_path), 0, number):
        assert counts["refused"] > number / 3
        assert counts["loaded"] > number / 50


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "number"), [(1, 1500), (2, 200)])
def test_many_corrupted_models_are_refused_or_give_what_the_reference_reads(
    worlds: WorldPool, tmp_path, num_ranks, number
):
    for first in range(1000, 1000 + number, 200):
        worlds.run(num_ranks, fuzz, str(tmp_path), first, 200)
