"""What the tests of the documents share: blocks of a page, and programs in place of those that a page calls."""

import json
import re
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

_PROGRAM = f"""#!{sys.executable}
import json, pathlib, sys
with pathlib.Path({{told!r}}).open("a") as told:
    print(json.dumps([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]), file=told)
"""


def blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    """Language and contents of each fenced block in one of the languages, in order."""
    return re.findall(rf"```({'|'.join(languages)})\n(.*?)```", text, re.DOTALL)


def shell_blocks(text: str) -> list[str]:
    return [contents for _, contents in blocks(text, "sh")]


def block_with(part: str, text: str) -> str:
    """The only one for a shell that has this part."""
    (found,) = (block for block in shell_blocks(text) if part in block)
    return found


def values(words: list[str], option: str) -> list[str]:
    """Of an option that may be there several times."""
    return [value for name, value in pairwise(words) if name == option]


class StandIns:
    """Programs that only record what they are asked."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder = folder
        self._told = folder / "told"
        folder.mkdir()
        for name in names:
            self.add(folder / name)

    def add(self, place: Path) -> None:
        """One more, elsewhere."""
        place.write_text(_PROGRAM.format(told=str(self._told)), encoding="utf-8")
        place.chmod(0o755)

    def told(self) -> list[list[str]]:
        """Name and arguments of each call, in order."""
        return [json.loads(line) for line in self._told.read_text(encoding="utf-8").splitlines()]
