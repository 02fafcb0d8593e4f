"""ServingError -> status, error body, Retry-After: one table, and the middleware that sends it.

Bodies are those of the endpoint's dialect. OpenAI's carry all four keys of its `error` object. Codes are strings, because openai-python shows
them as `error.code`; vLLM and Ray put the HTTP status there.
"""

import asyncio
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors import errors
from serve_app.front.dialects import OPENAI, Dialect, Row
from serve_app.front.field_names import in_client_s_words
from serve_app.models.remote_errors import unwrap

logger = logging.getLogger(__name__)

MIN_RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 60  # openai-python 2 ignores a longer one
MAX_MESSAGE_CHARS = 1500


_SANE_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class RequestTimeout(errors.ServingError):
    """A request's body, or an answer that is not streamed, took longer than the configuration allows."""


class InvalidApiKey(errors.ServingError):
    """A request without a key, or with one that nobody was given."""


class AdminKeyRequired(errors.ServingError):
    """A key for inference where one for operators is needed."""


class ForeignPage(errors.ServingError):
    """A request that a browser sent for a page that is not this server's."""


class NotJson(errors.ServingError):
    """A request body that is not declared to be JSON."""


class KeyBusy(errors.Unavailable):
    """As much work of this key is in flight as it may have at once."""


class ServerBusy(errors.Unavailable):
    """As much work is in flight as this process takes on."""


NO_NAMES: Mapping[str, str] = {}

_CLIENT = "invalid_request_error"
_SERVER = "server_error"

