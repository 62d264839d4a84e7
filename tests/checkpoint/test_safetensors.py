"""Safetensors files: what is written is what `safetensors` reads; what is read are a rank's own rows."""

import copy
import io
import json
import math
import os
import pickle
import re
import resource
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import dshard
from dshard.checkpoint import pretrained
from dshard.cli import main
from dshard.testing import WorldPool, expect_error
from dshard.testing.strategies import DTYPES, TensorCase, tensor_cases, world_sizes
from tests.kit import oracle
from tests.tensor.test_roundtrip import MORE_DTYPES, random_bits, same_bits

safetensors_torch = pytest.importorskip("safetensors.torch")

ON_FILE = tuple(d for d in (*DTYPES, *MORE_DTYPES) if d != torch.complex128)


def placed(dim: int | None) -> Any:
    return Replicate() if dim is None else Shard(dim)


def own_part(full: Tensor, dim: int | None) -> Tensor:
    if dim is None:
        return full
    start, stop = oracle.chunk_extents(full.shape[dim], dist.get_world_size())[dist.get_rank()]
    return full.narrow(dim, start, stop - start)


def same(left: Tensor, right: Tensor) -> bool:
    """Bit for bit, also where the memory lies otherwise."""
    return same_bits(left.contiguous(), right.contiguous())


class Bag(nn.Module):
    """A parameter and a buffer per case."""

    def __init__(self, cases: list[TensorCase]) -> None:
        super().__init__()
        for i, case in enumerate(cases):
            full = random_bits(case).contiguous()
            self.register_parameter(f"p{i}", nn.Parameter(full, requires_grad=case.dtype.is_floating_point))
            self.register_buffer(f"b{i}", full[:1].clone() if full.dim() else full.clone())


def sharded_bag(cases: list[TensorCase], on_meta: bool = False) -> Any:
    with torch.device("meta" if on_meta else "cpu"):
        bag = Bag(cases)
    if on_meta:
        bag = bag.to("meta")
    dims = {id(p): case.dim for p, case in zip(bag.parameters(), cases, strict=True)}
    return dshard.fully_shard(bag, shard_placement_fn=lambda p: placed(dims[id(p)]))


def save_bag(cases: list[TensorCase], folder: str, max_shard_bytes: int) -> None:
    dshard.save_safetensors(sharded_bag(cases), folder, max_shard_bytes=max_shard_bytes, metadata={"step": "1"})


def load_bag(cases: list[TensorCase], folder: str, on_meta: bool) -> None:
    bag = sharded_bag(cases, on_meta)
    if not on_meta:
        with torch.no_grad():
            for tensor in bag.state_dict().values():
                tensor.copy_(torch.zeros((), dtype=tensor.dtype))
    with dshard.CommTrace() as trace:
        keys = dshard.load_safetensors(bag, folder)
    assert keys == ([], [])
    assert trace.payload_bytes <= (3 * 8 + 48) * (dist.get_world_size() - 1)
    for i, case in enumerate(cases):
        full = random_bits(case)
        param, buffer = getattr(bag, f"p{i}"), getattr(bag, f"b{i}")
        assert same(param.to_local(), own_part(full, case.dim)), (i, case)
        assert same(param.full_tensor(), full), (i, case)
        assert same(buffer, full[:1] if full.dim() else full), (i, case)


@settings(max_examples=25)
@given(
    ranks=st.tuples(world_sizes(max_size=3), world_sizes(max_size=3)),
    cases=st.lists(tensor_cases(), min_size=1, max_size=4),
    max_shard_bytes=st.sampled_from([1, 40, 10**9]),
    on_meta=st.booleans(),
)
def test_what_n_ranks_save_is_what_safetensors_reads_and_m_ranks_load(
    worlds: WorldPool, tmp_path_factory, ranks, cases, max_shard_bytes, on_meta
):
    check_saved_and_loaded(worlds, tmp_path_factory.mktemp("bag"), ranks, cases, max_shard_bytes, on_meta)


