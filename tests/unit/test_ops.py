"""Every op on the CPU device: all dtypes and layouts against float64, and float64 against finite differences."""

from typing import Any

import numpy as np
import pytest
from helpers import LAYOUTS, TOLERANCES, OpCase, assert_close, check_op, numeric_gradient, place
from op_cases import cases

from flcuda import kernel_loader
from flcuda import rng as philox
from flcuda.device import DTYPES
from flcuda.ops import batch_norm, bias, elementwise, loss, pooling
from flcuda.ops.channel_reduction import finish_grid, reduction

CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(case: OpCase) -> None:
    for dtype in TOLERANCES:
        for layout in LAYOUTS:
            check_op(case, dtype=dtype, layout=layout, device="cpu")


# --- float64 against finite differences -------------------------------------------------------------------------------


def test_relu_gradient(rng: np.random.Generator) -> None:
    x = rng.normal(size=(2, 3, 4))
    x[np.abs(x) < 1e-3] = 0.5
    dy = rng.normal(size=x.shape)
    dx = elementwise.relu_backward(dy, elementwise.relu_forward(x))
    assert_close(dx, numeric_gradient(lambda x: elementwise.relu_forward(x) * dy, x), "float64", factor=1e5)


def test_relu_gradient_at_zero_is_zero() -> None:
    np.testing.assert_array_equal(elementwise.relu_backward(np.ones(3), np.array([0.0, -0.0, 2.0])), [0, 0, 1])


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_gradient(training: bool, rng: np.random.Generator) -> None:
    x = rng.normal(2, 3, (3, 2, 2, 3))
    weight, shift = rng.normal(size=2), rng.normal(size=2)
    mean, variance = rng.normal(size=2), rng.uniform(0.5, 2, 2)
    dy = rng.normal(size=x.shape)

    def forward(x: Any, weight: Any, shift: Any) -> Any:
        if training:
            return batch_norm.batch_norm_training(x, weight, shift, None, None, None, 0.1, 1e-5)[0] * dy
        return batch_norm.batch_norm_inference(x, weight, shift, mean, variance, 1e-5) * dy

    if training:
        _, saved_mean, saved_inverse = batch_norm.batch_norm_training(x, weight, shift, None, None, None, 0.1, 1e-5)
        found = batch_norm.batch_norm_backward(dy, x, weight, saved_mean, saved_inverse)
    else:
        found = batch_norm.batch_norm_inference_backward(dy, x, weight, mean, variance, 1e-5)
    assert_close(found[0], numeric_gradient(lambda x: forward(x, weight, shift), x), "float64", factor=1e5)
    assert_close(found[1], numeric_gradient(lambda w: forward(x, w, shift), weight), "float64", factor=1e5)
    assert_close(found[2], numeric_gradient(lambda b: forward(x, weight, b), shift), "float64", factor=1e5)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_batch_norm_keeps_its_digits_at_a_large_mean(dtype: str, layout: str, rng: np.random.Generator) -> None:
    # float16 has a step of 0.5 at 1000, so the spread is chosen for the values to differ
    exact = rng.normal(1000, 8, (16, 3, 9, 9)).astype(DTYPES[dtype]).astype(np.float64)
    wide = np.float64 if dtype == "float64" else np.float32
    ones, zeros = np.ones(3, wide), np.zeros(3, wide)
    y, mean, inverse = batch_norm.batch_norm_training(
        place(exact.astype(DTYPES[dtype]), "cpu", layout), ones, zeros, None, None, None, 0.1, 0.0
    )
    expected_mean = exact.mean(axis=(0, 2, 3))
    deviation = exact.std(axis=(0, 2, 3))
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-7)
    np.testing.assert_allclose(inverse, 1 / deviation, rtol=1e-6)
    normalised = (exact - expected_mean[:, None, None]) / deviation[:, None, None]
    assert_close(y, normalised, dtype, factor=8)


def test_max_pool_gradient(rng: np.random.Generator) -> None:
    x = rng.permutation(2 * 2 * 5 * 6).reshape(2, 2, 5, 6).astype(np.float64)
    y, indices = pooling.max_pool_forward(x, (3, 2), 2, 1)
    dy = rng.normal(size=y.shape)
    dx = pooling.max_pool_backward(dy, indices, x.shape, (3, 2), 2, 1)
    numeric = numeric_gradient(lambda x: pooling.max_pool_forward(x, (3, 2), 2, 1)[0] * dy, x, 1e-3)
    assert_close(dx, numeric, "float64", factor=1e3)


