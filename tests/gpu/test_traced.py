"""Traced functions on the GPU: values and gradients against float64 on the host."""

import json

import numpy as np
import pytest
from helpers import place, to_numpy

import flcuda
from flcuda import device as devices
from flcuda import finder
from flcuda.errors import CudnnNotSupportedError, FlcudaError

graph = flcuda.graph

# Shares of the largest value: operands are equal in both, what differs is rounding, in TF32 of operands too.
TOLERANCE = {"float16": 6e-3, "bfloat16": 5e-2, "tf32": 8e-3, "float32": 1e-4}
# An odd batch, odd sizes, channels that fill no tile.
SHAPES = ((3, 16, 13, 11), (24, 16, 3, 3), (1, 24, 1, 1))


@pytest.fixture
def _heuristic():
    with flcuda.policy(mode="heuristic"):
        yield


def settings(precision):
    return ("float32", {"math": "tensor_op"}) if precision == "tf32" else (precision, {})


def rounded(arrays, dtype):
    return [a.astype(devices.DTYPES[dtype]) for a in arrays]


def normal(rng, *shapes):
    # Filters are scaled so that results are about 1.
    return [rng.standard_normal(s) * (np.prod(s[1:]) ** -0.5 if i == 1 else 1) for i, s in enumerate(shapes)]


def leaves(arrays):
    return [flcuda.Tensor(a, requires_grad=True) for a in arrays]


def compare(actual, expected, precision, name):
    found = to_numpy(actual).astype(np.float64)
    assert found.shape == expected.shape, name
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error <= TOLERANCE[precision], f"{name}: {error}"


def check(function, arrays, precision="float16", layout="nhwc", positive=False):
    """Runs a function and its backward pass on the GPU, and in float64 on the host with the same operands."""
    dtype, chosen = settings(precision)
    traced = graph(function, **chosen)
    given = rounded(arrays, dtype)
    tensors = leaves([place(a, "cuda", layout) for a in given])
    exact = leaves([a.astype(np.float64) for a in given])
    wanted = graph(function)(*exact)
    seed = np.random.default_rng(7).standard_normal(wanted.shape)
    seed = (np.abs(seed) if positive else seed).astype(devices.DTYPES[dtype])
    wanted.backward(seed.astype(np.float64))
    y = traced(*tensors)
    if y.dtype != devices.DTYPES[dtype]:
        seed = seed.astype(y.dtype)
    y.backward(place(seed, "cuda", layout))
    compare(y.data, wanted.data, precision, "result")
    for i, (a, b) in enumerate(zip(tensors, exact, strict=True)):
        assert a.grad.dtype == a.dtype
        compare(a.grad, b.grad, precision, f"gradient of argument {i}")
    return traced, tensors


def conv_bias(activation):
    def layer(x, w, b):
        return getattr(graph, activation)(graph.conv(x, w, padding=1) + b)

    return layer


@pytest.mark.parametrize(
    ("precision", "activation"),
    [
        ("float16", "silu"),
        ("float16", "relu"),
        ("float16", "gelu"),
        ("bfloat16", "silu"),
        ("bfloat16", "tanh"),
        ("tf32", "silu"),
        ("tf32", "sigmoid"),
    ],
)
@pytest.mark.usefixtures("_heuristic")
def test_layers(precision, activation, rng):
    check(conv_bias(activation), normal(rng, *SHAPES), precision)


@pytest.mark.parametrize("precision", ["float16", "tf32"])
def test_a_layer_by_the_candidates_that_were_measured_and_verified(precision, rng):
    arrays = normal(rng, *SHAPES)
    traced, tensors = check(conv_bias("silu"), arrays, precision)
    explanation = traced.explain(*tensors)
    text = str(explanation)
    assert max(map(len, text.splitlines())) <= 80
    assert explanation.parts[0].title == "forward"
    content = json.loads(explanation.to_json())
    for part in content["parts"]:
        if part["refusal"] is None:
            assert any(row["median_ms"] is not None for row in part["rows"]), part
    assert content["parts"][0]["refusals"]
    # Other arrays of the kind, and the same numbers: the plans that were kept give the same.
    again = [place(to_numpy(tensor.data), "cuda", "nhwc") for tensor in tensors]
    with flcuda.no_grad():
        np.testing.assert_array_equal(to_numpy(traced(*again)), to_numpy(traced(*tensors).data))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.usefixtures("_heuristic")
