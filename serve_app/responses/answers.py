"""Token events -> OpenAI's response, as one object or as named events.

A generation that a sleep aborted is `incomplete` because of `max_output_tokens`, since it is cut short and OpenAI's
list has no word for that.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from actors.protocol import FinishReason, TokenEvent
from serve_app.openai.growing import Continuation, GrowingAnswer, to_json
from serve_app.openai.tool_calls import ToolCall
from serve_app.responses.requests import ResponseAsk

Event = dict[str, Any]

# Of a message and of reasoning: its part, and what its events are called.
_PARTS: Mapping[str, tuple[dict[str, Any], str]] = {
    "message": ({"type": "output_text", "text": "", "annotations": []}, "output_text"),
    "reasoning": ({"type": "reasoning_text", "text": ""}, "reasoning_text"),
}
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseAnswer(GrowingAnswer):
    """POST /v1/responses: one continuation of one prompt. What is streamed and what is not grow in the same way."""

    def __init__(self, ask: ResponseAsk, model_id: str, created: int) -> None:
        super().__init__(ask, f"resp_{uuid4().hex}")
        self._head = {
            "id": self.answer_id,
            "object": "response",
            "created_at": created,
            "model": model_id,
            "background": False,
            "previous_response_id": None,
            "truncation": "disabled",
            **ask.told,
        }
        self._told_chars = ask.told_chars
        self._output: list[dict[str, Any]] = []
        self._open: list[str] | None = None  # the text of the last item, if more may come of it
        self._chars = {"reasoning": 0, "all": 0}
        self._told = 0  # events

    def chunks(self, prompt_index: int, event: TokenEvent) -> list[Event]:
        _, continuation = self._count(prompt_index, event)
        events: list[Event] = []
        if continuation.parser is None:
            begun = self._response("in_progress")
            events = [{"type": f"response.{kind}", "response": begun} for kind in _BEGINNINGS]
        events += self._grow(continuation, event.text)
        if event.finish_reason is not None:
            status = _status(event)
            events.append({"type": f"response.{status}", "response": self._response(status)})
        return self._numbered(events)

    @property
    def size(self) -> int:
        return super().size + self._told_chars

    def written(self) -> bytes:
        (continuation,) = self._continuations
        self._grow(continuation, "".join(continuation.text))
        return to_json(self._response(_status(continuation.last)))

    def keep_alive(self) -> None:
        """There is no event that says nothing."""

    def trailer(self) -> None:
        """The last event has the usage."""

    def failed(self, body: Mapping[str, Any]) -> Sequence[Event]:
        error = body["error"]
        told = {name: error[name] for name in ("code", "message", "param")}
        failure = {"code": "server_error", "message": error["message"]}
        failed = {**self._response("failed"), "error": failure}
        return self._numbered(
            [{"type": "error", **told}, {"type": "response.failed", "response": failed}]
        )

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._told
            self._told += 1
        return events

    # --- items ---

    def _grow(self, continuation: Continuation, text: str) -> list[Event]:
        """Put what comes into `_output`, and tell of it."""
        reasoning, pieces = self._taken_apart(continuation, text)
        self._chars["all"] += len(text)
        self._chars["reasoning"] += len(reasoning)
        events = self._text("reasoning", reasoning)
        for piece in pieces:
            if isinstance(piece, ToolCall):
                events += self._call(piece)
            else:
                events += self._text("message", piece)
        if continuation.last is not None:
            events += self._close(_status(continuation.last))
        return events

    def _text(self, kind: str, text: str) -> list[Event]:
        if not text:
            return []
        part, name = _PARTS[kind]
        events: list[Event] = []
        if self._open is None or self._output[-1]["type"] != kind:
            events = self._close()
            role: Event = {"role": "assistant"} if kind == "message" else {"summary": []}
            events.append(self._add(kind, {**role, "content": []}))
            events.append(self._at("content_part.added", part=part))
            self._open = []
        assert self._open is not None
        self._open.append(text)
        logprobs: Event = {"logprobs": []} if kind == "message" else {}
        events.append(self._at(f"{name}.delta", delta=text, **logprobs))
        return events

    def _call(self, call: ToolCall) -> list[Event]:
        named = {"call_id": f"call_{uuid4().hex}", "name": call.name, "arguments": ""}
        events = [*self._close(), self._add("function_call", named)]
        item = self._output[-1]
        where = {"item_id": item["id"], "output_index": len(self._output) - 1}
        item |= {"arguments": call.arguments, "status": "completed"}
        kind = "response.function_call_arguments"
        return [
            *events,
            {"type": f"{kind}.delta", **where, "delta": call.arguments},
            {"type": f"{kind}.done", **where, "arguments": call.arguments},
            self._done(),
        ]

    def _add(self, kind: str, fields: Mapping[str, Any]) -> Event:
        item = {"id": f"{_IDS[kind]}_{uuid4().hex}", "type": kind, "status": "in_progress"}
        self._output.append({**item, **fields})
        index = len(self._output) - 1
        return {
            "type": "response.output_item.added",
            "output_index": index,
            "item": {**item, **fields},
        }

    def _close(self, status: str = "completed") -> list[Event]:
        """The end of the text that is open, if one is."""
        if self._open is None:
            return []
        text, self._open = "".join(self._open), None
        item = self._output[-1]
        empty, name = _PARTS[item["type"]]
        part = {**empty, "text": text}
        item |= {"content": [part], "status": status}
        logprobs: Event = {"logprobs": []} if name == "output_text" else {}
        return [
            self._at(f"{name}.done", text=text, **logprobs),
            self._at("content_part.done", part=part),
            self._done(),
        ]

    def _at(self, kind: str, **fields: Any) -> Event:
        """Of the only part of the last item."""
        index = len(self._output) - 1
        where = {"item_id": self._output[-1]["id"], "output_index": index, "content_index": 0}
        return {"type": f"response.{kind}", **where, **fields}

    def _done(self) -> Event:
        index = len(self._output) - 1
        return {
            "type": "response.output_item.done",
            "output_index": index,
            "item": dict(self._output[-1]),
        }

    # --- the whole ---

    def _response(self, status: str) -> dict[str, Any]:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "output": list(self._output),
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        prompt, answer = sum(self._prompt_tokens), self._completion_tokens
        # By its share of the text: which token is of which part, nobody looks at.
        thought = round(answer * self._chars["reasoning"] / max(1, self._chars["all"]))
        cached = {"cached_tokens": sum(self._cached_tokens), "cache_write_tokens": 0}
        return {
            "input_tokens": prompt,
            "input_tokens_details": cached,
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": prompt + answer,
        }


_BEGINNINGS = ("created", "in_progress")


def _status(last: TokenEvent | None) -> str:
    assert last is not None
    return "completed" if last.finish_reason is FinishReason.STOP else "incomplete"
