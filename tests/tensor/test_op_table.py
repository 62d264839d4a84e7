"""Invariant 4, generated from the op table: `full(op(shard(x))) == op(x)` for every aten operation that it classes.

The cases are built on the ranks from the operations' schemas: per operation and dtype a plain call that works, then the
same call with ShardedTensors in the place of tensors, over several shapes, dims and choices of which operands are
sharded. A call that fails is reported by name, all of them at once.
"""

import functools
import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from dshard.errors import UnsupportedOpError
from dshard.tensor import OpClass, ShardedTensor, classify
from dshard.tensor.operands import AgreedTensor, FullResult
from dshard.testing import WorldPool
from tests.kit import oracle

aten = torch.ops.aten
PLAIN = (Tensor, FullResult, AgreedTensor)

# --- operations, and what a schema does not say about their arguments -------------------------------------------------

SPECIAL_ARGS = {
    "clamp": {"min": 0.3},
    "clamp_": {"min": 0.3},
    "clip": {"min": 0.3},
    "clip_": {"min": 0.3},
    "clamp.Tensor": {"max": "tensor"},
    "clamp_.Tensor": {"max": "tensor"},
    "clip.Tensor": {"max": "tensor"},
    "clip_.Tensor": {"max": "tensor"},
    "div.Tensor_mode": {"rounding_mode": "floor"},
    "div.Scalar_mode": {"rounding_mode": "trunc"},
    "div_.Tensor_mode": {"rounding_mode": "trunc"},
    "div_.Scalar_mode": {"rounding_mode": "floor"},
    "divide.Tensor_mode": {"rounding_mode": "floor"},
    "randint_like": {"high": 9},
    "randint_like.generator": {"high": 9},
    "randint_like.low_dtype": {"low": 2, "high": 9},
    "randint_like.low_generator_dtype": {"low": 2, "high": 9},
    "random_.from": {"from": 2, "to": 9},
    "random_.to": {"to": 9},
    "polygamma": {"n": 1},
    "mvlgamma": {"p": 1},
    "dropout_": {"p": 0.5, "train": True},
    "feature_dropout_": {"p": 0.5, "train": True},
    "alpha_dropout_": {"p": 0.5, "train": True},
    "feature_alpha_dropout_": {"p": 0.5, "train": True},
    "view": {"size": [-1]},
    "_unsafe_view": {"size": [-1]},
    "reshape": {"shape": [-1]},
    "as_strided": {"size": [2], "stride": [1]},
    "_reshape_alias": {"size": "same", "stride": "stride"},
    "permute": {"dims": "reversed"},
    "expand": {"size": "same"},
    "broadcast_to": {"size": "same"},
    "split.sizes": {"split_size": "sizes"},
    "split_with_sizes": {"split_sizes": "sizes"},
    "split.Tensor": {"split_size": 2},
    "chunk": {"chunks": 2},
    "tensor_split.sections": {"sections": 2},
    "tensor_split.indices": {"indices": [1]},
    "movedim.int": {"source": 0, "destination": -1},
    "moveaxis.int": {"source": 0, "destination": -1},
    "movedim.intlist": {"source": [0], "destination": [-1]},
    "moveaxis.intlist": {"source": [0], "destination": [-1]},
    "transpose.int": {"dim0": 0, "dim1": -1},
    "swapaxes": {"axis0": 0, "axis1": -1},
    "swapdims": {"dim0": 0, "dim1": -1},
    "unflatten.int": {"dim": 0, "sizes": [-1, 1]},
    "narrow": {"dim": 0, "start": 0, "length": 1},
    "unfold": {"dimension": 0, "size": 2, "step": 1},
    "slice.Tensor": {"start": 1},
    "squeeze.dims": {"dim": [0]},
    "view.dtype": {"dtype": torch.int32},
    "to.dtype": {"dtype": torch.float64},
    "to.device": {"device": torch.device("cpu"), "dtype": torch.float64},
    "to.dtype_layout": {"dtype": torch.float64},
    "_to_copy": {"dtype": torch.float64},
    "new_empty_strided": {"size": [2, 2], "stride": [1, 2]},
    "new_empty": {"size": [2, 3]},
    "new_zeros": {"size": [2, 3]},
    "new_ones": {"size": [2, 3]},
    "new_full": {"size": [2, 3], "fill_value": 2},
    "norm.Scalar": {"p": 2},
    "norm.ScalarOpt_dtype": {"p": 2, "dtype": torch.float64},
    "native_dropout_backward": {"mask": "mask", "scale": 2.0},
    "threshold_backward": {"threshold": 0.5},
    "gelu": {"approximate": "tanh"},
    "_foreach_pow.ScalarAndTensor": {"self": 2},
    "_foreach_addcmul.Tensor": {"scalars": torch.tensor([2.0, 3.0])},
    "_foreach_addcmul_.Tensor": {"scalars": torch.tensor([2.0, 3.0])},
    "_foreach_addcdiv.Tensor": {"scalars": torch.tensor([2.0, 3.0])},
    "_foreach_addcdiv_.Tensor": {"scalars": torch.tensor([2.0, 3.0])},
    "mvlgamma_": {"p": 1},
    "narrow.Tensor": {"dim": 0, "start": torch.tensor(0), "length": 1},
    "hsplit.int": {"sections": 1},
    "vsplit.int": {"sections": 1},
    "dsplit.int": {"sections": 1},
    "hsplit.array": {"indices": [1]},
    "vsplit.array": {"indices": [1]},
    "dsplit.array": {"indices": [1]},
}

# Operations for which no call can be sampled, each with its reason.
NOT_SAMPLED = {
    "sparse tensors alone": (
        "_indices _values indices values coalesce _sparse_broadcast_to ccol_indices col_indices crow_indices "
        "row_indices"
    ),
    "nested tensors alone": "_nested_get_values _nested_view_from_buffer _nested_view_from_jagged",
    "forward-mode AD levels, inside of autograd alone": "_fw_primal _make_dual _unpack_dual",
    "wants an open autocast of its device": "_autocast_to_full_precision _autocast_to_reduced_precision",
    "CUDA alone": "_fill_mem_eff_dropout_mask_",
    "torch's own test of its dispatcher": "_test_autograd_multiple_dispatch_view",
    "takes the source of a slice_scatter, made by functionalization alone": "slice_inverse",
    "reads its index tensor's raw memory, which a ShardedTensor refuses": "tensor_split.tensor_indices_or_sections",
}

