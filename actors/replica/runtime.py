"""ModelRuntime: one model's memory and engine, put together.

Implements the effects of the lifecycle (sleep and wake) and generates for requests. What pauses, maps or
copies is handed to one control thread (`residency`); tokens come from the engine's own thread to the
event loop in one hop per step.
"""

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from transformers import PreTrainedModel

from actors.engine.config import EngineConfig
from actors.engine.engine import EngineStats, TransformersEngine
from actors.engine.model.architectures import check_architecture
from actors.engine.model.cards import card_problem
from actors.engine.model.scoring import PromptScoring
from actors.engine.sampling.grammar import GrammarCompiler
from actors.engine.sampling.sampler import SequenceSampling
from actors.errors import EngineDied, ReplicaFailed, ServingError, Unavailable
from actors.image import packer
from actors.image.attach import build_on_meta
from actors.image.image import WeightImage
from actors.image.layout import ImageKey
from actors.memory.transfer import TransferStats
from actors.observer import EngineMeter, Observer, WakePhase
from actors.protocol import (
    ChatPrompt,
    GenerateRequest,
    MemoryChange,
    TokenEvent,
    TokenLogprob,
)
from actors.replica.lifecycle import SleepConfig
from actors.replica.streams import OpenStreams, Prepared, RequestStream, pieces
from actors.text.codec import TextCodec
from actors.text.message_form import ChatConfig
from actors.text.sampling_defaults import ResolvedSampling, resolve
from actors.threads import ControlThread, call_unless_closed
from actors.worker.compilation import BackgroundCompilation
from actors.worker.model_memory import ModelMemory
from actors.worker.residency import Residency
from actors.worker.watchdog import Watchdog, WatchdogConfig

if TYPE_CHECKING:
    from actors.image.obtain import FastLoad

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SWITCH_INTERVAL_S = 3e-4
_CLOSE_TIMEOUT_S = 30.0


