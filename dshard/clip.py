"""Gradient clipping over sharded and plain parameters together."""

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dshard import arguments, collectives
from dshard.arguments import shown
from dshard.collectives import ReduceOp, ShardGroup
from dshard.compiling import outside_of_graphs
from dshard.errors import ArgumentError, DivergenceError, RankLostError
from dshard.tensor import ShardedTensor
from dshard.tensor.meshes import distinct_groups, groups_of
from dshard.tensor.operands import AgreedTensor

_WHO = "clip_grad_norm_"


@outside_of_graphs
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of all parameters together so that their norm is at most `max_norm`.

    The parts of the norm are added in fp64, so that it hardly depends on how the gradients are cut. Norms of offloaded
    gradients were computed where these were reduced, unless somebody has written to them since.

    Args:
        parameters: Sharded parameters, plain ones, or both; those without a gradient are skipped. Gradients of plain
            parameters must be equal on all ranks.
        max_norm: Largest norm to leave, 0 or more; `inf` to find the norm alone.
        norm_type: Order of the norm, above 0; `inf` for the largest absolute value.
        error_if_nonfinite: Raise, on every rank alike, if the norm is infinite or NaN.

    Returns:
        The norm of the full gradients before clipping: a 0-d tensor, fp64 if a gradient is and else fp32, equal on all
            ranks; its `full_tensor()` is itself.

    Raises:
        ArgumentError: A number is none that is allowed, or something among the parameters is no tensor.
        DivergenceError: The norm is not finite and `error_if_nonfinite` is set; the ranks were given other gradients or
            numbers (on a backend that runs its own collectives: at the end of the next backward); or ranks that share a
            gradient came to different norms, because their other parameters differ. On every rank alike.

    Communicates:
        One all-reduce of 8 bytes for each process group that holds some of the parameters (for DTensor parameters one
        more along each dim that cuts them), whose header compares what they were given, and for those that hold
        replicas one of 4; where there are several groups, another one of 16 bytes for each, to compare the norms.

    Source: `torch.nn.utils.clip_grad_norm_`, whose rule and epsilon it follows.
    """
    given: dict[str, Any] = {"max_norm": max_norm, "norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
    params = _tensors(parameters)
    grads = [p.grad for p in params if p.grad is not None]
    try:
        given = _checked(**given)
    except ArgumentError as error:
        with suppress(DivergenceError):  # the other ranks learn it from the message; this one's own error says more
            if grads:
                _total_norm(grads, 2.0, _told(**given))
        raise error from None
    max_norm, order = float(given["max_norm"]), float(given["norm_type"])
    if not params and not isinstance(parameters, Sized):
        warnings.warn(f"{_WHO}: parameters gave no tensor; was it a generator that was used up?", stacklevel=2)
    if not grads:
        return torch.tensor(0.0)
    for hear in _LISTENERS:
        hear(params, max_norm, order, given["error_if_nonfinite"])
    total = _total_norm(grads, order, _told(max_norm, order, given["error_if_nonfinite"]))
    if given["error_if_nonfinite"] and not bool(torch.isfinite(total)):
        raise DivergenceError(
            f"clip_grad_norm_: the norm of the gradients must be finite, but it is {total.item()}. Skip the step, "
            "lower the learning rate, or look for a bad batch."
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    # In the CPU's memory all of them would be read and written for nothing; a device would have to be waited for.
    if factor.device.type == "cpu" and float(factor) == 1.0:
        return total
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    for where, part in by_device.items():
        torch._foreach_mul_(part, factor.to(where))
    return total


_Hear = Callable[[Sequence[Tensor], float, float, bool], None]
_LISTENERS: list[_Hear] = []


@contextmanager
def on_clip(hear: _Hear) -> Iterator[None]:
    """Have a function called with the arguments ahead of each clipping."""
    _LISTENERS.append(hear)
    try:
        yield
    finally:
        _LISTENERS.remove(hear)


def _tensors(parameters: Any) -> tuple[Tensor, ...]:
    """The argument `parameters` as a tuple, of which a generator gives its tensors once."""
    if isinstance(parameters, Tensor):
        return (parameters,)
    allowed, way = "a tensor, or an iterable of tensors", "Pass model.parameters()."
    return arguments.several(_WHO, "parameters", parameters, lambda each: isinstance(each, Tensor), allowed, way)


def _checked(max_norm: Any, norm_type: Any, error_if_nonfinite: Any) -> dict[str, Any]:
    """The other arguments as numbers."""
    allowed = "a number of at least 0, or inf"
    max_norm = arguments.number(_WHO, "max_norm", max_norm, lambda x: x >= 0, allowed, "Pass 1.0.")
    allowed, way = "a number above 0, or inf", "Pass 2.0 or inf."
    if not (isinstance(norm_type, str) and norm_type == "inf"):
        norm_type = arguments.number(_WHO, "norm_type", norm_type, lambda x: x > 0, allowed, way)
    error_if_nonfinite = arguments.boolean(_WHO, "error_if_nonfinite", error_if_nonfinite)
    return {"max_norm": max_norm, "norm_type": float(norm_type), "error_if_nonfinite": error_if_nonfinite}


def _told(max_norm: Any, norm_type: Any, error_if_nonfinite: Any) -> str:
    """Numbers that all ranks must be given alike, behind the gradients: a message shows the end of another rank's."""
    given = {"error_if_nonfinite": error_if_nonfinite, "norm_type": norm_type, "max_norm": max_norm}
    defaults = {"error_if_nonfinite": False, "norm_type": 2.0}
    texts = {name: shown(value) for name, value in given.items() if shown(value) != str(defaults.get(name))}
    return f"{', '.join(f'{name}={text}' for name, text in texts.items())})"


