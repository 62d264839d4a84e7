"""`python -m tests.mutants [NAME ...]`: plant the bugs, all or some, one at a time, and print what noticed them."""

import sys

from tests.mutants.mutants import Mutant, Outcome, PatchError, killed, mutants, unbroken

_WIDTH = 110  # of a failure


def _row(mutant: Mutant, outcome: Outcome) -> str:
    return (
        f"{outcome.verdict:8} {outcome.seconds:5.1f} s  {mutant.name}\n"
        f"  broken:  {mutant.broken}\n  test:    {mutant.test}\n  failure: {outcome.failure[:_WIDTH]}"
    )


def main(names: list[str]) -> int:
    """Print a row for each; give 1 if one was not killed, or a test fails without it."""
    chosen, outcomes = mutants(names), list[Outcome]()
    with unbroken(mutant.test for mutant in chosen) as (source, without):
        print(f"{without.word:8} {without.seconds:5.1f} s  the same tests, without a bug", flush=True)
        if without.word != "passed":
            print(without.output)
            return 1
        for mutant in chosen:
            outcomes.append(killed(mutant, source))
            print(_row(mutant, outcomes[-1]), flush=True)
    num_killed = sum(each.is_killed for each in outcomes)
    total_s = sum(each.seconds for each in [without, *outcomes])
    print(f"{num_killed} of {len(outcomes)} killed, {total_s:.0f} s")
    return int(num_killed < len(outcomes))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PatchError as error:
        sys.exit(str(error))
