"""The linear op on CUDA: a 1x1 convolution that the finder chose."""

import ml_dtypes
import numpy as np
import pytest

from flcuda import device as devices
from flcuda.ops.linear import linear_backward_data, linear_backward_weight, linear_forward

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 3e-3, "bfloat16": 1.6e-2}


def close(actual, wanted, scale):
    error = np.abs(devices.cupy().asnumpy(actual).astype(np.float64) - wanted).max()
    assert error <= TOLERANCE[str(actual.dtype)] * scale.max(), f"{error} of {scale.max()}"


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("shape", [(8, 16, 8), (5, 7, 3), (1, 1, 1), (64, 512, 10), (33, 24, 1000)])
def test_forward_and_gradients(shape, dtype, rng):
    cupy = devices.cupy()
    n, c, k = shape
    on_host = [rng.standard_normal(s).astype(dtype) for s in ((n, c), (k, c), (n, k), (k,))]
    x, w, dy, bias = (a.astype(np.float64) for a in on_host)
    gx, gw, gdy, gbias = (cupy.asarray(a) for a in on_host)
    close(linear_forward(gx, gw), x @ w.T, abs(x) @ abs(w.T))
    close(linear_forward(gx, gw, gbias), x @ w.T + bias, abs(x) @ abs(w.T) + abs(bias))
    for function, operands, wanted, scale in (
        (linear_backward_data, (gdy, gw), dy @ w, abs(dy) @ abs(w)),
        (linear_backward_weight, (gx, gdy), dy.T @ x, abs(dy.T) @ abs(x)),
    ):
        result = function(*operands)
        assert result.shape == wanted.shape
        close(result, wanted, scale)
        before = rng.standard_normal(wanted.shape).astype(dtype)
        out = cupy.asarray(before)
        assert function(*operands, out=out, accumulate=True) is out
        close(out, wanted + before.astype(np.float64), scale + 1)
        out.fill(np.nan)
        function(*operands, out=out)
        close(out, wanted, scale)


def test_strict_float32_never_rounds_to_tf32():
    cupy = devices.cupy()
    # 1 + 2^-12 is a float32; TF32, with 10 bits of mantissa, makes it 1.
    x, w = (cupy.full(shape, 1 + 2.0**-12, np.float32) for shape in ((64, 256), (32, 256)))
    y = cupy.asnumpy(linear_forward(x, w)).astype(np.float64)
    np.testing.assert_allclose(y, 256 * (1 + 2.0**-12) ** 2, rtol=2e-5)


def test_an_empty_batch():
    cupy = devices.cupy()
    x, w = cupy.empty((0, 6), np.float32), cupy.ones((3, 6), np.float32)
    y = linear_forward(x, w, cupy.ones(3, np.float32))
    assert y.shape == (0, 3)
    assert linear_backward_data(y, w).shape == (0, 6)
    assert not cupy.asnumpy(linear_backward_weight(x, y)).any()
