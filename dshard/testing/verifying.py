"""`verify_sharding`: run the plain model and every setting, compare them, and name the first difference."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from dshard.errors import ArgumentError
from dshard.testing.training import SETTINGS, Key, Program, Record, Run, Step, adamw, train_plain, train_sharded
from dshard.testing.worlds import RemoteRankError, WorldPool

DEFAULT_SETTINGS = tuple(name for name in SETTINGS if name != "bf16")
_NUM_NUDGES = 4
_SAFETY = 16.0  # times the change that one rounding of the weights made
_FLOOR = 16.0  # roundings of the largest element
_TIMEOUT_S = 120.0
_OUTPUTS = ("output", "gradient of output", "output in evaluation")
_SAME_BATCHES = "they train on the same data: give the sampler its rank."
_HINTS: Mapping[str, str] = {
    "initial value": "Sharding should change no weight: does the factory draw from the rank or the world's size?",
    "loss": "Outputs are right: is the loss a mean over other counts on each rank?",
    "parameter": "Its first gradient is right: the optimizer steps otherwise (learning rate, writes, old gradients).",
    "buffer": "Buffers are of each rank; fully_shard(buffers='broadcast') keeps them equal.",
    "returned value": "The weights are right: it was computed from shards, or from values of another time.",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first quantity of a sharded run that is not the plain model's.

    Attributes:
        setting: the run's setting.
        num_ranks: the run's number of ranks.
        rank: the rank that has it; -1 where all ranks have the same.
        quantity: the kind of quantity, with its step.
        where: the module or parameter, with class, file and line of its forward.
        found: the sharded run's value.
        expected: the plain model's value; "" where nothing is compared, and the hint says what is wrong.
        hint: what may explain it.
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
    """The plain model's quantities, and the largest error that is allowed of each."""

    seen: Mapping[Key, Tensor]
    allowed: Mapping[Key, float]


def oracle_of(base: Record, nudged: Sequence[Record], eps: float | None) -> Oracle:
    """Allow `_SAFETY` times the largest change that moving each weight by one rounding made.

    It is at least `_FLOOR` roundings of the largest element; initial values have to be the same bits.

    Args:
        base: The run of the plain model.
        nudged: The same with weights moved by one rounding.
        eps: Of the dtype that is computed with; None for each quantity's own.
    """
    allowed = {}
    for key, value in base.seen.items():
        if key.kind == "initial value" or not (value.is_floating_point() or value.is_complex()):
            allowed[key] = 0.0
            continue
        magnitudes = _real(value).abs()
        largest = float(magnitudes.masked_fill(~magnitudes.isfinite(), 0.0).max()) if value.numel() else 0.0
        moved = [_error(run.seen[key], value) for run in nudged if key in run.seen]
        allowed[key] = max(
            [_SAFETY * each for each in moved] + [_FLOOR * (eps or torch.finfo(value.dtype).eps) * largest]
        )
    return Oracle(base.seen, allowed)


def first_difference(setting: str, records: Sequence[Record], oracle: Oracle) -> Difference | None:
    """What differs first, over all ranks; None if nothing does."""
    wrong = [list(_wrong(record, rank, oracle)) for rank, record in enumerate(records)]
    if not any(wrong):
        return None
    order = [[*record.seen, *keys].index(keys[0]) if keys else inf for record, keys in zip(records, wrong, strict=True)]
    rank = order.index(min(order))
    key, record = wrong[rank][0], records[rank]
    right_ranks = [r for r, keys in enumerate(wrong) if not {key, Key(*key[:-1], r)} & set(keys)]
    expected, found = oracle.seen.get(key), record.seen.get(key)
    shown = "nothing" if expected is None else _shown(expected)
    if expected is not None and found is not None:
        shown += f"; off by {_error(found, expected):.3g}, allowed {oracle.allowed[key]:.3g}"
    return Difference(
        setting,
        len(records),
        rank if right_ranks else key.rank,
        key.kind
        if key.kind.startswith(("initial", "key", "value", "buffer", "output in"))
        else f"{key.kind} in step {key.step}",
        _where(key, record),
        "nothing" if found is None else _shown(found),
        shown,
        _whose(key, records, oracle) + _hint(key, records, rank, right_ranks, oracle),
        f"{len(wrong[rank])} of {len(record.seen)} quantities differ on this rank.",
    )


