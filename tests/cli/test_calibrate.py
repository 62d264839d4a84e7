"""``dshard calibrate`` and ``--profile``, as they are typed."""

import pytest

from dshard.cli import main
from dshard.planner.rates import Rates, published
from tests.cli.launch import code_of
from tests.planner.test_rates import ROW, table_of

TINY = ("gpt-nano", "--world", "16", "--device", "a100-80g", "--sequence", "64")


def refused(capsys, *args):
    assert code_of(*args) == 2
    return capsys.readouterr().err


def test_runs_of_few_columns_make_a_profile_that_plan_and_simulate_take(tmp_path, capsys):
    rows = [{**ROW, "n_gpus": ranks, "tokens_s_gpu": 2e5} for ranks in (8, 16)]
    runs, out = table_of(rows, tmp_path / "runs.tsv"), tmp_path / "profile.json"
    assert main(["calibrate", str(runs), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("2 runs\n")
    assert "| product.a100 |" in text
    assert "| runs kept aside | 2 |" in text
    found = Rates.load(out)
    steps = f"{found.spread.steps.low:.2f} to {found.spread.steps.high:.2f}"
    assert f"steps on this cluster take {steps} of the predicted time in 8 of 10" in text
    assert found.source == "2 runs of runs.tsv"
    assert found != published()
    steps = []
    for profile in ((), ("--profile", "published"), ("--profile", str(out))):
        assert main(["simulate", *TINY, *profile, "--strategy", "full"]) == 0
        steps.append(capsys.readouterr().out)
    assert len(set(steps)) == 3
    assert ["8 in 10" in text for text in steps] == [False, True, True]
    assert main(["plan", *TINY, "--profile", str(out)]) == 0
    assert "rates of 2 runs of runs.tsv" in capsys.readouterr().out
    again = tmp_path / "again.json"
    assert main(["calibrate", str(runs), "--profile", str(out), "--out", str(again)]) == 0
    assert Rates.load(again).constants != found.constants  # it has moved further


def test_what_is_no_table_or_profile_is_refused(tmp_path, capsys):
    path = tmp_path / "runs.tsv"
    assert "cannot be read" in refused(capsys, "calibrate", path)
    path.write_text("gpu\tn_gpus\n")
    assert "has no rows" in refused(capsys, "calibrate", path)
    path.write_text("gpu\tn_gpus\na100-80g\t8\n")
    assert "in line 2 of" in refused(capsys, "calibrate", path)
    assert "--profile: " in refused(capsys, "plan", *TINY, "--profile", path)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"gpu": "a100_80gb"}, "gpu must be one of a100-40g, "),
        ({"gpu": "v100-32g"}, "v100-32g: must be asked for one of its dtypes (float16, float32), but it is bfloat16"),
        ({"layers": "few"}, "layers is no whole number above 0: few"),
        ({"layers": 0}, "layers is no whole number above 0: 0"),
        ({"micro_batch": ""}, "micro_batch is missing"),
        ({"tokens_s_gpu": ""}, "tokens_s_gpu is missing"),
        ({"tokens_s_gpu": "fast"}, "could not convert string to float"),
        ({"tokens_s_gpu": "-1"}, "a time or rate is no finite number above 0"),
        ({"sharding": "zero3"}, "sharding is none of full, keep, hybrid: zero3"),
        ({"precision": "fp8"}, "precision is none of bf16, bf16 pure, bf16 fp32 reduce: fp8"),
        ({"act_ckpt": "selective"}, "act_ckpt is none of none, full, op, every 2, "),
        ({"n_gpus": 12}, "n_gpus is no multiple of gpus_per_node"),
        ({"heads": 3}, "or d_model of heads"),
        ({"ffn": 999}, "kv_heads or ffn is given beside mlp gelu"),
    ],
    ids=str,
)
def test_a_row_that_says_what_cannot_be_predicted_is_refused_by_its_line(tmp_path, capsys, more, why):
    path = table_of([ROW, {**ROW, **more}], tmp_path / "runs.tsv")
    message = refused(capsys, "calibrate", path)
    assert f"in line 3 of {path} " in message
    assert why in message


def test_cells_beyond_the_header_and_columns_that_nobody_knows_are_refused(tmp_path, capsys):
    path = table_of([ROW], tmp_path / "runs.tsv")
    path.write_text(path.read_text().rstrip("\n") + "\t7\n")
    assert f"in line 2 of {path} the row has more cells than the header. " in refused(capsys, "calibrate", path)
    message = refused(capsys, "calibrate", table_of([{**ROW, "micro_bach": 3}], path))
    assert "RUNS must have columns of these names: gpu, " in message
    assert f"but {path} has 'micro_bach'. Did you mean micro_batch?" in message
    table_of([{**ROW, "notes": "a column for the reader"}], path)
    assert main(["calibrate", str(path)]) == 0


@pytest.mark.parametrize("table", [["--published"], ["--runs", "x.tsv"], ["--papers"]], ids=lambda table: table[0])
def test_tables_of_runs_are_no_business_of_simulate(table, capsys):
    assert "unrecognized arguments" in refused(capsys, "simulate", *TINY, *table)


def test_compiled_models_move_fewer_bytes_by_a_profile_and_need_one(capsys):
    texts = []
    for more in ((), ("--compile",)):
        assert main(["simulate", *TINY, "--profile", "published", *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]
    for command in ("simulate", "plan"):
        assert "--compile needs --profile, which says" in refused(capsys, command, *TINY, "--compile")