TENSOR_LIST = ("List[Tensor]", "Tensor[]")


def all_ops():
    """Every aten overload, in a fixed order."""
    ops = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            ops.append(getattr(getattr(aten, packet), overload or "default"))
    return ops


def short(op):
    return str(op).removeprefix("aten.").removesuffix(".default")


def is_composite(op):
    """Whether it is taken apart before any tensor subclass sees it."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def ops_of(*classes):
    return [op for op in all_ops() if classify(op) in classes]


# --- sampling --------------------------------------------------------------------------------------------------------

PROFILES = ("unit", "normal", "int", "bool", "bfloat16", "complex", "large")


def sample(profile, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    if profile == "unit":
        return torch.rand(shape, generator=generator) * 0.8 + 0.1
    if profile == "normal":
        return torch.randn(shape, generator=generator) * 3
    if profile == "int":
        return torch.randint(1, 5, shape, generator=generator)
    if profile == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    if profile == "large":
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 3
    if profile == "bfloat16":
        return torch.randn(shape, generator=generator).bfloat16()
    return torch.randn(shape, generator=generator, dtype=torch.complex64)


@dataclass(frozen=True)
class Geometry:
    """A shape, how it is cut, and whether its memory is transposed."""

    shape: tuple[int, ...]
    dim: int | None
    transposed: bool = False

    def make(self, profile, seed):
        if not self.transposed:
            return sample(profile, self.shape, seed)
        return sample(profile, self.shape[::-1], seed).permute(*reversed(range(len(self.shape))))


GEOMETRIES = (
    Geometry((5, 3), 0),
    Geometry((4, 4), 1, transposed=True),
    Geometry((2, 1, 3), 2),
    Geometry((7,), 0),
    Geometry((0, 3), 0),
    Geometry((), None),
    Geometry((3, 2), None),
)


@dataclass
class Call:
    """The arguments of one plain call; `positions` says which of them hold tensors."""

    args: list
    kwargs: dict = field(default_factory=dict)

    def tensors(self):
        return [x for x in itertools.chain(self.args, self.kwargs.values()) if has_tensor(x)]


def has_tensor(value):
    return isinstance(value, Tensor) or (isinstance(value, list) and any(isinstance(x, Tensor) for x in value))


def map_args(call, change):
    """A copy of a call whose tensors are `change(tensor, number of the tensor argument)`."""
    count = itertools.count()

    def one(value):
        if isinstance(value, Tensor):
            return change(value, next(count))
        if isinstance(value, list) and has_tensor(value):
            number = next(count)
            return [change(x, number) if isinstance(x, Tensor) else x for x in value]
        return value

    args = [one(a) for a in call.args]
    return Call(args, {k: one(v) for k, v in call.kwargs.items()})


def make_value(op, arg, profile, geometry, seed, *, fill):
    """A value for one argument of a schema, or `...` to leave it out."""
    kind = str(arg.type)
    special = SPECIAL_ARGS.get(short(op), {}).get(arg.name, ...)
    shape = geometry.shape
    if special == "tensor":
        return geometry.make(profile, seed)
    if special == "mask" or (kind == "Tensor" and arg.name in ("mask", "condition")):
        return geometry.make("bool", seed)
    if special == "stride":
        return list(geometry.make(profile, seed).stride())
    if special == "reversed":
        return list(reversed(range(len(shape))))
    if special == "same":
        return list(shape)
    if special == "sizes":
        return [1, shape[0] - 1] if shape else []
    if special is not ...:
        return special
    if kind == "Tensor":
        return geometry.make(profile, seed)
    if kind == "List[Tensor]":
        return [geometry.make(profile, seed), Geometry((3, 2), 0).make(profile, seed + 1)]
    if kind == "List[number]":
        return [2, 3]
    if arg.has_default_value() and not (fill and kind in ("Optional[Tensor]", "number", "float", "Optional[float]")):
        return ...
    if kind == "Optional[Tensor]":
        return geometry.make(profile, seed) if fill else None
    if kind.startswith("Optional") and kind != "Optional[float]":
        return None
    by_kind = {"number": 2, "float": 0.25, "Optional[float]": 0.25, "int": 0, "bool": False, "List[int]": list(shape)}
    if kind not in by_kind:
        raise NotImplementedError(f"an argument of type {kind}")
    return by_kind[kind]


def build(op, profile, geometry, *, fill):
    call = Call([])
    for i, arg in enumerate(op._schema.arguments):
        value = make_value(op, arg, profile, geometry, 17 * i + 1, fill=fill)
        if value is ...:
            continue
        if arg.kwarg_only or len(call.args) < i:
            call.kwargs[arg.name] = value
        else:
            call.args.append(value)
    return call


def fresh(call):
    return map_args(call, lambda t, _: t.clone(memory_format=torch.preserve_format))


# --- running and comparing -------------------------------------------------------------------------------------------

MODES = ("all", "self", "others", "scalars")


@functools.cache
def world_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(tensor, geometry):
    dim = geometry.dim if tuple(tensor.shape) == geometry.shape else 0
    return ShardedTensor.shard(tensor, world_mesh(), dim if tensor.dim() else None, name="w")


def convert(call, mode, geometry):
    """The call with some of its tensors sharded."""
    if mode == "all":
        return map_args(call, lambda t, _: sharded(t, geometry))
    if mode == "others":
        return map_args(call, lambda t, i: sharded(t, geometry) if i else t.clone())
    return map_args(call, lambda t, i: t.clone() if i else sharded(t, geometry))


def with_scalars(call):
    """The call with its tensors after the first made 0-d."""
    return map_args(call, lambda t, i: t.reshape(-1)[0].clone() if i and t.numel() else t)


def plain(value):
    if isinstance(value, ShardedTensor):
        return value.full_tensor()
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def flat(value):
    return [x for v in value for x in flat(v)] if isinstance(value, (list, tuple)) else [value]


# Bitwise where the plain call sees memory of the same order; vectorized and scalar code of the same function differ in
# the last bits, and which of them runs depends on strides; so do the complex ones, whose ends of rows are scalar.
ULPS = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2, torch.complex64: 1e-6}
# On CPUs with short vectors the end of a tensor, which is scalar, is rounded otherwise, and a shard ends elsewhere.
ROUNDED_BY_PLACE = {"float_power", "hypot"}


def own_parts(got, want):
    """Pairs to compare without a gather: this rank's shard and what it should hold; full values for all else."""
    lefts, rights = [], []
    for g, w in zip(got, want, strict=True):
        if isinstance(g, ShardedTensor) and not g.is_view and g.shape == w.shape:
            dim = next((p.dim for p in g.placements if isinstance(p, Shard)), None)
            if dim is not None and g.to_local().shape != g.shape:  # a temporary with a rank's own data is whole
                start, stop = oracle.chunk_extents(w.shape[dim], dist.get_world_size())[dist.get_rank()]
                w = w.narrow(dim, start, stop - start)
            g = g.to_local()
        lefts.append(plain(g))
        rights.append(w)
    return lefts, rights


