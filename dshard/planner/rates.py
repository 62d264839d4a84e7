"""Profiles: which parts of a datasheet's figures runs reach, how far predictions are off, and clusters by either."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from math import exp, hypot, log, log2, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

from dshard import arguments
from dshard.errors import PlanError
from dshard.planner.costs import Cluster, Link, Links
from dshard.planner.devices import DEVICES, Device, find_device
from dshard.planner.files import of_record, read_text, to_record, write_text
from dshard.planner.flops import Op
from dshard.planner.texts import seconds_text

SCHEMA = 2
_SHIPPED = Path(str(files("dshard.planner") / "rates.json"))
START_S = 6.6e-6  # of a collective: torch/distributed/tensor/_collective_utils.py
_WAY_OUT = "Pass what dshard calibrate --out wrote."
_FAMILIES = {"h200": "h100"}  # the same arithmetic
IN_TEN = 8  # of 10 measured steps that an interval holds
_DEVIATIONS = NormalDist().inv_cdf((1 + IN_TEN / 10) / 2)


@dataclass(frozen=True, slots=True)
class Interval:
    """From `low` to `high`."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Spread:
    """How far predictions were from measured runs of sources that the constants had not seen.

    Args:
        steps: Of a measured step, in parts of the predicted one; None where no run says so.
        num_runs: That it is from.
        covered: Of each source, which part of its runs lies in the interval that the others' runs give; where there is
            one source, in that which was known before.
        num_sources: Of the runs. Of several, `steps` is for a cluster that is none of them; of one, for that one.
    """

    steps: Interval | None = None
    num_runs: int = 0
    covered: dict[str, float] = field(default_factory=dict)
    num_sources: int = 0


def around_one(variance: float) -> Interval:
    """The interval that holds 8 in 10 of numbers whose logarithms have a mean of 0 and this variance."""
    half = _DEVIATIONS * sqrt(variance)
    return Interval(exp(-half), exp(half))


def variance_of(interval: Interval) -> float:
    """The variance for which `around_one` gives an interval as wide."""
    return (log(interval.high / interval.low) / 2 / _DEVIATIONS) ** 2


def widened(interval: Interval, deviation: float) -> Interval:
    """An interval of parts where they are off by a further factor, of which the logarithm has this deviation."""
    more = _DEVIATIONS * deviation
    return Interval(exp(-hypot(log(interval.low), more)), exp(hypot(log(interval.high), more)))


@dataclass(frozen=True, slots=True)
class Constant:
    """One constant of the model of time.

    Args:
        value: The constant.
        prior: What it is taken for where no run says otherwise.
        spread: By which part it may be off then: a standard deviation of its logarithm.
        uncertainty: The same of the value, from the runs that it was fitted to.
        unit: Of the value.
        reason: Why the term is there, and where the prior is from.
    """

    value: float
    prior: float
    spread: float
    uncertainty: float
    unit: str
    reason: str


@dataclass(frozen=True, slots=True)
class Misses:
    """How far predictions were from the runs of one source that the constants had not seen.

    Args:
        source: Of the runs.
        num_runs: How many.
        mean: Mean of what each was off by, as a part of its time.
        p90: Nine in ten were off by less.
    """

    source: str
    num_runs: int
    mean: float
    p90: float