class ModelRuntime:
    """One model in one process. Starts asleep; `wake` before the first `generate`.

    Attributes:
        memory: weights and KV cache. To be read; only this runtime's control thread moves it.
        failed: why this runtime can serve no more, as soon as that is so. Its callbacks run on any thread.
        hung: the same, if it is that something never ended. Nothing is waited for any more then, and only
            the end of the process gives back what it holds.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        checkpoint: Path,
        image: WeightImage,
        reload_image: Callable[[], Awaitable[WeightImage]],
        release_image: Callable[[ImageKey], Awaitable[None]],
        engine: EngineConfig,
        sleep: SleepConfig,
        chat: ChatConfig | None = None,
        observer: Observer | None = None,
        defaults: ResolvedSampling | None = None,
        watchdog: WatchdogConfig | None = None,
    ) -> None:
        """Build memory and engine. Blocks for a while: call it on a thread.

        Args:
            module: from `build_module`; becomes this runtime's own.
            reload_image: gets the image again after a level 2 sleep dropped it.
            release_image: told when a level 2 sleep drops it.
            chat: how its messages are written, where the chat template does not show it.
            observer: told what happens.
            defaults: of what a request does not name (`sampling_defaults`); OpenAI's when None.
            watchdog: how long the device may take; the defaults when None.

        Raises:
            ValueError: the configuration cannot work for this model.
            LayoutMismatch: image and architecture disagree.
        """
        self.codec = TextCodec.load(checkpoint, chat)
        self._defaults = defaults or ResolvedSampling()
        self._grammars = GrammarCompiler(self.codec)
        self._module = module
        self.memory = ModelMemory(module, image, sleep.keep_layers, engine.device)
        # Beside a GPU, what little is done here takes longer shared out among threads than alone. Before any
        # thread of the engine starts: one goes by what it finds then, and runs compiled layers only with as
        # many as they were compiled with.
        threads = engine.cpu_threads or (None if self.memory.device.type == "cpu" else 1)
        if threads is not None:
            torch.set_num_threads(threads)
        # Most calls of the engine's thread into torch give up Python's lock, and to get it back from a busy
        # event loop takes this long: 5 ms by default, as long as a step, and hundreds of times in a prefill.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._reload_image = reload_image
        self._release_image = release_image
        self._max_events_per_s = engine.max_events_per_s
        self.failed: Future[ReplicaFailed] = Future()
        self.hung: Future[ReplicaFailed] = Future()
        self._closed = False
        self._verified = asyncio.Event()  # the bytes of the last wake are what was packed
        self._watchdog = Watchdog(watchdog or WatchdogConfig(), self._hangs)
        self._observer = observer or Observer()
        self._control = ControlThread(self._watchdog.control)
        self._tell: Callable[[Callable[[], None]], None] = _nobody_yet
        self._engine = self._control.submit(self._build_engine, module, engine).result()
        self._streams = OpenStreams(self._engine, self.codec, EngineMeter(self._observer))
        self._tell = self._streams.on_loop
        self._residency = Residency(
            self._engine,
            self.memory,
            self._observer,
            self._control,
            self._something_went_wrong,
            self._watchdog,
        )
        self._scoring = PromptScoring(
            self.with_model,
            self.memory.spare_bytes,
            self._control,
            self._watchdog.prompt,
            self._is_busy,
            self._something_went_wrong,
        )
        try:
            # Now, not in the first wake: that may be for a burst, and the replica kept asleep for it.
            self._control.submit(self.memory.open_link).result()
            self._control.submit(self._residency.warm_up).result()
        except BaseException:
            self._watchdog.close()
            self._control.submit(self._engine.stop)  # its thread would keep the process from ending
            raise
        self._compilation = BackgroundCompilation(
            self._engine,
            self._residency.begin_trimming,
            self._residency.begin_using_compiled,
            self._watchdog.compile,
        )

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def weights_bytes(self) -> int:
        """Size of the packed image."""
        return self.memory.weights_bytes

    @property
    def mapped_bytes(self) -> int:
        return self.memory.mapped_bytes

    @property
    def kv_bytes(self) -> int:
        return self.memory.kv_bytes

    @property
    def image_origin(self) -> str:
        """Where the image came from, "" while it is released."""
        return self.memory.image.origin if self.memory.image is not None else ""

    @property
    def last_transfer(self) -> TransferStats | None:
        """Of the last settled wake."""
        return self.memory.last_transfer

    def engine_stats(self) -> EngineStats:
        return self._engine.stats()

    def check_health(self) -> None:
        """Raises ReplicaFailed if something went wrong that this process does not recover from."""
        if self.failed.done():
            raise self.failed.result()
        self._engine.check_health()

    def prepare(self, request: GenerateRequest) -> Prepared:
        """Tokenise and check a request, and give it the model's defaults for what it does not name.

        Needs no weights, so a bad request wakes nobody.

        Any thread may call it. A new grammar takes milliseconds, in bad cases seconds, so a request with
        one is not for the event loop.

        Raises:
            InvalidRequest: naming the field.
            Unavailable: too many grammars are being compiled.
        """
        arrived_s = time.perf_counter()
        prompt = request.prompt
        prompt_ids = self.codec.encode_prompt(
            prompt,
            add_special_tokens=request.add_special_tokens,
            max_tokens=self.max_model_len,
        )
        params = resolve(request.sampling, self._defaults, self.max_model_len - len(prompt_ids))
        self._engine.check(params, prompt_ids)
        request = replace(request, sampling=params)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stops = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos and params.grammar is None else self.codec.eos_ids
        )
        sequences = tuple(
            SequenceSampling(params, prompt_ids, _wrap_int64(seed + i), stops)
            for i in range(request.n)
        )
        if params.grammar is not None:
            grammar = self._grammars.compile(params.grammar)
            for sequence in sequences:
                sequence.grammar = grammar.fork()
        form = None
        if isinstance(prompt, ChatPrompt):
            form = self.codec.message_form(prompt, prompt_ids)
            if params.grammar is not None:
                # It leaves no room to reason, whatever the prompt ends with.
                form = replace(form, in_reasoning=False)
        return Prepared(request, prompt_ids, sequences, form, arrived_s)

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
        """
        self.check_health()
        with self._compilation.serving():
            stream = self._streams.open(prepared)
            try:
                if prepared.request.echo:
                    logprobs = await self._prompt_logprobs(prepared, stream)
                    for index in range(len(prepared.sequences)):
                        for piece in pieces(self._echo(prepared, index, logprobs)):
                            yield piece
                if not prepared.request.stream:
                    await self._until_told(stream)
                    if not stream.settled.is_set():
                        # Whoever asked learns that it has begun.
                        yield TokenEvent(0, "", (), len(prepared.prompt_ids))
                        await stream.settled.wait()
                while True:
                    await self._until_told(stream)
                    events = stream.take()
                    for event in events:
                        for piece in pieces(event):
                            yield piece
                    if stream.is_delivered:
                        return
                    if events:
                        await stream.pace(len(self._streams) / self._max_events_per_s)
            finally:
                self._streams.close(stream)

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
        started_s = time.perf_counter()
        if self.memory.image is None:
            await self._on_control(self.memory.take_image, await self._reload_image())
            reloaded_s = time.perf_counter()
            self._observer.wake_phase(WakePhase.IMAGE, reloaded_s - started_s)
            started_s = reloaded_s
        self._verified.clear()
        try:
            change = await self._on_control(self._residency.wake)
        except Unavailable:
            self._verified.set()  # nothing was computed since the last check: what frozen ones have may go
            raise
        self._scoring.awake.set()
        self._observer.wake_phase(WakePhase.MAP, time.perf_counter() - started_s)
        loop = asyncio.get_running_loop()

        def settled(checked: Future[None]) -> None:
            if checked.exception() is None:
                # Bytes that are wrong have failed all streams before this is told.
                call_unless_closed(loop, self._verified.set)

        self._residency.begin_settling().add_done_callback(settled)
        return change

    async def sleep(self, level: int) -> MemoryChange:
        self._scoring.awake.clear()
        change = await self._on_control(self._sleep, level)
        if level == 2:
            key = await self._on_control(self._residency.drop_image)
            if key is not None:
                await self._release_image(key)
        return change

    async def settled(self) -> None:
        """Return once the bytes of the last wake are there and checked, and all KV cache is mapped.

        What other processes have taken meanwhile of its memory is not waited for.

        Raises:
            EngineDied: something hung. Other failures: see `check_health`.
        """
        await self._on_control(lambda: None)  # whatever was to do stands before this
        while self._residency.grows:
            await self._on_control(lambda: None)  # behind the next part

    async def compiled(self) -> None:
        """Return once nothing is compiled any more, and what was is in use."""
        await asyncio.to_thread(self._compilation.join)
        await self.settled()

    async def with_model(self, work: Callable[[PreTrainedModel], T]) -> T:
        """What `work` makes of the awake module, between two steps of the engine.

        It runs on the control thread, so that no sleep comes in between, and finds the bytes of the
        last wake there and checked. Layers that are being compiled are waited for. A replica that failed
        that check can be looked at, too; see `check_health`. Requests in flight go on afterwards. `work`
        leaves the module as it found it; the attention that the engine has set works inside continuous
        batching only.

        Raises:
            Unavailable: the model is asleep.
            EngineDied: something hung.
        """
        while True:
            found: tuple[T] | None = await self._on_control(self._between_steps, work)
            if found is not None:
                return found[0]
            await asyncio.wrap_future(self._compilation.traced)

    async def close(self) -> None:
        """Stop the engine. The runtime is of no use afterwards.

        A device that does not answer is not waited for: what it holds goes with the process. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        self._watchdog.close()
        self._residency.close()
        self._compilation.close()
        self._grammars.close()
        last = [
            asyncio.wrap_future(self._control.submit(work))
            for work in (self._engine.stop, self.memory.close_link)
        ]
        self._control.shutdown(wait=False)
        done, late = await asyncio.wait(last, timeout=_CLOSE_TIMEOUT_S)
        for each in late:
            each.cancel()
        errors = [each.exception() for each in last if each in done]
        if late or self.hung.done():
            logger.error("the device does not answer; what it holds goes with the process")
            return
        for error in errors:
            if error is not None:
                raise error

    async def _on_control(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._control, work, *args)

    def _build_engine(self, module: PreTrainedModel, limits: EngineConfig) -> TransformersEngine:
        return TransformersEngine(
            module,
            limits,
            self.memory.make_kv_arena,
            lambda outputs: self._streams.deliver(outputs),
            self.memory.card(),
            self.memory.weights_bytes,
            self.memory.pool,
            self._watchdog.step,
            lambda error: self._something_went_wrong(error, "the generation loop"),
        )

    def _sleep(self, level: int) -> MemoryChange:
        self._scoring.drop()
        return self._residency.sleep(level)

    def _is_busy(self) -> bool:
        stats = self._engine.stats()
        return bool(stats.running or stats.waiting)

    def _between_steps(self, work: Callable[[PreTrainedModel], T]) -> tuple[T] | None:
        """None: not now, layers are being compiled."""
        self._residency.check_awake()
        with self._compilation.kept_off() as is_off:
            if not is_off:
                return None
            return (self._residency.between_steps(lambda: work(self._module)),)

    def _something_went_wrong(self, reason: Exception, what: str) -> None:
        logger.error("this replica has failed: %s went wrong", what, exc_info=reason)
        if not isinstance(reason, ReplicaFailed):
            reason = EngineDied(f"{what} went wrong: {type(reason).__name__}")
        self._fail(reason)

    def _hangs(self, what: str) -> None:
        """On the watchdog's thread, once."""
        failure = EngineDied(what)
        self.hung.set_result(failure)  # first: who sees `failed` may ask for it
        self._fail(failure)
        self._control.give_up(failure)

    def _fail(self, failure: ReplicaFailed) -> None:
        """Serve nothing any more; the first failure counts. Any thread may call."""
        try:
            self.failed.set_result(failure)
        except InvalidStateError:
            logger.info("failed again: %s", failure)
            return
        self._tell(lambda: self.fail_in_flight(failure))

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
        top = prepared.request.sampling.logprobs
        if top is None:
            return None
        ids = prepared.prompt_ids
        work = asyncio.create_task(self._scoring.score(ids, top))
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
        self.check_health()  # the bytes of the last wake have been checked by now
        return tuple(
            self.codec.token_logprob(token_id, None)
            if raw is None
            else self.codec.token_logprob(raw.token_id, raw.logprob, raw.top)
            for token_id, raw in zip(ids, found, strict=True)
        )


