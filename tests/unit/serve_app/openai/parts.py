"""A message taken apart, its content and its calls each for themselves."""

from typing import NamedTuple

from serve_app.openai.message import MessageParser
from serve_app.openai.tool_calls import ToolCall


class Parts(NamedTuple):
    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]


def feed(parser: MessageParser, text: str, *, last: bool = False) -> Parts:
    reasoning, pieces = parser.feed(text, last=last)
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return Parts(reasoning, content, tuple(each for each in pieces if isinstance(each, ToolCall)))
