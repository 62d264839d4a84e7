"""What torch asks of a sharded module beyond its methods: the state that FSDP2 keeps on it, and that it is sharded.

Pipeline stages ask for the state. Torch's composable functions, `replicate` for one, keep off modules of which its
registry says that they are sharded.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import fully_shard as _torchs_fully_shard

from dshard.gradients.backward import Backward
from dshard.gradients.reducer import Reducer
from dshard.runtime.runtime import units_of
from dshard.units.unit import Unit

_KEY: Any = _torchs_fully_shard.__wrapped__  # type: ignore[attr-defined]  # what torch looks the state up by


def answer_as_fsdp2(module: nn.Module) -> None:
    """Have `fully_shard.state(module)` of torch give what a pipeline stage uses of it, and its registry know of it."""
    module.__dict__[STATE_KEY] = _States(module, module.__dict__.get(STATE_KEY) or {})
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()


class _States(dict[Callable[..., Any], Any]):
    """The states of torch's composable functions on a module; that of `fully_shard` is made when it is asked for.

    Args:
        module: A sharded module.
        others: States of other functions.
    """

    def __init__(self, module: nn.Module | None = None, others: Any = ()) -> None:
        super().__init__(others)
        self.module = module

    def __contains__(self, key: object) -> bool:
        return key is _KEY or super().__contains__(key)

    def __reduce__(self) -> Any:
        return _restored, (self.module,)

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of one function."""
        return _State(self.module) if key is _KEY and self.module is not None else super().get(key, default)


def _restored(module: nn.Module) -> Any:
    """Copy or unpickle; torch's name for the states is another one in every process."""
    answer_as_fsdp2(module)
    return module.__dict__[STATE_KEY]


class _State:
    """As much of FSDP2's state of a module as `PipelineStage.perform_reduce_grad` uses.

    A schedule runs the backwards of its micro-batches without sync, and then reduces by hand what they added up.
    """

    def __init__(self, module: nn.Module) -> None:
        self._units = units_of(module)
        self._fsdp_param_groups = [_Group(unit) for unit in self._units]
        self._state_ctx = self

    @property
    def all_states(self) -> list["_State"]:
        """A state that stands for all below."""
        return [self]

    def _root_post_backward_final_callback(self) -> None:
        """All gradients have left: wait for what has to be, and free what is gathered. As after a backward."""
        for model in dict.fromkeys(unit.model for unit in self._units):
            model.get(Backward).end()


class _Group:
    """One unit."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def post_backward(self) -> None:
        """Reduce the gradients that were added up. Communicates a reduce-scatter, unless none have."""
        self._unit.model.get(Reducer).reduce(self._unit)
