"""Steps that need whole parameters, as Muon's do: each parameter is stepped by one rank, its owner.

The owner gets the shards of the parameter and of its gradient, runs the optimizer's own `step` on the whole of both,
and gives every rank its shard of the result. What the optimizer keeps for the parameter stays with the owner; in
`optimizer.state` it stands as sharded tensors, whose shards are fetched from there when somebody uses them.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dshard.autograd import outside_autograd
from dshard.compiling import outside_of_graphs
from dshard.errors import StateError, UnsupportedOpError
from dshard.layout import ROUND_BYTES, ShardLayout, assign, by_kind, packs, product_cost, rounds_of
from dshard.optimizer.exchange import Owner, Piece, collect, num_owners, said_by_all, segments, spread
from dshard.optimizer.replace import (
    Move,
    Replaced,
    awaits_nothing,
    place_beside,
    place_of,
    relocate,
    replacement_of,
    sharded_beside,
)
from dshard.optimizer.swap import alike, closure_of, copied, part_of_group, settings_of
from dshard.tensor.meshes import TPShardLayout, full_shape
from dshard.tensor.sharded_tensor import SHARDED, ShardedTensor
from dshard.tensor.storage import ShardStorage
from dshard.tensor.subclass_shards import subclass_gathers
from dshard.tensor.views import dense_stride

_OF_TORCH = (optim.Muon, optim.Adafactor)
Cost = Callable[[torch.Size], float]


@dataclass(frozen=True, slots=True)
class Whole:
    """What is asked of an optimizer by `dshard.optim.whole`.

    Args:
        params: The parameters that owners step; None for all.
        cost: Work of one's step, by its shape.
    """

    params: Sequence[Tensor] | None = None
    cost: Cost = product_cost

    def asks_for(self) -> Callable[[Tensor], bool]:
        """Tells of a parameter whether it is one of them, or has replaced one."""
        if self.params is None:
            return lambda param: True
        ids = {id(replacement_of(each) if isinstance(each, Replaced) else each) for each in self.params}
        return lambda param: id(param) in ids


def whole_of(optimizer: Optimizer) -> Whole | None:
    """What was asked of an optimizer, or holds for torch's; None for one that is stepped otherwise."""
    asked: Whole | None = optimizer.__dict__.get("_dshard_whole")
    return asked if asked is not None else _TORCHS if type(optimizer) in _OF_TORCH else None


_TORCHS = Whole()


@cache
def _kept_by_muon() -> tuple[str, ...] | None:
    """Names of all that torch's Muon keeps for a parameter, if these are tensors like it: what a step of one leaves.

    So ranks know of its states without being told, and know the same.
    """
    param = nn.Parameter(torch.eye(2, dtype=torch.float32, device="cpu"))
    param.grad = torch.eye(2, dtype=torch.float32, device="cpu")
    muon = optim.Muon([param])
    step: Any = optim.Muon.step
    getattr(step, "__wrapped__", step)(muon)
    states = muon.state[param]
    is_like = all(isinstance(v, Tensor) and v.shape == param.shape and v.dtype == param.dtype for v in states.values())
    return tuple(states) if is_like else None


