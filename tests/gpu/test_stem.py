"""The kernels of pooling, of batch norm, ReLU and pooling in one, and of the loss, on a GPU."""

import itertools
from typing import Any

import numpy as np
import pytest
from helpers import TOLERANCES, assert_close, bits, place, to_numpy

from flcuda import device as devices
from flcuda import functional as F
from flcuda import kernel_loader, nn
from flcuda.autograd import Tensor
from flcuda.device import DTYPES, Device, cupy
from flcuda.ops import batch_norm, loss, pooling

FAST_SHAPES = [(2, 8, 9, 8), (1, 4, 8, 4), (3, 12, 1, 12), (5, 64, 112, 112), (1, 1024, 6, 4), (3, 36, 7, 20)]
# No vectors of channels or columns, or none that are aligned.
OTHER_SHAPES = [(2, 5, 9, 7), (1, 2051, 3, 3), (2, 3, 33, 21)]


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead() -> None:
    """One after another the modules would take most of the time of these tests."""
    kinds = kernel_loader.SUFFIXES.values()
    parts = itertools.product(range(1, 7), kinds)
    modules = [("pooling", (f"POOL_PART={part}", f"POOL_KIND={kind}")) for part, kind in parts]
    # Of float64 there are none.
    missing = {(f"POOL_PART={part}", "POOL_KIND=f64") for part in (2, 3)}
    modules = [(name, defines) for name, defines in modules if defines not in missing]
    kernel_loader.prepare([*modules, *(("loss", loss.defines_of(kind)) for kind in kinds)])


def _wide(dtype: str) -> Any:
    return np.float64 if dtype == "float64" else np.float32


def _norm(x: np.ndarray, rng: np.random.Generator, dtype: str, device: str) -> batch_norm.Norm:
    values, channels = x.astype(np.float64), x.shape[1]
    weight, bias = rng.normal(size=channels), rng.normal(size=channels) - 0.5
    weight[0] = 0
    inverse = 1 / np.sqrt(values.var(axis=(0, 2, 3)) + 1e-5)
    vectors = (weight, bias, values.mean(axis=(0, 2, 3)), inverse)
    return batch_norm.Norm(*(place(vector.astype(_wide(dtype)), device) for vector in vectors))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [*FAST_SHAPES, *OTHER_SHAPES])
def test_max_pool(shape: tuple[int, ...], dtype: str, layout: str, rng: np.random.Generator) -> None:
    values = np.round(rng.normal(size=shape) * 3) / 2
    values[rng.random(shape) < 0.05] = -np.inf
    values[rng.random(shape) < 0.01] = np.nan
    x = values.astype(DTYPES[dtype])
    y, indices = pooling.max_pool_forward(x, 3, 2, 1)
    found, places = pooling.max_pool_forward(place(x, "cuda", layout), 3, 2, 1)
    np.testing.assert_array_equal(to_numpy(found).astype(np.float64), y.astype(np.float64))
    np.testing.assert_array_equal(places.get(), indices)
    dy = rng.normal(size=y.shape).astype(DTYPES[dtype])
    dx = pooling.max_pool_backward(place(dy, "cuda", layout), places, shape, 3, 2, 1)
    assert_close(dx, pooling.max_pool_backward(dy, indices, shape, 3, 2, 1).astype(np.float64), dtype)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [*FAST_SHAPES[:1], *FAST_SHAPES[3:], *OTHER_SHAPES])