def check_saved_and_loaded(worlds, folder, ranks, cases, max_shard_bytes, on_meta):
    worlds.run(ranks[0], save_bag, cases, str(folder), max_shard_bytes)
    files = sorted(folder.glob("*.safetensors"))
    found: dict[str, Tensor] = {}
    for file in files:
        part = safetensors_torch.load_file(file)
        assert not part.keys() & found.keys()
        sizes = [t.nbytes for t in part.values()]
        assert sum(sizes) <= max_shard_bytes or len(sizes) - sizes.count(0) <= 1
        found.update(part)
        with safetensors_torch.safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt", "step": "1"}
    for i, case in enumerate(cases):
        assert same(found.pop(f"p{i}"), random_bits(case)), case
        found.pop(f"b{i}")
    assert not found
    assert not list(folder.glob(".*"))
    worlds.run(ranks[1], load_bag, cases, str(folder), on_meta)
    shutil.rmtree(folder)


def test_every_dtype_of_the_format_goes_round(worlds: WorldPool, tmp_path):
    shapes: list[Any] = [((5, 3), 0), ((3, 5), 1), ((2, 3, 4), 1), ((0, 2), 0), ((), None)]
    cases = [TensorCase(s, d, dim, 2, seed=3) for d in ON_FILE for s, dim in shapes]
    check_saved_and_loaded(worlds, tmp_path, (2, 3), cases, 10**9, True)


# ------------------------------------------------------------------------------------------------------- models, ties


class Tied(nn.Module):
    """An embedding that is the head too, buffers, and something that is not saved."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.trunk = nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8), nn.Linear(8, width))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.trunk(self.embed(ids)))


class HeadFirst(Tied):
    """As Hugging Face's classes name the weights that they tie again by themselves."""

    _tied_weights_keys = {"embed.weight": "head.weight"}  # noqa: RUF012


def make(cls: type[nn.Module] = Tied, **options: Any) -> Any:
    torch.manual_seed(0)
    return cls(**options)


def shard_parts(model: Any) -> Any:
    for part in (model.embed, model.trunk, model):
        dshard.fully_shard(part)
    return model


def save_tied(folder: str, cls: type[nn.Module]) -> None:
    dshard.save_safetensors(shard_parts(make(cls)), f"{folder}/weights.safetensors", dtype=torch.bfloat16)


@pytest.mark.parametrize(("cls", "kept", "dropped"), [(Tied, "embed", "head"), (HeadFirst, "head", "embed")])
def test_a_tied_weight_is_written_once_under_the_name_that_the_model_wants(
    worlds: WorldPool, tmp_path, cls, kept, dropped
):
    worlds.run(2, save_tied, str(tmp_path), cls)
    assert os.listdir(tmp_path) == ["weights.safetensors"]
    plain = make(cls)
    found = safetensors_torch.load_file(tmp_path / "weights.safetensors")
    assert found.keys() == plain.state_dict().keys() - {f"{dropped}.weight"}
    for name, value in found.items():
        expected = plain.state_dict()[name]
        assert torch.equal(value, expected.bfloat16() if expected.is_floating_point() else expected), name
    with safetensors_torch.safe_open(tmp_path / "weights.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", f"{dropped}.weight": f"{kept}.weight"}
    other = Tied()
    safetensors_torch.load_model(other, tmp_path / "weights.safetensors")
    assert torch.equal(other.head.weight, plain.head.weight.bfloat16().float())


