"""What products with quantised weights take beside bfloat16's, by rows: `python -m docs.results.quantized_matmul`.

For each kind, and each projection of the 7B shape as it is merged there: torch's product of plain weights, `fused`
with each of some tiles, `dequantised`, and of FP8 `pairs`, with quantised rows and,
with each of some turns, `single_row`; of 4 bits `few_rows`, likewise. The last table says what `matmul` would
choose at best, without and with quantised rows, and what the projections of all layers take then: what TILES in
actors/quantization/kernels.py is made from.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton.testing
from rich.console import Console
from rich.table import Table
from torch import Tensor

from actors.quantization import few_rows, kernels, pairs, single_row
from actors.quantization.kernels import TILES, Tile, dequantised, fused, has_fp8
from actors.quantization.scheme import WRITTEN_BYTES, Kind, Scheme

LAYERS = 28
# Output and input channels: queries, keys and values; output; gate and up; down.
SHAPES = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))
SCHEMES: dict[Kind, Scheme] = {
    "int4": Scheme("int4", 128),
    "fp8": Scheme("fp8", 128, 128),
    "int8": Scheme("int8", 128),
}
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)
WRITTEN_MIB = (16, 24, 32, 48, 64, 128)
_MANY_ROWS = 1024  # from here on
_REPEAT_MS = 4
_MOST_COPIES = 64
_BEYOND_CACHE = 200e6  # bytes; an H200's cache holds 50 MiB, and a model's weights come from memory


def candidates(kind: Kind) -> list[Tile]:
    """Those in use, and others near them."""
    channels = (128,) if kind == "int4" else (64, 128)
    made = [
        Tile(rows, columns, channel, warps, stages, programs, turned)
        for (rows, columns, warps, stages, programs), channel, turned in itertools.product(
            (
                (16, 32, 4, 5, 6),
                (16, 64, 4, 4, 4),
                (16, 128, 4, 4, 3),
                (32, 64, 4, 4, 3),
                (64, 64, 4, 3, 2),
                (64, 128, 4, 3, 2),
                (64, 128, 8, 3, 2),
                (128, 64, 4, 3, 2),
                (128, 128, 8, 2, 2),
                (128, 128, 8, 3, 1),
                (128, 256, 8, 3, 1),
                (256, 128, 8, 3, 1),
                (64, 256, 8, 3, 1),
            ),
            channels,
            (False, True),
        )
    ]
    return list(dict.fromkeys([tile for _, tile in TILES[SCHEMES[kind].kind]] + made))


def few_turns() -> list[few_rows.Turn]:
    """The one in use, and others near it."""
    made = [
        few_rows.Turn(channels, warps, stages, programs)
        for (channels, warps), stages, programs in itertools.product(
            ((32, 1), (64, 2), (128, 4)), (3, 4), (8, 16, 24, 32)
        )
    ]
    return list(dict.fromkeys([few_rows.TURN, *made]))


def single_turns() -> list[single_row.Turn]:
    """The one in use, and others near it."""
    made = [
        single_row.Turn(*each) for each in itertools.product((4, 8, 16), (2, 4), (1, 2), (3, 5, 6))
    ]
    return list(dict.fromkeys([single_row.TURN, *made]))


def quantised(scheme: Scheme, K: int, N: int) -> tuple[Tensor, Tensor]:
    """Any weight and scales."""
    weight = torch.randint(0, 120, scheme.weight_shape(K, N), dtype=torch.uint8, device="cuda")
    is_fp8 = scheme.kind == "fp8"
    dtype = torch.float32 if is_fp8 else torch.bfloat16
    scales = torch.full(scheme.scales_shape(K, N), 0.01, dtype=dtype, device="cuda")
    return (weight.view(torch.float8_e4m3fn) if is_fp8 else weight), scales


def copies(bytes_of_one: int) -> int:
    """So many weights that none is in the card's cache when its turn comes; of tiny ones not as many."""
    return max(2, min(_MOST_COPIES, math.ceil(_BEYOND_CACHE / bytes_of_one)))


def milliseconds(works: Sequence[Callable[[], object]]) -> float:
    """The median of one, in a CUDA graph, as the engine runs them. Each has a weight of its own.

    Infinite where a tile does not fit the card, and where there are no works.
    """

    def all_of_them() -> None:
        for work in works:
            work()

    if not works:
        return math.inf
    try:
        all_of_them()
        torch.cuda.synchronize()
        found = triton.testing.do_bench_cudagraph(all_of_them, rep=_REPEAT_MS, return_mode="median")
    except triton.runtime.errors.OutOfResources:
        return math.inf
    return float(found) / len(works)


def written_in_parts(mib: int, works: Sequence[Callable[[], object]]) -> float:
    """What it takes with as much of a weight written out at a time; a part that fits it may stay in the card's cache."""
    with patch.object(kernels, "WRITTEN_BYTES", mib << 20):
        return milliseconds(works)


def with_each(
    way: Callable[..., object],
    x: Tensor,
    weights: Sequence[tuple[Tensor, Tensor]],
    scheme: Scheme,
    *more: object,
) -> list[Callable[[], object]]:
    """The rows' products with these weights."""
    return [partial(way, x, weight, scales, None, scheme, *more) for weight, scales in weights]


