"""How tables of runs are read: each notation is understood as it is meant, or the row is not used."""

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshard.cli.measured import read_runs
from dshard.cli.notations import (
    SkippedError,
    canonical,
    checkpointing_of,
    count_of,
    device_of,
    precision_of,
    sharding_of,
)
from dshard.planner import DEVICES
from tests.planner.test_rates import ROW, table_of

GPUS = {
    "a100-40g": ("a100_40gb", "A100-SXM4-40GB", "NVIDIA A100 40 GB"),
    "a100-80g": ("a100_80gb", "A100 80GB", "NVIDIA A100-SXM4-80GB", "A100-80GiB"),
    "a100-64g": ("a100_64gb", "A100 64 GB"),
    "h100-80g": ("h100", "H100-SXM", "H100 SXM5 80GB", "NVIDIA H100 80GB HBM3"),
    "h100-64g": ("h100_64gb",),
    "h100-96g": ("GH200", "gh200 120gb", "H100 96GB"),
    "h200": ("H200", "h200_141gb", "NVIDIA H200"),
    "b200": ("B200 SXM",),
    "mi300x": ("MI300X", "AMD Instinct MI300X"),
    "mi250x": ("mi250x",),
    "l40s": ("NVIDIA L40S", "L40S 48GB"),
    "rtx-4090": ("RTX 4090", "GeForce RTX 4090"),
    "a6000": ("A6000", "RTX A6000"),
    "titan-rtx": ("TITAN RTX",),
    "v100-32g": ("V100-SXM2-32GB",),
}
SHARDINGS = {
    "full": ("FULL_SHARD", "full", "zero3", "ZeRO-3", "fsdp", "FSDP2", ""),
    "keep": ("SHARD_GRAD_OP", "zero2", "ZeRO-2", "keep"),
    "hybrid": ("HYBRID_SHARD", "hsdp", "HSDP", "hybrid(8)", "hybrid 8", "HSDP64"),
}
CHECKPOINTING = {
    "none": ("none", "", "no", "off", "0", "False"),
    "full": ("full", "full block", "Full Block", "every block", "true", "1", "selective (every 1st layer)"),
    "op": ("selective (op)", "selective op", "op"),
    "every 2": ("selective (every 2nd layer)", "every other layer", "selective 2", "every 2nd block"),
    "every 3": ("selective (every 3rd layer)", "selective (3)", "every 3 layers"),
}
PRECISIONS = {
    "bf16": ("bf16", "", "fp16", "bfloat16", "bf16 mixed", "16-mixed half", "amp_bf16"),
    "bf16 pure": ("bf16 (PURE)", "bf16 pure"),
    "bf16 fp32 reduce": ("amp_bf16 (DEFAULT)", "bf16 params, fp32 reduce", "bf16 / float32 reduction"),
}


def pairs_of(table):
    return [(meant, text) for meant, texts in table.items() for text in texts]


def skipped(read, *args):
    with pytest.raises(SkippedError) as why:
        read(*args)
    return str(why.value)


@given(st.sampled_from(pairs_of(GPUS)), st.sampled_from([str.lower, str.upper, str]), st.sampled_from(" -_/"))
def test_a_device_is_found_in_each_notation(pair, case, between):
    meant, text = pair
    assert device_of(case(text).replace(" ", between)).name == meant


@given(st.sampled_from(sorted(DEVICES)), st.text("abcdghklmnx -_0123456789", min_size=1, max_size=6))
def test_what_is_added_to_a_name_is_never_taken_for_another_device(name, more):
    with contextlib.suppress(SkippedError):
        assert device_of(f"{name} {more}").name == name


@pytest.mark.parametrize(
    "text", ["a100", "v200", "H100 PCIe", "H100 NVL", "MI250", "A10G", "", "gpu", "100", "a100 48gb"]
)
def test_a_device_that_is_unknown_or_two_is_none(text):
    assert "device" in skipped(device_of, text)


@given(st.sampled_from(pairs_of(SHARDINGS)), st.sampled_from([str.lower, str.upper, str]))
def test_sharding_is_read_in_each_notation(pair, case):
    meant, text = pair
    assert sharding_of(case(text), 64, 8) == meant
    assert sharding_of(case(text), 1, 1) == "full"


def test_sharding_that_is_not_predicted_is_none():
    assert skipped(sharding_of, "hybrid(16)", 64, 8) == "hybrid within other groups than hosts"
    assert skipped(sharding_of, "hybrid(64)", 64, 8) == "hybrid within other groups than hosts"
    assert skipped(sharding_of, "NO_SHARD", 8, 8) == skipped(sharding_of, "ddp", 8, 8) == "not sharded"
    assert sharding_of("ddp", 1, 1) == sharding_of("none", 1, 1) == "full"
    assert skipped(sharding_of, "_HYBRID_SHARD_ZERO2", 64, 8) == "sharding _HYBRID_SHARD_ZERO2"
    assert skipped(sharding_of, "zero1", 64, 8) == "sharding zero1"


@pytest.mark.parametrize(("meant", "text"), pairs_of(CHECKPOINTING))
def test_checkpointing_is_read_in_each_notation(meant, text):
    assert checkpointing_of(text) == meant


@pytest.mark.parametrize(("meant", "text"), pairs_of(PRECISIONS))
def test_precision_is_read_in_each_notation(meant, text):
    assert precision_of(text) == meant


