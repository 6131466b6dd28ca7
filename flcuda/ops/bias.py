"""A bias a channel."""

from typing import Any

import numpy as np

from flcuda import reference
from flcuda.kernel_loader import launch, launch_blocks
from flcuda.ops.arrays import (
    accumulator,
    dense,
    layout_of,
    new,
    on_cuda,
    require_channels,
    require_dense,
    require_dtype,
    require_no_overlap,
    require_shape,
    strided_copy,
    suffix,
    view_sizes,
)
from flcuda.ops.channel_reduction import WARPS, finish_grid, reduction

Array = Any


def bias_forward(y: Array, bias: Array) -> Array:
    """Adds a bias in place: y[:, c] += bias[c].

    Args:
        y: (N, C, *spatial), any layout; borrowed, written.
        bias: (C,), dtype of y, C-contiguous; borrowed.

    Returns:
        y itself.

    Raises:
        TypeError: the dtypes differ.
        ValueError: the shapes do not fit, the devices differ, or y overlaps itself (a broadcast array).
    """
    kind = suffix("y", y)
    require_channels("y", y)
    require_no_overlap("y", y)
    require_dtype("bias", bias, y.dtype)
    require_shape("bias", bias, (y.shape[1],))
    require_dense("bias", bias)
    if not on_cuda(y=y, bias=bias):
        return reference.bias_forward(y, bias)
    layout = layout_of(y)
    target = dense(y, layout)
    launch("bias", f"bias_forward_{kind}", y.size, target, bias, *view_sizes(y, layout))
    if target is not y:
        strided_copy(target, y)
    return y


def bias_backward(dy: Array, *, out: Array | None = None, accumulate: bool = False) -> Array:
    """Sums a gradient over everything but the channel, in float32 (float64 for float64) and in a fixed order.

    Args:
        dy: (N, C, *spatial), any layout; borrowed.
        out: (C,), dtype of dy, C-contiguous; a new array when None.
        accumulate: add to out instead of overwriting it.

    Returns:
        out, the gradient of the bias.

    Raises:
        TypeError: the dtypes differ.
        ValueError: the shapes do not fit, the devices differ, or accumulate without out.
    """
    kind = suffix("dy", dy)
    require_channels("dy", dy)
    if out is not None:
        require_dtype("out", out, dy.dtype)
        require_shape("out", out, (dy.shape[1],))
        require_dense("out", out)
    elif accumulate:
        raise ValueError("accumulate: True needs out, got out=None")
    if not on_cuda(dy=dy, out=out):
        return reference.bias_backward(dy, out, accumulate)
    if out is None:
        out = new((dy.shape[1],), dy.dtype)
    layout = layout_of(dy)
    grid, block, order = reduction(dy.shape, layout)
    partial = new((grid[1], dy.shape[1]), accumulator(dy))
    launch_blocks(
        "bias", f"bias_partial_{order}_{kind}", grid, block, partial, dense(dy, layout), *view_sizes(dy, layout)
    )
    launch_blocks(
        "bias",
        f"bias_finish_{kind}",
        finish_grid(dy.shape[1]),
        (32 * WARPS, 1),
        out,
        partial,
        np.int64(grid[1]),
        np.int64(dy.shape[1]),
        np.int32(accumulate),
    )
    return out
