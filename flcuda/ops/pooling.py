"""Pooling of images, (N, C, H, W).

Windows lie as in PyTorch with ceil_mode=False: window o covers the places o * stride - padding and on; the result has
floor((size + 2 * padding - kernel) / stride) + 1 of them. Padding is symmetric and at most half the kernel. Results
have the layout of their argument. Backward passes gather over the windows that hold an element: no atomics.
"""

import math
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from flcuda import reference
from flcuda.device import LAYOUTS
from flcuda.kernel_loader import launch, launch_blocks
from flcuda.ops.arrays import (
    Layout,
    dense,
    layout_of,
    new,
    on_cuda,
    require_channels,
    require_shape,
    suffix,
    view_sizes,
)

Array = Any
Pair = tuple[int, int]


def max_pool_forward(
    x: Array, kernel_size: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0
) -> tuple[Array, Array]:
    """The largest value of each window; padding counts as minus infinity, NaN wins.

    Args:
        x: (N, C, H, W), one of the four dtypes, any layout; borrowed.
        kernel_size: of the window, one number or (height, width).
        stride: step between windows; kernel_size when None.
        padding: places added on each side.

    Returns:
        y, (N, C, OH, OW) like x, and the place of each maximum within its window, row * kernel width + column, in y's
        shape and layout: uint8 for windows of up to 256 places, else int32. Owned by the caller.

    Raises:
        TypeError: x has another dtype.
        ValueError: x is no image, or a size is out of range.
    """
    kind = suffix("x", x)
    kernel, step, pad = _geometry("x", x.shape, kernel_size, stride, padding)
    index_dtype = _index_dtype(kernel)
    if not on_cuda(x=x):
        return reference.max_pool_forward(x, kernel, step, pad, index_dtype)
    layout = layout_of(x)
    y = new((*x.shape[:2], *_pooled(x.shape, kernel, step, pad)), x.dtype, layout)
    indices = new(y.shape, index_dtype, layout)
    launch(
        "pooling",
        f"max_pool_forward_{kind}",
        y.size,
        y,
        *_small_or_large(indices),
        dense(x, layout),
        *_sizes(x.shape, y.shape, kernel, step, pad, layout),
    )
    return y, indices


def max_pool_backward(
    dy: Array,
    indices: Array,
    x_shape: Sequence[int],
    kernel_size: int | Pair,
    stride: int | Pair | None = None,
    padding: int | Pair = 0,
) -> Array:
    """The gradient of `max_pool_forward`.

    Args:
        dy: gradient of y; borrowed.
        indices: as the forward pass gave them; borrowed.
        x_shape: (N, C, H, W) of the forward pass's argument.
        kernel_size: as given to the forward pass.
        stride: as given to the forward pass.
        padding: as given to the forward pass.

    Returns:
        dx, of x_shape, dtype and layout of dy; owned by the caller.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit, a size is out of range, or the devices differ.
    """
    kind = suffix("dy", dy)
    kernel, step, pad = _geometry("x_shape", tuple(x_shape), kernel_size, stride, padding)
    index_dtype = _index_dtype(kernel)
    require_shape("dy", dy, (*x_shape[:2], *_pooled(x_shape, kernel, step, pad)))
    require_shape("indices", indices, dy.shape)
    if indices.dtype != index_dtype:
        raise TypeError(f"indices: expected {index_dtype} for a window of {kernel}, got {indices.dtype}")
    if not on_cuda(dy=dy, indices=indices):
        return reference.max_pool_backward(dy, indices, x_shape, kernel, step, pad)
    layout = layout_of(dy)
    dx = new(tuple(x_shape), dy.dtype, layout)
    launch(
        "pooling",
        f"max_pool_backward_{kind}",
        dx.size,
        dx,
        dense(dy, layout),
        *_small_or_large(dense(indices, layout)),
        *_sizes(dx.shape, dy.shape, kernel, step, pad, layout),
    )
    return dx


def avg_pool_forward(
    x: Array, kernel_size: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0
) -> Array:
    """The mean of each window; padding counts as zeros, as PyTorch's count_include_pad=True.

    Args:
        x: (N, C, H, W), one of the four dtypes, any layout; borrowed.
        kernel_size: of the window, one number or (height, width).
        stride: step between windows; kernel_size when None.
        padding: places added on each side.

    Returns:
        y, (N, C, OH, OW), like x; owned by the caller.

    Raises:
        TypeError: x has another dtype.
        ValueError: x is no image, or a size is out of range.
    """
    kind = suffix("x", x)
    kernel, step, pad = _geometry("x", x.shape, kernel_size, stride, padding)
    if not on_cuda(x=x):
        return reference.avg_pool_forward(x, kernel, step, pad)
    layout = layout_of(x)
    y = new((*x.shape[:2], *_pooled(x.shape, kernel, step, pad)), x.dtype, layout)
    sizes = _sizes(x.shape, y.shape, kernel, step, pad, layout)
    launch("pooling", f"avg_pool_forward_{kind}", y.size, y, dense(x, layout), *sizes)
    return y


