"""Every operation of a cuDNN graph in NumPy: what the CPU device runs, and in float64 the oracle of the tests.

Functions are named as the methods of `flcuda.cudnn.graph.Graph` and take arrays where those take tensors. They compute
in the dtype of their arguments and round nothing; truth values are 0 and 1. `evaluate` walks a list of operations.

`pointwise` takes CuPy arrays as well, and launches nothing but CuPy's element-wise kernels then.

The resampling formulas, the order of an index (row-major in the window) and the unbiased running variance are taken
from cuDNN's documentation of the operations; ties of a maximum go to the first element.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

Array = Any

_ieee = np.errstate(all="ignore")

# --- pointwise --------------------------------------------------------------------------------------------------------

_ERF_TERMS = 130
_ERF_LIMIT = 6.0  # from here on erf is 1 in float64


def _erf(x: Array, xp: ModuleType) -> Array:
    """The error function, by 2 / sqrt(pi) * exp(-x^2) * sum of 2^n x^(2n+1) / (2n+1)!!: terms of one sign."""
    bounded = xp.clip(x, -_ERF_LIMIT, _ERF_LIMIT)
    square = bounded * bounded
    term = bounded
    total = bounded
    for n in range(1, _ERF_TERMS):
        term = term * (square * (2.0 / (2 * n + 1)))
        total = total + term
    return xp.clip(total * xp.exp(-square) * (2.0 / math.sqrt(math.pi)), -1.0, 1.0)


def _sigmoid(x: Array, xp: ModuleType) -> Array:
    # By tanh: nothing overflows.
    return 0.5 * (1.0 + xp.tanh(0.5 * x))


def _normal_cdf(x: Array, xp: ModuleType) -> Array:
    return 0.5 * (1.0 + _erf(x * math.sqrt(0.5), xp))


def _normal_density(x: Array, xp: ModuleType) -> Array:
    return xp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


_GELU_FACTOR = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715


def _relu_forward(x: Array, xp: ModuleType, lower: float, upper: float, slope: float) -> Array:
    below = lower + slope * (x - lower) if slope else lower
    return xp.where(xp.isnan(x), x, xp.where(x > lower, xp.minimum(x, upper), below))


def _relu_backward(dy: Array, x: Array, xp: ModuleType, lower: float, upper: float, slope: float) -> Array:
    below = slope * dy if slope else xp.zeros_like(dy)
    return xp.where(x > lower, xp.where(x < upper, dy, 0.0), below)


_UNARY: dict[str, Callable[[Array, ModuleType], Array]] = {
    "abs": lambda x, xp: xp.abs(x),
    "ceil": lambda x, xp: xp.ceil(x),
    "cos": lambda x, xp: xp.cos(x),
    "exp": lambda x, xp: xp.exp(x),
    "floor": lambda x, xp: xp.floor(x),
    "log": lambda x, xp: xp.log(x),
    "neg": lambda x, _: -x,
    "rsqrt": lambda x, xp: 1.0 / xp.sqrt(x),
    "sin": lambda x, xp: xp.sin(x),
    "sqrt": lambda x, xp: xp.sqrt(x),
    "tan": lambda x, xp: xp.tan(x),
    "erf": _erf,
    "identity": lambda x, _: x,
    "reciprocal": lambda x, _: 1.0 / x,
    "tanh_fwd": lambda x, xp: xp.tanh(x),
    "sigmoid_fwd": _sigmoid,
    "gelu_fwd": lambda x, xp: x * _normal_cdf(x, xp),
    "gelu_approx_tanh_fwd": lambda x, xp: 0.5 * x * (1.0 + xp.tanh(_GELU_FACTOR * (x + _GELU_CUBIC * x * x * x))),
    "logical_not": lambda x, _: x == 0,
}


def _gelu_approximate_slope(x: Array, xp: ModuleType) -> Array:
    t = xp.tanh(_GELU_FACTOR * (x + _GELU_CUBIC * x * x * x))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * _GELU_FACTOR * (1.0 + 3 * _GELU_CUBIC * x * x)


_BINARY: dict[str, Callable[[Array, Array, ModuleType], Array]] = {
    "add": lambda x, b, _: x + b,
    "add_square": lambda x, b, _: x + b * b,
    "div": lambda x, b, _: x / b,
    "max": lambda x, b, xp: xp.maximum(x, b),
    "min": lambda x, b, xp: xp.minimum(x, b),
    "mod": lambda x, b, xp: xp.fmod(x, b),
    "mul": lambda x, b, _: x * b,
    "pow": lambda x, b, xp: xp.power(x, b),
    "sub": lambda x, b, _: x - b,
    "atan2": lambda x, b, xp: xp.arctan2(x, b),
    "floor_mod": lambda x, b, xp: x - xp.floor(x / b) * b,
    "cmp_eq": lambda x, b, _: x == b,
    "cmp_neq": lambda x, b, _: x != b,
    "cmp_gt": lambda x, b, _: x > b,
    "cmp_ge": lambda x, b, _: x >= b,
    "cmp_lt": lambda x, b, _: x < b,
    "cmp_le": lambda x, b, _: x <= b,
    "logical_and": lambda x, b, _: (x != 0) & (b != 0),
    "logical_or": lambda x, b, _: (x != 0) | (b != 0),
    # The first argument is dy, the second the forward operation's input.
    "tanh_bwd": lambda dy, x, xp: dy * (1.0 - xp.tanh(x) ** 2),
    "sigmoid_bwd": lambda dy, x, xp: dy * _sigmoid(x, xp) * _sigmoid(-x, xp),
    "gelu_bwd": lambda dy, x, xp: dy * (_normal_cdf(x, xp) + x * _normal_density(x, xp)),
    "gelu_approx_tanh_bwd": lambda dy, x, xp: dy * _gelu_approximate_slope(x, xp),
}


@_ieee
def pointwise(
    mode: str,
    x: Array,
    b: Array = None,
    t: Array = None,
    *,
    index: Array = None,
    alpha1: float = 1.0,
    alpha2: float = 1.0,
    xp: ModuleType = np,
    lower_clip: float = 0.0,
    upper_clip: float | None = None,
    lower_slope: float = 0.0,
    elu_alpha: float = 1.0,
    softplus_beta: float = 1.0,
    swish_beta: float = 1.0,
) -> Array:
    """Computes op(alpha1 * x), op(alpha1 * x, alpha2 * b) or t ? x : b, element by element.

    Args:
        mode: a word of `flcuda.cudnn.graph.POINTWISE_MODES`.
        x: the first input, floating-point; dy for a backward mode.
        b: the second input; the forward operation's input for a backward mode.
        t: the condition of "binary_select": not zero is true.
        index: for "gen_index": each element's place along the axis.
        alpha1: factor of x.
        alpha2: factor of b.
        xp: numpy or cupy, whose arrays the inputs are.
        lower_clip: of ReLU.
        upper_clip: of ReLU.
        lower_slope: of ReLU.
        elu_alpha: of ELU.
        softplus_beta: of softplus.
        swish_beta: of swish.

    Returns:
        The result, of the broadcast shape and the dtype of x; truth values are 0 and 1.

    Raises:
        ValueError: there is no such mode.
    """
    if alpha1 != 1:
        x = alpha1 * x
    if b is not None and alpha2 != 1:
        b = alpha2 * b
    upper = math.inf if upper_clip is None else upper_clip
    if mode in _UNARY:
        result = _UNARY[mode](x, xp)
    elif mode in _BINARY:
        result = _BINARY[mode](x, b, xp)
    elif mode == "relu_fwd":
        result = _relu_forward(x, xp, lower_clip, upper, lower_slope)
    elif mode == "relu_bwd":
        result = _relu_backward(x, b, xp, lower_clip, upper, lower_slope)
    elif mode == "elu_fwd":
        result = xp.where(x > 0, x, elu_alpha * xp.expm1(xp.minimum(x, 0.0)))
    elif mode == "elu_bwd":
        result = x * xp.where(b > 0, 1.0, elu_alpha * xp.exp(xp.minimum(b, 0.0)))
    elif mode == "softplus_fwd":
        result = xp.logaddexp(xp.zeros_like(x), softplus_beta * x) / softplus_beta
    elif mode == "softplus_bwd":
        result = x * _sigmoid(softplus_beta * b, xp)
    elif mode == "swish_fwd":
        result = x * _sigmoid(swish_beta * x, xp)
    elif mode == "swish_bwd":
        s = _sigmoid(swish_beta * b, xp)
        result = x * (s + swish_beta * b * s * (1.0 - s))
    elif mode == "gen_index":
        result = index + xp.zeros_like(x)
    elif mode == "binary_select":
        result = xp.where(t != 0, x, b)
    else:
        raise ValueError(f"mode: {mode!r} is no pointwise mode")
    return result.astype(x.dtype, copy=False)


# --- convolutions -----------------------------------------------------------------------------------------------------


class Geometry(NamedTuple):
    """A convolution's or a resampling's numbers, one a spatial dimension."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    stride: tuple[Any, ...]
    dilation: tuple[int, ...]

    @classmethod
    def read(cls, rank: int, padding: Any = 0, stride: Any = 1, dilation: Any = 1) -> "Geometry":
        """Reads arguments as the graph's builder takes them: one number, one a dimension, padding also in pairs."""

        def each(value: Any) -> tuple[Any, ...]:
            return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,) * rank

        pairs = [each_pad if isinstance(each_pad, Iterable) else (each_pad, each_pad) for each_pad in each(padding)]
        before, after = zip(*pairs, strict=True) if pairs else ((), ())
        return cls(tuple(before), tuple(after), each(stride), each(dilation))

    def spatial(self, sizes: Sequence[int], window: Sequence[Any]) -> tuple[int, ...]:
        """The output's spatial sizes."""
        return tuple(
            math.floor(Fraction(size + a + b - (r - 1) * d - 1) / Fraction(s)) + 1
            for size, r, a, b, s, d in zip(
                sizes, window, self.before, self.after, self.stride, self.dilation, strict=True
            )
        )

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the padded x."""
        sizes = (size + a + b for size, a, b in zip(shape[2:], self.before, self.after, strict=True))
        return (*shape[:2], *sizes)

    def inside(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Where x lies in the padded x."""
        return (slice(None), slice(None), *(slice(a, a + s) for a, s in zip(self.before, shape[2:], strict=True)))

    def read_by(self, tap: Sequence[int], positions: Sequence[int]) -> tuple[slice, ...]:
        """What a tap reads of the padded x, at all positions."""
        return (
            slice(None),
            slice(None),
            *(
                slice(t * d, t * d + (o - 1) * s + 1, s)
                for t, d, o, s in zip(tap, self.dilation, positions, self.stride, strict=True)
            ),
        )


