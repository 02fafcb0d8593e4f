"""Stand-ins for our Protocols. They record calls and fail on demand."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace

from actors.protocol import (
    CardStatus,
    DeviceMemoryStatus,
    DeviceNow,
    FinishReason,
    GenerateRequest,
    LastSleep,
    MemoryLeft,
    MessageForm,
    Prompt,
    ReplicaState,
    ReplicaStatus,
    SleepCommand,
    TokenEvent,
    TokenLogprob,
    WakeReport,
)
from serve_app.models.model_client import ModelInfo, Scrape
from serve_app.scaling.manual import Scale


class FakeModel:
    """A `ModelClient` that says `pieces`, one token each, for every continuation.

    Attributes:
        requests: every GenerateRequest, as it came.
        closed: ids of the requests whose iterator was closed before its end.
        orders: sleep and wake_up calls.
        gate: if set to an Event, no token comes before it is set: a wake that takes long.
        fail_first: raised instead of the first event.
        fail_later: raised after the first piece.
        stop_short: the generation ends after the first piece, with no finish reason.
        fail_control: raised by sleep, wake_up and status.
        hang_status: status never answers.
        asked_for_status: status was called.
        asked_for_states: how often replica_states was called.
        scrape: what `metrics` gives; while `hang_status`, it never does.
        card: what its replicas share.
        last_sleep: of each replica.
        form: how its messages are written, in chats.
    """

    def __init__(
        self,
        model_id: str = "fake",
        *,
        pieces: Sequence[str] = ("Hello", ",", " world"),
        finish_reason: FinishReason = FinishReason.STOP,
        stop_reason: str | int | None = None,
        states: Sequence[ReplicaState] = (ReplicaState.AWAKE,),
    ) -> None:
        self.info = ModelInfo(
            model_id=model_id,
            max_model_len=None,
            root=f"checkpoint-of-{model_id}",
            created=1700000000,
            tokenizer=FakeTokenizer(),
        )
        self.scaler = FakeScaler(len(states))
        self.pieces = tuple(pieces)
        self.form: MessageForm | None = None
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        self.states = list(states)
        self.requests: list[GenerateRequest] = []
        self.closed: list[str] = []
        self.orders: list[SleepCommand | tuple[str, ...]] = []
        self.gate: asyncio.Event | None = None
        self.fail_first: BaseException | None = None
        self.fail_later: BaseException | None = None
        self.stop_short = False
        self.fail_control: Exception | None = None
        self.hang_status = False
        self.asked_for_status = False
        self.asked_for_states = 0
        self.scrape = Scrape()
        self.card: CardStatus | None = None
        self.last_sleep: LastSleep | None = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        self.requests.append(request)
        ended = False
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.fail_first is not None:
                raise self.fail_first
            for event in self._events(request):
                yield event
                await asyncio.sleep(0)  # so that the prompts of one request interleave
            ended = True
        finally:
            if not ended:
                self.closed.append(request.request_id)

    async def sleep(self, command: SleepCommand) -> Sequence[ReplicaStatus]:
        self.orders.append(command)
        return [replace(s, deep=command.deep) for s in self._move(ReplicaState.ASLEEP)]

    async def wake_up(self, tags: tuple[str, ...]) -> Sequence[ReplicaStatus]:
        self.orders.append(tags)
        return self._move(ReplicaState.AWAKE)

    async def status(self) -> Sequence[ReplicaStatus]:
        self.asked_for_status = True
        if self.hang_status:
            await asyncio.Event().wait()
        return self._statuses()

    async def replica_states(self) -> Sequence[ReplicaState]:
        self.asked_for_states += 1
        if self.hang_status:
            await asyncio.Event().wait()
        if self.fail_control is not None:
            raise self.fail_control
        return self.states

    async def metrics(self, within_s: float) -> Scrape:
        if self.hang_status:
            await asyncio.Event().wait()
        if self.fail_control is not None:
            raise self.fail_control
        return self.scrape

    def _move(self, state: ReplicaState) -> Sequence[ReplicaStatus]:
        statuses = self._statuses()
        self.states = [state] * len(self.states)
        return [replace(status, state=state) for status in statuses]

    def _statuses(self) -> list[ReplicaStatus]:
        if self.fail_control is not None:
            raise self.fail_control
        return [
            ReplicaStatus(
                model_id=self.info.model_id,
                replica_id=f"replica-{number}",
                process_id=1000 + number,
                worker_process_id=2000 + number,
                worker_restarts=0,
                state=state,
                held=False,
                in_flight=0,
                waiting_for_wake=0,
                idle_s=1.5,
                idle_timeout_s=300.0,
                sleeps=1,
                wakes=1,
                last_sleep_s=0.2,
                last_wake_s=None,
                weights_bytes=1024,
                mapped_bytes=0 if state is ReplicaState.ASLEEP else 2048,
                kv_bytes=1024,
                weights_from="image",
                reason="as the test wants it",
                max_model_len=4096,
                device=DeviceNow(
                    id="GPU-0",
                    name="fake card",
                    total=9000,
                    free=4000,
                    wake_bytes=2048 if state is ReplicaState.ASLEEP else 0,
                ),
                device_memory=DeviceMemoryStatus(
                    total=9000,
                    free=4000,
                    own=None,
                    released_by_last_sleep=2048,
                    own_released_by_last_sleep=None,
                    left=LEFT if state is ReplicaState.ASLEEP else None,
                ),
                last_wake=WakeReport(1024, 0.5, 2.048e-6, 3, 1024, 0.25, intact=True),
                card=self.card,
                last_sleep=self.last_sleep,
            )
            for number, state in enumerate(self.states)
        ]

    def _events(self, request: GenerateRequest) -> Iterator[TokenEvent]:
        """Piece by piece, the continuations taking turns."""
        if request.echo:
            for index in range(request.n):
                logprobs = self._logprobs(request, prompt_text(request))
                if logprobs is not None:
                    logprobs = (replace(logprobs[0], logprob=None, top=()),)
                yield TokenEvent(index, prompt_text(request), (), PROMPT_TOKENS, logprobs=logprobs)
        if request.is_echo_alone:
            for index in range(request.n):
                yield TokenEvent(index, "", (), PROMPT_TOKENS, FinishReason.LENGTH)
            return
        if not request.stream:
            yield from (self._whole(request, index) for index in range(request.n))
            return
        for position, piece in enumerate(self.pieces):
            for index in range(request.n):
                logprobs = self._logprobs(request, piece)
                form = self.form if position == 0 else None
                event = TokenEvent(
                    index, piece, (position,), PROMPT_TOKENS, logprobs=logprobs, form=form
                )
                yield self._ended(event) if position == len(self.pieces) - 1 else event
            if self.fail_later is not None:
                raise self.fail_later
            if self.stop_short:
                return

    def _whole(self, request: GenerateRequest, index: int) -> TokenEvent:
        if self.fail_later is not None:
            raise self.fail_later
        logprobs = [self._logprobs(request, piece) for piece in self.pieces]
        event = TokenEvent(
            index,
            "".join(self.pieces),
            tuple(range(len(self.pieces))),
            PROMPT_TOKENS,
            logprobs=tuple(each for some in logprobs if some for each in some) or None,
            form=self.form,
        )
        return event if self.stop_short else self._ended(event)

    def _ended(self, event: TokenEvent) -> TokenEvent:
        return replace(event, finish_reason=self.finish_reason, stop_reason=self.stop_reason)

    def _logprobs(self, request: GenerateRequest, piece: str) -> tuple[TokenLogprob, ...] | None:
        if (wanted := request.sampling.logprobs) is None:
            return None
        top = (_logprob(piece, -0.5), _logprob("other", float("-inf")))[:wanted]
        return (TokenLogprob(1, piece, piece.encode(), -0.5, top),)


class FakeTokenizer:
    """A `Tokenizer` of characters.

    Attributes:
        asked: what came to `encode`.
        fail: raised by every method.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Prompt, bool | None]] = []
        self.fail: Exception | None = None

    async def encode(self, prompt: Prompt, add_special_tokens: bool | None) -> Sequence[int]:
        self._check()
        self.asked.append((prompt, add_special_tokens))
        text = prompt if isinstance(prompt, str) else str(prompt.messages[-1]["content"])  # type: ignore[union-attr]
        return [ord(char) for char in text]

    async def decode(self, token_ids: Sequence[int]) -> str:
        self._check()
        return "".join(map(chr, token_ids))

    async def texts(self, token_ids: Sequence[int]) -> Sequence[str]:
        self._check()
        return [chr(token_id) for token_id in token_ids]

    async def describe(self) -> dict[str, str | None]:
        self._check()
        return {"eos_token": "</s>", "bos_token": None, "pad_token": None, "chat_template": "{{}}"}

    def _check(self) -> None:
        if self.fail is not None:
            raise self.fail


class FakeScaler:
    """A `Scaler` that remembers."""

    def __init__(self, target: int) -> None:
        self.scale = Scale(target, least=1, most=4, most_setting="autoscaling.max_replicas")
        self.written: list[int] = []

    async def read(self) -> Scale:
        return self.scale

    async def write(self, replicas: int) -> None:
        self.written.append(replicas)
        self.scale = replace(self.scale, target=replicas)


PROMPT_TOKENS = 5  # whatever the prompt
LEFT = MemoryLeft(context=600, graphs=200, kept_layers=0, torch_reserve=30, other=4)


def prompt_text(request: GenerateRequest) -> str:
    return request.prompt if isinstance(request.prompt, str) else f"<{request.prompt}>"


def _logprob(token: str, logprob: float) -> TokenLogprob:
    return TokenLogprob(2, token, token.encode(), logprob)
