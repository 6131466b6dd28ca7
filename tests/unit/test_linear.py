"""The linear op on the CPU."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from flcuda.device import memory_layout
from flcuda.ops import linear
from flcuda.ops.linear import linear_backward_data, linear_backward_weight, linear_forward

TOLERANCE = {"float64": 1e-13, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def close(actual, wanted):
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), wanted, atol=TOLERANCE[str(actual.dtype)] * (1 + np.abs(wanted).max())
    )


def wide(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 1, 1), (64, 33, 10), (3, 1, 5)])
def test_forward_and_gradients(shape, dtype, rng):
    n, c, k = shape
    x, w, dy, bias = (rng.standard_normal(s).astype(dtype) for s in ((n, c), (k, c), (n, k), (k,)))
    wx, ww, wdy, wbias = wide(x, w, dy, bias)
    y = linear_forward(x, w)
    assert y.dtype == x.dtype
    close(y, wx @ ww.T)
    close(linear_forward(x, w, bias), wx @ ww.T + wbias)
    close(linear_backward_data(dy, w), wdy @ ww)
    close(linear_backward_weight(x, dy), wdy.T @ wx)
    for function, operands, wanted in (
        (linear_backward_data, (dy, w), wdy @ ww),
        (linear_backward_weight, (x, dy), wdy.T @ wx),
    ):
        out = rng.standard_normal(wanted.shape).astype(dtype)
        (before,) = wide(out.copy())
        assert function(*operands, out=out, accumulate=True) is out
        close(out, before + wanted)
        function(*operands, out=out)
        close(out, wanted)


def test_out_with_strides(rng):
    x, w = rng.standard_normal((4, 6)), rng.standard_normal((3, 6))
    out = np.full((3, 8), np.nan).T[::2]
    assert linear_forward(x, w, out=out) is out
    close(out, x @ w.T)
    close(linear_forward(x[:, ::2], w[:, ::2]), x[:, ::2] @ w[:, ::2].T)


def test_an_empty_batch(rng):
    x, w = np.empty((0, 6)), rng.standard_normal((3, 6))
    y = linear_forward(x, w)
    assert y.shape == (0, 3)
    assert linear_backward_data(y, w).shape == (0, 6)
    np.testing.assert_array_equal(linear_backward_weight(x, y), np.zeros((3, 6)))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x, w, y: linear_forward(x[0], w), ValueError, "x"),
        (lambda x, w, y: linear_forward(x[:, :2], w), ValueError, "w"),
        (lambda x, w, y: linear_forward(x, w, np.ones(4)), ValueError, "bias"),
        (lambda x, w, y: linear_forward(x, w.astype(np.float32)), TypeError, "w"),
        (lambda x, w, y: linear_forward(x, w, out=np.empty((4, 4))), ValueError, "out"),
        (lambda x, w, y: linear_forward(x, w, out=np.empty((4, 3), np.float32)), TypeError, "out"),
        (lambda x, w, y: linear_forward(x, w, math="fast"), ValueError, "math"),
        (lambda x, w, y: linear_forward(x, w, math="tensor_op"), ValueError, "math"),
        (lambda x, w, y: linear_backward_data(y, w[:2]), ValueError, "w"),
        (lambda x, w, y: linear_backward_data(y, w, accumulate=True), ValueError, "accumulate"),
        (lambda x, w, y: linear_backward_weight(x, y[:2]), ValueError, "dy"),
        (lambda x, w, y: linear_forward(x.astype(int), w.astype(int)), TypeError, "x"),
    ],
)
def test_bad_input_names_the_argument(call, error, match, rng):
    with pytest.raises(error, match=match):
        call(rng.standard_normal((4, 6)), rng.standard_normal((3, 6)), rng.standard_normal((4, 3)))


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=lambda d: d.__name__)
def test_overflow_is_infinite_without_a_warning(dtype):
    """A loss scale that is too large overflows on purpose; the gradient check sees it."""
    large = np.full((2, 2), np.finfo(dtype).max)
    out = np.zeros((2, 2), dtype)
    for result in (
        linear_forward(large, large),
        linear_backward_data(large, large, out=out),
        linear_backward_weight(large, large, out=out, accumulate=True),
    ):
        assert np.isinf(result).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 1, 1), (1, 6, 4), (33, 24, 10), (3, 1, 5)])
def test_the_convolution_that_a_gpu_would_run(shape, dtype, rng, monkeypatch):
    """Rows as images, and for tensor cores as pixels of an nhwc image."""
    n, c, k = shape
    x, w, dy = (rng.standard_normal(s).astype(dtype) for s in ((n, c), (k, c), (n, k)))
    wx, ww, wdy = wide(x, w, dy)
    fake = SimpleNamespace(is_cuda=lambda _: True, require_same_device=lambda **_: None)
    monkeypatch.setattr(linear, "devices", fake)
    seen = []
    convolution = linear.convolution

    def watched(math=None):
        class Watched:
            def __getattr__(self, name):
                def call(first, second, *arguments, **options):
                    seen.append(memory_layout(first))
                    return getattr(convolution(), name)(first, second, *arguments, **options)

                return call

        return Watched()

    monkeypatch.setattr(linear, "convolution", watched)
    for math in (None, "tensor_op"):
        seen.clear()
        for function, operands, wanted in (
            (linear_forward, (x, w), wx @ ww.T),
            (linear_backward_data, (dy, w), wdy @ ww),
            (linear_backward_weight, (x, dy), wdy.T @ wx),
        ):
            result = function(*operands, math=math)
            assert result.shape == wanted.shape
            assert result.flags.c_contiguous
            close(result, wanted)
            out = np.full(wanted.shape, np.nan, dtype)
            assert function(*operands, out=out, math=math) is out
            close(out, wanted)
            # A part of a larger matrix is no dense image.
            out = np.full((wanted.shape[0], 2 * wanted.shape[1]), np.nan, dtype)[:, ::2]
            assert function(*operands, out=out, math=math) is out
            close(out, wanted)
        tensor_cores = math == "tensor_op" or dtype == np.float16
        assert ("nhwc" in seen) == (tensor_cores and n > 1)