def load_tied(folder: str, on_meta: bool) -> None:
    with torch.device("meta" if on_meta else "cpu"):
        plain = make()
    model = shard_parts(plain)
    with dshard.gathered(model) if not on_meta else torch.no_grad():
        assert dshard.load_safetensors(model, folder) == ([], [])
        expected = safetensors_torch.load_file(f"{folder}/model.safetensors")
        for name, value in model.state_dict().items():
            want = expected.get(name, expected["embed.weight"])
            got = value.full_tensor() if isinstance(value, dshard.ShardedTensor) else value
            assert torch.equal(got, want.to(value.dtype)), name
        assert model.head.weight is model.embed.weight
    if on_meta:
        assert model.scratch.is_meta, "what no file holds is left alone"
    model(torch.arange(4)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_file_of_another_writer_loads_with_ties_conversions_and_fresh_copies_and_the_model_trains(
    worlds: WorldPool, tmp_path, on_meta
):
    torch.manual_seed(5)
    safetensors_torch.save_model(Tied().double(), tmp_path / "model.safetensors")
    for num_ranks in (1, 2, 3):
        worlds.run(num_ranks, load_tied, str(tmp_path), on_meta)


def load_lstm(file: str) -> list[Tensor]:
    with torch.device("meta"):
        model = nn.LSTM(5, 7)
    dshard.load_safetensors(dshard.fully_shard(model), file)
    return [model(torch.ones(2, 3, 5))[0].detach()]


def test_a_recurrent_module_on_meta_loads(worlds: WorldPool, tmp_path):
    torch.manual_seed(1)
    plain = nn.LSTM(5, 7)
    safetensors_torch.save_file(plain.state_dict(), tmp_path / "lstm.safetensors")
    for (found,) in worlds.run(2, load_lstm, str(tmp_path / "lstm.safetensors")):
        torch.testing.assert_close(found, plain(torch.ones(2, 3, 5))[0])


def load_renamed(file: str, rename: Any) -> Any:
    model = dshard.fully_shard(make().trunk[0])
    keys = dshard.load_safetensors(model, file, strict=False, rename=rename)
    return keys, model.weight.full_tensor(), model.bias.full_tensor()


def without_prefix(name: str) -> str | None:
    return name.removeprefix("old.") if name != "old.skip" else None


@pytest.mark.parametrize("rename", [without_prefix, {"old.weight": "weight"}])
def test_names_are_mapped_and_left_out(worlds: WorldPool, tmp_path, rename):
    tensors = {"old.weight": torch.randn(8, 6), "old.skip": torch.ones(1)}
    safetensors_torch.save_file(tensors, tmp_path / "x.safetensors")
    unexpected = [] if rename is without_prefix else ["old.skip"]
    for keys, weight, bias in worlds.run(2, load_renamed, str(tmp_path / "x.safetensors"), rename):
        assert keys == (["bias"], unexpected)
        assert torch.equal(weight, tensors["old.weight"])
        assert torch.equal(bias, make().trunk[0].bias)


def save_and_load_replicas(folder: str, gone: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    model = dshard.fully_shard(make().trunk[0], mesh=mesh)
    expected = model.weight.full_tensor()
    dshard.save_safetensors(model, folder)
    other = dshard.fully_shard(nn.Linear(6, 8, device="meta"), mesh=mesh)
    assert dshard.load_safetensors(other, folder) == ([], [])
    assert torch.equal(other.weight.full_tensor(), expected)
    assert [torch.equal(value, expected) for _, value in dshard.iter_full(model)][0]
    texts = []
    for failing in range(dist.get_world_size()):
        with pytest.raises(dshard.CheckpointError) as caught:
            dshard.load_safetensors(model, gone if dist.get_rank() == failing else folder)
        texts.append(str(caught.value).removesuffix(f" (Rank {failing}.)"))
    return texts


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_replicas_save_once_load_alike_and_hear_of_each_others_errors(worlds: WorldPool, tmp_path, num_ranks):
    results = worlds.run(num_ranks, save_and_load_replicas, str(tmp_path), str(tmp_path / "gone"))
    assert all(texts == results[0] for texts in results)
    assert all("gone: must be a safetensors file" in text for text in results[0])
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert safetensors_torch.load_file(tmp_path / "model.safetensors").keys() == {"weight", "bias"}


# ------------------------------------------------------------------------------------------- what is read and written


class Large(nn.Module):
    """Two matrices that are cut along different dims, 4 MB each, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(1024, 1024))
        self.columns = nn.Parameter(torch.empty(1024, 1024))
        self.vector = nn.Parameter(torch.empty(64))


def load_large(file: str) -> tuple[int, int, list[Tensor]]:
    """Bytes of the file that this rank copied, what its process grew by, and the shards."""
    read_all, copied = pretrained._read_all, [0]

    def counted(*args: Any) -> dict[str, Tensor]:
        staged = read_all(*args)
        copied[0] = sum(values.untyped_storage().nbytes() for values in staged.values())
        return staged

    with torch.device("meta"):
        model = Large()
    placements = {id(model.columns): Shard(1)}
    dshard.fully_shard(model, shard_placement_fn=lambda p: placements.get(id(p)))
    before = peak_bytes(reset=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "_read_all", counted)
        dshard.load_safetensors(model, file)
    grown = peak_bytes() - before
    return copied[0], grown, [p.to_local().clone() for p in model.parameters()]  # type: ignore[operator]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_rank_reads_its_own_rows_of_the_file_alone(worlds: WorldPool, tmp_path, num_ranks):
    torch.manual_seed(0)
    tensors = {"rows": torch.randn(1024, 1024), "vector": torch.randn(64)}
    both = tmp_path / "b.safetensors"
    safetensors_torch.save_file({**tensors, "columns": torch.randn(1024, 1024)}, both)
    full = safetensors_torch.load_file(both)
    results = worlds.run(num_ranks, load_large, str(both))
    own = math.ceil(1024 / num_ranks) * 4096
    for copied, grown, _ in results:
        assert copied <= 2 * own + (1 << 14)
        # of columns every row has a part of each rank, so all of that tensor is looked at; of rows the rank's own
        assert grown <= 4 * own + own + 1024 * 4096 + (1 << 21), "its shards twice, and the file's pages"
    parts = zip(*[shards for *_, shards in results], strict=True)
    for name, dim, shards in zip(("rows", "columns", "vector"), (0, 1, 0), parts, strict=True):
        assert torch.equal(torch.cat(shards, dim), full[name]), name


def peak_bytes(reset: bool = False) -> int:
    """Largest resident size of this process since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def save_layers(folder: str, num_layers: int) -> int:
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(num_layers)])
    dshard.fully_shard(model, sync=None)  # one unit of 4 MB per layer
    before = peak_bytes(reset=True)
    dshard.save_safetensors(model, folder)
    return peak_bytes() - before


