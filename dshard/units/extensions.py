"""Parameters that say themselves how they are gathered: FSDP2's extension of tensor subclasses.

`fsdp_pre_all_gather` of a shard gives tensors and metadata; the tensors of all ranks are gathered as the bytes that
they are, one behind the other; `fsdp_post_all_gather` makes of them what forward and backward compute with. Each gather
has new memory for that, so `out=` is never passed.
"""

import inspect
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from dshard import collectives
from dshard.collectives import BufferPool, Gathered, GatherPlan, Handle, ReduceOp, ShardGroup, with_comms
from dshard.errors import DivergenceError, StateError, UnsupportedOpError
from dshard.layout import BucketLayout, ShardLayout
from dshard.tensor import ShardedTensor
from dshard.tensor.dispatch import give_precedence
from dshard.tensor.subclass_shards import exact_values, subclass_gathers

if TYPE_CHECKING:
    from dshard.units.unit import Unit

# Classes with these leave their operations to __torch_dispatch__.
_PLAIN_FUNCTIONS = (torch._C._disabled_torch_function_impl, getattr(Tensor.__torch_function__, "__func__", None))


@dataclass(frozen=True, slots=True)
class _Sent:
    """What one parameter sends.

    Args:
        shard: Which was asked.
        inputs: Its tensors, contiguous.
        metadata: What it will be given along with the tensors of all ranks.
    """

    shard: Any
    inputs: tuple[Tensor, ...]
    metadata: Any

    @property
    def kinds(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of its tensors."""
        return [(tuple(t.shape), t.dtype) for t in self.inputs]


@dataclass(slots=True)
class Extensions:
    """The parameters of a unit that say themselves how they are gathered.

    Args:
        unit: Theirs.
        slots: Their numbers in it.
    """

    unit: "Unit"
    slots: tuple[int, ...]
    _agreed: dict[int, Any] = field(default_factory=dict)  # what each sent when the ranks last compared
    _plans: dict[Any, GatherPlan] = field(default_factory=dict)
    are_met: bool = False  # whether they have been gathered once
    _contexts: dict[int, tuple[DeviceMesh, nn.Module]] = field(default_factory=dict)

    def exact(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Some shards of the unit, one per parameter; of these parameters as plain tensors of the same values."""
        params = self.unit.params
        return [exact_values(s, params[slot].name) if slot in self.slots else s for slot, s in enumerate(shards)]

    def start(self, pool: BufferPool) -> list[tuple[tuple[int, ...], Handle[Gathered]]]:
        """Start to gather them; gives slots and handles of their full values.

        Args:
            pool: Where buffers come from.

        Raises:
            UnsupportedOpError: One of them gives what cannot be gathered, or not the same on all ranks. On every rank
                alike, at the first gather.

        Communicates:
            An all-gather per group of ranks; the first time, and where shapes change, an all-reduce of 16 bytes per
            parameter.
        """
        sent: dict[int, _Sent] = {}
        failure: Exception | None = None
        for slot in self.slots:
            try:
                sent[slot] = self._ask(slot)
            except Exception as error:  # the peers learn of it first
                failure = error
                break
        kinds = {slot: s.kinds for slot, s in sent.items()}
        if failure is not None or kinds != self._agreed:
            self._compare(kinds, failure)
            self._agreed = kinds
        by_group: dict[str, tuple[ShardGroup, list[int]]] = {}
        for slot in self.slots:
            group = self.unit.params[slot].shard_group
            by_group.setdefault(group.full_name, (group, []))[1].append(slot)
        return [(tuple(slots), self._gather(group, slots, sent, pool)) for group, slots in by_group.values()]

    def _ask(self, slot: int) -> _Sent:
        """What a parameter's `fsdp_pre_all_gather` gives."""
        param: ShardedTensor = self.unit.params[slot]
        shard: Any = param.shard_storage.resolve()
        if not subclass_gathers(shard):
            raise StateError(
                f"{param.name}: the shard must stay of the class that says how it is gathered, but it became a "
                f"{type(shard).__name__}. Let the conversion that was made (.data, .to()) give that class."
            )
        who = f"{param.name}: fsdp_pre_all_gather of a {type(shard).__name__}"
        num_args = len(inspect.signature(shard.fsdp_pre_all_gather).parameters)
        if num_args not in (1, 5):
            raise UnsupportedOpError(
                f"{who} must take (mesh), or (mesh, outer_size, outer_stride, module, mp_policy), but it takes "
                f"{num_args} arguments. Change its signature."
            )
        mesh, module = self._context(slot)
        rest = (param.shape, param.stride(), module, param.wire_precision and param.wire_precision.policy)
        try:
            given = shard.fsdp_pre_all_gather(mesh, *rest[: num_args - 1])
        except Exception as error:
            raise UnsupportedOpError(
                f"{who} must give what is gathered, but raised {type(error).__name__}: {error}. Look there."
            ) from error
        if not isinstance(given, (tuple, list)) or len(given) != 2 or not isinstance(given[0], (tuple, list)):
            raise UnsupportedOpError(f"{who} must give (tensors, metadata), but gave {given!r}. Return a tuple first.")
        inputs = [t.wait() if isinstance(t, AsyncCollectiveTensor) else t for t in given[0]]
        wrong = [type(t).__name__ for t in inputs if type(t) is not Tensor]
        if wrong:
            raise UnsupportedOpError(
                f"{who} must give plain tensors, but gave a {wrong[0]}. Return the tensors that it is made of."
            )
        return _Sent(shard, tuple(t.detach().contiguous() for t in inputs), given[1])

    def _context(self, slot: int) -> tuple[DeviceMesh, nn.Module]:
        """The mesh that a parameter is sharded over, of one dim, and the module that it stands in."""
        known = self._contexts.get(slot)
        if known is None:
            param = self.unit.params[slot]
            mesh = param.device_mesh
            if mesh.ndim > 1:
                names, kind = mesh.mesh_dim_names, mesh.device_type
                mesh = mesh[names[-1]] if names else DeviceMesh.from_group(mesh.get_group(mesh.ndim - 1), kind)
            modules = [m for top in self.unit.modules for m in top.modules()]
            module = next(m for m in modules if id(param) in map(id, m._parameters.values()))
            known = self._contexts[slot] = mesh, module
        return known

    def _compare(self, kinds: dict[int, Any], failure: Exception | None) -> None:
        """Raise, on every rank, where one of them failed, or has tensors of other shapes or dtypes than the rest."""
        groups = {group.full_name: group for group in self.unit.groups}
        apart = []
        for name, group in groups.items():
            slots = [slot for slot in self.slots if self.unit.params[slot].shard_group.full_name == name]
            if slots:
                try:
                    apart += _differing(slots, kinds, group, f"shapes of '{self.unit.label}'")
                except DivergenceError:  # the peers did not fail, and gather what they agreed on before
                    if failure is None:
                        raise
        if failure is not None:
            raise failure
        if apart:
            param, own = self.unit.params[apart[0]], kinds[apart[0]]
            raise UnsupportedOpError(
                f"{param.name}: fsdp_pre_all_gather must give tensors of the same shapes and dtypes on all "
                f"{param.shard_group.num_ranks} ranks, but here they are {own}, and others, or an error, on another "
                f"rank (full shape {tuple(param.shape)}). Where dim 0 is uneven, pad them to "
                f"{param.shard_layout.chunk_size} rows, or choose a dim 0 that the number of ranks divides."
            )

    def _gather(
        self, group: ShardGroup, slots: Sequence[int], sent: dict[int, _Sent], pool: BufferPool
    ) -> Handle[Gathered]:
        """Gather what parameters of one group send."""
        group = with_comms(group, self.unit.settings.comms)
        rows = [t.reshape(-1).view(torch.uint8) for slot in slots for t in sent[slot].inputs]
        sizes = tuple(row.numel() for row in rows)
        plan = self._plans.get((group.full_name, sizes))
        if plan is None:
            layouts = [ShardLayout((group.num_ranks * size,), 0, group.num_ranks) for size in sizes]
            plan = GatherPlan.of(BucketLayout.of(layouts), [(1,)] * len(sizes), torch.uint8, group)
            self._plans[group.full_name, sizes] = plan
        params = [self.unit.params[slot] for slot in slots]
        writes = tuple(param.shard_storage.signature for param in params)
        tag = collectives.tag_of(writes)
        handle = collectives.all_gather(rows, plan, group, label=self.unit.label, tag=tag, pool=pool)

        def finish() -> Gathered:
            gathered = handle.wait()
            parts, memory = iter(gathered.tensors), gathered.memory
            with torch._C.DisableTorchFunctionSubclass():
                made = [_made(p, sent[slot], parts) for slot, p in zip(slots, params, strict=True)]
            self.are_met = True
            if memory is not None and not memory.is_held():  # they are copies of what travelled
                pool.give(memory)
                memory = None
            return Gathered(made, memory)

        return Handle(handle.label, [], finish)


def _differing(slots: Sequence[int], kinds: dict[int, Any], group: ShardGroup, label: str) -> list[int]:
    """Parameters of one group for which ranks have other shapes or dtypes, or none; equal on all ranks."""
    sums = [zlib.crc32(repr(kinds[s]).encode()) if s in kinds else -1 for s in slots]
    own = torch.tensor(sums, dtype=torch.int64, device="cpu")
    both = torch.stack([own, ~own]).to(group.device_type)
    high, low = collectives.all_reduce([both], group, ReduceOp.MAX, label=label, everywhere=True).wait()[0].tolist()
    return [slot for slot, h, n in zip(slots, high, low, strict=True) if h != ~n or h == -1]


def _output(gathered: Tensor, own: Tensor, num_ranks: int) -> Tensor:
    """The tensors of all ranks, one behind the other along dim 0.

    It has a storage of its own, which keeps the memory alive: classes may ask that all of their tensors start at 0.

    Args:
        gathered: Their bytes.
        own: This rank's tensor.
        num_ranks: That have one.
    """
    start = gathered.storage_offset()
    storage = gathered.untyped_storage()[start : start + gathered.numel()]
    flat = torch.empty(0, dtype=own.dtype, device=own.device).set_(storage)
    return flat.view(num_ranks * (own.shape[0] if own.dim() else 1), *own.shape[1:])


def _made(param: ShardedTensor, sent: _Sent, parts: Any) -> Tensor:
    """The full value of a parameter, of what was gathered for it.

    Raises:
        UnsupportedOpError: It is not what the parameter is in a forward.
    """
    outputs = [_output(next(parts), own, param.shard_group.num_ranks) for own in sent.inputs]
    precision = param.wire_precision
    dtype = (precision.compute if precision is not None else None) or param.storage_dtype
    full = sent.shard.fsdp_post_all_gather(tuple(outputs), sent.metadata, dtype)
    full = full[0] if isinstance(full, (tuple, list)) else full
    who = f"{param.name}: fsdp_post_all_gather of a {type(sent.shard).__name__}"
    if not isinstance(full, Tensor):
        raise UnsupportedOpError(f"{who} must give (tensor, tensors to free), but gave {full!r}. Return both.")
    if full.dim() and full.dim() == param.dim() and full.shape[0] > param.shape[0]:
        full = full.narrow(0, 0, param.shape[0])  # behind which its shards were padded
    if full.shape != param.shape or full.dtype != dtype:
        raise UnsupportedOpError(
            f"{who} must give a tensor of shape {tuple(param.shape)} and param_dtype, {dtype}, but gave "
            f"{tuple(full.shape)} and {full.dtype}. Make it of the dtype that it is passed."
        )
    function = type(full).__torch_function__
    if getattr(function, "__func__", function) not in _PLAIN_FUNCTIONS:
        raise UnsupportedOpError(
            f"{who} must give a tensor whose operations its __torch_dispatch__ implements, but {type(full).__name__} "
            "has a __torch_function__, which would not be asked. Move what it does to __torch_dispatch__."
        )
    give_precedence(param, type(full))
    return full
