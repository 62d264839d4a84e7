"""``dshard trace`` as a user calls it."""

import json
import sys

import pytest
import torch
from torch import nn

import dshard
from dshard.cli import main
from dshard.cli.usage import make
from tests.cli.launch import code_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def factory() -> tuple[nn.Module, torch.Tensor]:
    return Net(), torch.ones(2, 8)


def with_step() -> dict[str, object]:
    return {"model": Net(), "sample": sample, "step": step}


def with_shard() -> dict[str, object]:
    return {"model": Net(), "sample": torch.ones(2, 8), "shard": in_one}


def in_one(model: nn.Module, **options: object) -> None:
    dshard.fully_shard(list(model.blocks), **options)
    dshard.fully_shard(model, **options)


def sample(rank: int, number: int) -> torch.Tensor:
    return torch.full((2, 8), rank + 0.5)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).sum().backward()
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("name", "num_gathers"), [("factory", 5), ("with_step", 10), ("with_shard", 2)])
def test_units_bytes_and_gathers_of_a_step_are_printed_and_written(capsys, tmp_path, name, num_gathers):
    out = tmp_path / "step.json"
    assert main(["trace", f"{__name__}:{name}", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "blocks.0" in text
    assert "on this rank now" in text
    assert "waited ms" in text
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    gathers = sum(event.get("cat") == "gather" for event in events if event["pid"] == 0)
    assert gathers == num_gathers


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trace", "nothing"], "must be a module and a name in it"),
        (["trace", f"{__name__}:factory", "--ranks", "0"], "--ranks: must be a whole number of at least 1"),
        (["verify", f"{__name__}:factory", "--ranks", "1,65"], "--ranks: must be from 1 to 64 each, but one is 65"),
        (["trace", f"{__name__}:factory", "--strategy", "most"], "most"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(capsys, words, said):
    assert code_of(*words) == 2
    assert said in capsys.readouterr().err


DRAWS_AT_IMPORT = """\
import torch
from torch import nn

TABLE = torch.randn(8, 8)


def factory():
    layer = nn.Linear(8, 8)
    layer.register_buffer("table", TABLE)
    return layer, torch.ones(2, 8)
"""


def test_a_factory_gives_the_same_weights_each_time_whatever_its_module_draws_when_imported(tmp_path, monkeypatch):
    (tmp_path / "draws_at_import.py").write_text(DRAWS_AT_IMPORT)
    monkeypatch.syspath_prepend(str(tmp_path))
    first, second = (make("MODULE:FACTORY", "draws_at_import:factory")["model"].state_dict() for _ in range(2))
    monkeypatch.delitem(sys.modules, "draws_at_import")  # as on another rank
    torch.manual_seed(1)
    third = make("MODULE:FACTORY", "draws_at_import:factory")["model"].state_dict()
    for name, value in first.items():
        assert torch.equal(second[name], value), name
        assert torch.equal(third[name], value), name
