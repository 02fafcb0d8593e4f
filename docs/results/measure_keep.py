"""Which decoder layers are worth keeping over a sleep: first token of a sleeper for each choice.

    python docs/results/measure_keep.py CHECKPOINT --cycles 10 --json keep.json

One process, one device. In every cycle the model sleeps and wakes once for each place, in an order that
turns from cycle to cycle: no layer kept, then `--keep-layers` of them the first, the middle and the last.
The token must be that of before the first sleep.
"""

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

from common import (
    HolderActor,
    LocalModel,
    Prompt,
    build_model,
    engine_of,
    load_of,
    local_ray,
    parser_for,
)
from report import environment, gib, ms, spread, tell

from actors.engine.config import EngineConfig
from actors.model_memory import kept_segments

PLACES = ("none", "first", "middle", "last")


def prompt_of(tokens: int, vocab_size: int) -> Prompt:
    return tuple((7919 * i) % (vocab_size // 2) + 5 for i in range(1, tokens + 1))


async def timed_cycle(
    model: LocalModel, kept: frozenset[int], prompt: Prompt, pause_s: float
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Sleep, pause, wake, one token."""
    runtime = model.runtime
    runtime.memory.kept = kept
    slept = await runtime.sleep(1)
    await asyncio.sleep(pause_s)  # as a real sleep does
    started_s = time.perf_counter()
    woke = await runtime.wake()
    answer = await model.ask(prompt, 1)
    ttft_s = time.perf_counter() - started_s
    await model.settled()
    stats = runtime.last_transfer
    assert stats is not None
    assert stats.size == woke.copied_bytes
    row = {
        "ttft_asleep_s": ttft_s,
        "link_s": stats.seconds,
        "beyond_link_s": ttft_s - stats.seconds,
        "copied_bytes": woke.copied_bytes,
        "kept_bytes": slept.mapped_after_bytes,
    }
    return row, answer.token_ids


async def measure(
    checkpoint: Path,
    engine: EngineConfig,
    keep_layers: int,
    prompt_tokens: list[int],
    cycles: int,
    pause_s: float,
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "checkpoint": checkpoint.name,
        "cycles": cycles,
        "keep_layers": keep_layers,
    }
    result |= environment()
    model = await build_model(checkpoint, load_of(checkpoint, HolderActor()), engine)
    runtime = model.runtime
    await runtime.wake()
    await model.warm()
    assert runtime.memory.image is not None
    layout = runtime.memory.image.layout
    kept = {
        "none": frozenset[int](),
        "first": kept_segments(layout, keep_layers, "first"),
        "middle": kept_segments(layout, keep_layers, "middle"),
        "last": kept_segments(layout, keep_layers, "last"),
    }
    result |= {"weights_bytes": runtime.weights_bytes, "prompts": {}}
    for tokens in prompt_tokens:
        prompt = prompt_of(tokens, model.vocab_size)
        await timed_cycle(model, kept["none"], prompt, 0)  # what only the first of its length pays
        _, expected = await timed_cycle(model, kept["none"], prompt, 0)
        rows: dict[str, list[dict[str, float]]] = {place: [] for place in PLACES}
        wrong = 0
        for cycle in range(cycles):
            turn = cycle % len(PLACES)
            for place in PLACES[turn:] + PLACES[:turn]:
                row, found = await timed_cycle(model, kept[place], prompt, pause_s)
                rows[place].append(row)
                wrong += found != expected
        places = {
            place: {name: spread([row[name] for row in found]) for name in found[0]}
            for place, found in rows.items()
        }
        result["prompts"][str(tokens)] = {"wrong": wrong, **places}
    await runtime.close()
    return result


def rows_of(result: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for tokens, found in result["prompts"].items():
        rows.append((f"prompt of {tokens} tokens", f"{found['wrong']} wrong answers"))
        for place in PLACES:
            row = found[place]
            name = f"  kept {place} ({gib(row['kept_bytes']['median'])})"
            times = ("ttft_asleep_s", "link_s", "beyond_link_s")
            ttft, link, beyond = (ms(row[key]) for key in times)
            rows.append((name, f"TTFT {ttft}, link {link}, beyond it {beyond}"))
    return rows


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--keep-layers", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[7, 2048])
    parser.add_argument("--pause-s", type=float, default=0.3)
    parser.add_argument("--store-gib", type=float, default=2)
    arguments: argparse.Namespace = parser.parse_args()
    with local_ray(arguments.store_gib):
        result = asyncio.run(
            measure(
                arguments.checkpoint.resolve(),
                engine_of(arguments),
                arguments.keep_layers,
                arguments.prompt_tokens,
                arguments.cycles,
                arguments.pause_s,
            )
        )
    tell(result, arguments.json, rows_of(result))


if __name__ == "__main__":
    main()
