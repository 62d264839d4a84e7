"""The cheapest mix of choices that fits, and the prices of bytes at which it is one: a small linear program."""

import numpy as np

from dshard.planner.chain import Floats

_EPSILON = 1e-11


def mix(costs: Floats, over: Floats) -> tuple[Floats, Floats]:
    """Shares of some choices, as few seconds as can be, whose mean holds every row's limit; by the simplex method.

    Args:
        costs: Seconds of each choice.
        over: Of each choice, by how much it exceeds each row; shape (choices, rows). The first one exceeds none.

    Returns:
        The shares, which add up to 1, and what a unit of each row is worth, none below 0.
    """
    num, num_rows = over.shape
    matrix = np.block([[over.T, np.eye(num_rows)], [np.ones((1, num)), np.zeros((1, num_rows))]])
    objective = np.concatenate([costs, np.zeros(num_rows)])
    basis = np.concatenate([[0], np.arange(num, num + num_rows)])  # the first choice, and what it leaves of each row
    for _ in range(20 * (num_rows + 2)):
        inverse = np.linalg.inv(matrix[:, basis])
        shares = inverse[:, -1]
        prices = objective[basis] @ inverse
        saved = prices @ matrix - objective
        entering = int(saved.argmax())
        moved = inverse @ matrix[:, entering]
        if saved[entering] <= _EPSILON * np.abs(costs[1:]).max(initial=0.0) or moved.max() <= _EPSILON:
            break
        steps = np.where(moved > _EPSILON, np.maximum(shares, 0) / np.maximum(moved, _EPSILON), np.inf)
        basis[steps.argmin()] = entering
    found = np.zeros(num + num_rows)
    found[basis] = np.maximum(shares, 0)
    return found[:num], np.maximum(-prices[:num_rows], 0)
