"""Memory as users of CUDA see it: what lives, what the allocator counts for it, what it has reserved, and the rest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dshard.planner.allocator import Block, CachingAllocator
from dshard.planner.costs import COUNTER_BYTES, Cluster, ModelCosts, ParamCosts
from dshard.planner.memory import MemoryRows, moments
from dshard.planner.options import Option, only, options_of
from dshard.planner.sizes import sharing
from dshard.planner.texts import bytes_text
from dshard.planner.workspaces import Workspace, workspaces_of
from dshard.policies import Strategy

_TENSORS = 16  # that a unit's activations are taken to be: what a block of a transformer keeps
_WHOLE = 2 << 20  # of which they are multiples, but for one: sizes of large models' tensors mostly are


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Bytes of the rank that has most, each under the name by which users see it.

    Args:
        live_bytes: The most bytes of tensors at one moment: `Plan.peak_bytes`.
        active_bytes: `memory_stats()["active_bytes.all.peak"]`: blocks of them, in multiples of 512, with those that
            were let go and that communication still uses, and the workspace of products.
        reserved_bytes: `max_memory_reserved()`: the allocator's segments.
        expandable_bytes: The same with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
        workspaces: What else there is.
    """

    live_bytes: int
    active_bytes: int
    reserved_bytes: int
    expandable_bytes: int
    workspaces: tuple[Workspace, ...] = field(default=())

    @property
    def device_bytes(self) -> int:
        """What `nvidia-smi` shows: segments, and what lies outside of the allocator."""
        return self.reserved_bytes + sum(each.num_bytes for each in self.workspaces if not each.is_reserved)

    @property
    def most_device_bytes(self) -> int:
        """The same with the most that workspaces may take."""
        more = sum(each.most_bytes - each.num_bytes for each in self.workspaces)
        return self.device_bytes + more

    def lines(self, limit_bytes: int = 0, memory_of: str = "live") -> list[str]:
        """As text, with what to do where segments exceed a limit of the bytes that live, or others; 0 for none."""
        outside = [f"{each.name} {bytes_text(each.num_bytes)}" for each in self.workspaces if not each.is_reserved]
        lines = [
            f"  on CUDA: active {bytes_text(self.active_bytes)}, reserved {bytes_text(self.reserved_bytes)} "
            f"(expandable segments: {bytes_text(self.expandable_bytes)})",
            f"  nvidia-smi: {bytes_text(self.device_bytes)} to {bytes_text(self.most_device_bytes)}, with "
            f"{', '.join(outside)}",
        ]
        if self.live_bytes <= limit_bytes < self.reserved_bytes:
            less = limit_bytes - (self.reserved_bytes - self.live_bytes)
            smaller = f"plan for {bytes_text(less)}, or " if less > 0 else "plan "
            lines.append(
                "  the limit holds with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and not without"
                if memory_of == "expandable"
                else f"  segments take more than the limit, which is of live bytes: set "
                f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or {smaller}with memory_of='reserved'"
            )
        return lines


def forecast(model: ModelCosts, strategies: Sequence[Strategy], cluster: Cluster) -> MemoryForecast:
    """What a step takes on CUDA, by replaying what comes and goes from one of its moments to the next.

    Of what there is at each moment the sum is that of `moments`, so nothing here is below it. Two steps are replayed,
    for the second finds the segments of the first.
    """
    options = options_of(model, strategies, cluster)
    always = list(_always(model, strategies, cluster, options))
    changes = _changes(model, options)
    plain, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    for allocator in (plain, expandable):
        _replay(allocator, always, changes)
    live = max(moment.num_bytes for moment in moments(model, strategies, cluster))
    return MemoryForecast(
        live,
        plain.peak_active_bytes,
        plain.peak_reserved_bytes,
        expandable.peak_reserved_bytes,
        workspaces_of(strategies, cluster),
    )


# What a unit's bytes at a moment are, beside those held: the block of memory, and how much of each field of an Option.
_KEYS = ("held", "gathered", "moving", "send", "received", "raw", "sums", "replicas", "temporaries")
_GATHERED = ("gathered", "moving")  # whose memory is of the stream of gathers


