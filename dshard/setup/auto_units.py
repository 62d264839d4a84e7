"""Which modules become units: by a policy, or found in the model."""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from dshard.arguments import call_given
from dshard.errors import StateError, UnsupportedOpError
from dshard.runtime.module import FSDPModule
from dshard.tensor import ShardedTensor
from dshard.units.context import UnitSettings

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
WRAPPED = "_checkpoint_wrapped_module"  # what torch's checkpoint_wrapper calls the module inside
_ROUTING = (nn.AdaptiveLogSoftmaxWithLoss,)  # they run those of their parts that the data of a rank needs
ENOUGH_BYTES = 4 << 20  # to send them takes gloo about as long as to start a collective
_NUM_SMALL = 10  # into about this many units a model of small parts is cut
_DUST = 64  # what is smaller than a unit of small parts by this does not count as a neighbour
_SLACK = 32  # two neighbours may grow by one part in so many: a norm or a bias


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """A unit to be.

    Args:
        label: Its name, for messages: that of its first module, or those of the first and last.
        modules: In whose forward it is in use.
        params: Its parameters, plain ones or sharded already.
        settings: What is chosen for it.
    """

    label: str
    modules: tuple[nn.Module, ...]
    params: tuple[Any, ...]
    settings: UnitSettings = field(default_factory=UnitSettings)

    @property
    def num_bytes(self) -> int:
        """Bytes of its full parameters."""
        return sum(p.numel() * p.element_size() for p in self.params)

    def joined(self, other: "UnitSpec") -> "UnitSpec":
        """Both as one."""
        label = f"{self.label.partition('..')[0]}..{other.label.rpartition('..')[2]}"
        return UnitSpec(label, self.modules + other.modules, self.params + other.params)

    def __repr__(self) -> str:
        numel = sum(param.numel() for param in self.params)
        chosen = {name: getattr(self.settings, name) for name in self.settings.changed}
        return f"UnitSpec({self.label!r}, {len(self.params)} parameters of {numel:,} elements, {chosen})"


def find_units(
    root: nn.Module, params: Sequence[Tensor], name: str, *, least_bytes: int | None = None
) -> list[UnitSpec]:
    """Cut the parameters of a model into units, by its structure and sizes alone, so that all ranks find the same.

    1. Into parts, in the order in which modules are registered: the elements of the outermost lists, and outside of
       lists the largest modules that are no larger than a block.
    2. Neighbours too small for a collective of their own are put together, as long as no two neighbouring units, of
       which one is in use while the other is on its way, become larger than the largest two were.
    3. What several parts share, and what modules hold whose children became parts, stays with the root; a root that
       routes by data stays whole.

    Args:
        root: The model.
        params: Its parameters that are to be cut into units, in order.
        name: Label of what stays with the root.
        least_bytes: Of a unit that is worth a collective of its own; by default that depends on the size of the model.

    Returns:
        Plans that hold each of `params` once, the root's last.
    """
    wanted = {id(p): p for p in params}
    parts: dict[nn.Module, str] = {}
    for label, part in _parts(root, "", wanted, _largest_block(root, wanted)):
        parts.setdefault(part, label)  # a list of blocks may have several names
    found = _with_own_params(root, parts, wanted)
    enough = min(ENOUGH_BYTES, sum(part.num_bytes for part in found) // _NUM_SMALL)
    plans = _merge(found, enough if least_bytes is None else least_bytes)
    if len(plans) < 2:
        plans = []
    taken = {id(p) for plan in plans for p in plan.params}
    rest = tuple(p for p in params if id(p) not in taken)
    return [*plans, UnitSpec(name, (root,), rest)] if rest else plans


def _largest_block(root: nn.Module, wanted: Container[int]) -> int:
    """Bytes of the largest element of a list; where lists hold little of a model, an eighth of it."""
    blocks = [_num_bytes(block, wanted) for block in dict.fromkeys(_blocks(root, wanted))]
    total = _num_bytes(root, wanted)
    return max([total // 8 if 2 * sum(blocks) < total else 0, *blocks])


def _blocks(module: nn.Module, wanted: Container[int]) -> Iterator[nn.Module]:
    """Elements of the outermost lists; a list inside a list is looked into."""
    if _is_whole(module, wanted):
        return
    for child in module.children():
        if _is_list(module) and not _is_list(child):
            yield child
        else:
            yield from _blocks(child, wanted)


def _is_list(module: nn.Module) -> bool:
    """Whether it holds blocks; torch's wrapper that checkpoints it changes nothing."""
    return isinstance(module._modules.get(WRAPPED, module), _CONTAINERS)


def _is_whole(module: nn.Module, wanted: Container[int]) -> bool:
    """Whether parts of a module are not to be units of their own."""
    if isinstance(module, _ROUTING):
        return True
    own = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False) if id(p) in wanted)
    return 2 * own >= _num_bytes(module, wanted)  # attention with weights in one, a leaf


def _parts(module: nn.Module, prefix: str, wanted: Container[int], limit: int) -> Iterator[tuple[str, nn.Module]]:
    """Modules that cover a model, but for what those that are cut hold themselves."""
    if isinstance(module, _ROUTING):
        return  # the root itself is one
    for name, child in module.named_children():
        is_list = _is_list(child)
        is_block = _is_list(module) and not is_list
        runs = type(child).forward is not nn.Module.forward and not is_list  # whoever iterates a list does not call it
        if is_block or _is_whole(child, wanted) or (runs and _num_bytes(child, wanted) <= limit):
            yield prefix + name, child
        else:
            yield from _parts(child, f"{prefix}{name}.", wanted, limit)


def _with_own_params(root: nn.Module, parts: Mapping[nn.Module, str], wanted: Mapping[int, Tensor]) -> list[UnitSpec]:
    """Each part with the parameters that nothing outside of it holds; those that have any."""
    inside = {id(m) for part in parts for m in part.modules()}
    holders = [*(part.parameters() for part in parts)]
    holders += [m.parameters(recurse=False) for m in root.modules() if id(m) not in inside]
    uses = Counter(key for holder in holders for key in {id(p) for p in holder})
    plans = []
    for part, label in parts.items():
        mine = [wanted[id(p)] for p in part.parameters() if id(p) in wanted and uses[id(p)] == 1]
        if mine:
            plans.append(UnitSpec(label, (part,), tuple(mine)))
    return plans


def _num_bytes(module: nn.Module, wanted: Container[int]) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters() if id(p) in wanted)