@pytest.mark.slow
def test_saving_takes_a_tensor_or_two_beyond_the_shards(worlds: WorldPool, tmp_path):
    worlds.run(2, save_layers, str(tmp_path / "warm"), 1)
    for grown in worlds.run(2, save_layers, str(tmp_path / "model"), 16):  # 64 MB, of which a rank holds 32
        assert grown <= 3 * (1 << 22) + (1 << 20)


# -------------------------------------------------------------------------------------------------------------- errors


def save_over(target: str, limit_bytes: int | None) -> None:
    """Rank 0 may write files of a few bytes only."""
    model = shard_parts(make())
    with torch.no_grad():
        model.embed.weight.fill_(7)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes is not None and dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        dshard.save_safetensors(model, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit_bytes", [0, 100, 1000])
def test_a_write_that_fails_on_rank_0_raises_on_every_rank_and_leaves_the_old_file(
    worlds: WorldPool, tmp_path, limit_bytes
):
    worlds.run(3, save_over, str(tmp_path), None)
    old = (tmp_path / "model.safetensors").read_bytes()
    errors = expect_error(worlds.get_world(3), save_over, str(tmp_path), limit_bytes)
    assert {kind for kind, _ in errors} == {"CheckpointError"}
    for _, text in errors:
        assert text.startswith(f"{tmp_path}: saving safetensors needs a place that can be written, but OSError")
        assert "File too large" in text
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == old


def test_a_place_that_is_none_raises_on_every_rank(worlds: WorldPool, tmp_path):
    (tmp_path / "file").write_text("")
    for kind, text in expect_error(worlds.get_world(2), save_over, str(tmp_path / "file" / "x"), None):
        assert kind == "CheckpointError"
        assert "NotADirectoryError" in text


def save_strange(kind: str) -> None:
    model: Any = nn.Linear(2, 2)
    options: dict[str, Any] = {}
    if kind == "dtype":
        model = nn.Linear(2, 2, dtype=torch.complex128)
    elif kind == "metadata":
        options["metadata"] = {"step": 3}
    elif kind == "size":
        options["max_shard_bytes"] = 0
    dshard.fully_shard(model)
    dshard.save_safetensors(model, "/nowhere/at/all", **options)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("dtype", "CheckpointError", "weight: a safetensors file can hold .* but this tensor is torch.complex128"),
        ("metadata", "ArgumentError", "metadata must be texts by names or None, but for 'step' it is 3"),
        ("size", "ArgumentError", "max_shard_bytes must be an integer of at least 1, but it is 0"),
    ],
)
def test_what_a_file_cannot_hold_raises_before_anything_is_written(worlds: WorldPool, kind, error, text):
    for name, message in expect_error(worlds.get_world(2), save_strange, kind):
        assert name == error
        assert re.search(text, message), message
    assert not Path("/nowhere").exists()


