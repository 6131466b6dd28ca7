"""The search for NaN and infinity in a flat storage of gradients, on the device."""

from typing import Any

import numpy as np

from flcuda import reference
from flcuda.kernel_loader import launch
from flcuda.ops.arrays import on_cuda, require_dense, require_dtype, require_shape, suffix

Array = Any


def find_invalid(flat: Array, offsets: Array, flags: Array) -> None:
    """Says which of the arrays in a flat storage hold NaN or infinity.

    flags becomes [1 if any is invalid else 0, index of the first invalid array (n when there is none), then one 0 or 1
    an array]. On CUDA one small launch resets the flags and one reads the storage; the host waits for neither. Bits are
    tested (an exponent of all ones), so no floating-point option of a compiler can remove the test. Deterministic.

    Args:
        flat: one of the four dtypes, one-dimensional, C-contiguous, at any alignment; borrowed.
        offsets: int64, (n + 1,), not decreasing, within flat: array i is flat[offsets[i]:offsets[i + 1]] and may be
            empty. Borrowed; on CUDA its values are not checked.
        flags: int32, (2 + n,); borrowed, overwritten.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit, an array is not contiguous, or the devices differ.
    """
    kind = suffix("flat", flat)
    require_dtype("offsets", offsets, np.int64)
    require_dtype("flags", flags, np.int32)
    if flat.ndim != 1:
        raise ValueError(f"flat: expected one dimension, got shape {flat.shape}")
    if offsets.ndim != 1 or offsets.size == 0:
        raise ValueError(f"offsets: expected (n + 1,), got shape {offsets.shape}")
    segments = offsets.size - 1
    require_shape("flags", flags, (2 + segments,))
    for name, a in (("flat", flat), ("offsets", offsets), ("flags", flags)):
        require_dense(name, a)
    if not on_cuda(flat=flat, offsets=offsets, flags=flags):
        reference.find_invalid(flat, offsets, flags)
        return
    launch("finite", "reset_flags", 2 + segments, flags, np.int64(segments))
    # A thread reads 16 bytes at a time; the launch is over the storage's size, which the host knows.
    launch("finite", f"find_invalid_{kind}", flat.nbytes // 16 + 1, flags, flat, offsets, np.int64(segments))
