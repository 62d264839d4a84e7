"""Train a user's program, plain in one process or sharded on each rank, and record what it computes."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from dshard.clip import clip_grad_norm_
from dshard.compat import no_sync
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


class Key(NamedTuple):
    """Names one quantity of a run.

    Attributes:
        kind: "output", "gradient of output", "loss", "gradient", "parameter", ...
        step: the training step; the number of steps for what follows training.
        name: the module, parameter, buffer or returned value.
        call: counts quantities of this name within the step.
        rank: the rank that computed it; -1 where all ranks should have the same.
    """

    kind: str
    step: int
    name: str
    call: int
    rank: int


@dataclass(slots=True)
class Record:
    """What one process computed, in order; travels to the parent by pickle.

    Attributes:
        seen: the value of each quantity.
        shards: where this rank's shard lies in the value of a sharded quantity.
        places: class, file and line of each module's forward, by the module's name.
        num_blocks: how many blocks recompute their forward.
    """

    seen: dict[Key, Tensor] = field(default_factory=dict)
    shards: dict[Key, tuple[slice, ...]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One training run.

    Attributes:
        program: what is trained.
        setting: how the model is sharded and trained.
        num_ranks: the number of ranks, and of batches per step.
        nudge: 0, or the seed of a plain run whose initial weights are moved by one rounding.
    """

    program: Program
    setting: Setting
    num_ranks: int
    nudge: int = 0


def train_sharded(run: Run) -> Record:
    """Train the sharded model on this rank. Communicates: what training does."""
    model = run.program.build()
    num_blocks = checkpoint_blocks(model) if run.setting.is_checkpointed else 0
    record = _train(run, run.program.sharded(model, run.setting), [dist.get_rank()], run.program.step)
    record.num_blocks = num_blocks
    return record


def train_plain(run: Run) -> Record:
    """Train the plain model on the batches of all ranks, in one process."""
    model, step = run.program.build(), run.program.oracle_step or run.program.step
    if run.setting.is_checkpointed:
        checkpoint_blocks(model)
    ranks = list(range(run.num_ranks))
    if run.nudge:
        _nudge(model, run)
        ranks = ranks[::-1] if run.nudge % 2 else ranks  # another order of adding up rounds otherwise
    for module in model.modules():
        if step is not None and isinstance(module, _BatchNorm):
            _normalize_by_rank(module, run.num_ranks)
    return _train(run, model, ranks, step)


def _train(run: Run, model: nn.Module, ranks: Sequence[int], step: Step | None) -> Record:
    """Train on the batches of these ranks: one rank's, or on the plain model those of all ranks."""
    program, recorder = run.program, _Recorder(model, len(ranks))
    optimizer = recorder.begin(model, program.optimizer(model))
    own = {rank: {name: buffer.detach().clone() for name, buffer in model.named_buffers()} for rank in ranks}
    max_norm = float("inf")
    for recorder.step in range(program.num_steps):
        if step is not None:
            torch.manual_seed(recorder.step)
            recorder.see_returned(step(model, optimizer, program.joined_batch(sorted(ranks), recorder.step)))
        else:
            optimizer.zero_grad()
            for recorder.rank in ranks:
                with _with_buffers(model, own[recorder.rank]) if len(ranks) > 1 else nullcontext():
                    _backward(run, model, recorder)
            if run.setting.is_clipped:
                if recorder.step == 0:
                    max_norm = float(clip_grad_norm_(model.parameters(), max_norm)) / 2
                recorder.see("norm that clipping found", "", clip_grad_norm_(model.parameters(), max_norm))
            optimizer.step()
        recorder.see_parameters(model, "parameter")
    recorder.step = program.num_steps
    for recorder.rank in ranks if step is None else ():
        with _with_buffers(model, own[recorder.rank]) if len(ranks) > 1 else nullcontext():
            model.eval()
            with torch.no_grad():
                call(model, program.batch(recorder.rank, program.num_steps))
            model.train()
            for name, buffer in model.named_buffers():
                recorder.see("buffer", name, buffer, rank=recorder.rank)
    return recorder.record


def _backward(run: Run, model: nn.Module, recorder: "_Recorder") -> None:
    """Compute forward and backward of one rank's micro-batches."""
    num, rank = run.setting.micro_batches, recorder.rank
    for i in range(num):
        # The same numbers for dropout wherever this rank's forward runs.
        torch.manual_seed(1 + i + 16 * recorder.step + 4096 * rank)
        is_last = i == num - 1 or not hasattr(model, "no_sync")
        with nullcontext() if is_last else no_sync(model):
            loss = run.program.loss_of(call(model, run.program.batch(rank, recorder.step * num + i)))
            recorder.see("loss", "", loss, rank=rank)
            (loss / (num * recorder.num_ranks)).backward()


