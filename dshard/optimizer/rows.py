"""Small shards of an optimizer, stepped in rows: many of them as one tensor.

To start a kernel, and to look up a parameter and its states, takes an elementwise step longer than to compute a
thousand elements. So the small shards of a group that are of one kind are copied one behind the other into a *row*,
with their gradients, and copied back when the optimizer has stepped that. Their states lie in rows between steps, too;
to a program each is a sharded tensor, or a number, of its own.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dshard.interpreter import is_referred_to
from dshard.layout import ROW_NUMEL, packs
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.storage import ShardStorage, shards_of

FEWEST_IN_ROW = 4  # shards
_MAX_NUMEL = 1 << 14  # elements of a row: its memory is there until the last of its states has left it
_GRANULE = 8  # elements; a CPU's kernels, unlike CUDA's, compute what is left at the end of a tensor in another way
_NAME = "_dshard_rows"

_STORAGE, _GRAD, _VIEW = attrgetter("shard_storage"), attrgetter("grad"), attrgetter("_view")


class _Shapes:
    """How the shards of a row lie in it.

    Args:
        shards: These; those with one dim come first.
    """

    def __init__(self, shards: Sequence[Tensor]) -> None:
        self._shapes, self._sizes = [shard.shape for shard in shards], [shard.numel() for shard in shards]
        self.num_flat = sum(shard.dim() == 1 for shard in shards)
        self.flat_numel, self.numel = sum(self._sizes[: self.num_flat]), sum(self._sizes)

    def cut(self, row: Tensor) -> list[Tensor]:
        """The parts of a row, each with a version counter of its own."""
        parts = torch.unsafe_split_with_sizes(row, self._sizes)
        return [part.view(shape).data for part, shape in zip(parts, self._shapes, strict=True)]


class _Memory:
    """A row in which shards, or their gradients, lie for one step.

    Args:
        shapes: Of the shards.
        like: One of them.
    """

    def __init__(self, shapes: _Shapes, like: Tensor) -> None:
        with torch.inference_mode(mode=False):
            self.row = torch.empty(shapes.numel, dtype=like.dtype, device=like.device)
        self._flat, self._num_flat = self.row[: shapes.flat_numel].data, shapes.num_flat
        self._parts = shapes.cut(self.row)
        self._filled_at = 0  # its count of writes
        self.free()

    def fill(self, shards: list[Tensor]) -> None:
        """Copy shards into it."""
        self.row.untyped_storage().resize_(self.row.numel() * self.row.itemsize)
        if self._num_flat:  # in a third of the time
            torch.cat(shards[: self._num_flat], out=self._flat)
        if self._num_flat < len(shards):
            torch._foreach_copy_(self._parts[self._num_flat :], shards[self._num_flat :])
        self._filled_at = self.row._version

    @property
    def is_written(self) -> bool:
        """Whether it was written to since it was filled; a fused kernel does not count that."""
        return self.row._version != self._filled_at

    def copy_to(self, shards: list[Tensor]) -> None:
        """Copy it into shards."""
        torch._foreach_copy_(shards, self._parts)

    def free(self) -> None:
        """Take no memory until it is filled; the tensor stays the same, as a compiled step expects."""
        self.row.untyped_storage().resize_(0)


class Row:
    """Parameters of one group that an optimizer steps as one tensor.

    Args:
        group: Its number.
        params: The parameters; each has a gradient. Those with one dim come first.
        named: The states of each, as the optimizer keeps them.

    Attributes:
        tensor: Stands in for them; its memory is there from `begin` to `end`, as that of its gradient.
    """

    def __init__(self, group: int, params: Sequence[ShardedTensor], named: Sequence[dict[str, Any]]) -> None:
        self.group, self.params, self.named = group, list(params), list(named)
        self._storages = list(map(_STORAGE, params))
        shards = shards_of(self._storages)
        self._shards = list(map(weakref.ref, shards))  # weak, else they would seem to be held
        self._layouts = [storage.layout for storage in self._storages]
        self._shapes = _Shapes(shards)
        self._memory, self._grad_memory = _Memory(self._shapes, shards[0]), _Memory(self._shapes, shards[0])
        self.tensor = self._memory.row
        self._stepped: list[Tensor] = []  # the shards, from `holds` or `begin` to `end`
        self._grads: list[Tensor] = []  # and those of gradients
        self._values: list[Any] = []  # of all states of all parameters, in order
        self._states: list[ShardStorage] = []  # those of them that are shards, and these
        self._state_shards: list[Tensor] = []
        self._numbers: dict[str, Tensor] = {}  # of all parameters, by the names of states without a dim
        self._kept: dict[str, list[Tensor]] = {}  # those of them that somebody keeps, and so lie elsewhere
        self._number_versions: list[int] = []
        self._state = self._joined()  # what the optimizer keeps of the row

    def _joined(self) -> dict[str, Any]:
        """The states that parameters have by now, moved to lie in rows."""
        joined: dict[str, Any] = {}
        for name in list(self.named[0]):
            first, values = self.named[0][name], [each[name] for each in self.named]
            if type(first) in SHARDED:
                shards = shards_of([value.shard_storage for value in values])
                joined[name] = row = torch.cat([shard.reshape(-1) for shard in shards])
                for value, part in zip(values, self._shapes.cut(row), strict=True):
                    value.origin = None  # of a state that was cast as it was loaded
                    value.shard_storage.deliver(part)
            elif isinstance(first, Tensor):
                joined[name] = number = first.clone()
                del first, values  # which would seem to be kept
                self._number(name, number)
            else:
                joined[name] = first
        self._note()
        return joined

    def _number(self, name: str, value: Tensor) -> None:
        """Give each parameter a number of its own, as a tensor without a dim; what somebody keeps goes on itself."""
        self._numbers[name] = numbers = torch.empty(len(self.params), dtype=value.dtype, device=value.device)
        self._kept[name] = kept = list[Tensor]()
        for named, number in zip(self.named, numbers.unbind(), strict=True):
            old: Any = named.get(name)
            is_alike = isinstance(old, Tensor) and (old.dtype, old.device) == (value.dtype, value.device)
            if is_alike and is_referred_to(old, 1):
                kept.append(old)
            else:
                named[name] = number
        self._set_number(name, value)

    def _set_number(self, name: str, value: Tensor) -> None:
        """Write one of the numbers of all parameters."""
        self._numbers[name].copy_(value)
        if kept := self._kept[name]:
            torch._foreach_copy_(kept, [value] * len(kept))

    def _versions(self) -> list[int]:
        """Counts of writes to the numbers."""
        return [each._version for each in chain(self._numbers.values(), *self._kept.values())]

    def _note(self) -> None:
        """What the states are now is what `holds` compares them with."""
        self._values = list(chain.from_iterable(map(dict.values, self.named)))
        self._states = [value.shard_storage for value in self._values if type(value) in SHARDED]
        self._state_shards = [storage.resolve() for storage in self._states]
        self._number_versions = self._versions()

    def holds(self, grads: Sequence[Any]) -> bool:
        """Whether shards, gradients and states are what they were but for their values, and can be stepped.

        Args:
            grads: Those of the parameters.
        """
        storages = list(map(_STORAGE, self.params))
        shards = shards_of(storages)
        if not _are_same(storages, self._storages) or not _are_same(shards, [ref() for ref in self._shards]):
            return False
        if not _are_same(chain.from_iterable(map(dict.values, self.named)), self._values):
            return False
        if self._versions() != self._number_versions:
            return False
        if not _are_same(shards_of(self._states), self._state_shards):
            return False
        self._stepped, self._grads = shards, self._lying_alike(grads)
        return bool(self._grads)

    def _lying_alike(self, grads: Sequence[Any]) -> list[Tensor]:
        """The shards of gradients, if they lie as the parameters' do, else none: `_may_step` of each, for many."""
        if not SHARDED.issuperset(map(type, grads)) or any(map(_VIEW, grads)):
            return []
        storages = list(map(_STORAGE, grads))
        layouts = [storage.layout for storage in storages]
        if not _are_same(layouts, self._layouts) and layouts != self._layouts:
            return []
        shards = shards_of(storages)
        is_alike = {*map(type, shards)} == {Tensor} and {shard.dtype for shard in shards} == {self.tensor.dtype}
        return shards if is_alike else []

    @property
    def states(self) -> list[ShardStorage]:
        """All of its states that are shards: those of one name, which lie in one memory, and then those of the next."""
        names = [name for name, first in self.named[0].items() if type(first) in SHARDED]
        return [named[name].shard_storage for name in names for named in self.named]

    def begin(self) -> dict[str, Any]:
        """Fill the row, which the optimizer is about to step; gives its states."""
        if not self._stepped:  # it was made for this step
            grads: list[Any] = list(map(_GRAD, self.params))
            self._stepped, self._grads = shards_of(self._storages), shards_of([grad.shard_storage for grad in grads])
        with torch.no_grad():
            self._memory.fill(self._stepped)
            self._grad_memory.fill(self._grads)
        self.tensor.grad = self._grad_memory.row
        return dict(self._state)

    def let_go(self) -> None:
        """Hold no shards: it is not stepped now."""
        self._stepped, self._grads = [], []

    @property
    def has_moved(self) -> bool:
        """Whether the optimizer has written to it."""
        return self._memory.is_written

    def end(self, state: dict[str, Any], *, writes_grads: bool) -> bool:
        """Give parameters what became of the row, and their states; gives whether these are others than before.

        Args:
            state: What the optimizer keeps of the row by now.
            writes_grads: Whether it may have written to gradients without counting that.
        """
        has_grads = self.tensor.grad is not None  # else zero_grad() was called, after a step that raised
        self.tensor.grad = None
        with torch.no_grad():
            self._memory.copy_to(self._stepped)
            if has_grads and (writes_grads or self._grad_memory.is_written):
                self._grad_memory.copy_to(self._grads)
            is_new = self._take(state)
        self._memory.free()
        self._grad_memory.free()
        self.let_go()
        for param in () if has_grads else self.params:
            param.grad = None
        torch.autograd.graph.increment_version([*self.params, *self._state_shards])
        return is_new

    def _take(self, state: dict[str, Any]) -> bool:
        is_new = False
        for name, value in state.items():
            before = self._state.get(name, _NOTHING)
            if isinstance(value, Tensor) and not value.dim():
                numbers = self._numbers.get(name)
                if numbers is not None and numbers.dtype == value.dtype and numbers.device == value.device:
                    self._set_number(name, value)
                else:
                    self._number(name, value)
                    is_new = True
            elif value is not before:
                self._set(name, value)
                is_new = True
        self._state = state
        if is_new:
            self._note()
        else:
            self._number_versions = self._versions()
        return is_new

    def _set(self, name: str, value: Any) -> None:
        """Give parameters their parts of a state that the step made or replaced."""
        if not isinstance(value, Tensor):
            for named in self.named:
                named[name] = value
            return
        for param, named, part in zip(self.params, self.named, self._shapes.cut(value), strict=True):
            old: Any = named.get(name)
            if type(old) in SHARDED:
                old.shard_storage.deliver(part)
            else:
                storage = ShardStorage(part, param.shard_layout, is_shared=True)
                named[name] = param.like(storage, dtype=value.dtype)