def avg_pool_backward(
    dy: Array,
    x_shape: Sequence[int],
    kernel_size: int | Pair,
    stride: int | Pair | None = None,
    padding: int | Pair = 0,
) -> Array:
    """The gradient of `avg_pool_forward`.

    Args:
        dy: gradient of y; borrowed.
        x_shape: (N, C, H, W) of the forward pass's argument.
        kernel_size: as given to the forward pass.
        stride: as given to the forward pass.
        padding: as given to the forward pass.

    Returns:
        dx, of x_shape, dtype and layout of dy; owned by the caller.

    Raises:
        TypeError: dy has another dtype.
        ValueError: a shape does not fit or a size is out of range.
    """
    kind = suffix("dy", dy)
    kernel, step, pad = _geometry("x_shape", tuple(x_shape), kernel_size, stride, padding)
    require_shape("dy", dy, (*x_shape[:2], *_pooled(x_shape, kernel, step, pad)))
    if not on_cuda(dy=dy):
        return reference.avg_pool_backward(dy, x_shape, kernel, step, pad)
    layout = layout_of(dy)
    dx = new(tuple(x_shape), dy.dtype, layout)
    sizes = _sizes(dx.shape, dy.shape, kernel, step, pad, layout)
    launch("pooling", f"avg_pool_backward_{kind}", dx.size, dx, dense(dy, layout), *sizes)
    return dx


def global_avg_pool_forward(x: Array) -> Array:
    """The mean over space.

    Args:
        x: (N, C, *spatial), one of the four dtypes, any layout; borrowed.

    Returns:
        (N, C), dtype of x; owned by the caller.

    Raises:
        TypeError: x has another dtype.
        ValueError: x has no spatial dimension, or an empty one.
    """
    kind = suffix("x", x)
    if x.ndim < 3 or 0 in x.shape[2:]:
        raise ValueError(f"x: expected (N, C, *spatial) with something to average, got shape {x.shape}")
    if not on_cuda(x=x):
        return reference.global_avg_pool_forward(x)
    layout = layout_of(x)
    y = new(x.shape[:2], x.dtype)
    n, c = np.int64(x.shape[0]), np.int64(x.shape[1])
    space = np.int64(math.prod(x.shape[2:]))
    if layout == "nchw":
        blocks = -(-y.size // 8)
        launch_blocks(
            "pooling", f"global_avg_pool_nchw_{kind}", (blocks, 1), (256, 1), y, dense(x, layout), n, c, space
        )
    else:
        launch("pooling", f"global_avg_pool_nhwc_{kind}", y.size, y, x, n, c, space)
    return y


def global_avg_pool_backward(dy: Array, x_shape: Sequence[int], layout: str) -> Array:
    """The gradient of `global_avg_pool_forward`.

    Args:
        dy: gradient of y, (N, C); borrowed.
        x_shape: (N, C, *spatial) of the forward pass's argument.
        layout: "nchw" or "nhwc", that of the result.

    Returns:
        dx, of x_shape and dtype of dy; owned by the caller.

    Raises:
        TypeError: dy has another dtype.
        ValueError: a shape does not fit, or layout is another word.
    """
    kind = suffix("dy", dy)
    require_channels("dy", dy)
    if len(x_shape) < 3 or 0 in x_shape[2:]:
        raise ValueError(f"x_shape: expected (N, C, *spatial) with something to average, got {tuple(x_shape)}")
    require_shape("dy", dy, tuple(x_shape[:2]))
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r} is neither 'nchw' nor 'nhwc'")
    if not on_cuda(dy=dy):
        return reference.global_avg_pool_backward(dy, x_shape, layout)
    order: Layout = "nhwc" if layout == "nhwc" else "nchw"
    dx = new(tuple(x_shape), dy.dtype, order)
    launch(
        "pooling",
        f"global_avg_pool_backward_{kind}",
        dx.size,
        dx,
        dense(dy, "nchw"),
        *view_sizes(dx, order),
        np.int64(math.prod(x_shape[2:])),
    )
    return dx


def _geometry(
    name: str, x_shape: tuple[int, ...], kernel_size: int | Pair, stride: int | Pair | None, padding: int | Pair
) -> tuple[Pair, Pair, Pair]:
    if len(x_shape) != 4 or 0 in x_shape[2:]:
        raise ValueError(f"{name}: expected (N, C, H, W) with something to pool, got shape {x_shape}")
    kernel = _pair("kernel_size", kernel_size, 1)
    step = kernel if stride is None else _pair("stride", stride, 1)
    pad = _pair("padding", padding, 0)
    for i in range(2):
        if pad[i] > kernel[i] // 2:
            raise ValueError(f"padding: {padding} is more than half of kernel_size {kernel_size}")
        if kernel[i] > x_shape[2 + i] + 2 * pad[i]:
            raise ValueError(f"kernel_size: {kernel_size} is larger than {x_shape[2:]} padded by {padding}")
    return kernel, step, pad


def _pair(name: str, value: int | Pair, least: int) -> Pair:
    try:
        first, second = map(index, value if isinstance(value, Sequence) else (value, value))
    except (TypeError, ValueError):  # no whole numbers, or not two
        first = second = least - 1
    if min(first, second) < least:
        raise ValueError(f"{name} must be one or two whole numbers of at least {least}, got {value}")
    return first, second


def _pooled(x_shape: Sequence[int], kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    h, w = ((x_shape[2 + i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in range(2))
    return h, w


def _index_dtype(kernel: Pair) -> np.dtype[Any]:
    return np.dtype(np.uint8 if kernel[0] * kernel[1] <= 256 else np.int32)


def _small_or_large(indices: Array) -> tuple[Array | None, Array | None]:
    """The two pointers by which the kernels take indices: uint8 and int32, one of them null."""
    return (indices, None) if indices.dtype == np.uint8 else (None, indices)


def _sizes(
    x_shape: Sequence[int], y_shape: Sequence[int], kernel: Pair, stride: Pair, padding: Pair, layout: Layout
) -> tuple[np.generic, ...]:
    """The sizes that every pooling kernel takes, in the order of `PoolSizes` in kernels/pooling.cu."""
    numbers = (*x_shape, *y_shape[2:], *kernel, *stride, *padding)
    return (*(np.int64(number) for number in numbers), np.int32(layout == "nhwc"))
