"""What the engine asks of CPython is answered as it needs it; see [Note: CPython] in dshard/interpreter.py."""

import ast
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.autograd.function import BackwardCFunction

from dshard import interpreter
from tests.meta.source import modules, where

PACKAGE = {"sys._getframe", "sys.getrefcount"}
# Besides the note's file: lines of the program for messages and traces, and memory that compares two counts.
OTHERS = ("dshard.interpreter", "dshard.collectives", "dshard.inspection", "dshard.planner")


@pytest.fixture(params=[None, False], ids=["", "dynamo"], autouse=True)
def frames(request: pytest.FixtureRequest) -> Iterator[None]:
    """Also while dynamo's hook runs all frames, which keeps references to arguments of calls."""
    before = set_eval_frame(request.param)
    yield
    set_eval_frame(before)


def alone(found: list[bool], param: Tensor, grad: Tensor) -> None:
    found.append(interpreter.is_alone_in_hook(grad))


def hooked(found: list[bool]) -> Tensor:
    param = torch.ones(3, requires_grad=True)
    param.register_hook(partial(alone, found, param))
    return param


def test_a_gradient_that_autograd_alone_holds_is_told_from_others():
    found: list[bool] = []
    (hooked(found) * 2).sum().backward()
    assert found == [True]


class Handing(torch.autograd.Function):
    """Looks at the gradients in its backward as the engine does: two calls further on."""

    @staticmethod
    def forward(ctx: Any, found: list[bool], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.found = found
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *handed_on(ctx.found, grads)


def handed_on(found: list[bool], grads: tuple[Tensor, ...]) -> list[Tensor]:
    found += interpreter.alone_in_backward(grads)
    return list(grads)


def handing(found: list[bool]) -> tuple[Tensor, Tensor]:
    params = [torch.ones(3, requires_grad=True) for _ in range(2)]
    first, second = Handing.apply(found, *params)
    return first, second


def test_gradients_of_a_functions_backward_that_autograd_alone_holds_are_told_from_others():
    found: list[bool] = []
    first, second = handing(found)
    (first * 2 + second * 3).sum().backward()
    assert found == [True, True]
    found.clear()
    first, second = handing(found)
    (first + second).mul(2).sum().backward()  # one tensor for both
    assert found == [False, False]
    found.clear()
    held: list[Tensor] = []
    first, second = handing(found)
    first.register_hook(held.append)
    (first * 2 + second * 3).sum().backward()
    assert found == [False, True]


@pytest.mark.parametrize("how", ["a list", "an earlier hook", "the caller", "another node"])
def test_a_gradient_that_somebody_else_holds_is_not_alone(how):
    found: list[bool] = []
    held: list[Tensor] = []
    if how == "a list":
        param = torch.ones(3, requires_grad=True)
        param.register_hook(held.append)
        param.register_hook(partial(alone, found, param))
        (param * 2).sum().backward()
    elif how == "an earlier hook":
        middle = hooked(found) + 0
        middle.register_hook(held.append)
        middle.sum().backward()
    elif how == "the caller":
        (hooked(found) + 0).backward(torch.ones(3))
    else:
        (hooked(found) + hooked(found)).sum().backward()
    assert not all(found)


def test_a_hook_that_keeps_the_gradient_later_finds_it_alone_before():
    found: list[bool] = []
    param = hooked(found)
    param.register_hook(lambda grad: grad * 2)
    (param * 2).sum().backward()
    assert found == [True]


@pytest.mark.parametrize("how", ["name", "list", "C++"])
def test_another_reference_to_a_tensor_is_found(how):
    kept = [torch.ones(3)]

    def is_referred_to() -> bool:
        tensor = kept[0]
        return interpreter.is_referred_to(tensor, 1)  # by the list

    assert not is_referred_to()
    other: Any = kept[0]
    if how == "C++":
        other = torch.ones(3, requires_grad=True) * other  # saves it
    elif how == "list":
        other = [other]
    assert is_referred_to()
    del other
    assert not is_referred_to()


def test_a_frame_is_on_the_stack_until_its_function_ends_also_by_an_exception():
    frames = []

    def note() -> None:
        frames.append(interpreter.frame_above(0))

    def run() -> None:
        note()
        assert interpreter.is_on_stack(frames[-1])
        raise KeyError

    with pytest.raises(KeyError):
        run()
    assert frames[0].f_code.co_name == "run"
    assert not interpreter.is_on_stack(frames[0])


def test_torchs_own_functions_are_found_where_the_engine_asks(monkeypatch):
    found = []

    class Asking(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found.append(interpreter.runs_in_function("functional_call"))
            return x

    model = Asking(2, 2)
    model(torch.ones(2))
    torch.func.functional_call(model, {}, torch.ones(2))
    assert found == [False, True]
    fill = torch.Tensor.normal_
    monkeypatch.setattr(
        torch.Tensor,
        "normal_",
        lambda *args, **kw: found.append(interpreter.runs_in_file(torch.nn.init.__file__)) or fill(*args, **kw),
    )
    torch.nn.init.orthogonal_(torch.empty(2, 2))
    torch.empty(2, 2).normal_()
    assert found[2:] == [True, False]


def test_the_context_of_the_autograd_function_that_runs_is_found():
    found = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            found.append(interpreter.first_argument_of_forward(BackwardCFunction) is ctx)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    Twice.apply(torch.ones(2, requires_grad=True))
    assert found == [True]
    assert interpreter.first_argument_of_forward(BackwardCFunction) is None


def test_the_caller_is_known_by_its_file_and_by_its_module():
    class Asked:
        @property
        def by(self) -> str | None:
            return interpreter.module_that_called()

    assert Asked().by == __name__
    assert interpreter.file_that_called("/nowhere") == __file__


def test_no_other_file_of_the_engine_asks():
    asking = [
        where(module, node.lineno)
        for module in modules().values()
        if not module.name.startswith(OTHERS)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and (ast.unparse(node) in PACKAGE or node.attr in ("f_back", "f_locals"))
    ]
    assert asking == []
