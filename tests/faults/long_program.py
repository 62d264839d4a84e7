"""A model on 2 ranks, and what a random program does to it."""

import copy
from array import array
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dshard
from dshard.collectives import _c10d
from dshard.tensor import ShardedTensor
from tests.faults.long_plan import STRATEGIES, strategy_of

VOCAB, WIDTH, CLIP = 32, 16, 0.05  # of the largest value of gradients, which it is below about as often as above
INF = float("inf")
MIXED = {"blocks.0.*": "zero1", "blocks.1.*": "ddp", "*": "full"}


class Planned(RuntimeError):
    """What a program raises on purpose, on all ranks."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x):
        hidden = self.mix(self.norm(x))
        if self.fails:
            raise Planned("forward")
        return x + F.dropout(F.gelu(hidden), 0.1, self.training)


class Net(nn.Module):
    """A tied embedding around two blocks, which may be recomputed in backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.register_buffer("average", torch.zeros(WIDTH))  # of all that was trained, as running statistics are
        self.recompute = None
        self.fails_in_backward = False
        self.double()

    def forward(self, ids):
        x = self.embed(ids)
        if self.training and torch.is_grad_enabled():
            self.average.lerp_(self.norm.weight.detach(), 0.1)
        for block in self.blocks:
            recompute = self.recompute if torch.is_grad_enabled() else None
            x = block(x) if recompute is None else checkpoint(block, x, use_reentrant=recompute)
            if self.fails_in_backward and x.requires_grad:
                x.register_hook(raise_planned)
                self.fails_in_backward = False
        return self.head(self.norm(x) * self.scale)


def raise_planned(_):
    raise Planned("backward")


