"""One chat message as it grows: reasoning, content and tool calls, from text that arrives in pieces."""

from collections.abc import Mapping, Sequence
from typing import Any

from actors.protocol import MessageForm
from serve_app.openai.reasoning import ReasoningParser
from serve_app.openai.tool_calls import ToolCall, tool_parser

# Characters that the parsers see at once. What follows a mark is copied, so a whole message with many of
# them would be copied as often.
_PIECE = 4096


class MessageParser:
    """Takes one message apart. How its text is cut into pieces makes no difference to the whole."""

    def __init__(self, form: MessageForm, tools: Sequence[Mapping[str, Any]]) -> None:
        self._reasoning = ReasoningParser(form.reasoning, form.in_reasoning)
        self._tools = tool_parser(form.tools, tools)

    def feed(self, text: str, *, last: bool = False) -> tuple[str, list[str | ToolCall]]:
        """What is certain now: reasoning, and behind it content and calls in their order.

        Args:
            text: what came since the last call.
            last: nothing more will come, so nothing is held back.
        """
        reasonings: list[str] = []
        found: list[str | ToolCall] = []
        for at in range(0, len(text), _PIECE):
            reasoning, answer = self._reasoning.feed(text[at : at + _PIECE])
            reasonings.append(reasoning)
            found += self._with_calls(answer)
        if last:
            reasoning, answer = self._reasoning.flush()
            reasonings.append(reasoning)
            found += self._with_calls(answer)
            found += [] if self._tools is None else self._tools.flush()
        return "".join(reasonings), found

    def _with_calls(self, answer: str) -> list[str | ToolCall]:
        return [answer] if self._tools is None else self._tools.feed(answer)
