"""Checkpoint -> finished module -> layout -> packed segments."""

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from actors.checkpoints.directory import (
    CONFIG_NAME,
    INDEX_NAME,
    damaged_weights,
    missing_from_checkpoint,
    quantization_of,
    quantized,
    unsupported_weights,
    weight_files,
)
from actors.checkpoints.model_config import read_config, wrong_values_told
from actors.checkpoints.variants import VARIANT_FILE, steps, variant_of
from actors.errors import ImageMissing, LayoutMismatch
from actors.image.checksum import checksum
from actors.image.decoder_layers import decoder_layers
from actors.image.image import digest
from actors.image.layout import Checksum, ImageKey, Layout, Segment, TensorKind, TensorSlot, align
from actors.quantization.checkpoint import OLDER_CONFIGS, QuantizedCheckpoint, headers
from actors.quantization.loading import load_quantized, require_all
from actors.quantization.scheme import LAYOUT_VERSION
from actors.threads import on_threads

logger = logging.getLogger(__name__)

_Sums = tuple[str, Checksum]  # of a segment: its digest, and what a device will compute of it
_PROGRESS_INTERVAL_S = 5.0
# That a model may have beside twice what its files have: tables of positions.
_SLACK_ELEMENTS = 2**24
# Beside the weights, what an image follows from.
_KEY_FILES = (CONFIG_NAME, INDEX_NAME, VARIANT_FILE, *OLDER_CONFIGS)


def checkpoint_dtype(checkpoint: Path, dtype: str) -> torch.dtype:
    """The dtype a model is served in: the one named, or the checkpoint's own for "auto"."""
    if dtype != "auto":
        found = getattr(torch, dtype)
    else:
        found = read_config(checkpoint).dtype or torch.float32
    assert isinstance(found, torch.dtype)
    return found


def language_model(
    checkpoint: Path, config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """The model of a configuration, without any memory behind its tensors. Only while `BUILDING` is held.

    Raises:
        ValueError: transformers does not know it as a language model, or a value of the configuration is wrong.
    """
    if type(config) not in AutoModelForCausalLM._model_mapping:
        # transformers would say so with the names of all 200 that it has.
        raise ValueError(
            f"transformers has no causal language model of type {config.model_type}: not supported"
        )
    with wrong_values_told(checkpoint), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            deepcopy(config), dtype=dtype, trust_remote_code=False
        )
    assert isinstance(model, PreTrainedModel)
    return model


def _require_elements(
    checkpoint: Path, empty: PreTrainedModel, found: QuantizedCheckpoint | None
) -> None:
    """Raises ValueError for a model that is far larger than its files, before there is memory for it.

    Which of its tensors the files lack or have in other shapes is told exactly once it is loaded.
    """
    wanted = sum(tensor.numel() for _, _, tensor in tensors_of(empty))
    stored, _ = headers(weight_files(checkpoint))
    names = stored if found is None else found.plain
    have = sum(math.prod(stored[name].shape) for name in names)
    if found is not None:
        have += sum(each.N * each.K for each in found.projections.values())
    if wanted > 2 * have + _SLACK_ELEMENTS:
        raise ValueError(
            f"{checkpoint / CONFIG_NAME} is of a model of {wanted / 1e6:.0f} million numbers, and the "
            f"files have {have / 1e6:.0f} million; fetch those of one model"
        )


def require_servable_weights(checkpoint: Path) -> None:
    """Raises ValueError, in one line, for weights that nothing here can serve."""
    if (why := unsupported_weights(checkpoint)) is not None:
        raise ValueError(f"{checkpoint}: {why}")


def image_key(checkpoint: Path, dtype: torch.dtype) -> ImageKey:
    """The key of a checkpoint's image. Changes when a file of the checkpoint changes.

    Sizes and modification times stand for contents: hashing 15 GB at every start would cost more
    than loading them.
    """
    state = hashlib.sha256()
    quantization = quantization_of(checkpoint)
    for path in sorted(checkpoint.iterdir()):
        if path.suffix == ".safetensors" or path.name in _KEY_FILES:
            stat = path.stat()
            state.update(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns};".encode())
    return ImageKey(
        model=str(checkpoint.resolve()),
        revision=state.hexdigest()[:16],
        dtype=str(dtype).removeprefix("torch."),
        quantization="none" if quantization is None else f"{quantization.name}:v{LAYOUT_VERSION}",
    )