def measure(
    kind: Kind, shapes: Sequence[tuple[int, int]], rows: Sequence[int], end_s: float
) -> list[dict[str, Any]]:
    """One row for each number of rows and shape, until `end_s` of the monotonic clock."""
    scheme = SCHEMES[kind]
    found: list[dict[str, Any]] = []
    tiles = candidates(kind)
    for N, K in shapes:
        plain = [
            torch.randn((N, K), dtype=torch.bfloat16, device="cuda")
            for _ in range(copies(2 * N * K))
        ]
        weights = [quantised(scheme, K, N)]
        weights += [quantised(scheme, K, N) for _ in range(copies(weights[0][0].nbytes) - 1)]
        for M in rows:
            if time.monotonic() > end_s:
                return found
            x = torch.randn((M, K), dtype=torch.bfloat16, device="cuda")

            parts = (x, weights, scheme)
            in_parts = WRITTEN_MIB if M >= _MANY_ROWS else (WRITTEN_BYTES >> 20,)
            fitting = [t for t in tiles if t.rows <= max(16, 2 * M) and 8 * t.rows >= M]
            found.append(
                {
                    "kind": kind,
                    "N": N,
                    "K": K,
                    "M": M,
                    "bf16_ms": milliseconds([partial(torch.mm, x, w.T) for w in plain]),
                    "dequantised_ms": {
                        json.dumps({"MiB": mib}): written_in_parts(
                            mib, with_each(dequantised, *parts)
                        )
                        for mib in in_parts
                    },
                    "pairs_ms": milliseconds(
                        [partial(pairs.product, x, *w, scheme) for w in weights]
                        if pairs.fit(scheme, N, K, x.dtype)
                        else ()
                    ),
                    "quantised_rows_ms": milliseconds(
                        [partial(pairs.product_of_quantised, x, *w, scheme) for w in weights]
                        if pairs.fit(scheme, N, K, x.dtype)
                        else ()
                    ),
                    "single_row_ms": {
                        json.dumps(asdict(turn)): milliseconds(
                            [
                                partial(single_row.product, x, *w, scheme, has_fp8(x.device), turn)
                                for w in weights
                            ]
                        )
                        for turn in single_turns()
                        if M == 1 and single_row.fit(scheme, K)
                    },
                    "few_rows_ms": {
                        json.dumps(asdict(turn)): milliseconds(
                            with_each(few_rows.product, *parts, turn)
                        )
                        for turn in few_turns()
                        if few_rows.MOST_ROWS >= M and few_rows.fit(scheme, K)
                    },
                    "fused_ms": {
                        json.dumps(asdict(tile)): milliseconds(with_each(fused, *parts, tile))
                        for tile in fitting
                    },
                }
            )
    return found


def best_of(ways: dict[str, float]) -> tuple[str, str]:
    """The fastest one's microseconds, and its numbers; neither where there is none."""
    best = min(ways, key=lambda way: ways[way], default=None)
    if best is None:
        return "", ""
    return f"{1e3 * ways[best]:.1f}", " ".join(map(str, map(int, json.loads(best).values())))


def show(found: Sequence[dict[str, Any]], console: Console) -> None:
    """The best way of each, and the sums over the projections of all layers."""
    table = Table(
        *("kind", "rows", "projection", "bf16 us", "best written us", "MiB", "pairs us"),
        *(
            "quantised rows us",
            "best single us",
            "turn",
            "best few us",
            "turn",
            "best fused us",
            "tile",
        ),
    )
    for row in found:
        table.add_row(
            row["kind"],
            str(row["M"]),
            f"{row['N']} x {row['K']}",
            f"{1e3 * row['bf16_ms']:.1f}",
            *best_of(row["dequantised_ms"]),
            f"{1e3 * row['pairs_ms']:.1f}",
            f"{1e3 * row['quantised_rows_ms']:.1f}",
            *best_of(row["single_row_ms"]),
            *best_of(row["few_rows_ms"]),
            *best_of(row["fused_ms"]),
        )
    console.print(table)
    sums = Table(
        *("kind", "rows", f"bf16 ms, {LAYERS} layers", "quantised ms", "times as fast"),
        *("with quantised rows ms", "times as fast"),
    )
    for kind, M in sorted({(row["kind"], row["M"]) for row in found}):
        mine = [row for row in found if (row["kind"], row["M"]) == (kind, M)]
        plain = LAYERS * sum(row["bf16_ms"] for row in mine)
        best = [
            min(
                *row["dequantised_ms"].values(),
                row["pairs_ms"],
                *row["single_row_ms"].values(),
                *row["few_rows_ms"].values(),
                *row["fused_ms"].values(),
            )
            for row in mine
        ]
        exact = LAYERS * sum(best)
        with_rows = LAYERS * sum(map(min, best, (row["quantised_rows_ms"] for row in mine)))
        cells = (exact, plain / exact, with_rows, plain / with_rows)
        sums.add_row(kind, str(M), f"{plain:.2f}", *(f"{each:.2f}" for each in cells))
    console.print(sums)


def keep(found: Sequence[dict[str, Any]], file: Path | None) -> None:
    """Write the rows to a file, with what they were measured on."""
    if file is not None:
        facts = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": found}
        file.write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=list(SCHEMES), default=["int4", "fp8"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    end_s = time.monotonic() + asked.limit_s
    found = [row for kind in asked.kinds for row in measure(kind, SHAPES, asked.rows, end_s)]
    show(found, Console(width=140))
    keep(found, asked.json)


if __name__ == "__main__":
    main()
