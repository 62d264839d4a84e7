"""A checkpoint as one rank reads it, and what is left to do when all of it was read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dshard.checkpoint.contents import Part
from dshard.checkpoint.manifest import Manifest
from dshard.checkpoint.stored import StoredTensor, own_name
from dshard.checkpoint.trees import decode
from dshard.collectives import ShardGroup
from dshard.errors import CheckpointError
from dshard.tensor import ShardedTensor
from dshard.tensor.subclass_shards import subclass_gathers


@dataclass(slots=True)
class Load:
    """A checkpoint that was read, and what is left to do with it, none of which can fail.

    Args:
        manifest: Of the checkpoint.
        extra: What `load` returns.
        on_meta: Names of parameters and buffers that need memory first.
        commits: What to do, in order.
        extra_states: Modules with what their `set_extra_state` is to get, which may raise.
        groups: Options of the group of each parameter that is trained, by identity.
    """

    manifest: Manifest
    extra: Any = None
    on_meta: list[str] = field(default_factory=list)
    commits: list[Callable[[], object]] = field(default_factory=list)
    extra_states: list[tuple[nn.Module, Any]] = field(default_factory=list)
    groups: dict[int, Mapping[str, Any]] = field(default_factory=dict)


class Reader(Protocol):
    """What reads boxes of tensors."""

    def read(self, name: str, stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The values of a box, on the host."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint, and the rank that reads it.

    Args:
        folder: Of the checkpoint.
        manifest: What it says of itself.
        reader: Of its files.
        group: The ranks that read it.
        own: What one rank of those that wrote it kept for itself: this one, if as many read.
    """

    folder: Path
    manifest: Manifest
    reader: Reader
    group: ShardGroup
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_same_size(self) -> bool:
        """Whether as many ranks read as wrote."""
        return self.manifest.world_size == self.group.world_size

    @property
    def rank(self) -> int:
        """Of those that wrote, the one whose own values this one reads."""
        return self.group.world_rank if self.is_same_size else 0

    def fact(self, name: str) -> Any:
        """What the checkpoint says of a model, by this rank's own word where ranks differed."""
        own = self.own.get("facts")
        return (own if isinstance(own, dict) and name in own else self.manifest.facts)[name]

    def stored(self, name: str) -> tuple[str, StoredTensor] | None:
        """A tensor, under the name that its values of this rank have."""
        stored = self.manifest.stored(name)
        if stored is not None:
            return self.manifest.aliases.get(name, name), stored
        own = own_name(self.rank, self.manifest.aliases.get(name, name))
        stored = self.manifest.tensors.get(own)
        return None if stored is None else (own, stored)

    def read(self, name: str, part: Part, dtype: torch.dtype) -> Tensor:
        """The values of this rank's box of a tensor.

        Raises:
            CheckpointError: It is not there, of another shape or dtype, or damaged.
        """
        found = self.stored(name)
        if found is None:
            raise CheckpointError(
                f"{self.folder}: the checkpoint must hold every tensor of the model, but '{name}' (shape {part.shape}) "
                "is not in it. Build the model as it was when it was saved."
            )
        kept, stored = found
        if stored.shape != part.shape or stored.dtype != dtype:
            raise CheckpointError(
                f"{self.folder}: tensors must have the shapes and dtypes that were saved, but '{name}' is "
                f"{stored.shape}, {stored.dtype} in the checkpoint and {part.shape}, {dtype} in the model. Build the "
                "model as it was when it was saved."
            )
        return self.reader.read(kept, stored, part.offsets, part.sizes)

    def names(self, prefix: str) -> Iterator[str]:
        """Names that begin so, each once, whoever's values they have."""
        seen = set()
        for name in (*self.manifest.tensors, *self.manifest.aliases):
            own, _, rest = name.partition("/")
            plain = rest if own.startswith("rank-") and own[5:].isdigit() else name
            if plain.startswith(prefix) and plain not in seen:
                seen.add(plain)
                yield plain


def decoded(source: Source, value: Any, what: str, made: Callable[[str, StoredTensor], Tensor] | None = None) -> Any:
    """A value of the manifest, with the tensors that it names; by default whole ones on the host."""

    def named(name: str) -> Tensor:
        found = source.stored(name)
        if found is None:
            raise ValueError(f"'{name}' is not stored")
        kept, stored = found
        if made is not None:
            return made(name, stored)
        return source.reader.read(kept, stored, (0,) * len(stored.shape), stored.shape)

    try:
        return decode(value, named)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{source.folder}: '{what}' must be as save wrote it, but {error}. It is damaged; use another checkpoint."
        ) from error


def writer(tensor: Tensor, values: Tensor) -> Callable[[], None]:
    """Put values into a tensor."""

    def write() -> None:
        if isinstance(tensor, ShardedTensor) and not tensor.is_view:
            if subclass_gathers(tensor.shard_storage.resolve()):
                tensor.copy_(tensor.like(values.to(tensor.storage_device)))
            else:
                tensor.overwrite_shard(values)
        elif isinstance(tensor, DTensor) and not isinstance(tensor, ShardedTensor):
            tensor.to_local().copy_(values)
        else:
            tensor.copy_(values)

    return write
