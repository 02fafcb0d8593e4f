"""Spans of a replica: each request, its sequences in the worker, and each wake."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from actors.observer import (
    Course,
    Ending,
    GuardedObserver,
    Observer,
    SleepCause,
    WakeCause,
    WakePhase,
    WakeResult,
)
from actors.protocol import GenerateRequest, MemoryChange, WakeReport

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer


Traced = Callable[[GenerateRequest], AbstractContextManager[object]]


def observed(
    inner: Observer, tracer: "Tracer | None", model_id: str, replica_id: str
) -> tuple[Observer, Traced]:
    """Who is told what happens, and what is around the answer to each request; without a tracer as without us."""
    if tracer is None:
        return GuardedObserver(inner), nullcontext
    traces = ReplicaTraces(inner, tracer, model_id, replica_id)
    return traces, traces.request


class ReplicaTraces(GuardedObserver):
    """Hands on what it is told, and makes spans of it.

    A wake is one for all who wait for it: its span is in the trace of the one who waits longest, with links to
    those of the others. Times of the past are given by clocks that run on, so they are told apart from now.
    """

    def __init__(
        self,
        inner: Observer,
        tracer: "Tracer",
        model_id: str,
        replica_id: str,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        super().__init__(inner)
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()
        self._attributes = {"sleepserve.model": model_id, "sleepserve.replica": replica_id}
        self._now_ns = now_ns
        self._open: dict[str, Span] = {}  # of requests, by their ids, in the order of their arrival
        self._wake: Span | None = None  # by which the replica is awake, once that was told
        self._early: tuple[WakeReport, int] | None = None  # told before its wake, and when
        self._phases: list[tuple[str, float]] = []  # of the wake that goes on

    @contextmanager
    def request(self, request: GenerateRequest) -> Iterator[None]:
        """Around the answer to a request."""
        above = {} if request.trace is None else {"traceparent": request.trace}
        attributes = {**self._attributes, "sleepserve.request_id": request.request_id}
        span = self._tracer.start_span(
            "replica", self._propagator.extract(above), attributes=attributes
        )
        self._open[request.request_id] = span
        try:
            yield
        finally:
            del self._open[request.request_id]
            span.end()

    # --- what happens ---

    def woke(self, cause: WakeCause, result: WakeResult, seconds: float) -> None:
        super().woke(cause, result, seconds)
        self._tell(self._trace_wake, cause, result, seconds)

    def slept(self, cause: SleepCause, level: int, seconds: float, change: MemoryChange) -> None:
        super().slept(cause, level, seconds, change)
        self._wake = self._early = None

    def restarted(self) -> None:
        super().restarted()
        self._wake = self._early = None

    def wake_phase(self, phase: WakePhase, seconds: float) -> None:
        super().wake_phase(phase, seconds)
        self._phases.append((phase, seconds))

    def restored(self, report: WakeReport) -> None:
        super().restored(report)
        self._tell(self._trace_restore, report)

    def ended(self, course: Course, ending: Ending, now_s: float) -> None:
        super().ended(course, ending, now_s)
        self._tell(self._trace_sequence, course, ending, now_s)

    # --- spans ---

    def _trace_wake(self, cause: WakeCause, result: WakeResult, seconds: float) -> None:
        from opentelemetry.trace import Link, Status, StatusCode

        # Whoever is here while the replica wakes waits for it.
        waiting = list(self._open.values()) if cause is WakeCause.REQUEST else []
        end_ns = self._now_ns()
        begin_ns = end_ns - int(seconds * 1e9)
        attributes = {"sleepserve.wake.cause": cause.value, "sleepserve.wake.result": result.value}
        wake = self._tracer.start_span(
            "wake",
            _under(waiting[0] if waiting else None),
            attributes={**self._attributes, **attributes},
            links=[Link(span.get_span_context()) for span in waiting[1:]],
            start_time=begin_ns,
        )
        phases, self._phases = self._phases, []
        for name, phase_s in phases:  # one after the other
            next_ns = begin_ns + int(phase_s * 1e9)
            self._child(wake, f"wake.{name}", begin_ns, next_ns)
            begin_ns = next_ns
        if result is not WakeResult.OK:
            wake.set_status(Status(StatusCode.ERROR, result.value))
        wake.end(end_ns)
        early, self._early = self._early, None
        if result is WakeResult.OK:
            self._wake = wake
            if early is not None:
                self._trace_copies(wake, *early)

    def _trace_restore(self, report: WakeReport) -> None:
        """The copies go on beside the first requests, so they may end behind their wake, or be told before it."""
        if self._wake is None:
            self._early = report, self._now_ns()
        else:
            self._trace_copies(self._wake, report, self._now_ns())

    def _trace_copies(self, wake: "Span", report: WakeReport, end_ns: int) -> None:
        begin_ns = end_ns - int((report.link_s + report.check_s) * 1e9)
        self._child(wake, "wake.copy", begin_ns, end_ns, copied_bytes=report.copied_bytes)

    def _trace_sequence(self, course: Course, ending: Ending, now_s: float) -> None:
        """What the worker did, as the replica saw it."""
        request = self._open.get(course.sequence_id.rpartition("-")[0])
        if request is None:
            return
        past_ns = self._now_ns() - int(now_s * 1e9)

        def at(seconds: float) -> int:
            return past_ns + int(seconds * 1e9)

        attributes: dict[str, int | list[str]] = {
            "gen_ai.usage.input_tokens": course.prompt_tokens,
            "gen_ai.usage.output_tokens": course.tokens,
            "gen_ai.response.finish_reasons": [ending.value],
        }
        span = self._tracer.start_span(
            "worker",
            _under(request),
            attributes=attributes,
            start_time=at(course.submitted_s),
        )
        if course.started_s is not None:
            span.add_event("started", timestamp=at(course.started_s))
        if course.first_s is not None:
            span.add_event("first token", timestamp=at(course.first_s))
        span.end(at(now_s))

    def _child(self, above: "Span", name: str, begin_ns: int, end_ns: int, **told: int) -> None:
        attributes = {f"sleepserve.{key}": value for key, value in told.items()}
        span = self._tracer.start_span(
            name, _under(above), attributes=attributes, start_time=begin_ns
        )
        span.end(end_ns)


def _under(span: "Span | None"):  # type: ignore[no-untyped-def]
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    return Context() if span is None else set_span_in_context(span, Context())
