"""Results of benches as their JSON has them, of the size of a 7B model on a large card."""

from typing import Any

from serve_app.bench.figures import spread
from serve_app.bench.http.summary import PERCENTILES

RATE = 55.5  # GB/s
LAYERS = 28
LAYER_BYTES, END_BYTES = 466_000_000, 1_090_000_000
TOTAL = LAYERS * LAYER_BYTES + 2 * END_BYTES

MACHINE = {
    "device": "NVIDIA H200",
    "driver": "580.1",
    "cpus": 16,
    "cpu_ms": 31.4,
    "python": "3.12.3",
    "sleepserve": "0.1.0",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "clean": True,
    "torch": "2.11.0",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "ray": "2.60.0",
    "triton": "",
    "command": "sleepserve bench",
}


def timeline() -> dict[str, Any]:
    names = ["embedding", *(f"layer.{i}" for i in range(LAYERS)), "head"]
    at_s, segments = 0.0035, []
    for name in names:
        size = LAYER_BYTES if name.startswith("layer.") else END_BYTES
        end_s = at_s + size / RATE / 1e9
        segments.append(
            {
                "name": name,
                "bytes": size,
                "copy_s": [at_s, end_s],
                "compute_s": [end_s + 0.0001, end_s + 0.0009],
            }
        )
        at_s = end_s
    marks_s = {"weights mapped": 0.0034, "engine resumed": 0.0079, "first token": at_s + 0.004}
    return {
        "variant": "pipelined",
        "prompt_tokens": 7,
        "device": "cuda",
        "marks_s": marks_s,
        "segments": segments,
    }


def memory() -> dict[str, Any]:
    return {
        "of": "card",
        "marks_s": {
            "sleep called": 0.2,
            "asleep": 0.209,
            "request arrives": 0.509,
            "first token": 0.791,
        },
        "at_s": [0.0, 0.2, 0.206, 0.209, 0.508, 0.511, 0.513, 0.517, 1.1],
        "used_bytes": [int(gib * 2**30) for gib in (24, 24, 9, 1, 1, 10, 16, 24, 24)],
    }


def row(variant: str, ttfts_s: list[float], moved: int, left_gib: float = 1.0) -> dict[str, Any]:
    times = spread(ttfts_s)
    return {
        "variant": variant,
        "prompt_tokens": 7,
        "cycles": len(ttfts_s),
        "wrong": 0,
        "ttft_asleep_s": times,
        "ttft_asleep_each_s": ttfts_s,
        "sleep_s": spread([0.009, 0.010]),
        "moved_bytes": spread([moved]),
        "released_bytes": spread([22 * 2**30]),
        "left_bytes": spread([left_gib * 2**30]),
        "gb_per_s": spread([RATE]),
        "share_of_link": 1.0,
        "ttft_over_link": times["median"] / (moved / 1e9 / RATE),
    }


def wake() -> dict[str, Any]:
    rows = []
    for kept in (0, 7, 14, 21, 28):
        moved = TOTAL - kept * LAYER_BYTES
        first_s = moved / 1e9 / RATE + 0.008
        each = [first_s * (1 + 0.002 * (n % 7)) for n in range(20)]
        rows.append(row(f"kept-{kept}", each, moved, 1 + kept * LAYER_BYTES / 2**30))
    pipelined = [0.2815 + 0.0004 * ((n * 5) % 11) for n in range(30)]
    rows.insert(0, row("pipelined", pipelined, TOTAL))
    rows.append(row("kept-14-last", [0.199, 0.201, 0.2], TOTAL - 14 * LAYER_BYTES, 7))
    rows.append(row("fresh-load", [4.2, 4.5, 4.4], TOTAL))
    return {
        "checkpoint": "m7",
        **MACHINE,
        "engine": {"num_blocks": 64, "page_size": 256},
        "complete": True,
        "weights_bytes": TOTAL,
        "kv_bytes": 8_837_398_528,
        "wrong": 0,
        "compared": 190,
        "asleep_parts": {},
        "rows": rows,
        "skipped": {"to": "not here"},
        "pinned_gb_per_s": RATE,
        "pinned_rates_gb_per_s": spread([RATE]),
        "timeline": timeline(),
        "memory": memory(),
        "verdicts": [{"name": "sleep_ms", "found": 9.5, "limit": 20.0, "kept": True}],
    }


