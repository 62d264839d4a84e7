"""The exception tree: what went wrong for a user is a `DShardError`; an `AssertionError` is a bug of ours."""


class DShardError(Exception):
    """Root of every error that dshard raises on purpose."""


class PlacementError(DShardError, ValueError):
    """A tensor cannot be laid out over the mesh as asked."""


class StateError(DShardError, RuntimeError):
    """A call that the present state of a module, tensor or optimizer does not allow."""


class DivergenceError(DShardError, RuntimeError):
    """The ranks hold different values, or do different things, where they must agree.

    Args:
        message: What differs.
        ranks: Those that are to blame, by their numbers in the world, where that was found out.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class RankLostError(DivergenceError):
    """A rank died, raised, left, was stopped or is out of reach, so that a collective of the others cannot end."""


class UnsupportedOpError(DShardError, NotImplementedError):
    """An operation for which full-value semantics cannot be kept."""


class CheckpointError(DShardError, RuntimeError):
    """A checkpoint that is missing, damaged, or does not fit the model."""


class PlanError(DShardError, ValueError):
    """A plan that cannot be made or followed: nothing fits into the memory, it is for another model, or is none."""


class ArgumentError(DShardError, ValueError, TypeError):
    """An argument that can never be right; names the function, the argument, its value, and what is allowed."""
