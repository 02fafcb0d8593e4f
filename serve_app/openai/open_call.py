"""What stands behind the opening mark of a call, as it arrives in pieces."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from serve_app.openai.growing_object import GrowingObject
from serve_app.openai.held_text import HeldText

BEGIN, OBJECT = "", "{"  # what is behind the opening mark, and a JSON object
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
SEPARATOR = "<｜tool▁sep｜>"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes a call.

    Args:
        opening: mark in front of it.
        closing: mark behind it.
        behind: which texts matter behind each of these. A mark among them ends the call there.
        alone: behind these there is nothing but white space in front of one of the texts that matter.
    """

    opening: str
    closing: str
    behind: Mapping[str, Sequence[str]]
    alone: Collection[str]


def _qwen(opening: str, closing: str) -> CallForm:
    function, function_end = "<function=", "</function>"
    behind = {
        BEGIN: (OBJECT, function),
        OBJECT: (closing, opening),
        function: (PARAMETER, function_end, closing),
        PARAMETER: (PARAMETER_END, PARAMETER, closing),
        PARAMETER_END: (PARAMETER, function_end, closing),
        function_end: (PARAMETER, closing, opening),
    }
    return CallForm(opening, closing, behind, alone=(BEGIN, OBJECT))


def _deepseek(opening: str, closing: str) -> CallForm:
    fence = "```"  # the one behind the object
    behind = {
        BEGIN: (SEPARATOR, closing, opening),
        SEPARATOR: (OBJECT, closing, opening),
        OBJECT: (fence, closing, opening),
        fence: (closing, opening),
    }
    return CallForm(opening, closing, behind, alone=(OBJECT, fence))


QWEN = _qwen("<tool_call>", "</tool_call>")
DEEPSEEK = _deepseek("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")


class OpenCall:
    """A call until it ends, or until it is clear that it can be none.

    Marks in the strings of a JSON object are text of the call, and so are those in a parameter. A parameter that
    nothing closes, before another one begins or the message ends, ends with its call at the first closing mark.
    """

    def __init__(self, form: CallForm) -> None:
        self.pieces: list[str] = []  # of the call, with its closing mark
        self._form = form
        self._length = 0  # of all that came
        self._mark_length = 0  # of the closing mark, or of what came of it
        self._first_mark = 0  # the index behind the first closing mark in a parameter
        self._object: GrowingObject | None = None
        self._sought: HeldText | _Expected
        self._enter(BEGIN)

    def feed(self, text: str) -> list[str] | None:
        """Pieces of what is behind the call; None while it has no end.

        Raises:
            ValueError: whatever comes, this is no call.
        """
        self.pieces.append(text)
        self._length += len(text)
        while True:
            if self._object is not None:
                index = self._object.feed(text)
                if index is None:
                    return None
                self._object, text = None, text[index:]
            _, found, text = self._sought.feed(text)
            if found is None:
                return None
            index = self._length - len(text)
            if found == self._form.opening:
                return self._ended(index - len(found), 0)
            if self._at != PARAMETER and found == self._form.closing:
                return self._ended(index, len(found))
            if self._at != PARAMETER or found == PARAMETER_END:
                self._enter(found)
            elif found == self._form.closing:
                self._first_mark = self._first_mark or index
            elif self._first_mark:  # and another parameter begins
                return self.flush()

    def flush(self) -> list[str]:
        """Pieces of what is behind the call, if nothing more comes that belongs to it."""
        closing = self._form.closing
        if self._first_mark:
            return self._ended(self._first_mark, len(closing))
        text = "".join(self.pieces)
        lengths = range(len(closing), 0, -1)
        came = next((length for length in lengths if text.endswith(closing[:length])), 0)
        return self._ended(self._length, came)

    def inside(self) -> str:
        """The call without its mark, once it has ended."""
        text = "".join(self.pieces)
        return text[: len(text) - self._mark_length]

    def _enter(self, found: str) -> None:
        self._at = found
        texts = self._form.behind[found]
        self._sought = _Expected(texts) if found in self._form.alone else HeldText(texts)
        self._object = GrowingObject() if found == OBJECT else None
        self._first_mark = 0

    def _ended(self, index: int, mark_length: int) -> list[str]:
        self._mark_length = mark_length
        behind, left = [], self._length - index
        while left:
            piece = self.pieces.pop()
            if len(piece) > left:
                self.pieces.append(piece[:-left])
                piece = piece[-left:]
            behind.append(piece)
            left -= len(piece)
        return behind[::-1]


class _Expected:
    """White space, and behind it one of a few texts. As `HeldText`, otherwise."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._begin = ""  # of one of them

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """Nothing, the text that came, and what is behind it; without one, nothing, None and nothing.

        Raises:
            ValueError: it is another text.
        """
        text = (self._begin + text).lstrip()
        for each in self._texts:
            if text.startswith(each):
                return "", each, text[len(each) :]
        if not any(each.startswith(text) for each in self._texts):
            raise ValueError("another text")
        self._begin = text
        return "", None, ""
