"""Sleep, wake and first token of one model in one process, its image in a Ray object store.

    python docs/results/measure_wake.py CHECKPOINT --cycles 50 > wake.json

What a replica does, without HTTP and Serve: WeightHolder in an actor, FastLoad, ModelRuntime. A cycle
sleeps twice. Once it wakes for one request, whose first token is timed, and whose 50 greedy tokens must
be those of before the first sleep. Once it wakes with 16 requests waiting, whose 50 greedy tokens must be
those of the first cycle: only waiting requests make the same batches every time.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

from common import (
    ANSWER_TOKENS,
    HolderActor,
    LocalModel,
    build_model,
    context_bytes,
    device_bytes,
    device_parts,
    engine_of,
    load_of,
    local_ray,
    parser_for,
    pinned_gb_per_s,
)
from report import environment, gib, ms, spread, tell

from actors.engine.config import EngineConfig

WARM_REQUESTS = 20


async def timed_cycle(model: LocalModel, pause_s: float) -> dict[str, float]:
    """Sleep, pause, wake, one token; then what the wake had still to do."""
    started_s = time.perf_counter()
    await model.runtime.sleep(1)
    slept_s = time.perf_counter() - started_s
    asleep_bytes = device_bytes()
    await asyncio.sleep(pause_s)  # as a real sleep does; see the driver's freeing in the notes
    started_s = time.perf_counter()
    await model.runtime.wake()
    woke_s = time.perf_counter() - started_s
    first_s = (await model.ask(model.prompt(), 1)).first_s
    started_s = time.perf_counter()
    await model.settled()
    stats = model.runtime.last_transfer
    assert stats is not None
    return {
        "sleep_s": slept_s,
        "asleep_bytes": asleep_bytes,
        "wake_s": woke_s,
        "ttft_asleep_s": woke_s + first_s,
        "link_s": stats.seconds,
        "gb_per_s": stats.gb_per_s,
        "settle_s": time.perf_counter() - started_s,
    }


async def measure(
    checkpoint: Path, engine: EngineConfig, cycles: int, requests: int
) -> dict[str, Any]:
    result: dict[str, Any] = {"checkpoint": checkpoint.name, "cycles": cycles, "requests": requests}
    result |= environment()
    context = context_bytes()
    load = load_of(checkpoint, HolderActor())
    started_s = time.perf_counter()
    image = await load.obtain()
    result |= {"image_s": time.perf_counter() - started_s, "image_from": image.origin}
    started_s = time.perf_counter()
    again = await load.obtain()
    result["second_image_s"] = time.perf_counter() - started_s
    del image, again
    started_s = time.perf_counter()
    model = await build_model(checkpoint, load, engine)
    runtime = model.runtime
    result["build_s"] = time.perf_counter() - started_s
    stages = {"built": device_parts(context)}  # what is on the card while it sleeps
    crowd = [model.prompt(number) for number in range(requests)]
    started_s = time.perf_counter()
    await runtime.wake()
    result["first_wake_s"] = time.perf_counter() - started_s
    await model.warm()
    result["warm_s"] = time.perf_counter() - started_s
    alone = (await model.ask(crowd[0], ANSWER_TOKENS)).token_ids
    warm = [(await model.ask(model.prompt(), 1)).first_s for _ in range(WARM_REQUESTS)]
    result["awake_bytes"] = device_bytes()
    rows, wrong = [], 0
    together: list[tuple[int, ...]] = []
    for _ in range(cycles):
        rows.append(await timed_cycle(model, pause_s=0.3))
        wrong += (await model.ask(crowd[0], ANSWER_TOKENS)).token_ids != alone
        await runtime.sleep(1)
        stages.setdefault("slept twice", device_parts(context))
        found = [a.token_ids for a in await model.wake_with(crowd, ANSWER_TOKENS)]
        await model.settled()
        together = together or found
        wrong += sum(a != b for a, b in zip(found, together, strict=True))
    await runtime.sleep(1)
    stages["end"] = device_parts(context)
    rate = pinned_gb_per_s()
    ttft_s = statistics.median(row["ttft_asleep_s"] for row in rows)
    result |= {name: spread([row[name] for row in rows]) for name in rows[0]}
    result |= {
        "first_sleep_s": rows[0]["sleep_s"],
        "ttft_awake_s": spread(warm),
        "wrong": wrong,
        "weights_bytes": runtime.weights_bytes,
        "kv_bytes": runtime.kv_bytes,
        "asleep_parts": stages,
        "pinned_gb_per_s": rate,
        "ttft_over_link": statistics.median(r["ttft_asleep_s"] / r["link_s"] for r in rows),
        "ttft_over_pinned": ttft_s * rate * 1e9 / runtime.weights_bytes,
    }
    await runtime.close()
    return result


def rows_of(result: dict[str, Any]) -> list[tuple[str, str]]:
    parts = result["asleep_parts"]["end"]
    beside = result["asleep_bytes"]["median"] - parts["context_bytes"]
    made_of = ", ".join(f"{name.removesuffix('_bytes')} {gib(n)}" for name, n in parts.items())
    return [
        ("TTFT from sleep", ms(result["ttft_asleep_s"])),
        ("  / (bytes / pinned rate)", f"{result['ttft_over_pinned']:.3f}"),
        ("  / the wake's own transfer", f"{result['ttft_over_link']:.3f}"),
        (
            "pinned rate; that of the wakes",
            f"{result['pinned_gb_per_s']:.2f}; {result['gb_per_s']['median']:.2f} GB/s",
        ),
        ("sleep", f"{ms(result['sleep_s'])}, the first {1e3 * result['first_sleep_s']:.1f} ms"),
        ("asleep, beside the context", gib(beside)),
        ("  made of", made_of),
        (
            f"wrong answers in {result['cycles']} x (1 + {result['requests']})",
            str(result["wrong"]),
        ),
        ("TTFT awake", ms(result["ttft_awake_s"])),
        ("image; engine", f"{result['image_s']:.1f} s; {result['build_s']:.1f} s"),
    ]


def parse() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--store-gib", type=float, default=2)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    checkpoint = arguments.checkpoint.resolve()
    with local_ray(arguments.store_gib):
        work = measure(checkpoint, engine_of(arguments), arguments.cycles, arguments.requests)
        result = asyncio.run(work)
    tell(result, arguments.json, rows_of(result))


if __name__ == "__main__":
    main()
