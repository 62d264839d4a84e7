"""Hypothesis strategies for the models and programs of `tests.kit.cases`."""

from typing import Any

from hypothesis import strategies as st

from tests.kit.cases import COPIES, GRAD_MODES, LAYER_KINDS, READS, VIEWS, WRITES, Command, LayerCase, ModelCase


def layers(*, max_depth: int = 2) -> st.SearchStrategy[LayerCase]:
    """A layer of any kind; lists hold others down to a depth. Shrinks towards linear layers."""
    kinds = [kind for kind in LAYER_KINDS if kind != "list"]
    one = st.builds(LayerCase, st.sampled_from(kinds), st.integers(1, 5))
    if max_depth < 2:
        return one
    inner = st.lists(layers(max_depth=max_depth - 1), max_size=2).map(tuple)
    return one | st.builds(LayerCase, st.just("list"), layers=inner)


@st.composite
def model_cases(draw: st.DrawFn, *, max_layers: int = 4, max_depth: int = 2) -> ModelCase:
    """Small module trees: linear layers, convolutions, norms, embeddings, tied weights, shared modules, lists."""
    num_tokens = draw(st.sampled_from((0, 5, 7)))
    return ModelCase(
        width=draw(st.integers(1, 6)),
        layers=tuple(draw(st.lists(layers(max_depth=max_depth), max_size=max_layers))),
        num_tokens=num_tokens,
        is_tied=bool(num_tokens) and draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def commands(*, max_size: int = 10) -> st.SearchStrategy[list[Command]]:
    """Programs for `cases.play`: forwards, backwards, steps, writes, reads, views, switches of modes, copies."""

    def one(name: str, *args: st.SearchStrategy[Any], weight: int = 1) -> list[st.SearchStrategy[Command]]:
        return [st.tuples(st.just(name), *args)] * weight

    index, flag = st.integers(0, 7), st.booleans()
    what = st.sampled_from(("param", "param", "grad"))
    kinds = [
        *one("forward", st.just("grad"), weight=3),
        *one("forward", st.sampled_from(list(GRAD_MODES))),
        *one("backward", weight=3),
        *one("step", weight=2),
        *one("write", st.sampled_from(list(WRITES)), what, index, weight=2),
        *one("read", st.sampled_from(list(READS)), st.sampled_from(("param", "grad", "held")), index, weight=2),
        *one("hold", st.sampled_from(list(VIEWS)), index, weight=2),
        *one("write_held", index),
        *one("zero", flag),
        *one("clip", st.sampled_from((0.1, 10.0))),
        *one("requires_grad", index, flag),
        *one("train", flag),
        *one("load", index),
        *one("copy", st.sampled_from(list(COPIES))),
        *one("drop"),
    ]
    return st.lists(st.one_of(*kinds), max_size=max_size)
