"""Of alike blocks in a row four run, and what the others do is told from these, where that is certain."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from dshard.planner.alike import Run
from dshard.planner.stretching import DoubtError
from dshard.planner.traces import Life

_NUM_FIRST = 2  # that run at the start; and as many at the end


class Watcher:
    """Runs four blocks of each run, has the others give back what they are given, and doubts where they may differ.

    Each block must be called once, with the output of the block before it and with otherwise the same arguments as
    that, nothing may run between two blocks, and no one else may use what goes from one to the next.

    Args:
        runs: Of a model.
        num_events: Tells how many events there were so far.
        life_of: The life of a tensor's storage, if the step made it.
    """

    def __init__(
        self, runs: Sequence[Run], num_events: Callable[[], int], life_of: Callable[[Tensor], Life | None]
    ) -> None:
        self._num_events, self._life_of = num_events, life_of
        self._chains = [_Chain(run) for run in runs]
        self._names = frozenset(pair for run in runs for pair in run.names)
        self._links: dict[int, tuple[int, int]] = {}  # by id of a life that goes between blocks: its chain and place
        self._inside: tuple[int, int] | None = None
        self._is_doubted = False
        self.read = set[tuple[type, str]]()  # of what differs between blocks
        self.is_telling = False  # whether blocks that do not run are being called

    def doubt(self) -> DoubtError:
        """To be raised; remembered, for a model may catch it."""
        self._is_doubted = True
        return DoubtError()

    def check(self) -> None:
        """Raise if there was a doubt, or a block that was not called."""
        if self._is_doubted or any(chain.num_called not in (0, len(chain.run.blocks)) for chain in self._chains):
            raise DoubtError

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Swap the forwards of blocks, and watch who reads attributes that differ."""
        kept = []
        watched = []
        try:
            for kind, name in self._names:
                setattr(kind, name, _Watched(kind, name, self))
                watched.append((kind, name))
            for c, chain in enumerate(self._chains):
                for i, block in enumerate(chain.run.blocks):
                    kept.append((block, "forward" in vars(block), block.forward))
                    vars(block)["forward"] = partial(self._call, c, i, block.forward)
            yield
        finally:
            for block, is_own, forward in kept:
                if is_own:
                    vars(block)["forward"] = forward
                else:
                    del vars(block)["forward"]
            for kind, name in watched:
                delattr(kind, name)

    def used(self, values: Iterator[Tensor]) -> None:
        """An operation of forward uses some tensors."""
        if not self._links:
            return
        for value in values:
            life = self._life_of(value)
            link = None if life is None else self._links.get(id(life))
            if link is not None and self._inside != (link[0], link[1] + 1):
                raise self.doubt()

    def died(self, life: Life) -> None:
        """A storage is gone."""
        self._links.pop(id(life), None)
        if self.is_telling:
            self._is_doubted = True

    def _call(self, c: int, i: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        chain = self._chains[c]
        num, is_told = len(chain.run.blocks), _NUM_FIRST <= i < len(chain.run.blocks) - 2
        if torch._C._current_autograd_node() is not None:  # once more, in backward
            return chain.passed(args, kwargs) if is_told else forward(*args, **kwargs)
        if i != chain.num_called or self._inside is not None:
            raise self.doubt()
        call = _Call.of(args, kwargs)
        if i and not chain.follows(call, self._num_events()):
            raise self.doubt()
        chain.num_called += 1
        self.is_telling = is_told
        if is_told:
            return chain.passed(args, kwargs)
        start, self._inside = self._num_events(), (c, i)
        out = forward(*args, **kwargs)
        self._inside = None
        life = chain.note(call, out, self._life_of, self._num_events())
        if life is None or life.born < start:
            raise self.doubt()
        if i < num - 1:
            self._links[id(life)] = (c, num - 3 if i == 1 else i)
        return out


class _Watched:
    """An attribute that differs between blocks: to read it is a reason to doubt."""

    def __init__(self, kind: type, name: str, watcher: Watcher) -> None:
        self._pair, self._watcher = (kind, name), watcher

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        self._watcher.read.add(self._pair)
        raise self._watcher.doubt()

    def __set__(self, instance: Any, value: Any) -> None:
        self.__get__(instance, type(instance))

    def __delete__(self, instance: Any) -> None:
        self.__get__(instance, type(instance))


@dataclass(frozen=True, slots=True)
class _Call:
    """What a block was called with."""

    spec: Any
    tensors: tuple[Any, ...]  # weak, by place
    metas: tuple[object, ...]
    others: tuple[object, ...]
    modes: tuple[object, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Call":
        leaves, spec = tree_flatten((args, kwargs))
        given = tuple(each for each in leaves if isinstance(each, Tensor))
        places = tuple(i for i, each in enumerate(leaves) if isinstance(each, Tensor))
        others = tuple(each for each in leaves if not isinstance(each, Tensor))
        modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), places)
        return cls(spec, tuple(weakref.ref(each) for each in given), tuple(map(_meta, given)), others, modes)