def load_wrong(paths: list[str]) -> None:
    model = shard_parts(make())
    before = copy.deepcopy(model.state_dict())
    try:
        dshard.load_safetensors(model, paths[min(dist.get_rank(), len(paths) - 1)])
    finally:
        for name, value in model.state_dict().items():
            assert torch.equal(value.to_local() if hasattr(value, "to_local") else value, _local(before[name])), name


def _local(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def expect_load_error(worlds: WorldPool, paths: list[Path], pattern: str, num_ranks: int = 2) -> None:
    errors = expect_error(worlds.get_world(num_ranks), load_wrong, [str(path) for path in paths])
    for kind, text in errors:
        assert kind == "CheckpointError", text
        assert re.search(pattern, text), text


def test_missing_unexpected_and_misshapen_tensors_are_named_in_one_error(worlds: WorldPool, tmp_path):
    state = {name: t.clone() for name, t in make().state_dict().items()}
    del state["embed.weight"], state["trunk.0.bias"]
    state["trunk.2.weight"] = torch.zeros(8, 6)
    state["more"] = torch.zeros(1)
    state["trunk.1.num_batches_tracked"] = torch.zeros(())
    safetensors_torch.save_file(state, tmp_path / "x.safetensors")
    pattern = (
        r"the files lack 1: 'trunk.0.bias'; the module has no place for 1: 'more'; shapes differ for 1: "
        r"'trunk.2.weight' \(\(8, 6\) in the file, \(6, 8\) in the module\); values cannot be converted for 1: "
        r"'trunk.1.num_batches_tracked' \(torch.float32 in the file, torch.int64 in the module\)"
    )
    expect_load_error(worlds, [tmp_path / "x.safetensors"], pattern, 3)


def test_a_rank_that_does_not_see_the_file_tells_the_others(worlds: WorldPool, tmp_path):
    safetensors_torch.save_model(make(), tmp_path / "model.safetensors")
    expect_load_error(worlds, [tmp_path, tmp_path / "gone"], r"gone: must be a safetensors file, or a directory")


def test_damaged_files_are_refused_before_anything_is_read(worlds: WorldPool, tmp_path):
    whole = tmp_path / "whole.safetensors"
    safetensors_torch.save_model(make(), whole)
    content = whole.read_bytes()
    length = int.from_bytes(content[:8], "little")
    damaged = {
        "empty": b"",
        "short": content[:-1],
        "header": content[: length // 2],
        "text": content[:8] + b"x" * length + content[8 + length :],
        "list": (2).to_bytes(8, "little") + b"[]",
        "dtype": content[:8] + content[8 : 8 + length].replace(b'"F32"', b'"F99"') + content[8 + length :],
    }
    for name, text in damaged.items():
        (tmp_path / name).write_bytes(text)
        expect_load_error(worlds, [tmp_path / name], f"{name}: must be a whole safetensors file")
    for name, index in {"a": "[]", "b": "{", "c": "{}"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors.index.json").write_text(index)
        expect_load_error(worlds, [tmp_path / name], "must be JSON with a weight_map")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    expect_load_error(worlds, [tmp_path / "d"], "FileNotFoundError")
    for name in ("one", "two"):
        safetensors_torch.save_file({"a": torch.zeros(1), name: torch.zeros(1)}, tmp_path / "d" / f"{name}.safetensors")
    index = {"weight_map": {"one": "one.safetensors", "two": "two.safetensors"}}
    (tmp_path / "d" / "model.safetensors.index.json").write_text(json.dumps(index))
    pattern = "but 'a' is in one.safetensors and in two.safetensors, and the index names none. The files are of several"
    expect_load_error(worlds, [tmp_path / "d"], pattern)


def test_files_whose_values_start_anywhere_are_read(worlds: WorldPool, tmp_path):
    cases = [TensorCase((5, 3), torch.float64, dim, 2, seed=4) for dim in (0, 1)]
    tensors = dict(Bag(cases).state_dict())
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    odd = (length + 3).to_bytes(8, "little") + content[8 : 8 + length] + b"   " + content[8 + length :]
    (tmp_path / "model.safetensors").write_bytes(odd)
    worlds.run(2, load_bag, cases, str(tmp_path), True)


def save_sizes(folder: str, sizes: list[int]) -> None:
    model = shard_parts(make())
    for size in sizes:
        dshard.save_safetensors(model, folder, max_shard_bytes=size)


def test_a_save_leaves_no_files_of_an_older_one_that_readers_would_take(worlds: WorldPool, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for sizes, num_files in (([300, 10**9], 1), ([10**9, 300], 3), ([100, 300], 3)):
        worlds.run(2, save_sizes, str(tmp_path), sizes)
        files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
        assert len(files) == num_files
        index = tmp_path / "model.safetensors.index.json"
        assert index.exists() == (num_files > 1)
        if num_files > 1:
            assert sorted(set(json.loads(index.read_text())["weight_map"].values())) == files
    assert (tmp_path / "config.json").exists()


# ----------------------------------------------------------------------------------------------------------- iter_full


def walk() -> None:
    model, plain = shard_parts(make()), make()
    runtime = model._context()
    expected = plain.state_dict()
    model(torch.arange(4)).sum().backward()
    expected = {n: b for n, b in model.state_dict().items() if "running" in n or "tracked" in n} | {
        n: p for n, p in plain.state_dict().items() if "running" not in n and "tracked" not in n
    }
    gathered = runtime.gathered_bytes
    with dshard.CommTrace() as trace:
        names = []
        for name, value in dshard.iter_full(model):
            assert type(value) is Tensor
            assert not value.requires_grad
            assert torch.equal(value, expected[name]), name
            value.zero_()
            names.append(name)
    assert names == list(plain.state_dict())
    assert runtime.gathered_bytes == gathered
    assert trace.calls("all_gather") == (8 if dist.get_world_size() > 1 else 0)  # the tied one for both of its names
    for name, value in dshard.iter_full(model, dtype=torch.float64, device="cpu"):
        is_float = expected[name].is_floating_point()
        assert torch.equal(value, expected[name].double() if is_float else expected[name]), name
    with dshard.gathered(model), dshard.CommTrace() as trace:
        assert len(list(dshard.iter_full(model))) == len(names)
    assert trace.calls() == 0
    for (name, value), (other, want) in zip(dshard.iter_full(make()), plain.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(value, want)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_iter_full_gives_the_state_dict_in_plain_tensors_of_the_callers_own(worlds: WorldPool, num_ranks):
    worlds.run(num_ranks, walk)


def walk_while_writing() -> None:
    model = dshard.fully_shard(nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)]))
    with torch.no_grad():
        for i, (_, value) in enumerate(dshard.iter_full(model)):
            assert i == 0 or (value == i).all()
            for layer in model:
                layer.weight.fill_(i + 1)


def test_iter_full_reads_each_value_when_its_turn_comes(worlds: WorldPool):
    worlds.run(2, walk_while_writing)


def walk_apart() -> None:
    model = shard_parts(make())
    values = dshard.iter_full(model)
    if dist.get_rank() == 0:
        next(values)
        model.trunk(torch.ones(2, 6))
    else:
        list(values)


def test_ranks_that_walk_apart_raise_and_name_both(worlds: WorldPool):
    for kind, text in expect_error(worlds.get_world(2), walk_apart):
        assert kind == "DivergenceError"
        assert "trunk" in text


def walk_on_meta() -> None:
    model = dshard.fully_shard(nn.Linear(2, 2, device="meta"))
    for use in (dshard.iter_full, lambda m: dshard.save_safetensors(m, "/nowhere/x.safetensors")):
        with pytest.raises(dshard.StateError, match="weight and 1 more are on the meta device"):
            use(model)


def test_a_model_without_values_is_refused(worlds: WorldPool):
    worlds.run(2, walk_on_meta)


def hold(num_layers: int) -> int:
    model = dshard.fully_shard(
        nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(num_layers)]), sync=None
    )
    for _ in dshard.iter_full(model):
        pass
    before = peak_bytes(reset=True)
    for _ in dshard.iter_full(model):
        pass
    return peak_bytes() - before


