"""`reshard_after_forward` as a number of ranks: backward gathers among a few neighbours."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import dshard
from dshard.testing import WorldPool
from dshard.units.copies import Residency

WIDTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.1))  # 0-d: whole on every rank
        self.odd = nn.Parameter(torch.linspace(-1, 1, 7 * 3).view(7, 3))  # uneven on 2 and 4 ranks

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x)))) + self.odd.sin().sum()


def make() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(3)])


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()


def shard(net: Any, reshard: Any, **options: Any) -> Any:
    for block in net:
        dshard.fully_shard(block, reshard_after_forward=reshard, **options)
    return dshard.fully_shard(net, **options)


def train(net: Any, num_steps: int = 3, *, recomputes: bool = False) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(num_steps):
        x = batch(step, dist.get_rank())
        for block in net:
            x = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def differences(net: nn.Module, other: nn.Module) -> list[str]:
    pairs = zip(net.named_parameters(), other.parameters(), strict=True)
    return [n for (n, a), b in pairs if not torch.equal(a.full_tensor(), b.full_tensor())]


OPTIONS: dict[str, Any] = {
    "plain": dict,
    "mixed precision": lambda: {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "replicas": lambda: {"mesh": init_device_mesh("cpu", (1, 4))},
    "other dims": lambda: {
        "shard_placement_fn": lambda p: (Shard(1) if p.shape[0] % 3 else Replicate()) if p.dim() == 2 else None
    },
}


def beside_full_resharding(name: str, recomputes: bool) -> list[str]:
    few, all_ = shard(make(), 2, **OPTIONS[name]()), shard(make(), True, **OPTIONS[name]())
    losses = train(few, recomputes=recomputes), train(all_, recomputes=recomputes)
    wrong = [] if losses[0] == losses[1] else [f"losses {losses}"]
    few.set_reshard_after_forward(True)
    all_.set_reshard_after_forward(2)  # which FSDP2 refuses
    losses = train(few), train(all_)
    wrong += [] if losses[0] == losses[1] else [f"losses after the switch {losses}"]
    twin = copy.deepcopy(all_)
    train(twin, 1)
    train(all_, 1)
    return wrong + differences(all_, twin)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_no_bit_depends_on_how_many_ranks_hold_what_backward_gathers(worlds: WorldPool, name, recomputes):
    assert worlds.run(4, beside_full_resharding, name, recomputes) == [[] for _ in range(4)]


def bytes_by_group(reshard: Any) -> dict[int, int]:
    net = shard(make(), reshard)
    with dshard.CommTrace() as trace:
        net(batch(0, dist.get_rank())).sum().backward()
    found: dict[int, int] = {}
    for record in trace.select("all_gather"):
        found[record.num_ranks] = found.get(record.num_ranks, 0) + record.payload_bytes
    return found


def test_backward_sends_its_bytes_among_the_few(worlds: WorldPool):
    ranks = [worlds.run(4, bytes_by_group, reshard) for reshard in (True, 2)]
    total = 4 * sum(p.numel() for p in make().parameters())
    both, forward, backward = (
        sum(r.get(n, 0) for r in found) for found, n in [(ranks[0], 4), (ranks[1], 4), (ranks[1], 2)]
    )
    assert both == 2 * 3 * total  # each rank receives all but its own part, twice a step
    assert forward == 3 * total
    assert backward == 4 * total // 2  # each of four receives half


def kept_bytes() -> list[Any]:
    """What a rank holds between forward and backward, and after."""
    net = shard(make(), 2)
    units = [unit for unit in net._context().units if unit.params]
    loss = net(batch(0, dist.get_rank())).sum()
    parts = [sum(p.nbytes for p in unit.copies._parts[0]) for unit in units]
    gathered = [unit.is_gathered for unit in units]
    loss.backward()
    after = [unit.copies.residency is Residency.IN_PARTS or unit.is_gathered for unit in units]
    with torch.no_grad():
        net(batch(0, 0))
    return [parts, gathered, after, [unit.copies.residency is Residency.IN_PARTS for unit in units]]


def test_half_of_a_unit_is_kept_for_backward_and_nothing_after_it_or_without_autograd(worlds: WorldPool):
    block = make()[0]
    total = 4 * sum(p.numel() for p in block.parameters())
    for parts, gathered, after, in_eval in worlds.run(4, kept_bytes):
        assert all(total // 2 - 24 <= p <= total // 2 + 24 for p in parts)
        assert len(parts) == 3
        assert gathered == after == in_eval == [False] * 3


def written_between() -> bool:
    """A write between forward and backward: what was kept is stale."""
    few, all_ = shard(make(), 2), shard(make(), True)
    grads = []
    for net in (few, all_):
        x = batch(0, dist.get_rank())
        loss = net(x).square().sum()
        with torch.no_grad():
            net[0].up.weight.mul_(2)
        try:
            loss.backward()
        except RuntimeError as error:  # autograd's own complaint about a saved weight that was modified
            grads.append(str(error).split(":")[0])
            continue
        grads.append(x.grad)
    same = grads[0] == grads[1] if isinstance(grads[0], str) else torch.equal(*grads)
    return bool(same)


def test_a_write_between_forward_and_backward_is_seen_alike(worlds: WorldPool):
    assert worlds.run(4, written_between) == [True] * 4


@pytest.mark.parametrize(
    ("number", "error"),
    [(3, dshard.PlacementError), (5, dshard.PlacementError), (0, dshard.ArgumentError), ("2", dshard.ArgumentError)],
)
def test_a_number_that_does_not_divide_the_ranks_is_refused(worlds: WorldPool, number, error):
    assert worlds.run(4, refused, number, error) == [True] * 4


def refused(number: Any, error: type[Exception]) -> bool:
    net = make()
    with pytest.raises(error, match="a number that divides that of the ranks that share a parameter"):
        dshard.fully_shard(net, reshard_after_forward=number)
    assert type(net) is nn.Sequential
    dshard.fully_shard(net)
    with pytest.raises(ValueError, match=r"set_reshard_after_forward: reshard_after_forward must be .*, but it is"):
        net.set_reshard_after_forward(number)
    return True
