"""Orders and requests in any order: nothing gets a 5xx but what is held asleep, and every answer is right."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.e2e.puzzles import Puzzle
from tests.e2e.serve_process import ServeProcess

pytestmark = pytest.mark.slow

MODEL = "tiny"
ORDERS = 15  # of each sequence
SEQUENCES = 30
READS = ("/health", "/ping", "/is_sleeping", "/replicas", "/load", "/metrics", "/status",
         "/v1/models", f"/v1/models/{MODEL}", "/tokenizer_info", "/version", "/openapi.json")  # fmt: skip
WRONG: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("/sleep", {"level": 3}, 400),
    ("/sleep", {"levle": 1}, 400),
    ("/sleep", {"mode": "now"}, 400),
    ("/sleep", {"model": "nobody"}, 404),
    ("/wake_up", {"tags": ["everything"]}, 400),
    ("/wake_up", {"hold": True}, 400),
    ("/scaleout", {"replicas": 33}, 400),
    ("/scalein", {"replicas": -1}, 400),
    ("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 10**6}, 400),
    ("/v1/completions", {"model": "nobody", "prompt": "x"}, 404),
    ("/v1/chat/completions", {"model": MODEL, "messages": []}, 400),
    ("/tokenize", {"model": MODEL}, 400),
)


class Orders(RuleBasedStateMachine):
    """The server beside what it should be: asleep or not, held or not."""

    def __init__(self, server: ServeProcess, puzzles: tuple[Puzzle, ...]) -> None:
        super().__init__()
        self._server = server
        self._puzzles = puzzles
        self._asleep = self._held = False

    @initialize()
    def begin(self) -> None:
        self._server.wake_up()

    @rule(
        level=st.sampled_from([1, 2]),
        mode=st.sampled_from(["wait", "abort", "keep"]),
        hold=st.booleans(),
    )
    def sleep(self, level: int, mode: str, hold: bool) -> None:
        told = self._server.sleep(level=level, mode=mode, hold=hold)
        assert told["state"] == "asleep"
        self._asleep, self._held = True, self._held or hold

    @rule()
    def wake_up(self) -> None:
        assert self._server.wake_up()["state"] == "awake"
        self._asleep = self._held = False

    @rule(which=st.integers(0, 7), stream=st.booleans())
    def ask(self, which: int, stream: bool) -> None:
        puzzle = self._puzzles[which]
        response = self._server.post("/v1/completions", **asked(puzzle), stream=stream)
        if self._held:
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
            return
        assert response.status_code == 200, response.text
        text = text_of(response.iter_lines()) if stream else response.json()["choices"][0]["text"]
        assert text == puzzle.answer
        self._asleep = False

    @rule(which=st.integers(0, 7), level=st.sampled_from([1, 2]))
    def freeze_an_answer(self, which: int, level: int) -> None:
        """Asleep in the middle of an answer, and awake again: the rest of it comes."""
        if self._held:
            return
        puzzle = self._puzzles[which]
        body = asked(puzzle) | {"stream": True}
        with self._server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            first = next(lines)
            assert self._server.sleep(mode="keep", level=level)["state"] == "asleep"
            self.wake_up()
            assert text_of([first, *lines]) == puzzle.answer

    @rule(which=st.integers(0, 7), read=st.integers(0, 400))
    def leave_an_answer(self, which: int, read: int) -> None:
        body = asked(self._puzzles[which]) | {"stream": True, "n": 3}
        with self._server.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == (503 if self._held else 200)
            seen = 0
            for piece in response.iter_raw():
                seen += len(piece)
                if seen >= read:
                    break
        self._server.wait_until_free(MODEL)
        self._asleep = self._held

    @rule(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
    def there_and_back(self, text: str) -> None:
        found = self._server.post("/tokenize", model=MODEL, prompt=text, add_special_tokens=False)
        assert found.status_code == 200, found.text
        back = self._server.post("/detokenize", model=MODEL, tokens=found.json()["tokens"])
        assert back.json() == {"prompt": text}

    @rule(path=st.sampled_from(READS))
    def read(self, path: str) -> None:
        assert self._server.http.get(path).status_code == 200

    @rule(wrong=st.sampled_from(WRONG))
    def err(self, wrong: tuple[str, dict[str, Any], int]) -> None:
        path, body, status = wrong
        response = self._server.post(path, **body)
        assert (response.status_code, response.json()["error"].keys()) == (
            status, {"message", "type", "param", "code"},
        ), response.text  # fmt: skip

    @rule(direction=st.sampled_from(["/scaleout", "/scalein"]))
    def scale_to_what_is_there(self, direction: str) -> None:
        response = self._server.post(direction, replicas=1)
        assert response.status_code == 200, response.text
        assert response.json()["target"] == 1

    @invariant()
    def is_as_asked(self) -> None:
        (replica,) = self._server.get("/replicas")["models"][MODEL]["replicas"]
        assert (replica["state"], replica["held"]) == (
            "asleep" if self._asleep else "awake",
            self._held,
        )

    def teardown(self) -> None:
        self._server.wake_up()


def asked(puzzle: Puzzle) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": puzzle.prompt,
        "max_tokens": puzzle.max_tokens,
        "temperature": 0,
    }


def text_of(lines: Iterable[str]) -> str:
    """Of a whole stream."""
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]", events[-1]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert choices[-1]["finish_reason"] in ("length", "stop")
    return "".join(choice["text"] for choice in choices)


def test_any_sequence_of_orders_and_requests(
    tiny: ServeProcess, puzzles: tuple[Puzzle, ...]
) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: Orders(tiny, puzzles),
        settings=settings(
            max_examples=SEQUENCES,
            stateful_step_count=ORDERS,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
