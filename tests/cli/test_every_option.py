"""Wrong values for every option of every command, found by asking the parsers: a new option is in here by itself."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from dshard.cli import parser_of
from dshard.cli.usage import count
from tests.cli.launch import RANK_VARIABLES, code_of

# What a command cannot be called without.
NEEDED = {
    "plan": ("gpt-nano", "--world", "8", "--device", "a100-40g"),
    "calibrate": ("published",),
    "merge": ("nowhere", "out"),
    "simulate": ("gpt-nano", "--world", "8", "--device", "a100-40g"),
    "trace": ("nobody:factory",),
    "verify": ("nobody:factory",),
}
NUMBERS = {count: ("x", "1.5", "", "nan", "-1", "0"), float: ("x", "", "nan", "inf", "-1")}
TEXTS = {  # that mean something of their own
    "MODULE:FACTORY": ("nobody", "missing:factory", ":", ""),
    "MODEL": ("nobody", "missing.json", "missing:model", ""),
    "--batch": ("x", "0", "-1", "1.5", ""),
    "--device": ("abacus", ""),
    "--memory": ("much", "-1GiB", "0", "nan", ""),
    "--ranks": ("x", "0", "-1", "1.5", "1,,2", ""),
    "--strategies": ("zero9", "full,,ddp", ""),
    "--strategy": ("zero9", "", "hybrid(0)", "hybrid(3)", "split(2, keep)"),
}


def commands(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield path.strip(), parser
    for name, child in below[0].choices.items() if below else ():
        yield from commands(child, f"{path} {name}")


def wrong_values(option: str, action: argparse.Action) -> tuple[str, ...]:
    if action.choices is not None:
        return ("nobody", "")
    if action.nargs == 0:
        return ("=yes",)
    if action.type in NUMBERS:
        return NUMBERS[action.type]  # type: ignore[index]
    if action.type is Path:
        return ("file/below/x.png",)
    assert option in TEXTS, f"{option} is text: put into TEXTS what is none that it takes"
    return TEXTS[option]


def cases() -> list[tuple[str, str, str]]:
    """Command, option and value."""
    found = []
    for command, parser in commands(parser_of()):
        for action in parser._actions:
            option = action.option_strings[-1] if action.option_strings else str(action.metavar)
            if not isinstance(action, argparse._HelpAction):
                found += [(command, option, value) for value in wrong_values(option, action)]
    return found


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No rank variables, and a working folder of our own, in which `file` is no folder."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")


def words(command: str, option: str, value: str) -> list[str]:
    needed = list(NEEDED.get(command, ()))
    if option[0] != "-":  # the one that has a place of its own
        return [*command.split(), value, *needed[1:]]
    if option in needed:
        needed[needed.index(option) + 1] = value
        return [*command.split(), *needed]
    return (
        [*command.split(), *needed, option + value] if value == "=yes" else [*command.split(), *needed, option, value]
    )


@pytest.mark.parametrize(("command", "option", "value"), cases())
def test_a_wrong_value_is_refused_by_a_line_that_names_the_option(capsys, command, option, value):
    assert code_of(*words(command, option, value)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    line = printed.err.splitlines()[-1]
    assert line.startswith("dshard")
    assert option in line


def test_there_are_as_many_commands_as_there_are():
    found = {command for command, _, _ in cases()}
    assert {"plan", "simulate", "calibrate"} <= found
    assert len(cases()) > 50
