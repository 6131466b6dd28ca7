"""Batch normalisation.

Weight, bias and statistics are float32 for float16, bfloat16 and float32 inputs and float64 for float64. Sums over a
channel run in two stages and in a fixed order, without atomics: two runs give the same bits. The statistics are a mean
and the sum of squared distances from it, combined pairwise: they keep their digits when the mean is large.

PyTorch's `momentum` is cuDNN's exponential average factor: the weight of the new batch.

Source: Ioffe and Szegedy 2015; Chan, Golub and LeVeque 1979 for the combination.
"""

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
    require_shape,
    suffix,
    view_sizes,
)
from flcuda.ops.channel_reduction import WARPS, finish_grid, reduction

Array = Any


def batch_norm_training(
    x: Array,
    weight: Array,
    bias: Array,
    pending_mean: Array | None,
    pending_var: Array | None,
    num_batches: Array | None,
    momentum: float | None,
    eps: float,
) -> tuple[Array, Array, Array]:
    """Normalises each channel by the mean and the biased variance of the batch, and moves the pending statistics.

    pending = (1 - f) * pending + f * batch with f = momentum, or 1 / num_batches for a cumulative average; the variance
    that goes into pending is the unbiased one, as in PyTorch.

    Args:
        x: (N, C, *spatial), any layout; borrowed, read on the current stream.
        weight: (C,); borrowed.
        bias: (C,); borrowed.
        pending_mean: (C,), updated in place; None when no statistics are kept.
        pending_var: (C,), updated in place; None together with pending_mean.
        num_batches: int64, one element, incremented in place on the device before it is used; may be None when
            momentum is a number.
        momentum: the weight of this batch, from 0 to 1; None for the cumulative average.
        eps: added to the variance, in units of x squared.

    Returns:
        y, like x; saved_mean and saved_inv_variance = 1 / sqrt(variance + eps), (C,) in weight's dtype. Owned by the
        caller.

    Raises:
        TypeError: a dtype does not fit x.
        ValueError: a shape does not fit x, the devices differ, a channel has fewer than two values, momentum is out of
            range or eps negative, or what momentum needs is None.
    """
    kind = _check(x, weight, bias=bias, pending_mean=pending_mean, pending_var=pending_var)
    count = x.size // max(1, x.shape[1])
    if count < 2:
        raise ValueError(f"x: training needs at least two values a channel, got shape {x.shape}")
    if (pending_mean is None) != (pending_var is None):
        raise ValueError("pending_mean and pending_var must both be arrays or both be None")
    if num_batches is not None:
        require_dtype("num_batches", num_batches, np.int64)
        if num_batches.size != 1:
            raise ValueError(f"num_batches: expected one element, got shape {num_batches.shape}")
    if momentum is None:
        if num_batches is None:
            raise ValueError("num_batches: a cumulative average (momentum=None) needs it, got None")
    elif not 0 <= momentum <= 1:
        raise ValueError(f"momentum must be from 0 to 1 or None, got {momentum}")
    _check_eps(eps)
    if not on_cuda(
        x=x, weight=weight, bias=bias, pending_mean=pending_mean, pending_var=pending_var, num_batches=num_batches
    ):
        return reference.batch_norm_training(x, weight, bias, pending_mean, pending_var, num_batches, momentum, eps)
    layout = layout_of(x)
    source = dense(x, layout)
    sizes = view_sizes(x, layout)
    channels = x.shape[1]
    grid, block, order = reduction(x.shape, layout)
    partial = new((grid[1], channels, 3), accumulator(x))
    launch_blocks(
        "batch_norm", f"batch_norm_statistics_{order}_{kind}", grid, block, partial, num_batches, source, *sizes
    )
    saved_mean = new((channels,), weight.dtype)
    saved_inv_variance = new((channels,), weight.dtype)
    launch_blocks(
        "batch_norm",
        f"batch_norm_finish_statistics_{_statistics_suffix(weight)}",
        finish_grid(channels),
        (32 * WARPS, 1),
        saved_mean,
        saved_inv_variance,
        pending_mean,
        pending_var,
        num_batches,
        partial,
        np.int64(grid[1]),
        np.int64(channels),
        np.float64(-1.0 if momentum is None else momentum),
        np.float64(eps),
    )
    y = _apply(kind, source, layout, weight, bias, saved_mean, saved_inv_variance)
    return y, saved_mean, saved_inv_variance


