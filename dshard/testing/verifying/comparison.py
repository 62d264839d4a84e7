"""How far a sharded run may be from the plain one, what differs first, and what that looks like."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dshard.testing.verifying.recording import Key, Record

SAFETY = 16.0  # times what one rounding of the weights changed
FLOOR = 16.0  # roundings of the largest element
_OF_ROWS = ("output", "gradient of output", "output in evaluation")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first quantity of a sharded run that is not the plain model's.

    Attributes:
        setting: of the run.
        num_ranks: of the run.
        rank: that has it; -1 where all ranks have the same.
        quantity: what it is, with its step.
        where: the module or parameter, with class, file and line of its forward.
        found: what the sharded run has.
        expected: what the plain model has; "" where nothing is compared, and the hint says what is wrong.
        hint: what explains it, if something known does.
        others: how many quantities differ, of how many.
    """

    setting: str
    num_ranks: int
    rank: int
    quantity: str
    where: str
    found: str
    expected: str
    hint: str
    others: str = ""

    def __str__(self) -> str:
        who = f"{self.setting} on {self.num_ranks} ranks" + (f", rank {self.rank}" if self.rank >= 0 else "")
        if not self.expected:
            return f"{who}: {self.quantity} {self.where}: {self.hint}"
        lines = [f"{who}: {self.quantity} of {self.where} differs."]
        lines += [f"  found    {self.found}", f"  expected {self.expected}"]
        return "\n".join(lines + [f"  {each}" for each in (self.others, self.hint) if each])


@dataclass(frozen=True, slots=True)
class Oracle:
    """What the plain model did.

    Attributes:
        record: of it.
        allowed: the largest error of each quantity.
        start: its initial weights by name.
    """

    record: Record
    allowed: Mapping[Key, float]
    start: Mapping[str, Tensor]


def oracle_of(base: Record, nudged: Sequence[Record], eps: float | None) -> Oracle:
    """An oracle whose tolerance is `SAFETY` times the largest change that moving each weight by one rounding made.

    It is at least `FLOOR` roundings of the quantity's largest element; initial values have to be the same bits.

    Args:
        base: The run of the plain model.
        nudged: The same with weights moved by one rounding.
        eps: Of the type that is computed with; None for that of each quantity.
    """
    allowed = {}
    for key, value in base.seen.items():
        if key.kind == "initial value" or not (value.is_floating_point() or value.is_complex()):
            allowed[key] = 0.0
            continue
        moved = [_error(run.seen[key], value) for run in nudged if key in run.seen]
        floor = FLOOR * (eps or torch.finfo(value.dtype).eps) * _largest(value)
        allowed[key] = max([SAFETY * each for each in moved] + [floor])
    start = {key.name: value for key, value in base.seen.items() if key.kind == "initial value"}
    return Oracle(base, allowed, start)


