"""What holds dshard's streams in order, taken out piece by piece: each piece has to be missed.

A mutant is a wait, a `record_stream` or an order of events that is not there any more; the program beside it is one
that needs it. To be applied on a rank, for as long as a program runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import dshard
from dshard.collectives import SideStream
from dshard.collectives.group import Handle
from dshard.tensor.storage import ShardStorage
from dshard.units.copies import Copies, CopyStream
from tests.crossings import program
from tests.crossings.factors import default_row

Patch = Callable[[], Any]


@dataclass(frozen=True)
class Mutant:
    """One piece taken out, and how that is seen.

    Args:
        patch: Takes it out; gives a context manager.
        row: Levels of the program of tests/crossings that needs it; or `runs`.
        names: What the error has to say.
        num_ranks: Of the program.
        runs: A program of its own.
    """

    patch: Patch
    names: tuple[str, ...]
    row: dict[str, str] = field(default_factory=dict)
    num_ranks: int = 2
    runs: Callable[[], object] | None = None

    @property
    def is_offloaded(self) -> bool:
        """Whether its process groups have to know tensors of the CPU."""
        return self.row.get("offload", "none") != "none" or self.runs is not None


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def without_wait(*words: str) -> Patch:
    """No wait for collectives whose name has these words."""
    whole = Handle._await

    def awaited(self: Any) -> None:
        if all(word in self.label for word in words):
            self._works = None
        else:
            whole(self)

    return lambda: replaced(Handle, "_await", awaited)


def without_wait_of_copies() -> Any:
    """The streams of copies between devices do not wait for what the program has issued before."""
    whole = CopyStream.open

    class Hasty(torch.Stream):
        def wait_stream(self, stream: Any) -> None:
            pass

    @contextmanager
    def opened(self: Any) -> Iterator[None]:
        known = self._stream
        ids = {"stream_id": known.stream_id, "device_index": known.device_index, "device_type": known.device_type}
        with replaced(self, "_stream", torch.Stream.__new__(Hasty, **ids)), whole(self):
            yield

    return replaced(CopyStream, "open", opened)


def without_record_stream() -> Any:
    return replaced(torch.Tensor, "record_stream", lambda *_: None)


def without_arrivals(method: str) -> Patch:
    """That method of copies does not wait until shards at home may be written to."""
    whole = getattr(Copies, method)

    def hasty(self: Any) -> None:
        self._arrivals.clear()
        whole(self)

    return lambda: replaced(Copies, method, hasty)


def without_marks() -> Any:
    """The stream of gathers beside the computation is behind nothing."""
    return replaced(SideStream, "mark", lambda _: None)


def without_wait_ahead_of_writes() -> Any:
    return replaced(ShardStorage, "_await_reader", lambda _: None)


def _mesh() -> Any:
    return init_device_mesh("sim", (dist.get_world_size(),))


def _offloaded() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return dshard.fully_shard(model, mesh=_mesh(), offload_policy=CPUOffloadPolicy())


def writes_at_home() -> None:
    """Write to shards on the host right after their gather has begun."""
    model = _offloaded()
    x = torch.ones(2, 64, device="sim")
    model(x)
    for _ in range(3):
        model.unshard()
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().mul_(2)
        model.reshard()
        torch.sim.synchronize()  # type: ignore[attr-defined]
    model(x).sum().item()


def writes_after_discard() -> None:
    """The same, after a gather that nobody has waited for was given up."""
    model = _offloaded()
    x = torch.ones(2, 64, device="sim")
    model(x)
    for _ in range(3):
        model.unshard(async_op=True)
        model.reshard()
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().mul_(2)
        torch.sim.synchronize()  # type: ignore[attr-defined]
    model(x).sum().item()


def evaluates() -> None:
    model = _offloaded()
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 64, device="sim"))


def drops_gradients() -> None:
    """Drop gradients that are on their way home, and go on."""
    model = _offloaded()
    for _ in range(3):
        model(torch.ones(2, 64, device="sim")).sum().backward()
        model.zero_grad()
    model(torch.ones(2, 64, device="sim")).sum().item()


def _blocks() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(3))).to("sim")
    for block in model:
        dshard.fully_shard(block, mesh=_mesh())
    return dshard.fully_shard(model, mesh=_mesh())


def trains_blocks() -> None:
    """Units of several parameters, which backward gathers anew."""
    model = _blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 64, device="sim")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def writes_to_what_is_gathered_ahead() -> None:
    """Write to weights of a block while the one before it computes."""
    model = _blocks()

    def write(*_: Any) -> None:
        with torch.no_grad():
            model[1][0].weight.mul_(0.9)

    model[0][1].register_forward_hook(write)
    for _ in range(3):
        model(torch.ones(2, 64, device="sim")).sum().backward()


OFFLOAD = {"offload": "CPUOffloadPolicy"}
MUTANTS: dict[str, Mutant] = {
    "wait for a gather": Mutant(without_wait("all-gather of 'Net'"), ("all_gather", "Net")),
    "wait for a gather in backward": Mutant(
        without_wait("all-gather of 'blocks.0'"), ("all_gather", "blocks.0"), {"units": "blocks"}
    ),
    "wait for a reduction": Mutant(
        without_wait("reduce-scatter of"), ("reduce_scatter", "dshard::reduce "), {"reduction": "divide factor"}
    ),
    "wait for an all-reduce over replicas": Mutant(
        without_wait("all-reduce of"), ("all_reduce",), {"mesh": "HSDP", "reduction": "divide factor"}, num_ranks=4
    ),
    "wait for a norm": Mutant(without_wait("clip_grad_norm_"), ("all_reduce",), {"clip": "dshard"}),
    "wait for a broadcast of weights": Mutant(without_wait("weights"), ("broadcast",), {"sync": "broadcast"}),
    "wait for a broadcast of buffers": Mutant(without_wait("buffers"), ("broadcast",), {"buffers": "broadcast"}),
    "wait for a slice": Mutant(
        without_wait("all-gather of", ", slice "),
        ("all_gather", ", slice "),
        {"strategy": "split(2)", "units": "blocks"},
    ),
    "wait for neighbours' parts": Mutant(
        without_wait("among 2"), ("all_gather",), {"strategy": "reshard=2"}, num_ranks=4
    ),
    "wait for a move to another strategy": Mutant(without_wait("move of"), ("all_gather",), {"switch": "to a mix"}),
    "copies in wait for the program": Mutant(  # of one rank, which uses them where they come to lie
        without_wait_of_copies, ("copy_",), num_ranks=1, runs=evaluates
    ),
    "copies home wait for the reduction": Mutant(without_wait_of_copies, ("copy_ to the host",), OFFLOAD),
    "memory of copies home is recorded": Mutant(without_record_stream, ("no record_stream",), runs=drops_gradients),
    "gathers beside come behind what is marked": Mutant(without_marks, ("all_gather",), runs=trains_blocks),
    "writes come behind what is sent": Mutant(
        without_wait_ahead_of_writes, ("all_gather", "mul"), runs=writes_to_what_is_gathered_ahead
    ),
    "wait for arrivals": Mutant(without_arrivals("wait"), ("pinned memory",), runs=writes_at_home),
    "wait for arrivals of what is given up": Mutant(
        without_arrivals("discard"), ("pinned memory",), runs=writes_after_discard
    ),
}


def run(name: str, *, mutated: bool) -> None:
    """The program of a mutant, with what it needs or without."""
    mutant = MUTANTS[name]

    def go() -> None:
        if mutant.runs is not None:
            mutant.runs()
        else:
            program.run({**default_row(), **mutant.row, "device": "sim"})
        torch.sim.synchronize()  # type: ignore[attr-defined]

    if not mutated:
        go()
        return
    with mutant.patch():
        go()
