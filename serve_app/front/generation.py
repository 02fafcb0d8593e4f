"""What models generate: chat, responses, messages, completions, and the form of the project this one started from.

Whether a request waits, wakes a replica or is refused is the replica's to say. Of all endpoints only these and
`/wake_up` can wake a model; the others never do, nor wait for one.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from actors.protocol import TokenEvent
from serve_app.anthropic.answers import MessageAnswer
from serve_app.config.http import HttpSettings
from serve_app.front.endpoints import catalogue
from serve_app.front.endpoints.endpoint import EVENTS, JSON, TEXT, Handler, Handlers
from serve_app.front.stream import HeldResponse, collect, event_stream, text_stream, unless_gone
from serve_app.front.work import Admission, Budget
from serve_app.models.registry import ServedModels
from serve_app.openai.answers import ChatAnswer, CompletionAnswer
from serve_app.openai.growing import GrowingAnswer
from serve_app.openai.requests import Ask
from serve_app.responses.answers import ResponseAnswer
from serve_app.tracing.tracer import trace_parent

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=GrowingAnswer)

_LARGE_ANSWER = 16 * 1024  # bytes; what is smaller is written in a millisecond or two


class Generation:
    """Answers what a model generates, as a stream or complete."""

    def __init__(self, models: ServedModels, settings: HttpSettings) -> None:
        self._models = models
        self._settings = settings
        self._continuations = Budget.of(settings, "continuations", "max_continuations_in_flight")
        self._logprobs = Budget.of(settings, "log-probabilities", "max_logprobs_in_flight")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="large-answers")

    def handlers(self) -> Handlers:
        return [
            Handler(catalogue.CHAT, partial(self._answer, _dated(ChatAnswer))),
            Handler(catalogue.COMPLETION, partial(self._answer, _dated(CompletionAnswer))),
            Handler(catalogue.RESPONSES, partial(self._answer, _dated(ResponseAnswer))),
            Handler(catalogue.MESSAGES, partial(self._answer, MessageAnswer)),
            Handler(catalogue.SEED_COMPLETION, self.seed_completion),
        ]

    async def _answer(
        self, make: Callable[[Ask, str], GrowingAnswer], request: Request, ask: Ask
    ) -> Response:
        answer, generations = self._begin(request, ask, make)
        if not ask.stream:
            await self._collect(request, generations, answer, ask)
            return Response(await self._written(answer), media_type=JSON)
        frames = event_stream(
            generations,
            answer,
            self._settings.keepalive_after_s,
            self._settings.keepalive_interval_s,
            request.scope["request_id"],
            request.scope["dialect"],
            ask.field_names,
        )
        return HeldResponse(frames, EVENTS)

    async def seed_completion(self, request: Request, ask: Ask) -> Response:
        """The form of the project this one started from; the prompt leads the output."""
        answer, generations = self._begin(request, ask, _dated(CompletionAnswer))
        prompt = str(ask.prompts[0])
        if ask.stream:
            return HeldResponse(text_stream(generations, answer, prompt), TEXT)
        await self._collect(request, generations, answer, ask)
        return JSONResponse({"output": prompt + answer.text})

    def _begin(
        self, request: Request, ask: Ask, make: Callable[[Ask, str], A]
    ) -> tuple[A, list[AsyncIterator[TokenEvent]]]:
        """The answer to be, and one generation per prompt, none of which runs yet.

        Args:
            make: an answer, for the model of that id.

        Raises:
            ServerBusy, KeyBusy: so many more continuations would be too many now.
        """
        request.scope["field_names"].update(ask.field_names)
        model = self._models.one(ask.model)
        answer = make(ask, model.info.model_id)
        logger.debug("request %s is answered as %s", request.scope["request_id"], answer.answer_id)
        request.scope["admission"].take(self._continuations, len(ask.prompts) * ask.n)
        requests = ask.requests(answer.answer_id, trace_parent.get())
        return answer, [model.generate(each) for each in requests]

    async def _collect(
        self,
        request: Request,
        generations: Sequence[AsyncIterator[TokenEvent]],
        answer: GrowingAnswer,
        ask: Ask,
    ) -> None:
        admission: Admission = request.scope["admission"]
        each = 1 + (ask.sampling.logprobs or 0)

        def admit(event: TokenEvent) -> None:
            if event.logprobs:
                admission.take(self._logprobs, each * len(event.logprobs))

        timeout_s = self._settings.request_timeout_s
        work = collect(generations, answer, timeout_s, admit, ask.field_names)
        await unless_gone(request.receive, work)

    async def _written(self, answer: GrowingAnswer) -> bytes:
        if answer.size <= _LARGE_ANSWER:
            return answer.written()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, answer.written)


def _dated(kind: Callable[[Any, str, int], A]) -> Callable[[Any, str], A]:
    """OpenAI's answers tell when they were made."""
    return lambda ask, model_id: kind(ask, model_id, int(time.time()))