def _merge(parts: Sequence[UnitSpec], enough: int) -> list[UnitSpec]:
    """Put neighbours together until a unit is worth a collective: has `enough` bytes."""
    sizes = [part.num_bytes for part in parts]
    dust = enough // _DUST  # a norm: that one lies between two blocks makes them no less neighbours
    large = [size for size in sizes if size >= dust]
    room = max([2 * enough, *sizes, *(a + b for a, b in pairwise(large))])
    room += room // _SLACK
    plans: list[UnitSpec] = []
    filled: list[int] = []
    for i, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        before = next((f for f in reversed(filled[:-1]) if f >= dust), 0)
        after = next((s for s in sizes[i + 1 :] if s >= dust), 0)
        fits = bool(filled) and size + filled[-1] + max(before, after) <= room
        if fits and (filled[-1] < enough or (i == len(parts) - 1 and size < enough)):
            plans[-1] = plans[-1].joined(part)
            filled[-1] += size
        else:
            plans.append(part)
            filled.append(size)
    return plans


AutoWrapPolicy = Callable[..., Any] | Collection[type[nn.Module]]

_RESHARDS = {ShardingStrategy.FULL_SHARD: True, ShardingStrategy.SHARD_GRAD_OP: False}


def chosen_modules(
    roots: Sequence[nn.Module], policy: AutoWrapPolicy | None, ignored: Collection[nn.Parameter]
) -> dict[nn.Module, bool | None]:
    """Modules below some roots that a policy chooses, children before parents.

    Args:
        roots: Models; they are no candidates themselves.
        policy: Classes of modules; a function of a module that gives a bool; or one of those that torch's FSDP1 takes:
            an object (`ModuleWrapPolicy`, `CustomPolicy`), or a function of `module`, `recurse` and
            `nonwrapped_numel`; None chooses nothing.
        ignored: Parameters that are not counted. A module of which no parameter is left to take is no candidate: they
            are ignored, sharded already, or taken by modules in it.

    Returns:
        For each module, whether the policy wants it resharded after its forward; None where it says nothing.

    Raises:
        StateError: What the policy returns is none of these.
        UnsupportedOpError: It gives a module keyword arguments that cannot be honoured.
    """
    found: dict[nn.Module, bool | None] = {}
    if policy is None:
        return found
    takes = {id(p) for root in roots for p in root.parameters() if not isinstance(p, ShardedTensor)}
    takes -= {id(p) for p in ignored}
    for root in roots:
        chosen = (
            _of_torchs_object(root, policy) if hasattr(policy, "_run_policy") else _of_function(root, policy, takes)
        )
        for module in _children_first(root):
            mine = {id(p) for p in module.parameters()} & takes
            if module in chosen and module not in roots and not isinstance(module, FSDPModule) and mine:
                found[module] = chosen[module]
                takes -= mine
    return found


