"""Files of traces: a page is looked at in a real browser, a picture in its pixels."""

import json
import re
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dshard
from dshard.cli import main
from dshard.errors import ArgumentError
from dshard.inspection.explain import CATEGORIES
from dshard.inspection.tracing import page
from dshard.testing import WorldPool
from tests.inspection.models import ids, sharded

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: .ci/run installs one where it can")


def looked_at(file: Path, *options: str) -> str:
    """What a browser says of a page, with a profile of its own."""
    flags = [f"--{flag}" for flag in (*FLAGS, f"user-data-dir={file.parent / 'profile'}", "disable-sync", *options)]
    ran = subprocess.run([str(BROWSER), *flags, file.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return ran.stdout


def traced(sleeps: bool = False) -> tuple[dict, dict]:
    model = sharded({})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with dshard.trace(model, optimizer, memory=True) as trace:
            if sleeps and dist.get_rank() == 2:
                time.sleep(0.3)
            (model(ids()) @ model.head.weight.t()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return trace.as_dict(rank=dist.get_rank()), dshard.report(model, optimizer, trace).as_dict()


@needs_browser
def test_a_page_shows_all_of_a_trace_in_a_browser(worlds: WorldPool, tmp_path):
    told = [trace for trace, _ in worlds.run(2, traced)]
    told[0]["warnings"] = ["</script><b id='planted'>"]
    told[0]["events"][0]["line"] = "<i id='planted'>.py:1"
    file = tmp_path / "trace.html"
    file.write_text(page(told), encoding="utf-8")
    assert "planted" in file.read_text()
    dom = looked_at(file, "dump-dom", "window-size=1200,1600")
    assert re.search(r'<html[^>]* data-drawn="true"', dom)
    assert not re.search(r"<html[^>]* data-error", dom)
    assert len(re.findall(r'class="event"', dom)) == len(told[0]["events"])
    assert len(re.findall(r'class="phase"', dom)) >= 2
    names = {name for name in CATEGORIES if any(sample["num_bytes"][name] for sample in told[0]["memory"])}
    assert {"parameters", "states", "activations", "gradients"} <= names
    assert set(re.findall(r'class="category" data-name="([^"]*)"', dom)) == names
    assert "class=\"warning\">&lt;/script&gt;&lt;b id='planted'&gt;</div>" in dom
    assert not re.search(r"<[bi] id=.planted", dom)
    for unit in ("embed", "blocks.1", "head"):
        assert f'<td class="left">{unit}</td>' in dom
    assert dom.count("<button") == 2


@needs_browser
def test_a_page_loads_nothing_and_is_not_blank(worlds: WorldPool, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import image

    file, shot = tmp_path / "trace.html", tmp_path / "shot.png"
    text = page([worlds.run(2, traced)[0][0]])
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}  # a name, which nobody loads
    assert not re.findall(r"<(?:link|img|iframe)|src=|url\(|import ", text)
    file.write_text(text, encoding="utf-8")
    looked_at(file, f"screenshot={shot}", "window-size=1200,1600")
    pixels = (255 * image.imread(shot)[..., :3]).round().astype(int).reshape(-1, 3)
    shown = Counter(map(tuple, pixels.tolist()))
    assert pixels.shape[0] == 1200 * 1600
    for kind in ("gather", "gradients"):
        assert _near({"gather": "#dd8452", "gradients": "#55a868"}[kind], np.array(list(shown))), kind


def _near(color: str, found: np.ndarray) -> bool:
    """Whether a color is among those of a picture, drawn with or without the page behind."""
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)])
    return bool((np.abs(found - wanted).max(1) < 3).any())


def refused() -> None:
    with dshard.trace(sharded({})) as trace:
        pass
    with pytest.raises(ArgumentError, match=r"path must end in .json or .html, .* but it is 'trace.png'"):
        trace.save("trace.png")


def test_a_file_that_is_no_page_and_no_timeline_is_refused(worlds: WorldPool):
    worlds.run(1, refused)


def test_a_rank_that_comes_late_is_seen_in_the_waits_of_the_others(worlds: WorldPool):
    told = worlds.run(3, traced, sleeps=True)
    for _, report in told[:2]:
        waits = report["waits"]
        assert next(iter(waits["peers"])) == 2
        assert 0.2 < waits["peers"][2] < sum(waits["units"].values()) + 0.1
        assert next(iter(waits["units"])) == "embed"
    assert told[2][1]["waits"]["peers"].get(0, 0.0) < 0.2


FACTORY = """
from torch import nn, randn


def make():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), randn(4, 8)
"""


@pytest.mark.parametrize("kind", ["html", "json"])
def test_the_command_writes_each_kind_with_all_ranks(kind, tmp_path, monkeypatch, capsys):
    (tmp_path / "traced_factory.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / f"trace.{kind}"
    assert main(["trace", "traced_factory:make", "--out", str(out)]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    if kind == "html":
        (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', out.read_text(), re.S)
        assert [trace["rank"] for trace in json.loads(data)["traces"]] == [0, 1]
    if kind == "json":
        events = json.loads(out.read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {0, 1}
        assert {event["name"] for event in events if event["ph"] == "C"} == {"gathered", "memory"}
    assert main(["trace", "traced_factory:make", "--out", "trace.txt"]) == 2
    assert "--out must end in .html or .json, but it is trace.txt." in capsys.readouterr().err
