"""The arguments of `fully_shard`: what each may be, and what all ranks must pass alike."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dshard import arguments
from dshard.errors import StateError
from dshard.policies import Offload, StrategyRules, read_bytes, read_reshard, read_strategies
from dshard.runtime.module import FSDPModule
from dshard.setup.auto_units import UnitSpec
from dshard.setup.specs import device_of
from dshard.units.placing import PlacementFn, replicated

if TYPE_CHECKING:  # loaded where a plan is given
    from dshard.planner import Plan


@dataclass(frozen=True, slots=True)
class Options:
    """The keyword arguments of one call of `fully_shard`, as they were given; `fully_shard` documents them."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: PlacementFn | None
    mp_policy: Any
    offload_policy: Any
    ignored_params: Collection[nn.Parameter] | None
    dp_mesh_dims: Any
    sync: Any
    grad_reduce: Any
    buffers: Any
    memory_budget: Any
    auto_wrap_policy: Any
    strategy: Any
    plan: Any

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            StateError: As said.
        """
        has_reshard, has_strategy = self.reshard_after_forward is not None, self.strategy is not None
        others = ("strategy", "reshard_after_forward", "memory_budget", "auto_wrap_policy")
        both = next((name for name in others if getattr(self, name) is not None), None)
        if self.plan is not None and both is not None:
            raise StateError(
                f"fully_shard: a plan says how each unit is cut and gathered, but {both} is given, too. Leave it out."
            )
        if has_strategy and has_reshard:
            raise StateError(
                "fully_shard: strategy says when gathered copies are freed, but reshard_after_forward is given, too "
                f"({self.strategy!r} and {self.reshard_after_forward!r}). Leave one of them out."
            )

    @property
    def ignored(self) -> set[nn.Parameter]:
        """Parameters to leave alone."""
        return set(self.ignored_params or ())

    @property
    def of_model(self) -> dict[str, Any]:
        """What is chosen for the whole model, by the names of `ModelSettings`; what is None stays as it was."""
        budget = self.memory_budget if self.memory_budget in (None, "auto") else read_bytes(self.memory_budget)
        return {} if budget is None else {"memory_budget": budget}

    @property
    def placement_fn(self) -> PlacementFn | None:
        """How parameters are cut; `dp_mesh_dims` may name no dims to shard over.

        Raises:
            StateError: Then there is nothing to say for a function.
        """
        dims = self.dp_mesh_dims
        if dims is None or dims.shard is not None:
            return self.shard_placement_fn
        if self.shard_placement_fn is not None:
            raise StateError(
                "fully_shard: shard_placement_fn says how a parameter is cut, but dp_mesh_dims names no dims to shard "
                f"over ({dims}). Leave one of them out."
            )
        return replicated

    @property
    def offloads(self) -> bool:
        """Whether parameters are to be kept elsewhere than on a mesh's devices, unless these are CPUs."""
        return isinstance(self.offload_policy, Offload) or type(self.offload_policy).__name__ == "CPUOffloadPolicy"

    def offload_on(self, mesh: DeviceMesh) -> Offload | None:
        """What the offload policy asks for on a mesh; None where a parameter is kept where it is used."""
        if isinstance(self.offload_policy, Offload):  # of any two devices
            return self.offload_policy
        if not self.offloads or mesh.device_type == "cpu":
            return None
        policy = self.offload_policy  # torch's own has no defer_step
        defers_step = getattr(policy, "defer_step", True)
        return Offload(torch.device("cpu"), device_of(mesh), pins=policy.pin_memory, defers_step=defers_step)


@dataclass(frozen=True, slots=True)
class Followed:
    """What decides how a model is sharded.

    Args:
        strategies: Of its parameters, by their names in it.
        plan: That says so; None where none was given.
        choices: What of the plan is followed, unit by unit, as all ranks must have it alike.
        units: Of the plan, but for that of the root.
        away: Names of the parameters that an offload policy is for; None for all.
    """

    strategies: StrategyRules
    plan: "Plan | None" = None
    choices: Sequence[str] = ()
    units: tuple[UnitSpec, ...] = ()
    away: frozenset[str] | None = None


