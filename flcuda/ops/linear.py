"""Linear layers on arrays: y = x w^T + b and its gradients.

On the CPU a matrix product; on CUDA a 1x1 convolution, so that the finder chooses how (and cuBLAS is not needed, which
inside a capture it must not be). 16-bit operands are summed in float32 on both.

Note [rows as pixels]: a dense matrix is a batch of 1x1 images, which are nchw and nhwc at once and count as nchw; and
it is one nhwc image with a pixel a row. Tensor cores want nhwc, so there it is given as that; for fma as a batch.
"""

from typing import Any

import numpy as np

from flcuda import device as devices
from flcuda.finder.problem import default_math, dtype_word
from flcuda.ops.bias import bias_forward
from flcuda.ops.convolution import convolution

Array = Any


def linear_forward(
    x: Array, w: Array, bias: Array | None = None, *, out: Array | None = None, math: str | None = None
) -> Array:
    """Computes y = x w^T, plus the bias.

    Args:
        x: (N, C), float64, float32, float16 or bfloat16; borrowed, read on the current stream.
        w: (K, C), of the same dtype; borrowed.
        bias: (K,), of the same dtype; borrowed. None for none.
        out: (N, K), of the same dtype, to be written; by default a new array.
        math: "fma", "tensor_op" (for float32 on CUDA: TF32), or None: tensor_op for the 16-bit dtypes, else fma.

    Returns:
        y, (N, K); ``out`` where it was given.

    Raises:
        ValueError: shapes or devices do not fit; the message names the argument.
        TypeError: dtypes are mixed or unknown.
    """
    _check(math, False, out, (x.shape[0], w.shape[0]) if x.ndim == w.ndim == 2 else None, x=x, w=w)
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"w: shape {w.shape} does not go with x of shape {x.shape}: {x.shape[1]} columns are needed")
    if bias is not None and bias.shape != w.shape[:1]:
        raise ValueError(f"bias: shape {bias.shape} where w of shape {w.shape} needs {w.shape[:1]}")
    if devices.is_cuda(x):
        pixels = _as_pixels(math, x, out)
        target = None if out is None else _rows(out, pixels)
        y = _matrix(convolution(math=math).forward(_rows(x, pixels), _filters(w), out=target), pixels)
    else:
        y = _product(x, w.T, out, False)
    if bias is not None:
        bias_forward(y, bias)
    return y if out is None else out


def linear_backward_data(
    dy: Array, w: Array, *, out: Array | None = None, accumulate: bool = False, math: str | None = None
) -> Array:
    """Computes dx = dy w.

    Args:
        dy: (N, K); borrowed, read on the current stream.
        w: (K, C), of the same dtype; borrowed.
        out: (N, C), of the same dtype, to be written, or to be added to; by default a new array.
        accumulate: add to ``out``.
        math: as for ``linear_forward``.

    Returns:
        dx, (N, C); ``out`` where it was given.

    Raises:
        ValueError: as for ``linear_forward``; or accumulate without out.
        TypeError: as for ``linear_forward``.
    """
    _check(math, accumulate, out, (dy.shape[0], w.shape[1]) if dy.ndim == w.ndim == 2 else None, dy=dy, w=w)
    if dy.shape[1] != w.shape[0]:
        raise ValueError(f"w: shape {w.shape} does not go with dy of shape {dy.shape}: {dy.shape[1]} rows are needed")
    if not devices.is_cuda(dy):
        return _product(dy, w, out, accumulate)
    pixels = _as_pixels(math, dy, out)
    dx = convolution(math=math).backward_data(
        _rows(dy, pixels),
        _filters(w),
        (1, w.shape[1], dy.shape[0], 1) if pixels else (dy.shape[0], w.shape[1], 1, 1),
        out=None if out is None else _rows(out, pixels),
        accumulate=accumulate,
    )
    return _matrix(dx, pixels) if out is None else out


