"""What `make test-all` runs and `make test` leaves out, besides tests that are marked `slow` in their files.

Each entry is the start of a test's id below tests/: a folder (`crossings/`), a file, or `cli/test_plan.py::test_name`.
"""

SLOW: tuple[str, ...] = ()
