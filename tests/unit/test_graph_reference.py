"""The NumPy forms of graph operations: against PyTorch, independent formulas and finite differences."""

import math
from fractions import Fraction

import numpy as np
import pytest
from helpers import numeric_gradient
from hypothesis import given
from hypothesis import strategies as st

from flcuda import graph_reference as reference
from flcuda.cudnn.graph import POINTWISE_MODES, REDUCTION_MODES
from flcuda.finder.graph_problem import GraphProblem

# What a scalar mode computes, by Python's own functions.
SCALAR = {
    "add": lambda x, b: x + b,
    "add_square": lambda x, b: x + b**2,
    "div": lambda x, b: x / b,
    "max": max,
    "min": min,
    "mod": math.fmod,
    "mul": lambda x, b: x * b,
    "pow": lambda x, b: abs(x) ** b,
    "sub": lambda x, b: x - b,
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "log": lambda x: math.log(abs(x)),
    "neg": lambda x: -x,
    "rsqrt": lambda x: abs(x) ** -0.5,
    "sin": math.sin,
    "sqrt": lambda x: math.sqrt(abs(x)),
    "tan": math.tan,
    "erf": math.erf,
    "identity": lambda x: x,
    "reciprocal": lambda x: 1 / x,
    "atan2": math.atan2,
    "floor_mod": lambda x, b: x % b,
    "relu_fwd": lambda x: max(x, 0),
    "tanh_fwd": math.tanh,
    "sigmoid_fwd": lambda x: 1 / (1 + math.exp(-x)),
    "elu_fwd": lambda x: x if x > 0 else math.exp(x) - 1,
    "gelu_fwd": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    "softplus_fwd": lambda x: math.log(1 + math.exp(x)),
    "swish_fwd": lambda x: x / (1 + math.exp(-x)),
    "gelu_approx_tanh_fwd": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "cmp_eq": lambda x, b: float(x == b),
    "cmp_neq": lambda x, b: float(x != b),
    "cmp_gt": lambda x, b: float(x > b),
    "cmp_ge": lambda x, b: float(x >= b),
    "cmp_lt": lambda x, b: float(x < b),
    "cmp_le": lambda x, b: float(x <= b),
    "logical_and": lambda x, b: float(bool(x) and bool(b)),
    "logical_or": lambda x, b: float(bool(x) or bool(b)),
    "logical_not": lambda x: float(not x),
}
POSITIVE = ("pow", "log", "rsqrt", "sqrt")
TWO = {"add", "add_square", "div", "max", "min", "mod", "mul", "pow", "sub", "atan2", "floor_mod"} | {
    mode for mode in SCALAR if mode.startswith(("cmp_", "logical_")) and mode != "logical_not"
}
BACKWARD = [mode for mode in POINTWISE_MODES if mode.endswith("_bwd")]


def test_every_mode_is_tested():
    assert {*SCALAR, *BACKWARD, "gen_index", "binary_select"} == set(POINTWISE_MODES)


@pytest.mark.parametrize("mode", SCALAR)
def test_pointwise(mode, rng):
    x, b = rng.normal(size=(2, 200)) * 3
    if mode.startswith(("cmp", "logical")):
        x, b = np.rint(x / 3), np.rint(b / 3)
    if mode in POSITIVE:
        x = np.abs(x)
    scalar = SCALAR[mode]
    arguments = (x, b) if mode in TWO else (x,)
    expected = [float(scalar(*(float(each) for each in row))) for row in zip(*arguments, strict=True)]
    found = reference.pointwise(mode, *arguments)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=2e-14, atol=2e-14)


