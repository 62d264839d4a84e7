"""``dshard train`` from the outside, on two ranks."""

import re

import pytest

from tests.cli.launch import TEXT, TINY, own_lines, read_history, start, start_below_torchrun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.py"
    path.write_bytes(TEXT)
    return path


def _numbers(stdout, name):
    """The numbers of a row of a printed table."""
    (line,) = (line for line in stdout.splitlines() if line.startswith(name))
    return [float(number.replace(",", "")) for number in re.findall(r"[\d.,]*\d", line.removeprefix(name))]


@pytest.fixture(scope="module")
def compared(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("compared")
    args = ("--data", text, "--out", out, "--steps", 12, "--eval-every", 6, "--lr", "1e-2", "--compare")
    done = start_below_torchrun(*TINY, *args, "--plot", out / "figures" / "plot.png", ranks=2)
    assert done.returncode == 0, done.stderr
    return done, out


def test_sharded_and_unsharded_losses_agree(compared):
    _, out = compared
    sharded, unsharded = read_history(out / "history.jsonl"), read_history(out / "history-unsharded.jsonl")
    assert [row["step"] for row in sharded] == list(range(13))
    for ours, theirs in zip(sharded, unsharded, strict=True):
        for name, value in ours.items():
            assert value == pytest.approx(theirs[name], rel=1e-5), (ours["step"], name)


def test_validation_loss_falls(compared):
    _, out = compared
    losses = [row["validation_loss"] for row in read_history(out / "history.jsonl") if "validation_loss" in row]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]
    assert losses[2] < 0.8 * losses[0]


def test_compare_prints_both_losses_their_difference_and_memory(compared):
    done, out = compared
    assert re.search(r"^largest difference over all steps: \d", done.stdout, re.MULTILINE)
    last = read_history(out / "history.jsonl")[-1]
    assert f"{last['loss']:.6f}" in done.stdout
    for name in ("parameters", "gradients", "optimizer", "total"):
        sharded, unsharded = _numbers(done.stdout, name)
        assert sharded == pytest.approx(unsharded / 2, abs=0.06), name


def test_the_sample_continues_the_prompt(compared):
    assert "sample:\n\ndef " in compared[0].stdout


def test_the_plot_is_a_png(compared):
    assert (compared[1] / "figures" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_one_checkpoint_remains(compared):
    names = sorted(path.name for path in compared[1].iterdir())
    assert names == ["figures", "history-unsharded.jsonl", "history.jsonl", "latest.json", "step-000012"]


def test_resume_continues_bit_for_bit(text, tmp_path):
    args = (*TINY, "--data", text, "--steps", 8, "--eval-every", 2)
    straight = start(*args, "--out", tmp_path / "straight", ranks=2)
    assert straight.returncode == 0, straight.stderr
    halted = start(*args, "--out", tmp_path / "halted", "--stop-after", 5, ranks=2)
    assert halted.returncode == 0, halted.stderr
    assert len(read_history(tmp_path / "halted" / "history.jsonl")) == 6
    resumed = start(*args, "--out", tmp_path / "halted", "--resume", ranks=2)
    assert resumed.returncode == 0, resumed.stderr
    assert "at step 5" in resumed.stdout
    assert "will not continue" not in resumed.stdout
    one, other = (tmp_path / name / "history.jsonl" for name in ("straight", "halted"))
    assert one.read_text() == other.read_text()


def test_it_runs_alone_and_its_checkpoint_goes_on_with_two_ranks(text, tmp_path):
    args = (*TINY, "--data", text, "--out", tmp_path, "--steps", 4)
    alone = start(*args, "--stop-after", 2)
    assert alone.returncode == 0, alone.stderr
    resumed = start(*args, "--resume", ranks=2)
    assert resumed.returncode == 0, resumed.stderr
    assert "world_size 1 -> 2" in resumed.stdout
    assert len(read_history(tmp_path / "history.jsonl")) == 5


def test_a_checkpoint_of_another_shape_is_refused_on_every_rank(text, tmp_path):
    args = (*TINY, "--data", text, "--out", tmp_path, "--steps", 2)
    assert start(*args).returncode == 0
    refused = start(*args, "--steps", 4, "--width", 64, "--resume", ranks=2)
    (line,) = own_lines(refused.stderr)
    assert "--width is 64" in line
    assert "has 32" in line
    assert refused.codes == [2, 2]
