"""Which parameters to gather together, when `fully_shard` was called on the root of a model alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from dshard.tensor import ShardedTensor

__all__ = ["UnitPlan", "find_units"]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_MIN_UNIT_BYTES = 1 << 20  # smaller neighbours share a unit: a collective has a price of its own
_MAX_MERGED_PARTS = 8  # but a model of small parts is still cut into about this many units


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """A unit to be.

    Args:
        label: Name of its first module, or that of the first and last.
        modules: Modules in whose forward it is in use.
        params: Its parameters.
    """

    label: str
    modules: tuple[nn.Module, ...]
    params: tuple[ShardedTensor, ...]


def find_units(root: nn.Module, params: Sequence[ShardedTensor], name: str) -> list[UnitPlan]:
    """Cut the parameters of a model into units.

    The elements of the outermost lists of blocks become units, small neighbours together; so does any other child with
    as many bytes as a block, an embedding or a head. What is left, and what several of these share, stays with the
    root.

    Args:
        root: The model.
        params: Its parameters that are to be cut into units, in order.
        name: Label of what stays with the root.

    Returns:
        Plans that hold each of `params` once, the root's last.
    """
    blocks = list(_blocks(root, ""))
    wanted = {id(p) for p in params}
    groups = _merge(blocks, wanted)
    in_blocks = {id(m) for _, block in blocks for m in block.modules()}
    mean_bytes = sum(_num_bytes(b, wanted) for _, b in blocks) / len(groups) if groups else _MIN_UNIT_BYTES
    singles = [
        [(child_name, child)]
        for child_name, child in _leaves(root, "", in_blocks)
        if _num_bytes(child, wanted) >= max(mean_bytes / 2, _MIN_UNIT_BYTES / 4)
    ]
    candidates = groups + singles
    if len(candidates) < 2:
        candidates = []
    uses: dict[int, int] = {}
    for candidate in candidates:
        for key in {id(p) for _, module in candidate for p in module.parameters()}:
            uses[key] = uses.get(key, 0) + 1
    outside = _used_outside(root, candidates)
    plans: list[UnitPlan] = []
    taken: set[int] = set()
    for candidate in candidates:
        mine = [
            p
            for p in dict.fromkeys(p for _, module in candidate for p in module.parameters())
            if isinstance(p, ShardedTensor) and id(p) in wanted and uses[id(p)] == 1 and id(p) not in outside
        ]
        if mine:
            taken.update(id(p) for p in mine)
            label = candidate[0][0] if len(candidate) == 1 else f"{candidate[0][0]}..{candidate[-1][0]}"
            plans.append(UnitPlan(label, tuple(m for _, m in candidate), tuple(mine)))
    rest = tuple(p for p in params if id(p) not in taken)
    if rest:
        plans.append(UnitPlan(name, (root,), rest))
    return plans


def _used_outside(root: nn.Module, candidates: list[list[tuple[str, nn.Module]]]) -> set[int]:
    """Parameters that a module outside of all candidates holds too."""
    inside = {id(m) for candidate in candidates for _, module in candidate for m in module.modules()}
    return {id(p) for m in root.modules() if id(m) not in inside for p in m.parameters(recurse=False)}


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Elements of the outermost containers, by name; a container inside a container is looked into."""
    is_container = isinstance(module, _CONTAINERS)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
            return  # it runs those of its parts that the data of a rank needs
        if is_container and not isinstance(child, _CONTAINERS):
            yield path, child
        else:
            yield from _blocks(child, f"{path}.")


def _leaves(module: nn.Module, prefix: str, in_blocks: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Modules outside of all blocks that hold parameters themselves."""
    for name, child in module.named_children():
        if id(child) in in_blocks or isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
            continue
        if next(child.parameters(recurse=False), None) is not None:
            yield f"{prefix}{name}", child
        else:
            yield from _leaves(child, f"{prefix}{name}.", in_blocks)


def _num_bytes(module: nn.Module, wanted: set[int]) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters() if id(p) in wanted)


def _merge(blocks: Sequence[tuple[str, nn.Module]], wanted: set[int]) -> list[list[tuple[str, nn.Module]]]:
    """Put neighbours of one container together until a unit is worth a collective."""
    sized = [(name, block, _num_bytes(block, wanted)) for name, block in blocks]
    enough = min(_MIN_UNIT_BYTES, max(1, sum(size for _, _, size in sized) // _MAX_MERGED_PARTS))
    groups: list[list[tuple[str, nn.Module]]] = []
    filled, parent = enough, ""
    for name, block, size in sized:
        if size == 0:
            continue
        container = name.rpartition(".")[0]
        if filled >= enough or container != parent:
            groups.append([])
            filled = 0
        groups[-1].append((name, block))
        filled, parent = filled + size, container
    return groups