@pytest.mark.parametrize(
    ("mode", "parameters"),
    [(mode, {}) for mode in BACKWARD]
    + [
        ("relu_bwd", {"lower_clip": 0.3, "upper_clip": 1.2, "lower_slope": 0.2}),
        ("elu_bwd", {"elu_alpha": 1.7}),
        ("softplus_bwd", {"softplus_beta": 2.5}),
        ("swish_bwd", {"swish_beta": 0.6}),
    ],
)
def test_backward_modes_are_the_gradients(mode, parameters, rng):
    x, dy = rng.normal(size=(2, 300)) * 2
    forward = mode.replace("_bwd", "_fwd")
    expected = numeric_gradient(lambda a: dy * reference.pointwise(forward, a, **parameters), x)
    found = reference.pointwise(mode, dy, x, **parameters)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_parameters_of_the_forward_modes():
    x = np.array([-2.0, -0.5, 0.5, 3.0])
    relu = reference.pointwise("relu_fwd", x, lower_clip=-1, upper_clip=2, lower_slope=0.25)
    np.testing.assert_allclose(relu, [-1.25, -0.5, 0.5, 2.0])
    np.testing.assert_allclose(reference.pointwise("elu_fwd", x, elu_alpha=2)[0], 2 * (math.exp(-2) - 1))
    np.testing.assert_allclose(
        reference.pointwise("softplus_fwd", x, softplus_beta=3)[2], math.log1p(math.exp(1.5)) / 3
    )
    np.testing.assert_allclose(reference.pointwise("swish_fwd", x, swish_beta=2)[3], 3 / (1 + math.exp(-6)))
    np.testing.assert_allclose(reference.pointwise("add", x, x, alpha1=2, alpha2=-0.5), 1.5 * x)
    chosen = reference.pointwise("binary_select", x, -x, np.array([0.0, 1.0, 2.0, 0.0]))
    np.testing.assert_array_equal(chosen, [2.0, -0.5, 0.5, -3.0])


def test_extreme_values():
    x = np.array([-np.inf, -1e30, -800.0, 800.0, 1e30, np.inf])
    for mode in ("sigmoid_fwd", "tanh_fwd", "erf", "elu_fwd", "softplus_fwd"):
        assert np.isfinite(reference.pointwise(mode, x)[:-1]).all(), mode
    assert np.isnan(reference.pointwise("relu_fwd", np.array([np.nan])))
    assert reference.pointwise("relu_fwd", np.array([-np.inf])) == 0
    assert np.isnan(reference.pointwise("log", np.array([-1.0])))


# --- convolutions -----------------------------------------------------------------------------------------------------


@st.composite
def geometries(draw):
    rank = draw(st.integers(1, 3))

    def numbers(low, high):
        return [draw(st.integers(low, high)) for _ in range(rank)]

    groups, c, k = (draw(st.integers(1, 3)) for _ in range(3))
    window, dilation, stride = numbers(1, 3), numbers(1, 2), numbers(1, 3)
    padding = tuple(zip(numbers(0, 2), numbers(0, 2), strict=True))
    size = [
        max(1, (r - 1) * d + 1 - sum(pad)) + more
        for r, d, pad, more in zip(window, dilation, padding, numbers(0, 3), strict=True)
    ]
    shapes = (draw(st.integers(1, 3)), groups * c, *size), (groups * k, c, *window)
    return shapes, {"padding": padding, "stride": tuple(stride), "dilation": tuple(dilation)}


@given(geometries(), st.integers(0, 2**32 - 1))
def test_convolutions(geometry, seed):
    """Forward by its definition; the gradients by <dy, conv(x, w)> = <dx, x> = <dw, w>."""
    (x_shape, w_shape), settings = geometry
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=x_shape), rng.normal(size=w_shape)
    y = reference.convolution_forward(x, w, **settings, alpha=0.5)
    groups = x_shape[1] // w_shape[1]
    for index in [tuple(rng.integers(0, y.shape)) for _ in range(5)]:
        total = 0.0
        for tap in np.ndindex(*w_shape[1:]):
            place = [
                index[2 + i] * settings["stride"][i] + tap[1 + i] * settings["dilation"][i] - settings["padding"][i][0]
                for i in range(len(x_shape) - 2)
            ]
            if all(0 <= p < size for p, size in zip(place, x_shape[2:], strict=True)):
                channel = index[1] // (w_shape[0] // groups) * w_shape[1] + tap[0]
                total += x[(index[0], channel, *place)] * w[(index[1], *tap)]
        assert y[index] == pytest.approx(0.5 * total, abs=1e-12)
    dy = rng.normal(size=y.shape)
    dx = reference.convolution_backward_data(dy, w, x_shape, **settings, alpha=0.5)
    dw = reference.convolution_backward_filter(x, dy, w_shape, **settings, alpha=0.5)
    assert dx.shape == x_shape
    assert dw.shape == w_shape
    assert (dx * x).sum() == pytest.approx((dy * y).sum(), abs=1e-10)
    assert (dw * w).sum() == pytest.approx((dy * y).sum(), abs=1e-10)


# --- norms, reductions and the rest -----------------------------------------------------------------------------------

NORMS = [("batch", (1, 3, 1, 1)), ("instance", (1, 3, 1, 1)), ("layer", (1, 3, 4, 5)), ("rms", (1, 3, 1, 5))]