def test_iter_full_holds_the_value_that_you_hold_and_the_one_it_makes(worlds: WorldPool):
    for grown in worlds.run(2, hold, 8):  # 32 MB
        assert grown <= 2 * (1 << 22) + (1 << 20)


# -------------------------------------------------------------------------------------------------------- Hugging Face


def llama(tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))


def save_llama(folder: str, tied: bool, max_shard_bytes: int) -> None:
    model = dshard.fully_shard(llama(tied))
    dshard.save_safetensors(model, folder, max_shard_bytes=max_shard_bytes)
    if dist.get_rank() == 0:
        model.config.save_pretrained(folder)


def load_llama(folder: str, tied: bool) -> list[Tensor]:
    with torch.device("meta"):
        model = llama(tied)
    dshard.fully_shard(model)
    dshard.load_safetensors(model, folder)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [4000, 10**9])
def test_from_pretrained_reads_what_is_saved_and_what_save_pretrained_writes_loads(
    worlds: WorldPool, tmp_path, tied, max_shard_bytes
):
    transformers = pytest.importorskip("transformers")
    plain = llama(tied)
    worlds.run(2, save_llama, str(tmp_path / "ours"), tied, max_shard_bytes)
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (name, found), want in zip(loaded.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, want), name
    plain.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_bytes)
    for found in worlds.run(3, load_llama, str(tmp_path / "theirs"), tied):
        assert all(torch.equal(a, b) for a, b in zip(found, plain.parameters(), strict=True))


