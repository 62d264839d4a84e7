"""What ranks did on a backend with collectives of its own: written down by each, and compared by their hosts.

A header in the buffers of such a backend would cost copies to and from the device. So each rank notes what it starts,
and posts a checksum of that to the store: at the end of a backward, of an evaluation, and of a training forward whose
collectives it has not seen before. Nobody waits for the device. Hosts wait for hosts, where a wrong value would be used
next: ahead of an optimizer's step, and at the end of a forward that is new; else at the next posting.

The first checksum stands for all. The last rank to post the same says that all are alike; who posts another one says
so, and then all ranks read what the two did, and raise for the first difference. Where collectives of different sizes
have met, which hangs the device and any host that waits for it, the watchdog's thread shows what was noted, compares
it with what others show, and ends the process if it cannot raise.
"""

import json
import time
import weakref
import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch

from dshard.collectives import _c10d
from dshard.collectives._c10d import ProcessGroup, kept_for
from dshard.collectives.divergence import Kind, failures_in, header, refuse, started_in
from dshard.collectives.group import ShardGroup
from dshard.collectives.watchdog import (
    begin_wait,
    end_process,
    end_wait,
    ended_ranks,
    failure,
    line_of_program,
    watch_event,
    watch_ledgers,
)
from dshard.errors import DivergenceError, RankLostError

_MAX_ENTRIES = 1 << 14  # of a group that nobody settles
_MAX_KNOWN = 1000  # sequences of collectives that are told apart
_PAUSES_S = 5e-5, 1e-3, 2e-5  # between two looks at the store: the first, the longest, and that per rank of the group
_LOOK_S = 1.0  # between two looks at whether the others still run
_QUIET_S = 5.0  # without a collective, after which a rank shows what it has noted
_GRACE_S = 3.0  # to raise for what was found meanwhile
_ANSWER_S = 10.0  # for what two ranks did to come
_MANY_RANKS = 64  # in larger groups what two neighbours show is read
_ALIKE = "alike"


_Entry = tuple[int, str, int, int]  # of a collective kind, label, tag, and number of failures, as in a header


class _Posted(NamedTuple):
    """What was posted, and what for."""

    key: str
    entries: list[_Entry]


class _Found(NamedTuple):
    """What the watchdog's thread has found: how another rank differs, where its program is, and since when."""

    rank: int
    own: _Entry
    other: _Entry
    line: str
    since_s: float