def compare(got, want, *, exact, gather=True):
    """An error text, or None; without `gather` shards are compared where they lie."""
    got, want = flat(got), flat(want)
    if len(got) == len(want):
        got, want = (plain(got), want) if gather else own_parts(got, want)
    if len(got) != len(want):
        return f"{len(got)} results instead of {len(want)}"
    for g, w in zip(got, want, strict=True):
        if not isinstance(w, Tensor):
            if g != w:
                return f"{g} instead of {w}"
            continue
        if (g.shape, g.dtype) != (w.shape, w.dtype):
            return f"{tuple(g.shape)} {g.dtype} instead of {tuple(w.shape)} {w.dtype}"
        g, w = g.resolve_conj().resolve_neg(), w.resolve_conj().resolve_neg()
        rtol = 0 if exact else ULPS.get(w.dtype, 0)
        try:
            torch.testing.assert_close(g, w, rtol=rtol, atol=rtol, equal_nan=True)
        except AssertionError as error:
            return str(error).replace("\n", " ")[:200]
    return None


@dataclass
class Report:
    """What a rank found: calls made, operations never sampled, and failures."""

    num_cases: int = 0
    sampled: set = field(default_factory=set)
    failures: list = field(default_factory=list)

    def fail(self, op, what, text):
        self.failures.append(f"{short(op)} [{what}]: {text}")


def samples(op, geometry, turn):
    """Plain calls of an operation that work, with their results; `turn` says which dtype comes first."""
    seen, num_found, first = 0, 0, turn % len(PROFILES)
    for profile, fill in itertools.product(PROFILES[first:] + PROFILES[:first], (False, True)):
        if num_found == 2 or (fill and not num_found):
            continue
        try:
            call = build(op, profile, geometry, fill=fill)
            size = len(call.args) + len(call.kwargs)
            if fill and size == seen:
                continue  # nothing more was filled in
            seen = size
            probe = fresh(call)
            torch.default_generator.manual_seed(5)
            result = op(*probe.args, **probe.kwargs)
            _ = [x.resolve_neg().resolve_conj() for x in flat(result) if isinstance(x, Tensor)]  # not of every dtype
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            continue
        num_found += 1
        yield f"{profile} {geometry.shape} dim {geometry.dim}{' filled' if fill else ''}", call, probe, result


def mutated_numbers(op):
    """Which tensor arguments, counted as `map_args` does, are written to."""
    return [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]


def check_ops(names, modes, kinds, exact):
    """Run all samples of some operations; `kinds(op, mode, call)` gives an expected kind or None."""
    report = Report()
    by_name = {short(op): op for op in all_ops()}
    with torch.no_grad():
        for i, name in enumerate(names):
            turn = i + dist.get_world_size()
            chosen = [GEOMETRIES[(turn + step) % len(GEOMETRIES)] for step in (0, 2, 3)]
            found = [(g, x) for k, g in enumerate(chosen) for x in samples(by_name[name], g, turn + k)]
            if not found:  # rare shapes only
                found = [(g, x) for g in GEOMETRIES for x in samples(by_name[name], g, turn)]
            for (geometry, sampled), mode in itertools.product(found, modes):
                check_one(report, by_name[name], geometry, *sampled, mode, kinds, exact)
    report.failures = report.failures[:40]
    return report


