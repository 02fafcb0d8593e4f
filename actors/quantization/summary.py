"""How the quantised weights of a model are multiplied: in a line for the log, and what it takes beside them."""

from collections import Counter

import torch
from torch import nn

from actors.quantization.experts import QuantizedStack
from actors.quantization.linear import QuantizedLinear, QuantizedWeight
from actors.quantization.scheme import WRITTEN_BYTES, Scheme


def summary(model: nn.Module, device: torch.device) -> str | None:
    """None: the model has no quantised weights."""
    weights = [each for each in model.modules() if isinstance(each, QuantizedWeight)]
    if not weights:
        return None
    told = Counter(_text(each.scheme, isinstance(each, QuantizedStack)) for each in weights)
    text = ", ".join(f"{count} of {kind}" for kind, count in told.most_common())
    if device.type == "cpu":
        return f"quantised weights: {text}; written out for each product"
    from actors.quantization import few_rows, kernels, products  # Triton is there where a GPU is

    kinds = sorted({each.scheme.kind for each in weights})
    most = {kind: kernels.tiles(kind, kernels.is_hopper(device))[-1][0] for kind in kinds}
    ways = "fused products up to " + ", ".join(
        f"{rows} rows ({kind})" for kind, rows in most.items()
    )
    apart = []
    linear = [each for each in weights if isinstance(each, QuantizedLinear)]
    if any(
        products.takes_single_rows(each.scheme, each.in_features, each.dtype, device)
        for each in linear
    ):
        apart.append("of fp8 one row without tensor cores")
    of_cores = [
        each
        for each in linear
        if products.takes_pairs(
            each.scheme, each.out_features, each.in_features, each.dtype, device
        )
    ]
    if any(each.quantises for each in of_cores):
        apart.append(f"of fp8 quantised inputs, in FP8 from {products.QUANTISED_FROM} rows")
    if not all(each.quantises for each in of_cores):
        apart.append(
            f"of fp8 pairs from {products.PAIRS_FROM} to {products.PAIRS_UP_TO} where they are faster"
        )
    if any(
        products.takes_few_rows(each.scheme, each.in_features, each.dtype, device)
        for each in linear
    ):
        apart.append(f"of int4 up to {few_rows.MOST_ROWS} with weights that are not rounded")
    if apart:
        ways += f", but {' and '.join(apart)}"
    return f"quantised weights: {text}; {ways}, written out for more"


def written_bytes(model: nn.Module) -> int:
    """What a product of many rows takes on a card beside inputs and outputs, at most: of one weight, in the model's type."""
    sizes = (
        each.in_features * each.out_features * each.dtype.itemsize
        for each in model.modules()
        if isinstance(each, QuantizedLinear)
    )
    return min(WRITTEN_BYTES, max(sizes, default=0))


def _text(scheme: Scheme, is_stack: bool) -> str:
    text = f"{scheme.kind} in groups of {scheme.group}"
    if scheme.rows > 1:
        text += f" x {scheme.rows}"
    if scheme.zeros:
        text += " with zero points"
    if scheme.permuted:
        text += ", in another order"
    return text + " for experts" if is_stack else text