def _meta(value: Tensor) -> tuple[object, ...]:
    size = value.untyped_storage().nbytes()
    offset = value.storage_offset()
    return type(value), value.shape, value.stride(), offset, size, value.dtype, value.requires_grad, value.is_leaf


class _Chain:
    """How far the calls of one run are.

    Args:
        run: Its blocks.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.num_called = 0
        self._end = 0  # events, when the last block had run
        self._last: _Call | None = None
        self._out: Any = None  # weak
        self._out_meta: object = None
        self._place: int | None = None  # of the tensor that goes from block to block, among those of a call
        self._wraps: Callable[[Tensor], Any] = _itself

    def follows(self, call: _Call, num_events: int) -> bool:
        """Whether a call is the next in the row: the output before it, and the same in all else."""
        before = self._last
        if before is None or num_events != self._end:
            return False
        if (call.spec, call.modes) != (before.spec, before.modes) or len(call.tensors) != len(before.tensors):
            return False
        if not all(_is_same(a, b) for a, b in zip(call.others, before.others, strict=True)):
            return False
        places = [i for i, each in enumerate(call.tensors) if each() is self._out()]
        if len(places) != 1 or self._place not in (None, places[0]) or call.metas[places[0]] != self._out_meta:
            return False
        self._place = places[0]
        pairs = zip(call.tensors, before.tensors, strict=True)
        return all(i == self._place or a() is b() for i, (a, b) in enumerate(pairs))

    def note(self, call: _Call, out: Any, life_of: Callable[[Tensor], Life | None], num_events: int) -> Life | None:
        """A block has run; gives the life of its output, None if that is of another form than the one before."""
        value, wraps = _output(out)
        if value is None:
            return None
        meta = (_meta(value), wraps)
        is_first, is_last = self._last is None, self.num_called == len(self.run.blocks)
        if not is_first and not is_last and (self._out_meta, self._wraps) != meta:
            return None
        self._out_meta, self._wraps = meta
        self._last, self._out, self._end = call, weakref.ref(value), num_events
        return life_of(value)

    def passed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a block gives that does not run: what it was given, in the form of an output."""
        leaves, _ = tree_flatten((args, kwargs))
        given = [each for each in leaves if isinstance(each, Tensor)]
        return self._wraps(given[self._place or 0])


def _itself(value: Tensor) -> Any:
    return value


def _in_tuple(value: Tensor) -> Any:
    return (value,)


def _output(out: Any) -> tuple[Tensor | None, Callable[[Tensor], Any]]:
    if isinstance(out, Tensor):
        return out, _itself
    if type(out) is tuple and len(out) == 1 and isinstance(out[0], Tensor):
        return out[0], _in_tuple
    return None, _itself


def _is_same(one: object, other: object) -> bool:
    plain = (bool, int, float, str, type(None))
    return one is other or (type(one) is type(other) and isinstance(one, plain) and one == other)
