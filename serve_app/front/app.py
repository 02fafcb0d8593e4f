"""HTTP routes: parse, call the model, answer. No decisions.

Whether a request waits, wakes a replica or is refused is the replica's to say. Of these routes only
the three that generate and `/wake_up` can wake a model; the others never do, nor wait for one.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.protocol import (
    ReplicaState,
    ReplicaStatus,
    TokenEvent,
)
from serve_app import __version__
from serve_app.config.http import HttpSettings
from serve_app.config.keys import Access, KeyRing
from serve_app.front.bodies import Bodies, check_travels
from serve_app.front.browsers import Browsers
from serve_app.front.errors import Edge, http_exception
from serve_app.front.gate import Gate
from serve_app.front.health import Health
from serve_app.front.metrics_page import Exposition
from serve_app.front.openapi import document
from serve_app.front.operators import Controls
from serve_app.front.peers import Account, Alone, Everybody
from serve_app.front.status.feed import ReadImages
from serve_app.front.status.routes import StatusRoutes
from serve_app.front.stream import HeldResponse, collect, event_stream, text_stream, unless_gone
from serve_app.front.tokenize import Tokenizing
from serve_app.front.work import Admission, Budget
from serve_app.models.model_client import ModelClient
from serve_app.models.registry import ServedModels
from serve_app.openai.answers import ChatAnswer, CompletionAnswer
from serve_app.openai.requests import (
    Ask,
    parse_chat,
    parse_completion,
    parse_seed,
)

logger = logging.getLogger(__name__)

_LARGE_ANSWER = 16 * 1024  # bytes; what is smaller is written in a millisecond or two


def build_asgi(
    models: Mapping[str, ModelClient],
    settings: HttpSettings,
    *,
    send_request_id: bool = True,
    read_images: ReadImages | None = None,
    keys: KeyRing | None = None,
    everybody: Everybody | None = None,
) -> Starlette:
    """The HTTP application for `models`.

    Args:
        models: keyed by the name that clients use.
        settings: limits.
        send_request_id: answer with the header x-request-id. False behind Ray Serve's proxy, which
            adds one to every response (ray/serve/_private/http_util.py, RequestIdMiddleware, 2.60).
        read_images: asks the weight holder, for the status page.
        keys: what `read_keys` read; None: everything is open.
        everybody: this process and the others that serve the same; None: it is alone.
    """
    everybody = everybody or Everybody(Account(models), Alone())
    ingress = Ingress(models, settings, read_images, keys or KeyRing(), everybody)
    return ingress.app(send_request_id)


class Ingress:
    """The routes, and what they share."""

    def __init__(
        self,
        models: Mapping[str, ModelClient],
        settings: HttpSettings,
        read_images: ReadImages | None,
        keys: KeyRing,
        everybody: Everybody,
    ) -> None:
        self._models = ServedModels(models, settings.status_timeout_s)
        self._settings = settings
        self._keys = keys
        self._exposition = Exposition(models, everybody)
        self._everybody = everybody
        self._continuations = Budget(
            "continuations",
            "max_continuations_in_flight",
            settings.max_continuations_in_flight,
            settings.max_share_per_key,
        )
        self._logprobs = Budget(
            "log-probabilities",
            "max_logprobs_in_flight",
            settings.max_logprobs_in_flight,
            settings.max_share_per_key,
        )
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="large-answers")
        body_bytes = Budget(
            "bytes of request bodies",
            "max_body_bytes_in_flight",
            settings.max_body_bytes_in_flight,
            settings.max_share_per_key,
        )
        self._bodies = Bodies(settings.max_body_bytes, settings.body_timeout_s, body_bytes)
        self._version = __version__
        self._status = StatusRoutes(self._models, self.banner, self._version, read_images)

    def app(self, send_request_id: bool) -> Starlette:
        counted = [Middleware(self._count_in)]
        routes = [
            *self._status.routes(),
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{model_id:path}", self.show_model, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"], middleware=counted),
            Route("/v1/completions", self.completions, methods=["POST"], middleware=counted),
            Route("/completions", self.seed_completions, methods=["POST"], middleware=counted),
            *Controls(self._models, self._bodies).routes(),
            *Tokenizing(self._models, self._bodies).routes(),
            *Health(self._models, lambda: not self._keys.guards(Access.INFERENCE)).routes(),
            Route("/version", self.show_version, methods=["GET"]),
            Route("/load", self.show_load, methods=["GET"]),
            Route("/metrics", self._exposition.respond, methods=["GET"]),
            Route("/openapi.json", self.show_openapi, methods=["GET"]),
        ]
        app = Starlette(
            routes=routes,
            middleware=[
                *self._cors(),  # outermost: a page of another origin may read errors, too
                Middleware(Edge, send_request_id=send_request_id),
                Middleware(
                    Gate,
                    keys=self._keys,
                    max_per_key=self._settings.max_concurrent_requests_per_key,
                    browsers=Browsers(
                        self._settings.allowed_hosts, self._settings.cors_allow_origins
                    ),
                ),
            ],
            exception_handlers={HTTPException: http_exception},
        )
        app.router.redirect_slashes = False  # a redirect behind a TLS proxy leads to plain HTTP
        return app

    def _cors(self) -> list[Middleware]:
        if not self._settings.cors_allow_origins:
            return []
        return [
            Middleware(
                CORSMiddleware,
                allow_origins=self._settings.cors_allow_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # names them one by one, so Authorization is among them
                expose_headers=["x-request-id", "retry-after"],
            )
        ]

    # --- generation ---

    async def chat(self, request: Request) -> Response:
        ask = await self._bodies.read(request, lambda fields: _travelling(parse_chat(fields)))
        model = self._models.one(ask.model)
        return await self._answer(request, model, ask, ChatAnswer(ask, *self._head(model)))

    async def completions(self, request: Request) -> Response:
        most = self._settings.max_continuations
        ask = await self._bodies.read(
            request, lambda fields: _travelling(parse_completion(fields, most))
        )
        model = self._models.one(ask.model)
        return await self._answer(request, model, ask, CompletionAnswer(ask, *self._head(model)))

    async def seed_completions(self, request: Request) -> Response:
        """The form of the project this one started from; the prompt leads the output."""
        ask = await self._bodies.read(
            request, lambda fields: _travelling(parse_seed(fields)), empty=b"{}"
        )
        model = self._models.one(ask.model)
        answer = CompletionAnswer(ask, *self._head(model))
        generations = self._generations(request, model, ask, answer)
        prompt = str(ask.prompts[0])
        if ask.stream:
            return HeldResponse(text_stream(generations, answer, prompt), "text/plain")
        await self._collect(request, generations, answer, ask)
        return JSONResponse({"output": prompt + answer.text})

    async def _answer(
        self, request: Request, model: ModelClient, ask: Ask, answer: ChatAnswer | CompletionAnswer
    ) -> Response:
        request_id = request.scope["request_id"]
        logger.debug("request %s is answered as %s", request_id, answer.answer_id)
        generations = self._generations(request, model, ask, answer)
        if not ask.stream:
            await self._collect(request, generations, answer, ask)
            return Response(await self._written(answer), media_type="application/json")
        frames = event_stream(
            generations,
            answer,
            self._settings.keepalive_after_s,
            self._settings.keepalive_interval_s,
            request_id,
        )
        return HeldResponse(frames, "text/event-stream")

    def _generations(
        self, request: Request, model: ModelClient, ask: Ask, answer: ChatAnswer | CompletionAnswer
    ) -> list[AsyncIterator[TokenEvent]]:
        """One per prompt, none of which has begun.

        Raises:
            ServerBusy, KeyBusy: so many more continuations would be too many now.
        """
        request.scope["admission"].take(self._continuations, len(ask.prompts) * ask.n)
        return [model.generate(each) for each in ask.requests(answer.answer_id)]

    async def _collect(
        self,
        request: Request,
        generations: Sequence[AsyncIterator[TokenEvent]],
        answer: ChatAnswer | CompletionAnswer,
        ask: Ask,
    ) -> None:
        admission: Admission = request.scope["admission"]
        each = 1 + (ask.sampling.logprobs or 0)

        def admit(event: TokenEvent) -> None:
            if event.logprobs:
                admission.take(self._logprobs, each * len(event.logprobs))

        work = collect(generations, answer, self._settings.request_timeout_s, admit)
        await unless_gone(request.receive, work)

    async def _written(self, answer: ChatAnswer | CompletionAnswer) -> bytes:
        if answer.size <= _LARGE_ANSWER:
            return answer.written()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, answer.written)

    def _head(self, model: ModelClient) -> tuple[str, int, str]:
        return model.info.model_id, int(time.time()), f"sleepserve-{self._version}"

    # --- models ---

    async def list_models(self, request: Request) -> Response:
        cards = await asyncio.gather(*(self._card(model) for model in self._models.all.values()))
        return JSONResponse({"object": "list", "data": cards})

    async def show_model(self, request: Request) -> Response:
        return JSONResponse(await self._card(self._models.one(request.path_params["model_id"])))

    async def _card(self, model: ModelClient) -> dict[str, Any]:
        info, replicas = model.info, await self._models.known_status(model)
        lengths = [replica.max_model_len for replica in replicas or ()]
        return {
            "id": info.model_id,
            "object": "model",
            "created": info.created,
            "owned_by": "sleepserve",
            "root": info.root,
            "parent": None,
            "max_model_len": min(lengths, default=info.max_model_len),
            "status": {"value": _status_value(replicas)},
        }

    # --- the rest ---

    async def banner(self, request: Request) -> Response:
        names = {} if self._keys.guards(Access.INFERENCE) else {"models": list(self._models.all)}
        return JSONResponse(
            {"message": "sleepserve is running.", "version": self._version, **names}
        )

    async def show_version(self, request: Request) -> Response:
        return JSONResponse({"version": self._version})

    async def show_load(self, request: Request) -> Response:
        return JSONResponse({"server_load": await self._everybody.load()})

    def _count_in(self, app: ASGIApp) -> ASGIApp:
        """`app`, its requests counted while they are being answered."""
        account = self._everybody.account

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            account.in_flight += 1
            try:
                await app(scope, receive, send)
            finally:
                account.in_flight -= 1

        return counted

    async def show_openapi(self, request: Request) -> Response:
        return JSONResponse(document(self._version, list(self._models.all), self._keys))


def _travelling(ask: Ask) -> Ask:
    """The same; raises ContextLengthExceeded if a prompt is too long to be sent to any replica."""
    for prompt in ask.prompts:
        check_travels(prompt)
    return ask


def _status_value(replicas: Sequence[ReplicaStatus] | None) -> str:
    """The words of llama.cpp's router and llama-swap; `unknown` if the replicas did not answer."""
    if replicas is None:
        return "unknown"
    states = {replica.state for replica in replicas}
    if states & {ReplicaState.AWAKE, ReplicaState.DRAINING}:
        return "loaded"
    if ReplicaState.WAKING in states:
        return "loading"
    return "sleeping" if ReplicaState.ASLEEP in states else "unloaded"
