"""Full values of a unit that a host has once: which buckets have such memory, and whose shards lie in it."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from dshard.collectives import Gathered, Handle, HostCopy, gather_in_place, make_host_copy, shares_memory
from dshard.tensor.shard_storage import ShardStorage
from dshard.units.buckets import Bucket

if TYPE_CHECKING:
    from dshard.units.unit import Unit


@dataclass(slots=True, eq=False)
class BucketOnce:
    """A bucket whose full values this host has once.

    Args:
        bucket: Kept, for its id is the key.
        host_copy: Their memory; None where it cannot be had.
        unsure: Shards, by their places in the bucket, that may have been written to without a trace in their versions.
        occupants: By place, whose shard lies in that memory.
    """

    bucket: Bucket
    host_copy: HostCopy | None
    unsure: list[int] = field(default_factory=list)
    occupants: "dict[int, weakref.ref[ShardStorage]]" = field(default_factory=dict)

    def start(self, shards: Sequence[Tensor], *, label: str, tag: int) -> Handle[Gathered]:
        """Start to gather it."""
        assert self.host_copy is not None
        plan, group = self.bucket.plan, self.bucket.group
        return gather_in_place(shards, self.host_copy, plan, group, label=label, tag=tag, unsure=self.unsure)


class HostCopies:
    """The memory of a unit's buckets that all ranks of the host share.

    Args:
        unit: Whose gathered copies they are, in the dtypes in which forward and backward use them.
    """

    def __init__(self, unit: "Unit") -> None:
        self._unit = unit
        self._known: dict[int, BucketOnce] = {}

    def of(self, buckets: Sequence[Bucket]) -> list[BucketOnce | None]:
        """For each bucket where it is once per host; None where each rank gathers a copy of its own.

        Shards that can are moved there.

        Communicates:
            The first time for a bucket, the making of that memory; all ranks must call this alike.
        """
        current = set(map(id, buckets))
        for key in [key for key in self._known if key not in current]:
            del self._known[key]  # shards that lie there keep that memory
        return [self._of(bucket) for bucket in buckets]

    def end(self) -> None:
        """This rank reads no more."""
        for once in self._known.values():
            if once.host_copy is not None:
                once.host_copy.end()

    def __bool__(self) -> bool:
        """Whether there are any; alike on all ranks."""
        return any(once.host_copy is not None for once in self._known.values())

    def are_all(self, buckets: Sequence[Bucket]) -> bool:
        """Whether each of these buckets is once per host."""
        known = [self._known.get(id(bucket)) for bucket in buckets]
        return bool(known) and all(once is not None and once.host_copy is not None for once in known)

    def are_late(self) -> bool:
        """Whether shards of this rank are still to be put in place, in a gather that is under way."""
        return any(once.host_copy is not None and once.host_copy.is_late for once in self._known.values())

    def _of(self, bucket: Bucket) -> BucketOnce | None:
        once = self._known.get(id(bucket))
        if once is None:
            if not self._may_share(bucket):
                return None
            made = make_host_copy(bucket.plan, bucket.group, label=self._unit.label)
            once = self._known[id(bucket)] = BucketOnce(bucket, made)
        if once.host_copy is None:
            return None
        self._settle(once, once.host_copy)
        return once

    def _may_share(self, bucket: Bucket) -> bool:
        """Whether there is one full value of each parameter at a time, that travels as it is through shared memory."""
        unit = self._unit
        if unit.casts_are_learned or unit.settings.num_slices > 1 or type(unit.settings.reshard_after_forward) is int:
            return False
        return bucket.offload is None and not bucket.is_meta and shares_memory(bucket.group)

    def _settle(self, once: BucketOnce, host_copy: HostCopy) -> None:
        """Have those shards lie where they are read that nobody holds; and find those that somebody may write to."""
        storages = [self._unit.params[slot].shard_storage for slot in once.bucket.slots]
        once.unsure = [index for index, storage in enumerate(storages) if storage.is_exposed]
        for storage in (storages[index] for index in once.unsure):
            storage.is_exposed = _is_held(storage)
            if storage.is_exposed and storage.home is not None:
                storage.leave_home()
        if once.bucket.is_cast:
            return
        at_home = [host_copy.lies_at(index, storage.resolve()) for index, storage in enumerate(storages)]
        staying = {id(storage) for storage, is_there in zip(storages, at_home, strict=True) if is_there}
        away = [index for index, is_there in enumerate(at_home) if not is_there]
        for index in away:
            _vacate(once, index, storages[index], staying)
        movable = [i for i in away if id(storages[i]) not in staying and host_copy.may_hold(i, storages[i].resolve())]
        if movable and host_copy.make_quiet():
            for index in movable:
                _bring_home(once, index, storages[index], host_copy)


def _is_held(storage: ShardStorage) -> bool:
    """Whether somebody refers to a shard who would not follow it, or may write to it."""
    return storage.is_held(own_refs=0, storage_refs=1)


def _vacate(once: BucketOnce, index: int, storage: ShardStorage, staying: set[int]) -> None:
    """Have nothing lie at a place that is to be written for a storage which does not lie there.

    Args:
        once: The bucket.
        index: The place.
        storage: Of the parameter whose place it is; it may lie at another's, whose `.data` it was.
        staying: Ids of the storages that lie at a place of their own.
    """
    reference = once.occupants.pop(index, None)
    for each in (storage, reference() if reference is not None else None):  # the other is kept by somebody
        if each is not None and each.home is once.host_copy and id(each) not in staying:
            each.leave_home()


def _bring_home(once: BucketOnce, index: int, storage: ShardStorage, host_copy: HostCopy) -> None:
    """Have a shard lie at its place, unless somebody holds it; a thread may take hold of it while it is copied."""
    if storage.home is host_copy or storage.is_exposed or _is_held(storage):
        return
    memory = host_copy.home_of(index, storage.resolve())
    if not storage.is_exposed:
        storage.come_home(memory, host_copy)
        once.occupants[index] = weakref.ref(storage)
