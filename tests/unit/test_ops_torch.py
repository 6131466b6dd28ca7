"""The ops on the CPU device against PyTorch's CPU, in float64."""

from typing import Any

import numpy as np
import pytest
from helpers import assert_close
from step_cases import Storage

from flcuda import functional, nn, optim
from flcuda.ops import batch_norm, loss, optimizer, pooling

torch = pytest.importorskip("torch")
F = torch.nn.functional

pytestmark = pytest.mark.peer


def _leaf(a: np.ndarray) -> Any:
    return torch.tensor(a, requires_grad=True)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm(momentum: float | None, rng: np.random.Generator) -> None:
    layer = torch.nn.BatchNorm2d(3, momentum=momentum, dtype=torch.float64)
    weight, bias = rng.normal(size=3), rng.normal(size=3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        layer.bias.copy_(torch.tensor(bias))
    mean, var, count = np.zeros(3), np.ones(3), np.zeros(1, np.int64)
    for _ in range(3):
        values, dy = rng.normal(1, 2, (4, 3, 5, 6)), rng.normal(size=(4, 3, 5, 6))
        x = _leaf(values)
        layer.zero_grad()
        y = layer(x)
        y.backward(torch.tensor(dy))
        found, saved_mean, saved_inverse = batch_norm.batch_norm_training(
            values, weight, bias, mean, var, count, momentum, 1e-5
        )
        gradients = batch_norm.batch_norm_backward(dy, values, weight, saved_mean, saved_inverse)
        assert_close(found, y.detach().numpy(), "float64")
        expected = (x.grad, layer.weight.grad, layer.bias.grad)
        for gradient, wanted in zip(gradients, expected, strict=True):
            assert_close(gradient, wanted.numpy(), "float64", factor=10)
    assert_close(mean, layer.running_mean.numpy(), "float64")
    assert_close(var, layer.running_var.numpy(), "float64")
    assert count[0] == int(layer.num_batches_tracked)
    layer.eval()
    layer.zero_grad()
    x = _leaf(values)
    y = layer(x)
    y.backward(torch.tensor(dy))
    assert_close(batch_norm.batch_norm_inference(values, weight, bias, mean, var, 1e-5), y.detach().numpy(), "float64")
    gradients = batch_norm.batch_norm_inference_backward(dy, values, weight, mean, var, 1e-5)
    for gradient, wanted in zip(gradients, (x.grad, layer.weight.grad, layer.bias.grad), strict=True):
        assert_close(gradient, wanted.numpy(), "float64", factor=10)


@pytest.mark.parametrize(
    ("shape", "kernel_size", "stride", "padding"),
    [
        ((2, 3, 9, 8), 3, 2, 1),
        ((1, 2, 7, 7), (2, 3), (1, 2), (1, 0)),
        ((2, 2, 20, 19), 17, 3, 8),
        ((2, 2, 6, 6), 2, None, 0),
    ],
)
@pytest.mark.parametrize("kind", ["max", "avg"])
def test_pooling(
    kind: str, shape: tuple[int, ...], kernel_size: Any, stride: Any, padding: Any, rng: np.random.Generator
) -> None:
    values = np.round(rng.normal(size=shape), 1)  # ties
    x = _leaf(values)
    y = (F.max_pool2d if kind == "max" else F.avg_pool2d)(x, kernel_size, stride, padding)
    dy = rng.normal(size=tuple(y.shape))
    y.backward(torch.tensor(dy))
    if kind == "max":
        found, indices = pooling.max_pool_forward(values, kernel_size, stride, padding)
        dx = pooling.max_pool_backward(dy, indices, shape, kernel_size, stride, padding)
    else:
        found = pooling.avg_pool_forward(values, kernel_size, stride, padding)
        dx = pooling.avg_pool_backward(dy, shape, kernel_size, stride, padding)
    assert_close(found, y.detach().numpy(), "float64")
    assert_close(dx, x.grad.numpy(), "float64")


def test_max_pool_of_infinities_and_nan(rng: np.random.Generator) -> None:
    values = rng.choice([-np.inf, np.inf, np.nan, 1.0], size=(3, 4, 8, 8), p=[0.8, 0.05, 0.05, 0.1])
    y, flat = F.max_pool2d(torch.tensor(values), 3, 2, 1, return_indices=True)
    found, indices = pooling.max_pool_forward(values, 3, 2, 1)
    np.testing.assert_array_equal(found, y.numpy())
    rows, columns = (np.arange(4) * 2 - 1)[:, None] + indices // 3, np.arange(4) * 2 - 1 + indices % 3
    np.testing.assert_array_equal(rows * 8 + columns, flat.numpy())


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignored", [0, 2, 6])
def test_cross_entropy(smoothing: float, ignored: int, rng: np.random.Generator) -> None:
    values = rng.normal(0, 3, (6, 5))
    target = rng.integers(0, 5, 6)
    target[:ignored] = 1000
    x = _leaf(values)
    expected = F.cross_entropy(x, torch.tensor(target), label_smoothing=smoothing, ignore_index=1000)
    (expected * 3).backward()
    found, saved = loss.cross_entropy_forward(values, target, smoothing, 1000)
    assert_close(found, expected.detach().numpy(), "float64")
    if ignored < 6:
        assert_close(loss.cross_entropy_backward(np.array(3.0), saved), x.grad.numpy(), "float64")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("SGD", {"momentum": 0.8, "dampening": 0.3}),
        ("Adam", {}),
        ("Adam", {"betas": (0.3, 0.9), "eps": 1e-3}),
        ("AdamW", {}),
        ("AdamW", {"betas": (0.95, 0.99), "eps": 1e-6}),
    ],
    ids=str,
)
def test_optimizers(kind: str, options: dict[str, Any], dtype: str, rng: np.random.Generator) -> None:
    storage = Storage(dtype, "cpu")
    storage.decay[...] = 1
    steps = np.zeros(1, np.int64)
    states = [np.zeros_like(storage.master) for _ in range(1 if kind == "SGD" else 2)]
    parameter = torch.nn.Parameter(torch.tensor(storage.master.copy()))
    peer = getattr(torch.optim, kind)([parameter], lr=0.1, weight_decay=1e-2, foreach=False, **options)
    for step in range(6):
        storage.grad[...] = rng.normal(size=storage.grad.shape) * 10.0 ** (step - 3)
        parameter.grad = torch.tensor(storage.grad.copy())
        storage.lr[...] = peer.param_groups[0]["lr"] = 0.1 / (step + 1)
        peer.step()
        head = (storage.master, storage.master, storage.grad)
        common = (storage.offsets, storage.decay, storage.lr)
        if kind == "SGD":
            optimizer.sgd_update(*head, *states, *common, weight_decay=1e-2, steps=steps, **options)
        else:
            decoupled = kind == "AdamW"
            optimizer.adam_update(*head, *states, *common, steps, weight_decay=1e-2, decoupled=decoupled, **options)
        optimizer.advance_steps(steps)
        assert_close(storage.master, parameter.detach().numpy().astype(np.float64), dtype)
    kept = peer.state[parameter]
    names = ("exp_avg", "exp_avg_sq") if kind != "SGD" else ("momentum_buffer",) if "momentum" in options else ()
    for name, state in zip(names, states, strict=bool(names)):
        assert_close(state, kept[name].numpy().astype(np.float64), dtype, name)


