"""Each benchmark runs at a tiny size and writes what it says."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import host_parts
from benchmarks import output as output_module
from benchmarks.__main__ import main
from benchmarks.host import fit
from benchmarks.models import FAMILY, STEPS, Llama, LlamaConfig, Size
from benchmarks.output import Bars, draw
from dshard.runtime import module_hooks
from dshard.testing import WorldPool

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"unsharded", "DDP", "FSDP2", "dshard", "FSDP2, no reshard", "dshard, no reshard"}
ROOT_ALONE = "dshard, root alone"
MESSAGES = {"dshard, by messages", "dshard, no reshard, by messages"}
TIMES = {"median_ms", "q1_ms", "q3_ms", "rounds"}
TINY = ("--layers", "1", "--width", "32")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No rank variables, a working folder of our own, and no thread count that a benchmark leaves behind."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs a benchmark in this process and returns what it wrote; the folder is made."""

    def run(name, *args, file):
        out = tmp_path / "some" / "results"
        main([name, *map(str, args), "--out", str(out)])
        assert not dist.is_initialized()
        printed = capsys.readouterr().out
        assert f"wrote {out / file}.json" in printed
        assert {path.name for path in out.iterdir()} >= {f"{file}.json", f"{file}.png"}
        result = json.loads((out / f"{file}.json").read_text())
        assert result["header"]["command"].startswith(f"python -m benchmarks {name} ")
        assert result["header"]["torch"] == torch.__version__
        assert result["header"]["revision"] is None  # the working folder is in no repository
        return result, printed

    return run


def values_after_steps(name: str) -> list[list[torch.Tensor]]:
    """Parameters at first, and after three steps on equal batches: as it is, by FSDP2 and by dshard."""
    work, size = (STEPS | FAMILY)[name], Size(layers=1, width=32)
    torch.manual_seed(0)
    found = [[param.detach().clone() for param in work.build(size).parameters()]]
    for kind in ("unsharded", "FSDP2", "dshard", "FSDP2, no reshard", "dshard, no reshard"):
        models: list[Any] = []

        def made(size: Size, models: list[Any] = models) -> Any:
            models.append(work.build(size))
            return models[-1]

        step = replace(work, build=made).step_of(kind, size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP2 warns of results that are views
            for _ in range(3):
                step()
        fulls = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in models[0].parameters()]
        found.append([full.detach().float() for full in fulls])
    return found


@pytest.mark.parametrize("name", [*STEPS, *FAMILY])
def test_a_row_is_the_same_work_in_each_library(worlds: WorldPool, name):
    for start, unsharded, *others in worlds.run(2, values_after_steps, name):
        assert any(not torch.equal(a, b) for a, b in zip(start, unsharded, strict=True)) == (name != "decoding")
        for values in others:
            for found, expected in zip(values, others[0] if "bf16" in name else unsharded, strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)  # of changes by 3e-4


def test_step_writes_every_kind_and_its_exposed_time(bench):
    result, printed = bench("step", *TINY, "--rounds", 2, file="step_gloo_2")
    assert set(result["rows"]) == set(STEPS)
    for name, rows in result["rows"].items():
        assert set(rows) == {*KINDS, ROOT_ALONE, *MESSAGES} - ({"DDP"} if "bf16" in name else set())
        assert all(set(row) >= TIMES and row["rounds"] == 2 for row in rows.values())
        assert {kind for kind, row in rows.items() if row.get("exposed_ms", 0) > 0} == {*rows} - {"unsharded"}
    for way in ("", ", no reshard", ", by messages", ", no reshard, by messages"):
        assert f"overhead over unsharded{way}: " in printed
    assert result["header"]["num_ranks"] == 2


@pytest.mark.slow
def test_the_family_of_step_writes_every_kind_of_work(bench):
    result, _ = bench("step", "--family", *TINY, "--rounds", 2, "--ranks", 1, file="step_family_gloo_1")
    assert set(result["rows"]) == set(FAMILY)
    assert all(set(rows) == KINDS for rows in result["rows"].values())


@pytest.mark.slow
def test_compile_writes_both_ways_of_each_library_in_both_precisions(bench):
    result, _ = bench("compile", *TINY, "--rounds", 2, "--ranks", 1, file="compile_gloo_1")
    assert set(result["rows"]) == {f"batch 4 x 128 tokens{precision}" for precision in ("", ", bf16")}
    kinds = {library + way for library in ("unsharded", "FSDP2", "dshard") for way in ("", ", compiled")}
    assert all(set(rows) == kinds for rows in result["rows"].values())


