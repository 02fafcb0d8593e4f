"""Kernels compile for cards that are not here: what only a compiler sees, Triton's interpreter does not."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.image.layout import FLOAT_TYPES

pytest.importorskip("triton")

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # of a block, at most: CUDA's programming guide
# Kind, dtype, whether of experts; and of weights that are written out.
PRODUCTS = (
    ("int4", "bf16", False),
    ("int4", "fp16", True),
    ("int8", "fp16", False),
    ("int8", "bf16", True),
    ("fp8", "bf16", False),
    ("fp8", "bf16", True),
)
WRITTEN = (("int4", "fp32"), ("fp8", "bf16"))
_DIVISIBLE = [["tt.divisibility", 16]]  # as launches say of aligned addresses


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_kernels_compile_for_cards_that_are_not_here(project: Path, capability: int) -> None:
    """In a process of its own: here they are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.actors.test_kernels_compile", str(capability)]
    found = subprocess.run(
        command,
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    of_cascade = len(FLOAT_TYPES) * 4
    of_single_rows = 2
    expected = of_cascade + len(PRODUCTS) + len(WRITTEN) + of_single_rows
    of_pairs = 6 if capability == 90 else 0
    of_gates = 1
    assert found.stdout.count("compiled") == expected + of_pairs + of_gates


def compiled(
    kernel: Any,
    capability: int,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, int] | None = None,
) -> str:
    """The assembly.

    Args:
        types: of its arguments, as Triton writes them; addresses are multiples of 16.
        constants: of its other arguments.
        options: warps and stages; those of decompression when absent.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
    divisible = [name for name, kind in types.items() if kind.startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=dict(constants),
        attrs={(kernel.arg_names.index(name),): _DIVISIBLE for name in divisible},
    )
    target = GPUTarget("cuda", capability, 32)
    how = {"num_warps": 4, "num_stages": 4} if options is None else dict(options)
    made = triton.compile(source, target=target, options=how)
    assert made.metadata.shared <= SHARED_BYTES[capability], constants
    print("compiled", kernel.__name__, capability, dict(constants))
    return str(made.asm["ptx"])


def compile_cascade(capability: int) -> None:
    from actors.image import cascade, cascade_kernel

    decode = cascade_kernel._decode
    for dtype, word in cascade.WORDS.items():
        weights = "*u8" if word == torch.uint8 else "*i16"
        constants = {"DTYPE": dtype, "PIECE_BYTES": cascade.PIECE_BYTES}
        constants |= {"BLOCK": cascade.BLOCK, "ROW": cascade.ROW}
        types = types_of(decode, constants, {"data": "*u8", "out": weights})
        compiled(decode, capability, types, constants)
        constants = {"DTYPE": dtype, "RANKS": cascade.RANKS, "BLOCK": cascade.BLOCK}
        pointers = {"weights": weights, "ranks": "*u8", "found": "*i64", "starts": "*i64"}
        pointers |= {"level_2": "*i64"}
        pointers |= dict.fromkeys(("codes", "mantissas", "rests", "tails"), "*u8")
        for kernel in (cascade_kernel._count, cascade_kernel._encode):
            compiled(kernel, capability, types_of(kernel, constants, pointers), constants)
        constants = {"DTYPE": dtype, "EXPONENTS": cascade.EXPONENTS, "BLOCK": cascade.BLOCK}
        types = types_of(
            cascade_kernel._frequencies, constants, {"weights": weights, "counts": "*i64"}
        )
        compiled(cascade_kernel._frequencies, capability, types, constants)


def compile_products(capability: int) -> None:
    """With the tile of most rows, which takes the most registers and shared memory."""
    from actors.quantization import gating, kernels, pairs, single_row

    for kind, dtype, of_experts in PRODUCTS:
        # The tiles of experts are those of any card.
        _, tile = kernels.tiles(kind, capability == 90 and not of_experts)[-1]
        constants = {"KIND": kind, "EXPERTS": of_experts, "ZEROS": kind != "fp8"}
        constants |= {"ONE_GROUP": False, "WORDS": True, "FP8_UNIT": capability >= 89}
        constants |= {"BM": tile.rows, "BN": tile.columns, "BK": tile.channels}
        constants |= {"TURNED": tile.turned}
        pointers = {"x": f"*{dtype}", "out": f"*{dtype}", "weight": "*u8", "zeros": "*u8"}
        pointers |= {"tiles": "*i32", "scales": "*fp32" if kind == "fp8" else f"*{dtype}"}
        types = types_of(kernels._fused, constants, pointers)
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        compiled(kernels._fused, capability, types, constants, options)
    for one_scale in (False, True):
        constants = {"ONE_SCALE": one_scale, "WHOLE": one_scale, "FP8_UNIT": capability >= 89}
        turn = single_row.TURN
        constants |= {"CHANNELS": turn.channels, "BLOCKS": turn.blocks, "STAGES": turn.stages}
        constants |= {"BLOCK": single_row.BLOCK}
        pointers = {"x": "*bf16", "out": "*bf16", "weight": "*u8", "scales": "*fp32"}
        types = types_of(single_row._product, constants, pointers)
        compiled(single_row._product, capability, types, constants, {"num_warps": turn.warps})
    constants = {"CHANNELS": 1024}
    types = types_of(gating._gate, constants, {"gate_up": "*bf16", "out": "*bf16"})
    compiled(gating._gate, capability, types, constants)
    for in_pairs in (True, False) if capability == 90 else ():
        constants = {"PAIRS": in_pairs, "ONES": False, "ROWS": 8}
        constants |= {"BLOCK": pairs.BLOCK, "COLUMNS": 512}
        pointers = {"x": "*bf16", "parts": "*fp8e4nv"}
        pointers |= dict.fromkeys(("scales", "factors", "of_weight"), "*fp32")
        compiled(pairs._split, capability, types_of(pairs._split, constants, pointers), constants)
        constants = {"PAIRS": in_pairs, "SCALED": True, "MORE": 1 + in_pairs, "BLOCK": 1024}
        pointers = {"sums": "*bf16", "out": "*bf16", "scales": "*fp32", "more": "*bf16"}
        compiled(pairs._add, capability, types_of(pairs._add, constants, pointers), constants)
        constants = {"SCALED": not in_pairs, "ONES": not in_pairs, "ROWS": 8}
        constants |= {"BLOCK": pairs.BLOCK, "COLUMNS": 32}
        pointers = {"sums": "*bf16", "parts": "*fp8e4nv"}
        pointers |= dict.fromkeys(("of_columns", "scales", "factors", "of_weight"), "*fp32")
        types = types_of(pairs._split_of_gated, constants, pointers)
        compiled(pairs._split_of_gated, capability, types, constants)
    for kind, dtype in WRITTEN:
        constants = {"KIND": kind, "ZEROS": False, "ONE_GROUP": False}
        constants |= {"FP8_UNIT": capability >= 89, "BN": 64, "BK": 128}
        pointers = {"weight": "*u8", "zeros": "*u8", "out": f"*{dtype}"}
        pointers |= {"scales": "*fp32" if kind == "fp8" else f"*{dtype}"}
        types = types_of(kernels._write, constants, pointers)
        compiled(kernels._write, capability, types, constants)


def types_of(
    kernel: Any, constants: Mapping[str, Any], pointers: Mapping[str, str]
) -> dict[str, str]:
    return {n: pointers.get(n, "i32") for n in kernel.arg_names if n not in constants}


if __name__ == "__main__":
    compile_cascade(int(sys.argv[1]))
    compile_products(int(sys.argv[1]))
