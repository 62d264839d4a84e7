"""Pretraining of a Llama: meta init, bf16, checkpointed blocks, accumulation, clipping, cosine, DCP, HSDP."""

import itertools
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


@dataclass
class Config:
    """One run."""

    steps: int = 6
    total_steps: int = 6  # of the schedule
    accumulation: int = 2
    global_batch: int = 8
    bf16: bool = True
    replicas: int = 1
    reshard: bool | int = True  # after forward
    every_micro_batch_reduces: bool = False  # within the replicas
    from_seed_checkpoint: bool = True
    save: str = ""
    asynchronous: bool = False
    load: str = ""
    vocab: int = 64
    dim: int = 32
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    length: int = 16


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.wq = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = self.rotate(q, angles).transpose(1, 2), self.rotate(k, angles).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(config), nn.RMSNorm(config.dim)
        self.w1, self.w3 = (nn.Linear(config.dim, 2 * config.dim, bias=False) for _ in range(2))
        self.w2, self.ffn_norm = nn.Linear(2 * config.dim, config.dim, bias=False), nn.RMSNorm(config.dim)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    angles: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.layers)})
        self.norm, self.output = nn.RMSNorm(config.dim), nn.Linear(config.dim, config.vocab, bias=False)
        self.register_buffer("angles", self.rotary(), persistent=False)

    def rotary(self) -> Tensor:
        head_dim = self.config.dim // self.config.heads
        rates = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.get_default_dtype()) / head_dim)
        return torch.outer(torch.arange(self.config.length, dtype=rates.dtype), rates)

    def init_weights(self) -> None:
        with torch.device(self.angles.device):
            self.angles = self.rotary()
        nn.init.normal_(self.tok_embeddings.weight)
        for number, block in enumerate(self.layers.values()):
            for module in block.modules():
                if isinstance(module, nn.RMSNorm):
                    module.reset_parameters()
                elif isinstance(module, nn.Linear):
                    nn.init.trunc_normal_(module.weight, std=0.1 / (2 * (number + 1)) ** 0.5)
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.output.weight, std=self.config.dim**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.angles)
        return self.output(self.norm(x))


class TrainState(Stateful):
    """All that is in a checkpoint."""

    def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        self.model, self.optimizer, self.scheduler, self.step = model, optimizer, scheduler, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "sched": self.scheduler.state_dict(), "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )
        self.scheduler.load_state_dict(state_dict["sched"])
        self.step = state_dict["step"]


def parallelize(model: Llama, config: Config, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    if config.replicas > 1:
        shape = config.replicas, world_size // config.replicas
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    options: dict[str, Any] = {"mesh": mesh}
    if config.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    for name, block in model.layers.items():
        model.layers[name] = checkpoint_wrapper(block, preserve_rng_state=False)
    blocks = list(model.layers.values())
    fully_shard(model.tok_embeddings, **options)
    for block in blocks:
        fully_shard(block, **options, reshard_after_forward=config.reshard if block is not blocks[-1] else False)
    fully_shard([model.norm, model.output], **options, reshard_after_forward=False)
    fully_shard(model, **options)
    assert isinstance(model, FSDPModule)
    model.set_modules_to_forward_prefetch([model.tok_embeddings])
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def build(config: Config, rank: int, world_size: int) -> Llama:
    with torch.device("meta"):
        model = Llama(config)
    parallelize(model, config, world_size)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    if config.from_seed_checkpoint:  # made on rank 0 alone
        seed: dict[str, Any] = {}
        if rank == 0:
            torch.manual_seed(1)
            whole = Llama(config)
            whole.init_weights()
            seed = whole.state_dict()
        set_model_state_dict(model, seed, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


def micro_batches(config: Config, step: int, rank: int, world_size: int) -> Any:
    generator = torch.Generator().manual_seed(1000 + step)
    rows = torch.randint(config.vocab, (config.global_batch, config.length + 1), generator=generator)
    rows[:, 1::2] = rows[:, ::2][:, : config.length // 2] // 2  # something to learn
    for micro in rows.chunk(config.accumulation):
        own = micro.chunk(world_size)[rank]
        yield own[:, :-1], own[:, 1:]


def train_step(
    model: Any, optimizer: Any, scheduler: Any, batches: list[Any], every_micro_batch_reduces: bool
) -> tuple[float, float]:
    optimizer.zero_grad()
    total = torch.zeros(())
    for number, (inputs, labels) in enumerate(batches):
        is_last = number == len(batches) - 1
        if every_micro_batch_reduces:
            model.set_requires_all_reduce(is_last)
        else:
            model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()) / len(batches)
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    optimizer.step()
    scheduler.step()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item(), norm.item()


def cosine(config: Config, step: int) -> float:
    if step < 2:
        return (step + 1) / 2
    return 0.1 + 0.45 * (1 + math.cos(math.pi * step / config.total_steps))


def train(config: Config, state: TrainState, log: dict[str, Any]) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group: Any = dist.new_group(backend="gloo") if config.asynchronous else None
    saving: Any = None
    while state.step < config.steps:
        batches = list(micro_batches(config, state.step, rank, world_size))
        loss, norm = train_step(
            state.model, state.optimizer, state.scheduler, batches, config.every_micro_batch_reduces
        )
        log["losses"].append(loss)
        log["norms"].append(norm)
        log["rates"].append(state.scheduler.get_last_lr()[0])
        state.step += 1
        if config.asynchronous and state.step < config.steps:
            if saving is not None:
                saving.result()  # two at a time would mix their messages
            where = f"{config.save}/{state.step}"
            saving = dcp.async_save({"app": state}, checkpoint_id=where, process_group=group)
    if group is not None:
        saving.result()
        dist.destroy_process_group(group)


def main(**options: Any) -> dict[str, Any]:
    config = Config(**options)
    model = build(config, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(config, step))
    state = TrainState(model, optimizer, scheduler)
    if config.load:
        dcp.load({"app": state}, checkpoint_id=config.load)
    log: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    train(config, state, log)
    if config.save and not config.asynchronous:
        dcp.save({"app": state}, checkpoint_id=config.save)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {**log, "weights": weights}
