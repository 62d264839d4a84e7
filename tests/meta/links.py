"""Links of Markdown files: where they are, where they lead, and what is wrong with them."""

import re
from dataclasses import dataclass
from pathlib import Path

_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_FENCED = re.compile(r"^([ >]*)(`{3,}|~{3,}).*?^\1\2`*~*[ ]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_ELSEWHERE = re.compile(r"[a-z]+:")


@dataclass(frozen=True, slots=True)
class Link:
    """One relative link of a page.

    Args:
        page: The file that has it, from the root.
        target: The file that it leads to, from the root; the page itself for a mere anchor.
        anchor: What follows the "#"; else "".
    """

    page: str
    target: str
    anchor: str


def without_code(text: str) -> str:
    """The text but for what is in fences and between backticks."""
    return _CODE.sub("", _FENCED.sub("", text))


def links(text: str, page: str, root: Path) -> list[Link]:
    """Every relative link of a Markdown text, images included."""
    found = []
    for target in _LINK.findall(without_code(text)):
        if _ELSEWHERE.match(target):
            continue
        file, _, anchor = target.partition("#")
        path = (root / page).parent / file if file else root / page
        resolved = path.resolve()
        inside = resolved.is_relative_to(root.resolve())
        found.append(Link(page, resolved.relative_to(root.resolve()).as_posix() if inside else target, anchor))
    return found


def anchors(text: str) -> set[str]:
    """What a "#" may lead to: headings in GitHub's spelling, of which Sphinx makes the same."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCED.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        number = 0
        while (unique := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(unique)
    return found


def problems(page: str, text: str, root: Path, files: set[str]) -> list[str]:
    """Links that lead nowhere.

    Args:
        page: The file, from the root.
        text: Its text.
        root: Of the repository.
        files: What is committed, from the root.
    """
    folders = {parent.as_posix() for file in files for parent in Path(file).parents}
    found = []
    for link in links(text, page, root):
        if link.target not in files | folders:
            found.append(f"{page}: there is no {link.target}")
        elif link.anchor and link.anchor not in anchors((root / link.target).read_text()):
            found.append(f"{page}: {link.target} has no heading #{link.anchor}")
    return found


def missing_paths(page: str, text: str, files: set[str]) -> list[str]:
    """Files that a text names between backticks, in folders of the repository, and that are not there."""
    folders = {parent.as_posix() for file in files for parent in Path(file).parents}
    found = []
    for _, code in _CODE.findall(_FENCED.sub("", text)):
        path = code.partition("::")[0].rstrip("/")
        if re.fullmatch(r"(benchmarks|docs|dshard|examples|tests)/[\w./-]+", path) and path not in files | folders:
            found.append(f"{page}: there is no {path}")
    return found