_NOTHING = object()


class Rows:
    """The rows of an optimizer, and what tells whether they are still what is to be stepped.

    Args:
        optimizer: The optimizer.
        kinds: What they are made of; None for no rows yet, but in the next step, if it is like this one.
    """

    def __init__(
        self, optimizer: Optimizer, kinds: Iterable[tuple[int, list[ShardedTensor], list[dict[str, Any]]]] | None
    ) -> None:
        self._params, self._groups = params_of(optimizer), _groups_of(optimizer)
        self._have_grads = [param.grad is not None for param in self._params]
        self.rows = [Row(*each) for each in kinds or ()]
        self.of_param = {id(param): row for row in self.rows for param in row.params}
        places = {id(param): place for place, param in enumerate(self._params)}
        self._in_rows = [[places[id(param)] for param in row.params] for row in self.rows]  # among all parameters
        self._is_waiting = kinds is None
        self._note(optimizer)

    @classmethod
    def of(cls, optimizer: Optimizer) -> "Rows":
        """Those of an optimizer that is about to step; where they are made, states are moved to lie in them.

        To make rows takes longer than a step, and other gradients may be missing each time. So where rows no longer
        hold they are given up, and made again once a step is like the one before it.
        """
        known: Rows | None = optimizer.__dict__.get(_NAME)
        holds = known is None or known.holds(optimizer)
        if known is None or (holds and known._is_waiting):
            optimizer.__dict__[_NAME] = known = cls(optimizer, _kinds(optimizer))
        elif not holds:
            known = None  # which lets go of what would seem to be held
            cls.leave(optimizer)
            optimizer.__dict__[_NAME] = known = cls(optimizer, None)
        return known

    @staticmethod
    def note_states(optimizer: Optimizer) -> None:
        """An optimizer has other states than before, because it has stepped."""
        known: Rows | None = optimizer.__dict__.get(_NAME)
        if known is not None:
            known._note(optimizer)

    def _note(self, optimizer: Optimizer) -> None:
        """Take down which states there are, and hold those of rows alone: others may be waited for to be let go of."""
        self._keys, named = list(optimizer.state), list(optimizer.state.values())
        self._places = [place for place, param in enumerate(self._keys) if id(param) in self.of_param]
        self._named = [named[place] for place in self._places]
        self.has_all_states = len(self._places) == len(self._keys)

    @staticmethod
    def leave(optimizer: Optimizer) -> None:
        """Give up an optimizer's rows: each state gets memory of its own, but for those that somebody refers to."""
        known: Rows | None = optimizer.__dict__.pop(_NAME, None)
        states = list(chain.from_iterable([row.states for row in known.rows])) if known is not None else []
        del known  # which would seem to hold them
        sharing = _Sharing(optimizer)
        held = {id(storage) for storage in states if sharing.is_held(storage)}
        for storage in states:
            if id(storage) not in held:
                storage.deliver(storage.resolve().clone())

    def let_go(self) -> None:
        """Hold no shards: they are not stepped after all."""
        for row in self.rows:
            row.let_go()

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether they are the rows of the optimizer as it is."""
        state = optimizer.state
        named = list(state.values())
        grads = list(map(_GRAD, self._params))
        return (
            _are_same(params_of(optimizer), self._params)
            and _groups_of(optimizer) == self._groups
            and _are_same(state, self._keys)
            and _are_same(named if self.has_all_states else [named[place] for place in self._places], self._named)
            and [grad is not None for grad in grads] == self._have_grads
            and all(
                row.holds([grads[place] for place in places])
                for row, places in zip(self.rows, self._in_rows, strict=True)
            )
        )


def params_of(optimizer: Optimizer) -> list[Any]:
    """Those of all groups of an optimizer, in order."""
    return list(chain.from_iterable([group["params"] for group in optimizer.param_groups]))


def _groups_of(optimizer: Optimizer) -> list[tuple[int, Any]]:
    """What rows depend on of the groups, besides their parameters."""
    return [(len(group["params"]), group.get("fused")) for group in optimizer.param_groups]


def _are_same(some: Iterable[Any], others: Sequence[Any]) -> bool:
    some = list(some)
    return len(some) == len(others) and all(map(is_, some, others))


def _kinds(optimizer: Optimizer) -> Iterator[tuple[int, list[ShardedTensor], list[dict[str, Any]]]]:
    """What rows are made of: parameters of a group of one dtype and device, whose states are alike."""
    found: dict[Hashable, list[ShardedTensor]] = defaultdict(list)
    state, sharing = optimizer.state, _Sharing(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        is_fused = bool(group.get("fused"))
        for param in group["params"]:
            if type(param) in SHARDED and _is_small(param, is_fused=is_fused):
                alike = _likeness(param, state.get(param, {}), sharing)
                if alike is not None:
                    found[number, *alike].append(param)
    for (number, *_), same in found.items():  # type: ignore[misc]
        for params in packs(same, lambda param: param.shard_storage.resolve().numel(), _MAX_NUMEL):
            if len(params) >= FEWEST_IN_ROW:
                params.sort(key=lambda param: param.dim() > 1)
                yield number, params, [state.get(param, {}) for param in params]


def _is_small(param: ShardedTensor, *, is_fused: bool) -> bool:
    """Whether a parameter's shard may be stepped in a row, to the bits that it has alone."""
    storage, grad = param.shard_storage, param.grad
    if grad is None or param.is_view or param.offload is not None or not param.dim():
        return False
    shard = storage.resolve()
    if type(shard) is not Tensor or not shard.is_contiguous() or shard.numel() > ROW_NUMEL:
        return False
    if not shard.is_floating_point() or shard.is_meta or not _may_step(grad, shard, storage.layout):
        return False
    if shard.device.type == "cuda":
        return True
    return shard.dtype in (torch.float32, torch.float64) and not (is_fused and shard.numel() % _GRANULE)


