from dshard.cli import report
from dshard.cli.history import History, Outcome
from dshard.cli.memory import StateBytes


def _outcome(name, losses, validation=None, totals=(4,)):
    memory = [StateBytes(parameters=total, gradients=0, optimizer=0, peak=0) for total in totals]
    history = History(losses=losses, norms=[1.0] * len(losses), validation=validation or {})
    return Outcome(name, history, memory, step_s=2.0, num_tokens=10)


def test_a_sample_cannot_send_commands_to_the_terminal():
    assert (
        report.printable(b"a\x1b[31m\n\tb\xff\r")
        == "a\N{REPLACEMENT CHARACTER}[31m\n\tb" + "\N{REPLACEMENT CHARACTER}" * 2
    )


def test_the_largest_difference_looks_at_every_step_and_at_validation():
    left = _outcome("left", [1.0, 2.0, 3.0], {0: 5.0, 3: 4.0})
    assert report.largest_difference(left, _outcome("right", [1.0, 2.5, 3.0], {0: 5.0})) == 0.5
    assert report.largest_difference(left, _outcome("right", [1.0, 2.0, 3.0], {0: 6.0, 3: 4.0})) == 1.0


def test_the_memory_table_shows_the_rank_that_holds_most():
    lines = report.memory_table([_outcome("one", [1.0], totals=(1_000_000, 3_000_000))]).splitlines()
    assert lines[0].split() == ["per", "rank", "one"]
    assert lines[1].split() == ["parameters", "3.0", "MB"]
    assert lines[-1].split()[-1] == "5"


def test_a_history_survives_json_exactly(tmp_path):
    history = History(losses=[0.1, 1 / 3], norms=[1e-30, 2.0], validation={0: 5.5, 2: 0.1 + 0.2})
    assert History.from_json(history.to_json()) == history
    history.write(tmp_path / "history.jsonl")
    assert (tmp_path / "history.jsonl").read_text().splitlines() == [
        '{"step": 0, "validation_loss": 5.5}',
        '{"step": 1, "loss": 0.1, "norm": 1e-30}',
        '{"step": 2, "loss": 0.3333333333333333, "norm": 2.0, "validation_loss": 0.30000000000000004}',
    ]
