"""Token events -> OpenAI's chat completions and completions, streamed or whole.

Beyond OpenAI's fields there is one, vLLM's: `stop_reason` on a choice, when a stop string or a stop
token id ended it. A generation that a sleep aborted has `finish_reason` "length", since it is cut
short and OpenAI's list has no word for that (typed clients refuse vLLM's "abort"), with
`stop_reason` "abort".
"""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

from actors.protocol import FinishReason, TokenEvent, TokenLogprob
from serve_app.schemas import Ask

_FINISH: Mapping[FinishReason, str] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "length",
}
_MIN_LOGPROB = -9999.0  # JSON has no -Infinity; vLLM's value


class _TextOffsets:
    """Where each token begins in the text, though a character may span tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0

    def next(self, token: bytes) -> int:
        offset = self._chars
        self._chars += len(self._decoder.decode(token))
        return offset


@dataclass(slots=True)
class _Continuation:
    """One choice as it grows."""

    begun: bool = False
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: TokenEvent | None = None  # the event with the finish reason
    offsets: _TextOffsets = field(default_factory=_TextOffsets)


class _Answer:
    """What both kinds of answer share. `serve_app.sse.Answer` says what the methods are for."""

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, ask: Ask, model_id: str, created: int, fingerprint: str) -> None:
        self.answer_id = f"{self.prefix}-{uuid4().hex}"
        self._ask = ask
        self._head = {
            "id": self.answer_id,
            "created": created,
            "model": model_id,
            "system_fingerprint": fingerprint,
        }
        self._continuations = [_Continuation() for _ in range(len(ask.prompts) * ask.n)]
        self._prompt_tokens = [0] * len(ask.prompts)
        self._completion_tokens = 0

    @property
    def finished(self) -> bool:
        return all(continuation.last is not None for continuation in self._continuations)

    def chunks(self, prompt_index: int, event: TokenEvent) -> list[dict[str, Any]]:
        index, continuation = self._count(prompt_index, event)
        return [
            self._chunk([{"index": index, **choice, **_stop_reason(event)}])
            for choice in self._deltas(continuation, event)
        ]

    def add(self, prompt_index: int, event: TokenEvent) -> None:
        _, continuation = self._count(prompt_index, event)
        continuation.text.append(event.text)
        continuation.logprobs.extend(event.logprobs or ())

    def whole(self) -> dict[str, Any]:
        choices = [
            {"index": index, **self._choice(continuation), **_stop_reason(continuation.last)}
            for index, continuation in enumerate(self._continuations)
        ]
        head = {**self._head, "object": self.whole_object}
        return {**head, "choices": choices, "usage": self._usage()}

    def keep_alive(self) -> dict[str, Any] | None:
        return self._chunk([]) if self._ask.include_usage else None

    def trailer(self) -> dict[str, Any] | None:
        return {**self._chunk([]), "usage": self._usage()} if self._ask.include_usage else None

    def _count(self, prompt_index: int, event: TokenEvent) -> tuple[int, _Continuation]:
        index = prompt_index * self._ask.n + event.index
        continuation = self._continuations[index]
        self._prompt_tokens[prompt_index] = event.prompt_tokens
        self._completion_tokens += len(event.token_ids)
        if event.finish_reason is not None:
            continuation.last = event
        return index, continuation

    def _chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        return {**chunk, "usage": None} if self._ask.include_usage else chunk

    def _usage(self) -> dict[str, int]:
        prompt, completion = sum(self._prompt_tokens), self._completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _deltas(self, continuation: _Continuation, event: TokenEvent) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _choice(self, continuation: _Continuation) -> dict[str, Any]:
        raise NotImplementedError


class ChatAnswer(_Answer):
    """POST /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _deltas(self, continuation: _Continuation, event: TokenEvent) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if not continuation.begun:
            continuation.begun = True
            role = {"role": "assistant", "content": ""}
            deltas.append({"delta": role, "logprobs": None, "finish_reason": None})
        logprobs = self._logprobs(event.logprobs) if event.logprobs else None
        if event.text or logprobs or event.finish_reason:
            delta = {"content": event.text} if event.text or logprobs else {}
            finish = _finish_reason(event)
            deltas.append({"delta": delta, "logprobs": logprobs, "finish_reason": finish})
        return deltas

    def _choice(self, continuation: _Continuation) -> dict[str, Any]:
        wanted = self._ask.sampling.logprobs is not None
        text = "".join(continuation.text)
        return {
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(continuation.logprobs) if wanted else None,
            "finish_reason": _finish_reason(continuation.last),
        }

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        def shown(entry: TokenLogprob) -> dict[str, Any]:
            logprob = max(entry.logprob, _MIN_LOGPROB)
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

    def _deltas(self, continuation: _Continuation, event: TokenEvent) -> list[dict[str, Any]]:
        if not (event.text or event.logprobs or event.finish_reason):
            return []
        logprobs = self._logprobs(event.logprobs, continuation) if event.logprobs else None
        finish = _finish_reason(event)
        return [{"text": event.text, "logprobs": logprobs, "finish_reason": finish}]

    def _choice(self, continuation: _Continuation) -> dict[str, Any]:
        wanted = self._ask.sampling.logprobs is not None
        return {
            "text": "".join(continuation.text),
            "logprobs": self._logprobs(continuation.logprobs, continuation) if wanted else None,
            "finish_reason": _finish_reason(continuation.last),
        }

    def _logprobs(
        self, entries: Sequence[TokenLogprob], continuation: _Continuation
    ) -> dict[str, Any]:
        tops = self._ask.sampling.logprobs or 0
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [max(entry.logprob, _MIN_LOGPROB) for entry in entries],
            "top_logprobs": [_top_of(entry, tops) for entry in entries],
            "text_offset": [continuation.offsets.next(entry.token_bytes) for entry in entries],
        }


def _top_of(entry: TokenLogprob, tops: int) -> dict[str, float]:
    """The sampled token and the likeliest. Where two have the same text, the first stays."""
    top: dict[str, float] = {}
    for candidate in (entry, *entry.top[:tops]):
        top.setdefault(candidate.token, max(candidate.logprob, _MIN_LOGPROB))
    return top


def _finish_reason(event: TokenEvent | None) -> str | None:
    return None if event is None or event.finish_reason is None else _FINISH[event.finish_reason]


def _stop_reason(event: TokenEvent | None) -> dict[str, str | int]:
    if event is None or event.finish_reason is None:
        return {}
    if event.finish_reason is FinishReason.ABORT:
        return {"stop_reason": "abort"}
    return {} if event.stop_reason is None else {"stop_reason": event.stop_reason}
