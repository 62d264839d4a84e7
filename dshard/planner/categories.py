"""What the bytes at the peak of a step are: parameters, gradients, optimizer, copies, activations."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dshard.planner.costs import COUNTER_BYTES, Cluster, ModelCosts, UnitCosts
from dshard.planner.memory import MemoryRows
from dshard.planner.options import Option, only, options_of
from dshard.planner.sizes import sharing
from dshard.policies import Strategy


@dataclass(frozen=True, slots=True)
class PeakParts:
    """The moment of a step at which most bytes live, and what they are.

    Args:
        phase: Of the moment, as `Moment` has it.
        unit: Number of its unit.
        by_category: Bytes of parameters as they are stored, gradients, optimizer (states, and temporaries of its step),
            copies and communication (gathered copies, send buffers, what is received and added up), activations, and
            buffers and inputs.
    """

    phase: str
    unit: int
    by_category: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return sum(self.by_category.values())


def parts_of_peak(model: ModelCosts, strategies: Sequence[Strategy], cluster: Cluster) -> PeakParts:
    """The peak of a step, by what its bytes are; of several moments with as many the first phase's."""
    options = options_of(model, strategies, cluster)
    zeros = np.zeros(len(options), dtype=np.int64)
    rows = MemoryRows.of(model, [[option] for option in options])
    values = rows.values(zeros)
    row = int(values.argmax())

    def told(parts: list[Option]) -> int:
        return int(MemoryRows.of(model, [[part] for part in parts]).values(zeros)[row] - rows.constant[row])

    units = list(zip(model.units, strategies, options, strict=True))
    stored = [_shards(unit, strategy, cluster) for unit, strategy, _ in units]
    constant = int(rows.constant[row])
    found = {
        "parameters": told([only(held_bytes=own.params) for own in stored]),
        "gradients": told([_gradients(option, own.split_grads) for option, own in zip(options, stored, strict=True)]),
        "optimizer": told(
            [
                only(held_bytes=own.states, step_bytes=option.step_bytes, largest_step_bytes=option.largest_step_bytes)
                for option, own in zip(options, stored, strict=True)
            ]
        ),
    }
    activations = told([_activations(option) for option in options])
    found["copies and communication"] = int(values[row]) - constant - sum(found.values()) - activations
    found["activations"] = activations
    found["buffers and inputs"] = model.buffer_bytes
    return PeakParts(*rows.name(row), found)


@dataclass(frozen=True, slots=True)
class _Shards:
    """What a rank holds of a unit all the time, and the reduced gradients of what is split."""

    params: int
    states: int
    split_grads: int


def _shards(unit: UnitCosts, strategy: Strategy, cluster: Cluster) -> _Shards:
    if unit.is_offloaded:
        return _Shards(params=0, states=0, split_grads=0)
    within = sharing(strategy, cluster.num_ranks)
    numels = [(param, param.shard_numel(within)) for param in unit.params]
    split = [(p, n) for p, n in numels if strategy.num_slices > 1 and p.can_split and p.grad_itemsize]
    return _Shards(
        params=sum(n * p.stored_itemsize for p, n in numels),
        states=sum(n * p.state_bytes_per_element + COUNTER_BYTES * (p.state_bytes_per_element > 0) for p, n in numels),
        split_grads=sum(n * p.stored_itemsize for p, n in split),
    )


def _activations(option: Option) -> Option:
    """What of an option's bytes its computation keeps or needs, without parameters and their gradients."""
    return only(
        activation_bytes=option.activation_bytes,
        forward_transient_bytes=option.forward_transient_bytes,
        backward_transient_bytes=option.backward_transient_bytes,
        gradients_transient_bytes=option.gradients_transient_bytes,
    )


def _gradients(option: Option, split: int) -> Option:
    """What of an option's bytes are gradients: computed ones, those that wait for their reduction, reduced ones."""
    beside = option.backward_use_bytes + option.sent_bytes  # copies in use, and the send buffer with what is split
    return only(
        grad_bytes=option.grad_bytes,
        waiting_bytes=option.waiting_bytes,
        filling_bytes=max(0, option.filling_bytes - beside) + split,
        slicing_bytes=max(0, option.slicing_bytes - beside) + split,
        sent_bytes=split,
        in_flight_bytes=split,
        whole_in_flight_bytes=split,
        ending_bytes=split,
    )
