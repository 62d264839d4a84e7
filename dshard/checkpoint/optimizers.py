"""Load the states of optimizers: their groups, and the state of each parameter."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.optim import Optimizer

from dshard.checkpoint.contents import box_of, dtype_of, name_of_params
from dshard.checkpoint.files import Box
from dshard.checkpoint.manifest import StoredTensor
from dshard.checkpoint.reading import Load, Source, writer
from dshard.checkpoint.values import same_kind
from dshard.tensor import ShardedTensor
from dshard.tensor.storage import ShardStorage
from dshard.tensor.subclass_shards import subclass_gathers


def prepare_optimizers(source: Source, model: nn.Module, optimizers: Mapping[str, Optimizer], job: Load) -> None:
    """Read and check the states of the optimizers that were passed: as many as were saved, or none.

    Raises:
        CheckpointError: They are others than those that were saved, or the files are damaged.
    """
    saved = source.fact("optimizers")
    if len(optimizers) and len(saved) != len(optimizers):
        raise source.refusal(
            f"optimizers must be as many as were saved, but it has {len(saved)} and {len(optimizers)} were passed",
            "Pass those that were saved, in their order, or none to load the model alone",
        )
    names = name_of_params(model, optimizers)
    for optimizer, facts in zip(optimizers.values(), saved, strict=False):
        kinds = {"kind": str, "prefix": str, "groups": list, "state": dict, "whole": list, "common": dict}
        if not isinstance(facts, dict) or any(not isinstance(facts.get(key), kind) for key, kind in kinds.items()):
            raise source.damage("optimizers")
        if facts["kind"] != type(optimizer).__name__:
            raise source.refusal(
                f"the optimizer must be of the class that was saved, but that is {facts['kind']} and this is "
                f"{type(optimizer).__name__}",
                "Pass one of that class, or none to load the model alone",
            )
        _prepare_groups(source, optimizer, facts["groups"], names, job)
        _prepare_state(source, optimizer, facts, names, job)


def _prepare_groups(
    source: Source, optimizer: Optimizer, saved: Sequence[Any], names: Mapping[int, str], job: Load
) -> None:
    if len(saved) != len(optimizer.param_groups):
        raise source.refusal(
            f"param_groups must be as many as were saved, but those are {len(saved)} and the optimizer has "
            f"{len(optimizer.param_groups)}"
        )
    for i, (facts, group) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        own_names = [names[id(p)] for p in group["params"]]
        if not isinstance(facts, dict) or facts.get("params") != own_names:
            known = facts.get("params") if isinstance(facts, dict) else facts
            raise source.refusal(
                f"param_groups[{i}] must hold the parameters that were saved, but those are {str(known)[:120]} and the "
                f"optimizer's are {str(own_names)[:120]}"
            )
        options = source.decoded(facts.get("options"), f"param_groups[{i}]")
        own = {key: value for key, value in group.items() if key != "params"}
        _check_options(source, i, options, own)
        job.commits.append(partial(_set_options, group, options))
        job.groups.update(dict.fromkeys(map(id, group["params"]), options))


def _check_options(source: Source, i: int, saved: Any, own: Mapping[str, Any]) -> None:
    missing = sorted(set(own) - set(saved)) if isinstance(saved, dict) else ["its options"]
    if missing:
        raise source.refusal(
            f"param_groups[{i}] must have the options of the optimizer, but '{missing[0]}' was not saved"
        )
    for key, value in saved.items():
        if key in own and not same_kind(value, own[key]):
            raise source.refusal(
                f"param_groups[{i}]['{key}'] must be of the kind that the optimizer has, {own[key]!r:.40}, but it is "
                f"{value!r:.40}"
            )
        if key == "lr" and (value is None or not math.isfinite(value)):
            raise source.damage(f"param_groups[{i}]['lr']", f"it is {value!r:.40} in place of a finite number")


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
        raise source.refusal(f"the optimizer must hold every parameter that has a state, but not '{foreign}'")
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
            raise source.damage(f"the state of {name}", f"it is {saved!r:.40}")
        old, values = optimizer.state.get(param, {}), {}
        place = _Place(source, param, job.groups[id(param)], facts["whole"], num_holders)
        for key, value in saved.items():
            values[key], write = place.take(key, value, old.get(key), f"{facts['prefix']}.{name}.{key}")
            if write is not None:
                job.commits.append(write)
        job.commits.append(partial(optimizer.state.__setitem__, param, values))
    common = source.decoded(facts["common"], f"{facts['prefix']}.state")
    if not isinstance(common, dict) or any(isinstance(key, Tensor) for key in common):
        raise source.damage(f"{facts['prefix']}.state")
    gone = [key for key in optimizer.state if not isinstance(key, Tensor) and key not in common]
    job.commits += [partial(optimizer.state.pop, key, None) for key in gone]
    job.commits.append(partial(optimizer.state.update, common))


@dataclass(frozen=True, slots=True)
class _Place:
    """The destination of a parameter's state."""

    source: Source
    param: Tensor
    options: Mapping[str, Any]  # of its group
    whole: Collection[Any]  # names of states that are no shards, whatever their shape
    num_holders: Mapping[int, int]  # how many parameters and states have each shard storage, by its identity

    def take(self, key: str, saved: Any, old: Any, what: str) -> tuple[Any, Callable[[], None] | None]:
        """Return a value of the state, and for a tensor that stays the function that writes to it."""
        name = saved.get("$named") if isinstance(saved, dict) and len(saved) == 1 else None
        found = self.source.stored(name) if isinstance(name, str) else None
        if isinstance(name, str) and found is not None and isinstance(old, Tensor) and not old.is_meta:
            shape, dtype = found[1].shape, found[1].dtype
            if tuple(old.shape) == shape and dtype_of(old) == dtype:
                values = self.source.read(name, box_of(old), dtype)
                if self._takes_the_place_of(old, values):  # as with torch's own load_state_dict
                    return old.like(ShardStorage(values, old.shard_layout, is_shared=True), dtype=dtype), None
                return old, writer(old, values)
        return self.source.decoded(saved, what, partial(self._made, key)), None

    def _made(self, key: str, name: str, stored: StoredTensor) -> Tensor:
        """Read a tensor that the optimizer does not have yet, onto the device where torch would put it."""
        param, shape = self.param, stored.shape
        own = param.storage_device if isinstance(param, ShardedTensor) else param.device
        device = self.source.group.device_type if own.type == "meta" else own
        if shape and shape == tuple(param.shape) and isinstance(param, ShardedTensor) and name not in self.whole:
            shard = self.source.read(name, box_of(param), stored.dtype).to(device)
            return param.like(ShardStorage(shard, param.shard_layout, is_shared=True), dtype=stored.dtype)
        values = self.source.read(name, Box.whole(shape), stored.dtype)
        is_on_host = key == "step" and not (self.options.get("capturable") or self.options.get("fused"))
        return values if is_on_host else values.to(device)  # as torch's own load_state_dict places them

    def _takes_the_place_of(self, old: Tensor, values: Tensor) -> TypeGuard[ShardedTensor]:
        """Return whether the values that were read can become the state's shard, without a copy."""
        if not isinstance(old, ShardedTensor) or old.is_view or self.num_holders[id(old.shard_storage)] > 1:
            return False
        shard = old.shard_storage.resolve()
        is_plain = not subclass_gathers(shard) and shard.is_contiguous() and not shard.is_pinned()
        return is_plain and shard.device == values.device
