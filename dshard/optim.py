"""Optimizers that need more of a parameter than one shard, or keep less of it."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from dshard import arguments
from dshard.layout import product_cost
from dshard.optimizer.adamw8bit import AdamW8bit
from dshard.optimizer.owners import Whole

__all__ = ["AdamW8bit", "whole"]


def whole(
    optimizer: Optimizer,
    params: Iterable[Tensor] | None = None,
    *,
    cost: Callable[[torch.Size], float] = product_cost,
) -> Optimizer:
    """Have each parameter of an optimizer be stepped whole by one rank, its owner, instead of by all ranks.

    Its step must treat each parameter by itself, as Shampoo, SOAP and Muon do, and call a closure once at most; what it
    keeps for a parameter must be tensors, numbers and texts. So do `torch.optim.Muon` and `torch.optim.Adafactor`,
    which are stepped so without a call of this; `whole(optimizer, params=[])` has all ranks step all parameters.

    Args:
        optimizer: Any; its class must be the same on all ranks. It is changed.
        params: Those of its parameters that owners step; by default all. Others are stepped as ever.
        cost: Gives the work of the step of one parameter, by its shape, in any unit; by default that of a product of a
            matrix with itself. Ranks get parameters so that each has about as much to do.

    Returns:
        The optimizer.

    Communicates:
        Nothing here. A step sends each owner the shards of its parameters and of their gradients, two bytes for each
        byte of the parameter, and all ranks their shards of the result, one more; over replicas one more for each. The
        first step, and for classes other than `torch.optim.Muon` every one, adds a text of 50 to 200 bytes per
        parameter, by two small collectives. States stay with the owner until somebody uses their shards, as
        a checkpoint does: on all ranks, at the same place of the program.

    Raises:
        ArgumentError: `optimizer` is no torch optimizer, or `cost` cannot be called.

    Reference: dion sends Muon's matrices so; torchtitan and Megatron's layer-wise optimizer assign owners.
    """
    arguments.instance("whole", "optimizer", optimizer, Optimizer, "Pass the optimizer.")
    arguments.function("whole", "cost", cost, "a shape", "Pass a function that gives the work of a step.")

    allowed, way = "a set or list of parameters, or None", "Pass [model.weight], for example."
    asked = None
    if params is not None:
        asked = arguments.several("whole", "params", params, lambda each: isinstance(each, Tensor), allowed, way)
    optimizer.__dict__["_dshard_whole"] = Whole(asked, cost)
    return optimizer