def throughput() -> dict[str, Any]:
    rates = {1: (150, 0.0065), 16: (2000, 0.0078), 64: (6800, 0.0092), 256: (15500, 0.016)}
    return {
        "checkpoint": "m7",
        **MACHINE,
        "engine": {"num_blocks": 2048},
        "complete": True,
        "prompt_tokens": 128,
        "answer_tokens": 128,
        "ttft_awake_s": spread([0.019, 0.021]),
        "concurrency": {
            str(n): {
                "tokens_per_s": spread([0.97 * rate, rate, 1.02 * rate]),
                "ttft_p50_s": spread([0.03]),
                "tpot_p50_s": spread([tpot_s]),
            }
            for n, (rate, tpot_s) in rates.items()
        },
    }


def load() -> dict[str, Any]:
    stages = ["process start", "imports", "join Ray", "module", "bytes", "warm-up", "first token"]
    instances = {}
    for name, loading_s in (("first", 18.3), ("second", 0.4), ("without holder", 20.1)):
        seconds = dict(zip(stages, (0.1, 6.2, 1.1, 0.9, loading_s, 6.5, 0.6), strict=True))
        instances[name] = {
            "stages": seconds,
            "to_device": {
                "read and pack": 0.0 if name == "second" else loading_s - 0.4,
                "attach and check digests": 0.4,
                "pin": 0.8,
                "copy": 0.29,
            },
            "image_from": "disk" if name == "without holder" else "image",
            "loads": int(name != "second"),
            "storage_bytes": 0 if name == "second" else TOTAL,
            "cold": name != "second",
            "seconds": sum(seconds.values()),
            "up_seconds": sum(list(seconds.values())[3:]),
        }
    return {
        "checkpoint": "m7",
        **MACHINE,
        "complete": True,
        "file_bytes": TOTAL,
        "instances": instances,
        "ratios": {"first, to the device": 19.39 / 1.49},
        "skipped": {},
    }


def soak() -> dict[str, Any]:
    cycles = list(range(10, 1001, 10))
    samples: dict[str, list[float]] = {"cycle": cycles, "seconds": [0.4 * c for c in cycles]}
    samples["device_bytes"] = [2**30 + (c // 400) * 2**21 for c in cycles]
    samples["torch_reserved_bytes"] = [0 for _ in cycles]
    samples["threads"] = [31 for _ in cycles]
    return {
        "checkpoint": "m7",
        **MACHINE,
        "complete": True,
        "cycles": 1000,
        "compared": 800,
        "wrong": 0,
        "cycle_s": spread([0.4, 0.41]),
        "samples": samples,
        "trends": {
            "device_bytes": {
                "first": 2**30,
                "max": 2**30 + 2**22,
                "last": 2**30 + 2**22,
                "per_1000_cycles": 4_000_000.0,
            }
        },
    }


def http_spread(median_s: float) -> dict[str, Any]:
    # Keys are numbers here, as in the bench's own dictionary; a file has text.
    return {
        "count": 10,
        "mean": median_s,
        "percentiles": {p: median_s * (0.8 + 0.4 * p / 100) for p in PERCENTILES},
    }


def times(ttft_s: float | None) -> dict[str, Any]:
    if ttft_s is None:
        return {"requests": 0, "ttft": None, "tpot": None}
    return {"requests": 10, "ttft": http_spread(ttft_s), "tpot": http_spread(0.007)}


def http() -> dict[str, Any]:
    rounds = [
        {
            "load": {"concurrency": n, "request_rate": None, "requests": 40},
            "concurrency": n,
            "total": 40,
            "succeeded": 40,
            "failed": 0,
            "output_tokens_per_s": 140.0 * n**0.9,
            "times": times(0.03),
            "warm": times(0.03 + 0.001 * n),
            "cold": times(0.3 if n == 1 else None),
            "notes": ["the client was too slow"] if n == 64 else [],
        }
        for n in (1, 8, 64)
    ]
    return {
        "url": "http://127.0.0.1:8000",
        "started_at": "2026-01-02T03:04:05+00:00",
        "ended": None,
        "workload": {
            "model": "m7",
            "endpoint": "chat",
            "stream": True,
            "prompt_tokens": "128",
            "max_tokens": 128,
        },
        "rounds": rounds,
    }
