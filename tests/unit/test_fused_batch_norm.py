"""Batch norm with the addition and the ReLU that follow it: against the plain functions, and in autograd."""

import copy

import numpy as np
import pytest

from flcuda import device as devices
from flcuda import functional as F
from flcuda import models, nn
from flcuda.autograd import Function, Tensor, no_grad
from flcuda.ops import batch_norm as ops
from flcuda.ops import elementwise

CPU = {"device": "cpu"}
# Largest difference of two ways that round at other places.
ROUNDINGS = {"float64": 1e-12, "float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}


def layers(rng: np.random.Generator, precision: str, channels: int = 5) -> list[nn.BatchNorm2D]:
    made = [nn.BatchNorm2D(channels, precision=precision, device="cpu") for _ in range(2)]
    for layer in made:
        layer.weight.data[...] = rng.uniform(-2, 2, channels)
        layer.bias.data[...] = rng.normal(size=channels)
        layer.bn.write("running_mean", rng.normal(size=channels))
        layer.bn.write("running_var", rng.uniform(0.5, 2, channels))
    return made


@pytest.mark.parametrize("activation", ["relu", None])
@pytest.mark.parametrize("mode", ["none", "raw", "normalised"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_fused_is_plain(rng, dtype, training, mode, activation):
    precision = dtype
    first = layers(rng, precision)
    second = copy.deepcopy(first)
    shape = (4, 5, 6, 3)
    arrays = [rng.normal(size=shape).astype(devices.DTYPES[dtype]) for _ in range(4)]
    found = []
    for fused, (bn, shortcut_bn) in ((True, first), (False, second)):
        x, residual = (Tensor(a, requires_grad=True) for a in arrays[:2])
        if fused:
            y = F.batch_norm(
                x,
                bn.state(),
                training=training,
                residual=None if mode == "none" else residual,
                residual_bn=shortcut_bn.state() if mode == "normalised" else None,
                activation=activation,
            )
        else:
            y = F.batch_norm(x, bn.state(), training=training)
            shortcut = residual
            if mode == "normalised":
                shortcut = F.batch_norm(residual, shortcut_bn.state(), training=training)
            if mode != "none":
                y = F.add(y, shortcut)
            if activation:
                y = F.relu(y)
        # two consumers
        F.add(F.scale(y, 0.5), F.convert(y, dtype, "nhwc")).backward(arrays[2])
        results = {"y": y.data, "dx": x.grad, "residual": residual.grad}
        for i, layer in enumerate((bn, shortcut_bn)):
            results |= {f"dweight{i}": layer.weight.grad, f"dbias{i}": layer.bias.grad}
            results |= {f"pending{i}": layer.bn.pending_mean, f"variance{i}": layer.bn.pending_var}
            results[f"settled{i}"] = np.array(float(layer.bn.statistics.settled))
        found.append({name: result for name, result in results.items() if result is not None})
    assert found[0].keys() == found[1].keys()
    for name, expected in found[1].items():
        wanted = expected.astype(np.float64)
        # A number near zero may be on the other side after one rounding less: a few, which sums have in them.
        tolerance = ROUNDINGS[dtype] * (1 + np.abs(wanted).max()) * (5 if wanted.ndim == 1 else 1)
        off = np.abs(found[0][name].astype(np.float64) - wanted) > tolerance
        assert off.mean() <= (0.01 if dtype in ("float16", "bfloat16") else 0), name


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("mode", ["none", "raw", "normalised"])
@pytest.mark.parametrize("training", [True, False])
def test_central_differences(rng, training, mode, layout):
    bn, shortcut_bn = layers(rng, "float64", 3)
    g = rng.normal(size=(3, 3, 2, 4))
    arrays = {"x": rng.normal(size=g.shape), "residual": rng.normal(size=g.shape)}
    vectors = {"weight": bn.weight, "bias": bn.bias}
    if mode == "normalised":
        vectors |= {"shortcut weight": shortcut_bn.weight, "shortcut bias": shortcut_bn.bias}

    def compute(**given):
        made = {name: Tensor(np.array(a), requires_grad=True) for name, a in given.items()}
        for a in made.values():
            if layout == "nhwc":
                a.data = np.ascontiguousarray(a.data.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        y = F.batch_norm(
            made["x"],
            bn.state(),
            training=training,
            residual=None if mode == "none" else made["residual"],
            residual_bn=shortcut_bn.state() if mode == "normalised" else None,
            activation="relu",
        )
        return made, y

    def value():
        with no_grad():
            return float((compute(**arrays)[1].data * g).sum())

    leaves, y = compute(**arrays)
    y.backward(g)
    assert devices.memory_layout(y.data) == layout
    for name, values in {**arrays, **{name: p.data for name, p in vectors.items()}}.items():
        grad = vectors[name].grad if name in vectors else leaves[name].grad
        if mode == "none" and name == "residual":
            assert grad is None
            continue
        for index in np.ndindex(values.shape):
            kept = values[index]
            ends = []
            for step in (1e-6, -1e-6):
                values[index] = kept + step
                ends.append(value())
            values[index] = kept
            np.testing.assert_allclose(grad[index], (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-7, err_msg=name)


def test_gradients_of_two_consumers_are_not_added_by_the_engine(rng, monkeypatch):
    class Twice(Function):
        several_gradients = True

        def forward(self, x):
            return 2 * x

        def backward(self, *grads):
            self.seen.append(len(grads))
            return (2 * sum(grads),)

        seen: list[int] = []  # noqa: RUF012 -- of this test

    added = []
    monkeypatch.setattr(elementwise, "add", lambda a, b: added.append(1) or a + b)
    x = Tensor(rng.normal(size=(3, 4)), requires_grad=True)
    y = Twice.apply(x)
    z = Twice.apply(F.scale(y, 3.0))
    total = F.add(F.add(F.scale(y, 5.0), z), F.add(y, z))
    forward = len(added)
    g = rng.normal(size=(3, 4))
    total.backward(g)
    assert Twice.seen == [2, 3]
    assert len(added) == forward
    np.testing.assert_allclose(x.grad, 2 * (5 + 1 + 2 * 2 * 3) * g, rtol=1e-13)


def test_more_gradients_than_two(rng):
    bn, _ = layers(rng, "float64")
    x, r = (Tensor(rng.normal(size=(3, 5, 4, 4)), requires_grad=True) for _ in range(2))
    gradients = []
    for count in (1, 4):
        x.grad = r.grad = None
        y = F.batch_norm(x, bn.state(), training=True, residual=r, activation="relu")
        total = F.scale(y, 4 / count)
        for _ in range(count - 1):
            total = F.add(total, F.scale(y, 4 / count))
        total.backward(np.cos(np.arange(y.data.size)).reshape(y.shape))
        gradients.append((x.grad, r.grad))
    for one, four in zip(*gradients, strict=True):
        np.testing.assert_allclose(four, one, rtol=1e-12, atol=1e-12)


def test_frozen_parameters_and_accumulated_gradients(rng):
    bn, shortcut_bn = layers(rng, "float32")
    arrays = [rng.normal(size=(3, 5, 4, 4)).astype(np.float32) for _ in range(3)]

    def run():
        x = Tensor(arrays[0], requires_grad=True)
        y = F.batch_norm(
            x,
            bn.state(),
            training=True,
            residual=Tensor(arrays[1]),
            residual_bn=shortcut_bn.state(),
            activation="relu",
        )
        y.backward(arrays[2])
        return x.grad

    first = run()
    once = bn.weight.grad.copy(), shortcut_bn.bias.grad.copy()
    run()
    np.testing.assert_allclose(bn.weight.grad, 2 * once[0], rtol=1e-5)
    np.testing.assert_allclose(shortcut_bn.bias.grad, 2 * once[1], rtol=1e-5)
    bn.weight.requires_grad = False
    bn.weight.grad = None
    np.testing.assert_array_equal(run(), first)
    assert bn.weight.grad is None


@pytest.mark.parametrize("stem", ["imagenet", "small"])
@pytest.mark.parametrize("training", [True, False])
def test_a_fused_network_is_the_plain_one(rng, stem, training):
    x = rng.normal(size=(3, 3, 33, 32))
    results = []
    for fused in (True, False):
        model = models.ResNet((1, 1, 1, 2), 7, stem=stem, precision="float64", fused=fused, **CPU)
        model.train(training)
        y = model(x)
        F.cross_entropy(y, np.array([0, 5, 2])).backward()
        gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
        model.eval()
        results.append({"y": y.data, **gradients, **model.state_dict()})
    assert results[0].keys() == results[1].keys()
    for name, expected in results[1].items():
        np.testing.assert_allclose(results[0][name], expected, rtol=1e-9, atol=1e-11, err_msg=name)


def test_a_shortcut_with_a_frozen_batch_norm_keeps_its_statistics(rng):
    block = models.BasicBlock(4, 8, 2, {"precision": "float64", **CPU}, nn.Draws(0))
    plain = copy.deepcopy(block)
    plain.fused = False
    x = rng.normal(size=(2, 4, 6, 6))
    for one in (block, plain):
        one.downsample[1].training = False
    np.testing.assert_allclose(block(x).data, plain(x).data, rtol=1e-12, atol=1e-12)
    assert block.downsample[1].bn.pending_batches.tolist() == [0]


def test_bad_arguments_are_named(rng):
    bn, other = layers(rng, "float32")
    x = Tensor(rng.normal(size=(2, 5, 3, 3)).astype(np.float32))
    for error, match, options in (
        (ValueError, "activation: 'tanh'", {"activation": "tanh"}),
        (ValueError, "residual: residual_bn needs it", {"residual_bn": other.bn}),
        (ValueError, "residual_bn: expected another", {"residual": x, "residual_bn": bn.bn}),
        (ValueError, r"residual: shape \(2, 5, 3, 2\)", {"residual": x.data[..., :2]}),
        (TypeError, "residual: float64", {"residual": x.data.astype(np.float64)}),
        (TypeError, "residual: .*list", {"residual": [1.0]}),
    ):
        with pytest.raises(error, match=match):
            F.batch_norm(x, bn.bn, training=True, **options)
    assert bn.bn.pending_batches.tolist() == [0]
    norm = ops.Norm(*(np.ones(5, np.float32) for _ in range(4)))
    for error, match, call in (
        (ValueError, "dys: expected at least one", lambda: ops.backward([], x.data, norm)),
        (ValueError, r"dys\[0\]: expected shape", lambda: ops.backward([x.data[:1]], x.data, norm)),
        (ValueError, "mask: ", lambda: ops.backward([x.data], x.data, norm, relu=True, adds=True)),
        (ValueError, "residual: ", lambda: ops.backward([x.data], x.data, norm, residual_norm=norm)),
        (TypeError, "mean: ", lambda: ops.apply(x.data, norm._replace(mean=np.ones(5)))),
        (TypeError, "residual: ", lambda: ops.apply(x.data, norm, residual=x.data.astype(np.float16))),
        (ValueError, "inverse: ", lambda: ops.gradient_sums(x.data, x.data, norm._replace(inverse=norm.mean[:4]), 9)),
        (ValueError, "eps", lambda: ops.inverse_deviation(norm.mean, -1.0)),
    ):
        with pytest.raises(error, match=match):
            call()


def test_sums_are_those_of_the_whole_backward_pass(rng):
    x, dy = (rng.normal(size=(3, 5, 4, 4)) for _ in range(2))
    norm = ops.Norm(rng.normal(size=5), rng.normal(size=5), *ops.statistics(x, None, None, None, 0.1, 1e-5))
    means, dweight, dbias = ops.gradient_sums(dy, x, norm, 48, relu=True)
    gradients = ops.backward([dy], x, norm, relu=True)
    np.testing.assert_array_equal(dweight, gradients.dweight)
    np.testing.assert_array_equal(dbias, gradients.dbias)
    np.testing.assert_allclose(means * 48, [dbias, dweight], rtol=1e-13)
