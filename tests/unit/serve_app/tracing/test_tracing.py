"""When there are traces, what is in them, and what they cost where there are none."""

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from actors.observer import (
    EngineMeter,
    GuardedObserver,
    Observer,
    SleepCause,
    WakeCause,
    WakePhase,
    WakeResult,
)
from actors.protocol import GenerateRequest, MemoryChange, WakeReport
from serve_app.config.http import HttpSettings
from serve_app.front.app import build_asgi
from serve_app.tracing.replica import ReplicaTraces, observed
from serve_app.tracing.tracer import start_tracer, tracer_to, wanted
from tests.fakes import FakeModel
from tests.unit.asgi_client import client_of
from tests.unit.serve_app.front.front import CHAT, CHAT_BODY

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
REPORT = WakeReport(1024, 0.5, 2.048e-6, 3, 1024, 0.25, intact=True)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(exporter: InMemorySpanExporter) -> ReplicaTraces:
    tracer = tracer_to(SimpleSpanProcessor(exporter), {})
    return ReplicaTraces(Observer(), tracer, "tiny", "r1", now_ns=lambda: 10**18)


def named(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    (span,) = (span for span in exporter.get_finished_spans() if span.name == name)
    return span


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_off_unless_the_standard_variables_ask(environment: dict[str, str], expected: bool) -> None:
    assert wanted(environment) == expected


def test_nothing_of_it_is_imported_or_in_the_way_where_it_is_off() -> None:
    observer, around = observed(Observer(), start_tracer({}), "tiny", "r1")
    assert type(observer) is GuardedObserver
    with around(GenerateRequest("a", "hi")):
        pass
    app = build_asgi({"fake": FakeModel()}, HttpSettings())
    (route,) = (route for route in app.routes if getattr(route, "path", "") == CHAT)
    assert "Traced" not in repr(vars(route))
    script = "import sys; import serve_app.tracing.front, serve_app.tracing.replica as r; from serve_app.tracing.tracer import start_tracer; start_tracer({}); assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_unknown_protocol_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert start_tracer({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_request_hands_its_span_on(exporter: InMemorySpanExporter) -> None:
    model = FakeModel()
    tracer = tracer_to(SimpleSpanProcessor(exporter), {})
    with client_of(build_asgi({"fake": model}, HttpSettings(), tracer=tracer)) as client:
        client.get("/v1/models")
        client.post(CHAT, json={**CHAT_BODY, "stream": True}, headers={"traceparent": PARENT})
        client.post(CHAT, json={**CHAT_BODY, "temperature": 9})
    answered, refused = exporter.get_finished_spans()
    assert (answered.name, answered.parent.span_id) == (f"POST {CHAT}", int("cd" * 8, 16))
    assert model.requests[0].trace == f"00-{'ab' * 16}-{answered.context.span_id:016x}-01"
    assert answered.resource.attributes["service.name"] == "sleepserve"
    assert (refused.parent, refused.status.status_code) == (None, StatusCode.ERROR)


def test_wake_is_one_span_for_all_who_wait(
    exporter: InMemorySpanExporter, traces: ReplicaTraces
) -> None:
    with (
        traces.request(GenerateRequest("a", "hi", trace=PARENT)),
        traces.request(GenerateRequest("b", "hi")),
    ):
        traces.wake_phase(WakePhase.IMAGE, 1.0)
        traces.wake_phase(WakePhase.MAP, 2.0)
        traces.woke(WakeCause.REQUEST, WakeResult.OK, 4.0)
        traces.restored(REPORT)
    first, second = (span for span in exporter.get_finished_spans() if span.name == "replica")
    if first.attributes["sleepserve.request_id"] == "b":
        first, second = second, first
    wake = named(exporter, "wake")
    assert wake.parent.span_id == first.context.span_id
    assert [link.context.span_id for link in wake.links] == [second.context.span_id]
    assert (wake.start_time, wake.end_time) == (10**18 - 4 * 10**9, 10**18)
    phases = [named(exporter, f"wake.{name}") for name in ("image", "map", "copy")]
    assert {span.parent.span_id for span in phases} == {wake.context.span_id}
    assert phases[1].start_time == phases[0].end_time == wake.start_time + 10**9


@pytest.mark.parametrize("between", ["sleep", "restart", "failed wake"])
def test_copies_that_are_told_before_their_wake_are_its_own(
    exporter: InMemorySpanExporter, traces: ReplicaTraces, between: str
) -> None:
    """With little to copy they may be."""
    traces.woke(WakeCause.START, WakeResult.OK, 1.0)
    if between == "restart":
        traces.restarted()
    else:
        traces.slept(SleepCause.IDLE, 1, 0.1, MemoryChange(1024, 0, 0))
    if between == "failed wake":
        traces.restored(REPORT)
        traces.woke(WakeCause.COMMAND, WakeResult.REFUSED, 1.0)
    with traces.request(GenerateRequest("a", "hi", trace=PARENT)):
        traces.restored(REPORT)
        traces.woke(WakeCause.REQUEST, WakeResult.OK, 2.0)
    copy = named(exporter, "wake.copy")
    wakes = [span for span in exporter.get_finished_spans() if span.name == "wake"]
    assert copy.parent.span_id == wakes[-1].context.span_id
    assert copy.context.trace_id == int("ab" * 16, 16)


def test_wake_that_nobody_waits_for_has_a_trace_of_its_own(
    exporter: InMemorySpanExporter, traces: ReplicaTraces
) -> None:
    traces.woke(WakeCause.COMMAND, WakeResult.REFUSED, 1.0)
    wake = named(exporter, "wake")
    assert (wake.parent, wake.status.status_code) == (None, StatusCode.ERROR)


def test_sequence_of_a_request_that_is_over_is_nobody_s(
    exporter: InMemorySpanExporter, traces: ReplicaTraces
) -> None:
    meter = EngineMeter(traces)
    meter.submitted("gone-1", 3, 0.0)
    meter.ended("gone-1", "abort")  # type: ignore[arg-type]
    assert exporter.get_finished_spans() == ()


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    posted: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        Thread(target=collector.handle_request, daemon=True).start()
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        tracer = start_tracer(environment)
        assert tracer is not None
        ReplicaTraces(Observer(), tracer, "tiny", "r1").woke(WakeCause.START, WakeResult.OK, 1.0)
        tracer.span_processor.shutdown()  # type: ignore[attr-defined]
    ((path, body),) = posted
    assert path == "/v1/traces"
    assert b"wake" in body