class _Holding:
    """The states of one parameter, whole, with its owner; what their shards await.

    Args:
        owners: Of the optimizer.
        item: The parameter, and its owner.

    Attributes:
        tensors: By name; empty on other ranks.
        is_held: Whether they are there, and not in shards.
    """

    def __init__(self, owners: "Owners", item: "_Assigned") -> None:
        self._owners = weakref.ref(owners)  # which keeps this
        self.owner, self.name = item.owner, item.param.name
        self.tensors: dict[str, Tensor] = {}
        self.is_held = False
        self._storages: dict[str, weakref.ref[ShardStorage]] = {}
        self.kinds: dict[str, tuple[ShardLayout, torch.dtype, torch.device]] = {}  # of each state

    def keep(self, states: dict[str, Any]) -> None:
        """Have the sharded ones among a parameter's states, which its owner has written, await this."""
        sharded = {name: value for name, value in states.items() if type(value) in SHARDED}
        is_known = len(sharded) == len(self._storages) and all(self.holds(*item) for item in sharded.items())
        if not is_known:
            self._storages, self.kinds, self.is_held = {}, {}, bool(sharded)
        for name, value in sharded.items():
            storage = value.shard_storage
            storage.num_writes += 1
            if not is_known:
                self._storages[name] = weakref.ref(storage)
                self.kinds[name] = storage.layout, value.storage_dtype, value.storage_device
                storage.hand_over(self)
                value.origin = None

    def holds(self, name: str, value: Any) -> bool:
        """Whether a state is the one of that name which is here."""
        known = self._storages.get(name)
        return self.is_held and known is not None and type(value) in SHARDED and known() is value.shard_storage

    def deliver(self, name: str, shard: Tensor) -> None:
        """This rank's shard of a state has come from the owner."""
        if (storage := self._storages[name]()) is not None:
            storage.deliver(shard)

    def __call__(self, storage: ShardStorage) -> None:
        """As what a shard awaits: all states come back from their owners."""
        owners = self._owners()
        if owners is not None:
            owners.bring_back(self)
        else:
            _bring_back([self])

    def is_replaced(self, states: dict[str, Any]) -> bool:
        """Whether others have taken the place of some of the states that are here."""
        return self.is_held and not all(self.holds(name, states.get(name)) for name in self._storages)


@dataclass(frozen=True, slots=True)
class _Assigned:
    """A parameter, and the rank that steps it.

    Args:
        number: Of the optimizer's group that it is in.
        place: Its number there.
        param: The parameter.
        owner: The rank.
    """

    number: int
    place: int
    param: ShardedTensor
    owner: Owner


class Owners:
    """Which ranks step the parameters of an optimizer, and what they keep for them.

    Args:
        params: That owners step, with the numbers of their groups and their places there.
        cost: Work of one's step, by its shape.
    """

    def __init__(self, params: Sequence[tuple[int, int, ShardedTensor]], cost: Cost) -> None:
        self.key = _key_of(params, cost)
        worlds = [(_ranks_of(param), num_owners(param)) for *_, param in params]
        assigned: list[_Assigned | None] = [None] * len(params)
        for world in dict.fromkeys(worlds):  # most often the same ranks train all
            places = [i for i, known in enumerate(worlds) if known == world]
            numbers = assign([cost(params[i][2].shape) for i in places], world[1])
            for i, number in zip(places, numbers, strict=True):
                assigned[i] = _Assigned(*params[i], Owner.of(params[i][2], number))
        self._turns = {id(item.param): item for item in assigned if item is not None}
        self.holdings: dict[int, _Holding] = {}  # by the id of the parameter
        self._known: tuple[tuple[int, ...], list[list[_Assigned]]] = (), []  # rounds, and of which parameters
        self.capacity = 0  # bytes of memory of one exchange, so that all take the same

    def rounds(self, params: Iterable[ShardedTensor]) -> list[list[_Assigned]]:
        """What is stepped at a time: of each owner a few parameters, all over the same ranks."""
        assigned = [self._turns[id(param)] for param in params]
        key = tuple(id(item.param) for item in assigned)
        if self._known[0] != key:
            self._known = key, list(_rounds(assigned))
            for each in self._known[1]:
                group = each[0].owner.group
                pieces = [(item.owner.number, Piece.of(item.param)) for item in each]
                most = 2 * group.num_ranks * max(segments(pieces, group))
                self.capacity = max(self.capacity, most)
        return self._known[1]

    def bring_back(self, first: _Holding) -> None:
        """Give all ranks their shards of all states that owners hold.

        Communicates:
            As `spread`: an all-to-all of the shards, and between replicas an all-gather of them.
        """
        held = [holding for holding in self.holdings.values() if holding.is_held]
        _bring_back_all(held if first in held else [first])

    def give_up(self) -> None:
        """Others are to be the owners: all states come back."""
        _bring_back_all([holding for holding in self.holdings.values() if holding.is_held])

    def let_go(self, optimizer: Optimizer) -> None:
        """States that others have taken the place of come back, for whoever keeps them: the owners get new ones."""
        states = {id(param): named for param, named in optimizer.state.items()}
        replaced = [holding for key, holding in self.holdings.items() if holding.is_replaced(states.get(key, {}))]
        _bring_back_all(replaced)

    def holding_of(self, item: _Assigned) -> _Holding:
        """What the owner of a parameter keeps for it."""
        return self.holdings.setdefault(id(item.param), _Holding(self, item))


