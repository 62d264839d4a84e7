"""Each benchmark runs at a tiny size and writes what it says; bad input is refused in one line."""

import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dshard.bench import output as output_module
from dshard.bench.families import FAMILIES, stack
from dshard.bench.models import Size
from dshard.bench.plots import Bars, Lines, draw, figure_of
from dshard.bench.scale import fit
from dshard.bench.workloads import WORKLOADS
from dshard.cli import main
from dshard.testing import WorldPool
from tests.cli.launch import RANK_VARIABLES, REPO

KINDS = {"unsharded", "DDP", "FSDP2", "dshard", "FSDP2, no reshard", "dshard, no reshard"}
ROOT_ALONE = "dshard, root alone"
MESSAGES = {"dshard, by messages", "dshard, no reshard, by messages"}
BATCHES = {"batch 4 x 128 tokens", "batch 1 x 16 tokens"}
TIMES = {"median_ms", "q1_ms", "q3_ms", "rounds"}
TINY = ("--layers", "1", "--width", "32")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No rank variables, a working folder of our own, and no thread count that a benchmark leaves behind."""
    for name in RANK_VARIABLES:
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
        assert main(["bench", name, *map(str, args), "--out", str(out)]) == 0
        assert not dist.is_initialized()
        printed = capsys.readouterr().out
        assert f"wrote {out / file}.json" in printed
        assert {path.name for path in out.iterdir()} >= {f"{file}.json", f"{file}.png"}
        result = json.loads((out / f"{file}.json").read_text())
        assert result["header"]["command"].startswith(f"dshard bench {name} ")
        assert result["header"]["torch"] == torch.__version__
        assert result["header"]["revision"] is None  # the working folder is in no repository
        return result, printed

    return run


def values_after_steps(name: str) -> list[list[torch.Tensor]]:
    """Parameters at first, and after three steps of a workload on equal batches: as it is, by FSDP2 and by dshard."""
    work, size = WORKLOADS[name], Size(layers=1, width=32)
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


def test_step_writes_every_kind_and_its_exposed_time(bench):
    result, printed = bench("step", *TINY, "--rounds", 2, file="step_gloo_2")
    assert set(result["rows"]) == BATCHES
    for rows in result["rows"].values():
        assert set(rows) == {*KINDS, ROOT_ALONE, *MESSAGES}
        assert all(set(row) >= TIMES and row["rounds"] == 2 for row in rows.values())
        assert {kind for kind, row in rows.items() if row.get("exposed_ms", 0) > 0} == {*rows} - {"unsharded"}
    for way in ("", ", no reshard", ", by messages", ", no reshard, by messages"):
        assert f"overhead over unsharded{way}: " in printed
    assert result["header"]["num_ranks"] == 2


@pytest.mark.slow
def test_the_family_of_step_writes_every_kind_of_work(bench):
    result, printed = bench("step", "--family", *TINY, "--rounds", 2, file="step_family_gloo_2")
    assert set(result["rows"]) == set(WORKLOADS)
    for name, rows in result["rows"].items():
        assert set(rows) == (KINDS if name != "bf16" else KINDS - {"DDP"}) | MESSAGES
        assert all(set(row) >= TIMES and row["rounds"] == 2 for row in rows.values())
    assert printed.count("overhead over unsharded: ") == len(WORKLOADS)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_work_in_each_library(worlds: WorldPool, name):
    for start, unsharded, *others in worlds.run(2, values_after_steps, name):
        assert any(not torch.equal(a, b) for a, b in zip(start, unsharded, strict=True)) == (name != "decoding")
        for values in others:
            for found, expected in zip(values, others[0] if name == "bf16" else unsharded, strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)  # of changes by 3e-4


@pytest.mark.slow
def test_compile_writes_both_ways_of_each_library_in_both_precisions(bench):
    result, _ = bench("compile", *TINY, "--rounds", 2, "--ranks", 1, file="compile_gloo_1")
    assert set(result["rows"]) == {f"{precision}, batch 4 x 128 tokens" for precision in ("fp32", "bf16")}
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


def test_host_writes_its_case(bench):
    result, _ = bench("host", *TINY, "--rounds", 2, file="host_fake")
    assert set(result["rows"]) == {"1 layers, 8 ranks"}
    (rows,) = result["rows"].values()
    assert set(rows) == KINDS - {"DDP"}
    assert all(set(row) == TIMES for row in rows.values())


def test_collectives_writes_both_ways_of_each(bench):
    result, _ = bench("collectives", "--width", 16, "--rounds", 2, file="collectives_gloo_2")
    ways = ("direct", "backend's own")
    for name in ("all-gather", "reduce-scatter"):
        assert {f"{name} of a bucket, {way}" for way in ways} <= set(result["rows"])
    assert result["header"]["num_bytes"] == 4 * (12 * 16 * 16 + 13 * 16)
    assert result["header"]["num_tensors"] == 12


def test_optimizer_writes_each_mode(bench):
    result, _ = bench("optimizer", *TINY, "--rounds", 2, file="optimizer_gloo_2")
    assert set(result["rows"]) == {f"1 layers of width 32, {mode}" for mode in ("for-loop", "foreach", "fused")}
    assert all(set(rows) == {"dshard", "plain, shards' sizes", "FSDP2"} for rows in result["rows"].values())


def test_units_writes_both_ways_of_a_model_and_their_ratios(bench, monkeypatch):
    monkeypatch.setitem(FAMILIES, "20 layers", stack(20))
    options = ("--families", "20 layers", "--rounds", 2, "--repeats", 1)
    result, printed = bench("units", *options, file="units_gloo_2")
    assert set(result["families"]) == {"20 layers"}
    row = result["families"]["20 layers"]
    for variant in ("by hand", "root alone"):
        assert set(row[variant]) > TIMES
        assert row[variant]["units"] == row[variant]["reduce_scatters"] == 10
        kept = variant == "root alone"  # the unit that the backward begins with
        assert row[variant]["all_gathers"] == 20 - kept  # once in forward, once in backward
        assert row[variant]["unit_mb"] == [2 * 65 * 64 * 4 / 1e6] * 10
        assert row[variant]["gathered_peak_mb"] == 2 * row[variant]["unit_mb"][0]  # one in use, and one on its way
        assert len(row["grown_mb"][variant]) == 1
        assert row["grown_mb"][variant][0] > 0
    assert row["by hand is"] == "groups of 2 layers"
    assert row["gathered_peak_ratio"] == 1
    assert all(set(row[name]) == {"median", "q1", "q3"} for name in ("time_ratio", "cpu_ratio"))
    assert "root alone over by hand, 2 gloo ranks" in printed


def test_units_names_in_one_line_each_model_that_it_leaves_out(monkeypatch, capsys):
    measured = []
    monkeypatch.setattr("dshard.bench.families.find_spec", lambda name: None)
    monkeypatch.setattr("dshard.bench.units.run", lambda output, families, **options: measured.append(list(families)))
    assert main(["bench", "units", "--no-write"]) == 0
    assert measured == [["GPT", "ResNet", "500 layers"]]
    assert set(capsys.readouterr().out.splitlines()) == {
        f"{name}: left out, for transformers is not installed" for name in ("Llama", "T5")
    }


def test_units_without_a_model_that_can_be_built_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("dshard.bench.families.find_spec", lambda name: None)
    assert main(["bench", "units", "--families", "T5", "Llama"]) == 2
    assert capsys.readouterr().err == (
        "dshard bench: --families must hold a model that can be built here, but all of them (T5, Llama) need "
        "transformers, which is not installed. Run: pip install transformers\n"
    )


@pytest.mark.slow
def test_memory_writes_every_kind(bench):
    result, _ = bench("memory", *TINY, "--ranks", 1, file="memory_gloo_1")  # each variant starts ranks of its own
    assert set(result["grown_mb"]) == BATCHES | {f"{batch}, resident" for batch in BATCHES}
    assert all(set(rows) == {*KINDS, ROOT_ALONE} for rows in result["grown_mb"].values())
    assert all(grown > 0 for row in BATCHES for grown in result["grown_mb"][f"{row}, resident"].values())
    assert all(grown >= 0 for rows in result["grown_mb"].values() for grown in rows.values())  # looks may come too late


def test_scale_writes_bytes_by_ranks_bookkeeping_by_units_and_a_fit(bench):
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
    assert all(row["bookkeeping_bytes_per_unit"] > 0 for rows in result["by_units"].values() for row in rows.values())
    assert set(result["fit"]) == {"FSDP2", "dshard"}
    assert "ms per unit" in printed


def test_the_fit_of_linear_growth_is_linear_and_of_quadratic_growth_is_not():
    linear = fit({units: 3.0 * units for units in (10, 200, 2000)})
    assert linear["ms_per_unit"] == pytest.approx(3)
    assert (linear["ratio"], linear["exponent"]) == (pytest.approx(1), pytest.approx(1))
    assert (linear["ratio_of_units"], linear["ratio_to_units"]) == (2000, 200)
    quadratic = fit({units: 3.0 * units**2 for units in (10, 200, 2000)})
    assert (quadratic["ratio"], quadratic["exponent"]) == (pytest.approx(10), pytest.approx(2))


def test_gpu_tiny_runs_the_whole_path_on_cpu(bench):
    result, printed = bench("gpu", "--tiny", "--rounds", 2, "--world-sizes", 1, 8, file="gpu_tiny")
    cases = {f"{ranks}{how}" for ranks in ("1 rank", "8 ranks") for how in ("", ", checkpointing")}
    assert set(result["rows"]) == cases
    for rows in result["rows"].values():
        assert set(rows) == {"plain", "FSDP2", "dshard"}
        for row in rows.values():
            assert {*TIMES, "host_ms", "exposed_ms", "num_launches", "peak_allocated_bytes"} <= set(row)
            assert row["num_launches"] is None
    assert "launches" in printed


def test_the_gpu_model_has_1_1_billion_parameters():
    from dshard.bench.llama import Llama, LlamaConfig

    with torch.device("meta"):
        model = Llama(LlamaConfig())
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 1) == 1.1


def test_without_matplotlib_one_line_says_so_and_json_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(output_module.importlib.util, "find_spec", lambda name: None)
    output_module.Output("dshard bench x", tmp_path).write("x", {"a": 1}, [])
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert "no plot: matplotlib is not installed. Run: pip install 'dshard[cli]'" in capsys.readouterr().out


def test_no_write_writes_nothing(tmp_path, capsys):
    (tmp_path / "here").mkdir()
    assert main(["bench", "host", *TINY, "--rounds", "2", "--no-write", "--out", str(tmp_path / "here")]) == 0
    assert "median ms" in capsys.readouterr().out
    assert list((tmp_path / "here").iterdir()) == []


def test_the_header_names_the_revision_of_the_working_folder(tmp_path, monkeypatch):
    git = ("git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path))
    for command in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "m")):
        subprocess.run([*git, *command], check=True)
    expected = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    revision = output_module.Output("", None).header()["revision"]
    assert revision
    assert expected.startswith(revision)


def test_a_plot_draws_bars_with_gaps_and_lines(tmp_path):
    bars = Bars("b", "ms", {"one": {"dshard": 1.0}, "two": {"dshard": 2.0, "FSDP2": None, "DDP": 3.0}})
    lines = Lines("l", "ms", "ranks", {"dshard": {8: 1.0, 64: 2.0}, "FSDP2": {8: 3.0}})
    draw(tmp_path / "plot.png", [bars, lines])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


STEP = {
    "batch 4 x 128": {
        "unsharded": 1083.2,
        "DDP": 1206.0,
        "FSDP2": 1674.4,
        "dshard": 1360.0,
        "FSDP2, no reshard": 1426.0,
    },
    "batch 1 x 16": {"unsharded": 0.0412, "dshard": 3.14159, "dshard, no reshard": 307.0, "dshard, root alone": 99.5}
    | {"dshard, by messages": 2.5, "dshard, no reshard, by messages": 250.0},
}
TWO_HOSTS = (
    "full",
    "keep",
    "hybrid(2)",
    "hybrid(2, keep)",
    "ddp",
    "the plan",
    "the plan, in less",
    "FSDP2",
    "FSDP2, 2 x 2",
)
PLOTS = {
    "step": [Bars("a step", "ms, median", STEP), Bars("waiting", "ms", {"one": {"dshard": 1e6, "DDP": 5.0}})],
    "plan": [Bars("by limit", "ms, median", {f"{mb} MB": {"plan": 233.0, "best single": 240.0} for mb in (76, 84)})],
    "two hosts": [Bars("two hosts", "ms, median", {"": dict.fromkeys(TWO_HOSTS, 264.0)})],
    "collectives": [Bars("one unit", "ms", {"all-gather": {"": 16.0}, "all-reduce": {"": 11.0}})],
    "scale": [
        Lines("time", "ms, median", "ranks", {"FSDP2": {8: 37.0, 4096: 152.0}, "dshard": {8: 23.0, 4096: 149.0}}),
        Lines(
            "memory", "MB", "ranks",
            {f"{kind}{part}": {8: 0.2, 4096: 26.0} for part in (", shards", "") for kind in ("FSDP2", "dshard")},
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", PLOTS)
def test_each_name_in_a_plot_has_a_look_of_its_own(name):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure = figure_of(PLOTS[name])
    try:
        names = {n for panel in PLOTS[name] for of in looks_of(panel) for n in of} - {""}
        (legend,) = figure.legends or [None]
        assert {text.get_text() for text in legend.get_texts()} == names if names else legend is None
        looks = [look(handle) for handle in (legend.legend_handles if legend else ())]
        assert len(set(looks)) == len(looks)
        figure.canvas.draw()
        box = legend.get_window_extent() if legend else None
        for axes in figure.axes:  # what it would cover could not be read
            assert box is None or not box.overlaps(axes.get_tightbbox())
            assert all(axes.get_window_extent().contains(*text.get_window_extent().max) for text in axes.texts)
    finally:
        pyplot.close(figure)


def looks_of(panel):
    return [panel.values] if isinstance(panel, Lines) else panel.values.values()


def look(handle):
    """What tells a bar or a line from another."""
    if hasattr(handle, "get_facecolor"):
        return handle.get_facecolor()
    return handle.get_color(), handle.get_alpha(), handle.get_linestyle()


@pytest.mark.parametrize("name", PLOTS)
def test_numbers_in_a_plot_are_plain(name):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure = figure_of(PLOTS[name])
    try:
        figure.canvas.draw()
        texts = [text.get_text() for axes in figure.axes for text in axes.texts]
        for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
            texts += [label.get_text() for label in axis.get_ticklabels(which="both")]
    finally:
        pyplot.close(figure)
    shown = [text for text in texts if re.search(r"\d", text)]
    assert shown
    assert not [text for text in shown if re.search(r"\de[+-]?\d|10\^|times", text)]
    if name == "step":
        assert {" 1,083", " 1,674", " 0.0412", " 3.14", " 99.5", " 1,000,000"} <= set(texts)
    if name == "scale":
        assert {"30", "50", "100"} <= set(texts)


BAD_INPUT = [
    (["step", "--ranks", "0"], "--ranks must be at least 1, but it is 0."),
    (["step", "--rounds", "1"], "--rounds must be at least 2, but it is 1. Quartiles need two samples."),
    (["memory", "--layers", "0"], "--layers must be at least 1, but it is 0."),
    (["host", "--width", "12"], "--width must be divisible by 8, but it is 12. Use --width 16."),
    (["scale", "--units", "5"], "--units must be two numbers or more, for a fit, but it is 5."),
    (["scale", "--world-sizes", "8", "0"], "--world-sizes must be at least 1, but it is 0."),
    (["units", "--repeats", "0"], "--repeats must be at least 1, but it is 0."),
    (
        ["units", "--families", "GPT", "luck"],
        "--families must be names of 'GPT', 'Llama', 'T5', 'ResNet', '500 layers', ",
    ),
    (["optimizer", "--layers", "1"], "--layers and --width go together, but one of them is missing."),
    (["gpu", "--tiny", "--batch", "0"], "--batch must be at least 1, but it is 0."),
    (["step", "--out", "file/below"], "--out must be a folder that can be written, but file/below cannot: Not a dir"),
]


@pytest.mark.parametrize(
    ("args", "message"), BAD_INPUT, ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_bad_input_is_refused_in_one_line(tmp_path, capsys, args, message):
    (tmp_path / "file").write_text("in the way")
    assert main(["bench", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"dshard bench: {message}")


def test_a_missing_and_an_unknown_benchmark_are_refused(capsys):
    assert main(["bench"]) == 2
    assert main(["bench", "luck"]) == 2
    missing, unknown = capsys.readouterr().err.splitlines()
    assert missing.startswith("dshard bench: the following arguments are required: BENCHMARK.")
    assert "invalid choice: 'luck'" in unknown


def test_gpu_without_a_cuda_device_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "gpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "dshard bench: this benchmark needs a CUDA device, but torch finds none. Pass --tiny to try the path on CPU."
    )


def test_below_torchrun_it_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "host"]) == 2
    assert "the benchmarks start their own ranks, but WORLD_SIZE is 2." in capsys.readouterr().err


def test_the_command_line_alone_imports_no_benchmark():
    code = "import sys; from dshard.cli import main; main(['bench', '--rounds']); print('dshard.bench' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert ran.stdout.strip() == "False"
