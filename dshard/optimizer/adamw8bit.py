"""AdamW with 8-bit states, quantized in blocks that follow the full parameter."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dshard import arguments
from dshard.autograd import outside_autograd
from dshard.compiling import outside_of_graphs
from dshard.errors import StateError, UnsupportedOpError
from dshard.layout import ShardLayout, by_kind
from dshard.optimizer.blocks import Blocks, Range, chunks
from dshard.optimizer.eight_bit import Hyperparameters, adamw, dequantize, quantize, scales_of
from dshard.optimizer.scales import Scales, Wanted, check_scales, largest_of_all
from dshard.tensor.meshes import distinct_groups, part_of
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.storage import ShardStorage
from dshard.tensor.subclass_shards import subclass_gathers
from dshard.tensor.tp_params import shard_like

_LEAST_NUMEL = 4096  # of a parameter whose states have 8 bits
_MOMENTS = ("exp_avg", "exp_avg_sq")  # of gradients, and of their squares
_SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
_CHUNK, _CHUNK_OF_CPU = 1 << 22, 1 << 15  # elements that are stepped at a time: of a CPU what a core's cache holds
_PARTS_NUMEL = 1 << 23  # of parameters that cut blocks are kept of, as fp32, until ranks know their scales


class AdamW8bit(Optimizer):
    """AdamW with 8-bit states: 2.05 bytes per element of a parameter, in the place of 8.

    Moments of a parameter of at least 4,096 elements, whose number `block_size` divides, are quantized: to a code of 8
    bits for each element, and one scale for each block, which is `block_size` elements that are neighbours in the full
    parameter. So the bits are the same at any number of ranks, under every strategy and whatever is sharded with what:
    those of `torchao.optim.AdamW8bit` on one device. A block that the end of a shard cuts is of one scale all the same,
    by the largest value on any rank; the ranks that have some of it keep that. Other parameters have moments of their
    own dtype. It is computed in fp32.

    In `state` there are, of each parameter, `step`, `exp_avg` and `exp_avg_sq`: codes of the parameter's shape, in
    uint8; and `exp_avg_scale` and `exp_avg_sq_scale`, fp32 of shape `(numel / block_size,)`. All are sharded as the
    parameter is, but the shards of scales are put together by a collective when somebody uses one: on all ranks, at
    the same place of the program.

    Args:
        params: Parameters, or groups of them, sharded or not.
        lr: Learning rate.
        betas: How much a step keeps of the running means of gradients and of their squares.
        eps: Added to the root of the latter.
        weight_decay: Times `lr`, the part of a parameter that a step takes from it.
        block_size: Elements of a block.

    Communicates:
        A step sends the largest values of cut blocks, an all-reduce of 8 bytes for each; no block is cut where
        `block_size` divides the elements of a row, and parameters are cut along dim 0. Who reads the scales has them
        put together on all ranks, 4 bytes per block.

    Raises:
        ArgumentError: A setting is none that is allowed.

    Source: `torchao.optim.AdamW8bit`, whose arithmetic it follows, without its stochastic rounding.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block_size: int = 256,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "block_size": block_size}
        super().__init__(params, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own.

        Args:
            param_group: As for any optimizer of torch: `params`, and settings that differ from those of the optimizer.

        Raises:
            ArgumentError: A setting is none that is allowed.
        """
        given, who = {**self.defaults, **param_group}, "AdamW8bit"
        for name in ("lr", "eps", "weight_decay"):
            arguments.from_0(who, name, given[name])
        arguments.expect(
            _are_betas(given["betas"]), who, "betas", given["betas"], "two numbers of [0, 1)", "Pass (0.9, 0.999)."
        )
        arguments.count(who, "block_size", given["block_size"])
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step.

        Args:
            closure: Computes the loss anew, ahead of it.

        Returns:
            What `closure` gives.

        Raises:
            StateError: A state is none of AdamW8bit, or of another block_size. No parameter has changed by then.
            UnsupportedOpError: A parameter, or its gradient, is of a kind that has no plain shards. The same.

        Communicates:
            As the class says.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    @outside_of_graphs
    def _take_step(self) -> None:
        with outside_autograd():
            scales = self.__dict__.setdefault("_dshard_scales", Scales())
            _run(_items(self, scales))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, of codes and scales as they are: torch would cast them to the parameter's dtype.

        Args:
            state_dict: As `state_dict()` gives it.
        """
        before = self.register_load_state_dict_pre_hook(_cover_states)  # the last of all
        after = self.register_load_state_dict_post_hook(_uncover_states, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()


class _Covered:
    """A state that torch leaves as it is, for it is no tensor.

    Args:
        value: The tensor.
    """

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


def _cover_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def covered(named: Any) -> Any:
        if not isinstance(named, dict) or not any(name in named for name in _SCALES):
            return named
        kept = {*_MOMENTS, *_SCALES}
        return {n: _Covered(v) if n in kept and isinstance(v, Tensor) else v for n, v in named.items()}

    return {**state_dict, "state": {key: covered(named) for key, named in state_dict["state"].items()}}


def _uncover_states(optimizer: Optimizer) -> None:
    for param, named in optimizer.state.items():
        for name, value in named.items() if isinstance(named, dict) else ():
            if isinstance(value, _Covered):
                named[name] = value.value.to(_device_of(param))


def _are_betas(betas: Any) -> bool:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        return False
    numbers = [arguments.plain_scalar(beta) for beta in betas]
    return all(isinstance(each, Real) and not isinstance(each, bool) and 0 <= float(each) < 1 for each in numbers)


@dataclass(slots=True, eq=False)
class _ParamStep:
    """A parameter that is stepped.

    Args:
        param: The parameter.
        hyperparameters: What it is stepped with.
        tensors: What this rank has of it, and of the moments, as they lie.
        blocks: Of the shard; None where the moments are numbers and no codes.
        scales: Of each moment, of the blocks that are here.
    """

    param: Tensor
    hyperparameters: Hyperparameters
    tensors: list[Tensor]
    blocks: Blocks | None
    scales: list[Tensor]
    rows: list[Tensor] = field(default_factory=list)  # the same, each in one row, from `begin` to `end`
    grad: Tensor = field(init=False)  # of the shard, in one row
    parts: list[tuple[Range, list[Tensor]]] = field(default_factory=list)  # of cut blocks: which, and the new moments

    def begin(self) -> None:
        """Take the step, but for quantizing what is in blocks that are cut."""
        self.rows = [each.contiguous().view(-1) for each in self.tensors]
        self.grad = _gradient_of(self.param).reshape(-1)
        most = _CHUNK_OF_CPU if self.grad.device.type == "cpu" else _CHUNK
        if self.blocks is None:
            for part in chunks((0, self.grad.numel()), most):
                moments = [each[slice(*part)].float() for each in self.rows[1:]]
                self._update(part, moments)
                for each, moment in zip(self.rows[1:], moments, strict=True):
                    each[slice(*part)].copy_(moment)
            return
        for part in chunks(self.blocks.whole, max(1, most // self.blocks.size) * self.blocks.size):
            self._step_whole(part, self.blocks)
        for some in self.blocks.parts:
            for part in chunks(some, most):
                places = self.blocks.places_here(self.blocks.numbers(part))
                moments = [
                    each.mul_(scale[places]) for each, scale in zip(self._values(part), self.scales, strict=True)
                ]
                self._update(part, moments)
                self.parts.append((part, moments))

    def _step_whole(self, part: Range, blocks: Blocks) -> None:
        """Step the elements of some whole blocks."""
        first = int(bool(blocks.parts) and blocks.parts[0][0] == 0)  # of the blocks here one is cut, ahead of them
        begin, size = blocks.whole[0], blocks.size
        rows = slice(first + (part[0] - begin) // size, first + (part[1] - begin) // size)
        scales = [each[rows] for each in self.scales]
        pairs = zip(self._values(part), scales, strict=True)
        moments = [each.view(-1, size).mul_(scale[:, None]) for each, scale in pairs]
        self._update(part, [each.view(-1) for each in moments])
        for number, (moment, scale) in enumerate(zip(moments, scales, strict=True)):
            scale.copy_(scales_of(moment.abs().amax(1)))
            self._encode(number, part, moment.div_(scale[:, None]))

    def _values(self, part: Range) -> list[Tensor]:
        """What the codes of some elements moment, without their scales."""
        return [dequantize(codes[slice(*part)], is_signed=not n) for n, codes in enumerate(self.rows[1:])]

    def _update(self, part: Range, moments: list[Tensor]) -> None:
        """Step some elements, whose moments are written."""
        own = self.rows[0][slice(*part)]
        exact = own.float()
        adamw(exact, self.grad[slice(*part)].float(), moments, self.hyperparameters)
        if exact.data_ptr() != own.data_ptr():
            own.copy_(exact)

    def _encode(self, number: int, part: Range, quotients: Tensor) -> None:
        """Keep some elements of a moment as codes; of moments the first alone has negative values."""
        self.rows[1 + number][slice(*part)].copy_(quantize(quotients.view(-1), is_signed=number == 0))

    def largest_in_cut(self, blocks: Blocks) -> list[Tensor]:
        """The largest absolute values of each moment in blocks that ranks share, as far as this rank knows."""
        found = [torch.zeros(blocks.num_cut, dtype=torch.float32, device=self.grad.device) for _ in _MOMENTS]
        for part, moments in self.parts:
            at = blocks.places_in_cut(blocks.numbers(part))
            for each, moment in zip(found, moments, strict=True):
                each.scatter_reduce_(0, at, moment.abs(), "amax")
        return found

    def encode_cut(self, blocks: Blocks, largest: Sequence[Tensor]) -> None:
        """Encode what is in blocks that ranks share, by the largest absolute values on all of them."""
        known = [scales_of(each) for each in largest]
        for scales, new in zip(self.scales, known, strict=True):
            blocks.put_shared(new, scales)
        for part, moments in self.parts:
            at = blocks.places_in_cut(blocks.numbers(part))
            for number, (moment, new) in enumerate(zip(moments, known, strict=True)):
                self._encode(number, part, moment.div_(new[at]))

    def end(self) -> None:
        """Have tensors that do not lie in one row hold what was written, and count that, of empty shards too."""
        for tensor, row in zip(self.tensors, self.rows, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(row.view(tensor.shape))
        torch.autograd.graph.increment_version(self.tensors)
        self.rows.clear()
        self.parts.clear()
        del self.grad


def _items(optimizer: AdamW8bit, scales: Scales) -> list[_ParamStep]:
    """What is to be stepped; its states are made, and counted, when all is known to be right."""
    groups = [(group, param) for group in optimizer.param_groups for param in group["params"]]
    given = [(group, param) for group, param in groups if param.grad is not None]
    for _, param in given:
        _check(param)
    found = [_tensors_of(param, optimizer.state[param], group["block_size"]) for group, param in given]
    coded = [(g, p) for g, p in given if _has_codes(p, g["block_size"])]
    wanted = [
        Wanted(param, optimizer.state[param], _SCALES, group["block_size"])
        for group, param in coded
        if isinstance(param, ShardedTensor)
    ]
    kept: dict[int, tuple[Blocks, list[Tensor]]] = {}
    for of in scales.take(wanted, [param for _, param in groups]):
        kept[id(of.param)] = of.blocks, [of.scales[name] for name in _SCALES]
    for group, param in coded:
        if not isinstance(param, ShardedTensor):
            kept[id(param)] = _plain_scales(param, optimizer.state[param], group["block_size"])
    known: dict[tuple[Any, ...], Hyperparameters] = {}
    items = []
    for (group, param), tensors in zip(given, found, strict=True):
        key = id(group), _count(optimizer.state[param])
        if key not in known:
            known[key] = Hyperparameters.of(group["lr"], group["weight_decay"], group["betas"], group["eps"], key[1])
        items.append(_ParamStep(param, known[key], tensors, *kept.get(id(param), (None, []))))
    return items


def _run(items: Sequence[_ParamStep]) -> None:
    """Step parameters; those with cut blocks some at a time, for their moments are kept meanwhile."""
    waiting: list[tuple[_ParamStep, Blocks]] = []
    numel = 0
    for item in items:
        item.begin()
        if item.blocks is None or not item.blocks.num_cut:
            item.end()
            continue
        waiting.append((item, item.blocks))
        numel += item.blocks.num_cut * item.blocks.size
        if numel > _PARTS_NUMEL:  # on all ranks alike
            _end_cut(waiting)
            waiting, numel = [], 0
    _end_cut(waiting)


def _end_cut(items: Sequence[tuple[_ParamStep, Blocks]]) -> None:
    """End the step of parameters some of whose blocks are cut.

    Communicates:
        An all-reduce over each group of ranks that cuts some of them.
    """

    def kind(item: tuple[_ParamStep, Blocks]) -> tuple[Any, ...]:
        return *(group.full_name for group in distinct_groups(item[0].param)), item[0].grad.device

    for same in by_kind(items, kind):
        first = same[0][0].param
        largest = [each for item, blocks in same for each in item.largest_in_cut(blocks)]
        label = f"scales of '{_name_of(first)}' and {len(same) - 1} more"
        found = iter(largest_of_all(largest, distinct_groups(first), label))
        for item, blocks in same:
            item.encode_cut(blocks, [next(found) for _ in _MOMENTS])
            item.end()


def _check(param: Tensor) -> None:
    """Refuse what has no plain shard of real numbers.

    Raises:
        UnsupportedOpError: It has not.
    """
    grad: Any = param.grad
    what = ""
    if isinstance(param, DTensor) and type(param) not in SHARDED:
        what = "a DTensor that fully_shard has not taken"
    elif isinstance(param, ShardedTensor) and (param.is_view or subclass_gathers(param.shard_storage.resolve())):
        what = "a view, or of a tensor subclass"
    elif not param.is_floating_point():
        what = f"of {param.dtype}"
    elif grad.is_sparse:
        what = "one with a sparse gradient"
    if what:
        raise UnsupportedOpError(
            f"{_name_of(param)}: AdamW8bit steps parameters of real numbers, plain or sharded by fully_shard, by dense "
            f"gradients, but this is {what}. Give it to an optimizer of torch.optim."
        )


def _name_of(param: Tensor) -> str:
    return param.name if isinstance(param, ShardedTensor) else f"a parameter of shape {tuple(param.shape)}"


def _device_of(param: Tensor) -> torch.device:
    """Where what this rank has of a parameter is."""
    return param.storage_device if isinstance(param, ShardedTensor) else param.device


def _gradient_of(param: Tensor) -> Tensor:
    """The gradient of what this rank has of a parameter."""
    grad: Any = param.grad
    if not isinstance(param, ShardedTensor):
        return grad.full_tensor() if isinstance(grad, DTensor) else grad
    layout = param.shard_layout
    if type(grad) in SHARDED and not grad.is_view and grad.shard_storage.layout == layout:
        return grad.shard_storage.resolve()
    full = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return part_of(full, layout, param.shard_group.rank).to(param.storage_device)


def _has_codes(param: Tensor, size: int) -> bool:
    """Whether the states of a parameter are codes: a matter of the full one, and so the same on all ranks."""
    return param.numel() >= _LEAST_NUMEL and param.numel() % size == 0


def _tensors_of(param: Tensor, states: dict[str, Any], size: int) -> list[Tensor]:
    """What this rank has of a parameter and its moments, which are zeros at first.

    Raises:
        StateError: A moment is of another dtype or shape.
    """
    shard = param.shard_storage.writable() if isinstance(param, ShardedTensor) else param.detach()
    dtype = torch.uint8 if _has_codes(param, size) else shard.dtype
    found = [shard]
    for name in _MOMENTS:
        value = states.get(name)
        if value is not None and (value.dtype != dtype or value.shape != param.shape):
            raise StateError(
                f"{_name_of(param)}: '{name}' must be of {dtype} and shape {tuple(param.shape)} in the state of "
                f"AdamW8bit, but it is of {value.dtype} and {tuple(value.shape)}. Load states of AdamW8bit, with the "
                "same block_size."
            )
        if isinstance(param, ShardedTensor):
            value = states[name] = _moment_like(param, value, shard, dtype)
            found.append(value.shard_storage.writable())
        else:
            value = states[name] = torch.zeros_like(shard, dtype=dtype) if value is None else value
            found.append(value)
    return found


def _moment_like(param: ShardedTensor, value: Any, shard: Tensor, dtype: torch.dtype) -> ShardedTensor:
    """A moment that lies as its parameter does; zeros for None.

    Communicates:
        Gathers a value that lies otherwise.
    """
    if value is None:
        zeros = torch.zeros_like(shard, dtype=dtype)
        return param.like(ShardStorage(zeros, param.shard_layout, is_shared=True), dtype=dtype)
    if type(value) not in SHARDED or value.shard_storage.layout != param.shard_layout:
        full = value.full_tensor() if isinstance(value, DTensor) else value
        return shard_like(full.to(param.storage_device), param)
    value.origin = None
    return value


def _plain_scales(param: Tensor, states: dict[str, Any], size: int) -> tuple[Blocks, list[Tensor]]:
    """The blocks of a parameter that is not sharded, and their scales."""
    blocks = Blocks.of(ShardLayout(tuple(param.shape), None, 1), 0, size, param.device)
    for name in _SCALES:
        check_scales(_name_of(param), name, states.get(name), blocks)
        states.setdefault(name, torch.zeros(blocks.num_all, dtype=torch.float32, device=param.device))
    return blocks, [states[name] for name in _SCALES]


def _count(states: dict[str, Any]) -> float:
    """Count a step, of a parameter whose states are given; gives how many there are with it."""
    count = states.get("step", 0.0)
    if isinstance(count, DTensor):
        count = count.full_tensor()
    if not isinstance(count, Tensor):
        count = torch.tensor(float(count), dtype=torch.float32, device="cpu")
    states["step"] = count.add_(1)
    return float(count)