def _key_of(params: Sequence[tuple[int, int, ShardedTensor]], cost: Cost) -> tuple[Any, ...]:
    facts = ((id(param), *at, param.shard_group.full_name, param.shard_layout) for *at, param in params)
    return (cost, *facts)


def _ranks_of(param: ShardedTensor) -> tuple[int, ...]:
    """Those that train a parameter together, as their numbers in its group and replicas count them."""
    return tuple(param._spec.mesh.mesh.flatten().tolist())


def _bring_back_all(held: Sequence[_Holding]) -> None:
    for chunk in _chunks(held):
        _bring_back(chunk)


def _chunks(held: Sequence[_Holding]) -> Iterator[list[_Holding]]:
    """Holdings that can be brought back together."""

    def num_bytes(holding: _Holding) -> int:
        return sum(math.prod(full_shape(layout)) * dtype.itemsize for layout, dtype, _ in holding.kinds.values())

    for same in by_kind(held, lambda holding: holding.owner.key):
        yield from packs(same, num_bytes, ROUND_BYTES)


def _rounds(assigned: Sequence[_Assigned]) -> Iterator[list[_Assigned]]:
    for same in by_kind(assigned, lambda item: item.owner.key):
        num_bytes = [item.param.numel() * item.param.storage_dtype.itemsize for item in same]
        for places in rounds_of(num_bytes, [item.owner.place for item in same]):
            yield [same[place] for place in places]


def _bring_back(held: Sequence[_Holding]) -> None:
    """Give all ranks their shards of the states that owners have, all over the same ranks.

    Communicates:
        As `spread`.
    """
    pieces, fulls, places = [], [], []
    for holding in held:
        holding.is_held = False
        for name, (layout, dtype, device) in holding.kinds.items():
            stride = dense_stride(torch.empty(full_shape(layout), device="meta"))
            pieces.append(Piece(layout, dtype, stride))
            places.append((holding, name, device))
            if holding.owner.is_own():
                fulls.append(holding.tensors.pop(name))
    with outside_autograd():
        label = f"optimizer states of '{held[0].name}' and {len(held) - 1} more"
        owners = [holding.owner for holding, *_ in places]
        for (holding, name, device), shard in zip(places, spread(owners, pieces, fulls, label)(), strict=True):
            holding.deliver(name, torch.empty_like(shard, device=device).copy_(shard))


