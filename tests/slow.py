"""What `make test-all` runs and `make test` leaves out, besides tests that are marked `slow` in their files.

Each entry is the start of a test's id below tests/: a folder (`crossings/`), a file, or `cli/test_plan.py::test_name`.
"""

SLOW: tuple[str, ...] = (
    # Rooms whose tests start programs, plan, or cross everything with everything.
    *(
        "accelerator/",
        "benchmarks/",
        "calibration/",
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
    *("collectives/test_stalls.py", "meta/test_api_docs.py", "meta/test_docs.py", "meta/test_typing.py"),
    *("real/test_compiled.py", "runtime/test_caught_programs.py", "runtime/test_compile.py", "runtime/test_growth.py"),
    *("runtime/test_stateful.py", "tensor/test_extensions.py", "tensor/test_freshness.py"),
    # Tests that compile, draw many programs, kill ranks or wait for timeouts, in files that `make test` runs otherwise.
    *(
        "collectives/test_transport.py::test_a_group_that_a_peer_has_destroyed",
        "collectives/test_transport.py::test_a_rank_that_catches_the_loss_of_a_peer",
        "collectives/test_transport.py::test_survivors_are_told_which_rank_was_killed",
        "optimizer/test_optimizers.py::test_every_optimizer_trains_one_three_and_four_ranks",
        "parity/test_prefetch.py::test_depth_budget_and_any_order_of_use",
        "real/test_callbacks.py::test_a_damaged_file_of_link_rates",
        "real/test_run_by_some.py::test_a_training_is_that_of_one_process",
        "runtime/test_caught_exceptions.py::test_replicas_of_such_a_rank",
        "setup/test_auto_units.py::test_the_root_alone_gathers_as_often",
        "setup/test_strategies.py::test_a_compiled_model_follows",
    ),
)
