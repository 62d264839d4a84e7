"""Rows of tables of measured runs, in whatever way they were written, in one notation; or why they are not used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dshard.planner import Device

_HALF, _SINGLE, _EIGHT = r"bf16|bfloat16|fp16|float16|half", r"fp32|float32|tf32|single", r"fp8|float8|f8|e4m3|mxfp8"
_MAKERS = r"\b(nvidia|amd|instinct|tesla|geforce|quadro|dgx|hgx|gpu|oam|sxm\d?|hbm\d?e?)\b"
_DEVICES = {
    "gh200": "h100-96g",
    "4090": "rtx-4090",
    "rtx4090": "rtx-4090",
    "rtxa6000": "a6000",
    "titanrtx": "titan-rtx",
}
_SIZES = {"gh200": (96, 120, 480)}  # of which two are those of its CPU's memory
_FULL = ("", "full", "fullshard", "zero3", "fsdp", "fsdp1", "fsdp2", "fsdpfullshard")
_KEEP = ("keep", "shardgradop", "zero2", "fsdpshardgradop")
_WHOLE = ("none", "no", "noshard", "ddp", "dp")
_OTHERS = {
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "cp": "context parallelism",
    "sp": "sequence parallelism",
    "ep": "expert parallelism",
}
_NO, _YES = ("", "0", "0.0", "no", "none", "off", "false", "unknown", "?", "eager"), ("1", "1.0", "yes", "on", "true")
_PLAIN = ("", "gelu", "relu", "geluequivalent12d2perlayer", "mlp", "gelutanh", "gelunew")
_GATED = ("swiglu", "geglu", "reglu", "gatedsilu", "silu", "gated", "llama", "swish")


class SkippedError(Exception):
    """Why a row is not used."""


def canonical(row: Mapping[str, str]) -> dict[str, str]:
    """The row, with each column in the one notation that this package reads.

    Raises:
        SkippedError: It is of what cannot be predicted, or says something that is not understood.
        ValueError: It holds no number where one must be.
    """
    found = {name.strip().lower(): value.strip() for name, value in row.items() if name and value and value.strip()}
    _check_parallelism(found)
    device = device_of(found["gpu"])
    found["gpu"] = device.name
    for name in ("n_gpus", "layers", "d_model", "heads", "vocab", "seq", "micro_batch"):
        found[name] = str(count_of(found[name]))
    found.setdefault("grad_accum", "1")
    for name in ("grad_accum", "kv_heads", "ffn", "gpus_per_node"):
        if name in found:
            found[name] = str(count_of(found[name]))
    if "n_params" in found:
        found["n_params"] = re.sub(r"[~,_\s]", "", found["n_params"])
    ranks = int(found["n_gpus"])
    per_host = min(ranks, int(found.get("gpus_per_node", device.per_host)))
    if ranks % per_host:
        raise SkippedError(f"{ranks} GPUs on hosts of {per_host}")
    if int(found["d_model"]) % int(found["heads"]):
        raise SkippedError("heads that do not divide d_model")
    found["gpus_per_node"] = str(per_host)
    found["sharding"] = sharding_of(found.get("sharding", ""), ranks, per_host)
    found["precision"] = precision_of(found.get("precision", ""))
    found["act_ckpt"] = checkpointing_of(found.get("act_ckpt", ""))
    found["compile"] = _flag("compile", found.get("compile", ""))
    found["tied"] = _flag("tied", found.get("tied", ""))
    if "bfloat16" not in device.flops_per_s:
        raise SkippedError(f"{device.name} without bf16")
    if "internode_gbps_per_node" in found:
        found["internode_gbps_per_node"] = str(_number(found["internode_gbps_per_node"]))
    return found | _mlp(found)


def device_of(text: str) -> Device:
    """A device by its name here, or as tables write it: a100_80gb, H100-SXM, NVIDIA A100-SXM4-40GB.

    Raises:
        SkippedError: None is meant, or it does not say which.
    """
    from dshard.planner import DEVICES

    plain = re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
    if plain.replace(" ", "-") in DEVICES:
        return DEVICES[plain.replace(" ", "-")]
    sizes = [int(each) for each in re.findall(r"\b(\d+) ?g(?:i?b)?\b", plain)]
    plain = re.sub(_MAKERS, " ", re.sub(r"\b\d+ ?g(?:i?b)?\b", " ", plain))
    name = plain.replace(" ", "")
    base = _DEVICES.get(name, name)
    known = [device for device in DEVICES.values() if base in (device.name, device.name.rpartition("-")[0])]
    if sizes:
        known = [device for device in known if sizes[0] in (*_SIZES.get(name, ()), *_sizes(device))]
    if name == "h100" and not sizes:
        known = [DEVICES["h100-80g"]]  # the others were made for one system each
    if not known or not name or len(sizes) > 1:
        raise SkippedError(f"unknown device {text}")
    if len(known) > 1:
        raise SkippedError(f"device {text} without its memory")
    return known[0]


def _sizes(device: Device) -> tuple[int, int]:
    return round(device.memory_bytes / 2**30), round(device.memory_bytes / 1e9)


def sharding_of(text: str, num_ranks: int, per_host: int) -> str:
    """One of full, keep and hybrid; of one rank all are the same.

    Raises:
        SkippedError: It is none of them, or a hybrid of other groups than hosts.
    """
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    hybrid = re.fullmatch(r"(?:hybrid|hsdp|hybridshard|fsdphybridshard)(\d*)", plain)
    if hybrid and num_ranks > 1:
        within = int(hybrid[1] or per_host)
        # As parallelism is written, the number is that of all ranks: HSDP512.
        if within not in (per_host, num_ranks) or (within == num_ranks > per_host and not plain.startswith("hsdp")):
            raise SkippedError("hybrid within other groups than hosts")
    if num_ranks == 1 and (hybrid or plain in (*_FULL, *_KEEP, *_WHOLE)):
        return "full"
    if plain in _WHOLE:
        raise SkippedError("not sharded")
    if not hybrid and plain not in (*_FULL, *_KEEP):
        raise SkippedError(f"sharding {text}")
    return "hybrid" if hybrid else "full" if plain in _FULL else "keep"


def checkpointing_of(text: str) -> str:
    """One of none, full, op, and every K with K above 1.

    Raises:
        SkippedError: It is none of them.
    """
    plain = re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
    if plain in _NO or plain.startswith("no "):
        return "none"
    if plain in (*_YES, "full", "block", "blocks", "full block", "full blocks", "every block", "every layer", "all"):
        return "full"
    if plain in ("op", "selective op", "selective per op", "selective ops"):
        return "op"
    every = re.fullmatch(
        r"(?:selective )?(?:every )?(?:(\d+)(?:st|nd|rd|th)?|other|second)(?: (?:layer|block)s?)?", plain
    )
    if not every or every[1] == "0":
        raise SkippedError(f"act_ckpt {text}")
    return "full" if every[1] == "1" else f"every {every[1] or 2}"


def precision_of(text: str) -> str:
    """bf16, with how parameters are stored and gradients reduced where it says so: "pure", "fp32 reduce".

    Raises:
        SkippedError: Products are in another precision, or it is not understood.
    """
    plain = text.lower()
    if re.search(_EIGHT, plain):
        raise SkippedError("fp8")
    if plain and not re.search(_HALF, plain):
        raise SkippedError(f"precision {text}" if not re.search(_SINGLE, plain) else "fp32")
    is_pure = "pure" in plain and "amp" not in plain
    return "bf16" + " pure" * is_pure + " fp32 reduce" * bool("default" in plain or re.search(_SINGLE, plain))


def count_of(text: str) -> int:
    """A whole number above 0, as it may be written: 50304, ~50304, 50,304, 50304.0.

    Raises:
        ValueError: It is none.
    """
    number = _number(text)
    if number != int(number) or number < 1:
        raise ValueError(f"{text!r} must be a whole number above 0")
    return int(number)


def _number(text: str) -> float:
    number = float(re.sub(r"[~,_\s]|gbit/s|gbps|gb/s", "", text.lower()))
    if not 0 < number < float("inf"):
        raise ValueError(f"{text!r} must be a finite number above 0")
    return number


def seconds_of(row: Mapping[str, str]) -> float:
    """Of a step: as it was measured, or from tokens per second and GPU."""
    if "tokens_s_gpu" not in row:
        return _number(row["step_s"])
    tokens = int(row["micro_batch"]) * int(row.get("grad_accum", 1)) * int(row["seq"])
    return tokens / _number(row["tokens_s_gpu"])


def _check_parallelism(row: Mapping[str, str]) -> None:
    text = row.get("parallelism", "").lower()
    for short, name in _OTHERS.items():
        degrees = [
            row.get(short, ""),
            row.get(f"{short}_degree", ""),
            row.get(name.replace("parallelism", "parallel"), ""),
        ]
        degrees += [row.get(name.replace(" parallelism", "_parallel"), "")]
        degrees += re.findall(rf"(?<![a-z]){short}[ =:_-]*(\d*)", text)
        if any(each.lower() not in (*_NO, *_YES[:2]) for each in degrees) or name.partition(" ")[0] in text:
            raise SkippedError(name)


def _flag(name: str, text: str) -> str:
    if text.lower() not in (*_NO, *_YES):
        raise SkippedError(f"{name} {text}")
    return "1" if text.lower() in _YES else "0"


def _mlp(row: Mapping[str, str]) -> dict[str, str]:
    """What of a block can be built here: a plain one of 4 times the width, or a gated one of any."""
    text, width, heads = row.get("mlp", ""), int(row["d_model"]), int(row["heads"])
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    if plain in _PLAIN:
        if int(row.get("kv_heads", heads)) != heads or int(row.get("ffn", 4 * width)) != 4 * width:
            raise SkippedError("kv_heads or ffn beside a plain MLP")
        return {"mlp": "gelu"}
    if plain not in _GATED:
        raise SkippedError(f"mlp {text}")
    kv_heads = int(row.get("kv_heads", heads))
    if heads % kv_heads:
        raise SkippedError("kv_heads that do not divide heads")
    ffn = row.get("ffn") or str(_ffn(row, width, kv_heads / heads))
    return {"mlp": "swiglu", "kv_heads": str(kv_heads), "ffn": ffn}


def _ffn(row: Mapping[str, str], width: int, kv: float) -> int:
    """Of a gated MLP where it is not given: what the model's size leaves for it, or Llama's rule."""
    if "n_params" not in row:
        return 256 * ceil(8 * width / 3 / 256)
    embeddings = int(row["vocab"]) * width * (1 if row["tied"] == "1" else 2)
    inner = (float(row["n_params"]) - embeddings) / int(row["layers"]) / width - 2 * width * (1 + kv)
    if inner < 3 * 64:
        raise SkippedError("n_params below what layers, d_model and vocab make")
    return 64 * round(inner / 3 / 64)
