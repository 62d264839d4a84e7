"""How near a row has to come to the oracle, and what differs."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tests.crossings.oracle import Result


def is_exact(row: Mapping[str, str]) -> bool:
    """Whether nothing is rounded in another order.

    In fp64 all that differs is the order of sums. With weights in bf16 and reductions in fp64, gradients are the same
    bits and their sums are exact, unless slices, a graph or tensor parallelism compute them otherwise, or autograd adds
    up two uses of a weight in fp64, because a third one is exact.
    """
    is_same = row["strategy"] != "split(2)" and row["compile"] == "no" and row["mesh"] != "TP"
    is_same = is_same and row.get("device", "cpu") == "cpu"  # elsewhere a linear layer adds its bias apart
    adds_in_bf16 = row["params"] != "tied" or row["use"] != "penalty"
    return row["precision"] == "float64" or (row["precision"] == "bf16" and is_same and adds_in_bf16)


def differences(row: Mapping[str, str], rank: int, found: Result, expected: Result) -> list[str]:
    """What of a rank's result is not as it should be, first of all what comes first."""
    exact = is_exact(row)
    wrong = []
    data_rank = rank // 2 if row["mesh"] == "TP" else rank
    loss_error = 1e-10 if exact else 0.05
    for step, (micros, losses) in enumerate(zip(found.losses, expected.losses, strict=True)):
        for micro, (loss, ranks) in enumerate(zip(micros, losses, strict=True)):
            if not math.isclose(loss[0], ranks[data_rank], rel_tol=loss_error):
                wrong.append(f"step {step}, micro-batch {micro}: loss {loss[0]} for {ranks[data_rank]}")
    for step, (norm, right) in enumerate(zip(found.norms, expected.norms, strict=True)):
        if not math.isclose(norm, right, rel_tol=1e-10 if exact else 0.1):
            wrong.append(f"step {step}: norm {norm} for {right}")
    for kind in ("start", "grads", "weights"):
        a, b = getattr(found, kind), getattr(expected, kind)
        if a.keys() != b.keys():
            wrong.append(f"{kind} are of {sorted(a.keys() ^ b.keys())} on one side alone")
        for name in a.keys() & b.keys():
            moved = (b[name] - expected.start[name]) if kind == "weights" else b[name]
            error = size(a[name].double() - b[name].double())
            allowed = 1e-10 * size(b[name]) if exact else loose_part(row) * size(moved) + one_step(b[name])
            if not (a[name].dtype == b[name].dtype and error <= allowed):
                wrong.append(f"{kind} {name}: off by {error:.3g}, allowed {allowed:.3g}, {a[name].dtype}")
    return wrong


def size(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def loose_part(row: Mapping[str, str]) -> float:
    """What a dozen roundings to 8 bits may change.

    Muon scales small singular values up, Adafactor small elements of vectors, and their errors with them; more where a
    linear layer rounds once more, or weights have 8 bits, too.
    """
    if row["optimizer"] in ("muon and sgd", "adafactor"):
        return 0.2 if row.get("device", "cpu") == "cpu" and row["precision"] != "bf16 model" else 0.3
    return 0.1


def one_step(value: Tensor) -> float:
    """Where the parameter itself has 8 bits, one of its elements may be the next number."""
    return float(value.abs().max()) * 2**-8 if value.dtype == torch.bfloat16 else 0.0