def batch_norm_inference(
    x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, eps: float
) -> Array:
    """Normalises each channel by the running statistics.

    Args:
        x: (N, C, *spatial), any layout; borrowed.
        weight: (C,); borrowed.
        bias: (C,); borrowed.
        running_mean: (C,); borrowed.
        running_var: (C,); borrowed.
        eps: added to the variance, in units of x squared.

    Returns:
        y, like x; owned by the caller.

    Raises:
        TypeError: a dtype does not fit x.
        ValueError: a shape does not fit x, the devices differ or eps is negative.
    """
    kind = _check(x, weight, bias=bias, running_mean=running_mean, running_var=running_var)
    _check_eps(eps)
    if not on_cuda(x=x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var):
        return reference.batch_norm_inference(x, weight, bias, running_mean, running_var, eps)
    layout = layout_of(x)
    inverse = _inverse(running_var, eps)
    return _apply(kind, dense(x, layout), layout, weight, bias, running_mean, inverse)


def batch_norm_backward(
    dy: Array,
    x: Array,
    weight: Array,
    saved_mean: Array,
    saved_inv_variance: Array,
    *,
    dweight: Array | None = None,
    dbias: Array | None = None,
    accumulate: bool = False,
) -> tuple[Array, Array, Array]:
    """The gradients of `batch_norm_training`.

    Args:
        dy: gradient of y, (N, C, *spatial), any layout; borrowed.
        x: as given to the forward pass, dtype of dy; borrowed.
        weight: (C,); borrowed.
        saved_mean: (C,), from the forward pass; borrowed.
        saved_inv_variance: (C,), from the forward pass; borrowed.
        dweight: where to write weight's gradient, (C,) in weight's dtype; a new array when None.
        dbias: the same for bias.
        accumulate: add to dweight and dbias, which must both be given, instead of overwriting them.

    Returns:
        dx, like x; dweight; dbias.

    Raises:
        TypeError: a dtype does not fit x.
        ValueError: a shape does not fit x, the devices differ, or accumulate without dweight and dbias.
    """
    kind = _check_backward(
        dy, x, weight, dweight, dbias, accumulate, saved_mean=saved_mean, saved_inv_variance=saved_inv_variance
    )
    if x.size == 0:
        raise ValueError(f"x: training needs at least two values a channel, got shape {x.shape}")
    if not on_cuda(
        dy=dy,
        x=x,
        weight=weight,
        saved_mean=saved_mean,
        saved_inv_variance=saved_inv_variance,
        dweight=dweight,
        dbias=dbias,
    ):
        return reference.batch_norm_backward(dy, x, weight, saved_mean, saved_inv_variance, dweight, dbias, accumulate)
    return _backward(kind, dy, x, weight, saved_mean, saved_inv_variance, dweight, dbias, accumulate, training=True)


def batch_norm_inference_backward(
    dy: Array,
    x: Array,
    weight: Array,
    running_mean: Array,
    running_var: Array,
    eps: float,
    *,
    dweight: Array | None = None,
    dbias: Array | None = None,
    accumulate: bool = False,
) -> tuple[Array, Array, Array]:
    """The gradients of `batch_norm_inference`, whose statistics are constants.

    Args:
        dy: gradient of y, (N, C, *spatial), any layout; borrowed.
        x: as given to the forward pass, dtype of dy; borrowed.
        weight: (C,); borrowed.
        running_mean: (C,); borrowed.
        running_var: (C,); borrowed.
        eps: as given to the forward pass.
        dweight: where to write weight's gradient, (C,) in weight's dtype; a new array when None.
        dbias: the same for bias.
        accumulate: add to dweight and dbias, which must both be given, instead of overwriting them.

    Returns:
        dx, like x; dweight; dbias.

    Raises:
        TypeError: a dtype does not fit x.
        ValueError: a shape does not fit x, the devices differ, eps is negative, or accumulate without dweight and
            dbias.
    """
    kind = _check_backward(
        dy, x, weight, dweight, dbias, accumulate, running_mean=running_mean, running_var=running_var
    )
    _check_eps(eps)
    if not on_cuda(
        dy=dy, x=x, weight=weight, running_mean=running_mean, running_var=running_var, dweight=dweight, dbias=dbias
    ):
        return reference.batch_norm_inference_backward(
            dy, x, weight, running_mean, running_var, eps, dweight, dbias, accumulate
        )
    inverse = _inverse(running_var, eps)
    return _backward(kind, dy, x, weight, running_mean, inverse, dweight, dbias, accumulate, training=False)