@given(st.text(max_size=20))
def test_any_text_is_read_as_one_of_few_or_refused(text):
    reads = {
        lambda each: device_of(each).name: DEVICES,
        lambda each: sharding_of(each, 64, 8): SHARDINGS,
        lambda each: checkpointing_of(re.sub(r"\d+", "2", each)): CHECKPOINTING,
        precision_of: {*PRECISIONS, "bf16 pure fp32 reduce"},
    }
    for read, read_as in reads.items():
        with contextlib.suppress(SkippedError):
            assert read(text) in read_as


def test_what_is_not_understood_is_refused():
    assert skipped(checkpointing_of, "selective") == "act_ckpt selective"
    assert skipped(checkpointing_of, "every 0 layers") == "act_ckpt every 0 layers"
    assert [skipped(precision_of, text) for text in ("fp32", "TF32", "amp_fp8 (DEFAULT)", "bf16 + float8")] == [
        "fp32", "fp32", "fp8", "fp8"
    ]  # fmt: skip
    assert skipped(precision_of, "int8") == "precision int8"


@pytest.mark.parametrize("text", ["50304", "~50304", "50,304", "50304.0", " 50_304"])
def test_numbers_are_read_in_each_notation(text):
    assert count_of(text) == 50304


@pytest.mark.parametrize("text", ["few", "0", "-3", "1.5", "nan", "inf"])
def test_what_is_no_whole_number_is_refused(text):
    with pytest.raises((ValueError, OverflowError)):
        count_of(text)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tp": 8}, "tensor parallelism"),
        ({"tp_degree": "2"}, "tensor parallelism"),
        ({"tensor_parallel": 2}, "tensor parallelism"),
        ({"parallelism": "FSDP8 TP4"}, "tensor parallelism"),
        ({"parallelism": "FSDP 8, PP=4"}, "pipeline parallelism"),
        ({"parallelism": "FSDP + context parallel"}, "context parallelism"),
        ({"compile": "max-autotune"}, "compile max-autotune"),
        ({"mlp": "experts"}, "mlp experts"),
        ({"kv_heads": 2}, "kv_heads or ffn beside a plain MLP"),
        ({"ffn": 999}, "kv_heads or ffn beside a plain MLP"),
        ({"mlp": "swiglu", "kv_heads": 3}, "kv_heads that do not divide heads"),
        ({"mlp": "swiglu", "n_params": 1000}, "n_params below what layers, d_model and vocab make"),
        ({"n_gpus": 12}, "12 GPUs on hosts of 8"),
        ({"gpu": "v100-32g"}, "v100-32g without bf16"),
        ({"heads": 3}, "heads that do not divide d_model"),
    ],
)
def test_a_row_of_what_cannot_be_predicted_is_not_used(more, why):
    assert skipped(canonical, {name: str(value) for name, value in {**ROW, **more}.items()}) == why


def test_a_row_in_any_notation_is_the_same_run(tmp_path):
    plain = {**ROW, "n_gpus": 64, "sharding": "HYBRID_SHARD", "mlp": "swiglu", "ffn": 768, "act_ckpt": "full block"}
    other = {
        **plain, "gpu": "NVIDIA A100-SXM4-80GB", "vocab": "~1,000", "sharding": "HSDP", "parallelism": "HSDP64 TP1",
        "tp": 1, "act_ckpt": "full", "ffn": "", "compile": "no", "precision": "bfloat16", "gpus_per_node": "8.0",
        "tied": "false", "internode_gbps_per_node": "1600 Gbit/s", "mlp": "SwiGLU", "tokens_s_gpu": "",
        "step_s": 3 * 64 / 1e5,
    }  # fmt: skip
    one, two = read_runs(table_of([plain, other], tmp_path / "runs.tsv")).runs
    for name in (
        "seconds",
        "sharding",
        "device",
        "num_ranks",
        "ranks_per_host",
        "network",
        "num_backwards",
        "is_compiled",
    ):
        assert getattr(one, name) == getattr(two, name), name
    assert (one.gather_bytes == two.gather_bytes).all()
    assert (one.backward.product_s == two.backward.product_s).all()


def test_rows_that_are_not_used_are_counted_with_their_reasons(tmp_path):
    rows = [ROW, {**ROW, "tp": 2}, {**ROW, "tp": 4}, {**ROW, "gpu": "a100"}, {**ROW, "tokens_s_gpu": ""}]
    table = read_runs(table_of(rows, tmp_path / "runs.tsv"))
    assert len(table.runs) == 1
    assert table.skipped == {"tensor parallelism": 2, "device a100 without its memory": 1, "no tokens_s_gpu": 1}


@given(
    layers=st.integers(1, 80),
    width=st.sampled_from([1024, 4096, 8192]),
    groups=st.sampled_from([1, 4, 8]),
    inner=st.integers(4, 500),
)
def test_the_size_of_a_gated_mlp_follows_from_that_of_the_model(layers, width, groups, inner):
    ffn = 64 * inner
    numel = layers * (2 * width * width * (1 + 1 / groups) + 3 * width * ffn + 2 * width) + 2 * 32000 * width
    row = {**ROW, "layers": layers, "d_model": width, "heads": 32, "kv_heads": 32 // groups, "vocab": 32000}
    row |= {"mlp": "swiglu", "n_params": int(numel)}
    assert canonical({name: str(value) for name, value in row.items()})["ffn"] == str(ffn)


def test_without_the_size_of_the_model_it_follows_from_llamas_rule():
    for width, ffn in ((4096, 11008), (5120, 13824)):
        row = {**ROW, "d_model": width, "heads": 32, "mlp": "swiglu"}
        assert canonical({name: str(value) for name, value in row.items()})["ffn"] == str(ffn)
