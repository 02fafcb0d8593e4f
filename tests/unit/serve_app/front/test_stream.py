"""Merging generations, framing, keep-alives, errors in mid-stream, clients that leave."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from actors.errors import EngineDied, QueueFull, ReplicaFailed, ShuttingDown
from actors.protocol import FinishReason, MessageForm, TokenEvent, TokenLogprob
from serve_app.front.dialects import DONE, frame
from serve_app.front.errors import RequestTimeout
from serve_app.front.stream import (
    COMMENT,
    EventSource,
    HeldResponse,
    collect,
    event_stream,
    text_stream,
    unless_gone,
)
from serve_app.openai.answers import ChatAnswer, CompletionAnswer
from serve_app.openai.requests import parse_chat, parse_completion
from tests.on_loop import on_loop

NEVER_S = 3600.0  # longer than any test
AT_ONCE_S = 0.001


def event(text: str, finish: FinishReason | None = None, index: int = 0) -> TokenEvent:
    return TokenEvent(index, text, (1,), prompt_tokens=3, finish_reason=finish)


class Script:
    """A generation that follows a list: events are given, exceptions raised, Events waited for."""

    def __init__(self, *steps: TokenEvent | BaseException | asyncio.Event) -> None:
        self.steps = steps
        self.begun = False
        self.given = 0
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        self.begun = True
        try:
            for step in self.steps:
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    self.given += 1
                    yield step
        finally:
            self.closed = True


async def aiter_of(source: EventSource) -> AsyncIterator[tuple[int, TokenEvent]]:
    while (item := await source.next()) is not None:
        yield item


def chat_answer(**fields: Any) -> ChatAnswer:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    return ChatAnswer(parse_chat(body), "m", 1)


def text_answer(**fields: Any) -> CompletionAnswer:
    return CompletionAnswer(parse_completion({"prompt": "hi", **fields}, 64), "m", 1)


def stream(
    *generations: AsyncIterator[TokenEvent], answer=None, after_s=NEVER_S, interval_s=NEVER_S
):
    return event_stream(generations, answer or chat_answer(), after_s, interval_s, "r1")


async def happens(what: Callable[[], bool]) -> None:
    for _ in range(1000):
        if what():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


async def read(frames: AsyncIterator[bytes]) -> list[bytes]:
    return [data async for data in frames]


def data_of(data: bytes) -> dict[str, Any]:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert b"\n" not in data[:-2]
    return json.loads(data[6:])


# --- EventSource ---


@on_loop
async def test_source_merges_in_order_of_arrival():
    gate = asyncio.Event()
    slow, fast = Script(gate, event("slow")), Script(event("fast"))
    async with EventSource([aiter(slow), aiter(fast)]) as source:
        assert await source.next() == (1, event("fast"))
        gate.set()
        assert await source.next() == (0, event("slow"))
        assert await source.next() is None
        assert await source.next() is None


@on_loop
async def test_source_error_closes_the_others():
    waiting = Script(event("a"), asyncio.Event())
    async with EventSource([aiter(waiting), aiter(Script(QueueFull("full")))]) as source:
        assert await source.next() == (0, event("a"))
        with pytest.raises(QueueFull, match="full"):
            await source.next()
        assert not waiting.closed
    assert waiting.closed


@on_loop
async def test_source_has_no_more_generated_at_a_time_than_replicas_have_room_for():
    running, most = 0, 0

    async def generation() -> AsyncIterator[TokenEvent]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        yield event("a", FinishReason.STOP)
        running -= 1

    async with EventSource([generation() for _ in range(400)]) as source:
        seen = [item[0] async for item in aiter_of(source)]
    assert sorted(seen) == list(range(400))
    assert (running, most) == (0, 64)


@on_loop
async def test_source_whose_call_is_cancelled_elsewhere_ends():
    async with EventSource([aiter(Script(event("a"), asyncio.CancelledError()))]) as source:
        assert await source.next() == (0, event("a"))
        with pytest.raises(ShuttingDown):
            await source.next()


@on_loop
async def test_source_makes_the_replica_wait_for_a_slow_client():
    eager = Script(*[event("x")] * 1000)
    async with EventSource([aiter(eager)]) as source:
        await source.next()
        for _ in range(1000):
            await asyncio.sleep(0)
        assert eager.given < 1000
    assert eager.closed


@on_loop
async def test_generation_is_read_by_one_task():
    async def picky() -> AsyncIterator[TokenEvent]:
        owner = asyncio.current_task()
        async with asyncio.timeout(NEVER_S):  # must be left by the task that entered it
            for text in "abc":
                yield event(text)
                assert asyncio.current_task() is owner

    async def one(source: EventSource) -> Any:
        return await source.next()

    async with EventSource([picky()]) as source:
        for _ in "abc":
            assert await asyncio.create_task(one(source)) is not None
        assert await source.next() is None


@on_loop
async def test_iterator_that_cannot_be_closed_and_one_that_fails_to():
    class Plain:
        def __init__(self) -> None:
            self.left = 1

        def __aiter__(self):
            return self

        async def __anext__(self) -> TokenEvent:
            if self.left == 0:
                raise StopAsyncIteration
            self.left -= 1
            return event("a")

    class Sour(Plain):
        async def aclose(self) -> None:
            raise RuntimeError("cannot close")

    async with EventSource([Plain()]) as source:
        assert await source.next() == (0, event("a"))
        assert await source.next() is None
    async with EventSource([Sour()]) as source:
        assert await source.next() == (0, event("a"))
        with pytest.raises(RuntimeError, match="cannot close"):
            await source.next()


@pytest.mark.parametrize("unread", [0, 1000])  # 1000: its events wait for room
@on_loop
async def test_failure_while_closing_is_logged(caplog, unread):
    async def stubborn() -> AsyncIterator[TokenEvent]:
        try:
            for _ in range(1 + unread):
                yield event("a")
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("broke while closing")

    async with EventSource([stubborn()]) as source:
        await source.next()
    assert "broke while closing" in caplog.text


# --- event_stream ---


@on_loop
async def test_stream_is_role_pieces_finish_done():
    script = Script(event("Hel"), event(""), event("lo", FinishReason.STOP))
    frames = await read(stream(aiter(script)))
    assert frames[-1] == DONE
    choices = [data_of(data)["choices"][0] for data in frames[:-1]]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]


def test_frame_is_one_line_for_every_kind_of_client():
    text = "a\u2028b\u2029c\x85d\r\ne\n\nf\x0bg"
    data = frame({"text": text})
    assert data.decode().splitlines() == [data.decode().rstrip("\n"), ""]
    assert data_of(data) == {"text": text}


def test_frame_refuses_what_json_has_not():
    with pytest.raises(ValueError, match="Out of range"):
        frame({"logprob": float("-inf")})


@pytest.mark.parametrize("include_usage", [False, True])
@on_loop
async def test_keep_alives_until_the_first_event(include_usage):
    gate = asyncio.Event()
    answer = chat_answer(stream_options={"include_usage": include_usage})
    script = Script(gate, event("a"), event("b", FinishReason.STOP))
    frames = stream(aiter(script), answer=answer, after_s=AT_ONCE_S, interval_s=AT_ONCE_S)
    for _ in range(3):
        data = await anext(frames)
        if include_usage:
            assert data_of(data)["choices"] == []
            assert data_of(data)["usage"] is None
        else:
            assert data == COMMENT
    gate.set()
    rest = [data for data in await read(frames) if data != COMMENT]
    chunks = [data_of(data) for data in rest[:-1]]
    texts = [c["delta"].get("content") for chunk in chunks for c in chunk["choices"]]
    assert texts == ["", "a", "b"]
    assert rest[-1] == DONE


@on_loop
async def test_no_keep_alive_before_its_time():
    gate = asyncio.Event()
    frames = stream(aiter(Script(gate, event("a", FinishReason.STOP))), interval_s=AT_ONCE_S)
    first = asyncio.ensure_future(anext(frames))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not first.done()
    gate.set()
    assert data_of(await first)["choices"]
    await frames.aclose()


@on_loop
async def test_keep_alives_while_a_stream_stands_still():
    gate = asyncio.Event()
    script = Script(event("a"), gate, event("b", FinishReason.STOP))
    frames = stream(aiter(script), interval_s=AT_ONCE_S)
    assert [data_of(await anext(frames))["choices"][0]["delta"] for _ in range(2)] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
    ]
    assert await anext(frames) == COMMENT
    assert await anext(frames) == COMMENT
    gate.set()
    assert (await read(frames))[-1] == DONE


@on_loop
async def test_keep_alives_tell_of_the_usage_so_far():
    gate = asyncio.Event()
    asked = {"include_usage": True, "continuous_usage_stats": True}
    answer = chat_answer(stream_options=asked)
    script = Script(replace(event("a"), token_ids=(1, 2)), gate, event("b", FinishReason.STOP))
    frames = stream(aiter(script), answer=answer, interval_s=AT_ONCE_S)
    for _ in range(2):
        told = data_of(await anext(frames))["usage"]
    keep_alive = data_of(await anext(frames))
    assert keep_alive["choices"] == []
    assert keep_alive["usage"] == told
    assert told["completion_tokens"] == 2
    gate.set()
    await read(frames)


@pytest.mark.parametrize(
    ("tools", "opening", "closing"), [("qwen", "<tool_call>", "</tool_call>"), ("llama", "", "")]
)
@on_loop
async def test_keep_alives_while_a_tool_call_is_written(tools, opening, closing):
    words = 10_000

    async def generation() -> AsyncIterator[TokenEvent]:
        begin = event(f'{opening}{{"name": "write", "arguments": {{"text": "')
        yield replace(begin, form=MessageForm(tools=tools))
        for _ in range(words):
            await asyncio.sleep(0)
            yield event("word ")
        yield event(f'"}}}}{closing}', FinishReason.STOP)

    answer = chat_answer(tools=[{"type": "function", "function": {"name": "write"}}])
    frames = await read(stream(generation(), answer=answer, interval_s=AT_ONCE_S))
    assert frames.count(COMMENT) > 1
    role, *rest = [data_of(data) for data in frames if data not in (COMMENT, DONE)]
    assert role["choices"][0]["delta"]["role"] == "assistant"
    calls = [call for chunk in rest for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"text": "word " * words}


@on_loop
async def test_error_before_the_first_chunk_is_raised():
    with pytest.raises(QueueFull):
        await read(stream(aiter(Script(QueueFull("full", 3)))))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDied("the engine died"), "engine_dead"),
        (RuntimeError("secret"), "internal_error"),
        (TimeoutError("its own"), "internal_error"),
    ],
)
@on_loop
async def test_error_in_mid_stream_is_an_event(error, code):
    script = Script(event("a"), error)
    frames = await read(stream(aiter(script)))
    assert data_of(frames[-2])["error"]["code"] == code
    assert b"secret" not in frames[-2]
    assert frames[-1] == DONE


@on_loop
async def test_error_after_a_keep_alive_is_an_event():
    gate = asyncio.Event()
    frames = stream(aiter(Script(gate, QueueFull("full"))), after_s=AT_ONCE_S)
    assert await anext(frames) == COMMENT
    gate.set()
    rest = await read(frames)
    assert data_of(rest[0])["error"]["code"] == "queue_full"
    assert rest[1:] == [DONE]


@on_loop
async def test_stream_that_ends_without_a_finish_reason_is_an_error():
    frames = await read(stream(aiter(Script(event("a")))))
    assert data_of(frames[-2])["error"]["code"] == "replica_failed"
    with pytest.raises(ReplicaFailed):
        await read(stream(aiter(Script())))


@on_loop
async def test_closing_a_stream_closes_the_generation():
    script = Script(event("a"), asyncio.Event())
    frames = stream(aiter(script))
    await anext(frames)
    await frames.aclose()
    assert script.closed


# --- whole answers and plain text ---


def anything(event: TokenEvent) -> None:
    """There is room."""


@on_loop
async def test_collect_waits_for_all():
    scripts = [Script(event(text, FinishReason.LENGTH)) for text in ("a", "b")]
    answer = text_answer(prompt=["x", "y"])
    await collect([aiter(script) for script in scripts], answer, NEVER_S, anything)
    whole = json.loads(answer.written())
    assert [choice["text"] for choice in whole["choices"]] == ["a", "b"]
    assert whole["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 2,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@on_loop
async def test_cached_tokens_of_a_prompt_are_those_of_its_first_continuation():
    begun = TokenEvent(0, "", (), 300)
    scripts = [
        Script(
            begun,
            *(
                replace(event("a", FinishReason.LENGTH, index), cached_tokens=found)
                for index, found in told
            ),
        )
        for told in ([(0, 256), (1, 288)], [(1, 288), (0, 32)])
    ]
    answer = text_answer(prompt=["x", "y"], n=2)
    await collect([aiter(script) for script in scripts], answer, NEVER_S, anything)
    usage = json.loads(answer.written())["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 256 + 32}


def with_logprobs(count: int, finish: FinishReason | None = None) -> TokenEvent:
    entries = tuple(
        TokenLogprob(i, f"t{i}", b"t%d" % i, -0.5 * i, (TokenLogprob(7, "é", "é".encode(), -0.25),))
        for i in range(count)
    )
    return TokenEvent(0, "text", tuple(range(count)), 3, finish, logprobs=entries)


@pytest.mark.parametrize("count", [0, 1, 256, 257, 1000])
@pytest.mark.parametrize(
    "answer_of",
    [lambda: chat_answer(logprobs=True, top_logprobs=1), lambda: text_answer(logprobs=1)],
    ids=["chat", "completion"],
)
def test_whole_answer_is_the_same_in_parts_of_any_size(
    answer_of: Callable[[], ChatAnswer | CompletionAnswer],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def written() -> dict[str, Any]:
        answer = answer_of()
        answer.add(0, with_logprobs(count, FinishReason.STOP))
        found: dict[str, Any] = json.loads(answer.written())
        del found["id"]
        return found

    in_parts = written()
    monkeypatch.setattr("serve_app.openai.answers._AT_A_TIME", 10**6)
    assert in_parts == written()
    ((choice,), usage) = in_parts["choices"], in_parts["usage"]
    logprobs = choice["logprobs"]
    tokens = logprobs.get("tokens") or [each["token"] for each in logprobs.get("content", ())]
    assert tokens == [f"t{i}" for i in range(count)]
    assert usage["completion_tokens"] == count


def test_largest_part_of_an_answer_is_written_in_milliseconds() -> None:
    """json keeps the interpreter's lock, and the event loop waits."""
    longest = 0

    def dumps(value: object, **options: Any) -> str:
        nonlocal longest
        text = encode(value, **options)
        longest = max(longest, len(text))
        return text

    answer = chat_answer(logprobs=True, top_logprobs=1)
    answer.add(0, with_logprobs(5000, FinishReason.STOP))
    encode = json.dumps
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("serve_app.openai.growing.json.dumps", dumps)
        whole = answer.written()
    assert longest < len(whole) / 15


