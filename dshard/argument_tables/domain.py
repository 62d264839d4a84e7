"""Kinds of arguments that belong to sharded training: modules, meshes, policies, strategies, costs."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer

from dshard.arguments import nearest
from dshard.errors import ArgumentError
from dshard.kinds import (
    FLAG,
    MODULE,
    PATH,
    TEXT,
    Kind,
    Refused,
    count,
    either,
    function,
    instance,
    kind,
    list_of,
    mapping_of,
    number,
    one_of,
    ours,
)
from dshard.policies import STRATEGY_ALLOWED, Offload, Strategy, read_bytes, read_strategy

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


def _precision(value: Any) -> Any:
    """One policy of mixed precision, or a dtype."""
    fields = ("param_dtype", "reduce_dtype", "output_dtype")
    if value is None or isinstance(value, torch.dtype):
        return value if value is None else _dtype(value)
    if isinstance(value, (str, type)) or not all(hasattr(value, field) for field in fields):
        raise Refused(value)
    for field in fields:
        if (dtype := getattr(value, field)) is not None:
            try:
                _dtype(dtype)
            except Refused as refused:
                raise Refused(dtype, f"its {field}", refused.way) from None
    if not isinstance(casts := getattr(value, "cast_forward_inputs", True), bool):
        raise Refused(casts, "its cast_forward_inputs", "Pass True or False.")
    return value


def _is_offload(value: Any) -> bool:
    known = type(value).__name__ in ("OffloadPolicy", "CPUOffloadPolicy")
    return isinstance(value, Offload) or (known and isinstance(getattr(value, "pin_memory", True), bool))


def _is_wrap_policy(value: Any) -> bool:
    if isinstance(value, type):
        return issubclass(value, nn.Module)
    if isinstance(value, (str, bytes, Mapping, nn.Module)) or hasattr(value, "shape"):
        return False
    if isinstance(value, Collection):
        return all(isinstance(each, type) and issubclass(each, nn.Module) for each in value)
    return callable(value) or hasattr(value, "_run_policy")


def _is_mesh_dims(value: Any) -> bool:
    def is_name(each: Any) -> bool:
        names = each if isinstance(each, tuple) else (each,)
        return each is None or (bool(names) and all(isinstance(name, str) for name in names))

    return all(hasattr(value, each) and is_name(getattr(value, each)) for each in ("shard", "replicate"))


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


def comm(of: str) -> Kind:
    """What takes the place of a collective, as torch's interface of that name."""
    return kind(
        f"an object that can be called and has allocate(), as torch's {of}",
        f"Pass an instance of a subclass of torch.distributed.fsdp._fully_shard._fsdp_api.{of}.",
        lambda value: callable(value) and callable(getattr(value, "allocate", None)) and not isinstance(value, type),
    )


