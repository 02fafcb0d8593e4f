"""Quantised weights as the hubs' files have them, rounded to nearest: for checkpoints to try and test with.

Packs by arithmetic of its own: what reads the files is to be tried with them.
"""

# N output channels, K input channels, G groups that share a scale

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from actors.quantization.formats import QUANTIZE_NAMES, QuantizeName
from actors.rounding import cdiv

Stored = dict[str, Tensor]  # by the last parts of the tensors' names

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FP8_MAX = 448.0
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Quantizer:
    """One of the recipes.

    Attributes:
        config: the `quantization_config` of its checkpoints.
        dtype: what such checkpoints have the rest of their weights in.
        quantize: a projection's name and weights [N, K], float32 -> its tensors.
    """

    config: dict[str, Any]
    dtype: Literal["float16", "bfloat16"]
    quantize: Callable[[str, Tensor], Stored]


def quantizer(name: QuantizeName) -> Quantizer:
    """Raises ValueError: there is no such recipe."""
    if name not in QUANTIZE_NAMES:
        raise ValueError(f"unknown recipe {name!r}; choose one of {', '.join(QUANTIZE_NAMES)}")
    return _RECIPES[name]()


def is_quantized(name: str) -> bool:
    """Whether the parameter of that name is: the weights of projections in decoder layers, Mixtral's experts too."""
    return name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))


# --- values ---