def test_pooled_batch_norm(shape: tuple[int, ...], dtype: str, layout: str, rng: np.random.Generator) -> None:
    x = (rng.normal(size=shape) * 2 + 5).astype(DTYPES[dtype])
    seed = int(rng.integers(1 << 30))
    host, card = (_norm(x, np.random.default_rng(seed), dtype, device) for device in ("cpu", "cuda"))
    y, saved = pooling.batch_norm_relu_max_pool_forward(x, host, 3, 2, 1)
    found, kept = pooling.batch_norm_relu_max_pool_forward(place(x, "cuda", layout), card, 3, 2, 1)
    assert_close(found, y.astype(np.float64), dtype, factor=2)
    # A fused product and sum may have another sign than NumPy's at zero.
    differ = kept.indices.get() != saved.indices
    assert np.abs(y[differ].astype(np.float64)).max(initial=0) < 1e-5
    dys = [rng.normal(size=y.shape).astype(y.dtype) for _ in range(3)]
    for dy in dys:
        dy[differ] = 0
    ticket = cupy().zeros(shape[1] + 1, np.uint32)
    before = [rng.normal(size=shape[1]).astype(_wide(dtype)) for _ in range(2)]
    for count in (1, 2, 3):
        wanted = pooling.batch_norm_relu_max_pool_backward(
            dys[:count], saved, into=batch_norm.Into(*(each.copy() for each in before), True)
        )
        runs = []
        for _ in range(2):
            into = batch_norm.Into(*(place(each, "cuda") for each in before), True)
            gradients = [place(dy, "cuda", layout) for dy in dys[:count]]
            runs.append(pooling.batch_norm_relu_max_pool_backward(gradients, kept, into=into, ticket=ticket))
        assert bits(runs[0]) == bits(runs[1])
        assert not ticket.any()
        compute = "float64" if dtype == "float64" else "float32"
        for number, (result, expected) in enumerate(zip(runs[0], wanted, strict=True)):
            kind = compute if number else dtype
            assert_close(result, expected.astype(np.float64), kind, f"{count}: {number}", 16)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_more_elements_than_31_bits_count(layout: str) -> None:
    shape = (2, 64, 1 << 12, (1 << 12) + 4)
    device = Device("cuda", cupy().cuda.runtime.getDevice())
    x = devices.zeros(shape, DTYPES["float16"], device=device, layout=layout)
    assert x.size > 1 << 31
    x[-1, :, -1, -1] = 4
    ones, zeros = cupy().ones(64, np.float32), cupy().zeros(64, np.float32)
    norm = batch_norm.Norm(ones, zeros, zeros, ones)
    y, saved = pooling.batch_norm_relu_max_pool_forward(x, norm, 3, 2, 1)
    np.testing.assert_array_equal(y[-1, :, -1, -1].get(), np.full(64, 4))
    assert int((y != 0).sum()) == 64
    dx, dweight, dbias = pooling.batch_norm_relu_max_pool_backward([y], saved)
    np.testing.assert_array_equal(dbias.get(), np.full(64, 4))
    np.testing.assert_array_equal(dweight.get(), np.full(64, 16))
    # All but the means of the gradient, which are nothing in float16, goes to the last place.
    np.testing.assert_allclose(dx[-1, :, -1, -1].get().astype(np.float64), np.full(64, 4), rtol=1e-3)
    assert int((abs(dx) > 1e-3).sum()) == 64


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_the_function_of_a_stem_is_that_of_its_parts(precision: str, rng: np.random.Generator) -> None:
    """At the size of a residual network; in 16 bits ties move some gradients to another place."""
    shape = (8, 64, 112, 112)
    x = rng.normal(size=shape).astype(DTYPES[precision])
    results = []
    for fused in (False, True):
        layer = nn.BatchNorm2D(64, precision=precision, device="cuda")
        leaf = Tensor(place(x, "cuda", "nhwc"), requires_grad=True)
        if fused:
            y = F.batch_norm_relu_max_pool2d(leaf, layer.state(), 3, 2, 1, training=True)
        else:
            y = F.max_pool2d(F.relu(F.batch_norm(leaf, layer.state(), training=True)), 3, 2, 1)
        F.add(y, F.scale(y, 0.5)).backward(cupy().full(y.shape, 0.25, y.dtype))
        results.append(
            [to_numpy(a).astype(np.float64) for a in (y.data, leaf.grad, layer.weight.grad, layer.bias.grad)]
        )
    np.testing.assert_array_equal(results[0][0], results[1][0])
    wide = np.abs(results[0][1] - results[1][1]) > 8 * TOLERANCES[precision] * np.abs(results[0][1]).max()
    assert wide.mean() < (0 if precision == "float32" else 0.02) + 1e-6
    for found, wanted in zip(results[1][2:], results[0][2:], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0.02, atol=0.005 * np.abs(wanted).max())


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(128, 512, 7, 7), (3, 2050, 5, 3), (1, 3, 1, 1), (2, 260, 300, 2)])
def test_global_pool(shape: tuple[int, ...], dtype: str, layout: str, rng: np.random.Generator) -> None:
    x = rng.normal(size=shape).astype(DTYPES[dtype])
    y = pooling.global_avg_pool_forward(place(x, "cuda", layout))
    assert_close(y, pooling.global_avg_pool_forward(x).astype(np.float64), dtype, factor=4)
    dx = pooling.global_avg_pool_backward(y, shape, layout)
    expected = pooling.global_avg_pool_backward(to_numpy(y), shape, layout)
    np.testing.assert_array_equal(to_numpy(dx), expected)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("classes", [3, 10, 1000, 5001])
def test_loss_and_counts(classes: int, dtype: str, rng: np.random.Generator) -> None:
    logits = np.round(rng.normal(size=(300, classes)) * 4).astype(DTYPES[dtype])
    target = rng.integers(0, classes, 300)
    target[::2] = logits.astype(np.float64).argmax(axis=1)[::2]
    target[5:9] = -100
    correct = [np.array([1, 2]), place(np.array([1, 2]), "cuda")]
    value, saved = loss.cross_entropy_forward(logits, target, 0.1, correct=correct[0])
    found, kept = loss.cross_entropy_forward(place(logits, "cuda"), place(target, "cuda"), 0.1, correct=correct[1])
    np.testing.assert_array_equal(correct[1].get(), correct[0])
    compute = "float64" if dtype == "float64" else "float32"
    assert_close(found, np.asarray(value, np.float64), compute, factor=8)
    dloss = np.asarray(1024.0, value.dtype)
    wanted = loss.cross_entropy_backward(dloss, saved)
    assert_close(loss.cross_entropy_backward(place(dloss, "cuda"), kept), wanted.astype(np.float64), dtype, factor=8)
    again, _ = loss.cross_entropy_forward(place(logits, "cuda"), place(target, "cuda"), 0.1)
    assert bits([again]) == bits([found])


def test_a_captured_loss_adds_up_its_counts(rng: np.random.Generator) -> None:
    """The words that a launch needs zero are zeroed in the graph."""
    logits, target = place(rng.normal(size=(64, 10)).astype(np.float32), "cuda"), place(rng.integers(0, 10, 64), "cuda")
    correct = cupy().zeros(2, np.int64)
    expected, _ = loss.cross_entropy_forward(logits, target)
    stream = cupy().cuda.Stream(non_blocking=True)
    cupy().cuda.get_current_stream().synchronize()
    with stream:
        loss.cross_entropy_forward(logits, target, correct=correct)
        stream.begin_capture()
        value, _ = loss.cross_entropy_forward(logits, target, correct=correct)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    once = correct.get() // 4
    np.testing.assert_array_equal(correct.get(), 4 * once)
    assert once[0] == (logits.get().argmax(axis=1) == target.get()).sum()
    assert bits([value]) == bits([expected])
