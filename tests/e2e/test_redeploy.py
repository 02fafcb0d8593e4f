"""`serve deploy` with a changed setting, or other models, while clients ask."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from actors.checkpoints.making import write_checkpoint
from tests.e2e.puzzles import Puzzle
from tests.e2e.serve_process import ServeProcess, wait_until, wait_until_gone

pytestmark = pytest.mark.slow

MODEL = "tiny"
CLIENTS = 4
HOLDER = "weights:WeightHolder"
REPLICA = f"llm:model:{MODEL}"

_DASHBOARD = re.compile(r"dashboard at \S*?(http://[\d.]+:\d+)")


def deploy(server: ServeProcess, config: str) -> None:
    """`serve deploy`, which has Ray's dashboard do it."""
    dashboard = _DASHBOARD.search(server.log())
    assert dashboard is not None
    server.serve_command("deploy", "--address", dashboard[1], config=config)


def changed(config: str, **engine: Any) -> str:
    """With another setting of the engine, which the holder's application does not hear of."""
    parsed = yaml.safe_load(config)
    (llm,) = (app for app in parsed["applications"] if app["name"] == "llm")
    (model,) = llm["args"]["models"]  # maybe the very same object as the holder's
    llm["args"] = llm["args"] | {"models": [model | {"engine": model["engine"] | engine}]}
    text: str = yaml.safe_dump(parsed)
    return text


# Of Serve's controller, about replicas that need no restart.
_UPDATED = "Updating 1 replicas of Deployment(name='model:second', app='llm')"


class Clients:
    """Ask one puzzle after the other, streamed and not, and keep what went wrong."""

    def __init__(self, server: ServeProcess, puzzles: tuple[Puzzle, ...]) -> None:
        self.answered = 0
        self.wrong: list[str] = []
        self._server = server
        self._puzzles = puzzles
        self._enough = threading.Event()

    @contextmanager
    def asking(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._ask, number) for number in range(CLIENTS)]
            try:
                yield
            finally:
                self._enough.set()
        for client in clients:
            client.result()

    def _ask(self, number: int) -> None:
        url = f"{self._server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            for puzzle in cycle(self._puzzles[number:] + self._puzzles[:number]):
                if self._enough.is_set():
                    return
                try:
                    text = _answer(client, puzzle, stream=number % 2 == 0)
                except (openai.OpenAIError, httpx.HTTPError) as exc:
                    self.wrong.append(f"{type(exc).__name__}: {exc}")
                else:
                    self.answered += 1
                    if text != puzzle.answer:
                        self.wrong.append(text)


def _answer(client: openai.OpenAI, puzzle: Puzzle, stream: bool) -> str:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": puzzle.prompt,
        "max_tokens": puzzle.max_tokens,
        "temperature": 0,
    }
    if stream:
        return "".join(c.choices[0].text for c in client.completions.create(**asked, stream=True))
    return str(client.completions.create(**asked).choices[0].text)


def models_of(config: str, *models: dict[str, Any]) -> str:
    """With these models, in both applications."""
    parsed = yaml.safe_load(config)
    for application in parsed["applications"]:
        application["args"] |= {"models": list(models)}
    text: str = yaml.safe_dump(parsed)
    return text


def test_models_come_change_and_go_while_another_streams(
    servers: Any, tiny: ServeProcess, tmp_path: Path, puzzles: tuple[Puzzle, ...]
) -> None:
    """A model list as it is edited: `tiny` stays, `second` comes, changes, and goes."""
    stays = tiny.wake_up()["process_id"]
    holder, loads = tiny.actor_pid(HOLDER), tiny.log().count(": published ")
    ((kept, *_), *_) = (a["args"]["models"] for a in yaml.safe_load(tiny.config)["applications"])
    checkpoint = write_checkpoint(tmp_path / "second", "tiny")
    second = kept | {"model_id": "second", "source": {"id": str(checkpoint)}}
    clients = Clients(tiny, puzzles)

    def states() -> dict[str, str]:
        try:
            return tiny.model_states()
        except (httpx.HTTPError, KeyError):
            return {}

    with clients.asking():
        deploy(tiny, models_of(tiny.config, kept, second))
        wait_until(lambda: states() == {MODEL: "loaded", "second": "loaded"}, 120, "it has come")
        assert tiny.log().count(": published ") == loads + 1
        came = tiny.actor_pid("llm:model:second")
        assert came is not None
        deploy(tiny, models_of(tiny.config, kept, second | {"max_ongoing_requests": 3}))
        wait_until(lambda: _UPDATED in tiny.log(), what="it was changed as it runs")
        deploy(tiny, models_of(tiny.config, kept, second | {"generation_config": "none"}))
        wait_until_gone(came, deadline_s=120)
        wait_until(lambda: states() == {MODEL: "loaded", "second": "loaded"}, 120, "it changed")
        assert tiny.log().count(": published ") == loads + 1
        deploy(tiny, models_of(tiny.config, kept))
        wait_until(lambda: states() == {MODEL: "loaded"}, 120, "it is gone")
        wait_until(lambda: "its model is no longer served" in tiny.log(), 60, "its image is gone")
        answered = clients.answered
        wait_until(lambda: clients.answered >= answered + 2 * CLIENTS, what="they ask on")
    assert not clients.wrong
    assert (tiny.actor_pid(REPLICA), tiny.actor_pid(HOLDER)) == (stays, holder)
    assert tiny.log().count(": published ") == loads + 1


def test_redeploy_under_load_loses_no_request_and_loads_nothing_from_disk(
    tiny: ServeProcess, puzzles: tuple[Puzzle, ...]
) -> None:
    before = tiny.wake_up()
    old, worker = before["process_id"], before["worker_process_id"]
    holder = tiny.actor_pid(HOLDER)
    loads = tiny.log().count(": published ")
    clients = Clients(tiny, puzzles)
    with clients.asking():
        wait_until(lambda: clients.answered >= CLIENTS, what="they ask")
        deploy(tiny, changed(tiny.config, max_requests_per_batch=4))
        wait_until_gone(old, worker)
        answered = clients.answered
        wait_until(lambda: clients.answered >= answered + 2 * CLIENTS, what="they ask on")
    assert not clients.wrong
    status = tiny.wake_up()
    assert (status["process_id"] != old, status["weights_from"]) == (True, "image")
    assert tiny.workers() == {status["worker_process_id"]}
    assert tiny.actor_pid(HOLDER) == holder
    assert tiny.log().count(": published ") == loads
