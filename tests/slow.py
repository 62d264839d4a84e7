"""What `make test-all` runs and `make test` leaves out, besides tests that are marked `slow` in their files.

Each entry is the start of a test's id below tests/: a folder (`crossings/`), a file, or `cli/test_plan.py::test_name`.
"""

SLOW: tuple[str, ...] = (
    # Rooms whose tests start programs, plan, or cross everything with everything.
    *(
        "accelerator/",
        "benchmarks/",
        "cli/",
        "crossings/",
        "examples/",
        "faults/",
        "inspection/",
        "interop/",
        "mutants/",
    ),
    *("offload/", "planner/", "planning/", "programs/", "testing/"),
    # Files that take longest in the other rooms.
    *("autograd/test_checkpointing.py", "collectives/test_host_copy.py", "collectives/test_lost.py"),
    *("collectives/test_stalls.py", "meta/test_api_docs.py", "meta/test_docs.py", "runtime/test_compile.py"),
    *("runtime/test_stateful.py", "tensor/test_extensions.py", "tensor/test_freshness.py"),
)
