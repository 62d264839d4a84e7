"""What `make test` leaves to `make test-all`, besides tests that are marked `slow` in their files, and both to others.

Each entry is the start of a test's id below tests/: a folder (`crossings/`), a file, or `cli/test_plan.py::test_name`.
`make test-deep` runs what is in `DEEP`, and of the tests in `ONE_IN` the cases that `make test-all` leaves out.
"""

from collections import Counter

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

# Longer runs of what shorter tests check, benchmarks that take longest, and pages of docs: each as a whole, for a block
# may read a file that one above it wrote.
DEEP: tuple[str, ...] = (
    "faults/test_faults.py::test_of_many_faults_at_random_places",
    "faults/test_fuzz_checkpoint.py::test_a_damaged_checkpoint_is_told_or_loads_what_was_saved_very_many_times",
    "faults/test_fuzz_safetensors.py::test_many_corrupted_models",
    "faults/test_long_runs.py::test_nothing_grows_and_no_bit_changes_in_long_runs",
    *("benchmarks/test_benchmarks.py::test_compile_writes", "benchmarks/test_benchmarks.py::test_eight_bit_writes"),
    "benchmarks/test_benchmarks.py::test_plan_writes",
    *("calibration/test_published.py", "calibration/test_published_memory.py"),
    "calibration/test_fitting.py::test_the_shipped_profile",
    *(
        f"meta/test_docs.py::test_the_block_runs[docs/{page}"
        for page in (
            "guides/",
            "collectives.md",
            "planner.md",
            "seeing.md",
            "simulate.md",
            "strategies.md",
            "verify.md",
        )
    ),
)

# Of tests with very many cases, each a training or a program, `make test-all` runs one in so many. Where two lists are
# crossed, the number has no divisor in common with the length of the one that is run through first.
ONE_IN: dict[str, int] = {
    "accelerator/test_bits.py::test_losses": 3,
    "accelerator/test_crossings.py::test_a_crossing": 5,
    "accelerator/test_forecast.py::test_forecast": 4,
    "accelerator/test_forecast.py::test_of_units_some_of_which": 3,
    "accelerator/test_forecast.py::test_of_what_is_kept": 5,
    "accelerator/test_forecast.py::test_where_owners": 4,
    "accelerator/test_mutants.py::test_what_is_taken_out": 4,
    "accelerator/test_streams.py::test_models_of_several_streams": 5,
    "accelerator/test_writes.py::test_a_write": 3,
    "autograd/test_checkpointing.py::test_no_mode_changes_a_bit": 4,
    "crossings/test_crossings.py::test_a_crossing": 3,
    "examples/test_examples.py::test_one_gpu_learns": 2,
    "faults/test_faults.py::test_torchrun_restarts": 3,
    "interop/test_plans.py::test_a_trace": 3,
    "interop/test_plans.py::test_models_train": 5,
    "interop/test_torchao.py::test_the_bits": 2,
    "interop/test_trainer.py::test_a_trainer_compiles": 2,
    "interop/test_verify.py::test_a_model_that_trains_the_same": 4,
    "interop/test_verify.py::test_a_step_in_micro_batches": 4,
    "mutants/test_mutants.py::test_a_mutant_is_killed": 16,
    "mutants/test_mutants.py::test_what_becomes_of_a_mutant": 2,
    "offload/test_deferred.py::test_every_elementwise_optimizer": 3,
    "offload/test_deferred.py::test_what_looks_or_writes": 4,
    "planner/test_counted_peak.py::test_on_a_mesh_of_two_dims": 5,
    "planner/test_counted_peak.py::test_steps_of_owners": 3,
    "planner/test_counted_peak.py::test_the_predicted_peak": 3,
    "planner/test_counted_peak.py::test_through_memory": 5,
    "planning/test_measured_steps.py::test_auto_takes_the_batch": 4,
    "planning/test_measured_steps.py::test_ranks_over_which_layers": 2,
    "planning/test_planned_checkpointing.py::test_every_mix": 2,
    "planning/test_tensor_parallel_plans.py::test_peaks": 4,
    "runtime/test_compile.py::test_micro_batches": 3,
    "runtime/test_compile.py::test_every_kind_of_model": 3,
    "runtime/test_compile.py::test_training_is_that_of_eager": 5,
}


def marks(ids: list[str]) -> list[tuple[str, ...]]:
    """Which of "slow" and "deep" tests are, by their ids in the order in which they are collected."""
    slow, deep = (tuple(f"tests/{start}" for start in starts) for starts in (SLOW, DEEP))
    seen, found = Counter[str](), list[tuple[str, ...]]()
    for each in ids:
        start = next((start for start in ONE_IN if each.startswith(f"tests/{start}")), "")
        if each.startswith(deep) or (start and seen[start] % ONE_IN[start]):
            found.append(("slow", "deep"))
        else:
            found.append(("slow",) if each.startswith(slow) else ())
        seen[start] += 1
    return found
