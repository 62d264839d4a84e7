"""Steps that need whole parameters, as Muon's do, each by one rank, its owner: what these keep, send and compute."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dshard.layout import SLOT_BYTES, assign, rounds_of
from dshard.planner.costs import Cluster, ModelCosts, ParamCosts, ceil_div

Ints = npt.NDArray[np.int64]
_assign = lru_cache(maxsize=16)(assign)


class Owners:
    """Which ranks step the parameters of a model that are stepped whole.

    Args:
        model: Its parameters that have work for an owner.
        cluster: The ranks that train them, each of which may own some.
    """

    def __init__(self, model: ModelCosts, cluster: Cluster) -> None:
        self._cluster = cluster
        self._params = tuple(param for unit in model.units for param in unit.params if param.owner_work)
        works = tuple(param.owner_work for param in self._params)
        self._owners = _assign(works, cluster.num_ranks)
        self.step_bytes = cache(self._step_bytes)
        # What the rank that has most has of all work, and of all states.
        self.work_share = self._most(works)
        self.state_share = self._most([param.state_bytes_of(param.numel) for param in self._params])

    def _most(self, values: Sequence[float]) -> float:
        total = sum(values)
        most: Any = np.bincount(self._owners, values).max() if total else 0.0
        return float(most / total) if total else 0.0

    def exchange_s(self, params: Sequence[ParamCosts], within: int) -> float:
        """Time in which gradients and values of parameters come to their owners, and values go back to all ranks."""
        num_bytes = sum(param.numel * param.stored_itemsize for param in params if param.owner_work)
        shards, cluster = num_bytes / within, self._cluster
        here = shards / (cluster.num_ranks // within)  # of what those own that this rank shares parameters with
        there_and_back_s = cluster.all_gather_s(2 * here, within) + cluster.all_gather_s(here, within)
        return there_and_back_s + cluster.among_replicas_s(shards, within)

    def _step_bytes(self, within: int, is_offloaded: bool) -> int:
        """The most bytes that rounds of steps take at one time, on the rank that has most.

        While one round is computed the next one arrives and the last one leaves: `WholeStep.run`.

        Args:
            within: Ranks that share each parameter.
            is_offloaded: Whether states come from the CPU's memory for a round.
        """
        sizes = [param.numel * param.stored_itemsize for param in self._params]
        places = rounds_of(sizes, self._owners)
        rounds = [self._round(each, within, is_offloaded) for each in places]
        in_memory = self._cluster.shares_memory(within)
        most = 2 * within * max(int(each.slots.max()) for each in rounds) if in_memory else 0  # in all rounds
        arrivals = [*(each.arriving(self._cluster, within, most) for each in rounds), np.zeros_like(rounds[0].slots)]
        away = before = _Leaving.none(self._cluster.num_ranks)  # of the round before the last one, and of the last one
        peak = before.held
        for number, own in enumerate(rounds):
            arrived, arriving = arrivals[number : number + 2]
            leaving = own.leaving(self._cluster, within, most)
            unread = arrived if in_memory else 0
            moments = (
                arrived + 2 * own.whole + before.held + away.unread + away.unread_among,  # shards are put together,
                arriving + unread + own.stepping + before.held + away.unread_among,  # the optimizer steps,
                arriving + own.whole + before.held + leaving.held + away.unread_among,  # results are cut,
                arriving + leaving.held + before.received + before.unread + before.among_replicas,  # others reach all
            )
            peak = np.maximum.reduce([peak, *moments])
            away, before = before, leaving
        return int(np.maximum(peak, before.received + before.unread + before.among_replicas).max())

    def _round(self, places: Sequence[int], within: int, is_offloaded: bool) -> "_Round":
        """What is stepped at a time."""
        slots, whole, temporaries, states = (np.zeros(self._cluster.num_ranks, dtype=np.int64) for _ in range(4))
        for place in places:
            param, owner = self._params[place], self._owners[place]
            slots[owner] += ceil_div(param.shard_numel(within) * param.stored_itemsize, SLOT_BYTES) * SLOT_BYTES
            whole[owner] += param.numel * param.stored_itemsize
            temporaries[owner] = max(temporaries[owner], param.numel * param.step_bytes_per_element)
            states[owner] += param.state_bytes_of(param.numel) if is_offloaded else 0
        return _Round(slots, whole, 2 * whole + temporaries + states)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Results of a round on their way to all ranks, in bytes on each rank.

    Args:
        sent: By this rank to those that it shares parameters with; under `ddp` to its replicas.
        received: What comes instead.
        among_replicas: More while that goes from replica to replica.
        unread: What the former may have still to read when that is over.
        unread_among: What the latter may.
    """

    sent: Ints
    received: Ints
    among_replicas: Ints
    unread: Ints
    unread_among: Ints

    @classmethod
    def none(cls, num_ranks: int) -> "_Leaving":
        """Of no round."""
        return cls(*np.zeros((5, num_ranks), dtype=np.int64))

    @property
    def held(self) -> Ints:
        """What is there from the start of it."""
        return self.sent + self.received


@dataclass(frozen=True, slots=True)
class _Round:
    """What is stepped at a time, in bytes on each rank.

    Args:
        slots: Places for one shard of each parameter that it owns.
        whole: Those parameters.
        stepping: They, their gradients, and what a step of one takes beside.
    """

    slots: Ints
    whole: Ints
    stepping: Ints

    def arriving(self, cluster: Cluster, within: int, in_memory_of: int) -> Ints:
        """Values and gradients: a row for their owners, and what this rank gets of the others' rows.

        Args:
            cluster: The ranks.
            within: Those that share each parameter.
            in_memory_of: Bytes of the row where others read theirs in it; 0 where they get messages.
        """
        if in_memory_of:
            return np.full_like(self.slots, in_memory_of)
        num_received = 0 if within == 1 else within - 1 if cluster.keeps_received_rows else within
        return 2 * (_of_replica(self.slots, within) + num_received * self.slots)

    def leaving(self, cluster: Cluster, within: int, in_memory_of: int) -> _Leaving:
        """Values on their way back; arguments as of `arriving`."""
        num_replicas, shares = cluster.num_ranks // within, cluster.replicas_share_memory(within)
        none, received = np.zeros_like(self.slots), _of_replica(self.slots, within)
        total, largest = none + self.slots.sum(), none + received.max()
        by_backend = not (cluster.keeps_received_rows or shares)  # rows come padded to the largest, and are copied
        rows = largest if shares else (num_replicas + 1) * largest if by_backend else received
        unread_among = largest if shares else none
        if within == 1 and num_replicas > 1:
            if by_backend:
                return _Leaving(rows, none, rows + total, none, none)
            return _Leaving(rows, total, none, none, unread_among)
        sent = none + in_memory_of if in_memory_of else within * self.slots
        among = rows + total if num_replicas > 1 else none
        return _Leaving(sent, received if within > 1 else none, among, sent if in_memory_of else none, unread_among)


def _of_replica(values: Ints, within: int) -> Ints:
    """For each rank the sum over those that it shares parameters with."""
    return np.repeat(values.reshape(-1, within).sum(axis=1), within)
