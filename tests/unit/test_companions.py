"""What other libraries ask of a sharded module."""

from torch import nn

from dshard.runtime.module import say_managed, say_unmanaged


def test_every_module_is_marked_also_inside_of_a_wrapper():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    say_managed(model)
    assert all(module._is_fsdp_managed_module for module in model.modules())
    say_unmanaged(model)
    assert not any(hasattr(module, "_is_fsdp_managed_module") for module in model.modules())
