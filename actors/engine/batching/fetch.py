"""A batch's inputs, read out of host memory by a kernel.

Copies to a device go through one engine in the order they were given (seen on an H200), so behind the
weights of a wake the inputs of its first batch would arrive last, and nothing would be computed before.
Pinned memory has the same address on the device
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#unified-virtual-address-space), and
kernels need no copy engine.
"""

from typing import Any

import torch
from torch import Tensor

from actors.engine.batching.upstream import HostDeviceIOPair
from actors.memory.dlpack import bytes_at


class InputFetcher:
    """Replaces the upload of one pair of host and device tensors where asked to."""

    def __init__(self, pair: HostDeviceIOPair) -> None:
        self._pair = pair
        self._copy = pair.transfer_inputs_h2d
        self._seen: dict[int, Tensor] = {}  # host address -> the same memory as the device has it
        self.fetches = False  # from now on, instead of copying
        pair.transfer_inputs_h2d = self._transfer  # type: ignore[method-assign]

    def _transfer(self, stream: torch.cuda.Stream) -> None:
        if self.fetches:
            target: Any = _Fetching(self._pair.device_io, self._seen)
            self._pair.host_io._transfer_inputs(target, stream=stream, non_blocking=True)
        else:
            self._copy(stream)


class _Fetching:
    """The device's side of a pair, for transformers to copy to: whatever is a tensor is fetched."""

    def __init__(self, io: object, seen: dict[int, Tensor]) -> None:
        vars(self).update(_io=io, _seen=seen)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._io, name, value)

    def __getattr__(self, name: str) -> Any:
        value = getattr(vars(self)["_io"], name)
        return _Target(value, self._seen) if isinstance(value, Tensor) else value


class _Target:
    """A tensor of integers that is filled by a kernel."""

    def __init__(self, tensor: Tensor, seen: dict[int, Tensor]) -> None:
        self._tensor = tensor
        self._seen = seen

    def copy_(self, source: Tensor, non_blocking: bool) -> None:
        assert source.is_pinned(), "pageable memory is not the device's"
        assert non_blocking, "nobody waits for a kernel"
        address = source.data_ptr()
        if address not in self._seen:
            flat = bytes_at(address, source.nbytes, self._tensor.device)
            self._seen[address] = flat.view(source.dtype).view(source.shape)
        # A plain copy between two tensors of one device would be made by the copy engine.
        torch.bitwise_or(self._seen[address], 0, out=self._tensor)
