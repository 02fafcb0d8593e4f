"""The measuring scripts of quantised products and MLPs run, on a card."""

import time

import pytest
from rich.console import Console

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


def test_small_shapes_are_measured_and_shown() -> None:
    from docs.results.quantized_matmul import SCHEMES, measure, show

    for kind in SCHEMES:
        found = measure(kind, [(512, 512)], [1, 64], time.monotonic() + 60)
        assert [row["M"] for row in found] == [1, 64]
        assert all(row["bf16_ms"] > 0 and min(row["dequantised_ms"].values()) > 0 for row in found)
        assert all(row["fused_ms"] for row in found)
    console = Console(width=140, record=True)
    show(found, console)
    assert "times as fast" in console.export_text()


def test_a_small_mlp_is_measured_and_shown() -> None:
    from docs.results.quantized_mlp import WAYS, measure, show

    found = [measure(rows, 512, 1024) for rows in (65, 1024)]
    assert all(row["ms"][way] > 0 for row in found for way in WAYS)
    console = Console(width=140, record=True)
    show(found, console)
    assert "spared" in console.export_text()
