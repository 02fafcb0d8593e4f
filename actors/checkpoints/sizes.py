"""How large the packed image of a checkpoint will be, by its files' headers. No torch."""

from collections import Counter
from pathlib import Path

from actors.checkpoints.directory import quantized, weight_files
from actors.checkpoints.model_config import own_dtype
from actors.quantization.checkpoint import headers
from actors.quantization.formats import Projection, StoredTensor, Unserved

# As a safetensors header has them -> torch's name, bytes.
_TYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_CONVERTED = ("F64", "F32", "F16", "BF16")  # to the type that the model is served in
_BYTES = dict(_TYPES.values())


def image_sizes(checkpoint: Path, dtype: str) -> dict[str, int]:
    """Bytes of the image's weights by their types, as torch names them.

    Buffers and gaps between tensors come on top: some KB for each layer.

    Args:
        checkpoint: complete, and of weights that are served.
        dtype: that the model is served in; "auto": the checkpoint's own.

    Raises:
        Unserved: a file is unreadable, or its weights are not served right.
    """
    own = own_dtype(checkpoint) if dtype == "auto" else dtype
    found = quantized(checkpoint)
    tensors, _ = headers(weight_files(checkpoint))
    sizes: Counter[str] = Counter()
    for name in tensors if found is None else found.plain:
        kind, size = _plain(tensors[name], own)
        sizes[kind] += size
    for projection in () if found is None else found.projections.values():
        sizes.update(_quantised(projection, own))
    return dict(sizes)


def _plain(tensor: StoredTensor, own: str) -> tuple[str, int]:
    if tensor.dtype not in _TYPES:
        raise Unserved(f"a tensor of type {tensor.dtype} is not supported")
    kind = own if tensor.dtype in _CONVERTED else _TYPES[tensor.dtype][0]
    size = _BYTES[kind]
    for each in tensor.shape:
        size *= each
    return kind, size


def _quantised(projection: Projection, own: str) -> dict[str, int]:
    """As `actors.quantization.scheme` has its tensors; a bias is among the plain ones."""
    scheme, N, K = projection.scheme, projection.N, projection.K
    rows, columns = scheme.weight_shape(K, N)
    groups, sharing = scheme.scales_shape(K, N)
    scales, is_fp8 = groups * sharing, scheme.kind == "fp8"
    sizes = Counter({"float8_e4m3fn" if is_fp8 else "uint8": rows * columns})
    kind = "float32" if is_fp8 else own
    sizes[kind] += scales * _BYTES[kind]
    if scheme.zeros:
        sizes["uint8"] += scales
    if scheme.permuted:
        sizes["int32"] += 4 * K
    return dict(sizes)
