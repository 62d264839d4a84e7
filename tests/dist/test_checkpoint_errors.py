"""A checkpoint that is damaged, or cannot be made, is an ordinary error that says what is wrong, on every rank."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dshard
from dshard.testing import WorldPool


def damaged(path: Path, what: str) -> tuple[str, str]:
    torch.manual_seed(0)
    model = dshard.fully_shard(nn.Linear(8, 8))
    dshard.checkpoint.save(path, model)
    if dist.get_rank() == 0:
        part = path / "__1_0.distcp"
        if what == "a missing part":
            part.unlink()
        elif what == "a part cut short":
            part.write_bytes(part.read_bytes()[:100])
        elif what == "an empty part":
            part.write_bytes(b"")
        elif what == "facts of nothing":
            (path / "dshard.json").write_text('{"format": 1}')
        elif what == "facts of another kind":
            (path / "dshard.json").write_text("[]")
        elif what == "a folder in the place of a part":
            part.unlink()
            part.mkdir()
        elif what == "nothing":
            shutil.rmtree(path)
    dist.barrier()
    try:
        dshard.checkpoint.load(path, model)
    except Exception as error:  # what `except Exception` catches
        return type(error).__name__, str(error)
    return "nothing", ""


WHAT = [
    "a missing part",
    "a part cut short",
    "an empty part",
    "a folder in the place of a part",
    "facts of nothing",
    "facts of another kind",
    "nothing",
]


@pytest.mark.parametrize("what", WHAT)
def test_a_damaged_checkpoint_is_a_checkpoint_error_on_every_rank(worlds: WorldPool, tmp_path, what):
    for kind, text in worlds.run(2, damaged, tmp_path / "saved", what):
        assert kind == "CheckpointError", text
        assert str(tmp_path / "saved") in text


def saved_on_meta(path: Path) -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    dshard.fully_shard(model)
    with pytest.raises(dshard.DShardError) as caught:
        dshard.checkpoint.save(path, model)
    return str(caught.value)


def test_a_model_on_meta_is_not_saved_and_the_error_names_a_parameter(worlds: WorldPool, tmp_path):
    for text in worlds.run(2, saved_on_meta, tmp_path / "saved"):
        assert text.startswith("checkpoint.save: needs values, but model.0.weight and 3 more are on the meta device.")
    assert not (tmp_path / "saved").exists()
