"""`dshard.plan`: a model's costs at any batch size, told or measured here, and the best plan that comes of them."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dshard import arguments
from dshard.errors import PlanError
from dshard.planner.costs import CHECKPOINTING, Cluster, Link, Links, ModelCosts, UnitKind
from dshard.planner.devices import Device, find_device
from dshard.planner.memory import peak_bytes
from dshard.planner.options import CLUSTER_WAY
from dshard.planner.plan import Plan
from dshard.planner.profiles import Training, UnitTimes, check_offload, costs_of, with_offload
from dshard.planner.rates import Rates, check_profile, find_rates
from dshard.planner.solver import (
    DATASHEET,
    MEASURED,
    Solution,
    can_fit,
    live_room,
    naming_limit,
    solve,
    solve_batch,
    within_limit,
)
from dshard.planner.steps import Part, resized, tensors
from dshard.planner.texts import Progress, parse_bytes, silent, throttled
from dshard.planner.tracing import Trace, trace
from dshard.planning import recomputing
from dshard.planning.measured_steps import MeasuredSteps
from dshard.planning.meshes import PlannedMesh, check_tensor_parallel, mesh_cut_over, num_cut_over, strategies_for
from dshard.planning.recomputing import Kinds
from dshard.policies import Strategy, read_candidates
from dshard.setup.auto_units import find_units
from dshard.units.placing import PlacementFn, dim_of

log = logging.getLogger("dshard")

_EVERY_S = 5.0  # from one line of the logger to the next
_BATCHES = (*range(1, 17), *range(18, 33, 2), *range(40, 65, 8), *range(80, 129, 16), *range(160, 257, 32))
_ONE = Cluster(1, 1, Links.of(Link(0.0, 0.0)))


class Profile:
    """A model's costs at any batch size.

    Args:
        model: As for `plan`.
        sample_input: As for `plan`.
        device: Tells the times; None to measure them.
        training: Dtypes and optimizer.
        loss_of: As for `plan`.
        mesh: Of ranks that measure together: each takes the times of the slowest, and on CPU adds what dshard itself
            takes for each parameter.
        progress: Hears how far planning is.
        rates: Which parts of the device's figures are reached; None for those of its efficiency.
        checkpointing: As for `plan`.
        shard_placement_fn: As for `plan`.
        offload: As for `plan`.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any,
        *,
        device: Device | None,
        training: Training,
        loss_of: Callable[[Any], Tensor] | None = None,
        mesh: DeviceMesh | None = None,
        progress: Progress = silent,
        rates: Rates | None = None,
        checkpointing: Sequence[str] | str = "none",
        shard_placement_fn: PlacementFn | None = None,
        offload: str = "none",
    ) -> None:
        self.progress, self._rates, self._offload = progress, rates, offload
        check_offload(device, offload)
        self._model, self._sample, self._loss_of, self._mesh = model, sample_input, loss_of, mesh
        self._device, self._training, self._num_cut = device, training, num_cut_over(mesh_cut_over(model))
        spread = None if rates is None or device is None else rates.spread_on(device)
        self._spread = None if spread is None else spread.steps
        self._traces: dict[tuple[int, Kinds], Trace] = {}
        self._known: dict[int, ModelCosts] = {}
        self._dims = _dims_of(model, shard_placement_fn)
        self._parts, self._kinds = parts_of(model), recomputing.kinds_of(checkpointing)
        self._may_recompute = tuple(recomputing.may_recompute(model, part) for part in self._parts)
        sizes = [each.shape[0] for each in tensors(sample_input) if each.ndim]
        if not sizes or not sizes[0]:
            raise PlanError(
                "plan: sample_input must hold a tensor whose dim 0 is the batch, but it holds none. Pass the arguments "
                "of a forward."
            )
        self.batch = int(sizes[0])
        if device is not None:
            dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
            for dtype in dtypes if training.compute_dtype is None else (training.compute_dtype,):
                device.check(dtype)

    def traced(self, batch: int, kinds: Kinds | str = "none") -> Trace:
        """A traced step of so many samples, under some activation checkpointing; each is traced once."""
        kinds = self._kinds_of_parts(kinds)
        if (batch, kinds) not in self._traces:
            sample = resized(self._sample, self.batch, batch, is_real=False)
            self.progress(f"tracing a step of {batch} sample{'s' * (batch > 1)}")
            with recomputing.under(self._parts, kinds):
                self._traces[batch, kinds] = trace(
                    self._model,
                    sample,
                    self._parts,
                    dtype=self._training.compute_dtype,
                    loss_of=self._loss_of,
                    progress=self.progress,
                )
        return self._traces[batch, kinds]

    def costs(self, batch: int) -> ModelCosts:
        """Costs of a step of so many samples; each is traced, and measured, once."""
        if batch not in self._known:
            self._known[batch] = self._of_all_kinds(batch, self._costs)
        return self._known[batch]

    def estimated(self, most: int) -> Callable[[int], ModelCosts]:
        """Costs at sizes up to a largest one, of traces at 2 and there; exact where they cannot be told from these."""
        return lambda batch: self._of_all_kinds(batch, self._costs, most)

    def _told(self, batch: int, kind: str, most: int) -> Trace:
        """A traced step under a kind of activation checkpointing, told from those of 2 samples and the most if it can.

        A batch of one is traced by itself: some of what is contiguous in it is not in others.
        """
        found = None
        if 2 < batch < most:
            found = self.traced(2, kind).between(self.traced(most, kind), (batch - 2) / (most - 2))
        return self.traced(batch, kind) if found is None else found

    def _kinds_of_parts(self, kinds: Kinds | str) -> Kinds:
        """One kind for all parts that may have it, as one for each part."""
        if not isinstance(kinds, str):
            return kinds
        return tuple(kinds if may else "none" for may in self._may_recompute)

    def _of_all_kinds(self, batch: int, costs: Callable[[int, Trace, Kinds], ModelCosts], most: int = 0) -> ModelCosts:
        """Costs of units of every kind that is asked for, of `_told` traces."""
        whole, others = self._told(batch, "none", most), []
        plain = costs(batch, whole, self._kinds_of_parts("none"))
        for kind in self._kinds:
            if kind != "none":
                again, kinds = self._told(batch, kind, most), self._kinds_of_parts(kind)
                other = costs(batch, again, kinds)
                if self._device is None:
                    other = recomputing.shared_times(plain, other, recomputing.least_share(whole, again, kinds))
                others.append(other)
        return with_offload(recomputing.with_alternatives(plain, others, self._kinds), self._device, self._offload)

    def plan(
        self,
        cluster: Cluster,
        *,
        memory: int | str | None = None,
        memory_of: str = "live",
        strategies: Sequence[Strategy | str] | Strategy | str | None = None,
        batch: int | str | None = None,
        margin: float | None = None,
    ) -> Plan:
        """The best plan on a cluster; arguments and errors are those of `dshard.plan`."""
        check_tensor_parallel(self._num_cut, cluster)
        if margin is None:
            margin = MEASURED if self._device is None else DATASHEET
        limit = cluster.memory_bytes if memory is None else parse_bytes("plan", "memory", memory)
        if not limit:
            raise PlanError(
                "plan: memory must be given where the cluster's memory_bytes is 0, for none known. Pass "
                "memory='16GiB', or a Cluster that says it."
            )
        asked = read_candidates("plan", "strategies", strategies, or_none=True) or strategies_for(cluster)
        known = tuple(dict.fromkeys(strategy.on(cluster.num_ranks) for strategy in asked))
        if not isinstance(batch, str):
            size = self.batch if batch is None else batch
            return self._planned(size, cluster, known, limit, memory_of, float(margin))
        room = live_room(cluster, limit, memory_of)
        sizes = set(_BATCHES if self._device is not None else self._measured_sizes(cluster, known, room))
        while True:  # sizes between two traced ones are estimated, none too low; what is chosen is traced
            estimate, told = self.estimated(max(sizes)), self.progress
            with naming_limit(limit, room, memory_of):
                found = solve_batch(estimate, sizes, cluster, known, room, tolerance=margin, progress=told)
            best = found.model.batch_size // found.model.num_backwards
            try:
                return self._planned(best, cluster, known, limit, memory_of, float(margin))
            except PlanError:
                sizes.discard(best)
                if not sizes:
                    raise

    def _measured_sizes(self, cluster: Cluster, known: tuple[Strategy, ...], limit: int) -> Sequence[int]:
        """Sizes at which something may fit, after real steps that times are told from; the least if nothing does."""
        most_of_all = max(_BATCHES)

        def may_fit(batch: int) -> bool:
            return can_fit(self._of_all_kinds(batch, self._bytes, most_of_all), cluster, known, limit)

        def runs_alone(kind: str, batch: int) -> bool:  # before the model is sharded
            model = self._bytes(batch, self._told(batch, kind, most_of_all), self._kinds_of_parts(kind))
            peak = peak_bytes(model, ["ddp"] * len(model.units), _ONE)
            return not cluster.memory_bytes or peak <= cluster.memory_bytes

        sizes = _up_to(may_fit)
        for kind in dict.fromkeys(("none", *self._kinds)):
            most = min(sizes[-1], _up_to(partial(runs_alone, kind))[-1])
            self._steps.measure_up_to(most, self._kinds_of_parts(kind))
        return sizes

    def given(
        self, cluster: Cluster, strategy: Strategy | str, batch: int | None = None, *, checkpointing: str | None = None
    ) -> Plan:
        """The same strategy, and the same activation checkpointing, for all units, whether it fits or not.

        Where units may be kept on the device, all are.

        Args:
            cluster: Ranks and links.
            strategy: Of all units.
            batch: Samples per rank; None for those of the sample.
            checkpointing: Of the units that may have it; None for the first kind that is asked for.
        """
        size = self.batch if batch is None else batch
        kind = UnitKind(self._kinds[0] if checkpointing is None else checkpointing, self._offload == "all")
        costs = self.costs(size).under(kind)
        strategies = (Strategy.of(strategy).on(cluster.num_ranks),) * len(costs.units)
        flops = self._flops(size, self._kinds_in(costs))
        return Plan(costs, cluster, strategies, flops=flops, spread=self._spread)

    def _planned(
        self, batch: int, cluster: Cluster, known: tuple[Strategy, ...], limit: int, memory_of: str, margin: float
    ) -> Plan:
        costs = self.costs(batch)

        def choose(room: int) -> Solution:
            self.progress(f"choosing strategies of {len(costs.units)} units")
            solution = solve(costs, cluster, known, room, tolerance=margin, progress=self.progress)
            kinds = self._kinds_in(solution.model)
            if len(set(kinds)) > 1:  # what a mix takes as it runs, and not as its units alone tell
                exact = self._bytes(batch, self.traced(batch, kinds), kinds)
                model = recomputing.with_memory_of(solution.model, exact)
                solution = replace(solution, model=model)
            return solution

        found = within_limit(choose, cluster, limit, memory_of)
        flops = self._flops(batch, self._kinds_in(found.model))
        return Plan(found.model, cluster, found.strategies, known, found.certificate, flops, self._spread)

    def _kinds_in(self, model: ModelCosts) -> Kinds:
        """The kind of activation checkpointing of each part."""
        kind_of = {unit.name: unit.checkpointing for unit in model.units}
        return tuple(kind_of[part.label] for part in self._parts)

    def _flops(self, batch: int, kinds: Kinds | str = "none") -> float:
        return float(self.traced(batch, kinds).flops * self._training.num_backwards)

    def _bytes(self, batch: int, traced: Trace, kinds: Kinds) -> ModelCosts:
        """Costs of which bytes count alone."""
        return self._costs_of(batch, traced, kinds, times=[UnitTimes(0.0, 0.0)] * len(self._parts))

    def _costs(self, batch: int, traced: Trace, kinds: Kinds) -> ModelCosts:
        """Costs of a step that was traced under one kind of activation checkpointing for each part."""
        if self._device is not None:
            return self._costs_of(batch, traced, kinds, device=self._device, rates=self._rates)
        return self._costs_of(
            batch,
            traced,
            kinds,
            times=self._steps.times(batch, kinds),
            optimizer_s_per_byte=self._steps.optimizer_s_per_byte,
            product_s_per_flop=0.0 if self._training.whole is None else self._steps.product_s_per_flop,
            overhead=self._steps.overhead,
            source=self._steps.source(batch, kinds),
        )

    def _costs_of(self, batch: int, traced: Trace, kinds: Kinds, **seconds_of: Any) -> ModelCosts:
        """Costs of a traced step; what gives seconds, a device and rates or measured times, is as for `costs_of`."""
        return costs_of(
            traced,
            self._model,
            training=self._training,
            batch_size=batch,
            tensor_parallel=self._num_cut,
            dims=self._dims,
            kinds=kinds,
            **seconds_of,
        )

    @cached_property
    def _steps(self) -> MeasuredSteps:
        """Real steps on this machine.

        Raises:
            PlanError: They would tell nothing of a compiled model.
        """
        if self._training.is_compiled:
            raise PlanError(
                "plan: is_compiled is for times that a device and a profile tell, but these are measured here, of the "
                "model as it is. Pass device= and profile=, or a compiled model and is_compiled=False."
            )
        return MeasuredSteps(
            self._model,
            self._sample,
            self.batch,
            self._parts,
            dtype=self._training.compute_dtype,
            loss_of=self._loss_of,
            mesh=self._mesh,
            cut_over=mesh_cut_over(self._model),
            progress=self.progress,
        )