TABLE: Mapping[type[errors.ServingError], Row] = {
    errors.ServingError: Row(500, _SERVER, "internal_error"),
    errors.InvalidRequest: Row(400, _CLIENT, "invalid_request_error"),
    errors.ContextLengthExceeded: Row(400, _CLIENT, "context_length_exceeded"),
    errors.UnsupportedParameter: Row(400, _CLIENT, "unsupported_parameter"),
    errors.ModelNotFound: Row(404, _CLIENT, "model_not_found"),
    errors.PayloadTooLarge: Row(413, _CLIENT, "payload_too_large"),
    InvalidApiKey: Row(401, _CLIENT, "invalid_api_key"),
    AdminKeyRequired: Row(403, _CLIENT, "admin_key_required"),
    ForeignPage: Row(403, _CLIENT, "foreign_page"),
    NotJson: Row(415, _CLIENT, "unsupported_media_type"),
    KeyBusy: Row(429, "rate_limit_error", "key_busy"),
    ServerBusy: Row(429, "rate_limit_error", "server_busy"),
    RequestTimeout: Row(408, _SERVER, "request_timeout"),
    errors.Unavailable: Row(503, _SERVER, "unavailable"),
    errors.QueueFull: Row(429, "rate_limit_error", "queue_full"),
    errors.WakeTimeout: Row(503, _SERVER, "wake_failed"),
    errors.DrainTimeout: Row(503, _SERVER, "drain_timeout"),
    errors.HeldAsleep: Row(503, _SERVER, "model_asleep"),
    errors.FrozenTooLong: Row(503, _SERVER, "frozen_too_long"),
    errors.DeviceMemoryShort: Row(503, _SERVER, "device_memory_short"),
    errors.NoRoom: Row(503, _SERVER, "no_room"),
    errors.NeverFits: Row(503, _SERVER, "never_fits"),
    errors.ShuttingDown: Row(503, _SERVER, "shutting_down"),
    errors.ReplicaFailed: Row(500, _SERVER, "replica_failed"),
    errors.DeviceMemoryError: Row(500, _SERVER, "device_memory_error"),
    errors.LayoutMismatch: Row(500, _SERVER, "layout_mismatch"),
    errors.ImageMissing: Row(500, _SERVER, "image_missing"),
    errors.WeightsCorrupted: Row(500, _SERVER, "weights_corrupted"),
    errors.StoreFull: Row(500, _SERVER, "store_full"),
    errors.HostMemoryFull: Row(500, _SERVER, "host_memory_full"),
    errors.HolderLost: Row(500, _SERVER, "holder_lost"),
    errors.EngineDied: Row(500, _SERVER, "engine_dead"),
    errors.WorkerLost: Row(500, _SERVER, "worker_lost"),
    errors.CannotStart: Row(500, _SERVER, "cannot_start"),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error, ready to be sent: as a response, or as an event inside a stream."""

    status: int
    body: Mapping[str, object]
    headers: Mapping[str, str] = field(default_factory=dict)


def describe(
    exc: Exception,
    request_id: str,
    dialect: Dialect = OPENAI,
    field_names: Mapping[str, str] = NO_NAMES,
) -> Problem:
    """What the client learns about `exc`.

    Errors that are ours, and those nobody expected, are logged with the request's id; of the latter
    the client learns nothing but that id.

    Args:
        field_names: see `in_client_s_words`.
    """
    root = unwrap(exc)
    if not isinstance(root, errors.ServingError):
        logger.error("request %s failed unexpectedly", request_id, exc_info=exc)
        row = TABLE[errors.ServingError]
        message = f"internal error; the server's log has it under request id {request_id}"
        return Problem(row.status, _error_body(dialect, row, message))
    row = row_of(type(root))
    if row.status == 500:
        logger.error("request %s failed: %s", request_id, root, exc_info=exc)
    message, param = str(root), None
    if isinstance(root, errors.InvalidRequest):
        message, param = in_client_s_words(root, field_names)
    return Problem(row.status, _error_body(dialect, row, message, param), _headers(root))


def row_of(kind: type[errors.ServingError]) -> Row:
    """The row of a class, or of its nearest ancestor that has one."""
    return next(TABLE[base] for base in kind.__mro__ if base in TABLE)


def _error_body(
    dialect: Dialect, row: Row, message: str, param: str | None = None
) -> dict[str, object]:
    """A chat template or a library may put a whole request into its message."""
    if len(message) > MAX_MESSAGE_CHARS:
        message = f"{message[: MAX_MESSAGE_CHARS - 3]}..."
    return dialect.error_body(row, message, param)


def _headers(exc: errors.ServingError) -> dict[str, str]:
    if isinstance(exc, errors.Unavailable):
        # Clamped before rounding: math.ceil takes neither inf nor nan.
        wait_s = min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, exc.retry_after_s))
        return {"Retry-After": str(math.ceil(wait_s))}
    if isinstance(exc, InvalidApiKey):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(exc, RequestTimeout):
        # openai-python retries a 408 by itself, which would compute everything once more.
        return {"x-should-retry": "false"}
    return {}


class Edge:
    """The outermost layer: gives each request an id, and whatever is raised an error body.

    The id is the caller's `x-request-id` where that is fit for a log line. It is in
    `scope["request_id"]`, and what the client speaks in `scope["dialect"]`; what it calls the fields that errors name,
    whoever has read its body adds to `scope["field_names"]`. Plain ASGI: Starlette's BaseHTTPMiddleware hides a
    client's disconnect.
    """

    def __init__(
        self, app: ASGIApp, *, dialect_of: Callable[[Scope], Dialect], send_request_id: bool
    ) -> None:
        self._app = app
        self._dialect_of = dialect_of
        self._send_request_id = send_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_REQUEST_ID.fullmatch(given) else uuid4().hex
        scope["request_id"] = request_id
        dialect = scope["dialect"] = self._dialect_of(scope)
        field_names: dict[str, str] = {}
        scope["field_names"] = field_names
        begun = False

        async def send_named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                if self._send_request_id:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            logger.debug("request %s: the client went away", request_id)
        except asyncio.CancelledError as exc:
            exc.__traceback__ = None  # as below
            raise
        except Exception as exc:
            problem = describe(exc, request_id, dialect, field_names)
            if begun:
                # Serve keeps it where it leads back to itself (`_handle_errors_and_metrics`, 2.60): its frames, with
                # prompt and answer, would wait for the garbage collector.
                exc.__traceback__ = None
                raise  # the server cuts the connection, which is all that can still be said
            response = JSONResponse(problem.body, problem.status, problem.headers)
            await response(scope, receive, send_named)


# Paths of OpenAI's that clients try and that are not here on purpose, with what their users should learn.
NOT_OFFERED: Mapping[str, str] = {
    "/v1/embeddings": (
        "embeddings are not offered: the models served here are trained to continue text, and nobody trained "
        "their pooled states to be compared, so searches with them would silently be worse; serve an embedding "
        "model beside this server, as by Hugging Face's text-embeddings-inference or `vllm serve MODEL --runner "
        "pooling`, and point the client's embeddings at its address"
    ),
}


async def http_exception(request: Request, exc: Exception) -> Response:
    """No such path, or not with this method: what Starlette's router raises."""
    assert isinstance(exc, HTTPException)
    code = HTTPStatus(exc.status_code).phrase.lower().replace(" ", "_")
    row = Row(exc.status_code, _CLIENT, code)
    message = f"{exc.detail}: {request.method} {request.url.path}"
    if exc.status_code == 404 and (why := NOT_OFFERED.get(request.url.path)):
        message = f"{message}: {why}"
    body = _error_body(request.scope["dialect"], row, message)
    return JSONResponse(body, exc.status_code, exc.headers)
