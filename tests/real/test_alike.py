"""Arguments that differ between ranks, of every public call that must be alike: told ahead of any change."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dshard
from dshard.testing import WorldPool


def trained() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = dshard.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def enter(scope: Any) -> None:
    with scope:
        pass


def call(name: str, folder: Path) -> tuple[str, bool]:
    """What a call raised whose arguments differ; and whether the model is as it was, and trains on."""
    rank = dist.get_rank()
    is_first = rank == 0
    model, optimizer = trained()
    dshard.checkpoint.save(folder / "checkpoint", model, optimizer)
    dshard.save_safetensors(model, folder / "model.safetensors")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    calls = {
        "load, optimizer": lambda: dshard.checkpoint.load(
            folder / "checkpoint", model, optimizer if is_first else None
        ),
        "load, class": lambda: dshard.checkpoint.load(
            folder / "checkpoint", model, optimizer if is_first else torch.optim.SGD(model.parameters(), 0.1)
        ),
        "save, optimizer": lambda: dshard.checkpoint.save(folder / "other", model, optimizer if is_first else None),
        "rename": lambda: dshard.load_safetensors(
            model, folder / "model.safetensors", strict=False, rename=None if is_first else lambda name: None
        ),
        "strict": lambda: dshard.load_safetensors(model, folder / "model.safetensors", strict=is_first),
        "save_safetensors": lambda: dshard.save_safetensors(
            model, folder / "more", dtype=torch.bfloat16 if is_first else None
        ),
        "writeback": lambda: enter(dshard.gathered(model, writeback=is_first)),
        "rank0_only": lambda: enter(dshard.gathered(model, rank0_only=is_first)),
        "target": lambda: enter(dshard.gathered(model if is_first else model[0], writeback=True)),
        "set_strategy": lambda: dshard.set_strategy(model, "zero2", optimizer=optimizer if is_first else None),
        "to_plain": lambda: dshard.to_plain(model, rank=0 if is_first else None),
    }
    try:
        calls[name]()
        text = ""
    except dshard.DivergenceError as error:
        text = str(error)
    is_same = all(not param.full_tensor().any() for param in model.parameters())
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return text, is_same


ARGUMENTS = {
    "load, optimizer": "optimizer",
    "load, class": "optimizer",
    "save, optimizer": "optimizer",
    "rename": "rename",
    "strict": "strict",
    "save_safetensors": "dtype",
    "writeback": "writeback",
    "rank0_only": "rank0_only",
    "target": "target",
    "set_strategy": "optimizer",
    "to_plain": "rank",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_argument_is_named_and_nothing_has_changed(worlds: WorldPool, name, tmp_path):
    for text, is_same in worlds.run(2, call, name, tmp_path):
        assert f"all ranks must pass the same {ARGUMENTS[name]}" in text
        assert is_same
