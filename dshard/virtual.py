"""Training on virtual ranks: batches, sums and random numbers of as many ranks, on any number of processes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dshard import arguments, collectives
from dshard.collectives import ReduceOp, ShardGroup
from dshard.errors import StateError, UnsupportedOpError
from dshard.gradients.reducer import Reducer
from dshard.runtime.module import FSDPModule
from dshard.runtime.runtime import context_of
from dshard.tensor.tp_layout import tp_layout_of
from dshard.units.context import ModelContext
from dshard.units.virtual_ranks import State, VirtualRanks

_HALF = (torch.float16, torch.bfloat16)


@arguments.checked
def virtual_ranks(model: nn.Module) -> Iterator[int]:
    """The virtual ranks that this process plays, one after the other: the loop that one step's gradients come from.

    ::

        for rank in dshard.virtual_ranks(model):
            loss_fn(model(batch(step, rank))).backward()
        optimizer.step()
        optimizer.zero_grad()

    Within it torch's random numbers and the module's buffers are those of the virtual rank. Its last backward reduces,
    so that all before are run in `dshard.no_sync(model)`. After the loop `.grad` is the mean (or sum) over all virtual
    ranks, in bits that do not depend on the number of processes.

    Args:
        model: What `fully_shard(..., virtual_ranks=...)` was called on.

    Returns:
        An iterator over the numbers of those ranks.

    Raises:
        StateError: The model has no virtual ranks, another loop over them runs, or gradients of an earlier one are not
            reduced yet. On every rank alike.
        UnsupportedOpError: The model has something whose bits would depend on the number of processes.

    Communicates:
        The first time, an all-reduce of 24 bytes: rank 0's seed, of which those of the virtual ranks are made, and the
        number of threads.
    """
    context, virtual, group = _parts_of(model, "virtual_ranks")
    virtual.refuse_open("virtual_ranks")
    _check(context, virtual, group)
    unreduced = context.get(Reducer).unreduced()
    if unreduced is not None:
        raise StateError(
            f"{unreduced}: each loop over virtual ranks ends with reduced gradients, but those of the one before were "
            "added up in no_sync to its end. Run the last backward of each virtual rank outside of no_sync."
        )
    ranks = _ranks_of(virtual, group)
    _seed(virtual, group, ranks)
    return _loop(context, virtual, group, ranks)


def _loop(context: ModelContext, virtual: VirtualRanks, group: ShardGroup, ranks: range) -> Iterator[int]:
    is_whole = False
    try:
        with virtual.played(ranks, group.device_type, _module_of(context)) as each:
            yield from each
            is_whole = not virtual.has_failed
    finally:
        if not is_whole:
            context.get(Reducer).abandon()


def states_of(model: nn.Module) -> dict[int, Tensor]:
    """The states of the virtual ranks that this process plays: random states, and buffers that forwards have changed.

    Args:
        model: As of `virtual_ranks`.

    Returns:
        For each of those ranks its state as bytes, uint8 of shape (bytes,), on the CPU.

    Raises:
        StateError: The model has no virtual ranks, or a loop over them runs. On every rank alike.

    Communicates:
        Ahead of the first loop, as that.
    """
    _, virtual, group = _parts_of(model, "states_of")
    virtual.refuse_open("states_of")
    ranks = _ranks_of(virtual, group)
    _seed(virtual, group, ranks)
    threads = virtual.num_threads(group.device_type)
    return {rank: State(virtual.random.of[rank], virtual.buffers.of.get(rank, {}), threads).packed() for rank in ranks}


def restore_states(model: nn.Module, states: Mapping[int, Tensor]) -> None:
    """Have the virtual ranks of this process go on from states that `states_of` gave, on any number of processes.

    Args:
        model: As of `virtual_ranks`.
        states: Of all virtual ranks that this process plays, at least.

    Raises:
        StateError: One is missing, or is of a model with other buffers, or was computed with another number of
            threads; or as of `states_of`.

    Communicates:
        Nothing.
    """
    restorer(model, states)()


def restorer(model: nn.Module, states: Mapping[int, Tensor]) -> Callable[[], None]:
    """As `restore_states`, in two steps: everything is checked now, and changed when the result is called."""
    context, virtual, group = _parts_of(model, "restore_states")
    virtual.refuse_open("restore_states")
    ranks = _ranks_of(virtual, group)
    missing = next((rank for rank in ranks if rank not in states), None)
    if missing is not None:
        raise StateError(
            f"restore_states: needs the states of virtual ranks {ranks.start} to {ranks.stop - 1}, but rank {missing} "
            f"is missing (there are {sorted(states)}). Save those of all processes."
        )
    found = {rank: State.of(states[rank]) for rank in ranks}
    threads = virtual.num_threads(group.device_type)
    other = next((state.num_threads for state in found.values() if state.num_threads != threads), threads)
    if other != threads:
        raise StateError(
            f"restore_states: bits depend on the number of threads, which was {other}, but now is {threads}. Call "
            f"torch.set_num_threads({other}) first."
        )
    known = {name for name, _ in _module_of(context).named_buffers()}
    unknown = next((name for state in found.values() for name in state.buffers if name not in known), None)
    if unknown is not None:
        raise StateError(
            f"restore_states: the states must be of a model with the same buffers, but this one has no buffer "
            f"'{unknown}'. Build the model as it was."
        )

    def restore() -> None:
        virtual.buffers.restore(_module_of(context), ranks, {rank: state.buffers for rank, state in found.items()})
        virtual.random.of.update({rank: state.random for rank, state in found.items()})

    return restore


def module_with_virtual_ranks(model: nn.Module) -> FSDPModule | None:
    """The module of a model, or of what wraps one, that has virtual ranks: `torch.compile` wraps, for one.

    Raises:
        StateError: There are several.
    """
    found = [module for module in model.modules() if isinstance(module, FSDPModule)]
    virtual = {id(context_of(module)): module for module in reversed(found) if context_of(module).virtual is not None}
    if len(virtual) > 1:
        raise StateError(
            f"checkpoint: states are kept of one model with virtual ranks, but {type(model).__name__} holds "
            f"{len(virtual)}. Save and load each by itself."
        )
    return next(iter(virtual.values()), None)


def ranks_here(model: nn.Module) -> range:
    """The virtual ranks that this process plays."""
    _, virtual, group = _parts_of(model, "ranks_here")
    return _ranks_of(virtual, group)


def of_all_ranks(model: nn.Module, values: Mapping[int, Tensor]) -> Tensor:
    """Put together a value of each virtual rank, as a loss, on all processes.

        losses = {rank: step(rank) for rank in dshard.virtual_ranks(model)}
        mean = dshard.virtual.of_all_ranks(model, losses).double().mean()

    Args:
        model: As of `virtual_ranks`.
        values: Of each virtual rank of this process, of one shape and dtype on all processes.

    Returns:
        All of them in the order of the virtual ranks, shape (virtual_ranks, ...).

    Raises:
        StateError: They are not those of this process's virtual ranks.

    Communicates:
        An all-reduce of the bytes of the result.
    """
    _, virtual, group = _parts_of(model, "of_all_ranks")
    ranks = _ranks_of(virtual, group)
    if sorted(values) != list(ranks):
        raise StateError(
            f"of_all_ranks: needs a value of each virtual rank from {ranks.start} to {ranks.stop - 1}, but got those "
            f"of {sorted(values)}. Collect one in each turn of the loop."
        )
    first = values[ranks.start].detach()
    every = first.new_zeros((virtual.total, *first.shape))
    for rank in ranks:
        every[rank].copy_(values[rank].detach())
    bits = every.view(torch.uint8)  # sums of bytes of which all but one are zero, whatever they stand for
    found = collectives.all_reduce([bits], group, ReduceOp.MAX, label="of_all_ranks", everywhere=True).wait()[0]
    return found.view(first.dtype)


def _parts_of(model: Any, who: str) -> tuple[ModelContext, VirtualRanks, ShardGroup]:
    """The context of a model with virtual ranks, those, and the processes."""
    if not isinstance(model, FSDPModule):
        raise StateError(f"{who}: needs a sharded model, but got a {type(model).__name__}. Call fully_shard first.")
    context = context_of(model)
    groups = [group for unit in context.units for group in unit.groups]
    if context.virtual is None or not groups:
        raise StateError(
            f"{who}: needs a model with virtual ranks, but this {type(model).__name__} has none. Pass virtual_ranks= "
            "to fully_shard on the whole model."
        )
    return context, context.virtual, max(groups, key=lambda group: group.world_size)


def _module_of(context: ModelContext) -> nn.Module:
    assert context.root is not None
    return context.root


def _ranks_of(virtual: VirtualRanks, group: ShardGroup) -> range:
    num = virtual.total // group.world_size
    return range(group.world_rank * num, (group.world_rank + 1) * num)


def _seed(virtual: VirtualRanks, group: ShardGroup, ranks: range) -> None:
    if all(rank in virtual.random.of for rank in ranks):
        return
    seed = (torch.initial_seed() & (2**63 - 1)) if group.world_rank == 0 else 0
    threads = virtual.num_threads(group.device_type)
    own = torch.tensor([seed, threads, -threads], dtype=torch.int64, device=group.device_type)
    found = collectives.all_reduce([own], group, ReduceOp.MAX, label="virtual ranks", everywhere=True).wait()[0]
    seed, most, least = found.tolist()
    if most != -least:
        raise StateError(
            f"virtual_ranks: all processes must compute with as many threads, for bits depend on them, but they have "
            f"between {-least} and {most}. Call torch.set_num_threads alike on all of them."
        )
    virtual.random.seed(ranks, group.device_type, seed)


def _check(context: ModelContext, virtual: VirtualRanks, group: ShardGroup) -> None:
    """Raise where bits would depend on the number of processes; all of it is alike on every rank."""
    wrong: list[tuple[str, str, str]] = []
    for unit in context.units:
        settings = unit.settings
        chosen = {
            "hooks on reduced shards": settings.reduce_hook is not None,
            "a custom reduce-scatter": settings.comms.reduce_scatter is not None,
            "set_requires_all_reduce(False)": not settings.requires_all_reduce,
            "the strategy split(q)": settings.num_slices > 1,
        }
        wrong += [(unit.label, f"has {what}", "Leave it out.") for what, is_so in chosen.items() if is_so]
        for param in unit.params:
            param.shard_group.is_virtual = True
            if tp_layout_of(param.shard_layout) is not None:
                wrong.append((param.name, "is a DTensor over further dims", "Leave out parallelize_module."))
            if param.shard_group.world_size != group.world_size:
                wrong.append((param.name, "has a mesh of its own", "Pass one mesh for all."))
            if param.requires_grad and param.storage_dtype in _HALF and param.device.type == "cpu":
                way = "Keep it in float32, and pass MixedPrecisionPolicy(param_dtype=...)."
                wrong.append(
                    (param.name, f"is kept in {param.storage_dtype}, whose steps on a CPU depend on cuts", way)
                )
    module = _module_of(context)
    if context.settings.buffers:
        wrong.append((type(module).__name__, 'has buffers="broadcast"', 'Pass buffers="leave".'))
    wrong += [
        (name, "takes statistics over processes", "Use BatchNorm: each virtual rank has its own statistics.")
        for name, child in module.named_modules()
        if isinstance(child, nn.SyncBatchNorm)
    ]
    if wrong:
        who, what, way = wrong[0]
        raise UnsupportedOpError(
            f"{who}: with virtual_ranks={virtual.total} no bit may depend on the number of processes, but this {what}. "
            f"{way}"
        )