def _total_norm(grads: Sequence[Tensor], order: float, told: str) -> Tensor:
    """The norm of all gradients together, from parts that add up (or, for `inf`, compare) over the ranks.

    Args:
        grads: Of all parameters.
        order: Of the norm.
        told: What else the ranks must have alike.
    """
    device = grads[0].device
    whole: list[Tensor] = []
    cut: dict[tuple[int, ...], tuple[list[ShardGroup], list[Tensor]]] = {}  # norms of shards, and the groups of these
    for grad in grads:
        if not isinstance(grad, ShardedTensor):
            whole.append(grad.full_tensor() if isinstance(grad, DTensor) else grad)
        elif grad.is_view or not (groups := distinct_groups(grad)):
            whole.append(grad.materialize())
        else:
            key = tuple(id(group.process_group) for group in groups)
            norms = cut.setdefault(key, (groups, []))[1]
            if (shard := grad.shard_storage.resolve()).numel():
                known = grad.shard_storage.known_norm(torch.float64, order)
                norms.append(known if known is not None else _norm(shard, order))
    alike = _Agreement(told, grads)
    parts = [_part([_norm(each, order) for each in whole if each.numel()], order, device)]
    for groups, norms in cut.values():
        op = ReduceOp.MAX if order == float("inf") else ReduceOp.SUM
        part = _part(norms, order, torch.device(groups[0].device_type))
        for group in groups:
            part = alike.all_reduce(part, group, op)
        parts.append(part.to(device))
    together = torch.stack(parts)
    norm = together.amax() if order == float("inf") else together.sum().pow(1.0 / order)  # in fp64
    alike.compare()
    if len(cut) > 1:
        every = {id(group.process_group): group for groups, _ in cut.values() for group in groups}
        _check_agreement(norm, list(every.values()))
    alike.check()
    norm = norm.to(torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32)
    mesh = next((grad.device_mesh for grad in grads if isinstance(grad, DTensor)), None)
    return AgreedTensor.of(norm, mesh) if mesh is not None else norm


def _is_sharded(grad: Any) -> TypeGuard[ShardedTensor]:
    return isinstance(grad, ShardedTensor)


class _Agreement:
    """Whether the ranks were given the same gradients and numbers, which goes ahead of what they reduce.

    An error is kept until all groups were asked, and told to those that follow: their ranks wait for this one.

    Args:
        told: The numbers.
        grads: The gradients.
    """

    def __init__(self, told: str, grads: Sequence[Tensor]) -> None:
        self._told = told
        self._error: DivergenceError | None = None
        self._asked: set[str] = set()
        self._groups: dict[str, tuple[ShardGroup, list[str]]] = {}  # that hold some gradients or replicas, and which
        for grad in filter(_is_sharded, grads):
            for group in groups_of(grad):
                own: ShardGroup | None = group
                while own is not None:
                    self._groups.setdefault(own.name, (own, []))[1].append(grad.name)
                    own = own.replicas

    def all_reduce(self, part: Tensor, group: ShardGroup, op: ReduceOp, *, is_check: bool = False) -> Tensor:
        """The part of all ranks of a group together."""
        self._asked.add(group.name)
        names = self._groups[group.name][1]
        passed = f"{len(names)} named #{zlib.crc32(repr(names).encode()) & 0xFFFF:04x}"
        told = f"(gradients={passed}, {self._told if self._error is None else 'max_norm=not the same everywhere)'}"
        try:
            sent = collectives.all_reduce([part], group, op, label=_WHO, arguments=told, is_check=is_check)
            return sent.wait()[0]
        except RankLostError:  # no word of a peer's: those of other groups find out by themselves
            raise
        except DivergenceError as error:
            self._error = self._error or error
            return part

    def compare(self) -> None:
        """Ask the other groups that share some gradients: replicas, of which each scales its own."""
        for group, _ in self._groups.values():
            if group.num_ranks > 1 and group.name not in self._asked:
                self.all_reduce(torch.zeros(1, device=group.device_type), group, ReduceOp.MAX, is_check=True)

    def check(self) -> None:
        """Raise what was found."""
        if self._error is not None:
            raise self._error


def _check_agreement(norm: Tensor, groups: Sequence[ShardGroup]) -> None:
    """Raise, on every rank of a group, if its ranks found different norms and would scale one gradient differently."""
    found = []
    for group in groups:  # all of them ahead of an error: the ranks of a later group wait for this one
        mine = torch.stack([norm, -norm]).to(group.device_type)
        found.append(collectives.all_reduce([mine], group, ReduceOp.MAX, label=_WHO).wait()[0].tolist())
    for most, least in found:
        if most + least > 1e-9 * abs(most):
            raise DivergenceError(
                f"clip_grad_norm_: all ranks that share a gradient must scale it alike, but their norms are between "
                f"{-least:.6g} and {most:.6g}, because they differ in the other parameters that were passed. Clip the "
                "parameters of each mesh by themselves."
            )


def _norm(tensor: Tensor, order: float) -> Tensor:
    """The norm of a tensor with elements, in fp64."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return torch.linalg.vector_norm(tensor, order, dtype=wide).abs()


def _part(norms: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """What some norms of this rank add to the whole: a sum of powers in fp64, or the largest one."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    together = torch.stack([norm.to(device) for norm in norms])
    return together.amax() if order == float("inf") else together.pow(order).sum()