def linear_backward_weight(
    x: Array, dy: Array, *, out: Array | None = None, accumulate: bool = False, math: str | None = None
) -> Array:
    """Computes dw = dy^T x; zeros for an empty batch.

    Args:
        x: (N, C); borrowed, read on the current stream.
        dy: (N, K), of the same dtype; borrowed.
        out: (K, C), of the same dtype, to be written, or to be added to; by default a new array.
        accumulate: add to ``out``.
        math: as for ``linear_forward``.

    Returns:
        dw, (K, C); ``out`` where it was given.

    Raises:
        ValueError: as for ``linear_forward``; or accumulate without out.
        TypeError: as for ``linear_forward``.
    """
    _check(math, accumulate, out, (dy.shape[1], x.shape[1]) if x.ndim == dy.ndim == 2 else None, x=x, dy=dy)
    if x.shape[0] != dy.shape[0]:
        raise ValueError(f"dy: shape {dy.shape} does not go with x of shape {x.shape}: {x.shape[0]} rows are needed")
    if not devices.is_cuda(x):
        return _product(dy.T, x, out, accumulate)
    pixels = _as_pixels(math, x, dy)
    dw = convolution(math=math).backward_filter(
        _rows(x, pixels),
        _rows(dy, pixels),
        (dy.shape[1], x.shape[1], 1, 1),
        out=None if out is None else _filters(out),
        accumulate=accumulate,
    )
    return dw[:, :, 0, 0] if out is None else out


def _check(
    math: str | None, accumulate: bool, out: Array | None, out_shape: tuple[int, int] | None, **operands: Array
) -> None:
    """Raises for what no product can be made of; ``out_shape`` is None when an operand is no matrix."""
    devices.require_same_device(**operands, out=out)
    for name, a in operands.items():
        if a.ndim != 2:
            raise ValueError(f"{name}: shape {a.shape} is not that of a matrix")
    first, second = operands
    word = dtype_word(operands[first].dtype, first)
    if operands[second].dtype != operands[first].dtype:
        raise TypeError(f"{second}: dtype {operands[second].dtype} where {first} is {word}")
    if math not in (None, "fma", "tensor_op"):
        raise ValueError(f"math: {math!r} is none of 'fma', 'tensor_op', None")
    if math == "tensor_op" and word == "float64":
        raise ValueError("math: 'tensor_op' is not for float64")
    if out is None:
        if accumulate:
            raise ValueError("accumulate: there is no out to add to")
        return
    if out.shape != out_shape:
        raise ValueError(f"out: shape {out.shape} where {out_shape} is needed")
    if out.dtype != operands[first].dtype:
        raise TypeError(f"out: dtype {out.dtype} where {first} is {word}")


def _as_pixels(math: str | None, *matrices: Array | None) -> bool:
    """Says whether the rows of matrices are pixels and not images; see Note [rows as pixels]."""
    given = [a for a in matrices if a is not None]
    math = default_math(dtype_word(given[0].dtype, "x")) if math is None else math
    # One row or column has no layout of its own.
    return math == "tensor_op" and all(a.flags.c_contiguous and min(a.shape) > 1 for a in given)


def _filters(a: Array) -> Array:
    """Views a matrix as filters of one element: (rows, columns, 1, 1)."""
    return a[:, :, None, None]


def _rows(a: Array, pixels: bool) -> Array:
    """Views a matrix as one image with a pixel a row, (1, columns, rows, 1), or as an image of one pixel a row."""
    return a.T[None, :, :, None] if pixels else a[:, :, None, None]


def _matrix(image: Array, pixels: bool) -> Array:
    """The matrix whose view by `_rows` an image is."""
    return image[0, :, :, 0].T if pixels else image[:, :, 0, 0]


def _product(a: Array, b: Array, out: Array | None, accumulate: bool) -> Array:
    """Computes a @ b on the CPU, 16-bit operands in float32 with one rounding at the end."""
    compute = a.dtype if a.dtype.itemsize > 2 else np.dtype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        product = np.matmul(a.astype(compute, copy=False), b.astype(compute, copy=False))
        if out is None:
            return product.astype(a.dtype, copy=False)
        out[...] = out.astype(compute, copy=False) + product if accumulate else product
    return out
