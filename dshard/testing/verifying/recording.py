"""What is seen of a training run: outputs and their gradients in order of execution, gradients, weights, buffers."""

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dshard.testing.verifying.programs import tensors_of


class Key(NamedTuple):
    """Names one quantity of a run.

    Attributes:
        kind: "output", "gradient of output", "loss", "gradient", "parameter", ...
        step: of training; the number of steps for what comes after it.
        name: of a module, parameter, buffer or returned value.
        call: which of several of that name in the step.
        rank: whose it is; -1 where all ranks should have the same.
    """

    kind: str
    step: int
    name: str
    call: int
    rank: int

    def with_rank(self, rank: int) -> "Key":
        """The same of another rank."""
        return Key(self.kind, self.step, self.name, self.call, rank)

    def with_call(self, call: int) -> "Key":
        """Another of that name in the step."""
        return Key(self.kind, self.step, self.name, call, self.rank)


class Piece(NamedTuple):
    """Where a rank's shard lies.

    Attributes:
        shape: of the full value.
        start: of the shard in it.
        size: of the shard.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The shard within the full value."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))


@dataclass(slots=True)
class Record:
    """What one process saw, in order; travels to the parent by pickle.

    Attributes:
        seen: each quantity.
        places: of each module by name: class, file and line of its forward.
        problems: what is wrong whatever another process has: kind, name and words.
        num_blocks: that were checkpointed.
        num_parts: into which the first step cuts its batch, by the rows of its first forward.
        pieces: of which full shape, and from where on, a value is this rank's part.
    """

    seen: dict[Key, Tensor] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    num_blocks: int = 0
    num_parts: int = 1
    pieces: dict[Key, Piece] = field(default_factory=dict)


class Recorder:
    """Writes a record while a model is trained.

    Attributes:
        record: what was seen so far.
        step: the present one.
        rank: whose forward runs.
        scale: gradients of outputs are multiplied by it.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.record = Record(places={name: place_of(module) for name, module in model.named_modules()})
        self.step, self.rank, self.scale, self.is_evaluating = 0, rank, 1.0, False
        self._model = model
        self._calls: Counter[Key] = Counter()
        self._random: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, _, name=name: self._see_random_state(name, module))
            module.register_forward_hook(lambda _, __, output, name=name: self._see_output(name, output))

    def see(self, kind: str, name: str, value: Tensor, *, rank: int = -1) -> None:
        """Add one quantity."""
        first = Key(kind, self.step, name, 0, rank)
        key = first.with_call(self._calls[first])
        self._calls[first] += 1
        self.record.seen[key] = local(value)
        if isinstance(value, DTensor):
            _, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            self.record.pieces[key] = Piece(tuple(value.shape), tuple(start), tuple(self.record.seen[key].shape))

    def expect_rows(self, batch: Any) -> None:
        """Notice into how many parts this batch is cut, by what the model is called with first."""
        rows = _num_rows(batch)

        def see(_: nn.Module, args: Any, kwargs: Any) -> None:
            handle.remove()
            part = _num_rows((args, kwargs))
            self.record.num_parts = rows // part if part and rows % part == 0 else 1

        handle = self._model.register_forward_pre_hook(see, with_kwargs=True)

    def _see_random_state(self, name: str, module: nn.Module) -> None:
        if self.is_evaluating and module.training:
            self._random[name] = torch.get_rng_state()

    def _see_output(self, name: str, output: Any) -> None:
        before = self._random.pop(name, None)
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            words = "evaluation draws random numbers in it, as dropout does in train mode; call model.eval() before it."
            self.record.problems.append(("module", f"{name or 'the model'} ({self.record.places[name]})", words))
        if torch._C._current_graph_task_id() != -1:
            return  # computed again, in backward
        floats = [leaf for leaf in tensors_of(output) if leaf.is_floating_point()]
        for i, leaf in enumerate(floats):
            label = f"{name}[{i}]" if i else name
            self.see("output in evaluation" if self.is_evaluating else "output", label, leaf, rank=self.rank)
            if leaf.requires_grad and not isinstance(leaf, DTensor):
                self._watch(leaf, label)

    def _watch(self, leaf: Tensor, name: str) -> None:
        rank, step, scale = self.rank, self.step, self.scale

        def see(grad: Tensor) -> None:
            if step == self.step:
                self.see("gradient of output", name, grad * scale, rank=rank)

        leaf.register_hook(see)

    def see_gradients(self, model: nn.Module) -> None:
        """Add the gradients of all parameters."""
        for name, param in model.named_parameters():
            if param.grad is not None:
                self.see("gradient", name, param.grad)

    def see_parameters(self, model: nn.Module, kind: str) -> None:
        """Add the values of all parameters."""
        for name, param in model.named_parameters():
            self.see(kind, name, param)

    def see_returned(self, returned: Any, *, rank: int = -1) -> None:
        """Add what a training step returned: its loss, or a dict with that and other numbers."""
        for name, value in _numbers(returned, ""):
            is_loss = name in ("", "loss")
            tensor = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
            self.see("loss" if is_loss else "returned value", "" if is_loss else name, tensor, rank=rank)

    @contextmanager
    def evaluating(self, model: nn.Module, rank: int) -> Iterator[None]:
        """A scope that must change nothing of the model."""
        before = {name: local(value) for name, value in _tensors(model)}
        modes = {name: module.training for name, module in model.named_modules()}
        self.rank, self.is_evaluating = rank, True
        yield
        self.is_evaluating = False
        for name, value in _tensors(model):
            if not torch.equal(local(value), before[name]):
                words = "evaluation changed it; is the model in train mode there, or does it train?"
                self.record.problems.append(("parameter or buffer", name, words))
        for name, module in model.named_modules():
            if module.training != modes[name]:
                words = f"evaluation left training={module.training}; call model.train() after it."
                self.record.problems.append(("mode", name or "the model", words))
                break


