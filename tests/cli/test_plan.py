"""``dshard plan`` and ``dshard simulate``: tables, files, and one line for what is wrong."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import MixedPrecisionPolicy

import dshard
from dshard.cli import main
from dshard.cli.models import preset
from dshard.planner import Plan
from dshard.planner.solver import DATASHEET
from tests.cli.launch import RANK_VARIABLES, code_of

TINY = ("gpt-nano", "--device", "a100-40g", "--sequence", 64)


def tiny_model():
    """For ``module:function``."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.ones(4, 64)


def empty_model():
    return nn.ReLU(), torch.ones(4, 64)


def no_model():
    return nn.Linear(2, 2)


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def printed(capsys):
    """Runs the command in this process and returns what it printed."""

    def run(*args):
        code = main([*map(str, args)])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return captured.out

    return run


@pytest.fixture
def refused(capsys):
    """Runs the command in this process and returns its last line."""

    def run(*args):
        assert code_of(*args) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        line = captured.err.splitlines()[-1]
        assert line.startswith(f"dshard {args[0]}: ")
        return line.removeprefix(f"dshard {args[0]}: ")

    return run


def test_plan_prints_the_table_and_writes_the_plan(printed, tmp_path):
    text = printed("plan", *TINY, "--world", 8, "--out", "plan.json", "--memory", "2GiB")
    assert text.startswith("gpt-nano: ")
    assert "certificate: step " in text
    assert " tokens/s" in text
    assert "in the " in text.partition("peak: ")[2]
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.explain() in text
    assert plan.tokens_per_s == 64 * plan.samples_per_s
    assert plan.cluster.num_ranks == 8
    assert plan.certificate.limit_bytes == 2 << 30


