"""Whether `scipy.optimize.milp` could take the solver's place: `python benchmarks/planner_milp.py [UNITS]`.

Instances are those of `planner_solver.py`, with and without activation checkpointing. One binary for each unit and
option; the longer of what computes and what is sent beside it is a number of seconds above both; moments of memory
join as choices violate them. Needs SciPy, which dshard does not. A search has 5 s.
"""

import argparse
import sys
import time

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.planner_solver import PARTS, STRATEGIES, family
from dshard.planner import Cluster, Link, Links, ModelCosts, peak_bytes, solve
from dshard.planner.costs import UnitKind
from dshard.planner.memory import MemoryRows
from dshard.planner.options import options_of_unit, table_of
from dshard.planner.owners import Owners
from dshard.planner.search import Chain
from dshard.policies import Strategy

LIMIT_S, GAP = 5.0, 1e-6
Floats = npt.NDArray[np.float64]


class Program:
    """The seconds of a step of one micro-batch, as a linear program: variables are options of units, then seconds."""

    def __init__(self, model: ModelCosts, cluster: Cluster) -> None:
        known = [Strategy.of(name).on(cluster.num_ranks) for name in STRATEGIES]
        self.chain = Chain.of(model, known, cluster)
        kinds = [[unit.of_kind(kind) for kind in model.kinds] for unit in model.units]
        owners = Owners(model, cluster)
        self._times = table_of([options_of_unit(each, known, cluster, owners) for each in kinds])[:, self.chain.numbers]
        num_units, num_options = self.chain.is_open.shape
        self.num = num_units * num_options
        self.costs = np.concatenate([self._times["optimizer_s"].reshape(-1), np.ones(2 * num_units)])
        self._at = np.arange(self.num).reshape(num_units, num_options)
        self.costs[self._at[0]] += self._times["gather_s"][0] + self._times["reduce_s"][0]
        self.costs[self._at[-1]] += self._times["gather_backward_s"][-1]
        rows = list[Floats]()
        for unit in range(num_units):
            beside = [(unit, "forward_comm_s"), (unit + 1, "gather_s")]
            behind = [(unit, "backward_comm_s"), (unit + 1, "reduce_s"), (unit - 1, "gather_backward_s")]
            for place, terms in enumerate(([(unit, "forward_s")], beside, [(unit, "backward_s")], behind)):
                row = np.zeros(len(self.costs))
                row[self.num + 2 * unit + place // 2] = 1.0
                for which, name in terms:
                    if 0 <= which < num_units:
                        row[self._at[which]] -= self._times[name][which]
                rows.append(row)
        one = np.zeros((num_units, len(self.costs)))
        for unit in range(num_units):
            one[unit, self._at[unit]] = 1.0
        self.rows = np.concatenate([np.array(rows), one])
        self.least = np.repeat([0.0, 1.0], [len(rows), num_units])
        self.most = np.repeat([np.inf, 1.0], [len(rows), num_units])

    def solved(self, limit_bytes: int) -> tuple[float, float]:
        """Seconds of the best choice that was found, and a bound on all; infinite and 0 where time ran out."""
        stop, moments, is_whole, bound = time.perf_counter() + LIMIT_S, list[int](), False, 0.0
        most = np.concatenate(
            [self.chain.is_open.reshape(-1).astype(float), np.full(len(self.costs) - self.num, np.inf)]
        )
        while time.perf_counter() < stop:
            none = np.zeros(len(self.costs) - self.num)
            held = [np.append(self.chain.rows.terms(row).reshape(-1), none) / limit_bytes for row in moments]
            caps = [1 - self.chain.rows.constant[row] / limit_bytes for row in moments]
            rows = np.vstack([self.rows, *held])
            limits = LinearConstraint(rows, [*self.least, *[-np.inf] * len(caps)], [*self.most, *caps])
            whole = np.concatenate([np.full(self.num, float(is_whole)), none])
            left = {"time_limit": max(0.01, stop - time.perf_counter()), "mip_rel_gap": GAP}
            found = milp(self.costs, integrality=whole, bounds=Bounds(0, most), constraints=limits, options=left)
            bound = found.mip_dual_bound if is_whole and found.mip_dual_bound else bound
            if found.x is None:
                break
            shares = found.x[: self.num].reshape(self._at.shape)
            terms = np.rint((self.chain.rows.phases * shares).sum(axis=-1, keepdims=True)).astype(
                np.int64
            )  # of the mix
            values = MemoryRows(self.chain.rows.constant, terms).values(np.zeros(len(shares), dtype=np.int64))
            violated = [
                row
                for row in np.argsort(-values)[:3].tolist()
                if values[row] > limit_bytes * (1 + (1e-9 if is_whole else 1e-6))
            ]
            if new := [row for row in violated if row not in moments]:
                moments += new
            elif not is_whole:
                is_whole, bound = True, found.fun
            else:
                return self.chain.cost(shares.argmax(axis=1)), bound
        return np.inf, bound


def main(num_units: int) -> None:
    """Print a table."""
    inside, across = Links.of(Link(2e-5, 1 / 200e9, 1e-6)), Links.of(Link(3e-5, 1 / 40e9, 2e-6))
    cluster = Cluster(64, 8, inside, across, keeps_received_rows=False)
    sys.stdout.write(
        "| family | checkpointing | memory | seconds | gap | HiGHS, seconds | gap |\n|---|---|---|---|---|---|---|\n"
    )
    for is_choice in (False, True):
        for name in ("alike", "widths", "random"):
            model = family(name, num_units, is_choice=is_choice)
            program = Program(model, cluster)
            low = peak_bytes(model.under(UnitKind("full")), ["full"] * num_units, cluster)
            high = peak_bytes(model, ["ddp"] * num_units, cluster)
            for part in PARTS:
                limit, start = low + int((high - low) * part), time.perf_counter()
                own = solve(model, cluster, STRATEGIES, limit).certificate
                turn = time.perf_counter()
                step_s, bound_s = program.solved(limit)
                took = turn - start, time.perf_counter() - turn
                sys.stdout.write(
                    f"| {name} | {'any' if is_choice else 'none'} | {100 * part:g}% | {took[0]:.1f} | {own.gap:.1g} | "
                    f"{took[1]:.1f} | {1 - bound_s / step_s:.1g} |\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("units", nargs="?", type=int, default=100, metavar="UNITS", help="(%(default)s)")
    main(parser.parse_args().units)