def by_rank(record: Record, like: Record, num_ranks: int) -> Record:
    """What was seen of all batches in one, cut into what belongs to each rank and micro-batch.

    Args:
        record: Of the plain model.
        like: Of rank 0, whose shapes say along which dim, and into how many, each output is to be cut; what has
            other shapes is left out.
        num_ranks: Whose batches there are.
    """
    seen: dict[Key, Tensor] = {}
    calls: dict[tuple[str, int, str], dict[Key, Tensor]] = {}
    for key, value in record.seen.items():
        if key.kind in _OF_ROWS and key.rank < 0:
            calls.setdefault((key.kind, key.step, key.name), {})[key] = value
        else:
            seen[key] = value
    for outputs in calls.values():
        cuts = {key: _cut(value, like.seen.get(key.with_rank(0)), num_ranks) for key, value in outputs.items()}
        if len({len(parts) for parts in cuts.values()}) > 1:
            continue  # some are of micro-batches, and some not
        for key, parts in cuts.items():
            for i, part in enumerate(parts):
                seen[key.with_rank(i % num_ranks).with_call(i // num_ranks * len(cuts) + key.call)] = part
    return replace(record, seen=seen)


def _cut(value: Tensor, like: Tensor | None, num_ranks: int) -> Sequence[Tensor]:
    """An output of all rows in parts that have the shape of another; none where that is not possible in one way."""
    if like is None or value.ndim != like.ndim:
        return ()
    dims = [dim for dim in range(value.ndim) if value.shape[dim] != like.shape[dim]]
    if num_ranks == 1 and not dims:
        return (value,)
    if len(dims) != 1 or not like.shape[dims[0]] or value.shape[dims[0]] % (like.shape[dims[0]] * num_ranks):
        return ()
    return value.split(like.shape[dims[0]], dims[0])


def with_mean_losses(records: Sequence[Record]) -> None:
    """Give every rank the mean of all ranks' losses: a step on all batches in one has no other."""
    keys = [key for key in records[0].seen if key.kind == "loss"]
    for key in keys:
        values = [r.seen.get(key.with_rank(rank)) for rank, r in enumerate(records)]
        known = [value.double() for value in values if value is not None]
        mean = torch.stack(known).mean().to(records[0].seen[key].dtype)
        for rank, record in enumerate(records):
            record.seen = {
                (k.with_rank(-1) if k == key.with_rank(rank) else k): (mean if k == key.with_rank(rank) else v)
                for k, v in record.seen.items()
            }


def first_difference(setting: str, records: Sequence[Record], oracle: Oracle) -> Difference | None:
    """What differs first, over all ranks; None if nothing does."""
    wrong = [list(_wrong(record, rank, oracle)) for rank, record in enumerate(records)]
    if not any(wrong):
        return None
    first = [
        _position(record, keys[0]) if keys else len(record.seen) + 1
        for record, keys in zip(records, wrong, strict=True)
    ]
    rank = min(range(len(records)), key=lambda r: first[r])
    key = wrong[rank][0]
    right_ranks = [r for r, keys in enumerate(wrong) if key.with_rank(r) not in keys and key not in keys]
    expected, found = _expected(oracle, key, rank), records[rank].seen.get(key)
    return Difference(
        setting,
        len(records),
        key.rank if key.rank >= 0 else (rank if right_ranks else -1),
        _quantity(key),
        _where(key, records[rank]),
        "nothing" if found is None else _shown(found),
        "nothing"
        if expected is None
        else _shown(expected)
        + (
            ""
            if found is None
            else f"; off by {_error(found, expected):.3g}, allowed {_allowed(oracle, key, rank):.3g}"
        ),
        " ".join(filter(None, [_whose(key, records, oracle), _hint(key, records, rank, right_ranks, oracle)])),
        f"{len(wrong[rank])} of {len(records[rank].seen)} quantities differ on this rank.",
    )


def _expected(oracle: Oracle, key: Key, rank: int) -> Tensor | None:
    seen = oracle.record.seen
    return seen.get(key.with_rank(rank), seen.get(key.with_rank(-1)))


def _allowed(oracle: Oracle, key: Key, rank: int) -> float:
    return oracle.allowed.get(key.with_rank(rank), oracle.allowed.get(key.with_rank(-1), 0.0))


def _position(record: Record, key: Key) -> int:
    return next((i for i, each in enumerate(record.seen) if each == key), len(record.seen))


def _wrong(record: Record, rank: int, oracle: Oracle) -> Iterator[Key]:
    for key, found in record.seen.items():
        expected = _expected(oracle, key, rank)
        is_right = expected is not None and _error(found, expected) <= _allowed(oracle, key, rank)
        is_beyond = expected is None and key.kind in _OF_ROWS
        if not (is_right or is_beyond):
            yield key
    for key in oracle.record.seen:
        if key.kind not in _OF_ROWS and key.rank in (-1, rank) and not {key, key.with_rank(rank)} & record.seen.keys():
            yield key


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest distance of two elements; of equal infinities, and of two NaNs, none."""
    if found.shape != expected.shape:
        return float("inf")
    one, other = _real(found), _real(expected)
    is_same = (one == other) | (one.isnan() & other.isnan())
    distances = (one - other).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(distances.masked_fill(is_same, 0.0).max()) if found.numel() else 0.0


def _largest(value: Tensor) -> float:
    """The largest finite magnitude."""
    finite = _real(value).abs()
    finite = finite[finite.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _real(value: Tensor) -> Tensor:
    """In float64; of complex numbers both parts."""
    return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).double()


def _quantity(key: Key) -> str:
    first = {"initial value", "key of state_dict", "value in state_dict", "buffer", "output in evaluation"}
    return key.kind if key.kind in first else f"{key.kind} in step {key.step}"


def _where(key: Key, record: Record) -> str:
    if key.kind in _OF_ROWS:
        name = key.name.partition("[")[0]
        return f"{key.name or 'the model'} ({record.places.get(name, '?')})"
    owner = key.name.rpartition(".")[0]
    place = record.places.get(owner) if key.name else None
    return key.name + (f" ({place})" if place else "") if key.name else "the whole model"


def _shown(value: Tensor) -> str:
    flat = value.flatten()
    some = ", ".join(f"{each:.6g}" for each in flat[:4].tolist())
    return some if value.ndim == 0 else f"[{some}{', ...' if flat.numel() > 4 else ''}] of shape {tuple(value.shape)}"


def _hint(key: Key, records: Sequence[Record], rank: int, right_ranks: Sequence[int], oracle: Oracle) -> str:
    """Words for the known classes of errors."""
    if _expected(oracle, key, rank) is None or key not in records[rank].seen:
        return "It is on one side alone: was a module or parameter put in the place of another, untied, or frozen?"
    if key.rank >= 0 and right_ranks:
        agreeing = ", ".join(map(str, right_ranks))
        return f"It is right on rank {agreeing}: something depends on the rank, as a branch, a seed or data do."
    if key.kind == "output" and key.step > 0:
        return (
            "The weights are right after the step before, and the first step was: it computes with something else, "
            "such as a copy of a weight that is kept (`.data`, `.detach()`, NumPy)."
        )
    if key.kind in ("gradient", "gradient of output"):
        return _gradient_hint(key, records, rank, oracle)
    if key.kind == "parameter":
        start = oracle.start.get(key.name)
        if start is not None and _error(records[rank].seen[key], start) == 0.0:
            return "It has not moved: no optimizer has it, or has another object in its place."
        return (
            "Its first gradient is right: the optimizer steps otherwise (learning rate, other writes, old gradients)."
        )
    return {
        "initial value": "Sharding should change no weight: does the factory draw from the rank or the world's size?",
        "loss": "Outputs are right: is the loss a mean over other counts on each rank?",
        "buffer": "Buffers are of each rank; fully_shard(buffers='broadcast') keeps them equal.",
        "returned value": "The weights are right: it was computed from shards, or from values of another time.",
    }.get(key.kind, "")


def _whose(key: Key, records: Sequence[Record], oracle: Oracle) -> str:
    """Words for a value that is wrong in some ranks' shards alone."""
    expected = _expected(oracle, key, 0)
    if key.rank >= 0 or expected is None or not all(key in r.seen and key in r.pieces for r in records):
        return ""
    if any(record.seen[key].shape != expected.shape for record in records):
        return ""
    errors = [_error(*(_own(record, key, value) for value in (record.seen[key], expected))) for record in records]
    wrong = [str(rank) for rank, error in enumerate(errors) if error > _allowed(oracle, key, 0)]
    if not 0 < len(wrong) < sum(_own(record, key, expected).numel() > 0 for record in records):
        return ""
    return f"It is wrong in the shards of rank {', '.join(wrong)} alone."


def _own(record: Record, key: Key, value: Tensor) -> Tensor:
    """What of a full value the rank of a record holds."""
    piece = record.pieces.get(key)
    return value if piece is None else value[piece.slices]


class _Fit(NamedTuple):
    """The factor that leads from what is expected of all gradients to what was found, and whether it explains them."""

    factor: float
    is_good: bool


def _fit(record: Record, rank: int, oracle: Oracle, *, own: bool) -> _Fit | None:
    """Of all gradients, or of what this rank holds of them; None where there are none."""
    pairs = []
    for key, found in record.seen.items():
        expected = _expected(oracle, key, rank) if key.kind == "gradient" else None
        if expected is not None and expected.shape == found.shape:
            both = [_own(record, key, each) for each in (found, expected)] if own else [found, expected]
            pairs.append([_real(each).flatten() for each in both])
    if not pairs:
        return None
    found, expected = (torch.cat(each) for each in zip(*pairs, strict=True))
    size = float(expected @ expected)
    factor = float(found @ expected) / size if size else 0.0
    return _Fit(factor, float((found - factor * expected).norm()) <= 1e-3 * float(found.norm()))


def _gradient_hint(key: Key, records: Sequence[Record], rank: int, oracle: Oracle) -> str:
    """What all gradients together look like."""
    num, is_ahead = len(records), key.kind == "gradient of output"
    whole = _fit(records[rank], rank, oracle, own=False)
    if whole is None:
        return "No gradient arrived."
    if whole == _Fit(0.0, is_good=True):
        return "All gradients are zero when the optimizer steps: are they zeroed too early?"
    if not whole.is_good:
        fits = [_fit(record, r, oracle, own=True) for r, record in enumerate(records)]
        factors = [f"{fit.factor:.4g}" for fit in fits if fit is not None and fit.is_good]
        if len(factors) == num and len(set(factors)) > 1:
            return (
                f"Each rank's shards have another factor ({', '.join(factors)}): are they scaled by a norm or a mean "
                "of shards?"
            )
        if is_ahead or key.step > 0:
            return "Gradients differ in direction: other data, other counts in a mean, stale or missing parts."
        return (
            "Those of outputs are right: something is left out of those of weights (a part under no_sync, zeroed too "
            "early), or added to them (a hook, a penalty that is computed of shards)."
        )
    words = f"All gradients are {whole.factor:.4g} times what they should be"
    num_parts = records[rank].num_parts
    if is_ahead and num_parts > 1 and _near(whole.factor, num_parts):
        return f"{words}, the number of micro-batches: divide the loss of each by it."
    if _near(whole.factor, 1 / num):
        return f"{words}, one over the number of ranks: they are averaged already; is the loss divided by it, too?"
    if not is_ahead and _near(whole.factor, num):
        return f"{words}, the number of ranks: they are added where they should be averaged, or reduced twice."
    return f"{words}: is the loss divided by the number of micro-batches, once, and clipped after unscaling?"


def _near(factor: float, expected: float) -> bool:
    return abs(factor - expected) < 1e-3 * expected