@pytest.mark.parametrize("max_norm", [0.5, 50.0, 5000.0])
def test_clipping(max_norm: float, rng: np.random.Generator) -> None:
    gradients = [rng.normal(size=size) for size in (5, 1, 3000, 0)]
    sums = np.array([np.square(g).sum() for g in gradients])
    parameters = [torch.nn.Parameter(torch.zeros(g.size, dtype=torch.float64)) for g in gradients]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = torch.tensor(g)
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    factor, flags = np.zeros(1), np.zeros(2 + 4, np.int32)
    # gradients were stored times 64
    optimizer.clip_factor(sums * 64**2, np.array([1 / 64]), max_norm, flags, factor)
    assert not flags.any()
    for p, g in zip(parameters, gradients, strict=True):
        # PyTorch adds 1e-6 to the norm
        np.testing.assert_allclose(g * factor, p.grad.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("SGD", {"momentum": 0.9, "dampening": 0.1}), ("Adam", {"weight_decay": 0.1}), ("AdamW", {"weight_decay": 0.1})],
)
def test_optimizers_of_a_model(kind: str, options: dict[str, Any], rng: np.random.Generator) -> None:
    """Through the arenas, with clipping, against PyTorch's parameters one by one."""
    place = {"device": "cpu", "precision": "float64"}
    model = nn.Sequential(nn.Linear(7, 5, seed=1, **place), nn.ReLU(), nn.Linear(5, 3, seed=2, **place))
    own = getattr(optim, kind)(model, lr=0.05, max_norm=0.5, **options)
    parameters = [torch.nn.Parameter(torch.tensor(p.values())) for p in model.parameters()]
    peer = getattr(torch.optim, kind)(parameters, lr=0.05, **options)
    for _ in range(5):
        x, target = rng.normal(size=(8, 7)), rng.integers(0, 3, 8)
        own.zero_grad()
        functional.cross_entropy(model(x), target).backward()
        for p, q in zip(model.parameters(), parameters, strict=True):
            q.grad = torch.tensor(np.array(p.grad))
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        peer.step()
        own.step()
    for p, q in zip(model.parameters(), parameters, strict=True):
        np.testing.assert_allclose(p.values(), q.detach().numpy(), rtol=1e-5, atol=1e-7)
