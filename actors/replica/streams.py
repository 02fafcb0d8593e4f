"""From the engine's steps to the requests: tokens gather per request, and go up paced under load."""

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from actors.engine.outputs import EngineOutput
from actors.errors import ServingError
from actors.observer import Ending, EngineMeter
from actors.protocol import (
    ChatPrompt,
    FinishReason,
    GenerateRequest,
    MessageForm,
    TokenEvent,
)
from actors.text.output import OutputAssembler, StopStrings
from actors.text.sampling_defaults import ResolvedSampling
from actors.worker.messages import NewRequest

if TYPE_CHECKING:
    from actors.text.codec import TextCodec  # transformers comes in with it

_WORTH_A_TIMER_S = 0.001
_MAX_LOGPROBS = 512  # of one event


class Sequences(Protocol):
    """Where sequences are generated; `deliver` is told of their tokens."""

    def submit(self, request: NewRequest) -> None:
        """Raises ReplicaFailed if nothing is generated there any more."""

    def cancel(self, sequence_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that passed every check and can be generated, by one worker or by the next."""

    request: GenerateRequest
    prompt_ids: tuple[int, ...]
    params: ResolvedSampling
    seeds: tuple[int, ...]  # one per continuation
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None
    form: MessageForm | None  # of a chat
    arrived_s: float  # of `time.perf_counter`


def pieces(event: TokenEvent) -> Iterator[TokenEvent]:
    """The same in events of which each fits a message.

    Ray Serve takes 4 MiB by default (2.60), and a token with the 20 likeliest beside it has 1 kB.
    """
    count = len(event.logprobs or ())
    if event.logprobs is None or count <= _MAX_LOGPROBS:
        yield event
        return
    for begin in range(0, count, _MAX_LOGPROBS):
        end = begin + _MAX_LOGPROBS
        is_first, is_last = begin == 0, end >= count
        yield replace(
            event,
            text=event.text if is_first else "",
            token_ids=event.token_ids[begin:end],
            logprobs=event.logprobs[begin:end],
            form=event.form if is_first else None,
            finish_reason=event.finish_reason if is_last else None,
            stop_reason=event.stop_reason if is_last else None,
        )


@dataclass(slots=True)
class RequestStream:
    """The continuations of one request, between engine and client. Lives on the event loop."""

    assemblers: list[OutputAssembler]
    sequence_ids: list[str]
    stop_token_ids: tuple[int, ...]  # the request's own, which the client is told about
    error: Exception | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)  # something to take, or the end
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # finished or failed
    cut: asyncio.Event = field(default_factory=asyncio.Event)  # failed or aborted
    _paced_s: float = -math.inf  # of the loop's clock
    _pause: asyncio.Future[None] | None = None

    @property
    def has_begun(self) -> bool:
        """Something has gone up."""
        return self._paced_s > -math.inf

    @property
    def is_delivered(self) -> bool:
        """Every continuation's last event has been taken."""
        return all(assembler.final_event_sent for assembler in self.assemblers)

    def take(self) -> list[TokenEvent]:
        """What is new, at most one event per continuation."""
        self.arrived.clear()
        events = (assembler.take() for assembler in self.assemblers)
        return [event for event in events if event is not None]

    async def pace(self, interval_s: float) -> None:
        """Return `interval_s` behind the last return at the earliest, or when the last token is there."""
        loop = asyncio.get_running_loop()
        begins_s = self._paced_s + interval_s
        if begins_s - loop.time() > _WORTH_A_TIMER_S and not self.settled.is_set():
            self._pause = loop.create_future()
            timer = loop.call_at(begins_s, self._go_on)
            try:
                await self._pause
            finally:
                timer.cancel()
                self._pause = None
        self._paced_s = loop.time()

    def _go_on(self) -> None:
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    def _settle(self) -> None:
        self.settled.set()
        self._go_on()

    def advanced(self, index: int) -> None:
        """Continuation `index` has got something new."""
        self.arrived.set()
        if self.assemblers[index].is_finished and all(each.is_finished for each in self.assemblers):
            self._settle()

    def fail(self, error: Exception) -> None:
        """End it with `error`, unless its end has been told already."""
        if self.is_delivered or self.error is not None:
            return
        self.error = error
        self.cut.set()
        self._settle()
        self.arrived.set()


class OpenStreams:
    """The requests that a worker works on. Lives on the event loop.

    A step's outputs are only filed here, in a microsecond each: what a client does not need at once is made
    when it is taken.
    """

    def __init__(self, engine: Sequences, codec: "TextCodec", meter: EngineMeter) -> None:
        self._engine = engine
        self._codec = codec
        self._meter = meter
        self._continuations: dict[str, tuple[RequestStream, int]] = {}  # by sequence id
        self._without_token: set[str] = set()  # of these
        self._due: set[str] = set()  # of these, whose next token `_advanced` waits for
        self._advanced: Callable[[], None] | None = None
        self.has_finished = False  # at least one, with all its tokens
        self._ids = itertools.count()

    def __len__(self) -> int:
        """How many continuations are open."""
        return len(self._continuations)

    @property
    def all_have_tokens(self) -> bool:
        """Whether nobody waits for a first token."""
        return not self._without_token

    def when_advanced(self, advanced: Callable[[], None]) -> None:
        """Call that once every continuation that is open now has got its next token, or is open no more.

        If none is open, the next one that is counts. Of two such calls the last one holds.
        """
        self._due, self._advanced = set(self._continuations), advanced

    def open(self, prepared: Prepared) -> RequestStream:
        """Give a request to the worker; whoever opens a stream closes it.

        Raises:
            ReplicaFailed: the worker serves no more.
        """
        params = prepared.params
        prompt = prepared.request.prompt
        begins = isinstance(prompt, ChatPrompt) and not prompt.continues  # a message of its own
        stream = RequestStream(
            assemblers=[
                OutputAssembler(
                    self._codec.stream(() if begins else prepared.prompt_ids),
                    index=i,
                    prompt_tokens=len(prepared.prompt_ids),
                    stops=prepared.stop_strings,
                    min_tokens=params.min_tokens,
                    form=prepared.form,
                )
                for i in range(len(prepared.seeds))
            ],
            stop_token_ids=params.stop_token_ids,
            # The worker's log names them. Numbered: a request id that came twice would end the generation loop.
            sequence_ids=[
                f"{prepared.request.request_id}-{next(self._ids)}" for _ in prepared.seeds
            ],
        )
        seeds = dict(zip(stream.sequence_ids, prepared.seeds, strict=True))
        self._engine.submit(NewRequest(seeds, prepared.prompt_ids, params, prepared.stop_ids))
        for i, sequence_id in enumerate(stream.sequence_ids):
            self._continuations[sequence_id] = (stream, i)
            self._meter.submitted(sequence_id, len(prepared.prompt_ids), prepared.arrived_s)
        self._without_token.update(stream.sequence_ids)
        if self._advanced is not None and not self._due:
            self._due.update(stream.sequence_ids)
        return stream

    def close(self, stream: RequestStream) -> None:
        """Forget a stream; what is not done of it is cancelled."""
        for sequence_id, assembler in zip(stream.sequence_ids, stream.assemblers, strict=True):
            if self._continuations.pop(sequence_id, None) and not assembler.is_finished:
                self._engine.cancel(sequence_id)
            self._meter.ended(sequence_id, Ending.ABORT if stream.error is None else Ending.ERROR)
            self._has_advanced(sequence_id)

    def abort_all(self) -> None:
        """End every continuation where it is, with the finish reason "abort"."""
        for sequence_id, (stream, index) in list(self._continuations.items()):
            stream.cut.set()
            if not stream.assemblers[index].is_finished:
                self._engine.cancel(sequence_id)
                stream.assemblers[index].push((), finish=FinishReason.ABORT)
                self._meter.ended(sequence_id, Ending.ABORT)
                stream.advanced(index)

    def fail_all(self, error: ServingError) -> None:
        """Every stream that has not ended raises `error`."""
        for stream, _ in list(self._continuations.values()):
            stream.fail(error)

    def deliver(self, outputs: Sequence[EngineOutput]) -> None:
        """File a step's outputs: first tokens first, as those whom they wake run in this order.

        An event takes this loop some 0.2 ms, and a step has one for each of many streams.
        """
        self._meter.advanced(outputs)
        found = [
            (output, *self._continuations[output.sequence_id])
            for output in outputs
            if output.sequence_id in self._continuations  # others were cancelled a moment ago
        ]
        found.sort(key=lambda each: each[1].has_begun)
        for output, stream, index in found:
            self._has_advanced(output.sequence_id)
            if output.error is not None:
                stream.fail(output.error)
            elif not stream.assemblers[index].is_finished:
                self._push_output(stream, index, output)

    def _has_advanced(self, sequence_id: str) -> None:
        """It has got something, or gets nothing more."""
        self._without_token.discard(sequence_id)
        if sequence_id not in self._due:
            return
        self._due.remove(sequence_id)
        if not self._due and self._advanced is not None:
            advanced, self._advanced = self._advanced, None
            advanced()

    def _push_output(self, stream: RequestStream, index: int, output: EngineOutput) -> None:
        logprobs = None
        if output.logprobs is not None:
            logprobs = [
                self._codec.token_logprob(raw.token_id, raw.logprob, raw.top)
                for raw in output.logprobs
            ]
        told = output.stop_token_id if output.stop_token_id in stream.stop_token_ids else None
        assembler = stream.assemblers[index]
        if output.cached_tokens is not None:
            assembler.cached_tokens = output.cached_tokens
        assembler.push(output.token_ids, logprobs, output.finish, told)
        if assembler.finish is not None:
            self.has_finished = True
            if output.finish is None:  # a stop string: the engine knows nothing of it
                self._engine.cancel(output.sequence_id)
            self._meter.ended(output.sequence_id, Ending(assembler.finish))
        stream.advanced(index)
