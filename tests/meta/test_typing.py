"""What a type checker makes of a program that uses dshard."""

import re

import pytest

api = pytest.importorskip("mypy.api")

PROGRAM = """
from torch import nn
from dshard import FSDPModule, fully_shard


class Net(nn.Module):
    def loss(self) -> int:
        return 1


net = fully_shard(Net())
reveal_type(net)
reveal_type(net.loss())
reveal_type(fully_shard([nn.Linear(2, 2)]))
assert isinstance(net, FSDPModule)
reveal_type(net.loss())
reveal_type(net.set_requires_gradient_sync(False))
fully_shard(3)
net.set_requires_gradient_sync("no")
"""


def test_a_sharded_model_keeps_its_type_and_gets_the_methods_of_fsdp_module(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    text, problems, _ = api.run([str(path), "--no-incremental", "--config-file", ""])
    assert problems == ""
    revealed = re.findall(r'Revealed type is "([^"]+)"', text)
    net, loss, several, loss_again, method = [kind.split(".")[-1] for kind in revealed]
    assert (net, loss, several, loss_again, method) == ("Net", "int", "Linear]", "int", "None")
    errors = re.findall(r"program.py:(\d+): error", text)
    assert [int(line) for line in errors] == [18, 19], text
