"""Whatever is done to the files of a checkpoint: it is told, or it loads what was saved; never half, never another."""

import base64
import copy
import hashlib
import json
import os
import random
import shutil
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import dshard
from dshard.checkpoint import load, save
from dshard.checkpoint.files import BLOCK_BYTES
from dshard.testing import WorldPool
from tests.checkpoint.checkpoints import everything, random_states

HOSTILE = [
    -1, 0, 1, 3, True, None, 1.5, float("nan"), float("inf"), 2**62, 2**63, 2**64, 10**400, "", "x", "../x",
    "/etc/passwd",
    "shard-00000-of-00001.00000000.safetensors", [], {}, [[]], {"$named": "model.0.weight"}, {"$named": "nothing"},
    {"$tensor": {"dtype": "compile", "shape": [1], "bytes": "AA=="}},
    {"$tensor": {"dtype": "float32", "shape": [-1, -1], "bytes": "AAAAAA=="}},
    {"$bytes": "%"}, {"$items": [[[], 1]]}, {"$tuple": 3}, "\ud800", "F32", "U8",
]  # fmt: skip


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first, self.norm, self.calls = nn.Linear(3, width), nn.BatchNorm1d(width), 0
        self.second = nn.Linear(width, 3, dtype=torch.float32)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"] + 0
        assert isinstance(self.calls, int)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(self.norm(self.first(x)))


def trained(seed: int, width: int = 5, kind: Any = torch.optim.AdamW) -> Any:
    torch.manual_seed(seed)
    random.seed(seed)
    model = dshard.fully_shard(Net(width))
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(seed):
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


# --- what is done ----------------------------------------------------------------------------------------------------


def bits(folder: Path, rng: random.Random) -> str:
    path = rng.choice(files(folder))
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 50])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"bits of {path.name}"


def length(folder: Path, rng: random.Random) -> str:
    path = rng.choice(files(folder))
    content = path.read_bytes()
    more = rng.randbytes(rng.choice([1, 8, 4096]))
    path.write_bytes(rng.choice([content[: rng.randrange(len(content))], content + more, content[1:], b""]))
    return f"length of {path.name}"


def block(folder: Path, rng: random.Random) -> str:
    path = rng.choice(files(folder))
    content = bytearray(path.read_bytes())
    start, size = rng.randrange(len(content)), rng.choice([1, 16, 4096])
    content[start : start + size] = rng.choice([bytes(size), rng.randbytes(size)])[: len(content) - start]
    path.write_bytes(content)
    return f"a block of {path.name}"


def kind_of_file(folder: Path, rng: random.Random) -> str:
    path = rng.choice(files(folder))
    what = rng.choice(["gone", "folder", "pipe", "link", "dangling", "unreadable"])
    kept = path.with_name("kept")
    path.rename(kept)
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to(kept)
    elif what == "dangling":
        path.symlink_to("nowhere")
    elif what == "unreadable":
        path.write_bytes(kept.read_bytes()[:1000] + b"\0")
    return f"{path.name} is {what}"


def swapped(folder: Path, rng: random.Random) -> str:
    """Files of another step, and of another rank where there are several."""
    other = folder.parent / rng.choice(["other", "foreign"])
    theirs, ours = files(other), files(folder)
    if rng.random() < 0.5 and len(ours) > 2:
        a, b = rng.sample(ours, 2)
        content = a.read_bytes()
        a.write_bytes(b.read_bytes()), b.write_bytes(content)
        return f"{a.name} and {b.name} swapped"
    path = rng.choice(ours)
    source = rng.choice([each for each in theirs if each.suffix == path.suffix])
    path.write_bytes(source.read_bytes())
    return f"{path.name} of {other.name}"


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in children for found in nodes(item, (*path, key)))]


