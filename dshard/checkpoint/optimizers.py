"""Load what a checkpoint has of optimizers: their groups, and the state of each parameter."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dshard.checkpoint.contents import Optimizers, Part, name_of_params, part_of_tensor
from dshard.checkpoint.source import Load, Source, decoded, dtype_of, writer
from dshard.checkpoint.trees import same_kind
from dshard.errors import CheckpointError
from dshard.tensor import ShardedTensor
from dshard.tensor.cell import ShardCell

__all__ = ["prepare_optimizers"]


def prepare_optimizers(source: Source, model: nn.Module, optimizers: Optimizers, job: Load) -> None:
    """Read and check the states of all optimizers that were passed, as many as the checkpoint has, or none.

    Raises:
        CheckpointError: They are others than those that were saved, or the files are damaged.
    """
    saved = source.manifest.facts["optimizers"]
    if len(optimizers) and len(saved) != len(optimizers):
        raise CheckpointError(
            f"{source.folder}: optimizers must be as many as were saved, but it has {len(saved)} and {len(optimizers)} "
            "were passed. Pass those that were saved, in their order, or none to load the model alone."
        )
    names = name_of_params(model, optimizers)
    for (_, optimizer), facts in zip(optimizers, saved, strict=False):
        _check_optimizer(source, optimizer, facts)
        _prepare_groups(source, optimizer, facts["groups"], names, job)
        _prepare_state(source, optimizer, facts, names, job)


def _check_optimizer(source: Source, optimizer: Optimizer, facts: Any) -> None:
    kinds = {"kind": str, "prefix": str, "groups": list, "state": dict}
    if not isinstance(facts, dict) or any(not isinstance(facts.get(key), kind) for key, kind in kinds.items()):
        raise CheckpointError(f"{source.folder}: an optimizer in it is damaged. Use another checkpoint.")
    if facts["kind"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{source.folder}: the optimizer must be of the class that was saved, but that is {facts['kind']} and this "
            f"is {type(optimizer).__name__}. Pass one of that class, or none to load the model alone."
        )


def _prepare_groups(
    source: Source, optimizer: Optimizer, saved: Sequence[Any], names: Mapping[int, str], job: Load
) -> None:
    if len(saved) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{source.folder}: param_groups must be as many as were saved, but those are {len(saved)} and the "
            f"optimizer has {len(optimizer.param_groups)}. Make it as it was when it was saved."
        )
    for i, (facts, group) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        own_names = [names[id(p)] for p in group["params"]]
        if not isinstance(facts, dict) or facts.get("params") != own_names:
            raise CheckpointError(
                f"{source.folder}: param_groups[{i}] must hold the parameters that were saved, but those are "
                f"{str(facts.get('params') if isinstance(facts, dict) else facts)[:120]} and the optimizer's are "
                f"{str(own_names)[:120]}. Make it as it was when it was saved."
            )
        options = decoded(source, facts.get("options"), f"param_groups[{i}]")
        own = {key: value for key, value in group.items() if key != "params"}
        _check_options(source, i, options, own)
        job.commits.append(partial(_set_options, group, options))


def _check_options(source: Source, i: int, saved: Any, own: Mapping[str, Any]) -> None:
    missing = sorted(set(own) - set(saved)) if isinstance(saved, dict) else ["its options"]
    if missing:
        raise CheckpointError(
            f"{source.folder}: param_groups[{i}] must have the options of the optimizer, but '{missing[0]}' was not "
            "saved. Make the optimizer as it was when it was saved."
        )
    for key, value in saved.items():
        if key in own and not same_kind(value, own[key]):
            raise CheckpointError(
                f"{source.folder}: param_groups[{i}]['{key}'] must be of the kind that the optimizer has, "
                f"{own[key]!r:.40}, but it is {value!r:.40}. It is damaged, or of another optimizer."
            )


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        own = group.get(key)
        if isinstance(own, Tensor):
            own.fill_(value)
        else:
            group[key] = value.item() if isinstance(value, Tensor) and isinstance(own, (int, float)) else value


def _prepare_state(
    source: Source, optimizer: Optimizer, facts: Mapping[str, Any], names: Mapping[int, str], job: Load
) -> None:
    params = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    foreign = next((name for name in facts["state"] if name not in params), None)
    if foreign is not None:
        raise CheckpointError(
            f"{source.folder}: the optimizer must hold every parameter that has a state, but not '{foreign}'. Make it "
            "as it was when it was saved."
        )
    for name, param in params.items():
        saved = facts["state"].get(name)
        if saved is None:
            job.commits.append(partial(optimizer.state.pop, param, None))
            continue
        old = optimizer.state.get(param, {})
        values, writes = {}, []
        for key, value in saved.items() if isinstance(saved, dict) else ():
            values[key], write = _state_value(source, value, old.get(key), param, f"{facts['prefix']}.{name}.{key}")
            writes.append(write)
        job.commits += [write for write in writes if write is not None]
        job.commits.append(partial(optimizer.state.__setitem__, param, values))


def _state_value(
    source: Source, saved: Any, old: Any, param: Tensor, what: str
) -> tuple[Any, Callable[[], None] | None]:
    """A value of an optimizer's state, and how to write it if it is a tensor that is there."""
    name = saved.get("$named") if isinstance(saved, dict) and len(saved) == 1 else None
    if name is None:
        return decoded(source, saved, what), None
    found = source.stored(name)
    if found is None:
        raise CheckpointError(f"{source.folder}: '{what}' must be stored, but it is not. Use another checkpoint.")
    shape, dtype = found[1].shape, found[1].dtype
    if isinstance(old, Tensor) and tuple(old.shape) == shape and dtype_of(old) == dtype and not old.is_meta:
        return old, writer(old, source.read(name, part_of_tensor(old), dtype))
    if shape and shape == tuple(param.shape) and isinstance(param, ShardedTensor):
        part = part_of_tensor(param)
        shard = source.read(name, part, dtype)
        home = source.group.device_type if param.is_meta and param.offload is None else str(param.storage_device)
        shard = shard.to(home if home != "meta" else source.group.device_type)
        return param.like(ShardCell(shard, param._layout, is_shared=True), dtype=dtype), None
    values = source.read(name, Part(shape, (0,) * len(shape), shape), dtype)
    return (values.to(param.device) if shape and not param.is_meta else values), None
