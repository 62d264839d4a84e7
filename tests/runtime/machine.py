"""Runs programs: does each command to a sharded model and to a plain twin, and compares what comes of it."""

import copy
import functools
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import dshard
from dshard.tensor import ShardedTensor
from tests.runtime.programs import CALLS, Net, Side

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
        self.shards = self.find_shards()
        self.is_exact = True  # weights are the same bits, until a gradient or a 32-bit number went into them
        self.rtol = 1e-9
        self.keeps = budget is not None  # whether a unit may stay gathered behind a backward
        self.done = []

    def run(self, actions):
        for action in actions:
            self.do(action)
        self.finish()

    def do(self, action):
        """Whether plain PyTorch refuses it."""
        name, *args = action
        self.done.append(action)
        if name == "compare":
            return self.compare()
        if args[:1] == ["set_reshard_after_backward"]:
            self.keeps |= not args[1]
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
            return True
        got = function(self.ours, *args)
        if name not in CALLS:
            self.same(got, want, name, exact=self.is_exact and name == "forward")
        if name in ("cast", "copy") or "set data" in args:
            self.shards = self.find_shards()
        return False

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

    def find_shards(self):
        return [id(p.shard_storage.resolve()) for p in self.ours.model.parameters()]

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
        """Everything is as in the twin, also after two more steps, and then nothing but shards is left."""
        self.compare()
        torch.set_grad_enabled(True)
        for action in [("drop",), ("call", "set_requires_gradient_sync", True), ("micro_step", 1), ("step",)]:
            self.do(action)
        self.compare()
        if not self.do(("micro_step", -1)):
            self.nothing_is_gathered()
        self.compare()
        self.do(("forward", -1, "no_grad"))
        self.nothing_is_gathered(behind_evaluation=True)
        for model, _ in self.models():
            self.only_shards(model)
        assert self.shards == self.find_shards(), "shards are other tensors than they were"

    def nothing_is_gathered(self, *, behind_evaluation=False):
        """Of the model itself, without being told to free anything; what is not resharded outlives evaluations."""
        runtime = self.ours.model._context()
        stays = {
            u
            for u in runtime.units
            if behind_evaluation and (u.settings.reshard_after_forward is False or u.is_once_per_host)
        }
        if stays and len(stays) >= len(runtime.units) - 1:
            stays = set(runtime.units)  # with all others, what is with the root
        busy = [u.label for u in runtime.units if (u.is_gathered and u not in stays) or u.num_active or u.num_pins]
        assert self.keeps or not busy, f"{busy} stayed gathered"
        assert self.keeps or stays or runtime.gathered_bytes == 0

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
