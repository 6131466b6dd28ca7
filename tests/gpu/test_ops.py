"""Every op on CUDA against the float64 CPU reference."""

from typing import Any

import numpy as np
import pytest
from helpers import LAYOUTS, TOLERANCES, OpCase, assert_close, bits, check_op, place, to_numpy
from op_cases import cases

from flcuda import rng as philox
from flcuda.device import DTYPES, Device, cupy
from flcuda.ops import batch_norm, bias, elementwise, loss, pooling


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_against_float64(case: OpCase, dtype: str) -> None:
    for layout in LAYOUTS:
        check_op(case, dtype=dtype, layout=layout, device="cuda")


@pytest.mark.parametrize("source", TOLERANCES)
@pytest.mark.parametrize("target", TOLERANCES)
def test_cast_rounds_to_nearest(source: str, target: str, rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 4, 5, 6)).astype(DTYPES[source])
    expected = x.astype(np.float32 if source != "float64" else np.float64).astype(DTYPES[target])
    for layout in LAYOUTS:
        found = to_numpy(elementwise.cast(place(x, "cuda", layout), target))
        if (source, target) == ("float64", "bfloat16"):
            # ml_dtypes rounds twice, over float32; ours once
            assert_close(found, x, target)
        else:
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.int16, np.int32, np.int64])
def test_copies_of_other_dtypes(dtype: type, rng: np.random.Generator) -> None:
    x = rng.integers(0, 2, (3, 4, 5, 2)).astype(dtype)
    for layout in LAYOUTS:
        out = place(np.zeros_like(x), "cuda", "nhwc")
        elementwise.copy(place(x, "cuda", layout), out)
        np.testing.assert_array_equal(to_numpy(out), x)


def test_copies_of_reversed_and_broadcast_arrays(rng: np.random.Generator) -> None:
    x = place(rng.normal(size=(4, 5, 6)).astype(np.float32), "cuda")
    for view in (x[::-1, :, ::-2], cupy().broadcast_to(x[:1], (3, 5, 6)), x.transpose(2, 0, 1), x[:, 2], x[1:1]):
        out = cupy().empty(view.shape, np.float64)
        elementwise.copy(view, out)
        np.testing.assert_array_equal(out.get(), view.get())


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_dropout_has_the_host_s_mask(dtype: str, layout: str, rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 5, 7, 9)).astype(DTYPES[dtype])
    host, card = philox.State(2**40 + 3), philox.State(2**40 + 3, Device("cuda", cupy().cuda.runtime.getDevice()))
    for _ in range(2):
        expected, mask = elementwise.dropout_forward(place(x, "cpu", layout), 0.3, host)
        y, found = elementwise.dropout_forward(place(x, "cuda", layout), 0.3, card)
        np.testing.assert_array_equal(to_numpy(found), mask)
        np.testing.assert_array_equal(to_numpy(y), expected)
        np.testing.assert_array_equal(card.counter.get(), host.counter)
        dx = elementwise.dropout_backward(place(x, "cuda", layout), found, 0.3)
        np.testing.assert_array_equal(to_numpy(dx), expected)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_reductions_are_bit_equal_on_two_runs(dtype: str, layout: str, rng: np.random.Generator) -> None:
    shape = (16, 67, 31, 29)
    x, dy = (place(rng.normal(size=shape).astype(DTYPES[dtype]), "cuda", layout) for _ in range(2))
    wide = np.float64 if dtype == "float64" else np.float32
    weight = place(rng.normal(size=67).astype(wide), "cuda")

    def run() -> list[bytes]:
        y, mean, inverse = batch_norm.batch_norm_training(x, weight, weight, None, None, None, 0.1, 1e-5)
        gradients = batch_norm.batch_norm_backward(dy, x, weight, mean, inverse)
        return bits([y, mean, inverse, *gradients, bias.bias_backward(dy)])

    first = run()
    for _ in range(3):
        assert run() == first


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_batch_norm_keeps_its_digits_at_a_large_mean(dtype: str, layout: str, rng: np.random.Generator) -> None:
    # float16 has a step of 0.5 at 1000; the spread makes its values differ
    exact = rng.normal(1000, 8, (32, 3, 40, 41)).astype(DTYPES[dtype]).astype(np.float64)
    wide = np.float64 if dtype == "float64" else np.float32
    ones, zeros = place(np.ones(3, wide), "cuda"), place(np.zeros(3, wide), "cuda")
    _, mean, inverse = batch_norm.batch_norm_training(
        place(exact.astype(DTYPES[dtype]), "cuda", layout), ones, zeros, None, None, None, 0.1, 0.0
    )
    np.testing.assert_allclose(mean.get(), exact.mean(axis=(0, 2, 3)), rtol=3e-7)
    np.testing.assert_allclose(inverse.get(), 1 / exact.std(axis=(0, 2, 3)), rtol=1e-5)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_max_pool_of_infinities_and_nan(layout: str, rng: np.random.Generator) -> None:
    values = rng.choice([-np.inf, np.inf, np.nan, 1.0], size=(3, 4, 8, 8), p=[0.8, 0.05, 0.05, 0.1])
    for dtype in TOLERANCES:
        x = values.astype(DTYPES[dtype])
        y, indices = pooling.max_pool_forward(x, 3, 2, 1)
        found, found_indices = pooling.max_pool_forward(place(x, "cuda", layout), 3, 2, 1)
        np.testing.assert_array_equal(to_numpy(found).astype(np.float64), y.astype(np.float64))
        np.testing.assert_array_equal(found_indices.get(), indices)