def _dims_of(model: nn.Module, shard_placement_fn: PlacementFn | None) -> dict[str, int]:
    """The dim along which each parameter is to be sharded.

    Raises:
        PlacementError: The function gives what is no placement of the parameter.
        PlanError: It gives one that no strategy decides.
    """
    found = dict[str, int]()
    if shard_placement_fn is None:
        return found
    for name, param in model.named_parameters():
        asked = shard_placement_fn(param)
        dim = None if hasattr(asked, "mesh_info") else dim_of(name, param, asked)
        if dim is None and param.ndim:
            raise PlanError(
                f"plan: shard_placement_fn must return Shard(dim) or None where a plan chooses who shares a parameter, "
                f"but for {name} it returned {asked}. Return None there, and pass strategies."
            )
        found[name] = dim or 0
    return found


def _up_to(fits: Callable[[int], bool]) -> Sequence[int]:
    """Batch sizes that fit, if larger ones take more; the smallest one in any case."""
    return _BATCHES[: max(1, bisect_left(_BATCHES, 1, key=lambda batch: int(not fits(batch))))]


def parts_of(model: nn.Module) -> tuple[Part, ...]:
    """The units that `fully_shard` would find on the root of a model, by name.

    Raises:
        PlanError: It has no parameters.
    """
    params = dict(model.named_parameters())
    if not params:
        raise PlanError("plan: the model must have parameters, but it has none. Pass a model that has.")
    name_of = {id(param): name for name, param in params.items()}
    units = find_units(model, list(params.values()), "root")
    return tuple(Part(unit.label, unit.modules, tuple(name_of[id(p)] for p in unit.params)) for unit in units)


