"""Ops that treat each element by itself: ReLU, sums, scaling, casts, copies, dropout.

A result has the layout of the first argument (nchw when that one is strided). 16-bit values are computed in float32 and
rounded once.
"""

from typing import Any

import numpy as np

from flcuda import reference, rng
from flcuda.device import memory_layout, numpy_dtype
from flcuda.kernel_loader import SUFFIXES, launch
from flcuda.ops.arrays import (
    accumulator,
    dense,
    layout_of,
    new,
    on_cuda,
    require_dtype,
    require_no_overlap,
    require_shape,
    strided_copy,
    suffix,
)

Array = Any


def relu_forward(x: Array) -> Array:
    """Computes max(x, 0); NaN stays NaN.

    Args:
        x: any shape, one of the four dtypes, any layout; borrowed, read on the current stream.

    Returns:
        y, like x; owned by the caller.
    """
    kind = suffix("x", x)
    if not on_cuda(x=x):
        return reference.relu_forward(x)
    layout = layout_of(x)
    y = new(x.shape, x.dtype, layout)
    launch("elementwise", f"relu_forward_{kind}", x.size, y, dense(x, layout), np.int64(x.size))
    return y


def relu_backward(dy: Array, y: Array) -> Array:
    """Passes a gradient where the ReLU was active; its gradient at 0 is 0.

    Args:
        dy: gradient of y; borrowed.
        y: the ReLU's result (or its argument: their signs agree), like dy; borrowed.

    Returns:
        dx, like dy; owned by the caller.

    Raises:
        TypeError: the dtypes differ.
        ValueError: the shapes or devices differ.
    """
    kind = suffix("dy", dy)
    require_dtype("y", y, dy.dtype)
    require_shape("y", y, dy.shape)
    if not on_cuda(dy=dy, y=y):
        return reference.relu_backward(dy, y)
    layout = layout_of(dy)
    dx = new(dy.shape, dy.dtype, layout)
    launch("elementwise", f"relu_backward_{kind}", dy.size, dx, dense(dy, layout), dense(y, layout), np.int64(dy.size))
    return dx


def add(a: Array, b: Array) -> Array:
    """Computes a + b.

    Args:
        a: any shape, one of the four dtypes; borrowed.
        b: same shape and dtype, any layout; borrowed.

    Returns:
        The sum, like a; owned by the caller.

    Raises:
        TypeError: the dtypes differ.
        ValueError: the shapes or devices differ.
    """
    kind = suffix("a", a)
    require_dtype("b", b, a.dtype)
    require_shape("b", b, a.shape)
    if not on_cuda(a=a, b=b):
        return reference.add(a, b)
    layout = layout_of(a)
    out = new(a.shape, a.dtype, layout)
    launch("elementwise", f"add_{kind}", a.size, out, dense(a, layout), dense(b, layout), np.int64(a.size))
    return out


def accumulate_(out: Array, a: Array) -> None:
    """Adds in place: out += a.

    Args:
        out: one of the four dtypes, any strides without overlap; borrowed, written.
        a: same shape and dtype; borrowed.

    Raises:
        TypeError: the dtypes differ.
        ValueError: the shapes or devices differ, or out overlaps itself (a broadcast array).
    """
    kind = suffix("out", out)
    require_dtype("a", a, out.dtype)
    require_shape("a", a, out.shape)
    require_no_overlap("out", out)
    if not on_cuda(out=out, a=a):
        reference.accumulate_(out, a)
        return
    layout = layout_of(out)
    target = dense(out, layout)
    launch("elementwise", f"add_{kind}", out.size, target, target, dense(a, layout), np.int64(out.size))
    if target is not out:
        strided_copy(target, out)


def scale(x: Array, s: float | Array) -> Array:
    """Computes x * s.

    Args:
        x: any shape, one of the four dtypes; borrowed.
        s: a number, or a float64 array of one element on x's device, read there: no sync. It is rounded to x's compute
            type (float64 for float64, else float32) first.

    Returns:
        The product, like x; owned by the caller.

    Raises:
        TypeError: s is an array of another dtype.
        ValueError: s has more than one element or is on another device.
    """
    kind = suffix("x", x)
    factor: Array = None if isinstance(s, int | float | np.generic) else s
    if factor is not None:
        require_dtype("s", factor, np.float64)
        if factor.size != 1:
            raise ValueError(f"s: expected one element, got shape {factor.shape}")
    if not on_cuda(x=x, s=factor):
        return reference.scale(x, s if factor is None else factor.reshape(()))
    layout = layout_of(x)
    out = new(x.shape, x.dtype, layout)
    source = dense(x, layout)
    if factor is None:
        launch("elementwise", f"scale_{kind}", x.size, out, source, np.float64(s), np.int64(x.size))
    else:
        launch("elementwise", f"scale_by_device_value_{kind}", x.size, out, source, factor, np.int64(x.size))
    return out


