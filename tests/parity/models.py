"""Small real models with deterministic batches, and one way to train them under DDP, FSDP2 and dshard."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import dshard
from tests.kit import oracle
from tests.models import CONTEXT, GPT, VOCAB, Classifier, ConvNet, Uneven


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what it is trained on.

    Args:
        build: Makes the model.
        units: Submodules that get a `fully_shard` of their own, children first; several in a list share one.
        batch: (generator) to (inputs, targets).
        loss: (outputs, targets) to a scalar.
        is_even: Whether every dim 0 is divisible by 2.
    """

    build: Callable[[], nn.Module]
    units: Callable[[Any], Sequence[Any]]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    is_even: bool = True


def _text(g: torch.Generator) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCAB, (3, CONTEXT + 1), generator=g)
    return ids[:, :-1], ids[:, 1:]


def _images(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(5, 3, 8, 8, generator=g), torch.randint(0, 10, (5,), generator=g)


def _sequences(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCAB, (5, 6), generator=g), torch.randint(0, 6, (5,), generator=g)


def _vectors(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(9, 7, generator=g), torch.randn(9, 1, generator=g)


def _next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def _tied() -> nn.Module:
    return GPT(tied=True)


def _gpt_units(m: GPT) -> list[Any]:
    return [*m.blocks, m.tokens, [m.norm, m.head]]


CASES = {
    "gpt": Case(GPT, _gpt_units, _text, _next_token_loss),
    "conv": Case(ConvNet, lambda m: [m.stem, m.body], _images, F.cross_entropy),
    "lstm": Case(Classifier, lambda m: [m.embed, m.lstm, m.head], _sequences, F.cross_entropy),
    "tied": Case(_tied, lambda m: list(m.blocks), _text, _next_token_loss),
    "uneven": Case(Uneven, lambda m: [m.first, [m.second, m.third]], _vectors, F.mse_loss, is_even=False),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """The model, with the same weights wherever the seed is the same."""
    torch.manual_seed(seed)
    return CASES[name].build()


def batch(name: str, seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets: a function of the arguments alone."""
    return CASES[name].batch(torch.Generator().manual_seed((seed * 1_000_003 + step) * 64 + rank))


def shard(name: str, model: nn.Module, *, manual: bool = True, reshard: bool | None = None, **options: Any) -> None:
    """`dshard.fully_shard` bottom-up on the model's units, or on its root alone."""
    for unit in CASES[name].units(model) if manual else ():
        dshard.fully_shard(unit, reshard_after_forward=reshard, **options)
    dshard.fully_shard(model, reshard_after_forward=reshard, **options)


@dataclass(frozen=True, slots=True)
class Optim:
    """An optimizer's class by name, and its arguments."""

    name: str = "AdamW"
    # A larger eps than the default: where gradients cancel to rounding, Adam divides rounding by rounding, and then two
    # runs of DDP itself that add in another order are 1e-3 apart. Tests bit for bit take the default.
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 3e-3, "eps": 1e-5})

    def make(self, params: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.name)(params, **self.options)


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is trained.

    Args:
        kind: 'ddp', 'ordered' (DDP that adds gradients in pairs of ranks), 'fsdp2' or 'dshard'.
        manual: Units bottom-up, rather than `fully_shard` on the root alone.
        reshard: `reshard_after_forward`.
        optimizer_first: Make the optimizer ahead of `fully_shard`.
        clip: None, 'torch' or 'dshard': whose `clip_grad_norm_`.
        max_norm: Of the clipping.
        norm_type: Of the clipping.
        num_micro: Batches per step.
        sync_all: Reduce after every micro-batch, rather than after the last.
    """

    kind: str = "dshard"
    manual: bool = True
    reshard: bool | None = None
    optimizer_first: bool = False
    clip: str | None = None
    max_norm: float = 0.5
    norm_type: float = 2.0
    num_micro: int = 1
    sync_all: bool = False

    def __str__(self) -> str:
        units = "manual" if self.manual else "root"
        return f"{units}-reshard={self.reshard}-{'before' if self.optimizer_first else 'after'}"


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a training, on one rank; the weights are full ones."""

    losses: list[float]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    norms: list[float]


def _mean_in_pairs(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook that is as plain as can be: ((rank 0 + rank 1) + (rank 2 + rank 3)) / N."""
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, bucket.buffer())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(oracle.sum_in_pairs(parts) / len(parts))
    return done


def wrap(name: str, model: nn.Module, setup: Setup) -> nn.Module:
    """The model under DDP, FSDP2 or dshard."""
    if setup.kind in ("ddp", "ordered"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch renames the option
            ddp = DistributedDataParallel(model, broadcast_buffers=False)
        if setup.kind == "ordered":
            ddp.register_comm_hook(None, _mean_in_pairs)
        return ddp
    if setup.kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in CASES[name].units(model):
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        shard(name, model, manual=setup.manual, reshard=setup.reshard)
    return model


def train(name: str, setup: Setup, optim: Optim | None = None, *, num_steps: int = 20, seed: int = 0) -> Run:
    """Train on this rank's batches."""
    optim = optim or Optim()
    model = build(name, seed)
    optimizer = optim.make(model.parameters()) if setup.optimizer_first else None
    wrapped: Any = wrap(name, model, setup)
    optimizer = optimizer or optim.make(model.parameters())
    losses: list[float] = []
    norms: list[float] = []
    is_ddp = setup.kind in ("ddp", "ordered")
    for step in range(num_steps):
        optimizer.zero_grad()
        for micro in range(setup.num_micro):
            is_synced = setup.sync_all or micro == setup.num_micro - 1
            if not is_ddp:
                wrapped.set_requires_gradient_sync(is_synced)
            inputs, targets = batch(name, seed, step * setup.num_micro + micro, dist.get_rank())
            with nullcontext() if not is_ddp or is_synced else wrapped.no_sync():
                loss = CASES[name].loss(wrapped(inputs), targets)
                loss.backward()
            losses.append(loss.item())
        if setup.clip:
            clip = dshard.clip_grad_norm_ if setup.clip == "dshard" else nn.utils.clip_grad_norm_
            norm = clip(model.parameters(), setup.max_norm, norm_type=setup.norm_type)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
    return Run(losses, full_weights(model), {n: b.clone() for n, b in model.named_buffers()}, norms)


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Plain copies of all parameters, by name."""
    with torch.no_grad():
        return {
            n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for n, p in model.named_parameters()
        }


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Largest difference of two tensors, relative to the largest magnitude of the second."""
    if not b.numel():
        return 0.0
    scale = b.abs().max().item()
    return (a - b).abs().max().item() / scale if scale else (a - b).abs().max().item()


def worst_difference(run: Run, expected: Run) -> float:
    """The largest relative difference between two runs, over losses, weights, buffers and norms."""
    assert run.weights.keys() == expected.weights.keys()
    assert run.buffers.keys() == expected.buffers.keys()
    pairs = [(run.weights[n], expected.weights[n]) for n in expected.weights]
    pairs += [(run.buffers[n].double(), expected.buffers[n].double()) for n in expected.buffers]
    pairs += [(torch.tensor(run.losses[i]), torch.tensor(x)) for i, x in enumerate(expected.losses)]
    pairs += [(torch.tensor(run.norms[i]), torch.tensor(x)) for i, x in enumerate(expected.norms)]
    return max(relative_difference(a, b) for a, b in pairs)


def is_same(run: Run, expected: Run) -> bool:
    """Whether two runs agree in every bit."""
    return (
        run.losses == expected.losses
        and run.norms == expected.norms
        and all(torch.equal(run.weights[n], w) for n, w in expected.weights.items())
        and all(torch.equal(run.buffers[n], b) for n, b in expected.buffers.items())
    )