def _symmetric(
    weight_NK: Tensor, group: int, bits: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Values [N, K] around 0 and scales [N, G]: the largest of a group is half the range."""
    groups_NGS = weight_NK.reshape(len(weight_NK), -1, group)
    half = (2**bits - 1) / 2
    scale_NG = (groups_NGS.abs().amax(2) / half).clamp(min=1e-6).to(dtype)
    top = 2 ** (bits - 1)
    q_NGS = (groups_NGS / scale_NG.float()[:, :, None]).round().clamp(-top, top - 1)
    return q_NGS.flatten(1).to(torch.int32), scale_NG


def _asymmetric(
    weight_NK: Tensor, group: int, bits: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Values [N, K] from 0 on, scales and zero points [N, G]: a group's least to its largest is the range."""
    groups_NGS = weight_NK.reshape(len(weight_NK), -1, group)
    least, most = groups_NGS.amin(2).clamp(max=0), groups_NGS.amax(2).clamp(min=0)
    top = 2**bits - 1
    scale_NG = ((most - least) / top).clamp(min=1e-6).to(dtype)
    zero_NG = (-least / scale_NG.float()).round().clamp(0, top)
    q_NGS = (groups_NGS / scale_NG.float()[:, :, None]).round() + zero_NG[:, :, None]
    q_NK = q_NGS.clamp(0, top).flatten(1).to(torch.int32)
    return q_NK, scale_NG, zero_NG.to(torch.int32)


def _order(name: str, K: int) -> Tensor:
    """Another order of the input channels for each projection."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randperm(K, generator=generator)


def _pack_rows(values_RC: Tensor, bits: int) -> Tensor:
    """int32 [R * bits / 32, C]: of each column as many values as go into a word, the first in its lowest bits."""
    per_word = 32 // bits
    words = torch.zeros_like(values_RC[::per_word], dtype=torch.int64)
    for place in range(per_word):
        words += values_RC[place::per_word].long() << (bits * place)
    return _as_int32(words)


def _as_int32(words: Tensor) -> Tensor:
    signed = torch.where(words >= 2**31, words - 2**32, words)
    return signed.to(torch.int32).contiguous()


# --- GPTQ ---


def _gptq(
    bits: int, group_size: int, sym: bool = True, desc_act: bool = False, form: str = "gptq"
) -> Quantizer:
    def quantize(name: str, weight_NK: Tensor) -> Stored:
        K = weight_NK.shape[1]
        group = K if group_size == -1 else group_size
        order_K = (_order(name, K) if desc_act else torch.arange(K)).to(weight_NK.device)
        weight_NK = weight_NK[:, order_K]
        if sym:
            q_NK, scale_NG = _symmetric(weight_NK, group, bits, torch.float16)
            q_NK = q_NK + 2 ** (bits - 1)
            zero_NG = torch.full_like(scale_NG, 2 ** (bits - 1), dtype=torch.int32)
        else:
            q_NK, scale_NG, zero_NG = _asymmetric(weight_NK, group, bits, torch.float16)
        own_NK = torch.empty_like(q_NK)
        own_NK[:, order_K] = q_NK
        groups_K = torch.empty(K, dtype=torch.int32, device=weight_NK.device)
        groups_K[order_K] = torch.arange(K, dtype=torch.int32, device=weight_NK.device) // group
        return {
            "qweight": _pack_rows(own_NK.T, bits),
            "qzeros": gptq_zeros(zero_NG.T, bits, form),
            "scales": scale_NG.T.contiguous(),
            "g_idx": groups_K,
        }

    config = {
        "bits": bits,
        "group_size": group_size,
        "damp_percent": 0.01,
        "desc_act": desc_act,
        "static_groups": False,
        "sym": sym,
        "true_sequential": True,
        "model_name_or_path": None,
        "model_file_base_name": "model",
        "quant_method": "gptq",
        "checkpoint_format": form,
    }
    return Quantizer(config, "float16", quantize)


def gptq_zeros(zero_GN: Tensor, bits: int, form: str) -> Tensor:
    """int32 [G, N * bits / 32]. The first format has 1 taken from each, which a 0 borrows from the next of its word."""
    words = _pack_rows(zero_GN.T, bits).T.long()
    if form == "gptq":
        words = (words - sum(1 << place for place in range(0, 32, bits))) % 2**32
    return _as_int32(words % 2**32)


# --- AWQ ---


def _awq(group: int) -> Quantizer:
    def quantize(name: str, weight_NK: Tensor) -> Stored:
        q_NK, scale_NG, zero_NG = _asymmetric(weight_NK, group, 4, torch.float16)
        return {
            "qweight": _awq_columns(q_NK.T),
            "qzeros": _awq_columns(zero_NG.T),
            "scales": scale_NG.T.contiguous(),
        }

    config = {
        "bits": 4,
        "group_size": group,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }
    return Quantizer(config, "float16", quantize)


def _awq_columns(values_RC: Tensor) -> Tensor:
    """int32 [R, C / 8]."""
    words = torch.zeros_like(values_RC[:, ::8], dtype=torch.int64)
    for place, column in enumerate(_AWQ_ORDER):
        words += values_RC[:, column::8].long() << (4 * place)
    return _as_int32(words)


# --- compressed-tensors ---


def _ct_config(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    own: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "observer": "minmax",
        "observer_kwargs": {},
        "symmetric": True,
    }
    group = {
        "input_activations": inputs,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**own, **weights},
    }
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _ct_packed(bits: int, group: int | None, sym: bool = True, order: bool = False) -> Quantizer:
    def quantize(name: str, weight_NK: Tensor) -> Stored:
        N, K = weight_NK.shape
        size = group or K
        order_K = (_order(name, K) if order else torch.arange(K)).to(weight_NK.device)
        weight_NK = weight_NK[:, order_K]
        stored: Stored = {"weight_shape": torch.tensor([N, K])}
        if sym:
            q_NK, scale_NG = _symmetric(weight_NK, size, bits, torch.bfloat16)
            q_NK = q_NK + 2 ** (bits - 1)
        else:
            q_NK, scale_NG, zero_NG = _asymmetric(weight_NK, size, bits, torch.bfloat16)
            stored["weight_zero_point"] = _pack_rows(zero_NG, bits)
        own_NK = torch.empty_like(q_NK)
        own_NK[:, order_K] = q_NK
        if order:
            groups_K = torch.empty(K, dtype=torch.int32, device=weight_NK.device)
            groups_K[order_K] = torch.arange(K, dtype=torch.int32, device=weight_NK.device) // size
            stored["weight_g_idx"] = groups_K
        words = _pack_rows(own_NK.T, bits).T.contiguous()
        return {"weight_packed": words, "weight_scale": scale_NG, **stored}

    weights = {
        "actorder": "group" if order else None,
        "group_size": group,
        "num_bits": bits,
        "strategy": "group" if group else "channel",
        "symmetric": sym,
        "type": "int",
    }
    return Quantizer(_ct_config("pack-quantized", weights, None), "bfloat16", quantize)


def _ct_int8() -> Quantizer:
    def quantize(name: str, weight_NK: Tensor) -> Stored:
        q_NK, scale_NG = _symmetric(weight_NK, weight_NK.shape[1], 8, torch.bfloat16)
        return {"weight": q_NK.to(torch.int8), "weight_scale": scale_NG}

    weights = {"num_bits": 8, "strategy": "channel", "type": "int"}
    return Quantizer(_ct_config("int-quantized", weights, None), "bfloat16", quantize)


def _ct_fp8(is_static: bool) -> Quantizer:
    def quantize(name: str, weight_NK: Tensor) -> Stored:
        most = weight_NK.abs().amax() if is_static else weight_NK.abs().amax(1, keepdim=True)
        scale = (most / _FP8_MAX).to(torch.bfloat16).reshape(1 if is_static else (-1, 1))
        stored = {"weight": _fp8(weight_NK / scale.float()), "weight_scale": scale}
        if is_static:
            stored["input_scale"] = torch.ones_like(scale)
        return stored

    strategy = "tensor" if is_static else "channel"
    inputs = {
        "dynamic": not is_static,
        "num_bits": 8,
        "strategy": "tensor" if is_static else "token",
        "symmetric": True,
        "type": "float",
    }
    weights = {"num_bits": 8, "strategy": strategy, "type": "float"}
    return Quantizer(_ct_config("float-quantized", weights, inputs), "bfloat16", quantize)


# --- FP8 ---


def _fp8_block() -> Quantizer:
    def quantize(name: str, weight_NK: Tensor) -> Stored:
        N, K = weight_NK.shape
        rows, columns = cdiv(N, _BLOCK), cdiv(K, _BLOCK)
        whole = weight_NK.new_zeros(rows * _BLOCK, columns * _BLOCK)
        whole[:N, :K] = weight_NK
        blocks = whole.view(rows, _BLOCK, columns, _BLOCK)
        scale = blocks.abs().amax((1, 3)) / _FP8_MAX
        values = blocks / scale[:, None, :, None]
        return {
            "weight": _fp8(values.view(whole.shape)[:N, :K]),
            "weight_scale_inv": scale,  # what divides when it is quantised; it multiplies
        }

    config = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [_BLOCK, _BLOCK],
    }
    return Quantizer(config, "bfloat16", quantize)


def _fp8_tensor() -> Quantizer:
    def quantize(name: str, weight_NK: Tensor) -> Stored:
        scale = weight_NK.abs().amax() / _FP8_MAX
        return {
            "weight": _fp8(weight_NK / scale),
            "weight_scale": scale,
            "input_scale": torch.ones_like(scale),
        }

    config = {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}
    return Quantizer(config, "bfloat16", quantize)


def _fp8(values: Tensor) -> Tensor:
    return values.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).contiguous()


_RECIPES: dict[QuantizeName, Callable[[], Quantizer]] = {
    "gptq-4-128": lambda: _gptq(4, 128),
    "gptq-4-128-order": lambda: _gptq(4, 128, desc_act=True),
    "gptq-4-channel": lambda: _gptq(4, -1),
    "gptq-4-32-asym": lambda: _gptq(4, 32, sym=False),
    "gptq-v2-4-32-asym": lambda: _gptq(4, 32, sym=False, form="gptq_v2"),
    "gptq-8-128": lambda: _gptq(8, 128),
    "awq-4-128": lambda: _awq(128),
    "ct-w4a16": lambda: _ct_packed(4, 128),
    "ct-w4a16-asym": lambda: _ct_packed(4, 128, sym=False),
    "ct-w4a16-order": lambda: _ct_packed(4, 128, order=True),
    "ct-w8a16": lambda: _ct_packed(8, None),
    "ct-int8": _ct_int8,
    "ct-fp8": lambda: _ct_fp8(is_static=False),
    "ct-fp8-static": lambda: _ct_fp8(is_static=True),
    "fp8-block": _fp8_block,
    "fp8-tensor": _fp8_tensor,
}
