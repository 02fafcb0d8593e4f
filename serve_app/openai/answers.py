"""Token events -> OpenAI's chat completions and completions, streamed or whole.

Beyond OpenAI's fields there are two: vLLM's `stop_reason` on a choice, when a stop string or a stop
token id ended it; and DeepSeek's `reasoning_content` beside `content`. A generation that a sleep aborted has `finish_reason` "length", since it is cut
short and OpenAI's list has no word for that (typed clients refuse vLLM's "abort"), with
`stop_reason` "abort".
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from uuid import uuid4

from actors.protocol import FinishReason, TokenEvent, TokenLogprob
from serve_app import __version__
from serve_app.openai.growing import Continuation, GrowingAnswer, to_json
from serve_app.openai.requests import Ask
from serve_app.openai.tool_calls import ToolCall

_FINISH: Mapping[FinishReason, str] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "length",
}
_MIN_LOGPROB = -9999.0  # JSON has no -Infinity; vLLM's value
_AT_A_TIME = 256  # entries of log-probabilities are written in a millisecond or three


class _Answer(GrowingAnswer):
    """What both kinds of OpenAI's answers share."""

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, ask: Ask, model_id: str, created: int) -> None:
        super().__init__(ask, f"{self.prefix}-{uuid4().hex}")
        self._head = {
            "id": self.answer_id,
            "created": created,
            "model": model_id,
            "system_fingerprint": f"sleepserve-{__version__}",
        }

    def chunks(self, prompt_index: int, event: TokenEvent) -> list[dict[str, Any]]:
        index, continuation = self._count(prompt_index, event)
        return [
            self._chunk([{"index": index, **choice, **_stop_reason(event)}])
            for choice in self._deltas(continuation, event)
        ]

    def written(self) -> bytes:
        head = to_json({**self._head, "object": self.whole_object, "usage": self._usage()})
        choices = b",".join(
            self._written_choice(index, continuation)
            for index, continuation in enumerate(self._continuations)
        )
        return head[:-1] + b',"choices":[' + choices + b"]}"

    def _written_choice(self, index: int, continuation: Continuation) -> bytes:
        choice = to_json(
            {"index": index, **self._choice(continuation), **_stop_reason(continuation.last)}
        )
        logprobs = b"null"
        if self._ask.sampling.logprobs is not None:
            logprobs = self._written_logprobs(continuation)
        return choice[:-1] + b',"logprobs":' + logprobs + b"}"

    def _written_logprobs(self, continuation: Continuation) -> bytes:
        """A part at a time: json keeps the interpreter's lock for as long as it writes."""
        entries, lists, others = continuation.logprobs, defaultdict[str, list[bytes]](list), {}
        for begin in range(0, max(1, len(entries)), _AT_A_TIME):
            part = self._logprobs(entries[begin : begin + _AT_A_TIME], continuation)
            for name, value in part.items():
                if isinstance(value, list):
                    lists[name].append(to_json(value)[1:-1])
                else:
                    others[name] = to_json(value)
        whole = {name: b"[" + b",".join(parts) + b"]" for name, parts in lists.items()} | others
        return (
            b"{" + b",".join(to_json(name) + b":" + value for name, value in whole.items()) + b"}"
        )

    def keep_alive(self) -> dict[str, Any] | None:
        return self._chunk([]) if self._ask.include_usage else None

    def trailer(self) -> dict[str, Any] | None:
        return {**self._chunk([]), "usage": self._usage()} if self._ask.include_usage else None

    def _chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        if not self._ask.include_usage:
            return chunk
        return {**chunk, "usage": self._usage() if self._ask.continuous_usage else None}

    def _usage(self) -> dict[str, Any]:
        prompt, completion = sum(self._prompt_tokens), self._completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
        }

    @abstractmethod
    def _deltas(self, continuation: Continuation, event: TokenEvent) -> list[dict[str, Any]]:
        """The choices of a stream's chunks, without their index."""

    @abstractmethod
    def _choice(self, continuation: Continuation) -> dict[str, Any]:
        """All but its log-probabilities."""

    @abstractmethod
    def _logprobs(
        self, entries: Sequence[TokenLogprob], continuation: Continuation
    ) -> dict[str, Any]:
        """Of tokens that come one after the other: lists, and what is the same for all of them."""


