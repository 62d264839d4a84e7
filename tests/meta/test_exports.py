"""The public names are exactly the ones written here: adding or losing one is a decision, not an accident."""

import inspect
import subprocess
import sys

import pytest

import dshard
from dshard import errors
from tests.meta.source import ROOT

PUBLIC_NAMES = [
    "ArgumentError",
    "CPUOffloadPolicy",
    "CheckpointError",
    "CommTrace",
    "DShardError",
    "DivergenceError",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PlacementError",
    "Plan",
    "PlanError",
    "RankLostError",
    "ShardedTensor",
    "StateError",
    "Strategy",
    "UnshardHandle",
    "UnsupportedOpError",
    "checkpoint",
    "clip_grad_norm_",
    "explain",
    "fully_shard",
    "gathered",
    "init_hybrid_mesh",
    "interop",
    "iter_full",
    "join",
    "load_safetensors",
    "no_sync",
    "optim",
    "plan",
    "plan_report",
    "register_fsdp_forward_method",
    "report",
    "run_by_some",
    "save_safetensors",
    "set_strategy",
    "share_comm_ctx",
    "to_plain",
    "trace",
]


def test_the_public_names_are_these():
    assert sorted(dshard.__all__) == sorted(PUBLIC_NAMES)
    assert len(set(dshard.__all__)) == len(dshard.__all__)


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_exists_and_has_a_docstring_of_its_own(name):
    value = getattr(dshard, name)
    documentation = value.__dict__.get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    assert documentation, f"dshard.{name} has no docstring"
    assert documentation.strip()[0].isupper(), f"dshard.{name}: the docstring must start with a sentence"


def test_every_error_is_public_and_a_dshard_error():
    tree = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert tree <= set(PUBLIC_NAMES)
    assert all(issubclass(getattr(errors, name), errors.DShardError) for name in tree)


def test_importing_dshard_needs_no_test_or_cli_package():
    names = {"hypothesis", "pytest", "rich", "matplotlib"}
    code = f"import sys, dshard; print(*{names} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.strip() == ""


def test_importing_dshard_loads_the_engine_alone_and_the_rest_at_its_first_use():
    later = ("checkpoint", "cli", "inspection", "interop", "planner", "planning", "testing")
    code = f"""import sys, dshard
print(*(name for name in sys.modules if name.startswith("dshard.") and name.split(".")[1] in {later}))
assert dshard.checkpoint.save and dshard.Plan and dshard.plan and dshard.report and dshard.plan_report
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.strip() == ""
