"""What `assert_sharding_invariants` runs: a user's program, and the settings under which it is sharded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from dshard.setup.fully_shard import fully_shard

Step = Callable[[nn.Module, Optimizer, Any], Any]
_MIXED = ("ddp", "full", "zero1", "keep", "zero2")


@dataclass(frozen=True, slots=True)
class Setting:
    """One way of sharding and training.

    Attributes:
        strategy: of `fully_shard`; "mix" takes another one for each parameter.
        micro_batches: of a step; all but the last run under `no_sync`.
        is_checkpointed: whether blocks compute their forward again in backward.
        is_clipped: whether gradients are clipped to half of the norm that the first ones have.
        precision: "bf16" gathers parameters and reduces gradients in it.
    """

    strategy: str = "full"
    micro_batches: int = 1
    is_checkpointed: bool = False
    is_clipped: bool = False
    precision: str = ""


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        **{name: Setting(name) for name in ("full", "ddp", "zero1", "zero2", "keep", "mix")},
        "accumulation": Setting(micro_batches=2),
        "checkpointing": Setting(is_checkpointed=True),
        "clipping": Setting(is_clipped=True),
        "bf16": Setting(precision="bf16"),
    }
)


@dataclass(frozen=True, slots=True)
class Program:
    """What is trained; travels to the ranks by pickle.

    Attributes:
        factory: makes the model, with equal weights at each call.
        sample: of the input, or a function of rank and step.
        loss: of an output; None for what `default_loss` finds.
        step: the user's training step: (model, optimizer, batch); None for the built-in one.
        oracle_step: what one process does with the batches of all ranks in one; None for `step`.
        optimizer: makes the optimizer of a model.
        shard: shards a model, (model, options of `fully_shard`); None for `fully_shard` on the root.
        num_steps: of training.
        dtype: that the model and its input are converted to; None for their own.
    """

    factory: Callable[[], nn.Module]
    sample: Any
    loss: Callable[[Any], Tensor] | None
    step: Step | None
    oracle_step: Step | None
    optimizer: Callable[[nn.Module], Optimizer]
    shard: Callable[..., Any] | None
    num_steps: int
    dtype: torch.dtype | None

    def build(self) -> nn.Module:
        """The plain model, from the same random numbers at each call."""
        torch.manual_seed(0)
        model = self.factory()
        return model if self.dtype is None else model.to(self.dtype)

    def batch(self, rank: int, step: int) -> Any:
        """What a rank trains on in a step: of a fixed sample, its elements in another order."""
        made = self.sample(rank, step) if callable(self.sample) else _shuffled(self.sample, rank, step)
        return pytree.tree_map_only(Tensor, self._converted, made)

    def _converted(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor.clone()

    def joined_batch(self, ranks: Sequence[int], step: int) -> Any:
        """The batches of these ranks in one."""
        return pytree.tree_map(_joined, *(self.batch(rank, step) for rank in ranks))

    def loss_of(self, output: Any) -> Tensor:
        """The loss of an output."""
        return default_loss(output) if self.loss is None else self.loss(output)

    def sharded(self, model: nn.Module, setting: Setting) -> nn.Module:
        """The model, sharded as a setting says."""
        options: dict[str, Any] = {"strategy": setting.strategy}
        if setting.strategy == "mix":
            names = [name for name, _ in model.named_parameters()]
            options["strategy"] = {name: _MIXED[i % len(_MIXED)] for i, name in enumerate(names)} | {"*": "full"}
        if setting.precision:
            options["mp_policy"] = torch.bfloat16
        if self.shard is None:
            return fully_shard(model, **options)
        made = self.shard(model, **options)
        return made if isinstance(made, nn.Module) else model


def adamw(model: nn.Module) -> Optimizer:
    """The optimizer that is taken where none is given."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def default_loss(output: Any) -> Tensor:
    """The output itself if it is one number, else its `.loss`, else the mean of squares of its numbers.

    Raises:
        TypeError: There is nothing in it to differentiate.
    """
    if isinstance(output, Tensor) and output.ndim == 0:
        return output
    if isinstance(found := getattr(output, "loss", None), Tensor):
        return found
    floats = [leaf for leaf in tensors_of(output) if leaf.is_floating_point()]
    if not floats:
        raise TypeError(f"loss: an output must have floating-point tensors, but it is a {type(output).__name__}.")
    return torch.stack([leaf.square().mean() for leaf in floats]).mean()


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in an input or output, in order."""
    if isinstance(tree, Mapping):
        return [found for value in tree.values() for found in tensors_of(value)]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output: a dict is keywords, a tuple is positional."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from dict.fromkeys(child)
        else:
            yield from _blocks(child)


def checkpoint_blocks(model: nn.Module) -> int:
    """Have the elements of the outermost ModuleLists compute their forward again in backward; how many there are."""
    blocks = list(_blocks(model))
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)


def _shuffled(sample: Any, rank: int, step: int) -> Any:
    if rank == step == 0:
        return sample

    def shuffle(tensor: Tensor) -> Tensor:  # tensors of one shape, such as tokens and labels, alike
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape)

    return pytree.tree_map_only(Tensor, shuffle, sample)


def _joined(*parts: Any) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim else parts[0]
