"""A model's reasoning apart from its answer, in text that arrives in pieces."""

from serve_app.openai.held_text import HeldText

_OPEN, _CLOSE = "<think>", "</think>"


class ReasoningParser:
    """`<think>reasoning</think>answer`, as DeepSeek-R1, Qwen3 and QwQ write, of one message.

    How its text is cut into pieces makes no difference. Tags go, and the white space around them. Reasoning comes
    first or not at all: a tag in the middle of an answer is text. What is cut off before `</think>` is reasoning.

    Args:
        name: `think`; None where the model has no reasoning, and all is answer.
        in_reasoning: the prompt ends with the opening tag. Some models repeat it.
    """

    def __init__(self, name: str | None, in_reasoning: bool) -> None:
        self._opened = in_reasoning
        # What came so far, until it is clear where it belongs: white space, and what is behind it.
        self._spaces: list[str] = []
        self._start = None if name is None else ""
        self._reasoning: HeldText | None = None
        self._trims = False  # white space between the tag and the answer

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer in the next piece."""
        if self._start is not None:
            text = self._start + text
            stripped = text.lstrip()
            self._spaces.append(text[: len(text) - len(stripped)])
            if len(stripped) < len(_OPEN) and _OPEN.startswith(stripped):
                self._start = stripped
                return "", ""
            self._start = None
            if self._opened or stripped.startswith(_OPEN):
                self._reasoning = HeldText((_CLOSE,))
                text = stripped.removeprefix(_OPEN)
                self._trims = True
            else:
                text = "".join(self._spaces) + stripped
        if self._reasoning is None:
            return "", self._answer(text)
        if self._trims:  # white space between the tag and the reasoning
            text = text.lstrip()
            self._trims = not text
        reasoning, mark, rest = self._reasoning.feed(text)
        if mark is None:
            return reasoning, ""
        self._reasoning, self._trims = None, True
        return reasoning, self._answer(rest)

    def flush(self) -> tuple[str, str]:
        """What was held back, when nothing more will come."""
        if self._start is not None:
            start, self._start = self._start, None
            return (start, "") if self._opened else ("", "".join(self._spaces) + start)
        return ("" if self._reasoning is None else self._reasoning.flush(), "")

    def _answer(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text
