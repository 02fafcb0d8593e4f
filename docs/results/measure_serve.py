"""One model behind `serve run`: start, first tokens, throughput over HTTP, redeploy, a full card.

    python docs/results/measure_serve.py CHECKPOINT --json serve.json

Starts `serve run` itself, on a free port, with the two applications of serve_config.yaml and the model of
`--config` pointed at CHECKPOINT. The phases, of which `--only` takes some:

start       the process's start to the first token, with the steps that the log tells
latency     TTFT awake and from sleep, sleep; 50 greedy tokens compared after each cycle
throughput  streams from four client processes, so many at once
redeploy    the application `llm` deleted and deployed again, while `weights` keeps the image
memory      another process fills the card while the model sleeps: 503, and its recovery
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import yaml
from http_load import HttpLoad
from measure_http import complete, sleep
from measure_http import measure as measure_latency
from report import say, tell

from serve_app.bench.figures import environment, ms, spread
from tests.e2e.card import full_card
from tests.e2e.serve_process import PROJECT, ServeProcess, wait_until

MODEL = "m"
ANSWER_TOKENS = 50
RETRY_S = 0.05

# What a start is made of: the first line of the log, since then, with each of these.
STEPS = {
    "Ray runs": "Started a local Ray instance",
    "deployed": "Submitted deploy config",
    "applications built": "Imported and built app 'llm'",
    "holder begins to load": "load_model key:.*: loading ",
    "image published": "load_model key:.*: published ",
    "replica is up": "ServeReplica:llm:model.* load_model key:",
    "image mapped": "Loaded [0-9]+ tensors from ",
    "engine built": "attention .*CUDA graphs ",
    "graphs captured": "captured [0-9]+ graphs",
    "wake begins": "asleep -> waking",
    "awake": "waking -> awake",
    "compiled layers in use": "decoder layers run compiled",
}
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")
_RESTORED = re.compile(r"restored (\d+) bytes in ([0-9.]+) ms")


class Session:
    """The server, and what the phases share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.config = serve_config(arguments.config, arguments.checkpoint, arguments.engine)
        store_bytes = int(arguments.store_gib * 2**30)
        self.started_s = time.time()
        self.server = ServeProcess(
            self.config,
            RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES=str(store_bytes),
            # Of the memory that is free now; the limit above is what counts.
            RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION="0.8",
        )
        # What Ray gets to read at a deploy must be what it got at the start.
        self.config = self.config.replace("port: 8000", f"port: {self.server.port}")
        self.on_cpu = shutil.which("nvidia-smi") is None
        self.client = httpx.Client(base_url=self.server.url, timeout=120)

    def until_first_token(self, deadline_s: float) -> float:
        """Ask until the answer comes; the time of its first token, since the epoch."""
        ends_s = time.monotonic() + deadline_s
        while True:
            assert self.server.alive(), self.server.log_tail()
            began_s = time.time()
            try:
                return began_s + complete(self.client, MODEL, 1)[1]
            except (httpx.HTTPError, RuntimeError, AssertionError):
                assert time.monotonic() < ends_s, self.server.log_tail()
                time.sleep(RETRY_S)

    def until_warm(self, since_s: float) -> float | None:
        """Wait for what `--warm-when` is looking for; the seconds until then."""
        if self.arguments.warm_when is None:
            return None
        pattern = re.compile(self.arguments.warm_when)
        return wait_until(lambda: self._logged(pattern, since_s), 120, pattern.pattern, pause_s=0.1)

    def _logged(self, pattern: re.Pattern[str], since_s: float) -> float | None:
        lines = (line for line in self.server.log().splitlines() if pattern.search(line))
        times = [at_s for line in lines if (at_s := logged_at(line) - since_s) > 0]
        return min(times, default=None)

    def steps_since(self, since_s: float) -> dict[str, float]:
        """Step -> seconds, by the log's own times."""
        found: dict[str, float] = {}
        for line in self.server.log().splitlines():
            at_s = logged_at(line) - since_s
            for name, pattern in STEPS.items():
                # Lines of several processes are not in the order of their times.
                if at_s >= 0 and re.search(pattern, line) and at_s < found.get(name, at_s + 1):
                    found[name] = at_s
        return dict(sorted(found.items(), key=lambda step: step[1]))

    def transfers(self) -> list[tuple[int, float]]:
        """Bytes and seconds of every wake so far."""
        found = _RESTORED.findall(self.server.log())
        return [(int(size), float(ms) / 1e3) for size, ms in found]

    def close(self) -> None:
        self.client.close()
        leftovers = self.server.interrupt()
        self.server.remove_files()
        leftovers.check()


def logged_at(line: str) -> float:
    """When a line was logged, since the epoch; 0 where it does not say."""
    stamp = _STAMP.search(line)
    return datetime.strptime(stamp[0], "%Y-%m-%d %H:%M:%S,%f").timestamp() if stamp else 0.0