def _apply(kind: str, source: Array, layout: Any, weight: Array, bias: Array, mean: Array, inverse: Array) -> Array:
    y = new(source.shape, source.dtype, layout)
    launch(
        "batch_norm",
        f"batch_norm_apply_{kind}",
        y.size,
        y,
        source,
        weight,
        bias,
        mean,
        inverse,
        *view_sizes(y, layout),
    )
    return y


def _inverse(variance: Array, eps: float) -> Array:
    out = new(variance.shape, variance.dtype)
    launch(
        "batch_norm",
        f"batch_norm_inverse_{_statistics_suffix(variance)}",
        out.size,
        out,
        variance,
        np.float64(eps),
        np.int64(out.size),
    )
    return out


def _backward(
    kind: str,
    dy: Array,
    x: Array,
    weight: Array,
    mean: Array,
    inverse: Array,
    dweight: Array | None,
    dbias: Array | None,
    accumulate: bool,
    *,
    training: bool,
) -> tuple[Array, Array, Array]:
    layout = layout_of(x)
    gradient, source = dense(dy, layout), dense(x, layout)
    sizes = view_sizes(x, layout)
    channels = x.shape[1]
    grid, block, order = reduction(x.shape, layout)
    partial = new((grid[1], channels, 2), weight.dtype)
    launch_blocks(
        "batch_norm",
        f"batch_norm_gradient_sums_{order}_{kind}",
        grid,
        block,
        partial,
        gradient,
        source,
        mean,
        *sizes,
    )
    dweight = new((channels,), weight.dtype) if dweight is None else dweight
    dbias = new((channels,), weight.dtype) if dbias is None else dbias
    # Per channel the two means that the second pass subtracts; zeros for constant statistics.
    means = new((2, channels), weight.dtype)
    count = x.size // channels if training else 0
    launch_blocks(
        "batch_norm",
        f"batch_norm_finish_gradient_{_statistics_suffix(weight)}",
        finish_grid(channels),
        (32 * WARPS, 1),
        dweight,
        dbias,
        means,
        partial,
        inverse,
        np.int64(grid[1]),
        np.int64(channels),
        np.int64(count),
        np.int32(accumulate),
    )
    dx = new(x.shape, x.dtype, layout)
    launch(
        "batch_norm",
        f"batch_norm_backward_{kind}",
        dx.size,
        dx,
        gradient,
        source,
        weight,
        mean,
        inverse,
        means,
        *sizes,
    )
    return dx, dweight, dbias


def _statistics_suffix(a: Array) -> str:
    return "f64" if a.dtype == np.float64 else "f32"


def _check(x: Array, weight: Array, **vectors: Array | None) -> str:
    """Checks (C,) arrays against x; gives the kernel suffix."""
    kind = suffix("x", x)
    require_channels("x", x)
    dtype = accumulator(x)
    for name, vector in {"weight": weight, **vectors}.items():
        if vector is None:
            continue
        require_dtype(name, vector, dtype)
        require_shape(name, vector, (x.shape[1],))
        require_dense(name, vector)
    return kind


def _check_backward(
    dy: Array,
    x: Array,
    weight: Array,
    dweight: Array | None,
    dbias: Array | None,
    accumulate: bool,
    **vectors: Array,
) -> str:
    kind = _check(x, weight, dweight=dweight, dbias=dbias, **vectors)
    require_dtype("dy", dy, x.dtype)
    require_shape("dy", dy, x.shape)
    if accumulate and (dweight is None or dbias is None):
        raise ValueError("accumulate: True needs dweight and dbias")
    return kind


def _check_eps(eps: float) -> None:
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps}")
