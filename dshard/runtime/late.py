"""Parameters that modules are given after `fully_shard`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from dshard.interpreter import runs_in_function
from dshard.optimizer.replace import Replaced, replacement_of
from dshard.runtime.unsharded import Unsharded
from dshard.tensor import ShardedTensor
from dshard.units.context import ModelContext

TakeIn = Callable[[ModelContext, list[tuple[str, nn.Parameter]]], None]


class LateParameters:
    """Finds trainable parameters that came after `fully_shard`: nothing would reduce their gradients.

    Args:
        context: Of the model.
    """

    def __init__(self, context: ModelContext) -> None:
        _Registrations.watch()
        self._context = context
        self._num_registrations = -1
        self._take_in: TakeIn | None = None
        self.tops: list[nn.Module] = []  # what the outermost call was given
        self._known: dict[int, nn.Parameter] = {}

    def note(self, modules: Sequence[nn.Module], take_in: TakeIn) -> None:
        """Remember the plain parameters that are meant to be there: those to ignore, and not yet sharded ones.

        Args:
            modules: What was sharded.
            take_in: Shards those that come later, given the model's context and their names.
        """
        self.tops = list(modules)
        self._take_in = take_in
        self._known = {id(p): p for _, p in self._plain_parameters()}

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: all but what was counted in this process."""
        known = list(self._known.values())
        return {"context": self._context, "tops": self.tops, "known": known, "take_in": self._take_in}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["context"])  # type: ignore[misc]
        self.tops, self._take_in = state["tops"], state["take_in"]
        self._known = {id(p): p for p in state["known"]}

    def take_in(self) -> None:
        """Shard what came since the last call; costs nothing where no module was given a parameter."""
        found = self._find()
        # torch.func.functional_call puts plain tensors in the places of parameters, and takes them away again.
        if found and self._take_in is not None and not runs_in_function("functional_call"):
            self._take_in(self._context, list(found.values()))

    def is_waiting(self) -> bool:
        """Whether `take_in` would shard something."""
        before = self._num_registrations
        if not self._find():
            return False
        self._num_registrations = before
        return self._take_in is not None

    def _find(self) -> dict[int, tuple[str, nn.Parameter]]:
        """What came since the last call, by identity."""
        if self._num_registrations == _Registrations.count:
            return {}
        self._num_registrations = _Registrations.count
        return {id(p): (name, p) for name, p in self._plain_parameters() if id(p) not in self._known}

    def _plain_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable parameters below the root that are not sharded."""
        for prefix, module in dict.fromkeys(pair for top in self.tops for pair in top.named_modules()):
            for name, param in module._parameters.items():
                if param is not None and not isinstance(param, ShardedTensor) and param.requires_grad:
                    yield f"{prefix}.{name}" if prefix else name, param


class _Registrations:
    """Counts the parameters that modules are given, so that a model is searched only after one was."""

    count: ClassVar[int] = 0
    are_watched: ClassVar[bool] = False

    @classmethod
    def watch(cls) -> None:
        """Have torch tell of every parameter that a module is given, from the first sharded model on."""
        if not cls.are_watched:
            cls.are_watched = True
            register_module_parameter_registration_hook(cls.note)

    @classmethod
    def note(cls, module: nn.Module, name: str, param: Any) -> Any:
        """Torch's hook for a parameter that is registered; one that was replaced, or unsharded, is followed."""
        cls.count += 1
        if isinstance(param, Unsharded):  # as by `self.head.weight = self.embed.weight` in a forward
            return param.sharded
        return replacement_of(param) if isinstance(param, Replaced) else None


def num_registrations() -> int:
    """How many parameters modules were given in this process, since the first sharded model."""
    return _Registrations.count