def test_average_pool_gradients(rng: np.random.Generator) -> None:
    x = rng.normal(size=(2, 2, 5, 6))
    dy = rng.normal(size=pooling.avg_pool_forward(x, 3, 2, 1).shape)
    dx = pooling.avg_pool_backward(dy, x.shape, 3, 2, 1)
    assert_close(dx, numeric_gradient(lambda x: pooling.avg_pool_forward(x, 3, 2, 1) * dy, x), "float64", factor=1e5)
    dy = rng.normal(size=(2, 2))
    dx = pooling.global_avg_pool_backward(dy, x.shape, "nhwc")
    assert_close(dx, numeric_gradient(lambda x: pooling.global_avg_pool_forward(x) * dy, x), "float64", factor=1e5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_gradient(smoothing: float, rng: np.random.Generator) -> None:
    logits = rng.normal(size=(4, 5))
    target = np.array([1, -100, 4, 0])
    _, saved = loss.cross_entropy_forward(logits, target, smoothing)
    found = loss.cross_entropy_backward(np.array(2.0), saved)
    numeric = numeric_gradient(lambda x: 2 * loss.cross_entropy_forward(x, target, smoothing)[0], logits)
    assert_close(found, numeric, "float64", factor=1e5)


def test_bias_gradient(rng: np.random.Generator) -> None:
    y, values, dy = rng.normal(size=(2, 3, 2)), rng.normal(size=3), rng.normal(size=(2, 3, 2))
    numeric = numeric_gradient(lambda b: bias.bias_forward(y.copy(), b) * dy, values)
    assert_close(bias.bias_backward(dy), numeric, "float64", factor=1e5)


# --- what is particular to an op --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_dropout_drops_scales_and_moves_on(layout: str, rng: np.random.Generator) -> None:
    x = place(rng.normal(3, 0.1, (7, 6, 11, 13)).astype(np.float32), "cpu", layout)
    state = philox.State(4)
    y, mask = elementwise.dropout_forward(x, 0.25, state)
    assert int(state.counter[0]) == -(-x.size // 4)
    np.testing.assert_array_equal(y, np.where(mask, x * np.float32(1 / 0.75), 0))
    assert abs(mask.mean() - 0.75) < 0.02
    words = philox.words(4, 0, x.size, philox.DROPOUT_STREAM)
    in_memory = mask.transpose(0, 2, 3, 1) if layout == "nhwc" else mask
    np.testing.assert_array_equal(in_memory.ravel(), (words >> 8) >= 2**22)
    np.testing.assert_array_equal(elementwise.dropout_backward(x, mask, 0.25), y)
    _, second = elementwise.dropout_forward(x, 0.25, state)
    assert not np.array_equal(mask, second)
    state.counter[...] = 0
    np.testing.assert_array_equal(elementwise.dropout_forward(x, 0.25, state)[1], mask)


@pytest.mark.parametrize(("p", "kept"), [(0.0, 1), (1.0, 0)])
def test_dropout_at_its_ends(p: float, kept: int) -> None:
    x = np.array([1.0, np.inf, -2.0], np.float32)
    y, mask = elementwise.dropout_forward(x, p, philox.State(0))
    np.testing.assert_array_equal(mask, [kept] * 3)
    np.testing.assert_array_equal(y, x if kept else [0, 0, 0])


@pytest.mark.parametrize("source", TOLERANCES)
@pytest.mark.parametrize("target", TOLERANCES)
def test_cast_rounds_to_nearest(source: str, target: str, rng: np.random.Generator) -> None:
    x = place(rng.normal(size=(3, 4, 5, 6)).astype(DTYPES[source]), "cpu", "nhwc")
    found = elementwise.cast(x, target)
    assert found.dtype == DTYPES[target]
    assert found.strides[1] == found.itemsize
    np.testing.assert_array_equal(found, x.astype(DTYPES[target]))
    out = np.empty(x.shape, DTYPES[target])
    assert elementwise.cast(x, target, out=out) is out
    np.testing.assert_array_equal(out, found)


def test_scale_reads_a_device_value(rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 5)).astype(np.float32)
    np.testing.assert_array_equal(elementwise.scale(x, np.array(65536.0)), x * np.float32(65536))
    np.testing.assert_array_equal(elementwise.scale(x, np.array([0.5])), x * np.float32(0.5))


def test_pooling_takes_whole_numbers_of_numpy() -> None:
    y, indices = pooling.max_pool_forward(X, np.int64(2), (np.int32(1), 2), np.uint8(1))
    np.testing.assert_array_equal(y, pooling.max_pool_forward(X, 2, (1, 2), 1)[0])
    assert indices.shape == y.shape == (2, 3, 5, 3)


def test_no_channels_are_no_blocks() -> None:
    """A block would read what is not there; launching nothing needs no GPU."""
    for shape in ((4, 0, 5, 5), (0, 0, 1, 1)):
        for layout in ("nchw", "nhwc"):
            grid, block, _ = reduction(shape, layout)
            assert 0 in grid
            kernel_loader.launch_blocks("bias", "nothing", grid, block)
    kernel_loader.launch_blocks("bias", "nothing", finish_grid(0), (32, 1))
    kernel_loader.launch("bias", "nothing", 0)


def test_nan_and_infinity_pass_through() -> None:
    x = np.array([np.nan, np.inf, -np.inf, -1.0], np.float32)
    np.testing.assert_array_equal(elementwise.relu_forward(x), [np.nan, np.inf, 0, 0])
    image = np.full((1, 1, 4, 4), -np.inf)
    image[0, 0, 1, 1] = np.nan
    y, indices = pooling.max_pool_forward(image, 2, 2, 1)
    np.testing.assert_array_equal(np.isnan(y[0, 0]), [[False, False, False], [False, True, False], [False] * 3])
    assert (y[0, 0][~np.isnan(y[0, 0])] == -np.inf).all()
    # the window at the corner lies over padding but for its last place
    assert indices[0, 0, 0, 0] == 3
    assert indices[0, 0, 1, 1] == 0


def test_cumulative_average_counts_first() -> None:
    x = np.arange(12.0).reshape(2, 2, 3)
    mean, var, count = np.zeros(2), np.ones(2), np.zeros(1, np.int64)
    ones, zeros = np.ones(2), np.zeros(2)
    for step, values in enumerate((x, 3 * x), 1):
        batch_norm.batch_norm_training(values, ones, zeros, mean, var, count, None, 1e-5)
        assert count[0] == step
    axes = (0, 2)
    np.testing.assert_allclose(mean, (x.mean(axis=axes) + 3 * x.mean(axis=axes)) / 2)
    np.testing.assert_allclose(var, (x.var(axis=axes, ddof=1) * (1 + 9)) / 2)


def test_all_rows_ignored_gives_nan_and_zero_gradients() -> None:
    logits = np.ones((2, 3), np.float32)
    value, saved = loss.cross_entropy_forward(logits, np.array([7, 7]), ignore_index=7)
    assert value.shape == ()
    assert np.isnan(value)
    np.testing.assert_array_equal(loss.cross_entropy_backward(np.array(1, np.float32), saved), np.zeros((2, 3)))


def test_cross_entropy_of_large_logits_is_finite() -> None:
    value, saved = loss.cross_entropy_forward(np.array([[60000, -60000, 0]], np.float16), np.array([1]))
    assert value == 120000
    gradient = loss.cross_entropy_backward(np.array(1, np.float32), saved)
    np.testing.assert_array_equal(gradient, [[1, -1, 0]])


@pytest.mark.parametrize("label", [-1, 3, 2**31 - 1])
def test_an_invalid_label_is_named(label: int) -> None:
    with pytest.raises(ValueError, match=rf"target: {label} at index 1"):
        loss.cross_entropy_forward(np.ones((2, 3)), np.array([0, label]))


def test_empty_batches() -> None:
    empty = np.empty((0, 3, 4, 4), np.float32)
    assert elementwise.relu_forward(empty).shape == empty.shape
    np.testing.assert_array_equal(bias.bias_backward(empty), np.zeros(3))
    assert pooling.max_pool_forward(empty, 2)[0].shape == (0, 3, 2, 2)
    value, _ = loss.cross_entropy_forward(np.empty((0, 3)), np.empty(0, np.int64))
    assert np.isnan(value)


X = np.ones((2, 3, 4, 4), np.float32)
V = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: elementwise.relu_forward(np.ones(3, np.int32)), TypeError, "x: expected an array of float64.*int32"),
        (lambda: elementwise.relu_forward([1.0]), TypeError, "x: .*list"),
        (lambda: elementwise.add(X, X[:1]), ValueError, r"b: expected shape \(2, 3, 4, 4\)"),
        (lambda: elementwise.add(X, X.astype(np.float64)), TypeError, "b: expected an array of float32, got float64"),
        (lambda: elementwise.copy(X, np.broadcast_to(V, (2, 3))), ValueError, "out"),
        (lambda: elementwise.copy(V, np.lib.stride_tricks.as_strided(V, (3,), (0,))), ValueError, "overlaps"),
        (lambda: elementwise.copy(V, np.ones(3, np.int32)), TypeError, "float32 to int32"),
        (lambda: elementwise.copy([1.0], V), TypeError, "src: .*list"),
        (
            lambda: elementwise.accumulate_(np.lib.stride_tricks.as_strided(V, (3,), (0,)), V),
            ValueError,
            "out: .*overl",
        ),
        (lambda: elementwise.fill(np.lib.stride_tricks.as_strided(V, (3,), (0,)), 1), ValueError, "out: .*overlaps"),
        (lambda: bias.bias_forward(np.lib.stride_tricks.as_strided(V, (2, 3), (0, 4)), V), ValueError, "y: .*overlaps"),
        (lambda: elementwise.add(X, [1.0]), TypeError, "b: expected an array of float32, got list"),
        (lambda: elementwise.cast(X, "int32"), TypeError, "dtype: .*int32"),
        (lambda: elementwise.scale(X, np.ones(2)), ValueError, "s: expected one element"),
        (
            lambda: elementwise.scale(X, np.ones(1, np.float32)),
            TypeError,
            "s: expected an array of float64, got float32",
        ),
        (lambda: elementwise.dropout_forward(X, 1.5, philox.State(0)), ValueError, "p must be from 0 to 1, got 1.5"),
        (lambda: bias.bias_forward(X, np.ones(4, np.float32)), ValueError, r"bias: expected shape \(3,\), got \(4,\)"),
        (lambda: bias.bias_forward(V, V), ValueError, "y: expected"),
        (lambda: bias.bias_backward(X, accumulate=True), ValueError, "accumulate"),
        (
            lambda: batch_norm.batch_norm_training(X[:1, :, :1, :1], V, V, V, V, None, 0.1, 1e-5),
            ValueError,
            "two values",
        ),
        (lambda: batch_norm.batch_norm_training(X, V, V, V, V, None, None, 1e-5), ValueError, "num_batches"),
        (lambda: batch_norm.batch_norm_training(X, V, V, V, None, None, 0.1, 1e-5), ValueError, "pending"),
        (lambda: batch_norm.batch_norm_training(X, V, V, V, V, None, 1.5, 1e-5), ValueError, "momentum.*1.5"),
        (lambda: batch_norm.batch_norm_training(X, V, V, V, V, None, 0.1, -1.0), ValueError, "eps.*-1.0"),
        (lambda: batch_norm.batch_norm_inference(X, V, V, V.astype(np.float64), V, 0), TypeError, "running_mean"),
        (lambda: batch_norm.batch_norm_backward(X, X, V, V, V, accumulate=True), ValueError, "accumulate"),
        (lambda: batch_norm.batch_norm_backward(X[:1], X, V, V, V), ValueError, "dy"),
        (lambda: pooling.max_pool_forward(X, 0), ValueError, "kernel_size.*0"),
        (lambda: pooling.max_pool_forward(X, 2.5), ValueError, "kernel_size.*2.5"),
        (lambda: pooling.max_pool_forward(X, (2, 2, 2)), ValueError, r"kernel_size.*\(2, 2, 2\)"),
        (lambda: pooling.max_pool_forward(X[:, :, :0], 2, 1, 1), ValueError, "x: expected.*something to pool"),
        (lambda: pooling.max_pool_forward(X, 2, 0), ValueError, "stride.*0"),
        (lambda: pooling.max_pool_forward(X, 2, 1, -1), ValueError, "padding.*-1"),
        (lambda: pooling.max_pool_forward(X, 2, 1, 2), ValueError, "half"),
        (lambda: pooling.max_pool_forward(X, 5), ValueError, "larger"),
        (lambda: pooling.max_pool_forward(X[0], 2), ValueError, "x: expected"),
        (lambda: pooling.avg_pool_backward(X, X.shape, 2), ValueError, "dy"),
        (lambda: pooling.global_avg_pool_forward(X[:, :, :0]), ValueError, "x: expected"),
        (lambda: pooling.global_avg_pool_backward(X[:, :, 0, 0], X.shape, "chwn"), ValueError, "layout: 'chwn'"),
        (lambda: loss.cross_entropy_forward(X[:, :, 0, 0], np.zeros(3, np.int64)), ValueError, "target"),
        (lambda: loss.cross_entropy_forward(X[:, :, 0, 0], np.zeros(2)), TypeError, "target"),
        (lambda: loss.cross_entropy_forward(X[:, :, 0, 0], [0, 1]), TypeError, "target: .*list"),
        (lambda: batch_norm.batch_norm_inference(X, V, V, V, [1.0] * 3, 0), TypeError, "running_var: .*list"),
        (lambda: batch_norm.batch_norm_backward(X[:0], X[:0], V, V, V), ValueError, "two values"),
        (lambda: loss.cross_entropy_forward(X, np.zeros(2, np.int64)), ValueError, "logits"),
        (lambda: loss.cross_entropy_forward(X[:, :, 0, 0], np.zeros(2, np.int64), 2.0), ValueError, "label_smoothing"),
    ],
)
def test_bad_arguments_are_named(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