def build_module(checkpoint: Path, dtype: str, device: str = "auto") -> PreTrainedModel:
    """The architecture of a checkpoint on meta; costs no memory and tells early what cannot work.

    Raises:
        ValueError: the engine would serve this architecture or these weights wrongly, or not on this
            card.
    """
    on_card = device != "cpu" and torch.cuda.is_available()
    if on_card and (problem := card_problem(torch.cuda.get_device_capability())) is not None:
        raise ValueError(f"{problem}; set engine.device: cpu and num_gpus: 0, or use another card")
    module = build_on_meta(checkpoint, packer.checkpoint_dtype(checkpoint, dtype))
    check_architecture(module)
    return module


async def build_runtime(
    module: PreTrainedModel,
    image: WeightImage,
    load: "FastLoad",
    engine: EngineConfig,
    sleep: SleepConfig,
    chat: ChatConfig | None = None,
    observer: Observer | None = None,
    defaults: ResolvedSampling | None = None,
    watchdog: WatchdogConfig | None = None,
) -> ModelRuntime:
    """A runtime whose image came from `load`; off the event loop, because it takes seconds.

    Raises:
        ValueError, LayoutMismatch: as ModelRuntime.
    """
    image_from = load.obtain, load.release
    return await asyncio.to_thread(
        ModelRuntime,
        module,
        load.checkpoint,
        image,
        *image_from,
        engine,
        sleep,
        chat,
        observer,
        defaults,
        watchdog,
    )


def _nobody_yet(tell: Callable[[], None]) -> None:
    """There are no streams before there is an engine."""


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
