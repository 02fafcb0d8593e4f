"""A model's reasoning apart from its answer, in text that arrives in pieces."""

from typing import Protocol

from serve_app.openai.held_text import HeldText

_OPEN, _CLOSE = "<think>", "</think>"


class ReasoningParser(Protocol):
    """Of one message. How its text is cut into pieces makes no difference."""

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer in the next piece."""

    def flush(self) -> tuple[str, str]:
        """What was held back, when nothing more will come."""


class NoReasoning:
    """All of it is answer."""

    def feed(self, text: str) -> tuple[str, str]:
        return "", text

    def flush(self) -> tuple[str, str]:
        return "", ""


class ThinkTags:
    """`<think>reasoning</think>answer`, as DeepSeek-R1, Qwen3 and QwQ write.

    Tags go, and the white space around them. Reasoning comes first or not at all: a tag in the middle of
    an answer is text. What is cut off before `</think>` is reasoning.

    Args:
        in_reasoning: the prompt ends with the opening tag. Some models repeat it.
    """

    def __init__(self, in_reasoning: bool) -> None:
        self._opened = in_reasoning
        # What came so far, until it is clear where it belongs: white space, and what is behind it.
        self._spaces: list[str] = []
        self._start: str | None = ""
        self._reasoning: HeldText | None = None
        self._trims = False  # white space between the tag and the answer

    def feed(self, text: str) -> tuple[str, str]:
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
        if self._start is not None:
            start, self._start = self._start, None
            return (start, "") if self._opened else ("", "".join(self._spaces) + start)
        return ("" if self._reasoning is None else self._reasoning.flush(), "")

    def _answer(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text


def reasoning_parser(name: str | None, in_reasoning: bool) -> ReasoningParser:
    """A parser for one message.

    Args:
        name: `think`; None where the model has no reasoning.
        in_reasoning: where the message begins.
    """
    return NoReasoning() if name is None else ThinkTags(in_reasoning)
