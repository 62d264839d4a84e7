"""Weights that are handed on one by one, as to an inference engine, and decoding."""

import contextlib
from typing import Any

import pytest
import torch

import dshard
from dshard.testing import WorldPool
from tests.twins import ids, same_grads, shard_blocks, twins


def export(kind: str) -> tuple[dict[str, int], int, int]:
    """The weights one by one, as for an inference engine: gathers by unit, and gathered bytes at their peak."""
    plain, sharded = twins(shard=shard_blocks)
    runtime = sharded._context()
    peak, expected = 0, dict(plain.named_parameters())
    with dshard.CommTrace() as trace, torch.no_grad():
        items = sharded.state_dict().items() if kind == "state_dict" else sharded.named_parameters()
        for name, p in items:
            assert torch.equal(p.full_tensor(), expected[name]), name
            peak = max(peak, runtime.gathered_bytes)
    labels = [r.label for r in trace.select("all_gather")]
    largest = max(unit.full_bytes for unit in runtime.units)
    sharded(ids()).sum().backward()  # and training goes on
    plain(ids()).sum().backward()
    same_grads(plain, sharded)
    return {label: labels.count(label) for label in labels}, peak, largest


@pytest.mark.parametrize("kind", ["parameters", "state_dict"])
def test_an_export_of_all_weights_gathers_each_unit_once_and_holds_one_unit_at_a_time(worlds: WorldPool, kind):
    units = ["tokens", "trunk.0", "trunk.1", "trunk.2", "norm", "head"]
    for calls, peak, largest in worlds.run(2, export, kind):
        assert calls == dict.fromkeys(units, 1)
        assert peak <= largest


def decode(kept: bool) -> tuple[int, bool]:
    plain, sharded = twins(shard=shard_blocks)
    expected = plain.generate(ids(), 5)
    with dshard.CommTrace() as trace:
        scope: Any = dshard.gathered(sharded) if kept else contextlib.nullcontext()
        with scope:
            found = sharded.generate(ids(), 5)
    return trace.calls("all_gather"), torch.equal(found, expected)


def test_decoding_gathers_per_token_and_inside_of_gathered_once(messaging: WorldPool):
    assert messaging.run(2, decode, False) == [(6 * 5, True)] * 2
    assert messaging.run(2, decode, True) == [(6, True)] * 2