def loss_of(model, index, part, rank):
    """Of one batch, with its own random numbers."""
    torch.manual_seed(index * 100 + part * 10 + rank)
    ids = torch.randint(VOCAB, (2, 6))
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Run:
    """A model, its optimizer and what is done to them, on one rank."""

    def __init__(self, folder=None, *, num_steps=1, sharded=True):
        self.model = Net()
        if sharded:
            dshard.fully_shard(self.model.blocks[1])
            dshard.fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=False)
        self.folder = folder
        self.strategy, self.saved, self.pending = "full", None, None
        self.handles, self.weight_hook = [], None
        self.done = Counter()
        self.losses, self.norms = array("d", [0.0]) * num_steps, array("d", [0.0]) * num_steps

    def loss(self, index, part):
        return loss_of(self.model, index, part, dist.get_rank())

    @contextmanager
    def as_if_not_trained(self):
        """With what forwards leave in a buffer taken back."""
        average = self.model.average.clone()
        yield
        self.model.average.copy_(average)

    def train(self, step):
        """The step alone: what the plain run does, too."""
        for part in range(step.num_batches):
            is_last = part == step.num_batches - 1
            with nullcontext() if is_last else dshard.no_sync(self.model):
                loss = self.loss(step.index, part) / step.num_batches
                loss.backward()
        self.losses[step.index] = loss.item()
        if step.clips:
            # By the largest value, which does not depend on how gradients are cut. A sum does, in its last bit: under
            # "ddp" squares are added in another order than under "full". So the other norm is looked at alone.
            self.norms[step.index] = dshard.clip_grad_norm_(self.model.parameters(), INF).item()
            dshard.clip_grad_norm_(self.model.parameters(), CLIP, norm_type=INF)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def switch(self, strategy):
        if strategy != self.strategy:
            now = MIXED if strategy == "mixed" else strategy
            dshard.set_strategy(self.model, now, optimizer=self.optimizer)
            self.strategy = strategy

    def do(self, step):
        """What is ahead of a step, and the step, or the exception in it."""
        for name, drawn in step.before:
            self.done[name] += 1
            getattr(self, f"do_{name.replace(' ', '_')}")(step.index, drawn)
        if step.num_batches > 1:  # such a hook is given the gradient of each backward, reduced: a sum in another order
            self.unhook_weight()
        if step.failure is None:
            return self.train(step)
        self.done[f"raised in {step.failure}"] += 1
        with self.as_if_not_trained(), pytest.raises(Planned):
            self.fail(step)
        self.optimizer.zero_grad()
        return None

    def fail(self, step):
        block = self.model.blocks[step.index % 2]
        if step.num_batches > 1:
            with dshard.no_sync(self.model):
                self.loss(step.index, 0).backward()
        if step.failure == "forward":
            block.fails = True
            try:
                self.loss(step.index, 0).backward()
            finally:
                block.fails = False
        elif step.failure == "loss":
            raise Planned(f"loss {self.loss(step.index, 0).item()}")
        elif step.failure == "backward":
            self.model.fails_in_backward = True
            self.loss(step.index, 0).backward()
        elif step.failure == "recompute":
            loss = self.loss(step.index, 0)
            block.fails = True
            try:
                loss.backward()  # which runs the block's forward again, or not
            finally:
                block.fails = False
            raise Planned("no recompute")
        else:
            self.fail_in_hook(step, block)

    def fail_in_hook(self, step, block):
        in_backward = step.failure == "hook"
        register = block.register_full_backward_hook if in_backward else self.optimizer.register_step_pre_hook
        handle = register(lambda *_: raise_planned(None))
        try:
            self.loss(step.index, 0).backward()
            self.optimizer.step()
        finally:
            handle.remove()

    # What is done between two steps. None of it changes a parameter or a state, but `load`.

    def do_evaluate(self, index, drawn):
        mode = torch.no_grad() if drawn < 0.5 else torch.inference_mode()
        self.model.eval()
        with mode:
            assert self.loss(index, 7).isfinite()
        self.model.train()

    def do_failing_evaluation(self, index, drawn):
        block = self.model.blocks[index % 2]
        block.fails = True
        with pytest.raises(Planned), torch.no_grad() if drawn < 0.5 else torch.inference_mode():
            self.loss(index, 7)
        block.fails = False

    def do_save(self, index, _, *, asynchronous=False):
        self.pending = dshard.checkpoint.save(
            self.folder / "checkpoints" / f"step-{index}",
            self.model,
            self.optimizer,
            step=index,
            extra={"index": index},
            keep=2,
            asynchronous=asynchronous,
        )
        self.saved = index

    def do_save_asynchronously(self, index, drawn):
        self.do_save(index, drawn, asynchronous=True)

    def do_load(self, *_):
        if self.saved is None:
            return
        if self.pending is not None:
            self.pending.result()
        extra = dshard.checkpoint.load(self.folder / "checkpoints", self.model, self.optimizer)
        assert extra == {"index": self.saved}
        assert len(list((self.folder / "checkpoints").glob("step-*"))) <= 2  # rank 0 may have begun the next one

    def do_safetensors(self, *_):
        path = self.folder / "model.safetensors"
        dshard.save_safetensors(self.model, path)
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(2)
        dshard.load_safetensors(self.model, path)

    def do_switch(self, _, drawn):
        self.switch(strategy_of(drawn))

    def do_gathered(self, _, drawn):
        with dshard.gathered(self.model, rank0_only=drawn < 0.3, offload_to_cpu=drawn > 0.7) as full:
            values = {name: value.clone() for name, value in full.items()}
        for name, value in values.items() if drawn >= 0.3 else ():
            assert torch.equal(value, self.model.get_parameter(name).full_tensor()), name

    def do_write_back(self, _, drawn):
        with dshard.gathered(self.model, writeback=True, rank0_only=drawn < 0.3) as full, torch.no_grad():
            for value in full.values():
                value.copy_(value.clone())

    def do_failing_scope(self, _, drawn):
        with pytest.raises(Planned), dshard.gathered(self.model, writeback=drawn < 0.5):
            raise Planned("scope")

    def do_failing_call(self, _, drawn):
        """What is wrong, on all ranks."""
        path = self.folder / "in the way"
        path.touch()
        calls = {
            partial(dshard.checkpoint.load, self.folder / "nothing", self.model, self.optimizer): "but there is none",
            partial(dshard.checkpoint.save, path, self.model, self.optimizer): "in the way",
            partial(dshard.set_strategy, self.model, {"nothing.*": "ddp"}, optimizer=self.optimizer): "nothing",
            partial(dshard.clip_grad_norm_, self.model.parameters(), -1.0): "max_norm",
        }
        call, text = list(calls.items())[int(drawn * len(calls))]
        with pytest.raises(dshard.DShardError, match=text):
            call()

    def do_copy_model(self, index, drawn):
        other = copy.deepcopy(self.model)
        if drawn < 0.5:
            loss_of(other, index, 8, dist.get_rank()).backward()

    def do_copy_state(self, *_):
        copy.deepcopy(self.model.state_dict())
        copy.deepcopy(self.optimizer.state_dict())

    def do_state_dict(self, *_):
        self.model.load_state_dict(self.model.state_dict())
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def do_second_optimizer(self, index, drawn):
        kind = torch.optim.SGD if drawn < 0.5 else partial(torch.optim.AdamW, weight_decay=0.0)
        other = kind(self.model.parameters(), lr=0.0)
        with self.as_if_not_trained():
            self.loss(index, 9).backward()
        other.step()
        other.zero_grad()

    def do_second_model(self, index, _):
        other = Run(sharded=True)
        loss_of(other.model, index, 9, dist.get_rank()).backward()
        other.optimizer.step()

    def do_iter_full(self, *_):
        for name, value in dshard.iter_full(self.model):
            assert value.isfinite().all(), name

    def do_full_tensor(self, *_):
        for param in self.model.parameters():
            for value in (param, *self.optimizer.state.get(param, {}).values()):
                if isinstance(value, ShardedTensor):
                    value.full_tensor()

    def do_hooks(self, index, drawn):
        if self.handles:
            self.unhook()
            return
        block = self.model.blocks[index % 2]
        self.handles = [block.register_forward_hook(lambda *_: None), block.register_forward_pre_hook(lambda *_: None)]
        if drawn < 0.6:
            self.handles.append(block.register_full_backward_hook(lambda *_: None))
        if drawn < 0.3:
            self.weight_hook = block.mix.weight.register_hook(lambda _: None)
            self.handles.append(block.mix.bias.register_post_accumulate_grad_hook(lambda _: None))
            self.handles.append(self.optimizer.register_step_pre_hook(lambda *_: None))

    def unhook(self):
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.unhook_weight()

    def unhook_weight(self):
        if self.weight_hook is not None:
            self.weight_hook.remove()
        self.weight_hook = None

    def do_recompute(self, _, drawn):
        self.model.recompute = (None, True, False)[int(drawn * 3)]

    def rest(self):
        """Let go of all that is under way; a hook that stays registered would count."""
        self.unhook()
        self.model.recompute = None
        self.optimizer.zero_grad()
        if self.pending is not None:
            self.pending.result()
        self.pending = None

    @contextmanager
    def at_rest(self):
        """With no hooks of its own, under "full", where what is alive can be compared."""
        strategy = self.strategy
        self.rest()
        self.switch("ddp")  # so that the units of "full" are new ones
        self.switch("full")
        dist.barrier()  # for the folder is looked at, too; and peers have read what they were sent
        for _, kept in list(_c10d._KEPT.values()):
            if "channel" in kept:
                kept["channel"].transport.collect()
                kept["channel"].transport.pool.clear()
        pool = self.model._context().pool
        pool.mark()  # it takes back what it has lent
        pool.clear()
        yield
        dist.barrier()
        self.switch(strategy)

    def save_under_every_strategy(self):
        """So that what saves keep has its full size."""
        for strategy in STRATEGIES:
            self.switch(strategy)
            dshard.checkpoint.save(self.folder / "first", self.model, self.optimizer, asynchronous=True).result()
        self.switch("full")

    def bits(self):
        """Copies of all parameters and states, whole."""
        self.switch("full")
        found = dict(self.model.named_buffers())
        found |= {name: param.full_tensor() for name, param in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state[param].items():
                found[f"{key} of {name}"] = value.full_tensor() if isinstance(value, ShardedTensor) else value
        return {name: value.detach().clone() for name, value in found.items()}
