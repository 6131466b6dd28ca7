"""Traced functions on the CPU device: values against float64 NumPy, gradients against finite differences."""

import copy
import functools
import json
import math
import pickle
import sys
import threading
import types

import numpy as np
import pytest
from helpers import LAYOUTS, assert_close, numeric_gradient, place

import flcuda
from flcuda import device as devices
from flcuda import finder
from flcuda import functional as F
from flcuda.autograd import GradTarget
from flcuda.errors import CudnnNotSupportedError, FlcudaError
from flcuda.finder import ConvolutionProblem
from flcuda.finder.graph_problem import GraphProblem
from flcuda.traced import function as function_module
from flcuda.traced.backward import Backward
from flcuda.traced.trace import described

graph = flcuda.graph
SHAPE = (2, 3, 4, 5)
CHANNELS = (1, 3, 1, 1)


@pytest.fixture(autouse=True)
def _heuristic():
    # Nothing is measured: there is one candidate on the CPU.
    with flcuda.policy(mode="heuristic"):
        yield


def erf(x):
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def normal(rng, *shapes):
    return [rng.standard_normal(shape) for shape in shapes]


def positive(rng, *shapes):
    return [rng.uniform(0.5, 2.0, shape) for shape in shapes]


def leaf(a):
    return flcuda.Tensor(a, requires_grad=True)


def check(function, formula, arrays, layout="nchw", step=1e-6, same_layout=True):
    """A function of float64 arrays: its values against a NumPy formula, all its gradients against differences."""
    given = [place(a, "cpu", layout) for a in arrays]
    y = function(*given)
    expected = formula(*arrays)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)
    seed = np.random.default_rng(5).standard_normal(expected.shape)
    tensors = [leaf(a) for a in given]
    out = function(*tensors)
    np.testing.assert_array_equal(out.data, y)
    out.backward(place(seed, "cpu", layout))
    for i, (a, tensor) in enumerate(zip(arrays, tensors, strict=True)):
        wanted = numeric_gradient(
            lambda moved, i=i: formula(*arrays[:i], moved, *arrays[i + 1 :]) * seed, a.astype(np.float64), step
        )
        np.testing.assert_allclose(tensor.grad, wanted, rtol=1e-6, atol=1e-7, err_msg=f"gradient of argument {i}")
        assert tensor.grad.dtype == a.dtype
        if same_layout and layout != "strided" and a.ndim > 2 and 1 not in a.shape:
            assert devices.memory_layout(tensor.grad) == layout


