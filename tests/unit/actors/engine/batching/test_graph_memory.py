"""What the driver lacks for a graph."""

import pytest
import torch

from actors.engine.batching.graphs import _short_of_memory


def test_memory_that_the_driver_lacks_is_told_as_the_allocators() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError, match="CUDA error: out of memory"),
        _short_of_memory(),
    ):
        raise torch.AcceleratorError("CUDA error: out of memory")


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("CUDA error: an illegal memory access"), RuntimeError("a")]
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, _short_of_memory():
        raise error
    assert caught.value is error
    assert not isinstance(caught.value, torch.OutOfMemoryError)
