"""Load what a checkpoint has of optimizers: their groups, and the state of each parameter."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.optim import Optimizer

from dshard.checkpoint.contents import Part, dtype_of, name_of_params, part_of_tensor
from dshard.checkpoint.source import Load, Source, decoded, writer
from dshard.checkpoint.stored import StoredTensor
from dshard.checkpoint.trees import same_kind
from dshard.errors import CheckpointError
from dshard.tensor import ShardedTensor
from dshard.tensor.shard_storage import ShardStorage
from dshard.tensor.subclass_shards import subclass_gathers


def prepare_optimizers(source: Source, model: nn.Module, optimizers: Mapping[str, Optimizer], job: Load) -> None:
    """Read and check the states of all optimizers that were passed, as many as the checkpoint has, or none.

    Raises:
        CheckpointError: They are others than those that were saved, or the files are damaged.
    """
    saved = source.fact("optimizers")
    if len(optimizers) and len(saved) != len(optimizers):
        raise CheckpointError(
            f"{source.folder}: optimizers must be as many as were saved, but it has {len(saved)} and {len(optimizers)} "
            "were passed. Pass those that were saved, in their order, or none to load the model alone."
        )
    names = name_of_params(model, optimizers)
    for optimizer, facts in zip(optimizers.values(), saved, strict=False):
        _check_optimizer(source, optimizer, facts)
        _prepare_groups(source, optimizer, facts["groups"], names, job)
        _prepare_state(source, optimizer, facts, names, job)


def _check_optimizer(source: Source, optimizer: Optimizer, facts: Any) -> None:
    kinds = {"kind": str, "prefix": str, "groups": list, "state": dict, "whole": list, "common": dict}
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
        job.groups.update(dict.fromkeys(map(id, group["params"]), options))


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
        if key == "lr" and (value is None or not math.isfinite(value)):
            raise CheckpointError(
                f"{source.folder}: param_groups[{i}]['lr'] must be a finite number, but it is {value!r:.40}. It is "
                "damaged."
            )


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        own = group.get(key)
        if isinstance(own, Tensor) and value is not None:
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
    held = [
        *params.values(),
        *(value for param in params.values() for value in optimizer.state.get(param, {}).values()),
    ]
    num_holders = Counter(id(each.shard_storage) for each in held if isinstance(each, ShardedTensor))
    for name, param in params.items():
        saved = facts["state"].get(name)
        if saved is None:
            job.commits.append(partial(optimizer.state.pop, param, None))
            continue
        if not isinstance(saved, dict) or not saved:
            raise CheckpointError(
                f"{source.folder}: the state of '{name}' must be an object, but it is {saved!r:.40}. It is damaged."
            )
        old, values = optimizer.state.get(param, {}), {}
        home = _Home(source, param, job.groups[id(param)], facts["whole"], num_holders)
        for key, value in saved.items():
            values[key], write = home.take(key, value, old.get(key), f"{facts['prefix']}.{name}.{key}")
            if write is not None:
                job.commits.append(write)
        job.commits.append(partial(optimizer.state.__setitem__, param, values))
    common = decoded(source, facts["common"], f"{facts['prefix']}.state")
    if not isinstance(common, dict) or any(isinstance(key, Tensor) for key in common):
        raise CheckpointError(f"{source.folder}: '{facts['prefix']}.state' must be an object. It is damaged.")
    gone = [key for key in optimizer.state if not isinstance(key, Tensor) and key not in common]
    job.commits += [partial(optimizer.state.pop, key, None) for key in gone]
    job.commits.append(partial(optimizer.state.update, common))


@dataclass(frozen=True, slots=True)
class _Home:
    """Where the state of a parameter belongs."""

    source: Source
    param: Tensor
    options: Mapping[str, Any]  # of its group
    whole: Collection[Any]  # names of states that are no shards, whatever their shape
    num_holders: Mapping[int, int]  # how many parameters and states have each shard storage, by its identity

    def take(self, key: str, saved: Any, old: Any, what: str) -> tuple[Any, Callable[[], None] | None]:
        """A value, and how to write it if it is a tensor that is there."""
        name = saved.get("$named") if isinstance(saved, dict) and len(saved) == 1 else None
        found = self.source.stored(name) if isinstance(name, str) else None
        if isinstance(name, str) and found is not None and isinstance(old, Tensor) and not old.is_meta:
            shape, dtype = found[1].shape, found[1].dtype
            if tuple(old.shape) == shape and dtype_of(old) == dtype:
                values = self.source.read(name, part_of_tensor(old), dtype)
                if self._takes_the_place_of(old, values):  # as with torch's own load_state_dict
                    return old.like(ShardStorage(values, old.shard_layout, is_shared=True), dtype=dtype), None
                return old, writer(old, values)
        return decoded(self.source, saved, what, partial(self._made, key)), None

    def _made(self, key: str, name: str, stored: StoredTensor) -> Tensor:
        """A tensor that was not there before."""
        param, shape = self.param, stored.shape
        own = param.storage_device if isinstance(param, ShardedTensor) else param.device
        home = self.source.group.device_type if own.type == "meta" else own
        if shape and shape == tuple(param.shape) and isinstance(param, ShardedTensor) and name not in self.whole:
            shard = self.source.read(name, part_of_tensor(param), stored.dtype).to(home)
            return param.like(ShardStorage(shard, param.shard_layout, is_shared=True), dtype=stored.dtype)
        values = self.source.read(name, Part.whole(shape), stored.dtype)
        is_on_host = key == "step" and not (self.options.get("capturable") or self.options.get("fused"))
        return values if is_on_host else values.to(home)  # as torch's own load_state_dict places them

    def _takes_the_place_of(self, old: Tensor, values: Tensor) -> TypeGuard[ShardedTensor]:
        """Whether values that were read can be a state's shard as they are, so that none is copied."""
        if not isinstance(old, ShardedTensor) or old.is_view or self.num_holders[id(old.shard_storage)] > 1:
            return False
        shard = old.shard_storage.resolve()
        is_plain = not subclass_gathers(shard) and shard.is_contiguous() and not shard.is_pinned()
        return is_plain and shard.device == values.device