UNARY = {
    "relu": (lambda x: graph.relu(x), lambda x: np.maximum(x, 0), normal),
    "leaky relu": (lambda x: graph.relu(x, lower_slope=0.2), lambda x: np.where(x > 0, x, 0.2 * x), normal),
    "clipped relu": (lambda x: graph.relu(x, upper_clip=1.0), lambda x: np.clip(x, 0, 1), normal),
    "elu": (lambda x: graph.elu(x, alpha=1.5), lambda x: np.where(x > 0, x, 1.5 * (np.exp(x) - 1)), normal),
    "softplus": (lambda x: graph.softplus(x, beta=2.0), lambda x: np.log1p(np.exp(2 * x)) / 2, normal),
    "silu": (lambda x: graph.silu(x), lambda x: x * sigmoid(x), normal),
    "swish": (lambda x: graph.silu(x, beta=1.5), lambda x: x * sigmoid(1.5 * x), normal),
    "sigmoid": (lambda x: graph.sigmoid(x), sigmoid, normal),
    "tanh": (lambda x: graph.tanh(x), np.tanh, normal),
    "gelu": (lambda x: graph.gelu(x), lambda x: x * (1 + erf(x / math.sqrt(2))) / 2, normal),
    "gelu_tanh": (
        lambda x: graph.gelu_tanh(x),
        lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
        normal,
    ),
    "identity": (lambda x: graph.identity(x), lambda x: x, normal),
    "negative": (lambda x: -x, lambda x: -x, normal),
    "abs": (lambda x: abs(x), np.abs, normal),
    "exp": (lambda x: graph.exp(x), np.exp, normal),
    "log": (lambda x: graph.log(x), np.log, positive),
    "sqrt": (lambda x: graph.sqrt(x), np.sqrt, positive),
    "rsqrt": (lambda x: graph.rsqrt(x), lambda x: 1 / np.sqrt(x), positive),
    "reciprocal": (lambda x: graph.reciprocal(x), lambda x: 1 / x, positive),
    "sin": (lambda x: graph.sin(x), np.sin, normal),
    "cos": (lambda x: graph.cos(x), np.cos, normal),
    "tan": (lambda x: graph.tan(x), np.tan, positive),
    "erf": (lambda x: graph.erf(x), erf, normal),
    "x + 2": (lambda x: x + 2, lambda x: x + 2, normal),
    "2 - x": (lambda x: 2 - x, lambda x: 2 - x, normal),
    "x - 2": (lambda x: x - 2, lambda x: x - 2, normal),
    "3 * x": (lambda x: 3 * x, lambda x: 3 * x, normal),
    "x / 4": (lambda x: x / 4, lambda x: x / 4, normal),
    "4 / x": (lambda x: 4 / x, lambda x: 4 / x, positive),
    "x ** 2": (lambda x: x**2, lambda x: x**2, normal),
    "x ** 1.5": (lambda x: x**1.5, lambda x: x**1.5, positive),
    "2 ** x": (lambda x: 2**x, lambda x: 2**x, normal),
    "x * x + x": (lambda x: x * x + x, lambda x: x * x + x, normal),
    "maximum of a number": (lambda x: graph.maximum(0.25, x), lambda x: np.maximum(x, 0.25), normal),
    "minimum of a number": (lambda x: graph.minimum(x, 0.25), lambda x: np.minimum(x, 0.25), normal),
    "chain": (
        lambda x: graph.tanh(graph.exp(x * 0.5) + graph.sigmoid(x)) * x,
        lambda x: np.tanh(np.exp(x * 0.5) + sigmoid(x)) * x,
        normal,
    ),
    "sum": (lambda x: graph.sum(x), lambda x: x.sum(keepdims=True), normal),
    "sum of some": (lambda x: graph.sum(x * x, (0, -1)), lambda x: (x * x).sum((0, 3), keepdims=True), normal),
    "mean": (lambda x: graph.mean(x, (2, 3)) * x, lambda x: x.mean((2, 3), keepdims=True) * x, normal),
    "reshape": (
        lambda x: graph.reshape(x * 2, (2, -1, 5)),
        lambda x: (x * 2).reshape(2, 12, 5),
        normal,
    ),
    "reshape of an argument": (
        lambda x: graph.exp(graph.reshape(x, (6, 4, 5))),
        lambda x: np.exp(x.reshape(6, 4, 5)),
        normal,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_tensor(name, layout, rng):
    function, formula, numbers = UNARY[name]
    # What was a reshape on the way in comes back in logical order.
    check(graph(function), formula, numbers(rng, SHAPE), layout, same_layout="argument" not in name)


BINARY = {
    "add": (lambda a, b: a + b, lambda a, b: a + b, normal),
    "subtract": (lambda a, b: a - b, lambda a, b: a - b, normal),
    "multiply": (lambda a, b: a * b, lambda a, b: a * b, normal),
    "divide": (lambda a, b: a / b, lambda a, b: a / b, positive),
    "power": (lambda a, b: a**b, lambda a, b: a**b, positive),
    "atan2": (lambda a, b: graph.atan2(a, b), np.arctan2, positive),
    "add_square": (lambda a, b: graph.add_square(a, b), lambda a, b: a + b * b, normal),
    "maximum": (lambda a, b: graph.maximum(a, b), np.maximum, normal),
    "minimum": (lambda a, b: graph.minimum(a, b), np.minimum, normal),
    "an affine map": (
        lambda a, b: graph.silu((a + b) * b) - b,
        lambda a, b: (a + b) * b * sigmoid((a + b) * b) - b,
        normal,
    ),
}


@pytest.mark.parametrize("shapes", [(SHAPE, SHAPE), (SHAPE, CHANNELS), ((2, 1, 1, 5), SHAPE), (SHAPE, (1, 1, 1, 1))])
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_tensors_with_broadcasting(name, shapes, rng):
    function, formula, numbers = BINARY[name]
    check(graph(function), formula, numbers(rng, *shapes), "nhwc")


@pytest.mark.parametrize(
    ("compare", "formula"),
    [
        (lambda a, b: a > b, np.greater),
        (lambda a, b: a >= b, np.greater_equal),
        (lambda a, b: a < b, np.less),
        (lambda a, b: a <= b, np.less_equal),
        (lambda a, b: a == b, np.equal),
        (lambda a, b: a != b, np.not_equal),
        (lambda a, b: graph.logical_and(a > b, a > 0), lambda a, b: (a > b) & (a > 0)),
        (lambda a, b: graph.logical_or(a > b, graph.logical_not(a > 0)), lambda a, b: (a > b) | ~(a > 0)),
    ],
)
def test_selection(compare, formula, rng):
    function = graph(lambda a, b: graph.where(compare(a, b), a * 2, b))
    check(function, lambda a, b: np.where(formula(a, b), a * 2, b), normal(rng, SHAPE, SHAPE))


def test_selection_by_what_a_convolution_gives(rng):
    @graph
    def layer(x, w, a, b):
        return graph.where(graph.conv(x, w) > a, a * 2, b)

    x, w, a, b = normal(rng, (2, 3, 4, 4), (5, 3, 2, 2), (2, 5, 3, 3), (2, 5, 3, 3))
    chosen = conv(x, w) > a
    tensors = [leaf(x), leaf(w), leaf(a), leaf(b)]
    y = layer(*tensors)
    np.testing.assert_allclose(y.data, np.where(chosen, a * 2, b))
    y.backward(b)
    np.testing.assert_allclose(tensors[2].grad, np.where(chosen, 2 * b, 0))
    np.testing.assert_allclose(tensors[3].grad, np.where(chosen, 0, b))
    # A comparison has no derivative, so that nothing flows through it.
    assert tensors[0].grad is None
    assert tensors[1].grad is None


def test_numbers_that_are_selected_have_the_dtype_of_what_was_compared(rng):
    @graph
    def layer(x, w, y):
        return graph.where(graph.conv(x, w) > 0, 2.0, 0.5) * y

    x, w, y = normal(rng, (2, 3, 4, 4), (5, 3, 2, 2), (2, 5, 3, 3))
    mask = np.where(conv(x, w) > 0, 2.0, 0.5)
    tensor = leaf(y)
    layer(x, w, tensor).backward(y)
    np.testing.assert_array_equal(tensor.grad, mask * y)
    select = graph(lambda x: graph.where(graph.logical_not(x > 0), 1.0, 0.25))
    for dtype in (np.float64, np.float32, np.float16):
        chosen = select(x.astype(dtype))
        assert chosen.dtype == dtype
        np.testing.assert_array_equal(chosen, np.where(x > 0, 0.25, 1.0))


def test_powers_at_their_edges():
    zero = leaf(np.array([[0.0, -2.0, 3.0]]))
    graph(lambda x: x**0 * 5)(zero).backward(np.ones((1, 3)))
    np.testing.assert_array_equal(zero.grad, np.zeros((1, 3)))
    function = graph(lambda x: (-2.0) ** x)
    np.testing.assert_array_equal(function(np.array([[2.0, 3.0]])), [[4.0, -8.0]])
    text = message(function, zero, kind=FlcudaError)
    assert "power1: flcuda.graph has no derivative of pointwise pow" in text
    assert f"({__file__}:" in text


def test_long_chains(rng):
    @graph
    def chain(x):
        y = x
        for _ in range(40):
            y = y * y * 0.1 + y * 0.9
        return y

    def formula(x):
        y = x
        for _ in range(40):
            y = y * y * 0.1 + y * 0.9
        return y

    check(chain, formula, [0.5 * rng.standard_normal((2, 3))])


@pytest.mark.parametrize("name", ["ceil", "floor", "fmod", "remainder", "max", "min"])
def test_functions_without_a_derivative(name, rng):
    a, b = normal(rng, SHAPE, SHAPE)
    formulas = {"ceil": np.ceil, "floor": np.floor, "fmod": np.fmod, "remainder": np.mod}
    two = name in ("fmod", "remainder")
    function = graph(lambda a, b: getattr(graph, name)(a, b) * 1.0 if two else getattr(graph, name)(a) + 0 * b)
    wanted = formulas[name](a, b) if two else formulas[name](a) if name in formulas else getattr(a, name)(keepdims=True)
    np.testing.assert_allclose(function(a, b), np.broadcast_to(wanted, SHAPE), atol=1e-12)
    with pytest.raises(FlcudaError, match=r"has no derivative of .*requires a gradient"):
        function(leaf(a), b)
    with flcuda.no_grad():
        assert not function(leaf(a), b).requires_grad


def test_an_operation_without_a_derivative_is_no_matter_where_no_gradient_flows(rng):
    a, b = normal(rng, SHAPE, SHAPE)
    function = graph(lambda a, b: graph.floor(a) * b)
    tensor = leaf(b)
    function(a, tensor).backward(np.ones(SHAPE))
    np.testing.assert_allclose(tensor.grad, np.floor(a))


def test_concatenation(rng):
    function = graph(lambda a, b: graph.exp(graph.concatenate([a, b * 2], -3)))
    arrays = normal(rng, SHAPE, (2, 1, 4, 5))
    for layout in LAYOUTS:
        check(function, lambda a, b: np.exp(np.concatenate([a, b * 2], 1)), arrays, layout, same_layout=False)


@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 4, 5)), ((2, 3, 4), (1, 4, 5)), ((2, 1, 3, 4), (2, 3, 4, 5))])
def test_matrix_products(shapes, rng):
    check(graph(lambda a, b: graph.tanh(a @ b)), lambda a, b: np.tanh(a @ b), normal(rng, *shapes))


