"""Virtual ranks: those that a training program has, whatever the number of processes that play them."""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dshard.errors import StateError
from dshard.tensor.strides import bytes_of


class VirtualRanks:
    """The virtual ranks of a model, and which of them this process plays, one after the other.

    Args:
        total: How many there are.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.ranks = range(0)  # of this process; set when a loop begins
        self.at = 0  # the one that is played, or behind the last of them
        self.is_open = False  # whether a loop runs
        self.has_failed = False  # whether a backward in it has raised
        self.closed: set[Any] = set()  # units that have had the last gradient of the rank that is played
        self.random = RandomStates()
        self.buffers = BufferCopies()

    @property
    def is_last(self) -> bool:
        """Whether no further one is to bring gradients."""
        return self.at >= self.ranks.stop - 1

    @staticmethod
    def num_threads(device_type: str) -> int:
        """Number of threads of a CPU's operations, on which bits depend; 0 elsewhere."""
        return torch.get_num_threads() if device_type == "cpu" else 0

    def check_open(self, who: str, what: str) -> None:
        """Raise unless a loop runs."""
        if not self.is_open:
            raise StateError(
                f"{who}: a model with virtual_ranks is trained within the loop over them, but {what} runs outside. "
                "Put it into `for rank in dshard.virtual_ranks(model):`, or run it under torch.no_grad()."
            )

    def read_early(self, label: str) -> StateError:
        """What to raise where a gradient is used in the loop."""
        return StateError(
            f"'{label}': a gradient is the sum over all virtual ranks, but it is used at virtual rank {self.at}, ahead "
            f"of the others. Use gradients, clip and step after the loop over dshard.virtual_ranks(model)."
        )

    def dropped(self, name: str) -> StateError:
        """What to raise where a gradient was dropped in the loop."""
        return StateError(
            f"{name}: gradients of all virtual ranks are added up, but those of earlier ones were dropped within the "
            "loop. Call zero_grad() ahead of the loop over dshard.virtual_ranks(model)."
        )

    def refuse_open(self, who: str) -> None:
        """Raise if a loop runs."""
        if self.is_open:
            raise StateError(
                f"{who}: needs the loop over virtual ranks to be over, but it is at rank {self.at}. Call it after the "
                "loop."
            )

    @contextmanager
    def played(self, ranks: range, device_type: str, module: nn.Module) -> Iterator[Iterator[int]]:
        """Play some of the ranks, one at each step of what is given; afterwards all is as it was.

        Args:
            ranks: Those of this process.
            device_type: Where they compute.
            module: Whose buffers each has its own copies of.
        """
        self.ranks, self.is_open, self.has_failed = ranks, True, False
        outside = self.random.now(device_type)
        self.buffers.begin(module, ranks)
        try:
            yield self._each(device_type)
        finally:
            self.at, self.is_open = ranks.stop, False
            self.closed.clear()
            self.buffers.end(ranks)
            self.random.put(outside)

    def _each(self, device_type: str) -> Iterator[int]:
        for rank in self.ranks:
            self.at = rank
            self.closed.clear()
            self.random.put(self.random.of[rank])
            self.buffers.enter(rank)
            yield rank
            self.random.of[rank] = self.random.now(device_type)
            self.buffers.leave(rank, self.ranks)


class RandomStates:
    """The random states of virtual ranks: torch's on the CPU, and on the device where they compute."""

    def __init__(self) -> None:
        self.of: dict[int, dict[str, Tensor]] = {}

    def seed(self, ranks: range, device_type: str, seed: int) -> None:
        """Start those that have none, each by itself."""
        for rank in ranks:
            if rank not in self.of:
                digest = hashlib.blake2b(f"{seed}/{rank}".encode(), digest_size=8).digest()
                own = int.from_bytes(digest, "big") >> 1
                self.of[rank] = {
                    kind: torch.Generator(kind).manual_seed(own).get_state() for kind in _kinds(device_type)
                }

    def now(self, device_type: str) -> dict[str, Tensor]:
        """The states of this process."""
        return {
            kind: torch.get_rng_state() if kind == "cpu" else torch.get_device_module(kind).get_rng_state()
            for kind in _kinds(device_type)
        }

    def put(self, states: dict[str, Tensor]) -> None:
        """Make some the states of this process."""
        for kind, state in states.items():
            if kind == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(kind).set_rng_state(state)


def _kinds(device_type: str) -> tuple[str, ...]:
    return ("cpu",) if device_type in ("cpu", "meta") else ("cpu", device_type)


