"""Invariants 6 and 10 for whole programs: any interleaving does to a sharded model what it does to a plain twin."""

import copy
import functools
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import dshard
from dshard.tensor import ShardedTensor
from dshard.testing import WorldPool
from dshard.testing.strategies import world_sizes
from tests.runtime.programs import CALLS, COPIES, GRAD_MODES, HOLDS, NAMES, OPTIMIZERS, READS, SAVES, WRITES, Net, Side

# Why plain PyTorch refuses an interleaving: the sharded model has to refuse it for the same reason.
REASONS = [
    *("modified by an inplace operation", "second time", "does not require grad", "a leaf Variable that requires"),
    "don't support automatic differentiation",
]


@functools.cache
def world_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


class Pair:
    """A sharded model on this rank's batches, and a plain twin on those of all ranks; every action is done to both."""

    def __init__(self, units, reshard, dim, optimizer, depth=1, budget=None):
        torch.manual_seed(0)
        plain = Net().double()
        model = copy.deepcopy(plain)
        options = {"mesh": world_mesh(), "reshard_after_forward": reshard}
        options["shard_placement_fn"] = lambda p: Shard(min(dim, p.dim() - 1)) if p.dim() else None
        inner = {"blocks": [model.enter, *model.blocks], "list": [list(model.blocks)], "root": []}
        for module in (*inner[units], model):
            dshard.fully_shard(module, **options, memory_budget=budget if module is model else None)
        model.set_prefetch(depth)
        self.ours = Side(model, [dist.get_rank()], optimizer)
        self.twin = Side(plain, list(range(dist.get_world_size())), optimizer)
        self.addresses = self.find_addresses()
        self.is_exact = True  # weights are the same bits, until a gradient or a 32-bit number went into them
        self.rtol = 1e-9
        self.done = []

    def run(self, actions):
        for action in actions:
            self.do(action)
        self.finish()

    def do(self, action):
        name, *args = action
        self.done.append(action)
        if name in ("gathered", "no_sync"):
            return self.inside(name, args[0])
        if name == "micro_step" and not self.may_be_lonely():
            args[1:] = []
        self.is_exact &= name not in ("step", "cast")
        self.rtol = 1e-4 if name == "cast" else self.rtol
        function = CALLS.get(name) or getattr(Side, name)
        try:
            want = function(self.twin, *args)
        except RuntimeError as error:
            reason = next((r for r in REASONS if r in str(error)), f"one of REASONS, and not: {error}")
            with pytest.raises(RuntimeError, match=reason):
                function(self.ours, *args)
            return None
        got = function(self.ours, *args)
        if name not in CALLS:
            self.same(got, want, name, exact=self.is_exact and name == "forward")
        if name in ("cast", "copy") or "set data" in args:
            self.addresses = self.find_addresses()
        return None

    def may_be_lonely(self):
        """Outside of autograd a reduction communicates; without sync, gradients are a rank's own; so are hooks."""
        is_hooked = any(name == "spare" for name, _ in self.twin.hooks)
        return torch.is_grad_enabled() and self.ours.model._dshard_units[0].settings.requires_sync and not is_hooked

    def inside(self, scope, actions):
        with getattr(dshard, scope)(self.ours.model) as full:
            for name, value in (full or {}).items():
                self.same(value, self.twin.model.get_parameter(name), name, exact=self.is_exact)
            for action in actions:
                self.do(action)

    def find_addresses(self):
        return [p.to_local().data_ptr() for p in self.ours.model.parameters()]

    def same(self, ours, theirs, what, *, exact=False):
        if isinstance(theirs, list):
            for pair in zip(ours, theirs, strict=True):
                self.same(*pair, what, exact=exact)
            return
        assert (ours is None) == (theirs is None), f"{what}: one of the two is None"
        if theirs is not None:
            ours = ours.full_tensor() if isinstance(ours, ShardedTensor) else ours
            pair = [v.detach() if isinstance(v, torch.Tensor) else v for v in (ours, theirs)]
            rtol, atol = (0, 0) if exact else (self.rtol, self.rtol / 100)
            torch.testing.assert_close(*pair, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")

    def models(self):
        return zip([*self.ours.former, self.ours.model], [*self.twin.former, self.twin.model], strict=True)

    def compare(self):
        for model, twin in self.models():
            for (name, p), (_, q) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
                assert p.requires_grad == q.requires_grad, name
                self.same(p, q, name, exact=self.is_exact)
                self.same(p.grad, q.grad, f"gradient of {name}")
        for p, q in zip(self.ours.model.parameters(), self.twin.model.parameters(), strict=True):
            ours, theirs = self.ours.optimizer.state[p], self.twin.optimizer.state[q]
            assert set(ours) == set(theirs), p.name
            for key, value in theirs.items():
                self.same(ours[key], value, f"{key} of {p.name}")
        self.same(self.ours.held, self.twin.held, "kept views")

    def finish(self):
        """Everything is as in the twin, also after one more step, and then nothing but shards is left."""
        self.compare()
        torch.set_grad_enabled(True)
        for action in [("drop",), ("call", "set_requires_gradient_sync", True), ("micro_step", 1), ("step",)]:
            self.do(action)
        self.compare()
        self.do(("forward", -1, "no_grad"))
        for model, _ in self.models():
            self.only_shards(model)
        assert self.addresses == self.find_addresses(), "addresses of shards have changed"

    def only_shards(self, model):
        for module in model.modules():
            if isinstance(module, dshard.FSDPModule):
                module.reshard()
        runtime = model._context()
        busy = [u.label for u in runtime.units if u.is_gathered or u.num_active or u.num_pins]
        assert not busy, f"gathered copies of {busy} are left"
        assert runtime.gathered_bytes == 0
        for name, param in model.named_parameters():
            shard = param.to_local()
            assert shard.untyped_storage().nbytes() == shard.nbytes, name
            assert dist.get_world_size() == 1 or not param.dim() or shard.numel() < param.numel(), name


def pick(*options):
    return st.sampled_from(options)


def command(name, *args, weight=1):
    return [st.tuples(st.just(name), *args) for _ in range(weight)]


INDEX, FLAG, SKIP = st.integers(0, len(NAMES) - 1), st.booleans(), st.integers(-1, 1)
SIMPLE = st.one_of(
    *command("forward", SKIP, pick("grad", *GRAD_MODES), weight=3),
    *command("micro_step", SKIP, weight=2),
    *command("micro_step", SKIP, st.integers(0, 2)),
    *command("failing_forward", pick(0, 1)),
    *command("failing_backward", INDEX),
    *command("backward", pick(0, 0, 1), pick("free", "free", "keep", "all", "twice"), weight=4),
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
    *command("hold", pick(*HOLDS), INDEX, weight=2),
    *command("requires_grad", INDEX, FLAG),
    *command("load", pick(0, 1)),
    *command("save", pick(*SAVES)),
    *command("restore", pick(0, 0, 1)),
    *command("train", FLAG),
    *command("set_grad_enabled", pick(True, True, False)),
    *command("cast", pick(torch.float32, torch.float64)),
    *command("copy", pick(*COPIES)),
    *command("call", pick("unshard", "reshard", "unshard_block")),
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


def run_program(options, actions):
    """Empty text, or what went wrong; ranks that fail apart from each other raise, so that their world is replaced."""
    with torch.enable_grad():
        pair = None
        try:
            pair = Pair(**options)
            pair.run(actions)
        except (Exception, pytest.fail.Exception):
            problem = f"after {pair and pair.done}: {traceback.format_exc(limit=-6)}"
            dist.monitored_barrier(timeout=timedelta(seconds=2))
            return problem
    return ""


BLOCKS = {"units": "blocks", "reshard": None, "dim": 1, "optimizer": "fused", "depth": 1, "budget": None}


@pytest.mark.slow
@example(2, BLOCKS, [("hook", 2), ("micro_step", 0), ("clip", False, 2.0)])  # found: strides that a fused step ignores
@settings(max_examples=150)
@given(num_ranks=world_sizes(max_size=3), options=SETTINGS, actions=st.lists(ACTIONS, min_size=2, max_size=14))
def test_any_program_does_to_a_sharded_model_what_it_does_to_a_plain_twin(
    worlds: WorldPool, num_ranks, options, actions
):
    problems = worlds.run(num_ranks, run_program, options, actions)
    assert not any(problems), max(problems)


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
    "a unit that stays gathered": (lambda side: setattr(side.model._dshard_units[0], "num_pins", 1), "are left"),
    "a shard that is another": (lambda side: setattr(side.param(2), "data", side.param(2).data * 1), "addresses"),
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
