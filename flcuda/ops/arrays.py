"""What the ops share: checks of array arguments, and dense views and copies of arrays for the kernels.

A kernel sees dense memory in one of two orders, nchw or nhwc, as a triple (outer, channels, inner): (N, C, space) and
(N * space, C, 1). An array with any other strides is copied to nchw first.
"""

import functools
import math
from typing import Any, Literal

import numpy as np

from flcuda.device import Device, cupy, empty, memory_layout, memory_order, require_same_device
from flcuda.kernel_loader import SUFFIXES, launch
from flcuda.reference import compute_dtype

Array = Any
Layout = Literal["nchw", "nhwc"]


_MAX_COPY_DIMS = 6


def multiprocessors() -> int:
    """How many multiprocessors the current CUDA device has."""
    return _multiprocessors(cupy().cuda.runtime.getDevice())


@functools.cache
def _multiprocessors(index: int) -> int:
    runtime = cupy().cuda.runtime
    return int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, index))


def on_cuda(**named_arrays: Array) -> bool:
    """Says on which device an op runs.

    Args:
        **named_arrays: its arrays by their arguments' names; None is left out.

    Returns:
        True for CUDA.

    Raises:
        TypeError: one is no array.
        ValueError: they are on different devices, or on a CUDA device that is not the current one.
    """
    place = require_same_device(**named_arrays)
    if place.kind == "cpu":
        return False
    current = cupy().cuda.runtime.getDevice()
    if place.index != current:
        raise ValueError(
            f"the arrays are on {place} and the current device is cuda:{current}; use `with device.use():`"
        )
    return True


def suffix(name: str, a: Array) -> str:
    """The kernel suffix of an array's dtype.

    Raises:
        TypeError: it is none of float64, float32, float16 and bfloat16.
    """
    dtype: Any = getattr(a, "dtype", None)
    try:
        return SUFFIXES[dtype]
    except (KeyError, TypeError):
        got = type(a).__name__ if dtype is None else dtype
        raise TypeError(f"{name}: expected an array of float64, float32, float16 or bfloat16, got {got}") from None


def require_dtype(name: str, a: Array, dtype: np.dtype[Any] | type) -> None:
    """Raises TypeError when an array has another dtype, or is no array."""
    got = getattr(a, "dtype", None)
    if got is None or got != dtype:
        got = type(a).__name__ if got is None else got
        raise TypeError(f"{name}: expected an array of {np.dtype(dtype)}, got {got}")


def require_shape(name: str, a: Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError when an array has another shape."""
    if a.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {a.shape}")


def require_channels(name: str, a: Array) -> None:
    """Raises ValueError when an array is not (N, C, *spatial)."""
    if a.ndim < 2:
        raise ValueError(f"{name}: expected (N, C, *spatial), got shape {a.shape}")


def require_dense(name: str, a: Array) -> None:
    """Raises ValueError when an array that is written or read in place is not C-contiguous."""
    if not a.flags.c_contiguous:
        raise ValueError(f"{name}: expected a C-contiguous array, got shape {a.shape} with strides {a.strides}")


def require_no_overlap(name: str, a: Array) -> None:
    """Raises ValueError when an array that is written has two elements in one place (a broadcast array)."""
    if 0 in a.strides and a.size and any(not step and size > 1 for step, size in zip(a.strides, a.shape, strict=True)):
        raise ValueError(f"{name}: shape {a.shape} with strides {a.strides} overlaps itself")


def layout_of(a: Array) -> Layout:
    """The layout of an op's result for this argument: its own, nchw for a strided one."""
    return "nhwc" if memory_layout(a) == "nhwc" else "nchw"


def new(shape: tuple[int, ...], dtype: np.dtype[Any] | type, layout: Layout = "nchw") -> Array:
    """An uninitialised array on the current CUDA device."""
    return empty(shape, dtype, device=Device("cuda", cupy().cuda.runtime.getDevice()), layout=layout)


def dense(a: Array, layout: Layout) -> Array:
    """The CuPy array itself when it is dense in a layout, else a copy that is."""
    if a.transpose(memory_order(layout, a.ndim)).flags.c_contiguous:
        return a
    out = new(a.shape, a.dtype, layout)
    strided_copy(a, out)
    return out


def view_sizes(a: Array, layout: Layout) -> tuple[np.int64, np.int64, np.int64]:
    """The sizes (outer, channels, inner) of a dense (N, C, *spatial) array."""
    n, c, *spatial = a.shape
    space = math.prod(spatial)
    return (
        (np.int64(n), np.int64(c), np.int64(space))
        if layout == "nchw"
        else (np.int64(n * space), np.int64(c), np.int64(1))
    )


def strided_copy(src: Array, out: Array) -> None:
    """Copies between CuPy arrays of one shape, any strides and any of the four dtypes, one dtype, or int32 to int64.

    Raises:
        TypeError: a copy between the two dtypes is not supported.
        ValueError: the strides need more than six loops.
    """
    if src.dtype in SUFFIXES and out.dtype in SUFFIXES:
        function = f"strided_copy_{SUFFIXES[out.dtype]}_{SUFFIXES[src.dtype]}"
    elif (src.dtype, out.dtype) == (np.int32, np.int64):
        function = "strided_copy_i64_i32"
    elif src.dtype == out.dtype and src.itemsize in (1, 2, 4, 8):
        function = f"strided_copy_bytes{src.itemsize}"
    else:
        raise TypeError(f"out: a copy from {src.dtype} to {out.dtype} is not supported")
    loops = copy_loops(out.shape, out.strides, src.strides, out.itemsize, src.itemsize)
    if len(loops) > _MAX_COPY_DIMS:
        raise ValueError(
            f"src: strides {src.strides} to {out.strides} need {len(loops)} loops, more than {_MAX_COPY_DIMS}"
        )
    # Outermost loops of length 1 fill up to the kernel's fixed number of loops.
    padded = [(1, 0, 0)] * (_MAX_COPY_DIMS - len(loops)) + loops
    numbers = [np.int64(value) for field in zip(*padded, strict=True) for value in field]
    launch("elementwise", function, out.size, out, src, *numbers, np.int64(out.size))


def copy_loops(
    shape: tuple[int, ...],
    out_strides: tuple[int, ...],
    src_strides: tuple[int, ...],
    out_itemsize: int,
    src_itemsize: int,
) -> list[tuple[int, int, int]]:
    """The fewest nested loops that visit two strided arrays together, in the order of the first's memory.

    Args:
        shape: of both.
        out_strides: of the first, in bytes.
        src_strides: of the second, in bytes.
        out_itemsize: element size of the first, in bytes.
        src_itemsize: element size of the second, in bytes.

    Returns:
        (length, first's stride, second's stride) from the outermost loop to the innermost, strides in elements.
    """
    dims = [
        (size, out // out_itemsize, src // src_itemsize)
        for size, out, src in zip(shape, out_strides, src_strides, strict=True)
        if size != 1
    ]
    dims.sort(key=lambda dim: abs(dim[1]), reverse=True)
    loops: list[tuple[int, int, int]] = []
    for size, out, src in dims:
        if loops and loops[-1][1] == out * size and loops[-1][2] == src * size:
            loops[-1] = (loops[-1][0] * size, out, src)
        else:
            loops.append((size, out, src))
    return loops


def accumulator(a: Array) -> np.dtype[Any]:
    """The dtype in which kernels sum an array: float64 for float64, else float32."""
    return compute_dtype(a.dtype)