# --- torch's ---
FLOAT = Kind("a floating-point dtype", "Pass torch.bfloat16.", _dtype)
DTYPE = instance(torch.dtype, "a dtype", "Pass torch.bfloat16.")
DEVICE = Kind("a torch.device or its text", "Pass 'cpu'.", _device)
MESH = instance(
    DeviceMesh, "a DeviceMesh", "Pass init_device_mesh(device_type, (num_ranks,)), or leave it out for all ranks."
)
MESH_DIMS = kind("a DataParallelMeshDims", "Pass DataParallelMeshDims(shard='dp').", _is_mesh_dims)
OFFLOAD = kind("an OffloadPolicy, a CPUOffloadPolicy", "Pass CPUOffloadPolicy(), or leave it out.", _is_offload)
WRAP_POLICY = kind(
    "module classes, a function of a module, or a policy of torch's FSDP1",
    "Pass the class of the repeated block, as in {nn.TransformerEncoderLayer}.",
    _is_wrap_policy,
)
MODULES = either(
    MODULE,
    list_of(MODULE, "a list", "Pass the model.", least=1),
    allowed="an nn.Module, or a list or tuple of at least one",
)
SHARDED = ours("FSDPModule", "Call fully_shard on it first.", "a module that fully_shard was called on")
ALL_SHARDED = list_of(SHARDED, "a list of modules that fully_shard was called on", "Pass [model].")
PARAMS = list_of(
    instance(torch.Tensor, "a parameter", ""), "a set or list of parameters", "Pass {module.weight}, for example."
)
GATHERED = either(
    MODULE,
    ours("ShardedTensor", "Pass the model."),
    list_of(ours("ShardedTensor", "Pass the model."), "several", "Pass the model.", least=1),
    allowed="a module that fully_shard was called on, one of its parameters, or a list of them",
)
OPTIMIZER = instance(Optimizer, "an optimizer of torch.optim", "Leave it out: states move ahead of its next step.")
OPTIMIZERS = either(
    Kind("", OPTIMIZER.way, lambda value: (OPTIMIZER.read(value),)),
    list_of(OPTIMIZER, "several", ""),
    allowed="an optimizer of torch.optim, or several",
)
STRATEGIES = either(
    Kind("", STRATEGY.way, _strategy),
    mapping_of(STRATEGY, "a dict", "", least=1),
    allowed=f"{STRATEGY.allowed}, a Strategy, or a dict of those by patterns of parameter names",
)
SOME_STRATEGIES = either(
    Kind("", STRATEGY.way, _strategy),
    list_of(STRATEGY, "a list", "Pass ('ddp', 'full').", least=1),
    allowed=f"strategies to choose from: {STRATEGY.allowed}, or a list of at least one of them",
)
PER_UNIT = list_of(STRATEGY, "a list of strategies, one per unit", "Pass one per unit.")
PRECISION = Kind(
    "a MixedPrecisionPolicy, a dtype, or a dict of those by patterns of parameter names, of floating-point dtypes",
    "Pass MixedPrecisionPolicy(param_dtype=...).",
    either(Kind("", "", _precision), mapping_of(Kind("", "", _precision), "", "")).read,
)
RESHARD = either(FLAG, count(1), allowed="a bool, or a number that divides that of the ranks that share a parameter")
BUDGET = kind(
    "a number of bytes, text such as '2GiB', 'auto' or None",
    "Pass 0 to keep nothing.",
    lambda value: value is None or (isinstance(value, str) and value == "auto") or read_bytes(value) is not None,
)
MEMORY = kind(
    "a number of bytes above 0, or text such as '38GiB'", "Pass '38GiB'.", lambda value: bool(read_bytes(value))
)
PLAN_OR_PATH = either(
    ours("Plan", "Pass what dshard.plan gave."), PATH, allowed="a Plan, or the path of a file that holds one"
)
PROFILE = either(ours("Rates", "Pass 'published'."), PATH, allowed="'published', the path of a profile, or a Rates")
ABOVE_0 = number("a finite number above 0", "Pass 1.0.", lambda value: 0 < value < math.inf)
FROM_0 = number("a finite number, 0 or more", "Pass 0.", lambda value: 0 <= value < math.inf)
BYTES = number("a number of bytes, 0 or more", "Pass 0.", lambda value: 0 <= value < math.inf)
SIGNED_BYTES = number("a number of bytes", "Pass None.", math.isfinite)
MARGIN = number("a part of a step, 0 or more", "Pass 0 for the fastest plan.", lambda value: 0 <= value < math.inf)
FACTOR = number("a finite number other than 0", "Pass 1.0.", lambda value: math.isfinite(value) and value != 0)
LARGEST_NORM = number("a number of at least 0, or inf", "Pass 1.0.", lambda value: value >= 0)
NORM = number("a number above 0, or inf", "Pass 2.0 or inf.", lambda value: value > 0)
ORDER = Kind(
    NORM.allowed, NORM.way, lambda value: math.inf if isinstance(value, str) and value == "inf" else NORM.read(value)
)
CLUSTER = ours("Cluster", "Pass dshard.planner.cluster_of(device, 512), or what measure_links gave.")
COSTS = ours("ModelCosts", "Pass dshard.planner.ModelCosts(...).", "the ModelCosts of a model")
LINKS = ours("Links", "Pass dshard.planner.Links(...).")
LINK = ours("Link", "Pass dshard.planner.Link(...).")
WIRE = ours("Wire", "Pass dshard.planner.Wire(bytes_per_s, latency_s).")
MEASURED = ours("Measured", "Pass what dshard.planner.measure_step gave.")
TRACE = ours("Trace", "Pass what dshard.trace gave.")
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
CALLABLE = kind("a function", "Pass a function of a module.", callable)
PARITY = number("0, or 1 for one XOR row per group of files", "Pass 0 or 1.", lambda value: value in (0, 1))
METADATA = mapping_of(TEXT, "texts by names", "Convert values with json.dumps.")
RENAME = either(
    function("a name", "Pass one, as in lambda name: name."),
    mapping_of(TEXT, "a mapping of names to names", "Pass {'old': 'new'}."),
    allowed="a function of a name, or a mapping of names to names",
)