def _may_step(grad: Any, shard: Tensor, layout: Any) -> bool:
    """Whether a gradient lies as the shard does."""
    if type(grad) not in SHARDED or grad.is_view:
        return False
    storage = grad.shard_storage
    if storage.layout is not layout and storage.layout != layout:
        return False
    tensor = storage.resolve()
    return type(tensor) is Tensor and tensor.dtype == shard.dtype and tensor.layout is torch.strided


class _Sharing:
    """How many states of an optimizer share each memory, and so which of them somebody else refers to.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._counts: Counter[int] | None = None
        self._ids: Counter[int] | None = None

    def is_of_several(self, value: Tensor) -> bool:
        """Whether it is a state of several parameters."""
        if self._ids is None:
            self._ids = Counter(map(id, chain.from_iterable(each.values() for each in self._optimizer.state.values())))
        return self._ids[id(value)] > 1

    def is_held(self, storage: ShardStorage) -> bool:
        """Whether somebody refers to a state's shard who would not follow it to another place."""
        if not storage.is_exposed:
            return False
        if self._counts is None:
            values = chain.from_iterable(each.values() for each in self._optimizer.state.values())
            storages = [value.shard_storage for value in values if type(value) in SHARDED]
            self._counts = Counter(each.resolve().untyped_storage()._cdata for each in storages)
        num_sharing = self._counts[storage.resolve().untyped_storage()._cdata]
        storage.is_exposed = storage.is_held(own_refs=0, storage_refs=num_sharing)
        return storage.is_exposed


def _likeness(param: ShardedTensor, named: Mapping[str, Any], sharing: _Sharing) -> tuple[Hashable, ...] | None:
    """What parameters of one row have in common; None where states do not lie as the parameter does."""
    shard, layout = param.shard_storage.resolve(), param.shard_storage.layout
    kind: list[Hashable] = [shard.dtype, shard.device]
    for name in named:
        value = named[name]  # which items() would refer to, too
        if type(value) in SHARDED:
            storage = value.shard_storage
            if value.is_view or storage.layout != layout or sharing.is_held(storage):
                return None
            tensor = storage.resolve()
            if type(tensor) is not Tensor or tensor.shape != shard.shape or tensor.device != shard.device:
                return None
            kind.append((name, tensor.dtype))
        elif isinstance(value, Tensor):
            if type(value) is not Tensor or value.dim() or value.device.type != "cpu":
                return None  # to read it from a device takes long
            if is_referred_to(value, 1) and sharing.is_of_several(value):
                return None
            kind.append((name, value.dtype, value.device, value.item()))
        elif isinstance(value, Hashable):
            kind.append((name, type(value), value))
        else:
            return None
    return tuple(kind)
