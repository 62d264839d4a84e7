"""What flight records say of ranks that hang, raise, are killed, or go apart: who is waited for, and where."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dshard
from dshard.cli import main
from dshard.collectives import flight
from dshard.inspection.hangs import Collective, Hang, RankRecord, explain_hang, read_records
from dshard.testing import World
from tests import warm

PROGRAM = Path(__file__).with_name("hanging.py")


def line_of(text: str) -> str:
    """Where a text stands in the program, as file:line."""
    (number,) = (i for i, line in enumerate(PROGRAM.read_text().splitlines(), 1) if text in line)
    return f"{PROGRAM}:{number}"


def hang(folder: Path, how: str) -> Hang:
    """What the records of a program say whose last rank does something else."""
    ranks = 4 if how == "hybrid" else 3
    doomed = ranks - 1 if how in ("sleeps", "hybrid", "stopped", "caught") else None
    env = {**os.environ, flight.VARIABLE: str(folder)}
    ran = warm.run([PROGRAM, how], ranks=ranks, env=env, timeout_s=100, grace_s=10, doomed=doomed)
    assert ran.returncode, ran.stderr
    return explain_hang(read_records(folder))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("sleeps", f"at {line_of('time.sleep')}"),
        ("hybrid", f"at {line_of('time.sleep')}"),
        ("stopped", "ended without a word, at "),
        ("killed", "ended without a word, at "),
        ("raises", "ended: raised: ValueError: bad batch"),
        ("leaves", "ended: left: its program has come to an end, or called sys.exit"),
    ],
)
def test_the_rank_that_all_wait_for_is_named_with_where_it_is(tmp_path, how, words):
    found = hang(tmp_path / "flight", how)
    blamed = len(found.records) - 1
    assert found.blamed == (blamed,)
    assert found.difference == ""
    assert blamed in {rank for ranks in found.missing.values() for rank in ranks}
    text = str(found)
    assert f"for rank {blamed} at the all-gather of '0' ({line_of('model(torch.randn(2, 8)).sum()')})" in text
    assert f"Rank {blamed} (process {found.records[blamed].pid} on " in text
    assert words in text
    assert "it began last: reduce_scatter '0'" in text


def test_ranks_that_end_well_wait_for_nobody_and_say_so_without_their_process_group(tmp_path):
    env = {**os.environ, flight.VARIABLE: str(tmp_path)}
    for _ in range(2):
        assert warm.run([PROGRAM, "ends"], ranks=2, env=env, timeout_s=100).returncode == 0
    found = explain_hang(read_records(tmp_path))
    assert str(found).endswith("No rank waits for another.")
    assert all(record.end.startswith("left: its program has come to an end") for record in found.records.values())
    assert len(list(tmp_path.glob("*.flight-before"))) == 2  # of the first run


def test_a_folder_that_cannot_be_made_is_told_and_training_goes_on():
    ran = warm.run([PROGRAM, "ends"], ranks=2, env={**os.environ, flight.VARIABLE: "/dev/null/flight"}, timeout_s=100)
    assert ran.returncode == 0
    assert ran.stderr.count("DSHARD_FLIGHT_RECORD must name a folder in which files can be made, but '/dev/null/") == 2


def test_ranks_in_different_branches_are_told_apart_by_the_first_difference(tmp_path):
    found = hang(tmp_path / "flight", "branches")
    assert found.blamed == ()
    assert found.missing[2] == (0, 1)
    text = str(found)
    assert "All that are waited for wait themselves: they have taken different branches." in text
    assert f"all_gather '2' ({line_of('# other')}) on rank 2" in found.difference
    assert "all_gather '0'" in found.difference
    assert "on ranks 0, 1" in found.difference


def test_the_command_prints_it_and_says_so_where_there_is_nothing(tmp_path, capsys):
    folder = tmp_path / "flight"
    expected = str(hang(folder, "raises"))
    assert main(["explain-hang", str(folder)]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    (folder / "rank-00002.flight").unlink()
    text = str(explain_hang(read_records(folder)))
    assert "Rank 2 has no record here: it did not start, or wrote it on another host." in text
    for path in folder.iterdir():
        path.write_bytes(b"\x00 nothing")
    assert main(["explain-hang", str(folder)]) == 2
    assert "DIR must hold flight records, but" in capsys.readouterr().err


def train(num_steps: int) -> list[float]:
    torch.manual_seed(0)
    model = dshard.fully_shard(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
    losses = []
    for step in range(num_steps):
        loss = model(torch.full((2, 8), float(step % 3 + dist.get_rank()))).square().mean()
        loss.backward()
        dshard.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
        model.zero_grad()
    return losses


def test_the_last_thousand_collectives_are_kept_and_results_are_those_without_a_record(tmp_path, monkeypatch):
    with World(2) as world:
        expected = world.run(train, 350)
    monkeypatch.setattr(flight._State, "folder", "")
    monkeypatch.setenv(flight.VARIABLE, str(tmp_path))
    with World(2) as world:
        assert world.run(recorded, str(tmp_path), 350) == expected
    for rank, record in read_records(tmp_path).items():
        path = tmp_path / f"rank-{rank:05}.flight"
        assert path.stat().st_size == (flight.RING + flight.NUM_COLLECTIVES) * flight.LINE_BYTES
        numbers = [json.loads(line)["number"] for line in path.read_text().splitlines()[flight.RING :]]
        assert len(record.collectives) == flight.NUM_COLLECTIVES
        assert sorted(numbers) == list(range(max(numbers) + 1 - flight.NUM_COLLECTIVES, max(numbers) + 1))
        assert record.wait is None


def recorded(folder: str, num_steps: int) -> list[float]:
    flight._State.folder = folder
    return train(num_steps)


def test_a_rank_that_never_came_to_a_groups_first_collective_is_waited_for():
    wait = {"waits": "first collective of a process group", "group": "g", "ranks": "0,1", "place": 0, "at": 90.0}
    waiting = dataclasses.replace(record(0, []), wait={**wait, "line": ""})
    assert explain_hang({0: waiting, 1: record(1, [])}).blamed == (1,)
    assert explain_hang({0: waiting, 1: dataclasses.replace(waiting, rank=1)}).missing == {0: (), 1: ()}
    assert explain_hang({0: waiting, 1: record(1, [(1, "a")])}).missing == {0: ()}


def test_ranks_in_no_order_are_cut_between_two_of_them_and_never_within_a_long_line(tmp_path):
    ranks = [3 * i * i + 7 for i in range(60)]
    text = flight._as_ranges(ranks)
    assert len(text) < flight._MAX_CHARS + 5
    assert flight.ranks_of(text) == ranks[: len(flight.ranks_of(text))]
    flight.FlightRecord(tmp_path).put(3, {"waits": "w" * 120, "line": "l" * 240, "ranks": text, "place": 2})
    line = json.loads((tmp_path / "rank-00000.flight").read_text().splitlines()[3])
    assert (line["ranks"], line["place"]) == (text, 2)


@pytest.mark.parametrize(
    "ranks",
    [[0], [3], [0, 1], [0, 2], [0, 1, 2, 3], [1, 3, 5, 7], [0, 1, 5], list(range(2000)), list(range(7, 900, 8))],
)
def test_ranks_are_read_back_from_their_text(ranks):
    text = flight._as_ranges(ranks)
    assert flight.ranks_of(text) == ranks
    assert len(text) < 20


def test_a_label_of_any_length_fits_its_line(tmp_path):
    record = flight.FlightRecord(tmp_path)
    record.put(flight.RING, {"label": "é" * 3000, "number": 1})
    (line,) = [
        line for line in (tmp_path / "rank-00000.flight").read_bytes().splitlines()[flight.RING :] if line.strip()
    ]
    assert len(line) == flight.LINE_BYTES - 1
    assert set(json.loads(line)["label"]) == {"é"}


def record(rank: int, began: list[tuple[int, str]]) -> RankRecord:
    """Of a rank that began collectives: the number of each, and which."""
    collectives = [Collective(("g", "0,1"), n, 10.0 + n, what, "") for n, what in began]
    return RankRecord(rank, 2, "elsewhere", 1, "", "", None, tuple(collectives), 100.0)


def test_of_several_collectives_in_which_ranks_differ_the_first_is_named():
    first = record(0, [(1, "a"), (2, "c"), (3, "d")])
    other = record(1, [(1, "a"), (2, "y"), (3, "z")])
    found = explain_hang({0: first, 1: other})
    assert found.difference == "The first difference: number 2 among ranks 0,1 is c on rank 0 and y on rank 1."
    assert str(explain_hang({0: first})).endswith("No rank waits for another.")
