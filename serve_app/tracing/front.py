"""The span around a request, from its first byte to the last of its answer."""

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.tracing.tracer import trace_parent

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


class TracedRequests:
    """ASGI middleware. A client's own `traceparent` is continued."""

    def __init__(self, app: ASGIApp, tracer: "Tracer") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        above = self._propagator.extract(dict(Headers(scope=scope)))
        attributes = {
            "http.request.method": scope["method"],
            "http.route": scope["path"],
            "sleepserve.request_id": scope["request_id"],
        }
        span = self._tracer.start_span(
            f"{scope['method']} {scope['path']}", above, SpanKind.SERVER, attributes
        )

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        token = trace_parent.set(carrier.get("traceparent"))
        try:
            await self._app(scope, receive, noted)
        except BaseException as exc:  # the edge makes an answer of it
            span.set_status(Status(StatusCode.ERROR, type(exc).__name__))
            raise
        finally:
            trace_parent.reset(token)
            span.end()
