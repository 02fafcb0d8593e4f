"""Token events -> Anthropic's message, as one object or as named events.

A generation that a sleep aborted has `stop_reason` "max_tokens", since it is cut short and Anthropic's list has
no word for that. `signature` of a thinking block is empty: whatever comes back in one is taken.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from actors.protocol import FinishReason, TokenEvent
from serve_app.openai.growing import Continuation, GrowingAnswer, to_json
from serve_app.openai.requests import Ask
from serve_app.openai.tool_calls import ToolCall

_STOP: Mapping[FinishReason, str] = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.ABORT: "max_tokens",
}


class MessageAnswer(GrowingAnswer):
    """POST /v1/messages: one continuation of one prompt."""

    def __init__(self, ask: Ask, model_id: str) -> None:
        super().__init__(ask, f"msg_{uuid4().hex}")
        self._model_id = model_id
        self._open: str | None = None  # the kind of the block that more may come of
        self._index = 0  # of the block that is open, or comes next

    def chunks(self, prompt_index: int, event: TokenEvent) -> list[dict[str, Any]]:
        _, continuation = self._count(prompt_index, event)
        events: list[dict[str, Any]] = []
        if continuation.parser is None:
            events.append({"type": "message_start", "message": self._message([], None, 0)})
        for kind, piece in self._pieces(continuation, event.text):
            if isinstance(piece, ToolCall):
                events += [*self._stop(), self._start(_call_block(piece, {}))]
                delta = {"type": "input_json_delta", "partial_json": piece.arguments}
            else:
                if self._open != kind:
                    events += [*self._stop(), self._start(_text_block(kind, ""))]
                delta = {"type": f"{kind}_delta", kind: piece}
            self._open = kind
            events.append(self._delta(delta))
        if event.finish_reason is not None:
            stopped = _stopped(event, continuation.calls)
            events += self._stop()
            events.append({"type": "message_delta", "delta": stopped, "usage": self._usage()})
            events.append({"type": "message_stop"})
        return events

    def written(self) -> bytes:
        (grown,) = self._continuations
        content: list[dict[str, Any]] = []
        pieces = self._pieces(grown, "".join(grown.text))
        for kind, group in itertools.groupby(pieces, key=lambda piece: piece[0]):
            alike = [piece for _, piece in group]
            if texts := [piece for piece in alike if isinstance(piece, str)]:
                content.append(_text_block(kind, "".join(texts)))
            calls = [piece for piece in alike if isinstance(piece, ToolCall)]
            content += [_call_block(call, json.loads(call.arguments)) for call in calls]
        return to_json(self._message(content, grown.last, grown.calls))

    def keep_alive(self) -> dict[str, Any]:
        return {"type": "ping"}

    def trailer(self) -> None:
        """The last chunk has the usage."""

    def _pieces(
        self, continuation: Continuation, text: str
    ) -> Iterator[tuple[str, str | ToolCall]]:
        """Each with the type of its block."""
        reasoning, found = self._taken_apart(continuation, text)
        if reasoning:
            yield "thinking", reasoning
        for piece in found:
            yield "tool_use" if isinstance(piece, ToolCall) else "text", piece

    def _message(
        self, content: Sequence[Mapping[str, Any]], last: TokenEvent | None, calls: int
    ) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._model_id,
            "content": content,
            **_stopped(last, calls),
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """So far. The prompt's tokens are those that were read from the cache, and the others."""
        cached = sum(self._cached_tokens)
        return {
            "input_tokens": sum(self._prompt_tokens) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._completion_tokens,
        }

    # --- events of blocks ---

    def _start(self, block: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> list[dict[str, Any]]:
        """The end of the block that is open, if one is."""
        if self._open is None:
            return []
        self._open = None
        self._index += 1
        return [{"type": "content_block_stop", "index": self._index - 1}]


def _text_block(kind: str, text: str) -> dict[str, Any]:
    """Its text is in the field of the type's name."""
    signature = {"signature": ""} if kind == "thinking" else {}
    return {"type": kind, kind: text, **signature}


def _call_block(call: ToolCall, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": f"toolu_{uuid4().hex}",
        "name": call.name,
        "input": arguments,
    }


def _stopped(event: TokenEvent | None, calls: int) -> dict[str, Any]:
    """Why the message ended, if it has: with calls, clients look for "tool_use" before they make them."""
    if event is None or event.finish_reason is None:
        return {"stop_reason": None, "stop_sequence": None}
    sequence = event.stop_reason if isinstance(event.stop_reason, str) else None
    reason = _STOP[event.finish_reason]
    if event.finish_reason is FinishReason.STOP:
        if calls:
            reason = "tool_use"
        elif sequence is not None:
            reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence}
