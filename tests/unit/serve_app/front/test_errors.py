"""Every error has a status, a code and the headers that go with it."""

import math
import pickle
from collections.abc import Iterator

import pytest

from actors import errors
from serve_app.front.errors import TABLE, RequestTimeout, describe, row_of, unwrap


def subclasses(kind: type[errors.ServingError]) -> Iterator[type[errors.ServingError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ in ("actors.errors", "serve_app.front.errors"):
            yield from subclasses(child)


EVERY_ERROR = sorted(set(subclasses(errors.ServingError)), key=lambda kind: kind.__name__)


def sample(kind: type[errors.ServingError]) -> errors.ServingError:
    if issubclass(kind, errors.InvalidRequest):
        return kind("what is wrong", "top_p")
    if issubclass(kind, errors.Unavailable):
        return kind("not now", 7.2)
    return kind("broken")


@pytest.mark.parametrize("kind", EVERY_ERROR)
def test_error_has_a_row_of_its_own(kind):
    assert kind in TABLE
    assert 400 <= TABLE[kind].status < 600


def test_codes_differ():
    rows = [row for kind, row in TABLE.items() if kind is not errors.ServingError]
    assert len({row.code for row in rows}) == len(rows)


@pytest.mark.parametrize("kind", EVERY_ERROR)
def test_error_survives_pickling_with_its_attributes(kind):
    before = sample(kind)
    after = pickle.loads(pickle.dumps(before))
    assert type(after) is kind
    assert str(after) == str(before)
    assert vars(after) == vars(before)


@pytest.mark.parametrize("kind", EVERY_ERROR)
def test_body_is_openai_s(kind):
    problem = describe(sample(kind), "r1")
    assert set(problem.body) == {"error"}
    assert set(problem.body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(problem.body["error"]["code"], str)
    param = "top_p" if issubclass(kind, errors.InvalidRequest) else None
    assert problem.body["error"]["param"] == param


@pytest.mark.parametrize(
    ("exc", "status", "type_", "code"),
    [
        (errors.InvalidRequest("x"), 400, "invalid_request_error", "invalid_request_error"),
        (
            errors.ContextLengthExceeded("x"),
            400,
            "invalid_request_error",
            "context_length_exceeded",
        ),
        (errors.UnsupportedParameter("x"), 400, "invalid_request_error", "unsupported_parameter"),
        (errors.ModelNotFound("x"), 404, "invalid_request_error", "model_not_found"),
        (errors.PayloadTooLarge("x"), 413, "invalid_request_error", "payload_too_large"),
        (RequestTimeout("x"), 408, "server_error", "request_timeout"),
        (errors.QueueFull("x"), 429, "rate_limit_error", "queue_full"),
        (errors.WakeTimeout("x"), 503, "server_error", "wake_failed"),
        (errors.HeldAsleep("x"), 503, "server_error", "model_asleep"),
        (errors.EngineDied("x"), 500, "server_error", "engine_dead"),
        (errors.WorkerLost("x"), 500, "server_error", "worker_lost"),
        (errors.CannotStart("x"), 500, "server_error", "cannot_start"),
    ],
)
def test_well_known_codes(exc, status, type_, code):
    problem = describe(exc, "r1")
    assert (problem.status, problem.body["error"]["type"]) == (status, type_)
    assert problem.body["error"]["code"] == code


@pytest.mark.parametrize(
    ("retry_after_s", "header"),
    [
        (0, "1"),
        (-3, "1"),
        (1, "1"),
        (1.1, "2"),
        (59.5, "60"),
        (900, "60"),
        (math.inf, "60"),
        (math.nan, "1"),
    ],
)
def test_retry_after_is_a_whole_number_of_seconds(retry_after_s, header):
    assert describe(errors.QueueFull("full", retry_after_s), "r1").headers == {
        "Retry-After": header
    }


def test_only_unavailable_has_retry_after():
    for kind in EVERY_ERROR:
        has_header = "Retry-After" in describe(sample(kind), "r1").headers
        assert has_header is issubclass(kind, errors.Unavailable)


def test_unexpected_error_is_logged_and_not_shown(caplog):
    problem = describe(RuntimeError("password is hunter2"), "req-9")
    assert problem.status == 500
    assert problem.body["error"]["code"] == "internal_error"
    assert "hunter2" not in str(problem.body)
    assert "req-9" in problem.body["error"]["message"]
    assert "req-9" in caplog.text
    assert "hunter2" in caplog.text


def test_caller_s_fault_is_not_logged(caplog):
    describe(errors.InvalidRequest("no"), "r1")
    describe(errors.QueueFull("no"), "r1")
    assert caplog.text == ""


class TaskError(Exception):
    """As ray.exceptions.RayTaskError: the exception of the other process is `cause`."""

    def __init__(self, cause):
        self.cause = cause

    def __str__(self):
        return "Traceback of the worker"


def dual(cause):
    """As RayTaskError.make_dual_exception_instance of Ray 2.60."""
    cause_class = type(cause)

    class Dual(TaskError, cause_class):
        def __init__(self, cause):
            self.cause = cause

        def __getattr__(self, name):
            return getattr(self.cause, name)

    return Dual(cause)


@pytest.mark.parametrize("wrap", [TaskError, dual, lambda exc: TaskError(dual(exc))])
def test_error_of_another_process_is_unwrapped(wrap):
    cause = errors.QueueFull("16 requests wait already", 3.5)
    assert unwrap(wrap(cause)) is cause
    problem = describe(wrap(cause), "r1")
    assert problem.status == 429
    assert problem.body["error"]["message"] == "16 requests wait already"
    assert problem.headers == {"Retry-After": "4"}


def test_dual_error_keeps_the_param():
    problem = describe(dual(errors.ContextLengthExceeded("too long", "max_tokens")), "r1")
    assert problem.body["error"]["param"] == "max_tokens"


def test_unwrap_ends_on_a_circle():
    one, two = TaskError(None), TaskError(None)
    one.cause, two.cause = two, one
    assert unwrap(one) is two


def test_subclass_without_a_row_takes_its_parent_s():
    class Odd(errors.QueueFull):
        pass

    assert row_of(Odd) == TABLE[errors.QueueFull]