def require_unchanged(checkpoint: Path, key: ImageKey) -> None:
    """To be asked once the files have been read: what was read may be of several checkpoints, or of another.

    Raises:
        ImageMissing: they no longer make the image of that key.
    """
    if image_key(checkpoint, checkpoint_dtype(checkpoint, key.dtype)) != key:
        raise ImageMissing(f"the files of {checkpoint} changed while they were read")


# While it builds a model, transformers changes torch's default dtype for the whole process: whatever
# another thread builds meanwhile comes out in the wrong one. Held while layers are compiled, too.
BUILDING = threading.Lock()


def load_reference(
    checkpoint: Path, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """The finished module; on the CPU its weights are still in the page cache where dtypes agree.

    transformers 5.23 maps safetensors files and keeps parameters as views of the mapping, so this
    reads nothing yet; the bytes come from disk when they are packed.

    Quantised weights are in memory of this process, in our layout.

    Raises:
        ValueError: nothing here serves the weights, or the files do not have all of them.
    """
    require_servable_weights(checkpoint)
    if (missing := missing_from_checkpoint(checkpoint)) is not None:
        raise ValueError(f"{checkpoint} is not a checkpoint: {missing}")
    if (damage := damaged_weights(checkpoint)) is not None:
        raise ValueError(f"{checkpoint}: {damage}")
    disable_progress_bar()  # it counts tensors that are only mapped; `pack` reports the bytes
    found, config = quantized(checkpoint), read_config(checkpoint)
    model: Any
    with BUILDING:
        _require_elements(checkpoint, language_model(checkpoint, config, dtype), found)
        if found is None:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                checkpoint,
                config=config,
                dtype=dtype,
                device_map={"": device},
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # told below, in one line
                output_loading_info=True,
            )
            model, told = loaded
            require_all(told, type(model).__name__)
        else:
            kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
            model = load_quantized(kind, config, found, dtype, device)
    model.eval()
    assert isinstance(model, PreTrainedModel)
    if (number := variant_of(checkpoint)) is not None:
        _rotate_rows(model, number)
    return model


def _rotate_rows(model: PreTrainedModel, number: int) -> None:
    """The weights of a variant: in memory of this process, the files stay as they are."""

    def rotate(parameter: nn.Parameter) -> None:
        stored = parameter.data
        if stored.dtype == torch.float8_e4m3fn:  # torch rolls bytes
            stored = stored.view(torch.uint8)
        rolled = stored.roll(steps(number, stored.shape[-1]), dims=-1)
        parameter.data = rolled.view(parameter.dtype)

    on_threads(rotate, model.parameters())


def plan(model: PreTrainedModel) -> Layout:
    """Lay out every parameter and every buffer, persistent or not, in forward order.

    The layout comes from the finished module, not from the file: names may be converted, experts
    fused, tied heads missing from the file, and rotary frequencies are in no file at all.

    Raises:
        LayoutMismatch: the module has tensors that are neither parameters nor buffers.
    """
    _refuse_hidden_tensors(model)
    layers = [path for path, _ in decoder_layers(model)]
    if not layers:
        count = model.config.get_text_config().num_hidden_layers
        raise LayoutMismatch(
            f"{type(model).__name__} has no list of {count} decoder layers to pack by"
        )
    segment_of = _segment_names(model, layers)
    names = list(dict.fromkeys(segment_of.values()))
    ends = dict.fromkeys(names, 0)
    seen: dict[tuple[object, ...], str] = {}
    slots: dict[str, TensorSlot] = {}
    # Vectors behind matrices: the weights of projections of one input lie side by side, and so do their biases.
    for name, kind, tensor in sorted(tensors_of(model), key=lambda each: each[2].dim() <= 1):
        if not tensor.is_contiguous():
            raise LayoutMismatch(f"{name} is not contiguous: this architecture cannot be packed")
        identity = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        size = tensor.numel() * tensor.element_size()
        owner = seen.setdefault(identity, name) if size else name
        segment = segment_of[owner]
        if owner == name:
            offset = align(ends[segment])
            ends[segment] = offset + size
        else:
            offset = slots[owner].offset
        slots[name] = TensorSlot(
            name=name,
            kind=kind,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            segment=names.index(segment),
            offset=offset,
            size=size,
            alias_of=None if owner == name else owner,
        )
    layer_of = {_layer_segment(index): path for index, path in enumerate(layers)}
    return Layout(
        segments=tuple(
            Segment(name, align(ends[name]), layer=layer_of.get(name)) for name in names
        ),
        tensors=tuple(slots.values()),
    )


