"""What clients see of their connection: request ids, headers, keep-alives, hanging up."""

import asyncio
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk

from actors.errors import EngineDied
from serve_app.config.http import HttpSettings
from serve_app.front.app import build_asgi
from tests.fakes import FakeModel
from tests.on_loop import on_loop
from tests.unit.asgi_client import client_of
from tests.unit.serve_app.front.front import CHAT, CHAT_BODY, HI, TEXT, conforms, scope_of

# --- request ids ---


@pytest.mark.parametrize("given", ["abc", "0f8fad5b-d9cb-469f", "a" * 128, "trace:1/2+3=@x_y.z"])
def test_request_id_is_kept(client, given):
    for path in ("/health", "/nowhere", "/v1/models"):
        assert client.get(path, headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize(
    "given", ["", "a" * 129, "a b", "a;b", "<script>", "a\u00e9".encode("latin-1")]
)
def test_request_id_that_is_not_sane_is_replaced(client, given):
    got = client.get("/health", headers={"x-request-id": given}).headers["x-request-id"]
    assert got != given
    assert len(got) == 32


def test_request_id_header_may_be_left_to_the_proxy(model):
    app = build_asgi({"fake": model}, HttpSettings(), send_request_id=False)
    with client_of(app) as client:
        assert "x-request-id" not in client.get("/health").headers


def test_generations_have_ids_of_their_own(client, model):
    for _ in range(2):
        client.post(CHAT, json=CHAT_BODY, headers={"x-request-id": "same"})
    assert len({request.request_id for request in model.requests}) == 2


# --- connections ---


class Call:
    """One request, seen message by message. `leave` hangs up."""

    def __init__(self, app: Any, path: str, body: object, method: str = "POST") -> None:
        self._body = json.dumps(body).encode()
        self._read = False
        self._gone = asyncio.Event()
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.task = asyncio.create_task(app(scope_of(path, method), self._receive, self._sent.put))

    async def message(self) -> dict[str, Any]:
        return await self._sent.get()

    async def body(self) -> bytes:
        return (await self.message())["body"]

    def silent(self) -> bool:
        return self._sent.empty()

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}


async def reached(model: FakeModel, count: int = 1) -> None:
    for _ in range(1000):
        if len(model.requests) >= count:
            return
        await asyncio.sleep(0)
    raise AssertionError("the request did not reach the model")


@on_loop
async def test_headers_wait_for_the_first_token(model):
    model.gate = asyncio.Event()
    call = Call(build_asgi({"fake": model}, HttpSettings()), CHAT, {**CHAT_BODY, "stream": True})
    await reached(model)
    for _ in range(20):
        await asyncio.sleep(0)
    assert call.silent()
    model.gate.set()
    assert (await call.message())["status"] == 200
    await call.task


@pytest.mark.parametrize("include_usage", [False, True])
@on_loop
async def test_long_wake_is_bridged_by_keep_alives(model, include_usage):
    model.gate = asyncio.Event()
    settings = HttpSettings(keepalive_after_s=0.001, keepalive_interval_s=0.001)
    options = {"include_usage": include_usage}
    body = {**CHAT_BODY, "stream": True, "stream_options": options}
    call = Call(build_asgi({"fake": model}, settings), CHAT, body)
    assert (await call.message())["status"] == 200
    for _ in range(3):
        data = await call.body()
        if include_usage:
            chunk = json.loads(data.removeprefix(b"data: "))
            conforms(ChatCompletionChunk, chunk)
            assert (chunk["choices"], chunk["usage"]) == ([], None)
        else:
            assert data == b": keep-alive\n\n"
    model.gate.set()
    await call.task


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/completions"])
@on_loop
async def test_client_that_leaves_during_a_wake_cancels(model, path, stream):
    model.gate = asyncio.Event()
    app = build_asgi({"fake": model}, HttpSettings())
    prompt = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    call = Call(app, path, {**prompt, "stream": stream})
    await reached(model)
    call.leave()
    await call.task
    assert model.closed == [request.request_id for request in model.requests]
    assert call.silent()


@on_loop
async def test_client_that_leaves_a_stream_cancels_every_prompt(model):
    model.pieces = ("x",) * 100_000
    app = build_asgi({"fake": model}, HttpSettings())
    call = Call(app, TEXT, {"prompt": ["a", "b"], "stream": True})
    assert (await call.message())["status"] == 200
    await call.body()
    call.leave()
    await call.task
    assert sorted(model.closed) == sorted(request.request_id for request in model.requests)
    assert len(model.closed) == 2


@on_loop
async def test_load_counts_what_is_being_answered(model):
    model.gate = asyncio.Event()
    app = build_asgi({"fake": model}, HttpSettings())

    async def load() -> int:
        call = Call(app, "/load", {}, method="GET")
        await call.message()
        return json.loads(await call.body())["server_load"]

    assert await load() == 0
    calls = [Call(app, CHAT, {**CHAT_BODY, "stream": stream}) for stream in (True, False)]
    await reached(model, 2)
    assert await load() == 2
    calls[0].leave()
    await calls[0].task
    assert await load() == 1
    model.gate.set()
    await calls[1].task
    assert await load() == 0


# --- the official client ---


@on_loop
async def test_openai_client(model):
    httpx2 = pytest.importorskip("httpx2")  # what openai 3 is built on
    from openai import APIError, AsyncOpenAI, NotFoundError

    transport = httpx2.ASGITransport(build_asgi({"fake": model}, HttpSettings()))
    async with AsyncOpenAI(
        base_url="http://127.0.0.1:8000/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=transport),
    ) as client:
        assert [card.id async for card in client.models.list()] == ["fake"]
        chat = await client.chat.completions.create(model="fake", messages=HI)
        assert chat.choices[0].message.content == "Hello, world"
        assert chat._request_id
        text = await client.completions.create(model="fake", prompt=["a", "b"], logprobs=1)
        assert [choice.text for choice in text.choices] == ["Hello, world"] * 2
        stream = await client.chat.completions.create(
            model="fake", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        pieces = [c.delta.content for chunk in chunks for c in chunk.choices]
        assert "".join(piece or "" for piece in pieces) == "Hello, world"
        assert chunks[-1].usage.completion_tokens == 3

        with pytest.raises(NotFoundError) as missing:
            await client.chat.completions.create(model="gpt", messages=HI)
        assert missing.value.code == "model_not_found"
        model.fail_later = EngineDied("the engine died")
        stream = await client.chat.completions.create(model="fake", messages=HI, stream=True)
        with pytest.raises(APIError) as broken:
            _ = [chunk async for chunk in stream]
        assert broken.value.code == "engine_dead"
