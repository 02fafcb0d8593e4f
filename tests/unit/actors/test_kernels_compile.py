"""Kernels compile for cards that are not here: what only a compiler sees, Triton's interpreter does not."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

CAPABILITIES = (80, 90)
_DIVISIBLE = [["tt.divisibility", 16]]  # as launches say of aligned addresses


def test_kernels_compile_for_cards_that_are_not_here(project: Path) -> None:
    """In a process of its own: here they are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.actors.test_kernels_compile"]
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
    assert found.stdout.count("compiled") == 2 * len(CAPABILITIES)


def compiled(
    kernel: Any, capability: int, types: Mapping[str, str], constants: Mapping[str, Any]
) -> str:
    """The assembly.

    Args:
        types: of its arguments, as Triton writes them; addresses are multiples of 16.
        constants: of its other arguments.
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
    made = triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 4})
    print("compiled", kernel.__name__, capability, dict(constants))
    return str(made.asm["ptx"])


def main() -> None:
    from actors.image import cascade, cascade_kernel

    kernel = cascade_kernel._decode
    for capability in CAPABILITIES:
        for half in (False, True):
            constants = {"HALF": half, "PIECE_BYTES": cascade.PIECE_BYTES}
            constants |= {"BLOCK": cascade.BLOCK, "ROW": cascade.ROW}
            types = dict.fromkeys((n for n in kernel.arg_names if n not in constants), "i32")
            compiled(kernel, capability, types | {"data": "*u8", "out": "*i16"}, constants)


if __name__ == "__main__":
    main()
