"""An answer while it grows: text and counts of its continuations, whatever JSON is made of them."""

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from actors.protocol import MessageForm, TokenEvent, TokenLogprob
from serve_app.openai.message import MessageParser
from serve_app.openai.requests import Ask
from serve_app.openai.tool_calls import ToolCall

_LOGPROB_BYTES = 64  # of one entry, written


class TextOffsets:
    """Where each token begins in the text, though a character may span tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0

    def next(self, token: bytes) -> int:
        offset = self._chars
        self._chars += len(self._decoder.decode(token))
        return offset


@dataclass(slots=True)
class Continuation:
    """One choice as it grows."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: TokenEvent | None = None  # the event with the finish reason
    offsets: TextOffsets = field(default_factory=TextOffsets)
    form: MessageForm | None = None
    parser: MessageParser | None = None  # of a message, once it has begun
    calls: int = 0  # that it had so far
    said: bool = False  # some text, to which more may be added
    apart: bool = False  # a call is between that and what comes


class GrowingAnswer(ABC):
    """What the token events of one request become."""

    # Texts on both sides of a call become one, as if they were lines of it; not where each is a block of its own.
    joins_texts: ClassVar[bool] = False

    def __init__(self, ask: Ask, answer_id: str) -> None:
        self.answer_id = answer_id
        self._ask = ask
        self._continuations = [Continuation() for _ in range(len(ask.prompts) * ask.n)]
        self._prompt_tokens = [0] * len(ask.prompts)
        self._cached_tokens = [0] * len(ask.prompts)
        self._completion_tokens = 0

    @property
    def finished(self) -> bool:
        """True once every continuation has ended."""
        return all(continuation.last is not None for continuation in self._continuations)

    @abstractmethod
    def chunks(self, prompt_index: int, event: TokenEvent) -> Sequence[Mapping[str, Any]]:
        """The stream's objects for one event; often one, none while text is held back."""

    def add(self, prompt_index: int, event: TokenEvent) -> None:
        """Keep an event for `written`."""
        _, continuation = self._count(prompt_index, event)
        continuation.text.append(event.text)
        continuation.logprobs.extend(event.logprobs or ())

    @property
    def text(self) -> str:
        """Of the first continuation."""
        return "".join(self._continuations[0].text)

    @property
    def size(self) -> int:
        """Of `written`, in bytes; roughly, and not counting the likeliest tokens beside each."""
        return sum(
            sum(map(len, continuation.text)) + _LOGPROB_BYTES * len(continuation.logprobs)
            for continuation in self._continuations
        )

    @abstractmethod
    def written(self) -> bytes:
        """The object that answers a request without `stream`, as JSON.

        Any thread may write it, and nobody waits for long for the interpreter's lock meanwhile.
        """

    @abstractmethod
    def keep_alive(self) -> Mapping[str, Any] | None:
        """A chunk that says nothing, or None where a comment is better."""

    @abstractmethod
    def trailer(self) -> Mapping[str, Any] | None:
        """The chunk with the usage, if the client asked for it."""

    def failed(self, body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The stream's last objects, when it ends with this error."""
        return [body]

    def _count(self, prompt_index: int, event: TokenEvent) -> tuple[int, Continuation]:
        index = prompt_index * self._ask.n + event.index
        continuation = self._continuations[index]
        self._prompt_tokens[prompt_index] = event.prompt_tokens
        # A prompt counts once, and later continuations may find what this one left.
        if event.index == 0:
            self._cached_tokens[prompt_index] = event.cached_tokens
        self._completion_tokens += len(event.token_ids)
        continuation.form = continuation.form or event.form
        if event.finish_reason is not None:
            continuation.last = event
        return index, continuation

    def _taken_apart(
        self, continuation: Continuation, text: str
    ) -> tuple[str, list[str | ToolCall]]:
        """What is certain now that this text came: reasoning, and behind it content and calls in their order.

        Calls are those that the client wants: one at most, if it said so.
        """
        if continuation.parser is None:
            form = continuation.form or MessageForm()
            continuation.parser = MessageParser(form, self._ask.tools)
        pieces: list[str | ToolCall] = []
        reasoning, found = continuation.parser.feed(text, last=continuation.last is not None)
        for piece in found:
            if isinstance(piece, ToolCall):
                continuation.apart = continuation.said
                if continuation.calls and not self._ask.parallel_tool_calls:
                    continue
                continuation.calls += 1
                if not self.joins_texts:
                    continuation.said = continuation.apart = False
                pieces.append(piece)
            elif piece:
                pieces.append(f"\n{piece}" if continuation.apart else piece)
                continuation.said, continuation.apart = True, False
        return reasoning, pieces


def to_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