@pytest.mark.slow
def test_plan_writes_five_limits_beside_single_strategies(bench):
    result, printed = bench("plan", *TINY, "--rounds", 2, file="plan_gloo_2")
    assert set(result["singles"]) == {"ddp", "zero1", "zero2", "keep", "full"}
    limits = [row["limit_mb"] for row in result["limits"]]
    assert limits == sorted(limits)
    assert len(limits) == 5
    for row in result["limits"]:
        assert row["predicted_mb"] <= row["limit_mb"]
        assert row["of_best"] == row["measured_ms"] / row["best_ms"]
        assert result["singles"][row["best_single"]]["predicted_mb"] <= row["limit_mb"]
    assert "plans by limit, 2 gloo ranks" in printed


def test_host_writes_its_cases(bench):
    result, _ = bench("host", *TINY, "--rounds", 2, file="host_fake")
    settings = ["GPT, fp32", "GPT, bf16", "GPT, bf16, checkpointing", "GPT, bf16, blocks compiled"]
    settings += ["GPT, bf16, clipped", "GPT, bf16, 4 micro-batches", "GPT, bf16, frozen but for norms"]
    settings += ["conv net, fp32", "experts, fp32", "experts, bf16", "HF Llama, fp32", "HF Llama, bf16"]
    assert list(result["rows"]) == [f"{setting}, 1 layers, 8 ranks" for setting in settings]
    for rows in result["rows"].values():
        assert set(rows) == KINDS - {"DDP"}
        assert all(set(row) == TIMES for row in rows.values())


def test_host_parts_times_each_part_where_the_step_passes_it(bench):
    result, printed = bench("host-parts", *TINY, "--rounds", 2, file="host_parts_fake")
    calls = {part: each["calls_per_layer"] for part, each in result["parts"].items()}
    assert list(calls) == list(host_parts._PARTS)
    assert (
        calls["gradients, from the node to .grad"] == calls["full tensors, and their node"] == 2
    )  # the block, the root
    assert calls["places in units, saved"] == calls["places in units, to save"] > 2
    assert all(each["us_per_layer"] > 0 for each in result["parts"].values())
    assert "all of these" in printed
    assert not hasattr(module_hooks._enter, "__wrapped__"), "the clocks are gone"


def test_collectives_writes_both_ways_of_each(bench):
    result, _ = bench("collectives", "--width", 16, "--rounds", 2, file="collectives_gloo_2")
    ways = ("direct", "backend's own")
    for name in ("all-gather", "reduce-scatter"):
        assert {f"{name} of a bucket, {way}" for way in ways} <= set(result["rows"])
    assert result["header"]["num_bytes"] == 4 * (12 * 16 * 16 + 13 * 16)
    assert result["header"]["num_tensors"] == 12


@pytest.mark.slow
def test_optimizer_writes_each_mode(bench):
    result, _ = bench("optimizer", "--rounds", 2, file="optimizer_gloo_2")
    assert len(result["rows"]) == 6
    assert all(set(rows) == {"dshard", "plain, shards' sizes", "FSDP2"} for rows in result["rows"].values())


@pytest.mark.slow
def test_muon_writes_every_way_and_owners_send_what_the_formula_says(bench):
    sizes = ("--num-ranks", 2, "--layers", 1, "--width", 32, "--rounds", 2)
    result, printed = bench("muon", *sizes, file="muon_gloo")
    ways = {"plain, one process", "plain, on each rank", "dshard, owners", "dshard, every rank", "FSDP2"}
    assert set(result["rows"]["2 ranks"]) == ways
    num_bytes = 12 * 32**2 * 4
    assert f"send {3 * num_bytes // 2:,} bytes, by formula {3 * num_bytes // 2:,}" in printed


@pytest.mark.slow
def test_eight_bit_writes_losses_bytes_and_times(bench):
    pytest.importorskip("torchao")
    sizes = ("--steps", 3, "--layers", 1, "--width", 64, "--rounds", 2)
    result, printed = bench("eight-bit", *sizes, file="eight_bit_gloo_2")
    assert result["rows"]["AdamW8bit"]["state_bytes_per_parameter"] < 3
    assert result["rows"]["AdamW8bit"]["loss"] == pytest.approx(result["rows"]["AdamW"]["loss"], rel=0.005)
    assert len(result["times"]) == 3
    assert "of 3 steps" in printed


@pytest.mark.slow
def test_checkpoint_writes_rates_and_the_stall_of_an_asynchronous_save(bench):
    result, printed = bench("checkpoint", *TINY, "--rounds", 2, file="checkpoint_gloo_2")
    ways = {"dd", "dshard.checkpoint.save", "dshard.checkpoint.load", "dcp.save", "dcp.load"}
    assert {name.split(", ")[1] for name in result["mb_per_s"]} == ways
    assert "an asynchronous save stalls training by" in printed