class _Ledger:
    """What this rank did in a group; does not keep its process group alive.

    Args:
        group: The ranks.
    """

    alive: ClassVar[weakref.WeakSet["_Ledger"]] = weakref.WeakSet()
    forward: ClassVar[int] = 0  # number of the outermost one that began last

    def __init__(self, group: ShardGroup) -> None:
        self._process_group = weakref.ref(group.process_group)
        self._rank, self._num_ranks = group.rank, group.num_ranks
        self._store: Any = None  # from the first entry on
        self._path = ""  # there
        self.num_started = started_in(group)
        self.num_failures = failures_in(group.process_group)
        self.entries: list[_Entry] = []  # that were not posted
        self.posted: _Posted | None = None  # of which it is not known whether all ranks are alike
        self._serial = 0
        self._forward = 0  # in which the last entry was noted, or since
        self._sequence = 0  # stands for the kinds and labels of the entries since that began
        self._noted_s = 0.0
        self._shown = 0, 0  # the serial number, and how many entries
        self._found: _Found | None = None

    def _open(self, group: ShardGroup) -> None:
        """Find the place in the store."""
        self._store = _c10d.shared_store() if group.backend != "fake" and group.num_ranks > 1 else None
        if self._store is not None:
            ranks = zlib.crc32(repr(_c10d.ranks_of(group.process_group)).encode())
            path = f"dshard ledger/{group.process_group.group_name}/{ranks}/{group.name}"
            number = self._store.add(f"{path}/made/{self._rank}", 1)  # one of that name may have been destroyed
            self._path = f"{path}/{number}"
            _Ledger.alive.add(self)
            watch_ledgers(_look)

    def note(self, entry: _Entry, group: ShardGroup) -> None:
        """Write down a collective that starts."""
        if not self._noted_s:
            self._open(group)
        entries = self.entries
        entries.append(entry)
        if self._forward != _Ledger.forward:  # what was gathered ahead of it may be used by some ranks alone
            self._forward, self._sequence = _Ledger.forward, 0
        self._sequence = hash((self._sequence, entry[:2]))
        self._noted_s = time.monotonic()
        if len(entries) >= _MAX_ENTRIES:  # nobody settles: one entry stands for all
            kind, label, _, failures = entry
            entries[:] = [(kind, f"{label}, or something ahead of it", _checksum(entries), failures)]

    def sequence(self) -> int:
        """Stands for what was noted in the forward that ends; 0 for nothing."""
        return self._sequence if self._forward == _Ledger.forward else 0

    def post(self) -> None:
        """Post a checksum of the entries, and begin anew."""
        entries, self.entries = self.entries, []
        store = self._store
        if store is None:
            return
        self._serial += 1
        store.set(f"{self._path}/at/{self._rank}", str(self._serial))
        key, mine = f"{self._path}/{self._serial}", f"{_checksum(entries)} {len(entries)}"
        facts, _, first = store.compare_set(key, "", f"{mine} {self._rank}").decode().rpartition(" ")
        if facts != mine:
            store.set(f"{key}/end", f"{first} {self._rank}")
        elif store.add(f"{key}/num", 1) == self._num_ranks:
            store.set(f"{key}/end", _ALIKE)
        self.posted = _Posted(key, entries)

    def await_others(self) -> None:
        """Wait until it is known whether all ranks are alike in what was posted last; raise if they are not."""
        posted, store, process_group = self.posted, self._store, self._process_group()
        if posted is None or process_group is None:
            return
        label = f"the comparison of what ranks did up to '{posted.entries[-1][1]}'"
        try:
            if not store.check([f"{posted.key}/end"]):
                self._await_key(f"{posted.key}/end", label, process_group)
            answer = store.get(f"{posted.key}/end").decode()
        except RuntimeError as error:
            if isinstance(error, DivergenceError):
                raise
            raise failure(label, error, process_group) from error
        finally:
            self.posted = None
        if answer != _ALIKE:
            first, other = map(int, answer.split())
            self._explain(posted, first, other, process_group)
        if self._rank == 0 and self._serial > 1:  # all have read of the one before
            before = f"{self._path}/{self._serial - 1}"
            for key in (before, f"{before}/num", f"{before}/end"):
                store.delete_key(key)

    def _await_key(self, key: str, label: str, process_group: ProcessGroup) -> None:
        """Wait for the others to post."""
        limit = _c10d.timeout_of(process_group)
        pause_s, longest_s = _PAUSES_S[0], max(_PAUSES_S[1], _PAUSES_S[2] * self._num_ranks)
        begin = looked = time.monotonic()
        is_well = False
        begin_wait(label, process_group)
        try:
            while not self._store.check([key]):
                now = time.monotonic()
                self.raise_found(process_group)
                if now - looked > _LOOK_S:
                    looked = now
                    is_late = limit is not None and now - begin > limit.total_seconds()
                    if is_late or any(self._number_of(rank) < self._serial for rank in ended_ranks(process_group)):
                        raise failure(label, RuntimeError("timed out waiting for the peers' hosts"), process_group)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            is_well = True
        finally:
            end_wait(label, process_group, is_well=is_well)

    def _number_of(self, rank: int) -> int:
        """How often a rank has posted."""
        key = f"{self._path}/at/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _explain(self, posted: _Posted, first: int, other: int, process_group: ProcessGroup) -> None:
        """Raise for the first difference between two ranks' entries, on every rank."""
        if self._rank in (first, other):
            self._store.set(f"{posted.key}/entries/{self._rank}", json.dumps(posted.entries))
        begin, keys = time.monotonic(), [f"{posted.key}/entries/{rank}" for rank in (first, other)]
        while not self._store.check(keys) and time.monotonic() - begin < _ANSWER_S:
            time.sleep(_PAUSES_S[1])
        if self._store.check(keys):
            known = {rank: _read(self._store.get(key)) for rank, key in zip((first, other), keys, strict=True)}
            rank = other if known[first] == posted.entries else first
            own, theirs = _first_difference(posted.entries, known[rank])
            _refuse(rank, own, theirs, process_group)
        raise DivergenceError(
            f"'{posted.entries[-1][1]}', or something before it: all ranks must communicate about the same thing at "
            f"the same time, but ranks {first} and {other} did different things, and have not said which."
        )

    # What the watchdog's thread does for ranks whose hosts wait for a device that hangs.

    def look(self) -> None:
        """Show what was noted a while ago, and compare it with what others show; end what cannot raise."""
        found, store = self._found, self._store
        if found is not None and time.monotonic() - found.since_s > _GRACE_S:
            end_process(self._last_words(found))
        posted = self.posted
        serial, entries = self._serial + (posted is None), posted.entries if posted is not None else list(self.entries)
        if store is None or found is not None or not entries or time.monotonic() - self._noted_s < _QUIET_S:
            return
        if self._shown != (serial, len(entries)):
            self._shown = serial, len(entries)
            store.set(f"{self._path}/shown/{self._rank}", json.dumps([serial, entries, line_of_program()]))
        for rank in self._neighbours():
            key = f"{self._path}/shown/{rank}"
            if not store.check([key]):
                continue
            number, theirs, line = json.loads(store.get(key))
            pairs = zip(entries, map(tuple, theirs), strict=False)
            differing = next(((own, other) for own, other in pairs if own != other), None)
            if number == serial and differing is not None:
                self._found = _Found(rank, *differing, line, time.monotonic())
                return

    def _last_words(self, found: _Found) -> str:
        """What the program would be told, and where it and the other rank's are."""
        process_group = self._process_group()
        try:
            if process_group is not None:
                _refuse(found.rank, found.own, found.other, process_group)
        except DivergenceError as error:
            return (
                f"{error} This rank's program is at {line_of_program()}, that of rank {found.rank} at {found.line}. It "
                "waits for a device that waits for the other ranks, so its process ends here."
            )
        return "the process group of a model has gone while its device waited for other ranks."

    def _neighbours(self) -> list[int]:
        num = self._num_ranks
        if num <= _MANY_RANKS:
            return [rank for rank in range(num) if rank != self._rank]
        return [(self._rank - 1) % num, (self._rank + 1) % num]

    def raise_found(self, process_group: ProcessGroup) -> None:
        """Raise for what the thread has found, if anything."""
        if self._found is not None:
            rank, own, other, *_ = self._found
            self._found, self.posted, self.entries, self._shown = None, None, [], (0, 0)
            self._store.delete_key(f"{self._path}/shown/{self._rank}")  # of a program that goes on
            _refuse(rank, own, other, process_group)


