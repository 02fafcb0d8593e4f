"""Sleep, wake and first token of a served model over HTTP, against a running `serve run`.

    python docs/results/measure_http.py --model demo --cycles 20 > http.json

Every cycle puts the model to sleep, waits, asks for one token, and compares 50 greedy tokens with those of
before the first sleep.
"""

import argparse
import json
import sys
import time
from typing import Any

import httpx

from serve_app.bench.figures import spread

PROMPT = [11, 22, 33, 44, 55, 66, 77]


def complete(client: httpx.Client, model: str, count: int) -> tuple[str, float]:
    """The text, and the seconds from sending the request to its first event."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": count, "ignore_eos": True}
    started_s = time.perf_counter()
    first_s, text = None, ""
    with client.stream(
        "POST", "/v1/completions", json=body | {"stream": True, "temperature": 0}
    ) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(f"in mid-stream: {chunk['error']}")
                first_s = first_s or time.perf_counter() - started_s
                text += "".join(choice["text"] for choice in chunk["choices"])
    assert first_s is not None, "no event came"
    return text, first_s


def sleep(client: httpx.Client, model: str) -> dict[str, Any]:
    response = client.post("/sleep", params={"model": model})
    response.raise_for_status()
    (status,) = response.json()["models"][model]
    return dict(status)


def measure(url: str, model: str, cycles: int, pause_s: float) -> dict[str, Any]:
    asleep: list[float] = []
    slept: list[float] = []
    wrong = 0
    with httpx.Client(base_url=url, timeout=120) as client:
        expected, _ = complete(client, model, 50)
        awake = [complete(client, model, 1)[1] for _ in range(10)]
        for _ in range(cycles):
            status = sleep(client, model)
            slept.append(status["last_sleep_s"])
            time.sleep(pause_s)  # as a real sleep does
            asleep.append(complete(client, model, 1)[1])
            wrong += complete(client, model, 50)[0] != expected
    return {
        "cycles": cycles,
        "ttft_awake_s": spread(awake),
        "ttft_asleep_s": spread(asleep),
        "sleep_s": spread(slept),
        "wrong": wrong,
        "weights_bytes": status["weights_bytes"],
        "kv_bytes": status["kv_bytes"],
        "weights_from": status["weights_from"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--pause-s", type=float, default=0.3)
    arguments = parser.parse_args()
    result = measure(arguments.url, arguments.model, arguments.cycles, arguments.pause_s)
    json.dump(result, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
