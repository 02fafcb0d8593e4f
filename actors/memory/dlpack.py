"""A tensor over bytes that nobody may look at yet.

torch asks CUDA about the pointer of a `__cuda_array_interface__`, and CUDA knows only mapped memory;
a DLPack capsule says by itself which device it is on (dmlc/dlpack, include/dlpack/dlpack.h, the
unversioned structs, whose capsule is named "dltensor").
"""

import ctypes

import torch
from torch.utils.dlpack import from_dlpack

_CAPSULE_NAME = b"dltensor"  # the capsule keeps the pointer
_DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # DLDeviceType
_UINT = 1  # DLDataTypeCode


_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # NULL: contiguous
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),  # NULL: nothing to do
    )


# torch looks at a description again when its last tensor goes, which may be after anything of ours; so these few bytes stay,
# once for each range of addresses.
_described: dict[tuple[int, int, torch.device], _DLManagedTensor] = {}


def bytes_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """A flat uint8 tensor on `size` bytes at an address, which are neither touched nor owned."""
    managed = _described.get((address, size, device))
    if managed is None:
        managed = _described[address, size, device] = _description(address, size, device)
    tensor: torch.Tensor = from_dlpack(_new_capsule(ctypes.addressof(managed), _CAPSULE_NAME, None))
    return tensor


def _description(address: int, size: int, device: torch.device) -> _DLManagedTensor:
    return _DLManagedTensor(
        _DLTensor(
            data=address,
            device_type=_DEVICE_TYPES[device.type],
            device_id=device.index or 0,
            ndim=1,
            type_code=_UINT,
            type_bits=8,
            type_lanes=1,
            shape=(ctypes.c_int64 * 1)(size),
        )
    )