def checked_modules(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that a call is for, each once.

    Raises:
        StateError: One was sharded before.
    """
    modules = [module] if isinstance(module, nn.Module) else list(dict.fromkeys(module))
    for each in modules:
        if isinstance(each, FSDPModule):
            raise StateError(
                f"fully_shard: a module can be sharded once, but this {type(each).__name__} already is. Call "
                "fully_shard on each module once, children first."
            )
    return modules


_WHO = "fully_shard"
_PRECISION = (
    "a MixedPrecisionPolicy, a dtype, or a dict of those by patterns of parameter names, of floating-point dtypes"
)


def read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the arguments of a call of `fully_shard`.

    Returns:
        The keyword arguments, without `module`.

    Raises:
        ArgumentError: An argument is none of what it may be.
    """
    found = {name: value for name, value in given.items() if name != "module"}
    mesh, policy, plan = found["mesh"], found["auto_wrap_policy"], found["plan"]
    way = "Pass init_device_mesh(device_type, (num_ranks,)), or leave it out for all ranks."
    arguments.instance(_WHO, "mesh", mesh, DeviceMesh, way, or_none=True)
    found["reshard_after_forward"] = read_reshard(_WHO, found["reshard_after_forward"], or_none=True)
    way = "Pass a function that returns Shard(dim), as in lambda param: Shard(1)."
    placement = found["shard_placement_fn"]
    arguments.function(_WHO, "shard_placement_fn", placement, "a parameter", way, or_none=True)
    _check_precision(found["mp_policy"])
    offload, allowed = found["offload_policy"], "an OffloadPolicy, a CPUOffloadPolicy"
    way = "Pass CPUOffloadPolicy(), or leave it out."
    arguments.expect(_is_offload(offload), _WHO, "offload_policy", offload, allowed, way, or_none=True)
    if found["ignored_params"] is not None:
        allowed, way = "a set or list of parameters, or None", "Pass {module.weight}, for example."
        found["ignored_params"] = arguments.several(
            _WHO, "ignored_params", found["ignored_params"], lambda each: isinstance(each, Tensor), allowed, way
        )
    dims, way = found["dp_mesh_dims"], "Pass DataParallelMeshDims(shard='dp')."
    arguments.expect(_is_mesh_dims(dims), _WHO, "dp_mesh_dims", dims, "a DataParallelMeshDims", way, or_none=True)
    arguments.choice(_WHO, "sync", found["sync"], "check", "broadcast", None)
    arguments.choice(_WHO, "grad_reduce", found["grad_reduce"], "mean", "sum")
    arguments.choice(_WHO, "buffers", found["buffers"], "leave", "broadcast", "check")
    budget = found["memory_budget"]
    has_budget = budget is None or (isinstance(budget, str) and budget == "auto") or read_bytes(budget) is not None
    allowed = "a number of bytes, text such as '2GiB', 'auto' or None"
    arguments.expect(has_budget, _WHO, "memory_budget", budget, allowed, "Pass 0 to keep nothing.")
    allowed = "module classes, a function of a module, or a policy of torch's FSDP1"
    way = "Pass the class of the repeated block, as in {nn.TransformerEncoderLayer}."
    arguments.expect(_is_wrap_policy(policy), _WHO, "auto_wrap_policy", policy, allowed, way, or_none=True)
    found["strategy"] = read_strategies(_WHO, "strategy", found["strategy"], or_none=True)
    if plan is not None and not arguments.is_of(plan, "Plan"):
        allowed, way = "a Plan, or the path of a file that holds one, or None", "Pass what dshard.plan gave."
        arguments.expect(arguments.is_path(plan), _WHO, "plan", plan, allowed, way)
    return found


def read_modules(module: Any) -> Any:
    """Check the argument `module` of `fully_shard`; return a module, or a tuple of those in an iterable.

    Raises:
        ArgumentError: It is neither.
    """
    if isinstance(module, nn.Module):
        return module
    allowed, way = "an nn.Module, or a list or tuple of at least one", "Pass the model."
    return arguments.several(_WHO, "module", module, lambda each: isinstance(each, nn.Module), allowed, way, least=1)


def _check_precision(policy: Any, inside: str = "it") -> None:
    """Refuse what is no policy of mixed precision, no dtype and no dict of those."""
    if isinstance(policy, Mapping) and inside == "it":
        for key, each in policy.items():
            way = "Pass MixedPrecisionPolicy(param_dtype=...)."
            arguments.expect(isinstance(key, str), _WHO, "mp_policy", key, _PRECISION, way, inside="a key of it")
            _check_precision(each, f"for {key!r} it")
        return
    fields = ("param_dtype", "reduce_dtype", "output_dtype")
    if policy is None or isinstance(policy, torch.dtype):
        dtypes = {inside: policy}
    else:
        has_fields = not isinstance(policy, (str, type)) and all(hasattr(policy, field) for field in fields)
        way = "Pass MixedPrecisionPolicy(param_dtype=...)."
        arguments.expect(has_fields, _WHO, "mp_policy", policy, _PRECISION, way, inside=inside)
        its = f"{inside.removesuffix('it')}its"
        dtypes = {f"{its} {field}": getattr(policy, field) for field in fields}
        casts = getattr(policy, "cast_forward_inputs", True)
        place = f"{its} cast_forward_inputs"
        arguments.expect(
            isinstance(casts, bool), _WHO, "mp_policy", casts, _PRECISION, "Pass True or False.", inside=place
        )
    for place, dtype in dtypes.items():
        is_right = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        arguments.expect(is_right, _WHO, "mp_policy", dtype, _PRECISION, arguments.dtype_way(dtype), inside=place)


def _is_offload(value: Any) -> bool:
    known = type(value).__name__ in ("OffloadPolicy", "CPUOffloadPolicy")
    flags = [getattr(value, name, True) for name in ("pin_memory", "defer_step")]
    return isinstance(value, Offload) or (known and all(isinstance(flag, bool) for flag in flags))


def _is_mesh_dims(value: Any) -> bool:
    def is_name(each: Any) -> bool:
        names = each if isinstance(each, tuple) else (each,)
        return each is None or (bool(names) and all(isinstance(name, str) for name in names))

    return all(hasattr(value, each) and is_name(getattr(value, each)) for each in ("shard", "replicate"))


def _is_wrap_policy(value: Any) -> bool:
    if isinstance(value, type):
        return issubclass(value, nn.Module)
    if isinstance(value, (str, bytes, Mapping, nn.Module)) or hasattr(value, "shape"):
        return False
    if isinstance(value, Collection):
        return all(isinstance(each, type) and issubclass(each, nn.Module) for each in value)
    return callable(value) or hasattr(value, "_run_policy")
