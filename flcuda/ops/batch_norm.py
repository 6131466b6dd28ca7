"""Batch normalisation, with the addition and the ReLU that follow it in one pass.

Weight, bias and statistics are float32 for float16, bfloat16 and float32 inputs and float64 for float64. Sums over a
channel run in two stages and in a fixed order, without atomics: two runs give the same bits. The statistics are a mean
and the sum of squared distances from it, combined pairwise: they keep their digits when the mean is large.

PyTorch's `momentum` is cuDNN's exponential average factor: the weight of the new batch.

Note [passes]: with A the bytes of x, `statistics` reads A, `apply` reads and writes A (and reads the residual's A). Of
`backward` the first pass reads the gradients and x, and writes the gradient behind ReLU where a residual takes it; the
second reads that and x and writes dx. Each pass is one launch: the block that finishes last adds up the parts of all,
which it knows by a ticket, words on the device that are zero between launches. So only one pass at a time may have a
ticket: one a layer, not one for all, because a process may have several streams.

Source: Ioffe and Szegedy 2015; Chan, Golub and LeVeque 1979 for the combination.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flcuda import device as devices
from flcuda import reference
from flcuda.device import Device, cupy
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
from flcuda.ops.channel_reduction import MAPPING, SUMMING, Tiles, Width, tiles

Array = Any

_VECTOR_BYTES = 16
# The accesses at once of each pass, as in kernels/batch_norm.cu: with two norms a vector has at most four elements, and
# of the passes in _FEWER there are half as many for eight. Passes with sums share single ones.
_AT_ONCE = {
    "statistics": 1,
    "apply": 8,
    "apply_raw": 4,
    "apply_normalised": 4,
    "sums": 1,
    "sums_raw": 1,
    "sums_normalised": 1,
    "backward": 4,
    "backward_normalised": 2,
}
_FEWER = ("apply_raw", "backward")


class Norm(NamedTuple):
    """What a channel is normalised by: y = (x - mean) * inverse * weight + bias.

    Attributes:
        weight, bias, mean, inverse: (C,), in the dtype that goes with x's; inverse is 1 / sqrt(variance + eps).
    """

    weight: Array
    bias: Array
    mean: Array
    inverse: Array


class Into(NamedTuple):
    """Where the gradients of weight and bias go: ``=`` or, with accumulate, ``+=``.

    Attributes:
        dweight, dbias: (C,), in weight's dtype.
        accumulate: add to what is there.
    """

    dweight: Array
    dbias: Array
    accumulate: bool


class Gradients(NamedTuple):
    """What `backward` gives; the last three are None where there is nothing of the kind."""

    dx: Array
    dweight: Array
    dbias: Array
    dresidual: Array | None
    dresidual_weight: Array | None
    dresidual_bias: Array | None


def new_ticket(channels: int, place: Device) -> Array:
    """Makes what lets the passes of one layer be one launch each; see Note [passes].

    Args:
        channels: C.
        place: the device.

    Returns:
        uint32, (C + 1,), zero; owned by the caller.
    """
    return devices.zeros((channels + 1,), np.uint32, device=place)


def statistics(
    x: Array,
    pending_mean: Array | None,
    pending_var: Array | None,
    num_batches: Array | None,
    momentum: float | None,
    eps: float,
    *,
    ticket: Array | None = None,
) -> tuple[Array, Array]:
    """The mean and the inverse deviation of each channel of a batch; moves the pending statistics.

    Args:
        x: (N, C, *spatial), any layout; borrowed, read on the current stream.
        pending_mean: (C,), updated in place; None when no statistics are kept.
        pending_var: (C,), updated in place; None together with pending_mean.
        num_batches: int64, one element, incremented in place on the device before it is used; may be None when
            momentum is a number.
        momentum: the weight of this batch, from 0 to 1; None for the cumulative average.
        eps: added to the variance, in units of x squared.
        ticket: from `new_ticket`; None for one of the call's own, which takes another launch. Not used on the CPU.

    Returns:
        mean and 1 / sqrt(biased variance + eps), (C,), float64 for float64 and else float32. Owned by the caller.

    Raises:
        TypeError, ValueError: as of `batch_norm_training`.
    """
    vectors = {"pending_mean": pending_mean, "pending_var": pending_var}
    kind = _check(x, **vectors)
    _check_statistics(x, pending_mean, pending_var, num_batches, momentum, eps)
    if not on_cuda(x=x, **vectors, num_batches=num_batches):
        return reference.batch_norm_statistics(x, pending_mean, pending_var, num_batches, momentum, eps)
    layout = layout_of(x)
    source = dense(x, layout)
    return _statistics(kind, source, layout, pending_mean, pending_var, num_batches, momentum, eps, ticket)


def inverse_deviation(variance: Array, eps: float) -> Array:
    """1 / sqrt(variance + eps), in variance's dtype.

    Args:
        variance: (C,), float32 or float64; borrowed.
        eps: added to the variance.

    Raises:
        ValueError: eps is negative.
    """
    _check_eps(eps)
    if not on_cuda(variance=variance):
        return reference.batch_norm_inverse(variance, eps)
    return _inverse(variance, eps)


def apply(
    x: Array,
    norm: Norm,
    *,
    residual: Array | None = None,
    residual_norm: Norm | None = None,
    relu: bool = False,
    keep_mask: bool = False,
) -> tuple[Array, Array | None]:
    """Normalises, adds and rectifies in one pass; only the result is rounded.

    Args:
        x: (N, C, *spatial), any layout; borrowed.
        norm: of x.
        residual: added before ReLU; like x, any layout; borrowed.
        residual_norm: residual is normalised by it first.
        relu: of the sum, max(y, 0); NaN stays.
        keep_mask: give the mask that `backward` needs: with a residual and relu there is no other way to know it.

    Returns:
        y, like x; the mask, whose form is the device's own, None without keep_mask, relu or residual.

    Raises:
        TypeError: a dtype does not fit x.
        ValueError: a shape does not fit x, the devices differ, or residual_norm without residual.
    """
    kind = _check(x, **norm._asdict())
    _check_residual(x, residual, residual_norm)
    keep_mask = keep_mask and relu and residual is not None
    if not on_cuda(x=x, residual=residual, **norm._asdict(), **_named(residual_norm)):
        y, passes = reference.batch_norm_apply(x, norm, residual, residual_norm, relu)
        return y, passes if keep_mask else None
    layout = layout_of(x)
    source = dense(x, layout)
    added = None if residual is None else dense(residual, layout)
    return _apply(kind, source, layout, norm, added, residual_norm, relu, keep_mask)


def gradient_sums(
    dy: Array,
    x: Array,
    norm: Norm,
    count: int,
    *,
    relu: bool = False,
    into: Into | None = None,
    ticket: Array | None = None,
) -> tuple[Array, Array, Array]:
    """The first pass of `backward`, without a residual.

    Args:
        dy: gradient of y, (N, C, *spatial), any layout; borrowed.
        x: what is normalised, like dy; borrowed.
        norm: as given to `apply`.
        count: of the elements of a channel that the statistics were made of; 0 for constant statistics.
        relu: as given to `apply`: dy counts where y is above 0.
        into: where to write weight's and bias's gradients; None for new arrays.
        ticket: as for `statistics`.

    Returns:
        (2, C): the sums of dy and of dy times x normalised, over count, zeros for a count of 0; dweight; dbias.

    Raises:
        TypeError: a dtype does not fit x.
        ValueError: a shape does not fit x, or the devices differ.
    """
    kind = _check(x, **norm._asdict(), **_targets(into))
    _check_like("dy", dy, x)
    if not on_cuda(dy=dy, x=x, **norm._asdict(), **_targets(into)):
        dz = reference.batch_norm_masked([dy], x, norm if relu else None, None, False)
        return reference.batch_norm_gradient_sums(dz, x, norm.mean, norm.inverse, count, *(into or (None, None, False)))
    layout = layout_of(x)
    gradient, source = dense(dy, layout), dense(x, layout)
    width = _width(layout, gradient, source)
    return _sums(kind, width, layout, gradient, source, norm, count, relu, _into(into, norm), ticket)


def backward(
    dys: Sequence[Array],
    x: Array,
    norm: Norm,
    *,
    relu: bool = False,
    adds: bool = False,
    residual: Array | None = None,
    residual_norm: Norm | None = None,
    mask: Array | None = None,
    constant: bool = False,
    into: Into | None = None,
    residual_into: Into | None = None,
    ticket: Array | None = None,
) -> Gradients:
    """The gradients of `apply`, and of `statistics` before it, in two passes; see Note [passes].

    Args:
        dys: gradients of y, whose sum is meant, at least one, like x, any layout; borrowed.
        x: as given to `apply`.
        norm: as given to `apply`.
        relu: as given to `apply`; with adds the mask says it.
        adds: `apply` was given a residual.
        residual: as given to `apply`, needed with residual_norm only.
        residual_norm: as given to `apply`.
        mask: from `apply`; None when there was no ReLU.
        constant: the statistics are constants, not the batch's.
        into: where to write weight's and bias's gradients; None for new arrays.
        residual_into: the same of residual_norm's.
        ticket: as for `statistics`.

    Returns:
        The gradients. dresidual may be the one array of dys.

    Raises:
        TypeError: a dtype does not fit x.
        ValueError: a shape does not fit x, the devices differ, there is no gradient, relu with adds needs a mask, or
            residual_norm needs residual.
    """
    named = _named(residual_norm)
    kind = _check(x, **norm._asdict(), **_targets(into))
    _check(x, **named, **_targets(residual_into, "residual_"))
    if not dys:
        raise ValueError("dys: expected at least one gradient")
    for i, dy in enumerate(dys):
        _check_like(f"dys[{i}]", dy, x)
    if residual_norm is not None:
        _check_residual(x, residual, residual_norm)
        adds = True
    if adds and relu and mask is None:
        raise ValueError("mask: with relu and a residual it is needed, got None")
    places = {f"dys[{i}]": dy for i, dy in enumerate(dys)}
    places |= {"x": x, "residual": residual, "mask": mask, **norm._asdict(), **named}
    places |= {**_targets(into), **_targets(residual_into, "residual_")}
    if not on_cuda(**places):
        return _backward_on_cpu(dys, x, norm, relu, adds, residual, residual_norm, mask, constant, into, residual_into)
    count = 0 if constant else x.size // max(1, x.shape[1])
    layout = layout_of(x)
    source = dense(x, layout)
    # Of more than two, which are rare, the first are added in a pass of their own.
    most = 2 if adds else 1
    gradients = list(dys)
    while len(gradients) > most:
        gradients[:2] = [elementwise.add(gradients[0], gradients[1])]
    gradients = [dense(dy, layout) for dy in gradients]
    target = _into(into, norm)
    dx = new(x.shape, x.dtype, layout)
    if not adds:
        width = _width(layout, source, dx, *gradients)
        means, *vectors = _sums(kind, width, layout, gradients[0], source, norm, count, relu, target, ticket)
        _input_gradient(kind, width, layout, dx, gradients[0], source, norm, means, relu)
        return Gradients(dx, vectors[0], vectors[1], None, None, None)
    # The mask is laid out by the width of the pass that wrote it.
    added = None if residual_norm is None else dense(residual, layout)
    if mask is None:
        width = _width(layout, source, dx, *gradients, *([] if added is None else [added]))
    else:
        width = "scalar" if mask.size == x.size else "vector"
        if width == "vector":
            gradients = [_aligned(dy, layout) for dy in gradients]
    dz = gradients[0] if mask is None and len(gradients) == 1 else new(x.shape, x.dtype, layout)
    first = dz is not gradients[0]
    second = gradients[1] if len(gradients) == 2 else None
    written = dz if first else None
    if residual_norm is None:
        means, *vectors = _sums_raw(
            kind, width, layout, written, gradients[0], second, source, norm, mask, count, target, ticket
        )
        _input_gradient(kind, width, layout, dx, dz, source, norm, means, False)
        return Gradients(dx, vectors[0], vectors[1], dz, None, None)
    other = _into(residual_into, residual_norm)
    shape = _tiles("sums_normalised", source, layout, width)
    means, other_means = new((2, x.shape[1]), norm.weight.dtype), new((2, x.shape[1]), norm.weight.dtype)
    _launch(
        "sums_normalised",
        kind,
        width,
        shape,
        written,
        new((*shape.grid, 3, shape.slots), accumulator(x)),
        _ticket(ticket, x),
        target.dweight,
        target.dbias,
        means,
        np.int32(target.accumulate),
        other.dweight,
        other.dbias,
        other_means,
        np.int32(other.accumulate),
        gradients[0],
        second,
        source,
        *norm,
        added,
        *residual_norm,
        mask,
        np.int64(count),
        *_sizes(source, layout, shape),
    )
    dresidual = new(x.shape, x.dtype, layout)
    shape = _tiles("backward_normalised", source, layout, width)
    _launch(
        "backward_normalised",
        kind,
        width,
        shape,
        dx,
        dresidual,
        dz,
        source,
        *norm,
        means,
        added,
        *residual_norm,
        other_means,
        *_sizes(source, layout, shape),
    )
    return Gradients(dx, target.dweight, target.dbias, dresidual, other.dweight, other.dbias)


def _backward_on_cpu(
    dys: Sequence[Array],
    x: Array,
    norm: Norm,
    relu: bool,
    adds: bool,
    residual: Array | None,
    residual_norm: Norm | None,
    mask: Array | None,
    constant: bool,
    into: Into | None,
    residual_into: Into | None,
) -> Gradients:
    dz = reference.batch_norm_masked(dys, x, norm if relu and not adds else None, mask, adds)
    count = 0 if constant else x.size // max(1, x.shape[1])

    def of(source: Array, one: Norm, target: Into | None) -> tuple[Array, Array, Array]:
        means, dweight, dbias = reference.batch_norm_gradient_sums(
            dz, source, one.mean, one.inverse, count, *(target or (None, None, False))
        )
        dx = reference.batch_norm_input_gradient(dz, source, one.weight, one.mean, one.inverse, means)
        return dx, dweight, dbias

    own = of(x, norm, into)
    if residual_norm is not None:
        return Gradients(*own, *of(residual, residual_norm, residual_into))
    return Gradients(*own, reference.batch_norm_residual_gradient(dz, x) if adds else None, None, None)


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
    kind = _check(x, weight=weight, bias=bias, pending_mean=pending_mean, pending_var=pending_var)
    _check_statistics(x, pending_mean, pending_var, num_batches, momentum, eps)
    if not on_cuda(
        x=x, weight=weight, bias=bias, pending_mean=pending_mean, pending_var=pending_var, num_batches=num_batches
    ):
        return reference.batch_norm_training(x, weight, bias, pending_mean, pending_var, num_batches, momentum, eps)
    layout = layout_of(x)
    source = dense(x, layout)
    saved = _statistics(kind, source, layout, pending_mean, pending_var, num_batches, momentum, eps, None)
    y, _ = _apply(kind, source, layout, Norm(weight, bias, *saved), None, None, False, False)
    return y, *saved


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
    kind = _check(x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    _check_eps(eps)
    if not on_cuda(x=x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var):
        return reference.batch_norm_inference(x, weight, bias, running_mean, running_var, eps)
    layout = layout_of(x)
    inverse = _inverse(running_var, eps)
    norm = Norm(weight, bias, running_mean, inverse)
    return _apply(kind, dense(x, layout), layout, norm, None, None, False, False)[0]


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
    norm = Norm(weight, weight, saved_mean, saved_inv_variance)
    return _plain_backward(kind, dy, x, norm, dweight, dbias, accumulate, training=True)


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
    norm = Norm(weight, weight, running_mean, inverse)
    return _plain_backward(kind, dy, x, norm, dweight, dbias, accumulate, training=False)


def _statistics(
    kind: str,
    source: Array,
    layout: Layout,
    pending_mean: Array | None,
    pending_var: Array | None,
    num_batches: Array | None,
    momentum: float | None,
    eps: float,
    ticket: Array | None,
) -> tuple[Array, Array]:
    width = _width(layout, source)
    shape = _tiles("statistics", source, layout, width)
    dtype = accumulator(source)
    mean, inverse = new((source.shape[1],), dtype), new((source.shape[1],), dtype)
    _launch(
        "statistics",
        kind,
        width,
        shape,
        mean,
        inverse,
        pending_mean,
        pending_var,
        num_batches,
        new((*shape.grid, 2, shape.slots), dtype),
        _ticket(ticket, source),
        source,
        np.float64(-1.0 if momentum is None else momentum),
        np.float64(eps),
        *_sizes(source, layout, shape),
    )
    return mean, inverse


def _apply(
    kind: str,
    source: Array,
    layout: Layout,
    norm: Norm,
    added: Array | None,
    added_norm: Norm | None,
    relu: bool,
    keep_mask: bool,
) -> tuple[Array, Array | None]:
    y = new(source.shape, source.dtype, layout)
    width = _width(layout, source, y, *([] if added is None else [added]))
    name = "apply" if added is None else "apply_raw" if added_norm is None else "apply_normalised"
    shape = _tiles(name, source, layout, width)
    sizes = (np.int32(relu), *_sizes(source, layout, shape))
    if added is None:
        _launch(name, kind, width, shape, y, source, *norm, *sizes)
        return y, None
    accesses = source.size // _elements(name, source, width)
    mask = new((accesses,), np.uint8) if keep_mask else None
    _launch(name, kind, width, shape, y, mask, source, *norm, added, *(added_norm or ()), *sizes)
    return y, mask


def _sums(
    kind: str,
    width: Width,
    layout: Layout,
    dy: Array,
    source: Array,
    norm: Norm,
    count: int,
    relu: bool,
    into: Into,
    ticket: Array | None,
) -> tuple[Array, Array, Array]:
    shape = _tiles("sums", source, layout, width)
    means = new((2, source.shape[1]), norm.weight.dtype)
    _launch(
        "sums",
        kind,
        width,
        shape,
        new((*shape.grid, 2, shape.slots), accumulator(source)),
        _ticket(ticket, source),
        into.dweight,
        into.dbias,
        means,
        np.int32(into.accumulate),
        dy,
        source,
        *norm,
        np.int32(relu),
        np.int64(count),
        *_sizes(source, layout, shape),
    )
    return means, into.dweight, into.dbias


def _sums_raw(
    kind: str,
    width: Width,
    layout: Layout,
    dz: Array | None,
    dy: Array,
    dy_2: Array | None,
    source: Array,
    norm: Norm,
    mask: Array | None,
    count: int,
    into: Into,
    ticket: Array | None,
) -> tuple[Array, Array, Array]:
    shape = _tiles("sums_raw", source, layout, width)
    means = new((2, source.shape[1]), norm.weight.dtype)
    _launch(
        "sums_raw",
        kind,
        width,
        shape,
        dz,
        new((*shape.grid, 2, shape.slots), accumulator(source)),
        _ticket(ticket, source),
        into.dweight,
        into.dbias,
        means,
        np.int32(into.accumulate),
        dy,
        dy_2,
        source,
        *norm,
        mask,
        np.int64(count),
        *_sizes(source, layout, shape),
    )
    return means, into.dweight, into.dbias


def _plain_backward(
    kind: str,
    dy: Array,
    x: Array,
    norm: Norm,
    dweight: Array | None,
    dbias: Array | None,
    accumulate: bool,
    *,
    training: bool,
) -> tuple[Array, Array, Array]:
    """Without ReLU and residual, whose absence makes the norm's bias of no matter."""
    layout = layout_of(x)
    gradient, source = dense(dy, layout), dense(x, layout)
    dx = new(x.shape, x.dtype, layout)
    width = _width(layout, gradient, source, dx)
    fresh = _into(None, norm)
    into = Into(fresh.dweight if dweight is None else dweight, fresh.dbias if dbias is None else dbias, accumulate)
    count = x.size // max(1, x.shape[1]) if training else 0
    means, *_ = _sums(kind, width, layout, gradient, source, norm, count, False, into, None)
    _input_gradient(kind, width, layout, dx, gradient, source, norm, means, False)
    return dx, into.dweight, into.dbias


