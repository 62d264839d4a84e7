"""Gathers in graphs that inductor compiles: what is only read is not copied.

A gathered copy belongs to its unit, and a graph may write to what its nodes give it. Inductor does so for two reasons:
an operation of the graph writes, or the memory of a buffer is used again when nobody needs that buffer any more. The
first can be seen from the nodes that use the gather. The second is forbidden for a buffer by its name.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload


def lower_gathers(gather: OpOverload) -> None:
    """Have inductor, if it is what compiles, take the unit's own copy wherever a graph only reads it.

    Args:
        gather: The operation; its last argument says whether the result is memory of the graph's own.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is None or getattr(lowering, "_has_dshards", False):
        return
    lowering._has_dshards = True
    run: Callable[..., Any] = lowering.fallback_handler(gather)

    def lower(*args: Any) -> Any:
        from torch._inductor.virtualized import V

        node = V.graph.current_node
        if not all(_only_reads(user, node) for user in node.users):
            return run(*args)
        result = run(*args[: len(gather._schema.arguments) - 1], False)  # noqa: FBT003 - operators take positions
        name = result.get_name()
        V.graph.never_reuse_buffers.add(name)
        V.graph.unaligned_buffers.add(name)  # it lies anywhere in a unit's memory
        return result

    lowering.register_lowering(gather, type_promotion_kind=None)(lower)


def _only_reads(user: fx.Node, source: fx.Node) -> bool:
    """Whether an operation neither writes to `source`, nor gives memory of it that others may write to or give out."""
    func = user.target
    if user.op != "call_function" or not isinstance(func, OpOverload) or func._schema.is_mutable:
        return False
    if any(result.alias_info is not None for result in func._schema.returns):  # a view
        return all(_only_reads(other, user) for other in user.users)
    given, taken = user.meta.get("val"), source.meta.get("val")
    if isinstance(given, Tensor) and isinstance(taken, Tensor) and given.dtype != taken.dtype:
        return True  # a cast
    # What has one operand may be lowered to nothing; what has several is computed.
    nodes = [arg for arg in (*user.args, *user.kwargs.values()) if isinstance(arg, fx.Node)]
    return sum(isinstance(node.meta.get("val"), Tensor) for node in nodes) > 1
