"""AdamW whose states are numbers of 8 bits, in blocks that follow the full parameter."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dshard import arguments, collectives
from dshard.autograd import outside_autograd
from dshard.collectives import ReduceOp
from dshard.compiling import outside_of_graphs
from dshard.errors import StateError, UnsupportedOpError
from dshard.layout import ShardLayout
from dshard.optimizer.blocks import Blocks, Range, chunks
from dshard.optimizer.eight_bit import Rates, quotients_to_codes, scales_of, step_of, values_of
from dshard.optimizer.scales import Scales, Wanted
from dshard.tensor.meshes import distinct_groups, part_of
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.storage import ShardStorage
from dshard.tensor.subclass_shards import subclass_gathers

_LEAST_NUMEL = 4096  # of a parameter whose states have 8 bits
_MEANS = ("exp_avg", "exp_avg_sq")  # of gradients, and of their squares
_SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
_AT_ONCE = {"cpu": 1 << 15}  # elements that are stepped at a time, by device: as many as lie in a core's cache
_AT_ONCE_ELSEWHERE = 1 << 24
_PARTS_NUMEL = 1 << 23  # of parameters that cut blocks are kept of, as fp32, until ranks know their scales


class AdamW8bit(Optimizer):
    """AdamW with states of 8 bits: 2.03 bytes per element of a parameter, in the place of 8.

    States of a parameter of at least 4,096 elements, whose number `block_size` divides, are kept as codes and one scale
    for each block: `block_size` elements that are neighbours in the full parameter. So the bits are the same at any
    number of ranks, under every strategy and whatever is sharded with what: those of `torchao.optim.AdamW8bit` on one
    device. A block that the end of a shard cuts is of one scale all the same, the largest value on any rank; the ranks
    that have some of it keep that. Other parameters have states of their own dtype. It is computed in fp32.

    In `state` there are, of each parameter, `step`, `exp_avg` and `exp_avg_sq`: codes of the parameter's shape, in
    uint8; and `exp_avg_scale` and `exp_avg_sq_scale`, fp32 of shape `(numel / block_size,)`. All are sharded as the
    parameter is.

    Args:
        params: Parameters, or groups of them, sharded or not.
        lr: Learning rate.
        betas: How much is kept of the means of gradients and of their squares in a step.
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
        who = "AdamW8bit"
        arguments.from_0(who, "lr", lr)
        arguments.expect(_are_betas(betas), who, "betas", betas, "two numbers of [0, 1)", "Pass (0.9, 0.999).")
        arguments.from_0(who, "eps", eps)
        arguments.from_0(who, "weight_decay", weight_decay)
        arguments.count(who, "block_size", block_size)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "block_size": block_size}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step.

        Args:
            closure: Computes the loss anew, ahead of it.

        Returns:
            What `closure` gives.

        Raises:
            UnsupportedOpError: A parameter, or its gradient, is of a kind that has no plain shards.

        Communicates:
            As the class says.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @outside_of_graphs
    def _step(self) -> None:
        with outside_autograd():
            scales = self.__dict__.setdefault("_dshard_scales", Scales())
            _Step(self, scales).run()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict, of codes and scales as they are: torch would cast them to the parameter's dtype.

        Args:
            state_dict: As `state_dict()` gives it.
        """
        states = state_dict["state"]
        coded = {
            key: {name: value for name, value in named.items() if name in _SCALES or f"{name}_scale" in named}
            for key, named in states.items()
        }
        rest = {key: {name: v for name, v in named.items() if name not in coded[key]} for key, named in states.items()}
        super().load_state_dict({**state_dict, "state": rest})
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, param in zip(keys, params, strict=True):
            for name, value in coded.get(key, {}).items():
                self.state[param][name] = value.to(param.device)


def _are_betas(betas: Any) -> bool:
    return isinstance(betas, (tuple, list)) and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)


@dataclass(slots=True, eq=False)
class _Item:
    """A parameter that is stepped.

    Args:
        param: The parameter.
        states: Of it.
        size: Elements of a block.
        rates: What it is taken with.
        tensors: What this rank has of it, and of the means, as they lie.
    """

    param: Tensor
    states: dict[str, Any]
    size: int
    rates: Rates
    tensors: list[Tensor]
    flat: list[Tensor] = field(init=False)  # the same, each in one row
    grad: Tensor = field(init=False)  # of the shard, in one row
    blocks: Blocks | None = None  # of the shard; None where the means are numbers and no codes
    scales: list[Tensor] = field(default_factory=list)  # of each mean
    parts: list[tuple[Range, list[Tensor]]] = field(default_factory=list)  # of cut blocks: which, and the new means

    def __post_init__(self) -> None:
        self.flat = [each.contiguous().view(-1) for each in self.tensors]
        self.grad = _gradient_of(self.param).reshape(-1)

    @property
    def has_codes(self) -> bool:
        """Whether the means are codes."""
        return _has_codes(self.param, self.size)

    def step(self) -> None:
        """Take the step, up to the codes in blocks that are cut."""
        numel = self.flat[0].numel()
        device = self.flat[0].device.type
        most = max(1, _AT_ONCE.get(device, _AT_ONCE_ELSEWHERE) // self.size) * self.size
        if self.blocks is None:
            for part in chunks((0, numel), most):
                means = [each[slice(*part)].float() for each in self.flat[1:]]
                self._step(part, means)
                for each, mean in zip(self.flat[1:], means, strict=True):
                    each[slice(*part)].copy_(mean)
            return
        for part in chunks(self.blocks.whole, most):
            self._step_whole(part, self.blocks)
        for some in self.blocks.parts:
            for part in chunks(some, most):
                numbers = self.blocks.numbers(part, self.grad.device) - self.blocks.span[0]
                means = [each.mul_(scale[numbers]) for each, scale in zip(self._values(part), self.scales, strict=True)]
                self._step(part, means)
                self.parts.append((part, means))

    def _step_whole(self, part: Range, blocks: Blocks) -> None:
        """Step the elements of some whole blocks."""
        first, begin = blocks.whole_blocks[0], blocks.whole[0]
        rows = slice(first + (part[0] - begin) // self.size, first + (part[1] - begin) // self.size)
        scales = [each[rows] for each in self.scales]
        pairs = zip(self._values(part), scales, strict=True)
        means = [each.view(-1, self.size).mul_(scale[:, None]) for each, scale in pairs]
        self._step(part, [each.view(-1) for each in means])
        for number, (mean, scale) in enumerate(zip(means, scales, strict=True)):
            scale.copy_(scales_of(mean.abs().amax(1)))
            self._encode(number, part, mean.div_(scale[:, None]))

    def _values(self, part: Range) -> list[Tensor]:
        """What the codes of some elements mean, without their scales."""
        return [values_of(codes[slice(*part)], is_signed=not n) for n, codes in enumerate(self.flat[1:])]

    def _step(self, part: Range, means: list[Tensor]) -> None:
        """Step some elements, whose means are written."""
        own = self.flat[0][slice(*part)]
        exact = own.float()
        step_of(exact, self.grad[slice(*part)].float(), means, self.rates)
        if exact.data_ptr() != own.data_ptr():
            own.copy_(exact)

    def _encode(self, number: int, part: Range, quotients: Tensor) -> None:
        """Keep some elements of a mean as codes; of means the first alone has negative values."""
        self.flat[1 + number][slice(*part)].copy_(quotients_to_codes(quotients.view(-1), is_signed=number == 0))

    def largest(self) -> list[Tensor]:
        """The largest absolute values of each mean in blocks that are cut, as far as this rank knows."""
        assert self.blocks is not None
        found = [torch.zeros(self.blocks.cut.numel(), device=self.grad.device) for _ in _MEANS]
        for part, means in self.parts:
            at = self.blocks.places_in_cut(part, self.grad.device)
            for each, mean in zip(found, means, strict=True):
                each.scatter_reduce_(0, at, mean.abs(), "amax")
        return found

    def end(self, largest: Sequence[Tensor]) -> None:
        """Encode what is in blocks that are cut, by the largest absolute values on all ranks."""
        assert self.blocks is not None
        first, last = self.blocks.cut_here
        here = (self.blocks.cut[first:last] - self.blocks.span[0]).to(self.grad.device)
        known = [scales_of(each) for each in largest]
        for scales, new in zip(self.scales, known, strict=True):
            scales[here] = new[first:last]
        for part, means in self.parts:
            at = self.blocks.places_in_cut(part, self.grad.device)
            for number, (mean, new) in enumerate(zip(means, known, strict=True)):
                self._encode(number, part, mean.div_(new[at]))
        self.parts.clear()

    def close(self) -> None:
        """Have tensors that do not lie in one row hold what was written, and count that, of empty shards too."""
        for tensor, flat in zip(self.tensors, self.flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))
        torch.autograd.graph.increment_version(self.tensors)


class _Step:
    """One step of an optimizer.

    Args:
        optimizer: The optimizer.
        scales: Of its states.
    """

    def __init__(self, optimizer: AdamW8bit, scales: Scales) -> None:
        self._optimizer = optimizer
        self._rates: dict[tuple[int, float], Rates] = {}
        groups = enumerate(optimizer.param_groups)
        given = [(number, group, param) for number, group in groups for param in group["params"]]
        self._items = [self._begin(*each) for each in given if each[2].grad is not None]
        coded = [item for item in self._items if item.has_codes]
        sharded = [item for item in coded if type(item.param) in SHARDED]
        wanted = [Wanted(item.param, item.states, _SCALES, item.size) for item in sharded]  # type: ignore[arg-type]
        for item, of in zip(sharded, scales.take(wanted), strict=True):
            item.blocks, item.scales = of.blocks, [of.kept[name].scales for name in _SCALES]
        for item in coded:
            if type(item.param) not in SHARDED:
                item.blocks = Blocks.of(ShardLayout(tuple(item.param.shape), None, 1), 0, item.size)
                zeros = partial(torch.zeros, item.blocks.num_all, device=item.param.device)
                item.scales = [
                    item.states[n] if n in item.states else item.states.setdefault(n, zeros()) for n in _SCALES
                ]

    def _begin(self, number: int, group: dict[str, Any], param: Tensor) -> _Item:
        """Find what a parameter is stepped with, and its states."""
        _check(param)
        states = self._optimizer.state[param]
        count = states.setdefault("step", torch.tensor(0.0))
        if isinstance(count, DTensor):
            count = states["step"] = count.full_tensor()
        count += 1
        key = number, float(count)
        if key not in self._rates:
            self._rates[key] = Rates.of(group["lr"], group["weight_decay"], group["betas"], group["eps"], key[1])
        shard = param.shard_storage.writable() if isinstance(param, ShardedTensor) else param.detach()
        dtype = torch.uint8 if _has_codes(param, group["block_size"]) else shard.dtype
        means = [_mean(states, name, param, shard, dtype) for name in _MEANS]
        return _Item(param, states, group["block_size"], self._rates[key], [shard, *means])

    def run(self) -> None:
        """Take it."""
        cut: list[_Item] = []
        numel = 0
        for item in self._items:
            item.step()
            if item.blocks is not None and item.blocks.cut.numel():
                cut.append(item)
                numel += item.blocks.cut.numel() * item.size
                if numel > _PARTS_NUMEL:  # on all ranks alike
                    _end(cut)
                    cut, numel = [], 0
        _end(cut)
        for item in self._items:
            item.close()


def _end(items: Sequence[_Item]) -> None:
    """End the step of parameters some of whose blocks are cut.

    Communicates:
        An all-reduce over each group of ranks that cuts some of them.
    """
    kinds: dict[tuple[str, ...], list[_Item]] = {}
    for item in items:
        kinds.setdefault(tuple(group.full_name for group in distinct_groups(item.param)), []).append(item)
    for same in kinds.values():
        largest = [each for item in same for each in item.largest()]
        for group in distinct_groups(same[0].param):
            label = f"scales of '{_name_of(same[0].param)}' and {len(same) - 1} more"
            largest = collectives.all_reduce(largest, group, ReduceOp.MAX, label=label).wait()
        found = iter(largest)
        for item in same:
            item.end([next(found) for _ in _MEANS])


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


def _mean(states: dict[str, Any], name: str, param: Tensor, shard: Tensor, dtype: torch.dtype) -> Tensor:
    """What this rank has of a mean; zeros at first."""
    value = states.get(name)
    if value is None:
        value = torch.zeros_like(shard, dtype=dtype)
        if isinstance(param, ShardedTensor):
            value = param.like(ShardStorage(value, param.shard_layout, is_shared=True), dtype=dtype)
        states[name] = value
    if value.dtype != dtype:
        raise StateError(
            f"{_name_of(param)}: '{name}' must be of {dtype} in the state of AdamW8bit, but it is of {value.dtype}. "
            "Load states of AdamW8bit, with the same block_size."
        )
    return value.shard_storage.writable() if isinstance(value, ShardedTensor) else value
