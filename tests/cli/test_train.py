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


def everything(folder):
    """All files below a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_checkpoints_of_an_earlier_run_are_kept_unless_one_says_otherwise(text, tmp_path, ranks):
    args = (*TINY, "--data", text, "--out", tmp_path, "--steps", 2)
    first = start(*args, ranks=ranks)
    assert first.returncode == 0, first.stderr
    before = everything(tmp_path)
    again = start(*args, "--width", 64, ranks=ranks)
    (line,) = own_lines(again.stderr)
    assert line == (
        f"dshard train: --out must be a folder without an earlier run, but {tmp_path} holds a checkpoint of step 2 and "
        "history.jsonl. Pass --resume to continue that run, --overwrite to delete it, or another --out."
    )
    assert again.codes == [2] * max(1, ranks)
    assert everything(tmp_path) == before


def test_overwriting_deletes_what_an_earlier_run_wrote_and_nothing_else(text, tmp_path):
    args = (*TINY, "--data", text, "--out", tmp_path, "--steps", 4)
    first = start(*args, "--stop-after", 3)
    assert first.returncode == 0, first.stderr
    (tmp_path / "step-by-step").mkdir()
    (tmp_path / "step-by-step" / "notes.md").write_text("mine")
    (tmp_path / "step-000099").mkdir()  # whoever made it, no checkpoint of a run
    (tmp_path / "step-000099" / "weights.bin").write_bytes(b"mine")
    (tmp_path / "step-notes.txt").write_text("mine")
    again = start(*args, "--save-every", 1, "--overwrite", "--seed", 1, ranks=2)
    assert again.returncode == 0, again.stderr
    assert f"deleted the earlier run in {tmp_path}: a checkpoint of step 3" in again.stdout
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "history.jsonl", "latest.json", "step-000004", "step-000099", "step-by-step", "step-notes.txt",
    ]  # fmt: skip
    assert (tmp_path / "step-000099" / "weights.bin").read_bytes() == b"mine"
    assert (tmp_path / "step-by-step" / "notes.md").read_text() == "mine"
    assert len(read_history(tmp_path / "history.jsonl")) == 5


def test_without_a_folder_each_run_gets_one_and_resume_takes_the_last_that_can_go_on(text, tmp_path):
    args = (*TINY, "--data", text, "--steps", 4)
    done = [start(*args, "--stop-after", stop, ranks=2, cwd=tmp_path) for stop in (4, 2)]
    assert [each.returncode for each in done] == [0, 0], done[1].stderr
    folders = [tmp_path / "runs" / "train" / name for name in ("run-001", "run-002")]
    for folder, each, steps in zip(folders, done, (4, 2), strict=True):
        assert f"losses and checkpoint in {folder.relative_to(tmp_path)}" in each.stdout
        assert len(read_history(folder / "history.jsonl")) == 1 + steps
    (tmp_path / "runs" / "train" / "run-003").mkdir()  # of a run that ended ahead of its first checkpoint
    before = everything(folders[0])
    resumed = start(*args, "--resume", ranks=2, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from runs/train/run-002/step-000002 at step 2" in resumed.stdout
    assert len(read_history(folders[1] / "history.jsonl")) == 5
    assert everything(folders[0]) == before
    fourth = start(*args, "--stop-after", 1, cwd=tmp_path)
    assert fourth.returncode == 0, fourth.stderr
    assert (tmp_path / "runs" / "train" / "run-004" / "latest.json").is_file()


FULL_DISK = """
import os, resource, sys
from dshard.cli import main, saved

save, calls = saved.save, []

def limited(*args, **options):
    calls.append(0)
    if len(calls) > {whole} and os.environ.get("RANK", "0") == "{rank}":
        resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, resource.RLIM_INFINITY))
    try:
        return save(*args, **options)
    finally:  # so that the test can read what is said, which goes to a file here
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

saved.save = limited
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(("rank", "most"), [(0, 0), (1, 0), (1, 5000), (0, 100)])
@pytest.mark.parametrize("whole", [0, 1])
def test_a_disk_that_is_full_while_saving_is_told_in_one_line_and_the_last_checkpoint_goes_on(
    text, tmp_path, rank, most, whole
):
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(FULL_DISK.format(rank=rank, most=most, whole=whole))
    args = (*TINY, "--data", text, "--out", out, "--steps", 6)
    full = start(*args, "--save-every", 2, ranks=2, script=script)
    assert full.codes == [1, 1]
    (line,) = full.stderr.splitlines()
    assert line.startswith("dshard train: --out needs room for a checkpoint of ")
    step = 2 * (whole + 1)
    assert f"but writing {out}/step-00000{step} failed" in line
    assert "File too large" in line or "unexpected pos" in line
    if not whole:
        assert line.endswith("No checkpoint was saved before. Make room, or pass another --out.")
        assert list(out.iterdir()) == []
        return
    assert line.endswith(f"The last good checkpoint is {out}/step-000002. Make room, and continue with --resume.")
    assert {path.name for path in out.iterdir()} == {"history.jsonl", "latest.json", "step-000002"}
    resumed = start(*args, "--resume", ranks=2)
    assert resumed.returncode == 0, resumed.stderr
    assert "at step 2" in resumed.stdout
    straight = start(*args, "--out", tmp_path / "straight", ranks=2)
    assert straight.returncode == 0, straight.stderr
    one, other = (each / "history.jsonl" for each in (out, tmp_path / "straight"))
    assert one.read_text() == other.read_text()


def test_a_disk_that_is_full_at_the_end_is_told_in_one_line(text, tmp_path):
    (tmp_path / "losses.png").symlink_to("/dev/full")
    args = (*TINY, "--data", text, "--out", tmp_path / "out", "--steps", 2)
    done = start(*args, "--plot", tmp_path / "losses.png", ranks=2)
    assert done.codes == [1, 1]
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"dshard train: --plot must be a file that can be written, but writing {tmp_path}/losses.png "
    )
    assert "No space left on device" in line