def serve_config(file: Path, checkpoint: Path, engine: list[str]) -> str:
    """serve_config.yaml with one model: that of the file, from that checkpoint, never idle."""
    model = yaml.safe_load(file.read_text())
    model |= {"model_id": MODEL, "source": {"id": str(checkpoint)}}
    model["sleep"] = model.get("sleep", {}) | {"idle_timeout_s": None}
    for pair in engine:
        key, _, value = pair.partition("=")
        model["engine"][key] = yaml.safe_load(value)
    config = yaml.safe_load((PROJECT / "serve_config.yaml").read_text())
    for application in config["applications"]:
        application["args"]["models"] = [model]
    text: str = yaml.safe_dump(config)
    return text


# --- the phases ---


def start(session: Session) -> dict[str, Any]:
    first_token_s = session.until_first_token(300)
    status = session.server.wake_up()
    return {
        "seconds_to_first_token": first_token_s - session.started_s,
        "seconds_to_warm": session.until_warm(session.started_s),
        "steps": session.steps_since(session.started_s),
        "weights_from": status["weights_from"],
        "weights_bytes": status["weights_bytes"],
        "kv_bytes": status["kv_bytes"],
    }


def latency(session: Session) -> dict[str, Any]:
    before = len(session.transfers())
    arguments = session.arguments
    result = measure_latency(session.server.url, MODEL, arguments.cycles, arguments.pause_s)
    wakes = session.transfers()[before:]
    if wakes:
        link_s = statistics.median(seconds for _, seconds in wakes)
        result["link_s"] = link_s
        result["gb_per_s"] = wakes[-1][0] / 1e9 / link_s
        result["over_link_s"] = result["ttft_asleep_s"]["median"] - link_s
    return result


def throughput(session: Session) -> dict[str, Any]:
    arguments = session.arguments
    vocab_size = json.loads((arguments.checkpoint / "config.json").read_text())["vocab_size"]
    result = {}
    with HttpLoad(session.server.url, MODEL, vocab_size) as load:
        for concurrency in arguments.concurrency:
            rounds = [
                load.round(concurrency, arguments.prompt_tokens, arguments.answer_tokens, 120)
                for _ in range(1 + (2 if concurrency > 64 else 3))
            ]
            timed = rounds[1:]
            result[str(concurrency)] = {n: spread([r[n] for r in timed]) for n in timed[0]}
            say(f"{concurrency}: {result[str(concurrency)]['tokens_per_s']['median']:.0f} tok/s")
    return result


# A process of its own: what Ray's client waits for in there, no time limit of ours could end.
_REDEPLOY = """
import time, yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

began_s = time.time()
serve.delete("llm")
print(began_s, time.time(), flush=True)
# The application that is there as the file has it is left alone.
_get_global_client().deploy_apps(ServeDeploySchema.model_validate(yaml.safe_load(sys.argv[1])))
"""


def redeploy(session: Session) -> dict[str, Any]:
    """What an operator does with `serve delete` and `serve deploy`."""
    server = session.server
    holder = server.actor_pid("weights:WeightHolder")
    with server.driver(_REDEPLOY, session.config) as operator:
        try:
            assert operator.stdout is not None
            began_s, deleted_s = map(float, operator.stdout.readline().split())
            first_token_s = session.until_first_token(120)
            assert operator.wait(30) == 0
        finally:
            operator.kill()
    assert server.actor_pid("weights:WeightHolder") == holder, "the holder was replaced, too"
    return {
        "delete_s": deleted_s - began_s,
        "seconds_to_first_token": first_token_s - deleted_s,
        "seconds_to_warm": session.until_warm(deleted_s),
        "steps": session.steps_since(deleted_s),
        "weights_from": server.wake_up()["weights_from"],
    }


