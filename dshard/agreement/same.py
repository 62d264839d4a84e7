"""Do all ranks ask for the same? Compared once, ahead of any change, so that no rank trains on by another rule."""

import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from dshard import collectives
from dshard.agreement.weights import agree
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import DivergenceError

Fact = str | Sequence[str]  # what a rank was told; a sequence where there may be many, of which one is to be named

_MAX_LEFT = 1000  # steps that peers had left before a call that all make
_TEXT_BYTES = 160  # of what a rank was told, in a message
_MAX_SHOWN = 4  # different values, or ranks, in a message
VERSIONS = "versions of torch and dshard"
_NOTHING = "nothing"
_REFUSAL = "refusal"


def versions() -> str:
    """Versions of torch, whichever way it was built, and of this package."""
    own = getattr(sys.modules.get("dshard"), "__version__", "")
    return f"torch {str(torch.__version__).partition('+')[0]}, dshard {own}"


def check_same(who: str, facts: Mapping[str, Fact], group: ShardGroup) -> None:
    """Raise on every rank, naming what differs, unless all ranks state the same facts.

    Args:
        who: The function that asks, for the message.
        facts: By the name of the argument; those of all ranks have the same names.
        group: The ranks.

    Raises:
        DivergenceError: A fact differs, or another rank raised in the place of this call (`refused_together`). On every
            rank alike.

    Communicates:
        An all-reduce of 16 bytes per fact, and one more; where a fact differs, others of 160 bytes per rank.
    """
    if group.world_size == 1:
        return
    for _ in range(_MAX_LEFT):
        try:
            _compare(who, {_REFUSAL: "", **facts}, group)
            return
        except DivergenceError as error:  # a rank had left a step before this call, and now this one has, too
            if not error.left_step or group.replicas is not None:
                raise
            failed = error
    raise failed


@contextmanager
def refused_together(who: str, names: Iterable[str], group: ShardGroup | None) -> Iterator[None]:
    """Have what raises here end the peers' `check_same` too, which compares facts of these names.

    Communicates:
        Nothing, unless something raises: then what `check_same` does.
    """
    try:
        yield
    except Exception as error:
        if group is not None and group.world_size > 1:
            facts = {_REFUSAL: f"{type(error).__name__}: {error}", **dict.fromkeys(names, "")}
            with suppress(DivergenceError):  # this rank's own error says more
                _compare(who, facts, group)
        raise


def _compare(who: str, facts: Mapping[str, Fact], group: ShardGroup) -> None:
    same = _are_same([repr(fact) for fact in facts.values()], group)
    name = next((name for name, is_same in zip(facts, same, strict=True) if not is_same), None)
    if name is None:
        return
    fact = facts[name]
    if name == _REFUSAL:
        texts = of_all_ranks(str(fact), group)
        rank = next(rank for rank, text in enumerate(texts) if text != _NOTHING)
        raise DivergenceError(
            f"{who}: all ranks must make the same call, but rank {rank} raised there: {texts[rank]} Look at what that "
            "rank was given."
        )
    what = "it"
    if not isinstance(fact, str):
        number = _first_differing(fact, group)
        what, fact = f"number {number}", fact[number] if number < len(fact) else ""
    must, remedy = "pass", "Pass what does not depend on the rank."
    if name == VERSIONS:
        must, remedy = "run", "Install the same on every host: what they send each other, and its bits, may differ."
    values = _listed(of_all_ranks(fact, group))
    raise DivergenceError(f"{who}: all ranks must {must} the same {name}, but {what} is {values}. {remedy}")


def _are_same(texts: Sequence[str], group: ShardGroup) -> list[bool]:
    """Which of as many texts on each rank are equal on all ranks."""
    crcs = torch.tensor([zlib.crc32(text.encode()) for text in texts], dtype=torch.int64, device=group.device_type)
    found: list[bool] = agree(crcs, group, "what ranks were told").tolist()
    return found


def _first_differing(texts: Sequence[str], group: ShardGroup) -> int:
    """The first of several texts that differs, of maybe another number of them on each rank."""
    own = torch.tensor([len(texts)], dtype=torch.int64, device=group.device_type)
    label = "how many ranks were told"
    length = int(collectives.all_reduce([own], group, ReduceOp.MAX, label=label, everywhere=True).wait()[0])
    same = _are_same([*texts, *[""] * (length - len(texts))], group)
    return same.index(False)


def of_all_ranks(text: str, group: ShardGroup) -> list[str]:
    """What each rank has to say, cut short."""
    own = (text or _NOTHING).encode()
    own = own if len(own) <= _TEXT_BYTES else own[: _TEXT_BYTES - 3] + b"..."
    table = torch.zeros(group.world_size, _TEXT_BYTES, dtype=torch.uint8, device="cpu")
    table[group.world_rank, : len(own)] = torch.tensor(list(own), dtype=torch.uint8, device="cpu")
    sent = [table.to(group.device_type)]
    rows: Tensor = collectives.all_reduce(sent, group, ReduceOp.MAX, label="what differs", everywhere=True).wait()[0]
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows.tolist()]


def _listed(texts: Sequence[str]) -> str:
    """Each value, and the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    shown = [f"{text if text == _NOTHING else repr(text)} on {_ranks(own)}" for text, own in ranks.items()]
    return " and ".join([*shown[:_MAX_SHOWN], "others elsewhere"] if len(shown) > _MAX_SHOWN else shown)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _MAX_SHOWN} more" if len(ranks) > _MAX_SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:_MAX_SHOWN]))}{more}"