def _input_gradient(
    kind: str,
    width: Width,
    layout: Layout,
    dx: Array,
    dz: Array,
    source: Array,
    norm: Norm,
    means: Array,
    relu: bool,
) -> None:
    shape = _tiles("backward", source, layout, width)
    _launch(
        "backward",
        kind,
        width,
        shape,
        dx,
        dz,
        source,
        *norm,
        means,
        np.int32(relu),
        *_sizes(source, layout, shape),
    )


def _elements(name: str, source: Array, width: Width) -> int:
    """The elements of an access."""
    if width == "scalar":
        return 1
    most = _VECTOR_BYTES // source.itemsize
    return int(min(4, most) if name.endswith("_normalised") else most)


def _tiles(name: str, source: Array, layout: Layout, width: Width) -> Tiles:
    elements = _elements(name, source, width)
    at_once = _AT_ONCE[name]
    blocks = SUMMING if name.startswith(("statistics", "sums")) else MAPPING
    if blocks is MAPPING:
        if width == "scalar":
            at_once *= 2
        elif elements == 8 and name in _FEWER:
            at_once //= 2
    return tiles(source.shape, layout, elements, at_once, blocks, multiprocessors())


def _sizes(source: Array, layout: Layout, shape: Tiles) -> tuple[np.generic, ...]:
    return (*view_sizes(source, layout), np.int32(shape.lanes))