class WholeStep:
    """The step of those of an optimizer's parameters that owners step.

    Args:
        optimizer: The optimizer.
        whole: Which these are.
        args: What its step was given, itself left out; instead of a closure what gives the loss.
        kwargs: The same, by name.
    """

    def __init__(self, optimizer: Optimizer, whole: Whole, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._optimizer, self._args, self._kwargs = optimizer, args, kwargs
        groups, is_asked = enumerate(optimizer.param_groups), whole.asks_for()
        given = [(number, place, param) for number, group in groups for place, param in enumerate(group["params"])]
        found = [(*at, param) for *at, param in given if is_asked(param) and _can_be_owned(param)]
        with_grad = [param for *_, param in found if _has_gradient(param)]
        owners: Owners | None = optimizer.__dict__.get("_dshard_owners")
        if owners is not None and owners.key != _key_of(found, whole.cost):
            owners.give_up()
            owners = None
        if owners is None:
            owners = optimizer.__dict__["_dshard_owners"] = Owners(found, whole.cost)
        owners.let_go(optimizer)
        self._owners = owners
        self._settings = settings_of(optimizer)
        self.params = with_grad
        self._numbers = {id(param): str(number) for number, param in enumerate(with_grad)}
        self._rounds = owners.rounds(with_grad) if with_grad else []
        states = [_without_dtensors(optimizer.state.get(param, {})) for param in with_grad]
        known = _kept_by_muon() if type(optimizer) is optim.Muon else None
        as_known = (
            not s or (tuple(s) == known and all(type(value) in SHARDED for value in s.values())) for s in states
        )
        self._known_states = known if all(as_known) else None  # else owners tell of them
        self._resting: dict[int, dict[str, ShardedTensor]] = {}  # states in shards, by the id of the parameter
        self._facts: dict[
            tuple[str, ...], dict[str, Any]
        ] = {}  # by the ranks that are told, and the parameter's number

    def run(self) -> None:
        """Step: while one round is computed, the next one arrives, and the last one leaves."""
        self._rest_states()
        leaving: Callable[[], None] | None = None
        arriving = self._fetch(self._rounds[0]) if self._rounds else None
        for number, assigned in enumerate(self._rounds):
            assert arriving is not None
            here = iter(arriving())
            following = self._fetch(self._rounds[number + 1]) if number + 1 < len(self._rounds) else None
            fulls = self._step(assigned, here)
            del here
            arriving = following
            begun = self._give_out(assigned, fulls)
            del fulls
            if leaving is not None:
                leaving()
            leaving = begun
        if leaving is not None:
            leaving()
        self._settle_states()

    def _fetch(self, assigned: Sequence[_Assigned]) -> Callable[[], list[Tensor]]:
        """Send owners what they need for a round, and get what this rank does, whole."""
        owners, pieces, shards = [], [], []
        for item in assigned:
            for tensor in (item.param, _gradient(item.param), *self._resting[id(item.param)].values()):
                owners.append(item.owner)
                pieces.append(Piece.of(tensor))
                shards.append(tensor.shard_storage.resolve())
        label = f"step of '{assigned[0].param.name}' and {len(assigned) - 1} more"
        return collect(owners, pieces, shards, label, self._owners.capacity)

    def _rest_states(self) -> None:
        """Find the states that are in shards, and have them lie as their parameters do, ahead of all exchanges."""
        assigned = [item for assigned in self._rounds for item in assigned]
        states = {id(item.param): self._optimizer.state.get(item.param, {}) for item in assigned}

        def of_shards(item: _Assigned) -> dict[str, ShardedTensor]:
            holding = self._owners.holding_of(item)
            named = states[id(item.param)].items()
            return {n: v for n, v in named if type(v) in SHARDED and not holding.holds(n, v)}

        for item in assigned:
            for value in of_shards(item).values():
                value.shard_storage.resolve()  # by which others may come back, too
        for item in assigned:
            place, resting = place_of(item.param), of_shards(item)
            self._resting[id(item.param)] = resting
            own = [place if v.shape == item.param.shape else place_beside(place, v) for v in resting.values()]
            relocate([Move(value, each) for value, each in zip(resting.values(), own, strict=True)])

    def _step(self, assigned: Sequence[_Assigned], found: Iterator[Tensor]) -> list[Tensor]:
        """Step this rank's parameters of a round, whole; gives them.

        Args:
            assigned: Of the round.
            found: What was fetched for it.
        """
        own = [item for item in assigned if item.owner.is_own()]
        fulls: list[Any] = []
        groups: dict[int, dict[int, Tensor]] = {}
        state: Any = defaultdict(dict)
        given: list[dict[str, Any]] = []  # states, as they were
        for item in own:
            full = nn.Parameter(next(found), requires_grad=item.param.requires_grad)
            full.grad = next(found)
            groups.setdefault(item.number, {})[item.place] = full
            fulls.append(full)
            taken = {name: next(found) for name in self._resting[id(item.param)]}
            states, held = self._optimizer.state.get(item.param, {}), self._owners.holding_of(item).tensors
            device = full.device
            for name, value in states.items():
                value = taken[name] if name in taken else held[name] if type(value) in SHARDED else value
                state[full][name] = value.to(device) if isinstance(value, Tensor) and value.dim() else value
            given.append(dict(state[full]))
        if own:
            state.update({k: copied(v) for k, v in self._optimizer.state.items() if not isinstance(k, Tensor)})
            optimizer = alike(self._optimizer, self._settings, groups, state)
            step: Any = type(optimizer).step
            getattr(step, "__wrapped__", step)(optimizer, *self._args, **self._kwargs)  # without hooks, run for all
        for item, full, before in zip(own, fulls, given, strict=True):
            full.grad = None
            self._take_states(item, state[full], before)
        return fulls

    def _take_states(self, item: _Assigned, states: dict[str, Any], before: Mapping[str, Any]) -> None:
        """Keep the states that a step has left for a parameter of this rank, of those that it had `before`."""
        holding, device = self._owners.holding_of(item), item.param.storage_device
        sized = {name: value for name, value in states.items() if isinstance(value, Tensor) and value.dim()}
        holding.tensors = {name: value.to(device) for name, value in sized.items()}
        if self._known_states is None:
            facts = [(name, _fact_of(name, value, item.param)) for name, value in states.items()]
            for name, fact in facts:
                if name in sized and sized[name] is not before.get(name):
                    fact["is_new"] = True
            self._facts.setdefault(item.owner.key, {})[self._number_of(item)] = facts

    def _number_of(self, item: _Assigned) -> str:
        return self._numbers[id(item.param)]

    def _give_out(self, assigned: Sequence[_Assigned], fulls: Sequence[Tensor]) -> Callable[[], None]:
        """Give all ranks their shards of a round's parameters; returns what waits for them."""
        owners, pieces = [item.owner for item in assigned], [Piece.of(item.param) for item in assigned]
        label = f"step of '{assigned[0].param.name}' and {len(assigned) - 1} more"
        finish = spread(owners, pieces, [full.detach() for full in fulls], label, self._owners.capacity)

        def put() -> None:
            shards = [item.param.shard_storage.writable() for item in assigned]
            torch._foreach_copy_(shards, list(finish()))

        return put

    def _settle_states(self) -> None:
        """Have all ranks know the states that there are, of which the large ones await their owners."""
        items = [item for assigned in self._rounds for item in assigned]
        items.sort(key=lambda item: (item.number, item.place))  # in which the optimizer would make them
        if self._known_states is not None:
            for item in items:
                states = self._optimizer.state.get(item.param)
                if states:
                    self._owners.holding_of(item).keep(states)
                else:
                    self._write_states(item, self._known_facts(item))
            return
        facts: dict[str, Any] = {}
        owners = {assigned[0].owner.key: assigned[0].owner for assigned in self._rounds}
        for key, owner in owners.items():
            for said in said_by_all(self._facts.get(key, {}), owner.everybody):
                facts.update(said)
        for item in items:
            self._write_states(item, facts[self._number_of(item)])

    def _known_facts(self, item: _Assigned) -> list[tuple[Any, Any]]:
        """What an owner would tell of states that are known without."""
        like = {"shape": list(item.param.shape), "dtype": str(item.param.storage_dtype).removeprefix("torch.")}
        return [(name, like) for name in self._known_states or ()]

    def _write_states(self, item: _Assigned, facts: list[tuple[Any, Any]]) -> None:
        """Have `optimizer.state` hold what the owner of a parameter says."""
        if not facts and item.param not in self._optimizer.state:
            return
        holding, old = self._owners.holding_of(item), dict(self._optimizer.state.get(item.param, {}))
        states = self._optimizer.state[item.param]
        states.clear()
        for name, fact in facts:
            before: Any = old.get(name)
            if fact.get("is_new") and type(before) in SHARDED:
                if holding.holds(name, before):  # whose value went with what the step has replaced
                    before.shard_storage.retire(StateError(_REPLACED.format(item.param.name, name)))
                before = None
            states[name] = _state_of(fact, before, item.param)
        holding.keep(states)


_REPLACED = (
    "{}: its owner's step has put another tensor in the place of the state '{}', and the value of this one is gone. "
    "Keep a clone() of it."
)


def _without_dtensors(states: dict[str, Any]) -> dict[str, Any]:
    """States of a parameter; what torch has loaded as a plain DTensor, and a sharded number, is plain from now on.

    Communicates:
        An all-gather of each of those.
    """
    for name, value in states.items():
        if isinstance(value, DTensor) and (type(value) not in SHARDED or not value.dim()):
            states[name] = value.full_tensor()
    return states


def _fact_of(name: Any, value: Any, param: ShardedTensor) -> Any:
    """What other ranks are told of a state.

    Raises:
        UnsupportedOpError: It is neither a tensor nor a number or text, or has another name than such.
    """
    if not isinstance(name, (int, str)):
        raise UnsupportedOpError(
            f"{param.name}: the states of an optimizer that steps whole parameters must be named by texts or integers, "
            f"but one is by {name!r}. Leave the parameter out of dshard.optim.whole(params=...)."
        )
    if isinstance(value, Tensor) and value.dim():
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Tensor):
        device = value.device.type
        return {"value": value.item(), "dtype": str(value.dtype).removeprefix("torch."), "device": device}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise UnsupportedOpError(
        f"{param.name}: the states of an optimizer that steps whole parameters must be tensors, numbers or texts, but "
        f"'{name}' is a {type(value).__name__}. Leave the parameter out of dshard.optim.whole(params=...)."
    )