@pytest.mark.parametrize(("mode", "shape"), NORMS)
def test_norm(mode, shape, rng):
    x, dy = rng.normal(1, 2, (2, 2, 3, 4, 5))
    scale, bias = rng.normal(size=(2, *shape))
    settings = {"epsilon": 1e-3}
    y, mean, inverse, _, _ = reference.norm_forward(mode, x, scale, bias, **settings)
    unit = (y - bias) / scale
    axes = reference.statistics_axes(mode, x.shape, shape)
    variance = inverse**-2 - 1e-3
    np.testing.assert_allclose((unit**2).mean(axis=axes, keepdims=True), variance * inverse**2, rtol=1e-12)
    if mode != "rms":
        np.testing.assert_allclose(unit.mean(axis=axes), 0, atol=1e-12)
        np.testing.assert_allclose(mean, x.mean(axis=axes, keepdims=True))
    again = reference.norm_forward(mode, x, scale, bias, training=False, mean=mean, inv_variance=inverse, **settings)
    np.testing.assert_allclose(again[0], y)
    assert again[1:] == (None,) * 4
    dx, dscale, dbias = reference.norm_backward(mode, dy, x, scale, epsilon=1e-3)
    saved = reference.norm_backward(mode, dy, x, scale, mean=mean, inv_variance=inverse)
    for found, other in zip((dx, dscale, dbias), saved, strict=True):
        np.testing.assert_allclose(found, other)

    def forward(values, factors, offsets):
        return dy * reference.norm_forward(mode, values, factors, offsets, **settings)[0]

    np.testing.assert_allclose(dx, numeric_gradient(lambda a: forward(a, scale, bias), x), atol=1e-7)
    np.testing.assert_allclose(dscale, numeric_gradient(lambda a: forward(x, a, bias), scale), atol=1e-7)
    np.testing.assert_allclose(dbias, numeric_gradient(lambda a: forward(x, scale, a), bias), atol=1e-7)


def test_batch_norm_by_parts_is_the_norm(rng):
    x, dy = rng.normal(1, 2, (2, 3, 4, 5, 6))
    scale, bias, old_mean, old_variance = rng.uniform(0.5, 2, (4, 1, 4, 1, 1))
    running = {"running_mean": old_mean, "running_variance": old_variance, "momentum": 0.25}
    whole = reference.norm_forward("batch", x, scale, bias, **running)
    total, squares = reference.generate_statistics(x)
    factor, offset, *parts = reference.batch_norm_finalize(total, squares, scale, bias, count=3 * 5 * 6, **running)
    np.testing.assert_allclose(factor * x + offset, whole[0])
    for found, expected in zip(parts, whole[1:], strict=True):
        np.testing.assert_allclose(found, expected)
    expected = 0.75 * old_variance + 0.25 * x.var(axis=(0, 2, 3), ddof=1, keepdims=True)
    np.testing.assert_allclose(parts[3], expected)
    mean, inverse = parts[:2]
    dx, dscale, dbias = reference.norm_backward("batch", dy, x, scale, mean=mean, inv_variance=inverse)
    found = reference.batch_norm_backward_weights(dy, x, mean, inverse, scale)
    np.testing.assert_allclose(found[0], dscale)
    np.testing.assert_allclose(found[1], dbias)
    np.testing.assert_allclose(found[2] * dy + found[3] * x + found[4], dx, atol=1e-12)


@pytest.mark.parametrize("mode", REDUCTION_MODES)
def test_reduction(mode, rng):
    x = np.rint(rng.normal(size=(2, 3, 4)) * 1.5)
    found = reference.reduction(mode, x, (2, 1, 1))
    assert found.shape == (2, 1, 1)
    for row, value in zip(x, found.ravel(), strict=True):
        numbers = [float(number) for number in row.ravel()]
        expected = {
            "add": sum(numbers),
            "mul": math.prod(numbers),
            "min": min(numbers),
            "max": max(numbers),
            "amax": max(map(abs, numbers)),
            "avg": sum(numbers) / 12,
            "norm1": sum(map(abs, numbers)),
            "norm2": math.hypot(*numbers),
            "mul_no_zeros": math.prod(number for number in numbers if number),
        }[mode]
        assert value == pytest.approx(expected)


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="no pointwise mode"):
        reference.pointwise("wrong", np.ones(3))
    with pytest.raises(ValueError, match="no mode of a reduction"):
        reference.reduction("wrong", np.ones(3), (1,))