def save_checkpoint(folder: str, tied: bool) -> None:
    model = dshard.fully_shard(llama(tied))
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(6)[None]).logits.sum().backward()
    optimizer.step()
    dshard.checkpoint.save(folder, model, optimizer, extra={"step": 1})
    dshard.save_safetensors(model, f"{folder}-saved")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [4000, 10**9])
def test_from_pretrained_reads_what_is_merged_from_a_checkpoint(worlds: WorldPool, tmp_path, tied, max_shard_bytes):
    transformers = pytest.importorskip("transformers")
    worlds.run(2, save_checkpoint, str(tmp_path / "step-1"), tied)
    arguments = [str(tmp_path), str(tmp_path / "merged"), "--max-shard-bytes", str(max_shard_bytes)]
    assert main(["merge", *arguments]) == 0
    assert (tmp_path / "merged" / "model.safetensors.index.json").exists() == (max_shard_bytes == 4000)
    llama(tied).config.save_pretrained(tmp_path / "merged")
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = safetensors_torch.load_file(tmp_path / "step-1-saved" / "model.safetensors")
    found = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def save_bags(folder: str, cases: list[TensorCase], cls: type[nn.Module]) -> None:
    bag = sharded_bag(cases)
    bag.register_buffer("rank", torch.tensor([dist.get_rank()]))
    dshard.checkpoint.save(f"{folder}/bag", bag, parity=1)
    dshard.checkpoint.save(f"{folder}/tied", shard_parts(make(cls)))


def test_a_checkpoint_is_merged_without_ranks_also_of_a_lost_file_and_a_damaged_one_leaves_what_was_there(
    worlds: WorldPool, tmp_path
):
    shapes: list[Any] = [((5, 3), 0), ((3, 5), 1), ((2, 3, 4), 1), ((0, 2), 0), ((), None)]
    cases = [TensorCase(s, d, dim, 2, seed=3) for d in (torch.float32, torch.bfloat16, torch.int8) for s, dim in shapes]
    worlds.run(3, save_bags, str(tmp_path), cases, HeadFirst)
    lost = sorted((tmp_path / "bag").glob("shard-*"))[1]
    lost.unlink()
    out = tmp_path / "bag.safetensors"
    dshard.checkpoint.merge(tmp_path / "bag", out)
    found = safetensors_torch.load_file(out)
    assert found.pop("rank").tolist() == [0]
    for i, case in enumerate(cases):
        assert same(found.pop(f"p{i}"), random_bits(case)), case
        found.pop(f"b{i}")
    assert not found
    dshard.checkpoint.merge(tmp_path / "tied", tmp_path / "tied.safetensors")
    plain = make(HeadFirst)
    assert safetensors_torch.load_file(tmp_path / "tied.safetensors").keys() == plain.state_dict().keys() - {
        "embed.weight"
    }
    for row in (tmp_path / "bag").glob("parity-*"):
        row.unlink()
    before = out.read_bytes()
    with pytest.raises(dshard.CheckpointError, match="Parity cannot stand in"):
        dshard.checkpoint.merge(tmp_path / "bag", out)
    assert out.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"bag", "tied", "bag.safetensors", "tied.safetensors"}