@on_loop
async def test_collect_ends_where_there_is_no_more_room():
    script = Script(with_logprobs(3), with_logprobs(3), asyncio.Event())

    def admit(event: TokenEvent) -> None:
        if script.given == 2:
            raise QueueFull("full")

    with pytest.raises(QueueFull):
        await collect([aiter(script)], text_answer(logprobs=1), NEVER_S, admit)
    assert script.closed


@on_loop
async def test_collect_gives_up_in_the_end():
    script = Script(event("a"), asyncio.Event())
    with pytest.raises(RequestTimeout, match="request_timeout_s"):
        await collect([aiter(script)], text_answer(), AT_ONCE_S, anything)
    assert script.closed


@on_loop
async def test_collect_tells_its_own_timeout_from_a_generation_s():
    with pytest.raises(TimeoutError, match="theirs"):
        await collect([aiter(Script(TimeoutError("theirs")))], text_answer(), NEVER_S, anything)


@on_loop
async def test_collect_refuses_half_an_answer():
    with pytest.raises(ReplicaFailed):
        await collect([aiter(Script(event("a")))], text_answer(), NEVER_S, anything)


@on_loop
async def test_text_stream_begins_with_the_prompt():
    script = Script(event(""), event("é"), event("b", FinishReason.STOP))
    chunks = await read(text_stream([aiter(script)], text_answer(), "hi "))
    assert [chunk.decode() for chunk in chunks] == ["hi ", "é", "b"]


