"""`sleepserve status`, `sleep`, `wake` against a front of fake models: tables, JSON, exit codes."""

import asyncio
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Any

import pytest
import uvicorn
from typer.testing import CliRunner, Result

from actors.protocol import (
    CardStatus,
    CardTenant,
    CardWait,
    LastSleep,
    ReplicaState,
    ReplicaStatus,
    SleepCommand,
    SleepMode,
)
from serve_app.cli.main import app
from serve_app.cli.operate import _seconds, _stays, card_lines, order_table, status_table
from serve_app.config.http import HttpSettings
from serve_app.config.keys import read_keys
from serve_app.front.app import build_asgi
from tests.fakes import FakeModel

USER = "user-key-1234567890"
ADMIN = "admin-key-1234567890"


class Front:
    """Two models behind a server of its own."""

    def __init__(self) -> None:
        states = (ReplicaState.AWAKE, ReplicaState.ASLEEP)
        self.model = FakeModel("org/one", states=states)
        self.other = FakeModel("two", states=())
        keys = read_keys(None, None, {"SLEEPSERVE_API_KEYS": USER, "SLEEPSERVE_ADMIN_KEYS": ADMIN})
        served = {"org/one": self.model, "two": self.other}
        config = uvicorn.Config(
            build_asgi(served, HttpSettings(), keys=keys), port=0, log_config=None, lifespan="off"
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)

    @property
    def url(self) -> str:
        (server,) = self.server.servers
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
def front() -> Iterator[Front]:
    front = Front()
    front.thread.start()
    while not front.server.started:
        assert front.thread.is_alive()
    try:
        yield front
    finally:
        front.server.should_exit = True
        front.thread.join()


def run(front: Front, *args: str, key: str | None = ADMIN) -> Result:
    environment = {"SLEEPSERVE_ADMIN_KEY": key}
    return CliRunner().invoke(app, [*args, "--url", front.url], env=environment)


def test_status_shows_every_replica(front: Front) -> None:
    result = run(front, "status")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines() if "replica" in line]
    assert lines[0][:3] == ["model", "replica", "state"]
    assert lines[1][:3] == ["org/one", "replica-0", "awake"]
    assert lines[2][:2] == ["replica-1", "asleep"]
    assert lines[3] == ["two", "no", "replica"]
    assert "as the test wants it" in result.stdout
    assert front.model.orders == []


def test_status_of_a_model_that_is_silent(front: Front) -> None:
    front.model.fail_control = RuntimeError("secret detail")
    result = run(front, "status")
    assert result.exit_code == 0
    assert re.search(r"org/one .*silent .*cannot be asked", result.stdout)


def shared_card(*waiting: CardWait, held_mib: int = 27, seen_s: float = 0.0) -> CardStatus:
    tenants = (
        CardTenant("org/one", "replica-0", held_mib * 2**20, 0, True, 2 * 2**20, 60 * 2**20),
        CardTenant("org/one", "replica-1", 0, 0, awake=False),
    )
    size = 84 * 2**20
    return CardStatus("cpu", size, size, held_mib * 2**20, 0, 0, tenants, waiting, seen_s)


def test_status_has_a_line_for_each_shared_card(front: Front) -> None:
    front.model.card = shared_card()
    assert (
        "27.00 MiB of 84.00 MiB held, awake org/one (KV 2.00 MiB of 60.00 MiB), 1 asleep"
        in " ".join(run(front, "status").stdout.split())
    )


def test_status_tells_who_waits_for_a_card_and_what_ends_it(front: Front) -> None:
    may = CardWait("two", "replica-2", 60 * 2**20, 3.2, 30.0, "org/one may have to make room", 4.3)
    new = CardWait("three", "replica-3", 2**30, 0.5, 30.0, "")
    front.model.card = shared_card(may, new)
    lines = run(front, "status").stdout.splitlines()
    first, second = [line.strip() for line in lines if "waits for" in line]
    assert re.fullmatch(
        r"two waits for 60\.00 MiB, 3\.\d s of 30 s; org/one may have to make room in [34]\.\d s",
        first,
    )
    assert re.fullmatch(r"three waits for 1\.00 GiB, \d+ ms of 30 s", second)