def test_relu_of_infinities_and_nan() -> None:
    x = np.array([np.nan, np.inf, -np.inf, -1.0, -0.0, 2.0])
    for dtype in TOLERANCES:
        y = to_numpy(elementwise.relu_forward(place(x.astype(DTYPES[dtype]), "cuda"))).astype(np.float64)
        np.testing.assert_array_equal(y, [np.nan, np.inf, 0, 0, 0, 2])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("label", [-1, 5, -(2**62), 2**62])
def test_an_invalid_label_makes_the_loss_nan(label: int, dtype: str, rng: np.random.Generator) -> None:
    logits = place(rng.normal(size=(4, 5)).astype(DTYPES[dtype]), "cuda")
    value, saved = loss.cross_entropy_forward(logits, place(np.array([0, label, 2, 3]), "cuda"))
    assert np.isnan(value.get())
    gradient = to_numpy(loss.cross_entropy_backward(cupy().ones_like(value), saved)).astype(np.float64)
    np.testing.assert_array_equal(np.isnan(gradient).any(axis=1), [False, True, False, False])


def test_all_rows_ignored_gives_nan_and_zero_gradients() -> None:
    value, saved = loss.cross_entropy_forward(
        place(np.ones((2, 3), np.float32), "cuda"), place(np.full(2, -100), "cuda")
    )
    assert value.shape == ()
    assert np.isnan(value.get())
    np.testing.assert_array_equal(loss.cross_entropy_backward(cupy().ones_like(value), saved).get(), np.zeros((2, 3)))


def test_an_empty_batch_has_no_loss() -> None:
    value, _ = loss.cross_entropy_forward(cupy().empty((0, 3), np.float32), cupy().empty(0, np.int64))
    assert np.isnan(value.get())
    assert loss.top1_count(cupy().empty((0, 3), np.float32), cupy().empty(0, np.int64)).get() == 0


def test_top1_counts_like_argmax(rng: np.random.Generator) -> None:
    logits = rng.choice([0.0, 1.0, np.nan, -np.inf, np.inf], size=(500, 70), p=[0.5, 0.46, 0.01, 0.02, 0.01])
    target = logits.argmax(axis=1)
    target[::3] += 1
    found = loss.top1_count(place(logits.astype(np.float32), "cuda"), place(target, "cuda"))
    assert found.get() == (logits.argmax(axis=1) == target).sum()


def test_scale_reads_a_device_value(rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 5)).astype(np.float32)
    for dtype in TOLERANCES:
        given = x.astype(DTYPES[dtype])
        found = elementwise.scale(place(given, "cuda"), place(np.array(0.375), "cuda"))
        np.testing.assert_array_equal(to_numpy(found), elementwise.scale(given, 0.375))


def test_mixed_devices_are_named() -> None:
    a, b = place(np.ones(3, np.float32), "cuda"), np.ones(3, np.float32)
    with pytest.raises(ValueError, match="a is on cuda:0, b is on cpu"):
        elementwise.add(a, b)


def test_ops_run_on_the_current_stream() -> None:
    # On a stream that waits for nothing else, a result must follow from earlier work of the same stream.
    stream = cupy().cuda.Stream(non_blocking=True)
    with stream:
        x = cupy().zeros(1 << 22, np.float32)
        for _ in range(50):
            x = elementwise.add(x, x)
            elementwise.accumulate_(x, cupy().ones_like(x))
        result: Any = elementwise.scale(x, 2.0**-50)
        stream.synchronize()
        np.testing.assert_allclose(result.get(), 1.0, rtol=1e-6)


def test_a_reduction_of_many_elements_has_64_bit_indices() -> None:
    # 2^31 + 64 elements of one byte's worth of work each: 4 GiB
    size = (1 << 31) + 64
    x = cupy().zeros((size // 64, 64), DTYPES["float16"])
    x[-1] = 1
    np.testing.assert_array_equal(to_numpy(bias.bias_backward(x)), np.ones(64))
    y = elementwise.relu_forward(x)
    np.testing.assert_array_equal(y[-1].get(), np.ones(64))
