"""/tokenize, /detokenize and /tokenizer_info, and the tokenizer behind them."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from actors.checkpoints.source import Hub, ModelSource
from actors.errors import InvalidRequest, Unavailable
from actors.protocol import ChatPrompt, Prompt, ReplicaState
from actors.text.codec import TextCodec
from actors.text.message_form import ChatConfig
from serve_app.config.http import HttpSettings
from serve_app.front import tokenize as tokenizing
from serve_app.front.app import build_asgi
from serve_app.models.tokenizer import LocalTokenizer
from tests.fakes import FakeModel, FakeTokenizer
from tests.unit.asgi_client import client_of

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=[[], [ReplicaState.ASLEEP]], ids=["no replica", "asleep"])
def model(request: pytest.FixtureRequest) -> FakeModel:
    return FakeModel(states=request.param)


@pytest.fixture
def client(model: FakeModel) -> Iterator[TestClient]:
    with client_of(build_asgi({"fake": model}, HttpSettings())) as client:
        yield client
    assert model.requests == []
    assert model.orders == []
    assert not model.asked_for_status


def test_tokenize_text(client, model):
    response = client.post("/tokenize", json={"model": "fake", "prompt": "hé"})
    assert response.json() == {
        "count": 2,
        "max_model_len": None,
        "tokens": [104, 233],
        "token_strs": None,
    }
    response = client.post(
        "/tokenize", json={"prompt": "", "add_special_tokens": False, "return_token_strs": True}
    )
    assert (response.json()["count"], response.json()["token_strs"]) == (0, [])
    tokenizer = model.info.tokenizer
    assert isinstance(tokenizer, FakeTokenizer)
    assert tokenizer.asked == [("hé", None), ("", False)]


def test_tokenize_messages(client, model):
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {
        "messages": HI,
        "tools": tools,
        "add_generation_prompt": False,
        "return_token_strs": True,
    }
    response = client.post("/tokenize", json=body)
    assert response.json()["token_strs"] == ["h", "i"]
    expected = ChatPrompt(tuple(HI), tuple(tools), add_generation_prompt=False)
    assert model.info.tokenizer.asked == [(expected, None)]


def test_detokenize(client):
    response = client.post("/detokenize", json={"model": "fake", "tokens": [104, 105]})
    assert response.json() == {"prompt": "hi"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_tokenizer_info(client):
    info = client.get("/tokenizer_info").json()
    assert info == {
        "eos_token": "</s>",
        "bos_token": None,
        "pad_token": None,
        "chat_template": "{{}}",
    }
    assert client.get("/tokenizer_info?model=fake").json() == info


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 1}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": "hi"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "gpt"}, 404, "model"),
    ],
)
def test_refusals_are_openai_s(client, path, body, status, param):
    response = client.post(path, json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


def test_no_checkpoint_here_is_503(client, model):
    model.info.tokenizer.fail = Unavailable("no tokenizer")
    answers = [
        client.post("/tokenize", json={"prompt": "a"}),
        client.post("/detokenize", json={"tokens": [1]}),
        client.get("/tokenizer_info"),
    ]
    assert [answer.status_code for answer in answers] == [503] * 3


# --- over a checkpoint ---


def test_local_tokenizer_is_the_replica_s(tiny_checkpoint: Path) -> None:
    codec = TextCodec.load(tiny_checkpoint)

    async def scenario() -> None:
        tokenizer = LocalTokenizer(ModelSource(id=str(tiny_checkpoint)))
        prompt = ChatPrompt(tuple(HI))
        chat, text = await asyncio.gather(
            tokenizer.encode(prompt, None), tokenizer.encode("Hello, wörld 👋", None)
        )
        assert chat == codec.encode_prompt(prompt)
        assert await tokenizer.decode(text) == "Hello, wörld 👋"
        assert "<|im_start|>user" in await tokenizer.decode(chat)  # special tokens, too
        assert "".join(await tokenizer.texts(await tokenizer.encode("a b", None))) == "a b"
        assert await tokenizer.encode("", None) == ()
        own = LocalTokenizer(
            ModelSource(id=str(tiny_checkpoint)),
            ChatConfig(template="{% for m in messages %}{{ m.content }}!{% endfor %}"),
        )
        assert await own.decode(await own.encode(prompt, None)) == "hi!"
        info = await tokenizer.describe()
        assert (info["eos_token"], info["pad_token"]) == ("<|im_end|>", "<|endoftext|>")
        assert "<|im_start|>" in str(info["chat_template"])
        with pytest.raises(InvalidRequest, match="tokens holds 1000000"):
            await tokenizer.decode([1_000_000])

    asyncio.run(scenario())


def test_two_texts_at_a_time_are_tokenised_however_many_models_there_are(monkeypatch) -> None:
    gate, threads = threading.Event(), set()

    class Codec:
        def tokenize(self, prompt: Prompt, *, add_special_tokens: bool | None) -> tuple[int, ...]:
            threads.add(threading.get_ident())
            gate.wait()
            return (len(prompt),)

    monkeypatch.setattr("serve_app.models.tokenizer._load", lambda *_: Codec())

    async def scenario() -> None:
        tokenizers = [LocalTokenizer(ModelSource(id=name)) for name in "abc"]
        for tokenizer in tokenizers:
            await tokenizer._loaded()
        asked = [asyncio.create_task(each.encode("text", None)) for each in tokenizers * 3]
        await asyncio.sleep(0)  # all of them stand in the queue
        gate.set()
        assert await asyncio.gather(*asked) == [(4,)] * 9

    asyncio.run(scenario())
    assert len(threads) <= 2


@pytest.mark.parametrize("hub", [Hub.PATH, Hub.MODELSCOPE])
def test_local_tokenizer_without_a_checkpoint(hub: Hub, tmp_path: Path) -> None:
    identity = str(tmp_path / "none") if hub is Hub.PATH else "owner/name"
    source = ModelSource(hub=hub, id=identity, models_dir=str(tmp_path))

    async def scenario() -> None:
        with pytest.raises(Unavailable):
            await LocalTokenizer(source).encode("hi", None)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"prompt": "x" * 1_000_000}),
        ("/detokenize", {"tokens": [0] * 524_288}),  # each six bytes of JSON
    ],
)
def test_answer_that_does_not_fit_a_message_is_refused(client, path, fields):
    response = client.post(path, json=fields)
    assert response.status_code == 400
    assert "ask for parts" in response.json()["error"]["message"]


def test_more_tokens_than_the_text_of_a_message_has_are_not_decoded(client, model, monkeypatch):
    monkeypatch.setattr(model.info.tokenizer, "decode", lambda _: pytest.fail("decoded"))
    response = client.post("/detokenize", json={"tokens": [65] * (2**19 + 1)})
    assert response.status_code == 400
    assert "must have at most 524288 elements" in response.json()["error"]["message"]


def test_answers_are_written_beside_the_event_loop(client, monkeypatch):
    threads = set()

    def note(answer):
        threads.add(threading.current_thread().name.startswith("asyncio_"))
        return write(answer)

    write = tokenizing._answer
    monkeypatch.setattr("serve_app.front.tokenize._answer", note)
    client.post("/tokenize", json={"prompt": "hi"})
    client.post("/detokenize", json={"tokens": [104]})
    assert threads == {True}


def test_answer_that_is_written_in_pieces_is_the_whole():
    ids, texts = list(range(10_000)), [chr(65 + i % 60) for i in range(10_000)]
    answer = {"n": None, "ids": tuple(ids), "texts": texts, "none": [], "text": '"é👋\n' * 100_000}
    expected = {"n": None, "ids": ids, "texts": texts, "none": [], "text": '"é👋\n' * 100_000}
    assert json.loads(tokenizing._answer(answer).body) == expected
