"""What other libraries ask of a sharded module."""

from torch import nn

from dshard.runtime.companions import keep_generation_in_step


class Generator(nn.Module):
    def generate(self) -> None:
        """Stands for that of transformers."""


def test_every_module_that_generates_is_marked_also_inside_of_a_wrapper():
    inner, other = Generator(), nn.Linear(2, 2)
    keep_generation_in_step(nn.Sequential(inner, other))
    assert inner._is_fsdp_managed_module
    assert not hasattr(other, "_is_fsdp_managed_module")