@pytest.mark.slow
def test_memory_writes_every_kind(bench):
    result, _ = bench("memory", *TINY, "--ranks", 1, file="memory_gloo_1")  # each variant starts ranks of its own
    assert all(set(rows) == {*KINDS, ROOT_ALONE} for rows in result["grown_mb"].values())
    assert all(grown >= 0 for rows in result["grown_mb"].values() for grown in rows.values())  # looks may come too late


def test_scale_writes_bytes_by_ranks_and_a_fit_by_units(bench):
    sizes = ("--world-sizes", 2, 4, "--units", 1, 2, "--rounds", 2)
    result, printed = bench("scale", *TINY, *sizes, file="scale_fake")
    assert set(result["by_ranks"]) == {"2", "4"}
    assert set(result["by_units"]) == {"1", "2"}
    width, vocab = 32, 256
    num_parameters = 12 * width**2 + 13 * width + 2 * width * vocab + 2 * width  # one block, embedding, head, norm
    for num_ranks, rows in result["by_ranks"].items():
        assert {row["shard_bytes"] for row in rows.values()} == {4 * num_parameters // int(num_ranks)}
        assert all(row["peak_bytes"] > row["shard_bytes"] for row in rows.values())  # optimizer state alone is twice
        assert 4 * width * vocab <= rows["dshard"]["gathered_bytes"] <= 4 * num_parameters
    assert set(result["fit"]) == {"FSDP2", "dshard"}
    assert "ms per unit" in printed


def test_the_fit_of_linear_growth_is_linear_and_of_quadratic_growth_is_not():
    linear = fit({units: 3.0 * units for units in (10, 200, 2000)})
    assert (linear["ms_per_unit"], linear["exponent"]) == (pytest.approx(3), pytest.approx(1))
    assert fit({units: 3.0 * units**2 for units in (10, 200, 2000)})["exponent"] == pytest.approx(2)


def test_gpu_tiny_runs_the_whole_path_on_cpu(bench):
    result, printed = bench("gpu", "--tiny", "--rounds", 2, "--world-sizes", 1, 8, file="gpu_tiny")
    cases = {f"{ranks}{how}" for ranks in ("1 rank", "8 ranks") for how in ("", ", checkpointing")}
    assert set(result["rows"]) == cases
    for rows in result["rows"].values():
        assert set(rows) == {"plain", "FSDP2", "dshard"}
        for row in rows.values():
            assert {*TIMES, "host_ms", "exposed_ms", "num_launches", "peak_allocated_gb"} <= set(row)
            assert row["num_launches"] is None
    assert "launches" in printed


def test_offload_runs_the_whole_path_on_cpu(bench):
    result, printed = bench(
        *("offload", "--cpu", "--rounds", 2, "--layers", 2, "--width", 64, "--vocab", 64, "--tokens", 16, 32),
        file="offload_cpu",
    )
    for rows in result["rows"].values():
        assert set(rows) == {"no offload", "dshard, at once", "dshard"}
        for row in rows.values():
            assert {*TIMES, "forward and backward, ms", "clip, ms", "optimizer, ms"} <= set(row)
    assert "optimizer ms" in printed


def test_the_gpu_model_has_1_1_billion_parameters():
    with torch.device("meta"):
        model = Llama(LlamaConfig())
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 1) == 1.1


def test_without_matplotlib_one_line_says_so_and_json_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(output_module.importlib.util, "find_spec", lambda name: None)
    output_module.Output("x", tmp_path).write("x", {"a": 1}, [])
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert "no plot: matplotlib is not installed. Run: pip install 'dshard[cli]'" in capsys.readouterr().out


def test_no_write_writes_nothing(tmp_path, capsys):
    (tmp_path / "here").mkdir()
    main(["host", *TINY, "--rounds", "2", "--no-write", "--out", str(tmp_path / "here")])
    assert "median ms" in capsys.readouterr().out
    assert list((tmp_path / "here").iterdir()) == []


def test_the_header_names_the_revision_of_the_working_folder(tmp_path):
    git = ("git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path))
    for command in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "m")):
        subprocess.run([*git, *command], check=True)
    expected = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    revision = output_module.Output("", None).header()["revision"]
    assert revision
    assert expected.startswith(revision)


def test_a_plot_draws_bars_with_gaps(tmp_path):
    pytest.importorskip("matplotlib")
    bars = Bars("b", "ms", {"one": {"dshard": 1.0}, "two": {"dshard": 2.0, "FSDP2": None, "DDP": 3.0}})
    draw(tmp_path / "plot.png", [bars, bars])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_below_torchrun_it_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="Start without torchrun"):
        main(["host"])


def test_its_options_are_the_arguments_of_its_functions():
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", "scale", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "--world-sizes" in ran.stdout
    assert "Host time and memory against ranks and units" in ran.stdout