class BufferCopies:
    """Buffers that forwards write to, such as running statistics: each virtual rank has its own.

    All buffers begin alike, and those that no forward has changed are kept once. What a program writes to a buffer
    outside of the loop holds for all virtual ranks of the process. Between loops the module has those of the first.
    Values are compared, for a batch norm writes to its statistics without a change of their version.
    """

    def __init__(self) -> None:
        self.of: dict[int, dict[str, Tensor]] = {}  # of each rank, those that differ
        self._same: dict[str, Tensor] = {}  # copies of the others
        self._places: dict[str, tuple[nn.Module, str]] = {}

    def begin(self, module: nn.Module, ranks: range) -> None:
        """Find the buffers, and take over what was written to them since the last loop."""
        self._places = {}
        known: set[int] = set()
        for prefix, owner in module.named_modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None and not buffer.is_meta and id(buffer) not in known:
                    known.add(id(buffer))
                    self._places[f"{prefix}.{key}" if prefix else key] = owner, key
        for name in self._changed(self.of.get(ranks.start, {})):
            for rank in ranks:
                self.of[rank][name] = self._get(name).clone()
        varying = self.of.get(ranks.start, {})
        unknown = [name for name in self._places if name not in self._same and name not in varying]
        for name in [*unknown, *self._changed(self._same)]:
            self._same[name] = self._get(name).clone()

    def enter(self, rank: int) -> None:
        """Give the module the copies of a rank."""
        self._load(rank)

    def leave(self, rank: int, ranks: range) -> None:
        """Keep what a rank has written."""
        for name in self._changed(self._same):
            before = self._same.pop(name)
            for other in ranks:
                self.of.setdefault(other, {})[name] = before
        for name in self.of.get(rank, {}):
            if name in self._places:
                self.of[rank][name] = self._get(name).clone()

    def end(self, ranks: range) -> None:
        """Leave the module with the copies of the first rank."""
        self._load(ranks.start)
        self._places = {}

    def restore(self, module: nn.Module, ranks: range, values: dict[int, dict[str, Tensor]]) -> None:
        """Take the copies of some ranks from elsewhere."""
        self.begin(module, ranks)
        names = {name for rank in ranks for name in values[rank]}
        unknown = next((name for name in names if name not in self._places), None)
        if unknown is not None:
            raise StateError(
                f"restore_states: the states must be of a model with the same buffers, but this one has no buffer "
                f"'{unknown}'. Build the model as it was."
            )
        for name in names:
            self._same.pop(name, None)
        for rank in ranks:
            self.of[rank] = {n: value.to(self._get(n).device, copy=True) for n, value in values[rank].items()}
        self.end(ranks)

    @torch.no_grad()
    def _load(self, rank: int) -> None:
        for name, value in self.of.get(rank, {}).items():
            if name not in self._places:
                continue
            owner, key = self._places[name]
            buffer = self._get(name)
            if buffer.shape == value.shape and buffer.dtype == value.dtype:
                buffer.copy_(value)
            else:
                owner._buffers[key] = value.clone()

    def _get(self, name: str) -> Tensor:
        owner, key = self._places[name]
        buffer = owner._buffers[key]
        assert buffer is not None
        return buffer.detach()

    def _changed(self, copies: dict[str, Tensor]) -> list[str]:
        """Which buffers differ from their copies."""
        names = [name for name in copies if name in self._places]
        if not names:
            return []
        differ = [_differ(self._get(name), copies[name]) for name in names]
        home = differ[0].device
        flags = torch.stack([flag.to(home) for flag in differ]).tolist()
        return [name for name, is_other in zip(names, flags, strict=True) if is_other]


def _differ(left: Tensor, right: Tensor) -> Tensor:
    """Whether two tensors differ in any bit."""
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return torch.ones((), dtype=torch.bool, device=left.device)
    left, right = map(bytes_of, (left, right))
    return (left != right).any()


@dataclass(frozen=True, slots=True)
class State:
    """What a virtual rank goes on from.

    Args:
        random: Its random states.
        buffers: Its copies of those buffers that forwards have changed.
        num_threads: That it computed with, on a CPU; else 0.
    """

    random: dict[str, Tensor]
    buffers: dict[str, Tensor]
    num_threads: int

    def packed(self) -> Tensor:
        """As bytes, uint8 of shape (bytes,): a description in JSON, and the values behind it."""
        tensors = [("random", *item) for item in self.random.items()]
        tensors += [("buffers", *item) for item in self.buffers.items()]
        raw = [bytes_of(value.cpu()) for _, _, value in tensors]
        described = [
            [kind, name, str(value.dtype).removeprefix("torch."), list(value.shape)] for kind, name, value in tensors
        ]
        text = json.dumps({"num_threads": self.num_threads, "tensors": described}).encode()
        head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
        return torch.cat([head, *raw])

    @classmethod
    def of(cls, packed: Tensor) -> "State":
        """What was packed.

        Raises:
            StateError: It was not, or is damaged.
        """
        content = packed.cpu().numpy().tobytes()
        start = 8 + int.from_bytes(content[:8], "little")
        found: dict[str, dict[str, Tensor]] = {"random": {}, "buffers": {}}
        try:
            described = json.loads(content[8:start])
            for kind, name, dtype_name, shape in described["tensors"]:
                dtype = getattr(torch, dtype_name)
                end = start + math.prod(shape) * dtype.itemsize
                flat = (
                    torch.frombuffer(bytearray(content[start:end]), dtype=dtype)
                    if end > start
                    else torch.empty(0, device="cpu")
                )
                found[kind][name] = flat.to(dtype).view(shape)
                start = end
            return cls(found["random"], found["buffers"], int(described["num_threads"]))
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise StateError(
                f"restore_states: needs what states_of gave, but {type(error).__name__}: {error}. Use another."
            ) from error
