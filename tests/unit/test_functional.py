"""Every Function against central differences in float64, in both layouts; the other dtypes against float64."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from flcuda import device as devices
from flcuda import functional as F
from flcuda import rng as philox
from flcuda.autograd import Tensor, no_grad
from flcuda.parameters import BatchNormState, Parameter

STEP = 1e-6
LAYOUTS = ["nchw", "nhwc"]


def in_layout(values: np.ndarray, layout: str) -> np.ndarray:
    out = devices.empty(values.shape, values.dtype, device="cpu", layout=layout)
    out[...] = values
    return out


def check_gradients(
    function: Callable[..., Tensor], arrays: Sequence[np.ndarray], rng: np.random.Generator, layout: str = "nchw"
) -> Tensor:
    """Compares every element of every input's gradient with a central difference of sum(output * g)."""
    leaves = [Tensor(in_layout(a, layout), requires_grad=True) for a in arrays]
    y = function(*leaves)
    g = rng.standard_normal(y.shape)
    y.backward(np.asarray(g))

    def value(i: int, index: tuple[int, ...], step: float) -> float:
        moved = [in_layout(a, layout) for a in arrays]
        moved[i][index] += step
        with no_grad():
            return float((function(*map(Tensor, moved)).data * g).sum())

    for i, leaf in enumerate(leaves):
        expected = np.empty(leaf.shape)
        for index in np.ndindex(leaf.shape):
            expected[index] = (value(i, index, STEP) - value(i, index, -STEP)) / (2 * STEP)
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
        np.testing.assert_allclose(leaf.grad, expected, rtol=2e-7, atol=2e-8, err_msg=f"input {i}")
    return y


CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 5, 4), (4, 3, 3, 2), {}),
    ((1, 4, 6, 5), (2, 2, 3, 3), {"stride": (2, 1), "padding": (1, 2), "groups": 2}),
    ((2, 2, 7, 6), (3, 2, 2, 3), {"dilation": (3, 2), "padding": [(2, 1), (0, 3)]}),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("x_shape", "w_shape", "options"), CONVOLUTIONS)
def test_conv2d(rng, x_shape, w_shape, options, layout):
    arrays = [rng.standard_normal(s) for s in (x_shape, w_shape, w_shape[:1])]
    y = check_gradients(lambda x, w, b: F.conv2d(x, w, b, **options), arrays, rng, layout)
    assert devices.memory_layout(y.data) == layout


TRANSPOSED: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 3, 4), (3, 2, 3, 2), {}),
    ((1, 4, 3, 2), (4, 3, 3, 3), {"stride": (3, 2), "padding": 1, "output_padding": (2, 1), "groups": 2}),
    ((1, 2, 3, 3), (2, 2, 2, 3), {"stride": 2, "dilation": (2, 1), "padding": (0, 1)}),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("x_shape", "w_shape", "options"), TRANSPOSED)
def test_conv_transpose2d(rng, x_shape, w_shape, options, layout):
    arrays = [rng.standard_normal(s) for s in (x_shape, w_shape, (w_shape[1] * options.get("groups", 1),))]
    check_gradients(lambda x, w, b: F.conv_transpose2d(x, w, b, **options), arrays, rng, layout)


def test_conv_transpose2d_is_the_adjoint_of_conv2d(rng):
    options = {"stride": (2, 3), "padding": (1, 0), "dilation": (1, 2), "groups": 2}
    w = Tensor(rng.standard_normal((6, 2, 3, 2)))
    x = Tensor(rng.standard_normal((2, 4, 8, 11)))
    y = F.conv2d(x, w, **options)
    dy = Tensor(rng.standard_normal(y.shape))
    dx = F.conv_transpose2d(dy, w, output_padding=(1, 2), **options)
    assert dx.shape == x.shape
    np.testing.assert_allclose((y.data * dy.data).sum(), (x.data * dx.data).sum(), rtol=1e-12)


def test_linear(rng):
    check_gradients(F.linear, [rng.standard_normal(s) for s in ((3, 5), (4, 5), (4,))], rng)
    check_gradients(F.linear, [rng.standard_normal(s) for s in ((3, 5), (4, 5))], rng)


def batch_norm_state(rng: np.random.Generator, weight: Any, bias: Any, momentum: float | None = 0.3) -> BatchNormState:
    as_parameter = [Parameter(a.data, "float64", device="cpu") for a in (weight, bias)]
    bn = BatchNormState(*as_parameter, momentum, 1e-3)
    bn.weight, bn.bias = weight, bias
    bn.running_mean[...] = [0.3, -0.2, 0.1]
    bn.running_var[...] = [1.5, 0.7, 2.0]
    return bn


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(3, 3, 2, 4), (5, 3)])
def test_batch_norm(rng, shape, training, layout):
    arrays = [rng.standard_normal(shape), rng.standard_normal(3), rng.standard_normal(3)]
    check_gradients(
        lambda x, w, b: F.batch_norm(x, batch_norm_state(rng, w, b), training=training), arrays, rng, layout
    )


