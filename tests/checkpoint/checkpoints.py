"""Models, optimizers and an oracle for tests of checkpoints: what there is, as bytes, read by full tensors alone."""

import functools
import hashlib
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import dshard

FROZEN = (
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint16,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
OPTIMIZERS: dict[str, Any] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.02, foreach=False),
    "adamw-foreach": functools.partial(torch.optim.AdamW, lr=0.02, foreach=True, amsgrad=True),
    "adamw-fused": functools.partial(torch.optim.AdamW, lr=0.02, fused=True),
    "adamw-tensor-lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.02), foreach=False),
    "sgd": functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.02),
    "lbfgs": functools.partial(torch.optim.LBFGS, lr=0.02, max_iter=2),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02),
}
STRATEGIES: tuple[Any, ...] = (
    "full",
    "keep",
    "zero1",
    "zero2",
    "ddp",
    "hybrid",
    {"w0": "ddp", "w1": "zero1", "*": "full"},
    "dim 1",
    "offload",
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model; small and picklable.

    Args:
        shapes: Of its trained parameters `w0`, `w1`, ...
        dtype: Of these.
        frozen: Dtypes of frozen ones.
        tied: Whether `w0` has a second name.
        strided: Whether parameters of several dims are not contiguous.
        seed: Of the values.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32
    frozen: tuple[torch.dtype, ...] = ()
    tied: bool = False
    strided: bool = False
    seed: int = 0


class Bag(nn.Module):
    """Parameters of all kinds, buffers that differ between ranks, a dropout, and extra state."""

    counts: Tensor
    history: Tensor

    def __init__(self, recipe: Recipe, device: str | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(recipe.seed)
        self.drop, self.calls = nn.Dropout(0.5), 0
        for i, shape in enumerate(recipe.shapes):
            value = torch.randn(shape, generator=generator).to(recipe.dtype)
            if recipe.strided and value.dim() > 1:
                value = value.transpose(0, -1).contiguous().transpose(0, -1)
            self.register_parameter(f"w{i}", nn.Parameter(value.to(device) if device else value))
        for i, dtype in enumerate(recipe.frozen):
            raw = torch.randint(0, 100, (5, 3), generator=generator).to(dtype)
            frozen = nn.Parameter(raw.to(device) if device else raw, requires_grad=False)
            self.register_parameter(f"frozen{i}", frozen)
        if recipe.tied:
            self.again = self.w0
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64, device=device))
        self.register_buffer("history", torch.zeros((), dtype=torch.float64, device=device))
        if recipe.tied:
            self.register_buffer("counts_again", self.counts)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "pair": (self.calls, [1.5, None])}

    def set_extra_state(self, state: Any) -> None:
        assert state["pair"] == (state["calls"], [1.5, None])
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.counts += dist.get_rank() + 1
            self.history += x.double().sum()
        total = x.sum() * 0
        for name, p in self.named_parameters():
            if p.requires_grad:
                total = total + self.drop(torch.sin(p.float() * x.mean())).square().sum()
                if name == "w0" and hasattr(self, "again"):
                    total = total + self.again.float().sum() * 0.1
        return total


def hybrid_size() -> int:
    return 2 if dist.get_world_size() % 2 == 0 else 1


def made(recipe: Recipe, strategy: Any, device: str | None = None, **options: Any) -> Any:
    """A sharded model of a recipe."""
    model = Bag(recipe, device)
    if strategy == "dim 1":
        options["shard_placement_fn"] = lambda p: torch.distributed.tensor.Shard(min(1, max(p.dim() - 1, 0)))
    elif strategy == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    elif isinstance(strategy, dict):  # patterns must match something
        names = {name for name, _ in model.named_parameters()}
        options["strategy"] = {key: value for key, value in strategy.items() if key in names or key == "*"}
    else:
        options["strategy"] = f"hybrid({hybrid_size()})" if strategy == "hybrid" else strategy
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return dshard.fully_shard(model, mesh=mesh, **options)


def optimizers_of(kind: str, model: nn.Module) -> Any:
    """What `save` and `load` take."""
    params = [p for p in model.parameters() if p.requires_grad]
    if kind == "none":
        return None
    if kind == "several":
        return [OPTIMIZERS["adamw"](params[::2]), OPTIMIZERS["sgd"](params[1::2] or params[:1])]
    return OPTIMIZERS[kind](params)


def listed(optimizer: Any) -> list[torch.optim.Optimizer]:
    return optimizer if isinstance(optimizer, list) else [] if optimizer is None else [optimizer]


def train(model: Any, optimizer: Any, num_steps: int) -> list[float]:
    losses = []
    for step in range(num_steps):
        x = torch.rand(4, generator=torch.Generator().manual_seed(step * 10 + dist.get_rank()))

        def closure(x: Tensor = x) -> Tensor:
            for each in listed(optimizer):
                each.zero_grad()
            loss = model(x)
            loss.backward()
            return loss

        if optimizer is None:
            losses.append(model(x).item())
        elif isinstance(optimizer, torch.optim.LBFGS):
            losses.append(optimizer.step(closure).item())
        else:
            losses.append(closure().item())
            for each in listed(optimizer):
                each.step()
    return losses


def raw(tensor: Tensor) -> bytes:
    full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().contiguous()
    return full.reshape(-1).view(torch.uint8).numpy().tobytes() if full.numel() else b""


def told(value: Any) -> Any:
    """A value without tensors: of each its dtype, shape and bytes."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), hashlib.sha1(raw(value)).hexdigest()
    if isinstance(value, dict):
        return {str(key): told(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [told(item) for item in value]
    return repr(value)


def everything(model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """All that a checkpoint is to keep, to be compared with `==`; gathers every tensor."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, Any] = {f"model.{name}": told(value) for name, value in model.state_dict(keep_vars=True).items()}
    for i, each in enumerate(listed(optimizer)):
        for j, group in enumerate(each.param_groups):
            found[f"group {i}.{j}"] = {k: told(v) for k, v in group.items() if k != "params"}
            for p in group["params"]:
                found[f"state {i}.{names[id(p)]}"] = told(dict(each.state.get(p, {})))
    return found


def random_states() -> str:
    """Of the generators that a checkpoint keeps."""
    numpy_state = np.random.get_state()  # noqa: NPY002 - the global one
    return hashlib.sha1(repr((torch.get_rng_state().tolist(), random.getstate(), numpy_state)).encode()).hexdigest()
