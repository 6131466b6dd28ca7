"""Where device memory begins and ends, for the checks of FLCUDA_CHECK=1.

A pointer that reaches over the end of its memory is no error to cuDNN: the kernel reads or writes what lies behind.

Note [how far]: of a CuPy array are known its own elements and the block of its memory pool; of a bare address only what
the driver allocated at once, which for memory of a pool is a large chunk that many arrays share. The least of what is
known counts. The driver knows no extent of registered host memory, which is let through.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_NOT_FOUND = (1, 500)  # CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND: no memory of CUDA's
_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_HOST = 1  # CU_MEMORYTYPE_HOST
_OVERLAP_WORK = 100_000  # how hard to look for a common element, as NumPy counts


@dataclass(frozen=True, slots=True)
class Region:
    """What a plan reads or writes through one pointer.

    Attributes:
        what: for messages, "tensor 'x' (8, 64, 14, 14) float16 (uid 1)".
        address: of its first element.
        nbytes: from there to its end.
        alignment: bytes that must divide the address.
        shape: its dimensions.
        strides: in bytes.
        itemsize: bytes of an element; 0 where elements are smaller than one.
        written: whether it is an output.
    """

    what: str
    address: int
    nbytes: int
    alignment: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    written: bool


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemGetAddressRange_v2.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
    driver.cuPointerGetAttribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    return driver


def bytes_at(address: int) -> int | None:
    """Asks the driver how much memory there is from an address on.

    Args:
        address: a device address; a context is current.

    Returns:
        The bytes to the end of the allocation that holds it; 0 when none of CUDA's does; None where the driver cannot
        tell.
    """
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    status = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)
    if status == 0:
        return base.value + size.value - address
    if status not in _NOT_FOUND:
        return None
    kind = ctypes.c_uint()
    status = _driver().cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, address)
    if status == 0 and kind.value == _HOST:
        return None
    return 0 if status in (0, *_NOT_FOUND) else None


def array_bytes(array: Any) -> tuple[int, str]:
    """Says how much memory a CuPy array has from its first element on.

    Args:
        array: a CuPy array, or a block of its memory.

    Returns:
        The bytes, and of what: "the array", or "its memory" where that ends first.
    """
    pointer = getattr(array, "data", array)
    shape = getattr(array, "shape", None)
    block = pointer.mem.ptr + pointer.mem.size - pointer.ptr
    if shape is None:
        return block, "its memory"
    if 0 in shape:
        return 0, "the array"
    span = array.itemsize + sum((size - 1) * step for size, step in zip(shape, array.strides, strict=True) if step > 0)
    return (span, "the array") if span <= block else (block, "its memory")


def check_array(region: Region, array: Any) -> None:
    """Raises when a CuPy array is smaller than what a plan reads or writes there.

    Args:
        region: what the plan does.
        array: a CuPy array, or a block of CuPy's memory.

    Raises:
        ValueError: names the region, the bytes that it needs and those that there are.
    """
    there, of_what = array_bytes(array)
    if there < region.nbytes:
        raise ValueError(f"{region.what} needs {region.nbytes} bytes at {region.address:#x}, and {of_what} has {there}")


def check_regions(regions: Sequence[Region]) -> None:
    """Raises when the regions of one run are not what they must be.

    Args:
        regions: all of them.

    Raises:
        ValueError: a region is not aligned, reaches over the end of its allocation, or shares an element with one that
            is written; names the regions.
    """
    for region in regions:
        if region.address % region.alignment:
            raise ValueError(
                f"{region.what} has to be aligned to {region.alignment} bytes, and {region.address:#x} is not"
            )
        there = bytes_at(region.address) if region.nbytes else None
        if there == 0:
            raise ValueError(f"{region.what}: {region.address:#x} is in no memory of CUDA's")
        if there is not None and there < region.nbytes:
            raise ValueError(
                f"{region.what} needs {region.nbytes} bytes at {region.address:#x}, and the allocation that holds it "
                f"has {there} from there on"
            )
    for position, one in enumerate(regions):
        for other in regions[position + 1 :]:
            if (one.written or other.written) and _overlap(one, other):
                written, touched = (one, other) if one.written else (other, one)
                raise ValueError(f"{written.what} is written and overlaps with {touched.what}")


def _overlap(one: Region, other: Region) -> bool:
    """Says whether two regions have a byte in common; False when that is too hard to tell."""
    if one.address + one.nbytes <= other.address or other.address + other.nbytes <= one.address:
        return False
    try:
        return np.shares_memory(_outline(one), _outline(other), max_work=_OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False


class _Outline:
    """What makes NumPy describe memory that it never reads."""

    def __init__(self, region: Region) -> None:
        plain = region.itemsize == 0
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|V1" if plain else f"|V{region.itemsize}",
            "shape": (region.nbytes,) if plain else region.shape,
            "strides": None if plain else region.strides,
            "data": (region.address, False),
        }


def _outline(region: Region) -> Any:
    return np.asarray(_Outline(region))
