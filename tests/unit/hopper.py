"""Triton kernels compiled for a Hopper card, or another, where there is none.

The interpreter, in which tests run kernels on a CPU, accepts what the compiler does not.
"""

import os
import subprocess
import sys
from pathlib import Path

_COMPILER = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compiled(kernel, types, constants, capability=90, **options):
    # `types` and `constants` are those of all arguments that have such names.
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
    by_place = {(i,): constants[n] for i, n in enumerate(kernel.arg_names) if n in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=by_place)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
"""


def run_with_compiler(script: str) -> None:
    """Run a script that has `compiled`, in a process that never interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    project = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join((str(project), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", _COMPILER + script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