@pytest.mark.parametrize("momentum", [0.3, None])
def test_batch_norm_statistics_are_pending(rng, momentum):
    bn = batch_norm_state(rng, Tensor(np.ones(3)), Tensor(np.zeros(3)), momentum)
    bn.pending_mean[...], bn.pending_var[...] = bn.running_mean, bn.running_var
    mean, var = bn.running_mean.copy(), bn.running_var.copy()
    for k in range(1, 4):
        x = rng.standard_normal((4, 3, 5, 2)) * 2 + 1
        F.batch_norm(Tensor(x), bn, training=True)
        f = momentum or 1 / k
        mean = (1 - f) * mean + f * x.mean(axis=(0, 2, 3))
        var = (1 - f) * var + f * x.var(axis=(0, 2, 3), ddof=1)
    np.testing.assert_allclose(bn.pending_mean, mean, rtol=1e-12)
    np.testing.assert_allclose(bn.pending_var, var, rtol=1e-12)
    assert bn.pending_batches.tolist() == [3]
    assert bn.num_batches_tracked.tolist() == [0]
    assert bn.running_mean.tolist() == [0.3, -0.2, 0.1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_relu_add_scale_flatten_and_convert(rng, layout):
    x = rng.standard_normal((2, 3, 4, 2))
    check_gradients(F.relu, [x], rng, layout)
    check_gradients(F.add, [x, rng.standard_normal(x.shape)], rng, layout)
    check_gradients(lambda t: F.scale(t, -1.7), [x], rng, layout)
    check_gradients(lambda t: F.scale(t, np.array(0.3)), [x], rng, layout)
    y = check_gradients(F.flatten, [x], rng, layout)
    np.testing.assert_array_equal(y.data, x.reshape(2, 24))
    for other in LAYOUTS:
        y = check_gradients(lambda t, other=other: F.convert(t, "float64", other), [x], rng, layout)
        assert devices.memory_layout(y.data) == other


def test_relu_has_no_gradient_at_zero():
    x = Tensor(np.array([-1.0, 0.0, 2.0]), requires_grad=True)
    F.relu(x).backward(np.ones(3))
    assert x.grad.tolist() == [0, 0, 1]


def test_add_takes_two_layouts(rng):
    a, b = rng.standard_normal((2, 2, 3, 4, 5))
    y = F.add(Tensor(in_layout(a, "nhwc")), Tensor(b))
    assert devices.memory_layout(y.data) == "nhwc"
    np.testing.assert_array_equal(y.data, a + b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kernel_size", "stride", "padding"), [(2, None, 0), ((3, 2), (2, 1), (1, 0)), (3, 2, 1), (2, 3, 0)]
)
@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d])
def test_pooling(rng, pool, kernel_size, stride, padding, layout):
    x = rng.permutation(2 * 2 * 5 * 6).reshape(2, 2, 5, 6) * 0.01  # no two so near that a step reorders them
    y = check_gradients(lambda t: pool(t, kernel_size, stride, padding), [x], rng, layout)
    assert devices.memory_layout(y.data) == layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_global_avg_pool2d(rng, layout):
    y = check_gradients(F.global_avg_pool2d, [rng.standard_normal((2, 3, 4, 3))], rng, layout)
    assert y.shape == (2, 3)


def test_dropout(rng):
    x = Tensor(rng.standard_normal((40, 50)), requires_grad=True)
    state = philox.State(7)
    y = F.dropout(x, 0.3, state)
    kept = y.data != 0
    assert 0.65 < kept.mean() < 0.75
    np.testing.assert_allclose(y.data[kept], x.data[kept] / 0.7, rtol=1e-6)
    g = rng.standard_normal(x.shape)
    y.backward(g)
    np.testing.assert_allclose(x.grad, np.where(kept, g / 0.7, 0), rtol=1e-6)
    again = F.dropout(x, 0.3, state).data != 0
    assert (again != kept).any()
    np.testing.assert_array_equal(F.dropout(x, 0.3, philox.State(7)).data, y.data)
    assert F.dropout(x, 0.3, state, training=False) is x
    assert F.dropout(x, 0.0, state) is x
    assert not F.dropout(x, 1.0, state).data.any()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy(rng, smoothing):
    logits = rng.standard_normal((6, 5))
    target = np.array([0, 4, -1, 2, -1, 2])
    options = {"label_smoothing": smoothing, "ignore_index": -1}
    y = check_gradients(lambda t: F.cross_entropy(t, target, **options), [logits], rng)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows = [
        -(1 - smoothing) * log_p[i, t] - smoothing * log_p[i].mean() for i, t in enumerate(target.tolist()) if t >= 0
    ]
    np.testing.assert_allclose(float(y), np.mean(rows), rtol=1e-13)
    assert y.shape == ()


