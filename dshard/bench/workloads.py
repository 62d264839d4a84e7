"""Work besides a GPT's training step: what sharding costs differs with the units, and with what a step does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from dshard.bench.common import Reader, Step
from dshard.bench.models import GPT, Block, Size, shard, training_step
from dshard.bench.waits import watched

_BATCH, _TOKENS = 4, 128
_NUM_MICRO_BATCHES = 4
_NUM_DECODED = 8  # tokens per step
_NUM_EXPERTS = 4
_RANK = 8  # of adapters

Bare = Callable[[], None]  # a step, untimed


class _Residual(nn.Module):
    """Blocks whose results are added to what they were given; each is a unit."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class _SwiGLU(nn.Module):
    """A gated MLP of odd dims, which no number of ranks divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 8 * width // 3 | 1
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _conv(channels: int) -> nn.Module:
    """Two convolutions with batch norm, whose statistics each rank keeps by itself."""
    halves = [
        nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        for _ in range(2)
    ]
    return nn.Sequential(halves[0], nn.ReLU(), halves[1])


class _Experts(nn.Module):
    """Experts with an even share of the tokens each; every expert is a unit, and so is what is around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(_NUM_EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.norm(x).chunk(_NUM_EXPERTS, dim=1)
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)], dim=1)


class _Adapted(Block):
    """A frozen block beside whose MLP an adapter of low rank is trained."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.requires_grad_(requires_grad=False)
        self.adapter = nn.Sequential(nn.Linear(size.width, _RANK, bias=False), nn.Linear(_RANK, size.width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapter(x)


class _Checkpointed(GPT):
    """A GPT that computes each block a second time in backward."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def _adapted(size: Size) -> GPT:
    model = GPT(size).requires_grad_(requires_grad=False)
    model.blocks = nn.ModuleList(_Adapted(size) for _ in range(size.layers))
    return model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)


def _trains_on(*shape: int) -> Callable[[nn.Module, Size], Bare]:
    """A training step on an input of that shape; a dim of -1 is the width of the model."""

    def make(model: nn.Module, size: Size) -> Bare:
        optimizer = _optimizer(model)
        x = torch.randn([_width(model, size) if n < 0 else n for n in shape])

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def _width(model: nn.Module, size: Size) -> int:
    """Features of what a model of `_Residual` takes."""
    return next((p.shape[-1] if p.dim() == 2 else p.shape[0] for p in model.parameters() if p.dim() != 4), size.width)


def _ids(size: Size, num_tokens: int) -> Tensor:
    return torch.randint(0, size.vocab, (_BATCH, num_tokens))


def _trains(model: nn.Module, size: Size) -> Bare:
    return training_step(model, _optimizer(model), _ids(size, _TOKENS + 1))


def _accumulates(model: Any, size: Size) -> Bare:
    """Micro-batches, of which the last one reduces the gradients of all."""
    optimizer, ids = _optimizer(model), _ids(size, _TOKENS + 1)

    def step() -> None:
        for micro, part in enumerate(ids.chunk(_NUM_MICRO_BATCHES)):
            is_last = micro == _NUM_MICRO_BATCHES - 1
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(is_last)
            elif hasattr(model, "require_backward_grad_sync"):  # DDP
                model.require_backward_grad_sync = is_last
            F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _decodes(model: nn.Module, size: Size) -> Bare:
    """Forwards without gradients of a token each, as of a model that keeps what it needs of the tokens before."""
    ids = _ids(size, _NUM_DECODED)

    def step() -> None:
        with torch.no_grad():
            for token in ids.unbind(1):
                model(token[:, None])

    return step


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its units, and what a step of it does.

    Args:
        build: Makes the model; its units are those in ``model.blocks``, and what `inner` finds in each.
        step: Makes a step of the model, in whatever way it was sharded.
        inner: Modules of a block that are units of their own.
        policy: Dtypes to compute and to reduce in.
    """

    build: Callable[[Size], nn.Module]
    step: Callable[[nn.Module, Size], Bare]
    inner: Callable[[Any], Sequence[nn.Module]] = lambda _: ()
    policy: MixedPrecisionPolicy | None = None

    def step_of(self, kind: str, size: Size) -> Step:
        """A step of a freshly built model on CPU, which tells its exposed time where that is known."""
        torch.manual_seed(0)
        plain = self.build(size)
        if self.policy is not None and kind.startswith("unsharded"):
            plain.to(self.policy.param_dtype)
        model = shard(kind, plain, torch.device("cpu"), policy=self.policy, inner=self.inner)
        bare = self.step(model, size)

        def step() -> Reader:
            return watched(kind, model, bare)

        return step


WORKLOADS: dict[str, Workload] = {
    "SwiGLU, odd dims": Workload(
        lambda size: _Residual([_SwiGLU(size.width - 1) for _ in range(size.layers)]),
        _trains_on(_BATCH, _TOKENS, -1),
    ),
    "conv net, batch norm": Workload(
        lambda size: _Residual([_conv(size.width // 8) for _ in range(size.layers)]),
        _trains_on(_BATCH, -1, 16, 16),
    ),
    "150 tiny units": Workload(  # of 8 layers
        lambda size: _Residual([nn.Linear(size.width // 16, size.width // 16) for _ in range(150 * size.layers // 8)]),
        _trains_on(_BATCH, -1),
    ),
    "adapters, frozen base": Workload(_adapted, _trains),
    "4 micro-batches": Workload(GPT, _accumulates),
    "checkpointing": Workload(_Checkpointed, _trains),
    "bf16": Workload(GPT, _trains, policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "experts": Workload(
        lambda size: _Residual([_Experts(size.width // 2) for _ in range(size.layers)]),
        _trains_on(_BATCH, _TOKENS, -1),
        inner=lambda block: block.experts,
    ),
    "decoding": Workload(GPT, _decodes),
}
