"""torch.compile for a model's decoder layers, prepared on memory of its own.

All layers of a class share one compiled forward, so a model of any depth costs the compile time of
one layer. A layer is compiled by running it; here a copy runs, with weights and inputs that nobody
else uses, so that the model may serve, sleep and wake meanwhile. What comes out is found again by the
real layers, because torch guards on shapes and attributes, not on identities.

Inductor keeps its results on disk (TORCHINDUCTOR_CACHE_DIR): the next start pays for tracing only.
"""

# Q new tokens in a step

import copy
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Tracer
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from actors.engine.model.paged_step import Rehearsal, computing
from actors.image.decoder_layers import decoder_layers
from actors.quantization.mlp import GatedMlp

logger = logging.getLogger(__name__)

CACHE_DIR = Path("~/.cache/sleepserve/compile")

_SWITCH_S = 1e-4

# For the whole process, once layers of any of its models run compiled.
_IN_USE = "eager_on_recompile"
_are_in_use = False


class CompiledLayers:
    """The decoder layers of one model, compiled first and put to use later.

    Attributes:
        active: whether the layers run compiled, once installed; to be set before a forward.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Prepare copies of the layers; they have no memory yet."""
        self.active = False
        self._model = model
        self._layers = [module for _, module in decoder_layers(model)]
        self._copies = [_on_meta(layer) for layer in self._layers]
        self._forwards: dict[type, Callable[..., Any]] = {}
        # Of each layer: the first call for one token (1) and for more than one (2).
        self._calls: list[dict[int, _Call]] = [{} for _ in self._layers]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note down what the layers are called with, for the rehearsal."""

        def note(index: int) -> Callable[..., None]:
            def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                hidden = args[0] if args else kwargs["hidden_states"]
                Q = hidden.shape[1]
                self._calls[index].setdefault(min(Q, 2), _Call(args, kwargs))

            return hook

        handles = [
            layer.register_forward_pre_hook(note(i), with_kwargs=True)
            for i, layer in enumerate(self._layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def compile(self) -> None:
        """Compile for one token and for many. Blocks for seconds; any thread may call.

        Takes device memory for one layer's weights meanwhile.

        Raises:
            Exception: anything that torch.compile runs into.
        """
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE_DIR.expanduser()))
        started_s = time.perf_counter()
        device = self._model.device
        _spare_other_threads()
        with _polite_to_other_threads():
            self._compile_on(device)
        seconds = time.perf_counter() - started_s
        logger.info("compiled %d decoder layers in %.1f s", len(self._layers), seconds)

    def _compile_on(self, device: torch.device) -> None:
        options: dict[str, Any] = {}
        if any(isinstance(module, GatedMlp) for module in self._model.modules()):
            # Here, as torch's compiler takes its time to be imported.
            from actors.engine.model.joined_residuals import JoinedResiduals

            options["post_grad_custom_post_pass"] = JoinedResiduals()
        for kind in {type(layer) for layer in self._layers}:
            self._forwards[kind] = torch.compile(kind.forward, dynamic=True, options=options)
        with _may_compile(), torch.no_grad(), computing(Rehearsal()):
            for layer, calls in zip(self._copies, self._calls, strict=True):
                try:
                    layer.to_empty(device=device)
                    # The many first: made for one token, the code would be made again for any number.
                    for _, call in sorted(calls.items(), reverse=True):
                        args, kwargs = call.tensors()
                        self._forwards[type(layer)](layer, *args, **kwargs)
                finally:
                    layer.to_empty(device="meta")

    def install(self) -> None:
        """Let the layers run compiled. Not while one of them runs.

        From now on nothing is compiled in this process: a call that fits no compiled code runs as
        it would without.
        """
        for layer in self._layers:
            layer.forward = self._either(layer)
        global _are_in_use
        self._copies, self._calls = [], []
        _are_in_use = True
        torch.compiler.set_stance(_IN_USE)

    def _either(self, layer: nn.Module) -> Callable[..., Any]:
        plain, compiled = layer.forward, self._forwards[type(layer)]

        def forward(*args: Any, **kwargs: Any) -> Any:
            return compiled(layer, *args, **kwargs) if self.active else plain(*args, **kwargs)

        return forward


@contextmanager
def _may_compile() -> Iterator[None]:
    """Have the body compile. Another model's layers may be put to use meanwhile: the stance of before is not put back."""
    torch.compiler.set_stance("default")
    try:
        yield
    finally:
        torch.compiler.set_stance(_IN_USE if _are_in_use else "default")


@cache
def _spare_other_threads() -> None:
    """Have torch.fx call modules that are not of what it traces as if it traced nothing; for good.

    While it traces, it takes the place of `nn.Module.__call__` for all threads, and raises for a module that it does
    not know: one that the engine runs meanwhile, for a request. Inductor traces so for a moment, once in a process
    (loop_body.InterpreterShim).
    """
    call_module = Tracer.call_module

    def call(
        tracer: Tracer,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            tracer.path_of_module(m)
        except NameError:
            return forward(*args, **kwargs)
        return call_module(tracer, m, forward, args, kwargs)

    Tracer.call_module = call  # type: ignore[assignment]


@contextmanager
def _polite_to_other_threads() -> Iterator[None]:
    """Have a thread that wants the GIL wait less for it than the 5 ms that are usual.

    Tracing keeps the GIL for seconds, and a step of the engine asks for it again after every kernel
    it launches: the first request of a replica took 2.8 s on an H200, most of it waiting.
    """
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


class _Call:
    """The arguments of one call of a layer, to be made again with other tensors."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._arguments = tree_map(_Shape.of, (args, kwargs))

    def tensors(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        made: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(_Shape.make, self._arguments)
        return made


class _Shape:
    """What torch's guards see of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._like = tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    @staticmethod
    def of(value: Any) -> Any:
        return _Shape(value) if isinstance(value, Tensor) else value

    @staticmethod
    def make(value: Any) -> Any:
        if not isinstance(value, _Shape):
            return value
        shape, stride, dtype, device = value._like
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


def _on_meta(layer: nn.Module) -> nn.Module:
    """A copy without memory; what is no tensor and has no module is shared."""
    memo: dict[int, Any] = {
        id(value): value
        for module in layer.modules()
        for value in vars(module).values()
        if not isinstance(value, dict | nn.Module) and not _has_module(value)
    }
    with torch.device("meta"):
        for parameter in layer.parameters():
            empty = nn.Parameter(
                torch.empty_like(parameter, device="meta"), parameter.requires_grad
            )
            memo[id(parameter)] = empty
        for buffer in layer.buffers():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(layer, memo)


def _has_module(value: Any) -> bool:
    """A module that is no submodule hides in a tuple."""
    return isinstance(value, tuple) and any(isinstance(each, nn.Module) for each in value)