@torch.no_grad()
def _nudge(model: nn.Module, run: Run) -> None:
    """Move every weight to the next number on one side, or leave it; of bf16, by as much as that rounds."""
    generator = torch.Generator().manual_seed(run.nudge)
    for param in dict.fromkeys(p for p in model.parameters() if p.is_floating_point()):
        way = torch.randint(-1, 2, param.shape, generator=generator).to(param)
        eps = torch.finfo(torch.bfloat16 if run.setting.precision else param.dtype).eps
        param.add_(param * way * eps)


@contextmanager
def _with_buffers(model: nn.Module, buffers: dict[str, Tensor]) -> Iterator[None]:
    """Give the plain model the buffers of one rank, and keep what is written to them."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    yield
    for name, buffer in model.named_buffers():
        buffers[name] = buffer.detach().clone()


def _normalize_by_rank(module: nn.Module, num_ranks: int) -> None:
    """Have a batch norm normalize each rank's rows for themselves where it is given those of all ranks at once."""
    plain = module.forward
    module.forward = lambda batch: torch.cat([plain(part) for part in batch.chunk(num_ranks)])


class _Recorder:
    """Writes a record while a model is trained.

    Attributes:
        record: what was computed so far.
        step: the present step.
        rank: the rank whose forward runs.
        num_ranks: the number of ranks whose mean loss is differentiated; gradients of outputs are multiplied by it.
    """

    def __init__(self, model: nn.Module, num_ranks: int) -> None:
        self.record = Record(places={name: _place_of(module) for name, module in model.named_modules()})
        self.step, self.rank, self.num_ranks = 0, -1, num_ranks
        self._calls: Counter[Key] = Counter()
        for name, module in model.named_modules():
            module.register_forward_hook(lambda _, __, output, name=name: self._see_output(name, output))

    def begin(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        """Record the initial weights, and have the optimizer's first step record gradients."""
        self.see_parameters(model, "initial value")
        for name in model.state_dict():
            self.see("key of state_dict", name, torch.zeros(()))

        def see_gradients(*_: Any) -> None:
            if self.step == 0 and not any(key.kind == "gradient" for key in self.record.seen):
                for name, param in model.named_parameters():
                    if param.grad is not None:
                        self.see("gradient", name, param.grad)

        optimizer.register_step_pre_hook(see_gradients)
        return optimizer

    def see(self, kind: str, name: str, value: Tensor, *, rank: int = -1) -> None:
        """Add one quantity; of a sharded tensor the full one."""
        first = Key(kind, self.step, name, 0, rank)
        key = Key(kind, self.step, name, self._calls[first], rank)
        self._calls[first] += 1
        self.record.seen[key] = _full(value)
        if isinstance(value, DTensor):
            shape, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            self.record.shards[key] = tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))

    def see_parameters(self, model: nn.Module, kind: str) -> None:
        """Add the values of all parameters."""
        for name, param in model.named_parameters():
            self.see(kind, name, param)

    def see_returned(self, returned: Any) -> None:
        """Add what a user's step returned: its loss, or a dict of its loss and other numbers."""
        for path, value in pytree.tree_flatten_with_path(returned)[0]:
            if isinstance(value, Tensor | int | float):
                name = ".".join(str(getattr(step, "key", step)) for step in path)
                tensor = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
                is_loss = name in ("", "loss")
                self.see("loss" if is_loss else "returned value", "" if is_loss else name, tensor)

    def _see_output(self, name: str, output: Any) -> None:
        # A user's step computes the rows of all ranks at once on the plain model, which has no rank then. A forward
        # within backward is a block that is recomputed.
        if self.rank < 0 or torch._C._current_graph_task_id() != -1:
            return
        for i, leaf in enumerate(leaf for leaf in tensors_of(output) if leaf.is_floating_point()):
            label = f"{name}[{i}]" if i else name
            self.see("output" if torch.is_grad_enabled() else "output in evaluation", label, leaf, rank=self.rank)
            if leaf.requires_grad and not isinstance(leaf, DTensor):
                self._see_gradient_of(leaf, label)

    def _see_gradient_of(self, leaf: Tensor, name: str) -> None:
        rank, step = self.rank, self.step

        def see(grad: Tensor) -> None:
            if step == self.step:
                self.see("gradient of output", name, grad * self.num_ranks, rank=rank)

        leaf.register_hook(see)


def _full(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone().cpu()


def _place_of(module: nn.Module) -> str:
    """Class of a module, and file and line of its forward."""
    cls = type(module)
    plain: Any = next((c for c in cls.__mro__ if "forward" in vars(c) and not c.__module__.startswith("dshard.")), cls)
    try:
        path, (_, line) = inspect.getsourcefile(plain.forward), inspect.getsourcelines(plain.forward)
    except (OSError, TypeError):
        return plain.__name__
    return f"{plain.__name__}, {(path or '?').rpartition('site-packages/')[2]}:{line}"
