"""`sleepserve status`, `sleep` and `wake`: what an operator sees and orders, over HTTP.

Results go to stdout, everything else to stderr. Exit codes: 0 done; 1 no server, or one that refuses or
fails; 2 what was asked for is wrong, as a model that is not served; 130 interrupted.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from actors.card.config import in_words
from serve_app.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, say
from serve_app.config.keys import ADMIN_KEY_VARIABLE, REMEDIES, bearer

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

_WRONG_ORDER = (400, 404)  # answers that mean: not this server's fault
_STATUS_TIMEOUT_S = 10.0
_GIB = 2**30

Url = Annotated[str, typer.Option(help="The server, without /v1.")]
Key = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=ADMIN_KEY_VARIABLE,
        show_envvar=True,
        help="An admin key; other users of this machine can read a command line.",
    ),
]
TimeoutS = Annotated[
    float, typer.Option("--timeout-s", min=0.001, help="For requests to finish, and for the wake.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the server told.")]
Replicas = Mapping[str, Iterable[Mapping[str, Any]]]  # by model

_LOCAL = "http://127.0.0.1:8000"


class Refused(Exception):
    """The server cannot be asked, or did not do what was asked for."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def status(
    url: Url = _LOCAL,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Again and again, until Ctrl-C; with --json a line each."),
    ] = False,
    interval_s: Annotated[
        float, typer.Option("--interval-s", min=0.1, help="Between two looks with --watch.")
    ] = 1.0,
    as_json: AsJson = False,
    api_key: Key = None,
) -> None:
    """Show every replica: awake or asleep, why, its memory. Wakes none."""
    from rich.live import Live

    def look() -> dict[str, Any]:
        return _ask(url, "GET", "/status", api_key, _STATUS_TIMEOUT_S)

    if not watch:
        _show(look(), as_json, status_view)
        return
    console = _console()
    # Elsewhere Live would draw at its end only.
    redraws = not as_json and console.is_terminal and not console.is_dumb_terminal
    try:
        with Live(console=console, auto_refresh=False) if redraws else nullcontext() as live:
            while True:
                told = look()
                if as_json:
                    print(json.dumps(told), flush=True)
                elif live is None:
                    console.print(status_view(told))
                else:
                    live.update(status_view(told), refresh=True)
                time.sleep(interval_s)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def sleep(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As clients name it.")],
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1 keeps the image in host memory; 2 does not.")
    ] = 1,
    mode: Annotated[
        Literal["wait", "abort", "keep"],
        typer.Option(help="Requests in flight finish, end now, or are frozen until the wake."),
    ] = "wait",
    hold: Annotated[
        bool, typer.Option("--hold", help="Until `sleepserve wake`; requests get 503.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also what its process has of the card besides.")
    ] = False,
    url: Url = _LOCAL,
    timeout_s: TimeoutS = 600.0,
    as_json: AsJson = False,
    api_key: Key = None,
) -> None:
    """Put a model to sleep, and tell how it is then."""
    form = {"model": model, "level": level, "mode": mode, "hold": hold, "deep": deep}
    _show(_ask(url, "POST", "/sleep", api_key, timeout_s, form), as_json, _order_view)


def wake(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As clients name it.")],
    url: Url = _LOCAL,
    timeout_s: TimeoutS = 600.0,
    as_json: AsJson = False,
    api_key: Key = None,
) -> None:
    """Wake a model, end a hold, and tell how it is then."""
    form = {"model": model}
    _show(_ask(url, "POST", "/wake_up", api_key, timeout_s, form), as_json, _order_view)


# --- asking ---