def _refuse(rank: int, own: _Entry, other: _Entry, process_group: ProcessGroup) -> NoReturn:
    refuse(_header_of(other), rank, _header_of(own), Kind(own[0]), own[1], process_group)


def _header_of(entry: _Entry) -> bytes:
    kind, label, tag, failures = entry
    return header(Kind(kind), label, tag, failures)


def _read(text: bytes) -> list[_Entry]:
    return [tuple(entry) for entry in json.loads(text)]


def _first_difference(own: Sequence[_Entry], other: Sequence[_Entry]) -> tuple[_Entry, _Entry]:
    """The first entries that differ; for those behind the last one stands the end."""
    place = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other)))
    some = own[place:] or other[place:]
    end: _Entry = (Kind.COMBINE, "the end of the step", 0, some[0][-1])
    return (own[place] if place < len(own) else end), (other[place] if place < len(other) else end)


def _checksum(entries: Sequence[_Entry]) -> int:
    numbers = [number for kind, _, tag, failures in entries for number in (kind, tag, failures)]
    return zlib.crc32(array("q", numbers).tobytes(), zlib.crc32("\n".join([entry[1] for entry in entries]).encode()))


def _ledger_of(group: ShardGroup) -> _Ledger:
    return kept_for(group.process_group, ("ledger", group.name), lambda: _Ledger(group))


