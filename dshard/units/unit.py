"""A unit: the parameters that are gathered together."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, compress, count
from operator import attrgetter, is_
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dshard.autograd import in_backward, note_exact_use, ran_in_forward, runs_again
from dshard.collectives import ShardGroup
from dshard.errors import UnsupportedOpError
from dshard.policies import reshard_choice
from dshard.tensor import ShardedTensor
from dshard.tensor.sharded_tensor import REQUIRES_GRAD
from dshard.tensor.storage import Use, is_used_away
from dshard.tensor.subclass_shards import subclass_gathers
from dshard.tensor.views import View
from dshard.units.buckets import Bucket, LearnedCasts, are_whole, make_buckets, make_part_buckets
from dshard.units.context import ModelContext, UnitSettings
from dshard.units.copies import Copies, Residency
from dshard.units.extensions import Extensions

B = TypeVar("B", bound=Bucket)

_SPEC_OF, _GROUPS_OF = attrgetter("_spec"), attrgetter("groups")


class Unit:
    """Parameters that are gathered at the first touch of any of them, and freed together.

    Under mixed precision a parameter has its compute dtype in the forward of a sharded module and in the backward of
    such a use, and its own dtype elsewhere; the two are gathered apart.

    Args:
        params: The parameters; each gets this unit as its source.
        modules: Modules in whose forward the unit is in use.
        label: Name for messages, counts, and for the check that all ranks gather the same unit.
        model: What it shares with the other units of its model.
        settings: What is chosen for it.
    """

    alive: ClassVar["weakref.WeakSet[Unit]"] = weakref.WeakSet()  # all of this process

    def __init__(
        self,
        params: Sequence[ShardedTensor],
        modules: Sequence[nn.Module],
        *,
        label: str,
        model: ModelContext,
        settings: UnitSettings | None = None,
    ) -> None:
        self.params = list(params)
        self.modules = list(modules)
        self.label = label
        self.model = model
        self.settings = settings or UnitSettings()
        self.number = 0  # among the units of a model
        self._start()

    def _start(self) -> None:
        """Nothing is gathered, and no module runs."""
        Unit.alive.add(self)
        self.num_active = 0  # forwards of its modules that are running
        self.stepped_at_once: dict[str, str] = {}  # offloaded parameters, by name: why their last step was not deferred
        self.num_pins = 0  # open `gathered` scopes
        self.is_requested = False  # by `unshard`, to stay until it was used
        self.unshardings: dict[nn.Module, Any] = {}  # the forwards of its modules, as the runtime knows them
        self.num_unshards = 0  # in forwards since the last backward ended, that autograd recorded
        self.is_used_beside = False  # by an operation on a sharded parameter, since then, that it may have recorded
        self.was_unsharded = False  # in a forward, and has other dtypes or another device there: so has what runs again
        self.first_slice: Any = None  # of its parameter, which may be gathered ahead
        self.slice_bytes = 0  # of slices of its parameter that are gathered or under way
        self.sliced_in = -1  # autograd's number of the backward that last computed a gradient of it in slices
        self._buckets: dict[Any, tuple[list[Any], list[Any]]] = {}
        precisions = [param.wire_precision for param in self.params]
        computes = tuple(p.compute if p is not None else None for p in precisions)
        self.reduce_dtypes = tuple(p.reduce if p is not None else None for p in precisions)
        extended = tuple(slot for slot, param in enumerate(self.params) if subclass_gathers(param.shard_storage.tensor))
        self.extensions = Extensions(self, extended) if extended else None
        self.device = self.params[0].shard_group.device if self.params else None  # on which they are used
        # Whether that goes on behind the host.
        self.has_streams = self.device is not None and self.device.type not in ("cpu", "meta")
        self.copies = Copies(self, computes, is_primary=True)
        self.exact = Copies(self, (None,) * len(computes), is_primary=False) if any(computes) else self.copies
        self._offloads = tuple(param.offload for param in self.params)
        self.is_mixed = any(computes)
        self.is_plain = not self.is_mixed and not any(self._offloads)  # whether there is one full value of each
        self.is_whole = are_whole(self.params)
        self._learned: LearnedCasts | None = None
        self._groups: list[ShardGroup] | None = None
        for slot, param in enumerate(self.params):
            param.gather_source, param.gather_slot, param.has_compute_dtype = self, slot, computes[slot] is not None

    def restart(self) -> None:
        """Its parameters lie elsewhere now: make anew what was made for where they lay."""
        self.reshard()
        self._start()

    @property
    def casts_are_learned(self) -> bool:
        """Whether autocast casts some of the parameters, so that they are gathered in other dtypes at times."""
        return self._learned is not None

    @property
    def is_gathered(self) -> bool:
        """Whether it holds gathered copies, fresh or not."""
        return self.copies.are_there or self.exact.are_there

    @property
    def is_once_per_host(self) -> bool:
        """Whether all that it has gathered is there once for all ranks of a host, and takes no memory of this one's."""
        return self.copies.are_once_per_host and (self.exact is self.copies or not self.exact.are_there)

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered copies that forward and backward use, without padding; of slices, those in use now."""
        return self.slice_bytes or self.copies.num_bytes

    @property
    def param_bytes(self) -> int:
        """Bytes of the full parameters as they are stored."""
        return sum(p.shard_layout.numel * p.storage_dtype.itemsize for p in self.params)

    @property
    def groups(self) -> list[ShardGroup]:
        """The groups of ranks that its parameters are gathered over, each once; those of a parameter never change."""
        if self._groups is None:
            self._groups = list({p.shard_group.full_name: p.shard_group for p in self.params}.values())
        return self._groups

    @property
    def trainable(self) -> list[int]:
        """Numbers of the parameters that take a gradient."""
        with torch._C.DisableTorchFunctionSubclass():  # else each is asked in Python while a forward may run again
            return list(compress(count(), map(REQUIRES_GRAD.__get__, self.params)))

    @property
    def is_frozen(self) -> bool:
        """Whether none of the parameters takes a gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            return not any(map(REQUIRES_GRAD.__get__, self.params))

    def full(self, slot: int, view: View | None = None, use: Use | None = None) -> Tensor:
        """Parameter `slot`, or a view of it, as an operand: in the dtype, and on the device, that it has there.

        Communicates:
            At most one all-gather per bucket, if there is no fresh copy.
        """
        if not self.is_used_beside and torch.is_grad_enabled() and not in_backward():
            self.is_used_beside = True
        if self.is_plain:
            return self.copies.full(slot, view, use)
        if self._learned is not None:
            full = self._full_beside_casts(self._learned, slot, view, use)
        else:
            computes = self.computes(slot, use) if view is None else view.computes
            full = (self.copies if computes or self.copies.dtypes[slot] is None else self.exact).full(slot, view, use)
        offload = self._offloads[slot]
        if offload is None or type(full) is DTensor:
            return full
        if self.is_running:
            self.model.forwards.regions.note_use(self.model.forwards)
        is_away = self.num_pins or self.is_running or in_backward() or is_used_away(offload.compute, use)
        return full if is_away else full.to(offload.home)

    def _full_beside_casts(self, learned: LearnedCasts, slot: int, view: View | None, use: Use | None) -> Tensor:
        """`full` where autocast casts some of the parameters: as they are kept."""
        if self.model.forwards.is_autocasting:
            learned.note_use(slot)
        full = self.copies.full(slot, view, use)  # which may gather in other dtypes than before
        return full if self.copies.dtypes[slot] is None else self.exact.full(slot, view, use)

    @property
    def is_running(self) -> bool:
        """Whether a forward of the model runs."""
        return self.model.forwards.num_running > 0

    def full_of_dtype(self, slot: int, dtype: torch.dtype) -> Tensor:
        """The full value of parameter `slot` in its compute dtype, or in the one that it is kept in."""
        if self.is_mixed and self.copies.dtypes[slot] not in (None, dtype):
            return self.exact.full(slot)
        full = self.copies.full(slot)
        return full if full.dtype == dtype else self.exact.full(slot)  # autocast casts the unit's parameters elsewhere

    def full_in_backward(self, slot: int, dtype: torch.dtype) -> Tensor:
        """As `full_of_dtype`, of what a forward had used; writes since this backward gathered it count no more."""
        full = self.copies.at_hand_in_backward(slot)
        return full if full is not None and full.dtype == dtype else self.full_of_dtype(slot, dtype)

    def full_in(self, slot: int, dtype: torch.dtype, use: Use | None = None) -> Tensor:
        """The full value of parameter `slot` in a given dtype, converted from the one that it is kept in."""
        if self.extensions is not None and slot in self.extensions.slots:
            return self.exact.full(slot, use=use).to(dtype)
        is_cast = self.model.forwards.is_autocasting and not self.is_mixed and dtype != self.params[slot].storage_dtype
        if is_cast and self not in self.model.regions.units:  # else ranks may differ in what they cast
            if self._learned is None:
                self._learned, self.is_plain = LearnedCasts(len(self.params)), False
                self.exact = Copies(self, self.copies.dtypes, is_primary=False)
            self._learned.note_cast(slot, dtype)
        full = self.copies.full(slot, use=use)
        return full.to(dtype) if self.copies.dtypes[slot] in (None, dtype) else self.exact.full(slot, use=use).to(dtype)

    def forget_casts(self) -> None:
        """Gather all parameters as they are kept, whatever autocast casts."""
        if self._learned is not None:
            self._learned = None
            self.copies.discard()
            self.copies.dtypes = self.exact.dtypes

    def dtypes_to_gather(self) -> tuple[torch.dtype | None, ...]:
        """The dtypes in which forward and backward use the parameters next; None for their own."""
        if self._learned is None or (in_backward() and not self.is_running):  # whose casts were made in the forward
            return self.copies.dtypes
        return self._learned.dtypes if self.model.forwards.is_autocasting else self.exact.dtypes

    def compute_dtype(self, slot: int) -> torch.dtype | None:
        """The dtype of parameter `slot` in the forward that is running, if one is; else None."""
        if not self.model.forwards.num_running:
            return self.copies.dtypes[slot] if self.is_recomputed else None
        self.model.forwards.regions.note_use(self.model.forwards)
        return self.copies.dtypes[slot]

    def computes(self, slot: int, use: Use | None = None) -> bool:
        """Whether a use of parameter `slot` itself, not of a view, means its value in the compute dtype.

        In a forward it does, outside of one it does not. Autograd saves uses in forward as views, which know; what a
        backward does with a parameter itself is then of a use outside, or of a custom function, whose other operands
        tell.
        """
        param, compute = self.params[slot], self.copies.dtypes[slot]
        if compute is None:
            return False
        if self.model.forwards.num_running:
            self.model.forwards.regions.note_use(self.model.forwards)
            param.is_used_in_functions |= not torch.is_grad_enabled()
            return True
        if self.is_recomputed:
            return True
        if not in_backward():
            if torch.is_grad_enabled():
                param.is_used_exactly = True
            else:
                note_exact_use(self.model.forwards)
            return False
        known = ran_in_forward(self.model.forwards)
        if known is not None:
            return known
        given = use.operands if use is not None else ()
        others = [x for x in given if isinstance(x, Tensor) and not isinstance(x, ShardedTensor)]
        if others and compute != param.storage_dtype:
            return any(x.dtype == compute for x in others)
        return param.is_used_in_functions and not param.is_used_exactly

    def unsharded_again(self, slot: int) -> Tensor | None:
        """The full tensor of parameter `slot`, recorded by autograd, where a part of a forward runs again."""
        return self.model.unshard_again(self, slot) if self.is_recomputed else None

    @property
    def is_recomputed(self) -> bool:
        """Whether a part of a forward in which it was unsharded runs again, in backward, without that module's call."""
        return self.was_unsharded and in_backward() and torch.is_grad_enabled() and runs_again()

    def pinned(self, slot: int) -> Tensor | None:
        """The gathered copy of parameter `slot` if an open scope holds it."""
        return self.full(slot) if self.num_pins else None

    def unshard(self) -> None:
        """Start to all-gather what forward and backward use; a no-op while a fresh copy is there or under way."""
        self.copies.gather()

    def prefetch(self) -> bool:
        """Start to gather ahead of the use, unless there is no need; gives whether it did."""
        if self.settings.num_slices > 1:
            return self.first_slice is not None and bool(self.first_slice.prefetch())
        return not (self.is_whole or self.copies.is_current) and self.copies.gather(is_ahead=True)

    def wait(self) -> None:
        """Wait for the gather that is under way, if one is."""
        self.copies.wait()
        if self.exact is not self.copies:
            self.exact.wait()

    def reshard(self) -> None:
        """Drop the gathered copies, unless a `gathered` scope holds them."""
        if self.first_slice is not None:
            self.first_slice.drop()
        if self.num_pins or self.copies.residency is self.exact.residency is Residency.SHARDED:
            return
        self.copies.discard()
        if self.exact.residency is not Residency.SHARDED:
            self.exact.discard()
        self.is_requested = False
        self.model.eviction.note_free(self)

    def make_way(self) -> None:
        """Its shards are about to be written, on all ranks, so copies that nobody uses now would be stale."""
        if not self.num_active and self.copies.host_values and self.copies.are_there:
            self.reshard()

    @property
    def stays(self) -> bool:
        """Whether its gathered copies stay, and are gathered anew where they are stale, once it was used."""
        settings = self.settings
        return settings.reshard_after_forward is False and not settings.reshard_after_backward

    def reshard_unless_kept(self) -> None:
        """`reshard`, for now that nothing needs the copies, unless they are to stay."""
        if not self.stays:
            self.reshard()

    def change(self, **changes: Any) -> None:
        """Choose otherwise, by the names of `UnitSettings`; what a strategy or other collectives need is made anew."""
        if all(getattr(self.settings, name) is value for name, value in changes.items()):
            return  # as micro-batches choose again what is chosen
        before, self.settings = self.settings, replace(self.settings, **changes)
        if before.comms != self.settings.comms:
            self.reshard()
            self._buckets.clear()

    def set_reshard_after_forward(self, value: bool | int | None) -> None:
        """Choose when to free.

        Raises:
            PlacementError: A number that does not divide that of the ranks. On every rank alike.

        Communicates:
            For a number of ranks, the making of process groups, the first time.
        """
        choices = [reshard_choice("set_reshard_after_forward", value, group.num_ranks) for group in self.groups]
        for group, choice in zip(self.groups, choices, strict=True):
            if type(choice) is int:
                self._refuse_parts(choice)
                group.neighbours(choice)
        self.change(reshard_after_forward=choices[0] if choices else value)

    def _refuse_parts(self, num_ranks: int) -> None:
        if self.extensions is not None:
            param = self.params[self.extensions.slots[0]]
            kind = type(param.shard_storage.resolve()).__name__
            raise UnsupportedOpError(
                f"{param.name}: what fsdp_post_all_gather of a {kind} gives cannot be cut again for fewer ranks, but "
                f"reshard_after_forward is {num_ranks}. Pass True or False."
            )

    def reshard_for_backward(self) -> None:
        """Free after a forward whose backward is to come; with a number of ranks, all but what the few need."""
        num_ranks = self.settings.reshard_after_forward
        if type(num_ranks) is not int:
            self.reshard()
        elif not self.num_pins:
            self.copies.keep_parts(num_ranks)
            if self.exact is not self.copies:
                self.exact.discard()

    def buckets(self, slots: Sequence[int], dtypes: tuple[torch.dtype | None, ...]) -> list[Bucket]:
        """The buckets of some of the parameters, as `make_buckets` tells."""
        comms = self.settings.comms
        return self.known_buckets((tuple(slots), dtypes), lambda: make_buckets(self.params, slots, dtypes, comms))

    def part_buckets(self, dtypes: tuple[torch.dtype | None, ...], num_ranks: int) -> list[Bucket]:
        """The buckets of parts that few ranks hold, as `make_part_buckets` tells."""
        return self.known_buckets((num_ranks, dtypes), lambda: make_part_buckets(self.params, dtypes, num_ranks))

    def known_buckets(self, key: Any, make: Callable[[], list[B]]) -> list[B]:
        """Buckets that are made once, until a parameter has another dtype, other strides or another device."""
        known = self._buckets.get(key)
        specs = list(map(_SPEC_OF, self.params))  # another one after a change of dtype, strides or device
        if known is None or not all(map(is_, known[0], specs)):
            known = specs, make()
            if not any(bucket.is_meta for bucket in known[1]):  # which are others once there is memory
                self._buckets[key] = known
        return known[1]

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: no gathered copies."""
        names = ("params", "modules", "label", "model", "settings", "number")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __repr__(self) -> str:
        state = "gathered" if self.is_gathered else "sharded"
        return f"Unit({self.label!r}, {len(self.params)} parameters, {self.full_bytes:,} bytes, {state})"


def groups_of(units: Sequence[Unit]) -> list[ShardGroup]:
    """The process groups of all units, each once, in the order of the units."""
    found: dict[str, ShardGroup] = {}
    for group in dict.fromkeys(chain.from_iterable(map(_GROUPS_OF, units))):
        found.setdefault(group.name, group)
        if group.replicas is not None:
            found.setdefault(group.replicas.name, group.replicas)
    for unit in units:
        num_ranks = unit.settings.reshard_after_forward
        if type(num_ranks) is int:
            for few in [group.neighbours(num_ranks) for group in unit.groups]:
                found.setdefault(few.name, few)
    return list(found.values())
