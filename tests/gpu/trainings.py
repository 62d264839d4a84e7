"""What the ranks of `test_worlds.py` do, on any kind of device: each function runs on every rank."""

import contextlib
import logging
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dshard
from benchmarks.models import Llama, LlamaConfig
from dshard.collectives import watchdog
from dshard.optim import AdamW8bit
from tests.optimizer.random_programs import Model, gradients

NUM_STEPS, TOKENS = 4, 17
CONFIG = LlamaConfig(vocab=64, width=32, layers=3, heads=4, kv_heads=2, hidden=64)
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Setting:
    """A kind of training.

    Args:
        options: Of `fully_shard`, of both libraries.
        checkpoints: Whether blocks are computed again in backward.
        num_micro: Micro-batches of a step, of which the last one alone reduces.
        max_norm: To which gradients are clipped, if they are.
        is_frozen: Whether the embedding and the first block take no gradients.
        compiles: Whether each block is compiled.
        rel: How far the losses of the libraries may be apart.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: bool = False
    num_micro: int = 1
    max_norm: float | None = None
    is_frozen: bool = False
    compiles: bool = False
    rel: float = 1e-6


SETTINGS = {
    "fp32": Setting(),
    "bf16": Setting({"mp_policy": BF16}, rel=1e-3),
    "bf16 reduced in bf16": Setting({"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, rel=1e-3),
    "not resharded": Setting({"reshard_after_forward": False}),
    "checkpointed": Setting(checkpoints=True),
    "clipped": Setting(max_norm=0.5),
    "accumulated": Setting(num_micro=3),
    "frozen": Setting(is_frozen=True),
    "offloaded": Setting({"offload_policy": CPUOffloadPolicy()}, max_norm=0.5),
    "all of it in bf16": Setting({"mp_policy": BF16}, checkpoints=True, num_micro=2, max_norm=0.5, rel=1e-3),
    "compiled": Setting(compiles=True, rel=1e-5),
}


def mesh_of(device: str) -> Any:
    return init_device_mesh(device, (dist.get_world_size(),))


def tokens(step: int, micro: int, rank: int, device: str) -> Tensor:
    """A batch of two sequences, the same on every device."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randint(0, CONFIG.vocab, (2, TOKENS), generator=generator).to(device)


def built(setting: Setting, device: str) -> Llama:
    """The plain model, of the same weights on every device."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(**{**_fields(CONFIG), "checkpointing": setting.checkpoints})).to(device)
    if setting.is_frozen:
        for part in (model.embed, model.blocks[0]):
            part.requires_grad_(False)
    return model


def _fields(config: LlamaConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def sharded(model: Any, library: str, device: str, options: Mapping[str, Any]) -> Any:
    """A model whose blocks are units of their own."""
    shard = torch_fully_shard if library == "FSDP2" else dshard.fully_shard
    for block in model.blocks:
        shard(block, mesh=mesh_of(device), **options)
    return shard(model, mesh=mesh_of(device), **options)


def losses(device: str, library: str, name: str) -> list[float]:
    """The losses of this rank, by step and micro-batch."""
    setting = SETTINGS[name]
    model = built(setting, device)
    if setting.compiles:
        torch._dynamo.reset()
        warnings.simplefilter("ignore")  # of dynamo's own
        for block in model.blocks:
            block.compile(backend="aot_eager")
    model = sharded(model, library, device, setting.options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for step in range(NUM_STEPS):
        for micro in range(setting.num_micro):
            model.set_requires_gradient_sync(micro == setting.num_micro - 1)
            loss = loss_of(model, tokens(step, micro, dist.get_rank(), device)) / setting.num_micro
            loss.backward()
            found.append(loss.item())
        if setting.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), setting.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return found


def loss_of(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def strategies(device: str, *, switches: bool) -> dict[str, list[Tensor]]:
    """The weights after some steps under each strategy; where it `switches`, the model changes over in the middle."""
    found = {}
    for name in ("full", "keep", "zero1", "zero2", "ddp"):
        model = sharded(built(SETTINGS["fp32"], device), "dshard", device, {})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if not switches:
            dshard.set_strategy(model, name)
        for step in range(NUM_STEPS):
            if switches and step == NUM_STEPS // 2:
                dshard.set_strategy(model, name)
            loss_of(model, tokens(step, 0, dist.get_rank(), device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = [param.full_tensor().cpu() for param in model.parameters()]
    return found


def save(device: str, folder: Path) -> list[Tensor]:
    """Train, and save; gives the full values."""
    model = sharded(built(SETTINGS["fp32"], device), "dshard", device, {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, tokens(0, 0, dist.get_rank(), device)).backward()
    optimizer.step()
    dshard.checkpoint.save(folder, model, optimizer)
    return full_values(model, optimizer)


def load(device: str, folder: Path) -> list[Tensor]:
    """Load what any number of ranks saved; gives the full values."""
    torch.manual_seed(1)
    model = sharded(Llama(CONFIG).to(device), "dshard", device, {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dshard.checkpoint.load(folder, model, optimizer)
    return full_values(model, optimizer)


def full_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors: list[Any] = [*model.parameters()]
    for param in model.parameters():
        tensors += [value for value in optimizer.state[param].values() if isinstance(value, dshard.ShardedTensor)]
    return [tensor.full_tensor().detach().cpu() for tensor in tensors]


class Paths(nn.Module):
    """Layers that each forward runs in an order, and as often, as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))

    def forward(self, x: Tensor, path: list[int]) -> Tensor:
        for number in path:
            x = x + torch.tanh(self.layers[number](x))
        return x