def _state_of(fact: dict[str, Any], old: Any, param: ShardedTensor) -> Any:
    """A state as `optimizer.state` has it."""
    if "dtype" not in fact:
        return fact["value"]
    dtype = getattr(torch, fact["dtype"])
    if "value" in fact:
        if isinstance(old, Tensor) and not old.dim() and old.dtype == dtype:
            return old.fill_(fact["value"]) if old.item() != fact["value"] else old
        device = fact["device"] if fact["device"] == "cpu" else param.device
        return torch.tensor(fact["value"], dtype=dtype, device=device)
    shape = tuple(fact["shape"])
    if type(old) in SHARDED and tuple(old.shape) == shape and old.storage_dtype == dtype:
        return old
    if shape == tuple(param.shape):
        return param.like(ShardStorage(None, param.shard_layout, awaits_nothing, is_shared=True), dtype=dtype)
    return sharded_beside(param, shape, dtype)


def _can_be_owned(param: Tensor) -> bool:
    """Whether a parameter is one that its owner can step."""
    if not isinstance(param, ShardedTensor) or type(param) not in SHARDED:
        return False
    return (
        type(param.shard_layout) in (ShardLayout, TPShardLayout)
        and not param.is_view
        and not param.is_meta
        and not subclass_gathers(param.shard_storage.resolve())
    )