def _wrong(record: Record, rank: int, oracle: Oracle) -> Iterator[Key]:
    """Quantities of a rank that are not the plain model's, or that one side alone has."""
    for key in dict.fromkeys([*record.seen, *(key for key in oracle.seen if key.rank in (-1, rank))]):
        if key in record.seen and key in oracle.seen:
            if _error(record.seen[key], oracle.seen[key]) > oracle.allowed[key]:
                yield key
        elif key.kind not in (*_OUTPUTS, "buffer"):  # which modules that `shard` puts in the place of others have
            yield key


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest distance of two elements; of equal infinities, and of two NaNs, none."""
    if found.shape != expected.shape:
        return float("inf")
    one, other = _real(found), _real(expected)
    is_same = (one == other) | (one.isnan() & other.isnan())
    distances = (one - other).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(distances.masked_fill(is_same, 0.0).max()) if found.numel() else 0.0


def _real(value: Tensor) -> Tensor:
    """In float64; of complex numbers both parts."""
    return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).double()


def _where(key: Key, record: Record) -> str:
    if not key.name and key.kind not in _OUTPUTS:
        return "the whole model"
    owner = key.name.partition("[")[0] if key.kind in _OUTPUTS else key.name.rpartition(".")[0]
    # Ranks may have started in another folder than this one, so paths are shortened here.
    place = record.places.get(owner, "").replace(f"{Path.cwd()}/", "")
    return (key.name or "the model") + (f" ({place})" if place else "")


def _shown(value: Tensor) -> str:
    flat = value.flatten()
    some = ", ".join(f"{each:.6g}" for each in flat[:4].tolist())
    return some if value.ndim == 0 else f"[{some}{', ...' if flat.numel() > 4 else ''}] of shape {tuple(value.shape)}"


def _whose(key: Key, records: Sequence[Record], oracle: Oracle) -> str:
    """Name the ranks whose shards alone are wrong; "" where those of all ranks are."""
    expected = oracle.seen.get(key)
    if expected is None or not all(key in record.shards for record in records):
        return ""
    errors = [_error(each.seen[key][each.shards[key]], expected[each.shards[key]]) for each in records]
    wrong = [str(rank) for rank, error in enumerate(errors) if error > oracle.allowed[key]]
    return f"It is wrong in the shards of rank {', '.join(wrong)} alone. " if 0 < len(wrong) < len(records) else ""


def _hint(key: Key, records: Sequence[Record], rank: int, right_ranks: Sequence[int], oracle: Oracle) -> str:
    """Words for the known classes of errors."""
    if key not in oracle.seen or key not in records[rank].seen:
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
        return _gradient_hint(records[rank], oracle)
    start = oracle.seen.get(Key("initial value", 0, key.name, 0, -1))
    if key.kind == "parameter" and start is not None and _error(records[rank].seen[key], start) == 0.0:
        return "It has not moved: no optimizer has it, or has another object in its place."
    return _HINTS.get(key.kind, "")


def _gradient_hint(record: Record, oracle: Oracle) -> str:
    """Whether one factor explains all gradients of a rank."""
    pairs = [
        (_real(found).flatten(), _real(expected).flatten())
        for key, found in record.seen.items()
        if key.kind == "gradient" and (expected := oracle.seen.get(key)) is not None and expected.shape == found.shape
    ]
    if not pairs:
        return "No gradient arrived."
    found, expected = (torch.cat(each) for each in zip(*pairs, strict=True))
    factor = float(found @ expected) / float(expected @ expected or 1.0)
    if not found.any():
        return "All gradients are zero when the optimizer steps: are they zeroed too early?"
    if float((found - factor * expected).norm()) <= 1e-3 * float(found.norm()):
        return (
            f"All gradients are {factor:.4g} times what they should be: is the loss divided by the number of "
            "micro-batches, and not by the number of ranks? Are they reduced once, and clipped after unscaling?"
        )
    return (
        "Gradients differ in direction: other data, other counts in a mean, a part that is left out (under no_sync, or "
        "zeroed too early), or something added, such as a penalty or a norm of shards."
    )


@dataclass(frozen=True, slots=True)
class Row:
    """How one setting on one number of ranks went.

    Attributes:
        setting: its name.
        num_ranks: whose batches there were.
        difference: the first one; None where all is the same.
        skipped: why it was not run; "" where it was.
        num_compared: quantities, over all ranks.
    """

    setting: str
    num_ranks: int
    difference: Difference | None = None
    skipped: str = ""
    num_compared: int = 0


@dataclass(slots=True)
class Verification:
    """What was run, and what differs.

    Attributes:
        rows: one for each setting and world.
    """

    rows: list[Row]

    @property
    def differences(self) -> list[Difference]:
        """Of all rows."""
        return [row.difference for row in self.rows if row.difference is not None]

    def __str__(self) -> str:
        width = max(len(row.setting) for row in [*self.rows, Row("setting", 0)])
        lines = [f"{'setting':<{width}}  ranks"]
        for row in self.rows:
            ok = f"ok ({row.num_compared} quantities)"
            what = row.skipped or (ok if row.difference is None else f"wrong: {row.difference.quantity}")
            if row.difference is not None:
                what += f"{' of' if row.difference.expected else ''} {row.difference.where}"
            lines.append(f"{row.setting:<{width}}  {row.num_ranks:<5}  {what}")
        return "\n".join(lines)


def assert_sharding_invariants(
    model_factory: Callable[[], nn.Module],
    sample_input: Any,
    **options: Any,
) -> Verification:
    """Train a model under every strategy, on several numbers of ranks, and compare all with the plain model.

    Args:
        model_factory: As for `verify_sharding`.
        sample_input: The same.
        **options: The same.

    Returns:
        What was run.

    Raises:
        AssertionError: Something differs. It names the first module in order of execution whose output or gradient
            does, or the parameter or number.

    Communicates:
        Nothing here; on the ranks what training does.
    """
    report = verify_sharding(model_factory, sample_input, **options)
    if report.differences:
        raise AssertionError(f"{report.differences[0]}\n\n{report}")
    return report


def verify_sharding(
    model_factory: Callable[[], nn.Module],
    sample_input: Any,
    *,
    worlds: Sequence[int] = (1, 2, 4),
    settings: Sequence[str] = DEFAULT_SETTINGS,
    steps: int = 3,
    loss: Callable[[Any], Tensor] | None = None,
    step: Step | None = None,
    oracle_step: Step | None = None,
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
    shard: Callable[..., Any] | None = None,
    dtype: torch.dtype | None = None,
    pool: WorldPool | None = None,
) -> Verification:
    """As `assert_sharding_invariants`, but differences are returned.

    Everything given is sent to the ranks by pickle: functions have to be at the top of a module.

    Args:
        model_factory: Makes the plain model; it is called with the same random numbers each time.
        sample_input: What the model is called with: a tensor, a tuple, or a dict of keywords. Each rank and step gets
            its elements in another order. Or a function of rank and step that returns one.
        worlds: Numbers of ranks, each a process.
        settings: Names of `SETTINGS`. With `step`, "accumulation" and "clipping" are left out: they are the step's.
        steps: Training steps.
        loss: Of the model's output; by default the output if it is one number, its `.loss`, or a mean of squares.
        step: A training step, `step(model, optimizer, batch)`; it may return its loss, or a dict of that and other
            values to compare. The plain model's step has the batches of all ranks in one,
            so that it has no outputs and buffers of one rank to compare.
        oracle_step: What the plain model's step is, if not `step` as well.
        optimizer: Makes the optimizer of a model.
        shard: Shards the model in place, `shard(model, **options)`; `fully_shard` on the root by default.
        dtype: To convert the model and its input to.
        pool: Worlds that run already.

    Returns:
        A row for each setting and world.

    Raises:
        ArgumentError: A number is below 1, there is no such setting, or `oracle_step` is given without `step`.
        RemoteRankError: The plain model cannot be trained.

    Communicates:
        Nothing here; on the ranks what training does.
    """
    if unknown := [name for name in settings if name not in SETTINGS]:
        raise ArgumentError(
            f"verify_sharding: settings must be of {', '.join(SETTINGS)}, but {unknown[0]!r} is none. Name others."
        )
    if not worlds or not settings or min(worlds) < 1 or steps < 1:
        raise ArgumentError(
            f"verify_sharding: worlds, settings and steps must be one or more, but they are {list(worlds)}, "
            f"{list(settings)} and {steps}. Pass worlds=(1, 2) and steps=3."
        )
    if oracle_step is not None and step is None:
        raise ArgumentError("verify_sharding: oracle_step stands for step, but step is None. Pass step, too.")
    program = Program(*(model_factory, sample_input, loss, step, oracle_step, optimizer, shard, steps, dtype))
    with ExitStack() as stack:
        pool = pool if pool is not None else stack.enter_context(WorldPool(group_timeout_s=60.0))
        verifier = _Verifier(program, pool)
        return Verification([verifier.row(name, num_ranks) for num_ranks in worlds for name in settings])


class _Verifier:
    """Runs settings and worlds one after the other; a plain run is made once for all that are compared with it."""

    def __init__(self, program: Program, pool: WorldPool) -> None:
        self.program, self.pool = program, pool
        self._oracles: dict[tuple[object, ...], Oracle] = {}

    def row(self, name: str, num_ranks: int) -> Row:
        """Run one setting and compare it."""
        setting = SETTINGS[name]
        run = Run(self.program, setting, num_ranks)
        if self.program.step is not None and (setting.micro_batches > 1 or setting.is_clipped):
            return Row(name, num_ranks, skipped="left out: the step is yours")
        if self._same_batches(num_ranks):
            return Row(name, num_ranks, Difference(name, num_ranks, -1, "ranks", "0, 1", "", "", _SAME_BATCHES))
        try:
            records = self.pool.run(num_ranks, train_sharded, run, timeout_s=_TIMEOUT_S)
        except RemoteRankError as error:
            self._oracle(run)  # raises where the plain model cannot be trained either
            if setting.is_checkpointed and (said := self._checkpoint_error(run)):
                return Row(name, num_ranks, skipped=f"left out: the plain model cannot recompute its blocks ({said})")
            return Row(name, num_ranks, _raised(name, num_ranks, error))
        if setting.is_checkpointed and not records[0].num_blocks:
            return Row(name, num_ranks, skipped="left out: no blocks in a ModuleList")
        _average_losses(records)
        num = sum(len(record.seen) for record in records)
        return Row(name, num_ranks, first_difference(name, records, self._oracle(run)), num_compared=num)

    def _same_batches(self, num_ranks: int) -> bool:
        if not callable(self.program.sample) or num_ranks == 1:
            return False
        first, second = (pytree.tree_leaves(self.program.batch(rank, 0)) for rank in (0, 1))
        pairs = [(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, Tensor)]
        return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)

    def _checkpoint_error(self, run: Run) -> str:
        """What the plain model raises when it recomputes its blocks; "" for nothing."""
        try:
            self.pool.run(1, train_plain, run, timeout_s=_TIMEOUT_S)
        except RemoteRankError as error:
            return str(error).partition("\n")[0].partition(" raised ")[2]
        return ""

    def _oracle(self, run: Run) -> Oracle:
        precision, plain = run.setting.precision, replace(run.setting, is_checkpointed=False)
        known = (run.num_ranks, run.setting.micro_batches, run.setting.is_clipped, precision)
        if known not in self._oracles:
            runs = [replace(run, nudge=nudge, setting=plain) for nudge in range(_NUM_NUDGES + 1)]
            records = [self.pool.run(1, train_plain, each, timeout_s=_TIMEOUT_S)[0] for each in runs]
            eps = torch.finfo(torch.bfloat16).eps if precision else None
            self._oracles[known] = oracle_of(records[0], records[1:], eps)
        return self._oracles[known]


def _average_losses(records: Sequence[Record]) -> None:
    """Have all ranks hold the mean loss of a user's step, which the plain model computes of all ranks' rows."""
    for key in [key for key in records[0].seen if key.kind == "loss" and key.rank < 0]:
        losses = [record.seen[key] for record in records if key in record.seen]
        for record in records:
            record.seen[key] = torch.stack(losses).mean(0)


def _raised(setting: str, num_ranks: int, error: RemoteRankError) -> Difference:
    """What a rank raised, in the place of a value."""
    message = str(error).partition("\nTraceback")[0]
    frames = [line.strip() for line in error.remote_traceback.splitlines() if line.startswith("  File")]
    own = [frame for frame in frames if "/dshard/" not in frame and "/torch/" not in frame]
    where = own[-1] if own else "the run"
    return Difference(setting, num_ranks, error.rank, "an exception at", where, "", "", message[:2000])