def plan(
    model: nn.Module,
    sample_input: Any,
    *,
    cluster: Cluster | None = None,
    mesh: DeviceMesh | None = None,
    device: Device | str | None = None,
    memory: int | str | None = None,
    memory_of: str = "live",
    strategies: Sequence[Strategy | str] | Strategy | str | None = None,
    checkpointing: Sequence[str] | str = "none",
    offload: str = "none",
    batch: int | str | None = None,
    training: Training | None = None,
    loss_of: Callable[[Any], Tensor] | None = None,
    margin: float | None = None,
    profile: Rates | str | Path | None = None,
    shard_placement_fn: PlacementFn | None = None,
) -> Plan:
    """Choose a strategy for each unit of a model, so that a step is shortest and fits into memory.

    Units are those that `fully_shard` finds on the root of the model. Bytes and operations come from a step on tensors
    without data, times from a description of the device, or from real steps on this machine. Of what cannot be told
    apart by such times, one strategy for all units is preferred, and of several the one that takes least memory; the
    plan's certificate says what is the fastest, and by how much the plan is slower.

    Args:
        model: Not sharded yet; may be on meta if a device is named.
        sample_input: Of one rank: a tensor, a tuple of arguments or a dict of keyword arguments; dim 0 is the batch.
        cluster: Ranks and links: `dshard.planner.cluster_of(device, 512)`, or what `measure_links` gave.
        mesh: In its place: the ranks at hand, whose links are measured, or read from where they were kept. Of two dims,
            to replicate over and to shard over, a parameter is shared by the ranks of the second, or whole.
        device: A name of `dshard.planner.DEVICES`, or one of your own; None to measure here.
        memory: Limit per rank, in bytes or as text: "38GiB"; None for that of the cluster's devices.
        memory_of: What it limits: "live" bytes of tensors, or what CUDA's allocator holds for them: "reserved" bytes
            of its usual segments, or "expandable" ones. Live bytes then get the limit over a measured factor, 1.13 or
            1.06.
        strategies: That a unit may have, several or one; None for all.
        checkpointing: Activation checkpointing that a unit may have, one kind or several: "none", "selective" (outputs
            of matrix products, convolutions and attention are kept, the rest is computed again), "full" (inputs of a
            unit are kept alone); "auto" for any. `fully_shard(model, plan=plan)` applies what was chosen.
        offload: Units whose parameters, gradients and optimizer states are kept in the CPU's memory, where the
            optimizer steps: "none", "all", or "auto" for those that the plan chooses. Needs `device`.
            `fully_shard(model, plan=plan, offload_policy=CPUOffloadPolicy())` keeps those there, and no others.
        batch: Samples per rank; None for those of the sample, "auto" for as many as give the most samples per second.
        training: Dtypes and optimizer; None for AdamW in the model's dtypes, as torch runs it by default there.
        loss_of: Loss of an output. Without it: its `loss`, or the sum of what is floating-point in it.
        margin: By which part of a step the preferred may be slower than the fastest; 0 for the fastest. None for what
            the times are known to: 0.02 where they were measured, 0.03 by a description of a device.
        profile: Of what `device` says, which parts runs reach: what `dshard calibrate` wrote, as a path or read by
            `Rates.load`, or "published" for the one that is shipped. Links are those of `cluster`: see `cluster_of`.
        shard_placement_fn: That `fully_shard` will be given, too: the dim along which a parameter is cut, as
            `Shard(dim)`, or None for dim 0.

    Raises:
        ArgumentError: An argument is none of what it may be.
        PlacementError: `shard_placement_fn` gives no placement of a parameter.
        PlanError: Nothing fits, and by how much; or `sample_input` holds no batch; or `profile` is given without
            `device`, or with links that it does not know of; or `shard_placement_fn` gives `Replicate()` or a mesh.
        StateError: The model cannot be traced, or the device does not compute in its dtype.

    Communicates:
        With `mesh=` what `measure_links` and `measure_overhead` do, and all-reduces of measured times, so that all
        ranks get one plan; of a model whose layers are cut over others, broadcasts of links and plan among these.
        With `cluster=` nothing: ranks that measure their own times, without a device, may get different ones. But steps
        of layers that are cut, and their times, are of all ranks over which they are: these must call this alike.
    """
    arguments.module("plan", "model", model)
    arguments.instance("plan", "cluster", cluster, Cluster, CLUSTER_WAY, or_none=True)
    arguments.instance(
        "plan", "mesh", mesh, DeviceMesh, "Pass init_device_mesh(device_type, (num_ranks,)).", or_none=True
    )
    named: Device | None = find_device("plan", "device", device, or_none=True)
    arguments.instance("plan", "training", training, Training, "Pass dshard.planner.Training(...).", or_none=True)
    rates = find_rates("plan", profile)
    memory = parse_bytes("plan", "memory", memory, or_none=True)
    asked = read_candidates("plan", "strategies", strategies, or_none=True)
    batch = _read_batch(batch)
    _check_choices(memory_of, checkpointing, offload, margin)
    _check_functions(loss_of, shard_placement_fn)
    ranks = _ranks_of(model, cluster, mesh)
    if training is None:  # on CPU, torch's AdamW steps one parameter after the other
        is_here = named is None and all(p.device.type == "cpu" for p in model.parameters())
        training = Training(step_bytes_per_element=12, steps_together=False) if is_here else Training()
    if rates is not None:
        check_profile(named, cluster)
    progress = throttled(lambda line: log.info("plan: %s", line), every_s=_EVERY_S)
    is_first = mesh is None or mesh.get_rank() == 0
    costs = Profile(
        model,
        sample_input,
        device=named,
        training=training,
        loss_of=loss_of,
        mesh=ranks.whole if isinstance(ranks, PlannedMesh) else None,
        progress=progress if is_first else silent,
        checkpointing=checkpointing,
        offload=offload,
        rates=rates,
        shard_placement_fn=shard_placement_fn,
    )
    made = partial(costs.plan, memory=memory, memory_of=memory_of, batch=batch, margin=margin)
    if isinstance(ranks, Cluster):
        return made(ranks, strategies=asked)
    costs.progress("measuring links")
    measured = ranks.links()
    return ranks.shared(lambda: made(measured, strategies=ranks.strategies(asked, measured)))