def _width(layout: Layout, *arrays: Array) -> Width:
    """Vectors where all arrays are aligned for them and a row of the order is whole vectors."""
    first = arrays[0]
    space = math.prod(first.shape[2:])
    row = space if layout == "nchw" and space > 1 else first.shape[1]
    vectors = row * first.itemsize % _VECTOR_BYTES == 0 and not any(_address(a) % _VECTOR_BYTES for a in arrays)
    return "vector" if vectors else "scalar"


def _address(a: Array) -> int:
    return int(a.data.ptr)


def _aligned(a: Array, layout: Layout) -> Array:
    """The dense array, or a copy of it that is aligned."""
    if _address(a) % _VECTOR_BYTES == 0:
        return a
    out = new(a.shape, a.dtype, layout)
    elementwise.copy(a, out)
    return out


def _ticket(ticket: Array | None, source: Array) -> Array:
    return cupy().zeros((source.shape[1] + 1,), np.uint32) if ticket is None else ticket


def _launch(name: str, kind: str, width: Width, shape: Tiles, *arguments: Array | np.generic | None) -> None:
    """Launches a pass. A module has the kernels of one dtype, order and width: all together take long to compile."""
    launch_blocks(
        "batch_norm",
        f"batch_norm_{name}_{width}_{shape.order}_{kind}",
        shape.grid,
        (shape.threads, 1),
        *arguments,
        defines=defines_of(width, shape.order, kind),
    )


