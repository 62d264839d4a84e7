"""Messages straight from rank to rank, behind a header: what gloo gets in the place of its own collectives."""

import zlib
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from dshard.collectives import _c10d
from dshard.collectives._c10d import Work
from dshard.collectives.group import ShardGroup
from dshard.collectives.header import HEADER_BYTES, Kind, check_headers, header
from dshard.collectives.lost import is_symptom
from dshard.collectives.stalls import failure
from dshard.errors import DivergenceError

__all__ = ["Exchange"]

_EPOCHS: Counter[str] = Counter()  # of each process group, how often its ranks found themselves apart


class Exchange:
    """All messages of one collective between this rank and its peers.

    Headers have one size and one tag. The messages behind them have tags of their own, made of what they belong to:
    gloo ends the process when a message of more bytes arrives than was asked for, so messages of different things must
    never meet. Ranks that are apart learn it from the headers.

    Args:
        group: Ranks that take part.
        kind: What is exchanged.
        label: Of which unit.
        tag: A number that must be equal on all ranks.
        sizes: What else tells the messages apart: everything that their sizes depend on.
    """

    __slots__ = ("_channel", "_group", "_headers", "_kind", "_label", "_own", "header_works", "works")

    def __init__(self, group: ShardGroup, kind: Kind, label: str, tag: int, sizes: int) -> None:
        self._group, self._kind, self._label = group, kind, label
        epoch = _EPOCHS[group.name]
        self._channel = zlib.crc32(f"{int(kind)} {label} {sizes} {epoch}".encode()) & 0x3FFFFFFF
        self._own = header(kind, label, tag)
        self._headers = torch.empty((group.num_ranks, HEADER_BYTES), dtype=torch.uint8, device="cpu")
        self._headers[group.rank] = self._own
        self.header_works: list[Work] = []
        self.works: list[Work] = []
        for peer in group.peers:
            self.header_works.append(self._start(_c10d.receive, self._headers[peer], peer, _c10d.HEADERS))
            self.header_works.append(self._start(_c10d.send, self._own, peer, _c10d.HEADERS))

    def send(self, tensor: Tensor, peer: int) -> None:
        """Start to send a contiguous tensor, which must not change until the end."""
        self.works.append(self._start(_c10d.send, tensor, peer, self._channel))

    def receive(self, tensor: Tensor, peer: int) -> None:
        """Start to receive into a contiguous tensor what `peer` sends, in the order of its sends."""
        self.works.append(self._start(_c10d.receive, tensor, peer, self._channel))

    def _start(self, start: Callable[..., Work], tensor: Tensor, peer: int, tag: int) -> Work:
        """Start a message; gloo raises at once where the connection is gone."""
        try:
            return start(tensor, peer, tag, self._group.process_group)
        except RuntimeError as error:
            if not is_symptom(error):
                raise
            raise failure(f"{self._kind.text} '{self._label}'", error, self._group.process_group) from error

    def check(self) -> None:
        """Compare the headers, once they are here.

        Raises:
            DivergenceError: On every rank, if one of them is elsewhere.
        """
        try:
            check_headers(self._headers, self._own, self._kind, self._label)
        except DivergenceError:
            _EPOCHS[self._group.name] += 1  # messages that now never meet must not meet later ones
            raise