def test_statistics(rng):
    def function(x):
        total, squares = graph.genstats(x)
        return total * squares

    def formula(x):
        return x.sum((0, 2, 3), keepdims=True) * (x * x).sum((0, 2, 3), keepdims=True)

    check(graph(function), formula, normal(rng, SHAPE))
    check(graph(lambda x: graph.genstats(x)[1]), lambda x: (x * x).sum((0, 2, 3), keepdims=True), normal(rng, SHAPE))
    check(graph(lambda x: graph.genstats(x)[0]), lambda x: x.sum((0, 2, 3), keepdims=True), normal(rng, SHAPE))


@pytest.mark.parametrize(
    ("mode", "shape", "axes"),
    [
        ("batch", CHANNELS, (0, 2, 3)),
        ("instance", CHANNELS, (2, 3)),
        ("layer", (1, 3, 4, 5), (1, 2, 3)),
        ("rms", (1, 3, 4, 5), (1, 2, 3)),
    ],
)
def test_norms(mode, shape, axes, rng):
    def formula(x, scale, bias):
        centred = x if mode == "rms" else x - x.mean(axes, keepdims=True)
        return centred / np.sqrt((centred**2).mean(axes, keepdims=True) + 1e-3) * scale + bias

    function = graph(lambda x, scale, bias: graph.norm(mode, x, scale, bias, epsilon=1e-3))
    check(function, formula, normal(rng, SHAPE, shape, shape), "nhwc")
    if mode == "rms":
        without = graph(lambda x, scale: graph.norm("rms", x, scale, epsilon=1e-3))
        check(without, lambda x, scale: formula(x, scale, 0.0), normal(rng, SHAPE, shape))


def windows(x):
    return np.stack([x[:, :, i : i + 4 : 2, j : j + 4 : 2] for i in range(2) for j in range(2)])


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_pooling(layout, rng):
    arrays = normal(rng, (2, 3, 4, 4))
    check(graph(lambda x: graph.max_pool(x, 2)), lambda x: windows(x).max(0), arrays, layout)
    check(graph(lambda x: graph.avg_pool(x, 2)), lambda x: windows(x).mean(0), arrays, layout)
    check(
        graph(lambda x: graph.exp(graph.max_pool(x * 2, [2, 2]))),
        lambda x: np.exp(windows(x * 2).max(0)),
        arrays,
        layout,
    )


# --- convolutions -----------------------------------------------------------------------------------------------------