def defines_of(width: Width, order: Layout, kind: str) -> tuple[str, ...]:
    """The macros by which kernels/batch_norm.cu is compiled.

    Args:
        width: of the memory accesses.
        order: of the elements.
        kind: the dtype's suffix.
    """
    return f"NORM_WIDTH={width}", f"NORM_ORDER={order}", f"NORM_KIND={kind}"


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


def _statistics_suffix(a: Array) -> str:
    return "f64" if a.dtype == np.float64 else "f32"


def _check(x: Array, **vectors: Array | None) -> str:
    """Checks (C,) arrays against x; gives the kernel suffix."""
    kind = suffix("x", x)
    require_channels("x", x)
    dtype = accumulator(x)
    for name, vector in vectors.items():
        if vector is None:
            continue
        require_dtype(name, vector, dtype)
        require_shape(name, vector, (x.shape[1],))
        require_dense(name, vector)
    return kind


def _check_like(name: str, a: Array, x: Array) -> None:
    require_dtype(name, a, x.dtype)
    require_shape(name, a, x.shape)


def _check_residual(x: Array, residual: Array | None, norm: Norm | None) -> None:
    if residual is not None:
        _check_like("residual", residual, x)
    elif norm is not None:
        raise ValueError("residual: residual_norm needs it, got None")
    _check(x, **_named(norm))


