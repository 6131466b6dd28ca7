"""Batch norm, ReLU and max pooling as one Function, on the CPU, against the three one after the other."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import TOLERANCES, assert_close, place

from flcuda import functional as F
from flcuda import nn
from flcuda.autograd import Tensor, no_grad
from flcuda.device import DTYPES, memory_layout
from flcuda.models import resnet18

WINDOWS = [(3, 2, 1), ((2, 3), (1, 2), (1, 0)), (2, None, 0)]


def _norm(channels: int, precision: str) -> nn.BatchNorm2D:
    layer = nn.BatchNorm2D(channels, precision=precision, device="cpu")
    layer.weight.write(np.linspace(-1, 2, channels))
    layer.bias.write(np.linspace(0.5, -1, channels))
    return layer


def _plain(x: Tensor, layer: nn.BatchNorm2D, window: Any, training: bool) -> Tensor:
    return F.max_pool2d(F.relu(F.batch_norm(x, layer.state(), training=training)), *window)


def _fused(x: Tensor, layer: nn.BatchNorm2D, window: Any, training: bool) -> Tensor:
    return F.batch_norm_relu_max_pool2d(x, layer.state(), *window, training=training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("window", WINDOWS)
def test_against_the_three(window: Any, dtype: str, layout: str, training: bool, rng: np.random.Generator) -> None:
    values = rng.permutation(3 * 5 * 8 * 7).reshape(3, 5, 8, 7) / 128 - 3
    x = place(values.astype(DTYPES[dtype]), "cpu", layout)
    results = []
    for function in (_plain, _fused):
        layer = _norm(5, "float64" if dtype == "float64" else "float32")
        leaf = Tensor(x.copy(order="K"), requires_grad=True)
        y = function(leaf, layer, window, training)
        dy = np.random.default_rng(1).normal(size=y.shape).astype(DTYPES[dtype])
        # Two uses, as the first block makes of it.
        F.add(F.scale(y, 0.5), F.scale(y, 2.0)).backward(place(dy, "cpu", layout))
        bn = layer.state()
        arrays = [leaf.grad, layer.weight.grad, layer.bias.grad, bn.pending_mean, bn.pending_var, bn.pending_batches]
        results.append((y.data, arrays, bn.statistics.settled))
        assert memory_layout(y.data) == layout
    np.testing.assert_array_equal(results[0][0].astype(np.float64), results[1][0].astype(np.float64))
    assert results[0][2] == results[1][2] == (not training)
    # In 16 bits results tie that are none, and then another place has the gradient.
    if dtype in ("float64", "float32"):
        for found, wanted in zip(results[1][1], results[0][1], strict=True):
            assert_close(found, wanted.astype(np.float64), dtype, factor=20)


def test_nothing_is_kept_that_needs_no_gradient(rng: np.random.Generator) -> None:
    layer = _norm(3, "float32")
    x = rng.normal(size=(2, 3, 6, 6)).astype(np.float32)
    with no_grad():
        y = _fused(Tensor(x), layer, (3, 2, 1), True)
    assert not y.requires_grad
    wanted = _plain(Tensor(x), copy.deepcopy(layer), (3, 2, 1), True)
    np.testing.assert_array_equal(y.data, wanted.data)


def test_gradients_are_added_to_what_is_there(rng: np.random.Generator) -> None:
    layer = _norm(4, "float64")
    x = rng.normal(size=(2, 4, 7, 6))
    for _ in range(2):
        y = _fused(Tensor(x), layer, (3, 2, 1), True)
        y.backward(np.ones(y.shape))
    twice = layer.weight.grad.copy()
    layer.weight.grad = layer.bias.grad = None
    y = _fused(Tensor(x), layer, (3, 2, 1), True)
    y.backward(np.ones(y.shape))
    np.testing.assert_allclose(twice, 2 * layer.weight.grad, rtol=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x, bn: F.batch_norm_relu_max_pool2d(x[0], bn, 3, 2, 1, training=True), ValueError, "x: shape"),
        (lambda x, bn: F.batch_norm_relu_max_pool2d(x, bn, 9, 2, 1, training=True), ValueError, "kernel_size: 9"),
        (lambda x, bn: F.batch_norm_relu_max_pool2d(x, bn, 3, 0, 1, training=True), ValueError, "stride"),
        (lambda x, bn: F.batch_norm_relu_max_pool2d(x, bn, 3, 2, 2, training=True), ValueError, "padding"),
        (lambda x, bn: F.batch_norm_relu_max_pool2d(x[:, :2], bn, 3, 2, 1, training=True), ValueError, "pending_mean"),
        (lambda x, bn: F.batch_norm_relu_max_pool2d(x.astype(np.float64), bn, 3, training=True), TypeError, "pending"),
    ],
)
def test_bad_arguments_move_no_statistics(call: Callable[..., Any], error: type[Exception], text: str) -> None:
    bn = _norm(3, "float32").state()
    with pytest.raises(error, match=text):
        call(np.ones((2, 3, 5, 5), np.float32), bn)
    assert bn.statistics.settled
    assert bn.pending_batches[0] == 0


def test_a_resnet_s_stem_is_the_fused_one(rng: np.random.Generator) -> None:
    model = resnet18(num_classes=4, precision="float64", device="cpu")
    x = Tensor(rng.normal(size=(2, 3, 33, 31)))
    target, gradients = np.array([1, 3]), []
    for fused in (True, False):
        model.fused = fused
        for parameter in model.parameters():
            parameter.grad = None
        correct = np.zeros(2, np.int64)
        F.cross_entropy(model(x), target, correct=correct).backward()
        assert correct[1] == 2
        gradients.append(
            [parameter.grad.copy() for parameter in (model.conv1.weight, model.bn1.weight, model.bn1.bias)]
        )
    for found, wanted in zip(*gradients, strict=True):
        assert_close(found, wanted, "float64", factor=1e3)
