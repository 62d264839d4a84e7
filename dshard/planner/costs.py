"""What a model and its devices cost, with units in every name: what the planner plans with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, cast

from dshard import arguments
from dshard.errors import ArgumentError, PlanError

CHECKPOINTING = ("none", "selective", "full")  # activation checkpointing, by what is computed again
_T = TypeVar("_T")
COUNTER_BYTES = 4  # of steps, which an optimizer with states keeps per parameter


@dataclass(frozen=True, slots=True)
class UnitKind:
    """What a plan may choose for a unit beside its strategy.

    Args:
        checkpointing: Activation checkpointing: "none", "selective" or "full".
        is_offloaded: Whether its parameters, gradients and optimizer states are kept in the CPU's memory.
    """

    checkpointing: str = "none"
    is_offloaded: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of a forward or a backward.

    Args:
        products_s: Arithmetic of matrix products and convolutions.
        attention_s: Arithmetic of attention.
        traffic_s: What is read from memory and written to it.
        copies_s: Of these alone what goes into and out of buffers of collectives.
        starts_s: Of kernels.
        cut_s: Collectives among the ranks over which layers are cut; what computes waits for them.
    """

    products_s: float = 0.0
    attention_s: float = 0.0
    traffic_s: float = 0.0
    copies_s: float = 0.0
    starts_s: float = 0.0
    cut_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class ParamCosts:
    """Bytes of one parameter. Its shards are cut along one dim, as `torch.chunk` cuts.

    Args:
        name: Its name in the model.
        length: Size of the dim that is cut; 1 for a 0-d tensor, which every rank holds.
        index_numel: Elements per index of that dim.
        stored_itemsize: Bytes per element of the stored parameter, and of its `.grad`.
        gather_itemsize: Bytes per element where it is used (the compute dtype), and of the raw gradient.
        grad_itemsize: Bytes per element in which its gradients are reduced; 0 for a frozen parameter.
        state_bytes_per_element: The optimizer keeps between steps: 8 for AdamW in fp32, 2.05 for AdamW8bit, 0 for plain
            SGD.
        step_bytes_per_element: Temporaries of the optimizer's step.
        can_split: Whether it may be gathered and used in slices.
        dim: That is cut. Shards along another than 0 are no part of the full value's memory: they are copied there.
        owner_work: Where the optimizer needs it whole, and one rank, its owner, steps it: the work of that beside that
            of others, in any unit. What the optimizer keeps, and its temporaries, are then with the owner. 0 where each
            rank steps its shard.
    """

    name: str
    length: int
    index_numel: int
    stored_itemsize: int = 4
    gather_itemsize: int = 4
    grad_itemsize: int = 4
    state_bytes_per_element: float = 8
    step_bytes_per_element: int = 0
    can_split: bool = False
    dim: int = 0
    owner_work: float = 0.0

    def __post_init__(self) -> None:
        sizes = ("length", "index_numel", "stored_itemsize", "gather_itemsize", "grad_itemsize", "dim")
        arguments.fields(self, arguments.count, *sizes, least=0)
        arguments.fields(self, arguments.from_0, "state_bytes_per_element", "step_bytes_per_element", "owner_work")
        arguments.fields(self, arguments.boolean, "can_split")

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return self.length * self.index_numel

    def state_bytes_of(self, numel: int) -> int:
        """What the optimizer keeps for some of its elements."""
        return math.ceil(numel * self.state_bytes_per_element)

    @property
    def is_beside(self) -> bool:
        """Whether its shards are no parts of full values that a host has once, but are copied there."""
        return self.gather_itemsize != self.stored_itemsize or self.dim != 0

    def shard_numel(self, within: int) -> int:
        """Elements of the largest shard over `within` ranks."""
        return ceil_div(self.length, within) * self.index_numel

    def slice_numel(self, within: int, num_slices: int) -> int:
        """Elements of the largest of `num_slices` slices: as many indices of the shard of each of `within` ranks."""
        return within * ceil_div(ceil_div(self.length, within), num_slices) * self.index_numel


