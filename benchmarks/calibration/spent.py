"""What the predicted time of a measured run is, by the terms that a plan's step has."""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace

from dshard.planner.calibration import Run, Terms, predicted_s
from dshard.planner.timeline import BESIDE, SLOWEST

_OF_TERMS = {"products": "product_s", "attention": "attention_s", "copies for collectives": "copied_s"}


def spent(run: Run, values: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a run's predicted step by what takes them, the most first; they add up to it.

    Each is what the step would take with nothing else in it; memory traffic, and waiting for communication between
    hosts, are what the others leave of a step without communication, and of the whole. What computing beside
    collectives loses, it loses of the time of all of them.
    """

    def only(names: Collection[str], optimizer_s: float = 0.0, of: Run | None = None) -> float:
        forward, backward = (_with(terms, names) for terms in (run.forward, run.backward))
        given = replace(of or silent, forward=forward, backward=backward, optimizer_s=optimizer_s)
        return predicted_s(given, undisturbed)

    silent = replace(run, gather_bytes=0 * run.gather_bytes, grad_bytes=0 * run.grad_bytes)
    undisturbed = {**values, "interference": 0.0, "stragglers": 0.0}
    found = {term: only((name,)) for term, name in _OF_TERMS.items()}
    found["optimizer"] = only((), run.optimizer_s)
    computed_s = predicted_s(silent, undisturbed)
    found["memory traffic"] = computed_s - sum(found.values())
    found[SLOWEST] = predicted_s(silent, values) - computed_s
    found[BESIDE] = values["interference"] * only((), of=run)
    computed_s = sum(found.values())
    if run.within <= run.ranks_per_host:
        one_host = replace(run, num_ranks=min(run.num_ranks, run.ranks_per_host))
        found["waiting within hosts"] = predicted_s(one_host, values) - computed_s
    found["waiting between hosts"] = predicted_s(run, values) - sum(found.values())
    least_s = 1e-9 * sum(found.values())  # of a difference that is none but for rounding
    return {term: s for term, s in sorted(found.items(), key=lambda item: -item[1]) if s > least_s}


def _with(terms: Terms, names: Collection[str]) -> Terms:
    """Terms without all but some."""
    return replace(terms, **{f.name: 0 * getattr(terms, f.name) for f in fields(terms) if f.name not in names})