def check_one(report, op, geometry, what, call, probe, result, mode, kinds, exact):
    num_tensors = len(call.tensors())
    if mode in ("self", "others", "scalars") and num_tensors < 2:
        return
    if mode == "scalars":
        call = with_scalars(call)
        probe = fresh(call)
        try:
            torch.default_generator.manual_seed(5)
            result = op(*probe.args, **probe.kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return
    what = f"{what}, {mode} sharded"
    ours = convert(call, mode, geometry)
    if mode == "others" and not any(isinstance(x, ShardedTensor) for x in flat([*ours.args, *ours.kwargs.values()])):
        return
    report.num_cases += 1
    report.sampled.add(short(op))
    try:
        versions = [
            (x.to_local().data_ptr(), x.to_local()._version)
            for x in flat(ours.args[:1])
            if isinstance(x, ShardedTensor)
        ]
        torch.default_generator.manual_seed(5)
        got = op(*ours.args, **ours.kwargs)
        is_complex = any(x.is_complex() for x in flat(probe.args) if isinstance(x, Tensor))
        is_placed = short(op).split(".")[0].rstrip("_") in ROUNDED_BY_PLACE
        same_memory = exact and not geometry.transposed and not is_complex and mode in ("all", "scalars")
        same_memory = same_memory and not is_placed
        problem = compare(got, result, exact=same_memory, gather=mode == "all")
        problem = problem or check_kinds(op, mode, got, ours, KIND_RULES[kinds], geometry)
        problem = problem or check_written(op, ours, probe, versions, exact=same_memory)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if problem:
        report.fail(op, what, problem)


def check_kinds(op, mode, got, ours, rule, geometry):
    if is_composite(op):
        return None
    expected = rule(op, mode, ours)
    for item in flat(got):
        found = Tensor if type(item) in PLAIN else type(item)  # plain ones, that answer as DTensors do
        if expected is not None and isinstance(item, Tensor) and found is not expected:
            return f"gave a {type(item).__name__} instead of a {expected.__name__}"
        if type(item) is ShardedTensor and not item.is_view and tuple(item.shape) == geometry.shape:
            local = sharded(torch.empty(geometry.shape), geometry).to_local()
            if item.to_local().shape != local.shape:
                return f"its shard is {tuple(item.to_local().shape)}, not {tuple(local.shape)}"
    return None


def check_written(op, ours, probe, versions, *, exact):
    """Arguments that are written hold what the plain ones hold; the others what they held."""
    pairs = [*zip(ours.args, probe.args, strict=True), *((ours.kwargs[k], probe.kwargs[k]) for k in ours.kwargs)]
    for left, right in pairs:
        if has_tensor(right):
            problem = compare(left, right, exact=exact, gather=False)
            if problem:
                return f"an argument is then {problem}"
    writes = mutated_numbers(op)
    if writes and writes[0]:
        written = [x for x in flat(ours.args[:1]) if isinstance(x, ShardedTensor)]
        for item, (pointer, before) in zip(written, versions, strict=True):
            if item.numel() and item.to_local().data_ptr() == pointer and item.to_local()._version <= before:
                return "the version of the written shard did not rise"
    return None


def lies_alike(mode, ours):
    """Whether an elementwise operation may stay on the shards."""
    first = next((x for x in flat([*ours.args, *ours.kwargs.values()]) if isinstance(x, ShardedTensor)), None)
    others = [x for x in flat([*ours.args, *ours.kwargs.values()]) if isinstance(x, Tensor)]
    return first is not None and all(isinstance(x, ShardedTensor) for x in others)


def pointwise_kind(op, mode, ours):
    return ShardedTensor if lies_alike(mode, ours) else Tensor


def first_kind(op, mode, ours):
    return type(ours.args[0]) if isinstance(ours.args[0], Tensor) else None


def foreach_kind(op, mode, ours):
    """Lists stay on the shards; an operand of another layout, beside them, says no."""
    return ShardedTensor if mode == "all" and "Tensor" not in op._overloadname else None


KIND_RULES = {
    "pointwise": pointwise_kind,
    "inplace": first_kind,
    "sharded": lambda op, mode, ours: ShardedTensor,
    "plain": lambda op, mode, ours: Tensor,
    "foreach": foreach_kind,
    "any": lambda op, mode, ours: None,
}


def run_ops(worlds, num_ranks, ops, modes, kinds, *, floor, exact=True):
    """Run on a world and assert that nothing failed, that ranks agree, and that enough was run."""
    unsampled = {name for text in NOT_SAMPLED.values() for name in text.split()}
    names = [short(op) for op in ops if short(op) not in unsampled]
    if num_ranks != 2 and len(names) > 20:
        names = names[num_ranks // 2 :: 2]  # 1 and 3 ranks share the long classes, 2 ranks run all of them
        floor //= 2
    reports = worlds.run(num_ranks, check_ops, names, modes, kinds, exact, timeout_s=120)
    failures = sorted(set(itertools.chain.from_iterable(r.failures for r in reports)))
    num_cases = {r.num_cases for r in reports}
    print(f"{len(names)} operations, {sorted(num_cases)} cases on {num_ranks} ranks")
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures)
    missing = set(names) - reports[0].sampled
    assert not missing, f"no call could be sampled for {sorted(missing)}"
    assert len(num_cases) == 1
    assert num_cases.pop() >= floor
    return reports[0]


# --- the table -------------------------------------------------------------------------------------------------------

NUM_RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3])


@NUM_RANKS
def test_pointwise_operations_equal_the_plain_ones_and_stay_sharded(worlds: WorldPool, num_ranks):
    run_ops(worlds, num_ranks, ops_of(OpClass.POINTWISE), MODES, "pointwise", floor=2000)


@NUM_RANKS
def test_pointwise_operations_in_place_write_self_and_return_it(worlds: WorldPool, num_ranks):
    ops = ops_of(OpClass.POINTWISE_INPLACE)
    run_ops(worlds, num_ranks, ops, MODES, "inplace", floor=1000)


@NUM_RANKS
def test_foreach_operations_equal_the_plain_ones_and_stay_sharded(worlds: WorldPool, num_ranks):
    run_ops(worlds, num_ranks, ops_of(OpClass.FOREACH), ("all", "self", "others"), "foreach", floor=500)


@NUM_RANKS
def test_foreach_and_fused_operations_in_place_write_every_item(worlds: WorldPool, num_ranks):
    ops = [op for op in ops_of(OpClass.FOREACH_INPLACE) if not short(op).startswith("_fused")]
    run_ops(worlds, num_ranks, ops, ("all", "self", "others"), "any", floor=500)


@NUM_RANKS
def test_views_are_lazy_and_equal_the_plain_ones(worlds: WorldPool, num_ranks):
    run_ops(worlds, num_ranks, ops_of(OpClass.VIEW), ("all",), "sharded", floor=150)


@NUM_RANKS
def test_aliases_and_copies_are_sharded_alike(worlds: WorldPool, num_ranks):
    run_ops(worlds, num_ranks, ops_of(OpClass.ALIAS, OpClass.CLONE, OpClass.CAST), ("all",), "sharded", floor=20)


@NUM_RANKS
def test_factories_give_tensors_of_the_same_layout(worlds: WorldPool, num_ranks):
    ops = [op for op in ops_of(OpClass.FACTORY) if op is not aten.empty_like.default]
    run_ops(worlds, num_ranks, ops, ("all",), "sharded", floor=15)


@NUM_RANKS
def test_new_tensors_are_plain(worlds: WorldPool, num_ranks):
    ops = [op for op in ops_of(OpClass.NEW) if "empty" not in short(op)]
    run_ops(worlds, num_ranks, ops, ("all",), "plain", floor=15)


@NUM_RANKS
def test_random_fills_draw_what_the_plain_tensor_draws(worlds: WorldPool, num_ranks):
    run_ops(worlds, num_ranks, ops_of(OpClass.RANDOM_INPLACE), ("all", "self"), "inplace", floor=40)


@NUM_RANKS
def test_random_factories_draw_what_the_plain_ones_draw(worlds: WorldPool, num_ranks):
    run_ops(worlds, num_ranks, ops_of(OpClass.RANDOM_FACTORY), ("all",), "sharded", floor=30)


@NUM_RANKS
def test_reductions_give_the_same_plain_value_on_every_rank(worlds: WorldPool, num_ranks):
    """Within rounding for floats; bit for bit for integers and bools, whose tolerance is zero."""
    run_ops(worlds, num_ranks, ops_of(OpClass.REDUCTION), ("all",), "plain", floor=30, exact=False)


