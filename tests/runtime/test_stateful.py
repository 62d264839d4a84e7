"""Invariants 6 and 10 for whole programs: any interleaving does to a sharded model what it does to a plain twin."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dshard.testing import WorldPool
from dshard.testing.strategies import world_sizes
from tests.kit.cases import READS, VIEWS, WRITES
from tests.runtime.machine import Pair, run_program
from tests.runtime.programs import COPIES, GRAD_MODES, NAMES, OPTIMIZERS, SAVES


def pick(*options):
    return st.sampled_from(options)


def command(name, *args, weight=1):
    return [st.tuples(st.just(name), *args) for _ in range(weight)]


INDEX, FLAG, SKIP, BLOCK = st.integers(0, len(NAMES) - 1), st.booleans(), st.integers(-1, 1), st.integers(0, 1)
WHERE = pick("ahead of", "before", "after")
SIMPLE = st.one_of(
    *command("forward", SKIP, pick("grad", *GRAD_MODES), weight=3),
    *command("micro_step", SKIP, weight=2),
    *command("micro_step", SKIP, st.integers(0, 2)),
    *command("block", BLOCK),
    *command("direct", INDEX),
    *command("failing_forward", WHERE, BLOCK),
    *command("failing_backward", INDEX),
    *command("backward", pick(0, 0, 1), pick("free", "free", "keep", "all", "twice", "all twice", "each"), weight=4),
    *command("grad_of", FLAG),
    *command("drop"),
    *command("step", weight=3),
    *command("zero", FLAG),
    *command("clip", FLAG, pick(2.0, float("inf"))),
    *command("hook", INDEX),
    *command("unhook"),
    *command("write", pick(*WRITES), pick("param", "param", "grad"), INDEX, pick("no_grad", *GRAD_MODES), weight=3),
    *command("write_held", pick(0, 1)),
    *command("read", pick(*READS), pick("param", "grad", "held"), INDEX, weight=3),
    *command("hold", pick(*VIEWS), INDEX, weight=2),
    *command("requires_grad", INDEX, FLAG),
    *command("load", pick(0, 1)),
    *command("save", pick(*SAVES)),
    *command("restore", pick(0, 0, 1)),
    *command("train", FLAG),
    *command("set_grad_enabled", pick(True, True, False)),
    *command("cast", pick(torch.float32, torch.float64)),
    *command("copy", pick(*COPIES)),
    *command("call", pick("unshard", "reshard", "unshard_block")),
    *command("call", st.just("unshard"), FLAG),
    *command("call", st.just("set_reshard_after_forward"), FLAG),
    *command("call", st.just("set_reshard_after_backward"), FLAG),
    *command("call", st.just("set_requires_gradient_sync"), FLAG),
)
ACTIONS = SIMPLE | st.tuples(pick("gathered", "no_sync"), st.lists(SIMPLE, max_size=4))
SETTINGS = st.fixed_dictionaries(
    {
        "units": pick("blocks", "root", "list"),
        "reshard": pick(None, True, False),
        "dim": pick(0, 1),
        "optimizer": pick(*OPTIMIZERS),
        "depth": pick(1, 1, 0, 3),
        "budget": pick(None, None, 0, 300, 1 << 20),
    }
)


def run(worlds, num_ranks, options, actions):
    problems = worlds.run(num_ranks, run_program, options, actions)
    assert not any(problems), max(problems)


BLOCKS = {"units": "blocks", "reshard": None, "dim": 1, "optimizer": "fused", "depth": 1, "budget": None}


@pytest.mark.slow
@example(2, BLOCKS, [("hook", 2), ("micro_step", 0), ("clip", False, 2.0)])  # found: strides that a fused step ignores
# found: a state that is cast as it is loaded, and then written by a fused step
@example(1, BLOCKS | {"dim": 0}, [("micro_step", 0), ("step",), ("cast", torch.float32)])
@settings(max_examples=75)
@given(num_ranks=world_sizes(max_size=3), options=SETTINGS, actions=st.lists(ACTIONS, min_size=2, max_size=14))
def test_any_program_does_to_a_sharded_model_what_it_does_to_a_plain_twin(
    worlds: WorldPool, num_ranks, options, actions
):
    run(worlds, num_ranks, options, actions)


# Calls alone that gather, free, reduce and drop, close to one another.
MOVES = [("call", "unshard"), ("call", "unshard", True), ("call", "reshard")]
MOVES += [("call", "set_reshard_after_forward", on) for on in (True, False)]
FORWARDS = [
    *command("forward", SKIP, st.just("grad"), weight=2),
    *command("forward", SKIP, pick("no_grad", "inference")),
    *command("block", BLOCK),
    *command("direct", INDEX),
    *command("failing_forward", WHERE, BLOCK),
]
BACKWARDS = [
    *command("backward", st.just(0), pick("all", "all twice", "each"), weight=3),
    *command("failing_backward", INDEX),
]
UPDATES = [
    *command("step"),
    *command("clip", FLAG, st.just(2.0)),
    *command("zero", FLAG),
    *command("call", st.just("set_requires_gradient_sync"), FLAG),
    *command("compare"),
    *command("drop"),
]
SCOPES = st.tuples(st.just("gathered"), st.lists(st.one_of(*FORWARDS, *BACKWARDS, pick(*MOVES)), max_size=3))
CYCLE = st.one_of(*FORWARDS, *FORWARDS, *BACKWARDS, *UPDATES, pick(*MOVES), SCOPES)
CYCLES = {"units": "blocks", "reshard": None, "dim": 0, "optimizer": "sgd", "depth": 1, "budget": None}


@settings(max_examples=25)
@given(
    num_ranks=world_sizes(),
    options=st.fixed_dictionaries({"units": pick("blocks", "root", "list"), "reshard": pick(None, True, False)}),
    actions=st.lists(CYCLE, min_size=1, max_size=10),
)
def test_any_sequence_of_calls_ends_sharded_with_the_gradients_of_a_plain_twin(
    worlds: WorldPool, num_ranks, options, actions
):
    run(worlds, num_ranks, CYCLES | options, actions)


FORWARD, BACKWARD = ("forward", -1, "grad"), ("backward", 0, "all")
EVAL, INFERENCE = ("forward", -1, "no_grad"), ("forward", -1, "inference")
NO_SYNC, SYNC = (("call", "set_requires_gradient_sync", on) for on in (False, True))
UNSHARD, ASYNC, RESHARD, FREES, KEEPS = MOVES
FAILING_BACKWARD = ("failing_backward", NAMES.index("blocks.1.weight"))
HEAD = ("direct", NAMES.index("leave.bias"))
SEQUENCES = {
    "a plain step": [FORWARD, BACKWARD, ("step",)],
    "several forwards before one backward": [FORWARD, ("forward", 1, "grad"), FORWARD, BACKWARD],
    "several forwards, a backward of each": [FORWARD, FORWARD, ("backward", 0, "each")],
    "a graph that is kept and used twice": [FORWARD, ("backward", 0, "all twice")],
    "a backward that never comes": [FORWARD, ("drop",), FORWARD, ("drop",)],
    "an exception in forward": [("failing_forward", "after", 1), ("failing_forward", "before", 0)],
    "an exception in backward": [FAILING_BACKWARD, FORWARD, BACKWARD],
    "an exception inside of gathered": [("gathered", [("failing_forward", "after", 1), FAILING_BACKWARD])],
    "accumulation without sync": [NO_SYNC, FORWARD, BACKWARD, FORWARD, BACKWARD],
    "accumulation, then zeros": [NO_SYNC, FORWARD, BACKWARD, ("zero", False)],
    "accumulation, then None": [NO_SYNC, FORWARD, BACKWARD, ("zero", True)],
    "a gradient read without sync": [NO_SYNC, FORWARD, BACKWARD, ("compare",), FORWARD, BACKWARD, ("compare",)],
    "a step without sync": [NO_SYNC, FORWARD, BACKWARD, ("step",), FORWARD, BACKWARD],
    "clipping before sync": [NO_SYNC, FORWARD, BACKWARD, ("clip", True, 2.0), SYNC],
    "accumulation onto zeros": [FORWARD, BACKWARD, ("zero", False), FORWARD, BACKWARD],
    "a skipped block": [("forward", 0, "grad"), BACKWARD, ("compare",), ("forward", 1, "grad"), BACKWARD],
    "frees while a graph waits": [FORWARD, RESHARD, FREES, BACKWARD],
    "gathers while a graph waits": [FORWARD, UNSHARD, KEEPS, BACKWARD],
    "a gather that nobody waits for": [ASYNC, RESHARD, ASYNC, FORWARD],
    "gathered around everything": [("gathered", [FORWARD, BACKWARD, UNSHARD, RESHARD, EVAL])],
    "blocks by themselves": [("block", 1), ("block", 0), BACKWARD],
    "parameters by themselves": [HEAD, HEAD, BACKWARD],
    "eval between forward and backward": [FORWARD, EVAL, INFERENCE, BACKWARD],
}


@pytest.mark.parametrize("units", ["blocks", "root", "list"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_known_sequences_end_sharded_with_the_gradients_of_a_plain_twin(worlds: WorldPool, name, units):
    for num_ranks, reshard in ((2, None), (3, False)):
        run(worlds, num_ranks, CYCLES | {"units": units, "reshard": reshard}, SEQUENCES[name])


def drift(tensor):
    with torch.no_grad():
        tensor.mul_(1 + 1e-6)


def momentum(side):
    return side.optimizer.state[side.param(2)]["momentum_buffer"]


# What goes wrong on the sharded side alone, and what is then said.
SPOILED = {
    "a weight": (lambda side: drift(side.param(2)), "enter.weight: Tensor-likes are not close"),
    "a gradient": (lambda side: drift(side.param(2).grad), "gradient of enter.weight: Tensor-likes"),
    "a gradient that is missing": (lambda side: setattr(side.param(2), "grad", None), "one of the two is None"),
    "a state": (lambda side: drift(momentum(side)), "momentum_buffer of enter.weight: Tensor-likes"),
    "a kept view": (lambda side: drift(side.held[0]), "kept views: Tensor-likes"),
    "a loss": (lambda side: side.model.eval(), "micro_step: Scalars"),
    "an error that does not come": (lambda side: side.losses.clear(), "DID NOT RAISE"),
    "a unit that stays gathered": (lambda side: setattr(side.model._dshard_units[0], "num_pins", 1), "stayed gathered"),
    "a shard that is another": (lambda side: setattr(side.param(2), "data", side.param(2).data * 1), "other tensors"),
}


def spoiled(what):
    pair = Pair("blocks", None, 0, "sgd")
    for action in [("micro_step", 1), ("step",), ("hold", "clone", 2), ("forward", -1, "grad")]:
        pair.do(action)
    SPOILED[what][0](pair.ours)
    refused = [("write", "mul", "param", 0, "no_grad"), ("backward", 0, "keep")]
    with pytest.raises((AssertionError, pytest.fail.Exception), match=SPOILED[what][1]):
        pair.run(refused if "error" in what else [])


@pytest.mark.parametrize("what", SPOILED)
def test_what_is_wrong_on_the_sharded_side_alone_would_be_seen(worlds: WorldPool, what):
    worlds.run(2, spoiled, what)


def left_gathered():
    pair = Pair("blocks", None, 0, "sgd")
    pair.nothing_is_gathered()
    pair.ours.model.unshard()
    with pytest.raises(AssertionError, match="stayed gathered"):
        pair.nothing_is_gathered()
    pair.ours.model._dshard_units[0].num_pins = 1  # as of a model that was copied, which is told to free all
    with pytest.raises(AssertionError, match="are left"):
        pair.only_shards(pair.ours.model)


def test_a_unit_left_gathered_would_be_seen(worlds: WorldPool):
    worlds.run(2, left_gathered)
