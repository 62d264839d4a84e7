"""Every relative link of the docs leads somewhere, every page is reached, and what newcomers ask is two clicks away."""

from itertools import pairwise

import pytest

from tests.meta.fences import documents
from tests.meta.links import anchors, links, missing_paths, problems
from tests.meta.source import ROOT
from tests.meta.test_docs import sources

FILES = set(sources())
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (*documents(ROOT), ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md")
}

# What somebody wants who has never seen this library, and the pages on the way to it.
CLICKS = {
    "start": ("README.md", "docs/tutorial.md"),
    "understand a step": ("README.md", "docs/concepts.md"),
    "migrate an FSDP2 script": ("README.md", "docs/migrate_from_fsdp2.md"),
    "fine-tune with LoRA": ("README.md", "docs/guides/lora.md"),
    "find out why memory is high": ("README.md", "docs/guides/memory.md"),
    "find out which rank hangs where": ("README.md", "docs/guides/hangs.md"),
    "choose a strategy": ("README.md", "docs/guides/strategy.md"),
    "resume with fewer ranks": ("README.md", "docs/guides/resume.md"),
    "use tensor parallelism": ("README.md", "docs/guides/tensor_parallel.md"),
    "train with Muon": ("README.md", "docs/guides/muon.md"),
    "save and load checkpoints": ("README.md", "docs/checkpoints.md"),
    "compare it with others": ("README.md", "docs/comparison.md"),
    "see what is not there": ("README.md", "docs/limits.md"),
    "look up a function": ("README.md", "docs/api.md"),
    "use the Trainer or Accelerate": ("README.md", "docs/index.md", "docs/interop.md"),
    "train on several hosts": ("README.md", "docs/index.md", "docs/multi_node.md"),
    "load and write safetensors": ("README.md", "docs/checkpoints.md"),
    "train in bf16": ("README.md", "docs/index.md", "docs/precision.md"),
    "compile": ("README.md", "docs/index.md", "docs/compile.md"),
    "offload to the CPU": ("README.md", "docs/index.md", "docs/offload.md"),
    "check that sharding changes nothing": ("README.md", "docs/index.md", "docs/verify.md"),
}
MAX_CLICKS = 2


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page):
    assert problems(page, PAGES[page], ROOT, FILES) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])  # which tells of what was
def test_every_file_that_is_named_is_there(page):
    assert missing_paths(page, PAGES[page], FILES) == []


@pytest.mark.parametrize("task", CLICKS)
def test_a_task_is_two_clicks_away(task):
    path = CLICKS[task]
    assert len(path) - 1 <= MAX_CLICKS
    for page, following in pairwise(path):
        targets = {link.target for link in links(PAGES[page], page, ROOT)}
        assert following in targets, f"{task}: {page} has no link to {following}"


def test_a_guide_has_a_program_that_runs():
    guides = [path for path in documents(ROOT) if path.parent.name == "guides"]
    assert len(guides) > 5
    for guide in guides:
        assert "\n```python" in guide.read_text(), f"{guide.name}: a guide has a program that runs"


def test_every_page_is_in_the_index_and_in_the_contents():
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    linked = {link.target.removeprefix("docs/") for link in links(PAGES["docs/index.md"], "docs/index.md", ROOT)}
    assert pages - linked == {"index.md"}
    entries = {line.strip() for line in (ROOT / "docs" / "contents.rst").read_text().splitlines()}
    assert {page.removesuffix(".md") for page in pages} <= entries


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](gone.md)", "docs/tensor.md: there is no docs/gone.md"),
        ("![a](images/gone.svg)", "docs/tensor.md: there is no docs/images/gone.svg"),
        ("[`a` [b]](units.md#gone)", "docs/tensor.md: docs/units.md has no heading #gone"),
        ("[a](#gone)", "docs/tensor.md: docs/tensor.md has no heading #gone"),
        ("[a](../../outside.md)", "docs/tensor.md: there is no ../../outside.md"),
        ("[a](../.git/config)", "docs/tensor.md: there is no .git/config"),
    ],
)
def test_a_link_into_nothing_is_seen(text, problem):
    assert problems("docs/tensor.md", text, ROOT, FILES) == [problem]


@pytest.mark.parametrize(
    "text",
    ["[a](units.md#replicas)", "[a](design)", "[a](https://example.org/x)", "`[a](gone.md)`", "```text\n[a](b)\n```\n"],
)
def test_links_that_are_there_elsewhere_or_in_code_are_no_problem(text):
    assert problems("docs/tensor.md", text, ROOT, FILES) == []


def test_a_file_that_is_named_and_not_there_is_seen():
    text = "`tests/gone.py::test_a` `dshard/errors.py` `python tests/gone2.py` `docs/gone.md`"
    assert missing_paths("a.md", text, FILES) == ["a.md: there is no tests/gone.py", "a.md: there is no docs/gone.md"]


def test_anchors_are_those_of_github():
    text = "# A `b_c`: d, e\n## [L](x.md) & m\n## Same\n## Same\n```text\n# no\n```\n"
    assert anchors(text) == {"a-b_c-d-e", "l--m", "same", "same-1"}