def _children_first(root: nn.Module) -> list[nn.Module]:
    """All modules, each once, after all that lie in it."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child not in found:
                visit(child)
        found[module] = None

    visit(root)
    return list(found)


def _of_torchs_object(root: nn.Module, policy: Any) -> dict[nn.Module, bool | None]:
    """What one of torch's policy objects chooses, with the arguments that it gives each module beyond the root's."""
    chosen: Mapping[nn.Module, Any] = _asked(policy._run_policy, root, ignored_modules=set(), root_kwargs={})
    return {module: _reshards(module, kwargs) for module, kwargs in chosen.items()}


def _asked(policy: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a policy says of a module."""
    module = args[0] if args else kwargs["module"]
    about = f"for a {type(module).__name__}"
    return call_given("fully_shard", "auto_wrap_policy", policy, *args, about=about, **kwargs)


def _reshards(module: nn.Module, kwargs: Mapping[str, Any]) -> bool | None:
    """The arguments that a policy gives a module, of which those that say when it is freed can be honoured."""
    reshard: Any = None
    unknown = []
    for key, value in kwargs.items():
        if key == "sharding_strategy" and isinstance(value, ShardingStrategy) and value in _RESHARDS:
            reshard = _RESHARDS[value]
        elif key == "reshard_after_forward" and (value is None or isinstance(value, bool)):
            reshard = value
        else:
            unknown.append(f"{key}={value}")
    if unknown:
        raise UnsupportedOpError(
            "fully_shard: an auto_wrap_policy may give a module reshard_after_forward as a bool, or sharding_strategy "
            f"FULL_SHARD or SHARD_GRAD_OP, but for a {type(module).__name__} it gives {', '.join(unknown)}. Leave them "
            "out, or call fully_shard on that module yourself."
        )
    return reshard


def _of_function(root: nn.Module, policy: Any, takes: set[int]) -> dict[nn.Module, bool | None]:
    """What classes or a function choose."""
    if isinstance(policy, type) and issubclass(policy, nn.Module):
        policy = (policy,)
    if isinstance(policy, Collection):
        classes = tuple(policy)
        return {m: None for m in root.modules() if isinstance(m, classes)}
    if _takes_numel(policy):
        chosen: dict[nn.Module, bool | None] = {}
        _descend(root, policy, takes, chosen)
        return chosen
    answers = {m: _asked(policy, m) for m in root.modules() if m is not root}
    for module, answer in answers.items():
        if not isinstance(answer, bool):
            raise StateError(
                "fully_shard: auto_wrap_policy must return a bool for each module, but for a "
                f"{type(module).__name__} it returned {answer!r}. Return True for modules that are to be units."
            )
    return {m: None for m, answer in answers.items() if answer}


def _takes_numel(policy: Callable[..., Any]) -> bool:
    """Whether a function is to be called as FSDP1 does it: by `module`, `recurse` and `nonwrapped_numel`."""
    parameters = inspect.signature(policy).parameters
    has_rest = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return has_rest or {"recurse", "nonwrapped_numel"} <= parameters.keys()


def _descend(module: nn.Module, policy: Callable[..., Any], takes: set[int], chosen: dict[nn.Module, Any]) -> int:
    """Ask FSDP1's kind of function, children first; gives how many elements of `module` are in chosen modules.

    Source: the protocol of torch's `_recursive_wrap`: a module is looked into if the policy says so for all its
    elements, and chosen if it says so for those that are left.
    """
    numel = sum(p.numel() for p in module.parameters() if id(p) in takes)
    if not _asked(policy, module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    inside = sum(_descend(child, policy, takes, chosen) for child in module.children())
    if _asked(policy, module=module, recurse=False, nonwrapped_numel=numel - inside):
        chosen[module] = None
        return numel
    return inside
