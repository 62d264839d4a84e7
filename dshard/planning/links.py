"""Links, measured: how long dshard's own collectives take on the process groups at hand, and lines through that."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dshard import arguments, collectives
from dshard.collectives import BufferPool, GatherPlan, HostCopy, ReduceBucket, ReduceOp, ReducePlan, ShardGroup
from dshard.errors import PlanError
from dshard.layout import BucketLayout, ShardLayout
from dshard.planner import Cluster, Link, Links
from dshard.planner.files import read_text, write_text
from dshard.planner.measuring import synchronize, timed_s
from dshard.tensor.meshes import default_mesh, group_of, mesh_within

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "in_place")
SIZES = (1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)  # bytes of the full tensor
_NUM_TENSORS = 4
_NUM_IN_A_ROW = 3
_LEAST_S = 1e-6
_SCRATCH_NUMEL, _WIDTH = 1 << 21, 256
_SCHEMA = 3
_CONTAINER = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)  # of its second, first version
_MEMORY_FREE = 0.95  # of a device, beside its context; of a host, beside its system

# Starts a collective, yields while each of its steps is under way, and ends it.
_Run = Callable[[], Iterator[None]]


def fit(wire_bytes: Sequence[float], seconds: Sequence[float], source: str = "measured") -> Link:
    """The line `alpha + bytes * seconds per byte`, neither below 0, whose relative errors are smallest in squares.

    Args:
        wire_bytes: That each rank sent, of one collective on one group.
        seconds: What it took then: the median on the slowest rank.
        source: Of the link.

    Raises:
        PlanError: There are fewer than two sizes.
    """
    if len(set(wire_bytes)) < 2:
        raise PlanError("links: a line needs two sizes or more, but there are fewer. Pass more sizes=.")
    wire, took = np.array(wire_bytes), np.array(seconds)
    (alpha, slope), *_ = np.linalg.lstsq(np.stack([1 / took, wire / took], axis=1), np.ones(len(took)), rcond=None)
    if slope < 0:  # without the other, each has a closed form
        alpha, slope = float((1 / took).sum() / (1 / took**2).sum()), 0.0
    elif alpha < 0:
        alpha, slope = 0.0, float((wire / took).sum() / ((wire / took) ** 2).sum())
    return Link(float(alpha), float(slope), source=source)


class InPlace(NamedTuple):
    """Whether full values can be once in memory that all ranks of a group read.

    Args:
        shards: Among the ranks that share a parameter.
        replicas: Among those that hold the same shard; as among all, where none do.
    """

    shards: bool
    replicas: bool


def _cluster_through(
    figures: Tensor,
    parts: Sequence[int],
    sizes: Sequence[int],
    in_place: Sequence[InPlace],
    *,
    per_host: int,
    memory_bytes: int,
    backend: str,
) -> Cluster:
    """Lines through all figures: seconds, of shape (parts, collectives, sizes); the first part is all ranks."""
    num_ranks = parts[0]
    source = f"measured over {backend}, {num_ranks} ranks"

    def line(part: int, name: str, among: int) -> Link:
        i, collective = parts.index(part), COLLECTIVES.index(name)
        rounds = 2 if name == "all_reduce" else 1
        wire = [rounds * size * (among - 1) / among for size in sizes]
        return fit(wire, figures[i, collective].tolist(), source)

    shards, replicas = {}, {}
    whole = line(num_ranks, "all_reduce", num_ranks)
    for part, is_in_place in zip(parts, in_place, strict=True):
        across = whole if part == num_ranks else line(part, "all_reduce", num_ranks // part)
        once = line(part, "in_place", part) if is_in_place.shards else None
        links = Links(line(part, "all_gather", part), line(part, "reduce_scatter", part), whole, once)
        shards[part] = links
        if part < num_ranks:
            replicas[part] = replace(links, all_reduce=across, in_place=once if is_in_place.replicas else None)
    replicas[1] = shards[num_ranks]
    return Cluster(
        num_ranks=num_ranks,
        ranks_per_host=per_host,
        inside=shards[per_host if per_host > 1 else num_ranks],  # of one rank, nothing is sent
        across=shards[num_ranks] if per_host < num_ranks else None,
        memory_bytes=memory_bytes,
        overlaps=backend != "gloo",
        keeps_received_rows=backend == "gloo",
        shards=shards,
        replicas=replicas,
        source=source,
    )


def measure_links(
    mesh: DeviceMesh | None = None,
    *,
    within: Sequence[int] = (),
    sizes: Sequence[int] = SIZES,
    num_rounds: int = 15,
    memory_bytes: int | None = None,
    path: str | Path | None = None,
    again: bool = False,
) -> Cluster:
    """Measure the collectives that each strategy would use on a mesh.

    On the CPUs of one host all ranks compute while each step of one is under way, as in training, where the cores that
    compute copy too, caches hold something else, and ranks are never quite in step: what counts is by how much it makes
    the computation longer. Elsewhere, where a network or a device does the work, collectives are timed alone.
    Gradients are packed in either.

    Which groups read one another's memory is found out by having full values once in it. Of those a gather in place is
    measured, too.

    All ranks get the same figures: those of the slowest. They are kept in a file of rank 0, and read from there by
    later calls on as many ranks of the same backend and host that reach one another alike.

    Args:
        mesh: Of one dim; None for all ranks.
        within: Numbers of neighbouring ranks that may share a parameter, besides all, and those of a host.
        sizes: Bytes of the tensors that are gathered and reduced.
        num_rounds: Of which the median counts.
        memory_bytes: Of each rank; None for 95% of its CUDA device's, or on CPU of its part of the host's: the least of
            all ranks. 0 for none known, as on other devices.
        path: Of the file; None for one in `~/.cache/dshard`, named after backend, ranks and host.
        again: Measure, even if the file is there.

    Raises:
        PlanError: The mesh has several dims; or a number of neighbours does not divide that of the ranks.

    Communicates:
        What is measured; the making of full values once per host; a broadcast and all-reduces of the figures, and of
        the memory where none is given. All ranks must call this alike.
    """
    who, unless = "measure_links", "Leave it out."
    arguments.instance(who, "mesh", mesh, DeviceMesh, "Leave it out for all ranks.", or_none=True)
    allowed = "numbers of neighbouring ranks, above 1"
    within = arguments.several(who, "within", within, partial(arguments.is_count, least=2), allowed, unless)
    allowed = "two numbers of bytes or more"
    sizes = arguments.several(who, "sizes", sizes, arguments.is_count, allowed, unless, least=2)
    num_rounds = arguments.count(who, "num_rounds", num_rounds)
    memory_bytes = arguments.from_0(who, "memory_bytes", memory_bytes, or_none=True)
    arguments.path(who, "path", path, or_none=True)
    again = arguments.boolean(who, "again", again)
    mesh = default_mesh() if mesh is None else mesh
    num_ranks = mesh.size()
    if num_ranks == 1:
        memory = _memory(group_of(mesh), memory_bytes, 1)
        return Cluster(1, 1, Links.of(Link(0.0, 0.0)), memory_bytes=memory, source="one rank")
    per_host = _ranks_per_host(mesh.mesh.flatten().tolist())
    parts = tuple(dict.fromkeys((num_ranks, *([per_host] if per_host > 1 else ()), *within)))
    if mesh.ndim != 1 or any(part < 2 or num_ranks % part for part in parts):
        raise PlanError(
            f"links: need a mesh of one dim, and numbers above 1 that divide its {num_ranks} ranks, but it has "
            f"{mesh.ndim} dims, and within is {tuple(within)}. Pass within=({num_ranks},)."
        )
    group = group_of(mesh)
    groups = [group if part == num_ranks else group_of(mesh_within(mesh, part)) for part in parts]
    in_place = _in_place(groups, group)
    file = Path(path) if path is not None else _default_path(group)
    known = {"schema": _SCHEMA, "backend": group.backend, "num_ranks": num_ranks, "per_host": per_host}
    known |= {"parts": list(parts), "sizes": list(sizes), "torch": torch.__version__}
    known |= {"in_place": [list(each) for each in in_place]}
    shape = (len(parts), len(COLLECTIVES), len(sizes))
    figures = _read(file, known, shape) if group.rank == 0 and not again else None
    figures = _agreed(figures, shape, group)
    if figures is None:
        measured = torch.zeros(shape, dtype=torch.float64)
        is_alone = group.device_type != "cpu" or per_host < num_ranks
        for i, own in enumerate(groups):
            _measure_group(own, group, measured[i], sizes, num_rounds, is_alone=is_alone, in_place=in_place[i].shards)
        figures = collectives.all_reduce([measured], group, ReduceOp.MAX, label="links").wait()[0]
        if group.rank == 0:
            _write(file, known, figures)
    memory = _memory(group, memory_bytes, per_host)
    return _cluster_through(
        figures, parts, sizes, in_place, per_host=per_host, memory_bytes=memory, backend=group.backend
    )


def _in_place(groups: Sequence[ShardGroup], everyone: ShardGroup) -> list[InPlace]:
    """Whether they can in all groups of each kind, by having them so."""
    found = torch.tensor([[_has_once(own), _has_once(own.replicas or own)] for own in groups], dtype=torch.float64)
    found = collectives.all_reduce([found], everyone, ReduceOp.MIN, label="links").wait()[0]
    return [InPlace(bool(shards), bool(replicas)) for shards, replicas in found.tolist()]


def _has_once(group: ShardGroup) -> bool:
    return collectives.shares_memory(group) and _once(group, 1) is not None


def _once(group: ShardGroup, width: int) -> HostCopy | None:
    """Some matrices as `_tensors` makes them, once in memory that all ranks of the group read, if that can be."""
    return collectives.make_host_copy(_gather_plan(group, _bucket(group, width)), group, label="links")


def _ranks_per_host(ranks: Sequence[int]) -> int:
    """As torchrun says, of a mesh's ranks; all of them where it says nothing that cuts them into alike neighbours."""
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if per_host <= 0:
        return len(ranks)
    nums = {len(list(own)) for _, own in groupby(rank // per_host for rank in ranks)}
    return nums.pop() if len(nums) == 1 else len(ranks)


def _memory(group: ShardGroup, given: int | None, per_host: int) -> int:
    if given is not None:
        return given
    sharing = max(per_host, int(os.environ.get("LOCAL_WORLD_SIZE", "0")))  # of a host those of other meshes, too
    mine = torch.tensor([total_bytes(group.device, sharing)])
    return int(collectives.all_reduce([mine], group, ReduceOp.MIN, label="links").wait()[0].item() * _MEMORY_FREE)


def total_bytes(device: torch.device, per_host: int) -> int:
    """Memory of a CUDA device; of a CPU rank, its part of what the host, or its container, has; 0 for none known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        return 0
    limits = [file.read_text().strip() for file in map(Path, _CONTAINER) if file.exists()]
    known = [int(limit) for limit in limits if limit.isdecimal()]
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *known) // per_host


def _default_path(group: ShardGroup) -> Path:
    name = f"links-{group.backend}-{group.num_ranks}-{platform.node()}.json"
    return Path.home() / ".cache" / "dshard" / name


def _read(file: Path, known: dict[str, Any], shape: tuple[int, ...]) -> Tensor | None:
    """Figures of an earlier call that measured the same; None where there are none."""
    try:
        record = json.loads(read_text(file))
        figures = torch.tensor(record.pop("seconds"), dtype=torch.float64)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return figures if record == known and figures.shape == shape and _are_times(figures, known["in_place"]) else None


def _are_times(figures: Tensor, in_place: Sequence[Sequence[bool]]) -> bool:
    """Whether all that was measured are seconds; a gather in place is measured where full values can be so."""
    measured = torch.ones(figures.shape, dtype=torch.bool)
    for part, (shards, _) in zip(measured, in_place, strict=True):
        part[len(COLLECTIVES) - 1 :] = shards
    return bool((figures.isfinite() & (figures > 0))[measured].all())


def _write(file: Path, known: dict[str, Any], figures: Tensor) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps({**known, "seconds": figures.tolist()}) + "\n")


def _agreed(figures: Tensor | None, shape: tuple[int, ...], group: ShardGroup) -> Tensor | None:
    """What rank 0 has read, on all ranks."""
    sent = torch.full(shape, -1.0, dtype=torch.float64) if figures is None else figures
    found = collectives.broadcast([sent], group, label="links").wait()[0]
    return None if bool((found < 0).any()) else found


def _measure_group(
    own: ShardGroup,
    everyone: ShardGroup,
    out: Tensor,
    sizes: Sequence[int],
    num_rounds: int,
    *,
    is_alone: bool,
    in_place: bool,
) -> None:
    """Seconds of each collective at each size, into `out` of shape (collectives, sizes).

    Gathers and reduce-scatters are among the group, all-reduces among its replicas, if it has any.
    """
    pool = BufferPool()
    replicas = own.replicas if own.replicas is not None else own
    for j, size in enumerate(sizes):
        shards, grads, bucket, row = _tensors(own, size)
        runs = [
            partial(_gather, own, shards, bucket, pool),
            partial(_reduce, own, grads, bucket, pool),
            partial(_all_reduce, replicas, row, pool),
        ]
        host_copy = _once(own, shards[0].shape[1]) if in_place else None
        if host_copy is not None:
            homes = [host_copy.memory_for(i, shard) for i, shard in enumerate(shards)]
            runs.append(partial(_gather_in_place, own, homes, host_copy))
        elif in_place:
            runs.append(runs[0])  # there is no file left
        seconds = _alone_s if is_alone else _beside_computation_s
        for i, run in enumerate(runs):
            out[i, j] = seconds(run, everyone, num_rounds)


def _tensors(group: ShardGroup, size: int) -> tuple[list[Tensor], list[Tensor], BucketLayout, Tensor]:
    """Shards and gradients of some alike matrices of `size` bytes together, and a row of as many."""
    width = max(1, size // (4 * _NUM_TENSORS * group.num_ranks))
    shards = [torch.ones(1, width, device=group.device) for _ in range(_NUM_TENSORS)]
    grads = [torch.ones(group.num_ranks, width, device=group.device) for _ in range(_NUM_TENSORS)]
    return shards, grads, _bucket(group, width), torch.ones(max(1, size // 4), device=group.device)


def _bucket(group: ShardGroup, width: int) -> BucketLayout:
    return BucketLayout.of([ShardLayout((group.num_ranks, width), 0, group.num_ranks) for _ in range(_NUM_TENSORS)])


def _gather_plan(group: ShardGroup, bucket: BucketLayout) -> GatherPlan:
    return GatherPlan.of(bucket, [(x.shape[1], 1) for x in bucket.layouts], torch.float32, group)


def _gather_in_place(group: ShardGroup, shards: list[Tensor], host_copy: HostCopy) -> Iterator[None]:
    handle = host_copy.gather(shards, label="links")
    yield
    handle.wait()
    host_copy.end()


def _gather(group: ShardGroup, shards: list[Tensor], bucket: BucketLayout, pool: BufferPool) -> Iterator[None]:
    handle = collectives.all_gather(shards, _gather_plan(group, bucket), group, label="links", pool=pool)
    yield
    gathered = handle.wait()
    memory = gathered.memory
    del gathered
    if memory is not None:
        pool.give(memory)


def _reduce(group: ShardGroup, grads: list[Tensor], bucket: BucketLayout, pool: BufferPool) -> Iterator[None]:
    plan = ReducePlan(bucket, group)
    reduction = ReduceBucket(plan, dtype=torch.float32, device=group.device, label="links", pool=pool)
    for i, grad in enumerate(grads):
        reduction.add([i], [grad])
    handle = reduction.launch(mean=True)
    yield
    handle.wait()


def _all_reduce(group: ShardGroup, grads: Tensor, pool: BufferPool) -> Iterator[None]:
    memory = pool.take(grads.numel() * grads.element_size(), grads.device)
    row = memory.memory.view(grads.dtype)[: grads.numel()].copy_(grads)
    how = collectives.RowReduction(mean=True, label="links", tag=0, pool=pool)
    for handle in collectives.all_reduce_row(row, group, how):
        yield
        handle.wait()
    del row
    pool.give(memory)


def _alone_s(run: _Run, everyone: ShardGroup, num_rounds: int) -> float:
    """Median of some runs that all ranks start together, after one that does not count."""
    times = []
    for _ in range(num_rounds + 1):
        _start_together(everyone)
        times.append(timed_s(lambda: list(run()), everyone.device))
    return statistics.median(times[1:])


def _beside_computation_s(run: _Run, everyone: ShardGroup, num_rounds: int) -> float:
    """Seconds by which a run makes computation longer that runs during each of its steps; both are medians."""
    scratch, a, b = torch.zeros(_SCRATCH_NUMEL), torch.ones(_WIDTH, _WIDTH), torch.ones(_WIDTH, 4 * _WIDTH)

    def compute() -> None:
        scratch.add_(1.0)
        for _ in range(4):
            torch.mm(a, b)

    def compute_beside() -> None:
        for _ in run():
            compute()

    num_steps = len(list(run()))
    alone: list[float] = []
    together: list[float] = []
    for _ in range(num_rounds):
        for step, times in ((compute, alone), (compute_beside, together)):
            _start_together(everyone)
            start = time.perf_counter()
            for _ in range(_NUM_IN_A_ROW):
                step()
            times.append((time.perf_counter() - start) / _NUM_IN_A_ROW)
    return max(statistics.median(together) - num_steps * statistics.median(alone), _LEAST_S)


def _start_together(everyone: ShardGroup) -> None:
    """Return on all ranks at about the same time, with nothing left to do on their devices.

    Communicates:
        An all-reduce of a number.
    """
    collectives.all_reduce([torch.zeros(1, device=everyone.device)], everyone, ReduceOp.MAX, label="links").wait()
    synchronize(everyone.device)
