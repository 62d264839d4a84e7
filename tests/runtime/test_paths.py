"""How many files one use and one gradient pass: as `docs/architecture.md` lists them, and no more."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import dshard
from dshard.testing import World

PACKAGE = str(Path(dshard.__file__).parent)
TOUCH, GRADIENT = ("units/unit.py", "full"), ("gradients/backward.py", "route_gradient")
OPEN, GRADIENTS = ("runtime/unsharding.py", "open"), ("runtime/unsharding.py", "backward")  # of a module's forward


class Paths:
    """The files that calls of some functions pass, call by call; what `collectives` calls counts as it."""

    def __init__(self) -> None:
        self.found: list[tuple[tuple[str, str], set[str]]] = []
        self._stack: list[str] = []
        self._base = 0  # where the call that is watched lies in the stack

    def __enter__(self) -> "Paths":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGE) or event not in ("call", "return"):
            return
        if event == "return":
            if self._stack:
                self._base = 0 if len(self._stack) == self._base else self._base
                self._stack.pop()
            return
        file = path[len(PACKAGE) + 1 :]
        self._stack.append("collectives" if file.startswith("collectives/") else file)
        start = file, frame.f_code.co_name
        if not self._base and start in (TOUCH, GRADIENT, OPEN, GRADIENTS):
            self._base = len(self._stack)
            self.found.append((start, set()))
        if self._base and "collectives" not in self._stack[self._base : -1]:
            self.found[-1][1].add(self._stack[-1])


def passed() -> list[list[str]]:
    """The files of a layer's forward in that of the model, and of its gradients, after steps that warm up.

    Then those of the first and of a later use elsewhere, and of a gradient of it.
    """
    torch.manual_seed(0)
    net: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for layer in net:
        dshard.fully_shard(layer)
    dshard.fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.ones(2, 8)
    for _ in range(3):
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with Paths() as whole:
        value = net(x)
    with Paths() as back:
        value.sum().backward()
    net.zero_grad()
    inside = next(files for start, files in whole.found[2:] if start == OPEN)
    gradients = next(files for start, files in back.found if start == GRADIENTS)
    value = net[1](net[0](x))
    with Paths() as forward:
        value = net[2](value)
        value = net[3](value)
    with Paths() as backward:
        value.sum().backward()
    first, later = [files for start, files in forward.found if start == TOUCH][:2]
    gradient = next(files for start, files in backward.found if start == GRADIENT)
    return [sorted(files) for files in (inside, gradients, first, later, gradient)]


def listed() -> list[list[str]]:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    part = text.partition("## What one use, and one gradient, pass")[2].partition("\n## ")[0]
    return [sorted(re.findall(r"`([\w/]+\.py|collectives)`", each)) for each in part.split("- **")[1:]]


def test_a_use_and_a_gradient_pass_the_files_that_the_docs_list():
    with World(2) as world:  # of its own: a process that has seen tensor parallelism looks for more of it
        assert world.run(passed) == [listed()] * 2
    assert max(map(len, listed())) <= 11  # all gradients of a unit at once, until it is resharded