def test_plan_finds_the_batch_that_fits_and_takes_the_strategies_that_it_may(printed, tmp_path):
    printed("plan", *TINY, "--world", 16, "--batch", "auto", "--strategy", "full", "hybrid(8)", "--out", "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert {str(strategy) for strategy in plan.strategies} <= {"full", "hybrid(8)"}
    assert plan.certificate.margin == DATASHEET
    assert plan.model.batch_size > 1


def test_optimizers_differ_in_what_they_keep_and_in_who_steps(printed, tmp_path):
    peaks, steps = {}, {}
    for optimizer in ("adamw", "muon", "adamw8bit", "sgd"):
        printed("plan", *TINY, "--world", 8, "--strategy", "full", "--optimizer", optimizer, "--out", "plan.json")
        plan = Plan.load(tmp_path / "plan.json")
        owned = {param.name for unit in plan.model.units for param in unit.params if param.owner_work}
        layers = {name for name, p in preset("gpt-nano").named_parameters() if "blocks." in name and p.ndim == 2}
        assert owned == (layers if optimizer == "muon" else set())  # the embedding is the head, too
        peaks[optimizer], steps[optimizer] = plan.peak_bytes, plan.step_s
    assert peaks["adamw"] > peaks["adamw8bit"] > peaks["sgd"]
    assert steps["muon"] > steps["adamw"]


class Square(nn.Module):
    """A hidden matrix has the shape of the positions' embedding, and the head that of the tokens'."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(100, 16), nn.Embedding(16, 16)
        self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, 100)

    def forward(self, tokens):
        return self.head(self.hidden(self.tokens(tokens) + self.positions.weight))


def square_model():
    return Square(), torch.zeros(2, 16, dtype=torch.int64)


def test_muon_takes_hidden_matrices_whatever_embeddings_look_like(printed, tmp_path):
    options = ("--world", 2, "--device", "a100-40g", "--strategy", "full", "--optimizer", "muon", "--out", "plan.json")
    printed("plan", f"{__name__}:square_model", *options)
    plan = Plan.load(tmp_path / "plan.json")
    assert {p.name for unit in plan.model.units for p in unit.params if p.owner_work} == {"hidden.weight"}


def test_plan_takes_the_margin_that_it_is_told(printed, tmp_path):
    """Of communication that an A100 hides: all full, unless the fastest is asked for."""
    options = ("plan", "gpt2", "--device", "a100-40g", "--world", 8, "--batch", 8, "--out", "plan.json")
    assert "one strategy for all units was preferred to the fastest choice" in printed(*options)
    preferred = Plan.load(tmp_path / "plan.json")
    assert {str(strategy) for strategy in preferred.strategies} == {"full"}
    assert "was preferred" not in printed(*options, "--margin", 0)
    fastest = Plan.load(tmp_path / "plan.json")
    assert (fastest.certificate.margin, fastest.certificate.gap) == (0, 0)
    assert fastest.step_s < preferred.step_s
    assert fastest.peak_bytes > preferred.peak_bytes


def test_simulate_prints_a_row_for_each_world_and_strategy_and_draws(printed, tmp_path):
    pytest.importorskip("matplotlib")
    worlds = (8, 64, 4096)
    text = printed(
        "simulate", *TINY, "--world", *worlds, "--strategy", "ddp", "full", "plan",
        "--plot", "timeline.svg",
    )  # fmt: skip
    rows = [line.split() for line in text.splitlines()[2:] if not line.startswith("wrote")]
    assert [(int(row[0]), row[1]) for row in rows] == [(n, s) for n in worlds for s in ("ddp", "full", "plan")]
    for i in range(0, 9, 3):
        ddp, full, plan = (float(row[3]) for row in rows[i : i + 3])
        assert plan <= min(ddp, full) * (1 + DATASHEET)
    assert "<svg" in (tmp_path / "timeline.svg").read_text()


def test_a_function_and_a_configuration_of_hugging_face_are_models_too(printed, tmp_path):
    text = printed("plan", "tests.cli.test_plan:tiny_model", "--world", 2, "--device", "h200")
    assert text.startswith("tests.cli.test_plan:tiny_model: 4,680 parameters")
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = printed("plan", tmp_path, "--world", 2, "--device", "h200", "--sequence", 16)
    assert "model.layers.0" in text
    t5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    (tmp_path / "t5.json").write_text(json.dumps(t5))
    assert "parameters" in printed("simulate", "t5.json", "--world", 2, "--device", "h200", "--sequence", 16)


COMPUTES_AT_IMPORT = """\
import torch
from torch import nn

SCALE = torch.ones(3).sum().item()
TABLE = torch.arange(64.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        assert self.layer.weight.is_meta and not TABLE.is_meta

    def forward(self, x):
        return self.layer(x * TABLE) * SCALE


def factory():
    return Net(), torch.ones(4, 64)
"""


def test_a_module_that_reads_values_when_it_is_imported_has_models_to_plan_for(printed, tmp_path, monkeypatch):
    (tmp_path / "computes_at_import.py").write_text(COMPUTES_AT_IMPORT)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = printed("plan", "computes_at_import:factory", "--world", 2, "--device", "h200")
    assert text.startswith("computes_at_import:factory: 4,160 parameters")


def test_checkpointed_blocks_take_less_memory_and_more_operations(printed):
    plain, again = (
        printed("simulate", "gpt-nano", "--device", "h200", "--world", 2, "--batch", 32, *more).splitlines()[2].split()
        for more in ((), ("--checkpoint",))
    )
    assert float(again[3]) > float(plain[3])
    assert float(again[8]) < float(plain[8])


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip


def llama():
    """The model that a user makes of the same configuration."""
    transformers = pytest.importorskip("transformers")
    record = {key: value for key, value in LLAMA.items() if key != "model_type"}
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**record))


def test_the_batch_of_a_function_is_that_of_its_sample_or_the_one_that_is_asked_for(printed, tmp_path):
    options = ("tests.cli.test_plan:tiny_model", "--world", 2, "--device", "h200")
    for more, batch in (((), 4), (("--batch", 7), 7), (("--batch", 2), 2)):
        printed("plan", *options, *more, "--out", "plan.json")
        assert Plan.load(tmp_path / "plan.json").model.batch_size == batch
        assert printed("simulate", *options, *more).splitlines()[2].split()[2] == str(batch)
    printed("plan", *TINY, "--world", 2, "--out", "plan.json")
    assert Plan.load(tmp_path / "plan.json").model.batch_size == 1


def test_checkpointing_leaves_the_names_of_parameters(printed, tmp_path):
    for name, more in (("gpt-nano", ()), ("llama3-8b", ("--sequence", 16))):
        printed("plan", name, "--checkpoint", "--device", "h200", "--world", 2, "--out", "plan.json", *more)
        with torch.device("meta"):
            expected = {parameter for parameter, _ in preset(name).named_parameters()}
        assert set(Plan.load(tmp_path / "plan.json").by_parameter) == expected
    expected = {name for name, _ in llama().named_parameters()}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    printed("plan", "config.json", "--checkpoint", "--device", "h200", "--world", 2, "--out", "plan.json")
    assert set(Plan.load(tmp_path / "plan.json").by_parameter) == expected


def follow(path, policy, wraps):
    """A step of the model of `LLAMA` under a plan file: the loss, and the dtype of the logits."""
    torch.manual_seed(0)
    model = llama()
    if wraps:
        layers = set(model.model.layers)
        apply_activation_checkpointing(model, check_fn=lambda module: module in layers)
    dshard.fully_shard(model, plan=path, mp_policy=policy)
    out = model(input_ids=torch.arange(16).view(1, 16), labels=torch.arange(16).view(1, 16))
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    return out.loss.item(), out.logits.dtype


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        (("--checkpoint", "--dtype", "float32"), None),
        (("--checkpoint", "--dtype", "bfloat16", "--reduce-dtype", "float32"), BF16),
        (("--dtype", "bf16", "--reduce-dtype", "fp32"), BF16),
        (("--dtype", "bfloat16"), MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    ],
    ids=str,
)
def test_fully_shard_follows_what_the_command_planned(worlds, printed, tmp_path, options, policy):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    printed("plan", "config.json", "--device", "h200", "--world", 2, "--out", "plan.json", *options)
    wraps = "--checkpoint" in options
    for loss, dtype in worlds.run(2, follow, str(tmp_path / "plan.json"), policy, wraps):
        assert loss > 0
        assert dtype == (torch.float32 if policy is None else torch.bfloat16)


def test_gradients_that_are_reduced_in_a_wider_dtype_take_more_bytes_and_time(printed):
    options = ("gpt2", "--device", "titan-rtx", "--dtype", "float16", "--world", 8)
    rows = [
        printed("simulate", *options, *more).splitlines()[2].split()
        for more in ((), ("--reduce-dtype", "float16"), ("--reduce-dtype", "float32"))
    ]
    assert rows[0] == rows[1]
    assert float(rows[2][3]) > float(rows[0][3])
    assert float(rows[2][8]) > float(rows[0][8])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("gpt-huge", "--device", "h200", "--world", 8), "MODEL must be one of gpt-nano, "),
        (("tests.cli.test_plan:nothing", "--device", "h200", "--world", 8), "raises AttributeError"),
        (
            ("tests.cli.test_plan:empty_model", "--device", "h200", "--world", 8),
            "the model must have parameters, but it has none.",
        ),
        (
            ("tests.cli.test_plan:no_model", "--device", "h200", "--world", 8),
            "but tests.cli.test_plan:no_model returns",
        ),
        (("missing.json", "--device", "h200", "--world", 8), "MODEL must be a configuration as JSON, but missing.json"),
        (("gpt2", "--device", "abacus", "--world", 8), "--device must be one of a100-40g, "),
        (
            ("gpt2", "--device", "v100-32g", "--world", 8),
            "--dtype: v100-32g: must be asked for one of its dtypes (float16, float32), but it is bfloat16.",
        ),
        ((*TINY, "--world", 0), "argument --world: must be a whole number of at least 1, but it is '0'"),
        ((*TINY, "--world", "some"), "argument --world: must be a whole number of at least 1, but it is 'some'"),
        ((*TINY, "--world", 12), "--world must be a multiple of the 8 ranks of a host, but it is 12. Pass --world 16."),
        (
            (*TINY, "--world", 8, "--memory", -5),
            "--memory must be a number of bytes above 0, or text such as '38GiB', but it is '-5'.",
        ),
        (
            (*TINY, "--world", 8, "--memory=-5GiB"),
            "--memory must be a number of bytes above 0, or text such as '38GiB', but it is '-5GiB'.",
        ),
        (
            (*TINY, "--world", 8, "--batch", "0"),
            "argument --batch: must be a whole number of at least 1, but it is '0'",
        ),
        (
            (*TINY, "--world", 8, "--between-hosts", 0),
            "--between-hosts must be a finite number above 0, but it is 0.0.",
        ),
        (
            (*TINY, "--world", 8, "--optimizer", "muon", "--tensor-parallel", 2),
            "--optimizer muon needs whole matrices, for plans do not know what owners of cut ones do",
        ),
        ((*TINY, "--world", 8, "--strategy", "zero9"), "must be one of ddp, zero1, zero2, keep, full"),
        ((*TINY, "--world", 8, "--strategy", "hybrid(3)"), "must divide those of the mesh (8), but they are 3."),
        ((*TINY, "--world", 8, "--plot", "x.doc"), "--plot must end in .png or .svg or .pdf, but it is x.doc."),
        (
            (*TINY, "--world", 8, "--plot", "no/x.png"),
            "--plot must be a file in a folder that exists, but it is no/x.png.",
        ),
        ((*TINY, "--world", 8, "--reduce-dtype", "int8"), "argument --reduce-dtype: invalid choice: 'int8'"),
        (
            (*TINY, "--world", 8, "--margin", -1),
            "--margin must be a finite number of percents, 0 or more, but it is -1.0.",
        ),
        (
            (*TINY, "--world", 8, "--margin", "nan"),
            "--margin must be a finite number of percents, 0 or more, but it is n",
        ),
        (
            (*TINY, "--world", 8, "--sequence", 0),
            "argument --sequence: must be a whole number of at least 1, but it is '0'",
        ),
        (
            ("tests.cli.test_plan:tiny_model", "--device", "h200", "--world", 8, "--checkpoint"),
            "--checkpoint needs blocks",
        ),
    ],
)
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_what_is_wrong_is_one_line(refused, command, args, message):
    assert message in refused(command, *args)


@pytest.mark.parametrize(
    ("command", "option", "name"),
    [("plan", "--out", "a.json"), ("plan", "--plot", "a.png"), ("simulate", "--plot", "a.svg")],
)
def test_a_file_that_cannot_be_written_is_told_in_one_line(capsys, refused, tmp_path, command, option, name):
    pytest.importorskip("matplotlib")
    options = (*TINY, "--world", 8)
    (tmp_path / name).mkdir()
    assert refused(command, *options, option, name).startswith(f"{option} must be a file in a folder that exists")
    (tmp_path / name).rmdir()
    (tmp_path / name).symlink_to("/dev/full")  # that a disk is full shows when something is written
    assert code_of(command, *options, option, name) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "No space left on device" in line


def test_the_sequence_of_a_function_is_refused(refused):
    message = refused("plan", "tests.cli.test_plan:tiny_model", "--world", 2, "--device", "h200", "--sequence", 8)
    assert message.startswith("--sequence is for presets and configurations, but tests.cli.test_plan:tiny_model makes")


def test_what_fits_nowhere_is_refused_with_the_units_that_cause_it(refused):
    options = ("gpt2", "--device", "titan-rtx", "--dtype", "float16", "--world", 8, "--memory", "200MB")
    message = refused("plan", *options)
    assert message.startswith("the peak must fit into 200000000 bytes, but")  # the command's name comes once
    assert "too many" in message
    assert "in the forward of blocks.11..norm; most of it is of " in message
    assert refused("simulate", *options, "--strategy", "plan") == message
    assert "--strategy plan" in refused("simulate", *TINY, "--world", 8, "--batch", "auto")
    assert "--out must be a file in a folder that exists" in refused(
        "plan", *TINY, "--world", 8, "--out", "no/plan.json"
    )


def test_presets_have_the_parameters_of_their_names():
    expected = {"gpt2": 124e6, "gpt2-xl": 1.558e9, "gpt3-175b": 175e9, "gpt-1t": 1008e9}
    expected |= {"llama3-8b": 8.03e9, "llama3-70b": 70.55e9, "llama3-405b": 405.85e9}
    for name, count in expected.items():
        with torch.device("meta"):
            found = sum(p.numel() for p in preset(name).parameters())
        assert found == pytest.approx(count, rel=0.06), name


def test_a_limit_of_what_the_allocator_reserves_is_asked_for(printed):
    options = (*TINY, "--world", 8, "--batch", 64, "--memory", "560MiB", "--margin", 0, "--out", "plan.json")
    printed("plan", *options)
    live = Plan.load("plan.json")
    printed("plan", *options, "--memory-of", "reserved")
    reserved = Plan.load("plan.json")
    assert (live.certificate.memory_of, reserved.certificate.memory_of) == ("live", "reserved")
    assert live.peak_bytes <= 560 << 20
    assert reserved.memory_seen.reserved_bytes <= 560 << 20


@pytest.mark.parametrize(("memory_of", "fits"), [("live", "yes"), ("expandable", "yes"), ("reserved", "no")])
def test_a_simulated_step_fits_by_the_bytes_that_are_limited(printed, memory_of, fits):
    """Under full it takes 423 MiB of live bytes, so 449 MiB expandable and 478 MiB reserved."""
    options = (*TINY, "--world", 8, "--batch", 64, "--memory", "460MiB", "--memory-of", memory_of)
    assert printed("simulate", *options).splitlines()[2].split()[-1] == fits
