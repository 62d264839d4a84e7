"""The tests' table of arguments is whole, and whatever it does not allow is refused by name before any change."""

import enum
import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import DataParallelMeshDims

import dshard
from dshard import arguments, planner, policies, testing
from dshard.arguments import shown
from dshard.planner import Cluster, Link, Links, Measured, ModelCosts, ParamCosts, Plan, Training, UnitCosts
from dshard.planning import links
from dshard.policies import Strategy
from dshard.runtime.module import AcceptedHints
from dshard.setup.options import read_modules, read_options
from dshard.testing import World, WorldPool, expect_error, fake_world
from tests.arguments import table

TABLE = {who: {name: table.allowed(kind) for name, kind in row.items()} for who, row in table.TABLE.items()}

MODULES = (
    "dshard",
    "dshard.checkpoint",
    "dshard.interop",
    "dshard.optim",
    "dshard.planning.links",
    "dshard.planner",
    "dshard.testing",
)
OF_CHECKPOINT = ("save", "load", "check", "repair", "merge")  # which messages name with their module
RESULT = "a result, which dshard makes"
ACCEPTED = sorted(name for name in vars(AcceptedHints) if name.startswith("set_"))
FREE = {  # public names without a row, and why
    "ShardedTensor": "its methods are those of a tensor, whose arguments torch looks at",
    "UnshardHandle": RESULT,
    "RemoteRankError": RESULT,
    "verify_sharding": "a program of the user's, which its ranks call; names and numbers are looked at there",
    "assert_sharding_invariants": "it hands all on to verify_sharding",
    **dict.fromkeys(("Finding", "PendingSave", "Report"), RESULT),
    "ShardedTrainerMixin": "its methods are called by transformers, whose they are",
    **dict.fromkeys(
        (
            *("BatchSolution", "Certificate", "Comparison", "MemoryEvent", "MemoryForecast", "Moment", "Segment"),
            *("Solution", "Timeline", "Workspace"),
        ),
        RESULT,
    ),
    **dict.fromkeys(("Constant", "Misses"), "part of a Rates, which looks at them"),
    "Work": "part of a UnitCosts, which looks at it",
    "CPUOffloadPolicy": "as torch's: fully_shard looks at it",
    **dict.fromkeys((f"AdamW8bit.{name}" for name in ("add_param_group", "load_state_dict", "step")), "as torch's"),
    **dict.fromkeys(
        (
            f"Rates.{name}"
            for name in (
                "of_family",
                "spread_on",
                "seconds_per_byte",
                "copies_s",
            )
        ),
        "the planner asks it; plan and cluster_of have looked at what they were given",
    ),
    **dict.fromkeys(("Device.seconds", "Device.peak"), "the planner asks it for every operation"),
    "Device.check": "a check itself, whose error names the dtypes",
    "Links.of": "it hands all on to Links",
    **{
        f"{owner}.{name}": "the planner asks it thousands of times"
        for owner, names in {
            "Cluster": (
                *("all_gather_s", "in_place_s", "reduce_scatter_s", "all_reduce_s", "among_replicas_s"),
                *("is_inside", "shares_memory", "replicas_share_memory"),
            ),
            "Link": ("time_s",),
            "ModelCosts": ("under",),
            "ParamCosts": ("shard_numel", "slice_numel", "state_bytes_of"),
            "UnitCosts": ("under", "of_kind"),
        }.items()
        for name in names
    },
    **dict.fromkeys(ACCEPTED, "accepted for FSDP2's sake, does nothing"),
}


