"""Hugging Face's `Trainer` over sharded models."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dshard import arguments
from dshard.checkpoint import load, save
from dshard.errors import StateError
from dshard.gathering import iter_full
from dshard.runtime.module import FSDPModule
from dshard.setup.fully_shard import fully_shard

_FOLDER, _SCHEDULER = "dshard", "scheduler.pt"  # in a checkpoint of the trainer's


def full_state_dict(
    module: nn.Module, *, select: Callable[[str], bool] = lambda name: True, only_rank0: bool = False
) -> dict[str, Tensor]:
    """Full values for `save_pretrained(..., state_dict=...)`, in the memory of the CPU.

    ::

        adapters = full_state_dict(model, select=lambda name: "lora_" in name)
        if dist.get_rank() == 0:
            model.save_pretrained(folder, state_dict=adapters)

    To write a whole model, `dshard.save_safetensors` needs no memory for it, but writes the names of the modules, as
    they are in memory; `save_pretrained` may give other names to some architectures (experts).

    Args:
        module: A sharded module.
        select: Which names of `state_dict()` to keep; must say the same on all ranks.
        only_rank0: Give an empty dict on the other ranks, which hold one value at a time.

    Returns:
        Values under the names of `state_dict()`; names that are tied share one.

    Communicates:
        An all-gather per tensor that is cut, selected or not.
    """
    arguments.module("full_state_dict", "module", module)
    arguments.function("full_state_dict", "select", select, "a name", "Pass one that gives a bool.")
    only_rank0 = arguments.boolean("full_state_dict", "only_rank0", only_rank0)
    keeps = not only_rank0 or _rank_of(module) == 0
    owners = module.state_dict(keep_vars=True)
    values: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, full in iter_full(module, device="cpu"):
        if keeps and select(name):
            state[name] = values.setdefault(id(owners[name]), full.detach())
    return state


def _rank_of(module: nn.Module) -> int:
    """This rank's place in the mesh that the parameters of a module are cut over."""
    ranks = [p.shard_group.world_rank for p in module.parameters() if hasattr(p, "shard_group")]
    if not ranks:
        raise StateError(
            f"full_state_dict: needs a sharded module, but nothing in this {type(module).__name__} is. Call "
            "fully_shard first."
        )
    return int(ranks[0])


class ShardedTrainerMixin:
    """Trains the model of a Hugging Face `Trainer` sharded; to be named first among the bases.

        class MyTrainer(ShardedTrainerMixin, transformers.Trainer):
            fully_shard_options = {"reshard_after_forward": True}

    The model is sharded before the optimizer is made, unless it is already, and never wrapped in DDP. Accumulated
    micro-batches send no gradients, clipping is that of the full gradients, `save_model` writes what `from_pretrained`
    reads, and a checkpoint can be resumed on another number of ranks.
    """

    fully_shard_options: Mapping[str, Any] = {}

    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    args: Any

    def _shard(self) -> None:
        if not isinstance(self.model, FSDPModule):
            fully_shard(self.model, **self.fully_shard_options)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's own, over sharded parameters.

        Args:
            *args: The trainer's.
            **kwargs: The trainer's.
        """
        self._shard()
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Nothing is wrapped; Accelerate takes a model that it has prepared for evaluation for prepared."""
        if training:
            self._shard()
            with _compiled_in_place(self.model, self.accelerator.state.dynamo_plugin):
                self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
        return model

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what `from_pretrained` reads; to be called on every rank, rank 0 writes.

        Args:
            output_dir: By default that of the arguments.

        Communicates:
            An all-gather per tensor that is cut; rank 0 holds all of them in the memory of its CPU.
        """
        if not isinstance(self.model, FSDPModule):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        state = full_state_dict(self.model, only_rank0=True)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)  # type: ignore[attr-defined]
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Each rank writes its own shards."""
        save(Path(output_dir) / _FOLDER, self.model, _inner(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """What has a sharded checkpoint is loaded with the optimizer, once that was made."""
        if not (Path(resume_from_checkpoint) / _FOLDER).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / _FOLDER).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        load(Path(checkpoint) / _FOLDER, self.model, _inner(self.optimizer))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))


@contextmanager
def _compiled_in_place(model: nn.Module, plugin: Any) -> Iterator[None]:
    """Compile as Accelerate has been told to, without its wrapper, which would not be the model that is trained."""
    from accelerate.utils import DynamoBackend, compile_regions_deepspeed  # in place, whatever the name

    backend = plugin.backend
    if backend != DynamoBackend.NO and all(module._compiled_call_impl is None for module in model.modules()):
        options = plugin.to_kwargs()
        compile_regions_deepspeed(model, **options) if plugin.use_regional_compilation else model.compile(**options)
    plugin.backend = DynamoBackend.NO
    try:
        yield
    finally:
        plugin.backend = backend


def _inner(optimizer: Any) -> Any:
    """The optimizer in Accelerate's wrapper of it."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    return optimizer
