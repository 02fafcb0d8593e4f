"""JSON logs: one id leads from the client through ingress and replica, and no line has a prompt."""

import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
import yaml

from tests.e2e.conftest import Servers, config_with
from tests.e2e.serve_process import ServeProcess, running, wait_until

pytestmark = pytest.mark.slow

MARK = "ouagadougou-prompt-marker"
ASK: dict[str, Any] = {"model": "tiny", "prompt": MARK, "max_tokens": 4}
INGRESS, REPLICA = "/serve/replica_llm_Ingress_", "/serve/replica_llm_model_"


@pytest.fixture(scope="module")
def server(servers: Servers) -> Iterator[ServeProcess]:
    servers.stop()
    config = yaml.safe_load(config_with("tiny_cpu.yaml", sleep={"idle_timeout_s": None}))
    config["logging_config"] = {"encoding": "JSON", "log_level": "DEBUG"}
    with running(yaml.safe_dump(config)) as server:
        server.wait_until_ready()
        yield server


def records(server: ServeProcess, part: str, request_id: str) -> list[dict[str, Any]]:
    """What the logs of that kind, which are JSON to the last whole line, have of a request."""
    texts = [text for path, text in server.logs().items() if part in path]
    assert texts, f"no log {part}"
    lines = [line for text in texts for line in text.rpartition("\n")[0].splitlines()]
    found = [json.loads(line) for line in lines]
    return [record for record in found if record.get("request_id") == request_id]


def wait_for(server: ServeProcess, part: str, request_id: str, *messages: str) -> None:
    """Until each of these is in a line of that request."""

    def all_there() -> bool:
        told = [record["message"] for record in records(server, part, request_id)]
        return all(any(message in line for line in told) for message in messages)

    wait_until(all_there, 20, f"{messages} of {request_id} in {part}", pause_s=0.2)


@pytest.mark.parametrize("given", [None, "order-66/b"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {}),
        ("/v1/completions", {"stream": True}),
        ("/completions", {}),
    ],
)
def test_id_of_a_request_that_wakes_the_model(
    server: ServeProcess, path: str, fields: dict[str, Any], given: str | None
) -> None:
    server.sleep()
    headers = {} if given is None else {"x-request-id": f"{given}{path}{len(fields)}"}
    response = server.http.post(path, json=ASK | fields, headers=headers)
    assert response.status_code == 200, response.text
    assert len(response.headers.get_list("x-request-id")) == 1
    request_id = response.headers["x-request-id"]
    if given is None:
        assert UUID(request_id)
    else:
        assert request_id == headers["x-request-id"]
    wait_for(server, INGRESS, request_id, f"POST {path} 200")
    wait_for(server, REPLICA, request_id, "asleep -> waking", "waking -> awake", "CALL generate OK")


@pytest.mark.parametrize(
    ("fields", "status", "in_replica"),
    [
        ({"max_tokens": 4000}, 400, "refused: ContextLengthExceeded"),
        ({"temperature": MARK}, 400, ""),
        ({"model": "none"}, 404, ""),
    ],
)
def test_id_of_a_request_that_is_refused(
    server: ServeProcess, fields: dict[str, Any], status: int, in_replica: str
) -> None:
    response = server.post("/v1/completions", **(ASK | fields))
    assert response.status_code == status, response.text
    request_id = response.headers["x-request-id"]
    wait_for(server, INGRESS, request_id, f"POST /v1/completions {status}")
    if in_replica:
        wait_for(server, REPLICA, request_id, in_replica)


def test_no_prompt_in_any_log(server: ServeProcess) -> None:
    """Not even at the level DEBUG."""
    for path, fields in (
        ("/v1/completions", ASK | {"echo": True, "logprobs": 1}),
        ("/v1/chat/completions", ASK | {"messages": [{"role": "user", "content": MARK}]}),
        ("/v1/completions", ASK | {"prompt": MARK * 1000}),
        ("/tokenize", ASK),
    ):
        request_id = server.post(path, **fields).headers["x-request-id"]
        wait_for(server, INGRESS, request_id, f"POST {path}")
    for path, text in server.logs().items():
        assert MARK not in text, path
