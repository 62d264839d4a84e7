"""`assert_sharding_invariants`: correct models pass, wrong ones are named with place and words."""

import subprocess
import sys
import textwrap
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from dshard.cli import main
from dshard.testing import assert_sharding_invariants, verify_sharding
from dshard.testing.training import SETTINGS, Key, Record
from dshard.testing.verifying import first_difference, oracle_of
from tests.meta.source import ROOT
from tests.models import LanguageModel, ResidualMlp, mlp


class ConvNet(nn.Module):
    """A convolution, a batch norm and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().flatten(1))


def layer() -> nn.Module:
    return ResidualMlp(8, 16)


def language_model() -> nn.Module:
    return LanguageModel(layer, 8, tied=True)


class Dropping(nn.Module):
    """A layer and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.up(x))


ROWS = torch.linspace(-1, 1, 24).view(4, 6)
IMAGES = torch.linspace(-1, 1, 288).view(4, 2, 6, 6)
TOKENS = torch.arange(32).view(4, 8) % 21
CORRECT = {
    "mlp": (mlp, ROWS),
    "conv": (ConvNet, IMAGES),
    "tied": (language_model, TOKENS),
    "dropout": (Dropping, ROWS),
}


@pytest.mark.parametrize("name", CORRECT)
def test_correct_models_are_found_correct_under_every_setting(worlds, name):
    factory, sample = CORRECT[name]
    settings = [each for each in SETTINGS if each != "bf16"]
    ranks = (1, 2) if name == "dropout" else (2,)
    report = assert_sharding_invariants(factory, sample, worlds=ranks, settings=settings, pool=worlds)
    assert [(row.setting, row.num_ranks) for row in report.rows] == [(s, n) for n in ranks for s in settings]
    left_out = {row.setting for row in report.rows if row.skipped}
    assert left_out == (set() if name == "tied" else {"checkpointing"})
    assert all(row.num_compared > 30 for row in report.rows if not row.skipped)


def test_low_precision_is_compared_by_what_its_roundings_change(worlds):
    assert_sharding_invariants(mlp, ROWS, worlds=(2,), settings=["bf16"], pool=worlds)


class Kept(nn.Module):
    """A layer that computes with the memory that its weight had at first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.kept = [self.weight.data]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kept[0] + 0 * (x @ self.weight)


class Keeping(nn.Module):
    """Two layers around one that keeps what it should not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kept, self.last = nn.Linear(6, 6), Kept(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.kept(self.first(x)))


def test_the_first_module_that_differs_is_named_with_file_and_line(worlds):
    with pytest.raises(AssertionError) as caught:
        assert_sharding_invariants(Keeping, ROWS, worlds=(2,), settings=["full"], optimizer=sgd, pool=worlds)
    text = str(caught.value)
    line = Kept.forward.__code__.co_firstlineno
    assert f"of kept (Kept, tests/testing/test_invariants.py:{line}) differs" in text
    assert text.startswith("full on 2 ranks")
    assert "found    [" in text
    assert "expected [" in text


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)


def double_loss(output: Tensor) -> Tensor:
    return output.sum() * torch.distributed.get_world_size()


def test_a_loss_that_depends_on_the_number_of_ranks_is_named(worlds):
    (row,) = verify_sharding(mlp, ROWS, worlds=(2,), settings=["full"], loss=double_loss, pool=worlds).rows
    assert row.difference is not None
    assert row.difference.quantity == "loss in step 0"


def test_a_sample_function_that_gives_all_ranks_the_same_is_found(worlds):
    (row,) = verify_sharding(mlp, same_rows, worlds=(2,), settings=["full"], pool=worlds).rows
    assert "ranks 0, 1: they train on the same data" in str(row.difference)


def same_rows(rank: int, step: int) -> Tensor:
    return ROWS + step


FACTORY = """
    import torch
    from torch import nn

    def good():
        return nn.Linear(4, 4), torch.ones(2, 4)

    class Wrong(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.distributed.get_rank()

    def wrong():
        return Wrong(4, 4), torch.ones(2, 4)

    def neither():
        return 1

    def more():
        return {"model": torch.nn.Linear(4, 4), "sample": torch.ones(2, 4), "evaluate": print}
"""


@pytest.fixture
def module(tmp_path):
    (tmp_path / "factories.py").write_text(textwrap.dedent(FACTORY))
    return tmp_path


@pytest.mark.parametrize(("factory", "code", "words"), [("good", 0, "ok ("), ("wrong", 1, "factories.py:9")])
def test_the_command_prints_a_table_and_what_differs(module, factory, code, words):
    command = [sys.executable, "-m", "dshard", "verify", f"factories:{factory}", "--ranks", "2"]
    command += ["--strategies", "full,clipping", "--steps", "2"]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"}
    ran = subprocess.run(command, cwd=module, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == code, ran.stderr
    assert words in ran.stdout
    assert ("It is right on rank 0" in ran.stdout) == (code == 1)


@pytest.mark.parametrize("name", ["nobody", "missing:factory", "factories:neither", "factories:gone", "factories:more"])
def test_a_factory_that_is_none_is_refused(module, monkeypatch, capsys, name):
    monkeypatch.syspath_prepend(str(module))
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    assert main(["verify", name]) == 2
    assert "MODULE:FACTORY" in capsys.readouterr().err


class Scaled(nn.Linear):
    """A layer that is off by a factor on one rank."""

    def __init__(self, factor: float) -> None:
        super().__init__(6, 6)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.factor if torch.distributed.get_rank() == 1 else 1.0)


@pytest.mark.parametrize(("factor", "is_found"), [(1 + 2e-5, True), (1 + 2**-23, False)])
def test_an_error_of_some_roundings_is_found_and_one_rounding_is_not(worlds, factor, is_found):
    report = verify_sharding(partial(Scaled, factor), ROWS, worlds=(2,), settings=["full"], pool=worlds)
    assert bool(report.differences) == is_found


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("expected", "found", "is_right"),
    [
        ([-INF, 1.0, NAN], [-INF, 1.0, NAN], True),  # masked logits
        ([-INF, 1.0], [-INF, 1.0], True),
        ([-INF, 1.0], [-INF, 1.1], False),
        ([-INF, 1.0], [INF, 1.0], False),
        ([-INF, 1.0], [0.0, 1.0], False),
        ([0.0, 1.0], [NAN, 1.0], False),
        ([NAN, 1.0], [0.0, 1.0], False),
        ([1.0 + 2.0j], [1.0 + 2.0j], True),
        ([1.0 + 2.0j], [1.0 + 2.1j], False),
        ([], [], True),
    ],
)
def test_infinities_nan_and_complex_numbers_are_compared_too(expected, found, is_right):
    key = Key("output", 0, "", 0, 0)
    right, run = Record({key: torch.tensor(expected)}), Record({key: torch.tensor(found)})
    difference = first_difference("full", [run], oracle_of(right, [right], None))
    assert (difference is None) == is_right