def _ask(
    url: str,
    method: str,
    path: str,
    api_key: str | None,
    timeout_s: float,
    form: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """The JSON of an answer; ends the command if there is none."""
    try:
        if not url.startswith(("http://", "https://")):
            raise Refused(f"a URL begins with http:// or https://, found {url!r}", EXIT_USAGE)
        base = url.rstrip("/").removesuffix("/v1")
        return asyncio.run(_fetch(method, base + path, api_key, timeout_s, form))
    except Refused as error:
        say(f"error: {error}")
        raise typer.Exit(error.exit_code) from error


async def _fetch(
    method: str,
    url: str,
    api_key: str | None,
    timeout_s: float,
    form: Mapping[str, object] | None,
) -> dict[str, Any]:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=bearer(api_key)) as session,
            session.request(method, url, json=form) as response,
        ):
            body, code = await response.read(), response.status
    except aiohttp.InvalidURL as error:
        raise Refused(f"{url} is no URL", EXIT_USAGE) from error
    except TimeoutError as error:
        option = "" if form is None else " (--timeout-s)"  # of orders; status has none
        raise Refused(f"{url} did not answer within {timeout_s:g} s{option}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise Refused(f"{url} cannot be reached: {error}; is the server running?") from error
    return _answer_of(url, code, body)


def _answer_of(url: str, code: int, body: bytes) -> dict[str, Any]:
    try:
        told = json.loads(body)
    except ValueError:
        told = None
    if code != 200:
        why = told.get("error") if isinstance(told, dict) else None
        message = why.get("message") if isinstance(why, dict) else None
        told_code = EXIT_USAGE if code in _WRONG_ORDER and message else EXIT_FAILED
        text = f"{message or 'no sleepserve there?'}{REMEDIES.get(code, '')}"
        raise Refused(f"{url}: HTTP {code}: {text}", told_code)
    if not isinstance(told, dict) or "models" not in told:
        raise Refused(f"{url} does not answer as sleepserve does")
    return told


# --- showing ---


def status_table(told: Mapping[str, Any]) -> "Table":
    """Of `GET /status`."""
    table = _table("in flight", "quiet", "device memory", "last wake")
    for name, model in told["models"].items():
        if model["why_silent"] is not None:
            _row(table, name, "", "silent", why=model["why_silent"])
        elif not model["replicas"]:
            scale = model.get("scale") or {}
            state = "failed" if scale.get("gave_up") else "no replica"
            _row(table, name, "", state, why=scale.get("why", ""))
        for number, replica in enumerate(model["replicas"].values()):
            _row(
                table,
                "" if number else name,
                replica["replica_id"],
                _state(replica),
                str(replica["in_flight"] + replica["waiting_for_wake"]),
                _seconds(told["time"] - replica["quiet_since"]),
                _gib(replica["mapped_bytes"]),
                _seconds(replica["last_wake_s"]),
                why="; ".join(filter(None, (replica["reason"], _stays(replica)))),
            )
    return table


def _stays(replica: Mapping[str, Any]) -> str:
    """For how long a replica stays awake, where that is not for its `idle_timeout_s`."""
    source, timeout_s = replica.get("idle_timeout_from"), replica["idle_timeout_s"]
    if replica["state"] != "awake" or source in (None, "idle_timeout_s"):
        return ""
    if source == "schedule" and timeout_s is None:
        until = replica["schedule"]["until"]
        return "stays awake by its schedule" + (
            "" if until is None else f" until {datetime.fromtimestamp(until):%a %H:%M}"
        )
    if timeout_s is None:
        return f"stays awake ({source})"
    return f"sleeps when quiet for {_seconds(timeout_s)} ({source})"


def status_view(told: Mapping[str, Any]) -> "Group":
    """The table, and lines for each shared card."""
    from rich.console import Group
    from rich.text import Text

    return Group(status_table(told), *map(Text, card_lines(told)))


def card_lines(told: Mapping[str, Any]) -> list[str]:
    """Of each shared card who has what of it, who waits, and why those who sleep do; of `GET /status`."""
    sharers: dict[str, list[Mapping[str, Any]]] = {}
    for model in told["models"].values():
        for replica in model["replicas"].values():
            if replica.get("card") is not None:
                sharers.setdefault(replica["device"]["id"], []).append(replica)
    lines = []
    for device, replicas in sharers.items():
        card = max((replica["card"] for replica in replicas), key=lambda card: card["seen_s"])
        lines += [_card_line(device, card), *_wait_lines(card, told["time"])]
        lines += _sleep_lines(replicas, told["time"])
    return lines


def _card_line(device: str, card: Mapping[str, Any]) -> str:
    awake = [_awake_tenant(tenant) for tenant in card["tenants"] if tenant["awake"]]
    asleep = len(card["tenants"]) - len(awake)
    return (
        f"{device}: {in_words(card['held'])} of {in_words(card['budget'])} held, "
        f"awake {', '.join(awake) or 'nobody'}, {asleep} asleep"
    )


def _wait_lines(card: Mapping[str, Any], now_s: float) -> Iterator[str]:
    for wait in card["waiting"]:
        waited = f"{_seconds(now_s - wait['since'])} of {_seconds(wait['limit_s'])}"
        turn = "" if wait["turn"] is None else f" in {_seconds(wait['turn'] - now_s)}"
        why = f"; {wait['reason']}{turn}" if wait["reason"] else ""
        yield f"  {wait['model_id']} waits for {in_words(wait['size'])}, {waited}{why}"


def _sleep_lines(replicas: Iterable[Mapping[str, Any]], now_s: float) -> Iterator[str]:
    """The newest first."""
    asleep = [one for one in replicas if one["state"] == "asleep" and one["last_sleep"]]
    for replica in sorted(asleep, key=lambda one: one["last_sleep"]["at"], reverse=True):
        slept = replica["last_sleep"]
        ago = _seconds(now_s - slept["at"])
        yield f"  {replica['model_id']} went to sleep {ago} ago: {_why_slept(slept)}"


def _why_slept(slept: Mapping[str, Any]) -> str:
    words = {"idle": "idle", "command": "asked to", "room": "idle", "preempted": "preempted"}
    why = words.get(slept["cause"], slept["cause"])
    return f"{why}, for {slept['for_model']}" if slept["for_model"] else why


def _awake_tenant(tenant: Mapping[str, Any]) -> str:
    kv = f"KV {in_words(tenant['kv'])} of {in_words(tenant['kv_most'])}"
    return f"{tenant['model_id']} ({kv})"


def order_table(told: Replicas) -> "Table":
    """Of the answer to `POST /sleep` and `/wake_up`."""
    table = _table("device memory", "sleep took", "wake took")
    for name, replicas in told.items():
        if not replicas:
            _row(table, name, "", "no replica")
        for number, replica in enumerate(replicas):
            _row(
                table,
                "" if number else name,
                replica["replica_id"],
                _state(replica),
                _gib(replica["mapped_bytes"]),
                _seconds(replica["last_sleep_s"]),
                _seconds(replica["last_wake_s"]),
                why=replica["reason"],
            )
    return table


def _order_view(told: Mapping[str, Any]) -> "Table":
    return order_table(told["models"])


def _show(
    told: dict[str, Any], as_json: bool, view: "Callable[[dict[str, Any]], RenderableType]"
) -> None:
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        _console().print(view(told))


def _console() -> Any:
    from rich.console import Console

    # What is not shown to anybody is not cut to the width of a terminal that is not there.
    return Console(width=None if sys.stdout.isatty() else 160)


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    return Table("model", "replica", "state", *columns, "why", box=box.SIMPLE_HEAD)


def _row(table: "Table", *cells: str, why: str = "") -> None:
    """One with these cells and the last; those between them are empty."""
    from rich.text import Text

    empty = [""] * (len(table.columns) - len(cells) - 1)
    table.add_row(*map(Text, (*cells, *empty, why)))  # Text, so that brackets are no markup


def _state(replica: Mapping[str, Any]) -> str:
    state = str(replica["state"])
    return f"{state}, held" if replica["held"] else f"{state}, deep" if replica["deep"] else state


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    value = max(0.0, value)  # of times that two clocks tell
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    minutes = value / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def _gib(value: int) -> str:
    if value == 0:
        return "none"
    return f"{value / _GIB:.2f} GiB" if value >= _GIB // 100 else f"{value / 2**20:.1f} MiB"
