"""Text that arrives in pieces, searched for marks that may be cut anywhere."""

from collections.abc import Sequence


class HeldText:
    """Holds back the end of a text that may become part of a mark.

    White space in front of a mark belongs to it: models put line breaks around what they mark. So white
    space at the end is held, too.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = marks
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """What comes before the first mark, the mark, and all that follows it, which is not kept.

        Without a mark: what is certainly no part of one, None and nothing.
        """
        text = self._held + text
        found = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._held = ""
            return text[:at].rstrip(), mark, text[at + len(mark) :]
        certain = text[: len(text) - self._longest_beginning(text)].rstrip()
        self._held = text[len(certain) :]
        return certain, None, ""

    def flush(self) -> str:
        """What was held back, when nothing more will come."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Characters at the end of the text that a mark begins with."""
        longest = min(len(text), max(map(len, self._marks)) - 1)
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(mark.startswith(end) for mark in self._marks):
                return length
        return 0