def save_as_ever(folder: str, tied: bool) -> str:
    """The error, if there is one: some versions write on rank 0 alone."""
    warnings.simplefilter("ignore")  # transformers asks for a typed storage
    try:
        dshard.fully_shard(llama(tied)).save_pretrained(folder)
    except dshard.DShardError as error:
        return str(error)
    return ""


class Pointing(nn.Module):
    """Its extra state holds a weight of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def get_extra_state(self) -> Any:
        return {"weight": self.child.weight}

    def set_extra_state(self, state: Any) -> None: ...


class Averaging(nn.Linear):
    """Its extra state is a tensor."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.average = torch.full((2,), 5.0)

    def get_extra_state(self) -> Tensor:
        return self.average.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.average = state


def extra_state_loaded(folder: Path, dtype: torch.dtype | None) -> tuple[torch.dtype, list[float]]:
    torch.manual_seed(0)
    model = dshard.fully_shard(nn.Sequential(Averaging()))
    dshard.save_safetensors(model, folder, dtype=dtype)
    model[0].average = torch.zeros(2)
    dshard.load_safetensors(model, folder)
    return model[0].average.dtype, model[0].average.tolist()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_extra_state_that_is_a_tensor_goes_round_in_its_own_dtype(worlds: WorldPool, tmp_path, dtype):
    assert worlds.run(2, extra_state_loaded, tmp_path, dtype) == [(torch.float32, [5.0, 5.0])] * 2


def save_steps(folder: Path) -> None:
    torch.manual_seed(0)
    dshard.checkpoint.save(folder / "pointing", dshard.fully_shard(Pointing()))
    model = dshard.fully_shard(nn.Linear(4, 4))
    for step in (1, 2):
        dshard.checkpoint.save(folder / "steps" / str(step), model, step=step)


def test_a_merge_leaves_no_weight_out_and_says_what_it_passes_over(worlds: WorldPool, tmp_path):
    worlds.run(2, save_steps, tmp_path)
    dshard.checkpoint.merge(tmp_path / "pointing", tmp_path / "out")
    names = {f"{layer}.{name}" for layer in ("child", "other") for name in ("weight", "bias")}
    assert safetensors_torch.load_file(tmp_path / "out" / "model.safetensors").keys() == names
    next((tmp_path / "steps" / "2").glob("shard-00001*")).unlink()
    with pytest.warns(
        UserWarning, match=r"checkpoint.merge: a newer checkpoint was passed over: .*2: files are missing"
    ):
        dshard.checkpoint.merge(tmp_path / "steps", tmp_path / "older")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_save_pretrained_of_a_sharded_model_raises_and_says_what_to_call(worlds: WorldPool, tmp_path, tied):
    pytest.importorskip("transformers")
    first, second = worlds.run(2, save_as_ever, str(tmp_path), tied)
    for text in (first, second or first):
        assert re.match(r"(model\.|lm_head\.).*weight: ", text)
        assert "call dshard.save_safetensors(model, dir) on every rank" in text


# ------------------------------------------------------------------------------------------ what torch asks of storages


def keep_and_copy() -> None:
    model = shard_parts(make())
    weight = model.embed.weight
    with pytest.raises(dshard.StateError, match=r"embed.weight: storage\(\) needs memory .* dshard.save_safetensors"):
        weight.storage()
    assert weight.untyped_storage().nbytes() >= 0  # torch's own code asks for it
    copied = copy.deepcopy(model)
    assert torch.equal(copied.embed.weight.full_tensor(), weight.full_tensor())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded["embed.weight"].full_tensor(), weight.full_tensor())
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again.head.weight.full_tensor(), weight.full_tensor())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.arange(4)), model(torch.arange(4)))


def test_a_typed_storage_is_refused_and_copies_pickles_and_compile_are_as_they_were(worlds: WorldPool):
    worlds.run(2, keep_and_copy)