def parameters_of(call: Any) -> list[str]:
    found = [p for p in inspect.signature(call).parameters.values() if p.name not in ("self", "cls")]
    return [p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def methods_of(owner: type) -> Iterator[tuple[str, Any]]:
    """Public methods that dshard defines, with the names that messages have for them."""
    is_module = issubclass(owner, nn.Module)
    for kind in owner.__mro__:
        for name, value in vars(kind).items() if kind.__module__.startswith("dshard") else ():
            call = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if name[0] != "_" and inspect.isfunction(call):
                who = call.__qualname__.rpartition(".")[2]
                yield (name if name in FREE else who) if is_module else f"{owner.__name__}.{name}", call


def surface() -> dict[str, list[str]]:
    """Every public function, constructor and method: the names of its arguments."""
    found: dict[str, list[str]] = {}
    for module in map(importlib.import_module, MODULES):
        for public in getattr(module, "__all__", ["measure_links"]):  # a file has none
            value = getattr(module, public)
            is_ours = getattr(value, "__module__", "").startswith("dshard")
            if inspect.isfunction(value) and is_ours:
                found[f"checkpoint.{public}" if public in OF_CHECKPOINT else public] = parameters_of(value)
            elif inspect.isclass(value) and is_ours and not issubclass(value, (Exception, enum.Enum)):
                if "__init__" in vars(value) and not issubclass(value, nn.Module):
                    found[public] = parameters_of(vars(value)["__init__"])
                for who, method in methods_of(value) if public not in FREE else ():
                    found[who] = parameters_of(method)
    return found


def test_every_argument_of_every_public_function_has_a_kind_or_a_reason():
    assert len(surface()) > 100
    there = {name: sorted(names) for name, names in surface().items() if name not in FREE and names}
    assert there == {name: sorted(row) for name, row in TABLE.items()}
    assert set(FREE) <= set(surface()) | {
        n for m in MODULES for n in getattr(importlib.import_module(m), "__all__", ())
    }


# --- values, right and wrong ---


def names() -> Iterator[int]:
    yield from range(3)


@dataclass
class Things:
    """What arguments are made of, in a world of one rank."""

    sharded: Any
    plain: nn.Module
    optimizer: torch.optim.Optimizer
    plan: Plan

    def pool(self) -> dict[str, Any]:
        param, model = self.plain.weight, self.plan.model
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        numbers = {
            "none": None,
            "true": True,
            "false": False,
            "0": 0,
            "1": 1,
            "3": 3,
            "-1": -1,
            "0.5": 0.5,
            "-0.5": -0.5,
            "2.0": 2.0,
            "nan": math.nan,
            "inf": math.inf,
            "-inf": -math.inf,
            "10**400": 10**400,
            "1j": 1j,
            "numpy 3": numpy.int64(3),
            "numpy 0.5": numpy.float32(0.5),
            "numpy nan": numpy.float64("nan"),
            "numpy true": numpy.bool_(True),
            "array 0.5": numpy.array(0.5),
            "array": numpy.ones(2),
            "tensor 3": torch.tensor(3),
            "tensor 0.5": torch.tensor(0.5),
            "tensor nan": torch.tensor(math.nan),
            "tensor true": torch.tensor(True),
            "tensor": torch.ones(2),
            "meta": torch.ones((), device="meta"),
        }
        texts = {
            "''": "",
            "'x'": "x",
            "'ful'": "ful",
            "'full'": "full",
            "'auto'": "auto",
            "'2GiB'": "2GiB",
            "'inf'": "inf",
            "'mean'": "mean",
            "'check'": "check",
            "'leave'": "leave",
            "'bf16'": "bf16",
            "'cpu'": "cpu",
            "b'x'": b"x",
            "'all_gather'": "all_gather",
            "path": Path("x"),
            "'nul'": "\0",
            "'-1GiB'": "-1GiB",
            "'hybrid(0)'": "hybrid(0)",
        }
        containers = {
            "[]": [],
            "[None]": [None],
            "{}": {},
            "{1: 2}": {1: 2},
            "{'x': None}": {"x": None},
            "['ful']": ["ful"],
            "['full']": ["full"],
            "{'*': 'full'}": {"*": "full"},
            "{'*': 'ful'}": {"*": "ful"},
            "[1]": [1],
            "[2, 4]": [2, 4],
            "[-1, 0]": [-1, 0],
            "[True]": [True],
            "['x']": ["x"],
            "[param]": [param],
            "{param}": {param},
            "[plain]": [self.plain],
            "[sharded]": [self.sharded],
            "[param, None]": [param, None],
            "[optimizer]": [self.optimizer],
            "[nn.Linear]": [nn.Linear],
            "[sharded param]": [self.sharded.weight],
            "{'x': bf16}": {"x": torch.bfloat16},
            "{'x': 2.0}": {"x": 2.0},
            "{2: links}": {2: self.plan.cluster.inside},
            "ModuleList": nn.ModuleList([self.plain]),
            "[unit]": list(model.units),
            "[costs]": list(model.units[0].params),
        }
        objects = {
            "object": object(),
            "function": names,
            "class": int,
            "plain": self.plain,
            "sharded": self.sharded,
            "param": param,
            "sharded param": self.sharded.weight,
            "bf16": torch.bfloat16,
            "int32": torch.int32,
            "device": torch.device("cpu"),
            "mesh": mesh,
            "optimizer": self.optimizer,
            "nn.Linear": nn.Linear,
            "precision": MixedPrecisionPolicy(torch.bfloat16),
            "int precision": MixedPrecisionPolicy(torch.int32),
            "named precision": MixedPrecisionPolicy("bf16"),
            "offload": CPUOffloadPolicy(),  # type: ignore[arg-type]
            "offload class": CPUOffloadPolicy,
            "offload of no bool": dshard.CPUOffloadPolicy(defer_step=2),  # type: ignore[arg-type]
            "mesh dims": DataParallelMeshDims("dp"),
            "strategy": Strategy("full"),
            "plan": self.plan,
            "cluster": self.plan.cluster,
            "links": self.plan.cluster.inside,
            "costs": model,
            "link": self.plan.cluster.inside.all_gather,
            "measured": Measured(1.0),
            "trace": dshard.trace(self.sharded),
            "training": Training(),
            "whole steps": planner.WholeSteps(),
            "rates": planner.published(),
            "device kind": planner.DEVICES["h200"],
            "wire": planner.DEVICES["h200"].within_host,
            "world": World(1),
            "efficiency": planner.EFFICIENCY,
            "comm": Comm(),
        }
        return numbers | texts | containers | objects


class Comm:
    """Looks like torch's interface of a collective."""

    def allocate(self) -> None: ...

    def __call__(self) -> None: ...

    def at(self) -> None: ...


BOOLS = {"true", "false", "numpy true", "tensor true"}
INTS = {"0", "1", "3", "numpy 3", "tensor 3"}  # and so on: what a count of at least 0 may be
ABOVE = INTS - {"0"} | {"0.5", "2.0", "numpy 0.5", "array 0.5", "tensor 0.5"}
TEXTS = {"''", "'x'", "'ful'", "'full'", "'auto'", "'2GiB'", "'inf'", "'mean'", "'check'", "'leave'", "'bf16'", "'cpu'"}
TEXTS |= {"'all_gather'", "'nul'", "'-1GiB'", "'hybrid(0)'"}
PATHS = TEXTS - {"''", "'nul'"} | {"path"}
MODULE = {"plain", "sharded", "ModuleList"}
FUNCTIONS = {"function", "comm", *MODULE}
TENSOR = {"param", "sharded param", "tensor", "tensor 3", "tensor 0.5", "tensor nan", "tensor true", "meta"}
NOTHING = {"[]"}
SIZES = {"1", "3", "numpy 3", "'2GiB'"}
STRATEGY = {"'full'", "strategy"}
PRECISION = {"none", "bf16", "precision", "{}", "{'x': None}", "{'x': bf16}"}
RIGHT: dict[str, set[str]] = {  # by what the table says that a kind allows
    "a bool": BOOLS,
    "text": TEXTS,
    "a path, as text or a Path": PATHS,
    "JSON text": TEXTS | {"b'x'"},
    "an integer of at least 0": INTS,
    "an integer of at least 1": INTS - {"0"},
    "a function": FUNCTIONS | {"class", "nn.Linear", "offload class"},
    "an nn.Module": MODULE,
    "an nn.Module, or a list or tuple of at least one": MODULE | {"[plain]", "[sharded]"},
    "a module that fully_shard was called on": {"sharded"},
    "a list of modules that fully_shard was called on": {"[sharded]", *NOTHING},
    "a module that fully_shard was called on, one of its parameters, or a list of them": (
        MODULE | {"sharded param", "[sharded param]"}
    ),
    "a tensor, or an iterable of tensors": TENSOR | {"[param]", "{param}", "[sharded param]", *NOTHING},
    "a set or list of parameters": {"[param]", "{param}", "[sharded param]", *NOTHING},
    "an optimizer of torch.optim, or several": {"optimizer", "[optimizer]", *NOTHING},
    "an Optimizer": {"optimizer"},
    "two numbers of [0, 1)": set(),
    "a mapping of names to tensors": {"{}", "{1: 2}", "{'x': None}", "{'*': 'full'}", "{'*': 'ful'}", "{'x': bf16}"}
    | {"{'x': 2.0}", "{2: links}"},
    "a DeviceMesh": {"mesh"},
    "a DataParallelMeshDims": {"mesh dims"},
    "a torch.device or its text": {"device", "'cpu'"},
    "a floating-point dtype": {"bf16"},
    "an OffloadPolicy, a CPUOffloadPolicy": {"offload"},
    "module classes, a function of a module, or a policy of torch's FSDP1": (
        FUNCTIONS - MODULE | {"nn.Linear", "[nn.Linear]", *NOTHING}
    ),
    "a bool, or a number that divides that of the ranks that share a parameter": BOOLS | INTS - {"0"},
    "a number of bytes, text such as '2GiB', 'auto' or None": SIZES | {"none", "'auto'", "0"},
    "a number of bytes above 0, or text such as '38GiB'": SIZES,
    "a Plan, or the path of a file that holds one": PATHS | {"plan"},
    "'published', the path of a profile, or a Rates": PATHS | {"rates"},
    "a number of at least 0, or inf": ABOVE | {"0", "inf"},
    "a number above 0, or inf": ABOVE | {"inf", "'inf'"},
    "a finite number other than 0": ABOVE | {"-1", "-0.5"},
    "a finite number above 0": ABOVE,
    "a finite number, 0 or more": ABOVE | {"0"},
    "a part of a step, 0 or more": ABOVE | {"0"},
    "a number of bytes": ABOVE | {"0", "-1", "-0.5"},
    "a number of samples, 'auto'": INTS - {"0"} | {"'auto'"},
    "one of ('check', 'broadcast', None)": {"'check'", "none"},
    "one of ('mean', 'sum')": {"'mean'"},
    "one of ('none', 'selective', 'full')": {"'full'"},
    "one of ('live', 'reserved', 'expandable')": set(),
    "'NCCL'": set(),
    "one of ('none', 'all', 'auto')": {"'auto'"},
    "'none', 'selective', 'full', 'auto', or a list of at least one of the first three": {
        *("'full'", "'auto'", "['full']"),
    },
    "one of ('leave', 'broadcast', 'check')": {"'leave'", "'check'"},
    "one of ('ddp', 'zero1', 'zero2', 'keep', 'full')": {"'full'"},
    "one of ('all_gather', 'reduce_scatter', 'all_reduce', 'all_to_all', 'broadcast', 'check', None)": (
        {"'all_gather'", "'check'", "none"}
    ),
    "one of ddp, zero1, zero2, keep, full, hybrid(k) or split(q)": STRATEGY,
    "one of ddp, zero1, zero2, keep, full, hybrid(k) or split(q), a Strategy, or a dict of those by patterns of "
    "parameter names": STRATEGY | {"{'*': 'full'}"},
    "strategies to choose from: one of ddp, zero1, zero2, keep, full, hybrid(k) or split(q), or a list of at least one "
    "of them": STRATEGY | {"['full']"},
    "a list of strategies, one per unit": {"['full']", *NOTHING},
    "a MixedPrecisionPolicy, a dtype, or a dict of those by patterns of parameter names, of floating-point dtypes": (
        PRECISION
    ),
    "a name of dshard.planner.DEVICES, or a Device of your own": TEXTS | {"device kind"},
    "a function of a parameter": FUNCTIONS,
    "a function of an output": FUNCTIONS,
    "a function of a name": FUNCTIONS,
    "a function of a shape": FUNCTIONS,
    "a function of nothing": FUNCTIONS,
    "a function of a batch size": FUNCTIONS,
    "a function of a line": FUNCTIONS,
    "a function of a flat tensor": FUNCTIONS,
    "an object that can be called and has allocate(), as torch's AllGather": {"comm"},
    "an object that can be called and has allocate(), as torch's ReduceScatter": {"comm"},
    "batch sizes to choose from, integers of at least 1": {"[1]", "[2, 4]", *NOTHING},
    "numbers of neighbouring ranks, above 1": {"[2, 4]", *NOTHING},
    "two numbers of bytes or more": {"[2, 4]"},
    "names of modules": {"['x']", "['full']", "['ful']", *NOTHING},
    "names of parameters": {"['x']", "['full']", "['ful']", *NOTHING},
    "a list of UnitCosts": {"[unit]", *NOTHING},
    "a list of ParamCosts": {"[costs]", *NOTHING},
    "a dict of Links by numbers of ranks": {"{}", "{2: links}"},
    "a dict of finite numbers above 0 by names of dtypes": {"{}", "{'x': 2.0}"},
    "a ModelCosts": {"costs"},
    "a Cluster": {"cluster"},
    "a dict of Constants by their names": {"{}"},
    "a Link": {"link"},
    "a Links": {"links"},
    "a Measured": {"measured"},
    "a Trace": {"trace"},
    "a Training": {"training"},
    "a Wire": {"wire"},
    "a WholeSteps": {"whole steps"},
    "an Efficiency": {"efficiency"},
    "a World": {"world"},
    "0, or 1 for one XOR row per group of files": {"0", "1"},
    "texts by names": {"{}", "{'*': 'full'}", "{'*': 'ful'}"},
    "a function of a name, or a mapping of names to names": FUNCTIONS | {"{}", "{'*': 'full'}", "{'*': 'ful'}"},
}
ANYTHING = "anything"


def right_of(allowed: str) -> set[str]:
    """The names of values in the pool that are allowed; written by hand, above."""
    if allowed in RIGHT:
        return RIGHT[allowed]
    return RIGHT[allowed.removesuffix("None").rstrip().removesuffix("or").rstrip(", ")] | {"none"}


def things() -> Things:
    sharded = dshard.fully_shard(nn.Linear(3, 3))
    costs = UnitCosts("unit", (ParamCosts("w", 3, 3),), 1.0, 1.0)
    links_ = Links.of(Link(1.0, 1.0))
    plan = Plan(ModelCosts((costs,)), Cluster(1, 1, links_), (Strategy("full"),))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    return Things(sharded, nn.Linear(3, 3), optimizer, plan)


def calls(on: Things) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Each function of the table, and what it cannot be called without."""
    model, cluster, unit = on.plan.model, on.plan.cluster, on.plan.model.units[0]
    per_step = {"model": model, "strategies": ["full"], "cluster": cluster}
    device, inside = planner.DEVICES["h200"], cluster.inside
    by_hand: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "fully_shard": (dshard.fully_shard, {"module": on.plain}),
        "clip_grad_norm_": (dshard.clip_grad_norm_, {"parameters": on.sharded.parameters(), "max_norm": 1.0}),
        "gathered": (lambda **given: dshard.gathered(**given).__enter__(), {"target": on.sharded}),
        "iter_full": (dshard.iter_full, {"module": on.sharded}),
        "join": (dshard.join, {"module": on.sharded}),
        "no_sync": (dshard.no_sync, {"module": on.sharded}),
        "register_fsdp_forward_method": (
            dshard.register_fsdp_forward_method,
            {"module": on.sharded, "method_name": "forward"},
        ),
        "report": (dshard.report, {"model": on.sharded}),
        "trace": (dshard.trace, {"model": on.sharded}),
        "to_plain": (dshard.to_plain, {"model": on.sharded}),
        "load_state_dict": (on.sharded.load_state_dict, {"state_dict": {}}),
        "set_reduce_scatter_max_input_buffers": (
            on.sharded.set_reduce_scatter_max_input_buffers,
            {"max_input_buffers": 1},
        ),
        **{
            f"set_{name}": (getattr(on.sharded, f"set_{name}"), {name: True})
            for name in (
                *("reshard_after_forward", "requires_gradient_sync"),
                *("requires_all_reduce", "reshard_after_backward"),
            )
        },
        "run_by_some": (dshard.run_by_some, {"runs": True}),
        "set_strategy": (dshard.set_strategy, {"module": on.sharded, "strategy": "full"}),
        "plan": (dshard.plan, {"model": on.plain, "sample_input": torch.ones(1, 3)}),
        "AdamW8bit": (dshard.optim.AdamW8bit, {"params": [on.plain.weight]}),
        "whole": (dshard.optim.whole, {"optimizer": on.optimizer}),
        "full_state_dict": (dshard.interop.full_state_dict, {"module": on.sharded}),
        "Strategy": (Strategy, {"base": "full"}),
        "Strategy.of": (Strategy.of, {}),
        "Strategy.on": (Strategy("full").on, {}),
        "Plan": (Plan, {**per_step}),
        "Plan.replanned": (on.plan.replanned, {"measured": Measured(1.0)}),
        "Cluster": (Cluster, {"num_ranks": 1, "ranks_per_host": 1, "inside": inside}),
        "Link": (Link, {"alpha_s": 1.0, "seconds_per_byte": 1.0}),
        "Links": (Links, dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), inside.all_gather)),
        "ModelCosts": (ModelCosts, {"units": model.units}),
        "ParamCosts": (ParamCosts, {"name": "w", "length": 3, "index_numel": 3}),
        "UnitCosts": (UnitCosts, {"name": "u", "params": unit.params, "forward_s": 1.0, "backward_s": 1.0}),
        "Training": (Training, {}),
        "WholeSteps": (planner.WholeSteps, {}),
        "Measured": (Measured, {"step_s": 1.0}),
        "Wire": (planner.Wire, {"bytes_per_s": 1.0, "latency_s": 0.0}),
        "Efficiency": (planner.Efficiency, {f: getattr(planner.EFFICIENCY, f) for f in TABLE["Efficiency"]}),
        "Device": (planner.Device, {f: getattr(device, f) for f in TABLE["Device"]}),
        "cluster_of": (planner.cluster_of, {"device": device, "num_ranks": 8}),
        "Rates": (planner.Rates, {"constants": planner.published().constants}),
        "Rates.load": (planner.Rates.load, {}),
        "Rates.save": (planner.published().save, {}),
        "measure_step": (planner.measure_step, {"step": names}),
        **{
            name: (getattr(planner, name), per_step)
            for name in ("deferred_step_time", "moments", "peak_bytes", "simulate", "step_time")
        },
        "solve": (planner.solve, per_step),
        "solve_batch": (
            planner.solve_batch,
            {"costs_at": names, "batch_sizes": [1], "cluster": cluster, "strategies": ["full"]},
        ),
        "measure_links": (links.measure_links, {}),
        "World": (World, {"num_ranks": 1}),
        "World.run": (World(1).run, {"fn": names}),
        "WorldPool.get_world": (WorldPool().get_world, {}),
        "WorldPool.run": (WorldPool().run, {"num_ranks": 1, "fn": names}),
        "fake_world": (lambda **given: testing.fake_world(**given).__enter__(), {"rank": 0, "world_size": 1}),
        "expect_error": (expect_error, {"world": World(1), "fn": names}),
        **{
            f"checkpoint.{name}": (getattr(dshard.checkpoint, name), {"directory": "x"}) for name in ("check", "repair")
        },
        **{
            f"checkpoint.{name}": (getattr(dshard.checkpoint, name), {"directory": "x", "model": on.sharded})
            for name in ("save", "load")
        },
        "checkpoint.merge": (dshard.checkpoint.merge, {"checkpoint": "x", "out": "y"}),
        **{
            name: (getattr(dshard, name), {"module": on.sharded, "path_or_dir": "x"})
            for name in ("save_safetensors", "load_safetensors")
        },
    }
    owners = {"CommTrace": dshard.CommTrace(), "Plan": on.plan, "Links": Links}
    for name in TABLE.keys() - by_hand.keys():
        owner, _, method = name.rpartition(".")
        of = owners[owner] if owner else next(o for o in (dshard, planner, testing, on.sharded) if hasattr(o, name))
        by_hand[name] = getattr(of, method), {}
    return by_hand


def digest(on: Things) -> list[Any]:
    """Everything of the modules that a call could change."""
    runtime = on.sharded._context()
    values = [(type(p), id(p), p.full_tensor().tolist()) for p in on.sharded.parameters()]
    units = [(unit.settings, unit.is_gathered) for unit in runtime.units]
    plain = [(type(p), id(p), p.tolist()) for p in on.plain.parameters()]
    return [runtime.settings, units, values, plain, type(on.plain), on.optimizer.state_dict()]


def parts_of(value: Any) -> list[Any]:
    """A value, and what is in it: either may be what is named."""
    if isinstance(value, dict):
        return [value, *value, *value.values()]
    if isinstance(value, MixedPrecisionPolicy):
        return [value, value.param_dtype]
    return [
        value,
        *(
            value
            if isinstance(value, (list, set, nn.ModuleList)) or (type(value) is numpy.ndarray and value.ndim)
            else ()
        ),
    ]


@pytest.fixture(scope="module")
def on() -> Iterator[Things]:
    with fake_world(0, 1):
        yield things()


CHECKS: dict[str, Callable[[Any], Any]] = {
    "a bool": partial(arguments.boolean, "f", "x"),
    "text": partial(arguments.text, "f", "x"),
    "a path, as text or a Path": partial(arguments.path, "f", "x"),
    "an integer of at least 0": partial(arguments.count, "f", "x", least=0),
    "an integer of at least 1": partial(arguments.count, "f", "x"),
    "an nn.Module": partial(arguments.module, "f", "x"),
    "a module that fully_shard was called on": partial(arguments.sharded_module, "f", "x"),
    "a list of modules that fully_shard was called on": partial(arguments.sharded_modules, "f", "x"),
    "an optimizer of torch.optim, or several, or None": partial(arguments.optimizers, "f", "x"),
    "a floating-point dtype": partial(arguments.dtype, "f", "x"),
    "a finite number above 0": partial(arguments.above_0, "f", "x"),
    "a finite number, 0 or more": partial(arguments.from_0, "f", "x"),
    "one of ('mean', 'sum')": lambda value: arguments.choice("f", "x", value, "mean", "sum"),
    "a function of a name": lambda value: arguments.function("f", "x", value, "a name", "Pass one."),
    "one of ddp, zero1, zero2, keep, full, hybrid(k) or split(q)": Strategy.of,
    "one of ddp, zero1, zero2, keep, full, hybrid(k) or split(q), a Strategy, or a dict of those by patterns of "
    "parameter names": partial(policies.read_strategies, "f", "x"),
    "a bool, or a number that divides that of the ranks that share a parameter": partial(policies.read_reshard, "f"),
}


@pytest.mark.parametrize("allowed", CHECKS)
def test_a_check_takes_what_is_right_and_refuses_everything_else(on: Things, allowed):
    for label, value in on.pool().items():
        try:
            CHECKS[allowed](value)
        except dshard.ArgumentError:
            assert label not in right_of(allowed), f"{label} is refused"
        else:
            assert label in right_of(allowed), f"{label} is taken"


OPTIONS = {name: each.default for name, each in inspect.signature(dshard.fully_shard).parameters.items()}


@pytest.mark.parametrize("name", TABLE["fully_shard"])
def test_fully_shard_takes_what_its_arguments_may_be(on: Things, name):
    right = [value for label, value in on.pool().items() if label in right_of(TABLE["fully_shard"][name])]
    assert right
    for value in right:  # none of which raises
        read_modules(value) if name == "module" else read_options({**OPTIONS, name: value})


def test_fully_shard_takes_modules_of_a_generator(on: Things):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    dshard.fully_shard(model.children())
    assert all(isinstance(param, dshard.ShardedTensor) for param in model.parameters())


@pytest.mark.parametrize("who", TABLE)
def test_a_wrong_argument_is_named_with_its_value_and_nothing_is_changed(on: Things, who):
    call, given = calls(on)[who]
    before, pool = digest(on), on.pool()
    for name, allowed in TABLE[who].items():
        for label, value in pool.items() if allowed != ANYTHING else ():
            if label in right_of(allowed):
                continue
            with pytest.raises(dshard.DShardError) as raised:
                call(**{**given, name: value})
            text = str(raised.value)
            assert isinstance(raised.value, dshard.ArgumentError), (label, text)
            assert text.startswith(f"{who}: {name} must be {allowed}, but "), (label, text)
            assert text.endswith("."), (label, text)
            assert any(f"is {shown(each)}. " in text for each in parts_of(value)), (label, text)
    assert digest(on) == before


def test_a_misspelt_text_is_told_what_it_may_mean(on: Things):
    for call, way in [
        (lambda: dshard.fully_shard(on.plain, grad_reduce="meen"), "Pass 'mean'."),  # type: ignore[arg-type]
        (lambda: dshard.fully_shard(on.plain, strategy="zer02"), "Pass 'zero2'."),
        (lambda: dshard.set_strategy(on.sharded, {"*": "fulll"}), "Pass 'full'."),
        (lambda: dshard.fully_shard(on.plain, mp_policy=MixedPrecisionPolicy("fp16")), "Pass torch.float16."),  # type: ignore[arg-type]
        (lambda: planner.device_named("a100-80"), "Pass 'a100-80g'."),
    ]:
        with pytest.raises(dshard.ArgumentError) as raised:
            call()
        assert str(raised.value).endswith(way)


def test_an_argument_error_is_what_such_errors_have_been():
    for kind in (dshard.DShardError, ValueError, TypeError):
        assert issubclass(dshard.ArgumentError, kind)


def test_numbers_of_numpy_and_tensors_are_taken_as_pythons(on: Things):
    on.sharded.set_prefetch(numpy.int64(2))
    assert type(on.sharded._context().settings.prefetch) is int
    on.sharded.set_prefetch(torch.tensor(1))
    on.sharded.set_gradient_divide_factor(numpy.float64(2.0))
    on.sharded.set_requires_gradient_sync(numpy.bool_(True))
    on.sharded.set_reshard_after_forward(torch.tensor(True))
    (unit,) = on.sharded._dshard_units
    assert type(unit.settings.divisor) is float
    assert unit.settings.requires_sync is True
    on.sharded.set_gradient_divide_factor(1.0)
    for largest in (numpy.float32(0.5), torch.tensor(0.5), numpy.array(0.5), 0.5):
        on.sharded.weight.grad = None
        on.sharded(torch.ones(1, 3)).sum().backward()
        dshard.clip_grad_norm_((p for p in on.sharded.parameters()), largest)
        assert float(dshard.clip_grad_norm_(on.sharded.parameters(), math.inf)) == pytest.approx(0.5, rel=1e-5)


def test_a_generator_that_was_used_up_is_warned_of(on: Things):
    params = on.sharded.parameters()
    list(params)
    with pytest.warns(UserWarning, match="clip_grad_norm_: parameters gave no tensor"):
        dshard.clip_grad_norm_(params, 1.0)
    dshard.clip_grad_norm_([], 1.0)


# --- on all ranks alike ---

DIFFERING: dict[str, tuple[Any, Any]] = {
    "max_norm": (1.0, 2.0),
    "norm_type": (2.0, math.inf),
    "error_if_nonfinite": (False, True),
}


DEFAULTS = {2.0: "its default", False: "its default"}


def clipped(name: str, values: tuple[Any, Any], kind: str) -> list[str]:
    """What ranks say of one number, of which each has its own; and whether they go on."""
    torch.manual_seed(0)
    layer = dshard.fully_shard(nn.Linear(4, 4), strategy=kind)
    own = values[dist.get_rank()]

    def step(**given: Any) -> float:
        layer(torch.ones(2, 4)).sum().backward()
        return float(dshard.clip_grad_norm_(layer.parameters(), **{"max_norm": 1.0, **given}))

    before = [p.full_tensor().clone() for p in layer.parameters()]
    with pytest.raises(dshard.DShardError) as raised:
        step(**{name: own})
    assert all(torch.equal(a, b.full_tensor()) for a, b in zip(before, layer.parameters(), strict=True))
    for param in layer.parameters():
        param.grad = None
    step()  # the ranks are where they were
    return [type(raised.value).__name__, str(raised.value)]


@pytest.mark.parametrize("name", DIFFERING)
@pytest.mark.parametrize("kind", ["full", "ddp", "zero1"])
def test_numbers_of_clipping_that_differ_are_named_on_every_rank(worlds: WorldPool, name, kind):
    values = DIFFERING[name]
    for rank, (error, text) in enumerate(worlds.run(2, clipped, name, values, kind)):
        assert error == "DivergenceError"
        here, there = (
            DEFAULTS.get(value, value) if name != "max_norm" else value for value in (values[rank], values[1 - rank])
        )
        assert text == (
            f"clip_grad_norm_: all ranks must pass the same {name}, but it is {here} on this rank and {there} on rank "
            f"{1 - rank}. Pass what does not depend on the rank."
        )


@pytest.mark.parametrize(("name", "wrong"), [("max_norm", math.nan), ("max_norm", -1.0), ("norm_type", 0)])
def test_a_number_that_is_wrong_on_one_rank_alone_ends_all_of_them(worlds: WorldPool, name, wrong):
    right = 2.0
    (first, text), (second, own) = worlds.run(2, clipped, name, (right, wrong), "full")
    assert (first, second) == ("DivergenceError", "ArgumentError")
    here = DEFAULTS[right] if name == "norm_type" else right
    assert f"the same {name}, but it is {here} on this rank and {shown(wrong)} on rank 1. " in text
    assert own.startswith(f"clip_grad_norm_: {name} must be ")


def switched(strategies: tuple[Any, Any]) -> list[str]:
    layer = dshard.fully_shard(nn.Linear(4, 4))
    with pytest.raises(dshard.DShardError) as raised:
        dshard.set_strategy(layer, strategies[dist.get_rank()])
    dshard.set_strategy(layer, "ddp")
    layer(torch.ones(1, 4)).sum().backward()
    return [type(raised.value).__name__, str(raised.value)]


def test_a_strategy_that_differs_or_is_none_on_one_rank_ends_all_of_them(worlds: WorldPool):
    for error, text in worlds.run(2, switched, ("ddp", "full")):
        assert (error, text.count("'*: ddp'"), text.count("'*: full'")) == ("DivergenceError", 1, 1)
    (first, text), (second, own) = worlds.run(2, switched, ("ddp", "zero9"))
    assert (first, second) == ("DivergenceError", "ArgumentError")
    assert "rank 1 raised there: ArgumentError: set_strategy: strategy must be one of" in text
    assert own.endswith("but it is 'zero9'. Pass 'zero2'.")


def ranks_per_node() -> list[str]:
    with pytest.raises(dshard.DShardError) as raised:
        dshard.init_hybrid_mesh(1.5 if dist.get_rank() else 1)  # type: ignore[arg-type]
    dist.barrier()
    return [type(raised.value).__name__, str(raised.value)]


def test_a_wrong_number_of_ranks_on_one_rank_ends_all_of_them(worlds: WorldPool):
    (first, text), (second, own) = worlds.run(2, ranks_per_node)
    assert (first, second) == ("StateError", "ArgumentError")
    assert text.startswith("init_hybrid_mesh: every node must have the same number of ranks")
    assert own.startswith("init_hybrid_mesh: ranks_per_node must be an integer of at least 1 or None, but it is 1.5. ")


def clipped_over_replicas(max_norms: list[float]) -> str:
    layer = dshard.fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2, 2)))
    layer(torch.ones(2, 4)).sum().backward()
    try:
        return f"{float(dshard.clip_grad_norm_(layer.parameters(), max_norms[dist.get_rank()])):.3f}"
    except dshard.DivergenceError as error:
        dist.barrier()
        return str(error)


@pytest.mark.parametrize("rank", range(4))
def test_replicas_hear_of_it_too_whichever_rank_it_is(worlds: WorldPool, rank):
    for text in worlds.run(4, clipped_over_replicas, [1.0 if each != rank else 2.0 for each in range(4)]):
        assert text.startswith("clip_grad_norm_: all ranks must pass the same max_norm, but it is ")


def divided(kind: str) -> str:
    layer: Any = dshard.fully_shard(nn.Linear(4, 4), strategy=kind)
    layer.set_gradient_divide_factor(2.0 + dist.get_rank())
    try:
        layer(torch.ones(2, 4)).sum().backward()
        return str([p.grad.full_tensor() for p in layer.parameters()])
    except dshard.DivergenceError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["full", "ddp", "zero1", "split(2)"])
def test_a_divide_factor_that_differs_is_named_on_every_rank(worlds: WorldPool, kind):
    for rank, text in enumerate(worlds.run(2, divided, kind)):
        assert f"the same divide_factor, but it is {2.0 + rank} on this rank and {3.0 - rank} on rank" in text
