"""What dshard itself costs the host: seconds per parameter, in forward, in backward and in the optimizer's step."""

import statistics
import time

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dshard.collectives import ReduceOp, all_reduce
from dshard.planner.profiles import Overhead
from dshard.runtime.module import FSDPModule
from dshard.setup.fully_shard import fully_shard
from dshard.tensor.meshes import group_of

_NUM_LAYERS, _WIDTH = 32, 8  # small enough for nothing but the host to count
_NUM_STEPS = 9


def measure_overhead(mesh: DeviceMesh) -> Overhead:
    """Train a chain of tiny layers with and without dshard, on CPU, where nothing hides what the host does.

    Under `ddp` and without reductions, so that nothing is sent: what is left are the operations on sharded parameters
    and the way of their gradients, which cost the same under all strategies. Of the optimizer's step, AdamW's, all
    counts: that of parameters of a few elements, which the time per byte leaves out.

    Args:
        mesh: Of the ranks that measure.

    Returns:
        Seconds per parameter, on the slowest rank.

    Communicates:
        What `fully_shard` and one step of such a chain do, and an all-reduce of the figures.
    """
    with torch.random.fork_rng(devices=[]):  # a program's random numbers stay what they are
        plain, sharded = _chain(), fully_shard(_chain(), mesh=mesh, strategy="ddp", sync=None)
    assert isinstance(sharded, FSDPModule)
    sharded.set_requires_gradient_sync(False)
    num_params = sum(1 for _ in sharded.parameters())
    (forward_s, backward_s), (plain_forward_s, plain_backward_s) = _medians(sharded), _medians(plain)
    more = forward_s - plain_forward_s, backward_s - plain_backward_s, _step_s(mesh)
    figures = torch.tensor([max(0.0, seconds) / num_params for seconds in more], dtype=torch.float64)
    (slowest,) = all_reduce([figures], group_of(mesh), ReduceOp.MAX, label="plan").wait()
    return Overhead(*slowest.tolist())


def _chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH)) for _ in range(_NUM_LAYERS)))


def _medians(model: nn.Module) -> list[float]:
    """Seconds of its forward and of its backward, after two steps that do not count."""
    x = torch.ones(2, _WIDTH)
    samples = []
    for _ in range(_NUM_STEPS + 2):
        start = time.perf_counter()
        loss = model(x).sum()
        turn = time.perf_counter()
        loss.backward()
        samples.append((turn - start, time.perf_counter() - turn))
        model.zero_grad()
    return [statistics.median(half) for half in zip(*samples[2:], strict=True)]


def _step_s(mesh: DeviceMesh) -> float:
    """Seconds of an optimizer's step on such a chain, cut over the ranks."""
    with torch.random.fork_rng(devices=[]):
        model = fully_shard(_chain(), mesh=mesh, sync=None)
    model(torch.ones(2, _WIDTH)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    samples = []
    for _ in range(_NUM_STEPS + 2):
        start = time.perf_counter()
        optimizer.step()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[2:])
