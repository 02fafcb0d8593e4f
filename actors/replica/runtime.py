"""ModelRuntime: a replica's half of one model: prompts and text, streams, and what its worker is told.

Implements the effects of the lifecycle (sleep and wake) and generates for requests. Holds no memory of a
device and computes nothing: its worker does, in another process as a rule.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from actors.errors import ReplicaFailed, ServingError, Unavailable
from actors.observer import EngineMeter, Observer, WakePhase
from actors.protocol import (
    ChatPrompt,
    FinishReason,
    GenerateRequest,
    MemoryChange,
    TokenEvent,
    TokenLogprob,
)
from actors.replica.streams import OpenStreams, Prepared, RequestStream, pieces
from actors.replica.worker_client import WorkerClient
from actors.text.forced_calls import forced_call
from actors.text.output import StopStrings
from actors.text.sampling_defaults import ResolvedSampling, resolve
from actors.text.validation import check_request

if TYPE_CHECKING:
    from actors.text.codec import TextCodec  # transformers comes in with it

# Log-probabilities of a prompt that are made for an answer in a row: some 2 ms of the event loop.
_LOGPROBS_AT_ONCE = 64


class ModelRuntime:
    """One model with one worker, for as long as that lives. Starts asleep; `wake` before the first `generate`.

    Attributes:
        worker: what computes. Its `failed` tells why this runtime can serve no more.
        codec: of the checkpoint.
    """

    def __init__(
        self,
        worker: WorkerClient,
        codec: "TextCodec",
        observer: Observer,
        defaults: ResolvedSampling,
        max_events_per_s: float,
    ) -> None:
        """Make one, on the event loop of its requests.

        Args:
            worker: ready.
            observer: told what happens.
            defaults: of what a request does not name (`sampling_defaults`).
            max_events_per_s: streamed events that go up at most; above it, tokens are coalesced.
        """
        self.worker = worker
        self.codec = codec
        self._observer = observer
        self._defaults = defaults
        self._max_events_per_s = max_events_per_s
        self._verified = asyncio.Event()  # the bytes of the last wake are what was packed
        self._streams = OpenStreams(worker, codec, EngineMeter(observer))
        worker.outputs = self._streams.deliver
        worker.settled = self._verified.set
        worker.failed.add_done_callback(lambda failed: self.fail_in_flight(failed.result()))

    @property
    def has_answered(self) -> bool:
        """Whether a request has come to its end here."""
        return self._streams.has_finished

    @property
    def has_requests(self) -> bool:
        """Whether the worker has sequences, running or frozen, that somebody waits for."""
        return len(self._streams) > 0

    @property
    def first_tokens_are_due(self) -> bool:
        """Whether somebody waits for a first token of such a sequence."""
        return not self._streams.all_have_tokens

    def when_advanced(self, advanced: Callable[[], None]) -> None:
        """See OpenStreams."""
        self._streams.when_advanced(advanced)

    def check_health(self) -> None:
        """Raises ReplicaFailed if the worker can serve no more."""
        self.worker.check_alive()

    def prepare(self, request: GenerateRequest) -> Prepared:
        """Tokenise and check a request, and give it the model's defaults for what it does not name.

        Needs no weights, so a bad request wakes nobody.

        Any thread may call it. A grammar is for `check_grammar`.

        Raises:
            InvalidRequest: naming the field.
        """
        arrived_s = time.perf_counter()
        prompt = request.prompt
        prompt_ids = self.codec.encode_prompt(
            prompt,
            add_special_tokens=request.add_special_tokens,
            max_tokens=self.worker.facts.max_model_len,
        )
        facts = self.worker.facts
        form = None
        sampling = request.sampling
        if request.is_echo_alone:
            sampling = replace(sampling, max_tokens=1)  # the engine's least; it goes to nobody
        if isinstance(prompt, ChatPrompt):
            form = self.codec.message_form(prompt, prompt_ids)
            if prompt.must_call:
                sampling = replace(sampling, grammar=forced_call(form, prompt))
            elif sampling.grammar is not None:
                # It leaves no room to reason, whatever the prompt ends with.
                form = replace(form, in_reasoning=False)
        params = resolve(sampling, self._defaults, facts.max_model_len - len(prompt_ids))
        check_request(params, prompt_ids, facts.vocab_size, facts.max_model_len)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids)
        if params.grammar is not None or not params.ignore_eos:
            stop_ids |= self.codec.eos_ids
        stop_strings = StopStrings(params.stop) if params.stop else None
        seeds = tuple(_wrap_int64(seed + i) for i in range(request.n))
        return Prepared(request, prompt_ids, params, seeds, stop_ids, stop_strings, form, arrived_s)

    async def check_grammar(self, prepared: Prepared) -> None:
        """Have the worker compile a request's grammar, if it has one. Needs no weights.

        Where a sleep has ended the worker, the next one does, with the request: then it wakes for a bad one, too.

        Raises:
            InvalidRequest: it is no valid one, or too much work; naming the field.
            Unavailable: too many are being compiled.
        """
        if prepared.params.grammar is None:
            return
        try:
            await self.worker.check_grammar(prepared.params.grammar)
        except ReplicaFailed:
            if not self.worker.has_retired:
                raise

    async def generate(self, prepared: Prepared) -> AsyncIterator[TokenEvent]:
        """Events of all continuations, as they come; closing the iterator cancels the rest.

        None leaves before the bytes of the last wake have been checked.

        The first token goes up at once, of a request without `stream` only that there is one. Later ones
        are coalesced when this replica sends more events a second than `max_events_per_s`, because one
        event costs the proxies the same however many tokens it carries.

        Raises:
            ReplicaFailed: the generation loop ended underneath, or the weights are corrupted.
            DeviceMemoryShort: other processes left too little memory for a step.
            InvalidRequest: the grammar turned out to be too much work, or a dead end.
            ContextLengthExceeded: this worker has room for less than the one that it was prepared for.
        """
        self.check_health()
        self._check_room(prepared)
        stream = self._streams.open(prepared)
        try:
            if prepared.request.echo:
                logprobs = await self._prompt_logprobs(prepared, stream)
                for index in range(prepared.request.n):
                    for piece in pieces(self._echo(prepared, index, logprobs)):
                        yield piece
            if not prepared.request.stream:
                await self._until_told(stream)
                if not stream.settled.is_set():
                    # Whoever asked learns that it has begun.
                    yield TokenEvent(0, "", (), len(prepared.prompt_ids))
                    await stream.settled.wait()
            while True:
                await stream.arrived.wait()
                await stream.pace(len(self._streams) / self._max_events_per_s)
                await self._until_told(stream)
                for event in stream.take():
                    if prepared.request.is_echo_alone:
                        event = _without_output(event)
                    for piece in pieces(event):
                        yield piece
                if stream.is_delivered:
                    return
        finally:
            self._streams.close(stream)

    def _check_room(self, prepared: Prepared) -> None:
        """The card may have had more to give when the worker before this one started."""
        facts = self.worker.facts
        # As the client has it, who may have named none: our default follows the room.
        asked = prepared.request.sampling.max_tokens or None
        if len(prepared.prompt_ids) + (asked or 1) > facts.max_model_len:
            params = replace(prepared.params, max_tokens=asked)
            check_request(params, prepared.prompt_ids, facts.vocab_size, facts.max_model_len)

    async def _until_told(self, stream: RequestStream) -> None:
        """Wait for something that may be sent; raises what the stream failed with."""
        await stream.arrived.wait()
        await self._verified.wait()
        if stream.error is not None:
            raise stream.error

    def abort_in_flight(self) -> None:
        self._streams.abort_all()

    def fail_in_flight(self, error: ServingError) -> None:
        self._streams.fail_all(error)
        self._verified.set()  # nobody is left to whom something unchecked could go

    async def wake(self) -> MemoryChange:
        """See Effects."""
        self._verified.clear()
        try:
            woke = await self.worker.wake()
        except Unavailable:
            self._verified.set()  # nothing was computed since the last check: what frozen ones have may go
            raise
        if woke.resume_s is not None:
            self._observer.wake_phase(WakePhase.RESUME, woke.resume_s)
        if woke.image_s is not None:
            self._observer.wake_phase(WakePhase.IMAGE, woke.image_s)
        self._observer.wake_phase(WakePhase.MAP, woke.map_s)
        return woke.change

    def resumed(self, seconds: float) -> None:
        """So long it took to have this worker, in the place of one that a sleep had ended."""
        self._observer.wake_phase(WakePhase.RESUME, seconds)

    async def sleep(self, level: int, deep: bool = False) -> MemoryChange:
        """See Effects."""
        return await self.worker.sleep(level, deep)

    async def settled(self) -> None:
        """Return once the bytes of the last wake are there and checked, and all KV cache is mapped.

        What other processes have taken meanwhile of its memory is not waited for.

        Raises:
            ReplicaFailed: the bytes are not what was packed, or the worker failed otherwise.
        """
        await self.worker.settle()

    async def compiled(self) -> None:
        """Return once nothing is compiled any more, and what was is in use.

        Raises:
            ReplicaFailed: the worker failed meanwhile.
        """
        await self.worker.finish_compiling()

    async def close(self) -> None:
        """Stop the worker. The runtime is of no use afterwards. Idempotent."""
        await self.worker.stop()

    def _echo(
        self, prepared: Prepared, index: int, logprobs: tuple[TokenLogprob, ...] | None
    ) -> TokenEvent:
        prompt = prepared.request.prompt
        text = prompt if isinstance(prompt, str) else self.codec.decode(prepared.prompt_ids)
        return TokenEvent(index, text, (), len(prepared.prompt_ids), logprobs=logprobs)

    async def _prompt_logprobs(
        self, prepared: Prepared, stream: RequestStream
    ) -> tuple[TokenLogprob, ...] | None:
        """One per token of the prompt, if the request wants any.

        The engine only computes the logits that it samples from, so these are forwards of their own.

        Raises:
            Unavailable: aborted meanwhile, so that there is nothing to answer; or no memory for them.
        """
        top = prepared.params.logprobs
        if top is None:
            return None
        ids = prepared.prompt_ids
        work = asyncio.create_task(self.worker.score(ids, top))
        cut = asyncio.create_task(stream.cut.wait())
        try:
            await asyncio.wait({work, cut}, return_when=asyncio.FIRST_COMPLETED)
            if stream.error is not None:
                raise stream.error
            if not work.done():
                raise Unavailable("aborted before the prompt's log-probabilities were computed")
            found = work.result()
        finally:
            work.cancel()
            cut.cancel()
            await asyncio.gather(work, cut, return_exceptions=True)
        request = prepared.request
        unwritten = self.codec.unwritten(request.prompt, ids, request.add_special_tokens)
        told: list[TokenLogprob] = []
        for token_id, raw, without in zip(ids, found, unwritten, strict=True):
            told.append(
                self.codec.token_logprob(token_id, None, unwritten=without)
                if raw is None
                else self.codec.token_logprob(raw.token_id, raw.logprob, raw.top, without)
            )
            if len(told) % _LOGPROBS_AT_ONCE == 0:
                await asyncio.sleep(0)  # tokens of others go out in between
        return tuple(told)


def _without_output(event: TokenEvent) -> TokenEvent:
    """What is left where no token was asked for: the end, at the limit whatever the token was."""
    finish = event.finish_reason
    if finish is FinishReason.STOP:
        finish = FinishReason.LENGTH
    return replace(
        event, text="", token_ids=(), logprobs=None, finish_reason=finish, stop_reason=None
    )


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