def cast(x: Array, dtype: str | np.dtype[Any] | type, *, out: Array | None = None) -> Array:
    """Converts to another dtype, rounding to nearest even.

    Args:
        x: any shape, one of the four dtypes; borrowed.
        dtype: the new dtype or its word.
        out: where to write, of x's shape and that dtype, any strides without overlap; a new array like x when None.

    Returns:
        out; a copy even when the dtype is x's own.

    Raises:
        TypeError: x, dtype or out has another dtype.
        ValueError: out has another shape or is on another device.
    """
    suffix("x", x)
    dtype = numpy_dtype(dtype)
    if dtype not in SUFFIXES:
        raise TypeError(f"dtype: expected float64, float32, float16 or bfloat16, got {dtype}")
    if out is None:
        if not on_cuda(x=x):
            return reference.cast(x, dtype)
        out = new(x.shape, dtype, layout_of(x))
    require_dtype("out", out, dtype)
    copy(x, out)
    return out


def copy(src: Array, out: Array) -> None:
    """Copies the elements of one array into another, converting the dtype.

    Args:
        src: any shape and strides; borrowed.
        out: same shape, any strides without overlap; borrowed, written. Must not share memory with src.

    Raises:
        TypeError: the dtypes differ and are not both of the four.
        ValueError: the shapes or devices differ, or out overlaps itself (a broadcast array).
    """
    cuda = on_cuda(src=src, out=out)
    require_shape("out", out, src.shape)
    require_no_overlap("out", out)
    if src.dtype != out.dtype and not {src.dtype, out.dtype} <= SUFFIXES.keys():
        raise TypeError(f"out: a copy from {src.dtype} to {out.dtype} is not supported")
    if cuda:
        strided_copy(src, out)
    else:
        reference.copy(src, out)


def fill(out: Array, value: float) -> None:
    """Sets every element.

    Args:
        out: one of the four dtypes, any strides without overlap; borrowed, written.
        value: the number.

    Raises:
        TypeError: out has another dtype.
        ValueError: out overlaps itself (a broadcast array).
    """
    kind = suffix("out", out)
    require_no_overlap("out", out)
    if not on_cuda(out=out):
        reference.fill(out, value)
        return
    layout = layout_of(out)
    target = out if memory_layout(out) != "strided" else new(out.shape, out.dtype, layout)
    launch("elementwise", f"fill_{kind}", out.size, target, np.float64(value), np.int64(out.size))
    if target is not out:
        strided_copy(target, out)


def dropout_forward(x: Array, p: float, state: rng.State) -> tuple[Array, Array]:
    """Sets elements to zero with probability p and multiplies the others by 1 / (1 - p).

    Element i in memory order takes word i of the state's dropout stream from the state's counter on, which then moves
    on by a block for every four elements: equal states give equal masks on both devices for equal layouts.

    Args:
        x: any shape, one of the four dtypes; borrowed.
        p: from 0 to 1; rounded to a multiple of 2^-24.
        state: seed and counter on x's device; its counter is moved, on the device.

    Returns:
        y, like x, and the mask, uint8 of x's shape and layout, 1 where kept; owned by the caller.

    Raises:
        ValueError: p is out of range or the state is on another device.
    """
    kind = suffix("x", x)
    if not 0 <= p <= 1:
        raise ValueError(f"p must be from 0 to 1, got {p}")
    if not on_cuda(x=x, state=state.counter):
        return reference.dropout_forward(x, p, state)
    layout = layout_of(x)
    y = new(x.shape, x.dtype, layout)
    mask = new(x.shape, np.dtype(np.uint8), layout)
    launch(
        "elementwise",
        f"dropout_forward_{kind}",
        -(-x.size // 4),
        y,
        mask,
        dense(x, layout),
        state.counter,
        np.uint64(state.seed),
        np.uint32(rng.DROPOUT_STREAM),
        np.uint32(reference.dropout_keep_threshold(p)),
        accumulator(x).type(reference.dropout_factor(p)),
        np.int64(x.size),
    )
    launch("elementwise", "advance_counter", 1, state.counter, np.uint64(-(-x.size // 4)))
    return y, mask


def dropout_backward(dy: Array, mask: Array, p: float) -> Array:
    """Passes a gradient through the elements that dropout kept.

    Args:
        dy: gradient of y; borrowed.
        mask: as `dropout_forward` gave it; borrowed.
        p: as given to `dropout_forward`.

    Returns:
        dx, like dy; owned by the caller.

    Raises:
        ValueError: the shapes or devices differ or p is out of range.
    """
    kind = suffix("dy", dy)
    require_dtype("mask", mask, np.uint8)
    require_shape("mask", mask, dy.shape)
    if not 0 <= p <= 1:
        raise ValueError(f"p must be from 0 to 1, got {p}")
    if not on_cuda(dy=dy, mask=mask):
        return reference.dropout_backward(dy, mask, p)
    layout = layout_of(dy)
    dx = new(dy.shape, dy.dtype, layout)
    factor = accumulator(dy).type(reference.dropout_factor(p))
    launch(
        "elementwise",
        f"dropout_backward_{kind}",
        dy.size,
        dx,
        dense(dy, layout),
        dense(mask, layout),
        factor,
        np.int64(dy.size),
    )
    return dx
