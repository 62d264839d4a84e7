"""Errors that raise nothing are found by `verify_sharding`, and named; correct programs are not blamed."""

import pytest

from dshard.testing import WorldPool, verify_sharding
from tests.interop import models as hugging_face
from tests.testing import silent

# Classes of which nothing is said, for dshard computes what was meant.
HARMLESS = {
    "module replaced after sharding": "what is put below a sharded root is sharded at the next forward",
    "no sync on the last part": "the optimizer reads the gradients, and reading reduces what is owed",
}
NOT_FOUND: dict[str, str] = {}  # and why


def verify(pool: WorldPool, name: str, kind: str) -> str:
    """What is said of an error in a model; "" for nothing."""
    planted = silent.PLANTED[name]
    report = verify_sharding(
        *planted.arguments(kind), worlds=(2,), settings=[planted.setting], steps=2, pool=pool, **planted.options
    )
    return "\n".join(map(str, report.differences))


@pytest.mark.parametrize("name", silent.PLANTED)
def test_a_silent_error_is_found_and_named_in_every_model(worlds, name):
    said = {kind: verify(worlds, name, kind) for kind in silent.PLANTED[name].models}
    for kind, text in said.items():
        first = text.splitlines()[0][:150] if text else HARMLESS.get(name, "NOT FOUND")
        print(f"{name:<32} {kind:<5} {first}")
    if name in (NOT_FOUND | HARMLESS):
        assert not any(said.values()), f"it is found after all: {said}"
        return
    for kind, text in said.items():
        assert all(word in text for word in silent.PLANTED[name].words), f"{kind}: {text or 'nothing found'}"


@pytest.mark.parametrize("kind", silent.MODELS)
@pytest.mark.parametrize("step", [None, silent.right, silent.right_clipped, silent.right_parts])
def test_correct_programs_are_not_blamed(worlds, kind, step):
    report = verify_sharding(
        *silent.Planted(()).arguments(kind), worlds=(2,), settings=["full", "mix"], steps=2, step=step, pool=worlds
    )
    assert "\n".join(map(str, report.differences)) == ""
    assert [bool(row.num_compared) for row in report.rows] == [True, True]


def gpt2():
    return hugging_face.build("gpt2").float()


def llama():
    return hugging_face.build("llama_tied").float()


def tokens(rank, step):
    return {**hugging_face.batch("gpt2", step, rank), "use_cache": False}


@pytest.mark.slow
@pytest.mark.parametrize("factory", [gpt2, llama])
def test_models_of_hugging_face_are_not_blamed(worlds, factory):
    pytest.importorskip("transformers")
    settings = ["full", "mix", "accumulation", "checkpointing", "clipping"]
    report = verify_sharding(factory, tokens, worlds=(2,), settings=settings, steps=2, pool=worlds)
    assert "\n".join(map(str, report.differences)) == ""
    assert not any(row.skipped for row in report.rows)