@dataclass(frozen=True)
class UnitCosts:
    """Costs of one unit, on one rank and for one (micro-)batch.

    Args:
        name: Of the unit.
        params: Its parameters.
        forward_s: Its forward.
        backward_s: Its backward, with recomputation where it is checkpointed.
        activation_bytes: What its forward keeps until its backward.
        forward_transient_bytes: More that is live only while its forward runs.
        backward_transient_bytes: More that is live only while its backward runs, without gradients of parameters.
        gradients_transient_bytes: The same once it has computed a gradient of a parameter; None for no less. Below 0
            where some of its activations are gone by then.
        optimizer_s: The optimizer's step on the whole unit, but for what owners step; a shard takes its share of that.
        owners_s: Steps of all of its parameters that owners step; the rank that has most of all such work takes as much
            of it as of all.
        optimizer_start_s: More that it takes for the unit, however little of it a rank holds.
        slice_overhead_s: What each further slice costs, in forward and in backward, under `split`.
        is_used_in_backward: Whether its backward uses its parameters. That of an embedding does not, nor that of a
            first linear layer, whose input takes no gradient: they are not gathered for it.
        is_used_throughout: Whether other units lie between uses of its parameters, as between those of a tied
            embedding: its copy is there from its first use until its backward ends.
        source: Where the figures come from: a measured step, or FLOPs and a device description.
        modules: Names of the modules in whose forward it is in use; of the model itself "".
        checkpointing: Activation checkpointing that these costs are of: "none", "selective" or "full".
        alternatives: The same unit with other activation checkpointing, or kept elsewhere; a plan may take one in its
            place.
        work: What its forward and its backward are, by what takes their time; nothing where they were measured.
        home_s_per_byte: Where shards, gradients and states are kept in the CPU's memory, and the optimizer steps there:
            of copies from there, or back. 0 where they are kept on the device.
    """

    name: str
    params: tuple[ParamCosts, ...]
    forward_s: float
    backward_s: float
    activation_bytes: int = 0
    forward_transient_bytes: int = 0
    backward_transient_bytes: int = 0
    gradients_transient_bytes: int | None = None
    optimizer_s: float = 0.0
    owners_s: float = 0.0
    optimizer_start_s: float = 0.0
    slice_overhead_s: float = 0.0
    is_used_in_backward: bool = True
    is_used_throughout: bool = False
    source: str = "given"
    modules: tuple[str, ...] = ("",)
    checkpointing: str = "none"
    alternatives: tuple["UnitCosts", ...] = ()
    work: tuple[Work, ...] = ()
    home_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        times = ("forward_s", "backward_s", "optimizer_s", "owners_s", "optimizer_start_s", "slice_overhead_s")
        num_bytes = ("activation_bytes", "forward_transient_bytes", "backward_transient_bytes")
        arguments.fields(self, arguments.from_0, *times, "home_s_per_byte", *num_bytes)
        arguments.fields(self, arguments.boolean, "is_used_in_backward", "is_used_throughout")
        arguments.choice("UnitCosts", "checkpointing", self.checkpointing, *CHECKPOINTING)
        arguments.fields(self, _several_of, "params", kind=ParamCosts)
        arguments.fields(self, _several_of, "alternatives", kind=UnitCosts)
        arguments.fields(self, _several_of, "modules", kind=str)
        late = arguments.number(
            *("UnitCosts", "gradients_transient_bytes", self.gradients_transient_bytes, math.isfinite),
            *("a number of bytes", "Pass None."),
            or_none=True,
        )
        object.__setattr__(self, "gradients_transient_bytes", late)
        if self.gradients_transient_bytes is not None and self.activation_bytes + self.gradients_transient_bytes < 0:
            raise ArgumentError(
                f"UnitCosts: gradients_transient_bytes must be no less than -activation_bytes "
                f"(-{self.activation_bytes}), but for {self.name} it is {self.gradients_transient_bytes}. Measure it "
                "again."
            )

    @property
    def kind(self) -> UnitKind:
        """Of which of the kinds that it may have these costs are."""
        return UnitKind(self.checkpointing, self.is_offloaded)

    def of_kind(self, kind: UnitKind) -> "UnitCosts":
        """Itself or that alternative which is of this kind.

        Where it knows no such activation checkpointing, it has its first one; where it is kept in one place, that.
        """
        kinds = (self, *self.alternatives)
        kept = [each for each in kinds if each.is_offloaded == kind.is_offloaded] or kinds
        return next((each for each in kept if each.checkpointing == kind.checkpointing), kept[0])

    def under(self, kind: UnitKind) -> "UnitCosts":
        """The unit of this kind, as `of_kind`, the others its alternatives."""
        found = self.of_kind(kind)
        if found is self:
            return self
        others = [each for each in self.alternatives if each is not found]
        return replace(found, alternatives=(replace(self, alternatives=()), *others))

    @property
    def is_offloaded(self) -> bool:
        """Whether its parameters are kept in the CPU's memory."""
        return self.home_s_per_byte > 0

    @property
    def touched_bytes(self) -> int:
        """Read and written by the optimizer's step on the whole unit but for what owners step; states, too."""
        return sum(_touched_bytes(param) for param in self.params if not param.owner_work)

    @property
    def touched_by_owners_bytes(self) -> int:
        """The same by owners, outside of products."""
        return sum(_touched_bytes(param) for param in self.params if param.owner_work)

    @property
    def late_transient_bytes(self) -> int:
        """What its backward needs from its first gradient of a parameter on."""
        late = self.gradients_transient_bytes
        return self.backward_transient_bytes if late is None else late

    @property
    def param_names(self) -> tuple[str, ...]:
        """Names of its parameters."""
        return tuple(param.name for param in self.params)

    @cached_property
    def numel(self) -> int:
        """Elements of its full parameters."""
        return sum(param.numel for param in self.params)

    @cached_property
    def param_bytes(self) -> int:
        """Its full parameters as they are stored."""
        return sum(param.numel * param.stored_itemsize for param in self.params)

    @cached_property
    def gather_bytes(self) -> int:
        """Its full parameters as they are gathered, without padding."""
        return sum(param.numel * param.gather_itemsize for param in self.params)

    @cached_property
    def grad_bytes(self) -> int:
        """Its full gradients in the dtype of the reduction."""
        return sum(param.numel * param.grad_itemsize for param in self.params)

    @cached_property
    def state_bytes(self) -> int:
        """Optimizer states of the whole unit."""
        return sum(param.state_bytes_of(param.numel) for param in self.params)


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a model's training step on one rank.

    Args:
        units: In the order in which forward runs them; backward runs them in reverse.
        batch_size: Samples per rank and step, all of its micro-batches together.
        num_backwards: Micro-batches per optimizer step; the costs of units are those of one.
        buffer_bytes: Buffers, inputs, and what else is there all the time, whatever the strategy.
        steps_together: Whether the optimizer steps all parameters at once (foreach), rather than one by one.
        tokens_per_sample: For rates of tokens; 0 where samples have none.
        source: Where the figures come from.
        tensor_parallel: Ranks over which layers are cut: parameters, bytes and times are those of one of them.
    """

    units: tuple[UnitCosts, ...]
    batch_size: int = 1
    num_backwards: int = 1
    buffer_bytes: int = 0
    steps_together: bool = True
    tokens_per_sample: int = 0
    source: str = "given"
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        arguments.fields(self, _several_of, "units", kind=UnitCosts)
        arguments.fields(self, arguments.count, "batch_size", "num_backwards", "tensor_parallel")
        arguments.fields(self, arguments.count, "tokens_per_sample", least=0)
        arguments.fields(self, arguments.from_0, "buffer_bytes")
        arguments.fields(self, arguments.boolean, "steps_together")
        if not self.units:
            raise PlanError(
                "plan: a model must have at least one unit, but there is none. Pass a model with parameters."
            )

    def under(self, kinds: Sequence[UnitKind] | UnitKind) -> "ModelCosts":
        """The model with units of one kind, as far as they know it, or one kind per unit."""
        each = (kinds,) * len(self.units) if isinstance(kinds, UnitKind) else kinds
        return replace(self, units=tuple(unit.under(kind) for unit, kind in zip(self.units, each, strict=True)))

    @cached_property
    def kinds(self) -> tuple[UnitKind, ...]:
        """All kinds of activation checkpointing that some unit may have, in each place where one may be kept."""
        known = [each.kind for unit in self.units for each in (unit, *unit.alternatives)]
        places, modes = {kind.is_offloaded for kind in known}, {kind.checkpointing for kind in known}
        return tuple(UnitKind(mode, away) for away in sorted(places) for mode in CHECKPOINTING if mode in modes)


@dataclass(frozen=True, slots=True)
class Link:
    """Time of one collective over a group: `alpha + alpha per further rank + bytes on the wire * seconds per byte`.

    A ring and a direct exchange send the same bytes per rank, `(N - 1) / N` of the full ones; the latency of a ring
    grows with its steps, hence `alpha_per_rank_s`, which is 0 for what was measured on the group itself.

    Args:
        alpha_s: Start of a collective over two ranks.
        seconds_per_byte: Of what each rank (of a group across hosts: each host) sends.
        alpha_per_rank_s: For each rank beyond the second.
        source: Measured on which group, or from which datasheet.
    """

    alpha_s: float
    seconds_per_byte: float
    alpha_per_rank_s: float = 0.0
    source: str = "given"

    def __post_init__(self) -> None:
        arguments.fields(self, arguments.from_0, "alpha_s", "seconds_per_byte", "alpha_per_rank_s")

    def time_s(self, full_bytes: float, num_ranks: int, num_rounds: int = 1, num_sharing: int = 1) -> float:
        """Time for a tensor of `full_bytes`.

        Args:
            full_bytes: Of the whole tensor.
            num_ranks: In the group; over one rank nothing is sent.
            num_rounds: How often `(N - 1) / N` of it travel: 2 for an all-reduce.
            num_sharing: Groups that send at the same time through one host's link.
        """
        wire_bytes = num_rounds * full_bytes * (num_ranks - 1) / num_ranks * num_sharing
        start_s = self.alpha_s + self.alpha_per_rank_s * (num_ranks - 2)
        return (wire_bytes > 0) * start_s + wire_bytes * self.seconds_per_byte  # of an array of sizes, too


@dataclass(frozen=True, slots=True)
class Links:
    """The collectives over one kind of group.

    Args:
        all_gather: Of what each rank gets a copy of.
        reduce_scatter: Likewise.
        all_reduce: Likewise.
        in_place: An all-gather of what ranks that share memory have once together; None where they exchange messages.
    """

    all_gather: Link
    reduce_scatter: Link
    all_reduce: Link
    in_place: Link | None = None

    def __post_init__(self) -> None:
        way = "Pass dshard.planner.Link(...)."
        arguments.fields(self, arguments.instance, "all_gather", "reduce_scatter", "all_reduce", kind=Link, way=way)
        arguments.instance("Links", "in_place", self.in_place, Link, way, or_none=True)

    @classmethod
    def of(cls, link: Link, *, in_place: Link | None = None) -> "Links":
        """The same figures for all three; an all-reduce sends twice the bytes."""
        return cls(link, link, link, in_place)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices, and the links between them. Rank `r` is on host `r // ranks_per_host`.

    Args:
        num_ranks: All of them.
        ranks_per_host: How many of them one host has.
        inside: Links of a group whose ranks are on one host.
        across: Links of a group with ranks on several hosts; None where there is one host.
        memory_bytes: Of one device.
        keeps_received_rows: Whether a reduce-scatter holds what it receives beside what it sends, as over gloo.
        shards: For a number of ranks that share a parameter, links measured on just those groups.
        replicas: For such a number, links measured among ranks that hold the same shard, all groups at a time.
        source: Where the figures come from.
        overlaps: Whether collectives run beside computation. Over gloo they do not: the cores that compute copy, too.
        interference: Part of a collective's time that what computes beside it loses: the device moves the bytes.
        stragglers: By which part the computation that all wait for takes longer than that of one device.
        tensor_parallel: Ranks that stand behind each of these: those over which layers are cut, on the same host.
    """

    num_ranks: int
    ranks_per_host: int
    inside: Links
    across: Links | None = None
    memory_bytes: int = 0
    keeps_received_rows: bool = True
    shards: dict[int, Links] = field(default_factory=dict)
    replicas: dict[int, Links] = field(default_factory=dict)
    source: str = "given"
    overlaps: bool = True
    interference: float = 0.0
    stragglers: float = 0.0
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        way = "Pass dshard.planner.Links(...)."
        arguments.fields(self, arguments.count, "num_ranks", "ranks_per_host", "tensor_parallel")
        arguments.fields(self, arguments.from_0, "memory_bytes", "interference", "stragglers")
        arguments.fields(self, arguments.boolean, "keeps_received_rows", "overlaps")
        arguments.instance("Cluster", "inside", self.inside, Links, way)
        arguments.instance("Cluster", "across", self.across, Links, way, or_none=True)
        for name, found in (("shards", self.shards), ("replicas", self.replicas)):
            is_right = isinstance(found, Mapping) and all(
                type(num) is int and isinstance(links, Links) for num, links in found.items()
            )
            arguments.expect(is_right, "Cluster", name, found, "a dict of Links by numbers of ranks", "Leave it out.")
        if self.num_ranks > self.ranks_per_host and (self.across is None or self.num_ranks % self.ranks_per_host):
            raise PlanError(
                f"cluster: more than one host must be full hosts with links across, but {self.num_ranks} ranks are on "
                f"hosts of {self.ranks_per_host}, with across={self.across}. Pass across=Links(...)."
            )

    def all_gather_s(self, full_bytes: float, within: int) -> float:
        """All-gather of a tensor of `full_bytes` among `within` neighbouring ranks, in all such groups at a time."""
        return self._among_shards(within).all_gather.time_s(full_bytes, within)

    def in_place_s(self, full_bytes: float, within: int) -> float:
        """All-gather of what neighbouring ranks that share memory have once; without that, as any."""
        in_place = self._among_shards(within).in_place
        return self.all_gather_s(full_bytes, within) if in_place is None else in_place.time_s(full_bytes, within)

    def reduce_scatter_s(self, full_bytes: float, within: int) -> float:
        """Reduce-scatter of a tensor of `full_bytes` among `within` neighbouring ranks."""
        return self._among_shards(within).reduce_scatter.time_s(full_bytes, within)

    def all_reduce_s(self, full_bytes: float, within: int = 1) -> float:
        """All-reduce of `full_bytes` over the replicas of a shard: every `within`-th rank."""
        links, sharing = self._among_replicas(within)
        return links.all_reduce.time_s(full_bytes, self.num_ranks // within, num_rounds=2, num_sharing=sharing)

    def among_replicas_s(self, full_bytes: float, within: int) -> float:
        """All-gather of `full_bytes` over the replicas of a shard: every `within`-th rank."""
        links, sharing = self._among_replicas(within)
        return links.all_gather.time_s(full_bytes, self.num_ranks // within, num_sharing=sharing)

    def is_inside(self, within: int) -> bool:
        """Whether each group of `within` neighbouring ranks lies on one host."""
        return self.num_ranks <= self.ranks_per_host or self.ranks_per_host % within == 0

    def shares_memory(self, within: int) -> bool:
        """Whether `within` neighbouring ranks, of which there are several, read one another's memory."""
        return within > 1 and self._among_shards(within).in_place is not None

    def replicas_share_memory(self, within: int) -> bool:
        """The same of ranks that hold one shard of `within`."""
        return within < self.num_ranks and self._among_replicas(within)[0].in_place is not None

    def _among_shards(self, within: int) -> Links:
        across = None if self.is_inside(within) else self.across
        return self.shards.get(within) or across or self.inside

    def _among_replicas(self, within: int) -> tuple[Links, int]:
        if within in self.replicas:
            return self.replicas[within], 1
        if self.num_ranks <= self.ranks_per_host or self.across is None:
            return self.inside, 1
        return self.across, min(within, self.ranks_per_host)


def scaled(costs: _T, factor: float) -> _T:
    """Costs, and all that they hold, of which everything takes so many times as long."""
    found: Any = costs
    if is_dataclass(found) and not isinstance(found, type):
        values = {each.name: getattr(found, each.name) for each in fields(found)}
        takes = [name for name in values if name.endswith(("_s", "per_byte"))]
        found = replace(found, **scaled(values, factor) | {name: values[name] * factor for name in takes})
    elif isinstance(found, Mapping):
        found = {key: scaled(value, factor) for key, value in found.items()}
    elif isinstance(found, tuple):
        found = tuple(scaled(value, factor) for value in found)
    return cast(_T, found)


def _touched_bytes(param: ParamCosts) -> int:
    """A parameter, which is read and written, its gradient, and its states; nothing where it is frozen."""
    if not param.grad_itemsize:
        return 0
    return param.numel * 3 * param.stored_itemsize + 2 * param.state_bytes_of(param.numel)


def ceil_div(value: int, divisor: int) -> int:
    """`value / divisor`, rounded up."""
    return -(-value // divisor)


def _several_of(who: str, name: str, value: Any, kind: type) -> Any:
    """Objects of a class, as a tuple."""
    what = "names of modules" if kind is str else f"a list of {kind.__name__}"
    way = "Pass ('blocks.0',)." if kind is str else f"Pass [{kind.__name__}(...)]."
    return arguments.several(who, name, value, lambda each: isinstance(each, kind), what, way)