def keyed(option: Option) -> list[Option]:
    """An option cut into one for each of `_KEYS`; their sum is the option."""
    o, whole = option, option.sent_bytes
    gathered = o.forward_use_bytes
    ahead, again = min(gathered, o.forward_ahead_bytes), min(gathered, o.backward_ahead_bytes)
    moving, late = o.forward_ahead_bytes - ahead, o.backward_ahead_bytes - again
    use_fill, use_slice = (min(o.backward_use_bytes, n) for n in (o.filling_bytes, o.slicing_bytes))
    send_fill, send_slice = min(whole, o.filling_bytes - use_fill), min(whole, o.slicing_bytes - use_slice)
    flying, arrived, ending = (min(whole, n) for n in (o.in_flight_bytes, o.whole_in_flight_bytes, o.ending_bytes))
    return [
        only(held_bytes=o.held_bytes),
        only(
            kept_bytes=o.kept_bytes,
            forward_use_bytes=gathered,
            forward_ahead_bytes=ahead,
            backward_use_bytes=o.backward_use_bytes,
            backward_ahead_bytes=again,
            filling_bytes=use_fill,
            slicing_bytes=use_slice,
        ),
        only(forward_ahead_bytes=moving, backward_ahead_bytes=late),
        only(
            filling_bytes=send_fill,
            slicing_bytes=send_slice,
            sent_bytes=whole,
            in_flight_bytes=flying,
            whole_in_flight_bytes=arrived,
            ending_bytes=ending,
            waiting_bytes=o.waiting_bytes,
        ),
        only(
            in_flight_bytes=o.in_flight_bytes - flying,
            whole_in_flight_bytes=o.whole_in_flight_bytes - arrived,
            ending_bytes=o.in_flight_bytes - flying,
            grad_bytes=o.grad_bytes,
        ),
        only(
            filling_bytes=o.filling_bytes - use_fill - send_fill,
            slicing_bytes=o.slicing_bytes - use_slice - send_slice,
        ),
        only(ending_bytes=o.ending_bytes - ending - (o.in_flight_bytes - flying)),
        only(replicas_bytes=o.replicas_bytes, late_replicas_bytes=o.late_replicas_bytes),
        only(step_bytes=o.step_bytes, largest_step_bytes=o.largest_step_bytes),
    ]


def _changes(model: ModelCosts, options: Sequence[Option]) -> list[list[tuple[int, int, int]]]:
    """At each moment of two steps, what has other bytes than before: unit, number of the name, bytes."""
    rows = MemoryRows.of(model, [keyed(option) for option in options])
    held = np.array([option.held_bytes for option in options], dtype=np.int64)
    order = rows.in_time()
    before = np.zeros((len(options), len(_NAMES)), dtype=np.int64)
    found = []
    for row in (*order, order[0]):
        now = np.concatenate([rows.terms(row), _activations(model, *rows.name(row))], axis=1)
        now[:, 0] -= held
        found.append([(int(unit), int(name), int(now[unit, name])) for unit, name in np.argwhere(now != before)])
        before = now
    return found + found[1:-1]


def _replay(allocator: CachingAllocator, always: Sequence[int], changes: Sequence[list[tuple[int, int, int]]]) -> None:
    """Two steps on an allocator: at each moment what is gone is let go first."""
    for size in always:
        if size > 0:
            allocator.allocate(size)
    held: dict[tuple[int, int], list[tuple[int, Block]]] = {}
    for moment in changes:
        for unit, name, num_bytes in moment:
            blocks = held.setdefault((unit, name), [])
            while blocks and sum(size for size, _ in blocks) > num_bytes:
                allocator.free(blocks.pop()[1])
        for unit, name, num_bytes in moment:
            blocks = held[unit, name]
            lacking = num_bytes - sum(size for size, _ in blocks)
            stream = "gathers" if _NAMES[name] in _GATHERED else "compute"
            for size in _tensors(lacking, _TENSORS if _NAMES[name] == "activations" else 1):
                blocks.append((size, allocator.allocate(size, stream)))


def _tensors(num_bytes: int, count: int) -> Iterator[int]:
    """Sizes of so many tensors."""
    part = num_bytes // count // _WHOLE * _WHOLE
    for size in (*[part] * (count - 1), num_bytes - part * (count - 1)):
        if size > 0:
            yield size


_NAMES = (*_KEYS, "activations", "computing")


def _activations(model: ModelCosts, phase: str, unit: int) -> np.ndarray:
    """Of each unit, what its forward has kept, and what more lives while it computes."""
    found = np.zeros((len(model.units), 2), dtype=np.int64)
    if phase == "step":
        return found
    last = unit if phase == "reduce" else unit + 1
    found[:last, 0] = [each.activation_bytes for each in model.units[:last]]
    own = model.units[unit]
    late = own.late_transient_bytes
    more = {"forward": own.forward_transient_bytes, "backward": own.backward_transient_bytes, "reduce": 0}.get(
        phase, late
    )
    found[unit, 0 if more < 0 else 1] += more
    return found


def _always(
    model: ModelCosts, strategies: Sequence[Strategy], cluster: Cluster, options: Sequence[Option]
) -> Iterator[int]:
    """Tensors that are there all the time: shards and states of each parameter, copies that stay, buffers."""
    yield workspaces_of(strategies, cluster)[0].num_bytes
    yield model.buffer_bytes
    for unit, strategy, option in zip(model.units, strategies, options, strict=True):
        within = sharing(strategy, cluster.num_ranks)
        params = () if unit.is_offloaded else unit.params
        sizes = [size for param in params for size in _of_param(param, param.shard_numel(within))]
        yield from sizes
        yield option.held_bytes - sum(sizes)


def _of_param(param: ParamCosts, numel: int) -> Iterator[int]:
    yield numel * param.stored_itemsize
    if param.state_bytes_per_element:
        half = numel * param.state_bytes_per_element // 2
        yield from (half, numel * param.state_bytes_per_element - half, COUNTER_BYTES)
