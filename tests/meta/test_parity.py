"""docs/parity.md has a row for everything that FSDP2 offers, and what a row claims is shown by a test that exists."""

import inspect
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp import _fully_shard as fsdp2

from tests.meta.source import ROOT
from tests.meta.tables import missing_tests, named_tests, table_rows

PAGE = ROOT / "docs" / "parity.md"
STATUSES = ("same", "better", "differs", "not yet")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    feature: str
    status: str
    meaning: str
    shown_by: str


def rows(text: str) -> list[Row]:
    found = []
    for cells in table_rows(text):
        assert len(cells) == 4, f"docs/parity.md: a row has 4 cells, but this one has {len(cells)}: {cells}"
        found.append(Row(*cells))
    return found


def offered() -> dict[str, set[str]]:
    """Names that must have a row, by where they come from."""
    methods = {n for n, f in inspect.getmembers(torch_fsdp.FSDPModule, inspect.isfunction) if not n.startswith("_")}
    return {
        "torch.distributed.fsdp": set(fsdp2.__all__),
        "fully_shard": arguments(torch_fsdp.fully_shard),
        "FSDPModule": methods,
        "MixedPrecisionPolicy": arguments(MixedPrecisionPolicy),
        "summon_full_params": arguments(FullyShardedDataParallel.summon_full_params) - {"module"},
        "FullyShardedDataParallel": arguments(FullyShardedDataParallel) - OTHER_NAMES,
    }


# Arguments of FSDP1 that have other names in FSDP2, and rows under those.
OTHER_NAMES = {
    "module",
    "process_group",
    "sharding_strategy",
    "cpu_offload",
    "mixed_precision",
    "use_orig_params",
    "device_mesh",
}


def arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def problems(text: str) -> list[str]:
    """What is wrong with the page."""
    found = []
    table = rows(text)
    for row in table:
        if row.status not in STATUSES:
            found.append(f"{row.feature}: status {row.status!r} is none of {STATUSES}")
        if not row.feature:
            found.append("a row without a feature")
        if row.status != "not yet" and not named_tests(row.shown_by, row.feature):
            found.append(f"{row.feature}: names no test")
        if row.status == "differs" and not row.meaning:
            found.append(f"{row.feature}: differs, but does not say how")
        found += missing_tests(row.shown_by, row.feature)
    features = [row.feature for row in table]
    found += [f"{feature}: is there twice" for feature in features if features.count(feature) > 1]
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", " ".join(features)))))
    found += [f"{source}: {name} has no row" for source, names in offered().items() for name in names - words]
    return found


def test_every_feature_has_a_status_and_whatever_is_claimed_names_tests_that_exist():
    assert problems(PAGE.read_text()) == []


def test_what_torch_offers_is_looked_up():
    counts = {source: len(names) for source, names in offered().items()}
    assert counts["FSDPModule"] > 15
    assert counts["fully_shard"] >= 7
    assert counts["torch.distributed.fsdp"] >= 6
    assert counts["summon_full_params"] == 5


def line(feature: str) -> str:
    return next(text for text in PAGE.read_text().splitlines() if text.startswith(f"| `{feature}`"))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (line("reshard") + "\n", "", "FSDPModule: reshard has no row"),
        (line("mp_policy") + "\n", "", "fully_shard: mp_policy has no row"),
        (line("unshard"), line("reshard"), "`reshard`: is there twice"),
        ("| same |", "| equal |", "`fully_shard`: status 'equal' is none of"),
        ("| not yet |", "| same |", "`set_symm_mem_for_comm`"),
        ("::test_a_gpt_trains_as_under_fsdp2", "::test_no_gpt", "`fully_shard`: tests/parity/test_training.py has no"),
        (line("offload_policy"), "| `offload_policy` | better | | |", "`offload_policy`: names no test"),
        (line("offload_policy"), "| `offload_policy` | differs | | |", "`offload_policy`: differs, but does not say"),
    ],
)
def test_a_missing_row_status_or_test_is_seen(old, new, problem):
    text = PAGE.read_text()
    assert old in text
    changed = text.replace(old, new) if old == "| not yet |" else text.replace(old, new, 1)
    assert any(found.startswith(problem) for found in problems(changed)), problems(changed)