def test_strides_and_groups(stride, rng):
    def layer(x, w, b):
        return graph.silu(graph.conv(x, w, padding=1, stride=stride) + graph.reshape(b, (1, -1, 1, 1)))

    check(layer, normal(rng, (5, 32, 15, 9), (32, 32, 3, 3), (32,)))
    if stride == 1:
        check(layer, normal(rng, (5, 32, 15, 9), (32, 16, 3, 3), (32,)))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, y: graph.tanh(x * y + 2) / (1 + graph.exp(-x)), ((3, 16, 7, 5), (3, 16, 7, 5))),
        (lambda x, s, b: graph.gelu(x * s + b), ((3, 16, 7, 5), (1, 16, 1, 1), (1, 16, 1, 1))),
        (lambda x, y: graph.where(x > y, x * 2, y), ((3, 16, 7, 5), (3, 16, 7, 5))),
        (lambda x, y: graph.maximum(x, y) - abs(x), ((3, 16, 7, 5), (3, 16, 7, 5))),
        (
            lambda x, w, z: graph.sigmoid(graph.conv(x, w, padding=1) + z),
            ((3, 16, 7, 5), (16, 16, 3, 3), (3, 16, 7, 5)),
        ),
    ],
    ids=["chain", "scale and bias", "selection", "maximum", "residual"],
)
@pytest.mark.usefixtures("_heuristic")
def test_other_functions(function, shapes, rng):
    check(function, normal(rng, *shapes))


@pytest.mark.usefixtures("_heuristic")
def test_matrix_products(rng):
    check(lambda a, b: graph.tanh(a @ b), normal(rng, (2, 64, 32), (2, 32, 48)), layout="nchw")


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("shape", [(1, 16, 1, 1), (3, 1, 7, 5), (1, 1, 1, 1)])
@pytest.mark.usefixtures("_heuristic")
def test_sums_of_broadcast_operands_whether_an_engine_takes_them_or_not(shape, refused, monkeypatch, rng):
    if refused:
        real = finder.plan

        def plan(problem, **options):
            if any(operation.method == "reduction" for operation in getattr(problem, "operations", ())):
                raise CudnnNotSupportedError("flcuda.find", 3000, "refused", "CUDNN_STATUS_NOT_SUPPORTED")
            return real(problem, **options)

        monkeypatch.setattr(finder, "plan", plan)
    # Positive, so that sums are far from 0.
    a, b = (rng.uniform(0.5, 1.5, each) for each in ((3, 16, 7, 5), shape))
    check(lambda a, b: graph.silu(a * b), [a, b], positive=True)


@pytest.mark.parametrize("precision", ["float16", "float32"])
@pytest.mark.parametrize("shape", [(1, 16, 1, 1), (3, 1, 1, 1), (1, 1, 7, 1), (3, 16, 7, 5)])
@pytest.mark.usefixtures("_heuristic")
def test_pointwise_functions_in_nchw(shape, precision, rng):
    a, b = (rng.uniform(0.5, 1.5, each) for each in ((3, 16, 7, 5), shape))
    check(lambda a, b: graph.silu(a * b), [a, b], precision, layout="nchw", positive=True)


@pytest.mark.usefixtures("_heuristic")
def test_reductions_come_in_float32(rng):
    x = place(rng.standard_normal((3, 16, 7, 5)).astype(np.float16), "cuda", "nhwc")
    y = graph(lambda x: graph.sum(x * x, (0, 2, 3)))(x)
    assert y.dtype == np.float32
    compare(y, (to_numpy(x).astype(np.float64) ** 2).sum((0, 2, 3), keepdims=True), "float32", "sum")


