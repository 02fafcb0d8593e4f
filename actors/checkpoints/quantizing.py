"""Checkpoints quantised from given weights: rounded to nearest, to try a format with, not for its best answers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from actors.checkpoints.directory import (
    CONFIG_NAME,
    INDEX_NAME,
    WEIGHTS_NAME,
    config_of,
    is_ours,
    missing_from_checkpoint,
    quantization_of,
    unsupported_weights,
    weight_files,
)
from actors.checkpoints.recipes import RECIPE_FILE
from actors.checkpoints.variants import VARIANT_FILE
from actors.checkpoints.writing import whole_directory, write_shard
from actors.quantization.formats import QuantizeName
from actors.quantization.making import Quantizer, is_quantized, quantizer


def quantize_checkpoint(
    directory: Path,
    source: Path,
    name: QuantizeName,
    *,
    force: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write a checkpoint with the weights of another, its projections quantised; one file at a time is in memory.

    Returns:
        `directory`.

    Raises:
        ValueError: the source is no checkpoint or not a plain one, there is no such recipe, or `directory` has
            something in it.
    """
    how = quantizer(name)
    if (missing := missing_from_checkpoint(source)) is not None:
        raise ValueError(f"{source} is not a checkpoint: {missing}")
    if (source / VARIANT_FILE).exists():
        raise ValueError(f"{source} is a variant; name the checkpoint that it comes from")
    if (why := unsupported_weights(source)) is not None:
        raise ValueError(f"{source}: {why}")
    if quantization_of(source) is not None:
        raise ValueError(f"{source} is quantised already")
    config = config_of(source)
    if not force and directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} has files in it; --force replaces them")
    files = weight_files(source)
    total, done = sum(file.stat().st_size for file in files), 0
    with whole_directory(directory) as partial:
        for file in source.iterdir():
            if file.is_file() and not _is_of_weights(file.name):
                shutil.copyfile(file, partial / file.name)
        config.pop("torch_dtype", None)  # the older name
        config |= {"dtype": how.dtype, "quantization_config": how.config}
        (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        weight_map: dict[str, str] = {}
        stored = 0
        for file in files:
            tensors = _quantised_file(file, how)
            write_shard(tensors, partial / file.name)
            weight_map.update(dict.fromkeys(tensors, file.name))
            stored += sum(tensor.nbytes for tensor in tensors.values())
            done += file.stat().st_size
            on_progress(done, total)
        if [file.name for file in files] != [WEIGHTS_NAME]:
            write_index(partial, weight_map, stored)
    return directory


def quantised(name: str, weight: torch.Tensor, how: Quantizer) -> dict[str, torch.Tensor]:
    """A projection's tensors by their names in a file; computed on a card where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stored = how.quantize(name, weight.to(device).float())
    return {f"{name}.{leaf}": tensor.cpu() for leaf, tensor in stored.items()}


def write_index(directory: Path, weight_map: dict[str, str], stored: int) -> None:
    """Which of several files has which tensor; transformers wants it."""
    index: dict[str, Any] = {"metadata": {"total_size": stored}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _is_of_weights(name: str) -> bool:
    """Whether a file has weights of the source, or says something about them only."""
    return name.endswith(".safetensors") or name in (INDEX_NAME, RECIPE_FILE) or is_ours(name)


def _quantised_file(file: Path, how: Quantizer) -> dict[str, torch.Tensor]:
    dtype = getattr(torch, how.dtype)
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  # it is no dictionary
            tensor = opened.get_tensor(name)
            if is_quantized(name) and tensor.dim() == 2:
                tensors |= quantised(name.removesuffix(".weight"), tensor, how)
            else:
                tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return tensors
