"""`serve run` on a CUDA device. Standard library and httpx only: a GPU host may lack openai."""

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.card import full_card
from tests.e2e.conftest import Servers
from tests.e2e.deaths import DEATHS, STREAMS, check_nothing_grew, counted
from tests.e2e.serve_process import PROJECT, ServeProcess, wait_until

pytestmark = pytest.mark.gpu

MODEL = "demo"
PROMPT = "The future of artificial intelligence is"
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
CHAT: dict[str, Any] = {**ASK, "messages": [{"role": "user", "content": "Hello"}]}
ALMOST_NOTHING = 16 * 2**20  # bytes; the demo model's weights alone are 48 MB


@pytest.fixture
def card(servers: Servers) -> ServeProcess:
    """The demo model on the card, which sleeps when told to."""
    return servers.get("cuda")


def chat(server: ServeProcess) -> str:
    response = server.post("/v1/chat/completions", **CHAT)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    assert text
    return text


def complete(server: ServeProcess, **changes: Any) -> str:
    response = server.post("/v1/completions", **{**ASK, "prompt": PROMPT, **changes})
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    assert text
    return text


def test_answer_after_a_sleep_is_the_one_before(card: ServeProcess) -> None:
    awake = card.wake_up()
    before = chat(card), complete(card)
    asleep = card.sleep()
    assert awake["mapped_bytes"] >= awake["weights_bytes"] + awake["kv_bytes"]
    assert asleep["mapped_bytes"] == 0
    assert (chat(card), complete(card)) == before
    after = card.wake_up()
    assert (after["sleeps"], after["wakes"]) == (awake["sleeps"] + 1, awake["wakes"] + 1)
    assert after["worker_process_id"] == awake["worker_process_id"]


def test_level_2_loads_again_and_answers_the_same(card: ServeProcess) -> None:
    before = chat(card)
    asleep = card.sleep(level=2)
    assert (asleep["mapped_bytes"], asleep["weights_from"]) == (0, "")
    assert chat(card) == before
    assert card.wake_up()["weights_from"] == "image"


def test_full_card_is_a_503_and_the_replica_recovers(card: ServeProcess) -> None:
    before = complete(card)
    asleep = card.sleep()
    with full_card(ALMOST_NOTHING):
        for answer in (  # each finds what those before it left
            card.post("/v1/completions", **ASK, prompt=PROMPT),
            card.post("/v1/completions", **ASK, prompt=PROMPT, stream=True),
            card.http.post("/wake_up"),
        ):
            assert answer.status_code == 503, answer.text
            assert 0 < int(answer.headers["retry-after"]) <= 60
            error = answer.json()["error"]
            assert error["code"] == "device_memory_short"
            assert "GiB" in error["message"]
        assert card.is_sleeping()
        assert card.http.get("/health").status_code == 200
    assert complete(card) == before
    after = card.wake_up()
    assert after["worker_process_id"] == asleep["worker_process_id"]
    assert after["wakes"] == asleep["wakes"] + 1


def test_worker_killed_twenty_times_under_streams_leaves_nothing_on_the_card(
    card: ServeProcess,
) -> None:
    before = complete(card)
    asleep = card.sleep()
    endless = {**ASK, "prompt": PROMPT, "max_tokens": 2000, "stream": True}
    seen = []
    for _ in range(DEATHS):
        awake = card.wake_up()
        with ExitStack() as responses:
            streams = [
                responses.enter_context(
                    card.http.stream("POST", "/v1/completions", json=endless)
                ).iter_lines()
                for _ in range(STREAMS)
            ]
            assert all(next(lines).startswith("data: ") for lines in streams)
            os.kill(awake["worker_process_id"], signal.SIGKILL)
            assert complete(card) == before  # by the next worker
            endings = [sum('"worker_lost"' in line for line in lines) for lines in streams]
            assert endings == [1] * STREAMS
        card.wait_until_free(MODEL)
        seen.append(counted(card, awake))
    check_nothing_grew(seen)
    after = card.sleep()
    assert after["process_id"] == asleep["process_id"]
    assert after["worker_restarts"] == asleep["worker_restarts"] + DEATHS
    assert after["device"]["free"] >= asleep["device"]["free"] - 64 * 2**20


# Every client of a Ray store may write to all of it; the views that Ray hands out only do not.
FLIP_A_BYTE = """
import ctypes
from pathlib import Path
from ray import serve
from actors.holder.held import ImageRequest
from actors.image import packer
from actors.checkpoints.source import ModelSource

model, checkpoint = sys.argv[1], Path(sys.argv[2])
key = packer.image_key(checkpoint, packer.checkpoint_dtype(checkpoint, "bfloat16"))
request = ImageRequest(model, ModelSource(id=str(checkpoint)), "bfloat16")
holder = serve.get_deployment_handle("WeightHolder", "weights")
grant = holder.acquire.remote(request, key, "somebody").result()
segment = len(grant.refs) // 2
start = ray.get(grant.refs[segment]).__array_interface__["data"][0]
middle = grant.offsets[segment] + grant.manifest.layout.segments[segment].size // 2
ctypes.c_uint8.from_address(start + middle).value ^= 0xFF
print("done", flush=True)
"""


def test_flipped_byte_in_the_store_fails_the_worker_and_no_answer(
    card: ServeProcess,
) -> None:
    before = complete(card)
    asleep = card.sleep()
    checkpoint = PROJECT / "checkpoints" / "demo"
    assert flip_a_byte(card, checkpoint) == "done\n"
    # Nothing has been sent when the checksums are compared, so the worker that comes instead answers.
    assert complete(card) == before
    now = card.wake_up()
    assert now["process_id"] == asleep["process_id"]
    assert now["worker_process_id"] != asleep["worker_process_id"]
    assert now["weights_from"] == "image"  # the holder dropped what was wrong, and loaded anew


def flip_a_byte(server: ServeProcess, checkpoint: Path) -> str:
    with server.driver(FLIP_A_BYTE, MODEL, str(checkpoint)) as driver:
        try:
            return driver.communicate(timeout=60)[0]
        finally:
            driver.kill()


def replicas(server: ServeProcess, path: str) -> list[dict[str, Any]]:
    response = server.http.post(path)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["models"][MODEL]
    return found


def test_two_replicas_share_a_card(servers: Servers) -> None:
    pair = servers.get("cuda pair")

    def both() -> bool:
        return len(replicas(pair, "/wake_up")) == 2

    wait_until(both, what="two replicas", pause_s=0.2)
    for _ in range(2):
        awake = replicas(pair, "/wake_up")
        assert len({replica["worker_process_id"] for replica in awake}) == 2
        alone = {complete(pair) for _ in range(4)}
        # Whoever has fewer requests is asked: this stream keeps one busy, and the other answers.
        # Each has a batch of one, which always rounds alike.
        began_s = time.monotonic()
        stream = {**ASK, "prompt": "Another one", "max_tokens": 2000, "stream": True}
        with pair.http.stream("POST", "/v1/completions", json=stream) as busy:
            lines = busy.iter_lines()
            assert next(lines).startswith("data: ")
            alone.add(complete(pair))
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert len(alone) == 1
        asked_s = time.monotonic() - began_s
        asleep = replicas(pair, "/sleep")
        assert all(replica["idle_s"] < asked_s for replica in asleep), "one was never asked"
        assert [replica["state"] for replica in asleep] == ["asleep", "asleep"]
        assert [replica["mapped_bytes"] for replica in asleep] == [0, 0]
        assert [replica["sleeps"] - replica["wakes"] for replica in asleep] == [0, 0]
