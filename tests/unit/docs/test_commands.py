"""Every `sleepserve ...` that the documents show can be typed: command, options and values are there. None is run."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from serve_app.cli.main import app
from tests.documents import shell_blocks

PROJECT = Path(__file__).parents[3]
_HERE_DOCUMENT = re.compile(r"<<'?(\w+)'?\n.*?\n\1\n", re.DOTALL)
_PROGRAM = "sleepserve"
# Where one command ends: what is behind is the shell's.
_ENDS = {";", "&", "&&", "||", "|", ">", ">>", "<"}
# Of docs/cli.md, whose tables show forms; a word in capitals stands for something.
_INLINE = re.compile(rf"`({_PROGRAM} [^`]*)`")

# Of click's, which typer has inside since 0.26 and does not name.
_USAGE: type[Exception] = typer.BadParameter.__mro__[1]
_OF_THE_READER = ("does not exist",)
_LEFT_OUT = ("Missing ", "requires an argument", *_OF_THE_READER)


@dataclass(frozen=True, slots=True)
class Shown:
    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def pages() -> list[Path]:
    top = [PROJECT / name for name in ("README.md", "ARCHITECTURE.md", "UPGRADING.md")]
    return [*top, *sorted((PROJECT / "docs").glob("*.md"))]


def shown() -> Iterator[Shown]:
    for page in pages():
        name = str(page.relative_to(PROJECT))
        text = page.read_text(encoding="utf-8")
        for block in shell_blocks(text):
            lines = _HERE_DOCUMENT.sub("\n", block).replace("\\\n", " ").splitlines()
            for line in lines:
                yield from (Shown(name, words) for words in commands_in(line))
        for inline in _INLINE.findall(text):
            yield from (Shown(name, words) for words in commands_in(filled_in(inline)))


def commands_in(line: str) -> Iterator[tuple[str, ...]]:
    """What follows the program's name, wherever in a line of a shell it is a command."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a line of a string that goes on
        return
    begins = True
    for at, word in enumerate(words):
        if begins and word.rpartition("/")[2] == _PROGRAM:
            rest = words[at + 1 :]
            ends = next((i for i, each in enumerate(rest) if each in _ENDS), len(rest))
            yield tuple(rest[:ends])
        begins = word in _ENDS or word in ("do", "then", "exec") or "=" in word


def filled_in(form: str) -> str:
    """An example of a form: `[FILE]` may be left out, and so may what three dots stand for."""
    return re.sub(r"\[[^]]*\]|\.\.\.", "", form)


def test_some_are_found() -> None:
    found = {str(each) for each in shown()}
    assert "README.md: doctor serve_config.yaml" in found
    assert "docs/quickstart.md: sleep large" in found
    assert "docs/quickstart.md: serve qwen.yaml --print-config" in found
    assert len(found) > 30


@pytest.mark.parametrize("each", sorted(set(shown()), key=str), ids=str)
def test_command_can_be_typed(each: Shown) -> None:
    assert problem(each.words) is None, each


@pytest.mark.parametrize(
    "line",
    [
        "sleepserve serve --max-batch 3",
        "sleepserve srve",
        "sleepserve bench frobnicate",
        "sleepserve sleep demo --level one",
        "sleepserve check a b",
        "X=1 sleepserve status --nothing",
    ],
)
def test_what_is_not_there_is_noticed(line: str) -> None:
    (words,) = commands_in(line)
    assert problem(words) is not None


def rows() -> Iterator[tuple[str, ...]]:
    """The commands that the tables of docs/cli.md are about."""
    for line in (PROJECT / "docs" / "cli.md").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"| `{_PROGRAM} "):
            for inline in _INLINE.findall(line.split(" | ")[0]):
                yield from commands_in(filled_in(inline))


def test_row_of_a_table_has_all_that_its_command_needs() -> None:
    found = list(rows())
    assert ("bench", "soak", "FILE_OR_DIR") in found
    assert [each for each in found if problem(each, _OF_THE_READER)] == []


def problem(words: tuple[str, ...], left_out: tuple[str, ...] = _LEFT_OUT) -> str | None:
    """Why it cannot be typed. What forms in running text leave out is no reason, nor is a file of the reader's own."""
    command: Any = typer.main.get_command(app)
    rest = [example(word) for word in words]
    while subcommands := getattr(command, "commands", None):
        # Not parsed: completion would be installed at once.
        options = {name for option in command.params for name in option.opts} | {"--help"}
        while rest and rest[0] in options:
            rest.pop(0)
        if not rest:
            return None
        if rest[0] not in subcommands:
            return f"no command or option {rest[0]}"
        command = subcommands[rest.pop(0)]
    try:
        command.make_context(command.name, rest)
    except typer.Exit:  # --help
        return None
    except _USAGE as error:
        text = str(error.format_message())  # type: ignore[attr-defined]
        return None if any(each in text for each in left_out) else text
    return None


def example(word: str) -> str:
    """Of what a word in capitals stands for."""
    return {"SECONDS": "1", "N": "1", "SHAPE": "tiny", "RECIPE": "gptq-4-128"}.get(word, word)
