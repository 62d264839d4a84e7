"""torch's FSDP2 on the simulated accelerator: no race is reported for it, and one is for each wait taken out of it.

FSDP2 is right on GPUs; what is reported for it would be the simulator's fault, and what is not reported without one of
its waits would be a hole in it. Left out are waits that the order of the rest makes superfluous, of which FSDP2 has
some: `all_gather_stream.wait_*` beside the same of the copy-in stream (which the gather waits for anyway), the last
reduce-scatter's event in `_root_post_backward_final_callback` behind `finalize_backward` (a later event of the same
stream), `_wait_for_post_backward` of a group that runs once a step.
"""

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn import functional as F

from tests.accelerator.device import MODES, Stream
from tests.accelerator.rooms import error_of, settle, simulated
from tests.offload.test_offload import mesh_of

WIDTH, VOCAB = 16, 32


class Block(nn.Module):
    """Attention of two heads and a layer of twice the width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.softmax((q @ k.transpose(-1, -2)) / 3, -1) @ v
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))  # no view, of which FSDP2 would warn


def build(kind: str, how: str) -> Any:
    torch.manual_seed(0)
    model: Any = Transformer().to(kind)
    options: dict[str, Any] = {"mesh": mesh_of(kind, replicas=2 if "hsdp" in how else 1)}
    if "bf16" in how:
        options["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.bfloat16 if "reduced" in how else torch.float32
        )
    if "kept" in how:
        options["reshard_after_forward"] = False
    if "offload" in how and kind == "sim":
        options["offload_policy"] = CPUOffloadPolicy()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if kind == "cpu":  # gloo knows no AVG
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model


def train(kind: str, how: str) -> list[float]:
    """Losses and norms of three steps, and a sum over each parameter at the end."""
    model = build(kind, how)
    optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = torch.randint(0, VOCAB, (6, 2, 9), generator=generator).to(kind)  # a copy stops the host
    found = []
    for step in range(3):
        for micro in range(2 if "micro" in how else 1):
            model.set_requires_gradient_sync("micro" not in how or micro == 1)
            ids = batches[2 * step + micro]
            loss = F.cross_entropy(model(ids[:, :-1]).float(), ids[:, 1:].flatten())
            loss.backward()
            found.append(loss.detach())
        if "clip" in how:
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            found.append(norm.full_tensor())
        optim.step()
        optim.zero_grad()
    found += [param.detach().to(kind).full_tensor().double().square().sum() for param in model.parameters()]
    return [value.item() for value in found]


def run(kind: str, how: str, modes: tuple[tuple[str, int], ...] = (), taken: str = "") -> list[Any]:
    """What training gives in each mode, or the text of what it raises."""
    if kind == "cpu":
        return [train(kind, how)]
    out: list[Any] = []
    for mode, seed in modes:
        with simulated(mode, seed=seed, idle_s=0.003, bound_s=10.0) as device, without(taken):
            try:
                out.append(train(kind, how))
            except RuntimeError as error:
                out.append(str(error))
            settle(device)
    return out


HOWS = (
    *((2, how) for how in ("plain", "bf16", "kept", "micro", "offload", "clip", "bf16 reduced clip micro")),
    *((4, how) for how in ("hsdp", "bf16 reduced hsdp")),
)


# Not bit for bit: torch's optimizer and clipping take all parameters at once on "sim" and one by one on the CPU, and
# where gloo sums and FSDP2 divides later, "simccl" averages in float32, which in bf16 is one rounding less.
@pytest.mark.parametrize(("num_ranks", "how"), HOWS)
def test_fsdp2_is_reported_for_nothing_and_trains_as_on_the_cpu(simulators, worlds, num_ranks, how):
    expected = worlds.run(num_ranks, run, "cpu", how)
    modes = tuple(zip(MODES, range(4), strict=True)) if num_ranks == 2 else (("random", 0), ("lazy", 1))
    found = simulators.run(num_ranks, run, "sim", how, modes)
    for rank in range(num_ranks):
        for mode, values in zip(modes, found[rank], strict=True):
            assert isinstance(values, list), (mode, values)
            assert values == found[rank][0], mode  # whatever ran when
            assert values == pytest.approx(expected[rank][0], rel=2e-2 if "bf16" in how else 1e-6), mode


# What FSDP2 is not to do: a wait, by the function and the line that ask for it; or to keep something alive.
TAKEN_OUT = {
    "the gather behind its copy-in": "foreach_all_gather: all_gather_stream.wait_stream(all_gather_copy_in_stream)",
    "the copy-out behind the gather": "foreach_all_gather_copy_out: .wait_event(all_gather_event)",
    "the next copy-in behind the copy-out": "_wait_all_gather_streams_on_event: all_gather_copy_in_stream.wait_event",
    "the copy-in of backward behind the last copy-out": "_post_forward: all_gather_copy_in_stream.wait_event(",
    "the copy-in behind the optimizer": "_root_pre_forward: all_gather_copy_in_stream.wait_stream(current_stream)",
    "the reduce-scatter behind the gradients": "foreach_reduce: reduce_scatter_stream.wait_stream(current_stream)",
    "the end of a reduce-scatter's input": "post_backward: .wait_event(oldest.event)",
    "the optimizer behind the gradients' cast": "finalize_backward: current_stream().wait_event(event)",
    "the input of a reduce-scatter": "ReduceScatterState",
    "the output of a gather": "AllGatherState",
}
TAKEN_OUT_OF_HSDP = {
    "the all-reduce behind the reduce-scatter": "foreach_reduce: all_reduce_stream.wait_stream(reduce_scatter_stream)",
    "the optimizer behind the all-reduce": "finalize_backward: current_stream().wait_event(event)",
    "the input of an all-reduce": "AllReduceState",
}


@contextmanager
def without(taken: str) -> Iterator[None]:
    """FSDP2 without a wait or a tensor kept alive."""
    function, _, line = taken.partition(": ")
    times = 0

    def is_taken(frame: FrameType) -> bool:
        nonlocal times
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        found = frame.f_code.co_name == function and line in text
        times += found
        return found

    class Hasty(Stream):
        def wait_event(self, event: Any) -> None:
            if not is_taken(sys._getframe(1)):
                super().wait_event(event)

        def wait_stream(self, stream: Any) -> None:
            if not is_taken(sys._getframe(1)):
                super().wait_stream(stream)

    def current(_: object = None) -> Any:
        known = torch.accelerator.current_stream()
        ids = {"stream_id": known.stream_id, "device_index": known.device_index, "device_type": known.device_type}
        return torch.Stream.__new__(Hasty, **ids)

    with pytest.MonkeyPatch.context() as patch:
        if line:
            patch.setattr(torch.sim, "Stream", Hasty)  # type: ignore[attr-defined]
            patch.setattr(torch.sim, "current_stream", current)  # type: ignore[attr-defined]
        elif taken:
            known = getattr(_fsdp_param_group, taken)

            def forgetful(kept: Any, event: Any) -> Any:
                nonlocal times
                times += 1
                return known(None, event)

            patch.setattr(_fsdp_param_group, taken, forgetful)
        yield
        assert times or not taken, f"{taken} is nowhere in FSDP2"


def is_of_two_sides(text: str) -> bool:
    """Whether it is a race, and of both uses it says the range that they are in and a line."""
    sides = [side for side in text.split("\n  '") if " on stream " in side.partition("\n")[0]]
    return text.startswith("race") and len(sides) == 2 and all(" [" in side and ".py:" in side for side in sides)


@pytest.mark.parametrize("name", TAKEN_OUT)
def test_fsdp2_without_a_wait_is_found(simulators, name):
    for [found] in simulators.run(2, run, "sim", "bf16 reduced", (("random", 0),), TAKEN_OUT[name]):
        assert isinstance(found, str), found
        assert is_of_two_sides(found), found


@pytest.mark.parametrize("name", TAKEN_OUT_OF_HSDP)
def test_fsdp2_of_replicas_without_a_wait_is_found(simulators, name):
    for [found] in simulators.run(4, run, "sim", "bf16 reduced hsdp", (("random", 0),), TAKEN_OUT_OF_HSDP[name]):
        assert isinstance(found, str), found
        assert is_of_two_sides(found), found


def train_hastily() -> str:
    known = _fsdp_param_group.FSDPParamGroup.finalize_backward

    def hasty(group: Any) -> None:
        for param in group.fsdp_params:
            param.grad_offload_event = None
        known(group)

    with simulated("lazy"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_param_group.FSDPParamGroup, "finalize_backward", hasty)
        return error_of(lambda: train("sim", "offload"))


def test_an_optimizer_on_the_cpu_that_does_not_wait_for_its_gradients_is_found(simulators):
    """It reads poison, and writes to parameters that the forward's copies have still to read, which is what is told."""
    for text in simulators.run(2, train_hastily):
        assert "race: the host wrote to pinned memory that a copy had still to read [FSDP::all_gather" in text, text