def memory(session: Session) -> dict[str, Any]:
    """A card without room for anything, and one with room for half of the weights."""
    if session.on_cpu:
        return {"skipped": "no CUDA device"}
    expected, _ = complete(session.client, MODEL, ANSWER_TOKENS)
    status = session.server.wake_up()
    result: dict[str, Any] = {}
    for name, spare_bytes in (("none", 2**26), ("half", status["weights_bytes"] // 2)):
        sleep(session.client, MODEL)
        with full_card(spare_bytes) as free_bytes:
            refusals = [ask_refused(session.client) for _ in range(2)]
            health = session.client.get("/health").status_code
        began_s = time.monotonic()
        text, first_s = complete(session.client, MODEL, ANSWER_TOKENS)
        result[name] = {
            "free_bytes": free_bytes,
            "refusals": refusals,
            "health_meanwhile": health,
            "first_token_afterwards_s": first_s,
            "answer_afterwards_s": time.monotonic() - began_s,
            "same_answer": text == expected,
            "same_process": session.server.wake_up()["process_id"] == status["process_id"],
        }
    return result


def ask_refused(client: httpx.Client) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": [11, 22, 33], "max_tokens": 4}
    started_s = time.monotonic()
    response = client.post("/v1/completions", json=body)
    return {
        "status": response.status_code,
        "retry_after": response.headers.get("retry-after"),
        "error": response.json().get("error"),
        "seconds": time.monotonic() - started_s,
    }


PHASES: dict[str, tuple[Callable[[Session], dict[str, Any]], float]] = {  # and its limit, seconds
    "start": (start, 180),
    "latency": (latency, 60),
    "throughput": (throughput, 120),
    "redeploy": (redeploy, 90),
    "memory": (memory, 60),
}


# --- running them ---


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError in the main thread, whatever it waits for."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the server and go through the phases; one that fails does not keep the others back."""
    result: dict[str, Any] = {
        "checkpoint": arguments.checkpoint.name,
        "config": str(arguments.config),
        **environment(),
        "cpus": os.cpu_count(),
    }
    session = Session(arguments)
    try:
        for name in PHASES:
            if name not in arguments.only and name != "start":
                continue  # the others need a server that has started
            phase, limit_s = PHASES[name]
            began_s = time.monotonic()
            try:
                with time_limit(limit_s):
                    result[name] = phase(session)
            except Exception as exc:  # noqa: BLE001  # told in the result, and by the exit status
                result[name] = {"failed": f"{type(exc).__name__}: {exc}"}
            say(f"{name}: {time.monotonic() - began_s:.1f} s")
            if arguments.json is not None:  # so that a killed run leaves what it has
                arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            if name == "start" and "failed" in result[name]:
                break
    finally:
        if arguments.log is not None:
            arguments.log.write_text(session.server.log(), encoding="utf-8")
        session.close()
    return result


def rows_of(result: dict[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name in ("start", "redeploy"):
        found = result.get(name, {})
        if "steps" in found:
            steps = ", ".join(f"{step} {seconds:.1f}" for step, seconds in found["steps"].items())
            whole = f"{found['seconds_to_first_token']:.1f} s to the first token"
            if found["seconds_to_warm"] is not None:
                whole += f", {found['seconds_to_warm']:.1f} s until warm"
            rows += [(name, f"{whole}, weights from {found['weights_from']}"), ("", steps)]
    if "wrong" in (found := result.get("latency", {})):
        rows += [(f"TTFT {how}", ms(found[f"ttft_{how}_s"])) for how in ("awake", "asleep")]
        if "over_link_s" in found:
            text = f"{1e3 * found['over_link_s']:.1f} ms, at {found['gb_per_s']:.2f} GB/s"
            rows.append(("  asleep, over the link's time", text))
        rows += [("sleep", ms(found["sleep_s"])), ("wrong answers", str(found["wrong"]))]
    for concurrency, found in result.get("throughput", {}).items():
        if concurrency != "failed":
            rate, ttft = (found[n]["median"] for n in ("tokens_per_s", "ttft_p50_s"))
            rows.append((f"{concurrency} streams", f"{rate:.0f} tok/s, TTFT {1e3 * ttft:.0f} ms"))
    for name, found in result.get("memory", {}).items():
        if isinstance(found, dict):
            refusal = found["refusals"][0]
            text = (
                f"{refusal['status']}, Retry-After {refusal['retry_after']}, then the same answer"
            )
            rows.append((f"full card ({name})", f"{text}: {found['same_answer']}"))
    failed = [(n, part["failed"]) for n, part in phases_of(result) if "failed" in part]
    return rows + [(f"{name} FAILED", text.splitlines()[0]) for name, text in failed]


def phases_of(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, result[name]) for name in PHASES if name in result]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "--config",
        type=Path,
        default=PROJECT / "configs" / "deepseek-r1-distill-qwen-7b_h200.yaml",
        help="the model's other settings: a file of configs/",
    )
    parser.add_argument("--engine", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--only", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--pause-s", type=float, default=0.3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--in", dest="prompt_tokens", type=int, default=128)
    parser.add_argument("--out", dest="answer_tokens", type=int, default=128)
    parser.add_argument(
        "--warm-when",
        metavar="REGEX",
        help="a line of the log after which a replica is as fast as it will be; waited for",
    )
    parser.add_argument("--store-gib", type=float, default=18)
    parser.add_argument("--json", type=Path, help="where to; standard output when absent")
    parser.add_argument("--log", type=Path, help="where to keep the log of serve run")
    arguments = parser.parse_args()
    arguments.checkpoint = arguments.checkpoint.resolve()
    return arguments


def main() -> int:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it ends the server, too
    result = run(arguments)
    tell(result, arguments.json, rows_of(result))
    return int(any("failed" in part for _, part in phases_of(result)))


if __name__ == "__main__":
    sys.exit(main())
