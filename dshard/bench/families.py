"""Five models of different build, what each trains on, and the units that a person would make of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dshard
from dshard.bench.models import GPT, Size, mesh_of

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Family:
    """A model, and how a person would shard it. All functions travel to the ranks by their names.

    Args:
        build: Makes the model.
        by_hand: Modules, or lists of modules, that get a `fully_shard` of their own before the root does.
        stated: What `by_hand` is, in words.
        batch: Makes inputs and targets.
        loss: Of the model, inputs and targets.
        needs: The package that `build` imports, if it does.
    """

    build: Callable[[], nn.Module]
    by_hand: Callable[[Any], Sequence[Any]]
    stated: str
    batch: Callable[[], Batch]
    loss: Callable[[Any, Tensor, Tensor], Tensor]
    needs: str | None = None

    @property
    def missing(self) -> str | None:
        """The package that it needs and that is not installed, if there is one."""
        return self.needs if self.needs is not None and find_spec(self.needs) is None else None


class Residual(nn.Module):
    """Two 3 x 3 convolutions and a way around them."""

    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, wider, 3, stride, 1, bias=False), nn.BatchNorm2d(wider)
        self.conv2, self.norm2 = nn.Conv2d(wider, wider, 3, 1, 1, bias=False), nn.BatchNorm2d(wider)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != wider:
            self.downsample = nn.Sequential(nn.Conv2d(channels, wider, 1, stride, bias=False), nn.BatchNorm2d(wider))

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, channels, height, width) to (batch, wider, height / stride, width / stride)."""
        around = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(x)) + around)


class ResNet(nn.Module):
    """ResNet-18, named as torchvision names it, for small images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(Residual(64, 64, 1), Residual(64, 64, 1))
        self.layer2 = nn.Sequential(Residual(64, 128, 2), Residual(128, 128, 1))
        self.layer3 = nn.Sequential(Residual(128, 256, 2), Residual(256, 256, 1))
        self.layer4 = nn.Sequential(Residual(256, 512, 2), Residual(512, 512, 1))
        self.fc = nn.Linear(512, 100)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def _llama() -> nn.Module:
    """25 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config)


def _t5() -> nn.Module:
    """21 million parameters; encoder, decoder and head share one embedding."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=2048, d_model=384, d_kv=64, d_ff=1024, num_layers=6, num_heads=6, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def _layers(num_layers: int) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(num_layers)])


def _gpt_parts(m: Any) -> list[Any]:
    return [m.embed, *m.blocks, [m.norm, m.head]]


def _llama_parts(m: Any) -> list[Any]:
    return [m.model.embed_tokens, *m.model.layers, [m.model.norm, m.lm_head]]


def _t5_parts(m: Any) -> list[Any]:
    return [*m.encoder.block, *m.decoder.block]


def _resnet_parts(m: Any) -> list[Any]:
    return [[m.conv1, m.bn1, m.layer1], *m.layer2, *m.layer3, *m.layer4]


def _groups(size: int, m: Any) -> list[Any]:
    """Neighbours in groups of `size`."""
    modules = list(m)
    return [modules[i : i + size] for i in range(0, len(modules), size)]


def _tokens(batch: int, tokens: int) -> Batch:
    ids = torch.randint(1, 2048, (batch, tokens + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _images() -> Batch:
    return torch.randn(8, 3, 32, 32), torch.randint(0, 100, (8,))


def _vectors() -> Batch:
    return torch.randn(32, 64), torch.randn(32, 64)


def _gpt_loss(model: Any, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def _hugging_face_loss(model: Any, ids: Tensor, targets: Tensor) -> Tensor:
    return model(input_ids=ids, labels=targets).loss


def _image_loss(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def _vector_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def stack(num_layers: int) -> Family:
    """Layers of 4,160 parameters each, by hand in ten groups."""
    size = num_layers // 10
    return Family(
        build=partial(_layers, num_layers),
        by_hand=partial(_groups, size),
        stated=f"groups of {size} layers",
        batch=_vectors,
        loss=_vector_loss,
    )


FAMILIES = {
    "GPT": Family(
        build=partial(GPT, Size()),
        by_hand=_gpt_parts,
        stated="each block; embedding; norm and head",
        batch=partial(_tokens, 2, 64),
        loss=_gpt_loss,
    ),
    "Llama": Family(
        build=_llama,
        by_hand=_llama_parts,
        stated="each layer; embedding; norm and head",
        batch=partial(_tokens, 2, 64),
        loss=_hugging_face_loss,
        needs="transformers",
    ),
    "T5": Family(
        build=_t5,
        by_hand=_t5_parts,
        stated="each block; shared embedding and last norms with the root",
        batch=partial(_tokens, 2, 48),
        loss=_hugging_face_loss,
        needs="transformers",
    ),
    "ResNet": Family(
        build=ResNet,
        by_hand=_resnet_parts,
        stated="stem and first stage; then each residual block; fc with the root",
        batch=_images,
        loss=_image_loss,
    ),
    "500 layers": stack(500),
}


def model_and_step(family: Family, *, by_hand: bool) -> tuple[Any, Callable[[], None]]:
    """A model on CPU, sharded bottom-up on the units of a person or on the root alone, and an AdamW step of it."""
    mesh = mesh_of(torch.device("cpu"))
    torch.manual_seed(0)
    model: Any = family.build()
    for part in family.by_hand(model) if by_hand else ():
        dshard.fully_shard(part, mesh=mesh)
    dshard.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = family.batch()

    def step() -> None:
        family.loss(model, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step
