"""Invariant 6: whatever writes, touches and frees came before, every read sees the last write."""

import copy
import functools
import traceback

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import dshard
from dshard.tensor import ShardedTensor
from dshard.testing import WorldPool
from dshard.testing.strategies import world_sizes

NUM_PARAMS = 5


class Net(nn.Module):
    """Two blocks, a parameter of the root's own, uneven sizes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 5, dtype=torch.float64), nn.Linear(5, 3, dtype=torch.float64)])
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.scale


@functools.cache
def world_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


class Pair:
    """A sharded model and its plain twin; every action is done to both, every read compared."""

    def __init__(self, reshard, dim, root_only):
        torch.manual_seed(0)
        self.twin = Net()
        self.model = copy.deepcopy(self.twin)
        options = {"mesh": world_mesh(), "shard_placement_fn": lambda p: Shard(min(dim, p.dim() - 1))}
        if not root_only:
            for block in self.model.blocks:
                dshard.fully_shard(block, reshard_after_forward=reshard, **options)
        dshard.fully_shard(self.model, reshard_after_forward=reshard, **options)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in (self.model, self.twin)]
        self.held = []

    def params(self, i):
        return list(self.model.parameters())[i], list(self.twin.parameters())[i]

    def do(self, action):
        name, *args = action
        getattr(self, f"do_{name}")(*args)

    # writes

    def write(self, i, change):
        with torch.no_grad():
            for param in self.params(i):
                change(param)

    def do_mul(self, i):
        self.write(i, lambda p: p.mul_(1.5))

    def do_copy(self, i, seed):
        value = torch.randn(self.params(i)[1].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        self.write(i, lambda p: p.copy_(value))

    def do_view(self, i):
        self.write(i, lambda p: p.view(-1)[1:2].fill_(0.25))

    def do_random(self, i):
        def fill(param):
            torch.manual_seed(i)
            nn.init.uniform_(param)

        self.write(i, fill)

    def do_local(self, i):
        ours, theirs = self.params(i)
        with torch.no_grad():
            ours.to_local().mul_(-2)
            theirs.mul_(-2)

    def do_data(self, i):
        for param in self.params(i):
            param.data.add_(0.5)

    def do_new_data(self, i):
        for param in self.params(i):
            param.data = param.data * 0.5

    def do_detached(self, i):
        for param in self.params(i):
            param.detach().sub_(0.125)

    def do_foreach(self):
        with torch.no_grad():
            for module in (self.model, self.twin):
                torch._foreach_mul_(list(module.parameters()), 0.75)

    def do_inference(self, i):
        with torch.inference_mode():
            for param in self.params(i):
                param.mul_(1.25)

    def do_load(self, seed):
        generator = torch.Generator().manual_seed(seed)
        state = {k: torch.randn(v.shape, dtype=v.dtype, generator=generator) for k, v in self.twin.state_dict().items()}
        for module in (self.model, self.twin):
            module.load_state_dict(state)

    def do_swap(self, i):
        """A clone is a value of its own: a write to it does not reach the parameter, nor the other way round."""
        ours, theirs = self.params(i)
        with torch.no_grad():
            copies = ours.clone(), theirs.clone()
            for c in copies:
                c.add_(1)
        self.held.append(copies)

    def do_step(self):
        x = torch.full((2, 3), 0.5, dtype=torch.float64)
        for module, optimizer in zip((self.model, self.twin), self.optimizers, strict=True):
            optimizer.zero_grad()
            module(x).sum().backward()
            optimizer.step()

    # reads

    def close(self, got, want):
        torch.testing.assert_close(got, want.detach(), rtol=1e-9, atol=1e-11)

    def do_forward(self):
        x = torch.full((2, 3), 0.25, dtype=torch.float64)
        self.close(self.model(x).detach(), self.twin(x))

    def do_eval(self):
        with torch.no_grad():
            self.do_forward()

    def do_inference_forward(self):
        with torch.inference_mode():
            self.do_forward()

    def do_use(self, i):
        ours, theirs = self.params(i)
        self.close((ours * torch.ones_like(theirs)).detach(), theirs)

    def do_full(self, i):
        ours, theirs = self.params(i)
        self.close(ours.full_tensor().detach(), theirs)

    def do_hold(self, i):
        self.held.append(tuple(p.detach() for p in self.params(i)))

    def do_hold_clone(self, i):
        self.held.append(tuple(p.detach().clone() for p in self.params(i)))

    def do_hold_cast(self, i):
        self.held.append(tuple(p.detach().to(torch.float32).double() for p in self.params(i)))

    def do_hold_view(self, i):
        self.held.append(tuple(p.detach()[:1] for p in self.params(i)))

    def do_held(self):
        for ours, theirs in self.held:
            self.close(ours.full_tensor(), theirs)

    # gathers and frees

    def do_unshard(self):
        self.model.unshard()

    def do_unshard_block(self, asynchronous):
        block = self.model.blocks[0]
        if isinstance(block, dshard.FSDPModule):
            block.unshard(async_op=asynchronous)

    def do_reshard(self):
        self.model.reshard()

    def do_gathered(self, actions):
        with dshard.gathered(self.model) as full:
            for name, value in full.items():
                self.close(value, self.twin.get_parameter(name))
            for action in actions:
                self.do(action)
                self.do_full(1)
                self.do_eval()

    def check(self):
        for i in range(NUM_PARAMS):
            self.do_full(i)
        self.do_held()
        self.do_eval()


index = st.integers(0, NUM_PARAMS - 1)
WRITES = [
    st.tuples(st.sampled_from(["mul", "view", "random", "local", "data", "detached", "inference", "swap"]), index),
    st.tuples(st.just("copy"), index, st.integers(0, 9)),
    st.tuples(st.just("new_data"), index),
    st.tuples(st.just("foreach")),
    st.tuples(st.just("load"), st.integers(0, 9)),
    st.tuples(st.just("step")),
]
READS = [
    st.tuples(st.sampled_from(["forward", "eval", "inference_forward", "held"])),
    st.tuples(st.sampled_from(["use", "full", "hold", "hold_view", "hold_clone", "hold_cast"]), index),
]
MOVES = [st.tuples(st.sampled_from(["unshard", "reshard"])), st.tuples(st.just("unshard_block"), st.booleans())]
SIMPLE = st.one_of(*WRITES, *READS, *MOVES)
ACTIONS = SIMPLE | st.tuples(st.just("gathered"), st.lists(st.one_of(*WRITES, *READS), max_size=3))
SETTINGS = st.fixed_dictionaries(
    {"reshard": st.sampled_from([None, True, False]), "dim": st.integers(0, 1), "root_only": st.booleans()}
)


def check_interleaving(options, actions):
    done = []
    try:
        pair = Pair(**options)
        for action in actions:
            done.append(action)
            pair.do(action)
        done.append("end")
        pair.check()
    except Exception:
        return f"after {done}: {traceback.format_exc(limit=-6)}"
    return ""


@settings(max_examples=80)
@given(num_ranks=world_sizes(), options=SETTINGS, actions=st.lists(ACTIONS, min_size=2, max_size=12))
def test_every_read_sees_the_last_write(worlds: WorldPool, num_ranks, options, actions):
    problems = worlds.run(num_ranks, check_interleaving, options, actions)
    assert not any(problems), max(problems)


@settings(max_examples=30)
@given(num_ranks=world_sizes(), options=SETTINGS, actions=st.lists(ACTIONS, min_size=2, max_size=12))
def test_every_read_sees_the_last_write_by_messages(messaging: WorldPool, num_ranks, options, actions):
    problems = messaging.run(num_ranks, check_interleaving, options, actions)
    assert not any(problems), max(problems)


WRITERS = [
    *((name, 1) for name in ("mul", "view", "random", "local", "data", "detached", "inference", "new_data")),
    ("copy", 1, 3),
    ("foreach",),
    ("load", 4),
    ("step",),
]
READERS = [("forward",), ("eval",), ("inference_forward",), ("use", 1), ("full", 1), ("held",)]
GATHERERS = [("unshard",), ("unshard_block", True), ("forward",), ("use", 1), ("hold_clone", 1), ("hold_view", 1)]


def check_all_triples(options):
    """Gather somehow, write somehow, read somehow: all combinations."""
    num_cases = 0
    for gather in GATHERERS:
        for write in WRITERS:
            for read in READERS:
                problem = check_interleaving(options, [("hold", 1), gather, write, read])
                if problem:
                    return num_cases, problem
                num_cases += 1
    return num_cases, ""


@pytest.mark.parametrize(("num_ranks", "reshard"), [(1, None), (2, False)])
def test_each_write_after_each_gather_is_seen_by_each_read(worlds: WorldPool, num_ranks, reshard):
    options = {"reshard": reshard, "dim": 0, "root_only": False}
    for num_cases, problem in worlds.run(num_ranks, check_all_triples, options, timeout_s=120):
        assert not problem, problem
        assert num_cases == len(GATHERERS) * len(WRITERS) * len(READERS) == 432


def stale_twin():
    """The comparison itself sees a stale value: a write to one of the two alone."""
    pair = Pair(reshard=None, dim=0, root_only=False)
    pair.do_forward()
    with torch.no_grad():
        pair.params(1)[1].mul_(2)
    found = []
    for read in READERS[:-1]:
        try:
            pair.do(read)
        except AssertionError:
            found.append(read)
    return found


def test_a_stale_read_would_be_seen_by_every_reader(worlds: WorldPool):
    assert worlds.run(2, stale_twin) == [READERS[:-1]] * 2


def check_one_gather():
    pair = Pair(reshard=False, dim=0, root_only=False)
    with dshard.CommTrace() as trace:
        pair.model.unshard()
        pair.do_full(0)
        first = trace.calls("all_gather")
        pair.do_mul(0)
        pair.do_full(0)
        second = trace.calls("all_gather")
        pair.do_full(0)
    return first, second, trace.calls("all_gather"), type(pair.params(0)[0]) is ShardedTensor


def test_a_fresh_copy_is_used_again_and_a_write_costs_one_gather(worlds: WorldPool):
    assert worlds.run(2, check_one_gather) == [(1, 2, 2, True)] * 2
