"""What an endpoint is: what it reads, what it answers, and the route made of it and of what answers."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

from serve_app.config.http import HttpSettings
from serve_app.config.keys import Access
from serve_app.front.bodies import Bodies, query_fields
from serve_app.front.dialects import OPENAI, Dialect
from serve_app.openai.schemas import Schema

T = TypeVar("T")

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"


@dataclass(frozen=True, slots=True)
class Form(Generic[T]):
    """What an endpoint reads of a request, and makes of it. In the body a field wins over the query's."""

    models: tuple[type[BaseModel], ...]  # the fields are those of one of them
    parse: Callable[[Mapping[str, Any], HttpSettings], T]  # pure; a large body's runs on a thread
    in_body: bool = False
    in_query: bool = False

    @property
    def is_required(self) -> bool:
        """Whether a body of nothing lacks something."""
        fields = (each for model in self.models for each in model.model_fields.values())
        return any(each.is_required() for each in fields)

    async def read(self, request: Request, bodies: Bodies, settings: HttpSettings) -> T:
        """What a request says.

        Raises:
            PayloadTooLarge, RequestTimeout, ServerBusy, KeyBusy: before all of it was read.
            InvalidRequest: a field is wrong or unknown, or the body is no JSON object.
        """
        query = query_fields(request) if self.in_query else {}
        if not self.in_body:
            return self.parse(query, settings)
        empty = b"" if self.is_required else b"{}"
        return await bodies.read(
            request, lambda fields: self.parse({**query, **fields}, settings), empty
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What an endpoint answers."""

    schema: Schema | None  # of the JSON; None: it answers none
    kinds: tuple[str, ...] = (JSON,)
    # With a body of the same schema.
    other_statuses: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint(Generic[T]):
    """All that is said of an endpoint, wherever it is said."""

    methods: tuple[str, ...]  # the first one is documented
    path: str  # as Starlette's routes have it
    access: Access
    form: Form[T]
    answer: Answer
    summary: str
    is_load: bool = False  # counted while it is being answered
    is_documented: bool = True  # in /openapi.json
    dialect: Dialect = OPENAI

    @property
    def method(self) -> str:
        return self.methods[0]

    @property
    def public_path(self) -> str:
        """Its path in documents: there parameters have no type."""
        return self.path.replace(":path}", "}")

    @property
    def errors(self) -> Mapping[int, str]:
        """Statuses that follow from who may use it; what else may go wrong is told in the same error object."""
        if self.access is Access.PUBLIC:
            return {}
        found = {401: "No key, or a wrong one."}
        if self.access is Access.ADMIN:
            found[403] = "A key for inference; an admin key is needed."
        elif self.method != "GET":
            found[429] = "Too many at once, of this key or of all."
        return found


@dataclass(frozen=True, slots=True)
class Answered(ABC):
    """An endpoint with what answers it."""

    endpoint: Endpoint[Any]

    @abstractmethod
    def route(
        self, bodies: Bodies, settings: HttpSettings, load: Sequence[Middleware]
    ) -> BaseRoute:
        """What Starlette knows of it; `load` is around requests that count as load."""


@dataclass(frozen=True, slots=True)
class Handler(Answered, Generic[T]):
    """An endpoint and the function that answers it, which gets what the form has made of the request."""

    endpoint: Endpoint[T]
    answer: Callable[[Request, T], Awaitable[Response]]

    def route(
        self, bodies: Bodies, settings: HttpSettings, load: Sequence[Middleware]
    ) -> BaseRoute:
        async def respond(request: Request) -> Response:
            asked = await self.endpoint.form.read(request, bodies, settings)
            return await self.answer(request, asked)

        return Route(
            self.endpoint.path,
            respond,
            methods=self.endpoint.methods,
            middleware=load if self.endpoint.is_load else [],
        )


@dataclass(frozen=True, slots=True)
class Files(Answered):
    """An endpoint and the application that serves what is below its path."""

    endpoint: Endpoint[None]
    files: ASGIApp

    def route(self, *shared: object) -> BaseRoute:
        return Mount(self.endpoint.path, self.files)


Handlers = list[Answered]
