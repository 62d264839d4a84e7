"""Run a script with another import, and compare what two runs gave."""

import os
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SCRIPTS = Path(__file__).parent / "scripts"
WRITTEN_FOR = re.compile(r"^from (torch\.distributed\.fsdp|torch\.nn\.parallel) import .*$", re.MULTILINE)
OTHER_NAMES = {"DistributedDataParallel": {"dshard": "fully_shard", "tests.programs.alone": "fully_shard"}}
# What one process may differ by in double precision: where a gradient is nothing but rounding (1e-17), as that of the
# bias of keys is, Adam divides it by its eps (1e-8).
EXACT = 1e-9
FSDP2, DDP, DSHARD, ALONE = "torch.distributed.fsdp", "torch.nn.parallel", "dshard", "tests.programs.alone"


def script(name: str, library: str) -> Any:
    """A script as a module, with one line changed: that which imports what distributes the model."""
    known = f"{__package__}.{name} with {library}"
    if known not in sys.modules:
        path = SCRIPTS / f"{name}.py"
        text = path.read_text()
        (line,) = (match.group() for match in WRITTEN_FOR.finditer(text))
        names = line.split(" ", 3)[3]
        for old, by_library in OTHER_NAMES.items():
            names = names.replace(old, by_library.get(library, old))
        loaded = sys.modules[known] = types.ModuleType(known)
        exec(compile(text.replace(line, f"from {library} import {names}"), str(path), "exec"), loaded.__dict__)
    return sys.modules[known]


def run(name: str, library: str, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    """What the script's `main` gives, on a rank of a world as torchrun starts them."""
    alone = library == ALONE
    names = {"RANK": "0" if alone else str(dist.get_rank()), "WORLD_SIZE": "1" if alone else str(dist.get_world_size())}
    before = {key: os.environ.get(key) for key in names}
    torch.set_default_dtype(dtype)
    os.environ.update(names)
    try:
        with warnings.catch_warnings():
            if library == FSDP2:  # what torch says to its own users
                warnings.simplefilter("ignore")
            return script(name, library).main(**options)
    finally:
        torch.set_default_dtype(torch.float32)
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """The tensors, numbers and words of nested dicts and lists, by their paths."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: leaf for key, each in items for path, leaf in flat(each, f"{prefix}.{key}").items()}
    return {prefix: value}


def differing(found: Any, expected: Any) -> list[str]:
    """Paths of what is not the same, bit for bit."""
    one, other = flat(found), flat(expected)
    assert one.keys() == other.keys()
    assert one
    return [path for path in one if not _equal(one[path], other[path])]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def apart(found: Any, expected: Any) -> tuple[float, str]:
    """The largest difference between numbers, relative to the largest magnitude of each tensor or list, and where."""
    one, other = flat(_as_tensors(found)), flat(_as_tensors(expected))
    assert one.keys() == other.keys()
    worst = 0.0, ""
    for path, value in one.items():
        if isinstance(value, Tensor):
            a, b = value.double(), other[path].double()
            assert a.isfinite().all(), path
            worst = max(worst, (((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item(), path))
        else:
            assert value == other[path], path
    return worst


def _as_tensors(value: Any) -> Any:
    """With lists of numbers, and of lists of numbers, as tensors."""
    if isinstance(value, dict):
        return {key: _as_tensors(each) for key, each in value.items()}
    if not isinstance(value, list):
        return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value
    rows = [each if isinstance(each, list) else [each] for each in value]
    if rows and all(isinstance(number, float) for row in rows for number in row):
        return torch.tensor(value, dtype=torch.float64)
    return [_as_tensors(each) for each in value]