def local(value: Tensor) -> Tensor:
    """A copy of a tensor in the CPU's memory, of a sharded one's shard: recording communicates nothing."""
    value = value.detach()
    return (value.to_local() if isinstance(value, DTensor) else value).clone().cpu()


def put_together(records: Sequence[Record]) -> None:
    """Have each rank's record hold full values: its own shards, and those of the others beside them."""
    wholes: dict[Key, Tensor] = {}
    for record in records:  # what several hold, the last one gives
        for key, piece in record.pieces.items():
            new = torch.full(piece.shape, float("nan"), dtype=record.seen[key].dtype)
            wholes.setdefault(key.with_rank(-1), new)[piece.slices] = record.seen[key]
    for record in records:
        for key, piece in record.pieces.items():
            whole = wholes[key.with_rank(-1)].clone()
            whole[piece.slices] = record.seen[key]  # of what several hold, it has its own
            record.seen[key] = whole


def place_of(module: nn.Module) -> str:
    """Class of a module, and file and line of its forward."""
    cls = type(module)
    plain = next((c for c in cls.__mro__ if "forward" in vars(c) and not c.__module__.startswith("dshard.")), cls)
    try:
        forward: Any = vars(plain)["forward"]
        path, (_, line) = inspect.getsourcefile(forward), inspect.getsourcelines(forward)
    except (KeyError, OSError, TypeError):
        return plain.__name__
    where = Path(path or "?")
    short = where.relative_to(Path.cwd()) if where.is_relative_to(Path.cwd()) else where
    return f"{plain.__name__}, {str(short).rpartition('site-packages/')[2]}:{line}"


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _num_rows(batch: Any) -> int:
    """Of the first tensor that has some; 0 where there is none."""
    return next((len(each) for each in tensors_of(batch) if each.ndim), 0)


def _numbers(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _numbers(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, Tensor | int | float):
        yield name, tree