def _gradient(param: ShardedTensor) -> ShardedTensor:
    grad: Any = param.grad
    return grad


def _has_gradient(param: ShardedTensor) -> bool:
    grad: Any = param.grad
    return type(grad) in SHARDED and not grad.is_view and grad.shard_storage.layout == param.shard_layout


_HIDDEN = "_dshard_hidden"  # of an optimizer, all parameters of its groups, while it sees those that owners do not step


def begin_whole(optimizer: Optimizer, whole: Whole, args: Any, kwargs: Any) -> Any:
    """Step what owners step of an optimizer that is about to step, and leave the rest to its own step.

    Returns:
        What its step is to be given instead of its arguments, by place and by name: with a closure the loss is computed
        first. None for the same.
    """
    closure, rest = closure_of(args, kwargs), list(args[1:])
    if closure is None:
        _step_and_hide(optimizer, whole, rest, kwargs)
        return None
    calls: list[None] = []

    def compute() -> Any:
        if calls:
            raise StateError(
                f"{type(optimizer).__name__}: a step of whole parameters may call its closure once, but it calls it "
                "again. Leave its parameters out of dshard.optim.whole(params=...)."
            )
        calls.append(None)
        loss = closure()
        given = _in_place_of_closure(rest, kwargs, lambda: loss)
        _step_and_hide(optimizer, whole, *given)
        return loss

    rest, kwargs = _in_place_of_closure(rest, kwargs, compute)
    return (args[0], *rest), kwargs


def _in_place_of_closure(args: list[Any], kwargs: dict[str, Any], closure: Callable[[], Any]) -> Any:
    return ([closure, *args[1:]], kwargs) if args else (args, {**kwargs, "closure": closure})


@outside_of_graphs
def _step_and_hide(optimizer: Optimizer, whole: Whole, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    with outside_autograd():
        step = WholeStep(optimizer, whole, args, kwargs)
        step.run()
    optimizer.__dict__[_HIDDEN] = [_of_params(group) for group in optimizer.param_groups]
    stepped = set(map(id, step.params))
    for group in optimizer.param_groups:
        left = {place: param for place, param in enumerate(group["params"]) if id(param) not in stepped}
        group.update(_of_params(part_of_group(_of_params(group), left)))


def _of_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("params", "param_names") if name in group}


def end_whole(optimizer: Optimizer) -> None:
    """The step has ended, or raised: the optimizer has all of its parameters again."""
    params = optimizer.__dict__.pop(_HIDDEN, None)
    if params is not None:
        for group, own in zip(optimizer.param_groups, params, strict=True):
            group.update(own)