@NUM_RANKS
def test_norms_of_lists_are_plain(worlds: WorldPool, num_ranks):
    ops = [*ops_of(OpClass.FOREACH_REDUCTION), aten._foreach_max.default]
    run_ops(worlds, num_ranks, ops, ("all",), "plain", floor=8, exact=False)


@NUM_RANKS
def test_equality_is_agreed_on(worlds: WorldPool, num_ranks):
    run_ops(worlds, num_ranks, ops_of(OpClass.EQUAL), ("all", "self", "others"), "any", floor=10)


# --- classes whose calls are written by hand -------------------------------------------------------------------------


def check_empty_factories():
    with torch.no_grad():
        for geometry in GEOMETRIES:
            full = geometry.make("normal", 1)
            w = sharded(full, geometry)
            for out, want in (
                (torch.empty_like(w), torch.empty_like(full)),
                (torch.empty_like(w, dtype=torch.int64), torch.empty_like(full, dtype=torch.int64)),
            ):
                assert type(out) is ShardedTensor
                assert (out.shape, out.dtype, out.stride()) == (want.shape, want.dtype, want.stride())
                assert out.to_local().shape == w.to_local().shape
            assert w.new_empty((2, 3)).shape == (2, 3)
            for out in ((w + 0).new_empty((2, 3)), w.new_empty_strided((2, 3), (1, 2))):
                assert type(out) is Tensor
                assert out.shape == (2, 3)
            assert out.stride() == (1, 2)


@NUM_RANKS
def test_empty_factories_have_the_metadata_of_the_plain_ones(worlds: WorldPool, num_ranks):
    worlds.run(num_ranks, check_empty_factories)


REDUCED = {
    "sum": lambda x: x.sum(),
    "sum to int64": lambda x: x.sum(dtype=torch.int64),
    "sum to float64": lambda x: x.sum(dtype=torch.float64),
    "mean to float64": lambda x: x.mean(dtype=torch.float64),
    "max": torch.max,
    "min": lambda x: x.min(),
    "any": lambda x: x.any(),
    "all": lambda x: x.all(),
    "any of none": lambda x: (x > 99).any(),
    "all of all": lambda x: (x < 99).all(),
    "inf norm": lambda x: torch.linalg.vector_norm(x.double(), float("inf")),
    "0 norm": lambda x: torch.linalg.vector_norm(x.double(), 0),
    "1 norm": lambda x: torch.linalg.vector_norm(x.double(), 1),
    "-inf norm": lambda x: torch.linalg.vector_norm(x.double(), float("-inf")),
    "norm with dim": lambda x: torch.linalg.vector_norm(x.double(), 2, 0),
    "norm keepdim": lambda x: torch.linalg.vector_norm(x.double(), 1, None, True),
    "sum over a dim": lambda x: x.sum(0),
    "max over a dim": lambda x: x.max(0).values,
    "argmax": lambda x: x.argmax(),
    "prod": lambda x: x.prod(),
    "count_nonzero": lambda x: x.count_nonzero(),
    "aminmax": torch.aminmax,
}


