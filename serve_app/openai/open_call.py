"""What stands behind the opening mark of a call, as it arrives in pieces."""

from collections.abc import Sequence

from serve_app.openai.growing_object import GrowingObject


class OpenCall:
    """A call until its closing mark, or until it is clear that it can be none.

    Marks in the strings of a JSON object are text of the call. A call in another form ends at the first one.

    Args:
        closing: mark behind the call.
        begins: what calls begin with, behind white space; with nothing here, with anything. A `{` begins a JSON
            object.
    """

    def __init__(self, closing: str, begins: Sequence[str]) -> None:
        self.pieces: list[str] = []  # that came, without what is behind the closing mark
        self._closing = closing
        self._begin = _Expected(begins) if begins else None
        self._object: GrowingObject | None = None
        self._end: _Expected | _Sought = _Sought(closing)

    def feed(self, text: str) -> str | None:
        """What is behind the closing mark; None while there is none.

        Raises:
            ValueError: whatever comes, this is no call.
        """
        self.pieces.append(text)
        rest = self._behind(text)
        if rest:
            self.pieces[-1] = text[: -len(rest)]
        return rest

    def inside(self) -> str:
        """All that came, without the closing mark or what came of it."""
        text = "".join(self.pieces)
        for length in range(len(self._closing), 0, -1):
            if text.endswith(self._closing[:length]):
                return text[:-length]
        return text

    def _behind(self, text: str) -> str | None:
        if self._begin is not None:
            begin, behind = self._begin.feed(text)
            if behind is None:
                return None
            self._begin, text = None, behind
            if begin == "{":
                self._object, self._end = GrowingObject(), _Expected((self._closing,))
        if self._object is not None:
            end = self._object.feed(text)
            if end is None:
                return None
            self._object, text = None, text[end:]
        return self._end.feed(text)[1]


class _Expected:
    """White space, and behind it one of a few texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._begin = ""  # of one of them

    def feed(self, text: str) -> tuple[str, str | None]:
        """The one that came, and what is behind it; None while more has to come.

        Raises:
            ValueError: it is another text.
        """
        text = (self._begin + text).lstrip()
        for each in self._texts:
            if text.startswith(each):
                return each, text[len(each) :]
        if not any(each.startswith(text) for each in self._texts):
            raise ValueError("another text")
        self._begin = text
        return "", None


class _Sought:
    """A text with anything in front of it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._end = ""  # of what came, in which it may begin

    def feed(self, text: str) -> tuple[str, str | None]:
        """As `_Expected` does, but all texts go."""
        text = self._end + text
        before, found, behind = text.partition(self._text)
        if found:
            return found, behind
        self._end = before[max(0, len(before) - len(self._text) + 1) :]
        return "", None