@dataclass(frozen=True)
class Rates:
    """A profile: the constants of the model of time.

    Args:
        constants: By name; see `PRIORS`.
        misses: By source, when that was kept aside.
        source: Which runs, and by which command.
        spread: How far off predictions are; None where no run said.
    """

    constants: dict[str, Constant]
    misses: tuple[Misses, ...] = field(default=())
    source: str = "priors"
    spread: Spread | None = None

    def __post_init__(self) -> None:
        allowed, way = "a dict of Constants by their names", "Pass Rates.load(path).constants."
        arguments.by_name("Rates", "constants", self.constants, lambda each: isinstance(each, Constant), allowed, way)
        wrong = sorted(PRIORS.keys() - self.constants.keys())
        wrong += [name for name in self.constants if name not in PRIORS and not _is_of_family(name)]
        if wrong:
            raise PlanError(
                f"profile: must have the constants {', '.join(PRIORS)}, but {wrong[0]!r} is missing or unknown. "
                "Calibrate again."
            )
        for name, constant in self.constants.items():
            if not 0 < constant.value < float("inf"):
                raise PlanError(
                    f"profile: {name} must be a finite number above 0, but it is {constant.value}. Calibrate again."
                )

    @cached_property
    def values(self) -> Mapping[str, float]:
        """The values alone."""
        return {name: constant.value for name, constant in self.constants.items()}

    def of_family(self, name: str, device: Device) -> float:
        """The constant "product" or "attention" of a device."""
        return of_family(self.values, name, device)

    def spread_on(self, device: Device) -> Spread | None:
        """How far off predictions for a device are: farther where no run, or few, were on one of its family."""
        spread, name = self.spread, f"product.{family_of(device)}"
        if spread is None or spread.steps is None or name in PRIORS:
            return spread
        own = self.constants.get(name) or _of_other_family(self.values, name)
        return replace(spread, steps=widened(spread.steps, own.uncertainty))

    def seconds_per_byte(self, device: Device) -> float:
        """Of what an operation reads and writes."""
        return 1 / (device.memory_bytes_per_s * self.values["memory"])

    def copies_s(self, device: Device, num_bytes: float) -> float:
        """Time of the copies into and out of a buffer of a collective, on the stream that computes."""
        return num_bytes * self.values["copies"] * self.seconds_per_byte(device)

    def save(self, path: str | Path) -> None:
        """Write it as JSON.

        Raises:
            PlanError: The file cannot be written.
        """
        arguments.path("Rates.save", "path", path)
        write_text(Path(path), json.dumps({"schema": SCHEMA, **to_record(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Rates":
        """Read what `save`, or `dshard calibrate --out`, wrote.

        Raises:
            PlanError: There is no such file, it cannot be read, or it holds no profile; names the path.
        """
        arguments.path("Rates.load", "path", path)
        text = read_text(Path(path), "a profile", _WAY_OUT)
        try:
            record: Any = json.loads(text)
            if not isinstance(record, dict) or record.pop("schema", None) != SCHEMA:
                raise PlanError(f"profile: must be a profile of schema {SCHEMA}.")
            return of_record(cls, record, "profile")
        except (ValueError, TypeError, RecursionError) as error:
            raise PlanError(
                f"{path}: must be a profile as JSON, but reading it says: {error} Pass what dshard calibrate wrote."
            ) from error


def find_rates(who: str, profile: "Rates | str | Path | None") -> Rates | None:
    """A profile: itself, the one that is shipped ("published"), or that in a file; None for none.

    Args:
        who: The function whose argument `profile` it is.
        profile: What it was given.

    Raises:
        ArgumentError: It is none of these.
        PlanError: There is no such file, or it holds no profile; names the path.
    """
    if profile is None or isinstance(profile, Rates):
        return profile
    allowed = "'published', the path of a profile, or a Rates, or None"
    arguments.expect(arguments.is_path(profile), who, "profile", profile, allowed, "Pass 'published'.")
    return published() if str(profile) == "published" else Rates.load(profile)


def of_family(values: Mapping[str, float], name: str, device: Device) -> float:
    """A constant that devices of a family have together; of a family that has none, what is known without runs."""
    name = f"{name}.{family_of(device)}"
    own = values.get(name)
    return own if own is not None else _of_other_family(values, name).value


def with_families(known: Mapping[str, Constant], devices: Iterable[Device]) -> dict[str, Constant]:
    """Constants, and those of the families of some devices besides, for runs on them to move."""
    values, found = {name: constant.value for name, constant in known.items()}, dict(known)
    for device in devices:
        for name in (f"product.{family_of(device)}", f"attention.{family_of(device)}"):
            if name not in found and _is_of_family(name):
                found[name] = _of_other_family(values, name)
    return found


def _of_other_family(values: Mapping[str, float], name: str) -> Constant:
    """What is known without runs: of the family, or else the mean of those that have runs."""
    if name in OTHER_FAMILIES:
        return OTHER_FAMILIES[name]
    kind = name.partition(".")[0]
    known = [log(value) for key, value in values.items() if key in PRIORS and key.startswith(f"{kind}.")]
    mean, spread = exp(sum(known) / len(known)), 0.3 if kind == "product" else 0.5
    return _prior(mean, spread, _OF_PEAK, "no run of this family, and no figure: the mean of the others")


def _is_of_family(name: str) -> bool:
    kind, _, family = name.partition(".")
    return kind in ("product", "attention") and family in map(family_of, DEVICES.values())


def kind_of(op: Op) -> str:
    """What bounds an operation: "product", "attention" or "other"."""
    if "attention" in op.name:
        return "attention"
    return "product" if op.flops else "other"


def family_of(device: Device) -> str:
    """Devices of one architecture: the first word of their name."""
    name = device.name.partition("-")[0]
    return _FAMILIES.get(name, name)


def published() -> Rates:
    """The profile that is shipped: fitted to published runs."""
    return Rates.load(_SHIPPED)


def _prior(prior: float, spread: float, unit: str, reason: str) -> Constant:
    return Constant(prior, prior, spread, spread, unit, reason)


def _priors() -> dict[str, Constant]:
    """What constants are taken for before any run, which the shipped profile says beside what its runs made of them."""
    constants = json.loads(_SHIPPED.read_text())["constants"]
    return {name: _prior(own["prior"], own["spread"], own["unit"], own["reason"]) for name, own in constants.items()}


PRIORS: Mapping[str, Constant] = _priors()
_OF_PEAK = "of the peak FLOP/s"
_BEST = "of the largest product that stas00/ml-engineering measured, as much as on an A100 and an H100"
OTHER_FAMILIES: Mapping[str, Constant] = {  # of which no run is shipped: known by a figure or two
    "product.b200": _prior(0.67, 0.2, _OF_PEAK, f"1,745 of 2,250 TFLOPS; {_BEST}"),
    "product.mi300x": _prior(0.45, 0.25, _OF_PEAK, f"668 of 1,307 TFLOPS (an MI325X 60 %); {_BEST}"),
    "attention.b200": _prior(0.3, 0.5, _OF_PEAK, "no figure; below an H100's, whose kernels it runs"),
    "attention.mi300x": _prior(0.25, 0.5, _OF_PEAK, "no figure; to products as on an H100"),
}


def interval_text(seconds: Interval) -> str:
    """An interval of times, as text."""
    return f"{seconds_text(seconds.low)} to {seconds_text(seconds.high)} in {IN_TEN} of 10"


def check_profile(device: Device | None, cluster: Cluster | None) -> None:
    """Check that a profile has a device to speak of, and that links are not a datasheet's beside it.

    Raises:
        PlanError: It has not, or they are.
    """
    if device is None:
        raise PlanError(
            "plan: profile= says which parts of a device's figures are reached, but device is None: times are measured "
            "here. Pass device='a100-80g', or leave profile= out."
        )
    if cluster is not None and cluster.num_ranks > 1 and cluster.source == device.source:
        raise PlanError(
            "plan: profile= has rates of links, too, but those of cluster are the datasheet's alone. Pass "
            f"cluster=cluster_of({device.name!r}, {cluster.num_ranks}, profile=...) with the same profile."
        )


def cluster_of(
    device: Device | str,
    num_ranks: int,
    *,
    ranks_per_host: int | None = None,
    between_hosts: float | None = None,
    profile: Rates | str | Path | None = None,
    tensor_parallel: int = 1,
) -> Cluster:
    """Hosts of a device, as its datasheet has them, or with links as fast as runs found them.

    Args:
        device: All ranks are alike; one of your own, or a name of `DEVICES`.
        num_ranks: All of them.
        ranks_per_host: Of a host; None for the usual host, or for fewer where there are not as many.
        between_hosts: Bytes per second of a whole host's network; None for the usual host's.
        profile: Which parts of the datasheet's figures links reach: what `dshard calibrate` wrote, as a path or read by
            `Rates.load`, or "published" for the one that is shipped; None for the same part of all.
        tensor_parallel: Neighbouring ranks over which each layer is cut. The cluster is then that of the others, one of
            each such group: those that share parameters, while as many groups as that send through a host's link.

    Raises:
        ArgumentError: There is no device of this name, or a number is none that is allowed.
        PlanError: There is no such profile; or layers would be cut over a part of a host's ranks that is none.
    """
    who = "cluster_of"
    own: Device = find_device(who, "device", device)
    num_ranks = arguments.count(who, "num_ranks", num_ranks)
    ranks_per_host = arguments.count(who, "ranks_per_host", ranks_per_host, or_none=True)
    between_hosts = arguments.above_0(who, "between_hosts", between_hosts, or_none=True)
    tensor_parallel = arguments.count(who, "tensor_parallel", tensor_parallel)
    per_host = min(num_ranks, own.per_host) if ranks_per_host is None else ranks_per_host
    rates = find_rates(who, profile)
    if per_host % tensor_parallel or num_ranks % tensor_parallel:
        fitting = [num for num in range(1, tensor_parallel) if per_host % num == 0 and num_ranks % num == 0]
        raise PlanError(
            f"cluster_of: tensor_parallel must divide the ranks of a host, over whose links layers are cut, but it is "
            f"{tensor_parallel}, and {min(per_host, num_ranks)} of {num_ranks} ranks are on a host. Pass "
            f"tensor_parallel={fitting[-1]}."
        )
    network = (between_hosts or own.between_hosts.bytes_per_s) / tensor_parallel  # as many groups send at a time
    values = None if rates is None else rates.values
    found = described(own, values, num_ranks // tensor_parallel, per_host // tensor_parallel, network)
    if rates is None:
        return replace(found, tensor_parallel=tensor_parallel)
    return replace(
        found,
        tensor_parallel=tensor_parallel,
        stragglers=rates.values["stragglers"] * log2(num_ranks),  # of all ranks
        source=f"{own.source}; rates of {rates.source}{_lacks(rates, own)}",
    )


def described(
    device: Device, values: Mapping[str, float] | None, num_ranks: int, per_host: int, network: float
) -> Cluster:
    """Hosts of a device.

    Between hosts a ring leaves a host once in a turn, and gets fewer bytes per second, the more hosts there are, but
    never more than within one.

    Args:
        device: All ranks are alike.
        values: Constants by name, of which some say what links reach; None for the part that the datasheet's reach.
        num_ranks: All of them.
        per_host: Of a host.
        network: Bytes per second of a whole host's network.
    """
    near, far, reached = device.within_host, device.between_hosts, device.efficiency.network
    known = {"hops": 1.0, "inside": reached, "between": reached, "contention": 0.0} if values is None else values

    def ring(hop_s: float, bytes_per_s: float) -> Link:
        hop_s = known["hops"] * hop_s
        return Link(START_S + hop_s, 1 / bytes_per_s, hop_s, source=device.source)

    rate, num_hosts, across = near.bytes_per_s * known["inside"], num_ranks // per_host, None
    if num_ranks > per_host:
        hop_s = (far.latency_s + (per_host - 1) * near.latency_s) / per_host
        each = ring(hop_s, min(network * known["between"] * (num_hosts / 2) ** -known["contention"], rate))
        levels_s = 2 * far.latency_s * known["hops"] * log2(num_hosts)
        tree = each if values is None else replace(each, alpha_s=START_S + levels_s, alpha_per_rank_s=0.0)
        across = Links(each, each, tree)
    return Cluster(
        num_ranks=num_ranks,
        ranks_per_host=per_host,
        inside=Links.of(ring(near.latency_s, rate)),
        across=across,
        memory_bytes=device.limit_bytes,
        keeps_received_rows=False,
        source=device.source,
        interference=0.0 if values is None else values["interference"],
        stragglers=0.0 if values is None else values["stragglers"] * log2(num_ranks),
    )


def _lacks(rates: Rates, device: Device) -> str:
    """Says that no run was on a device of this family, where none was."""
    family = family_of(device)
    is_known = f"product.{family}" in rates.constants
    return "" if is_known else f", none of them on {family}: calibrate with runs of yours"