def put(root: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        root = root[key]
    root[path[-1]] = value


def got(root: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        root = root[key]
    return root


def structure(folder: Path, rng: random.Random) -> str:
    """Change what the manifest says, or what is JSON in a file, with the sums of it put right."""
    name = rng.choice(["", "", "facts", "random", "extra"])
    body = json_in(folder, name) if name else json.loads((folder / "dshard.json").read_bytes())
    places = [each for each in nodes(body) if each and each[0] not in ("sha256", "created", "versions", "run")]
    told = [name]
    for _ in range(rng.choice([1, 1, 1, 2])):
        where = rng.choice(places)
        try:
            old = got(body, where)
            parent = got(body, where[:-1])
            what = rng.choice(["hostile", "gone", "twice", "other", "near", "renamed"])
            if what == "hostile":
                put(body, where, copy.deepcopy(rng.choice(HOSTILE)))
            elif what == "gone":
                del parent[where[-1]]
            elif what == "twice" and isinstance(parent, list):
                parent.insert(where[-1], copy.deepcopy(old))
            elif what == "other":
                put(body, where, copy.deepcopy(got(body, rng.choice(places))))
            elif what == "near" and type(old) in (int, float):
                put(body, where, old + rng.choice([-1, 1, -4, 4, 0.5]))
            elif isinstance(parent, dict):
                parent[rng.choice(["model.x", "../x", "rank-0/x", "", *parent])] = parent.pop(where[-1])
            told.append(f"{what} {where}")
        except (KeyError, IndexError, TypeError):
            continue
    if name:
        write_json(folder, name, body)
    else:
        write_manifest(folder / "dshard.json", body)
    return f"structure {told}"


def stored(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The manifest, what it says of the file that has a tensor (of rank 0), and the tensor's name there."""
    body = json.loads((folder / "dshard.json").read_bytes())
    found = ((file, key) for key in (name, f"rank-0/{name}") for file in body["files"] if key in file["tensors"])
    return body, *next(found)


def json_in(folder: Path, name: str) -> Any:
    _, file, key = stored(folder, name)
    return json.loads(load_file(folder / file["name"])[key].numpy().tobytes())


def write_json(folder: Path, name: str, value: Any) -> None:
    """Put another value in the place of one that is JSON in a file, with all sums put right."""
    body, file, key = stored(folder, name)
    path = folder / file["name"]
    tensors = {each: tensor.clone() for each, tensor in load_file(path).items()}
    text = json.dumps(value).encode()
    tensors[key] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    save_file(tensors, path, {"dshard": "a shard of a checkpoint"})
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    file |= {"header_bytes": size, "header_crc32": f"{zlib.crc32(content[:size]):08x}"}
    sums = [f"{zlib.crc32(text[at : at + BLOCK_BYTES]):08x}" for at in range(0, len(text), BLOCK_BYTES)]
    file["tensors"][key] |= {"shape": [len(text)], "full_shape": [len(text)], "crc32": "".join(sums)}
    write_manifest(folder / "dshard.json", body)


def write_manifest(path: Path, body: dict[str, Any]) -> None:
    body.pop("sha256", None)
    text = json.dumps(body, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    path.write_text(json.dumps({**body, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


def raw_text(folder: Path, rng: random.Random) -> str:
    path = folder / "dshard.json"
    text = path.read_text()
    what = rng.choice(["deep", "digits", "twice", "nul", "pickle", "list", "utf"])
    if what == "deep":
        text = "[" * 100_000
    elif what == "digits":
        text = text.replace('"step": 1', '"step": ' + "9" * 10_000)
    elif what == "twice":
        text = text.replace('"step": 1', '"step": 7, "step": 1')
    elif what == "nul":
        text = text[: len(text) // 2] + "\0" + text[len(text) // 2 :]
    elif what == "list":
        text = f"[{text}]"
    path.write_bytes(text.encode() if what not in ("utf", "pickle") else b"\x80\x04cos\nsystem\n(S'false'\ntR.")
    return f"text {what}"


def options(folder: Path, rng: random.Random) -> str:
    facts = json_in(folder, "facts")
    found = facts["optimizers"][0]["groups"][0]
    key = rng.choice([key for key in found if key != "params"])
    what = rng.choice(["gone", "text", "nan", "none", "tensor"])
    new = {"text": "0.1", "nan": float("nan"), "none": None}.get(what)
    raw = base64.b64encode(bytes(8)).decode()
    found[key] = {"$tensor": {"dtype": "float32", "shape": [2], "bytes": raw}} if what == "tensor" else new
    if what == "gone":
        del found[key]
    write_json(folder, "facts", facts)
    return f"option {key} {what}"


DAMAGES = [bits, bits, length, block, kind_of_file, swapped, *[structure] * 6, raw_text, options]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


# --- what comes of it ------------------------------------------------------------------------------------------------


class Watch:
    """What happens while a checkpoint is loaded, by Python's audit hooks, which cannot be removed: one per process."""

    def __init__(self) -> None:
        self.is_on, self.folder, self.found = False, "", []
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event in ("pickle.find_class", "exec", "compile", "import", "os.system", "subprocess.Popen"):
            self.found.append((event, str(args)[:200]))
        elif event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
            is_writing = (isinstance(args[1], str) and set(args[1]) & set("wax+")) or args[2] & (
                os.O_WRONLY | os.O_RDWR
            )
            if is_writing or not os.fspath(args[0]).startswith(self.folder):
                self.found.append((event, str(args)[:200]))


def changed_options(state: dict[str, Any]) -> dict[str, Any]:
    """All but what changed JSON may say without contradicting itself: options, and numbers of states."""
    return {
        key: value for key, value in state.items() if not key.startswith(("group ", "state ")) and "extra" not in key
    }


def fuzz(root: Path, seed: int, count: int, chosen: str = "") -> tuple[dict[str, int], list[str]]:
    """Damage a checkpoint again and again."""
    watch = vars(sys).setdefault("_dshard_watch", None) or Watch()
    vars(sys)["_dshard_watch"] = watch
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    victim, other = trained(1), trained(2)
    save(root / "saved", *victim, step=1, extra=[1, {"a": (2, None)}])
    save(root / "other", *other, step=2)
    save(root / "foreign", *trained(1, 7), step=1)
    truth = everything(*victim)
    twin = trained(2)
    load(root / "saved", *trained(0))  # imports what is imported late
    tally: dict[str, int] = {"told": 0, "equal": 0, "another option": 0}
    wrong: list[str] = []
    folder = root / "now"
    for i in range(count):
        rng = random.Random(seed * 1_000_003 + i)
        what = [""]
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(root / "saved", folder)
            damage = rng.choice([d for d in DAMAGES if not chosen or d.__name__ == chosen])
            what[0] = damage(folder, rng)
        if num_ranks > 1:
            dist.broadcast_object_list(what)
        before, rng_before = everything(*twin), random_states()
        versions = [p._version for p in twin[0].parameters()]
        watch.found, watch.folder, watch.is_on = [], str(root), True
        started = time.monotonic()
        try:
            load(folder, *twin)
            error = None
        except dshard.DShardError as raised:
            error = raised
        except Exception as raised:
            error = raised
            wrong.append(f"{i} {what[0]}: {type(raised).__name__}: {raised}")
        watch.is_on = False
        after = everything(*twin)
        if error is not None:
            tally["told"] += 1
            if (
                after != before
                or random_states() != rng_before
                or versions != [p._version for p in twin[0].parameters()]
            ):
                wrong.append(f"{i} {what[0]}: half after {error}")
            if str(folder) not in str(error) and "set_extra_state" not in str(error):
                wrong.append(f"{i} {what[0]}: does not name the folder: {error}")
        elif after == truth:
            tally["equal"] += 1
        elif changed_options(after) == changed_options(truth) and what[0].startswith(("structure", "option")):
            tally["another option"] += 1
        else:
            wrong.append(f"{i} {what[0]}: loaded something else")
        if error is None:
            load(root / "other", *twin)
        if watch.found:
            wrong.append(f"{i} {what[0]}: {watch.found[:3]}")
        if time.monotonic() - started > 10:
            wrong.append(f"{i} {what[0]}: slow")
    return tally, wrong


def report(results: list[tuple[dict[str, int], list[str]]]) -> None:
    (tally, _), *_ = results
    wrong = [line for _, lines in results for line in lines]
    num_half = sum("half" in line for line in wrong)
    print(f"\n{sum(tally.values())} corruptions, {len(wrong) - num_half} wrong, {num_half} half: {tally}")
    assert not wrong, "\n".join(wrong[:20])
    assert all(each == tally for each, _ in results)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_damaged_checkpoint_is_told_or_loads_what_was_saved(worlds: WorldPool, tmp_path, num_ranks):
    report(worlds.run(num_ranks, fuzz, tmp_path, 1, 250 if num_ranks == 1 else 50, timeout_s=120))


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "count"), [(1, 500), (2, 80)])
def test_a_damaged_checkpoint_is_told_or_loads_what_was_saved_very_many_times(
    worlds: WorldPool, tmp_path, num_ranks, count
):
    report(worlds.run(num_ranks, fuzz, tmp_path, 2, count, timeout_s=900))