def test_cross_entropy_of_16_bits_is_computed_in_float32(rng):
    logits = (rng.standard_normal((7, 9)) * 10).astype(np.float16)
    target = rng.integers(0, 9, 7)
    half, double = Tensor(logits, True), Tensor(logits.astype(np.float64), True)
    losses = [F.cross_entropy(t, Tensor(target)) for t in (half, double)]
    assert losses[0].dtype == np.float32
    np.testing.assert_allclose(float(losses[0]), float(losses[1]), rtol=1e-6)
    losses[0].backward(np.float32(1024).reshape(()))
    losses[1].backward(np.float64(1024).reshape(()))
    assert half.grad.dtype == np.float16
    np.testing.assert_allclose(half.grad, double.grad, rtol=1e-3, atol=2e-5)  # p - 1 in float32, times 1024 / 7


def test_correct_count(rng):
    logits = rng.standard_normal((50, 4)).astype(np.float32)
    target = rng.integers(0, 4, 50)
    assert int(F.correct_count(Tensor(logits), target)) == (logits.argmax(axis=1) == target).sum()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_dtypes_agree_with_float64(rng, dtype):
    """A small network through every Function, at the dtype's own precision."""
    eps = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    arrays = [rng.standard_normal(s) for s in ((4, 3, 6, 6), (4, 3, 3, 3), (4,), (5, 4), (5,))]
    target = np.array([0, 1, 2, 3])
    grads = {}
    for name in ("float64", dtype):
        leaves = [Tensor(in_layout(a.astype(dtype).astype(name), "nhwc"), True) for a in arrays]
        x, w, b, v, c = leaves
        master = "float64" if name == "float64" else "float32"
        bn = BatchNormState(
            Parameter(np.ones(4), master, device="cpu"), Parameter(np.zeros(4), master, device="cpu"), 0.1, 1e-5
        )
        y = F.relu(F.batch_norm(F.conv2d(x, w, b, padding=1), bn, training=True))
        y = F.max_pool2d(F.add(y, F.scale(y, 0.5)), 2)
        F.cross_entropy(F.linear(F.global_avg_pool2d(y), v, c), target).backward()
        grads[name] = [t.grad for t in leaves] + [bn.weight.grad, bn.bias.grad]
        assert [g.dtype for g in grads[name][:5]] == [t.dtype for t in leaves]
    for i, (ours, oracle) in enumerate(zip(grads[dtype], grads["float64"], strict=True)):
        if i == 2:
            continue  # the bias before a batch norm: its true gradient is 0
        error = np.linalg.norm(ours.astype(np.float64) - oracle) / np.linalg.norm(oracle)
        assert error < 30 * eps, i


def test_gradients_are_written_where_the_parameters_live(rng):
    """Each Function with parameters adds into them, in their layout, and computes no more than is asked."""
    x = Tensor(in_layout(rng.standard_normal((2, 4, 5, 5)), "nhwc"))
    makers = {
        "conv2d": (lambda w, b: F.conv2d(x, w, b), (3, 4, 2, 2), (3,)),
        "conv_transpose2d": (lambda w, b: F.conv_transpose2d(x, w, b), (4, 3, 2, 2), (3,)),
        "linear": (lambda w, b: F.linear(F.flatten(x), w, b), (3, 100), (3,)),
    }
    for name, (function, w_shape, b_shape) in makers.items():
        w, b = (Parameter(rng.standard_normal(s), "float64", layout="nhwc", device="cpu") for s in (w_shape, b_shape))
        y = function(w, b)
        g = rng.standard_normal(y.shape)
        y.backward(g)
        once = [p.grad.copy() for p in (w, b)]
        for p in (w, b):
            assert p.grad is p.buffer, name
        function(w, b).backward(g)
        for p, first in zip((w, b), once, strict=True):
            assert p.grad is p.buffer
            np.testing.assert_allclose(p.grad, 2 * first, rtol=1e-12)


def test_a_layer_used_twice_gets_the_sum(rng):
    x, values = rng.standard_normal((2, 3, 7, 7)), rng.standard_normal((3, 3, 2, 2))
    g = rng.standard_normal((2, 3, 5, 5))
    w = Parameter(values, "float64", device="cpu")
    first, second = Tensor(values, True), Tensor(values, True)
    F.conv2d(F.relu(F.conv2d(x, w)), w).backward(g)
    F.conv2d(F.relu(F.conv2d(x, first)), second).backward(g)
    np.testing.assert_allclose(w.grad, first.grad + second.grad, rtol=1e-12)


