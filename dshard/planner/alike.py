"""Which blocks of a model are of one kind: same classes, shapes and attributes, and nothing shared."""

import dataclasses
import functools
import types
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from dshard.planner.steps import pieces_of
from dshard.planner.traces import Part

_LEAST = 5  # blocks: the first two and the last two run, and one at least is told from these
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
_CUTS = "torch.distributed.tensor"  # which cuts layers, by hooks and placements
_STATE = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of one kind in a row.

    Args:
        blocks: In order.
        parts: Of which each is one.
        names: Classes of modules, and attributes in which theirs differ by a plain value, such as a block's number:
            whoever reads one may do another thing in each block.
    """

    blocks: tuple[nn.Module, ...]
    parts: tuple[int, ...]
    names: frozenset[tuple[type, str]]


def find_runs(
    model: nn.Module, parts: Sequence[Part], known: Container[tuple[type, str]] = frozenset()
) -> tuple[Run, ...]:
    """All runs of at least five blocks in lists, where each block is a part and shares nothing with others.

    Args:
        model: The model.
        parts: Of it.
        known: Attributes that modules are known to read, so that those of one run must not differ in them.
    """
    everyones = {name: value for name, value in vars(torch_module).items() if "registration" not in name}
    if _has_hooks(everyones):
        return ()
    part_of = {part.modules[0]: i for i, part in enumerate(parts) if len(part.modules) == 1}
    num_uses = _num_uses(model)
    found: list[Run] = []
    for listed in model.modules():
        if not isinstance(listed, (nn.ModuleList, nn.Sequential)):
            continue
        alone = [(block, block in part_of and _is_alone(block, num_uses)) for block in listed]
        for is_alone, group in groupby(alone, key=lambda pair: pair[1]):
            if is_alone:
                found += _runs_of([block for block, _ in group], part_of, known)
    return tuple(found)


def _num_uses(model: nn.Module) -> Counter[int]:
    """How often each module, and the storage of each parameter and buffer, is a child, or is held."""
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(id(child) for child in module._modules.values() if child is not None)
        held = (*module._parameters.values(), *module._buffers.values())
        uses.update(_storages(held))
    return uses


def _storages(held: Iterable[Tensor | None]) -> list[int]:
    return [id(each.untyped_storage()) for value in held if value is not None for each in pieces_of(value)]


def _is_alone(block: nn.Module, num_uses: Counter[int]) -> bool:
    for module in block.modules():
        held = (*module._parameters.values(), *module._buffers.values())
        if num_uses[id(module)] != 1 or any(num_uses[key] != 1 for key in _storages(held)):
            return False
    return True


def _runs_of(
    blocks: Sequence[nn.Module], part_of: dict[nn.Module, int], known: Container[tuple[type, str]]
) -> Iterator[Run]:
    start, names = 0, set[tuple[type, str]]()
    for i in range(1, len(blocks) + 1):
        more = differences(blocks[start], blocks[i]) if i < len(blocks) else None
        if more is not None and not any(pair in known for pair in more):
            names |= more
            continue
        own = tuple(blocks[start:i])
        if len(own) >= _LEAST:
            yield Run(own, tuple(part_of[block] for block in own), frozenset(names))
        start, names = i, set()


def differences(one: nn.Module, other: nn.Module) -> set[tuple[type, str]] | None:
    """Attributes in which two modules, or modules in them, differ by a plain value; None if they differ in more."""
    pairs = dict(_pairs(one, other))
    names: set[tuple[type, str]] = set()
    is_alike = None not in pairs and all(_are_alike(mine, its, pairs, names) for mine, its in pairs.items())
    return names if is_alike else None


def _pairs(one: nn.Module | None, other: nn.Module | None) -> Iterator[tuple[Any, Any]]:
    """Modules at the same places; (None, None) where one has what the other lacks."""
    if one is None or other is None:
        if one is not other:
            yield None, None
        return
    yield one, other
    if one._modules.keys() != other._modules.keys():
        yield None, None
        return
    for name in one._modules:
        yield from _pairs(one._modules[name], other._modules[name])


def _are_alike(one: nn.Module, other: nn.Module, pairs: dict[Any, Any], names: set[tuple[type, str]]) -> bool:
    """Whether two modules are, but for their children; adds the attributes in which they differ by a plain value."""
    mine, its = vars(one), vars(other)
    if type(one) is not type(other) or isinstance(one, torch.jit.ScriptModule) or mine.keys() != its.keys():
        return False
    if _has_hooks(mine, _CUTS) or _has_hooks(its, _CUTS) or one.training is not other.training:
        return False
    for slot in ("_parameters", "_buffers"):
        metas = [{name: _meta(value) for name, value in values[slot].items()} for values in (mine, its)]
        if metas[0] != metas[1]:
            return False
    for name in mine.keys() - set(_STATE):
        if type(mine[name]) in _PLAIN and type(its[name]) in _PLAIN and mine[name] != its[name]:
            if hasattr(type(one), name):
                return False
            names.add((type(one), name))
        elif not _is_same(_unnumbered(name, mine[name]), _unnumbered(name, its[name]), pairs):
            return False
    return True


def _has_hooks(values: dict[str, Any], but: str = "-") -> bool:
    """Whether there are hooks, but for those that a part of torch has set."""
    hooks = (value.values() for name, value in values.items() if name.endswith("_hooks") and isinstance(value, dict))
    return any(not str(getattr(hook, "__module__", "")).startswith(but) for each in hooks for hook in each)


def _unnumbered(name: str, value: Any) -> Any:
    """Hooks by their order, not by their numbers, of which no two are the same."""
    return list(value.values()) if name.endswith("_hooks") and isinstance(value, dict) else value


def _meta(value: Tensor | None) -> object:
    if value is None:
        return None
    cut = getattr(value, "placements", None), getattr(value, "device_mesh", None)
    return type(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad, cut


def _closure(function: types.FunctionType) -> list[Any]:
    """What a function has of its own, beside its code."""
    return [
        *(cell.cell_contents for cell in function.__closure__ or ()),
        function.__defaults__,
        function.__kwdefaults__,
    ]


def _is_same(one: Any, other: Any, pairs: dict[Any, Any]) -> bool:
    """Whether two attributes are the same for what their modules do."""
    if one is other:
        return True
    if isinstance(one, nn.Module):
        return one in pairs and pairs[one] is other
    if type(one) is not type(other):
        return False
    if type(one) in _PLAIN:
        return bool(one == other)
    if isinstance(one, types.MethodType):
        return one.__func__ is other.__func__ and _is_same(one.__self__, other.__self__, pairs)
    if isinstance(one, functools.partial):
        return _is_same([one.func, one.args, one.keywords], [other.func, other.args, other.keywords], pairs)
    if isinstance(one, types.FunctionType) and one.__module__.startswith(_CUTS):
        return one.__code__ is other.__code__ and _is_same(_closure(one), _closure(other), pairs)
    if type(one).__module__.startswith(_CUTS):  # such as a placement
        return bool(one == other)
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(_is_same(getattr(one, name), getattr(other, name), pairs) for name in names)
    if isinstance(one, (set, frozenset)):
        return all(type(each) in _PLAIN for each in one) and one == other
    if isinstance(one, dict):
        return list(one) == list(other) and _is_same(list(one.values()), list(other.values()), pairs)
    if isinstance(one, (list, tuple)):
        both = zip(one, other, strict=False)
        return len(one) == len(other) and all(_is_same(mine, its, pairs) for mine, its in both)
    return False
