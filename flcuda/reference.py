"""Every op in NumPy: the CPU device, and on float64 arrays the oracle of the tests.

float16 and bfloat16 are computed in float32 and rounded once at the end; float32 and float64 are computed as they are,
with the sums over a batch in float64. Results have the memory layout of the array that they correspond to. The
arguments are those of the functions of the same name in `flcuda.ops`, which check them and document them; here they are
taken as valid. The convolutions are in `flcuda.finder.sources.reference`.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from flcuda import rng
from flcuda.device import CPU, Array, empty, memory_layout, memory_order

Pair = tuple[int, int]


# Overflow, NaN and infinity are results, as they are on CUDA: the loss scaler is there to see them.
_ieee = np.errstate(all="ignore")


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """float64 for float64, float32 for every other dtype."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def wide(a: Array) -> Array:
    """The array in its compute dtype; itself when it already is."""
    return a.astype(compute_dtype(a.dtype), copy=False)


def _per_channel(values: Array, ndim: int) -> Array:
    """(C,) as (C, 1, 1), to broadcast over (N, C, *spatial)."""
    return values.reshape(-1, *[1] * (ndim - 2))


def _channel_sum(a: Array) -> Array:
    """The float64 sums of each channel over batch and space.

    Rows that are contiguous are summed pairwise in their own dtype first, which is fast and loses nothing that counts.
    """
    if a.ndim > 2 and a.flags.c_contiguous:
        rows = a.reshape(a.shape[0], a.shape[1], math.prod(a.shape[2:])).sum(axis=2)
        return np.asarray(rows.sum(axis=0, dtype=np.float64))
    axes = tuple(axis for axis in range(a.ndim) if axis != 1)
    return np.asarray(a.sum(axis=axes, dtype=np.float64))


def _store(values: Array, out: Array | None, accumulate: bool, dtype: np.dtype[Any]) -> Array:
    if out is None:
        return values.astype(dtype)
    if accumulate:
        values = values + out
    out[...] = values
    return out


# --- element by element -----------------------------------------------------------------------------------------------


@_ieee
def relu_forward(x: Array) -> Array:
    """max(x, 0); NaN stays NaN."""
    return _like(np.maximum(wide(x), 0), x)


@_ieee
def relu_backward(dy: Array, y: Array) -> Array:
    """The gradient where y is not <= 0."""
    return _like(np.where(y <= 0, 0, dy), dy)


@_ieee
def add(a: Array, b: Array) -> Array:
    """The sum of two arrays."""
    return _like(wide(a) + wide(b), a)


@_ieee
def accumulate_(out: Array, a: Array) -> None:
    """Adds a to out."""
    out[...] = wide(out) + wide(a)


@_ieee
def scale(x: Array, s: float | Array) -> Array:
    """The product x * s, with s rounded to the compute dtype."""
    return _like(wide(x) * compute_dtype(x.dtype).type(s), x)


@_ieee
def cast(x: Array, dtype: np.dtype[Any]) -> Array:
    """Another dtype."""
    out = empty(x.shape, dtype, device=CPU, layout=_kept_layout(x))
    out[...] = x
    return out


@_ieee
def copy(src: Array, out: Array) -> None:
    """Sets out to src."""
    out[...] = src


@_ieee
def fill(out: Array, value: float) -> None:
    """Sets out to a value."""
    out[...] = value


def dropout_keep_threshold(p: float) -> int:
    """An element is kept when the upper 24 bits of its random word reach this."""
    return round(p * (1 << 24))


