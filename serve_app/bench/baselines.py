"""What one would do without us: a transformers model whose weights leave the device and come back."""

import ctypes
import gc
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import util
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from transformers import PreTrainedModel

from actors.image.packer import load_reference
from serve_app.bench.local import Prompt

DeviceMap = Literal["auto", "balanced", "balanced_low_0"]


class Baseline(Protocol):
    """One model in this process. Built awake; `wake` and `sleep` return when they are done."""

    def first_token(self, prompt: Prompt) -> int: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...

    def close(self) -> None:
        """Give everything back, on the device and on the host."""


class _Module:
    """A transformers model and its greedy first token."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._model: Any = model
        self._device = device

    def first_token(self, prompt: Prompt) -> int:
        ids = torch.tensor([prompt], device=self._device)
        with torch.inference_mode():
            logits = self._model(ids, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())

    def close(self) -> None:
        self._model = None
        gc.collect()  # modules and hooks refer to each other
        _trim(self._device)


class ToHost(_Module):
    """`model.to("cpu")`, and back with `.to` the device."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(load_reference(checkpoint, dtype, device), device)

    def sleep(self) -> None:
        self._model.to("cpu")
        _trim(self._device)

    def wake(self) -> None:
        self._model.to(self._device)
        _finish(self._device)


class ToPinnedHost(ToHost):
    """`model.to("cpu")`, then a pinned copy of each tensor, made anew in every sleep; back with `.to`.

    As KTSE does it (https://github.com/Ksuserkqy/dcu-q3, ktse.py at 141f186: sleep, wake), but for
    tensors that several modules share: they stay one.
    """

    def sleep(self) -> None:
        self._model.to("cpu")
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            tensor.data = tensor.data.pin_memory()
        _trim(self._device)

    def close(self) -> None:
        super().close()
        if self._device.type == "cuda":
            # torch keeps freed pinned memory for later; public since 2.13.
            public = getattr(torch.accelerator, "empty_host_cache", None)
            (public or torch._C._host_emptyCache)()


class Dispatched(_Module):
    """`model.to("cpu")`, and back with accelerate's `dispatch_model` and the map that it makes.

    With one card, accelerate finds that everything fits there and moves the model as `.to` does; the
    maps differ where there are several.
    """

    def __init__(
        self, checkpoint: Path, dtype: torch.dtype, device: torch.device, device_map: DeviceMap
    ) -> None:
        super().__init__(load_reference(checkpoint, dtype), device)
        self._device_map = device_map
        self.wake()

    def sleep(self) -> None:
        from accelerate.hooks import remove_hook_from_submodules

        remove_hook_from_submodules(self._model)  # with hooks on, accelerate refuses to move it
        self._model.to("cpu")
        _trim(self._device)

    def wake(self) -> None:
        from accelerate import dispatch_model, infer_auto_device_map
        from accelerate.utils import get_balanced_memory

        # As accelerate makes them of these words (big_modeling.py, load_checkpoint_and_dispatch).
        whole = self._model._no_split_modules
        memory = get_balanced_memory(
            self._model,
            no_split_module_classes=whole,
            low_zero=self._device_map == "balanced_low_0",
        )
        places = infer_auto_device_map(
            self._model, max_memory=memory, no_split_module_classes=whole
        )
        self._model = dispatch_model(self._model, device_map=places)
        _finish(self._device)


class SavedRegion(_Module):
    """torch-memory-saver: pages unmapped behind stable addresses, their bytes kept in pinned host memory.

    Its pool and, if retained, the copy on the host stay after `close`: it has no call that ends them.
    """

    def __init__(
        self, checkpoint: Path, dtype: torch.dtype, device: torch.device, retain: bool
    ) -> None:
        """Load, and move to the device inside a region.

        Args:
            retain: keep the host's copy over a wake, instead of allocating it for each sleep, as it
                does by default.
        """
        self._saver = _memory_saver()
        self._saver.retain_cpu_backup = retain
        # A region takes what its own thread allocates, and transformers loads in several.
        model: Any = load_reference(checkpoint, dtype)
        self._saver.resume()  # what the one before has left asleep is used again
        with self._saver.region(enable_cpu_backup=True):
            model.to(device)
        super().__init__(model, device)

    def sleep(self) -> None:
        _trim(self._device)
        self._saver.pause()

    def wake(self) -> None:
        self._saver.resume()
        _finish(self._device)


@cache
def _memory_saver() -> Any:
    from torch_memory_saver import torch_memory_saver

    # The other mode wants its library preloaded when the process starts.
    torch_memory_saver.hook_mode = "torch"
    # Never to be collected: to free its pool outside of a region ends the process with exit code 1 (0.0.10).
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch_memory_saver))
    return torch_memory_saver


class FreshLoad(_Module):
    """Thrown away, and loaded again from its safetensors files."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(load_reference(checkpoint, dtype, device), device)
        self._checkpoint, self._dtype = checkpoint, dtype

    def sleep(self) -> None:
        self.close()

    def wake(self) -> None:
        self._model = load_reference(self._checkpoint, self._dtype, self._device)
        _finish(self._device)


Make = Callable[[Path, torch.dtype, torch.device], Baseline]


BASELINES: Mapping[str, Make] = {
    "to": ToHost,
    "to-pinned": ToPinnedHost,
    "dispatch-auto": partial(Dispatched, device_map="auto"),
    "dispatch-balanced": partial(Dispatched, device_map="balanced"),
    "dispatch-balanced_low_0": partial(Dispatched, device_map="balanced_low_0"),
    "fresh-load": FreshLoad,
    "memory-saver": partial(SavedRegion, retain=False),
    "memory-saver-retained": partial(SavedRegion, retain=True),
}


def why_not(name: str, device: torch.device) -> str | None:
    """Why a baseline makes no sense here; None when it does."""
    if device.type == "cpu" and name != "fresh-load":
        return "no CUDA device: the weights would go nowhere"
    if name.startswith("memory-saver") and util.find_spec("torch_memory_saver") is None:
        return "torch-memory-saver is not installed"
    return None


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _trim(device: torch.device) -> None:
    """What torch's allocator keeps without using it goes back to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
