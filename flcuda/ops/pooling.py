"""Pooling of images, (N, C, H, W).

Windows lie as in PyTorch with ceil_mode=False: window o covers the places o * stride - padding and on; the result has
floor((size + 2 * padding - kernel) / stride) + 1 of them. Padding is symmetric and at most half the kernel. Results
have the layout of their argument. Backward passes gather over the windows that hold an element: no atomics.

Note [pooled batch norm]: max(0, batch norm) of a channel is monotonic in x, so the largest of a window is that of the
window's largest x (smallest, where the channel's scale is negative), and nothing else of the batch norm's result is
computed, let alone stored. Kept for the backward pass are that x and the place of it, or that nothing was above zero.
From those x and the windows' gradients follow the two sums of the batch norm's backward pass, and one more pass over
the image makes its gradient. Of places whose x differ and whose results round to the same number, the place of the
larger x is the maximum's; pooling the rounded results takes the first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from flcuda import reference
from flcuda.device import LAYOUTS, cupy
from flcuda.kernel_loader import launch, launch_blocks
from flcuda.ops import elementwise
from flcuda.ops.arrays import (
    Layout,
    accumulator,
    dense,
    layout_of,
    multiprocessors,
    new,
    on_cuda,
    require_channels,
    require_dense,
    require_dtype,
    require_shape,
    suffix,
    view_sizes,
)
from flcuda.ops.batch_norm import Into, Norm
from flcuda.ops.channel_reduction import Blocks, tiles

Array = Any
Pair = tuple[int, int]

_THREADS = 256
# The parts of the file that are compiled by themselves.
_ANY, _FAST, _NORMALIZED, _GLOBAL, _VECTOR_SUMS, _SCALAR_SUMS = 1, 2, 3, 4, 5, 6
_FAST_WINDOW = ((3, 3), (2, 2), (1, 1))
# Blocks a multiprocessor of the kernels for that window, for 16-bit numbers and for larger ones: `POOL_BLOCKS` and
# `NORMALIZED_BLOCKS` in kernels/pooling.cu.
_PLAIN_BLOCKS, _NORMALIZED_BLOCKS = (4, 2), (3, 2)
# `WINDOW_THREADS` and `WINDOW_BLOCKS` there, of the sums from the windows.
_WINDOWS = Blocks(nhwc=(512, 1), nchw=(512, 2))
# 16-byte memory accesses, two 8-byte ones for the 16-bit dtypes.
_ALIGNMENT = 16


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
    source = dense(x, layout)
    y = new((*x.shape[:2], *_pooled(x.shape, kernel, step, pad)), x.dtype, layout)
    indices = new(y.shape, index_dtype, layout)
    if _is_fast(x.shape, kernel, step, pad, layout, source):
        launch_blocks(
            "pooling",
            f"max_pool_3x3_forward_{layout}_{kind}",
            _grid(x.dtype, y.size // 2, _PLAIN_BLOCKS),
            (_THREADS, 1),
            y,
            indices,
            source,
            *_image_sizes(x.shape, y.shape),
            defines=_defines(_FAST, kind),
        )
        return y, indices
    launch(
        "pooling",
        f"max_pool_forward_{kind}",
        y.size,
        y,
        *_small_or_large(indices),
        source,
        *_sizes(x.shape, y.shape, kernel, step, pad, layout),
        defines=_defines(_ANY, kind),
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
    gradient, places = dense(dy, layout), dense(indices, layout)
    dx = new(tuple(x_shape), dy.dtype, layout)
    if _is_fast(dx.shape, kernel, step, pad, layout, gradient, places):
        launch_blocks(
            "pooling",
            f"max_pool_3x3_backward_{layout}_{kind}",
            _grid(dy.dtype, dx.size // 4, _PLAIN_BLOCKS),
            (_THREADS, 1),
            dx,
            gradient,
            places,
            *_image_sizes(dx.shape, dy.shape),
            defines=_defines(_FAST, kind),
        )
        return dx
    launch(
        "pooling",
        f"max_pool_backward_{kind}",
        dx.size,
        dx,
        gradient,
        *_small_or_large(places),
        *_sizes(dx.shape, dy.shape, kernel, step, pad, layout),
        defines=_defines(_ANY, kind),
    )
    return dx


@dataclass(frozen=True, slots=True)
class PooledNormSaved:
    """What the backward pass of the pooled batch norm needs; see Note [pooled batch norm].

    Attributes:
        x: the image.
        largest: the x of each window's maximum, in the shape and layout of the result.
        indices: its place in the window, row * kernel width + column, or where nothing was above zero 255 or -1: uint8
            for windows of up to 255 places, else int32.
        norm: what x was normalised by.
        window: kernel size, stride and padding.
    """

    x: Array
    largest: Array
    indices: Array
    norm: Norm
    window: tuple[Pair, Pair, Pair]


def batch_norm_relu_max_pool_forward(
    x: Array,
    norm: Norm,
    kernel_size: int | Pair,
    stride: int | Pair | None = None,
    padding: int | Pair = 0,
) -> tuple[Array, PooledNormSaved]:
    """The largest of each window of max(0, batch norm of x), in one pass over x.

    Args:
        x: (N, C, H, W), one of the four dtypes, any layout; borrowed, and kept for the backward pass.
        norm: the batch's statistics, weight and bias, float32 (float64 for float64); borrowed and kept.
        kernel_size: of the window, one number or (height, width).
        stride: step between windows; kernel_size when None.
        padding: places added on each side; they never win.

    Returns:
        y, (N, C, OH, OW) like x, the same as by batch norm, ReLU and pooling one after the other; and what
        `batch_norm_relu_max_pool_backward` needs.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit, a size is out of range, or the devices differ.
    """
    kind = suffix("x", x)
    kernel, step, pad = _geometry("x", x.shape, kernel_size, stride, padding)
    for name, vector in norm._asdict().items():
        _require_vector(name, vector, accumulator(x), x.shape[1])
    index_dtype = _normalized_index_dtype(kernel)
    if not on_cuda(x=x, **norm._asdict()):
        y, largest, indices = reference.batch_norm_relu_max_pool_forward(x, *norm, kernel, step, pad, index_dtype)
        return y, PooledNormSaved(x, largest, indices, norm, (kernel, step, pad))
    layout = layout_of(x)
    source = dense(x, layout)
    y = new((*x.shape[:2], *_pooled(x.shape, kernel, step, pad)), x.dtype, layout)
    largest = new(y.shape, x.dtype, layout)
    indices = new(y.shape, index_dtype, layout)
    if _is_fast(x.shape, kernel, step, pad, layout, source):
        launch_blocks(
            "pooling",
            f"normalized_max_pool_3x3_forward_{layout}_{kind}",
            _grid(x.dtype, y.size // 2, _NORMALIZED_BLOCKS),
            (_THREADS, 1),
            y,
            largest,
            indices,
            source,
            *norm,
            *_image_sizes(x.shape, y.shape),
            defines=_defines(_NORMALIZED, kind),
        )
    else:
        launch(
            "pooling",
            f"normalized_max_pool_forward_{kind}",
            y.size,
            y,
            largest,
            *_small_or_large(indices),
            source,
            *norm,
            *_sizes(x.shape, y.shape, kernel, step, pad, layout),
            defines=_defines(_ANY, kind),
        )
    return y, PooledNormSaved(source, largest, indices, norm, (kernel, step, pad))


def batch_norm_relu_max_pool_backward(
    dys: Sequence[Array], saved: PooledNormSaved, *, into: Into | None = None, ticket: Array | None = None
) -> tuple[Array, Array, Array]:
    """The gradients of the pooled batch norm, and of its statistics before it, in two passes.

    Args:
        dys: gradients of y, whose sum is meant, at least one, like y, any layout; borrowed. Two are added on the way.
        saved: from `batch_norm_relu_max_pool_forward`.
        into: where to write weight's and bias's gradients; None for new arrays.
        ticket: from `batch_norm.new_ticket`, the layer's; None for one of the call's own, which takes another launch.

    Returns:
        dx, like x; weight's and bias's gradients.

    Raises:
        TypeError: a dtype does not fit x.
        ValueError: a shape does not fit, the devices differ, there is no gradient, or x is empty.
    """
    x, norm, (kernel, step, pad) = saved.x, saved.norm, saved.window
    if not dys:
        raise ValueError("dys: expected at least one gradient")
    for i, dy in enumerate(dys):
        require_dtype(f"dys[{i}]", dy, x.dtype)
        require_shape(f"dys[{i}]", dy, saved.largest.shape)
    targets = {} if into is None else {"dweight": into.dweight, "dbias": into.dbias}
    for name, vector in targets.items():
        _require_vector(name, vector, norm.weight.dtype, x.shape[1])
    if x.size == 0:
        raise ValueError(f"x: training needs at least two values a channel, got shape {x.shape}")
    gradients = list(dys)
    cuda = on_cuda(**{f"dys[{i}]": dy for i, dy in enumerate(dys)}, x=x, **targets)
    # Of more than two, which are rare, the first are added in a pass of their own.
    while len(gradients) > (2 if cuda else 1):
        gradients[:2] = [elementwise.add(gradients[0], gradients[1])]
    if not cuda:
        return reference.batch_norm_relu_max_pool_backward(
            gradients[0],
            x,
            saved.indices,
            norm.weight,
            norm.mean,
            norm.inverse,
            kernel,
            step,
            pad,
            *(into or (None, None, False)),
        )
    kind, layout = suffix("x", x), layout_of(x)
    if into is None:
        into = Into(new(norm.weight.shape, norm.weight.dtype), new(norm.weight.shape, norm.weight.dtype), False)
    gradients = [dense(dy, layout) for dy in gradients]
    gradient, means = _window_sums(kind, layout, gradients, saved, into, ticket)
    dx = new(x.shape, x.dtype, layout)
    vectors = (norm.weight, norm.mean, norm.inverse, means)
    if _is_fast(x.shape, kernel, step, pad, layout, x, gradient):
        launch_blocks(
            "pooling",
            f"normalized_max_pool_3x3_backward_{layout}_{kind}",
            _grid(x.dtype, x.size // 4, _NORMALIZED_BLOCKS),
            (_THREADS, 1),
            dx,
            gradient,
            saved.indices,
            x,
            *vectors,
            *_image_sizes(x.shape, gradient.shape),
            defines=_defines(_NORMALIZED, kind),
        )
    else:
        launch(
            "pooling",
            f"normalized_max_pool_backward_{kind}",
            x.size,
            dx,
            gradient,
            *_small_or_large(saved.indices),
            x,
            *vectors,
            *_sizes(x.shape, gradient.shape, kernel, step, pad, layout),
            defines=_defines(_ANY, kind),
        )
    return dx, into.dweight, into.dbias


def _window_sums(
    kind: str, layout: Layout, gradients: list[Array], saved: PooledNormSaved, into: Into, ticket: Array | None
) -> tuple[Array, Array]:
    """Writes the vectors' gradients; gives the gradient, of two the sum, and the means for the second pass, (2, C)."""
    first, *more = gradients
    channels = first.shape[1]
    space = math.prod(first.shape[2:])
    elements = _ALIGNMENT // first.itemsize
    row = space if layout == "nchw" and space > 1 else channels
    vectors = row % elements == 0 and _is_aligned(*gradients)
    shape = tiles(first.shape, layout, elements if vectors else 1, 1, _WINDOWS, multiprocessors())
    dz = new(first.shape, first.dtype, layout) if more else None
    means = new((2, channels), saved.norm.weight.dtype)
    launch_blocks(
        "pooling",
        f"window_sums_{'vector' if vectors else 'scalar'}_{shape.order}_{kind}",
        shape.grid,
        (shape.threads, 1),
        dz,
        new((*shape.grid, 2, shape.slots), accumulator(first)),
        cupy().zeros((channels + 1,), np.uint32) if ticket is None else ticket,
        into.dweight,
        into.dbias,
        means,
        np.int32(into.accumulate),
        first,
        more[0] if more else None,
        saved.largest,
        *saved.norm,
        np.int64(saved.x.size // channels),
        *view_sizes(first, layout),
        np.int32(shape.lanes),
        defines=_defines(_VECTOR_SUMS if vectors else _SCALAR_SUMS, kind),
    )
    return first if dz is None else dz, means


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
    launch("pooling", f"avg_pool_forward_{kind}", y.size, y, dense(x, layout), *sizes, defines=_defines(_ANY, kind))
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
    launch("pooling", f"avg_pool_backward_{kind}", dx.size, dx, dense(dy, layout), *sizes, defines=_defines(_ANY, kind))
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
    source = dense(x, layout)
    grid, block, order = _global(layout, x.shape, source, _lanes(x.dtype))
    defines = _defines(_GLOBAL, kind)
    launch_blocks("pooling", f"global_avg_pool_{order}_{kind}", grid, block, y, source, n, c, space, defines=defines)
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
    gradient = dense(dy, "nchw")
    grid, block, how = _global(order, dx.shape, gradient, _ALIGNMENT // dy.itemsize)
    launch_blocks(
        "pooling",
        f"global_avg_pool_backward_{how}_{kind}",
        grid,
        block,
        dx,
        gradient,
        np.int64(dx.shape[0]),
        np.int64(dx.shape[1]),
        np.int64(math.prod(x_shape[2:])),
        defines=_defines(_GLOBAL, kind),
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


def _normalized_index_dtype(kernel: Pair) -> np.dtype[Any]:
    """As above, with one number more: that no place is the one."""
    return np.dtype(np.uint8 if kernel[0] * kernel[1] <= 255 else np.int32)


def _require_vector(name: str, a: Array, dtype: np.dtype[Any], channels: int) -> None:
    require_dtype(name, a, dtype)
    require_shape(name, a, (channels,))
    require_dense(name, a)


def _defines(part: int, kind: str) -> tuple[str, ...]:
    """What has only a part of the file compiled, for one dtype."""
    return f"POOL_PART={part}", f"POOL_KIND={kind}"


def defines_of(dtype: np.dtype[Any], kind: str, *, pooled: bool) -> list[tuple[str, ...]]:
    """The macros by which kernels/pooling.cu is compiled for a residual network, once for each.

    Args:
        dtype: of the images.
        kind: its suffix.
        pooled: with the batch norm of the stem.
    """
    stem = (_NORMALIZED if dtype.itemsize <= 4 else _ANY, _VECTOR_SUMS) if pooled else ()
    return [_defines(part, kind) for part in (*stem, _GLOBAL)]


def _lanes(dtype: np.dtype[Any]) -> int:
    """`LANES` in kernels/pooling.cu: how many neighbours a thread moves at once."""
    return 2 if dtype.itemsize > 4 else 4


def _is_aligned(*arrays: Array) -> bool:
    return all(int(a.data.ptr) % _ALIGNMENT == 0 for a in arrays)


def _is_fast(
    x_shape: Sequence[int], kernel: Pair, stride: Pair, padding: Pair, layout: Layout, first: Array, *others: Array
) -> bool:
    """Says whether the kernels for windows of 3 x 3 with stride 2 and padding 1 can be used on dense arrays."""
    lanes = _lanes(first.dtype)
    _, channels, _, width = x_shape
    fits = channels // lanes <= _THREADS and channels % lanes == 0 if layout == "nhwc" else width % lanes == 0
    known = (kernel, stride, padding) == _FAST_WINDOW and first.itemsize <= 4 and max(x_shape[2:]) < 2**30
    return known and fits and _is_aligned(first, *others)


def _grid(dtype: np.dtype[Any], elements: int, blocks: Pair) -> tuple[int, int]:
    """A grid whose blocks all run at once: they share the work evenly.

    Args:
        dtype: of the arrays.
        elements: what is done at a time, over all threads, in elements; fewer blocks are taken for little work.
        blocks: of a multiprocessor, for 16-bit numbers and for larger ones.
    """
    most = multiprocessors() * blocks[dtype.itemsize > 2]
    return min(most, -(-elements // (_THREADS * _lanes(dtype)))), 1


def _global(layout: Layout, x_shape: tuple[int, ...], a: Array, lanes: int) -> tuple[Pair, Pair, str]:
    """Grid, block and name of the kernels of the global pool; lanes: channels of a thread where they fit."""
    n, channels = x_shape[:2]
    if layout == "nchw":
        return (-(-n * channels // 8), 1), (_THREADS, 1), "nchw"
    if channels % lanes or not _is_aligned(a):
        lanes = 1
    return (n * -(-channels // (32 * lanes)), 1), (32, 8), "nhwc" if lanes == 1 else "lanes"


def _small_or_large(indices: Array) -> tuple[Array | None, Array | None]:
    """The two pointers by which the kernels take indices: uint8 and int32, one of them null."""
    return (indices, None) if indices.dtype == np.uint8 else (None, indices)


def _sizes(
    x_shape: Sequence[int], y_shape: Sequence[int], kernel: Pair, stride: Pair, padding: Pair, layout: Layout
) -> tuple[np.generic, ...]:
    """The sizes that every pooling kernel takes, in the order of `PoolSizes` in kernels/pooling.cu."""
    numbers = (*x_shape, *y_shape[2:], *kernel, *stride, *padding)
    return (*(np.int64(number) for number in numbers), np.int32(layout == "nhwc"))


def _image_sizes(x_shape: Sequence[int], y_shape: Sequence[int]) -> tuple[np.generic, ...]:
    """The sizes that the kernels for windows of 3 x 3 take."""
    return tuple(np.int64(number) for number in (*x_shape, *y_shape[2:]))