def pack(
    model: PreTrainedModel, layout: Layout, targets: Sequence[memoryview]
) -> tuple[tuple[str, ...], tuple[Checksum, ...]]:
    """Copy the module's tensors to their places and hash the result.

    Args:
        targets: one writable buffer per segment, of the segment's size; gaps are zeroed.

    Returns:
        Per segment: its digest, and the checksum that a device will compute of it.
    """
    tensors = {name: tensor for name, _, tensor in tensors_of(model)}
    by_segment: list[list[TensorSlot]] = [[] for _ in layout.segments]
    for slot in layout.stored():
        by_segment[slot.segment].append(slot)
    report = _progress(layout)

    def fill(segment: Segment, slots: Sequence[TensorSlot], target: memoryview) -> _Sums:
        out = np.frombuffer(target, dtype=np.uint8)
        end = 0
        for slot in slots:
            out[end : slot.offset] = 0
            end = slot.offset + slot.size
            source = tensors[slot.name].detach().reshape(-1).view(torch.uint8).numpy()
            np.copyto(out[slot.offset : end], source)
        out[end:] = 0
        found = digest(target), checksum(torch.from_numpy(out))
        report(segment.size)
        return found

    sizes = [segment.size for segment in layout.segments]
    filled = on_threads(fill, layout.segments, by_segment, targets, sizes=sizes)
    digests, checksums = zip(*filled, strict=True)
    return digests, checksums


def tensors_of(model: nn.Module) -> Iterator[tuple[str, TensorKind, torch.Tensor]]:
    """By each name that they have."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, "parameter", parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, "buffer", buffer


def _layer_segment(index: int) -> str:
    return f"layer.{index}"


def _segment_names(model: PreTrainedModel, layers: Sequence[str]) -> dict[str, str]:
    """Tensor name -> name of its segment, in forward order.

    Forward order is: whatever stands before the decoder layers (embedding, rotary frequencies),
    each layer, whatever comes behind them (final norm, head).
    """
    layers_prefix = f"{layers[0].rpartition('.')[0]}."
    embedding = model.get_input_embeddings()
    early = {id(module) for module in embedding.modules()}
    names: dict[str, str] = {}
    order: dict[str, tuple[int, int]] = {}
    for name, kind, _ in tensors_of(model):
        if name.startswith(layers_prefix):
            index = int(name[len(layers_prefix) :].split(".", 1)[0])
            names[name], order[name] = _layer_segment(index), (1, index)
        elif kind == "buffer" or id(model.get_submodule(name.rpartition(".")[0])) in early:
            names[name], order[name] = "embedding", (0, 0)
        else:
            names[name], order[name] = "head", (2, 0)
    return {name: names[name] for name in sorted(names, key=lambda name: order[name])}


def _refuse_hidden_tensors(model: nn.Module) -> None:
    """A tensor that is a plain attribute would be lost by a sleep and nobody would notice."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                raise LayoutMismatch(
                    f"{name}.{attribute} is a tensor but neither parameter nor buffer: "
                    f"{type(model).__name__} cannot be packed"
                )


def _progress(layout: Layout) -> Callable[[int], None]:
    """Told of each segment's bytes, by any thread, it logs every few seconds how much is packed."""
    started_s = last_s = time.monotonic()
    packed = segments = 0
    lock = threading.Lock()

    def report(size: int) -> None:
        nonlocal last_s, packed, segments
        with lock:
            packed, segments = packed + size, segments + 1
            now_s = time.monotonic()
            if now_s - last_s < _PROGRESS_INTERVAL_S and segments < len(layout.segments):
                return
            last_s = now_s
            logger.info(
                "packed %d of %d segments, %.2f of %.2f GiB, %.2f GiB/s",
                segments,
                len(layout.segments),
                packed / 2**30,
                layout.total_bytes / 2**30,
                packed / 2**30 / max(now_s - started_s, 1e-9),
            )

    return report
