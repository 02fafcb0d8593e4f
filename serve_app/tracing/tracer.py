"""Whether there are traces, and where they go: OpenTelemetry's own variables.

Nothing of OpenTelemetry is imported where they are off.
https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

from serve_app import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OURS = "http/protobuf"

# W3C's `traceparent` of the span around the request that is being answered; None: there is none.
trace_parent: ContextVar[str | None] = ContextVar("trace_parent", default=None)


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether spans are to be sent: somebody named a collector, or the exporter."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER")
    return exporter == "otlp" if exporter else any(map(environment.get, _ENDPOINTS))


def start_tracer(environment: Mapping[str, str]) -> "Tracer | None":
    """A tracer whose spans are sent, if they are wanted and can be."""
    if not wanted(environment):
        return None
    protocol = next(filter(None, map(environment.get, _PROTOCOLS)), _OURS)
    if protocol != _OURS:
        logger.warning("no traces: OTEL_EXPORTER_OTLP_PROTOCOL is %s, not %s", protocol, _OURS)
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as missing:
        logger.warning("no traces: %s; pip install 'sleepserve[otel]'", missing)
        return None
    return tracer_to(BatchSpanProcessor(OTLPSpanExporter()), environment)


def tracer_to(processor: "SpanProcessor", environment: Mapping[str, str]) -> "Tracer":
    """A tracer of our own, whatever Ray or others have made of OpenTelemetry's global one."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    named = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": "sleepserve"}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(processor)
    return provider.get_tracer("sleepserve", __version__)
