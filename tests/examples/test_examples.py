"""Every example runs as its first lines say, and shows what it says it shows."""

import importlib.util
import os
import re
import shutil
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def run(name: str, *args: str, ranks: int = 2) -> str:
    """What an example prints on that many ranks."""
    environ = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    ran = warm.run([ROOT / "examples" / name, *args], ranks=ranks, env=environ, timeout_s=300)
    assert ran.returncode == 0, f"{name}: exit codes {ran.codes}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


def need(*packages: str) -> None:
    """Skip where a package of the extra `interop` is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the extra `interop` is not installed: {', '.join(missing)} missing")


def losses(text: str) -> dict[int, float]:
    """Loss by step."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+):? loss ([\d.]+)", text)}


def test_block_by_block_learns():
    found = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run("block_by_block.py"))]
    assert found[-1] < found[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_gpu_learns_without_one(ranks: int):
    found = losses(run("one_gpu.py", "--steps", "15", ranks=ranks))
    assert found[15] < found[5] - 0.2


def test_muon_learns_and_sends_what_owners_need():
    text = run("muon.py", "--steps", "31", "--width", "64")
    assert losses(text)[30] < losses(text)[10] - 0.3
    num_bytes = 2 * 12 * 64 * 64 * 4  # of the matrices of two blocks; half of each goes two ways, and half comes back
    assert f"{3 * num_bytes // 4:,} bytes sent by rank 0" in text


def test_meta_init_gives_the_eager_initialization():
    assert "bit for bit: True" in run("meta_init.py")


def test_llama_hf_learns_to_count_and_is_read_by_from_pretrained():
    need("transformers")
    text = run("llama_hf.py")
    assert losses(text)[30] < 0.5 * losses(text)[10]
    sharded, plain = re.search(r"^sharded: (.*)$", text, re.M), re.search(r"^from_pretrained: (.*)$", text, re.M)
    assert sharded is not None
    assert plain is not None
    assert sharded[1] == plain[1] == str(list(range(10, 20)))


def test_lora_sends_adapters_alone_and_merges_them():
    need("transformers", "peft")
    text = run("lora.py")
    assert losses(text)[20] < losses(text)[10]
    # Two layers, two adapted projections, rank 8, width 64, in and out, fp32; half of it goes to the other rank.
    assert f"{2 * 2 * 8 * (64 + 64) * 4 // 2:,} bytes of gradients sent" in text
    assert "as loaded give the same logits: True" in text
    assert "merged into the sharded model: True" in text


def test_resume_elastic_goes_on_with_another_number_of_ranks_as_without_a_break(tmp_path: Path):
    whole = losses(run("resume_elastic.py", "--folder", str(tmp_path / "whole"), "--steps", "8"))
    assert whole[7] < whole[0]
    run("resume_elastic.py", "--folder", str(tmp_path / "first"), "--steps", "4")
    for ranks in (3, 1):
        shutil.copytree(tmp_path / "first", tmp_path / f"on_{ranks}")
        text = run("resume_elastic.py", "--folder", str(tmp_path / f"on_{ranks}"), "--steps", "8", ranks=ranks)
        assert f"resumed at step 4 on {ranks} ranks" in text
        after = losses(text)
        assert list(after) == [4, 5, 6, 7]
        assert all(abs(after[step] - whole[step]) <= 2e-6 for step in after)


def test_the_tutorials_program_resumes_with_fewer_ranks_as_without_a_break(tmp_path: Path):
    def evaluated(text: str) -> list[tuple[str, ...]]:
        return re.findall(r"step (\d+) loss ([\d.]+), evaluated ([\d.]+)", text)

    whole = evaluated(run("tutorial.py", "--folder", str(tmp_path / "whole"), "--steps", "20"))
    first = evaluated(run("tutorial.py", "--folder", str(tmp_path / "run"), "--steps", "10"))
    text = run("tutorial.py", "--folder", str(tmp_path / "run"), "--steps", "20", ranks=1)
    assert "goes on at step 10 on 1 ranks" in text
    assert [step for step, *_ in whole] == ["10", "20"]
    assert first == whole[:1]
    losses_of = {
        each: [float(loss) for loss in row[1:]] for each, row in (("one", evaluated(text)[0]), ("two", whole[1]))
    }
    assert losses_of["one"] == pytest.approx(losses_of["two"], abs=0.02)  # sums of bf16 products in another order
    assert losses_of["two"][0] < 0.5 * float(whole[0][1])