def _check_statistics(
    x: Array,
    pending_mean: Array | None,
    pending_var: Array | None,
    num_batches: Array | None,
    momentum: float | None,
    eps: float,
) -> None:
    if x.size // max(1, x.shape[1]) < 2:
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


def _check_backward(
    dy: Array,
    x: Array,
    weight: Array,
    dweight: Array | None,
    dbias: Array | None,
    accumulate: bool,
    **vectors: Array,
) -> str:
    kind = _check(x, weight=weight, dweight=dweight, dbias=dbias, **vectors)
    _check_like("dy", dy, x)
    if accumulate and (dweight is None or dbias is None):
        raise ValueError("accumulate: True needs dweight and dbias")
    return kind


def _check_eps(eps: float) -> None:
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps}")


def _named(norm: Norm | None) -> dict[str, Array]:
    """A residual's norm by its arguments' names."""
    return {} if norm is None else {f"residual_{name}": a for name, a in norm._asdict().items()}


def _targets(into: Into | None, prefix: str = "") -> dict[str, Array]:
    return {} if into is None else {f"{prefix}dweight": into.dweight, f"{prefix}dbias": into.dbias}


def _into(into: Into | None, norm: Norm) -> Into:
    if into is not None:
        return into
    return Into(new(norm.weight.shape, norm.weight.dtype), new(norm.weight.shape, norm.weight.dtype), False)