def check_exact_reductions():
    """Small integers in every dtype: sums have no rounding, so results are equal bit for bit."""
    num_cases = 0
    with torch.no_grad():
        for geometry, dtype in itertools.product(
            GEOMETRIES, (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
        ):
            full = geometry.make("int", 3).to(dtype)
            full = full if full.dtype == torch.uint8 else full - 2
            w = sharded(full, geometry)
            for name, reduce in REDUCED.items():
                try:
                    want = reduce(full)
                except (RuntimeError, IndexError):
                    with pytest.raises((RuntimeError, IndexError)):
                        reduce(w)
                    continue
                got = reduce(w)
                problem = compare(got, want, exact=True)
                assert problem is None, f"{name} of {dtype} {geometry}: {problem}"
                assert all(type(x) in PLAIN for x in flat(got)) or not isinstance(got, Tensor), name
                num_cases += 1
            if dtype.is_floating_point and full.numel():
                full.view(-1) if full.dim() == 0 else full[-1:].fill_(float("nan"))
                w = sharded(full, geometry)
                for reduce in (REDUCED["max"], REDUCED["min"], REDUCED["sum"], REDUCED["inf norm"]):
                    assert compare(reduce(w), reduce(full), exact=True) is None
    return num_cases


@NUM_RANKS
def test_reductions_of_small_integers_are_exact_in_every_dtype(worlds: WorldPool, num_ranks):
    assert min(worlds.run(num_ranks, check_exact_reductions)) >= 500


def extremes_beside_empty_shards():
    """Of values of one sign, for each dtype and sign: what an empty shard adds must not be the largest, nor least."""
    found = []
    for dtype, sign in itertools.product((torch.float32, torch.bfloat16, torch.int64), (1, -1)):
        full = torch.tensor([2, 3]).to(dtype) * sign
        w = sharded(full, Geometry((2,), 0))
        found.append((w.max().item(), w.min().item()) == (full.max().item(), full.min().item()))
    return found


def test_an_empty_shard_adds_nothing_to_a_maximum_or_minimum(worlds: WorldPool):
    assert worlds.run(3, extremes_beside_empty_shards) == [[True] * 6] * 3


WRITES = {
    "index_put_": lambda w, o: w.index_put_((torch.tensor([0, 2]),), o[:2]),
    "index_put_ accumulate": lambda w, o: w.index_put_((torch.tensor([1, 1]),), o[:2], accumulate=True),
    "setitem of a mask": lambda w, o: w.__setitem__(o > 0, 5.0),
    "setitem of a row": lambda w, o: w.__setitem__(1, o[0]),
    "setitem of a column": lambda w, o: w.__setitem__((slice(None), 1), o[:, 0]),
    "setitem of everything": lambda w, o: w.__setitem__(..., o),
    "index_fill_": lambda w, o: w.index_fill_(1, torch.tensor([0, 2]), 7.0),
    "index_add_": lambda w, o: w.index_add_(0, torch.tensor([2, 0]), o[:2]),
    "index_copy_": lambda w, o: w.index_copy_(0, torch.tensor([2, 0]), o[:2]),
    "scatter_": lambda w, o: w.scatter_(0, (o > 0).long(), o),
    "scatter_add_": lambda w, o: w.scatter_add_(1, (o > 0).long(), o),
    "scatter_reduce_": lambda w, o: w.scatter_reduce_(0, (o > 0).long(), o, "amax"),
    "masked_scatter_": lambda w, o: w.masked_scatter_(o > 0, o),
    "masked_fill_": lambda w, o: w.masked_fill_(o > 0, -1.0),
    "masked_fill_ by a 0-d tensor": lambda w, o: w.masked_fill_(o > 0, o[0, 0]),
    "put_": lambda w, o: w.put_(torch.tensor([0, 5, 7]), o.reshape(-1)[:3]),
    "cumsum_": lambda w, o: w.cumsum_(0),
    "cumprod_": lambda w, o: w.cumprod_(1),
    "tril_": lambda w, o: w.tril_(),
    "triu_": lambda w, o: w.triu_(1),
    "addmm_": lambda w, o: w.addmm_(o, torch.ones(3, 3)),
    "addr_": lambda w, o: w.addr_(torch.arange(5.0), torch.arange(3.0)),
    "renorm_": lambda w, o: w.renorm_(2, 0, 1.0),
    "fill_diagonal_": lambda w, o: w.fill_diagonal_(9.0),
    "copy_": lambda w, o: w.copy_(o),
    "copy_ broadcast": lambda w, o: w.copy_(o[0]),
    "copy_ of another dtype": lambda w, o: w.copy_(o.double()),
    "copy_ of a transposed tensor": lambda w, o: w.copy_(o.t().contiguous().t()),
    "fill_ by a 0-d tensor": lambda w, o: w.fill_(o[1, 1]),
    "zero_": lambda w, o: w.zero_(),
    "swap of rows": lambda w, o: w.copy_(w[[4, 3, 2, 1, 0]]),
    "add_ of its own transpose": lambda w, o: w[:3].add_(w[:3].t().clone()),
    "copy_ of an overlapping view": lambda w, o: w[1:].copy_(w[:-1].clone()),
    "softmax into it": lambda w, o: (
        torch.softmax(o, 0, out=w) if not isinstance(w, ShardedTensor) else w.copy_(torch.softmax(o, 0))
    ),
    "add into it": lambda w, o: torch.add(o, 2.0, out=w),
    "mm into it": lambda w, o: torch.mm(o, torch.ones(3, 3), out=w),
    "cat into it": lambda w, o: torch.cat([o[:2], o[2:]], out=w),
    "normal_ of a part": lambda w, o: w[1:3].normal_(),
    "a foreach write to two of its parts": lambda w, o: torch._foreach_mul_([w[:2], w[3:]], 2.0) and None,
    "a foreach copy to two of its parts": lambda w, o: torch._foreach_copy_([w[0], w[4]], [o[1], o[2]]) and None,
    "nan_to_num_": lambda w, o: w.nan_to_num_(),
    "bernoulli_ of a tensor": lambda w, o: w.bernoulli_(torch.sigmoid(o)),
    "trunc_normal_": lambda w, o: torch.nn.init.trunc_normal_(w, std=0.5, a=-1.0, b=1.0),
    "orthogonal_": lambda w, o: torch.nn.init.orthogonal_(w),
    "kaiming_uniform_": lambda w, o: torch.nn.init.kaiming_uniform_(w),
    "xavier_normal_": lambda w, o: torch.nn.init.xavier_normal_(w),
    "sparse_": lambda w, o: torch.nn.init.sparse_(w, 0.3),
}


def check_writes(dim):
    failures = []
    with torch.no_grad():
        for (name, write), shard_other in itertools.product(WRITES.items(), (False, True)):
            full, other = sample("normal", (5, 3), 1), sample("normal", (5, 3), 2)
            w = ShardedTensor.shard(full, world_mesh(), dim, name="w")
            ours = ShardedTensor.shard(other, world_mesh(), dim, name="o") if shard_other else other
            before = w.to_local()._version
            torch.manual_seed(7)
            want = write(full, other)
            torch.manual_seed(7)
            try:
                got = write(w, ours)
                problem = compare(w, full, exact=True)
                if problem is None and isinstance(want, Tensor) and want.shape == (5, 3) and got is not w:
                    problem = "did not give self back"
                if problem is None and w.to_local().numel() and w.to_local()._version <= before:
                    problem = "the version did not rise"
                if problem is None and w.to_local().data_ptr() != w.shard_storage.resolve().data_ptr():
                    problem = "the shard moved"
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error)[:200]}"
            if problem:
                failures.append(f"{name} [dim {dim}, other {'sharded' if shard_other else 'plain'}]: {problem}")
    return failures


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_writes_reach_the_shards_of_their_owners(worlds: WorldPool, num_ranks, dim):
    failures = sorted(set(itertools.chain.from_iterable(worlds.run(num_ranks, check_writes, dim))))
    assert not failures, "\n".join(failures)


