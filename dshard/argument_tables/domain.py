"""Kinds of arguments that belong to sharded training: modules, meshes, policies, strategies, costs."""

import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from dshard.arguments import nearest
from dshard.errors import ArgumentError
from dshard.kinds import (
    PATH,
    TEXT,
    Kind,
    Refused,
    either,
    instance,
    kind,
    list_of,
    mapping_of,
    number,
    one_of,
    ours,
)
from dshard.policies import STRATEGY_ALLOWED, Strategy, read_bytes, read_strategy

_DTYPES = {
    "bf16": "torch.bfloat16",
    "bfloat16": "torch.bfloat16",
    "fp16": "torch.float16",
    "half": "torch.float16",
    "float16": "torch.float16",
    "fp32": "torch.float32",
    "float32": "torch.float32",
}


def _read_strategy(value: Any) -> Strategy:
    try:
        return read_strategy("", "", value)
    except ArgumentError as error:
        raise Refused(value, way=str(error).rpartition(". ")[2]) from None


STRATEGY = Kind(STRATEGY_ALLOWED, "Pass 'full'.", _read_strategy)


def _dtype(value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise Refused(value, way=f"Pass {_DTYPES[nearest(value, _DTYPES)]}.")
    return value


def _device(value: Any) -> Any:
    if isinstance(value, torch.device):
        return value
    try:
        if isinstance(value, str):
            torch.device(value)
            return value
    except RuntimeError:
        pass
    raise Refused(value)


def _strategy(value: Any) -> Any:
    if type(value).__name__ == "Plan":
        raise Refused(value, way="Pass plan= instead.")
    return STRATEGY.read(value)


# --- torch's ---
FLOAT = Kind("a floating-point dtype", "Pass torch.bfloat16.", _dtype)
DTYPE = instance(torch.dtype, "a dtype", "Pass torch.bfloat16.")
DEVICE = Kind("a torch.device or its text", "Pass 'cpu'.", _device)
MESH = instance(
    DeviceMesh, "a DeviceMesh", "Pass init_device_mesh(device_type, (num_ranks,)), or leave it out for all ranks."
)
SOME_STRATEGIES = either(
    Kind("", STRATEGY.way, _strategy),
    list_of(STRATEGY, "a list", "Pass ('ddp', 'full').", least=1),
    allowed=f"strategies to choose from: {STRATEGY.allowed}, or a list of at least one of them",
)
PER_UNIT = list_of(STRATEGY, "a list of strategies, one per unit", "Pass one per unit.")
MEMORY = kind(
    "a number of bytes above 0, or text such as '38GiB'", "Pass '38GiB'.", lambda value: bool(read_bytes(value))
)
PROFILE = either(ours("Rates", "Pass 'published'."), PATH, allowed="'published', the path of a profile, or a Rates")
ABOVE_0 = number("a finite number above 0", "Pass 1.0.", lambda value: 0 < value < math.inf)
FROM_0 = number("a finite number, 0 or more", "Pass 0.", lambda value: 0 <= value < math.inf)
BYTES = number("a number of bytes, 0 or more", "Pass 0.", lambda value: 0 <= value < math.inf)
SIGNED_BYTES = number("a number of bytes", "Pass None.", math.isfinite)
MARGIN = number("a part of a step, 0 or more", "Pass 0 for the fastest plan.", lambda value: 0 <= value < math.inf)
CLUSTER = ours("Cluster", "Pass dshard.planner.cluster_of(device, 512), or what measure_links gave.")
COSTS = ours("ModelCosts", "Pass dshard.planner.ModelCosts(...).", "the ModelCosts of a model")
LINKS = ours("Links", "Pass dshard.planner.Links(...).")
LINK = ours("Link", "Pass dshard.planner.Link(...).")
WIRE = ours("Wire", "Pass dshard.planner.Wire(bytes_per_s, latency_s).")
MEASURED = ours("Measured", "Pass what dshard.planner.measure_step gave.")
DEVICE_OR_NAME = either(
    ours("Device", "Pass 'a100-80g'."), TEXT, allowed="a name of dshard.planner.DEVICES, or a Device of your own"
)
BY_NUM_RANKS = mapping_of(LINKS, "a dict of Links by numbers of ranks", "Leave it out.", keys=int)
UNITS = list_of(ours("UnitCosts", ""), "a list of UnitCosts", "Pass [UnitCosts(...)].")
CONSTANTS = mapping_of(ours("Constant", ""), "a dict of Constants by their names", "Pass Rates.load(path).constants.")
WORK = list_of(ours("Work", ""), "a list of Work", "Leave it out.")
MISSES = list_of(ours("Misses", ""), "a list of Misses", "Leave it out.")
PARAM_COSTS = list_of(ours("ParamCosts", ""), "a list of ParamCosts", "Pass [ParamCosts(...)].")
CHECKPOINTING = one_of("none", "selective", "full")
OFFLOADED_UNITS = one_of("none", "all", "auto")
MEMORY_OF = one_of("live", "reserved", "expandable")
SOME_CHECKPOINTING = either(
    one_of("none", "selective", "full", "auto"),
    list_of(CHECKPOINTING, "a list", "Pass ('none', 'full').", least=1),
    allowed="'none', 'selective', 'full', 'auto', or a list of at least one of the first three",
)
PROGRESS = kind("an object with at()", "Leave it out.", lambda value: callable(getattr(value, "at", None)))
RATES = mapping_of(ABOVE_0, "a dict of finite numbers above 0 by names of dtypes", "Pass {'bfloat16': 312e12}.")