def _look() -> None:
    for ledger in list(_Ledger.alive):
        ledger.look()


def note(group: ShardGroup, kind: Kind, label: str, tag: int) -> None:
    """Write down that this rank starts a gather or a reduction.

    Raises:
        DivergenceError: It is known that another rank has done something else.
    """
    ledger = _ledger_of(group)
    ledger.num_started[0] += 1
    ledger.raise_found(group.process_group)
    ledger.note((int(kind), label, tag, ledger.num_failures[0]), group)


def num_noted(group: ShardGroup) -> int:
    """How many entries a group has that were not compared."""
    return len(_ledger_of(group).entries)


def settle(groups: Iterable[ShardGroup], min_entries: int = 1) -> None:
    """Have compared what the ranks of some groups wrote down since the last time; all of them must call this alike.

    Where an accelerator works behind the host, this only posts: `await_settled`, or the next call, waits and raises.

    Args:
        groups: Those of the ranks. On gloo nothing is written down but by collectives of the user's own.
        min_entries: How many entries a group must have to be looked at, at least 1.

    Raises:
        DivergenceError: The ranks of a group communicated about different things, on every rank of it; once all
            groups were looked at.

    Communicates:
        Through the store, a line of text per group.
    """
    known = [group for group in groups if num_noted(group) >= min_entries]
    errors = _errors_of(map(_ledger_of, known))
    for group in known:
        try:
            _ledger_of(group).post()
        except RuntimeError as error:
            raise failure("the comparison of what ranks did", error, group.process_group) from error
        if group.device_type != "cpu":
            _watch_device(group)
    errors += _errors_of(_ledger_of(group) for group in known if group.device_type == "cpu")
    if errors:
        raise errors[0]


def await_settled() -> None:
    """Wait for the hosts of other ranks to have posted what this one has, and raise as `settle` does."""
    errors = _errors_of(list(_Ledger.alive))
    if errors:
        raise errors[0]


def begin_forward() -> None:
    """An outermost forward of sharded modules begins."""
    _Ledger.forward += 1


def settle_forward(groups: Iterable[ShardGroup], known: set[tuple[str, int]], *, is_evaluated: bool) -> None:
    """At the end of a forward `settle` what it has noted, and `await_settled` if none before it has noted the like.

    A forward that has noted nothing may be one rank's own. A known one of a training is left to its backward.

    Args:
        groups: Of the model.
        known: What was noted in its forwards; what is new is put there.
        is_evaluated: Whether no backward will follow.
    """
    noted = [(group, (group.name, ledger.sequence())) for group in groups if (ledger := _ledger_of(group)).sequence()]
    new = {key for _, key in noted if key not in known} if len(known) < _MAX_KNOWN else set()
    known |= new
    settle([group for group, key in noted if is_evaluated or key in new])
    if new:
        await_settled()


def _errors_of(ledgers: Iterable[_Ledger]) -> list[DivergenceError]:
    """What waiting for the others raises, for each: ranks of a later one wait for this rank."""
    errors: list[DivergenceError] = []
    for ledger in ledgers:
        try:
            ledger.await_others()
        except RankLostError:
            raise
        except DivergenceError as error:
            errors.append(error)
    return errors


def _watch_device(group: ShardGroup) -> None:
    """Have the watchdog notice a device that never comes to what was posted."""
    posted, device = _ledger_of(group).posted, torch.get_device_module(group.device_type)
    is_captured = getattr(device, "is_current_stream_capturing", bool)  # an event of a graph tells nothing
    if posted is not None and not is_captured():
        arrived: Any = device.Event()
        arrived.record()
        watch_event(f"{posted.entries[-1][1]}, or something of that step before it", group.process_group, arrived)
