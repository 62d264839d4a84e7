"""Models and clusters that hypothesis draws, small enough for brute force."""

from dataclasses import replace
from itertools import product

from hypothesis import strategies as st

from dshard.planner import Cluster, Link, Links, ModelCosts, ParamCosts, UnitCosts, peak_bytes, step_time

STRATEGIES = ("ddp", "zero1", "zero2", "keep", "full", "hybrid(2)", "hybrid(2, keep)", "split(2)", "split(3)")


@st.composite
def params(draw, name):
    stored, trained = draw(st.sampled_from([2, 4])), draw(st.sampled_from([0, 2, 4]))
    return ParamCosts(
        name,
        draw(st.integers(1, 40)),
        draw(st.sampled_from([1, 7, 64, 3000])),
        stored_itemsize=stored,
        gather_itemsize=draw(st.sampled_from([2, 4])),
        grad_itemsize=trained,
        state_bytes_per_element=draw(st.sampled_from([0, 8])),
        step_bytes_per_element=draw(st.sampled_from([0, 4])),
        can_split=draw(st.booleans()),
        owner_work=draw(st.sampled_from([0, 0, 0, 1, 3])) if trained else 0,
    )


@st.composite
def units(draw, name):
    names = [f"{name}.{i}" for i in range(draw(st.integers(1, 3)))]
    seconds = st.integers(0, 200).map(lambda ms: ms / 997)
    num_bytes = st.integers(0, 300_000)
    return UnitCosts(
        name,
        tuple(draw(params(each)) for each in names),
        forward_s=draw(seconds),
        backward_s=draw(seconds),
        activation_bytes=(kept := draw(num_bytes)),
        forward_transient_bytes=draw(num_bytes),
        backward_transient_bytes=draw(num_bytes),
        gradients_transient_bytes=draw(st.none() | st.integers(-kept, 300_000)),
        optimizer_s=draw(seconds) / 10,
        owners_s=draw(seconds) / 10,
        optimizer_start_s=draw(seconds) / 30,
        slice_overhead_s=draw(seconds) / 50,
        is_used_in_backward=draw(st.sampled_from([True, True, False])),
        is_used_throughout=draw(st.sampled_from([False, False, True])),
    )


@st.composite
def units_with_alternatives(draw, name):
    """A unit that a solver may checkpoint, in one way or two; what that costs and saves is anything.

    Some are kept in the CPU's memory, and some may be.
    """
    unit, place = draw(units(name)), draw(st.sampled_from(["here", "away", "either"]))
    if place == "away":
        unit = draw(offloaded(unit))
    few = [(), ("full",)]
    kinds = draw(st.sampled_from(few if place == "either" else [*few, ("selective",), ("selective", "full")]))
    others = (draw(units(name)) for _ in kinds)
    names = ("forward_s", "backward_s", "activation_bytes", "forward_transient_bytes", "backward_transient_bytes")
    names = (*names, "gradients_transient_bytes", "is_used_in_backward")
    alternatives = tuple(
        replace(unit, checkpointing=kind, **{field: getattr(other, field) for field in names})
        for kind, other in zip(kinds, others, strict=True)
    )
    if place == "either":
        away = draw(offloaded(unit))
        same = {field: getattr(away, field) for field in ("params", "home_s_per_byte", "optimizer_s")}
        alternatives += (away, *(replace(each, **same) for each in alternatives))
    return replace(unit, alternatives=alternatives)


@st.composite
def offloaded(draw, unit):
    """The same unit in the CPU's memory, where copies and the optimizer take any time."""
    whole = tuple(replace(param, can_split=False) for param in unit.params)
    seconds = st.integers(1, 2000).map(lambda number: number / 997e6)
    return replace(unit, params=whole, home_s_per_byte=draw(seconds), optimizer_s=unit.touched_bytes * draw(seconds))


@st.composite
def models(draw, max_units=5, *, units=units):
    num = draw(st.integers(1, max_units))
    distinct = [draw(units(f"u{i}")) for i in range(draw(st.integers(1, num)))]
    chosen = [distinct[draw(st.integers(0, len(distinct) - 1))] for _ in range(num)]
    return ModelCosts(
        tuple(chosen),
        batch_size=draw(st.integers(1, 8)),
        num_backwards=draw(st.sampled_from([1, 1, 3])),
        buffer_bytes=draw(st.integers(0, 10_000)),
        steps_together=draw(st.booleans()),
    )


@st.composite
def links(draw, is_one_host):
    def link():
        return Link(draw(st.integers(0, 50)) / 997, draw(st.integers(1, 2000)) / 997e6, draw(st.integers(0, 5)) / 997)

    return Links(link(), link(), link(), link() if is_one_host and draw(st.booleans()) else None)


@st.composite
def clusters(draw):
    per_host, num_hosts = draw(st.sampled_from([2, 4])), draw(st.sampled_from([1, 2]))
    return Cluster(
        per_host * num_hosts,
        per_host,
        draw(links(is_one_host=True)),
        draw(links(is_one_host=False)) if num_hosts > 1 else None,
        overlaps=draw(st.booleans()),
        keeps_received_rows=draw(st.booleans()),
        interference=draw(st.sampled_from([0.0, 0.125])),
        stragglers=draw(st.sampled_from([0.0, 0.0625])),
    )


def every_choice(model, cluster, names):
    """Seconds and peak bytes of every combination of strategies, and of the kinds that each unit may be of."""
    kinds = product(*([each.kind for each in (unit, *unit.alternatives)] for unit in model.units))
    return [
        (step_time(each, choice, cluster), peak_bytes(each, choice, cluster))
        for each in map(model.under, kinds)
        for choice in product(names, repeat=len(model.units))
    ]