def test_the_gradient_of_what_needs_none_is_not_computed(rng, monkeypatch):
    from flcuda.ops.convolution import Convolution

    called = []
    for direction in ("backward_data", "backward_filter"):
        original = getattr(Convolution, direction)

        def spy(self, *args, _original=original, _direction=direction, **kwargs):
            called.append(_direction)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Convolution, direction, spy)
    x, w, b = (Tensor(rng.standard_normal(s)) for s in ((1, 2, 4, 4), (3, 2, 3, 3), (3,)))
    for needs, expected in (
        ((False, True, False), ["backward_filter"]),
        ((True, False, False), ["backward_data"]),
        ((False, False, True), []),
    ):
        called.clear()
        leaves = [Tensor(t.data, n) for t, n in zip((x, w, b), needs, strict=True)]
        F.conv2d(*leaves).backward(np.ones((1, 3, 2, 2)))
        assert called == expected
        assert [t.grad is not None for t in leaves] == list(needs)


def test_empty_batch(rng):
    x = Tensor(np.zeros((0, 3, 5, 5)), requires_grad=True)
    w = Tensor(rng.standard_normal((2, 3, 3, 3)), requires_grad=True)
    y = F.flatten(F.relu(F.conv2d(x, w)))
    assert y.shape == (0, 18)
    y.backward(np.zeros((0, 18)))
    assert x.grad.shape == x.shape
    assert not w.grad.any()


T = Tensor(np.ones((1, 2, 4, 4)))


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (lambda: F.conv2d(T, np.ones((3, 5, 2, 2))), ValueError, r"w_shape \(3, 5, 2, 2\)"),
        (lambda: F.conv2d(T, np.ones((3, 2, 2, 2), np.float32)), TypeError, "float32"),
        (lambda: F.conv2d(T, np.ones((3, 2, 2, 2)), padding=-1), ValueError, "padding"),
        (lambda: F.conv2d(T, np.ones((3, 2, 2, 2)), stride=0), ValueError, "stride"),
        (lambda: F.conv2d(T, np.ones((3, 2, 2, 2)), np.ones(2)), ValueError, r"bias.*\(3,\).*\(2,\)"),
        (lambda: F.conv2d([1.0], np.ones((3, 2, 2, 2))), TypeError, "x: "),
        (lambda: F.conv_transpose2d(T, np.ones((3, 2, 2, 2))), ValueError, "x: has 2 channels"),
        (lambda: F.conv_transpose2d(T, np.ones((2, 2, 2, 2)), output_padding=1), ValueError, "output_padding"),
        (lambda: F.conv_transpose2d(T, np.ones((2, 2, 2, 2)), padding=3), ValueError, "padding"),
        (lambda: F.conv_transpose2d(np.ones((2, 3)), np.ones((2, 2, 2, 2))), ValueError, "x: .*rank 4"),
        (lambda: F.linear(np.ones((2, 3)), np.ones((4, 5))), ValueError, r"w: shape \(4, 5\)"),
        (lambda: F.max_pool2d(T, 0), ValueError, "kernel_size: 0"),
        (lambda: F.max_pool2d(T, 2, padding=2), ValueError, "padding"),
        (lambda: F.avg_pool2d(T, 2.5), TypeError, "kernel_size: 2.5"),
        (lambda: F.max_pool2d(T, (1, 2, 3)), ValueError, "kernel_size"),
        (lambda: F.global_avg_pool2d(np.ones((2, 3))), ValueError, "x: "),
        (lambda: F.dropout(T, 1.5, philox.State(0)), ValueError, "p: 1.5"),
        (lambda: F.dropout(T, "0.5", philox.State(0)), TypeError, "p: '0.5'"),
        (lambda: F.cross_entropy(np.ones((2, 3)), np.array([0, 3])), ValueError, "target"),
        (lambda: F.cross_entropy(np.ones((2, 3)), np.array([0.0, 1.0])), TypeError, "target"),
        (lambda: F.cross_entropy(np.ones((2, 3)), np.array([0])), ValueError, "target"),
        (lambda: F.cross_entropy(np.ones((2, 3)), np.array([0, 1]), label_smoothing=2), ValueError, "label_smoothing"),
        (lambda: F.add(T, np.ones((1, 2, 4, 3))), ValueError, r"b: .*\(1, 2, 4, 4\)"),
        (lambda: F.convert(np.ones(3, np.uint8), "float32"), TypeError, "x: has dtype uint8"),
        (lambda: F.convert(T, "float8"), ValueError, "dtype: 'float8'"),
        (lambda: F.convert(T, "float32", "chwn"), ValueError, "layout: 'chwn'"),
        (lambda: F.flatten(np.array(1.0)), ValueError, "x: "),
    ],
)
def test_bad_arguments(call, kind, match):
    with pytest.raises(kind, match=match):
        call()