def _grouped(a: Array, groups: int) -> Array:
    """(N, G * C, *spatial) as (N, G, C, positions)."""
    return a.reshape(a.shape[0], groups, a.shape[1] // groups, -1)


def _padded(x: Array, geometry: Geometry, value: float = 0.0) -> Array:
    padded = np.full(geometry.padded(x.shape), value, x.dtype)
    padded[geometry.inside(x.shape)] = x
    return padded


@_ieee
def convolution_forward(
    x: Array, w: Array, *, padding: Any = 0, stride: Any = 1, dilation: Any = 1, alpha: float = 1.0
) -> Array:
    """Computes alpha * conv(x, w), a cross-correlation: (N, K, *spatial).

    Args:
        x: (N, C, *spatial).
        w: (K, C / groups, *window).
        padding: as the graph's builder takes it.
        stride: likewise.
        dilation: likewise.
        alpha: factor of the result.

    Returns:
        The result in the dtype of x.
    """
    geometry = Geometry.read(x.ndim - 2, padding, stride, dilation)
    groups = x.shape[1] // w.shape[1]
    positions = geometry.spatial(x.shape[2:], w.shape[2:])
    image = _padded(x, geometry)
    filters = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    y = np.zeros((x.shape[0], groups, filters.shape[1], math.prod(positions)), x.dtype)
    for tap in np.ndindex(*w.shape[2:]):
        y += np.matmul(filters[(..., *tap)], _grouped(image[geometry.read_by(tap, positions)], groups))
    return alpha * y.reshape(x.shape[0], w.shape[0], *positions)


@_ieee
def convolution_backward_data(
    dy: Array,
    w: Array,
    x_shape: Sequence[int],
    *,
    padding: Any = 0,
    stride: Any = 1,
    dilation: Any = 1,
    alpha: float = 1.0,
) -> Array:
    """Computes alpha times the gradient of a convolution with respect to x.

    Args:
        dy: (N, K, *spatial).
        w: (K, C / groups, *window).
        x_shape: the result's shape.
        padding: of the forward convolution.
        stride: likewise.
        dilation: likewise.
        alpha: factor of the result.

    Returns:
        The result in the dtype of dy.
    """
    geometry = Geometry.read(dy.ndim - 2, padding, stride, dilation)
    groups = x_shape[1] // w.shape[1]
    filters = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    image = np.zeros(geometry.padded(x_shape), dy.dtype)
    gradient = _grouped(dy, groups)
    for tap in np.ndindex(*w.shape[2:]):
        part = np.matmul(filters[(..., *tap)].swapaxes(1, 2), gradient)
        target = image[geometry.read_by(tap, dy.shape[2:])]
        target += part.reshape(target.shape)
    return alpha * image[geometry.inside(x_shape)]


@_ieee
def convolution_backward_filter(
    x: Array,
    dy: Array,
    w_shape: Sequence[int],
    *,
    padding: Any = 0,
    stride: Any = 1,
    dilation: Any = 1,
    alpha: float = 1.0,
) -> Array:
    """Computes alpha times the gradient of a convolution with respect to w.

    Args:
        x: (N, C, *spatial).
        dy: (N, K, *spatial).
        w_shape: the result's shape.
        padding: of the forward convolution.
        stride: likewise.
        dilation: likewise.
        alpha: factor of the result.

    Returns:
        The result in the dtype of x.
    """
    geometry = Geometry.read(x.ndim - 2, padding, stride, dilation)
    groups = x.shape[1] // w_shape[1]
    image = _padded(x, geometry)
    gradient = _grouped(dy, groups)
    dw = np.zeros(tuple(w_shape), x.dtype)
    for tap in np.ndindex(*w_shape[2:]):
        read = _grouped(image[geometry.read_by(tap, dy.shape[2:])], groups)
        product_ = np.matmul(gradient, read.swapaxes(2, 3)).sum(axis=0)
        dw[(slice(None), slice(None), *tap)] = product_.reshape(w_shape[:2])
    return alpha * dw


# --- statistics and norms ---------------------------------------------------------------------------------------------


def statistics_axes(mode: str, x_shape: Sequence[int], scale_shape: Sequence[int]) -> tuple[int, ...]:
    """Gives the axes over which a norm takes its statistics.

    Args:
        mode: "batch", "instance", "layer" or "rms".
        x_shape: (N, C, *spatial).
        scale_shape: of a layer or rms norm: where it is not 1, statistics are over the dimension.

    Returns:
        The axes.
    """
    if mode == "batch":
        return (0, *range(2, len(x_shape)))
    if mode == "instance":
        return tuple(range(2, len(x_shape)))
    return tuple(axis for axis, size in enumerate(scale_shape) if size != 1)


def _mean(a: Array, axes: tuple[int, ...]) -> Array:
    return a.mean(axis=axes, keepdims=True)


def generate_statistics(x: Array) -> tuple[Array, Array]:
    """Computes the sums of x and of its squares over all but the channels, each (1, C, 1, ...)."""
    axes = (0, *range(2, x.ndim))
    return x.sum(axis=axes, keepdims=True), (x * x).sum(axis=axes, keepdims=True)


@_ieee
def batch_norm_finalize(
    total: Array,
    square_sum: Array,
    scale: Array,
    bias: Array,
    *,
    count: float,
    epsilon: float = 1e-5,
    momentum: float = 0.1,
    running_mean: Array | None = None,
    running_variance: Array | None = None,
) -> tuple[Array | None, ...]:
    """Makes a batch norm's factors out of sums.

    Args:
        total: the sum, (1, C, 1, ...).
        square_sum: the sum of the squares.
        scale: of the same shape.
        bias: of the same shape.
        count: how many elements a channel were summed.
        epsilon: added to the variance.
        momentum: the weight of this batch in the running statistics.
        running_mean: or None.
        running_variance: or None.

    Returns:
        (equivalent_scale, equivalent_bias, mean, inv_std, running_mean, running_variance); the last two may be None.
    """
    mean = total / count
    variance = square_sum / count - mean * mean
    inv_std = 1.0 / np.sqrt(variance + epsilon)
    factor = scale * inv_std
    running = _running(mean, variance, count, momentum, running_mean, running_variance)
    return factor, bias - mean * factor, mean, inv_std, *running


def _running(
    mean: Array, variance: Array, count: float, momentum: float, old_mean: Array | None, old_variance: Array | None
) -> tuple[Array | None, Array | None]:
    if old_mean is None or old_variance is None:
        return None, None
    unbiased = variance * (count / (count - 1))
    return (1 - momentum) * old_mean + momentum * mean, (1 - momentum) * old_variance + momentum * unbiased


@_ieee
def norm_forward(
    mode: str,
    x: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    training: bool = True,
    epsilon: float = 1e-5,
    momentum: float = 0.1,
    mean: Array | None = None,
    inv_variance: Array | None = None,
    running_mean: Array | None = None,
    running_variance: Array | None = None,
) -> tuple[Array | None, ...]:
    """Computes a normalization.

    Args:
        mode: "batch", "instance", "layer" or "rms".
        x: (N, C, *spatial).
        scale: as for the graph's builder.
        bias: of its shape, or None for rms.
        training: whether statistics are computed.
        epsilon: added to the variance.
        momentum: the weight of this batch in the running statistics.
        mean: given for an inference.
        inv_variance: given for an inference.
        running_mean: or None.
        running_variance: or None.

    Returns:
        (y, mean, inv_variance, running_mean, running_variance); None where there is no such output.
    """
    axes = statistics_axes(mode, x.shape, scale.shape)
    running: tuple[Array | None, Array | None] = (None, None)
    if training:
        mean = _mean(x, axes) if mode != "rms" else None
        centred = x if mean is None else x - mean
        variance = _mean(centred * centred, axes)
        inv_variance = 1.0 / np.sqrt(variance + epsilon)
        count = math.prod(x.shape[axis] for axis in axes)
        running = _running(mean, variance, count, momentum, running_mean, running_variance)
    assert inv_variance is not None
    y = (x if mean is None else x - mean) * inv_variance * scale
    if bias is not None:
        y = y + bias
    return (y, mean, inv_variance, *running) if training else (y, None, None, None, None)


@_ieee
def norm_backward(
    mode: str,
    dy: Array,
    x: Array,
    scale: Array,
    *,
    mean: Array | None = None,
    inv_variance: Array | None = None,
    epsilon: float | None = None,
    bias: bool = True,
) -> tuple[Array | None, ...]:
    """Computes the gradients of a normalization in training.

    Args:
        mode: as in `norm_forward`.
        dy: the gradient of y.
        x: the forward input.
        scale: as in `norm_forward`.
        mean: the forward pass's; computed when it is None.
        inv_variance: the forward pass's; computed with epsilon when it is None.
        epsilon: as in `norm_forward`.
        bias: whether there was a bias.

    Returns:
        (dx, dscale, dbias); dbias may be None.
    """
    axes = statistics_axes(mode, x.shape, scale.shape)
    if inv_variance is None:
        assert epsilon is not None
        mean = _mean(x, axes) if mode != "rms" else None
        centred = x if mean is None else x - mean
        inv_variance = 1.0 / np.sqrt(_mean(centred * centred, axes) + epsilon)
    unit = (x if mean is None else x - mean) * inv_variance
    gradient = dy * scale
    dx = gradient - unit * _mean(gradient * unit, axes)
    if mode != "rms":
        dx = dx - _mean(gradient, axes)
    kept = tuple(axis for axis, size in enumerate(scale.shape) if size == 1)
    dscale = (dy * unit).sum(axis=kept, keepdims=True)
    return dx * inv_variance, dscale, dy.sum(axis=kept, keepdims=True) if bias else None


@_ieee
def batch_norm_backward_weights(dy: Array, x: Array, mean: Array, inv_std: Array, scale: Array) -> tuple[Array, ...]:
    """Computes the gradients of a batch norm's weights, and the factors that make dx out of dy and x.

    Args:
        dy: the gradient of the batch norm's output.
        x: its input.
        mean: the batch's, (1, C, 1, ...).
        inv_std: the batch's.
        scale: of the same shape.

    Returns:
        (dscale, dbias, equivalent_dy_scale, equivalent_x_scale, equivalent_bias), for
        dx = equivalent_dy_scale * dy + equivalent_x_scale * x + equivalent_bias.
    """
    axes = (0, *range(2, x.ndim))
    count = x.size // x.shape[1]
    dscale = (dy * (x - mean) * inv_std).sum(axis=axes, keepdims=True)
    dbias = dy.sum(axis=axes, keepdims=True)
    factor = scale * inv_std
    of_x = -factor * inv_std * dscale / count
    return dscale, dbias, factor, of_x, -factor * dbias / count - of_x * mean


# --- others -----------------------------------------------------------------------------------------------------------


@_ieee
def reduction(mode: str, x: Array, shape: Sequence[int]) -> Array:
    """Reduces over the dimensions in which the result's size is 1.

    Args:
        mode: a word of `flcuda.cudnn.graph.REDUCTION_MODES`.
        x: any shape.
        shape: the result's shape.

    Returns:
        The result.

    Raises:
        ValueError: there is no such mode.
    """
    axes = tuple(axis for axis, (size, full) in enumerate(zip(shape, x.shape, strict=True)) if size != full)
    if mode == "add":
        return x.sum(axis=axes, keepdims=True)
    if mode == "avg":
        return x.mean(axis=axes, keepdims=True)
    if mode == "mul":
        return x.prod(axis=axes, keepdims=True)
    if mode == "mul_no_zeros":
        return np.where(x == 0, 1.0, x).astype(x.dtype, copy=False).prod(axis=axes, keepdims=True)
    if mode == "min":
        return x.min(axis=axes, keepdims=True)
    if mode == "max":
        return x.max(axis=axes, keepdims=True)
    if mode == "amax":
        return np.abs(x).max(axis=axes, keepdims=True)
    if mode == "norm1":
        return np.abs(x).sum(axis=axes, keepdims=True)
    if mode == "norm2":
        return np.sqrt((x * x).sum(axis=axes, keepdims=True))
    raise ValueError(f"mode: {mode!r} is no mode of a reduction")


@_ieee
def matmul(a: Array, b: Array) -> Array:
    """Computes the matrix product over the last two dimensions."""
    return np.matmul(a, b)


class Taps(NamedTuple):
    """What the windows of one spatial dimension read: element index[o, t] times weight[o, t]."""

    index: Array
    weight: Array


def resample_taps(mode: str, size: int, out: int, window: Any, stride: Any, before: Any) -> Taps:
    """Lists what each output of a resampling reads in one dimension.

    Args:
        mode: "nearest", "bilinear", "average_include_padding", "average_exclude_padding" or "max".
        size: of the input.
        out: of the output.
        window: a number or Fraction.
        stride: likewise.
        before: the padding in front.

    Returns:
        The taps, (out, window); weights are 0 or 1 for "max".
    """
    taps = math.ceil(Fraction(window))
    index = np.zeros((out, taps), np.int64)
    weight = np.zeros((out, taps))
    for o in range(out):
        start = o * Fraction(stride) - Fraction(before)
        first = math.floor(start)
        part = start - first
        for t in range(taps):
            place = first + t
            if mode == "bilinear":
                weight[o, t] = float(part if t else 1 - part)
            elif mode == "nearest":
                weight[o, t] = float((part >= Fraction(1, 2)) == bool(t))
            else:
                weight[o, t] = float(0 <= place < size)
            index[o, t] = min(max(place, 0), size - 1)
    if mode == "average_include_padding":
        weight /= taps
    elif mode == "average_exclude_padding":
        weight /= np.maximum(weight.sum(axis=1, keepdims=True), 1)
    return Taps(index, weight)


def _all_taps(mode: str, x_shape: Sequence[int], window: Any, stride: Any, padding: Any) -> list[Taps]:
    rank = len(x_shape) - 2
    geometry = Geometry.read(rank, padding, stride, 1)
    windows = Geometry.read(rank, 0, window).stride
    spatial = geometry.spatial(x_shape[2:], [Fraction(each) for each in windows])
    return [
        resample_taps(mode, size, out, each, step, before)
        for size, out, each, step, before in zip(
            x_shape[2:], spatial, windows, geometry.stride, geometry.before, strict=True
        )
    ]


def _along(matrix: Array, a: Array, axis: int) -> Array:
    return np.moveaxis(np.tensordot(matrix, a, axes=(1, axis)), 0, axis)


def _matrix(taps: Taps, size: int, dtype: Any) -> Array:
    """The linear map (outputs, inputs) of one dimension."""
    matrix = np.zeros((len(taps.index), size), dtype)
    for o, (places, weights) in enumerate(zip(*taps, strict=True)):
        np.add.at(matrix[o], places, weights.astype(dtype))
    return matrix


def _window_values(x: Array, taps: Sequence[Taps], offset: Sequence[int], empty: float) -> Array:
    """What all windows have at one place in the window; `empty` where that is outside of x."""
    values = x[(slice(None), slice(None), *np.ix_(*(each.index[:, t] for each, t in zip(taps, offset, strict=True))))]
    for axis, (each, t) in enumerate(zip(taps, offset, strict=True)):
        held = (each.weight[:, t] != 0).reshape(-1, *(1 for _ in taps[axis + 1 :]))
        values = np.where(held, values, empty)
    return values


def _maxima(x: Array, taps: Sequence[Taps]) -> tuple[Array, Array]:
    """The largest element of each window and its place, the first of equals."""
    offsets = list(product(*(range(each.index.shape[1]) for each in taps)))
    best = None
    place = np.zeros(1, np.int64)
    for number, offset in enumerate(offsets):
        values = _window_values(x, taps, offset, -math.inf)
        if best is None:
            best, place = values, np.zeros(values.shape, np.int64)
            continue
        larger = (values > best) | (np.isnan(values) & ~np.isnan(best))
        best = np.where(larger, values, best)
        place = np.where(larger, number, place)
    return best, place


def _nearest_places(taps: Sequence[Taps], shape: Sequence[int]) -> Array:
    """Which element of each window "nearest" takes."""
    place = np.zeros((), np.int64)
    for axis, each in enumerate(taps):
        taken = each.weight.argmax(axis=1).reshape(-1, *(1 for _ in taps[axis + 1 :]))
        place = place * each.index.shape[1] + taken
    return np.broadcast_to(place, shape)


@_ieee
def resample_forward(
    mode: str, x: Array, *, window: Any, stride: Any = 1, padding: Any = 0, index: bool = False
) -> tuple[Array, Array | None]:
    """Computes a pooling or an interpolation.

    Args:
        mode: a word of `flcuda.cudnn.graph.RESAMPLE_MODES`.
        x: (N, C, *spatial).
        window: one number, or one a dimension.
        stride: one number, or one a dimension.
        padding: as the graph's builder takes it.
        index: whether to give which element of each window was taken.

    Returns:
        (y, index); index is None or of the dtype of x.
    """
    taps = _all_taps(mode, x.shape, window, stride, padding)
    if mode == "max":
        y, place = _maxima(x, taps)
    else:
        y = x
        for axis, each in enumerate(taps):
            y = _along(_matrix(each, x.shape[2 + axis], x.dtype), y, 2 + axis)
        place = _nearest_places(taps, y.shape) if index else None
    return y, place.astype(x.dtype) if index and place is not None else None


@_ieee
def resample_backward(
    mode: str,
    dy: Array,
    x_shape: Sequence[int],
    *,
    window: Any,
    stride: Any = 1,
    padding: Any = 0,
    index: Array | None = None,
    x: Array | None = None,
    y: Array | None = None,  # noqa: ARG001
) -> Array:
    """Computes the gradient of a pooling or an interpolation.

    Args:
        mode: as in `resample_forward`.
        dy: the gradient of y.
        x_shape: the shape of x.
        window: as in `resample_forward`.
        stride: likewise.
        padding: likewise.
        index: which element of each window was taken.
        x: the forward input, instead of the index.
        y: the forward output; not needed here.

    Returns:
        dx.
    """
    taps = _all_taps(mode, x_shape, window, stride, padding)
    if mode not in ("max", "nearest") or (mode == "nearest" and index is None):
        dx = dy
        for axis, each in enumerate(taps):
            dx = _along(_matrix(each, x_shape[2 + axis], dy.dtype).T, dx, 2 + axis)
        return dx
    place = _maxima(x, taps)[1] if index is None else index
    dx = np.zeros(tuple(x_shape), dy.dtype)
    batch = np.arange(x_shape[0]).reshape(-1, *(1 for _ in x_shape[1:]))
    channel = np.arange(x_shape[1]).reshape(-1, *(1 for _ in x_shape[2:]))
    for number, offset in enumerate(product(*(range(each.index.shape[1]) for each in taps))):
        grid = np.ix_(*(each.index[:, t] for each, t in zip(taps, offset, strict=True)))
        # An index that points at padding is the gradient of nothing.
        held = _window_values(np.ones_like(dx), taps, offset, 0.0) != 0
        np.add.at(dx, (batch, channel, *grid), np.where(held & (place == number), dy, 0.0))
    return dx


def reshape(x: Array, shape: Sequence[int]) -> Array:
    """Gives the elements in their logical order in another shape."""
    return x.reshape(tuple(shape))


def concatenate(tensors: Sequence[Array], axis: int) -> Array:
    """Gives arrays one after another."""
    return np.concatenate(list(tensors), axis=axis)


# --- a whole graph ----------------------------------------------------------------------------------------------------


def _pointwise_of_graph(mode: str, x: Array, b: Any = None, t: Any = None, *, axis: Any = None, **more: Any) -> Array:
    dtype = next(a.dtype for a in (x, b, t) if isinstance(a, np.ndarray))
    x = np.asarray(x, dtype)
    b = None if b is None else np.asarray(b, dtype)
    index = None
    if axis is not None:
        axis %= x.ndim
        index = np.arange(x.shape[axis], dtype=dtype).reshape(-1, *(1 for _ in x.shape[axis + 1 :]))
    return pointwise(mode, x, b, t, index=index, **more)


_METHODS: dict[str, Callable[..., Any]] = {
    "convolution_forward": convolution_forward,
    "convolution_backward_data": convolution_backward_data,
    "convolution_backward_filter": convolution_backward_filter,
    "pointwise": _pointwise_of_graph,
    "generate_statistics": generate_statistics,
    "batch_norm_finalize": batch_norm_finalize,
    "norm_forward": norm_forward,
    "norm_backward": norm_backward,
    "batch_norm_backward_weights": batch_norm_backward_weights,
    "reduction": reduction,
    "matmul": matmul,
    "resample_forward": resample_forward,
    "resample_backward": resample_backward,
    "reshape": reshape,
    "concatenate": concatenate,
}
_LABELS = ("dtype", "name", "beta")  # arguments that say nothing of the numbers


def evaluate(
    operations: Iterable[Any],
    values: Mapping[str, Array],
    dtype: Any = np.float64,
    rounded: Mapping[str, Any] | None = None,
) -> dict[str, Array]:
    """Evaluates a graph's operations one after another.

    Args:
        operations: each with ``method`` (a method of the graph's builder), ``arguments`` (pairs of a parameter's name
            and its value; a tensor is an object with a ``name``) and ``results`` (names, or None).
        values: the inputs by name; any dtype.
        dtype: in which to compute, and of the results.
        rounded: dtypes to which named results are rounded before they are used.

    Returns:
        All tensors by name, inputs included.
    """
    known = {name: np.asarray(a).astype(dtype) for name, a in values.items()}

    def looked_up(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(looked_up(each) for each in value)
        return known[value.name] if hasattr(value, "name") else value

    for operation in operations:
        arguments = {key: looked_up(value) for key, value in operation.arguments if key not in _LABELS}
        made = _METHODS[operation.method](**arguments)
        results = made if isinstance(made, tuple) else (made,)
        for name, result in zip(operation.results, results, strict=False):
            if name is None:
                continue
            word = (rounded or {}).get(name)
            with np.errstate(all="ignore"):
                known[name] = result if word is None else result.astype(word).astype(dtype)
    return known