@_ieee
def dropout_forward(x: Array, p: float, state: rng.State) -> tuple[Array, Array]:
    """Gives y and the mask; moves the state."""
    blocks = -(-x.size // 4)
    words = rng.words(state.seed, 4 * int(state.counter[0]), x.size, rng.DROPOUT_STREAM)
    state.counter += np.uint64(blocks)
    layout = _kept_layout(x)
    mask = empty(x.shape, np.uint8, device=CPU, layout=layout)
    in_memory = mask.transpose(memory_order(layout, x.ndim))
    in_memory[...] = ((words >> np.uint32(8)) >= dropout_keep_threshold(p)).reshape(in_memory.shape)
    return dropout_backward(x, mask, p), mask


@_ieee
def dropout_backward(dy: Array, mask: Array, p: float) -> Array:
    """The gradient through the kept elements."""
    factor = compute_dtype(dy.dtype).type(dropout_factor(p))
    return _like(np.where(mask != 0, wide(dy) * factor, 0), dy)


def dropout_factor(p: float) -> float:
    """What a kept element is multiplied by; nothing is kept at p = 1."""
    return 0.0 if p == 1 else 1.0 / (1.0 - p)


# --- bias -------------------------------------------------------------------------------------------------------------


@_ieee
def bias_forward(y: Array, bias: Array) -> Array:
    """Adds a bias a channel to y."""
    y[...] = wide(y) + _per_channel(wide(bias), y.ndim)
    return y


@_ieee
def bias_backward(dy: Array, out: Array | None, accumulate: bool) -> Array:
    """The sum over everything but the channel."""
    return _store(_channel_sum(wide(dy)), out, accumulate, dy.dtype)


# --- batch norm -------------------------------------------------------------------------------------------------------


@_ieee
def batch_norm_statistics(
    x: Array,
    pending_mean: Array | None,
    pending_var: Array | None,
    num_batches: Array | None,
    momentum: float | None,
    eps: float,
) -> tuple[Array, Array]:
    """Gives the mean and the inverse deviation; moves the pending statistics."""
    values = wide(x)
    count = x.size // x.shape[1]
    mean, variance = _moments(values)
    _move_pending(pending_mean, pending_var, num_batches, momentum, mean, variance * (count / (count - 1)))
    return mean.astype(values.dtype), (1.0 / np.sqrt(variance + eps)).astype(values.dtype)


def _moments(values: Array) -> tuple[Array, Array]:
    """The float64 mean and biased variance of each channel."""
    count = values.size // values.shape[1]
    mean = _channel_sum(values) / count
    centred = values - _per_channel(mean.astype(values.dtype), values.ndim)
    # The rounded mean is off by up to half a unit in the last place: the second term takes that out of the variance.
    return mean, _channel_sum(np.square(centred)) / count - np.square(_channel_sum(centred) / count)


def _move_pending(
    pending_mean: Array | None,
    pending_var: Array | None,
    num_batches: Array | None,
    momentum: float | None,
    mean: Array,
    variance: Array,
) -> None:
    if num_batches is not None:
        num_batches += 1
    if pending_mean is None or pending_var is None:
        return
    if momentum is None:
        assert num_batches is not None
        factor = 1.0 / int(num_batches.reshape(-1)[0])
    else:
        factor = momentum
    pending_mean[...] = (1 - factor) * pending_mean + factor * mean
    pending_var[...] = (1 - factor) * pending_var + factor * variance


@_ieee
def batch_norm_apply(
    x: Array, norm: Sequence[Array], residual: Array | None, residual_norm: Sequence[Array] | None, relu: bool
) -> tuple[Array, Array]:
    """Gives y, and where ReLU passes a gradient, NaN included."""
    y = _normalised(x, *norm)
    if residual is not None:
        y += wide(residual) if residual_norm is None else _normalised(residual, *residual_norm)
    passes = ~(y <= 0) if relu else np.ones(y.shape, np.bool_)
    return _like(np.where(passes, y, y.dtype.type(0)), x), passes


def _normalised(x: Array, weight: Array, bias: Array, mean: Array, inverse: Array) -> Array:
    centred = wide(x) - _per_channel(mean, x.ndim)
    return np.asarray(centred * _per_channel(inverse * weight, x.ndim) + _per_channel(bias, x.ndim))


@_ieee
def batch_norm_masked(
    dys: Sequence[Array], x: Array, norm: Sequence[Array] | None, mask: Array | None, adds: bool
) -> Array:
    """The gradient behind ReLU, in the compute dtype: by mask, or by x where norm is given.

    It is rounded to x's dtype where a residual takes it too.
    """
    dz = wide(dys[0])
    for dy in dys[1:]:
        dz = dz + wide(dy)
    if norm is not None:
        mask = ~(_normalised(x, *norm) <= 0)
    if mask is not None:
        dz = np.where(mask, dz, dz.dtype.type(0))
    return wide(dz.astype(x.dtype)) if adds else dz


def batch_norm_residual_gradient(dz: Array, x: Array) -> Array:
    """Gives dz like x."""
    return _like(dz, x)


@_ieee
def batch_norm_gradient_sums(
    dz: Array,
    x: Array,
    mean: Array,
    inverse: Array,
    count: int,
    dweight: Array | None,
    dbias: Array | None,
    accumulate: bool,
) -> tuple[Array, Array, Array]:
    """Gives the means of dz and of dz times x normalised, (2, C), zeros for a count of 0; dweight; dbias."""
    gradient = wide(dz)
    normalized = (wide(x) - _per_channel(mean, x.ndim)) * _per_channel(inverse, x.ndim)
    sums = np.stack([_channel_sum(gradient), _channel_sum(gradient * normalized)])
    means = (sums / count if count else np.zeros_like(sums)).astype(gradient.dtype)
    return (
        means,
        _store(sums[1], dweight, accumulate, gradient.dtype),
        _store(sums[0], dbias, accumulate, gradient.dtype),
    )


@_ieee
def batch_norm_input_gradient(dz: Array, x: Array, weight: Array, mean: Array, inverse: Array, means: Array) -> Array:
    """Gives dx from what batch_norm_gradient_sums gives."""
    normalized = (wide(x) - _per_channel(mean, x.ndim)) * _per_channel(inverse, x.ndim)
    dx = wide(dz) - _per_channel(means[0], x.ndim) - normalized * _per_channel(means[1], x.ndim)
    return _like(dx * _per_channel(weight * inverse, x.ndim), x)


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
    """Gives y, the mean and the inverse deviation; moves the pending statistics."""
    mean, inverse = batch_norm_statistics(x, pending_mean, pending_var, num_batches, momentum, eps)
    return batch_norm_apply(x, (weight, bias, mean, inverse), None, None, False)[0], mean, inverse


def batch_norm_inverse(variance: Array, eps: float) -> Array:
    """Gives 1 / sqrt(variance + eps)."""
    return np.asarray(1 / np.sqrt(variance + variance.dtype.type(eps)))


def batch_norm_inference(
    x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, eps: float
) -> Array:
    """Gives y by the running statistics."""
    norm = (weight, bias, running_mean, batch_norm_inverse(running_var, eps))
    return batch_norm_apply(x, norm, None, None, False)[0]


def batch_norm_backward(
    dy: Array,
    x: Array,
    weight: Array,
    saved_mean: Array,
    saved_inv_variance: Array,
    dweight: Array | None,
    dbias: Array | None,
    accumulate: bool,
) -> tuple[Array, Array, Array]:
    """Gives dx, dweight, dbias of the training pass."""
    count = x.size // x.shape[1]
    means, *gradients = batch_norm_gradient_sums(
        dy, x, saved_mean, saved_inv_variance, count, dweight, dbias, accumulate
    )
    dx = batch_norm_input_gradient(dy, x, weight, saved_mean, saved_inv_variance, means)
    return dx, gradients[0], gradients[1]


def batch_norm_inference_backward(
    dy: Array,
    x: Array,
    weight: Array,
    running_mean: Array,
    running_var: Array,
    eps: float,
    dweight: Array | None,
    dbias: Array | None,
    accumulate: bool,
) -> tuple[Array, Array, Array]:
    """Gives dx, dweight, dbias of the inference pass."""
    inverse = batch_norm_inverse(running_var, eps)
    means, *gradients = batch_norm_gradient_sums(dy, x, running_mean, inverse, 0, dweight, dbias, accumulate)
    dx = batch_norm_input_gradient(dy, x, weight, running_mean, inverse, means)
    return dx, gradients[0], gradients[1]


# --- pooling ----------------------------------------------------------------------------------------------------------


def _windows(a: Array, kernel_size: Pair, stride: Pair, size: Pair) -> list[Array]:
    """For each place in the window, in row-major order, the view of a padded image that all windows have there."""
    views = []
    for i, j in product(range(kernel_size[0]), range(kernel_size[1])):
        rows = slice(i, i + stride[0] * (size[0] - 1) + 1, stride[0])
        columns = slice(j, j + stride[1] * (size[1] - 1) + 1, stride[1])
        views.append(a[:, :, rows, columns])
    return views


def _padded(a: Array, padding: Pair, value: float) -> Array:
    n, c, h, w = a.shape
    shape = (n, c, h + 2 * padding[0], w + 2 * padding[1])
    out = empty(shape, a.dtype, device=CPU, layout=_kept_layout(a))
    out[...] = value
    _inside(out, padding)[...] = a
    return out


def _inside(padded: Array, padding: Pair) -> Array:
    h, w = padded.shape[2:]
    return padded[:, :, padding[0] : h - padding[0], padding[1] : w - padding[1]]


def _pooled(x_size: Sequence[int], kernel_size: Pair, stride: Pair, padding: Pair) -> Pair:
    h, w = ((x_size[i] + 2 * padding[i] - kernel_size[i]) // stride[i] + 1 for i in range(2))
    return h, w


@_ieee
def max_pool_forward(
    x: Array, kernel_size: Pair, stride: Pair, padding: Pair, index_dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Gives y and the place of each maximum in its window."""
    size = _pooled(x.shape[2:], kernel_size, stride, padding)
    views = _windows(_padded(wide(x), padding, -np.inf), kernel_size, stride, size)
    first = [np.maximum(padding[i] - stride[i] * np.arange(size[i]), 0) for i in range(2)]
    best = np.array(views[0], order="K", copy=True)
    indices = empty(best.shape, index_dtype, device=CPU, layout=_kept_layout(x))
    # Where nothing is above minus infinity, the first place inside the image is the one.
    indices[...] = first[0][:, None] * kernel_size[1] + first[1]
    for place, view in enumerate(views):
        larger = (view > best) | np.isnan(view)
        np.copyto(best, view, where=larger)
        np.copyto(indices, place, where=larger, casting="unsafe")
    y = empty(best.shape, x.dtype, device=CPU, layout=_kept_layout(x))
    y[...] = best
    return y, indices


@_ieee
def max_pool_backward(
    dy: Array, indices: Array, x_shape: Sequence[int], kernel_size: Pair, stride: Pair, padding: Pair
) -> Array:
    """The gradient, at the largest values."""
    gradient = wide(dy)
    return _spread(
        [np.where(indices == place, gradient, 0) for place in range(kernel_size[0] * kernel_size[1])],
        dy,
        x_shape,
        kernel_size,
        stride,
        padding,
    )


@_ieee
def batch_norm_relu_max_pool_forward(
    x: Array,
    weight: Array,
    bias: Array,
    mean: Array,
    inverse: Array,
    kernel_size: Pair,
    stride: Pair,
    padding: Pair,
    index_dtype: np.dtype[Any],
) -> tuple[Array, Array, Array]:
    """Gives y, the x of each maximum and its place in its window, of which the last of the dtype is none above zero."""
    scale_ = (inverse * weight).astype(compute_dtype(x.dtype))
    sign = _per_channel(np.where(scale_ < 0, -1, 1).astype(scale_.dtype), x.ndim)
    signed, indices = max_pool_forward(wide(x) * sign, kernel_size, stride, padding, index_dtype)
    largest = signed * sign
    values = (largest - _per_channel(mean, x.ndim)) * _per_channel(scale_, x.ndim) + _per_channel(bias, x.ndim)
    y = _like(values, x)
    off = wide(y) <= 0
    y[off] = 0
    indices[off] = index_dtype.type(255) if index_dtype == np.uint8 else -1
    return y, _like(largest, x), indices


@_ieee
def batch_norm_relu_max_pool_backward(
    dy: Array,
    x: Array,
    indices: Array,
    weight: Array,
    mean: Array,
    inverse: Array,
    kernel_size: Pair,
    stride: Pair,
    padding: Pair,
    dweight: Array | None,
    dbias: Array | None,
    accumulate: bool,
) -> tuple[Array, Array, Array]:
    """Gives dx, dweight and dbias."""
    gradient = max_pool_backward(wide(dy), indices, x.shape, kernel_size, stride, padding)
    return batch_norm_backward(gradient, x, weight, mean, inverse, dweight, dbias, accumulate)


@_ieee
def avg_pool_forward(x: Array, kernel_size: Pair, stride: Pair, padding: Pair) -> Array:
    """The mean of each window, padding included."""
    size = _pooled(x.shape[2:], kernel_size, stride, padding)
    views = _windows(_padded(wide(x), padding, 0.0), kernel_size, stride, size)
    y = empty((*x.shape[:2], *size), x.dtype, device=CPU, layout=_kept_layout(x))
    y[...] = sum(views[1:], start=views[0]) / len(views)
    return y


@_ieee
def avg_pool_backward(dy: Array, x_shape: Sequence[int], kernel_size: Pair, stride: Pair, padding: Pair) -> Array:
    """The gradient of the means."""
    places = kernel_size[0] * kernel_size[1]
    return _spread([wide(dy) / places] * places, dy, x_shape, kernel_size, stride, padding)


def _spread(
    parts: Sequence[Array], dy: Array, x_shape: Sequence[int], kernel_size: Pair, stride: Pair, padding: Pair
) -> Array:
    """Adds to each image element what the windows that hold it have for it, one part a place in the window."""
    n, c, h, w = x_shape
    layout = _kept_layout(dy)
    shape = (n, c, h + 2 * padding[0], w + 2 * padding[1])
    padded = empty(shape, parts[0].dtype, device=CPU, layout=layout)
    padded[...] = 0
    size = (dy.shape[2], dy.shape[3])
    for view, part in zip(_windows(padded, kernel_size, stride, size), parts, strict=True):
        view += part
    dx = empty(x_shape, dy.dtype, device=CPU, layout=layout)
    dx[...] = _inside(padded, padding)
    return dx


@_ieee
def global_avg_pool_forward(x: Array) -> Array:
    """The mean over space."""
    axes = tuple(range(2, x.ndim))
    return np.asarray(wide(x).mean(axis=axes, dtype=np.float64)).astype(x.dtype)


@_ieee
def global_avg_pool_backward(dy: Array, x_shape: Sequence[int], layout: str) -> Array:
    """The gradient spread over space."""
    dx = empty(x_shape, dy.dtype, device=CPU, layout=layout)
    size = math.prod(x_shape[2:])
    dx[...] = (wide(dy) / compute_dtype(dy.dtype).type(size)).reshape(*dy.shape, *[1] * (len(x_shape) - 2))
    return dx


# --- loss -------------------------------------------------------------------------------------------------------------


@_ieee
def cross_entropy_forward(
    logits: Array, target: Array, label_smoothing: float, ignore_index: int
) -> tuple[Array, Array, Array]:
    """The mean loss, the probabilities and the number of rows that count, int64 (1,)."""
    values = wide(logits)
    classes = logits.shape[1]
    valid = target != ignore_index
    count = np.array([valid.sum()], np.int64)
    shifted = values - values.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    total = exponentials.sum(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(total)
    picked = np.where(valid, target, 0)
    losses = -(1 - label_smoothing) * log_probabilities[np.arange(len(target)), picked].astype(np.float64)
    if label_smoothing > 0:
        losses -= label_smoothing / classes * log_probabilities.sum(axis=1, dtype=np.float64)
    loss = np.divide(losses[valid].sum(), count[0], dtype=np.float64)
    probabilities = exponentials / total
    return np.asarray(loss, values.dtype), probabilities, count


@_ieee
def cross_entropy_backward(
    dloss: Array,
    probabilities: Array,
    target: Array,
    count: Array,
    label_smoothing: float,
    ignore_index: int,
    dtype: np.dtype[Any],
) -> Array:
    """The gradient of the logits."""
    valid = target != ignore_index
    gradient = probabilities - label_smoothing / probabilities.shape[1]
    gradient[np.arange(len(target)), np.where(valid, target, 0)] -= 1 - label_smoothing
    gradient *= dloss / probabilities.dtype.type(count[0])
    gradient[~valid] = 0
    return gradient.astype(dtype)


@_ieee
def top1_count(logits: Array, target: Array) -> Array:
    """Rows whose first largest logit is at the target."""
    return np.asarray((wide(logits).argmax(axis=1) == target).sum(), np.int64)


@_ieee
def correct_counts(logits: Array, target: Array, ignore_index: int) -> Array:
    """Of the rows that count those whose target is the first largest logit, and is among the five first, int64 (2,)."""
    values = wide(logits)
    valid = (target != ignore_index) & (target >= 0) & (target < logits.shape[1])
    picked = np.where(valid, target, 0)[:, None]
    chosen = np.take_along_axis(values, picked, axis=1)
    nan, chosen_nan = np.isnan(values), np.isnan(chosen)
    earlier = np.arange(logits.shape[1]) < picked
    larger = (values > chosen) | ((values == chosen) & earlier)
    before = np.where(nan | chosen_nan, nan & (~chosen_nan | earlier), larger)
    ranks = before.sum(axis=1)
    return np.array([(valid & (ranks < most)).sum() for most in (1, 5)], np.int64)


# --- gradients, optimizer, scaler -------------------------------------------------------------------------------------


@_ieee
def find_invalid(
    flat: Array, offsets: Array, flags: Array, sums: Array | None = None, inv_scale: Array | None = None
) -> None:
    """Sets [any, first invalid array, one flag an array], and the sum of squares of each array."""
    segments = len(offsets) - 1
    flags[0] = 0
    flags[1] = segments
    flags[2:] = 0
    start, stop = int(offsets[0]), int(offsets[-1])
    values = flat[start:stop]
    factor = compute_dtype(flat.dtype).type(_number(inv_scale, 1.0))
    bad = np.flatnonzero(~np.isfinite(values * factor if factor > 1 else values)) + start
    if bad.size > 0:
        hit = np.unique(np.searchsorted(offsets, bad, side="right") - 1)
        flags[0] = 1
        flags[1] = hit[0]
        flags[2 + hit] = 1
    if sums is not None:
        # Array by array: the temporaries stay small.
        for segment in range(segments):
            part = flat[int(offsets[segment]) : int(offsets[segment + 1])]
            sums[segment] = np.square(part, dtype=np.float64).sum()


@_ieee
def find_invalid_list(arrays: Sequence[Array | None], flags: Array) -> None:
    """Sets [any, first invalid array, one flag an array] of separate arrays; None is valid."""
    bad = np.array([a is not None and not np.isfinite(a).all() for a in arrays], bool)
    flags[0] = bad.any()
    flags[1] = bad.argmax() if bad.any() else len(bad)
    flags[2:] = bad


def _skipped(flags: Array | None) -> bool:
    return flags is not None and bool(flags.reshape(-1)[0] != 0)


def _number(a: Array | None, default: float) -> float:
    """The one element of a float64 array."""
    return default if a is None else float(a.reshape(-1)[0])


@_ieee
def sgd_update(
    master: Array,
    data: Array,
    grad: Array,
    velocity: Array | None,
    offsets: Array,
    decay: Array,
    lr: Array,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    steps: Array | None,
    inv_scale: Array | None,
    clip: Array | None,
    flags: Array | None,
) -> None:
    """One step of SGD over a flat storage."""
    if _skipped(flags):
        return
    number = master.dtype.type
    rate = number(_number(lr, 0.0))
    unscale = number(_number(inv_scale, 1.0) * _number(clip, 1.0))
    first = steps is not None and steps.reshape(-1)[0] == 0
    share = number(1.0 if first else 1.0 - dampening)
    # Segment by segment: the temporaries stay small.
    for segment in range(len(decay)):
        part = slice(int(offsets[segment]), int(offsets[segment + 1]))
        step = grad[part].astype(master.dtype)
        step *= unscale
        factor = number(weight_decay) * number(decay[segment])
        if factor != 0:
            step += factor * master[part]
        if velocity is not None:
            velocity[part] *= number(momentum)
            velocity[part] += share * step
            step = step + number(momentum) * velocity[part] if nesterov else velocity[part]
        master[part] -= rate * step
        if data is not master:
            data[part] = master[part]


@_ieee
def adam_update(
    master: Array,
    data: Array,
    grad: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    offsets: Array,
    decay: Array,
    lr: Array,
    steps: Array,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    inv_scale: Array | None,
    clip: Array | None,
    flags: Array | None,
) -> None:
    """One step of Adam or, decoupled, AdamW over a flat storage."""
    if _skipped(flags):
        return
    number = master.dtype.type
    rate = _number(lr, 0.0)
    step = int(steps.reshape(-1)[0]) + 1
    size = number(rate / (1.0 - betas[0] ** step))
    inverse_root = number(1.0 / math.sqrt(1.0 - betas[1] ** step))
    weight = number(rate * weight_decay if decoupled else weight_decay)
    unscale = number(_number(inv_scale, 1.0) * _number(clip, 1.0))
    rest = number(1.0 - betas[0])
    for segment in range(len(decay)):
        part = slice(int(offsets[segment]), int(offsets[segment + 1]))
        gradient = grad[part].astype(master.dtype)
        gradient *= unscale
        factor = weight * number(decay[segment])
        if factor != 0 and decoupled:
            master[part] -= factor * master[part]
        elif factor != 0:
            gradient += factor * master[part]
        distance = gradient - exp_avg[part]
        # As PyTorch's lerp: exact at both ends.
        exp_avg[part] = exp_avg[part] + rest * distance if rest < 0.5 else gradient - distance * (number(1) - rest)
        exp_avg_sq[part] *= number(betas[1])
        exp_avg_sq[part] += number(1.0 - betas[1]) * gradient * gradient
        master[part] -= size * (exp_avg[part] / (np.sqrt(exp_avg_sq[part]) * inverse_root + number(eps)))
        if data is not master:
            data[part] = master[part]


def advance_steps(steps: Array, flags: Array | None) -> None:
    """Counts a valid step."""
    if not _skipped(flags):
        steps += 1


@_ieee
def clip_factor(sums: Array, inv_scale: Array | None, max_norm: float, flags: Array, out: Array, limit: float) -> None:
    """The factor that brings the norm of all gradients down to max_norm; a norm above limit is invalid."""
    norm = math.sqrt(total) if (total := float(np.sum(sums))) >= 0 else math.nan
    norm *= _number(inv_scale, 1.0)
    invalid = math.isnan(norm) or norm > limit
    if invalid:
        flags[0] = 1
    out[...] = 1.0 if invalid or norm <= max_norm else max_norm / norm


@_ieee
def commit_statistics(running: Array, pending: Array, flags: Array | None) -> None:
    """Commits the pending statistics, or takes them back."""
    if _skipped(flags):
        pending[...] = running
    else:
        running[...] = pending


@_ieee
def scaler_update(
    scale_: Array,
    inv_scale: Array,
    counters: Array,
    flags: Array,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    steps: Array | None = None,
) -> None:
    """The loss scaler's rule."""
    current = float(scale_.reshape(()))
    if flags.reshape(-1)[0] != 0:
        smaller = current * backoff_factor
        if smaller >= min_scale:
            current = smaller
        counters[0] = 0
        counters[1] += 1
        counters[2] += 1
    else:
        counters[0] += 1
        counters[2] = 0
        if counters[0] >= growth_interval:
            larger = current * growth_factor
            if larger <= max_scale:
                current = larger
            counters[0] = 0
    scale_[...] = current
    inv_scale[...] = 1.0 / current
    if steps is not None:
        steps += 1


def _kept_layout(a: Array) -> str:
    """The layout of an op's result: the argument's own, nchw for a strided one."""
    return "nhwc" if memory_layout(a) == "nhwc" else "nchw"


def _like(values: Array, a: Array) -> Array:
    """The values in the dtype and layout of an array; themselves when they already are."""
    if values.dtype == a.dtype and memory_layout(values) == _kept_layout(a):
        return values
    out = empty(values.shape, a.dtype, device=CPU, layout=_kept_layout(a))
    out[...] = values
    return out


# --- images -----------------------------------------------------------------------------------------------------------

WHITE = np.float32(255)
"""The highest level of an image."""

GREY = (0.2989, 0.587, 0.114)
"""What red, green and blue weigh in the grey level, as in torchvision."""


def augment(
    images: Sequence[Array], parameters: Array, mean: Sequence[float], std: Sequence[float], out: Array
) -> None:
    """Crops, resamples, flips, jitters and normalizes images of different sizes.

    See `flcuda.ops.augment` for the columns of parameters. The colours are jittered in the order brightness, contrast,
    saturation, hue; nothing is rounded before the end.

    Args:
        images: uint8 (h, w, c) each, of one c.
        parameters: float32 (n, 9).
        mean: one number a channel, in units of the full scale.
        std: likewise.
        out: (n, channels, H, W), written; channels from c on become 0.
    """
    scale = (1.0 / (255.0 * np.array(std, np.float64))).astype(np.float32)
    shift = (-np.array(mean, np.float64) / np.array(std, np.float64)).astype(np.float32)
    for image, values, result in zip(images, parameters.tolist(), out, strict=True):
        top, left, height, width, flip, brightness, contrast, saturation, hue = values
        levels = resample(image, (top, left, height, width), result.shape[1:])
        levels = jitter(levels, brightness, contrast, saturation, hue)
        if flip:
            levels = levels[:, ::-1]
        channels = image.shape[2]
        result[:channels] = (levels * scale + shift).transpose(2, 0, 1)
        result[channels:] = 0


def resample(image: Array, box: tuple[float, float, float, float], size: Sequence[int]) -> Array:
    """Resamples a part of an image by a triangle as wide as a pixel of the coarser of both grids.

    Pixels outside of the box take part where the triangle reaches them, pixels outside of the image do not. It is what
    Pillow's `resize(size, BILINEAR, box)` does, which rounds to levels after each of the two directions.

    Args:
        image: uint8 (h, w, c).
        box: top, left, height and width of the part, in pixels.
        size: height and width of the result.

    Returns:
        float32 (H, W, c), levels from 0 to 255.
    """
    top, left, height, width = box
    first_row, rows = _triangles(top, height, size[0], image.shape[0])
    first_column, columns = _triangles(left, width, size[1], image.shape[1])
    part = image[first_row : first_row + rows.shape[1], first_column : first_column + columns.shape[1]]
    across = part.shape[1] * part.shape[2]
    lines = rows @ part.reshape(len(part), across).astype(np.float32)
    levels: Array = columns @ lines.reshape(len(rows), part.shape[1], part.shape[2])
    return levels


def _triangles(start: float, length: float, out_size: int, size: int) -> tuple[int, Array]:
    """The first element of the input that counts, and float32 (out_size, inputs) weights, each row's sum 1."""
    scale = length / out_size
    support = max(scale, 1.0)
    centres = start + (np.arange(out_size) + 0.5) * scale
    first = int(np.clip(np.floor(centres[0] - support + 0.5), 0, size - 1))
    end = int(np.clip(np.floor(centres[-1] + support + 0.5), first + 1, size))
    distances = (np.arange(first, end) + 0.5 - centres[:, None]) / support
    weights = np.maximum(1.0 - np.abs(distances), 0.0)
    return first, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def jitter(levels: Array, brightness: float, contrast: float, saturation: float, hue: float) -> Array:
    """Changes the colours of an image, in this order, each as torchvision's function of a float image does.

    Args:
        levels: float32 (H, W, c), from 0 to 255; c = 1 is grey, which has no saturation and no hue.
        brightness: factor of the levels; 1 changes nothing.
        contrast: factor of the distances from the image's mean grey level; 1 changes nothing.
        saturation: factor of the distances from each pixel's grey level; 1 changes nothing.
        hue: added to the hue, in turns, from -0.5 to 0.5; 0 changes nothing.

    Returns:
        The same shape and dtype; the array itself when nothing changes.
    """
    if brightness != 1:
        levels = np.clip(levels * np.float32(brightness), 0, WHITE)
    if contrast != 1:
        mean = _grey(levels).mean(dtype=np.float64)
        levels = _blended(levels, np.float32(mean), contrast)
    if levels.shape[2] == 3 and saturation != 1:
        levels = _blended(levels, _grey(levels), saturation)
    if levels.shape[2] == 3 and hue != 0:
        levels = _hue_shifted(levels, hue)
    return levels


def _grey(levels: Array) -> Array:
    """The grey level of each pixel, (H, W, 1)."""
    return levels if levels.shape[2] == 1 else levels @ np.array(GREY, np.float32)[:, None]


def _blended(levels: Array, other: Array | np.float32, factor: float) -> Array:
    share = np.float32(factor)
    return np.clip(share * levels + (np.float32(1) - share) * other, 0, WHITE)


def _hue_shifted(levels: Array, shift: float) -> Array:
    """By way of HSV."""
    red, green, blue = np.moveaxis(levels, 2, 0)
    most = levels.max(axis=2)
    spread = most - levels.min(axis=2)
    coloured = spread > 0
    divisor = np.where(coloured, spread, np.float32(1))
    saturation = spread / np.where(coloured, most, np.float32(1))
    from_red, from_green, from_blue = (most - red) / divisor, (most - green) / divisor, (most - blue) / divisor
    sextant = np.where(
        most == red,
        from_blue - from_green,
        np.where(most == green, 2 + from_red - from_blue, 4 + from_green - from_red),
    )
    hue = sextant / np.float32(6) + np.float32(shift)
    hue = (hue - np.floor(hue)) * np.float32(6)
    sector = np.floor(hue)
    part = hue - sector
    low = most * (1 - saturation)
    falling = most * (1 - saturation * part)
    rising = most * (1 - saturation * (1 - part))
    sector = sector.astype(np.int64) % 6
    colours = np.stack(
        [
            np.choose(sector, [most, falling, low, low, rising, most]),
            np.choose(sector, [rising, most, most, falling, low, low]),
            np.choose(sector, [low, low, rising, most, most, falling]),
        ],
        axis=2,
    )
    return np.where(coloured[:, :, None], np.clip(colours, 0, WHITE), levels)
