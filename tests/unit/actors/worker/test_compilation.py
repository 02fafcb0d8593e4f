"""Layers compiled on a thread of their own, beside what other threads of the process do."""

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.image.packer import BUILDING
from actors.worker.compilation import BackgroundCompilation
from actors.worker.lull import Lull


@pytest.fixture
def default_dtype() -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    yield before
    torch.set_default_dtype(before)


def compilation(compile_layers: Callable[[], None]) -> BackgroundCompilation:
    engine: Any = SimpleNamespace(compiles=True, compile=compile_layers)
    return BackgroundCompilation(
        engine, lambda: None, lambda: None, nullcontext(), is_busy=lambda: False
    )


def test_no_model_is_built_while_layers_are_compiled(
    default_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both change torch's default dtype for the whole process, and put back what they found."""
    monkeypatch.setattr(Lull, "wait", lambda self: True)
    tracing, may_end = threading.Event(), threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        tracing.set()
        assert may_end.wait(30)
        return graph.forward

    double = torch.compile(lambda x: x + x, backend=backend)
    found = []

    def build() -> None:
        with BUILDING:
            torch.set_default_dtype(torch.bfloat16)  # as transformers does
            may_end.set()
            compiling.join()
            found.append(torch.get_default_dtype())
            torch.set_default_dtype(default_dtype)

    compiling = compilation(lambda: double(torch.ones(3)))
    building = threading.Thread(target=build)
    try:
        assert tracing.wait(30)
        building.start()
        building.join(0.2)
        assert not found
    finally:
        may_end.set()
        compiling.join()
        building.join()
        torch.compiler.reset()
    assert found == [torch.bfloat16]
    assert torch.get_default_dtype() == default_dtype


def test_no_layers_are_compiled_while_a_model_is_built(
    default_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lull, "wait", lambda self: True)
    found = []
    with BUILDING:
        torch.set_default_dtype(torch.bfloat16)
        compiling = compilation(lambda: found.append(torch.get_default_dtype()))
        compiling._thread.join(0.2)
        torch.set_default_dtype(default_dtype)
    compiling.join()
    assert found == [default_dtype]


def test_who_keeps_a_compilation_off_keeps_no_model_from_being_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As who sleeps deep does, for hours."""
    is_quiet, compiled = threading.Event(), threading.Event()
    monkeypatch.setattr(Lull, "wait", lambda self: is_quiet.wait(30))
    compiling = compilation(compiled.set)
    with compiling.kept_off():
        is_quiet.set()
        compiling._thread.join(0.2)
        assert BUILDING.acquire(timeout=10)
        BUILDING.release()
        assert not compiled.is_set()
    compiling.join()
    assert compiled.is_set()
