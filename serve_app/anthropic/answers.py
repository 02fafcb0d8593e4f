"""Token events -> Anthropic's message, as one object or as named events.

A generation that a sleep aborted has `stop_reason` "max_tokens", since it is cut short and Anthropic's list has
no word for that. `signature` of a thinking block is empty: whatever comes back in one is taken.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Text:
    """A piece of a text or thinking block, whose text is in the field of the same name."""

    kind: str
    text: str

    def block(self, text: str) -> dict[str, Any]:
        signature = {"signature": ""} if self.kind == "thinking" else {}
        return {"type": self.kind, self.kind: text, **signature}


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
            continuation.parser = self._parser(continuation)
            events.append({"type": "message_start", "message": self._message([], None, 0)})
        ended = event.finish_reason is not None
        for piece in self._pieces(continuation, event.text, last=ended):
            if isinstance(piece, _Text):
                if self._open != piece.kind:
                    events += [*self._stop(), self._start(piece.block(""))]
                    self._open = piece.kind
                events.append(self._delta({"type": f"{piece.kind}_delta", piece.kind: piece.text}))
            else:
                events += [*self._stop(), self._start(_call_block(piece, {}))]
                self._open = "tool_use"
                events.append(
                    self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
                )
        if ended:
            stopped = _stopped(event, continuation.calls)
            events += self._stop()
            events.append({"type": "message_delta", "delta": stopped, "usage": self._usage()})
            events.append({"type": "message_stop"})
        return events

    def written(self) -> bytes:
        (grown,) = self._continuations
        whole = Continuation(form=grown.form, parser=self._parser(grown))
        blocks: list[tuple[_Text, list[str]] | ToolCall] = []
        for piece in self._pieces(whole, "".join(grown.text), last=True):
            if isinstance(piece, ToolCall):
                blocks.append(piece)
            elif blocks and isinstance(blocks[-1], tuple) and blocks[-1][0].kind == piece.kind:
                blocks[-1][1].append(piece.text)
            else:
                blocks.append((piece, [piece.text]))
        content = [
            _call_block(block, json.loads(block.arguments))
            if isinstance(block, ToolCall)
            else block[0].block("".join(block[1]))
            for block in blocks
        ]
        return to_json(self._message(content, grown.last, whole.calls))

    def keep_alive(self) -> dict[str, Any]:
        return {"type": "ping"}

    def trailer(self) -> None:
        """The last chunk has the usage."""

    def _pieces(
        self, continuation: Continuation, text: str, *, last: bool
    ) -> list[_Text | ToolCall]:
        assert continuation.parser is not None
        reasoning, found = continuation.parser.pieces(text, last=last)
        pieces: list[_Text | ToolCall] = [_Text("thinking", reasoning)] if reasoning else []
        for part in found:
            if isinstance(part, ToolCall):
                wanted = self._wanted([part], continuation.calls)
                continuation.calls += len(wanted)
                pieces += wanted
            elif part:
                pieces.append(_Text("text", part))
        return pieces

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