@pytest.mark.parametrize(
    ("slept", "told"),
    [
        (LastSleep("room", "two", 12.0), "went to sleep 12 s ago: idle, for two"),
        (LastSleep("preempted", "two", 300.0), "went to sleep 5 min ago: preempted, for two"),
        (LastSleep("command", "", 12.0), "went to sleep 12 s ago: asked to"),
        (LastSleep("idle", "", 12.0), "went to sleep 12 s ago: idle"),
    ],
)
def test_status_tells_who_was_put_to_sleep_for_whom(
    front: Front, slept: LastSleep, told: str
) -> None:
    front.model.card, front.model.last_sleep = shared_card(), slept
    lines = [line for line in run(front, "status").stdout.splitlines() if "went to sleep" in line]
    assert lines == [f"  org/one {told}"], "the one that is awake is not told of"


def test_of_two_accounts_of_a_card_the_newer_is_shown() -> None:
    old, new = (asdict(shared_card(held_mib=mib, seen_s=mib)) for mib in (27, 28))
    replicas = {
        name: {"device": {"id": "cpu"}, "card": card, "state": "awake", "last_sleep": None}
        for name, card in {"a": new, "b": old}.items()
    }
    (line,) = card_lines({"time": 0.0, "models": {"one": {"replicas": replicas}}})
    assert "28.00 MiB of 84.00 MiB held" in line


