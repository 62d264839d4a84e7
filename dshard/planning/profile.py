"""A model's costs at any batch size, told or measured here, and the plans that come of them."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dshard.errors import PlanError
from dshard.planner.costs import Cluster, Link, Links, ModelCosts, UnitKind
from dshard.planner.devices import Device
from dshard.planner.hosts import check_offload, with_offload
from dshard.planner.memory import peak_bytes
from dshard.planner.plan import Plan
from dshard.planner.profiles import Training, UnitTimes, costs_of
from dshard.planner.progress import SILENT, Progress, Stretch
from dshard.planner.rates import Rates
from dshard.planner.robust import Doubt, robust, within_limit
from dshard.planner.solver import Solution, can_fit, solve, solve_batch
from dshard.planner.steps import resized, tensors
from dshard.planner.texts import parse_bytes
from dshard.planner.ties import DATASHEET, MEASURED
from dshard.planner.traces import Part, Trace
from dshard.planner.tracing import trace
from dshard.planning import recomputing
from dshard.planning.measured_steps import MeasuredSteps
from dshard.planning.meshes import check_tensor_parallel, mesh_cut_over, num_cut_over, strategies_for
from dshard.planning.recomputing import Kinds
from dshard.policies import Strategy
from dshard.setup.auto_units import find_units
from dshard.units.placing import PlacementFn, dim_of

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
        progress: Progress = SILENT,
        rates: Rates | None = None,
        checkpointing: Sequence[str] | str = "none",
        shard_placement_fn: PlacementFn | None = None,
        offload: str = "none",
    ) -> None:
        self.progress, self._rates, self._offload = progress, rates, offload
        check_offload(device, offload, is_compiled=training.is_compiled)
        self._model, self._sample, self._loss_of, self._mesh = model, sample_input, loss_of, mesh
        self._device, self._training, self._num_cut = device, training, num_cut_over(mesh_cut_over(model))
        self._spread = None if rates is None or device is None else rates.spread_on(device)
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
            what = f"tracing a step of {batch} sample{'s' * (batch > 1)}"
            self.progress.at(what)
            with recomputing.under(self._parts, kinds):
                self._traces[batch, kinds] = trace(
                    self._model,
                    sample,
                    self._parts,
                    dtype=self._training.compute_dtype,
                    loss_of=self._loss_of,
                    progress=Stretch(self.progress, f"{what}: ", 0.0, 1.0),
                )
        return self._traces[batch, kinds]

    def costs(self, batch: int) -> ModelCosts:
        """Costs of a step of so many samples; each is traced, and measured, once."""
        if batch not in self._known:
            self._known[batch] = self._of_all_kinds(partial(self.traced, batch), partial(self._costs, batch))
        return self._known[batch]

    def estimated(self, most: int) -> Callable[[int], ModelCosts]:
        """Costs at sizes up to a largest one, of traces at 2 and there; exact where they cannot be told from these."""
        return lambda batch: self._of_all_kinds(self._between(batch, most), partial(self._costs, batch))

    def _between(self, batch: int, most: int) -> Callable[[str], Trace]:
        """Traces of so many samples, of any kind of activation checkpointing.

        A batch of one is traced by itself: some of what is contiguous in it is not in others.
        """

        def traced(kind: str) -> Trace:
            if not 2 < batch < most:
                return self.traced(batch, kind)
            found = self.traced(2, kind).between(self.traced(most, kind), (batch - 2) / (most - 2))
            return self.traced(batch, kind) if found is None else found

        return traced

    def _kinds_of_parts(self, kinds: Kinds | str) -> Kinds:
        """One kind for all parts that may have it, as one for each part."""
        if not isinstance(kinds, str):
            return kinds
        return tuple(kinds if may else "none" for may in self._may_recompute)

    def _of_all_kinds(self, traced: Callable[[str], Trace], costs: Callable[[Trace, Kinds], ModelCosts]) -> ModelCosts:
        """Costs of units of every kind that is asked for."""
        whole, others = traced("none"), []
        plain = costs(whole, self._kinds_of_parts("none"))
        for kind in self._kinds:
            if kind != "none":
                again, kinds = traced(kind), self._kinds_of_parts(kind)
                other = costs(again, kinds)
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
        tolerance = self._margin(margin)
        limit = cluster.memory_bytes if memory is None else parse_bytes(memory, "memory")
        if not limit:
            raise PlanError(
                "plan: memory must be given where the cluster's memory_bytes is 0, for none known. Pass "
                "memory='16GiB', or a Cluster that says it."
            )
        if strategies is None:
            strategies = strategies_for(cluster)
        elif isinstance(strategies, (str, Strategy)):
            strategies = (strategies,)
        known = tuple(dict.fromkeys(Strategy.of(each).on(cluster.num_ranks) for each in strategies))
        if not isinstance(batch, str):
            return self._planned(self._size(batch), cluster, known, limit, memory_of, margin)
        sizes = set(_BATCHES if self._device is not None else self._measured_sizes(cluster, known, limit))
        while True:  # sizes between two traced ones are estimated, none too low; what is chosen is traced
            estimate, told = self.estimated(max(sizes)), self.progress
            found = solve_batch(estimate, sizes, cluster, known, limit, tolerance=tolerance, progress=told)
            best = found.model.batch_size // found.model.num_backwards
            try:
                return self._planned(best, cluster, known, limit, memory_of, margin)
            except PlanError:
                sizes.discard(best)
                if not sizes:
                    raise

    def _measured_sizes(self, cluster: Cluster, known: tuple[Strategy, ...], limit: int) -> Sequence[int]:
        """Sizes at which something may fit, after real steps that times are told from; the least if nothing does."""

        def traced(batch: int) -> Callable[[str], Trace]:
            return self._between(batch, max(_BATCHES))

        def may_fit(batch: int) -> bool:
            model = self._of_all_kinds(traced(batch), partial(self._bytes, batch))
            return can_fit(model, cluster, known, limit)

        def runs_alone(kind: str, batch: int) -> bool:  # before the model is sharded
            model = self._bytes(batch, traced(batch)(kind), self._kinds_of_parts(kind))
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
        size = self._size(batch)
        kind = UnitKind(self._kinds[0] if checkpointing is None else checkpointing, self._offload == "all")
        costs = self.costs(size).under(kind)
        strategies = (Strategy.of(strategy).on(cluster.num_ranks),) * len(costs.units)
        flops = self._flops(size, self._kinds_in(costs))
        return Plan(costs, cluster, strategies, flops=flops, doubt=self._doubt())

    def _size(self, batch: int | None) -> int:
        return self.batch if batch is None else batch

    def _margin(self, margin: float | None) -> float:
        if margin is None:
            return MEASURED if self._device is None else DATASHEET
        return float(margin)

    def _doubt(self) -> Doubt | None:
        return None if self._spread is None else Doubt(self._spread.steps)

    def _planned(
        self, batch: int, cluster: Cluster, known: tuple[Strategy, ...], limit: int, memory_of: str, most: float | None
    ) -> Plan:
        costs, tolerance = self.costs(batch), self._margin(most)
        spread = self._spread

        def choose(room: int) -> tuple[Solution, Doubt | None]:
            self.progress.at(f"choosing strategies of {len(costs.units)} units")
            solution = solve(costs, cluster, known, room, tolerance=tolerance, progress=self.progress)
            doubt = None
            if spread is not None:
                solution, doubt = robust(costs, cluster, solution, known, spread, margin=tolerance, most=most)
            kinds = self._kinds_in(solution.model)
            if len(set(kinds)) > 1:  # what a mix takes as it runs, and not as its units alone tell
                exact = self._bytes(batch, self.traced(batch, kinds), kinds)
                model = recomputing.with_memory_of(solution.model, exact)
                solution = replace(solution, model=model)
            return solution, doubt

        found, doubt = within_limit(choose, cluster, limit, memory_of)
        flops = self._flops(batch, self._kinds_in(found.model))
        return Plan(found.model, cluster, found.strategies, known, found.certificate, flops, doubt)

    def _kinds_in(self, model: ModelCosts) -> Kinds:
        """The kind of activation checkpointing of each part."""
        kind_of = {unit.name: unit.checkpointing for unit in model.units}
        return tuple(kind_of[part.label] for part in self._parts)

    def _flops(self, batch: int, kinds: Kinds | str = "none") -> float:
        return float(self.traced(batch, kinds).flops * self._training.num_backwards)

    def _bytes(self, batch: int, traced: Trace, kinds: Kinds) -> ModelCosts:
        """Costs of which bytes count alone."""
        times = [UnitTimes(0.0, 0.0)] * len(self._parts)
        found = costs_of(
            traced,
            self._model,
            training=self._training,
            times=times,
            batch_size=batch,
            tensor_parallel=self._num_cut,
            dims=self._dims,
        )
        return self._with_kinds(found, kinds)

    def _costs(self, batch: int, traced: Trace, kinds: Kinds) -> ModelCosts:
        """Costs of a step that was traced under one kind of activation checkpointing for each part."""
        if self._device is None:
            return self._with_kinds(self._measured(batch, traced, kinds), kinds)
        found = costs_of(
            traced,
            self._model,
            training=self._training,
            device=self._device,
            batch_size=batch,
            rates=self._rates,
            tensor_parallel=self._num_cut,
            dims=self._dims,
        )
        return self._with_kinds(found, kinds)

    def _with_kinds(self, costs: ModelCosts, kinds: Kinds) -> ModelCosts:
        kind_of = {part.label: kind for part, kind in zip(self._parts, kinds, strict=True)}
        return replace(costs, units=tuple(replace(unit, checkpointing=kind_of[unit.name]) for unit in costs.units))

    def _measured(self, batch: int, traced: Trace, kinds: Kinds) -> ModelCosts:
        """The same, of times of real steps on this machine."""
        steps = self._steps
        found = costs_of(
            traced,
            self._model,
            training=self._training,
            times=steps.times(batch, kinds),
            optimizer_s_per_byte=steps.optimizer_s_per_byte,
            overhead=steps.overhead,
            batch_size=batch,
            tensor_parallel=self._num_cut,
            dims=self._dims,
        )
        source = steps.source(batch, kinds)
        return replace(found, units=tuple(replace(unit, source=source) for unit in found.units), source=source)

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
