"""Names of parameters as a model has them without the wrappers that torch puts around modules."""

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # of checkpoint_wrapper, and of torch.compile


def plain_name(name: str) -> str:
    """A parameter's name without wrappers: it is the same one whether its module is checkpointed, or compiled, or not.

    Example:
        >>> plain_name("blocks.0._checkpoint_wrapped_module.mlp._orig_mod.up.weight")
        'blocks.0.mlp.up.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
