"""Text that arrives in pieces, searched for marks that may be cut anywhere."""

from collections.abc import Sequence


class HeldText:
    """Holds back the end of a text that may become part of a mark.

    White space in front of a mark may belong to it: models put line breaks around what they mark. So white
    space at the end is held, too; behind a mark, `flush` gives what is in front of it.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = marks
        self._spaces: list[str] = []
        self._begin = ""  # of a mark, perhaps; behind the spaces

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """What comes before the first mark and its white space, the mark, and what follows it, which is not kept.

        Without a mark: what is certainly no part of one, None and nothing.
        """
        text, self._begin = self._begin + text, ""
        found = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            return self._certain(text[:at]), mark, text[at + len(mark) :]
        at = len(text) - self._longest_beginning(text)
        self._begin = text[at:]
        return self._certain(text[:at]), None, ""

    def flush(self) -> str:
        """What was held back, when nothing more will come."""
        held, self._begin = "".join(self._spaces) + self._begin, ""
        self._spaces.clear()
        return held

    def _certain(self, text: str) -> str:
        """The text with the spaces that were held in front of it; those at its end are held."""
        stripped = text.rstrip()
        if not stripped:
            self._spaces.append(text)
            return ""
        certain = "".join((*self._spaces, stripped))
        self._spaces = [text[len(stripped) :]]
        return certain

    def _longest_beginning(self, text: str) -> int:
        """Characters at the end of the text that a mark begins with."""
        longest = min(len(text), max(map(len, self._marks)) - 1)
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(mark.startswith(end) for mark in self._marks):
                return length
        return 0
