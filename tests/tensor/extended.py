"""Weights with FSDP2's extension, as users write them: their shards say how they are gathered."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
F8, BF16 = torch.float8_e4m3fn, torch.bfloat16


class Wrapped(Tensor):
    """Around a plain tensor, `stored`; operations run on that, and these keep the class."""

    stored: Tensor
    kept = frozenset(
        {
            aten.detach.default,
            aten.split.Tensor,
            aten.new_zeros.default,
            aten.slice.Tensor,
            aten.copy_.default,
            aten.view.default,
            aten.as_strided.default,
            aten.clone.default,
            aten.empty_like.default,
            aten._to_copy.default,
        }
    )
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, stored: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, stored.shape, stored.stride(), dtype=stored.dtype, device=stored.device
        )

    def __init__(self, stored: Tensor) -> None:
        self.stored = stored

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map_only(Wrapped, lambda t: t.stored, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        if func is aten.copy_.default:
            return args[0]
        return tree_map_only(Tensor, cls, out) if func in cls.kept else out

    def __tensor_flatten__(self) -> Any:
        return ["stored"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return cls(inner["stored"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({self.stored})"


class Rounded(Wrapped):
    """fp32 that travels in bf16, and is a plain tensor in a forward; the older signature."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        assert mesh.ndim == 1
        return (self.stored.to(BF16),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        (rounded,) = outputs
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(rounded[: out.shape[0]])
            return None
        full = rounded.to(param_dtype)
        return full, (rounded, full)


class Padded(Rounded):
    """The same for uneven shards; the newer signature."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        assert isinstance(module, nn.Module)
        assert hasattr(mp_policy, "reduce_dtype")
        assert outer_stride == (outer_size[1], 1)
        rows = -(-outer_size[0] // mesh.size())
        padded = torch.full((rows, *outer_size[1:]), torch.nan, dtype=BF16)
        padded[: self.shape[0]] = self.stored
        return (padded,), None


class Float8(Tensor):
    """fp8 and a scale, which an operation casts up; what a forward sees of `ToFloat8`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, bits: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
        return Tensor._make_wrapper_subclass(cls, bits.shape, bits.stride(), dtype=dtype, device=bits.device)

    def __init__(self, bits: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.bits, self.scale = bits, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[0]
        if func in (
            aten.t.default,
            aten.detach.default,
            aten.as_strided.default,
            aten.view.default,
            aten.alias.default,
        ):
            return cls(func(own.bits, *args[1:]), own.scale, own.dtype)
        assert func in (aten.mm.default, aten.addmm.default, aten.clone.default), func
        up = tree_map_only(Float8, lambda t: t.bits.to(t.dtype) * t.scale.to(t.dtype), (args, kwargs or {}))
        return func(*up[0], **up[1])


class ToFloat8(Wrapped):
    """fp32 that is cast to fp8 by the largest value on any rank, as torchao's weight with a dynamic cast."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        amax = self.stored.abs().max()
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = amax / torch.finfo(F8).max
        return ((self.stored / scale).to(F8),), (scale,)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        (bits,), (scale,) = outputs, metadata
        if out is not None:
            out.scale = scale
            return None
        return Float8(bits, scale, param_dtype), (bits,)


class Everything(frozenset[Any]):
    def __contains__(self, item: object) -> bool:
        return True


class Wrapping(ToFloat8):
    """The result of every operation is of the class."""

    kept = Everything()


class Marked(Wrapped):
    """The result of every operation is of the class, and so are activations."""

    kept = Everything()
    num_inside = 0  # operations that met one inside of another

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Marked.num_inside += any(isinstance(arg, Marked) and isinstance(arg.stored, Marked) for arg in args)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Gathered(Marked):
    """Is gathered as it is kept."""

    made: Any

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.stored,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out.stored):
                out.stored.copy_(outputs[0])
            return None
        return self.made(outputs[0].to(param_dtype)), outputs


Gathered.made = Gathered


class ToMarked(Gathered):
    """Is gathered as another class."""

    kept, made = Wrapped.kept, Marked


class Strict(ToFloat8):
    """Takes no operation but those that `fully_shard` asks for."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (aten.detach.default, aten.split.Tensor, aten.new_zeros.default, aten.copy_.default):
            raise NotImplementedError(f"{func} of a Strict")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Int8(Tensor):
    """int8 rows with a scale each; a write rounds anew."""

    told: Any = None
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, ints: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Any:
        return Tensor._make_wrapper_subclass(cls, ints.shape, ints.stride(), dtype=dtype, device=ints.device)

    def __init__(self, ints: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> None:
        self.ints, self.scale = ints, scale

    @classmethod
    def of(cls, plain: Tensor) -> "Int8":
        scale = plain.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return cls((plain / scale).round().to(torch.int8), scale, plain.dtype)

    def value(self) -> Tensor:
        return (self.ints * self.scale).to(self.dtype)

    def write(self, plain: Tensor) -> "Int8":
        new = Int8.of(plain)
        self.ints, self.scale = new.ints, new.scale  # which an alias of this object does not see
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[0]
        if func is aten.split.Tensor:
            parts = zip(func(own.ints, *args[1:]), func(own.scale, *args[1:]), strict=True)
            return [cls(*part, own.dtype) for part in parts]
        if func is aten.new_zeros.default:
            return cls(own.ints.new_zeros(args[1]), own.scale.new_ones(args[1][0], 1), own.dtype)
        if func in (aten.slice.Tensor, aten.detach.default, aten.clone.default):
            return cls(func(own.ints, *args[1:]), func(own.scale, *args[1:]), own.dtype)
        if func in (aten.view.default, aten.as_strided.default):
            return cls(
                func(own.ints, *args[1:]), own.scale, own.dtype
            )  # FSDP2 asks for them, and uses the latter alone
        plain = tree_map_only(Int8, Int8.value, (args, kwargs or {}))
        if func is aten.copy_.default and type(own) is Int8:
            new = args[1] if type(args[1]) is Int8 else cls.of(args[1])
            own.ints.copy_(new.ints)
            own.scale.copy_(new.scale)
            return own
        out = func(*plain[0], **plain[1])
        return own.write(out) if func._schema.is_mutable and type(own) is Int8 else out

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        Int8.told = module, mp_policy
        return (self.ints, self.scale), "metadata"

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        assert metadata == "metadata"
        assert all(t.storage_offset() == 0 for t in outputs)
        if out is not None:
            return None
        return Int8(*outputs, param_dtype), tuple(outputs)


class Overrides(Float8):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError


class ToOverrides(ToFloat8):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return Overrides(*outputs, *metadata, param_dtype), outputs


def extend(net: nn.Module, kind: Any) -> nn.Module:
    """Give the weights of a net's linear layers a class."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            module.weight = nn.Parameter(Int8.of(weight) if kind is Int8 else kind(weight), requires_grad=True)
    return net
