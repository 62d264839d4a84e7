"""``--tensor-parallel``: the layers of a model cut over some ranks, of which this process plays the first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dshard.cli.usage import UsageError
from dshard.testing import fake_world

# Of Hugging Face's `tp_plan`, which names modules by patterns.
_WAYS: Mapping[str, Callable[[], Any]] = {
    "colwise": ColwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}


@contextmanager
def cut_layers(model: nn.Module, num_ranks: int) -> Iterator[None]:
    """Cuts the layers that a model's ``tp_plan`` names, and plays a rank of those that share them within the block.

    Args:
        model: Without memory, or with it.
        num_ranks: Over which layers are cut; 1 changes nothing.

    Raises:
        UsageError: the model has no such plan, or one that says what is not known here.

    Communicates: nothing.
    """
    if num_ranks == 1:
        yield
        return
    asked: Any = getattr(model, "tp_plan", None)
    if not isinstance(asked, Mapping) or not asked:
        raise UsageError(
            "--tensor-parallel needs a model that says how its layers are cut (a tp_plan, as Hugging Face's have it, "
            f"and the Llama presets), but {type(model).__name__} has none. Leave it out, or pass module:function with "
            "a model that has one."
        )
    ways = {name: way for name, _ in model.named_modules() if (way := _way_of(name, asked)) is not None}
    unknown = sorted(set(ways.values()) - _WAYS.keys())
    if unknown or not ways:
        what = f"it has {', '.join(unknown)}" if unknown else "it names no module of the model"
        raise UsageError(f"--tensor-parallel needs a tp_plan of {', '.join(_WAYS)}, but {what}. Leave it out.")
    with fake_world(0, num_ranks):
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {name: _WAYS[way]() for name, way in ways.items()})
        yield


def _way_of(name: str, asked: Mapping[str, str]) -> str | None:
    patterns = (re.escape(each).replace(r"\*", "[^.]+") for each in asked)
    return next(
        (way for pattern, way in zip(patterns, asked.values(), strict=True) if re.fullmatch(pattern, name)), None
    )