COMPUTES = {
    "mm": lambda w, o: w @ o.t(),
    "rmatmul": lambda w, o: o.t() @ w,
    "linear": lambda w, o: torch.nn.functional.linear(o, w),
    "addmm": lambda w, o: torch.addmm(o[0], o, w.t() @ w),
    "bmm": lambda w, o: torch.bmm(w.expand(2, 5, 3), o.expand(2, 5, 3).transpose(1, 2)),
    "einsum": lambda w, o: torch.einsum("ij,kj->ik", w, o),
    "embedding": lambda w, o: torch.nn.functional.embedding(torch.tensor([0, 4, 4]), w),
    "layer_norm": lambda w, o: torch.nn.functional.layer_norm(o, (3,), w[0], w[1]),
    "rms_norm": lambda w, o: torch.nn.functional.rms_norm(o, (3,), w[2]),
    "conv1d": lambda w, o: torch.nn.functional.conv1d(o.reshape(1, 3, 5), w.reshape(5, 3, 1)),
    "softmax": lambda w, o: torch.softmax(w, 0),
    "cross_entropy": lambda w, o: torch.nn.functional.cross_entropy(w, torch.tensor([0, 1, 2, 0, 1])),
    "attention": lambda w, o: torch.nn.functional.scaled_dot_product_attention(w, o, o),
    "cat": lambda w, o: torch.cat([w, o, w]),
    "stack": lambda w, o: torch.stack([w, w, o], 1),
    "sort": lambda w, o: torch.sort(w, 0),
    "topk": lambda w, o: torch.topk(w.flatten(), 4),
    "unique": lambda w, o: torch.unique(w),
    "nonzero": lambda w, o: (w > 0).nonzero(),
    "index": lambda w, o: w[torch.tensor([4, 0])],
    "index by a mask": lambda w, o: w[o > 0],
    "gather": lambda w, o: w.gather(1, (o > 0).long()),
    "take": lambda w, o: w.take(torch.tensor([1, 14])),
    "index_select": lambda w, o: w.index_select(1, torch.tensor([2, 0])),
    "masked_select": lambda w, o: torch.masked_select(w, o > 0),
    "cumsum": lambda w, o: w.cumsum(0),
    "tril": lambda w, o: w.tril(),
    "flip": lambda w, o: w.flip(0),
    "roll": lambda w, o: w.roll(1, 0),
    "where": lambda w, o: torch.where(o > 0, w, o),
    "clamp by tensors": lambda w, o: w.clamp(o[0] - 1, o[0] + 1),
    "norm over a dim": lambda w, o: w.norm(dim=1),
    "std": lambda w, o: w.std(),
    "var over a dim": lambda w, o: w.var(0),
    "median": lambda w, o: w.median(),
    "quantile": lambda w, o: w.quantile(0.5),
    "logsumexp": lambda w, o: w.logsumexp(0),
    "svd values": lambda w, o: torch.linalg.svdvals(w.contiguous()).round(decimals=5),
    "qr": lambda w, o: torch.linalg.qr(w),
    "inverse": lambda w, o: torch.linalg.inv(w[:3] + 9 * torch.eye(3)),
    "outer": lambda w, o: torch.outer(w[0], o[0]),
    "cdist": torch.cdist,
    "pad": lambda w, o: torch.nn.functional.pad(w, (1, 1)),
    "repeat": lambda w, o: w.repeat(2, 1),
    "repeat_interleave": lambda w, o: w.repeat_interleave(2, 0),
    "fft": lambda w, o: torch.fft.fft(w, dim=0),
    "allclose": lambda w, o: torch.allclose(w, w + 0),
    "isclose": torch.isclose,
    "scatter": lambda w, o: w.scatter(0, (o > 0).long(), 3.0),
    "index_add": lambda w, o: w.index_add(0, torch.tensor([0]), o[:1]),
    "diag_embed": lambda w, o: torch.diag_embed(w[0]),
    "bincount": lambda w, o: torch.bincount((w > 0).long().flatten()),
    "searchsorted": lambda w, o: torch.searchsorted(w.flatten().sort().values, o),
    "glu": lambda w, o: torch.nn.functional.glu(w.t().contiguous()[:2], 0),
    "prelu": lambda w, o: torch.nn.functional.prelu(o, w[0]),
    "group_norm": lambda w, o: torch.nn.functional.group_norm(o, 1, w[0], w[1]),
    "to numpy": lambda w, o: torch.from_numpy(w.numpy().copy()),
    "to list": lambda w, o: torch.tensor(w.tolist()),
    "item": lambda w, o: torch.tensor(w[1, 1].item()),
    "contiguous": lambda w, o: w.t().contiguous(),
    "reshape that copies": lambda w, o: w.t().reshape(-1),
    "chunks": lambda w, o: list(w.chunk(2)),
    "mul by a column": lambda w, o: w * o[:, :1],
    "add of a row": lambda w, o: w + o[0],
    "product of its views": lambda w, o: w[0] * w[1],
    "its own square": lambda w, o: w * w,
}


def check_computes(dim):
    failures = []
    with torch.no_grad():
        for (name, compute), shard_other in itertools.product(COMPUTES.items(), (False, True)):
            full, other = sample("unit", (5, 3), 1), sample("normal", (5, 3), 2)
            w = ShardedTensor.shard(full, world_mesh(), dim, name="w")
            ours = ShardedTensor.shard(other, world_mesh(), dim, name="o") if shard_other else other
            try:
                problem = compare(compute(w, ours), compute(full, other), exact=True)
                problem = problem or compare(w, sample("unit", (5, 3), 1), exact=True)
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error)[:200]}"
            if problem:
                failures.append(f"{name} [dim {dim}, other {'sharded' if shard_other else 'plain'}]: {problem}")
    return failures


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_everything_else_computes_on_full_values(worlds: WorldPool, num_ranks, dim):
    failures = sorted(set(itertools.chain.from_iterable(worlds.run(num_ranks, check_computes, dim))))
    assert not failures, "\n".join(failures)


def check_recorded(names, dim):
    """What autograd records gives plain full values, and the gradient of the plain operation, averaged."""
    report = Report()
    by_name = {short(op): op for op in all_ops()}
    for name in names:
        op = by_name[name]
        for what, call, _, _ in samples(op, Geometry((5, 3), dim), 0):
            first = next((x for x in call.args if isinstance(x, Tensor)), None)
            if first is None or not first.is_floating_point():
                continue
            leaf = first.clone().requires_grad_()
            ours = ShardedTensor.shard(first, world_mesh(), dim, name="w").requires_grad_()
            twin = Call([leaf if x is first else x for x in call.args], call.kwargs)
            try:
                want = flat(op(*twin.args, **twin.kwargs))
                if not all(isinstance(x, Tensor) and x.requires_grad for x in want):
                    continue
                (grad,) = torch.autograd.grad(sum(x.sum() for x in want), leaf)
            except (RuntimeError, NotImplementedError):
                continue  # no derivative
            report.num_cases += 1
            try:
                got = flat(op(*[ours if x is first else x for x in call.args], **call.kwargs))
                problem = None if all(type(x) in PLAIN for x in got) else "the result is not plain"
                problem = problem or compare(got, [x.detach() for x in want], exact=False)
                (our_grad,) = torch.autograd.grad(sum(x.sum() for x in got), ours)
                problem = problem or (None if type(our_grad) is ShardedTensor else "the gradient is not sharded")
                problem = problem or compare(our_grad, grad, exact=False)
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error)[:150]}"
            if problem:
                report.fail(op, what, problem)
    return report