class ChatAnswer(_Answer):
    """POST /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    joins_texts = True

    def _deltas(self, continuation: Continuation, event: TokenEvent) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if continuation.parser is None:
            deltas.append({"role": "assistant", "content": ""})
        ended = event.finish_reason is not None
        begun, first_call = len(deltas), continuation.calls
        reasoning, content, calls = self._parts(continuation, event.text)
        if reasoning:
            deltas.append({"reasoning_content": reasoning})
        if content:
            deltas.append({"content": content})
        if calls:
            indexed = [{"index": index, **call} for index, call in enumerate(calls, first_call)]
            deltas.append({"tool_calls": indexed})
        if len(deltas) == begun and (event.logprobs or ended):
            deltas.append({"content": ""} if event.logprobs else {})
        choices: list[dict[str, Any]] = [
            {"delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if event.logprobs:  # the text of some of them may be held back, and come later
            choices[begun]["logprobs"] = self._logprobs(event.logprobs, continuation)
        if ended:
            choices[-1]["finish_reason"] = _finish_reason(event, continuation.calls > 0)
        return choices

    def _choice(self, continuation: Continuation) -> dict[str, Any]:
        reasoning, content, calls = self._parts(continuation, "".join(continuation.text))
        nothing_else = not (reasoning or calls)
        told = content if content or nothing_else else None
        message = {"role": "assistant", "content": told, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        return {
            "message": {**message, "tool_calls": calls} if calls else message,
            "finish_reason": _finish_reason(continuation.last, bool(calls)),
        }

    def _parts(
        self, continuation: Continuation, text: str
    ) -> tuple[str, str, list[dict[str, Any]]]:
        """Reasoning, content and calls."""
        reasoning, pieces = self._taken_apart(continuation, text)
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [_shown_call(piece) for piece in pieces if isinstance(piece, ToolCall)]
        return reasoning, content, calls

    def _logprobs(
        self, entries: Sequence[TokenLogprob], continuation: Continuation
    ) -> dict[str, Any]:
        def shown(entry: TokenLogprob) -> dict[str, Any]:
            logprob = _sendable(entry)
            return {"token": entry.token, "logprob": logprob, "bytes": list(entry.token_bytes)}

        tops = self._ask.sampling.logprobs or 0
        content = [
            {**shown(entry), "top_logprobs": [shown(top) for top in entry.top[:tops]]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}


class CompletionAnswer(_Answer):
    """POST /v1/completions."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _deltas(self, continuation: Continuation, event: TokenEvent) -> list[dict[str, Any]]:
        if not (event.text or event.logprobs or event.finish_reason):
            return []
        logprobs = self._logprobs(event.logprobs, continuation) if event.logprobs else None
        finish = _finish_reason(event)
        return [{"text": event.text, "logprobs": logprobs, "finish_reason": finish}]

    def _choice(self, continuation: Continuation) -> dict[str, Any]:
        return {
            "text": "".join(continuation.text),
            "finish_reason": _finish_reason(continuation.last),
        }

    def _logprobs(
        self, entries: Sequence[TokenLogprob], continuation: Continuation
    ) -> dict[str, Any]:
        tops = self._ask.sampling.logprobs or 0
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [_sendable(entry) for entry in entries],
            "top_logprobs": [_top_of(entry, tops) for entry in entries],
            "text_offset": [
                continuation.offsets.next(entry.token_bytes[entry.unwritten :]) for entry in entries
            ],
        }


def _top_of(entry: TokenLogprob, tops: int) -> dict[str, float | None] | None:
    """The token itself and the likeliest; None for the first of a prompt.

    Where two have the same text, the first stays.
    """
    if entry.logprob is None:
        return None
    top: dict[str, float | None] = {}
    for candidate in (entry, *entry.top[:tops]):
        top.setdefault(candidate.token, _sendable(candidate))
    return top


def _sendable(entry: TokenLogprob) -> float | None:
    return None if entry.logprob is None else max(entry.logprob, _MIN_LOGPROB)


def _shown_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid4().hex}", "type": "function", "function": function}


def _finish_reason(event: TokenEvent | None, called: bool = False) -> str | None:
    if event is None or event.finish_reason is None:
        return None
    if called and event.finish_reason is FinishReason.STOP:
        return "tool_calls"
    return _FINISH[event.finish_reason]


def _stop_reason(event: TokenEvent | None) -> dict[str, str | int]:
    if event is None or event.finish_reason is None:
        return {}
    if event.finish_reason is FinishReason.ABORT:
        return {"stop_reason": "abort"}
    return {} if event.stop_reason is None else {"stop_reason": event.stop_reason}
