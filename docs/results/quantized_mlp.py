"""What an FP8 MLP of the 7B shape takes beside bfloat16's, by rows: `python -m docs.results.quantized_mlp`.

silu(gate) * up is the same kernel everywhere. Beside torch's products of plain weights: both products and what is
between them at one go (`pairs.gated_mlp`), the same in pairs apart, with weights that are written out, and as the engine chooses.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from actors.quantization import pairs
from actors.quantization.gating import gated
from actors.quantization.kernels import dequantised
from actors.quantization.products import is_gated_in_pairs
from docs.results.quantized_matmul import LAYERS, SCHEMES, copies, keep, milliseconds, quantised

H, WIDTH = 3584, 18944
ROWS = (64, 65, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 2048)
WAYS = ("bf16", "at one go", "in pairs", "written out")


Weight = tuple[Tensor, ...]


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def measure(rows: int, hidden: int = H, width: int = WIDTH) -> dict[str, Any]:
    """Milliseconds of each way, in a CUDA graph over weights that are not in the card's cache."""
    scheme = SCHEMES["fp8"]
    weights = [
        (quantised(scheme, hidden, 2 * width), quantised(scheme, width, hidden))
        for _ in range(copies(3 * width * hidden))
    ]
    plain = [
        tuple(
            torch.randn(shape, dtype=torch.bfloat16, device="cuda")
            for shape in ((2 * width, hidden), (hidden, width))
        )
        for _ in range(copies(6 * width * hidden))
    ]
    x = torch.randn((rows, hidden), dtype=torch.bfloat16, device="cuda")

    def in_three_steps(product: Callable[..., Tensor], one: Weight, other: Weight) -> Tensor:
        return product(gated(product(x, *one)), *other)

    def written_out(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        return dequantised(x, weight, scales, None, scheme)

    def in_pairs(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        return pairs.product(x, weight, scales, scheme)

    works: dict[str, list[Callable[[], object]]] = {
        "bf16": [partial(in_three_steps, _plain, (one,), (other,)) for one, other in plain],
        "at one go": [
            partial(pairs.gated_mlp, x, (*one, scheme), (*other, scheme)) for one, other in weights
        ],
        "in pairs": [partial(in_three_steps, in_pairs, *each) for each in weights],
        "written out": [partial(in_three_steps, written_out, *each) for each in weights],
    }
    (first, _), (second, _) = weights[0]
    return {
        "rows": rows,
        "ms": {way: milliseconds(works[way]) for way in WAYS},
        "is_at_one_go": is_gated_in_pairs(x, first, scheme, second, scheme),
    }


def show(found: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        "rows", *(f"{way}, us" for way in WAYS), f"spared in {LAYERS} layers, ms", "chosen"
    )
    for row in found:
        ms = row["ms"]
        spared = LAYERS * (min(ms["in pairs"], ms["written out"]) - ms["at one go"])
        table.add_row(
            str(row["rows"]),
            *(f"{1e3 * ms[way]:.1f}" for way in WAYS),
            f"{spared:.2f}",
            "at one go" if row["is_at_one_go"] else "",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = [measure(rows) for rows in asked.rows]
    show(found, Console(width=140))
    keep(found, asked.json)


if __name__ == "__main__":
    main()
