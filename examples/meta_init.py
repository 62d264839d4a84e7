"""Build a model without memory, shard it, then initialize: torchrun --nproc-per-node 2 examples/meta_init.py."""

import torch
import torch.distributed as dist
from torch import nn

import dshard


def build() -> nn.Module:
    """A model that would be too large for one rank."""
    return nn.Sequential(nn.Embedding(1000, 64), *[nn.Linear(64, 64) for _ in range(8)], nn.Linear(64, 1000))


def main() -> None:
    """No rank ever holds more than its shards and one full parameter."""
    dist.init_process_group("gloo")
    with torch.device("meta"):
        model = build()
    dshard.fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model:
        module.reset_parameters()

    torch.manual_seed(0)
    twin = build()  # for the comparison alone
    same = all(torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    if dist.get_rank() == 0:
        held = sum(p.to_local().numel() for p in model.parameters())
        print(f"equal to the eager initialization bit for bit: {same}; this rank holds {held:,} elements")
    assert same
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
