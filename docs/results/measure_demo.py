"""Sleep, wake and first token of the demo model over HTTP, against a running `make serve`.

    .venv/bin/python docs/results/measure_demo.py --cycles 30 > docs/results/demo_cpu.json
    .venv/bin/python docs/results/table.py docs/results/demo_cpu.json    # into the README

Runs on the machine of the server, because it reads the resident set of the replica's process.
"""

import argparse
import json
import platform
import statistics
import sys
import time

import httpx
import psutil

PROMPT = "The future of artificial intelligence is"


def first_token_s(client: httpx.Client, model: str) -> float:
    """Seconds from sending a streamed request to the first event with text."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 2, "stream": True, "temperature": 0}
    started_s = time.perf_counter()
    first_s = None
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if first_s is None and line.startswith("data: {"):
                first_s = time.perf_counter() - started_s
    assert first_s is not None, "no event came"
    return first_s


def sleep(client: httpx.Client, model: str) -> dict[str, object]:
    response = client.post("/sleep", params={"model": model})
    response.raise_for_status()
    (status,) = response.json()["models"][model]
    return dict(status)


def measure(url: str, model: str, cycles: int) -> dict[str, object]:
    with httpx.Client(base_url=url, timeout=60) as client:
        first_token_s(client, model)
        warm, cold, slept, woke, released = [], [], [], [], []
        status: dict[str, object] = {}
        for _ in range(cycles):
            warm.append(first_token_s(client, model))
            process = psutil.Process(int(str(sleep(client, model)["process_id"])))
            asleep_bytes = process.memory_info().rss
            cold.append(first_token_s(client, model))
            awake_bytes = process.memory_info().rss
            status = sleep(client, model)
            released.append(awake_bytes - process.memory_info().rss)
            slept.append(float(str(status["last_sleep_s"])))
            woke.append(float(str(status["last_wake_s"])))
            assert awake_bytes > asleep_bytes
            client.post("/wake_up", params={"model": model}).raise_for_status()
    return {
        "model": model,
        "hardware": f"{psutil.cpu_count()} CPU cores ({platform.machine()}), no GPU",
        "cycles": cycles,
        "weights_bytes": status["weights_bytes"],
        "kv_bytes": status["kv_bytes"],
        "released_bytes": statistics.median(released),
        "sleep_s": _spread(slept),
        "wake_s": _spread(woke),
        "ttft_awake_s": _spread(warm),
        "ttft_asleep_s": _spread(cold),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cycles", type=int, default=30)
    arguments = parser.parse_args()
    json.dump(measure(arguments.url, arguments.model, arguments.cycles), sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