def conv(x, w, padding=(0, 0), stride=(1, 1)):
    """A convolution of float64 arrays, by its definition; groups follow from the shapes."""
    x = np.pad(x, ((0, 0), (0, 0), *[(p, p) for p in padding]))
    groups = x.shape[1] // w.shape[1]
    per = w.shape[0] // groups
    size = [(x.shape[2 + i] - w.shape[2 + i]) // stride[i] + 1 for i in range(2)]
    y = np.zeros((x.shape[0], w.shape[0], *size), np.float64)
    for k in range(w.shape[0]):
        part = x[:, k // per * w.shape[1] : (k // per + 1) * w.shape[1]]
        for p in range(size[0]):
            for q in range(size[1]):
                rows, columns = p * stride[0], q * stride[1]
                window = part[:, :, rows : rows + w.shape[2], columns : columns + w.shape[3]]
                y[:, k, p, q] = (window * w[k]).sum((1, 2, 3))
    return y


ACTIVATIONS = {
    "relu": lambda z: np.maximum(z, 0),
    "silu": lambda z: z * sigmoid(z),
    "gelu": lambda z: z * (1 + erf(z / math.sqrt(2))) / 2,
    "sigmoid": sigmoid,
    "tanh": np.tanh,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_convolution_bias_and_activation(name, layout, rng):
    @graph
    def layer(x, w, b):
        return getattr(graph, name)(graph.conv(x, w, padding=(1, 0), stride=(2, 1)) + b)

    def formula(x, w, b):
        return ACTIVATIONS[name](conv(x, w, (1, 0), (2, 1)) + b)

    check(layer, formula, normal(rng, (2, 4, 5, 4), (6, 2, 3, 2), (1, 6, 1, 1)), layout)


def test_a_bias_of_channels_is_reshaped_before_the_graph(rng):
    @graph
    def layer(x, w, b):
        return graph.silu(graph.conv(x, w) + graph.reshape(b, (1, -1, 1, 1)))

    def formula(x, w, b):
        return ACTIVATIONS["silu"](conv(x, w) + b.reshape(1, -1, 1, 1))

    arrays = normal(rng, (2, 2, 4, 3), (5, 2, 2, 2), (5,))
    check(layer, formula, arrays, "nhwc")
    problem = layer.problem(*arrays)
    assert [operation.method for operation in problem.operations] == ["convolution_forward", "pointwise", "pointwise"]
    twice = graph(lambda b: graph.concatenate([b, graph.reshape(graph.reshape(b, (5, 1)), (5,)) * 2], 0))
    check(twice, lambda b: np.concatenate([b, b * 2]), arrays[2:])


def test_gradients_of_the_gradients_of_a_convolution(rng):
    x, w, y = (2, 2, 5, 4), (3, 2, 3, 2), (2, 3, 3, 4)
    data = graph(lambda dy, w: graph.conv_backward_data(dy, w, x, padding=(1, 0), stride=(2, 1), dilation=1))
    filters = graph(lambda x, dy: graph.conv_backward_filter(x, dy, w, padding=(1, 0), stride=(2, 1)))
    forward = graph(lambda x, w: graph.conv(x, w, padding=(1, 0), stride=(2, 1)))
    y = (2, 3, 3, 3)
    a, b, c = normal(rng, x, w, y)
    # <y, conv(x, w)> is linear in each of the three.
    value = (forward(a, b) * c).sum()
    assert math.isclose((data(c, b) * a).sum(), value, rel_tol=1e-12)
    assert math.isclose((filters(a, c) * b).sum(), value, rel_tol=1e-12)
    for function, arrays in ((data, [c, b]), (filters, [a, c])):
        check(function, lambda p, q, function=function: function(p, q), arrays)


def test_two_layers_in_one_function(rng):
    @graph
    def layers(x, v, w):
        return graph.tanh(graph.conv(graph.silu(graph.conv(x, v)), w) + x)

    def formula(x, v, w):
        return np.tanh(conv(ACTIVATIONS["silu"](conv(x, v)), w) + x)

    check(layers, formula, normal(rng, (2, 3, 4, 3), (4, 3, 1, 1), (3, 4, 1, 1)), "nhwc")


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_smaller_dtypes_against_float64(dtype, layout, rng):
    @graph
    def layer(x, w, b):
        return graph.silu(graph.conv(x, w, padding=1) + b)

    exact = [a.astype(devices.DTYPES[dtype]) for a in normal(rng, (3, 5, 7, 5), (6, 5, 3, 3), (1, 6, 1, 1))]
    seed = rng.standard_normal((3, 6, 7, 5)).astype(devices.DTYPES[dtype])
    small = [leaf(place(a, "cpu", layout)) for a in exact]
    large = [leaf(a.astype(np.float64)) for a in exact]
    y, wanted = layer(*small), layer(*large)
    assert y.dtype == devices.DTYPES[dtype]
    assert devices.memory_layout(y.data) == layout
    assert_close(y.data, wanted.data, dtype, factor=2)
    y.backward(place(seed, "cpu", layout))
    wanted.backward(seed.astype(np.float64))
    for name, a, b in zip("xwb", small, large, strict=True):
        assert a.grad.dtype == a.dtype
        assert_close(a.grad, b.grad, dtype, name, factor=4)


def test_reductions_are_written_in_the_compute_dtype(rng):
    x = rng.standard_normal(SHAPE).astype(np.float16)
    function = graph(lambda x: (x * 2, graph.sum(x), graph.genstats(x)[1]))
    assert [a.dtype for a in function(x)] == [np.float16, np.float32, np.float32]
    assert_close(function(x)[1], x.astype(np.float64).sum(keepdims=True), "float32", factor=4)


# --- parameters -------------------------------------------------------------------------------------------------------


class Model(flcuda.nn.Module):
    def __init__(self, dtype, layout):
        super().__init__()
        rng = np.random.default_rng(3)
        self.w = flcuda.Parameter(rng.standard_normal((6, 5, 3, 3)), dtype, layout=layout, device="cpu", name="w")
        self.b = flcuda.Parameter(rng.standard_normal((1, 6, 1, 1)), dtype, layout=layout, device="cpu", name="b")


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_gradients_are_written_into_the_arena_and_accumulate(dtype, layout, rng):
    @graph
    def layer(x, w, b):
        return graph.silu(graph.conv(x, w, padding=1) + b)

    model = Model(dtype, layout)
    (arena,) = model.arenas
    x, seed = (place(a.astype(dtype), "cpu", layout) for a in normal(rng, (2, 5, 4, 3), (2, 6, 4, 3)))

    def gradients():
        tensors = [flcuda.Tensor(x), leaf(model.w.data.copy()), leaf(model.b.data.copy())]
        layer(*tensors).backward(seed)
        return tensors[1].grad, tensors[2].grad

    once = gradients()
    for times in (1, 2, 3):
        layer(flcuda.Tensor(x), model.w, model.b).backward(seed)
        for parameter, wanted in zip((model.w, model.b), once, strict=True):
            assert parameter.grad is parameter.buffer
            assert np.shares_memory(parameter.grad, arena.grad)
            assert_close(parameter.grad, times * wanted.astype(np.float64), dtype, factor=4)
    arena.zero_grad()
    layer(x, model.w, model.b).backward(seed)
    np.testing.assert_array_equal(model.w.grad, once[0])
    np.testing.assert_array_equal(model.b.grad, once[1])


def unaligned(a, offset=4):
    """A copy of an array whose address is not a multiple of 16."""
    memory = np.empty(a.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + offset
    made = memory[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
    made[...] = a
    return made


class Gpu:
    """A device that only the planning takes for a GPU."""

    kind = "cuda"
    xp = np


def aligned_only(problem):
    """Plans on the CPU and refuses what the graph source refuses; all that runs is aligned as its problem says."""
    if isinstance(problem, GraphProblem) and any(problem.alignment_of(name) < 16 for name in problem.operands):
        raise CudnnNotSupportedError("flcuda.find", 3000, "not aligned", "CUDNN_STATUS_NOT_SUPPORTED")
    plan = finder.plan(problem, device="cpu")

    def run(*operands):
        for name, a in zip(problem.operands, operands, strict=True):
            assert a.ctypes.data % problem.alignment_of(name) == 0
        plan.run(*operands)

    return types.SimpleNamespace(run=run)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("offset", [0, 8])
def test_no_graph_writes_into_a_target_that_is_not_aligned(offset, accumulate, rng):
    @graph
    def layer(x, w, s, b):
        return graph.silu(graph.conv(x, w) * s + b)

    arrays = normal(rng, (2, 3, 4, 5), (4, 3, 1, 1), (2, 4, 4, 5), (1, 4, 1, 1))
    seed = rng.standard_normal((2, 4, 4, 5))
    wanted = [leaf(a) for a in arrays]
    layer(*wanted).backward(seed)
    trace, device = layer._traced(tuple(arrays), (), (True,) * 4)
    call = function_module.Call(trace, device)
    grad = described(trace.derivative.seed, seed, None, device)
    before = normal(rng, *(a.shape for a in arrays))
    targets = {i: GradTarget(unaligned(a, offset), accumulate) for i, a in enumerate(before)}
    backward = Backward(trace, call.saving, grad, targets, Gpu(), aligned_only)
    direct = {name for p in backward.problems for name in p.outputs if p.alignment_of(name) < 16}
    assert direct == ({"dx", "dw"} if offset else set())
    found = backward.run(call.environment(*call.run(arrays)), seed, targets)
    for i, tensor in enumerate(wanted):
        written = found[i] is targets[i].array
        # Convolutions accumulate, graphs do not.
        assert written == (not accumulate or i < 2)
        total = before[i] + tensor.grad if written and accumulate else tensor.grad
        np.testing.assert_allclose(found[i], total, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_no_graph_takes_is_copied(monkeypatch, rng):
    # What the GPU asks for.
    monkeypatch.setattr(function_module, "must_copy", lambda a: a.ctypes.data % 16 > 0)
    real = finder.plan
    reads = []

    def plan(problem, **options):
        made = real(problem, **options)

        def run(*operands):
            reads.extend(a.ctypes.data % 16 for a in operands)
            made.run(*operands)

        return types.SimpleNamespace(run=run)

    monkeypatch.setattr(finder, "plan", plan)
    tensor = leaf(rng.standard_normal(SHAPE))
    seed = unaligned(rng.standard_normal(SHAPE), 8)
    graph(lambda x: graph.exp(x))(tensor).backward(seed)
    np.testing.assert_allclose(tensor.grad, seed * np.exp(tensor.data))
    assert not any(reads)


def test_a_parameter_used_twice_and_in_a_chain(rng):
    function = graph(lambda a, b: a * b)
    p = flcuda.Parameter(rng.standard_normal(SHAPE), "float64", device="cpu")
    y = function(p, p)
    F.scale(y, 3.0).backward(np.ones(SHAPE))
    np.testing.assert_allclose(p.grad, 6 * p.data)
    x = leaf(rng.standard_normal(SHAPE))
    function(function(x, x), x).backward(np.ones(SHAPE))
    np.testing.assert_allclose(x.grad, 3 * x.data**2)


def test_only_wanted_gradients_are_planned_and_given(rng):
    @graph
    def layer(x, w, b):
        return graph.silu(graph.conv(x, w) + b)

    x, w, b = normal(rng, (2, 3, 4, 4), (5, 3, 3, 3), (1, 5, 1, 1))
    kinds = [type(p) for p in layer.backward_problems(x, w, b)]
    assert kinds == [GraphProblem, ConvolutionProblem, ConvolutionProblem]
    assert [p.outputs for p in layer.backward_problems(x, w, b)] == [("d_swish1", "d_sum1"), ("dx",), ("dw",)]
    (only,) = layer.backward_problems(x, w, leaf(b))
    assert only.outputs == ("d_sum1",)
    assert [p.kind for p in layer.backward_problems(x, leaf(w), b)] == ["graph", "backward_filter"]
    assert layer.backward_problems(x, flcuda.Tensor(w), b) == ()
    tensor = leaf(b)
    layer(flcuda.Tensor(x), w, tensor).backward(np.ones((2, 5, 2, 2)))
    assert tensor.grad.shape == b.shape
    relu = graph(lambda x, w, b: graph.relu(graph.conv(x, w) + b))
    # The mask is in the output, so that the forward graph writes nothing more.
    assert set(relu.backward_problems(x, w, b)[0].inputs) == {"grad", "relu1"}


# --- what no engine takes ---------------------------------------------------------------------------------------------


def refusing(monkeypatch, refuses):
    """Lets the finder refuse problems as cuDNN does; returns what it planned."""
    planned = []
    real = finder.plan

    def plan(problem, **options):
        if refuses(problem):
            raise CudnnNotSupportedError("flcuda.find", 3000, f"refused: {problem}", "CUDNN_STATUS_NOT_SUPPORTED")
        planned.append(problem)
        return real(problem, **options)

    monkeypatch.setattr(finder, "plan", plan)
    return planned


def methods(problem):
    return [operation.method for operation in problem.operations] if isinstance(problem, GraphProblem) else []


def layer_with_bias(x, w, b):
    return graph.silu(graph.conv(x, w, padding=1) + b)


def layer_formula(x, w, b):
    return ACTIVATIONS["silu"](conv(x, w, (1, 1)) + b)


LAYER_SHAPES = ((2, 3, 4, 3), (5, 3, 3, 3), (1, 5, 1, 1))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_backward_computes_again_what_forward_cannot_write(monkeypatch, layout, rng):
    planned = refusing(monkeypatch, lambda p: isinstance(p, GraphProblem) and {"silu1", "add1"} <= set(p.outputs))
    check(graph(layer_with_bias), layer_formula, normal(rng, *LAYER_SHAPES), layout)
    assert [p.outputs for p in planned] == [("silu1",), ("silu1",), ("add1",), ("d_swish1", "d_sum1"), ("dx",), ("dw",)]


def test_values_that_are_computed_again_one_by_one(monkeypatch, rng):
    @graph
    def layer(x, w):
        return graph.silu(graph.conv(graph.relu(x * 2), w))

    def formula(x, w):
        return ACTIVATIONS["silu"](conv(np.maximum(x * 2, 0), w))

    planned = refusing(monkeypatch, lambda p: isinstance(p, GraphProblem) and {"relu1", "conv1"} <= set(p.outputs))
    check(layer, formula, normal(rng, (2, 3, 4, 3), (5, 3, 2, 2)), "nhwc")
    assert [p.outputs for p in planned[2:4]] == [("relu1",), ("conv1",)]
    assert planned[3].inputs == ("w", "relu1") or planned[3].inputs == ("relu1", "w")


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_refused_backward_graph_is_split(monkeypatch, layout, rng):
    planned = refusing(monkeypatch, lambda p: {"pointwise", "reduction"} <= set(methods(p)))
    check(graph(layer_with_bias), layer_formula, normal(rng, *LAYER_SHAPES), layout)
    assert [p.outputs for p in planned[2:]] == [("d_swish1",), ("d_sum1",), ("dx",), ("dw",)]


@pytest.mark.parametrize("shape", [(1, 3, 1, 1), (2, 1, 1, 5), (1, 1, 1, 1), (2, 3, 1, 1), (1, 3, 4, 5)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_refused_sums_are_done_by_the_bias_kernel(monkeypatch, layout, shape, rng):
    refusing(monkeypatch, lambda p: "reduction" in methods(p))
    check(
        graph(lambda a, b: graph.silu(a * b)),
        lambda a, b: ACTIVATIONS["silu"](a * b),
        normal(rng, SHAPE, shape),
        layout,
    )


def test_a_refused_chain_is_done_one_by_one(monkeypatch, rng):
    planned = refusing(monkeypatch, lambda p: len(methods(p)) > 1 and "grad" in p.inputs)
    function = graph(lambda x: graph.tanh(graph.exp(x)))
    check(function, lambda x: np.tanh(np.exp(x)), normal(rng, SHAPE))
    assert all(len(methods(p)) == 1 for p in planned[2:])


RANK_3 = {
    "one shape": ((2, 3, 4, 5), (2, 3, 4, 5), (2, 60)),
    "a channel": ((2, 3, 4, 5), (1, 3, 1, 1), (2, 3, 20)),
    "a row": ((2, 3, 4, 5), (1, 1, 4, 1), (6, 4, 5)),
    "a value": ((2, 3, 4, 5), (1, 1, 1, 1), (2, 60)),
    "an image": ((2, 3, 4, 5), (1, 3, 4, 5), (2, 60)),
    "a pixel": ((2, 3, 4, 5), (1, 1, 4, 5), (6, 20)),
    "a matrix": ((4, 5), (4, 1), (4, 5)),
    "sizes of 1": ((1, 3, 1, 5), (1, 1, 1, 5), (3, 5)),
    "a vector": ((7,), (1,), (7,)),
    "more dimensions": ((2, 3, 2, 2, 3), (2, 3, 1, 1, 1), (6, 12)),
}


@pytest.mark.parametrize("refused_reductions", [False, True])
@pytest.mark.parametrize("name", RANK_3)
def test_a_refused_pointwise_graph_is_done_at_rank_3(monkeypatch, name, refused_reductions, rng):
    first, second, sizes = RANK_3[name]

    def refuses(problem):
        reduction = "reduction" in methods(problem)
        return len(problem.tensors[0].shape) != 3 and (refused_reductions or not reduction)

    planned = refusing(monkeypatch, refuses)
    check(graph(lambda a, b: graph.silu(a * b)), lambda a, b: ACTIVATIONS["silu"](a * b), normal(rng, first, second))
    assert planned[0].results[0].shape == (*(1,) * (3 - len(sizes)), *sizes)
    # An operand with one dimension of three would be read wrong.
    for problem in planned:
        if len(sizes) == 3 and "pointwise" in methods(problem):
            for tensor in problem.tensors:
                assert len(tensor.shape) > 3 or sum(size > 1 for size in tensor.shape) != 1


@pytest.mark.parametrize(
    ("shape", "layout", "works"),
    [
        ((2, 1, 1, 1), "nhwc", True),
        ((1, 3, 1, 1), "nhwc", True),
        ((1, 3, 4, 1), "nhwc", False),
        (SHAPE, "strided", False),
    ],
)
def test_what_can_be_done_at_rank_3(monkeypatch, shape, layout, works, rng):
    refusing(monkeypatch, lambda problem: len(problem.tensors[0].shape) != 3)
    a, b = (place(x, "cpu", layout) for x in normal(rng, SHAPE, shape))
    function = graph(lambda a, b: a * b)
    if works:
        np.testing.assert_array_equal(function(a, b), a * b)
    else:
        with pytest.raises(CudnnNotSupportedError, match=r"refused: graph float64 fma; a float64 2x3x4x5"):
            function(a, b)


def test_what_nothing_takes_raises_with_the_reason(monkeypatch, rng):
    x, w, b = normal(rng, *LAYER_SHAPES)
    refusing(monkeypatch, lambda p: p.kind == "backward_data")
    tensor = leaf(x)
    y = graph(layer_with_bias)(tensor, w, b)
    with pytest.raises(CudnnNotSupportedError, match="refused: backward_data n2 c3 4x3 k5 3x3 p1") as caught:
        y.backward(np.ones(y.shape))
    assert "while the gradient of silu1 was planned" in caught.value.__notes__
    place_of = f"layer_with_bias ({__file__}:{layer_with_bias.__code__.co_firstlineno})"
    assert f"while the backward pass of {place_of} was planned" in caught.value.__notes__
    monkeypatch.undo()
    refusing(monkeypatch, lambda p: p.kind == "graph")
    with pytest.raises(CudnnNotSupportedError, match="refused: graph float64 fma; x float64") as caught:
        graph(layer_with_bias)(leaf(x), w, b)
    assert f"while {place_of} was planned" in caught.value.__notes__
    assert not np.any(np.isnan(x))


# --- calls ------------------------------------------------------------------------------------------------------------


def test_the_body_runs_once_a_signature(rng):
    ran = []

    @graph
    def function(x, scale=2.0):
        ran.append(x.shape)
        return x * scale

    a, b = normal(rng, SHAPE, SHAPE)
    for array in (a, b, a):
        np.testing.assert_array_equal(function(array), 2 * array)
    assert len(ran) == 1
    function(a.astype(np.float32))
    function(a[:1])
    function(place(a, "cpu", "nhwc"))
    np.testing.assert_array_equal(function(a, scale=3), 3 * a)
    np.testing.assert_array_equal(function(a, 3), 3 * a)
    function(a, 3.0)
    assert len(ran) == 7
    function(leaf(a))
    function(leaf(b))
    with flcuda.policy(deterministic=True):
        function(a)
    assert len(ran) == 9
    function(a, scale=3)
    function(x=a)
    assert len(ran) == 10


def test_threads_have_traces_of_their_own(rng):
    ran = []

    @graph
    def function(x):
        ran.append(threading.get_ident())
        return graph.exp(x)

    x = rng.standard_normal(SHAPE)
    results = []

    together = threading.Barrier(3)

    def work():
        together.wait()
        for _ in range(3):
            tensor = leaf(x)
            y = function(tensor)
            y.backward(np.ones(SHAPE))
            results.append((y.data, tensor.grad))
        together.wait()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ran) == len(set(ran)) == 3
    assert len(results) == 9
    for y, gradient in results:
        np.testing.assert_allclose(y, np.exp(x))
        np.testing.assert_allclose(gradient, np.exp(x))


def test_backward_on_another_thread(rng):
    tensor = leaf(rng.standard_normal(SHAPE))
    y = graph(lambda x: graph.exp(x))(tensor)
    thread = threading.Thread(target=lambda: y.backward(np.ones(SHAPE)))
    thread.start()
    thread.join()
    np.testing.assert_allclose(tensor.grad, y.data)


def test_static_arguments_can_be_words_tuples_and_none(rng):
    @graph
    def function(x, *, mode, padding=None):
        return graph.reduce(mode, x, padding)

    x = rng.standard_normal(SHAPE)
    np.testing.assert_allclose(function(x, mode="add", padding=(0, 1)), x.sum((0, 1), keepdims=True))
    np.testing.assert_allclose(function(x, mode="max"), x.max(keepdims=True))
    with pytest.raises(TypeError, match=r"argument 3, \[0\], is neither an array nor hashable"):
        function(x, mode="add", padding=[0])
    with pytest.raises(TypeError, match=r"argument 3, \(\[0\], 1\), is neither an array nor hashable"):
        function(x, mode="add", padding=([0], 1))


def test_several_results_and_arguments(rng):
    @graph
    def function(*arrays, factor=1.0):
        first, second = arrays
        return first * factor, second, first, first + second

    a, b = normal(rng, SHAPE, SHAPE)
    results = function(a, b, factor=2.0)
    assert isinstance(results, tuple)
    for result, wanted in zip(results, (2 * a, b, a, a + b), strict=True):
        np.testing.assert_array_equal(result, wanted)
    assert not any(np.shares_memory(result, a) for result in results)
    tensors = function(flcuda.Tensor(a), b)
    assert [type(t) for t in tensors] == [flcuda.Tensor] * 4
    with pytest.raises(FlcudaError, match="returns 4 tensors and an argument requires a gradient"):
        function(leaf(a), b)
    (single,) = graph(lambda x: (x,))(a)
    np.testing.assert_array_equal(single, a)


class Producer:
    """An array of another library."""

    def __init__(self, array):
        self.array = array
        self.shape = array.shape

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_arrays_by_dlpack_and_with_odd_strides(rng):
    function = graph(lambda x, y: x * y + y)
    a, b = normal(rng, SHAPE, SHAPE)
    wanted = a * b + b
    np.testing.assert_array_equal(function(Producer(a), Producer(b)), wanted)
    tensor = leaf(a)
    function(tensor, Producer(b)).backward(np.ones(SHAPE))
    np.testing.assert_array_equal(tensor.grad, b)
    flipped = a[:, ::-1, :, ::-1]
    np.testing.assert_array_equal(function(flipped, b), flipped * b + b)
    assert devices.memory_layout(function(flipped, place(b, "cpu", "nhwc"))) == "nhwc"
    assert function.problem(flipped, place(b, "cpu", "nhwc")).layout_of("x") == "nhwc"
    wide = np.broadcast_to(a[:1], SHAPE)
    np.testing.assert_array_equal(function(wide, b), wide * b + b)
    tensor = leaf(b)
    y = function(wide, tensor)
    y.backward(np.broadcast_to(np.ones(()), SHAPE))
    np.testing.assert_array_equal(tensor.grad, wide + 1)


def test_compute_and_intermediate_and_math(rng):
    x = rng.standard_normal(SHAPE)
    w = rng.standard_normal((4, 3, 1, 1))

    def layer(x, w):
        return graph.exp(graph.conv(x, w))

    def problem(dtype, **settings):
        return graph(layer, **settings).problem(x.astype(dtype), w.astype(dtype))

    assert (problem(np.float64).compute, problem(np.float64).math) == ("float64", "fma")
    assert (problem(np.float32).compute, problem(np.float32).math) == ("float32", "fma")
    assert (problem(np.float16).compute, problem(np.float16).math) == ("float32", "tensor_op")
    assert problem(np.float32, math="tensor_op").precision == "tf32"
    assert problem(np.float16, intermediate="float16").intermediate == "float16"
    assert problem(np.float32, compute="float32").results[0].dtype == "float32"
    with pytest.raises(ValueError, match="compute: 'half' is none of float64"):
        graph(compute="half")
    with pytest.raises(ValueError, match="math: 'tf32' is none of fma, tensor_op"):
        graph(math="tf32")
    with pytest.raises(TypeError, match="function: 3 is no function"):
        graph(3)
    with pytest.raises(TypeError, match=r"function: functools.partial.* is no function"):
        graph(functools.partial(layer, w=3))
    assert graph(layer).__name__ == "layer"
    assert "layer" in repr(graph(layer))


# --- errors -----------------------------------------------------------------------------------------------------------


def message(function, *args, kind=(TypeError, ValueError), **kwargs):
    with pytest.raises(kind) as caught:
        function(*args, **kwargs)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_errors_name_operation_tensor_remedy_and_line(rng):
    @graph
    def layer(x, w, b):
        y = graph.conv(x, w, padding=1)
        return graph.silu(y + b)  # the line

    x, w, b = normal(rng, (2, 3, 4, 4), (8, 3, 3, 3), (8,))
    text = message(layer, x, w, b)
    assert "add: Traced('b', (8,), float64) and Traced('conv1', (2, 8, 4, 4), float64) differ in rank" in text
    assert "reshape b to (1, 8, 1, 1)" in text
    assert "test_traced.py" in text
    assert "# the line" in text
    text = message(layer, x, w[:, :2], b)
    assert "convolution_forward 'conv1': w: 'w' (8, 2, 3, 3) float64 has 2 channels" in text
    text = message(layer, x, w.astype(np.float32), b)
    assert "differ in dtype" in text
    assert "reshape b to (1, 1, 1, 5)" in message(graph(lambda x, b: x + b), np.ones(SHAPE), np.ones(5))
    assert "does not fit the others" in message(graph(lambda x, b: x + b), np.ones(SHAPE), np.ones((1, 2, 1, 1)))


def test_python_control_flow_is_refused():
    x = np.ones(SHAPE)
    for function in (
        lambda x: x if x > 0 else -x,
        lambda x: max(x),
        lambda x: x * float(x),
        lambda x: x * int(x),
        lambda x: np.exp(x),
        lambda x: x[0],
        lambda x: np.asarray(x),
        lambda x: x * len(x),
    ):
        assert "its tensors have no values here" in message(graph(function), x) or "Traced" in message(
            graph(function), x
        )


def test_what_is_no_argument_is_refused():
    x = np.ones(SHAPE)
    other = np.ones(SHAPE)
    for function in (lambda x: x + other, lambda x: other * x, lambda x: graph.maximum(x, flcuda.Tensor(other))):
        text = message(graph(function), x)
        assert "(2, 3, 4, 5) that is no argument of the traced function" in text
        assert "must be passed as an argument" in text
    assert "expected a tensor or a number" in message(graph(lambda x: x + "2"), x)
    assert "expected a tensor or a number" in message(graph(lambda x: x * True), x)
    assert "no operand is a tensor of a traced function" in message(graph.silu, x)
    leaked = []
    graph(lambda x: leaked.append(x) or x * 2)(x)
    assert "different calls" in message(graph(lambda x: x + leaked[0]), x)


def test_wrong_calls_and_results():
    x = np.ones(SHAPE)
    assert "no argument is an array" in message(graph(lambda x: x), 3)
    assert "returned None" in message(graph(lambda x: None), x)
    assert "returned no tensor" in message(graph(lambda x: ()), x)
    assert "returned the truth value greater1" in message(graph(lambda x: x > 0), x)
    inner = graph(lambda x: x * 2)
    assert "call test_wrong_calls_and_results.<locals>.<lambda>.__wrapped__ there" in message(
        graph(lambda x: inner(x) + 1), x
    )
    np.testing.assert_array_equal(graph(lambda x: inner.__wrapped__(x) + 1)(x), 2 * x + 1)
    assert "missing a required argument: 'y'" in message(graph(lambda x, y: x + y), x)
    assert "shape (0, 3, 4, 5) has no elements" in message(graph(lambda x: x + 1), x[:0])
    assert "dtype" in message(graph(lambda x: x + 1), x.astype(np.complex64))
    assert "axis: 4 is no dimension" in message(graph(lambda x: graph.sum(x, 4)), x)
    assert "does not hold the elements" in message(graph(lambda x: graph.reshape(x, (7, -1))), x)

    class Layer:
        @graph
        def forward(self, x):
            return x

    assert "is called as a method" in message(lambda: Layer().forward(x))


def test_arguments_that_nothing_depends_on(rng):
    a, b = normal(rng, SHAPE, SHAPE)
    function = graph(lambda a, b: graph.exp(a) if graph.exp(b) is not None else a)
    np.testing.assert_allclose(function(a, b), np.exp(a))
    x, y = leaf(a), leaf(b)
    function(x, y).backward(np.ones(SHAPE))
    np.testing.assert_allclose(x.grad, np.exp(a))
    assert y.grad is None
    z = function(a, y)
    assert z.requires_grad
    z.backward(np.ones(SHAPE))
    assert y.grad is None


def test_names_that_a_graph_takes_itself(rng):
    a, b, c = normal(rng, SHAPE, SHAPE, SHAPE)
    function = graph(lambda out, grad, exp1: graph.exp(out) * grad + exp1)
    check(function, lambda out, grad, exp1: np.exp(out) * grad + exp1, [a, b, c])


def test_arguments_whose_names_are_alike(rng):
    a, b, c = normal(rng, SHAPE, SHAPE, SHAPE)
    np.testing.assert_array_equal(graph(lambda *a, a_0: a[0] * 2 + a_0)(a, a_0=b), 2 * a + b)
    check(graph(lambda a_0, *a: a[0] * 2 + a_0), lambda a, b: 2 * b + a, [a, b])
    check(graph(lambda out, out_, _: out * 2 + out_ * _), lambda a, b, c: 2 * a + b * c, [a, b, c])


def test_a_number_that_is_no_argument_stays_what_it_was(rng):
    (x,) = normal(rng, SHAPE)
    factor = 2.0
    function = graph(lambda x: x * factor)
    np.testing.assert_array_equal(function(x), 2 * x)
    factor = 3.0
    # As the documentation says.
    np.testing.assert_array_equal(function(x), 2 * x)
    assert "is read when it is traced" in " ".join(type(function).__doc__.split())


# --- what it would do -------------------------------------------------------------------------------------------------


def test_problem_is_one_that_reads_back(rng):
    @graph
    def layer(x, w, b):
        return graph.silu(graph.conv(x, w, padding=((1, 0), (1, 1)), dilation=[1, 1]) + b)

    arrays = [a.astype(np.float32) for a in normal(rng, (2, 3, 4, 5), (8, 3, 2, 3), (1, 8, 1, 1))]
    problem = layer.problem(*arrays)
    assert isinstance(problem, GraphProblem)
    assert GraphProblem.parse(str(problem)) == problem
    assert problem.inputs == ("x", "w", "b")
    np.testing.assert_allclose(flcuda.plan(problem, device="cpu")(*arrays), layer(*arrays), rtol=1e-6)


def test_explain(rng):
    @graph
    def layer(x, w, b):
        return graph.silu(graph.conv(x, w, padding=1) + b)

    arrays = [a.astype(np.float32) for a in normal(rng, (2, 3, 4, 5), (8, 3, 3, 3), (1, 8, 1, 1))]
    plain = layer.explain(*arrays)
    assert [part.title for part in plain.parts] == ["forward"]
    explanation = layer.explain(*map(leaf, arrays))
    assert [part.title for part in explanation.parts] == ["forward", "backward 1", "backward 2", "backward 3"]
    text = str(explanation)
    assert max(map(len, text.splitlines())) <= 80
    assert "numpy" in text
    assert "backward_filter n2 c3 4x5 k8 3x3 p1 s1 float32 nchw" in text
    content = json.loads(explanation.to_json())
    assert content["parts"][0]["rows"][0]["source"] == "reference"
    assert GraphProblem.parse(content["parts"][1]["problem"]).outputs == ("d_swish1", "d_sum1")


@graph
def doubled(x):
    """Twice x."""
    return x * 2


def test_a_traced_function_is_copied_and_named_as_a_function(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, types.SimpleNamespace(doubled=doubled))
    assert copy.deepcopy({"layer": doubled})["layer"] is doubled
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    assert (doubled.__name__, doubled.__doc__, doubled.__module__) == ("doubled", "Twice x.", __name__)