# --- the response ---


class Wire:
    """The two ends of an ASGI connection whose request has been read."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def until(self, count: int) -> None:
        await happens(lambda: len(self.sent) >= count)


@on_loop
async def test_response_holds_its_status_line():
    wire, gate = Wire(), asyncio.Event()

    async def body():
        await gate.wait()
        yield b"a"

    call = asyncio.create_task(
        HeldResponse(body(), "text/event-stream")({}, wire.receive, wire.send)
    )
    for _ in range(20):
        await asyncio.sleep(0)
    assert wire.sent == []
    gate.set()
    await call
    assert [message.get("body") for message in wire.sent] == [None, b"a", b""]
    headers = dict(wire.sent[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"


@on_loop
async def test_response_without_a_body_is_complete():
    async def body():
        return
        yield b""

    wire = Wire()
    await HeldResponse(body(), "text/plain")({}, wire.receive, wire.send)
    assert [message["type"] for message in wire.sent] == [
        "http.response.start",
        "http.response.body",
    ]


@on_loop
async def test_answer_to_head_ends_with_its_headers():
    begun = False

    async def body():
        nonlocal begun
        begun = True
        await asyncio.Event().wait()
        yield b"a"

    wire = Wire()
    response = HeldResponse(body(), "text/event-stream")
    await response({"method": "HEAD"}, wire.receive, wire.send)
    assert not begun
    start, end = wire.sent
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert dict(start["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert end == {"type": "http.response.body", "body": b"", "more_body": False}


@on_loop
async def test_response_leaves_an_early_error_to_the_caller():
    async def body():
        raise QueueFull("full")
        yield b""

    wire = Wire()
    with pytest.raises(QueueFull):
        await HeldResponse(body(), "text/plain")({}, wire.receive, wire.send)
    assert wire.sent == []


@pytest.mark.parametrize("after_first", [False, True])
@on_loop
async def test_client_that_leaves_closes_the_generation(after_first):
    wire = Wire()
    script = Script(event("a"), asyncio.Event()) if after_first else Script(asyncio.Event())
    response = HeldResponse(stream(aiter(script)), "text/event-stream")
    call = asyncio.create_task(response({}, wire.receive, wire.send))
    await (wire.until(3) if after_first else happens(lambda: script.begun))
    wire.gone.set()
    with pytest.raises(ClientDisconnect):
        await call
    assert script.closed
    assert bool(wire.sent) is after_first


@on_loop
async def test_client_that_leaves_while_we_send():
    wire = Wire()
    script = Script(event("a"), asyncio.Event())

    async def blocked(message):
        await asyncio.Event().wait()

    response = HeldResponse(stream(aiter(script)), "text/event-stream")
    call = asyncio.create_task(response({}, wire.receive, blocked))
    await happens(lambda: script.given > 0)
    wire.gone.set()
    with pytest.raises(ClientDisconnect):
        await call
    assert script.closed


@on_loop
async def test_cancelled_server_closes_the_generation():
    wire = Wire()
    script = Script(event("a"), asyncio.Event())
    response = HeldResponse(stream(aiter(script)), "text/event-stream")
    call = asyncio.create_task(response({}, wire.receive, wire.send))
    await wire.until(3)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert script.closed


@on_loop
async def test_unless_gone_gives_the_result_or_the_error():
    async def good() -> int:
        return 7

    async def bad() -> int:
        raise QueueFull("full")

    assert await unless_gone(Wire().receive, good()) == 7
    with pytest.raises(QueueFull):
        await unless_gone(Wire().receive, bad())


def test_work_that_fails_as_it_is_cancelled_is_no_unretrieved_exception(caplog):
    """Serve cancels a request and its call to the replica at once."""

    @on_loop
    async def cancelled_as_it_fails():
        async def bad() -> int:
            call.cancel()
            raise ShuttingDown("the replica gave the request up", 1.0)

        call = asyncio.create_task(unless_gone(Wire().receive, bad()))
        with pytest.raises(asyncio.CancelledError):
            await call

    cancelled_as_it_fails()
    gc.collect()
    assert caplog.text == ""


@on_loop
async def test_connection_that_breaks_counts_as_gone():
    async def broken():
        raise RuntimeError("the proxy cancelled its message stream")

    script = Script(asyncio.Event())
    with pytest.raises(ClientDisconnect):
        await HeldResponse(stream(aiter(script)), "text/event-stream")({}, broken, Wire().send)
