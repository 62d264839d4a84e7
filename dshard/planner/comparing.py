"""Prediction against measurement: what a real step took, and costs that would have told it."""

from dataclasses import dataclass, replace

from dshard.arguments import checked
from dshard.planner.costs import Cluster, Link, Links, ModelCosts, UnitCosts
from dshard.planner.texts import bytes_text, seconds_text


@checked
@dataclass(frozen=True, slots=True)
class Measured:
    """What a real step took.

    Args:
        step_s: Its time.
        peak_bytes: The most bytes that lived at one moment on the rank that has most; None where nobody counted.
    """

    step_s: float
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Prediction against measurement; its text is the report."""

    predicted: Measured
    measured: Measured

    @property
    def step_error(self) -> float:
        """The part of the measured time by which the prediction is too long; negative if it is too short."""
        return self.predicted.step_s / self.measured.step_s - 1

    @property
    def peak_error(self) -> float | None:
        """The same of the peak; None where nobody counted."""
        if self.measured.peak_bytes is None or self.predicted.peak_bytes is None:
            return None
        return self.predicted.peak_bytes / self.measured.peak_bytes - 1

    def __str__(self) -> str:
        lines = [
            f"step: predicted {seconds_text(self.predicted.step_s)}, measured {seconds_text(self.measured.step_s)}, "
            f"error {self.step_error:+.1%}"
        ]
        if self.peak_error is not None:
            lines.append(
                f"peak: predicted {bytes_text(self.predicted.peak_bytes or 0)}, measured "
                f"{bytes_text(self.measured.peak_bytes or 0)}, error {self.peak_error:+.1%}"
            )
        return "\n".join(lines)


def scaled_model(model: ModelCosts, factor: float) -> ModelCosts:
    """A model of which all that units take is so many times as long."""
    names = ("forward_s", "backward_s", "optimizer_s", "optimizer_start_s", "slice_overhead_s", "home_s_per_byte")

    def scaled(unit: UnitCosts) -> UnitCosts:
        times = {name: getattr(unit, name) * factor for name in names}
        return replace(unit, alternatives=tuple(map(scaled, unit.alternatives)), **times)

    return replace(model, units=tuple(map(scaled, model.units)))


def scaled_cluster(cluster: Cluster, factor: float) -> Cluster:
    """A cluster of which all collectives take so many times as long."""

    def link(each: Link) -> Link:
        names = ("alpha_s", "seconds_per_byte", "alpha_per_rank_s")
        return replace(each, **{name: getattr(each, name) * factor for name in names})

    def links(each: Links) -> Links:
        in_place = None if each.in_place is None else link(each.in_place)
        return Links(link(each.all_gather), link(each.reduce_scatter), link(each.all_reduce), in_place)

    return replace(
        cluster,
        inside=links(cluster.inside),
        across=None if cluster.across is None else links(cluster.across),
        shards={within: links(each) for within, each in cluster.shards.items()},
        replicas={within: links(each) for within, each in cluster.replicas.items()},
    )