@pytest.mark.parametrize(("num_ranks", "dim"), [(1, 0), (2, 0), (3, 1)])
def test_recorded_operations_on_parameters_give_plain_full_values(worlds: WorldPool, num_ranks, dim):
    names = [short(op) for op in ops_of(OpClass.POINTWISE) if not is_composite(op)]
    reports = worlds.run(num_ranks, check_recorded, names[num_ranks % 2 :: 2], dim, timeout_s=120)
    failures = sorted(set(itertools.chain.from_iterable(r.failures for r in reports)))
    assert not failures, "\n".join(failures)
    assert min(r.num_cases for r in reports) >= 40


REFUSED_CALLS = {
    "t_": lambda w: w.t_(),
    "transpose_": lambda w: w.transpose_(0, 1),
    "swapaxes_": lambda w: w.swapaxes_(0, 1),
    "swapdims_": lambda w: w.swapdims_(0, 1),
    "squeeze_": lambda w: w.squeeze_(),
    "squeeze_.dim": lambda w: w.squeeze_(0),
    "squeeze_.dims": lambda w: aten.squeeze_.dims(w, [0]),
    "unsqueeze_": lambda w: w.unsqueeze_(0),
    "as_strided_": lambda w: w.as_strided_((2,), (1,)),
    "resize_": lambda w: w.resize_(2, 2),
    "resize_as_": lambda w: w.resize_as_(torch.ones(2, 2)),
    "set_.source_Tensor": lambda w: w.set_(torch.ones(5, 3)),
    "set_.source_Storage": lambda w: w.set_(torch.ones(15).untyped_storage()),
    "set_.source_Storage_storage_offset": lambda w: w.set_(torch.ones(15).untyped_storage(), 0, (5, 3), (3, 1)),
    "set_.source_Tensor_storage_offset": lambda w: aten.set_.source_Tensor_storage_offset(
        w, torch.ones(15), 0, [5, 3], [3, 1]
    ),
    "set_": lambda w: w.set_(),
}


def check_refused(names):
    full = sample("normal", (5, 3), 1)
    for name in names:
        w = ShardedTensor.shard(full, world_mesh(), 0, name="the.weight")
        with pytest.raises(UnsupportedOpError, match=r"the\.weight: .* changes the shape or memory"):
            raise AssertionError(f"{name} did not raise: {REFUSED_CALLS[name](w)}")
        assert compare(w, full, exact=True) is None, f"{name} changed the tensor"


def test_operations_that_reseat_a_tensor_are_refused_by_name(worlds: WorldPool):
    names = [short(op) for op in ops_of(OpClass.REFUSED)]
    names.remove("detach_")  # autograd's own, which changes no memory; `zero_grad` calls it
    assert set(names) <= set(REFUSED_CALLS)
    worlds.run(2, check_refused, names)


OPTIMIZERS = {
    "adam": lambda p, **kw: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, **kw),
    "adamw": lambda p, **kw: torch.optim.AdamW(p, lr=0.1, **kw),
    "amsgrad": lambda p, **kw: torch.optim.Adam(p, lr=0.1, amsgrad=True, **kw),
    "sgd": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, **kw),
    "nesterov": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **kw),
    "adagrad": lambda p, **kw: torch.optim.Adagrad(p, lr=0.1, **kw),
    "tensor lr": lambda p, **kw: torch.optim.AdamW(p, lr=torch.tensor(0.1), **kw),
}


def check_optimizers():
    """The single-tensor, foreach and fused steps, whose operations the schema cannot sample."""
    num_cases = 0
    for (name, make), variant in itertools.product(
        OPTIMIZERS.items(), ({"foreach": False}, {"foreach": True}, {"fused": True})
    ):
        if name == "tensor lr" and variant.get("foreach"):
            continue  # torch allows it under capture alone
        geometries = [g for g in GEOMETRIES if g.shape]
        fulls = [g.make("normal", i) for i, g in enumerate(geometries)]
        ours = [sharded(f, g).requires_grad_() for f, g in zip(fulls, geometries, strict=True)]
        theirs = [f.clone().requires_grad_() for f in fulls]
        optimizers = make(ours, **variant), make(theirs, **variant)
        for step in range(3):
            for i, (p, q, g) in enumerate(zip(ours, theirs, geometries, strict=True)):
                q.grad = g.make("normal", 100 * step + i)
                p.grad = sharded(q.grad, g)
            for optimizer in optimizers:
                optimizer.step()
        for p, q, g in zip(ours, theirs, geometries, strict=True):
            exact = False  # fused loops end in scalar code
            problem = compare(p.detach(), q.detach(), exact=exact)
            assert problem is None, f"{name} {variant} {g}: {problem}"
            for key, value in optimizers[1].state[q].items():
                if isinstance(value, Tensor) and value.shape == q.shape:
                    assert type(optimizers[0].state[p][key]) is ShardedTensor, f"{name} {variant}: state {key}"
                    assert compare(optimizers[0].state[p][key], value, exact=exact) is None, f"{name} state {key}"
            num_cases += 1
    return num_cases


@NUM_RANKS
def test_optimizer_steps_equal_those_on_full_tensors(worlds: WorldPool, num_ranks):
    assert min(worlds.run(num_ranks, check_optimizers)) >= 100


def check_unscale(bad_rank_value):
    full = torch.arange(10.0).reshape(5, 2)
    if bad_rank_value is not None:
        full[4, 1] = bad_rank_value  # on one rank's shard alone
    grads = [ShardedTensor.shard(full, world_mesh(), 0), torch.ones(2), ShardedTensor.shard(full[:1], world_mesh(), 0)]
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.5))
    if bad_rank_value is None:
        assert compare(grads[0], full * 0.5, exact=True) is None
    assert torch.equal(grads[1], torch.full((2,), 0.5))
    return found.item()


@NUM_RANKS
@pytest.mark.parametrize("value", [None, float("inf"), float("nan")])
def test_unscaling_agrees_on_a_gradient_that_one_rank_found_infinite(worlds: WorldPool, num_ranks, value):
    assert worlds.run(num_ranks, check_unscale, value) == [0.0 if value is None else 1.0] * num_ranks


def test_every_class_of_the_table_is_tested_here():
    assert {name for text in NOT_SAMPLED.values() for name in text.split()} <= {short(op) for op in all_ops()}
    counts = Counter(classify(op) for op in all_ops())
    assert set(counts) == set(OpClass)
    assert counts[OpClass.POINTWISE] > 200
    assert counts[OpClass.FOREACH] > 60
