"""`make gpu`: what it says where there is no device, and how it counts what came of tests."""

import subprocess
import sys

import pytest
import torch

from tests.gpu.__main__ import ROOT, Outcome, counted, table

REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.a" name="one"/>
<testcase classname="tests.gpu.a" name="two"><failure message="no">text</failure></testcase>
<testcase classname="tests.gpu.b" name="three"><skipped/></testcase>
<testcase classname="tests.gpu.b" name="four"><error>text</error></testcase>
</testsuite></testsuites>"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_nothing_is_run_and_nothing_written(tmp_path):
    command = [sys.executable, "-m", "tests.gpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith("make gpu: there is no CUDA device")
    assert done.stdout.endswith("nothing was run, and nothing is claimed\n")
    assert list(tmp_path.iterdir()) == []


def test_what_came_of_tests_is_counted_and_those_that_failed_are_named(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    counts, failed = counted(report)
    assert counts == {"passed": 1, "failed": 1, "error": 1, "skipped": 1}
    assert failed == ["tests.gpu.a::two", "tests.gpu.b::four"]
    text = table({"cards": ["a card"], "torch": "2.13"}, {"tests": Outcome(1, 2.5, counts, failed)})
    assert "| tests | 1 | 2.5 | 1 passed, 1 failed, 1 error, 1 skipped |" in text
    assert text.endswith("- tests.gpu.a::two\n- tests.gpu.b::four\n")
