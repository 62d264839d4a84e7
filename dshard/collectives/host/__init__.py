"""Memory that the ranks of one host share: who asks for it, and who gives it.

- `arena.py`: memory of this process that others may read, and theirs.
- `rings.py`: headers between two ranks, and where the values behind them lie; `connect` finds out whether that works.
- `full_values.py`: the full values of a bucket, once for all ranks.
"""
