"""Layers that transformers drops at random, on each rank others: its models ask whether they are sharded."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dshard
from dshard.testing import World


def wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 16}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return Wav2Vec2Model(
        Wav2Vec2Config(**small, **convolutions, **positions, layerdrop=0.5, mask_time_prob=0.0)
    ).train()


def trained(library: str) -> list[Tensor]:
    """The weights after a few steps in which each rank drops layers of its own."""
    model = wav2vec2()
    shard = dshard.fully_shard if library == "dshard" else torch_fully_shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.encoder.layers:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 800)).last_hidden_state.square().mean().backward()
        optimizer.step()
    return [param.full_tensor().detach().clone() for param in model.parameters()]


def test_dropped_layers_train_as_under_fsdp2(world: World):
    for expected, found in zip(world.run(trained, "fsdp2"), world.run(trained, "dshard"), strict=True):
        for i, (value, other) in enumerate(zip(expected, found, strict=True)):
            assert torch.equal(value, other), i
