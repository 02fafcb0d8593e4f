"""Operators of our own, which torch.compile calls as they are."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def operator(name: str, result: Callable[_P, _R]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Register a function of tensors as `torch.ops.sleepserve.<name>`, for any device.

    `torch.library.custom_op` would do the same, and have the host spend 40 us more on a call: on gradients, which nobody
    asks for, and on whether outputs share memory with inputs.

    Args:
        name: of the operator.
        result: of the same arguments, what stands for the function's result while nothing is computed: tensors of its shape and type.
    """
    whole = f"sleepserve::{name}"

    def register(function: Callable[_P, _R]) -> Callable[_P, _R]:
        torch.library.define(whole, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(whole, "CompositeExplicitAutograd", function)
        torch.library.register_fake(whole, result)
        return function

    return register