def test_status_as_json(front: Front) -> None:
    told = json.loads(run(front, "status", "--json").stdout)
    assert list(told["models"]) == ["org/one", "two"]
    assert set(told["models"]["org/one"]["replicas"]) == {"replica-0", "replica-1"}


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_watch_goes_on_until_interrupted(
    front: Front, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    looks: list[float] = []
    printed: list[int] = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        printed.append(sys.stdout.buffer.getvalue().count(b"org/one"))  # type: ignore[attr-defined]
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("serve_app.cli.operate.time.sleep", pause)
    result = run(front, "status", "--watch", "--interval-s", "0.5", *options)
    assert result.exit_code == 130
    assert looks == [0.5] * 3
    if options:
        assert [list(json.loads(line)["models"]) for line in result.stdout.splitlines()] == [
            ["org/one", "two"]
        ] * 3
    else:  # no terminal: each table below the one before
        assert result.stdout.count("org/one") == 3
        assert printed == [1, 2, 3]


def test_sleep_and_wake(front: Front) -> None:
    slept = run(front, "sleep", "org/one", "--level", "2", "--mode", "abort", "--hold")
    assert slept.exit_code == 0, slept.output
    assert "asleep" in slept.stdout
    woke = run(front, "wake", "org/one", "--json")
    assert woke.exit_code == 0, woke.output
    assert [each["state"] for each in json.loads(woke.stdout)["models"]["org/one"]] == ["awake"] * 2
    assert front.model.orders == [SleepCommand(level=2, mode=SleepMode.ABORT, hold=True), ()]
    assert front.other.orders == []


def test_deep_sleep_is_told_as_such(front: Front) -> None:
    assert "asleep, deep" not in run(front, "sleep", "org/one").stdout
    slept = run(front, "sleep", "org/one", "--deep")
    assert slept.exit_code == 0, slept.output
    assert slept.stdout.count("asleep, deep") == 2
    assert front.model.orders[-1] == SleepCommand(deep=True)


@pytest.mark.parametrize("command", [["status"], ["sleep", "org/one"], ["wake", "org/one"]])
@pytest.mark.parametrize(
    ("key", "told"),
    [
        (None, "HTTP 401: this server needs a key"),
        ("wrong", "SLEEPSERVE_ADMIN_KEY or --api-key"),
        (USER, "HTTP 403: this route needs an admin key"),
    ],
)
def test_key_is_needed(front: Front, command: list[str], key: str | None, told: str) -> None:
    result = run(front, *command, key=key)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert told in result.stderr
    assert front.model.orders == []


def test_key_as_an_option(front: Front) -> None:
    assert run(front, "wake", "two", "--api-key", ADMIN, key=None).exit_code == 0


@pytest.mark.parametrize(
    "args", [["sleep", "none"], ["sleep", "two", "--level", "3"], ["sleep"], ["wake", "none"]]
)
def test_what_is_asked_for_is_wrong(front: Front, args: list[str]) -> None:
    assert run(front, *args).exit_code == 2


def test_no_server_and_no_url(front: Front) -> None:
    gone = CliRunner().invoke(app, ["status", "--url", "http://127.0.0.1:1"])
    assert gone.exit_code == 1
    assert "is the server running?" in gone.stderr
    no_url = CliRunner().invoke(app, ["status", "--url", "127.0.0.1:8000"])
    assert no_url.exit_code == 2
    assert "begins with http://" in no_url.stderr


def test_patience_ends(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    async def drain(command: SleepCommand) -> list[ReplicaStatus]:
        await asyncio.sleep(0.5)
        return []

    monkeypatch.setattr(front.model, "sleep", drain)
    result = run(front, "sleep", "org/one", "--timeout-s", "0.1")
    assert result.exit_code == 1
    assert "did not answer within 0.1 s (--timeout-s)" in result.stderr


def test_status_names_no_option_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.cli.operate._STATUS_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = CliRunner().invoke(app, ["status", "--url", url])
    assert result.exit_code == 1
    assert result.stderr == f"error: {url}/status did not answer within 0.1 s\n"


def test_url_may_be_that_of_openai_clients(front: Front) -> None:
    result = CliRunner().invoke(
        app, ["status", "--url", f"{front.url}/v1/"], env={"SLEEPSERVE_ADMIN_KEY": ADMIN}
    )
    assert result.exit_code == 0


def test_brackets_are_no_markup() -> None:
    silent = {"why_silent": "[red]x", "replicas": {}}
    (cell,) = status_table({"models": {"[bold]m": silent}}).columns[0].cells
    assert str(cell) == "[bold]m"


@pytest.mark.parametrize(
    ("scale", "state", "why"),
    [
        ({"gave_up": True, "why": "64 GiB never fit"}, "failed", "64 GiB never fit"),
        ({"gave_up": False, "why": ""}, "no replica", ""),
        (None, "no replica", ""),
    ],
)
def test_model_that_does_not_start_says_why(
    scale: dict[str, object] | None, state: str, why: str
) -> None:
    model = {"why_silent": None, "replicas": {}, "scale": scale}
    columns = status_table({"models": {"m": model}, "time": 0.0}).columns
    assert [str(cell) for column in columns for cell in column.cells if str(cell)] == (
        [part for part in ("m", state, why) if part]
    )


def test_order_that_reached_nobody_says_so() -> None:
    states = order_table({"m": []}).columns[2].cells
    assert [str(cell) for cell in states] == ["no replica"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0092, "9 ms"), (1.5, "1.5 s"), (75, "75 s"), (600, "10 min"), (10800, "3 h")],
)
def test_seconds(value: float | None, text: str) -> None:
    assert _seconds(value) == text


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).stdout
    # What the installed script asks for while somebody types.
    asked = {
        "_SLEEPSERVE_COMPLETE": "complete_bash",
        "COMP_WORDS": "sleepserve sta",
        "COMP_CWORD": "1",
    }
    result = CliRunner().invoke(app, [], env=asked, prog_name="sleepserve")
    assert result.stdout.split() == ["status"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, ""),
        ({"idle_timeout_s": None}, ""),
        ({"idle_timeout_s": None, "idle_timeout_from": "keep_alive"}, "stays awake (keep_alive)"),
        (
            {"idle_timeout_s": 3600.0, "idle_timeout_from": "keep_alive"},
            "sleeps when quiet for 60 min (keep_alive)",
        ),
        ({"idle_timeout_s": None, "idle_timeout_from": "pin"}, "stays awake (pin)"),
        (
            {"idle_timeout_s": None, "idle_timeout_from": "schedule", "schedule": {"until": None}},
            "stays awake by its schedule",
        ),
        ({"state": "asleep", "idle_timeout_from": "keep_alive"}, ""),
    ],
)
def test_for_how_long_it_stays_awake(fields: dict[str, Any], told: str) -> None:
    replica = {"state": "awake", "idle_timeout_s": 300.0, "idle_timeout_from": "idle_timeout_s"}
    assert _stays(replica | fields) == told


def test_until_when_a_schedule_keeps_it_awake() -> None:
    until = datetime(2026, 11, 23, 18).timestamp()  # here, wherever that is
    replica = {"state": "awake", "idle_timeout_s": None, "idle_timeout_from": "schedule"}
    told = _stays(replica | {"schedule": {"until": until}})
    assert told == "stays awake by its schedule until Mon 18:00"
