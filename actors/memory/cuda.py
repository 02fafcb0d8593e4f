"""CUDA's virtual memory management: addresses that stay, physical memory that comes and goes.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
"""

import logging
import mmap
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from cuda.bindings import driver as cu

from actors.errors import DeviceMemoryError, DeviceMemoryShort
from actors.memory import nvml, nvml_outside, whole_device, workspaces
from actors.memory.cuda_link import CudaLink
from actors.memory.cuda_pool import CudaPool
from actors.memory.dlpack import bytes_at
from actors.memory.driver import DeviceMemory, MemoryHolder, gib
from actors.memory.pinned import HostRange, RegisteredPages

logger = logging.getLogger(__name__)

_LOCK_TIMEOUT_MS = 10_000  # for what runs on the device to end; nothing should
_CHECKPOINTS_SINCE = 12080  # the driver's version, as CUDA counts


@dataclass(frozen=True, slots=True)
class _Opened:
    """A card as this process found it: its primary context exists, and nothing else of ours."""

    context: Any
    context_bytes: int
    used_by_others: int  # then; by cuMemGetInfo
    seen_by_nvml: bool  # whether NVML shows this process


def _check_visible(count: int) -> None:
    """Raises DeviceMemoryError if the driver shows others than it was told to: it reads the variable only once."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and count > len(visible.split(",")):
        raise DeviceMemoryError(
            f"CUDA_VISIBLE_DEVICES is {visible}, and the driver shows {count} cards: something in this process "
            "asked for them before it was set"
        )


class CudaDriver:
    """MemoryDriver on one CUDA device.

    Works in the device's primary context, which torch uses too; every call makes it current for its
    own duration, so any thread may call.
    """

    _opened: ClassVar[dict[int, _Opened]] = {}  # by index; a context lives as long as the process

    def __init__(self, index: int = 0) -> None:
        """Open a device.

        Args:
            index: as torch counts, that is among CUDA_VISIBLE_DEVICES.

        Raises:
            DeviceMemoryError: no such device, or it has no virtual memory management.
        """
        self.device = torch.device("cuda", index)
        self.pages = RegisteredPages(self)
        self._context: Any = None
        self._call(cu.cuInit, 0)
        _check_visible(self._call(cu.cuDeviceGetCount))
        device = self._call(cu.cuDeviceGet, index)
        self._uuid = str(uuid.UUID(bytes=self._call(cu.cuDeviceGetUuid, device).bytes))
        if index not in self._opened:
            self._opened[index] = self._open(device)
        opened = self._opened[index]
        self._context = opened.context
        self.context_bytes = opened.context_bytes
        self._used_by_others = opened.used_by_others
        self._seen_by_nvml = opened.seen_by_nvml
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.can_suspend = int(self._call(cu.cuDriverGetVersion)) >= _CHECKPOINTS_SINCE
        # Bytes of the card, from before this process is suspended until after: NVML, too, blocks meanwhile.
        self._total_suspended = 0
        self._free_suspended = 0  # when it was
        self._registers_read_only = bool(
            self._call(
                cu.cuDeviceGetAttribute,
                cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED,
                device,
            )
        )
        self._physical = _physical_memory_of(index)
        self._access = cu.CUmemAccessDesc()
        self._access.location = self._physical.location
        self._access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.granularity = int(
            self._call(
                cu.cuMemGetAllocationGranularity,
                self._physical,
                cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        )

    def reserve(self, size: int) -> int:
        return int(self._call(cu.cuMemAddressReserve, size, 0, 0, 0, size=size))

    def map(self, address: int, size: int) -> None:
        """See MemoryDriver. One physical allocation, which lives exactly as long as the mapping.

        The handle is released at once: "the generic memory handle can be freed when there are still
        outstanding mappings made with this handle" (cuMemRelease).
        """
        handle = self._call(cu.cuMemCreate, size, self._physical, 0, size=size)
        try:
            self._call(cu.cuMemMap, address, size, 0, handle, 0, size=size)
            try:
                self._call(cu.cuMemSetAccess, address, size, [self._access], 1, size=size)
            except BaseException:
                self._call(cu.cuMemUnmap, address, size, size=size)
                raise
        finally:
            self._call(cu.cuMemRelease, handle, size=size)

    def unmap(self, address: int, size: int) -> None:
        self._call(cu.cuMemUnmap, address, size, size=size)

    def collect_cleared(self) -> None:
        """See MemoryDriver. Any allocation has the driver do it, for everything cleared until then."""
        handle = self._call(
            cu.cuMemCreate, self.granularity, self._physical, 0, size=self.granularity
        )
        self._call(cu.cuMemRelease, handle, size=self.granularity)

    def synchronize(self) -> None:
        with whole_device.awaited():
            self._call(cu.cuCtxSynchronize)

    def release(self, address: int, size: int) -> None:
        self._call(cu.cuMemAddressFree, address, size, size=size)

    def tensor(self, address: int, size: int) -> torch.Tensor:
        return bytes_at(address, size, self.device)

    def open_link(self, buffers: Sequence[memoryview]) -> CudaLink:
        """Pin the buffers in place, once; where that is refused, copies go through staging.

        Raises:
            DeviceMemoryError: no stream, or no staging memory.
        """
        return CudaLink(self, buffers)

    def take_host(self, size: int) -> torch.Tensor:
        """See MemoryDriver. Not by torch, whose allocator would keep the pages pinned for its next caller."""
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        flags = cu.CU_MEMHOSTREGISTER_PORTABLE
        self._call(cu.cuMemHostRegister, memory.data_ptr(), size, flags, size=size)
        return memory

    def give_host(self, memory: torch.Tensor) -> None:
        self.unregister(HostRange(memory.data_ptr(), memory.nbytes))

    def make_pool(self) -> CudaPool:
        return CudaPool(self)

    def trim(self) -> None:
        workspaces.give_back_unused()
        torch.cuda.empty_cache()

    def memory(self) -> DeviceMemory:
        """By the driver (cuMemGetInfo: of the whole card) and by NVML (of this process).

        Where NVML does not show this process, as in many containers, `held` is what the card's used
        memory has grown by since this process opened it; what neighbours took or gave since is in it.
        Suspended, another process asks NVML.
        """
        if self._total_suspended:
            return self._memory_suspended()
        free, total = (int(value) for value in self._call(cu.cuMemGetInfo))
        own = nvml.own_bytes(self._uuid) if self._seen_by_nvml else None
        used = total - free
        return DeviceMemory(
            total=total,
            free=free,
            used=used,
            held=used - self._used_by_others if own is None else own,
            own=own,
            torch_reserved=torch.cuda.memory_reserved(self.device),
        )

    def holders(self) -> tuple[MemoryHolder, ...]:
        return () if self._total_suspended else nvml.holders(self._uuid)

    def suspend(self) -> bool:
        """See MemoryDriver. By the driver's checkpoint of a process, of this one.

        https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__CHECKPOINT.html
        What lies on the card, 0.4 GiB of graphs, is kept in host memory meanwhile.
        """
        before = self.memory()
        self._total_suspended, self._free_suspended = before.total, before.free + before.held
        lock = cu.CUcheckpointLockArgs()
        lock.timeoutMs = _LOCK_TIMEOUT_MS
        try:
            self._checkpoint(cu.cuCheckpointProcessLock, lock)
        except DeviceMemoryError as exc:
            return self._not_suspended(exc)
        try:
            self._checkpoint(cu.cuCheckpointProcessCheckpoint)
        except DeviceMemoryError as exc:
            self._checkpoint(cu.cuCheckpointProcessUnlock)
            return self._not_suspended(exc)
        return True

    def resume(self) -> None:
        """See MemoryDriver. After a restore that found no room, a driver has refused all later ones (580.95)."""
        self._checkpoint(cu.cuCheckpointProcessRestore)
        self._checkpoint(cu.cuCheckpointProcessUnlock)
        self._total_suspended = 0

    # What a link needs beyond MemoryDriver.

    def register(self, pages: HostRange) -> None:
        """Page-lock host memory for every context of this process; see HostRegistrar.

        Where the device can, for reading only: that is all we do, and memory that this process may
        not write is accepted in no other way (cuMemHostRegister).
        """
        flags = cu.CU_MEMHOSTREGISTER_PORTABLE
        if self._registers_read_only:
            flags |= cu.CU_MEMHOSTREGISTER_READ_ONLY
        self._call(cu.cuMemHostRegister, pages.address, pages.size, flags, size=pages.size)

    def unregister(self, pages: HostRange) -> None:
        self._call(cu.cuMemHostUnregister, pages.address, size=pages.size)

    def create_stream(self) -> torch.cuda.ExternalStream:
        """A stream of its own: torch hands its pooled ones out again, to the engine for one."""
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        stream = int(self._call(cu.cuStreamCreate, flags))
        return torch.cuda.ExternalStream(stream, self.device)  # type: ignore[no-untyped-call]

    def destroy_stream(self, stream: torch.cuda.ExternalStream) -> None:
        self._call(cu.cuStreamDestroy, stream.cuda_stream)

    def begin_copy(
        self, address: int, source: HostRange, stream: torch.cuda.ExternalStream
    ) -> None:
        self._call(
            cu.cuMemcpyHtoDAsync,
            address,
            source.address,
            source.size,
            stream.cuda_stream,
            size=source.size,
        )

    def _not_suspended(self, reason: DeviceMemoryError) -> bool:
        self._total_suspended = 0
        logger.warning("no deep sleep: %s", reason)
        return False

    def _memory_suspended(self) -> DeviceMemory:
        total, used = self._total_suspended, nvml_outside.used_bytes(self._uuid)
        free = self._free_suspended if used is None else total - used
        own = 0 if self._seen_by_nvml else None
        return DeviceMemory(total, free, total - free, 0, own, 0)

    def _checkpoint(self, function: Callable[..., tuple[Any, ...]], args: Any = None) -> None:
        """Without our context, which cannot be entered while the process is locked."""
        (code,) = function(os.getpid(), args)
        if code != cu.CUresult.CUDA_SUCCESS:
            raise DeviceMemoryError(
                f"{function.__name__} on {self.device} failed: {code.name} ({code.value})"
            )

    def _open(self, device: Any) -> _Opened:
        """Make the primary context, or join it, and find out what it takes.

        NVML's own figure for this process is the whole truth; else the growth of the card's used
        memory tells, unless the context was there before, and then it counts as nothing. cuMemGetInfo
        cannot tell: it needs a context.
        """
        before = nvml.used_bytes(self._uuid)
        # Retained for the life of the process: torch holds it just as long.
        self._context = self._call(cu.cuDevicePrimaryCtxRetain, device)
        after = nvml.used_bytes(self._uuid)
        own = nvml.own_bytes(self._uuid)
        free, total = self._call(cu.cuMemGetInfo)
        reserved = torch.cuda.memory_reserved(self.device)  # somebody may have been here before
        if own is not None:
            held = own
        else:
            held = reserved + (after - before if before is not None and after is not None else 0)
        return _Opened(self._context, held - reserved, int(total - free) - held, own is not None)

    def _call(self, function: Callable[..., tuple[Any, ...]], *args: Any, size: int = 0) -> Any:
        """Call the driver in our context and turn its code into an exception.

        Args:
            size: bytes that the call is about, for the message; 0 where it is about none.

        Returns:
            What the function gives besides its code: nothing, a value, or a tuple.
        """
        code, values = self._call_in_context(function, args)
        if code != cu.CUresult.CUDA_SUCCESS:
            raise self._failure(function, code, size)
        return values[0] if len(values) == 1 else values

    def _call_in_context(
        self, function: Callable[..., tuple[Any, ...]], args: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        if self._context is None:  # not opened yet
            code, *values = function(*args)
            return code, tuple(values)
        cu.cuCtxPushCurrent(self._context)
        try:
            code, *values = function(*args)
        finally:
            cu.cuCtxPopCurrent()
        return code, tuple(values)

    def _failure(
        self, function: Callable[..., tuple[Any, ...]], code: Any, size: int
    ) -> DeviceMemoryError | DeviceMemoryShort:
        about = f" of {gib(size)} ({size} bytes)" if size else ""
        text = (
            f"{function.__name__}{about} on {self.device} failed: {code.name} ({code.value}); "
            f"{self._free_text()}"
        )
        short = code == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY and function in _TAKES_DEVICE_MEMORY
        return DeviceMemoryShort(text) if short else DeviceMemoryError(text)

    def _free_text(self) -> str:
        if self._context is None:
            return "the device is not open"
        code, values = self._call_in_context(cu.cuMemGetInfo, ())
        if code != cu.CUresult.CUDA_SUCCESS:
            return "its free memory cannot be told"
        free, total = values
        return f"{gib(free)} of {gib(total)} are free"


# Mapping needs page tables as well, which come out of the same memory.
_TAKES_DEVICE_MEMORY = (cu.cuMemCreate, cu.cuMemMap, cu.cuMemSetAccess)


def _physical_memory_of(index: int) -> Any:
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    return properties
