"""What all ranks must have alike: arguments, weights and buffers."""

import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from dshard import collectives
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import DivergenceError
from dshard.tensor.subclass_shards import exact_values

_CHUNK = 1 << 14  # most elements whose products with their weights are in memory at a time
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd multiplier that spreads small numbers over all bits
_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same_structure(tensors: Sequence[tuple[str, Tensor]], group: ShardGroup) -> None:
    """Raise on every rank unless all hold tensors of the same names, shapes and dtypes.

    Communicates:
        An all-reduce of 16 bytes.
    """
    text = ";".join(f"{name}:{tuple(t.shape)}:{t.dtype}:{t.requires_grad}" for name, t in tensors)
    if not _are_same([text], group, "structure check")[0]:
        raise DivergenceError(
            "fully_shard: all ranks must pass the same parameters, but names, shapes, dtypes or requires_grad differ "
            f"between ranks (this rank has {len(tensors)} parameters). Build the same model on every rank."
        )


def check_same_weights(tensors: Sequence[tuple[str, Tensor]], group: ShardGroup) -> None:
    """Raise on every rank, naming the parameters, unless all hold the same values; meta tensors have none.

    Communicates:
        An all-reduce of 16 bytes per tensor.
    """
    real = [(name, t) for name, t in tensors if not t.is_meta]
    if not real or group.world_size == 1:
        return
    sums = torch.stack([checksum(exact_values(t, name)) for name, t in real]).to(group.device_type)
    same = agree(sums, group, "weight check").tolist()
    differing = [name for (name, _), ok in zip(real, same, strict=True) if not ok]
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise DivergenceError(
            "fully_shard: all ranks must start from the same weights, but these differ between ranks: "
            f"{', '.join(differing[:5])}{more}. Seed every rank alike before building the model, or pass "
            'sync="broadcast" to take those of rank 0.'
        )


def agree(values: Tensor, group: ShardGroup, label: str) -> Tensor:
    """Which of some int64 values are equal on all ranks, equal on all ranks."""
    both = torch.stack([values, ~values])  # max(~x) == ~min(x)
    high = collectives.all_reduce([both], group, ReduceOp.MAX, label=label, everywhere=True).wait()[0]
    return high[0] == ~high[1]


def checksum(tensor: Tensor) -> Tensor:
    """An int64 sum over the bits of a tensor, each element weighted by its place; a 0-d tensor on its device."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    bits = tensor.contiguous().view(_INT_OF_SIZE[tensor.element_size()]).reshape(-1)
    size = min(_CHUNK, max(256, bits.numel() // 8))  # with less work space than the tensor itself takes
    places = torch.arange(1, min(bits.numel(), size) + 1, device=bits.device)
    weights = places * _ODD ^ (places * _ODD >> 15)  # wraps around; what matters is that no two places weigh alike
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for k, chunk in enumerate(bits.split(size)):
        total += (chunk * weights[: chunk.numel()]).sum() * (2 * k + 1)
    return total


def broadcast_weights(tensors: Sequence[tuple[str, Tensor]], group: ShardGroup) -> None:
    """Overwrite the weights of all ranks by those of the group's rank 0; meta tensors have none.

    Communicates:
        A broadcast of each tensor's bytes, one tensor at a time.
    """
    with torch.no_grad():
        for name, tensor in tensors:
            if tensor.is_meta or not tensor.numel():
                continue
            wire = exact_values(tensor, name).to(group.device_type)
            agreed = collectives.broadcast([wire], group, label="weights", everywhere=True).wait()[0]
            tensor.copy_(agreed)


def _named_buffers(modules: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    found = {id(b): (name, b) for module in modules for name, b in module.named_buffers()}
    return [(name, b) for name, b in found.values() if not b.is_meta and b.numel()]


def check_buffers(modules: Sequence[nn.Module], group: ShardGroup) -> None:
    """Raise on every rank, naming the buffers, unless all hold the same values.

    Communicates:
        An all-reduce of 16 bytes, and one of 16 bytes per buffer.
    """
    found = _named_buffers(modules)
    check_same_structure(found, group)
    check_same_weights(found, group)


def broadcast_buffers(modules: Sequence[nn.Module], group: ShardGroup) -> None:
    """Overwrite all buffers by those of the group's rank 0.

    Communicates:
        One broadcast for each dtype among the buffers, of their bytes.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for _, buffer in _named_buffers(modules):
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    with torch.no_grad():
        for part in by_dtype.values():
            wire = [b.to(group.device_type) for b in part]
            agreed = collectives.broadcast(wire, group, label="buffers", everywhere=True).wait()
            for buffer, value in zip(part, agreed, strict=True):
                buffer.copy_(value)


Fact = str | Sequence[str]  # what a rank passes; a sequence where there may be many, of which one is to be named

_TEXT_BYTES = 160  # of what a rank passes, in a message
_MAX_SHOWN = 4  # different values, or ranks, in a message
VERSIONS = "versions of torch and dshard"
NOTHING = "nothing"  # what `of_all_ranks` gives of a rank without a text
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
    _compare(who, {_REFUSAL: "", **facts}, group)


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
        rank = next(rank for rank, text in enumerate(texts) if text != NOTHING)
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


def _are_same(texts: Sequence[str], group: ShardGroup, label: str = "comparison of what the ranks pass") -> list[bool]:
    """Which of as many texts on each rank are equal on all ranks."""
    crcs = torch.tensor([zlib.crc32(text.encode()) for text in texts], dtype=torch.int64, device=group.device_type)
    return agree(crcs, group, label).tolist()


def _first_differing(texts: Sequence[str], group: ShardGroup) -> int:
    """The first of several texts that differs, of maybe another number of them on each rank."""
    own = torch.tensor([len(texts)], dtype=torch.int64, device=group.device_type)
    label = "comparison of how many the ranks pass"
    length = int(collectives.all_reduce([own], group, ReduceOp.MAX, label=label, everywhere=True).wait()[0])
    same = _are_same([*texts, *[""] * (length - len(texts))], group)
    return same.index(False)


def of_all_ranks(text: str, group: ShardGroup) -> list[str]:
    """What each rank has to say, cut short."""
    own = (text or NOTHING).encode()
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
    shown = [f"{text if text == NOTHING else repr(text)} on {_ranks(own)}" for text, own in ranks.items()]
    return " and ".join([*shown[:_MAX_SHOWN], "others elsewhere"] if len(shown) > _MAX_SHOWN else shown)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _MAX_SHOWN} more" if len(ranks) > _MAX_SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:_MAX_SHOWN]))}{more}"
