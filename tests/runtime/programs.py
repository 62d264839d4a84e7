"""Programs for tests: what a user does with a model, one command at a time, on a sharded model or on a plain one."""

import contextlib
import copy
import functools
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version

import dshard
from dshard.tensor import ShardedTensor
from tests.kit import cases
from tests.kit.cases import READS, VIEWS, WRITES, values


class Block(nn.Linear):
    """A layer that fails on demand, before or after it used its weight."""

    fails = ""

    def forward(self, x):
        if self.fails == "before":
            raise ValueError("on demand")
        x = torch.tanh(super().forward(x))
        if self.fails == "after":
            raise ValueError("on demand")
        return x


class Net(nn.Module):
    """Uneven sizes, a weight tied across units, a module used twice, a frozen weight, a 0-d one, one that few use."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(3, 5)
        self.blocks = nn.ModuleList([Block(5, 5), Block(5, 5)])
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)
        self.leave = nn.Linear(5, 5)
        self.leave.weight = self.blocks[0].weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.spare = nn.Parameter(torch.linspace(-1, 1, 4))
        self.fails_ahead_of = None

    def forward(self, x, skip, with_spare):
        x = torch.tanh(self.enter(x))
        for i, block in enumerate(self.blocks):
            if self.fails_ahead_of == i:
                raise ValueError("on demand")
            if i != skip:
                x = block(x)
        if self.training:
            x = 1.25 * x
        out = (self.leave(self.blocks[0](self.frozen(x))) * self.scale).pow(2).mean()
        return out + self.spare.square().sum() if with_spare else out


NAMES = [name for name, _ in Net().named_parameters()]
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.5),
    # A large eps: where a gradient is zero up to rounding, Adam would make a full step of the rounding.
    "adamw": functools.partial(torch.optim.AdamW, lr=0.02, eps=1e-3, foreach=True),
    "fused": functools.partial(torch.optim.AdamW, lr=0.02, eps=1e-3, fused=True),
}
GRAD_MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {**cases.COPIES, "torch.save": saved_and_loaded}
SAVES = {
    "full": lambda state: {k: v.full_tensor() if isinstance(v, ShardedTensor) else v.clone() for k, v in state.items()},
    "clone": lambda state: {k: v.clone() for k, v in state.items()},
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
}


class Side:
    """A model with its optimizer, on the batches of some ranks, and what the program keeps of it."""

    def __init__(self, model, ranks, kind):
        self.model, self.ranks, self.kind = model, ranks, kind
        self.is_sharded = isinstance(model, dshard.FSDPModule)
        self.optimizer = OPTIMIZERS[kind](model.parameters())
        self.losses, self.held, self.saved, self.hooks, self.former = [], [], [], [], []
        self.num_batches = 0

    def param(self, i):
        return self.model.get_parameter(NAMES[i])

    def loss(self, skip, lonely=None):
        """The mean over the ranks, and what this rank has of it; `lonely`: the one rank that uses `spare`."""
        self.num_batches += 1
        generator = torch.Generator().manual_seed(self.num_batches)
        inputs = torch.randn(dist.get_world_size(), 2, 3, generator=generator).to(self.model.scale.dtype)
        losses = {}
        for rank in self.ranks:
            x = inputs[rank].clone().requires_grad_(self.num_batches % 3 == 0)
            losses[rank] = self.model(x, skip, skip == 1 if lonely is None else rank == lonely % dist.get_world_size())
        return sum(losses.values()) / len(losses), losses[dist.get_rank()].detach()

    @contextlib.contextmanager
    def backward_may_raise(self, error=()):
        """What a backward that raised has left of gradients is anybody's guess, so it is dropped."""
        try:
            yield
        except (RuntimeError, ValueError) as raised:
            self.losses.clear()
            for model in (self.model, *self.former):
                model.zero_grad()
            if not isinstance(raised, error):
                raise

    def forward(self, skip, mode):
        with GRAD_MODES[mode]():
            total, own = self.loss(skip)
        if mode == "grad":
            self.losses.append(total)
        return own

    def block(self, i):
        """A block by itself, outside of the root's forward."""
        self.num_batches += 1
        generator = torch.Generator().manual_seed(self.num_batches)
        inputs = torch.randn(dist.get_world_size(), 2, 5, generator=generator).to(self.model.scale.dtype)
        losses = {rank: self.model.blocks[i](inputs[rank]).sum() for rank in self.ranks}
        self.losses.append(sum(losses.values()) / len(losses))
        return losses[dist.get_rank()].detach()

    def direct(self, i):
        """A parameter in a loss, with no module's forward at all."""
        self.losses.append(self.param(i).pow(2).sum())
        return self.losses[-1].detach()

    def failing_forward(self, where, i):
        self.model.fails_ahead_of, self.model.blocks[i].fails = (i, "") if where == "ahead of" else (None, where)
        with pytest.raises(ValueError, match="on demand"):
            self.loss(-1)
        self.model.fails_ahead_of, self.model.blocks[i].fails = None, ""

    def backward(self, k, how):
        which = slice(None) if how in ("all", "all twice", "each") else slice(k, k + 1)
        if losses := self.losses[which]:
            if how != "keep":
                del self.losses[which]
            with self.backward_may_raise():
                for loss in reversed(losses) if how == "each" else [sum(losses)]:
                    loss.backward(retain_graph=how in ("keep", "all twice"))
                    if "twice" in how:  # of a graph that was freed, or was kept
                        loss.backward()

    def micro_step(self, skip, lonely=None):
        total, own = self.loss(skip, lonely)
        with self.backward_may_raise():
            total.backward()
        return own

    def failing_backward(self, i):
        def fail(grad):
            raise ValueError("on demand")

        if self.param(i).requires_grad:
            total, _ = self.loss(-1)
            with contextlib.ExitStack() as stack, self.backward_may_raise(ValueError):
                stack.callback(self.param(i).register_hook(fail).remove)
                total.backward()

    def grad_of(self, create_graph):
        params = [p for p in self.model.parameters() if p.requires_grad]
        grads = []
        if self.losses:
            with self.backward_may_raise():
                grads = torch.autograd.grad(self.losses.pop(), params, allow_unused=True, create_graph=create_graph)
                if create_graph and any(g is not None for g in grads):  # none is, of a model that was copied since
                    sum(g.square().sum() for g in grads if g is not None).backward()
        return [g if g is None else g.detach() for g in grads]

    def step(self):
        self.optimizer.step()
        params = list(self.model.parameters())
        if not self.is_sharded and self.kind == "fused":
            # docs/limits.md: "A fused optimizer's step between forward and backward raises, where plain PyTorch
            # notices nothing": let it notice.
            increment_version([p for p in params if p.grad is not None])

    def clip(self, with_ours, order):
        clip = dshard.clip_grad_norm_ if with_ours and self.is_sharded else nn.utils.clip_grad_norm_
        return clip(self.model.parameters(), 0.25, norm_type=order)

    def target(self, what, i):
        if what == "held":
            return self.held[i % len(self.held)] if self.held else None
        return self.param(i).grad if what == "grad" else self.param(i)

    def write(self, kind, what, i, mode):
        if (target := self.target(what, i)) is not None:
            # A plain parameter becomes an inference tensor by that, and autograd refuses some of its uses.
            mode = "no_grad" if kind == "set data" and mode == "inference" else mode
            with GRAD_MODES[mode]():
                WRITES[kind](target)

    def read(self, kind, what, i):
        target = self.target(what, i)
        return None if target is None else READS[kind](target)

    def renew_optimizer(self):
        state = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer = OPTIMIZERS[self.kind](self.model.parameters())
        self.optimizer.load_state_dict(state)

    def cast(self, dtype):
        self.losses.clear()
        self.held.clear()  # what views see of a parameter that was cast is undefined
        self.model.to(dtype)
        self.renew_optimizer()

    def copy(self, kind):
        self.former.append(self.model)
        self.model = COPIES[kind](self.model)
        self.renew_optimizer()

    def call(self, method, *args):
        """What a plain model does not have, and what must change no number."""
        target = self.model.blocks[1] if method == "unshard_block" else self.model
        if isinstance(target, dshard.FSDPModule):
            getattr(target, method.removesuffix("_block"))(*args)

    def restore(self, k):
        for model, optimizer in self.saved[k : k + 1]:
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(copy.deepcopy(optimizer))

    def write_held(self, k):
        with torch.no_grad():
            for held in self.held[k : k + 1]:
                held.mul_(1.5).add_(0.125)

    def requires_grad(self, i, on):
        self.param(i).requires_grad_(on)

    def hook(self, i):
        if self.param(i).requires_grad:
            self.hooks.append((NAMES[i], self.param(i).register_hook(lambda grad: grad * 1.5)))


# Commands whose results say nothing.
CALLS = {
    "drop": lambda s: s.losses.clear(),
    "zero": lambda s, to_none: s.optimizer.zero_grad(set_to_none=to_none),
    "unhook": lambda s: [handle.remove() for _, handle in s.hooks[:1]] and s.hooks.pop(0),
    "hold": lambda s, kind, i: s.held.extend([t for t in [VIEWS[kind](s.param(i))] if t is not None]),
    "load": lambda s, seed: s.model.load_state_dict({k: values(v, seed) for k, v in s.model.state_dict().items()}),
    "save": lambda s, kind: s.saved.append(
        (SAVES[kind](s.model.state_dict()), copy.deepcopy(s.optimizer.state_dict()))
    ),
    "train": lambda s, on: s.model.train(on),
    "set_grad_enabled": lambda s, on: torch.set_grad_enabled(on),
}