def test_matmul_reshape_concatenate(rng):
    a, b = rng.normal(size=(1, 3, 4)), rng.normal(size=(2, 4, 5))
    np.testing.assert_allclose(reference.matmul(a, b), np.einsum("xij,bjk->bik", a, b))
    x = rng.normal(size=(2, 3, 4)).transpose(0, 2, 1)
    assert reference.reshape(x, (8, 3))[5, 1] == x[1, 1, 1]
    both = reference.concatenate([x, 2 * x], 1)
    np.testing.assert_array_equal(both[:, 4:], 2 * x)


@pytest.mark.parametrize("mode", ["average_include_padding", "average_exclude_padding", "max"])
@pytest.mark.parametrize(("window", "stride", "padding"), [(2, 2, 0), (3, 2, 1), ((3, 2), (1, 2), ((1, 0), (0, 1)))])
def test_pooling(mode, window, stride, padding, rng):
    x = rng.normal(size=(2, 3, 7, 6))
    settings = {"window": window, "stride": stride, "padding": padding}
    y, index = reference.resample_forward(mode, x, **settings, index=mode == "max")
    geometry = reference.Geometry.read(2, padding, stride, 1)
    sizes = reference.Geometry.read(2, 0, window).stride
    for place in np.ndindex(*y.shape):
        values, inside = [], []
        for tap in np.ndindex(*sizes):
            at = [place[2 + i] * geometry.stride[i] + tap[i] - geometry.before[i] for i in range(2)]
            inside.append(all(0 <= p < size for p, size in zip(at, x.shape[2:], strict=True)))
            values.append(x[(*place[:2], *at)] if inside[-1] else 0.0)
        if mode == "max":
            assert inside[int(index[place])]
            assert y[place] == values[int(index[place])] == max(v for v, i in zip(values, inside, strict=True) if i)
        else:
            count = len(values) if mode.endswith("include_padding") else sum(inside)
            assert y[place] == pytest.approx(sum(values) / count)
    dy = rng.normal(size=y.shape)
    dx = reference.resample_backward(mode, dy, x.shape, **settings, index=index)
    gradient = numeric_gradient(lambda a: dy * reference.resample_forward(mode, a, **settings)[0], x)
    np.testing.assert_allclose(dx, gradient, atol=1e-8)
    if mode == "max":
        np.testing.assert_array_equal(dx, reference.resample_backward(mode, dy, x.shape, **settings, x=x, y=y))


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_interpolation(mode, rng):
    x = rng.normal(size=(1, 2, 4, 5))
    settings = {"window": 2, "stride": Fraction(1, 2), "padding": ((0, 1), (0, 1))}
    y, index = reference.resample_forward(mode, x, **settings, index=mode == "nearest")
    np.testing.assert_array_equal(y[:, :, ::2, ::2], x[:, :, : y.shape[2] // 2 + 1, : y.shape[3] // 2 + 1])
    between = (x[:, :, :, :-1] + x[:, :, :, 1:]) / 2 if mode == "bilinear" else x[:, :, :, 1:]
    np.testing.assert_allclose(y[:, :, ::2, 1 : 2 * between.shape[3] : 2], between)
    dy = rng.normal(size=y.shape)
    dx = reference.resample_backward(mode, dy, x.shape, **settings)
    gradient = numeric_gradient(lambda a: dy * reference.resample_forward(mode, a, **settings)[0], x)
    np.testing.assert_allclose(dx, gradient, atol=1e-8)
    if mode == "nearest":
        np.testing.assert_allclose(reference.resample_backward(mode, dy, x.shape, **settings, index=index), dx)


# --- whole graphs -----------------------------------------------------------------------------------------------------

LINE = (
    "graph float32; x float16 2x4x6x5 nhwc; w float16 8x4x3x3; b float32 1x8x1x1; "
    "t = convolution_forward(%x, %w, padding=((1, 0), (1, 1))); u = pointwise(add, %t, %b); "
    "y = pointwise(swish_fwd, %u); s, q = generate_statistics(%y); i = pointwise(gen_index, %y, axis=3); "
    "z = pointwise(sub, 1.0, %i); out y float16; out s float32; out q float32; out z float32"
)


def test_evaluate(rng):
    problem = GraphProblem.parse(LINE)
    arrays = problem.random_arrays(device="cpu")
    inputs = {name: arrays[name] for name in problem.inputs}
    known = reference.evaluate(problem.operations, inputs)
    x, w, b = (inputs[name].astype(np.float64) for name in "xwb")
    t = reference.convolution_forward(x, w, padding=((1, 0), (1, 1))) + b
    y = t / (1 + np.exp(-t))
    np.testing.assert_allclose(known["y"], y)
    np.testing.assert_allclose(known["q"], (y**2).sum(axis=(0, 2, 3), keepdims=True))
    np.testing.assert_array_equal(known["z"], np.broadcast_to(1.0 - np.arange(y.shape[3]), y.shape))
    assert all(a.dtype == np.float64 for a in known.values())
    rounded = reference.evaluate(problem.operations, inputs, np.float32, {"y": np.float16})
    assert all(a.dtype == np.float32 for a in rounded.values())
    np.testing.assert_array_equal(rounded["y"], rounded["y"].astype(np.float16))
    assert (rounded["u"] != rounded["u"].astype(np.float16)).any()
    np.testing.assert_allclose(rounded["q"], known["q"], rtol=1e-2)


# --- PyTorch ----------------------------------------------------------------------------------------------------------


@pytest.mark.peer
def test_pytorch_computes_the_same(rng):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    values = rng.normal(size=(2, 6, 7, 5)) * 2
    dy_values = rng.normal(size=values.shape)
    modes = {
        "relu": functional.relu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "elu": functional.elu,
        "gelu": functional.gelu,
        "softplus": functional.softplus,
        "swish": functional.silu,
        "gelu_approx_tanh": lambda a: functional.gelu(a, approximate="tanh"),
    }
    for mode, function in modes.items():
        x = torch.tensor(values, requires_grad=True)
        y = function(x)
        y.backward(torch.tensor(dy_values))
        np.testing.assert_allclose(reference.pointwise(f"{mode}_fwd", values), y.detach().numpy(), atol=1e-8)
        np.testing.assert_allclose(reference.pointwise(f"{mode}_bwd", dy_values, values), x.grad.numpy(), atol=1e-8)
    x = torch.tensor(values, requires_grad=True)
    w = torch.tensor(rng.normal(size=(4, 3, 3, 2)), requires_grad=True)
    y = functional.conv2d(x, w, padding=(1, 2), stride=(2, 1), dilation=(1, 2), groups=2)
    dy = rng.normal(size=y.shape)
    y.backward(torch.tensor(dy))
    settings = {"padding": (1, 2), "stride": (2, 1), "dilation": (1, 2)}
    filters = w.detach().numpy()
    np.testing.assert_allclose(reference.convolution_forward(values, filters, **settings), y.detach().numpy())
    dx = reference.convolution_backward_data(dy, filters, values.shape, **settings)
    np.testing.assert_allclose(dx, x.grad.numpy(), atol=1e-12)
    dw = reference.convolution_backward_filter(values, dy, filters.shape, **settings)
    np.testing.assert_allclose(dw, w.grad.numpy(), atol=1e-12)
    x = torch.tensor(values, requires_grad=True)
    y = functional.max_pool2d(x, 3, 2, 1)
    dy = rng.normal(size=y.shape)
    y.backward(torch.tensor(dy))
    found, index = reference.resample_forward("max", values, window=3, stride=2, padding=1, index=True)
    np.testing.assert_array_equal(found, y.detach().numpy())
    dx = reference.resample_backward("max", dy, values.shape, window=3, stride=2, padding=1, index=index)
    np.testing.assert_allclose(dx, x.grad.numpy())
    for include in (False, True):
        word = f"average_{'include' if include else 'exclude'}_padding"
        y = functional.avg_pool2d(torch.tensor(values), 3, 2, 1, count_include_pad=include)
        found, _ = reference.resample_forward(word, values, window=3, stride=2, padding=1)
        np.testing.assert_allclose(found, y.numpy())
    for mode, norm in (
        ("batch", lambda a, s, b: functional.batch_norm(a, None, None, s.ravel(), b.ravel(), training=True)),
        ("instance", lambda a, s, b: functional.instance_norm(a, weight=s.ravel(), bias=b.ravel())),
    ):
        scale, bias = rng.normal(size=(2, 1, 6, 1, 1))
        leaves = [torch.tensor(a, requires_grad=True) for a in (values, scale, bias)]
        y = norm(*leaves)
        y.backward(torch.tensor(dy_values))
        np.testing.assert_allclose(reference.norm_forward(mode, values, scale, bias)[0], y.detach().numpy(), atol=1e-12)
        found = reference.norm_backward(mode, dy_values, values, scale, epsilon=1e-5)
        for gradient, leaf in zip(found, leaves, strict=True):
            np.testing.assert_allclose(gradient, leaf.grad.numpy(), atol=1e-12)