def stressed(device: str, *, num_steps: int, synchronizes: bool) -> list[Tensor]:
    """The weights after steps of random paths, accumulations and forwards without gradients.

    Nothing in it reads a value, so the host runs ahead of the device as far as it can, unless it `synchronizes` after
    each call.
    """
    torch.manual_seed(0)
    model: Any = Paths().to(device)
    for layer in model.layers:
        dshard.fully_shard(layer, mesh=mesh_of(device))
    model = dshard.fully_shard(model, mesh=mesh_of(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = random.Random(0)  # alike on all ranks

    def wait() -> None:
        if synchronizes and device == "cuda":
            torch.cuda.synchronize()

    for step in range(num_steps):
        path = [draw.randrange(6) for _ in range(draw.randint(1, 8))]
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(device)
        with torch.no_grad() if draw.random() < 0.2 else contextlib.nullcontext():
            out = model(x, path)
            wait()
        if out.requires_grad:
            with dshard.no_sync(model) if draw.random() < 0.3 else contextlib.nullcontext():
                out.square().mean().backward()
                wait()
        if draw.random() < 0.7 and any(param.grad is not None for param in model.parameters()):
            optimizer.step()
            optimizer.zero_grad()
            wait()
    return [param.full_tensor().cpu() for param in model.parameters()]


def in_two_streams(device: str, *, beside: bool) -> list[Tensor]:
    """The weights after steps of which a part runs in a stream of the program's own, if it is to run `beside`."""
    model = sharded(built(SETTINGS["fp32"], device), "dshard", device, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        with _stream(device) if beside else contextlib.nullcontext():
            loss = loss_of(model, tokens(step, 0, dist.get_rank(), device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().cpu() for param in model.parameters()]


MEMORIES = {"set_allocate_memory_from_process_group_for_comm": (True,), "set_symm_mem_for_comm": ()}


def in_memory(device: str, *, method: str) -> tuple[list[Tensor], list[str]]:
    """The weights after steps, with the buffers of collectives where a method, if any, has them lie; its warnings."""
    model = sharded(built(SETTINGS["bf16"], device), "dshard", device, SETTINGS["bf16"].options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for module in model.modules() if method else ():
            if isinstance(module, dshard.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                getattr(module, method)(*MEMORIES[method])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        loss_of(model, tokens(step, 0, dist.get_rank(), device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().cpu() for param in model.parameters()], [str(warning.message) for warning in told]


@contextmanager
def _stream(device: str) -> Iterator[None]:
    """Another stream, behind the current one, which comes behind it at the end."""
    if device == "cpu":
        yield
        return
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


def other_order(device: str) -> None:
    """Rank 1 runs two blocks the other way round."""
    model = sharded(built(SETTINGS["fp32"], device), "dshard", device, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(_refuse_step)
    if dist.get_rank() == 1:
        model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]
    loss_of(model, tokens(0, 0, 0, device)).backward()
    optimizer.step()


def _refuse_step(*_: object) -> None:
    raise AssertionError("a step of mixed values was applied")


def forward_of_one_block(device: str) -> None:
    """Rank 0 runs the whole model, and rank 1 its last block alone; neither runs a backward."""
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(device)
    for block in model:
        dshard.fully_shard(block, mesh=mesh_of(device))
    dshard.fully_shard(model, mesh=mesh_of(device))
    (model if dist.get_rank() == 0 else model[-1])(torch.ones(2, 8, device=device))


def ends_in_the_middle(device: str) -> None:
    """Rank 1 is killed between a forward and its backward."""
    model = sharded(built(SETTINGS["fp32"], device), "dshard", device, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        loss = loss_of(model, tokens(step, 0, 0, device))
        if dist.get_rank() == 1 and step == 2:
            os.kill(os.getpid(), 9)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


def sleeps_in_the_middle(device: str) -> list[str]:
    """What this rank says while rank 1 sleeps for some seconds ahead of its third step."""
    model = sharded(built(SETTINGS["fp32"], device), "dshard", device, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    known, watchdog._State.after_s = watchdog._State.after_s, 1.0
    watchdog.log.addHandler(handler)
    try:
        for step in range(NUM_STEPS):
            if dist.get_rank() == 1 and step == 2:
                time.sleep(8.0)
            loss = loss_of(model, tokens(step, 0, 0, device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
    finally:
        watchdog.log.removeHandler(handler)
        watchdog._State.after_s = known
    return heard


def hf_llama(device: str, library: str) -> list[float]:
    """The losses of a Llama of transformers, in bf16, checkpointed by its own switch."""
    from transformers import LlamaConfig as HFConfig
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(HFConfig(vocab_size=CONFIG.vocab, num_key_value_heads=2, use_cache=False, **sizes))
    model = model.to(device)
    warnings.simplefilter("ignore")  # it has another name in later releases
    model.gradient_checkpointing_enable({"use_reentrant": False})
    shard: Callable[..., Any] = torch_fully_shard if library == "FSDP2" else dshard.fully_shard
    for layer in model.model.layers:
        shard(layer, mesh=mesh_of(device), mp_policy=BF16)
    shard(model, mesh=mesh_of(device), mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(NUM_STEPS):
        ids = tokens(step, 0, dist.get_rank(), device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def states_of_8_bits(device: str) -> None:
    """AdamW8bit on a device, beside the same over plain parameters there: all bits, with blocks that shards cut."""
    shapes = [(128, 37), (64, 64), (5,)]
    models: list[Any] = [Model(shapes).to(device), Model(shapes).to(device)]
    dshard.fully_shard(models[1], mesh=init_device_mesh(device, (dist.get_world_size(),)))
    optimizers = [AdamW8bit(model.parameters(), lr=0.02, block_size=64) for model in models]
    for step in range(3):
        grads = {i: grad.to(device) for i, grad in gradients(shapes, set(), step).items()}
        for model, optimizer in zip(models, optimizers, strict=True):
            model(grads).backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(p.full_tensor().cpu(), q.cpu())
        for name, value in optimizers[0].state[q].items():
            found = optimizers[1].state[p][name]
            assert torch.equal(getattr(found, "full_tensor", lambda found=found: found)().cpu(), value.cpu()), name