def _read_batch(batch: Any) -> Any:
    if isinstance(batch, str) and batch == "auto":
        return batch
    is_right, allowed = arguments.is_count(batch), "a number of samples, 'auto'"
    arguments.expect(is_right, "plan", "batch", batch, allowed, "Pass 'auto'.", or_none=True)
    return None if batch is None else int(batch)


def _check_choices(memory_of: Any, checkpointing: Any, offload: Any, margin: Any) -> None:
    arguments.choice("plan", "memory_of", memory_of, "live", "reserved", "expandable")
    arguments.choice("plan", "offload", offload, "none", "all", "auto")
    several = () if isinstance(checkpointing, str) else arguments.items(checkpointing)
    is_right = (isinstance(checkpointing, str) and checkpointing in (*CHECKPOINTING, recomputing.ANY)) or (
        bool(several) and all(isinstance(each, str) and each in CHECKPOINTING for each in several or ())
    )
    allowed = "'none', 'selective', 'full', 'auto', or a list of at least one of the first three"
    arguments.expect(is_right, "plan", "checkpointing", checkpointing, allowed, "Pass 'auto'.")
    allowed, way = "a part of a step, 0 or more", "Pass 0 for the fastest plan."
    arguments.from_0("plan", "margin", margin, allowed, way, or_none=True)


def _check_functions(loss_of: Any, shard_placement_fn: Any) -> None:
    way = "Pass one, as in lambda output: output.loss."
    arguments.function("plan", "loss_of", loss_of, "an output", way, or_none=True)
    way = "Pass a function that returns Shard(dim), as in lambda param: Shard(1)."
    arguments.function("plan", "shard_placement_fn", shard_placement_fn, "a parameter", way, or_none=True)


def _ranks_of(model: nn.Module, cluster: Cluster | None, mesh: DeviceMesh | None) -> Cluster | PlannedMesh:
    """Which ranks there are: the cluster, or those of the mesh.

    Raises:
        PlanError: Both are given, or neither.
    """
    if cluster is not None and mesh is None:
        return cluster
    if mesh is None or cluster is not None:
        raise PlanError(
            f"plan: either cluster or mesh says which ranks there are, but {'neither' if mesh is None else 'both'} is "
            "given. Pass mesh=, or cluster=dshard.planner.cluster_of(device, 512)."
        )
    return PlannedMesh.of(mesh, mesh_cut_over(model))