class Model(flcuda.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        values = normal(np.random.default_rng(3), *SHAPES)[1:]
        self.w, self.b = (
            flcuda.Parameter(a, dtype, layout="nhwc", device="cuda", name=name)
            for a, name in zip(values, "wb", strict=True)
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.usefixtures("_heuristic")
def test_gradients_are_written_into_the_arena_and_accumulate(dtype, rng):
    layer = graph(conv_bias("silu"))
    model = Model(dtype)
    (arena,) = model.arenas
    x = rounded(normal(rng, SHAPES[0]), dtype)[0]
    seed = rounded([rng.standard_normal((3, 24, 13, 11))], dtype)[0]
    exact = leaves([x.astype(np.float64), *(to_numpy(p.data).astype(np.float64) for p in (model.w, model.b))])
    layer(*exact).backward(seed.astype(np.float64))
    begin = arena.grad.data.ptr
    for times in (1, 2):
        tensor = flcuda.Tensor(place(x, "cuda", "nhwc"))
        layer(tensor, model.w, model.b).backward(place(seed, "cuda", "nhwc"))
        assert tensor.grad is None
        for parameter, wanted in zip((model.w, model.b), exact[1:], strict=True):
            assert parameter.grad is parameter.buffer
            assert begin <= parameter.grad.data.ptr < begin + arena.grad.nbytes
            compare(parameter.grad, times * wanted.grad, dtype, f"{parameter.name}, {times} times")


@pytest.mark.usefixtures("_heuristic")
def test_a_training_step_in_a_cuda_graph(rng):
    cupy = devices.cupy()
    layer = graph(conv_bias("silu"))
    model = Model("float16")
    (arena,) = model.arenas
    x = place(normal(rng, SHAPES[0])[0].astype(np.float16), "cuda", "nhwc")
    seed = place(rng.standard_normal((3, 24, 13, 11)).astype(np.float16), "cuda", "nhwc")
    cupy.cuda.Device().synchronize()

    def step():
        arena.zero_grad()
        y = layer(flcuda.Tensor(x), model.w, model.b)
        y.backward(seed)
        return y.data

    stream = cupy.cuda.Stream(non_blocking=True)
    # The same bits are asked for.
    with stream, flcuda.policy(deterministic=True):
        for _ in range(2):
            y = step()
            del y
        stream.synchronize()
        stream.begin_capture()
        try:
            y = step()
        finally:
            captured = stream.end_capture()
        # The graph reads the input as it is when it is launched.
        x[...] = x[::-1].copy()
        captured.launch()
        stream.synchronize()
        found = [to_numpy(a).copy() for a in (y, model.w.grad, model.b.grad)]
        wanted = [step(), model.w.grad, model.b.grad]
        stream.synchronize()
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, to_numpy(b))


def test_a_search_inside_a_capture_is_an_error():
    cupy = devices.cupy()
    x = cupy.ones((3, 16, 7, 5), np.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(FlcudaError, match="capture"):
                graph(lambda x: graph.exp(x * 0.5))(x)
        finally:
            stream.end_capture()


@pytest.mark.usefixtures("_heuristic")
def test_arrays_that_repeat_memory_or_run_backward_are_copied(rng):
    cupy = devices.cupy()
    a, b = (rng.standard_normal((3, 16, 7, 5)).astype(np.float32) for _ in range(2))
    function = graph(lambda x, y: x * y + y)
    y = place(b, "cuda", "nhwc")
    wide = cupy.broadcast_to(place(a, "cuda")[:1], a.shape)
    compare(function(wide, y), a[:1] * b + b.astype(np.float64), "float32", "broadcast")
    flipped = place(a, "cuda")[::-1, :, ::-1]
    compare(function(flipped, y), a[::-1, :, ::-1] * b + b.astype(np.float64), "float32", "backward")
    # A gradient in another layout than the result's is brought into that.
    tensor = flcuda.Tensor(y, requires_grad=True)
    function(wide, tensor).backward(place(b, "cuda", "nchw"))
    compare(tensor.grad, (a[:1] + 1.0) * b, "float32", "gradient")
    # One that is not aligned is copied.
    memory = cupy.empty(b.size + 1, np.float32)
    shifted = memory[1:].reshape(3, 7, 5, 16).transpose(0, 3, 1, 2)
    shifted[...] = place(b, "cuda", "nhwc")
    tensor = flcuda.Tensor(y, requires_grad=True)
    function(wide, tensor).backward(shifted)
    compare(tensor.grad, (a[:1] + 1.0) * b, "float32", "gradient of one that is not aligned")


def test_why_not(rng):
    arrays = [place(a.astype(np.float16), "cuda", "nchw") for a in normal(rng, *SHAPES)]
    with pytest.raises(CudnnNotSupportedError) as caught:
        graph(conv_bias("silu"))(*arrays)
    text = str(caught.value)
    assert "is not nhwc, which 16-bit engines want" in text
    assert "NOT_SUPPORTED" in text
    explanation = graph(conv_bias("silu")).explain(*arrays)
    assert explanation.parts[0].refusal is not None
    assert "nothing can be used" in str(explanation)


def test_devices_are_not_mixed(rng):
    x = rng.standard_normal((3, 16, 7, 5)).astype(np.float32)
    with pytest.raises(ValueError, match="x is on cpu, y is on cuda:0"):
        graph(lambda x, y: x + y)(x, place(x, "cuda"))
